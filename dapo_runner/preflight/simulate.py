"""One rank of many, without the others and without their memory: what `--simulate` measures.

The model's real class goes through the real sharding, loss and optimizer as rank 0, on tensors without contents, in
torch's fake process group. Attention is torch's varlen kernel, whose shapes are known here, the fused loss takes the
buffers that it would on a GPU, and `model.compile` is off.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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

from dapo_kernels.engine.chunks import device_chunk_rows, row_stride
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.losses import PolicyLoss
from dapo_runner.algorithms.mini_batch import MiniBatch
from dapo_runner.algorithms.objective import resolve_objective
from dapo_runner.algorithms.packing import pack
from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.sharding import add_up_over_replicas, whole_until_backward
from dapo_runner.parallel.world import World, make_layout, make_world
from dapo_runner.policy.model import DTYPES, Policy, load_shards
from dapo_runner.preflight.memory import GPUS_OF_A_MACHINE, PUBLISHED, model_values
from dapo_runner.preflight.needs import heads_that_do_not_divide
from dapo_runner.types import PackedBatch, Sequence

# FSDPMemTracker's kinds of memory, as a reader knows them.
KINDS = {
    "weights, this rank's shard": ("Sharded Param", "Buffer"),
    "AdamW moments": ("OptState",),
    "gradients, this rank's shard": ("Sharded Grad",),
    "weights gathered for a pass": ("Unsharded Param", "All Gather"),
    "gradients on their way": ("Unsharded Grad", "Reduce Scatter"),
    "activations, the loss, passing tensors": ("Activation", "Temp", "Inputs"),
}
COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}


class Traffic(NamedTuple):
    """Collectives of one kind: how many, and the bytes of the whole tensors, of which a rank sends and receives all but
    its own share (of an all-reduce: twice that).
    """

    calls: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Simulation:
    """Of rank 0: bytes by kind when the most is in use, those held between updates, and what a micro-batch sends."""

    positions: int  # of a micro-batch, on this rank
    peak: dict[str, int]
    held: int
    largest_parameter: int  # numbers in it
    forward: dict[str, Traffic]
    backward: dict[str, Traffic]


def simulate(config: Config) -> Simulation:
    """Run the last micro-batch of an update, a full one, and the optimizer, as rank 0 of `parallel.gpus`.

    Raises ConfigError where the model or the layout is not possible, or the model's sizes are not known here.
    """
    if config.preference is not None:
        raise ConfigError("preference: expected null with --simulate, which knows the update of single responses")
    if config.parallel.gpus == 1:
        raise ConfigError("parallel.gpus: expected more than 1 for --simulate, got 1; --dry-run plans for one device")
    with _pretended_ranks(config) as world, _model_folder(config) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model, root = load_shards(folder, config.model.model_copy(update={"compile": False}), config.run.seed, world)
        policy = Policy(model, None, "varlen", DTYPES[config.model.dtype], world, root)
        return _simulate_update(config, policy, root)


def _simulate_update(config: Config, policy: Policy, root: Any) -> Simulation:
    mini = full_mini_batch(config, policy.world)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        policy.model.to_empty(device="cpu")
        learner = Learner(policy, config, reference=policy)
        batch = _Shapes(**{name: mode.from_tensor(x) for name, x in mini.micro_batches[0].tensors().items()})
        _give_gradients(learner)
        _step(learner)  # makes the moments
        _give_gradients(learner)  # of the micro-batches before this one
        with FSDPMemTracker(root, learner.optimizer) as tracker, Observer() as observer:
            add_up_over_replicas(root, True)
            with whole_until_backward(root, not config.parallel.reshard_after_forward):
                out = learner.compute_loss(mini, batch)
                forward, observer.seen = observer.seen, {}
                out.loss.backward()
                del out
            _step(learner)
            peak, held = (tracker.get_tracker_snapshot(when)[torch.device("cpu")] for when in ("peak", "current"))
    return Simulation(
        positions=batch.n_positions // policy.world.layout.sequence,
        peak={kind: sum(int(peak[part]) for part in parts) for kind, parts in KINDS.items()},
        held=int(held["Total"]),
        largest_parameter=max(parameter.numel() for parameter in policy.model.parameters()),
        forward=forward,
        backward=observer.seen,
    )


@contextmanager
def _pretended_ranks(config: Config) -> Iterator[World]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    gpus = config.parallel.gpus
    layout = make_layout(config, gpus, min(gpus, GPUS_OF_A_MACHINE))
    if refused := list(heads_that_do_not_divide(config, layout)):
        raise ConfigError("\n".join(refused))
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    try:
        yield make_world(layout, 0, "cpu")
    finally:
        dist.destroy_process_group()


@contextmanager
def _model_folder(config: Config) -> Iterator[Path]:
    """Make one with a config.json and no weights."""
    values = model_values(config.model)
    if values is None or config.model.path is None:
        raise ConfigError(
            f"model.path: expected a folder with a config.json or one of {', '.join(PUBLISHED)}, got "
            f"{config.model.path!r}; --simulate downloads nothing"
        )
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        yield Path(name)


def full_mini_batch(config: Config, world: World) -> MiniBatch:
    """Return a single sequence, and a micro-batch that is full of it; of the rank that has it."""
    budget = config.optimizer.token_budget
    ones = torch.ones(budget + 1)
    sequence = Sequence(ones.long(), ones, ones.bool(), -ones, group_id=0)
    objective = resolve_objective(config)
    batches = pack([sequence], budget, world.layout.sequence)
    mini = MiniBatch(batches, n_tokens=budget, denominator=PolicyLoss(objective).denominator([sequence]))
    if objective.needs_reference:
        mini.micro_batches = [replace(batch, ref_logprobs=batch.old_logprobs) for batch in batches]
    return mini


class _Shapes(PackedBatch):
    """Where a pass would read the values of a batch, what they are."""

    stale = False

    @property
    def lengths(self) -> list[int]:
        return [self.n_positions]


def _give_gradients(learner: Learner) -> None:
    for parameter in learner.master.tensors.values():
        parameter.grad = torch.zeros_like(parameter)


def _step(learner: Learner) -> None:
    learner.trained.clip_gradients()
    learner.trained.step(learner.config.optimizer.lr)


class Observer(TorchDispatchMode):
    """Counts collectives by kind, and lets the fused loss of a simulation take what it would on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Traffic] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again as operations on shards
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
    """Take the logits of a chunk, and return what stays beside them until the loss is made: over several chunks the
    float32 sum of the head's gradient, which is rounded to the result once the logits are gone.
    """
    hidden, weight = values["head_hidden"], values["head_weight"]
    logit = 4 if values["head_float32_logits"] else hidden.element_size()
    sum_bytes = 4 * weight.numel() if values.get("needs_weight") and weight.element_size() < 4 else 0
    n, vocabulary = len(hidden), len(weight)
    rows = device_chunk_rows(n, vocabulary, logit, values["plan_chunk_bytes"], sum_bytes)
    total: Tensor = hidden.new_empty(sum_bytes if rows < n else 0, dtype=torch.uint8)
    hidden.new_empty(rows * row_stride(vocabulary) * logit, dtype=torch.uint8)
    return total
