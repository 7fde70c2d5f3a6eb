"""Other libraries' kernels for CUDA devices, by their own functions. All optional; the report names who is absent.

None of the cross-entropy functions knows the clipped objective: the log-probs are theirs (a token's loss is −ℓ) and
the objective on top is eager PyTorch, O(N). The two that return a mean only run where the objective is that mean.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.configs import Config
from benchmarks.contestants import Contestant, Run, from_logprobs, hidden_level, logits_level, training
from benchmarks.problem import Problem
from benchmarks.truth import Result


def _liger_logits(problem: Problem) -> Run:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    tokens, padded = problem.tokens, problem.padded
    assert padded is not None
    ids, mask, old = (x[None] for x in (tokens.target_ids, tokens.mask.float(), tokens.old_logprobs))

    # [B, L + 1, V] for L tokens, as trainers call it: it leaves the last position's logits out.
    def loss_of(logits: Tensor) -> Tensor:
        loss: Tensor = triton_grpo_loss(
            logits,
            old,
            None,
            ids,
            tokens.advantages[:1],
            completion_mask=mask,
            temperature=1.0,
            beta=0.0,
            eps_low=0.2,
            eps_high=0.28,
            loss_type="dapo",
            reduce=True,
        )[0]
        return loss

    def run() -> Result:
        leaf = padded.detach().requires_grad_()
        loss = loss_of(leaf)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return Result(loss=loss, gradients=(gradient[0, :-1],))

    return run


def _quack_logits(problem: Problem) -> Run:
    from quack.cross_entropy import cross_entropy

    ids, in_place = problem.tokens.target_ids, problem.config.mode == "train"

    def logprobs_of(logits: Tensor) -> tuple[Tensor, None]:
        return -cross_entropy(logits, ids, reduction="none", inplace_backward=in_place), None

    return from_logprobs(problem, logprobs_of)


def _flash_attn_logits(problem: Problem) -> Run:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    ids, in_place = problem.tokens.target_ids, problem.config.mode == "train"

    def logprobs_of(logits: Tensor) -> tuple[Tensor, None]:
        return -cross_entropy_loss(logits, ids, inplace_backward=in_place)[0], None

    return from_logprobs(problem, logprobs_of)


def _quack_linear(problem: Problem) -> Run:
    from quack.linear_cross_entropy import linear_cross_entropy_func

    ids, in_place = problem.tokens.target_ids, problem.config.mode == "train"

    def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        losses = linear_cross_entropy_func(hidden, weight, None, ids, reduction="none", inplace_backward=in_place)
        return -losses, None

    return from_logprobs(problem, logprobs_of)


def _quack_chunked(problem: Problem) -> Run:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    ids = problem.tokens.target_ids
    return training(problem, lambda hidden, weight: chunked_linear_cross_entropy(hidden, weight, ids))


def _cut_cross_entropy(problem: Problem, filtered: bool) -> Run:
    from cut_cross_entropy import linear_cross_entropy

    ids, eps = problem.tokens.target_ids, "high" if filtered else None

    def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return -linear_cross_entropy(hidden, weight, ids, reduction="none", filter_eps=eps), None

    return from_logprobs(problem, logprobs_of)


def _verl_linear(problem: Problem) -> Run:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    ids = problem.tokens.target_ids

    # It gives log-probs, not their negatives, and entropies with them, asked for or not.
    def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy = linear_cross_entropy(hidden, weight, ids, 1.0, "none")
        return logprobs, entropy if problem.config.entropy else None

    return from_logprobs(problem, logprobs_of)


def _megatron_linear(problem: Problem) -> Run:
    from megatron.core.fusions.fused_linear_cross_entropy import linear_cross_entropy

    ids = problem.tokens.target_ids

    def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return -linear_cross_entropy(hidden, weight, ids, reduction="none"), None

    return from_logprobs(problem, logprobs_of)


def _liger_scaled(problem: Problem) -> Run:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction as Scaled

    ids, entropy = problem.tokens.target_ids, problem.config.entropy

    # Of compute capability 9.0 its own kernels, elsewhere chunks of eager PyTorch.
    def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        out = Scaled.apply(hidden, weight, ids, return_entropy=entropy)
        return (-out[0], out[1]) if entropy else (-out, None)

    return from_logprobs(problem, logprobs_of)


def _liger_cross_entropy(problem: Problem) -> Run:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    ids = problem.tokens.target_ids
    return training(problem, lambda hidden, weight: liger_fused_linear_cross_entropy(hidden, weight, ids))


def _on_cuda(config: Config) -> bool:
    return config.device == "cuda" and not config.entropy


def is_cross_entropy(config: Config) -> bool:
    """Is the configuration's objective the plain mean of −ℓ? REINFORCE is, where all advantages are 1 and all live."""
    return config.objective == "reinforce" and config.n_sequences == 1 and config.live == 1.0


