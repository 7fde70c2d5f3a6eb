"""The loop: what a run leaves behind, where its time went, that it is the same every time, and when it ends early."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import file_size_limit, make_config
from fake_server import FakeServer
from refusals import refused
from small import AtPhase, Notes, config_in, events_of, steps_of
from transformers import AutoTokenizer

from dapo_runner.checkpoint import CheckpointError, find_checkpoints
from dapo_runner.data.dataset import PromptCursor, load_data
from dapo_runner.files import read_jsonl
from dapo_runner.logging.metrics import before_and_after
from dapo_runner.logging.rollout_log import read_step, saved_steps
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.loop import train
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rollout.worker import rollout_sampling
from dapo_runner.run.early_stop import EarlyStop
from dapo_runner.timing import PHASES, StepClock, time_split


@pytest.fixture(scope="module")
def finished(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config_in(tmp_path_factory.mktemp("runs"), start), Notes())


def test_a_run_logs_every_step_and_evaluation(finished: Path) -> None:
    events, steps = read_jsonl(finished / "metrics.jsonl"), events_of(finished)
    order = [f"{event['kind']} {event['step']}" for event in events]
    assert order == ["eval 0", "step 1", "step 2", "eval 2", "step 3", "step 4", "eval 4"]
    assert {event["eval/problems"] for event in events_of(finished, "eval")} == {10}
    for step in steps:
        assert step["train/updates"] == step["batch/groups"] * 4 / 8
        assert step["train/ratio_max"] >= 1.0
        assert step["train/tokens"] > 0
        assert step["train/nonfinite"] == 0
        if step["sampling/groups"]:
            shares = [step[f"sampling/{kind}"] for kind in ("all_correct", "all_incorrect", "mixed")]
            assert sum(shares) == pytest.approx(1)
        else:
            assert step["sampling/carried_in"] >= 4
    assert [step["train/lr"] for step in steps] == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])
    assert steps[0]["sync/gap"] < 1e-5
    assert steps[0]["train/rollout_gap"] < 1e-5  # later steps may hold groups carried over from older weights
    assert list(before_and_after(finished)) == ["before (step 0)", "after (step 4)"]


def test_evaluations_share_the_scorer_of_a_run(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it the lock: no reward is called by two threads at a time. They allow no failures."""
    made, initialize = list[Scorer](), Scorer.__init__
    shaped, call = list[bool](), Scorer.__call__

    def noted(self: Scorer, *args: Any, **options: Any) -> None:
        made.append(self)
        initialize(self, *args, **options)

    monkeypatch.setattr(Scorer, "__init__", noted)
    monkeypatch.setattr(Scorer, "__call__", lambda self, *given: shaped.append(self.shaped) or call(self, *given))
    train(config_in(tmp_path, start, run={"steps": 1}), Notes())
    assert len(made) == 1
    assert (shaped[0], shaped[1], shaped[-1]) == (False, True, False)


def test_phases_add_up_and_an_inner_one_takes_its_time_off_the_outer(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: hand.now)
    heard: list[str] = []
    clock = StepClock(on_phase=heard.append)
    hand.now += 1
    with clock.phase("rollout"):
        hand.now += 2
        with clock.phase("score"):
            hand.now += 4
        hand.now += 8
    hand.now += 16
    with clock.phase("score"), clock.phase("score"):
        hand.now += 32
    assert clock.so_far() == {"other": 17, "rollout": 10, "score": 36}
    assert heard == ["rollout", "score", "rollout", "other", "score", "other"]  # changes alone
    hand.now += 64
    assert sum(clock.lap().values()) == hand.now - 100
    with suppress(KeyError), clock.phase("save"):
        hand.now += 1
        assert clock.lap() == {"other": 0, "save": 1}
        hand.now += 2
        raise KeyError
    hand.now += 4
    assert clock.lap() == {"save": 2, "other": 4}


def test_the_split_of_an_average_step() -> None:
    events = [
        {"step": 0, "kind": "start", "seconds/evaluate": 1000.0},
        {"step": 1, "kind": "step", "seconds/rollout": 3.0, "seconds/other": 1.0},
        {"step": 2, "kind": "step", "seconds/rollout": 3.0, "seconds/save": 9.0},
    ]
    assert list(time_split(events).items()) == [("save", 4.5), ("rollout", 3.0), ("other", 0.5)]
    assert time_split(events[:1]) == {}


