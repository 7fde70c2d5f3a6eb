"""Write docs/settings.md, the reference of all settings.

The meaning of a setting is the comment behind its field or directly above it. The meaning of a field of an objective
is that of the docstring of ``Objective``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dapo_kernels.objectives import FIELDS, Objective
from dapo_runner.config.algorithms import ALGORITHMS
from dapo_runner.config.commands import ConvertConfig, SftConfig, StudyConfig
from dapo_runner.config.reading import section_of
from dapo_runner.config.section import Section, conditions_of, flatten, spell
from dapo_runner.config.settings import Config
from dapo_runner.config.training import LossConfig

HEADER = """\
# All settings

Look up any setting: its key, type and default, what it means and what it requires. A command
takes a YAML file with its keys, and `train`, `launch`, `sft`, `eval`, `serve` and `convert-answers`
take `key=value` too (`dapo train tiny optimizer.lr=1e-4`). `null` means that a setting is not set.
"Set by" names the values of `algorithm` that replace the default. If you change a setting from its
default, you must also meet the column "requires": `key=a|b` means one of these values, `key` alone
that it must be set, and "unset" that it must be null, false, 0 or empty. A key without a dot is in
the same section.

Prerequisites: a recipe that trains ([your first run](first-run.md)).

This page is generated: `python -m docs.generate`.
"""
COMMANDS: dict[str, type[Section]] = {
    "dapo train": Config,
    "dapo sft": SftConfig,
    "dapo study": StudyConfig,
    "dapo convert-answers": ConvertConfig,
}
COLUMNS = "| key | type | default | meaning | requires |\n|---|---|---|---|---|"
OF_AN_OBJECTIVE = "The defaults are those of `loss.objective`. [Objectives](objectives.md) explains the symbols.\n"
_FIELD = re.compile(r"^    (\w+): .*?(?:  # (?!type:)(.*)|  # type:.*)?$")


def page() -> str:
    """Return the text of docs/settings.md."""
    seen: dict[type[Section], str] = {}
    parts = [HEADER]
    for command, root in COMMANDS.items():
        parts += [f"## `{command}`\n", *_tables(root, "", command, seen)]
    return "\n".join(parts)


def _tables(section: type[Section], key: str, command: str, seen: dict[type[Section], str]) -> Iterator[str]:
    """Yield the table of a section, then those of its subsections. A repeated section only gets a reference."""
    title = f"### `{key}`\n\n" if key else ""
    if section in seen:
        yield f"{title}As {seen[section]}.\n"
        return
    seen[section] = f"`{key}` of `{command}`"
    rows = [row for name in section.model_fields if (row := _row(key, name, section, command))]
    if rows:
        yield "\n".join([f"{title}{COLUMNS}", *rows, ""])
    if section is LossConfig:
        yield "\n".join([f"### `{key}.overrides`\n", OF_AN_OBJECTIVE, COLUMNS, *_rows_of_an_objective(key), ""])
    for name, field in section.model_fields.items():
        nested = section_of(field)
        if nested is not None:
            inside = {"dict": ".NAME", "list": "[]"}.get(getattr(get_origin(field.annotation), "__name__", ""), "")
            yield from _tables(nested, f"{key}.{name}{inside}".lstrip("."), command, seen)


def _row(key: str, name: str, section: type[Section], command: str) -> str:
    """Return the row of a value, or of a section that may be null or has a meaning; "" for another section."""
    field = section.model_fields[name]
    is_section = section_of(field) is not None
    if is_section and not meanings(section)[name] and type(None) not in get_args(field.annotation):
        return ""
    default = "" if is_section and field.default else spell(field.get_default(call_default_factory=True))
    default = "required" if field.is_required() else f"`{default}`" if len(default) < 60 else "a longer text"
    default = default if default != "``" else ""
    requires = [f"`{text[1:]}` unset" if text.startswith("!") else f"`{text}`" for text in conditions_of(section, name)]
    dotted = f"{key}.{field.alias or name}".lstrip(".")
    several = "s" if get_origin(field.annotation) in (dict, list) else ""
    kind = f"section{several}" if is_section else _name_of(field.annotation)
    meaning = meanings(section)[name] + (set_by(dotted) if command == "dapo train" else "")
    return _cells(f"`{dotted}`", kind, default, meaning, ", ".join(requires))


def _rows_of_an_objective(key: str) -> Iterator[str]:
    """Yield the rows of `loss.overrides`, as YAML writes their values."""
    text = inspect.getdoc(Objective) or ""
    found = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)$", text.partition("Attributes:\n")[2], re.MULTILINE))
    types = get_type_hints(Objective)
    for name in FIELDS:
        kind = _name_of(types[name]).removesuffix(" or Callable")  # a function is no value of a recipe
        meaning = re.sub(r"``([^`]+)``", r"`\1`", " ".join(found[name].split())).rstrip(".")
        for value, in_yaml in (("`None`", "`null`"), ("`math.inf`", "`.inf`"), ('`"', "`"), ('"`', "`")):
            meaning = meaning.replace(value, in_yaml)
        dotted = f"{key}.overrides.{name}"
        yield _cells(f"`{dotted}`", kind, "of the objective", meaning + set_by(dotted), "")


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def set_by(key: str) -> str:
    """Return the algorithms that set a key, or a key below it."""
    sets = {name: [f"{other}." for other in flatten(row.settings)] for name, row in ALGORITHMS.items()}
    names = [name for name, keys in sets.items() if any(other.startswith(f"{key}.") for other in keys)]
    return f". Set by algorithms: {'all' if len(names) == len(sets) else ', '.join(names)}" if names else ""


def _name_of(annotation: Any) -> str:
    """Return the display name of a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name_of(arguments[0])
    if origin is Literal:
        return ", ".join(map(spell, arguments))
    if origin in (Union, UnionType):
        return " or ".join(map(_name_of, arguments))
    if origin in (list, tuple):
        return f"list of {_name_of(arguments[0])}"
    return "null" if annotation is type(None) else (origin or annotation).__name__


def meanings(section: type[Section]) -> dict[str, str]:
    """Return the comments of a section's settings, by name."""
    found = dict.fromkeys(section.model_fields, "")
    for base in reversed(section.__mro__[: section.__mro__.index(Section)]):
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            match = _FIELD.match(line)
            if match:
                text = " ".join([*above, match[2] or ""]).strip()
                found[match[1]] = text or found.get(match[1], "")
            above = [*above, line.strip().removeprefix("# ")] if line.startswith("    # ") else []
    return found
