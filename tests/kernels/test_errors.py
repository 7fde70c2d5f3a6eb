"""Every refusal, once, at the boundary: the argument's name, what was expected, what came."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dapo_kernels import (
    OBJECTIVES,
    Objective,
    dapo_loss,
    linear_dapo_loss,
    linear_preference_loss,
    linear_token_logprobs,
    policy_loss,
    policy_loss_from_hidden,
    policy_loss_from_logits,
    preference_loss,
    preference_loss_from_logprobs,
    token_logprobs,
    use_backend,
)
from dapo_kernels.backends import registry

T, V, H, S = 6, 11, 4, 3
IDS = torch.arange(T)
FIELDS = (
    "surrogate",
    "clip_low",
    "clip_high",
    "dual_clip",
    "kl_coef",
    "kl_estimator",
    "kl_through_ratio",
    "entropy_coef",
    "aggregate",
    "length_norm",
)


def packed(**changes: Any) -> dict[str, Any]:
    """Arguments of a valid packed `dapo_loss` call, some of them replaced."""
    g = torch.Generator().manual_seed(0)
    good: dict[str, Any] = {
        "logits": torch.randn(T, V, generator=g),
        "target_ids": torch.arange(T),
        "old_logprobs": torch.full((T,), -2.0),
        "advantages": torch.ones(T),
        "cu_seqlens": torch.tensor([0, 2, 3, 6], dtype=torch.int32),
    }
    return {**good, **changes}


def padded(**changes: Any) -> dict[str, Any]:
    good = packed()
    del good["cu_seqlens"]
    good = {name: value.reshape(2, 3, *value.shape[1:]) for name, value in good.items()}
    return {**good, **changes}


def linear(**changes: Any) -> dict[str, Any]:
    good = packed()
    del good["logits"]
    return {"hidden": torch.randn(T, H), "weight": torch.randn(V, H), **good, **changes}


def policy(**changes: Any) -> dict[str, Any]:
    good = packed()
    del good["logits"], good["target_ids"]
    return {"logprobs": torch.full((T,), -2.1), **good, **changes}


Call = tuple[Callable[..., Any], dict[str, Any]]


def refused(kind: type[Exception] | tuple[type[Exception], ...], call: Call, *words: str) -> str:
    """The call raises `kind`, and its message holds the function's name and every word."""
    fn, kwargs = call
    with pytest.raises(kind) as caught:
        fn(**kwargs)
    message = str(caught.value)
    for word in (fn.__name__, *words):
        assert word in message, f"{word!r} is not in: {message}"
    return message


def test_the_good_calls_are_good() -> None:
    dapo_loss(**packed())
    dapo_loss(**padded())
    linear_dapo_loss(**linear())
    policy_loss(**policy())


def test_the_designs_own_example() -> None:
    message = refused(ValueError, (dapo_loss, packed(advantages=torch.ones(32, 128))), "advantages", "[32, 128]")
    assert re.search(r"advantages must be \[T\]=\[6\] or \[S\]=\[3\], got \[32, 128\]", message), message


def test_unknown_objective_lists_the_known() -> None:
    message = refused(ValueError, (dapo_loss, packed(objective="dapo2")), "dapo2")
    assert all(name in message for name in OBJECTIVES)
    refused((TypeError, ValueError), (dapo_loss, packed(objective=3)), "objective")


@pytest.mark.parametrize("make", [(dapo_loss, packed), (linear_dapo_loss, linear), (policy_loss, policy)])
def test_unknown_override_lists_the_fields(make: tuple[Callable[..., Any], Callable[..., dict[str, Any]]]) -> None:
    fn, arguments = make
    message = refused(TypeError, (fn, arguments(clip_hihg=0.3)), "clip_hihg")
    assert all(field in message for field in FIELDS)


