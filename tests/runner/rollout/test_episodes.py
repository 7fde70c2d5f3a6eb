"""Episodes: which tokens, whose they are, what happens to environments that misbehave, and what trains."""

from __future__ import annotations

import io
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np
import pytest
import talkers
import torch
from builders import backward, make_config, make_group, make_prompt, make_sample, pack_mini_batch
from contract import model_logprobs
from rich.console import Console
from talkers import CHATML, chat_tokenizer
from test_group_buffer import saved

from dapo_kernels import dapo_loss
from dapo_runner import http
from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import AdvantageConfig, Config, ModelConfig, RolloutLogConfig
from dapo_runner.data.dataset import render
from dapo_runner.engines.engine import BatchCall, Groups
from dapo_runner.engines.hf import HFEngine
from dapo_runner.environments.environment import Message
from dapo_runner.environments.template import CUT
from dapo_runner.environments.tools import MOST_CHARACTERS, TOOL_LOOP
from dapo_runner.logging.metrics import batch_metrics
from dapo_runner.logging.rollout_log import RolloutLog, read_step
from dapo_runner.logging.show import page
from dapo_runner.policy.model import Policy, load_model
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rewards.trl import from_trl
from dapo_runner.rollout.episodes import EpisodeError, EpisodeRunner
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.types import (
    Completion,
    Group,
    Prompt,
    RolloutRequest,
    Sample,
    SamplingParams,
    TruncatedSupport,
    Turn,
    VersionSpan,
    make_requests,
)

MODEL = ModelConfig(path="x", dtype="float32")
SAMPLING = SamplingParams(n=2, max_tokens=200)
WITH_TOOLS = "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}" + CHATML
SPOKEN = ("ab1", "ab2", "ab3")
COLUMN = "3 + 4 is\n#### 7"  # of the data set; the reference answer is 7


class Scripted:
    """An engine that samples the script's text of the turn, one token for each character, and keeps what it was asked.

    Each turn is sampled by another version of the weights. ``fails_at``: the turn that raises.
    """

    def __init__(self, tokenizer: Any, script: Sequence[str], fails_at: int = -1) -> None:
        self.tokenizer, self.fails_at, self.asked = tokenizer, fails_at, list[RolloutRequest]()
        self.script = [[*tokenizer.convert_tokens_to_ids(list(text)), tokenizer.eos_token_id] for text in script]

    def open_call(self, *_: Any) -> BatchCall:
        return BatchCall(self.generate)

    def generate(self, requests: Sequence[RolloutRequest]) -> Groups:
        self.asked += requests
        return [[self.sample(request)] for request in requests]

    def sample(self, request: RolloutRequest) -> Completion:
        turn = request.prompt.token_ids.count(self.tokenizer.convert_tokens_to_ids("<|im_start|>")) // 2 - 1
        if turn == self.fails_at:
            raise IndexError
        ids = torch.tensor(self.script[turn][: request.sampling.max_tokens])
        n, text = len(ids), self.tokenizer.decode(ids, skip_special_tokens=True)
        reason = "stop" if n == len(self.script[turn]) else "length"
        support, versions = TruncatedSupport.full(n), (VersionSpan(turn + 1, n),)
        return Completion(ids, -torch.ones(n), reason, text, support=support, versions=versions)


def config_of(kind: str | None, **env: Any) -> Config:
    """Return one with an environment of this module or of ``talkers``."""
    module = __name__ if kind in globals() else "talkers"
    return make_config(env={"kind": kind and f"{module}:{kind}", **env})


def prompt_of(tokenizer: Any, **row: Any) -> Prompt:
    messages = (("user", "go"),)
    text = render(messages, tokenizer, True, until=CUT)
    return Prompt("p", tuple(tokenizer(text)["input_ids"]), text, "7", messages=messages, row=row)


