"""Two streams of a GPU that is not there: which operation may overtake which, found from the waits between them.

An operation is known to come before another of the other stream if an event after it was waited for. Two that touch an
element, one of them writing, must be so ordered. The same holds where a tensor's memory goes back to the allocator,
which hands it out again in the order of the stream on which it was made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dapo_kernels.engine import streams

_INDEXED = {"aten::index": 1, "aten::index_put_": 1, "aten::index_select": 2, "aten::index_copy_": 2}  # their indices


class Access(NamedTuple):
    stream: int
    time: int
    writes: bool
    elements: frozenset[int]


class Memory:
    """Of one storage; ``made_on`` None: it was there before."""

    def __init__(self, tensor: Tensor, made_on: int | None) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.made_on = made_on
        self.accesses: list[Access] = []


class Stream:
    """Stands in for ``torch.cuda.Stream``. An event is the number of operations known to be done, of either stream."""

    device = torch.device("cpu")

    def __init__(self, recorder: Recorder, index: int) -> None:
        self.recorder, self.index = recorder, index
        self.known = [0, 0]

    def record_event(self) -> tuple[int, ...]:
        return tuple(self.known)

    def wait_event(self, event: tuple[int, ...]) -> None:
        self.recorder.n_waits += 1
        if self.recorder.n_waits - 1 != self.recorder.dropped:
            self.known = [max(pair) for pair in zip(self.known, event, strict=True)]

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Recorder(TorchDispatchMode):
    """Records every operation inside, on the stream that is current; ``races`` are those that nothing orders."""

    def __init__(self, dropped: int | None = None) -> None:
        super().__init__()
        self.streams = (Stream(self, 0), Stream(self, 1))
        self.current = self.streams[0]
        self.dropped, self.n_waits = dropped, 0
        self.memory: dict[int, Memory] = {}
        self.races: list[str] = []
        self.order: list[tuple[int, str]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For ``streams.TwoStreams``, of every call."""
        monkeypatch.setattr(streams, "TWO_STREAMS", True)
        monkeypatch.setattr(streams, "_beside", lambda stream: self.streams[1])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.streams[0])
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):  # no view
            self.current.known[self.current.index] += 1
            self.order.append((self.current.index, func._schema.name))
            self._record(func._schema, args, kwargs or {}, out)
        self.look_for_freed()
        return out

    def _record(self, schema: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = list(zip(schema.arguments, args, strict=False))
        given += [(a, kwargs[a.name]) for a in schema.arguments[len(args) :] if a.name in kwargs]
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for x in value if isinstance(value, list | tuple) else [value]:
                if isinstance(x, Tensor):
                    at = args[_INDEXED[schema.name]] if schema.name in _INDEXED and x is args[0] else None
                    self._access(x, _elements(x, at), writes, schema.name)
        if not any(r.alias_info for r in schema.returns):
            for x in out if isinstance(out, list | tuple) else [out]:
                if isinstance(x, Tensor):
                    self._access(x, _elements(x), True, schema.name, self.current.index)

    def _access(self, x: Tensor, elements: frozenset[int], writes: bool, name: str, made_on: int | None = None) -> None:
        key = x.untyped_storage()._cdata
        if key not in self.memory:
            self.memory[key] = Memory(x, made_on)
        memory = self.memory[key]
        here = Access(self.current.index, self.current.known[self.current.index], writes, elements)
        for other in memory.accesses:
            if (writes or other.writes) and not self._known(other, self.current) and other.elements & here.elements:
                self.races.append(f"{name} on stream {here.stream} against operation {other.time} of the other")
        memory.accesses.append(here)

    def _known(self, access: Access, by: Stream) -> bool:
        return access.time <= by.known[access.stream]

    def look_for_freed(self) -> None:
        for key, memory in list(self.memory.items()):
            if memory.storage.expired():
                if memory.made_on is not None:
                    owner = self.streams[memory.made_on]
                    if not all(self._known(access, owner) for access in memory.accesses):
                        self.races.append(f"memory of stream {memory.made_on} freed while the other may still use it")
                del self.memory[key]


def _elements(x: Tensor, at: Any = None) -> frozenset[int]:
    """Where they stand in the storage; of the rows that an index picks, which are all that is touched."""
    at = at[0] if isinstance(at, list | tuple) else at
    if at is not None and at.dtype != torch.bool:
        places = torch.arange(x.untyped_storage().nbytes() // x.element_size())
        return frozenset(places.as_strided(x.shape, x.stride(), x.storage_offset())[at].flatten().tolist())
    return _all_elements(x.shape, x.stride(), x.storage_offset())


@functools.cache
def _all_elements(shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> frozenset[int]:
    places = {start}
    for n, stride in zip(shape, strides, strict=True):
        places = {place + i * stride for place in places for i in range(n)}
    return frozenset(places)