@pytest.mark.parametrize(
    "name", ["target_ids", "old_logprobs", "mask", "ref_logprobs", "importance_weights", "advantages"]
)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_wrong_shapes(name: str, layout: str) -> None:
    arguments = packed if layout == "packed" else padded
    dtype = torch.int64 if name == "target_ids" else torch.float32
    kl = {"kl_coef": 0.1} if name == "ref_logprobs" else {}
    wrong = torch.ones(T + 1 if layout == "packed" else (2, 4), dtype=dtype)
    expected = "[6]" if layout == "packed" else "[2, 3]"
    refused(ValueError, (dapo_loss, arguments(**{name: wrong}, **kl)), name, expected, str(list(wrong.shape)))
    refused(ValueError, (dapo_loss, arguments(**{name: torch.ones((), dtype=dtype)}, **kl)), name, expected)
    if layout == "padded":  # a packed tensor beside padded logits
        flat = torch.ones(T, dtype=dtype)
        refused(ValueError, (dapo_loss, arguments(**{name: flat}, **kl)), name, expected, "[6]")


def shifted_but_for_the_rows(layout: str) -> list[Call]:
    """Every function of logits or hidden states, given all positions beside targets from the second one on."""
    lengths = (2, 5, 3, 4)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    less = bounds - torch.arange(len(lengths) + 1)  # of the shifted sequences
    n_rows, n = (int(bounds[-1]), int(less[-1])) if layout == "packed" else (20, 16)

    def laid(x: Tensor) -> Tensor:
        return x if layout == "packed" else x.unflatten(0, (4, -1))

    head = {"hidden": laid(torch.randn(n_rows, H)), "weight": torch.randn(V, H)}
    logits = {"logits": laid(torch.randn(n_rows, V))}
    ids = {"target_ids": laid(torch.ones(n, dtype=torch.int64))}
    how = {"mask": laid(torch.ones(n, dtype=torch.bool))}
    packed_too = {"cu_seqlens": less} if layout == "packed" else {}
    of_loss = {"old_logprobs": laid(torch.full((n,), -2.0)), "advantages": laid(torch.ones(n)), **how, **packed_too}
    pairs = {"ref_logprobs": laid(torch.full((n,), -2.0)), **how, **packed_too}
    calls: list[Call] = [
        (dapo_loss, {**logits, **ids, **of_loss}),
        (policy_loss_from_logits, {**logits, **ids, **of_loss, "objective": "gspo"}),
        (linear_dapo_loss, {**head, **ids, **of_loss}),
        (policy_loss_from_hidden, {**head, **ids, **of_loss, "objective": "gspo"}),
        (preference_loss, {**logits, **ids, **pairs}),
        (linear_preference_loss, {**head, **ids, **pairs}),
    ]
    if layout == "padded":  # packed they know no bounds
        calls += [(token_logprobs, logits | ids), (linear_token_logprobs, {**head, **ids, **how})]
    return calls


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_that_are_not_shifted_are_named(layout: str) -> None:
    for fn, given in shifted_but_for_the_rows(layout):
        name = "logits" if "logits" in given else "hidden"
        refused(ValueError, (fn, given), f"{name} must", "target_ids")


@pytest.mark.parametrize(
    ("keyword", "ours"),
    [("epsilon", "clip_low"), ("epsilon_high", "clip_high"), ("beta", "kl_coef"), ("loss_type", "objective")],
)
def test_keywords_of_other_libraries_get_a_suggestion(keyword: str, ours: str) -> None:
    for fn, arguments in ((dapo_loss, packed), (linear_dapo_loss, linear), (policy_loss, policy)):
        refused(TypeError, (fn, arguments(**{keyword: 0.1})), repr(keyword), repr(ours))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_wrong_temperature_shape(layout: str) -> None:
    arguments = packed if layout == "packed" else padded
    refused(ValueError, (dapo_loss, arguments(temperature=torch.ones(5))), "temperature", "[5]")


