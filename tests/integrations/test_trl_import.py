"""What the adapter asks of the installation, told before anything else can go wrong. Needs no TRL."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_kernels.integrations.versions import TRL, VERL, VLLM, Supported, require

ADAPTED = Supported("trl", "1.16", "1.17")


def test_the_package_imports_no_trainer() -> None:
    code = "import sys, dapo_kernels; print(sorted({'trl', 'verl', 'transformers', 'peft'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("installed", ["1.15.9", "1.17.0", "2.0.0.dev0", "0.24"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    message = rf"adapter .*trl >= 1.16, < 1.17.* {installed}: pip install 'trl>=1.16,<1.17'"
    with pytest.raises(ImportError, match=message):
        require("adapter", ADAPTED)


@pytest.mark.parametrize("installed", ["1.16", "1.16.0", "1.16.3", "1.16.1.dev0"])
def test_supported_versions_pass(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    require("adapter", ADAPTED)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'trl>=1.16,<1.17'"):
        require("adapter", ADAPTED)


def test_the_extras_install_what_is_supported() -> None:
    extras = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for supported in (*TRL, *VERL, *VLLM):
        assert re.search(rf'"{re.escape(supported.requirement)}[";]', extras), supported


def test_no_upper_end_is_none_at_all() -> None:
    supported = Supported("vllm", "0.32")
    assert not supported.covers("0.31.9")
    assert all(supported.covers(version) for version in ("0.32", "0.32.0+cpu", "0.40.1", "1.0"))


def test_a_package_that_pip_knows_nothing_of_is_refused_by_name() -> None:
    with pytest.raises(ImportError, match=r"pip install 'json>=1\.0,<2'"):
        require("adapter", Supported("json", "1.0", "2"))
