"""What a person sees of several commands."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table


def print_evaluations(console: Console, title: str, columns: dict[str, dict[str, float]]) -> None:
    """A column of figures for each evaluation; nothing where there is none."""
    if not columns:
        return
    print(title)  # not the table's own title, which is cut to its width
    table = Table()
    table.add_column("")
    for heading in columns:
        table.add_column(heading, justify="right")
    for key in next(iter(columns.values())):
        if key.startswith("eval/"):
            shown = [_figure(key, column[key]) if key in column else "" for column in columns.values()]
            table.add_row(key.removeprefix("eval/"), *shown)
    console.print(table)


def _figure(key: str, value: float) -> str:
    figure = key.rpartition("/")[2]
    if "@" in figure or figure in ("truncated", "no_answer"):
        return f"{value:.1%}"
    if figure.startswith("reward"):
        return f"{value:+.3f}"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def quiet_libraries() -> None:
    """Loading bars and advice of the libraries would tear the progress display."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
