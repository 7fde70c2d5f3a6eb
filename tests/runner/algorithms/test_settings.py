"""What a run of training needs beside its settings, and what `numerics: matched` sets."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import make_config
from refusals import refused

from dapo_runner.cli import main
from dapo_runner.config import Config, lay_over, parse
from dapo_runner.preflight.dry_run import resolved_yaml, summarize
from dapo_runner.preflight.needs import check_needs

ROOT = Path(__file__).parents[3]
SMALL = {"model": {"tiny": {}}, "data": {"format": "arithmetic"}, "reward": {"overlong": {"cache_length": 16}}}


def test_only_routing_of_experts_is_replayed(model_folder: Path) -> None:
    model, replay = {"path": str(model_folder), "tiny": None}, {"routing_replay": True}
    with refused("loss.routing_replay"):
        check_needs(make_config(model=model, loss=replay, optimizer={"mini_batch_size": 8}))


def test_an_objective_that_there_is_not_is_refused() -> None:
    for key, loss in (("clip_high", {"overrides": {"clip_high": -1}}), ("dapo2", {"objective": "dapo2"})):
        with refused(key):
            make_config(loss=loss)


def matched(**sections: Any) -> Config:
    return parse({**SMALL, "numerics": "matched", **sections}, Config)


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
        {"loss": {"old_logprobs": "engine"}},
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
            parse(lay_over(SMALL, yaml.safe_load(snippet)), Config)
        elif snippet.startswith("dapo"):
            assert main(shlex.split(snippet)[1:]) == 0
    assert "model.dtype=bfloat16" in capsys.readouterr().out
    (path,) = re.findall(r"\]\(\.\./(benchmarks/results/mismatch-\S+?)\)", page)
    rows = [line for line in (ROOT / path).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(rows) == 7
    assert set(rows) <= set(page.splitlines())
