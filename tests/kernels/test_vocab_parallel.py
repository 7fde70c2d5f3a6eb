"""A head of which every rank holds some rows: loss, log-probs and gradients are those of the whole head.

Legend: R ranks, T tokens, V vocabulary, H hidden. Every case runs on all ranks, each of which also computes the whole.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import LORA_SCALE, Case, call_linear, call_logits, linear_case, logits_case, pad, solve
from oracle import ROWS
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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

Group = dist.ProcessGroup
V, H, LENGTHS = 67, 12, (7, 2, 12, 3)
T = sum(LENGTHS)
# Columns of each rank: the last one short, as torch.chunk leaves it, and cut any other way.
CUTS = {2: ((34, 33), (66, 1)), 4: ((17, 17, 17, 16), (1, 40, 6, 20))}
CLOSE = {torch.float64: {"atol": 1e-13, "rtol": 1e-12}, torch.float32: {"atol": 1e-6, "rtol": 1e-5}}


def columns(cut: tuple[int, ...], group: Group) -> slice:
    rank = group.rank()
    return slice(sum(cut[:rank]), sum(cut[: rank + 1]))


WHOLE = ("hidden", "lora_a")  # on every rank


def share(case: Case, mine: slice) -> Case:
    """The case with this rank's rows of the head, or its columns of the logits."""
    leaves = {name: leaf if name in WHOLE else leaf[mine] for name, leaf in case.leaves.items()}
    if "logits" in leaves:
        leaves["logits"] = case.leaves["logits"][:, mine]
    return replace(case, leaves=leaves)


def of_mine(grads: dict[str, Tensor | None], mine: slice) -> dict[str, Any]:
    return {name: grad if name in WHOLE or grad is None else grad[mine] for name, grad in grads.items()}


def own_loss(logprobs: Tensor, entropy: Tensor | None, tokens: Any) -> Tensor:
    assert entropy is not None
    return -tokens.advantages * (logprobs - tokens.old_logprobs).exp() - 0.1 * entropy


def options_of(name: str, case: Case) -> dict[str, Any]:
    row = OBJECTIVES[name]
    given: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens}
    if row.needs_reference:
        given["ref_logprobs"] = case.ref_logprobs
    if row.aggregate == "seq-mean-token-sum-norm":
        given["length_norm"] = 9
    return given


# --- on every rank ----------------------------------------------------------------------------------------


def alike(
    group: Group, got: Any, whole: Any, grads: dict[str, Any], expected: dict[str, Any], what: str, **close: float
) -> None:
    def same(a: Tensor, b: Tensor, of: str) -> None:
        torch.testing.assert_close(a, b, **close, msg=lambda text: f"{what}, {of}: {text}")

    same(got.loss, whole.loss, "loss")
    close_logprobs = {"atol": close["atol"], "rtol": min(close["rtol"], 3e-7)}  # one rounding more, of some ten
    torch.testing.assert_close(got.logprobs, whole.logprobs, **close_logprobs)
    if whole.entropy is not None:
        same(got.entropy, whole.entropy, "entropy")
    for name, grad in expected.items():
        same(grads[name], grad, name)
    everyone = [torch.empty_like(got.loss.detach()) for _ in range(group.size())]
    dist.all_gather(everyone, got.loss.detach(), group=group)
    assert len({x.item() for x in everyone}) == 1, f"{what}: ranks differ in the loss' bits"


def from_hidden(group: Group, case: Case, cut: tuple[int, ...], objective: Any, what: str, **options: Any) -> None:
    mine = columns(cut, group)
    whole, expected = call_linear(linear_dapo_loss, case, objective, **options)
    got, grads = call_linear(linear_dapo_loss, share(case, mine), objective, group=group, **options)
    close = CLOSE[torch.float64 if case.leaves["hidden"].dtype == torch.float64 else torch.float32]
    alike(group, got, whole, grads, of_mine(expected, mine), what, **close)


def from_logits(group: Group, case: Case, cut: tuple[int, ...], objective: Any, what: str, **options: Any) -> None:
    mine = columns(cut, group)
    whole, expected = call_logits(dapo_loss, case, objective, **options)
    got, grad = call_logits(dapo_loss, share(case, mine), objective, group=group, **options)
    alike(group, got, whole, {"logits": grad}, {"logits": expected[:, mine]}, what, **CLOSE[torch.float32])


