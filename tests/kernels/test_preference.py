"""The losses of pairs of responses, spelled pair by pair in float64 autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from against_oracle import as_logprobs
from cases import HEAD, Case, linear_case, logits_case, page_code, part_of, rows_of
from closeness import as_accurate
from entries import Laid, lora_of, token_values
from oracle import Options
from torch import Tensor

from dapo_kernels import linear_preference_loss, preference_loss, preference_loss_from_logprobs, summarize

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
    if entry == "linear":
        return linear_case(31, lengths=LENGTHS, **options)
    options = {name: value for name, value in options.items() if name not in ("bias", "softcap", "rank")}
    return logits_case(31, lengths=LENGTHS, **options)


def pair_loss(r_w: Tensor, r_l: Tensor, n_w: int, n_l: int, options: dict[str, Any]) -> Tensor:
    """One pair, from the log-ratios of its responses and their lengths (the papers stand in objectives/pairs.py)."""
    beta, epsilon = options["beta"], options.get("label_smoothing", 0.0)
    if options.get("loss_type") == "ipo":
        return (r_w / n_w - r_l / n_l - 1 / (2 * beta)) ** 2
    h = beta * (r_w - r_l)
    if options.get("loss_type") == "hinge":
        return (1 - h).clamp(min=0)
    return -(1 - epsilon) * torch.log(1 / (1 + torch.exp(-h))) - epsilon * torch.log(1 / (1 + torch.exp(h)))


def solve(
    case: Case, options: dict[str, Any], dtype: torch.dtype, ref: Tensor | None, pairs: Any = NEIGHBOURS
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients by leaf and summarized metrics. ``ref`` [T] or None."""
    leaves, x = rows_of(case, Options(), dtype)
    alive = [[t for t in range(*span) if case.mask[t]] for span in case.spans]
    counted = [pair for pair in pairs if all(alive[s] for s in pair)]
    live = sorted({t for pair in counted for s in pair for t in alive[s]})
    losses, rewards, sums = [], [], []
    for pair in counted:
        tokens = [alive[s] for s in pair]
        own = [x.logprobs[at].sum() for at in tokens]
        refs = [0.0 if ref is None else ref[at].to(x.logprobs).sum() for at in tokens]
        ratios = [a - b for a, b in zip(own, refs, strict=True)]
        losses.append(pair_loss(*ratios, *map(len, tokens), options))
        rewards.append([options["beta"] * r.item() for r in ratios])
        sums.append([a.item() for a in own])
    loss = torch.stack(losses).sum() / len(counted)
    loss.backward()
    chosen, rejected = (sum(column) / len(counted) for column in zip(*rewards, strict=True))
    metrics = {
        "pairs": len(counted),
        "tokens": len(live),
        "accuracy": sum(w > other for w, other in rewards) / len(counted),
        "margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "logprob_chosen": sum(pair[0] for pair in sums) / len(counted),
        "logprob_rejected": sum(pair[1] for pair in sums) / len(counted),
        "nonfinite": 0,
        "positive_logprobs": 0,
        "entropy": x.entropy[live].sum().item() / len(live),
    }
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}, metrics


