"""Objectives that select tokens over the whole mini-batch, and the values of single tokens that an update keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import pack, random_sequences
from learners import CPU, assert_same_gradients, learner_of, update
from torch import Tensor

from dapo_kernels import policy_loss
from dapo_runner.algorithms.selection import TokenValues
from dapo_runner.config import ModelConfig
from dapo_runner.policy.model import load_policy
from dapo_runner.types import TrainingSequence

SELECTING: dict[str, dict[str, Any]] = {
    "top_entropy": {},
    "clip_cov": {"clip_cov": (0.2, -10.0, 10.0)},  # the paper's shares and bounds select nothing of so few tokens
    "kl_cov": {"kl_cov": (0.2, 1.0)},
}


CLIP_COV = {"objective": "clip_cov", "overrides": SELECTING["clip_cov"]}


@pytest.mark.parametrize(("old", "stale"), [("engine", set(range(8))), ("trainer", {1, 2, 6})])
def test_clip_cov_leaves_alone_what_the_clip_has_stopped(model_folder: Path, old: str, stale: set[int]) -> None:
    """By the engine's log-probs all tokens are outside the clip. On-policy these count for a stale response only."""
    learner = learner_of(model_folder, loss={**CLIP_COV, "old_logprobs": old}, optimizer={"token_budget": 40})
    sequences = [replace(item, age=int(index in stale)) for index, item in enumerate(random_sequences(8))]
    for sequence in sequences:
        sequence.rollout_logprobs.fill_(-50.0)
        sequence.advantages.abs_()
    (mini,) = learner.prepare(sequences)
    found = set[int]()
    for batch, chosen in zip(mini.micro_batches, learner.select_tokens(mini, 0), strict=True):
        assert chosen is not None
        assert not bool((chosen & ~batch.mask).any())
        found |= set(batch.sequence_ids.repeat_interleave(torch.tensor(batch.lengths))[chosen].tolist())
    assert not found & stale
    assert bool(found) == (old == "trainer")


@pytest.mark.parametrize("name", SELECTING)
def test_the_gradient_is_that_of_one_call_over_everything(model_folder: Path, name: str) -> None:
    """The loss of `dapo_kernels`, left to select by itself."""
    sequences, found = random_sequences(12), []
    loss = {"objective": name, "overrides": SELECTING[name], "old_logprobs": "engine"}
    for budget in (24, 1024):
        learner = learner_of(model_folder, loss=loss, optimizer={"token_budget": budget})
        (mini,) = learner.prepare(sequences)
        found.append(update(learner, mini)[0])
    assert_same_gradients(found[0], found[1], 1e-5)
    if name == "clip_cov":
        return  # its random numbers are drawn in another order inside the kernel
    policy = load_policy(model_folder, ModelConfig(path="x", dtype="float32"), CPU)
    (batch,) = pack(sequences, 1024)
    stats = policy.model.get_output_embeddings()(policy.hidden_states(batch)).log_softmax(-1)
    logprobs, entropy = stats.gather(1, batch.target_ids[:, None])[:, 0], -(stats.exp() * stats).sum(-1)
    arguments = (logprobs, batch.old_logprobs, batch.advantages)
    policy_loss(*arguments, entropy=entropy, objective=learner.loss.objective, mask=batch.mask).loss.backward()
    assert_same_gradients(found[1], {key: x.grad for key, x in policy.model.named_parameters()}, 1e-4)


def test_random_choices_are_those_of_the_update(model_folder: Path) -> None:
    """The same after a resume, others in each update."""
    learner = learner_of(model_folder, loss=CLIP_COV)
    (mini,) = learner.prepare(random_sequences(12))

    def drawn(step: int, index: int = 0) -> list[list[bool]]:
        mini.index = index
        return [selection.tolist() for selection in learner.select_tokens(mini, step) if selection is not None]

    assert drawn(3) == drawn(3)
    assert drawn(3) not in (drawn(4), drawn(3, index=1))


def of_training_tokens(values: dict[int, TokenValues], sequences: list[TrainingSequence], name: str) -> Tensor:
    return torch.cat([getattr(found, name)[sequences[index].mask[1:]] for index, found in sorted(values.items())])


@pytest.mark.parametrize("budget", [24, 256])
@pytest.mark.parametrize("objective", ["dapo", "gspo", "gmpo", "top_entropy"])
def test_values_of_tokens_add_up_to_the_metrics_of_the_update(model_folder: Path, objective: str, budget: int) -> None:
    sections = {"logging": {"rollouts": {"per_token": True, "groups": None}}, "optimizer": {"token_budget": budget}}
    learner = learner_of(model_folder, **sections, loss={"objective": objective, "old_logprobs": "engine"})
    sequences = random_sequences(12)
    (mini,) = learner.prepare(sequences)
    own = {i: learner.logprobs(pack([sequences[i]], 256)[0]) for i, x in enumerate(sequences) if x.mask.any()}
    figures, values = learner.update(mini, 0), learner.token_values
    assert sorted(values) == sorted(own)
    names = [name for name in TokenValues._fields if getattr(values[0], name) is not None]
    column = {name: of_training_tokens(values, sequences, name) for name in names}
    assert column["entropy"].mean().item() == pytest.approx(figures["entropy"], rel=1e-5)
    assert column["ratio"].mean().item() == pytest.approx(figures["ratio"], rel=1e-5)
    for number, name in enumerate(("clip_low", "clip_high", "clip_dual"), start=1):
        assert (column["clip_hit"] == number).double().mean().item() == pytest.approx(figures[name])
    high, n = column["high_entropy"], column["entropy"].numel()
    assert high.sum() == math.ceil(0.2 * n - 1e-9)
    assert column["entropy"][high].min() >= column["entropy"][~high].max()
    assert ("selected" in column) == (objective == "top_entropy")
    assert "selected" not in column or torch.equal(column["selected"], high)
    for index, found in values.items():
        live, engine = sequences[index].mask[1:], sequences[index].rollout_logprobs[1:]
        torch.testing.assert_close(found.logprobs[live], own[index][live], atol=1e-5, rtol=1e-5)
        if objective == "dapo":
            torch.testing.assert_close(found.ratio[live], (own[index] - engine)[live].exp(), rtol=1e-4, atol=0)


def test_values_are_of_the_first_groups_of_the_step(model_folder: Path) -> None:
    """Nothing is left over from the step before. On-policy every ratio is 1, except that of a stale response."""
    logging = {"rollouts": {"per_token": True, "groups": 2}}
    learner = learner_of(model_folder, logging=logging, optimizer={"mini_batch_size": 8, "lr": 1e-9})
    sequences = [replace(sequence, age=index % 2) for index, sequence in enumerate(random_sequences(12))]
    for _ in range(2):
        minis = learner.prepare(sequences)
        assert len(minis) == 2  # six sequences each, four of a group
        for mini in minis:
            learner.update(mini, 0)
        assert sorted(learner.token_values) == [0, 1, 2, 3, 5, 6, 7]  # number 4 does not train
        for index, values in learner.token_values.items():
            assert values.logprobs.numel() == sequences[index].length - 1
            ratio = values.ratio[sequences[index].mask[1:]]
            assert bool((ratio - 1).abs().max() < 1e-4) == (index % 2 == 0)
