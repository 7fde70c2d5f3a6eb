"""Episodes: which tokens, whose they are, what happens to environments that misbehave, and what trains."""

from __future__ import annotations

import gc
import importlib.util
import io
import random
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import talkers
import torch
from builders import backward, make_config, make_group, make_prompt, make_sample, pack_mini_batch
from fake_server import FakeServer
from rich.console import Console
from served import open_engine
from talkers import CHATML, chat_tokenizer
from tokenizers import AddedToken
from transformers import AutoTokenizer

from dapo_kernels import dapo_loss
from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.learner import Learner, step_metrics
from dapo_runner.config import AdvantageConfig, Config, ConfigError, ModelConfig, RolloutLogConfig
from dapo_runner.data.dataset import render
from dapo_runner.environments.environment import Message
from dapo_runner.environments.template import CUT, TurnTemplate
from dapo_runner.environments.tools import MOST_CHARACTERS
from dapo_runner.logging.metrics import batch_metrics
from dapo_runner.logging.rollout_log import RolloutLog, read_step
from dapo_runner.logging.show import page
from dapo_runner.policy.model import Policy, load_model
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rollout.engine import BatchCall, Groups, RolloutEngine
from dapo_runner.rollout.episodes import EpisodeError, EpisodeRunner
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.types import DEFAULT_OPTIONS, CallOptions, Completion, Group, Prompt, Sample, SamplingParams, Turn

WAYS_OF_2048 = ("up", "left", "down", "right")
MODEL = ModelConfig(path="x", dtype="float32")
SAMPLING = SamplingParams(n=2, max_tokens=200)


