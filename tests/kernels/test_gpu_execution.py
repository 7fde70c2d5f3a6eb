"""On a CUDA device: the same bits again, several streams, graphs, no waiting for the device, asserts, torch.compile."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import DEVICE, NEEDS_DEVICE, batch, keywords_of, near, poison, same, step
from torch import Tensor

from dapo_kernels import (
    OBJECTIVES,
    dapo_loss,
    linear_dapo_loss,
    linear_token_logprobs,
    policy_loss,
    token_logprobs,
    use_backend,
)
from dapo_kernels.backends import available_backends

pytestmark = [pytest.mark.gpu, NEEDS_DEVICE]
ROOT = Path(__file__).parents[2]
LEVELS = {"logits": 0, "hidden": 256}  # and its hidden size


@pytest.fixture(autouse=True)
def poison_uninitialized_memory() -> None:
    poison()


# --- the same bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["dapo", "gspo", "kl_cov"])
def test_runs_give_the_same_bits(gpu_backend: str, name: str, level: str) -> None:
    b = batch(512, 32003, LEVELS[level])
    first = step(b, name)
    assert all(same(step(b, name), first) for _ in range(3))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("vocab", [1000, 32003, 151936])
def test_a_row_has_the_same_bits_wherever_it_stands(gpu_backend: str, vocab: int, inplace: bool) -> None:
    """Alone, in another place, and in a batch of another size; the log-prob, the entropy and the gradient."""
    b = batch(70, vocab)

    def rows(at: Tensor) -> list[Tensor]:
        leaf = b["logits"][at].requires_grad_()
        per_token = (b[name][at] for name in ("target_ids", "old_logprobs", "advantages"))
        out = dapo_loss(leaf, *per_token, denominator=1.0, entropy=True, inplace_backward=inplace)
        return [out.logprobs, out.entropy, *torch.autograd.grad(out.loss, leaf)]

    together = rows(torch.arange(70, device=DEVICE))
    assert same([x.flip(0) for x in rows(torch.arange(69, -1, -1, device=DEVICE))], together)
    for t in (0, 1, 69):
        assert same(rows(torch.tensor([t], device=DEVICE)), [x[t : t + 1] for x in together])


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [513, 32003, 151936])
def test_every_kernel_of_the_cuda_backend_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, vocab: int, dtype: torch.dtype, entropy_coef: float
) -> None:
    """One cluster per row, one block per row, slices of a row: the in-place loss. The last two of rows that start
    between 16-byte boundaries too.

    Rows for several turns of every cluster: 132 multiprocessors hold 528 clusters of one block, 33 of sixteen.
    """
    why = available_backends().get("cuda", "dapo_kernels has no such backend")
    if why is not None:
        pytest.skip(f"cuda: {why}")
    from dapo_kernels.backends import cuda

    b = batch({513: 2000, 32003: 800}.get(vocab, 200), vocab, dtype=dtype)
    paths = ["sweep", "split", *(["cluster"] if torch.cuda.get_device_capability() >= (9, 0) else [])]
    padding = -vocab % 8
    runs = [*((path, padding) for path in paths), *((path, 0) for path in paths[:2])]
    found = {}
    with use_backend("cuda"):
        for path, gap in runs:
            monkeypatch.setattr(cuda, "PATH", path)
            n = len(b["target_ids"])
            rows = b["logits"].new_empty(n, vocab + gap)[:, :vocab].copy_(b["logits"])
            found[path, gap] = step({**b, "logits": rows}, inplace_backward=True, entropy_coef=entropy_coef)
    for run in runs[1:]:
        assert same(found[run], found[runs[0]]), f"{run} and {runs[0]} differ"


# --- streams, graphs, waiting -----------------------------------------------------------------------------

BATCH_LEVEL = ("dapo", "gspo", "top_entropy")


@pytest.mark.parametrize("level", LEVELS)
def test_streams_do_not_meet(gpu_backend: str, level: str) -> None:
    """Two calls under way on two streams at once; results and scratch memory are freed before the device gets there."""
    batches = [batch(640, 32003, LEVELS[level], seed=seed) for seed in (1, 2)]
    # Without waiting, or the host would not get ahead; several chunks that share a buffer.
    more = {"chunk_bytes": 2**24, "host_sync": False} if level == "hidden" else {}
    expected = [step(b, **more) for b in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # a tenth of a second: everything below is queued behind it
    kept: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(4):
        for b, stream, got in zip(batches, streams, kept, strict=True):
            with torch.cuda.stream(stream):
                got.append(step(b, **more))
                step(b, **more)  # freed at once
        torch.full((64 * 2**20,), 255, dtype=torch.uint8, device=DEVICE)  # the default stream takes what it can get
    torch.cuda.synchronize()
    for got, once in zip(kept, expected, strict=True):
        assert all(same(g, once) for g in got)


def captured(run: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", BATCH_LEVEL)
def test_a_graph_replays_with_other_inputs(gpu_backend: str, name: str, level: str) -> None:
    # In float32, so that another GEMM's rounding does not move tokens over the clip edges.
    static = batch(512, 32003, LEVELS[level], torch.float32, seed=1)
    graph, results = captured(lambda: step(static, name))
    for seed in (2, 3):
        fresh = batch(512, 32003, LEVELS[level], torch.float32, seed=seed)
        for key, value in static.items():
            value.copy_(fresh[key])
        graph.replay()
        expected = step(fresh, name, **({"host_sync": False} if level == "hidden" else {}))
        for got, want in zip(results, expected, strict=True):
            # The library may pick another GEMM while a graph is captured; ours may not.
            assert torch.equal(got, want) if level == "logits" else near(got, want)


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """A function after which whatever waits for the device is an error, until the test ends."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def from_logprobs(b: dict[str, Tensor], name: str, count: Tensor) -> None:
    logprobs = (b["old_logprobs"] + 0.1).requires_grad_()
    entropy = b["old_logprobs"].abs().requires_grad_()
    per_token = (logprobs, b["old_logprobs"], b["advantages"])
    policy_loss(*per_token, entropy=entropy, denominator=count, **keywords_of(name, b)).loss.backward()