def test_wrong_ranks() -> None:
    refused(ValueError, (dapo_loss, packed(logits=torch.randn(V))), "logits", "[11]")
    refused(ValueError, (dapo_loss, packed(logits=torch.randn(1, 2, 3, V))), "logits", "[1, 2, 3, 11]")
    refused(ValueError, (linear_dapo_loss, linear(hidden=torch.randn(H))), "hidden", "[4]")
    refused(ValueError, (policy_loss, policy(logprobs=torch.tensor(-1.0))), "logprobs")
    refused(ValueError, (policy_loss, policy(logprobs=torch.randn(1, 2, 3))), "logprobs", "[1, 2, 3]")


def test_wrong_head() -> None:
    refused(ValueError, (linear_dapo_loss, linear(weight=torch.randn(V, H + 1))), "weight", "[11, 5]", "4")
    refused(ValueError, (linear_dapo_loss, linear(weight=torch.randn(V))), "weight", "[11]")
    refused(ValueError, (linear_dapo_loss, linear(bias=torch.randn(V + 1))), "bias", "[11]", "[12]")
    refused(TypeError, (linear_dapo_loss, linear(weight=torch.randn(V, H).bfloat16())), "weight", "bfloat16", "float32")
    refused(TypeError, (linear_dapo_loss, linear(bias=torch.randn(V).half())), "bias", "float16", "float32")
    refused(ValueError, (linear_dapo_loss, linear(chunk_bytes=0)), "chunk_bytes", "0")
    refused(ValueError, (linear_dapo_loss, linear(softcap=0.0)), "softcap", "0.0")
    refused(ValueError, (linear_dapo_loss, linear(softcap=-3.0)), "softcap", "-3.0")


def test_wrong_dtypes() -> None:
    refused(TypeError, (dapo_loss, packed(logits=torch.ones(T, V, dtype=torch.int64))), "logits", "int64")
    refused(TypeError, (dapo_loss, packed(logits=torch.ones(T, V, dtype=torch.complex64))), "logits", "complex64")
    refused(TypeError, (dapo_loss, packed(target_ids=torch.ones(T))), "target_ids", "float32")
    refused(TypeError, (dapo_loss, packed(target_ids=torch.ones(T, dtype=torch.bool))), "target_ids", "bool")
    refused(TypeError, (dapo_loss, packed(cu_seqlens=torch.tensor([0.0, 6.0]))), "cu_seqlens", "float32")
    refused(TypeError, (policy_loss, policy(logprobs=torch.ones(T, dtype=torch.int64))), "logprobs", "int64")
    refused(TypeError, (linear_dapo_loss, linear(hidden=torch.ones(T, H, dtype=torch.int32))), "hidden", "int32")


@pytest.mark.parametrize("name", ["logits", "target_ids", "old_logprobs", "advantages", "mask", "cu_seqlens"])
def test_lists_are_not_tensors(name: str) -> None:
    refused(TypeError, (dapo_loss, packed(**{name: [1.0] * T})), name, "list")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_shard_is_not_the_whole(mesh: DeviceMesh) -> None:
    """FSDP2's parameters outside the forward pass: torch would end in "got mixed torch.Tensor and DTensor"."""

    def shard(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, [Shard(0)])

    others = {name: x for name, x in linear(bias=torch.randn(V)).items() if name != "weight"}
    calls: list[Call] = [
        *((linear_dapo_loss, linear(**{name: shard(x)})) for name, x in others.items()),
        (linear_token_logprobs, {"hidden": torch.randn(T, H), "weight": torch.randn(V, H), "target_ids": shard(IDS)}),
        (policy_loss, policy(logprobs=shard(torch.full((T,), -2.1)))),
    ]
    for fn, kwargs in calls:
        (name,) = (name for name, x in kwargs.items() if isinstance(x, DTensor))
        refused(TypeError, (fn, kwargs), f"{name} must be", "DTensor", "fully_shard", "docs/guide.md", "full_tensor()")
    for fn, given in ((dapo_loss, packed()), (token_logprobs, {"logits": torch.randn(T, V), "target_ids": IDS})):
        given["logits"] = shard(given["logits"])
        refused(ValueError, (fn, given), "logits, a DTensor, must be Shard(1)", "fully_shard")
    two = init_device_mesh("cpu", (1, 1))
    head = distribute_tensor(torch.randn(V, H), two, [Shard(0), Shard(0)])
    refused(
        ValueError, (linear_dapo_loss, linear(weight=head)), "weight, a DTensor", "mesh of one dimension", "fully_shard"
    )


