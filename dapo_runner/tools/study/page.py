"""Write the page of a study: table, comparisons, pictures, and the environment of its runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import ndiff
from pathlib import Path
from tempfile import TemporaryDirectory

from dapo_runner.config import ConfigError, StudyConfig, VariantConfig, flatten
from dapo_runner.files import atomic_write
from dapo_runner.tools.study.figures import draw_entropy_fit, draw_figure, label_of
from dapo_runner.tools.study.results import (
    TAIL,
    Estimate,
    PairedTest,
    Result,
    Values,
    by_variant,
    estimate,
    holm,
    load_results,
    paired_test,
)
from dapo_runner.tools.study.runs import Failure, overrides_of

PAGE, VALUES = "study.md", "study.json"
NONE = "–"
BUDGETS = ("after", "at_equal_tokens")  # accuracies for comparisons
# Heading → format of its mean ("" for an accuracy) and names of values: one, or a first and a last mean.
COLUMNS: dict[str, tuple[str, ...]] = {
    "before": ("", "before"),
    "half": ("", "half"),
    "after": ("", "after"),
    "at equal tokens": ("", "at_equal_tokens"),
    "entropy": ("{:.3f}", "entropy_first", "entropy_last"),
    "length": ("{:.1f}", "length_first", "length_last"),
    "truncated": ("{:.1%}", "truncated_first", "truncated_last"),
    **{name: ("{:,.0f}", name) for name in ("steps", "updates", "tokens", "seconds")},
}
Table = Mapping[str, Mapping[int, Values]]
"""The values of all runs, by variant and seed."""


def write_page(study: StudyConfig, results: Sequence[Result], failures: Sequence[Failure]) -> Path:
    """Write the page into the study's folder, and the values and curves of every run as JSON beside it, from which
    tables and pictures can be computed again. Return the path of the page.
    """
    found = by_variant(results)
    equal_tokens = min((result.total("tokens") for result in results), default=0.0)
    table = {name: {one.seed: one.values(equal_tokens) for one in group} for name, group in found.items()}
    drawn = sorted({key for figure in study.figures for key in figure.curves})
    pictures = [(figure.title, draw_figure(figure, study, found, study.folder)) for figure in study.figures]
    parts = [
        f"# {study.title}",
        study.about.strip(),
        _markdown(["", *COLUMNS], [_row(study, variant, table) for variant in study.variants]),
        _comparisons(study, table),
        _legend(study, results, equal_tokens),
        *(f"Failed: {failure.run.variant}, seed {failure.run.seed}: {failure.reason}" for failure in failures),
        *(f"![{title}]({path.name})" for title, path in pictures if path is not None),
        *(f"Not drawn: {key} in {title}. No variant there has logged it." for title, key in _undrawn(study, results)),
        draw_entropy_fit(study, found, study.folder),
        _variants(study),
        *dict.fromkeys(result.made_with for result in results),  # several if the study resumed on another machine
    ]
    atomic_write(study.folder / PAGE, "\n\n".join(part for part in parts if part) + "\n")
    lines = [json.dumps(result.as_json(equal_tokens, drawn)) for result in results]
    atomic_write(study.folder / VALUES, "[" + ",\n ".join(lines) + "]\n")
    return study.folder / PAGE


def check_page(study: StudyConfig, values: Path) -> list[str]:
    """Return the lines in which the page beside a study's JSON file differs from one that is made from the file. Raises
    ConfigError for files that are not of this study.
    """
    results, page = load_results(values), values.with_suffix(".md")
    if other := {result.variant for result in results} - {variant.name for variant in study.variants}:
        raise ConfigError(f"{values}: expected variants of {study.name}, got {', '.join(sorted(other))}")
    if not page.is_file():
        raise ConfigError(f"{page}: expected the page of {values}, found no file")
    with TemporaryDirectory() as folder:
        undrawn = study.model_copy(update={"output_dir": Path(folder), "name": "", "figures": []})
        again = write_page(undrawn, results, [])
        texts = [path.read_text(encoding="utf-8").split("\n") for path in (page, again)]
    said, follows = ([line for line in text if not line.startswith(("![", "Failed: ", "Not drawn:"))] for text in texts)
    return [line for line in ndiff(said, follows) if line[0] in "-+" and line[2:]]


def _row(study: StudyConfig, variant: VariantConfig, table: Table) -> list[str]:
    runs, label = list(table.get(variant.name, {}).values()), label_of(variant)
    if len(runs) < len(study.seeds):
        label += f" ({len(runs)} of {len(study.seeds)} seeds)"
    cells = []
    for form, *names in COLUMNS.values():
        means = [estimate([x for run in runs if (x := run[name]) is not None]) for name in names]
        shown = [form.format(mean.mean) if form else _percent(mean) for mean in means if mean is not None]
        cells.append(" → ".join(shown) if len(shown) == len(means) else NONE)
    return [label, *cells]


def _comparisons(study: StudyConfig, table: Table) -> str:
    """Compare each variant with the previous one, or the one it names, at both budgets. Holm corrects p for all."""
    labels = {variant.name: label_of(variant) for variant in study.variants}
    pairs = zip(study.variants, study.variants[1:], strict=False)
    against = {variant.name: variant.against or above.name for above, variant in pairs}
    tests = {
        (name, budget): compare(table.get(name, {}), table.get(other, {}), budget)
        for name, other in against.items()
        for budget in BUDGETS
    }
    if not any(tests.values()):
        return ""
    ps = {key: test.p for key, test in tests.items() if test is not None and test.p is not None}
    corrected = dict(zip(ps, holm(list(ps.values())), strict=True))
    rows = []
    for name, other in against.items():
        rows.append([labels[name], labels[other]])
        for key in ((name, budget) for budget in BUDGETS):
            rows[-1] += [_difference(tests[key]), _p(ps.get(key)), _p(corrected.get(key))]
    n_updates = {run["updates"] for runs in table.values() for run in runs.values()}
    named = "equal updates" if len(n_updates) == 1 else "at the end", "equal tokens"
    heads = [f"{head}{budget}" for budget in named for head in ("", "p, ", "Holm, ")]
    return _markdown(["", "compared with", *heads], rows)


def compare(runs: Mapping[int, Values], others: Mapping[int, Values], name: str) -> PairedTest | None:
    """Compare two variants by a value, over the seeds that both have run."""
    pairs = [(runs[seed][name], others[seed][name]) for seed in runs if seed in others]
    known = [(left, right) for left, right in pairs if left is not None and right is not None]
    return paired_test([left for left, _ in known], [right for _, right in known])


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)])


def _difference(test: PairedTest | None) -> str:
    if test is None or test.interval is None:
        return NONE if test is None else _percent(test.difference, "+")
    low, high = test.interval
    return f"{_percent(test.difference, '+')} ({100 * low:+.1f} to {100 * high:+.1f})"


def _p(p: float | None) -> str:
    return NONE if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _percent(value: Estimate, sign: str = "") -> str:
    error = "" if value.error is None else f" ± {100 * value.error:.1f}"
    return f"{100 * value.mean:{sign}.1f}{error}"


def _legend(study: StudyConfig, results: Sequence[Result], equal_tokens: float) -> str:
    is_short = any(result.total("step") < 2 * TAIL for result in results)
    tail = f"{TAIL} steps" + ", at most half of a run" * is_short
    metrics = " or ".join(sorted({f"`{result.metric.removeprefix('eval/')}`" for result in results}))
    scale = "in percent" if "@" in metrics else "times 100"
    return (
        f"Accuracy is {metrics} on held-out problems {scale}, mean ± standard error over the seeds "
        f"{', '.join(map(str, study.seeds))}. Half is the evaluation nearest to half of the tokens; at equal tokens is "
        f"interpolated at {equal_tokens:,.0f}, the fewest of any run. Entropy (nats per token), length (tokens) and "
        f"truncated (share of responses) are means over the first and the last {tail}. Differences are over the seeds "
        "of both variants, with a 95 % confidence interval and the p of a paired t-test, as it is and corrected for "
        f"all comparisons of this page (Holm). Each run had {study.threads} CPU threads."
    )


def _undrawn(study: StudyConfig, results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Yield the figure's title and each curve that none of the figure's variants has logged."""
    for figure in study.figures:
        logged = {key for result in results if result.variant in figure.variants for key in result.points}
        yield from ((figure.title, key) for key in figure.curves if key not in logged)


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
