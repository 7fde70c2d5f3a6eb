"""The backends: one protocol (``protocol.py``), four implementations, and the choice of a backend for a call
(``registry.py``)."""

from dapo_kernels.backends.protocol import Backend, KeptLogits, WeightSum
from dapo_kernels.backends.registry import (
    available_backends,
    backend,
    backend_for,
    call_from_logits,
    covers,
    cpu_backend,
    cpu_build,
    cuda_build,
    describe_default,
    scale_,
    starts_of_rows,
    use_backend,
)

__all__ = [
    "Backend",
    "KeptLogits",
    "WeightSum",
    "available_backends",
    "backend",
    "backend_for",
    "call_from_logits",
    "covers",
    "cpu_backend",
    "cpu_build",
    "cuda_build",
    "describe_default",
    "scale_",
    "starts_of_rows",
    "use_backend",
]
