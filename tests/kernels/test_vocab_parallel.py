"""A head of which every rank holds some rows: loss, log-probs and gradients are those of the whole head."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import LORA_SCALE, call_linear, linear_case, logits_case, pad, solve
from entries import lora_of
from oracle import Options
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from vocab_parallel import (
    CLOSE,
    CUTS,
    LENGTHS,
    Group,
    H,
    T,
    V,
    alike,
    columns,
    compare,
    of_mine,
    options_of,
    refusing,
    share,
)
from vocab_parallel_refusals import refusals

from dapo_kernels import (
    OBJECTIVES,
    LoraFactors,
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
    for of_head, of_rows, more in ((head, rows, {}), (share(head, mine), share(rows, mine), {"group": group})):
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
    for entropy_coef, each in ((0.1, 16), (0.0, 12)):
        how: dict[str, Any] = {"group": group, "entropy_coef": entropy_coef, "chunk_bytes": 8 * max(cut) * 4}
        with patch.object(dist, "all_gather", side_effect=dist.all_gather) as gather:
            call_linear(linear_dapo_loss, case, "dapo", **how)
        sizes = [call.args[1].nbytes for call in gather.call_args_list if call.args[1].is_floating_point()]
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


# --- what torch itself cuts -------------------------------------------------------------------------------


def full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def distributed_heads(group: Group) -> None:
    """Heads that say themselves how they are cut; hidden states that lie as sequence parallelism leaves them."""
    mesh, n_ranks, rank = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank()
    case = linear_case(V, H, LENGTHS, bias=True, seed=11, rank=3)
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    whole, expected = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask, temperature=0.7)
    for placement in (Shard(0), Replicate()):
        cuts = {"weight": placement, "bias": placement, "lora_a": Replicate(), "lora_b": placement}
        x = {name: distribute_tensor(case.leaves[name], mesh, [cut]).requires_grad_() for name, cut in cuts.items()}
        options = {"bias": x["bias"], "lora": lora_of(x), "mask": case.mask, "temperature": 0.7}
        hidden = case.leaves["hidden"].clone().requires_grad_()
        replicated, by_sequence = (
            distribute_tensor(case.leaves["hidden"], mesh, [cut]).requires_grad_() for cut in (Replicate(), Shard(0))
        )
        local = by_sequence.to_local().detach().requires_grad_()
        calls: list[tuple[Tensor, dict[str, Any]]] = [(hidden, {}), (replicated, {}), (hidden, {"group": group})]
        if placement == Shard(0):
            calls += [(by_sequence, {}), (local, {"sequence_parallel": True})]
        for states, more in calls:
            leaves = {**x, "hidden": states}
            for leaf in leaves.values():
                leaf.grad = None
            got = linear_dapo_loss(states, x["weight"], *tokens, **options, **more)
            got.loss.backward()
            grads, grad = {name: full(leaf.grad) for name, leaf in leaves.items()}, expected["hidden"]
            if states is local:
                grad = distribute_tensor(grad, mesh, [Shard(0)]).to_local()
            alike(group, got, whole, grads, {**expected, "hidden": grad}, f"{placement}", **CLOSE[torch.float32])
        if placement == Shard(0):  # padded: the sequence is the second dimension
            part = pad(case.leaves["hidden"], LENGTHS, 12, 0.0).chunk(n_ranks, 1)[rank].clone().requires_grad_()
            how = {**options, "mask": pad(case.mask, LENGTHS, 12, 0).bool(), "sequence_parallel": True}
            linear_dapo_loss(part, x["weight"], *(pad(y, LENGTHS, 12, 0) for y in tokens), **how).loss.backward()
            own_part = pad(expected["hidden"], LENGTHS, 12, 0.0).chunk(n_ranks, 1)[rank]
            torch.testing.assert_close(part.grad, own_part, **CLOSE[torch.float32])
            for name, wrong in {"a": x["lora_b"], "b": x["lora_a"]}.items():
                with refusing(ValueError, f"lora.{name}"):
                    factors = LoraFactors(wrong, wrong, LORA_SCALE)
                    linear_dapo_loss(hidden, x["weight"], *tokens, **{**options, "lora": factors})
    # The ranks' dice differ: the first one's count, also where each has the whole head (the last placement).
    dice = {"generator": torch.Generator().manual_seed(rank), "mask": case.mask, "clip_cov": (0.3, -9.0, 9.0)}
    loss = linear_dapo_loss(hidden, x["weight"], *tokens, objective="clip_cov", **dice).loss.detach()
    first = loss.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    assert torch.equal(first, loss)


def distributed_logits(group: Group) -> None:
    """In place too, where the local part is a view that torch's own function made."""
    case, mesh = logits_case(V, LENGTHS, seed=16), DeviceMesh.from_group(group, "cpu")
    tokens, leaf = (case.target_ids, case.old_logprobs, case.advantages), case.fresh()["logits"]
    for objective, in_place in (("dapo", False), ("dapo", True), ("gspo", True)):
        how = {"objective": objective, "mask": case.mask, "cu_seqlens": case.cu_seqlens, "inplace_backward": in_place}
        (expected,) = torch.autograd.grad(dapo_loss(leaf * 1, *tokens, **how).loss, leaf)
        for placement, more in ((Shard(1), {}), (Replicate(), {}), (Shard(1), {"group": group})):
            rows = distribute_tensor(leaf.detach(), mesh, [placement]).requires_grad_()
            dapo_loss((rows * 1).to_local() if more else rows * 1, *tokens, **how, **more).loss.backward()
            torch.testing.assert_close(full(rows.grad), expected, **CLOSE[torch.float32])


