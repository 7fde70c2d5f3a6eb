"""The hf engine: what it samples, from which distribution, and that nothing depends on the batching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import CUTS, save_model, what_is_left
from contract import check_prefix, check_responses, check_seeds, check_stop_string, model_logprobs, prompt, tokens_of
from torch import nn
from transformers import AttentionInterface, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dapo_runner.config import ModelConfig
from dapo_runner.engines.hf import HFEngine, ends_with_stop, sample_tokens
from dapo_runner.policy.model import load_model
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.types import SamplingParams, make_requests


@pytest.mark.filterwarnings("error::FutureWarning")
def test_responses_end_and_have_the_log_probs_of_the_whole_sequence(engine: HFEngine) -> None:
    sampling = SamplingParams(n=5, temperature=0.7, max_tokens=70, seed=3)  # beyond the cache's first block
    reasons = check_responses(engine, partial(model_logprobs, engine.model), sampling)
    reasons += check_responses(engine, partial(model_logprobs, engine.model), replace(sampling, max_tokens=2))
    assert min(reasons["stop"], reasons["length"]) > 3


def test_padded_prompts_keep_their_positions(engine: HFEngine) -> None:
    """Rotary embeddings would not notice a shift; learned positions do."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": len(engine.tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).eval()
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(50)
    gpt2 = HFEngine(model, engine.tokenizer, 64)
    prompts = [prompt(text, engine) for text in ("7", "123+45678=")]
    groups = gpt2.generate(make_requests(prompts, SamplingParams(max_tokens=6)))
    for asked, group in zip(prompts, groups, strict=True):
        expected = model_logprobs(gpt2.model, asked, group[0])
        torch.testing.assert_close(group[0].logprobs, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "keys", "length"), [(6, 2, 1), (6, 2, 9), (4, 4, 5)])
def test_attention_over_padding_has_the_bits_of_transformers(
    dtype: torch.dtype, heads: int, keys: int, length: int, engine: HFEngine
) -> None:
    attention = AttentionInterface()["sdpa"]  # the engine's own
    assert attention is not sdpa_attention_forward
    layer = nn.Identity()
    layer.num_key_value_groups = heads // keys  # type: ignore[assignment]
    query = torch.randn(3, heads, length, 32).to(dtype)
    key, value = (torch.randn(3, keys, 40, 32).to(dtype) for _ in range(2))
    mask = torch.ones(length, 40, dtype=torch.bool).tril(40 - length).repeat(3, 1, 1, 1)
    mask[1, ..., :7] = False
    for given in (
        mask,
        torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -1e30),
        mask.repeat(1, heads, 1, 1),
        None,
    ):
        with torch.no_grad():
            expected, _ = sdpa_attention_forward(layer, query, key, value, given, scaling=0.3)
            found, _ = attention(layer, query, key, value, attention_mask=given, scaling=0.3)
        if length > 1 or heads == keys:
            assert torch.equal(found, expected)
        torch.testing.assert_close(found, expected)


