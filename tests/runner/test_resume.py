"""`kill -9` at any moment, the same command again, and nobody can tell from what the run leaves behind."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from forks import CONTEXT
from golden_runs import CONFIGURATIONS, REWARD, result_of
from small import Notes, steps_of, write_recipe
from talkers import ROOM

from dapo_runner.checkpoint.files import find_checkpoints, is_whole
from dapo_runner.config import load_config
from dapo_runner.files import read_jsonl
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.rollout_log import read_step, saved_steps
from dapo_runner.loop import train
from dapo_runner.run.start import open_run

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")  # of sys.addaudithook
STEPS = ["run.steps=3", "run.keep=1", "logging.rollouts.per_token=true"]
KEPT = ["sampler.filter_groups=null", "sampler.max_rounds=1"]
# With what a file operation begins that is a run's last one, the how-manieth of its kind.
KILLS = [
    ("open config.yaml", 1),
    ("open metrics.jsonl", 5),  # behind the rollouts of step 2
    ("open rollouts/step_000002", 1),
    ("open timings.jsonl", 4),  # behind the second checkpoint
    ("open evaluations/step_000002", 1),
    ("open checkpoints/step_000002.unfinished/model/", 3),
    ("open checkpoints/step_000002.unfinished/optimizer/", 2),
    ("open checkpoints/step_000002.unfinished/state.pt", 1),
    ("open checkpoints/step_000002.unfinished/manifest.json", 1),
    ("open checkpoints/step_000002.unfinished/manifest.json", 2),
    ("os.rename checkpoints/step_000002.unfinished", 1),
    ("os.rename checkpoints/step_000001", 2),  # the old one is removed
    ("os.rmdir checkpoints/step_000001.unfinished", 1),
    ("os.mkdir checkpoints/step_000002.unfinished", 1),
]
DPO = ["run.steps=3", "algorithm=dpo"]
CASES: dict[str, list[str]] = {
    **{name: [*STEPS, *overrides] for name, overrides in CONFIGURATIONS.items()},
    "spo_tree": [*STEPS, *CONFIGURATIONS["spo_tree"], "sampler.prompts_per_step=2", "sampler.max_age=3"],
    "spo_chain": [*STEPS, *CONFIGURATIONS["spo_chain"], "sampler.prompts_per_step=2"],
    "dpo": [*DPO, "optimizer.mini_batch_size=256", "sampler.filter_groups=null"],
    "lora_grpo": [*STEPS, "model.lora.rank=4", "loss.objective=grpo", "optimizer.mini_batch_size=16"],
    "moving_reference": [
        *STEPS,
        *KEPT,
        *CONFIGURATIONS["ppo"],
        *("reward.kl={coef: 0.05}", "loss.reference_ema=0.9", "model.dtype=bfloat16"),
    ],
    "reference": [*STEPS, "loss.overrides.kl_coef=0.1"],
    "options": [
        *("run.steps=4", "optimizer.schedule=cosine", "optimizer.warmup_steps=1", "optimizer.min_lr_ratio=0.1"),
        *("sampler.curriculum.rest=1", "rollout.stop=['9']", "rollout.top_k=20"),
    ],
    "early_stop": ["optimizer.lr=1e-30", "run.early_stop={patience: 3}", "run.eval_every=1", "run.steps=9"],
    "several_rewards": [
        *STEPS,
        "sampler.filter_groups=reward",
        "reward.parts=[{use: dapo}, {use: 'golden_rewards:parity', weight: 0.5}]",
    ],
    "episodes": [*STEPS, "env={kind: 'talkers:Digits', max_turn_tokens: 25}", *ROOM],
    "tiny": ["run.steps=2", "model.tiny.warmup.steps=30"],
}
OWN_START = ("tiny", "episodes")  # turns are longer than the others have positions for
# Settings of the killed run alone, which change no number.
UNEQUAL = {"moving_reference": ["optimizer.offload=true"], "dapo": ["run.async_save=true"]}


def kill_at(beginning: str, call: int, folder: Path) -> None:
    """Kill this process at the ``call``-th operation on files of ``folder`` that begins so."""
    left = iter(range(call - 1, -1, -1))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        operation = f"{event} {arguments[0]}".replace(f"{folder}/", "") if event in EVENTS else ""
        if operation.startswith(beginning) and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run(recipe: Path, overrides: Sequence[str]) -> Path:
    return train(load_config(recipe, overrides), Progress())


def run_until_killed(recipe: Path, overrides: Sequence[str], *kill: Any) -> None:
    gc.freeze()  # what it was forked with
    kill_at(*kill)
    run(recipe, overrides)


def records(run: Path) -> dict[str, bytes]:
    files = [run / "metrics.jsonl", *(run / "rollouts").iterdir(), *(run / "evaluations").iterdir()]
    return {path.name: path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a case that nothing happens to."""
    folder, done = tmp_path_factory.mktemp("whole"), dict[str, Path]()

    def whole_run(name: str) -> Path:
        if name not in done:
            done[name] = run(write_recipe(folder, None if name in OWN_START else start, name=name), CASES[name])
        return done[name]

    return whole_run


