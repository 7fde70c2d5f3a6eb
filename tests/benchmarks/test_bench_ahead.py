"""What a run's log says of sampling ahead of training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.bench_ahead import Outcome, outcome, write_page


def write_run(folder: Path, ahead: bool) -> Outcome:
    """Two steps of 10 s, of which the second ends with 95 %."""
    waits = {"seconds/wait": 5.0} if ahead else {"seconds/rollout": 5.0}
    parts = waits | {"seconds/forward_backward": 2.0, "seconds/evaluate": 1.0}
    parts |= {"seconds/old_logprobs": 1.0, "seconds/sync": 0.5, "seconds/probe": 0.5}
    step = {"sampling/tokens": 400, "train/tokens": 100, "batch/age": 1.0, "batch/age_max": 1.0}
    metrics: list[dict[str, Any]] = [{"kind": "eval", "step": 0, "eval/avg@4": 0.25}]
    for number, accuracy in ((1, 0.5), (2, 0.95)):
        metrics += [
            {"kind": "step", "step": number, **step},
            {"kind": "eval", "step": number, "eval/avg@4": accuracy},
        ]
    timings = [{"kind": "step", "step": number, **parts} for number in (1, 2)]
    folder.mkdir()
    for name, events in (("metrics", metrics), ("timings", timings)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return outcome("ahead" if ahead else "in turn", 0, folder)


def test_rates_and_time_to_an_accuracy(tmp_path: Path) -> None:
    in_turn, ahead = (write_run(tmp_path / str(side), ahead=side) for side in (False, True))
    assert [in_turn.seconds_to(target) for target in (0.2, 0.5, 0.9, 0.99)] == [0.0, 10.0, 20.0, None]
    assert in_turn.rate == ahead.rate == 40.0
    assert in_turn.rates == (80.0, 50.0, 1.0)
    assert ahead.rates == (None, 50.0, 1.0)
    options = argparse.Namespace(recipe="tiny", target=0.9, seeds=[0], sides=[1, 3], settings=["run.steps=2"])
    page = write_page([in_turn, ahead], options, machine.describe())
    assert "--recipe tiny --target 0.9 --seeds 0 --sides 1 3 run.steps=2`" in page
    assert "| in turn | 0 | 20 | 20 | 40 | 25.0 → 95.0 % | 1.00 | 1 | 1.000 | 80 | 50 | 1.00 |" in page
    assert "| ahead | 0 | 20 | 20 | 40 | 25.0 → 95.0 % | 1.00 | 1 | 1.000 | – | 50 | 1.00 |" in page
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


def test_a_target_that_one_seed_misses_has_no_mean(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ahead=False)
    options = argparse.Namespace(recipe="tiny", target=0.9, seeds=[0, 1], sides=[1], settings=[])
    missed = run._replace(seed=1, accuracy={0: 0.25, 2: 0.5})
    page = write_page([run, missed], options, machine.describe())
    assert "| **in turn** | all | – | 20 | 40 | 72.5 ± 31.8 % |" in page
