"""Evaluation on held-out problems: avg@k, cons@k and pass@k of k samples per problem.

    avg@k    the mean correctness of all samples: the paper's avg@32
    cons@k   correctness of the majority vote; samples without an answer do not vote, and one answer written in several
             ways is one answer
    pass@j   the chance that at least one of j samples is right, estimated without bias from the k drawn:
             1 − C(k−c, j)/C(k, j) with c right (arXiv 2107.03374, Eq. 1)

Which votes are for one answer is the reward rule's to say. Those it finds right are. Wrong ones are when what it
extracted is the same text, or, under the `math` rule, the same mathematics: equality by calculation need not be
transitive, so answers are taken by their votes, then by their first sample, and each is one answer with the first
before it that it equals. No comparison is made whose outcome could not change the figure.

Ties of the vote share: between two answers, one of them right, the problem counts ½, which is what breaking
the tie by lot gives on average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import NamedTuple

from dapo_runner.config import Config
from dapo_runner.rewards.scoring import SameAnswer, load_same_answer, reads_answers
from dapo_runner.types import Group, Prompt, RolloutRequest

GenerateGroups = Callable[[Sequence[RolloutRequest]], list[Group]]
SOURCE_FIGURES = ("reward", "problems")  # beside avg@k and cons@k
SEED = 1234  # of every evaluation, whatever run.seed is
MAX_COMPARISONS = 200  # of the answers to one problem; what they leave open counts as different answers


class Consensus(NamedTuple):
    """cons@k, and how many comparisons of two answers failed or ran into their deadline."""

    correct: float
    unsettled: int


@dataclass(frozen=True)
class Evaluation:
    """``groups`` holds every scored sample, for whoever wants to read them; ``metrics`` what is logged. ``same`` tells
    which answers are the same where the text extracted does not. ``reads_answers`` is False of a reward that may judge
    without reading an answer.
    """

    groups: list[Group]
    k: int
    same: SameAnswer | None = None
    reads_answers: bool = True

    @property
    def average(self) -> float:
        return mean_correct(self.groups)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The figures of all problems; where there are several evaluation sets those of each as `SET/figure`, and
        where there are several data sources the first of them as `SOURCE/figure` or `SET/SOURCE/figure`.
        """
        votes = [_majority(group, self.same) for group in self.groups]
        judged = list(zip(self.groups, votes, strict=True))
        figures = self._figures(judged)
        for name in sorted({group.prompt.eval_set for group in self.groups}):
            area, of_set = f"{name}/" if name else "", [pair for pair in judged if pair[0].prompt.eval_set == name]
            if name:
                figures |= {f"{area}{key}": value for key, value in self._figures(of_set).items()}
            sources = sorted({group.prompt.source for group, _ in of_set})
            for source in sources if len(sources) > 1 else []:
                own = self._figures([pair for pair in of_set if pair[0].prompt.source == source])
                shown = [key for key in own if key in SOURCE_FIGURES or key.startswith(("avg@", "cons@"))]
                figures |= {f"{area}{source or 'no source'}/{key}": own[key] for key in shown}
        return figures

    def _figures(self, judged: Sequence[tuple[Group, Consensus]]) -> dict[str, float]:
        """avg@k, cons@k, pass@1, 2, 4 … k, the reward without the length term, all and each part of it, and what the
        responses looked like: means, shares in [0, 1].

        Neither cons@k nor no_answer is there where the reward did not say which answers it saw.
        """
        groups = [group for group, _ in judged]
        samples = [sample for group in groups for sample in group.samples]
        average, consensus = mean_correct(groups), _mean_of(votes for _, votes in judged)
        unanswered = sum(not sample.correct and sample.verdict.extracted is None for sample in samples)
        read = [sample.verdict.extracted is not None for sample in samples]
        # A reward that says right or wrong and not which answer it saw gives nothing to vote on.
        votes = any(read) or not average if self.reads_answers else all(read)
        parts = sorted({name for sample in samples for name in sample.parts})
        return {
            f"avg@{self.k}": average,
            **({f"cons@{self.k}": consensus.correct} if votes else {}),
            **{f"pass@{j}": pass_at(groups, j) for j in _powers_of_two(self.k)},
            "reward": _mean(sample.base_reward for sample in samples),
            **{f"reward_{name}": _mean(s.parts[name] for s in samples if name in s.parts) for name in parts},
            "length": sum(sample.completion.length for sample in samples) / len(samples),
            "truncated": sum(sample.completion.truncated for sample in samples) / len(samples),
            **({"no_answer": unanswered / len(samples)} if votes else {}),
            "problems": float(len(groups)),
            **({} if self.same is None else {"unsettled_votes": float(consensus.unsettled)}),
        }