def the_page(group: Group) -> None:
    """The snippets of docs/vocabulary-parallel.md."""
    page = (Path(__file__).parents[2] / "docs/vocabulary-parallel.md").read_text(encoding="utf-8")
    snippets = re.findall(r"<!-- vocabulary: \w+ -->\n```python\n(.+?)```", page, re.DOTALL)
    assert len(snippets) == 2
    case = linear_case(V, H, LENGTHS, seed=17)
    whole, expected = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
    mine = columns((34, 33), group)
    hidden = case.leaves["hidden"].clone().requires_grad_()
    names: dict[str, Any] = {"targets": case.target_ids, **case.tensors("old_logprobs", "advantages", "mask")}
    names |= {"linear_dapo_loss": linear_dapo_loss, "distribute_tensor": distribute_tensor, "Shard": Shard}
    names |= {"hidden": hidden, "my_rows": case.leaves["weight"][mine].clone().requires_grad_(), "tp_group": group}
    names |= {"whole_weight": case.leaves["weight"], "tp_mesh": DeviceMesh.from_group(group, "cpu")}
    for snippet in snippets:
        exec(snippet, names)
        grads = {"weight": names["my_rows"].grad, "hidden": hidden.grad}
        alike(group, names["out"], whole, grads, of_mine(expected, mine), snippet, **CLOSE[torch.float32])


class Network(nn.Module):
    """A body that FSDP2 shards and a head that the tensor-parallel ranks share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(H, H)
        self.head = nn.Linear(H, V)

    def forward(self, states: Tensor, *tokens: Tensor, denominator: float) -> Tensor:
        head = (torch.tanh(self.body(states)), self.head.weight)
        return linear_dapo_loss(*head, *tokens, bias=self.head.bias, denominator=denominator).loss


def with_fsdp() -> None:
    """TP × FSDP2: 2 × 2 ranks, each pair of which has half of the tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    case = linear_case(V, H, LENGTHS, seed=15)
    inputs = (case.leaves["hidden"], case.target_ids, case.old_logprobs, case.advantages)
    whole, model = Network(), Network()
    whole(*inputs, denominator=float(T)).backward()
    for name in ("weight", "bias"):
        shard = distribute_tensor(getattr(model.head, name).data, mesh["tp"], [Shard(0)])
        setattr(model.head, name, nn.Parameter(shard))
    fully_shard(model, mesh=mesh["dp"])
    own = [x.chunk(2)[mesh["dp"].get_local_rank()] for x in inputs]
    model(*own, denominator=T / 2).backward()
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor), name
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, **CLOSE[torch.float32])


# --- the ranks ----------------------------------------------------------------------------------------------


def on_a_rank(rank: int) -> None:
    """All four ranks share a vocabulary, then each pair one of its own."""
    world = dist.group.WORLD
    for cut in CUTS[4]:
        every_option(world, cut, (torch.float32,))
    every_objective(world, CUTS[4][0])
    sixteen_bits(world, CUTS[4][0])
    distributed_heads(world)
    distributed_logits(world)
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
    if rank < 2:
        the_page(group)
        compiled(group, CUTS[2][0])
        operators(group)
    else:
        refusals(group, CUTS[2][0])


@pytest.mark.ranks
def test_the_whole_head_on_two_and_four_ranks() -> None:
    on_ranks(4, on_a_rank)


def test_one_rank() -> None:
    """The same bits as without a group: nothing else runs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        case = linear_case(V, H, LENGTHS, bias=True, seed=16)
        whole, expected = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
        got, grads = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask, group=dist.group.WORLD)
        assert torch.equal(got.loss, whole.loss)
        assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())
        distributed_heads(dist.group.WORLD)
        distributed_logits(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
