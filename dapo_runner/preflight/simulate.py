"""Simulate one rank of many without other ranks and without allocating memory (`--simulate`).

Model, sharding, loss and optimizer are the real ones, as rank 0, on fake tensors and in torch's fake process group.
Attention is torch's varlen kernel, because torch knows its output shapes. The fused loss allocates the buffers of a
GPU. `model.compile` is off. The meta device stands for a single GPU, so that offloaded tensors are on another device.
"""

from __future__ import annotations

import json
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dapo_kernels.engine.chunks import device_chunk_rows, row_stride
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.losses import PolicyLoss
from dapo_runner.algorithms.mini_batch import MiniBatch
from dapo_runner.algorithms.packing import count_group_tokens, pack_shares
from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.sharding import add_up_over_replicas, whole_until_backward
from dapo_runner.parallel.world import SINGLE_PROCESS, World, make_layout, make_world
from dapo_runner.policy.model import DTYPES, Policy, load_shards
from dapo_runner.preflight import memory
from dapo_runner.preflight.memory import GPUS_OF_A_MACHINE, PUBLISHED, host_estimate, model_shape, model_values
from dapo_runner.types import PackedBatch, TrainingSequence

# FSDPMemTracker's kinds of memory, by readable labels.
KINDS = {
    "weights, this rank's shard": ("Sharded Param", "Buffer"),
    "AdamW moments": ("OptState",),
    "gradients, this rank's shard": ("Sharded Grad",),
    "weights gathered for a pass": ("Unsharded Param", "All Gather"),
    "gradients on their way": ("Unsharded Grad", "Reduce Scatter"),
    "activations, the loss, passing tensors": ("Activation", "Temp", "Inputs"),
}
KINDS_OF_ONE = {"weights, gradients, moments": ("Held",), "activations, the loss, passing tensors": ("Rest",)}
COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}


class Traffic(NamedTuple):
    """Collectives of one kind: their number, and the bytes of their whole tensors. Of these a rank sends and receives
    all but its own share; in an all-reduce twice that.
    """

    calls: int = 0
    bytes: int = 0


class Simulation(NamedTuple):
    """Measurements of rank 0: bytes by kind at the peak, bytes between updates, collectives of a micro-batch."""

    positions: int  # of a micro-batch, on this rank
    peak: dict[str, int]
    logprobs: int  # largest number of bytes while log-probs are computed
    host: int  # bytes that are offloaded to the host; by formulas: a sleeping engine, a judge, copies for checkpoints
    held: int  # bytes between updates
    largest: int  # bytes of the largest parameter
    forward: dict[str, Traffic]
    backward: dict[str, Traffic]


def simulate(config: Config) -> Simulation:
    """Run the last micro-batch of an update at full size, and the optimizer, as rank 0 of `parallel.gpus`.

    Raises ConfigError if the model or the layout is not supported, or the model's sizes are unknown.
    """
    if config.parallel.gpus > 1 and torch.__version__ < "2.12":  # its tracker counts whole tensors as a rank's moments
        raise ConfigError(f"--simulate: requires torch 2.12 with several GPUs, got {torch.__version__}")
    for key in ("preference", "distillation"):
        if getattr(config, key) is not None:
            raise ConfigError(f"{key}: is not supported with --simulate")
    with _pretended_ranks(config) as world, _model_folder(config) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracker
        model, root = load_shards(folder, config.model.model_copy(update={"compile": False}), config.run.seed, world)
        dtype, wide = DTYPES[config.model.dtype], config.model.float32_logits
        policy = Policy(model, None, "varlen", dtype, world, root, float32_logits=wide)
        return _simulate_update(config, policy, root)


