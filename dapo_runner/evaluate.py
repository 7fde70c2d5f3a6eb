"""Evaluation on held-out problems: avg@k, cons@k and pass@k of k samples per problem.

    avg@k    the mean correctness of all samples: the paper's avg@32
    cons@k   the correctness of the majority vote
    pass@j   the probability that at least one of j samples is correct, estimated without bias from k samples of which
             c are correct: 1 − C(k−c, j)/C(k, j) (arXiv 2107.03374, Eq. 1)

How votes are counted: samples without an answer do not vote. All correct samples vote for the same answer. Incorrect
samples vote for the same answer if their extracted texts are equal. If n answers tie and one of them is correct, the
problem counts 1/n: the expected value of breaking the tie at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import fmean, multimode

from dapo_runner.config import Config
from dapo_runner.errors import RunError
from dapo_runner.rewards.scoring import reads_answers
from dapo_runner.types import GenerateGroups, Group, Prompt, make_requests

MOST_SOURCES = 100  # whose metrics are logged


class EvaluationError(RunError):
    """Every episode of every held-out problem has failed."""


def evaluate(
    generate: GenerateGroups, prompts: Sequence[Prompt], config: Config
) -> tuple[list[Group], dict[str, float]]:
    """Sample every prompt k times with the evaluation settings. Return all scored samples, and what is logged.

    ``generate`` scores by correctness. Failed episodes are left out. Raises EvaluationError if all failed.
    """
    settings = config.evaluation
    stop, limit = tuple(config.rollout.stop), config.evaluation_tokens
    sampling = settings.params(n=settings.k, stop=stop, max_tokens=limit, seed=settings.seed)
    scored = generate(make_requests(prompts, sampling))
    groups = [group for group in scored if group.samples]  # of the others every episode has failed
    if not groups:
        raise EvaluationError(f"evaluation: all episodes of all {len(prompts)} problems failed")
    return groups, evaluation_metrics(groups, settings.k, reads_answers(config.reward))


def evaluation_metrics(groups: Sequence[Group], k: int, reads_answers: bool = True) -> dict[str, float]:
    """Return the metrics of all problems. With several evaluation sets also `SET/metric` of each. With 2 to 100 data
    sources also some of them as `SOURCE/metric` or `SET/SOURCE/metric`; with more, `sources` is their number.

    ``reads_answers`` is False for a reward that may judge a response without extracting an answer.
    """
    figures = _figures(groups, k, reads_answers)
    for name in sorted({group.prompt.eval_set for group in groups}):
        area, in_set = f"{name}/" if name else "", [group for group in groups if group.prompt.eval_set == name]
        if name:
            figures |= {f"{area}{key}": value for key, value in _figures(in_set, k, reads_answers).items()}
        sources = sorted({group.prompt.source for group in in_set})
        figures |= {f"{area}sources": float(len(sources))} if len(sources) > MOST_SOURCES else {}
        for source in sources if 1 < len(sources) <= MOST_SOURCES else []:
            by_source = _figures([group for group in in_set if group.prompt.source == source], k, reads_answers)
            shown = [key for key in by_source if key in ("reward", "problems") or key.startswith(("avg@", "cons@"))]
            figures |= {f"{area}{source or 'no source'}/{key}": by_source[key] for key in shown}
    return figures


def _figures(groups: Sequence[Group], k: int, reads_answers: bool) -> dict[str, float]:
    """Return avg@k, cons@k, pass@1, 2, 4 … k, the mean reward without the length penalty and each of its parts, the
    mean length in tokens, and shares in [0, 1] of truncated and unanswered responses.

    cons@k and no_answer are left out if the reward does not report the answers it extracted.
    """
    samples = [sample for group in groups for sample in group.samples]
    average = fmean(group.n_correct / len(group.samples) for group in groups)
    turns = [len(sample.completion.policy_turns) for sample in samples]
    right, wrong = ([s.verdict.extracted is not None for s in samples if s.correct == kind] for kind in (True, False))
    is_game = any(sample.verdict.rule == "environment" for sample in samples)
    # A reward that extracts no answers, or only those of correct samples, leaves nothing to vote on.
    extracts = all(right) and (any(wrong) or not wrong)
    votes = any(right + wrong) or not average if reads_answers and not is_game else extracts
    parts = sorted({name for sample in samples for name in sample.parts})
    powers = [*(2**i for i in range(k.bit_length()) if 2**i < k), k]
    return {
        f"avg@{k}": average,
        **({f"cons@{k}": fmean(map(consensus, groups))} if votes else {}),
        **{f"pass@{j}": fmean(pass_estimate(len(g.samples), g.n_correct, j) for g in groups) for j in powers},
        "reward": fmean(sample.base_reward for sample in samples),
        **{f"reward_{name}": fmean(s.parts[name] for s in samples if name in s.parts) for name in parts},
        "length": sum(sample.completion.n_sampled for sample in samples) / len(samples),
        "truncated": sum(sample.completion.truncated for sample in samples) / len(samples),
        **({"turns": fmean(turns)} if any(turns) else {}),
        **({"no_answer": fmean(not s.correct and s.verdict.extracted is None for s in samples)} if votes else {}),
        "problems": float(len(groups)),
    }


def pass_estimate(n: int, correct: int, j: int) -> float:
    """Return the unbiased estimate of pass@j from ``n`` samples, ``correct`` of them correct; of pass@n if n < j."""
    return 1.0 - comb(n - correct, min(n, j)) / comb(n, min(n, j))


def consensus(group: Group) -> float:
    """Return the correctness of the majority vote over the samples of a problem."""
    answers = (True if sample.correct else sample.verdict.extracted for sample in group.samples)
    winners = multimode(answer for answer in answers if answer is not None)
    return winners.count(True) / len(winners) if winners else 0.0
