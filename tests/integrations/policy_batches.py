"""Tiny causal language models, and responses to train them on, for the tests of PolicyLoss."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB, PROMPT = 61, 3
LENGTHS = (7, 12, 5, 9, 11, 6)


def network(kind: str = "Llama", **config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    model = model_class(model_class.config_class(**sizes | heads | config)).eval()
    for parameter in model.parameters():  # far enough from uniform that log-probs matter
        parameter.data.mul_(3)
    return model


class Capped(transformers.LlamaForCausalLM):
    """Caps its logits, and no configuration says so."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = 300.0 * torch.tanh(out.logits / 300.0)
        return out


def sequences() -> list[dict[str, Tensor]]:
    """Responses of 2 to 9 tokens with ratios on both sides of the clips, shifted already."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in LENGTHS:
        ids = torch.randint(VOCAB, (length + 1,), generator=generator)
        old_logprobs = -4.0 + torch.randn(length, generator=generator)
        row = {"input_ids": ids[:-1], "target_ids": ids[1:], "mask": torch.arange(length) >= PROMPT}
        row |= {"old_logprobs": old_logprobs, "advantages": torch.randn(1, generator=generator).expand(length)}
        made.append(row)
    return made


def packed(which: tuple[int, ...] = tuple(range(len(LENGTHS)))) -> dict[str, Tensor]:
    """Those sequences in a row; none of them: two tokens that do not train."""
    chosen = [sequences()[i] for i in which] or [{name: x[:2] for name, x in sequences()[0].items()}]
    lengths = torch.tensor([0] + [len(x["mask"]) for x in chosen])
    batch = {name: torch.cat([x[name] for x in chosen]) for name in chosen[0]}
    return batch | {"cu_seqlens": lengths.cumsum(0).to(torch.int32)}


def padded() -> dict[str, Tensor]:
    rows = sequences()
    stack = torch.nn.utils.rnn.pad_sequence
    batch = {name: stack([x[name] for x in rows], batch_first=True) for name in rows[0]}
    return batch | {"advantages": batch["advantages"][:, 0]}


def target_logprobs(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probs of the targets, differentiable; 0 where a token does not train."""
    logprobs = logits.log_softmax(-1).gather(-1, batch["target_ids"].unsqueeze(-1)).squeeze(-1)
    return torch.where(batch["mask"], logprobs, 0.0)


def dapo(logprobs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return eq. 8 of the DAPO paper over a padded batch."""
    ratio, gain = (logprobs - batch["old_logprobs"]).exp(), batch["advantages"][:, None]
    terms = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.28) * gain)
    return -terms[batch["mask"]].mean()


def gradients(model: Any) -> dict[str, Tensor]:
    found = {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    model.zero_grad()
    return found


def relative_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name] - x).norm() / x.norm()) for name, x in expected.items())