class Scripted(RolloutEngine):
    """Samples what the script says for the length of the prompt's conversation, and keeps what it was asked."""

    def __init__(self, tokenizer: Any, script: Sequence[list[int]]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.asked: list[tuple[Prompt, SamplingParams]] = []

    @classmethod
    def load(cls, *_: Any) -> RolloutEngine:
        raise NotImplementedError

    def update_weights(self, weights: Any) -> None: ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Groups:
        assert not isinstance(sampling, SamplingParams)
        self.asked += zip(prompts, sampling, strict=True)
        opened = self.tokenizer.convert_tokens_to_ids("<|im_start|>")
        turns = [list(prompt.token_ids).count(opened) // 2 - 1 for prompt in prompts]
        found = []
        for turn, params in zip(turns, sampling, strict=True):
            ids = torch.tensor(self.script[turn][: params.max_tokens])
            reason = "length" if len(self.script[turn]) > params.max_tokens else "stop"
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            found.append([Completion(ids, -torch.ones(len(ids)), reason, text)])
        return found


def config_of(kind: str, **env: Any) -> Config:
    return make_config(env={"kind": f"talkers:{kind}", **env})


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(talkers.Slow, "log", [])
    monkeypatch.setattr(talkers.Slow, "made", 0)
    monkeypatch.setattr(talkers.Slow, "going", threading.Event())
    monkeypatch.setattr(talkers.Slow, "closed", threading.Semaphore(0))
    return talkers.Slow


def prompt_of(tokenizer: Any) -> Prompt:
    messages = (("user", "go"),)
    text = render(messages, tokenizer, True, until=CUT)
    return Prompt("p", tuple(tokenizer(text)["input_ids"]), text, "7", messages=messages)


def spell(tokenizer: Any, text: str) -> list[int]:
    """A token for each character, as a policy may sample them, and the end of a turn."""
    return [*tokenizer.convert_tokens_to_ids(list(text)), tokenizer.eos_token_id]


def run(
    kind: str, script: Sequence[str] = ("ab1", "ab2", "ab3"), sampling: SamplingParams = SAMPLING, **env: Any
) -> tuple[list[Completion], Scripted, EpisodeRunner]:
    tokenizer = chat_tokenizer()
    engine = Scripted(tokenizer, [spell(tokenizer, text) for text in script])
    runner = EpisodeRunner(config_of(kind, **env), tokenizer)
    (found,) = runner(engine, [prompt_of(tokenizer)], [sampling], DEFAULT_OPTIONS)
    return found, engine, runner


def test_an_episode_is_the_conversation_in_the_tokens_that_were_sampled() -> None:
    (first, second), engine, runner = run("Talker")
    tokenizer = engine.tokenizer
    said = [("user", "go1+"), ("assistant", "ab1"), ("user", "1+"), ("assistant", "ab2"), ("user", "2+")]
    turns = [{"role": role, "content": content} for role, content in [*said, ("assistant", "ab3")]]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    prompt = prompt_of(tokenizer)
    assert f"{prompt.text}{first.transcript}\n" == text
    assert first.token_ids.tolist() != tokenizer(text[len(prompt.text) : -1])["input_ids"]  # `ab` would be one token
    whole = [*prompt.token_ids, *first.token_ids.tolist()]
    for asked, params in engine.asked:
        assert list(asked.token_ids) == whole[: len(asked.token_ids)]
        assert params.max_tokens == SAMPLING.max_tokens - len(asked.token_ids) + len(prompt.token_ids)
    assert len({params.seed for _, params in engine.asked}) == 6
    assert [turn.role for turn in first.turns] == ["environment", "assistant"] * 3
    assert [turn.finish_reason for turn in first.policy_turns] == ["stop", "stop", "done"]
    assert [turn.reward for turn in first.policy_turns] == [0.25, 0.25, 1.25]
    assert first.environment_reward == 1.75
    assert first.text == second.text == "ab3"
    owned = [turn.role == "assistant" for turn in first.turns for _ in range(turn.start, turn.end)]
    assert first.loss_mask is not None
    assert first.loss_mask.tolist() == owned == (~first.logprobs.isnan()).tolist()
    assert first.n_sampled == 12
    counts = runner.take_counts()
    assert {name: n for name, n in counts.items() if n} == {"episodes": 2, "turns": 6}


def test_limits_end_an_episode() -> None:
    (found, _), _, _ = run("Talker", max_turns=2)
    assert [turn.finish_reason for turn in found.policy_turns] == ["stop", "max_turns"]
    assert not found.truncated
    (found, _), _, _ = run("Talker", ("ab1", "ab" * 20), max_turn_tokens=8)
    assert [turn.finish_reason for turn in found.policy_turns] == ["stop", "length"]
    assert found.truncated
    assert found.environment_reward == 1.25  # of its first turn, and of `finish`
    tokens = found.length + 3
    (short, _), _, _ = run("Talker", sampling=replace(SAMPLING, max_tokens=tokens), max_turn_tokens=8)
    assert short.truncated  # the second answer of the environment leaves no room
    assert short.length <= tokens


def test_a_turn_that_the_policy_did_not_close_is_closed_for_it() -> None:
    tokenizer = chat_tokenizer()
    template = TurnTemplate(tokenizer, chat=True, tools=None)
    messages = [Message("user", "b")]
    written = "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    closed = template.reply(messages, tokenizer.eos_token_id)
    assert tokenizer.decode(template.reply(messages, tokenizer.convert_tokens_to_ids("b"))) == written
    assert tokenizer.decode([tokenizer.eos_token_id, *closed]) == written


def test_a_template_that_changes_what_is_written_is_refused() -> None:
    trimmed = CHATML.replace("{{ m['content'] }}", "{% if loop.last %}now: {% endif %}{{ m['content'] }}")
    with pytest.raises(ConfigError, match=r"(?s)env.*now: A"):
        TurnTemplate(chat_tokenizer(trimmed), chat=True, tools=None)


TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "", "parameters": {"properties": {}}}}]
TEMPLATES = (
    Path(importlib.util.find_spec("trl").origin).parent / "chat_templates" if importlib.util.find_spec("trl") else None
)


