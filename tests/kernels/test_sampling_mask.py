"""Tokens sampled from a part of the vocabulary: the loss of the softmax over what was kept, zeros for the rest.

The truth is autograd in float64 over the kept logits alone, and ``policy_loss`` of its log-probs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, call_linear, call_logits, dtypes_of, linear_case, logits_case, logits_of, pad
from no_device import NoWaiting
from ranks import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dapo_kernels import (
    OBJECTIVES,
    SamplingMask,
    dapo_loss,
    linear_dapo_loss,
    linear_preference_loss,
    linear_token_logprobs,
    policy_loss,
    records,
    token_logprobs,
    use_backend,
)
from dapo_kernels.backends import available_backends, registry
from dapo_kernels.engine import chunks, gradients, hidden
from dapo_kernels.engine import kept as kept_module
from dapo_kernels.objectives import aggregate

V, H, LENGTHS = 67, 12, (7, 0, 2, 12, 3)  # a sequence without tokens
T = sum(LENGTHS)
TEMPERATURE = 0.5 + torch.rand(T, generator=torch.Generator().manual_seed(8))
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"atol": 1e-12, "rtol": 1e-11},
    torch.float32: {"atol": 1e-6, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-6, "rtol": 2**-7},
    torch.float16: {"atol": 1e-6, "rtol": 2**-9},
}


def kept_by(case: Case, seed: int = 1) -> Tensor:
    """bool [T, V]: a third of the tokens keeps everything, one its target alone, the others between."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(T, 1, generator=generator)
    kept = torch.rand(T, V, generator=generator) < share
    kept[::3] = True
    kept[4] = False
    kept[torch.arange(T), case.target_ids] = True
    return kept


def hidden_case(**more: Any) -> Case:
    return linear_case(V, H, LENGTHS, bias=True, softcap=3.0, temperature=TEMPERATURE, **more)


def rows_case(**more: Any) -> Case:
    return logits_case(V, LENGTHS, temperature=TEMPERATURE, **more)


