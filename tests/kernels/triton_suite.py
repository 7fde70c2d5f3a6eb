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

CPU = torch.device("cpu")


def sharing(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs share the rows as a GPU without a cache has SMs."""
    monkeypatch.setitem(residency.GPUS, CPU, residency.Gpu(programs, 1, 1.0))


def test_programs_that_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a program for each row, dead and idle rows between them. The interpreter starts a program when the
    one before has ended, as a GPU does with those that its SMs have no room for: it finds one row, its own.
    """
    p, start = problem(random_rows(300, torch.float32), **OPTIONS["entropy"]), InterpreterBuilder.set_grid_idx
    outs, left = [], list[int]()
    for programs in (7, 3, 1):
        rows = p.logits.clone()
        left.clear()

        def started(self: Any, *at: int, rows: Tensor = rows) -> None:
            left.append(int((rows == p.logits).all(1).sum()))
            start(self, *at)

        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", started)
        sharing(programs, monkeypatch)
        outs.append((rows, *triton.row_loss_(rows, p.request, p.tokens, p.scalars)))
        assert left == [7, *range(programs - 1, 0, -1)]
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, outs[0], strict=True))


def test_programs_that_share_rows_of_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    p, ref = problem(random_rows(300, torch.float32)), random_rows(300, torch.float32).flip(1)
    outs = []
    for programs in (7, 3, 1):
        sharing(programs, monkeypatch)
        rows = p.logits.clone()
        found = triton.row_divergence_(rows, ref, p.request, p.tokens.weights + 1.0, Distance(0.4, None, None))
        outs.append((rows, found))
        assert not found.isnan().any()
        assert torch.equal((rows == 0).all(1), ~p.request.live)
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
