"""golden/golden.json: the longhand equations still give it, and every backend reaches it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_kernels import OBJECTIVES, Objective, dapo_loss, policy_loss

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


def run_case(case: dict[str, Any], dtype: torch.dtype, device: str = "cpu", **how: Any) -> tuple[Any, torch.Tensor]:
    """The golden case through ``dapo_loss``: ``(out, logits gradient)``."""
    fields = {**case["fields"], "clip_high": math.inf if case["fields"]["clip_high"] is None else None}
    fields = {k: case["fields"][k] if v is None else v for k, v in fields.items()}
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    x = {k: torch.tensor(v, device=device) for k, v in INPUTS.items() if k in ("target_ids", "mask")}
    per_token = ("old_logprobs", "advantages", *case["uses"])
    x |= {k: torch.tensor(INPUTS[k], dtype=torch.float64).to(device, dtype) for k in per_token}
    if case["selection"] is not None:
        chosen = [t in case["selection"] for t in range(len(INPUTS["mask"]))]
        x["selection"] = torch.tensor(chosen, device=device)
    logits = torch.tensor(INPUTS["logits"], dtype=torch.float64).to(device, dtype).requires_grad_()
    cu_seqlens = torch.tensor(INPUTS["cu_seqlens"], dtype=torch.int32, device=device)
    out = dapo_loss(
        logits,
        **x,
        objective=Objective(**fields),
        cu_seqlens=cu_seqlens,
        temperature=case["temperature"],
        entropy=True,
        **how,
    )
    out.loss.backward()
    assert logits.grad is not None
    return out, logits.grad


def check_case(case: dict[str, Any], dtype: torch.dtype, relative: float, **how: Any) -> None:
    out, grad = run_case(case, dtype, **how)
    close(out.loss.detach().cpu(), case["loss"], relative, "loss")
    close(out.logprobs.cpu(), case["logprobs"], relative, "logprobs")
    close(out.entropy.cpu(), case["entropy"], relative, "entropy")
    close(grad.cpu(), case["grad_logits"], 4 * relative, "gradient")
    for key, value in case["metrics"].items():
        close(out.metrics[key].cpu(), value, relative, f"metric {key}")


def test_every_objective_is_there_as_the_table_has_it() -> None:
    plain = {case["objective"] for case in CASES if "importance_weights" not in case["uses"]}
    assert plain == set(OBJECTIVES)
    for case in CASES:
        row, said = OBJECTIVES[case["objective"]], dict(case["fields"])
        if "importance_weights" in case["uses"]:
            said |= {"kl_coef": row.kl_coef, "entropy_coef": row.entropy_coef}
        for field, value in said.items():
            expected = getattr(row, field)
            expected = list(expected) if isinstance(expected, tuple) else expected
            expected = float(f"{expected:.12g}") if isinstance(expected, float) else expected  # as the file has it
            assert (math.inf if value is None and expected == math.inf else value) == expected or (
                field == "length_norm" and row.aggregate.endswith("norm")
            ), (case["objective"], field)


def test_the_equations_give_the_file() -> None:
    sys.path.insert(0, str(GOLDEN))
    import make

    built = make.digits(make.build())
    assert built["problem"] == INPUTS
    assert len(built["cases"]) == len(CASES)
    for new, old in zip(built["cases"], CASES, strict=True):
        assert {k: new[k] for k in ("objective", "fields", "temperature", "uses", "selection")} == {
            k: old[k] for k in ("objective", "fields", "temperature", "uses", "selection")
        }
        for key in ("loss", "logprobs", "entropy", "grad_logits"):
            close(new[key], old[key], 1e-10, f"{name_of(old)} {key}")
        assert new["metrics"] == pytest.approx(old["metrics"], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_backend_reaches_the_golden_values(backend: str, case: dict[str, Any]) -> None:
    for inplace in (False, True):
        check_case(case, torch.float32, 2e-6, inplace_backward=inplace)
        if backend == "torch":
            check_case(case, torch.float64, 1e-9, inplace_backward=inplace)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_from_logprobs(backend: str, case: dict[str, Any]) -> None:
    """The file's log-probs and entropies as inputs: the same loss and metrics."""
    fields = {k: math.inf if k == "clip_high" and v is None else v for k, v in case["fields"].items()}
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    chosen = case["selection"]
    x = {k: torch.tensor(INPUTS[k], dtype=torch.float32) for k in ("old_logprobs", "advantages", *case["uses"])}
    if chosen is not None:
        x["selection"] = torch.tensor([t in chosen for t in range(len(INPUTS["mask"]))])
    out = policy_loss(
        torch.tensor(case["logprobs"], dtype=torch.float32),
        **x,
        entropy=torch.tensor(case["entropy"], dtype=torch.float32),
        mask=torch.tensor(INPUTS["mask"]),
        cu_seqlens=torch.tensor(INPUTS["cu_seqlens"], dtype=torch.int32),
        objective=Objective(**fields),
    )
    close(out.loss, case["loss"], 2e-6, "loss")
    for key, value in case["metrics"].items():
        close(out.metrics[key], value, 2e-6, f"metric {key}")
