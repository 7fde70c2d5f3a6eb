"""PolicyLoss: the loss and the gradient of the model's own logits, padded and packed, or an error."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[runner]'")

import torch
import transformers
from policy_batches import (
    LENGTHS,
    VOCAB,
    Capped,
    dapo,
    gradients,
    network,
    packed,
    padded,
    relative_error,
    sequences,
    target_logprobs,
)
from torch import Tensor

from dapo_kernels import linear_dapo_loss, records, summarize
from dapo_kernels.integrations.heads import LogitRule, head_of
from dapo_kernels.integrations.probe import _distance
from dapo_kernels.integrations.rope import fixed_frequencies
from dapo_kernels.integrations.torch import PolicyLoss

HEADS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 0.5},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
}


def logprobs_of(policy: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    ids = {name: batch[name] for name in ("input_ids", "target_ids", "mask", "cu_seqlens") if name in batch}
    return policy(**ids, mode="logprobs", **options).logprobs


@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_and_gradient_of_the_models_own_logits(kind: str) -> None:
    """Its caps and scales included, padded on either side, and packed, where no sequence sees another."""
    policy, rows = PolicyLoss(network(kind, **HEADS[kind]), temperature=0.7), padded()
    live = rows["mask"]
    expected = target_logprobs(policy.model(input_ids=rows["input_ids"]).logits / 0.7, rows)
    loss = dapo(expected, rows)
    loss.backward()
    expected_gradient = gradients(policy.model)
    attention_mask = (torch.arange(live.shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    left = {name: x.flip(-1) if x.dim() > 1 else x for name, x in rows.items()}
    for name, x in left.items():
        if x.dim() > 1:
            for i, row in enumerate(sequences()):
                x[i, -LENGTHS[i] :] = row[name]
    for batch in (rows, left | {"attention_mask": attention_mask.flip(1)}, packed()):
        out = policy(**batch)
        torch.testing.assert_close(out.loss, loss, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out.logprobs[batch["mask"]], expected[live], atol=1e-5, rtol=1e-5)
        out.loss.backward()
        assert relative_error(gradients(policy.model), expected_gradient) < 1e-5
    torch.testing.assert_close(logprobs_of(policy, packed())[packed()["mask"]], expected[live], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "value", "factor"), [("logits_scaling", 4.0, 0.25), ("logit_scale", 0.3, 0.3)])
def test_a_factor_before_a_cap_is_another_cap_and_temperature(name: str, value: float, factor: float) -> None:
    config = SimpleNamespace(final_logit_softcapping=2.0, model_type="any", **{name: value})
    config.get_text_config = lambda: config
    rule, x = LogitRule.of(config, 0.7), 3.0
    assert rule.softcap is not None
    expected = 2.0 * math.tanh(factor * x / 2.0) / 0.7
    assert rule.softcap * math.tanh(x / rule.softcap) / rule.temperature == pytest.approx(expected, rel=1e-9)
    setattr(config, name, -value)
    with pytest.raises(ValueError, match="any"):
        LogitRule.of(config, 0.7)


def test_options_of_a_call_come_before_those_of_the_module() -> None:
    lasting = {"kl_coef": 0.1, "kl_through_ratio": True, "clip_high": 0.1, "entropy": True, "float32_logits": True}
    policy, batch = PolicyLoss(network(), objective="grpo", **lasting), padded()
    out = policy(**batch, kl_coef=0.0, clip_high=0.5, denominator=4)
    model, ids = policy.model, (batch.pop("input_ids"), batch.pop("target_ids"))
    hidden = model.model(input_ids=ids[0]).last_hidden_state
    options = {"kl_coef": 0.0, "entropy": True, "float32_logits": True, "clip_high": 0.5, "denominator": 4}
    expected = linear_dapo_loss(hidden, model.lm_head.weight, ids[1], **batch, objective="grpo", **options)
    assert torch.equal(out.loss, expected.loss)
    assert summarize(out.metrics) == summarize(expected.metrics)
    stats = policy(*ids, mask=batch["mask"], mode="logprobs")
    assert torch.equal(stats.logprobs, expected.logprobs)
    assert torch.equal(stats.entropy, expected.entropy)
    stats.logprobs.sum().backward()
    assert model.model.embed_tokens.weight.grad.any()


def adapted(config: Any) -> Any:
    return pytest.importorskip("peft", reason="peft is not installed").get_peft_model(network(), config)


def lora(*targets: str, **config: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.LoraConfig(r=4, target_modules=list(targets), **{"init_lora_weights": False, **config})


def test_adapters_of_layers_and_of_the_head() -> None:
    rows = padded()
    configs = {
        8: lora("q_proj", "down_proj"),
        5: lora("q_proj", modules_to_save=["lm_head"]),
        6: lora("q_proj", "lm_head", use_rslora=True, lora_alpha=3),
    }
    for n_trained, config in configs.items():
        policy = PolicyLoss(adapted(config))
        expected = target_logprobs(policy.model(input_ids=rows["input_ids"]).logits, rows)
        dapo(expected, rows).backward()
        eager = gradients(policy.model)
        assert len(eager) == n_trained
        out = policy(**rows)
        torch.testing.assert_close(out.logprobs, expected, atol=1e-5, rtol=1e-5)
        out.loss.backward()
        assert relative_error(gradients(policy.model), eager) < 1e-4
    with policy.model.disable_adapter():
        assert head_of(policy.model, expected).lora is None
    policy.model.merge_adapter()
    torch.testing.assert_close(policy(**rows).logprobs, expected, atol=1e-5, rtol=1e-5)
    policy.model.unmerge_adapter()
    policy.model.add_adapter("ref", configs[6])  # as TRL adds one that is the reference of an adapter trained before
    for name, differs in (("ref", True), ("default", False)):
        policy.model.set_adapter(name)
        logprobs = target_logprobs(policy.model(input_ids=rows["input_ids"]).logits, rows)
        torch.testing.assert_close(logprobs_of(policy, rows), logprobs, atol=1e-5, rtol=1e-5)
        assert torch.allclose(logprobs, expected) != differs


def several_adapters() -> Any:
    model = adapted(lora("lm_head"))
    model.add_adapter("second", lora("lm_head"))
    model.base_model.set_adapter(["default", "second"])
    return model


def quantized() -> Any:
    model = network()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    return model


class Float(torch.Tensor):
    """Has a floating-point dtype and holds other tensors, as torchao's quantized tensors do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


