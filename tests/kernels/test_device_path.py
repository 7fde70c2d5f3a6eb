"""The path of CUDA tensors without a GPU: chunk plans, launches, no waiting for the device, the numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import LORA_SCALE, Case, linear_case
from hypothesis import given, settings
from hypothesis import strategies as st
from no_device import HostWaitError, Launches, NoAtomics, NoWaiting, device_path
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from vocab_parallel import options_of

from dapo_kernels import (
    OBJECTIVES,
    LoraFactors,
    SamplingMask,
    dapo_loss,
    linear_dapo_loss,
    linear_distillation_loss,
    linear_preference_loss,
    linear_token_logprobs,
    memory,
    policy_loss,
    preference_loss_from_logprobs,
    summarize,
    token_logprobs,
    use_backend,
)
from dapo_kernels.backends import divergence
from dapo_kernels.engine import chunks, distillation, hidden
from dapo_kernels.engine.chunks import ROW_MULTIPLE, Chunks, Work, device_chunk_rows, row_stride
from dapo_kernels.head import head_of_call
from dapo_kernels.layout import layout_of
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import Head, Needs, Plan, RowRequest, Slopes, Tokens

GIB = 2**30
T, V, H = 300, 1000, 16

# --- the size of a chunk ----------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=50, database=None)
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
    limit = chunk_bytes or (GIB + sum_bytes if n_chunks == 1 else GIB)
    assert size * row_bytes <= max(limit, row_bytes)
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


def test_rows_of_the_buffer_start_aligned_in_memory_that_nobody_keeps() -> None:
    """A graph's replay or another stream could still be using it."""
    assert row_stride(151_936) == 151_936
    memory.release_workspace()
    with NoWaiting():
        like = torch.empty(300, 8, device="meta", dtype=torch.bfloat16)
        made = Chunks(Work(None, 300, 300), like, 50_257, like.dtype, 2, 128 * 50_272 * 2)
        shapes = [(c.rows, tuple(c.logits.shape), c.logits.stride()) for c in made]
    assert shapes == [
        (slice(0, 128), (128, 50_257), (50_272, 1)),
        (slice(128, 256), (128, 50_257), (50_272, 1)),
        (slice(256, 300), (44, 50_257), (50_272, 1)),
    ]
    assert memory.kept_bytes() == 0


def test_chunks_have_room_for_the_logits_of_both_models_and_for_a_softcaps_copy() -> None:
    policy, ref = (Head(torch.randn(40, 8), torch.randn(50, 8)) for _ in range(2))
    request = RowRequest(torch.zeros(40, dtype=torch.int64), torch.ones(40, dtype=torch.bool), 1.0, None, False)
    plan = Plan(10 * 50 * (4 + 4), None, None, "torch")
    with torch.no_grad(), NoWaiting() as seen:
        distillation.linear_divergence.run(policy, ref, request, torch.ones(40), 0.5, Needs(*[False] * 5), plan)
        hidden.linear_stats.run(policy._replace(softcap=3.0), request, plan)
        hidden.linear_stats.run(policy, request, plan)
    assert seen.rows == [10] * 8 + [10] * 4 + [20] * 2


# --- which rows -------------------------------------------------------------------------------------------


def test_when_a_call_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for host_sync, capturing, debug_mode, waits in (
        (None, False, 0, True),
        (None, True, 0, False),
        (None, False, 1, False),
        (None, False, 2, False),
        (True, True, 2, True),
        (False, False, 0, False),
    ):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda now=debug_mode: now)
        assert chunks.may_wait(host_sync) is waits


def test_without_a_mask_there_is_nothing_to_wait_for() -> None:
    states, weight = torch.zeros(3, 2), torch.zeros(4, 2)
    layout = layout_of("linear_dapo_loss", "hidden", states)
    for mask, options, expected in ((None, {}, False), (torch.ones(3), {}, None), (None, {"host_sync": True}, True)):
        assert head_of_call(layout, states, weight, mask, options)[1].host_sync is expected
    with pytest.raises(TypeError, match="host_sync"):
        head_of_call(layout, states, weight, None, {"host_sync": 1})


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


# --- nothing waits ----------------------------------------------------------------------------------------


