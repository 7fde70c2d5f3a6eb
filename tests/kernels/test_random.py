"""Random problems: objective x layout x dtype x options against float64; and wrong arguments, which only raise
ValueError, TypeError or IndexError with a message that names the argument.

The draws are fixed (``derandomize``): the same examples every time, so a failure is a finding and not the weather.
Hypothesis also draws constants that stand in the package, so a change there draws others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, linear_case, logits_case, logits_of
from closeness import EPS, as_accurate
from entries import call
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracle_family import (
    FAMILY,
    Family,
    batch_selection,
    binary_divergence,
    case_rows,
    covariances,
    family_loss,
    family_solve,
    log_ratios,
    selection_mask,
    share_down,
)
from torch import Tensor

from dapo_kernels import (
    OBJECTIVES,
    Objective,
    dapo_loss,
    linear_dapo_loss,
    linear_token_logprobs,
    policy_loss,
    token_logprobs,
)

FIXED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


# --- any objective against float64 ------------------------------------------------------------------------


@st.composite
def objectives(draw: st.DrawFn) -> Family:
    """A combination of fields that has a meaning."""
    surrogate = draw(st.sampled_from(["clip", "clip", "cispo", "sapo", "reinforce", "dppo_tv", "dppo_kl"]))
    dppo = surrogate.startswith("dppo")
    levels = ["token"] if dppo or surrogate == "reinforce" else ["token", "sequence", "sequence_token"]
    ratio = draw(st.sampled_from([*levels, *(["sequence_clipped"] if surrogate == "clip" else [])]))
    bounded = dppo or (surrogate == "clip" and ratio != "sequence_clipped")
    aggregate = draw(st.sampled_from(AGGREGATES))
    cuts: list[dict[str, Any]] = [{}, {"top_entropy": draw(st.sampled_from([0.2, 0.5, 1.0]))}]
    if surrogate != "reinforce":
        cuts += [{"clip_cov": (0.2, -1.0, 3.0)}, {"kl_cov": (0.3, 0.7)}]
    kl_coef = draw(st.sampled_from([0.0, 0.0, 0.04, 1.0]))
    estimator = draw(st.sampled_from(["k1", "k2", "k3"]))
    return Family(
        surrogate=surrogate,
        ratio=ratio,
        clip_low=draw(st.sampled_from([0.0, 3e-4, 0.2, 0.5, 1.0])),
        clip_high=draw(st.sampled_from([0.0, 4e-4, 0.28, 3.0, math.inf])),
        dual_clip=draw(st.sampled_from([None, 1.7])) if bounded else None,
        sapo_tau=draw(st.sampled_from([(1.0, 1.05), (4.0, 0.3)])),
        vespo=draw(st.sampled_from([None, None, (0.5, 0.1, 0.3, 0.2)])),
        off_policy_mask=draw(st.sampled_from([None, None, 0.1])),
        kl_coef=kl_coef,
        kl_estimator=estimator,
        kl_to="reference" if estimator == "k1" else draw(st.sampled_from(["reference", "old"])),
        kl_through_ratio=estimator == "k3" and ratio == "token" and draw(st.booleans()),
        entropy_coef=draw(st.sampled_from([0.0, 0.0, 0.02, -0.5])),
        aggregate=aggregate,
        length_norm=7.0 if aggregate.endswith("norm") else None,
        max_old_prob=draw(st.sampled_from([None, None, 0.6])),
        **draw(st.sampled_from(cuts)),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, str, torch.dtype, Case]:
    """Entry point, layout, dtype, case."""
    entry = draw(st.sampled_from(["logits", "inplace", "linear"]))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    lengths = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    vocab = draw(st.sampled_from([2, 3, 17, 64, 130]))
    tau: float | Tensor = draw(st.sampled_from([1.0, 0.7]))
    if draw(st.booleans()):
        tau = torch.linspace(0.6, 1.3, sum(lengths))
    shared: dict[str, Any] = {
        "dtype": dtype,
        "seed": draw(st.integers(0, 2**31)),
        "dead": draw(st.sampled_from([0.0, 0.3, 0.8])),
        "temperature": tau,
    }
    if entry == "linear":
        head = {"bias": draw(st.booleans()), "softcap": draw(st.sampled_from([None, 15.0]))}
        case = linear_case(vocab, 8, lengths, **head, **shared)
    else:
        case = logits_case(vocab, lengths, sharpness=draw(st.sampled_from([0.5, 2.0, 6.0])), **shared)
    return entry, draw(st.sampled_from(["packed", "padded"])), dtype, case


def margin(case: Case, o: Family) -> float:
    """How far the nearest decision (a clip edge, a rank, a probability) is from going the other way."""
    rows = case_rows(case, o, torch.float64)
    x = rows.inputs
    tokens = [t for t in range(len(rows.live)) if rows.live[t]]
    gaps = [math.inf]
    level = "token" if o.ratio == "sequence_clipped" else o.ratio
    deltas = log_ratios(x, rows.live, case.spans, dataclasses.replace(o, ratio=level))
    edges = [1 - o.clip_low, 1 + o.clip_high, o.dual_clip or math.inf]
    assert x.old_logprobs is not None
    if o.surrogate.startswith("dppo"):
        pairs = [(float(x.old_logprobs[t].exp()), float(x.logprobs[t].detach().exp())) for t in tokens]
        moved = [binary_divergence(o.surrogate[-2:], old, new, floor=1e-8) for old, new in pairs]
        gaps += [abs(m - edge) for m in moved for edge in (o.clip_low, o.clip_high)]
    if o.off_policy_mask is not None:
        means = log_ratios(x, rows.live, case.spans, dataclasses.replace(o, ratio="sequence"))
        gaps += [abs(float(d.detach()) + o.off_policy_mask) for d in means.values()]
    # A ratio of exactly 1 beside an empty trust region is a tie by design, but not of these inputs.
    gaps += [abs(float(torch.exp(d.detach())) - edge) for d in deltas.values() for edge in edges]
    scores = covariances(x.logprobs.detach(), x.advantages, rows.live)
    if o.clip_cov is not None:
        gaps += [abs(s - edge) for s in scores.values() for edge in o.clip_cov[1:]]
    assert x.entropy is not None
    ranked = scores.values() if o.kl_cov else [float(x.entropy[t].detach()) for t in tokens] if o.top_entropy else []
    ordered = sorted(ranked)
    gaps += [b - a for a, b in itertools.pairwise(ordered)]
    return min(gaps)


class Slopes:
    """What a rounding error of a gradient is relative to: slopes by a log-prob or entropy, through the head.

    Where the target's probability is near 1 the gradient p - 1 itself is far smaller than that.
    """

    def __init__(self, case: Case, o: Family, selected: set[int], **kw: Any) -> None:
        grad_output, denominator = kw.pop("grad_output"), kw.pop("denominator")
        rows = case_rows(case, o, torch.float64, **kw)
        x = rows.inputs
        assert x.entropy is not None
        loss, _ = family_loss(x, rows.live, case.spans, o, denominator, selected)
        slopes = torch.zeros(len(rows.live), dtype=torch.float64)
        if loss.requires_grad:
            found = torch.autograd.grad(loss * grad_output, (x.logprobs, x.entropy), allow_unused=True)
            slopes = sum((g.abs() for g in found if g is not None), slopes)
        live = torch.tensor(rows.live)
        slopes = (slopes / torch.as_tensor(case.temperature, dtype=torch.float64))[live]
        self.total, largest = float(slopes.sum()), float(slopes.max()) if slopes.numel() else 0.0
        size = {name: float(leaf.double().abs().max()) for name, leaf in case.leaves.items()}
        through = {"logits": 1.0, "bias": 1.0, "hidden": size.get("weight", 0.0), "weight": size.get("hidden", 0.0)}
        self.by_leaf = {name: largest * through[name] for name in case.leaves}
        with torch.no_grad():
            logits = logits_of({name: leaf.double() for name, leaf in case.leaves.items()}, case.softcap)
        self.logit = max(1.0, float(logits.abs().max()))


def near(got: Tensor, truth: Tensor, eager: Tensor, unit: float, what: str) -> None:
    """For 16-bit tensors: a few of eager's errors and a unit of rounding; eager's may be 0 by luck."""
    if not got.numel():
        return
    error, of_eager = (float((x.detach().double() - truth.double()).abs().max()) for x in (got, eager))
    assert error <= 4 * of_eager + unit, f"{what}: {error:.3e}, eager {of_eager:.3e}, unit {unit:.3e}"


@given(problem=problems(), o=objectives(), flags=st.tuples(st.booleans(), st.booleans()), data=st.data())
@settings(FIXED, max_examples=250)
def test_no_combination_disagrees_with_float64(
    backend: str, problem: tuple[str, str, torch.dtype, Case], o: Family, flags: tuple[bool, bool], data: st.DataObject
) -> None:
    entry, layout, dtype, case = problem
    weighted, global_count = flags
    # Logits that a half-precision head has rounded move by some hundredths; everything else is float32 arithmetic.
    rounds = entry == "linear" and dtype != torch.float32
    assume(margin(case, o) > (0.06 if rounds else 1e-5))
    rows = case_rows(case, o, torch.float64)
    selected = batch_selection(rows.inputs, rows.live, case.spans, o)
    extra: dict[str, Any] = {"ref_logprobs": case.ref_logprobs} if o.needs_reference else {}
    if o.clip_cov is not None:
        selected = set(sorted(selected)[: share_down(rows.live, o.clip_cov[0])])
    known = data.draw(st.booleans(), label="selection") and (o.top_entropy or o.kl_cov)
    if o.clip_cov is not None or known:
        extra["selection"] = selection_mask(case, selected)
    kw: dict[str, Any] = {
        "weighted": weighted,
        "denominator": 5.5 if global_count else None,
        "grad_output": data.draw(st.sampled_from([1.0, -3.0]), label="grad_output"),
    }
    truth = family_solve(case, o, selected=selected, **kw)
    eager = family_solve(case, o, dtype=dtype, selected=selected, **kw)
    out, grads = call(entry, case, "ppo", layout=layout, **extra, **kw, **o.keywords())
    live, slopes = case.mask, Slopes(case, o, selected, **kw)
    # k3 and ratios grow as exp of the log-prob's error: scales of the terms, not of their sum.
    scale = max(1.0, 4 * slopes.total, abs(float(truth.loss)), abs(float(truth.metrics["ref_kl"])) * o.kl_coef)
    if rounds:  # a logit is off by a unit of its own size, and everything follows
        unit = EPS[dtype] * slopes.logit
        of_sum = EPS[torch.float32] * abs(float(truth.loss))  # what is left where every token is clipped
        near(out.loss, truth.loss, eager.loss, unit * slopes.total + of_sum, "loss")
        near(out.logprobs[live], truth.logprobs[live], eager.logprobs[live], 2 * unit, "logprobs")
    else:
        unit = EPS[dtype]
        as_accurate(out.loss, truth.loss, eager.loss, what="loss", scale=scale, multiple=3.0)
        as_accurate(out.logprobs[live], truth.logprobs[live], eager.logprobs[live], what="logprobs", scale=8.0)
    for key, grad in grads.items():
        reach = max(slopes.by_leaf[key], float(truth.grads[key].abs().max()))
        if dtype == torch.float32:
            # Twice: the rounding of ratio times advantage, and that of the sum over the vocabulary.
            as_accurate(grad, truth.grads[key], eager.grads[key], what=key, multiple=4.0, scale=2 * reach)
        else:  # rounded once as it is formed and once as grad_output scales it
            near(grad, truth.grads[key], eager.grads[key], unit * reach, key)
    if "logits" in grads:
        assert not grads["logits"][~live].any()
    if not rounds:
        for key, value in truth.metrics.items():
            if key != "entropy" or out.entropy is not None:
                assert float(out.metrics[key]) == pytest.approx(value, rel=3e-5, abs=1e-4), key


@given(
    name=st.sampled_from(sorted(FAMILY)), seed=st.integers(0, 2**31), lengths=st.lists(st.integers(0, 7), max_size=6)
)
@settings(FIXED, max_examples=40)
def test_rows_with_empty_sequences(backend: str, name: str, seed: int, lengths: list[int]) -> None:
    """Sequences of no token anywhere in the batch, and batches of no token."""
    o = FAMILY[name]
    assume(sum(lengths) > 0)
    case = logits_case(11, lengths, seed=seed)
    selected: set[int] | None = None
    extra: dict[str, Any] = {"ref_logprobs": case.ref_logprobs} if o.needs_reference else {}
    if o.clip_cov is not None:
        selected, extra["selection"] = set(), torch.zeros(sum(lengths), dtype=torch.bool)
    keywords = {"length_norm": o.length_norm} if o.length_norm else {}
    assume(margin(case, o) > 1e-5)
    truth, eager = (family_solve(case, o, dtype=d, selected=selected) for d in (torch.float64, torch.float32))
    out, grads = call("logits", case, name, **extra, **keywords)
    as_accurate(out.loss, truth.loss, eager.loss, what="loss", scale=1.0)
    as_accurate(grads["logits"], truth.grads["logits"], eager.grads["logits"], what="gradient", multiple=3.0)


@given(
    vocab=st.integers(1, 90), n=st.integers(0, 6), seed=st.integers(0, 2**31), tau=st.floats(0.05, 20.0),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    stride=st.integers(1, 3),
)  # fmt: skip
@settings(FIXED, max_examples=60)
def test_token_logprobs_of_anything(
    backend: str, vocab: int, n: int, seed: int, tau: float, scale: float, dtype: torch.dtype, stride: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocab * stride, generator=g) * scale).to(dtype)[:, ::stride].requires_grad_()
    ids = torch.randint(vocab, (n,), generator=g)
    stats = token_logprobs(logits, ids, temperature=tau, entropy=True)
    truth = torch.log_softmax(logits.detach().double() / tau, -1)
    picked = truth[torch.arange(n), ids]
    assert stats.entropy is not None
    size = 1.0 + float((logits.detach().double() / tau).abs().max()) if n else 1.0
    torch.testing.assert_close(stats.logprobs.detach().double(), picked, rtol=2e-6, atol=4e-7 * size)
    entropy = -torch.where(truth.exp() > 0, truth.exp() * truth, 0.0).sum(-1)
    torch.testing.assert_close(stats.entropy.detach().double(), entropy, rtol=2e-5, atol=1e-6 * size)
    assert bool((stats.logprobs <= 0).all())
    stats.logprobs.sum().backward()
    assert logits.grad is not None
    sums = logits.grad.double().sum(-1)  # a gradient row of a softmax adds up to 0
    assert bool((sums.abs() <= (2e-2 if dtype == torch.bfloat16 else 2e-5) / tau).all())


# --- wrong arguments --------------------------------------------------------------------------------------

T, V, H, S = 6, 11, 4, 2


def good_arguments() -> dict[str, dict[str, Any]]:
    per_token: dict[str, Any] = {
        "old_logprobs": torch.full((T,), -2.0),
        "advantages": torch.linspace(-1, 1, T),
        "mask": torch.tensor([True] * 5 + [False]),
        "cu_seqlens": torch.tensor([0, 2, T], dtype=torch.int32),
        "importance_weights": torch.ones(T),
        "ref_logprobs": torch.full((T,), -2.0),
        "kl_coef": 0.1,
        "denominator": 4.0,
        "objective": "dapo",
    }
    g = torch.Generator().manual_seed(0)
    ids, tau = torch.arange(T), {"temperature": 1.0}
    head = {"weight": torch.randn(V, H, generator=g), "bias": torch.zeros(V), "softcap": 9.0, "chunk_bytes": 4096}
    hidden = {"hidden": torch.randn(T, H, generator=g), **head, "target_ids": ids, **tau}
    logits = {"logits": torch.randn(T, V, generator=g), "target_ids": ids, **tau}
    return {
        "dapo_loss": {**logits, **per_token},
        "linear_dapo_loss": {**hidden, **per_token},
        "policy_loss": {"logprobs": torch.full((T,), -2.1), "entropy": torch.ones(T), **per_token},
        "token_logprobs": logits,
        "linear_token_logprobs": {**hidden, "mask": per_token["mask"]},
    }


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dapo_loss": dapo_loss,
    "linear_dapo_loss": linear_dapo_loss,
    "policy_loss": policy_loss,
    "token_logprobs": token_logprobs,
    "linear_token_logprobs": linear_token_logprobs,
}
TENSORS = ("logits", "hidden", "weight", "bias", "target_ids", "logprobs", "old_logprobs", "advantages", "mask")
TENSORS += ("cu_seqlens", "importance_weights", "ref_logprobs", "entropy")
WRONG_TENSORS: list[Any] = [
    "text",
    3,
    [0.0] * T,
    {"a": 1},
    torch.zeros(T + 1),
    torch.zeros(2, 2, 2, 2),
    torch.zeros(()),
    torch.zeros(T, dtype=torch.complex64),
    torch.zeros(T, V, H),
    torch.zeros(T, device="meta"),
    torch.zeros(3, T, dtype=torch.int64),
]
WRONG_OBJECTIVES: list[Any] = ["dapo2", "", None, 3, Objective, {"surrogate": "clip"}, b"dapo"]
WRONG_NUMBERS: list[Any] = ["text", [1.0], None, math.nan, -1.0, 0.0, object(), torch.zeros(3, 3), 1j]
FIELD_NAMES = tuple(f.name for f in dataclasses.fields(Objective) if f.name != "paper")


# Values in the lists above that these arguments do take.
TAKEN: dict[str, tuple[Any, ...]] = {
    "kl_coef": (),
    "clip_low": (0.0,),
    "clip_high": (0.0,),
    "entropy_coef": (0.0, -1.0),
    "kl_through_ratio": (),
    "off_policy_mask": (0.0, None),
    **dict.fromkeys(("softcap", "chunk_bytes", "denominator", "dual_clip", "length_norm", "top_entropy"), (None,)),
    **dict.fromkeys(("clip_cov", "kl_cov", "max_old_prob", "vespo"), (None,)),
    **dict.fromkeys(("bias", "mask", "importance_weights"), (None,)),
}
DOCUMENTED = (ValueError, TypeError, IndexError)


def arguments_of(function: str) -> list[str]:
    fields = FIELD_NAMES if function in ("dapo_loss", "linear_dapo_loss", "policy_loss") else ()
    return sorted({*good_arguments()[function], *fields})


def wrong_values(name: str) -> list[Any]:
    if name in TENSORS:
        return WRONG_TENSORS
    values = WRONG_OBJECTIVES if name == "objective" else WRONG_NUMBERS
    taken = TAKEN.get(name, ())
    return [v for v in values if not any(v is ok or (isinstance(v, float) and v == ok) for ok in taken)]


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function in FUNCTIONS for name in arguments_of(function)]
)
def test_a_wrong_argument_is_named(function: str, name: str) -> None:
    """One argument wrong, the others right: refused at the boundary, by its name and the function's."""
    for value in wrong_values(name):
        arguments = good_arguments()[function]
        fits = isinstance(value, Tensor) and name == next(iter(arguments)) and value.dim() in (1, 3)
        if fits:  # the first argument sets the layout: another shape or device makes the others wrong
            continue
        with pytest.raises(DOCUMENTED) as caught:
            FUNCTIONS[function](**{**arguments, name: value})
        assert name in str(caught.value), f"{function}({name}={value!r}): {caught.value}"