def call(
    entry: str, case: Case, ref: Tensor | None, layout: str = "packed", **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    """``(out, gradients by leaf)``, packed; ``ref`` [T], [S] or None."""
    laid = Laid(case, layout)
    if not laid.padded:
        options["cu_seqlens"] = case.cu_seqlens
    options["mask"] = laid.out(case.mask, "mask")
    if ref is not None and len(ref) == len(case.mask):
        ref = laid.out(ref)
    if entry == "logprobs":
        logprobs, entropy = token_values(case)
        leaves = {"logprobs": laid.out(logprobs).requires_grad_()}
        out = preference_loss_from_logprobs(leaves["logprobs"], ref, entropy=laid.out(entropy), **options)
    else:
        ids, leaves = laid.out(case.target_ids, "target_ids"), laid.leaves(case)
        options |= {"temperature": case.temperature, "entropy": True}
        if entry == "linear":
            head = {"bias": leaves.get("bias"), "softcap": case.softcap, "lora": lora_of(leaves)}
            states = (leaves["hidden"], leaves["weight"])
            out = linear_preference_loss(*states, ids, ref, chunk_bytes=7 * 31 * 4, **head, **options)
        else:
            out = preference_loss(leaves["logits"], ids, ref, inplace_backward=entry == "inplace", **options)
    (2.0 * out.loss).backward()
    return out, {name: laid.back(leaf.grad, name) for name, leaf in leaves.items()}


def check(out: Any, grads: dict[str, Tensor], entry: str, case: Case, *problem: Any) -> None:
    leaves = as_logprobs(case) if entry == "logprobs" else case
    options, ref, *pairs = problem
    truth, eager = (solve(leaves, options, dtype, ref, *pairs) for dtype in (torch.float64, torch.float32))
    as_accurate(out.loss, truth[0], eager[0], what="loss", multiple=4.0, scale=8.0)
    for name, grad in grads.items():
        as_accurate(grad / 2, truth[1][name], eager[1][name], what=name, multiple=4.0)
    assert summarize(out.metrics) == pytest.approx(truth[2], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("loss", LOSSES)
def test_values_gradients_and_metrics(backend: str, loss: str, entry: str) -> None:
    case = make_case(entry, seed=3, temperature=0.8, bias=True, softcap=9.0, rank=2 * (loss == "sigmoid"))
    case.mask[10:14] = True  # both responses of every pair have a live token
    sums = torch.stack([case.ref_logprobs[a:b][case.mask[a:b]].sum() for a, b in case.spans])
    for layout in ("packed", "padded"):
        for ref, given in ((case.ref_logprobs, case.ref_logprobs), (case.ref_logprobs, sums), (None, None)):
            out, grads = call(entry, case, given, layout, **LOSSES[loss])
            check(out, grads, entry, case, LOSSES[loss], ref)
            metrics = summarize(out.metrics)
            means = [metrics["reward_chosen"], metrics["reward_rejected"]]
            assert out.rewards.mean(0).tolist() == pytest.approx(means, rel=1e-5, abs=1e-5)


def test_the_code_of_the_page() -> None:
    """docs/objectives.md, as it stands there, with the case's own policy as a reference that has moved a little."""
    case = make_case("linear", seed=12)
    x, ref_hidden = case.fresh(), case.leaves["hidden"] * 0.9
    names = {**x, "ref_hidden": ref_hidden, "ref_weight": case.leaves["weight"], "global_pairs": 3, "torch": torch}
    names |= case.tensors("target_ids", "mask", "cu_seqlens")
    exec(page_code("dpo"), names)
    ref = (ref_hidden @ case.leaves["weight"].T).log_softmax(-1).gather(1, case.target_ids[:, None])[:, 0]
    truth = solve(case, {"beta": 0.1}, torch.float64, ref)
    torch.testing.assert_close(names["out"].loss.double(), truth[0], rtol=1e-5, atol=1e-6)
    for name, leaf in x.items():
        torch.testing.assert_close(leaf.grad.double(), truth[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("entry", ["logits", "linear"])
def test_micro_batches_of_pairs_add_up(backend: str, entry: str) -> None:
    case = make_case(entry, seed=5)
    whole, expected = call(entry, case, case.ref_logprobs, denominator=torch.tensor(3.0))
    added, metrics, loss = {name: torch.zeros_like(leaf) for name, leaf in case.leaves.items()}, [], 0.0
    for pair in NEIGHBOURS:
        part, places = part_of(case, pair)
        out, grads = call(entry, part, part.ref_logprobs, denominator=3)
        metrics.append(out.metrics)
        loss += out.loss.item()
        for name, grad in grads.items():
            added[name][slice(None) if name in HEAD else places] += grad
    assert loss == pytest.approx(whole.loss.item(), rel=1e-5)
    torch.testing.assert_close(added, expected, rtol=1e-5, atol=1e-7)
    assert summarize(metrics) == pytest.approx(summarize(whole.metrics), rel=1e-5)


@pytest.mark.parametrize("entry", ENTRIES)
def test_any_pairs(backend: str, entry: str) -> None:
    """A response in two pairs, one in none, one whose partner is dead: of the latter two nothing is left."""
    case, pairs, found = make_case(entry, seed=6, dead=0.0), [(3, 0), (3, 2), (4, 5)], []
    case.mask[slice(*case.spans[5])] = False
    unused = torch.zeros(29, dtype=torch.bool)
    for s in (1, 4, 5):
        unused[slice(*case.spans[s])] = True
    token_leaf = "hidden" if entry == "linear" else "logits"
    clean, ref = case.leaves[token_leaf], case.ref_logprobs
    for fill in (0.0, math.nan):
        if entry != "logprobs":
            case.leaves[token_leaf] = clean.masked_fill(unused[:, None], fill)
        out, grads = call(entry, case, ref.masked_fill(unused, fill), pairs=torch.tensor(pairs))
        found.append(out.loss)
        if fill == 0.0:
            check(out, grads, entry, case, {"beta": 0.1}, ref, pairs)
        assert not out.rewards[2].any()
        assert not any(grad[unused].any() for name, grad in grads.items() if name not in HEAD)
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
    truth = (logprobs.double() - ref.double()).view(2, -1).sum(1)
    for given in (ref, ref.double().view(2, -1).sum(1)):
        out = preference_loss_from_logprobs(logprobs, given, cu_seqlens=torch.tensor([0, 40_000, 80_000]), beta=1.0)
        torch.testing.assert_close(out.rewards[0].double(), truth, rtol=1e-6, atol=0)
    ref = torch.tensor([-40_000.0, -0.001, -40_000.0, 0.0])  # rewards that are equal in float32
    sequences = torch.arange(0, 6, 2)
    metrics = preference_loss_from_logprobs(torch.full((4,), -64.0), ref, cu_seqlens=sequences, beta=1.0).metrics
    assert metrics["accuracy"] == 1
    assert float(metrics["margin"]) == pytest.approx(1e-3, rel=1e-3)
