"""The contestants of this project and of plain PyTorch; ``peers.py`` has those of other libraries.

A contestant turns a problem into a function without arguments, and that call is what is timed. In "train" mode it
computes the loss and ``torch.autograd.grad`` of it with respect to leaf logits, or leaf hidden states and head: fresh
gradient tensors, without the copy that accumulation into ``.grad`` can add. In "forward" mode it runs under
``no_grad``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.configs import BACKENDS, PATHS, Config
from benchmarks.formulas import FORMULAS, OVERRIDES
from benchmarks.problem import Problem
from benchmarks.truth import Result
from dapo_kernels import (
    dapo_loss,
    linear_dapo_loss,
    linear_token_logprobs,
    token_logprobs,
    use_backend,
)
from dapo_kernels.backends import available_backends

Run = Callable[[], Result]


def _own_rounding(dtype: str) -> str:
    return "bfloat16 tensors" if dtype == "bfloat16" else dtype


def softmax_rounding(dtype: str) -> str:
    """Return the tolerance of a softmax that runs in the dtype of the logits."""
    return "bfloat16 softmax" if dtype == "bfloat16" else dtype


@dataclass(frozen=True)
class Contestant:
    """One way to do the work.

    Attributes:
        setting: how it is used, in a few words, for the report.
        kind: "denominator", "ours", "eager", "compile" or "peer".
        make: problem → the timed call; it may allocate buffers that are kept.
        level, device: of the configurations it can do; ``None`` is all.
        takes: further conditions on the configuration.
        rounding: dtype → row of ``truth.TOLERANCES``.
        copies: [N, V] tensors at the peak beyond the inputs, in the logits' dtype and in float32. Decides beforehand
            whether a configuration fits the memory.
        modules: what it imports; the first one's package must be installed.
        backend: of dapo_kernels, where it is not the device's default.
        destroys_logits: overwrites the caller's logits. Such a contestant is compared with our call that does so too,
            every other one with our call that leaves the logits alone.
    """

    name: str
    setting: str
    kind: str
    make: Callable[[Problem], Run]
    level: str | None = None
    device: str | None = None
    takes: Callable[[Config], bool] = lambda config: True
    rounding: Callable[[str], str] = _own_rounding
    copies: tuple[float, float] = (0.0, 0.0)
    modules: tuple[str, ...] = ()
    backend: str | None = None
    destroys_logits: bool = False

    def can_do(self, config: Config) -> bool:
        return self.level in (None, config.level) and self.device in (None, config.device) and self.takes(config)

    def missing(self) -> str | None:
        """Return why it cannot run in this environment."""
        if self.backend is not None:
            return available_backends().get(self.backend, f"dapo_kernels has no backend {self.backend!r}")
        packages = {module.partition(".")[0] for module in self.modules}
        absent = sorted(package for package in packages if importlib.util.find_spec(package) is None)
        return f"{', '.join(absent)} is not installed" if absent else None

    def extra_bytes(self, config: Config) -> int:
        """Estimate the peak beyond the inputs, gradients of hidden states and head included."""
        own, wide = self.copies
        logits = config.n_tokens * config.vocab
        head = (config.n_tokens + config.vocab) * config.hidden
        return int(logits * (own * config.torch_dtype.itemsize + wide * 4)) + 6 * head


def training(problem: Problem, loss_of: Callable[..., Tensor]) -> Run:
    """Return the timed call of a function that maps the inputs to a loss."""

    def run() -> Result:
        leaves = problem.inputs()
        loss = loss_of(*leaves)
        return Result(loss=loss, gradients=torch.autograd.grad(loss, leaves))

    return run


def from_logprobs(problem: Problem, logprobs_of: Callable[..., tuple[Tensor, Tensor | None]]) -> Run:
    """Return the timed call of a function that maps the inputs to (log-probs, entropy). The loss on top is eager."""
    if problem.config.mode == "train":

        def loss_of(*leaves: Tensor) -> Tensor:
            logprobs, entropy = logprobs_of(*leaves)
            return FORMULAS[problem.config.objective](logprobs, problem.tokens._replace(entropy=entropy))

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
    """Read every logit once and write it once: the usual definition of a GPU's bandwidth."""

    def run() -> Result:
        assert problem.logits is not None
        assert problem.pristine is not None
        problem.logits.copy_(problem.pristine)
        return Result()

    return run


