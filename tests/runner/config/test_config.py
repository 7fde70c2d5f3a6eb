"""Configuration: what a value stands for and what follows from it, refusals and cautions, the reference page."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import make_config
from refusals import refused

from dapo_runner.config import (
    Config,
    JudgeConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    SftConfig,
    TreeShape,
    apply_overrides,
    cautions,
    dump_config,
    load_config,
    parse,
)
from dapo_runner.config.reading import ELSEWHERE, every_key, may_change, section_of
from dapo_runner.config.section import Section, conditions_of, spell
from dapo_runner.errors import ConfigError
from dapo_runner.preflight import memory
from dapo_runner.preflight.dry_run import resolved_yaml, summarize
from dapo_runner.preflight.memory import ModelShape, host_estimate, memory_estimate, model_shape, phase_estimate
from dapo_runner.run.folder import is_among
from docs.settings_reference import COMMANDS, page

MINIMAL = """
model: {tiny: {layers: 2}}
data: {format: arithmetic}
rollout: {max_response_tokens: 64, max_prompt_tokens: 32}
sampler: {prompts_per_step: 32}
reward: {overlong: {cache_length: 16}}
"""


def split(overrides: str) -> list[str]:
    """Split at the spaces before a key."""
    return re.split(r" (?=[\w.]+=)", overrides) if overrides else []


def load(folder: Path, overrides: str = "", more: str = "") -> Config:
    path = folder / "recipe.yaml"
    path.write_text(MINIMAL + more)
    return load_config(path, split(overrides))


def test_what_follows_from_other_settings(tmp_path: Path) -> None:
    ahead = "rollout={engine: server, max_staleness: 2, correction: {weights: token}}"
    assert [load(tmp_path, overrides).max_age for overrides in ("", ahead)] == [1, 3]
    longest = [load(tmp_path, f"evaluation.max_response_tokens={n}").longest_sequence for n in (16, 128)]
    assert longest == [32 + 64, 32 + 128]
    shown = yaml.safe_load(resolved_yaml(load(tmp_path, "reward.overlong.cache_length=null")))
    assert shown["reward"]["overlong"]["cache_length"] == 64 // 5
    config = Config.model_validate({"model": {"path": "m"}, "data": {"path": "d.parquet"}})
    assert config.updates_per_step == 16  # of DAPO's
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


def test_overrides_are_yaml_and_leave_their_input_alone() -> None:
    raw = {"a": {"b": 1, "c": 2}}
    merged = apply_overrides(raw, ["a.b=null", "a.d.e=[1, x]", "f=a=b"])
    assert merged == {"a": {"b": None, "c": 2, "d": {"e": ["1", "x"]}}, "f": "a=b"}
    assert raw == {"a": {"b": 1, "c": 2}}
    quoted = apply_overrides({}, ["a='x #1'", 'b="#2" # two', "c=x#3", "d=[1] # one", "e="])
    assert quoted == {"a": "x #1", "b": "#2", "c": "x#3", "d": ["1"], "e": None}
    for override in (["optimizer.lr=1e-4"], ["--optimizer.lr=1e-4"], ["--optimizer.lr", "1e-4"]):
        assert parse(apply_overrides(yaml.safe_load(MINIMAL), override), Config).optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("logging.progress=off", "off"),
        ("run.name=2026-11-21", "2026-11-21"),
        ("run.name=007", "007"),
        ("run.name=a/", "a/"),
        ("run.name=1e-4", "1e-4"),
        ("loss.overrides.aggregate=token-mean", "token-mean"),
        ("model.compile=off", False),
        ("model.compile=True", True),
        ("loss.overrides.kl_through_ratio=yes loss.overrides.kl_coef=1", True),
        ("loss.overrides.dual_clip=~", None),
        ("optimizer.lr=3e-4", 3e-4),
        ("optimizer.betas=[9e-1, 95e-2]", (0.9, 0.95)),
        ("run.steps=1e3", 1000),
        ("loss.overrides.clip_high=.inf", math.inf),
        ("loss.overrides.clip_cov=[2e-4,1,5]", (2e-4, 1, 5)),
        ("run.output_dir=~/runs", Path.home() / "runs"),
        ("data.path=~/sums.jsonl data.format=auto", Path.home() / "sums.jsonl"),
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


def test_quotes_keep_a_text_where_any_type_is_allowed(tmp_path: Path) -> None:
    options = "{n: 5, stop: ['5', no], user: \"1e-4\", suffix: 'nan', name: 'oN'}"
    judge = f"{{model: m, url: 'http://x:1/v1', options: {options}}}"
    config = load(tmp_path, f"reward.kind=judge reward.judge={judge}")
    assert config.reward.judge is not None
    assert config.reward.judge.options == {"n": 5, "stop": ("5", False), "user": "1e-4", "suffix": "nan", "name": "oN"}
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_a_file_is_read_as_the_command_line_is(tmp_path: Path) -> None:
    more = "run: {name: 12:30, steps: 1e3}\nloss: {objective: clip_cov, overrides: {clip_cov: [3e-4, 1, 5]}}\n"
    config = load(tmp_path, more=more)
    assert (config.run.name, config.run.steps) == ("12:30", 1000)
    assert config.objective.clip_cov == (3e-4, 1, 5)


@pytest.mark.parametrize(
    "overrides",
    [
        "rollout.engine=hf rollout.temperature=1e-6 run.device=cuda:1 evaluation.temperature=9",
        "rollout.engine=vllm rollout.temperature=0.01 evaluation.temperature=2.0",
        "rollout.engine=vllm evaluation.temperature=0.0",
        "run.early_stop={patience: null, target: 0.5}",
        "loss.routing_replay=engine model={path: m, tiny: null}",
        "data.arithmetic.max_digits=9",
        "data.arithmetic={max_digits: 6, operands: 3}",
        "rollout={engine: server, group_size: 27, max_batch_sequences: 3} advantage.segments.kind=tree evaluation.k=1 "
        "optimizer.mini_batch_size=null",
        "advantage.kind=gae critic={} rollout.group_size=1 sampler.filter_groups=null optimizer.mini_batch_size=null",
    ],
)
def test_what_is_at_a_limit_is_accepted(overrides: str, tmp_path: Path) -> None:
    load(tmp_path, overrides)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("", []),
        ("rollout.top_p=0.9", ["rollout.top_p=0.9"]),
        ("run.steps=19", ["optimizer.warmup_steps=20"]),
        ("run.steps=20", []),
        ("rollout={top_k: 20, min_p: 0.05, stop: [.]}", ["rollout.top_k=20, rollout.min_p=0.05"]),
        ("rollout={top_p: 0.9, sampling_mask: true}", []),
        ("algorithm=dpo rollout.top_p=0.9", []),
        ("algorithm=on_policy_distillation distillation.teacher=m rollout.top_p=0.9", []),
        ("reward.kind=grades:grade", ["reward.kind=grades:grade"]),
        ("reward.kind=judge reward.judge={model: m}", []),  # confidences always differ
        ("reward.kind=grades:grade sampler.filter_groups=reward", []),
        ("reward.kind=grades:grade sampler.filter_groups=correctness", ["reward.kind=grades:grade"]),
        ("reward.parts=[{use: integer}, {use: exact}]", ["reward.parts"]),
        ("reward.kind=grades:grade sampler.filter_groups=null", []),
        ("env.tools=[examples.turns:calculator]", []),
        ("env.kind=examples.turns:Guess", ["env.kind"]),
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
    lora = LoraConfig(targets=["q_proj", "v_proj"], rank=8)
    assert shape.adapter_parameters(lora) == 30 * 8 * ((576 + 576) + (576 + 192))
    pattern, every = LoraConfig(targets=r".*\.q_proj"), LoraConfig()  # unknown which: at most all
    assert shape.adapter_parameters(pattern) == shape.adapter_parameters(every) > 0
    (tmp_path / "config.json").write_text(json.dumps({"n_embd": 768, "n_layer": 12, "vocab_size": 50257}))
    assert model_shape(local.model) is None  # GPT-2
    assert "unknown" in summarize(local)["memory"]


def test_sizes_that_a_configuration_leaves_out_are_those_of_its_class(tmp_path: Path) -> None:
    """As published: Gemma 3 1B has no tie_word_embeddings, Gemma 3 12B no vocabulary either."""
    sizes = {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 1, "head_dim": 256}
    texts = [sizes | {"model_type": "gemma3_text", "vocab_size": 262144}]
    texts.append({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"} | sizes})
    for values in texts:
        (tmp_path / "config.json").write_text(json.dumps(values))
        shape = model_shape(ModelConfig(path=str(tmp_path)))
        assert isinstance(shape, ModelShape)
        assert shape.parameters == pytest.approx(999_885_952, rel=1e-3)  # as published


@pytest.mark.parametrize(
    "others", [{"intermediate_size": [4, 4]}, {"num_attention_heads": 0}, {"hidden_size": None}, {"num_experts": [2]}]
)
def test_sizes_of_an_unknown_kind_are_unknown(others: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": 4} | others))
    assert "unknown" in summarize(make_config(model={"tiny": None, "path": str(tmp_path)}))["memory"]


def test_the_memory_of_a_cpu_is_compared_with_this_machine() -> None:
    policy = {"tiny": None, "path": "Qwen/Qwen3-8B-Base", "dtype": "float32"}
    for device, is_compared in (("cpu", True), ("cuda", False)):
        text = summarize(make_config(model=policy, run={"device": device}))["memory"]
        assert ("this machine" in text) == is_compared, text


def test_memory_counts_experts(tmp_path: Path) -> None:
    """Of all experts for the weights, of those that a token uses for the activations."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936, "intermediate_size": 6144}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads | experts))
    shape = model_shape(ModelConfig(path=str(tmp_path)))
    assert isinstance(shape, ModelShape)
    assert shape.parameters == pytest.approx(30_532_122_624, rel=0.002)  # of Qwen3-30B-A3B, as published
    assert (shape.intermediate, shape.active) == (128 * 768, 8 * 768)
    ernie = {"moe_num_experts": 128, "moe_k": 8, "moe_intermediate_size": 768}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads | ernie))
    assert model_shape(ModelConfig(path=str(tmp_path))) == shape
    of_attention = 2 * (2048 + 32 * 128) + 2 * (2048 + 4 * 128)  # experts have no adapters
    assert shape.adapter_parameters(LoraConfig(rank=1)) == 48 * of_attention


