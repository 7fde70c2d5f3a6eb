"""The policy: a transformers causal language model, run over packed sequences down to its hidden states.

The logits are never made here. ``Policy.head`` is what `dapo_kernels` needs to do its part from the hidden
states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dapo_kernels import LoraFactors
from dapo_kernels.integrations.heads import lora_of
from dapo_runner.config import ConfigError, ModelConfig
from dapo_runner.parallel.sharding import Root, fill, shard
from dapo_runner.parallel.ulysses import own_positions
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.attention import (
    PACKED_ATTENTION,
    Kernel,
    choose_kernel,
    packed_attention,
    plan_packing,
    register_packed_attention,
)
from dapo_runner.policy.lora import add_adapters, merged_weights
from dapo_runner.policy.prefixes import find_shared
from dapo_runner.policy.routing import Routing
from dapo_runner.policy.value_head import add_value_head, is_of_value_head
from dapo_runner.types import PackedBatch

T = TypeVar("T")
Heads = Literal["tokens", "both", "values"]  # which of a model train: of a policy, one with a critic in it, a critic
ALIGNED = 64  # bytes, as torch aligns what it allocates
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Head(NamedTuple):
    """softcap(hidden · weightᵀ + bias): weight [V, H], bias [V] or None, softcap or None; an adapter of the weight."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    lora: LoraFactors | None


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A model with packed attention, and the tokenizer it belongs to. ``compute`` is the dtype that it runs in.

    Where its weights are sharded, it has a ``root``, and runs inside of ``run`` only. With ``routing`` it goes to the
    experts that a batch names.
    """

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any
    kernel: Kernel
    compute: torch.dtype = torch.float32
    world: World = SINGLE_PROCESS
    root: Root | None = None
    routing: Routing | None = None

    def run(self, work: Callable[[], T]) -> T:
        """What ``work`` gives where the weights are whole. Collective: every rank runs equally often."""
        return work() if self.root is None else self.root(work)

    @property
    def device(self) -> torch.device:
        return self._output_layer.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._output_layer.weight.dtype

    @property
    def head(self) -> Head:
        """The output head; with tied embeddings its weight is the embedding itself."""
        layer, config = self._output_layer, self.model.config.get_text_config(decoder=True)
        softcap, lora = getattr(config, "final_logit_softcapping", None), lora_of(layer)
        lora = None if lora is None else lora.to(layer.weight.dtype)
        return Head(layer.weight, getattr(layer, "bias", None), softcap, lora)

    @property
    def _output_layer(self) -> Any:
        return self.model.get_output_embeddings()

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """What the head is applied to: [T, H] in the model's dtype, or [T/W, H] where W ranks share the positions.
        ``batch`` may lie on any device.
        """
        if self.routing is not None:
            self.routing.follow(None if batch.experts is None else batch.experts.to(self.device))
        return self._body(batch.input_ids, batch.position_ids, batch.lengths, self.world.sequence_group)

    def chosen_experts(self) -> Tensor | None:
        """Of the last pass, as ``PackedBatch.experts``; None without routing replay."""
        return None if self.routing is None else self.routing.chosen()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model once, whole and with adapters merged in, for an engine's ``update_weights``.
        Collective, and one parameter at a time.
        """
        return (pair for pair in merged_weights(self.model, self.compute) if not is_of_value_head(pair[0]))

    def save_settings(self, folder: Path) -> None:
        """Write configuration and tokenizer in transformers' format, without weights."""
        self.model.save_pretrained(folder, state_dict={})
        self.model.config.dtype = self.compute  # transformers has put that of the shards
        self.model.config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _body(
        self, input_ids: Tensor, position_ids: Tensor, lengths: list[int], group: dist.ProcessGroup | None = None
    ) -> Tensor:
        # The kernels of flash-attn and torch's varlen want every sequence laid out in full, as do ranks that share it.
        distinct = find_shared(input_ids.cpu(), lengths) if self.kernel == "sdpa" and group is None else None
        if distinct is not None:
            source = distinct.source.to(input_ids.device)
            input_ids, position_ids = input_ids[source], position_ids[source]
        # use_cache=False is not only thrift: with a cache, transformers lets packed sequences see each other.
        output = self.model.base_model(
            input_ids=own_positions(input_ids, group).to(self.device)[None],
            position_ids=own_positions(position_ids, group).to(self.device)[None],
            use_cache=False,
            packing=plan_packing(lengths, self.device, self.kernel, distinct, group),
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden if distinct is None else hidden.index_select(0, distinct.place.to(self.device))


def resolve_device(name: str, key: str = "run.device") -> torch.device:
    """``auto``: CUDA where there is one, else the CPU. Raises ConfigError when the device of ``key`` is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{key}: expected auto, cpu, cuda or cuda:N, got {name!r}") from error
    here = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if here is not None and here.type == device.type else 0
    if device.type != "cpu" and (device.index or 0) >= count:
        found = f"torch finds {count or 'none'} of that kind here"
        raise ConfigError(f"{key}: expected a device of this machine, got {name!r}, but {found}")
    return device


def load_model(
    path: str | Path, config: ModelConfig, device: torch.device, attention: str, dtype: torch.dtype | None = None
) -> Any:
    """A transformers causal language model in eval mode, from safetensors, running no code from the model's
    folder unless `model.trust_remote_code` says so. ``dtype``: None for `model.dtype`. On the meta device its shapes
    alone are made. Raises ConfigError when there is no such model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    loading = {"dtype": dtype or DTYPES[config.dtype], "attn_implementation": attention}
    trust = {"trust_remote_code": config.trust_remote_code}
    try:
        if device.type == "meta":
            with device:
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, **trust), **loading, **trust)
            with suppress(OSError):  # there may be none; a checkpoint's model has it too
                model.generation_config = GenerationConfig.from_pretrained(path)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, use_safetensors=True, **loading, **trust)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot load a model from {str(path)!r}: {_first_line(error)}") from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # two passes over one policy must give one answer, in train mode (checkpointing) too
    return _in_own_memory(model.to(device)).eval()


