"""What is refused at the boundary: the type of the error, and the names and values that its message gives."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_random import FIXED
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dapo_kernels
from dapo_kernels import OBJECTIVES, Objective, dapo_loss, use_backend
from dapo_kernels.backends import available_backends, backend_for, registry, sources
from dapo_kernels.objectives.table import FIELDS, KL_ESTIMATORS, SURROGATES

T, V, H, S = 6, 11, 4, 3
IDS = torch.arange(T)
GROUPS = torch.tensor([0, 1, 0])
BOOLS = torch.ones(T, dtype=torch.bool)
LOGPROBS = torch.full((T,), -2.0)
BOUNDS = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
PROMPT_MEAN = {"aggregate": "prompt-mean-token-mean"}
LOSSES = ("dapo_loss", "linear_dapo_loss", "policy_loss")
REFUSALS = (ValueError, TypeError, IndexError)


def good(function: str) -> dict[str, Any]:
    """Packed arguments of a valid call."""
    g = torch.Generator().manual_seed(0)
    values = {
        "logits": torch.randn(T, V, generator=g),
        "hidden": torch.randn(T, H, generator=g),
        "weight": torch.randn(V, H, generator=g),
        "ref_hidden": torch.randn(T, H, generator=g),
        "ref_weight": torch.randn(V, H, generator=g),
        "logprobs": torch.linspace(-3.0, -1.2, T),
        "target_ids": IDS,
        "old_logprobs": LOGPROBS,
        "ref_logprobs": LOGPROBS,
        "advantages": torch.ones(T),
        "objective": "dapo",
        "cu_seqlens": torch.tensor([0, 2, 3, 5, 6]) if "preference" in function else BOUNDS,
    }
    parameters = inspect.signature(getattr(dapo_kernels, function)).parameters
    needed = {name for name, x in parameters.items() if x.default is inspect.Parameter.empty} | {"cu_seqlens"}
    return {name: value for name, value in values.items() if name in parameters and name in needed}


def as_padded(arguments: dict[str, Any]) -> dict[str, Any]:
    flat = {name: x for name, x in arguments.items() if name != "cu_seqlens"}
    is_per_token = {name: isinstance(x, Tensor) and x.shape[:1] == (T,) for name, x in flat.items()}
    return {name: x.reshape(2, 3, *x.shape[1:]) if is_per_token[name] else x for name, x in flat.items()}


def run(function: str, arguments: dict[str, Any]) -> Any:
    return getattr(dapo_kernels, function)(**arguments)


def refused(error: Any, function: str, arguments: dict[str, Any], *words: str) -> None:
    """The message has every word: names of arguments, values, types."""
    with pytest.raises(error) as caught:
        run(function, arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


FUNCTIONS = (*LOSSES, "token_logprobs", "linear_token_logprobs", "preference_loss", "linear_preference_loss")
FUNCTIONS += ("preference_loss_from_logprobs", "policy_loss_from_logits", "policy_loss_from_hidden")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_good_calls_run_and_a_bad_one_names_its_function(function: str) -> None:
    arguments = good(function)
    run(function, arguments)
    run(function, as_padded(arguments))
    first = next(iter(arguments))
    refused(TypeError, function, {**arguments, first: "text"}, function, first, "str")


# --- one argument, or two that do not fit -----------------------------------------------------------------


def own_loss(logprobs: Tensor, entropy: Tensor | None, tokens: Any) -> Tensor:
    return -logprobs


COV = (0.1, 1.0, 5.0)
WITHOUT_MEANING: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"objective": "reinforce", "ratio": "sequence"}, ("reinforce", "ratio")),
    ({"objective": "reinforce", "clip_cov": COV}, ("reinforce", "clip_cov")),
    ({"objective": "reinforce", "kl_cov": (0.1, 1.0)}, ("reinforce", "kl_cov")),
    ({"objective": "reinforce", "clip_high": 0.3}, ("reinforce", "clip_high")),
    ({"objective": "reinforce", "dual_clip": 3.0}, ("reinforce", "dual_clip")),
    ({"objective": "sapo", "clip_low": 0.3}, ("sapo", "clip_low")),
    ({"objective": "up", "clip_high": 0.3}, ("up", "clip_high")),
    ({"objective": "cispo", "ratio": "sequence_clipped"}, ("cispo", "sequence_clipped")),
    ({"objective": "gmpo", "dual_clip": 3.0}, ("dual_clip", "sequence_clipped")),
    ({"objective": "dppo_tv", "ratio": "sequence"}, ("dppo_tv", "ratio")),
    ({"sapo_tau": (1.0, 2.0)}, ("sapo_tau", "clip")),
    ({"objective": "dro", "kl_estimator": "k1"}, ("kl_to", "k1")),
    ({"kl_estimator": "k1", "kl_through_ratio": True}, ("kl_through_ratio", "k1")),
    ({"objective": "gspo", "kl_through_ratio": True}, ("kl_through_ratio", "sequence")),
    ({"kl_through_ratio": True}, ("kl_through_ratio", "kl_coef")),
    ({"kl_to": "old"}, ("kl_to", "kl_coef")),
    ({"top_entropy": 0.5, "clip_cov": COV}, ("top_entropy", "clip_cov")),
    ({"length_norm": 8.0}, ("length_norm", "token-mean")),
    ({"objective": own_loss, "clip_high": 0.3}, ("clip_high",)),
    ({"objective": own_loss, "kl_cov": (0.1, 1.0)}, ("kl_cov",)),
    ({"surrogate": own_loss}, ("surrogate", "objective=")),
    # companions that are missing or have no use
    ({"objective": "grpo"}, ("ref_logprobs", "kl_coef")),
    ({"objective": "dr_grpo"}, ("length_norm",)),
    ({"objective": "spo", "old_logprobs": None}, ("max_old_prob", "old_logprobs")),
    ({"ref_logprobs": LOGPROBS}, ("ref_logprobs", "kl_coef")),
    ({"objective": "dro", "ref_logprobs": LOGPROBS}, ("ref_logprobs", "kl_to='old'")),
    ({"ratio": "sequence", "cu_seqlens": None}, ("cu_seqlens", "sequence")),
    ({"objective": "vespo", "cu_seqlens": None}, ("cu_seqlens", "vespo")),
    ({"off_policy_mask": 0.5, "cu_seqlens": None}, ("cu_seqlens", "off_policy_mask")),
    ({"aggregate": "seq-mean-token-sum", "cu_seqlens": None}, ("cu_seqlens", "seq-mean-token-sum")),
    ({**PROMPT_MEAN, "group_ids": GROUPS, "cu_seqlens": None}, ("cu_seqlens", PROMPT_MEAN["aggregate"])),
    ({"advantages": torch.ones(S), "cu_seqlens": None}, ("advantages", "cu_seqlens")),
    ({"objective": "dapo", "selection": BOOLS}, ("selection",)),
    ({"objective": "spo", "selection": BOOLS}, ("selection",)),
    ({"objective": "clip_cov", "selection": 0.5}, ("selection", "clip_cov")),
    ({"objective": "kl_cov", "selection": torch.tensor(0.5)}, ("selection", "kl_cov")),
    ({"generator": torch.Generator()}, ("generator", "clip_cov")),
    ({"objective": "clip_cov", "selection": BOOLS, "generator": torch.Generator()}, ("generator", "selection")),
    # groups of a mean over prompts
    (PROMPT_MEAN, ("group_ids", "[S]=[3]")),
    ({**PROMPT_MEAN, "denominator": 2}, ("group_ids",)),
    ({**PROMPT_MEAN, "group_tokens": torch.full((S,), 9)}, ("group_ids", "denominator")),
    ({**PROMPT_MEAN, "group_ids": GROUPS, "group_tokens": torch.tensor([5, 1, 2])}, ("group_tokens", "sequence 2")),
    ({**PROMPT_MEAN, "group_ids": GROUPS, "group_tokens": torch.tensor([5, math.nan, 5])}, ("group_tokens", "nan")),
    ({"group_ids": GROUPS}, ("group_ids", PROMPT_MEAN["aggregate"], "token-mean")),
    ({"group_tokens": GROUPS + 9, "aggregate": "seq-mean-token-mean"}, ("group_tokens", "seq-mean-token-mean")),
]


@pytest.mark.parametrize(("changes", "words"), WITHOUT_MEANING, ids=lambda v: "-".join(v))
def test_arguments_that_have_no_meaning_together(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    for function in LOSSES:
        entropy = {"entropy": torch.ones(T)} if function == "policy_loss" else {}
        refused(ValueError, function, {**good(function), **entropy, **changes}, *words)


@pytest.mark.parametrize("changes", [{"objective": "grpo", "kl_through_ratio": True}, {"kl_to": "old"}])
def test_a_schedule_of_kl_coef_may_reach_zero(backend: str, changes: dict[str, Any]) -> None:
    for function in LOSSES:
        fields = {**good(function), "kl_coef": 0.0}
        objective = changes.get("objective", "dapo")
        expected = run(function, {**fields, "objective": objective}).loss
        assert torch.equal(run(function, {**fields, **changes}).loss, expected)
        for ref_logprobs in (LOGPROBS, LOGPROBS.sqrt()):  # NaN is not read
            assert torch.equal(run(function, {**fields, **changes, "ref_logprobs": ref_logprobs}).loss, expected)


KEYWORDS = {
    "clip_hihg": ("clip_high",),
    "epsilon": ("clip_low", "clip_high"),
    "loss_type": ("objective",),
    "beta": ("kl_coef",),
    "old_log_prob": ("old_logprobs",),
    "old_per_token_logps": ("old_logprobs",),
    "ref_per_token_logps": ("ref_logprobs",),
    "response_mask": ("mask",),
    "completion_mask": ("mask",),
    "num_items_in_batch": ("denominator",),
    "loss_scale_factor": ("length_norm",),
    "rollout_is_weights": ("importance_weights",),
    "sapo_temperature_pos": ("sapo_tau",),
    "reduction": ("aggregate",),
    "delta": ("dual_clip", "1 + clip_high"),
    # no name of ours: position_ids is not group_ids
    "position_ids": (),
    "return_logprobs": (),  # nor is this ref_logprobs
}
SUGGESTION = re.compile(r"did you mean '(\w+)'(?: and '(\w+)')?\?")


def test_an_unknown_name_lists_the_known_and_a_keyword_that_is_not_ours_gets_a_suggestion() -> None:
    refused(ValueError, "dapo_loss", {**good("dapo_loss"), "objective": "dapo2"}, "dapo2", *OBJECTIVES)
    for function, (keyword, ours) in itertools.product(LOSSES, KEYWORDS.items()):
        parameters = inspect.signature(getattr(dapo_kernels, function)).parameters
        with pytest.raises(TypeError) as caught:
            run(function, {**good(function), keyword: 0.1})
        assert all(word in str(caught.value) for word in (repr(keyword), *ours, *parameters)), keyword
        found = SUGGESTION.search(str(caught.value))
        suggested = [name for name in found.groups() if name] if found else []
        assert suggested == [name for name in ours if name in parameters], keyword


@pytest.mark.parametrize(
    ("function", "keyword", "ours"),
    [
        ("linear_dapo_loss", "final_logit_softcapping", "softcap"),
        ("dapo_loss", "final_logit_softcapping", None),
        ("policy_loss", "target_id", None),
        ("policy_loss", "temperature", None),
        ("dapo_loss", "inplace_backwards", "inplace_backward"),
        ("linear_token_logprobs", "attention_mask", "mask"),
        ("linear_token_logprobs", "temperatur", "temperature"),
        ("preference_loss", "attention_mask", "mask"),
        ("linear_preference_loss", "logit_softcapping", "softcap"),
        ("preference_loss_from_logprobs", "betta", "beta"),
        ("linear_distillation_loss", "attention_mask", "mask"),
        ("linear_distillation_loss", "betta", "beta"),
    ],
)
def test_a_suggestion_is_a_keyword_of_this_function(function: str, keyword: str, ours: str | None) -> None:
    with pytest.raises(TypeError) as caught:
        run(function, {**good(function), keyword: 0.1})
    found = SUGGESTION.search(str(caught.value))
    assert (found and found[1]) == ours


OF_ONE: list[tuple[str, str, Any, Any, tuple[str, ...]]] = [
    ("dapo_loss", "objective", Objective, TypeError, ("function",)),
    ("dapo_loss", "objective", "gpg", ValueError, ("mean 'reinforce'?",)),
    ("dapo_loss", "objective", "Dr-GRPO", ValueError, ("mean 'dr_grpo'?",)),
    ("dapo_loss", "objective", "cipso", ValueError, ("mean 'cispo'?",)),
    ("dapo_loss", "objective", "dpo", ValueError, ("mean the function preference_loss?",)),
    ("dapo_loss", "target_ids", IDS.masked_fill(IDS == 1, -100), IndexError, ("mask=target_ids != -100",)),
    (
        "dapo_loss",
        "cu_seqlens",
        {k: v if k in ("cu_seqlens", "objective") else v[None] for k, v in good("dapo_loss").items()},
        ValueError,
        ("[1, 6]", "x.flatten(0, 1)"),
    ),
    ("dapo_loss", "logits", torch.ones(V), ValueError, ("[11]",)),
    ("dapo_loss", "advantages", torch.ones(32, 128), ValueError, ("[T]=[6]", "[S]=[3]", "[32, 128]")),
    ("dapo_loss", "mask", torch.full((T,), 0.5), ValueError, ("importance_weights",)),
    ("dapo_loss", "inplace_backward", 1, TypeError, ("True", "False")),
    *(("dapo_loss", "cu_seqlens", torch.tensor(x).int(), ValueError, ()) for x in ([0, 5], [1, 6], [6], [])),
    ("dapo_loss", "cu_seqlens", torch.tensor([0, 7]).int(), ValueError, ("to T=6", "last position of every sequence")),
    ("dapo_loss", "cu_seqlens", torch.tensor([0, 4, 2, 6]), ValueError, ("[0, 4, 2, 6]",)),
    ("dapo_loss", "cu_seqlens", BOUNDS.to("meta"), ValueError, ("meta",)),
    (
        "dapo_loss",
        "cu_seqlens",
        {**as_padded(good("dapo_loss")), "cu_seqlens": BOUNDS},
        ValueError,
        ("[2, 3]", "flatten"),
    ),
    (
        "dapo_loss",
        "group_tokens",
        {**PROMPT_MEAN, "group_tokens": BOOLS[:S], "group_ids": GROUPS},
        TypeError,
        ("bool",),
    ),
    ("policy_loss", "entropy_coef", 0.1, ValueError, ("entropy",)),
    ("policy_loss", "top_entropy", 0.5, ValueError, ("entropy",)),
    ("linear_dapo_loss", "weight", torch.ones(V, H + 1), ValueError, ("[11, 5]", "4")),
    ("linear_dapo_loss", "weight", torch.ones(V, H).bfloat16(), TypeError, ("bfloat16", "float32", "autocast")),
    ("linear_dapo_loss", "weight", torch.ones(V, H, device="meta"), ValueError, ("meta",)),
    ("linear_dapo_loss", "bias", torch.ones(V).half(), TypeError, ("float16", "float32")),
    ("linear_dapo_loss", "main_grad", torch.ones(H, V), ValueError, ()),
    ("linear_dapo_loss", "main_grad", torch.ones(V, H).bfloat16(), REFUSALS, ()),
    ("linear_dapo_loss", "main_grad", torch.ones(V, H), ValueError, ("weight",)),  # which needs no gradient
    ("preference_loss", "cu_seqlens", None, ValueError, ()),
    ("preference_loss", "loss_type", "kto", ValueError, ("preference_loss:", "sigmoid", "hinge", "ipo", "kto")),
    ("preference_loss", "beta", 0.0, ValueError, ("preference_loss:", "0.0")),
    ("preference_loss", "label_smoothing", 0.5, ValueError, ("preference_loss:", "0.5")),
    ("preference_loss", "pairs", torch.tensor([[0, 4]]), ValueError, ("3", "4")),
    ("preference_loss", "pairs", torch.tensor([0, 1]), ValueError, ("[P, 2]",)),
    ("preference_loss", "pairs", torch.tensor([[0.0, 1.0]]), TypeError, ()),
    ("preference_loss", "bata", 0.1, TypeError, ("'bata'",)),
    ("preference_loss", "denominator", 0, ValueError, ("0",)),
    ("preference_loss", "ref_logprobs", torch.zeros(5), ValueError, ("[T]=[6]", "[S]=[4]", "[5]")),
    ("preference_loss", "pairs", {"cu_seqlens": BOUNDS}, ValueError, ("sequences", "3")),
    ("preference_loss", "label_smoothing", {"label_smoothing": 0.1, "loss_type": "hinge"}, ValueError, ("hinge",)),
]


@pytest.mark.parametrize(
    ("function", "name", "value", "error", "words"), OF_ONE, ids=lambda v: v if v is str(v) else ""
)
def test_a_wrong_value_for_one_function(function: str, name: str, value: Any, error: Any, words: tuple[str]) -> None:
    changes = value if isinstance(value, dict) else {name: value}
    refused(error, function, {**good(function), **changes}, name, *words)


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if {"logits", "hidden"} & set(good(name))])
def test_rows_that_are_not_shifted_are_named(function: str) -> None:
    """All positions beside targets from the second one on. Packed log-probs alone know no bounds."""
    flat, square = good(function), as_padded(good(function))
    rows = "hidden" if "hidden" in flat else "logits"
    layouts = [{**square, rows: torch.cat([square[rows], square[rows][:, :1]], 1)}]
    if "cu_seqlens" in flat:
        n = flat["cu_seqlens"].numel() - 1
        layouts.append({**flat, rows: torch.cat([flat[rows], flat[rows][:n]])})
    for arguments in layouts:
        refused(ValueError, function, arguments, rows, "shifted", "target_ids")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_log_probs_in_16_bits_are_refused_unless_the_trained_ones_are_rounded_too(dtype: torch.dtype) -> None:
    rounded, reference = LOGPROBS.to(dtype), {"kl_coef": 0.1, "ref_logprobs": LOGPROBS}
    for function in (*LOSSES, "policy_loss_from_logits", "policy_loss_from_hidden"):
        for name in ("old_logprobs", "ref_logprobs"):
            given = {**good(function), **reference, name: rounded}
            refused(TypeError, function, given, f"{function}: {name}", str(dtype))
    for function in (name for name in FUNCTIONS if "preference" in name):
        refused(TypeError, function, {**good(function), "ref_logprobs": rounded}, "ref_logprobs", str(dtype))
    pair, given = "preference_loss_from_logprobs", good("preference_loss_from_logprobs")
    assert run(pair, {**given, "logprobs": rounded, "ref_logprobs": rounded}).loss == pytest.approx(math.log(2))
    refused(TypeError, pair, {**given, "logprobs": rounded, "ref_logprobs": rounded[:2]}, "ref_logprobs")  # sums
    alike = dict.fromkeys(("logprobs", "old_logprobs", "ref_logprobs"), rounded)
    assert run("policy_loss", {**good("policy_loss"), **reference, **alike}).loss == -1


@pytest.mark.parametrize("bad", [-1, V, -100, 2**40])
def test_target_ids_out_of_range(backend: str, bad: int) -> None:
    """IndexError on a live token at every function; on a dead token it is padding."""
    for at, needs in ((0, False), (T - 1, True)):
        ids, dead = IDS.clone(), BOOLS.clone()
        ids[at], dead[at] = bad, False
        for function in FUNCTIONS[:2] + FUNCTIONS[3:5]:
            given = good(function)
            given = {k: x.requires_grad_(needs) if k in ("logits", "weight") else x for k, x in given.items()}
            refused(IndexError, function, {**given, "target_ids": ids}, "target", str(bad), str(V))
            if function in LOSSES:
                assert bool(torch.isfinite(run(function, {**given, "target_ids": ids, "mask": dead}).loss))
    dapo_loss(**{**good("dapo_loss"), "target_ids": torch.full((T,), V - 1, dtype=torch.int32)})
    with pytest.raises(IndexError, match=r"10"):
        dapo_loss(**{**good("dapo_loss"), "target_ids": torch.full((T,), V - 1)}, valid_vocab=V - 1)


@pytest.mark.parametrize("bad", [0.0, -0.5, math.nan, math.inf, 1e-40])
def test_temperature_per_token_must_be_positive_where_live(backend: str, bad: float) -> None:
    temperature = torch.ones(T)
    temperature[3] = bad
    for function in LOSSES[:2]:
        given = {**good(function), "temperature": temperature}
        refused(ValueError, function, given, "temperature")
        assert bool(torch.isfinite(run(function, {**given, "mask": IDS != 3}).loss))


# --- any wrong value --------------------------------------------------------------------------------------

TENSORS = ("logits", "hidden", "weight", "bias", "target_ids", "logprobs", "old_logprobs", "advantages", "mask")
TENSORS += ("cu_seqlens", "importance_weights", "ref_logprobs", "entropy")
WRONG_TENSORS: list[Any] = [
    "text",
    3,
    [0.0] * T,
    torch.zeros(T + 1),
    torch.zeros(2, 2, 2, 2),
    torch.zeros(()),
    torch.zeros(T, dtype=torch.complex64),
    torch.zeros(T, V, H),
    torch.zeros(T, device="meta"),
    torch.zeros(3, T, dtype=torch.int64),
    torch.zeros(T, V).to_sparse(),
    torch.nested.nested_tensor([torch.zeros(3, V), torch.zeros(T - 3, V)], layout=torch.jagged),
]
WRONG_NUMBERS: list[Any] = ["text", [1.0], None, math.nan, -1.0, 0.0, object(), torch.zeros(3, 3), 1j]
# And values that are wrong for one of them.
NOWHERE = [torch.tensor(1.0 + 1.0j), torch.tensor(1.0, device="meta")]
WRONG: dict[str, list[Any]] = {
    "denominator": [math.inf, True, Fraction(6), torch.tensor(0.0), torch.tensor(math.nan), torch.ones(2), *NOWHERE],
    "temperature": [1e-50, 1e39, math.inf, *NOWHERE],
    "valid_vocab": [V + 1, True],
    "dual_clip": [1.0, 0.5],
    "clip_low": [1.1],
    "clip_high": [Fraction(1, 2)],
    "entropy_coef": [math.inf, True],
    "kl_through_ratio": [1],
    "vespo": [(1.0, 2.0), (1.0, 1.0, 0.0, 1.0)],
    "top_entropy": [1.5],
    "max_old_prob": [1.5],
    "sapo_tau": [(0.0, 1.0), 1.0],
    "clip_cov": [(0.1, 1.0), (0.0, 1.0, 5.0), (1.5, 1.0, 5.0), (0.1, 5.0, 1.0)],
    "kl_cov": [(0.1, math.nan), (1.5, 1.0)],
    "generator": ["seed"],
    "selection": [[True] * T, IDS, BOOLS[:5], torch.tensor(math.nan), *NOWHERE],
    "group_ids": [GROUPS[:2], torch.zeros(T, dtype=torch.int64), torch.tensor(1), GROUPS.float(), GROUPS.bool()],
    "group_tokens": [torch.ones(2)],
}
# What they are read with.
BESIDE: dict[str, dict[str, Any]] = {
    "length_norm": {"aggregate": "seq-mean-token-sum-norm"},
    "generator": {"objective": "clip_cov"},
    "selection": {"top_entropy": 0.5},
    "group_ids": PROMPT_MEAN,
    "group_tokens": {**PROMPT_MEAN, "group_ids": GROUPS},
}
# Values of the lists above that these arguments do take.
TAKEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("clip_low", "clip_high", "kl_coef"), (0.0,)),
    "entropy_coef": (0.0, -1.0),
    "off_policy_mask": (0.0, None),
    "selection": (-1.0, 0.0, None),
    **dict.fromkeys(("softcap", "chunk_bytes", "denominator", "dual_clip", "length_norm", "top_entropy"), (None,)),
    **dict.fromkeys(("clip_cov", "kl_cov", "max_old_prob", "vespo", "bias", "mask", "importance_weights"), (None,)),
    **dict.fromkeys(("generator", "group_tokens", "valid_vocab"), (None,)),
}


def with_most_arguments(function: str) -> dict[str, Any]:
    more: dict[str, Any] = {"mask": IDS < 5, "temperature": 1.0, "bias": torch.zeros(V), "softcap": 9.0}
    more |= {"chunk_bytes": 4096, "importance_weights": torch.ones(T), "ref_logprobs": LOGPROBS, "kl_coef": 0.1}
    more |= {"denominator": 4.0, "valid_vocab": V, **({"entropy": torch.ones(T)} if function == "policy_loss" else {})}
    known = inspect.signature(getattr(dapo_kernels, function)).parameters
    return {**good(function), **{name: value for name, value in more.items() if name in known}}


@pytest.mark.parametrize("function", [*LOSSES, "token_logprobs", "linear_token_logprobs"])
def test_a_wrong_argument_is_named(function: str) -> None:
    """One argument wrong, the others right: refused at the boundary, by its name."""
    right = with_most_arguments(function)
    for name in sorted({*right, *((*FIELDS, *BESIDE) if function in LOSSES else ())}):
        for value in WRONG_TENSORS if name in TENSORS else [*WRONG_NUMBERS, *WRONG.get(name, ())]:
            if any(value is ok or (isinstance(value, float) and value == ok) for ok in TAKEN.get(name, ())):
                continue
            if isinstance(value, Tensor) and name == next(iter(right)) and value.dim() in (1, 3):
                continue  # the first argument sets the layout: another shape or device makes the others wrong
            refused(REFUSALS, function, {**right, **BESIDE.get(name, {}), name: value}, name)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["denominator", "temperature", "selection"])
def test_a_number_that_requires_a_gradient_is_a_constant(name: str) -> None:
    given: dict[str, Any] = {**good("dapo_loss"), "top_entropy": 0.5, "aggregate": "seq-mean-token-mean"}
    losses = [
        run("dapo_loss", {**given, name: torch.tensor(2.0, requires_grad=wanted)}).loss for wanted in (True, False)
    ]
    assert torch.equal(*losses)
    assert not losses[0].requires_grad


@given(
    function=st.sampled_from(LOSSES),
    objective=st.sampled_from(sorted(OBJECTIVES)),
    changes=st.dictionaries(
        st.sampled_from([*FIELDS, "selection", "generator", "old_logprobs", "cu_seqlens", "ref_logprobs", "mask"]),
        st.sampled_from(
            [None, 0.0, 0.3, 2.0, -1.0, True, "token", "sequence", "clip", "sapo", "k1", "token-mean", (0.2, 1.0),
             (0.2, 0.0, 3.0), (), torch.ones(T), BOOLS, torch.ones(S), torch.tensor(0.5), torch.Generator()]
        ),
        max_size=4,
    ),
)  # fmt: skip
@settings(FIXED, max_examples=200)
def test_any_mixture_of_arguments_runs_or_is_refused(function: str, objective: str, changes: dict[str, Any]) -> None:
    """No combination ends in anything but a result or a documented exception that names one of the arguments."""
    arguments = {**with_most_arguments(function), "objective": objective, **changes}
    if not OBJECTIVES[objective].kl_coef and "kl_coef" not in changes:
        del arguments["kl_coef"]
        if "ref_logprobs" not in changes:
            del arguments["ref_logprobs"]
    try:
        assert bool(run(function, arguments).loss.isfinite()), (function, objective, changes)
    except REFUSALS as error:
        message = str(error)
        assert any(name in message for name in [*arguments, *FIELDS]), message


# --- log-probs --------------------------------------------------------------------------------------------

WITH_LOGPROBS: list[tuple[str, str, dict[str, Any]]] = [
    ("dapo_loss", "old_logprobs", {}),
    ("dapo_loss", "ref_logprobs", {"kl_coef": 0.1}),
    ("policy_loss", "logprobs", {}),
    ("policy_loss", "logprobs", {"old_logprobs": None}),
    ("preference_loss", "ref_logprobs", {}),
    ("preference_loss_from_logprobs", "ref_logprobs", {}),
    ("preference_loss_from_logprobs", "logprobs", {}),
    ("preference_loss_from_logprobs", "ref_logprobs", {"ref_logprobs": torch.full((4,), -4.0)}),  # summed
]


@pytest.mark.parametrize("is_padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize(("function", "name", "changes"), WITH_LOGPROBS)
def test_probabilities_are_no_logprobs(function: str, name: str, changes: dict[str, Any], is_padded: bool) -> None:
    """Also one of many; not a dead token's, not a NaN, and not what rounding puts above 0."""
    arguments = {**good(function), **changes}
    right = arguments.get(name, LOGPROBS)
    if is_padded:
        arguments = as_padded(arguments)
        right = right.view(2, 3) if right.numel() == T else right[:2]
        arguments |= {name: right}
    run(function, {**arguments, name: right})
    refused(ValueError, function, {**arguments, name: right.exp()}, name)
    for bad, is_refused in ((math.inf, True), (math.nan, False), (-math.inf, False), (1e-4, False), (0.3, True)):
        one = right.clone()
        one.view(-1)[1] = bad
        if is_refused:
            refused(ValueError, function, {**arguments, name: one}, name)
        else:
            run(function, {**arguments, name: one})
    if right.numel() == T:
        run(function, {**arguments, name: one, "mask": (IDS != 1).view(one.shape)})