def test_memory_of_a_judge_and_of_a_machine(tmp_path: Path) -> None:
    """A sleeping engine and a judge move to the host, on each of the machine's GPUs. An unknown model is named."""
    judge = {"kind": "judge", "judge": {"model": "Qwen/Qwen2.5-7B"}}
    policy = {"tiny": None, "path": "Qwen/Qwen3-8B-Base", "lora": {}}
    rollout = {"engine": "vllm", "vllm": {"sleep": True}}
    config = make_config(model=policy, reward=judge, rollout=rollout, run={"device": "cuda"}, parallel={"gpus": 2})
    shape, judged = model_shape(config.model), model_shape(ModelConfig(path="Qwen/Qwen2.5-7B"))
    assert shape is not None
    assert judged is not None
    estimate = memory_estimate(config, shape)
    assert estimate["judge's weights"] == 2 * judged.parameters
    phases = [phase_estimate(config, part) for part in (estimate, estimate | {"judge's weights": 0})]
    assert [
        with_judge - without for with_judge, without in zip(*(phase.values() for phase in phases), strict=True)
    ] == [*(0, 2 * judged.parameters)]
    on_host = {memory.ASLEEP: 4 * shape.parameters, "judge's weights": 4 * judged.parameters}
    assert host_estimate(config, shape) == on_host
    other = config.model_copy(update={"reward": RewardConfig(kind="judge", judge=JudgeConfig(model="own/judge"))})
    assert summarize(other)["  own/judge"] == "unknown, not counted"


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),  # of a parameter, on a machine: float32 weights, moments and a file in bfloat16
    [
        ({}, 12 + 2),
        ({"parallel": {"gpus": 16}}, (12 + 2) / 2),
        ({"parallel": {"gpus": 16, "replicate": 2}}, 12 + 2 / 2),
        ({"advantage": {"kind": "gae"}, "critic": {}}, 12 + 12 + 2),
    ],
)
def test_background_saves_take_memory_of_the_machine(overrides: dict[str, Any], bytes_each: float) -> None:
    policy = {"tiny": None, "path": "Qwen/Qwen3-8B-Base", "dtype": "bfloat16"}
    config = make_config(model=policy, run={"device": "cuda", "async_save": True}, **overrides)
    shape = model_shape(config.model)
    assert shape is not None
    assert host_estimate(config, shape)[memory.COPIES] == pytest.approx(bytes_each * shape.parameters)


