"""Low-rank adapters through peft (the ``lora`` extra): add them, switch them off, merge them for an engine, save them.

Only linear layers are supported. The loss gets adapters of the output head as factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dapo_runner.config import ConfigError, LoraConfig
from dapo_runner.files import share
from dapo_runner.packages import PEFT, meets
from dapo_runner.parallel.sharding import whole
from dapo_runner.policy.weights import stored_tensors

ADAPTER = "default"  # peft's name for a single adapter
WEIGHTS_FILE = "adapter_model.safetensors"  # this and the prefix are peft's names too
PREFIX = "base_model.model."


def check_installed() -> None:
    """Raise ConfigError if peft is not installed or too old."""
    if not meets(PEFT):
        raise ConfigError(f"model.lora: requires {PEFT}. Run pip install 'dapo-kernels[lora]'")


def add_adapters(model: Any, config: LoraConfig, seed: int) -> None:
    """Wrap the linear layers of a transformers model in place. Then only adapters train. Initially B = 0.

    Raises ConfigError if peft is missing, or a target is missing, not a linear layer, or a tied output head.
    """
    check_installed()
    import peft

    origin = {"base_model_name_or_path": model.name_or_path, "task_type": "CAUSAL_LM"}  # peft loads both by adapter/
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=config.targets, **origin)
    try:
        with torch.random.fork_rng():  # adapters must not change the random numbers of the run
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets: expected layers, got: {str(error).splitlines()[0]}") from error
    head = model.get_output_embeddings()
    if _is_adapted(head) and head.weight is model.get_input_embeddings().weight:
        raise ConfigError("model.lora.targets: an output head tied to the embedding is not supported. Leave it out.")
    adapted = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    for target in [] if isinstance(config.targets, str) else config.targets:  # peft ignores those that are not there
        if not any(f".{name}".endswith(f".{target}") for name in adapted):
            raise ConfigError(f"model.lora.targets: expected layers of {type(model).__name__}, got {target}")
    for name, module in adapted.items():
        if not isinstance(module, peft.tuners.lora.Linear):
            advice = "Set it to layers of the attention, such as [q_proj, o_proj] (docs/training-options.md)"
            raise ConfigError(f"model.lora.targets: expected linear layers, got {name}. {advice}")


def has_adapters(model: Any) -> bool:
    return bool(getattr(model, "peft_config", None))


def merged_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with adapters merged in, and the persistent buffers: the model for an engine.

    Parameters are whole. Shards are converted to ``dtype`` before they are sent; others keep theirs, for some routers
    float32. Weight and adapter are added in float32 and rounded once. In bfloat16 an adapter's change of less than half
    the weight's last bit (2⁻⁹ to 2⁻⁸ of it) is lost in the engine, but not in training.
    """
    adapted = {f"{name}.base_layer.weight": module for name, module in model.named_modules() if _is_adapted(module)}
    with torch.no_grad():
        for name, parameter in stored_tensors(model):
            if not isinstance(parameter, nn.Parameter):
                yield name, parameter
            elif ".lora_" not in name:
                weight = whole(parameter.detach().to(dtype) if isinstance(parameter, DTensor) else parameter.detach())
                if name in adapted:
                    weight = (weight.float() + _product(adapted[name], dtype)).to(weight.dtype)
                yield name.replace(".base_layer.", "."), weight


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Switch adapters off inside this context: the model is then its own reference."""
    layers = [module for module in model.modules() if _is_adapted(module)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Return the whole adapters by peft's names. Collective if they are sharded."""
    found = (pair for pair in model.named_parameters() if ".lora_" in pair[0])
    return {PREFIX + name.replace(f".{ADAPTER}.", "."): whole(tensor.detach()).contiguous() for name, tensor in found}


def save_adapters(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write ``adapter_tensors`` to a new ``folder`` in peft's format."""
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE)
    share(folder / WEIGHTS_FILE)
    model.peft_config[ADAPTER].save_pretrained(folder)


def _product(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return scaling·BA in float32, in the layout of the weight. peft's own product is in the adapters' dtype."""
    a, b = (whole(part[ADAPTER].weight.to(dtype)).float() for part in (layer.lora_A, layer.lora_B))
    product = layer.scaling[ADAPTER] * (b @ a)
    return product.T if layer.fan_in_fan_out else product


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")
