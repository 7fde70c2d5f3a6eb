"""The records that flow through the loop, in the order in which they come to be.

    Prompt → Completion → Sample (completion + verdict + rewards) → Group → Sequence → PackedBatch

Shapes: N response tokens of one completion, L tokens of one sequence (prompt + response), T packed positions,
S sequences of a batch. Every tensor is made on the CPU; ``PackedBatch.to`` moves one to where it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, rendered and tokenized."""

    id: str  # a digest of the problem's text: the same in every run and whatever the file's order
    token_ids: tuple[int, ...]  # what the engine is given, chat template included
    text: str  # the same as text
    answer: str  # the ground truth as the data set writes it
    source: str = ""  # the data set's own name for where the problem comes from
    eval_set: str = ""  # which of several evaluation sets it belongs to
    messages: tuple[tuple[str, str], ...] = ()  # (role, content): what ``text`` was rendered from
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # as the data set has it
    n_response_tokens: int = 0  # how many of the last token_ids begin a response that is to be continued


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample the ``n`` completions of one prompt.

    ``seed`` and ``index`` fix every random choice: ``index`` tells the prompts of one call apart and is by default the
    prompt's position in the call. The distribution at the temperature is truncated in this order: tokens less likely
    than ``min_p`` times the likeliest go, then all but the ``top_k`` likeliest (None: no limit), then all but the
    fewest that hold ``top_p`` of the rest. A response ends with the token that completes one of the ``stop`` strings in
    its text, special tokens included. With ``sampling_mask`` a completion has its ``support``, and its log-probs are
    those of the truncated distribution.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    max_tokens: int = 1024
    seed: int = 0
    index: int | None = None
    sampling_mask: bool = False


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What holds for a whole ``generate`` call. An engine with one call at a time may ignore it.

    ``priority``: of several calls in flight the one with the smallest goes first; None: before them all.
    ``completion_fraction``: once this share of the prompts is completed, the responses to the others are dropped.
    """

    priority: int | None = None
    completion_fraction: float = 1.0


DEFAULT_OPTIONS = CallOptions()


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A prompt to sample completions of. ``index`` tells the requests of one call apart and orders their groups."""

    index: int
    prompt: Prompt
    sampling: SamplingParams


class TruncatedSupport(NamedTuple):
    """The tokens of the vocabulary that each of N tokens was sampled from.

    ``ids`` int32 [K] holds one list after the other, ``counts`` int32 [N] their lengths; a count of 0 means the whole
    vocabulary.
    """

    ids: Tensor
    counts: Tensor

    @classmethod
    def full(cls, n: int) -> TruncatedSupport:
        """Return that of ``n`` tokens that were sampled from the whole vocabulary."""
        return cls(torch.zeros(0, dtype=torch.int32), torch.zeros(n, dtype=torch.int32))

    @classmethod
    def concatenate(cls, parts: SequenceOf[TruncatedSupport]) -> TruncatedSupport:
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts]))


class Branch(NamedTuple):
    """A node of a tree of responses: which child of its parent it is, and how many tokens it adds."""

    child: int
    length: int


