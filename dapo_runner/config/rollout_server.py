"""The settings of servers that generate."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from dapo_runner.config.section import PositiveFloat, PositiveInt, Section


class ServerConfig(Section):
    """The server engine: `vllm serve` processes that `dapo serve` has started. docs/server.md."""

    urls: Annotated[list[str], Field(min_length=1)] = ["http://localhost:8000"]  # of the servers
    key_env: str | None = None  # the environment variable that holds their key; null: the file `dapo serve` makes
    transfer: Literal["file", "nccl"] = "file"  # how weights pass; nccl: from GPU to GPU
    folder: Path | None = None  # where weights pass, seen from trainer and servers; null: this machine's shared memory
    tensor: PositiveInt = 1  # GPUs that share the weights of one server
    answer_within: PositiveFloat = 1800.0  # seconds for the responses to one prompt
    sync_within: PositiveFloat = 600.0  # seconds for a server to take new weights, or to be there at all

    @property
    def round_within(self) -> float:
        """Seconds for a round of prompts, answered and scored, of a step that waits for it."""
        return 8 * self.answer_within

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        if len({_host_and_port(url) for url in urls}) < len(urls):
            raise ValueError(f"expected each server once, got {', '.join(urls)}")
        return urls


def _host_and_port(url: str) -> tuple[str, int]:
    """Raises ValueError for what is no address of a server, or more than that."""
    if "@" in url:  # neither shown nor kept in a run's folder
        raise ValueError(
            "expected addresses without user and password, in whose place key_env stands, got one with an @"
        )
    with suppress(ValueError):  # of a port or a name that is none
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        port = {"http": 80, "https": 443}.get(parts.scheme, 0) if parts.port is None else parts.port
        bare = url.rstrip("/").lower() == f"{parts.scheme}://{parts.netloc}".lower() and " " not in url
        if parts.scheme in ("http", "https") and host and port and bare:
            return host, port
    raise ValueError(f"expected addresses like http://localhost:8000, got {url!r}")
