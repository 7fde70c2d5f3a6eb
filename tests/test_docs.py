"""The pages: generated ones are up to date, commands that they name exist, and so does what they link to."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from dapo_runner.cli import COMMANDS
from dapo_runner.config import flatten
from docs import loss_picture as picture
from docs.generate import PAGES

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = ("settings.md", "metrics.md", "cli.md")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert text_of(ROOT / "docs" / name) == PAGES[name](), "run python -m docs.generate"


def test_every_command_and_option_has_a_row() -> None:
    page = text_of(ROOT / "docs/cli.md")
    sections = dict(re.findall(r"^## `dapo (\S+)`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert sections.keys() == COMMANDS.keys()
    for name, section in sections.items():
        options = {option for names, _ in COMMANDS[name].arguments for option in names if option.startswith("-")}
        assert set(re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE)) == options


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_on_a_page_exist(path: Path) -> None:
    for line in re.findall(r"(?:^|[`/ ])dapo ((?:\w|-)+ [^`\n]*|\w+)", text_of(path), re.MULTILINE):
        command, *words = shlex.split(line.replace("'", "").replace('"', ""), comments=True) or [""]
        if command in COMMANDS:
            options = {option for names, _ in COMMANDS[command].arguments for option in names}
            assert {word.rstrip(".,;:)") for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(path))):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(text_of(target)), link


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_prose_has_short_lines(path: Path) -> None:
    if path.name not in GENERATED:
        lines = without_code(text_of(path)).splitlines()
        assert [line for line in lines if len(line) > 100 and not line.startswith(("|", "![", "    "))] == []


def test_the_readme_is_short_and_leaves_allocators_to_the_page_of_performance() -> None:
    text = text_of(ROOT / "README.md")
    assert len(text.splitlines()) <= 150
    assert "allocator" not in text


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\((\w[\w-]*\.md)\)", text_of(ROOT / "docs/index.md")))
    assert listed == {path.name for path in FILES} - {"README.md", "index.md"}


def test_the_first_loss_runs_from_top_to_bottom() -> None:
    names: dict[str, object] = {}
    for snippet in re.findall(r"```python\n(.+?)```", text_of(ROOT / "docs/first-loss.md"), re.DOTALL):
        exec(snippet, names)  # the page compares the numbers itself


def test_the_recipe_of_the_readme_is_part_of_the_tiny_one() -> None:
    (snippet,) = re.findall(r"```yaml\n(.+?)```", text_of(ROOT / "README.md"), re.DOTALL)
    shown, whole = (flatten(yaml.safe_load(text)) for text in (snippet, text_of(ROOT / "recipes/tiny.yaml")))
    assert shown.items() <= whole.items()


def test_the_table_of_the_readme_has_the_numbers_of_its_file() -> None:
    text = text_of(ROOT / "README.md")
    (path,) = re.findall(r"\]\((benchmarks/results/full-\S+)\.md\)", text)
    records = json.loads(text_of(ROOT / f"{path}.json"))["records"]
    measured = {
        f"{time:.2f} | {mib:.0f} MiB" for _, time, mib in picture.sides(records, "hidden bfloat16 N=2048 V=49152 H=576")
    }
    shown = {f"{float(time):.2f} | {mib} MiB" for time, mib in re.findall(r"\| ([\d.]+) \| (\d+) MiB \|", text)}
    assert len(shown) == 6
    assert shown <= measured


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_and_modules_on_a_page_exist(path: Path) -> None:
    text = text_of(path)
    folders = "benchmarks|csrc|dapo_kernels|dapo_runner|docs|examples|recipes|tests"
    files = re.findall(rf"(?<![\w/.])((?:{folders})/[\w./]+\.\w+)", text)
    modules = [
        module.replace(".", "/") + ".py" for module in re.findall(r"python -m ((?:benchmarks|docs)\.[\w.]+)", text)
    ]
    missing = [name for name in (*files, *modules) if not (ROOT / name).exists()]
    assert missing == []


LOOKED_UP = ("api.md", "cli.md", "metrics.md", "objectives.md", "settings.md", "index.md")
OWN_PAGES = [path for path in FILES if path.name not in (*LOOKED_UP, "README.md")]


@pytest.mark.parametrize("path", OWN_PAGES, ids=lambda path: path.name)
def test_a_page_says_what_you_can_do_after_it_and_what_it_takes(path: Path) -> None:
    _, opener, *others = text_of(path).split("\n\n")
    assert re.match(r"After (reading this page|this tutorial) you can\b", opener.replace("\n", " "))
    assert any(part.startswith("Prerequisites: ") for part in others[:3])


@pytest.mark.parametrize("name", LOOKED_UP)
def test_a_reference_page_says_what_can_be_looked_up(name: str) -> None:
    assert re.match(r"(Look up|Find) ", text_of(ROOT / "docs" / name).split("\n\n")[1])
