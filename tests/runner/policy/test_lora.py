"""Adapters: they alone train, an engine gets them merged, a checkpoint has them in peft's format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from builders import make_config, make_prompt, pack, random_sequences, save_model
from experts import small_experts
from learners import CPU, config_of
from refusals import refused
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import CheckpointError, load_checkpoint, save_checkpoint, take_snapshot
from dapo_runner.config import LoraConfig, ModelConfig
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.engines.hf import HFEngine
from dapo_runner.engines.vllm import VLLMEngine
from dapo_runner.policy.lora import add_adapters, merged_weights
from dapo_runner.policy.model import Policy, load_policy
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.tiny_model import make_tokenizer

WITH_HEAD = {"targets": ["q_proj", "lm_head"]}


def load(folder: Path, dtype: str = "float32", seed: int = 0, **lora: Any) -> Policy:
    config = ModelConfig.model_validate({"path": "x", "dtype": dtype, "lora": {"rank": 4, "alpha": 8, **lora}})
    return load_policy(folder, config, CPU, seed)


def learner_of(folder: Path, dtype: str = "float32", **lora: Any) -> Learner:
    sections = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0}, "loss": {"overrides": {"kl_coef": 0.1}}}
    return Learner(load(folder, dtype, **lora), config_of(folder, dtype, **sections))


def train(learner: Learner, steps: range) -> list[dict[str, float]]:
    return [learner.update(learner.prepare(random_sequences(8, seed=step))[0], step) for step in steps]


@pytest.mark.parametrize("lora", [{}, WITH_HEAD], ids=["layers", "head"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_train_and_without_them_the_policy_is_its_reference(
    model_folder: Path, dtype: str, lora: dict[str, Any]
) -> None:
    learner = learner_of(model_folder, dtype, **lora)
    policy, (batch,) = learner.policy, pack(random_sequences(4), 256)
    plain = Learner(load_policy(model_folder, ModelConfig(path="x", dtype=dtype), CPU), make_config())  # type: ignore[arg-type]
    before = plain.logprobs(batch)
    assert torch.equal(learner.logprobs(batch), before)  # at first they change nothing
    base = {name: p.clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    first, *_, last = train(learner, range(3))
    assert first["ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert last["ref_kl"] > 1e-6
    assert all(".lora_" in name for name in learner.master.tensors)
    assert all(torch.equal(p, base[name]) for name, p in policy.model.named_parameters() if name in base)
    assert ("lm_head.base_layer.weight" in base) == bool(lora)
    after = learner.logprobs(batch)
    assert not torch.equal(after, before)
    assert torch.equal(learner.ref_logprobs(batch), before)
    assert torch.equal(learner.logprobs(batch), after)  # they are on again
    assert all(master.grad is None for master in learner.master.tensors.values())

    with torch.no_grad():  # the loss has the adapters of the head as factors
        logits = policy.model.get_output_embeddings()(policy.hidden_states(batch)).float()
    spelled = logits.log_softmax(-1).gather(-1, batch.target_ids[:, None])[:, 0]
    tolerance = 1e-5 if dtype == "float32" else 0.1
    torch.testing.assert_close(after[batch.mask], spelled[batch.mask], atol=tolerance, rtol=tolerance)


def test_merged_weights_are_rounded_once(model_folder: Path) -> None:
    """Adapters as large as the weights: rounding their product before the sum would show."""
    adapted = load(model_folder, "bfloat16", targets=["q_proj", "up_proj", "lm_head"])
    layers = {name: module for name, module in adapted.model.named_modules() if hasattr(module, "lora_A")}
    assert len(layers) == 5
    for layer in layers.values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    merged = dict(adapted.named_weights())
    assert merged.keys() == AutoModelForCausalLM.from_pretrained(model_folder).state_dict().keys()
    for name, layer in layers.items():
        a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
        exact = layer.base_layer.weight.double() + 2.0 * b @ a  # alpha / rank
        got = merged[f"{name}.weight"]
        assert got.dtype == torch.bfloat16
        half_a_bit = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 9)
        assert bool(((got.double() - exact).abs() <= 1.0001 * half_a_bit).all()), name


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_layers_of_gpt2_keep_their_weights_transposed() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    add_adapters(model, LoraConfig(rank=2, alpha=4, targets=["c_attn", "c_proj"]), seed=0)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_proj"):
        layer = model.get_submodule(f"transformer.h.0.{name}")
        a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
        torch.nn.init.normal_(b)
        merged = dict(merged_weights(model, torch.float32))
        torch.testing.assert_close(merged[f"transformer.h.0.{name}.weight"], layer.base_layer.weight + 2.0 * (b @ a).T)


def test_a_checkpoint_has_the_adapters_in_pefts_format(model_folder: Path, tmp_path: Path) -> None:
    sampler = DynamicSampler(PromptCursor([make_prompt()], seed=0), GroupBuffer(make_config()))
    learner = learner_of(model_folder)
    train(learner, range(2))
    saved = save_checkpoint(tmp_path, 2, learner, take_snapshot(sampler), keep=1)
    assert len({path.stat().st_mode for path in saved.path.rglob("*") if path.is_file()}) == 1
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(saved.path / "adapter")
    sequence = random_sequences(1)[0]
    (batch,) = pack([sequence], 64)
    with torch.no_grad():
        ours = learner.policy.model.get_output_embeddings()(learner.policy.hidden_states(batch))
        logits = theirs(input_ids=sequence.token_ids[None, :-1]).logits[0]
    assert (logits - ours).abs().max() <= 1e-4 * ours.abs().max()
    both = shutil.copytree(saved.model, tmp_path / "both")
    shutil.copytree(saved.path / "adapter", both, dirs_exist_ok=True)
    with refused("model.path", parts=["adapter_config.json"]):  # transformers would add the adapter once more
        load(both)
    with pytest.raises(CheckpointError, match="lora_A"):
        load_checkpoint(saved, learner_of(model_folder, rank=2), sampler)


def test_the_seed_draws_the_adapters_and_nothing_else(model_folder: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    policies = [load(model_folder, seed=seed) for seed in (1, 1, 2)]
    assert torch.rand(()) == expected
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    first, second, third = (dict(policy.model.named_parameters())[name] for policy in policies)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_targets_that_cannot_be_adapted_are_refused(model_folder: Path, tmp_path: Path) -> None:
    """What is not there, an output head tied to the embedding, and what is no linear layer."""
    for targets in (["nowhere"], ["q_proj", "v_porj"]):  # peft looks for one of them alone
        with refused("model.lora.targets"):
            load(model_folder, targets=targets)
    with refused("model.embed_tokens"):
        load(model_folder, targets=["embed_tokens"])
    config = AutoConfig.from_pretrained(model_folder, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    with refused("model.lora.targets"):
        load(tmp_path, targets=["lm_head"])
    save_model(small_experts("mixtral"), make_tokenizer(), tmp_path / "experts")
    with refused("model.lora.targets", parts=["q_proj"]):
        load(tmp_path / "experts", targets="all-linear")


@pytest.mark.parametrize(
    ("lora", "is_alone"),
    [
        ({}, True),
        ({"targets": ["q_proj"]}, True),
        ({"rank": 512}, True),
        ({"rank": 513}, False),
        (WITH_HEAD, False),
        ({"targets": ".*q_proj"}, False),
    ],
)
def test_which_adapters_an_engine_takes_alone(lora: dict[str, Any], is_alone: bool) -> None:
    config = make_config(model={"tiny": None, "path": "x", "lora": lora}, rollout={"engine": "vllm"})
    assert VLLMEngine.takes_adapters(config) == is_alone
    assert not HFEngine.takes_adapters(config)
