"""What may change in a run's folder, and runs that start from another one's checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from small import small_recipe, write_recipe

from dapo_runner.algorithms import losses
from dapo_runner.algorithms.mini_batch import NonFiniteUpdateError
from dapo_runner.checkpoint import CheckpointError, checkpoint_to_resume, find_checkpoints
from dapo_runner.cli import main
from dapo_runner.config import Config, ConfigError, SftConfig, dump_config, load_config, parse_config
from dapo_runner.config.algorithms import lay_over
from dapo_runner.config.reading import every_key
from dapo_runner.logging.metrics import before_and_after, read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.run_log import CHANGES_FILE, CHECKPOINTS
from dapo_runner.run import start
from dapo_runner.run.folder import MAY_CHANGE, is_among
from dapo_runner.run.fork import find_origin
from dapo_runner.run.start import open_run
from dapo_runner.run.steps import Run
from dapo_runner.train import train

Sections = dict[str, dict[str, object]]


def config_in(folder: Path, *, run: dict[str, Any] | None = None, **sections: dict[str, object]) -> Config:
    raw = small_recipe(output_dir=str(folder), **(run or {}))
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return parse_config(raw)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, each with a checkpoint."""
    return train(config_in(tmp_path_factory.mktemp("runs"), run={"steps": 6, "keep": 9}), Progress())


def copy_through(source: Path, folder: Path, step: int) -> Path:
    """The run as it was after ``step``."""
    run = Path(shutil.copytree(source, folder / source.name))
    for checkpoint in find_checkpoints(run / CHECKPOINTS):
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)
    return run


