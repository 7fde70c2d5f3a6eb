"""The Triton kernels compiled ahead of time, for GPUs that need not be here, and what their machine code looks like.

``ptxas``, ``cuobjdump`` and ``nvdisasm`` come with the triton package. ``python -m docs.models.triton_sass`` prints
the table of docs/triton.md; with the page's name as its argument it replaces the table there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from dapo_kernels.backends.residency import Gpu, programs, rows_held
from dapo_kernels.backends.triton import FULL_SM_REGISTERS, LAUNCHES, LOADS, MAX_REGISTERS, Launch, divergence, kernels

ARCHITECTURES = (80, 90, 100)
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
BEGIN, END = "<!-- sass: begin -->", "<!-- sass: end -->"

_TYPES = {
    "Targets": "*i64",
    "Next": "*i32",
    **dict.fromkeys(("Live", "ClipHit", "Idle"), "*i8"),
    **dict.fromkeys(("inner", "out_inner", "V", "N"), "i32"),
    **dict.fromkeys(("stride_outer", "stride_inner", "out_stride_outer", "out_stride_inner"), "i64"),
    **dict.fromkeys(("stride", "ref_stride"), "i64"),
}
_SCALARS = {"temperature", "softcap", "clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative", "kl_coef"}
_SCALARS |= {"entropy_coef", "ref_softcap", "beta"}
# Rows, and what of theirs the launcher's specialization finds to be a multiple of 16: a vocabulary that is one; one
# that is not, such as GPT-2's 50257, in rows padded to one, as a chunk's buffer has them; and in rows that follow each
# other. torch's allocations start on 16 bytes; "shifted" is an even vocabulary in a view that does not.
_POINTERS = ("Logits", "RefLogits", "Out")
_STRIDES = ("stride", "ref_stride", "stride_outer", "stride_inner", "out_stride_outer", "out_stride_inner")
ROWS = {
    "even": (*_POINTERS, *_STRIDES, "V"),
    "padded": (*_POINTERS, *_STRIDES),
    "odd": _POINTERS,
    "shifted": (*_STRIDES, "V"),
}
ROWS_SHOWN = ("even", "padded", "odd")

_PLAIN: dict[str, Any] = {"SURROGATE": "clip", "KL_ESTIMATOR": "k3", "KL_THROUGH_RATIO": False}
_ALONE: dict[str, Any] = {"Temperatures": None, "RefLogprobs": None, "ImportanceWeights": None, "RefKl": None}
_EVERYTHING: dict[str, Any] = {"SURROGATE": "sapo", "KL_ESTIMATOR": "k3", "KL_THROUGH_RATIO": True}


class Variant(NamedTuple):
    """One way to compile a row kernel. Optional arguments are there unless ``constants`` sets them to None."""

    kernel: str
    constants: dict[str, Any]
    loads: int  # sweeps that load the row
    stores: int  # that store one: gradients, and zeros of rows without


VARIANTS = {
    "stats": Variant("row_stats_kernel", {"Temperatures": None, "Entropy": None, "softcap": None}, 1, 0),
    "stats, entropy": Variant("row_stats_kernel", {"softcap": None}, 1, 0),
    "stats, entropy, softcap": Variant("row_stats_kernel", {}, 1, 0),
    "grad": Variant(
        "row_grad_kernel", {"Temperatures": None, "Entropy": None, "DEntropy": None, "softcap": None}, 1, 2
    ),
    "grad, entropy": Variant("row_grad_kernel", {"softcap": None}, 1, 2),
    "grad, entropy, softcap": Variant("row_grad_kernel", {}, 1, 2),
    "loss": Variant(
        "row_loss_kernel", {**_ALONE, **_PLAIN, "Entropy": None, "entropy_coef": None, "softcap": None}, 2, 3
    ),
    "loss, everything": Variant("row_loss_kernel", {**_EVERYTHING, "softcap": None}, 2, 3),
    "loss, everything, softcap": Variant("row_loss_kernel", _EVERYTHING, 2, 3),
}
_NO_CAPS: dict[str, Any] = {"Temperatures": None, "softcap": None, "ref_softcap": None}
DIVERGENCES = {
    "divergence, forward": Variant("row_divergence_kernel", {**_NO_CAPS, "KIND": 0}, 4, 2),
    "divergence, reverse": Variant("row_divergence_kernel", {**_NO_CAPS, "KIND": 1}, 4, 2),
    "divergence, mixture": Variant("row_divergence_kernel", {**_NO_CAPS, "KIND": 2}, 4, 2),
    "divergence, mixture, softcaps": Variant("row_divergence_kernel", {"KIND": 2}, 4, 2),
}


def aligned(rows: str) -> bool:
    """Whether they start on 16 bytes."""
    return set(ROWS[rows]) >= {*_POINTERS, *_STRIDES}


def cut(rows: str, logits: str) -> dict[str, Any]:
    """What the launcher says of them."""
    vec = 16 // ITEMSIZE[logits] if aligned(rows) else 1
    return {"VEC": vec, "HAS_REST": vec > 1 and "V" not in ROWS[rows]}


class Loop(NamedTuple):
    """Instructions of one loop over the vocabulary."""

    loads: int  # 128 bits
    stores: int
    narrow: int  # global loads and stores of fewer bits
    exponentials: int
    reciprocals: int
    shared: int  # shared memory, shuffles and barriers
    instructions: int = 0  # of any kind; not printed
    evict_first: int = 0  # of the loads and stores, those that leave the cache first; not printed
    written: int = 0  # stores of any size; not printed

    def __str__(self) -> str:
        parts = zip(("ld", "st", "narrow", "ex2", "rcp", "shared"), self[:6], strict=True)
        return " ".join(f"{n} {name}" for name, n in parts if n)


class Compiled(NamedTuple):
    registers: int
    local_bytes: int
    local_accesses: int
    atomics: int
    loops: list[Loop]


def _signature(fn: Any, logits: str, constants: dict[str, Any]) -> dict[str, str]:
    types = {}
    for name in fn.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in _POINTERS:
            types[name] = f"*{logits}"
        else:
            types[name] = _TYPES.get(name, "fp32" if name in _SCALARS else "*fp32")
    return types


def compiled(
    kernel: str, logits: str, constants: dict[str, Any], capability: int, options: dict[str, int], rows: str = "even"
) -> Compiled:
    """Through ``triton.compile`` and the disassembler."""
    import triton
    import triton.backends.nvidia as nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = getattr(kernels, kernel, None) or getattr(divergence, kernel)
    types = _signature(fn, logits, constants)
    index = {name: (fn.arg_names.index(name),) for name in types}
    source = ASTSource(
        fn=fn,
        signature=types,
        constexprs={index[name]: value for name, value in constants.items()},
        attrs={index[name]: [["tt.divisibility", 16]] for name in types if name in ROWS[rows]},
    )
    out = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={**options, "enable_fp_fusion": True}
    )
    tools = Path(nvidia.__file__).parent / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(out.asm["cubin"])
        usage = _run(tools / "cuobjdump", "-res-usage", cubin)
        sass = _run(tools / "nvdisasm", cubin)
    return Compiled(
        registers=int(re.findall(r"REG:(\d+)", usage)[-1]),
        local_bytes=sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        local_accesses=len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        atomics=len(re.findall(r"\bATOM", sass)),
        loops=_loops(sass),
    )


def row_kernel(variant: str, logits: str, capability: int, launch: Launch, rows: str = "even") -> Compiled:
    """A row kernel as the launcher would have it for long rows of this launch."""
    chosen, shape = (VARIANTS | DIVERGENCES)[variant], cut(rows, logits)
    loads = LOADS if variant in DIVERGENCES else 1
    constants = {**chosen.constants, **shape, "BLOCK_V": launch.block(shape["VEC"]) // loads}
    registers = FULL_SM_REGISTERS if fills_an_sm(variant, rows) else MAX_REGISTERS
    options = {"num_warps": launch.warps(shape["VEC"]), "maxnreg": registers}
    return compiled(chosen.kernel, logits, constants, capability, options, rows)


def fills_an_sm(variant: str, rows: str) -> bool:
    """Whether its registers are limited so that an SM is full."""
    return aligned(rows) and "softcap" not in variant and "mixture" not in variant


def _run(*arguments: str | Path) -> str:
    return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=True).stdout


def _loops(sass: str) -> list[Loop]:
    """Loops (backward branches, innermost) that load or store, in program order."""
    lines = sass.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L\w+):", line))}
    spans = []
    for i, line in enumerate(lines):
        m = re.search(r"\bBRA\S*\s.*`\((\.L\w+)\)", line)
        if m and labels.get(m[1], i) < i:
            spans.append((labels[m[1]], i))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    loops = (_count("\n".join(lines[a : b + 1])) for a, b in sorted(inner))
    return [x for x in loops if x.loads or x.stores or x.narrow]


def _count(body: str) -> Loop:
    def n(pattern: str) -> int:
        return len(re.findall(pattern, body))

    loads, stores = n(r"\bLDG\S*\.128"), n(r"\bSTG\S*\.128")
    return Loop(
        loads,
        stores,
        n(r"\bLDG|\bSTG") - loads - stores,
        n(r"\bMUFU\.EX2"),
        n(r"\bMUFU\.RCP"),
        n(r"\b(?:LDS|STS|SHFL|BAR|LDSM|STSM|REDUX)\b"),
        n(r"(?m)^\s+/\*[0-9a-f]{4,}\*/\s+\S"),
        n(r"\b(?:LDG|STG)\S*\.EF\b"),
        n(r"\bSTG"),
    )


def instructions_per_logit(got: Compiled, logits: str) -> float:
    """Of the sweeps over a row, statistics and gradient; a thread has 16 bytes of each load."""
    per_load = 16 // ITEMSIZE[logits]
    return sum(loop.instructions / (loop.loads * per_load) for loop in got.loops if loop.loads)


def waves(got: Compiled, launch: Launch, gpu: Gpu, row_bytes: int, row_loads: int) -> int:
    """In how many waves programs work that share many rows, with the number that the SMs hold. With a
    counter it is one, as those beyond it find one row each; with rows dealt out beforehand they would begin when the
    others had ended.
    """
    held = rows_held(got.registers, launch.num_warps)
    n = programs(gpu, 10**6, row_bytes, held, row_loads)
    assert n == 10**6 or gpu.multiprocessors <= n <= held * gpu.multiprocessors, (n, held)
    return 1 if got.atomics or n == 10**6 else -(-n // (gpu.multiprocessors * held))


HEADER = "| kernel | rows | logits | warps | sm | registers | rows per SM | spilled bytes | loops over the row |"
Point = tuple[str, str, Launch, int, str]  # variant, dtype, launch, architecture, rows


def grid(rows: str, capabilities: tuple[int, ...]) -> list[Point]:
    """Every variant at the launch for the longest rows."""
    return [(v, d, LAUNCHES[-1], c, rows) for v in VARIANTS for d in ("bf16", "fp32") for c in capabilities]


# The other launches differ in the number of warps only: the plain loss, on one architecture.
GRID = grid("even", ARCHITECTURES) + grid("padded", (90,)) + grid("odd", (90,))
GRID += [("loss", d, launch, 90, "even") for launch in LAUNCHES[:-1] for d in ("bf16", "fp32")]


# Of the divergence the registers alone, on one architecture.
DIVERGENCE_GRID = [(v, d, c, "even") for v in DIVERGENCES for d in ("bf16", "fp32") for c in ARCHITECTURES]
DIVERGENCE_GRID += [(v, d, 90, rows) for v in DIVERGENCES for d in ("bf16", "fp32") for rows in ("padded", "odd")]
_KL = ("divergence, forward", "divergence, reverse")
DIVERGENCE_TABLE = {
    "KL, bfloat16": (_KL, (), "bf16"),
    "KL, float32": (_KL, (), "fp32"),
    "mixture of both, bfloat16": (("divergence, mixture",), ("divergence, mixture, softcaps",), "bf16"),
    "mixture of both, float32": (("divergence, mixture",), ("divergence, mixture, softcaps",), "fp32"),
}
BEGIN_DIVERGENCE, END_DIVERGENCE = "<!-- divergence: begin -->", "<!-- divergence: end -->"


def divergence_row(name: str) -> str:
    plain, capped, logits = DIVERGENCE_TABLE[name]

    def registers(variants: tuple[str, ...], rows: str) -> str:
        found = sorted({row_kernel(v, logits, 90, LAUNCHES[-1], rows).registers for v in variants})
        return " to ".join(map(str, found))

    cells = [registers(plain, rows) + (f" ({registers(capped, rows)})" if capped else "") for rows in ROWS_SHOWN]
    return f"| {name} | " + " | ".join(cells) + " |"


def divergence_table() -> str:
    """Markdown."""
    header = "| registers without soft caps (with) | " + " | ".join(f"{rows} rows" for rows in ROWS_SHOWN) + " |"
    return "\n".join([header, "|---" + "|---:" * len(ROWS_SHOWN) + "|", *map(divergence_row, DIVERGENCE_TABLE)]) + "\n"


def name_cells(point: Point) -> list[str]:
    """The cells of a row that say what was compiled."""
    variant, logits, launch, capability, rows = point
    return [f"| {variant}", rows, logits, str(launch.warps(cut(rows, logits)["VEC"])), str(capability)]


def table_row(point: Point) -> str:
    variant, logits, launch, capability, rows = point
    got = row_kernel(variant, logits, capability, launch, rows)
    per_sm = rows_held(got.registers, launch.warps(cut(rows, logits)["VEC"]))
    figures = [got.registers, per_sm, got.local_bytes, "; ".join(map(str, got.loops))]
    return " | ".join([*name_cells(point), *map(str, figures)]) + " |"


def table() -> str:
    """Markdown."""
    return "\n".join([HEADER, "|---|---|---|---|---|---|---|---|---|", *(table_row(point) for point in GRID)]) + "\n"


def main(arguments: list[str]) -> None:
    if not arguments:
        print(table(), end="")
        return
    page = Path(arguments[0])
    for begin, end, new in ((BEGIN_DIVERGENCE, END_DIVERGENCE, divergence_table()), (BEGIN, END, table())):
        before, _, rest = page.read_text().partition(begin)
        _, _, after = rest.partition(end)
        page.write_text(f"{before}{begin}\n{new}{end}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
