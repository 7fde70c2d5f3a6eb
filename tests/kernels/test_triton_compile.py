"""The Triton kernels compiled ahead of time for GPUs that need not be here, and what the machine code looks like.

``cuobjdump`` and ``nvdisasm`` come with the triton package. Checked per kernel, dtype and architecture: no local
memory (no spills), 128-bit global loads and stores where the loops run over the vocabulary, and one exponential per
logit and sweep. V logits of a row go by in blocks of BLOCK_V over 32 * num_warps threads.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: the interpreter compiles nothing", allow_module_level=True)

ARCHITECTURES = (80, 90, 100)
WARPS = 8
BLOCK_V = 4096
PER_THREAD = BLOCK_V // (32 * WARPS)  # logits of a block in one thread
BITS = {"bf16": 16, "fp16": 16, "fp32": 32}

TYPES = {
    **dict.fromkeys(("Targets",), "*i64"),
    **dict.fromkeys(("Live", "ClipHit", "Idle"), "*i8"),
    **dict.fromkeys(("inner", "out_inner", "V", "N"), "i32"),
    **dict.fromkeys(("stride_outer", "stride_inner", "out_stride_outer", "out_stride_inner"), "i64"),
}
SCALARS = ("temperature", "clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative", "kl_coef")
SCALARS += ("entropy_coef",)
DIVISIBLE = ("V", "stride_outer", "stride_inner", "out_stride_outer", "out_stride_inner")

PLAIN: dict[str, Any] = {"SURROGATE": "clip", "KL_ESTIMATOR": "k3", "KL_THROUGH_RATIO": False}
NOTHING: dict[str, Any] = {"Temperatures": None, "RefLogprobs": None, "ImportanceWeights": None, "RefKl": None}
EVERYTHING: dict[str, Any] = {"SURROGATE": "sapo", "KL_ESTIMATOR": "k3", "KL_THROUGH_RATIO": True}

# Kernel, its constants, sweeps over the vocabulary that load it, that store it, that exponentiate.
VARIANTS: dict[str, tuple[str, dict[str, Any], int, int, int]] = {
    "stats": ("row_stats_kernel", {"Temperatures": None, "Entropy": None}, 1, 0, 1),
    "stats-entropy": ("row_stats_kernel", {}, 1, 0, 1),
    "grad": ("row_grad_kernel", {"Temperatures": None, "Entropy": None, "DEntropy": None}, 1, 2, 1),
    "grad-entropy": ("row_grad_kernel", {}, 1, 2, 1),
    "loss": (
        "row_loss_kernel",
        {**NOTHING, **PLAIN, "Entropy": None, "HAS_ENTROPY_COEF": False},
        2,
        3,
        2,
    ),
    "loss-everything": ("row_loss_kernel", {**EVERYTHING, "HAS_ENTROPY_COEF": True}, 2, 3, 2),
}


@dataclass
class Compiled:
    """Counts of instructions over the whole kernel, and its resources."""

    registers: int
    local_bytes: int
    loads128: int
    stores128: int
    narrow_loads: int
    narrow_stores: int
    exponentials: int
    local_accesses: int


def signature(fn: Any, logits: str, constants: dict[str, Any]) -> dict[str, str]:
    types = {}
    for name in fn.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in ("Logits", "Out") and fn.__name__ != "token_loss_kernel":
            types[name] = f"*{logits}"
        else:
            types[name] = TYPES.get(name, "fp32" if name in SCALARS else "*fp32")
    return types


def compiled(
    kernel: str, logits: str, constants: dict[str, Any], capability: int, folder: Path, warps: int
) -> Compiled:
    """Through ``triton.compile`` and the disassembler."""
    import triton
    import triton.backends.nvidia as nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dapo_kernels.triton import kernels

    fn = getattr(kernels, kernel)
    types = signature(fn, logits, constants)
    index = {name: (fn.arg_names.index(name),) for name in types}
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name in DIVISIBLE]
    source = ASTSource(
        fn=fn,
        signature=types,
        constexprs={index[name]: value for name, value in constants.items()},
        attrs={index[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    out = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(out.asm["cubin"])
    tools = Path(nvidia.__file__).parent / "bin"

    def tool(*arguments: str) -> str:
        return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout

    usage = tool(str(tools / "cuobjdump"), "-res-usage", str(cubin))
    sass = tool(str(tools / "nvdisasm"), str(cubin))

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    wide, wide_stores = count(r"\bLDG\S*\.128"), count(r"\bSTG\S*\.128")
    return Compiled(
        registers=int(re.findall(r"REG:(\d+)", usage)[-1]),
        local_bytes=sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        loads128=wide,
        stores128=wide_stores,
        narrow_loads=count(r"\bLDG") - wide,
        narrow_stores=count(r"\bSTG") - wide_stores,
        exponentials=count(r"\bMUFU\.EX2"),
        local_accesses=count(r"\b(?:STL|LDL)\b"),
    )


# Variants with entropy differ in arithmetic only: one architecture.
GRID = [(v, d, c) for v in VARIANTS for d in ("bf16", "fp32") for c in ARCHITECTURES if c == 90 or "-entropy" not in v]


@pytest.mark.parametrize(("variant", "logits", "capability"), GRID)
def test_machine_code_of_a_row_kernel(variant: str, logits: str, capability: int, tmp_path: Path) -> None:
    kernel, constants, loading, storing, exponential = VARIANTS[variant]
    got = compiled(kernel, logits, {**constants, "BLOCK_V": BLOCK_V}, capability, tmp_path, WARPS)
    assert got.local_bytes == 0, got
    assert got.local_accesses == 0, got
    # 128 bits at a time. A sweep that only stores zeros may be unrolled: whole multiples then.
    per_sweep = PER_THREAD * BITS[logits] // 128
    assert got.loads128 >= loading * per_sweep, got
    assert got.loads128 % per_sweep == 0, got
    assert got.stores128 >= storing * per_sweep, got
    assert got.stores128 % per_sweep == 0, got
    # Per-row scalars only: one sweep that is not vectorised would have at least one access per logit.
    assert got.narrow_loads < PER_THREAD, got
    assert got.narrow_stores < PER_THREAD, got
    # One per logit and sweep, besides some of scalars: the lift of a new maximum, the token's own probability.
    assert exponential * PER_THREAD <= got.exponentials <= exponential * PER_THREAD + 12, got
    # With more registers fewer than two blocks of 256 threads would share an SM.
    assert got.registers <= 128, got


@pytest.mark.parametrize(
    ("surrogate", "estimator", "capability"),
    [
        *(("clip", "k3", capability) for capability in ARCHITECTURES),
        ("cispo", "k1", 90),
        ("reinforce", "k2", 90),
        ("sapo", "k3", 90),
    ],
)
def test_machine_code_of_the_elementwise_kernel(
    surrogate: str, estimator: str, capability: int, tmp_path: Path
) -> None:
    """Everything optional present."""
    constants = {"SURROGATE": surrogate, "KL_ESTIMATOR": estimator, "KL_THROUGH_RATIO": estimator == "k3"}
    got = compiled("token_loss_kernel", "fp32", {**constants, "BLOCK_T": 256}, capability, tmp_path, 4)
    assert got.local_bytes == 0, got
    assert got.local_accesses == 0, got
    assert got.registers <= 128, got


@pytest.mark.parametrize("logits", ["bf16", "fp16"])
def test_the_small_block_compiles(logits: str, tmp_path: Path) -> None:
    """What the launcher takes for V <= 64."""
    constants = {**NOTHING, **PLAIN, "Entropy": None, "HAS_ENTROPY_COEF": False, "BLOCK_V": 64}
    assert compiled("row_loss_kernel", logits, constants, 90, tmp_path, 4).local_bytes == 0


def test_the_launcher_uses_the_shape_tested_here() -> None:
    from dapo_kernels.triton import _launch

    for vocab in (5000, 49152, 151936):
        assert _launch(vocab) == {"BLOCK_V": BLOCK_V, "num_warps": WARPS}


def test_every_kernel_is_compiled_here() -> None:
    """A kernel that is added must be added above."""
    from dapo_kernels.triton import kernels

    found = {name for name in vars(kernels) if name.endswith("_kernel")}
    assert found == {kernel for kernel, *_ in VARIANTS.values()} | {"token_loss_kernel"}
