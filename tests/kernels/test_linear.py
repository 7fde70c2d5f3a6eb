"""`linear_dapo_loss` from hidden states: every gradient, alone and together, whatever the chunking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_oracle import Problem
from cases import LOW_PRECISION, Case, call_linear, dtypes_of, linear_case
from closeness import EPS, as_accurate
from oracle import Options
from torch import Tensor

from dapo_kernels import linear_dapo_loss, linear_token_logprobs, use_backend

EVERYTHING = Options(clip_high=0.28, dual_clip=2.0, kl_coef=0.1, entropy_coef=0.05, aggregate="seq-mean-token-mean")
ROOMY = Options(clip_low=0.5, clip_high=0.75)  # log 0.5 = -0.69, log 1.75 = 0.56


def run(case: Case, o: Options, **kwargs: Any) -> tuple[Any, dict[str, Tensor | None]]:
    given = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, **o.keywords(), **kwargs}
    if o.needs_reference:
        given["ref_logprobs"] = case.ref_logprobs
    return call_linear(linear_dapo_loss, case, "ppo", **given)


def check(case: Case, o: Options, results: tuple[Any, dict[str, Tensor | None]], multiple: float | None = None) -> None:
    """Loss and each gradient.

    With 19 tokens in half precision one rounded logit decides the error, eager's as ours: a single comparison is
    loose. `test_rounding_is_eagers_on_average` is the tight one.
    """
    (out, grads), dtype = results, case.leaves["hidden"].dtype
    multiple = multiple or (2.0 if dtype in (torch.float32, torch.float64) else 6.0)
    problem = Problem(case, o, dtype=dtype)
    truth, eager = problem.truth, problem.eager
    # One scalar may come out right by luck: what a loss can be asked for is the worst log-prob's error.
    worst = float((eager.logprobs.double() - truth.logprobs).abs().sum().clamp(min=1e-6))
    size = max([1.0, *case.advantages[case.mask].abs().tolist()])
    assert abs(out.loss.item() - truth.loss.item()) <= 2 * size * worst / max(1, int(case.mask.sum())) + 1e-6
    as_accurate(out.logprobs, truth.logprobs, eager.logprobs, what="log-probs", multiple=multiple, scale=8.0)
    for name, grad in grads.items():
        if grad is not None:
            assert grad.dtype == dtype
            as_accurate(grad, truth.grads[name], eager.grads[name], what=f"{name} gradient", multiple=multiple)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no_softcap", "softcap"])
@pytest.mark.parametrize("o", [ROOMY, EVERYTHING], ids=["clip", "everything"])
def test_every_dtype(backend: str, o: Options, softcap: float | None, bias: bool) -> None:
    """The temperature comes after the softcap."""
    for dtype in dtypes_of(backend):
        tau: Any = torch.linspace(0.8, 1.2, 21) if softcap else 1.0
        case = linear_case(67, 12, (7, 2, 12), dtype=dtype, bias=bias, softcap=softcap, temperature=tau, seed=31)
        check(case, o, run(case, o))


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=["f32", "bf16", "f16"])
def test_rounding_is_eagers_on_average(backend: str, dtype: torch.dtype) -> None:
    """Root mean square error over 8 problems, as a ratio to eager's on the same: 1 within the noise of 8."""
    ratios: dict[str, list[float]] = {}
    for seed in range(30, 38):
        case = linear_case(67, 12, (7, 2, 12), dtype=dtype, bias=True, softcap=2.0, seed=seed)
        _, grads = run(case, EVERYTHING)
        problem = Problem(case, EVERYTHING, dtype=dtype)
        for name, grad in grads.items():
            assert grad is not None
            truth = problem.truth.grads[name]
            mine, theirs = ((x.double() - truth).square().mean() for x in (grad, problem.eager.grads[name]))
            ratios.setdefault(name, []).append(float((mine / theirs).sqrt().log()))
    for name, logs in ratios.items():
        assert sum(logs) / len(logs) <= 0.47, f"{name}: {2.718 ** (sum(logs) / len(logs)):.2f} of eager's error"


