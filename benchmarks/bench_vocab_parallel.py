"""What sharing the vocabulary costs beside the arithmetic: two ranks over gloo, a thread and half of the head each.

Denominator: the same ranks at the same time, each with its half as if it were a head of its own, which is half the work
of the whole head and no exchange. The two alternate; every pair starts behind a barrier. A rank's time includes waiting
for the other.

    python -m benchmarks.bench_vocab_parallel --out benchmarks/results/vocab-parallel-NAME.md
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import machine
from dapo_kernels import linear_dapo_loss

RANKS = 2
BAR = 1.15
ROUNDS = 7  # the first is left out
SIZES = (  # tokens, hidden, vocabulary, dtype
    (2048, 576, 49152, torch.bfloat16),
    (2048, 576, 49152, torch.float32),
    (1024, 896, 151936, torch.bfloat16),
)


def calls(size: tuple[Any, ...], rank: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """(Half of the head by itself, half of the head as this rank's part); each leaves gradients."""
    n_tokens, width, vocab, dtype = size
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n_tokens, width, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=g) * width**-0.5).to(dtype)
    half = weight.chunk(RANKS)[rank].clone().requires_grad_()
    targets = torch.randint(vocab, (n_tokens,), generator=g)
    old_logprobs, advantages = torch.full((n_tokens,), -10.0), torch.randn(n_tokens, generator=g)

    def run(ids: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        hidden.grad = half.grad = None
        # No token is clipped: none has less work than another.
        out = linear_dapo_loss(hidden, half, ids, old_logprobs, advantages, objective="reinforce", group=group)
        out.loss.backward()
        return out.loss.detach()

    own = targets % half.shape[0]
    return lambda: run(own, None), lambda: run(targets, dist.group.WORLD)


def rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(minutes=5))
    times = []
    for size in SIZES:
        pair = calls(size, rank)
        rounds = []
        for _ in range(ROUNDS):
            seconds = []
            for call in pair:
                dist.barrier()
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
            rounds.append(seconds)
        times.append([statistics.median(x) for x in zip(*rounds[1:], strict=True)])
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        torch.save(slowest, f"{folder}/times.pt")
    dist.barrier()
    dist.destroy_process_group()


def write_page(times: list[list[float]], here: dict[str, Any]) -> str:
    rows = []
    for (n_tokens, width, vocab, dtype), (half, shared) in zip(SIZES, times, strict=True):
        name = str(dtype).removeprefix("torch.")
        verdict = "met" if shared <= BAR * half else "missed"
        shape = f"{n_tokens} | {width} | {vocab} | {name}"
        rows.append(f"| {shape} | {1e3 * half:.0f} | {1e3 * shared:.0f} | {shared / half:.2f} | {verdict} |")
    return f"""# A head shared by two ranks

`python -m benchmarks.bench_vocab_parallel`: loss and gradients, all tokens live; ms, medians of {ROUNDS - 1} calls, the
slower rank; "half" is half of the head by itself on each rank, without any exchange. {here["cpu"]}, {here["cores"]}
cores; torch {here["versions"]["torch"]}; commit {here["commit"]}; load before: {here["load_average"][0]}.

| tokens | hidden | vocabulary | dtype | half | shared | ÷ half | bar {BAR} |
|---:|---:|---:|---|---:|---:|---:|---|
{chr(10).join(rows)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    here = machine.describe()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, args=(folder,), nprocs=RANKS)
        times = torch.load(f"{folder}/times.pt").tolist()
    options.out.write_text(write_page(times, here), encoding="utf-8")
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
