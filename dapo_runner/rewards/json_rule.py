"""Answers that have to be JSON of a given form: jsonschema (the ``json`` extra) says whether they are.

A verdict's rule says what happened: `json-schema` compared, `none` no JSON in the response, `timeout` past
`reward.deadline`. Nothing is fetched: a schema may refer to itself and to the published drafts.
"""

from __future__ import annotations

import importlib.util
import json
import re
from functools import lru_cache
from typing import Any

from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.rewards.alarm import LateError, call_within
from dapo_runner.types import Verdict

SHOWN = 200  # characters of an extracted answer that are kept
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


class JsonRule:
    """Right where the last fenced block of a response, or all of it, is valid JSON under the schema: that of
    `reward.json_schema`, else the row's answer.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Raises ConfigError without jsonschema, or where the file holds no schema."""
        if importlib.util.find_spec("jsonschema") is None:
            raise ConfigError("reward.kind: 'json' needs the package jsonschema; pip install 'dapo-kernels[json]'")
        self.deadline = config.deadline
        self.schema: str | None = None
        if config.json_schema is not None:
            try:
                self.schema = config.json_schema.read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"reward.json_schema: expected a file: {error}") from error
            _validator(self.schema)

    def __call__(self, text: str, answer: str) -> Verdict:
        from referencing.exceptions import Unresolvable

        validator = _validator(self.schema or answer)
        fenced = _FENCED.findall(text)
        try:
            value = _parse(fenced[-1] if fenced else text)
            extracted = json.dumps(value, sort_keys=True, ensure_ascii=False)[:SHOWN]
            correct = bool(call_within(self.deadline, lambda: validator.is_valid(value)))
        except LateError:  # a pattern that backtracks, thousands of items to be unique
            return Verdict(correct=False, extracted=None, rule="timeout")
        except Unresolvable as error:
            raise ConfigError(f"reward json: expected a schema that is whole: {error}") from error
        except (ValueError, RecursionError):
            return Verdict(correct=False, extracted=None, rule="none")
        return Verdict(correct=correct, extracted=extracted, rule="json-schema")


def _parse(text: str) -> Any:
    """Raises ValueError and RecursionError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    """Raises ConfigError."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    try:
        content = json.loads(schema)
        kind = validator_for(content)
        kind.check_schema(content)
    except (ValueError, TypeError, SchemaError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"reward json: expected a JSON schema, got {schema[:80]!r}: {reason}") from error
    return kind(content, registry=EMPTY_REGISTRY)
