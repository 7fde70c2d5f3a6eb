"""What only the "cuda" backend has, under emulation: paths, clusters, arithmetic in two floats.

Started by ``test_elsewhere.py``; not collected by itself. T tokens, V vocabulary. Vectors of 16 bytes, tiles of 16 KiB,
slices of up to 40 KiB, clusters of up to 16 slices.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from emulated_cuda import load
from rows import OPTIONS, Place, Problem, problem, random_rows
from test_backends import check, results
from torch import Tensor

from dapo_kernels.backends import cuda
from dapo_kernels.backends.registry import CLUSTER_ROW_BYTES
from dapo_kernels.backends.structs import rows_of
from dapo_kernels.objectives import OBJECTIVES
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, Tokens

EMULATION = load("cuda_coverage", os.environ["CUDA_EMULATION"])
HOPPER = (4, 90, 232448, True)  # multiprocessors, capability, shared bytes, whether there is code for clusters


@pytest.fixture(autouse=True)
def choices() -> Any:
    yield
    cuda.PATH = "automatic"
    EMULATION.pretend(*HOPPER)


def run(path: str, p: Problem, rows: Tensor) -> list[Tensor]:
    """The loss of rows that are where they are, and all it returns."""
    cuda.PATH = path
    out = cuda.row_loss_(rows, p.request, p.tokens, p.scalars)
    return [rows.clone(), *(x for x in out if x is not None)]


def all_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def far(dtype: torch.dtype, **options: Any) -> Problem:
    """The largest finite logits, tied across threads and slices, on-policy without a reference."""
    logits = random_rows(20488, dtype)
    logits[:3, [8, 9, 40, 15000]] = torch.tensor(3e38).to(dtype)
    logits[5, 12000:] = torch.tensor(-3e38).to(dtype)
    p = problem(logits, **options)
    scalars = ObjectiveScalars.of(OBJECTIVES["dapo"])._replace(entropy_coef=p.scalars.entropy_coef)
    return p._replace(tokens=p.tokens._replace(old_logprobs=None, ref_logprobs=None), scalars=scalars)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 1031, 8191, 8193, 20481, 45003, None], ids=str)
def test_every_path_gives_the_same_bits(vocab: int | None, options: str) -> None:
    """Around a vector, a tile, a slice and two; and far. Off 16 bytes a cluster takes no rows."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16)[: 2 if vocab is None else 3]:
        how = OPTIONS[options]
        p = far(dtype, **how) if vocab is None else problem(random_rows(vocab, dtype), **how)
        n = p.logits.shape[1]
        expected = run("automatic", p, Place.of(p, 8, -n % 8).rows)
        assert bool(expected[0].isfinite().all())
        if vocab is not None:
            check(p, results(cuda, p, p.logits.clone(), "cpu"))
        for offset, gap, paths in (
            (8, -n % 8, ("cluster", "sweep", "split")),
            (1, -n % 8 + 3, ("sweep", "split")),
            (5, -n % 8, ("sweep", "split")),
        ):
            for path in paths:
                place = Place.of(p, offset, gap)
                assert all_equal(run(path, p, place.rows), expected), (dtype, path, offset, gap)
                assert place.is_untouched_outside()


@pytest.mark.parametrize(("vocab", "dtype", "gap"), [(1031, torch.float32, 1), (9001, torch.bfloat16, 7)], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.7, 0.15, 0.0])
@pytest.mark.parametrize("turns", range(8))
def test_a_cluster_goes_from_row_to_row_whatever_its_threads_order(
    turns: int, share: float, vocab: int, dtype: torch.dtype, gap: int
) -> None:
    """Rows that end in a part full vector follow each other in the same shared memory; ``share`` of them live."""
    n, g = 19, torch.Generator().manual_seed(turns)
    live = torch.rand(n, generator=g) < share
    values = (torch.rand(n, generator=g) for _ in range(4))
    p = problem((torch.randn(n, vocab, generator=g) * 3).to(dtype))
    tokens = Tokens(live, next(values), next(values) - 0.5, next(values) - 8, next(values) - 8, None)
    p = p._replace(tokens=tokens, request=p.request._replace(live=live))
    split = run("split", p, Place.of(p, 8 * (turns % 3), gap).rows)
    EMULATION.take_turns(turns)
    assert all_equal(run("cluster", p, Place.of(p, 8 * (turns % 3), gap).rows), split)


@pytest.mark.parametrize("turns", range(4))
def test_a_cluster_of_sixteen(turns: int) -> None:
    assert EMULATION.slices(90_001, 4)[0] == 16
    p = problem(random_rows(90_001, torch.float32))
    EMULATION.take_turns(turns)
    check(p, results(cuda, p, p.logits.clone(), "cpu"))
    assert all_equal(*(run(path, p, Place.of(p, 0, 3).rows) for path in ("cluster", "split")))


