"""Sequences that a model does not support, or that would change each other's log-probs, are refused before a run."""

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
from sft_runs import write_sft_recipe
from small import Dapo, small_recipe, write_recipe
from transformers import GPT2Config, LlamaConfig, MambaConfig, Phi3Config, Qwen2MoeConfig, ViTConfig

from dapo_runner.cli import main
from dapo_runner.config import Config, ModelConfig, parse
from dapo_runner.policy.lengths import check_length, check_lengths
from dapo_runner.tiny_model import make_tokenizer

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0, "max_position_embeddings": 32}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
ORIGINAL = {"original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
LONGEST: dict[str, tuple[Any, int | None]] = {
    "rotary": (LlamaConfig(**SIZES), 32),
    "learned": (GPT2Config(n_positions=32), 32),
    "none": (MambaConfig(), None),
    "linear": (LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 4.0}), 128),
    "yarn beyond": (LlamaConfig(**SIZES, rope_scaling={"rope_type": "yarn", "factor": 4.0, **ORIGINAL}), 64),
    "llama3": (LlamaConfig(**SIZES, rope_scaling=LLAMA3), 32),  # which include the factor
    "yarn within": (LlamaConfig(**SIZES, rope_scaling={"rope_type": "yarn", "factor": 1.5, **ORIGINAL}), 32),
    "dynamic": (LlamaConfig(**SIZES, rope_scaling={"type": "dynamic", "factor": 4.0}), 32),
    "longrope": (Phi3Config(**SIZES, **ORIGINAL, rope_scaling={"rope_type": "longrope", **FACTORS}), 16),
}


@pytest.mark.parametrize("name", LONGEST)
def test_the_longest_sequence_of_a_model(name: str, tmp_path: Path) -> None:
    """With dynamic and longrope: the longest with the same frequencies as every other."""
    config, longest = LONGEST[name]
    config.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    check_length("model.path", tmp_path, model, longest or 10**6, "rollout.max_response_tokens")
    if longest is not None:
        with refused("rollout.max_response_tokens") as caught:
            check_length("model.path", tmp_path, model, longest + 1, "rollout.max_response_tokens")
        assert f" {longest} " in str(caught.value)


def with_values(model: Path, folder: Path, **values: Any) -> str:
    """A copy of a model with other values in its configuration."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return str(folder)


def longest_of_a_small_run() -> int:
    rollout = small_recipe()["rollout"]
    return rollout["max_prompt_tokens"] + rollout["max_response_tokens"]


def test_a_run_and_its_dry_run_refuse_what_is_too_long(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For policy and reference."""
    longest, recipe = longest_of_a_small_run(), str(write_recipe(tmp_path, steps=1))
    good = with_values(model_folder, tmp_path / "good", max_position_embeddings=longest)
    bad = with_values(model_folder, tmp_path / "bad", max_position_embeddings=longest - 1)
    given = ["train", recipe, "model.tiny=null", "loss.overrides.kl_coef=0.1"]
    given += [f"model.path={good}", f"loss.reference={good}"]
    assert main([*given, "--dry-run"]) == 0
    for key in ("model.path", "loss.reference"):
        for more in ([], ["--dry-run"]):
            capsys.readouterr()
            assert main([*given, f"{key}={bad}", *more]) == 2
            error = capsys.readouterr().err
            assert "rollout.max_response_tokens" in error
            assert key in error


def test_tokens_without_an_embedding_are_refused(model_folder: Path, tmp_path: Path, dapo: Dapo) -> None:
    """Such as those of a tokenizer to which tokens were added, and its model not resized. Unused ones do no harm."""
    model = shutil.copytree(model_folder, tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["#"])
    tokenizer.save_pretrained(model)
    assert json.loads((model / "config.json").read_text())["vocab_size"] == tokenizer.convert_tokens_to_ids("#")
    recipe = write_recipe(tmp_path, steps=1)
    given = ["train", recipe, "model.tiny=null", f"model.path={model}"]
    assert "data:" in dapo(*given, "--dry-run")
    given.append("data.template='{question}#'")
    for command in (given, [*given, "--dry-run"], ["eval", *given[1:]]):
        dapo.refuses(f"model.path: {model}", *command)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+2=", "completion": "3#"}])
    for more in ([], ["--dry-run"]):
        recipe = write_sft_recipe(model, rows, tmp_path / "sft.yaml", data={"eval_size": 0})
        dapo.refuses(f"model.path: {model}", "sft", recipe, *more)