def steps_after(run: Path, step: int) -> list[bytes]:
    lines = [(line, json.loads(line)) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    return [line for line, event in lines if event["kind"] == "step" and event["step"] > step]


def test_what_may_change_does_and_is_written_down_with_its_step(source: Path, tmp_path: Path) -> None:
    run = copy_through(source, tmp_path, 2)
    changed = config_in(
        tmp_path,
        run={"steps": 3, "keep": 9, "eval_every": 1},
        optimizer={"lr": 1e-4},
        sampler={"max_rounds": 2},
        rollout={"max_batch_sequences": 8},
    )
    for _ in range(2):  # the second time nothing is new
        assert train(changed, Progress()) == run
        changes = read_log(run / CHANGES_FILE)
        assert {event["step"] for event in changes} == {2}
        assert {event["kind"] for event in changes} == {"change"}
        assert {event["key"]: (event["before"], event["after"]) for event in changes} == {
            "optimizer.lr": (1e-3, 1e-4),
            "rollout.max_batch_sequences": (256, 8),
            "run.eval_every": (2, 1),
            "run.output_dir": (str(source.parent), str(tmp_path)),
            "run.steps": (6, 3),
            "sampler.max_rounds": (3, 2),
        }
    events = read_log(run / "metrics.jsonl")
    assert [event["train/lr"] for event in events if event["kind"] == "step"] == [5e-4, 1e-3, 1e-4]
    assert load_config(run / "config.yaml").optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        ("rollout", {"temperature": 0.7}, r"rollout\.temperature: 1\.0 → 0\.7"),
        ("optimizer", {"weight_decay": 0.5, "lr": 1e-5}, r": optimizer\.weight_decay: 0\.1 → 0\.5\. "),
        ("sampler", {"prompts_per_step": 8}, r"sampler\.prompts_per_step: 4 → 8"),
    ],
)
def test_anything_else_is_refused(source: Path, section: str, values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*run.from={source}@STEP"):
        train(config_in(source.parent, **{section: values}), Progress())


def test_a_fork_is_advised_only_where_there_is_a_checkpoint(source: Path, tmp_path: Path) -> None:
    copy_through(source, tmp_path, 0)
    with refused("run.name") as caught:
        train(config_in(tmp_path, rollout={"temperature": 0.7}), Progress())
    assert "run.from" not in str(caught.value)


def test_the_list_names_settings_that_exist() -> None:
    known = {*every_key(Config), *every_key(SftConfig)}
    assert {name.rstrip(".") for name in MAY_CHANGE} <= known
    assert is_among("logging.rollouts.groups", MAY_CHANGE)
    assert not is_among("optimizer.lr_of_another", MAY_CHANGE)


def test_the_list_is_the_documented_one() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")
    listed = page.partition("## What may change in a run")[2].partition("Each change is a line")[0]
    assert {f"{name}*" if name.endswith(".") else name for name in MAY_CHANGE} == set(listed.split("`")[1::2])


def test_the_cure_for_a_loss_that_is_not_finite_can_be_taken(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error advises a lower optimizer.lr; the same folder used to refuse it."""
    run = copy_through(source, tmp_path, 3)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(source.parent), str(tmp_path)))
    original = losses.linear_dapo_loss

    def poisoned(*args: object, **kwargs: object) -> object:
        out = original(*args, **kwargs)  # type: ignore[arg-type]
        return out._replace(loss=out.loss * float("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(losses, "linear_dapo_loss", poisoned)
        with pytest.raises(NonFiniteUpdateError, match=r"optimizer\.lr"):
            train(config_in(tmp_path, run={"steps": 6, "keep": 9}), Progress())
    train(config_in(tmp_path, run={"steps": 6, "keep": 9}, optimizer={"lr": 1e-4}), Progress())
    rates = [event["train/lr"] for event in read_log(run / "metrics.jsonl") if event["kind"] == "step"]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-4, 1e-4, 1e-4])
    (change,) = read_log(run / CHANGES_FILE)
    assert (change["step"], change["key"]) == (3, "optimizer.lr")


def fork_config(source: Path, folder: Path, step: int = 4, **sections: dict[str, object]) -> Config:
    run = {"name": "fork", "steps": 6, "keep": 9, "from": f"{source}@{step}", **sections.pop("run", {})}
    return config_in(folder, run=run, **sections)


def test_a_fork_goes_on_as_its_run_did(source: Path, tmp_path: Path) -> None:
    """Also when what it came from is gone, and it is killed and started again."""
    original = copy_through(source, tmp_path / "source", 6)
    config = fork_config(original, tmp_path)
    fork = train(config.model_copy(update={"run": config.run.model_copy(update={"steps": 5})}), Progress())
    assert fork == tmp_path / "fork"
    shutil.rmtree(original)
    assert train(config, Progress()) == fork
    assert steps_after(fork, 4) == steps_after(source, 4)
    first, *_ = read_log(fork / "metrics.jsonl")
    assert (first["step"], first["kind"]) == (4, "eval")  # where it starts from
    assert list(before_and_after(fork)) == ["before (step 4)", "after (step 6)"]
    assert [event["kind"] for event in read_log(fork / "timings.jsonl")] == ["start", "step", "step"]
    told, *changes = read_log(fork / CHANGES_FILE)
    assert told == {"step": 4, "kind": "fork", "from": str(original / CHECKPOINTS / "step_000004")}
    assert [event["key"] for event in changes] == ["run.steps", "run.steps"]
    ours, theirs = (checkpoint_to_resume(run / CHECKPOINTS) for run in (fork, source))
    assert ours is not None
    assert theirs is not None
    one, two = (found.path / "optimizer/shard-00001-model-00001-of-00001.safetensors" for found in (ours, theirs))
    assert all(torch.equal(tensor, load_file(two)[name]) for name, tensor in load_file(one).items())


def test_a_fork_may_be_set_otherwise(source: Path, tmp_path: Path) -> None:
    fork = train(fork_config(source, tmp_path, rollout={"temperature": 0.9}, optimizer={"lr": 1e-4}), Progress())
    steps = [event for event in read_log(fork / "metrics.jsonl") if event["kind"] == "step"]
    assert [event["step"] for event in steps] == [5, 6]
    assert [event["train/lr"] for event in steps] == [1e-4, 1e-4]
    changes = {event["key"]: event["after"] for event in read_log(fork / CHANGES_FILE)[1:]}
    assert changes == {"optimizer.lr": 1e-4, "rollout.temperature": 0.9}


def test_a_fork_is_held_against_the_settings_at_its_checkpoint(source: Path, tmp_path: Path) -> None:
    """Not against those that its run went on with."""
    run = copy_through(source, tmp_path, 4)
    for lr in (1e-4, 1e-5):
        train(config_in(tmp_path, run={"steps": 6 if lr < 1e-4 else 5, "keep": 9}, optimizer={"lr": lr}), Progress())
    forks = {}
    for step in (3, 4, 5):
        fork = train(fork_config(run, tmp_path, step, run={"name": f"at{step}"}, optimizer={"lr": 1e-5}), Progress())
        forks[step] = {event["key"]: (event["before"], event["after"]) for event in read_log(fork / CHANGES_FILE)[1:]}
    start = {"optimizer.lr": (1e-3, 1e-5)}
    assert forks == {3: start, 4: start, 5: {"optimizer.lr": (1e-4, 1e-5), "run.steps": (5, 6)}}


def test_a_fork_that_was_killed_before_it_saved_begins_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fork_config(source, tmp_path, run={"save_every": 0})
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(config, Progress())
    assert steps_after(tmp_path / "fork", 4)
    fork = train(config, Progress())
    assert steps_after(fork, 4) == steps_after(source, 4)
    assert [event["step"] for event in read_log(fork / "metrics.jsonl") if event["kind"] == "eval"] == [4, 6]
    assert len(read_log(fork / CHANGES_FILE)) == 2  # the fork, and save_every


def test_a_fork_that_never_began_does_not_bind_the_next(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dapo_runner.run.start.open_engine", lambda *_: (_ for _ in ()).throw(ConfigError("no engine")))
        with pytest.raises(ConfigError, match="no engine"):
            train(fork_config(source, tmp_path, step=5), Progress())
    fork = train(fork_config(source, tmp_path, step=3), Progress())
    assert steps_after(fork, 3) == steps_after(source, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {"from": "small"}}, r"run\.from: .*RUN@STEP"),
        ({"run": {"from": "nowhere@3"}}, r"run\.from: .*config.yaml"),
        ({"run": {"from": "small@9"}}, r"step 9, .*1, 2, 3, 4, 5, 6"),
        ({"run": {"steps": 4}}, r"run\.steps: .* 4 .*run\.from"),
        ({"run": {"seed": 7}}, r"run\.from: .*run\.seed: 0 → 7"),
        ({"data": {"template": "{question} ="}}, r"data\.template.*step_000004/model as model\.path"),
        ({"model": {"dtype": "bfloat16"}}, r"model\.dtype"),
    ],
)
def test_what_cannot_be_forked_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, dict[str, object]], message: str
) -> None:
    monkeypatch.chdir(source.parent)
    with pytest.raises(ConfigError, match=message):
        train(fork_config(source, tmp_path, **changes), Progress())


@pytest.mark.parametrize(
    ("key", "origin", "change", "free"),
    [
        (
            "loss.reference",
            {"loss": {"reference_ema": 0.9, "overrides": {"kl_coef": 0.1}}},
            {"loss": {"reference": "another"}},
            {"loss": {"reference_ema": None}},
        ),
        (
            "critic.path",
            {"advantage": {"kind": "gae"}, "critic": {"clip": 0.2}},
            {"critic": {"path": "another"}},
            {"critic": {"share_trunk": True, "path": None}},
        ),
    ],
)
def test_a_model_that_the_checkpoint_holds_cannot_be_another(
    key: str, origin: Sections, change: Sections, free: Sections, source: Path, tmp_path: Path
) -> None:
    """It was read over the one named, without a word. A fork that leaves it be may name what it likes."""
    run = copy_through(source, tmp_path, 4)
    recipe = lay_over(small_recipe(output_dir=str(tmp_path), steps=6, keep=9), origin)
    (run / "config.yaml").write_text(dump_config(parse_config(recipe)))
    fork = lay_over(recipe, {"run": {"name": "fork", "from": f"{run}@4"}, **change})
    with pytest.raises(ConfigError, match=rf"run\.from: .*{key}: .*'another'"):
        find_origin(parse_config(fork))
    assert find_origin(parse_config(lay_over(fork, free)))


def test_a_damaged_checkpoint_is_not_forked(source: Path, tmp_path: Path) -> None:
    original = copy_through(source, tmp_path / "source", 6)
    spoiled = original / CHECKPOINTS / "step_000004" / "optimizer/shard-00001-model-00001-of-00001.safetensors"
    content = bytearray(spoiled.read_bytes())
    content[-1] ^= 1
    spoiled.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step_000004 .*optimizer"):
        train(fork_config(original, tmp_path), Progress())
    assert not list((tmp_path / "fork" / CHECKPOINTS).glob("step_*"))


def test_from_the_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write_recipe(tmp_path, steps=6, keep=9))
    command = ["train", recipe, "run.name=fork", f"run.from={source}@5"]
    assert main([*command, "--dry-run"]) == 0
    assert not (tmp_path / "runs").exists()
    assert main([*command, "run.seed=3", "--dry-run"]) == 2
    assert "run.seed: 0 → 3" in capsys.readouterr().err
    assert main(command) == 0
    assert main(["eval", str(tmp_path / "runs" / "fork")]) == 0
    assert "after (step 6)" in capsys.readouterr().out
    assert main(["train", recipe, "run.form=x@1"]) == 2
    assert "did you mean 'from'?" in capsys.readouterr().err


class Notes(Progress):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"reward": {"correct": 2.0}}, "reward.correct"),
        ({"rollout": {"stop": ["9"]}}, "rollout.stop"),
        ({"rollout": {"temperature": 0.9, "top_p": 0.9, "top_k": 5, "min_p": 0.1}}, "rollout.min_p"),
        ({"advantage": {"segments": {"kind": "tree", "per_step": 2}}}, ".*advantage.segments.kind"),
    ],
)
def test_a_fork_with_another_reward_end_or_tree_takes_no_groups_along(
    change: dict[str, dict[str, object]], key: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were sampled and rewarded under the old one: a step would mix two."""
    config = fork_config(source, tmp_path, **change)
    with open_run(config_in(tmp_path / "other", run={"steps": 6}), Progress()) as run:
        group = run.generate_round(run.sampler.cursor.take(1), 0)[0]
    load = start.load_checkpoint

    def with_a_group_left_over(checkpoint: Any, learner: Any, sampler: Any) -> Any:
        ranks = load(checkpoint, learner, sampler)
        sampler.buffer.groups, sampler.buffer.waiting = [group], [group]
        return ranks

    monkeypatch.setattr(start, "load_checkpoint", with_a_group_left_over)
    for _ in range(2):  # again where the first attempt got no further
        progress = Notes()
        with open_run(config, progress) as run:
            assert run.sampler.buffer.groups == run.sampler.buffer.waiting == []
        assert any(re.match(f"2 groups left over are dropped because of {key}", note) for note in progress.notes)
    with open_run(fork_config(source, tmp_path / "same"), Progress()) as run:
        assert run.sampler.buffer.groups == run.sampler.buffer.waiting == [group]
