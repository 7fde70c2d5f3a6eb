"""Engine against learner: the figures and the weights, against their formulas written out in Python floats."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import make_config, make_sequence
from refusals import refused
from torch import Tensor

from dapo_runner.algorithms.correction import Mismatch, correct, measure
from dapo_runner.algorithms.learner import Learner, step_metrics
from dapo_runner.algorithms.mini_batch import MiniBatch
from dapo_runner.algorithms.packing import pack
from dapo_runner.config import ConfigError, CorrectionConfig
from dapo_runner.policy.model import Policy
from dapo_runner.types import Sequence

CU_SEQLENS = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
MASK = torch.tensor([0, 1, 1, 1, 1, 1, 0, 0, 0], dtype=torch.bool)  # the last sequence trains nowhere
ENGINE = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0, -0.25, -1.0, -1.0, -1.0])
DELTA = torch.tensor([9.0, 1.0, -0.25, 0.5, -1.5, 0.1, float("nan"), 7.0, -7.0])
LEARNER = ENGINE + DELTA


def weights(**settings: object) -> list[float]:
    result = correct(LEARNER, ENGINE, MASK, CU_SEQLENS, CorrectionConfig.model_validate(settings))
    assert result is not None
    assert result.dtype == torch.float32
    return result.tolist()


def expected(live: list[float]) -> list[float]:
    return [1.0, *live, 1.0, 1.0, 1.0]


def test_the_figures_are_their_formulas() -> None:
    delta = [1.0, -0.25, 0.5, -1.5, 0.1]
    ratios = [math.exp(item) for item in delta]
    figures = measure(LEARNER, ENGINE, MASK).metrics()
    assert figures["rollout_gap"] == pytest.approx(sum(map(abs, delta)) / 5, rel=1e-6)
    assert figures["rollout_gap_max"] == pytest.approx(1.5, rel=1e-6)
    assert figures["rollout_k3"] == pytest.approx(
        sum(r - d - 1 for r, d in zip(ratios, delta, strict=True)) / 5, rel=1e-5
    )
    assert figures["rollout_ess"] == pytest.approx(sum(ratios) ** 2 / (5 * sum(r * r for r in ratios)), rel=1e-5)
    assert figures["rollout_masked"] == 0


def test_figures_do_not_depend_on_how_tokens_are_split() -> None:
    parts = [measure(LEARNER[part], ENGINE[part], MASK[part]) for part in (slice(0, 3), slice(3, 7), slice(7, 9))]
    assert sum(parts, Mismatch()).metrics() == pytest.approx(measure(LEARNER, ENGINE, MASK).metrics())
    assert Mismatch().metrics() == {}


def test_agreement_is_a_gap_of_zero_and_every_token_effective() -> None:
    figures = measure(ENGINE, ENGINE, MASK).metrics()
    assert figures.pop("rollout_ess") == 1
    assert set(figures.values()) == {0}


def test_token_weights_are_truncated_from_above() -> None:
    live = [min(math.exp(item), 1.5) for item in (1.0, -0.25, 0.5, -1.5, 0.1)]
    assert weights(weights="token", cap=1.5) == pytest.approx(expected(live), rel=1e-6)


def test_sequence_weights_are_the_ratio_of_whole_responses() -> None:
    first, second = min(math.exp(1.25), 3.0), min(math.exp(-1.4), 3.0)
    assert weights(weights="sequence", cap=3.0) == pytest.approx(expected([first] * 3 + [second] * 2), rel=1e-6)


def test_masks_take_what_is_beyond_the_bound_on_either_side() -> None:
    assert weights(mask="token", bound=2.0) == expected([0.0, 1.0, 1.0, 0.0, 1.0])
    # Geometric means: e^(1.25/3) and e^-0.7.
    assert weights(mask="sequence", bound=2.0) == expected([1.0, 1.0, 1.0, 0.0, 0.0])
    assert weights(mask="sequence", bound=1.2) == expected([0.0] * 5)
    both = weights(weights="token", cap=2.0, mask="sequence", bound=2.0)
    assert both == pytest.approx(expected([2.0, math.exp(-0.25), math.exp(0.5), 0.0, 0.0]), rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("low", "high"), [(0.5, 5.0), (0.8, 1.3), (0.2, 1.1)])
def test_lower_and_upper_bounds_are_separate(level: str, low: float, high: float) -> None:
    """Longhand over the five live tokens: the first response has three of them, the second two."""
    delta = [1.0, -0.25, 0.5, -1.5, 0.1]
    products = [math.exp(item) for item in delta] if level == "token" else [math.exp(1.25)] * 3 + [math.exp(-1.4)] * 2
    means = products if level == "token" else [math.exp(1.25 / 3)] * 3 + [math.exp(-0.7)] * 2
    truncated = [min(max(ratio, low), high) for ratio in products]
    masked = [float(low <= ratio <= high) for ratio in means]
    assert weights(weights=level, floor=low, cap=high) == pytest.approx(expected(truncated), rel=1e-6)
    assert weights(mask=level, lower_bound=low, bound=high) == expected(masked)
    both = weights(weights=level, cap=high, mask=level, lower_bound=low, bound=high)
    icepop = [min(ratio, high) * kept for ratio, kept in zip(products, masked, strict=True)]
    assert both == pytest.approx(expected(icepop), rel=1e-6)
    found = torch.tensor(weights(weights=level, floor=low, cap=high, mask=level, lower_bound=low, bound=high))
    figures = measure(LEARNER, ENGINE, MASK, found, (low, high)).metrics()
    assert figures["rollout_masked"] == masked.count(0.0) / 5
    outside = [kept and not low < ratio < high for ratio, kept in zip(products, masked, strict=True)]
    assert figures["rollout_truncated"] == sum(map(bool, outside)) / 5
    figures = measure(LEARNER, ENGINE, MASK, torch.tensor(expected(truncated)), (low, high)).metrics()
    assert figures["rollout_truncated"] == sum(not low < ratio < high for ratio in products) / 5 > 0


def test_an_absurd_ratio_is_capped_before_it_overflows() -> None:
    far = torch.where(MASK, ENGINE + 500.0, ENGINE)
    result = correct(far, ENGINE, MASK, CU_SEQLENS, CorrectionConfig(weights="sequence"))
    assert result is not None
    assert result.tolist() == pytest.approx(expected([2.0] * 5))


def test_correction_is_off_unless_asked_for() -> None:
    assert correct(LEARNER, ENGINE, MASK, CU_SEQLENS, CorrectionConfig()) is None
    assert not make_config().rollout.correction.enabled
    with refused("rollout.correction"):
        make_config(rollout={"correction": {"mask": "token"}}, loss={"old_logprobs": "rollout"})


@pytest.mark.parametrize(
    ("limit", "user"), [("cap", "weights"), ("floor", "weights"), ("bound", "mask"), ("lower_bound", "mask")]
)
def test_a_limit_of_what_is_off_is_refused(limit: str, user: str) -> None:
    other, value = "mask" if user == "weights" else "weights", {"floor": 0.5, "lower_bound": 0.6}.get(limit, 3.0)
    message = rf"correction\.{limit}: requires rollout\.correction\.{user} .*got null"
    for rest in ({}, {other: "token"}):
        with pytest.raises(ConfigError, match=message) as caught:
            make_config(rollout={"correction": {limit: value, **rest}})
        assert len(str(caught.value).splitlines()) == 1
    make_config(rollout={"correction": {limit: value, user: "token"}})
    default = getattr(CorrectionConfig(), limit)  # spelled out, as in a run's own copy
    config = make_config(rollout={"correction": {limit: default}})
    assert not config.rollout.correction.enabled


def learner_of(policy: Policy, **correction: object) -> Learner:
    return Learner(policy, make_config(rollout={"correction": correction}))


def sequences(engine_logprobs: list[Tensor]) -> list[Sequence]:
    made = (make_sequence(3, 5, first_token=item) for item in (1, 4))
    return [replace(one, rollout_logprobs=item) for one, item in zip(made, engine_logprobs, strict=True)]


def gradients(learner: Learner, monkeypatch: pytest.MonkeyPatch, mini: MiniBatch) -> tuple[list[Tensor], dict]:
    """Of one update, which does not take place, and its figures."""
    monkeypatch.setattr(learner.optimizer, "step", lambda: None)
    monkeypatch.setattr(learner.optimizer, "zero_grad", lambda **_: None)
    figures = step_metrics([mini], [learner.update(mini, 0)])
    found = [tensor.grad.clone() for tensor in learner.master.tensors.values() if tensor.grad is not None]
    for tensor in learner.master.tensors.values():
        tensor.grad = None
    return found, figures


def own_logprobs(learner: Learner) -> list[Tensor]:
    """What the learner itself says of the two sequences, in their layout."""
    found = []
    for item in (1, 4):
        sequence = make_sequence(3, 5, first_token=item)
        (batch,) = pack([sequence], 64)
        found.append(torch.cat([torch.zeros(1), learner.logprobs(batch)]))
    return found


def test_masked_sequences_leave_the_gradient_and_stay_in_its_denominator(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    masking, plain = learner_of(policy, mask="sequence"), learner_of(policy)
    own = own_logprobs(plain)
    (mini,) = masking.prepare(sequences([own[0], own[1] - 3.0 * (own[1] != 0)]))
    masked, figures = gradients(masking, monkeypatch, mini)
    assert figures["rollout_masked"] == pytest.approx(0.5)
    assert figures["rollout_gap"] == pytest.approx(1.5, rel=1e-3)
    (alone,) = plain.prepare(sequences(own)[:1])
    alone.denominator *= 2
    wanted, _ = gradients(plain, monkeypatch, alone)
    for got, want in zip(masked, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def test_the_first_update_measures_what_it_trains_on(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """On-policy there is no pass before the update: the figures come from the update's own log-probs."""
    learner = learner_of(policy)
    monkeypatch.setattr(MiniBatch, "set_old_logprobs", lambda *_: pytest.fail("a pass too many"))
    (mini,) = learner.prepare(sequences([item - 0.5 * (item != 0) for item in own_logprobs(learner)]))
    _, figures = gradients(learner, monkeypatch, mini)
    assert figures["rollout_gap"] == pytest.approx(0.5, rel=1e-3)
    assert figures["rollout_ess"] == pytest.approx(1.0, rel=1e-3)  # the same ratio everywhere
    assert figures["ratio"] == pytest.approx(1.0, abs=1e-6)