@pytest.mark.skipif(TEMPLATES is None, reason="trl, which has copies of models' templates, is not installed")
@pytest.mark.parametrize(
    ("name", "takes_user", "takes_tool"),
    [
        ("qwen3", "think", True),  # drops thoughts once the user has said more, not after a tool
        ("qwen3_training", True, True),
        ("qwen3_5_think", "think", True),
        ("qwen3_5_nothink", "think", True),
        ("qwen2_5", True, True),
        ("glm4moe", "a thought", True),
        ("gptoss", "analysis", "tool call"),  # a tool's message names a call of the message before
        ("deepseekv3", "think", "think"),
        ("phi3", True, "tool"),  # leaves out messages of tools
        ("gemma", True, "alternate"),
        ("cohere2", True, "alternate"),
        ("llama3_1", True, True),
        ("llama3", True, "tools"),
    ],
)
def test_templates_of_models(name: str, takes_user: bool | str, takes_tool: bool | str) -> None:
    assert TEMPLATES is not None
    tokenizer = chat_tokenizer((TEMPLATES / f"{name}.jinja").read_text())
    tokenizer.bos_token = "<pad>"
    for tools, takes in ((None, takes_user), (TOOLS, takes_tool)):
        if takes is not True:
            with pytest.raises(ConfigError, match=f"(?s)env.*{takes}"):
                TurnTemplate(tokenizer, chat=True, tools=tools)
            continue
        template = TurnTemplate(tokenizer, chat=True, tools=tools)
        turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        message = Message("tool" if tools else "user", "three")
        options = {"tokenize": False, "tools": tools, "add_generation_prompt": True}
        whole = tokenizer.apply_chat_template([*turns, message._asdict()], **options)
        said = tokenizer.decode(template.reply([message], tokenizer.convert_tokens_to_ids("2")))
        assert whole.endswith(f"2{said}")
        assert "three" in said
        opened = tokenizer.decode(template.open_episode([("user", "1")], "?"))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "1?"}], **options).endswith(opened)


def test_a_template_that_leaves_tools_out_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": "multiply"}}]
    with pytest.raises(ConfigError, match="env"):
        TurnTemplate(chat_tokenizer(), chat=True, tools=tools)
    listed = chat_tokenizer("{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}" + CHATML)
    assert TurnTemplate(listed, chat=True, tools=tools).reply([Message("tool", "b")], listed.eos_token_id)


SMOLLM2 = Path(__file__).parents[3] / "models" / "smollm2-135m"  # docs/smollm2.md


@pytest.mark.parametrize("real", [False, True])
def test_no_text_of_an_environment_is_a_special_token(real: bool) -> None:
    if real and not SMOLLM2.exists():
        pytest.skip("models/smollm2-135m is not there")
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2) if real else chat_tokenizer()
    template, rng = TurnTemplate(tokenizer, chat=True, tools=None), random.Random(0)
    pieces = ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "|", "<pad>", "\n", "x", "\ud800", "\x00", "<unk>"]
    pieces += tokenizer.all_special_tokens
    plain = template.reply([Message("user", "x")], tokenizer.eos_token_id)
    special = [token for token in plain if template.is_special(token)]
    unknown = tokenizer.unk_token_id
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=8))
        ids = template.reply([Message("user", text)], tokenizer.eos_token_id)
        assert [token for token in ids if template.is_special(token) and token != unknown] == special, ascii(text)


def test_texts_that_are_joined_make_no_special_token() -> None:
    tokenizer = chat_tokenizer()
    template = TurnTemplate(tokenizer, chat=False, tools=None)
    ids = template.reply([Message("tool", "x<|im_"), Message("tool", "end|>y")], tokenizer.eos_token_id)
    assert tokenizer.eos_token_id not in ids


