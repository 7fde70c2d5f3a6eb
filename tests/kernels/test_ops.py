"""The operators as torch sees them: opcheck, fake tensors, torch.compile, and how much GEMM work they do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import linear_case, logits_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dapo_kernels import (
    dapo_loss,
    linear_dapo_loss,
    linear_distillation_loss,
    linear_token_logprobs,
    policy_loss,
    token_logprobs,
    use_backend,
)
from dapo_kernels.backends import registry

# Checked where there are ranks, in test_vocab_parallel.py.
OF_RANKS = {"shard_columns", "from_first", "gathered_sequence", "scattered_sum", "traced_sum"}


def registered() -> set[str]:
    """Names of every operator of the package."""
    return {
        name.removeprefix("dapo_kernels::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("dapo_kernels::")
    }


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of the package's operators, as the kernels receive them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "dapo_kernels":
            copies = torch.utils._pytree.tree_map(
                lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs)
            )
            name = func.name().removeprefix("dapo_kernels::").split(".")[0]
            self.calls.setdefault(name, []).append((func, *copies))
        return func(*args, **kwargs)


def exercise() -> Recorder:
    """Call the whole public surface, forward and backward, and record the operators behind it."""
    case, linear = logits_case(vocab=13, lengths=(3, 2), seed=131), linear_case(vocab=13, lengths=(3, 2), bias=True)
    options: dict[str, Any] = {"mask": case.mask, "kl_coef": 0.1, "ref_logprobs": case.ref_logprobs}
    with Recorder() as recorder:
        for entropy_coef in (0.0, 0.1):
            for old, weights in ((case.old_logprobs, case.importance_weights), (None, None)):
                per_token = (case.target_ids, old, case.advantages)
                shared = {**options, "entropy_coef": entropy_coef, "importance_weights": weights}
                for inplace in (False, True):
                    logits = case.fresh()["logits"] * 1
                    dapo_loss(logits, *per_token, **shared, inplace_backward=inplace).loss.backward()
                    logits = case.fresh()["logits"] * 1
                    stats = token_logprobs(logits, case.target_ids, entropy=True, inplace_backward=inplace)
                    (stats.logprobs.sum() + 2 * stats.entropy.sum()).backward()
                x = linear.fresh()
                head = (x["hidden"], x["weight"])
                temperature = torch.full((5,), 0.7)
                linear_dapo_loss(
                    *head, *per_token, **shared, bias=x["bias"], softcap=3.0, temperature=temperature
                ).loss.mul(2.0).backward()
                stats = linear_token_logprobs(*head, linear.target_ids, bias=x["bias"], entropy=True)
                (stats.logprobs.sum() + stats.entropy.sum()).backward()
                of_ref = (torch.randn(5, 4), torch.randn(13, 4))
                linear_distillation_loss(*head, *of_ref, beta=0.3, mask=case.mask).loss.backward()
                leaf = case.ref_logprobs.clone().requires_grad_()
                policy_loss(leaf, old, case.advantages, **options, importance_weights=weights).loss.backward()
    return recorder


def test_opcheck_every_operator(backend: str) -> None:
    """torch's own checks of schema, fake implementation and autograd registration, on arguments from real calls."""
    recorder = exercise()
    assert set(recorder.calls) == registered() - OF_RANKS, (
        "an operator that no public call reaches, or one unknown here"
    )
    for name, calls in recorder.calls.items():
        distinct = {repr([type(x) for x in args]): (func, args, kwargs) for func, args, kwargs in calls}
        for func, args, kwargs in distinct.values():
            for differentiable in (False, True):
                given = [
                    x.requires_grad_() if differentiable and _is_leaf_like(name, i, x) else x
                    for i, x in enumerate(torch.utils._pytree.tree_map(_clone, args))
                ]
                tests = ["test_schema", "test_faketensor"]
                if not name.endswith("_"):  # in-place operators are called inside autograd.Function
                    tests += ["test_autograd_registration", "test_aot_dispatch_dynamic"]
                elif differentiable:
                    continue
                torch.library.opcheck(func, tuple(given), kwargs, test_utils=tuple(tests))


