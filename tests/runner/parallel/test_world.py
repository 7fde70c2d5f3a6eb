"""Ranks that are in this together: what fails on one fails on all, and who does what does not depend on who asks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from builders import make_config
from hypothesis import given
from hypothesis import strategies as st
from launch import torchrun
from refusals import refused

from dapo_runner.config import Config
from dapo_runner.parallel.balance import sequence_cost, spread
from dapo_runner.parallel.world import SINGLE_PROCESS, Layout, make_layout

PROGRAM = """
import json, os, sys, time
from builders import make_config
from dapo_runner.parallel.world import open_world
world = open_world(make_config(parallel={"timeout": 20.0}))
own, told = [], []

def work():
    if world.rank == 1:
        raise ValueError("not today")
    return world.rank

for ask in (world.run_and_gather, world.run_or_raise_everywhere, world.run_on_rank0, world.broadcast_from_rank0):
    try:
        told.append(ask(work))
    except ValueError as error:
        told.append(str(error))
told += [world.all_gather_object(world.rank * 10), world.any(world.rank == 2), world.any(False)]
told += [world.broadcast_from_rank0(lambda: world.rank)]
with open(f"{sys.argv[1]}/{world.rank}.json", "w") as file:
    json.dump(told, file)
os._exit(0)
"""


def test_what_one_rank_raises_all_raise(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = torchrun(3, program, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(3):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        kept = 0 if rank == 0 else None
        assert told == ["not today", "not today", kept, 0, [0, 10, 20], True, False, 0]


def test_alone_nothing_is_asked_of_anybody() -> None:
    assert SINGLE_PROCESS.run_and_gather(lambda: 5) == [5]
    assert (
        SINGLE_PROCESS.broadcast_from_rank0(lambda: 6),
        SINGLE_PROCESS.run_on_rank0(lambda: 7),
        SINGLE_PROCESS.run_or_raise_everywhere(lambda: 8),
    ) == (6, 7, 8)
    assert not SINGLE_PROCESS.any(False)
    with pytest.raises(ZeroDivisionError):
        SINGLE_PROCESS.run_or_raise_everywhere(lambda: 1 // 0)


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
    assert make_layout(config(replicate=2), 8, 4).replicate == 2
    assert make_layout(config(gpus=8, replicate=2, rollout_tensor=4), 8, 4).rollout_tensor == 4


@pytest.mark.parametrize(
    "parallel",
    [{"gpus": 8}, {"replicate": 3}, {"sequence": 3}, {"rollout_tensor": 4}],
    ids=lambda parallel: next(iter(parallel)),
)
def test_a_layout_that_does_not_fit_is_refused(parallel: dict[str, int]) -> None:
    with refused(f"parallel.{next(iter(parallel))}"):
        make_layout(config(**parallel), 4, 2)


def test_an_engine_that_shares_nothing_is_not_shared() -> None:
    with refused("parallel.rollout_tensor"):
        make_layout(make_config(parallel={"rollout_tensor": 2}), 2, 2)


STUCK = """
import os, signal, sys, time
from builders import make_config
from dapo_runner.parallel.world import open_world
world = open_world(make_config(parallel={"timeout": 3.0}))
world.watch.set_phase("rollout")
if world.rank != 1:  # as a run, which torchrun's signal does not end at once
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    if world.rank == 1:
        if sys.argv[1] == "stuck":
            time.sleep(60)
        if sys.argv[1] == "raises":
            raise KeyError("no such thing")
        if sys.argv[1] == "exits":
            os._exit(7)
        os.kill(os.getpid(), 9)
    world.watch.set_phase("wait")
    world.all_gather_object(1)
except Exception as error:
    told = world.watch.explain(error)
    if world.watch.is_first_to_print(str(told)):
        print(f"TOLD {told}", flush=True)
    os._exit(1)
"""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("stuck", "does not answer"),
        ("killed", "ended in 'rollout'"),
        ("exits", "ended in 'rollout'"),
        ("raises", "stopped: KeyError: 'no such thing'"),
    ],
)
def test_who_is_lost_is_named_once(tmp_path: Path, how: str, message: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(STUCK)
    begun = time.monotonic()
    done = torchrun(3, program, how)
    assert done.returncode != 0
    assert time.monotonic() - begun < 45
    told = [line for line in done.stdout.splitlines() if line.startswith("TOLD rank 1 on ")]
    assert len(told) == 1, done.stdout + done.stderr[-2000:]
    assert message in told[0]