def quantized_by_torchao() -> Any:
    model = network()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().as_subclass(Float))
    return model


T5 = {"vocab_size": VOCAB, "d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}


def other_adapter(name: str, **config: Any) -> Any:
    return adapted(getattr(pytest.importorskip("peft"), name)(**config))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: adapted(lora("lm_head", lora_dropout=0.1)), "dropout"),
        (lambda: adapted(lora("lm_head", use_dora=True)), "Dora"),
        (lambda: adapted(lora("lm_head", lora_bias=True)), "lora_bias"),
        (lambda: other_adapter("IA3Config", target_modules=["lm_head"], feedforward_modules=[]), "Linear"),
        (lambda: other_adapter("AdaLoraConfig", target_modules=["lm_head"], total_step=9), "SVDLinear"),
        (lambda: other_adapter("PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=2), "PEFT"),
        (several_adapters, "default, second"),
        (lambda: network().model, "LlamaModel"),
        (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)), "encoder-decoder"),
        (quantized, "int8"),
        (quantized_by_torchao, "Float"),
        (lambda: torch.nn.DataParallel(network()), "DataParallel"),
    ],
)
def test_models_that_are_refused_at_once(make: Any, word: str) -> None:
    with pytest.raises((TypeError, ValueError), match=word):
        PolicyLoss(make())


