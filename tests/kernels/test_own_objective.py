"""A loss of the caller's own: ``objective=`` as a function. Held against the built-in rows written that way."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import Case, linear_case, logits_case, page_code
from entries import call
from test_ops import gemm_flops
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dapo_kernels import Objective, dapo_loss, linear_dapo_loss
from dapo_kernels.objectives.own import OwnTokens, may_be_compiled_in

Loss = Callable[..., Tensor]
ENTRIES = ("logits", "inplace", "linear", "policy")


def clip(low: float, high: float) -> Loss:
    def fn(logprobs: Tensor, entropy: Tensor | None, tokens: OwnTokens) -> Tensor:
        ratio = (logprobs - tokens.old_logprobs).exp()
        policy = -torch.minimum(ratio * tokens.advantages, ratio.clamp(1 - low, 1 + high) * tokens.advantages)
        return policy * tokens.importance_weights

    return fn


def grpo(logprobs: Tensor, entropy: Tensor | None, tokens: OwnTokens) -> Tensor:
    d = tokens.ref_logprobs - logprobs
    return clip(0.2, 0.2)(logprobs, entropy, tokens) + 0.04 * (d.exp() - d - 1)


def reinforce_with_bonus(logprobs: Tensor, entropy: Tensor | None, tokens: OwnTokens) -> Tensor:
    return -tokens.advantages * logprobs * tokens.importance_weights - 0.1 * entropy


def bonus_alone(logprobs: Tensor, entropy: Tensor | None, tokens: OwnTokens) -> Tensor:
    return -entropy


def plain_loss(logprobs: Tensor, entropy: Tensor | None, tokens: OwnTokens) -> Tensor:
    return -tokens.advantages * (logprobs - tokens.old_logprobs).exp()


# function → the row of the table that it is, and the row's and the function's options
ROWS: dict[Loss, tuple[str, dict[str, Any], dict[str, Any]]] = {
    clip(0.2, 0.28): ("dapo", {}, {}),
    grpo: ("grpo", {}, {"aggregate": "seq-mean-token-mean"}),
    reinforce_with_bonus: ("reinforce", {"entropy_coef": 0.1}, {}),
    bonus_alone: ("reinforce", {"entropy_coef": 1.0}, {}),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_rows_of_the_table_written_as_functions(backend: str, entry: str) -> None:
    for on_policy, (fn, (name, row, own)) in itertools.product((False, True), ROWS.items()):
        case = (linear_case if entry == "linear" else logits_case)(53, lengths=(6, 1, 9), seed=7)
        if fn is bonus_alone:
            case.advantages = torch.zeros(16)
        needs_entropy = "entropy_coef" in row
        shared: dict[str, Any] = {"denominator": 9.5, "weighted": True, "on_policy": on_policy, "grad_output": 2.0}
        shared["with_entropy"] = needs_entropy and entry == "policy"
        if name == "grpo":
            shared["ref_logprobs"] = case.ref_logprobs
            own = {**own, **({"kl_coef": 0.0} if on_policy else {})}  # which is no schedule: the function reads them
        if entry == "linear":
            shared["chunk_bytes"] = 5 * 53 * 4
        if needs_entropy and entry != "policy":
            own = {**own, "entropy": True}
        expected, truth = call(entry, case, name, **shared, **row)
        out, grads = call(entry, case, fn, **shared, **own)
        torch.testing.assert_close(out.loss, expected.loss, rtol=2e-5, atol=1e-7)
        torch.testing.assert_close(out.logprobs, expected.logprobs)
        torch.testing.assert_close(grads, truth, rtol=2e-5, atol=1e-7)
        assert any(float(grad.abs().max()) > 1e-3 for grad in truth.values())


def test_the_code_of_the_page(backend: str) -> None:
    """DPPO-Binary-TV of docs/objectives.md, run as it stands there, against its row of the table."""
    case = linear_case(23, 8, (40, 30), seed=11)
    case.old_logprobs = (case.old_logprobs + 2.0).clamp(max=-0.01)  # probabilities that can change by more than 0.2
    found = case.fresh()
    names = {**found, "global_tokens": 31.0, "torch": torch, "linear_dapo_loss": linear_dapo_loss}
    names |= case.tensors("target_ids", "old_logprobs", "advantages", "mask")
    exec(page_code("dppo"), names)
    names["out"].loss.backward()
    expected, grads = call("linear", case, "dppo_tv", denominator=31.0)
    assert expected.metrics["clip_low"] + expected.metrics["clip_high"] > 3
    torch.testing.assert_close(names["out"].loss, expected.loss)
    torch.testing.assert_close({name: leaf.grad for name, leaf in found.items()}, grads, rtol=1e-4, atol=1e-6)


def both() -> list[tuple[Callable[..., Any], Case]]:
    return [(linear_dapo_loss, linear_case(37, 8, (9, 8), seed=3)), (dapo_loss, logits_case(37, (9, 8), seed=3))]


def arguments(case: Case) -> dict[str, Any]:
    return {**case.fresh(), **case.tensors("target_ids", "old_logprobs", "advantages")}


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "mean": (lambda lp, h, t: -(t.advantages - t.advantages.mean()) * lp, ValueError, ""),
    "cumsum": (lambda lp, h, t: -t.advantages * lp.cumsum(0), ValueError, ""),
    "neighbour": (lambda lp, h, t: -t.advantages * (lp - lp.roll(1)), ValueError, ""),
    "a sum": (lambda lp, h, t: lp.sum(), ValueError, "aggregate"),
    "a number": (lambda lp, h, t: 3.0, TypeError, "float"),
    "integers": (lambda lp, h, t: (lp * 2).long(), TypeError, "int64"),
    "constants": (lambda lp, h, t: lp.detach() * 2, ValueError, "logprobs"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_looks_across_tokens_or_is_no_loss_per_token_is_refused(which: str) -> None:
    fn, error, word = REFUSED[which]
    for function, case in both():
        with pytest.raises(error, match=rf"<lambda>.*{word}"):
            function(**arguments(case), objective=fn)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("top_entropy", [None, 0.5])
def test_a_parameter_of_the_callers_is_refused(top_entropy: float | None, compile: bool) -> None:
    """It would be trained by some functions and not by others."""
    learnt = torch.tensor(0.5, requires_grad=True)
    objective = Objective(surrogate=lambda lp, h, t: -t.advantages * lp * learnt, top_entropy=top_entropy)
    for function, case in both():
        run = torch.compile(function, fullgraph=True, backend="eager") if compile else function
        with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="<lambda>"):
            run(**arguments(case), objective=objective)
        with torch.no_grad():
            function(**arguments(case), objective=objective)


def test_dead_tokens_may_hold_and_give_anything(backend: str) -> None:
    for function, case in both():
        seen = []
        for fill in (1.0, torch.nan, torch.inf):
            given = {**arguments(case), "mask": case.mask}
            for name in ("old_logprobs", "advantages"):
                given[name] = given[name].masked_fill(~case.mask, fill if name == "advantages" else -fill)
            out = function(**given, objective=lambda lp, h, t: -lp / t.advantages)  # infinite where these are 0
            out.loss.backward()
            seen.append([out.loss.detach(), *(given[name].grad for name in case.leaves)])
        assert bool(seen[0][0].isfinite())
        for other in seen[1:]:
            assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_tokens_that_do_not_train_may_overflow_and_metrics_say_nothing_of_clipping(backend: str) -> None:
    for function, case in both():
        chosen, given = torch.arange(17) != 3, arguments(case)
        given["old_logprobs"] = torch.where(chosen, case.old_logprobs, -1000.0)  # a ratio of e^990
        out = function(**given, objective=Objective(surrogate=plain_loss, top_entropy=0.5), selection=chosen)
        out.loss.backward()
        assert bool(out.loss.isfinite())
        assert all(bool(given[name].grad.isfinite().all()) for name in case.leaves)
        assert not [name for name in out.metrics if "clip" in name]


# --- how it is run ----------------------------------------------------------------------------------------


def test_three_matrix_products_from_hidden_states(backend: str) -> None:
    """And four where the batch has to be looked at first."""
    case = linear_case(101, 16, (64,), seed=5, dead=0.0)
    for objective, products in ((clip(9.0, 9.0), 3), (Objective(surrogate=clip(9.0, 9.0), top_entropy=1.0), 4)):

        def run(objective: Any = objective) -> None:
            linear_dapo_loss(**arguments(case), objective=objective, chunk_bytes=20 * 101 * 4).loss.backward()

        assert gemm_flops(run) / (2.0 * 64 * 101 * 16) == pytest.approx(products, rel=0.01)
    assert may_be_compiled_in(plain_loss)  # with three in a compiled graph, too


def test_a_compiled_graph_takes_the_function_of_the_call_and_keeps_none() -> None:
    """Functions from one factory share their code: what they close over, or have as a default, must count."""
    case = linear_case(37, 8, seed=3)

    def default(delta: float) -> Loss:
        return lambda lp, h, t, delta=delta: -delta * t.advantages * lp

    def closure(delta: Tensor) -> Loss:
        return lambda lp, h, t: -delta * t.advantages * lp

    def loss(hidden: Tensor, weight: Tensor, fn: Loss) -> Tensor:
        return linear_dapo_loss(hidden, weight, case.target_ids, case.old_logprobs, case.advantages, objective=fn).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    of_numbers = (default(1.0), default(5.0), closure(torch.tensor(2.0)), closure(torch.tensor(7.0)))
    for fn in (*of_numbers, plain_loss, functools.partial(plain_loss)):
        leaves, mine = list(case.fresh().values()), list(case.fresh().values())
        expected, got = loss(*leaves, fn), compiled(*mine, fn)
        torch.testing.assert_close(got, expected)
        expected.backward()
        got.backward()
        for a, b in zip(mine, leaves, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8)
    fn = clip(0.1, 0.1)
    linear_dapo_loss(**arguments(case), objective=fn).loss.backward()
    alive = weakref.ref(fn)
    del fn
    gc.collect()
    assert alive() is None


def test_views_inside_the_function_are_seen_under_a_mode(backend: str) -> None:
    def in_place(logprobs: Tensor, entropy: Tensor | None, tokens: OwnTokens) -> Tensor:
        doubled = logprobs * 1.0
        doubled.unsqueeze(0)[0].mul_(2)
        return -doubled * tokens.advantages

    case, found = linear_case(37, 8, seed=3), []
    for mode in (nullcontext(), FlopCounterMode(display=False)):
        given = arguments(case)
        with mode:
            out = linear_dapo_loss(**given, objective=in_place)
        out.loss.backward()
        found.append([given[name].grad for name in case.leaves])
    torch.testing.assert_close(*found)


def test_a_checkpoint_computes_its_module_once_more_only(backend: str) -> None:
    case, calls = linear_case(37, 8, seed=3), []

    def module(hidden: Tensor, weight: Tensor) -> Tensor:
        calls.append(1)
        args = (case.target_ids, case.old_logprobs, case.advantages)
        return linear_dapo_loss(torch.tanh(hidden), weight, *args, objective=plain_loss).loss

    loss = torch.utils.checkpoint.checkpoint(module, *case.fresh().values(), use_reentrant=False)
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2
