"""`dapo report`, `dapo watch`, `dapo show`: show the curves and rollouts of runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase
from rich.console import Console
from rich.table import Table

from dapo_runner.commands.output import print_utf8
from dapo_runner.errors import ConfigError
from dapo_runner.files import read_jsonl, to_jsonl
from dapo_runner.logging.metrics import TIMINGS_FILE
from dapo_runner.logging.report import write_report
from dapo_runner.logging.rollout_log import EVALUATIONS, ROLLOUTS
from dapo_runner.logging.show import find_steps, load_step, page, render_group
from dapo_runner.timing import PHASES, time_split
from dapo_runner.tools.page.html import write_page
from dapo_runner.tools.page.serve import open_server


def report(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Draw a picture of one run and print the time of each phase, or write a web page of several runs."""
    if len(options.run) > 1 and not options.html:
        raise ConfigError(f"RUN: expected one without --html, got {len(options.run)}. Add --html.")
    if not options.max_mb > 0:
        raise ConfigError(f"--max-mb: expected more than 0, got {options.max_mb}")
    formats, out = ["html"] if options.html else FigureCanvasBase.get_supported_filetypes(), options.out
    if out is not None and (out.suffix.lower()[1:] not in formats or out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out: expected a file ({', '.join(formats)}) in an existing folder, got {out}")
    if options.html:
        print(f"page: {write_page(options.run, out, options.max_mb)}")
        return 0
    (folder,) = options.run
    print(f"picture: {write_report(folder, out)}")
    _print_time_split(folder / TIMINGS_FILE)
    return 0


def _print_time_split(path: Path) -> None:
    split = time_split(read_jsonl(path)) if path.is_file() else {}
    if not (total := sum(split.values())):
        return
    table = Table("phase", "seconds", "share", "", title=f"a step took {total:.2f} s", title_justify="left")
    for phase, seconds in split.items():
        table.add_row(phase, f"{seconds:.3f}", f"{seconds / total:.1%}", PHASES.get(phase, ""))
    Console().print(table)


def watch(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    for folder in options.run:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder}: expected the folder of a run, got a file")
    try:
        server = open_server(options.run, options.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port: expected a free port, got {options.port}: {error}") from error
    print("http://{}:{}  (Ctrl-C stops the server, not the run)".format(*server.server_address), flush=True)
    for folder in options.run:
        if not folder.is_dir():
            print(f"{folder}: no run yet; the page shows it once it starts", flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


def show(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    console, what = Console(), EVALUATIONS if options.eval else ROLLOUTS
    if options.step is None and (options.group is not None or options.json):
        raise ConfigError("--group, --json: requires --step. Add it.")
    if options.step is None:
        steps = list(find_steps(options.run, what))
        console.print("steps:", *(steps if len(steps) <= 100 else (len(steps), "from", steps[0], "to", steps[-1])))
        return 0
    saved = load_step(options.run, options.step, what, options.group)
    if options.json:
        print_utf8(to_jsonl(saved.groups))
    elif options.group is not None:
        console.print(render_group(saved.groups[0], saved), soft_wrap=not console.file.isatty())
    else:
        page(saved, console)
    return 0
