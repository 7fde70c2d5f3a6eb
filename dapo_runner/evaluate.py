"""Evaluation on held-out problems: avg@k, cons@k and pass@k of k samples per problem.

    avg@k    the mean correctness of all samples: the paper's avg@32
    cons@k   correctness of the majority vote; samples without an answer do not vote
    pass@j   the chance that at least one of j samples is right, estimated without bias from the k drawn:
             1 − C(k−c, j)/C(k, j) with c right (arXiv 2107.03374, Eq. 1)

Ties of the vote share: between two answers, one of them right, the problem counts ½, which is what breaking
the tie by lot gives on average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from dapo_runner.config import Config
from dapo_runner.rewards.scoring import ScoreGroup
from dapo_runner.types import GenerateFunction, Group, Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``groups`` holds every scored sample, for whoever wants to read them; ``metrics`` what is logged."""

    groups: list[Group]
    k: int

    @property
    def average(self) -> float:
        return mean_correct(self.groups)

    @property
    def metrics(self) -> dict[str, float]:
        """avg@k, cons@k, pass@1, 2, 4 … k, and what the responses looked like: means, shares in [0, 1]."""
        samples = [sample for group in self.groups for sample in group.samples]
        return {
            f"avg@{self.k}": self.average,
            f"cons@{self.k}": majority_correct(self.groups),
            **{f"pass@{j}": pass_at(self.groups, j) for j in _powers_of_two(self.k)},
            "length": sum(sample.completion.length for sample in samples) / len(samples),
            "truncated": sum(sample.completion.truncated for sample in samples) / len(samples),
            "no_answer": sum(_vote(sample.verdict.extracted, sample.correct) is None for sample in samples)
            / len(samples),
            "problems": float(len(self.groups)),
        }


def evaluate(generate: GenerateFunction, prompts: Sequence[Prompt], score: ScoreGroup, config: Config) -> Evaluation:
    """Sample every prompt k times with the evaluation settings and score by correctness.

    The seed is the configuration's own, so that every evaluation of a run draws with the same dice.
    Raises ValueError without prompts.
    """
    if not prompts:
        raise ValueError(
            "evaluation: expected at least one held-out problem, got none (data.eval_size, data.eval_path)"
        )
    settings = config.evaluation
    sampling = SamplingParams(
        n=settings.k,
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_response_tokens or config.rollout.max_response_tokens,
        seed=settings.seed,
    )
    completions = generate(prompts, sampling)
    groups = [score(prompt, samples) for prompt, samples in zip(prompts, completions, strict=True)]
    return Evaluation(groups, settings.k)


def mean_correct(groups: Sequence[Group]) -> float:
    """avg@k."""
    return sum(group.n_correct / len(group.samples) for group in groups) / len(groups)


def majority_correct(groups: Sequence[Group]) -> float:
    """cons@k."""
    return sum(_majority(group) for group in groups) / len(groups)


def pass_at(groups: Sequence[Group], j: int) -> float:
    """pass@j. Raises ValueError when a group has fewer than j samples."""
    return sum(pass_estimate(len(group.samples), group.n_correct, j) for group in groups) / len(groups)


def pass_estimate(n: int, correct: int, j: int) -> float:
    """The unbiased estimate of pass@j from ``n`` samples of which ``correct`` are right."""
    if not 1 <= j <= n:
        raise ValueError(f"pass@{j}: expected between 1 and the {n} samples drawn")
    return 1.0 - comb(n - correct, j) / comb(n, j)


def _majority(group: Group) -> float:
    votes: Counter[str] = Counter()
    right: set[str] = set()
    for sample in group.samples:
        vote = _vote(sample.verdict.extracted, sample.correct)
        if vote is not None:
            votes[vote] += 1
            if sample.correct:
                right.add(vote)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [vote for vote, count in votes.items() if count == most]
    return sum(vote in right for vote in winners) / len(winners)


def _vote(extracted: str | None, correct: bool) -> str | None:
    """A reward function that extracts nothing still tells right from wrong: its right samples vote as one."""
    return "\0right" if extracted is None and correct else extracted


def _powers_of_two(k: int) -> list[int]:
    powers = [2**i for i in range(k.bit_length()) if 2**i < k]
    return [*powers, k]
