"""A pytest plugin: the "cuda" backend on CPU tensors, its module replaced by the emulation of ``cuda_emulation.cpp``.

Loaded with ``-p emulated_cuda`` by ``test_cuda.py``, which builds the module and names its file in CUDA_EMULATION.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch

import dapo_kernels
from dapo_kernels.backends import registry


def load(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install() -> None:
    emulation = load("dapo_kernels._cuda", os.environ["CUDA_EMULATION"])
    sys.modules["dapo_kernels._cuda"] = emulation
    dapo_kernels._cuda = emulation  # type: ignore[attr-defined]
    from dapo_kernels.backends import cuda

    def no_stream(device: torch.device) -> int:
        return 0

    cuda._stream = no_stream
    registry.BACKENDS["cuda"] = registry.Entry("dapo_kernels.backends.cuda", lambda: None, ("cpu",))


install()
