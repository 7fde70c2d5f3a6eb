"""Who runs: the bare passes everything is divided by, dapo_kernels, eager PyTorch, torch.compile. ``peers.py``: others.

A contestant makes, from a problem, a function without arguments: that call is what the clock contains. In
"train" mode it is the loss and ``torch.autograd.grad`` of it with respect to logits, or hidden states and head, as
leaves: fresh gradient tensors, without the copy that accumulation into ``.grad`` can add. In "forward" mode it runs
under ``no_grad``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.configs import LORA_HEADS, Config
from benchmarks.formulas import FORMULAS, OVERRIDES, Tokens
from benchmarks.problem import Problem
from benchmarks.truth import Result
from dapo_kernels import (
    LoraFactors,
    SamplingMask,
    dapo_loss,
    linear_dapo_loss,
    linear_token_logprobs,
    token_logprobs,
    use_backend,
)
from dapo_kernels.backends import available_backends

Run = Callable[[], Result]
_RANK = 16


@dataclass(frozen=True)
class Contestant:
    """One way to do the work.

    Attributes:
        setting: how it is used, in a few words, for the report.
        make: problem → the timed call; buffers it may keep are allocated here.
        kind: "denominator", "ours", "eager", "compile" or "peer".
        takes: which configurations it can do at all.
        rounding: the row of ``truth.TOLERANCES`` for a dtype.
        copies: [N, V] tensors held at the peak beyond the inputs, in the logits' dtype and in float32: decides
            beforehand whether a configuration fits this machine.
        modules: what it imports; the first one's package must be installed.
        backend: of dapo_kernels, where it is not the device's default.
        for_gpus: its authors wrote it for GPUs; in tables of a CPU it stands apart.
        destroys_logits: it overwrites the caller's logits. It is compared with our call that does so too, every other
            contestant with our call that leaves the logits alone.
    """

    name: str
    setting: str
    kind: str
    make: Callable[[Problem], Run]
    takes: Callable[[Config], bool] = lambda config: True
    rounding: Callable[[str], str] = lambda dtype: "bfloat16 tensors" if dtype == "bfloat16" else dtype
    copies: tuple[float, float] = (0.0, 0.0)
    modules: tuple[str, ...] = ()
    backend: str | None = None
    for_gpus: bool = False
    destroys_logits: bool = False

    def missing(self) -> str | None:
        """Why it cannot run in this environment."""
        if self.backend is not None:
            return available_backends().get(self.backend, f"dapo_kernels has no backend {self.backend!r}")
        packages = {module.partition(".")[0] for module in self.modules}
        absent = sorted(package for package in packages if importlib.util.find_spec(package) is None)
        return f"{', '.join(absent)} is not installed" if absent else None

    def extra_bytes(self, config: Config) -> int:
        """Estimate of the peak beyond the inputs, gradients of hidden states and head included."""
        own, wide = self.copies
        logits = config.n_tokens * config.vocab
        head = (config.n_tokens + config.vocab) * config.hidden
        return int(logits * (own * config.torch_dtype.itemsize + wide * 4)) + 6 * head


def logits_level(config: Config) -> bool:
    return config.level == "logits"


def hidden_level(config: Config) -> bool:
    return config.level == "hidden"


def training(problem: Problem, loss_of: Callable[..., Tensor]) -> Run:
    """The timed call of anything that maps the inputs to a loss."""

    def run() -> Result:
        leaves = problem.inputs()
        loss = loss_of(*leaves)
        return Result(loss=loss, gradients=torch.autograd.grad(loss, leaves))

    return run


def from_logprobs(problem: Problem, logprobs_of: Callable[..., tuple[Tensor, Tensor | None]]) -> Run:
    """The timed call of anything that maps the inputs to (log-probs, entropy): the loss on top is eager."""
    config = problem.config
    if config.mode == "train":
        formula = FORMULAS[config.objective]

        def loss_of(*leaves: Tensor) -> Tensor:
            logprobs, entropy = logprobs_of(*leaves)
            return formula(logprobs, problem.tokens._replace(entropy=entropy))

        return training(problem, loss_of)

    def run() -> Result:
        with torch.no_grad():
            logprobs, entropy = logprobs_of(*problem.inputs())
        return Result(logprobs=logprobs, entropy=entropy)

    return run


# --- denominators ----------------------------------------------------------------------------------------------------


def _mul(problem: Problem, live: bool = False) -> Run:
    assert problem.logits is not None
    parts = [problem.logits[rows] for rows in problem.live_rows()] if live else [problem.logits]

    def run() -> Result:
        for part in parts:
            part.mul_(1.0)
        return Result()

    return run


def _copy(problem: Problem) -> Run:
    """What a GPU calls its bandwidth: every logit read once and written once, by the library's own copy."""

    def run() -> Result:
        assert problem.logits is not None
        assert problem.pristine is not None
        problem.logits.copy_(problem.pristine)
        return Result()

    return run


