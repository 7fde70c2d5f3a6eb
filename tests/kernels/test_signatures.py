"""What ``help`` shows of the public functions: every keyword, with the default that the call takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import pytest
import torch
from test_errors import good

import dapo_kernels
from dapo_kernels import OBJECTIVES
from dapo_kernels.objectives.table import FIELDS
from dapo_kernels.signature import OF_OBJECTIVE

FUNCTIONS = [getattr(dapo_kernels, name) for name in dapo_kernels.__all__ if "loss" in name or "logprobs" in name]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_defaults_are_those_shown(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert all(x.kind is not Parameter.VAR_KEYWORD for x in parameters.values())
    assert "objective" not in parameters or set(FIELDS) <= set(parameters)
    given = good(function.__name__)
    shown = {name: x.default for name, x in parameters.items() if name not in given}
    row = OBJECTIVES[str(given.get("objective", "dapo"))]
    read = ("ratio", "clip_low", "clip_high", "kl_coef", "aggregate", "dual_clip")  # those that every objective takes
    shown = {n: getattr(row, n) if x is OF_OBJECTIVE else x for n, x in shown.items() if n not in FIELDS or n in read}
    plain, spelled = function(**given), function(**given, **shown)
    for a, b in zip(plain, spelled, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b)


def test_the_list_of_arguments_gives_every_default() -> None:
    """As ``Default: None``, in its own list or, where it names no such argument, in that of ``dapo_loss``."""
    entries: dict[str, str] = {}
    for function in (dapo_kernels.dapo_loss, dapo_kernels.linear_dapo_loss, dapo_kernels.policy_loss):
        entries |= re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(function) or "", re.MULTILINE)
        for x in inspect.signature(function).parameters.values():
            shown = re.findall(r"Default: (\S+?)[,.]?(?:\s|$)", entries.get(x.name, "Default: absent"))
            assert x.name in FIELDS or shown == ([] if x.default is Parameter.empty else [repr(x.default)]), x.name