@pytest.mark.parametrize(
    ("capability", "shared_bytes", "cluster_code", "expected"),
    [
        (80, 166912, False, ["sweep", "split", "sweep", "split"]),
        (90, 232448, True, ["cluster", "cluster", "cluster", "split"]),
        (100, 232448, True, ["cluster", "cluster", "cluster", "split"]),
        (120, 101376, True, ["cluster", "cluster", "sweep", "split"]),  # clusters of 8
        (90, 232448, False, ["sweep", "split", "sweep", "split"]),  # PTX for 8.0, compiled by the driver
    ],
)
def test_the_path_of_a_device(capability: int, shared_bytes: int, cluster_code: bool, expected: list[str]) -> None:
    """Many rows of a common vocabulary, few of them, many that want sixteen blocks, few that no cluster holds."""
    shapes = [(4096, 151936, 1), (4, 151936, 1), (4096, 151936, 0), (4, 2_000_000, 1)]
    EMULATION.pretend(132, capability, shared_bytes, cluster_code)
    rows = [cuda._cuda.Rows(0, n, vocab, n, 0, vocab, dtype) for n, vocab, dtype in shapes]
    assert [cuda._cuda.choose_path(r).name for r in rows] == expected
    if expected[0] != "cluster":
        with pytest.raises(ValueError, match=f"cluster.*{capability / 10}"):
            run("cluster", problem(random_rows(8, torch.bfloat16)), random_rows(8, torch.bfloat16))


def test_rows_between_16_byte_boundaries_are_no_clusters() -> None:
    """What a launcher goes by: the first row's address, and the distances between rows and between sequences."""
    base, vocab = 2**20, 151936
    rows = {
        "even": cuda._cuda.Rows(base, 4096, vocab, 4096, 0, vocab, 1),
        "padded": cuda._cuda.Rows(base, 4096, vocab + 1, 4096, 0, vocab + 8, 1),
        "odd": cuda._cuda.Rows(base, 4096, vocab + 1, 4096, 0, vocab + 1, 1),
        "shifted": cuda._cuda.Rows(base + 2, 4096, vocab, 4096, 0, vocab, 1),
        "sequences": cuda._cuda.Rows(base, 4096, vocab, 512, 513 * vocab, vocab, 1),
        "odd sequences": cuda._cuda.Rows(base, 4096, vocab, 512, 513 * vocab + 4, vocab, 1),
    }
    found = {name: cuda._cuda.choose_path(r).name for name, r in rows.items()}
    assert found == {n: "cluster" if n in ("even", "padded", "sequences") else "sweep" for n in rows}
    with pytest.raises(ValueError, match="16 bytes"):
        run("cluster", problem(random_rows(9, torch.bfloat16)), random_rows(9, torch.bfloat16))


def test_the_default_ends_with_the_rows_that_a_cluster_holds() -> None:
    columns = CLUSTER_ROW_BYTES // 4
    assert [EMULATION.slices(n, 4)[2] for n in (columns, columns + 1)] == [True, False]


def test_a_row_beyond_a_cluster() -> None:
    vocab = 1_900_000
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert cuda._cuda.choose_path(rows_of(cuda._cuda, logits)).name == "split"
    ids, live = torch.tensor([0, vocab - 1]), torch.ones(2, dtype=torch.bool)
    logprobs = cuda.row_stats(logits, RowRequest(ids, live, 1.0, None, False)).logprobs
    truth = torch.log_softmax(logits.double(), -1)[torch.arange(2), ids]
    torch.testing.assert_close(logprobs.double(), truth, rtol=0, atol=3e-6)


# --- arithmetic -------------------------------------------------------------------------------------------


def test_the_scalars_of_a_row_are_those_in_double() -> None:
    """Two floats give a row's log-prob, entropy and gradient to a float's last digit, whatever the row."""
    g = torch.Generator().manual_seed(0)
    for _ in range(20_000):
        u = torch.rand(8, generator=g).tolist()
        scale = 10.0 ** (9 * u[0] - 4)
        top, tau = scale * (u[1] - 0.5), 10.0 ** (2 * u[2] - 1)
        sum_ = 1.0 + 10.0 ** (12 * u[3] - 8)
        x = top - tau * 10.0 ** (4 * u[4] - 2) * (u[4] > 0.1)
        v = u[7] - 0.5 if u[7] > 0.5 else 0.0
        ours, truth = EMULATION.scalars(x, top, sum_, -(sum_ - 1) * u[5], tau, u[6] - 0.5, v)
        for k, (a, b) in enumerate(zip(ours, truth, strict=True)):
            size = abs(b)
            if k == 4 and v:  # two terms that may cancel
                size = max(size, abs(u[6] - 0.5) / tau)
            assert abs(a - b) <= (2**-21.5 if k == 4 else 2**-23) * size + 1e-37, (k, a, b)


def test_temperatures_give_the_scale_of_the_host() -> None:
    """To the bit: ``norms.py`` works the same scale out in double, and parts of rows meet there."""
    assert EMULATION.other_base2_scales() == 0


def test_the_polynomial_exponential() -> None:
    y = torch.cat([torch.linspace(-130, 0, 50_000), -torch.arange(0.0, 127.0, 0.5), torch.tensor([1e-7, 0.5])])
    for d in y.tolist():
        expected = 2.0**d if d >= -126.5 else 0.0
        assert abs(EMULATION.polynomial_exp2(d) - expected) <= 3e-6 * expected, d
    assert [EMULATION.polynomial_exp2(x) for x in (-math.inf, -1e30, -127.0)] == [0.0] * 3