def stats_of(case: Case, leaves: dict[str, Tensor], kept: Tensor) -> tuple[Tensor, Tensor]:
    z = logits_of(leaves, case.softcap) / torch.as_tensor(case.temperature, dtype=torch.float64).reshape(-1, 1)
    log_p = z.masked_fill(~kept, -math.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
    return log_p.gather(1, case.target_ids[:, None])[:, 0], entropy


def truth(case: Case, kept: Tensor, objective: Any, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    leaves = {name: x.double().requires_grad_() for name, x in case.fresh().items()}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    logprobs, entropy = stats_of(case, leaves, kept)
    with use_backend("torch"):
        old, advantages = case.old_logprobs.double(), case.advantages.double()
        out = policy_loss(logprobs, old, advantages, entropy=entropy, objective=objective, **options)
    out.loss.backward()
    return out, {name: x.grad for name, x in leaves.items() if x.grad is not None}


def options_of(name: str, case: Case) -> dict[str, Any]:
    given: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens}
    if OBJECTIVES[name].needs_reference:
        given["ref_logprobs"] = case.ref_logprobs
    if OBJECTIVES[name].aggregate == "seq-mean-token-sum-norm":
        given["length_norm"] = 9
    if name == "clip_cov":
        given |= {"clip_cov": (0.3, -9.0, 9.0), "generator": torch.Generator().manual_seed(1)}
    return given


def alike(got: Any, expected: Any, grads: dict[str, Any], of_truth: dict[str, Tensor], dtype: torch.dtype) -> None:
    close = CLOSE[torch.float32 if dtype != torch.float64 else dtype]
    for a, b in ((got.loss, expected.loss), (got.logprobs, expected.logprobs), (got.entropy, expected.entropy)):
        torch.testing.assert_close(a.double(), b, **close)
    for name, grad in of_truth.items():
        torch.testing.assert_close(grads[name].double(), grad, **CLOSE[dtype])


def check(case: Case, kept: Tensor, objective: Any, /, chunk_bytes: int | None = None, **options: Any) -> None:
    lists = SamplingMask.from_kept(kept)
    if "logits" in case.leaves:
        in_place = {"inplace_backward": True} if chunk_bytes else {}
        got, grad = call_logits(dapo_loss, case, objective, sampling_mask=lists, entropy=True, **options, **in_place)
        grads: dict[str, Any] = {"logits": grad}
        assert not grad[~kept].any()
    else:
        how = {"sampling_mask": lists, "entropy": True, "chunk_bytes": chunk_bytes}
        got, grads = call_linear(linear_dapo_loss, case, objective, **how, **options)
    if "generator" in options:
        options["generator"].manual_seed(1)
    expected, of_truth = truth(case, kept, objective, **options)
    alike(got, expected, grads, of_truth, case.leaves[next(iter(case.leaves))].dtype)


def own(logprobs: Tensor, entropy: Tensor, tokens: Any) -> Tensor:
    return -tokens.advantages * (logprobs - tokens.old_logprobs).exp() - 0.1 * entropy


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_every_objective(backend: str, name: str) -> None:
    for case in (hidden_case(seed=3), rows_case(seed=4)):
        for chunk_bytes in (5 * V * 8, None):
            check(case, kept_by(case), name, chunk_bytes, **options_of(name, case))


def test_entropy_bonus_and_a_function_of_the_callers(backend: str) -> None:
    for case in (hidden_case(seed=5), rows_case(seed=6)):
        for chunk_bytes in (1, None):
            check(case, kept_by(case), "dapo", chunk_bytes, entropy_coef=0.1, mask=case.mask)
            check(case, kept_by(case), own, chunk_bytes, mask=case.mask)


def test_every_dtype(backend: str) -> None:
    for dtype in dtypes_of(backend):
        case = rows_case(seed=7, dtype=dtype)
        for in_place in (None, 1):
            check(case, kept_by(case), "dapo", in_place, mask=case.mask, entropy_coef=0.1)
    case = hidden_case(seed=7, dtype=torch.bfloat16)
    expected, of_truth = truth(case, kept_by(case), "dapo", mask=case.mask)
    how = {"sampling_mask": SamplingMask.from_kept(kept_by(case)), "mask": case.mask, "float32_logits": True}
    got, grads = call_linear(linear_dapo_loss, case, "dapo", **how)
    torch.testing.assert_close(got.logprobs.double(), expected.logprobs, atol=1e-5, rtol=1e-5)
    for name, grad in of_truth.items():
        close = {"atol": 2**-7 * float(grad.abs().max()), "rtol": 2**-7}
        torch.testing.assert_close(grads[name].double(), grad, **close)  # type: ignore[union-attr]


def test_log_probs_and_entropies(backend: str) -> None:
    """Of both entries, and the gradient of both results; padded as well."""
    weights = torch.randn(2, T, generator=torch.Generator().manual_seed(2))
    width = max(LENGTHS)
    for case in (hidden_case(seed=9), rows_case(seed=9)):
        kept = kept_by(case)
        leaves = {name: x.detach().requires_grad_() for name, x in ((n, x.double()) for n, x in case.leaves.items())}
        expected = stats_of(case, leaves, kept)
        sum((w * x).sum() for w, x in zip(weights.double(), expected, strict=True)).backward()
        for in_place in (False, True):
            given = case.fresh()
            how: dict[str, Any] = {"entropy": True}
            if "logits" in given:
                lists = SamplingMask.from_kept(pad(kept, LENGTHS, width, True))
                first: Any = (pad_of(given["logits"] * 1, width),)
                ids, tau = pad(case.target_ids, LENGTHS, width, 0), pad(TEMPERATURE, LENGTHS, width, 1.0)
                fn: Any = token_logprobs
                how |= {"inplace_backward": in_place}
            else:
                lists, ids, tau, fn = SamplingMask.from_kept(kept), case.target_ids, TEMPERATURE, linear_token_logprobs
                first = (given["hidden"], given["weight"])
                how |= {"bias": given["bias"], "softcap": case.softcap, "chunk_bytes": 7 * V * 8 if in_place else None}
            stats = fn(*first, ids, temperature=tau, sampling_mask=lists, **how)
            got = [x if x.dim() == 1 else torch.cat([x[b, :n] for b, n in enumerate(LENGTHS)]) for x in stats]
            sum((w * x).sum() for w, x in zip(weights, got, strict=True)).backward()
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a.double(), b, **CLOSE[torch.float32])
            for name, leaf in leaves.items():
                torch.testing.assert_close(given[name].grad.double(), leaf.grad, **CLOSE[torch.float32])  # type: ignore[union-attr]