def evaluate(generate: GenerateGroups, prompts: Sequence[Prompt], config: Config) -> Evaluation:
    """Sample every prompt k times with the evaluation settings. ``generate`` scores by correctness.

    The seed is the same in every evaluation. Raises ValueError without prompts.
    """
    if not prompts:
        raise ValueError("evaluation: expected at least one held-out problem, got none (data.eval_size, data.eval)")
    settings = config.evaluation
    sampling = settings.params(
        n=settings.k,
        stop=tuple(config.rollout.stop),
        max_tokens=settings.max_response_tokens or config.rollout.max_response_tokens,
        seed=SEED,
    )
    groups = generate([RolloutRequest(index, prompt, sampling) for index, prompt in enumerate(prompts)])
    return Evaluation(groups, settings.k, load_same_answer(config.reward), reads_answers(config.reward))


def mean_correct(groups: Sequence[Group]) -> float:
    """avg@k."""
    return sum(group.n_correct / len(group.samples) for group in groups) / len(groups)


def majority(groups: Sequence[Group], same: SameAnswer | None = None) -> Consensus:
    """cons@k."""
    return _mean_of(_majority(group, same) for group in groups)


def _mean_of(votes: Iterable[Consensus]) -> Consensus:
    votes = list(votes)
    return Consensus(sum(vote.correct for vote in votes) / len(votes), sum(vote.unsettled for vote in votes))


def _mean(values: Iterable[float]) -> float:
    items = list(values)
    return sum(items) / len(items)


def pass_at(groups: Sequence[Group], j: int) -> float:
    """pass@j. Raises ValueError when a group has fewer than j samples."""
    return sum(pass_estimate(len(group.samples), group.n_correct, j) for group in groups) / len(groups)


def pass_estimate(n: int, correct: int, j: int) -> float:
    """The unbiased estimate of pass@j from ``n`` samples of which ``correct`` are right."""
    if not 1 <= j <= n:
        raise ValueError(f"pass@{j}: expected between 1 and the {n} samples drawn")
    return 1.0 - comb(n - correct, j) / comb(n, j)


def _majority(group: Group, same: SameAnswer | None) -> Consensus:
    texts: dict[str, str] = {}  # of each wrong answer, a response that gave it
    count: Counter[str] = Counter()
    for sample in group.samples:
        answer = sample.verdict.extracted
        if answer is not None and not sample.correct:
            count[answer] += 1
            texts.setdefault(answer, sample.completion.text)
    right, undecided = group.n_correct, count.most_common()  # answers of equal votes stay in the order of the samples
    rivals = made = unsettled = 0  # rivals: wrong answers with as many votes as the right one
    while undecided and sum(votes for _, votes in undecided) >= right:
        (first, votes), *undecided = undecided
        if same is not None and undecided and votes <= right and not unsettled and made < MAX_COMPARISONS:
            others = undecided[: MAX_COMPARISONS - made]
            verdicts = same(texts[first], [texts[answer] for answer, _ in others])
            made += len(others)
            unsettled += verdicts.count(None)
            joined = {answer for (answer, _), verdict in zip(others, verdicts, strict=True) if verdict}
            votes += sum(count[answer] for answer in joined)
            undecided = [item for item in undecided if item[0] not in joined]
        if votes > right:
            return Consensus(0.0, unsettled)
        rivals += votes == right
    return Consensus(1 / (1 + rivals) if right else 0.0, unsettled)


def _powers_of_two(k: int) -> list[int]:
    powers = [2**i for i in range(k.bit_length()) if 2**i < k]
    return [*powers, k]
