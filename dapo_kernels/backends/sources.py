"""Whether a compiled module was built from the C++ sources beside the package.

setup.py runs this file by itself: it imports the standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

CSRC = Path(__file__).parents[2] / "csrc"  # in a checkout; beside an installed package there is none


def digest() -> str:
    """Return a digest of csrc, which setup.py compiles into each module as its ``sources``."""
    files = sorted(path for path in CSRC.rglob("[a-z]*") if path.suffix in (".h", ".cpp", ".cu"))
    parts = (part for path in files for part in (path.relative_to(CSRC).as_posix().encode(), path.read_bytes()))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def built_from_others(module: Any) -> str | None:
    """Return a message if the sources beside the package are not those that the module was built from. None if they
    are, or if there are none.
    """
    if not (CSRC / "surrogate.h").exists() or getattr(module, "sources", None) == digest():
        return None
    return f"{module.__file__} was built from other sources than those in {CSRC}; pip install -e . in {CSRC.parent}"
