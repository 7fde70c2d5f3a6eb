"""Supervised fine-tuning, `dapo sft`: the policy, the learner and the checkpoints of `dapo train` over examples."""
