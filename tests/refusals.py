"""Errors by the setting that they name, not by their wording."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dapo_runner.errors import ConfigError


@contextmanager
def refused(key: str, kind: type[Exception] = ConfigError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error whose message names the setting ``key``, as ``reward.kind`` and not as ``reward.kinds``."""
    with pytest.raises(kind, match=rf"(?<![\w.]){re.escape(key)}(?!\.?\w)") as caught:
        yield caught
