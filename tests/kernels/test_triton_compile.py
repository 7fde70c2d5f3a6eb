"""The Triton kernels compiled ahead of time for GPUs that need not be here, and what the machine code looks like."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: the interpreter compiles nothing", allow_module_level=True)

from dapo_kernels.backends import triton
from dapo_kernels.backends.residency import rows_held
from dapo_kernels.backends.triton import FULL_SM_REGISTERS, LAUNCHES, LOADS, MAX_REGISTERS, Launch
from docs.models import roofline
from docs.models import triton_sass as sass

pytestmark = pytest.mark.elsewhere
PAGE = Path(__file__).parents[2] / "docs" / "triton.md"


def check_registers(got: sass.Compiled, launch: Launch, fills_an_sm: bool) -> None:
    """Two values may be stored outside of the registers, outside of the loops."""
    assert got.local_bytes <= 8, got
    assert got.local_accesses <= 4, got
    assert not any(loop.shared for loop in got.loops), got
    assert got.registers <= (FULL_SM_REGISTERS if fills_an_sm else MAX_REGISTERS), got
    assert rows_held(got.registers, launch.num_warps) * (1 if fills_an_sm else 2) >= launch.rows_per_sm, got


def check_no_spills(got: sass.Compiled) -> None:
    assert (got.local_bytes, got.local_accesses) == (0, 0), got
    assert got.registers <= MAX_REGISTERS, got


def check_waves(got: sass.Compiled, launch: Launch, logits: str, rows: str, tensors: int = 1) -> None:
    """Of rows that are read twice, on every GPU of the roofline and at vocabularies where its cache limits the rows."""
    itemsize = sass.ITEMSIZE[logits] * tensors
    row_loads = launch.block(sass.cut(rows, logits)["VEC"]) * sass.ITEMSIZE[logits]
    assert got.atomics, got
    for device in roofline.DEVICES:
        for vocab in (*roofline.V, 100_000, 50_257):
            found = sass.waves(got, launch, device.gpu, vocab * itemsize, row_loads)
            assert found == 1, (device.name, vocab, found, got)


def check_hints(got: sass.Compiled) -> None:
    """All that writes leaves the L2 cache first, and what it reads; the statistics' reads stay."""
    for loop in got.loops:
        assert loop.evict_first == (loop.loads + loop.stores + loop.narrow if loop.written else 0), got


def check_loops(got: sass.Compiled, variant: str, logits: str) -> None:
    """128-bit accesses and nothing else but arithmetic."""
    plan = sass.VARIANTS[variant]
    per_thread = LOADS * 16 // sass.ITEMSIZE[logits]
    caps = 1 if "softcap" in plan.constants else 2
    assert not any(loop.narrow for loop in got.loops), got
    loading = [loop for loop in got.loops if loop.loads]
    statistics = [loop for loop in loading if not loop.stores]
    gradients = [loop for loop in loading if loop.stores]
    zeros = [loop for loop in got.loops if not loop.loads]
    assert len(loading) == plan.loads, got
    assert len(gradients) + len(zeros) == plan.stores, got
    # A block at a time, unless the compiler unrolls.
    for loop in statistics:
        unrolled = loop.loads // LOADS
        assert loop.loads == unrolled * LOADS, got
        # One per logit; one per load of a thread where the sum is lifted to a new maximum.
        assert loop.exponentials == unrolled * (caps * per_thread + LOADS), got
    for loop in gradients:
        unrolled = loop.stores // LOADS
        assert loop.stores == unrolled * LOADS, got
        assert loop.loads == loop.stores, got
        assert loop.exponentials == unrolled * caps * per_thread, got
    for loop in zeros:
        assert loop.stores % LOADS == 0, got
        assert loop.exponentials == 0, got


# The page's; padded rows on the other architectures too; float16, whose code is bfloat16's but for the conversions; and
# the longest kernels on an even vocabulary's views that start between 16-byte boundaries.
GRID = [*sass.GRID, *sass.grid("padded", (80, 100)), *sass.grid("odd", (80, 100))]
GRID += [(v, "fp16", LAUNCHES[-1], 90, rows) for v in ("stats", "grad", "loss, everything") for rows in ("even", "odd")]
GRID += [(v, "bf16", LAUNCHES[-1], 90, "shifted") for v in sass.VARIANTS if "softcap" in v]


@pytest.mark.parametrize(("variant", "logits", "launch", "capability", "rows"), GRID)
def test_machine_code_of_a_row_kernel(variant: str, logits: str, launch: Launch, capability: int, rows: str) -> None:
    got = sass.row_kernel(variant, logits, capability, launch, rows)
    check_registers(got, launch, sass.fills_an_sm(variant, rows))
    check_hints(got)
    assert got.atomics == 0, got
    if sass.aligned(rows):
        check_loops(got, variant, logits)


