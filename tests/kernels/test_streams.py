"""Row kernels beside GEMMs: that nothing overtakes what it needs, and that the numbers are those of one stream."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import linear_case
from torch import Tensor
from two_streams import Recorder

from dapo_kernels import OBJECTIVES
from dapo_kernels.engine import chunks, gradients, hidden, streams
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import Asked, Head, Needs, Plan, Slopes, Tokens

V, H = 33, 6
PLAN = Plan(None, False, None, "torch")
NEEDS = Needs(True, True, True, True, True)
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias_softcap": {"bias": True, "softcap": 5.0},
    "lora": {"rank": 2},
    "frozen": {"bias": True, "needs": Needs(True, False, False)},
    "bf16_waiting": {"dtype": torch.bfloat16, "bias": True, "plan": PLAN._replace(host_sync=True)},
}


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunks, hidden, gradients, streams):
        monkeypatch.setattr(module, "on_host", lambda x: False)


def in_chunks(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(chunks, "device_chunk_rows", lambda n_rows, *rest: -(-n_rows // n))


def run(of: str, pass_: str, recorder: Recorder | None = None) -> list[Tensor]:
    """The operators' bodies, everything they return."""
    said = dict(HEADS[of])
    needs, plan = said.pop("needs", NEEDS), said.pop("plan", PLAN)
    case = linear_case(V, H, (9, 1, 14, 7), seed=3, **said)
    x = case.leaves
    head = Head(x["hidden"], x["weight"], x.get("bias"), case.softcap, False, x.get("lora_a"), x.get("lora_b"), 0.5)
    advantages, live = case.advantages.clone(), case.mask
    advantages[::4] = 0.0
    tokens = Tokens(live, live.float(), advantages, case.old_logprobs, None, None)
    asked = Asked(case.target_ids, live, 0.9, None, True)
    scalars = ObjectiveScalars.of(OBJECTIVES["dapo"])._replace(entropy_coef=0.01)
    stats = hidden.linear_stats.run(head, asked, plan)
    with torch.no_grad(), recorder or torch.no_grad():
        if pass_ == "loss":
            out = hidden.linear_loss.run(head, asked, tokens, scalars, needs, plan)
        else:
            out = hidden.linear_grad.run(head, asked, stats, Slopes(advantages, live.float()), needs, plan)
    if recorder is not None:
        recorder.look_for_freed()
    return [x for x in out if x is not None]


@pytest.mark.parametrize("n_chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("pass_", ["loss", "grad"])
@pytest.mark.parametrize("of", HEADS)
def test_nothing_overtakes_what_it_needs(monkeypatch: pytest.MonkeyPatch, of: str, pass_: str, n_chunks: int) -> None:
    """Neither operations nor the allocator, with the bits of one stream; and every wait is needed for that."""
    in_chunks(monkeypatch, n_chunks)
    expected = run(of, pass_)
    recorder = Recorder()
    recorder.install(monkeypatch)
    got = run(of, pass_, recorder)
    assert recorder.races == []
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert {stream for stream, _ in recorder.order} == {0, 1}
    assert recorder.n_waits == 2 * n_chunks
    for wait in range(recorder.n_waits if n_chunks in (1, 3) else 0):
        without = Recorder(dropped=wait)
        without.install(monkeypatch)
        run(of, pass_, without)
        assert without.races, f"without wait {wait}"


def test_row_kernels_run_beside_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """R0 starts when L0 is done, and G0 waits for R0 but not for R1: GEMMs on either side of it."""
    in_chunks(monkeypatch, 3)
    recorder = Recorder()
    recorder.install(monkeypatch)
    run("plain", "loss", recorder)
    gemms = [i for i, (_, name) in enumerate(recorder.order) if name in ("aten::mm", "aten::addmm")]
    stages = [recorder.order[i][0] for i in gemms]
    assert stages == [0] * 9  # L0 L1 G0 G0 L2 G1 G1 G2 G2
    between = [any(s == 1 for s, _ in recorder.order[a:b]) for a, b in pairwise(gemms)]
    assert between == [True, True, False, False, True, False, False, False]


def test_one_buffer_would_be_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 3)
    recorder = Recorder()
    recorder.install(monkeypatch)
    shared = torch.empty(31, 64)
    monkeypatch.setattr(chunks.Chunks, "buffer", lambda made, dtype: shared[: made.size, :V])
    run("plain", "loss", recorder)
    assert recorder.races


def test_memory_of_the_other_stream_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second stream made, used on the first after a wait, and let go of before the second has waited."""
    recorder = Recorder()
    recorder.install(monkeypatch)
    for waits in (True, False):
        with recorder:
            pair, made = streams.TwoStreams(torch.device("cpu")), []
            pair.wait(pair.start(lambda made=made: made.append(torch.ones(3))))
            made[0] + 1
            if waits:
                pair.start(lambda: None)
            assert recorder.races == []
            made.clear()
            recorder.look_for_freed()
        assert bool(recorder.races) is not waits


def test_an_error_on_the_way_waits_for_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 3)
    recorder = Recorder()
    recorder.install(monkeypatch)

    def fails(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gradients.GradientSum, "add", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        run("plain", "loss", recorder)
    recorder.look_for_freed()
    assert recorder.races == []


def test_two_streams_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by default; never on the host, nor where row kernels of several ranks wait for one another."""
    x = torch.empty(1)
    assert type(streams.streams_for(x, PLAN)) is streams.OneStream
    Recorder().install(monkeypatch)
    assert type(streams.streams_for(x, PLAN)) is streams.TwoStreams
    assert type(streams.streams_for(x, PLAN._replace(group="tp"))) is streams.OneStream
    monkeypatch.setattr(streams, "on_host", lambda x: True)
    assert type(streams.streams_for(x, PLAN)) is streams.OneStream


def test_two_buffers_take_the_bytes_of_one() -> None:
    like = torch.empty(64, 2)
    work = chunks.Work(None, 64, 64)
    one, two = (chunks.Chunks(work, like, 16, torch.float32, 4, 32 * 16 * 4, n_buffers=n) for n in (1, 2))
    assert (one.size, two.size) == (32, 16)
    starts = [chunk.logits.data_ptr() for chunk in two]
    assert starts[0] == starts[2] != starts[1] == starts[3]