def test_a_soft_cap_of_scores_is_applied(tmp_path: Path) -> None:
    """By transformers' plain attention; torch's has none."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    tokenizer = make_tokenizer()
    gemma = Gemma2Config(**sizes, vocab_size=len(tokenizer), attn_logit_softcapping=0.1, num_key_value_heads=2)
    torch.manual_seed(0)
    written = Gemma2ForCausalLM._from_config(gemma, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in written.parameters():
            weight.mul_(20)  # scores large enough to be capped
    save_model(written, tokenizer, tmp_path)
    config = ModelConfig(path="x", dtype="float32")
    engine = HFEngine(load_model(tmp_path, config, torch.device("cpu"), "sdpa"), tokenizer, 64)
    asked = prompt("1+1=", engine)
    ((completion,),) = engine.generate(make_requests([asked], SamplingParams(max_tokens=4)))
    torch.testing.assert_close(completion.logprobs, model_logprobs(written, asked, completion), atol=1e-4, rtol=1e-4)
    assert load_model(tmp_path, config, torch.device("meta"), "sdpa").device.type == "meta"


def test_tokens_do_not_depend_on_the_batching(engine: HFEngine) -> None:
    prompts = [prompt(text, engine) for text in ("1+1=", "123+45678=", "7", "90+90=", "5-5=")]
    requests = make_requests(prompts, SamplingParams(n=6, max_tokens=20, seed=11))
    together = engine.generate(requests)
    engine.max_batch_sequences = 4  # groups are cut in two
    apart = engine.generate(requests)
    assert tokens_of(together) == tokens_of(apart)
    for one, other in zip(chain(*together), chain(*apart), strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("check", [check_seeds, check_prefix])
def test_what_every_engine_does(check: Callable[[HFEngine], None], engine: HFEngine) -> None:
    check(engine)


@pytest.mark.parametrize("cut", [{"temperature": 0.5}, {"top_k": 1000}, {"top_p": 0.6}, *CUTS], ids=str)
def test_samples_follow_the_truncated_distribution(cut: dict[str, Any], engine: HFEngine) -> None:
    """Log-probs are the policy's own, temperature included, or with ``sampling_mask`` the truncated distribution's."""
    asked, temperature, n = prompt("3+4=", engine), cut.get("temperature", 1.0), 2000
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([asked.token_ids]), use_cache=False).logits[0, -1]
    probs = (logits / temperature).softmax(-1)
    truncation = {name: value for name, value in cut.items() if name != "temperature"}
    kept = what_is_left(probs.tolist(), **truncation)
    engine.max_batch_sequences = n
    sampling = SamplingParams(n=n, max_tokens=1, seed=2, **cut)
    (completions,) = engine.generate(make_requests([asked], sampling))
    drawn = Counter(int(c.token_ids[0]) for c in completions)
    assert set(drawn) <= set(kept)
    for token, share in kept.items():
        assert abs(drawn[token] / n - share) <= 5 * (share * (1 - share) / n) ** 0.5 + 1e-4
    for completion in completions[:50]:
        assert float(completion.logprobs[0]) == pytest.approx(float(probs[completion.token_ids[0]].log()), abs=1e-4)
    (completions,) = engine.generate(make_requests([asked], replace(sampling, n=50, sampling_mask=True)))
    for one in completions:
        assert float(one.logprobs.exp()) == pytest.approx(kept[int(one.token_ids)], abs=1e-4)
        assert set(one.support.ids.tolist()) == (set(kept) if len(kept) < len(probs) else set())


@pytest.mark.parametrize("top_p", [0.05, 0.7, 0.999999])
@pytest.mark.parametrize("others", [{}, {"top_k": 7}, {"min_p": 0.05}], ids=str)
def test_ties_at_the_cut_do_not_depend_on_the_batching(others: dict[str, Any], top_p: float) -> None:
    """Of equally likely tokens at the cut, the first in the vocabulary are kept, as a stable sort would."""
    scales = torch.tensor([0.0, 0.5, 2, 8])[:, None]  # from all alike to peaked
    logits = (torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * scales).bfloat16().float()
    uniform, sampling = torch.zeros(4), SamplingParams(top_p=top_p, sampling_mask=True, **others)
    _, _, supports = sample_tokens(logits, uniform, sampling)
    for row, support in zip(logits, supports, strict=True):
        _, _, (alone,) = sample_tokens(row[None], uniform[:1], sampling)
        _, _, (untied,) = sample_tokens(row[None], uniform[:1], replace(sampling, top_p=1.0))
        assert torch.equal(alone, support)
        cut = torch.zeros_like(row)
        cut[untied.long()] = row.softmax(-1)[untied.long()]
        probs = cut if len(untied) else row.softmax(-1)  # no ids: the whole vocabulary
        ordered, order = (probs / probs.sum()).sort(descending=True, stable=True)
        left = order[ordered.cumsum(0) - ordered < top_p]
        assert alone.tolist() == (sorted(left.tolist()) if len(left) < 300 else [])


def test_a_stop_string_ends_a_response_as_if_the_policy_had(engine: HFEngine) -> None:
    for whole, cut in check_stop_string(engine, 100):
        assert torch.equal(cut.logprobs, whole.logprobs[: cut.length])


def test_a_stop_string_is_found_across_tokens_bytes_and_special_tokens() -> None:
    """Whatever the tokens are, whatever came long before."""
    pieces = {0: b"<end>", 1: b"</", 2: b"ans", 3: b"wer>", 4: "é".encode()[:1], 5: "é".encode()[1:], 6: b" x"}

    class Bytes:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            assert not skip_special_tokens
            return b"".join(pieces[i] for i in tokens).decode(errors="replace")

    for strings, end in (("</answer>", [1, 2, 3]), ("</</</</wer>", [1, 1, 1, 1, 3]), ("é", [4, 5]), ("<end>", [0])):
        said = [6] * 40 + end
        assert ends_with_stop(said, ("no such thing", strings), Bytes())
        assert not ends_with_stop(said[:-1], (strings,), Bytes())
        assert not ends_with_stop(said, (), Bytes())


def test_temperature_zero_is_greedy(engine: HFEngine) -> None:
    asked = prompt("3+4=", engine)
    (group,) = engine.generate(make_requests([asked], SamplingParams(n=3, temperature=0.0, max_tokens=10)))
    tokens = list(asked.token_ids)
    for token in group[0].token_ids.tolist():
        with torch.no_grad():
            assert token == int(engine.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(token)
    assert [completion is group[0] for completion in group] == [True] * 3  # sampled once


def test_logits_that_are_nan_give_a_token_whose_log_prob_is_nan() -> None:
    """The probe and the update report the NaN."""
    logits = torch.stack([torch.full((26,), torch.nan), torch.zeros(26)])
    tokens, logprobs, _ = sample_tokens(logits, torch.tensor([0.9, 0.5]), SamplingParams())
    assert 0 <= int(tokens[0]) < 26
    assert logprobs.isnan().tolist() == [True, False]


def test_weights_arrive_all_of_them_or_not_at_all(engine: HFEngine) -> None:
    requests = make_requests([prompt("12+34=", engine)], SamplingParams(n=4, max_tokens=8, seed=1))
    before = tokens_of(engine.generate(requests))
    weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    engine.update_weights((name, tensor * 1.5) for name, tensor in weights.items())
    assert tokens_of(engine.generate(requests)) != before
    engine.update_weights(weights.items())
    assert tokens_of(engine.generate(requests)) == before
    first, tensor = next(iter(weights.items()))
    rest = {name: tensor for name, tensor in weights.items() if name != first}
    for name, wrong in (
        ("extra", {**weights, "extra": tensor}),
        (first, rest),
        (first, {**weights, first: tensor[:1]}),
    ):
        with pytest.raises(ValueError, match=name):
            engine.update_weights(wrong.items())
