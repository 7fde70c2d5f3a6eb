"""golden/golden.json: the longhand equations still give it, and every backend reaches it. Dead tokens hold garbage."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_kernels import OBJECTIVES, Objective, dapo_loss, linear_dapo_loss, policy_loss

GOLDEN = Path(__file__).parent / "golden"
FILE: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
CASES: list[dict[str, Any]] = FILE["cases"]
INPUTS: dict[str, list[Any]] = FILE["problem"]


def name_of(case: dict[str, Any]) -> str:
    return case["objective"] + ("-everything" if case["uses"] else "")


def close(got: Any, expected: Any, relative: float, what: str) -> None:
    """Relative to the largest element of a tensor, whose exact zeros stay exact; to 1 for a sum of many terms."""
    got, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (got, expected))
    scale = float(expected.abs().max()) if expected.dim() else max(1.0, abs(float(expected)))
    torch.testing.assert_close(got, expected, rtol=relative, atol=relative * scale, msg=lambda m: f"{what}: {m}")
    assert expected.dim() == 0 or not got[expected == 0].any(), what


def fields_of(case: dict[str, Any]) -> dict[str, Any]:
    """As an ``Objective`` takes them: null is an infinite clip_high, a list a tuple."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in case["fields"].items()}
    return {**fields, "clip_high": math.inf if fields["clip_high"] is None else fields["clip_high"]}


def tensor_of(name: str, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A floating tensor of the file, with NaN and infinities on dead tokens."""
    x = torch.tensor(INPUTS[name], dtype=torch.float64)
    x[~torch.tensor(INPUTS["mask"])] = torch.tensor([math.nan, math.inf]).view(-1, *[1] * (x.dim() - 1)).double()
    return x.to(device, dtype)


def inputs_of(case: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """What every loss takes."""
    x = {name: torch.tensor(INPUTS[name], device=device) for name in ("mask", "cu_seqlens")}
    x |= {name: tensor_of(name, dtype, device) for name in ("old_logprobs", "advantages", *case["uses"])}
    if case["selection"] is not None:
        chosen = [t in case["selection"] for t in range(len(INPUTS["mask"]))]
        x["selection"] = torch.tensor(chosen, device=device)
    return {**x, "objective": Objective(**fields_of(case))}


def check_case(case: dict[str, Any], dtype: torch.dtype, relative: float, device: str = "cpu", **how: Any) -> None:
    """The golden case through ``dapo_loss``; and from its logits as hidden states, with the identity as the head."""
    ids = torch.tensor(INPUTS["target_ids"], device=device)
    given = {**inputs_of(case, dtype, device), "temperature": case["temperature"], "entropy": True, **how}
    calls: list[Any] = [dapo_loss]
    if not how:
        calls.append(partial(linear_dapo_loss, weight=torch.eye(len(INPUTS["logits"][0]), dtype=dtype, device=device)))
    for function in calls:
        leaf = tensor_of("logits", dtype, device).requires_grad_()
        out = function(leaf, target_ids=ids, **given)
        out.loss.backward()
        for name, x in (("loss", out.loss.detach()), ("logprobs", out.logprobs), ("entropy", out.entropy)):
            close(x.cpu(), case[name], relative, name)
        close(leaf.grad.cpu(), case["grad_logits"], 4 * relative, "gradient")
        for name, value in case["metrics"].items():
            close(out.metrics[name].cpu(), value, relative, f"metric {name}")


def test_every_objective_is_there_as_the_table_has_it() -> None:
    """A row that drifts from its paper's numbers fails here by name; the file is not made anew by a change."""
    plain = {case["objective"]: case for case in CASES if "importance_weights" not in case["uses"]}
    assert list(plain) == list(OBJECTIVES)
    for name, row in OBJECTIVES.items():
        for field, value in fields_of(plain[name]).items():
            if field != "length_norm":  # is the caller's
                expected = pytest.approx(value) if isinstance(value, float) else value
                assert getattr(row, field) == expected, (name, field)


def test_the_equations_give_the_file() -> None:
    sys.path.insert(0, str(GOLDEN))
    import make

    built = make.digits(make.build())
    assert built["problem"] == INPUTS
    assert len(built["cases"]) == len(CASES)
    for new, old in zip(built["cases"], CASES, strict=True):
        assert all(new[k] == old[k] for k in ("objective", "fields", "temperature", "uses", "selection"))
        for key in ("loss", "logprobs", "entropy", "grad_logits"):
            close(new[key], old[key], 1e-10, f"{name_of(old)} {key}")
        assert new["metrics"] == pytest.approx(old["metrics"], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_backend_reaches_the_golden_values(backend: str, case: dict[str, Any]) -> None:
    for how in ({}, {"inplace_backward": True}):
        check_case(case, torch.float32, 2e-6, **how)
        if backend == "torch":
            check_case(case, torch.float64, 1e-9, **how)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_from_logprobs(backend: str, case: dict[str, Any]) -> None:
    """The file's log-probs and entropies as inputs: the same loss and metrics, and no gradient of dead tokens."""
    dead = ~torch.tensor(INPUTS["mask"])
    logprobs, entropy = (torch.tensor(case[name]).masked_fill(dead, math.nan) for name in ("logprobs", "entropy"))
    out = policy_loss(logprobs.requires_grad_(), **inputs_of(case, torch.float32), entropy=entropy)
    out.loss.backward()
    close(out.loss.detach(), case["loss"], 2e-6, "loss")
    assert bool(logprobs.grad.isfinite().all())
    assert not logprobs.grad[dead].any()
    for name, value in case["metrics"].items():
        close(out.metrics[name], value, 2e-6, f"metric {name}")
