"""Configuration: what a value stands for, what is derived from it, what gets a caution, and its reference page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from builders import make_config

from dapo_kernels.objectives import FIELDS
from dapo_runner.algorithms.objective import resolve_objective
from dapo_runner.config import Config, TreeShape, apply_overrides, cautions, dump_config, load_config
from dapo_runner.config.reading import every_key, section_of
from dapo_runner.config.section import Section, conditions_of
from dapo_runner.preflight.dry_run import summarize
from dapo_runner.preflight.memory import ModelShape, memory_estimate, model_shape
from docs.settings_reference import COMMANDS, page

MINIMAL = """
model: {tiny: {layers: 2}}
data: {format: arithmetic}
rollout: {max_response_tokens: 64, max_prompt_tokens: 32}
sampler: {prompts_per_step: 32}
reward: {overlong: {cache_length: 16}}
"""


def load(folder: Path, overrides: str = "", more: str = "") -> Config:
    """The configuration of a small recipe with overrides, split at spaces outside of brackets."""
    path = folder / "recipe.yaml"
    path.write_text(MINIMAL + more)
    words, depth = [""], 0
    for letter in overrides:
        depth += (letter in "[{") - (letter in "]}")
        if letter == " " and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return load_config(path, list(filter(None, words)))


def test_defaults_are_the_papers_and_frozen() -> None:
    config = Config.model_validate({"model": {"path": "m"}, "data": {"path": "d.parquet"}})
    assert (config.sampler.prompts_per_step, config.rollout.group_size) == (512, 16)
    assert config.updates_per_step == 16
    assert config.reward.overlong.cache_length == 4096
    assert (config.optimizer.lr, config.optimizer.warmup_steps, config.optimizer.weight_decay) == (1e-6, 20, 0.1)
    assert (config.evaluation.k, config.evaluation.top_p) == (32, 0.7)
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


def test_overrides_are_yaml_and_leave_their_input_alone(tmp_path: Path) -> None:
    raw = {"a": {"b": 1, "c": 2}}
    merged = apply_overrides(raw, ["a.b=null", "a.d.e=[1, x]", "f=a=b"])
    assert merged == {"a": {"b": None, "c": 2, "d": {"e": ["1", "x"]}}, "f": "a=b"}
    assert raw == {"a": {"b": 1, "c": 2}}
    for override in ("optimizer.lr=1e-4", "--optimizer.lr=1e-4", "--optimizer.lr 1e-4"):
        assert load(tmp_path, override).optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("logging.progress=off", "off"),
        ("run.name=2026-11-21", "2026-11-21"),
        ("run.name=007", "007"),
        ("run.name=1e-4", "1e-4"),
        ("loss.overrides.aggregate=token-mean", "token-mean"),
        ("model.compile=off", False),
        ("model.compile=True", True),
        ("loss.overrides.kl_through_ratio=yes", True),
        ("loss.overrides.dual_clip=~", None),
        ("optimizer.lr=3e-4", 3e-4),
        ("optimizer.betas=[9e-1, 95e-2]", (0.9, 0.95)),
        ("run.steps=1e3", 1000),
        ("loss.overrides.clip_high=.inf", math.inf),
        ("loss.overrides.clip_cov=[2e-4,1,5]", (2e-4, 1, 5)),
    ],
)
def test_a_value_is_what_its_setting_takes_it_for(tmp_path: Path, override: str, expected: object) -> None:
    """In YAML 1.1 off is False, 12:30 is 750, 007 is 7, 2026-11-21 a date, and 3e-4 is text."""
    config = load(tmp_path, override)
    found: Any = config
    for name in override.partition("=")[0].split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == expected
    assert type(found) is type(expected)
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


def test_a_file_is_read_as_the_command_line_is(tmp_path: Path) -> None:
    more = "run: {name: 12:30, steps: 1e3}\nloss: {objective: clip_cov, overrides: {clip_cov: [3e-4, 1, 5]}}\n"
    config = load(tmp_path, more=more)
    assert (config.run.name, config.run.steps) == ("12:30", 1000)
    assert resolve_objective(config).clip_cov == (3e-4, 1, 5)


@pytest.mark.parametrize(
    "overrides",
    [
        "rollout.engine=hf rollout.temperature=1e-6 run.device=cuda:1 evaluation.temperature=9",
        "rollout.engine=vllm rollout.temperature=0.01 evaluation.temperature=2.0",
        "rollout.engine=vllm evaluation.temperature=0.0",
        "run.early_stop={patience: null, target: 0.5}",
        "data.arithmetic.max_digits=9",
        "data.arithmetic={max_digits: 6, operands: 3}",
        "advantage.kind=gae critic={} rollout.group_size=1 sampler.filter_groups=false optimizer.mini_batch_size=null",
    ],
)
def test_what_is_at_a_limit_is_accepted(overrides: str, tmp_path: Path) -> None:
    load(tmp_path, overrides)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("", []),
        ("rollout.top_p=0.9", ["rollout.top_p=0.9"]),
        ("rollout={top_k: 20, min_p: 0.05, stop: [.]}", ["rollout.top_k=20, rollout.min_p=0.05"]),
        ("rollout={top_p: 0.9, sampling_mask: true}", []),
        ("reward.kind=grades:grade", ["reward.kind=grades:grade"]),
        ("reward.kind=judge reward.judge={model: m}", ["reward.kind=judge"]),
        ("reward.kind=fuzzy", ["reward.kind=fuzzy"]),
        ("reward.kind=judge reward.judge={model: m, reward: binary}", []),
        ("reward.kind=grades:grade sampler.filter_groups=reward", []),
        ("reward.kind=grades:grade sampler.filter_groups=correctness", []),
        ("reward.kind=grades:grade sampler.filter_groups=false", []),
        ("rollout.engine=server sampler.oversample=2", ["sampler.oversample=2"]),
        ("rollout={engine: server, max_staleness: 2, correction: {weights: token}}", ["rollout.max_staleness=2"]),
    ],
)
def test_what_may_be_unintended_gets_a_caution(overrides: str, keys: list[str], tmp_path: Path) -> None:
    config = load(tmp_path, overrides)
    found = list(cautions(config))
    assert [caution.split(": ")[0] for caution in found] == keys
    assert set(found) <= set(summarize(config).values())


@pytest.mark.parametrize(
    ("group_size", "branching"),
    [(216, (6, 6, 6)), (16, (4, 2, 2)), (24, (4, 3, 2)), (64, (4, 4, 4)), (6, (3, 2)), (4, (2, 2)), (72, (6, 4, 3))],
)
def test_a_tree_has_as_many_leaves_as_a_group(group_size: int, branching: tuple[int, ...]) -> None:
    tree = make_config(advantage={"segments": {"kind": "tree"}}, rollout={"group_size": group_size}).tree
    assert tree == TreeShape(branching, 64 // len(branching))


def test_what_follows_from_other_settings(tmp_path: Path) -> None:
    ahead = "rollout={engine: server, max_staleness: 2, correction: {weights: token}}"
    assert [load(tmp_path, overrides).max_age for overrides in ("", ahead)] == [1, 3]
    longest = [load(tmp_path, f"evaluation.max_response_tokens={n}").longest_sequence for n in (16, 128)]
    assert longest == [32 + 64, 32 + 128]


def test_the_summary_counts_and_knows_the_size_of_a_real_model(tmp_path: Path) -> None:
    config = make_config(optimizer={"mini_batch_size": 8, "token_budget": 256}, run={"steps": 10})
    assert re.findall(r"\d+", summarize(config)["per step"]) == ["4", "4", "16", "2", "8"]
    assert "parameters" not in summarize(make_config(model={"tiny": None, "path": "not/here"}))
    sizes = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads))
    local = make_config(model={"tiny": None, "path": str(tmp_path)})
    shape = model_shape(local.model)
    assert isinstance(shape, ModelShape)
    assert shape.parameters == 134_515_008  # of SmolLM2-135M, as published
    assert memory_estimate(local, shape)["weights"] == 2 * 134_515_008


def test_memory_counts_a_critic_and_a_reference() -> None:
    kl = {"reward": {"kl": {"coef": 0.1}}, "loss": {"reference_ema": 0.9}}
    plain, ppo = make_config(), make_config(advantage={"kind": "gae"}, critic={}, **kl)
    shape = model_shape(plain.model)
    before, after = memory_estimate(plain, shape), memory_estimate(ppo, shape)
    more = {what: size // shape.parameters for what, size in after.items() if what not in before}
    # bfloat16: weights, float32 masters and two moments; the rounded reference and its average.
    assert more == {"reference weights": 2, "reference's float32 average": 4, "critic's weights and AdamW moments": 14}


def sections_of(root: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """A section and those below it, each with the prefix of its keys on the reference page."""
    yield prefix, root
    for name, field in root.model_fields.items():
        nested, kind = section_of(field), get_origin(field.annotation)
        if nested is not None:
            inside = ".NAME" if kind is dict else "[]" if kind is list else ""
            yield from sections_of(nested, f"{prefix}{field.alias or name}{inside}.")


def test_the_reference_page_has_every_setting_with_its_meaning() -> None:
    """It has no row for a section that is never null, and those of a section that comes again only once."""
    expected, seen = [], set()
    for prefix, section in (found for root in COMMANDS.values() for found in sections_of(root)):
        fields = section.model_fields.items() if section not in seen else ()
        seen.add(section)
        expected += [
            f"{prefix}{field.alias or name}"
            for name, field in fields
            if section_of(field) is None or type(None) in get_args(field.annotation)
        ]
    expected += [f"loss.overrides.{name}" for name in FIELDS]
    rows = [line.split(" | ") for line in page().splitlines() if line.startswith("| `")]
    assert sorted(row[0].strip("| `") for row in rows) == sorted(expected)
    assert len(COMMANDS) == 4  # train, sft, study, convert-answers
    assert [row[0] for row in rows if not row[3].strip()] == []


@pytest.mark.parametrize("root", COMMANDS.values())
def test_what_a_setting_requires_exists(root: type[Section]) -> None:
    keys = set(every_key(Config))
    for prefix, section in sections_of(root):
        for name in section.model_fields:
            for condition in conditions_of(section, name):
                other = condition.removeprefix("!").partition("=")[0]
                assert other in (keys if "." in other else section.model_fields), prefix + name
        named = " ".join(names for base in section.__mro__ for names in vars(base).get("requires", {}).values())
        assert set(named.split()) <= section.model_fields.keys(), prefix
