"""Builds ``dapo_kernels._C`` and, where nvcc is, ``dapo_kernels._cuda`` with ninja and pybind11: no torch header, one
build for every torch version. The CUDA module carries its runtime and imports on machines without a GPU.

Environment:
    DAPO_KERNELS_CPP=0       install the pure-torch package without a compiler.
    DAPO_KERNELS_CUDA=1      demand the CUDA module: no nvcc, or one that fails, is an error. 0: leave it out.
    DAPO_KERNELS_CUDA_ARCHS  what to compile for instead of all of ARCHITECTURES that nvcc knows, e.g. "80;90a" or
                             "90+PTX": compute capabilities without the dot, +PTX for later GPUs too.
    CXX                      the C++ compiler and flags of your own, e.g. "g++ -pipe". No CXXFLAGS, no LDFLAGS.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
# Errors name files by their path in the source tree.
RELATIVE = f"-fmacro-prefix-map={ROOT}/="
X86 = platform.machine().lower() in ("x86_64", "amd64")

BASE_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-g0"]
BASE_FLAGS += ["-DNDEBUG"]  # pybind11's assertions carry the paths of the machine that builds
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
# gcc 12 warns of its own intrinsics (_mm512_reduce_add_ps: "__Y is used uninitialized", GCC bug 105593).
AVX512_FLAGS += ["-Wno-uninitialized"]
# The same source once per instruction set; the processor's best is chosen when the module first runs.
ISA_FLAGS: dict[str, list[str]] = {"portable": []}
if X86:
    ISA_FLAGS |= {"avx2": AVX2_FLAGS, "avx512": AVX512_FLAGS, "avx512bf16": [*AVX512_FLAGS, "-mavx512bf16"]}
# The first nvcc of an architecture, and what it is called. The last entry is for GPUs yet to come: compute_90 knows
# clusters and bulk copies. 8.0 machine code runs on 8.6 and 8.9. About 25 seconds of one core in all.
ARCHITECTURES = (((12, 4), "80"), ((12, 4), "90a"), ((12, 8), "100a"), ((12, 4), "90+PTX"))
OLDEST_NVCC = (12, 4)
# -fmad=false: the same sums in every kernel, whatever the compiler would have fused; the kernels spell out their fma.
# Registers must not spill, warnings are errors in CI (DAPO_KERNELS_CUDA=1).
CUDA_FLAGS = ["-O3", "-std=c++17", "-fmad=false"]
CUDA_FLAGS += ["-Xcompiler", f"-fPIC,-fvisibility=hidden,-Wall,-Wextra,{RELATIVE}"]
STRICT_CUDA_FLAGS = ["--Werror", "all-warnings", "-Xptxas", "--warn-on-spills,--warn-on-local-memory-usage"]
# In CXX they may stand before the compiler; nvcc wants the compiler itself.
LAUNCHERS = ("ccache", "sccache", "distcc")
CUDA_KERNELS = ("cluster_loss", "sweep_loss", "slices", "tokens")
GIB_PER_NVCC = 0.5

SOURCES = [f"csrc/cpu/{name}.cpp" for name in ("dispatch", "huge_pages", "kept", "rows", "split_sum")]
# Which sources a module was built from: dapo_kernels/backends/registry.py refuses one of others.
DIGEST = runpy.run_path(str(ROOT / "dapo_kernels/backends/sources.py"))["digest"]()


class NinjaBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # of earlier sources: it must not stay if a compiler fails
        build = Path(self.build_temp, ext.name).resolve()
        build.mkdir(parents=True, exist_ok=True)
        text = cuda_ninja_file(cxx(), target) if ext.name == CUDA.name else ninja_file(cxx(), target)
        (build / "build.ninja").write_text(text)
        ninja = shutil.which("ninja") or str(Path(sys.executable).with_name("ninja"))
        jobs = ["-j", str(cuda_jobs())] if ext.name == CUDA.name else []
        if subprocess.run([ninja, "-C", str(build), *jobs], stdout=sys.stderr).returncode:
            setting = "DAPO_KERNELS_CUDA" if ext.name == CUDA.name else "DAPO_KERNELS_CPP"
            raise CompileError(f"a compiler failed, see above. {setting}=0 leaves {ext.name} out.")


def cxx() -> list[str]:
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or "g++"]
    if shutil.which(compiler[0]) is None:
        sys.exit(
            "dapo-kernels: no C++ compiler was found. Install g++ (Debian: apt install g++), name one in CXX, or "
            "set DAPO_KERNELS_CPP=0 to install the slower pure-torch package."
        )
    return compiler


def find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [*(str(Path(home, "bin")) for home in homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(places))


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """Its release; (0, 0) if it does not run."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def toolkit_of(nvcc: str) -> Path:
    """Where its headers and libraries lie: ``nvcc`` itself may be a script elsewhere."""
    text = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    found = re.search(r"^#\$ TOP=(.*)$", text, re.MULTILINE)
    if found is None:
        raise CompileError(f"{nvcc} --dryrun does not say where its toolkit is:\n{text}")
    return Path(found[1]).resolve()


