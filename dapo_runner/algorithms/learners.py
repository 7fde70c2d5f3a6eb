"""Which learner a configuration asks for."""

from __future__ import annotations

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.pairs import PairLearner
from dapo_runner.algorithms.token_learner import TokenLearner
from dapo_runner.config import Config
from dapo_runner.policy.model import Policy
from dapo_runner.timing import StepClock


def make_learner(
    policy: Policy, config: Config, reference: Policy | None, clock: StepClock, critic: Policy | None = None
) -> Learner:
    """``critic``: the policy itself where they share a trunk."""
    if config.advantage.by_token:
        return TokenLearner(policy, config, reference, clock, critic)
    return (Learner if config.preference is None else PairLearner)(policy, config, reference, clock)