def empty(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def loss_keywords(name: str) -> dict[str, Any]:
    case: Any = SimpleNamespace(mask=empty(T, dtype=torch.bool), cu_seqlens=empty(5, dtype=torch.int32))
    case.ref_logprobs = empty(T)
    return {"objective": name, **options_of(name, case)}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_public_function_waits(launches: Launches, name: str) -> None:
    """Validation, ratios, selections, metrics, both passes. Sums over sequences and batches have one order."""
    with NoWaiting():
        given, tau = loss_keywords(name), {"temperature": empty(T)}
        tokens = (empty(T, dtype=torch.int64), empty(T), empty(4))
        for inplace in (False, True):
            logits = empty(T, V, dtype=torch.bfloat16, grad=True)
            out = dapo_loss(logits * 1, *tokens, inplace_backward=inplace, entropy=True, **given, **tau)
            out.loss.backward()
            token_logprobs(logits * 1, tokens[0], entropy=True, inplace_backward=inplace).logprobs.sum().backward()
        head = (empty(T, H, dtype=torch.bfloat16, grad=True), empty(V, H, dtype=torch.bfloat16, grad=True))
        linear_dapo_loss(*head, *tokens, **given, **tau).loss.backward()
        linear_token_logprobs(*head, tokens[0], mask=given["mask"]).logprobs.sum().backward()
        with NoAtomics():
            entropy, logprobs = empty(T, grad=True), empty(T, grad=True)
            policy_loss(logprobs, *tokens[1:], entropy=entropy, **given).loss.backward()
    one = ["row_loss_kernel"] if OBJECTIVES[name].one_pass else ["row_stats_kernel", "row_grad_kernel"]
    in_place = [kernel for kernel in launches.names if kernel != "token_loss_kernel"]
    assert in_place == [*one, "row_stats_kernel", "row_grad_kernel"]


def test_tensors_without_values() -> None:
    """As for torch's own functions: shapes, dtypes and gradients, eagerly and with the backend of any device."""
    tokens = (empty(T, dtype=torch.int64), empty(T), empty(T))
    for function, shape in ((dapo_loss, (T, V)), (policy_loss, (T,))):
        leaf = empty(*shape, grad=True)
        out = function(leaf, *tokens[shape == (T,) :])
        out.loss.backward()
        assert (out.loss.shape, out.logprobs.shape, leaf.grad.shape) == ((), (T,), shape)
    head, mask = (empty(T, H, grad=True), empty(V, H, grad=True)), empty(T, dtype=torch.bool)
    results = (
        linear_dapo_loss(*head, *tokens, mask=mask).loss,
        linear_token_logprobs(*head, tokens[0], mask=mask, host_sync=True).logprobs.sum(),
        linear_distillation_loss(*head, *head, mask=mask).loss,
        linear_preference_loss(*head, tokens[0], None, mask=mask, cu_seqlens=empty(5, dtype=torch.int32)).loss,
    )
    for result in results:
        head[1].grad = None
        result.backward()
        assert (result.shape, head[1].grad.shape) == ((), (V, H))


def test_lists_of_kept_tokens_do_not_wait() -> None:
    ids, old, advantages = empty(T, dtype=torch.int64), empty(T), empty(T)
    lists = SamplingMask(empty(99, dtype=torch.int32), empty(T + 1, dtype=torch.int32))
    how: dict[str, Any] = {"sampling_mask": lists, "entropy_coef": 0.1, "mask": empty(T, dtype=torch.bool)}
    leaves = (empty(T, H, grad=True), empty(V, H, grad=True))
    with use_backend("torch"), NoWaiting():
        for in_place in (False, True):
            logits = empty(T, V, grad=True)
            dapo_loss(logits * 1, ids, old, advantages, inplace_backward=in_place, **how).loss.backward()
        linear_dapo_loss(*leaves, ids, old, advantages, host_sync=False, chunk_bytes=99999, **how).loss.backward()
        stats = linear_token_logprobs(*leaves, ids, entropy=True, host_sync=False, sampling_mask=lists)
        stats.logprobs.sum().backward()


def test_weights_in_a_mask_are_an_asynchronous_assert() -> None:
    logprobs, mask = torch.full((2, 3), -1.0), torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    with device_path():
        loss = policy_loss(logprobs, None, torch.tensor([1.0, -0.5]), mask=mask).loss
        torch.testing.assert_close(loss, torch.tensor(-0.5))
        with pytest.raises(RuntimeError):
            policy_loss(logprobs, None, torch.tensor([1.0, -0.5]), mask=0.5 * mask)


def test_positive_logprobs_are_counted_where_looking_would_wait() -> None:
    logprobs, ref = torch.tensor([-1.0, 0.3, -1.0, 0.3, -2.0, -1.0]), torch.tensor([-1.0, 0.2, 0.2, -1.0, -1.0, -1.0])
    old, mask = torch.tensor([-1.0, -1.0, -1.0, -1.0, 0.9, math.nan]), torch.tensor([1, 1, 1, 0, 1, 1])
    kl: dict[str, Any] = {"kl_coef": 0.1, "ref_logprobs": ref}
    pairs: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 2, 4, 5, 6]), "mask": mask}
    with device_path():
        one = policy_loss(logprobs, old, torch.ones(6), mask=mask, **kl).metrics
        none = policy_loss(-logprobs.abs(), None, torch.ones(6)).metrics
        two = preference_loss_from_logprobs(logprobs, ref, **pairs).metrics
        of_sums = preference_loss_from_logprobs(ref - 1, torch.tensor([-3.0, -2.0, 4.0, -1.0]), **pairs).metrics
    counts = [summarize(metrics)["positive_logprobs"] for metrics in (one, [one, none, one], two, of_sums)]
    assert counts == [3, 6, 2, 1]  # no means
    with NoWaiting():
        dict(policy_loss(*(empty(6) for _ in range(3)), kl_coef=0.1, ref_logprobs=empty(6)).metrics)


