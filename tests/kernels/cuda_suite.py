"""The "cuda" backend's own tests under emulation. Started by ``test_cuda.py``; not collected by itself.

T tokens, V vocabulary. Vectors of 16 bytes, tiles of 16 KiB, slices of up to 40 KiB, clusters of up to 16 slices.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from emulated_cuda import load
from torch import Tensor

from dapo_kernels.backends import cuda, reference
from dapo_kernels.backends.structs import rows_of
from dapo_kernels.objectives import OBJECTIVES
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import RowRequest, RowsLoss, Tokens

PATHS = ("cluster", "sweep", "split")
# Rows of one element; around a vector, a tile, a slice, two slices; the last with a tail.
BF16_VOCABS = (1, 7, 8, 9, 1031, 8191, 8193, 20481, 45003)
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
COVERAGE = load("cuda_coverage", os.environ["CUDA_EMULATION"])


def stored(n: int, vocab: int, dtype: torch.dtype, offset: int, gap: int) -> tuple[Tensor, Tensor]:
    """Memory full of NaN, and rows in it that begin after ``offset`` elements with ``gap`` between them."""
    memory = torch.full((offset + n * (vocab + gap) + 64,), math.nan).to(dtype)
    return memory, memory[offset : offset + n * (vocab + gap)].view(n, vocab + gap)[:, :vocab]


def problem(n: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tokens]:
    g = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(n, vocab, generator=g) * 3).to(dtype)
    ids = torch.randint(vocab, (n,), generator=g)
    live = torch.ones(n, dtype=torch.bool)
    live[[1, 4]] = False
    logprobs = reference.row_stats(logits.double(), RowRequest(ids, live, 0.7, None, False)).logprobs

    def near() -> Tensor:
        return (logprobs + 0.3 * torch.randn(n, generator=g).double()).float()

    weights = torch.rand(n, generator=g)
    weights[2] = 0.0
    return logits, ids, Tokens(live, weights, torch.randn(n, generator=g), near(), near(), None)


def run(path: str, rows: Tensor, ids: Tensor, tokens: Tokens, options: dict[str, Any]) -> RowsLoss:
    cuda.PATH = path
    scalars = ObjectiveScalars.of(OBJECTIVES["grpo"])
    coef = options.get("entropy_coef", 0.0)
    request = RowRequest(ids, tokens.live, 0.7, None, coef != 0, softcap=options.get("softcap"))
    return cuda.row_loss_(rows, request, tokens, scalars._replace(entropy_coef=coef))


@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("vocab", BF16_VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradient_of_every_path(dtype: torch.dtype, vocab: int, options: dict[str, Any]) -> None:
    """Float64's values, the same bits on every path and at every alignment, and not a byte outside the rows touched:
    at multiples of 16 bytes, with a part full vector at a row's end, and between them, where a cluster takes no rows.
    """
    logits, ids, tokens = problem(7, vocab, dtype)
    z = logits.double()
    cap = options.get("softcap")
    truth = z if cap is None else cap * torch.tanh(z / cap)
    slope = torch.ones_like(z) if cap is None else 1 - (truth / cap) ** 2
    grad = truth.clone()
    wide = Tokens(*(x.double() if x is not None and x.is_floating_point() else x for x in tokens))
    scalars = ObjectiveScalars.of(OBJECTIVES["grpo"])
    coef = options.get("entropy_coef", 0.0)
    scalars = scalars._replace(entropy_coef=coef)
    expected = reference.row_loss_(grad, RowRequest(ids, tokens.live, 0.7, None, coef != 0), wide, scalars)
    grad *= slope
    first = None
    for offset, gap, paths in ((8, -vocab % 8, PATHS), (1, -vocab % 8 + 3, PATHS[1:]), (5, -vocab % 8, PATHS[1:])):
        for path in paths:
            memory, rows = stored(7, vocab, dtype, offset, gap)
            rows.copy_(logits)
            rows[~tokens.live] = math.nan
            before = memory.clone()
            out = run(path, rows, ids, tokens, options)
            got = rows.clone()
            rows.copy_(before.as_strided(rows.shape, rows.stride(), rows.storage_offset()))
            assert torch.equal(memory.view(BITS[dtype]), before.view(BITS[dtype])), (path, offset, gap)
            if first is None:
                first = (out, got)
            assert torch.equal(got, first[1]), (path, offset, gap)
            for mine, theirs in zip(out, first[0], strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.equal(mine, theirs), (path, offset, gap)
    assert first is not None
    out, got = first
    assert (out.logprobs - expected.logprobs).abs().max() < 3e-6
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=2e-5, abs=2e-5)
    error = (got.double() - grad).abs() - grad.abs() * DTYPES[dtype]
    assert error.max() < (4e-6 if dtype == torch.float32 else 1e-5)
    assert not got[~tokens.live | (tokens.weights == 0)].any()


@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1}], ids=str)
@pytest.mark.parametrize("magnitude", [3e7, 1e9, 3e9, 1e12, 1e29, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_far_logits_on_every_path(dtype: torch.dtype, magnitude: float, options: dict[str, Any]) -> None:
    """Ties in one thread, in two of a slice and in two slices, over far, ordinary and -inf logits; the same bits."""
    vocab = 20488
    logits, ids, tokens = problem(7, vocab, dtype)
    scale = torch.full((7, 1), magnitude).to(dtype)
    logits[:, 256:3000] = -scale
    logits[:, 9000:9500] = -math.inf
    logits[:3, [8, 9, 40, 15000]] = scale[:3]
    logits[3] = -scale[3]  # one tie
    logits[5, 12000:] = -scale[5]
    ids[0], ids[2], ids[6] = 40, 70, 300
    tokens = tokens._replace(old_logprobs=None, ref_logprobs=None)
    grad, wide = (
        logits.double(),
        Tokens(*(x.double() if x is not None and x.is_floating_point() else x for x in tokens)),
    )
    coef = options.get("entropy_coef", 0.0)
    scalars = ObjectiveScalars.of(OBJECTIVES["dapo"])._replace(entropy_coef=coef)
    expected = reference.row_loss_(grad, RowRequest(ids, tokens.live, 0.7, None, coef != 0), wide, scalars)
    outs = []
    for path in PATHS:
        rows = logits.clone()
        cuda.PATH = path
        outs.append((cuda.row_loss_(rows, RowRequest(ids, tokens.live, 0.7, None, coef != 0), tokens, scalars), rows))
        out = outs[-1][0]
        assert torch.equal(rows, outs[0][1])
        assert torch.equal(out.logprobs, outs[0][0].logprobs)
        torch.testing.assert_close(out.logprobs, expected.logprobs.float(), rtol=2e-6, atol=4e-6)
        if coef != 0:
            assert out.entropy is not None
            assert expected.entropy is not None
            torch.testing.assert_close(out.entropy, expected.entropy.float(), rtol=2e-6, atol=4e-6)
        error = (rows.double() - grad).abs() - grad.abs() * DTYPES[dtype]
        assert error.max() < (4e-6 if dtype == torch.float32 else 1e-5)


def test_rows_alone_and_together_give_the_same_bits() -> None:
    logits, ids, tokens = problem(7, 20481, torch.bfloat16)
    together = stored(7, 20481, torch.bfloat16, 0, 7)[1].copy_(logits)
    out = run("cluster", together, ids, tokens, {})
    for row in (0, 3, 6):
        alone = logits[row : row + 1].clone()
        mine = run("split", alone, ids[row : row + 1], tokens.at(slice(row, row + 1)), {})
        assert torch.equal(alone[0], together[row])
        assert torch.equal(mine.logprobs[0], out.logprobs[row])


@pytest.mark.parametrize(("vocab", "dtype", "gap"), [(1031, torch.float32, 1), (9001, torch.bfloat16, 7)], ids=str)
@pytest.mark.parametrize("dead", ["none", "some", "most", "all"])
@pytest.mark.parametrize("turns", range(8))
def test_a_cluster_goes_from_row_to_row_whatever_its_threads_order(
    turns: int, dead: str, vocab: int, dtype: torch.dtype, gap: int
) -> None:
    """Rows that end in a part full vector follow each other in the same shared memory."""
    n = 19
    g = torch.Generator().manual_seed(turns)
    share = {"none": 1.0, "some": 0.7, "most": 0.15, "all": 0.0}[dead]
    live = torch.rand(n, generator=g) < share
    logits = (torch.randn(n, vocab, generator=g) * 3).to(dtype)
    logits[~live] = math.nan
    ids = torch.randint(vocab, (n,), generator=g)
    values = (torch.rand(n, generator=g) for _ in range(4))
    tokens = Tokens(live, next(values), next(values) - 0.5, next(values) - 8, next(values) - 8, None)
    results = []
    for path in ("split", "cluster"):
        _, rows = stored(n, vocab, dtype, 8 * (turns % 3), gap)
        rows.copy_(logits)
        COVERAGE.take_turns(turns)
        out = run(path, rows, ids, tokens, {})
        results.append((rows.clone(), *out))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("turns", range(4))
def test_a_cluster_of_sixteen(turns: int) -> None:
    logits, ids, tokens = problem(7, 90_001, torch.float32)
    assert COVERAGE.slices(90_001, 4)[0] == 16
    COVERAGE.take_turns(turns)
    together = [stored(7, 90_001, torch.float32, 0, 3)[1].copy_(logits) for _ in range(2)]
    outs = [run(path, rows, ids, tokens, {}) for path, rows in zip(("cluster", "split"), together, strict=True)]
    assert torch.equal(*together)
    assert torch.equal(outs[0].logprobs, outs[1].logprobs)


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
    rows = [cuda._cuda.Rows(0, n, vocab, n, 0, vocab, dtype) for n, vocab, dtype in shapes]
    try:
        COVERAGE.pretend(132, capability, shared_bytes, cluster_code)
        assert [cuda._cuda.choose_path(r).name for r in rows] == expected
        if expected[0] != "cluster":
            logits, ids, tokens = problem(7, 8, torch.bfloat16)
            with pytest.raises(ValueError, match=f"cluster.*compute capability {capability / 10}"):
                run("cluster", logits, ids, tokens, {})
    finally:
        COVERAGE.pretend(4, 90, 232448, True)


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
    logits, ids, tokens = problem(7, 9, torch.bfloat16)
    with pytest.raises(ValueError, match="not on 16 bytes"):
        run("cluster", logits, ids, tokens, {})


def test_a_softcap_takes_minus_infinity_to_its_bound() -> None:
    logits = torch.randn(2, 9000, generator=torch.Generator().manual_seed(0))
    logits[:, 100:8990] = -math.inf
    ids, live = torch.tensor([5, 200]), torch.ones(2, dtype=torch.bool)
    logprobs, _, entropy = cuda.row_stats(logits, RowRequest(ids, live, 1.0, None, True, softcap=3.0))
    truth = torch.log_softmax(3 * torch.tanh(logits.double() / 3), -1)
    assert entropy is not None
    torch.testing.assert_close(logprobs.double(), truth[torch.arange(2), ids], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy.double(), -(truth.exp() * truth).sum(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 127, 4096, 4097, 8200, 20480, 20489, 32001, 151936, 152064, 262144])
def test_a_cluster_covers_each_element_once(vocab: int, itemsize: int) -> None:
    for address in (0, itemsize):
        for what, counts in zip(
            ("fetched", "summed", "written"), COVERAGE.coverage(vocab, itemsize, address), strict=True
        ):
            assert min(counts) == max(counts) == 1, (what, address)


def test_the_scalars_of_a_row_are_those_in_double() -> None:
    """What two floats make of a row's log-prob, entropy and gradient, against double: rows that are certain, spread
    out, nearly ties, far from zero. The last digit of a float, and of what passes through expm1 and exp three.
    """
    g = torch.Generator().manual_seed(0)
    for _ in range(20_000):
        u = torch.rand(8, generator=g).tolist()
        scale = 10.0 ** (9 * u[0] - 4)
        top, tau = scale * (u[1] - 0.5), 10.0 ** (2 * u[2] - 1)
        sum_ = 1.0 + 10.0 ** (12 * u[3] - 8)
        x = top - tau * 10.0 ** (4 * u[4] - 2) * (u[4] > 0.1)
        v = u[7] - 0.5 if u[7] > 0.5 else 0.0
        ours, truth = COVERAGE.scalars(x, top, sum_, -(sum_ - 1) * u[5], tau, u[6] - 0.5, v)
        for k, (a, b) in enumerate(zip(ours, truth, strict=True)):
            size = abs(b)
            if k == 4 and v:  # two terms that may cancel
                size = max(size, abs(u[6] - 0.5) / tau)
            assert abs(a - b) <= (2**-21.5 if k == 4 else 2**-23) * size + 1e-37, (k, a, b)


def test_logarithms_in_two_floats() -> None:
    """Relative error in units of half a float's last digit; near 1 too, where a logarithm is small."""
    assert [COVERAGE.log_of(x) for x in (0.0, 1.0, math.inf)] == [-math.inf, 0.0, math.inf]
    assert math.isnan(COVERAGE.log_of(math.nan))
    near = (1 + (torch.rand(5000) - 0.5) * 10.0 ** (-7 * torch.rand(5000))).tolist()
    for x in near + (2.0 ** (250 * torch.rand(20_000) - 125)).tolist():
        if x != 1:
            assert abs(COVERAGE.log_of(x) / math.log(x) - 1) < 0.06 * 2**-24, x


