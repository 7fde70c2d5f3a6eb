"""The policy: a causal language model of transformers that runs over packed sequences and returns hidden states.

It never computes logits: `dapo_kernels` takes the hidden states and ``Policy.head``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from inspect import isfunction
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from dapo_kernels import LoraFactors
from dapo_kernels.integrations.heads import LogitRule, lora_of
from dapo_kernels.integrations.probe import check_logits, is_causal, is_packable
from dapo_runner.config import ConfigError, ModelConfig
from dapo_runner.parallel.sharding import Root, fill, shard
from dapo_runner.parallel.ulysses import shard_positions
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.attention import Kernel, choose_kernel, plan_packing, register_packed_attention
from dapo_runner.policy.lengths import loading
from dapo_runner.policy.lora import add_adapters, merged_weights
from dapo_runner.policy.prefixes import find_shared
from dapo_runner.policy.routing import Routing
from dapo_runner.types import PackedBatch

T = TypeVar("T")
Role = Literal["policy", "critic", "reference"]
ALIGNED = 64  # bytes; torch aligns its allocations to this
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ValueHead(nn.Module):
    """Map hidden [T, H] to values float32 [T]. Weights start at zero. Engines do not get this head."""

    def __init__(self, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weight.float()


class Head(NamedTuple):
    """softcap(hidden · weightᵀ + bias): weight [V, H], bias [V] or None, softcap or None, adapter or None."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    lora: LoraFactors | None


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A model with packed attention and its tokenizer."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any
    kernel: Kernel
    compute: torch.dtype = torch.float32  # dtype of computation
    world: World = SINGLE_PROCESS
    root: Root | None = None  # set if weights are sharded
    routing: Routing | None = None  # set with routing replay
    float32_logits: bool = False  # compute the head's logits in float32

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` while weights outside the layers are whole. Collective: all ranks call it equally often."""
        return work() if self.root is None else self.root(work)

    @property
    def device(self) -> torch.device:
        return self.model.get_output_embeddings().weight.device

    @property
    def head(self) -> Head:
        """The output head. With tied embeddings its weight is the embedding."""
        layer, config = self.model.get_output_embeddings(), self.model.config.get_text_config(decoder=True)
        softcap, lora = getattr(config, "final_logit_softcapping", None), lora_of(layer)
        lora = None if lora is None else lora.to(layer.weight.dtype)
        return Head(layer.weight, getattr(layer, "bias", None), softcap, lora)

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return the last hidden states [T, H] in the model's dtype; [T/W, H] if W ranks share the positions."""
        if self.routing is not None and batch.experts is None:
            self.routing.follow(None)
        group = self.world.sequence_group
        return self.run_body(batch.input_ids, batch.position_ids, batch.lengths, group, batch.experts)

    def run_body(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        lengths: list[int],
        group: dist.ProcessGroup | None = None,
        experts: Tensor | None = None,
    ) -> Tensor:
        """Run the model without its head. input_ids, position_ids int64 [T] on any device. ``experts`` are replayed."""
        # torch's varlen kernel, and ranks that share positions, need every sequence in full.
        distinct = find_shared(input_ids.cpu(), lengths) if self.kernel == "sdpa" and group is None else None
        if self.routing is not None and experts is not None:
            if len(experts) == len(input_ids):  # one row for each position, also for those that others compute
                experts = shard_positions(experts if distinct is None else experts[distinct.source], group)
            self.routing.follow(experts.to(self.device))
        if distinct is not None:
            source = distinct.source.to(input_ids.device)
            input_ids, position_ids = input_ids[source], position_ids[source]
        # use_cache=False is required: with a cache, transformers lets packed sequences attend to each other.
        output = self.model.base_model(
            input_ids=shard_positions(input_ids, group).to(self.device)[None],
            position_ids=shard_positions(position_ids, group).to(self.device)[None],
            use_cache=False,
            packing=plan_packing(lengths, self.device, self.kernel, distinct, group),
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden if distinct is None else hidden.index_select(0, distinct.inverse.to(self.device))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the model, whole, with adapters merged in. Collective."""
        return merged_weights(self.model, self.compute)

    def save_settings(self, folder: Path) -> None:
        """Write configuration and tokenizer in transformers' format, without weights."""
        self.model.save_pretrained(folder, state_dict={})
        self.model.config.dtype = self.compute  # save_pretrained has set it to the dtype of the shards
        self.model.config.save_pretrained(folder)
        try:
            self.tokenizer.save_pretrained(folder)
        except Exception as error:  # tokenizers raises a bare one on a full disk
            raise OSError(str(error)) from error


def resolve_device(name: str) -> torch.device:
    """Return a device by name; ``auto`` is CUDA if available, else the CPU. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"run.device: expected auto, cpu, cuda or cuda:N, got {name!r}") from error
    here = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if here is not None and here.type == device.type else 0
    if device.type != "cpu" and (device.index or 0) >= count:
        raise ConfigError(f"run.device: expected a device of this machine, got {name!r}: torch finds {count}")
    return device


def load_model(
    path: str | Path,
    config: ModelConfig,
    device: torch.device,
    attention: str,
    dtype: torch.dtype | None = None,
    *,
    needs_head: bool = True,
) -> Any:
    """Load a causal language model of transformers in eval mode from safetensors. Raises ConfigError, also for weights
    that the files lack, which transformers draws at random, unless they are a head that is not needed.

    Code in the model's folder runs only with `model.trust_remote_code`. On the meta device no weights are read. The
    default of ``dtype`` is `model.dtype`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    trust = {"trust_remote_code": config.trust_remote_code}
    with loading("model.path", "a model", path):
        model_config = AutoConfig.from_pretrained(path, **trust)
        softcap = getattr(model_config.get_text_config(decoder=True), "attn_logit_softcapping", None)
        if attention == "sdpa" and softcap is not None:
            attention = "eager"  # torch has no softcap: transformers before 5.24 left it out, later versions refuse
        options = {"dtype": dtype or DTYPES[config.dtype], "attn_implementation": attention}
        if device.type == "meta":
            with device:
                model = AutoModelForCausalLM.from_config(model_config, **options, **trust)
            with suppress(OSError):  # it is optional; keep it, because checkpoints include it
                model.generation_config = GenerationConfig.from_pretrained(path)
        else:
            options |= {"use_safetensors": True, "output_loading_info": True}
            model, found = AutoModelForCausalLM.from_pretrained(path, **options, **trust)
            head = () if needs_head else [id(parameter) for parameter in model.get_output_embeddings().parameters()]
            if getattr(model, "peft_config", None):  # transformers has put it on the model without a word
                raise ValueError("its folder holds an adapter too. Remove adapter_config.json, or merge it")
            weights = model.state_dict(keep_vars=True)
            if lost := [name for name in found["missing_keys"] if id(weights.get(name)) not in head]:
                raise ValueError(f"its files lack {len(lost)} weights, such as {min(lost)}")
    return _in_own_memory(model.to(device)).eval()


@torch.no_grad()
def _in_own_memory(model: Any) -> Any:
    """Copy weights out of a file's memory map, where their alignment depends on the length of the file's header.

    The rounding of matrix products on a CPU depends on alignment, and a resumed run reads a different file.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNED:
            parameter.data = parameter.data.clone()
    return model


def load_tokenizer(path: str | Path, config: ModelConfig) -> Any:
    """Load the tokenizer of a model folder. Raises ConfigError if there is none, or transformers loads it wrongly."""
    from transformers import AutoTokenizer

    with loading("model.path", "a tokenizer", path):
        options = {"clean_up_tokenization_spaces": False, "mistral_format": False}  # that has no chat template
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code, **options)
    # Byte-level tokens can have sentencepiece's class, as in copies of DeepSeek-R1-Distill-Llama.
    if (word := tokenizer.get_vocab().get("Ġthe")) is not None and tokenizer.decode([word]) == "Ġthe":
        cure = "Set tokenizer_class to PreTrainedTokenizerFast in its tokenizer_config.json."
        raise ConfigError(f"model.path: transformers loads the tokenizer of {path} without its spaces. {cure}")
    return tokenizer


def load_policy(
    path: str | Path,
    config: ModelConfig,
    device: torch.device,
    seed: int = 0,
    world: World = SINGLE_PROCESS,
    routing_replay: bool = False,
    role: Role = "policy",
) -> Policy:
    """Load a model with packed attention and check its architecture with ``check_policy``. Raises ConfigError.

    With several ranks, rank 0 reads the files and the weights are sharded. ``seed`` initializes adapters, which only a
    policy has. A value head is new. The output head of a critic does not train, nor does a reference.
    """
    if role in ("critic", "reference"):
        checkpointing = config.gradient_checkpointing if role == "critic" else False
        config = config.model_copy(update={"lora": None, "gradient_checkpointing": checkpointing})
    compute, root = DTYPES[config.dtype], None
    if world.is_single_process:
        model = _build(path, config, device, seed, compute, role)
        _prepare(model, config)
    else:
        model, root = load_shards(path, config, seed, world, role)
        cpu, dtype = torch.device("cpu"), _shard_dtype(config, role)
        fill(model, world.run_on_rank0(lambda: _build(path, config, cpu, seed, dtype, role)), device)
    routing = Routing(model) if routing_replay else None
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    kernel = choose_kernel(config.attention, device, compute, has_windows=window is not None)
    policy = Policy(model, load_tokenizer(path, config), kernel, compute, world, root, routing, config.float32_logits)
    policy.run(lambda: check_policy(policy))
    return policy


def load_shards(
    path: str | Path, config: ModelConfig, seed: int, world: World, role: Role = "policy"
) -> tuple[Any, Root | None]:
    """Build a model on the meta device, sharded if there are several ranks. Reads no weights. Raises ConfigError."""
    dtype = DTYPES[config.dtype] if world.is_single_process else _shard_dtype(config, role)
    model = _build(path, config, torch.device("meta"), seed, dtype, role)
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    if heads % world.layout.sequence:
        raise ConfigError(
            f"parallel.sequence: expected a divisor of the model's {heads} attention heads, got {world.layout.sequence}"
        )
    _prepare(model, config)
    return model, None if world.is_single_process else shard(model, _blocks(model), world, DTYPES[config.dtype])


def _shard_dtype(config: ModelConfig, role: Role) -> torch.dtype:
    """Return the dtype of the base weights: float32 if they train."""
    return torch.float32 if role != "reference" and config.lora is None else DTYPES[config.dtype]


def _build(
    path: str | Path, config: ModelConfig, device: torch.device, seed: int, dtype: torch.dtype, role: Role
) -> Any:
    """Load a model, add adapters and a value head, and set which weights train."""
    needs_head = role != "critic"
    model = load_model(path, config, device, register_packed_attention(), dtype, needs_head=needs_head)
    if role != "reference" and model.can_generate():  # transformers saves none with an invalid generation config
        with loading("model.path", "a model", path):
            try:
                model.generation_config.validate(strict=True)
            except ValueError:  # often a temperature without do_sample
                model.generation_config.do_sample = True
                model.generation_config.validate(strict=True)
    if config.lora is not None:
        add_adapters(model, config.lora, seed)
    if role == "critic":
        model.value_head = ValueHead(model.config.get_text_config(decoder=True).hidden_size, device, dtype)
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            model.get_output_embeddings().requires_grad_(False)
    if role == "reference":
        model.requires_grad_(False)
    return model


def _blocks(model: Any) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]


def _prepare(model: Any, config: ModelConfig) -> None:
    """Turn on gradient checkpointing and compile the layers, if configured. Raises ConfigError."""
    for key, works in (("compile", _blocks(model)), ("gradient_checkpointing", model.supports_gradient_checkpointing)):
        if getattr(config, key) and not works:
            raise ConfigError(f"model.{key}: is not supported with {type(model).__name__}. Set it to false.")
    if config.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.24 on
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        if config.compile or config.gradient_checkpointing == "offload":
            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=partial(_checkpoint, config))
        for module in model.modules():  # layers are recomputed in train mode; in it their parts would draw at random
            module.training = getattr(module, "gradient_checkpointing", False)
            for key in [key for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]:
                setattr(module, key, 0.0)
    if config.compile:
        # All layers share one compilation for any number of positions. Attention is not compiled.
        for block in _blocks(model):
            block.compile(dynamic=True)
    if config.compile and config.gradient_checkpointing:
        # Else a layer may be recomputed by another of its graphs, which is an error (pytorch issue 166926).
        torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]


@cache
def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    return torch.compile(function, dynamic=True)  # again for each call of a layer would take longer than the layer


@torch.compiler.disable
def _checkpoint(config: ModelConfig, layer: Callable[..., T], *arguments: Any) -> T:
    """Checkpoint a layer. With ``offload`` its inputs are in host memory until the backward pass."""
    if config.compile and isinstance(layer, partial) and isfunction(layer.func):
        # transformers from 5.23 on passes ``forward``, not a compiled call
        layer = partial(_compiled(layer.func), *layer.args, **layer.keywords)
    offload = config.gradient_checkpointing == "offload"
    # Not transformers' own context: it pins memory, which fails without CUDA.
    with save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext():
        return cast(T, checkpoint(layer, *arguments, use_reentrant=False))


@torch.no_grad()
def check_policy(policy: Policy) -> None:
    """Run a few tokens. Raise ConfigError if the architecture does not support packing, shared prefixes or the loss."""
    name, config, path = type(policy.model).__name__, policy.model.config, policy.model.name_or_path
    vocab_size = config.get_text_config(decoder=True).vocab_size

    def hidden_of(ids: Tensor, lengths: list[int]) -> Tensor:
        return policy.run_body(ids, torch.cat([torch.arange(n) for n in lengths]), lengths)

    def logits() -> Tensor:
        packing = plan_packing([len(ids)], policy.device, policy.kernel)
        out = policy.model(input_ids=ids.to(policy.device)[None], use_cache=False, packing=packing)
        return cast(Tensor, out.logits[0])

    ids = torch.arange(9) % vocab_size
    try:
        if not (hidden := hidden_of(ids, [len(ids)])).isfinite().all():
            raise ValueError(
                f"weights of {path} that are not finite, or overflow in model.dtype. To go on from an "
                "earlier checkpoint, set run.from=RUN@STEP and a smaller optimizer.lr"
            )
        if not is_packable(hidden_of, vocab_size):
            raise ValueError(f"the packed sequences of {name} see each other")
        if not is_causal(hidden_of, vocab_size):
            raise ValueError(f"tokens of {name} see later ones")
        if LogitRule.of(config, 1.0) != LogitRule(policy.head.softcap, 1.0):
            raise ValueError(f"{name} scales its logits")
        check_logits(policy.model, hidden, logits)
    except (ValueError, TypeError, AttributeError) as error:  # some models pass no options to their attention
        raise ConfigError(f"model.path: requires finite weights and packing, got {name} of {path}: {error}") from error
    if policy.routing is not None:
        policy.routing.check(lambda: hidden_of(ids, [len(ids)]), n_positions=len(ids))
