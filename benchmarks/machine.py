"""The machine, versions and commit of a figure; memory of this process."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dapo_kernels.backends import available_backends
from dapo_runner.preflight.amx import VARIABLE

_PACKAGES = ("torch", "triton", "transformers", "trl", "liger_kernel", "numpy")
_GPU_PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy", "verl")
ROOT = Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "build" / "gpu-bundle"
# What figures depend on.
SOURCES = ("csrc/**/*.*", "dapo_kernels/**/*.py", "benchmarks/*.py")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def describe(gpu: bool = False) -> dict[str, Any]:
    """Return processor, memory, instruction sets, versions and commit; with ``gpu`` also the CUDA device."""
    isa = import_module("dapo_kernels._C").isa() if available_backends()["cpp"] is None else "not built"
    packages = _PACKAGES + (_GPU_PACKAGES if gpu else ())
    here = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_bytes("/proc/meminfo", "MemTotal") / 2**30, 1),
        "isa": isa,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "onednn_isa": os.environ.get(VARIABLE),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "commit": commit(),
        "sources": sources(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }
    return here | ({"gpu": describe_gpu()} if gpu else {})


def describe_gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver_version(_DRIVER_FILE.read_text() if _DRIVER_FILE.exists() else ""),
        "cuda": torch.version.cuda,
        "backends": {name: why or "runs" for name, why in available_backends().items()},
    }


def driver_version(text: str) -> str:
    """Return the version in a line such as "NVRM version: NVIDIA UNIX Open Kernel Module  580.159.03 …"."""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"


def headline(machine: dict[str, Any]) -> str:
    """Return the machine in a few words."""
    if "gpu" in machine:
        return f"{machine['gpu']['name']}, driver {machine['gpu']['driver']}"
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}"


def slug(machine: dict[str, Any]) -> str:
    """Return the machine for file names: amd-epyc-2c-avx512bf16, nvidia-h200."""
    name = machine["gpu"]["name"] if "gpu" in machine else machine["cpu"]
    dashed = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return dashed if "gpu" in machine else f"{dashed}-{machine['cores']}c-{machine['isa']}"


def commit(bundle: Path = BUNDLE) -> str:
    """Return the commit of the checkout, with "+changes" when the kernels or the benchmarks differ from it.

    In a copy without .git, it is what the bundle's ``commit.json`` names.
    """
    found = source_state()
    if found["commit"] is None:
        written = next(iter(sorted(bundle.glob("*/commit.json"))), None)
        if written is None:
            return "unknown: neither a git checkout nor a bundle"
        known = json.loads(written.read_text())
        return known["commit"] + ("+changes" if known["sources"] != found["sources"] else "")
    return found["commit"]


def source_state() -> dict[str, str | None]:
    """Return the commit (None without git) and a digest of the sources that figures depend on."""
    return {"commit": _git_commit(), "sources": sources()}


def sources() -> str:
    files = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


def _git_commit() -> str | None:
    if shutil.which("git") is None:
        return None

    def git(*args: str) -> str:
        command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    found = git("rev-parse", "--short=12", "HEAD")
    return (
        found + "+changes" * bool(git("status", "--porcelain", "--", *(f":(glob){pattern}" for pattern in SOURCES)))
        if found
        else None
    )


def command(*program: str) -> str:
    """Return the command line of this process for its page, without folders of results: they are of one machine."""
    arguments = " ".join(map(shlex.quote, sys.argv[1:]))
    return " ".join([*program, re.sub(r" ?--(out|results)[ =]\S+", "", arguments).strip()]).strip()


def facts(here: dict[str, Any], *program: str) -> str:
    """Return the command of this process, the machine, and the load that ``describe`` found, for a page."""
    where = f"{headline(here)}, {here['memory_gib']} GiB; torch {here['versions']['torch']}, commit {here['commit']}"
    return f"Command: `{command(*program)}`.\n{where}; load before: {here['load_average'][0]}."


def available_bytes() -> int:
    """Return the memory that could be taken without swapping."""
    return _bytes("/proc/meminfo", "MemAvailable")


def resident_bytes() -> int:
    return _bytes("/proc/self/status", "VmRSS")


def peak_resident_bytes() -> int:
    """Return the most that this process held since ``reset_peak``."""
    return _bytes("/proc/self/status", "VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _field(path: str, name: str) -> str:
    lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _bytes(path: str, name: str) -> int:
    return 1024 * int(_field(path, name).split()[0])
