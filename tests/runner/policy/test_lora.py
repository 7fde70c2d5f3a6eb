"""Adapters: they alone train, an engine sees them merged, a checkpoint brings them back, off they are the reference."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config, make_prompt, random_sequences
from refusals import refused
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.packing import pack
from dapo_runner.checkpoint import CheckpointError, load_checkpoint, save_checkpoint, take_snapshot
from dapo_runner.config import ConfigError, ModelConfig
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.parallel.world import SINGLE_PROCESS
from dapo_runner.policy.lora import adapters_off
from dapo_runner.policy.model import Policy, load_policy
from dapo_runner.rollout import vllm
from dapo_runner.rollout.engine import copy_weights
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.sampler import DynamicSampler

CPU = torch.device("cpu")
CONFIG = make_config(
    optimizer={"lr": 1e-2, "warmup_steps": 0, "token_budget": 95, "weight_decay": 0.0},
    loss={"overrides": {"kl_coef": 0.1}},
)


def load(folder: Path, dtype: str = "float32", seed: int = 0, **lora: Any) -> Policy:
    config = ModelConfig.model_validate({"path": "x", "dtype": dtype, "lora": {"rank": 4, "alpha": 8, **lora}})
    return load_policy(folder, config, CPU, seed)


def save_merged(policy: Policy, folder: Path) -> None:
    policy.model.save_pretrained(folder, state_dict=dict(policy.named_weights()))


def train(learner: Learner, steps: range) -> list[dict[str, float]]:
    figures = []
    for step in steps:
        (mini,) = learner.prepare(random_sequences(8, seed=step))
        figures.append(learner.update(mini, step))
    return figures


def test_only_adapters_train_and_at_first_they_change_nothing(model_folder: Path, policy: Policy) -> None:
    adapted = load(model_folder)
    (batch,) = pack(random_sequences(4), 256)
    with torch.no_grad():
        assert torch.equal(adapted.hidden_states(batch), policy.hidden_states(batch))
    base = {name: p.clone() for name, p in adapted.model.named_parameters() if not p.requires_grad}
    learner = Learner(adapted, CONFIG)
    assert learner.master.tensors
    assert all(".lora_" in name for name in learner.master.tensors)
    train(learner, range(2))
    for name, parameter in adapted.model.named_parameters():
        assert (name in base) != parameter.requires_grad
        if name in base:
            assert torch.equal(parameter, base[name]), name
    with torch.no_grad():
        assert not torch.equal(adapted.hidden_states(batch), policy.hidden_states(batch))


def test_the_reference_is_the_policy_with_its_adapters_off(model_folder: Path, policy: Policy) -> None:
    adapted = load(model_folder)
    learner, plain = Learner(adapted, CONFIG), Learner(policy, make_config())
    first = train(learner, range(1))[0]
    assert first["ref_kl"] == pytest.approx(0.0, abs=1e-6)
    (batch,) = pack(random_sequences(4), 256)
    assert torch.equal(learner.ref_logprobs(batch), plain.logprobs(batch))
    assert not torch.equal(learner.logprobs(batch), plain.logprobs(batch))
    with adapters_off(adapted.model):
        pass
    later = train(learner, range(1, 3))  # still training, and the penalty is felt
    assert later[-1]["ref_kl"] > 1e-6
    assert all(master.grad is None for master in learner.master.tensors.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_and_transformers_see_the_merged_model(model_folder: Path, tmp_path: Path, dtype: str) -> None:
    adapted = load(model_folder, dtype)
    train(Learner(adapted, CONFIG), range(2))
    save_merged(adapted, tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=getattr(torch, dtype))
    engine = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype))
    before = engine(input_ids=torch.arange(3, 12)[None]).logits
    copy_weights(engine, adapted.named_weights())  # refuses unknown, missing and misshapen names
    for (name, one), (other_name, other) in zip(saved.named_parameters(), engine.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name
    served = engine(input_ids=torch.arange(3, 12)[None]).logits
    sequence = random_sequences(1)[0]
    (batch,) = pack([sequence], 64)
    with torch.no_grad():
        trained = adapted.model.get_output_embeddings()(adapted.hidden_states(batch))
        merged = engine(input_ids=sequence.token_ids[None, :-1]).logits[0]
    tolerance = 1e-4 if dtype == "float32" else 0.06
    assert (trained - merged).abs().max() <= tolerance * merged.abs().max()
    assert not torch.allclose(before, served)


def test_merged_weights_are_rounded_once(model_folder: Path) -> None:
    """Adapters as large as the weights: rounding their product before the sum would show."""
    adapted = load(model_folder, "bfloat16")
    layers = {name: module for name, module in adapted.model.named_modules() if hasattr(module, "lora_A")}
    with torch.no_grad():
        for layer in layers.values():
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    merged = dict(adapted.named_weights())
    assert layers
    for name, layer in layers.items():
        a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
        exact = layer.base_layer.weight.double() + 2.0 * b @ a  # alpha / rank
        got = merged[f"{name}.weight"]
        assert got.dtype == torch.bfloat16
        half_a_bit = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 9)
        assert bool(((got.double() - exact).abs() <= 1.0001 * half_a_bit).all()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_as_if_it_had_not_stopped(model_folder: Path, tmp_path: Path, dtype: str) -> None:
    def parts(seed: int) -> tuple[Learner, DynamicSampler]:
        cursor = PromptCursor([make_prompt("p")], seed=0)
        return Learner(load(model_folder, dtype, seed), CONFIG), DynamicSampler(cursor, GroupBuffer(CONFIG))

    learner, sampler = parts(seed=0)
    train(learner, range(3))
    saved = save_checkpoint(tmp_path, 3, learner, take_snapshot(sampler), keep=1)
    expected = train(learner, range(3, 5))
    resumed, resumed_sampler = parts(seed=9)
    load_checkpoint(saved, resumed, resumed_sampler)
    assert train(resumed, range(3, 5)) == expected
    other = Learner(load(model_folder, dtype, rank=2), CONFIG)
    with pytest.raises(CheckpointError, match="lora_A"):
        load_checkpoint(saved, other, resumed_sampler)


def test_the_adapters_of_a_checkpoint_are_pefts_own(model_folder: Path, tmp_path: Path) -> None:
    import peft

    adapted = load(model_folder)
    learner = Learner(adapted, CONFIG)
    train(learner, range(2))
    sampler = DynamicSampler(PromptCursor([make_prompt("p")], seed=0), GroupBuffer(CONFIG))
    saved = save_checkpoint(tmp_path, 2, learner, take_snapshot(sampler), keep=1)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), saved.path / "adapter")
    sequence = random_sequences(1)[0]
    (batch,) = pack([sequence], 64)
    with torch.no_grad():
        ours = adapted.model.get_output_embeddings()(adapted.hidden_states(batch))
        torch.testing.assert_close(
            theirs(input_ids=sequence.token_ids[None, :-1]).logits[0], ours, atol=1e-4, rtol=1e-4
        )


def test_the_seed_draws_the_adapters_and_nothing_else(model_folder: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    one, two, other = load(model_folder, seed=1), load(model_folder, seed=1), load(model_folder, seed=2)
    assert torch.rand(()) == expected
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    first, second, third = (dict(p.model.named_parameters())[name] for p in (one, two, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_the_output_head_with_adapters(model_folder: Path, tmp_path: Path) -> None:
    """They train, the loss sees them, the reference and the start do not, and an engine gets them merged in."""
    adapted = load(model_folder, targets=["q_proj", "lm_head"])
    learner, plain = Learner(adapted, CONFIG), Learner(load(model_folder), make_config())
    (batch,) = pack(random_sequences(4), 256)
    assert torch.equal(learner.logprobs(batch), plain.logprobs(batch))
    train(learner, range(2))
    assert all(".lora_" in name for name in learner.master.tensors)
    layer = adapted.model.get_output_embeddings()
    assert layer.lora_B["default"].weight.any()
    with torch.no_grad():
        logits = layer(adapted.hidden_states(batch))
    expected = logits.log_softmax(-1).gather(-1, batch.target_ids[:, None])[:, 0]
    torch.testing.assert_close(learner.logprobs(batch)[batch.mask], expected[batch.mask], atol=1e-5, rtol=1e-5)
    assert torch.equal(learner.ref_logprobs(batch), plain.logprobs(batch))
    save_merged(adapted, tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    exact = (
        layer.base_layer.weight
        + layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    )
    torch.testing.assert_close(merged.lm_head.weight, exact)


def test_targets_that_are_not_there_and_a_tied_head_are_refused(model_folder: Path, tmp_path: Path) -> None:
    with refused("model.lora.targets"):
        load(model_folder, targets=["nowhere"])
    config = AutoConfig.from_pretrained(model_folder, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    with refused("model.lora.targets"):
        load(tmp_path, targets=["lm_head"])
    with refused("model.embed_tokens"):
        load(model_folder, targets=["embed_tokens"])
    load(model_folder, targets=["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("lora", "alone"),
    [
        ({}, True),
        ({"targets": ["q_proj"]}, True),
        ({"rank": 512}, True),
        ({"rank": 513}, False),
        ({"targets": ["q_proj", "lm_head"]}, False),
        ({"targets": ".*q_proj"}, False),
    ],
)
def test_vllm_gets_adapters_alone_or_notes_that_it_does_not(
    lora: dict[str, Any], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "load_tokenizer", lambda *_: None)
    monkeypatch.setattr(vllm.VLLMEngine, "__init__", lambda *_: None)
    config = make_config(model={"tiny": None, "path": "x", "lora": lora}, rollout={"engine": "vllm"})
    notes: list[str] = []
    vllm.VLLMEngine.load("x", config, CPU, SINGLE_PROCESS, notes.append)
    assert vllm.VLLMEngine.takes_adapters(config) == alone
    assert ["model.lora" in note for note in notes] == [True] * (not alone)
    assert not HFEngine.takes_adapters(config)


def test_without_peft_the_remedy_is_named(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dapo-kernels\[lora\]'"):
        load(model_folder)
