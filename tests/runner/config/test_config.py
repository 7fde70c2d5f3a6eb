"""Configuration: what is refused, and whether the message would help the person who made the mistake."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from builders import make_config

from dapo_runner.algorithms.objective import resolve_objective
from dapo_runner.config import (
    Config,
    ConfigError,
    ConvertConfig,
    SftConfig,
    StudyConfig,
    TreeShape,
    apply_overrides,
    cautions,
    dump_config,
    load_config,
)
from dapo_runner.config.reading import every_key, section_of
from dapo_runner.config.section import Section, conditions_of
from dapo_runner.preflight.dry_run import summarize
from dapo_runner.preflight.memory import ModelShape, memory_estimate, model_shape

MINIMAL = """
model: {tiny: {layers: 2}}
data: {format: arithmetic}
rollout: {max_response_tokens: 64, max_prompt_tokens: 32}
sampler: {prompts_per_step: 32}
reward: {overlong: {cache_length: 16}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


def test_defaults_are_the_papers() -> None:
    config = Config.model_validate({"model": {"path": "m"}, "data": {"path": "d.parquet"}})
    assert (config.sampler.prompts_per_step, config.rollout.group_size) == (512, 16)
    assert config.updates_per_step == 16
    assert config.overlong_max_length == 20480
    assert config.reward.overlong.cache_length == 4096
    assert (config.optimizer.lr, config.optimizer.warmup_steps, config.optimizer.weight_decay) == (
        1e-6,
        20,
        0.1,
    )
    assert (config.evaluation.k, config.evaluation.top_p) == (32, 0.7)


def test_dump_reads_back_equal(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, ["optimizer.lr=1e-4", "loss.overrides.clip_high=0.3"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


@pytest.mark.parametrize(
    "override", [["optimizer.lr=1e-4"], ["--optimizer.lr=1e-4"], ["--optimizer.lr", "1e-4"]], ids=str
)
def test_override_forms(recipe: Path, override: list[str]) -> None:
    assert load_config(recipe, override).optimizer.lr == 1e-4


def test_override_values_are_yaml_and_leave_the_input_alone() -> None:
    raw = {"a": {"b": 1, "c": 2}}
    merged = apply_overrides(raw, ["a.b=null", "a.d.e=[1, x]", "f=a=b"])
    assert merged == {"a": {"b": None, "c": 2, "d": {"e": ["1", "x"]}}, "f": "a=b"}
    assert raw == {"a": {"b": 1, "c": 2}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("logging.progress=off", "off"),
        ("logging.project=on", "on"),
        ("run.name=no", "no"),
        ("run.name=2026-11-21", "2026-11-21"),
        ("run.name=12:30", "12:30"),
        ("run.name=007", "007"),
        ("run.name=1e-4", "1e-4"),
        ("run.name=1.5e3", "1.5e3"),
        ("run.name=tRUE", "tRUE"),
        ("run.name=7", "7"),
        ("loss.overrides.aggregate=token-mean", "token-mean"),
        ("model.compile=off", False),
        ("model.compile=No", False),
        ("model.compile=yes", True),
        ("model.compile=on", True),
        ("model.compile=True", True),
        ("loss.overrides.kl_through_ratio=yes", True),
        ("loss.overrides.dual_clip=~", None),
        ("optimizer.lr=3e-4", 3e-4),
        ("optimizer.betas=[9e-1, 95e-2]", (0.9, 0.95)),
        ("run.steps=1e3", 1000),
        ("run.steps=1_000", 1000),
        ("optimizer.lr=1.5e-3", 1.5e-3),
        ("loss.overrides.clip_high=.inf", math.inf),
        ("data.limit=2.5e3", 2500),
        ("rollout.group_size=16e0", 16),
        ("loss.overrides.clip_low=3e-4", 3e-4),
        ("loss.overrides.clip_cov=[2e-4,1,5]", (2e-4, 1, 5)),
    ],
)
def test_a_value_is_what_its_setting_takes_it_for(
    recipe: Path, tmp_path: Path, override: str, expected: object
) -> None:
    """In YAML 1.1 off is False, 12:30 is 750, 007 is 7, 2026-11-21 a date, and 3e-4 is text."""
    config = load_config(recipe, [override])
    found: Any = config
    for name in override.partition("=")[0].split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == expected
    assert type(found) is type(expected)
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


def test_a_file_is_read_as_the_command_line_is(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"{MINIMAL}run: {{name: 12:30, steps: 1e3}}\nlogging:\n  progress: off\n"
        "loss: {objective: clip_cov, overrides: {clip_cov: [3e-4, 1, 5]}}\n"
    )
    config = load_config(path)
    assert (config.run.name, config.run.steps, config.logging.progress) == ("12:30", 1000, "off")
    assert resolve_objective(config).clip_cov == (3e-4, 1, 5)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimizer.lrr=1", ["optimizer.lrr", "unknown key", "did you mean 'lr'?", "warmup_steps"]),
        ("optimiser.lr=1", ["optimiser", "did you mean 'optimizer'?", "evaluation"]),
        ("model.tiny.layer=3", ["model.tiny.layer", "did you mean 'layers'?"]),
        ("optimizer.lr=fast", ["optimizer.lr", "number", "'fast'"]),
        ("optimizer.lr=0", ["optimizer.lr", "greater than 0", "0"]),
        ("sampler.filter_on=rewards", ["sampler.filter_on", "'correctness' or 'reward'"]),
        ("optimizer.lr=-1", ["optimizer.lr", "greater than 0", "-1"]),
        ("optimizer.lr=.nan", ["optimizer.lr", "'.nan'"]),
        ("rollout.group_size=25e-1", ["rollout.group_size", "integer", "2.5"]),
        ("run.steps=1e3x", ["run.steps", "integer", "'1e3x'"]),
        ("run.steps=off", ["run.steps", "integer", "'off'"]),
        ("run.steps=1e999", ["run.steps", "inf"]),
        ("logging.progress=no", ["logging.progress", "'off'", "got 'no'"]),
        ("rollout.group_size=1", ["rollout.group_size", "got 1"]),
        ("model.path=x", ["model.path", "exactly one of", "tiny"]),
        ("data.path=x.jsonl", ["data.path", "data.format"]),
        ("data.format=csv", ["data.format", "'gsm8k'", "'csv'"]),
        ("data.format=auto", ["data", ".jsonl", "null"]),
        ("data.template=solve", ["data.template", "{question}", "solve"]),
        ("reward.kind=magic", ["reward.kind", "module:function", "magic"]),
        ("reward.correct=-1", ["correct: expected more than incorrect=-1"]),
        (
            "reward.overlong.cache_length=64",
            ["reward.overlong.cache_length", "less than L_max=64", "got 64", "soft_punishment=false"],
        ),
        ("reward.overlong.max_length=65", ["reward.overlong.max_length", "at most", "64", "got 65"]),
        ("optimizer.mini_batch_size=100", ["optimizer.mini_batch_size", "divisor of the 512", "got 100"]),
        ("optimizer.token_budget=94", ["optimizer.token_budget", "at least 95", "got 94"]),
        ("data.arithmetic.max_digits=9", []),
        ("data.arithmetic.operands=3", []),
        ("run=3", ["run", "got '3'"]),
        ("optimizer.lr.x=3", ["optimizer.lr.x"]),
        ("optimizer.lr", ["expected key=value"]),
        ("=3", ["expected key=value"]),
        ("--optimizer.lr", ["optimizer.lr", "expected key=value"]),
        ("run.name=[1", ["run.name"]),
    ],
)
def test_mistakes_are_named(recipe: Path, override: str, parts: list[str]) -> None:
    if not parts:
        load_config(recipe, [override])
        return
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, ["optimizer.lr=1", override] if override == "optimizer.lr.x=3" else [override])
    for part in parts:
        assert part in str(caught.value)


