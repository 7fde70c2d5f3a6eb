"""Where and with what a figure was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "triton", "transformers", "trl", "liger_kernel", "numpy")


def describe() -> dict[str, Any]:
    """Processor, memory, instruction set, versions and the commit, as one flat record."""
    from dapo_kernels import _C

    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_kib("/proc/meminfo", "MemTotal") / 2**20, 1),
        "isa": _C.isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": commit(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def slug(machine: dict[str, Any]) -> str:
    """For file names: amd-epyc-2c-avx512bf16."""
    cpu = re.sub(r"[^a-z0-9]+", "-", machine["cpu"].lower()).strip("-")
    return f"{cpu}-{machine['cores']}c-{machine['isa']}"


def commit() -> str:
    """The commit of the checkout, with "+changes" when the kernels or the benchmarks differ from it."""
    root = Path(__file__).parent.parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
        return done.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", "csrc", "dapo_kernels", "benchmarks/*.py")
    return (head or "not a git checkout") + ("+changes" if changed else "")


def available_bytes() -> int:
    """Memory that could be taken without swapping."""
    return 1024 * _kib("/proc/meminfo", "MemAvailable")


def resident_bytes() -> int:
    return 1024 * _kib("/proc/self/status", "VmRSS")


def peak_resident_bytes() -> int:
    """The most this process held since ``reset_peak``."""
    return 1024 * _kib("/proc/self/status", "VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _kib(path: str, name: str) -> int:
    return int(_field(path, name).split()[0])