@pytest.mark.parametrize("name", ["bias", "lora", "softcap", "main_grad", "clip"])
def test_options_that_are_the_models_or_unknown(name: str) -> None:
    policy = PolicyLoss(network())
    for call in (lambda: PolicyLoss(policy.model, **{name: None}), lambda: policy(**packed(), **{name: None})):
        with pytest.raises(TypeError if name == "clip" else ValueError, match=rf"\b{name}\b") as caught:
            call()
        known = set(str(caught.value).partition("known: ")[2].split(", "))
        assert (name == "clip") == ({"temperature", "clip_high"} <= known)
        assert not known & {"self", "bias", "lora", "softcap", "main_grad"}


ROWS = padded()
BATCH = packed()


@pytest.mark.parametrize(
    ("error", "word", "change"),
    [
        (ValueError, "train", {"mode": "train"}),
        (ValueError, "objective", {"objective": "grpo"}),
        (ValueError, "old_logprobs", {"mode": "logprobs"}),
        (ValueError, "attention_mask", ROWS | {"cu_seqlens": None, "attention_mask": torch.ones(6, 13)}),
        (ValueError, "cu_seqlens", {"cu_seqlens": None}),
        (ValueError, "attention_mask and cu_seqlens", {"attention_mask": BATCH["mask"]}),
        (ValueError, r"\[6, 12\]", {"input_ids": ROWS["input_ids"]}),
        (TypeError, "input_ids", {"input_ids": [1, 2]}),
        (TypeError, "cu_seqlens", {"cu_seqlens": [0, 50]}),
        (TypeError, "old_logprobs", {"old_logprobs": BATCH["old_logprobs"].bfloat16()}),
        (TypeError, "denominator", {"denominator": torch.tensor(700.0).bfloat16()}),
        (TypeError, "advantages", {"advantages": None}),
        (TypeError, "temperature", {"temperature": None}),
        (TypeError, "clip_high", {"mode": "logprobs", "old_logprobs": None, "advantages": None, "clip_high": 0.3}),
    ],
)
def test_calls_that_are_refused(error: type[Exception], word: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=word):
        PolicyLoss(network())(**BATCH | change)


