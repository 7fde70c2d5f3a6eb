"""Operators that take records: one function becomes what autograd, torch.compile and fake tensors see.

``@operator`` registers ``dapo_kernels::<name>`` with a schema made from the records' fields, ``head_hidden``,
``head_weight``, …. This is the only place that flattens records. An eager call with plain tensors calls the function
without torch's dispatcher, which at 64 × 64 would cost more than the arithmetic. Under a tracer, a mode or a transform
the registered operator is called.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from dapo_kernels.backends import scale_

_PLAIN = (Tensor, torch.nn.Parameter)
_SCHEMA = {Tensor: "Tensor", bool: "bool", int: "int", float: "float", str: "str"}


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple)


def _schema(kind: Any) -> str:
    args = [arg for arg in typing.get_args(kind) if arg is not types.NoneType]
    return f"{_SCHEMA[args[0]]}?" if args else _SCHEMA[kind]


class _Field(NamedTuple):
    name: str
    kind: Any


class _Parameter(NamedTuple):
    """A record or a plain value, and its position among the operator's flat arguments."""

    record: Any
    start: int
    stop: int


class _Saved(int):
    """The index of a tensor among those that autograd saves."""


class SavedForBackward(NamedTuple):
    """What a forward pass saves for its backward pass: records and plain values, flattened for ``ctx``."""

    values: tuple[Any, ...]

    def store(self, ctx: Any) -> None:
        tensors: list[Tensor] = []
        ctx.kept = [_put_away(x, tensors) for x in self.values]
        ctx.save_for_backward(*tensors)

    @staticmethod
    def load(ctx: Any) -> list[Any]:
        tensors = ctx.saved_tensors
        return [_take_out(x, tensors) for x in ctx.kept]


# Not nested functions: one that refers to itself is a cycle, and would keep the tensors until the next collection.
def _put_away(x: Any, tensors: list[Tensor]) -> Any:
    if isinstance(x, Tensor):
        tensors.append(x)
        return _Saved(len(tensors) - 1)
    return type(x)(*[_put_away(y, tensors) for y in x]) if isinstance(x, tuple) else x


def _take_out(x: Any, tensors: Sequence[Tensor]) -> Any:
    if type(x) is _Saved:
        return tensors[x]
    return type(x)(*[_take_out(y, tensors) for y in x]) if isinstance(x, tuple) else x


