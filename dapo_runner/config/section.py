"""The base of all sections of settings: what a setting requires, checks between settings, merging of settings."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from dapo_runner.errors import ConfigError, hide_users

T = TypeVar("T")


def _read_number(value: Any) -> Any:
    """Return the number that a YAML text stands for, also `1e4`; any other value unchanged."""
    for read in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return read(value.replace(".inf", "inf"))
    return value


class Unquoted(str):
    """A text of YAML without quotes, which may stand for a number or a switch."""


def read_plain(value: Any) -> Any:
    """Return the number, boolean or text that an unquoted text stands for, also inside a list or a mapping."""
    if isinstance(value, Mapping):
        return {key: read_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(read_plain, value))
    if not isinstance(value, Unquoted):
        return value
    number = _read_number(value)
    return SWITCHES.get(value.lower(), str(value)) if isinstance(number, str) else number


SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
Plain = Annotated[Any, BeforeValidator(read_plain)]  # for a setting of any type
Int = Annotated[int, BeforeValidator(_read_number)]
PositiveInt = Annotated[Int, Field(gt=0, le=2**63 - 1)]
NonNegativeInt = Annotated[Int, Field(ge=0, le=2**63 - 1)]
Share = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
LocalPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
Name = Annotated[str, Field(pattern=r"^\.*[\w-][\w.-]*$")]  # it is used in metric and file names
MAY_CHANGE = "may change when a run resumes"
MayChange = Annotated[T, MAY_CHANGE]  # for a setting or a whole section
Check = tuple[str, bool, str]  # a key of the section, whether its value is valid, what is expected


class Section(BaseModel):
    """Settings that belong together.

    ``requires`` maps conditions to the names of settings that require them. A condition is ``key=value|value``,
    ``key`` (must be set) or ``!key`` (must not be set); several are separated by spaces. A key without a dot is in the
    same section, a key with dots is in the whole configuration.
    """

    requires: ClassVar[dict[str, str]] = {}
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        validate_default=True,
        ser_json_inf_nan="constants",  # loss.overrides.clip_high=.inf survives a round trip
    )

    def checks(self) -> Iterator[Check]:
        """Yield the checks between the settings of this section."""
        yield from ()


def problems_of(root: Section) -> list[str]:
    """Return one line per setting whose requirements are not met or that is not supported with other settings.

    The checks of the whole configuration run only if all sections pass theirs.
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
    """Return the conditions that a setting requires unless it has its default."""
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
    """Yield a section and its subsections, each with its key as a prefix."""
    yield prefix, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        nested = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in ((name, value), *((f"{name}.{key}", item) for key, item in nested)):
            if isinstance(item, Section):
                yield from _sections_of(item, f"{prefix}{key}.")


def read_key(root: Section, key: str) -> Any:
    """Return the value of a dotted key; None if its section is null."""
    value: Any = root
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def spell(value: Any) -> str:
    """Return a value as YAML writes it, but of an address no user and password."""
    if isinstance(value, Section) or (isinstance(value, Mapping) and value):
        return "a section"
    if isinstance(value, (list, tuple)):
        has_sections = any(isinstance(item, Section) for item in value)
        return f"{len(value)} sections" if has_sections else f"[{', '.join(map(spell, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else hide_users(str(value))


def as_mappings(raw: Any) -> Any:
    """Return sections, also inside mappings, as mappings of the keys that were set; any other value unchanged."""
    if isinstance(raw, BaseModel):
        return raw.model_dump(exclude_unset=True, by_alias=True)
    return {key: as_mappings(value) for key, value in raw.items()} if isinstance(raw, Mapping) else raw


def lay_over(under: Any, over: Any) -> Any:
    """Merge two nested mappings key by key. ``over`` wins where it sets a key."""
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{key: lay_over(under[key], value) if key in under else value for key, value in over.items()}}


def lay_settings(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with ``settings`` set, which are sections or dotted keys. Raises ConfigError."""
    merged = copy.deepcopy(dict(raw))
    for key, value in flatten(settings).items():
        set_key(merged, key, value)
    return merged


def set_key(raw: dict[str, Any], dotted: str, value: Any) -> None:
    """Set one key of nested sections, in place. Raises ConfigError."""
    *parents, last = dotted.split(".")
    node = raw
    for parent in parents:
        node[parent] = node = node.get(parent) or {}
        if not isinstance(node, dict):
            raise ConfigError(f"{dotted}: expected {parent} to be a section, got a value")
    node[last] = value


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys. An empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        nested = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {}
        flat |= nested or {f"{prefix}{key}": value}
    return flat