@pytest.mark.parametrize("name", ["target_ids", "old_logprobs", "advantages", "mask", "cu_seqlens"])
def test_mixed_devices(name: str) -> None:
    """The meta device stands for any other one."""
    value: Tensor = packed().get(name, torch.ones(T, dtype=torch.bool))
    refused(ValueError, (dapo_loss, packed(**{name: value.to("meta")})), name, "cpu", "meta")


def test_mixed_devices_of_a_head() -> None:
    refused(ValueError, (linear_dapo_loss, linear(weight=torch.randn(V, H, device="meta"))), "weight", "meta")


@pytest.mark.parametrize("aggregate", ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("make", [(dapo_loss, packed), (linear_dapo_loss, linear), (policy_loss, policy)])
def test_per_sequence_things_need_cu_seqlens_when_packed(
    aggregate: str, make: tuple[Callable[..., Any], Callable[..., dict[str, Any]]]
) -> None:
    fn, arguments = make
    norm = {"length_norm": 8.0} if aggregate.endswith("norm") else {}
    refused(ValueError, (fn, arguments(cu_seqlens=None, aggregate=aggregate, **norm)), "cu_seqlens", aggregate)


def test_advantages_per_sequence_need_cu_seqlens_when_packed() -> None:
    refused(ValueError, (dapo_loss, packed(cu_seqlens=None, advantages=torch.ones(S))), "advantages", "cu_seqlens")


def test_cu_seqlens_beside_padded_logits_is_refused() -> None:
    cu_seqlens = torch.tensor([0, 3, 6], dtype=torch.int32)
    refused(ValueError, (dapo_loss, padded(cu_seqlens=cu_seqlens)), "cu_seqlens", "padded")


@pytest.mark.parametrize("bounds", [[0, 2, 5], [0, 2, 7], [1, 3, 6], [0, 4, 2, 6], [6], []])
def test_cu_seqlens_that_do_not_fit(bounds: list[int]) -> None:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    refused(ValueError, (dapo_loss, packed(cu_seqlens=cu_seqlens)), "cu_seqlens")
    refused(ValueError, (dapo_loss, packed(cu_seqlens=torch.zeros(2, 2, dtype=torch.int32))), "cu_seqlens", "[2, 2]")


@pytest.mark.parametrize("bad", [-1, V, V + 1, -100, 2**40])
def test_target_ids_out_of_range(backend: str, bad: int) -> None:
    """IndexError on a live token, anywhere and at every entry point; on a dead token it is padding."""
    for at in (0, T - 1):
        ids = torch.arange(T)
        ids[at] = bad
        dead = torch.ones(T, dtype=torch.bool)
        dead[at] = False
        calls: list[Call] = [
            (dapo_loss, packed(target_ids=ids)),
            (dapo_loss, packed(target_ids=ids, logits=torch.randn(T, V, requires_grad=True), inplace_backward=True)),
            (linear_dapo_loss, linear(target_ids=ids)),
            (linear_dapo_loss, linear(target_ids=ids, weight=torch.randn(V, H, requires_grad=True))),
            (token_logprobs, {"logits": torch.randn(T, V), "target_ids": ids}),
            (linear_token_logprobs, {"hidden": torch.randn(T, H), "weight": torch.randn(V, H), "target_ids": ids}),
        ]
        for fn, kwargs in calls:
            with pytest.raises(IndexError, match=re.escape(str(bad))) as caught:
                fn(**kwargs)
            assert "target" in str(caught.value)
            assert str(V) in str(caught.value)
        for fn, kwargs in calls[:4]:
            assert bool(torch.isfinite(fn(**kwargs, mask=dead).loss))


def test_the_largest_target_id_is_fine(backend: str) -> None:
    dapo_loss(**packed(target_ids=torch.full((T,), V - 1)))
    dapo_loss(**packed(target_ids=torch.full((T,), V - 1, dtype=torch.int32)))


@pytest.mark.parametrize("bad", [0.0, -1.0, 0, float("nan")])
def test_denominator_must_be_positive(bad: float) -> None:
    for call in ((dapo_loss, packed), (linear_dapo_loss, linear), (policy_loss, policy)):
        refused(ValueError, (call[0], call[1](denominator=bad)), "denominator", str(bad))


def test_denominator_must_be_a_scalar() -> None:
    refused(ValueError, (dapo_loss, packed(denominator=torch.ones(2))), "denominator", "[2]")
    refused((TypeError, ValueError), (dapo_loss, packed(denominator="many")), "denominator")


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan"), float("inf")])
def test_temperature_must_be_positive(bad: float) -> None:
    calls: list[Call] = [
        (dapo_loss, packed()),
        (linear_dapo_loss, linear()),
        (token_logprobs, {"logits": torch.randn(T, V), "target_ids": torch.arange(T)}),
        (
            linear_token_logprobs,
            {"hidden": torch.randn(T, H), "weight": torch.randn(V, H), "target_ids": torch.arange(T)},
        ),
    ]
    for fn, kwargs in calls:
        refused(ValueError, (fn, {**kwargs, "temperature": bad}), "temperature", str(bad))


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan")])
def test_temperature_per_token_must_be_positive_where_live(backend: str, bad: float) -> None:
    temperature = torch.ones(T)
    temperature[3] = bad
    mask = torch.ones(T, dtype=torch.bool)
    for call in ((dapo_loss, packed), (linear_dapo_loss, linear)):
        fn, arguments = call
        with pytest.raises(ValueError, match="temperature"):
            fn(**arguments(temperature=temperature))
        mask[3] = False
        assert bool(torch.isfinite(fn(**arguments(temperature=temperature, mask=mask)).loss))
        mask[3] = True


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dual_clip", 1.0),
        ("dual_clip", 0.5),
        ("dual_clip", float("nan")),
        ("clip_low", -0.1),
        ("clip_high", -0.1),
        ("clip_high", float("nan")),
        ("surrogate", "clipp"),
        ("kl_estimator", "k4"),
        ("aggregate", "mean"),
        ("length_norm", 0.0),
        ("length_norm", -4.0),
        ("kl_coef", float("nan")),
        ("entropy_coef", float("nan")),
    ],
)
def test_fields_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        dapo_loss(**packed(**{field: value}))
    with pytest.raises(ValueError, match=field):
        Objective(**{field: value})
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(OBJECTIVES["dapo"], **{field: value})


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_kl_through_ratio_is_for_k3(estimator: str) -> None:
    for kl_coef in (0.0, 0.1):
        with pytest.raises(ValueError, match="kl_through_ratio"):
            dapo_loss(
                **packed(kl_estimator=estimator, kl_through_ratio=True, kl_coef=kl_coef, ref_logprobs=torch.ones(T))
            )


