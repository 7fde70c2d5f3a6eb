"""A loss of the caller's own: ``objective=`` as a function. Held against the built-in rows written that way."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import linear_case, logits_case
from test_ops import gemm_flops
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dapo_kernels import Objective, dapo_loss, linear_dapo_loss, policy_loss, summarize
from dapo_kernels.objectives import own

Loss = Callable[..., Tensor]


def clip(low: float, high: float) -> Loss:
    def fn(logprobs: Tensor, entropy: Tensor | None, tokens: own.OwnTokens) -> Tensor:
        ratio = (logprobs - tokens.old_logprobs).exp()
        policy = -torch.minimum(ratio * tokens.advantages, ratio.clamp(1 - low, 1 + high) * tokens.advantages)
        return policy * tokens.importance_weights

    return fn


def grpo(logprobs: Tensor, entropy: Tensor | None, tokens: own.OwnTokens) -> Tensor:
    assert tokens.ref_logprobs is not None
    d = tokens.ref_logprobs - logprobs
    return clip(0.2, 0.2)(logprobs, entropy, tokens) + 0.04 * (d.exp() - d - 1)


def cispo(logprobs: Tensor, entropy: Tensor | None, tokens: own.OwnTokens) -> Tensor:
    ratio = (logprobs - tokens.old_logprobs).exp().clamp(0.0, 5.0).detach()
    return -ratio * tokens.advantages * logprobs * tokens.importance_weights


def reinforce_with_bonus(logprobs: Tensor, entropy: Tensor | None, tokens: own.OwnTokens) -> Tensor:
    assert entropy is not None
    return -tokens.advantages * logprobs * tokens.importance_weights - 0.1 * entropy


ROWS: dict[str, tuple[Loss, dict[str, Any], dict[str, Any]]] = {
    "dapo": (clip(0.2, 0.28), {}, {}),
    "grpo": (grpo, {}, {"aggregate": "seq-mean-token-mean"}),
    "cispo": (cispo, {}, {}),
    "reinforce": (reinforce_with_bonus, {"entropy_coef": 0.1}, {"entropy": True}),
}


def backward(call: Callable[..., Any], leaves: dict[str, Tensor], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    out = call(*leaves.values(), *args, **kwargs)
    (2.0 * out.loss).backward()
    return (out.loss.detach(), out.logprobs, *(leaf.grad for leaf in leaves.values()))


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("entry", ["logits", "inplace", "hidden", "logprobs"])
def test_a_row_of_the_table_written_as_a_function(backend: str, entry: str, name: str, on_policy: bool) -> None:
    fn, row, own_row = ROWS[name]
    case = linear_case(53, 8, (6, 1, 9), seed=7) if entry == "hidden" else logits_case(53, (6, 1, 9), seed=7)
    shared: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "denominator": 9.5}
    shared["importance_weights"] = case.importance_weights
    kl = {"ref_logprobs": case.ref_logprobs} if name == "grpo" else {}
    old = None if on_policy else case.old_logprobs
    results = []
    for objective, options in ((name, row), (fn, own_row)):
        if entry == "logprobs":
            g = torch.Generator().manual_seed(1)
            entropy = torch.rand(16, generator=g).requires_grad_()
            leaves = {"logprobs": (case.old_logprobs + 0.1).nan_to_num(0.0).requires_grad_()}
            options = {**options, "entropy": entropy} if name == "reinforce" else options
            args: tuple[Any, ...] = (old, case.advantages)
            call: Callable[..., Any] = policy_loss
        else:
            call = linear_dapo_loss if entry == "hidden" else dapo_loss
            leaves, args = case.fresh(), (case.target_ids, old, case.advantages)
            if entry == "inplace":
                leaves = {"logits": (leaves["logits"].detach() * 1).requires_grad_()}
                options = {**options, "inplace_backward": True}
            if entry == "hidden":
                options = {**options, "chunk_bytes": 5 * 53 * 4}
        results.append(backward(call, leaves, *args, objective=objective, **shared, **kl, **options))
    for mine, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-7)
    assert any(float(x.abs().max()) > 1e-3 for x in results[0][2:])


def test_the_example_of_the_page(backend: str) -> None:
    """DPPO-Binary-TV of docs/objectives.md, run as it stands there, against its equation in float64 autograd."""
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    snippet = re.search(r"<!-- dppo -->\n```python\n(.+?)```", page, re.DOTALL)
    assert snippet is not None
    case = linear_case(23, 8, (40, 30), seed=11)
    case.old_logprobs = (case.old_logprobs + 2.0).clamp(max=-0.01)  # probabilities that can change by more than 0.2
    x = case.fresh()
    names = {**x, "mask": case.mask, "global_tokens": 31.0, "torch": torch, "linear_dapo_loss": linear_dapo_loss}
    names |= {name: getattr(case, name) for name in ("target_ids", "old_logprobs", "advantages")}
    exec(snippet[1], names)
    names["out"].loss.backward()

    hidden, weight = (leaf.detach().double().requires_grad_() for leaf in x.values())
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(1, case.target_ids[:, None])[:, 0]
    total, masked = torch.zeros((), dtype=torch.float64), 0
    for t in range(70):
        if not case.mask[t]:
            continue
        old, advantage = case.old_logprobs[t].double(), case.advantages[t].double()
        shift = float(logprobs[t].detach().exp() - old.exp())
        if (advantage > 0 and shift > 0.2) or (advantage <= 0 and shift < -0.2):
            masked += 1
            continue
        total = total - (logprobs[t] - old).exp() * advantage / 31.0
    total.backward()
    assert 3 < masked < int(case.mask.sum()) - 3
    torch.testing.assert_close(names["out"].loss.double(), total, rtol=1e-5, atol=1e-6)
    for mine, theirs in ((x["hidden"].grad, hidden.grad), (x["weight"].grad, weight.grad)):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


def test_three_matrix_products_from_hidden_states(backend: str) -> None:
    n_tokens, vocab, width = 64, 101, 16
    case = linear_case(vocab, width, (n_tokens,), seed=5, mask=torch.ones(n_tokens, dtype=torch.bool))
    for objective, products in ((clip(9.0, 9.0), 3), (Objective(surrogate=clip(9.0, 9.0), top_entropy=1.0), 4)):
        x = case.fresh()
        args = (*x.values(), case.target_ids, case.old_logprobs, case.advantages)

        def run(args: Any = args, objective: Any = objective) -> None:
            linear_dapo_loss(*args, objective=objective, chunk_bytes=20 * vocab * 4).loss.backward()

        assert gemm_flops(run) / (2.0 * n_tokens * vocab * width) == pytest.approx(products, rel=0.01)


@pytest.mark.parametrize("entry", ["logits", "hidden"])
def test_compiled(backend: str, entry: str) -> None:
    case = linear_case(37, 8, seed=3) if entry == "hidden" else logits_case(37, seed=3)
    call = linear_dapo_loss if entry == "hidden" else dapo_loss
    fn = clip(0.2, 0.28)

    def loss(*leaves: Tensor) -> Tensor:
        args = (case.target_ids, case.old_logprobs, case.advantages)
        return call(*leaves, *args, objective=fn, mask=case.mask).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for f in (loss, compiled, compiled):
        leaves = list(case.fresh().values())
        value = f(*leaves)
        value.backward()
        if f is loss:
            expected, gradients = value.detach(), [x.grad for x in leaves]
        torch.testing.assert_close(value.detach(), expected, rtol=1e-6, atol=1e-7)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-8)


def test_micro_batches_add_up(backend: str) -> None:
    case = linear_case(37, 8, (5, 7, 4), seed=9)
    tokens = int(case.mask.sum())

    def gradient(parts: list[slice]) -> Tensor:
        x = case.fresh()
        for at in parts:
            args = (case.target_ids[at], case.old_logprobs[at], case.advantages[at])
            out = linear_dapo_loss(
                x["hidden"][at], x["weight"], *args, objective=grpo, mask=case.mask[at],
                ref_logprobs=case.ref_logprobs[at], denominator=tokens,
            )  # fmt: skip
            out.loss.backward()
        return x["weight"].grad  # type: ignore[return-value]

    whole = gradient([slice(0, 16)])
    torch.testing.assert_close(gradient([slice(0, 5), slice(5, 12), slice(12, 16)]), whole, rtol=1e-5, atol=1e-8)


def test_dead_tokens_may_hold_anything(backend: str) -> None:
    case = linear_case(37, 8, (5, 7, 4), seed=10)
    dead = ~case.mask
    assert dead.any()
    seen = []
    for fill in (0.0, torch.nan, torch.inf):
        x = case.fresh()
        filled = [t.masked_fill(dead, fill) for t in (case.old_logprobs, case.advantages)]
        hidden = x["hidden"].detach().masked_fill(dead[:, None], fill).requires_grad_()
        out = linear_dapo_loss(hidden, x["weight"], case.target_ids, *filled, objective=cispo, mask=case.mask)
        out.loss.backward()
        assert not hidden.grad[dead].any()  # type: ignore[index]
        seen.append((out.loss.detach(), x["weight"].grad, out.logprobs))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))  # type: ignore[arg-type]


def test_its_metrics_say_nothing_of_clipping() -> None:
    case = logits_case(37, seed=3)
    out = dapo_loss(case.leaves["logits"], case.target_ids, case.old_logprobs, case.advantages, objective=cispo)
    counts = {"tokens", "nonfinite", "positive_logprobs"}
    assert set(summarize(out.metrics)) == counts | {"ratio", "ratio_max", "approx_kl", "ref_kl"}


@pytest.mark.parametrize("entry", ["logits", "hidden"])
@pytest.mark.parametrize(
    "across",
    [
        lambda lp, h, t: -(t.advantages - t.advantages.mean()) * lp,
        lambda lp, h, t: -t.advantages * lp.cumsum(0),
        lambda lp, h, t: -t.advantages * (lp - lp.mean().detach()),
        lambda lp, h, t: -t.advantages * (lp - lp.roll(1)),
        lambda lp, h, t: -torch.softmax(lp, 0),
    ],
    ids=["mean", "cumsum", "detached mean", "neighbour", "softmax"],
)
def test_what_looks_across_tokens_is_refused(entry: str, across: Loss) -> None:
    case = linear_case(37, 8, (9, 8), seed=3) if entry == "hidden" else logits_case(37, (9, 8), seed=3)
    call = linear_dapo_loss if entry == "hidden" else dapo_loss
    with pytest.raises(ValueError, match=r"<lambda>"):
        call(*case.fresh().values(), case.target_ids, case.old_logprobs, case.advantages, objective=across)


@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (lambda lp, h, t: lp.sum(), ValueError, "<lambda>"),
        (lambda lp, h, t: 3.0, TypeError, "<lambda>.*float"),
        (lambda lp, h, t: lp.detach() * 2, ValueError, "<lambda>.*logprobs"),
        (Objective, TypeError, "objective"),
    ],
)
def test_what_is_no_loss_per_token_is_refused(fn: Any, error: type[Exception], words: str) -> None:
    case = linear_case(37, 8, seed=3)
    with pytest.raises(error, match=words):
        linear_dapo_loss(*case.fresh().values(), case.target_ids, None, case.advantages, objective=fn)


@pytest.mark.parametrize("field", [{"clip_high": 0.3}, {"kl_coef": 0.1}, {"ratio": "sequence"}, {"kl_cov": (0.1, 1.0)}])
def test_fields_that_the_function_takes_the_place_of_are_refused(field: dict[str, Any]) -> None:
    case = logits_case(37, seed=3)
    with pytest.raises(ValueError, match=next(iter(field))):
        dapo_loss(case.leaves["logits"], case.target_ids, None, case.advantages, objective=cispo, **field)


def test_nothing_is_kept_of_a_function() -> None:
    case = linear_case(37, 8, seed=3)
    for _ in range(3):
        fn = clip(0.1, 0.1)
        linear_dapo_loss(*case.fresh().values(), case.target_ids, None, case.advantages, objective=fn).loss.backward()
    assert fn not in own._by_number.values()


def test_a_compiled_graph_takes_the_function_of_the_call(backend: str) -> None:
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
    for fn in (default(1.0), default(5.0), closure(torch.tensor(2.0)), closure(torch.tensor(7.0)), plain_loss):
        leaves, mine = list(case.fresh().values()), list(case.fresh().values())
        expected, got = loss(*leaves, fn), compiled(*mine, fn)
        torch.testing.assert_close(got, expected)
        expected.backward()
        got.backward()
        for a, b in zip(mine, leaves, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8)


def plain_loss(logprobs: Tensor, entropy: Tensor | None, tokens: own.OwnTokens) -> Tensor:
    return -tokens.advantages * (logprobs - tokens.old_logprobs).exp()


def test_only_a_function_whose_code_says_all_is_called_by_the_operator() -> None:
    assert own.may_be_compiled_in(plain_loss)
    delta = 2.0
    for fn in (lambda a, b, c: a * delta, lambda a, b, c, d=1: a, functools.partial(plain_loss), None):
        assert not own.may_be_compiled_in(fn)


def test_views_inside_the_function_are_seen_under_a_mode(backend: str) -> None:
    def in_place(logprobs: Tensor, entropy: Tensor | None, tokens: own.OwnTokens) -> Tensor:
        doubled = logprobs * 1.0
        doubled.unsqueeze(0)[0].mul_(2)
        return -doubled * tokens.advantages

    case, found = linear_case(37, 8, seed=3), []
    for mode in (nullcontext(), FlopCounterMode(display=False)):
        x = case.fresh()
        with mode:
            out = linear_dapo_loss(*x.values(), case.target_ids, None, case.advantages, objective=in_place)
        out.loss.backward()
        found.append([leaf.grad for leaf in x.values()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_the_entropy_alone(backend: str) -> None:
    case, found = linear_case(37, 8, seed=3), []
    x = case.fresh()
    said = {"objective": lambda lp, h, t: -h, "entropy": True}
    linear_dapo_loss(*x.values(), case.target_ids, None, case.advantages, **said).loss.backward()
    found.append(x["hidden"].grad)
    x = case.fresh()
    logits = x["hidden"] @ x["weight"].T
    dapo_loss(logits, case.target_ids, None, case.advantages, **said).loss.backward()
    torch.testing.assert_close(found[0], x["hidden"].grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("entry", ["logits", "hidden"])
def test_tokens_that_do_not_train_may_overflow(backend: str, entry: str) -> None:
    case = linear_case(37, 8, (9, 8), seed=3) if entry == "hidden" else logits_case(37, (9, 8), seed=3)
    call = linear_dapo_loss if entry == "hidden" else dapo_loss
    x = case.fresh()
    chosen = torch.arange(17) != 3
    case.mask[3] = True
    old = torch.where(chosen, case.old_logprobs.nan_to_num(-3.0), -1000.0)  # a ratio of e^990 where it is not chosen
    objective = Objective(surrogate=plain_loss, top_entropy=0.5)
    args = (case.target_ids, old, case.advantages)
    out = call(*x.values(), *args, objective=objective, mask=case.mask, selection=chosen)
    out.loss.backward()
    assert bool(out.loss.isfinite())
    assert all(bool(leaf.grad.isfinite().all()) for leaf in x.values())  # type: ignore[union-attr]


def test_a_checkpoint_computes_its_module_once_more_only(backend: str) -> None:
    case, calls = linear_case(37, 8, seed=3), []

    def module(hidden: Tensor, weight: Tensor) -> Tensor:
        calls.append(1)
        args = (case.target_ids, case.old_logprobs, case.advantages)
        return linear_dapo_loss(torch.tanh(hidden), weight, *args, objective=plain_loss).loss

    x = case.fresh()
    loss = torch.utils.checkpoint.checkpoint(module, *x.values(), use_reentrant=False)
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2
