"""`dapo study`: the runs of a study that are not done yet, and its page."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import torch

from dapo_runner.commands.complain import complain
from dapo_runner.commands.output import quiet_libraries
from dapo_runner.commands.recipes import find_recipe, studies
from dapo_runner.config import Config, StudyConfig, dump_config, load_study
from dapo_runner.errors import ConfigError
from dapo_runner.folder import lock_folder
from dapo_runner.interrupt import end_with_parent
from dapo_runner.parallel.world import make_layout
from dapo_runner.preflight.needs import check_needs
from dapo_runner.run.tiny_model import ensure_tiny_model
from dapo_runner.tools.study.page import write_page
from dapo_runner.tools.study.plan import StudyRun, is_finished, jobs_of, plan_runs, plan_starts, recipe_of_start
from dapo_runner.tools.study.results import read_result
from dapo_runner.tools.study.runs import Failure, carry_out


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    path = find_recipe(options.config, known=studies())
    study = load_study(path)
    if options.jobs is not None:
        if options.jobs < 1:
            raise ConfigError(f"--jobs: expected 1 or more, got {options.jobs}")
        study = study.model_copy(update={"jobs": options.jobs})
    beside = path.parent / study.base
    base = beside if beside.is_file() else find_recipe(study.base)
    runs, starts = plan_runs(study, base), plan_starts(study, base)
    for config in {planned.variant: _before_start(planned.config, starts) for planned in runs}.values():
        check_needs(config, make_layout(config, 1, 1))
    waiting = [planned for planned in runs if not is_finished(planned)]
    print(
        f"{study.folder}: {len(study.variants)} variants × {len(study.seeds)} seeds, {len(runs) - len(waiting)} of "
        f"{len(runs)} runs done, {jobs_of(study)} side by side"
    )
    if options.dry_run:
        return 0
    quiet_libraries()
    study.folder.mkdir(parents=True, exist_ok=True)
    with closing(lock_folder(study.folder_of_runs, print)):
        _make_starts(starts, jobs_of(study))
        return _carry_out(study, runs, waiting)


def _before_start(config: Config, starts: Mapping[Path, Config]) -> Config:
    """With the model and the data by which what it starts from is made, where that is not there yet."""
    start = starts.get(Path(config.model.path or ""))
    if start is None:
        return config
    model = config.model.model_copy(update={"path": None, "tiny": start.model.tiny})
    return config.model_copy(update={"model": model, "data": start.data})


def _make_starts(starts: Mapping[Path, Config], jobs: int) -> None:
    if not starts:
        return
    with ProcessPoolExecutor(min(jobs, len(starts)), multiprocessing.get_context("spawn"), end_with_parent) as pool:
        for folder, said in zip(starts, pool.map(_make_start, starts, starts.values()), strict=True):
            print(f"{folder}: {said}", flush=True)


def _make_start(folder: Path, config: Config) -> str:
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    told: list[str] = []
    recipe_of_start(folder).parent.mkdir(parents=True, exist_ok=True)
    recipe_of_start(folder).write_text(dump_config(config), encoding="utf-8")
    ensure_tiny_model(config, folder, told.append)
    return told[-1]


def _carry_out(study: StudyConfig, runs: Sequence[StudyRun], waiting: Sequence[StudyRun]) -> int:
    failures: list[Failure] = []
    started, n_done = time.monotonic(), len(runs) - len(waiting)

    def done(ended: StudyRun, seconds: float, failure: Failure | None) -> None:
        nonlocal n_done
        n_done += 1
        if failure is not None:
            failures.append(failure)
        said = failure.reason if failure is not None else f"{read_result(ended, study.tail).accuracy[1][-1]:.1%}"
        left = (len(runs) - n_done) * (time.monotonic() - started) / max(1, n_done - len(runs) + len(waiting))
        print(
            f"[{n_done}/{len(runs)}] {ended.variant}, seed {ended.seed}: {said}, {seconds:.0f} s; "
            f"about {left / 60:.0f} min to go",
            flush=True,
        )

    try:
        carry_out(waiting, jobs_of(study), done)
    finally:
        results = [read_result(planned, study.tail) for planned in runs if is_finished(planned)]
        page = write_page(study, runs, results, failures)
        print(f"page: {page}")
    for failure in failures:
        complain(f"{failure.run.variant}, seed {failure.run.seed}: {failure.reason}; all of it is in {failure.run.log}")
    return 1 if failures else 0
