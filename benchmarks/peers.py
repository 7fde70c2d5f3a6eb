"""Other libraries' ways to the same loss, each through its own function, in the setting that served it best.

All of them are optional: the report names those that are not installed. None of the cross-entropy functions knows the
clipped objective: the log-probs are theirs (a token's loss is −ℓ), and the objective on top is eager PyTorch, O(N).
Functions that return only a mean run where the objective is that mean.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.configs import Config
from benchmarks.contestants import Contestant, Run, from_logprobs, training
from benchmarks.problem import Problem
from benchmarks.truth import Result

# Chosen on 512 tokens × V 49152 × H 576 in bfloat16, one AVX-512 core: three bare GEMMs 0.32 s, eager 0.61 s.
# torch's linear_cross_entropy: 17 s with its defaults (chunks of 8 tokens, float32 GEMMs), 2.4 s with their policy in
# one chunk, 0.6 s with the "balanced" policy in chunks of 512. On CUDA its defaults, which were measured there, stay.
_CHUNK_TOKENS = 512
# TRL's chunked log-probs: 2.4 s with its default tile, 2.5 s with 16384 and with the whole vocabulary.
# Liger: 1.4 s with its loss compiled or not; its default, compiled, stays.


PEERS: list[Contestant] = []
Find = Callable[[Problem], Callable[..., Any]]


def _from_losses(problem: Problem, losses: Callable[..., Tensor]) -> Run:
    """Return the call of a function (logits, ids) or (hidden, weight, ids) → losses [N] without a reduction."""
    return from_logprobs(problem, lambda *leaves: (-losses(*leaves, problem.tokens.target_ids, reduction="none"), None))


def _from_mean(problem: Problem, mean: Callable[..., Tensor]) -> Run:
    """Return the call of a function (hidden, weight, ids) → mean loss."""
    return training(problem, lambda *leaves: mean(*leaves, problem.tokens.target_ids))


def _peer(
    name: str, setting: str, level: str, *modules: str, call: Callable[..., Run] = from_logprobs, **more: Any
) -> Callable[[Find], Find]:
    """Add a row. The decorated function returns what ``call`` makes the timed call of."""

    def add(find: Find) -> Find:
        row = {"kind": "peer", "make": lambda problem: call(problem, find(problem)), **more}
        PEERS.append(Contestant(name, setting, level=level, modules=modules, **row))
        return find

    return add


def _no_entropy(config: Config) -> bool:
    return not config.entropy


def _takes_dapo(config: Config) -> bool:
    return config.mode == "train" and config.objective == "dapo"


def is_cross_entropy(config: Config) -> bool:
    """Return whether the objective is the mean of −ℓ: REINFORCE, where all advantages are 1 and all tokens live."""
    plain = config.objective == "reinforce" and config.n_sequences == 1 and config.live == 1.0
    return plain and config.mode == "train" and not config.entropy


# --- also on a CPU ----------------------------------------------------------------------------------------------------

_TRL = "trl.trainer.utils"


@_peer("TRL selective_log_softmax", "[B, L, V] as its trainers call it", "logits", _TRL, rounds_softmax=True)
def _trl_selective(problem: Problem) -> Callable[..., Any]:
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    by_sequence = (problem.tokens.n_sequences, -1)
    index = problem.tokens.target_ids.view(by_sequence)

    def logprobs_of(logits: Tensor) -> tuple[Tensor, Tensor | None]:
        padded = logits.view(*by_sequence, logits.shape[-1])  # it loops over the first dimension
        if not problem.config.entropy:
            return selective_log_softmax(padded, index).flatten(), None
        logprobs, entropy = selective_log_softmax_and_entropy(padded, index)
        return logprobs.flatten(), entropy.flatten()

    return logprobs_of


@_peer("TRL chunked log-probs", "its default tile", "hidden", _TRL, "trl.kernels")
def _trl_chunked(problem: Problem) -> Callable[..., Any]:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as TILE

    ids, outputs = problem.tokens.target_ids, ("entropy",) if problem.config.entropy else ()

    def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        found = ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, TILE, None, 1.0, outputs)
        return found[0], found[1]

    return logprobs_of


_LIGER = ("liger_kernel.chunked_loss", "torch._dynamo", "torch._inductor.compile_fx")


@_peer("Liger GRPO", "all sequences in one chunk", "hidden", *_LIGER, call=training, kind="compile", takes=_takes_dapo)
def _liger_hidden(problem: Problem) -> Callable[..., Any]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    tokens, batch = problem.tokens, problem.tokens.n_sequences
    clip = {"epsilon_low": 0.2, "epsilon_high": 0.28}
    # chunk_size counts sequences. All at once, because fewer chunks are faster and its inner tiles bound the memory.
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, chunk_size=batch, loss_type="dapo", **clip)
    ids, mask, old = (x.view(batch, -1) for x in (tokens.target_ids, tokens.mask.float(), tokens.old_logprobs))
    advantages = tokens.advantages.view(batch, -1)[:, 0].contiguous()

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        states = hidden.view(batch, -1, hidden.shape[-1])
        with ExitStack() as after:
            if problem.config.device == "cuda":  # its backward, in here, has float32 products: with TF32
                after.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision("high")
            return loss(states, weight, ids, mask, advantages, old_per_token_logps=old)[0]

    return loss_of


_MEAN: dict[str, Any] = {"call": _from_mean, "device": "cuda", "takes": is_cross_entropy}
_TORCH: dict[str, Any] = {"call": _from_losses, "takes": _no_entropy, "rounds_softmax": True}
_CHUNKED = f"torch's own, reduction none; its defaults, on a CPU balanced, chunks of {_CHUNK_TOKENS}"


@_peer("linear_cross_entropy", "torch's own, reduction none, logits held", "hidden", **_TORCH)
def _torch_linear(problem: Problem) -> Callable[..., Any]:
    return F.linear_cross_entropy


@_peer("linear_cross_entropy, chunked, mean", "torch's own, its defaults", "hidden", rounds_softmax=True, **_MEAN)
@_peer("linear_cross_entropy, chunked", _CHUNKED, "hidden", **_TORCH)
def _torch_chunked(problem: Problem) -> Callable[..., Any]:
    on_cpu = {"batch_chunk_size": _CHUNK_TOKENS, "acc_policy": "balanced"} if problem.config.device == "cpu" else {}
    return functools.partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions(**on_cpu))


# --- on CUDA devices only ---------------------------------------------------------------------------------------------


@_peer(
    "Liger GRPO, Triton",
    "triton_grpo_loss, in place",
    "logits",
    "liger_kernel.transformers.grpo_loss",
    call=lambda problem, run: run,
    device="cuda",
    takes=lambda config: _takes_dapo(config) and config.n_sequences == 1,
    destroys_logits=True,
)
def _liger_logits(problem: Problem) -> Run:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    tokens, padded = problem.tokens, problem.padded
    assert padded is not None
    ids, mask, old = (x[None] for x in (tokens.target_ids, tokens.mask.float(), tokens.old_logprobs))
    keywords = {"completion_mask": mask, "temperature": 1.0, "beta": 0.0, "eps_low": 0.2, "eps_high": 0.28}

    # [B, L + 1, V] for L tokens, as trainers call it: it leaves the last position's logits out.
    def run() -> Result:
        leaf = padded.detach().requires_grad_()
        advantages = tokens.advantages[:1]
        loss = triton_grpo_loss(leaf, old, None, ids, advantages, loss_type="dapo", reduce=True, **keywords)[0]
        (gradient,) = torch.autograd.grad(loss, leaf)
        return Result(loss=loss, gradients=(gradient[0, :-1],))

    return run


_LOSSES: dict[str, Any] = {"call": _from_losses, "device": "cuda", "takes": _no_entropy}
_QUACK = "quack.linear_cross_entropy"


@_peer("quack cross_entropy", "in place", "logits", "quack.cross_entropy", destroys_logits=True, **_LOSSES)
def _quack_logits(problem: Problem) -> Callable[..., Any]:
    function, in_place = import_module("quack.cross_entropy").cross_entropy, problem.config.mode == "train"
    return functools.partial(function, inplace_backward=in_place)


@_peer("quack linear_cross_entropy", "reduction none, in place, logits held", "hidden", _QUACK, **_LOSSES)
def _quack_linear(problem: Problem) -> Callable[..., Any]:
    function, in_place = import_module(_QUACK).linear_cross_entropy_func, problem.config.mode == "train"
    return lambda hidden, weight, ids, **how: function(hidden, weight, None, ids, inplace_backward=in_place, **how)


_CUT, _CCE = "cut_cross_entropy", {**_LOSSES, "rounds_softmax": True}  # it adds up gradients in bfloat16


@_peer("cut-cross-entropy", "apple's default, reduction none: gradients below 2⁻¹² left out", "hidden", _CUT, **_CCE)
def _cut(problem: Problem, filter_eps: str | None = "high") -> Callable[..., Any]:
    return functools.partial(import_module(_CUT).linear_cross_entropy, filter_eps=filter_eps)


@_peer("cut-cross-entropy, unfiltered", "apple's, reduction none, filter_eps=None", "hidden", _CUT, **_CCE)
def _cut_unfiltered(problem: Problem) -> Callable[..., Any]:
    return _cut(problem, None)


_VERL = "verl.utils.kernel.linear_cross_entropy"
_VERL_SETTING = "its fused kernel, reduction none, entropies included"


def import_verl() -> Any:
    """Import the kernel. verl imports ray, 76 MiB that the kernel does not use: if it is absent, a mock stands in."""
    lacks_ray = find_spec("ray") is None
    if lacks_ray:
        sys.modules["ray"] = mock.MagicMock()
    try:
        return import_module(_VERL)
    finally:
        if lacks_ray:
            del sys.modules["ray"]


@_peer("verl linear_cross_entropy", _VERL_SETTING, "hidden", _VERL, device="cuda", takes=lambda c: c.hidden % 128 == 0)
def _verl(problem: Problem) -> Callable[..., Any]:
    fused = import_verl().linear_cross_entropy

    # It returns log-probs, not their negatives, and always entropies.
    def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy = fused(hidden, weight, problem.tokens.target_ids, 1.0, "none")
        return logprobs, entropy if problem.config.entropy else None

    return logprobs_of


_SCALED = "liger_kernel.ops.fused_linear_scaled_cross_entropy"


@_peer("Liger scaled cross-entropy", "temperature 1; from 0.8.2 on", "hidden", _SCALED, device="cuda")
def _liger_scaled(problem: Problem) -> Callable[..., Any]:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction as Scaled

    ids, entropy = problem.tokens.target_ids, problem.config.entropy

    # On compute capability 9.0 its own kernels, elsewhere chunks of eager PyTorch.
    def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        out = Scaled.apply(hidden, weight, ids, return_entropy=entropy)
        return (-out[0], out[1]) if entropy else (-out, None)

    return logprobs_of


_LIGER_FUNCTIONS = "liger_kernel.transformers.functional"


@_peer("quack linear_cross_entropy, chunked", "its default chunks of 4096, tuned", "hidden", _QUACK, **_MEAN)
def _quack_chunked(problem: Problem) -> Callable[..., Any]:
    return import_module(_QUACK).chunked_linear_cross_entropy


@_peer("Liger fused linear cross-entropy", "its defaults", "hidden", _LIGER_FUNCTIONS, **_MEAN)
def _liger_fused(problem: Problem) -> Callable[..., Any]:
    return import_module(_LIGER_FUNCTIONS).liger_fused_linear_cross_entropy
