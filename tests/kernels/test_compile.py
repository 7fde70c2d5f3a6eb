"""Every public function under torch.compile itself; and under a default device that is not its tensors'."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import linear_case, logits_case
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

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
    use_backend,
)
from dapo_kernels.backends import registry

Call = tuple[Callable[..., Any], dict[str, Any]]


def calls() -> dict[str, Call]:
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
    ref = {"ref_hidden": head["hidden"].flip(0), "ref_weight": head["weight"], "ref_bias": head["bias"], "beta": 0.3}
    lists = SamplingMask.from_lists([[int(token), 3] if token != 3 else [3] for token in ids])
    own = {"sampling_mask": lists, "importance_weights": case.advantages, "denominator": 3.0, "clip_high": 0.3}
    own |= {"lora": LoraFactors(torch.ones(2, 4), torch.ones(11, 2)), "softcap": 3.0}
    # Lists of kept tokens, cut at every chunk, of live tokens that do not stand together.
    own |= {"chunk_bytes": 100, "mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool()}
    return {
        "dapo_loss": (dapo_loss, {**logits, **of_loss, "inplace_backward": True}),
        "policy_loss_from_logits": (policy_loss_from_logits, {**logits, **of_loss, "objective": "gspo"}),
        "linear_dapo_loss": (linear_dapo_loss, {**head, **of_rows, **of_loss}),
        "linear_dapo_loss, lists and lora": (linear_dapo_loss, {**head, **of_rows, **of_loss, **own}),
        "policy_loss_from_hidden": (policy_loss_from_hidden, {**head, **of_rows, **of_loss, "objective": "gspo"}),
        "policy_loss": (policy_loss, {"logprobs": old * 1.1, **of_loss, "entropy": -old, "entropy_coef": 0.1}),
        "token_logprobs": (token_logprobs, logits),
        "linear_token_logprobs": (linear_token_logprobs, {**head, **of_rows, "mask": case.mask, "chunk_bytes": 99}),
        "preference_loss": (preference_loss, {**logits, **pairs}),
        "linear_preference_loss": (linear_preference_loss, {**head, **of_rows, **pairs}),
        "preference_loss_from_logprobs": (preference_loss_from_logprobs, {"logprobs": old * 1.1, **pairs}),
        "linear_distillation_loss": (linear_distillation_loss, {**head, **ref, "mask": case.mask, "temperature": 0.7}),
    }


def gradients(function: Callable[..., Any], given: dict[str, Any]) -> list[Tensor]:
    """The first result, and the gradient of its sum for every tensor of the policy."""
    leaves = {
        name: x.detach().clone().requires_grad_()
        for name, x in given.items()
        if name in ("hidden", "weight", "bias", "logprobs", "logits")
    }
    if isinstance(lora := given.get("lora"), LoraFactors):
        leaves |= {"a": lora.a.clone().requires_grad_(), "b": lora.b.clone().requires_grad_()}
        given = {**given, "lora": LoraFactors(leaves["a"], leaves["b"], lora.scale)}
    # An in-place form consumes its argument, which is no leaf then.
    passed = {name: x * 1 if name == "logits" else x for name, x in leaves.items() if name in given}
    out = function(**{**given, **passed})
    out[0].sum().backward()
    return [out[0].detach(), *(x.grad for x in leaves.values() if x.grad is not None)]


def compiled(function: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize("name", sorted(calls().keys() - {"linear_dapo_loss", "linear_preference_loss"}))
def test_compiled_as_it_is(name: str) -> None:
    function, given = calls()[name]
    results = [gradients(run, given) for run in (compiled(function), function)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_the_whole_compiler() -> None:
    """Generated code included, of a graph with operations around the loss."""
    function, given = calls()["linear_dapo_loss"]

    def around(hidden: Tensor, **keywords: Any) -> Any:
        return [3 * function(hidden=torch.tanh(hidden), **keywords).loss]

    results = [gradients(run, given) for run in (compiled(around, "inductor"), around)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_what_varies_from_batch_to_batch_does_not_compile_each() -> None:
    """Ten values of everything that docs/exactness.md promises: after the first eight graphs torch gives up."""
    counting = CompileCounterWithBackend("aot_eager")

    def loss(
        logits: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, tau: Tensor, n: float
    ) -> Tensor:
        return dapo_loss(logits, ids, old, advantages, mask=mask, temperature=tau, denominator=n).loss

    run = compiled(loss, counting)
    for i in range(10):
        case = logits_case(vocab=37, lengths=(19 + i,), seed=i)
        tokens = case.tensors("target_ids", "old_logprobs", "advantages", "mask")
        args = (case.leaves["logits"], *tokens.values(), torch.tensor(0.5 + i / 8), 50.5 + i)
        torch.testing.assert_close(run(*args), loss(*args), rtol=1e-6, atol=1e-7)
    assert counting.frame_count == 2


@pytest.mark.parametrize("objective", ["clip_cov", "vespo"])
def test_new_lengths_and_new_numbers_of_an_objective(objective: str) -> None:
    fields: dict[str, tuple[float, ...]] = {"clip_cov": (1.0, -0.5), "vespo": (2.0, 3.0, 3.0)}  # a share of 1 draws all

    def loss(logprobs: Tensor, old: Tensor, advantages: Tensor, last: float) -> Tensor:
        numbers: Any = {objective: (*fields[objective], last)}
        return policy_loss(logprobs, old, advantages, objective=objective, **numbers).loss

    run = compiled(loss)
    for n_tokens, last in ((5, 2.0), (7, 2.0), (9, 1.5)):
        args = (*-torch.rand(2, 2, n_tokens), torch.randn(2, n_tokens), last)
        torch.testing.assert_close(run(*args), loss(*args), rtol=1e-6, atol=1e-7)


def test_numbers_that_vary_in_a_graph() -> None:
    """A threshold and the scale of an adapter, which torch makes symbolic at their second value."""
    function, given = calls()["linear_dapo_loss"]
    case, a, b = given | {"objective": "top_entropy", "top_entropy": 0.5}, torch.ones(2, 4), torch.ones(11, 2)

    def loss(number: float) -> Tensor:
        loss: Tensor = function(**case | {"lora": LoraFactors(a, b, number), "selection": number}).loss
        return loss

    run = compiled(loss)
    for number in (0.5, 0.75):
        torch.testing.assert_close(run(number), loss(number), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", ["dapo", "vespo"])
def test_an_exported_loss_is_saved(objective: str) -> None:
    class Loss(torch.nn.Module):
        def forward(self, logits: Tensor, *tokens: Tensor) -> Tensor:
            return dapo_loss(logits, *tokens, objective=objective).loss

    args = torch.randn(2, 5, 11), torch.randint(11, (2, 5)), -torch.rand(2, 5), torch.randn(2, 5)
    torch.export.save(torch.export.export(Loss(), args), file := io.BytesIO())
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(*args), Loss()(*args))


def test_compiled_autograd_of_an_eager_call() -> None:
    case = logits_case(vocab=37, lengths=(19,), seed=0)
    tokens = case.tensors("target_ids", "old_logprobs", "advantages", "mask")
    found = []
    for compiles in (False, True):
        leaf = case.fresh()["logits"]
        out = dapo_loss(leaf, **tokens)
        with torch._dynamo.config.patch(compiled_autograd=compiles):
            (torch.compile(out.loss.backward, backend="aot_eager") if compiles else out.loss.backward)()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0])


def test_the_context_of_another_thread_ends_none_but_itself() -> None:
    """And it ends where it is left, in another ``contextvars.Context`` too, although that is an error."""

    def served(x: Tensor) -> Tensor:
        return x + len(registry.backend_for("dapo_loss", x.device, x.dtype))

    run, other, left_here = compiled(served, "eager"), use_backend("torch"), use_backend("torch")
    with use_backend("torch"), ThreadPoolExecutor(1) as pool:
        pool.submit(other.__enter__).result()
        pool.submit(other.__exit__, None, None, None).result()
        assert run(torch.zeros(())) == len("torch")
        pool.submit(left_here.__enter__).result()
        with pytest.raises(ValueError, match="Context"):
            left_here.__exit__(None, None, None)
    assert run(torch.zeros(())) == served(torch.zeros(()))


def test_compile_finds_the_backend_of_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``use_backend``: no import may be left for the tracer to stop at. Fake CUDA tensors need no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.delitem(registry._reasons, "triton", raising=False)
    found = registry.BACKENDS["triton"]._replace(missing=lambda: __import__("importlib").import_module("os") and None)
    monkeypatch.setitem(registry.BACKENDS, "triton", found)

    def served(x: Tensor) -> Tensor:
        return x + len(registry.backend_for("dapo_loss", x.device, x.dtype, x.shape[-1]))

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 7, device="cuda", dtype=torch.bfloat16)
        assert compiled(served, "eager")(x).device.type == "cuda"
    assert registry._reasons.pop("triton") is None


@pytest.mark.parametrize("name", calls())
def test_another_default_device(name: str) -> None:
    function, given = calls()[name]
    expected = function(**given)
    with torch.device("meta"):
        got = function(**given)
        summary = summarize([got.metrics, got.metrics]) if hasattr(got, "metrics") else None
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b)
    assert summary is None or summary == summarize([expected.metrics, expected.metrics])
