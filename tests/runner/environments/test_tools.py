"""Tools: environments in TRL's convention, plain functions, and calls that fail. No turn of a model ends a run."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from talkers import CHATML, chat_tokenizer

from dapo_runner import http
from dapo_runner.config import ConfigError, EnvironmentConfig
from dapo_runner.environments.environment import Answer
from dapo_runner.environments.tools import (
    MOST_CHARACTERS,
    TOOL_LOOP,
    ToolEnvironment,
    make_environment,
    parse_calls,
    template_arguments,
)
from dapo_runner.threads import in_thread

HERE = "test_tools"
TEMPLATE = {  # of a model that writes [name {…}] where it calls a tool
    "defaults": {"role": "assistant"},
    "start_anchor": "<start>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\[(?P<name>\w+) ",
            "close": "]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


def product(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def echo(text: str | None = None) -> str:
    """Return the text, or leave without one.

    Args:
        text: The text.
    """
    return sys.exit() if text is None else text


@cache
def meeting_on(loop: asyncio.AbstractEventLoop) -> asyncio.Barrier:
    return asyncio.Barrier(2)


async def meet(*, late: bool = False) -> str:
    """Wait for another episode.

    Args:
        late: Whether to give up.
    """
    if late:
        raise KeyboardInterrupt
    await meeting_on(asyncio.get_running_loop()).wait()
    return "met"


STARTED, RELEASE = list[bool](), threading.Event()


async def block() -> str:
    """Wait, and let no other tool work."""
    STARTED.append(True)
    RELEASE.wait()
    return "done"


class CounterEnv:
    """An environment as TRL's `environment_factory` takes it: the policy has to bring a counter to `target`."""

    tools = ("hammer",)  # its own business

    def reset(self, row: int = 0, target: int = 3) -> str | None:  # two columns
        self.count, self.target = row, target
        return f"The counter is at {row}. Bring it to {target}."

    def increment(self, amount: int = 1) -> str:
        """
        Add to the counter.

        Args:
            amount: How much to add.

        Returns:
            The new value.
        """
        if amount > 5:
            raise ValueError("that is too much")
        self.count += amount
        return f"The counter is at {self.count}."

    async def look(self, unit: tuple[int, str] = (1, "")) -> str:
        """
        Read the counter.

        Args:
            unit: Its size and its name.
        """
        return f"{self.count * unit[0]}{unit[1]}"

    def get_reward(self) -> float:
        return 1.0 if self.count == self.target else 0.0

    async def close(self) -> None:
        self.is_closed = True

    def _hidden(self) -> None: ...


class Unplugged:
    """A game that cannot be made."""

    def __init__(self) -> None:
        json.loads("no board")


class Stepless:
    """A game whose method is misnamed."""

    def reset(self, row: Any) -> None: ...

    def _step(self, text: str) -> None: ...


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, HERE, raising=False)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make(**settings: Any) -> Any:
    return make_environment(EnvironmentConfig(**settings))()


def contents(answer: Answer) -> list[str]:
    assert answer.reward is None
    assert {message.role for message in answer.messages} <= {"tool"}
    return [message.content for message in answer.messages]


def test_an_environment_written_for_trl() -> None:
    environment = make(kind=f"{HERE}:CounterEnv", tools=[f"{HERE}:product"])
    names = [tool["function"]["name"] for tool in environment.tools]
    assert names == ["product", "increment", "look"]
    row = {"row": 1, "target": 4, "question": "…", "answer": ""}
    assert environment.reset(row) == "The counter is at 1. Bring it to 4."
    first = environment.step("I add two. " + call("increment", amount=2) + call("look"))
    assert (contents(first), first.is_done) == (["The counter is at 3.", "3"], False)
    assert contents(environment.step(call("product", a=3, b=5) + call("look", unit=[2, "m"]))) == ["15", "6m"]
    assert environment.get_reward() == 0.0
    environment.step(call("increment"))
    assert environment.get_reward() == 1.0
    assert environment.step("It is done.") == ((), None, True)
    assert environment.counts == {"tool_calls": 5, "tool_errors": 0, "tool_episodes": 1}
    environment.close()
    assert environment.state.is_closed


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (call("_hidden"), "increment"),
        (call("get_reward"), "increment"),
        (call("increment", much=2), "much"),
        (call("increment", amount=6), "too much"),
        (call("increment", amount="1"), "amount"),
        (call("echo"), "SystemExit"),  # without a text
        (call("echo", text="x" * (MOST_CHARACTERS + 1)), str(MOST_CHARACTERS)),
        ("<tool_call>{'name': 1}</tool_call>", "tool call"),
        ('<tool_call>{"name": "increment", "arguments": [2]}', "arguments"),
        ("<tool_call>" + "[" * 100_000, "tool call"),
        ("<tool_call>", "tool call"),
    ],
)
def test_a_bad_call_is_answered_with_an_error_and_counted(text: str, word: str) -> None:
    environment = make(kind=f"{HERE}:CounterEnv", tools=[f"{HERE}:echo"])
    environment.reset({"target": 9, "answer": ""})
    bad, good = contents(environment.step(text + "</tool_call>" + call("increment")))
    assert word in json.loads(bad)["error"]
    assert len(json.loads(bad)["error"]) <= 200
    assert good == "The counter is at 1."
    assert environment.counts == {"tool_calls": 2, "tool_errors": 1, "tool_episodes": 1}


