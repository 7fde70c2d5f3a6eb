"""Whole runs on several ranks: they begin as on one process, and survive a rank that is killed or fails."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nccl import MEET, SocketTransfer, join
from fake_server import GENERATE, FakeServer
from ranks import on_ranks
from safetensors.torch import load_file
from sft_runs import steps_of, write_sft_recipe
from small import SEGMENTS, write_recipe
from talkers import ROOM
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from dapo_runner.checkpoint.files import checkpoint_to_resume, find_checkpoints
from dapo_runner.cli import main
from dapo_runner.commands import train as train_command
from dapo_runner.config import load_config
from dapo_runner.engines.server import TRANSFERS
from dapo_runner.files import read_jsonl
from dapo_runner.logging.rollout_log import read_step
from dapo_runner.tiny_model import ensure_tiny_model

EPISODES = ["env={kind: 'talkers:Digits', max_turn_tokens: 25}", *ROOM]
JUDGE = ["reward.judge.answers=['5','8']", "reward.judge.template='{reference}={response}?'", "reward.kind=judge"]
STEPS, KILLED_IN = 4, 3
Command = list[str]


def dapo(command: Command) -> int:
    """The command, without the picture at the end of a run: it takes a second, and test_cli.py has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_command, "write_report", lambda folder: None)
        return main(command)