# --- parts of tensors -------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_shard_is_not_the_whole(mesh: DeviceMesh) -> None:
    """FSDP2's parameters outside the forward pass: torch would end in "got mixed torch.Tensor and DTensor"."""

    def shard(x: Tensor) -> DTensor:
        return distribute_tensor(x, mesh, [Shard(0)])

    head = {**good("linear_dapo_loss"), "bias": torch.randn(V)}
    for name in set(head) - {"weight"}:
        refused(TypeError, "linear_dapo_loss", {**head, name: shard(head[name])}, name, "DTensor", "docs/guide.md")
    stats = good("linear_token_logprobs")
    refused(TypeError, "linear_token_logprobs", {**stats, "target_ids": shard(IDS)}, "target_ids", "DTensor")
    refused(TypeError, "policy_loss", {**good("policy_loss"), "logprobs": shard(LOGPROBS)}, "logprobs", "DTensor")
    for function in ("dapo_loss", "token_logprobs"):
        given = good(function)
        refused(ValueError, function, {**given, "logits": shard(given["logits"])}, "logits", "DTensor", "Shard(1)")
    for name in ("denominator", "temperature", "selection"):
        value = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()])
        refused(TypeError, "linear_dapo_loss", {**head, "top_entropy": 0.5, name: value}, name, "DTensor")
    two = init_device_mesh("cpu", (1, 1))
    weight = distribute_tensor(torch.randn(V, H), two, [Shard(0), Shard(0)])
    refused(ValueError, "linear_dapo_loss", {**good("linear_dapo_loss"), "weight": weight}, "weight", "DTensor")


