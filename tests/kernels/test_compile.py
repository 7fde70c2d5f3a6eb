"""Every public function under torch.compile itself, not inside another function, so that its keywords are the graph's
inputs; and under a default device that is not its tensors'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import linear_case, logits_case

from dapo_kernels import (
    LoraFactors,
    SamplingMask,
    dapo_loss,
    linear_dapo_loss,
    linear_distillation_loss,
    linear_preference_loss,
    linear_token_logprobs,
    policy_loss,
    policy_loss_from_hidden,
    policy_loss_from_logits,
    preference_loss,
    preference_loss_from_logprobs,
    summarize,
    token_logprobs,
)


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Every public function with most of its keywords."""
    case, rows = linear_case(11, 4, (2, 1, 3), bias=True, seed=5), logits_case(11, (2, 1, 3), seed=5)
    head = {name: case.leaves[name] for name in ("hidden", "weight", "bias")}
    old, ids = case.old_logprobs, case.target_ids
    of_loss = {"old_logprobs": old, "advantages": case.advantages, "cu_seqlens": case.cu_seqlens, "mask": case.mask}
    of_rows = {"target_ids": ids, "temperature": 0.7, "entropy": True}
    logits = {"logits": rows.leaves["logits"], "valid_vocab": 10, **of_rows}
    logits["target_ids"] = ids.clamp(max=9)
    four = torch.tensor([0, 2, 3, 5, 6])
    pairs = {"ref_logprobs": old, "cu_seqlens": four, "mask": torch.ones(6, dtype=torch.bool), "beta": 0.2}
    lora = LoraFactors(torch.ones(2, 4), torch.ones(11, 2))
    ref = {"ref_hidden": head["hidden"].flip(0), "ref_weight": head["weight"], "ref_bias": head["bias"], "beta": 0.3}
    lists = SamplingMask.from_lists([[int(token), 3] if token != 3 else [3] for token in ids])
    own = {"sampling_mask": lists, "importance_weights": case.advantages, "denominator": 3.0, "clip_high": 0.3}
    return {
        "dapo_loss": (dapo_loss, {**logits, **of_loss, "inplace_backward": True}),
        "policy_loss_from_logits": (policy_loss_from_logits, {**logits, **of_loss, "objective": "gspo"}),
        "linear_dapo_loss": (linear_dapo_loss, {**head, **of_rows, **of_loss}),
        "linear_dapo_loss, lists": (linear_dapo_loss, {**head, **of_rows, **of_loss, **own}),
        "linear_dapo_loss, lora": (linear_dapo_loss, {**head, **of_rows, **of_loss, "lora": lora, "softcap": 3.0}),
        "policy_loss_from_hidden": (policy_loss_from_hidden, {**head, **of_rows, **of_loss, "objective": "gspo"}),
        "policy_loss": (policy_loss, {"logprobs": old * 1.1, **of_loss, "entropy": -old, "entropy_coef": 0.1}),
        "token_logprobs": (token_logprobs, logits),
        "linear_token_logprobs": (linear_token_logprobs, {**head, **of_rows, "mask": case.mask, "chunk_bytes": 99}),
        "preference_loss": (preference_loss, {**logits, **pairs}),
        "linear_preference_loss": (linear_preference_loss, {**head, **of_rows, **pairs}),
        "preference_loss_from_logprobs": (preference_loss_from_logprobs, {"logprobs": old * 1.1, **pairs}),
        "linear_distillation_loss": (linear_distillation_loss, {**head, **ref, "mask": case.mask, "temperature": 0.7}),
    }


@pytest.mark.parametrize("name", calls())
def test_compiled_as_it_is(name: str) -> None:
    torch._dynamo.reset()
    function, given = calls()[name]
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = {
            n: x.clone().requires_grad_() for n, x in given.items() if n in ("hidden", "weight", "bias", "logprobs")
        }
        logits = {"logits": given["logits"].clone().requires_grad_()} if "logits" in given else {}
        # An in-place form consumes its argument, which is no leaf then.
        out = run(**{**given, **leaves, **{n: x * 1 for n, x in logits.items()}})
        out[0].sum().backward()
        results.append([out[0].detach(), *(x.grad for x in (leaves | logits).values())])
    for compiled, eager in zip(*reversed(results), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", calls())
def test_another_default_device(name: str) -> None:
    function, given = calls()[name]
    expected = function(**given)
    with torch.device("meta"):
        got = function(**given)
        metrics = got.metrics if hasattr(got, "metrics") else None
        summary = None if metrics is None else summarize([metrics, metrics])
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b)
    if summary is not None:
        assert summary == summarize([expected.metrics, expected.metrics])


def test_another_default_device_of_rows_in_chunks() -> None:
    """Lists of tokens that were kept, cut at every chunk, of live tokens that do not stand together."""
    function, given = calls()["linear_dapo_loss, lists"]
    given |= {"chunk_bytes": 100, "mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool()}
    expected = function(**given)
    with torch.device("meta"):
        assert torch.equal(function(**given).loss, expected.loss)