def test_missing_companions() -> None:
    """What one option needs of another, and what it has no use for."""
    refused(ValueError, (dapo_loss, packed(objective="grpo")), "ref_logprobs", "kl_coef")
    refused(ValueError, (dapo_loss, packed(objective="dr_grpo")), "length_norm")
    refused(ValueError, (policy_loss, policy(entropy_coef=0.1)), "entropy")
    refused(ValueError, (dapo_loss, packed(ref_logprobs=torch.ones(T))), "ref_logprobs", "kl_coef")


def test_use_backend_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'fast'") as caught, use_backend("fast"):
        pass
    assert "torch" in str(caught.value)
    assert "cpp" in str(caught.value)
    import sys

    monkeypatch.setitem(sys.modules, "dapo_kernels._C", None)  # import raises ImportError
    monkeypatch.setattr(registry, "_reasons", {})
    with pytest.raises(RuntimeError, match="cpp") as refused_backend, use_backend("cpp"):
        pass
    assert "compiler" in str(refused_backend.value) or "install" in str(refused_backend.value)


def test_use_backend_is_undone(backend: str) -> None:
    """Nested choices and exceptions leave the outer choice in place."""
    double = packed(logits=torch.randn(T, V, dtype=torch.float64))

    def takes_float64() -> bool:
        try:
            dapo_loss(**double)
        except TypeError:
            return False
        return True

    assert takes_float64() == (backend == "torch")
    with use_backend("torch"):
        assert takes_float64()
    assert takes_float64() == (backend == "torch")
    with pytest.raises(KeyError), use_backend("torch"):
        raise KeyError("inside")
    assert takes_float64() == (backend == "torch")


