"""The glossary of metrics. Every test that trains checks what it logs (`_only_documented_metrics` in conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from small import SEGMENTS, write_recipe

import dapo_runner
from dapo_kernels import metrics as loss_metrics
from dapo_runner import load_config, train
from dapo_runner.logging.metric_table import PANELS, SUPERVISED_PANELS
from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, read_log
from docs.glossary import AREAS, is_documented, panel_of, rows


def test_every_row_exists() -> None:
    """A name stands in quotes in the code that logs it."""
    package = Path(dapo_runner.__file__).parent
    files = [path for path in package.rglob("*.py") if path.name != "metric_table.py"]
    source = "".join(path.read_text() for path in [*files, Path(loss_metrics.__file__)])
    names = {key: key.split("/", 1)[1].strip("*") for key, *_ in rows()}
    names |= {key: name.removeprefix("failed_") for key, name in names.items() if key.startswith("env/failed_")}
    missing = [
        key for key, name in names.items() if name.strip("/") and not (f'"{name}' in source or f'{name}"' in source)
    ]
    assert missing == []
    assert all(key.split("/")[0] in AREAS and unit + meaning for key, unit, meaning, _ in rows())


def test_every_metric_that_is_drawn_has_a_row() -> None:
    keys = [curve.key for panel in (*PANELS, *SUPERVISED_PANELS) for curve in panel.curves]
    assert [key for key in keys if not is_documented(key) and not key.startswith("time/")] == []
    assert panel_of("sync/gap")
    assert not is_documented("train/unheard_of")


def test_every_panel_has_a_title_of_its_own() -> None:
    """The page finds a chart by its title, and can show supervised runs beside others."""
    titles = {panel: panel.title for panel in (*PANELS, *SUPERVISED_PANELS)}
    assert len(set(titles.values())) == len(titles)


def test_every_way_the_engine_differs_from_the_trainer_is_drawn() -> None:
    keys = [key for key, *_ in rows() if key.startswith(("train/rollout_", "sync/"))]
    assert len(keys) > 5
    assert [key for key in keys if not panel_of(key)] == []


@pytest.mark.parametrize("overrides", [[], SEGMENTS["chain"]])
def test_every_metric_of_a_run_has_a_row(tmp_path: Path, overrides: list[str]) -> None:
    folder = train(load_config(write_recipe(tmp_path, steps=2), overrides))
    events = [event for name in (METRICS_FILE, TIMINGS_FILE) for event in read_log(folder / name)]
    logged = {key for event in events for key in event} - {"step", "kind"}
    assert {"train/loss", "eval/avg@2", "sampling/mixed", "seconds/rollout"} <= logged
    assert [key for key in logged if not is_documented(key)] == []
