"""The page of a study: its table, its pictures, and what they were made with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dapo_runner.config import StudyConfig, VariantConfig, flatten
from dapo_runner.early_stop import early_stop_metric
from dapo_runner.tools.study.entropy_fit import write_entropy_fit
from dapo_runner.tools.study.figures import draw_figure, label_of
from dapo_runner.tools.study.plan import StudyRun, overrides_of
from dapo_runner.tools.study.results import Result, by_variant
from dapo_runner.tools.study.runs import Failure
from dapo_runner.tools.study.statistics import Estimate, PairedTest, estimate, holm, paired_test

PAGE, FIGURES = "study.md", "study.json"
Columns = Mapping[str, Callable[[Result], float | None]]
COLUMNS: Columns = {
    "before": lambda result: result.before,
    "half": lambda result: result.half,
    "after": lambda result: result.after,
    "entropy_first": lambda result: result.first("train/entropy"),
    "entropy_last": lambda result: result.last("train/entropy"),
    "length_first": lambda result: result.first("sampling/length"),
    "length_last": lambda result: result.last("sampling/length"),
    "cut_first": lambda result: result.first("sampling/truncated"),
    "cut_last": lambda result: result.last("sampling/truncated"),
    "steps": lambda result: result.total("step"),
    "updates": lambda result: result.total("updates"),
    "tokens": lambda result: result.total("tokens"),
    "seconds": lambda result: result.total("seconds"),
}
HEADS = (
    *("", "before", "half", "after", "at equal tokens"),
    *("entropy", "length", "cut", "steps", "updates", "tokens", "seconds"),
)
BUDGETS = {"after": "equal updates", "at_equal_tokens": "equal tokens"}  # the accuracies that variants are compared by
NONE = "–"


def write_page(
    study: StudyConfig, runs: Sequence[StudyRun], results: Sequence[Result], failures: Sequence[Failure]
) -> Path:
    """Write the page into the study's folder, and beside it as JSON the values and curves of every run, from which
    tables and pictures can be computed again. Returns where the page lies.
    """
    found = by_variant(results)
    equal = min((result.total("tokens") for result in results), default=0.0)
    columns: Columns = {**COLUMNS, "at_equal_tokens": lambda result: result.accuracy_at(equal)}
    pictures = [(figure, draw_figure(figure, study, found, study.folder)) for figure in study.figures]
    parts = [
        f"# {study.title}",
        study.about.strip(),
        _table(study, found, columns),
        _comparisons(study, found, columns),
        _legend(study, runs, equal),
        *(f"Failed: {failure.run.variant}, seed {failure.run.seed}: {failure.reason}" for failure in failures),
        *(f"![{figure.title}]({path.name})" for figure, path in pictures if path is not None),
        write_entropy_fit(study, found, study.folder),
        _variants(study),
        _machine(study, results),
    ]
    page = study.folder / PAGE
    page.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    drawn = sorted({key for figure in study.figures for key in figure.curves} | {"train/entropy"})
    lines = (
        json.dumps(
            {"variant": result.run.variant, "seed": result.run.seed}
            | {name: of(result) for name, of in columns.items()}
            | {"axes": result.axes_by_step(), "curves": result.curves([result.metric, *drawn])}
        )
        for result in results
    )
    (study.folder / FIGURES).write_text("[" + ",\n ".join(lines) + "]\n", encoding="utf-8")
    return page


def _table(study: StudyConfig, found: Mapping[str, Sequence[Result]], columns: Columns) -> str:
    rows = [_row(study, variant, found.get(variant.name, []), columns) for variant in study.variants]
    return _markdown(HEADS, rows)


def _row(study: StudyConfig, variant: VariantConfig, results: Sequence[Result], columns: Columns) -> list[str]:
    label = label_of(variant)
    if len(results) < len(study.seeds):
        label += f" ({len(results)} of {len(study.seeds)} seeds)"
    if not results:
        return [label, *[NONE] * (len(HEADS) - 1)]
    values = {
        name: estimate([value for result in results if (value := of(result)) is not None])
        for name, of in columns.items()
    }
    return [
        label,
        *(_percent(values[name]) for name in ("before", "half", "after", "at_equal_tokens")),
        _change(values, "entropy", "{:.3f}"),
        _change(values, "length", "{:.1f}"),
        _change(values, "cut", "{:.1%}"),
        *(_whole(values[name]) for name in ("steps", "updates", "tokens", "seconds")),
    ]


def _comparisons(study: StudyConfig, found: Mapping[str, Sequence[Result]], columns: Columns) -> str:
    """Every variant against the row above it or the one it names, by both budgets, p corrected for all of them."""
    tests: dict[tuple[str, str], PairedTest] = {}
    against: dict[str, VariantConfig] = {}
    for above, variant in zip([None, *study.variants], study.variants, strict=False):
        named = next((other for other in study.variants if other.name == variant.against), above)
        if named is None:
            continue
        against[variant.name] = named
        for budget in BUDGETS:
            test = compare(found.get(variant.name, []), found.get(named.name, []), columns[budget])
            if test is not None:
                tests[variant.name, budget] = test
    tested = [key for key, test in tests.items() if test.p is not None]
    corrected = dict(zip(tested, holm([tests[key].p or 0.0 for key in tested]), strict=True))
    heads = ["", "compared with", *(f"{head}{budget}" for budget in BUDGETS.values() for head in ("", "p, ", "Holm, "))]
    labels = {variant.name: label_of(variant) for variant in study.variants}
    rows = []
    for name, other in against.items():
        cells = [labels[name], label_of(other)]
        for budget in BUDGETS:
            test = tests.get((name, budget))
            cells += [_difference(test), _p(test.p if test else None), _p(corrected.get((name, budget)))]
        rows.append(cells)
    return _markdown(heads, rows) if tests else ""


def compare(
    results: Sequence[Result], others: Sequence[Result], accuracy: Callable[[Result], float | None]
) -> PairedTest | None:
    """Compare two variants by an accuracy, over the seeds that both have."""
    of = {result.run.seed: accuracy(result) for result in others}
    pairs = [(accuracy(result), of[result.run.seed]) for result in results if result.run.seed in of]
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


def _percent(value: Estimate | None, sign: str = "") -> str:
    if value is None:
        return NONE
    error = "" if value.error is None else f" ± {100 * value.error:.1f}"
    return f"{100 * value.mean:{sign}.1f}{error}"


def _change(values: Mapping[str, Estimate | None], name: str, form: str) -> str:
    first, last = values[f"{name}_first"], values[f"{name}_last"]
    return NONE if first is None or last is None else f"{form.format(first.mean)} → {form.format(last.mean)}"


def _whole(value: Estimate | None) -> str:
    return NONE if value is None else f"{value.mean:,.0f}"


def _legend(study: StudyConfig, runs: Sequence[StudyRun], equal: float) -> str:
    seeds = ", ".join(map(str, study.seeds))
    metrics = " or ".join(sorted({f"`{early_stop_metric(run.config).removeprefix('eval/')}`" for run in runs}))
    budgets = sorted({run.config.run.max_tokens for run in runs if run.config.run.max_tokens is not None})
    tokens = f", or with {' or '.join(f'{budget:,}' for budget in budgets)} generated tokens" if budgets else ""
    steps = " or ".join(f"{steps:,}" for steps in sorted({run.config.run.steps for run in runs}))
    return (
        f"Accuracy is {metrics} on held-out problems in percent, mean ± standard error over the seeds {seeds}. "
        "Differences are over the same seeds, with the 95 % confidence interval in brackets and the p of a two-sided "
        "paired t-test, as it is and corrected for all comparisons of this page (Holm). Equal updates compares the "
        "accuracy after training, equal tokens the one at equal tokens. Half is the evaluation nearest to half of the "
        f"tokens; at equal tokens is interpolated at {equal:,.0f}, the fewest of any run. Entropy (nats per token), "
        f"length (tokens) and cut (share of responses) are means over the first and the last {study.tail} steps. A run "
        f"ends after {steps} steps{tokens}; tokens are all that the engine generated, those of dropped groups and of "
        "continuations included."
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
    """What the runs were made with, each kind once: a study may have gone on elsewhere, or with another commit."""
    made_with = dict.fromkeys(result.run.made_with for result in results)
    threads = "one thread" if study.threads == 1 else f"{study.threads} threads"
    shared = f"Each run has {threads}; seconds are those of its steps and evaluations, on a machine it may have shared."
    return "\n\n".join([*filter(None, made_with), shared])
