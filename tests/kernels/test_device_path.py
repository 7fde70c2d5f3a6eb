"""The path of CUDA tensors, checked without a GPU: chunk plans, what is launched, that nothing waits for the device,
and the numbers that its way of skipping work gives.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from cases import Case, linear_case
from closeness import as_accurate
from hypothesis import given, settings
from hypothesis import strategies as st
from no_device import HostWaitError, NoAtomics, NoWaiting, record_launches, record_products
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dapo_kernels import (
    OBJECTIVES,
    LoraFactors,
    dapo_loss,
    layout,
    linear_dapo_loss,
    linear_distillation_loss,
    linear_token_logprobs,
    memory,
    policy_loss,
    preference_loss_from_logprobs,
    summarize,
    token_logprobs,
    use_backend,
)
from dapo_kernels.backends import divergence
from dapo_kernels.engine import chunks, distillation, gradients, hidden
from dapo_kernels.engine.chunks import ROW_MULTIPLE, Chunks, Work, device_chunk_rows, live_work, row_stride
from dapo_kernels.head import head_of_call
from dapo_kernels.layout import layout_of
from dapo_kernels.objectives import aggregate
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import Head, Needs, Plan, RowRequest, RowStats, Slopes, Tokens

GIB = 2**30
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install triton)"
)


# --- the size of a chunk ----------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, database=None)
@given(
    n_rows=st.integers(0, 50_000),
    vocab=st.sampled_from([1, 37, 32_000, 50_257, 151_936]),
    bytes_per_logit=st.sampled_from([2, 4, 6]),
    chunk_bytes=st.sampled_from([None, 1, 10**6, 10**8, 10**9, 10**12]),
    sum_bytes=st.sampled_from([0, 545 * 2**20, 3 * GIB]),
)
def test_chunks_cover_the_rows_within_their_bytes(
    n_rows: int, vocab: int, bytes_per_logit: int, chunk_bytes: int | None, sum_bytes: int
) -> None:
    size = device_chunk_rows(n_rows, vocab, bytes_per_logit, chunk_bytes, sum_bytes)
    assert 1 <= size <= max(1, n_rows)
    row_bytes = row_stride(vocab) * bytes_per_logit
    n_chunks = -(-n_rows // size)
    if chunk_bytes is not None:
        assert size * row_bytes <= max(chunk_bytes, row_bytes)
    elif n_chunks == 1:
        assert size * row_bytes <= max(GIB + sum_bytes, row_bytes)
    else:
        assert size * row_bytes <= GIB
    if n_chunks > 1 and (chunk_bytes or GIB) >= ROW_MULTIPLE * row_bytes:
        assert size % ROW_MULTIPLE == 0
        # Evened out: no more chunks than the bytes ask for.
        assert n_chunks == -(-n_rows // ((chunk_bytes or GIB) // row_bytes // ROW_MULTIPLE * ROW_MULTIPLE))


def test_one_chunk_where_it_saves_the_running_sum() -> None:
    """8192 tokens of a 4096-wide head: 2.3 GiB of logits, where chunks would take 1 GiB and a sum of 2.3 GiB."""
    sum_bytes = 4 * 151_936 * 4096
    assert device_chunk_rows(8192, 151_936, 2, None, sum_bytes) == 8192
    assert device_chunk_rows(8192, 151_936, 2, None, 0) == 2816
    assert device_chunk_rows(20_480, 151_936, 2, None, sum_bytes) == 3456
    assert device_chunk_rows(8192, 151_936, 2, 200_000_000, sum_bytes) == 640


def test_rows_of_the_buffer_start_aligned() -> None:
    assert row_stride(151_936) == 151_936
    assert row_stride(50_257) == 50_272
    with NoWaiting():
        like = torch.empty(300, 8, device="meta", dtype=torch.bfloat16)
        made = Chunks(Work(None, 300, 300), like, 50_257, like.dtype, 2, 128 * 50_272 * 2)
        shapes = [(c.rows, tuple(c.logits.shape), c.logits.stride()) for c in made]
    assert shapes == [
        (slice(0, 128), (128, 50_257), (50_272, 1)),
        (slice(128, 256), (128, 50_257), (50_272, 1)),
        (slice(256, 300), (44, 50_257), (50_272, 1)),
    ]


def test_scratch_memory_of_a_device_is_the_allocators() -> None:
    """Kept by nobody: a graph's replay or another stream could still be using it."""
    memory.release_workspace()
    with NoWaiting():
        memory.workspace((8, 8), torch.float32, torch.device("meta"))
    assert memory.kept_bytes() == 0


