"""What a test starts on several ranks: `python gradients.py CASES OUT`. The gradient of the last update of a step for
each case, and what that update reported, as rank 0 sees them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builders import make_config, paired, random_sequences
from launch import leave

from dapo_runner.config import Config
from dapo_runner.parallel.sharding import whole
from dapo_runner.parallel.watch import launched
from dapo_runner.parallel.world import ALONE, World, make_layout, make_world
from dapo_runner.policy.model import load_policy, load_reference
from dapo_runner.timing import StepClock
from dapo_runner.update.learner import NonFiniteUpdateError, step_figures, uses_reference
from dapo_runner.update.pairs import make_learner


def open_case(config: Config) -> World:
    if not launched():
        return ALONE
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return make_world(make_layout(config, size, size), rank, "cpu")


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    path, n_sequences, poisoned = case.pop("path"), case.pop("sequences", 14), case.pop("poisoned", False)
    config = make_config(**case)
    world = open_case(config)
    cpu = torch.device("cpu")
    policy = load_policy(path, config.model, cpu, seed=5, world=world, routing_replay=config.loss.routing_replay)
    reference = None
    if uses_reference(config) and config.model.lora is None:
        reference = load_reference(path, config.model, cpu, world)
    learner = make_learner(policy, config, reference, StepClock())
    if config.model.lora is not None:
        with torch.no_grad():  # B = 0 would leave A without a gradient
            for name, parameter in policy.model.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(parameter * 0 + 0.01)
    sequences = random_sequences(n_sequences)
    if config.preference is not None:
        sequences = paired(sequences)
    if poisoned:
        sequences[0].advantages[-1] = float("inf")  # one rank's alone
    *earlier, mini = learner.prepare(sequences)
    for one in earlier:
        learner.update(one, 0)
    found: dict[str, torch.Tensor] = {}
    step = learner.optimizer.step

    def keep_gradients() -> None:
        found.update({name: whole(p.grad).clone() for name, p in learner.master.tensors.items() if p.grad is not None})
        step()

    learner.optimizer.step = keep_gradients  # type: ignore[method-assign]
    try:
        figures = learner.update(mini, 0)
    except NonFiniteUpdateError as error:
        told = world.gather(str(error))
        assert told == [told[0]] * world.size
        return {"stopped": told[0]}
    figures |= step_figures([mini], [figures], world)
    weights = dict(policy.named_weights())
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
