"""Where and with what a figure was measured."""

from __future__ import annotations

import importlib.metadata
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
_GPU_PACKAGES = (
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "flash-attn",
    "cut-cross-entropy",
    "verl",
    "megatron-core",
)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def describe(gpu: bool = False) -> dict[str, Any]:
    """Processor, memory, instruction set, versions and the commit, as one record; with a GPU, that under "gpu"."""
    from dapo_kernels import _C

    here = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_kib("/proc/meminfo", "MemTotal") / 2**20, 1),
        "isa": _C.isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "onednn_isa": os.environ.get(VARIABLE),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "commit": commit(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }
    if gpu:
        here["versions"] |= {name: version(name) for name in _GPU_PACKAGES}
        here["gpu"] = describe_gpu()
    return here


def describe_gpu() -> dict[str, Any]:
    """The CUDA device that is measured."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver_version(_driver_text()),
        "cuda": torch.version.cuda,
        "backends": {name: why or "runs" for name, why in available_backends().items()},
    }


def _driver_text() -> str:
    if _DRIVER_FILE.exists():
        return _DRIVER_FILE.read_text()
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True).stdout


def driver_version(text: str) -> str:
    """The version in what the driver says of itself: "NVRM version: NVIDIA UNIX Open Kernel Module  580.159.03 …"."""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"


def headline(machine: dict[str, Any]) -> str:
    """Where, in a few words."""
    if "gpu" in machine:
        return f"{machine['gpu']['name']}, driver {machine['gpu']['driver']}"
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}"


def slug(machine: dict[str, Any]) -> str:
    """For file names: amd-epyc-2c-avx512bf16, nvidia-h200."""
    if "gpu" in machine:
        return _dashed(machine["gpu"]["name"])
    return f"{_dashed(machine['cpu'])}-{machine['cores']}c-{machine['isa']}"


def _dashed(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def commit() -> str:
    """The commit of the checkout, with "+changes" when the kernels or the benchmarks differ from it."""
    root = Path(__file__).parent.parent
    if shutil.which("git") is None:
        return "unknown: git is not installed"

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-c", "safe.directory=*", "-C", str(root), *args], capture_output=True, text=True)
        return done.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", "csrc", "dapo_kernels", "benchmarks/*.py")
    return (head or "not a git checkout") + ("+changes" if changed else "")


def command(*program: str) -> str:
    """How this process was called, for its page of results: without ``--out``, a path of one machine."""
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return shlex.join([*program, *kept])


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


def version(package: str) -> str:
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
