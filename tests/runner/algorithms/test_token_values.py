"""Values of single tokens: what the update itself worked with, whatever the packing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from builders import make_config, random_sequences

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.packing import pack
from dapo_runner.algorithms.selection import TokenValues
from dapo_runner.policy.model import Policy
from dapo_runner.types import Sequence


def train_step(
    policy: Policy, sequences: list[Sequence], *, groups: int | None = None, **sections: dict[str, object]
) -> tuple[Learner, dict[str, float]]:
    """One update of a policy that is put back behind it."""
    logging = {"rollouts": {"per_token": True, "groups": groups}}
    lengths = {"max_prompt_tokens": 7, "max_response_tokens": 17}
    learner = Learner(policy, make_config(logging=logging, rollout=lengths, **sections))
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    (mini,) = learner.prepare(sequences)
    figures = learner.update(mini, 0)
    policy.model.load_state_dict(before)
    return learner, figures


def of_training_tokens(values: dict[int, TokenValues], sequences: list[Sequence], name: str) -> torch.Tensor:
    return torch.cat([getattr(found, name)[sequences[index].mask[1:]] for index, found in sorted(values.items())])


@pytest.mark.parametrize("budget", [24, 256])
@pytest.mark.parametrize("objective", ["dapo", "gspo", "gmpo", "top_entropy"])
def test_they_add_up_to_the_figures_of_the_update(policy: Policy, objective: str, budget: int) -> None:
    sequences = random_sequences(12)
    loss = {"objective": objective, "old_logprobs": "rollout"}
    learner, figures = train_step(policy, sequences, loss=loss, optimizer={"token_budget": budget})
    values = learner.token_values
    assert sorted(values) == [index for index, sequence in enumerate(sequences) if sequence.mask.any()]
    column = {name: of_training_tokens(values, sequences, name) for name in TokenValues.__dataclass_fields__
              if getattr(values[0], name) is not None}  # fmt: skip
    assert column["entropy"].mean().item() == pytest.approx(figures["entropy"], rel=1e-5)
    assert column["ratio"].mean().item() == pytest.approx(figures["ratio"], rel=1e-5)
    for number, name in enumerate(("clip_low", "clip_high", "clip_dual"), start=1):
        assert (column["clip_hit"] == number).double().mean().item() == pytest.approx(figures[name])
    high, n = column["high_entropy"], column["entropy"].numel()
    assert high.sum() == math.ceil(0.2 * n - 1e-9)
    assert column["entropy"][high].min() >= column["entropy"][~high].max()
    assert ("selected" in column) == (objective == "top_entropy")
    assert "selected" not in column or torch.equal(column["selected"], high)


def test_log_probs_and_ratio_stand_with_their_tokens(policy: Policy) -> None:
    sequences = random_sequences(8)
    learner, _ = train_step(policy, sequences, loss={"old_logprobs": "rollout"}, optimizer={"token_budget": 40})
    for index, values in learner.token_values.items():
        sequence = sequences[index]
        expected, live = learner.logprobs(pack([sequence], 256)[0]), sequence.mask[1:]
        assert torch.allclose(values.logprobs[live], expected[live], atol=1e-5)
        ratio = (expected - sequence.rollout_logprobs[1:]).exp()
        assert torch.allclose(values.ratio[live], ratio[live], rtol=1e-4)


def test_on_policy_every_ratio_is_one_but_of_what_waited(policy: Policy) -> None:
    sequences = [replace(sequence, age=index % 2) for index, sequence in enumerate(random_sequences(8))]
    learner, _ = train_step(policy, sequences)
    for index, values in learner.token_values.items():
        assert bool((values.ratio[sequences[index].mask[1:]] == 1).all()) == (index % 2 == 0)


def test_only_the_first_groups_of_the_step_are_looked_at(policy: Policy) -> None:
    sequences = random_sequences(12)  # four of a group
    config = make_config(logging={"rollouts": {"per_token": True, "groups": 2}}, optimizer={"mini_batch_size": 8})
    learner = Learner(policy, config)
    for _ in range(2):  # nothing is left over from the step before
        minis = learner.prepare(sequences)
        assert len(minis) == 2  # six sequences each
        for mini in minis:
            learner.update(mini, 0)
        assert sorted(learner.token_values) == [0, 1, 2, 3, 5, 6, 7]  # that of place 4 does not train
        for index, values in learner.token_values.items():
            assert values.logprobs.numel() == sequences[index].length - 1


def test_nobody_looks_unless_asked(policy: Policy) -> None:
    learner = Learner(policy, make_config())
    learner.update(learner.prepare(random_sequences(8))[0], 0)
    assert learner.token_values == {}
