"""`dapo study`: which runs there are, that each is made once whatever comes between, what the page says of them.

Means, errors and tests over seeds, and the fit R = −a·exp(H) + b, against values that are known.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import combinations, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from builders import snippets_of, write_rows
from matplotlib.figure import Figure
from matplotlib.text import Text
from refusals import refused
from small import Dapo, small_recipe

from dapo_runner.cli import main
from dapo_runner.commands import study as study_command
from dapo_runner.commands.output import INTERRUPTED
from dapo_runner.config import Config, ConfigError, dump_config, lay_settings, parse, read_recipe
from dapo_runner.config.commands import StudyConfig
from dapo_runner.config.reading import CONFIG_FILE
from dapo_runner.files import append_jsonl, read_jsonl
from dapo_runner.run.folder import write_config
from dapo_runner.tools.study import runs as study_runs
from dapo_runner.tools.study.figures import COLORS, align, differences, draw_figure
from dapo_runner.tools.study.page import write_page
from dapo_runner.tools.study.results import Estimate, by_variant, estimate, holm, paired_test, read_result
from dapo_runner.tools.study.runs import Failure, StudyRun, is_finished, overrides_of, plan_runs, plan_starts

ROOT = Path(__file__).parents[4]
VARIANTS = [
    {"name": "plain", "overrides": {"algorithm": "grpo"}},
    {"name": "higher", "label": "+ clip-higher", "over": "plain", "overrides": {"loss.overrides.clip_high": 0.28}},
    {"name": "short", "against": "plain", "overrides": {"rollout": {"max_response_tokens": 12}}},
]


def write_study(folder: Path, **settings: Any) -> Path:
    (folder / "base.yaml").write_text(yaml.safe_dump(small_recipe()))
    path = folder / "study.yaml"
    raw = {"name": "s", "base": "base.yaml", "output_dir": str(folder), "seeds": [3, 5], "variants": VARIANTS}
    path.write_text(yaml.safe_dump(raw | settings))
    return path


def planned(folder: Path, **settings: Any) -> tuple[StudyConfig, list[StudyRun]]:
    study = parse(read_recipe(write_study(folder, **settings)), StudyConfig)
    return study, plan_runs(study, folder / "base.yaml")


def test_the_studies_that_come_along_do_not_clash() -> None:
    """The questions have the runs of the ladder and others; they begin with its models."""
    recipes, runs = ROOT / "recipes", {}
    for path in sorted((recipes / "studies").iterdir()):
        study = parse(read_recipe(path), StudyConfig)
        assert plan_starts(study, recipes / f"{study.base}.yaml") is not None
        found = plan_runs(study, recipes / f"{study.base}.yaml")
        runs[path.stem] = {(run.variant, run.seed): run.config for run in found}
    shared = runs["search-questions"].keys() & runs["search-ladder"].keys()
    assert shared == {("dapo", seed) for seed in range(5)}
    paths = {name: {run.model.path for run in of.values()} for name, of in runs.items()}
    assert paths["search-questions"] < paths["search-ladder"]


def test_every_variant_with_every_seed_over_what_it_is_over(tmp_path: Path) -> None:
    study, runs = planned(tmp_path, overrides={"run.steps": 2, "optimizer": {"lr": 5e-4}}, threads=2)
    assert [f"{run.variant} {run.seed}" for run in runs] == [
        *("plain 3", "higher 3", "short 3", "plain 5", "higher 5", "short 5")
    ]
    config = runs[4].config
    assert runs[4].folder == tmp_path / "s/runs/higher/seed_5"
    assert (config.run.seed, config.run.steps, config.run.threads, config.optimizer.lr) == (5, 2, 2, 5e-4)
    assert (config.algorithm, config.loss.overrides) == ("grpo", {"clip_high": 0.28})
    assert runs[2].config.rollout.max_response_tokens == 12
    assert overrides_of(study, study.variants[1]) == {"algorithm": "grpo", "loss": {"overrides": {"clip_high": 0.28}}}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("seeds: [1, 1]", "seeds"),
        ("seeds: []", "seeds"),
        ("variants: [{name: a}, {name: a}]", "variants"),
        ("variants: [{name: a, over: b}]", "variants"),
        ("figures: [{name: f, title: F, variants: [x], curves: [y]}]", "figures"),
        ("variants: [{name: a, overrides: {loss.clip: 1}}]", "a: loss.clip"),
        ("{start: per_seed, variants: [{name: a, overrides: {model.tiny.layers: 1}}]}", "a: model.tiny.layers"),
        ("entropy_fit: [x]", "entropy_fit"),
        ("overrides: {run.threads: 2}", "overrides: run.threads"),
        ("overrides: {run.from: runs/a@4}", "overrides: expected no run.from"),
        ("variants: [{name: a, overrides: {run: {seed: 3}}}]", "a: run.seed"),
        ("variants: [{name: ..}]", "variants.0.name"),
        ("{start: per_seed, overrides: {model: {tiny: null, path: m}}}", "start"),
        ("variants: [{name: a, overrides: {reward.kind: 'not_there:score'}}]", "reward.kind"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(tmp_path: Path, settings: str, key: str, dapo: Dapo) -> None:
    dapo.refuses(key, "study", write_study(tmp_path, **yaml.safe_load(settings)), "--dry-run")


def finish(
    run: StudyRun, accuracies: list[float], tokens: int = 100, entropy: Mapping[int, float] | None = None
) -> None:
    """What a run leaves behind, as far as a study looks at it."""
    run.folder.mkdir(parents=True)
    write_config(run.config, run.folder)
    metric, last = f"eval/avg@{run.config.evaluation.k}", run.config.run.steps
    first, half, after = ({"kind": "eval", metric: value} for value in accuracies)
    lines: list[dict[str, Any]] = [{"step": 0, **first}]
    for step in range(1, last + 1):
        figures = {"sampling/tokens": tokens, "train/updates": 2, "train/entropy": entropy[step] if entropy else 0.5}
        lines.append({"step": step, "kind": "step", **figures})
        if step in (last // 2, last):
            lines.append({"step": step, **(after if step == last else half)})
    write_rows(run.folder / "metrics.jsonl", lines)
    timing = [{"step": step, "kind": "step", "seconds/rollout": 1.5} for step in range(1, last + 1)]
    write_rows(run.folder / "timings.jsonl", timing)


def test_the_page_by_hand(tmp_path: Path) -> None:
    figure = {"name": "f", "title": "F", "variants": ["plain", "higher"], "curves": ["train/entropy"], "x": "tokens"}
    study, runs = planned(tmp_path, figures=[figure])
    after = {("plain", 3): 0.5, ("plain", 5): 0.7, ("higher", 3): 0.6, ("higher", 5): 0.9, ("short", 3): 0.1}
    for run in runs:
        if (run.variant, run.seed) in after:
            tokens = 200 if (run.variant, run.seed) == ("higher", 5) else 100
            finish(run, [0.2, 0.3, after[run.variant, run.seed]], tokens)
    results = [read_result(run) for run in runs if is_finished(run)]
    page = write_page(study, results, [Failure(runs[5], "exit code 1: no luck")]).read_text()
    table, comparisons = [
        {line.split(" | ")[0].lstrip("| "): [cell.strip(" |") for cell in line.split(" | ")[1:]] for line in part}
        for part in (part.splitlines() for part in page.split("\n\n") if part.startswith("|"))
    ]
    assert table["plain"][:4] == ["20.0 ± 0.0", "30.0 ± 0.0", "60.0 ± 10.0", "60.0 ± 10.0"]
    assert table["+ clip-higher"][:4] == ["20.0 ± 0.0", "30.0 ± 0.0", "75.0 ± 15.0", "45.0 ± 15.0"]
    assert table["short (1 of 2 seeds)"][2:4] == ["10.0", "10.0"]
    assert table["plain"][4:] == ["0.500 → 0.500", "–", "–", "4", "8", "400", "6"]
    # Two seeds: differences of 10 and 20 points; at 400 tokens +10 and 30 − 70 = −40.
    assert comparisons["+ clip-higher"] == [
        *("plain", "+15.0 ± 5.0 (-48.5 to +78.5)", "0.205", "0.410"),
        *("-15.0 ± 25.0 (-332.7 to +302.7)", "0.656", "0.656"),
    ]
    assert comparisons[""][1] == "equal updates"
    assert comparisons["short"] == ["plain", "-40.0", "–", "–", "-40.0", "–", "–"]
    assert re.search(r"\bshort\b.* 5\b.*exit code 1: no luck$", page, re.MULTILINE)
    assert '**+ clip-higher**: `algorithm="grpo" loss.overrides.clip_high=0.28`' in page
    assert "](f.png)" in page
    assert (tmp_path / "s/f.png").stat().st_size > 10_000
    runs_of_page = json.loads((tmp_path / "s/study.json").read_text())
    odd = {"train/entropy": ([1, 2, 3, 4, 5], [1.0, 2.0, 9.0, 4.0, 6.0])}  # no step is in both means
    axes = results[0].axes | {"step": {step: step for step in range(6)}}
    values = results[0]._replace(points=results[0].points | odd, axes=axes).values(400)
    assert (values["entropy_first"], values["entropy_last"]) == (1.5, 5.0)
    ends = results[0]._replace(points=results[0].points | {results[0].metric: ([0, 4], [0.2, 0.6])}).values(400)
    assert (ends["before"], ends["half"], ends["after"]) == (0.2, None, 0.6)
    fewer = results[0]._replace(axes=results[0].axes | {"updates": {0: 0, 4: 7}})
    page = write_page(study, [fewer, *results[1:]], []).read_text()
    assert "| at the end |" in page
    assert len(runs_of_page) == 5
    for run in runs_of_page:  # what a picture draws can be drawn again
        assert run["axes"]["tokens"][-1] == run["tokens"]
        assert run["curves"]["train/entropy"] == [[1, 2, 3, 4], [0.5] * 4]


def test_runs_without_the_metric_of_the_study_have_a_page(tmp_path: Path, dapo: Dapo) -> None:
    """cons@k is measured only where a reward extracts answers."""
    overrides = {"run": {"early_stop": {"metric": "cons@2"}}}
    for run in planned(tmp_path, overrides=overrides)[1]:
        finish(run, [0.2, 0.3, 0.5], entropy={1: 0.8, 2: 0.6, 3: 0.3, 4: 0.1})
    dapo("study", tmp_path / "study.yaml")
    page = (tmp_path / "s/study.md").read_text()
    assert "| plain | – | – | – | – | 0.700 → 0.200 |" in page
    assert "10 steps, at most half of a run" in page


def test_forks_have_a_page_that_follows_from_its_values(tmp_path: Path, dapo: Dapo) -> None:
    """The log of a fork begins with an evaluation at the step of its checkpoint."""
    for run in planned(tmp_path)[1]:
        finish(run, [0.2, 0.3, 0.5])
        for name in ("metrics.jsonl", "timings.jsonl"):
            events = read_jsonl(run.folder / name)
            write_rows(run.folder / name, [{**event, "step": event["step"] + 40} for event in events])
        assert read_result(run).accuracy == ([0, 200, 400], [0.2, 0.3, 0.5])
        assert read_result(run).series("train/entropy", "step")[0] == [1, 2, 3, 4]
    results = [read_result(run) for run in planned(tmp_path)[1]]
    write_page(planned(tmp_path)[0], results, [])
    dapo("study", tmp_path / "study.yaml", "--check", tmp_path / "s/study.json")


def test_what_the_last_evaluation_lacks_is_not_that_of_an_earlier_one(tmp_path: Path) -> None:
    """Such as cons@k, if no response has an answer."""
    run = planned(tmp_path)[1][0]
    finish(run, [0.2, 0.3, 0.5])
    *lines, last = read_jsonl(run.folder / "metrics.jsonl")
    write_rows(run.folder / "metrics.jsonl", [*lines, {key: last[key] for key in ("step", "kind")}])
    values = read_result(run).values(100.0)
    assert [values[key] for key in ("before", "after", "at_equal_tokens")] == [None] * 3


def test_a_page_names_what_it_cannot_draw_and_shows_any_label(tmp_path: Path, dapo: Dapo) -> None:
    """Of F nothing is logged, of G a part, of H only by a variant that is not in it."""
    figures = [
        {"name": "f", "title": "F", "variants": ["plain"], "curves": ["misspelt"]},
        {"name": "g", "title": "G", "variants": ["plain"], "curves": ["train/entropy", "seconds/rollout"]},
        {"name": "h", "title": "H", "variants": ["plain"], "curves": ["train/ref_kl"]},
    ]
    variants = [{"name": "plain", "label": "p|q"}, *VARIANTS[1:]]
    study, runs = planned(tmp_path, figures=figures, variants=variants, entropy_fit=["plain"])
    for run in runs:
        finish(run, [0.2, 0.3, 0.5], entropy={1: 0.8, 2: 0.6, 3: 0.3, 4: 0.1})
        if run.variant != "plain":
            append_jsonl(run.folder / "metrics.jsonl", [{"step": 4, "kind": "train", "train/ref_kl": 0.1}])
    page = write_page(study, [read_result(run) for run in runs], []).read_text()
    lines = [line for line in page.splitlines() if line.startswith("Not drawn: ")]
    assert [line.split()[2:5:2] for line in lines] == [
        ["misspelt", "F."],
        ["seconds/rollout", "G."],
        ["train/ref_kl", "H."],
    ]
    tables = [part.splitlines() for part in page.split("\n\n") if part.startswith("|")]
    n_cells = [{len(re.findall(r"(?<!\\)\|", line)) for line in table} for table in tables]
    assert [len(found) for found in n_cells] == [1, 1, 1]
    dapo("study", tmp_path / "study.yaml", "--check", tmp_path / "s/study.json")


def test_a_page_is_checked_against_its_values(tmp_path: Path, dapo: Dapo) -> None:
    study, runs = planned(tmp_path)
    for run in runs:
        finish(run, [0.2, 0.3, 0.5 if run.seed == 3 else 0.7])
    page = write_page(study, [read_result(run) for run in runs], [])
    command = ["study", tmp_path / "study.yaml", "--check", page.with_name("study.json")]
    dapo(*command)
    page.write_text(page.read_text().replace("60.0 ± 10.0", "61.0 ± 10.0", 1))
    differences = dapo(*command, code=1)
    page.rename(tmp_path / "elsewhere.md")
    dapo.refuses(str(page), *command)
    page.with_name("study.json").write_text('[{"variant": "plain", "seed": 3}]')
    dapo.refuses(str(command[-1]), *command)
    assert re.findall(r"^[-+] .*?(6[01]\.0) ± 10\.0", differences, re.MULTILINE) == ["61.0", "60.0"]


def test_a_page_has_the_fit_of_every_evaluation_but_the_first(tmp_path: Path) -> None:
    study, runs = planned(tmp_path, entropy_fit=["plain"])
    plain = [run for run in runs if run.variant == "plain"]
    for run in plain:
        entropy = {step: step / 4 + run.seed / 100 for step in range(1, 5)}
        finish(run, [0.0, *(0.9 - 0.2 * math.exp(entropy[step]) for step in (2, 4))], entropy=entropy)
    page = write_page(study, [read_result(run) for run in plain], []).read_text()
    assert "| plain | 0.200 | 0.900 | 0.700 | 1.000 | 4 |" in page
    assert (study.folder / "entropy_fit.png").stat().st_size > 5000


def test_holm_and_means_by_hand() -> None:
    """Step down: 4 × 0.01, 3 × 0.02; 2 × 0.022 would be less than the one before; at most 1."""
    assert holm([0.022, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.7, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
    assert [estimate(values) for values in ([], [0.5])] == [None, Estimate(0.5, None)]
    assert estimate([0.0, 1.0]) == Estimate(0.5, pytest.approx(0.5))


def test_a_paired_test_goes_by_differences() -> None:
    """Seeds that are far apart, and a small gain on each: unpaired, that would be nothing."""
    test, no_spread = paired_test([0.12, 0.51, 0.93], [0.10, 0.50, 0.90]), paired_test([0.3, 0.6], [0.1, 0.4])
    assert test is not None
    assert no_spread is not None
    assert test.difference.mean == pytest.approx(0.02)
    assert test.p == pytest.approx(0.0742, abs=5e-5)  # t = 2√3 with two degrees of freedom
    assert no_spread.difference.error != 0.0  # a spread of rounding, which is none
    assert no_spread.p is no_spread.interval is paired_test([], []) is None


def test_lines_are_of_the_places_and_differences_of_the_seeds_that_both_have() -> None:
    lines = align([([0.0, 10.0], [0.0, 1.0]), ([0.0, 5.0, 20.0], [1.0, 1.0, 1.0])])
    assert lines is not None
    places, values = lines
    assert (places[0], places[-1]) == (0.0, 10.0)
    np.testing.assert_allclose(values, [places / 10, np.ones_like(places)])
    runs = {3: ([0.0, 5.0], [0.5, 0.75]), 4: ([0.0, 5.0], [9.0, 9.0]), 5: ([0.0, 5.0], [0.0, 1.0])}
    others = {5: ([0.0, 5.0], [0.25, 0.5]), 3: ([0.0, 5.0], [0.5, 0.25]), 7: ([0.0, 5.0], [8.0, 8.0])}
    lines = differences(runs, others)
    assert lines is not None
    assert [part.tolist() for part in lines] == [[0.0, 5.0], [[0.0, 0.5], [-0.25, 0.5]]]
    assert align([([], [])]) is differences(runs, {5: ([], [])}) is None


def test_runs_of_another_study_are_not_made_again(tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in planned(tmp_path)[1]:
        finish(run, [0.2, 0.3, 0.5])
    some = write_study(tmp_path, name="t", runs="s", variants=VARIANTS[:2], seeds=[5, 7])
    out = dapo("study", some, "--dry-run")
    assert re.findall(r"\d+", out.partition("t: ")[2])[:4] == ["2", "2", "2", "4"]
    assert re.search(r"  higher: algorithm grpo, departures: .*loss.overrides.clip_high=0.28 \(grpo: 0.2\)", out)
    write_study(tmp_path, name="t", runs="s", variants=VARIANTS[:2], seeds=[5])
    monkeypatch.delattr(study_command, "ProcessPoolExecutor")  # some systems have no semaphores
    dapo("study", some)
    assert "| + clip-higher |" in (tmp_path / "t/study.md").read_text()
    assert not (tmp_path / "t/runs").exists()
    changed = write_study(tmp_path, name="t", runs="s", variants=[{"name": "plain"}], seeds=[5])
    dapo.refuses("run.name: runs/plain/seed_5", "study", changed, "--dry-run")


def test_a_run_is_done_at_its_last_evaluation_and_another_is_refused(tmp_path: Path) -> None:
    def first(**overrides: Any) -> StudyRun:
        return planned(tmp_path, overrides=overrides)[1][0]

    run = first()
    assert not is_finished(run)
    finish(run, [0.2, 0.3, 0.5])
    assert is_finished(run)
    file = run.folder / CONFIG_FILE
    file.write_text(file.read_text().partition("\n")[2])  # by a version that did not write its name
    assert is_finished(run)
    *lines, last = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text("".join(lines))  # killed before it was evaluated
    assert not is_finished(run)
    assert not is_finished(first(run={"steps": 5}))
    (run.folder / "metrics.jsonl").write_text("".join([*lines, last]))
    assert is_finished(first(run={"steps": 5, "max_tokens": 400}))
    stopped = first(run={"steps": 5, "early_stop": {"target": 0.5}})
    write_config(stopped.config, run.folder)
    assert is_finished(stopped)
    write_config(run.config, run.folder)
    for less in ({"steps": 3}, {"max_tokens": 300}):
        with pytest.raises(ConfigError, match=r" 4 steps.* 3 "):
            is_finished(first(run=less))
    with refused("optimizer.lr"):
        is_finished(first(optimizer={"lr": 1.0}))


def test_a_start_that_was_made_otherwise_is_refused(tmp_path: Path, dapo: Dapo) -> None:
    study = parse(read_recipe(path := write_study(tmp_path, start="per_seed")), StudyConfig)
    (folder, config), _ = plan_starts(study, tmp_path / "base.yaml").items()
    folder.mkdir(parents=True)
    folder.with_suffix(".yaml").write_text(dump_config(config))
    assert folder not in plan_starts(study, tmp_path / "base.yaml")
    write_study(tmp_path, start="per_seed", overrides={"model.tiny.warmup.steps": 7, "optimizer.lr": 1.0})
    error = dapo.refuses(f"{folder}: model.tiny.warmup.steps", "study", path, "--dry-run")
    assert "optimizer.lr" not in error  # a start does not depend on it


def test_a_start_that_the_study_cannot_make_must_exist(
    tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = Path("studies", "search-ladder", "start", "seed_0")
    dapo.refuses(f"{start}: expected a start model", "study", "studies/search-ladder", "--dry-run")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, in place of their files."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: found.append(self))
    return found


def draw(folder: Path, figure: dict[str, Any], runs: list[str], **settings: Any) -> Path | None:
    study, planned_runs = planned(folder, figures=[{"name": "f", "title": "F", **figure}], **settings)
    chosen = [run for run in planned_runs if run.variant in runs]
    for run in chosen:
        finish(run, [0.25, 0.5, 0.75 if run.variant == "plain" else 1.0])
    return draw_figure(study.figures[0], study, by_variant([read_result(run) for run in chosen]), folder)


def test_a_picture_of_one_variant_has_its_seeds_and_color(tmp_path: Path, drawn: list[Figure]) -> None:
    curves = ["misspelt", "train/entropy"]
    assert draw(tmp_path, {"variants": ["higher", "plain"], "curves": curves}, ["plain"])
    (entropy,) = drawn[0].axes  # what no run logs has no column
    assert (entropy.get_ylabel(), entropy.get_xlabel()) == ("nats per token", "rollout step")
    assert {line.get_color() for line in entropy.lines} == {COLORS[1]}  # whether or not `higher` is there
    assert len(entropy.lines) == 3  # two seeds and their mean
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["plain"]
    assert draw(tmp_path / "s", {"variants": ["plain"], "curves": ["misspelt"]}, []) is None


def test_a_picture_of_two_has_their_differences_and_titles_that_do_not_overlap(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    names = ["plain", "higher"]
    variants = [{**variant, "label": f"{variant['name']}, mean over many prompts"} for variant in VARIANTS]
    assert draw(tmp_path, {"variants": names, "curves": ["eval/avg@2", "train/entropy"]}, names, variants=variants)
    means, _, difference, _ = drawn[0].axes
    assert len(means.lines) == 2
    assert means.get_ylabel() == "share of problems"
    zero, *seeds, mean = difference.lines
    assert [list(line.get_ydata()) for line in (*seeds, mean)] == [[0.0, 0.0, 0.25]] * 3
    assert set(zero.get_ydata()) == {0}
    drawn[0].draw_without_rendering()
    texts = [text for ax in drawn[0].axes for text in ax.get_children() if isinstance(text, Text)]
    boxes = [text.get_window_extent() for text in texts if text.get_text() == text.axes.get_title(loc="left")]
    assert len(boxes) == 4
    assert [(one, other) for one, other in combinations(boxes, 2) if one.overlaps(other)] == []


SCRIPT = """
import pathlib, shutil, signal, sys, time
recipe = pathlib.Path(sys.argv[1])
print("hello from", recipe)
signal.signal(signal.SIGTERM, lambda *_: (recipe.with_suffix(".stopped").touch(), sys.exit(130)))
recipe.with_suffix(".began").touch()
time.sleep(600 if recipe.parent.name == "short" else 0)
if recipe.stem == "seed_5":
    sys.exit("no luck")