def test_a_token_is_special_though_the_tokenizer_has_no_name_for_it() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens([AddedToken("<end_of_turn>", special=True), AddedToken("<role>")])
    tokenizer.chat_template += "{# <role> #}"
    template = TurnTemplate(tokenizer, chat=True, tools=None)
    closing, role = tokenizer.convert_tokens_to_ids(["<end_of_turn>", "<role>"])
    assert template.is_special(closing)
    assert role not in template.reply([Message("user", "a<role>b")], tokenizer.eos_token_id)


class Eager(Scripted):
    """Samples each turn as soon as it is asked for, and fails at the second one."""

    def open_call(self, *_: Any) -> Any:
        call = BatchCall(self.generate)
        call.is_ready = lambda is_complete: call.n_open > 0  # type: ignore[method-assign]
        return call

    def generate(self, *arguments: Any) -> Groups:
        if self.asked:
            raise IndexError
        return super().generate(*arguments)


def test_a_late_environment_is_closed_once_when_its_call_has_returned(slow: Any) -> None:
    with pytest.raises(EpisodeError):
        run("Slow", sampling=replace(SAMPLING, n=1), timeout_seconds=0.2)
    assert slow.closed.acquire(blocking=False)  # of the first, which was made to see its tools
    assert slow.log == ["closed 1", "step 2"]
    slow.going.set()
    assert slow.closed.acquire(timeout=30)
    assert slow.log == ["closed 1", "step 2", "stepped 2", "closed 2"]


def test_an_engine_that_fails_closes_environments_behind_their_calls(slow: Any) -> None:
    tokenizer = chat_tokenizer()
    runner = EpisodeRunner(config_of("Slow", concurrency=1), tokenizer)
    made = slow.made  # one was made to see its tools, and closed
    assert slow.closed.acquire(blocking=False)
    slow.log.clear()
    with pytest.raises(IndexError):
        runner(Eager(tokenizer, [spell(tokenizer, "a")]), [prompt_of(tokenizer)], [SAMPLING], DEFAULT_OPTIONS)
    assert slow.closed.acquire(timeout=30)  # of the second episode, whose turn failed
    first, second = f" {made + 1}", f" {made + 2}"
    assert set(slow.log) - {f"step{first}"} == {f"closed{second}"}
    slow.going.set()
    assert slow.closed.acquire(timeout=30)
    assert slow.log[-2:] == [f"stepped{first}", f"closed{first}"]


def test_calls_at_the_same_time_are_limited() -> None:
    talkers.Counted.most = 0
    run("Counted", sampling=replace(SAMPLING, n=12), concurrency=3)
    assert talkers.Counted.most == 3


def test_counts_of_an_environment_are_numbers() -> None:
    _, _, runner = run("Counted", sampling=replace(SAMPLING, n=3), concurrency=3)
    assert runner.take_counts()["resets"] == 3
    with pytest.raises(EpisodeError, match=r"env\.max_failed.*counts"):
        run("Miscounted")


def test_environments_that_misbehave_are_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talkers.Failing, "made", 0)
    many = replace(SAMPLING, n=36)
    found, _, runner = run("Failing", sampling=many, max_failed=0.25, timeout_seconds=0.5)
    assert len(found) == 27
    assert all(one.environment_reward == 1.75 for one in found)
    counts = runner.take_counts()
    assert (counts["episodes"], counts["failed"], counts["failed_raised"], counts["failed_late"]) == (36, 9, 1, 1)
    assert (counts["failed_invalid"], counts["failed_too_long"]) == (6, 1)
    assert len(runner.take_warnings()) == 1
    monkeypatch.setattr(talkers.Failing, "made", 0)
    with pytest.raises(EpisodeError, match=r"env\.max_failed"):
        run("Failing", sampling=many, max_failed=0.2, timeout_seconds=0.5)


def score(completions: list[Completion], **sections: Any) -> Any:
    prompt = replace(make_prompt(), token_ids=(1, 2, 3))
    (group,) = Scorer(make_config(**sections))([prompt], [completions])
    return group


