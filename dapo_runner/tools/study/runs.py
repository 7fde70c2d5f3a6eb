"""The runs of a study: plan them, find which are finished, and start the others, several `dapo train` at the same time.

A failed run does not affect the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dapo_runner.config import Config, ConfigError, dump_config, flatten, lay_settings, load_config, parse, read_recipe
from dapo_runner.config.commands import StudyConfig, VariantConfig
from dapo_runner.files import read_jsonl
from dapo_runner.interrupt import end_with_parent
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.versions import environment
from dapo_runner.run.early_stop import last_step
from dapo_runner.run.folder import changes_between, check_same_run, is_among, settings_of
from dapo_runner.tiny_model import ensure_tiny_model

OF_START = ("model.path", "model.tiny")
# From a study's seeds, names, output_dir and threads; a fork has the seed of its origin.
OF_STUDY = ("run.seed", "run.name", "run.output_dir", "run.threads", "run.from")
MAKE_START = (*OF_START, "run.seed", "data", "rollout", "reward")  # settings that affect the warm-up
LONGER = ("run.steps", "run.max_tokens", "run.save_every", "run.keep", "run.threads", "logging", "version")
POLL = 0.2  # seconds
GRACE = 60.0  # seconds for runs to save their step when the study is interrupted


class StudyRun(NamedTuple):
    """One variant with one seed, in its own folder."""

    variant: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    @property
    def recipe(self) -> Path:
        """The configuration file with which it is started."""
        return self.folder.with_suffix(".yaml")

    @property
    def log(self) -> Path:
        """The file with its console output."""
        return self.folder.with_suffix(".log")

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "dapo_runner", "train", str(self.recipe)]

    @property
    def made_with(self) -> str:
        """Machine, versions and commit of its last start; empty if a study did not start it."""
        first, *_ = self.recipe.read_text(encoding="utf-8").split("\n") if self.recipe.is_file() else [""]
        return first.removeprefix("# ") if first.startswith("# ") else ""


def plan_runs(study: StudyConfig, base: Path) -> list[StudyRun]:
    """Return the runs of every variant and seed, all variants of a seed before the next seed.

    Raises ConfigError that names the variant.
    """
    given = [("overrides", study.overrides), *((variant.name, variant.overrides) for variant in study.variants)]
    if taken := [f"{name}: expected no {key}" for name, keys in given for key in flatten(keys) if key in OF_STUDY]:
        raise ConfigError(f"{taken[0]}. Set the study's own seeds, name, output_dir or threads; it cannot fork.")
    raw, runs = lay_settings(read_recipe(base), study.overrides), []
    for seed in study.seeds:
        for variant in study.variants:
            overrides = overrides_of(study, variant)
            if study.start != "each":
                if key := next((key for key in flatten(overrides) if is_among(key, OF_START)), ""):
                    raise ConfigError(f"{variant.name}: {key}: must be in the study's overrides with start=per_seed")
                start = str(_start_of(study, seed))
                overrides = lay_settings(overrides, {"model": {"tiny": None, "path": start}})
            folder = str(study.folder_of_runs / "runs" / variant.name)
            run_settings = {"seed": seed, "name": f"seed_{seed}", "output_dir": folder, "threads": study.threads}
            try:
                config = parse(lay_settings(lay_settings(raw, overrides), {"run": run_settings}), Config)
            except ConfigError as error:
                raise ConfigError("\n".join(f"{variant.name}: {line}" for line in str(error).splitlines())) from error
            runs.append(StudyRun(variant.name, seed, config))
    return runs


def plan_starts(study: StudyConfig, base: Path) -> dict[Path, Config]:
    """Return the configurations of shared start models that do not exist yet, by folder.

    Raises ConfigError, also if one exists that was made with other settings.
    """
    starts = dict[Path, Config]()
    for seed in study.seeds if study.start != "each" else ():
        folder = _start_of(study, seed)
        raw = lay_settings(read_recipe(base), study.overrides)
        config = parse(lay_settings(raw, {"run": {"seed": seed, "threads": study.threads}}), Config)
        if config.model.tiny is None:
            raise ConfigError(f"start: expected 'each' where the base has no model.tiny, got {study.start!r}")
        if not folder.exists():
            starts[folder] = config
        elif (recipe := folder.with_suffix(".yaml")).is_file():
            changes = changes_between(settings_of(load_config(recipe)), settings_of(config))
            if other := [str(change) for change in changes if is_among(change.key, MAKE_START)]:
                raise _holds(folder, f"a model that was made with other settings ({'; '.join(other)})")
    return starts


def _start_of(study: StudyConfig, seed: int) -> Path:
    return study.folder_of_runs / "start" / f"seed_{seed}"


def overrides_of(study: StudyConfig, variant: VariantConfig) -> dict[str, Any]:
    """Return the overrides of a variant on top of those of the variant that it extends."""
    if variant.over is None:
        return lay_settings({}, variant.overrides)
    below = next(other for other in study.variants if other.name == variant.over)
    return lay_settings(overrides_of(study, below), variant.overrides)


def is_finished(run: StudyRun) -> bool:
    """Return whether the run has ended, evaluation included. Raises ConfigError if its folder has another run."""
    if not (run.folder / METRICS_FILE).is_file():
        return False
    other = [str(change) for change in check_same_run(run.config, run.folder) if not is_among(change.key, LONGER)]
    if other:  # a run may resume with these changes, but must not be compared
        raise _holds(run.folder, f"a run with another configuration ({'; '.join(other)})")
    events = read_jsonl(run.folder / METRICS_FILE)
    end = last_step(run.config, events)
    if end is not None and (further := events[-1]["step"]) > end:
        raise _holds(run.folder, f"a run of {further} steps, which would end after {end} now")
    return any(event["kind"] == "eval" and event["step"] == end for event in events)


def _holds(folder: Path, what: str) -> ConfigError:
    return ConfigError(f"{folder}: expected this run, got {what}. Choose another name, or remove the folder.")


class Failure(NamedTuple):
    run: StudyRun
    reason: str  # exit code and last line of output


def make_start(folder: Path, config: Config) -> str:
    """Make a start model that runs share, and its recipe beside it. Return a note."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    notes: list[str] = []
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.with_suffix(".yaml").write_text(dump_config(config), encoding="utf-8")
    ensure_tiny_model(config, folder, notes.append)
    return f"{folder}: {notes[-1]}"


