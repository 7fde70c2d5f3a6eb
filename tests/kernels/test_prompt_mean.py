"""``aggregate="prompt-mean-token-mean"``: eq. 8 of the DAPO paper as printed, a token mean for each prompt."""

from __future__ import annotations

import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, linear_case, logits_case, logits_of
from entries import call
from oracle import row_log_softmax
from test_aggregation import split
from test_errors import S, T, linear, packed, padded, policy, refused
from torch import Tensor

from dapo_kernels import OBJECTIVES, dapo_loss, linear_dapo_loss, policy_loss, policy_loss_from_hidden

PROMPT_MEAN = "prompt-mean-token-mean"
LENGTHS = (5, 1, 0, 9, 4, 3)
GROUPS = [7, -2, 7, 40, 7, -2]  # any integers, in any order
EPS_LOW, EPS_HIGH = 0.2, 0.28


def case_of(entry: str, seed: int, **options: Any) -> Case:
    if entry == "linear":
        return linear_case(vocab=41, hidden_size=8, lengths=LENGTHS, seed=seed, **options)
    return logits_case(vocab=23, lengths=LENGTHS, seed=seed, **options)


def eq_8(case: Case, groups: list[int], logprobs: Tensor, advantages: Tensor | None = None) -> Tensor:
    """DAPO (arXiv 2503.14476) eq. 8: E over prompts of 1/Σ|o_i| Σ_i Σ_t min(r A, clip(r, 1−ε_low, 1+ε_high) A)."""
    advantages = case.advantages.double() if advantages is None else advantages
    old = case.old_logprobs.double()
    means = []
    for prompt in dict.fromkeys(groups):
        terms = []
        for (start, stop), group in zip(case.spans, groups, strict=True):
            for t in range(start, stop):
                if group == prompt and bool(case.mask[t]):
                    r = torch.exp(logprobs[t] - old[t])
                    clipped = torch.clamp(r, 1 - EPS_LOW, 1 + EPS_HIGH)
                    terms.append(torch.minimum(r * advantages[t], clipped * advantages[t]))
        if terms:
            means.append(torch.stack(terms).sum() / len(terms))
    return -torch.stack(means).sum() / len(means)


