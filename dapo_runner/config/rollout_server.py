"""The settings of servers that generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from dapo_runner.config.section import PositiveFloat, PositiveInt, Section


class ServerConfig(Section):
    """The server engine: `vllm serve` processes that `dapo serve` has started. docs/server.md."""

    urls: Annotated[list[str], Field(min_length=1)] = ["http://localhost:8000"]
    key_env: str | None = None  # the environment variable that holds their key
    folder: Path | None = None  # where weights pass, seen from trainer and servers; None: this machine's shared memory
    tensor: PositiveInt = 1  # GPUs that share the weights of one server
    attempts: PositiveInt = 5  # times that a prompt is asked before the run ends
    # Seconds until a wait is over, and has failed.
    answer_within: PositiveFloat = 1800.0  # the responses to one prompt
    sync_within: PositiveFloat = 600.0  # a server that takes new weights
    back_within: PositiveFloat = 600.0  # any server, where there is none
    round_within: PositiveFloat = 14400.0  # a round of prompts, answered and scored, of a step that waits for it
    health_within: PositiveFloat = 10.0  # a sign of life; as long between two of them

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
                raise ValueError(f"expected addresses like http://localhost:8000, got {url!r}")
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError(f"expected each server once, got {', '.join(urls)}")
        return urls
