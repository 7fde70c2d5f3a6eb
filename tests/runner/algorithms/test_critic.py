"""Advantages of single tokens, and the critic that gives them values, against their papers in float64."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import longhand
import pytest
import torch
from builders import random_sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import CPU, assert_same_gradients, config_of, learner_of, update
from refusals import refused
from torch import Tensor

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError
from dapo_runner.algorithms.returns import discounted_sums, gae, moments, whiten
from dapo_runner.policy.model import load_policy
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.types import TrainingSequence

GAE = {"advantage": {"kind": "gae", "gamma": 0.95, "lam": 0.9}, "critic": {}}
KINDS: dict[str, dict[str, Any]] = {
    **{
        f"returns, {estimator}": {
            "advantage": {"kind": "returns", "gamma": 0.9},
            "reward": {"kl": {"coef": 0.1, "estimator": estimator}},
        }
        for estimator in ("k1", "k2", "k3")
    },
    "group_returns": {"advantage": {"kind": "group_returns"}},
    "gae": {**GAE, "reward": {"kl": {"coef": 0.1, "estimator": "k3"}}},
}


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 3) | st.integers(1, 5000), min_size=1, max_size=6),
    st.sampled_from([0.0, 1e-3, 0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 0.9, 1.0]),
)
def test_returns_and_advantages_of_sequences(lengths: list[int], gamma: float, lam: float) -> None:
    rewards, values = torch.randn(2, sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = list(zip(rewards.split(lengths), values.split(lengths), strict=True))
    expected = torch.cat([longhand.discounted(reward, gamma) for reward, _ in parts])
    found = discounted_sums(rewards, torch.tensor(lengths), gamma)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
    advantages, returns = gae(rewards, values, torch.tensor(lengths), gamma, lam)
    exact = torch.cat([longhand.generalized(reward, value, gamma, lam) for reward, value in parts])
    torch.testing.assert_close(advantages, exact)
    torch.testing.assert_close(returns, exact + values)


def test_equal_values_and_none_give_nothing() -> None:
    assert whiten(torch.full((4,), 0.7, dtype=torch.float64)).abs().max() == 0
    nothing, none = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    assert [x.numel() for x in gae(nothing, nothing, none, 1.0, 0.95)] == [0, 0]
    assert moments(nothing) == (0.0, 0.0)


def earning() -> list[TrainingSequence]:
    """A reward for each response, every other one of which is a step old."""
    return [
        replace(sequence, advantages=torch.zeros_like(sequence.advantages), reward=n % 3 - 0.7, age=n % 2)
        for n, sequence in enumerate(random_sequences(14))
    ]


def by_sequence(minis: list[MiniBatch], name: str) -> dict[int, Tensor]:
    """What the micro-batches of a step hold under a name: of each sequence that trains, its training tokens."""
    found = {}
    for batch in (batch for mini in minis for batch in mini.micro_batches):
        parts = zip(getattr(batch, name).split(batch.lengths), batch.mask.split(batch.lengths), strict=True)
        found |= {
            index: part[mask].double() for index, (part, mask) in zip(batch.sequence_ids.tolist(), parts, strict=True)
        }
    return found


def spelled_out(
    learner: Learner, sequences: list[TrainingSequence]
) -> tuple[dict[int, Tensor], dict[int, Tensor], dict]:
    """Advantages before they are whitened, returns, and the metrics of the step."""
    settings, kl, critic = learner.config.advantage, learner.config.reward.kl, learner.critic
    model, exact_critic = longhand.copy_of(learner.policy), critic and longhand.copy_of(critic.model)
    reference = learner.reference and longhand.copy_of(learner.reference)
    advantages, returns, penalties = {}, {}, []
    for index, sequence in enumerate(sequences):
        if not sequence.mask.any():
            continue
        with torch.no_grad():
            own = longhand.logprobs_of(model, sequence)
            values = own * 0 if critic is None else longhand.values_of(exact_critic, sequence)
            d = own * 0 if kl is None else longhand.logprobs_of(reference, sequence) - own
        rewards = torch.zeros_like(own)
        rewards[-1] = sequence.reward
        if kl is not None:
            penalty = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[kl.estimator]
            rewards -= kl.coef * penalty
            penalties += penalty.tolist()
        lam = 1.0 if critic is None else settings.lam
        advantages[index] = longhand.generalized(rewards, values, settings.gamma, lam)
        returns[index] = advantages[index] + values
    every = torch.cat(list(returns.values()))
    metrics = {"return": float(every.mean())}
    if kl is not None:
        metrics["reward_kl"] = fmean(penalties)
    if critic is not None:
        metrics["explained_variance"] = 1 - float(torch.cat(list(advantages.values())).var() / every.var())
    return advantages, returns, metrics


@pytest.mark.parametrize("name", KINDS)
def test_estimates_of_a_step(model_folder: Path, name: str) -> None:
    """KL in the reward is that of the policy before the step. Nothing depends on mini-batches and packing."""
    sections, sequences, expected = KINDS[name], earning(), None
    for size, budget in ((None, 1024), (4, 24)):
        learner = learner_of(model_folder, **sections, optimizer={"mini_batch_size": size, "token_budget": budget})
        minis = learner.prepare(sequences)
        expected = expected or spelled_out(learner, sequences)
        advantages, returns, metrics = expected
        found = {name: by_sequence(minis, name) for name in ("advantages", "returns", "old_logprobs")}
        assert found["advantages"].keys() == advantages.keys()
        for index, advantage in longhand.whitened(advantages).items():
            torch.testing.assert_close(found["advantages"][index], advantage, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found["returns"][index], returns[index], rtol=1e-4, atol=1e-4)
            shown = sequences[index].advantages[sequences[index].mask]  # in the rollout log
            torch.testing.assert_close(shown.double(), found["advantages"][index])
            if sequences[index].age:
                engine = sequences[index].rollout_logprobs[sequences[index].mask].double()
                assert torch.equal(found["old_logprobs"][index], engine)
        assert learner.estimates == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        figures = learner.update(minis[0], 0)
        assert learner.estimates.items() <= figures.items()
        assert "ref_kl" not in figures  # that KL is no part of the loss


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_updates_of_a_critic(model_folder: Path, clip: float | None) -> None:
    """Each is the mean over the tokens of its own mini-batch. In the second, values have moved and some are clipped."""
    critic = {"lr": 5e-3, "clip": clip}
    sections = {"critic": critic, "advantage": {"kind": "gae"}, "optimizer": {"mini_batch_size": 8, "token_budget": 40}}
    learner, sequences = learner_of(model_folder, **sections, sampler={"prompts_per_step": 4}), earning()
    assert learner.critic is not None
    assert not learner.critic.model.model.get_output_embeddings().weight.requires_grad
    minis = learner.prepare(sequences)
    assert [len(mini.micro_batches) > 1 for mini in minis] == [True, True]
    clipped = []
    for mini in minis:
        exact = longhand.copy_of(learner.critic.model)
        old, returns = by_sequence([mini], "values"), by_sequence([mini], "returns")
        values = torch.cat([longhand.values_of(exact, sequences[index]) for index in old])
        before, wanted = torch.cat(list(old.values())), torch.cat(list(returns.values()))
        loss = longhand.value_loss(values, before, wanted, clip).mean()
        (slopes,) = torch.autograd.grad(loss, values, retain_graph=True)
        loss.backward()
        gradients, figures = update(learner, mini)
        found = {name.removeprefix("critic."): x for name, x in gradients.items() if name.startswith("critic.")}
        expected = {name: x.grad for name, x in exact.named_parameters() if x.grad is not None}
        assert_same_gradients(found, expected, 1e-3)
        assert figures["value_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert figures["value_lr"] == 5e-3
        norm = torch.cat([x.flatten() for x in found.values()]).norm()
        assert figures["value_grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        stopped = (slopes == 0) & ((values - before).abs() > (clip or 0))
        assert figures["value_clip"] == pytest.approx(float(stopped.double().mean()))
        clipped.append(figures["value_clip"])
    assert [share > 0 for share in clipped] == [False, clip is not None]


@pytest.mark.parametrize("step", [1, 2])
def test_a_fork_does_not_repeat_the_warm_up_of_its_critic(model_folder: Path, step: int) -> None:
    run, critic = {"from": "run@2", "steps": 4}, {"warmup_steps": 2}
    learner = learner_of(model_folder, run=run, advantage={"kind": "gae"}, critic=critic)
    (mini,) = learner.prepare(earning())
    assert ("loss" in learner.update(mini, step)) == (step >= 2)


def test_a_gradient_of_the_critic_that_is_not_finite_stops_the_run(model_folder: Path) -> None:
    learner, sequences = learner_of(model_folder, advantage={"kind": "gae"}, critic={}), earning()
    sequences[0] = replace(sequences[0], reward=float("inf"))
    (mini,) = learner.prepare(sequences)
    assert learner.critic is not None
    before = learner.critic.model.model.value_head.weight.clone()
    with pytest.raises(NonFiniteUpdateError, match=r"critic\.lr"):
        learner.update(mini, 0)
    assert torch.equal(learner.critic.model.model.value_head.weight, before)


def test_a_critic_may_know_more_tokens_than_the_policy(model_folder: Path, tmp_path: Path) -> None:
    """Such as a reward model's padding. A reference may not."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["[PAD]"])
    tokenizer.save_pretrained(folder)
    config = config_of(model_folder, **GAE)
    policy = load_policy(model_folder, config.model, CPU)
    Learner(policy, config, None, load_policy(folder, config.model, CPU, role="critic"))
    with refused("loss.reference"):
        Learner(policy, config, load_policy(folder, config.model, CPU, role="reference"))
