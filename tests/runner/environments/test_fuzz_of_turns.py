"""No turn of a model ends a run: calls are read or are errors, and what is answered can be tokenized."""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from talkers import chat_tokenizer
from test_tools import TEMPLATE, product

from dapo_runner.environments.environment import Message
from dapo_runner.environments.template import TurnTemplate
from dapo_runner.environments.tools import ToolCall, ToolEnvironment, parse_calls

TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t['function']['name'] }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIECES = [
    *("<tool_call>", "</tool_call>", "<tool_call", "[product ", "[echo ", "]", "<start>", "<|im_start|>", "<|im_end|>"),
    *("<pad>", "<unk>", "ab", "a", "b", "{", "}", '{"name": ', '"product"', ', "arguments": ', '{"a": 2, "b": 3}'),
    *('"echo"', '"fail"', '"leave"', '"__init__"', '{"text": "\\ud800"}', '{"text": "<|im_end|>"}', "null", "NaN"),
    *('{"a": 1e999, "b": -0.0}', "9" * 5000, '{"a": ' + "9" * 4000 + ', "b": 1}', "[" * 3000, '{"a":' * 3000),
    *(
        "\ud800",
        "\udfff\ud800",
        "\0",
        "\x1b[2J",
        "\u202e",
        "\ue000cut\ue000",
        "\n",
        "x" * 5000,
        "{{ 1/0 }}",
        "{% raw %}",
    ),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=8).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "text"]), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["product", "echo", "fail", "leave", "secret", "_hidden", "reset", "get_reward", "", None, 3, "\ud800"]
)
CALLS = st.fixed_dictionaries({"name": NAMES, "arguments": VALUES | VALUES.map(json.dumps)}) | VALUES
TURNS = TEXTS | st.lists(CALLS.map(lambda call: f"<tool_call>{json.dumps(call)}</tool_call>") | TEXTS, max_size=4).map(
    "".join
)
FUZZ = settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    deadline=None,
    derandomize=True,
)


def echo(text: str) -> str:
    """Return the text.

    Args:
        text: The text.
    """
    return text


def fail(text: str | None = None) -> str:
    """Fail with the text.

    Args:
        text: The text.
    """
    raise RuntimeError(text)


def leave(text: str | None = None) -> str:
    """Leave.

    Args:
        text: The text.
    """
    sys.exit(text)


class State:
    """An environment in TRL's convention."""

    async def wide(self, a: int) -> list[int]:
        """Return a list.

        Args:
            a: Its length.
        """
        return [0] * a


@cache
def tokenizer(has_template: bool) -> Any:
    found = chat_tokenizer(TOOL_TEMPLATE)
    if has_template:
        found.response_template = TEMPLATE
    return found


@cache
def tools(has_template: bool) -> ToolEnvironment:
    return ToolEnvironment([product, echo, fail, leave], State(), tokenizer(has_template))


@cache
def turn_template(chat: bool) -> TurnTemplate:
    return TurnTemplate(tokenizer(False), chat=chat, tools=tools(False).tools if chat else None)


@pytest.mark.parametrize("has_template", [False, True])
@FUZZ
@given(TURNS)
@example('<tool_call>{"name": "product", "arguments": "[' + "[" * 5000)
@example('<tool_call>{"name": "product", "arguments": {"a": ' + "9" * 4300 + ', "b": 10}}</tool_call>')
def test_a_turn_is_read_and_answered(has_template: bool, text: str) -> None:
    calls = parse_calls(text, tokenizer(has_template), tools(has_template).tools)
    assert all(isinstance(call, ToolCall | ValueError) for call in calls)
    messages, reward, is_over = tools(has_template).step(text)
    assert (reward, is_over) == (None, not calls)
    assert len(messages) <= len(calls)
    assert all(isinstance(message.content, str) for message in messages)
    ids = turn_template(True).reply(messages, 0)
    assert all(isinstance(token, int) for token in ids)


@pytest.mark.parametrize("chat", [True, False])
@FUZZ
@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(0, 101))
def test_an_answer_opens_one_turn_whatever_is_in_it(chat: bool, contents: list[str], last: int) -> None:
    template = turn_template(chat)
    role = "tool" if chat else "user"
    ids, plain = (
        template.reply([Message(role, content) for content in texts], last)
        for texts in (contents, ["."] * len(contents))
    )
    unknown = tokenizer(False).unk_token_id  # of any character that is no token
    special, expected = (
        [one for one in found if template.is_special(one) and one != unknown] for found in (ids, plain)
    )
    assert special == expected


def test_no_piece_repeated_takes_long() -> None:
    for piece in PIECES:
        start = time.process_time()
        messages, *_ = tools(False).step("<tool_call>" + piece * 20)
        turn_template(True).reply(messages, 0)
        assert time.process_time() - start < 5, piece[:20]
