"""Output shared by several commands. This module imports no package of the runner."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress

INTERRUPTED = 130  # exit code


def complain(text: str) -> None:
    """Print one line to standard error. If several ranks have the same line, rank 0 prints it, or one with its name.
    Where the ranks have no store to agree, each prints it.
    """
    if "RANK" in os.environ:
        from dapo_runner.parallel.watch import Watch

        if not Watch().is_first_to_print(text):
            return
    rank = "" if os.environ.get("RANK", "0") == "0" else f"rank {os.environ['RANK']}: "
    print(f"dapo: {rank}{text}", file=sys.stderr, flush=True)


def share_warnings() -> None:
    """Print the Python warnings of all ranks with ``complain``."""
    import dapo_runner.parallel.watch  # noqa: F401  before any warning: torch's import may raise the first one

    warnings.showwarning = lambda text, kind, file, line, *_: complain(f"{file}:{line}: {kind.__name__}: {text}")


def quiet_libraries() -> None:
    """Turn off the progress bars and warnings of libraries, which would break the progress display."""
    # The trainer divides by numbers of responses. In a small micro-batch they may equal the number of tokens.
    warnings.filterwarnings("ignore", ".* denominator equals the number of live tokens", UserWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def print_utf8(content: bytes) -> None:
    """Print text in UTF-8, whatever the locale."""
    with suppress(AttributeError, OSError):  # as in `main`
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print(content.decode(errors="replace"), end="")


def print_rows(rows: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    table = Table("", Column(overflow="fold"), box=None, show_header=False)
    for label, text in rows.items():
        table.add_row(label, text)
    Console(markup=False, emoji=False).print(table)


def print_evaluations(title: str, columns: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table of metrics with one column per evaluation; nothing without an evaluation."""
    from rich.console import Console
    from rich.table import Column, Table

    if not columns:
        return
    print(title)  # not as the table's title, which is truncated to its width
    table = Table("", *(Column(heading, justify="right") for heading in columns))
    for key in dict.fromkeys(key for column in columns.values() for key in column):
        if key.startswith("eval/"):
            shown = (_figure(key, column[key]) if key in column else "" for column in columns.values())
            table.add_row(key.removeprefix("eval/"), *shown)
    Console(markup=False, emoji=False).print(table)


def _figure(key: str, value: float) -> str:
    name = key.rpartition("/")[2]
    if "@" in name or name in ("truncated", "no_answer"):
        return f"{value:.1%}"
    if name.startswith("reward"):
        return f"{value:+.3f}"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"
