"""Tokens sampled from a part of the vocabulary: the loss of the softmax over what was kept, zeros for the rest.

The truth is autograd in float64 over the kept logits alone, and ``policy_loss`` of its log-probs.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import Case, call_linear, call_logits, dtypes_of, linear_case, logits_case, logits_of, pad, unpad
from no_device import device_path
from ranks import on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vocab_parallel import compare, options_of

from dapo_kernels import (
    OBJECTIVES,
    SamplingMask,
    dapo_loss,
    linear_dapo_loss,
    linear_preference_loss,
    linear_token_logprobs,
    policy_loss,
    token_logprobs,
    use_backend,
)
from dapo_kernels.backends import available_backends, registry
from dapo_kernels.engine.kept import KeptTokens, TruncatedSupport
from dapo_kernels.records import RowRequest, Slopes

V, H, LENGTHS = 67, 12, (7, 0, 2, 12, 3)  # a sequence without tokens
T = sum(LENGTHS)
TEMPERATURE = 0.5 + torch.rand(T, generator=torch.Generator().manual_seed(8))
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"atol": 1e-12, "rtol": 1e-11},
    torch.float32: {"atol": 1e-6, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-6, "rtol": 2**-7},
    torch.float16: {"atol": 1e-6, "rtol": 2**-9},
}


def kept_by(case: Case, garbage: bool = False) -> Tensor:
    """bool [T, V]: a third of the tokens keeps everything, one its target alone, the others between. ``garbage``: all
    leave something out.
    """
    generator = torch.Generator().manual_seed(1)
    share = torch.rand(T, 1, generator=generator)
    kept = torch.rand(T, V, generator=generator) < share
    kept[::3] = True
    kept[4] = False
    if garbage:
        kept[::3, :5] = False
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


def wide_leaves(case: Case) -> dict[str, Tensor]:
    return {name: x.detach().to(torch.float64, copy=True).requires_grad_() for name, x in case.leaves.items()}


def call(case: Case, objective: Any, **how: Any) -> tuple[Any, dict[str, Any]]:
    """The loss from hidden states or, without them, from logits."""
    if "logits" not in case.leaves:
        return call_linear(linear_dapo_loss, case, objective, **how)
    out, grad = call_logits(dapo_loss, case, objective, **how)
    return out, {"logits": grad}


def check(case: Case, objective: Any, how: dict[str, Any] | None = None, **options: Any) -> None:
    """Against the truth, with ``how`` for the call alone."""
    kept, dtype = kept_by(case), next(iter(case.leaves.values())).dtype
    if "generator" in options:
        options["generator"].manual_seed(1)
    got, grads = call(case, objective, sampling_mask=SamplingMask.from_kept(kept), entropy=True, **options, **how or {})
    if "generator" in options:
        options["generator"].manual_seed(1)
    leaves = wide_leaves(case)
    logprobs, entropy = stats_of(case, leaves, kept)
    with use_backend("torch"):
        old, advantages = case.old_logprobs.double(), case.advantages.double()
        truth = policy_loss(logprobs, old, advantages, entropy=entropy, objective=objective, **options)
    truth.loss.backward()
    close = CLOSE[torch.float64 if dtype == torch.float64 else torch.float32]
    for a, b in zip(got[:3], truth[:3], strict=True):
        torch.testing.assert_close(a.double(), b, **close)
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            torch.testing.assert_close(grads[name].double(), leaf.grad, **CLOSE[dtype])
    if "logits" in grads:
        assert not grads["logits"][~kept].any()


def own(logprobs: Tensor, entropy: Tensor, tokens: Any) -> Tensor:
    return -tokens.advantages * (logprobs - tokens.old_logprobs).exp() - 0.1 * entropy


# Of hidden states in one chunk and in several; of logits in a tensor of their own and in place.
WAYS = [(hidden_case, {}), (hidden_case, {"chunk_bytes": 5 * V * 8}), (rows_case, {})]
WAYS += [(rows_case, {"inplace_backward": True})]


@pytest.mark.parametrize("objective", [*OBJECTIVES, own])
def test_every_objective(backend: str, objective: Any) -> None:
    for made, how in WAYS:
        case = made(seed=3)
        options = options_of(objective, case) if isinstance(objective, str) else {"mask": case.mask}
        if objective == "clip_cov":
            options |= {"clip_cov": (0.3, -9.0, 9.0), "generator": torch.Generator()}
        if objective == "dapo":
            options["entropy_coef"] = 0.1
        check(case, objective, how, **options)


def test_every_dtype_and_the_path_of_a_device(backend: str) -> None:
    """Where nothing is left out by looking: the lists of all tokens beside every chunk."""
    for dtype in dtypes_of(backend):
        for how in ({}, {"inplace_backward": True}):
            check(rows_case(seed=7, dtype=dtype), "dapo", how, entropy_coef=0.1)
    for made, how in WAYS:
        case = made(seed=18)
        for more in ({"host_sync": False}, {}) if "hidden" in case.leaves else ({},):
            with device_path():
                check(case, "dapo", {**how, **more}, mask=case.mask)


@pytest.mark.parametrize("chunk_bytes", [None, 7 * V * 8])
def test_log_probs_and_entropies(backend: str, chunk_bytes: int | None) -> None:
    """Of both entries, and the gradient of both results; padded as well, and in place where hidden states are cut."""
    weights = torch.randn(2, T, generator=torch.Generator().manual_seed(2))
    width = max(LENGTHS)
    for case in (hidden_case(seed=9), rows_case(seed=9)):
        kept, leaves, given = kept_by(case), wide_leaves(case), case.fresh()
        expected = stats_of(case, leaves, kept)
        sum((w * x).sum() for w, x in zip(weights.double(), expected, strict=True)).backward()
        if "logits" in given:
            logits = torch.nn.utils.rnn.pad_sequence(given["logits"].split(LENGTHS), batch_first=True)
            ids, tau = pad(case.target_ids, LENGTHS, width, 0), pad(TEMPERATURE, LENGTHS, width, 1.0)
            how: dict[str, Any] = {"temperature": tau, "inplace_backward": chunk_bytes is not None}
            lists = SamplingMask.from_kept(pad(kept, LENGTHS, width, True))
            stats = token_logprobs(logits, ids, sampling_mask=lists, entropy=True, **how)
            got = [unpad(x, LENGTHS) for x in stats if x is not None]
        else:
            how = {"bias": given["bias"], "softcap": case.softcap, "temperature": TEMPERATURE}
            how |= {"sampling_mask": SamplingMask.from_kept(kept), "chunk_bytes": chunk_bytes, "entropy": True}
            got = list(linear_token_logprobs(given["hidden"], given["weight"], case.target_ids, **how))
        sum((w * x).sum() for w, x in zip(weights, got, strict=True)).backward()
        for a, b in (*zip(got, expected, strict=True), *((given[n].grad, leaf.grad) for n, leaf in leaves.items())):
            torch.testing.assert_close(a.double(), b, **CLOSE[torch.float32])


@pytest.mark.parametrize("made", [hidden_case, rows_case])
def test_no_list_at_all_changes_no_bit(backend: str, made: Any) -> None:
    """But for the sum over tokens."""
    case, absent = made(seed=10), SamplingMask.from_lists([[]] * T)
    how: dict[str, Any] = {"mask": case.mask, "entropy_coef": 0.1}
    (plain, truth), (got, grads) = (call(case, "dapo", sampling_mask=lists, **how) for lists in (None, absent))
    torch.testing.assert_close(got.loss, plain.loss, **CLOSE[torch.float32])
    assert torch.equal(got.logprobs, plain.logprobs)
    assert torch.equal(got.entropy, plain.entropy)
    assert all(torch.equal(grads[name], grad) for name, grad in truth.items())


def test_what_was_not_kept_may_hold_anything(backend: str) -> None:
    """Nor do the columns behind a padded vocabulary matter. What was kept and is not finite shows."""
    case = rows_case(seed=12)
    kept = kept_by(case, garbage=True)
    lists = SamplingMask.from_kept(kept)
    garbage = torch.tensor([math.nan, math.inf, -math.inf])[torch.arange(T * V).view(T, V) % 3]
    rows = torch.where(kept, case.leaves["logits"], garbage)
    wide = torch.cat([rows, torch.full((T, 3), math.nan)], 1)
    for how in ({}, {"inplace_backward": True}):
        how |= {"sampling_mask": lists, "entropy_coef": 0.1}
        a, expected = call(case, "dapo", **how)
        for logits, valid in ((rows, None), (wide, V)):
            b, grads = call(replace(case, leaves={"logits": logits}), "dapo", valid_vocab=valid, **how)
            assert torch.equal(a.loss, b.loss)
            assert torch.equal(grads["logits"][:, :V], expected["logits"])
            assert not grads["logits"][:, V:].any()
        impossible = SamplingMask.from_kept(kept | (garbage == -math.inf))  # kept logits of -inf change nothing
        b, grads = call(replace(case, leaves={"logits": rows}), "dapo", **{**how, "sampling_mask": impossible})
        torch.testing.assert_close((b.loss, grads["logits"]), (a.loss, expected["logits"]))
    rows[1, case.target_ids[1]] = math.nan
    assert token_logprobs(rows, case.target_ids, sampling_mask=lists).logprobs[1].isnan()
    for dtype in dtypes_of(backend):
        alone = torch.tensor([[0.0, math.nan], [0.0, math.inf], [0.0, -math.inf]], dtype=dtype)
        only = SamplingMask.from_lists([[1]] * 3)
        assert token_logprobs(alone, torch.ones(3).long(), sampling_mask=only).logprobs.isnan().all()


def test_ids_of_any_stride_dead_tokens_lists_of_anything_and_no_tokens(backend: str) -> None:
    case = hidden_case(seed=13)
    rows = [row.nonzero()[:, 0].tolist() for row in kept_by(case)]
    lists = SamplingMask.from_lists(rows)
    strided = lists._replace(ids=lists.ids.long().repeat_interleave(2)[::2])
    live = case.mask.tolist()
    wrong = SamplingMask.from_lists([row if ok else [-7, 5, 5, 10**6] for row, ok in zip(rows, live, strict=True)])
    a, grads = call(case, "dapo", sampling_mask=lists, mask=case.mask)
    for other in (strided, wrong):
        b, same = call(case, "dapo", sampling_mask=other, mask=case.mask)
        assert torch.equal(a.loss, b.loss)
        assert all(torch.equal(grads[name], same[name]) for name in grads)
    empty, nothing = torch.zeros(0, H, requires_grad=True), torch.zeros(0)
    tokens = (nothing.long(), nothing, nothing)
    assert linear_dapo_loss(empty, torch.ones(V, H), *tokens, sampling_mask=SamplingMask.from_lists([])).loss == 0


def test_16_bits_round_once(backend: str) -> None:
    """A softcap applied in float32: rounded again, log-probs were off by 8e-4. And float32 logits."""
    case = hidden_case(seed=21, dtype=torch.bfloat16)
    kept = kept_by(case, garbage=True)
    how: dict[str, Any] = {"sampling_mask": SamplingMask.from_kept(kept), "mask": case.mask}
    with use_backend("torch"):
        expected, _ = call(case, "dapo", **how)
    torch.testing.assert_close(call(case, "dapo", **how)[0].logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    leaves = wide_leaves(case)
    truth = torch.where(case.mask, stats_of(case, leaves, kept)[0], 0.0)
    got, _ = call(case, "dapo", float32_logits=True, **how)
    torch.testing.assert_close(got.logprobs.double(), truth.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_rows", [3, 20])
def test_lists_longer_than_a_kernels_block(backend: str, restore_threads: None, n_rows: int) -> None:
    """Of 1 to 9000 tokens, one beside the other, peaked, in any order; the same bits on one thread."""
    vocab, lengths = 9000, [1, 2048, 2049, 9000, 5001, 0]
    generator = torch.Generator().manual_seed(19)
    logits = 8.0 * torch.randn(n_rows, vocab, generator=generator)
    logits[1] += 3.0e4
    lists = [torch.randperm(vocab, generator=generator)[: lengths[row % len(lengths)]] for row in range(n_rows)]
    mask = SamplingMask.from_lists([row.tolist() for row in lists])
    target_ids = torch.tensor([int(row[len(row) // 2]) if len(row) else 7 for row in lists])
    kept = torch.zeros(n_rows, vocab, dtype=torch.bool)
    for row, ids in zip(kept, lists, strict=True):
        row[ids if len(ids) else slice(None)] = True
    case = replace(rows_case(), leaves={"logits": logits}, temperature=1.0, target_ids=target_ids)
    exact, weights = wide_leaves(case), torch.randn(2, n_rows, generator=generator)
    expected = stats_of(case, exact, kept)
    sum((w * x).sum() for w, x in zip(weights.double(), expected, strict=True)).backward()
    results = []
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        leaf = logits.clone().requires_grad_()
        stats = token_logprobs(leaf, target_ids, entropy=True, sampling_mask=mask)
        sum((w * x).sum() for w, x in zip(weights, stats, strict=True)).backward()
        results.append([*stats, leaf.grad])
        for a, b in zip(results[-1], (*expected, exact["logits"].grad), strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("by", ["cpp", "torch"])
def test_repeated_ids_are_found(by: str) -> None:
    """Of live rows alone, whatever the order and however far from any vocabulary."""
    if available_backends()[by] is not None:
        pytest.skip("not built")
    find = registry.backend(by).find_repeated
    generator = torch.Generator().manual_seed(3)
    for seed in range(100):
        counts = torch.randint(0, 9, (6,), generator=generator)
        ids = torch.randint(-2, 40, (int(counts.sum()),), generator=generator)
        ids[ids == 39] = 2**40
        if seed % 3 == 0:
            ids = torch.cat([part.sort().values for part in ids.split(counts.tolist())])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        live = torch.rand(6, generator=generator) < 0.7
        rows = [part.tolist() if ok else [] for part, ok in zip(ids.split(counts.tolist()), live.tolist(), strict=True)]
        repeated = {(row, x) for row, of in enumerate(rows) for x in of if 0 <= x < 2**31 and of.count(x) > 1}
        at = find(ids, offsets, live)
        assert (at is None) == (not repeated)
        if at is not None:
            row = int(torch.searchsorted(offsets, at, right=True)) - 1
            assert (row, int(ids[at])) in repeated


@pytest.mark.parametrize("made", [hidden_case, rows_case])
def test_lists_that_do_not_fit(made: Any) -> None:
    case = made(seed=16)
    whole, target = [[*range(V)]] * T, int(case.target_ids[4])
    good = SamplingMask.from_lists(whole)

    def fourth(*ids: int) -> SamplingMask:
        return SamplingMask.from_lists([*whole[:4], list(ids), *whole[5:]])

    without_targets = [[x for x in range(V) if x != int(target)] for target in case.target_ids]
    wrong: list[tuple[Any, type[Exception], str]] = [
        (fourth(*without_targets[4]), ValueError, f"4 .*{target}.* {V - 1} "),
        (SamplingMask.from_lists(whole[:4] + without_targets[4:]), ValueError, "token 4"),  # the first
        (fourth(target, *{3, 9} - {target}, 9 if target == 3 else 3), ValueError, "token 4"),  # twice
        (fourth(target, V), IndexError, rf"4 .*{V}, .*\[0, V\)"),
        (fourth(target, -1, -1), IndexError, r"4 .* -1, .*\[0, V\)"),
        (SamplingMask.from_lists(whole[1:]), ValueError, rf"offsets .*\[{T + 1}\].*\[{T}\]"),
        (good._replace(offsets=good.offsets.flip(0)), ValueError, "offsets .*K="),
        (good._replace(ids=good.ids.float()), TypeError, "ids .*torch.float32"),
        (good.ids, TypeError, "sampling_mask .*Tensor"),
    ]
    for lists, kind, named in wrong:
        with pytest.raises(kind, match=named):
            call(case, "dapo", sampling_mask=lists, **({"chunk_bytes": 1} if "hidden" in case.leaves else {}))
    with pytest.raises(TypeError, match="kept"):
        SamplingMask.from_kept(torch.ones(T, V))
    given: Any = (torch.zeros(T, H), torch.zeros(V, H), torch.zeros(T).long(), None)
    with pytest.raises(TypeError, match="'sampling_mask'"):
        linear_preference_loss(*given, pairs=torch.tensor([[0, 2]]), sampling_mask=good)


# --- as on a GPU ------------------------------------------------------------------------------------------


class OneWriter(TorchDispatchMode):
    """Operations that write one address more than once raise AssertionError, unless they write the same value: on a GPU
    those would be atomics that wait for each other, or a sort.
    """

    writes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        adds = name.startswith(("index_add", "scatter", "index_reduce", "bincount", "put_"))
        assert not (adds and args[0].dim() == 1), name  # one address
        if name == "index_put_":
            self.writes += 1
            assert not (args[3] if len(args) > 3 else kwargs.get("accumulate", False))
            places = torch.stack(torch.broadcast_tensors(*args[1]), dim=-1)
            found = torch.cat([places, args[2].double().expand(len(places))[:, None].view(torch.int64)], dim=-1)
            assert len(found.unique(dim=0)) == len(places.unique(dim=0))
        return func(*args, **kwargs)


CHUNKS = [slice(6, 12), torch.tensor([1, 4, 9, 10, 20, 23]), torch.tensor([23, 4, 9, 20, 1, 10])]


@pytest.mark.parametrize("rows", [*CHUNKS, torch.tensor([3, 9])], ids=["slice", "tensor", "any order", "no lists"])
def test_lists_of_other_chunks_are_not_written(rows: slice | Tensor) -> None:
    """On a device the tokens kept in other chunks stand beside every chunk."""
    case = rows_case(seed=18)
    kept = kept_by(case)
    live, listed = torch.ones(T, dtype=torch.bool), ~kept.all(1)
    lists = kept & listed[:, None]
    of, ids = lists.nonzero().unbind(1)
    offsets = torch.nn.functional.pad(lists.sum(1).cumsum(0), (1, 0))
    request = RowRequest(case.target_ids, live, 1.0, TEMPERATURE, True, False, listed, ids, of, offsets)
    by, logits = registry.backend("torch"), case.leaves["logits"]
    slopes = Slopes(torch.ones(T), torch.ones(T))
    logits[10], slopes.logprobs[10], slopes.entropy[10] = torch.nan, 0.0, 0.0
    whole = KeptTokens(by, request)
    truth, expected = whole.row_stats(logits, request), torch.empty_like(logits)
    whole.row_grad(expected, logits, request, truth, slopes)
    with device_path(), OneWriter() as watched:
        chunk = request.at(rows)
        stats = KeptTokens(by, chunk).row_stats(logits[rows].clone(), chunk)
        gradient = torch.empty_like(logits[rows])
        KeptTokens(by, chunk).row_grad(gradient, logits[rows].clone(), chunk, stats, slopes.at(rows))
    assert watched.writes > 0
    torch.testing.assert_close(stats.logprobs, truth.logprobs[rows], equal_nan=True)
    torch.testing.assert_close(gradient, expected[rows])
    assert gradient.any()


@pytest.mark.parametrize("wrong", [[0, 4, 3], [0, 1, 4], [1, 2, 4], [0, 1, 2]])
def test_offsets_on_a_device(wrong: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read at them."""
    monkeypatch.setattr(torch, "segment_reduce", None)
    logits, ids = torch.zeros(2, 9), torch.tensor([1, 2])
    lists = SamplingMask(torch.tensor([1, 2, 3]), torch.tensor(wrong))
    with use_backend("torch"), device_path(), pytest.raises(RuntimeError):
        token_logprobs(logits, ids, sampling_mask=lists)


