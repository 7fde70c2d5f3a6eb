"""Advantages of single tokens, the critic that gives them values, and the reference that moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import backward, make_config, random_sequences, save_model
from refusals import refused
from torch import Tensor

from dapo_runner.algorithms.critic import value_loss
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.mini_batch import NonFiniteUpdateError
from dapo_runner.config import Config, ModelConfig, TinyModelConfig
from dapo_runner.policy.model import Policy, load_policy
from dapo_runner.run.tiny_model import make_model
from dapo_runner.types import Sequence

CPU = torch.device("cpu")
FLOAT32 = ModelConfig(path="x", dtype="float32")
OPTIMIZER = {"mini_batch_size": None, "token_budget": 96, "warmup_steps": 0, "lr": 1e-3}


def earning(sequences: list[Sequence]) -> list[Sequence]:
    """A reward of its own for each response; its tokens' advantages are still to be made."""
    return [
        replace(sequence, advantages=torch.zeros_like(sequence.advantages), reward=float(place % 3) - 0.7)
        for place, sequence in enumerate(sequences)
    ]


def open_learner(folder: Path, **sections: Any) -> Learner:
    config = make_config(**{"optimizer": OPTIMIZER} | sections)
    shared = config.critic is not None and config.critic.share_trunk
    policy = load_policy(folder, FLOAT32, CPU, role="shared" if shared else "policy")
    critic = policy if shared else None
    if config.critic is not None and not shared:
        critic = load_policy(folder, FLOAT32, CPU, role="critic")
    reference = load_policy(folder, FLOAT32, CPU, role="reference")
    with torch.no_grad():  # somewhere else than the policy
        for parameter in reference.model.parameters():
            parameter.mul_(1.1)
    return Learner(policy, config, reference, critic)


def by_sequence(learner: Learner, sequences: list[Sequence], name: str) -> dict[int, Tensor]:
    """What the micro-batches of a step hold under a name, for each sequence that trains; its live tokens'."""
    found = {}
    for mini in learner.prepare(sequences):
        for batch in mini.micro_batches:
            values = getattr(batch, name)
            for place, value, mask in zip(
                batch.sequence_ids.tolist(), values.split(batch.lengths), batch.mask.split(batch.lengths), strict=True
            ):
                assert name == "values" or not value[~mask].any()
                found[place] = value[mask]
    return found


def logprobs_of(model: Policy, sequence: Sequence) -> Tensor:
    """Of the response's tokens, by transformers' own attention; float64."""
    model.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model.model(input_ids=sequence.token_ids[None], use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, sequence.token_ids[1:, None])[:, 0][sequence.mask[1:]]


def whitened(parts: dict[int, Tensor]) -> dict[int, Tensor]:
    every = torch.cat(list(parts.values()))
    return {place: (part - every.mean()) / (every.std() + 1e-6) for place, part in parts.items()}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reinforce_pp_spelled_out(model_folder: Path, estimator: str) -> None:
    """arXiv 2501.03262: A_t = r − β Σ_{i ≥ t} KL(i), then whitened over the tokens of the step."""
    learner = open_learner(
        model_folder, advantage={"kind": "returns"}, reward={"kl": {"coef": 0.1, "estimator": estimator}}
    )
    assert learner.reference is not None
    sequences = earning(random_sequences(9))
    found = by_sequence(learner, sequences, "advantages")
    expected = {}
    for place, sequence in enumerate(sequences):
        if not sequence.mask.any():
            continue
        d = logprobs_of(learner.reference, sequence) - logprobs_of(learner.policy, sequence)
        kl = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[estimator]
        assert sequence.reward is not None
        expected[place] = torch.stack([sequence.reward - 0.1 * kl[t:].sum() for t in range(len(kl))])
    assert found.keys() == expected.keys()
    for place, part in whitened(expected).items():
        torch.testing.assert_close(found[place].double(), part, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sequences[place].advantages[-len(part) :], found[place])  # what the log shows


def test_kl_in_the_reward_is_that_of_the_policy_before_the_step(model_folder: Path) -> None:
    """Also of groups carried over, whose ratios go back to the policy that sampled them."""
    learner = open_learner(model_folder, advantage={"kind": "returns"}, reward={"kl": {"coef": 0.1}})
    fresh = earning(random_sequences(9))
    stale = [replace(sequence, age=1) for sequence in fresh]
    advantages = [by_sequence(learner, sequences, "advantages") for sequences in (fresh, stale)]
    assert advantages[0].keys() == advantages[1].keys()
    for place, part in advantages[0].items():
        torch.testing.assert_close(advantages[1][place], part, rtol=1e-4, atol=1e-4)
    old = by_sequence(learner, stale, "old_logprobs")
    assert all(torch.equal(old[place], fresh[place].rollout_logprobs[fresh[place].mask]) for place in old)