# --- which rows -------------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the path of CUDA tensors."""
    for module in (aggregate, chunks, hidden, gradients, distillation, divergence):
        monkeypatch.setattr(module, "on_host", lambda x: False)


def test_active_rows_come_first_then_idle_ones(as_on_a_device: None) -> None:
    live = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    idle = torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.bool)
    work = live_work(live, idle, None)
    assert work.at is not None
    assert (work.at.tolist(), work.n, work.n_active) == ([0, 3, 5, 2], 4, 3)
    made = list(Chunks(work, torch.empty(6, 2), 4, torch.float32, 4, 2 * 16 * 4))
    assert [(c.rows.tolist(), c.n_active) for c in made] == [([0, 3], 2), ([5, 2], 1)]
    assert live_work(live, idle, False) == Work(None, 6, 6)
    assert live_work(torch.ones(3, dtype=torch.bool), None, True) == Work(None, 3, 3)


@pytest.mark.parametrize(
    ("said", "capturing", "debug_mode", "waits"),
    [
        (None, False, 0, True),
        (None, True, 0, False),
        (None, False, 1, False),
        (None, False, 2, False),
        (True, True, 2, True),
        (False, False, 0, False),
    ],
)
def test_when_a_call_may_wait(
    monkeypatch: pytest.MonkeyPatch, said: bool | None, capturing: bool, debug_mode: int, waits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: debug_mode)
    assert chunks.may_wait(said) is waits


def test_without_a_mask_there_is_nothing_to_wait_for() -> None:
    states, weight = torch.zeros(3, 2), torch.zeros(4, 2)
    layout = layout_of("linear_dapo_loss", "hidden", states)

    def host_sync(mask: Tensor | None, **said: Any) -> bool | None:
        return head_of_call(layout, states, weight, mask, said)[1].host_sync

    assert host_sync(None) is False
    assert host_sync(torch.ones(3)) is None
    assert host_sync(None, host_sync=True) is True
    with pytest.raises(TypeError, match="host_sync"):
        host_sync(None, host_sync=1)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_tokens_without_advantage_are_idle_only_where_nothing_else_has_a_gradient(
    kl_coef: float, entropy_coef: float
) -> None:
    live = torch.ones(4, dtype=torch.bool)
    weights, advantages, importance = (torch.tensor(x) for x in ([0.0, 1, 1, 1], [1.0, 0, 1, 1], [1.0, 1, 0, 1]))
    tokens = Tokens(live, weights, advantages, None, torch.zeros(4), importance)
    scalars = ObjectiveScalars.of(OBJECTIVES["dapo"])._replace(kl_coef=kl_coef, entropy_coef=entropy_coef)
    alone = kl_coef == entropy_coef == 0
    assert chunks.idle_beforehand(tokens, scalars).tolist() == [True, alone, alone, False]


def test_chunks_of_a_distillation_hold_the_logits_of_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Watched(Chunks):
        def buffer(self, dtype: torch.dtype) -> Tensor:
            found = super().buffer(dtype)
            seen.append(found.shape[0])
            return found

    monkeypatch.setattr(distillation, "Chunks", Watched)
    policy, reference = ((torch.randn(40, 8), torch.randn(50, 8)) for _ in range(2))
    linear_distillation_loss(*policy, *reference, chunk_bytes=10 * 50 * (4 + 4))
    assert set(seen) == {10}


