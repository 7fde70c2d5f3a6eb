"""The versions of other libraries for which this package was written and tested, in one place."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Supported:
    """Versions of a package from ``at_least`` up to but not including ``below`` (None: no known limit)."""

    package: str
    at_least: str
    below: str | None = None

    def __str__(self) -> str:
        return f"{self.package} >= {self.at_least}" + ("" if self.below is None else f", < {self.below}")

    @property
    def requirement(self) -> str:
        """Return it as a requirement for pip."""
        return str(self).replace(" ", "")

    def covers(self, version: str) -> bool:
        found = _release(version)
        return _release(self.at_least) <= found and (self.below is None or found < _release(self.below))


TRL = (Supported("trl", "1.16", "1.17"), Supported("transformers", "5.6", "6"))
VERL = (Supported("verl", "0.9", "0.10"),)
VLLM = (Supported("vllm", "0.32"),)


def require(adapter: str, *wanted: Supported) -> None:
    """Check the versions of what ``adapter`` builds on.

    An adapter uses parts of a trainer that may change, so an untested version raises an error.

    Raises:
        ImportError: a package is not installed, or its version is not supported.
    """
    for supported in wanted:
        message = f"{adapter} requires {supported}"
        remedy = f"pip install '{supported.requirement}'"
        if importlib.util.find_spec(supported.package) is None:
            raise ImportError(f"{message}; it is not installed: {remedy}")
        try:
            installed = importlib.metadata.version(supported.package)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(f"{message}; the one on the path has no version: {remedy}") from None
        if not supported.covers(installed):
            raise ImportError(f"{message}; got {installed}: {remedy}")


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 1.16.0.dev1 → (1, 16, 0)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