def test_ids_of_other_ranks_are_none_of_these_columns() -> None:
    """On a device each of them has the place of an id that is."""
    live = torch.tensor([True])
    lists = (live, torch.arange(-40, 60), torch.zeros(100, dtype=torch.int64), torch.tensor([0, 100]))
    request = RowRequest(torch.tensor([3]), live, 1.0, None, True, True, *lists)
    for path, n_others in ((nullcontext(), 0), (device_path(), 80)):
        with path:
            found = TruncatedSupport.of(torch.zeros(1, 20, dtype=torch.float64), request)
        assert found.ids[found.here].tolist() == list(range(20))
        assert found.ids[~found.here].tolist() == [0] * n_others


# --- a vocabulary that ranks share ------------------------------------------------------------------------


def shared(rank: int) -> None:
    """Also on the path of a device, which gathers what is kept itself."""
    group = dist.group.WORLD
    for cut in ((34, 33), (66, 1), (67, 0)):
        for case, more in ((hidden_case(seed=17), {"chunk_bytes": 5 * V * 8}), (rows_case(seed=17), {})):
            how: dict[str, Any] = {"mask": case.mask, "sampling_mask": SamplingMask.from_kept(kept_by(case)), **more}
            compare(group, case, cut, "dapo", entropy_coef=0.1, **how)
            compare(group, case, cut, "gspo", cu_seqlens=case.cu_seqlens, entropy=True, **how)
            with device_path(), patch("torch.cuda.is_current_stream_capturing", return_value=False):
                compare(group, case, cut, "dapo", entropy_coef=0.1, **how)
    differing = [[int(x), *({2 * rank} - {int(x)})] for x in case.target_ids]
    with pytest.raises(ValueError, match="target_ids"):
        call(case, "dapo", sampling_mask=SamplingMask.from_lists(differing), group=group)


@pytest.mark.ranks
def test_ranks_that_share_a_vocabulary() -> None:
    on_ranks(2, shared)
