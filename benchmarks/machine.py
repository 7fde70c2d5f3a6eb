"""The machine, versions and commit of a figure; memory of this process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dapo_kernels.backends import available_backends
from dapo_runner.preflight.amx import VARIABLE

_PACKAGES = ("torch", "triton", "transformers", "trl", "liger_kernel", "numpy")
_GPU_PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl", "flash-attn", "cut-cross-entropy", "verl")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def describe(gpu: bool = False) -> dict[str, Any]:
    """Return processor, memory, instruction sets, versions and commit; with ``gpu`` also the CUDA device."""
    from dapo_kernels import _C

    packages = _PACKAGES + (_GPU_PACKAGES if gpu else ())
    here = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_bytes("/proc/meminfo", "MemTotal") / 2**30, 1),
        "isa": _C.isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "onednn_isa": os.environ.get(VARIABLE),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "commit": commit(),
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


def commit() -> str:
    """Return the commit of the checkout, with "+changes" when the kernels or the benchmarks differ from it."""
    if shutil.which("git") is None:
        return "unknown: git is not installed"

    def git(*args: str) -> str:
        command = ["git", "-c", "safe.directory=*", "-C", str(Path(__file__).parent.parent), *args]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "csrc", "dapo_kernels", "benchmarks/*.py")
    return (git("rev-parse", "--short=12", "HEAD") or "not a git checkout") + ("+changes" if changed else "")


def command(*program: str) -> str:
    """Return the command line of this process for its page, without folders of results: they are of one machine."""
    arguments = " ".join(map(shlex.quote, sys.argv[1:]))
    return " ".join([*program, re.sub(r" ?--(out|results)[ =]\S+", "", arguments).strip()]).strip()


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


def is_importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


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
