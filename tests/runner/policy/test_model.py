"""The packed forward: no sequence sees another, the hidden states are the model's own, odd models are
refused.
"""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_sequence
from refusals import refused
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV2Config,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
)

from dapo_runner.algorithms.packing import pack
from dapo_runner.config import ConfigError, LoraConfig, ModelConfig
from dapo_runner.policy import attention
from dapo_runner.policy import model as model_module
from dapo_runner.policy.attention import choose_kernel, plan_packing
from dapo_runner.policy.model import Policy, load_policy, resolve_device
from dapo_runner.policy.prefixes import find_shared

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CPU = torch.device("cpu")


def saved(config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of this configuration with random weights; the tokenizer, which no test here needs, is left
    out.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    monkeypatch.setattr(model_module, "load_tokenizer", lambda *_: None)
    return folder


def plain_hidden(policy: Policy, token_ids: torch.Tensor) -> torch.Tensor:
    """What transformers itself makes of one sequence, with its own attention."""
    reference = AutoModelForCausalLM.from_pretrained(
        policy.model.name_or_path, attn_implementation="eager", dtype=policy.compute
    ).eval()
    return reference.base_model(input_ids=token_ids[None]).last_hidden_state[0]


ARCHITECTURES = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2, biased projections": Qwen2Config(**SIZES),
    "mistral, window of 4": MistralConfig(**SIZES, sliding_window=4),
    "gemma3, windows and scaled embeddings": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4),
    "mixtral, window of 4": MixtralConfig(**SIZES, sliding_window=4, num_local_experts=4),
    "qwen2-moe, windows of 4 that its masks alone name": Qwen2MoeConfig(
        **SIZES, use_sliding_window=True, sliding_window=4, num_experts=4, moe_intermediate_size=16
    ),
    "phimoe, a window of 4 that its masks alone name": PhimoeConfig(**SIZES, sliding_window=4, num_local_experts=4),
    "gpt2, learned positions": GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "deepseek, values of a size of their own": DeepseekV2Config(
        **SIZES | {"num_key_value_heads": 4},
        first_k_dense_replace=2,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
}


