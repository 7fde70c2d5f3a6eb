"""Trees and continuations: what is asked of an engine, and what comes of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import make_config, make_prompt
from contract import model_logprobs, prompt

from dapo_runner.config import SegmentsConfig, TreeShape
from dapo_runner.engines.hf import HFEngine
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rollout.segments import add_prefix, grow_trees, value_chains
from dapo_runner.rollout.worker import RolloutWorker
from dapo_runner.tiny_model import make_tokenizer
from dapo_runner.types import (
    Completion,
    Group,
    Prompt,
    RolloutRequest,
    Sample,
    SamplingParams,
    Verdict,
    make_requests,
)

P_ONE = 0.7  # of the toy policy, for every one of its tokens
LENGTH = 4
CHAIN = SegmentsConfig(kind="chain", interval=1, samples=4000)


class ToyPolicy:
    """Writes four tokens, 1 or 0; right are four ones. From k ones it succeeds with a chance of 0.7^(4 − k)."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[int, ...]] = Counter()

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Group]:
        groups = []
        for request in requests:
            prefix, sampling = request.prompt, request.sampling
            begun = prefix.token_ids[len(prefix.token_ids) - prefix.n_response_tokens :]
            assert sampling.max_tokens == LENGTH - len(begun)
            self.asked[begun] += 1
            dice = random.Random(f"{sampling.seed}:{request.index}")
            draws = [[int(dice.random() < P_ONE) for _ in range(sampling.max_tokens)] for _ in range(sampling.n)]
            groups.append(Group(prefix, tuple(scored([*begun, *drawn]) for drawn in draws)))
        return groups


def scored(tokens: list[int]) -> Sample:
    probabilities = torch.tensor([P_ONE if token else 1 - P_ONE for token in tokens])
    right = all(tokens)
    completion = Completion(torch.tensor(tokens), probabilities.log(), "stop", "")
    return Sample(completion, Verdict(right), base_reward=float(right))


def test_the_prefixes_of_a_response_share_its_tokens() -> None:
    toy, asked = ToyPolicy(), list[RolloutRequest]()

    def generate(requests: Sequence[RolloutRequest]) -> list[Group]:
        asked.extend(requests)
        return toy.generate(requests)

    response, p = torch.tensor([1001, 1002, 1003, 1004]), torch.full((LENGTH,), P_ONE)
    sample = Sample(Completion(response, p.log(), "stop", ""), Verdict(True), base_reward=1.0)
    value_chains([Group(make_prompt(), (sample,))], CHAIN, SamplingParams(max_tokens=LENGTH), generate)
    tokens = [token for request in asked for token in request.prompt.token_ids if token > 1000]
    assert tokens == [1001, 1001, 1002]
    assert len(set(map(id, tokens))) == 2


def test_values_are_those_of_the_policy() -> None:
    """The first two tokens are segments, and the rest is one. A 0 ends all hope."""
    toy, sampling = ToyPolicy(), SamplingParams(max_tokens=LENGTH, seed=1)
    group = Group(make_prompt(), (scored([1, 1, 1, 1]), scored([1, 0, 1, 1])))
    (valued,), counts = value_chains([group], CHAIN, sampling, toy.generate)
    values = [P_ONE**4, P_ONE**3, P_ONE**2]
    error = 3 * 0.5 / CHAIN.samples**0.5  # three standard deviations of a mean, at the most
    right, wrong = (sample.segments for sample in valued.samples)
    assert [segment.before for segment in right] == pytest.approx(values, abs=error)
    assert [segment.before for segment in wrong] == pytest.approx([*values[:2], 0], abs=error)
    assert [segment.length for segment in right] == [1, 1, 2]
    assert sum(segment.advantage for segment in right) == pytest.approx(1 - P_ONE**4, abs=error)
    assert wrong[-1].advantage == 0
    assert toy.asked == {(): 1, (1,): 1, (1, 1): 1, (1, 0): 1}  # once each, though both responses begin alike
    assert counts == {"prefixes": 4, "continuations": 4 * CHAIN.samples, "tokens": (4 + 3 + 2 + 2) * CHAIN.samples}