def run_all(rank: int, commands: list[Command], refused: Command | None = None) -> None:
    for command in commands:
        assert dapo(command) == 0, command
    assert refused is None or dapo(refused) == 2


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that small runs start from."""
    folder = tmp_path_factory.mktemp("warm")
    return ensure_tiny_model(load_config(write_recipe(folder), ROOM), folder / "model", lambda line: None)


def command_of(folder: Path, name: str, model: Path, *overrides: str, **run: Any) -> Command:
    recipe = write_recipe(folder, **{"steps": 2, "save_every": 0, **run})
    return ["train", str(recipe), f"run.name={name}", "model.tiny=null", f"model.path={model}", *overrides]


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return read_jsonl(folder / "runs" / name / "metrics.jsonl")


def test_runs_begin_as_on_one_process(tmp_path: Path, warm: Path, model_folder: Path) -> None:
    """The same evaluation, samples and first step; what is distilled from judges on ranks is the same."""
    judge = [*JUDGE, f"reward.judge.model={model_folder}", "sampler.filter_groups=reward"]
    kinds = {"plain": [], "episodes": EPISODES, "judge": judge, **SEGMENTS}
    kinds = {kind: ["model.dtype=float32", "run.steps=1", *overrides] for kind, overrides in kinds.items()}
    layouts: list[tuple[int, str, list[str]]] = [
        *((2, kind, []) for kind in kinds),
        (2, "plain", ["parallel.sequence=2"]),
        (4, "plain", ["parallel.replicate=2"]),
        (4, "episodes", ["parallel.sequence=2"]),
    ]
    for kind, overrides in kinds.items():
        assert dapo(command_of(tmp_path, kind, warm, *overrides)) == 0
    verdicts = tmp_path / "runs" / "judge" / "verdicts.jsonl"
    sections = {
        "run": {"output_dir": str(tmp_path / "runs"), "eval_every": 0},
        "data": {"eval_size": 5, "judge": {"template": "{reference}={response}?", "answers": ["5", "8"]}},
        "optimizer": {"mini_batch_size": 8, "warmup_steps": 1},
    }
    sft = ["sft", str(write_sft_recipe(model_folder, verdicts, tmp_path / "sft.yaml", **sections))]
    assert dapo([*sft, "run.name=imitated"]) == 0
    odd = command_of(tmp_path, "odd", warm, "parallel.sequence=4")  # of two heads
    for n in (2, 4):
        commands = [
            command_of(tmp_path, f"{kind} on {n}{''.join(layout)}", warm, *kinds[kind], *layout)
            for size, kind, layout in layouts
            if size == n
        ]
        if n == 2:
            commands += [[*sft, f"run.name=imitated by {k}", f"parallel.sequence={k}"] for k in (1, 2)]
        on_ranks(n, run_all, commands, odd if n == 4 else None)
    assert not (tmp_path / "runs" / "odd").exists()
    for n, kind, layout in layouts:
        check_beginning(events_of(tmp_path, f"{kind} on {n}{''.join(layout)}"), events_of(tmp_path, kind))
    for kind in SEGMENTS:
        one, other = (segments_of(tmp_path / "runs" / name) for name in (kind, f"{kind} on 2"))
        assert one == other
    assert events_of(tmp_path, "episodes")[1]["batch/turns"] > 1.2
    check_verdicts(tmp_path / "runs")
    for k in (1, 2):
        for metric in ("train/loss", "train/grad_norm", "eval/loss"):
            found, expected = (steps_of(tmp_path / "runs" / name, metric) for name in (f"imitated by {k}", "imitated"))
            assert found == pytest.approx(expected, rel=1e-4)


def check_beginning(events: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    assert [(event["kind"], event["step"]) for event in events] == [(event["kind"], event["step"]) for event in alone]
    assert events[0] == pytest.approx(alone[0])  # the evaluation before the first step
    first, expected = events[1], alone[1]
    assert first.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith(("sampling/", "reflection/", "segments/")):
            assert first[key] == value, key
        elif key.startswith(("train/rollout_gap", "sync/gap")):  # rounding alone
            assert max(first[key], value) < 1e-4, key
        elif key != "kind":
            assert first[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def segments_of(run: Path) -> list[Any]:
    groups = read_step(run / "rollouts" / "step_000001.jsonl.gz").groups
    return [(sample["response"], sample["segments"]) for group in groups for sample in group["samples"]]


def check_verdicts(runs: Path) -> None:
    """Each rank judges a part, as one process does."""

    def read(name: str) -> dict[Any, float]:
        rows = [json.loads(line) for line in (runs / name).read_text().splitlines()]
        return {(row["problem"], row["response"]): row["confidence"] for row in rows}

    alone, *ranks = map(read, ("judge/verdicts.jsonl", "judge on 2/verdicts.jsonl", "judge on 2/verdicts_rank_1.jsonl"))
    for found in ranks:
        common = alone.keys() & found.keys()
        assert len(common) > 4
        assert [found[question] for question in common] == pytest.approx([alone[question] for question in common])


def failing(prompts: Any, completions: Any, rows: Any) -> list[float]:
    """A reward that fails on rank 1 from when the second checkpoint is being written."""
    failed = Path(os.environ["DAPO_TEST_FAILED"])
    is_writing = any(failed.parent.glob("runs/unwell/checkpoints/step_000002*"))
    if os.environ["RANK"] == "1" and (is_writing or failed.exists()):
        failed.touch()
        raise ValueError("unwell")
    return [float(len(completion.text) % 2) for completion in completions]


def die_in_a_write(rank: int, command: Command) -> None:
    """Rank 1 kills itself inside a write of the third checkpoint."""
    write, calls = HuggingFaceStorageWriter.write_data, iter(range(1, 100))

    def deadly(self: Any, *arguments: Any) -> Any:
        if next(calls) == KILLED_IN and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *arguments)

    HuggingFaceStorageWriter.write_data = deadly  # type: ignore[method-assign]
    dapo(command)


def resume_and_fail(rank: int, resumed: Command, command: Command, failed: Path) -> None:
    """The second checkpoint is not finished when rank 1 fails."""
    assert dapo(resumed) == 0
    os.environ["DAPO_TEST_FAILED"] = str(failed)
    write, calls = HuggingFaceStorageWriter.write_data, iter(range(1, 100))

    def late(self: Any, *arguments: Any) -> Any:
        deadline, call = time.monotonic() + 300, next(calls)
        while call == 2 and not failed.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return write(self, *arguments)

    HuggingFaceStorageWriter.write_data = late  # type: ignore[method-assign]
    assert dapo(command) == 1


def test_no_step_is_lost(tmp_path: Path, warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed and resumed, or saves in the background, is that of one that was not, byte for byte."""
    options: dict[str, Any] = {"steps": STEPS, "save_every": 1, "eval_every": 0}
    background, runs = "run.async_save=true", tmp_path / "runs"
    commands = {
        name: command_of(tmp_path, name, warm, "model.dtype=float32", **options) for name in ("whole", "killed")
    }
    commands["background"] = command_of(tmp_path, "background", warm, "model.dtype=float32", background, **options)
    on_ranks(2, run_all, [commands["whole"], commands["background"]])
    equal_runs(runs / "background", runs / "whole")
    with pytest.raises(Exception, match="SIGKILL"):
        on_ranks(2, die_in_a_write, [*commands["killed"], background])
    found = checkpoint_to_resume(runs / "killed" / "checkpoints")
    assert found is not None
    assert found.step == KILLED_IN - 1
    unwell = [f"reward.kind={__name__}:failing", "sampler.filter_groups=null"]
    command = command_of(tmp_path, "unwell", warm, *unwell, background, **options)
    on_ranks(2, resume_and_fail, commands["killed"], command, tmp_path / "failed")
    equal_runs(runs / "killed", runs / "whole")
    assert [found.step for found in find_checkpoints(runs / "unwell" / "checkpoints")] == [1, 2]

    assert dapo([*commands["whole"], f"run.steps={STEPS + 1}"]) == 0
    changes = read_jsonl(runs / "whole" / "changes.jsonl")
    assert {"step": STEPS, "kind": "change", "key": "ranks", "before": 2, "after": 1} in changes
    assert "2 → 1" in capsys.readouterr().out
    steps = [event["step"] for event in events_of(tmp_path, "whole") if event["kind"] == "step"]
    assert steps == list(range(1, STEPS + 2))