def test_temperatures_give_the_scale_of_the_host() -> None:
    """To the bit: ``norms.py`` works the same scale out in double, and parts of rows meet there."""
    assert COVERAGE.other_base2_scales() == 0


def test_the_polynomial_exponential() -> None:
    y = torch.cat([-torch.rand(50_000) * 130, -torch.arange(0.0, 127.0, 0.5), torch.tensor([1e-7, 0.5])])
    for d in y.tolist():
        bound = 0.0 if d < -126.5 else 3e-6 * 2.0**d
        assert abs(COVERAGE.polynomial_exp2(d) - (2.0**d if d >= -126.5 else 0.0)) <= bound, d
    assert [COVERAGE.polynomial_exp2(x) for x in (-math.inf, -1e30, -127.0)] == [0.0] * 3


def test_slices_of_known_vocabularies() -> None:
    """(slices, vectors of each, whether a cluster holds the row)."""
    assert COVERAGE.slices(32000, 2) == (2, 2000, True)
    assert COVERAGE.slices(151936, 2) == (8, 2376, True)
    assert COVERAGE.slices(151936, 4) == (16, 2376, True)
    assert COVERAGE.slices(1_800_000, 2) == (16, 14064, True)
    slices, per_slice, fits = COVERAGE.slices(2_000_000, 2)
    assert not fits
    assert slices * per_slice >= 250_000


def test_a_row_beyond_a_cluster() -> None:
    vocab = 1_900_000
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, vocab, generator=g).bfloat16()
    rows = rows_of(cuda._cuda, logits)
    assert cuda._cuda.choose_path(rows).name == "split"
    ids, live = torch.tensor([0, vocab - 1]), torch.ones(2, dtype=torch.bool)
    logprobs = cuda.row_stats(logits, RowRequest(ids, live, 1.0, None, False)).logprobs
    truth = torch.log_softmax(logits.double(), -1)[torch.arange(2), ids]
    torch.testing.assert_close(logprobs.double(), truth, rtol=0, atol=3e-6)