def solution(case: Case, groups: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. 8 in float64 from the case's leaves, and its gradients."""
    leaves = {name: leaf.double().requires_grad_() for name, leaf in case.leaves.items()}
    logits = logits_of(leaves, case.softcap)
    rows = [row_log_softmax(logits[t], case.temperature)[case.target_ids[t]] for t in range(len(case.target_ids))]
    loss = eq_8(case, groups, torch.stack(rows))
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def assert_close(out: Any, grads: dict[str, Tensor], truth: tuple[Tensor, dict[str, Tensor]]) -> None:
    loss, expected = truth
    assert out.loss.item() == pytest.approx(loss.item(), rel=2e-6, abs=1e-6)
    for name, grad in expected.items():
        assert float(grad.abs().max()) > 1e-3
        torch.testing.assert_close(grads[name].double(), grad, rtol=5e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("entry", ["logits", "inplace", "linear"])
def test_against_eq_8(backend: str, entry: str, layout: str) -> None:
    """Another sequence has no token, one group's sequences are apart, and one group has a single sequence."""
    case = case_of(entry, seed=3)
    out, grads = call(entry, case, "dapo", layout=layout, aggregate=PROMPT_MEAN, group_ids=torch.tensor(GROUPS))
    assert_close(out, grads, solution(case, GROUPS))


def test_from_logprobs_against_eq_8(backend: str) -> None:
    case = case_of("policy", seed=4)
    for layout in ("packed", "padded"):
        out, grads = call("policy", case, "dapo", layout=layout, aggregate=PROMPT_MEAN, group_ids=torch.tensor(GROUPS))
        logprobs = out.logprobs.double().requires_grad_()
        loss = eq_8(case, GROUPS, logprobs)
        loss.backward()
        assert logprobs.grad is not None
        assert_close(out, grads, (loss.detach(), {"logprobs": logprobs.grad}))


def test_weights_by_hand(backend: str) -> None:
    """On-policy with advantage 1 the gradient by log-prob is minus the token's weight."""
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    bounds = torch.tensor([0, 4, 6, 7, 10], dtype=torch.int32)  # 3, 0, 1 and 3 live tokens
    logprobs = torch.full((10,), -1.0, requires_grad=True)
    options = {"aggregate": PROMPT_MEAN, "mask": mask, "cu_seqlens": bounds}
    out = policy_loss(logprobs, None, torch.ones(10), group_ids=torch.tensor([5, 9, 2, 5]), **options)
    out.loss.backward()
    assert logprobs.grad is not None
    a, b = 1 / 12, 1 / 2  # two prompts with a live token, of 6 and 1
    assert (-logprobs.grad).tolist() == pytest.approx([a, a, 0, a, 0, 0, b, a, a, a], rel=1e-6)
    assert out.loss.item() == pytest.approx(-1)


def test_one_prompt_is_the_token_mean(backend: str) -> None:
    """And one sequence per prompt the mean of sequence means: the other aggregates are its ends."""
    case = case_of("logits", seed=5)
    for groups, other in (([0] * len(LENGTHS), "token-mean"), (list(range(len(LENGTHS))), "seq-mean-token-mean")):
        found, grads = call("logits", case, "dapo", aggregate=PROMPT_MEAN, group_ids=torch.tensor(groups))
        known, expected = call("logits", case, "dapo", aggregate=other)
        assert found.loss.item() == pytest.approx(known.loss.item(), rel=1e-6)
        torch.testing.assert_close(grads["logits"], expected["logits"], rtol=1e-6, atol=1e-9)


def counts(case: Case, groups: list[int]) -> tuple[Tensor, int]:
    """The live tokens of each sequence's group, and the number of prompts with one; counted one by one."""
    live = [int(case.mask[a:b].sum()) for a, b in case.spans]
    totals = [sum(n for n, other in zip(live, groups, strict=True) if other == group) for group in groups]
    return torch.tensor(totals), len({group for group, n in zip(groups, live, strict=True) if n})


@pytest.mark.parametrize("entry", ["logits", "linear"])
@pytest.mark.parametrize("with_ids", [True, False])
def test_micro_batches_add_up(backend: str, entry: str, with_ids: bool) -> None:
    """However groups are cut: group_tokens and denominator are those of the whole, group_ids may then be missing."""
    case = case_of(entry, seed=6)
    whole, expected = call(entry, case, "dapo", aggregate=PROMPT_MEAN, group_ids=torch.tensor(GROUPS))
    tokens, prompts = counts(case, GROUPS)
    leaf = "weight" if entry == "linear" else "logits"
    for parts in ([[0], [1], [2], [3], [4], [5]], [[4, 1], [3, 0, 2, 5]]):
        total, gathered = 0.0, torch.zeros_like(expected[leaf])
        for order in parts:
            piece = split(case, order)
            ids = {"group_ids": torch.tensor([GROUPS[i] for i in order])} if with_ids else {}
            out, grads = call(
                entry, piece, "dapo", aggregate=PROMPT_MEAN, group_tokens=tokens[order], denominator=prompts, **ids
            )
            total += out.loss.item()
            if entry == "linear":
                gathered += grads[leaf]
            else:
                gathered[[int(t) for t in piece.names]] = grads[leaf]
        assert total == pytest.approx(whole.loss.item(), rel=1e-6, abs=1e-6)
        assert float((gathered - expected[leaf]).norm() / expected[leaf].norm()) <= 1e-6


def test_whole_groups_need_the_number_of_prompts_alone() -> None:
    """As a 0-d tensor too; and the groups' tokens alone suffice where all prompts are in the call."""
    case = case_of("logits", seed=7)
    ids = torch.tensor(GROUPS)
    whole, expected = call("logits", case, "dapo", aggregate=PROMPT_MEAN, group_ids=ids)
    tokens, prompts = counts(case, GROUPS)
    total, gathered = 0.0, torch.zeros_like(expected["logits"])
    for group in set(GROUPS):
        order = [i for i, other in enumerate(GROUPS) if other == group]
        piece = split(case, order)
        count = torch.tensor(float(prompts))
        out, grads = call("logits", piece, "dapo", aggregate=PROMPT_MEAN, group_ids=ids[order], denominator=count)
        total += out.loss.item()
        gathered[[int(t) for t in piece.names]] = grads["logits"]
    assert total == pytest.approx(whole.loss.item(), rel=1e-6)
    torch.testing.assert_close(gathered, expected["logits"], rtol=1e-6, atol=1e-9)
    out, _ = call("logits", case, "dapo", aggregate=PROMPT_MEAN, group_ids=ids, group_tokens=tokens.float())
    assert out.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    doubled, _ = call("logits", case, "dapo", aggregate=PROMPT_MEAN, group_ids=ids, group_tokens=2 * tokens)
    assert doubled.loss.item() == pytest.approx(whole.loss.item() / 2, rel=1e-6)


@pytest.mark.parametrize("objective", ["gspo", "cispo", "sapo", "top_entropy", "kl_cov", "vespo"])
def test_with_other_objectives(backend: str, objective: str) -> None:
    """The aggregate is a weight per token: the weighted sum of the groups' token means, each computed by itself."""
    ids = torch.tensor(GROUPS)
    case = case_of("logits", seed=8)
    selection = {}
    if objective == "top_entropy":
        selection["selection"] = torch.arange(sum(LENGTHS)) % 2 == 0
    if objective == "kl_cov":
        selection["selection"] = torch.arange(sum(LENGTHS)) % 3 == 0
    out, _ = call("logits", case, objective, aggregate=PROMPT_MEAN, group_ids=ids, **selection)
    totals = []
    for group in dict.fromkeys(GROUPS):
        order = [i for i, other in enumerate(GROUPS) if other == group]
        piece = split(case, order)
        rows = [int(t) for t in piece.names]
        part = {name: value[rows] for name, value in selection.items()}
        totals.append(call("logits", piece, objective, aggregate="token-mean", **part)[0].loss.item())
    assert len(set(OBJECTIVES)) > 6
    assert out.loss.item() == pytest.approx(sum(totals) / len(totals), rel=2e-6, abs=1e-6)


def test_a_loss_of_your_own() -> None:
    case = case_of("logits", seed=9)

    def mine(logprobs: Tensor, entropy: Tensor | None, tokens: Any) -> Tensor:
        ratio = (logprobs - tokens.old_logprobs).exp()
        clipped = ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH)
        return -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)

    options = {"aggregate": PROMPT_MEAN, "group_ids": torch.tensor(GROUPS)}
    known, expected = call("logits", case, "dapo", **options)
    found, grads = call("logits", case, mine, **options)  # type: ignore[arg-type]
    tokens = counts(case, GROUPS)[0].float().requires_grad_()
    call("policy", case, mine, **options, group_tokens=tokens)  # type: ignore[arg-type]
    assert tokens.grad is None
    assert found.loss.item() == pytest.approx(known.loss.item(), rel=1e-6)
    torch.testing.assert_close(grads["logits"], expected["logits"], rtol=1e-5, atol=1e-7)