@needs_triton
def test_the_cuda_backend_takes_the_divergence_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dapo_kernels._cuda")
    from dapo_kernels.backends import cuda, registry

    launches = record_launches(monkeypatch)
    monkeypatch.setitem(registry._reasons, "triton", None)
    rows, live = torch.empty(5, 64, device="meta"), torch.empty(5, dtype=torch.bool, device="meta")
    request = RowRequest(torch.empty(5, dtype=torch.int64, device="meta"), live, 1.0, None, False)
    found = cuda.row_divergence_(rows, rows, request, rows[:, 0], divergence.Distance(0.5, None, None))
    assert (launches.names, found.device.type) == (["row_divergence_kernel"], "meta")


# --- nothing waits ----------------------------------------------------------------------------------------

T, V, H = 300, 1000, 16


def problem(dtype: torch.dtype) -> dict[str, Any]:
    def on_device(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device="meta", dtype=kind)

    def leaf(*shape: int) -> Tensor:
        return on_device(*shape, kind=dtype).requires_grad_()

    return {
        "logits": leaf(T, V),
        "hidden": leaf(T, H),
        "weight": leaf(V, H),
        "bias": leaf(V),
        "target_ids": on_device(T, kind=torch.int64),
        "old_logprobs": on_device(T),
        "advantages": on_device(4),
        "mask": on_device(T, kind=torch.bool),
        "cu_seqlens": on_device(5, kind=torch.int32),
        "ref_logprobs": on_device(T),
        "temperature": on_device(T),
    }


def loss_keywords(p: dict[str, Any], name: str) -> dict[str, Any]:
    row = OBJECTIVES[name]
    said = {"objective": name, "mask": p["mask"], "cu_seqlens": p["cu_seqlens"], "temperature": p["temperature"]}
    if row.kl_coef != 0 and row.kl_to == "reference":
        said["ref_logprobs"] = p["ref_logprobs"]
    if row.aggregate == "seq-mean-token-sum-norm":
        said["length_norm"] = 64.0
    return said