def test_a_run_times_every_phase(finished: Path) -> None:
    began, *timings = read_jsonl(finished / "timings.jsonl")
    assert began.keys() == {"step", "kind", "seconds/probe", "seconds/evaluate", "seconds/other"}
    assert [(event["kind"], event["step"]) for event in timings] == [("step", n) for n in (1, 2, 3, 4)]
    for event, step in zip(timings, events_of(finished), strict=True):
        idle = {"ref_logprobs", "segments", "values", "critic", "wait"}
        idle |= {"evaluate"} if event["step"] % 2 else set()
        idle |= set() if step["sampling/groups"] else {"rollout", "score"}
        seconds = {key.removeprefix("seconds/"): value for key, value in event.items() if key.startswith("seconds/")}
        assert seconds.keys() == PHASES.keys() - idle
        assert min(seconds.values()) > 0


def test_a_run_keeps_its_rollouts_configuration_and_newest_checkpoints(finished: Path) -> None:
    assert [checkpoint.step for checkpoint in find_checkpoints(finished / CHECKPOINTS)] == [3, 4]
    assert (finished / "config.yaml").is_file()
    saved = {step: read_step(path) for step, path in saved_steps(finished / "rollouts").items()}
    assert list(saved) == [1, 2, 3, 4]
    for event in events_of(finished):
        groups = saved[event["step"]].groups
        assert len(groups) == saved[event["step"]].n_groups == event["batch/groups"]
        rewards = torch.tensor([[sample["reward"] for sample in group["samples"]] for group in groups])
        assert float(rewards.mean()) == pytest.approx(event["batch/reward"])


@pytest.mark.parametrize("rollouts", [{"groups": 0}, {"per_token": True}], ids=str)
def test_saved_rollouts_change_no_number(rollouts: dict[str, Any], finished: Path, start: Path, tmp_path: Path) -> None:
    run = train(config_in(tmp_path, start, logging={"rollouts": rollouts}), Notes())
    assert (run / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    assert (run / "rollouts").exists() == ("groups" not in rollouts)


def test_a_full_disk_under_the_log_is_told(start: Path, tmp_path: Path) -> None:
    """The log has grown beyond the files of a step by then."""
    log = tmp_path / "small" / "metrics.jsonl"
    with file_size_limit() as limit:
        notes = AtPhase("log", 4, lambda: limit(log.stat().st_size))
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
            train(config_in(tmp_path, start, logging={"rollouts": {"groups": 0}}), notes)
    assert any("step 4" in line and "metrics.jsonl" in line for line in notes.lines)
    assert [event["step"] for event in events_of(tmp_path / "small")] == [1, 2, 3]


def test_changed_data_do_not_continue_a_run(start: Path, tmp_path: Path) -> None:
    """Without held-out problems it is not evaluated."""
    problems = [{"question": f"{a}+{b}", "answer": f"#### {a + b}"} for a in range(10) for b in range(6)]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, problems)))
    data = {"format": "gsm8k", "path": str(path), "eval_size": 0}
    folder = train(config_in(tmp_path, start, data=data, run={"steps": 1}), Notes())
    assert before_and_after(folder) == {}
    problems[3]["answer"] = "#### 99"
    path.write_text("\n".join(map(json.dumps, problems)))
    with refused("data"):
        train(config_in(tmp_path, start, data=data), Notes())
    assert [checkpoint.step for checkpoint in find_checkpoints(folder / CHECKPOINTS)] == [1]


EVERY_OTHER = """
from dapo_runner.types import Verdict
calls = iter(range(10**6))
def right(prompt, completion):
    return Verdict(next(calls) % 2 == 0)
"""


