"""What the suite of the CPU backends does not ask of the "triton" backend: rows of several blocks, strides, the softcap
in the row kernels. Started by ``test_triton.py`` with TRITON_INTERPRET=1; not collected by itself, because the variable
must be set before anything imports Triton.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from against_oracle import options
from cases import Case, linear_case, logits_case, rows_of, selection_mask, solve
from closeness import as_accurate, elementwise
from entries import LOGITS_ENTRIES, call
from oracle import Options, batch_selection, row_entropy, row_log_softmax, share_down
from test_golden import CASES, check_case, name_of
from torch import Tensor

from dapo_kernels import OBJECTIVES, dapo_loss, policy_loss, token_logprobs
from dapo_kernels.backends.divergence import Distance
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, Slopes, Tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABS = (2, 37, 1031, 5000)  # below, within, just past and well past a block


@pytest.fixture(autouse=True)
def on_triton(backend: str) -> None:
    assert backend == "triton"


# --- rows -------------------------------------------------------------------------------------------------


def stats_truth(logits: Tensor, ids: Tensor, tau: Any, dl: Tensor, dh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 log-probs, entropies and gradient of sum(dl * logprobs + dh * entropy)."""
    x = logits.detach().double().requires_grad_()
    tau = torch.as_tensor(tau, dtype=torch.float64).expand(len(ids))
    logp = torch.stack([row_log_softmax(z, t)[y] for z, y, t in zip(x, ids, tau, strict=True)])
    entropy = torch.stack([row_entropy(z, t) for z, t in zip(x, tau, strict=True)])
    (dl.double() * logp + dh.double() * entropy).sum().backward()
    assert x.grad is not None
    return logp.detach(), entropy.detach(), x.grad


def on_boundaries(logits: Tensor) -> Tensor:
    """A copy whose rows start on 16 bytes, whatever the vocabulary."""
    vocab = logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, -vocab % 8))[..., :vocab]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stats_and_gradient_of_rows(dtype: torch.dtype, vocab: int, padded: bool) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(5, vocab, generator=g) * 3).to(dtype)
    logits[3] *= 8  # a peaked row
    ids = torch.randint(vocab, (5,), generator=g)
    dl, dh = torch.randn(5, generator=g), torch.randn(5, generator=g)
    dl[4], dh[4] = 0.0, 0.0  # nobody asks for its gradient
    taus = torch.tensor([0.5, 1.0, 1.7, 0.9, 1.0])
    for tau in (1.0, 0.6, taus):
        for inplace in (False, True):
            leaf = (on_boundaries(logits) if padded else logits.clone()).requires_grad_()
            stats = token_logprobs(leaf, ids, temperature=tau, entropy=True, inplace_backward=inplace)
            assert stats.entropy is not None
            (dl * stats.logprobs + dh * stats.entropy).sum().backward()
            logp, entropy, grad = stats_truth(logits, ids, tau, dl, dh)
            assert leaf.grad is not None
            elementwise(stats.logprobs.detach(), logp, what="logprobs", scale=10.0)
            elementwise(stats.entropy.detach(), entropy, what="entropy", scale=10.0)
            elementwise(leaf.grad, grad, what="gradient", slack=1.05)
            assert not leaf.grad[4].any()
    leaf = logits.clone().requires_grad_()
    token_logprobs(leaf, ids).logprobs.backward(dl)
    _, _, grad = stats_truth(logits, ids, 1.0, dl, torch.zeros(5))
    assert leaf.grad is not None
    elementwise(leaf.grad, grad, what="gradient without entropy", slack=1.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["rows", "columns", "padded", "transposed", "expanded"])
