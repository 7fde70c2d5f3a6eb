"""A whole run in a second or two: the tiny recipe, shrunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_runner.cli import main
from dapo_runner.config import Config, parse
from dapo_runner.files import read_jsonl
from dapo_runner.logging.progress import Progress

SEGMENTS = {
    "chain": ["advantage.segments={kind: chain, interval: 2, samples: 3}", "sampler.filter_groups=null"],
    "tree": ["advantage.segments={kind: tree, tokens: 3, per_step: 2}"],
}


def small_recipe(**run: Any) -> dict[str, Any]:
    """One-digit sums, a model of a few thousand weights, no warm-up worth the name. Not meant to learn
    anything.
    """
    return {
        "run": {"name": "small", "steps": 4, "eval_every": 2, "save_every": 1, "threads": 1, "keep": 2, **run},
        "model": {
            "dtype": "float32",
            "tiny": {
                "hidden_size": 32,
                "heads": 2,
                "intermediate_size": 32,
                "warmup": {"steps": 90, "batch_size": 32, "examples": 40, "lr": 5e-3},
            },
        },
        "data": {
            "format": "arithmetic",
            "template": "{question}=",
            "arithmetic": {"max_digits": 1, "train_size": 60},
            "eval_size": 10,
        },
        "rollout": {"group_size": 4, "max_prompt_tokens": 8, "max_response_tokens": 16},
        "sampler": {"prompts_per_step": 4, "max_rounds": 3, "on_exhausted": "train_partial"},
        "reward": {"overlong": {"cache_length": 4}},
        "optimizer": {"lr": 1e-3, "warmup_steps": 2, "mini_batch_size": 8, "token_budget": 64},
        "evaluation": {"k": 2, "top_p": 1.0},
        "logging": {"progress": "plain"},
    }


def recipe_in(folder: Path, start: Path | None = None, /, **sections: Any) -> dict[str, Any]:
    """The small recipe with its output in ``folder``, from the model ``start`` or one that it warms up itself."""
    raw = small_recipe(output_dir=str(folder))
    if start is not None:
        raw["model"] = {"dtype": "float32", "path": str(start)}
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values if isinstance(values, dict) else values
    return raw


def config_in(folder: Path, start: Path | None = None, /, **sections: Any) -> Config:
    return parse(recipe_in(folder, start, **sections), Config)


def write_recipe(folder: Path, start: Path | None = None, /, **run: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(recipe_in(folder / "runs", start, run=run)))
    return path


class Notes(Progress):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class AtPhase(Notes):
    """Calls a function when a phase of a run (`dapo_runner.timing`) begins for the ``call``-th time."""

    def __init__(self, name: str, call: int, function: Callable[[], None]) -> None:
        super().__init__()
        self.name, self.left, self.function = name, call, function

    def phase(self, name: str) -> None:
        self.left -= name == self.name
        if name == self.name and self.left == 0:
            self.function()


class Dapo:
    """The command `dapo`. What it printed last is in ``out`` and ``err``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.code, self.out, self.err = capsys, 0, "", ""

    def __call__(self, *arguments: object, code: int | None = 0) -> str:
        self._capsys.readouterr()
        self.code = main([str(argument) for argument in arguments])
        self.out, self.err = self._capsys.readouterr()
        assert code in (None, self.code), self.err
        return self.out

    def refuses(self, names: str, *arguments: object, code: int = 2) -> str:
        """Return the line that it refuses with: of ``key: part``, it opens with the key and has the part."""
        self(*arguments, code=code)
        (line,) = [line for line in self.err.splitlines() if line.startswith("dapo: ")]
        key, _, part = names.partition(": ")
        assert line.startswith(f"dapo: {key}: "), line
        assert part in line.removeprefix(f"dapo: {key}: "), line
        return line


def events_of(run: Path, kind: str = "step", file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The events of one kind in a run's log."""
    return [event for event in read_jsonl(run / file) if event["kind"] == kind]


def steps_of(run: Path, key: str) -> list[Any]:
    """A metric of each step; None where it was not logged."""
    return [event.get(key) for event in events_of(run)]
