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
from dapo_kernels.objectives.unknown import ELSEWHERE as FIELDS_ELSEWHERE
from dapo_runner.config.section import MAY_CHANGE, Section, Unquoted, problems_of, read_plain, set_key
from dapo_runner.config.settings import Config
from dapo_runner.config.training import LossConfig
from dapo_runner.errors import ConfigError

CONFIG_FILE = "config.yaml"  # in the folder of a run
ELSEWHERE = {  # the names of settings in TRL and verl, and in earlier versions
    "env.timeout": ("timeout_seconds",),
    "loss.objective": ("loss_type", "loss_mode"),
    "optimizer.lr": ("learning_rate",),
    "optimizer.mini_batch_size": ("ppo_mini_batch_size", "generation_batch_size", "steps_per_generation"),
    "optimizer.token_budget": ("gradient_accumulation_steps", "per_device_train_batch_size", "micro_batch_size"),
    "reward.timeout": ("deadline",),
    "rollout.group_size": ("num_generations", "n"),
    "rollout.max_prompt_tokens": ("max_prompt_length",),
    "rollout.max_response_tokens": ("max_completion_length", "max_response_length", "max_new_tokens"),
    "rollout.server.response_timeout": ("answer_within",),
    "rollout.server.sync_timeout": ("sync_within",),
    "run.steps": ("max_steps", "num_train_epochs", "epochs", "total_epochs", "total_training_steps"),
    "sampler.prompts_per_step": ("batch_size", "train_batch_size"),
}
QUOTE = "Quote a text twice: key='\"a: #b\"'"
C = TypeVar("C", bound=Section)


class _Loader(yaml.SafeLoader):
    """Read every value but null as text; its setting then parses it. YAML 1.1 itself would read `off` as False, 12:30
    as 750, 007 as 7 and 1e-4 as text. A repeated key in a section is an error.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"duplicate key {name} in line {lines[name]} and line {line}. Merge the two.")
            lines[name] = line
        return node


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return node.value if node.style else Unquoted(node.value)


_Loader.add_constructor("tag:yaml.org,2002:str", _construct_text)
_KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Quote every text that ``_Loader`` would read as a number or a switch."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if read_plain(Unquoted(text)) == text else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Return the configuration of a YAML file, with ``key=value`` overrides applied.

    Raises ConfigError with one line per problem: the key, what was expected, what it got.

    Example:
        >>> from dapo_runner import load_config
        >>> config = load_config("recipes/tiny.yaml", ["optimizer.lr=1e-4"])
        >>> config.optimizer.lr, config.rollout.group_size
        (0.0001, 16)
    """
    return parse(apply_overrides(read_recipe(path), overrides), Config)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Return the sections of a YAML file, not validated. Raises ConfigError."""
    if not (path := Path(path)).is_file():
        raise ConfigError(f"{path}: expected a YAML file, found {'a folder' if path.is_dir() else 'nothing'}")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}  # a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected valid YAML, got an error: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections such as 'model:' at the top, got a {type(raw).__name__}")
    return raw


def parse(raw: Mapping[str, Any], kind: type[C]) -> C:
    """Validate nested dicts, as read from YAML, as ``kind``. Raises ConfigError."""
    try:
        section = kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, kind) for item in error.errors())) from error
    check_config(section)
    return section


def check_config(config: Section) -> None:
    """Raise ConfigError if settings are not supported together."""
    if problems := problems_of(config):
        raise ConfigError("\n".join(problems))


def dump_config(config: Section) -> str:
    """Return the whole configuration as YAML, defaults included. ``load_config`` reads back an equal configuration."""
    values = config.model_dump(mode="json", by_alias=True)
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return ``raw`` with `section.key=value` (`--section.key=value`, `--section.key value`) set.

    Values are YAML: `true`, `null`, `[1, 2]` mean the same as in the file.
    """
    merged, items = copy.deepcopy(dict(raw)), iter(overrides)
    for item in items:
        key, equals, text = item.removeprefix("--").partition("=")
        if not equals and item.startswith("--"):
            text = equals = next(items, "")
        if not equals or not key:
            raise ConfigError(f"{item}: expected key=value, e.g. optimizer.lr=1e-5")
        try:
            value = yaml.load(text, _Loader)  # a safe loader
            is_text = isinstance(value, Unquoted | None) and isinstance(read_plain(value), str | None)
            if is_text and re.search(r"(^|\s)#", text):
                raise ValueError("' #' begins a comment")
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{key}: expected a YAML value, got {text!r}: {error}. {QUOTE}") from error
        set_key(merged, key, value)
    return merged


def _explain(item: Any, kind: type[Section]) -> str:
    """Return a pydantic error as `key: expected …, got …`."""
    location = tuple(str(part) for part in item["loc"])
    key, known = ".".join(location), _fields_of(location[:-1], kind)
    if item["type"] == "extra_forbidden":
        named = ELSEWHERE | {f"loss.overrides.{field}": names for field, names in FIELDS_ELSEWHERE.items()}
        near = [one for one in every_key(kind) if location[-1] in (one.split(".")[-1], *named.get(one, ()))]
        near = near or difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        return f"{key}: unknown key; {hint}known keys here: {', '.join(known)}"
    if item["type"] == "missing":
        return f"{key}: expected a value, got nothing"
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}"
    null = "null or " if (field := known.get(location[-1])) and type(None) in get_args(field.annotation) else ""
    expected = f"{key}: expected {null}{item['msg'].removeprefix('Input should be ')}, got {item['input']!r}"
    if item["type"] == "string_type" and isinstance(item["input"], dict):
        return f"{expected}. A text with ': ' or {{ at its start needs quotes, two pairs in a shell"
    return expected


def _fields_of(section: tuple[str, ...], node: type[Section]) -> dict[str, FieldInfo]:
    for name in section:
        if name in node.model_fields:  # else a key of a mapping of sections, or an index of a list of them
            node = section_of(node.model_fields[name]) or node
    return {field.alias or name: field for name, field in node.model_fields.items()}


def every_key(node: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key, including the fields of an objective."""
    for name, field in node.model_fields.items():
        nested, place = section_of(field), f"{prefix}{field.alias or name}"
        yield place
        if nested is not None and get_origin(field.annotation) not in (dict, list):
            yield from every_key(nested, f"{place}.")
    if node is LossConfig:
        yield from (f"{prefix}overrides.{name}" for name in FIELDS)


def may_change(key: str, node: type[Section]) -> bool:
    """Return whether a setting, or a section that it is in, is marked with ``MayChange``."""
    name, _, below = key.partition(".")
    if (field := node.model_fields.get(name)) is None:
        return False
    return MAY_CHANGE in field.metadata or ((nested := section_of(field)) is not None and may_change(below, nested))


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section type of a field, also if it is in a list or a mapping; None for a plain value."""
    options = (field.annotation, *get_args(field.annotation))
    return next((option for option in options if isinstance(option, type) and issubclass(option, Section)), None)
