"""What dynamic sampling changes in TRL: GRPOTrainer alone against DapoGRPOTrainer(dynamic_sampling=True).

    python -m benchmarks.bench_trl_sampling --out benchmarks/results --picture docs/trl-sampling.png

A transformer of two layers learns sums of numbers with one or two digits. It has seen worked examples until a quarter
of the sums came out right, so that many groups are all correct or all incorrect. Both sides train it by the same
GRPOConfig (DAPO's loss) with a reward of 1 for a correct answer and 0 for another one. The reward function counts every
generated completion and token, also those of groups that are filtered out. TRL alone goes on after the last step of the
other side until it has generated as many tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks import machine

SIDES: dict[str, dict[str, Any]] = {
    "TRL alone": {},
    "with dynamic sampling": {"dynamic_sampling": True, "on_sampling_exhausted": "train_partial"},
}
ALONE, DYNAMIC = SIDES
GROUP, PROMPTS, TOKENS, LAST = 8, 16, 32, 10
MAX_STEPS = 10  # times those of the other side, if generating as many tokens takes that long
TASK = [
    *("data.arithmetic.min_digits=1", "data.arithmetic.max_digits=2", "data.arithmetic.even_digits=true"),
    f"rollout.max_response_tokens={TOKENS}",
]
Step = dict[str, int]


class Ledger:
    """The reward, which adds up what was generated for each step."""

    __name__ = "correct"

    def __init__(self) -> None:
        self.steps: dict[int, Step] = defaultdict(
            lambda: dict.fromkeys(("tokens", "n", "correct", "groups", "mixed"), 0)
        )

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], trainer_state: Any, **_: Any
    ) -> list[float]:
        from dapo_runner.rewards.rules import answer_rule

        rewards = [float(answer_rule(*pair).correct) for pair in zip(completions, answer, strict=True)]
        step = self.steps[trainer_state.global_step]
        step["tokens"] += sum(map(len, completion_ids))
        step["n"] += len(rewards)
        step["correct"] += int(sum(rewards))
        groups = [sum(rewards[first : first + GROUP]) for first in range(0, len(rewards), GROUP)]
        step["groups"] += len(groups)
        step["mixed"] += sum(0 < correct < GROUP for correct in groups)
        return rewards

    @property
    def tokens(self) -> int:
        return sum(step["tokens"] for step in self.steps.values())


def train(side: str, seed: int, n_steps: int, until_tokens: int, folder: Path) -> list[Step]:
    """Train one side for ``n_steps`` updates, and on until ``until_tokens`` were generated. Returns what each step
    generated.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from dapo_kernels.integrations.trl import DapoGRPOTrainer
    from dapo_runner.config import load_config
    from dapo_runner.data.dataset import load_data
    from dapo_runner.policy.model import load_tokenizer
    from dapo_runner.run.tiny_model import ensure_tiny_model

    recipe = Path(__file__).parent.parent / "recipes" / "tiny.yaml"
    config = load_config(recipe, [*TASK, f"run.seed={seed}"])
    start = ensure_tiny_model(config, folder / f"start-{seed}", print)
    tokenizer = load_tokenizer(start, config.model)
    prompts = load_data(config, tokenizer).train
    ledger = Ledger()

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= n_steps and ledger.tokens >= until_tokens

    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        loss_type="dapo",
        epsilon_high=0.28,
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * PROMPTS,
        gradient_accumulation_steps=1,
        max_completion_length=TOKENS,
        max_steps=n_steps * MAX_STEPS,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=seed,
    )
    trainer_class = DapoGRPOTrainer if SIDES[side] else GRPOTrainer
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(start),
        processing_class=tokenizer,
        reward_funcs=ledger,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": one.text, "answer": one.answer} for one in prompts]),
        callbacks=[Stop()],
        **SIDES[side],
    )
    trainer.train()
    steps = [ledger.steps[step] for step in sorted(ledger.steps)]
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return [with_trained(step, entry) for step, entry in zip(steps, logs, strict=True)]


def with_trained(step: Step, entry: dict[str, float]) -> Step:
    """Add how many groups a step trains, and how many of them vary: all that it generated in TRL alone."""
    return step | {"trained": PROMPTS, "used": int(entry.get("dynamic_sampling/groups_used", step["mixed"]))}