@needs_triton
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_public_function_waits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Validation, ratios, selections, metrics, both passes. The operators themselves do not run, in-place forms do."""
    launches = record_launches(monkeypatch)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # it does not know the meta device
    with NoWaiting():
        p = problem(torch.bfloat16)
        said = loss_keywords(p, name)
        tokens = (p["target_ids"], p["old_logprobs"], p["advantages"])
        for inplace in (False, True):
            dapo_loss(p["logits"] * 1, *tokens, inplace_backward=inplace, entropy=True, **said).loss.backward()
            token_logprobs(p["logits"] * 1, tokens[0], entropy=True, inplace_backward=inplace).logprobs.sum().backward()
        linear_dapo_loss(p["hidden"], p["weight"], *tokens, **said).loss.backward()
        linear_token_logprobs(p["hidden"], p["weight"], tokens[0], mask=p["mask"]).logprobs.sum().backward()
        del said["temperature"]
        entropy, logprobs = (torch.empty(T, device="meta", requires_grad=True) for _ in range(2))
        policy_loss(logprobs, *tokens[1:], entropy=entropy, **said).loss.backward()
    one = ["row_loss_kernel"] if OBJECTIVES[name].one_pass else ["row_stats_kernel", "row_grad_kernel"]
    assert launches.names == [*one, "row_stats_kernel", "row_grad_kernel"]


def test_positive_logprobs_are_counted_where_looking_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "readable", lambda x: False)
    logprobs, ref = torch.tensor([-1.0, 0.3, -1.0, 0.3, -2.0, -1.0]), torch.tensor([-1.0, 0.2, 0.2, -1.0, -1.0, -1.0])
    old, mask = torch.tensor([-1.0, -1.0, -1.0, -1.0, 0.9, math.nan]), torch.tensor([1, 1, 1, 0, 1, 1])
    kl: dict[str, Any] = {"kl_coef": 0.1, "ref_logprobs": ref}
    one = policy_loss(logprobs, old, torch.ones(6), mask=mask, **kl).metrics
    none = policy_loss(-logprobs.abs(), None, torch.ones(6)).metrics
    assert summarize(one)["positive_logprobs"] == 3
    assert summarize([one, none, one])["positive_logprobs"] == 6  # a count, no mean
    pairs: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 2, 4, 5, 6]), "mask": torch.tensor([1, 1, 1, 0, 1, 1])}
    assert summarize(preference_loss_from_logprobs(logprobs, ref, **pairs).metrics)["positive_logprobs"] == 2
    sums = torch.tensor([-3.0, -2.0, 4.0, -1.0])
    assert summarize(preference_loss_from_logprobs(ref - 1, sums, **pairs).metrics)["positive_logprobs"] == 1
    with NoWaiting():
        entries = [torch.empty(6, device="meta") for _ in range(4)]
        dict(policy_loss(*entries[:3], kl_coef=0.1, ref_logprobs=entries[3]).metrics)


@needs_triton
def test_numbers_of_the_host_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """0-d tensors on the CPU, as a token count or a schedule's temperature may be."""
    launches = record_launches(monkeypatch)
    with NoWaiting():
        p = problem(torch.float32)
        logprobs = torch.empty(T, device="meta")
        for name in ("dapo", "dr_grpo"):
            said = {"objective": name, "cu_seqlens": p["cu_seqlens"], "denominator": torch.tensor(300)}
            if name == "dr_grpo":
                said["length_norm"] = 64.0
            policy_loss(logprobs, p["old_logprobs"], p["advantages"], **said)
        temperature = torch.tensor(0.9, dtype=torch.float64)
        stats = token_logprobs(p["logits"] * 1, p["target_ids"], temperature=temperature, inplace_backward=True)
    assert stats.logprobs.dtype == torch.float32
    assert [(x.shape, x.dtype) for x in launches.arguments[-1][7:8]] == [((T,), torch.float32)]


