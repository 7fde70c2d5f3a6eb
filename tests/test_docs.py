"""The pages: generated ones are up to date, and all that a page names, links to or shows exists and is so."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from dapo_kernels import OBJECTIVES, Objective
from dapo_runner.cli import COMMANDS
from dapo_runner.config import Config, flatten, lay_settings, parse, read_recipe
from dapo_runner.config.algorithms import ALGORITHMS
from dapo_runner.config.commands import ConvertConfig, SftConfig, StudyConfig
from dapo_runner.config.reading import every_key, may_change
from dapo_runner.run.folder import is_among
from docs import loss_picture as picture
from docs.generate import PAGES
from docs.glossary import AREAS, is_documented

ROOT = Path(__file__).parent.parent
DOCS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = {"README.md": README, **DOCS}

KEYS = {key for root in (Config, SftConfig, StudyConfig, ConvertConfig) for key in every_key(root)}
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key}
NAMED = re.compile(rf"^(?:{'|'.join(sorted(SECTIONS))})(?:\.\w+)+")
IN_SETS = re.compile(r"^data\.eval\.\w+(\.(path|format|columns|subset|split|limit))?$")  # of a set with a name
OF_MODELS = {"model.config.logits_scaling", "model.lm_head.weight", "model.model", "model.eval"}  # of transformers


every_page = pytest.mark.parametrize("name", TEXTS)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def snippets(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.+?)^```", text, re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def named_keys(text: str) -> set[str]:
    """Return the keys that stand alone or with a value in backticks, or as an override behind a command."""
    spans = re.findall(r"`([^`\n]+)`", text)
    overrides = [word for line in re.findall(r"^dapo .*$", text, re.MULTILINE) for word in line.split() if "=" in word]
    return {match[0] for span in (*spans, *overrides) for word in span.split() if (match := NAMED.match(word))}


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert DOCS[name] == PAGES[name](), "run python -m docs.generate"


@every_page
def test_commands_and_their_options_exist(name: str) -> None:
    for line in re.findall(r"(?:^|[`/ ])dapo ((?:\w|-)+ [^`\n]*|\w+)", TEXTS[name], re.MULTILINE):
        command, *words = shlex.split(line.replace("'", "").replace('"', ""), comments=True) or [""]
        if command in COMMANDS:
            options = {option for names, _ in COMMANDS[command].arguments for option in names}
            assert {word.rstrip(".,;:)") for word in words if word.startswith("--")} <= options, line


@every_page
def test_links_files_and_modules_exist_and_lines_are_short(name: str) -> None:
    folder = ROOT if name == "README.md" else ROOT / "docs"
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(TEXTS[name])):
        if not link.startswith("http"):
            file, _, anchor = link.partition("#")
            target = folder / file if file else folder / name
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link
    folders = "benchmarks|csrc|dapo_kernels|dapo_runner|docs|examples|recipes|tests"
    files = re.findall(rf"(?<![\w/.])((?:{folders})/[\w./]+\.\w+)", TEXTS[name])
    modules = re.findall(r"python -m ((?:benchmarks|docs)\.[\w.]+)", TEXTS[name])
    files += [module.replace(".", "/") + ".py" for module in modules]
    assert [file for file in files if not (ROOT / file).exists()] == []
    prose = [line for line in without_code(TEXTS[name]).splitlines() if not line.startswith(("|", "![", "    "))]
    assert [line for line in prose if len(line) > 100] == []


@every_page
def test_settings_and_metrics_exist(name: str) -> None:
    if name != "verl.md":  # settings of verl
        assert {key for key in named_keys(TEXTS[name]) if not IN_SETS.match(key)} <= KEYS | OF_MODELS
    metrics = re.findall(rf"`((?:{'|'.join(AREAS)})/[\w@./-]+)`", TEXTS[name])
    assert [metric for metric in metrics if not is_documented(metric)] == []


def test_what_may_change_in_a_run_is_listed() -> None:
    part = DOCS["watching.md"].partition("## What may change in a run")[2].partition("Each change is a line")[0]
    listed = {name.removesuffix(".*") for name in part.split("`")[1::2]}
    assert listed <= KEYS
    for root in (Config, SftConfig):
        assert [key for key in every_key(root) if may_change(key, root) != is_among(key, listed)] == []


def test_the_index_lists_every_page() -> None:
    assert set(re.findall(r"\]\((\w[\w-]*\.md)\)", DOCS["index.md"])) == DOCS.keys() - {"index.md"}


def test_the_first_examples_run_as_they_stand() -> None:
    names: dict[str, object] = {}
    first = snippets(README, "python")[0]
    named = re.findall(r'for example `"(\w+)"`', README + DOCS["guide.md"])
    assert len(named) == 2
    others = [first.replace("mask=mask)", f'mask=mask, objective="{name}")') for name in named]
    for snippet in (first, *others, *snippets(DOCS["first-loss.md"], "python")):
        exec(snippet, names)  # the page compares the numbers itself
    assert isinstance(figures := names["figures"], dict)
    assert figures["clip_high"] > 0


def test_what_the_readme_shows_is_so() -> None:
    assert len(README.splitlines()) <= 150
    (recipe,) = snippets(README, "yaml")
    tiny = (ROOT / "recipes/tiny.yaml").read_text(encoding="utf-8")
    shown, whole = (flatten(yaml.safe_load(text)) for text in (recipe, tiny))
    assert shown.items() <= whole.items()
    (path,) = re.findall(r"\]\((benchmarks/results/full-\S+)\.md\)", README)
    records = json.loads((ROOT / f"{path}.json").read_text(encoding="utf-8"))["records"]
    sides = picture.sides(records, "hidden bfloat16 N=2048 V=49152 H=576")
    cells = {(f"{float(time):.2f}", mib) for time, mib in re.findall(r"\| ([\d.]+) \| (\d+) MiB \|", README)}
    assert len(cells) == 6
    assert cells <= {(f"{time:.2f}", f"{mib:.0f}") for _, time, mib in sides}


def test_gpu_figures_of_the_readme_are_measured() -> None:
    measured: dict[tuple[str, str], tuple[float, float]] = {}
    shapes = {"logits": "logits bfloat16 N=8192 V=151936", "hidden": "hidden bfloat16 N=8192 V=151936 H=4096"}
    for level, shape in shapes.items():
        (linked,) = re.findall(rf"\]\((benchmarks/results/gpu-{level}\S+)\.md\)", README)
        path = ROOT / f"{linked}.json"
        (record,) = [one for one in json.loads(path.read_text(encoding="utf-8"))["records"] if one["config"] == shape]
        for row in record["rows"]:
            if row["status"] == "ok":
                measured[level, row["name"]] = row["median_ms"], row.get("peak_extra_bytes", 0) / 2**30
    names = {
        "**dapo_kernels**": ("dapo_kernels, new gradient", "dapo_kernels"),
        "**dapo_kernels**, in place": ("dapo_kernels", None),
        "Liger's GRPO loss, in place": ("Liger GRPO, Triton", None),
        "TRL's log-probs (from hidden states: chunked)": ("TRL selective_log_softmax", "TRL chunked log-probs"),
        "`torch.compile`": ("torch.compile", "torch.compile"),
        "eager PyTorch, softmax in bfloat16": ("eager", "eager"),
    }
    row = r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) ?\| ([\d.]*) ?\|$"
    rows = re.findall(row, README, re.MULTILINE)
    assert [name for name, *_ in rows] == list(names)
    for name, ms, gib, hidden_ms, hidden_gib in rows:
        shown = [("logits", names[name][0], ms, gib), ("hidden", names[name][1], hidden_ms, hidden_gib)]
        for level, side, time, memory in shown:
            if side is not None:
                assert float(time) == pytest.approx(measured[level, side][0], rel=5e-3)
                assert float(memory) == pytest.approx(measured[level, side][1], abs=0.051)
    (exact,) = re.findall(r"eager takes\s+([\d.]+) and ([\d.]+) ms", README)
    slow = [measured[level, "eager, softmax in fp32"][0] for level in shapes]
    assert list(map(float, exact)) == pytest.approx(slow, rel=5e-3)
    (lean,) = re.findall(r"cut-cross-entropy ([\d.]+) \(([\d.]+) GiB\)", README)
    assert tuple(map(float, lean)) == pytest.approx(measured["hidden", "cut-cross-entropy"], rel=5e-3, abs=0.051)


def test_the_table_of_objectives_is_that_of_the_code() -> None:
    row = r"^\| `(\w+)` \| (\w+) \| (.*?) ?\| (.*?) ?\| ([\w-]+) \|(.*?)\| \S.*\|$"
    cells = re.findall(row, DOCS["objectives.md"], re.MULTILINE)
    assert [name for name, *_ in cells] == list(OBJECTIVES)
    for name, surrogate, clip, ratio, aggregate, others in cells:
        own, bounds = OBJECTIVES[name], re.fullmatch(r"([\d.e-]+) / ([\d.e-]+)", clip)
        low, high = map(float, bounds.groups()) if bounds else (own.clip_low, own.clip_high)
        shown = {key: ast.literal_eval(value) for key, value in re.findall(r"`(\w+)=(.+?)`", others)}
        for estimator, to, coef in re.findall(r"(k\d) KL(?: to the (old) policy)?, ([\d.]+)", others):
            shown |= {"kl_estimator": estimator, "kl_to": to or "reference", "kl_coef": float(coef)}
        assert Objective(surrogate, ratio or "token", low, high, aggregate=aggregate, paper=own.paper, **shown) == own


@pytest.mark.parametrize("name", ["server.md", "vllm.md", "algorithms.md"])
def test_settings_of_a_snippet_are_accepted(name: str) -> None:
    """Those of the first snippet hold for the others."""
    first, *others = [yaml.safe_load(snippet) for snippet in snippets(DOCS[name], "yaml")]
    raw = lay_settings(read_recipe(ROOT / "recipes" / "tiny.yaml"), first)
    for settings in ({}, *others):
        assert parse(lay_settings(raw, settings), Config).algorithm in ALGORITHMS


@pytest.mark.parametrize("package", ["verl", "trl"])
def test_what_a_snippet_imports_exists(package: str) -> None:
    pytest.importorskip(package)
    trees = [ast.parse(snippet.replace("…", "...")) for snippet in snippets(DOCS[f"{package}.md"], "python")]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        module = importlib.import_module(node.module or "")
        assert all(hasattr(module, alias.name) for alias in node.names)
