"""The loop: what a run leaves behind, and that it is the same run every time."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from small import small_recipe

from dapo_runner.algorithms import losses
from dapo_runner.algorithms.mini_batch import NonFiniteUpdateError
from dapo_runner.checkpoint import CheckpointError, find_checkpoints
from dapo_runner.config import Config, ConfigError, parse_config
from dapo_runner.logging.metrics import MetricsLog, before_and_after, read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.rollout_log import read_step, saved_steps
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.rollout.group_buffer import SamplingExhaustedError
from dapo_runner.rollout.worker import rollout_sampling
from dapo_runner.run.start import open_run
from dapo_runner.timing import PHASES
from dapo_runner.train import train


class Notes(Progress):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def config_in(folder: Path, **sections: dict[str, object]) -> Config:
    raw = small_recipe(output_dir=str(folder))
    for name, values in sections.items():
        raw[name] = {**raw[name], **values}
    return parse_config(raw)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return train(config_in(folder), Progress())


def test_a_run_logs_every_step_and_evaluation(finished: Path) -> None:
    events = read_log(finished / "metrics.jsonl")
    assert [(event["kind"], event["step"]) for event in events] == [
        ("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("step", 4), ("eval", 4)
    ]  # fmt: skip
    for event in events:
        if event["kind"] == "step":
            assert event["train/updates"] == event["batch/groups"] * 4 / 8
            assert event["train/ratio_max"] >= 1.0
            assert event["train/tokens"] > 0
            assert event["train/nonfinite"] == 0
            shares = [
                event[f"sampling/{kind}"]
                for kind in ("all_correct", "all_incorrect", "mixed")
                if event["sampling/groups"]
            ]
            assert sum(shares) == pytest.approx(1 if event["sampling/groups"] else 0)
            assert event["sampling/groups"] or event["sampling/carried_in"] >= 4
        else:
            assert event["eval/problems"] == 10
    rates = [event["train/lr"] for event in events if event["kind"] == "step"]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])  # warm-up over two rollout steps
    first = next(event for event in events if event["kind"] == "step")
    assert first["sync/gap"] < 1e-5
    assert first["train/rollout_gap"] < 1e-5  # later steps may hold groups carried over from older weights
    assert list(before_and_after(finished)) == ["before (step 0)", "after (step 4)"]
    unsampled = {event["step"] for event in events if event["kind"] == "step" and not event["sampling/groups"]}
    assert len(unsampled) < 3  # those that the step before filled
    timings = read_log(finished / "timings.jsonl")
    assert [(event["kind"], event["step"]) for event in timings] == [("start", 0), *(("step", n) for n in (1, 2, 3, 4))]
    assert timings[0].keys() == {"step", "kind", "seconds/probe", "seconds/evaluate", "seconds/other"}
    for event in timings[1:]:
        named = {key.removeprefix("seconds/") for key in event if key.startswith("seconds/")}
        idle = {"ref_logprobs", "segments", "values", "critic", "wait"}
        if event["step"] % 2:
            idle.add("evaluate")
        if event["step"] in unsampled:
            idle |= {"rollout", "score"}
        assert named == PHASES.keys() - idle
        assert all(value > 0 for key, value in event.items() if key.startswith("seconds/"))


def test_a_run_keeps_the_rollouts_of_its_steps(finished: Path) -> None:
    events = {event["step"]: event for event in read_log(finished / "metrics.jsonl") if event["kind"] == "step"}
    steps = saved_steps(finished / "rollouts")
    assert list(steps) == [1, 2, 3, 4]
    for step, path in steps.items():
        saved = read_step(path)
        samples = [sample for group in saved.groups for sample in group["samples"]]
        assert len(saved.groups) == saved.n_groups == events[step]["batch/groups"]
        assert sum(sample["reward"] for sample in samples) / len(samples) == pytest.approx(events[step]["batch/reward"])
        for group in saved.groups:
            rewards = torch.tensor([sample["reward"] for sample in group["samples"]])
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            assert [sample["advantage"] for sample in group["samples"]] == pytest.approx(expected.tolist(), rel=1e-5)


def test_logging_takes_no_part_in_a_run(finished: Path, tmp_path: Path) -> None:
    quiet = train(config_in(tmp_path / "quiet", logging={"rollouts": {"groups": 0}}), Progress())
    assert not (quiet / "rollouts").exists()
    every = train(config_in(tmp_path / "every", logging={"rollouts": {"per_token": True}}), Progress())
    for step, path in saved_steps(every / "rollouts").items():
        groups = read_step(path).groups
        for sample in (sample for group in groups for sample in group["samples"]):
            columns = sample.pop("per_token")
            assert {len(column) for column in columns.values()} == {sample["tokens"]}
            assert "".join(columns["text"]).removesuffix("<eos>") == sample["response"]
        assert groups == read_step(saved_steps(finished / "rollouts")[step]).groups
    for run in (quiet, every):
        assert (run / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_a_run_keeps_its_newest_checkpoints_and_its_configuration(finished: Path) -> None:
    assert [checkpoint.step for checkpoint in find_checkpoints(finished / CHECKPOINTS)] == [3, 4]
    assert (finished / "config.yaml").is_file()
    assert (finished / "model" / "model.safetensors").is_file()


def test_a_run_says_what_may_not_be_meant(tmp_path: Path) -> None:
    notes = Notes()
    with open_run(config_in(tmp_path, rollout={"top_p": 0.9}), notes):
        pass
    assert any(line.startswith("rollout.top_p=0.9: ") for line in notes.lines)


def test_the_same_configuration_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    again = train(config_in(tmp_path), Progress())
    assert (again / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    other = train(config_in(tmp_path, run={**small_recipe()["run"], "name": "other", "seed": 1,
                                           "output_dir": str(tmp_path)}), Progress())  # fmt: skip
    assert (other / "metrics.jsonl").read_bytes() != (finished / "metrics.jsonl").read_bytes()


def test_a_finished_run_can_be_made_longer_and_equals_a_long_one(finished: Path, tmp_path: Path) -> None:
    """The last step of the short run evaluates and saves; those of the long one fall on the same steps."""
    short = train(config_in(tmp_path / "a", run={**small_recipe(steps=2)["run"], "output_dir": str(tmp_path / "a")}),
                  Progress())  # fmt: skip
    notes = Notes()
    longer = train(config_in(tmp_path / "a"), notes)
    assert longer == short
    assert any("resuming after step 2" in line for line in notes.lines)
    assert (longer / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_another_configuration_does_not_continue_a_run(finished: Path) -> None:
    changed = config_in(finished.parent, optimizer={**small_recipe()["optimizer"], "eps": 0.5})
    with pytest.raises(ConfigError, match=r": optimizer\.eps: 1e-08 → 0\.5\. "):
        train(changed, Progress())


def test_an_attempt_that_failed_before_it_began_does_not_bind_the_next(tmp_path: Path) -> None:
    wrong = {**small_recipe()["data"], "template": "What is {question}?"}
    with refused("data.template"):
        train(config_in(tmp_path, data=wrong), Progress())
    assert train(config_in(tmp_path), Progress()).is_dir()


def test_a_run_without_held_out_problems_is_not_evaluated(tmp_path: Path) -> None:
    data = small_recipe()["data"]
    raw = small_recipe(output_dir=str(tmp_path), steps=1)
    raw["data"] = {**data, "eval_size": 1}
    config = parse_config(raw)
    progress = Progress()
    run = open_run(config, progress)
    run.dataset.heldout.clear()
    run.evaluate(0)
    run.log.close()
    assert before_and_after(run.folder) == {}


def test_a_run_with_adapters_and_a_penalty_resumes_exactly(tmp_path: Path) -> None:
    raw = small_recipe(output_dir=str(tmp_path), steps=4)
    raw["model"]["lora"] = {"rank": 4}
    raw["optimizer"]["mini_batch_size"] = 16  # one update a step: before the first, the policy is the reference
    raw["loss"] = {"objective": "grpo"}
    whole = train(parse_config({**raw, "run": {**raw["run"], "name": "whole"}}), Progress())
    train(parse_config({**raw, "run": {**raw["run"], "steps": 2}}), Progress())
    resumed = train(parse_config(raw), Progress())
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    steps = [event for event in read_log(whole / "metrics.jsonl") if event["kind"] == "step"]
    assert steps[0]["train/ref_kl"] == pytest.approx(0.0, abs=1e-5)
    assert steps[-1]["train/ref_kl"] > 0


def test_a_separate_reference_stays_what_training_started_from(tmp_path: Path) -> None:
    raw = small_recipe(output_dir=str(tmp_path), steps=4)
    raw["loss"] = {"overrides": {"kl_coef": 0.1}}
    whole = train(parse_config({**raw, "run": {**raw["run"], "name": "whole"}}), Progress())
    train(parse_config({**raw, "run": {**raw["run"], "steps": 2}}), Progress())
    resumed = train(parse_config(raw), Progress())
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_damaged_checkpoint_stops_the_resume(tmp_path: Path) -> None:
    folder = train(config_in(tmp_path, run={**small_recipe(steps=2)["run"], "output_dir": str(tmp_path)}),
                   Progress())  # fmt: skip
    spoiled = folder / CHECKPOINTS / "step_000002" / "optimizer" / "shard-00001-model-00001-of-00001.safetensors"
    content = bytearray(spoiled.read_bytes())
    content[-1] ^= 1
    spoiled.write_bytes(content)
    with pytest.raises(CheckpointError, match="step_000002"):
        train(config_in(tmp_path), Progress())
    assert spoiled.exists()


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refused("run.output_dir"):
        train(config_in(tmp_path / "file"), Progress())


def test_a_full_disk_under_the_log_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsLog, "write", full)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        train(config_in(tmp_path), Progress())


def test_changed_data_do_not_continue_a_run(tmp_path: Path) -> None:
    problems = [{"question": f"{a}+{b}", "answer": f"#### {a + b}"} for a in range(10) for b in range(6)]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, problems)))
    model = train(config_in(tmp_path, run={**small_recipe(steps=1)["run"], "name": "made", "output_dir":
                                           str(tmp_path)}), Progress()) / "model"  # fmt: skip
    raw = small_recipe(output_dir=str(tmp_path), steps=2)
    raw["model"] = {"path": str(model), "dtype": "float32"}
    raw["data"] = {"path": str(path), "template": "{question}=", "eval_size": 5}
    folder = train(parse_config(raw), Progress())
    problems[3]["answer"] = "#### 99"
    path.write_text("\n".join(map(json.dumps, problems)))
    longer = parse_config({**raw, "run": {**raw["run"], "steps": 4}})
    with refused("data.path"):
        train(longer, Progress())
    assert [checkpoint.step for checkpoint in find_checkpoints(folder / CHECKPOINTS)] == [1, 2]


def test_exhaustion_stops_the_run_or_is_told(tmp_path: Path) -> None:
    hopeless = {"arithmetic": {"min_digits": 9, "max_digits": 9, "train_size": 60}, "eval_size": 4}
    stubborn = config_in(tmp_path, data={**small_recipe()["data"], **hopeless}, rollout={
        **small_recipe()["rollout"], "max_prompt_tokens": 32}, sampler={"prompts_per_step": 4, "max_rounds": 2,
        "on_exhausted": "error"})  # fmt: skip
    with pytest.raises(SamplingExhaustedError, match="in 2 rounds"):
        train(stubborn, Progress())
    notes = Notes()
    raw = stubborn.model_dump(mode="json")
    raw["sampler"]["on_exhausted"] = "train_partial"
    raw["run"] |= {"name": "patient", "steps": 2}
    folder = train(parse_config(raw), notes)
    assert sum("in 2 rounds" in line for line in notes.lines) == 2
    steps = [event for event in read_log(folder / "metrics.jsonl") if event["kind"] == "step"]
    assert [step["train/updates"] for step in steps] == [0, 0]


EVERY_OTHER = """
from dapo_runner.types import Verdict
calls = iter(range(10**6))
def right(prompt, completion):
    return Verdict(next(calls) % 2 == 0)
