"""The key of a server: from the environment, or from the file that `dapo serve` makes where no variable is named."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from dapo_runner.errors import ConfigError
from dapo_runner.http import read_key


def key_file(url: str) -> Path:
    """Return where the key of the server at ``url`` lies, in the user's own folder for settings."""
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return settings / "dapo" / "keys" / urlsplit(url).netloc.lower()


def make_key(url: str) -> None:
    """Write a key for the server at ``url`` unless it has one. Raises ConfigError."""
    path = key_file(url)
    if _read(path):
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"rollout.server.key_env: required, because {path} cannot be written: {error}") from error


def server_key(url: str, key_env: str | None) -> str:
    """Return the server's key, "" where neither a variable is named nor a file is there.

    Raises:
        ConfigError: The variable is empty, or others may read the file.
    """
    return read_key(url, key_env) or _read(key_file(url))


def _read(path: Path) -> str:
    try:
        with path.open(encoding="ascii") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o077 or status.st_uid != os.getuid():
                raise ConfigError(f"rollout.server.key_env: {path} must be private. Run `chmod 600 {path}`.")
            key = file.read().strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rollout.server.key_env: cannot read the key in {path}: {error}") from error
    if not (key and key.isprintable()):
        raise ConfigError(f"rollout.server.key_env: {path} must hold a key of printable ASCII characters. Delete it.")
    return key
