"""Settings of training that do not fit each other, and what `numerics: matched` sets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import make_config
from refusals import refused
from small import small_recipe

from dapo_runner.algorithms.objective import resolve_objective
from dapo_runner.cli import main
from dapo_runner.config import (
    Config,
    CorrectionConfig,
    PreferenceConfig,
    apply_overrides,
    check_config,
    lay_over,
    parse_config,
)
from dapo_runner.parallel.world import Layout
from dapo_runner.preflight.dry_run import departures, resolved_yaml, summarize
from dapo_runner.preflight.needs import check_needs

ROOT = Path(__file__).parents[3]
SMALL = {"model": {"tiny": {}}, "data": {"format": "arithmetic"}, "reward": {"overlong": {"cache_length": 16}}}
MOE = {"path": "x", "tiny": None}
ROUTED: dict[str, Any] = {"model": MOE, "loss": {"routing_replay": True}, "optimizer": {"mini_batch_size": 8}}
ENGINE: dict[str, Any] = {"model": MOE, "loss": {"routing_replay": "engine"}, "optimizer": {"mini_batch_size": 8}}
PAIRS: dict[str, Any] = {
    "preference": {"pairs_per_group": 2},
    "rollout": {"max_prompt_tokens": 4, "max_response_tokens": 12},
    "reward": {"overlong": {"cache_length": 4}},
    "optimizer": {"mini_batch_size": None, "token_budget": 30},
}
LIMITS = {"cap": 3.0, "floor": 0.5, "bound": 3.0, "lower_bound": 0.6}
READERS = {"cap": "weights", "floor": "weights", "bound": "mask", "lower_bound": "mask"}


def over(base: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return base | {name: {**(base.get(name) or {}), **values} for name, values in sections.items()}


def correction(**settings: Any) -> dict[str, Any]:
    return {"rollout": {"correction": settings}}


TOP = {"algorithm", "numerics"}  # no sections
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("rollout.correction", correction(mask="token") | {"loss": {"old_logprobs": "rollout"}}),
    *((f"rollout.correction.{limit}", correction(**{limit: value})) for limit, value in LIMITS.items()),
    ("rollout.correction.cap", correction(cap=3.0, mask="token")),
    ("rollout.correction.bound", correction(bound=3.0, weights="token")),
    ("optimizer.min_lr_ratio", {"optimizer": {"min_lr_ratio": 0.1}}),
    ("optimizer.warmup_steps", {"optimizer": {"schedule": "linear"}, "run": {"steps": 10}}),
    ("optimizer.offload", {"optimizer": {"offload": True}, "model": {"dtype": "float16"}}),
    ("distillation.teacher", {"algorithm": "on_policy_distillation"}),
    ("distillation", {"distillation": {"teacher": "x"}, "preference": {"beta": 0.1}}),
    ("distillation", {"distillation": {"teacher": "x"}, "loss": {"objective": "gspo"}}),
    ("distillation.beta", {"distillation": {"teacher": "x", "beta": 1.5}}),
    ("rollout.group_size", over(PAIRS, rollout={"group_size": 3})),
    ("optimizer.token_budget", over(PAIRS, optimizer={"token_budget": 29})),
    ("optimizer.mini_batch_size", over(PAIRS, optimizer={"mini_batch_size": 1})),
    ("optimizer.mini_batch_size", over(PAIRS, optimizer={"mini_batch_size": 6})),
    ("loss.objective", over(PAIRS, loss={"objective": "gspo"})),
    ("advantage.kind", over(PAIRS, advantage={"kind": "leave_one_out"})),
    ("rollout.correction.weights", over(PAIRS, **correction(weights="token"))),
    ("logging.rollouts.per_token", over(PAIRS, logging={"rollouts": {"per_token": True}})),
    ("preference.reference", over(PAIRS, loss={"reference": "x"}, preference={"reference": "step"})),
    ("preference.label_smoothing", over(PAIRS, preference={"label_smoothing": 0.1, "loss_type": "ipo"})),
    ("loss.old_logprobs", over(ROUTED, loss={"old_logprobs": "rollout"})),
    ("loss.routing_replay", over(ROUTED, optimizer={"mini_batch_size": None})),
    ("model.compile", over(ROUTED, model={"compile": True})),
    ("model.tiny", over(ROUTED, model={"path": None, "tiny": {}})),
    ("preference", over(ROUTED, preference={})),
    ("loss.routing_replay", over(ENGINE, rollout={"engine": "server"})),
    ("loss.routing_replay", over(ENGINE, advantage={"segments": {"kind": "chain"}})),
    ("loss.routing_replay", over(ENGINE, env={"tools": ["trl_counter:increment"]})),
    ("rollout.sampling_mask", {"numerics": "matched", "rollout": {"min_p": 0.1}}),
]
UNTRAINABLE: list[tuple[str, dict[str, Any]]] = [
    ("dapo2", {"objective": "dapo2"}),
    ("clip_hihg", {"overrides": {"clip_hihg": 0.3}}),
    ("clip_high", {"overrides": {"clip_high": -1}}),
    ("loss.reference", {"reference": "some/model"}),
]


@pytest.mark.parametrize(("key", "sections"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_settings_that_do_not_fit_are_refused(key: str, sections: dict[str, Any]) -> None:
    with refused(key):
        check_config(make_config(**sections) if sections.keys().isdisjoint(TOP) else parse_config(SMALL | sections))


@pytest.mark.parametrize(("key", "loss"), UNTRAINABLE, ids=[key for key, _ in UNTRAINABLE])
def test_an_objective_that_cannot_be_trained_is_refused(key: str, loss: dict[str, Any]) -> None:
    with refused(key):
        resolve_objective(make_config(loss=loss))


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_with_its_reader_and_a_default_that_is_spelled_out_are_fine(limit: str) -> None:
    """A run's own copy of its configuration spells out the defaults."""
    for settings in ({limit: LIMITS[limit], READERS[limit]: "token"}, {limit: getattr(CorrectionConfig(), limit)}):
        assert make_config(**correction(**settings)).rollout.correction.enabled == (len(settings) == 2)


