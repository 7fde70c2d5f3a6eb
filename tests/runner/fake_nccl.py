"""Groups of a trainer and a server with files in NCCL's place: both ends meet in a folder, named after their id."""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from fake_server import FakeServer

MEET, UPDATE = "/init_weight_transfer_engine", "/update_weights"
MET, ABORTED = "met", "aborted"


class FileGroup:
    """The trainer's end, in the place of ``dapo_runner.rollout.nccl.Group``."""

    folder: ClassVar[Path]

    def __init__(self, device: torch.device) -> None:
        self.is_aborted, self.numbers, self.place = False, itertools.count(), self.folder / "nowhere"

    def join(self, unique_id: bytes, size: int) -> None:
        assert size == 3
        self.place = self.folder / unique_id.decode()
        self.place.mkdir(parents=True)
        assert appears(self.place / MET)
        if self.is_aborted:
            self.abort()

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor, number in zip(tensors, self.numbers, strict=False):
            torch.save(tensor, half := self.place / "half")
            half.rename(self.place / str(number))

    def abort(self) -> None:
        self.is_aborted = True
        if (self.place / MET).exists():
            (self.place / ABORTED).touch()


def join(server: FakeServer, folder: Path) -> None:
    """Has the server do what vLLM's NCCL backend does; a restart forgets the group."""

    def meet(body: dict[str, Any]) -> tuple[int, Any]:
        told = body["init_info"]
        assert told.keys() == {"nccl_unique_id_b64", "rank_offset", "world_size"}  # and no store to unpickle
        assert (told["rank_offset"], told["world_size"]) == (1, 3)
        place = folder / base64.b64decode(told["nccl_unique_id_b64"]).decode()
        if not appears(place):
            return 500, {"error": "nobody there"}
        server.engine.group = place, itertools.count()  # type: ignore[attr-defined]
        (place / MET).touch()
        return 200, {}

    def receive(body: dict[str, Any]) -> tuple[int, Any]:
        group = getattr(server.engine, "group", None)
        if group is None:
            return 500, {"error": "not initialized"}
        told, (place, numbers) = body["update_info"], group
        found = list[torch.Tensor]()
        for _, number in zip(told["names"], numbers, strict=False):
            if not appears(place / str(number), unless=place / ABORTED):
                return 500, {"error": "aborted"}
            found.append(torch.load(place / str(number)))
        assert [list(x.shape) for x in found] == told["shapes"]
        assert {str(x.dtype) for x in found} == {f"torch.{name}" for name in told["dtype_names"]}
        server.engine.update_weights(zip(told["names"], found, strict=True))
        return 200, {}

    server.hooks |= {MEET: meet, UPDATE: receive, "/get_world_size": lambda _: (200, {"world_size": 2})}


def appears(path: Path, unless: Path | None = None) -> bool:
    """Whether it is there within 30 s, and the other is not before it."""
    until = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > until or (unless is not None and unless.exists()):
            return False
        time.sleep(0.001)
    return True
