"""Rollout engines: what turns prompts into completions. ``engine.py`` is the protocol, ``hf.py`` runs
anywhere, ``vllm.py`` is the fast one.
"""

from dapo_runner.rollout.engine import RolloutEngine
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.vllm import VLLMEngine

__all__ = ["HFEngine", "RolloutEngine", "VLLMEngine"]
