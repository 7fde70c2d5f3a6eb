"""Every loss of the learner: gradient and metrics of an update against the formulas in float64; preference pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import longhand
import pytest
import torch
from builders import make_completion, make_config, make_group, make_prompt, paired, random_sequences, save_model
from learners import CPU, OPTIMIZER, assert_same_gradients, learner_of, update
from refusals import refused
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dapo_kernels import OBJECTIVES
from dapo_runner.algorithms.critic import value_loss
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.losses import PreferenceLoss, pair_metrics, pair_sequences
from dapo_runner.config import ModelConfig, PreferenceConfig, TinyModelConfig
from dapo_runner.policy.model import Policy, load_policy
from dapo_runner.rollout.worker import rollout_sampling
from dapo_runner.tiny_model import make_model, make_tokenizer
from dapo_runner.types import Group, Sample, TrainingSequence, Verdict

CORRECTIONS: list[dict[str, Any]] = [
    {"weights": "token", "cap": 1.3, "floor": 0.8},
    {"weights": "sequence", "cap": 3.0},
    {"mask": "token", "bound": 1.3, "lower_bound": 0.8},
    {"weights": "token", "mask": "sequence", "bound": 1.2},
]
POLICY_LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "at a temperature": {"rollout": {"temperature": 0.7}},
    "ratio to the engine": {"loss": {"old_logprobs": "engine"}},
    "mean over prompts": {"loss": {"overrides": {"aggregate": "prompt-mean-token-mean"}}},
    "dr_grpo": {"loss": {"objective": "dr_grpo"}},
    "kl": {"loss": {"overrides": {"kl_coef": 0.3}}, "rollout": {"temperature": 0.7}},
    **{str(correction): {"rollout": {"correction": correction}} for correction in CORRECTIONS},
}


@pytest.fixture
def model(policy: Policy) -> Any:
    return longhand.copy_of(policy)


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def sampled(model: Any, missing: list[float]) -> list[TrainingSequence]:
    """By an engine whose log-probs differ from the policy's. Every third response is a step old."""
    generator, sequences = torch.Generator().manual_seed(5), random_sequences(11)
    for index, sequence in enumerate(sequences):
        if not sequence.mask.any():
            continue
        sequence.mask[-2] = index % 2 == 0  # or the engine's log-prob is that of a token that does not train
        with torch.no_grad():
            own = longhand.logprobs_of(model, sequence).float()
        gap = 0.4 * torch.randn(own.shape, generator=generator)
        sequence.rollout_logprobs[sequence.mask] = own - gap + 0.1
        sequences[index] = replace(sequence, age=int(index % 3 == 1))
    for index, value in enumerate(missing):
        sequences[index].rollout_logprobs[-1] = value
    return sequences


