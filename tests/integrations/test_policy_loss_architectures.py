"""PolicyLoss over every causal language model of transformers: the log-probs of the model itself, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[runner]'")

import torch
from tiny_models import NOT_BUILT, VOCAB, tiny_model
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

from dapo_kernels.integrations.torch import PolicyLoss

LENGTHS = (7, 11, 5)

# Served neither padded nor packed: a transform before the head; not causal; no model below the head (Llama 4, mllama).
REFUSED = """
bert big_bird camembert data2vec-text electra ernie megatron-bert modernbert-decoder prophetnet rembert roberta
roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
cpmant xlm xlnet
llama4 llama4_text mllama
"""
# Served padded, not packed: no mask from position_ids; convolutions and recurrent states; blocks of the whole batch.
PADDED_ONLY = """
afmoe bart bert-generation bigbird_pegasus biogpt blenderbot blenderbot-small bloom blt falcon gpt_oss marian mbart mpt
mvp openai-gpt opt pegasus plbart reformer trocr xglm
bamba falcon_h1 falcon_mamba granitemoehybrid inkling_text jamba kimi_linear lfm2_moe mamba mamba2 minimax
minimax_m3_vl_text nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya
"""
# Not served with left padding: no position_ids, or states, convolutions and blocks that see it.
RIGHT_PADDED_ONLY = """
bart bigbird_pegasus blenderbot blenderbot-small blt marian mbart mvp pegasus plbart trocr whisper
minimax_m3_vl_text recurrent_gemma reformer rwkv xlstm
"""
# Those of every run, one for each way in which a model differs; the rest takes minutes.
ALWAYS = """
llama gemma2 granite cohere hyperclovax gpt2
bert llama4_text xlnet
bart bloom gpt_oss recurrent_gemma xlstm inkling_text rwkv lfm2_moe minimax_m3_vl_text
"""


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]


def own_logprobs(model: Any) -> list[Tensor]:
    """Of each sequence alone, from the logits of the model."""
    found = []
    for ids in sequences():
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        found.append(logits.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0])
    return found


def padded_logprobs(policy: PolicyLoss, side: str = "right", masked: bool = False) -> list[Tensor]:
    """``masked``: with an attention mask, and any token as padding."""
    rows = sequences()
    ids, targets, mask = (
        torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_side=side)
        for part in (rows, [row.roll(-1) for row in rows], [torch.ones_like(row) for row in rows])
    )
    options = {"attention_mask": mask} if masked else {}
    logprobs = policy(torch.where(mask == 1, ids, 9) if masked else ids, targets, mode="logprobs", **options).logprobs
    return list(logprobs[mask == 1].split(LENGTHS))


def packed_logprobs(policy: PolicyLoss) -> list[Tensor]:
    ids, targets = torch.cat(sequences()), torch.cat([row.roll(-1) for row in sequences()])
    cu_seqlens = torch.tensor((0, *LENGTHS)).cumsum(0).to(torch.int32)
    logprobs = policy(ids, targets, cu_seqlens=cu_seqlens, mode="logprobs").logprobs
    return list(logprobs.split(LENGTHS))


@torch.no_grad()
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in ALWAYS.split() else pytest.mark.slow)
        for name in sorted(set(MODELS) - set(NOT_BUILT))
    ],
)
def test_right_or_refused(model_type: str) -> None:
    model = tiny_model(model_type)
    layouts: dict[str, Callable[[PolicyLoss], list[Tensor]]] = {
        "right": padded_logprobs,
        "masked": lambda policy: padded_logprobs(policy, masked=True),
        "left": lambda policy: padded_logprobs(policy, "left", masked=True),
        "packed": packed_logprobs,
    }
    refused = list(layouts) if model_type in REFUSED.split() else []
    refused += ["left"] if model_type in RIGHT_PADDED_ONLY.split() else []
    refused += ["packed"] if model_type in PADDED_ONLY.split() else []
    expected, random_state = own_logprobs(model), torch.get_rng_state()
    for layout, logprobs in layouts.items():
        if layout in refused:
            with pytest.raises(ValueError, match=type(model).__name__):
                logprobs(PolicyLoss(model))
        else:
            torch.testing.assert_close(logprobs(PolicyLoss(model)), expected, atol=1e-4, rtol=0)
            assert torch.equal(torch.get_rng_state(), random_state)