def _simulate_update(config: Config, policy: Policy, root: Any) -> Simulation:
    mini = full_mini_batch(config, policy.world)
    host, device = torch.device("cpu"), torch.device("meta" if root is None else "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        policy.model.to_empty(device=device)
        policy.model.tie_weights()  # a parameter that becomes fake is replaced in each of its modules
        learner = Learner(policy, config, reference=policy)
        learner.trained.scaler = torch.amp.GradScaler("cpu", enabled=False)  # it would read gradient values
        batch = _Shapes(**{name: mode.from_tensor(x) for name, x in mini.micro_batches[0].tensors().items()})
        _make_moments(learner)
        make_tracker = partial(LiveBytes, learner) if root is None else partial(FSDPMemTracker, root, learner.optimizer)
        with make_tracker() as tracker, Observer():
            learner.logprobs(batch)
            logprobs = int(tracker.get_tracker_snapshot("peak")[device]["Total"])
        _give_gradients(learner)  # of the previous micro-batches
        with make_tracker() as tracker, Observer() as observer:
            add_up_over_replicas(root, True)
            with whole_until_backward(root, not config.parallel.reshard_after_forward):
                out = learner.compute_loss(mini, batch)
                forward, observer.seen = observer.seen, {}
                out.loss.backward()
                del out
            _step(learner)
            peak, held = (tracker.get_tracker_snapshot(when) for when in ("peak", "current"))
    kinds, shape = KINDS_OF_ONE if root is None else KINDS, model_shape(config.model)
    estimate = {} if shape is None else host_estimate(config, shape)
    return Simulation(
        positions=batch.n_positions // policy.world.layout.sequence,
        peak={kind: sum(int(peak[device][part]) for part in parts) for kind, parts in kinds.items()},
        logprobs=logprobs,
        host=sum(estimate.get(what, 0) for what in (memory.ASLEEP, memory.COPIES, memory.JUDGE))
        + (int(peak[host]["Total"]) if host != device and host in peak else 0),
        held=int(held[device]["Total"]),
        largest=max(map(torch.numel, policy.model.parameters())) * memory.BYTES[config.model.dtype],
        forward=forward,
        backward=observer.seen,
    )


@contextmanager
def _pretended_ranks(config: Config) -> Iterator[World]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    gpus = config.parallel.gpus
    layout = make_layout(config, gpus, min(gpus, GPUS_OF_A_MACHINE))
    if gpus == 1:
        yield SINGLE_PROCESS
        return
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    try:
        yield make_world(layout, 0, "cpu")
    finally:
        dist.destroy_process_group()


@contextmanager
def _model_folder(config: Config) -> Iterator[Path]:
    """Make a folder with the model's config.json and no weights."""
    values = model_values(config.model)
    if values is None or model_shape(config.model) is None or config.model.path is None:
        raise ConfigError(
            "model.path: expected a folder whose config.json has hidden_size and the like, or one of "
            f"{', '.join(PUBLISHED)}, got {config.model.path!r}; --simulate downloads nothing"
        )
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        yield Path(name)


def full_mini_batch(config: Config, world: World) -> MiniBatch:
    """Return a mini-batch with one sequence that fills a micro-batch."""
    budget, objective = memory.largest_micro_batch(config), config.objective
    ones = torch.ones(budget + 1)
    sequence = TrainingSequence(ones.long(), ones, ones.bool(), -ones, group_id=0)
    (batches,) = pack_shares([sequence], budget, multiple=world.layout.sequence)
    denominator, group_tokens = PolicyLoss(objective).denominator([sequence]), count_group_tokens([sequence])
    mini = MiniBatch(batches, budget, denominator, group_tokens=group_tokens)
    if objective.needs_reference:
        mini.micro_batches = [replace(batch, ref_logprobs=batch.old_logprobs) for batch in batches]
    return mini


class _Shapes(PackedBatch):
    """A batch of fake tensors: where a pass would read values, they are known here."""

    stale = False

    @property
    def lengths(self) -> list[int]:
        return [self.n_positions]


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live tensors by device, including those of a learner, like FSDPMemTracker."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self._live, self._peak, self._seen = Counter[torch.device](), Counter[torch.device](), WeakIdKeyDictionary()
        model, masters, states = learner.policy.model, learner.master.tensors.values(), learner.optimizer.state.values()
        self._add([*model.parameters(), *model.buffers(), *masters, *(tensor.grad for tensor in masters)])
        self._add([tensor for state in states for tensor in state.values()])
        self._start = self._live.copy()

    def get_tracker_snapshot(self, when: str) -> dict[torch.device, dict[str, int]]:
        found, start = self._peak if when == "peak" else self._live, self._start
        return {at: {"Held": start[at], "Rest": size - start[at], "Total": size} for at, size in found.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._add(tree_leaves(result))
        return result

    def _add(self, values: Iterable[Any]) -> None:
        for tensor in values:
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                self._seen[storage] = None
                self._live[tensor.device] += storage.nbytes()
                self._peak[tensor.device] = max(self._peak[tensor.device], self._live[tensor.device])
                weakref.finalize(storage, self._live.subtract, {tensor.device: storage.nbytes()})


def _give_gradients(learner: Learner) -> None:
    for parameter in learner.master.tensors.values():
        parameter.grad = torch.zeros_like(parameter)


def _make_moments(learner: Learner) -> None:
    if learner.policy.root is None:  # AdamW's fused kernel does not support the meta device
        for master in learner.master.tensors.values():
            learner.optimizer.state[master] = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        learner.optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    else:
        _give_gradients(learner)
        _step(learner)


def _step(learner: Learner) -> None:
    learner.trained.clip_gradients()
    learner.trained.step(learner.config.optimizer.lr)


class Observer(TorchDispatchMode):
    """Count collectives by kind, and allocate the buffers that the fused loss would allocate on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Traffic] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # called again with operations on shards
        buffers = None
        if func.namespace == "dapo_kernels" and func._opname.startswith("linear_"):
            names = (argument.name for argument in func._schema.arguments)
            buffers = _loss_buffers(dict(zip(names, args, strict=False)))
        if func.namespace == "c10d" and func._opname in COLLECTIVES:
            kind = COLLECTIVES[func._opname]
            size = max(x.numel() * x.element_size() for x in tree_leaves(args) if isinstance(x, Tensor))
            calls, total = self.seen.get(kind, Traffic())
            self.seen[kind] = Traffic(calls + 1, total + size)
        result = func(*args, **(kwargs or {}))
        del buffers
        return result


def _loss_buffers(values: dict[str, Any]) -> Tensor:
    """Allocate and free the logits of a chunk. Return the buffer that lives until the loss is computed: with several
    chunks the float32 sum of the head's gradient, which is converted to the result at the end.
    """
    hidden, weight = values["head_hidden"], values["head_weight"]
    logit = 4 if values["head_float32_logits"] else hidden.element_size()
    sum_bytes = 4 * weight.numel() if values.get("needs_weight") and weight.element_size() < 4 else 0
    n, vocabulary = len(hidden), len(weight)
    rows = device_chunk_rows(n, vocabulary, logit, values["plan_chunk_bytes"], sum_bytes)
    total: Tensor = hidden.new_empty(sum_bytes if rows < n else 0, dtype=torch.uint8)
    hidden.new_empty(rows * row_stride(vocabulary) * logit, dtype=torch.uint8)
    return total
