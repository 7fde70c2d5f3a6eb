"""Packing: nothing lost, nothing doubled, everything beside its own token, and little wasted."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from builders import make_sequence, pack
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_runner.algorithms.packing import assign_bins, count_training_tokens, pack_shares
from dapo_runner.types import TruncatedSupport

LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)).filter(lambda pair: sum(pair) > 0), max_size=30)


@settings(max_examples=80)
@given(
    lengths=LENGTHS,
    budget=st.integers(14, 60),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 4),
    together=st.integers(1, 2),
    data=st.data(),
)
def test_every_training_token_is_on_one_rank_with_its_own_values(
    lengths: list[tuple[int, int]], budget: int, ranks: int, multiple: int, together: int, data: st.DataObject
) -> None:
    """As many micro-batches on every rank; neighbours stay together and ages apart; padding trains nothing."""
    budget *= together
    n = len(lengths) // together * together
    ages = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    sequences = [
        replace(make_sequence(*length, group_id=index // 3, first_token=1000 * index), age=ages[index // together])
        for index, length in enumerate(lengths[:n])
    ]
    shares = pack_shares(sequences, budget, ranks=ranks, multiple=multiple, together=together, first_id=7)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    units: list[list[int]] = []
    for batch in (batch for share in shares for batch in share):
        assert batch.n_positions % multiple == 0
        assert 0 < batch.n_positions < budget + multiple
        dtypes = (batch.cu_seqlens.dtype, batch.input_ids.dtype, batch.mask.dtype)
        assert dtypes == (torch.int32, torch.int64, torch.bool)
        ids = [index - 7 for index in batch.sequence_ids.tolist()]
        own = [index for index in ids if index < len(sequences)]
        units += [own[start : start + together] for start in range(0, len(own), together)]
        assert len({sequences[index].age > 0 for index in own}) <= 1
        assert batch.group_ids.tolist() == [sequences[index].group_id for index in own] + [-1] * (len(ids) - len(own))
        for (start, end), index in zip(pairwise(batch.cu_seqlens.tolist()), own, strict=False):
            whole = sequences[index]
            assert torch.equal(batch.input_ids[start:end], whole.token_ids[:-1])
            assert torch.equal(batch.target_ids[start:end], whole.token_ids[1:])
            assert torch.equal(batch.mask[start:end], whole.mask[1:])
            assert torch.equal(batch.advantages[start:end], whole.advantages[1:])
            assert torch.equal(batch.old_logprobs[start:end], whole.rollout_logprobs[1:])
            assert batch.position_ids[start:end].tolist() == list(range(end - start))
        assert not batch.mask[batch.cu_seqlens[len(own)] :].any()
    every = [list(range(start, start + together)) for start in range(0, len(sequences), together)]
    assert sorted(units) == [unit for unit in every if count_training_tokens([sequences[index] for index in unit])]


@pytest.mark.parametrize("median", [500, 2000])
def test_micro_batches_are_filled_while_responses_grow(median: int) -> None:
    """512 log-normal lengths, cut at the paper's 20480, with prompts of up to 300 tokens, into 22528 positions."""
    rng = random.Random(1)
    lengths = {i: rng.randint(50, 300) + min(20480, int(rng.lognormvariate(math.log(median), 1.0))) for i in range(512)}
    bins = assign_bins(lengths, 22528)
    assert len(bins) <= 1 + math.ceil(sum(lengths.values()) / 22528)  # of what nothing can do with fewer than
    full = bins if len(bins) > 20 else bins[:-1]  # of few, the last one holds what is left over
    assert sum(lengths[i] for bin_ in full for i in bin_) / (22528 * len(full)) >= 0.95


def test_too_long_is_an_error() -> None:
    assert len(pack([make_sequence(3, 8)], 10)) == 1
    with pytest.raises(ValueError, match=r"optimizer\.token_budget"):
        pack([make_sequence(3, 9)], 10)


def test_optional_tensors_are_padded() -> None:
    """Rewards, supports and experts of sequences that have them; 0 for padding, an empty list the whole vocabulary."""
    support = TruncatedSupport(torch.tensor([5, 6, 9], dtype=torch.int32), torch.tensor([0, 2, 1], dtype=torch.int32))
    experts = torch.arange(4, dtype=torch.uint8).view(2, 2)
    full = replace(make_sequence(1, 2), reward=0.5, support=support, experts=experts)
    plain = make_sequence(1, 2, first_token=10)
    (batch,) = pack([full, plain], 100, multiple=3)
    assert batch.rewards is not None
    assert batch.support_ids is not None
    assert batch.support_counts is not None
    assert batch.rewards.tolist() == [0.5, 0.0, 0.0]
    assert (batch.support_ids.tolist(), batch.support_counts.tolist()) == ([5, 6, 9], [2, 1, 0, 0, 0, 0])
    (alone,) = pack([full], 100, multiple=3)
    assert alone.experts is not None
    assert alone.experts.tolist() == [[0, 1], [2, 3], [0, 0]]
    assert alone.cu_seqlens.tolist() == [0, 2, 3]
