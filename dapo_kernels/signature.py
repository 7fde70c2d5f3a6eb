"""Show the keywords of a TypedDict in ``help`` and ``inspect.signature`` of a function.

    @shows_options
    def loss(logits: Tensor, **options: Unpack[LossOptions]) -> Tensor: ...

The TypedDict has names and types for the type checker, and ``Annotated[float, Default(1.0)]`` sets a default other than
None. A field of ``Objective`` has the default of the call's objective.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection
from inspect import Parameter
from typing import Any, TypeVar

from dapo_kernels.objectives.table import FIELDS, PARAMETERS
from dapo_kernels.objectives.unknown import unknown_keyword
from dapo_kernels.records import Default

F = TypeVar("F", bound=Callable[..., Any])


class _OfObjective:
    """The default shown for a field of ``Objective``."""

    def __repr__(self) -> str:
        return "<the objective's>"


OF_OBJECTIVE = _OfObjective()


def shows_options(function: F, without: Collection[str] = ()) -> F:
    """Show each keyword of ``**options: Unpack[…]`` with its default in the signature, except those in ``without``."""
    signature = inspect.signature(function, eval_str=True)
    *named, options = signature.parameters.values()
    (keywords,) = typing.get_args(options.annotation)
    hints = typing.get_type_hints(keywords, include_extras=True)
    names = sorted((name for name in hints if name not in without), key=lambda name: name in FIELDS)
    shown = [_keyword(name, hints[name]) for name in names]
    function.__signature__ = signature.replace(parameters=[*named, *shown])  # type: ignore[attr-defined]
    known = tuple(x.name for x in (*named, *shown) if x.name != "self")
    PARAMETERS[function.__qualname__.removesuffix(".__init__")] = known
    return function


def refuse_unknown(caller: str, options: Collection[str]) -> None:
    """Raise TypeError if there are ``options``, which are no keywords of ``caller``."""
    for name in options:
        raise unknown_keyword(caller, name, PARAMETERS[caller])


def _keyword(name: str, hint: Any) -> Parameter:
    default: Any = OF_OBJECTIVE if name in FIELDS else None
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, Default):
            hint, default = hint.__origin__, note.value
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