def logprobs_alone(b: dict[str, Tensor]) -> None:
    if "hidden" in b:
        leaves = [b[name].clone().requires_grad_() for name in ("hidden", "weight")]
        for mask in (None, b["mask"]):
            linear_token_logprobs(*leaves, b["target_ids"], mask=mask).logprobs.sum().backward()
        return
    for inplace in (False, True):
        leaf = b["logits"].clone().requires_grad_()
        stats = token_logprobs(leaf, b["target_ids"], entropy=True, inplace_backward=inplace)
        torch.stack(stats).sum().backward()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_waits(gpu_backend: str, no_waiting: Callable[[], None], name: str) -> None:
    levels = [batch(256, 5003, hidden) for hidden in LEVELS.values()]
    count = torch.tensor(300.0, device=DEVICE)
    taus = torch.rand(256, device=DEVICE) + 0.5
    calls: list[Callable[[], Any]] = [
        *(functools.partial(step, b, name, denominator=count, temperature=taus) for b in levels),
        functools.partial(step, levels[0], name, inplace_backward=True),
        functools.partial(from_logprobs, levels[0], name, count),
        *(functools.partial(logprobs_alone, b) for b in levels),
    ]
    for run in calls:
        run()  # compiles and loads
    torch.cuda.synchronize()
    no_waiting()
    for run in calls:
        run()


# --- errors and torch.compile -----------------------------------------------------------------------------