def test_groups_carried_over_are_off_policy(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One update a step, so that every ratio was 1 by construction; all groups are kept where a fifth was expected."""
    (tmp_path / "every_other.py").write_text(EVERY_OTHER)
    monkeypatch.syspath_prepend(tmp_path)
    config = config_in(
        tmp_path,
        start,
        run={"steps": 3},
        reward={"kind": "every_other:right", "overlong": {"soft_punishment": False}},
        sampler={"initial_acceptance": 0.2},
        optimizer={"mini_batch_size": None},
    )
    first, second, third = events_of(train(config, Notes()))
    assert first["train/ratio_max"] == 1
    assert second["train/ratio_max"] > 1.001
    assert [first[f"batch/{figure}"] for figure in ("age", "age_max")] == [0, 0]
    assert [second[f"batch/{figure}"] for figure in ("age", "age_max")] == [1, 1]
    assert second["train/rollout_gap"] > 1e-3
    assert third["sampling/too_old"] == second["sampling/carried_out"] > 0
    assert (third["batch/age"], third["train/ratio_max"]) == (0, 1)


def test_every_round_draws_anew_and_every_time_alike(start: Path, tmp_path: Path) -> None:
    seeds, same = ([rollout_sampling(config_in(tmp_path, start), n).seed for n in range(100)] for _ in range(2))
    assert seeds == same
    assert len(set(seeds)) == 100


def test_asynchronous_episodes_lose_nothing(tmp_path: Path, model_folder: Path, servers: list[FakeServer]) -> None:
    named = {"urls": [server.url for server in servers], "folder": str(tmp_path)}
    ahead = {"engine": "server", "server": named, "max_staleness": 1, "correction": {"weights": "token"}}
    config = config_in(
        tmp_path,
        model_folder,
        run={"eval_every": 0},
        env={"kind": "talkers:Digits", "max_turn_tokens": 20},
        sampler={"filter_groups": None, "max_age": 2},
        logging={"rollouts": {"groups": 4}},
        optimizer={"token_budget": 128},
        rollout={"max_response_tokens": 60, **ahead},
    )
    folder = train(config, Notes())
    steps = [read_step(path) for path in saved_steps(folder / "rollouts").values()]
    dataset = load_data(config, AutoTokenizer.from_pretrained(model_folder))
    wanted = PromptCursor(dataset.train, config.run.seed, dataset.heldout).take(16)
    assert [group["prompt"]["id"] for step in steps for group in step.groups] == [prompt.id for prompt in wanted]
    assert {len(group["samples"]) for step in steps for group in step.groups} == {4}
    assert sum(line.get("env/episodes", 0) for line in read_jsonl(folder / "timings.jsonl")) >= 64
    assert max(steps_of(folder, "batch/age_max")) <= 2


def rule_of(metric: str, **settings: Any) -> EarlyStop:
    return EarlyStop(make_config(evaluation={"k": 4}, run={"early_stop": {"metric": metric, **settings}}))


@pytest.mark.parametrize(
    ("metric", "values", "settings", "ends"),
    [
        ("x", [0.1, 0.2, 0.2, 0.1, 0.15], {"patience": 3}, [5]),
        ("x", [0.1, 0.2, 0.2, 0.1, 0.3, 0.3], {"patience": 3}, []),
        ("x", [0.1, 0.9, 0.8, 1.0], {"patience": None, "target": 0.9}, [2, 4]),  # a run may go on: the last one decides
        ("x", [None, 0.1, math.nan, None], {"patience": 2}, [4]),
        ("cons@4", [0.5, "not logged", 0.5], {"patience": 2}, [3]),  # where no response has an extracted answer
    ],
)
def test_after_which_evaluations_it_ends(metric: str, values: list[Any], settings: dict[str, Any], ends: Any) -> None:
    rule, ended = rule_of(metric, **settings), []
    for number, value in enumerate(values, start=1):
        figures = {"eval/avg@4": 0.5} if value == "not logged" else {f"eval/{metric}": value}
        rule.replay({"kind": "eval", "step": number, **figures})
        ended += [number] if rule.reason is not None else []
    assert ended == ends


@pytest.mark.parametrize("metric", ["avg@3", "cons@5"])
def test_a_metric_that_is_not_logged_is_refused(metric: str) -> None:
    with refused("run.early_stop.metric"):
        rule_of(metric).observe(1, {"eval/avg@4": 0.5, "eval/reward": 0.5})


def test_a_run_that_ended_early_is_saved_and_can_be_gone_on_with(start: Path, tmp_path: Path) -> None:
    """At this rate no evaluation is better than the first one."""
    folder = tmp_path / "small"

    def run(patience: int | None, steps: int = 6) -> tuple[int, Notes]:
        """Its last step, and what it noted."""
        stop = None if patience is None else {"patience": patience}
        rare = {"early_stop": stop, "steps": steps, "eval_every": 1, "save_every": 10}
        train(config_in(tmp_path, start, run=rare, optimizer={"lr": 1e-30}), notes := Notes())
        return read_jsonl(folder / "metrics.jsonl")[-1]["step"], notes

    last, notes = run(2)
    assert last == 2
    assert [checkpoint.step for checkpoint in find_checkpoints(folder / CHECKPOINTS)] == [2]
    assert (
        sum("step 2" in line and "avg@2" in line and "run.early_stop.patience=2" in line for line in notes.lines) == 1
    )
    before = (folder / "metrics.jsonl").read_bytes()
    run(2)  # the same command again
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert run(3)[0] == 3
    assert run(None, steps=4)[0] == 4


def test_a_budget_of_tokens_ends_a_run_wherever_it_was_stopped(start: Path, tmp_path: Path) -> None:
    def generated(name: str, **run: Any) -> list[int]:
        run = {"eval_every": 0, "save_every": 10, "name": name} | run
        folder = train(config_in(tmp_path, start, run=run), Notes())
        events = read_jsonl(folder / "metrics.jsonl")
        assert (events[0]["kind"], events[-1]["kind"]) == ("eval", "eval")
        return steps_of(folder, "sampling/tokens")

    free = generated("free")
    budget = {"max_tokens": sum(free[:2]) + 1}
    assert generated("stopped", **budget, steps=1) == free[:1]
    assert generated("stopped", **budget) == free[:3]
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path / "stopped" / CHECKPOINTS)] == [1, 3]
