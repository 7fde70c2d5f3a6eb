"""Every loss of the learner: gradient and metrics of an update against the formulas in float64, one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import longhand
import pytest
import torch
from builders import make_config, paired, random_sequences, save_model
from learners import CPU, OPTIMIZER, assert_same_gradients, learner_of, update
from refusals import refused
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dapo_kernels import OBJECTIVES
from dapo_runner.algorithms.critic import value_loss
from dapo_runner.algorithms.learner import Learner, step_metrics
from dapo_runner.config import ModelConfig, TinyModelConfig
from dapo_runner.policy.model import Policy, load_policy
from dapo_runner.rollout.worker import rollout_sampling
from dapo_runner.run.tiny_model import make_model, make_tokenizer
from dapo_runner.types import Sequence

CORRECTIONS: list[dict[str, Any]] = [
    {"weights": "token", "cap": 1.3, "floor": 0.8},
    {"weights": "sequence", "cap": 3.0},
    {"mask": "token", "bound": 1.3, "lower_bound": 0.8},
    {"weights": "token", "mask": "sequence", "bound": 1.2},
]
POLICY_LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "at a temperature": {"rollout": {"temperature": 0.7}},
    "ratio to the engine": {"loss": {"old_logprobs": "rollout"}},
    "mean over prompts": {"loss": {"overrides": {"aggregate": "prompt-mean-token-mean"}}},
    "dr_grpo": {"loss": {"objective": "dr_grpo"}},
    "kl": {"loss": {"overrides": {"kl_coef": 0.3}}, "rollout": {"temperature": 0.7}},
    **{str(correction): {"rollout": {"correction": correction}} for correction in CORRECTIONS},
}


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return longhand.model_at(model_folder)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Any:
    return longhand.model_at(model_folder, 1.1)


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def sampled(model: Any, missing: list[float]) -> list[Sequence]:
    """By an engine whose log-probs differ from the policy's. Every third response is a step old."""
    generator, sequences = torch.Generator().manual_seed(5), random_sequences(11)
    for index, sequence in enumerate(sequences):
        if not sequence.mask.any():
            continue
        with torch.no_grad():
            own = longhand.logprobs_of(model, sequence).float()
        gap = 0.4 * torch.randn(own.shape, generator=generator)
        sequence.rollout_logprobs[sequence.mask] = own - gap + 0.1
        sequences[index] = replace(sequence, age=int(index % 3 == 1))
    for index, value in enumerate(missing):
        sequences[index].rollout_logprobs[-1] = value
    return sequences


