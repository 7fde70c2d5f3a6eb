"""Write the analysis of the studies of the search task: `python -m docs.search_effects > benchmarks/results/….md`.

The page of a study compares accuracy at equal updates and equal generated tokens. This adds pass@16, accuracy at equal
cost, the effects of the factorial, and what a new seed of the ladder shows. It reads the values and curves of the
studies in benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy.stats import t as student

from dapo_runner.config import StudyConfig, parse, read_recipe
from dapo_runner.tools.study.results import PairedTest, estimate, holm, paired_test

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FILES = {
    name: RESULTS / f"search-{name}-20261126.json"
    for name in ("ladder", "factorial", "controls", "noise", "fresh", "lr", "questions", "weak")
}
STUDIES = RESULTS.parents[1] / "recipes" / "studies"
LADDER = {
    "grpo": "naive GRPO",
    "filter": "+ overlong filtering",
    "higher": "+ clip-higher",
    "soft": "+ soft overlong punishment",
    "token": "+ token-level loss",
    "dapo": "+ dynamic sampling (DAPO)",
}
FACTORS = {
    "F": "overlong filtering",
    "H": "clip-higher",
    "S": "soft overlong punishment",
    "T": "token-level loss",
    "D": "dynamic sampling",
}
CELLS = {"grpo": "", "higher": "FH", "token": "FHST"}  # of the factorial, among the rungs of the ladder
OUTSIDE = {"filter": "F", "soft": "FHS", "dapo": "FHSTD"}  # rungs that are no cells of it
TRAINED = 4  # forward passes: one for the old log-probs, one in training, and a backward pass costs two
Run = Mapping[str, Any]
"""A run in a JSON file."""
Values = Mapping[tuple[str, int], float]
"""An endpoint by variant and seed."""
Contrasts = Mapping[str, Sequence[float]]
"""Differences by name, one for each seed."""


def read(*names: str) -> list[Run]:
    return [run for name in names for run in json.loads(FILES[name].read_text(encoding="utf-8"))]


def costs_of(run: Run, trained_token: int = TRAINED) -> dict[int, float]:
    """Return the cost up to each step in forward passes of a token; ``trained_token``: those of a trained one."""
    generated = dict(zip(map(int, run["axes"]["step"]), run["axes"]["tokens"], strict=True))
    steps, trained = run["curves"]["train/tokens"]
    sums = dict(zip(map(int, steps), accumulate(trained), strict=True)) | {0: 0.0}
    return {step: generated[step] + trained_token * sums[step] for step in sorted(sums)}


def equal_cost(runs: Sequence[Run], trained_token: int = TRAINED) -> float:
    """Return the smallest cost of any run."""
    return min(max(costs_of(run, trained_token).values()) for run in runs)


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each evaluation and up to two before it."""
    return [fmean(values[max(0, n - 2) : n + 1]) for n in range(len(values))]


def endpoints(runs: Sequence[Run], equal: float | None = None, trained_token: int = TRAINED) -> dict[str, Values]:
    """Return the three endpoints, of means of three evaluations, at the smallest cost of any run or at ``equal``."""
    at_cost = equal_cost(runs, trained_token) if equal is None else equal
    found: dict[str, dict[tuple[str, int], float]] = {"equal updates": {}, "equal cost": {}, "pass@16": {}}
    for run in runs:
        key, cost = (run["variant"], run["seed"]), costs_of(run, trained_token)
        steps, accuracy = run["curves"]["eval/avg@16"]
        found["equal updates"][key] = smooth(accuracy)[-1]
        found["equal cost"][key] = float(np.interp(at_cost, [cost[int(step)] for step in steps], smooth(accuracy)))
        found["pass@16"][key] = smooth(run["curves"]["eval/pass@16"][1])[-1]
    return found


def differences(values: Values, pairs: Iterable[tuple[str, str, str]]) -> dict[str, list[float]]:
    """Return for each (name, first, second) the second minus the first variant, over the seeds that both have."""
    found = {}
    for name, first, second in pairs:
        seeds = sorted(seed for variant, seed in values if variant == second and (first, seed) in values)
        found[name] = [values[second, seed] - values[first, seed] for seed in seeds]
    return found


def rungs(values: Values) -> dict[str, list[float]]:
    """Return each rung of the ladder minus the one above it."""
    return differences(values, ((LADDER[rung], above, rung) for above, rung in pairwise(LADDER)))


def effects(values: Values, sizes: Sequence[int] = (1,)) -> dict[str, list[float]]:
    """Return the main effects (size 1) or pairs (2) of the factorial: one value for each seed with all cells."""
    cells = {name: CELLS.get(name, name.removeprefix("cell_")) for name, _ in values}
    seeds = [seed for seed in sorted({seed for _, seed in values}) if all((name, seed) in values for name in cells)]
    found = {}
    for term in (term for size in sizes for term in combinations(FACTORS, size)):
        weights = {name: 2 / len(cells) for name in cells}
        for name, letters in cells.items():
            weights[name] *= float(np.prod([1 if factor in letters else -1 for factor in term]))
        label = " × ".join(FACTORS[factor] for factor in term)
        found[label] = [sum(w * values[name, seed] for name, w in weights.items()) for seed in seeds]
    return found