# --- backends ---------------------------------------------------------------------------------------------


def chosen() -> str:
    return backend_for("test", torch.device("cpu"), torch.float32)


def test_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fast'.*torch.*cpp"), use_backend("fast"):
        pass
    for name, reason in available_backends().items():
        if reason is not None:
            with pytest.raises(RuntimeError, match=name), use_backend(name):
                pass


@pytest.mark.parametrize("name", ["cpp", "cuda"])
def test_a_module_that_was_built_from_other_sources_is_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = SimpleNamespace(__file__="old.so")
    monkeypatch.setitem(sys.modules, {"cpp": "dapo_kernels._C", "cuda": "dapo_kernels._cuda"}[name], module)
    monkeypatch.setattr(sources, "CSRC", tmp_path)
    (tmp_path / "surrogate.h").write_text("new")

    def reason() -> str:
        monkeypatch.setattr(registry, "_reasons", {})
        return available_backends()[name] or ""

    for module.sources in ("those of last week", None):
        assert all(word in reason() for word in ("old.so", "other sources", str(tmp_path), "pip install -e ."))
    if name == "cpp":
        assert chosen() == "torch"
    module.sources = sources.digest()
    (tmp_path / "#notes.h~").write_text("an editor's")
    assert "other sources" not in reason()
    (tmp_path / "surrogate.h").rename(tmp_path / "tables.h")
    assert sources.digest() != module.sources
    assert "other sources" not in reason()  # csrc of another project, beside an installed package