@pytest.mark.parametrize("where", ["tokenizer", "generation_config.json"])
def test_end_tokens_without_an_embedding_are_refused(
    where: str, model_folder: Path, tmp_path: Path, dapo: Dapo
) -> None:
    """Which no response could have, so that all would run to their limit."""
    model, tokenizer = shutil.copytree(model_folder, tmp_path / "model"), make_tokenizer()
    if where == "tokenizer":
        tokenizer.add_special_tokens({"eos_token": "<end>"})
        tokenizer.save_pretrained(model)
    else:
        (model / where).write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, len(tokenizer)]}))
    command = ["train", write_recipe(tmp_path, steps=1), "model.tiny=null", f"model.path={model}"]
    assert "eos_token_id" in dapo.refuses("model.path: ", *command)


def test_quantized_weights_are_refused(model_folder: Path, tmp_path: Path, dapo: Dapo) -> None:
    bits = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model = with_values(model_folder, tmp_path / "model", quantization_config=bits)
    command = ["train", write_recipe(tmp_path, steps=1), "model.tiny=null", f"model.path={model}"]
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+2=", "completion": "3"}])
    sft = ["sft", write_sft_recipe(Path(model), rows, tmp_path / "sft.yaml", data={"eval_size": 0})]
    for given in (command, [*command, "--dry-run"], sft, [*sft, "--dry-run"]):
        dapo.refuses("model.path: expected weights that are not quantized", *given)


def test_a_model_of_another_kind_is_refused_in_one_short_line(tmp_path: Path, dapo: Dapo) -> None:
    ViTConfig().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    command = ["train", write_recipe(tmp_path), "model.tiny=null", f"model.path={tmp_path / 'model'}"]
    assert len(dapo.refuses("model.path", *command)) < 600


def test_the_dry_run_checks_models_in_the_cache_of_the_hub(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And prints a line for one that is not there."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name, positions in (("good", longest_of_a_small_run()), ("bad", longest_of_a_small_run() - 1)):
        folder = tmp_path / f"models--some--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        with_values(model_folder, folder / "snapshots" / ("0" * 40), max_position_embeddings=positions)
    raw = small_recipe()
    for name in ("good", "nowhere"):
        raw["model"] = {"path": f"some/{name}"}
        check_lengths(parse(raw, Config), f"some/{name}", download=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("model.path: some/nowhere ")
    with refused("rollout.max_response_tokens"):
        check_lengths(parse(raw, Config), "some/bad", download=False)
    raw["evaluation"]["max_response_tokens"] = raw["rollout"]["max_response_tokens"] + 1
    with refused("evaluation.max_response_tokens"):
        check_lengths(parse(raw, Config), "some/good", download=False)


@pytest.mark.parametrize(
    ("full_layers", "engine", "response", "is_ignored"),
    [(2, "vllm", 9, True), (2, "server", 9, True), (2, "vllm", 8, False), (2, "hf", 9, False), (0, "vllm", 9, False)],
)
def test_windows_that_vllm_ignores_are_refused(
    tmp_path: Path, full_layers: int, engine: str, response: int, is_ignored: bool
) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 2}
    Qwen2MoeConfig(**SIZES, **windows, max_window_layers=full_layers).save_pretrained(tmp_path)
    recipe = small_recipe()
    recipe["model"] = {"path": str(tmp_path)}
    recipe["rollout"] |= {"engine": engine, "max_prompt_tokens": 8, "max_response_tokens": response}
    with refused("rollout.engine") if is_ignored else nullcontext():
        check_lengths(parse(recipe, Config), tmp_path, download=False)