class Operator:
    """A function of records that returns a record of tensors. See ``operator``."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.name = run.__name__
        self.run = run
        kinds = typing.get_type_hints(run)
        self.result: Any = kinds.pop("return")
        self.fields: list[_Field] = []
        self.parameters: list[_Parameter] = []
        for name, kind in kinds.items():
            start = len(self.fields)
            if _is_record(kind):
                self.fields += [_Field(f"{name}_{field}", of) for field, of in typing.get_type_hints(kind).items()]
            else:
                self.fields.append(_Field(name, kind))
            self.parameters.append(_Parameter(kind if _is_record(kind) else None, start, len(self.fields)))
        self._single = self.result is Tensor
        self._at = {field.name: i for i, field in enumerate(self.fields)}
        self._tensors = [i for i, field in enumerate(self.fields) if _schema(field.kind).startswith("Tensor")]
        self.op = self._register()
        self.function: Any = None  # the torch.autograd.Function of eager calls
        self._keep: Callable[..., tuple[Any, ...]]
        self._backward: Callable[..., dict[str, Tensor | None]]
        self._marked: list[int]

    def _register(self) -> Any:
        # torch.library.custom_op does the same, but its first call imports torch._dynamo (a second and 900 modules),
        # and its wrapper costs time in every call.
        arguments = ", ".join(f"{_schema(kind)} {name}" for name, kind in self.fields)
        results = "Tensor" if self._single else f"({', '.join(['Tensor'] * len(self.result._fields))})"
        name = f"dapo_kernels::{self.name}"
        torch.library.define(name, f"({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))

        def run(*flat: Any) -> Any:
            return self._present(self._without_autocast(self._records(flat), flat[0]), flat)

        torch.library.impl(name, "default")(run)
        return getattr(torch.ops.dapo_kernels, self.name).default

    # --- records and flat arguments -----------------------------------------------------------------------

    def _flat(self, arguments: tuple[Any, ...]) -> list[Any]:
        flat: list[Any] = []
        for parameter, argument in zip(self.parameters, arguments, strict=True):
            if parameter.record is None:
                flat.append(argument)
            else:
                flat.extend(argument)
        return flat

    def _records(self, flat: Any) -> list[Any]:
        return [flat[p.start] if p.record is None else p.record(*flat[p.start : p.stop]) for p in self.parameters]

    def _present(self, result: Any, flat: Any) -> Any:
        """Replace None, which an operator cannot return, by an empty tensor of a dtype that no result has."""
        if self._single:
            return result
        device = flat[0].device
        return tuple(torch.empty(0, dtype=torch.int16, device=device) if x is None else x for x in result)

    def _result(self, present: Any) -> Any:
        if self._single:
            return present
        return self.result(*(None if x is None or x.dtype == torch.int16 else x for x in present))

    # --- calls --------------------------------------------------------------------------------------------

    def __call__(self, *arguments: Any) -> Any:
        flat = self._flat(arguments)
        if torch.compiler.is_compiling():
            return self._result(self.op(*flat))
        tensors = [flat[i] for i in self._tensors if flat[i] is not None]
        if not plain(tensors):
            return self._result(self.op(*flat))
        if self.function is not None and torch.is_grad_enabled():
            for x in tensors:
                if x.requires_grad:
                    out = self.function.apply(*flat)
                    return out if self._single else self.result(*out)
        return self._without_autocast(arguments, flat[0])

    def _without_autocast(self, records: Any, first: Tensor) -> Any:
        """Call without autocast: the public function has already applied it to the inputs."""
        device = first.device.type
        if first.is_meta or not torch.is_autocast_enabled(device):
            return self.run(*records)
        with torch.autocast(device, enabled=False):
            return self.run(*records)

    # --- registrations of an operator ---------------------------------------------------------------------

    def fake(self, function: Callable[..., Any]) -> None:
        """Register a function that returns the shapes and dtypes of the results from the same records."""
        torch.library.register_fake(self.op.name())(
            lambda *flat: self._present(function(*self._records(flat)), flat),
        )

    def gradient(self, keep: Callable[..., tuple[Any, ...]], *differentiable: str) -> Callable[..., Any]:
        """Register the function below as the backward pass.

        Args:
            keep: returns what the backward pass needs, records and plain values, from (result, *records).
            differentiable: names of the results that have a gradient; by default the only one.

        The function gets (ctx, *kept, grads), where ``grads`` is a record like the result, and returns gradients by the
        flat names of their inputs.
        """

        def register(backward: Callable[..., dict[str, Tensor | None]]) -> Callable[..., Any]:
            self._keep, self._backward = keep, backward
            if not self._single:
                self._marked = [i for i, name in enumerate(self.result._fields) if name not in differentiable]
            torch.library.register_autograd(self.op.name(), self._backward_pass, setup_context=self._setup)
            self.function = self._eager_function()
            return backward

        return register

    def _setup(self, ctx: Any, inputs: Any, output: Any) -> None:
        self._leave_for_backward(ctx, self._result(output), self._records(inputs))

    def _leave_for_backward(self, ctx: Any, result: Any, records: Any) -> None:
        SavedForBackward(self._keep(result, *records)).store(ctx)
        if not self._single:
            ctx.mark_non_differentiable(*[result[i] for i in self._marked if result[i] is not None])
        ctx.set_materialize_grads(False)

    def _backward_pass(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        check_not_batched(grads)
        gradients: list[Tensor | None] = [None] * len(self.fields)
        if any(grad is not None for grad in grads):
            result_grads = grads[0] if self._single else self.result(*grads)
            for name, gradient in self._backward(ctx, *SavedForBackward.load(ctx), result_grads).items():
                gradients[self._at[name]] = gradient
        return tuple(gradients)

    def _eager_function(self) -> Any:
        def forward(ctx: Any, *flat: Any) -> Any:
            records = self._records(flat)
            result = self._without_autocast(records, flat[0])
            self._leave_for_backward(ctx, result, records)
            return result if self._single else tuple(result)

        def backward(ctx: Any, *grads: Any) -> Any:  # a function: dynamo accepts no bound method
            return self._backward_pass(ctx, *grads)

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(self.name, (torch.autograd.Function,), members)

    def has_no_gradient(self) -> None:
        """Raise an error for a second derivative, for which autograd would only warn and return a wrong gradient."""

        def refuse(ctx: Any, grads: Any) -> dict[str, Tensor | None]:
            raise RuntimeError(f"{self.op.name()}: {NO_SECOND_DERIVATIVE}")

        fields = () if self._single else self.result._fields
        self.gradient(lambda *_: (), *fields)(refuse)


NO_SECOND_DERIVATIVE = "the gradient of a gradient is not implemented; use create_graph=False"


def operator(run: Callable[..., Any]) -> Operator:
    """Decorate a function as an operator. Its annotations define the parameters, records or plain values, and the
    result, a record of tensors or one tensor.
    """
    return Operator(run)


def plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether this is an eager call with ordinary tensors, without an active mode or transform."""
    watched = torch._C._len_torch_dispatch_stack() or _functorch.peek_interpreter_stack() is not None
    return ordinary(tensors) and not watched


def ordinary(tensors: Sequence[Tensor]) -> bool:
    """Return whether all are torch's own tensors, without subclasses."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("dapo_kernels: forward-mode derivatives (jvp, dual tensors) are not implemented")
    transform = _functorch.peek_interpreter_stack()
    differentiates = transform is not None and transform.key() == _functorch.TransformType.Grad
    if differentiates and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError(
            "dapo_kernels: torch.func.grad, vjp and jacrev are not implemented: use torch.autograd.grad or backward"
        )
    return all(type(x) in _PLAIN for x in tensors)


def check_not_batched(grads: Sequence[Tensor | None]) -> None:
    """Raise an error for several gradients at once, which PyTorch passes as tensors without storage."""
    if any(grad is not None and _functorch.is_legacy_batchedtensor(grad) for grad in grads):
        raise NotImplementedError("dapo_kernels: is_grads_batched=True and vectorize=True are not implemented")


def check_first_backward(ctx: Any, caller: str, remedy: str) -> None:
    """Raise an error if a gradient that was computed with its loss is requested twice. Autograd may have changed it
    since the first time, and it has no derivative.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{caller}: {NO_SECOND_DERIVATIVE}")
    if getattr(ctx, "is_used", False):
        raise RuntimeError(f"{caller}: second backward through the same call, whose gradient is used up. {remedy}")
    ctx.is_used = True


def scaled(gradient: Tensor, grad_output: Tensor) -> Tensor:
    """Return grad_output · gradient, in the gradient's own storage: a second copy of dW would be the peak of memory.

    The common grad_output 1 costs next to nothing. Under a tracer (whose tensors have another type) the product is a
    new tensor and the compiler plans the memory.
    """
    if type(gradient) is not Tensor:
        return gradient * grad_output
    if gradient.numel() and (gradient.device.type != "cpu" or grad_output.item() != 1.0):
        scale_(gradient, grad_output)
    return gradient
