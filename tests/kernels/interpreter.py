"""Triton's interpreter, made to round to bfloat16 as the compiled kernels do."""

from __future__ import annotations

from typing import Any

import numpy as np


def _round_to_bfloat16(x: Any) -> Any:
    """Bits of the nearest bfloat16, ties to even, as uint16; a NaN stays one."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def round_to_nearest() -> None:
    """The interpreter truncates float32 to bfloat16 (seen in 3.6 and 3.9): up to a unit in the last place."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    truncating = builder.cast_impl

    def cast(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_round_to_bfloat16(source.data), tl.bfloat16)
        return truncating(self, source, to)

    builder.cast_impl = cast