@pytest.fixture(autouse=True)
def _rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "golden_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "kill"),
    [("tiny", ("open model.unfinished", 2)), *zip(list(CASES)[:-1], itertools.cycle(KILLS), strict=False)],
)
def test_killed_and_started_again_equals_uninterrupted(
    name: str, kill: tuple[str, int], whole: Callable[[str], Path], start: Path, tmp_path: Path
) -> None:
    recipe, folder = write_recipe(tmp_path, None if name in OWN_START else start, name=name), tmp_path / "runs" / name
    overrides = [*CASES[name], *UNEQUAL.get(name, [])]
    process = CONTEXT.Process(target=run_until_killed, args=(recipe, overrides, *kill, folder))
    process.start()
    process.join(timeout=1200)
    assert process.exitcode == -signal.SIGKILL
    assert all(is_whole(checkpoint.path) for checkpoint in find_checkpoints(folder / "checkpoints", damaged=True))
    assert run(recipe, overrides) == folder
    assert records(folder) == records(whole(name))
    assert result_of(folder) == result_of(whole(name))
    assert not list(folder.rglob("*.unfinished"))


def samples_of(run: Path) -> list[dict[str, Any]]:
    saved = [read_step(path) for path in saved_steps(run / "rollouts").values()]
    return [sample for step in saved for group in step.groups for sample in group["samples"]]


def test_a_critic_is_trained_before_the_policy(whole: Callable[[str], Path]) -> None:
    run = whole("moving_reference")
    assert None not in [value for key in ("value_loss", "return") for value in steps_of(run, f"train/{key}")]
    assert any(sample["advantage"] for sample in samples_of(run))
    assert [loss is None for loss in steps_of(run, "train/loss")] == [True, False, False]
    assert steps_of(run, "train/reward_kl")[-1] != 0


def test_adapters_start_as_their_own_reference(whole: Callable[[str], Path]) -> None:
    first, *_, last = steps_of(whole("lora_grpo"), "train/ref_kl")
    assert first == pytest.approx(0.0, abs=1e-5)  # there is one update a step
    assert last > 0


@pytest.mark.parametrize(("kind", "figure"), [("spo_chain", "continuations"), ("spo_tree", "waiting")])
def test_segments_add_up_to_their_response(kind: str, figure: str, whole: Callable[[str], Path]) -> None:
    folder = whole(kind)
    assert any(value > 0 for value in steps_of(folder, "segments/advantage"))
    assert min(steps_of(folder, f"segments/{name}")[0] for name in ("tokens", figure)) > 0
    timed = ["seconds/segments" in event for event in read_jsonl(folder / "timings.jsonl")]
    assert timed[1:] == 3 * [kind == "spo_chain"]
    for sample in samples_of(folder):
        assert sum(segment["length"] for segment in sample["segments"]) == sample["tokens"]
        assert sample["segments"][-1]["after"] == pytest.approx(sample["reward"])
    evaluated = [group for path in saved_steps(folder / "evaluations").values() for group in read_step(path).groups]
    assert {len(group["samples"]) for group in evaluated} == {2}  # evaluation.k: it grows no trees


def test_a_resume_notes_how_many_trees_wait(whole: Callable[[str], Path], start: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, start, name="spo_tree")
    shutil.copytree(whole("spo_tree"), tmp_path / "runs" / "spo_tree")
    with open_run(load_config(recipe, [*CASES["spo_tree"], "run.steps=4"]), notes := Notes()) as resumed:
        buffer = resumed.sampler.buffer
    assert buffer.waiting
    assert any(line.startswith(f"{len(buffer.groups) + len(buffer.waiting)} ") for line in notes.lines)


def test_figures_are_those_of_whole_trees(start: Path, tmp_path: Path) -> None:
    """However many of its responses the step itself trains on."""
    figures = []
    for per_step in ("1", "null"):
        recipe = write_recipe(tmp_path, start, name=per_step, eval_every=0)
        folder = run(recipe, [*CASES["spo_tree"], f"advantage.segments.per_step={per_step}", "run.steps=1"])
        figures.append([steps_of(folder, f"segments/{name}") for name in ("per_response", "advantage", "zero")])
    assert figures[0] == figures[1]
    assert 0 < figures[0][2][0] < 1