TEXTS = ("1+1=", "123+45678=", "7", "90+90=")
TREE = TreeShape(branching=(3, 2, 2), tokens=2)


def test_a_tree_and_its_leaves(engine: HFEngine) -> None:
    prompts, end = [prompt(text, engine) for text in TEXTS], engine.tokenizer.eos_token_id
    requests = make_requests(prompts, SamplingParams(n=12, max_tokens=12, seed=5))
    trees = grow_trees(engine.generate, engine.tokenizer, requests, TREE)
    leaves = [(asked, leaf) for asked, tree in zip(prompts, trees, strict=True) for leaf in tree]
    assert {leaf.finish_reason for _, leaf in leaves} == {"stop", "length"}
    assert any(len(leaf.path) < 3 for _, leaf in leaves)  # some end before the last level
    for tree in trees:
        children = [[branch.child for branch in leaf.path] for leaf in tree]
        assert children == sorted(children)
        assert len({tuple(path) for path in children}) == len(tree) <= 12
        nodes: dict[tuple[Any, ...], list[int]] = {}
        for leaf in tree:
            for depth in range(1, len(leaf.path) + 1):  # responses of one node share its tokens
                of_node = leaf.token_ids.tolist()[: sum(branch.length for branch in leaf.path[:depth])]
                assert nodes.setdefault(leaf.path[:depth], of_node) == of_node
    for asked, leaf in leaves:
        tokens, lengths = leaf.token_ids.tolist(), [branch.length for branch in leaf.path]
        assert sum(lengths) == leaf.length == leaf.logprobs.numel() <= 12
        assert all(length == 2 for length in lengths[:-1])
        assert (tokens[-1] == end) == (leaf.finish_reason == "stop")
        assert leaf.finish_reason == "stop" or leaf.length == 12
        assert leaf.text == engine.tokenizer.decode(tokens, skip_special_tokens=True)
        torch.testing.assert_close(leaf.logprobs, model_logprobs(engine.model, asked, leaf), atol=2e-4, rtol=1e-4)


def test_a_continued_response_is_whole(engine: HFEngine) -> None:
    asked = replace(prompt("1+1=", engine), answer="2")
    tokens = torch.tensor(engine.tokenizer("12")["input_ids"][-2:])
    prefix = add_prefix(asked, tokens.tolist())
    assert prefix.token_ids == (*asked.token_ids, *tokens.tolist())
    assert (prefix.n_response_tokens, prefix.answer) == (2, "2")
    requests = make_requests([prefix], SamplingParams(max_tokens=4))
    ((continuation,),) = engine.generate(requests)
    (group,) = RolloutWorker(engine, Scorer(make_config()), engine.tokenizer).generate(requests)
    whole = group.samples[0].completion
    assert whole.token_ids.tolist() == [*tokens.tolist(), *continuation.token_ids.tolist()]
    assert whole.text.startswith("12")
    assert whole.finish_reason == continuation.finish_reason
    assert whole.logprobs.shape == whole.token_ids.shape


def test_levels_and_nodes_draw_their_own_random_numbers() -> None:
    """Of every seed and place, which together make the numbers that an engine draws for a prompt. Which rank grows a
    tree makes no difference.
    """
    drawn: list[tuple[int, int]] = []

    def generate(requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        drawn.extend((request.sampling.seed, request.index) for request in requests)
        answer = Completion(torch.tensor([3, 4]), torch.zeros(2), "length", "")
        return [[answer] * request.sampling.n for request in requests]

    prompts = [Prompt(str(i), (3, 4), "", "") for i in (0, 1)]
    requests = make_requests(prompts, SamplingParams(n=12, max_tokens=12, seed=5))
    grow_trees(generate, make_tokenizer(), requests, TREE)
    assert len(set(drawn)) == len(drawn) == 2 * (1 + 3 + 6)
    assert len({seed for seed, _ in drawn}) == 3  # one of each level
    every = set(drawn)
    drawn.clear()
    for request in requests:
        grow_trees(generate, make_tokenizer(), [request], TREE)
    assert set(drawn) == every
