"""What every section of the settings is made of, how settings are held against each other, and laid over each other.

The comment behind a field, or right above it, is its meaning in the reference (`reference.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dapo_runner.errors import ConfigError


def _read_number(value: Any) -> Any:
    """Return the number that a text of YAML is, `1e4` too; anything else as it is."""
    for read in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return read(value.replace(".inf", "inf"))
    return value


def _read_plain(value: Any) -> Any:
    """Return what a text of YAML stands for, alone or in a list or a mapping: a number, a switch, or the text."""
    if isinstance(value, Mapping):
        return {key: _read_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(_read_plain, value))
    number = _read_number(value)
    return SWITCHES.get(number.lower(), number) if isinstance(number, str) else number


SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
Plain = Annotated[Any, BeforeValidator(_read_plain)]  # of a setting that takes anything
Int = Annotated[int, BeforeValidator(_read_number)]
PositiveInt = Annotated[Int, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]  # becomes a part of figures' names
Check = tuple[str, bool, str]  # a key of the section, whether its value fits, what is expected of it


class Section(BaseModel):
    """Settings that belong together.

    ``requires`` has, by conditions, the names of the settings that have an effect, or work, only under them. A
    condition is ``key=value|value``, ``key`` (which is then set) or ``!key`` (which is then not set). A key without a
    dot is one of the same section, a key with dots one of the whole configuration.
    """

    requires: ClassVar[dict[str, str]] = {}
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        validate_default=True,
        ser_json_inf_nan="constants",  # loss.overrides.clip_high=.inf comes back as it went
    )

    def checks(self) -> Iterator[Check]:
        """Yield what must hold between the settings of this section."""
        yield from ()


def problems_of(root: Section) -> list[str]:
    """Return a line for each setting that requires what is not set, or that does not fit other settings.

    What the whole configuration checks is asked only once every section below it fits.
    """
    root_section, *below = _sections_of(root)
    unmet = [line for prefix, section in (root_section, *below) for line in _unmet_requirements(root, prefix, section)]
    failed = [line for prefix, section in below for line in failures(section.checks(), section, prefix)]
    return [*unmet, *failed] or list(failures(root.checks(), root))


def failures(checks: Iterator[Check], section: Section, prefix: str = "") -> Iterator[str]:
    """Yield `key: expected …, got …` for each check that fails."""
    for key, fits, expected in checks:
        if not fits:
            yield f"{prefix}{key.rstrip('_')}: expected {expected}, got {spell(read_key(section, key))}."


def conditions_of(section: type[Section], name: str) -> list[str]:
    """Return what a setting requires where it is not its default."""
    tables = [vars(base).get("requires", {}) for base in section.__mro__]
    named = [conditions for table in tables for conditions, names in table.items() if name in names.split()]
    return " ".join(named).split()


def _unmet_requirements(root: Section, prefix: str, section: Section) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        if getattr(section, name) == field.get_default(call_default_factory=True):
            continue
        for condition in conditions_of(type(section), name):
            key, _, values = condition.removeprefix("!").partition("=")
            place, found = (key, read_key(root, key)) if "." in key else (prefix + key, getattr(section, key))
            wanted = f"{place}={values}" if values else f"{place} to be {'un' * condition.startswith('!')}set"
            is_met = spell(found) in values.split("|") if values else bool(found) != condition.startswith("!")
            if not is_met:
                yield f"{prefix}{field.alias or name}: requires {wanted}, got {spell(found)}."


def _sections_of(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yield a section and those below it, each with the dotted key in front of its settings."""
    yield prefix, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        nested = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in ((name, value), *((f"{name}.{key}", item) for key, item in nested)):
            if isinstance(item, Section):
                yield from _sections_of(item, f"{prefix}{key}.")


def read_key(root: Section, key: str) -> Any:
    """Return the value of a dotted key; None where its section is not there."""
    value: Any = root
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def spell(value: Any) -> str:
    """Return a value as YAML has it."""
    if isinstance(value, Section) or (isinstance(value, Mapping) and value):
        return "a section"
    if isinstance(value, (list, tuple)):
        has_sections = any(isinstance(item, Section) for item in value)
        return f"{len(value)} sections" if has_sections else f"[{', '.join(map(spell, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def lay_over(under: Any, over: Any) -> Any:
    """Return ``over`` where it sets something, else ``under``: mappings, or sections of a configuration, key by key."""
    if isinstance(over, BaseModel):
        over = over.model_dump(exclude_unset=True, by_alias=True)
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{key: lay_over(under[key], value) if key in under else value for key, value in over.items()}}


def lay_settings(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with ``settings``, sections or dotted keys, set. Raises ConfigError."""
    merged = copy.deepcopy(dict(raw))
    for key, value in flatten(settings).items():
        set_key(merged, key, value)
    return merged


def set_key(raw: dict[str, Any], dotted: str, value: Any) -> None:
    """Set one key of nested sections, in place. Raises ConfigError."""
    *parents, last = dotted.split(".")
    node = raw
    for parent in parents:
        node[parent] = node.get(parent) or {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"{dotted}: {parent} is a value, not a section")
    node[last] = value


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, by dotted keys; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        nested = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {}
        flat |= nested or {f"{prefix}{key}": value}
    return flat
