"""A head of which every rank holds some rows: loss, log-probs and gradients are those of the whole head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import call_linear, call_logits, linear_case, logits_case, solve
from oracle import Options
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from vocab_parallel import CLOSE, CUTS, LENGTHS, Group, H, T, V, columns, compare, of_mine, options_of, refusing, share
from vocab_parallel_refusals import refusals
from vocab_parallel_tensors import (
    distributed_tensors,
    low_rank_factors,
    the_page,
    with_fsdp,
)

from dapo_kernels import (
    OBJECTIVES,
    dapo_loss,
    linear_dapo_loss,
    linear_preference_loss,
    linear_token_logprobs,
    preference_loss,
    token_logprobs,
    use_backend,
)


def own_loss(logprobs: Tensor, entropy: Tensor | None, tokens: Any) -> Tensor:
    return -tokens.advantages * (logprobs - tokens.old_logprobs).exp() - 0.1 * entropy


def every_objective(group: Group, cut: tuple[int, ...]) -> None:
    for name in OBJECTIVES:
        for case in (linear_case(V, H, LENGTHS, bias=True, seed=3), logits_case(V, LENGTHS, seed=4)):
            options = options_of(name, case)
            if name == "clip_cov":
                options |= {"clip_cov": (0.3, -9.0, 9.0), "generator": torch.Generator()}
            compare(group, case, cut, name, **options)


def every_option(group: Group, cut: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    temperature = 0.5 + torch.rand(T, generator=torch.Generator().manual_seed(8))
    for dtype in dtypes:
        for softcap, bias in ((None, True), (2.0, False), (2.0, True)):
            head = {"dtype": dtype, "bias": bias, "softcap": softcap, "temperature": temperature}
            case = linear_case(V, H, LENGTHS, seed=5, **head)
            for chunk_bytes in (1, 5 * V * 8, None):
                how = {"mask": case.mask, "chunk_bytes": chunk_bytes, "entropy_coef": 0.1}
                compare(group, case, cut, "dapo", f"{dtype}, {head}, {chunk_bytes}", **how)
            compare(group, case, cut, "gspo", f"{dtype}", **options_of("gspo", case), entropy=True)
            compare(group, case, cut, own_loss, f"{dtype}", mask=case.mask, entropy=True)
    case = logits_case(V, LENGTHS, seed=6, temperature=temperature)
    for inplace in (False, True):
        compare(group, case, cut, "dapo", mask=case.mask, entropy_coef=0.1, inplace_backward=inplace)
    head_case = linear_case(V, H, LENGTHS, bias=True, seed=6)
    for valid in (V - 1, V - 9):  # the last ranks have little or nothing that can be sampled
        for given in (case, head_case):
            given = replace(given, target_ids=given.target_ids.clamp(max=valid - 1))
            compare(group, given, cut, "dapo", f"{valid}", mask=given.mask, entropy_coef=0.1, valid_vocab=valid)
    groups = {"aggregate": "prompt-mean-token-mean", "group_ids": torch.tensor([4, 9, 4, 1])}
    compare(group, head_case, cut, "dapo", mask=head_case.mask, cu_seqlens=head_case.cu_seqlens, **groups)
    for objective in ("dapo", "gspo"):
        lora = linear_case(V, H, LENGTHS, bias=True, softcap=2.0, seed=6, rank=3)
        how = {"mask": lora.mask, "cu_seqlens": lora.cu_seqlens, "chunk_bytes": 5 * V * 8}
        compare(group, lora, cut, objective, **how)
    dead = linear_case(V, H, LENGTHS, seed=7, mask=torch.zeros(T, dtype=torch.bool))
    compare(group, dead, cut, "dapo", "all dead", mask=dead.mask)


def log_probs_and_preferences(group: Group, cut: tuple[int, ...]) -> None:
    """Of both entries, and the gradient of log-probs and entropies together."""
    mine = columns(cut, group)
    head, rows = linear_case(V, H, LENGTHS, bias=True, softcap=3.0, seed=9), logits_case(V, LENGTHS, seed=9)
    weights = torch.randn(2, T, generator=torch.Generator().manual_seed(2))
    results = []
    for of_head, of_rows, more in (
        (head, rows, {}),
        (share(head, mine), share(rows, mine), {"group": group}),
    ):
        x = {**of_head.fresh(), **of_rows.fresh()}
        capped = {"bias": x["bias"], "softcap": 3.0, **more}
        states, ids = (x["hidden"], x["weight"]), head.target_ids
        found: list[Any] = [linear_token_logprobs(*states, ids, mask=head.mask, entropy=True, **capped)]
        for inplace in (False, True):
            logits = x["logits"] * 1
            found.append(token_logprobs(logits, rows.target_ids, entropy=True, inplace_backward=inplace, **more))
        loss = sum((weights[0] * stats.logprobs + weights[1] * stats.entropy).sum() for stats in found)
        for function, first, case, extra in (
            (linear_preference_loss, states, head, capped),
            (preference_loss, (x["logits"] * 1,), rows, more),
        ):
            how = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, **extra}
            loss = loss + 30 * function(*first, case.target_ids, case.ref_logprobs, **how).loss
        loss.backward()
        values = [loss.detach(), *(value for stats in found for value in stats)]
        results.append((values, {name: leaf.grad for name, leaf in x.items()}))
    (whole, expected), (got, grads) = results
    for a, b in (*zip(got, whole, strict=True), *((grads[n], g) for n, g in of_mine(expected, mine).items())):
        torch.testing.assert_close(a, b, **CLOSE[torch.float32])


def sixteen_bits(group: Group, cut: tuple[int, ...]) -> None:
    """As near to float64 as the whole head's: root mean square over 8 problems."""
    worse: dict[str, list[float]] = {}
    for seed in range(8):
        case = linear_case(V, H, LENGTHS, dtype=torch.bfloat16, bias=True, seed=20 + seed)
        truth, mine = solve(case, Options(clip_high=0.28)).grads, columns(cut, group)
        _, whole = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
        _, grads = call_linear(linear_dapo_loss, share(case, mine), "dapo", mask=case.mask, group=group)
        exact, whole = of_mine(truth, mine), of_mine(whole, mine)
        for name, grad in grads.items():
            assert grad.dtype == torch.bfloat16
            errors = torch.stack([(x.double() - exact[name]).square().sum() for x in (grad, whole[name])])
            dist.all_reduce(errors, group=group)
            worse.setdefault(name, []).append(float((errors[0] / errors[1]).sqrt().log()))
    for name, logs in worse.items():
        assert sum(logs) / len(logs) < 0.15, f"{name}: {2.718 ** (sum(logs) / len(logs)):.2f} of the whole's error"


