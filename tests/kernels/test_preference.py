"""DPO and its relatives: values, gradients and metrics against the papers' equations spelled pair by pair."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, linear_case, logits_case, logits_of
from closeness import as_accurate
from entries import Laid, token_values
from oracle import row_entropy, row_log_softmax
from test_ops import eager_and_compiled, gemm_flops
from torch import Tensor

from dapo_kernels import (
    linear_preference_loss,
    preference_loss,
    preference_loss_from_logprobs,
    summarize,
)

LENGTHS = (5, 3, 9, 4, 2, 6)
NEIGHBOURS = [(0, 1), (2, 3), (4, 5)]
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.3},
    "smoothed": {"beta": 0.3, "label_smoothing": 0.2},
    "hinge": {"beta": 0.3, "loss_type": "hinge"},
    "ipo": {"beta": 0.5, "loss_type": "ipo"},
}
ENTRIES = ("logits", "inplace", "linear", "logprobs")


def make_case(entry: str, **options: Any) -> Case:
    return (linear_case if entry == "linear" else logits_case)(31, lengths=LENGTHS, **options)


def pair_loss(r_w: Tensor, r_l: Tensor, n_w: int, n_l: int, said: dict[str, Any]) -> Tensor:
    """One pair, from the log-ratios of its responses and their lengths."""
    beta, epsilon = said["beta"], said.get("label_smoothing", 0.0)
    if said.get("loss_type") == "ipo":
        return (r_w / n_w - r_l / n_l - 1 / (2 * beta)) ** 2
    h = beta * (r_w - r_l)
    if said.get("loss_type") == "hinge":
        return (1 - h).clamp(min=0)
    return -(1 - epsilon) * torch.log(1 / (1 + torch.exp(-h))) - epsilon * torch.log(1 / (1 + torch.exp(h)))


def solve(
    case: Case, said: dict[str, Any], dtype: torch.dtype, ref: Tensor | None, pairs: Any = NEIGHBOURS
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients by leaf and summarized metrics. ``ref`` [T] or None."""
    math_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {name: leaf.detach().to(dtype, copy=True).requires_grad_() for name, leaf in case.leaves.items()}
    logits = logits_of(leaves, case.softcap).to(math_dtype)
    tau = torch.tensor(case.temperature, dtype=math_dtype)
    alive = [[t for t in range(*span) if case.mask[t]] for span in case.spans]
    counted = [pair for pair in pairs if all(alive[s] for s in pair)]
    live = sorted({t for pair in counted for s in pair for t in alive[s]})
    logprobs = {t: row_log_softmax(logits[t], tau)[case.target_ids[t]] for t in live}
    zero = torch.zeros((), dtype=math_dtype)
    losses, rewards, sums = [], [], []
    for pair in counted:
        lengths = [len(alive[s]) for s in pair]
        sums.append([sum((logprobs[t] for t in alive[s]), zero) for s in pair])
        refs = [sum((ref[t].to(math_dtype) for t in alive[s]), zero) if ref is not None else zero for s in pair]
        ratios = [own - other for own, other in zip(sums[-1], refs, strict=True)]
        losses.append(pair_loss(*ratios, *lengths, said))
        rewards.append([said["beta"] * r.item() for r in ratios])
    loss = torch.stack(losses).mean()
    loss.backward()
    chosen, rejected = (sum(column) / len(counted) for column in zip(*rewards, strict=True))
    metrics = {
        "pairs": len(counted),
        "tokens": len(live),
        "accuracy": sum(w > other for w, other in rewards) / len(counted),
        "margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "logprob_chosen": sum(pair[0].item() for pair in sums) / len(counted),
        "logprob_rejected": sum(pair[1].item() for pair in sums) / len(counted),
        "nonfinite": 0,
        "positive_logprobs": 0,
        "entropy": sum(row_entropy(logits[t], tau).item() for t in live) / len(live),
    }
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}, metrics  # type: ignore[misc]


