"""Objectives that select over the batch: what they select does not depend on how it was packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import backward, make_config, pack_mini_batch, random_sequences

from dapo_kernels import policy_loss
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.objective import resolve_objective
from dapo_runner.algorithms.packing import pack
from dapo_runner.algorithms.selection import ScoredBatch, select_tokens
from dapo_runner.policy.model import Policy
from dapo_runner.types import PackedBatch, Sequence

SELECTING = {
    "top_entropy": {},
    "clip_cov": {"clip_cov": (0.2, -10.0, 10.0)},  # the paper's shares and bounds select nothing of so few tokens
    "kl_cov": {"kl_cov": (0.2, 1.0)},
}


def objective_of(name: str, **overrides: object) -> object:
    return resolve_objective(make_config(loss={"objective": name, "overrides": {**SELECTING[name], **overrides}}))


def scores_of(batch: PackedBatch) -> ScoredBatch:
    """Log-probs and entropies that are a function of the token's place in its sequence alone."""
    logprobs = -torch.rand(1000, generator=torch.Generator().manual_seed(1)) * 3
    entropy = torch.rand(1000, generator=torch.Generator().manual_seed(2))
    ids = batch.sequence_ids.repeat_interleave(batch.cu_seqlens.diff().to(torch.int64))
    place = ids * 20 + batch.position_ids
    return ScoredBatch(batch, logprobs[place], entropy[place])


def selected(name: str, sequences: list[Sequence], budget: int, **overrides: object) -> set[tuple[int, int]]:
    """(sequence, position) of everything that was selected."""
    batches = pack(sequences, budget)
    generator = torch.Generator().manual_seed(3)
    objective = objective_of(name, **overrides)
    choices = select_tokens(objective, [scores_of(batch) for batch in batches], generator)  # type: ignore[arg-type]
    found = set()
    for batch, chosen in zip(batches, choices, strict=True):
        assert chosen.dtype == torch.bool
        assert not bool((chosen & ~batch.mask).any())
        ids = batch.sequence_ids.repeat_interleave(batch.cu_seqlens.diff().to(torch.int64))
        found |= set(zip(ids[chosen].tolist(), batch.position_ids[chosen].tolist(), strict=True))
    return found


@pytest.mark.parametrize("name", SELECTING)
def test_the_choice_is_that_of_the_whole_mini_batch(name: str) -> None:
    sequences = random_sequences(16)
    whole = selected(name, sequences, 1024)
    assert whole
    assert all(selected(name, sequences, budget) == whole for budget in (20, 41, 64))


def test_top_entropy_takes_its_share_of_the_training_tokens() -> None:
    sequences = random_sequences(16)
    n_tokens = sum(int(sequence.mask.sum()) for sequence in sequences)
    assert len(selected("top_entropy", sequences, 30)) == -(-n_tokens // 5)
    everything = selected("top_entropy", sequences, 30, top_entropy=1.0)
    assert len(everything) == n_tokens


def test_clip_cov_leaves_alone_what_the_clip_stopped_already() -> None:
    """Old log-probs far from the current ones put every token with an advantage outside the clip on one side."""
    sequences = random_sequences(8)
    for sequence in sequences:
        sequence.rollout_logprobs.fill_(-50.0)
        sequence.advantages.abs_()
    assert selected("clip_cov", sequences, 64) == set()
    batches = pack(sequences, 64)
    scores = [scores_of(batch) for batch in batches]
    lots = torch.Generator().manual_seed(3)
    choices = select_tokens(objective_of("clip_cov"), scores, lots, on_policy=True)  # type: ignore[arg-type]
    assert any(bool(chosen.any()) for chosen in choices)


def test_an_objective_without_a_selection_is_refused() -> None:
    batches = pack(random_sequences(2), 64)
    objective = resolve_objective(make_config())
    with pytest.raises(ValueError, match="top_entropy"):
        select_tokens(objective, [scores_of(batch) for batch in batches], torch.Generator())


@pytest.mark.parametrize("name", SELECTING)
def test_the_gradient_is_that_of_one_call_over_everything(policy: Policy, name: str) -> None:
    """Packed into one micro-batch and left to select by itself, the loss of dapo_kernels agrees."""
    config = make_config(loss={"objective": name, "overrides": SELECTING[name], "old_logprobs": "rollout"})
    learner = Learner(policy, config)
    sequences = random_sequences(12)

    def gradients(budget: int) -> dict[str, torch.Tensor]:
        policy.model.zero_grad()
        mini = pack_mini_batch(learner, sequences, budget)
        for batch, selection in zip(mini.micro_batches, learner.select_tokens(mini, step=0), strict=True):
            backward(learner, mini, batch, selection)
        return {key: p.grad.clone() for key, p in policy.model.named_parameters()}

    split, whole = gradients(30), gradients(1024)
    for key, expected in whole.items():
        assert (split[key] - expected).norm() <= 1e-5 * expected.norm(), key
    if name == "clip_cov":
        return  # its lots are drawn in another order inside the kernel
    policy.model.zero_grad()
    (batch,) = pack(sequences, 1024)
    logits = policy.model.get_output_embeddings()(policy.hidden_states(batch))
    stats = logits.log_softmax(-1)
    logprobs = stats.gather(1, batch.target_ids[:, None])[:, 0]
    entropy = -(stats.exp() * stats).sum(-1)
    arguments = (logprobs, batch.old_logprobs, batch.advantages)
    policy_loss(*arguments, entropy=entropy, objective=learner.loss.objective, mask=batch.mask).loss.backward()
    for key, parameter in policy.model.named_parameters():
        assert (whole[key] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), key


def test_an_update_selects_alike_after_a_resume_and_anew_at_every_step(policy: Policy) -> None:
    config = make_config(loss={"objective": "clip_cov", "overrides": {"clip_cov": (0.2, -10.0, 10.0)}})
    learner = Learner(policy, config)
    mini = pack_mini_batch(learner, random_sequences(12), 40)

    def drawn(step: int) -> list[list[bool]]:
        return [selection.tolist() for selection in learner.select_tokens(mini, step) if selection is not None]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_what_was_carried_over_keeps_its_own_ratios_where_the_rest_is_on_policy() -> None:
    """Far outside the clip by its old log-probs: nothing of it is left to choose, of the fresh ones as ever."""
    sequences = random_sequences(8)
    for sequence in sequences:
        sequence.rollout_logprobs.fill_(-50.0)
        sequence.advantages.abs_()
    stale = {1, 2, 6}
    mixed = [replace(item, age=1) if place in stale else item for place, item in enumerate(sequences)]
    batches = pack(mixed, 64)
    scores = [scores_of(batch) for batch in batches]
    generator = torch.Generator().manual_seed(3)
    choices = select_tokens(objective_of("clip_cov"), scores, generator, on_policy=True)  # type: ignore[arg-type]
    assert {batch.stale: bool(chosen.any()) for batch, chosen in zip(batches, choices, strict=True)} == {
        False: True,
        True: False,
    }
