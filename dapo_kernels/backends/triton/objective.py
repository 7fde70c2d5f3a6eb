"""``surrogate.py`` compiled by Triton: the same source, bound to Triton's elementwise functions."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from dapo_kernels.backends.triton import elementwise
from dapo_kernels.objectives import surrogate

# The globals of the functions: callees before callers.
_namespace: dict[str, Any] = {
    "__name__": __name__,
    "__builtins__": __builtins__,
    "tl": tl,  # the interpreter looks it up
    "Any": tl,  # the compiler looks annotations up among known globals, which are modules
    "ops": elementwise,
    **{name: tl.constexpr(getattr(surrogate, name)) for name in ("CLIPPED_LOW", "CLIPPED_HIGH", "CLIPPED_DUAL")},
}


def _bind(function: Any) -> Any:
    body = FunctionType(function.__code__, _namespace, function.__name__, function.__defaults__)
    body.__module__, body.__doc__ = __name__, function.__doc__
    _namespace[function.__name__] = triton.jit(body)
    return _namespace[function.__name__]


for _name, _function in list(vars(surrogate).items()):  # in the order of their definition
    if _name.endswith("_term"):
        _bind(_function)
token_objective = _bind(surrogate.token_objective)