def test_dead_groups_and_dead_batches(backend: str) -> None:
    """A group without a live token does not count, whatever its tokens are said to be; nor does a batch."""
    case = case_of("logits", seed=10)
    start, stop = case.spans[3]
    case.mask[start:stop] = False  # all of group 40
    ids = torch.tensor(GROUPS)
    out, grads = call("logits", case, "dapo", aggregate=PROMPT_MEAN, group_ids=ids)
    assert_close(out, grads, solution(case, GROUPS))
    tokens = counts(case, GROUPS)[0].float()
    tokens[3] = torch.nan
    again, _ = call("logits", case, "dapo", aggregate=PROMPT_MEAN, group_ids=ids, group_tokens=tokens)
    assert torch.equal(again.loss, out.loss)
    case.mask[:] = False
    out, grads = call("logits", case, "dapo", aggregate=PROMPT_MEAN, group_ids=ids)
    assert out.loss.item() == 0
    assert not grads["logits"].any()


def test_in_a_compiled_graph() -> None:
    case = case_of("policy", seed=11)
    ids, tokens = torch.tensor(GROUPS), counts(case, GROUPS)[0]
    logprobs = case.old_logprobs - 0.1

    def loss(group_ids: Tensor, group_tokens: Tensor | None) -> Tensor:
        options = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "aggregate": PROMPT_MEAN}
        return policy_loss(
            logprobs, case.old_logprobs, case.advantages, group_ids=group_ids, group_tokens=group_tokens, **options
        ).loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for given in (None, tokens):
        torch.testing.assert_close(compiled(ids, given), loss(ids, given))


IDS = torch.tensor([0, 1, 0])
ENTRIES = [(dapo_loss, packed), (linear_dapo_loss, linear), (policy_loss, policy), (policy_loss_from_hidden, linear)]


