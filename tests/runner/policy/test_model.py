"""The packed forward pass is that of each sequence alone, and a model for which it is not is refused."""

from __future__ import annotations

import importlib.util
import inspect
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import make_sequence, pack, random_sequences, save_model
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import CPU, assert_same_gradients, learner_of, update
from refusals import refused
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BioGptConfig,
    CohereConfig,
    CTRLConfig,
    DeepseekV2Config,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

from dapo_runner.config import LoraConfig, ModelConfig
from dapo_runner.policy import attention, model
from dapo_runner.policy.attention import MAX_PADDING, SHORT, choose_kernel, plan_packing
from dapo_runner.policy.lengths import loading
from dapo_runner.policy.model import Policy, load_model, load_policy, load_tokenizer, resolve_device
from dapo_runner.policy.prefixes import LEAST_SHARED, find_shared
from dapo_runner.preflight.memory import model_values
from dapo_runner.preflight.needs import check_model
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.types import TrainingSequence

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY_GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
ARCHITECTURES = {
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2, biased projections": Qwen2Config(**SIZES),
    "mistral, window of 4": MistralConfig(**SIZES, sliding_window=4),
    "gemma3, windows and scaled embeddings": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4),
    "mixtral, window of 4": MixtralConfig(**SIZES, sliding_window=4, num_local_experts=4),
    "qwen2-moe, windows of 4 that its masks alone name": Qwen2MoeConfig(
        **SIZES, use_sliding_window=True, sliding_window=4, num_experts=4, moe_intermediate_size=16
    ),
    "phimoe, a window of 4 that its masks alone name": PhimoeConfig(**SIZES, sliding_window=4, num_local_experts=4),
    "gpt2, learned positions": GPT2Config(**TINY_GPT2, n_positions=256),
    "deepseek, values of a size of their own": DeepseekV2Config(
        **SIZES | {"num_key_value_heads": 4}, first_k_dense_replace=2, **LATENT
    ),
}
LENGTHS = (3, 17, SHORT + 20, 4, 11, 1, SHORT + 2)  # of both products of scores, torch's and plain ones


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    return save_model(AutoModelForCausalLM.from_config(config), make_tokenizer(), folder)


def load(path: Path, **values: Any) -> Policy:
    return load_policy(path, ModelConfig(path=str(path), dtype="float32", **values), CPU)