def pad_of(rows: Tensor, width: int) -> Tensor:
    """``pad`` with a gradient."""
    parts = rows.split(LENGTHS)
    return torch.stack([torch.nn.functional.pad(x, (0, 0, 0, width - len(x))) for x in parts])


def test_lists_of_one_token_teach_nothing(backend: str) -> None:
    for case in (hidden_case(seed=10), rows_case(seed=10)):
        lists = SamplingMask(case.target_ids, torch.arange(T + 1))
        how: dict[str, Any] = {"sampling_mask": lists, "entropy_coef": 0.1}
        if "logits" in case.leaves:
            out, grad = call_logits(dapo_loss, case, "dapo", **how)
            grads: dict[str, Any] = {"logits": grad}
        else:
            out, grads = call_linear(linear_dapo_loss, case, "dapo", **how)
        assert not out.logprobs.any()
        assert not out.entropy.any()
        assert not any(grad.any() for grad in grads.values())


def test_whole_and_absent_lists_are_no_mask(backend: str) -> None:
    """Whole ones within the rounding of a sum, absent ones to the bit but for the sum over tokens."""
    whole = SamplingMask(torch.arange(V).repeat(T), torch.arange(T + 1) * V)
    absent = SamplingMask.from_lists([[]] * T)
    for case in (hidden_case(seed=11), rows_case(seed=11)):
        fn: Any = dapo_loss if "logits" in case.leaves else linear_dapo_loss
        call: Any = call_logits if "logits" in case.leaves else call_linear
        how: dict[str, Any] = {"mask": case.mask, "entropy_coef": 0.1}
        plain, truth = call(fn, case, "dapo", **how)
        for lists, close in ((whole, CLOSE[torch.float32]), (absent, {"atol": 0.0, "rtol": 0.0})):
            got, grads = call(fn, case, "dapo", sampling_mask=lists, **how)
            torch.testing.assert_close(got.loss, plain.loss, **CLOSE[torch.float32])
            for a, b in zip(got[1:3], plain[1:3], strict=True):
                torch.testing.assert_close(a, b, **close)
            torch.testing.assert_close(grads, truth, **close)


def test_what_was_not_kept_may_hold_anything(backend: str) -> None:
    case = rows_case(seed=12)
    kept = kept_by(case)
    kept[::3, :5] = False
    kept[torch.arange(T), case.target_ids] = True
    lists = SamplingMask.from_kept(kept)
    garbage = torch.tensor([math.nan, math.inf, -math.inf])[torch.arange(T * V).view(T, V) % 3]
    spoilt = replace(case, leaves={"logits": torch.where(kept, case.leaves["logits"], garbage)})
    for in_place in (False, True):
        how: dict[str, Any] = {"sampling_mask": lists, "inplace_backward": in_place, "entropy_coef": 0.1}
        (a, grad), (b, same) = (call_logits(dapo_loss, x, "dapo", **how) for x in (case, spoilt))
        assert torch.equal(a.loss, b.loss)
        assert torch.equal(grad, same)
    # A kept one that is NaN shows.
    spoilt.leaves["logits"][1, case.target_ids[1]] = math.nan
    assert token_logprobs(spoilt.leaves["logits"], case.target_ids, sampling_mask=lists).logprobs[1].isnan()


def test_a_token_alone_that_is_not_finite_shows(backend: str) -> None:
    mask = SamplingMask.from_lists([[1]] * 3)
    for dtype in dtypes_of(backend):
        logits = torch.tensor([[0.0, math.nan], [0.0, math.inf], [0.0, -math.inf]], dtype=dtype)
        assert token_logprobs(logits, torch.ones(3).long(), sampling_mask=mask).logprobs.isnan().all()