@pytest.mark.parametrize("name", [*POLICY_LOSSES, "dapo, complete"])
def test_a_policy_loss_is_its_paper(model_folder: Path, model: Any, name: str) -> None:
    """A token without a log-prob of the engine, or with one that is not finite, has a neutral ratio and weight."""
    sections, missing = POLICY_LOSSES.get(name, {}), [torch.nan, torch.inf, -torch.inf]
    sequences = sampled(model, missing if name in POLICY_LOSSES else [])
    for budget, order in ((1024, sequences), (24, sequences[::-1])):
        learner = learner_of(model_folder, **sections, optimizer={"token_budget": budget})
        (mini,) = learner.prepare(order)
        gradients, figures = update(learner, mini)
        figures |= learner.step_metrics([mini], [figures])
        if budget == 1024:
            reference = learner.reference and longhand.copy_of(learner.reference)
            loss, expected = longhand.policy_step(learner.config, sequences, model, reference)
            exact = gradients_of(model, loss)
        assert {key: figures[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert_same_gradients(gradients, exact, 1e-4)


def graded(*rewards: float, dead: tuple[int, ...] = ()) -> Group:
    samples = [
        Sample(make_completion(4 + i), Verdict(reward > 0), reward, trains=i not in dead)
        for i, reward in enumerate(rewards)
    ]
    return Group(make_prompt(), tuple(samples), step=1)


def test_the_best_response_of_a_group_is_chosen_over_the_worst() -> None:
    """Of those that train. Groups of equal rewards, and of one response that trains, have no pair."""
    groups = [
        graded(0.1, 0.9, 0.5, 0.3),
        make_group("WRWW"),
        make_group("RRRR"),
        graded(0.9, 0.1, 0.5, dead=(0,)),
        graded(0.9, 0.1, dead=(0,)),
    ]
    sequences = pair_sequences(groups, step=3)
    found = [[float(x.advantages[-1]) for x in sequences if x.group_id == group] for group in range(5)]
    assert found == [[-1, 1, 0, 0], [0, 1, 0, -1], [0] * 4, [0, -1, 1], [0, 0]]
    assert [x.pair for x in sequences] == [0, 0, -1, -1, -1, 1, -1, 1, -1, -1, -1, -1, -1, 2, 2, -1, -1]
    assert [bool(x.mask.any()) for x in sequences] == [x.pair >= 0 for x in sequences]
    assert [x.age for x in sequences] == [2] * 4 + [3] * 8 + [2] * 5
    config = PreferenceConfig()
    assert [sequences.index(x) for x in PreferenceLoss(config).arrange(sequences)] == [1, 0, 5, 7, 14, 13]
    assert (pair_metrics(groups, config), pair_metrics(groups, None)) == ({"ties": 1}, {})


def graded_pairs(count: int) -> list[TrainingSequence]:
    """A chosen and a rejected response in turn, as a step has them: neighbours need not be in a pair."""
    pairs = paired(random_sequences(count))
    return [pairs[index] for index in torch.randperm(len(pairs), generator=torch.Generator().manual_seed(1)).tolist()]


PAIR_LOSSES: list[dict[str, Any]] = [
    {"beta": 0.4},
    {"beta": 0.1, "loss_type": "ipo"},
    {"beta": 0.05, "loss_type": "hinge"},
]


@pytest.mark.parametrize("preference", PAIR_LOSSES, ids=str)
def test_a_loss_of_pairs_is_its_paper(model_folder: Path, model: Any, preference: dict) -> None:
    sections = {"preference": preference, "rollout": {"temperature": 0.7}, "optimizer": {"token_budget": 48}}
    learner, sequences = learner_of(model_folder, **sections), graded_pairs(13)
    (mini,) = learner.prepare(sequences)
    assert len(mini.micro_batches) > 1
    gradients, figures = update(learner, mini)
    in_turn = sorted(sequences, key=lambda sequence: (sequence.pair, -sequence.advantages[-1]))
    assert learner.reference is not None
    loss = longhand.pair_loss(learner.config, in_turn, model, longhand.copy_of(learner.reference))
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert_same_gradients(gradients, gradients_of(model, loss), 1e-4)


def test_a_pair_stays_together_and_is_compared_with_the_policy_before_the_step(model_folder: Path) -> None:
    """Half of 14 responses would be an odd number. The first update has no margin yet, the second that of the first.
    Only the first has the weights that the engine sampled with.
    """
    optimizer = {"mini_batch_size": 8, "token_budget": 48, "lr": 1e-2}
    learner = learner_of(model_folder, preference={"reference": "step"}, optimizer=optimizer)
    first, second = minis = learner.prepare(graded_pairs(18))
    assert [mini.denominator for mini in minis] == [4, 3]
    for mini in minis:
        for batch in mini.micro_batches:
            chosen, rejected = batch.sequence_ids.view(-1, 2).unbind(1)
            assert torch.equal(chosen + 1, rejected)
            assert not (chosen % 2).any()
    assert all(torch.equal(batch.ref_logprobs, learner.logprobs(batch)) for batch in second.micro_batches)
    gradients, figures = update(learner, first)
    assert figures["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert (figures["margin"], figures["accuracy"], figures["pairs"]) == (0, 0, 4)
    assert figures["entropy"] > 0
    assert any(gradient.any() for gradient in gradients.values())
    assert update(learner, second)[1]["margin"] != 0
    assert [mini.mismatch.tokens > 0 for mini in minis] == [True, False]


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
    assert learner.reference is not None
    sequences, tutor = random_sequences(10), longhand.copy_of(learner.reference)
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
    assert all(parameter.grad is None for parameter in learner.reference.model.parameters())


def test_a_masked_position_has_no_value_loss_whatever_it_holds() -> None:
    values = torch.tensor([1.0, torch.nan], requires_grad=True)
    for clip in (None, 0.2):
        loss, _ = value_loss(values, torch.zeros(2), torch.zeros(2), torch.tensor([True, False]), clip)
        assert torch.autograd.grad(loss, values)[0].tolist() == [1, 0]


def test_rounding_is_no_clip_of_a_value() -> None:
    values, returns, noise = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    _, n_clipped = value_loss(
        values, values + noise.clamp(-0.19, 0.19), returns, torch.ones(1000, dtype=torch.bool), 0.2
    )
    assert n_clipped == 0


def clipped(logprobs: Tensor, entropy: Tensor, tokens: Any) -> Tensor:
    """PPO's loss as a function of one's own."""
    ratio = (logprobs - tokens.old_logprobs).exp()
    return -torch.min(ratio * tokens.advantages, ratio.clamp(0.8, 1.2) * tokens.advantages)


def not_per_token(logprobs: Tensor, entropy: Tensor, tokens: Any) -> Tensor:
    return -logprobs.mean()


def test_an_objective_of_ones_own(model_folder: Path) -> None:
    found = []
    for objective in ("ppo", f"{__name__}:clipped"):
        loss = {"objective": objective, "overrides": {"aggregate": "seq-mean-token-mean"}}
        learner = learner_of(model_folder, loss=loss)
        (mini,) = learner.prepare(random_sequences(8))
        found.append(update(learner, mini))
    (expected, figures), (gradients, own) = found
    assert_same_gradients(gradients, expected, 1e-6)
    assert own["loss"] == pytest.approx(figures["loss"], rel=1e-6)
    for name, parts in (("no_such:clipped", ["no_such"]), (f"{__name__}:clip", ["clip"])):
        with refused("loss.objective", parts=parts):
            _ = make_config(loss={"objective": name}).objective
    with refused("loss.overrides", parts=["clip_high"]):
        _ = make_config(loss={"objective": f"{__name__}:clipped", "overrides": {"clip_high": 0.3}}).objective
    with pytest.raises(ValueError, match="token"):
        update(learner_of(model_folder, loss={"objective": f"{__name__}:not_per_token"}), mini)


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


def test_models_that_do_not_fit_the_policy_are_refused(model_folder: Path, teacher: Path, policy: Policy) -> None:
    """By their vocabulary; by their size one that is to follow the policy."""
    config = ModelConfig(path="x", dtype="float32")
    other, wider = (load_policy(folder, config, CPU, role="critic") for folder in (model_folder, teacher))
    other.tokenizer.add_tokens(["@"])
    moving = {"loss": {"overrides": {"kl_coef": 0.1}, "reference": "x", "reference_ema": 0.9}}
    gae = {"advantage": {"kind": "gae"}, "critic": {"path": "x"}}
    for key, sections, models in (
        ("distillation.teacher", {"distillation": {"teacher": "x"}}, {"reference": other}),
        ("loss.reference", {"loss": {"objective": "grpo"}}, {"reference": other}),
        ("critic.path", gae, {"critic_model": replace(other, tokenizer=make_tokenizer(("1",)))}),
        ("loss.reference_ema", moving, {"reference": wider}),
    ):
        with refused(key):
            Learner(policy, make_config(**sections), **models)


def test_the_rollout_samples_at_the_temperature_of_the_loss() -> None:
    assert rollout_sampling(make_config(rollout={"temperature": 0.7}), 0).temperature == 0.7