def _liger_logits_takes(config: Config) -> bool:
    trains = config.mode == "train" and config.objective == "dapo"
    return _on_cuda(config) and logits_level(config) and trains and config.n_sequences == 1


def _from_logits(config: Config) -> bool:
    return _on_cuda(config) and logits_level(config)


def _from_hidden(config: Config) -> bool:
    return _on_cuda(config) and hidden_level(config)


def _verl_takes(config: Config) -> bool:
    # Its kernels want a hidden size that 128 divides.
    return config.device == "cuda" and hidden_level(config) and config.hidden % 128 == 0


def _mean_from_hidden(config: Config) -> bool:
    return _from_hidden(config) and config.mode == "train" and is_cross_entropy(config)


GPU_PEERS: tuple[Contestant, ...] = (
    Contestant(
        "Liger GRPO, Triton",
        "triton_grpo_loss, in place",
        "peer",
        _liger_logits,
        _liger_logits_takes,
        modules=("liger_kernel.transformers.grpo_loss",),
        destroys_logits=True,
    ),
    Contestant(
        "quack cross_entropy",
        "reduction none, in place",
        "peer",
        _quack_logits,
        _from_logits,
        modules=("quack.cross_entropy",),
        destroys_logits=True,
    ),
    Contestant(
        "flash-attn cross_entropy_loss",
        "its Triton kernel, in place",
        "peer",
        _flash_attn_logits,
        _from_logits,
        modules=("flash_attn.ops.triton.cross_entropy",),
        destroys_logits=True,
    ),
    Contestant(
        "quack linear_cross_entropy",
        "reduction none, in place, logits held",
        "peer",
        _quack_linear,
        _from_hidden,
        copies=(1.0, 0.0),
        modules=("quack.linear_cross_entropy",),
    ),
    Contestant(
        "cut-cross-entropy",
        "apple's, reduction none, its default: small gradients left out",
        "peer",
        functools.partial(_cut_cross_entropy, filtered=True),
        _from_hidden,
        modules=("cut_cross_entropy",),
    ),
    Contestant(
        "cut-cross-entropy, unfiltered",
        "apple's, reduction none, filter_eps=None",
        "peer",
        functools.partial(_cut_cross_entropy, filtered=False),
        _from_hidden,
        modules=("cut_cross_entropy",),
    ),
    Contestant(
        "verl linear_cross_entropy",
        "its fused kernel, reduction none, entropies included",
        "peer",
        _verl_linear,
        _verl_takes,
        modules=("verl.utils.kernel.linear_cross_entropy",),
    ),
    Contestant(
        "Liger scaled cross-entropy",
        "temperature 1; from 0.8.2 on",
        "peer",
        _liger_scaled,
        lambda config: config.device == "cuda" and hidden_level(config),
        modules=("liger_kernel.ops.fused_linear_scaled_cross_entropy",),
    ),
    Contestant(
        "Megatron linear_cross_entropy",
        "reduction none; from its sources: the wheels (0.19.2) are without it",
        "peer",
        _megatron_linear,
        _from_hidden,
        modules=("megatron.core.fusions.fused_linear_cross_entropy",),
    ),
    Contestant(
        "quack linear_cross_entropy, chunked",
        "its default chunks of 4096, tuned",
        "peer",
        _quack_chunked,
        _mean_from_hidden,
        modules=("quack.linear_cross_entropy",),
    ),
    Contestant(
        "Liger fused linear cross-entropy",
        "its defaults",
        "peer",
        _liger_cross_entropy,
        _mean_from_hidden,
        modules=("liger_kernel.transformers.functional",),
    ),
)
