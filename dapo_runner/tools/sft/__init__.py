"""Supervised fine-tuning, `dapo sft`: policy, learner and checkpoints are those of `dapo train`."""
