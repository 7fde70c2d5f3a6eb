"""The update: one gradient whatever the split, master weights, and a stop before anything breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import backward, make_config, pack_mini_batch, random_sequences
from refusals import refused

from dapo_kernels import OBJECTIVES
from dapo_runner.algorithms.learner import Learner, mean_of
from dapo_runner.algorithms.losses import PolicyLoss
from dapo_runner.algorithms.mini_batch import NonFiniteUpdateError
from dapo_runner.algorithms.objective import resolve_objective
from dapo_runner.algorithms.packing import pack
from dapo_runner.algorithms.weights import MasterWeights
from dapo_runner.config import Config, ConfigError, ModelConfig
from dapo_runner.policy.model import Policy, load_policy
from dapo_runner.rollout.worker import rollout_sampling
from dapo_runner.types import PackedBatch, Sequence

CPU = torch.device("cpu")


def gradient(policy: Policy, config: Config, sequences: list[Sequence], budget: int) -> dict[str, torch.Tensor]:
    """The gradient of one mini-batch, packed into micro-batches of ``budget`` positions."""
    learner = Learner(policy, config)
    mini = pack_mini_batch(learner, sequences, budget)
    for batch in mini.micro_batches:
        backward(learner, mini, batch)
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    return found


PROMPT_MEAN = {"overrides": {"aggregate": "prompt-mean-token-mean"}}


@pytest.mark.parametrize("loss", [{"objective": "dapo"}, {"objective": "dr_grpo"}, PROMPT_MEAN])
def test_the_gradient_does_not_depend_on_split_or_order(policy: Policy, loss: dict[str, Any]) -> None:
    config = make_config(loss=loss)
    sequences = random_sequences(16)
    whole = gradient(policy, config, sequences, budget=1024)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    for budget, other in ((20, sequences), (64, [sequences[i] for i in order])):
        parts = gradient(policy, config, other, budget)
        for name, expected in whole.items():
            assert (parts[name] - expected).norm() <= 1e-6 * expected.norm(), (name, budget)


def test_packed_equals_unpacked(policy: Policy) -> None:
    """Loss, log-probs and gradient of packed sequences against each sequence in a forward pass of its own."""
    learner = Learner(policy, make_config(loss={"old_logprobs": "rollout"}))
    sequences = [sequence for sequence in random_sequences(20, seed=4) if sequence.mask.any()]

    def run(batches: list[PackedBatch]) -> tuple[float, dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        policy.model.zero_grad()
        mini = pack_mini_batch(learner, sequences, 1024)
        loss, logprobs = 0.0, {}
        for batch in batches:
            out = backward(learner, mini, batch)
            loss += float(out.loss.detach().double())
            parts = out.logprobs.split(batch.cu_seqlens.diff().tolist())
            logprobs |= dict(zip(batch.sequence_ids.tolist(), parts, strict=True))
        return loss, logprobs, {name: p.grad.clone() for name, p in policy.model.named_parameters()}

    packed = run(pack(sequences, 1024))
    alone = run([replace(batch, sequence_ids=torch.tensor([index])) for index, sequence in enumerate(sequences)
                 for batch in pack([sequence], 1024)])  # fmt: skip
    assert packed[0] == pytest.approx(alone[0], rel=1e-6)
    for index, expected in alone[1].items():
        assert (packed[1][index] - expected).abs().max() <= 1e-6 * expected.abs().max()
    for name, expected in alone[2].items():
        assert (packed[2][name] - expected).norm() <= 1e-6 * expected.norm(), name


def spelled_logprobs(model: Any, sequence: Sequence, temperature: float = 1.0) -> torch.Tensor:
    """Of each token after the first, under softmax(logits / temperature); float64 [L - 1], with its gradient."""
    logits = model(input_ids=sequence.token_ids[None], use_cache=False).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1).gather(1, sequence.token_ids[1:, None])[:, 0]


@pytest.mark.parametrize(("temperature", "loss"), [(1.0, {}), (0.7, {}), (1.0, PROMPT_MEAN)])
def test_the_gradient_is_that_of_the_paper_spelled_out(
    policy: Policy, temperature: float, loss: dict[str, Any]
) -> None:
    """DAPO Eq. 8 over each sequence by itself, with transformers' own logits and attention. The policy is what was
    sampled from: the softmax at the rollout's temperature, whose gradient is not that at 1. As printed, the mean is
    over prompts, of the token mean of each group: four of four, three of four and one of two responses train.
    """
    sequences = random_sequences(10)
    packed = gradient(policy, make_config(rollout={"temperature": temperature}, loss=loss), sequences, budget=40)
    policy.model.set_attn_implementation("eager")
    losses: dict[int, list[torch.Tensor]] = {}
    for sequence in sequences:
        mask = sequence.mask[1:]
        logprobs = spelled_logprobs(policy.model, sequence, temperature)
        ratio = (logprobs - sequence.rollout_logprobs[1:]).exp()
        advantages = sequence.advantages[1:]
        token_losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)[mask]
        losses.setdefault(sequence.group_id if loss else 0, []).append(token_losses)
    torch.stack([torch.cat(group).mean() for group in losses.values()]).mean().backward()
    for name, parameter in policy.model.named_parameters():
        assert (packed[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_at_the_temperature_of_the_rollout(
    policy: Policy, model_folder: Path, temperature: float
) -> None:
    """The policy's, the reference's and, in the metrics of an update, the entropy."""
    config = make_config(rollout={"temperature": temperature})
    assert rollout_sampling(config, 0).temperature == temperature
    reference = load_policy(model_folder, ModelConfig(path="x", dtype="float32"), CPU, role="reference")
    learner = Learner(policy, config, reference)
    sequences = [sequence for sequence in random_sequences(6) if sequence.mask.any()]
    (batch,) = pack(sequences, 1024)
    found = [learner.logprobs(batch), learner.ref_logprobs(batch)]
    (mini,) = learner.prepare(sequences)
    entropy = learner.update(mini, step=0)["entropy"]
    reference.model.set_attn_implementation("eager")  # the policy as it was before the update
    ordered = [sequences[index] for index in batch.sequence_ids.tolist()]
    expected = torch.cat([spelled_logprobs(reference.model, item, temperature) for item in ordered]).detach()
    for logprobs in found:
        assert (logprobs - expected)[batch.mask].abs().max() <= 1e-4
    with torch.no_grad():
        logits = [reference.model(input_ids=item.token_ids[None]).logits[0, :-1][item.mask[1:]] for item in ordered]
    distribution = torch.distributions.Categorical(logits=torch.cat(logits).double() / temperature)
    assert entropy == pytest.approx(float(distribution.entropy().mean()), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_an_update_every_ratio_is_one(policy: Policy, temperature: float) -> None:
    """The second mini-batch carries old log-probs, the first is on-policy by construction."""
    optimizer = {"token_budget": 95, "lr": 1e-3, "mini_batch_size": 16}
    learner = Learner(policy, make_config(optimizer=optimizer, rollout={"temperature": temperature}))
    _, mini = learner.prepare(random_sequences(32))
    assert len(mini.micro_batches) > 1
    figures = learner.update(mini, step=0)
    assert figures["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert figures["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert figures["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert figures["tokens"] == mini.denominator
    assert learner.update(mini, step=0)["ratio_max"] > 1.001


def test_a_kl_penalty_refers_to_the_reference(policy: Policy, model_folder: Path) -> None:
    """GRPO's k3 with a reference that is not the policy, spelled out over each sequence with autograd."""
    reference = load_policy(model_folder, ModelConfig(path="x", dtype="float32"), CPU, role="reference")
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter.mul_(0.9)
    overrides = {"kl_coef": 0.3}
    learner = Learner(policy, make_config(loss={"objective": "dapo", "overrides": overrides}), reference)
    sequences = [sequence for sequence in random_sequences(6) if sequence.mask.any()]
    (mini,) = learner.prepare(sequences)
    assert all(batch.ref_logprobs is not None for batch in mini.micro_batches)
    for batch in mini.micro_batches:
        backward(learner, mini, batch)
    penalised = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    policy.model.zero_grad()

    policy.model.set_attn_implementation("eager")
    reference.model.set_attn_implementation("eager")
    terms = []
    for sequence in sequences:
        own = spelled_logprobs(policy.model, sequence)
        delta = spelled_logprobs(reference.model, sequence) - own
        ratio = (own - own.detach()).exp()
        terms.append((-ratio * sequence.advantages[1:] + 0.3 * (delta.exp() - delta - 1))[sequence.mask[1:]])
    torch.cat(terms).mean().backward()
    for name, parameter in policy.model.named_parameters():
        assert (penalised[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name
    assert all(parameter.grad is None for parameter in reference.model.parameters())


def test_a_kl_penalty_without_a_reference_is_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match="reference"):
        Learner(policy, make_config(loss={"objective": "grpo"}))


@pytest.mark.parametrize("objective", sorted(OBJECTIVES.keys() - {"grpo", "two_sided"}))  # those want a reference
def test_every_objective_of_the_table_updates(policy: Policy, objective: str) -> None:
    learner = Learner(policy, make_config(loss={"objective": objective}, optimizer={"token_budget": 95, "lr": 1e-3}))
    (mini,) = learner.prepare(random_sequences(12))
    figures = learner.update(mini, step=0)
    assert figures["grad_norm"] > 0
    assert len(mini.micro_batches) > 1


def test_advantages_of_tokens_want_a_ratio_of_tokens(policy: Policy) -> None:
    """As a user's `advantage.kind` may return them."""
    sequences = random_sequences(4)
    sequences[1].advantages[-1] += 0.5
    assert Learner(policy, make_config()).prepare(sequences)
    with refused("advantage.kind"):
        Learner(policy, make_config(loss={"objective": "gspo"})).prepare(sequences)


@pytest.mark.parametrize("way", [True, "offload"])
def test_gradient_checkpointing_changes_no_gradient(policy: Policy, model_folder: Path, way: Any) -> None:
    config = ModelConfig(path="x", dtype="float32", gradient_checkpointing=way)
    thrifty = load_policy(model_folder, config, CPU)
    assert thrifty.model.is_gradient_checkpointing
    layer, calls = thrifty.model.model.layers[0], []
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    sequences = random_sequences(8)
    expected = gradient(policy, make_config(), sequences, budget=1024)
    found = gradient(thrifty, make_config(), sequences, budget=1024)
    assert len(calls) == 2  # the layer ran again in the backward pass
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


def test_rollout_logprobs_can_be_the_old_ones(policy: Policy) -> None:
    learner = Learner(policy, make_config(loss={"old_logprobs": "rollout"}))
    sequences = random_sequences(4)
    (mini,) = learner.prepare(sequences)
    old = torch.cat([batch.old_logprobs for batch in mini.micro_batches])
    expected = torch.cat([sequence.rollout_logprobs[1:] for sequence in sequences])
    assert old.sort().values.tolist() == expected.sort().values.tolist()


def test_mini_batches_are_consecutive_and_those_without_training_tokens_are_left_out(policy: Policy) -> None:
    config = make_config(optimizer={"mini_batch_size": 4})
    sequences = random_sequences(8)
    for sequence in sequences[4:]:
        sequence.mask[:] = False
    minis = Learner(policy, config).prepare(sequences)
    assert len(minis) == 1
    assert minis[0].denominator == sum(int(sequence.mask.sum()) for sequence in sequences[:4])


def test_a_short_step_is_split_evenly(policy: Policy) -> None:
    learner = Learner(policy, make_config(optimizer={"mini_batch_size": 8}))
    sequences = [sequence for sequence in random_sequences(25) if sequence.mask.any()][:18]
    sizes = [sum(batch.n_sequences for batch in mini.micro_batches) for mini in learner.prepare(sequences)]
    assert sizes == [6, 6, 6]  # not 8, 8, 2
    assert learner.prepare([]) == []


def test_without_a_size_a_step_is_one_update_whatever_it_holds(policy: Policy) -> None:
    """Parts of trees that waited come on top of the 16 responses of a step's own."""
    learner = Learner(policy, make_config())
    assert learner.config.responses_per_step == 16
    (mini,) = learner.prepare([sequence for sequence in random_sequences(25) if sequence.mask.any()])
    assert sum(batch.n_sequences for batch in mini.micro_batches) > 16
    assert learner.prepare([]) == []


def test_sequence_means_are_divided_by_the_sequences_that_train() -> None:
    objective = resolve_objective(make_config(loss={"objective": "dr_grpo"}))
    assert objective.length_norm == 64  # rollout.max_response_tokens
    assert PolicyLoss(objective).denominator(random_sequences(10)) == 8


@pytest.mark.parametrize(
    ("spoil", "what"), [(lambda s: s.advantages.fill_(float("nan")), "loss nan"), (None, "non-finite")]
)
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(
    policy: Policy, spoil: Callable[[Any], Any] | None, what: str
) -> None:
    learner = Learner(policy, make_config())
    sequences = random_sequences(4)
    (mini,) = learner.prepare(sequences)
    if spoil is None:
        with torch.no_grad():
            policy.head.weight[5] = float("inf")
    else:
        spoil(mini.micro_batches[0])
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    with pytest.raises(NonFiniteUpdateError, match=rf"(?s)step 3.*{what}"):
        learner.update(mini, step=2)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_updates_have_the_learning_rate_of_their_step(policy: Policy) -> None:
    config = make_config(
        optimizer={"lr": 1e-3, "warmup_steps": 8, "mini_batch_size": 8, "token_budget": 95, "grad_clip": None}
    )
    learner = Learner(policy, config)
    minis = learner.prepare(random_sequences(16))
    rates = [learner.update(mini, step=1)["lr"] for mini in minis]
    assert rates == pytest.approx([2e-3 / 8, 2e-3 / 8])
    assert {group["lr"] for group in learner.optimizer.param_groups} == {rates[-1]}


def test_gradient_clipping_bounds_the_step(policy: Policy) -> None:
    """With plain momentum-free Adam the step does not show the clip, so the gradient itself is looked at."""
    learner = Learner(policy, make_config(optimizer={"grad_clip": 1e-3}))
    (mini,) = learner.prepare(random_sequences(8))
    seen: list[float] = []
    step = learner.optimizer.step

    def spy() -> None:
        norms = torch.stack([tensor.grad.norm() for tensor in learner.master.gradients()])
        seen.append(float(norms.norm()))
        step()

    learner.optimizer.step = spy  # type: ignore[method-assign]
    figures = learner.update(mini, step=0)
    assert figures["grad_norm"] > 1e-2
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


def test_steps_smaller_than_bfloat16_can_hold_add_up_in_the_masters(model_folder: Path) -> None:
    policy = load_policy(model_folder, ModelConfig(path="x", dtype="bfloat16"), CPU)
    config = make_config(optimizer={"lr": 1e-5, "warmup_steps": 0, "weight_decay": 0.0, "token_budget": 95})
    learner = Learner(policy, config)
    start = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    masters = {name: tensor.detach().clone() for name, tensor in learner.master.tensors.items()}
    (mini,) = learner.prepare(random_sequences(8))
    for step in range(3):
        learner.update(mini, step)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (learner.master.tensors[name].detach() - masters[name]).abs()
    assert 1e-5 < float(moved.median()) < 4e-5
    parameter = dict(policy.model.named_parameters())[name]
    assert float((parameter == start[name]).float().mean()) > 0.5  # the moves are below bfloat16's rounding
    assert torch.equal(parameter, learner.master.tensors[name].bfloat16())


def test_gradients_of_micro_batches_add_up_in_float32(model_folder: Path) -> None:
    policy = load_policy(model_folder, ModelConfig(path="x", dtype="bfloat16"), CPU)
    master = MasterWeights(dict(policy.model.named_parameters()))
    weight = policy.head.weight
    for scale in (1.0, 2.0**-12):
        (weight.float() * scale).sum().backward()
    name = "lm_head.weight"
    assert master.tensors[name].grad is not None
    assert float(master.tensors[name].grad[0, 0]) == 1.0 + 2.0**-12
    assert weight.grad is None


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"objective": "dapo2"}, "objective .*dapo"),
        ({"overrides": {"clip_hihg": 0.3}}, "clip_hihg.*clip_high"),
        ({"overrides": {"clip_high": -1}}, "clip_high"),
        ({"reference": "some/model"}, "loss.reference"),
    ],
)
def test_an_objective_that_cannot_be_trained_is_a_configuration_error(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_objective(make_config(loss=loss))


def test_figures_of_a_step_are_means_but_for_maxima_and_counts() -> None:
    updates = [{"loss": 1.0, "ratio_max": 2.0, "tokens": 3.0}, {"loss": 2.0, "ratio_max": 1.0, "tokens": 5.0}]
    assert mean_of(updates) == {"loss": 1.5, "ratio_max": 2.0, "tokens": 8.0}
    # The first update of a step is on-policy and clips nothing.
    assert mean_of([{"loss": 1.0}, {"loss": 1.0, "clip_high_prob": 0.2}]) == {"loss": 1.0, "clip_high_prob": 0.2}
    assert mean_of([]) == {}