@pytest.fixture(params=[0, 1000], ids=["torch's kernel", "plain products"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SHORT", request.param)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_hidden_states_are_those_of_each_sequence_alone(
    name: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(ARCHITECTURES[name], tmp_path, monkeypatch)
    policy = load_policy(path, ModelConfig(path=str(path), dtype="float32"), CPU)
    sequences = [make_sequence(2, n, first_token=3 if shared else n) for n in (3, 17, 4, 11, 1)]
    (batch,) = pack(sequences, token_budget=128)
    assert (find_shared(batch.input_ids, batch.cu_seqlens.diff().tolist()) is not None) == shared
    with torch.no_grad():
        hidden = policy.hidden_states(batch)
        for place, start, end in zip(
            batch.sequence_ids.tolist(), batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True
        ):
            alone = plain_hidden(policy, sequences[place].token_ids[:-1])
            torch.testing.assert_close(hidden[start:end], alone, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_through_packed_attention_are_those_of_each_sequence_alone(policy: Policy, shared: bool) -> None:
    sequences = [make_sequence(2, n, first_token=3 if shared else n) for n in (3, 9, 4)]
    (batch,) = pack(sequences, token_budget=64)
    policy.hidden_states(batch).square().sum().backward()
    packed = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    for sequence in sequences:
        (alone,) = pack([sequence], token_budget=64)
        policy.hidden_states(alone).square().sum().backward()
    assert packed
    for name, parameter in policy.model.named_parameters():
        if name in packed:
            torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beside", [{}, {"gradient_checkpointing": True, "lora": LoraConfig(rank=2)}], ids=str)
def test_compiled_layers_do_the_same(beside: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if beside:  # half a minute of C++ once is enough: without it, what is traced and how often
        monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    path = saved(ARCHITECTURES["qwen2, biased projections"], tmp_path, monkeypatch)
    config = ModelConfig(path=str(path), dtype="float32", **beside)
    plain = load_policy(path, config, CPU)
    compiled = load_policy(path, config.model_copy(update={"compile": True}), CPU)
    counters.clear()
    for lengths in ((3, 9, 4), (20, 2)):
        (batch,) = pack([make_sequence(2, n, first_token=n) for n in lengths], token_budget=64)
        for policy in (plain, compiled):
            policy.model.zero_grad()
            policy.hidden_states(batch).square().sum().backward()
        expected = {name: p.grad for name, p in plain.model.named_parameters() if p.grad is not None}
        got = {name: p.grad for name, p in compiled.model.named_parameters() if p.grad is not None}
        assert expected.keys() == got.keys()
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            assert (got[name] - gradient).abs().max() <= 1e-5 * largest, name
    assert counters["aot_autograd"]["ok"] > 0
    assert counters["aot_autograd"]["ok"] <= 4  # for both layers and both batches together


def test_dropout_of_a_model_is_off_even_in_train_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(ARCHITECTURES["gpt2, learned positions"], tmp_path, monkeypatch)
    policy = load_policy(path, ModelConfig(path=str(path), dtype="float32", gradient_checkpointing=True), CPU)
    assert policy.model.training
    (batch,) = pack([make_sequence(2, 5)], token_budget=16)
    with torch.no_grad():
        assert torch.equal(policy.hidden_states(batch), policy.hidden_states(batch))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, bos_token_id=1, eos_token_id=2),
            "MambaForCausalLM",
        ),
        (CohereConfig(**SIZES), "CohereForCausalLM"),
        (Gemma2Config(**SIZES, head_dim=8), "Gemma2Attention"),
        (Llama4TextConfig(**SIZES, attention_chunk_size=4), "llama4_text"),
        (DogeConfig(**SIZES), "DogeAttention"),
        (DogeConfig(**SIZES, sliding_window=4), "doge"),
    ],
)
def test_a_model_that_cannot_be_trained_packed_is_refused(
    config: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(config, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        load_policy(path, ModelConfig(path=str(path), dtype="float32"), CPU)


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    with refused("model.path") as caught:
        load_policy(tmp_path / "nowhere", ModelConfig(path="x"), CPU)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load_policy(tmp_path, ModelConfig(path="x"), CPU)


def test_buckets_hold_every_position_once_and_little_padding() -> None:
    lengths = [5, 1, 30, 29, 28, 7, 300, 6]
    packing = plan_packing(lengths, CPU, "sdpa")
    assert packing.restore is not None
    slots = torch.cat([bucket.rows for bucket in packing.buckets])
    assert slots[packing.restore].tolist() == list(range(sum(lengths)))
    assert len(slots) <= sum(lengths) / 0.75
    assert len(packing.buckets) < len(lengths)
    assert packing.cu_seqlens.tolist()[-1] == sum(lengths)


@pytest.mark.parametrize("kernel", ["flash", "varlen"])
def test_a_kernel_that_cannot_run_says_why(kernel: Any) -> None:
    with refused("model.attention"):
        choose_kernel(kernel, CPU, torch.bfloat16)
    assert choose_kernel("auto", CPU, torch.bfloat16) == "sdpa"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert resolve_device("auto") == CPU
    with refused("run.device"):
        resolve_device("cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_cuda_kernels_agree_with_the_cpu(model_folder: Path, kernel: Any) -> None:
    sequences = [make_sequence(2, n, first_token=3) for n in (3, 17, 4)]
    (batch,) = pack(sequences, token_budget=64)
    on_cpu = load_policy(model_folder, ModelConfig(path="x", dtype="float32"), CPU)
    config = ModelConfig(path="x", dtype="bfloat16", attention=kernel)
    on_gpu = load_policy(model_folder, config, torch.device("cuda"))
    with torch.no_grad():
        expected, got = on_cpu.hidden_states(batch), on_gpu.hidden_states(batch).float().cpu()
    assert (expected - got).abs().max() <= 0.05 * expected.abs().max()