def every_objective(group: Group, cut: tuple[int, ...]) -> None:
    for name in OBJECTIVES:
        case = linear_case(V, H, LENGTHS, bias=True, seed=3)
        options = options_of(name, case)
        if name == "clip_cov":  # the ranks' dice differ: the first one's count
            options |= {"clip_cov": (0.3, -9.0, 9.0), "generator": torch.Generator().manual_seed(1)}
            whole, expected = call_linear(linear_dapo_loss, case, name, **options)
            options["generator"] = torch.Generator().manual_seed(1 + group.rank())
            mine = columns(cut, group)
            got, grads = call_linear(linear_dapo_loss, share(case, mine), name, group=group, **options)
            alike(group, got, whole, grads, of_mine(expected, mine), name, **CLOSE[torch.float32])
            continue
        from_hidden(group, case, cut, name, name, **options)
        case = logits_case(V, LENGTHS, seed=4)
        from_logits(group, case, cut, name, f"{name}, logits", **options_of(name, case))


def preferences(group: Group, cut: tuple[int, ...]) -> None:
    case, rows = linear_case(V, H, LENGTHS, seed=18), logits_case(V, LENGTHS, seed=18)
    mine, results = columns(cut, group), []
    for given, states, more in (
        (case.leaves, rows.leaves["logits"], {}),
        (share(case, mine).leaves, rows.leaves["logits"][:, mine], {"group": group}),
    ):
        leaves = [x.clone().requires_grad_() for x in (given["hidden"], given["weight"], states)]
        how: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, **more}
        loss = linear_preference_loss(leaves[0], leaves[1], case.target_ids, case.ref_logprobs, **how).loss
        loss = loss + preference_loss(leaves[2], rows.target_ids, rows.ref_logprobs, **how).loss
        loss.backward()
        results.append((loss.detach(), *(x.grad for x in leaves)))
    (whole, hidden, weight, logits), got = results
    for a, b in zip(got, (whole, hidden, weight[mine], logits[:, mine]), strict=True):  # type: ignore[index]
        torch.testing.assert_close(a, b, **CLOSE[torch.float32])


