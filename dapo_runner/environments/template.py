"""Tokenize what an environment says as the model's chat template writes it, without a look at what was sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from jinja2 import TemplateError
from pydantic import BaseModel, Json

from dapo_runner.environments.environment import Message
from dapo_runner.errors import ConfigError

CUT = "\ue000cut\ue000"  # stands in a conversation where a prompt ends, and where a turn of the policy ends
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError)  # of a chat template that does not take the messages
THOUGHTS = dict.fromkeys(("reasoning_content", "thinking"), "(a thought)")
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(BaseModel):
    """A call as a model writes it."""

    name: str
    arguments: dict[str, Any] | Json[dict[str, Any]] = {}  # as text in OpenAI's form


def parse_calls(text: str, tokenizer: Any = None, tools: Sequence[Any] = ()) -> list[Any]:
    """Return the calls of a turn in order, as JSON or as dictionaries; None for what cannot be read.

    They follow the thoughts, as `<tool_call>{…}</tool_call>` (Hermes, Qwen) without a response template.
    """
    text = text.rpartition("</think>")[2]
    if getattr(tokenizer, "response_template", None) is None:
        return _HERMES.findall(text)
    for end in (tokenizer.eos_token or "", ""):  # which some templates expect behind a call, and others do not
        with suppress(Exception):  # whatever a parser does with the text of a model
            calls = tokenizer.parse_response(text + end, prefix="", tools=list(tools)).get("tool_calls") or []
            return [call.get("function") for call in calls]
    return [None]


def common_length(a: str, b: str) -> int:
    return next((n for n, both in enumerate(zip(a, b, strict=False)) if len({*both}) > 1), min(len(a), len(b)))


def special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {number for number, token in added.items() if token.special} | {*tokenizer.all_special_ids}


class TurnTemplate:
    """Writes messages behind the prompt of an episode or behind a turn of the policy, and opens the next turn.

    What is written is what the chat template puts behind a turn whose text does not matter. Without a chat template it
    is the messages' contents alone.
    """

    def __init__(self, tokenizer: Any, *, chat: bool, tools: Sequence[Any] | None, **kwargs: Any) -> None:
        """Take JSON schemas as ``tools`` and other arguments of the template. Raises ConfigError if it is unfit."""
        self.tokenizer, self.chat, self.tools, self.kwargs = tokenizer, chat, tools, kwargs
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special_ids = special_ids(tokenizer)
        # Markers of roles and tools are not always among the special ones.
        text = tokenizer.chat_template or ""
        marks = {str(token) for token in added.values() if token.special or (str(token).strip() and str(token) in text)}
        special = {*marks, *tokenizer.all_special_tokens} - {""}
        self._special = re.compile("|".join(f"{re.escape(s[0])}(?={re.escape(s[1:])})" for s in special) or "(?!)")
        self._single = str.maketrans({token: " " for token in special if len(token) == 1})
        if chat:
            self._check({"role": "tool" if tools else "user", "content": "A reply."})

    def open_episode(self, prompt: Sequence[tuple[str, str]], text: str) -> list[int]:
        """Return the tokens between a prompt and the first turn. ``text`` is appended to the prompt's last message."""
        turns = [{"role": role, "content": content + CUT} for role, content in prompt]
        return self._tokenize(self._plain(text) + (self._render(turns).rpartition(CUT)[2] if self.chat else ""))

    def reply(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Return the tokens between a turn of the policy, which ended with ``last_token``, and its next one."""
        if not self.chat:  # two messages can make a special token together
            return self._tokenize(self._plain("".join(message.content for message in messages)))
        plain = ({"role": message.role, "content": self._plain(message.content)} for message in messages)
        ids = self._tokenize(self._render([*self._turns, *plain]).partition(CUT)[2])
        # The policy may have closed its turn itself. Before that token stand only space and other special tokens.
        n = ids.index(last_token) if self.is_special(last_token) and last_token in ids else -1
        return ids if self.tokenizer.decode(ids[:n], skip_special_tokens=True).strip() else ids[n + 1 :]

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def _check(self, message: dict[str, str]) -> None:
        """Compare renderings of conversations, of which each goes on where the one before ends. Raises ConfigError."""
        question, answer = {"role": "user", "content": "A text."}, {"role": "assistant", "content": f"A text.{CUT}"}
        opened = self._render([question])
        # A template may open the policy's turn with the beginning of its thoughts, or drop thoughts later.
        both = (turn for turn in ({**answer, **THOUGHTS}, answer) if self._render([question, turn]).startswith(opened))
        self._turns = [question, next(both, answer)]
        said = self._render(self._turns, add_generation_prompt=False).partition(CUT)[0]
        once, twice = (self._render([question, *[self._turns[1], message] * n]) for n in (1, 2))
        replies = [rendered.rpartition(CUT)[2] + CUT for rendered in (once, twice)]
        pairs = ((opened, said), (said, once), (once, twice), replies)
        old, new = next((pair for pair in pairs if not pair[1].startswith(pair[0])), ("", ""))
        n = common_length(old, new)
        requirements = {
            f"only appends: it turns {old[n : n + 40]!r} into {new[n : n + 40]!r}": not old,
            f"has messages of the role {message['role']}": message["content"] in replies[0],
            "lists tools": not self.tools or opened != self._render([question], tools=None),
            "writes calls as <tool_call>{…}</tool_call> (for another form, add a response_template to the tokenizer)": (
                self._writes_calls()
            ),
        }
        for requirement, is_met in requirements.items():
            if not is_met:
                name = self.tokenizer.name_or_path
                raise ConfigError(f"env: requires a chat template that {requirement}. Got that of {name}.")

    @property
    def shows_calls(self) -> bool:
        """Whether a prompt shows how to call tools, as far as this template decides; True without tools."""
        is_own = not self.chat or getattr(self.tokenizer, "response_template", None) is not None
        return not self.tools or is_own or "<tool_call>" in self._render([{"role": "user", "content": CUT}])

    def _writes_calls(self) -> bool:
        """Return whether `parse_calls` reads the calls that the template writes, if it writes any."""
        if not self.tools or getattr(self.tokenizer, "response_template", None) is not None:
            return True
        text, name, arguments = "", self.tools[0]["function"]["name"], {"text": "A call."}
        question = {"role": "user", "content": CUT}
        for form in (arguments, json.dumps(arguments)):  # some templates take only text
            calls = [{"type": "function", "id": "call00000", "function": {"name": name, "arguments": form}}]
            answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
            with suppress(ConfigError):
                text = self._render([question, answer], add_generation_prompt=False).rpartition(CUT)[2]
                break
        with suppress(ValueError):
            found = map(ToolCall.model_validate_json, parse_calls(text))
            return "A call." not in text or [*found] == [ToolCall(name=name, arguments=arguments)]
        return False

    def _render(self, turns: Sequence[dict[str, Any]], **options: Any) -> str:
        arguments = {**self.kwargs, "tokenize": False, "add_generation_prompt": True, "tools": self.tools, **options}
        try:
            return str(self.tokenizer.apply_chat_template(list(turns), **arguments))
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise ConfigError(f"env: expected a chat template that takes the roles {roles}: {error}") from error

    def _plain(self, text: str) -> str:  # a space stands behind the first character of each special token
        return self._special.sub(r"\g<0> ", text.encode("utf-8", "replace").decode().translate(self._single))

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