def run(
    kind: str | None,
    script: Sequence[str] = SPOKEN,
    sampling: SamplingParams = SAMPLING,
    template: str = CHATML,
    **env: Any,
) -> tuple[list[Completion], Scripted, EpisodeRunner]:
    tokenizer = chat_tokenizer(template)
    engine, runner = Scripted(tokenizer, script), EpisodeRunner(config_of(kind, **env), tokenizer)
    (found,) = runner(engine, make_requests([prompt_of(tokenizer, answer=COLUMN)], sampling), None)
    return found, engine, runner


def score(completions: list[Completion], **sections: Any) -> Any:
    prompt = replace(make_prompt(), token_ids=(1, 2, 3))
    (group,) = Scorer(make_config(**sections))([prompt], [completions])
    return group


def test_an_episode_is_the_conversation_in_the_tokens_that_were_sampled() -> None:
    (first, second), engine, runner = run("Talker")
    tokenizer, prompt = engine.tokenizer, prompt_of(engine.tokenizer)
    said = [("user", "go1+"), ("assistant", "ab1"), ("user", "1+"), ("assistant", "ab2"), ("user", "2+")]
    turns = [{"role": role, "content": content} for role, content in [*said, ("assistant", "ab3")]]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert f"{prompt.text}{first.transcript}\n" == text
    assert first.messages == (*said[1:], ("assistant", "ab3"))
    assert first.token_ids.tolist() != tokenizer(text[len(prompt.text) : -1])["input_ids"]  # `ab` would be one token
    whole = [*prompt.token_ids, *first.token_ids.tolist()]
    for request in engine.asked:
        asked = list(request.prompt.token_ids)
        assert asked == whole[: len(asked)]
        assert request.sampling.max_tokens == SAMPLING.max_tokens - len(asked) + len(prompt.token_ids)
    assert len({request.sampling.seed for request in engine.asked}) == 6
    assert first.environment.heard == list(SPOKEN)
    assert [turn.finish_reason for turn in first.policy_turns] == ["stop", "stop", "done"]
    assert [turn.reward for turn in first.turns] == [None, 0.25, None, 0.25, None, 1.25]
    assert first.environment_reward == 1.75
    assert first.text == second.text == "ab3"
    owned = [turn.role == "assistant" for turn in first.turns for _ in range(turn.start, turn.end)]
    assert first.loss_mask is not None
    assert first.support is not None
    assert first.loss_mask.tolist() == owned == (~first.logprobs.isnan()).tolist()
    assert [span.version for span in first.versions] == [1, 1, 2, 2, 3, 3]
    assert sum(span.length for span in first.versions) == len(first.support.counts) == first.length
    assert {name: n for name, n in runner.take_counts().items() if n} == {"episodes": 2, "turns": 6}
    runner.uncounted()(engine, make_requests([prompt], SAMPLING), None)
    assert not any(runner.take_counts().values())


def test_at_every_limit_an_episode_is_a_beginning_of_the_whole_one() -> None:
    whole = run("Talker")[0][0]
    for limit in range(1, whole.length + 2):
        sampling = replace(SAMPLING, n=1, max_tokens=limit)
        theirs = [turn for turn in whole.turns if turn.role == "environment" and turn.start <= limit]
        if any(limit <= turn.end - turn.start for turn in theirs):  # more than an episode may have
            with pytest.raises(EpisodeError):
                run("Talker", sampling=sampling)
            continue
        turn = next((turn for turn in whole.turns if turn.end >= limit), whole.turns[-1])
        end = min(limit, whole.length) if turn.role == "assistant" else turn.start
        ((found,), _, _) = run("Talker", sampling=sampling)
        assert found.token_ids.tolist() == whole.token_ids[:end].tolist()
        assert found.truncated == (limit < whole.length)
        complete = [turn for turn in whole.policy_turns if turn.end <= end]
        assert found.environment_reward == 1 + 0.25 * len(complete)