def test_float64_on_the_cpp_backend_is_refused(backend: str) -> None:
    if backend == "torch":
        assert dapo_loss(**packed(logits=torch.randn(T, V, dtype=torch.float64))).loss.dtype == torch.float64
        return
    refused(TypeError, (dapo_loss, packed(logits=torch.randn(T, V, dtype=torch.float64))), "float64", "torch")


def test_use_backend_leaves_nothing_behind_in_any_order() -> None:
    """Two threads that enter and leave crosswise, and two asynchronous tasks of one thread."""
    device = torch.device("cpu")
    default = registry.backend_for("test", device, torch.float32)
    assert default == "cpp"
    barrier = threading.Barrier(2)
    seen = {}

    def thread(name: str) -> None:
        with use_backend(name):
            barrier.wait()
            seen[name] = registry.backend_for("test", device, torch.float32)
            if name == "torch":
                barrier.wait()
        if name == "cpp":
            barrier.wait()

    threads = [threading.Thread(target=thread, args=(name,)) for name in ("torch", "cpp")]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == {"torch": "torch", "cpp": "cpp"}
    assert registry.backend_for("test", device, torch.float32) == default
    assert registry._forced_last is None

    async def task(name: str, seconds: float) -> str:
        with use_backend(name):
            await asyncio.sleep(seconds)
            return registry.backend_for("test", device, torch.float32)

    async def both() -> list[str]:
        return await asyncio.gather(task("torch", 0.01), task("cpp", 0.03))

    assert asyncio.run(both()) == ["torch", "cpp"]
    assert registry.backend_for("test", device, torch.float32) == default


PAIRS = {"cu_seqlens": torch.tensor([0, 2, 3, 5, 6]), "mask": torch.tensor([1, 1, 1, 1, 0, 1])}
WITH_LOGPROBS: dict[str, Call] = {
    "old_logprobs of logits": (dapo_loss, packed()),
    "old_logprobs of padded logits": (dapo_loss, padded(mask=torch.ones(2, 3))),
    "old_logprobs of hidden": (linear_dapo_loss, linear()),
    "old_logprobs": (policy_loss, policy()),
    "logprobs": (policy_loss, policy()),
    "logprobs, on-policy": (policy_loss, policy(old_logprobs=None)),
    "ref_logprobs": (policy_loss, policy(kl_coef=0.1, ref_logprobs=torch.full((T,), -2.0))),
    "ref_logprobs of logits": (dapo_loss, packed(kl_coef=0.1, ref_logprobs=torch.full((T,), -2.0))),
    "ref_logprobs of pairs of logits": (preference_loss, {"logits": torch.zeros(T, V), "target_ids": IDS}),
    "ref_logprobs of pairs of hidden": (
        linear_preference_loss,
        {"hidden": torch.zeros(T, H), "weight": torch.zeros(V, H), "target_ids": IDS},
    ),
    "ref_logprobs of pairs": (preference_loss_from_logprobs, {"logprobs": torch.full((T,), -2.1)}),
    "ref_logprobs of pairs, summed": (
        preference_loss_from_logprobs,
        {"logprobs": torch.full((T,), -2.1), "ref_logprobs": torch.full((4,), -4.0)},
    ),
    "logprobs of pairs": (preference_loss_from_logprobs, {"logprobs": torch.full((T,), -2.1)}),
}


