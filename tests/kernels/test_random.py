"""Random problems: objective × function × layout × dtype × options against float64.

The draws are fixed (``derandomize``): the same examples every time, so a failure is a finding and not the weather.
Hypothesis also draws constants that stand in the package, so a change there draws others.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import torch
from against_oracle import LENGTH_NORM, Problem, as_logprobs, check_metrics, options
from cases import HEAD, Case, linear_case, logits_case, logits_of, rows_of
from closeness import EPS, as_accurate
from entries import Laid, lora_of, poisoned
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracle import PROMPT_MEAN, Options, TokenInputs, binary_divergence, covariances, log_ratios
from torch import Tensor

from dapo_kernels import OBJECTIVES, linear_token_logprobs, token_logprobs
from dapo_kernels.objectives.table import AGGREGATES, KL_ESTIMATORS, RATIOS, SURROGATES

FIXED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@st.composite
def objectives(draw: st.DrawFn) -> Options:
    """A row of the table with other options, or any combination of fields that has a meaning."""
    if draw(st.booleans()):
        changes = {"kl_coef": draw(st.sampled_from([0.0, 0.1])), "entropy_coef": draw(st.sampled_from([0.0, 0.05]))}
        row = draw(st.sampled_from(sorted(OBJECTIVES)))
        return options(row, **changes, aggregate=draw(st.sampled_from(AGGREGATES)))[0]
    surrogate = draw(st.sampled_from(["clip", *SURROGATES]))
    dppo = surrogate.startswith("dppo")
    levels = RATIOS if surrogate == "clip" else RATIOS[:1] if dppo or surrogate == "reinforce" else RATIOS[:3]
    ratio = draw(st.sampled_from(levels))
    bounded = dppo or surrogate == "up" or (surrogate == "clip" and ratio != "sequence_clipped")
    aggregate = draw(st.sampled_from(AGGREGATES))
    cuts: list[dict[str, Any]] = [{}, {"top_entropy": draw(st.sampled_from([0.2, 0.5, 1.0]))}]
    if surrogate != "reinforce":
        cuts += [{"clip_cov": (0.2, -1.0, 3.0)}, {"kl_cov": (0.3, 0.7)}]
    estimator = draw(st.sampled_from(KL_ESTIMATORS))
    return Options(
        surrogate=surrogate,
        ratio=ratio,
        clip_low=draw(st.sampled_from([0.0, 3e-4, 0.2, 0.5, 1.0])),
        clip_high=draw(st.sampled_from([0.0, 4e-4, 0.28, 3.0, math.inf])),
        dual_clip=draw(st.sampled_from([None, 1.1, 1.7])) if bounded else None,
        sapo_tau=draw(st.sampled_from([(1.0, 1.05), (4.0, 0.3)])),
        vespo=draw(st.sampled_from([None, None, (0.5, 0.1, 0.3, 0.2)])),
        off_policy_mask=draw(st.sampled_from([None, None, 0.1])),
        kl_coef=draw(st.sampled_from([0.0, 0.0, 0.04, 1.0])),
        kl_estimator=estimator,
        kl_to="reference" if estimator == "k1" else draw(st.sampled_from(["reference", "old"])),
        kl_through_ratio=estimator == "k3" and ratio == "token" and draw(st.booleans()),
        entropy_coef=draw(st.sampled_from([0.0, 0.0, 0.02, -0.5])),
        aggregate=aggregate,
        length_norm=LENGTH_NORM if aggregate.endswith("norm") else None,
        max_old_prob=draw(st.sampled_from([None, None, 0.6])),
        **draw(st.sampled_from(cuts)),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, torch.dtype, Case]:
    """Entry point, dtype, case. Sequences of no token may stand anywhere, also alone."""
    entry = draw(st.sampled_from(["logits", "inplace", "linear", "policy"]))
    dtypes = [torch.float32] if entry == "policy" else [torch.float32, torch.float32, torch.bfloat16, torch.float16]
    dtype = draw(st.sampled_from(dtypes))
    lengths = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=4)))
    vocab = draw(st.sampled_from([1, 2, 3, 17, 64, 130]))
    tau: float | Tensor = draw(st.sampled_from([1.0, 0.7]))
    if draw(st.booleans()):
        tau = torch.linspace(0.6, 1.3, sum(lengths))
    shared: dict[str, Any] = {
        "dtype": dtype,
        "seed": draw(st.integers(0, 2**31)),
        "dead": draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        "temperature": tau,
    }
    if entry == "linear":
        head = {"bias": draw(st.booleans()), "softcap": draw(st.sampled_from([None, 2.0, 15.0]))}
        return entry, dtype, linear_case(vocab, 8, lengths, rank=draw(st.sampled_from([0, 0, 3])), **head, **shared)
    return entry, dtype, logits_case(vocab, lengths, sharpness=draw(st.sampled_from([0.0, 0.5, 2.0, 6.0])), **shared)


def margin(x: TokenInputs, o: Options) -> float:
    """How far the nearest decision (a clip edge, a rank, a probability) is from going the other way."""
    level = "token" if o.ratio == "sequence_clipped" else o.ratio
    deltas = log_ratios(x, dataclasses.replace(o, ratio=level))
    edges = [1 - o.clip_low, 1 + o.clip_high, o.dual_clip or math.inf]
    # A ratio of exactly 1 beside an empty trust region is a tie by design, but not of these inputs.
    gaps = [abs(float(torch.exp(d.detach())) - edge) for d in deltas.values() for edge in edges]
    if o.surrogate.startswith("dppo"):
        pairs = [(float(x.old[t].exp()), float(x.logprobs[t].detach().exp())) for t in x.tokens]
        moved = [binary_divergence(o.surrogate[-2:], old, new, floor=1e-8) for old, new in pairs]
        gaps += [abs(m - edge) for m in moved for edge in (o.clip_low, o.clip_high)]
    if o.off_policy_mask is not None:
        means = log_ratios(x, dataclasses.replace(o, ratio="sequence"))
        gaps += [abs(float(d.detach()) + o.off_policy_mask) for d in means.values()]
    scores = covariances(x.logprobs.detach(), x.advantages, x.live)
    if o.clip_cov is not None:
        gaps += [abs(s - edge) for s in scores.values() for edge in o.clip_cov[1:]]
    entropies = [float(x.entropy[t].detach()) for t in x.tokens]
    ranked = sorted(scores.values() if o.kl_cov else entropies if o.top_entropy else [])
    gaps += [b - a for a, b in itertools.pairwise(ranked)]
    return min(gaps, default=math.inf)


def with_padding(case: Case, columns: int) -> Case:
    """A vocabulary with more columns behind it: NaN where nobody may look."""
    leaves = dict(case.leaves)
    for name, x in case.leaves.items():
        if name == "logits":
            leaves[name] = torch.nn.functional.pad(x, (0, columns), value=math.nan)
        elif name in HEAD and name != "lora_a":
            leaves[name] = torch.cat([x, torch.full((columns, *x.shape[1:]), math.nan, dtype=x.dtype)])
    return dataclasses.replace(case, leaves=leaves)


def without_padding(name: str, grad: Tensor, truth: Tensor) -> Tensor:
    """The gradient of the vocabulary; behind it there are zeros."""
    if name == "lora_a" or name not in ("logits", *HEAD):
        return grad
    axis = 1 if name == "logits" else 0
    vocab = truth.shape[axis]
    assert not grad.narrow(axis, vocab, grad.shape[axis] - vocab).any(), name
    return grad.narrow(axis, 0, vocab)


def largest(x: Tensor) -> float:
    return max([0.0, *x.detach().double().abs().flatten().tolist()])


def near(got: Tensor, truth: Tensor, eager: Tensor, unit: float, what: str) -> None:
    """For 16-bit tensors: a few of eager's errors and a unit of rounding; eager's may be 0 by luck."""
    error, of_eager = (largest(x.detach().double() - truth.double()) for x in (got, eager))
    assert error <= 4 * of_eager + unit, f"{what}: {error:.3e}, eager {of_eager:.3e}, unit {unit:.3e}"


CALLS = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(["packed", "padded"]),
        "weighted": st.booleans(),
        # As a number, and as ranks' counts are often reduced.
        "denominator": st.none()
        | st.sampled_from([5.5, np.float32(5.5), torch.tensor(5.5).double(), torch.tensor(50)]),
        "on_policy": st.sampled_from([False, False, False, True]),
        "grad_output": st.sampled_from([1.0, -3.0]),
        "groups": st.lists(st.integers(-1, 1), min_size=4, max_size=4),
        "padding": st.sampled_from([0, 0, 3]),
        "entropy": st.booleans(),
        "garbage": st.sampled_from([(-1.0,), (math.nan,), (math.inf, -math.inf, 1e38)]),
        "strides": st.sampled_from(["dense", "spread", "transposed"]),
        "rows_in_chunk": st.sampled_from([None, 0, 1, 3.5, 6, 12]),
        "wide": st.booleans(),
        "by_sequence": st.booleans(),
        "mask": st.sampled_from([torch.bool, torch.bool, torch.uint8, torch.int64, torch.float32]),
    }
)


@given(problem=problems(), o=objectives(), at=CALLS)
@settings(FIXED, max_examples=300)
def test_no_combination_disagrees_with_float64(
    backend: str, problem: tuple[str, torch.dtype, Case], o: Options, at: dict[str, Any]
) -> None:
    """Nor do dead tokens' inputs, columns behind the vocabulary, strides or chunks matter."""
    entry, dtype, case = problem
    if at["wide"] and backend == "torch" and dtype == torch.float32 and entry != "policy":
        dtype = torch.float64
        case = dataclasses.replace(case, leaves={name: x.double() for name, x in case.leaves.items()})
    of_rows: dict[str, Any] = {}
    if at["by_sequence"] and len(case.lengths) != len(case.mask):  # a response's advantage, [S]
        of_rows["advantages"] = torch.linspace(-1.5, 1.0, len(case.lengths))
        case.advantages = of_rows["advantages"].repeat_interleave(torch.tensor(case.lengths))
    assume(not (at["on_policy"] and o.max_old_prob is not None))
    leaves = as_logprobs(case) if entry == "policy" else case
    # Logits that a half-precision head has rounded move by some hundredths; everything else is float32 arithmetic.
    rounds = entry == "linear" and dtype.itemsize == 2
    # Off the clip edges also where the call is on-policy, whose ratios of 1 are the edges of an empty clip range.
    _, x = rows_of(leaves, o, weighted=at["weighted"])
    assume(margin(x, o) > (0.06 if rounds else 1e-5))
    how: dict[str, Any] = {"weighted": at["weighted"], "denominator": at["denominator"], "on_policy": at["on_policy"]}
    if o.aggregate == PROMPT_MEAN:
        how["groups"] = at["groups"][: len(case.lengths)]
    solved = Problem(leaves, o, dtype=dtype, grad_output=at["grad_output"], **how)
    truth, eager, live = solved.truth, solved.eager, case.mask
    shown = dataclasses.replace(poisoned(leaves, *at["garbage"]), mask=live.to(at["mask"]))
    if entry != "policy":
        vocab = len(case.leaves["weight"]) if entry == "linear" else case.leaves["logits"].shape[1]
        shown, of_rows = with_padding(shown, at["padding"]), {**of_rows, "valid_vocab": vocab, "entropy": at["entropy"]}
    if entry == "linear" and at["rows_in_chunk"] is not None:
        of_rows["chunk_bytes"] = max(1, int(at["rows_in_chunk"] * (vocab + at["padding"]) * dtype.itemsize))
    out, grads = solved.call(entry, "ppo", shown, at["layout"], strides=at["strides"], **o.keywords(), **of_rows)
    grads = {name: without_padding(name, grad, truth.grads[name]) for name, grad in grads.items()}
    slopes = (truth.slopes / torch.as_tensor(case.temperature, dtype=torch.float64))[live]
    total, steepest = float(slopes.sum()), largest(slopes)
    # k3 and ratios grow as exp of the log-prob's error: scales of the terms, not of their sum.
    scale = max(1.0, 4 * total, abs(float(truth.loss)), abs(truth.metrics["ref_kl"]) * o.kl_coef)
    if rounds:  # a logit is off by a unit of its own size, and everything follows
        with torch.no_grad():
            logits = logits_of({name: leaf.double() for name, leaf in case.leaves.items()}, case.softcap)
        unit = EPS[dtype] * max(1.0, largest(logits))
        of_sum = EPS[torch.float32] * abs(float(truth.loss))  # what is left where every token is clipped
        near(out.loss, truth.loss, eager.loss, unit * total + of_sum, "loss")
        near(out.logprobs[live], truth.logprobs[live], eager.logprobs[live], 2 * unit, "logprobs")
    else:
        as_accurate(out.loss, truth.loss, eager.loss, what="loss", scale=scale, multiple=3.0)
        as_accurate(out.logprobs[live], truth.logprobs[live], eager.logprobs[live], what="logprobs", scale=8.0)
        if out.entropy is not None:
            as_accurate(out.entropy[live], truth.entropy[live], eager.entropy[live], what="entropy", scale=8.0)
        check_metrics(out, truth)
    size = {name: largest(leaf) for name, leaf in case.leaves.items()}
    through = {"hidden": size.get("weight", 0.0), "weight": size.get("hidden", 0.0)}  # the head
    for key, grad in grads.items():
        # Where the target's probability is near 1 the gradient p - 1 is far smaller than the numbers it is made of.
        reach = max(steepest * through.get(key, 1.0), largest(truth.grads[key]))
        if dtype.itemsize > 2:
            # Twice: the rounding of ratio times advantage, and that of the sum over the vocabulary.
            as_accurate(grad, truth.grads[key], eager.grads[key], what=key, multiple=4.0, scale=2 * reach)
        else:  # rounded once as it is formed and once as grad_output scales it
            near(grad, truth.grads[key], eager.grads[key], EPS[dtype] * reach, key)
        if key in ("logits", "hidden", "logprobs", "entropy"):
            assert not grad[~live].any()