def test_the_reward_is_the_environments_or_a_rules() -> None:
    overlong = {"overlong": {"cache_length": 8, "max_length": 16}}
    paid = score(run("Talker")[0], reward=overlong).samples[0]
    assert (paid.base_reward, paid.correct, paid.length_penalty) == (1.75, True, -0.5)  # of 12 tokens, not of 80
    ruled, wrong = score([run("Silent", ("x", "Answer: 7"))[0][0], run("Silent", ("Answer: 7", "x"))[0][0]]).samples
    assert (ruled.base_reward, ruled.verdict.extracted, wrong.base_reward) == (1.0, "7", -1.0)


def test_an_example_of_trl_runs_from_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """`examples/scripts/grpo_2048.py` of TRL, commit f2cd577 (Apache License 2.0), unchanged."""
    for name in ("datasets", "peft", "trl"):  # of its trainer
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "environments"))
    tokenizer = chat_tokenizer("{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}" + CHATML)
    config = make_config(
        env={"kind": "grpo_2048:Game2048Env", "max_turns": 40},
        rollout={"max_response_tokens": 20_000},
        optimizer={"token_budget": 30_000},
        reward={"kind": "grpo_2048:reward_score", "overlong": {"soft_punishment": False}},
    )
    calls = [
        f'<tool_call>{{"name": "move", "arguments": {{"direction": "{way}"}}}}</tool_call>' for way in WAYS_OF_2048
    ]
    engine = Scripted(tokenizer, [spell(tokenizer, text) for text in [*calls * 6, "I am done."]])
    prompt, sampling = prompt_of(tokenizer), SamplingParams(n=2, max_tokens=20_000)
    groups = EpisodeRunner(config, tokenizer)(engine, [prompt], [sampling], DEFAULT_OPTIONS)
    (group,) = Scorer(config)([prompt], groups)
    for sample, completion in zip(group.samples, groups[0], strict=True):
        assert completion.transcript.startswith("score=0.0\n")  # the text of reset, behind the prompt's own
        assert len(completion.policy_turns) == 25
        boards = [turn.text for turn in completion.turns if turn.role == "environment"]
        assert len(set(boards)) > 10
        assert sample.base_reward == completion.environment.score > 0
        assert f"score={sample.base_reward}" in boards[-1]
        assert sample.completion.environment is None


class Wide:
    """An environment in TRL's convention."""

    def reset(self) -> None: ...

    def wide(self, n: int) -> str:
        """Return n letters.

        Args:
            n: Their number.
        """
        return "x" * n


@pytest.mark.parametrize("n", [150, 300, 4000, 5000])
def test_the_length_of_a_result_that_the_policy_asks_for_fails_no_episode(n: int) -> None:
    tokenizer = chat_tokenizer("{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}" + CHATML)
    calls = [f'<tool_call>{{"name": "wide", "arguments": {{"n": {n}}}}}</tool_call>', "done"]
    engine = Scripted(tokenizer, [spell(tokenizer, text) for text in calls])
    runner = EpisodeRunner(make_config(env={"kind": f"{__name__}:Wide"}), tokenizer)
    ((one, _),) = runner(engine, [prompt_of(tokenizer)], [SAMPLING], DEFAULT_OPTIONS)
    assert runner.take_counts()["failed"] == 0
    is_error = n > MOST_CHARACTERS  # which is short
    assert len(one.policy_turns) == (2 if is_error else 1)
    assert one.length <= SAMPLING.max_tokens


def test_metrics_count_what_the_policy_sampled() -> None:
    figures = batch_metrics([score(run("Talker")[0])])
    length = run("Talker")[0][0].length
    wanted = {"length": 12, "length_max": 12, "turns": 3, "environment_tokens": length - 12}
    assert {name: figures[f"batch/{name}"] for name in wanted} == wanted
    assert figures["batch/generation_prob"] == pytest.approx(torch.tensor(-1.0).exp().item())