def call(entry: str, case: Case, ref: Tensor | None, layout: str = "packed", **said: Any) -> tuple[Any, dict[str, Any]]:
    """``(out, gradients by leaf)``, packed; ``ref`` [T], [S] or None."""
    laid = Laid(case, layout)
    if not laid.padded:
        said["cu_seqlens"] = case.cu_seqlens
    said["mask"] = laid.out(case.mask, "mask")
    if ref is not None and len(ref) == len(case.mask):
        ref = laid.out(ref)
    if entry == "logprobs":
        logprobs, entropy = token_values(case)
        leaves = {"logprobs": laid.out(logprobs).requires_grad_()}
        out = preference_loss_from_logprobs(leaves["logprobs"], ref, entropy=laid.out(entropy), **said)
    else:
        ids = laid.out(case.target_ids, "target_ids")
        said |= {"temperature": case.temperature, "entropy": True}
        leaves = {k: v if k in ("weight", "bias") else laid.out(v.detach()) for k, v in case.leaves.items()}
        leaves = {k: v.detach().clone().requires_grad_() for k, v in leaves.items()}
        if entry == "linear":
            head = {"bias": leaves.get("bias"), "softcap": case.softcap, "chunk_bytes": 7 * 31 * 4}
            out = linear_preference_loss(leaves["hidden"], leaves["weight"], ids, ref, **head, **said)
        else:
            out = preference_loss(leaves["logits"], ids, ref, inplace_backward=entry == "inplace", **said)
    (2.0 * out.loss).backward()
    grads = {k: leaf.grad if k in ("weight", "bias") else laid.back(leaf.grad) for k, leaf in leaves.items()}
    return out, grads


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("loss", LOSSES)
def test_values_gradients_and_metrics(backend: str, loss: str, entry: str, layout: str) -> None:
    said = LOSSES[loss]
    options = {"bias": True, "softcap": 9.0} if entry == "linear" else {}
    case = make_case(entry, seed=3, temperature=0.8, **options)
    case.mask[10:14] = True  # both responses of every pair have a live token
    sums = torch.stack([case.ref_logprobs[a:b][case.mask[a:b]].sum() for a, b in case.spans])
    for ref, given in ((case.ref_logprobs, case.ref_logprobs), (case.ref_logprobs, sums), (None, None)):
        truth, eager = (solve(case, said, dtype, ref) for dtype in (torch.float64, torch.float32))
        out, grads = call(entry, case, given, layout, **said)
        as_accurate(out.loss, truth[0], eager[0], what="loss", multiple=4.0, scale=8.0)
        for name, grad in grads.items():
            if entry == "logprobs":
                assert not grad[~case.mask].any()
                continue
            as_accurate(grad / 2, truth[1][name], eager[1][name], what=name, multiple=4.0)
        assert summarize(out.metrics) == pytest.approx(truth[2], rel=1e-5, abs=1e-5)
        means = [truth[2]["reward_chosen"], truth[2]["reward_rejected"]]
        assert out.rewards.mean(0).tolist() == pytest.approx(means, rel=1e-5, abs=1e-5)


def test_the_example_of_the_page() -> None:
    """docs/objectives.md, as it stands there, with the case's own policy as a reference that has moved a little."""
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    snippet = re.search(r"<!-- dpo -->\n```python\n(.+?)```", page, re.DOTALL)
    assert snippet is not None
    case = make_case("linear", seed=12)
    x = case.fresh()
    ref_hidden = case.leaves["hidden"] * 0.9
    names = {**x, "ref_hidden": ref_hidden, "ref_weight": case.leaves["weight"], "global_pairs": 3, "torch": torch}
    names |= {name: getattr(case, name) for name in ("target_ids", "mask", "cu_seqlens")}
    exec(snippet[1], names)
    ref = (ref_hidden @ case.leaves["weight"].T).log_softmax(-1).gather(1, case.target_ids[:, None])[:, 0]
    truth = solve(case, {"beta": 0.1}, torch.float64, ref)
    torch.testing.assert_close(names["out"].loss.double(), truth[0], rtol=1e-5, atol=1e-6)
    for name, leaf in x.items():
        torch.testing.assert_close(leaf.grad.double(), truth[1][name], rtol=1e-4, atol=1e-6)


