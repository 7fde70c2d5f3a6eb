"""PolicyLoss of models whose rotary frequencies follow the longest sequence of a batch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[runner]'")

import torch
from test_policy_loss import VOCAB, network
from torch import Tensor

from dapo_kernels.integrations.torch import PolicyLoss

LIMIT, SHORT = 16, 10
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "Phi3",
        {"max_position_embeddings": 64, "original_max_position_embeddings": LIMIT, "rope_scaling": LONGROPE},
    ),
    "dynamic": (
        "Llama",
        {"max_position_embeddings": LIMIT, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ),
}


def logprobs_of_first(policy: PolicyLoss, longest: int, layout: str) -> Tensor:
    """Of a sequence of 10 tokens beside one of ``longest``."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCAB, (length,), generator=generator) for length in (SHORT, longest)]
    with torch.no_grad():
        if layout == "packed":
            ids, borders = torch.cat(rows), torch.tensor([0, SHORT, SHORT + longest], dtype=torch.int32)
            return policy(ids, ids.roll(-1), cu_seqlens=borders, mode="logprobs").logprobs[: SHORT - 1]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return policy(ids, ids.roll(-1, 1), mode="logprobs").logprobs[0, : SHORT - 1]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("rope_type", MODELS)
def test_frequencies_that_follow_the_longest_sequence(rope_type: str, layout: str) -> None:
    """Up to the limit nothing changes; one token more is refused, and leaves the model as it was."""
    kind, config = MODELS[rope_type]
    policy = PolicyLoss(network(kind, **config | ({"pad_token_id": 0} if kind == "Phi3" else {})))
    alone = logprobs_of_first(policy, 1, layout)
    torch.testing.assert_close(logprobs_of_first(policy, LIMIT, layout), alone, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=f"input_ids.*{rope_type}"):
        logprobs_of_first(policy, LIMIT + 1, layout)
    torch.testing.assert_close(logprobs_of_first(policy, LIMIT, layout), alone, atol=1e-5, rtol=0)
    fixed = PolicyLoss(network())
    alone = logprobs_of_first(fixed, 1, layout)
    torch.testing.assert_close(logprobs_of_first(fixed, 4 * LIMIT, layout), alone, atol=1e-5, rtol=0)
