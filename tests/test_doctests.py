"""The examples in docstrings: every public function and class has one, and it runs as it stands."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import dapo_kernels
import dapo_runner
from dapo_kernels.integrations.torch import PolicyLoss

PUBLIC = [
    public
    for package in (dapo_kernels, dapo_runner)
    for name in package.__all__
    if callable(public := getattr(package, name))
]


@pytest.mark.parametrize("public", [*PUBLIC, PolicyLoss], ids=lambda public: public.__name__)
def test_the_example_runs(public: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)  # examples name files of the repository
    (found,) = doctest.DocTestFinder(recurse=False).find(public, public.__name__, globs={})
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0


@pytest.mark.parametrize(
    "name", [name for name in dapo_kernels.__all__ if inspect.isroutine(getattr(dapo_kernels, name))]
)
def test_a_public_function_has_every_section(name: str) -> None:
    function = getattr(dapo_kernels, name)
    sections = ["Args"] + ["Returns"] * (function is not dapo_kernels.use_backend) + ["Example"]
    found = re.findall(r"^(Args|Returns|Example):$", inspect.getdoc(function) or "", re.MULTILINE)
    assert found == sections


@pytest.mark.parametrize("name", ["trl", "verl"])
def test_the_examples_of_an_integration_run(name: str) -> None:
    module = pytest.importorskip(f"dapo_kernels.integrations.{name}", exc_type=ImportError)
    result = doctest.testmod(module)
    assert result.attempted
    assert result.failed == 0


def test_a_section_of_a_docstring_has_an_empty_line_above_it() -> None:
    """Without one, the API page shows the section as text."""
    run_on = []
    for package in (dapo_kernels, dapo_runner):
        for path in Path(package.__file__).parent.rglob("*.py"):
            nodes = [
                node
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module))
            ]
            found = {getattr(node, "name", path.name): ast.get_docstring(node) or "" for node in nodes}
            run_on += [name for name, text in found.items() if re.search(r"\S\n(Args|Returns|Raises|Example):\n", text)]
    assert run_on == []
