"""Is the loss from logits on a CPU bound by arithmetic or by memory? `python docs/models/cpu_rows.py` prints a table.

One thread, in place, nanoseconds per 16 logits. "In the L1 cache": all rows are the same 16 KiB, so what is left is
arithmetic. "From memory": rows of 49152, together larger than the caches; beside it `mul_` of the same logits, one read
and one write. The smallest of several rounds. `DAPO_KERNELS_ISA=avx2` selects other kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import dapo_kernels._C as _C
import torch
from torch import Tensor

from dapo_kernels import OBJECTIVES
from dapo_kernels.backends import registry
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, Tokens

ROUNDS = 15
L1_BYTES, L1_ROWS = 16 * 1024, 10_000
MEMORY_ROWS, MEMORY_COLUMNS = 1024, 49152


def least_ns(call: Callable[[], object], logits: int) -> float:
    """Return nanoseconds of a round per 16 logits. Time of the thread, so that other processes count for less."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        call()
        rounds.append(time.thread_time_ns() - began)
    return 16 * min(rounds) / logits


def loss_of(logits: Tensor) -> Callable[[], object]:
    """Return a call of the row kernel that overwrites the logits with their gradient."""
    n = len(logits)
    live, zeros = torch.ones(n, dtype=torch.bool), torch.zeros(n)
    tokens = Tokens(live, torch.full((n,), 1 / n), torch.ones(n), zeros - 7.0, None, None)
    request = RowRequest(torch.zeros(n, dtype=torch.int64), live, 1.0, None, False)
    scalars = ObjectiveScalars.of(OBJECTIVES["dapo"])
    return lambda: registry.backend("cpp").row_loss_(logits, request, tokens, scalars)


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"| {_C.isa()}, ns per 16 logits | in the L1 cache | from memory | `mul_` from memory |\n|---|---:|---:|---:|"
    )
    for dtype in (torch.float32, torch.bfloat16):
        small = torch.randn(1, L1_BYTES // dtype.itemsize).to(dtype).expand(L1_ROWS, -1)
        large = torch.randn(MEMORY_ROWS, MEMORY_COLUMNS).to(dtype)
        times = [
            least_ns(loss_of(small), small.numel()),
            least_ns(loss_of(large), large.numel()),
            least_ns(lambda x=large: x.mul_(1.0), large.numel()),  # type: ignore[misc]
        ]
        print(f"| {str(dtype).removeprefix('torch.')} | {' | '.join(f'{x:.2f}' for x in times)} |", flush=True)


if __name__ == "__main__":
    main()
