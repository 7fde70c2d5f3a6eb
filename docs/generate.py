"""Write the generated pages, docs/cli.md, docs/metrics.md and docs/settings.md: ``python -m docs.generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from dapo_runner.cli import COMMANDS, VERSION, Command
from docs import glossary, settings_reference

CLI_HEADER = """\
# Commands

Look up any command of `dapo`: what it does, its arguments and its options. A command that shows
`section.key=value` in its usage line takes overrides of [any setting](settings.md).

Prerequisites: the package with the extra `runner` ([install](../README.md#install)).

This page is generated: `python -m docs.generate`.
"""


def cli_page() -> str:
    """Return the text of docs/cli.md."""
    sections = (part for name, command in COMMANDS.items() for part in _section(name, command))
    return "\n".join([CLI_HEADER, "## `dapo`\n", *_table([_row(*VERSION)]), *sections])


def _section(name: str, command: Command) -> Iterator[str]:
    rows = [_row(names, options) for names, options in command.arguments]
    positional = command.takes or " ".join(_spell(n, o) for n, o in command.arguments if not n[0].startswith("-"))
    usage = f"dapo {name} {positional}".strip() + " [options]" * any(row.startswith("| `-") for row in rows)
    yield f"## `dapo {name}`\n\n{_sentence(command.help)}\n"
    yield f"```\n{usage}{' [section.key=value …]' * bool(command.takes)}\n```\n"
    yield from _table(rows)


def _table(rows: list[str]) -> Iterator[str]:
    if rows:
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows, ""])


def _spell(names: tuple[str, ...], options: dict[str, object]) -> str:
    name = str(options.get("metavar") or names[0].upper())
    return {"+": f"{name} …", "?": f"[{name}]"}.get(str(options.get("nargs")), name)


def _row(names: tuple[str, ...], options: dict[str, object]) -> str:
    is_option, required = names[0].startswith("-"), " Required." if options.get("required") else ""
    name = f"{', '.join(names)} {options.get('metavar', '')}".strip() if is_option else _spell(names, options)
    return f"| `{name}` | {_sentence(str(options['help']))}{required} |"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "metrics.md": glossary.page,
    "settings.md": settings_reference.page,
}

if __name__ == "__main__":
    for file, page in PAGES.items():
        (Path(__file__).parent / file).write_text(page(), encoding="utf-8")