def test_gradient_from_logprobs() -> None:
    case = make_case("logprobs", seed=4)
    leaf = token_values(case)[0].double().requires_grad_()

    def loss(logprobs: Tensor, **said: Any) -> Tensor:
        shared = {"mask": case.mask, "cu_seqlens": case.cu_seqlens}
        return preference_loss_from_logprobs(logprobs, case.ref_logprobs, **shared, **said).loss

    for said in LOSSES.values():
        assert torch.autograd.gradcheck(lambda x, said=said: loss(x, **said), (leaf,))


@pytest.mark.parametrize("entry", ["logits", "linear"])
def test_micro_batches_of_pairs_add_up(backend: str, entry: str) -> None:
    case = make_case(entry, seed=5)
    whole, expected = call(entry, case, case.ref_logprobs, denominator=torch.tensor(3.0))
    added, metrics, loss = {name: torch.zeros_like(leaf) for name, leaf in case.leaves.items()}, [], 0.0
    for pair in range(3):
        start, stop = case.spans[2 * pair][0], case.spans[2 * pair + 1][1]
        part = replace(case, lengths=LENGTHS[2 * pair : 2 * pair + 2])
        for name in ("target_ids", "mask", "ref_logprobs"):
            setattr(part, name, getattr(case, name)[start:stop])
        part.leaves = {k: v if k == "weight" else v[start:stop] for k, v in case.leaves.items()}
        out, grads = call(entry, part, part.ref_logprobs, denominator=3)
        metrics.append(out.metrics)
        loss += out.loss.item()
        for name, grad in grads.items():
            place = slice(None) if name == "weight" else slice(start, stop)
            added[name][place] += grad
    assert loss == pytest.approx(float(whole.loss), rel=1e-5)
    for name, grad in expected.items():
        torch.testing.assert_close(added[name], grad, rtol=1e-5, atol=1e-7)
    assert summarize(metrics) == pytest.approx(summarize(whole.metrics), rel=1e-5)


@pytest.mark.parametrize("entry", ENTRIES)
def test_any_pairs(backend: str, entry: str) -> None:
    """A response in two pairs, one in none, one whose partner is dead: of the latter two nothing is left."""
    case = make_case(entry, seed=6, dead=0.0)
    pairs = [(3, 0), (3, 2), (4, 5)]
    case.mask[case.spans[5][0] : case.spans[5][1]] = False
    truth, eager = (
        solve(case, {"beta": 0.1}, dtype, case.ref_logprobs, pairs) for dtype in (torch.float64, torch.float32)
    )
    unused = torch.zeros(29, dtype=torch.bool)
    for s in (1, 4, 5):
        unused[slice(*case.spans[s])] = True
    found = []
    for fill in (0.0, math.nan):
        ref = case.ref_logprobs.masked_fill(unused, fill)
        if "hidden" in case.leaves:
            case.leaves["hidden"] = case.leaves["hidden"].masked_fill(unused[:, None], fill)
        elif entry != "logprobs":
            case.leaves["logits"] = case.leaves["logits"].masked_fill(unused[:, None], fill)
        out, grads = call(entry, case, ref, pairs=torch.tensor(pairs))
        as_accurate(out.loss, truth[0], eager[0], what="loss", scale=8.0)
        assert summarize(out.metrics) == pytest.approx(truth[2], rel=1e-5)
        assert not out.rewards[2].any()
        for name, grad in grads.items():
            if name in truth[1]:
                as_accurate(grad / 2, truth[1][name], eager[1][name], what=name)
            if name != "weight":
                assert not grad[unused].any()
        found.append(out.loss)
    assert torch.equal(*found)


def test_no_pair_at_all(backend: str) -> None:
    case = make_case("linear", seed=7, mask=torch.zeros(29, dtype=torch.bool))
    for denominator in (None, torch.tensor(0.0), 4):
        out, grads = call("linear", case, case.ref_logprobs, denominator=denominator)
        assert float(out.loss) == 0
        assert not any(grad.any() for grad in grads.values())
        assert out.metrics["pairs"] == 0