@pytest.mark.parametrize("which", WITH_LOGPROBS)
def test_probabilities_are_no_logprobs(which: str) -> None:
    """Also one of many; not a dead token's, not a NaN, and not what rounding puts above 0."""
    fn, kwargs = WITH_LOGPROBS[which]
    if "pairs" in which:
        kwargs = {"ref_logprobs": torch.full((T,), -2.0), **PAIRS, **kwargs}
    name = which.split()[0].rstrip(",")
    good = kwargs[name].clone().requires_grad_()
    fn(**{**kwargs, name: good})
    refused(ValueError, (fn, {**kwargs, name: good.exp()}), name)
    for bad, is_refused in ((0.3, True), (math.inf, True), (math.nan, False), (-math.inf, False), (1e-4, False)):
        some = good.detach().clone()
        some.view(-1)[1] = bad
        if is_refused:
            refused(ValueError, (fn, {**kwargs, name: some}), name)
        else:
            fn(**{**kwargs, name: some})
    if good.numel() == T:
        dead = torch.ones(T, dtype=torch.bool)
        dead[1] = False
        some.view(-1)[1] = 0.3
        fn(**{**kwargs, name: some, "mask": dead.view(good.shape)})


@pytest.mark.parametrize("value", [0.0, -3.0, math.nan, math.inf])
def test_a_denominator_in_a_tensor_is_looked_at_where_that_is_free(value: float) -> None:
    logprobs, advantages = torch.zeros(3, requires_grad=True), torch.ones(3)
    with pytest.raises(ValueError, match="denominator"):
        policy_loss(logprobs, None, advantages, denominator=torch.tensor(value))


def test_no_live_token_anywhere_is_a_count_of_zero() -> None:
    logprobs, dead = torch.zeros(3, requires_grad=True), torch.zeros(3, dtype=torch.bool)
    out = policy_loss(logprobs, None, torch.ones(3), mask=dead, denominator=torch.tensor(0))
    out.loss.backward()
    assert out.loss == 0
    assert not logprobs.grad.any()  # type: ignore[union-attr]


def test_in_place_without_a_gradient_is_a_forward_pass() -> None:
    logits, ids = torch.randn(3, 7, requires_grad=True), torch.tensor([1, 2, 3])
    with torch.no_grad():
        inplace = token_logprobs(logits, ids, inplace_backward=True)
    assert torch.equal(inplace.logprobs, token_logprobs(logits, ids).logprobs)


@pytest.mark.parametrize(
    ("main_grad", "words"),
    [
        (torch.zeros(5, 4, dtype=torch.bfloat16), "main_grad"),
        (torch.zeros(4, 5), r"main_grad .*\[5, 4\]"),
        (3.0, "main_grad"),
    ],
)
def test_main_grad_is_checked(main_grad: Any, words: str) -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    with pytest.raises((ValueError, TypeError), match=words):
        linear_dapo_loss(hidden, weight, torch.tensor([1, 2, 3]), None, torch.ones(3), main_grad=main_grad)
    with pytest.raises(ValueError, match="main_grad"):
        linear_dapo_loss(
            hidden, weight.detach(), torch.tensor([1, 2, 3]), None, torch.ones(3), main_grad=torch.zeros(5, 4)
        )