@torch.no_grad()
def _in_own_memory(model: Any) -> Any:
    """Where a file's memory holds the weights, copy them: how they lie there depends on the length of its header, and
    by that a matrix product on a CPU chooses how it rounds. A resumed run reads another file than the first one.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNED:
            parameter.data = parameter.data.clone()
    return model


def load_tokenizer(path: str | Path, config: ModelConfig) -> Any:
    """The tokenizer of a model folder. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot load a tokenizer from {str(path)!r}: {_first_line(error)}") from error


def load_policy(
    path: str | Path,
    config: ModelConfig,
    device: torch.device,
    seed: int = 0,
    world: World = SINGLE_PROCESS,
    routing_replay: bool = False,
    heads: Heads = "tokens",
) -> Policy:
    """The model to train, checked by ``check_policy``. ``seed`` draws the adapters, where there are any. Sharded over
    the ``world``, where that has several ranks: rank 0 reads the files. A value head is a new one.

    Raises ConfigError for a model that cannot be trained packed, or whose routing cannot be replayed.
    """
    return _load_policy(path, config, device, seed, world, routing_replay, trained=True, heads=heads)


def load_reference(
    path: str | Path, config: ModelConfig, device: torch.device, world: World = SINGLE_PROCESS
) -> Policy:
    """A model that is only asked for log-probs: what a KL penalty refers to. Raises ConfigError."""
    config = config.model_copy(update={"lora": None, "gradient_checkpointing": False})
    return _load_policy(path, config, device, 0, world, False, trained=False)


def load_critic(path: str | Path, config: ModelConfig, device: torch.device, world: World = SINGLE_PROCESS) -> Policy:
    """A model with a new value head. All of it trains, but not its head for tokens. Raises ConfigError."""
    return load_policy(path, config.model_copy(update={"lora": None}), device, world=world, heads="values")


def _load_policy(
    path: str | Path,
    config: ModelConfig,
    device: torch.device,
    seed: int,
    world: World,
    routing_replay: bool,
    *,
    trained: bool,
    heads: Heads = "tokens",
) -> Policy:
    compute = DTYPES[config.dtype]
    kernel = choose_kernel(config.attention, device, compute)
    if world.is_single_process:
        model = _load(path, config, device, seed, compute, trained, heads)
        _prepare(model, config, _blocks(model))
        policy = Policy(model, load_tokenizer(path, config), kernel, compute)
    else:
        model, root = load_shards(path, config, seed, world, trained=trained, heads=heads)
        cpu, dtype = torch.device("cpu"), _shard_dtype(config, trained)
        fill(model, world.run_on_rank0(lambda: _load(path, config, cpu, seed, dtype, trained, heads)), device)
        policy = Policy(model, load_tokenizer(path, config), kernel, compute, world, root)
    if routing_replay:
        policy = replace(policy, routing=Routing(model))
    policy.run(lambda: check_policy(policy))
    return policy


def load_shards(
    path: str | Path, config: ModelConfig, seed: int, world: World, *, trained: bool = True, heads: Heads = "tokens"
) -> tuple[Any, Root]:
    """The model of a sharded policy and its root, ready for ``fill``: on the meta device, no weights are read. Raises
    ConfigError.
    """
    model = _load(path, config, torch.device("meta"), seed, _shard_dtype(config, trained), trained, heads)
    blocks = _blocks(model)
    check_sequence_parallel(model, world)
    _prepare(model, config, blocks)
    return model, shard(model, blocks, world, DTYPES[config.dtype])