def test_the_first_update_has_ratio_1_though_its_log_probs_were_asked_before(model_folder: Path) -> None:
    learner = open_learner(
        model_folder, advantage={"kind": "returns"}, reward={"kl": {"coef": 0.1}}, loss={"objective": "ppo"}
    )
    (mini,) = learner.prepare(earning(random_sequences(9)))
    figures = learner.update(mini, 0)
    assert figures["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert figures["reward_kl"] != 0
    assert "value_loss" not in figures


def test_advantages_do_not_depend_on_mini_batches_and_packing(model_folder: Path) -> None:
    sequences, expected = earning(random_sequences(16)), None
    for size, budget in ((None, 1024), (4, 40)):
        optimizer = {**OPTIMIZER, "mini_batch_size": size, "token_budget": 1024}
        learner = open_learner(model_folder, advantage={"kind": "gae"}, critic={}, optimizer=optimizer)
        learner.config = learner.config.model_copy(
            update={"optimizer": learner.config.optimizer.model_copy(update={"token_budget": budget})}
        )
        assert learner.critic is not None
        with torch.no_grad():
            learner.critic.head.weight.copy_(torch.linspace(-0.1, 0.1, 32))
        found = by_sequence(learner, sequences, "advantages")
        expected = expected or found
        assert found.keys() == expected.keys()
        for place, part in expected.items():
            torch.testing.assert_close(found[place], part, rtol=1e-4, atol=1e-5)


def test_the_value_loss_by_hand() -> None:
    values = torch.tensor([0.5, 0.1, -1.0, torch.nan], requires_grad=True)
    old, returns, mask = torch.zeros(4), torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([True] * 3 + [False])
    # Errors ½, 0.9 and 1; held at 0.2 and −0.2 the first is 0.8, which holds it back, the last 0.2, which does not.
    found = value_loss(values, old, returns, mask, 0.2)
    assert float(found.loss.detach()) == pytest.approx((0.64 + 0.81 + 1.0) / 2)
    assert float(found.clipped) == 1
    found.loss.backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad[:3], torch.tensor([0.0, -0.9, -1.0]))
    assert float(value_loss(values, old, returns, mask, None).loss.detach()) == pytest.approx((0.25 + 0.81 + 1.0) / 2)


@pytest.mark.parametrize("shared", [False, True])
def test_a_critic_learns_the_same_from_one_micro_batch_and_from_several(model_folder: Path, shared: bool) -> None:
    """Its loss is a mean over the tokens of the mini-batch, not of each micro-batch."""
    sequences, found = earning(random_sequences(24)), []
    critic = {"share_trunk": True} if shared else {"lr": 1e-3}
    for budget in (1024, 96):
        optimizer = {**OPTIMIZER, "token_budget": budget}
        learner = open_learner(model_folder, advantage={"kind": "gae"}, critic=critic, optimizer=optimizer)
        assert learner.critic is not None
        (mini,) = learner.prepare(sequences)
        figures = learner.update(mini, 0)
        norm = figures["grad_norm" if shared else "value_grad_norm"]
        found.append((len(mini.micro_batches) > 1, figures["value_loss"], norm))
    (_, *whole), (is_split, *split) = found
    assert is_split
    assert split == pytest.approx(whole, rel=1e-4)
    assert min(whole) > 0


@pytest.mark.parametrize("critic", [{"lr": 6e-3, "clip": None}, {"share_trunk": True, "coef": 2.0, "clip": None}])
def test_a_critic_learns_what_a_response_will_earn(model_folder: Path, critic: dict[str, Any]) -> None:
    """The first token of the response decides: values before it cannot know, those behind it do."""
    learner = open_learner(
        model_folder,
        advantage={"kind": "gae", "lam": 1.0},
        critic=critic,
        optimizer={**OPTIMIZER, "token_budget": 1024, "lr": 3e-3},
    )
    sequences = [sequence for sequence in earning(random_sequences(20)) if sequence.mask.any()]
    start = {name: x.clone() for name, x in learner.policy.named_weights()}
    for place, sequence in enumerate(sequences):
        sequence.token_ids[sequence.mask.nonzero()[0]] = 3 + place % 2
        sequences[place] = replace(sequence, reward=float(place % 2))
    for step in range(30):
        (mini,) = learner.prepare(sequences)
        figures = learner.update(mini, step)
    values = by_sequence(learner, sequences, "values")
    known = torch.cat([value[1:] for value in values.values()])
    truth = torch.cat([torch.full((len(v) - 1,), float(sequences[place].reward or 0)) for place, v in values.items()])
    assert float((known - truth).abs().mean()) < 0.2
    assert figures["explained_variance"] > 0.6
    assert figures["value_loss"] < 0.15  # of this update alone
    assert set(start) == {name for name, _ in learner.policy.named_weights()}  # an engine sees no value head


