"""Print the endpoints and effects of the studies of the search task: `python -m docs.search_effects STUDY.json …`.

The files are the values of studies/search-ladder, -factorial, -controls, -noise and -questions. The page of a study
compares accuracy at equal updates and equal generated tokens. This adds pass@16, accuracy at equal cost, and the
main effects and pairs of the factorial.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dapo_runner.tools.study.results import holm, paired_test

LADDER = ("grpo", "filter", "higher", "soft", "token", "dapo")
FACTORS = {
    "F": "overlong filtering",
    "H": "clip-higher",
    "S": "soft overlong punishment",
    "T": "token-level loss",
    "D": "dynamic sampling",
}
CELLS = {"grpo": "", "filter": "F", "higher": "FH", "soft": "FHS", "token": "FHST", "dapo": "FHSTD"}  # of the ladder
TRAINED = 4  # forward passes: one for the old log-probs, one in training, and a backward pass costs two
Run = Mapping[str, Any]
"""A run in study.json."""
Values = Mapping[tuple[str, int], float]
"""An endpoint by variant and seed."""


def costs_of(run: Run) -> dict[int, float]:
    """Return the cost up to each step in forward passes of a token."""
    generated = dict(zip(map(int, run["axes"]["step"]), run["axes"]["tokens"], strict=True))
    steps, trained = run["curves"]["train/tokens"]
    sums = dict(zip(map(int, steps), accumulate(trained), strict=True)) | {0: 0.0}
    return {step: generated[step] + TRAINED * sums[step] for step in sorted(sums)}


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each evaluation and up to two before it."""
    return [fmean(values[max(0, n - 2) : n + 1]) for n in range(len(values))]


def endpoints(runs: Sequence[Run]) -> dict[str, Values]:
    """Return the three endpoints, of means of three evaluations. Equal cost is the smallest of any run."""
    costs = [costs_of(run) for run in runs]
    equal = min(max(cost.values()) for cost in costs)
    found: dict[str, dict[tuple[str, int], float]] = {"equal updates": {}, "equal cost": {}, "pass@16": {}}
    for run, cost in zip(runs, costs, strict=True):
        key, (steps, accuracy) = (run["variant"], run["seed"]), run["curves"]["eval/avg@16"]
        places = [cost[int(step)] for step in steps]
        found["equal updates"][key] = smooth(accuracy)[-1]
        found["equal cost"][key] = float(np.interp(equal, places, smooth(accuracy)))
        found["pass@16"][key] = smooth(run["curves"]["eval/pass@16"][1])[-1]
    return found


def compare(values: Values, pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a row for each pair of variants: the second minus the first, over the seeds that both have."""
    contrasts = {}
    for first, second in pairs:
        seeds = sorted(seed for name, seed in values if name == second and (first, seed) in values)
        contrasts[f"{second} − {first}"] = [values[second, seed] - values[first, seed] for seed in seeds]
    return tested(contrasts)


def effects(values: Values) -> dict[str, list[float]]:
    """Return the main effects and pairs of the factorial, by their letters, one value for each seed with all cells."""
    cells = {name: CELLS.get(name, name.removeprefix("cell_")) for name, _ in values}
    cells = {name: letters for name, letters in cells.items() if set(letters) <= set(FACTORS) and len(letters) % 2 == 0}
    seeds = [seed for seed in sorted({seed for _, seed in values}) if all((name, seed) in values for name in cells)]
    found = {}
    for term in (*combinations(FACTORS, 1), *combinations(FACTORS, 2)):
        weights = {name: 2 / len(cells) for name in cells}
        for name, letters in cells.items():
            weights[name] *= float(np.prod([1 if factor in letters else -1 for factor in term]))
        found["".join(term)] = [sum(w * values[name, seed] for name, w in weights.items()) for seed in seeds]
    return found


def tested(contrasts: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a row for each contrast: mean ± standard error, 95 % interval, p, and p corrected for all of them."""
    tests = {name: paired_test(found, [0.0] * len(found)) for name, found in contrasts.items()}
    ps = {name: test.p for name, test in tests.items() if test is not None and test.p is not None}
    corrected = dict(zip(ps, holm(list(ps.values())), strict=True))
    rows = []
    for name, test in tests.items():
        if test is None or test.interval is None or test.p is None:
            continue
        low, high = test.interval
        mean, error = test.difference
        difference = f"{100 * mean:+.1f} ± {100 * (error or 0.0):.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
        rows.append(f"| {name} | {difference} | {test.p:.3f} | {corrected[name]:.3f} | {len(contrasts[name])} |")
    return rows


def main(paths: Sequence[str]) -> None:
    runs = {(run["variant"], run["seed"]): run for path in paths for run in json.loads(Path(path).read_text())}
    names = {name for name, _ in runs}
    head = "| | difference, points (95 %) | p | Holm | seeds |\n|---|---:|---:|---:|---:|"
    for endpoint, values in endpoints(list(runs.values())).items():
        print(f"\n## {endpoint}\n\n{head}")
        print("\n".join(compare(values, [pair for pair in pairwise(LADDER) if names >= set(pair)])))
        others = [("dapo", name) for name in sorted(names - {*LADDER, "twice"}) if not name.startswith("cell_")]
        if others:
            print(f"\n{head}\n" + "\n".join(compare(values, others)))
        if "twice" in names:
            print(f"\n{head}\n" + "\n".join(compare(values, [("token", "twice"), ("twice", "dapo")])))
        again = [(seed, seed + 10) for name, seed in values if name == "grpo" and (name, seed + 10) in values]
        if again:
            noise = [values["grpo", other] - values["grpo", seed] for seed, other in again]
            print(f"\n{head}\n" + "\n".join(tested({"naive GRPO, another seed from the same start": noise})))
        if "cell_HSTD" in names:
            found = effects(values)
            for size in (1, 2):
                print(f"\n{head}\n" + "\n".join(tested({term: x for term, x in found.items() if len(term) == size})))


if __name__ == "__main__":
    main(sys.argv[1:])