def carry_out(runs: Iterable[StudyRun], jobs: int) -> Generator[tuple[StudyRun, float, Failure | None], None, None]:
    """Start ``runs`` in order, ``jobs`` at the same time. Yield each run that ended, its seconds, and why it failed.

    Closing the generator, or an error, stops the current runs. They save their step first.
    """
    made_with = ", ".join(f"{name} {value}" for name, value in environment().items())
    waiting, running = deque(runs), dict[subprocess.Popen[bytes], tuple[StudyRun, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.popleft()
                process = _start(run, f"# {made_with}. Runs side by side: {jobs}.\n")
                running[process] = run, time.monotonic()
            for process in [process for process in running if process.poll() is not None]:
                run, since = running.pop(process)
                yield run, time.monotonic() - since, _failure(run, process.returncode)
            time.sleep(POLL)
    finally:
        _stop(list(running))


def _start(run: StudyRun, made_with: str) -> subprocess.Popen[bytes]:
    run.recipe.parent.mkdir(parents=True, exist_ok=True)
    run.recipe.write_text(made_with + dump_config(run.config), encoding="utf-8")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(run.config.run.threads))
    with run.log.open("ab") as log:
        return subprocess.Popen(
            run.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
            start_new_session=True,  # the study gets Ctrl-C and passes it on once
            preexec_fn=end_with_parent,
        )


def _failure(run: StudyRun, code: int) -> Failure | None:
    if code == 0:
        return None if is_finished(run) else Failure(run, "no evaluation after its last step: set data.eval_size")
    *_, last = run.log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
    return Failure(run, f"exit code {code}: {last.strip() or 'nothing printed'}")


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()  # not SIGINT: after a scheduler's SIGTERM to all processes it would not be the first signal
    until = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