def test_long_responses_keep_their_digits() -> None:
    """Log-probs that add up to −40,000: a float32 sum would round each reward by 4e-3."""
    g = torch.Generator().manual_seed(0)
    logprobs, ref = (-torch.rand(80_000, generator=g) for _ in range(2))
    out = preference_loss_from_logprobs(logprobs, ref, cu_seqlens=torch.tensor([0, 40_000, 80_000]), beta=1.0)
    truth = (logprobs.double() - ref.double()).view(2, -1).sum(1)
    torch.testing.assert_close(out.rewards[0].double(), truth, rtol=1e-6, atol=0)
    per_sequence = ref.double().view(2, -1).sum(1)
    out = preference_loss_from_logprobs(logprobs, per_sequence, cu_seqlens=torch.tensor([0, 40_000, 80_000]), beta=1.0)
    torch.testing.assert_close(out.rewards[0].double(), truth, rtol=1e-6, atol=0)


def test_four_matrix_products_of_live_tokens(backend: str) -> None:
    mask = torch.arange(64) % 2 == 0
    case = linear_case(101, 16, (32, 32), seed=5, mask=mask)
    hidden, weight = case.fresh().values()

    def run() -> None:
        said = {"mask": mask, "cu_seqlens": case.cu_seqlens, "chunk_bytes": 20 * 101 * 4}
        linear_preference_loss(hidden, weight, case.target_ids, case.ref_logprobs, **said).loss.backward()

    assert gemm_flops(run) / (2.0 * 32 * 101 * 16) == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("entry", ["logits", "linear"])
def test_compiled(backend: str, entry: str) -> None:
    case = make_case(entry, seed=8)
    fn = linear_preference_loss if entry == "linear" else preference_loss
    said: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "beta": 0.5}
    said["pairs"] = torch.tensor([[1, 0], [4, 0]]) if entry == "linear" else None
    eager_and_compiled(
        lambda *leaves: fn(*leaves, case.target_ids, case.ref_logprobs, **said).loss,
        list(case.leaves.values()),
        backend="aot_eager",
    )


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "odd": ({"cu_seqlens": torch.tensor([0, 5, 8, 29])}, ValueError, "even number of sequences.*got 3"),
    "no bounds": ({"cu_seqlens": None}, ValueError, "pass cu_seqlens"),
    "loss_type": ({"loss_type": "kto"}, ValueError, "loss_type must be one of sigmoid, hinge, ipo; got 'kto'"),
    "beta": ({"beta": 0.0}, ValueError, "beta must be positive"),
    "label_smoothing": ({"label_smoothing": 0.5}, ValueError, r"label_smoothing must be in \[0, 0.5\)"),
    "smoothed hinge": ({"label_smoothing": 0.1, "loss_type": "hinge"}, ValueError, "no meaning with loss_type 'hinge'"),
    "pairs": ({"pairs": torch.tensor([[0, 6]])}, ValueError, "pairs must be sequences from 0 to 5, got 0 to 6"),
    "pairs' shape": ({"pairs": torch.tensor([0, 1])}, ValueError, r"pairs must be \[P, 2\]"),
    "pairs' dtype": ({"pairs": torch.tensor([[0.0, 1.0]])}, TypeError, "pairs must be integers"),
    "unknown": ({"bata": 0.1}, TypeError, "unknown argument 'bata'"),
    "denominator": ({"denominator": 0}, ValueError, "denominator must be positive"),
    "ref": ({"ref": torch.zeros(5)}, ValueError, r"ref_logprobs must be \[T\]=\[29\] or \[S\]=\[6\], got \[5\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    said, error, words = REFUSED[case]
    problem = make_case("logits", seed=9)
    said = {"cu_seqlens": problem.cu_seqlens, "ref": problem.ref_logprobs, **said}
    with pytest.raises(error, match=words):
        preference_loss(problem.leaves["logits"], problem.target_ids, said.pop("ref"), **said)
