"""`dapo train --dry-run`: it says what a run will do, and refuses what a run would refuse."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from refusals import refused
from small import Notes, write_recipe

from dapo_runner.cli import main
from dapo_runner.config import load_config
from dapo_runner.preflight.needs import check_needs
from dapo_runner.train import train

# Names in capitals are files of the fixture below.
ON_FILES = "model.tiny=null model.path=MODEL data.format=gsm8k data.path=GOOD data.eval_size=1"


@pytest.fixture
def files(tmp_path: Path, start: Path) -> dict[str, Path]:
    rows = [{"question": f"{number}+1", "answer": f"#### {number + 1}"} for number in range(3)]
    good, bad, empty = tmp_path / "good.jsonl", tmp_path / "bad.jsonl", tmp_path / "empty"
    good.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bad.write_text(json.dumps({"problem": "1+1"}) + "\n")
    empty.mkdir()
    return {"MODEL": start, "GOOD": good, "BAD": bad, "EMPTY": empty}


def arguments_of(overrides: str, files: dict[str, Path]) -> list[str]:
    for name, path in files.items():
        overrides = overrides.replace(name, str(path))
    return overrides.split()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (f"{ON_FILES} data.path=BAD", "data.columns"),
        (f"{ON_FILES} data.format=auto data.path=BAD", "row 1: "),
        (f"{ON_FILES} data.eval_size=4", "data.eval_size: "),
        (f"{ON_FILES} rollout.max_prompt_tokens=1", "rollout.max_prompt_tokens"),
        (f"{ON_FILES} data.chat_template=always", "data.chat_template: "),
        (f"{ON_FILES} model.path=EMPTY", "model.path: "),
        (f"{ON_FILES} model.path=no/such/model", "model.path: "),
        (
            f"{ON_FILES} rollout.max_response_tokens=99 optimizer.token_budget=128",
            "rollout.max_response_tokens: ",
        ),
        (f"{ON_FILES} loss.overrides.kl_coef=0.1 loss.reference=EMPTY", "loss.reference: "),
        (f"{ON_FILES} model.attention=varlen", "model.attention: "),
        ("data.arithmetic.train_size=99", "data.arithmetic: "),
        ("data.format=gsm8k data.path=GOOD", "model.tiny: "),
        ("model.tiny.warmup.stop_at=0.5 model.tiny.warmup.examples=60", "model.tiny.warmup.stop_at: "),
        ("data.template=dapo", "data.template: "),
        ("run.output_dir=GOOD", "run.output_dir: "),
    ],
)
def test_it_refuses_what_a_run_refuses(
    overrides: str, message: str, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(write_recipe(tmp_path)), *arguments_of(overrides, files)]
    for arguments in ([*command, "--dry-run"], command):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["env.kind=absent:Game", "env.tools=[operator:add]"])
def test_an_environment_is_checked_before_the_warm_up(setting: str, tmp_path: Path) -> None:
    with refused(setting.partition("=")[0]):
        check_needs(load_config(write_recipe(tmp_path), [setting]))


def test_it_refuses_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "small" / "checkpoints" / "step_000002").mkdir(parents=True)
    command = ["train", str(write_recipe(tmp_path))]
    for arguments in ([*command, "--dry-run"], command):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert "step_000002" in error
        assert "manifest.json" in error


def test_it_prints_the_plan_and_leaves_nothing(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resolved configuration, the departures from the algorithm and the sizes."""
    recipe = write_recipe(tmp_path)
    given = ["algorithm=grpo", "sampler.filter_groups=true", *arguments_of(ON_FILES, files)]
    assert main(["train", str(recipe), *given, "--dry-run"]) == 0
    out = capsys.readouterr().out
    printed = yaml.safe_load(out[: out.index("\n\n")])
    assert printed["optimizer"]["lr"] == load_config(recipe, given).optimizer.lr
    assert (printed["sampler"]["max_age"], printed["sampler"]["filter_on"]) == (1, "correctness")
    plan = " ".join(out.split())
    assert "sampler.filter_groups=true (grpo: false)" in plan
    assert re.search(r"per step 4\D+4\D+16\b", plan)
    assert re.search(r"data: 3\D+2\D+1\b", plan)
    assert not (tmp_path / "runs").exists()


def test_prompts_are_counted_with_a_tokenizer_in_the_cache_of_the_hub(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is not downloaded, no prompt is too long, and none is the same as another."""
    folder = tmp_path / "models--some--here"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(files["MODEL"], folder / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    command = ["train", str(write_recipe(tmp_path)), *arguments_of(ON_FILES, files), "--dry-run"]
    for name, code in (("some/here", 2), ("some/where", 0)):
        assert main([*command, f"model.path={name}"]) == 0
        assert re.search(r"data: 3\D+2\D+1\b", capsys.readouterr().out)
        assert main([*command, f"model.path={name}", "rollout.max_prompt_tokens=1"]) == code
        assert ("rollout.max_prompt_tokens" in capsys.readouterr().err) == (code == 2)


def test_a_model_that_is_nowhere_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub is asked one question; asked for the files, it is asked again and again for most of a minute."""
    asked = []

    def silent(self: object, name: str, timeout: float) -> None:
        asked.append((name, timeout))
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", silent)
    arguments = ["train", str(write_recipe(tmp_path)), "model.tiny=null", "model.path=models/nothing"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "model.path: " in error
    assert "ConnectionError" in error
    assert asked == [("models/nothing", 5)]


def test_a_run_goes_on_without_the_model_it_began_with(tmp_path: Path, files: dict[str, Path]) -> None:
    """Its checkpoints hold one."""
    files["MODEL"] = shutil.copytree(files["MODEL"], tmp_path / "model")
    recipe, given = write_recipe(tmp_path, steps=1), arguments_of(ON_FILES, files)
    run = train(load_config(recipe, given), Notes())
    shutil.rmtree(files["MODEL"])
    assert train(load_config(recipe, [*given, "run.steps=2"]), Notes()) == run


def test_a_machine_without_the_memory_is_refused() -> None:
    """The host's part of an update whose micro-batch has a million positions."""
    recipe = Path(__file__).parents[2] / "recipes" / "qwen3-8b-1gpu.yaml"
    huge = ["optimizer.token_budget=1000000000", "model.gradient_checkpointing=offload"]
    with refused("rollout.vllm.sleep") as caught:
        check_needs(load_config(recipe, huge))
    assert "optimizer.offload" in str(caught.value)
    with refused("rollout.engine") as caught:  # vLLM, which is not installed beside the tests
        check_needs(load_config(recipe, ["optimizer.offload=false"]))
    assert "optimizer.offload" not in str(caught.value)


@pytest.mark.parametrize("setting", ["parallel.sequence=4", "optimizer.offload=true"])
def test_it_checks_the_layout_of_all_ranks(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two attention heads, and one process."""
    assert main(["train", str(write_recipe(tmp_path)), "parallel.gpus=4", setting, "--dry-run"]) == 2
    assert f"{setting.partition('=')[0]}: " in capsys.readouterr().err
