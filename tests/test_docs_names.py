"""What the pages name exists: settings, metrics, and the code of snippets that no other test runs."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import yaml

from dapo_runner.config import Config, lay_settings, parse_config, read_recipe
from dapo_runner.config.algorithms import ALGORITHMS
from dapo_runner.config.commands import ConvertConfig, SftConfig, StudyConfig
from dapo_runner.config.reading import every_key
from docs.glossary import AREAS, is_documented

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KEYS = {key for root in (Config, SftConfig, StudyConfig, ConvertConfig) for key in every_key(root)}
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key}
NAMED = re.compile(rf"^(?:{'|'.join(sorted(SECTIONS))})(?:\.\w+)+")
IN_SETS = re.compile(r"^data\.eval\.\w+(\.(path|format|columns|subset|split|limit))?$")  # of a set with a name
OF_MODELS = {"model.config.logits_scaling", "model.lm_head.weight", "model.model"}  # of transformers
TESTED_BY_PARSING = ("server.md", "vllm.md", "algorithms.md")


def named_keys(text: str) -> set[str]:
    """Return the keys that stand alone or with a value in backticks, or as an override behind a command."""
    spans = re.findall(r"`([^`\n]+)`", text)
    overrides = [word for line in re.findall(r"^dapo .*$", text, re.MULTILINE) for word in line.split() if "=" in word]
    return {match[0] for span in (*spans, *overrides) for word in span.split() if (match := NAMED.match(word))}


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "verl.md"], ids=lambda path: path.name)
def test_settings_that_a_page_names_exist(path: Path) -> None:
    named = named_keys(path.read_text(encoding="utf-8"))
    assert {key for key in named if not IN_SETS.match(key)} <= KEYS | OF_MODELS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_metrics_that_a_page_names_exist(path: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(AREAS)})/[\w@./-]+)`", path.read_text(encoding="utf-8"))
    assert [name for name in named if not is_documented(name)] == []


def test_names_are_found() -> None:
    assert named_keys("`optimizer.lr: 1`, `loss.overrides.clip_high`\ndapo train x run.nmae=1\n") == {
        "optimizer.lr",
        "loss.overrides.clip_high",
        "run.nmae",
    }


def snippets(name: str, language: str) -> list[str]:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.+?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", TESTED_BY_PARSING)
def test_settings_of_a_snippet_are_accepted(name: str) -> None:
    """Those of the first snippet hold for the others."""
    first, *others = [yaml.safe_load(snippet) for snippet in snippets(name, "yaml")]
    raw = lay_settings(read_recipe(ROOT / "recipes" / "tiny.yaml"), first)
    for settings in ({}, *others):
        assert parse_config(lay_settings(raw, settings)).algorithm in ALGORITHMS


@pytest.mark.parametrize(("name", "package"), [("verl.md", "verl"), ("trl.md", "trl")])
def test_what_a_snippet_imports_exists(name: str, package: str) -> None:
    pytest.importorskip(package)
    imports = [
        node
        for snippet in snippets(name, "python")
        for node in ast.walk(ast.parse(snippet.replace("…", "...")))
        if isinstance(node, ast.ImportFrom)
    ]
    assert imports
    for node in imports:
        module = importlib.import_module(node.module or "")
        assert all(hasattr(module, alias.name) for alias in node.names)