def every_option(group: Group, cut: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    temperature = 0.5 + torch.rand(T, generator=torch.Generator().manual_seed(8))
    for dtype in dtypes:
        for softcap in (None, 2.0):
            for bias in (False, True):
                case = linear_case(
                    V, H, LENGTHS, dtype=dtype, bias=bias, softcap=softcap, seed=5, temperature=temperature
                )
                for chunk_bytes in (1, 5 * V * 8, None):
                    how = {"mask": case.mask, "chunk_bytes": chunk_bytes, "entropy_coef": 0.1}
                    from_hidden(group, case, cut, "dapo", f"{dtype}, {softcap}, {bias}, {how}", **how)
                from_hidden(group, case, cut, "gspo", "gspo", **options_of("gspo", case), entropy=True)
                from_hidden(group, case, cut, own_loss, "own", mask=case.mask, entropy=True)
    case = logits_case(V, LENGTHS, seed=6, temperature=temperature)
    for inplace in (False, True):
        from_logits(group, case, cut, "dapo", "logits", mask=case.mask, entropy_coef=0.1, inplace_backward=inplace)
    for valid in (V - 1, V - 9):  # the last ranks have little or nothing that can be sampled
        given = replace(case, target_ids=case.target_ids.clamp(max=valid - 1))
        from_logits(group, given, cut, "dapo", f"{valid}, logits", mask=case.mask, valid_vocab=valid)
        head = linear_case(V, H, LENGTHS, bias=True, seed=6)
        head.target_ids = head.target_ids.clamp(max=valid - 1)
        from_hidden(group, head, cut, "dapo", f"{valid}", mask=head.mask, entropy_coef=0.1, valid_vocab=valid)
    for objective in ("dapo", "gspo"):
        case = linear_case(V, H, LENGTHS, bias=True, softcap=2.0, seed=6, rank=3)
        how = {"mask": case.mask, "cu_seqlens": case.cu_seqlens, "chunk_bytes": 5 * V * 8}
        from_hidden(group, case, cut, objective, f"{objective}, LoRA", **how)
        from_hidden(group, case, cut, objective, f"{objective}, LoRA, float8", float8=True, **how)
    case = linear_case(V, H, LENGTHS, seed=7, mask=torch.zeros(T, dtype=torch.bool))
    from_hidden(group, case, cut, "dapo", "all dead", mask=case.mask)


def log_probs(group: Group, cut: tuple[int, ...]) -> None:
    """Of both entries, and the gradient of log-probs and entropies in any combination."""
    mine = columns(cut, group)
    case, rows = linear_case(V, H, LENGTHS, bias=True, softcap=3.0, seed=9), logits_case(V, LENGTHS, seed=9)
    weights = torch.randn(2, T, generator=torch.Generator().manual_seed(2))

    def run(given: Case, call: Callable[[dict[str, Tensor]], Any]) -> tuple[Any, dict[str, Any]]:
        leaves = given.fresh()
        stats = call(leaves)
        ((weights[0] * stats.logprobs).sum() + (weights[1] * stats.entropy).sum()).backward()
        return stats, {name: x.grad for name, x in leaves.items()}

    def linear(**more: Any) -> Callable[[dict[str, Tensor]], Any]:
        def call(x: dict[str, Tensor]) -> Any:
            head = {"bias": x["bias"], "softcap": 3.0, "mask": case.mask, "entropy": True}
            return linear_token_logprobs(x["hidden"], x["weight"], case.target_ids, **head, **more)

        return call

    whole, expected = run(case, linear())
    got, grads = run(share(case, mine), linear(group=group))
    for a, b in (*zip(got, whole, strict=True), *((grads[n], g) for n, g in of_mine(expected, mine).items())):
        torch.testing.assert_close(a, b, **CLOSE[torch.float32])
    for inplace in (False, True):

        def call(x: dict[str, Tensor], inplace: bool = inplace, **more: Any) -> Any:
            return token_logprobs(x["logits"] * 1, rows.target_ids, entropy=True, inplace_backward=inplace, **more)

        whole, expected = run(rows, call)
        got, grads = run(share(rows, mine), lambda x: call(x, group=group))
        for a, b in (*zip(got, whole, strict=True), (grads["logits"], expected["logits"][:, mine])):
            torch.testing.assert_close(a, b, **CLOSE[torch.float32])


def sixteen_bits(group: Group, cut: tuple[int, ...]) -> None:
    """As near to float64 as the whole head's: root mean square over 8 problems."""
    o = ROWS["dapo"]
    worse: dict[str, list[float]] = {}
    for seed in range(8):
        case = linear_case(V, H, LENGTHS, dtype=torch.bfloat16, bias=True, seed=20 + seed)
        truth, mine = solve(case, o).grads, columns(cut, group)
        _, whole = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
        _, grads = call_linear(linear_dapo_loss, share(case, mine), "dapo", mask=case.mask, group=group)
        for name, grad in grads.items():
            assert grad is not None
            assert grad.dtype == torch.bfloat16
            errors = [(x.double() - y).square().sum() for x, y in (
                (grad, of_mine(truth, mine)[name]), (of_mine(whole, mine)[name], of_mine(truth, mine)[name])
            )]  # fmt: skip
            both = torch.stack(errors)
            dist.all_reduce(both, group=group)
            worse.setdefault(name, []).append(float((both[0] / both[1]).sqrt().log()))
    for name, logs in worse.items():
        assert sum(logs) / len(logs) < 0.15, f"{name}: {2.718 ** (sum(logs) / len(logs)):.2f} of the whole's error"


def distributed_tensors(group: Group) -> None:
    """Heads that say themselves how they are cut; hidden states that lie as sequence parallelism leaves them."""
    mesh, n_ranks, rank = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank()
    case = linear_case(V, H, LENGTHS, bias=True, seed=11)
    options = {"mask": case.mask, "temperature": 0.7}
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    whole, expected = call_linear(linear_dapo_loss, case, "dapo", **options)
    for placement in (Shard(0), Replicate()):
        weight, bias = (
            distribute_tensor(case.leaves[name], mesh, [placement]).requires_grad_() for name in ("weight", "bias")
        )
        hidden = case.leaves["hidden"].clone().requires_grad_()
        replicated = distribute_tensor(case.leaves["hidden"], mesh, [Replicate()]).requires_grad_()
        by_sequence = distribute_tensor(case.leaves["hidden"], mesh, [Shard(0)]).requires_grad_()
        local = by_sequence.to_local().detach().requires_grad_()
        calls: list[tuple[Tensor, dict[str, Any]]] = [(hidden, {}), (replicated, {})]
        calls += [(hidden, {"group": group})]
        if placement == Shard(0):
            calls += [(by_sequence, {}), (local, {"sequence_parallel": True})]
        for x, more in calls:
            x.grad = weight.grad = bias.grad = None
            got = linear_dapo_loss(x, weight, *tokens, bias=bias, **options, **more)
            got.loss.backward()
            assert isinstance(weight.grad, DTensor)
            grads = {"weight": weight.grad.full_tensor(), "bias": bias.grad.full_tensor()}  # type: ignore[union-attr]
            assert x.grad is not None
            grad = expected["hidden"]
            if x is local:
                grad = distribute_tensor(grad, mesh, [Shard(0)]).to_local()  # type: ignore[arg-type]
            grads["hidden"] = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
            alike(group, got, whole, grads, {**expected, "hidden": grad}, f"{placement}", **CLOSE[torch.float32])
    # Padded: the sequence is the second dimension.
    width = 12
    states, mask = pad(case.leaves["hidden"], LENGTHS, width, 0.0), pad(case.mask, LENGTHS, width, 0).bool()
    padded = (pad(case.target_ids, LENGTHS, width, 0), pad(case.old_logprobs, LENGTHS, width, 0.0))
    advantages = pad(case.advantages, LENGTHS, width, 0.0)
    expected_states = pad(expected["hidden"], LENGTHS, width, 0.0)  # type: ignore[arg-type]
    part = states.chunk(n_ranks, 1)[rank].clone().requires_grad_()
    weight = distribute_tensor(case.leaves["weight"], mesh, [Shard(0)])
    bias = distribute_tensor(case.leaves["bias"], mesh, [Shard(0)])
    got = linear_dapo_loss(
        part, weight, *padded, advantages, bias=bias, mask=mask, temperature=0.7, sequence_parallel=True
    )
    got.loss.backward()
    torch.testing.assert_close(part.grad, expected_states.chunk(n_ranks, 1)[rank], **CLOSE[torch.float32])
    rows = distribute_tensor(case.leaves["hidden"] @ case.leaves["weight"].T, mesh, [Shard(1)]).requires_grad_()
    plain = rows.full_tensor().detach().requires_grad_()
    for logits in (rows, plain):
        dapo_loss(logits, *tokens, mask=case.mask).loss.backward()
    torch.testing.assert_close(rows.grad.full_tensor(), plain.grad, **CLOSE[torch.float32])  # type: ignore[union-attr]


def low_rank_factors(group: Group) -> None:
    """With hidden states cut by sequence, whose gradient the factors share in; and as DTensors."""
    mesh, n_ranks, rank = DeviceMesh.from_group(group, "cpu"), group.size(), group.rank()
    case = linear_case(V, H, LENGTHS, seed=23, rank=3)
    whole, expected = call_linear(linear_dapo_loss, case, "dapo", mask=case.mask)
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    a = distribute_tensor(case.leaves["lora_a"], mesh, [Replicate()]).requires_grad_()
    weight, b = (
        distribute_tensor(case.leaves[name], mesh, [Shard(0)]).requires_grad_() for name in ("weight", "lora_b")
    )
    part = case.leaves["hidden"].chunk(n_ranks)[rank].clone().requires_grad_()
    how = {"lora": LoraFactors(a, b, LORA_SCALE), "mask": case.mask, "sequence_parallel": True}
    got = linear_dapo_loss(part, weight, *tokens, **how)
    got.loss.backward()
    distributed = {"weight": weight, "lora_a": a, "lora_b": b}
    grads = {name: x.grad.full_tensor() for name, x in distributed.items()}  # type: ignore[union-attr]
    grads["hidden"] = part.grad
    expected["hidden"] = expected["hidden"].chunk(n_ranks)[rank]  # type: ignore[union-attr]
    alike(group, got, whole, grads, expected, "LoRA by sequence", **CLOSE[torch.float32])
    for name, wrong in {"a": (b, b), "b": (a, a)}.items():
        with refusing(ValueError, f"lora.{name}"):
            linear_dapo_loss(part, weight, *tokens, **{**how, "lora": LoraFactors(*wrong, LORA_SCALE)})


def head_in_float8(group: Group) -> None:
    """Stored so, its scales by row: as DTensors, and a rank's own."""
    mesh, n_ranks = DeviceMesh.from_group(group, "cpu"), group.size()
    case = linear_case(V, H, LENGTHS, seed=24)
    scale = case.leaves["weight"].abs().amax(1, keepdim=True) / 448
    stored = (case.leaves["weight"] / scale).to(torch.float8_e4m3fn)
    most = -(-V // n_ranks)
    mine = slice(group.rank() * most, (group.rank() + 1) * most)
    shape: Any = {"shape": (V, H), "stride": (H, 1)}
    weight = DTensor.from_local(stored[mine], mesh, [Shard(0)], run_check=False, **shape)
    by_row = distribute_tensor(scale, mesh, [Shard(0)])
    tokens = (case.target_ids, case.old_logprobs, case.advantages)
    results = []
    for head, its_scale, how in (
        (stored, scale, {}),
        (weight, by_row, {}),
        (stored[mine], scale[mine], {"group": group}),
        (weight, torch.tensor(0.01), {}),
    ):
        hidden = case.leaves["hidden"].clone().requires_grad_()
        out = linear_dapo_loss(hidden, head, *tokens, mask=case.mask, weight_scale=its_scale, **how)
        out.loss.backward()
        results.append((out, {"hidden": hidden.grad}))
    (whole, expected), *others, _ = results
    for got, grads in others:
        alike(group, got, whole, grads, expected, "float8", **CLOSE[torch.float32])


def the_page(group: Group) -> None:
    """The snippets of docs/vocabulary-parallel.md."""
    page = (Path(__file__).parents[2] / "docs" / "vocabulary-parallel.md").read_text(encoding="utf-8")
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


def messages(group: Group, cut: tuple[int, ...]) -> None:
    """One collective of 16 bytes a token for every chunk, whatever ranks hold; without entropy 12."""
    case = share(linear_case(V, H, LENGTHS, seed=12, dead=0.0), columns(cut, group))
    sizes: list[int] = []
    gather, most = dist.all_gather, max(cut)

    def counted(out: list[Tensor], x: Tensor, **how: Any) -> Any:
        if x.is_floating_point():
            sizes.append(x.nbytes)
        return gather(out, x, **how)

    dist.all_gather = counted
    for entropy_coef, each in ((0.1, 16), (0.0, 12)):
        sizes.clear()
        how: dict[str, Any] = {"group": group, "entropy_coef": entropy_coef, "chunk_bytes": 8 * most * 4}
        call_linear(linear_dapo_loss, case, "dapo", **how)
        assert sizes == [8 * each] * (T // 8), sizes
    dist.all_gather = gather


def compiled(group: Group, cut: tuple[int, ...]) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    case = linear_case(V, H, LENGTHS, seed=13)
    mine = share(case, columns(cut, group)).leaves["weight"].clone().requires_grad_()
    cut_by_torch = distribute_tensor(case.leaves["weight"], mesh, [Shard(0)]).requires_grad_()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        own = {} if isinstance(weight, DTensor) else {"group": group}
        return linear_dapo_loss(hidden, weight, case.target_ids, case.old_logprobs, case.advantages, **own).loss

    def of_logits(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.t()
        return dapo_loss(logits, case.target_ids, case.old_logprobs, case.advantages, group=group).loss

    for function, weight in ((loss, mine), (loss, cut_by_torch), (of_logits, mine)):
        results = []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            hidden = case.leaves["hidden"].clone().requires_grad_()
            weight.grad = None
            value = run(hidden, weight)
            value.backward()
            grad = weight.grad
            assert grad is not None
            results.append((value.detach(), hidden.grad, grad.to_local() if isinstance(grad, DTensor) else grad))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, **CLOSE[torch.float32])


def operators(group: Group) -> None:
    """torch's own checks; every rank makes the same exchanges in them."""
    ops, name, x = torch.ops.dapo_kernels, group.group_name, torch.randn(4, 3)
    ids, live = torch.arange(4), torch.tensor([True, False, True, True])
    torch.library.opcheck(ops.shard_columns.default, (ids.sum(), 5, 4, 0, False, 0, "", "", name))
    torch.library.opcheck(ops.from_first.default, (live, name))
    torch.library.opcheck(ops.gathered_sequence.default, (x.clone().requires_grad_(), 0, name))
    torch.library.opcheck(ops.scattered_sum.default, (x, 0, name))
    torch.library.opcheck(ops.traced_sum.default, (x, name))


@contextlib.contextmanager
def refusing(kind: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert all(word in str(caught.value) for word in words), f"{caught.value}: without {words}"


def refusals(group: Group, cut: tuple[int, ...]) -> None:
    """The same clear error on every rank, and nobody waits for anybody."""
    case, rank = linear_case(V, H, LENGTHS, seed=14), group.rank()
    weight = case.leaves["weight"][columns(cut, group)]
    mesh = DeviceMesh.from_group(group, "cpu")

    def call(**changes: Any) -> None:
        given: dict[str, Any] = {
            "hidden": case.leaves["hidden"],
            "weight": weight,
            "target_ids": case.target_ids,
            "old_logprobs": case.old_logprobs,
            "advantages": case.advantages,
            "group": group,
            **changes,
        }
        linear_dapo_loss(**given)

    other = torch.where(torch.arange(T) == rank, 1, 2)
    with refusing(ValueError, "linear_dapo_loss: all ranks", "same target_ids and mask", "fully_shard"):
        call(target_ids=other)
    with refusing(ValueError, "same target_ids and mask"):
        call(mask=torch.arange(T) > rank)
    few = {name: getattr(case, name)[: T - rank] for name in ("target_ids", "old_logprobs", "advantages")}
    with refusing(ValueError, "same target_ids", f"tokens by rank: [{T}, {T - 1}"):
        call(**few, hidden=case.leaves["hidden"][: T - rank])
    with refusing(ValueError, "all ranks", "the same call", f"chunk_bytes {8 + rank}"):
        call(chunk_bytes=8 + rank)
    with refusing(ValueError, "valid_vocab must be at most V=67"):
        call(valid_vocab=V + 1)
    call(weight=case.leaves["weight"][: V if rank == 0 else 0])  # a rank without columns has its part in the exchange
    with refusing(IndexError, "target_ids", f"[0, {V})"):
        call(target_ids=torch.full_like(case.target_ids, V))
    with refusing(TypeError, "group must be", "str"):
        call(group="tp")
    with refusing(ValueError, "weight, a DTensor, must be Shard(0) or Replicate()", "Shard(dim=1)"):
        call(weight=distribute_tensor(case.leaves["weight"], mesh, [Shard(1)]), group=None)
    with refusing(ValueError, "sequence_parallel=True needs"):
        call(weight=case.leaves["weight"], group=None, sequence_parallel=True)
    # Whatever else differs, down to what only one rank has to refuse.
    with refusing(ValueError, "got other ones", "tokens by rank: [24, 22]"):
        n = T - 2 * rank
        call(hidden=case.leaves["hidden"][: n // 2], target_ids=case.target_ids[:n], mask=case.mask[:n],
             old_logprobs=case.old_logprobs[:n], advantages=case.advantages[:n], sequence_parallel=True)  # fmt: skip
    for name, values in {
        "temperature": (1.0, 0.5),
        "sequence_parallel": (False, True),
        "host_sync": (True, False),
        "clip_high": (0.2, 0.3),
    }.items():
        hidden = case.leaves["hidden"][: T // 2 if name == "sequence_parallel" and rank else T]
        with refusing(ValueError, "the same call", name):
            call(**{name: values[rank]}, hidden=hidden)
    marked = torch.where(torch.arange(T) == 3, float(-rank), 1.0)
    for given in ({"temperature": marked}, {"advantages": marked}, {"old_logprobs": marked}):
        with refusing(ValueError, "got other ones", "advantages"):
            call(**given)
    call(advantages=torch.where(case.mask, case.advantages, marked), mask=case.mask)
    for name, wrong in {"temperature": -1.0, "valid_vocab": 0, "softcap": -1.0}.items():
        with refusing(ValueError, f"{name} must be" if rank else "rank 1 of the group has refused its arguments"):
            call(**({name: wrong} if rank else {}))
    pairs = torch.tensor([[0, 1 + rank]])
    hidden, bounds = case.leaves["hidden"], case.cu_seqlens
    with refusing(ValueError, "got other ones"):
        linear_preference_loss(hidden, weight, case.target_ids, None, pairs=pairs, cu_seqlens=bounds, group=group)
    for placement in (Shard(0), Replicate()):
        head = distribute_tensor(case.leaves["weight"], mesh, [placement])
        with refusing(ValueError, f"valid_vocab must be at most V={V}"):
            call(weight=head, group=None, valid_vocab=V + 1)
        with refusing(ValueError, "got other ones"):
            call(weight=head, group=None, advantages=marked)


def lots_of_a_whole_head(group: Group) -> None:
    """The ranks' dice differ: the first one's count."""
    case, mesh = linear_case(V, H, LENGTHS, seed=19), DeviceMesh.from_group(group, "cpu")
    leaves = {"hidden": case.leaves["hidden"]}
    leaves["weight"] = distribute_tensor(case.leaves["weight"], mesh, [Replicate()])
    dice = torch.Generator().manual_seed(group.rank())
    options = {"clip_cov": (0.3, -9.0, 9.0), "generator": dice, "mask": case.mask}
    loss = call_linear(linear_dapo_loss, replace(case, leaves=leaves), "clip_cov", **options)[0].loss.detach()
    first = loss.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    assert torch.equal(first, loss)


def impossible_columns(group: Group) -> None:
    """A target among columns of −∞ alone has a log-prob of −∞, as in whole rows."""
    case = logits_case(V, LENGTHS, seed=21)
    case.leaves["logits"][:, 34:] = -torch.inf
    mine = columns((34, 33), group)
    for entropy in (False, True):
        whole = token_logprobs(case.leaves["logits"], case.target_ids, entropy=entropy)
        got = token_logprobs(case.leaves["logits"][:, mine], case.target_ids, entropy=entropy, group=group)
        assert bool(whole.logprobs.isneginf().any())
        for a, b in zip(got, whole, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b, **CLOSE[torch.float32])


def second_derivative(group: Group) -> None:
    case = share(linear_case(V, H, LENGTHS, dtype=torch.bfloat16, seed=22), columns((34, 33), group))
    leaves = case.fresh()
    stats = linear_token_logprobs(leaves["hidden"], leaves["weight"], case.target_ids, group=group)
    (grad,) = torch.autograd.grad(stats.logprobs.sum(), leaves["hidden"], create_graph=True)
    with refusing(RuntimeError, "the gradient of a gradient is not implemented"):
        grad.sum().backward()


class Network(nn.Module):
    """A body that FSDP2 shards and a head that the tensor-parallel ranks share."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.body = nn.Linear(H, H)
        self.head = nn.Linear(H, V)
        self.head.weight.data.copy_(case.leaves["weight"])

    def forward(self, states: Tensor, *tokens: Tensor, denominator: float) -> Tensor:
        hidden = torch.tanh(self.body(states))
        head = {"weight": self.head.weight, "bias": self.head.bias}
        return linear_dapo_loss(hidden, target_ids=tokens[0], old_logprobs=tokens[1], advantages=tokens[2], **head,
                                denominator=denominator).loss  # fmt: skip


def with_fsdp() -> None:
    """TP × FSDP2: 2 × 2 ranks, each pair of which has half of the tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    case = linear_case(V, H, LENGTHS, seed=15)
    inputs = (case.leaves["hidden"], case.target_ids, case.old_logprobs, case.advantages)
    torch.manual_seed(0)
    whole = Network(case)
    whole(*inputs, denominator=float(T)).backward()
    torch.manual_seed(0)
    model = Network(case)
    for name in ("weight", "bias"):
        shard = distribute_tensor(getattr(model.head, name).data, mesh["tp"], [Shard(0)])
        setattr(model.head, name, nn.Parameter(shard))
    fully_shard(model, mesh=mesh["dp"])
    own = [x.chunk(2)[mesh["dp"].get_local_rank()] for x in inputs]
    model(*own, denominator=T / 2).backward()
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor), name
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, **CLOSE[torch.float32])


def on_a_rank(rank: int) -> None:
    """All four ranks share a vocabulary, then each pair one of its own."""
    for cut in CUTS[4]:
        every_option(dist.group.WORLD, cut, (torch.float32,))
    every_objective(dist.group.WORLD, CUTS[4][0])
    sixteen_bits(dist.group.WORLD, CUTS[4][0])
    distributed_tensors(dist.group.WORLD)
    with_fsdp()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    with use_backend(("torch", "cpp")[rank // 2]):
        for cut in CUTS[2]:
            every_option(group, cut, (torch.float32, torch.float64) if rank < 2 else (torch.float32,))
            every_objective(group, cut)
            log_probs(group, cut)
            preferences(group, cut)
            messages(group, cut)
        sixteen_bits(group, CUTS[2][0])
        lots_of_a_whole_head(group)
        impossible_columns(group)
        second_derivative(group)
        low_rank_factors(group)
        head_in_float8(group)
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
        assert grad is not None
        assert torch.equal(grad, expected[name])  # type: ignore[arg-type]
    distributed_tensors(dist.group.WORLD)
