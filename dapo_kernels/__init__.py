"""Fused loss kernels for reinforcement learning of language models: the DAPO loss and related losses."""

from dapo_kernels.backends import use_backend
from dapo_kernels.distillation import DistillationOutput, linear_distillation_loss
from dapo_kernels.layout import SamplingMask
from dapo_kernels.logprobs import TokenStats, linear_token_logprobs, token_logprobs
from dapo_kernels.losses import (
    LossOutput,
    dapo_loss,
    linear_dapo_loss,
    policy_loss,
    policy_loss_from_hidden,
    policy_loss_from_logits,
)
from dapo_kernels.metrics import reduce_metrics, summarize
from dapo_kernels.objectives import OBJECTIVES, Objective
from dapo_kernels.objectives import select as select
from dapo_kernels.objectives.own import OwnTokens
from dapo_kernels.preference import (
    PreferenceOutput,
    linear_preference_loss,
    preference_loss,
    preference_loss_from_logprobs,
)
from dapo_kernels.records import LoraFactors

__version__ = "0.1.0"

__all__ = [
    "OBJECTIVES",
    "DistillationOutput",
    "LoraFactors",
    "LossOutput",
    "Objective",
    "OwnTokens",
    "PreferenceOutput",
    "SamplingMask",
    "TokenStats",
    "__version__",
    "dapo_loss",
    "linear_dapo_loss",
    "linear_distillation_loss",
    "linear_preference_loss",
    "linear_token_logprobs",
    "policy_loss",
    "policy_loss_from_hidden",
    "policy_loss_from_logits",
    "preference_loss",
    "preference_loss_from_logprobs",
    "reduce_metrics",
    "summarize",
    "token_logprobs",
    "use_backend",
]