def test_needs_of_a_run(model_folder: Path) -> None:
    """AdamW on the host has one process; a model whose routing is replayed has experts."""
    with refused("optimizer.offload"):
        check_needs(make_config(optimizer={"offload": True}), Layout(size=2, shard=2))
    with refused("loss.routing_replay"):
        check_needs(make_config(**over(ROUTED, model={"path": str(model_folder)})))


def test_algorithm_dpo() -> None:
    config = parse_config(apply_overrides(small_recipe(), ["algorithm=dpo", "optimizer.mini_batch_size=256"]))
    assert config.preference == PreferenceConfig()
    assert (config.sampler.filter_groups, config.reward.overlong.soft_punishment) == (False, False)
    assert (config.mini_batch_size, config.updates_per_step) == (8, 1)
    assert departures(config) == ["optimizer.mini_batch_size=256 (dpo: null)"]


def matched(**sections: Any) -> Config:
    return parse_config({**SMALL, "numerics": "matched", **sections})


def test_matched_sets_every_part_and_a_recipe_overrides_each() -> None:
    config = matched()
    assert (config.model.dtype, config.model.float32_logits) == ("float16", True)
    correction = config.rollout.correction
    assert (correction.weights, correction.mask, correction.lower_bound, correction.bound) == ("token", "token", 0.5, 5)
    assert config.rollout.max_mismatch_kl == 0.015
    assert not config.rollout.vllm.batch_invariant
    other = matched(model={"tiny": {}, "dtype": "bfloat16"}).model
    assert (other.dtype, other.float32_logits) == ("bfloat16", True)
    assert matched(rollout={"correction": {"mask": "sequence", "bound": 2.0}}).rollout.correction.weights is None
    assert matched(rollout={"min_p": 0.1, "sampling_mask": True}).rollout.correction.enabled
    for sections in ({"distillation": None}, {"preference": None}, {"rollout": {"correction": {}}}, {"rollout": {}}):
        assert matched(**sections).rollout.correction == config.rollout.correction  # set nothing
    for sections in (
        {"loss": {"old_logprobs": "rollout"}},
        {"distillation": {"teacher": "x"}},
        {"preference": {}, "optimizer": {"token_budget": 50000}},
    ):
        assert not matched(**sections).rollout.correction.enabled
    assert "model.dtype=float16" in summarize(config)["numerics"]
    assert "float32_logits: true" in resolved_yaml(config)


@pytest.mark.parametrize(
    ("device", "engine", "vllm", "expected"),
    [
        ("cuda", "vllm", {}, True),
        ("cuda", "server", {}, True),
        ("cpu", "vllm", {}, False),  # where vLLM refuses it
        ("cpu", "vllm", {"batch_invariant": True}, True),
        ("cuda", "vllm", {"batch_invariant": False}, False),
    ],
)
def test_matched_sets_batch_invariance_on_a_gpu(device: str, engine: str, vllm: dict, expected: bool) -> None:
    config = matched(run={"device": device}, rollout={"engine": engine, "vllm": vllm})
    assert config.rollout.vllm.batch_invariant == expected


def test_the_snippets_of_the_page_run_and_its_table_is_the_measured_one(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/mismatch.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```(\w*)\n(.+?)```", page, re.DOTALL)
    assert {kind for kind, _ in snippets} == {"yaml", ""}
    for kind, snippet in snippets:
        if kind == "yaml":
            parse_config(lay_over(SMALL, yaml.safe_load(snippet)))
        elif snippet.startswith("dapo"):
            assert main(shlex.split(snippet)[1:]) == 0
    assert "model.dtype=bfloat16" in capsys.readouterr().out
    (path,) = re.findall(r"\]\(\.\./(benchmarks/results/mismatch-\S+?)\)", page)
    rows = [line for line in (ROOT / path).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(rows) == 7
    assert set(rows) <= set(page.splitlines())
