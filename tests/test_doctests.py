"""The examples in docstrings: every public function and class has one, and it runs as it stands."""

from __future__ import annotations

import doctest
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