def test_memory_counts_a_critic_and_a_reference() -> None:
    kl = {"reward": {"kl": {"coef": 0.1}}, "loss": {"reference_ema": 0.9}}
    plain, ppo = make_config(), make_config(advantage={"kind": "gae"}, critic={}, **kl)
    shape = model_shape(plain.model)
    before, after = memory_estimate(plain, shape), memory_estimate(ppo, shape)
    more = {what: size // shape.parameters for what, size in after.items() if what not in before}
    # bfloat16: weights, float32 masters and two moments; the rounded reference and its average.
    assert more == {
        "reference weights": 2,
        "reference's float32 average": 4,
        "critic's weights and optimizer states": 14,
    }
    adapted = memory_estimate(ppo.model_copy(update={"model": make_config(model={"lora": {}}).model}), shape)
    # The gradients of adapters leave no room for those of a critic.
    assert sum(adapted[what] for what in ("gradients", memory.CRITIC)) == 18 * shape.parameters


# What is refused

GAE = "advantage.kind=gae critic={}"
CHAIN, TREE = "advantage.segments.kind=chain", "advantage.segments.kind=tree"
PAIRS = "preference={} advantage.kind=group_std"
VLLM, SERVER = "rollout.engine=vllm", "rollout.engine=server"
# Overrides, the setting that is named, what else the message has. All that settings require stands in docs/settings.md;
# here is one of each kind of requirement.
REFUSED = [
    ("algorithm=DAPPO", "algorithm", "did you mean dapo?", "DAPPO"),
    ("optimizer.lrr=1", "optimizer.lrr", "'lr'", "warmup_steps"),
    ("clip_high=3", "clip_high", "'loss.overrides.clip_high'"),
    ("loss.beta=0.04", "loss.beta", "'loss.overrides.kl_coef'", "'preference.beta'"),
    ("run.max_steps=5", "run.max_steps", "did you mean 'run.steps'?"),
    ("reward.deadline=3", "reward.deadline", "'reward.timeout'"),  # of earlier versions, like the next three
    ("env.timeout_seconds=3", "env.timeout_seconds", "'env.timeout'"),
    ("rollout.server.answer_within=3", "rollout.server.answer_within", "'rollout.server.response_timeout'"),
    ("rollout.server.sync_within=3", "rollout.server.sync_within", "'rollout.server.sync_timeout'"),
    ("sampler.filter_groups=false", "sampler.filter_groups", "'correctness'", "null"),
    ("optimizer.lr=fast", "optimizer.lr", "'fast'"),
    ("optimizer.lr=0", "optimizer.lr", "0"),
    ("optimizer.lr=.nan", "optimizer.lr", "nan"),
    ("rollout.group_size=25e-1", "rollout.group_size", "2.5"),
    ("run.steps=1e3x", "run.steps", "'1e3x'"),
    ("run.from=here@last", "run.from", "RUN@STEP"),
    ("run.early_stop={patience: null}", "run.early_stop.patience", "target"),
    ("run.early_stop={target: 1} data={format: auto, path: x, eval_size: 0}", "data.eval_size", "run.early_stop"),
    ("run.early_stop={target: 1} data.eval_size=0", "data.eval_size", "run.early_stop"),
    ("sampler.curriculum.rest=1001", "sampler.curriculum.rest", "1000"),
    ("logging.progress=no", "logging.progress", "'off'", "'no'"),
    ("model.path=x", "model.path", "tiny"),
    ("model.tiny.heads=3", "model.tiny.heads", "3"),
    ("data.path=x.jsonl", "data.path", "data.format"),
    ("data.format=auto", "data.path", ".jsonl", "null"),
    ("data.template=solve", "data.template", "{question}", "solve"),
    ("data.arithmetic.min_digits=3", "data.arithmetic.min_digits", "max_digits=2"),
    ("data.arithmetic.operands=7 data.arithmetic.max_digits=3", "data.arithmetic.max_digits", "operands=7"),
    ("data={format: auto, path: x, eval: {a/b: {path: x}}}", "data.eval.a/b"),
    ("data={format: auto, path: x, eval: {a: {pth: x}}}", "data.eval.a.pth", "'path'"),
    ("data={format: auto, path: x, columns: {prompt: q}}", "data.columns.answer", "dapo"),
    ("data={format: auto, reasoning_gym: [{name: a}], columns: {prompt: q}}", "data.columns", "reasoning_gym"),
    ("data={format: auto, reasoning_gym: [{name: a, config: {size: 3}}]}", "data.reasoning_gym.0.config", "size"),
    ("reward.kind=reasoning_gym", "data.reasoning_gym"),
    ("reward.kind=magic", "reward.kind", "module:function", "magic"),
    ("reward.correct=-1", "reward.correct", "incorrect=-1"),
    ("reward.parts=[{use: magic}]", "reward.parts.0.use", "magic"),
    ("reward.parts=[{use: 'a:f'}, {use: 'b:f'}]", "reward.parts", "f, f_std, f, f_std"),
    ("reward.parts=[{use: 'a:f'}, {use: 'b:f', name: f_std}]", "reward.parts", "f, f_std, f_std"),
    ("reward={judge: {model: m}, parts: [{use: judge}, {use: judge, name: again}]}", "reward.judge"),
    ("reward.calls.max_failed=1.0", "reward.calls.max_failed"),
    ("reward.overlong.cache_length=64", "reward.overlong.cache_length", "rollout.max_response_tokens=64"),
    (f"{GAE} reward.kl.coef=0.1 loss.old_logprobs=engine", "reward.kl", "loss.old_logprobs"),
    ("reward.kind=judge", "reward.judge", "null"),
    ("reward.judge.model=m", "reward.judge", "a section"),
    ("data.chat_template_kwargs={tokenize: true}", "data.chat_template_kwargs", "tokenize"),
    ("reward={kind: judge, judge: {model: m, options: {top_k: 1}}}", "reward.judge.options", "reward.judge.url"),
    ("reward={kind: judge, judge: {model: m, url: x}}", "reward.judge.url", "x"),
    ("reward={kind: judge, judge: {model: m, url: 'http://me:s3cret@a/v1'}}", "reward.judge.url", "http://***@a/v1"),
    ("reward={kind: judge, judge: {model: m, template: '{response}?'}}", "reward.judge.template", "{reference}"),
    ("reward={kind: judge, judge: {model: m, template: '{reference}?'}}", "reward.judge.template", "{response}"),
    ("reward={kind: judge, judge: {model: m, answers: ['Yes', 'yes']}}", "reward.judge.answers", "Yes"),
    (f"{SERVER} sampler.max_age=0 rollout.max_staleness=1 rollout.correction.weights=token", "sampler.max_age", "1"),
    ("optimizer.mini_batch_size=100", "optimizer.mini_batch_size", "512", "100"),
    ("optimizer.token_budget=94", "optimizer.token_budget", "95", "94"),
    ("optimizer.schedule=cosine run.steps=3", "optimizer.warmup_steps", "3", "20"),
    ("rollout.group_size=1", "rollout.group_size", "1"),
    (f"{GAE} rollout.group_size=1", "rollout.group_size", "sampler.filter_groups"),
    ("sampler.filter_groups=true", "sampler.filter_groups", "correctness", "true"),
    (f"{VLLM} run.device=cuda:1", "run.device", "cuda:1"),
    (f"{VLLM} rollout.temperature=1e-6", "rollout.temperature", "1e-06"),
    (f"{VLLM} evaluation.temperature=2.1", "evaluation.temperature", "2.1"),
    (f"{SERVER} rollout.max_batch_sequences=31", "rollout.max_batch_sequences", "32", "31"),
    (f"{SERVER} rollout.max_batch_sequences=32 {CHAIN} advantage.segments.samples=33", "rollout.max_batch_sequences"),
    (f"{SERVER} rollout.max_batch_sequences=3 {TREE} evaluation.k=1", "rollout.max_batch_sequences", "4", "3"),
    (f"{SERVER} rollout.server.urls=[ftp://a]", "rollout.server.urls", "ftp://a"),
    (f"{SERVER} rollout.server.urls=[http://a:1/x]", "rollout.server.urls", "http://a:1/x"),
    (f"{SERVER} rollout.server.urls=[http://a, http://A:80/]", "rollout.server.urls", "http://A:80/"),
    (f"{VLLM} rollout.sampling_mask=true rollout.top_p=0.9", "rollout.top_k", "rollout.sampling_mask"),
    ("rollout.sampling_mask=true", "rollout.sampling_mask", "rollout.top_p"),
    (f"{PAIRS} rollout.top_p=0.9 rollout.sampling_mask=true", "preference", "rollout.sampling_mask"),
    ("rollout.top_k=5 rollout.correction.mask=token", "rollout.sampling_mask", "correction"),
    ("rollout.top_p=0.9 rollout.max_mismatch_kl=1", "rollout.sampling_mask", "max_mismatch_kl"),
    ("loss.routing_replay=true model={path: m, tiny: null}", "loss.routing_replay", "trainer", "true"),
    ("loss.routing_replay=trainer model={path: m} optimizer.mini_batch_size=null", "loss.routing_replay", "trainer"),
    (f"loss.routing_replay=engine model={{path: m, tiny: null}} {SERVER}", "loss.routing_replay", "server"),
    ("algorithm=on_policy_distillation", "distillation.teacher"),
    ("distillation={teacher: x, beta: 1.5}", "distillation.beta", "1.5"),
    (f"{PAIRS} {SERVER} rollout.max_staleness=1 rollout.correction.weights=token", "preference", "max_staleness"),
    (f"{PAIRS} optimizer.token_budget=189", "optimizer.token_budget", "190", "189"),
    (f"{PAIRS} optimizer.mini_batch_size=1", "optimizer.mini_batch_size", "preference"),
    ("loss.routing_replay=engine model={path: m, tiny: null} advantage.segments.kind=chain", "loss.routing_replay"),
    ("loss.routing_replay=engine model={path: m, tiny: null} env.tools=[a:b]", "loss.routing_replay", "env"),
    ("numerics=matched rollout.min_p=0.1", "rollout.sampling_mask"),
    ("advantage.kind=magic", "advantage.kind", "module:function", "magic"),
    ("advantage.kind=gae", "critic", "null"),
    (f"{GAE} critic.warmup_steps=3 run.steps=3", "critic.warmup_steps", "3"),
    ("env={}", "env.kind", "env.tools"),
    ("env.tools=[search]", "env.tools", "module:name", "search"),
    (f"{CHAIN} rollout.stop=[.]", "advantage.segments", "rollout.stop"),
    (f"{TREE} advantage.segments.tokens=64", "advantage.segments.tokens", "64"),
    (f"{TREE} advantage.segments.per_step=5 sampler.max_age=2", "sampler.max_age", "3", "2"),
    (f"{TREE} rollout.group_size=7", "rollout.group_size", "7"),
    ("run=3", "run", "'3'"),
    ("optimizer.lr=1 optimizer.lr.x=3", "optimizer.lr.x"),
    ("optimizer.lr", "optimizer.lr", "key=value"),
    ("=3", "=3", "key=value"),
    ("--optimizer.lr", "--optimizer.lr", "key=value"),
    ("run.name=[1", "run.name"),
    ("run.name=!!int x", "run.name"),
    (f"run.name={'[' * 9999}", "run.name"),
    ("run.name=exp #2", "run.name", "'exp #2'", "comment"),
    ("run.name=#2", "run.name", "'#2'", "comment"),
    ("data.template=Sort: {question}", "data.template", "needs quotes"),
    ("data.template={question}=", "data.template", "Quote a text twice"),
    ("data.template=Solve\n# {question}", "data.template", "comment"),
    ("run.name=..", "run.name", "'..'"),
    ("run.name=a/.", "run.name", "not . or .."),
    ("run.name=''", "run.name", "not . or .."),
    ("run.seed=18446744073709551616", "run.seed", "9223372036854775807"),
    ("run.threads=5000", "run.threads", "1024"),
    ("run.seed=99999999999999999999", "run.seed"),
    ("rollout.temperature=1e-300", "rollout.temperature", "1e-06"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0][:80])
def test_a_mistake_names_its_setting(tmp_path: Path, row: tuple[str, ...]) -> None:
    overrides, key, *parts = row
    with refused(key, parts=parts):
        load(tmp_path, overrides)


def test_what_other_libraries_call_a_setting_is_one() -> None:
    assert ELSEWHERE.keys() <= {*every_key(Config)}


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "optimizer.lrr=1 run.stepz=3 rollout.top_p=2")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, []),
        (b"a: [", []),
        (b"\xff\xfe", []),
        (b"- a", ["list"]),
        (b"rollout:\n  top_k: 1\nsampler: {}\nrollout: {}\n", ["rollout", "line 1", "line 4"]),
        (b"rollout: {server: {folder: a, folder: b}}", ["folder", "line 1"]),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, parts: list[str]) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with refused(str(path), parts=parts):
        load_config(path)