def test_a_steps_figures_do_not_depend_on_its_mini_batches(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two responses of unlike length and gap: their mean is over tokens, not over updates."""

    def figures(mini_batch_size: int | None) -> dict[str, float]:
        settings = {"mini_batch_size": mini_batch_size, "token_budget": 256}
        correction = {"mask": "token", "bound": 1.5}
        config = make_config(
            rollout={"correction": correction, "group_size": 2}, sampler={"prompts_per_step": 1}, optimizer=settings
        )
        learner = Learner(policy, config)
        monkeypatch.setattr(learner.optimizer, "step", lambda: None)
        minis = learner.prepare(unequal)
        updates = [learner.update(mini, 0) for mini in minis]
        assert len(updates) == 2 // (mini_batch_size or 2)
        return step_metrics(minis, updates)

    plain = learner_of(policy)
    unequal = []
    for length, gap in ((1, 0.75), (9, 0.25)):
        sequence = make_sequence(3, length)
        (batch,) = pack([sequence], 64)
        own = torch.cat([torch.zeros(1), plain.logprobs(batch)])
        unequal.append(replace(sequence, rollout_logprobs=own - gap * sequence.mask))
    split, whole = figures(1), figures(None)
    assert {key for key in whole if key.startswith("rollout_")} == set(measure(LEARNER, ENGINE, MASK).metrics())
    for key in whole:
        if key.startswith("rollout_"):
            assert split[key] == pytest.approx(whole[key], rel=1e-4), key
    assert split["rollout_gap"] == pytest.approx((0.75 + 9 * 0.25) / 10, rel=1e-3)
    assert split["rollout_gap_max"] == pytest.approx(0.75, rel=1e-3)
    assert split["rollout_masked"] == pytest.approx(0.1)
    ratios = math.exp(0.75) + 9 * math.exp(0.25), math.exp(1.5) + 9 * math.exp(0.5)
    assert split["rollout_ess"] == pytest.approx(ratios[0] ** 2 / (10 * ratios[1]), rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "age"),
    [
        ({}, 0),
        ({}, 1),
        ({"rollout": {"correction": {"weights": "token"}}}, 0),
        ({"rollout": {"correction": {"weights": "sequence", "mask": "sequence"}}}, 1),
        ({"loss": {"old_logprobs": "rollout"}}, 0),
    ],
)
@pytest.mark.parametrize("missing", [torch.nan, torch.inf, -torch.inf])
def test_a_token_without_a_log_prob_of_the_engines_has_a_neutral_ratio(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], age: int, missing: float
) -> None:
    learner = Learner(policy, make_config(**settings))
    own = own_logprobs(learner)
    engine = [item - 0.25 * (item != 0) for item in own]
    known = [item.clone() for item in engine]
    engine[0][5], known[0][5] = missing, own[0][5]
    both = []
    for said in (engine, known):
        (mini,) = learner.prepare([replace(one, age=age) for one in sequences(said)])
        both.append(gradients(learner, monkeypatch, mini))
    (got, figures), (wanted, _) = both
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    assert figures["rollout_unknown"] == pytest.approx(1 / 10)
    assert figures["rollout_gap"] == pytest.approx(0.25, rel=1e-3)


def carried_over(learner: Learner, *, age: int = 1) -> list[Sequence]:
    """A response that an older policy sampled half a nat below what the learner says now, and a fresh one from an
    engine that is a quarter apart.
    """
    old, fresh = own_logprobs(learner)
    first, second = sequences([old - 0.5 * (old != 0), fresh - 0.25 * (fresh != 0)])
    return [replace(first, age=age), second]


def test_a_group_carried_over_has_its_real_ratio(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ratio used to be 1 whatever the policy had learnt since. What is fresh stays on-policy, at no extra pass."""
    learner = learner_of(policy)
    items = carried_over(learner)
    monkeypatch.setattr(MiniBatch, "set_old_logprobs", lambda *_: pytest.fail("a pass too many"))
    (mini,) = learner.prepare(items)
    assert [batch.stale for batch in mini.micro_batches] == [False, True]
    found, figures = gradients(learner, monkeypatch, mini)
    assert figures["ratio"] == pytest.approx((math.exp(0.5) + 1) / 2, rel=1e-3)
    assert figures["ratio_max"] == pytest.approx(math.exp(0.5), rel=1e-3)
    assert figures["clip_high"] == pytest.approx(0.5)  # e^0.5 is beyond 1.28 and the advantages are positive
    assert figures["rollout_gap"] == pytest.approx((0.5 + 0.25) / 2, rel=1e-3)
    # Clipped, it takes no part in the gradient: what is left is the fresh one's, over the tokens of both.
    (alone,) = learner.prepare(items[1:])
    alone.denominator *= 2
    wanted, _ = gradients(learner, monkeypatch, alone)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def test_in_a_later_mini_batch_too(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(
        rollout={"group_size": 2},
        sampler={"prompts_per_step": 1},
        optimizer={"mini_batch_size": 1, "token_budget": 256},
    )
    learner = Learner(policy, config)
    monkeypatch.setattr(learner.optimizer, "step", lambda: None)
    old, fresh = carried_over(learner)
    for items, ratios in (([fresh, old], (1.0, math.exp(0.5))), ([old, fresh], (math.exp(0.5), 1.0))):
        minis = learner.prepare(items)
        updates = [learner.update(mini, 0) for mini in minis]
        assert [figures["ratio"] for figures in updates] == pytest.approx(ratios, rel=1e-3)
        assert step_metrics(minis, updates)["rollout_gap"] == pytest.approx((0.5 + 0.25) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("correction", "ratio", "weight"),
    [
        # The weight of what is carried over is π/μ already: its ratio starts from the policy before the step.
        ({"weights": "token", "cap": 2.0}, 1.0, math.exp(0.5)),
        ({"weights": "sequence", "cap": 3.0}, 1.0, 3.0),
        # A mask alone weighs nothing: the ratio is taken against the policy that sampled.
        ({"mask": "token", "bound": 2.0}, math.exp(0.5), 1.0),
        ({"mask": "token", "bound": 1.5}, math.exp(0.5), 0.0),
    ],
)
def test_correction_of_a_group_carried_over(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, correction: dict[str, object], ratio: float, weight: float
) -> None:
    learner = learner_of(policy, **correction)
    (mini,) = learner.prepare(carried_over(learner))
    (batch,) = [batch for batch in mini.micro_batches if batch.stale]
    assert batch.importance_weights is not None
    assert batch.importance_weights[batch.mask].tolist() == pytest.approx([weight] * 5, rel=1e-3)
    _, figures = gradients(learner, monkeypatch, mini)
    assert figures["ratio"] == pytest.approx((ratio + 1) / 2, rel=1e-3)
    assert figures["rollout_gap"] == pytest.approx((0.5 + 0.25) / 2, rel=1e-3)


def test_against_the_engines_own_log_probs_age_makes_no_difference(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(policy, make_config(loss={"old_logprobs": "rollout"}))
    ratios = []
    for age in (0, 1):
        (mini,) = learner.prepare(carried_over(learner, age=age))
        ratios.append(gradients(learner, monkeypatch, mini)[1]["ratio"])
    assert ratios == pytest.approx([(math.exp(0.5) + math.exp(0.25)) / 2] * 2, rel=1e-3)