_BAD_TARGET = """
import torch
from dapo_kernels import dapo_loss, linear_dapo_loss, use_backend
n, vocab, hidden = 8, 100, 32
ids, mask = torch.zeros(n, dtype=torch.int64, device="cuda"), torch.ones(n, dtype=torch.bool, device="cuda")
ids[3] = vocab
mask[3] = {live}
rest = (ids, None, torch.ones(n, device="cuda"))
with use_backend({backend!r}):
    if {level!r} == "logits":
        out = dapo_loss(torch.randn(n, vocab, device="cuda").requires_grad_(), *rest, mask=mask)
    else:
        h, w = (torch.randn(k, hidden, device="cuda").requires_grad_() for k in (n, vocab))
        out = linear_dapo_loss(h, w, *rest, mask=mask)
    out.loss.backward()
torch.cuda.synchronize()
print("no complaint", float(out.loss))
"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("live", [True, False])
def test_a_bad_target_trips_an_assert(gpu_backend: str, live: bool, level: str) -> None:
    """In a process of its own, which loses its device. A dead token's target may be anything."""
    code = _BAD_TARGET.format(live=live, backend=gpu_backend, level=level)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if live:
        assert done.returncode != 0, done.stdout
        assert "assert" in done.stderr.lower(), done.stderr[-2000:]
    else:
        assert done.returncode == 0, done.stderr[-2000:]
        assert "no complaint" in done.stdout


_OFFSETS = """
import torch
from dapo_kernels import SamplingMask, token_logprobs, use_backend
lists = SamplingMask(torch.tensor([1, 2, 3], device="cuda"), torch.tensor({offsets}, device="cuda"))
with use_backend({backend!r}):
    token_logprobs(torch.zeros(2, 9, device="cuda"), torch.tensor([1, 2], device="cuda"), sampling_mask=lists)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("offsets", [[0, 1, 3], [0, 4, 3], [0, 1, 4], [1, 2, 3], [0, 1, 2]], ids=str)
def test_bad_offsets_of_lists_trip_an_assert(gpu_backend: str, offsets: list[int]) -> None:
    """All but the first ones are."""
    code = _OFFSETS.format(offsets=offsets, backend=gpu_backend)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    is_good = offsets == [0, 1, 3]
    assert (done.returncode == 0) == is_good, done.stderr[-2000:]
    assert is_good or "assert" in done.stderr.lower(), done.stderr[-2000:]


@pytest.mark.parametrize("level", LEVELS)
def test_compiles_as_one_graph(gpu_backend: str, level: str) -> None:
    names = ("hidden", "weight") if level == "hidden" else ("logits",)
    function = linear_dapo_loss if level == "hidden" else dapo_loss

    def loss_of(b: dict[str, Tensor], *leaves: Tensor) -> Tensor:
        rest = (b["target_ids"], b["old_logprobs"], b["advantages"])
        return function(*leaves, *rest, mask=b["mask"], temperature=0.9).loss

    compiled = torch.compile(loss_of, fullgraph=True)
    for n in (192, 320):
        b = batch(n, 5003, LEVELS[level], torch.float32)
        results = []
        for run in (loss_of, compiled):
            leaves = [b[name].clone().requires_grad_() for name in names]
            loss = run(b, *leaves)
            results.append((loss, *torch.autograd.grad(loss, leaves)))
        for got, want in zip(*results, strict=True):
            assert near(got, want)


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_is_multiplied_where_it_lies(gpu_backend: str, dtype: torch.dtype, factor: float) -> None:
    leaf = torch.randn(300, 5003, device=DEVICE).to(dtype).requires_grad_()
    ids, weights = torch.randint(5003, (300,), device=DEVICE), torch.rand(300, device=DEVICE)
    expected = torch.autograd.grad(factor * dapo_loss(leaf, ids, None, weights).loss, leaf)[0]
    logits = leaf.detach().clone().requires_grad_()
    got = torch.autograd.grad(factor * dapo_loss(logits, ids, None, weights, inplace_backward=True).loss, logits)[0]
    torch.testing.assert_close(got, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)
