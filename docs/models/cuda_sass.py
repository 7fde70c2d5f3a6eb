"""What the machine code of the built CUDA module looks like: registers, spills, widths of accesses. Needs no GPU.

``python -m docs.models.cuda_sass`` prints the table of docs/cuda.md; with the page's name as its argument it
replaces the table there. ``cuobjdump`` comes with the CUDA toolkit and with the triton package.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

REGISTERS = 65536  # of an SM, all architectures since 8.0
BEGIN, END = "<!-- sass: begin -->", "<!-- sass: end -->"
_NAMES = "cluster_loss|sweep_loss|slice_stats|slice_grad|finish|plan_grad|token_loss"
_DTYPES = {"f": "fp32", "13__nv_bfloat16": "bf16", "6__half": "fp16"}


class Kernel(NamedTuple):
    """One kernel of one architecture; instructions are counted over its whole code."""

    architecture: str
    name: str
    dtype: str
    full: bool  # the variant with entropy and softcap
    registers: int
    shared_bytes: int  # static
    local_bytes: int
    local_accesses: int
    gpu_fences: int  # wait until the whole GPU sees what was stored
    bulk_copies: int
    loads128: int
    stores128: int
    evict_first: int  # of the 128-bit accesses; not printed
    shared_loads128: int
    exponentials: int
    doubles: int  # arithmetic in double precision

    @property
    def occupancy(self) -> tuple[int, int] | None:
        """Threads of a block and blocks of an SM that the kernel is laid out for; None: O(tokens), no plan."""
        return {
            "cluster_loss": (256, 3 if self.full else 4),
            "sweep_loss": (768, 1),
            "slice_stats": (256, 4),
            "slice_grad": (256, 4),
        }.get(self.name)


def tool(name: str) -> str | None:
    """The path of a tool of the CUDA toolkit, or of the triton package's copy."""
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    triton = importlib.util.find_spec("triton")
    if found is None and triton is not None and triton.origin is not None:
        found = shutil.which(name, path=str(Path(triton.origin).parent / "backends/nvidia/bin"))
    return found


def _output(*arguments: str) -> str:
    cuobjdump = tool("cuobjdump")
    if cuobjdump is None:
        sys.exit("cuda_sass: no cuobjdump on PATH and no triton package, which carries one")
    return subprocess.run([cuobjdump, *arguments], capture_output=True, text=True, check=True).stdout


@functools.cache
def examine() -> list[Kernel]:
    """Every kernel of the built module, for every architecture it holds machine code for."""
    spec = importlib.util.find_spec("dapo_kernels._cuda")
    if spec is None or spec.origin is None:
        sys.exit("cuda_sass: dapo_kernels._cuda is not built")
    usage = {}
    for block in re.split(r"^arch = ", _output("--dump-resource-usage", spec.origin), flags=re.MULTILINE)[1:]:
        for symbol, line in re.findall(r"Function (\S+):\s*\n\s*(.*)", block):
            usage[block.split()[0], symbol] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
    kernels = []
    for block in re.split(r"^\s*arch = ", _output("--dump-sass", spec.origin), flags=re.MULTILINE)[1:]:
        architecture = block.split()[0]
        for code in re.split(r"^\s*Function : ", block, flags=re.MULTILINE)[1:]:
            symbol = code.split()[0]
            kernels.append(_kernel(architecture, symbol, code, usage[architecture, symbol]))
    # Below 9.0 the cluster kernel is an empty shell.
    return [k for k in kernels if not (k.name == "cluster_loss" and int(re.sub(r"\D", "", k.architecture)) < 90)]


def _kernel(architecture: str, symbol: str, code: str, used: dict[str, int]) -> Kernel:
    found = re.search(rf"({_NAMES})_kernel(?:I(f|13__nv_bfloat16|6__half)Lb([01])E)?", symbol)
    assert found is not None, symbol

    words = Counter(re.findall(r"[A-Z][\w.]+", code))  # opcodes among them

    def count(pattern: str) -> int:
        return sum(times for word, times in words.items() if re.search(pattern, word))

    return Kernel(
        architecture=architecture,
        name=found[1],
        dtype=_DTYPES.get(found[2] or "", ""),
        full=found[3] == "1",
        registers=used["REG"],
        shared_bytes=used.get("SHARED", 0),
        local_bytes=used.get("STACK", 0) + used.get("LOCAL", 0),
        local_accesses=count(r"\b(?:STL|LDL)\b"),
        gpu_fences=count(r"\bMEMBAR\S*\.GPU"),
        bulk_copies=count(r"\bUBLKCP"),
        loads128=count(r"\bLDG\S*\.128"),
        stores128=count(r"\bSTG\S*\.128"),
        evict_first=count(r"\b(?:LDG|STG)\S*\.EF\S*\.128"),
        shared_loads128=count(r"\bLDS\S*\.128"),
        exponentials=count(r"\bMUFU\.EX2"),
        doubles=count(r"\b(?:DMUL|DFMA|DADD|DSETP|MUFU\.\w*64H)\b"),
    )


def table(kernels: list[Kernel]) -> str:
    lines = [
        "| kernel | for | registers | blocks (threads) per SM | local bytes | bulk copies | 128-bit global ld / st | "
        "128-bit shared ld |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for k in sorted(kernels, key=lambda k: (k.name, k.dtype, k.full, k.architecture)):
        if k.occupancy is None:
            continue
        threads, blocks = k.occupancy
        occupancy = f"{blocks} ({threads})"
        variant = f"`{k.name}`, {k.dtype}{', entropy or softcap' if k.full else ''}"
        lines.append(
            f"| {variant} | {k.architecture} | {k.registers} | {occupancy} | {k.local_bytes} | {k.bulk_copies} "
            f"| {k.loads128} / {k.stores128} | {k.shared_loads128} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    text = table(examine())
    if not arguments:
        print(text)
        return
    page = Path(arguments[0])
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