def test_ids_of_any_stride(backend: str) -> None:
    case = rows_case(seed=20)
    lists = SamplingMask.from_kept(kept_by(case))
    ids = lists.ids.long().repeat_interleave(2)[::2]
    a, b = (
        token_logprobs(case.leaves["logits"], case.target_ids, sampling_mask=SamplingMask(x, lists.offsets)).logprobs
        for x in (lists.ids, ids)
    )
    assert torch.equal(a, b)


def test_dead_tokens_may_keep_anything(backend: str) -> None:
    case = hidden_case(seed=13)
    kept = kept_by(case)
    lists = [row.nonzero()[:, 0].tolist() for row in kept]
    wrong = [[-7, 5, 5, 10**6] if not live else some for some, live in zip(lists, case.mask.tolist(), strict=True)]
    results = []
    for given in (lists, wrong):
        how = {"sampling_mask": SamplingMask.from_lists(given), "mask": case.mask}
        results.append(call_linear(linear_dapo_loss, case, "dapo", **how))
    (a, grads), (b, same) = results
    assert torch.equal(a.loss, b.loss)
    assert all(torch.equal(grads[name], same[name]) for name in grads)


def test_padded_heads_and_no_tokens_at_all(backend: str) -> None:
    case = rows_case(seed=14)
    lists = SamplingMask.from_kept(kept_by(case))
    more = torch.full((T, 3), math.nan)
    wide = replace(case, leaves={"logits": torch.cat([case.leaves["logits"], more], 1)})
    for in_place in (False, True):
        how: dict[str, Any] = {"sampling_mask": lists, "inplace_backward": in_place}
        a, truth = call_logits(dapo_loss, case, "dapo", **how)
        b, grad = call_logits(dapo_loss, wide, "dapo", valid_vocab=V, **how)
        assert torch.equal(a.loss, b.loss)
        assert torch.equal(grad[:, :V], truth)
        assert not grad[:, V:].any()
    empty = torch.zeros(0, H, requires_grad=True)
    nothing = torch.zeros(0)
    lists = SamplingMask.from_lists([])
    out = linear_dapo_loss(empty, torch.ones(V, H), nothing.long(), nothing, nothing, sampling_mask=lists)
    out.loss.backward()
    assert out.loss == 0


def test_parts_of_the_gradient_leave_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = hidden_case(seed=15)
    lists = SamplingMask.from_kept(kept_by(case))
    results = []
    for size in (2**14, 7):
        monkeypatch.setattr(kept_module, "_PART", size)
        with use_backend("torch"):
            _, grads = call_linear(linear_dapo_loss, case, "dapo", sampling_mask=lists, entropy_coef=0.1)
        results.append(grads)
    for name, grad in results[0].items():
        assert torch.equal(grad, results[1][name]), name  # type: ignore[arg-type]


