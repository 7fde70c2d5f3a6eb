"""What follows from the fields of a head and their notes."""

from __future__ import annotations

import pytest
import torch
from cases import linear_case
from torch import Tensor

from dapo_kernels import linear_dapo_loss
from dapo_kernels.records import Head, HeadOptions, Needs, Plan
from dapo_kernels.sharding import _describe


def test_what_ranks_must_have_alike() -> None:
    """Everything but a rank's own rows and what is noted as its own."""
    rows, r = torch.randn(5, 4), 2
    head = Head(rows, rows, rows[:, 0], 30.0, False, rows[:r], rows[:, :r], 1.0)
    plan = Plan(8, False, rows, "cpp", 5)
    changed: list[Head | Plan] = [head._replace(**{name: None}) for name in Head._fields]
    changed += [head._replace(hidden=rows.double()), head._replace(lora_b=rows[:, :1]), head._replace(softcap=20.0)]
    changed += [plan._replace(**{name: None}) for name in ("chunk_bytes", "host_sync", "backend", "valid")]
    for other in changed:
        assert _describe(other) != _describe(head if isinstance(other, Head) else plan)
    fewer = {name: getattr(head, name)[:3] for name in ("hidden", "weight", "bias", "lora_b")}
    assert _describe(head._replace(**fewer)) == _describe(head)
    own = plan._replace(main_grad=None, group="tp", columns=torch.ones(2), partial_hidden=True)
    assert _describe(own) == _describe(plan)


def test_padding_is_cut_off_everything_that_lies_by_vocabulary() -> None:
    rows = torch.randn(5, 4)
    cut = Head(rows, rows, rows[:, 0], None, False, rows, rows, 1.0).first(3)
    lengths = {name: len(x) for name, x in cut._asdict().items() if isinstance(x, Tensor)}
    by_vocabulary = dict.fromkeys(("weight", "bias", "lora_b"), 3)
    assert lengths == {"hidden": 5, "lora_a": 5} | by_vocabulary


def test_needs_are_read_by_name() -> None:
    flags = [name == "lora_b" for name in Head._fields]
    assert Needs.of([*flags, True]) == Needs(False, False, False, lora_b=True)


@pytest.mark.parametrize("name", HeadOptions.__annotations__)
def test_every_option_is_checked(name: str) -> None:
    case = linear_case(11, 4, seed=1)
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    with pytest.raises((TypeError, ValueError), match=f"linear_dapo_loss: .*{name}"):
        linear_dapo_loss(case.leaves["hidden"], case.leaves["weight"], *tokens, **{name: "x"})  # type: ignore[misc]