@given(
    function=st.sampled_from(["dapo_loss", "linear_dapo_loss", "policy_loss"]),
    objective=st.sampled_from(sorted(OBJECTIVES)),
    changes=st.dictionaries(
        st.sampled_from([*FIELD_NAMES, "selection", "generator", "old_logprobs", "cu_seqlens", "ref_logprobs", "mask"]),
        st.sampled_from(
            [None, 0.0, 0.3, 2.0, -1.0, True, "token", "sequence", "clip", "sapo", "k1", "token-mean", (0.2, 1.0),
             (0.2, 0.0, 3.0), (), torch.ones(T), torch.ones(T, dtype=torch.bool), torch.ones(S), torch.tensor(0.5),
             torch.Generator()]
        ),
        max_size=4,
    ),
)  # fmt: skip
@settings(FIXED, max_examples=400)
def test_any_mixture_of_arguments_runs_or_is_refused(function: str, objective: str, changes: dict[str, Any]) -> None:
    """No combination ends in anything but a result or a documented exception that names one of the arguments."""
    arguments = {**good_arguments()[function], "objective": objective, **changes}
    if not OBJECTIVES[objective].kl_coef and "kl_coef" not in changes:
        del arguments["kl_coef"]
        if "ref_logprobs" not in changes:
            del arguments["ref_logprobs"]
    error: Exception | None = None
    try:
        out = FUNCTIONS[function](**arguments)
    except DOCUMENTED as caught:
        error = caught
    if error is not None:
        assert any(name in str(error) for name in [*arguments, *FIELD_NAMES]), str(error)
        return
    assert out.loss.shape == ()
    assert bool(out.loss.isfinite()), (function, objective, changes)


@pytest.mark.parametrize("value", ["text", [True] * T, {"a": 1}, 1j], ids=str)
def test_a_wrong_selection_is_named(value: Any) -> None:
    arguments = {**good_arguments()["policy_loss"], "objective": "top_entropy"}
    with pytest.raises(DOCUMENTED, match="selection"):
        policy_loss(**arguments, selection=value)
