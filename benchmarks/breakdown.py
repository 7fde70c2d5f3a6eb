"""Where the time of a call goes, step by step: ``python -m benchmarks.breakdown``.

Every step runs by itself on the inputs of a headline configuration, interleaved with the whole call and with the bare
passes that bound it. What the steps do not explain stands in the last line. Writes a page to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import allocators, machine
from benchmarks.allocators import ALLOCATORS, HUGE_PAGES
from benchmarks.configs import HEADLINE, Config
from benchmarks.problem import Problem, build
from dapo_kernels import dapo_loss, linear_dapo_loss, token_logprobs
from dapo_kernels.backends.cpp import SplitSum

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Step:
    """One line: what runs, how many bytes of memory and flops it is, and whether it is a part of the whole call."""

    name: str
    run: Callable[[], object]
    gigabytes: float = 0.0
    teraflops: float = 0.0
    part: bool = False


def logits_steps(problem: Problem) -> list[Step]:
    """The loss from logits, in place; its first sweep alone is the forward pass."""
    logits, tokens = problem.logits, problem.tokens
    assert logits is not None
    one = logits.numel() * logits.element_size() / 1e9

    def whole() -> None:
        leaf = logits.detach().requires_grad_(True)
        out = dapo_loss(leaf, tokens.target_ids, tokens.old_logprobs, tokens.advantages, inplace_backward=True)
        torch.autograd.grad(out.loss, leaf)

    narrow = problem.config.n_tokens
    small = torch.zeros(narrow, 16, dtype=logits.dtype)

    def host() -> None:
        leaf = small.detach().requires_grad_(True)
        out = dapo_loss(leaf, tokens.target_ids % 16, tokens.old_logprobs, tokens.advantages, inplace_backward=True)
        torch.autograd.grad(out.loss, leaf)

    return [
        Step("`mul_`: a bare read and write of the logits", lambda: logits.mul_(1.0), 2 * one),
        Step(
            "`token_logprobs`: the first sweep by itself, a read",
            lambda: token_logprobs(logits, tokens.target_ids),
            one,
        ),
        Step("the same call with V = 16: host work, metrics, autograd", host),
        Step("**the whole call**", whole, 2 * one),
    ]


def hidden_steps(problem: Problem) -> list[Step]:
    """The loss from hidden states: three GEMMs, the row kernel between them, the sum of dW, fresh memory."""
    (hidden, weight), tokens = problem.head(), problem.tokens
    n, width = hidden.shape
    vocab = weight.shape[0]
    logits = torch.empty(n, vocab, dtype=hidden.dtype)
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)
    flops = 2 * n * width * vocab / 1e12
    buffer = logits.numel() * logits.element_size() / 1e9

    def rows() -> None:
        leaf = logits.detach().requires_grad_(True)
        dapo_loss(leaf, tokens.target_ids, tokens.old_logprobs, tokens.advantages, inplace_backward=True)

    def whole() -> None:
        leaves = [x.detach().requires_grad_(True) for x in (hidden, weight)]
        out = linear_dapo_loss(*leaves, tokens.target_ids, tokens.old_logprobs, tokens.advantages)
        torch.autograd.grad(out.loss, leaves)

    def fresh() -> Tensor:
        return torch.empty(vocab, width, dtype=weight.dtype).zero_()

    steps = [
        Step("GEMM: logits = h·Wᵀ", lambda: torch.mm(hidden, weight.t(), out=logits), buffer, flops, True),
        Step("row kernel over the chunk, in place", rows, 2 * buffer, 0.0, True),
        Step("GEMM: dh = dlogits·W", lambda: torch.mm(logits, weight, out=dhidden), buffer, flops, True),
        Step("GEMM: dW = dlogitsᵀ·h", lambda: torch.mm(logits.t(), hidden, out=dweight), buffer, flops, True),
        Step("first touch of a new dW", fresh, dweight.numel() * dweight.element_size() / 1e9, 0.0, True),
        Step("**the whole call**", whole, 0.0, 3 * flops),
    ]
    running = SplitSum(torch.zeros_like(weight))
    each = dweight.numel() * (2 + 4 + 4) / 1e9
    extra = Step(
        "only with several chunks: dW into the running sum, each", lambda: running.add(slice(None), dweight), each
    )
    return [*steps, extra]


def medians(steps: list[Step], problem: Problem, rounds: int) -> list[float]:
    """Milliseconds of each step, interleaved; inputs are restored outside the clock."""
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds + 1):
        for step, taken in zip(steps, seconds, strict=True):
            problem.restore()
            start = time.perf_counter()
            step.run()
            taken.append(time.perf_counter() - start)
    return [1e3 * statistics.median(taken[1:]) for taken in seconds]


def table(config: Config, steps: list[Step], times: list[float]) -> str:
    """Markdown; the whole call is the step whose name is in bold."""
    whole = next(ms for step, ms in zip(steps, times, strict=True) if step.name.startswith("**"))
    lines = [
        f"## {config.workload}",
        "",
        "| step | ms | share | GB | GB/s | TFLOP | TFLOP/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for step, ms in zip(steps, times, strict=True):
        speed = f"{step.gigabytes:.2f} | {1e3 * step.gigabytes / ms:.0f}" if step.gigabytes else " | "
        rate = f"{step.teraflops:.3f} | {1e3 * step.teraflops / ms:.2f}" if step.teraflops else " | "
        lines.append(f"| {step.name} | {ms:.2f} | {ms / whole:.0%} | {speed} | {rate} |")
    if any(step.part for step in steps):
        rest = whole - sum(ms for step, ms in zip(steps, times, strict=True) if step.part)
        name = "left over: host work, copies of [N] tensors, steps that were faster alone"
        lines.append(f"| {name} | {rest:.2f} | {rest / whole:.0%} | | | | |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=HEADLINE[0].n_tokens, help="rows, for a trial run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--allocator", choices=ALLOCATORS, default=HUGE_PAGES)
    options = parser.parse_args()
    allocators.restart_under(options.allocator)
    described = machine.describe()
    started = datetime.now(timezone.utc)
    pages = [
        "# Where the time goes\n",
        f"- machine: {machine.headline(described)}\n"
        f"- allocator: {options.allocator}: {allocators.spelled(options.allocator)}\n- commit: {machine.commit()}\n"
        f"- command: `{machine.command('python', '-m', 'benchmarks.breakdown')}`, {started:%Y-%m-%dT%H:%M}Z; "
        f"medians of {options.rounds} interleaved rounds\n",
    ]
    for config in HEADLINE:
        config = replace(config, n_tokens=options.tokens)
        problem = build(config)
        steps = hidden_steps(problem) if config.hidden else logits_steps(problem)
        pages.append(table(config, steps, medians(steps, problem, options.rounds)))
        print(pages[-1], flush=True)
        del problem, steps
    path = options.out / f"breakdown-{machine.slug(described)}-{started:%Y%m%d-%H%M}.md"
    path.write_text("\n".join(pages), encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