@pytest.mark.parametrize(
    ("env", "reasons"),
    [
        ({"max_turns": 2}, ["stop", "max_turns"]),
        ({"max_turns": 3}, ["stop", "stop", "done"]),
        ({"max_turn_tokens": 4}, ["stop", "stop", "done"]),
        ({"max_turn_tokens": 3}, ["length"]),
    ],
)
def test_limits_of_turns(env: dict[str, int], reasons: list[str]) -> None:
    (found, _), _, _ = run("Talker", **env)
    assert [turn.finish_reason for turn in found.policy_turns] == reasons
    assert found.truncated == (reasons[-1] == "length")


RELEASE = threading.Event()
WAYS: dict[str, tuple[str, str, Any]] = {  # counted as, in which method, and what it does or returns
    "fine": ("", "", None),
    "numbers of NumPy": ("", "step", lambda: ("more", np.float32(0.25), np.True_)),
    "messages": ("", "step", ([Message("user", "more")], None, False)),
    "no reward": ("", "get_reward", None),
    "a letter that the tokenizer does not know": ("", "step", ("é", None, False)),
    "raises at the start": ("raised", "reset", lambda: 1 / 0),
    "ends an iteration": ("raised", "step", lambda: next(iter(()))),
    "leaves": ("raised", "step", lambda: sys.exit(1)),
    "raises a deadline": ("raised", "step", lambda: (_ for _ in ()).throw(TimeoutError)),
    "raises in its reward": ("raised", "get_reward", lambda: 1 / 0),
    "does not close": ("raised", "close", None),
    "hangs": ("late", "step", RELEASE.wait),
    "hangs in its reward": ("late", "get_reward", RELEASE.wait),
    "a number at the start": ("invalid", "reset", 5),
    "a dictionary": ("invalid", "step", {"messages": ["hello"]}),
    "no answer": ("invalid", "step", (None, 0.0, False)),
    "infinite": ("invalid", "step", ("", float("inf"), True)),
    "no role": ("invalid", "step", ((Message("nobody", "hello"),), 0.0, False)),
    "a role of no template": ("invalid", "step", ((Message("tool", "hello"),), 0.0, False)),
    "a text for a reward": ("invalid", "get_reward", "0.5"),
    "a word for a count": ("invalid", "counts", {"resets": "many"}),
    "a count of ours": ("invalid", "counts", {"failed": 0}),
    "long": ("too_long", "step", ("x" * 10**7, 0.0, False)),
    "long at the start": ("too_long", "reset", "x" * 300),
}


class Odd(talkers.Talker):
    """Misbehaves as its row says. One that fails does not close either."""

    closed: ClassVar[Queue[str]] = Queue()
    way = "fine"

    def reset(self, row: Any) -> Any:
        assert not row["seen"]
        row["seen"].append(True)  # of no other episode
        self.way = row["way"]
        return self.act("reset", super().reset(row))

    def step(self, text: str) -> Any:
        return self.act("step", super().step(text))

    def get_reward(self) -> Any:
        return self.act("get_reward", 1.0)

    @property
    def counts(self) -> Any:
        return self.act("counts", {"resets": 1})

    def close(self) -> None:
        Odd.closed.put(self.way)
        if WAYS[self.way][0]:
            raise OSError

    def act(self, method: str, result: Any) -> Any:
        _, place, found = WAYS[self.way]
        return result if method != place else found() if callable(found) else found