def messages(group: Group, cut: tuple[int, ...]) -> None:
    """One collective of 16 bytes a token for every chunk, whatever ranks hold; without entropy 12."""
    case = share(linear_case(V, H, LENGTHS, seed=12, dead=0.0), columns(cut, group))
    sizes: list[int] = []
    gather = dist.all_gather

    def counted(out: list[Tensor], x: Tensor, **how: Any) -> Any:
        if x.is_floating_point():
            sizes.append(x.nbytes)
        return gather(out, x, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counted)
        for entropy_coef, each in ((0.1, 16), (0.0, 12)):
            sizes.clear()
            how: dict[str, Any] = {"group": group, "entropy_coef": entropy_coef, "chunk_bytes": 8 * max(cut) * 4}
            call_linear(linear_dapo_loss, case, "dapo", **how)
            assert sizes == [8 * each] * (T // 8), sizes


def compiled(group: Group, cut: tuple[int, ...]) -> None:
    """As one graph; and under another default device."""
    mesh = DeviceMesh.from_group(group, "cpu")
    case = linear_case(V, H, LENGTHS, seed=13)
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    mine = share(case, columns(cut, group)).leaves["weight"].clone().requires_grad_()
    cut_by_torch = distribute_tensor(case.leaves["weight"], mesh, [Shard(0)]).requires_grad_()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        own = {} if isinstance(weight, DTensor) else {"group": group}
        return linear_dapo_loss(hidden, weight, *tokens, **own).loss

    def of_logits(hidden: Tensor, weight: Tensor) -> Tensor:
        return dapo_loss(hidden @ weight.t(), *tokens, group=group).loss

    for function, weight in ((loss, mine), (loss, cut_by_torch), (of_logits, mine)):
        results = []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            hidden, weight.grad = case.leaves["hidden"].clone().requires_grad_(), None
            value = run(hidden, weight)
            value.backward()
            grad = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            results.append((value.detach(), hidden.grad, grad))
        torch.testing.assert_close(*results, **CLOSE[torch.float32])
    expected = loss(hidden, mine)
    with torch.device("meta"):
        assert torch.equal(loss(hidden, mine), expected)


def operators(group: Group) -> None:
    """torch's own checks; every rank makes the same exchanges in them."""
    ops, name, x = torch.ops.dapo_kernels, group.group_name, torch.randn(4, 3)
    ids, live = torch.arange(4), torch.tensor([True, False, True, True])
    torch.library.opcheck(ops.shard_columns.default, (ids.sum(), 5, 4, 0, False, 0, "", "", name))
    torch.library.opcheck(ops.from_first.default, (live, name))
    torch.library.opcheck(ops.gathered_sequence.default, (x.clone().requires_grad_(), 0, name))
    torch.library.opcheck(ops.scattered_sum.default, (x, 0, name))
    torch.library.opcheck(ops.traced_sum.default, (x, name))


def second_derivative(group: Group) -> None:
    case = share(linear_case(V, H, LENGTHS, dtype=torch.bfloat16, seed=22), columns((34, 33), group))
    leaves = case.fresh()
    stats = linear_token_logprobs(leaves["hidden"], leaves["weight"], case.target_ids, group=group)
    (grad,) = torch.autograd.grad(stats.logprobs.sum(), leaves["hidden"], create_graph=True)
    with refusing(RuntimeError, "gradient of a gradient"):
        grad.sum().backward()


def on_a_rank(rank: int) -> None:
    """All four ranks share a vocabulary, then each pair one of its own."""
    world = dist.group.WORLD
    for cut in CUTS[4]:
        every_option(world, cut, (torch.float32,))
    every_objective(world, CUTS[4][0])
    sixteen_bits(world, CUTS[4][0])
    distributed_tensors(world)
    with_fsdp()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    with use_backend(("torch", "cpp")[rank // 2]):
        for cut in CUTS[2]:
            every_option(group, cut, (torch.float32, torch.float64) if rank < 2 else (torch.float32,))
            log_probs_and_preferences(group, cut)
            messages(group, cut)
        every_objective(group, CUTS[2][1])
        second_derivative(group)
        low_rank_factors(group)
    if rank < 2:
        the_page(group)
        compiled(group, CUTS[2][0])
        operators(group)
    else:
        refusals(group, CUTS[2][0])


@pytest.mark.ranks
def test_the_whole_head_on_two_and_four_ranks() -> None:
    on_ranks(4, on_a_rank)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank(alone: None) -> None:
    """The same bits as without a group: nothing else runs."""
    case = linear_case(V, H, LENGTHS, bias=True, seed=16)
    whole, expected = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
    got, grads = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask, group=dist.group.WORLD)
    assert torch.equal(got.loss, whole.loss)
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name])
    distributed_tensors(dist.group.WORLD)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if OBJECTIVES[name].one_pass])
def test_the_gradient_over_the_logits_of_a_dtensor(alone: None, objective: str) -> None:
    """Its local part is a view that torch's own function made."""
    case, mesh = logits_case(V, LENGTHS, seed=16), DeviceMesh.from_group(dist.group.WORLD, "cpu")
    options = options_of(objective, case)
    _, expected = call_logits(dapo_loss, case, objective, inplace_backward=True, **options)
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    for placement in (Shard(1), Replicate()):
        for group in (None, dist.group.WORLD):
            leaf = distribute_tensor(case.leaves["logits"], mesh, [placement]).requires_grad_()
            rows = leaf * 1 if group is None else (leaf * 1).to_local()
            how = {"objective": objective, "group": group, "inplace_backward": True, **options}
            dapo_loss(rows, *tokens, **how).loss.backward()
            assert torch.equal(leaf.grad.full_tensor(), expected)
