"""The page of a study: its table, its comparisons, its pictures, and what they were made with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dapo_runner.config import StudyConfig, VariantConfig, flatten
from dapo_runner.early_stop import early_stop_metric
from dapo_runner.files import atomic_write
from dapo_runner.tools.study.figures import draw_entropy_fit, draw_figure, label_of
from dapo_runner.tools.study.plan import StudyRun, overrides_of
from dapo_runner.tools.study.results import MEANS, TAIL, Result, Values, by_variant
from dapo_runner.tools.study.runs import Failure
from dapo_runner.tools.study.statistics import Estimate, PairedTest, estimate, holm, paired_test

PAGE, VALUES = "study.md", "study.json"
NONE = "–"
BUDGETS = {"after": "equal updates", "at_equal_tokens": "equal tokens"}  # the accuracies that variants are compared by


class Column(NamedTuple):
    head: str
    names: tuple[str, ...]  # of the values: an accuracy, a first and a last mean, or a total
    form: str = ""  # of a mean; "": an accuracy in percent with its standard error


COLUMNS = (
    Column("before", ("before",)),
    Column("half", ("half",)),
    Column("after", ("after",)),
    Column("at equal tokens", ("at_equal_tokens",)),
    Column("entropy", ("entropy_first", "entropy_last"), "{:.3f}"),
    Column("length", ("length_first", "length_last"), "{:.1f}"),
    Column("truncated", ("truncated_first", "truncated_last"), "{:.1%}"),
    *(Column(name, (name,), "{:,.0f}") for name in ("steps", "updates", "tokens", "seconds")),
)
Table = Mapping[str, Mapping[int, Values]]
"""The values of the runs, by variant and seed."""


def write_page(
    study: StudyConfig, runs: Sequence[StudyRun], results: Sequence[Result], failures: Sequence[Failure]
) -> Path:
    """Write the page into the study's folder, and beside it as JSON the values and curves of every run, from which
    tables and pictures can be computed again. Returns where the page lies.
    """
    found = by_variant(results)
    equal_tokens = min((result.total("tokens") for result in results), default=0.0)
    table = {name: {result.run.seed: result.values(equal_tokens) for result in of} for name, of in found.items()}
    pictures = [(figure, draw_figure(figure, study, found, study.folder)) for figure in study.figures]
    parts = [
        f"# {study.title}",
        study.about.strip(),
        _markdown(["", *(column.head for column in COLUMNS)], [_row(study, v, table) for v in study.variants]),
        _comparisons(study, table),
        _legend(study, runs, equal_tokens),
        *(f"Failed: {failure.run.variant}, seed {failure.run.seed}: {failure.reason}" for failure in failures),
        *(f"![{figure.title}]({path.name})" for figure, path in pictures if path is not None),
        draw_entropy_fit(study, found, study.folder),
        _variants(study),
        _machine(study, results),
    ]
    atomic_write(study.folder / PAGE, "\n\n".join(part for part in parts if part) + "\n")
    drawn = sorted({key for figure in study.figures for key in figure.curves} | {MEANS["entropy"]})
    lines = (
        json.dumps(
            {"variant": result.run.variant, "seed": result.run.seed}
            | result.values(equal_tokens)
            | result.as_json(drawn)
        )
        for result in results
    )
    atomic_write(study.folder / VALUES, "[" + ",\n ".join(lines) + "]\n")
    return study.folder / PAGE


def _row(study: StudyConfig, variant: VariantConfig, table: Table) -> list[str]:
    runs, label = list(table.get(variant.name, {}).values()), label_of(variant)
    if len(runs) < len(study.seeds):
        label += f" ({len(runs)} of {len(study.seeds)} seeds)"
    cells = []
    for column in COLUMNS:
        means = [estimate([x for run in runs if (x := run[name]) is not None]) for name in column.names]
        known = [mean for mean in means if mean is not None]
        shown = (column.form.format(mean.mean) if column.form else _percent(mean) for mean in known)
        cells.append(" → ".join(shown) if len(known) == len(means) else NONE)
    return [label, *cells]


def _comparisons(study: StudyConfig, table: Table) -> str:
    """Compare each variant with the one above it or the one it names, by both budgets. p is corrected for all."""
    pairs = zip(study.variants, study.variants[1:], strict=False)
    against = {variant.name: variant.against or above.name for above, variant in pairs}
    tests = {
        (name, budget): test
        for name, other in against.items()
        for budget in BUDGETS
        if (test := compare(table.get(name, {}), table.get(other, {}), budget)) is not None
    }
    tested = {key: test.p for key, test in tests.items() if test.p is not None}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    heads = ["", "compared with", *(f"{head}{budget}" for budget in BUDGETS.values() for head in ("", "p, ", "Holm, "))]
    labels, rows = {variant.name: label_of(variant) for variant in study.variants}, []
    for name, other in against.items():
        cells = [labels[name], labels[other]]
        for key in ((name, budget) for budget in BUDGETS):
            cells += [_difference(tests.get(key)), _p(tested.get(key)), _p(corrected.get(key))]
        rows.append(cells)
    return _markdown(heads, rows) if tests else ""


def compare(runs: Mapping[int, Values], others: Mapping[int, Values], name: str) -> PairedTest | None:
    """Compare two variants by a value, over the seeds that both have."""
    pairs = [(runs[seed][name], others[seed][name]) for seed in runs if seed in others]
    known = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    return paired_test([mine for mine, _ in known], [theirs for _, theirs in known])


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _difference(test: PairedTest | None) -> str:
    if test is None:
        return NONE
    if test.interval is None:
        return _percent(test.difference, "+")
    low, high = (100 * bound for bound in test.interval)
    return f"{_percent(test.difference, '+')} ({low:+.1f} to {high:+.1f})"


def _p(p: float | None) -> str:
    return NONE if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _percent(value: Estimate, sign: str = "") -> str:
    error = "" if value.error is None else f" ± {100 * value.error:.1f}"
    return f"{100 * value.mean:{sign}.1f}{error}"


def _legend(study: StudyConfig, runs: Sequence[StudyRun], equal_tokens: float) -> str:
    metrics = " or ".join(sorted({f"`{early_stop_metric(run.config).removeprefix('eval/')}`" for run in runs}))
    budgets = sorted({run.config.run.max_tokens for run in runs if run.config.run.max_tokens is not None})
    tokens = f", or with {' or '.join(f'{budget:,}' for budget in budgets)} generated tokens" if budgets else ""
    steps = " or ".join(f"{steps:,}" for steps in sorted({run.config.run.steps for run in runs}))
    return (
        f"Accuracy is {metrics} on held-out problems in percent, mean ± standard error over the seeds "
        f"{', '.join(map(str, study.seeds))}. Differences are over the same seeds, with the 95 % confidence interval "
        "in brackets and the p of a two-sided paired t-test, as it is and corrected for all comparisons of this page "
        "(Holm). Equal updates compares the accuracy after training, equal tokens the one at equal tokens. Half is the "
        f"evaluation nearest to half of the tokens; at equal tokens is interpolated at {equal_tokens:,.0f}, the fewest "
        "of any run. Entropy (nats per token), length (tokens) and truncated (share of responses) are means over the "
        f"first and the last {TAIL} steps. A run ends after {steps} steps{tokens}; tokens are all that the "
        "engine generated, those of dropped groups and of continuations included."
    )


def _variants(study: StudyConfig) -> str:
    common = _settings(study.overrides)
    rows = [
        f"- **{label_of(variant)}**: {_settings(overrides_of(study, variant)) or 'the recipe as it is'}"
        for variant in study.variants
    ]
    return "\n".join([f"Every run is `{study.base}`{' with ' if common else ''}{common}, and:", "", *rows])


def _settings(overrides: Mapping[str, object]) -> str:
    found = flatten(overrides).items()
    return f"`{' '.join(f'{key}={json.dumps(value)}' for key, value in found)}`" if found else ""


def _machine(study: StudyConfig, results: Sequence[Result]) -> str:
    """What the runs were made with, each kind once: a study may have resumed elsewhere, or with another commit."""
    made_with = dict.fromkeys(result.run.made_with for result in results)
    threads = "one thread" if study.threads == 1 else f"{study.threads} threads"
    shared = f"Each run has {threads}; seconds are those of its steps and evaluations, on a machine it may have shared."
    return "\n\n".join([*filter(None, made_with), shared])