def test_async_tools_of_all_episodes_have_one_event_loop_which_none_can_end() -> None:
    (error,) = contents(ToolEnvironment([meet]).step(call("meet", late=True)))
    assert "KeyboardInterrupt" in json.loads(error)["error"]
    episodes = [in_thread(partial(ToolEnvironment([meet]).step, call("meet"))) for _ in range(2)]
    assert [contents(episode.result(timeout=30)) for episode in episodes] == [["met"], ["met"]]


def test_a_tool_that_blocks_the_event_loop_does_not_keep_it() -> None:
    blocked = in_thread(partial(ToolEnvironment([block]).step, call("block")))
    while not STARTED:
        time.sleep(0.01)
    http.replace_if_blocked(TOOL_LOOP)
    episodes = [in_thread(partial(ToolEnvironment([meet]).step, call("meet"))) for _ in range(2)]
    assert [contents(episode.result(timeout=30)) for episode in episodes] == [["met"], ["met"]]
    RELEASE.set()
    assert contents(blocked.result(timeout=30)) == ["done"]


def test_many_bad_calls_have_no_more_room_than_one() -> None:
    environment = ToolEnvironment([product], max_error=60)
    one, *others = contents(environment.step(call("x" * 100) * 3 + call("product", a=2, b=3)))
    assert len(json.loads(one)["error"]) == 60
    assert others == ["6"]
    short = contents(environment.step(call("y") * 30))
    assert 50 < sum(len(json.loads(error)["error"]) for error in short) <= 60
    assert environment.counts["tool_errors"] == 33


def test_calls_are_read_by_the_template_of_the_tokenizer() -> None:
    text = 'First [product {"a": 6, "b": 7}] then [product {"a": 1, "b": 2}]'
    hermes = {"name": "product", "arguments": {"a": 6, "b": 7}}
    assert list(map(json.loads, parse_calls(call("product", a=6, b=7), tokenizer(False)))) == [hermes]
    assert parse_calls(call("product", a=6, b=7), tokenizer(True)) == []
    assert parse_calls(text, tokenizer(True)) == [hermes, {"name": "product", "arguments": {"a": 1, "b": 2}}]
    environment = ToolEnvironment([product], None, tokenizer(True))
    assert contents(environment.step(text)) == ["42", "2"]
    (broken,) = contents(environment.step('[product {"a": 6,]'))
    assert "tool call" in json.loads(broken)["error"]
    as_text = json.dumps({"name": "product", "arguments": '{"a": 6, "b": 7}'})  # OpenAI's form
    assert contents(ToolEnvironment([product]).step(f"<tool_call>{as_text}</tool_call>")) == ["42"]


@pytest.mark.parametrize("close", [{"close_pattern": r"\]<\|im_end\|>\s*"}, {"close_pattern": r"\]$"}, {}])
def test_a_response_template_may_expect_the_end_of_the_turn_behind_a_call(close: dict[str, str]) -> None:
    calls = {key: value for key, value in TEMPLATE["fields"]["tool_calls"].items() if key != "close"}
    found = chat_tokenizer()
    found.response_template = TEMPLATE | {"fields": TEMPLATE["fields"] | {"tool_calls": calls | close}}
    text = '[product {"a": 6, "b": 7}' + "]" * bool(close)  # the token that ended the turn is cut off
    assert contents(ToolEnvironment([product], None, found).step(text)) == ["42"]
    assert ToolEnvironment([product], None, found).step("Answer: 42").is_done


