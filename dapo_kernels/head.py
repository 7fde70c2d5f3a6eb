"""The output head of a call from hidden states: its options, checked. An option of the head is a field of
``HeadOptions`` and of ``records.Head``."""

from __future__ import annotations

import math
from typing import Any, TypedDict

import torch
from torch import Tensor

from dapo_kernels.backends import backend_for
from dapo_kernels.backends.float8 import FLOAT8, PRODUCT_MULTIPLE, quantized_weight
from dapo_kernels.layout import Layout, check_flag, check_tensor, check_valid_vocab
from dapo_kernels.objectives.table import is_number
from dapo_kernels.records import Head, LoraFactors, Plan, Quantized


class HeadOptions(TypedDict, total=False):
    """``linear_dapo_loss`` says what each means."""

    bias: Tensor | None
    lora: LoraFactors | None
    float8: bool
    weight_scale: Tensor | None
    softcap: float | None
    float32_logits: bool
    chunk_bytes: int | None
    host_sync: bool | None
    main_grad: Tensor | None
    valid_vocab: int | None


def head_of_call(layout: Layout, hidden: Tensor, weight: Any, mask: Tensor | None, options: Any) -> tuple[Head, Plan]:
    """Takes its own out of ``options``."""
    names = ("bias", "lora", "softcap", "chunk_bytes", "host_sync", "main_grad", "valid_vocab")
    bias, lora, softcap, chunk_bytes, host_sync, main_grad, valid = (options.pop(name, None) for name in names)
    float32_logits, float8 = (
        check_flag(layout, name, options.pop(name, False)) for name in ("float32_logits", "float8")
    )
    weight_scale = options.pop("weight_scale", None)
    caller, width = layout.caller, hidden.shape[-1]
    check_tensor(caller, "weight", weight, "a tensor [V, H]")
    if bias is not None:
        check_tensor(caller, "bias", bias, "a tensor [V]")
    stored_in_float8 = weight.dtype == FLOAT8
    lora_a, lora_b, lora_scale = (None, None, 1.0) if lora is None else _checked_factors(layout, lora)
    if main_grad is not None:
        _check_main_grad(layout, main_grad, weight)
    # As autocast treats the Linear layer that this stands for, which keeps float64.
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight if stored_in_float8 else weight.to(dtype)
        bias, lora_a, lora_b = (None if x is None else x.to(dtype) for x in (bias, lora_a, lora_b))
    if weight.dim() != 2 or weight.shape[1] != width:
        raise layout.fail("weight", f"[V, H] with H={width} like hidden", list(weight.shape))
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise layout.fail("bias", f"[V]=[{weight.shape[0]}]", list(bias.shape))
    if lora_a is not None and lora_b is not None:
        if lora_a.dim() != 2 or lora_a.shape[1] != width:
            raise layout.fail("lora.a", f"[r, H] with H={width} like hidden", list(lora_a.shape))
        if lora_b.shape != (weight.shape[0], lora_a.shape[0]):
            raise layout.fail("lora.b", f"[V, r]=[{weight.shape[0]}, {lora_a.shape[0]}]", list(lora_b.shape))
    for name, value in (("weight", weight), ("bias", bias), ("lora.a", lora_a), ("lora.b", lora_b)):
        own_dtype = name == "weight" and stored_in_float8
        if value is not None and value.dtype != hidden.dtype and not own_dtype:
            raise TypeError(f"{caller}: {name} must have the dtype of hidden, {hidden.dtype}; got {value.dtype}")
        if value is not None and value.device != hidden.device:
            raise layout.fail(name, f"on {hidden.device} like hidden", value.device)
    if softcap is not None and not (is_number(softcap) and 0 < softcap < math.inf):
        raise layout.fail("softcap", "a positive number, or None", repr(softcap))
    if chunk_bytes is not None and not (type(chunk_bytes) is int and chunk_bytes > 0):
        raise layout.fail("chunk_bytes", "a positive integer, or None", repr(chunk_bytes))
    check_valid_vocab(layout, valid)
    if host_sync is not None:
        check_flag(layout, "host_sync", host_sync)
    elif mask is None:  # every token is live: nothing to wait for
        host_sync = False
    quantized = _quantized(layout, hidden, weight, float8, weight_scale)
    hidden = hidden.reshape(-1, width)
    float32_logits = float32_logits and hidden.dtype != torch.float64
    head = Head(hidden, weight, bias, softcap, float32_logits, lora_a, lora_b, lora_scale, *(quantized or ()))
    served_by = backend_for(caller, hidden.device, hidden.dtype, weight.shape[0])
    return head, Plan(chunk_bytes, host_sync, main_grad, served_by, valid)


