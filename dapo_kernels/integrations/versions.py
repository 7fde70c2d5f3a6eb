"""Which versions of another library an adapter was written for and tested with."""

from __future__ import annotations

import importlib.metadata
import importlib.util


def require(adapter: str, package: str, at_least: str, below: str) -> None:
    """Check the installed version of ``package`` before ``adapter`` builds on it.

    An adapter for a trainer stands on parts of it that are not promised to stay, so a version nobody tried is refused.

    Raises:
        ImportError: the package is not installed, or its version is outside [at_least, below).
    """
    wanted = f"{adapter} is written for {package} >= {at_least}, < {below}"
    remedy = f"pip install '{package}>={at_least},<{below}'"
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{wanted}; it is not installed: {remedy}")
    installed = importlib.metadata.version(package)
    if not _release(at_least) <= _release(installed) < _release(below):
        raise ImportError(f"{wanted}; installed is {installed}: {remedy}")


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 1.16.0.dev1 → (1, 16, 0)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
