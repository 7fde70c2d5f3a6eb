"""Builds ``dapo_kernels._C`` with ninja and pybind11: no torch header, one build for every torch version.

Environment:
    DAPO_KERNELS_CPP=0   install the pure-torch package without a compiler.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
X86 = platform.machine().lower() in ("x86_64", "amd64")

BASE_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-g0"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
# gcc 12 warns of its own intrinsics (_mm512_reduce_add_ps: "__Y is used uninitialized", GCC bug 105593).
AVX512_FLAGS += ["-Wno-uninitialized"]
# The same source once per instruction set; the processor's best is chosen when the module first runs.
ISA_FLAGS: dict[str, list[str]] = {"portable": []}
if X86:
    ISA_FLAGS |= {"avx2": AVX2_FLAGS, "avx512": AVX512_FLAGS, "avx512bf16": [*AVX512_FLAGS, "-mavx512bf16"]}
SOURCES = ["csrc/bindings.cpp"] + [f"csrc/cpu/{name}.cpp" for name in ("dispatch", "huge_pages", "rows", "split_sum")]


class NinjaBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or "g++"]
        if shutil.which(compiler[0]) is None:
            sys.exit(
                "dapo-kernels: no C++ compiler was found. Install g++ (Debian: apt install g++), name one in CXX, or "
                "set DAPO_KERNELS_CPP=0 to install the slower pure-torch package."
            )
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        (build / "build.ninja").write_text(ninja_file(compiler, target))
        ninja = shutil.which("ninja") or str(Path(sys.executable).with_name("ninja"))
        subprocess.run([ninja, "-C", str(build)], check=True, stdout=sys.stderr)


def openmp_flags(compiler: list[str]) -> list[str]:
    """``-fopenmp`` where the compiler has it; the kernels run single-threaded without."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.cpp")
        source.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
        command = [*compiler, "-fopenmp", str(source), "-o", str(source.with_suffix(".out"))]
        found = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return ["-fopenmp"] if found else []


def ninja_file(compiler: list[str], target: Path) -> str:
    import pybind11

    includes = [pybind11.get_include(), sysconfig.get_paths()["include"]]
    openmp = openmp_flags(compiler)
    flags = [*BASE_FLAGS, *openmp, *(f"-I{path}" for path in includes), *(["-DDAPO_X86"] if X86 else [])]
    objects, rules = [], []
    units = [(source, Path(source).stem, []) for source in SOURCES]
    units += [("csrc/cpu/row_kernels.cpp", isa, [f"-DDAPO_ISA={isa}", *extra]) for isa, extra in ISA_FLAGS.items()]
    for source, stem, extra in units:
        objects.append(f"{stem}.o")
        rules.append(f"build {stem}.o: cxx {_escape(ROOT / source)}\n  extra = {shlex.join(extra)}")
    link_flags = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return "\n".join(
        [
            "ninja_required_version = 1.5",
            f"cxx = {shlex.join(compiler)}",
            f"flags = {shlex.join(flags)}",
            "rule cxx",
            "  command = $cxx -MMD -MF $out.d $flags $extra -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $out",
            "rule link",
            f"  command = $cxx -shared $in -o $out {shlex.join([*openmp, *link_flags])}",
            "  description = link $out",
            *rules,
            f"build {_escape(target)}: link {' '.join(objects)}",
            "",
        ]
    )


def _escape(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


if os.environ.get("DAPO_KERNELS_CPP", "1") == "0":
    setup()
else:
    setup(ext_modules=[Extension("dapo_kernels._C", sources=[])], cmdclass={"build_ext": NinjaBuild})