shutil.move(recipe.parents[3] / "made" / recipe.parent.name / recipe.stem, recipe.with_suffix(""))
"""


@pytest.fixture
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take no time, but those of `short` do not end by themselves. The seed of 5 fails."""
    monkeypatch.setattr(StudyRun, "command", property(lambda run: [sys.executable, "-c", SCRIPT, str(run.recipe)]))


@pytest.mark.usefixtures("_scripts")
def test_what_ends_one_run_does_not_touch_the_others(
    tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten minutes after another, they end."""
    clock = count(0, 600)
    monkeypatch.setattr(study_command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    runs = planned(tmp_path, variants=VARIANTS[:2])[1]
    for run in runs:
        finish(run, [0.2, 0.3, 0.5])
    (tmp_path / "s/runs").rename(tmp_path / "made")
    out = dapo("study", tmp_path / "study.yaml", "--jobs", 2, code=1)
    ended = re.findall(r"^\[(\d)/4\] (\w+)\D+(\d): (.*), \d+ s\D+ (\d+) min", out, re.MULTILINE)
    assert [(n, left) for n, *_, left in ended] == [("1", "30"), ("2", "20"), ("3", "10"), ("4", "0")]
    results = {(variant, int(seed)): result for _, variant, seed, result, _ in ended}
    assert results["plain", 3] == results["higher", 3] == "50.0%"
    assert all(re.search(r"1\b.*no luck", results[name, 5]) for name in ("plain", "higher"))
    assert "| + clip-higher (1 of 2 seeds) |" in (tmp_path / "s/study.md").read_text()
    assert str(runs[2].log) in dapo.err
    assert runs[2].log.read_text().startswith("hello from")


@pytest.mark.usefixtures("_scripts")
def test_sigterm_stops_the_runs_under_way(tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does. The page is of the runs that are done."""
    waits = planned(tmp_path, variants=[{"name": "short"}])[1][0]

    def sleep(seconds: float) -> None:
        if waits.folder.with_suffix(".began").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(study_runs, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("not handled"))
    try:
        dapo("study", tmp_path / "study.yaml", code=INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert waits.folder.with_suffix(".stopped").exists()
    assert (tmp_path / "s/study.md").exists()


def test_what_the_documentation_shows() -> None:
    snippets, tiny = snippets_of("studies"), ROOT / "recipes/tiny.yaml"
    study = parse(yaml.safe_load(snippets["study"]), StudyConfig)
    assert [run.config.loss.overrides for run in plan_runs(study, tiny)[:3]] == [{}, {"clip_high": 0.28}, {}]
    warm_up = lay_settings(yaml.safe_load(tiny.read_text()), yaml.safe_load(snippets["warm-up"]))
    assert parse(warm_up, Config).data.arithmetic.even_digits


@pytest.mark.ranks
def test_a_study_that_is_killed_goes_on_and_makes_nothing_twice(tmp_path: Path, python: str) -> None:
    path = write_study(tmp_path, variants=VARIANTS[:2], seeds=[3], start="per_seed")
    command = [python, "-m", "dapo_runner", "study", str(path), "--jobs", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed:
        second = tmp_path / "s/runs/higher/seed_3/metrics.jsonl"
        until = time.monotonic() + 180
        while not second.exists() and time.monotonic() < until:
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
    first = tmp_path / "s/runs/plain/seed_3/metrics.jsonl"
    before = first.stat().st_mtime_ns
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\[2/2\] higher", done.stdout, re.MULTILINE)
    assert first.stat().st_mtime_ns == before
    assert main(["study", str(path)]) == 0
    assert sorted(os.listdir(tmp_path / "s/start")) == ["seed_3", "seed_3.yaml"]
    page = (tmp_path / "s/study.md").read_text()
    assert re.search(r"^python 3.+ torch .+ commit \w{12}(-dirty)?\. Runs side by side: 1\.$", page, re.MULTILINE)
