"""A model behind an OpenAI-compatible API."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from dapo_runner import http
from dapo_runner.config import AskedModel

MAX_BYTES = 2**24  # of an answer


class Answer(NamedTuple):
    """``first``: the likeliest first tokens of the text with their log-probs, its own at the front."""

    text: str
    first: list[tuple[str, float]]


def chat(model: AskedModel, messages: list[dict[str, str]], timeout: float | None, **fields: Any) -> Answer:
    """Return the model's next message.

    Args:
        timeout: Seconds for the request.
        fields: Of the request; `options` of the model override them.

    Raises:
        HTTPError: No answer, or not one with what was asked for.
        ConfigError: The environment variable with the key is empty.
    """
    assert model.url is not None
    key, url = http.read_key(model.url, model.key_env), f"{model.url.rstrip('/')}/chat/completions"
    asked = {"model": model.model, "messages": messages, **fields, **model.options}
    body = {name: value for name, value in asked.items() if value is not None}
    answer = http.run(http.request("POST", url, body, key=key, within=timeout, max_bytes=MAX_BYTES, use_proxy=True))
    try:
        choice = answer["choices"][0]
        text = str(choice["message"].get("content") or "")
        return Answer(text, _first_tokens(choice["logprobs"]) if text and body.get("logprobs") else [])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        expected = "choices with a message" + (" and logprobs" if body.get("logprobs") else "")
        raise http.HTTPError(f"{url}: expected {expected}, got {http.shorten(json.dumps(answer), key)}") from error


def _first_tokens(logprobs: Any) -> list[tuple[str, float]]:
    first = logprobs["content"][0]
    own = (first["token"], float(first["logprob"]))
    others = [(item["token"], float(item["logprob"])) for item in first["top_logprobs"]]
    if not all(logprob < 1 for _, logprob in (own, *others)):  # rounded, one may lie a little above 0
        raise ValueError("expected log-probs")
    return [own, *(item for item in others if item[0] != own[0])]
