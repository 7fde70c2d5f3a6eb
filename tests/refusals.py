"""Errors by the setting that they name, not by their wording."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from dapo_runner.errors import ConfigError


@contextmanager
def refused(
    key: str, kind: type[Exception] = ConfigError, parts: Iterable[str] = ()
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error whose message names the setting ``key`` and has the ``parts``."""
    with pytest.raises(kind, match=naming(key)) as caught:
        yield caught
    assert [part for part in parts if part not in str(caught.value)] == []


def naming(key: str) -> str:
    """A pattern of texts that name a setting: ``reward.kind``, and not ``reward.kinds``."""
    return rf"(?<![\w.]){re.escape(key)}(?!\.?\w)"
