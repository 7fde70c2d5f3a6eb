"""Sequences that a model does not take, or that would change each other's log-probs, are refused before a run."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from builders import write_rows
from refusals import refused
from small import small_recipe, write_recipe
from transformers import GPT2Config, LlamaConfig, MambaConfig, Phi3Config, Qwen2MoeConfig

from dapo_runner.cli import main
from dapo_runner.config import ConfigError, ModelConfig, parse_config
from dapo_runner.policy.lengths import check_length, check_lengths

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0, "max_position_embeddings": 32}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
ORIGINAL = {"original_max_position_embeddings": 16}
LONGEST: dict[str, tuple[Any, int | None]] = {
    "rotary": (LlamaConfig(**SIZES), 32),
    "learned": (GPT2Config(n_positions=32), 32),
    "none": (MambaConfig(), None),
    "linear": (LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 4.0}), 128),
    "yarn beyond": (LlamaConfig(**SIZES, rope_scaling={"rope_type": "yarn", "factor": 4.0, **ORIGINAL}), 64),
    "yarn within": (LlamaConfig(**SIZES, rope_scaling={"rope_type": "yarn", "factor": 2.0, **ORIGINAL}), 32),
    "dynamic": (LlamaConfig(**SIZES, rope_scaling={"type": "dynamic", "factor": 4.0}), 32),
    "longrope": (Phi3Config(**SIZES, **ORIGINAL, rope_scaling={"rope_type": "longrope", **FACTORS}), 16),
}


@pytest.mark.parametrize("name", LONGEST)
def test_the_longest_sequence_that_a_model_takes(name: str, tmp_path: Path) -> None:
    config, longest = LONGEST[name]
    config.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    check_length("model.path", tmp_path, model, longest or 10**6, "rollout.max_response_tokens")
    if longest is not None:
        with pytest.raises(ConfigError, match=rf"rollout\.max_response_tokens: .* {longest} tokens"):
            check_length("model.path", tmp_path, model, longest + 1, "rollout.max_response_tokens")


def with_values(model: Path, folder: Path, **values: Any) -> str:
    """A copy of a model with other values in its configuration."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return str(folder)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize("values", [{}, {"rope_parameters": DYNAMIC}], ids=["max_position_embeddings", "dynamic"])
@pytest.mark.parametrize("key", ["model.path", "loss.reference"])
def test_a_run_and_its_dry_run_refuse_what_is_too_long(
    key: str, values: dict[str, Any], model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = small_recipe()["rollout"]
    longest = rollout["max_prompt_tokens"] + rollout["max_response_tokens"]
    good = with_values(model_folder, tmp_path / "good", max_position_embeddings=longest, **values)
    bad = with_values(model_folder, tmp_path / "bad", max_position_embeddings=longest - 1, **values)
    recipe = str(write_recipe(tmp_path, steps=1, save_every=0, eval_every=0))
    given = ["model.tiny=null", f"model.path={good}", "loss.overrides.kl_coef=0.1", f"loss.reference={good}"]
    assert main(["train", recipe, *given, "--dry-run"]) == 0
    for command in (["train", recipe, *given, f"{key}={bad}"], ["train", recipe, *given, f"{key}={bad}", "--dry-run"]):
        capsys.readouterr()
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "rollout.max_response_tokens" in said
        assert key in said
    assert main(["train", recipe, *given]) == 0


def test_the_dry_run_checks_models_in_the_cache_of_the_hub(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And prints a line for one that is not there."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    rollout = small_recipe()["rollout"]
    longest = rollout["max_prompt_tokens"] + rollout["max_response_tokens"]
    for name, positions in (("good", longest), ("bad", longest - 1)):
        folder = tmp_path / f"models--some--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        with_values(model_folder, folder / "snapshots" / ("0" * 40), max_position_embeddings=positions)
    raw = small_recipe()
    for name in ("good", "nowhere"):
        raw["model"] = {"path": f"some/{name}"}
        check_lengths(parse_config(raw), f"some/{name}", download=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("model.path: some/nowhere ")
    with refused("rollout.max_response_tokens"):
        check_lengths(parse_config(raw), "some/bad", download=False)


def test_windows_that_vllm_ignores_are_refused(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 2}
    mixed, full = (Qwen2MoeConfig(**SIZES, **windows, max_window_layers=layers) for layers in (2, 0))
    for name, model, engine, response, is_ignored in (
        ("mixed", mixed, "vllm", 9, True),
        ("mixed", mixed, "server", 9, True),
        ("mixed", mixed, "vllm", 8, False),
        ("mixed", mixed, "hf", 9, False),
        ("full", full, "vllm", 9, False),
    ):
        model.save_pretrained(folder := tmp_path / name)
        recipe = small_recipe()
        recipe["model"] = {"path": str(folder)}
        recipe["rollout"] |= {"engine": engine, "max_prompt_tokens": 8, "max_response_tokens": response}
        with refused("rollout.engine") if is_ignored else nullcontext():
            check_lengths(parse_config(recipe), folder, download=False)


def test_sft_refuses_an_example_that_is_too_long(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "1+1=", "completion": "2" * length} for length in (4, 5, 6)]
    path, recipe = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "sft.yaml"
    folder = with_values(model_folder, tmp_path / "bad", max_position_embeddings=10)
    recipe.write_text(
        json.dumps({"model": {"path": folder, "dtype": "float32"}, "data": {"path": str(path), "eval_size": 0}})
    )
    shared = [
        "sft",
        str(recipe),
        f"run.output_dir={tmp_path}",
        "optimizer.token_budget=4096",
        "optimizer.warmup_steps=0",
    ]
    for more in ([], ["--dry-run"]):
        assert main([*shared, *more]) == 2
        said = capsys.readouterr().err
        assert "data.max_tokens" in said
        assert "model.path" in said
    assert main([*shared, "data.max_tokens=10", "--dry-run"]) == 0
