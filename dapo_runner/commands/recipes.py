"""`dapo recipes`: list the recipes of the package, or print one. Imports no other package."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dapo_runner.commands.output import print_utf8
from dapo_runner.errors import ConfigError, did_you_mean


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if options.name is not None:
        print_utf8(find_recipe(options.name, known=recipes() | studies()).read_bytes())
        return 0
    for name, path in (recipes() | studies()).items():
        sentence = re.split(r"\.\s|\n[^#]", path.read_text("utf-8").removeprefix("# "), maxsplit=1)[0]
        print(f"{name:<24}", sentence.replace("\n#", ""))
    return 0


def recipes() -> dict[str, Path]:
    """Return the recipe files by name, from the installed package or from the checkout."""
    return {path.stem: path for path in sorted(_folder().glob("*.yaml"), key=lambda path: path.stem)}


def studies() -> dict[str, Path]:
    return {f"studies/{path.stem}": path for path in sorted((_folder() / "studies").glob("*.yaml"))}


def find_recipe(name: str, instead: str = "a YAML file", known: Mapping[str, Path] | None = None) -> Path:
    """Return the file ``name``, or the recipe of that name in ``known`` (default: all). Raises ConfigError."""
    if Path(name).is_file():
        return Path(name)
    known = recipes() if known is None else known
    if name not in known:
        raise ConfigError(f"{name}: expected {instead} or a recipe ({', '.join(known)}){did_you_mean(name, known)}")
    return known[name]


def _folder() -> Path:
    return next(parent / "recipes" for parent in Path(__file__).parents if (parent / "recipes").is_dir())
