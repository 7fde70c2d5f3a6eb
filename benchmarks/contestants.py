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
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.configs import Config
from benchmarks.formulas import FORMULAS, OVERRIDES
from benchmarks.problem import Problem
from benchmarks.truth import Result
from dapo_kernels import dapo_loss, linear_dapo_loss, linear_token_logprobs, token_logprobs, use_backend
from dapo_kernels.backends import available_backends

Run = Callable[[], Result]
LogprobsOf = Callable[..., tuple[Tensor, Tensor | None]]
BACKENDS = ("dapo_kernels, triton", "dapo_kernels, cuda")
NEW_GRADIENTS = tuple(f"{name}, new gradient" for name in BACKENDS)


@dataclass(frozen=True)
class Contestant:
    """One way to do the work.

    Attributes:
        setting: how it is used, in a few words, for the report.
        kind: "denominator"; of our kernels "ours", on a GPU "backend" where another one than the default is named, and
            "launch" with other launch parameters; "eager"; "compile" where torch.compile takes part; "peer".
        make: problem → the timed call; it may allocate buffers that are kept.
        level, device: of the configurations it can do; ``None`` is all.
        takes: further conditions on the configuration.
        rounds_softmax: the softmax runs in the dtype of the logits, which allows larger errors (``truth.TOLERANCES``).
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
    rounds_softmax: bool = False
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


def training(problem: Problem, loss_of: Callable[..., Tensor]) -> Run:
    """Return the timed call of a function that maps the inputs to a loss."""

    def run() -> Result:
        leaves = problem.inputs()
        loss = loss_of(*leaves)
        return Result(loss=loss, gradients=torch.autograd.grad(loss, leaves))

    return run


def from_logprobs(problem: Problem, logprobs_of: LogprobsOf, compiled: Callable[..., Any] = lambda call: call) -> Run:
    """Return the timed call of a function that maps the inputs to (log-probs, entropy). The loss on top is eager, or
    compiled together with it.
    """
    if problem.config.mode == "train":

        def loss_of(*leaves: Tensor) -> Tensor:
            logprobs, entropy = logprobs_of(*leaves)
            return FORMULAS[problem.config.objective](logprobs, problem.tokens._replace(entropy=entropy))

        return training(problem, compiled(loss_of))
    forward = compiled(logprobs_of)

    def run() -> Result:
        with torch.no_grad():
            logprobs, entropy = forward(*problem.inputs())
        return Result(logprobs=logprobs, entropy=entropy)

    return run


# --- denominators ----------------------------------------------------------------------------------------------------


def _mul(problem: Problem) -> Run:
    def run() -> Result:
        assert problem.logits is not None
        problem.logits.mul_(1.0)
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


def ours(problem: Problem, inplace: bool = True) -> Run:
    """Return our call; from logits with the gradient in their place, or a new one."""
    config, tokens = problem.config, problem.tokens
    if config.mode == "forward":
        stats_of: Callable[..., Any] = linear_token_logprobs if config.level == "hidden" else token_logprobs

        def logprobs_of(*leaves: Tensor) -> tuple[Tensor, Tensor | None]:
            stats = stats_of(*leaves, tokens.target_ids, entropy=config.entropy)
            return stats.logprobs, stats.entropy

        return from_logprobs(problem, logprobs_of)
    length, device = config.n_tokens // config.n_sequences, tokens.target_ids.device
    starts = torch.arange(0, config.n_tokens + 1, length, dtype=torch.int32, device=device)
    keywords = {"mask": tokens.mask, "cu_seqlens": starts, "objective": config.objective}
    keywords |= OVERRIDES.get(config.objective, {}) | (
        {"inplace_backward": inplace} if config.level == "logits" else {}
    )
    call: Callable[..., Any] = linear_dapo_loss if config.level == "hidden" else dapo_loss
    return training(problem, lambda *leaves: call(*leaves, *tokens[:3], **keywords).loss)


def within(
    problem: Problem, make: Callable[[Problem], Run], *contexts: Callable[[], AbstractContextManager[Any]]
) -> Run:
    """Return a contestant's call inside of context managers, which are made for each call."""
    call = make(problem)

    def run() -> Result:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return call()

    return run


# --- eager PyTorch and torch.compile ---------------------------------------------------------------------------------


def eager_logprobs(logits: Tensor, target_ids: Tensor, entropy: bool, upcast: bool) -> tuple[Tensor, Tensor | None]:
    """Compute log_softmax and gather in the logits' dtype or in float32."""
    everything = torch.log_softmax(logits.float() if upcast else logits, dim=-1)
    logprobs = everything.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(everything.exp() * everything).sum(-1) if entropy else None


def _eager(problem: Problem, upcast: bool, compiled: bool) -> Run:
    config, ids = problem.config, problem.tokens.target_ids

    def logprobs_of(*leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].t()
        return eager_logprobs(logits, ids, config.entropy, upcast)

    if not compiled:
        return from_logprobs(problem, logprobs_of)
    return from_logprobs(problem, logprobs_of, functools.partial(torch.compile, fullgraph=True, dynamic=False))


# --- the rows ---------------------------------------------------------------------------------------------------------


def _trains(config: Config) -> bool:
    return config.mode == "train"


_new_gradient = functools.partial(ours, inplace=False)
_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")


def _on_backend(name: str, inplace: bool = True, **more: Any) -> Contestant:
    """Return our call served by the backend in its name."""
    backend = name.split(", ")[1]

    def make(problem: Problem) -> Run:
        return within(problem, functools.partial(ours, inplace=inplace), lambda: use_backend(backend))

    setting = f"{_IN_PLACE if inplace else _NEW}, use_backend({backend!r})"
    return Contestant(name, setting, "backend", make, device="cuda", backend=backend, destroys_logits=inplace, **more)


_IN_PLACE, _NEW = "defaults; from logits inplace_backward=True", "inplace_backward=False"

CONTESTANTS: tuple[Contestant, ...] = (
    # The first denominator of a configuration is the one that figures are divided by.
    Contestant("copy_", "one copy onto the logits", "denominator", _copy, "logits", device="cuda"),
    Contestant("mul_", "one bare in-place pass over the logits", "denominator", _mul, "logits"),
    Contestant("GEMMs", "three, in forward mode one, into existing buffers", "denominator", _gemms, "hidden"),
    Contestant(
        "GEMMs, live tokens",
        "of the tokens that train alone",
        "denominator",
        functools.partial(_gemms, live=True),
        "hidden",
        takes=lambda config: _trains(config) and config.live < 1,
    ),
    Contestant("dapo_kernels", _IN_PLACE, "ours", ours, destroys_logits=True),
    Contestant("dapo_kernels, new gradient", _NEW, "ours", _new_gradient, "logits", takes=_trains),
    *(_on_backend(name) for name in BACKENDS),
    *(_on_backend(name, inplace=False, level="logits", takes=_trains) for name in NEW_GRADIENTS),
    *(
        Contestant(
            f"{name}, softmax in fp32" if upcast else name,
            f"log_softmax {'of logits.float()' if upcast else 'in the dtype of the logits'} {setting}",
            kind,
            functools.partial(_eager, upcast=upcast, compiled=kind == "compile"),
            takes=lambda config, upcast=upcast: not upcast or config.dtype != "float32",
            rounds_softmax=not upcast,
            modules=modules,
        )
        for name, kind, setting, modules in (
            ("eager", "eager", "+ gather", ()),
            ("torch.compile", "compile", "+ gather and the loss, fullgraph, warm", _COMPILER),
        )
        for upcast in (False, True)
    ),
)
