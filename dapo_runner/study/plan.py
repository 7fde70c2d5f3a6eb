"""Which runs a study is made of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_runner.config import Config, StudyConfig, VariantConfig, lay_settings, parse_config, read_recipe
from dapo_runner.errors import ConfigError
from dapo_runner.folder import check_same_run, is_among
from dapo_runner.records.metrics import METRICS_FILE, read_log

RUNS, START = "runs", "start"
LONGER = ("run.steps", "run.max_tokens", "run.save_every", "run.keep", "run.threads", "logging.")  # may change


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One variant with one seed, in a folder of its own."""

    variant: str
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    @property
    def recipe(self) -> Path:
        """What it is started from."""
        return self.folder.with_suffix(".yaml")

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.folder.with_suffix(".log")


def plan_runs(study: StudyConfig, base: Path) -> list[StudyRun]:
    """Of every variant with every seed, a whole round of variants before the next seed. Raises ConfigError that names
    the variant.
    """
    raw = _base(study, base)
    runs = []
    for seed in study.seeds:
        for variant in study.variants:
            settings = lay_settings(raw, overrides_of(study, variant))
            if study.start != "each":
                settings = lay_settings(settings, {"model": {"tiny": None, "path": str(_start_of(study, seed))}})
            own = {"seed": seed, "name": f"seed_{seed}", "output_dir": str(study.folder / RUNS / variant.name)}
            settings = lay_settings(settings, {"run": own | {"threads": study.threads}})
            try:
                runs.append(StudyRun(variant.name, seed, parse_config(settings)))
            except ConfigError as error:
                raise ConfigError("\n".join(f"{variant.name}: {line}" for line in str(error).splitlines())) from error
    return runs


def plan_starts(study: StudyConfig, base: Path) -> dict[Path, Config]:
    """The models that runs share and are not there yet: the folder of each and what it is made by. Raises
    ConfigError.
    """
    raw, starts = _base(study, base), dict[Path, Config]()
    if study.start == "each":
        return starts
    for seed in study.seeds:
        folder = _start_of(study, seed)
        if folder not in starts and not folder.exists():
            starts[folder] = parse_config(lay_settings(raw, {"run": {"seed": seed, "threads": study.threads}}))
            if starts[folder].model.tiny is None:
                raise ConfigError(f"start: expected 'each' where the base has no model.tiny, got {study.start!r}")
    return starts


def _base(study: StudyConfig, base: Path) -> dict[str, Any]:
    return lay_settings(read_recipe(base), study.overrides)


def _start_of(study: StudyConfig, seed: int) -> Path:
    return study.folder / START / f"seed_{study.seeds[0] if study.start == 'one' else seed}"


def overrides_of(study: StudyConfig, variant: VariantConfig) -> dict[str, Any]:
    """Those of the variants it is over, and its own on top."""
    below: Mapping[str, Any] = {}
    if variant.over is not None:
        below = overrides_of(study, next(other for other in study.variants if other.name == variant.over))
    return lay_settings(below, variant.overrides)


def is_finished(run: StudyRun) -> bool:
    """Whether the run has come to its end, evaluation included. Raises ConfigError where its folder holds another."""
    if not (run.folder / METRICS_FILE).is_file():
        return False
    other = [str(change) for change in check_same_run(run.config, run.folder) if not is_among(change.key, LONGER)]
    if other:  # which a run may go on with, but not one that is compared
        raise ConfigError(
            f"{run.folder} holds a run with another configuration ({'; '.join(other)}); choose another name for the "
            "variant or the study, or remove the folder"
        )
    events = read_log(run.folder / METRICS_FILE)
    last = max((event["step"] for event in events if event["kind"] == "step"), default=0)
    tokens = sum(event.get("sampling/tokens", 0) for event in events)
    budget = run.config.run.max_tokens
    ended = last >= run.config.run.steps or (budget is not None and tokens >= budget)
    return ended and any(event["kind"] == "eval" and event["step"] == last for event in events)


def jobs_of(study: StudyConfig) -> int:
    return study.jobs or max(1, (os.cpu_count() or 1) // study.threads)
