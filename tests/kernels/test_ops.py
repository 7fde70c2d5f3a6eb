"""The operators as torch sees them: opcheck, fake tensors, how much GEMM work they do and how much memory they take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import call_linear, linear_case, logits_case
from no_device import device_path
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dapo_kernels import (
    dapo_loss,
    linear_dapo_loss,
    linear_distillation_loss,
    linear_token_logprobs,
    policy_loss,
    token_logprobs,
)

# Checked where there are ranks, in test_vocab_parallel.py.
OF_RANKS = {"shard_columns", "from_first", "gathered_sequence", "scattered_sum", "traced_sum"}


def registered() -> set[str]:
    """Names of every operator of the package."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dapo_kernels::")]
    return {name.removeprefix("dapo_kernels::").split(".")[0] for name in names}


def copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


class Recorder(TorchDispatchMode):
    """Keeps the arguments of calls of the package's operators, one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "dapo_kernels":
            name = func.name().removeprefix("dapo_kernels::").split(".")[0]
            present = repr([type(x) for x in args])
            self.calls.setdefault(name, {})[present] = (func, *tree_map(copied, (args, kwargs)))
        return func(*args, **kwargs)


def exercise() -> Recorder:
    """Call the whole public surface, forward and backward, and record the operators behind it."""
    case, linear = logits_case(vocab=13, lengths=(3, 2), seed=131), linear_case(vocab=13, lengths=(3, 2), bias=True)
    options: dict[str, Any] = {"mask": case.mask, "kl_coef": 0.1, "ref_logprobs": case.ref_logprobs}
    with Recorder() as recorder:
        for entropy_coef, old, weights in ((0.0, case.old_logprobs, case.importance_weights), (0.1, None, None)):
            per_token = (case.target_ids, old, case.advantages)
            shared = {**options, "entropy_coef": entropy_coef, "importance_weights": weights}
            for inplace in (False, True):
                logits = case.fresh()["logits"]
                rows = [logits * 1 if inplace else logits.t().contiguous().t() for _ in range(2)]  # of any strides
                dapo_loss(rows[0], *per_token, **shared, inplace_backward=inplace).loss.backward()
                stats = token_logprobs(rows[1], case.target_ids, entropy=True, inplace_backward=inplace)
                (stats.logprobs.sum() + 2 * stats.entropy.sum()).backward()
            x = linear.fresh()
            head, more = (x["hidden"], x["weight"]), {"softcap": 3.0, "temperature": torch.full((5,), 0.7)}
            linear_dapo_loss(*head, *per_token, **shared, bias=x["bias"], **more).loss.mul(2.0).backward()
            stats = linear_token_logprobs(*head, linear.target_ids, bias=x["bias"], entropy=True)
            (stats.logprobs.sum() + stats.entropy.sum()).backward()
            of_ref = (torch.randn(5, 4), torch.randn(13, 4))
            linear_distillation_loss(*head, *of_ref, beta=0.3, mask=case.mask).loss.backward()
            leaf = case.ref_logprobs.clone().requires_grad_()
            policy_loss(leaf, old, case.advantages, **options, importance_weights=weights).loss.backward()
    return recorder


def differentiable(name: str, position: int, x: Any) -> bool:
    """What the public functions differentiate: the logits, the head's three tensors, the log-probs."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or name.endswith("grad"):
        return False
    return position < (3 if name.startswith("linear") else 1)


def test_opcheck_every_operator() -> None:
    """torch's own checks of schema, fake implementation and autograd registration, on arguments from real calls."""
    recorder = exercise()
    assert set(recorder.calls) == registered() - OF_RANKS  # a public call reaches every operator
    for name, calls in recorder.calls.items():
        for func, args, kwargs in calls.values():
            torch.library.opcheck(func, tree_map(copied, args), kwargs, test_utils=("test_schema", "test_faketensor"))
        if not name.endswith("_"):  # in-place operators are called inside autograd.Function
            given = [
                x.requires_grad_() if differentiable(name, i, x) else x for i, x in enumerate(tree_map(copied, args))
            ]
            of_autograd = ("test_autograd_registration", "test_aot_dispatch_dynamic")
            torch.library.opcheck(func, tuple(given), kwargs, test_utils=of_autograd)


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


BOTH, FACTORS = ("hidden", "weight"), ("hidden", "lora_a", "lora_b")


@pytest.mark.parametrize("chunk_bytes", [None, 16 * 101 * 4])
@pytest.mark.parametrize(
    ("needs", "objective", "live", "idle", "gemms"),
    [
        (BOTH, "reinforce", 1, 0, 3),
        (("hidden",), "reinforce", 1, 0, 2),
        (("weight",), "reinforce", 1, 0, 2),
        (BOTH, "reinforce", 0.25, 0, 0.75),
        (BOTH, "reinforce", 1, 0.5, 1 + 2 * 0.5),
        (BOTH, "gspo", 0.5, 0, 4 * 0.5),  # statistics first, as for preferences
        (FACTORS, "reinforce", 1, 0, 2 + 4 * (3 * 101 + 4 * 16) / (101 * 16)),  # nothing of V x H
    ],
)
def test_gemm_work(
    needs: tuple[str, ...], objective: str, live: float, idle: float, gemms: float, chunk_bytes: int | None
) -> None:
    """Three GEMMs with both gradients, two with a frozen half; the cost follows the share of live and active tokens, on
    a device too.
    """
    n, vocab, width = 64, 101, 16
    rank = 4 if needs == FACTORS else 0
    case = linear_case(vocab, width, (n,), seed=134, mask=torch.arange(n) < live * n, rank=rank)
    case.advantages[: int(idle * n)] = 0.0
    how = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "chunk_bytes": chunk_bytes, "needs": needs}
    for path in (nullcontext(), device_path()):
        with path:
            work = gemm_flops(lambda: call_linear(linear_dapo_loss, case, objective, **how))
        assert work == pytest.approx(gemms * 2.0 * n * vocab * width, rel=0.01)


FRESH_PROCESS = """
import resource, torch
state = lambda: (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed())
before = state()
from dapo_kernels import linear_dapo_loss
assert state() == before
T, V, H = 512, 50021, 8
hidden, weight = torch.randn(T, H).requires_grad_(), torch.randn(V, H).requires_grad_()
ids, advantages = torch.randint(V, (T,)), torch.randn(T)
linear_dapo_loss(hidden[:8], weight, ids[:8], None, advantages[:8]).loss.backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_dapo_loss(hidden, weight, ids, None, advantages, chunk_bytes=4 << 20, entropy_coef=0.01).loss.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_the_logits_never_exist_and_importing_changes_nothing() -> None:
    """All logits would be 98 MiB in float32. Peak memory grows by a few chunks of 4 MiB."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", FRESH_PROCESS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 50
