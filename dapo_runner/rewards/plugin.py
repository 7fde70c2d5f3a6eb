"""A reward function of the user's own: `reward.kind: module:function`, called with a prompt and a completion.

It may return a ``Verdict``; a bool, right or wrong at the configured rewards; or a number, the reward itself, which
counts as right above the middle between `reward.wrong` and `reward.correct`. Anything else, an exception, a reward that
is not finite and an answer that does not come within `reward.plugin_deadline` end the run: none of them is a 0.

The function runs in this process and its main thread, so that it may keep models and connections, and that what it
draws from random generators is the same after a resume. The deadline is an alarm signal: it ends Python code and calls
that wait, not C code that never looks at signals; and outside the main thread there is none.
"""

from __future__ import annotations

import importlib
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.types import Completion, Prompt, Verdict

SHOWN = 400  # characters of a prompt or a text that an error shows, from its two ends


class RewardError(RuntimeError):
    """A plug-in that failed; ``prompt`` and ``completion`` are what it was given."""

    def __init__(self, message: str, prompt: Prompt, completion: Completion) -> None:
        super().__init__(message)
        self.prompt = prompt
        self.completion = completion


def load_plugin(config: RewardConfig) -> Callable[[Prompt, Completion], Verdict]:
    """The function that the configuration names, which raises RewardError. Raises ConfigError when it cannot be
    found.
    """
    name, middle = config.kind, (config.correct + config.wrong) / 2
    function = _find(name)

    def judge(prompt: Prompt, completion: Completion) -> Verdict:
        try:
            return _verdict(call_within(config.plugin_deadline, lambda: function(prompt, completion)), middle)
        except (Exception, SystemExit) as error:
            text = completion.text
            raise RewardError(
                f"reward {name}: {_describe(error, config.plugin_deadline)}; on prompt {prompt.id}: "
                f"{_shorten(prompt.text)}, response: {_shorten(text)}",
                prompt,
                completion,
            ) from error

    return judge


def _find(name: str) -> Callable[[Prompt, Completion], Any]:
    module_name, _, function_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # a console script does not see the folder it is started in
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reward.kind: expected module:function that can be imported from here, got {name!r} ({error})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward.kind: module {module_name!r} has no function {function_name!r}")
    return function


def _verdict(result: Any, middle: float) -> Verdict:
    """Raises TypeError and ValueError."""
    if hasattr(result, "item"):  # a scalar of NumPy or torch
        result = result.item()
    if isinstance(result, bool):
        return Verdict(result)
    if isinstance(result, int | float):
        result = Verdict(result > middle, value=float(result))
    if not isinstance(result, Verdict):
        raise TypeError(f"expected a dapo_runner.types.Verdict, a number or a bool, got {type(result).__name__}")
    # Plain values: a NumPy number inside would go into a checkpoint that torch then refuses to load.
    value = None if result.value is None else float(result.value)
    if value is not None and not math.isfinite(value):
        raise ValueError(f"expected a finite reward, got {value}")
    extracted = None if result.extracted is None else str(result.extracted)
    return replace(result, correct=bool(result.correct), extracted=extracted, value=value)


class LateError(Exception):
    """The deadline struck; its traceback ends where the call was."""


class _Alarm(BaseException):
    """Not an Exception, which the function may catch."""


def call_within(seconds: float | None, call: Callable[[], Any]) -> Any:
    """What ``call`` returns. Raises LateError when it takes longer, whatever it makes of being interrupted: one that
    forgives the first alarm, or waits for a thread on its way out, meets another every second.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        return call()
    armed, struck = True, False

    def strike(*_: object) -> None:
        nonlocal struck
        struck = True
        if armed:
            raise _Alarm

    began = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)  # first: the caller's alarm must not meet our handler
    handler_before = signal.signal(signal.SIGALRM, strike)
    trace = None
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        return_value = call()
    except BaseException as error:
        armed = False
        if not struck:
            raise
        trace = error.__traceback__
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler_before or signal.SIG_DFL)
        if left:  # the caller's own alarm, which has waited meanwhile
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-6), interval)
    if struck:
        raise LateError().with_traceback(trace)
    return return_value


def _describe(error: BaseException, deadline: float | None) -> str:
    # The innermost line that is not of this file: in the plug-in, or in what it calls.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, LateError):
        return f"no answer within {deadline:g} s (reward.plugin_deadline{'; it was at ' + place if place else ''})"
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def _shorten(text: str) -> str:
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
    return repr(shown)