def test_environments_that_misbehave_are_left_out_counted_and_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []  # loops of tools, one of which may block its loop
    monkeypatch.setattr(http, "replace_if_blocked", looked_at.append)
    tokenizer = chat_tokenizer(CHATML.replace("'judge'", "'tool'"))
    prompts = [replace(prompt_of(tokenizer, way=way, seen=[]), id=way) for way in WAYS]
    kinds = Counter(kind for kind, _, _ in WAYS.values() if kind)
    share = kinds.total() / len(WAYS)
    Odd.closed = Queue()
    RELEASE.clear()

    def play(max_failed: float) -> tuple[EpisodeRunner, Groups]:
        limits = {"max_turns": 3, "max_failed": max_failed, "timeout": 1.0}
        runner = EpisodeRunner(config_of("Odd", **limits), tokenizer)
        assert Odd.closed.get(timeout=30) == "fine"  # the one that was made to see its tools
        return runner, runner(Scripted(tokenizer, SPOKEN), make_requests(prompts, SAMPLING), None)

    runner, groups = play(share)
    assert {way: len(group) for way, group in zip(WAYS, groups, strict=True)} == {
        way: 0 if kind else 2 for way, (kind, _, _) in WAYS.items()
    }
    rewards = [group[0].environment_reward for group in groups if group]
    assert rewards == [1.75, 1.25, 1, 0.75, 1]
    counts = {name: n for name, n in runner.take_counts().items() if n}
    assert counts.pop("turns") > 0
    failed = {f"failed_{kind}": 2 * n for kind, n in kinds.items()}
    fine = 2 * (len(WAYS) - kinds.total())
    assert counts == {"episodes": 2 * len(WAYS), "failed": 2 * kinds.total(), **failed, "resets": fine}
    assert looked_at == [TOOL_LOOP] * (2 * kinds["late"])
    unknown, failed_first = runner.take_warnings()
    assert "é" in unknown
    assert "raises at the start" in failed_first
    assert all(f"{n} {kind.removeprefix('failed_')}" in failed_first for kind, n in failed.items())
    for ways in ([way for way in WAYS if "hangs" not in way], [way for way in WAYS if "hangs" in way]):
        assert Counter(Odd.closed.get(timeout=30) for _ in [*ways, *ways]) == Counter([*ways, *ways])
        assert Odd.closed.empty()
        RELEASE.set()
    with pytest.raises(EpisodeError):
        play(share - 1.5 / len(WAYS))  # one way that hangs does no longer


def test_an_engine_that_fails_closes_environments_once() -> None:
    tokenizer = chat_tokenizer()
    Odd.closed = Queue()
    runner = EpisodeRunner(config_of("Odd"), tokenizer)
    assert Odd.closed.get(timeout=30)
    engine, prompt = Scripted(tokenizer, SPOKEN, fails_at=1), prompt_of(tokenizer, way="fine", seen=[])
    with pytest.raises(IndexError):
        runner(engine, make_requests([prompt], replace(SAMPLING, n=3)), None)
    assert [Odd.closed.get(timeout=30) for _ in range(3)] == ["fine"] * 3
    assert Odd.closed.empty()


class Gated(talkers.Talker):
    """Waits in ``reset`` for two others, and keeps how many are there at most."""

    gate, never, inside = threading.Barrier(3), threading.Event(), list[int]()
    most = 0

    def reset(self, row: Any) -> str | None:
        self.inside.append(1)
        Gated.most = max(self.most, len(self.inside))
        self.never.wait(0.1 * (len(self.inside) == 3))  # in which a fourth would come
        self.gate.wait(30)
        self.inside.pop()
        return super().reset(row)


def test_calls_at_the_same_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo_runner.rollout.episodes.MOST_CALLS", 3)
    assert len(run("Gated", sampling=replace(SAMPLING, n=12))[0]) == 12
    assert Gated.most == 3


class Half(talkers.Silent):
    """Gives a reward in every other episode, and keeps the answer."""

    made = itertools.count()

    def reset(self, row: Mapping[str, Any]) -> str | None:
        self.answer = row["answer"]
        return super().reset(row)

    def get_reward(self) -> float | None:
        return 0.5 if next(self.made) % 2 else None