def episode_of(token_ids: torch.Tensor, spans: Sequence[tuple[int, int]], reward: float) -> Sample:
    """An episode whose turns are the environment's and the policy's in alternation."""
    n = len(token_ids)
    turns = tuple(Turn("assistant" if number % 2 else "environment", *span, "") for number, span in enumerate(spans))
    mask = torch.zeros(n, dtype=torch.bool)
    for start, end in spans[1::2]:
        mask[start:end] = True
    logprobs = torch.where(mask, -1.0 - 0.1 * torch.arange(n) % 0.7, torch.nan)
    completion = Completion(token_ids, logprobs, "stop", "", loss_mask=mask, turns=turns)
    return replace(make_sample(True), completion=completion, base_reward=reward)


@pytest.fixture
def episodes() -> tuple[Group, list[torch.Tensor]]:
    """Two episodes of three turns that begin alike, and their masks by hand."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(3, 26, (n,), generator=generator) for n in (20, 17))
    second[:5] = first[:5]
    one = episode_of(first, [(0, 3), (3, 7), (7, 12), (12, 14), (14, 15), (15, 20)], 1.0)
    two = episode_of(second, [(0, 3), (3, 8), (8, 9), (9, 13), (13, 16), (16, 17)], -0.5)
    group = replace(make_group("RW"), samples=(one, two))
    own = [[3, 4, 5, 6, 12, 13, 15, 16, 17, 18, 19], [3, 4, 5, 6, 7, 9, 10, 11, 12, 16]]
    n_prompt = len(group.prompt.token_ids)
    masks = [torch.zeros(n_prompt + n - 1, dtype=torch.bool) for n in (20, 17)]
    for mask, places in zip(masks, own, strict=True):
        mask[torch.tensor(places) + n_prompt - 1] = True
    return group, masks


def test_the_gradient_is_that_of_the_policys_tokens(
    policy: Policy, model_folder: Path, episodes: tuple[Group, list[torch.Tensor]]
) -> None:
    """Also where the prompt and the first turns of both episodes are computed once."""
    group, masks = episodes
    sequences = make_sequences([group], AdvantageConfig(kind="group_mean"))
    assert not any(one.rollout_logprobs.isnan().any() for one in sequences)
    learner, computed = Learner(policy, make_config()), list[int]()
    policy.model.get_input_embeddings().register_forward_pre_hook(lambda _, given: computed.append(given[0].numel()))
    mini = pack_mini_batch(learner, sequences, 64)
    mini.on_policy = True
    backward(learner, mini, *mini.micro_batches)
    n_prompt = len(group.prompt.token_ids)
    assert computed == [sum(map(len, masks)) - n_prompt - 5]
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    plain = load_model(model_folder, MODEL, torch.device("cpu"), "sdpa")
    whole = [torch.cat([torch.tensor(group.prompt.token_ids), one.completion.token_ids]) for one in group.samples]
    logits = torch.cat([plain(input_ids=ids[None, :-1]).logits[0] for ids in whole])
    advantages = torch.cat(
        [torch.full((len(ids) - 1,), value) for ids, value in zip(whole, (0.75, -0.75), strict=True)]
    )
    targets, mask = torch.cat([ids[1:] for ids in whole]), torch.cat(masks)
    dapo_loss(logits, targets, None, advantages, mask=mask).loss.backward()
    for name, parameter in plain.named_parameters():
        assert (found[name] - parameter.grad).norm() <= 1e-6 * parameter.grad.norm(), name


def test_entropy_and_correction_are_of_the_policys_tokens(
    policy: Policy, model_folder: Path, episodes: tuple[Group, list[torch.Tensor]]
) -> None:
    group, masks = episodes
    plain = load_model(model_folder, MODEL, torch.device("cpu"), "sdpa")
    config = make_config(rollout={"correction": {"weights": "sequence", "floor": 0.0, "cap": 1e9}})
    learner = Learner(policy, config)
    (mini,) = learner.prepare(make_sequences([group], AdvantageConfig(kind="group_mean")))
    (batch,) = mini.micro_batches
    order = batch.sequence_ids.tolist()
    mask = torch.cat([masks[index] for index in order])
    assert batch.mask.tolist() == mask.tolist()
    logits = [
        plain(input_ids=torch.cat([torch.tensor(group.prompt.token_ids), one.completion.token_ids])[None]).logits[0]
        for one in (group.samples[index] for index in order)
    ]
    logprobs = torch.cat([row[:-1].log_softmax(-1) for row in logits]).detach()
    engine = [group.samples[index].completion.logprobs for index in order]
    starts = [0, len(masks[order[0]])]
    for start, index, sampled in zip(starts, order, engine, strict=True):
        own = masks[index]
        rows, targets = logprobs[start : start + len(own)], batch.target_ids[start : start + len(own)]
        learned = rows.gather(1, targets[:, None])[:, 0][own]
        weight = (learned - sampled[~sampled.isnan()]).double().sum().exp()
        assert batch.importance_weights is not None
        weights = batch.importance_weights[start : start + len(own)]
        torch.testing.assert_close(weights[own].double(), weight.expand(int(own.sum())), rtol=1e-3, atol=0)
        assert (weights[~own] == 1).all()
    entropy = -(logprobs.exp() * logprobs).sum(-1)[mask].mean()
    figures = learner.update(mini, 1)
    assert figures["entropy"] == pytest.approx(float(entropy), rel=1e-4)
    assert step_metrics([mini], [figures], learner.world)["rollout_unknown"] == 0.0


def test_advantages_of_turns_are_those_written_out() -> None:
    rewards, gamma = [[1.0, 0.0, 2.0], [0.0, 3.0]], 0.5
    samples = []
    for row in rewards:
        turns = tuple(
            turn
            for k, reward in enumerate(row)
            for turn in (
                Turn("environment", 3 * k, 3 * k + 1, ""),
                Turn("assistant", 3 * k + 1, 3 * k + 3, "", "", reward),
            )
        )
        n = 3 * len(row)
        mask = torch.tensor([place % 3 > 0 for place in range(n)])
        completion = Completion(torch.arange(n), torch.zeros(n), "stop", "", loss_mask=mask, turns=turns)
        samples.append(replace(make_sample(True), completion=completion, base_reward=sum(row), length_penalty=-0.5))
    group = replace(make_group("R"), samples=tuple(samples))
    first, second = make_sequences([group], AdvantageConfig(kind="group_mean", turn_gamma=gamma))
    # Returns: 1 + 0.5·(0 + 0.5·1.5) = 1.375, 0.75, 1.5 and 0 + 0.5·2.5 = 1.25, 2.5; the penalty is the last turn's.
    n = len(group.prompt.token_ids)
    assert first.advantages[n:][[1, 2, 4, 5, 7, 8]].tolist() == [0.0625, 0.0625, -0.875, -0.875, 0.0, 0.0]
    assert second.advantages[n:][[1, 2, 4, 5]].tolist() == [-0.0625, -0.0625, 0.875, 0.875]
    config = config_of("Talker")
    with pytest.raises(ConfigError, match=r"advantage\.turn_gamma"):
        make_config(advantage={"turn_gamma": 0.5})
    assert config.advantage.turn_gamma is None


def test_what_is_saved_and_shown_has_the_turns(tmp_path: Path) -> None:
    group = replace(score(run("Talker")[0]), prompt=make_prompt())
    buffer = GroupBuffer(config_of("Talker"))
    buffer.groups = [group]
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    (loaded,) = torch.load(file, weights_only=True)["buffer"]
    assert loaded.samples[0].completion.turns == group.samples[0].completion.turns
    RolloutLog(tmp_path, RolloutLogConfig(), -1).write(1, [group], make_sequences([group], AdvantageConfig()))
    saved = read_step(tmp_path / "step_000001.jsonl.gz")
    record = saved.groups[0]["samples"][0]
    assert record["tokens"] == 12
    assert [(turn["role"], turn["reward"]) for turn in record["turns"][:2]] == [
        ("environment", None),
        ("assistant", 0.25),
    ]
    out = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    out.input = lambda *_: "q"  # type: ignore[method-assign]
    page(saved, out)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[90m<|im_start|>user" in shown
    assert "done +1.25" in shown


def test_the_hf_engine_continues_the_cache_of_an_episode(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log-probs are those of the whole episode read at once; no token is computed twice, no cache kept in vain."""
    engine = HFEngine(load_model(model_folder, MODEL, torch.device("cpu"), "sdpa"), make_tokenizer(), 30)
    runner = EpisodeRunner(config_of("Talker"), engine.tokenizer)
    monkeypatch.setattr(engine, "stop_ids", list(range(1, 5)))  # turns of unlike lengths
    computed: list[int] = []
    forward = engine.model.forward
    monkeypatch.setattr(
        engine.model, "forward", lambda *_, **given: computed.append(given["input_ids"].shape[1]) or forward(**given)
    )
    step, decode = talkers.Talker.step, engine._decode

    def ends(self: Any, text: str) -> Any:
        said, reward, _ = step(self, text)
        return said, reward, len(text) % 2 == 1 or len(self.heard) == 3

    monkeypatch.setattr(talkers.Talker, "step", ends)
    held: list[int] = []  # caches of episodes that have ended, when a turn begins

    def count_caches(rows: Any, keep: bool) -> None:
        held.append(sum(type(one).__name__ == "_Past" for one in gc.get_objects()) - len(rows))
        decode(rows, keep=keep)

    monkeypatch.setattr(engine, "_decode", count_caches)
    prompts = [Prompt(str(i), tuple(range(3, 6 + i)), "", "7") for i in range(3)]
    groups = runner(engine, prompts, [replace(SAMPLING, n=12, index=index) for index in range(3)], DEFAULT_OPTIONS)
    assert max(computed) == 5 + 2  # the longest prompt and its first message
    assert len(held) > 3
    assert max(held[2:]) <= 0  # the first turns are sampled in two batches
    episodes = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    assert {len(one.policy_turns) for _, one in episodes} == {1, 2, 3}
    for prompt, one in episodes:
        ids = torch.tensor([*prompt.token_ids, *one.token_ids.tolist()])
        with torch.no_grad():
            logprobs = forward(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        own, expected = one.loss_mask, logprobs[len(prompt.token_ids) - 1 :]
        torch.testing.assert_close(one.logprobs[own], expected[own], atol=2e-4, rtol=1e-4)


def test_servers_answer_turns_as_they_come(model_folder: Path, servers: list[FakeServer], tmp_path: Path) -> None:
    engine = open_engine(model_folder, servers, tmp_path)
    tokenizer = make_tokenizer()
    runner = EpisodeRunner(config_of("Talker", max_turn_tokens=5), tokenizer)
    prompts = [Prompt(str(i), (3 + i, 4), "", "7") for i in range(6)]
    sampling = [replace(SAMPLING, max_tokens=40, index=index) for index in range(6)]
    try:
        groups = runner(engine, prompts, sampling, DEFAULT_OPTIONS)
        assert [len(group) for group in groups] == [2] * 6
        for one in (one for group in groups for one in group):
            assert sum(span.length for span in one.versions) == one.length
            assert {span.version for span in one.versions} == {1}
        again = runner(engine, prompts, sampling, DEFAULT_OPTIONS)
        assert [[one.token_ids.tolist() for one in group] for group in again] == [
            [one.token_ids.tolist() for one in group] for group in groups
        ]
        assert min(server.seen("/inference/v1/generate") for server in servers) > 5
    finally:
        engine.close()
    for server in servers:
        server.kill()