def test_every_problem_is_listed_at_once(recipe: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, ["optimizer.lrr=1", "run.stepz=3", "rollout.top_p=2"])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "recipe.yaml"),
        (b"a: [", "recipe.yaml"),
        (b"\xff\xfe", "recipe.yaml"),
        (b"rollout:\n  max_staleness: 1\nsampler: {}\nrollout:\n  engine: server\n", "rollout: .*line 1 .*line 4"),
        (b"rollout: {server: {folder: a, folder: b}}", "folder: .*line 1 .*line 1"),
        (b"- a", "recipe.yaml.*list"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, part: str) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=part):
        load_config(path)


def test_vllm_is_on_the_first_gpu_or_on_none() -> None:
    with pytest.raises(ConfigError, match=r"run\.device: .*cuda:1"):
        make_config(rollout={"engine": "vllm"}, run={"device": "cuda:1"})
    assert make_config(rollout={"engine": "hf"}, run={"device": "cuda:1"}).run.device == "cuda:1"


@pytest.mark.parametrize("section", ["rollout", "evaluation"])
@pytest.mark.parametrize("temperature", [1e-6, 0.009, 2.1])
def test_temperatures_that_vllm_would_change_or_refuse(section: str, temperature: float) -> None:
    sections = {"rollout": {"engine": "vllm"}}
    sections[section] = {**sections.get(section, {}), "temperature": temperature}
    with pytest.raises(ConfigError, match=rf"^{section}\.temperature: .*{temperature:g}"):
        make_config(**sections)
    sections["rollout"]["engine"] = "hf"
    assert getattr(make_config(**sections), section).temperature == temperature