def test_strides(kind: str, dtype: torch.dtype) -> None:
    """Any strides give the bits of the contiguous copy, as both start on 16 bytes."""
    g = torch.Generator().manual_seed(1)
    wide = torch.randn(6, 2, 80, generator=g).to(dtype)
    view = {
        "rows": wide[:, 0, :40],
        "columns": wide[:, 0, ::2],
        "padded": wide[::2, :, 8:48],
        "transposed": wide[:, 0].t()[:40].t(),
        "expanded": wide[:1, 0, :40].expand(6, 40),
    }[kind]
    ids = torch.randint(40, view.shape[:-1], generator=g)
    upstream = torch.randn(view.shape[:-1], generator=g)

    def grad_of(logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.detach().requires_grad_()
        stats = token_logprobs(logits, ids, entropy=True)
        assert stats.entropy is not None
        (upstream * (stats.logprobs + stats.entropy)).sum().backward()
        assert logits.grad is not None
        return stats.logprobs.detach(), logits.grad

    for got, expected in zip(grad_of(view), grad_of(view.contiguous()), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("vocab", [2, 37, 1031])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_its_bits_wherever_it_starts(dtype: torch.dtype, vocab: int) -> None:
    """On any 16-byte boundary; at any distance from one, where the last bits may be others. Between NaNs that stay; the
    gradient at another distance, or in place; zeros in place of a row without one.
    """
    from dapo_kernels.backends import triton

    g = torch.Generator().manual_seed(vocab)
    row = (torch.randn(1, vocab, generator=g) * 3).to(dtype)
    ids, live, upstream = torch.tensor([vocab - 1]), torch.tensor([True]), torch.tensor([0.7])
    places = 16 // row.element_size()

    def at(start: int) -> tuple[Tensor, Tensor]:
        storage = torch.full((vocab + 64,), math.nan, dtype=dtype)
        assert storage.data_ptr() % 16 == 0
        return storage, storage[start : start + vocab].view(1, vocab)

    def check_guards(storage: Tensor, start: int) -> None:
        assert bool(storage[:start].isnan().all())
        assert bool(storage[start + vocab :].isnan().all())

    found = []
    request, slopes = RowRequest(ids, live, 0.8, None, True), Slopes(upstream, upstream)
    for start in range(2 * places):
        storage, logits = at(start)
        logits.copy_(row)
        stats = triton.row_stats(logits, request)
        assert stats[2] is not None
        to = (3 * start + places // 2) % (2 * places)
        others, gradient = at(to)
        triton.row_grad(gradient, logits, request, stats, slopes)
        check_guards(others, to)
        triton.row_grad(logits, logits, request, stats, slopes)
        check_guards(storage, start)
        assert torch.equal(logits, gradient)
        found.append((*stats, gradient))
        triton.row_grad(logits, logits, request._replace(live=~live), stats, slopes)
        check_guards(storage, start)
        assert not logits.any()
    for start, got in enumerate(found):
        for x, y, z in zip(got, found[min(start % places, 1)], found[0], strict=True):
            assert torch.equal(x, y)
            torch.testing.assert_close(x, z, rtol=1e-6 + torch.finfo(x.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("value", [-math.inf, 1e4, -1e4])
def test_extreme_logits(value: float) -> None:
    logits = torch.randn(3, 37, generator=torch.Generator().manual_seed(2))
    logits[:, 3:9] = value
    ids = torch.tensor([0, 4, 20]) if value != -math.inf else torch.tensor([0, 1, 20])
    leaf = logits.clone().requires_grad_()
    stats = token_logprobs(leaf, ids, entropy=True)
    assert stats.entropy is not None
    (stats.logprobs + stats.entropy).sum().backward()
    double = logits.double()
    truth = torch.log_softmax(double, -1)
    torch.testing.assert_close(stats.logprobs.detach().double(), truth[torch.arange(3), ids], rtol=2e-6, atol=2e-6)
    p = truth.exp()
    h = -torch.where(p > 0, p * truth, 0.0).sum(-1)
    torch.testing.assert_close(stats.entropy.detach().double(), h, rtol=1e-5, atol=2e-6)
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize("vocab", [37, 4999, 5000])
def test_softcap_in_the_row_kernels(vocab: int) -> None:
    """From well inside the cap, where tanh is its argument, to far beyond it."""
    from dapo_kernels.backends import triton

    g = torch.Generator().manual_seed(9)
    cap = 20.0
    scale = torch.tensor([1e-3, 1.0, 12.0, 60.0, 1e4])[:, None]  # the cap's two formulas meet at 0.6 of it
    logits = torch.randn(5, vocab, generator=g) * scale
    ids = torch.randint(vocab, (5,), generator=g)
    dl, dh = torch.randn(5, generator=g), torch.randn(5, generator=g)
    live = torch.ones(5, dtype=torch.bool)
    x = logits.double().requires_grad_()
    capped = cap * torch.tanh(x / cap)
    logp, entropy, _ = stats_truth(capped, ids, 0.8, dl, dh)
    z = capped / 0.8
    per_row = torch.log_softmax(z, -1)
    (dl.double() * per_row[torch.arange(5), ids] - dh.double() * (per_row.exp() * per_row).sum(-1)).sum().backward()
    if vocab == 37:
        logits = on_boundaries(logits)
    request = RowRequest(ids, live, 0.8, None, True, softcap=cap)
    got = triton.row_stats(logits, request)
    assert got.entropy is not None
    elementwise(got.logprobs, logp, what="logprobs", scale=20.0)
    elementwise(got.entropy, entropy, what="entropy", scale=20.0)
    work = logits.clone()  # with the logits' strides
    triton.row_grad(work, work, request, got, Slopes(dl, dh))
    assert x.grad is not None
    elementwise(work, x.grad, what="gradient")


def test_programs_that_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a program for each row, dead and idle rows between them. The interpreter starts a program when the
    one before has ended, as a GPU does with those that its SMs have no room for: it finds one row, its own.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    from dapo_kernels.backends import triton

    g = torch.Generator().manual_seed(3)
    logits = torch.randn(7, 300, generator=g)
    ids, live = torch.randint(300, (7,), generator=g), torch.tensor([1, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    weights, advantages = torch.tensor([1.0, 1, 0, 1, 1, 1, 1]), torch.randn(7, generator=g)
    tokens = Tokens(live, weights, advantages, None, None, None)
    scalars = ObjectiveScalars.of(OBJECTIVES["dapo"])
    outs, left, start = [], list[int](), InterpreterBuilder.set_grid_idx
    for programs in (7, 3, 1):
        rows = logits.clone()
        left.clear()

        def started(self: Any, *at: int, rows: Tensor = rows) -> None:
            left.append(int((rows == logits).all(1).sum()))
            start(self, *at)

        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", started)
        monkeypatch.setattr(triton, "programs_for", lambda *of, programs=programs: programs)
        out = triton.row_loss_(rows, RowRequest(ids, live, 0.7, None, False), tokens, scalars)
        outs.append((rows, *out))
        assert left == [7, *range(programs - 1, 0, -1)]
    for other in outs[1:]:
        assert all(a is b or torch.equal(a, b) for a, b in zip(other, outs[0], strict=True))


def test_programs_that_share_rows_of_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    from dapo_kernels.backends import triton

    g = torch.Generator().manual_seed(4)
    logits, ref = torch.randn(7, 300, generator=g), torch.randn(7, 300, generator=g)
    live, weights = torch.tensor([1, 0, 1, 1, 1, 0, 1], dtype=torch.bool), torch.randn(7, generator=g)
    request = RowRequest(torch.zeros(7, dtype=torch.int64), live, 0.7, None, False)
    outs = []
    for programs in (7, 3, 1):
        monkeypatch.setattr(triton, "programs_for", lambda *of, programs=programs: programs)
        rows = logits.clone()
        outs.append((rows, triton.row_divergence_(rows, ref, request, weights, Distance(0.4, None, None))))
        assert not torch.isnan(outs[-1][1]).any()
        assert torch.equal((rows == 0).all(1), ~live)
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, outs[0], strict=True))


def test_a_row_alone_and_padded_has_the_same_bits() -> None:
    case = logits_case(1031, lengths=(3, 2), seed=3, dtype=torch.bfloat16)
    for name in ("dapo", "gspo"):
        for entry in ("logits", "inplace"):
            out, grads = call(entry, case, name, entropy=True)
            padded, padded_grads = call(entry, case, name, layout="padded", entropy=True)
            assert torch.equal(out.logprobs, padded.logprobs)
            assert torch.equal(out.entropy, padded.entropy)
            assert torch.equal(grads["logits"], padded_grads["logits"])
    together = token_logprobs(case.leaves["logits"], case.target_ids).logprobs
    alone = [token_logprobs(case.leaves["logits"][t : t + 1], case.target_ids[t : t + 1]).logprobs for t in range(5)]
    assert torch.equal(together, torch.cat(alone))


# --- losses -----------------------------------------------------------------------------------------------


def check(entry: str, case: Case, o: Options, **kw: Any) -> None:
    """One call against the float64 truth, as near as eager is in the case's dtype."""
    dtype = next(iter(case.leaves.values())).dtype
    _, x = rows_of(case, o)
    picked = batch_selection(x, o)
    extra: dict[str, Any] = {"ref_logprobs": case.ref_logprobs} if o.needs_reference else {}
    if o.clip_cov is not None:
        picked = set(sorted(picked)[: share_down(x.live, o.clip_cov[0])])
        extra["selection"] = selection_mask(case, picked)
    truth = solve(case, o, selected=picked, **kw)
    eager = solve(case, o, dtype=dtype, selected=picked, **kw)
    out, grads = call(entry, case, "ppo", **extra, **kw, **o.keywords())
    as_accurate(out.loss, truth.loss, eager.loss, what="loss", scale=max(1.0, abs(float(truth.loss))))
    for key, grad in grads.items():
        as_accurate(grad, truth.grads[key], eager.grads[key], what=key, multiple=3.0)
        if "logits" in grads:
            elementwise(grad, truth.grads[key], what=key, slack=1.05)
    for key, value in truth.metrics.items():
        if key != "entropy" or out.entropy is not None:
            assert float(out.metrics[key]) == pytest.approx(value, rel=1e-5, abs=5e-5), key


SURROGATES = {
    "clip": Options(clip_high=0.28),
    "dual": Options(dual_clip=1.5),
    "cispo": Options(surrogate="cispo", clip_low=0.3, clip_high=1.0),
    "sapo": Options(surrogate="sapo", sapo_tau=(1.5, 0.8)),
    "reinforce": Options(surrogate="reinforce"),
    "dppo": Options(surrogate="dppo_kl", clip_low=0.01, clip_high=0.02, dual_clip=2.0),
    "unclipped": Options(clip_low=1.0, clip_high=math.inf),
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "k1": {"kl_coef": 0.2, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.2, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.2, "kl_estimator": "k3", "entropy_coef": 0.1},
    "k3-ratio": {"kl_coef": 0.2, "kl_estimator": "k3", "kl_through_ratio": True},
    "entropy": {"entropy_coef": -0.3},
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_every_surrogate_with_every_extra(surrogate: str, extra: str) -> None:
    o = dataclasses.replace(SURROGATES[surrogate], **EXTRAS[extra])
    tau = torch.linspace(0.6, 1.4, 12)
    case = logits_case(37, lengths=(5, 1, 6), seed=4, temperature=tau)
    for entry in ("logits", "inplace"):
        check(entry, case, o, weighted=extra != "plain")


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_vocabularies(dtype: torch.dtype, vocab: int) -> None:
    o = Options(clip_high=0.28, kl_coef=0.1, entropy_coef=0.05)
    case = logits_case(vocab, lengths=(3, 4), seed=5, dtype=dtype)
    for entry in ("logits", "inplace"):
        check(entry, case, o, weighted=True)
        check(entry, case, Options(), denominator=3.5, grad_output=-2.0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_row_of_the_table(name: str) -> None:
    wide = {"clip_cov": {"clip_cov": (0.2, 0.0, 3.0)}, "kl_cov": {"kl_cov": (0.25, 0.7)}}.get(name, {})
    o = options(name, wide=False, **wide)[0]
    case = logits_case(37, lengths=(5, 1, 6), seed=6)
    check("logits", case, o)
    check("linear", linear_case(37, lengths=(5, 1, 6), seed=6, softcap=20.0, bias=True), o)


@pytest.mark.parametrize("case", [c for c in CASES if c["uses"]], ids=name_of)
def test_golden_values(case: dict[str, Any]) -> None:
    for inplace in (False, True):
        check_case(case, torch.float32, 3e-6, inplace_backward=inplace)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38])
def test_dead_tokens_leave_no_trace(value: float) -> None:
    case = logits_case(37, lengths=(5, 1, 6), seed=7, dead=0.4)
    keywords = {"kl_coef": 0.1, "entropy_coef": 0.05, "weighted": True, "ref_logprobs": case.ref_logprobs}
    dirty = dataclasses.replace(case, leaves={"logits": case.leaves["logits"].masked_fill(~case.mask[:, None], value)})
    for field in ("old_logprobs", "advantages", "ref_logprobs", "importance_weights"):
        setattr(dirty, field, getattr(case, field).masked_fill(~case.mask, value))
    dirty.target_ids = case.target_ids.masked_fill(~case.mask, -100)
    dirty.temperature = torch.ones(12).masked_fill(~case.mask, value)
    case.temperature = torch.ones(12)
    for entry in LOGITS_ENTRIES:
        extra = {"with_entropy": True} if entry == "policy" else {}
        if entry == "policy":  # it takes log-probs: a dead token's are made from its finite logits
            dirty = dataclasses.replace(dirty, leaves=case.leaves, target_ids=case.target_ids, temperature=1.0)
        clean, clean_grads = call(entry, case, "dapo", **extra, **keywords)
        got, grads = call(entry, dirty, "dapo", **extra, **{**keywords, "ref_logprobs": dirty.ref_logprobs})
        assert torch.equal(clean.loss, got.loss)
        for key, grad in grads.items():
            assert torch.equal(grad, clean_grads[key])
            assert not grad[~case.mask].any()
        for key, metric in got.metrics.items():
            assert torch.equal(metric, clean.metrics[key]), key


def test_a_token_that_does_not_train_cannot_spoil_the_loss() -> None:
    """Weight 0 and an overflowing ratio: where, not multiply."""
    old, advantages = torch.tensor([-1.0, -200.0, -1.0]), torch.tensor([1.0, -1.0, 1.0])
    chosen = torch.tensor([True, False, True])
    for inplace in (False, True):
        for kwargs in (
            {"objective": "top_entropy", "selection": chosen},
            {"objective": "top_entropy", "top_entropy": 0.5},
            {"objective": "dapo", "importance_weights": chosen.float()},
        ):
            logits = torch.zeros(3, 4)
            logits[1, 1] = 3.0  # the surest token: the entropy leaves it out too
            logits.requires_grad_()
            out = dapo_loss(logits, torch.tensor([0, 1, 2]), old, advantages, inplace_backward=inplace, **kwargs)
            out.loss.backward()
            assert math.isfinite(out.loss.item())
            assert logits.grad is not None
            assert bool(logits.grad.isfinite().all())
            assert not logits.grad[1].any()


def test_edges_of_the_batch() -> None:
    for shape in ((0, 5), (3, 1)):
        logits = torch.randn(*shape, requires_grad=True)
        zeros = torch.zeros(shape[0])
        for inplace in (False, True):
            out = dapo_loss(logits * 1.0, zeros.long(), zeros, zeros + 1.0, inplace_backward=inplace)
            assert out.loss.item() == pytest.approx(-1.0 if shape[0] else 0.0)
    with pytest.raises(IndexError, match="target_ids"):
        dapo_loss(torch.randn(2, 5), torch.tensor([0, 5]), torch.zeros(2), torch.zeros(2))
    with pytest.raises(TypeError, match="float64"):
        dapo_loss(torch.randn(2, 5).double(), torch.tensor([0, 4]), torch.zeros(2), torch.zeros(2))


def test_many_tokens_of_the_elementwise_kernel() -> None:
    """More tokens than one program holds, the last block part full; GSPO's ratios, dead tokens NaN."""
    g = torch.Generator().manual_seed(8)
    lengths = torch.tensor([300, 1, 299])
    old, advantages = -torch.rand(600, generator=g) * 4, torch.randn(600, generator=g)
    mask = torch.rand(600, generator=g) > 0.2
    new = (old + torch.randn(600, generator=g) * 0.3).clamp(max=0).requires_grad_()
    bounds = torch.tensor([0, 300, 301, 600], dtype=torch.int32)
    options = {"clip_low": 0.001, "clip_high": 0.001, "aggregate": "token-mean"}
    dirty = old.masked_fill(~mask, math.nan)
    out = policy_loss(new, dirty, advantages, objective="gspo", mask=mask, cu_seqlens=bounds, **options)
    out.loss.backward()
    wide = new.detach().double().requires_grad_()
    delta = torch.where(mask, wide - old.double(), 0.0)
    ids = torch.repeat_interleave(torch.arange(3), lengths)
    mean = torch.stack([delta[ids == i].sum() / max(1, int(mask[ids == i].sum())) for i in range(3)])[ids]
    kept = torch.minimum(mean.exp() * advantages, mean.exp().clamp(0.999, 1.001) * advantages)
    truth = -torch.where(mask, kept, 0.0).sum() / mask.sum()
    truth.backward()
    assert out.loss.item() == pytest.approx(truth.item(), rel=1e-5)
    assert new.grad is not None
    assert wide.grad is not None
    elementwise(new.grad, wide.grad, what="gradient")