def sequences_of(shared: bool) -> list[TrainingSequence]:
    """Random tokens; of ``shared`` ones, each begins as the longest does."""
    generator, made = torch.Generator().manual_seed(1), [make_sequence(2, n) for n in LENGTHS]
    longest = torch.randint(3, 20, (max(LENGTHS) + 2,), generator=generator)
    for sequence in made:
        sequence.token_ids.copy_(torch.randint(3, 20, (sequence.length,), generator=generator))
        if shared:
            sequence.token_ids[: sequence.length // 2 + 1] = longest[: sequence.length // 2 + 1]
    return made


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_hidden_states_are_those_of_each_sequence_alone(name: str, tmp_path: Path) -> None:
    """With transformers' own attention."""
    path = saved(ARCHITECTURES[name], tmp_path)
    policy = load(path)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval().base_model
    for shared in (False, True):
        sequences = sequences_of(shared)
        (batch,) = pack(sequences, token_budget=1024)
        assert (find_shared(batch.input_ids, batch.lengths) is not None) == shared
        with torch.no_grad():
            parts = policy.hidden_states(batch).split(batch.lengths)
            for index, hidden in zip(batch.sequence_ids.tolist(), parts, strict=True):
                alone = plain(input_ids=sequences[index].token_ids[None, :-1]).last_hidden_state[0]
                torch.testing.assert_close(hidden, alone, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_through_packed_attention_are_those_of_each_sequence_alone(policy: Policy, shared: bool) -> None:
    sequences, found = sequences_of(shared), []
    for batches in (pack(sequences, 1024), [pack([sequence], 256)[0] for sequence in sequences]):
        for batch in batches:
            policy.hidden_states(batch).square().sum().backward()
        found.append({name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None})
        policy.model.zero_grad()
    assert_same_gradients(found[0], found[1], 1e-3)


@pytest.mark.parametrize(
    ("beside", "compiler"),
    [
        pytest.param({}, "aot_eager", marks=pytest.mark.slow),
        ({"gradient_checkpointing": True, "lora": LoraConfig(rank=2, targets=["q_proj"])}, "aot_eager"),
        pytest.param({"gradient_checkpointing": "offload"}, "aot_eager", marks=pytest.mark.slow),
        pytest.param({}, "inductor", marks=pytest.mark.slow),  # a minute of C++
    ],
    ids=["traced", "recomputed", "offloaded", "compiled"],
)
def test_compiled_layers_do_the_same(
    beside: dict[str, Any], compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are traced once for all layers and lengths; without gradients too, by the check of a policy."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    path = saved(ARCHITECTURES["qwen2, biased projections"], tmp_path)
    counters.clear()
    plain, compiled = load(path, **beside), load(path, **beside, compile=True)
    assert counters.pop("aot_autograd")["ok"]
    for lengths in ((3, 9, 4), (20, 2)):
        (batch,) = pack([make_sequence(2, n, first_token=n) for n in lengths], token_budget=64)
        found = []
        for policy in (plain, compiled):
            policy.model.zero_grad()
            policy.hidden_states(batch).square().sum().backward()
            found.append({name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None})
        largest = max(float(gradient.abs().max()) for gradient in found[0].values())
        assert found[0].keys() == found[1].keys()
        for name, gradient in found[0].items():
            assert (found[1][name] - gradient).abs().max() <= 1e-5 * largest, name
    assert 0 < counters["aot_autograd"]["ok"] <= 4


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("way", [True, "offload"])
def test_gradient_checkpointing_changes_no_gradient(model_folder: Path, way: bool | str) -> None:
    """Layers run again in the backward pass."""
    found, calls = [], list[int]()
    for values in ({}, {"gradient_checkpointing": way}):
        learner = learner_of(model_folder, model=values)
        learner.policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        (mini,) = learner.prepare(random_sequences(8))
        n_before = len(calls)
        found.append(update(learner, mini)[0])
        assert len(calls) - n_before == len(mini.micro_batches) * (2 if values else 1)
    assert_same_gradients(found[1], found[0], 0.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_of_the_hub_may_checkpoint_any_function(
    compiled: bool, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of transformers give a ``functools.partial``."""
    compilations, compiler = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: (compilations.append(f), compiler(f, backend="eager"))[1])
    model = load(model_folder, gradient_checkpointing="offload", compile=compiled).model
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    call = model.model.layers[0]._gradient_checkpointing_func
    assert torch.equal(call(layer.__call__, x), layer(x))
    for _ in range(2):  # as transformers from 5.23 on
        assert torch.equal(call(partial(torch.nn.Linear.forward, layer), x), layer(x))
    assert compilations.count(torch.nn.Linear.forward) == compiled


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(**TINY_GPT2, n_positions=256),
        MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.3),
        PhimoeConfig(**SIZES, num_local_experts=4),
        Starcoder2Config(**SIZES, residual_dropout=0.3),
        BioGptConfig(**SIZES, hidden_dropout_prob=0.3),  # in the layer itself
    ],
)
def test_layers_that_are_recomputed_draw_nothing_at_random(config: Any, tmp_path: Path) -> None:
    """Neither dropout, as a module or a function, nor noise or sampling of routers."""
    found, calls, (batch,) = [], list[int](), pack([make_sequence(2, 5)], token_budget=16)
    for values in ({}, {"gradient_checkpointing": True}):
        policy = load(saved(config, tmp_path / str(len(found))), **values)
        norm = next(
            module
            for name, module in policy.model.named_modules()
            if name.endswith(("layernorm", "ln_1", "layer_norm"))
        )
        norm.register_forward_pre_hook(lambda *_: calls.append(1))
        hidden = policy.hidden_states(batch)
        hidden.square().sum().backward()
        found.append([hidden.detach(), *(weight.grad for weight in policy.model.parameters())])
    assert len(calls) == 1 + 2
    torch.testing.assert_close(*found, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("MambaForCausalLM", MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2)),
        ("CohereForCausalLM", CohereConfig(**SIZES)),
        ("Gemma2Attention", Gemma2Config(**SIZES, head_dim=8)),
        ("llama4_text", Llama4TextConfig(**SIZES, attention_chunk_size=4)),
        ("DogeAttention", DogeConfig(**SIZES)),
        ("doge", DogeConfig(**SIZES, sliding_window=4)),
        ("is_causal of LlamaAttention", LlamaConfig(**SIZES, is_causal=False)),
        ("StableLmForCausalLM", StableLmConfig(**SIZES)),
        ("s_aux of GptOssAttention", GptOssConfig(**SIZES, head_dim=8, num_local_experts=4)),
    ],
)
def test_a_model_that_cannot_be_trained_packed_is_refused_by_name(name: str, config: Any, tmp_path: Path) -> None:
    path = saved(config, tmp_path)
    with refused(name):
        load(path)


def test_a_model_that_cannot_recompute_its_layers_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(CTRLConfig(vocab_size=61, n_embd=32, dff=48, n_layer=2, n_head=4), tmp_path)
    with refused("model.gradient_checkpointing", parts=["CTRLLMHeadModel"]):
        load(path, gradient_checkpointing=True)


def test_sparse_attention_is_refused_by_name(tmp_path: Path) -> None:
    """Few tokens do not show it: they are one block."""
    kind = pytest.importorskip("transformers.models.minimax_m3_vl").MiniMaxM3VLTextConfig
    layers = ["full_attention", "minimax_m3_sparse"]
    path = saved(kind(**SIZES, head_dim=8, num_local_experts=4, layer_types=layers), tmp_path)
    with refused("MiniMaxM3VLAttention", parts=["block_indices"]):
        load(path)


def test_weights_that_are_not_finite_are_refused_by_their_folder(model_folder: Path, tmp_path: Path) -> None:
    policy = load(model_folder)
    with torch.no_grad():
        policy.model.model.norm.weight[0] = torch.inf
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    with refused("model.path", parts=[f"weights of {tmp_path} that are not finite"]):
        load(tmp_path)


def test_a_model_without_safe_weights_is_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with refused("model.path"):
        load(tmp_path)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_buckets_hold_every_position_once_and_little_padding(lengths: list[int]) -> None:
    packing = plan_packing(lengths, CPU, "sdpa")
    assert packing.restore is not None
    slots = torch.cat([bucket.rows for bucket in packing.buckets])
    assert slots[packing.restore].tolist() == list(range(sum(lengths)))
    assert len(slots) == sum(bucket.n * bucket.length for bucket in packing.buckets)
    assert len(slots) <= sum(lengths) / (1 - MAX_PADDING) + 1e-6
    assert len(packing.buckets) <= len(set(lengths))
    assert (packing.cu_seqlens.tolist()[-1], packing.longest) == (sum(lengths), max(lengths))


def packed(rows: list[list[int]]) -> tuple[Tensor, list[int]]:
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64), [len(row) for row in rows]


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_one_computed_position_for_each_distinct_prefix(rows: list[list[int]]) -> None:
    """Every packed position finds its own."""
    found = find_shared(*packed(rows))
    heads = [tuple(row[: end + 1]) for row in rows for end in range(len(row))]
    if found is None:
        assert len(heads) - len(set(heads)) <= LEAST_SHARED * len(heads)
        return
    assert len(found.source) == len(set(heads))
    assert [heads[found.source[index]] for index in found.inverse] == heads


@pytest.mark.parametrize(("n_shared", "is_worth_it"), [(1, False), (40, True)])
def test_a_short_shared_prefix_is_computed_twice(n_shared: int, is_worth_it: bool) -> None:
    one = list(range(500))
    other = one[:n_shared] + [7000] * 500
    assert (find_shared(*packed([one, other])) is not None) == is_worth_it


def test_a_kernel_or_a_device_that_is_not_there_is_refused() -> None:
    for kernel in ("flash", "varlen"):
        with refused("model.attention"):
            choose_kernel(kernel, CPU, torch.bfloat16)  # type: ignore[arg-type]
    assert choose_kernel("auto", CPU, torch.bfloat16) == "sdpa"
    assert choose_kernel("varlen", torch.device("cuda"), torch.bfloat16) == "varlen"
    assert choose_kernel("auto", torch.device("cuda"), torch.float32) == "sdpa"
    assert choose_kernel("auto", torch.device("cuda"), torch.bfloat16) in ("flash", "varlen")
    for name in ("cuda:99", "nothing"):
        with refused("run.device"):
            resolve_device(name)


def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float | None, window: tuple[int, int]
) -> Tensor:
    """Each sequence alone: [T, heads, D] → [T, heads, D]."""
    parts, (before, after) = [], window
    assert after == 0
    for start, end in pairwise(bounds.tolist()):
        visible = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        visible = visible if before < 0 else visible.triu(-before)
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


# `torch.nn.attention.varlen.varlen_attn` of each release, with those of its arguments that a packing sets. ``rest``:
# the boundaries of the keys, the longest query and key.
def varlen_2_10(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *rest: Any, is_causal: bool) -> Tensor:
    assert is_causal
    assert query.shape == key.shape
    return attend_apart(query, key, value, bounds, None, (-1, 0))


def varlen_2_11(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *rest: Any, scale: float, window_size: tuple[int, int]
) -> Tensor:
    assert query.shape == key.shape
    return attend_apart(query, key, value, bounds, scale, window_size)


def varlen_2_12(query: Tensor, *rest: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> Tensor:
    key, value, bounds, *_ = rest
    assert enable_gqa == (query.shape != key.shape)
    return attend_apart(query, key, value, bounds, scale, window_size)


def use_varlen(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_attn", function)
    monkeypatch.setattr(attention, "VARLEN_ARGUMENTS", inspect.signature(function).parameters)


@pytest.mark.parametrize("function", [varlen_2_10, varlen_2_11, varlen_2_12])
@pytest.mark.parametrize("window", [None, 4])
def test_varlen_of_each_torch_agrees_with_the_cpu(
    function: Any, window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two query heads for each key head, and a scale that is not that of the heads."""
    use_varlen(function, monkeypatch)
    sizes = SIZES | {"head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 4}
    layers = ["full_attention" if window is None else "sliding_attention", "full_attention"]
    policy = load(saved(Gemma3TextConfig(**sizes, layer_types=layers), tmp_path))
    (batch,), found = pack(sequences_of(False), 1024), []
    if function is varlen_2_10 and window is not None:
        with refused("model.attention"):
            replace(policy, kernel="varlen").hidden_states(batch)
        return
    for each in (policy, replace(policy, kernel="varlen")):
        hidden = each.hidden_states(batch)
        hidden.pow(3).sum().backward()
        found.append({name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None})
        found[-1]["hidden states"] = hidden.detach()
        policy.model.zero_grad()
    assert_same_gradients(found[0], found[1], 1e-3)


def test_auto_is_sdpa_where_varlen_lacks_the_windows_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "flash_attn" else find(name, *a))

    def on_cuda(wanted: Any, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
        return choose_kernel(wanted, torch.device("cuda"), torch.bfloat16, **options)

    monkeypatch.setattr(model, "choose_kernel", on_cuda)
    windows, full = (saved(MistralConfig(**SIZES, sliding_window=n), tmp_path / str(n)) for n in (4, None))
    for function, expected in ((varlen_2_10, "sdpa"), (varlen_2_12, "varlen")):
        use_varlen(function, monkeypatch)
        assert (load(windows).kernel, load(full).kernel) == (expected, "varlen")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_cuda_kernels_agree_with_the_cpu(model_folder: Path, kernel: Any) -> None:
    (batch,) = pack([make_sequence(2, n, first_token=3) for n in (3, 17, 4)], token_budget=64)
    config = ModelConfig(path="x", dtype="bfloat16", attention=kernel)
    on_gpu = load_policy(model_folder, config, torch.device("cuda"))
    with torch.no_grad():
        expected, got = load(model_folder).hidden_states(batch), on_gpu.hidden_states(batch).float().cpu()
    assert (expected - got).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", ""),
        ("config.json", "null"),
        ("tokenizer.json", "{}"),
        ("model.safetensors", "x" * 99),
        ("generation_config.json", '{"length_penalty": 2.0}'),  # without beams: transformers loads but never saves it
    ],
)
def test_a_damaged_file_of_a_model_is_one_line(name: str, content: str, model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / name).write_text(content)
    model = ModelConfig(path=str(folder), dtype="float32")
    reads: dict[str, Callable[[], object]] = {
        "config.json": lambda: model_values(model),
        "tokenizer.json": lambda: load_tokenizer(folder, model),
        "model.safetensors": lambda: load_model(folder, model, CPU, "sdpa"),
        "generation_config.json": lambda: load_policy(folder, model, CPU),
    }
    with refused("model.path", parts=[str(folder)]) as caught:
        reads[name]()
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_there_are_refused_before_the_start(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    check_model("model.path", str(folder))
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with refused("model.path", parts=["git lfs pull"]):
        check_model("model.path", str(folder))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("nowhere")
    with refused("model.path", parts=["*.safetensors"]):
        check_model("model.path", str(folder))


def test_weights_that_the_files_lack_are_not_drawn_at_random(model_folder: Path, tmp_path: Path) -> None:
    """Such as those of torch.compile's names, or the head of a classifier, which a critic does not need."""
    model = ModelConfig(path="x", dtype="float32")
    weights = load_file(model_folder / "model.safetensors")
    head = {name: tensor for name, tensor in weights.items() if not name.startswith("lm_head")}
    for number, kept in enumerate(({f"_orig_mod.{name}": tensor for name, tensor in weights.items()}, head)):
        folder = shutil.copytree(model_folder, tmp_path / f"model{number}")
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        for role in ("policy", "reference", "critic"):
            with nullcontext() if role == "critic" and kept is head else refused("model.path", parts=["files lack"]):
                load_policy(folder, model, CPU, role=role)  # type: ignore[arg-type]


def test_a_response_is_decoded_as_it_was_sampled(tmp_path: Path) -> None:
    """Llama 3's tokenizer asks for a clean-up, which removes spaces."""
    tokenizer = make_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.save_pretrained(tmp_path)
    text = "1 , 2 ?"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) != text
    loaded = load_tokenizer(tmp_path, ModelConfig(path="x"))
    assert loaded.decode(loaded(text)["input_ids"]) == text


def test_byte_level_tokens_under_the_class_of_llama(tmp_path: Path) -> None:
    """As in folders of DeepSeek's distilled Llama: some versions of transformers load them as sentencepiece's, without
    spaces, which is refused.
    """
    words = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("Ġ", "the")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}))
    loaded = load_tokenizer(tmp_path, ModelConfig(path="x"))
    assert loaded.tokenize("the the\n") == ["the", "Ġthe", "Ċ"]
    settings.write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast", "eos_token": "<eos>"}))
    is_right = AutoTokenizer.from_pretrained(tmp_path).decode([vocabulary["Ġthe"]]) == " the"
    with nullcontext() if is_right else refused("model.path", parts=[str(tmp_path), "tokenizer_class"]):
        loaded = load_tokenizer(tmp_path, ModelConfig(path="x"))
    assert loaded.tokenize("the the\n") == ["the", "Ġthe", "Ċ"]


def test_a_model_with_a_temperature_alone_can_be_saved(model_folder: Path, tmp_path: Path) -> None:
    """Some models of the hub have one without do_sample, which transformers loads but does not save."""
    folder, generation = shutil.copytree(model_folder, tmp_path / "model"), {"temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    loaded = load_policy(folder, ModelConfig(path="x", dtype="float32"), CPU)
    loaded.save_settings(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved.items() >= {**generation, "do_sample": True}.items()


def test_a_failure_of_a_models_own_code_names_its_line_and_a_lack_of_memory_is_no_failure_of_its_folder() -> None:
    with refused("model.path", parts=["two lines", f"({Path(__file__).name}:"]), loading("model.path", "a model", "m"):
        raise ValueError("two\nlines")
    for error in (MemoryError, torch.OutOfMemoryError):
        with pytest.raises(error), loading("model.path", "a model", "m"):
            raise error