@pytest.mark.parametrize("name", [*POLICY_LOSSES, "dapo, complete"])
def test_a_policy_loss_is_its_paper(model_folder: Path, model: Any, reference: Any, name: str) -> None:
    """A token without a log-prob of the engine, or with one that is not finite, has a neutral ratio and weight."""
    sections, missing = POLICY_LOSSES.get(name, {}), [torch.nan, torch.inf, -torch.inf]
    sequences = sampled(model, missing if name in POLICY_LOSSES else [])
    for budget, order in ((1024, sequences), (24, sequences[::-1])):
        learner = learner_of(model_folder, **sections, optimizer={"token_budget": budget})
        (mini,) = learner.prepare(order)
        gradients, figures = update(learner, mini)
        figures |= step_metrics([mini], [figures])
        if budget == 1024:
            loss, expected = longhand.policy_step(learner.config, sequences, model, reference)
            exact = gradients_of(model, loss)
        assert {key: figures[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert_same_gradients(gradients, exact, 1e-4)


def graded_pairs() -> list[Sequence]:
    """A chosen and a rejected response in turn, as a step has them: neighbours need not be in a pair."""
    pairs = paired(random_sequences(13))
    return [pairs[index] for index in torch.randperm(len(pairs), generator=torch.Generator().manual_seed(1)).tolist()]


PAIR_LOSSES: list[dict[str, Any]] = [
    {"beta": 0.4},
    {"beta": 0.4, "label_smoothing": 0.2},
    {"beta": 0.1, "loss_type": "ipo"},
    {"beta": 0.05, "loss_type": "hinge"},
]


@pytest.mark.parametrize("preference", PAIR_LOSSES, ids=str)
def test_a_loss_of_pairs_is_its_paper(model_folder: Path, model: Any, reference: Any, preference: dict) -> None:
    sections = {"preference": preference, "rollout": {"temperature": 0.7}, "optimizer": {"token_budget": 48}}
    learner, sequences = learner_of(model_folder, **sections), graded_pairs()
    (mini,) = learner.prepare(sequences)
    assert len(mini.micro_batches) > 1
    gradients, figures = update(learner, mini)
    in_turn = sorted(sequences, key=lambda sequence: (sequence.pair, -sequence.advantages[-1]))
    loss = longhand.pair_loss(learner.config, in_turn, model, reference)
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert_same_gradients(gradients, gradients_of(model, loss), 1e-4)


def test_a_pair_is_compared_with_the_policy_before_the_step(model_folder: Path) -> None:
    """The first update has no margin yet, the second has that of the first update."""
    sections = {"preference": {"reference": "step"}, "optimizer": {"mini_batch_size": 4, "lr": 1e-2}}
    learner = learner_of(model_folder, **sections)
    first, second, _ = learner.prepare(graded_pairs())
    before = [learner.logprobs(batch) for batch in second.micro_batches]
    assert all(torch.equal(batch.ref_logprobs, x) for batch, x in zip(second.micro_batches, before, strict=True))
    gradients, figures = update(learner, first)
    assert figures["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert (figures["margin"], figures["accuracy"], figures["pairs"]) == (0, 0, first.denominator)
    assert any(gradient.any() for gradient in gradients.values())
    assert update(learner, second)[1]["margin"] != 0


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than the policy: of its own width, and with rows that pad its head."""
    torch.manual_seed(8)
    sizes = TinyModelConfig(layers=2, hidden_size=48, heads=2, intermediate_size=64)
    model = make_model(sizes, tokenizer := make_tokenizer(), max_positions=256)
    model.resize_token_embeddings(len(tokenizer) + 5, mean_resizing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return save_model(model, tokenizer, tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_distillation_is_its_paper(model_folder: Path, teacher: Path, model: Any, beta: float) -> None:
    sections = {"distillation": {"teacher": str(teacher), "beta": beta}, "rollout": {"temperature": 0.7}}
    learner = learner_of(model_folder, **sections, optimizer={"token_budget": 40})
    sequences, tutor = random_sequences(10), longhand.model_at(teacher, 1.1)
    (mini,) = learner.prepare(sequences)
    gradients, figures = update(learner, mini)
    own = torch.cat([longhand.logits_of(model, sequence) for sequence in sequences])
    with torch.no_grad():
        theirs = torch.cat([longhand.logits_of(tutor, sequence) for sequence in sequences])[:, : own.shape[1]]
    loss = longhand.divergence(beta, own / 0.7, theirs / 0.7).mean()
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert figures["entropy"] == pytest.approx(float(longhand.entropy_of(own / 0.7).detach().mean()), rel=1e-4)
    assert figures["tokens"] == len(own)
    assert_same_gradients(gradients, gradients_of(model, loss), 1e-4)
    assert learner.reference is not None
    assert all(parameter.grad is None for parameter in learner.reference.model.parameters())


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_is_its_paper(clip: float | None) -> None:
    """A masked position may hold anything. A token is counted where the clip, and not rounding, stopped it."""
    generator = torch.Generator().manual_seed(0)
    values, returns, noise = torch.randn(3, 20000, generator=generator)
    old = values + torch.where(torch.arange(20000) % 2 == 0, 0.3 * noise, 0.1 * noise.clamp(-1.9, 1.9))
    mask = torch.rand(20000, generator=generator) < 0.8
    values[~mask] = torch.nan
    found = value_loss(values.requires_grad_(), old, returns, mask, clip)
    exact = values.detach().double()[mask].requires_grad_()
    terms = longhand.value_loss(exact, old[mask].double(), returns[mask].double(), clip)
    assert float(found.loss.detach()) == pytest.approx(float(terms.sum().detach()), rel=1e-6)
    found.loss.backward()
    terms.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad[mask].double(), exact.grad)
    is_stopped = (exact.grad == 0) & ((exact - old[mask].double()).abs() > 0.2)
    assert float(found.clipped) == (int(is_stopped.sum()) if clip else 0)


def test_every_objective_of_the_table_updates(policy: Policy) -> None:
    """Their formulas are those of the tests of `dapo_kernels`."""
    for objective in OBJECTIVES:
        kl = {"overrides": {"kl_coef": 0.0}}
        learner = Learner(policy, make_config(loss={"objective": objective, **kl}, optimizer=OPTIMIZER))
        (mini,) = learner.prepare(random_sequences(12))
        gradients, figures = update(learner, mini)
        assert figures["grad_norm"] == pytest.approx(float(torch.cat([x.flatten() for x in gradients.values()]).norm()))
        assert figures["grad_norm"] > 0, objective


@pytest.mark.parametrize("name", ["dapo", "distillation", "pairs"])
def test_no_logits_are_kept(name: str, model_folder: Path) -> None:
    """Those of a chunk are made within an operator."""
    made: list[tuple[int, ...]] = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made.extend(tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    sections: dict[str, Any] = {
        "dapo": {"loss": {"overrides": {"kl_coef": 0.3}}},
        "distillation": {"distillation": {"teacher": str(model_folder)}},
        "pairs": {"preference": {}},
    }[name]
    learner, sequences = learner_of(model_folder, **sections), random_sequences(14)
    with Shapes():
        minis = learner.prepare(paired(sequences) if name == "pairs" else sequences)
        learner.update(minis[0], 0)
    vocab, hidden = learner.policy.model.lm_head.weight.shape
    assert (vocab, hidden) in made  # its gradient
    assert [shape for shape in made if len(shape) > 1 and shape[-1] == vocab and shape[-2] != hidden] == []


def test_models_that_a_loss_compares_share_a_vocabulary(model_folder: Path, policy: Policy) -> None:
    other = load_policy(model_folder, ModelConfig(path="x", dtype="float32"), CPU, role="critic")
    other.tokenizer.add_tokens(["@"])
    gae = {"advantage": {"kind": "gae"}, "critic": {"path": "x"}}
    for key, sections, models in (
        ("distillation.teacher", {"distillation": {"teacher": "x"}}, {"reference": other}),
        ("loss.reference", {"loss": {"objective": "grpo"}}, {"reference": other}),
        ("critic.path", gae, {"critic_model": other}),
    ):
        with refused(key):
            Learner(policy, make_config(**sections), **models)


def test_the_rollout_samples_at_the_temperature_of_the_loss() -> None:
    assert rollout_sampling(make_config(rollout={"temperature": 0.7}), 0).temperature == 0.7
