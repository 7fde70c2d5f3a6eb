"""What every section of the settings is made of.

The comment behind a field, or right above it, is its meaning in the reference (`reference.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _read_whole_number(value: Any) -> Any:
    """Turn `1e4`, which is text to YAML, into the whole number that it is."""
    if not isinstance(value, str) or "e" not in value.lower():
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() else value


Int = Annotated[int, BeforeValidator(_read_whole_number)]
PositiveInt = Annotated[Int, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]  # becomes a part of figures' names


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


def conditions_of(section: type[Section], name: str) -> list[str]:
    """Return what a setting requires where it is not its default."""
    tables = [vars(base).get("requires", {}) for base in section.__mro__]
    return [
        condition
        for table in tables
        for conditions, names in table.items()
        if name in names.split()
        for condition in conditions.split()
    ]


def unmet_requirements(root: Section) -> Iterator[str]:
    """Yield a line for each setting that is not its default and requires what is not there."""
    for prefix, section in _sections_of(root):
        for name, field in type(section).model_fields.items():
            if getattr(section, name) == field.get_default(call_default_factory=True):
                continue
            for condition in conditions_of(type(section), name):
                key, _, values = condition.removeprefix("!").partition("=")
                place, found = (key, read_key(root, key)) if "." in key else (prefix + key, getattr(section, key))
                if not _is_met(condition, values, found):
                    wanted = f"{place}={values}" if values else f"{place} to be {'un' * condition.startswith('!')}set"
                    yield f"{prefix}{field.alias or name}: requires {wanted}, got {spell(found)}."


def _is_met(condition: str, values: str, found: Any) -> bool:
    if values:
        return spell(found) in values.split("|")
    return bool(found) != condition.startswith("!")


def _sections_of(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
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
    if isinstance(value, Section):
        return "a section"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