def wants_cuda() -> bool:
    """Whether to build the CUDA module; exits where it is demanded and cannot be."""
    setting = os.environ.get("DAPO_KERNELS_CUDA", "")
    if setting not in ("", "0", "1"):
        sys.exit(f"dapo-kernels: DAPO_KERNELS_CUDA must be 0 or 1, got {setting!r}")
    if setting == "0":
        return False
    nvcc = find_nvcc()
    oldest = ".".join(map(str, OLDEST_NVCC))
    if nvcc is None:
        problem = "no nvcc was found. Install the CUDA toolkit or put its nvcc on PATH"
    elif nvcc_version(nvcc) == (0, 0):
        problem = f"{nvcc} --version fails or names no release"
    elif nvcc_version(nvcc) < OLDEST_NVCC:
        problem = f"{nvcc} is of CUDA {'.'.join(map(str, nvcc_version(nvcc)))}, older than {oldest}"
    else:
        return True
    if setting == "1":
        sys.exit(f"dapo-kernels: DAPO_KERNELS_CUDA=1, but {problem}.")
    if nvcc is not None:
        print(f"dapo-kernels: built without the CUDA module: {problem}.", file=sys.stderr)
    return False


def architectures(version: tuple[int, int]) -> list[str]:
    chosen = os.environ.get("DAPO_KERNELS_CUDA_ARCHS", "")
    known = [arch for since, arch in ARCHITECTURES if since <= version]
    archs = re.split("[;,]", chosen.replace(".", "")) if chosen else known
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?(\+PTX)?", arch):
            sys.exit(f'dapo-kernels: DAPO_KERNELS_CUDA_ARCHS wants e.g. "80;90a" or "90+PTX", got {chosen!r}')
        if int(re.sub(r"\D", "", arch)) < 80:
            sys.exit(f"dapo-kernels: the CUDA kernels need compute capability 8.0 or later, got {arch} in {chosen!r}")
    return archs


def generated_code(arch: str) -> str:
    name, _, ptx = arch.partition("+")
    return f"-gencode=arch=compute_{name},code={'compute' if ptx else 'sm'}_{name}"