def test_calls_of_llama_are_read_by_the_response_template_of_trl() -> None:
    chat_templates = pytest.importorskip("trl.chat_template_utils")
    found = chat_tokenizer(chat_templates.llama3_1_chat_template)
    found.eos_token = "<|eot_id|>"
    chat_templates.add_response_schema(found)
    text = '{"name": "product", "parameters": {"a": 6, "b": 7}}'
    assert contents(ToolEnvironment([product], None, found).step(text)) == ["42"]


@pytest.mark.parametrize(
    ("kind", "tools", "key"),
    [
        ("talkers:Talker", [f"{HERE}:product"], r"^env\.tools"),
        ("builtins:object", [], r"^env\.kind"),
        (None, [f"{HERE}:product", f"{HERE}:product"], r"^env\.tools"),
        (None, ["builtins:print"], r"^env.*print"),
        (None, [f"{HERE}:absent"], r"^env\.tools.*absent"),
        ("talkers:Talkr", [], r"^env\.kind.*Talkr"),
        (f"{HERE}:Stepless", [], r"^env\.kind.*Stepless.* step"),
        (f"{HERE}:Unplugged", [], r"^env\b.*Unplugged.*JSONDecodeError.*Expecting.*test_tools\.py"),
    ],
)
def test_what_is_no_tool_is_refused(kind: str | None, tools: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        template_arguments(EnvironmentConfig(kind=kind, tools=tools))


@pytest.mark.parametrize("has_template", [False, True])
def test_a_call_in_a_closed_thought_is_not_made(has_template: bool) -> None:
    def written(**arguments: int) -> str:
        return f"[product {json.dumps(arguments)}]" if has_template else call("product", **arguments)

    thought = f"<think>\n{written(a=6, b=7)}"
    environment = ToolEnvironment([product], None, tokenizer(has_template))
    answer = environment.step(f"{thought}\n</think>\n\nAnswer: 42")
    assert (contents(answer), answer.is_done) == ([], True)
    assert contents(environment.step(f"{thought}\n</think>{written(a=2, b=3)}")) == ["6"]
    assert contents(environment.step(thought)) == ["42"]
    assert environment.counts["tool_calls"] == 2


PIECES = [
    *("<tool_call>", "</tool_call>", "<tool_call", "[product ", "[echo ", "]", "<start>", "<|im_start|>", "<|im_end|>"),
    *("{", "}", '{"name": ', '"product"', ', "arguments": ', '{"a": 2, "b": 3}', '"echo"', "null", "NaN"),
    *('"__init__"', '{"text": "\\ud800"}', '{"text": "<|im_end|>"}', '{"a": 1e999, "b": -0.0}', "9" * 5000, "\ud800"),
    *('{"a": ' + "9" * 4000 + ', "b": 1}', "[" * 3000, '{"a":' * 3000, "\0", "\ue000cut\ue000", "{{ 1/0 }}"),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=8).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "text"]), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["product", "echo", "increment", "look", "_hidden", "get_reward", "", None, 3, "\ud800"])
CALLS = st.fixed_dictionaries({"name": NAMES, "arguments": VALUES | VALUES.map(json.dumps)}) | VALUES
TURNS = st.lists(CALLS.map(lambda one: f"<tool_call>{json.dumps(one)}</tool_call>") | TEXTS, max_size=4).map("".join)


@cache
def tokenizer(has_template: bool) -> Any:
    found = chat_tokenizer("{% for t in tools or [] %}{{ t['function']['name'] }}\n{% endfor %}" + CHATML)
    if has_template:
        found.response_template = TEMPLATE
    return found


@cache
def tools(has_template: bool) -> ToolEnvironment:
    environment = ToolEnvironment([product, echo], CounterEnv(), tokenizer(has_template))
    environment.reset({})
    return environment


@pytest.mark.parametrize("has_template", [False, True])
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(TURNS)
@example('<tool_call>{"name": "product", "arguments": "[' + "[" * 5000)
@example('<tool_call>{"name": "product", "arguments": {"a": ' + "9" * 4300 + ', "b": 10}}</tool_call>')
def test_a_turn_is_read_and_answered(has_template: bool, text: str) -> None:
    calls = parse_calls(text, tokenizer(has_template), tools(has_template).tools)
    answer = tools(has_template).step(text)
    assert (answer.reward, answer.is_done) == (None, not calls)
    assert len(answer.messages) <= len(calls)


def test_no_piece_repeated_takes_long() -> None:
    for piece in PIECES:
        start = time.process_time()
        tools(False).step("<tool_call>" + piece * 20)
        assert time.process_time() - start < 5, piece[:20]
