"""Engine and trainer: weights and figures of single tokens, and which log-probs the parts of a step start from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import longhand
import pytest
import torch
from builders import make_sequence, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import learner_of, update

from dapo_runner.algorithms.correction import Mismatch, correct, measure
from dapo_runner.algorithms.learner import Learner, step_metrics
from dapo_runner.config import CorrectionConfig
from dapo_runner.types import Sequence

# Of the tokens of each response: Δ, None where the engine has no log-prob, and whether the token trains.
RESPONSES = st.lists(
    st.lists(st.tuples(st.floats(-2, 2) | st.none(), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=4
)
LEVELS = st.sampled_from([None, "token", "sequence"])


@settings(max_examples=60)
@given(RESPONSES, LEVELS, LEVELS, st.floats(0.1, 0.9), st.floats(1.1, 4), st.data())
def test_weights_and_figures(responses: Any, weights: Any, mask: Any, low: float, high: float, data: Any) -> None:
    limits = {"floor": low, "cap": high} if weights else {}
    bounds = {"lower_bound": low, "bound": high} if mask else {}
    config = CorrectionConfig(weights=weights, mask=mask, **limits, **bounds)
    tokens = [token for response in responses for token in response]
    engine = torch.tensor([math.nan if delta is None else -1.0 for delta, _ in tokens])
    learner = torch.tensor([-1.0 + (delta or 0.0) for delta, _ in tokens])
    live = torch.tensor([trains for _, trains in tokens])
    delta = torch.where(engine.isnan(), 0.0, learner - engine).tolist()  # as float32 rounds it
    starts = torch.tensor([0, *map(len, responses)]).cumsum(0)
    expected: list[float] = []
    for start, response in zip(starts.tolist(), responses, strict=False):
        own = [place for place, (_, trains) in enumerate(response, start) if trains]
        found = dict(zip(own, longhand.correction_weights([delta[place] for place in own], config), strict=True))
        expected += [found.get(place, 1.0) for place in range(start, start + len(response))]
    result = correct(learner, engine, live, starts.to(torch.int32), config)
    if result is None:
        assert not config.enabled
    else:
        assert result.dtype == torch.float32
        assert result.tolist() == pytest.approx(expected, rel=1e-5)

    known = [place for place in range(len(tokens)) if live[place] and not engine[place].isnan()]
    cut = data.draw(st.integers(0, len(tokens)))
    limited = (config.floor, config.cap) if weights else None
    parts = [
        measure(learner[part], engine[part], live[part], None if result is None else result[part], limited)
        for part in (slice(0, cut), slice(cut, None))
    ]
    figures = sum(parts, Mismatch()).metrics()
    if known:
        used = [1.0 if result is None else float(result[place]) for place in known]
        exact = longhand.mismatch([delta[place] for place in known], used, config)
        exact.pop("rollout_truncated", None)  # a weight in float32 may differ from its limit in float64
        assert {key: figures[key] for key in exact} == pytest.approx(exact, rel=1e-5, abs=1e-6)
        assert figures["rollout_unknown"] == pytest.approx(1 - len(known) / int(live.sum()))
    else:
        assert figures == ({"rollout_unknown": 1.0} if live.any() else {})


def test_the_share_of_truncated_weights() -> None:
    """Ratios ½, 1, 2 and 8 with limits ¾ and 2; what a mask took is not truncated, and a limit itself is."""
    delta = torch.tensor([0.5, 1.0, 2.0, 8.0]).log()
    weights, live = torch.tensor([0.75, 1.0, 2.0, 0.0]), torch.ones(4, dtype=torch.bool)
    figures = measure(delta, torch.zeros(4), live, weights, (0.75, 2.0)).metrics()
    assert (figures["rollout_truncated"], figures["rollout_masked"]) == (0.5, 0.25)
    assert "rollout_truncated" not in measure(delta, torch.zeros(4), live, weights).metrics()


def responses_of(learner: Learner, gaps: dict[int, float]) -> list[Sequence]:
    """One response of each length, sampled ``gap`` below the policy's log-probs."""
    made = []
    for n, (length, gap) in enumerate(gaps.items()):
        sequence = make_sequence(3, length, first_token=1 + 3 * n)
        (batch,) = pack([sequence], 64)
        own = torch.cat([torch.zeros(1), learner.logprobs(batch)])
        made.append(replace(sequence, rollout_logprobs=own - gap * sequence.mask))
    return made


@pytest.mark.parametrize("size", [1, None])
def test_figures_of_a_step_do_not_depend_on_its_mini_batches(model_folder: Path, size: int | None) -> None:
    """Responses of unlike length and gap: their mean is over tokens, of the policy before the first update."""
    sections = {"rollout": {"correction": {"mask": "token", "bound": 1.5}, "group_size": 2}}
    learner = learner_of(model_folder, **sections, sampler={"prompts_per_step": 1}, optimizer={"mini_batch_size": size})
    minis = learner.prepare(responses_of(learner, {1: 0.75, 9: 0.25}))
    assert len(minis) == 2 // (size or 2)
    figures = step_metrics(minis, [learner.update(mini, 0) for mini in minis])
    exact = longhand.mismatch([0.75] + [0.25] * 9, [0.0] + [1.0] * 9, CorrectionConfig())
    assert {key: figures[key] for key in exact} == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("sections", "ratios"),
    [
        ({}, (math.exp(0.5), 1.0)),
        ({"rollout": {"correction": {"weights": "token"}}}, (1.0, 1.0)),  # the weights are that ratio already
        ({"rollout": {"correction": {"mask": "token", "bound": 1.5}}}, (math.exp(0.5), 1.0)),
        ({"loss": {"old_logprobs": "rollout"}}, (math.exp(0.5), math.exp(0.25))),
    ],
    ids=str,
)
def test_a_response_that_was_carried_over_has_its_real_ratio(
    model_folder: Path, sections: dict[str, Any], ratios: tuple[float, float], order: tuple[int, int]
) -> None:
    """In either mini-batch of a step: the ratio to the policy that sampled it. A fresh response starts from 1."""
    shape = {"sampler": {"prompts_per_step": 1}, "optimizer": {"mini_batch_size": 1, "lr": 1e-9}}
    rollout = {"group_size": 2, **sections.get("rollout", {})}
    learner = learner_of(model_folder, **{**sections, **shape, "rollout": rollout})
    stale, fresh = responses_of(learner, {5: 0.5, 6: 0.25})
    both = [replace(stale, age=1), fresh]
    minis = learner.prepare([both[place] for place in order])
    found = [update(learner, mini)[1]["ratio"] for mini in minis]
    assert found == pytest.approx([ratios[place] for place in order], rel=1e-3)


def test_on_policy_there_is_no_pass_before_the_first_update(model_folder: Path) -> None:
    """Its own log-probs are the old ones, so that every ratio is 1. The second update has those of a pass."""
    optimizer = {"mini_batch_size": 1, "lr": 1e-2}
    learner = learner_of(model_folder, rollout={"group_size": 2}, sampler={"prompts_per_step": 1}, optimizer=optimizer)
    sequences = responses_of(learner, {5: 0.5, 6: 0.25})
    passes: list[int] = []
    learner.policy.model.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    first, second = learner.prepare(sequences)
    assert len(passes) == 1
    assert update(learner, first)[1]["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert len(passes) == 2
    assert update(learner, second)[1]["ratio_max"] > 1.001