def test_temperatures_that_vllm_takes() -> None:
    for temperature in (0.01, 1.0, 2.0):
        both = {"temperature": temperature}
        make_config(rollout={"engine": "vllm", **both}, evaluation=both)
    make_config(rollout={"engine": "vllm"}, evaluation={"temperature": 0.0})  # greedy


def test_a_truncated_distribution_in_rollouts_gets_a_word() -> None:
    assert list(cautions(make_config())) == []
    config = make_config(rollout={"top_p": 0.9})
    (word,) = cautions(config)
    assert word.startswith("rollout.top_p=0.9: ")
    assert word in summarize(config).values()
    (word,) = cautions(make_config(rollout={"top_p": 0.9, "top_k": 20, "min_p": 0.05, "stop": ["."]}))
    assert word.startswith("rollout.top_p=0.9, rollout.top_k=20, rollout.min_p=0.05: ")


def test_a_reward_of_ones_own_gets_a_word_until_the_filter_is_chosen() -> None:
    """Only the plug-in knows whether its rewards are graded; the filter throws such groups away by default."""
    reward = {"kind": "grades:grade"}
    config = make_config(reward=reward)
    (word,) = cautions(config)
    assert word.startswith("reward.kind=grades:grade: ")
    assert "sampler.filter_on=reward" in word
    assert word in summarize(config).values()
    for sampler in ({"filter_on": "reward"}, {"filter_on": "correctness"}, {"filter_groups": False}):
        assert list(cautions(make_config(reward=reward, sampler=sampler))) == []


def test_what_the_filter_goes_by_is_nothing_without_a_filter() -> None:
    with pytest.raises(ConfigError, match=r"sampler\.filter_on: .*sampler\.filter_groups"):
        make_config(sampler={"filter_on": "reward", "filter_groups": False})


