"""Iterated DPO: which pairs a group gives, and an update by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import backward, make_completion, make_config, make_group, make_prompt
from small import small_recipe
from test_learner import spelled_logprobs

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.losses import make_pairs, order_by_pair, pair_metrics, pair_sequences
from dapo_runner.algorithms.mini_batch import MiniBatch
from dapo_runner.config import ConfigError, ModelConfig, PreferenceConfig, apply_overrides, check_config, parse_config
from dapo_runner.policy.model import Policy, load_policy
from dapo_runner.preflight.dry_run import departures
from dapo_runner.types import Group, Sample, Verdict

CPU = torch.device("cpu")


def graded(*rewards: float, dead: tuple[int, ...] = ()) -> Group:
    samples = [
        Sample(make_completion(4 + i), Verdict(reward > 0), reward, trains=i not in dead)
        for i, reward in enumerate(rewards)
    ]
    return Group(make_prompt(), tuple(samples))


@pytest.mark.parametrize(
    ("group", "most", "pairs", "ties"),
    [
        (graded(0.1, 0.9, 0.5, 0.3), 1, [(1, 0)], 0),
        (graded(0.1, 0.9, 0.5, 0.3), 2, [(1, 0), (2, 3)], 0),
        (graded(0.1, 0.9, 0.5, 0.3), 9, [(1, 0), (2, 3)], 0),
        (make_group("WRWW"), 2, [(1, 3)], 1),
        (make_group("RRRR"), 1, [], 1),
        (graded(0.9, 0.1, 0.5, dead=(0,)), 2, [(2, 1)], 0),
        (graded(0.9, 0.1, dead=(0,)), 1, [], 0),
    ],
)
def test_best_against_worst(group: Group, most: int, pairs: list[tuple[int, int]], ties: int) -> None:
    assert make_pairs(group, most) == (pairs, ties)


def test_the_records_of_a_step() -> None:
    groups, config = [graded(0.0, 0.2, 1.0), make_group("WW"), graded(1.0, 0.0)], PreferenceConfig()
    sequences = pair_sequences(groups, config, step=3)
    assert [sequence.pair for sequence in sequences] == [0, -1, 0, -1, -1, 1, 1]
    assert [float(sequence.advantages[-1]) for sequence in sequences] == [-1, 0, 1, 0, 0, 1, -1]
    assert [bool(sequence.mask.any()) for sequence in sequences] == [pair.pair >= 0 for pair in sequences]
    assert [sequences.index(sequence) for sequence in order_by_pair(sequences)] == [2, 0, 5, 6]
    assert pair_metrics(groups, config) == {"ties": 1}
    assert pair_metrics(groups, None) == {}


def some_groups(n: int, seed: int = 0) -> list[Group]:
    """Four samples each, of unlike lengths and rewards."""
    g = torch.Generator().manual_seed(seed)
    groups = []
    for _ in range(n):
        lengths = torch.randint(2, 12, (4,), generator=g).tolist()
        completions = [make_completion(length) for length in lengths]
        for completion in completions:
            completion.token_ids.copy_(torch.randint(3, 26, (completion.length,), generator=g))
        rewards = torch.rand(4, generator=g).tolist()
        samples = [Sample(c, Verdict(r > 0.5), r) for c, r in zip(completions, rewards, strict=True)]
        groups.append(Group(make_prompt(), tuple(samples)))
    return groups


def pair_config(preference: dict[str, Any] | None = None, **sections: Any) -> Any:
    raw: dict[str, Any] = {
        "preference": {"pairs_per_group": 2, **(preference or {})},
        "rollout": {"max_prompt_tokens": 4, "max_response_tokens": 12},
        "reward": {"overlong": {"cache_length": 4}},
        "optimizer": {"mini_batch_size": None, "token_budget": 30},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return make_config(**raw)


@pytest.fixture
def reference(model_folder: Path) -> Policy:
    """Not the policy."""
    policy = load_policy(model_folder, ModelConfig(path="x", dtype="float32"), CPU, role="reference")
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(0.9)
    return policy


def gradients(learner: Learner, minis: list[MiniBatch]) -> dict[str, torch.Tensor]:
    for mini in minis:
        for batch in mini.micro_batches:
            backward(learner, mini, batch)
    found = {name: p.grad.clone() for name, p in learner.policy.model.named_parameters()}
    learner.policy.model.zero_grad()
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_the_paper_spelled_out(policy: Policy, reference: Policy, temperature: float) -> None:
    """DPO eq. 7 over each pair by itself, with transformers' own logits and attention; in several micro-batches."""
    config = pair_config({"beta": 0.4}, rollout={"temperature": temperature})
    learner = Learner(policy, config, reference)
    sequences = pair_sequences(some_groups(4), config.preference)
    (mini,) = learner.prepare(sequences)
    assert len(mini.micro_batches) > 1
    assert mini.denominator == 8
    found = gradients(learner, [mini])

    for model in (policy.model, reference.model):
        model.set_attn_implementation("eager")
    ratios = []
    for sequence in order_by_pair(sequences):
        own, other = (spelled_logprobs(model, sequence, temperature) for model in (policy.model, reference.model))
        ratios.append((own - other.detach())[sequence.mask[1:]].sum())
    chosen, rejected = torch.stack(ratios).view(-1, 2).unbind(1)
    (-torch.log(torch.sigmoid(0.4 * (chosen - rejected)))).mean().backward()
    for name, parameter in policy.model.named_parameters():
        assert (found[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


def test_the_gradient_does_not_depend_on_the_packing(policy: Policy, reference: Policy) -> None:
    groups, found = some_groups(6), []
    for budget in (30, 1024):
        config = pair_config(optimizer={"token_budget": budget})
        learner = Learner(policy, config, reference)
        found.append(gradients(learner, learner.prepare(pair_sequences(groups, config.preference))))
    for name, expected in found[1].items():
        assert (found[0][name] - expected).norm() <= 1e-6 * expected.norm(), name


def test_a_pair_is_not_taken_apart(policy: Policy, reference: Policy) -> None:
    config = pair_config(optimizer={"mini_batch_size": 8})
    learner = Learner(policy, config, reference)
    minis = learner.prepare(pair_sequences(some_groups(7), config.preference))
    assert [mini.denominator for mini in minis] == [4, 4, 4, 2]
    for mini in minis:
        for batch in mini.micro_batches:
            chosen, rejected = batch.sequence_ids.view(-1, 2).unbind(1)
            assert torch.equal(chosen + 1, rejected)
            assert not (chosen % 2).any()


def test_the_policy_of_the_step_as_reference(policy: Policy) -> None:
    """Before the first update the policy is its own reference: no margin, and the gradient that the difference of the
    log-probs has. The second mini-batch is held against the policy as it was.
    """
    config = pair_config({"reference": "step"}, optimizer={"mini_batch_size": 8, "lr": 1e-2, "token_budget": 256})
    learner = Learner(policy, config)
    first, second = learner.prepare(pair_sequences(some_groups(4), config.preference))
    (batch,) = second.micro_batches
    assert torch.equal(batch.ref_logprobs, learner.logprobs(batch))
    figures = learner.update(first, step=0)
    assert figures["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert (figures["margin"], figures["accuracy"], figures["pairs"]) == (0, 0, 4)
    assert figures["grad_norm"] > 0
    assert learner.update(second, step=0)["margin"] != 0


def test_an_update_prefers_the_chosen(policy: Policy, reference: Policy) -> None:
    config = pair_config(optimizer={"lr": 1e-2, "token_budget": 1024, "warmup_steps": 0})
    learner = Learner(policy, config, reference)
    sequences = pair_sequences(some_groups(4), config.preference)
    before, *_, after = [learner.update(learner.prepare(sequences)[0], step=0) for _ in range(4)]
    assert after["loss"] < before["loss"]
    assert after["margin"] > before["margin"]
    assert after["accuracy"] == 1
    assert before["nonfinite"] == 0


def test_one_line_of_a_recipe() -> None:
    config = parse_config(apply_overrides(small_recipe(), ["algorithm=dpo", "optimizer.mini_batch_size=256"]))
    assert config.preference == PreferenceConfig()
    assert (config.sampler.filter_groups, config.reward.overlong.soft_punishment) == (False, False)
    assert (config.mini_batch_size, config.updates_per_step) == (8, 1)
    assert departures(config) == ["optimizer.mini_batch_size=256 (dpo: null)"]
    assert "preference=a section (grpo: null)" in departures(pair_config().model_copy(update={"algorithm": "grpo"}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"group_size": 3}}, "rollout.group_size: .* 4"),
        ({"optimizer": {"token_budget": 29}}, "optimizer.token_budget: .* 30"),
        ({"optimizer": {"mini_batch_size": 1}}, "optimizer.mini_batch_size: .*preference"),
        (
            {"optimizer": {"mini_batch_size": 6}},
            r"optimizer.mini_batch_size: ",
        ),
        ({"loss": {"objective": "gspo"}}, "preference: .*loss.objective"),
        ({"advantage": {"kind": "leave_one_out"}}, "preference: .*advantage.kind"),
        ({"rollout": {"correction": {"weights": "token"}}}, "preference: .*rollout.correction"),
        (
            {"logging": {"rollouts": {"per_token": True}}},
            "preference: .*logging.rollouts.per_token",
        ),
        (
            {"loss": {"reference": "x"}, "preference": {"reference": "step"}},
            "preference.reference: .*loss.reference",
        ),
        ({"preference": {"label_smoothing": 0.1, "loss_type": "ipo"}}, "label_smoothing: .*loss_type=sigmoid"),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(pair_config(**sections))