@pytest.mark.parametrize("needs", ["hidden", "weight", "bias", "hidden weight", "weight bias", "hidden bias"])
def test_a_gradient_only_for_what_requires_one(backend: str, needs: str) -> None:
    case = linear_case(67, 12, bias=True, softcap=3.0, seed=32)
    out, grads = run(case, EVERYTHING, needs=needs.split())
    assert {name for name, grad in grads.items() if grad is not None} == set(needs.split())
    check(case, EVERYTHING, (out, grads))


@pytest.mark.parametrize("chunk_bytes", [1, 67 * 4, 67 * 4 * 3 + 1, 1 << 30])
def test_chunking_changes_nothing(backend: str, chunk_bytes: int) -> None:
    """One token per chunk, a chunk size that divides nothing, and everything at once."""
    for dtype in dtypes_of(backend):
        case = linear_case(67, 12, (9, 4, 6), dtype=dtype, bias=True, seed=33)
        check(case, EVERYTHING, run(case, EVERYTHING, chunk_bytes=chunk_bytes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_many_chunks_do_not_cost_accuracy(backend: str, dtype: torch.dtype) -> None:
    """The head's gradient accumulates in float32: in bfloat16, 256 chunks lose several times eager's error."""
    case = linear_case(29, 8, (256,), dtype=dtype, bias=True, seed=34, dead=0.0)
    _, grads = run(case, ROOMY, chunk_bytes=1)
    problem = Problem(case, ROOMY, dtype=dtype)
    for name in ("weight", "bias"):
        grad = grads[name]
        assert grad is not None
        as_accurate(grad, problem.truth.grads[name], problem.eager.grads[name], what=name, multiple=1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_head_of_more_than_one_tile(backend: str, restore_threads: None, dtype: torch.dtype) -> None:
    """Large enough (V=9001, H=128) that the head's gradient is added tile by tile and shared among threads."""
    case = linear_case(9001, 128, (13, 11), dtype=dtype, seed=47, dead=0.2)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run(case, ROOMY, chunk_bytes=5 * 9001 * dtype.itemsize))
    # A GEMM of five rows adds 9001 products in another order than one of 24.
    check(case, ROOMY, results[0], multiple=8.0)
    for name, grad in results[0][1].items():
        torch.testing.assert_close(grad, results[1][1][name], rtol=max(2 * EPS[dtype], 1e-5), atol=2e-7)


@pytest.mark.parametrize("lengths", [(0,), (4, 3), (1,)], ids=str)
def test_batches_of_almost_nothing(backend: str, lengths: tuple[int, ...]) -> None:
    mask = torch.full((sum(lengths),), lengths == (1,))
    for dtype in dtypes_of(backend):
        for vocab, hidden in ((41, 8), (5, 1)):
            case = linear_case(vocab, hidden, lengths, dtype=dtype, bias=True, seed=42, mask=mask)
            check(case, EVERYTHING, run(case, EVERYTHING))
    case = linear_case(1, 1, seed=43)
    out, grads = run(case, ROOMY)
    assert float(out.logprobs.abs().max()) <= 2e-6
    assert all(grad is not None and float(grad.abs().max()) <= 1e-6 for grad in grads.values())


def test_inputs_may_have_any_strides_and_are_left_alone(backend: str) -> None:
    """A transposed head, a hidden state cut out of a wider one, sliced per-token tensors."""
    case = linear_case(41, 8, bias=True, seed=44)
    plain, grads = run(case, EVERYTHING)
    nan = float("nan")
    leaves = {
        "hidden": torch.cat([case.leaves["hidden"], torch.full((19, 3), nan)], 1)[:, :8],
        "weight": case.leaves["weight"].T.contiguous().T,
        "bias": torch.stack([case.leaves["bias"], torch.full((41,), nan)], 1)[:, 0],
    }
    assert not any(leaf.is_contiguous() for leaf in leaves.values())
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    names = ("target_ids", "old_logprobs", "advantages", "mask", "ref_logprobs")
    per_token = {name: torch.stack([x, x], 1)[:, 0] for name, x in case.tensors(*names).items()}
    given = {"objective": "ppo", "cu_seqlens": case.cu_seqlens, **EVERYTHING.keywords()}
    out = linear_dapo_loss(**leaves, **per_token, **given)
    out.loss.backward()
    torch.testing.assert_close(out.loss, plain.loss, rtol=1e-6, atol=1e-7)
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, grads[name], rtol=1e-5, atol=1e-8)
        assert torch.equal(leaf.detach(), case.leaves[name])


def test_float64_stays_float64_under_autocast() -> None:
    """As ``F.linear`` has it."""
    case = linear_case(31, 8, dtype=torch.float64, seed=4)
    args = (*case.leaves.values(), case.target_ids, case.old_logprobs, case.advantages)
    plain = linear_dapo_loss(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = linear_dapo_loss(*args)
    assert under.logprobs.dtype == torch.float64
    assert torch.equal(under.loss, plain.loss)


@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_an_outlier_channel_does_not_overflow_float16(objective: str) -> None:
    """Hidden states of 70 in one channel, as language models have, over a long response: the sum before the loss is
    scaled back is a power of two larger than the gradient itself."""
    n = 65536
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 4, generator=g).half()
    hidden[:, 0] = 70.0
    weight = (0.01 * torch.randn(19, 4, generator=g)).half()
    targets, bounds = torch.randint(3, (n,), generator=g), torch.tensor([0, n], dtype=torch.int32)

    def gradients(hidden: Tensor, weight: Tensor, **how: int) -> tuple[Tensor, ...]:
        leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
        advantages = torch.full((n,), 8.0)
        out = linear_dapo_loss(*leaves, targets, None, advantages, objective=objective, cu_seqlens=bounds, **how)
        return torch.autograd.grad(out.loss, leaves)

    with use_backend("torch"):
        expected = gradients(hidden.double(), weight.double())
    assert float(expected[1].abs().max()) > 100
    for chunk_bytes in (19 * 2 * n, 19 * 2 * n // 7):
        got = gradients(hidden, weight, chunk_bytes=chunk_bytes)
        assert all(x.dtype == torch.float16 for x in got)
        torch.testing.assert_close(got[1].double(), expected[1], rtol=2e-3, atol=1e-3)


# --- a gradient tensor of the caller's ----------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["dapo", "gspo", None])
def test_main_grad_takes_the_weights_gradient(backend: str, objective: str | None) -> None:
    """Of a loss, and of log-probs (None)."""
    for dtype in LOW_PRECISION:
        case = linear_case(67, 12, (7, 2, 12), dtype=dtype, bias=True, seed=31)
        loss: dict[str, Any] = {"objective": objective, "mask": case.mask, "cu_seqlens": case.cu_seqlens}
        for chunk_bytes in (None, 5 * 67 * 2):
            plain, other, main_grad = case.fresh(), case.fresh(), torch.full((67, 12), 0.5)
            for x, extra in ((plain, {}), (other, {"main_grad": main_grad})):
                given = {"target_ids": case.target_ids, "chunk_bytes": chunk_bytes, **x, **extra}
                if objective is None:
                    stats = linear_token_logprobs(**given, entropy=True)
                    (stats.logprobs.sum() + stats.entropy.sum()).backward()
                else:
                    per_token = case.tensors("old_logprobs", "advantages")
                    (3 * linear_dapo_loss(**given, **per_token, **loss).loss).backward()
            assert other["weight"].grad is None
            assert torch.equal(other["hidden"].grad, plain["hidden"].grad)  # type: ignore[arg-type]
            assert plain["weight"].grad is not None
            expected, rounding = plain["weight"].grad.float(), max(2 * EPS[dtype], 1e-6)
            atol = rounding * float(expected.abs().max())
            torch.testing.assert_close(main_grad - 0.5, expected, rtol=rounding, atol=atol)
