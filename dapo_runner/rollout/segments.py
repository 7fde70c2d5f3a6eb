"""What segment advantages ask of an engine: responses that grow as trees, and continuations from within a response.

A prefix is continued by a prompt that ends in it, so both take no more of an engine than ``generate``. Every draw is
tied to the place of a prompt in its call or of a node in its tree: the tokens are the same for any number of ranks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dapo_runner.algorithms.segments import chain_segments, chain_starts
from dapo_runner.config import SegmentsConfig, TreeShape
from dapo_runner.types import Branch, Completion, Group, Prompt, Sample, SamplingParams, TruncatedSupport

GenerateEach = Callable[[Sequence[Prompt], Sequence[SamplingParams]], list[list[Completion]]]
"""An engine's ``generate`` with the sampling of every prompt."""
AnswerEach = Callable[[Sequence[Prompt], list[SamplingParams]], list[Group]]
"""For each prompt, in their order, a scored group of whole responses: what was begun is part of them."""


def begin(prompt: Prompt, tokens: Tensor) -> Prompt:
    """``prompt`` with the first ``tokens`` of a response, int64 [N], which is to be continued."""
    return replace(prompt, token_ids=(*prompt.token_ids, *tokens.tolist()), n_response_tokens=len(tokens))


def joined(prefix: Prompt, completion: Completion, tokenizer: Any) -> Completion:
    """The whole response that a continuation ends. What was begun has no log-probs here: they are 0."""
    begun = torch.tensor(prefix.token_ids[len(prefix.token_ids) - prefix.n_response_tokens :], dtype=torch.int64)
    tokens = torch.cat([begun, completion.token_ids])
    logprobs = torch.cat([torch.zeros(prefix.n_response_tokens), completion.logprobs])
    kept = _longer(TruncatedSupport.full(prefix.n_response_tokens), completion.support)
    return replace(completion, token_ids=tokens, logprobs=logprobs, text=_text(tokenizer, tokens), support=kept)


def _longer(begun: TruncatedSupport, added: TruncatedSupport | None) -> TruncatedSupport | None:
    return None if added is None else TruncatedSupport.concatenate([begun, added])


def value_chains(
    groups: Sequence[Group], config: SegmentsConfig, sampling: SamplingParams, answer: AnswerEach
) -> tuple[list[Group], dict[str, float]]:
    """The same groups with the segments of their responses, and counts of what that took. A prefix is asked once
    however many responses begin with it. ``sampling`` is that of the responses, with a seed of its own.
    """
    begun = [[_prefixes(group.prompt, sample.completion, config) for sample in group.samples] for group in groups]
    asked = list(dict.fromkeys(prefix for of_group in begun for of_sample in of_group for prefix in of_sample))
    each = [
        replace(sampling, n=config.samples, max_tokens=sampling.max_tokens - prefix.n_response_tokens)
        for prefix in asked
    ]
    found = answer(asked, each)
    values = {
        prefix: fmean(sample.reward for sample in group.samples) for prefix, group in zip(asked, found, strict=True)
    }
    valued = [
        replace(group, samples=tuple(map(partial(_chain, values), group.samples, of_group)))
        for group, of_group in zip(groups, begun, strict=True)
    ]
    lengths = [
        sample.completion.length - prefix.n_response_tokens
        for prefix, group in zip(asked, found, strict=True)
        for sample in group.samples
    ]
    return valued, {"prefixes": len(asked), "continuations": len(lengths), "tokens": sum(lengths)}


def _prefixes(prompt: Prompt, completion: Completion, config: SegmentsConfig) -> list[Prompt]:
    return [begin(prompt, completion.token_ids[:start]) for start in chain_starts(completion, config)]


def _chain(values: Mapping[Prompt, float], sample: Sample, prefixes: Sequence[Prompt]) -> Sample:
    starts = [prefix.n_response_tokens for prefix in prefixes]
    return replace(sample, segments=chain_segments(sample, starts, [values[prefix] for prefix in prefixes]))


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """Of the tree of a prompt, number ``tree``, a node and what it ends; ``place`` is its own on its level."""

    tree: int
    place: int
    path: tuple[Branch, ...]
    token_ids: Tensor
    logprobs: Tensor
    kept: TruncatedSupport | None


def grow_trees(
    generate: GenerateEach,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    each: Sequence[SamplingParams],
    shape: TreeShape,
) -> list[list[Completion]]:
    """For each prompt the leaves of a tree, depth first: on every level but the last a node adds as many tokens as a
    segment has, on the last it ends the response; one that ends before is a leaf where it does.
    """
    last = len(shape.branching) - 1
    leaves: list[list[Completion]] = [[] for _ in prompts]
    none = torch.zeros(0)
    level = [_Node(tree, 0, (), none.long(), none, TruncatedSupport.full(0)) for tree in range(len(prompts))]
    for depth, n in enumerate(shape.branching):
        if not level:
            break
        asked = [begin(prompts[node.tree], node.token_ids) for node in level]
        answers = generate(asked, [_sampling(each[node.tree], node, depth, shape) for node in level])
        grown = []
        for node, children in zip(level, answers, strict=True):
            for child, completion in enumerate(children):
                longer = _Node(
                    node.tree,
                    node.place * n + child,
                    (*node.path, Branch(child, completion.length)),
                    torch.cat([node.token_ids, completion.token_ids]),
                    torch.cat([node.logprobs, completion.logprobs]),
                    None if node.kept is None else _longer(node.kept, completion.support),
                )
                if completion.truncated and depth < last:
                    grown.append(longer)
                else:
                    text = _text(tokenizer, longer.token_ids)
                    said = (
                        longer.token_ids,
                        longer.logprobs,
                        completion.finish_reason,
                        text,
                        longer.path,
                        longer.kept,
                    )
                    leaves[node.tree].append(Completion(*said))
        level = grown
    return [sorted(tree, key=lambda leaf: [branch.child for branch in leaf.path]) for tree in leaves]


def _sampling(of_tree: SamplingParams, node: _Node, depth: int, shape: TreeShape) -> SamplingParams:
    last = depth == len(shape.branching) - 1
    width = math.prod(shape.branching[:depth])
    assert of_tree.index is not None
    return replace(
        of_tree,
        n=shape.branching[depth],
        max_tokens=of_tree.max_tokens - len(node.token_ids) if last else shape.tokens,
        seed=random.Random(f"{of_tree.seed}:{depth}").getrandbits(31),
        index=of_tree.index * width + node.place,
    )


def _text(tokenizer: Any, tokens: Tensor) -> str:
    text: str = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
    return text