def _gemms(problem: Problem, live: bool = False) -> Run:
    """logits = h·Wᵀ, and when training dh = dlogits·W and dW = dlogitsᵀ·h, into existing buffers.

    The logits stand in for dlogits: the time of a GEMM does not depend on the numbers in it. The hidden states of the
    live tokens are gathered beforehand.
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


def _loss_keywords(problem: Problem) -> dict[str, Any]:
    tokens, objective = problem.tokens, problem.config.objective
    n = len(tokens.target_ids)
    step, device = n // tokens.n_sequences, tokens.target_ids.device
    return {
        "mask": tokens.mask,
        "cu_seqlens": torch.arange(0, n + 1, step, dtype=torch.int32, device=device),
        "objective": objective,
        **OVERRIDES.get(objective, {}),
    }


def ours_from_logits(problem: Problem, inplace: bool = True) -> Run:
    config, tokens = problem.config, problem.tokens
    if config.mode == "forward":

        def logprobs_of(logits: Tensor) -> tuple[Tensor, Tensor | None]:
            stats = token_logprobs(logits, tokens.target_ids, entropy=config.entropy)
            return stats.logprobs, stats.entropy

        return from_logprobs(problem, logprobs_of)
    keywords = _loss_keywords(problem)
    return training(problem, lambda x: dapo_loss(x, *tokens[:3], inplace_backward=inplace, **keywords).loss)


def _ours_from_hidden(problem: Problem, host_sync: bool | None = None) -> Run:
    config, tokens = problem.config, problem.tokens
    if config.mode == "forward":

        def logprobs_of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
            stats = linear_token_logprobs(hidden, weight, tokens.target_ids, entropy=config.entropy)
            return stats.logprobs, stats.entropy

        return from_logprobs(problem, logprobs_of)
    keywords = _loss_keywords(problem)
    return training(problem, lambda h, w: linear_dapo_loss(h, w, *tokens[:3], host_sync=host_sync, **keywords).loss)


def on_backend(name: str, make: Callable[[Problem], Run]) -> Callable[[Problem], Run]:
    """Return ``make`` with the calls served by one backend of dapo_kernels."""

    def make_there(problem: Problem) -> Run:
        call = make(problem)

        def run() -> Result:
            with use_backend(name):
                return call()

        return run

    return make_there


def _on_path(problem: Problem, path: str) -> Run:
    """Return our call from logits on one of the loss kernels of the cuda backend."""
    call = on_backend("cuda", ours_from_logits)(problem)
    module = importlib.import_module("dapo_kernels.backends.cuda")

    def run() -> Result:
        with mock.patch.object(module, "PATH", path):
            return call()

    return run


def cluster_holds(config: Config) -> bool:
    """Return whether a row is in the shared memory of a cluster: 16-byte aligned, at most 16 blocks of 222 KiB."""
    row_bytes = config.vocab * config.torch_dtype.itemsize
    return config.mode == "train" and row_bytes % 16 == 0 and row_bytes <= 16 * 220 * 2**10


# --- eager PyTorch and torch.compile ---------------------------------------------------------------------------------


def eager_logprobs(logits: Tensor, target_ids: Tensor, entropy: bool, upcast: bool) -> tuple[Tensor, Tensor | None]:
    """Compute log_softmax and gather in the logits' dtype or in float32."""
    everything = torch.log_softmax(logits.float() if upcast else logits, dim=-1)
    logprobs = everything.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(everything.exp() * everything).sum(-1) if entropy else None


def _eager(problem: Problem, upcast: bool, compiled: bool = False) -> Run:
    config, ids = problem.config, problem.tokens.target_ids

    def logprobs_of(*leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].t()
        return eager_logprobs(logits, ids, config.entropy, upcast)

    if not compiled:
        return from_logprobs(problem, logprobs_of)
    if config.mode == "forward":
        return from_logprobs(problem, torch.compile(logprobs_of, fullgraph=True, dynamic=False))

    # The loss is compiled too, so that the compiler may fuse all it can.
    def loss_of(*leaves: Tensor) -> Tensor:
        logprobs, entropy = logprobs_of(*leaves)
        return FORMULAS[config.objective](logprobs, problem.tokens._replace(entropy=entropy))

    return training(problem, torch.compile(loss_of, fullgraph=True, dynamic=False))


# --- the rows ---------------------------------------------------------------------------------------------------------


def _trains(config: Config) -> bool:
    return config.mode == "train"


def _is_padded(config: Config) -> bool:
    return config.live < 1


