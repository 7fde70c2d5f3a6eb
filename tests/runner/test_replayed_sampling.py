"""Responses sampled with top-p, top-k or min-p, and an update that compares them with what they were sampled from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import CUTS, backward, make_config, pack_mini_batch, random_sequences, what_is_left, with_lists
from torch import Tensor

from dapo_runner.algorithms.advantage import make_sequence
from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import ModelConfig, TreeShape
from dapo_runner.engines.hf import HFEngine
from dapo_runner.engines.vllm import read_support
from dapo_runner.policy.model import Policy, load_model, load_tokenizer
from dapo_runner.rollout.segments import add_prefix, grow_trees, join_continuation
from dapo_runner.types import (
    Completion,
    Group,
    Prompt,
    Sample,
    SamplingParams,
    TrainingSequence,
    TruncatedSupport,
    Verdict,
    make_requests,
)

CPU = torch.device("cpu")
MODEL = ModelConfig(path="x", dtype="float32")


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> HFEngine:
    return HFEngine(load_model(model_folder, MODEL, CPU, "sdpa"), load_tokenizer(model_folder, MODEL), 64)


def prompt(text: str, engine: HFEngine) -> Prompt:
    return Prompt(text, tuple(engine.tokenizer(text)["input_ids"]), text, "")


def lists_of(kept: TruncatedSupport | None) -> list[list[int]]:
    assert kept is not None
    return [part.tolist() for part in kept.ids.split(kept.counts.tolist())]


def check_completion(engine: HFEngine, asked: Prompt, completion: Completion, cut: dict[str, Any]) -> None:
    """Against one pass over the whole sequence and the definition of the cuts."""
    n = completion.length
    with torch.no_grad():
        ids = torch.tensor([*asked.token_ids, *completion.token_ids.tolist()])
        probs = engine.model(input_ids=ids[None], use_cache=False).logits[0, -n - 1 : -1].softmax(-1)
    lists = lists_of(completion.support)
    assert len(lists) == n
    for place, kept in enumerate(lists):
        left = what_is_left(probs[place].tolist(), **cut)
        assert set(kept) == (set(left) if len(left) < probs.shape[-1] else set())
        share = left[int(completion.token_ids[place])]
        assert float(completion.logprobs[place].exp()) == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("cut", [*CUTS, {"top_p": 0.6}, {}])
def test_the_engine_says_what_it_kept(engine: HFEngine, cut: dict[str, Any]) -> None:
    """Where nothing is cut off, it keeps no lists."""
    asked = [prompt("3+4=", engine), prompt("12+5=", engine)]
    sampling = SamplingParams(n=4, max_tokens=6, sampling_mask=True, **cut)
    plain = engine.generate(make_requests(asked, replace(sampling, sampling_mask=False)))
    for one, answers, same in zip(asked, engine.generate(make_requests(asked, sampling)), plain, strict=True):
        for completion, other in zip(answers, same, strict=True):
            assert torch.equal(completion.token_ids, other.token_ids)
            assert other.support is None
            check_completion(engine, one, completion, cut)


def test_trees_continuations_and_sequences_carry_the_lists(engine: HFEngine) -> None:
    asked, sampling = prompt("12+34=", engine), SamplingParams(max_tokens=6, top_k=4, sampling_mask=True)
    shape = TreeShape(branching=(2, 2), tokens=2)
    (leaves,) = grow_trees(engine.generate, engine.tokenizer, make_requests([asked], sampling), shape)
    for leaf in leaves:
        check_completion(engine, asked, leaf, {"top_k": 4})
    begun = add_prefix(asked, [5, 6])
    ((rest,),) = engine.generate(make_requests([begun], sampling))
    whole = join_continuation(begun, rest, engine.tokenizer)
    assert lists_of(whole.support) == [[], [], *lists_of(rest.support)]
    sample = Sample(whole, Verdict(True), 1.0)
    sequence = make_sequence(Group(asked, (sample,), 2), sample, 1.0, 0, 0)
    assert lists_of(sequence.support) == [[]] * len(asked.token_ids) + lists_of(whole.support)


def test_the_update_is_that_of_what_was_kept(policy: Policy, engine: HFEngine) -> None:
    """Loss and log-probs by hand, whatever the packing."""
    vocab = policy.head.weight.shape[0]
    sequences = [s for s in with_lists(random_sequences(10, seed=2), vocab) if s.mask[1:].any()]
    learner = Learner(policy, make_config(loss={"old_logprobs": "engine"}))
    found: list[tuple[float, dict[str, Tensor]]] = []
    for budget in (64, 1024):
        mini = pack_mini_batch(learner, sequences, budget)
        outs = [(batch, backward(learner, mini, batch)) for batch in mini.micro_batches]
        loss = sum(float(out.loss.detach()) for _, out in outs)
        found.append((loss, {name: p.grad.clone() for name, p in policy.model.named_parameters()}))
        policy.model.zero_grad()
        for batch, out in outs:
            own = learner.logprobs(batch)
            torch.testing.assert_close(own, out.logprobs, atol=1e-6, rtol=1e-6)
            expected = torch.cat([by_hand(engine, sequences[index]) for index in batch.sequence_ids.tolist()])
            torch.testing.assert_close(own[: len(expected)], expected, atol=1e-5, rtol=1e-5)
    (a, grads), (b, same) = found
    assert a == pytest.approx(b, abs=1e-6)
    for name, grad in grads.items():
        assert (same[name] - grad).norm() <= 1e-5 * grad.norm(), name


@torch.no_grad()
def by_hand(engine: HFEngine, sequence: TrainingSequence) -> Tensor:
    logits = engine.model(input_ids=sequence.token_ids[None], use_cache=False).logits[0, :-1]
    lists = [[]] * sequence.length if sequence.support is None else lists_of(sequence.support)
    for row, kept in zip(logits, lists[1:], strict=True):
        if kept:
            row[[token for token in range(len(row)) if token not in kept]] = -torch.inf
    logprobs = logits.log_softmax(-1).gather(1, sequence.token_ids[1:, None])[:, 0]
    return torch.where(sequence.mask[1:], logprobs, 0.0)


def test_vllms_lists_are_read() -> None:
    """The sampled token comes first and once more among the likeliest; what was cut off has −∞. In the last step the
    sampled one is a tie beyond those that were asked for.
    """
    flat = SimpleNamespace(
        token_ids=[7, 3, 7, 9, 3, 3, 9, 7, 5, 1, 2, 4],
        logprobs=[-1.2, -0.4, -1.2, -torch.inf, 0.0, 0.0, -torch.inf, -torch.inf, -2.0, -0.5, -1.4, -2.0],
        start_indices=[0, 4, 8],
    )
    assert [sorted(kept) for kept in lists_of(read_support(flat))] == [[3, 7], [3], [1, 2, 4, 5]]
