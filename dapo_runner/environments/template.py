"""Tokenize what an environment says as the model's chat template writes it, without a look at what was sampled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from dapo_runner.environments.environment import Message
from dapo_runner.errors import ConfigError

USER, ASSISTANT = "A question.", "An answer."  # a conversation that messages are appended to, to see what is added
SHOWN = 40  # characters from where two renderings differ


class TurnTemplate:
    """Writes messages behind the prompt of an episode or behind a turn of the policy, and opens the next turn.

    What is written is the difference between the rendered conversation with and without the messages. Without a chat
    template it is their contents alone.
    """

    def __init__(self, tokenizer: Any, *, chat: bool, tools: Sequence[Any] | None) -> None:
        """``tools``: JSON schemas, None without. Raises ConfigError for a chat template that does not only append."""
        self.tokenizer, self.chat, self.tools = tokenizer, chat, tools
        self._answered = (Message("user", USER), Message("assistant", ASSISTANT))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special_ids = {number for number, token in added.items() if token.special} | {*tokenizer.all_special_ids}
        # Markers of roles and tools are not always among the special ones.
        text, names = tokenizer.chat_template or "", {str(token): token.special for token in added.values()}
        marks = {name for name, is_special in names.items() if is_special or (name.strip() and name in text)}
        special = marks | set(tokenizer.all_special_tokens)
        self._special = re.compile("|".join(f"{re.escape(s[0])}(?={re.escape(s[1:])})" for s in special if s) or "(?!)")
        self._single = str.maketrans({token: " " for token in special if len(token) == 1})
        if chat:
            for role in ("user", *(["tool"] if tools else [])):
                self._appended(self._answered, (Message(role, USER),))
            if tools and self._render(self._answered) == self._render(self._answered, tools=None):
                name = tokenizer.name_or_path
                raise ConfigError(f"env: requires a chat template that lists tools; that of {name} leaves them out.")

    def open_episode(self, prompt: Sequence[tuple[str, str]], messages: Sequence[Message]) -> list[int]:
        """Return the tokens between a prompt and the first turn of the policy."""
        return self._tokenize(self._appended([Message(*one) for one in prompt], self._made_plain(messages)))

    def reply(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Return the tokens between a turn of the policy, which ended with ``last_token``, and its next one."""
        text = self._appended(self._answered, self._made_plain(messages))
        if self.chat:
            closed = self._render(self._answered)
            text = closed[closed.rindex(ASSISTANT) + len(ASSISTANT) :] + text
            if self.is_special(last_token):  # the policy has closed its turn itself
                text = text.removeprefix(self.tokenizer.decode([last_token]))
        return self._tokenize(text)

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def _appended(self, before: Sequence[Message], messages: Sequence[Message]) -> str:
        """Return what ``messages`` and the opening of the next turn add to a conversation."""
        if not self.chat:
            return "".join(message.content for message in messages)
        old, new = self._render(before), self._render([*before, *messages], add_generation_prompt=True)
        if new.startswith(old):
            return new[len(old) :]
        first = next(place for place, pair in enumerate(zip(old, f"{new}\0", strict=False)) if pair[0] != pair[1])
        raise ConfigError(
            f"env: requires a chat template that only appends. That of {self.tokenizer.name_or_path} turns "
            f"{old[first : first + SHOWN]!r} into {new[first : first + SHOWN]!r} when a message is added. Change the "
            "chat_template in the model's folder."
        )

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        turns = [message._asdict() for message in messages]
        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **{"tools": self.tools, **options}))
        except TemplateError as error:
            roles, name = ", ".join(message.role for message in messages), self.tokenizer.name_or_path
            raise ConfigError(f"env: expected messages of roles that {name} takes, got {roles}: {error}") from error

    def _made_plain(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in which no special token can be read: a space stands behind the first character of each."""
        if not self.chat:  # two of them can make one together
            messages = [Message("user", "".join(message.content for message in messages))]
        texts = [message.content.encode("utf-8", "replace").decode().translate(self._single) for message in messages]
        return [
            message._replace(content=self._special.sub(r"\g<0> ", text))
            for message, text in zip(messages, texts, strict=True)
        ]

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
