"""A model behind an OpenAI-compatible API: a request, its answer, and what went wrong in one line.

Nothing is sent anywhere but to the URL that was named, or to the proxy of the environment: a redirect, which would take
the key along, is a failure. The key is read from the environment with every request and kept nowhere.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from dapo_runner.errors import ConfigError

MAX_BYTES = 2**24  # of an answer
SHOWN = 300  # characters of an answer that an error shows
AGENT = "dapo-runner"


class EndpointError(RuntimeError):
    """A request that was not answered, or not with what was asked for. ``status``: of an HTTP error."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = build_opener(_NoRedirects)


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
            raise EndpointError(f"{self.url}: expected {what}, got {self._shown(json.dumps(answer))}") from error
        return Answer(text, first)

    def _post(self, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "User-Agent": AGENT, **authorization(self.url, self.key_env)}
        url = f"{self.url.rstrip('/')}/chat/completions"
        request = Request(url, json.dumps(body).encode(), headers)
        until = math.inf if self.timeout is None else time.monotonic() + self.timeout
        try:
            with _OPENER.open(request, timeout=self.timeout) as response:
                raw = read_until(response, until, MAX_BYTES)
        except HTTPError as error:
            said = self._shown(f"{error.reason}: {_said(error)}")
            raise EndpointError(f"{url}: HTTP {error.code} {said}", error.code) from None
        except (OSError, HTTPException, ValueError) as error:  # a URLError is an OSError
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError) and self.timeout is not None:
                raise EndpointError(f"{url}: no answer within {self.timeout:g} s") from None
            raise EndpointError(f"{url}: {type(reason).__name__}: {self._shown(str(reason))}") from None
        try:
            return json.loads(raw)
        except ValueError as error:
            raise EndpointError(f"{url}: expected JSON, got {self._shown(raw.decode('utf-8', 'replace'))}") from error

    def _shown(self, text: str) -> str:
        return shown(text, self.key_env)


def authorization(url: str, key_env: str | None) -> dict[str, str]:
    """The header with the key that the environment variable holds; none where there is no variable. Raises ConfigError
    for a key that is not there, or that http.client would refuse and show.
    """
    if key_env is None:
        return {}
    where = f"the key of {url} in the environment variable {key_env}"
    if not (key := _key(key_env)):
        raise ConfigError(f"expected {where}, got nothing")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"expected {where} in printable ASCII characters, got others")
    return {"Authorization": f"Bearer {key}"}


def shown(text: str, key_env: str | None) -> str:
    """What a server said, in one line and without the key, which it may repeat."""
    key = _key(key_env)
    text = " ".join((text.replace(key, "***") if key else text).split())
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _key(key_env: str | None) -> str:
    return os.environ.get(key_env or "", "").strip()


def read_until(response: HTTPResponse, until: float, max_bytes: int) -> bytes:
    """At most so many bytes of an answer. A server that is never silent for long, and never done, is late like another:
    raises TimeoutError past ``until``, on the monotonic clock.
    """
    raw = bytearray()
    while len(raw) < max_bytes and (part := response.read1(max_bytes - len(raw))):
        raw += part
        if time.monotonic() > until:
            raise TimeoutError
    return bytes(raw)


def _said(error: HTTPError) -> str:
    try:
        return error.read(MAX_BYTES).decode("utf-8", "replace")
    except (OSError, HTTPException) as failure:
        return f"then {type(failure).__name__}"


def _first_tokens(logprobs: Any) -> list[tuple[str, float]]:
    first = logprobs["content"][0]
    others = [(item["token"], float(item["logprob"])) for item in first["top_logprobs"]]
    own = (first["token"], float(first["logprob"]))
    if not all(logprob < 1 for _, logprob in (own, *others)):  # rounded, one may lie a little above 0
        raise ValueError("expected log-probs, got numbers that are none")
    return [own, *(item for item in others if item[0] != own[0])]