def test_an_index_that_is_not_known_is_refused() -> None:
    extension = pytest.importorskip("dapo_kernels._C", reason="dapo_kernels._C is not built")
    last = {"surrogate": len(SURROGATES) - 1, "kl_estimator": len(KL_ESTIMATORS) - 1}
    rest = [0.2, 0.28, math.inf, 1.0, 1.0, 0.0]
    extension.Objective(last["surrogate"], *rest, last["kl_estimator"], 0.0)
    for name, index in (("surrogate", last["surrogate"] + 1), ("kl_estimator", -1), ("kl_estimator", math.nan)):
        indices = last | {name: index}
        with pytest.raises(ValueError, match=f"{name}: expected 0 to {last[name]}, got"):
            extension.Objective(indices["surrogate"], *rest, indices["kl_estimator"], 0.0)


def test_float64_is_for_the_torch_backend(backend: str) -> None:
    given = {**good("dapo_loss"), "logits": torch.randn(T, V, dtype=torch.float64)}
    if backend == "torch":
        assert dapo_loss(**given).loss.dtype == torch.float64
    else:
        refused(TypeError, "dapo_loss", given, "float64", "torch")


def test_threads_and_tasks_each_have_their_own_backend() -> None:
    """A thread does not see its creator's; of two tasks that enter and leave crosswise each sees its own."""
    before, seen = chosen(), []

    async def task(name: str, mine: asyncio.Event, other: asyncio.Event) -> None:
        with use_backend(name):
            mine.set()
            await other.wait()
            seen.append((name, chosen()))

    async def tasks() -> None:
        events = asyncio.Event(), asyncio.Event()
        await asyncio.gather(task("torch", *events), task("cpp", *reversed(events)))

    asyncio.run(tasks())
    assert sorted(seen) == [("cpp", "cpp"), ("torch", "torch")]
    with use_backend("torch"), ThreadPoolExecutor(1) as pool:
        assert (chosen(), pool.submit(chosen).result()) == ("torch", before)
    with pytest.raises(KeyError), use_backend("torch"):
        raise KeyError("inside")
    assert chosen() == before
