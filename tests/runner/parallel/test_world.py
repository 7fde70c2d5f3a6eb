"""Ranks and their communication: what fails on one fails on all, and a rank that is lost is named."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import threading
import time
import warnings
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from builders import make_config
from forks import CONTEXT
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks
from refusals import refused
from small import Notes
from torch.distributed import distributed_c10d

from dapo_runner.algorithms.packing import sequence_cost, spread
from dapo_runner.commands.output import share_warnings
from dapo_runner.config import Config
from dapo_runner.engines.client import RolloutError
from dapo_runner.engines.engine import RolloutEngine
from dapo_runner.interrupt import StopRequest
from dapo_runner.parallel import watch
from dapo_runner.parallel.ulysses import heads_from_positions, positions_from_heads
from dapo_runner.parallel.watch import RankLostError, Watch
from dapo_runner.parallel.world import Layout, RankError, World, make_layout, open_world
from dapo_runner.rollout.worker import RolloutWorker
from dapo_runner.run.steps import Run

HEADS = [(12, 3), (8, 2), (8, 4), (8, 8), (12, 6), (12, 12)]  # of queries, of keys: divisors of 4, multiples, neither


class UnpicklableError(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def fail_on_one(world: World, kind: type[Exception]) -> int:
    if world.rank == 1:
        raise kind(3, 4) if kind is UnpicklableError else kind("not today")
    return 10 * world.rank


def send_results_of_different_sizes(world: World) -> None:
    """A rank sends what it has, not as much as the others."""
    sent = list[int]()

    def count(function: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return function(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("send", "gather"):
            patch.setattr(distributed_c10d, name, partial(count, getattr(distributed_c10d, name)))
        found = world.run_and_gather_on_rank0(lambda: "x" * 10**6 if world.rank == 2 else "")
    assert [len(one) for one in found] == ([0, 0, 10**6, 0] if world.is_main else [])
    assert world.rank == 2 or sum(sent) < 1000


def communicate(rank: int) -> None:
    """Each method, alone with what it returns and with what it does when rank 1 fails."""
    world, group = open_world(make_config()), dist.group.WORLD
    assert (world.rank, world.size, world.is_main) == (rank, 4, rank == 0)
    main_only = 0 if rank == 0 else None
    assert world.all_gather_object(rank) == [0, 1, 2, 3]
    assert (world.any(rank == 2), world.any(False)) == (True, False)
    assert world.scatter_from_rank0([4, 5, 6, 7] if rank == 0 else []) == 4 + rank
    assert world.scatter_from_rank0([4, 5] if rank == 0 else [], 2) == 4 + rank // 2
    assert world.scatter_from_rank0([4] if rank == 0 else [], 4) == 4
    if rank == 0:
        with pytest.raises((AttributeError, pickle.PicklingError)):  # before anything is sent: the ranks stay in step
            world.scatter_from_rank0([4, lambda: None], 2)
    assert world.run_and_gather(lambda: rank) == [0, 1, 2, 3]
    assert world.run_or_raise_everywhere(lambda: rank) == rank
    assert world.run_and_gather_on_rank0(lambda: rank) == ([0, 1, 2, 3] if rank == 0 else [])
    send_results_of_different_sizes(world)
    assert world.run_on_rank0(lambda: fail_on_one(world, ValueError)) == main_only
    assert world.broadcast_from_rank0(lambda: fail_on_one(world, ValueError)) == 0
    assert world.new_group(60.0).all_gather_object(rank) == [0, 1, 2, 3]
    for method in (world.run_and_gather, world.run_or_raise_everywhere):
        for kind, told in ((ValueError, ValueError), (UnpicklableError, UnpicklableError if rank == 1 else RankError)):
            with pytest.raises(told):
                method(lambda kind=kind: fail_on_one(world, kind))  # type: ignore[misc]
    with pytest.raises(RankError) if rank == 0 else open(os.devnull):
        assert world.run_and_gather_on_rank0(lambda: fail_on_one(world, UnpicklableError)) == []
    with pytest.raises(ZeroDivisionError):
        world.broadcast_from_rank0(lambda: 1 // 0)

    assert group is not None
    for n_query, n_key in HEADS:  # each query head is beside its key head
        positions = torch.arange(2 * rank, 2 * rank + 2)[:, None]
        query = (100 * positions + torch.arange(n_query))[:, :, None].float()  # which position and head it is
        key = (100 * positions + torch.arange(n_key))[:, :, None].float()
        own_query, own_key, own_value = heads_from_positions(query, key, -key, group)
        n_own = n_query // 4
        heads, everywhere = torch.arange(rank * n_own, (rank + 1) * n_own), 100 * torch.arange(8)[:, None]
        torch.testing.assert_close(own_query[:, :, 0], (everywhere + heads).float())
        beside = own_key[:, :, 0].repeat_interleave(n_own // own_key.shape[1], dim=1)  # as attention does
        torch.testing.assert_close(beside, (everywhere + heads // (n_query // n_key)).float())
        torch.testing.assert_close(own_value, -own_key)
        torch.testing.assert_close(positions_from_heads(own_query, group), query)
        assert own_key.shape[1] == max(n_key // 4, 1) or n_key % 4

    assert world.all_stopped(ValueError("on every rank"))
    halves = open_world(make_config(parallel={"replicate": 2, "sequence": 2}))  # as a restart does: with the same store
    with mock.patch.object(watch, "MEETING", 0.1):
        assert rank or not halves.all_stopped(ValueError("on rank 0 alone"))
    engine, first = cast("Any", SimpleNamespace(generate=lambda requests: [rank])), 2 * halves.data_rank
    for shared, probed in ((1, [first, first + 1]), (2, [first]), (4, [first])):  # every engine, in lists of one length
        layout = replace(halves.layout, rollout_tensor=shared)
        found = RolloutEngine.answers_to_probe(engine, [], replace(halves, layout=layout))
        assert found == [(f" on rank {one}", [one]) for one in probed]
    with refused("parallel.replicate"):
        open_world(make_config(parallel={"replicate": 3}))


def test_ranks_communicate() -> None:
    on_ranks(4, communicate)


@given(st.lists(st.integers(1, 20_000), max_size=40), st.integers(1, 9))
def test_work_is_spread_evenly(lengths: list[int], n: int) -> None:
    costs = [sequence_cost(length, 64) for length in lengths]
    shares = spread(costs, n)
    assert sorted(place for share in shares for place in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(costs[place] for place in share) for share in shares]
    assert max(loads) <= sum(loads) / n + max(costs, default=0.0)


def test_attention_over_twelve_hidden_sizes_costs_as_much_as_the_matrix_products() -> None:
    assert sequence_cost(12 * 64, 64) == 2 * 12 * 64
    assert sequence_cost(24 * 64, 64) == 3 * 24 * 64


def config(**parallel: object) -> Config:
    return make_config(parallel=parallel, rollout={"engine": "vllm"} if "rollout_tensor" in parallel else {})


def test_layouts() -> None:
    assert make_layout(config(), 4, 4) == Layout(4, shard=4)
    assert make_layout(config(replicate=2, sequence=2), 8, 4) == Layout(8, shard=4, sequence=2)
    assert make_layout(config(gpus=8, replicate=2, rollout_tensor=4), 8, 4).rollout_tensor == 4
    world = World(rank=5, layout=Layout(8, shard=4, sequence=2, rollout_tensor=4))
    assert (world.layout.replicate, world.data_size, world.data_rank) == (2, 4, 2)
    assert (world.is_engine_leader, World(rank=4, layout=world.layout).is_engine_leader) == (False, True)


@pytest.mark.parametrize("name", ["gpus", "replicate", "sequence", "rollout_tensor"])
def test_a_layout_that_does_not_fit_is_refused(name: str) -> None:
    with refused(f"parallel.{name}"):
        make_layout(config(**{name: {"gpus": 8, "rollout_tensor": 4}.get(name, 3)}), 4, 2)


def test_several_processes_without_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train alone, in one folder."""
    with refused("parallel.gpus"):
        open_world(config(gpus=2))
    with refused("parallel.sequence: expected a divisor of 1, got 2"):
        open_world(config(sequence=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("WORLD_SIZE=2"):
        open_world(config())


def lose_rank_1(rank: int, how: str, folder: Path) -> None:
    if rank != 1:  # as a run, which the signal of a launcher does not end at once
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)  # torchrun counts on each machine
    world = open_world(make_config(parallel={"timeout": 3.0}))
    quick = world.new_group(3.0 if how == "stuck" else 60.0)  # the ranks' own group waits for minutes
    assert world.watch is not None
    world.watch.set_phase("rollout")
    try:
        if rank == 1:
            if how == "stuck":
                wait_for(lambda: len(list(folder.iterdir())) == 2)
            if how == "raises":
                raise RolloutError("NCCL: Connection reset by peer\nnor that")
            os.kill(os.getpid(), signal.SIGKILL)
        world.watch.set_phase("wait")
        quick.all_gather_object(1)
    except Exception as error:
        told = world.watch.explain(error)
        if rank != 1:
            is_first = world.watch.is_first_to_print(str(told))
            found = (type(told).__name__, str(told), is_first)
            (folder / f"half-{rank}").write_text(json.dumps(found))
            (folder / f"half-{rank}").rename(folder / str(rank))
            wait_for(lambda: (folder / str(2 - rank)).exists())  # which looks at this rank too
        os._exit(1)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("how", "part"),
    [("stuck", "'rollout'"), ("killed", "'rollout'"), ("raises", "RolloutError: NCCL: Connection reset by peer")],
)
def test_a_rank_that_is_lost_is_named_once(tmp_path: Path, how: str, part: str) -> None:
    """By the first of the others to print."""
    with pytest.raises(Exception, match=r"process \d"):
        on_ranks(3, lose_rank_1, how, tmp_path)
    wait_for(lambda: {path.name for path in tmp_path.iterdir()} == {"0", "2"})
    found = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    for kind, message, _ in found:
        assert kind == RankLostError.__name__
        assert message.startswith("rank 1 on ")
        assert part in message
    assert sorted(is_first for *_, is_first in found) == [False, True]