"""


def test_groups_carried_over_are_not_taken_for_on_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One update a step, so that every ratio was 1 by construction; all groups are kept where a fifth was expected."""
    (tmp_path / "every_other.py").write_text(EVERY_OTHER)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = small_recipe(steps=3)
    config = config_in(
        tmp_path,
        run={**recipe["run"], "output_dir": str(tmp_path)},
        reward={"kind": "every_other:right", "overlong": {"soft_punishment": False}},
        sampler={**recipe["sampler"], "initial_acceptance": 0.2},
        optimizer={**recipe["optimizer"], "mini_batch_size": None},
    )
    folder = train(config, Progress())
    first, second, third = (event for event in read_log(folder / "metrics.jsonl") if event["kind"] == "step")
    assert first["train/ratio_max"] == 1
    assert second["train/ratio_max"] > 1.001
    assert [first[f"batch/{figure}"] for figure in ("age", "age_max")] == [0, 0]
    assert [second[f"batch/{figure}"] for figure in ("age", "age_max")] == [1, 1]
    assert second["train/rollout_gap"] > 1e-3
    assert third["sampling/too_old"] == second["sampling/carried_out"] > 0
    assert (third["batch/age"], third["train/ratio_max"]) == (0, 1)


def test_every_round_draws_anew_and_every_time_alike(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    seeds = [rollout_sampling(config, number).seed for number in range(100)]
    assert len(set(seeds)) == 100
    assert seeds == [rollout_sampling(config, number).seed for number in range(100)]
    assert rollout_sampling(config, 3).n == 4


def test_an_engine_without_the_new_weights_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the probe at once, and without it by the rollout gap of the steps that follow."""
    from dapo_runner.rollout.hf import HFEngine
    from dapo_runner.rollout.probe import OutOfSyncError

    monkeypatch.setattr(HFEngine, "update_weights", lambda *_: None)
    fast = {**small_recipe()["optimizer"], "lr": 5e-3}
    with pytest.raises(OutOfSyncError, match=r"rollout\.probe\.bound: .* 0\.001,"):
        train(config_in(tmp_path / "probed", optimizer=fast), Progress())
    unprobed = {**small_recipe()["rollout"], "probe": {"enabled": False}}
    folder = train(config_in(tmp_path / "unprobed", optimizer=fast, rollout=unprobed), Progress())
    steps = [event for event in read_log(folder / "metrics.jsonl") if event["kind"] == "step"]
    assert steps[0]["train/rollout_gap"] < 1e-4
    assert steps[-1]["train/rollout_gap"] > 1e-2
    assert steps[-1]["train/rollout_ess"] < steps[0]["train/rollout_ess"]
    assert "sync/gap" not in steps[0]


def test_a_broken_update_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = losses.linear_dapo_loss
    calls = iter(range(100))

    def poisoned(*args: object, **kwargs: object) -> object:
        out = original(*args, **kwargs)  # type: ignore[arg-type]
        return out._replace(loss=out.loss * float("nan")) if next(calls) == 12 else out

    monkeypatch.setattr(losses, "linear_dapo_loss", poisoned)
    with pytest.raises(NonFiniteUpdateError, match=r"loss nan") as caught:
        train(config_in(tmp_path), Progress())
    (kept,) = (tmp_path / "small" / "nonfinite").iterdir()
    assert str(kept.parent) in str(caught.value)
    stored, batches = load_file(kept), caught.value.mini.micro_batches
    wanted = {
        f"{place}.{name}": tensor for place, batch in enumerate(batches) for name, tensor in batch.tensors().items()
    }
    assert wanted
    assert stored.keys() == wanted.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, wanted[name]), name
    done = [event["step"] for event in read_log(tmp_path / "small" / "metrics.jsonl")]
    saved = [checkpoint.step for checkpoint in find_checkpoints(tmp_path / "small" / CHECKPOINTS)]
    assert saved
    assert max(saved) == max(done) < 4
