"""Recipes and runs of `dapo sft` for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from small import Notes

from dapo_runner.config import SftConfig, parse
from dapo_runner.files import read_jsonl
from dapo_runner.tools.sft.run import sft


def recipe_of(model: Path, path: Path, /, **sections: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "run": {
            "name": "s",
            "output_dir": str(path.parent / "runs"),
            "epochs": 2,
            "eval_every": 4,
            "save_every": 3,
            "threads": 1,
        },
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(path), "max_tokens": 32, "eval_size": 10},
        "optimizer": {"lr": 5e-3, "warmup_steps": 2, "mini_batch_size": 16, "token_budget": 64},
        "logging": {"progress": "plain"},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return raw


def write_sft_recipe(model: Path, path: Path, recipe: Path, /, **sections: Any) -> Path:
    recipe.write_text(yaml.safe_dump(recipe_of(model, path, **sections)))
    return recipe


def run(model: Path, path: Path, /, **sections: Any) -> Path:
    return sft(parse(recipe_of(model, path, **sections), SftConfig), Notes())


def steps_of(folder: Path, key: str) -> list[float]:
    return [event[key] for event in read_jsonl(folder / "metrics.jsonl") if key in event]
