"""The records that pass through the training loop, in the order in which they are created:

    Prompt → Completion → Sample (completion + verdict + rewards) → Group → TrainingSequence → PackedBatch

Shapes: N response tokens of one completion, L tokens of one sequence (prompt + response), T packed positions,
S sequences of a batch. All tensors are on the CPU; what a pass reads is copied to the training device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, rendered and tokenized."""

    id: str  # a digest of the problem's text: it does not depend on the run or on the order of the file
    token_ids: tuple[int, ...]  # the input of the engine, with the chat template applied
    text: str  # token_ids as text
    answer: str  # the ground truth as the data set writes it
    source: str = ""  # the data source of the problem, as the data set names it
    eval_set: str = ""  # the evaluation set of the problem, if there are several
    messages: tuple[tuple[str, str], ...] = ()  # (role, content): what ``text`` was rendered from
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the row of the data set
    n_response_tokens: int = 0  # how many of the last token_ids are the beginning of a response to continue


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample the ``n`` completions of one prompt.

    The temperature is applied first, then the distribution is truncated in this order: ``min_p`` removes tokens less
    likely than ``min_p`` times the likeliest, ``top_k`` keeps the k likeliest (None: no limit), ``top_p`` keeps the
    fewest that hold this share of the rest. A response ends with the token that completes a ``stop`` string in its
    text, special tokens included. With ``sampling_mask`` a completion has its ``support``, and its log-probs are those
    of the truncated distribution.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    max_tokens: int = 1024
    seed: int = 0
    sampling_mask: bool = False


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A prompt to sample. ``index`` distinguishes the requests of one call, and groups are returned in its order. With
    ``sampling.seed`` it fixes every random choice.
    """

    index: int
    prompt: Prompt
    sampling: SamplingParams


def make_requests(prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RolloutRequest]:
    return [RolloutRequest(index, prompt, sampling) for index, prompt in enumerate(prompts)]


class TruncatedSupport(NamedTuple):
    """The tokens of the vocabulary that each of N tokens was sampled from.

    ``ids`` int32 [K]: the lists of all tokens, concatenated. ``counts`` int32 [N]: the length of each list; 0 means
    the whole vocabulary.
    """

    ids: Tensor
    counts: Tensor

    @classmethod
    def full(cls, n: int) -> TruncatedSupport:
        """Return the support of ``n`` tokens that were sampled from the whole vocabulary."""
        return cls(torch.zeros(0, dtype=torch.int32), torch.zeros(n, dtype=torch.int32))

    @classmethod
    def concatenate(cls, parts: Sequence[TruncatedSupport]) -> TruncatedSupport:
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts]))


class Branch(NamedTuple):
    """A node of a tree of responses: which child of its parent it is, and how many tokens it adds."""

    child: int
    length: int


class VersionSpan(NamedTuple):
    """Consecutive tokens that one version of the weights sampled. Versions count an engine's updates from 1."""

    version: int
    length: int


class Turn(NamedTuple):
    """Tokens ``start`` to ``end`` of an episode.

    role: who wrote them, "assistant" or "environment".
    finish_reason: "stop" for a turn that the environment answered. For the last turn, why the episode ended: "done",
    "max_turns" or "length", also where the environment's next text did not fit.
    reward: what the environment returned for this turn, or None.
    """

    role: Literal["assistant", "environment"]
    start: int
    end: int
    text: str  # special tokens included
    finish_reason: str = ""
    reward: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One response of the policy to one prompt.

    token_ids int64 [N], with the end-of-sequence token if it was sampled.
    logprobs float32 [N]: log-probability of each sampled token in the engine, at the sampling temperature; NaN where
    the engine returned none.
    finish_reason: "stop" if the policy or a stop string ended the response, "length" if the token limit did. Text and
    tokens include the stop string.
    path: the nodes from the root of a tree to this leaf; their lengths add up to N. Empty without a tree.
    support: the tokens that each token was sampled from; None without ``SamplingParams.sampling_mask``.
    versions: which version of the weights sampled which tokens, if the engine reports it; lengths add up to N.
    loss_mask bool [N]: False on tokens that the policy did not sample; None if it sampled all of them.
    turns: the turns of an episode, which make up the response. ``text`` is then that of the policy's last turn.
    environment, messages: those of the episode (role and content), for reward functions; none once it is scored.
    experts uint8 or int16 [P + N − 1, K]: with `loss.routing_replay: engine`, the experts in all layers of each of the
    P tokens of the prompt and of the response but its last, which the engine does not compute.
    """

    token_ids: Tensor
    logprobs: Tensor
    finish_reason: FinishReason
    text: str
    path: tuple[Branch, ...] = ()
    support: TruncatedSupport | None = None
    versions: tuple[VersionSpan, ...] = ()
    loss_mask: Tensor | None = None
    turns: tuple[Turn, ...] = ()
    environment: Any = None
    experts: Tensor | None = None
    messages: tuple[tuple[str, str], ...] = ()

    @property
    def length(self) -> int:
        return self.token_ids.numel()

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return self.length if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def transcript(self) -> str:
        """The text of all turns, or of the response if there are none."""
        return "".join(turn.text for turn in self.turns) if self.turns else self.text

    @property
    def policy_turns(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.turns if turn.role == "assistant")

    @property
    def policy_text(self) -> str:
        """The text of all turns of the policy, or of the response if there are none."""
        return "".join(turn.text for turn in self.policy_turns) if self.turns else self.text

    @property
    def environment_reward(self) -> float | None:
        """The sum of the environment's rewards for the turns; None if it gave none."""
        given = [turn.reward for turn in self.turns if turn.reward is not None]
        return sum(given) if given else None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