STATS = st.fixed_dictionaries(
    {
        "entry": st.sampled_from(["logits", "inplace", "linear"]),
        "vocab": st.integers(1, 90),
        "n": st.integers(0, 6),
        "seed": st.integers(0, 2**31),
        "tau": st.floats(0.05, 20.0),
        "scale": st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        "strides": st.sampled_from(["dense", "spread", "transposed"]),
        "padding": st.sampled_from([0, 3]),
        "use": st.sampled_from(["logprobs", "entropy", "both"]),
        "by_token": st.booleans(),
        "banned": st.sampled_from([0.0, 0.0, 0.6, 1.0]),
        "fill": st.sampled_from([-math.inf, None]),
    }
)


@given(at=STATS)
@settings(FIXED, max_examples=100)
def test_token_logprobs_of_anything(backend: str, at: dict[str, Any]) -> None:
    """Values, and the gradient of any sum of log-probs and entropies; no log-prob above 0, no entropy below."""
    entry, vocab, n, use = at["entry"], at["vocab"], at["n"], at["use"]
    dtype = torch.float32 if at["dtype"] == torch.float64 and backend != "torch" else at["dtype"]
    tau = at["tau"] * torch.linspace(0.5, 1.5, n) if at["by_token"] else at["tau"]
    given, entropy = {"dtype": dtype, "seed": at["seed"], "dead": 0.0, "temperature": tau}, use != "logprobs"
    if entry == "linear":
        head = {"bias": at["by_token"], "softcap": 3.0 if entropy else None, "rank": 2 * at["by_token"]}
        case = linear_case(vocab, 8, (n,), **head, **given)
    else:
        case = logits_case(vocab, (n,), sharpness=at["scale"], **given)
    banned = torch.rand(n, vocab, generator=torch.Generator().manual_seed(at["seed"])) < at["banned"]
    banned[torch.arange(n), case.target_ids] = False
    if entry != "linear":  # impossible tokens, all but the target with a share of 1
        case.leaves["logits"][banned] = torch.finfo(dtype).min if at["fill"] is None else at["fill"]
    a, b = torch.randn(2, n, generator=torch.Generator().manual_seed(at["seed"]), dtype=torch.float64)

    def weighted(*values: Tensor | None) -> Tensor:
        used = {"logprobs": (True, False), "entropy": (False, True), "both": (True, True)}[use]
        return torch.stack([(w * x).sum() for w, x, is_used in zip((a, b), values, used, strict=True) if is_used]).sum()

    found = []
    for of in (torch.float64, dtype):
        leaves, x = rows_of(case, Options(), of)
        weighted(x.logprobs, x.entropy).backward()
        found.append((x.logprobs.detach(), x.entropy.detach(), {name: leaf.grad for name, leaf in leaves.items()}))
    truth, eager = found
    laid = Laid(case, "packed", at["strides"])
    leaves, ids = laid.leaves(with_padding(case, at["padding"])), laid.out(case.target_ids)
    how: dict[str, Any] = {"temperature": tau, "entropy": entropy, "valid_vocab": vocab}
    if entry == "linear":
        how |= {"bias": leaves.get("bias"), "softcap": case.softcap, "lora": lora_of(leaves)}
        stats = linear_token_logprobs(leaves["hidden"], leaves["weight"], ids, **how)
    else:
        stats = token_logprobs(leaves["logits"], ids, inplace_backward=entry == "inplace", **how)
    logits = logits_of({name: x.double() for name, x in case.leaves.items()}, case.softcap)
    size = max(8.0, largest((logits / torch.as_tensor(tau).reshape(-1, 1)).masked_fill(banned, 0.0)))

    def close(got: Tensor, exact: Tensor, of_eager: Tensor, what: str, scale: float) -> None:
        if entry == "linear" and dtype.itemsize == 2:  # a rounded logit decides the error, eager's as ours
            near(got, exact, of_eager, EPS[dtype] * scale, what)
        else:
            as_accurate(got, exact, of_eager, what=what, scale=scale)

    close(stats.logprobs, truth[0], eager[0], "log-probs", size)
    assert bool((stats.logprobs <= 0).all())
    assert (stats.entropy is not None) == entropy
    if entropy:
        close(stats.entropy, truth[1], eager[1], "entropy", size)
        assert bool((stats.entropy >= 0).all())
    weighted(*stats).backward()
    steepest = size * largest(a.abs() + b.abs()) / float(torch.as_tensor(tau).min()) if n else 0.0
    reach = {"hidden": case.leaves["weight"], "weight": case.leaves["hidden"]} if entry == "linear" else {}
    for name, exact in truth[2].items():
        assert leaves[name].grad.dtype == dtype
        got = without_padding(name, leaves[name].grad, exact)
        close(got, exact, eager[2][name], name, steepest * largest(reach.get(name, torch.ones(1))))
        assert name != "logits" or not got[banned].any()