def _shard_dtype(config: ModelConfig, trained: bool) -> torch.dtype:
    """Of the model's own weights: what trains is float32."""
    return torch.float32 if trained and config.lora is None else DTYPES[config.dtype]


def _load(
    path: str | Path,
    config: ModelConfig,
    place: torch.device,
    seed: int,
    dtype: torch.dtype,
    trained: bool,
    heads: Heads,
) -> Any:
    register_packed_attention()
    model = load_model(path, config, place, PACKED_ATTENTION, dtype)
    if config.lora is not None:
        add_adapters(model, config.lora, seed)
    if heads != "tokens":
        add_value_head(model, place, dtype)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if heads == "values" and not tied:
        model.get_output_embeddings().requires_grad_(False)
    if not trained:
        model.requires_grad_(False)
    return model


def _blocks(model: Any) -> list[nn.Module]:
    """The layers of a model, as transformers names them."""
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]


def _prepare(model: Any, config: ModelConfig, blocks: list[nn.Module]) -> None:
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers recomputes in train mode only
    if config.compile:
        _compile_layers(model, blocks)


def _compile_layers(model: Any, blocks: list[nn.Module]) -> None:
    """Norms, rotations, activations and residual sums of a layer become few passes over memory, with fewer roundings
    between them. All layers share one compilation, for any number of positions; attention stays as it is.
    """
    if not blocks:
        raise ConfigError(f"model.compile: transformers names no layers of {type(model).__name__}; leave it off")
    register_packed_attention(torch.compiler.disable(packed_attention))
    for block in blocks:
        block.compile(dynamic=True)


def check_sequence_parallel(model: Any, world: World) -> None:
    """Raises ConfigError where a model's heads cannot be divided among the ranks that share positions."""
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    if heads % world.layout.sequence:
        raise ConfigError(
            f"parallel.sequence: expected a divisor of the {heads} attention heads of {type(model).__name__}, which "
            f"are divided among the ranks that share a sequence, got {world.layout.sequence}"
        )


@torch.no_grad()
def check_policy(policy: Policy) -> None:
    """See that this architecture means what we take it to mean, on two short sequences.

    Packed sequences must not see each other (state-space layers do), and the model's logits must be our head
    over our hidden states (some models scale them). Raises ConfigError naming what differs.
    """
    vocab_size = policy.model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    first, other, second = (torch.randint(vocab_size, (n,), generator=generator) for n in (5, 5, 9))
    positions = torch.cat([torch.arange(5), torch.arange(9)])
    packed = policy._body(torch.cat([first, second]), positions, [5, 9])
    beside_other = policy._body(torch.cat([other, second]), positions, [5, 9])
    alone = policy._body(second, positions[5:], [9])
    twice = torch.cat([first, second, first, other])  # as the responses of a group begin
    group = policy._body(twice, torch.cat([torch.arange(14), torch.arange(10)]), [14, 10])
    name = type(policy.model).__name__
    # The first comparison is the sharp one: in bfloat16 a leak can be smaller than the rounding between two
    # shapes, but here the shapes are equal, and only expert layers, whose matmuls depend on the routing,
    # round differently at all.
    sharp = max(torch.finfo(packed.dtype).eps / 8, 2e-6)
    if not _close(packed[5:], beside_other[5:], sharp) or not _close(packed[5:], alone):
        raise ConfigError(f"model: {name} cannot be trained on packed sequences, because they see each other")
    apart = [policy._body(twice[:14], torch.arange(14), [14]), policy._body(twice[14:], torch.arange(10), [10])]
    if not _close(group, torch.cat(apart)):
        raise ConfigError(f"model: {name} cannot be trained on packed sequences, because equal beginnings differ")
    head = policy.head
    ours = nn.functional.linear(alone, head.weight, head.bias)
    if head.softcap is not None:
        ours = head.softcap * torch.tanh(ours / head.softcap)
    theirs = policy.model(
        input_ids=second.to(policy.device)[None],
        use_cache=False,
        packing=plan_packing([9], policy.device, policy.kernel),
    ).logits[0]
    if not _close(ours, theirs):
        raise ConfigError(
            f"model: the logits of {name} are not its output head over its last hidden states "
            f"(they differ by {float((ours - theirs).abs().max()):.2g}); models that scale their logits "
            "are not supported"
        )
    if policy.routing is not None:
        policy.routing.check(lambda: policy._body(second, positions[5:], [9]), n_positions=9)


def _close(one: Tensor, other: Tensor, tolerance: float | None = None) -> bool:
    """Equal up to ``tolerance``, by default rounding, as a share of the largest entry."""
    share = 64 * torch.finfo(one.dtype).eps if tolerance is None else tolerance
    return bool((one - other).abs().max() <= share * other.abs().max())


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
