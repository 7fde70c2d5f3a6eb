"""Problems of reasoning-gym (`data.reasoning_gym`): generated tasks, each with its own scoring function.

Held-out problems have lower indices, and so other seeds, than training problems. From the row of a problem the reward
generates it again. Some tasks iterate over sets of strings, so a process with a fixed hash seed generates all problems.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from itertools import accumulate, pairwise
from typing import Any

if __name__ != "__main__":  # without torch, the process that generates starts in a third of the time
    from dapo_runner.config import ConfigError, DataConfig
    from dapo_runner.data.reading import Problem

TRAIN_SIZE = 2048  # training problems if data.limit is not set
SEED = 0  # of tasks that set none in their config: all runs use the same problems


def generate_problems(data: DataConfig) -> tuple[list[Problem | None], list[Problem | None]]:
    """Return training and held-out problems, None for each that a task failed to generate. Raises ConfigError."""
    ends = [0.0, *accumulate(task.weight for task in data.reasoning_gym)]
    n_heldout, sizes = (
        [round(n * end / ends[-1]) - round(n * start / ends[-1]) for start, end in pairwise(ends)]
        for n in (data.eval_size, data.eval_size + (data.limit or TRAIN_SIZE))
    )
    tasks: list[dict[str, Any]] = [
        {"name": task.name, "config": {**task.config, "seed": task.config.get("seed") or SEED, "size": size}}
        for task, size in zip(data.reasoning_gym, sizes, strict=True)
    ]
    command, environment = (sys.executable, "-m", __name__), {**os.environ, "PYTHONHASHSEED": "0"}
    made = subprocess.run(command, input=json.dumps(tasks), capture_output=True, text=True, env=environment)
    if made.returncode != 0:
        raise ConfigError((made.stderr.strip() or f"data.reasoning_gym: exit code {made.returncode}").splitlines()[-1])
    context = () if data.system is None else (("system", data.system),)
    train, heldout = list[Problem | None](), list[Problem | None]()
    for task, entries, n_first in zip(tasks, json.loads(made.stdout), n_heldout, strict=True):
        problems = [
            entry and Problem(entry[0], entry[1], task["name"], context, {"task": json.dumps(task | {"index": index})})
            for index, entry in enumerate(entries)
        ]
        heldout += problems[:n_first]
        train += problems[n_first:]
    return train, heldout


def _generate(number: int, name: str, config: dict[str, Any]) -> list[tuple[str, str] | None]:
    """Return question and answer of each problem, None where generation fails. Exit with a message for a wrong task."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset

        task = create_dataset(name, **config)
    except ImportError:
        sys.exit("data.reasoning_gym: requires reasoning-gym. Run `pip install 'dapo-kernels[reasoning-gym]'`.")
    except (TypeError, ValueError, AssertionError) as error:
        wrong = f"config: expected options of {name}" if name in DATASETS else "name: expected a task of reasoning-gym"
        sys.exit(f"data.reasoning_gym.{number}.{wrong}, got {name} with {config}: {error}")
    problems = list[tuple[str, str] | None]()
    for index in range(config["size"]):
        try:
            entry = task[index]
            problems.append((entry["question"].strip(), str(entry["answer"] or "")))
        except Exception:  # a generator may raise anything; the caller counts the failure
            problems.append(None)
    return problems


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # libraries may print; only problems go to stdout
        print(json.dumps([_generate(n, **task) for n, task in enumerate(json.load(sys.stdin))]), file=sys.__stdout__)
