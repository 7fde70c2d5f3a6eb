"""Stages of the chunks of ``hidden.py``, one after another or, on a GPU, with row kernels beside GEMMs on two streams.

L, R and G of a chunk: the GEMM of its logits, its row kernel, the gradient GEMMs. With two buffers of logits in turn::

    first     L0  L1  G0  L2  G1  L3  G2 ...  G3
    second        R0  R1      R2      R3

R waits for its L, G for its R; that L2 overwrites what G0 has read follows from the order of the first stream.

The allocator knows the stream on which a tensor was made, and hands its memory out again in the order of that stream.
So what is made on the second (``row_kernel``'s own tensors) is used there only, and what is made on the first lives
until it has waited for the last R: nothing needs ``record_stream``. A graph's capture forks at R0 and has joined again
at the last G.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dapo_kernels.engine.chunks import Chunk, Chunks
from dapo_kernels.records import Plan, on_host

# Off: no GPU has shown a gain, and docs/gpu.md counts on none with a trained head. ``make gpu`` times both ways.
TWO_STREAMS = False


class OneStream:
    """Work is done when the next is started."""

    n_buffers = 1

    def start(self, work: Callable[[], None]) -> Any:
        """Something to ``wait`` for before using what ``work`` wrote."""
        work()

    def wait(self, started: Any) -> None:
        pass

    def join(self) -> None:
        """What follows waits for all that was started."""


class TwoStreams(OneStream):
    """``work`` runs on a second stream, after all that the caller's stream has been given so far."""

    n_buffers = 2

    def __init__(self, device: torch.device) -> None:
        self.first = torch.cuda.current_stream(device)
        self.second = _beside(self.first)

    def start(self, work: Callable[[], None]) -> Any:
        self.second.wait_stream(self.first)
        with torch.cuda.stream(self.second):
            work()
        return self.second.record_event()

    def wait(self, started: Any) -> None:
        self.first.wait_event(started)

    def join(self) -> None:
        self.first.wait_stream(self.second)


@functools.cache
def _beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The same on every call, or each would have memory of its own; of this stream alone, which may be captured."""
    return torch.cuda.Stream(stream.device)


def streams_for(like: Tensor, plan: Plan) -> OneStream:
    """One stream where ranks share a row: their row kernels talk to each other."""
    return TwoStreams(like.device) if TWO_STREAMS and not on_host(like) and plan.group is None else OneStream()


def in_stages(
    chunks: Chunks, streams: OneStream, logits_of: Callable[[Chunk], Tensor], row_kernel: Callable[[Chunk], None]
) -> Iterator[tuple[Chunk, Tensor]]:
    """Each chunk once its row kernel is done, with what ``logits_of`` returned: L and R; G is the caller's."""
    started: deque[tuple[Chunk, Tensor, Any]] = deque()
    try:
        for chunk in chunks:
            started.append((chunk, logits_of(chunk), streams.start(functools.partial(row_kernel, chunk))))
            if len(started) == streams.n_buffers:
                yield _finished(started, streams)
        while started:
            yield _finished(started, streams)
    except BaseException:  # what the second stream still works on must not be freed
        streams.join()
        raise


def _finished(started: deque[tuple[Chunk, Tensor, Any]], streams: OneStream) -> tuple[Chunk, Tensor]:
    chunk, hidden, work = started.popleft()
    streams.wait(work)
    return chunk, hidden
