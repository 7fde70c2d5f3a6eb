"""`dapo report`: the curves of a run as one picture and where the time of a step went, or a page of several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dapo_runner.errors import ConfigError
from dapo_runner.logging.metrics import TIMINGS_FILE, read_log
from dapo_runner.logging.report import write_report
from dapo_runner.timing import PHASES, time_split
from dapo_runner.tools.page.html import write_page


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if len(options.run) > 1 and not options.html:
        raise ConfigError(f"--html: expected for several runs, which a picture has no room for, got {len(options.run)}")
    try:
        if options.html:
            print(f"page: {write_page(options.run, options.out, options.max_mb)}")
            return 0
        (folder,) = options.run
        picture = write_report(folder, options.out)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    _print_time_split(folder)
    print(f"picture: {picture}")
    return 0


def _print_time_split(run: Path) -> None:
    split = time_split(read_log(run / TIMINGS_FILE)) if (run / TIMINGS_FILE).is_file() else []
    if not split:
        return
    table = Table(title=f"a step took {sum(item.seconds for item in split):.2f} s", title_justify="left")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for item in split:
        table.add_row(item.phase, f"{item.seconds:.3f}", f"{item.share:.1%}", PHASES.get(item.phase, ""))
    Console().print(table)