def unshifted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the labels of transformers, which shifts them itself."""
    return batch | {"target_ids": torch.where(batch["mask"], batch["input_ids"], -100)}


RIGHT = dict(ROWS) | {"attention_mask": (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()}
ALL_LIVE = torch.ones_like(ROWS["mask"])


@pytest.mark.parametrize(
    ("word", "batch"),
    [
        ("target_ids", unshifted(ROWS)),
        ("target_ids", unshifted(BATCH)),
        ("target_ids", ROWS | {"target_ids": ROWS["input_ids"], "mask": None}),
        ("attention_mask", RIGHT | {"mask": None}),
        ("attention_mask", RIGHT | {"mask": ALL_LIVE}),
        ("attention_mask", RIGHT | {"attention_mask": 2 * RIGHT["attention_mask"]}),
        ("attention_mask", RIGHT | {"attention_mask": -1e9 * (1 - RIGHT["attention_mask"])}),
    ],
)
def test_values_that_are_refused(monkeypatch: pytest.MonkeyPatch, word: str, batch: dict[str, Any]) -> None:
    """In every call; where looking waits for the device, in calls of a mode up to the first that is right."""
    policy = PolicyLoss(network())
    policy(**RIGHT)
    with pytest.raises(ValueError, match=rf"PolicyLoss: .*{word}"):
        policy(**batch)
    monkeypatch.setattr(records, "HOST_DEVICES", set())
    policy(**batch)
    policy = PolicyLoss(policy.model)
    logprobs_of(policy, RIGHT)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"PolicyLoss: .*{word}"):
            policy(**batch)
    policy(**RIGHT)
    policy(**batch)


def test_an_attention_mask_is_checked_for_logprobs_too() -> None:
    with pytest.raises(ValueError, match="attention_mask"):
        logprobs_of(PolicyLoss(network()), RIGHT, attention_mask=2 * RIGHT["attention_mask"])


def test_targets_other_than_the_next_input_are_not_refused() -> None:
    """Two tokens ahead; some repeated inputs; sequences of one token each, in which nothing comes next."""
    policy, ids, borders = PolicyLoss(network()), BATCH["input_ids"], BATCH["cu_seqlens"]
    full = {"target_ids": ids.roll(-1), "mask": None}
    some = torch.where(torch.arange(len(ids)) % 2 == 0, ids, ids.roll(-1))
    rest = {"old_logprobs": None, "cu_seqlens": torch.cat([borders[:1], borders, borders[-1:]])}
    for change in (full, full | {"target_ids": ids.roll(-2)}, full | {"target_ids": some}):
        assert policy(**BATCH | rest | change).loss.isfinite()
    alone = {"target_ids": ids, "mask": None, "cu_seqlens": torch.arange(len(ids) + 1, dtype=torch.int32)}
    assert policy(**BATCH | rest | alone).loss.isfinite()
    equal = torch.ones_like(ROWS["input_ids"]), ROWS["mask"] & (torch.arange(12) < 6)  # one token, over and over
    padded_ids = torch.where(torch.arange(12) < 6, equal[0], 0)
    assert policy(padded_ids, padded_ids, None, ROWS["advantages"], mask=equal[1]).loss.isfinite()


def test_positions_count_tokens_whatever_the_mask_holds() -> None:
    policy = PolicyLoss(network())
    seen: list[Tensor] = []
    policy.model.model.register_forward_pre_hook(
        lambda _module, _inputs, given: seen.append(given["position_ids"]), with_kwargs=True
    )
    mask = torch.tensor([[0, 0, 2, 1, 3]])
    policy._padded_hidden_states(torch.arange(5)[None], mask)
    assert seen[0].tolist() == [[0, 0, 0, 1, 2]]


def test_a_cap_far_above_the_logits_is_found() -> None:
    """Logits of 0.1, as here, do not show a cap of 300."""
    with pytest.raises(ValueError, match="Capped"):
        PolicyLoss(Capped(network().config).eval())(**padded())


def test_a_head_of_zeros() -> None:
    """As a new one starts. It trains, and a cap above its output is found."""
    models = network(), Capped(network().config).eval()
    for model in models:
        torch.nn.init.zeros_(model.lm_head.weight)
    out = PolicyLoss(models[0])(**padded())
    torch.testing.assert_close(out.logprobs[padded()["mask"]].unique(), torch.tensor([-math.log(VOCAB)]))
    with pytest.raises(ValueError, match="Capped"):
        PolicyLoss(models[1])(**padded())


def test_a_check_that_could_not_run_is_not_reported_as_a_measurement() -> None:
    """Of packed sequences, and of left padding."""

    def fail(_module: Any, _inputs: Any, keywords: dict[str, Any]) -> None:
        if keywords.get("position_ids") is not None:
            raise MemoryError("{too} large")

    policy, rows = PolicyLoss(network()), padded()
    policy.model.model.register_forward_pre_hook(fail, with_kwargs=True)
    left_padded = rows | {"attention_mask": (torch.arange(rows["mask"].shape[1]) > 0).long().expand(rows["mask"].shape)}
    for batch, measured in ((packed(), "apart"), (left_padded, "ignore")):
        with pytest.raises(ValueError, match=r"LlamaForCausalLM.*\({too} large\)") as caught:
            policy(**batch)
        assert measured not in str(caught.value)


def test_a_head_in_bfloat16_under_hidden_states_in_float32() -> None:
    """Mamba keeps its residuals in float32 and rounds them for its head."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).to(torch.bfloat16).eval()
    rows = padded()
    expected = target_logprobs(model(input_ids=rows["input_ids"]).logits.float(), rows)
    torch.testing.assert_close(PolicyLoss(model)(**rows).logprobs, expected, atol=0.02, rtol=0)