@pytest.mark.parametrize(("fn", "arguments"), ENTRIES)
def test_refusals(fn: Any, arguments: Any) -> None:
    named = {"objective": "ppo"} if fn is policy_loss_from_hidden else {}
    mean = {"aggregate": PROMPT_MEAN, **named}
    fn(**arguments(**mean, group_ids=IDS))
    refused(ValueError, (fn, arguments(**mean)), "group_ids", f"[S]=[{S}]")
    refused(ValueError, (fn, arguments(**mean, denominator=2)), "group_ids")
    refused(ValueError, (fn, arguments(**mean, group_tokens=torch.full((S,), 9))), "group_ids", "denominator")
    for wrong in (IDS[:2], torch.zeros(T, dtype=torch.int64), torch.tensor(1)):
        refused(ValueError, (fn, arguments(**mean, group_ids=wrong)), "group_ids", f"[S]=[{S}]", str(list(wrong.shape)))
    refused(TypeError, (fn, arguments(**mean, group_ids=IDS.float())), "group_ids", "torch.float32")
    refused(TypeError, (fn, arguments(**mean, group_ids=IDS.bool())), "group_ids", "torch.bool")
    refused(TypeError, (fn, arguments(**mean, group_ids=[0, 1, 0])), "group_ids", "list")
    given = {**mean, "group_ids": IDS}
    refused(ValueError, (fn, arguments(**given, group_tokens=torch.ones(2))), "group_tokens", f"[S]=[{S}]", "[2]")
    refused(TypeError, (fn, arguments(**given, group_tokens=IDS.bool())), "group_tokens", "torch.bool")
    refused(TypeError, (fn, arguments(**given, group_tokens=5)), "group_tokens", "int")
    too_few = torch.tensor([5, 1, 2])  # sequence 2 alone has 3
    refused(ValueError, (fn, arguments(**given, group_tokens=too_few)), "group_tokens", "sequence 2")
    refused(ValueError, (fn, arguments(**given, group_tokens=torch.tensor([5, torch.nan, 5]))), "group_tokens", "nan")
    for name, value in (("group_ids", IDS), ("group_tokens", torch.full((S,), 9))):
        refused(ValueError, (fn, arguments(**{name: value}, **named)), name, PROMPT_MEAN, "token-mean")
        refused(ValueError, (fn, arguments(**{name: value}, aggregate="seq-mean-token-mean", **named)), name)


def test_refusals_by_layout() -> None:
    without = packed(aggregate=PROMPT_MEAN, group_ids=IDS)
    del without["cu_seqlens"]
    refused(ValueError, (dapo_loss, without), "aggregate='prompt-mean-token-mean'", "cu_seqlens")
    wrong = padded(aggregate=PROMPT_MEAN, group_ids=IDS)
    refused(ValueError, (dapo_loss, wrong), "group_ids", "[B]=[2]", "[3]")


def test_tokens_as_the_denominator() -> None:
    """The number of live tokens is no number of prompts."""
    logprobs, mask, ids = torch.full((3, 3), -1.0), torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]), torch.zeros(3)
    for denominator, expected in ((5, 1), (2, 0)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            options = {"aggregate": PROMPT_MEAN, "group_ids": ids.int(), "denominator": denominator}
            policy_loss(logprobs, None, torch.ones(3), mask=mask, **options)
        assert len(seen) == expected
        assert all("prompts" in str(warning.message) for warning in seen)


def test_the_snippet_of_the_page() -> None:
    """docs/objectives.md, as it stands there, once per sequence: together they are eq. 8 of the batch."""
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    snippet = re.search(r"<!-- prompt means -->\n```python\n(.+?)```", page, re.DOTALL)
    assert snippet is not None
    case = case_of("linear", seed=13)
    tokens, prompts = counts(case, GROUPS)
    total, weight_grad = 0.0, torch.zeros_like(case.leaves["weight"])
    for i in range(len(LENGTHS)):
        piece = split(case, [i])
        leaves = piece.fresh()
        given = piece.tensors("target_ids", "old_logprobs", "advantages", "mask", "cu_seqlens")
        groups = {"group_ids": torch.tensor([GROUPS[i]]), "group_tokens": tokens[[i]], "global_prompts": prompts}
        names: dict[str, Any] = {"linear_dapo_loss": linear_dapo_loss, **leaves, **given, **groups}
        exec(snippet.group(1), names)
        names["out"].loss.backward()
        total += names["out"].loss.item()
        weight_grad += leaves["weight"].grad
    loss, grads = solution(case, GROUPS)
    assert total == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(weight_grad.double(), grads["weight"], rtol=1e-4, atol=1e-6)


def test_no_order_of_groups_changes_the_bits() -> None:
    """The ids are names: renamed, the loss and its gradient are the same bits."""
    case = case_of("logits", seed=12)
    runs = []
    for names in itertools.islice(itertools.permutations([-5, 0, 2**40]), 3):
        renamed = dict(zip(dict.fromkeys(GROUPS), names, strict=True))
        ids = torch.tensor([renamed[group] for group in GROUPS])
        runs.append(call("logits", case, "dapo", aggregate=PROMPT_MEAN, group_ids=ids))
    for out, grads in runs[1:]:
        assert torch.equal(out.loss, runs[0][0].loss)
        assert torch.equal(grads["logits"], runs[0][1]["logits"])