class VersionSpan(NamedTuple):
    """Consecutive tokens of a response that one version of the weights sampled. Versions count an engine's updates from
    1.
    """

    version: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One response of the policy to one prompt.

    token_ids int64 [N], with the end-of-sequence token where it was sampled.
    logprobs float32 [N], log-probability of each sampled token as the engine saw it, temperature included; NaN where
    the engine gave none.
    finish_reason "stop" when the policy or a stop string ended the response, "length" when the token limit did. The
    text holds a stop string, as the tokens do.
    path: the nodes of a tree's leaf from the root down, which add up to its length; empty without a tree.
    support: what each token was sampled from; None without ``SamplingParams.sampling_mask``.
    versions: which weights sampled which tokens, where an engine reports it; they add up to the length.
    loss_mask bool [N], False on tokens that the policy did not sample; None: it sampled all of them.
    """

    token_ids: Tensor
    logprobs: Tensor
    finish_reason: FinishReason
    text: str
    path: tuple[Branch, ...] = ()
    support: TruncatedSupport | None = None
    versions: tuple[VersionSpan, ...] = ()
    loss_mask: Tensor | None = None

    @property
    def length(self) -> int:
        return self.token_ids.numel()

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


GenerateFunction = Callable[[SequenceOf[Prompt], SequenceOf[SamplingParams]], list[list[Completion]]]
"""An engine's ``generate``: ``n`` completions for each prompt, in the prompts' order."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reward function says of one completion."""

    correct: bool  # what evaluation goes by, and dynamic sampling unless filter_on is reward
    extracted: str | None = None  # the answer found, normalised; None when none was found
    rule: str = ""  # e.g. "answer-line", "boxed", "none"
    value: float | None = None  # a reward of the function's own; None means the configured correct/incorrect values


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a response that has an advantage of its own, made from the values of the states at its two ends.
    ``trains`` is False where its advantage is zero or another sample of the tree trains on the same tokens.
    """

    length: int  # tokens
    before: float
    after: float
    advantage: float
    trains: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A scored completion. ``reward = base_reward + length_penalty`` is what the advantage is made from. ``parts`` are
    the rewards that ``base_reward`` is the weighted sum of, by name; empty where there is one alone. ``segments``, of
    the whole response in order, take the place of one advantage for all of it; empty where there is one.
    """

    completion: Completion
    verdict: Verdict
    base_reward: float
    length_penalty: float = 0.0  # Eq. 13 of the DAPO paper, in [-1, 0]
    trains: bool = True  # False: overlong filtering took its tokens out of the loss
    parts: Mapping[str, float] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()

    @property
    def correct(self) -> bool:
        return self.verdict.correct

    @property
    def reward(self) -> float:
        return self.base_reward + self.length_penalty


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All samples of one prompt. ``step`` is the rollout step whose policy gave them, or 0 where nobody counts."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    step: int = 0

    @property
    def n_correct(self) -> int:
        return sum(sample.correct for sample in self.samples)

    @property
    def n_truncated(self) -> int:
        return sum(sample.completion.truncated for sample in self.samples)

    @property
    def n_generated(self) -> int:
        """Tokens that the engine generated: of a tree, what several responses begin with counts once."""
        completions = [sample.completion for sample in self.samples]
        nodes = {c.path[: depth + 1]: branch.length for c in completions for depth, branch in enumerate(c.path)}
        return sum(nodes.values()) + sum(c.length for c in completions if not c.path)

    @property
    def oldest_version(self) -> int:
        """Of the weights that gave any of its tokens, where an engine says."""
        return min(stretch.version for sample in self.samples for stretch in sample.completion.versions)

    @property
    def all_correct(self) -> bool:
        return self.n_correct == len(self.samples)

    @property
    def all_incorrect(self) -> bool:
        return self.n_correct == 0

    @property
    def has_mixed_correctness(self) -> bool:
        """0 < number correct < G: the constraint of Eq. 11 of the DAPO paper."""
        return 0 < self.n_correct < len(self.samples)

    @property
    def has_varying_reward(self) -> bool:
        """Some samples earned more than others, whatever their lengths."""
        return len({sample.base_reward for sample in self.samples}) > 1


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """The core training record. Tensors are aligned with the tokens themselves; packing does the one shift.

    token_ids int64 [L]; advantages float32 [L]; mask bool [L], True on the response tokens that train;
    rollout_logprobs float32 [L], 0 on prompt tokens; group_id counts the groups of the step from 0; age is how many
    steps before this one it was sampled; pair counts the preference pairs of the step from 0, −1 of a sequence in none.
    reward is what the response earned, where its tokens' advantages are still to be made of that: they are zeros until
    the learner has. support is what each token was sampled from, the whole
    vocabulary for prompt tokens; None where it was not asked for.
    """

    token_ids: Tensor
    advantages: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    group_id: int
    age: int = 0
    pair: int = -1
    reward: float | None = None
    support: TruncatedSupport | None = None

    @property
    def length(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Sequences laid end to end, ready for one forward and backward pass.

    A sequence of L tokens takes L−1 positions: its last token is only ever a target. ``logits[t]`` predicts
    ``target_ids[t]``, so nothing downstream shifts anything.

    input_ids, position_ids, target_ids int64 [T]; position_ids restart at 0 in every sequence.
    cu_seqlens int32 [S+1]: sequence s holds positions cu_seqlens[s] … cu_seqlens[s+1].
    mask bool [T]: True where the target is a response token that trains.
    advantages, old_logprobs float32 [T], aligned with target_ids; old_logprobs starts as the engine's own.
    group_ids, sequence_ids, ages int64 [S]: of each sequence the group, its place in the list that was packed, and how
    many steps ago it was sampled: all are of this step, or none is.
    ref_logprobs float32 [T], under the reference policy; None where the objective has no use for it.
    importance_weights float32 [T], of rollout correction; None where it is off.
    experts uint8 or int16 [U, K]: for routing replay, where each position that this rank computes is to go in all
    layers (``policy.routing``); None for what the routers choose.
    rewards float32 [S], values and returns float32 [T]: what advantages per token are made of; None without them.
    support_ids int32 [K], support_counts int32 [T]: the ``TruncatedSupport`` of each target, or None.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    target_ids: Tensor
    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor
    group_ids: Tensor
    sequence_ids: Tensor
    ages: Tensor
    ref_logprobs: Tensor | None = None
    importance_weights: Tensor | None = None
    experts: Tensor | None = None
    rewards: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    support_ids: Tensor | None = None
    support_counts: Tensor | None = None

    @property
    def n_positions(self) -> int:
        return self.input_ids.numel()

    @property
    def n_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> list[int]:
        """Positions of each sequence."""
        lengths: list[int] = self.cu_seqlens.diff().tolist()
        return lengths

    @property
    def stale(self) -> bool:
        """Sampled by the policy of an earlier step: its ratios are not 1 before an update."""
        return bool((self.ages > 0).any())

    def to(self, device: torch.device | str) -> PackedBatch:
        return PackedBatch(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by the names of its fields."""
        fields = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        return {name: tensor for name, tensor in fields if tensor is not None}

    def without_experts(self) -> PackedBatch:
        """The same batch for a pass, or a reader, that has nothing to replay."""
        return replace(self, experts=None)