def test_the_reward_is_the_environments_or_a_rules_and_metrics_are_of_the_policys_tokens() -> None:
    group = score(run("Talker")[0], reward={"overlong": {"cache_length": 8}}, rollout={"max_response_tokens": 16})
    paid, figures, n = group.samples[0], batch_metrics([group], 0), run("Talker")[0][0].length
    assert (paid.base_reward, paid.correct, paid.length_penalty) == (1.75, True, -0.5)  # of 12 tokens, not of 80
    wanted = {"length": 12, "length_max": 12, "turns": 3, "environment_tokens": n - 12}
    assert {name: figures[f"batch/{name}"] for name in wanted} == wanted
    assert figures["batch/generation_prob"] == pytest.approx(np.exp(-1.0))
    tenths = replace(run("Talker")[0][0], turns=(run("Talker")[0][0].turns[-1]._replace(reward=0.1),) * 10)
    assert score([tenths]).samples[0].correct  # although they add up to less than 1
    ruled, wrong = score([run("Silent", ("x", "Answer: 7"))[0][0], run("Silent", ("Answer: 7", "x"))[0][0]]).samples
    assert (ruled.base_reward, ruled.verdict.extracted, wrong.base_reward) == (1.0, "7", -1.0)
    assert sorted(one.environment_reward for one in run("Half")[0]) == [0.0, 0.5]
    tokenizer = chat_tokenizer()
    runner, prompt = EpisodeRunner(config_of("Half"), tokenizer), prompt_of(tokenizer)
    requests = make_requests([prompt, replace(prompt, id="q")], replace(SAMPLING, n=1))
    found = [group[0].environment_reward for group in runner(Scripted(tokenizer, SPOKEN), requests, None)]
    assert sorted(found, key=str) == [0.5, None]
    for kind, wanted in (("Silent", 0.0), ("Trl", None)):  # a first turn that is truncated: a game has not begun
        (one,) = run(kind, ("much too long",), replace(SAMPLING, n=1, max_tokens=40), max_turn_tokens=4)[0]
        assert (one.truncated, one.environment_reward) == (True, wanted)


class Trl:
    def reset(self, answer: str) -> None:
        self.answer = answer


@pytest.mark.parametrize(("kind", "answer"), [("Half", "7"), ("Trl", COLUMN)])
def test_a_game_gets_the_reference_answer_and_an_environment_of_trl_the_column(kind: str, answer: str) -> None:
    assert run(kind)[0][0].environment.answer == answer


def test_an_example_of_trl_runs_from_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """`examples/scripts/grpo_2048.py` of TRL, commit f2cd577 (Apache License 2.0), unchanged."""
    for name in ("datasets", "peft", "trl"):  # of its trainer
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "environments"))
    tokenizer = chat_tokenizer(WITH_TOOLS)
    config = make_config(
        env={"kind": "grpo_2048:Game2048Env", "max_turns": 40},
        rollout={"max_response_tokens": 20_000},
        optimizer={"token_budget": 30_000},
        reward={"kind": "grpo_2048:reward_score", "overlong": {"soft_punishment": False}},
    )
    call = '<tool_call>{{"name": "move", "arguments": {{"direction": "{}"}}}}</tool_call>'
    script = [*map(call.format, ("up", "left", "down", "right")), *map(call.format, ("up", "left"))] * 4
    prompt, sampling = prompt_of(tokenizer), SamplingParams(n=2, max_tokens=20_000)
    engine: Any = Scripted(tokenizer, [*script, "I am done."])
    groups = EpisodeRunner(config, tokenizer)(engine, make_requests([prompt], sampling), None)
    (group,) = Scorer(config)([prompt], groups)
    for sample, completion in zip(group.samples, groups[0], strict=True):
        assert completion.transcript.startswith("score=0.0\n")  # the text of reset, behind the prompt's own
        assert len(completion.policy_turns) == 25
        boards = [turn.text for turn in completion.turns if turn.role == "environment"]
        assert len(set(boards)) > 10
        assert f"score={sample.base_reward}" in boards[-1]
        assert sample.base_reward == completion.environment.score > 0
        assert (sample.completion.environment, sample.completion.messages) == (None, ())
        (chat,) = from_trl(lambda completions, **_: completions, chat=True)([prompt], [completion], [{}])
        assert [message["role"] for message in chat] == ["assistant", "tool"] * 24 + ["assistant"]
        assert chat[0]["content"] == script[0]
        assert f"score={sample.base_reward}" in chat[-2]["content"]


def wide(n: int) -> str:
    """Return n letters.

    Args:
        n: Their number.
    """
    return "x" * n


