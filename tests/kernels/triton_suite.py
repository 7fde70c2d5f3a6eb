"""What only the "triton" backend has, interpreted: programs that share rows. Started by ``test_elsewhere.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows import OPTIONS, problem, random_rows
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from dapo_kernels.backends import residency, triton
from dapo_kernels.backends.divergence import Distance


def test_programs_that_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a program for each row of a divergence, dead rows between them. The interpreter starts a program when
    the one before has ended, as a GPU does with those that its SMs have no room for: it finds one row, its own.
    """
    p, start = problem(random_rows(300, torch.float32), **OPTIONS["entropy"]), InterpreterBuilder.set_grid_idx
    outs, left = [], list[int]()
    for programs in (7, 3, 1):
        monkeypatch.setitem(residency.GPUS, torch.device("cpu"), residency.Gpu(programs, 1, 1.0))  # without a cache
        rows = p.logits.clone()
        left.clear()

        def started(self: Any, *at: int, rows: Tensor = rows) -> None:
            left.append(int((rows == p.logits).all(1).sum()))
            start(self, *at)

        with monkeypatch.context() as patch:
            patch.setattr(InterpreterBuilder, "set_grid_idx", started)
            upstream, ref = p.tokens.weights + 1.0, p.logits.flip(1)
            found = triton.row_divergence_(rows, ref, p.request, upstream, Distance(0.4, None, None))
        assert left == [7, *range(programs - 1, 0, -1)]
        assert not found.isnan().any()
        assert torch.equal((rows == 0).all(1), ~p.request.live)
        outs.append((rows, found))
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, outs[0], strict=True))


@pytest.mark.parametrize("shape", [(5, 37), (2, 3, 40), (33,), (4, 20_000)], ids=str)
def test_a_gradient_is_multiplied_in_place(shape: tuple[int, ...]) -> None:
    """Also one whose rows are columns of a wider tensor, and not at all by 1."""
    whole = torch.randn(*shape[:-1], shape[-1] + 3)
    for factor in (1.0, 0.3, -2.0):
        x = whole.clone()
        triton.scale_(x[..., :-3], torch.tensor(factor))
        assert torch.equal(x[..., :-3], whole[..., :-3] * factor)
        assert torch.equal(x[..., -3:], whole[..., -3:])
