"""A pytest plugin: the "cuda" backend on CPU tensors, its module replaced by the emulation of ``cuda_emulation.cpp``.

Loaded with ``-p emulated_cuda`` by ``test_elsewhere.py``, which builds the module and names its file in CUDA_EMULATION.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import dapo_kernels
from dapo_kernels.backends import registry


def load(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.modules["dapo_kernels._cuda"] = dapo_kernels._cuda = load("dapo_kernels._cuda", os.environ["CUDA_EMULATION"])
registry.BACKENDS["cuda"] = registry.Entry("dapo_kernels.backends.cuda", lambda: None, ("cpu",))