def cuda_jobs() -> int:
    """As many compilers as there are cores, and as fit the memory."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return max(1, min(os.cpu_count() or 1, int(pages / (GIB_PER_NVCC * 2**30))))


def cuda_ninja_file(compiler: list[str], target: Path) -> str:
    import pybind11

    nvcc = find_nvcc()
    assert nvcc is not None
    version = nvcc_version(nvcc)
    archs = architectures(version)
    toolkit = toolkit_of(nvcc)
    strict = STRICT_CUDA_FLAGS if os.environ.get("DAPO_KERNELS_CUDA") == "1" else []
    includes = [str(toolkit / "include"), pybind11.get_include(), sysconfig.get_paths()["include"]]
    words = {"CUDA_ARCHS": ";".join(archs), "CUDA_TOOLKIT": ".".join(map(str, version)), "SOURCES": DIGEST}
    defines = [f'-DDAPO_{name}="{value}"' for name, value in words.items()]
    flags = [
        *BASE_FLAGS,
        RELATIVE,
        *(["-Werror"] if strict else []),
        *(f"-isystem{path}" for path in includes),
        *defines,
    ]
    folders = (toolkit / name for name in ("lib64", "lib", "lib/x64"))
    runtime = next((x for x in (folder / "libcudart_static.a" for folder in folders) if x.exists()), None)
    if runtime is None:
        raise CompileError(f"{toolkit} has no libcudart_static.a; DAPO_KERNELS_CUDA=0 leaves the CUDA module out.")
    objects = [*(f"{name}.o" for name in CUDA_KERNELS), "launch.o", "bindings_cuda.o"]
    code = [generated_code(arch) for arch in archs]
    host = next((word for word in compiler if Path(word).name not in LAUNCHERS), compiler[0])
    link_flags = ["-lrt", "-ldl", "-lpthread", "-Wl,--exclude-libs,ALL"]
    return "\n".join(
        [
            "ninja_required_version = 1.5",
            f"cxx = {_ninja(shlex.join([*compiler, *flags]))}",
            f"nvcc = {_ninja(shlex.join([nvcc, '-ccbin', host, *CUDA_FLAGS, *strict, *code]))}",
            f"link = {_ninja(shlex.join([*compiler, '-shared']))}",
            f"libraries = {_ninja(shlex.join([str(runtime), *link_flags]))}",
            "rule cxx",
            "  command = $cxx -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $out",
            "rule nvcc",
            "  command = $nvcc -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $out",
            "rule link",
            "  command = $link $in -o $out $libraries",
            "  description = link $out",
            *(f"build {name}.o: nvcc {_escape(ROOT / f'csrc/cuda/{name}.cu')}" for name in CUDA_KERNELS),
            f"build launch.o: cxx {_escape(ROOT / 'csrc/cuda/launch.cpp')}",
            f"build bindings_cuda.o: cxx {_escape(ROOT / 'csrc/bindings_cuda.cpp')}",
            f"build {_escape(target)}: link {' '.join(objects)}",
            "",
        ]
    )


def _ninja(text: str) -> str:
    return text.replace("$", "$$")


# Without OpenMP the kernels run single-threaded.
OPENMP_PROBE = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
# gcc has AVX512-BF16 from version 10 on.
BF16_PROBE = '#include <immintrin.h>\nint main() { return __builtin_cpu_supports("avx512bf16") == 1; }\n'


def compiles(compiler: list[str], flags: list[str], text: str) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.cpp")
        source.write_text(text)
        command = [*compiler, *flags, str(source), "-o", str(source.with_suffix(".out"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def ninja_file(compiler: list[str], target: Path) -> str:
    import pybind11

    includes = [pybind11.get_include(), sysconfig.get_paths()["include"]]
    openmp = ["-fopenmp"] if compiles(compiler, ["-fopenmp"], OPENMP_PROBE) else []
    isa_flags, x86 = dict(ISA_FLAGS), ["-DDAPO_X86"] if X86 else []
    if X86 and compiles(compiler, isa_flags["avx512bf16"], BF16_PROBE):
        x86.append("-DDAPO_AVX512BF16")
    else:
        isa_flags.pop("avx512bf16", None)
    quiet = [] if openmp else ["-Wno-unknown-pragmas", "-Wno-unused-parameter"]  # its pragmas and numbers of threads
    flags = [*BASE_FLAGS, *openmp, *quiet, *(f"-I{path}" for path in includes), *x86]
    objects, rules = [], []
    units = [("csrc/bindings.cpp", "bindings", [f'-DDAPO_SOURCES="{DIGEST}"'])]
    units += [(source, Path(source).stem, []) for source in SOURCES]
    units += [("csrc/cpu/row_kernels.cpp", isa, [f"-DDAPO_ISA={isa}", *extra]) for isa, extra in isa_flags.items()]
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


CPU = Extension("dapo_kernels._C", sources=[])
# Optional: where it raises CompileError, setuptools prints the error and goes on.
CUDA = Extension("dapo_kernels._cuda", sources=[], optional=os.environ.get("DAPO_KERNELS_CUDA") != "1")


def index_page() -> str:
    """README.md for a package index, where a link into the repository leads nowhere: the path stands in its place, of a
    file that the source distribution has.
    """

    def path_for_link(link: re.Match[str]) -> str:
        words, path = link[1], link[2].partition("#")[0]
        return words if words == path else f"{words} ({path})"

    text = re.sub(r"!\[.*?\]\(.*?\)\n", "", (ROOT / "README.md").read_text(encoding="utf-8"))  # no pictures there
    return re.sub(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)", path_for_link, text)


PACKAGES = find_packages(include=["dapo_kernels*", "dapo_runner*"])
# An editable installation finds recipes/ in the checkout. With a folder of its own for a package, setuptools would
# install an import hook instead of the checkout's path, and type checkers would not find the packages.
EDITABLE = "editable_wheel" in sys.argv
PYTHON_FILES = {
    "packages": PACKAGES if EDITABLE else [*PACKAGES, "dapo_runner.recipes"],
    "package_dir": {"": "."} if EDITABLE else {"dapo_runner.recipes": "recipes"},
    "package_data": {
        "dapo_kernels": ["py.typed"],
        "dapo_runner": ["py.typed"],
        "dapo_runner.logging": ["glossary.txt"],
        "dapo_runner.tools.page": ["page.*"],
        "dapo_runner.recipes": ["*.yaml", "studies/*.yaml"],
    },
    "long_description": index_page(),
    "long_description_content_type": "text/markdown",
}

for built in ROOT.glob("build/lib*"):  # a wheel would carry modules and files that this build does not make
    shutil.rmtree(built, ignore_errors=True)
if os.environ.get("DAPO_KERNELS_CPP", "1") == "0":
    setup(**PYTHON_FILES)
else:
    modules = [CPU, *([CUDA] if wants_cuda() else [])]
    setup(**PYTHON_FILES, ext_modules=modules, cmdclass={"build_ext": NinjaBuild})
