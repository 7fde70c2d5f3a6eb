"""Real servers killed and restarted at random moments under a run that samples ahead: nothing lost, nothing twice.

    python -m benchmarks.server_losses --kills 10

Without a filter a run trains on its prompts in their order. What it logged is held against that order, step by step and
response by response. Wants vLLM (docs/vllm.md) and taskset. Further KEY=VALUE set the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.bench_ahead import TRAINER_CORE, Serving, free_url, start_model, write_recipe
from dapo_runner.config import Config, load_config
from dapo_runner.data.dataset import PromptCursor, load_data
from dapo_runner.logging.rollout_log import read_step, saved_steps
from dapo_runner.logging.run_log import ROLLOUTS
from dapo_runner.policy.model import load_tokenizer

SETTINGS = (
    "rollout.engine=server", "rollout.max_staleness=1", "rollout.correction.weights=token", "sampler.max_age=1",
    "sampler.filter_groups=false", "logging.rollouts.groups=null", "logging.progress=plain", "run.threads=1",
    "run.eval_every=0", "run.steps=100000",
)  # fmt: skip


def n_steps(run: Path) -> int:
    log = run / "metrics.jsonl"
    return sum('"kind": "step"' in line for line in log.read_text().splitlines()) if log.exists() else 0


def wait_for_steps(run: Path, n: int, trainer: subprocess.Popen[bytes], within: float) -> None:
    """Raises RuntimeError where the trainer ends before, TimeoutError where it takes longer."""
    until = time.monotonic() + within
    while n_steps(run) < n:
        if trainer.poll() is not None:
            raise RuntimeError(f"the trainer ended with {trainer.returncode} after {n_steps(run)} steps")
        if time.monotonic() > until:
            raise TimeoutError(f"{n_steps(run)} of {n} steps within {within:g} s")
        time.sleep(0.2)


def check(run: Path, config: Config) -> str:
    """Raises AssertionError for a step, a prompt or a response that is lost, twice or out of order."""
    assert config.model.path is not None
    dataset = load_data(config, load_tokenizer(config.model.path, config.model))
    cursor = PromptCursor(dataset.train, config.run.seed, dataset.heldout)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), steps
    for step, path in saved_steps(run / ROLLOUTS).items():
        wanted = [prompt.id for prompt in cursor.take(config.sampler.prompts_per_step, step)]
        groups = read_step(path).groups
        assert [group["prompt"]["id"] for group in groups] == wanted, f"step {step}"
        assert all(len(group["samples"]) == config.rollout.group_size for group in groups), f"step {step}"
    oldest = max(event["batch/age_max"] for event in events if event["kind"] == "step")
    assert oldest <= config.sampler.max_age
    size = config.sampler.prompts_per_step
    return f"{len(steps)} steps of {size} prompts: none lost, none twice, age at most {oldest:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--servers", type=int, default=2, help="on one core (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of the run")
    parser.add_argument("--within", type=float, default=600.0, help="seconds for the steps after a kill")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        config = start_model(options.recipe, options.settings, options.seed, folder)
        urls = f"rollout.server.urls=[{', '.join(free_url() for _ in range(options.servers))}]"
        recipe = write_recipe(config, folder / "recipe.yaml", "run", *SETTINGS, urls)
        servers = [stack.enter_context(Serving(recipe, place)) for place in range(options.servers)]
        command = ["taskset", "-c", str(TRAINER_CORE), sys.executable, "-m", "dapo_runner", "train", str(recipe)]
        run = folder / "run"
        trainer = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        stack.callback(trainer.kill)
        wait_for_steps(run, 1, trainer, options.within)
        for kill in range(1, options.kills + 1):
            wait_for_steps(run, n_steps(run) + 1, trainer, options.within)
            time.sleep(dice.uniform(0, 5))
            victim = dice.choice(servers)
            victim.kill()
            print(f"kill {kill} of {options.kills}: server {victim.server}, after {n_steps(run)} steps", flush=True)
            victim.start()
        wait_for_steps(run, n_steps(run) + 2, trainer, options.within)
        trainer.send_signal(signal.SIGINT)
        trainer.wait(options.within)
        print(check(run, load_config(recipe, [])))


if __name__ == "__main__":
    main()
