"""Golden runs: short runs whose results must stay the same, bit for bit, while the runner is rewritten.

    python tests/runner/golden_runs.py record golden.json            # before a change
    python tests/runner/golden_runs.py check golden.json [NAME …]    # after it, on the same machine

Each run goes through the command line, in a process of its own. Recorded are the metric values and the SHA-256 of
weights and optimizer state. Tensors are compared as a set, without names, so that a checkpoint may be laid out
otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE), str(HERE.parent)]

import torch  # noqa: E402
import yaml  # noqa: E402
from launch import torchrun  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from small import SEGMENTS, small_recipe  # noqa: E402

# These follow the clock or the timing of threads, not the seed.
UNSTABLE = ("batch/age", "async/", "sync/")
REWARD = """
import asyncio

async def parity(prompts, completions, rows):
    await asyncio.sleep(0)
    return [float(len(completion.text) % 2) for completion in completions]
"""

Run = Callable[[Path], Path]


def recipe(folder: Path, **run: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(small_recipe(output_dir=str(folder / "runs"), **{"steps": 3, **run})))
    return path


def on_ranks(n: int, *overrides: str) -> Run:
    def start(folder: Path) -> Path:
        return train(recipe(folder), n, *overrides)

    return start


def resumed(folder: Path) -> Path:
    """Two steps, and two more when the same recipe is started again."""
    train(recipe(folder, steps=2), 1)
    return train(recipe(folder, steps=4), 1)


def several_rewards(folder: Path) -> Path:
    (folder / "golden_rewards.py").write_text(REWARD)
    parts = "reward.parts=[{use: dapo}, {use: 'golden_rewards:parity', weight: 0.5}]"
    return train(recipe(folder), 1, parts, "sampler.filter_groups=reward", PYTHONPATH=str(folder))


def asynchronous(folder: Path) -> Path:
    """One step ahead, against a server of the tests. The learning rate moves no weight, because timing decides which
    weights sample a response.
    """
    from fake_server import FakeServer

    start = train(recipe(folder, name="start", steps=1), 1)
    server = FakeServer(start / "model")
    try:
        return train(
            recipe(folder, eval_every=0),
            1,
            "model.tiny=null",
            f"model.path={start / 'model'}",
            "rollout.engine=server",
            f"rollout.server.urls=[{server.url}]",
            f"rollout.server.folder={folder}",
            "rollout.max_staleness=1",
            "rollout.correction.weights=token",
            "sampler.filter_groups=null",
            "optimizer.lr=1e-30",
        )
    finally:
        server.kill()


CONFIGURATIONS: dict[str, list[str]] = {  # of runs in one process
    "dapo": [],
    "grpo": ["algorithm=grpo", "loss.overrides.kl_coef=0"],
    "ppo": ["algorithm=ppo", "critic.lr=1e-3", "critic.warmup_steps=1"],
    "reinforce_pp": ["algorithm=reinforce_pp"],
    "spo_chain": SEGMENTS["chain"],
    "spo_tree": SEGMENTS["tree"],
    "dpo": ["algorithm=dpo"],
    "lora_bf16": ["model.lora.rank=4", "model.dtype=bfloat16"],
    "gspo": ["algorithm=gspo"],
    "kl_cov": ["algorithm=kl_cov"],
    "sampling_mask": ["rollout.top_p=0.9", "rollout.top_k=6", "rollout.sampling_mask=true"],
}
RUNS: dict[str, Run] = {
    **{name: on_ranks(1, *overrides) for name, overrides in CONFIGURATIONS.items()},
    "several_rewards": several_rewards,
    "two_ranks": on_ranks(2),
    "ulysses": on_ranks(2, "parallel.sequence=2"),
    "resumed": resumed,
    "asynchronous": asynchronous,
}


def train(path: Path, n_ranks: int, *overrides: str, **environment: str) -> Path:
    """Run ``dapo train``; returns the folder of the run."""
    os.environ |= environment
    done = torchrun(n_ranks, "-m", "dapo_runner", "train", path, *overrides)
    if done.returncode:
        raise SystemExit(f"{path}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    run = yaml.safe_load(path.read_text())["run"]
    return Path(run["output_dir"]) / run["name"]


def result_of(folder: Path) -> dict[str, Any]:
    """What is compared: metric values by step, and the tensors of the newest checkpoint."""
    newest = max((folder / "checkpoints").iterdir())
    weights = sorted((newest / "model").glob("**/*.safetensors"))
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {
        "weights": digest(weights),
        "optimizer": digest(sorted((newest / "optimizer").iterdir())),
        "metrics": {f"{line['kind']} {line['step']}": stable(line) for line in lines},
    }


def digest(files: Iterable[Path]) -> str:
    """Of the set of tensors, whatever they are called."""
    each = sorted(
        hashlib.sha256(
            repr((tensor.dtype, tuple(tensor.shape))).encode()
            + tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for path in files
        for tensor in load_file(path).values()
    )
    return hashlib.sha256("".join(each).encode()).hexdigest() if each else "none"


def stable(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if not key.startswith(UNSTABLE)}


def differences(name: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    found = [f"{name}: other {part}" for part in ("weights", "optimizer") if before[part] != now[part]]
    if before["metrics"].keys() != now["metrics"].keys():
        return [*found, f"{name}: logged {list(now['metrics'])}, recorded {list(before['metrics'])}"]
    for when, recorded in before["metrics"].items():
        line = now["metrics"][when]
        found += [
            f"{name}, {when}: {key} is {line.get(key)}, recorded {value}"
            for key, value in recorded.items()
            if line.get(key) != value
        ]
        found += [f"{name}, {when}: {key} is new" for key in line.keys() - recorded.keys()]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="of runs; all by default")
    options = parser.parse_args()
    if unknown := set(options.names) - RUNS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(RUNS)}")
    recorded = json.loads(options.file.read_text()) if options.file.is_file() else {}
    different = []
    for name in options.names or RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            now = result_of(RUNS[name](Path(scratch)))
        if options.what == "record":
            recorded[name] = now
            options.file.write_text(json.dumps(recorded, indent=1) + "\n")
            print(f"{name}: recorded", flush=True)
        else:
            found = differences(name, recorded[name], now)
            different += found
            print("\n".join(found[:10]) if found else f"{name}: the same", flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
