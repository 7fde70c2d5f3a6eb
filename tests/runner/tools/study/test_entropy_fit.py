"""R = −a·exp(H) + b, from the logs of runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

from test_study import finish, planned

from dapo_runner.tools.study.figures import entropy_points
from dapo_runner.tools.study.page import write_page
from dapo_runner.tools.study.results import read_result

A, B = 0.2, 0.9


def test_a_page_has_the_fit_of_every_evaluation_but_the_first(tmp_path: Path) -> None:
    study, runs = planned(tmp_path, entropy_fit=["plain"], overrides={"run": {"steps": 6, "eval_every": 2}})
    plain = [run for run in runs if run.variant == "plain"]
    for run in plain:
        finish(run, [0.2, 0.3, 0.5])
        metric, lines = f"eval/avg@{run.config.evaluation.k}", []
        for step in range(1, 7):
            entropy = step / 6 + run.seed / 100
            lines.append({"step": step, "kind": "step", "sampling/tokens": 9, "train/entropy": entropy})
            if step % 2 == 0:
                lines.append({"step": step, "kind": "eval", metric: B - A * math.exp(entropy)})
        first = {"step": 0, "kind": "eval", metric: 0.0}
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [first, *lines]))
    results = [read_result(run) for run in plain]
    entropy, accuracy = entropy_points(results)
    assert len(entropy) == len(accuracy) == 6
    page = write_page(study, runs, results, []).read_text()
    assert "| plain | 0.200 | 0.900 | 0.700 | 1.000 | 6 |" in page
    assert (study.folder / "entropy_fit.png").stat().st_size > 5000
