"""Other libraries' ways to the same loss, each in the setting that served it best here. All optional."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.configs import Config
from benchmarks.contestants import (
    Contestant,
    Run,
    from_logprobs,
    hidden_level,
    in_the_logits_dtype,
    logits_level,
    training,
)
from benchmarks.problem import Problem

# Chosen on 512 tokens × V 49152 × H 576 in bfloat16, one AVX-512 core: three bare GEMMs 0.32 s, eager 0.61 s.
# torch's linear_cross_entropy: 17 s with default options (chunks of 8 tokens, float32 GEMMs), 2.4 s with its default
# policy in one chunk, 0.6 s with the "balanced" policy in chunks of 512.
_CHUNK_TOKENS = 512
# TRL's chunked log-probs: 2.4 s with its default tile, 2.5 s with 16384 and with the whole vocabulary.
# Liger: 1.4 s with its loss compiled or not; its default, compiled, stays.


def _trl_selective(problem: Problem) -> Run:
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    ids = problem.tokens.target_ids
    by_sequence = (problem.tokens.n_sequences, -1)

    def logprobs_of(logits: Tensor) -> tuple[Tensor, Tensor | None]:
        # It loops over the first dimension; its trainers hand it [B, L, V].
        padded, index = logits.view(*by_sequence, logits.shape[-1]), ids.view(by_sequence)
        if problem.config.entropy:
            logprobs, entropy = selective_log_softmax_and_entropy(padded, index)
            return logprobs.flatten(), entropy.flatten()
        return selective_log_softmax(padded, index).flatten(), None

    return from_logprobs(problem, logprobs_of)


def _trl_chunked(problem: Problem) -> Run:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    config, ids = problem.config, problem.tokens.target_ids
    outputs = ("entropy",) if config.entropy else ()

    def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, None, ids, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
        )
        return logprobs, entropy

    return from_logprobs(problem, logprobs_of)


def _liger(problem: Problem) -> Run:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    tokens = problem.tokens
    batch = tokens.n_sequences
    # chunk_size counts sequences: all at once, because fewer chunks are faster and its inner tiles bound the memory.
    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        use_ref_model=False,
        chunk_size=batch,
        epsilon_low=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
    )
    ids, mask, old = (x.view(batch, -1) for x in (tokens.target_ids, tokens.mask.float(), tokens.old_logprobs))
    advantages = tokens.advantages.view(batch, -1)[:, 0].contiguous()

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        value: Tensor = loss(
            hidden.view(batch, -1, hidden.shape[-1]), weight, ids, mask, advantages, old_per_token_logps=old
        )[0]
        return value

    return training(problem, loss_of)


def _linear_cross_entropy(problem: Problem, chunked: bool) -> Run:
    ids = problem.tokens.target_ids
    options = None
    if chunked:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=_CHUNK_TOKENS, acc_policy="balanced")

    def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return -F.linear_cross_entropy(hidden, weight, ids, reduction="none", options=options), None

    return from_logprobs(problem, logprobs_of)


def _has_linear_cross_entropy(config: Config) -> bool:
    available = hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")
    return hidden_level(config) and available and not config.entropy


def _liger_takes(config: Config) -> bool:
    return hidden_level(config) and config.mode == "train" and config.objective == "dapo"


PEERS: tuple[Contestant, ...] = (
    Contestant(
        "TRL selective_log_softmax",
        "[B, L, V] as its trainers call it",
        "peer",
        _trl_selective,
        logits_level,
        rounding=in_the_logits_dtype,
        copies=(2.5, 0.0),
        modules=("trl.trainer.utils",),
        for_gpus=True,
    ),
    Contestant(
        "TRL chunked log-probs",
        "its default tile",
        "peer",
        _trl_chunked,
        hidden_level,
        modules=("trl.trainer.utils", "trl.kernels"),
        for_gpus=True,
    ),
    Contestant(
        "Liger GRPO",
        "all sequences in one chunk",
        "peer",
        _liger,
        _liger_takes,
        modules=("liger_kernel.chunked_loss", "torch._dynamo", "torch._inductor.compile_fx"),
        for_gpus=True,
    ),
    Contestant(
        "linear_cross_entropy",
        "torch's own, reduction none, logits held",
        "peer",
        functools.partial(_linear_cross_entropy, chunked=False),
        _has_linear_cross_entropy,
        rounding=in_the_logits_dtype,
        copies=(4.0, 0.0),
    ),
    Contestant(
        "linear_cross_entropy, chunked",
        f"torch's own, reduction none, balanced, chunks of {_CHUNK_TOKENS}",
        "peer",
        functools.partial(_linear_cross_entropy, chunked=True),
        _has_linear_cross_entropy,
        rounding=in_the_logits_dtype,
    ),
)
