"""Send metrics to TensorBoard, Weights & Biases, MLflow and trackio through accelerate. A tracker never ends a run."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dapo_runner.config import Config, ConfigError, LoggingConfig, SftConfig, flatten
from dapo_runner.files import atomic_write
from dapo_runner.logging.rollout_log import sample_record
from dapo_runner.logging.versions import environment
from dapo_runner.packages import ACCELERATE, meets
from dapo_runner.types import Group

STATE_FILE = "trackers.json"
MAX_FAILURES = 3  # after this many failures a tracker receives nothing more


def check_trackers(config: LoggingConfig) -> None:
    """Raise ConfigError if a package for `logging.trackers` is missing."""
    for name in config.trackers:
        if importlib.util.find_spec(name) is None or not meets(ACCELERATE):
            raise ConfigError(f"logging.trackers: requires {name} and {ACCELERATE}. pip install 'dapo-kernels[{name}]'")


class Trackers:
    """All trackers of a run. A resumed run continues with the same ids."""

    def __init__(
        self, config: Config | SftConfig, first_step: int, note: Callable[[str], None], is_resumed: bool
    ) -> None:
        """Start the trackers. ``first_step`` is the first step to send.

        Raises ConfigError if one cannot start, for example without a login. A resumed run continues without it.
        """
        self.note, self.path, self.failures = note, config.run_dir / STATE_FILE, Counter[str]()
        self.state: dict[str, Any] = json.loads(self.path.read_text()) if self.path.is_file() else {}
        self.trackers: dict[str, Any] = {}
        for name in config.logging.trackers:
            state = self.state.setdefault(name, {"id": None, "sent": {}})
            if name in ("tensorboard", "wandb"):  # which replace or ignore a step that is sent again; wandb may lack it
                state["sent"] = {}
            try:
                self.trackers[name] = _start(name, config, first_step, state)
                atomic_write(self.path, json.dumps(self.state))  # its id
            except Exception as error:
                reason = f"logging.trackers: {name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                if not is_resumed:
                    raise ConfigError(reason) from error
                note(f"{reason}. The run goes on without it.")

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Send metrics. ``kind`` distinguishes several sets of metrics for the same step."""
        finite = {key.replace("@", "_at_"): float(value) for key, value in figures.items() if math.isfinite(value)}
        values = {re.sub(r"[^\w\-./ ]", "_", key): value for key, value in finite.items()}  # valid in all trackers
        self._send(step, kind, lambda tracker: tracker.log(values, step=step))

    def samples(self, step: int, name: str, groups: Sequence[Group]) -> None:
        """Send a table with the first sample of each group: a choice independent of length and reward."""
        prompts = [{"step": step, "prompt": group.prompt.text, "answer": group.prompt.answer} for group in groups]
        rows = [row | sample_record(group.samples[0]) for row, group in zip(prompts, groups, strict=True)]
        if rows:
            self._send(step, name, lambda tracker: _send_table(tracker, step, name, rows))

    def close(self, error: BaseException | None = None) -> None:
        for name in list(self.trackers):
            self._call(name, lambda tracker: _finish(tracker, failed=isinstance(error, Exception)))

    def _send(self, step: int, kind: str, send: Callable[[Any], None]) -> None:
        for name in list(self.trackers):
            sent = self.state[name]["sent"]
            if step > sent.get(kind, -1):
                sent[kind] = step
                self._call(name, send)

    def _call(self, name: str, send: Callable[[Any], None]) -> None:
        try:
            send(self.trackers[name])
            atomic_write(self.path, json.dumps(self.state))
        except Exception as error:
            self.failures[name] += 1
            if self.failures[name] == 1:
                self.note(f"logging.trackers: {name} failed, the run goes on: {type(error).__name__}: {error}")
            if self.failures[name] == MAX_FAILURES:
                del self.trackers[name]
                self.note(f"logging.trackers: {name} failed {MAX_FAILURES} times and gets no more metrics")


def _start(name: str, config: Config | SftConfig, first_step: int, state: dict[str, Any]) -> Any:
    """Start accelerate's tracker. ``state`` has the id of the tracker's run once it exists."""
    from accelerate import PartialState
    from accelerate import tracking as accelerate

    threads = torch.get_num_threads()
    PartialState(cpu=True)  # accelerate requires it for logging; it can change the number of threads
    torch.set_num_threads(threads)
    project, run, known = config.logging.project, config.run.name, state["id"]
    run_id = known or uuid.uuid4().hex[:12]
    same: dict[str, Any] = {"resume": "allow"}
    if name == "tensorboard":
        tracker = accelerate.TensorBoardTracker(name, config.run_dir, purge_step=first_step)
    elif name == "mlflow":
        tracker = accelerate.MLflowTracker(project, run_name=run, run_id=known)
    elif name == "trackio":  # identifies a run by its name
        same |= {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        tracker = accelerate.TrackioTracker(project, name=f"{run}-{run_id}", **same)
    else:  # wandb's own output would break the progress bar
        same |= {"id": run_id, "dir": str(config.run_dir), "settings": {"silent": True, "console": "off"}}
        tracker = accelerate.WandBTracker(project, name=run, **same)
    tracker.start()
    state["id"] = tracker.tracker.info.run_id if name == "mlflow" else run_id
    if known is None:
        settings = flatten(config.model_dump(mode="json", by_alias=True))
        versions = {f"environment.{key}": value for key, value in environment().items()}
        tracker.store_init_configuration({key: str(value) for key, value in (settings | versions).items()})
    return tracker


def _finish(tracker: Any, *, failed: bool) -> None:
    if failed and tracker.name == "wandb":
        tracker.run.finish(exit_code=1)
    elif failed and tracker.name == "mlflow":
        import mlflow

        mlflow.end_run("FAILED")
    else:
        tracker.finish()


def _send_table(tracker: Any, step: int, name: str, rows: list[dict[str, Any]]) -> None:
    if tracker.name == "wandb":
        tracker.log_table(name, columns=list(rows[0]), data=[list(row.values()) for row in rows], step=step)
    elif tracker.name == "mlflow":
        import mlflow

        mlflow.log_dict({"rows": rows}, f"{name}/step_{step:06d}.json")
    elif tracker.name == "trackio":
        import trackio

        tracker.log({name: trackio.Table(data=rows)}, step=step)
    else:  # as JSON in an indented code block, which no content can end
        tracker.log({name: "    " + json.dumps(rows, indent=1, ensure_ascii=False).replace("\n", "\n    ")}, step=step)
