"""Tools: environments in TRL's convention, plain functions, calls that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import trl_counter

from dapo_runner.config import ConfigError, EnvironmentConfig
from dapo_runner.environments.environment import Message
from dapo_runner.environments.make import make_environment, template_arguments
from dapo_runner.environments.tools import ToolCall, ToolEnvironment, parse_calls

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


def undocumented(a):
    return a


class Answering:
    def reset(self, row: dict[str, Any]) -> None: ...

    def step(self, text: str) -> tuple[None, float, bool]:
        return None, 1.0, True


class Tooled(trl_counter.CounterEnv):
    tools = ("hammer",)  # its own business


class Product(trl_counter.CounterEnv):
    def product(self, a: int) -> int:
        """Multiply by itself.

        Args:
            a: The number.
        """
        return a * a


class NoReset:
    pass


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, "test_tools", raising=False)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make(**settings: Any) -> Any:
    return make_environment(EnvironmentConfig(**settings))()


def contents(result: tuple[tuple[Message, ...], None, bool]) -> list[str]:
    messages, reward, _ = result
    assert reward is None
    assert {message.role for message in messages} <= {"tool"}
    return [message.content for message in messages]


def test_an_environment_written_for_trl() -> None:
    environment = make(kind="test_tools:Tooled", tools=["test_tools:product"])
    names = [tool["function"]["name"] for tool in environment.tools]
    assert names == ["product", "increment", "look"]
    row = {"start": 1, "target": 4, "question": "…", "answer": ""}
    assert environment.reset(row) == "The counter is at 1. Bring it to 4."
    first = environment.step("I add two. " + call("increment", amount=2) + call("look"))
    assert (contents(first), first[2]) == (["The counter is at 3.", "3"], False)
    assert contents(environment.step(call("product", a=3, b=5))) == ["15"]
    assert environment.get_reward() == 0.0
    environment.step(call("increment"))
    assert environment.get_reward() == 1.0
    assert environment.step("It is done.") == ((), None, True)
    assert environment.counts == {"tool_calls": 4, "tool_errors": 0, "tool_episodes": 1}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (call("multiply", a=1), "increment"),
        (call("increment", much=2), "much"),
        (call("increment", amount=6), "too much"),
        (call("increment", amount="1"), "amount"),
        (call("increment", amount=True), "amount"),
        ("<tool_call>{'name': 1}</tool_call>", "JSON"),
        ("<tool_call>[1, 2]</tool_call>", "tool call"),
        ('<tool_call>{"name": "increment", "arguments": [2]}', "arguments"),
        ("<tool_call>" + "[" * 100_000, "JSON"),
        ("<tool_call>", "JSON"),
    ],
)
def test_a_bad_call_is_answered_with_an_error_and_counted(text: str, word: str) -> None:
    environment = make(kind="trl_counter:CounterEnv")
    environment.reset({"target": 9, "answer": ""})
    bad, good = contents(environment.step(text + "</tool_call>" + call("increment")))
    assert word in json.loads(bad)["error"]
    assert good == "The counter is at 1."
    assert environment.counts == {"tool_calls": 2, "tool_errors": 1, "tool_episodes": 1}


def test_a_result_that_no_episode_holds_is_an_error_the_policy_sees() -> None:
    def count(to: int) -> str:
        """Count.

        Args:
            to: The last number.
        """
        return "1 " * to

    environment = ToolEnvironment([count])
    few, many = contents(environment.step(call("count", to=2) + call("count", to=10**6)))
    assert few == "1 1 "
    assert len(json.loads(many)["error"]) <= 200
    assert len(contents(environment.step(call("数" * 5000)))[0]) < 300
    assert environment.counts["tool_errors"] == 2


def test_many_bad_calls_have_no_more_room_than_one() -> None:
    environment = ToolEnvironment([product], max_error=60)
    one, *others = contents(environment.step(call("x" * 100) * 3 + call("product", a=2, b=3)))
    assert len(json.loads(one)["error"]) == 60
    assert others == ["6"]
    short = contents(environment.step(call("y") * 30))
    assert sum(len(json.loads(error)["error"]) for error in short) <= 60
    assert environment.counts["tool_errors"] == 33


def test_calls_are_read_by_the_template_of_the_tokenizer() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    hermes = call("product", a=6, b=7)
    assert parse_calls(hermes, tokenizer) == [ToolCall(name="product", arguments={"a": 6, "b": 7})]
    tokenizer.response_template = TEMPLATE
    assert parse_calls(hermes, tokenizer) == []
    text = 'First [product {"a": 6, "b": 7}] then [product {"a": 1, "b": 2}]'
    assert parse_calls(text, tokenizer) == [
        ToolCall(name="product", arguments={"a": 6, "b": 7}),
        ToolCall(name="product", arguments={"a": 1, "b": 2}),
    ]
    (broken,) = parse_calls('[product {"a": 6,]', tokenizer)
    assert isinstance(broken, ValueError)
    environment = ToolEnvironment([product], None, tokenizer)
    assert contents(environment.step(text)) == ["42", "2"]


def test_plain_functions_are_tools_and_the_configured_reward_scores() -> None:
    config = EnvironmentConfig(tools=["test_tools:product"])
    (tool,) = template_arguments(config)["tools"]
    assert tool["function"]["parameters"]["required"] == ["a", "b"]
    environment = make_environment(config)()
    assert environment.reset({"answer": "42"}) is None
    assert contents(environment.step(call("product", a=6, b=7))) == ["42"]
    assert environment.step("42") == ((), None, True)
    assert environment.get_reward() is None


def test_what_is_no_tool_is_refused() -> None:
    for settings, key in (
        ({"kind": "test_tools:Answering", "tools": ["test_tools:product"]}, r"env\.tools"),
        ({"kind": "test_tools:NoReset"}, r"env\.kind"),
        ({"tools": ["test_tools:product", "test_tools:product"]}, r"env\.tools"),
        ({"kind": "test_tools:Product", "tools": ["test_tools:product"]}, r"env\.tools"),
        ({"tools": ["test_tools:undocumented"]}, "env.*undocumented"),
        ({"tools": ["test_tools:absent"]}, r"env\.tools.*absent"),
    ):
        with pytest.raises(ConfigError, match=key):
            make(**settings)
