"""`dapo recipes`: the recipes that come with the package, and one of them to start an own one from. Needs nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dapo_runner.errors import ConfigError


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if options.name is not None:
        print(find_recipe(options.name).read_text(encoding="utf-8"), end="")
        return 0
    for name, path in recipes().items():
        with path.open(encoding="utf-8") as lines:
            print(f"{name:<16} {next(lines).removeprefix('#').strip()}")
    return 0


def recipes() -> dict[str, Path]:
    """Names and files of the recipes, those of studies in a folder of their own: inside an
    installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_recipe(name: str, instead: str = "a YAML file") -> Path:
    """The file that ``name`` is, or the recipe of that name. Raises ConfigError; ``instead`` is what else it may be."""
    if Path(name).is_file():
        return Path(name)
    known = recipes()
    if name not in known:
        found = "a folder" if Path(name).is_dir() else "nothing there"
        raise ConfigError(f"{name}: expected {instead} or a recipe ({', '.join(known)}), found {found}")
    return known[name]
