"""Measure the wall time of each phase of a step. The clock is always in exactly one phase, so the phases add up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

# In the order of a step. `other` is the time in no other phase: the loop itself.
PHASES = {
    "rollout": "the engine generates",
    "score": "answers are checked",
    "segments": "continuations for segment advantages are generated and scored",
    "wait": "waiting for asynchronous rollouts and for other ranks",
    "pack": "advantages are computed, sequences are packed into micro-batches",
    "old_logprobs": "forward passes for the old log-probs",
    "ref_logprobs": "forward passes of the reference model",
    "values": "forward passes of the critic",
    "critic": "updates of the critic",
    "forward_backward": "forward and backward passes of the updates",
    "optimizer": "gradient norm, AdamW, float32 master weights rounded into the model",
    "sync": "weights are sent to the engine, its memory is released and restored",
    "probe": "log-probs of engine and trainer are compared",
    "log": "metrics and rollouts are written",
    "evaluate": "held-out problems are sampled and scored",
    "save": "checkpoints are written",
    "other": "everything else",
}


class StepClock:
    """Measure seconds by phase since the last ``lap``. Time in an inner phase does not count for the outer one."""

    def __init__(self, device: torch.device | None = None, on_phase: Callable[[str], None] = lambda name: None) -> None:
        """Wait for the kernels of a CUDA ``device`` in each phase. Call ``on_phase`` with each new phase."""
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._phase, self._since = "other", time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self._phase
        self._turn_to(name)
        try:
            yield
        finally:
            self._turn_to(outer)

    def so_far(self) -> dict[str, float]:
        """Return the seconds by phase since the last lap."""
        self._turn_to(self._phase)
        return dict(self._seconds)

    def lap(self) -> dict[str, float]:
        """Return the seconds by phase since the last lap, and start a new lap."""
        seconds, self._seconds = self.so_far(), {}
        return seconds

    def _turn_to(self, name: str) -> None:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        now = time.perf_counter()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since = now
        if name != self._phase:
            self._phase = name
            self._on_phase(name)


def seconds_by_phase(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds by phase of one line of `timings.jsonl`."""
    return {key.removeprefix("seconds/"): value for key, value in event.items() if key.startswith("seconds/")}


def time_split(timings: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean seconds of each phase per step, longest first. Empty if there is no step."""
    steps = [seconds_by_phase(event) for event in timings if event["kind"] == "step"]
    totals: Counter[str] = Counter()
    for step in steps:
        totals.update(step)
    return {phase: seconds / len(steps) for phase, seconds in totals.most_common()}