@pytest.mark.parametrize("advantage", [{"kind": "returns"}, {"segments": {"kind": "chain"}}])
def test_advantages_that_differ_within_a_response_require_an_objective_of_tokens(advantage: dict[str, Any]) -> None:
    for name in ("ppo", "gspo_token"):
        assert make_config(advantage=advantage, loss={"objective": name}).objective
    for name in ("gspo", "gmpo", "vespo"):
        with refused("loss.objective", parts=[f"advantage.{next(iter(advantage))}"]):
            make_config(advantage=advantage, loss={"objective": name})


def test_a_reference_has_a_use() -> None:
    for loss in ({"reference": "some/model"}, {"reference_ema": 0.9}):
        with refused(f"loss.{next(iter(loss))}"):
            make_config(loss=loss)
        uses = {"advantage": {"kind": "gae"}, "critic": {}, "reward": {"kl": {"coef": 0.1}}}
        assert make_config(**uses, loss=loss).uses_reference


FIXED = {  # settings and whole sections that keep their values while a run resumes; all others are `MayChange`
    "": "numerics data env advantage loss preference distillation evaluation",
    "run.": "seed from",
    "model.": "path tiny dtype float32_logits lora trust_remote_code",
    "optimizer.": "warmup_steps weight_decay betas eps mini_batch_size",
    "rollout.": "engine temperature top_p top_k min_p sampling_mask stop group_size max_prompt_tokens "
    "max_response_tokens max_staleness partial correction max_mismatch_kl",
    "sampler.": "prompts_per_step filter_groups initial_acceptance curriculum",
    "reward.": "kind parts correct incorrect memory_mb overlong kl",
    "reward.judge.": "model options reward votes shows template answers",
    "critic.": "path warmup_steps clip",
}