def _quantized(layout: Layout, hidden: Tensor, weight: Tensor, float8: bool, scale: Any) -> Quantized | None:
    caller = layout.caller
    if weight.dtype != FLOAT8 and scale is not None:
        raise ValueError(f"{caller}: weight_scale has no use: weight is in {weight.dtype}, not {FLOAT8}")
    if weight.dtype != FLOAT8 and not float8:
        return None
    if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"{caller}: a float8 head takes hidden in bfloat16, float16 or float32, got {hidden.dtype}")
    if hidden.device.type == "cuda":
        _check_float8_device(layout, hidden)
    if weight.dtype != FLOAT8:
        return quantized_weight(weight.detach())
    n = weight.shape[0]
    check_tensor(caller, "weight_scale", scale, f"a tensor [V, 1] or of one number, which a weight in {FLOAT8} needs")
    if not scale.is_floating_point() or list(scale.shape) not in ([], [1], [1, 1], [n], [n, 1]):
        raise layout.fail("weight_scale", f"floats [V, 1]=[{n}, 1], or one", f"{scale.dtype} {list(scale.shape)}")
    if scale.device != hidden.device:
        raise layout.fail("weight_scale", f"on {hidden.device} like hidden", scale.device)
    if torch.is_grad_enabled() and (weight.requires_grad or scale.requires_grad):
        raise ValueError(
            f"{caller}: a weight stored in {FLOAT8} and its weight_scale have no gradient; pass the 16-bit weight with "
            "float8=True to train it"
        )
    return Quantized(weight.contiguous(), scale.float().reshape(-1, 1).expand(n, 1).contiguous())


def _check_float8_device(layout: Layout, hidden: Tensor) -> None:
    capability = torch.cuda.get_device_capability(hidden.device)
    if torch.version.hip is not None or capability < (8, 9):
        device = "ROCm" if torch.version.hip is not None else "compute capability {}.{}".format(*capability)
        raise ValueError(f"{layout.caller}: a float8 head needs CUDA and compute capability 8.9, here is {device}")
    if hidden.shape[-1] % PRODUCT_MULTIPLE:
        raise layout.fail("hidden", f"[…, H] with H a multiple of {PRODUCT_MULTIPLE} for float8", list(hidden.shape))


def _checked_factors(layout: Layout, lora: Any) -> LoraFactors:
    if not isinstance(lora, LoraFactors):
        raise TypeError(f"{layout.caller}: lora must be LoraFactors(a, b, scale), got {type(lora).__name__}")
    check_tensor(layout.caller, "lora.a", lora.a, "a tensor [r, H]")
    check_tensor(layout.caller, "lora.b", lora.b, "a tensor [V, r]")
    if not (is_number(lora.scale) and math.isfinite(lora.scale)):
        raise layout.fail("lora.scale", "a finite number", repr(lora.scale))
    return lora._replace(scale=float(lora.scale))


def _check_main_grad(layout: Layout, main_grad: Any, weight: Tensor) -> None:
    check_tensor(layout.caller, "main_grad", main_grad, "a float32 tensor [V, H]")
    shape = list(weight.shape)
    if main_grad.dtype != torch.float32 or list(main_grad.shape) != shape or main_grad.device != weight.device:
        got = f"{main_grad.dtype} {list(main_grad.shape)} on {main_grad.device}"
        raise layout.fail("main_grad", f"float32 {shape} on {weight.device}, like weight", got)
    if torch.is_grad_enabled() and not weight.requires_grad:
        raise ValueError(f"{layout.caller}: main_grad has no use: weight does not require a gradient")
    if torch.compiler.is_compiling():
        raise ValueError(f"{layout.caller}: main_grad works in eager mode; a compiled graph adds gradients up itself")
