"""The collectives of a full micro-batch, forward and backward, as rank 0 makes them, and how many bytes of weights and
moments it holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from builders import make_config
from learners import world_of

from dapo_runner.algorithms.learner import Learner
from dapo_runner.parallel.sharding import add_up_over_replicas, local, whole_until_backward
from dapo_runner.policy.model import load_policy
from dapo_runner.preflight.simulate import Observer, full_mini_batch


def run_case(path: Path, case: dict[str, Any]) -> dict[str, Any]:
    config = make_config(**case)
    world = world_of(config)
    learner = Learner(load_policy(path, config.model, torch.device("cpu"), world=world), config)
    mini = full_mini_batch(config, world)
    gathered_once = not config.parallel.reshard_after_forward
    with Observer() as observer, whole_until_backward(learner.policy.root, gathered_once):
        add_up_over_replicas(learner.policy.root, True)
        out = learner.compute_loss(mini, mini.micro_batches[0])
        forward, observer.seen = observer.seen, {}
        out.loss.backward()
    learner.optimizer.step()
    parameters = list(learner.policy.model.parameters())
    moments = [x for state in learner.optimizer.state.values() for x in state.values() if x.dim()]
    held = sum(local(x).untyped_storage().nbytes() for x in [*parameters, *moments])
    return {"forward": forward, "backward": observer.seen, "held": held}


def run_cases(rank: int, path: Path, cases: list[dict[str, Any]], out: Path) -> None:
    results = [run_case(path, case) for case in cases]
    if rank == 0:
        out.write_text(json.dumps(results))