@pytest.mark.parametrize("root", [Config, SftConfig])
def test_whether_a_setting_may_change_in_a_run_is_decided(root: type[Section]) -> None:
    """A new setting is either marked with ``MayChange`` or fixed here."""
    fixed = {f"{section}{name}" for section, names in FIXED.items() for name in names.split()}
    keys = set(every_key(root))
    values = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    assert {key for key in values if not may_change(key, root)} == {key for key in values if is_among(key, fixed)}


def sections_of(root: type[Section]) -> Iterator[type[Section]]:
    yield root
    for field in root.model_fields.values():
        if (nested := section_of(field)) is not None:
            yield from sections_of(nested)


@pytest.mark.parametrize("root", COMMANDS.values())
def test_what_a_setting_requires_exists(root: type[Section]) -> None:
    keys = set(every_key(Config))
    for section in sections_of(root):
        for name in section.model_fields:
            for condition in conditions_of(section, name):
                other = condition.removeprefix("!").partition("=")[0]
                assert other in (keys if "." in other else section.model_fields), name
        named = " ".join(names for base in section.__mro__ for names in vars(base).get("requires", {}).values())
        assert set(named.split()) <= section.model_fields.keys(), section


def test_every_setting_has_a_meaning_on_the_reference_page() -> None:
    rows = [line.split(" | ") for line in page().splitlines() if line.startswith("| `")]
    assert len({row[0].split(".")[-1] for row in rows}) > 150  # names; some stand in several sections
    assert [row[0] for row in rows if not row[3].strip()] == []


def test_only_users_and_passwords_are_masked() -> None:
    for text, spelled in (
        ("http://me:s3cret@a/v1", "http://***@a/v1"),
        ("http://token@a", "http://***@a"),
        ("http://me:s/3c@ret@a", "http://***@a"),
        ("me:s3cret@a:80", "***@a:80"),
        ("runs/tiny@210", "runs/tiny@210"),
        ("avg@32", "avg@32"),
    ):
        assert spell(text) == spelled


@pytest.mark.parametrize("piece", ["[", "a", "a:", "a://"])
def test_a_long_text_is_masked_at_once(piece: str) -> None:
    """It may be the answer of a server. To look for an end from every letter takes longer than most timeouts."""
    begun, text = time.thread_time(), 25_000 * piece
    assert spell(text) == text
    assert time.thread_time() - begun < 0.5