def test_numbers_of_the_host_are_not_copied(launches: Launches) -> None:
    """0-d tensors on the CPU, as a token count or a schedule's temperature may be."""
    with NoWaiting():
        for name in ("dapo", "dr_grpo"):
            policy_loss(empty(T), empty(T), empty(4), denominator=torch.tensor(300), **loss_keywords(name))
        temperature, logits = torch.tensor(0.9, dtype=torch.float64), empty(T, V, grad=True) * 1
        ids = empty(T, dtype=torch.int64)
        stats = token_logprobs(logits, ids, temperature=temperature, inplace_backward=True)
    assert stats.logprobs.dtype == torch.float32


def run_linear(dtype: torch.dtype, plan: Plan, **head: Any) -> None:
    """The operators' bodies: the loss, the gradient from the log-probs' and a divergence, each with its gradients."""
    leaves = Head(empty(T, H, dtype=dtype), empty(V, H, dtype=dtype), **head)
    live, per_token = empty(T, dtype=torch.bool), empty(T)
    tokens = Tokens(live, per_token, per_token, per_token, per_token, None)
    scalars = ObjectiveScalars.of(OBJECTIVES["grpo"])._replace(entropy_coef=0.1)
    needs = Needs(True, True, leaves.bias is not None, *[leaves.lora_a is not None] * 2)
    request = RowRequest(empty(T, dtype=torch.int64), live, 1.0, per_token, True)
    with torch.no_grad():
        loss = hidden.linear_loss.run(leaves, request, tokens, scalars, needs, plan)
        stats = hidden.linear_stats.run(leaves, request, plan)
        grads = hidden.linear_grad.run(leaves, request, stats, Slopes(per_token, per_token), needs, plan)
        found = distillation.linear_divergence.run(leaves, leaves, request, per_token, 0.3, needs, plan)
    shapes = [None if x is None else x.shape for x in (*leaves[:3], leaves.lora_a, leaves.lora_b)]
    for out in (loss[5:], grads, found[2:]):
        assert [None if x is None else x.shape for x in out] == shapes
        assert all(x is None or x.dtype == dtype for x in out[:3])


def three_chunks(dtype: torch.dtype, backend: str = "triton") -> Plan:
    return Plan(ROW_MULTIPLE * row_stride(V) * dtype.itemsize, False, None, backend)


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 20.0},
    "factors": {"lora_a": empty(3, H), "lora_b": empty(V, 3), "lora_scale": 0.5},
}


@pytest.mark.parametrize("head", HEADS)
def test_the_linear_path_does_not_wait(launches: Launches, head: str) -> None:
    """Every chunk at shapes that follow from T, row kernels and GEMMs included."""
    with NoWaiting():
        run_linear(torch.float32, three_chunks(torch.float32), **HEADS[head])
    rows = [128, 128, 44]
    assert launches.seen[:9] == [(f"row_{name}_kernel", n) for name in ("loss", "stats", "grad") for n in rows]
    assert set(launches.names[9:]) == {"row_divergence_kernel"}


def test_dw_is_summed_in_float32_and_one_chunk_writes_it_at_once(launches: Launches) -> None:
    with NoWaiting() as several:
        run_linear(torch.bfloat16, Plan(2 * ROW_MULTIPLE * row_stride(V) * 2, False, None, "triton"))
    of_weight = [adds for to, of, adds in several.products if (to, of) == (torch.float32, torch.bfloat16)]
    assert of_weight == [False, True] * 2 + [False, True, True]  # a divergence has twice the logits
    with NoWaiting() as one:
        run_linear(torch.bfloat16, Plan(None, False, None, "triton"))
    assert set(one.products) == {(torch.bfloat16, torch.bfloat16, False)}