def test_a_softcap_of_16_bits_rounds_once(backend: str) -> None:
    """Capped in float32: rounded again, log-probs were off by 8e-4."""
    case = linear_case(V, H, LENGTHS, softcap=3.0, temperature=TEMPERATURE, seed=21, dtype=torch.bfloat16)
    kept = kept_by(case)
    kept[::3, :5] = False
    kept[torch.arange(T), case.target_ids] = True
    how: dict[str, Any] = {"softcap": 3.0, "temperature": TEMPERATURE, "sampling_mask": SamplingMask.from_kept(kept)}
    given = (case.leaves["hidden"], case.leaves["weight"], case.target_ids)
    with use_backend("torch"):
        expected = linear_token_logprobs(*given, **how).logprobs
    torch.testing.assert_close(linear_token_logprobs(*given, **how).logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_rows", [3, 40])
def test_lists_longer_than_a_kernels_block(backend: str, n_rows: int) -> None:
    """Of 1 to 9000 tokens, one beside the other, peaked, in any order; the same bits on one thread."""
    vocab, lengths = 9000, [1, 2048, 2049, 9000, 5001, 0]
    generator = torch.Generator().manual_seed(19)
    logits = 8.0 * torch.randn(n_rows, vocab, generator=generator)
    logits[1] += 3.0e4
    lists = [torch.randperm(vocab, generator=generator)[: lengths[row % len(lengths)]] for row in range(n_rows)]
    mask = SamplingMask.from_lists([row.tolist() for row in lists])
    target_ids = torch.tensor([int(row[len(row) // 2]) if len(row) else 7 for row in lists])
    weights = torch.randn(2, n_rows, generator=generator)
    exact = logits.double().requires_grad_()
    kept = torch.zeros(n_rows, vocab, dtype=torch.bool)
    for row, ids in zip(kept, lists, strict=True):
        row[ids if len(ids) else slice(None)] = True
    log_p = exact.masked_fill(~kept, -math.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
    expected = log_p.gather(1, target_ids[:, None])[:, 0], entropy
    sum((w * x).sum() for w, x in zip(weights.double(), expected, strict=True)).backward()
    results = []
    threads = torch.get_num_threads()
    for n_threads in (1, threads):
        torch.set_num_threads(n_threads)
        leaf = logits.clone().requires_grad_()
        stats = token_logprobs(leaf, target_ids, entropy=True, sampling_mask=mask)
        sum((w * x).sum() for w, x in zip(weights, stats, strict=True)).backward()
        for a, b in (*zip(stats, expected, strict=True), (leaf.grad, exact.grad)):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
        results.append((*stats, leaf.grad))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("by", ["cpp", "torch"])
def test_repeated_ids_are_found(by: str) -> None:
    """Of live rows alone, whatever the order and however far from any vocabulary."""
    if available_backends()[by] is not None:
        pytest.skip("not built")
    find = registry.backend(by).find_repeated  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(3)
    for seed in range(200):
        counts = torch.randint(0, 9, (6,), generator=generator)
        ids = torch.randint(-2, 40, (int(counts.sum()),), generator=generator)
        ids[ids == 39] = 2**40
        if seed % 3 == 0:
            ids = torch.cat([part.sort().values for part in ids.split(counts.tolist())])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        live = torch.rand(6, generator=generator) < 0.7
        rows = [part.tolist() for part in ids.split(counts.tolist())]
        seen = [[x for x in row if 0 <= x < 2**31] if ok else [] for row, ok in zip(rows, live.tolist(), strict=True)]
        at = find(ids, offsets, live)
        assert (at is None) == all(len(set(row)) == len(row) for row in seen)
        if at is not None:
            row = int(torch.searchsorted(offsets, at, right=True)) - 1
            assert live[row]
            assert int(ids[at]) in rows[row][: at - int(offsets[row])]


def test_the_compiler_sees_through() -> None:
    case = hidden_case(seed=15)
    lists = SamplingMask.from_kept(kept_by(case))

    def loss(hidden: Tensor, logits: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        mask = SamplingMask(ids, offsets)
        given: Any = (case.target_ids, case.old_logprobs, case.advantages)
        of_hidden = linear_dapo_loss(hidden, case.leaves["weight"], *given, sampling_mask=mask).loss
        return of_hidden + token_logprobs(logits, case.target_ids, sampling_mask=mask).logprobs.sum()

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [case.leaves["hidden"].clone().requires_grad_(), rows_case(seed=15).fresh()["logits"]]
        run(*leaves, *lists).backward()
        results.append([x.grad for x in leaves])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


def test_refusals() -> None:
    case, rows = hidden_case(seed=16), rows_case(seed=16)
    whole = [[*range(V)]] * T
    target = int(case.target_ids[4])
    missing, twice, outside, padded = (list(whole) for _ in range(4))
    missing[4] = [x for x in range(V) if x != target]
    twice[4] = [target, 3, 9, 3]
    outside[4] = [target, V]
    padded[4] = [target, -1, -1]
    good = SamplingMask.from_lists(whole)
    for lists, kind, words in (
        (SamplingMask.from_lists(missing), ValueError, f"token 4 .*{target} .*{V - 1}"),
        (SamplingMask.from_lists(twice), ValueError, "3 twice.*token 4"),
        (SamplingMask.from_lists(outside), IndexError, rf"token 4 .*{V}, .*\[0, V\)"),
        (SamplingMask.from_lists(padded), IndexError, r"token 4 .* -1, .*\[0, V\)"),
        (SamplingMask.from_lists(whole[1:]), ValueError, rf"offsets .*\[{T + 1}\].*\[{T}\]"),
        (good._replace(offsets=good.offsets.flip(0)), ValueError, "offsets .*K="),
        (good._replace(ids=good.ids.float()), TypeError, "ids .*torch.float32"),
        (good.ids, TypeError, "sampling_mask .*Tensor"),
    ):
        with pytest.raises(kind, match=words):
            call_linear(linear_dapo_loss, case, "dapo", sampling_mask=lists, chunk_bytes=1)
        rows.target_ids = case.target_ids
        with pytest.raises(kind, match=words):
            call_logits(dapo_loss, rows, "dapo", sampling_mask=lists)
    given: Any = (case.leaves["hidden"], case.leaves["weight"], case.target_ids, None)
    with pytest.raises(TypeError, match="'sampling_mask'"):
        linear_preference_loss(*given, cu_seqlens=case.cu_seqlens, pairs=torch.tensor([[0, 2]]), sampling_mask=good)
    with pytest.raises(TypeError, match="kept"):
        SamplingMask.from_kept(torch.ones(T, V))


# --- as on a GPU ------------------------------------------------------------------------------------------


def test_the_path_of_a_device(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is left out by looking: the lists of all tokens beside every chunk."""
    for module in (aggregate, chunks, gradients, hidden, kept_module, records):
        monkeypatch.setattr(module, "on_host", lambda x: False)
    for case in (hidden_case(seed=18), rows_case(seed=18)):
        for host_sync in (False, None):
            more = {} if "logits" in case.leaves else {"host_sync": host_sync}
            lists = SamplingMask.from_kept(kept_by(case))
            how: dict[str, Any] = {"sampling_mask": lists, "entropy": True, "mask": case.mask, **more}
            expected, of_truth = truth(case, kept_by(case), "dapo", mask=case.mask)
            if "logits" in case.leaves:
                got, grad = call_logits(dapo_loss, case, "dapo", inplace_backward=True, **how)
                grads: dict[str, Any] = {"logits": grad}
            else:
                got, grads = call_linear(linear_dapo_loss, case, "dapo", chunk_bytes=5 * V * 8, **how)
            alike(got, expected, grads, of_truth, torch.float32)


class CountAdditions(TorchDispatchMode):
    """The most additions or maxima of one operation on one address: on a GPU those wait for each other."""

    most = 0

    def within(self, method: Any) -> Any:
        def counted(*args: Any, **keywords: Any) -> Any:
            with self:
                return method(*args, **keywords)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        if name in ("index_add_", "scatter_reduce_"):
            self.most = max(self.most, int(args[2].bincount().max()))
        if name == "index_put_" and (args[3] if len(args) > 3 else kwargs.get("accumulate", False)):
            places = torch.stack(torch.broadcast_tensors(*args[1]), dim=-1)
            self.most = max(self.most, int(places.unique(dim=0, return_counts=True)[1].max()))
        return func(*args, **kwargs)


def test_what_a_chunk_leaves_out_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the tokens kept in other chunks stand beside every chunk. They add nothing, each at another place."""
    for module in (aggregate, chunks, gradients, hidden, kept_module, records):
        monkeypatch.setattr(module, "on_host", lambda x: False)
    case, rows = hidden_case(seed=18), 6
    kept = kept_by(case)
    lists = SamplingMask.from_kept(kept)
    longest, spread = int(lists.offsets.diff().max()), -(-len(lists.ids) // rows)
    assert longest + spread < len(lists.ids) / 2
    counted = CountAdditions()
    for name in ("row_stats", "row_grad", "row_loss_"):  # where operators run, a mode around the call sees nothing
        monkeypatch.setattr(kept_module.KeptTokens, name, counted.within(getattr(kept_module.KeptTokens, name)))
    with use_backend("torch"):
        how: dict[str, Any] = {"sampling_mask": lists, "entropy": True, "chunk_bytes": rows * 72 * 8}
        got, grads = call_linear(linear_dapo_loss, case, "dapo", host_sync=False, mask=case.mask, **how)
    assert longest <= counted.most <= longest + spread
    expected, of_truth = truth(case, kept, "dapo", mask=case.mask)
    alike(got, expected, grads, of_truth, torch.float32)


def test_ids_of_other_ranks_do_not_pile_up() -> None:
    """Of the columns a rank has one of: the others' ids are spread over its own."""
    request = records.RowRequest(
        torch.tensor([3]), torch.tensor([True]), 1.0, None, True, True,
        torch.tensor([True]), torch.arange(-40, 60), torch.zeros(100, dtype=torch.int64),
    )  # fmt: skip
    found = kept_module.TruncatedSupport.of(torch.zeros(1, 20, dtype=torch.float64), request)
    assert found.ids[found.here].tolist() == list(range(20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_module, "on_host", lambda x: False)
        spread = kept_module.TruncatedSupport.of(torch.zeros(1, 20, dtype=torch.float64), request)
    assert spread.ids[spread.here].tolist() == list(range(20))
    assert spread.ids.bincount().tolist() == [5] * 20


def test_nothing_waits_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # which meta tensors do not know

    def empty(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)

    ids, old, advantages = empty(T, dtype=torch.int64), empty(T), empty(T)
    lists = SamplingMask(empty(99, dtype=torch.int32), empty(T + 1, dtype=torch.int32))
    how: dict[str, Any] = {"sampling_mask": lists, "entropy_coef": 0.1, "mask": empty(T, dtype=torch.bool)}
    with use_backend("torch"), NoWaiting():
        for in_place in (False, True):
            logits = empty(T, V, grad=True)
            dapo_loss(logits * 1, ids, old, advantages, inplace_backward=in_place, **how).loss.backward()
            assert logits.grad is not None
        leaves = (empty(T, H, grad=True), empty(V, H, grad=True))
        linear_dapo_loss(*leaves, ids, old, advantages, host_sync=False, chunk_bytes=999, **how).loss.backward()
        stats = linear_token_logprobs(*leaves, ids, entropy=True, host_sync=False, sampling_mask=lists)
        stats.logprobs.sum().backward()


# --- a vocabulary that ranks share ------------------------------------------------------------------------


def shared(_rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for cut in ((34, 33), (66, 1), (67, 0)):
        mine = slice(*((0, cut[0]) if group.rank() == 0 else (cut[0], V)))
        for case in (hidden_case(seed=17), rows_case(seed=17)):
            lists = SamplingMask.from_kept(kept_by(case))
            for objective, more in (("dapo", {"entropy_coef": 0.1}), ("gspo", {"cu_seqlens": case.cu_seqlens})):
                how: dict[str, Any] = {"sampling_mask": lists, "mask": case.mask, "entropy": True, **more}
                if "logits" in case.leaves:
                    part = replace(case, leaves={"logits": case.leaves["logits"][:, mine]})
                    expected, whole = call_logits(dapo_loss, case, objective, **how)
                    got, grad = call_logits(dapo_loss, part, objective, group=group, **how)
                    pairs: list[Any] = [(grad, whole[:, mine])]
                else:
                    leaves = {name: x if name == "hidden" else x[mine] for name, x in case.leaves.items()}
                    how |= {"chunk_bytes": 5 * V * 8}
                    expected, truth = call_linear(linear_dapo_loss, case, objective, **how)
                    got, grads = call_linear(
                        linear_dapo_loss, replace(case, leaves=leaves), objective, group=group, **how
                    )
                    pairs = [(grads[n], g if n == "hidden" else g[mine]) for n, g in truth.items() if g is not None]
                for a, b in (*zip(got[:3], expected[:3], strict=True), *pairs):
                    torch.testing.assert_close(a, b, **CLOSE[torch.float32])
    lists = SamplingMask.from_lists(
        [[int(x), *([] if int(x) == group.rank() else [group.rank()])] for x in case.target_ids]
    )
    with pytest.raises(ValueError, match="target_ids and mask"):
        call_logits(dapo_loss, case, "dapo", sampling_mask=lists, group=group)


@pytest.mark.ranks
def test_ranks_that_share_a_vocabulary() -> None:
    on_ranks(2, shared)