def _trains_padded(config: Config) -> bool:
    return _trains(config) and _is_padded(config)


def _is_narrow(config: Config) -> bool:
    return config.dtype != "float32"


def _plain_pytorch(name: str, setting: str, upcast: bool, compiled: bool, copies: tuple[float, float]) -> Contestant:
    return Contestant(
        name,
        setting,
        "compile" if compiled else "eager",
        functools.partial(_eager, upcast=upcast, compiled=compiled),
        takes=_is_narrow if upcast else lambda config: True,
        rounding=_own_rounding if upcast else softmax_rounding,
        copies=copies,
        modules=("torch._dynamo", "torch._inductor.compile_fx") if compiled else (),
    )


_live_mul, _live_gemms = functools.partial(_mul, live=True), functools.partial(_gemms, live=True)
_new_gradient = functools.partial(ours_from_logits, inplace=False)
_no_wait = functools.partial(_ours_from_hidden, host_sync=False)
_ONE = (1.0, 0.0)
_BUFFERS = "logits, dhidden, dweight into existing buffers"
_DEAD = "host_sync=False: dead tokens go through the GEMMs"
_LIVE_GEMMS = "three GEMMs, live tokens"


def _denominator(name: str, setting: str, make: Callable[[Problem], Run], level: str, **more: Any) -> Contestant:
    return Contestant(name, setting, "denominator", make, level, **more)


def _ours(name: str, setting: str, make: Callable[[Problem], Run], level: str, **more: Any) -> Contestant:
    return Contestant(name, setting, "ours", make, level, **more)


CONTESTANTS: tuple[Contestant, ...] = (
    # The first denominator of a configuration is the one that figures are divided by.
    _denominator("copy_", "one copy onto the logits", _copy, "logits", device="cuda"),
    _denominator("mul_", "one bare in-place pass over the logits", _mul, "logits"),
    _denominator("mul_, live rows", "the pass over the rows that train", _live_mul, "logits", takes=_is_padded),
    _denominator("three GEMMs", _BUFFERS, _gemms, "hidden", takes=_trains, copies=_ONE),
    _denominator(
        _LIVE_GEMMS, "of the tokens that train alone", _live_gemms, "hidden", takes=_trains_padded, copies=_ONE
    ),
    _denominator(
        "one GEMM", "logits into an existing buffer", _gemms, "hidden", takes=lambda c: not _trains(c), copies=_ONE
    ),
    _ours("dapo_kernels", "inplace_backward=True", ours_from_logits, "logits", destroys_logits=True),
    _ours("dapo_kernels, new gradient", "inplace_backward=False", _new_gradient, "logits", takes=_trains, copies=_ONE),
    _ours("dapo_kernels", "default chunks", _ours_from_hidden, "hidden"),
    *(
        _ours(
            f"dapo_kernels, {name}{suffix}",
            f"{setting}, use_backend({name!r})",
            on_backend(name, make),
            level,
            device="cuda",
            backend=name,
            **more,
        )
        for name in (backend.removeprefix("dapo_kernels, ") for backend in BACKENDS)
        for suffix, level, setting, make, more in (
            ("", "logits", "in place", ours_from_logits, {}),
            (", new gradient", "logits", "inplace_backward=False", _new_gradient, {"takes": _trains, "copies": _ONE}),
            ("", "hidden", "default chunks", _ours_from_hidden, {}),
        )
    ),
    *(
        _ours(
            name,
            f"in place, {name.split()[-1]}_loss alone",
            functools.partial(_on_path, path=name.split()[-1]),
            "logits",
            device="cuda",
            takes=takes,
            backend="cuda",
        )
        for name, takes in zip(PATHS, (cluster_holds, _trains), strict=True)
    ),
    _ours("dapo_kernels, no wait", _DEAD, _no_wait, "hidden", device="cuda", takes=_trains_padded),
    _plain_pytorch("eager", "log_softmax + gather in the logits' dtype", False, False, (4.0, 0.0)),
    _plain_pytorch("eager, softmax in fp32", "log_softmax of logits.float()", True, False, (1.0, 3.0)),
    _plain_pytorch("torch.compile", "eager and the loss, fullgraph, warm", False, True, (2.0, 1.0)),
    _plain_pytorch(
        "torch.compile, softmax in fp32", "eager in fp32 and the loss, fullgraph, warm", True, True, (2.0, 1.0)
    ),
)
