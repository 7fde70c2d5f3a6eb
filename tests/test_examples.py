"""The examples: that they run, learn, and need no more than they say."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported(name: str) -> set[str]:
    """Top-level names of the packages a file imports."""
    nodes = list(ast.walk(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {package.split(".")[0] for package in plain | named}


def test_plain_loop_needs_three_packages() -> None:
    assert imported("plain_loop") - {"__future__"} == {"torch", "transformers", "dapo_kernels"}


def test_plain_loop_learns() -> None:
    """From guessing (0.09) to half of the digits right within 40 steps; 150 get to 0.86 and above (seeds 0 to 3)."""
    rewards = load("plain_loop").train(steps=40)
    assert rewards[0] < 0.15
    assert rewards[-1] > 0.4
