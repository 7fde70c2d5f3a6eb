"""Check the output head of a call from hidden states. The rules are in ``HeadOptions`` and in the fields of ``Head``
and ``Plan`` (``records.py``)."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import torch
from torch import Tensor

from dapo_kernels.backends import backend_for
from dapo_kernels.layout import Layout, check_flag, check_tensor, check_valid_vocab
from dapo_kernels.objectives.table import is_number
from dapo_kernels.records import NOTES, SHAPES, Head, HeadOptions, LoraFactors, Plan

_NAMES = list(HeadOptions.__annotations__)
_FLAGS = [name for name, kind in get_type_hints(HeadOptions).items() if kind is bool]
_NUMBERS = {name: (note.above, note.whole) for name, note in NOTES.items() if note.above is not None}
_CAST = {torch.float32, torch.bfloat16, torch.float16}  # by autocast
_SAID = {name: (name.replace("lora_", "lora."), f"[{', '.join(dims)}]") for name, dims in SHAPES.items()}


def head_of_call(layout: Layout, hidden: Tensor, weight: Any, mask: Tensor | None, options: Any) -> tuple[Head, Plan]:
    """Return the checked head and plan. Removes its options from ``options``."""
    given: dict[str, Any] = {name: options.pop(name) for name in _NAMES if name in options}
    for name, value in given.items():
        above, whole = _NUMBERS.get(name, (None, False))
        if name in _FLAGS:
            check_flag(layout, name, value)
        elif value is None or above is None:
            continue
        elif not ((type(value) is int if whole else is_number(value)) and above < value < math.inf):
            kind = f"{'a positive' if above == 0 else 'a'} {'integer' if whole else 'number'}"
            raise layout.fail(name, f"{kind}, or None", repr(value))
    lora = given.pop("lora", None)
    host_sync, main_grad, valid = given.get("host_sync"), given.get("main_grad"), given.get("valid_vocab")
    check_valid_vocab(layout, valid)
    if lora is not None:
        given |= _checked_factors(layout, lora)
    tensors = {"weight": weight} | {name: x for name, x in given.items() if name in SHAPES and x is not None}
    for name, x in tensors.items():
        check_tensor(layout.caller, _SAID[name][0], x, f"a tensor {_SAID[name][1]}")
    if main_grad is not None:
        _check_main_grad(layout, main_grad, weight)
    # As autocast does before a Linear layer: it keeps float64, and does not convert the integers of a quantized head.
    if not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, tensors = hidden.to(dtype), {n: x.to(dtype) if x.dtype in _CAST else x for n, x in tensors.items()}
    _check_tensors(layout, hidden, tensors)
    if host_sync is not None:
        check_flag(layout, "host_sync", host_sync)
    if hidden.is_meta or (host_sync is None and mask is None):  # no values, or only live tokens: nothing to wait for
        host_sync = False
    if hidden.dtype == torch.float64:
        given["float32_logits"] = False
    head_fields = {name: value for name, value in given.items() if name in Head._fields} | tensors
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden, *tensors.values()))
    call = "hidden" if wants_grad else "hidden, no gradient"
    backend_name = backend_for(layout.caller, hidden.device, hidden.dtype, weight.shape[0], call)
    plan = Plan(given.get("chunk_bytes"), host_sync, main_grad, backend_name, valid)
    return Head(hidden.reshape(-1, hidden.shape[-1]), **head_fields), plan


def _check_tensors(layout: Layout, hidden: Tensor, tensors: dict[str, Tensor]) -> None:
    """Check that shapes, dtypes and devices match those of hidden and each other."""
    sizes: dict[str, int] = {"H": hidden.shape[-1]}
    for name, x in tensors.items():
        (said, text), dims, shape = _SAID[name], SHAPES[name], list(x.shape)
        introduced = dims[0] not in sizes
        if len(shape) != len(dims) or [sizes.setdefault(dim, n) for dim, n in zip(dims, shape, strict=True)] != shape:
            size = f" with H={sizes['H']} like hidden" if introduced else f"={[sizes.get(dim) for dim in dims]}"
            raise layout.fail(said, text + size, shape)
        if x.dtype != hidden.dtype:
            autocast = ", or call under torch.autocast" if {x.dtype, hidden.dtype} <= _CAST else ""
            raise TypeError(
                f"{layout.caller}: {said} must have the dtype of hidden, {hidden.dtype}, got {x.dtype}: convert one of "
                f"them{autocast}; float32_logits=True keeps logits of 16-bit inputs in float32"
            )
        if x.device != hidden.device:
            raise layout.fail(said, f"on {hidden.device} like hidden", x.device)


def _checked_factors(layout: Layout, lora: Any) -> dict[str, Any]:
    """Return the factors by field of ``Head``. Their tensors are checked later."""
    if not isinstance(lora, LoraFactors):
        raise TypeError(f"{layout.caller}: lora must be LoraFactors(a, b, scale), got {type(lora).__name__}")
    if not (is_number(lora.scale) and -math.inf < lora.scale < math.inf):
        raise layout.fail("lora.scale", "a finite number", repr(lora.scale))
    return {"lora_a": lora.a, "lora_b": lora.b, "lora_scale": float(lora.scale)}


def _check_main_grad(layout: Layout, main_grad: Any, weight: Tensor) -> None:
    check_tensor(layout.caller, "main_grad", main_grad, "a float32 tensor [V, H]")
    shape = list(weight.shape)
    if main_grad.dtype != torch.float32 or list(main_grad.shape) != shape or main_grad.device != weight.device:
        got = f"{main_grad.dtype} {list(main_grad.shape)} on {main_grad.device}"
        raise layout.fail("main_grad", f"float32 {shape} on {weight.device}, like weight", got)
    if torch.is_grad_enabled() and not weight.requires_grad:
        raise ValueError(f"{layout.caller}: main_grad requires weight.requires_grad=True, got False")
    if torch.compiler.is_compiling():
        raise ValueError(f"{layout.caller}: main_grad is not supported with torch.compile: leave it out")