def run_seed(seed: int, n_steps: int) -> dict[str, list[Step]]:
    """Train both sides from the start model of a seed."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        dynamic = train(DYNAMIC, seed, n_steps, 0, Path(name))
        tokens = sum(step["tokens"] for step in dynamic)
        runs = {DYNAMIC: dynamic, ALONE: train(ALONE, seed, n_steps, tokens, Path(name))}
    print(seed, compare(runs, n_steps), flush=True)
    return runs


def share(steps: list[Step], part: str, whole: str) -> float:
    return sum(step[part] for step in steps) / sum(step[whole] for step in steps)


def at_equal_tokens(alone: list[Step], tokens: int) -> list[Step]:
    """Return the steps until ``tokens`` were generated."""
    total, found = 0, []
    for step in alone:
        total += step["tokens"]
        found.append(step)
        if total >= tokens:
            break
    return found


def compare(runs: dict[str, list[Step]], n_steps: int) -> dict[str, list[float]]:
    """Return the rows of the table, of one seed: TRL alone at equal steps and at equal tokens, dynamic sampling."""
    dynamic, alone = runs[DYNAMIC], runs[ALONE]
    sides = [alone[:n_steps], at_equal_tokens(alone, sum(step["tokens"] for step in dynamic)), dynamic]
    halves = [side[: len(side) // 2] for side in sides]
    correct = [share(side[-LAST:], "correct", "n") for side in sides]
    return {
        "updates": [len(side) for side in sides],
        "generated tokens, thousands": [sum(step["tokens"] for step in side) / 1000 for side in sides],
        "generated groups with varying rewards, %": [100 * share(side, "mixed", "groups") for side in sides],
        "trained groups with varying rewards, %": [100 * share(side, "used", "trained") for side in sides],
        "correct halfway, %": [100 * share(half[-LAST:], "correct", "n") for half in halves],
        "correct at the end, %": [100 * x for x in correct],
        "dynamic sampling minus TRL alone, points": [100 * (correct[2] - x) for x in correct[:2]],
    }


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean over seeds and its standard error."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def page(results: dict[str, Any]) -> str:
    rows = [compare(runs, results["steps"]) for runs in results["runs"].values()]
    lines = []
    for name in rows[0]:
        of_columns = zip(*(row[name] for row in rows), strict=True)
        cells = ["{:.1f} ± {:.1f}".format(*mean_and_error(list(values))) for values in of_columns]
        lines.append(" | ".join([f"| {name}", *cells, *[""] * (3 - len(cells))]) + " |")
    return "\n".join(
        [
            "# Dynamic sampling in TRL",
            "",
            f"`{results['command']}`, {machine.headline(results['machine'])}, commit {results['machine']['commit']}.",
            f"{len(rows)} seeds. With dynamic sampling {results['steps']} updates, of {PROMPTS} groups of {GROUP}.",
            "Means over seeds ± standard error. Both sides of a seed start from the same model. Equal steps: as many",
            "updates as with dynamic sampling. Equal tokens: as many updates as it takes to generate as many tokens.",
            f"At the end: the last {LAST} updates. Halfway: the last {LAST} of the first half.",
            "",
            "| | TRL alone, equal steps | TRL alone, equal tokens | with dynamic sampling |",
            "|---|---:|---:|---:|",
            *lines,
            "",
        ]
    )


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2))
    for side, color in ((ALONE, "#7f8c8d"), (DYNAMIC, "#c0392b")):
        for number, runs in enumerate(results["runs"].values()):
            steps = runs[side]
            tokens = torch.tensor([step["tokens"] for step in steps]).cumsum(0) / 1e3
            n = results["steps"]
            windows = [steps[max(0, i - LAST // 2) : i + LAST // 2] for i in range(len(steps))]
            correct = [share(window, "correct", "n") for window in windows]
            mixed = [share(window, "mixed", "groups") for window in windows]
            style = {"color": color, "label": side if number == 0 else None, "linewidth": 1.2, "alpha": 0.8}
            for axis, x, y in (
                (axes[0], range(n), correct[:n]),
                (axes[1], tokens, correct),
                (axes[2], range(n), mixed[:n]),
            ):
                axis.plot(x, y, **style)
    for axis, label in zip(axes, ("step", "generated tokens (thousands)", "step"), strict=True):
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title("Correct responses, equal steps", fontsize=10, loc="left")
    axes[1].set_title("Correct responses, equal tokens", fontsize=10, loc="left")
    axes[2].set_title("Groups with mixed correctness", fontsize=10, loc="left")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time, one thread each")
    parser.add_argument("--steps", type=int, default=60, help="updates of the side with dynamic sampling")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the figures")
    parser.add_argument("--picture", type=Path, help="file of the picture")
    options = parser.parse_args()
    command = machine.command("python -m benchmarks.bench_trl_sampling")
    results: dict[str, Any] = {"command": command, "machine": machine.describe(), "steps": options.steps}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        seeds = range(options.seeds)
        runs = pool.map(run_seed, seeds, repeat(options.steps))
        results["runs"] = dict(zip(map(str, seeds), runs, strict=True))
    base = options.out / f"trl-sampling-{machine.slug(results['machine'])}"
    base.with_suffix(".json").write_text(json.dumps(results))
    base.with_suffix(".md").write_text(page(results))
    if options.picture is not None:
        draw(results, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
