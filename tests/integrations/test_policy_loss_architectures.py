"""PolicyLoss over every causal language model of transformers: the log-probs of the model itself, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[runner]'")

import torch
from huggingface_hub.errors import StrictDataclassError
from tiny_models import VOCAB, tiny_model
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

from dapo_kernels.integrations.torch import PolicyLoss

LENGTHS = (7, 11, 5)

# One for each way in which a model differs, with the layouts that it refuses. The others take minutes.
REFUSED = {
    **dict.fromkeys(("llama", "gemma2", "granite", "cohere", "hyperclovax", "gpt2"), ""),
    "bert": "right masked left packed",  # a transform before its head
    "xlnet": "right masked left packed",  # not causal
    "llama4_text": "right masked left packed",  # no model below its head
    "bloom": "packed",  # no mask from position_ids
    "gpt_oss": "packed",
    "inkling_text": "packed",  # convolutions and recurrent states
    "lfm2_moe": "packed",
    "bart": "left packed",  # no position_ids
    "recurrent_gemma": "left packed",  # states that see the padding
    "rwkv": "left packed",
    "xlstm": "left packed",
}


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
    [pytest.param(name, marks=() if name in REFUSED else pytest.mark.slow) for name in sorted(MODELS)],
)
def test_right_or_refused(model_type: str) -> None:
    try:
        model = tiny_model(model_type)
    except (AttributeError, ImportError, TypeError, ValueError, StrictDataclassError) as error:
        assert model_type not in REFUSED
        pytest.skip(f"not built at this size: {error}")
    layouts: dict[str, Callable[[PolicyLoss], list[Tensor]]] = {
        "right": padded_logprobs,
        "masked": lambda policy: padded_logprobs(policy, masked=True),
        "left": lambda policy: padded_logprobs(policy, "left", masked=True),
        "packed": packed_logprobs,
    }
    expected, refused, random_state = own_logprobs(model), [], torch.get_rng_state()
    for layout, logprobs in layouts.items():
        try:
            found = logprobs(PolicyLoss(model))
        except ValueError as error:
            refused.append(layout if type(model).__name__ in str(error) else str(error))
        else:
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            assert torch.equal(torch.get_rng_state(), random_state)
    assert refused == (REFUSED[model_type].split() if model_type in REFUSED else [x for x in layouts if x in refused])
