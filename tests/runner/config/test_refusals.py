"""What a configuration is refused for: the message names the setting and what it got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from refusals import refused
from test_config import load

from dapo_runner.algorithms.objective import resolve_objective, uses_reference
from dapo_runner.config import load_config
from dapo_runner.errors import ConfigError

GAE = "advantage.kind=gae critic={}"
CHAIN, TREE = "advantage.segments.kind=chain", "advantage.segments.kind=tree"
PAIRS = "preference={} advantage.kind=group_std"
VLLM, SERVER = "rollout.engine=vllm", "rollout.engine=server"
# Overrides, the setting that is named, what else the message has. All that settings require stands in docs/settings.md;
# here is one of each kind of requirement.
REFUSED = [
    ("algorithm=DAPPO", "algorithm", "you mean dapo"),
    ("optimizer.lrr=1", "optimizer.lrr", "'lr'", "warmup_steps"),
    ("clip_high=3", "clip_high", "'loss.overrides.clip_high'"),
    ("optimizer.lr=fast", "optimizer.lr", "'fast'"),
    ("optimizer.lr=0", "optimizer.lr", "0"),
    ("optimizer.lr=.nan", "optimizer.lr", "nan"),
    ("rollout.group_size=25e-1", "rollout.group_size", "2.5"),
    ("run.steps=1e3x", "run.steps", "'1e3x'"),
    ("run.from=here", "run.from", "RUN@STEP"),
    ("run.early_stop={patience: null}", "run.early_stop.patience", "target"),
    ("run.early_stop={target: 1} data={format: auto, path: x, eval_size: 0}", "data.eval_size", "run.early_stop"),
    ("logging.progress=no", "logging.progress", "'off'", "'no'"),
    ("model.path=x", "model.path", "tiny"),
    ("model.tiny.heads=3", "model.tiny.heads", "3"),
    ("data.path=x.jsonl", "data.path", "data.format"),
    ("data.format=csv", "data.format", "'gsm8k'", "'csv'"),
    ("data.format=auto", "data.path", ".jsonl", "null"),
    ("data.template=solve", "data.template", "{question}", "solve"),
    ("data.arithmetic.min_digits=3", "data.arithmetic.min_digits", "max_digits=2"),
    ("data.arithmetic.operands=7 data.arithmetic.max_digits=3", "data.arithmetic.max_digits", "operands=7"),
    ("data={format: auto, path: x, eval: {a/b: {path: x}}}", "data.eval.a/b"),
    ("data={format: auto, path: x, eval: {a: {pth: x}}}", "data.eval.a.pth", "'path'"),
    ("data={format: auto, path: x, columns: {answer: a}}", "data.columns.prompt"),
    ("data={format: auto, path: x, columns: {prompt: q}}", "data.columns.answer", "dapo"),
    ("data={format: auto, reasoning_gym: [{name: a}], columns: {prompt: q}}", "data.columns", "reasoning_gym"),
    ("data={format: auto, reasoning_gym: [{name: a, config: {size: 3}}]}", "data.reasoning_gym.0.config", "size"),
    ("reward.kind=reasoning_gym", "data.reasoning_gym"),
    ("reward.kind=magic", "reward.kind", "module:function", "magic"),
    ("reward.correct=-1", "reward.correct", "incorrect=-1"),
    ("reward.parts=[{use: magic}]", "reward.parts.0.use", "magic"),
    ("reward.parts=[{use: 'a:f'}, {use: 'b:f'}]", "reward.parts", "f, f"),
    ("reward.calls.max_failed=1.0", "reward.calls.max_failed"),
    ("reward.overlong.cache_length=64", "reward.overlong.cache_length", "rollout.max_response_tokens=64"),
    (f"{GAE} reward.kl.coef=0.1 loss.old_logprobs=rollout", "reward.kl", "loss.old_logprobs"),
    ("reward.kind=judge", "reward.judge", "null"),
    ("reward.judge.model=m", "reward.judge", "a section"),
    ("reward={kind: judge, judge: {model: m, options: {top_k: 1}}}", "reward.judge.options", "reward.judge.url"),
    ("reward={kind: judge, judge: {model: m, url: x}}", "reward.judge.url", "x"),
    ("reward={kind: judge, judge: {model: m, template: '{response}?'}}", "reward.judge.template", "{reference}"),
    ("reward={kind: judge, judge: {model: m, answers: ['Yes', 'yes']}}", "reward.judge.answers", "Yes"),
    ("sampler.filter_groups=rewards", "sampler.filter_groups", "'correctness'", "'reward'"),
    (f"{SERVER} sampler.max_age=0 rollout.max_staleness=1 rollout.correction.weights=token", "sampler.max_age", "1"),
    ("optimizer.mini_batch_size=100", "optimizer.mini_batch_size", "512", "100"),
    ("optimizer.token_budget=94", "optimizer.token_budget", "95", "94"),
    ("optimizer.schedule=cosine run.steps=3", "optimizer.warmup_steps", "3", "20"),
    ("rollout.group_size=1", "rollout.group_size", "1"),
    (f"{GAE} rollout.group_size=1", "rollout.group_size", "sampler.filter_groups"),
    (f"{PAIRS} rollout.group_size=1", "rollout.group_size", "2", "1"),
    (f"{VLLM} run.device=cuda:1", "run.device", "cuda:1"),
    (f"{VLLM} rollout.temperature=1e-6", "rollout.temperature", "1e-06"),
    (f"{VLLM} evaluation.temperature=2.1", "evaluation.temperature", "2.1"),
    (f"{SERVER} rollout.max_batch_sequences=31", "rollout.max_batch_sequences", "32", "31"),
    (f"{SERVER} rollout.server.urls=[ftp://a]", "rollout.server.urls", "ftp://a"),
    (f"{SERVER} rollout.server.urls=[http://a:1/x]", "rollout.server.urls", "http://a:1/x"),
    (f"{SERVER} rollout.server.urls=[http://a, http://A:80/]", "rollout.server.urls", "http://A:80/"),
    (f"{VLLM} rollout.sampling_mask=true rollout.top_p=0.9", "rollout.top_k", "rollout.sampling_mask"),
    ("rollout.sampling_mask=true", "rollout.sampling_mask", "rollout.top_p"),
    (f"{PAIRS} rollout.top_p=0.9 rollout.sampling_mask=true", "preference", "rollout.sampling_mask"),
    ("rollout.top_k=5 rollout.correction.mask=token", "rollout.sampling_mask", "correction"),
    ("rollout.top_p=0.9 rollout.max_mismatch_kl=1", "rollout.sampling_mask", "max_mismatch_kl"),
    ("loss.routing_replay=trainer model={path: m} optimizer.mini_batch_size=null", "loss.routing_replay", "trainer"),
    (f"loss.routing_replay=engine model={{path: m, tiny: null}} {SERVER}", "loss.routing_replay", "server"),
    ("algorithm=on_policy_distillation", "distillation.teacher"),
    ("distillation={teacher: x, beta: 1.5}", "distillation.beta", "1.5"),
    (f"{PAIRS} optimizer.token_budget=189", "optimizer.token_budget", "190", "189"),
    (f"{PAIRS} optimizer.mini_batch_size=1", "optimizer.mini_batch_size", "preference"),
    ("loss.routing_replay=engine model={path: m, tiny: null} advantage.segments.kind=chain", "loss.routing_replay"),
    ("loss.routing_replay=engine model={path: m, tiny: null} env.tools=[a:b]", "loss.routing_replay", "env"),
    ("numerics=matched rollout.min_p=0.1", "rollout.sampling_mask"),
    ("advantage.kind=magic", "advantage.kind", "module:function", "magic"),
    ("advantage.turn_gamma=0.9", "advantage.turn_gamma", "env"),
    ("advantage.kind=gae", "critic", "null"),
    (f"{GAE} critic.coef=0.5", "critic.coef", "critic.share_trunk"),
    (f"{GAE} critic.share_trunk=true critic.lr=1e-3", "critic.lr", "critic.share_trunk"),
    (f"{GAE} critic.share_trunk=true parallel.gpus=2 parallel.sequence=2", "critic.share_trunk", "parallel.sequence"),
    (f"{GAE} critic.warmup_steps=3 run.steps=3", "critic.warmup_steps", "3"),
    ("parallel.gpus=3 parallel.sequence=2", "parallel.sequence", "gpus=3", "2"),
    ("env={}", "env.kind", "env.tools"),
    ("env.tools=[search]", "env.tools", "module:name", "search"),
    ("advantage.segments.kind=chains", "advantage.segments.kind", "'tree'", "'chains'"),
    (f"{CHAIN} rollout.stop=[.]", "advantage.segments", "rollout.stop"),
    (f"{TREE} advantage.segments.tokens=64", "advantage.segments.tokens", "64"),
    (f"{TREE} advantage.segments.per_step=4 sampler.max_age=2", "sampler.max_age", "3", "2"),
    (f"{TREE} rollout.group_size=7", "rollout.group_size", "7"),
    ("run=3", "run", "'3'"),
    ("optimizer.lr=1 optimizer.lr.x=3", "optimizer.lr.x"),
    ("optimizer.lr", "optimizer.lr", "key=value"),
    ("=3", "=3", "key=value"),
    ("--optimizer.lr", "--optimizer.lr", "key=value"),
    ("run.name=[1", "run.name"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0])
def test_a_mistake_names_its_setting(tmp_path: Path, row: tuple[str, ...]) -> None:
    overrides, key, *parts = row
    with refused(key, parts=parts):
        load(tmp_path, overrides)


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
        assert resolve_objective(make_config(advantage=advantage, loss={"objective": name}))
    for name in ("gspo", "gmpo", "vespo"):
        with refused("loss.objective", parts=[f"advantage.{next(iter(advantage))}"]):
            resolve_objective(make_config(advantage=advantage, loss={"objective": name}))


def test_a_reference_has_a_use() -> None:
    for loss in ({"reference": "some/model"}, {"reference_ema": 0.9}):
        with refused(f"loss.{next(iter(loss))}"):
            resolve_objective(make_config(loss=loss))
        uses = {"advantage": {"kind": "gae"}, "critic": {}, "reward": {"kl": {"coef": 0.1}}}
        assert uses_reference(make_config(**uses, loss=loss))