def test_torch_does_not_wait_either() -> None:
    """Softcap, float32 logits, bias."""
    head = {"bias": empty(V, dtype=torch.bfloat16), "softcap": 20.0, "float32_logits": True}
    with NoWaiting():
        run_linear(torch.bfloat16, three_chunks(torch.bfloat16, "torch"), **head)


def test_the_buffer_is_free_before_dw_is_rounded(launches: Launches) -> None:
    """Buffer, float32 sum and result at once would be the peak of memory."""

    buffers, rounded = list[StorageWeakRef](), list[bool]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name()
            if name == "aten::_to_copy" and args[0].shape == (V, H):
                rounded.append(all(buffer.expired() for buffer in buffers))
            made = func(*args, **(kwargs or {}))
            if name.startswith("aten::empty") and made.shape == (ROW_MULTIPLE, row_stride(V)):
                buffers.append(StorageWeakRef(made.untyped_storage()))
            return made

    with Watch():
        run_linear(torch.bfloat16, three_chunks(torch.bfloat16))
    assert rounded == [True] * 3
    assert len(buffers) >= 3


def test_the_detector_sees_the_one_wait(launches: Launches) -> None:
    with NoWaiting(), pytest.raises(HostWaitError):
        run_linear(torch.bfloat16, Plan(None, True, None, "triton"))


def test_the_cuda_backend_takes_the_divergence_of_triton(launches: Launches) -> None:
    cuda = pytest.importorskip("dapo_kernels.backends.cuda")
    rows = empty(5, 64)
    request = RowRequest(empty(5, dtype=torch.int64), empty(5, dtype=torch.bool), 1.0, None, False)
    found = cuda.row_divergence_(rows, rows, request, rows[:, 0], divergence.Distance(0.5, None, None))
    assert (launches.names, found.device.type) == (["row_divergence_kernel"], "meta")


# --- the numbers ------------------------------------------------------------------------------------------


def losses_and_gradients(case: Case, name: str, **how: Any) -> list[Tensor]:
    """Of a policy loss and of a distillation, with an adapter; the log-probs too."""
    x = case.fresh()
    head: dict[str, Any] = {"lora": LoraFactors(x["lora_a"], x["lora_b"], LORA_SCALE), "bias": x["bias"]}
    head |= {"softcap": case.softcap, "mask": case.mask, **how}
    tokens = {**case.tensors("target_ids", "old_logprobs", "advantages", "cu_seqlens", "importance_weights")}
    out = linear_dapo_loss(x["hidden"], x["weight"], **tokens, **head, objective=name)
    ref = (case.leaves["hidden"].nan_to_num().flip(1), case.leaves["weight"])
    other = linear_distillation_loss(x["hidden"], x["weight"], *ref, beta=0.3, **head)
    (out.loss + other.loss).backward()
    values = [out.loss.detach(), out.logprobs, other.loss.detach(), other.divergence]
    return [*values, *(leaf.grad for leaf in x.values() if leaf.grad is not None)]


@pytest.mark.parametrize("host_sync", [True, False], ids=["one-wait", "no-wait"])
@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize("chunk_bytes", [None, 1500])
@pytest.mark.parametrize("dead", [0.3, 1.0])
def test_skipping_work_as_on_a_device_gives_the_hosts_numbers(
    backend: str, dead: float, chunk_bytes: int | None, name: str, host_sync: bool
) -> None:
    """Dead tokens full of NaN, tokens with no advantage or no weight, in one chunk and in several."""
    for dtype in (torch.float32, torch.bfloat16):
        case = linear_case(67, 12, (9, 1, 14, 7), dtype=dtype, bias=True, softcap=20.0, seed=3, dead=dead, rank=3)
        case.advantages[::4] = 0.0
        case.importance_weights[1::5] = 0.0
        expected = losses_and_gradients(case, name, chunk_bytes=chunk_bytes)
        for x in (case.leaves["hidden"], case.old_logprobs, case.advantages):
            x[~case.mask] = torch.nan
        with device_path():
            found = losses_and_gradients(case, name, chunk_bytes=chunk_bytes, host_sync=host_sync)
        for got, exact in zip(found, expected, strict=True):
            size = float(exact.abs().max())
            rounding = 2.0**-6 * size if exact.dtype == torch.bfloat16 else 1e-6 * max(1.0, size)
            torch.testing.assert_close(got, exact, rtol=1e-5, atol=rounding)
        assert not found[4][~case.mask].any()
