"""`dapo train --dry-run`: it says what a run will do, and refuses what a run would refuse."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from builders import write_rows
from refusals import refused
from small import Dapo, Notes, write_recipe

from dapo_runner.config import load_config
from dapo_runner.preflight.needs import check_needs
from dapo_runner.train import train

# Names in capitals are files of the fixture below.
ON_FILES = "model.tiny=null model.path=MODEL data.format=gsm8k data.path=GOOD data.eval_size=1"


@pytest.fixture
def files(tmp_path: Path, start: Path) -> dict[str, Path]:
    (tmp_path / "empty").mkdir()
    rows = [{"question": f"{number}+1", "answer": f"#### {number + 1}"} for number in range(3)]
    good, bad = write_rows(tmp_path / "good.jsonl", rows), write_rows(tmp_path / "bad.jsonl", [{"problem": "1+1"}])
    return {"MODEL": start, "GOOD": good, "BAD": bad, "EMPTY": tmp_path / "empty"}


def arguments_of(overrides: str, files: dict[str, Path]) -> list[str]:
    for name, path in files.items():
        overrides = overrides.replace(name, str(path))
    return overrides.split()


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (f"{ON_FILES} data.path=BAD", "BAD, row 1: data.columns"),
        (f"{ON_FILES} data.eval_size=4", "data.eval_size"),
        (f"{ON_FILES} rollout.max_prompt_tokens=1", "data.path: rollout.max_prompt_tokens"),
        (f"{ON_FILES} data.chat_template=always", "data.chat_template"),
        (f"{ON_FILES} model.path=EMPTY", "model.path"),
        (f"{ON_FILES} model.path=no/such/model", "model.path"),
        (f"{ON_FILES} rollout.max_response_tokens=99 optimizer.token_budget=128", "rollout.max_response_tokens"),
        (f"{ON_FILES} loss.overrides.kl_coef=0.1 loss.reference=EMPTY", "loss.reference"),
        (f"{ON_FILES} model.attention=varlen", "model.attention"),
        ("algorithm=dapo loss.overrides.epsilon_high=0.3", "loss: 'clip_high'"),
        ("advantage.kind=math:advantage", "advantage.kind"),
        ("data.arithmetic.train_size=99", "data.arithmetic"),
        ("data.format=gsm8k data.path=GOOD", "model.tiny"),
        ("model.tiny.warmup.stop_at=0.5 model.tiny.warmup.examples=60", "model.tiny.warmup.stop_at"),
        ("data.template=dapo", "data.template"),
        ("run.output_dir=GOOD", "run.output_dir"),
        ("env.kind=absent:Game", "env.kind"),
        ("env.tools=[operator:add]", "env"),
    ],
)
def test_it_refuses_what_a_run_refuses(
    overrides: str, names: str, files: dict[str, Path], tmp_path: Path, dapo: Dapo
) -> None:
    command = ["train", write_recipe(tmp_path), *arguments_of(overrides, files)]
    for dry in (["--dry-run"], []):
        dapo.refuses(names.replace("BAD", str(files["BAD"])), *command, *dry)


def test_it_refuses_a_damaged_checkpoint(tmp_path: Path, dapo: Dapo) -> None:
    (checkpoint := tmp_path / "runs" / "small" / "checkpoints" / "step_000002").mkdir(parents=True)
    for dry in (["--dry-run"], []):
        dapo.refuses(f"{checkpoint} is damaged: manifest.json", "train", write_recipe(tmp_path), *dry, code=1)


def test_it_prints_the_plan_and_leaves_nothing(files: dict[str, Path], tmp_path: Path, dapo: Dapo) -> None:
    """The resolved configuration, the departures from the algorithm and the sizes."""
    recipe = write_recipe(tmp_path)
    given = ["algorithm=grpo", "sampler.filter_groups=true", *arguments_of(ON_FILES, files)]
    out = dapo("train", recipe, *given, "--dry-run")
    printed = yaml.safe_load(out[: out.index("\n\n")])
    assert printed["optimizer"]["lr"] == load_config(recipe, given).optimizer.lr
    assert (printed["sampler"]["max_age"], printed["sampler"]["filter_groups"]) == (1, "correctness")
    plan = " ".join(out.split())
    assert "sampler.filter_groups=correctness (grpo: false)" in plan
    assert re.search(r"per step 4\D+4\D+16\b", plan)
    assert re.search(r"data: 3\D+2\D+1\b", plan)
    assert not (tmp_path / "runs").exists()


def test_it_warns_about_ground_truths_and_distillation_needs_none(
    files: dict[str, Path], tmp_path: Path, dapo: Dapo
) -> None:
    rows = [{"question": f"{number}+1", "answer": answer} for number, answer in enumerate(("1", "x", "3"))]
    files["GOOD"] = write_rows(tmp_path / "rows.jsonl", rows)
    given = arguments_of(f"{ON_FILES} data.format=auto data.eval_size=0 reward.kind=integer", files)
    command = ["train", write_recipe(tmp_path), *given, "--dry-run"]
    assert "1 of 3" in dapo(*command, "data.columns={prompt: question, answer: answer}")
    command += ["algorithm=on_policy_distillation", f"distillation.teacher={files['MODEL']}"]
    dapo(*command, "data.columns={prompt: question}")


def test_prompts_are_counted_with_a_tokenizer_in_the_cache_of_the_hub(
    files: dict[str, Path], tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is not downloaded, no prompt is too long, and none is the same as another."""
    folder = tmp_path / "models--some--here"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(files["MODEL"], folder / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    command = ["train", write_recipe(tmp_path), *arguments_of(ON_FILES, files), "--dry-run"]
    for name, code in (("some/here", 2), ("some/where", 0)):
        assert re.search(r"data: 3\D+2\D+1\b", dapo(*command, f"model.path={name}"))
        dapo(*command, f"model.path={name}", "rollout.max_prompt_tokens=1", code=code)
        assert ("rollout.max_prompt_tokens" in dapo.err) == (code == 2)


def test_a_model_that_is_nowhere_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dapo: Dapo) -> None:
    """The hub is asked one question; asked for the files, it is asked again and again for most of a minute."""

    def silent(self: object, name: str, timeout: float) -> None:
        assert (name, timeout) == ("models/nothing", 5)
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", silent)
    command = ["train", write_recipe(tmp_path), "model.tiny=null", "model.path=models/nothing"]
    dapo.refuses("model.path: ConnectionError", *command)


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
    with refused("rollout.vllm.sleep", parts=["optimizer.offload"]):
        check_needs(load_config(recipe, huge))
    with refused("rollout.engine") as caught:  # vLLM, which is not installed beside the tests
        check_needs(load_config(recipe, ["optimizer.offload=false"]))
    assert "optimizer.offload" not in str(caught.value)


@pytest.mark.parametrize("setting", ["parallel.sequence=4", "optimizer.offload=true"])
def test_it_checks_the_layout_of_all_ranks(setting: str, tmp_path: Path, dapo: Dapo) -> None:
    """Two attention heads, and one process."""
    command = ["train", write_recipe(tmp_path), "parallel.gpus=4", setting, "--dry-run"]
    dapo.refuses(setting.partition("=")[0], *command)
