"""Problems of reasoning-gym (`data.reasoning_gym`): generated tasks, each with its own scoring function.

Held-out problems have lower indices, and so other seeds, than training problems. The row of a problem has its task and
index, from which the reward generates the same problem again. Some tasks iterate over sets of strings, so a process
with a fixed hash seed generates the problems: `python -m dapo_runner.data.reasoning_gym`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

from dapo_runner.config import ConfigError, DataConfig
from dapo_runner.data.reading import Problem

TRAIN_SIZE = 2048  # training problems if data.limit is not set
SEED = 0  # of tasks that set none in their config: all runs use the same problems


def generate_problems(data: DataConfig) -> tuple[list[Problem | None], list[Problem | None]]:
    """Return training and held-out problems, None for each that a task failed to generate. Raises ConfigError."""
    weights = [task.weight for task in data.reasoning_gym]
    n_heldout = _shares(weights, data.eval_size)
    sizes = _shares(weights, data.eval_size + (data.limit or TRAIN_SIZE))
    tasks: list[dict[str, Any]] = [
        {"name": task.name, "config": {"seed": SEED, **task.config, "size": size}}
        for task, size in zip(data.reasoning_gym, sizes, strict=True)
    ]
    context = () if data.system is None else (("system", data.system),)
    train, heldout = list[Problem | None](), list[Problem | None]()
    for task, entries, n_first in zip(tasks, _generate_elsewhere(tasks), n_heldout, strict=True):
        problems = [
            entry and Problem(entry[0], entry[1], task["name"], context, {"task": json.dumps(task | {"index": index})})
            for index, entry in enumerate(entries)
        ]
        heldout += problems[:n_first]
        train += problems[n_first:]
    return train, heldout


def _shares(weights: list[float], total: int) -> list[int]:
    """Split ``total`` by weight into integers that add up to it."""
    ends = [round(total * end / sum(weights)) for end in accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _generate_elsewhere(tasks: list[dict[str, Any]]) -> list[list[tuple[str, str] | None]]:
    """Return the results of ``_generate`` from a process with a fixed hash seed. Raises ConfigError."""
    command, environment = (sys.executable, "-m", __name__), {**os.environ, "PYTHONHASHSEED": "0"}
    found = subprocess.run(command, input=json.dumps(tasks), capture_output=True, text=True, env=environment)
    if found.returncode != 0:
        lines = found.stderr.strip().splitlines() or [f"data.reasoning_gym: exit code {found.returncode}"]
        raise ConfigError(lines[-1])
    return json.loads(found.stdout)


def _generate(task: Any, size: int) -> list[tuple[str, str] | None]:
    """Return question and answer of each problem, None where generation fails."""
    problems = list[tuple[str, str] | None]()
    for index in range(size):
        try:
            entry = task[index]
            problems.append((entry["question"].strip(), str(entry["answer"] or "")))
        except Exception:  # a generator may raise anything; the caller counts the failure
            problems.append(None)
    return problems


def _make_task(key: str, name: str, config: dict[str, Any]) -> Any:
    """Return a task. Exit with a message that names the setting ``key`` if there is no such task."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        sys.exit("data.reasoning_gym: requires reasoning-gym. Run `pip install 'dapo-kernels[reasoning-gym]'`.")
    known = sorted(DATASETS.keys() - {"composite"})
    if name not in known:
        near = ", ".join(get_close_matches(name, known, cutoff=0.4) or known[:5])
        sys.exit(f"{key}.name: expected one of the {len(known)} tasks of reasoning-gym ({near}, …), got {name!r}.")
    try:
        return create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError) as error:
        sys.exit(f"{key}.config: expected a configuration of {name}, got {config}: {error}.")


if __name__ == "__main__":
    answers = sys.stdout
    with redirect_stdout(sys.stderr):  # libraries may print; only problems go to stdout
        tasks = [
            (_make_task(f"data.reasoning_gym.{number}", task["name"], task["config"]), task["config"]["size"])
            for number, task in enumerate(json.load(sys.stdin))
        ]
        json.dump([_generate(*task) for task in tasks], answers)