@needs_triton
@pytest.mark.parametrize("name", OBJECTIVES)
def test_sums_have_one_order(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Sums over sequences and batches, forwards and backwards, give the same bits on every run."""
    record_launches(monkeypatch)
    with NoAtomics():
        p = problem(torch.float32)
        said = loss_keywords(p, name)
        del said["temperature"]
        entropy, logprobs = (torch.empty(T, device="meta", requires_grad=True) for _ in range(2))
        policy_loss(logprobs, p["old_logprobs"], p["advantages"], entropy=entropy, **said).loss.backward()


def run_linear(
    dtype: torch.dtype, host_sync: bool, backend: str, *, chunk_bytes: int | None = None, **head: Any
) -> tuple[Any, ...]:
    """The operators' bodies: the loss with its gradients, then the gradient from the log-probs'."""
    p = problem(dtype)
    leaves = Head(p["hidden"], p["weight"], head.get("bias"), head.get("softcap"), head.get("float32_logits", False))
    advantages = torch.empty(T, device="meta")
    weights = torch.empty(T, device="meta")
    tokens = Tokens(p["mask"], weights, advantages, p["old_logprobs"], p["ref_logprobs"], None)
    scalars = ObjectiveScalars.of(OBJECTIVES["grpo"])
    plan = Plan(chunk_bytes, host_sync, None, backend)
    needs = Needs(True, True, leaves.bias is not None)
    request = RowRequest(p["target_ids"], p["mask"], 1.0, p["temperature"], True)
    with torch.no_grad():
        out = hidden.linear_loss.run(leaves, request, tokens, scalars._replace(entropy_coef=0.1), needs, plan)
        stats: RowStats = hidden.linear_stats.run(leaves, request, plan)
        more = hidden.linear_grad.run(leaves, request, stats, Slopes(weights, advantages), needs, plan)
        return out, out[5:], more


@needs_triton
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_linear_path_does_not_wait(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, softcap: float) -> None:
    """Every chunk at shapes that follow from N, row kernels and GEMMs included; dW in float32."""
    launches, products = record_launches(monkeypatch), record_products(monkeypatch)
    chunk = ROW_MULTIPLE * row_stride(V) * dtype.itemsize
    with NoWaiting():
        out, formed, more = run_linear(dtype, False, "triton", chunk_bytes=chunk, softcap=softcap)
        assert out.logprobs.shape == (T,)
        for g in (formed, more):
            assert [None if x is None else tuple(x.shape) for x in g] == [(T, H), (V, H), None, None, None]
            assert all(x is None or x.dtype == dtype for x in g)
    rows = [128, 128, 44]
    kernels = ("row_loss_kernel", "row_stats_kernel", "row_grad_kernel")
    assert launches.seen == [(kernel, n) for kernel in kernels for n in rows]
    assert products == [(torch.float32, dtype, add) for add in (False, True, True)] * 2


@needs_triton
def test_one_chunk_writes_dw_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    record_launches(monkeypatch)
    products = record_products(monkeypatch)
    with NoWaiting():
        run_linear(torch.bfloat16, False, "triton")
    assert products == [(torch.bfloat16, torch.bfloat16, False)] * 2


@needs_triton
def test_the_buffer_is_free_before_dw_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffer, float32 sum and result at once would be the peak of memory."""
    launches, _ = record_launches(monkeypatch), record_products(monkeypatch)
    buffers: list[StorageWeakRef] = []
    workspace, results = chunks.workspace, gradients.GradientSum.results

    def watched(*args: Any) -> Tensor:
        made = workspace(*args)
        buffers.append(StorageWeakRef(made.untyped_storage()))
        return made

    def checked(total: gradients.GradientSum) -> Any:
        assert total.weight_float32 is not None
        launches.arguments.clear()
        assert all(buffer.expired() for buffer in buffers)
        return results(total)

    monkeypatch.setattr(chunks, "workspace", watched)
    monkeypatch.setattr(gradients.GradientSum, "results", checked)
    run_linear(torch.bfloat16, False, "triton", chunk_bytes=ROW_MULTIPLE * row_stride(V) * 2)
    assert len(buffers) == 3


def test_other_backends_and_heads_do_not_wait_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softcap and float32 logits in torch, bias."""
    with NoWaiting():
        bias = torch.empty(V, device="meta", dtype=torch.bfloat16)
        head = {"bias": bias, "softcap": 20.0, "float32_logits": True}
        _, formed, _ = run_linear(torch.bfloat16, False, "torch", chunk_bytes=10**6, **head)
        assert formed[2].shape == (V,)


@needs_triton
def test_the_detector_sees_the_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    record_launches(monkeypatch)
    record_products(monkeypatch)
    with NoWaiting(), pytest.raises(HostWaitError, match=r"_local_scalar_dense|_to_copy"):
        run_linear(torch.bfloat16, True, "triton")


# --- the numbers ------------------------------------------------------------------------------------------


def gradients_of(case: Case, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
    leaves = case.fresh()
    out = linear_dapo_loss(
        leaves["hidden"],
        leaves["weight"],
        case.target_ids,
        case.old_logprobs,
        case.advantages,
        bias=leaves["bias"],
        softcap=case.softcap,
        mask=case.mask,
        cu_seqlens=case.cu_seqlens,
        **kwargs,
    )
    out.loss.backward()
    return out, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.fixture(params=[True, False], ids=["one-wait", "no-wait"])
def host_sync(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize("chunk_bytes", [None, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_skipping_work_as_on_a_device_gives_the_hosts_numbers(
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    chunk_bytes: int | None,
    name: str,
    host_sync: bool,
) -> None:
    """Dead tokens full of NaN, tokens with no advantage or no weight, in one chunk and in several."""
    case = linear_case(67, 12, (9, 1, 14, 7), dtype=dtype, bias=True, softcap=20.0, seed=3)
    case.advantages[::4] = 0.0
    dead = case.mask.logical_not()
    assert int(dead.sum()) > 4
    weights = torch.ones_like(case.advantages)
    weights[1::5] = 0.0
    said = {"objective": name, "chunk_bytes": chunk_bytes, "importance_weights": weights}
    expected, truth = gradients_of(case, **said)
    with use_backend("torch"):
        _, eager = gradients_of(case, **said)
    case.leaves["hidden"] = case.leaves["hidden"].masked_fill(dead[:, None], torch.nan)
    for field in ("old_logprobs", "advantages"):
        setattr(case, field, getattr(case, field).masked_fill(dead, torch.nan))
    for module in (aggregate, chunks, hidden, gradients, distillation, divergence):
        monkeypatch.setattr(module, "on_host", lambda x: False)
    out, grads = gradients_of(case, host_sync=host_sync, **said)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.logprobs, expected.logprobs, rtol=1e-5, atol=2e-6)
    assert not grads["hidden"][dead].any()
    for key, grad in grads.items():
        rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}[dtype] * float(truth[key].abs().max())
        as_accurate(grad, truth[key], eager[key] + rounding, what=key)


def test_a_batch_without_live_tokens(as_on_a_device: None, host_sync: bool) -> None:
    case = linear_case(67, 12, (5, 4), bias=True, seed=4)
    case.mask[:] = False
    for chunk_bytes in (None, 1500):
        out, grads = gradients_of(case, host_sync=host_sync, chunk_bytes=chunk_bytes)
        assert out.loss.item() == 0.0
        assert all(not grad.any() for grad in grads.values())


@needs_triton
def test_factors_and_divergences_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    record_launches(monkeypatch)
    p = problem(torch.float32)
    a, b, weights = (torch.empty(shape, device="meta") for shape in ((3, H), (V, 3), (T,)))
    head = Head(p["hidden"], p["weight"], None, None, False, a, b, 0.5)
    tokens = Tokens(p["mask"], weights, weights, p["old_logprobs"], None, None)
    request = RowRequest(p["target_ids"], p["mask"], 1.0, p["temperature"], False)
    rest = (Needs(True, True, False, True, True), Plan(ROW_MULTIPLE * row_stride(V) * 4, False, None, "triton"))
    with torch.no_grad(), NoWaiting():
        loss = hidden.linear_loss.run(head, request, tokens, ObjectiveScalars.of(OBJECTIVES["dapo"]), *rest)
        divergence = distillation.linear_divergence.run(head, head, request, weights, 0.3, *rest)
    for out in (loss, divergence):
        shapes = [None if x is None else tuple(x.shape) for x in out[-5:]]
        assert shapes == [(T, H), (V, H), None, (3, H), (V, 3)]


@pytest.mark.parametrize("host_sync", [True, False])
@pytest.mark.parametrize("chunk_bytes", [None, 5 * 48 * 4])
def test_factors_and_divergences_of_a_device(
    as_on_a_device: None, monkeypatch: pytest.MonkeyPatch, host_sync: bool, chunk_bytes: int | None
) -> None:
    """The rows that dead tokens leave, with NaN in them, change nothing; as on the host."""
    case = linear_case(47, 8, seed=91, rank=3)
    case.leaves["hidden"][~case.mask] = torch.nan

    def run() -> list[Any]:
        x = case.fresh()
        lora = LoraFactors(x["lora_a"], x["lora_b"], 1.5)
        how: dict[str, Any] = {"lora": lora, "mask": case.mask, "host_sync": host_sync, "chunk_bytes": chunk_bytes}
        tokens = (case.target_ids, case.old_logprobs, case.advantages)
        loss = linear_dapo_loss(x["hidden"], x["weight"], *tokens, **how).loss
        of_ref = (case.leaves["hidden"].flip(1), case.leaves["weight"])
        loss = loss + linear_distillation_loss(x["hidden"], x["weight"], *of_ref, beta=0.3, **how).loss
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in x.values())]

    got = run()
    monkeypatch.undo()
    for a, b in zip(got, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