def _gemms(problem: Problem, live: bool = False) -> Run:
    """logits = h·Wᵀ, and when training dh = dlogits·W and dW = dlogitsᵀ·h, into buffers that exist.

    The logits stand in for dlogits: a GEMM takes as long whatever the ordinary numbers in it. Of the live tokens
    alone, their hidden states lie gathered beforehand.
    """
    hidden, weight = problem.head()
    if live:
        hidden = hidden[problem.tokens.mask]
    dhidden, dweight = torch.ones_like(hidden), torch.ones_like(weight)
    logits = hidden.new_ones(hidden.shape[0], weight.shape[0])
    train = problem.config.mode == "train"

    def run() -> Result:
        torch.mm(hidden, weight.t(), out=logits)
        if train:
            torch.mm(logits, weight, out=dhidden)
            torch.mm(logits.t(), hidden, out=dweight)
        return Result()

    return run


# --- dapo_kernels ----------------------------------------------------------------------------------------------------


def _ours_from_logits(inplace: bool) -> Callable[[Problem], Run]:
    def make(problem: Problem) -> Run:
        config, tokens, cu_seqlens = problem.config, problem.tokens, _cu_seqlens(problem.tokens)
        lists = _sampling_mask(problem)
        if config.mode == "forward":

            def logprobs_of(logits: Tensor) -> tuple[Tensor, Tensor | None]:
                stats = token_logprobs(logits, tokens.target_ids, entropy=config.entropy)
                return stats.logprobs, stats.entropy

            return from_logprobs(problem, logprobs_of)

        def loss_of(logits: Tensor) -> Tensor:
            out = dapo_loss(
                logits,
                tokens.target_ids,
                tokens.old_logprobs,
                tokens.advantages,
                objective=config.objective,
                mask=tokens.mask,
                sampling_mask=lists,
                cu_seqlens=cu_seqlens,
                inplace_backward=inplace,
                **OVERRIDES.get(config.objective, {}),
            )
            return out.loss

        return training(problem, loss_of)

    return make


def _on_backend(name: str, make: Callable[[Problem], Run]) -> Callable[[Problem], Run]:
    def make_there(problem: Problem) -> Run:
        there = make(problem)

        def run() -> Result:
            with use_backend(name):
                return there()

        return run

    return make_there


def _a_program_a_row(make: Callable[[Problem], Run]) -> Callable[[Problem], Run]:
    """The Triton kernel as registers alone would have it, without ``residency.programs``."""
    return _with("dapo_kernels.backends.triton", "programs_for", lambda n, logits: n, _on_backend("triton", make))


def _with(module: str, name: str, value: Any, make: Callable[[Problem], Run]) -> Callable[[Problem], Run]:
    """With another choice in the place of one that is not an option of any call."""

    def make_there(problem: Problem) -> Run:
        there = make(problem)

        def run() -> Result:
            place = importlib.import_module(module)
            kept = getattr(place, name)
            setattr(place, name, value)
            try:
                return there()
            finally:
                setattr(place, name, kept)

        return run

    return make_there


def _on_each_backend(make: Callable[[Problem], Run], setting: str, takes: Callable[[Config], bool]) -> list[Contestant]:
    """The CUDA backends one beside the other; which of them is the default the row before them shows."""
    return [
        Contestant(
            f"dapo_kernels, {name}",
            f"{setting}, use_backend({name!r})",
            "ours",
            _on_backend(name, make),
            lambda config: takes(config) and config.device == "cuda",
            backend=name,
        )
        for name in ("triton", "cuda")
    ]