def conditional(values: Values) -> dict[str, list[float]]:
    """Return the effect of a technique with and without another one."""
    found, rows = effects(values, (1, 2)), {}
    for one, other in ("DS", "SD", "FD", "FS", "TF", "HD"):
        name, second = FACTORS[one], FACTORS[other]
        pair = next(points for term, points in found.items() if set(term.split(" × ")) == {name, second})
        for word, sign in (("with", 1), ("without", -1)):
            rows[f"{name} {word} {second}"] = [a + sign * b for a, b in zip(found[name], pair, strict=True)]
    return rows


def unexplained(ladder: Values, factorial: Values) -> dict[str, list[float]]:
    """Return for the rows of the ladder outside the factorial: measured minus what main effects and pairs predict."""
    terms, found = effects(factorial, (1, 2)), {}
    seeds = sorted({seed for _, seed in factorial})
    means = [fmean(x for (_, other), x in factorial.items() if other == seed) for seed in seeds]
    for rung, letters in OUTSIDE.items():
        signs = {factor: 1 if letter in letters else -1 for letter, factor in FACTORS.items()}
        halves = {term: float(np.prod([signs[factor] for factor in term.split(" × ")])) / 2 for term in terms}
        parts = [sum(half * terms[term][k] for term, half in halves.items()) for k in range(len(seeds))]
        predicted = [mean + part for mean, part in zip(means, parts, strict=True)]
        found[LADDER[rung]] = [ladder[rung, seed] - x for seed, x in zip(seeds, predicted, strict=True)]
    return found


def noise(values: Values) -> dict[str, list[float]]:
    """Return runs with other random numbers minus runs from the same start models."""
    pairs = [(seed, seed + 10) for name, seed in values if (name, seed + 10) in values]
    return {"another seed": [values["grpo", other] - values["grpo", seed] for seed, other in pairs]}


def planned(study: str, values: Values) -> dict[str, list[float]]:
    """Return the comparisons that the recipe of a study names: each variant minus the one it is compared with."""
    variants = parse(read_recipe(STUDIES / f"{study}.yaml"), StudyConfig).variants
    labels = {variant.name: variant.label for variant in variants}
    named = [(variant, variant.against) for variant in variants if variant.against is not None]
    pairs = [(f"{x.label} against {labels[base]}", base, x.name) for x, base in named]
    return differences(values, pairs)


def show(test: PairedTest) -> str:
    """Return mean, standard error and 95 % interval in points."""
    (mean, error), (low, high) = test.difference, test.interval or (float("nan"),) * 2
    return f"{100 * mean:+.1f} ± {100 * (error or 0):.1f} ({100 * low:+.1f} to {100 * high:+.1f})".replace("-", "−")


def tested(contrasts: Contrasts) -> dict[str, tuple[str, str]]:
    """Return for each contrast what it shows, and its p corrected for all of them (Holm)."""
    tests = {name: paired_test(found, [0.0] * len(found)) for name, found in contrasts.items()}
    known = {name: test for name, test in tests.items() if test is not None}
    corrected = holm([1.0 if test.p is None else test.p for test in known.values()])
    return {
        name: (show(test), "< 0.001" if p < 0.001 else f"{p:.2g}")
        for (name, test), p in zip(known.items(), corrected, strict=True)
    }


def table(contrasts: Mapping[str, Contrasts]) -> list[str]:
    """Return the rows of a table: a contrast, and for each endpoint its difference and corrected p."""
    columns = [tested(found) for found in contrasts.values()]
    head = "| | " + " | ".join(f"{endpoint} | Holm" for endpoint in contrasts) + " |"
    rows = [f"| {name} | {' | '.join(cell for column in columns for cell in column[name])} |" for name in columns[0]]
    return [head, "|---|" + "---:|" * (2 * len(columns)), *rows]


def without_p(found: Mapping[str, Values]) -> list[str]:
    """Return the rows of a table of conditional effects, which are no tests."""
    columns = [tested(conditional(values)) for values in found.values()]
    rows = [f"| {name} | {' | '.join(column[name][0] for column in columns)} |" for name in columns[0]]
    return [f"| | {' | '.join(found)} |", "|---|" + "---:|" * len(columns), *rows]


def means(found: Mapping[str, Values], labels: Mapping[str, str]) -> list[str]:
    """Return the rows of a table of means ± standard errors over seeds, in percent."""
    rows = []
    for variant, label in labels.items():
        spreads = [estimate([x for (name, _), x in values.items() if name == variant]) for values in found.values()]
        cells = [f"{100 * one.mean:.1f} ± {100 * (one.error or 0):.1f}" for one in spreads if one is not None]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return [f"| | {' | '.join(found)} |", "|---|" + "---:|" * len(found), *rows]