def equal_runs(one: Path, other: Path) -> None:
    """The same bytes of metrics, and of the tensors of the last checkpoint."""
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    ours, theirs = (checkpoint_to_resume(run / "checkpoints") for run in (one, other))
    assert ours is not None
    assert theirs is not None
    assert ours.step == theirs.step == STEPS
    files = [path.relative_to(theirs.path) for path in theirs.path.rglob("*.safetensors")]
    assert len(files) == 4
    for file in files:
        expected, got = load_file(theirs.path / file), load_file(ours.path / file)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items()), file
    assert len(list((one / "checkpoints").iterdir())) == 2


def by_nccl(rank: int, command: Command) -> None:
    """With a socket in NCCL's place."""
    TRANSFERS["nccl"] = SocketTransfer
    assert dapo(command) == 0


def serving(folder: Path, name: str, model: Path, servers: list[FakeServer], *more: str, **run: Any) -> Command:
    overrides = ["sampler.filter_groups=null", "rollout.engine=server", "rollout.max_response_tokens=6"]
    overrides += [f"rollout.server.urls=[{', '.join(server.url for server in servers)}]"]
    overrides += [f"rollout.server.folder={folder}", "model.dtype=float32", *more]
    return command_of(folder, name, model, *overrides, **{"eval_every": 0, **run})


def lose(servers: list[FakeServer]) -> None:
    """Every ninth request to the first server kills the second, which comes back."""
    count = itertools.count()

    def lost_and_back(body: dict[str, Any]) -> None:
        if next(count) % 9 == 7 and servers[1].alive:
            servers[1].kill()
            servers[1].start()

    servers[0].hooks[GENERATE] = lost_and_back


def test_ranks_share_servers_one_of_which_is_lost(
    tmp_path: Path, model_folder: Path, servers: list[FakeServer]
) -> None:
    """Each rank asks for its share. A server that is back meets rank 0 anew, by NCCL, before any rank asks it."""
    assert dapo(serving(tmp_path, "alone", model_folder, servers)) == 0
    for server in servers:
        join(server)
    lose(servers)
    on_ranks(2, by_nccl, serving(tmp_path, "shared", model_folder, servers, "rollout.server.transfer=nccl"))
    assert servers[0].seen(MEET) == 1 < servers[1].seen(MEET)
    steps, alone = (
        [event for event in events_of(tmp_path, name) if event["kind"] == "step"] for name in ("shared", "alone")
    )
    for step, other in zip(steps, alone, strict=True):
        sampling = {key: value for key, value in other.items() if key.startswith("sampling/")}
        assert {key: step[key] for key in sampling} == pytest.approx(sampling, rel=1e-6)
        assert step["sync/gap"] < 1e-5
    assert not list(tmp_path.glob("dapo-*"))


def test_asynchronous_rollouts_of_two_ranks(tmp_path: Path, model_folder: Path, servers: list[FakeServer]) -> None:
    """Rank 0 alone asks for the training prompts, and both train on what it gets, also after a resume."""
    asynchronous = ["rollout.max_staleness=1", "rollout.correction.weights=token", "sampler.max_age=1"]
    asked = list[bool]()
    for server in servers:
        server.hooks[GENERATE] = lambda body: asked.append(body.get("priority", -1) >= 0)
    options = {"steps": 3, "eval_every": 3, "save_every": 1}
    command = serving(tmp_path, "ahead", model_folder, servers, *asynchronous, **options)

    def steps() -> list[dict[str, Any]]:
        on_ranks(2, run_all, [command])
        events = events_of(tmp_path, "ahead")
        assert [event["step"] for event in events if event["kind"] == "eval"] == [0, 3]
        return [event for event in events if event["kind"] == "step"]

    first, n_asked = steps(), sum(asked)
    assert n_asked == sum(step["sampling/groups"] for step in first)
    shutil.rmtree(tmp_path / "runs" / "ahead" / "checkpoints" / "step_000003")
    again = steps()
    assert again[:2] == first[:2]
    assert [step["step"] for step in again] == [1, 2, 3]
    for step in again:
        assert step["sync/gap"] < 1e-5
        assert step["batch/age_max"] <= 1
        assert 0 < step["train/rollout_ess"] <= 1
    assert sum(asked) - n_asked == again[2]["sampling/groups"]