@pytest.mark.parametrize("n", [150, 300, MOST_CHARACTERS, MOST_CHARACTERS + 1])
def test_the_length_of_a_result_that_the_policy_asks_for_fails_no_episode(n: int) -> None:
    script = [f'<tool_call>{{"name": "wide", "arguments": {{"n": {n}}}}}</tool_call>', "done"]
    (one, _), _, runner = run(None, script, template=WITH_TOOLS, tools=[f"{__name__}:wide"])
    counts = runner.take_counts()
    assert counts["failed"] == 0
    assert counts["tool_errors"] == (2 if n > MOST_CHARACTERS else 0)
    assert len(one.policy_turns) == (2 if n > MOST_CHARACTERS else 1)  # an error is short
    assert one.truncated == (n <= MOST_CHARACTERS)


def episode_of(token_ids: torch.Tensor, ends: Sequence[int], rewards: Sequence[float]) -> Sample:
    """An episode whose turns, up to ``ends``, are the environment's and the policy's in alternation."""
    spans, n, paid = itertools.pairwise([0, *ends]), len(token_ids), iter(rewards)
    turns = [
        Turn("assistant", *span, "", "", next(paid)) if number % 2 else Turn("environment", *span, "")
        for number, span in enumerate(spans)
    ]
    mask = torch.cat([torch.full((turn.end - turn.start,), turn.role == "assistant") for turn in turns])
    logprobs = torch.where(mask, -1.0 - 0.1 * torch.arange(n) % 0.7, torch.nan)
    completion = Completion(token_ids, logprobs, "stop", "", loss_mask=mask, turns=tuple(turns))
    return replace(make_sample(True), completion=completion, base_reward=sum(rewards))