def open_without_torchrun(variables: dict[str, str]) -> None:
    os.environ |= variables
    began = time.monotonic()
    Watch()  # of a message before the process group
    world = open_world(make_config())
    assert time.monotonic() - began < 8
    assert world.all_stopped(ValueError("not today"))
    assert not world.all_stopped(dist.DistError("Connection closed by peer"))


def test_another_launcher_than_torchrun_has_no_store_before_the_process_group() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    process = CONTEXT.Process(target=open_without_torchrun, args=(variables | {"RANK": "0", "WORLD_SIZE": "1"},))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_store_that_is_lost_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting to a port where nobody listens takes 20 s."""
    monkeypatch.setattr(Watch, "is_lost", False)
    watch, store = Watch(), mock.Mock()
    watch._store, watch.size, store.get.side_effect = store, 2, RuntimeError("gone")
    assert "rank 0 is lost" in str(watch.explain(RuntimeError("Connection reset by peer")))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with mock.patch("dapo_runner.parallel.watch.TCPStore", side_effect=AssertionError):
        assert Watch().is_first_to_print("a line")


def warn(rank: int, folder: Path) -> None:
    share_warnings()
    warnings.simplefilter("always")
    with (folder / f"{rank}.err").open("w") as errors, redirect_stderr(errors):
        for text in ("all", *(["one"] if rank == 1 else [])):
            warnings.warn(f"{text} of the ranks", stacklevel=1)
        if rank == 2:  # what is printed already is not waited for
            with mock.patch("time.sleep", side_effect=AssertionError):
                warnings.warn("all of the ranks", stacklevel=1)
    notes, found = Notes(), ["all of the ranks", f"a prompt of rank {rank}"]
    score = SimpleNamespace(take_warnings=lambda: 2 * found, take_counts=dict)
    context = {"world": open_world(make_config()), "progress": notes, "worker": SimpleNamespace(episodes=None)}
    Run.count_calls(cast("Any", SimpleNamespace(score=score, **context)))
    (folder / str(rank)).write_text("\n".join(notes.lines))


def test_a_warning_of_several_ranks_is_printed_once(tmp_path: Path) -> None:
    """By rank 0, or with the name of a rank that has it alone: of Python, and of rewards after a step."""
    on_ranks(3, warn, tmp_path)
    of_all, of_one, of_none = ((tmp_path / f"{rank}.err").read_text() for rank in range(3))
    assert (of_all.count("all of the ranks"), of_one.count("one of the ranks"), of_none) == (1, 1, "")
    assert ("rank 0" in of_all, "rank 1: " in of_one, "all of" in of_one) == (False, True, False)
    noted = (tmp_path / "0").read_text().splitlines()
    assert {"all of the ranks", "a prompt of rank 0"} < set(noted)
    for rank in (1, 2):
        assert [line[:10] for line in noted if line.endswith(f"a prompt of rank {rank}")] == [f"rank {rank} on "]
    assert len(noted) == 4


class Echo:
    def generate(self, requests: Any, options: Any) -> list[list[int]]:
        return [[request.index] for request in requests]


class LateError:
    """A StopRequest that fails when rank 1 asks it."""

    @property
    def is_late(self) -> bool:
        raise ValueError("no clock")

    def abandoning(self) -> Any:
        return nullcontext()


def fail_to_follow(rank: int, how: str, folder: Path) -> None:
    if rank != 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world = open_world(make_config()).new_group(30.0)
    stop: Any = LateError() if how == "late" and rank == 1 else StopRequest()

    def score(prompts: Any, completions: Any) -> list[Any]:
        return [(lambda: None) if how == "unpicklable" and rank == 1 else number for (number,) in completions]

    worker = RolloutWorker(cast("Any", Echo()), cast("Any", score), None, world=world, stop=stop)
    prompt = SimpleNamespace(token_ids=[1], n_response_tokens=0)
    requests = [
        SimpleNamespace(index=index, prompt=prompt, sampling=SimpleNamespace(max_tokens=1)) for index in range(3)
    ]
    began = time.monotonic()
    try:
        assert worker.run_on_rank0(lambda: worker.generate(cast("Any", requests))) in (None, [0, 1, 2])
        (folder / str(rank)).write_text("followed")
    except Exception as error:
        try:
            world.close(error)
        except RankLostError as explained:
            (folder / str(rank)).write_text(f"{explained}")
        assert time.monotonic() - began < 15
        os._exit(1)


def test_a_rank_that_fails_to_follow_is_named(tmp_path: Path) -> None:
    """Outside of what every rank gathers: the others do not wait for it."""
    on_ranks(3, fail_to_follow, "", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == 3 * ["followed"]
    for how, part in (("late", "ValueError: no clock"), ("unpicklable", "lambda")):
        (tmp_path / how).mkdir()
        with pytest.raises(Exception, match=r"process \d"):
            on_ranks(3, fail_to_follow, how, tmp_path / how)
        wait_for(lambda how=how: len(list((tmp_path / how).iterdir())) == 2)
        found = {path.name: path.read_text() for path in (tmp_path / how).iterdir()}
        assert found.keys() == {"0", "2"}
        assert all(text.startswith("rank 1 on ") and part in text for text in found.values()), found


def publish_and_end(variables: dict[str, str], phase: str, end: Any) -> None:
    os.environ |= variables
    Watch().set_phase(phase)
    end.wait()


def test_of_two_dead_ranks_the_one_in_another_phase_is_named_also_if_it_ends_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    own = Watch()
    own.set_phase("wait")
    ends = [CONTEXT.Event() for _ in range(2)]
    ends[0].set()
    processes = [
        CONTEXT.Process(target=publish_and_end, args=(variables | {"RANK": str(rank)}, phase, end))
        for rank, phase, end in zip((1, 2), ("wait", "rollout"), ends, strict=True)
    ]
    for process in processes:
        process.start()
    processes[0].join()
    threading.Timer(0.05, ends[1].set).start()
    found = str(own.explain(dist.DistError("Connection closed by peer")))
    assert "rank 2 on" in found
    assert "ended in 'rollout'" in found
    processes[1].join()
