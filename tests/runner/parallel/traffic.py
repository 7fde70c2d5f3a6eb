"""What a test starts on several ranks: `python traffic.py MODEL CASES OUT`. The collectives of a full micro-batch,
forward and backward, as rank 0 makes them, and the bytes of weights and moments that it holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builders import make_config
from learners import world_of

from dapo_runner.algorithms.learner import Learner
from dapo_runner.parallel.sharding import add_up_over_replicas, local, whole_until_backward
from dapo_runner.policy.model import load_policy
from dapo_runner.preflight.simulate import Observer, full_mini_batch


def run_case(path: str, case: dict[str, Any]) -> dict[str, Any]:
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


def main() -> None:
    path, cases, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = [run_case(path, case) for case in json.loads(Path(cases).read_text())]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