def test_while_it_warms_up_the_policy_waits(model_folder: Path) -> None:
    learner = open_learner(
        model_folder,
        advantage={"kind": "gae"},
        critic={"warmup_steps": 2, "lr": 1e-3},
        loss={"objective": "ppo"},
        run={"steps": 4},
    )
    before = {name: x.clone() for name, x in learner.policy.named_weights()}
    sequences = earning(random_sequences(8))
    for step in range(3):
        (mini,) = learner.prepare(sequences)
        figures = learner.update(mini, step)
        moved = any(not torch.equal(x, before[name]) for name, x in learner.policy.named_weights())
        assert moved == ("loss" in figures) == (step == 2)
    assert learner.critic is not None
    assert learner.critic.head.weight.abs().sum() > 0


def test_on_a_shared_trunk_the_gradient_is_that_of_both_losses(model_folder: Path) -> None:
    sections: dict[str, Any] = {"advantage": {"kind": "gae"}, "loss": {"objective": "ppo"}}
    sequences = earning(random_sequences(8))

    def gradients(coef: float) -> dict[str, Tensor]:
        learner = open_learner(model_folder, critic={"share_trunk": True, "coef": coef}, **sections)
        assert learner.critic is not None
        with torch.no_grad():
            learner.critic.head.weight.fill_(0.01)
        (mini,) = learner.prepare(sequences)
        for batch in mini.micro_batches:
            backward(learner, mini, batch)
        return {name: p.grad.clone() for name, p in learner.policy.model.named_parameters()}

    none, once, twice = gradients(1e-12), gradients(1.0), gradients(2.0)
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name] - none[name], 2 * (gradient - none[name]), rtol=1e-3, atol=1e-5)
        assert torch.equal(gradient, none[name]) == (name == "lm_head.weight")


def test_a_gradient_of_the_critic_that_is_not_finite_stops_before_it_is_taken(model_folder: Path) -> None:
    learner = open_learner(model_folder, advantage={"kind": "gae"}, critic={})
    sequences = earning(random_sequences(8))
    sequences[0] = replace(sequences[0], reward=float("inf"))
    (mini,) = learner.prepare(sequences)
    assert learner.critic is not None
    with pytest.raises(NonFiniteUpdateError, match=r"critic\.lr"):
        learner.update(mini, 0)
    assert not learner.critic.head.weight.any()


def test_a_critic_reads_the_policys_tokens(model_folder: Path, policy: Policy) -> None:
    config = make_config(advantage={"kind": "gae"}, critic={"path": "another"})
    other = load_policy(model_folder, FLOAT32, CPU, role="critic")
    other.tokenizer.add_tokens(["new"])
    with refused("critic.path"):
        Learner(policy, config, critic_model=other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_that_moves(model_folder: Path, dtype: str) -> None:
    """θ_ref ← α θ_ref + (1 − α) θ. In bfloat16 the step is below its rounding, and the average keeps it."""
    model = ModelConfig.model_validate({"path": "x", "dtype": dtype})
    config: Config = make_config(loss={"overrides": {"kl_coef": 0.1}, "reference_ema": 0.9}, optimizer=OPTIMIZER)
    learner = Learner(
        load_policy(model_folder, model, CPU), config, load_policy(model_folder, model, CPU, role="reference")
    )
    assert learner.moving is not None
    name = "model.layers.0.mlp.up_proj.weight"
    expected = learner.master.tensors[name].detach().clone()
    for step in range(3):
        (mini,) = learner.prepare(random_sequences(8))
        learner.update(mini, step)
        learner.move_reference()
        expected = 0.9 * expected + 0.1 * learner.master.tensors[name].detach()
    torch.testing.assert_close(learner.moving.tensors[name], expected)
    assert learner.reference is not None
    parameter = dict(learner.reference.model.named_parameters())[name]
    assert torch.equal(parameter, learner.moving.tensors[name].to(parameter.dtype))
    assert not torch.equal(expected, learner.master.tensors[name])


def test_a_reference_of_another_shape_cannot_follow(policy: Policy, tmp_path: Path) -> None:
    sizes = TinyModelConfig(layers=3, hidden_size=32, heads=2, intermediate_size=64)
    other = save_model(make_model(sizes, policy.tokenizer, max_positions=256), policy.tokenizer, tmp_path)
    config = make_config(loss={"overrides": {"kl_coef": 0.1}, "reference": "other", "reference_ema": 0.9})
    with refused("loss.reference_ema"):
        Learner(policy, config, load_policy(other, FLOAT32, CPU, role="reference"))


def test_a_token_inside_the_clip_is_not_counted() -> None:
    """`old + (v − old)` differs from v by a rounding for many of these."""
    generator = torch.Generator().manual_seed(0)
    noise, returns = torch.randn(2, 20000, generator=generator)
    values = 0.05 * torch.randn(20000, generator=generator)
    old = values + 0.1 * noise.clamp(-1.9, 1.9)
    assert float(value_loss(values, old, returns, torch.ones(20000, dtype=torch.bool), 0.2).clipped) == 0