@pytest.fixture
def episodes() -> tuple[Group, list[torch.Tensor], list[torch.Tensor]]:
    """Two episodes of three turns that begin alike, the tokens of their sequences, and their masks."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(3, 26, (n,), generator=generator) for n in (20, 17))
    second[:5] = first[:5]
    one = episode_of(first, (3, 7, 12, 14, 15, 20), (0.0, 0.0, 1.0))
    two = episode_of(second, (3, 8, 9, 13, 16, 17), (0.0, 0.0, -0.5))
    group = replace(make_group("RW"), samples=(one, two))
    prompt = torch.tensor(group.prompt.token_ids)
    masks = [torch.cat([prompt[1:] < 0, sample.completion.loss_mask]) for sample in (one, two)]
    return group, [torch.cat([prompt, ids]) for ids in (first, second)], masks


def test_the_gradient_is_that_of_the_policys_tokens(policy: Policy, model_folder: Path, episodes: Any) -> None:
    """Also where the prompt and the first turns of both episodes are computed once."""
    group, whole, masks = episodes
    sequences = make_sequences([group], AdvantageConfig(kind="group_mean"))
    assert not any(one.rollout_logprobs.isnan().any() for one in sequences)
    learner, computed = Learner(policy, make_config()), list[int]()
    policy.model.get_input_embeddings().register_forward_pre_hook(lambda _, given: computed.append(given[0].numel()))
    mini = pack_mini_batch(learner, sequences, 64)
    mini.on_policy = True
    backward(learner, mini, *mini.micro_batches)
    assert computed == [sum(map(len, masks)) - len(group.prompt.token_ids) - 5]
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    plain = load_model(model_folder, MODEL, torch.device("cpu"), "sdpa")
    logits = torch.cat([plain(input_ids=ids[None, :-1]).logits[0] for ids in whole])
    values = [torch.full((len(ids) - 1,), value) for ids, value in zip(whole, (0.75, -0.75), strict=True)]
    targets = torch.cat([ids[1:] for ids in whole])
    dapo_loss(logits, targets, None, torch.cat(values), mask=torch.cat(masks)).loss.backward()
    for name, parameter in plain.named_parameters():
        assert (found[name] - parameter.grad).norm() <= 1e-6 * parameter.grad.norm(), name


def test_entropy_and_correction_are_of_the_policys_tokens(policy: Policy, model_folder: Path, episodes: Any) -> None:
    group, whole, masks = episodes
    plain = load_model(model_folder, MODEL, torch.device("cpu"), "sdpa")
    learner = Learner(policy, make_config(rollout={"correction": {"weights": "sequence", "floor": 0.0, "cap": 1e9}}))
    (mini,) = learner.prepare(make_sequences([group], AdvantageConfig(kind="group_mean")))
    (batch,) = mini.micro_batches
    assert batch.importance_weights is not None
    order, entropies = batch.sequence_ids.tolist(), list[torch.Tensor]()
    assert batch.mask.tolist() == torch.cat([masks[index] for index in order]).tolist()
    weights = batch.importance_weights.split([len(masks[index]) for index in order])
    for index, weight in zip(order, weights, strict=True):
        ids, own = whole[index], masks[index]
        logprobs = plain(input_ids=ids[None, :-1]).logits[0].log_softmax(-1).detach()
        entropies.append(-(logprobs.exp() * logprobs).sum(-1)[own])
        sampled = group.samples[index].completion.logprobs
        expected = (logprobs.gather(1, ids[1:, None])[:, 0][own] - sampled[~sampled.isnan()]).double().sum().exp()
        torch.testing.assert_close(weight[own].double(), expected.expand(int(own.sum())), rtol=1e-3, atol=0)
        assert (weight[~own] == 1).all()
    figures = learner.update(mini, 1)
    assert figures["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-4)
    assert learner.step_metrics([mini], [figures])["rollout_unknown"] == 0.0


def test_what_is_saved_and_shown_has_the_turns(tmp_path: Path) -> None:
    group = replace(score(run("Talker")[0]), prompt=make_prompt())
    buffer = GroupBuffer(config_of("Talker"))
    buffer.groups = [group]
    (loaded,) = saved(buffer.state_dict())["buffer"]
    assert loaded.samples[0].completion.turns == group.samples[0].completion.turns
    RolloutLog(tmp_path, RolloutLogConfig(), -1).write(1, [group], make_sequences([group], AdvantageConfig()))
    step = read_step(tmp_path / "step_000001.jsonl.gz")
    record = step.groups[0]["samples"][0]
    assert record["tokens"] == 12
    assert [turn["role"] for turn in record["turns"][:2]] == ["environment", "assistant"]
    assert [turn["reward"] for turn in record["turns"][:2]] == [None, 0.25]
    out = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    page(step, out)
    shown = out.file.getvalue()
    assert "\x1b[90m<|im_start|>user" in shown
    assert "done +1.25" in shown
    assert "last advantage" in shown


class Fickle(talkers.Talker):
    """Ends after one, two or three turns."""

    def step(self, text: str) -> tuple[str, float | None, bool]:
        said, reward, is_over = super().step(text)
        return said, reward, is_over or len(text) % 2 == 1


def test_the_hf_engine_continues_the_cache_of_an_episode(engine: HFEngine) -> None:
    """Its log-probs are those of the whole episode read at once, and no token is computed twice."""
    engine.max_batch_sequences, engine.stop_ids = 30, list(range(1, 5))  # turns of unlike lengths
    computed = list[int]()
    embeddings = engine.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, given: computed.append(given[0].shape[1]))
    prompts = [Prompt(str(i), tuple(range(3, 6 + i)), "", "7") for i in range(3)]
    runner = EpisodeRunner(config_of("Fickle"), engine.tokenizer)
    groups = runner(engine, make_requests(prompts, replace(SAMPLING, n=12)), None)
    hook.remove()
    assert {*computed} == {1, 3, 7}  # prompts with their first message, then a token and the next message
    episodes = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    assert {len(one.policy_turns) for _, one in episodes} == {1, 2, 3}
    for prompt, one in episodes:
        own, expected = one.loss_mask, model_logprobs(engine.model, prompt, one)
        torch.testing.assert_close(one.logprobs[own], expected[own], atol=2e-4, rtol=1e-4)
