"""Which preference pairs a group gives, and that they stay together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import make_completion, make_group, make_prompt, paired, random_sequences
from learners import learner_of

from dapo_runner.algorithms.losses import PreferenceLoss, make_pair, pair_metrics, pair_sequences
from dapo_runner.config import PreferenceConfig
from dapo_runner.types import Group, Sample, Verdict


def graded(*rewards: float, dead: tuple[int, ...] = ()) -> Group:
    samples = [
        Sample(make_completion(4 + i), Verdict(reward > 0), reward, trains=i not in dead)
        for i, reward in enumerate(rewards)
    ]
    return Group(make_prompt(), tuple(samples), step=1)


@pytest.mark.parametrize(
    ("group", "pair", "is_tie"),
    [
        (graded(0.1, 0.9, 0.5, 0.3), (1, 0), False),
        (make_group("WRWW"), (1, 3), False),
        (make_group("RRRR"), None, True),
        (graded(0.9, 0.1, 0.5, dead=(0,)), (2, 1), False),
        (graded(0.9, 0.1, dead=(0,)), None, False),
    ],
)
def test_best_against_worst(group: Group, pair: tuple[int, int] | None, is_tie: bool) -> None:
    assert make_pair(group) == (pair, is_tie)


def test_the_records_of_a_step() -> None:
    groups, config = [graded(0.0, 0.2, 1.0), make_group("WW"), graded(1.0, 0.0)], PreferenceConfig()
    sequences = pair_sequences(groups, step=3)
    assert [sequence.pair for sequence in sequences] == [0, -1, 0, -1, -1, 1, 1]
    assert [float(sequence.advantages[-1]) for sequence in sequences] == [-1, 0, 1, 0, 0, 1, -1]
    assert [bool(sequence.mask.any()) for sequence in sequences] == [x.pair >= 0 for x in sequences]
    assert [(sequence.group_id, sequence.age) for sequence in sequences[2:6]] == [(0, 2), (1, 3), (1, 3), (2, 2)]
    assert [sequences.index(sequence) for sequence in PreferenceLoss(config).arrange(sequences)] == [2, 0, 5, 6]
    assert pair_metrics(groups, config) == {"ties": 1}
    assert pair_metrics(groups, None) == {}


def test_a_pair_is_not_taken_apart(model_folder: Path) -> None:
    """Half of 14 responses would be an odd number."""
    sections = {"preference": {"reference": "step"}, "optimizer": {"mini_batch_size": 8, "token_budget": 48}}
    learner = learner_of(model_folder, **sections)
    minis = learner.prepare(paired(random_sequences(18)))
    assert [mini.denominator for mini in minis] == [4, 3]
    for mini in minis:
        for batch in mini.micro_batches:
            chosen, rejected = batch.sequence_ids.view(-1, 2).unbind(1)
            assert torch.equal(chosen + 1, rejected)
            assert not (chosen % 2).any()
    assert learner.update(minis[0], 0)["entropy"] > 0