def _ours_with_lora(problem: Problem, frozen: bool) -> Run:
    """B = 0, as adapters start: the logits, and the gradient that is checked, are those of the plain head."""
    tokens, (hidden, weight) = problem.tokens, problem.head()
    a = torch.randn(_RANK, hidden.shape[1]).to(weight)
    b = weight.new_zeros(weight.shape[0], _RANK)

    def run() -> Result:
        states, head = problem.inputs()
        head.requires_grad_(not frozen)
        factors = LoraFactors(a.detach().requires_grad_(), b.detach().requires_grad_(), 2.0)
        per_token = (tokens.target_ids, tokens.old_logprobs, tokens.advantages)
        loss = linear_dapo_loss(states, head, *per_token, mask=tokens.mask, lora=factors).loss
        leaves = (states,) if frozen else (states, head)
        return Result(loss=loss, gradients=torch.autograd.grad(loss, (*leaves, *factors[:2]))[: len(leaves)])

    return run


def _ours_from_hidden(problem: Problem, host_sync: bool | None = None, chunk_bytes: int | None = None) -> Run:
    config, tokens, cu_seqlens = problem.config, problem.tokens, _cu_seqlens(problem.tokens)
    lists = _sampling_mask(problem)
    if config.mode == "forward":

        def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
            stats = linear_token_logprobs(hidden, weight, tokens.target_ids, entropy=config.entropy)
            return stats.logprobs, stats.entropy

        return from_logprobs(problem, logprobs_of)

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        out = linear_dapo_loss(
            hidden,
            weight,
            tokens.target_ids,
            tokens.old_logprobs,
            tokens.advantages,
            objective=config.objective,
            mask=tokens.mask,
            sampling_mask=lists,
            cu_seqlens=cu_seqlens,
            host_sync=host_sync,
            chunk_bytes=chunk_bytes,
            **OVERRIDES.get(config.objective, {}),
        )
        return out.loss

    return training(problem, loss_of)


def _sampling_mask(problem: Problem) -> SamplingMask | None:
    kept = problem.kept()
    if kept is None:
        return None
    n, k = kept.shape
    return SamplingMask(kept.flatten(), torch.arange(n + 1, device=kept.device) * k)


def _cu_seqlens(tokens: Tokens) -> Tensor:
    n = len(tokens.target_ids)
    step = n // tokens.n_sequences
    return torch.arange(0, n + 1, step, dtype=torch.int32, device=tokens.target_ids.device)


# --- eager PyTorch and torch.compile ---------------------------------------------------------------------------------


def eager_logprobs(logits: Tensor, target_ids: Tensor, entropy: bool, upcast: bool) -> tuple[Tensor, Tensor | None]:
    """log_softmax and gather, the usual way, in the logits' dtype or in float32."""
    everything = torch.log_softmax(logits.float() if upcast else logits, dim=-1)
    logprobs = everything.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(everything.exp() * everything).sum(-1) if entropy else None


def _eager(upcast: bool, compiled: bool) -> Callable[[Problem], Run]:
    def make(problem: Problem) -> Run:
        config, ids = problem.config, problem.tokens.target_ids

        def logprobs_of(*leaves: Tensor) -> tuple[Tensor, Tensor | None]:
            logits = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].t()
            return eager_logprobs(logits, ids, config.entropy, upcast)

        if not compiled:
            return from_logprobs(problem, logprobs_of)
        if config.mode == "forward":
            return from_logprobs(problem, torch.compile(logprobs_of, fullgraph=True, dynamic=False))

        # Loss included, so that the compiler may fuse all it can.
        def loss_of(*leaves: Tensor) -> Tensor:
            logprobs, entropy = logprobs_of(*leaves)
            return FORMULAS[config.objective](logprobs, problem.tokens._replace(entropy=entropy))

        return training(problem, torch.compile(loss_of, fullgraph=True, dynamic=False))

    return make