def test_the_first_call_leaves_the_model_as_it_was() -> None:
    """Made without its weights; in train mode with dropout, which the loss draws and the check does not."""
    with torch.device("meta"):
        policy = PolicyLoss(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=32)))
    model = network(attention_dropout=0.5)
    policy.model = model.train()
    passes = []
    model.model.register_forward_hook(lambda *_: passes.append(model.training))
    model.model.layers[0].eval()
    torch.manual_seed(3)
    first = logprobs_of(policy, packed())
    n_passes = len(passes)
    torch.manual_seed(3)
    assert torch.equal(logprobs_of(policy, packed()), first)
    assert len(passes) == n_passes + 1 < 13
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].self_attn.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.lm_head._forward_hooks


def test_the_first_call_may_be_compiled() -> None:
    torch._dynamo.reset()
    policy, expected = PolicyLoss(network(num_hidden_layers=1)), PolicyLoss(network(num_hidden_layers=1))(**packed())
    out = torch.compile(policy, backend="eager", fullgraph=True)(**packed())
    torch.testing.assert_close(out.loss, expected.loss, atol=1e-6, rtol=0)


SHORT, LONG = 10, 64
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
PHI3 = {"max_position_embeddings": LONG, "original_max_position_embeddings": 16, "pad_token_id": 0}
FULL, SLIDING = "full_attention", "sliding_attention"
BY_LAYER = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0},
}
ROTARY: dict[str, tuple[str, dict[str, Any], tuple[int, str] | None]] = {
    "default": ("Llama", {}, None),
    "yarn": ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
    "dynamic": ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, (32, "dynamic")),
    "longrope": ("Phi3", PHI3 | {"rope_scaling": {"rope_type": "longrope", **FACTORS}}, (16, "longrope")),
    "in one kind of layers": ("Gemma3", {"layer_types": [SLIDING, FULL], "rope_parameters": BY_LAYER}, (32, "dynamic")),
}


@torch.no_grad()
def logprobs_of_first(policy: PolicyLoss, longest: int, layout: str) -> Tensor:
    """Of a sequence of 10 tokens beside one of ``longest``."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCAB, (length,), generator=generator) for length in (SHORT, longest)]
    if layout == "packed":
        ids, borders = torch.cat(rows), torch.tensor([0, SHORT, SHORT + longest], dtype=torch.int32)
        return policy(ids, ids.roll(-1), cu_seqlens=borders, mode="logprobs").logprobs[: SHORT - 1]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return policy(ids, ids.roll(-1, 1), mode="logprobs").logprobs[0, : SHORT - 1]


@pytest.mark.parametrize("name", ROTARY)
def test_no_length_changes_the_logprobs_of_another_sequence(name: str) -> None:
    """Up to the limit. One token more is refused, and leaves the model as it was."""
    kind, config, limit = ROTARY[name]
    model = network(kind, **{"max_position_embeddings": 32, **config})
    assert fixed_frequencies(model.config) == limit
    policy = PolicyLoss(model)
    longest = LONG if limit is None else limit[0]
    for layout in ("padded", "packed"):
        alone = logprobs_of_first(policy, 1, layout)
        torch.testing.assert_close(logprobs_of_first(policy, longest, layout), alone, atol=1e-5, rtol=0)
        if limit is not None:
            with pytest.raises(ValueError, match=rf"input_ids.*{limit[1]}"):
                logprobs_of_first(policy, longest + 1, layout)
            torch.testing.assert_close(logprobs_of_first(policy, longest, layout), alone, atol=1e-5, rtol=0)


def test_the_shortest_limit_of_all_layers_counts() -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    config = SimpleNamespace(rope_parameters={SLIDING: longrope, FULL: BY_LAYER[FULL]}, max_position_embeddings=32)
    config.get_text_config = lambda decoder: config
    assert fixed_frequencies(config) == (16, "longrope")


def test_the_distance_of_hidden_states_is_that_of_the_token_that_moved_most() -> None:
    moved = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 4.5]])
    assert _distance(moved, torch.zeros(2, 3)) == 5
    assert _distance(moved, torch.full((2, 3), math.nan)) == math.inf
