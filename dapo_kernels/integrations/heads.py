"""Take what the loss needs from a causal language model of transformers: its logit rule and its output head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from dapo_kernels.records import LoraFactors

# Names of the factor on the logits, of their divisor, and of the softcap, by model family.
_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class LogitRule:
    """What a model does to hidden · weightᵀ to get its logits, with the sampling temperature τ.

    A factor s and a cap c give c·tanh(s·x/c)/τ. A plain head with cap c/s at temperature τ/s gives the same.
    """

    softcap: float | None
    temperature: float

    @classmethod
    def of(cls, config: Any, temperature: float) -> LogitRule:
        """Read the rule from ``config``, of the model or of its text part."""
        text = config.get_text_config()
        factor = _logit_factor(text)
        if factor <= 0:
            raise ValueError(f"the logits of {text.model_type!r} must be scaled by a positive factor, got {factor:g}")
        cap = _first_set(text, _CAPS)
        return cls(None if cap is None else cap / factor, temperature / factor)


def _logit_factor(config: Any) -> float:
    factor, divisor = _first_set(config, _FACTORS), _first_set(config, _DIVISORS)
    if factor is not None or divisor is None:
        return 1.0 if factor is None else factor
    # HyperCLOVA X multiplies by it; Granite and MiniCPM divide.
    return divisor if config.model_type == "hyperclovax" else 1.0 / divisor


def _first_set(config: Any, names: tuple[str, ...]) -> float | None:
    return next((float(getattr(config, name)) for name in names if getattr(config, name, None) is not None), None)


class OutputHead(NamedTuple):
    """What turns hidden states into logits: weight [V, H], bias [V], PEFT's adapter."""

    weight: Tensor
    bias: Tensor | None
    lora: LoraFactors | None


def check_head(model: Any) -> None:
    """Check that the head's parameters alone give the logits: the loss multiplies by them and never calls the module.

    Raises:
        ValueError: the model has no such head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head; load the model with AutoModelForCausalLM")
    weight = getattr(head, "weight", None)
    # torchao's quantized tensors have a floating-point dtype; like DTensor, they are made of other tensors.
    is_quantized = hasattr(weight, "__tensor_flatten__") and not isinstance(weight, DTensor)
    if weight is None or weight.dim() != 2 or not weight.is_floating_point() or is_quantized:
        got = "no weight" if weight is None else f"{type(weight).__name__} {list(weight.shape)} of {weight.dtype}"
        raise ValueError(
            f"the output head of {type(model).__name__} must be a linear layer with a floating-point weight [V, H], "
            f"got {type(head).__name__} with {got}; quantized heads are not supported"
        )
    lora_of(head)


def lora_of(head: Any) -> LoraFactors | None:
    """Return the active LoRA factors that PEFT adds to the weight of a linear layer; None: nothing is added.

    Raises:
        ValueError: the layer has several active adapters, or one that is not two factors and a scale.
    """
    if not hasattr(head, "base_layer") or head.disable_adapters or head.merged:
        return None
    if not isinstance(getattr(head, "lora_A", None), torch.nn.ModuleDict):
        raise _no_factors(f"{type(head).__name__}; only LoRA is supported")
    active = [name for name in head.active_adapters if name in head.lora_A]
    if not active:
        return None
    if len(active) > 1:
        raise _no_factors(f"of several at once, {', '.join(active)}; activate one")
    (name,) = active
    if name in head.lora_variant:
        raise _no_factors(f"of the kind {type(head.lora_variant[name]).__name__}; expected plain LoRA")
    if head.lora_bias[name]:
        raise _no_factors("with a bias; set lora_bias=False")
    if getattr(head.lora_dropout[name], "p", 0.0) > 0.0:
        raise _no_factors("with dropout, which differs between two passes of one policy; set lora_dropout=0")
    return LoraFactors(head.lora_A[name].weight, head.lora_B[name].weight, float(head.scaling[name]))


def _no_factors(what: str) -> ValueError:
    return ValueError(f"the output head has an adapter {what}")


def head_of(model: Any, hidden: Tensor, group: Any = None) -> OutputHead:
    """Return the output head in the dtype of ``hidden``, whole or as sharded over ``group``.

    Looked up per call: PEFT and FSDP replace modules and parameters.
    """

    def usable(parameter: Tensor) -> Tensor:
        return parameter if _is_shared_by(group, parameter) else whole(parameter)

    head = model.get_output_embeddings()
    bias, lora = getattr(head, "bias", None), lora_of(head)
    weight, bias = usable(head.weight), None if bias is None else usable(bias)
    if lora is not None:
        lora = LoraFactors(usable(lora.a), usable(lora.b), lora.scale)
    if torch.is_autocast_enabled(hidden.device.type):  # then the loss casts all of them
        return OutputHead(weight, bias, lora)
    dtype = hidden.dtype
    return OutputHead(
        weight.to(dtype), None if bias is None else bias.to(dtype), None if lora is None else lora.to(dtype)
    )


def _is_shared_by(group: Any, parameter: Tensor) -> bool:
    """Return whether a parameter is sharded over the ranks that share the loss, not by FSDP2 over other data's ranks.

    On a mesh of several dimensions it may be both, for which the loss raises an error.
    """
    if group is None or not isinstance(parameter, DTensor):
        return False
    mesh = parameter.device_mesh
    return mesh.ndim > 1 or mesh.get_group().group_name == group.group_name


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter, gathered if FSDP2 has sharded it: FSDP2 does not do so if the head is a unit of its own.

    Its gradient is the mean over the ranks, as FSDP computes it. ``full_tensor()`` alone would keep each rank's own.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    full = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full
