"""Read a configuration from a YAML file and `key=value` overrides, and write it back."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dapo_kernels.objectives import FIELDS
from dapo_runner.config.checks import mismatches
from dapo_runner.config.loss import LossConfig
from dapo_runner.config.section import Section, unmet_requirements
from dapo_runner.config.settings import Config
from dapo_runner.config.sft import SftConfig
from dapo_runner.config.study import StudyConfig
from dapo_runner.errors import ConfigError

C = TypeVar("C", bound=Section)


class _Loader(yaml.SafeLoader):
    """Read YAML and keep as text what YAML 1.1 converts: `off` to False, 12:30 to 750, 007 to 7, 2026-11-21 to a date.

    A setting that is a number or a switch still accepts such a text. A key that stands twice in a section is an error.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"{name}: stands in line {lines[name]} and in line {line}. Put them together.")
            lines[name] = line
        return node


# Each a part of what version 1.1 takes, so that whatever a configuration is dumped as is read back as the same.
_SWITCH = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_NUMBER = re.compile(
    r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _SWITCH, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """Return the values of a YAML text. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)  # a safe loader


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file and lay ``key=value`` overrides over it.

    Raises ConfigError with one line per problem: the key, what was expected, what came.
    """
    return parse_config(apply_overrides(read_recipe(path), overrides))


def load_sft_config(path: str | Path, overrides: Iterable[str] = ()) -> SftConfig:
    """Read a recipe for `dapo sft`, as ``load_config`` does."""
    return parse(apply_overrides(read_recipe(path), overrides), SftConfig)


def load_study(path: str | Path) -> StudyConfig:
    """Read a study. Raises ConfigError."""
    return parse(read_recipe(path), StudyConfig)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Return the sections of a YAML file, not validated. Raises ConfigError."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: expected a YAML file, found {'a folder' if path.is_dir() else 'nothing there'}")
    try:
        raw = read_yaml(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as 'model:' at the top, got a {type(raw).__name__}")
    return raw


def parse_config(raw: dict[str, Any]) -> Config:
    """Validate plain nested dicts, as YAML gives them. Raises ConfigError."""
    config = parse(raw, Config)
    check_config(config)
    return config


def parse(raw: dict[str, Any], kind: type[C]) -> C:
    """Validate plain nested dicts as ``kind``, without the checks between sections. Raises ConfigError."""
    try:
        section = kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, kind) for item in error.errors())) from error
    if problems := list(unmet_requirements(section)):
        raise ConfigError("\n".join(problems))
    return section


def check_config(config: Config) -> None:
    """Raise ConfigError where settings do not fit each other."""
    if problems := list(mismatches(config)):
        raise ConfigError("\n".join(problems))


def dump_config(config: Section) -> str:
    """Return the whole configuration as YAML, defaults included; ``load_config`` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, by dotted keys; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return ``raw`` with `section.key=value` (`--section.key=value`, `--section.key value`) set.

    Values are read as YAML: `true`, `null`, `[1, 2]` mean what they mean in the file.
    """
    merged = copy.deepcopy(raw)
    items = iter(overrides)
    for item in items:
        key, equals, text = item.removeprefix("--").partition("=")
        if not equals and item.startswith("--"):
            following = next(items, None)
            if following is None:
                raise ConfigError(f"{item}: expected a value after it, got nothing")
            text, equals = following, "="
        if not equals or not key:
            raise ConfigError(f"{item!r}: expected key=value, e.g. optimizer.lr=1e-5")
        try:
            value = read_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{key}: {text!r} is not a YAML value: {error}") from error
        _set_nested(merged, key, value)
    return merged


def lay_settings(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with ``settings``, sections or dotted keys, set. Raises ConfigError."""
    merged = copy.deepcopy(dict(raw))
    for key, value in flatten(settings).items():
        _set_nested(merged, key, value)
    return merged


def _set_nested(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    node = raw
    for depth, parent in enumerate(parents):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"{dotted}: {'.'.join(parents[: depth + 1])} is a value, not a section")
    node[last] = value


def _explain(item: Any, kind: type[Section]) -> str:
    """Return a pydantic error as `key: expected …, got …`."""
    location = tuple(str(part) for part in item["loc"])
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        known = _known_keys(location[:-1], kind)
        near = [place for place in every_key(kind) if place.split(".")[-1] == location[-1]]
        near = near or difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        return f"{key}: unknown key; {hint}known keys here: {', '.join(known)}"
    if item["type"] == "missing":
        return f"{key}: expected a value, got nothing"
    if item["type"] == "value_error":
        message = str(item["ctx"]["error"])
        if not key:
            return message
        names_a_field = message.partition(":")[0].isidentifier()
        return f"{key}.{message}" if names_a_field else f"{key}: {message}"
    expected = item["msg"].removeprefix("Input should be ")
    return f"{key}: expected {expected}, got {item['input']!r}"


def _known_keys(section: tuple[str, ...], node: type[Section]) -> list[str]:
    for name in section:
        if name not in node.model_fields:  # the key of a mapping of sections, the place in a list of them
            continue
        nested = section_of(node.model_fields[name])
        assert nested is not None
        node = nested
    return [field.alias or name for name, field in node.model_fields.items()]


def every_key(node: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key, and the fields of an objective."""
    for name, field in node.model_fields.items():
        nested, place = section_of(field), f"{prefix}{field.alias or name}"
        yield place
        if nested is not None and get_origin(field.annotation) not in (dict, list):
            yield from every_key(nested, f"{place}.")
    if node is LossConfig:
        yield from (f"{prefix}overrides.{name}" for name in FIELDS)


def section_of(field: FieldInfo) -> type[Section] | None:
    options = (field.annotation, *get_args(field.annotation))
    return next((option for option in options if isinstance(option, type) and issubclass(option, Section)), None)
