"""A step of the learner: mini-batches, old log-probs, learning rates, AdamW, the scale of float16, when it stops."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import longhand
import pytest
import torch
from builders import make_config, make_sequence, pack, random_sequences
from learners import CPU, changed, learner_of, update, weights_of
from refusals import refused

from dapo_runner.algorithms.correction import correct, measure
from dapo_runner.algorithms.learner import Learner, mean_of
from dapo_runner.algorithms.mini_batch import NonFiniteUpdateError
from dapo_runner.algorithms.optimizer import IN_FLIGHT, MasterWeights, learning_rate
from dapo_runner.config import CorrectionConfig
from dapo_runner.engines.hf import HFEngine
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.model import Policy

UP_PROJECTION = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [
        (22, 8, [6, 6, 6]),
        (19, None, [16]),
        (9, 8, [8]),
        (11, 8, [5, 4]),
        (16, 4, [4, 3, 3, 3]),
        (6, 1, [1] * 5),
        (0, 8, []),
    ],
)
def test_mini_batches_are_consecutive_and_as_equal_as_possible(
    policy: Policy, count: int, size: int | None, sizes: list[int]
) -> None:
    """Sequences that do not train, here every fifth and five more at the start, take no place."""
    learner = Learner(policy, make_config(optimizer={"mini_batch_size": size, "token_budget": 96}))
    idle = [replace(sequence, mask=sequence.mask & False) for sequence in random_sequences(5)]
    sequences = [*idle, *random_sequences(count)]
    training, expected = [i for i, sequence in enumerate(sequences) if sequence.mask.any()], []
    for index, n in enumerate(sizes):
        trained, training = training[:n], training[n:]
        expected.append((index, trained, sum(int(sequences[i].mask.sum()) for i in trained)))
    found = []
    for mini in learner.prepare(sequences):
        ids = [i for batch in mini.micro_batches for i in batch.sequence_ids.tolist()]
        found.append((mini.index, sorted(ids), mini.n_tokens))
    assert found == expected


@pytest.mark.parametrize("size", [1, None])
def test_figures_of_a_step_do_not_depend_on_its_mini_batches(model_folder: Path, size: int | None) -> None:
    """Responses of unlike length and gap: their mean is over tokens, of the policy before the first update."""
    sections = {"rollout": {"correction": {"mask": "token", "bound": 1.5}, "group_size": 2}}
    learner = learner_of(model_folder, **sections, sampler={"prompts_per_step": 1}, optimizer={"mini_batch_size": size})
    sequences = []
    for length, gap in ((1, 0.75), (9, 0.25)):
        sequence = make_sequence(3, length)
        (batch,) = pack([sequence], 64)
        own = torch.cat([torch.zeros(1), learner.logprobs(batch)])
        sequences.append(replace(sequence, rollout_logprobs=own - gap * sequence.mask))
    minis = learner.prepare(sequences)
    assert len(minis) == 2 // (size or 2)
    figures = learner.step_metrics(minis, [learner.update(mini, 0) for mini in minis])
    exact = longhand.mismatch([0.75] + [0.25] * 9, [0.0] + [1.0] * 9, CorrectionConfig())
    assert {key: figures[key] for key in exact} == pytest.approx(exact, rel=1e-3)


def test_a_weight_below_the_smallest_float_is_not_counted_as_masked() -> None:
    n = 20000
    learner, engine, mask = torch.full((n,), -0.006), torch.zeros(n), torch.ones(n, dtype=torch.bool)
    weights = correct(learner, engine, mask, torch.tensor([0, n]), CorrectionConfig(weights="sequence"))  # e^-120
    assert measure(learner, engine, mask, weights, (0.0, 2.0)).metrics()["rollout_masked"] == 0


def test_without_a_log_prob_of_the_engine_only_that_is_known(model_folder: Path) -> None:
    learner, engine, trains = torch.zeros(2), torch.full((2,), torch.nan), torch.tensor([True, False])
    assert measure(learner, engine, trains).metrics() == {"rollout_unknown": 1.0}
    assert measure(learner, engine, torch.zeros_like(trains)).metrics() == {}
    sequences = [replace(x, rollout_logprobs=x.rollout_logprobs * torch.nan) for x in random_sequences(4)]
    minis = (trained := learner_of(model_folder)).prepare(sequences)
    figures = trained.step_metrics(minis, [trained.update(mini, 0) for mini in minis])
    assert {key: x for key, x in figures.items() if key.startswith("rollout")} == {"rollout_unknown": 1.0}


def test_on_policy_there_is_no_pass_before_the_first_update(model_folder: Path) -> None:
    """Its own log-probs are the old ones, so that every ratio is 1. The second update has those of a pass."""
    optimizer = {"mini_batch_size": 1, "lr": 1e-2}
    learner = learner_of(model_folder, rollout={"group_size": 2}, sampler={"prompts_per_step": 1}, optimizer=optimizer)
    passes: list[int] = []
    learner.policy.model.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    first, second = learner.prepare(random_sequences(2))
    assert len(passes) == 1
    assert update(learner, first)[1]["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert len(passes) == 2
    assert update(learner, second)[1]["ratio_max"] > 1.001


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [1, 1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1, 1]),
        ("linear", 1, [1, 0.75, 0.5, 0.25, 0, 0]),
        ("linear", 2, [0.5, 1, 2 / 3, 1 / 3, 0]),
        ("cosine", 0, [1, 0.8682, 0.55, 0.2318, 0.1, 0.1]),
    ],
)
def test_learning_rates(schedule: str, warmup: int, rates: list[float]) -> None:
    """Of four steps and those after them: the last step is not lost on a rate of 0."""
    settings = {"lr": 1.0, "schedule": schedule, "warmup_steps": warmup}
    config = make_config(run={"steps": 4}, optimizer=settings | ({"min_lr_ratio": 0.1} if schedule == "cosine" else {}))
    assert [learning_rate(config, step) for step in range(len(rates))] == pytest.approx(rates, abs=1e-4)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_are_adamw(model_folder: Path, dtype: str, offload: bool) -> None:
    """arXiv 1711.05101, Algorithm 2, on float32 weights, of gradients clipped together; the model has them rounded."""
    lr, betas, eps, decay, limit = 1e-2, (0.8, 0.7), 1e-4, 0.3, 1e-3
    optimizer = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "grad_clip": limit}
    learner = learner_of(model_folder, dtype, optimizer={**optimizer, "warmup_steps": 2, "offload": offload})
    weights = {name: tensor.detach().double() for name, tensor in learner.master.tensors.items()}
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(2))
    for t, rate in ((1, lr / 2), (2, lr), (3, lr)):
        (mini,) = learner.prepare(random_sequences(8, seed=t))
        gradients, figures = update(learner, mini, step=t - 1)
        assert figures["lr"] == rate
        assert figures["grad_norm"] > 10 * limit
        assert float(torch.cat([x.flatten() for x in gradients.values()]).norm()) == pytest.approx(limit, rel=1e-3)
        for name, gradient in gradients.items():
            first[name] = betas[0] * first[name] + (1 - betas[0]) * gradient
            second[name] = betas[1] * second[name] + (1 - betas[1]) * gradient.double() ** 2
            mean, square = first[name] / (1 - betas[0] ** t), second[name] / (1 - betas[1] ** t)
            weights[name] -= rate * decay * weights[name] + rate * mean / (square.sqrt() + eps)
    for name, parameter in learner.policy.model.named_parameters():
        master = learner.master.tensors[name]
        torch.testing.assert_close(master.double(), weights[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter, master.to(parameter.dtype))
        assert (master.data_ptr() == parameter.data_ptr()) == (dtype == "float32" and not offload)
        assert parameter.grad is None
        assert {x.device.type for x in learner.master.state_of(master).values()} == {"cpu"}


def test_gradients_on_their_way_to_the_host_are_waited_for_late_and_once() -> None:
    """A copy is waited for when IN_FLIGHT later ones are under way, the others before they are used. They add up in
    float32.
    """
    parameter, waited = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), list[int]()
    weights = MasterWeights({"w": parameter}, offload=True)
    for number in range(5):
        event: Any = SimpleNamespace(synchronize=partial(waited.append, number))
        weights.arriving.append((weights.tensors["w"], torch.full((2,), 8.0**-number, dtype=torch.bfloat16), event))
        weights.receive(IN_FLIGHT)
    assert waited == list(range(5 - IN_FLIGHT))
    (master,) = weights.gradients()
    assert waited == list(range(5))
    assert master.grad is not None
    assert master.grad.tolist() == [sum(8.0**-number for number in range(5))] * 2


FLOAT16: dict[str, dict[str, Any]] = {
    "policy": {},
    "lora": {"model": {"lora": {"rank": 4, "alpha": 8}}},
    "distillation": {"distillation": {"teacher": "x"}},
    "critic": {"advantage": {"kind": "gae"}, "critic": {}},
    "pairs": {"preference": {"reference": "step"}},
}


@pytest.mark.parametrize("name", FLOAT16)
def test_a_scaled_loss_keeps_gradients_that_float16_cannot_hold(model_folder: Path, name: str) -> None:
    """Those of a mini-batch a million times as large. The loss that is logged does not depend on the scale."""
    sections = FLOAT16[name]
    if name == "distillation":
        sections = {"distillation": {"teacher": str(model_folder)}}

    def found(dtype: str, factor: int, scale: float | None = None) -> tuple[torch.Tensor, dict[str, float]]:
        learner = learner_of(model_folder, dtype, **sections)
        for trained in (learner.trained, learner.critic and learner.critic.trained):
            if trained is not None and scale is not None:
                trained.scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        sequences = [replace(x, reward=n % 3 - 0.7, pair=n // 2) for n, x in enumerate(random_sequences(12))]
        sequences = [x for x in sequences if x.mask.any()] if name == "pairs" else sequences
        (mini,) = learner.prepare(sequences[:8])
        mini.denominator, mini.n_tokens = mini.denominator * factor, mini.n_tokens * factor
        gradients, figures = update(learner, mini)
        losses = {key: figures[key] * factor for key in ("loss", "value_loss") if key in figures}
        return torch.cat([x.flatten() for x in gradients.values()]) * factor, losses

    exact, losses = found("float32", 1)
    scaled, scaled_losses = found("float16", 10**6)
    assert (scaled - exact).norm() < 0.03 * exact.norm()
    assert scaled_losses == pytest.approx(losses, rel=2e-2, abs=1e-3)
    unscaled, _ = found("float16", 10**6, scale=1.0)
    assert (unscaled - exact).norm() > 0.2 * exact.norm()


def test_an_overflow_skips_the_update_and_halves_the_scale(model_folder: Path) -> None:
    learner = learner_of(model_folder, "float16")
    learner.trained.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    updates, scales = [], [1024, 1024, 512, 256, 256, 512, 512]
    for step, overflows in enumerate([False, True, True, False, False, False, True]):
        before, sequences = weights_of(learner), random_sequences(8, seed=step)
        if overflows:
            sequences[0].advantages[-1] = 1e12
        (mini,) = learner.prepare(sequences)
        updates.append(learner.update(mini, step))
        assert (not changed(learner, before)) == overflows
        assert (updates[-1]["loss_scale"], updates[-1]["skipped_updates"]) == (scales[step], overflows)
    together = mean_of(updates)
    assert together["skipped_updates"] == 3
    assert math.isfinite(together["grad_norm"])


class OppositeRanks(World):
    """Two ranks with opposite losses."""

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item, -item]


@pytest.mark.parametrize("fault", ["advantage", "weight", "float16", "ranks"])
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(model_folder: Path, fault: str) -> None:
    """In float16 only at a scale that cannot be halved any more. The losses of ranks may be ∞ and −∞."""
    learner = learner_of(model_folder, "float16" if fault == "float16" else "float32")
    sequences = random_sequences(4)
    if fault != "weight":
        sequences[0].advantages[-1] = {"float16": 1e12, "ranks": torch.inf}.get(fault, torch.nan)
    (mini,) = learner.prepare(sequences)
    if fault == "weight":
        with torch.no_grad():
            learner.policy.head.weight[5] = torch.inf
    if fault == "ranks":
        learner.world = OppositeRanks()
    if fault == "float16":
        learner.trained.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    before = weights_of(learner)
    with pytest.raises(NonFiniteUpdateError):
        learner.update(mini, step=2)
    assert not changed(learner, before)


def test_advantages_that_differ_in_a_response_need_a_loss_of_tokens(policy: Policy) -> None:
    """As a user's `advantage.kind` may return them."""
    sequences = random_sequences(4)
    sequences[1].advantages[-1] += 0.5
    assert Learner(policy, make_config()).prepare(sequences)
    with refused("advantage.kind"):
        Learner(policy, make_config(loss={"objective": "gspo"})).prepare(sequences)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_that_moves(model_folder: Path, dtype: str, offload: bool) -> None:
    """θ_ref ← α θ_ref + (1 − α) θ, also where the step is below the rounding of bfloat16."""
    loss = {"overrides": {"kl_coef": 0.1}, "reference_ema": 0.9}
    learner = learner_of(model_folder, dtype, loss=loss, optimizer={"offload": offload})
    assert learner.moving is not None
    assert learner.reference is not None
    expected = learner.moving.tensors[UP_PROJECTION].detach().clone()
    for step in range(3):
        learner.update(learner.prepare(random_sequences(8))[0], step)
        learner.move_reference()
        expected = 0.9 * expected + 0.1 * learner.master.tensors[UP_PROJECTION].detach()
    torch.testing.assert_close(learner.moving.tensors[UP_PROJECTION], expected)
    parameter = dict(learner.reference.model.named_parameters())[UP_PROJECTION]
    assert torch.equal(parameter, learner.moving.tensors[UP_PROJECTION].to(parameter.dtype))
    assert not torch.equal(expected, learner.master.tensors[UP_PROJECTION])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_float32_head_is_that_of_float64(model_folder: Path, dtype: str) -> None:
    """Of the trainer, and of the rollout engine, over the same hidden states and weights."""
    errors = {}
    for wide in (False, True):
        learner = learner_of(model_folder, dtype, model={"float32_logits": wide})
        (batch,) = pack([one for one in random_sequences(4) if one.mask.any()], 1024)
        with torch.no_grad():
            hidden, head = learner.policy.hidden_states(batch), learner.policy.head.weight.detach()
        exact = hidden.double() @ head.double().T
        logprobs = exact.log_softmax(-1).gather(1, batch.target_ids[:, None])[:, 0]
        errors[wide] = float((learner.logprobs(batch) - logprobs)[batch.mask].abs().max())
        engine = HFEngine.load(model_folder, learner.config, CPU, SINGLE_PROCESS, print)
        logits = engine.model.get_output_embeddings()(hidden)
        assert (logits.dtype == torch.float32) == wide
        assert float((logits.detach().double() - exact).abs().max()) < (1e-5 if wide else 1.0)
    assert errors[True] < 5e-6 < 1e-4 < errors[False]


def test_metrics_of_a_step_are_means_but_for_maxima_and_counts() -> None:
    """A metric that only some updates have, as the first clips nothing, is a mean over those."""
    one = {"loss": 1.0, "ratio_max": 2.0, "tokens": 3.0, "grad_norm": math.inf, "skipped_updates": 1.0}
    other = {"loss": 2.0, "ratio_max": 1.0, "tokens": 5.0, "grad_norm": 4.0, "skipped_updates": 0.0, "clip_high": 0.2}
    assert mean_of([one, other]) == {
        "loss": 1.5, "ratio_max": 2.0, "tokens": 8.0, "grad_norm": 4.0, "skipped_updates": 1.0, "clip_high": 0.2
    }  # fmt: skip
    assert mean_of([one])["grad_norm"] == math.inf
    assert mean_of([]) == {}