def _clone(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _is_leaf_like(name: str, position: int, x: Any) -> bool:
    """What the public functions differentiate: the logits, the head's three tensors, the log-probs."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or name.endswith("grad"):
        return False
    return position < (3 if name.startswith("linear") else 1)


def eager_and_compiled(fn: Callable[..., Tensor], leaves: list[Tensor], **how: Any) -> None:
    """Equal loss and gradients, twice (the second call runs the cached graph), without a graph break."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, **how)
    for scale in (1.0, 0.5):
        results = []
        for f in (fn, compiled):
            copies = [(leaf * scale).detach().requires_grad_() for leaf in leaves]
            loss = f(*copies)
            (3 * loss).backward()
            results.append((loss.detach(), [copy.grad for copy in copies]))
        (loss_a, grads_a), (loss_b, grads_b) = results
        torch.testing.assert_close(loss_a, loss_b, rtol=1e-6, atol=1e-7)
        for a, b in zip(grads_a, grads_b, strict=True):
            assert a is not None
            assert b is not None
            assert float(a.abs().max()) > 0
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", ["logits", "inplace", "linear", "linear_stats", "policy"])
def test_compile_fullgraph_aot(backend: str, kind: str) -> None:
    """Dynamo and AOTAutograd, without code generation: the graph is whole and its gradients equal eager's."""
    eager_and_compiled(*_program(kind), backend="aot_eager")


def _program(kind: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    case, linear = logits_case(vocab=37, seed=132), linear_case(vocab=37, seed=133)
    per_token = (case.target_ids, case.old_logprobs, case.advantages)
    shared: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "ref_logprobs": case.ref_logprobs}
    if kind in ("logits", "inplace"):

        def from_logits(x: Tensor) -> Tensor:
            return dapo_loss(
                x * 2, *per_token, objective="grpo", entropy_coef=0.1, inplace_backward=kind == "inplace", **shared
            ).loss

        return from_logits, [case.leaves["logits"]]
    if kind == "policy":

        def from_logprobs(x: Tensor) -> Tensor:
            return policy_loss(x * 1, case.old_logprobs, case.advantages, objective="grpo", **shared).loss

        return from_logprobs, [case.ref_logprobs - 0.1]

    def from_hidden(hidden: Tensor, weight: Tensor) -> Tensor:
        if kind == "linear":
            return linear_dapo_loss(
                torch.tanh(hidden), weight, *per_token, objective="grpo", entropy_coef=0.1, **shared
            ).loss
        stats = linear_token_logprobs(torch.tanh(hidden), weight, linear.target_ids, entropy=True)
        return (stats.logprobs * case.advantages).sum() + stats.entropy.sum()

    return from_hidden, [linear.leaves["hidden"], linear.leaves["weight"]]


@pytest.mark.parametrize("kind", ["logits", "linear"])
def test_compile_fullgraph_inductor(backend: str, kind: str) -> None:
    """The whole compiler, generated code included."""
    eager_and_compiled(*_program(kind))


def test_compile_serves_new_lengths_without_recompiling_each(backend: str) -> None:
    """Lengths vary from batch to batch: after the second one the graph must be dynamic in T."""
    compiles = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return graph

    torch._dynamo.reset()

    def loss(logits: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return dapo_loss(logits, ids, old, advantages, mask=mask).loss

    compiled = torch.compile(loss, fullgraph=True, backend=counting)
    for n_tokens in (19, 23, 29, 31, 37):
        case = logits_case(vocab=37, lengths=(n_tokens,), seed=n_tokens)
        args = (case.leaves["logits"], case.target_ids, case.old_logprobs, case.advantages, case.mask)
        torch.testing.assert_close(compiled(*args), loss(*args), rtol=1e-6, atol=1e-7)
    assert compiles <= 2


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("objective", ["dapo", "gspo"])
@pytest.mark.parametrize("public", [dapo_loss, linear_dapo_loss])
def test_fake_tensors_pass_through(public: Callable[..., Any], objective: str, order: str) -> None:
    """Shapes, strides, dtypes and no data: what memory planners and exporters run. Compared with the real call's."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case, linear = logits_case(vocab=13, dtype=torch.bfloat16), linear_case(vocab=13, dtype=torch.bfloat16)
    first, cu_seqlens = list((case if public is dapo_loss else linear).leaves.values()), case.cu_seqlens
    if order == "columns":
        first = [x.t().contiguous().t() for x in first]

    def call(convert: Callable[[Tensor], Tensor]) -> list[Any]:
        args = [convert(x) for x in (*first, case.target_ids, case.old_logprobs, case.advantages)]
        leaves = [x.detach().requires_grad_() for x in args[: len(first)]]
        options = {"mask": convert(case.mask), "cu_seqlens": convert(cu_seqlens), "denominator": 5}
        out = public(*leaves, *args[len(first) :], objective=objective, entropy_coef=0.1, **options)
        gradients = torch.autograd.grad(out.loss, leaves)
        results = [out.loss, out.logprobs, out.entropy, *out.metrics.values(), *gradients]
        return [(x.shape, x.stride(), x.dtype) for x in results]

    real = call(lambda x: x)
    with FakeTensorMode() as mode:
        assert call(mode.from_tensor) == real


# Operator, and where the two factors stand among its arguments.
GEMMS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::addmm_": (1, 2)}


def gemm_flops(fn: Callable[[], Any]) -> float:
    """Multiply-adds times two of every matrix product that runs inside `fn`, from the profiler's shapes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        fn()
    total = 0.0
    for event in profile.events():
        if event.name in GEMMS:
            a, b = (event.input_shapes[i] for i in GEMMS[event.name])
            total += 2.0 * a[0] * a[1] * b[1]
    return total


@pytest.mark.parametrize("chunk_bytes", [None, 64 * 101 * 4])
def test_gemm_work(backend: str, chunk_bytes: int | None) -> None:
    """One GEMM without a gradient, three with both, two with a frozen half; cost follows live and active tokens."""
    n_tokens, vocab, width = 256, 101, 16
    mask = torch.ones(n_tokens, dtype=torch.bool)
    case = linear_case(vocab, width, (n_tokens,), seed=134, mask=mask)
    one = 2.0 * n_tokens * vocab * width

    def work(needs: tuple[str, ...], mask: Tensor = mask, advantages: Tensor = case.advantages) -> float:
        x = case.fresh()
        for name, leaf in x.items():
            leaf.requires_grad_(name in needs)

        def run() -> None:
            out = linear_dapo_loss(
                x["hidden"],
                x["weight"],
                case.target_ids,
                case.old_logprobs,
                advantages,
                objective="reinforce",
                mask=mask,
                chunk_bytes=chunk_bytes,
            )
            if needs:
                out.loss.backward()

        return gemm_flops(run) / one

    both = ("hidden", "weight")
    assert work(()) == pytest.approx(1, rel=0.01)
    assert work(both) == pytest.approx(3, rel=0.01)
    assert work(("hidden",)) == pytest.approx(2, rel=0.01)
    assert work(("weight",)) == pytest.approx(2, rel=0.01)
    quarter = mask.clone()
    quarter[64:] = False
    assert work((), quarter) == pytest.approx(0.25, rel=0.01)
    assert work(both, quarter) == pytest.approx(0.75, rel=0.01)
    half_idle = case.advantages.masked_fill(torch.arange(n_tokens) % 2 == 0, 0.0)
    assert work(both, mask, half_idle) == pytest.approx(1 + 2 * 0.5, rel=0.01)


MEMORY_PROGRAM = """
import resource, torch
from dapo_kernels import linear_dapo_loss, use_backend
T, V, H = 1024, 50021, 8
g = torch.Generator().manual_seed(0)
hidden = torch.randn(T, H, generator=g).requires_grad_()
weight = torch.randn(V, H, generator=g).requires_grad_()
ids = torch.randint(V, (T,), generator=g)
advantages = torch.randn(T, generator=g)
with use_backend({backend!r}):
    linear_dapo_loss(hidden[:8], weight, ids[:8], None, advantages[:8]).loss.backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    linear_dapo_loss(hidden, weight, ids, None, advantages, chunk_bytes=4 << 20, entropy_coef=0.01).loss.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_the_logits_never_exist(backend: str) -> None:
    """T=1024, V=50021: all logits would be 195 MiB in float32. Peak memory grows by a few chunks of 4 MiB."""
    grown = float(_run(MEMORY_PROGRAM.format(backend=backend)))
    assert grown < 80, f"{grown:.0f} MiB"


def _run(program: str, **environment: str) -> str:
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_has_no_side_effect() -> None:
    """No thread count, default dtype or grad mode changes, and integrations stay out."""
    program = """
import sys, torch
state = lambda: (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed())
before = state()
import dapo_kernels
assert state() == before
assert not {"transformers", "trl", "verl", "triton"} & set(sys.modules), "imported more than torch"
assert set(dapo_kernels.__all__) == {
    "dapo_loss", "linear_dapo_loss", "policy_loss", "token_logprobs", "linear_token_logprobs",
    "policy_loss_from_logits", "policy_loss_from_hidden",
    "preference_loss", "linear_preference_loss", "preference_loss_from_logprobs",
    "linear_distillation_loss", "LoraFactors", "SamplingMask",
    "LossOutput", "TokenStats", "PreferenceOutput", "DistillationOutput",
    "Objective", "OBJECTIVES", "reduce_metrics", "summarize", "use_backend", "__version__"}
"""
    _run(program)


def test_backends_agree_inside_one_process() -> None:
    """The choice of backend is part of a compiled graph: switching it afterwards gives the other one's numbers."""
    pytest.importorskip("dapo_kernels._C", reason="dapo_kernels._C is not built")
    fn, leaves = _program("logits")
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for name in ("torch", "cpp", "torch"):
        with use_backend(name):
            torch.testing.assert_close(compiled(*leaves), fn(*leaves), rtol=0, atol=0)


def test_compile_finds_the_backend_of_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``use_backend``: no import may be left for the tracer to stop at. Fake CUDA tensors need no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(registry, "_reasons", {})
    entry = registry.BACKENDS["triton"]._replace(missing=lambda: __import__("importlib").import_module("os") and None)
    monkeypatch.setitem(registry.BACKENDS, "triton", entry)

    def served(x: Tensor) -> Tensor:
        return x + len(registry.backend_for("dapo_loss", x.device, x.dtype, x.shape[-1]))

    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 7, device="cuda", dtype=torch.bfloat16)
        assert torch.compile(served, fullgraph=True, backend="eager")(x).device.type == "cuda"
    assert registry._reasons == {"triton": None}


def test_compile_takes_a_temperature_that_changes(backend: str) -> None:
    case = logits_case(vocab=37, seed=132)
    torch._dynamo.reset()

    def score(logits: Tensor, temperature: float) -> Tensor:
        return token_logprobs(logits, case.target_ids, temperature=temperature).logprobs

    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    for temperature in (1.0, 0.7, 0.5):
        expected = score(case.leaves["logits"], temperature)
        torch.testing.assert_close(compiled(case.leaves["logits"], temperature), expected)
