"""Rollout engines: what turns prompts into completions. ``engine.py`` is the protocol, ``hf.py`` runs
anywhere.
"""

from dapo_runner.rollout.engine import RolloutEngine
from dapo_runner.rollout.hf import HFEngine

__all__ = ["HFEngine", "RolloutEngine"]
