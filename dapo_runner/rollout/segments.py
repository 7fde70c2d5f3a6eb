"""Sample what segment advantages need: responses that grow as trees, and continuations of prefixes.

A prefix is continued by a prompt that ends in it, so an engine needs only ``generate``. Random numbers depend on the
index of a request in its call, or of a node in its tree: the tokens are the same for any number of ranks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
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
    GenerateGroups,
    Group,
    Prompt,
    RolloutRequest,
    Sample,
    SamplingParams,
    TruncatedSupport,
)


def add_prefix(prompt: Prompt, tokens: Sequence[int]) -> Prompt:
    """Return ``prompt`` followed by ``tokens``, the beginning of a response to continue."""
    return replace(prompt, token_ids=(*prompt.token_ids, *tokens), n_response_tokens=len(tokens))


def join_continuation(prefix: Prompt, end: Completion, tokenizer: Any) -> Completion:
    """Return the whole response that ``end`` continues. The log-probs of the prefix are unknown and set to 0."""
    n = prefix.n_response_tokens
    return join(begin(torch.tensor(prefix.token_ids[len(prefix.token_ids) - n :], dtype=torch.int64)), end, tokenizer)


def begin(token_ids: Tensor) -> Completion:
    """Return tokens, int64 [N], as a response to continue."""
    n = len(token_ids)
    return Completion(token_ids, torch.zeros(n), "length", "", support=TruncatedSupport.full(n))


def join(begun: Completion, end: Completion, tokenizer: Any = None) -> Completion:
    """Return ``end`` preceded by the tokens of ``begun``. A support is kept only if ``end`` has one. The text is that
    of all tokens with a ``tokenizer``, else that of ``end``.
    """
    token_ids, support = torch.cat([begun.token_ids, end.token_ids]), end.support
    if support is not None and begun.support is not None:
        support = TruncatedSupport.concatenate([begun.support, support])
    return replace(
        end,
        token_ids=token_ids,
        logprobs=torch.cat([begun.logprobs, end.logprobs]),
        text=tokenizer.decode(token_ids.tolist(), skip_special_tokens=True) if tokenizer else end.text,
        support=support,
    )


def value_chains(
    groups: Sequence[Group], config: SegmentsConfig, sampling: SamplingParams, generate: GenerateGroups
) -> tuple[list[Group], dict[str, float]]:
    """Return the groups with the segments of their responses, and counts of the continuations.

    Each distinct prefix is continued once. ``sampling`` is that of the responses, with a different seed.
    """
    numbers: dict[Prompt, int] = {}  # of the distinct prefixes

    def numbers_of(prompt: Prompt, sample: Sample) -> list[int]:
        tokens = sample.completion.token_ids.tolist()  # once: all prefixes of a response share these objects
        prefixes = (add_prefix(prompt, tokens[:start]) for start in chain_starts(sample, config))
        return [numbers.setdefault(prefix, len(numbers)) for prefix in prefixes]

    chains = [[numbers_of(group.prompt, sample) for sample in group.samples] for group in groups]
    lengths = [sampling.max_tokens - prefix.n_response_tokens for prefix in numbers]
    requests = [
        RolloutRequest(index, prefix, replace(sampling, n=config.samples, max_tokens=length))
        for index, (prefix, length) in enumerate(zip(numbers, lengths, strict=True))
    ]
    continued = generate(requests)
    values = [fmean(sample.reward for sample in group.samples) for group in continued]

    def valued(sample: Sample, chain: list[int]) -> Sample:
        starts = chain_starts(sample, config)
        return replace(sample, segments=chain_segments(sample, starts, [values[number] for number in chain]))

    n_tokens = [
        sample.completion.length - prefix.n_response_tokens
        for prefix, group in zip(numbers, continued, strict=True)
        for sample in group.samples
    ]
    counts: dict[str, float] = {"prefixes": len(numbers), "continuations": len(n_tokens), "tokens": sum(n_tokens)}
    found = zip(groups, chains, strict=True)
    return [replace(group, samples=tuple(map(valued, group.samples, chain))) for group, chain in found], counts


def grow_trees(
    generate: GenerateFunction, tokenizer: Any, requests: Sequence[RolloutRequest], shape: TreeShape
) -> list[list[Completion]]:
    """Return for each request the leaves of a tree, depth first.

    A node adds a segment of ``shape.tokens`` tokens, on the last level the rest of the response. A response that ends
    earlier is a leaf at its level.
    """
    leaves: list[list[Completion]] = [[] for _ in requests]
    # The nodes of a level: index of the tree, index of the node in the tree's level, response up to the node.
    level = [(tree, 0, begin(torch.zeros(0).long())) for tree in range(len(requests))]
    for depth, n in enumerate(shape.branching):
        if not level:
            break
        is_last, next_level = depth == len(shape.branching) - 1, []
        answers = generate([_node_request(requests[tree], index, begun, depth, shape) for tree, index, begun in level])
        for (tree, index, begun), children in zip(level, answers, strict=True):
            for number, child in enumerate(children):
                response = replace(join(begun, child, tokenizer), path=(*begun.path, Branch(number, child.length)))
                if child.truncated and not is_last:
                    next_level.append((tree, index * n + number, response))
                else:
                    leaves[tree].append(response)
        level = next_level
    return [sorted(tree, key=lambda leaf: [branch.child for branch in leaf.path]) for tree in leaves]


def _node_request(root: RolloutRequest, index: int, begun: Completion, depth: int, shape: TreeShape) -> RolloutRequest:
    is_last, width = depth == len(shape.branching) - 1, math.prod(shape.branching[:depth])
    sampling = replace(
        root.sampling,
        n=shape.branching[depth],
        max_tokens=root.sampling.max_tokens - begun.length if is_last else shape.tokens,
        seed=random.Random(f"{root.sampling.seed}:{depth}").getrandbits(31),
    )
    return RolloutRequest(root.index * width + index, add_prefix(root.prompt, begun.token_ids.tolist()), sampling)