GenerateFunction = Callable[[Sequence[RolloutRequest]], list[list[Completion]]]
"""An engine's ``generate``: ``n`` completions for each request, in their order."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reward function returns for one completion."""

    correct: bool  # decides evaluation, and dynamic sampling unless filter_groups is reward
    extracted: str | None = None  # the normalised answer; None if no answer was found
    rule: str = ""  # e.g. "answer-line", "boxed", "none"
    value: float | None = None  # the reward; None means the configured reward of a correct or incorrect response


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a response with its own advantage, computed from the values of the states at its two ends.

    ``trains`` is False, in a tree, if its advantage is zero, no token may train, or another sample trains on them.
    """

    length: int  # tokens
    before: float  # value of the state at its start
    after: float  # value of the state at its end
    advantage: float
    trains: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A scored completion.

    ``reward = base_reward + length_penalty`` is the input of the advantage. ``parts`` are the rewards by name whose
    weighted sum is ``base_reward``; empty with a single reward. ``segments`` cover the whole response in order; empty
    if the response has one advantage.
    """

    completion: Completion
    verdict: Verdict
    base_reward: float
    length_penalty: float = 0.0  # Eq. 13 of the DAPO paper, in [-1, 0]
    trains: bool = True  # False: overlong filtering masks its tokens in the loss
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
    """All samples of one prompt. ``step`` is the step whose policy sampled them; 0 if steps are not counted."""

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
        """Number of tokens that the engine generated. A prefix shared by the responses of a tree counts once."""
        completions = [sample.completion for sample in self.samples]
        nodes = {c.path[: depth + 1]: branch.length for c in completions for depth, branch in enumerate(c.path)}
        return sum(nodes.values()) + sum(c.n_sampled for c in completions if not c.path)

    @property
    def oldest_version(self) -> int:
        """The oldest version of the weights that sampled any of its tokens. Needs an engine that reports versions."""
        return min(span.version for sample in self.samples for span in sample.completion.versions)

    @property
    def has_mixed_correctness(self) -> bool:
        """0 < number correct < G: the constraint of Eq. 11 of the DAPO paper."""
        return 0 < self.n_correct < len(self.samples)

    @property
    def has_varying_reward(self) -> bool:
        """Whether the rewards differ between samples, without the length penalty."""
        return len({sample.base_reward for sample in self.samples}) > 1

    def varies_in(self, what: str) -> bool:
        """Return whether the samples differ in ``what``: "correctness" or "reward"."""
        return self.has_varying_reward if what == "reward" else self.has_mixed_correctness


def _set_fields(record: Any, state: Any) -> None:
    """Load a record of any version: new fields get their defaults, unknown ones are left out. Old states are lists."""
    saved = state if isinstance(state, dict) else dict(zip(record.__match_args__, state, strict=False))
    record.__init__(**{name: value for name, value in saved.items() if name in record.__match_args__})


# A checkpoint contains groups, and torch's weights-only unpickler must load it. Tuples may only get fields at the end.
_RECORDS: list[Any] = [Group, Prompt, Sample, Completion, Verdict, Segment]
for _record in _RECORDS:
    _record.__getstate__ = lambda record: {name: getattr(record, name) for name in record.__match_args__}
    _record.__setstate__ = _set_fields
torch.serialization.add_safe_globals([*_RECORDS, Turn, Branch, VersionSpan, TruncatedSupport])

GenerateGroups = Callable[[Sequence[RolloutRequest]], list[Group]]
"""Return the scored groups of requests."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSequence:
    """One training example: a prompt and its response. Tensors are aligned with the tokens; packing shifts them once.

    token_ids int64 [L]. advantages float32 [L]. mask bool [L]: True on the response tokens that train.
    rollout_logprobs float32 [L]: 0 on tokens of the prompt and of an environment.
    group_id: the group's number in the step, from 0. age: how many steps ago it was sampled.
    pair: the preference pair's number in the step, from 0; −1 without a pair.
    reward: the reward of the response if the trainer computes advantages per token; advantages are zero until then.
    support: what each token was sampled from, the whole vocabulary for prompt tokens; None if it was not recorded.
    experts: those of all tokens but the last, as in ``Completion``.
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
    experts: Tensor | None = None

    @property
    def length(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Sequences laid end to end, ready for one forward and backward pass.

    A sequence of L tokens takes L−1 positions: its last token is only a target. ``logits[t]`` predicts
    ``target_ids[t]``, so nothing downstream shifts anything.

    input_ids, position_ids, target_ids int64 [T]; position_ids restart at 0 in every sequence.
    cu_seqlens int32 [S+1]: sequence s holds positions cu_seqlens[s] … cu_seqlens[s+1].
    mask bool [T]: True where the target is a response token that trains.
    advantages, old_logprobs float32 [T], aligned with target_ids; old_logprobs start as the engine's log-probs.
    group_ids, sequence_ids, ages int64 [S]: of each sequence the group, its index in the packed list, and how many
    steps ago it was sampled. Either all ages are 0 or none is.
    ref_logprobs float32 [T], under the reference policy; None if the objective does not use them.
    importance_weights float32 [T], of rollout correction; None if it is off.
    experts uint8 or int16 [U, K]: for routing replay, the experts of each position that this rank computes, in all
    layers (``policy.routing``), or [T, K] from the engine; None lets the routers choose.
    rewards float32 [S], values and returns float32 [T]: inputs of advantages per token; None without them.
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
        return list[int](self.cu_seqlens.diff().tolist())

    @property
    def stale(self) -> bool:
        """Whether an earlier policy sampled it. If so, ratios are not 1 before the first update of the step."""
        return bool((self.ages > 0).any())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by field name."""
        fields = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        return {name: tensor for name, tensor in fields if tensor is not None}
