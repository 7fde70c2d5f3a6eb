"""What a test starts on several ranks: `python gradients.py CASES OUT`. The gradient of the last update of a step for
each case, and what that update reported, as rank 0 sees them.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import make_config, paired, random_sequences, with_lists
from launch import leave
from torch.distributed.tensor import DTensor, distribute_tensor

from dapo_runner.algorithms.learner import Learner, step_metrics
from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError
from dapo_runner.algorithms.objective import uses_reference
from dapo_runner.algorithms.weights import MasterWeights
from dapo_runner.config import Config
from dapo_runner.parallel.sharding import whole
from dapo_runner.parallel.watch import launched
from dapo_runner.parallel.world import SINGLE_PROCESS, World, make_layout, make_world
from dapo_runner.policy.model import load_policy
from dapo_runner.types import PackedBatch, Sequence


def open_case(config: Config) -> World:
    if not launched():
        return SINGLE_PROCESS
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return make_world(make_layout(config, size, size), rank, "cpu")


def open_learner(path: str, config: Config, world: World) -> Learner:
    """With a reference and a critic where the configuration wants them; the reference is not where the policy is."""
    cpu, shared = torch.device("cpu"), config.critic is not None and config.critic.share_trunk
    replay = bool(config.loss.routing_replay)
    policy = load_policy(path, config.model, cpu, 5, world, replay, "shared" if shared else "policy")
    reference = critic = None
    if uses_reference(config) and config.model.lora is None:
        reference = load_policy(path, config.model, cpu, world=world, role="reference")
    if reference is not None and (config.advantage.by_token or config.distillation is not None):
        with torch.no_grad():
            for parameter in reference.model.parameters():
                parameter.mul_(1.1)
    if config.critic is not None:
        critic = policy if shared else load_policy(path, config.model, cpu, world=world, role="critic")
        with torch.no_grad():  # zeros would leave the trunk without a gradient
            critic.model.value_head.weight.copy_(critic.model.value_head.weight * 0 + 0.01)
    return Learner(policy, config, reference, critic)


def sequences_for(config: Config, count: int, seed: int = 0) -> list[Sequence]:
    sequences = random_sequences(count, seed)
    if config.preference is not None:
        return paired(sequences)
    if config.env is not None:
        return list(map(with_turns, sequences))
    if config.rollout.sampling_mask:
        return with_lists(sequences, vocab=20)
    if config.loss.routing_replay == "engine":
        return list(map(with_experts, sequences))
    if not config.advantage.by_token:
        return sequences
    return [replace(sequence, reward=n % 3 - 0.7) for n, sequence in enumerate(sequences)]


def with_experts(sequence: Sequence) -> Sequence:
    """Two of eight experts for each of two layers, which follow from the tokens so far."""
    first = sequence.token_ids[:-1].cumsum(0)
    return replace(sequence, experts=torch.stack([(first + k) % 8 for k in (0, 3, 1, 6)], dim=1).to(torch.uint8))


def with_turns(sequence: Sequence) -> Sequence:
    """Every third token is an environment's."""
    own = torch.arange(sequence.length) % 3 > 0
    logprobs = sequence.rollout_logprobs.where(own, 0.0)
    return replace(sequence, mask=sequence.mask & own, rollout_logprobs=logprobs)


def keep_gradients(part: MasterWeights, found: dict[str, torch.Tensor]) -> None:
    """As they are when the optimizer takes them."""
    if part.optimizer is None:
        return
    step = part.optimizer.step

    def keep() -> None:
        for name, tensor in part.tensors.items():
            if tensor.grad is not None:
                found[f"{part.prefix}{name}"] = whole(tensor.grad).clone()
        step()

    part.optimizer.step = keep  # type: ignore[method-assign]


def prepare_shares(learner: Learner, sequences: list[Sequence]) -> list[MiniBatch]:
    """Prepare a step whose sequences rank 0 has. A rank receives what it trains on, and nothing larger than flags."""
    world, gathered = learner.world, list[int]()
    all_gather = dist.all_gather_object

    def all_gather_object(items: list[Any], item: Any, **options: Any) -> None:
        all_gather(items, item, **options)
        gathered.append(len(pickle.dumps(items)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", all_gather_object)
        patch.delattr(dist, "broadcast_object_list")
        minis = learner.prepare(sequences if world.is_main else [])
    assert max(gathered, default=0) < 1000
    own = [(mini.index, i) for mini in minis for batch in mini.micro_batches for i in trained_ids(batch)]
    shares = world.all_gather_object(own)[:: world.layout.sequence]
    trained = [item for share in shares for item in share]
    assert len(trained) == len(set(trained)) == sum(bool(one.mask[1:].any()) for one in sequences)
    return minis


def trained_ids(batch: PackedBatch) -> list[int]:
    ids, groups = batch.sequence_ids.tolist(), batch.group_ids.tolist()
    return [index for index, group in zip(ids, groups, strict=True) if group >= 0]  # of padding −1


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    path, n_sequences, poisoned = case.pop("path"), case.pop("sequences", 14), case.pop("poisoned", 0.0)
    longer_than = case.pop("longer_than", 0)
    config = make_config(**case)
    world = open_case(config)
    learner = open_learner(path, config, world)
    policy = learner.policy
    if config.model.lora is not None:
        with torch.no_grad():  # B = 0 would leave A without a gradient, rows alike that of the head
            for name, parameter in policy.model.named_parameters():
                if ".lora_B." in name:
                    value = torch.linspace(0.0, 0.02, parameter.numel()).view(parameter.shape)
                    if isinstance(parameter, DTensor):
                        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                    parameter.copy_(value)
    sequences = [one for one in sequences_for(config, n_sequences) if one.length > longer_than]
    if poisoned:
        sequences[0].advantages[-1] = poisoned  # one rank's alone
    *earlier, mini = prepare_shares(learner, sequences)
    for one in earlier:
        learner.update(one, 0)
    found: dict[str, torch.Tensor] = {}
    for part in learner.parts():
        keep_gradients(part, found)
    try:
        figures = learner.update(mini, 0)
    except NonFiniteUpdateError as error:
        told = world.all_gather_object(str(error))
        assert told == [told[0]] * world.size
        return {"stopped": told[0]}
    figures |= step_metrics([mini], [figures], world)
    learner.move_reference()
    weights = dict(policy.named_weights())
    for part in learner.parts():
        weights |= {f"{part.prefix}{name}": whole(x.detach()) for name, x in part.tensors.items() if part.prefix}
    return {"gradients": found, "figures": figures, "weights": weights, "n_micro": len(mini.micro_batches)}


def main() -> None:
    cases, out = sys.argv[1:]
    torch.set_num_threads(1)
    if launched():
        dist.init_process_group("gloo")
    results = [run_case(case) for case in json.loads(Path(cases).read_text())]
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main()
    leave()
