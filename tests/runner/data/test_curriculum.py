"""Curricula: which prompts are asked when, that the order is the seed's, and that a resume is exact."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_config, make_group, make_prompt
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused
from small import Dapo, write_recipe

from dapo_runner.config.rollout import CurriculumConfig, SamplerConfig
from dapo_runner.data.curriculum import ByLatestGroup, Curriculum, make_curriculum
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.types import Group, Prompt

PROMPTS = [replace(make_prompt(str(i)), row={"difficulty": 10 * i}) for i in range(8)]


def cursor(prompts: list[Prompt] = PROMPTS, **curriculum: Any) -> PromptCursor:
    config = SamplerConfig(curriculum=CurriculumConfig.model_validate(curriculum) if curriculum else None)
    return PromptCursor(prompts, seed=3, curriculum=make_curriculum(config, prompts))


def names(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_by_column_the_easiest_come_first_in_the_order_of_the_seed() -> None:
    walk = cursor(column="difficulty", start=0.25, steps=3)
    for step, n in ((1, 2), (2, 4), (3, 6), (4, 8), (5, 8)):  # prompts in play
        walk.position, walk.epoch = 0, 0
        assert names(walk.take(n, step)) == [name for name in names(cursor().take(8)) if int(name) < n]
    tied = [replace(prompt, row={"level": "2" if prompt.id in "01" else "5"}) for prompt in PROMPTS]
    assert set(names(cursor(tied, column="level", start=0.125).take(6))) == {"0", "1"}


def test_the_limit_of_a_step_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Fraction] = []

    def counted(share: Fraction) -> int:
        computed.append(share)
        return math.ceil(share)

    monkeypatch.setattr("dapo_runner.data.curriculum.math", SimpleNamespace(ceil=counted, isfinite=math.isfinite))
    walk = cursor(column="difficulty", start=0.25, steps=3)
    for step in (1, 2):
        walk.take(6, step)
    assert computed == [2, 4]  # prompts in play


@pytest.mark.parametrize("value", [None, "hard", float("nan"), [1]])
def test_a_row_without_a_difficulty_is_named(value: object) -> None:
    prompts = [*PROMPTS, replace(make_prompt("last"), row={} if value is None else {"difficulty": value})]
    with refused("sampler.curriculum.column"):
        cursor(prompts, column="difficulty")


def ask(curriculum: Curriculum, epoch: int, pattern: dict[str, str]) -> list[str]:
    """Who is asked in an epoch, and answers so."""
    asked = names([prompt for prompt in PROMPTS if curriculum.admits(prompt, 1, epoch)])
    for name in asked:
        curriculum.observe(make_group(pattern.get(name, "RW"), name), epoch)
    return asked


def test_what_is_solved_or_hopeless_rests() -> None:
    curriculum, every = ByLatestGroup(2, "correctness"), names(PROMPTS)
    pattern, rested = {"0": "RRRR", "1": "WWWW", "2": "RWWW"}, every[2:]
    assert [ask(curriculum, epoch, pattern) for epoch in range(4)] == [every, rested, rested, every]
    pattern["0"] = "RRWW"
    later = [ask(curriculum, epoch, pattern) for epoch in range(4, 8)]
    assert later == [rested, rested, every, ["0", *rested]]
    walk = cursor(rest=3)  # when all rest, it goes on to when they do not
    walk.observe([make_group("RRRR", prompt.id) for prompt in walk.take(8)])
    assert (len(walk.take(8)), walk.epoch) == (8, 4)


def test_only_the_newest_group_of_a_prompt_counts() -> None:
    curriculum = ByLatestGroup(2, "correctness")
    for epoch, pattern in enumerate(("RRRR", "RW")):  # a round that spans epochs has the prompt twice
        curriculum.observe(make_group(pattern, "0"), epoch)
    assert curriculum.due == {}


def test_with_graded_rewards_what_the_sampler_accepts_does_not_rest() -> None:
    group = make_group("WWWW", "0")
    graded = replace(group, samples=tuple(replace(one, base_reward=0.1 * n) for n, one in enumerate(group.samples)))
    for filter_groups, rests in (("reward", False), ("correctness", True), (None, True)):
        curriculum = make_curriculum(SamplerConfig(filter_groups=filter_groups, curriculum=CurriculumConfig()), PROMPTS)
        curriculum.observe(graded, 0)
        assert curriculum.admits(PROMPTS[0], 1, 1) != rests


def test_a_prompt_rests_from_the_epoch_in_which_it_was_asked() -> None:
    """Also if its round ends in the next one."""
    walk = cursor(rest=1)
    walk.take(6)
    *last, _ = names(walk.take(3))
    assert (walk.epoch, walk.position) == (1, 1)
    walk.observe([make_group("RRRR", name) for name in last])
    asked = [(*names(walk.take(1)), walk.epoch) for _ in range(5 + 8)]
    assert sorted(epoch for name, epoch in asked if name in last) == [2, 2]


@settings(max_examples=15)
@given(answers=st.lists(st.sampled_from(["RRRR", "RWRW", "WWWW"]), min_size=8, max_size=8), stop=st.integers(1, 4))
@example(answers=["RRRR", "RWRW"] * 4, stop=3)
def test_a_resume_is_exact(answers: list[str], stop: int) -> None:
    def sampler() -> DynamicSampler:
        config = make_config(sampler={"prompts_per_step": 2, "max_rounds": 3, "on_exhausted": "train_partial"})
        return DynamicSampler(cursor(rest=1), GroupBuffer(config))

    def run(of: DynamicSampler, n: int) -> list[list[str]]:
        """The prompts that are asked, and those of each step."""
        asked: list[list[str]] = []

        def answer(prompts: list[Prompt], _: int) -> list[Group]:
            asked.append(names(prompts))
            return [make_group(answers[int(prompt.id)], prompt.id) for prompt in prompts]

        return [names([group.prompt for group in of.next(answer).groups]) for _ in range(n)] + asked

    whole, first, second = sampler(), sampler(), sampler()
    assert run(whole, stop) == run(first, stop)
    file = io.BytesIO()
    state = first.state_dict()
    run(first, 1)  # a state is of its moment
    torch.save(state, file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert run(second, 3) == run(whole, 3)
    with_one, without = cursor(rest=2), cursor()
    assert without.state_dict().keys() == {"epoch", "position", "seed", "data"}
    with_one.load_state_dict(without.state_dict())  # an old checkpoint, or a fork
    without.load_state_dict(with_one.state_dict())


def test_a_dry_run_checks_the_column(tmp_path: Path, dapo: Dapo) -> None:
    command = ["train", write_recipe(tmp_path, steps=1), "--dry-run"]
    chosen = "sampler.curriculum={start: 0.5, steps: 2, column: "
    dapo(*command, f"{chosen}difficulty}}")
    dapo.refuses("sampler.curriculum.column", *command, f"{chosen}level}}")


@given(st.integers(1, 99), st.integers(1, 12), st.data())
def test_the_share_is_not_rounded_up_by_floats(start: int, steps: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(1, steps))
    prompts = [replace(make_prompt(str(i)), row={"difficulty": i}) for i in range(100)]
    curriculum = make_curriculum(
        SamplerConfig(curriculum=CurriculumConfig(column="difficulty", start=start / 100, steps=steps)), prompts
    )
    wanted = -(-(start * steps + (100 - start) * (step - 1)) // steps)  # in integers
    assert sum(curriculum.admits(prompt, step, 0) for prompt in prompts) == wanted
