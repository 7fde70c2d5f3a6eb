"""The page of a study: its table, its pictures, and what they were made with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dapo_runner.config import StudyConfig, VariantConfig, flatten
from dapo_runner.early_stop import early_stop_metric
from dapo_runner.study.entropy_fit import write_entropy_fit
from dapo_runner.study.figures import draw_figure, label_of
from dapo_runner.study.plan import StudyRun, overrides_of
from dapo_runner.study.results import Result, by_variant
from dapo_runner.study.runs import Failure
from dapo_runner.study.statistics import Estimate, PairedTest, estimate, paired_test

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
    *("", "before", "half", "after", "difference", "p", "at equal tokens"),
    *("entropy", "length", "cut", "steps", "updates", "tokens", "seconds"),
)
NONE = "–"


def write_page(
    study: StudyConfig, runs: Sequence[StudyRun], results: Sequence[Result], failures: Sequence[Failure]
) -> Path:
    """Into the study's folder, and beside it the figures of every run as JSON. Returns where the page lies."""
    found = by_variant(results)
    equal = min((result.total("tokens") for result in results), default=0.0)
    columns: Columns = {**COLUMNS, "at_equal_tokens": lambda result: result.accuracy_at(equal)}
    pictures = [(figure, draw_figure(figure, study, found, study.folder)) for figure in study.figures]
    parts = [
        f"# {study.title}",
        study.about.strip(),
        _table(study, found, columns),
        _legend(study, runs, equal),
        *(f"Failed: {failure.run.variant}, seed {failure.run.seed}: {failure.reason}" for failure in failures),
        *(f"![{figure.title}]({path.name})" for figure, path in pictures if path is not None),
        write_entropy_fit(study, found, study.folder),
        _variants(study),
        _machine(study, results),
    ]
    page = study.folder / PAGE
    page.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    figures = [
        {"variant": result.run.variant, "seed": result.run.seed} | {name: of(result) for name, of in columns.items()}
        for result in results
    ]
    (study.folder / FIGURES).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return page


def _table(study: StudyConfig, found: Mapping[str, Sequence[Result]], columns: Columns) -> str:
    lines = [f"| {' | '.join(HEADS)} |", f"|---|{'---:|' * (len(HEADS) - 1)}"]
    above: str | None = None
    for variant in study.variants:
        lines.append(f"| {' | '.join(_row(study, variant, found, variant.against or above, columns))} |")
        above = variant.name
    return "\n".join(lines)


def _row(
    study: StudyConfig,
    variant: VariantConfig,
    found: Mapping[str, Sequence[Result]],
    other: str | None,
    columns: Columns,
) -> list[str]:
    results, label = found.get(variant.name, []), label_of(variant)
    if len(results) < len(study.seeds):
        label += f" ({len(results)} of {len(study.seeds)} seeds)"
    if not results:
        return [label, *[NONE] * (len(HEADS) - 1)]
    values = {
        name: estimate([value for result in results if (value := of(result)) is not None])
        for name, of in columns.items()
    }
    test = None if other is None else compare(results, found.get(other, []))
    named = "".join(f" ({label_of(named)})" for named in study.variants if named.name == variant.against)
    return [
        label,
        *(_percent(values[name]) for name in ("before", "half", "after")),
        NONE if test is None else f"{_percent(test.difference, '+')}{named}",
        NONE if test is None or test.p is None else "< 0.001" if test.p < 0.001 else f"{test.p:.3f}",
        _percent(values["at_equal_tokens"]),
        _change(values, "entropy", "{:.3f}"),
        _change(values, "length", "{:.1f}"),
        _change(values, "cut", "{:.1%}"),
        *(_whole(values[name]) for name in ("steps", "updates", "tokens", "seconds")),
    ]


def compare(results: Sequence[Result], others: Sequence[Result]) -> PairedTest | None:
    """The accuracy after training, over the seeds that both have."""
    after = {result.run.seed: result.after for result in others}
    shared = [result for result in results if result.run.seed in after]
    return paired_test([result.after for result in shared], [after[result.run.seed] for result in shared])


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
        "The difference in accuracy is to the row above, or to the one named, over the same seeds; p is that of a "
        "two-sided paired t-test, not corrected for the number of rows. Half is the evaluation nearest to half of the "
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
