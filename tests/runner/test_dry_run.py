"""`dapo train --dry-run`: it says what a run will do, and refuses what a run would refuse."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from small import write_recipe

from dapo_runner.cli import main
from dapo_runner.config import ConfigError, load_config
from dapo_runner.preflight import memory
from dapo_runner.preflight.dry_run import summarize
from dapo_runner.preflight.needs import check_needs


@pytest.fixture
def files(tmp_path: Path, model_folder: Path) -> dict[str, str]:
    """What the arguments below name."""
    rows = [{"question": f"{number}+1", "answer": f"#### {number + 1}"} for number in range(3)]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bad.write_text(json.dumps({"problem": "1+1"}) + "\n")
    (tmp_path / "empty").mkdir()
    names = {"model": model_folder, "good": good, "bad": bad, "empty": tmp_path / "empty"}
    return {name: str(path) for name, path in names.items()}


MODEL = ["model.tiny=null", "model.path=MODEL", "data.format=gsm8k", "data.path=GOOD", "data.eval_size=1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*MODEL, "data.path=BAD"], "row 1: expected data.columns to fit"),
        ([*MODEL, "data.format=auto", "data.path=BAD"], "row 1: expected data.columns to fit"),
        ([*MODEL, "data.eval_size=4"], "data.eval_size: expected fewer than the 3 rows"),
        ([*MODEL, "rollout.max_prompt_tokens=1"], "longer than rollout.max_prompt_tokens"),
        ([*MODEL, "data.chat_template=always"], "data.chat_template: expected a tokenizer with a chat template"),
        ([*MODEL, "model.path=EMPTY"], "model.path: expected a model in transformers' format, found no config.json in"),
        ([*MODEL, "model.path=no/such/model"], "no model of the hub can have that name"),
        ([*MODEL, "loss.overrides.kl_coef=0.1", "loss.reference=EMPTY"], "loss.reference: expected a model"),
        ([*MODEL, "model.attention=varlen"], "model.attention: 'varlen'"),
        (["data.arithmetic.train_size=99"], "data.arithmetic: expected 10 held-out and 99 training problems"),
        (["data.format=gsm8k", "data.path=GOOD"], "model.tiny: "),
        (["model.tiny.warmup.stop_at=0.5", "model.tiny.warmup.examples=60"], "model.tiny.warmup.stop_at: expected"),
        (["data.template=dapo"], "data.template: "),
        (["run.output_dir=GOOD"], "run.output_dir: expected a folder that can be written to"),
    ],
)
def test_it_refuses_what_a_run_refuses(
    overrides: list[str], message: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        next((text.replace(name.upper(), path) for name, path in files.items() if name.upper() in text), text)
        for text in overrides
    ]
    recipe = str(write_recipe(tmp_path))
    for command in (["train", recipe, *given, "--dry-run"], ["train", recipe, *given]):
        assert main(command) == 2
        assert message in capsys.readouterr().err


def test_it_refuses_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "small" / "checkpoints" / "step_000002").mkdir(parents=True)
    for command in (["train", str(write_recipe(tmp_path)), "--dry-run"], ["train", str(write_recipe(tmp_path))]):
        assert main(command) == 1
        assert "step_000002 is damaged: manifest.json is missing" in capsys.readouterr().err


def test_it_accepts_what_a_run_accepts(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text.replace("MODEL", files["model"]).replace("GOOD", files["good"]) for text in MODEL]
    assert main(["train", str(write_recipe(tmp_path)), *given, "--dry-run"]) == 0
    assert "data: 3 rows → 2 training and 1 held-out prompts" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


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
    assert "found no folder models/nothing, and the hub did not answer (ConnectionError)" in capsys.readouterr().err
    assert asked == [("models/nothing", 5)]


def test_a_run_goes_on_without_the_model_it_began_with(tmp_path: Path, files: dict[str, str]) -> None:
    """Its checkpoints hold one."""
    model = shutil.copytree(files["model"], tmp_path / "model")
    given = [text.replace("MODEL", str(model)).replace("GOOD", files["good"]) for text in MODEL]
    arguments = ["train", str(write_recipe(tmp_path, steps=1, eval_every=0)), *given]
    assert main(arguments) == 0
    shutil.rmtree(model)
    assert main([*arguments, "run.steps=2"]) == 0


def test_it_prints_the_resolved_configuration_and_departures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, given = write_recipe(tmp_path), ["algorithm=grpo", "sampler.filter_groups=true"]
    assert main(["train", str(recipe), *given, "--dry-run"]) == 0
    out = capsys.readouterr().out
    printed = yaml.safe_load(out[: out.index("\n\n")])
    config = load_config(recipe, given)
    assert printed["optimizer"]["lr"] == config.optimizer.lr
    assert (printed["sampler"]["max_age"], printed["sampler"]["filter_on"]) == (1, "correctness")
    assert "sampler.filter_groups=true (grpo: false)" in " ".join(out.split())


ONE_GPU = Path(__file__).parents[2] / "recipes" / "qwen3-8b-1gpu.yaml"
EIGHT_BILLION = 8_190_735_360  # parameters of Qwen3-8B: 36 layers of 192,946,432, two of 622,329,856, a norm of 4096


def test_the_rows_of_one_gpu() -> None:
    config = load_config(ONE_GPU)
    rows = {label.strip(): text for label, text in summarize(config).items()}
    gib = {label: float(text.removeprefix("about ").split()[0]) for label, text in rows.items() if "GiB" in text}
    weights, cache = 2 * EIGHT_BILLION / 2**30, 2 * 10240 * 36 * 1024 * 2 / 2**30
    inputs = 20480 * 2 * (36 * 4096 + 8 * 4096 + 4 * 12288) / 2**30  # of the layers; one layer's activations
    expected = {
        "weights": weights,
        "activations of a micro-batch": inputs,
        "logits of a chunk": 1.0,
        "engine's weights": weights,
        "KV cache, for one response at full length": cache,
        "memory": 2 * weights + inputs + 1 + cache,
        "80 GB, update": weights + inputs + 1,  # vLLM sleeps
        "80 GB, rollout": weights + 0.7 * 79.1,
        "machine's memory": 8 * weights,
        "float32 masters": 2 * weights,
        "gradients": 2 * weights,
        "AdamW moments": 4 * weights,
    }
    assert gib == pytest.approx(expected, abs=0.006)
    verdicts = {label: "not fit" not in text for label, text in rows.items() if " fit" in text}
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert verdicts == {"80 GB, update": True, "80 GB, rollout": True, "machine's memory": here >= 16 * EIGHT_BILLION}


def test_a_machine_without_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**memory.PUBLISHED["Qwen/Qwen3-8B-Base"], "num_hidden_layers": 10**6}
    monkeypatch.setitem(memory.PUBLISHED, "Qwen/Qwen3-8B-Base", values)
    for override, is_refused in (("optimizer.offload=true", True), ("optimizer.offload=false", False)):
        with pytest.raises(ConfigError) as error:
            check_needs(load_config(ONE_GPU, [override]))
        assert ("optimizer.offload, rollout.vllm.sleep: require" in str(error.value)) == is_refused