@pytest.mark.parametrize(("variant", "logits", "capability", "rows"), sass.DIVERGENCE_GRID)
def test_machine_code_of_the_divergence(variant: str, logits: str, capability: int, rows: str) -> None:
    """Statistics of both rows, the divergence from both, the gradient; and zeros of a row that is masked."""
    got = sass.row_kernel(variant, logits, capability, LAUNCHES[-1], rows)
    check_registers(got, LAUNCHES[-1], sass.fills_an_sm(variant, rows))
    check_hints(got)
    check_waves(got, LAUNCHES[-1], logits, rows, tensors=2)
    if sass.aligned(rows):
        assert not any(loop.narrow for loop in got.loops), got
        assert sum(bool(loop.loads) for loop in got.loops) == sass.DIVERGENCES[variant].loads, got
        gradient = [loop for loop in got.loops if loop.loads and loop.stores]
        assert [(loop.loads, loop.stores) for loop in gradient] == [(2, 1)], got


@pytest.mark.parametrize("kernel", sass.DIVERGENCE_TABLE, ids=str)
def test_the_page_shows_the_registers_of_the_divergence(kernel: str) -> None:
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {kernel} |")]
    assert shown == [sass.divergence_row(kernel)], f"python -m docs.models.triton_sass docs/{PAGE.name}"


@pytest.mark.parametrize("logits", ["bf16", "fp32"])
@pytest.mark.parametrize("device", [roofline.A100, roofline.H100, roofline.B200], ids=lambda device: device.name)
def test_the_roofline_counts_these_instructions(device: roofline.Device, logits: str) -> None:
    got = sass.row_kernel("loss", logits, device.capability, LAUNCHES[-1])
    shown = roofline.INSTRUCTIONS[device.capability, sass.ITEMSIZE[logits]]
    assert sass.instructions_per_logit(got, logits) == pytest.approx(shown, rel=0.05)


@pytest.mark.parametrize(
    ("surrogate", "estimator", "capability"),
    [
        *(("clip", "k3", capability) for capability in sass.ARCHITECTURES),
        *(("cispo", "k1", 90), ("reinforce", "k2", 90)),
        *((surrogate, "k3", 90) for surrogate in ("sapo", "dppo_tv", "dppo_kl", "up")),
    ],
)
def test_machine_code_of_the_elementwise_kernel(surrogate: str, estimator: str, capability: int) -> None:
    """Everything optional present."""
    constants = {"SURROGATE": surrogate, "KL_ESTIMATOR": estimator, "KL_THROUGH_RATIO": estimator == "k3"}
    got = sass.compiled("token_loss_kernel", "fp32", {**constants, "BLOCK_T": 256}, capability, {"num_warps": 4})
    check_no_spills(got)


@pytest.mark.parametrize("logits", ["bf16", "fp32"])
def test_machine_code_of_the_scaling_kernel(logits: str) -> None:
    launch, shape = LAUNCHES[-1], sass.cut("even", logits)
    constants = {"BLOCK_V": launch.block(shape["VEC"]), "VEC": shape["VEC"]}
    got = sass.compiled(
        "scale_kernel", logits, constants, 90, {"num_warps": launch.num_warps, "maxnreg": FULL_SM_REGISTERS}
    )
    check_no_spills(got)
    assert [(loop.loads > 0, loop.loads == loop.stores, loop.narrow) for loop in got.loops if loop.stores] == [
        (True, True, 0)
    ], got


@pytest.mark.parametrize("rows", ["even", "padded", "odd"])
@pytest.mark.parametrize(("logits", "block"), [("bf16", 128), ("fp16", 128), ("fp32", 64)])
def test_the_smallest_blocks_compile(logits: str, block: int, rows: str) -> None:
    """What the launcher takes for the smallest vocabularies: no more logits than threads."""
    plan = sass.VARIANTS["loss, everything"]
    constants = {**plan.constants, **sass.cut(rows, logits), "BLOCK_V": block if sass.aligned(rows) else 16}
    assert sass.compiled(plan.kernel, logits, constants, 90, {"num_warps": 4}, rows).local_bytes == 0


def test_every_kernel_is_compiled_here() -> None:
    """A kernel that is added to any module must be added above."""
    modules = [importlib.import_module(f"{triton.__name__}.{m.name}") for m in pkgutil.iter_modules(triton.__path__)]
    found = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    plans = sass.VARIANTS | sass.DIVERGENCES
    assert found == {plan.kernel for plan in plans.values()} | {"token_loss_kernel", "scale_kernel"}


def test_the_page_shows_the_table() -> None:
    """Every row of it, and one of them as the compiler has it now: the others' figures are bounded above."""
    shown = PAGE.read_text().partition(sass.BEGIN)[2].partition(sass.END)[0].strip().splitlines()
    header, _, *rows = shown
    assert header == sass.HEADER
    assert [row.split(" | ")[:5] for row in rows] == [sass.name_cells(point) for point in sass.GRID]
    fresh = sass.table_row(sass.GRID[0])
    assert fresh in rows, f"python -m docs.models.triton_sass docs/{PAGE.name}: {fresh}"
