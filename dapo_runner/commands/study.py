"""`dapo study`: run what is missing of a study and write its page."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

from dapo_runner.commands.output import complain, quiet_libraries
from dapo_runner.commands.recipes import find_recipe, studies
from dapo_runner.config import Config, ConfigError, StudyConfig, parse, read_recipe
from dapo_runner.interrupt import end_with_parent
from dapo_runner.parallel.world import make_layout
from dapo_runner.preflight.dry_run import departures
from dapo_runner.preflight.needs import check_needs
from dapo_runner.run.folder import lock_folder
from dapo_runner.tools.study.page import check_page, write_page
from dapo_runner.tools.study.results import Result, read_result
from dapo_runner.tools.study.runs import Failure, StudyRun, carry_out, is_finished, make_start, plan_runs, plan_starts


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    path = find_recipe(options.config, known=studies())
    study = parse(read_recipe(path), StudyConfig)
    if options.check is not None:
        changes = check_page(study, options.check)
        print("\n".join(changes) or f"{options.check.with_suffix('.md')}: the same page follows from {options.check}")
        return 1 if changes else 0
    jobs = max(1, len(os.sched_getaffinity(0)) // study.threads) if options.jobs is None else options.jobs
    if jobs < 1:
        raise ConfigError(f"--jobs: expected 1 or more, got {jobs}")
    base = neighbor if (neighbor := path.parent / study.base).is_file() else find_recipe(study.base)
    runs, starts = plan_runs(study, base), plan_starts(study, base)
    if starts and read_recipe(base).get("model", {}).get("path"):
        raise ConfigError(f"{min(starts)}: expected a start model, found none. The recipe's first lines show how.")
    configs = {planned.variant: _before_start(planned.config, starts) for planned in runs}
    for config in configs.values():
        check_needs(config, make_layout(config, 1, 1))
    waiting = [planned for planned in runs if not is_finished(planned)]
    print(
        f"{study.folder}: {len(study.variants)} variants × {len(study.seeds)} seeds, {len(runs) - len(waiting)} of "
        f"{len(runs)} runs done, {jobs} at the same time"
    )
    if options.dry_run:
        for variant, config in configs.items():
            print(f"  {variant}: algorithm {config.algorithm}, departures: {', '.join(departures(config)) or 'none'}")
        return 0
    quiet_libraries()
    study.folder.mkdir(parents=True, exist_ok=True)
    with closing(lock_folder(study.folder_of_runs, print)):
        if starts:  # the pool requires semaphores, which some systems lack
            with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), end_with_parent) as pool:
                for note in pool.map(make_start, starts, starts.values()):
                    print(note, flush=True)
        return _carry_out(study, runs, waiting, jobs)


def _before_start(config: Config, starts: Mapping[Path, Config]) -> Config:
    """Return the configuration with the model and data of its start run, if that has not been trained yet."""
    if (start := starts.get(Path(config.model.path or ""))) is None:
        return config
    model = config.model.model_copy(update={"path": None, "tiny": start.model.tiny})
    return config.model_copy(update={"model": model, "data": start.data})


def _last_value(result: Result) -> str:
    value = result.values(0.0)["after"]
    return f"{value:{'.1%' if '@' in result.metric else '.3f'}}" if value is not None else "no accuracy measured"


def _carry_out(study: StudyConfig, runs: Sequence[StudyRun], waiting: Sequence[StudyRun], jobs: int) -> int:
    failures: list[Failure] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the runs under way save their step
    started, n_before = time.monotonic(), len(runs) - len(waiting)
    try:
        with closing(carry_out(waiting, jobs)) as ended:
            for n, (run, seconds, failure) in enumerate(ended, start=1):
                if failure is not None:
                    failures.append(failure)
                result = failure.reason if failure else _last_value(read_result(run))
                left = (len(waiting) - n) * (time.monotonic() - started) / n
                place = f"[{n_before + n}/{len(runs)}] {run.variant}, seed {run.seed}"
                print(f"{place}: {result}, {seconds:.0f} s; about {left / 60:.0f} min left", flush=True)
    finally:
        results = [read_result(planned) for planned in runs if is_finished(planned)]
        print(f"page: {write_page(study, results, failures)}")
    for failure in failures:
        complain(f"{failure.run.variant}, seed {failure.run.seed}: {failure.reason}. Full output: {failure.run.log}")
    return 1 if failures else 0
