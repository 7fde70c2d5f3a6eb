"""Tokenize what an environment says as the model's chat template writes it, without a look at what was sampled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from dapo_runner.environments.environment import Message
from dapo_runner.errors import ConfigError

CUT = "\ue000cut\ue000"  # stands in a conversation where a prompt ends, and where a turn of the policy ends
THOUGHT = "(a thought)"
SHOWN = 40  # characters from where two renderings differ


class TurnTemplate:
    """Writes messages behind the prompt of an episode or behind a turn of the policy, and opens the next turn.

    What is written is what the chat template puts behind a turn whose text does not matter. Without a chat template it
    is the messages' contents alone.
    """

    def __init__(self, tokenizer: Any, *, chat: bool, tools: Sequence[Any] | None) -> None:
        """Take JSON schemas as ``tools``. Raises ConfigError for a template that refuses messages or changes them."""
        self.tokenizer, self.chat, self.tools = tokenizer, chat, tools
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special_ids = {number for number, token in added.items() if token.special} | {*tokenizer.all_special_ids}
        # Markers of roles and tools are not always among the special ones.
        text = tokenizer.chat_template or ""
        marks = {str(token) for token in added.values() if token.special or (str(token).strip() and str(token) in text)}
        special = {*marks, *tokenizer.all_special_tokens} - {""}
        self._special = re.compile("|".join(f"{re.escape(s[0])}(?={re.escape(s[1:])})" for s in special) or "(?!)")
        self._single = str.maketrans({token: " " for token in special if len(token) == 1})
        self._turns = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": f"An answer.{CUT}"}]
        if chat:
            self._check({"role": "tool" if tools else "user", "content": "A reply."})

    def open_episode(self, prompt: Sequence[tuple[str, str]], text: str) -> list[int]:
        """Return the tokens between a prompt and the first turn. ``text`` is appended to the prompt's last message."""
        turns = [{"role": role, "content": content} for role, content in prompt]
        return self._tokenize(self._plain(text) + (self._render_after_mark(turns, CUT) if self.chat else ""))

    def reply(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Return the tokens between a turn of the policy, which ended with ``last_token``, and its next one."""
        plain = self._made_plain(messages)
        if not self.chat:
            return self._tokenize(plain[0].content)
        text = self._render_after_mark([*self._turns, *(message._asdict() for message in plain)])
        if self.is_special(last_token):  # the policy has closed its turn itself
            text = text.removeprefix(self.tokenizer.decode([last_token]))
        return self._tokenize(text)

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def _render_after_mark(self, turns: Sequence[dict[str, str]], mark: str = "") -> str:
        last = {**turns[-1], "content": turns[-1]["content"] + mark}
        return self._render([*turns[:-1], last]).partition(CUT)[2]

    def _check(self, message: dict[str, str]) -> None:
        """Compare renderings of conversations, of which each goes on where the one before ends. Raises ConfigError."""
        question, answer = self._turns
        thinking = {**answer, "reasoning_content": THOUGHT, "thinking": THOUGHT}
        thoughtful = self._render([question, thinking], add_generation_prompt=False).rpartition(THOUGHT)
        self._require_prefix("".join(thoughtful[:2]), self._render([question, thinking, message]))
        opened = self._render([question])
        # A template may open the policy's turn with the beginning of its thoughts.
        turn = next((one for one in (answer, thinking) if self._render([question, one]).startswith(opened)), answer)
        self._turns = [question, turn]
        once, twice = (self._render([question, *[turn, message] * n]) for n in (1, 2))
        self._require_prefix(opened, once)
        self._require_prefix(once, twice)
        replies = [rendered.rpartition(CUT)[2] for rendered in (once, twice)]
        self._require_prefix(*(reply + CUT for reply in replies))
        name = self.tokenizer.name_or_path
        if message["content"] not in replies[0]:
            raise ConfigError(f"env: requires a chat template with messages of the role {message['role']}, got {name}.")
        if self.tools and opened == self._render([question], tools=None):
            raise ConfigError(f"env: requires a chat template that lists tools; that of {name} leaves them out.")

    def _require_prefix(self, old: str, new: str) -> None:
        if not new.startswith(old):
            first = next(place for place, pair in enumerate(zip(old, f"{new}\0", strict=False)) if pair[0] != pair[1])
            raise ConfigError(
                f"env: requires a chat template that only appends. That of {self.tokenizer.name_or_path} turns "
                f"{old[first : first + SHOWN]!r} into {new[first : first + SHOWN]!r} when a message is added. "
                "Change the chat_template in the model's folder."
            )

    def _render(self, turns: Sequence[dict[str, str]], **options: Any) -> str:
        arguments = {"tokenize": False, "add_generation_prompt": True, "tools": self.tools, **options}
        try:
            return str(self.tokenizer.apply_chat_template(list(turns), **arguments))
        except TemplateError as error:
            roles, name = ", ".join(turn["role"] for turn in turns), self.tokenizer.name_or_path
            raise ConfigError(f"env: expected messages of roles that {name} takes, got {roles}: {error}") from error

    def _made_plain(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in which no special token can be read."""
        if not self.chat:  # two of them can make one together
            messages = [Message("user", "".join(message.content for message in messages))]
        return [message._replace(content=self._plain(message.content)) for message in messages]

    def _plain(self, text: str) -> str:  # a space stands behind the first character of each special token
        return self._special.sub(r"\g<0> ", text.encode("utf-8", "replace").decode().translate(self._single))

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
