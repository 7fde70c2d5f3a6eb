"""A model behind an OpenAI-compatible API: a request, its answer, and what went wrong in one line.

Nothing is sent anywhere but to the URL that was named, or to the proxy of the environment: a redirect, which would take
the key along, is a failure. The key is read from the environment with every request and kept nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dapo_runner import http
from dapo_runner.errors import RunError

MAX_BYTES = 2**24  # of an answer


class EndpointError(RunError):
    """A request that was not answered, or not with what was asked for. ``status``: of an HTTP error."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """``first`` holds the likeliest tokens in the first place of the text with their log-probs, the one that stands
    there first; empty where they were not asked for, or the text is empty.
    """

    text: str
    first: list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``options`` go into every request; None takes a field out. ``timeout``: seconds that a request has."""

    url: str
    model: str
    key_env: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> Answer:
        """The model's next message. Raises EndpointError, and ConfigError without the key."""
        body = {"model": self.model, "messages": messages, **fields, **self.options}
        answer = self._post({name: value for name, value in body.items() if value is not None})
        try:
            choice = answer["choices"][0]
            text = str(choice["message"].get("content") or "")
            first = _first_tokens(choice["logprobs"]) if text and body.get("logprobs") else []
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            what = "choices with a message" + (" and logprobs" if body.get("logprobs") else "")
            got = http.shorten(json.dumps(answer), http.read_key(self.url, self.key_env))
            raise EndpointError(f"{self.url}: expected {what}, got {got}") from error
        return Answer(text, first)

    def _post(self, body: Mapping[str, Any]) -> Any:
        key = http.read_key(self.url, self.key_env)
        url = f"{self.url.rstrip('/')}/chat/completions"
        options: dict[str, Any] = {"key": key, "within": self.timeout, "max_bytes": MAX_BYTES, "use_proxy": True}
        try:
            return http.run(http.request("POST", url, body, **options))
        except http.HTTPError as error:
            raise EndpointError(str(error), error.status) from None


def _first_tokens(logprobs: Any) -> list[tuple[str, float]]:
    first = logprobs["content"][0]
    others = [(item["token"], float(item["logprob"])) for item in first["top_logprobs"]]
    own = (first["token"], float(first["logprob"]))
    if not all(logprob < 1 for _, logprob in (own, *others)):  # rounded, one may lie a little above 0
        raise ValueError("expected log-probs, got numbers that are none")
    return [own, *(item for item in others if item[0] != own[0])]
