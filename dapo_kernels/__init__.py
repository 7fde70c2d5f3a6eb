"""Fused loss kernels for reinforcement learning on language models: the DAPO loss and its relatives."""

from dapo_kernels.backends import use_backend
from dapo_kernels.linear import linear_dapo_loss, linear_token_logprobs
from dapo_kernels.loss import dapo_loss, policy_loss, token_logprobs
from dapo_kernels.metrics import summarize
from dapo_kernels.objectives import OBJECTIVES, Objective

__all__ = [
    "OBJECTIVES",
    "Objective",
    "dapo_loss",
    "linear_dapo_loss",
    "linear_token_logprobs",
    "policy_loss",
    "summarize",
    "token_logprobs",
    "use_backend",
]