def in_the_logits_dtype(dtype: str) -> str:
    """Rounding of a softmax that runs in the logits' own dtype."""
    return "bfloat16 softmax" if dtype == "bfloat16" else dtype


def _narrow(config: Config) -> bool:
    return config.dtype != "float32"


_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")

CONTESTANTS: tuple[Contestant, ...] = (
    # Before mul_: the first denominator of a field is the one that figures are divided by.
    Contestant(
        "copy_",
        "one copy onto the logits",
        "denominator",
        _copy,
        lambda config: logits_level(config) and config.device == "cuda",
    ),
    Contestant("mul_", "one bare in-place pass over the logits", "denominator", _mul, logits_level),
    Contestant(
        "mul_, live rows",
        "the pass over the rows that train",
        "denominator",
        functools.partial(_mul, live=True),
        lambda config: logits_level(config) and config.live < 1,
    ),
    Contestant(
        "three GEMMs",
        "logits, dhidden, dweight into existing buffers",
        "denominator",
        _gemms,
        lambda config: hidden_level(config) and config.mode == "train",
        copies=(1.0, 0.0),
    ),
    Contestant(
        "three GEMMs, live tokens",
        "of the tokens that train alone",
        "denominator",
        functools.partial(_gemms, live=True),
        lambda config: hidden_level(config) and config.mode == "train" and config.live < 1,
        copies=(1.0, 0.0),
    ),
    Contestant(
        "one GEMM",
        "logits into an existing buffer",
        "denominator",
        _gemms,
        lambda config: hidden_level(config) and config.mode == "forward",
        copies=(1.0, 0.0),
    ),
    Contestant(
        "dapo_kernels", "inplace_backward=True", "ours", _ours_from_logits(True), logits_level, destroys_logits=True
    ),
    Contestant(
        "dapo_kernels, new gradient",
        "inplace_backward=False",
        "ours",
        _ours_from_logits(False),
        lambda config: logits_level(config) and config.mode == "train",
        copies=(1.0, 0.0),
    ),
    *_on_each_backend(_ours_from_logits(True), "in place", logits_level),
    Contestant(
        "dapo_kernels, triton, a program a row",
        "in place, rows in flight as registers allow",
        "ours",
        _a_program_a_row(_ours_from_logits(True)),
        lambda config: logits_level(config) and config.device == "cuda",
        backend="triton",
    ),
    Contestant("dapo_kernels", "default chunks", "ours", _ours_from_hidden, hidden_level),
    *(
        Contestant(
            name,
            f"LoRA factors of rank {_RANK}, head {'frozen' if frozen else 'trained'}",
            "ours",
            functools.partial(_ours_with_lora, frozen=frozen),
            lambda config: config.lora,
        )
        for name, frozen in zip(LORA_HEADS, (True, False), strict=True)
    ),
    *_on_each_backend(_ours_from_hidden, "default chunks", hidden_level),
    Contestant(
        "dapo_kernels, no wait",
        "host_sync=False: dead tokens go through the GEMMs",
        "ours",
        functools.partial(_ours_from_hidden, host_sync=False),
        lambda config: hidden_level(config) and config.device == "cuda" and config.mode == "train" and config.live < 1,
    ),
    Contestant(
        "eager",
        "log_softmax + gather in the logits' dtype",
        "eager",
        _eager(upcast=False, compiled=False),
        rounding=in_the_logits_dtype,
        copies=(4.0, 0.0),
    ),
    Contestant(
        "eager, softmax in fp32",
        "log_softmax of logits.float()",
        "eager",
        _eager(upcast=True, compiled=False),
        _narrow,
        copies=(1.0, 3.0),
    ),
    Contestant(
        "torch.compile",
        "eager and the loss, fullgraph, warm",
        "compile",
        _eager(upcast=False, compiled=True),
        rounding=in_the_logits_dtype,
        copies=(2.0, 1.0),
        modules=_COMPILER,
    ),
    Contestant(
        "torch.compile, softmax in fp32",
        "eager in fp32 and the loss, fullgraph, warm",
        "compile",
        _eager(upcast=True, compiled=True),
        _narrow,
        copies=(2.0, 1.0),
        modules=_COMPILER,
    ),
)