@pytest.mark.parametrize(
    ("segments", "others", "parts"),
    [
        ({"kind": "chains"}, {}, ["advantage.segments.kind", "'chain' or 'tree'", "got 'chains'"]),
        ({"kind": "chain", "tokens": 30}, {}, ["advantage.segments.tokens: ", "kind=tree"]),
        ({"kind": "chain", "per_step": 3}, {}, ["advantage.segments.per_step: ", "kind=tree"]),
        ({"kind": "tree", "samples": 4}, {}, ["advantage.segments.samples: ", "kind=chain"]),
        ({"kind": "tree", "branching": [6]}, {}, ["advantage.segments.branching", "at least 2"]),
        ({"kind": "tree", "branching": [6, 1]}, {}, ["advantage.segments.branching.1", "greater than or equal to 2"]),
        ({"kind": "tree", "branching": [2, 3], "tokens": 4}, {}, ["rollout.group_size: expected 6,", "[2, 3], got 4"]),
        (
            {"kind": "tree", "branching": [2, 2], "tokens": 64},
            {},
            ["advantage.segments.tokens: ", "got 64"],
        ),
        (
            {"kind": "tree", "per_step": 1},
            {"sampler": {"max_age": 2}},
            ["sampler.max_age: expected at least 3", "got 2"],
        ),
        ({"kind": "tree"}, {"rollout": {"group_size": 7}}, ["rollout.group_size: expected a product", "got 7"]),
        ({"kind": "chain"}, {"rollout": {"stop": ["."]}}, ["advantage.segments: ", "rollout.stop"]),
        (
            {"kind": "chain"},
            {"reward": {"calls": {"max_failed": 0.1}}},
            ["advantage.segments: ", "reward.calls.max_failed", "0.1"],
        ),
        (
            {"kind": "chain"},
            {"advantage": {"kind": "group_mean"}},
            ["advantage.segments: ", "advantage.kind", "group_mean"],
        ),
    ],
)
def test_segments_that_cannot_be(segments: dict[str, Any], others: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**others | {"advantage": {"segments": segments, **others.get("advantage", {})}})
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("group_size", "branching"),
    [(216, (6, 6, 6)), (16, (4, 2, 2)), (24, (4, 3, 2)), (64, (4, 4, 4)), (6, (3, 2)), (4, (2, 2))],
)
def test_a_tree_of_as_many_leaves_as_a_group_has(group_size: int, branching: tuple[int, ...]) -> None:
    tree = make_config(advantage={"segments": {"kind": "tree"}}, rollout={"group_size": group_size}).tree
    assert tree == TreeShape(branching, 64 // len(branching))


def test_configuration_is_frozen() -> None:
    config = make_config()
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


def test_plan_counts_and_knows_a_real_models_size(tmp_path: Path) -> None:
    config = make_config(optimizer={"mini_batch_size": 8, "token_budget": 256}, run={"steps": 10})
    assert summarize(config)["per step"] == "4 prompts × 4 = 16 responses, 2 updates of 8"
    assert "unknown" in summarize(make_config(model={"tiny": None, "path": "not/here"}))["memory"]
    # SmolLM2-135M, whose published size is 134,515,008 parameters.
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152,'
        ' "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": true}'
    )
    local = make_config(model={"tiny": None, "path": str(tmp_path)})
    shape = model_shape(local.model)
    assert isinstance(shape, ModelShape)
    assert shape.parameters == 134_515_008
    assert memory_estimate(local, shape)["weights"] == 2 * 134_515_008


def every_section(root: type[Section]) -> dict[str, type[Section]]:
    """The sections under a configuration, by dotted key."""
    found = {"": root}
    for name, field in root.model_fields.items():
        nested = section_of(field)
        if nested is not None:
            found |= {f"{name}.{key}".rstrip("."): section for key, section in every_section(nested).items()}
    return found


@pytest.mark.parametrize("root", [Config, SftConfig, ConvertConfig, StudyConfig])
def test_what_a_setting_requires_exists(root: type[Section]) -> None:
    keys = set(every_key(Config))
    for key, section in every_section(root).items():
        for name in section.model_fields:
            for condition in conditions_of(section, name):
                other = condition.removeprefix("!").partition("=")[0]
                assert other in (keys if "." in other else section.model_fields), f"{key}.{name}"
        named = " ".join(names for base in section.__mro__ for names in vars(base).get("requires", {}).values())
        assert set(named.split()) <= section.model_fields.keys(), key


def test_groups_may_be_as_old_as_rollouts_ahead_and_one_step_more() -> None:
    rollout = {"engine": "server", "max_staleness": 2, "correction": {"weights": "token"}}
    assert (make_config().max_age, make_config(rollout=rollout).max_age) == (1, 3)
