"""What segment advantages need of an engine: responses that grow as trees, and continuations of prefixes.

A prefix is continued by a prompt that ends in it, so both need no more of an engine than ``generate``. Every random
choice is tied to the index of a request in its call, or of a node in its tree: the tokens are the same for any number
of ranks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dapo_runner.algorithms.segments import chain_segments, chain_starts
from dapo_runner.config import SegmentsConfig, TreeShape
from dapo_runner.types import (
    Branch,
    Completion,
    GenerateFunction,
    Group,
    Prompt,
    RolloutRequest,
    SamplingParams,
    TruncatedSupport,
)

GenerateGroups = Callable[[Sequence[RolloutRequest]], list[Group]]


def add_prefix(prompt: Prompt, tokens: Tensor) -> Prompt:
    """Return ``prompt`` with the first ``tokens`` of a response, int64 [N], which is to be continued."""
    return replace(prompt, token_ids=(*prompt.token_ids, *tokens.tolist()), n_response_tokens=len(tokens))


def join_continuation(prefix: Prompt, end: Completion, tokenizer: Any) -> Completion:
    """Return the whole response that ``end`` continues. The log-probs of the prefix are not known here: they are 0."""
    n = prefix.n_response_tokens
    token_ids = torch.tensor(prefix.token_ids[len(prefix.token_ids) - n :], dtype=torch.int64)
    begun = Completion(token_ids, torch.zeros(n), "length", "", support=TruncatedSupport.full(n))
    return _join(begun, end, tokenizer)


def _join(begun: Completion, end: Completion, tokenizer: Any) -> Completion:
    """Return ``end`` with the tokens of ``begun`` in front. ``begun`` has a support for the case that ``end`` has."""
    token_ids = torch.cat([begun.token_ids, end.token_ids])
    support = end.support
    if support is not None and begun.support is not None:
        support = TruncatedSupport.concatenate([begun.support, support])
    return replace(
        end,
        token_ids=token_ids,
        logprobs=torch.cat([begun.logprobs, end.logprobs]),
        text=tokenizer.decode(token_ids.tolist(), skip_special_tokens=True),
        support=support,
    )


def value_chains(
    groups: Sequence[Group], config: SegmentsConfig, sampling: SamplingParams, generate: GenerateGroups
) -> tuple[list[Group], dict[str, float]]:
    """Return the groups with the segments of their responses, and counts of the continuations that valued them.

    A prefix is continued once however many responses begin with it. ``sampling`` is that of the responses, with a seed
    of its own.
    """
    prefixes = [[_prefixes(group.prompt, sample.completion, config) for sample in group.samples] for group in groups]
    distinct = dict.fromkeys(prefix for of_group in prefixes for of_sample in of_group for prefix in of_sample)
    requests = [
        RolloutRequest(i, prefix, _shorter(sampling, config.samples, prefix)) for i, prefix in enumerate(distinct)
    ]
    continued = dict(zip(distinct, generate(requests), strict=True))
    values = {prefix: fmean(sample.reward for sample in group.samples) for prefix, group in continued.items()}
    lengths = [
        sample.completion.length - prefix.n_response_tokens
        for prefix, group in continued.items()
        for sample in group.samples
    ]
    valued = []
    for group, of_group in zip(groups, prefixes, strict=True):
        samples = []
        for sample, of_sample in zip(group.samples, of_group, strict=True):
            starts, states = [prefix.n_response_tokens for prefix in of_sample], [values[one] for one in of_sample]
            samples.append(replace(sample, segments=chain_segments(sample, starts, states)))
        valued.append(replace(group, samples=tuple(samples)))
    return valued, {"prefixes": len(distinct), "continuations": len(lengths), "tokens": sum(lengths)}


def _prefixes(prompt: Prompt, completion: Completion, config: SegmentsConfig) -> list[Prompt]:
    return [add_prefix(prompt, completion.token_ids[:start]) for start in chain_starts(completion, config)]


def _shorter(sampling: SamplingParams, n: int, prefix: Prompt) -> SamplingParams:
    return replace(sampling, n=n, max_tokens=sampling.max_tokens - prefix.n_response_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A node of tree number ``tree``. ``index`` counts the nodes of its level; ``begun`` is the response up to it."""

    tree: int
    index: int
    begun: Completion


def grow_trees(
    generate: GenerateFunction,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParams],
    shape: TreeShape,
) -> list[list[Completion]]:
    """Return for each prompt the leaves of a tree, depth first.

    On every level but the last a node adds as many tokens as a segment has, on the last it ends the response. A
    response that ends before is a leaf there.
    """
    last = len(shape.branching) - 1
    leaves: list[list[Completion]] = [[] for _ in prompts]
    nothing = Completion(torch.zeros(0).long(), torch.zeros(0), "length", "", support=TruncatedSupport.full(0))
    level = [_Node(tree, 0, nothing) for tree in range(len(prompts))]
    for depth, n in enumerate(shape.branching):
        if not level:
            break
        prefixes = [add_prefix(prompts[node.tree], node.begun.token_ids) for node in level]
        answers = generate(prefixes, [_node_sampling(sampling[node.tree], node, depth, shape) for node in level])
        next_level = []
        for node, children in zip(level, answers, strict=True):
            for number, child in enumerate(children):
                path = (*node.begun.path, Branch(number, child.length))
                response = replace(_join(node.begun, child, tokenizer), path=path)
                if child.truncated and depth < last:
                    next_level.append(_Node(node.tree, node.index * n + number, response))
                else:
                    leaves[node.tree].append(response)
        level = next_level
    return [sorted(tree, key=lambda leaf: [branch.child for branch in leaf.path]) for tree in leaves]


def _node_sampling(of_tree: SamplingParams, node: _Node, depth: int, shape: TreeShape) -> SamplingParams:
    last = depth == len(shape.branching) - 1
    width = math.prod(shape.branching[:depth])
    assert of_tree.index is not None
    return replace(
        of_tree,
        n=shape.branching[depth],
        max_tokens=of_tree.max_tokens - node.begun.length if last else shape.tokens,
        seed=random.Random(f"{of_tree.seed}:{depth}").getrandbits(31),
        index=of_tree.index * width + node.index,
    )