def learning_rates(endpoint: str, values: Values) -> list[str]:
    """Return the mean of the seeds for each rung and learning rate, in percent; the best rate of a rung in bold."""
    rates = sorted({name.split("_")[1] for name, _ in values}, key=float)
    rows = [f"| {endpoint} | {' | '.join(rates)} |", "|---|" + "---:|" * len(rates)]
    for rung, label in LADDER.items():
        cells = [fmean(x for (name, _), x in values.items() if name == f"{rung}_{rate}") for rate in rates]
        shown = [f"**{100 * x:.1f}**" if x == max(cells) else f"{100 * x:.1f}" for x in cells]
        rows.append(f"| {label} | {' | '.join(shown)} |")
    return rows


def fresh_seed() -> list[str]:
    """Compare the rungs of a seed that was not used before with the interval in which the others expect it."""
    ladder, fresh = read("ladder"), read("fresh")
    old, new = endpoints(ladder), endpoints(fresh, equal_cost(ladder))
    rows = [f"| | {' | '.join(old)} |", "|---|" + "---:|" * len(old)]
    for label in list(LADDER.values())[1:]:
        cells = []
        for endpoint, values in old.items():
            known, (one,) = rungs(values)[label], rungs(new[endpoint])[label]
            reach = student.ppf(0.975, len(known) - 1) * stdev(known) * (1 + 1 / len(known)) ** 0.5
            low, high = fmean(known) - reach, fmean(known) + reach
            place = "inside" if low <= one <= high else "outside"
            cells.append(f"{100 * one:+.1f}, {place} {100 * low:+.1f} to {100 * high:+.1f}".replace("-", "−"))
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return rows


def attempts_to_refute(runs: Sequence[Run]) -> list[str]:
    """Compute the main effects in other ways: from the last evaluation alone, at half of the steps, and without each
    seed (the smallest and the largest mean).
    """
    accuracies = {(run["variant"], run["seed"]): run["curves"]["eval/avg@16"][1] for run in runs}
    last = effects({key: values[-1] for key, values in accuracies.items()})
    half = effects({key: smooth(values)[len(values) // 2] for key, values in accuracies.items()})
    rows = ["| | last evaluation | half of the steps | without one seed |", "|---|---:|---:|---:|"]
    for name, points in effects({key: smooth(values)[-1] for key, values in accuracies.items()}).items():
        without = [(sum(points) - one) / (len(points) - 1) for one in points]
        reach = f"{100 * min(without):+.1f} to {100 * max(without):+.1f}".replace("-", "−")
        rows.append(f"| {name} | {tested(last)[name][0]} | {tested(half)[name][0]} | {reach} |")
    return rows


def tables() -> dict[str, list[str]]:
    """Return all tables by their headings."""
    ladder, factorial, controls, rates = (endpoints(read(name)) for name in ("ladder", "factorial", "controls", "lr"))
    questions, weak = endpoints(read("questions")), endpoints(read("weak"))
    again = endpoints([run for run in read("ladder", "noise") if run["variant"] == "grpo"])
    more = [("twice the prompts", "token", "twice"), ("dynamic sampling against twice the prompts", "twice", "dapo")]
    whole = [("DAPO − naive GRPO", "grpo", "dapo")]
    released = [("DAPO as released, without the filter − naive GRPO", "grpo", "cell_HSTD")]
    at_same_cost = endpoints(read("ladder"), equal_cost(read("factorial")))
    fifth = "the fifth of highest entropy"
    shares = [(f"{fifth} against a random fifth", "random_fifth", "top_entropy")]
    shares += [(f"{fifth} against the four fifths of lowest entropy", "lowest_entropy", "top_entropy")]
    return {
        "Table 1": means(ladder, LADDER),
        "Each row minus the one above it": table({name: rungs(values) for name, values in ladder.items()}),
        "DAPO minus naive GRPO": table(
            {name: differences(ladder[name], whole) | differences(factorial[name], released) for name in ladder}
        ),
        "Main effects": table({name: effects(values) for name, values in factorial.items()}),
        "Pairs of techniques": table({name: effects(values, [2]) for name, values in factorial.items()}),
        "Effects with and without another technique": without_p(factorial),
        "Main effects at equal generated tokens": table(
            {"equal generated tokens": effects(endpoints(read("factorial"), trained_token=0)["equal cost"])}
        ),
        "Rows outside the factorial: measured minus predicted": table(
            {name: unexplained(at_same_cost[name], factorial[name]) for name in factorial}
        ),
        "Main effects at equal updates, computed in other ways": attempts_to_refute(read("factorial")),
        "Twice the prompts": table({name: differences(values, more) for name, values in controls.items()}),
        "The same start models with other seeds": table({name: noise(values) for name, values in again.items()}),
        "A seed that was not used before": fresh_seed(),
        **{f"Learning rates, {name}": learning_rates(name, values) for name, values in rates.items()},
        "Questions of later papers": table({name: planned("search-questions", x) for name, x in questions.items()}),
        "80/20 and its controls": table({name: differences(values, shares) for name, values in questions.items()}),
        "Normalisation and reward scale, from weaker start models": table(
            {name: planned("search-weak", values) for name, values in weak.items()}
        ),
    }


if __name__ == "__main__":
    print("# Effects on the task with search\n\nWritten by `python -m docs.search_effects`; docs/study.md explains it.")
    for heading, lines in tables().items():
        print(f"\n## {heading}\n\n" + "\n".join(lines))
