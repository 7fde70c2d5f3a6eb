"""Golden values: inputs and float64 outputs of every objective, by the longhand equations of ``oracle.py``.

    python tests/kernels/golden/make.py        # writes golden.json beside this file

For checking another implementation, in any language: the package gives the objectives' numbers, not the results. In the
file:

``problem``: one small packed batch. ``logits`` [T][V] predict ``target_ids`` [T]; ``cu_seqlens`` bounds the sequences;
``mask`` says which tokens are live; the rest is per token. ``cases``: per objective its ``fields`` (an infinite
``clip_high`` is null), the ``temperature`` the logits are divided by, which optional inputs it ``uses``, the tokens a
batch selection picked (``selection``, indices; null: none), and what comes out: ``loss``, ``grad_logits`` [T][V],
``logprobs`` and ``entropy`` [T] (0 on dead tokens), ``metrics`` (sums over live tokens).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from against_oracle import options  # noqa: E402
from cases import Case, rows_of, solve  # noqa: E402
from oracle import Options, batch_selection, share_down  # noqa: E402

from dapo_kernels import OBJECTIVES  # noqa: E402

FILE = HERE / "golden.json"
# What is added to each row in its second case.
EVERYTHING: dict[str, Any] = {"kl_coef": 0.05, "entropy_coef": 0.02}


def problem() -> tuple[dict[str, Any], Case]:
    """The file's batch, which stays: ten tokens in three sequences, ratios on both sides of every clip bound. The first
    sequence's mean ratio lies within GSPO's trust region, and the old policy is sure of one token."""
    inputs = json.loads(FILE.read_text())["problem"]
    bounds = inputs["cu_seqlens"]
    tensors = {name: torch.tensor(inputs[name]) for name in ("target_ids", "mask")}
    for name in ("old_logprobs", "ref_logprobs", "advantages", "importance_weights"):
        tensors[name] = torch.tensor(inputs[name], dtype=torch.float64)
    leaves = {"logits": torch.tensor(inputs["logits"], dtype=torch.float64)}
    return inputs, Case(**tensors, lengths=tuple(b - a for a, b in itertools.pairwise(bounds)), leaves=leaves)


def solve_row(case: Case, name: str, o: Options, *, weighted: bool) -> dict[str, Any]:
    """One case of the file."""
    _, x = rows_of(case, o, weighted=weighted)
    picked: list[int] | None = None
    if o.clip_cov is not None:  # the draw is part of the input: the first candidates
        candidates = sorted(batch_selection(x, o))
        picked = candidates[: share_down(x.live, o.clip_cov[0])]
        assert picked
    elif o.top_entropy is not None or o.kl_cov is not None:
        picked = sorted(batch_selection(x, o))
    solution = solve(case, o, selected=picked, weighted=weighted)
    uses = [x for x, on in (("ref_logprobs", o.needs_reference), ("importance_weights", weighted)) if on]
    return {
        "objective": name,
        "fields": {k: None if v == math.inf else v for k, v in dataclasses.asdict(o).items()},
        "temperature": case.temperature,
        "uses": uses,
        "selection": picked,
        "loss": float(solution.loss),
        "logprobs": solution.logprobs.tolist(),
        "entropy": solution.entropy.tolist(),
        "metrics": solution.metrics,
        "grad_logits": solution.grads["logits"].tolist(),
    }


def build() -> dict[str, Any]:
    """The content of the file, unrounded."""
    inputs, case = problem()
    cases = []
    for name in OBJECTIVES:
        row, _ = options(name, wide=False)
        cases.append(solve_row(case, name, row, weighted=False))
        warm = dataclasses.replace(case, temperature=0.75)
        cases.append(solve_row(warm, name, dataclasses.replace(row, **EVERYTHING), weighted=True))
    return {"problem": inputs, "cases": cases}


def digits(x: Any) -> Any:
    """Twelve significant digits: the last ones of float64 differ between machines."""
    if isinstance(x, float):
        return float(f"{x:.12g}")
    if isinstance(x, (list, tuple)):
        return [digits(v) for v in x]
    return {k: digits(v) for k, v in x.items()} if isinstance(x, dict) else x


def main() -> None:
    content = digits(build())
    lines = ",\n".join(json.dumps(case, allow_nan=False) for case in content["cases"])
    text = f'{{"problem": {json.dumps(content["problem"])},\n"cases": [\n{lines}\n]}}\n'
    FILE.write_text(text)


if __name__ == "__main__":
    main()
