"""A judge: a model that decides whether a response gives the reference answer (arXiv 2503.23829, Section 3.1).

It is asked for one of two words, and its confidence that it is the first becomes the reward:

    p(yes) / (p(yes) + p(no))   of the first token of its answer, over the ways to write either word
    the share of yes            of `reward.judge.votes` sampled answers

An answer that is neither word has confidence 0, as in Equation 4 of the paper, and is counted as rule_unclear; so is a
question that an API refuses for its text. An empty response is not asked about, and counted as rule_none. A confidence
of at least ½ counts as correct. One question is asked once in a run (``verdicts``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dapo_runner.config import ConfigError, RewardConfig
from dapo_runner.http import HTTPError
from dapo_runner.rewards.calls import ASYNC_CALLS, Call, Calls
from dapo_runner.rewards.endpoint import chat
from dapo_runner.rewards.judge_model import JudgeModel
from dapo_runner.rewards.reward import Reward, RewardError, Verdicts, reward_error
from dapo_runner.rewards.shield import Shield, conversation_of
from dapo_runner.rewards.verdicts import Judgement, Question, VerdictLog
from dapo_runner.types import Completion, Prompt, Verdict

MAX_CHARACTERS = 4000  # of a response that are shown, counted from its end
VOTE_TOKENS = 8  # of a sampled answer; options: {max_tokens: …} for a model that thinks first
TOP_TOKENS = 20  # whose log-probs an API gives at most by default
REFUSED = (400, 413, 422)  # HTTP status codes for a text that is too long, or that a filter does not let through
DENIED = (401, 403, 404)  # for a wrong key, URL or model
CHECKS = [Question("What is 1 + 1?", "2", f"Answer: {number}") for number in (2, 3)]  # yes and no


@dataclass(frozen=True)
class Request(Call):
    """One of the samples that answer a question."""

    question: Question
    vote: int


class Judge(Reward):
    """Judges responses by a model in this process or behind an API. It loads nothing before it is asked."""

    def __init__(self, config: RewardConfig) -> None:
        assert config.judge is not None
        self.config, self.n_votes = config.judge, max(1, config.judge.votes)
        self.known = VerdictLog()
        self.model = None if self.config.url else JudgeModel(self.config)
        self.timeout = config.plugin_deadline
        self.calls = Calls("judge", config, config.calls.concurrency or ASYNC_CALLS)
        self._answers: dict[tuple[Question, int], float | None] = {}  # confidences, of questions not yet settled

    def check(self) -> None:
        """Ask an API two questions; try the tokenizer of a model in this process. Raises ConfigError."""
        if self.model is not None:
            self.model.check(self.messages(CHECKS[0]))
            return
        for question in CHECKS:  # a server may cut either word into several tokens
            try:
                confidence = self._ask(question, 0)
            except (HTTPError, ValueError) as error:
                raise ConfigError(f"reward.judge: expected an answer to a first question, got {error}") from error
            if confidence is None:
                raise ConfigError(
                    f"reward.judge: expected {' or '.join(self.config.answers)} from {self.config.model} at "
                    f"{self.config.url} in reply to a first question, got something else (docs/judge.md)"
                )

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        questions = [
            [self._question(prompt, completion) for completion in samples]
            for prompt, samples in zip(prompts, completions, strict=True)
        ]
        calls: dict[Question, Call] = {}
        for index, of_prompt in enumerate(questions):
            for question, completion in zip(of_prompt, completions[index], strict=True):
                if question.response and question not in self.known:
                    calls.setdefault(question, Call(index, prompts[index], [completion]))
        failures = self._ask_endpoint(calls) if self.model is None else self._ask_model(self.model, calls)
        return [self._verdicts(of_prompt, failures) for of_prompt in questions]

    def take_counts(self) -> dict[str, int]:
        return self.calls.take_counts() if self.model is None else {}

    def release(self) -> None:
        """Move the model off the GPU until it is asked again."""
        if self.model is not None:
            self.model.release()

    def close(self) -> None:
        """Forget all verdicts, and write no more into the run's folder."""
        self.known.close()
        self._answers.clear()

    def messages(self, question: Question) -> list[dict[str, str]]:
        """Return the conversation whose next message is the judge's answer."""
        return conversation_of(self.config, question, self._shield)

    def _ask_model(self, model: JudgeModel, calls: Mapping[Question, Call]) -> dict[Question, RewardError]:
        if not calls:
            return {}
        try:
            answers = model([self.messages(question) for question in calls])
            judged = [self._judgement([_confidence(*answer)]) for answer in answers]
        except (OSError, RuntimeError, ValueError) as error:
            raise reward_error("judge", error, *next(iter(calls.values())).pair()) from error
        self.known.add(dict(zip(calls, judged, strict=True)))
        return {}

    def _ask_endpoint(self, calls: Mapping[Question, Call]) -> dict[Question, RewardError]:
        """Ask about all questions. Returns what failed within `reward.calls.max_failed`."""
        requests = [
            Request(call.index, call.prompt, call.completions, question, vote)
            for question, call in calls.items()
            for vote in range(self.n_votes)
            if (question, vote) not in self._answers
        ]
        try:
            results = self.calls.run(self._request, requests)
        finally:  # what was answered is kept, whatever failed
            self._settle(calls)
        pairs = zip(requests, results, strict=True)
        return {request.question: result for request, result in pairs if isinstance(result, RewardError)}

    def _request(self, request: Request) -> None:
        self._answers[request.question, request.vote] = self._ask(request.question, request.vote)

    def _ask(self, question: Question, vote: int) -> float | None:
        """Return the confidence of one answer; None where it is unclear, or the API refuses the text.

        Raises:
            HTTPError: No answer.
            ConfigError: The key, URL or model is wrong.
        """
        try:
            answer = chat(self.config, self.messages(question), self.timeout, **self._fields(vote))
        except HTTPError as error:
            if error.status in DENIED:
                raise ConfigError(f"reward.judge: {error}") from error
            if error.status not in REFUSED or question in CHECKS:
                raise
            self._ask(CHECKS[0], 0)  # an API that refuses this too refuses every question
            return None
        yes, no = (word.lower() for word in self.config.answers)
        if self.config.votes:
            return {yes: 1.0, no: 0.0}.get(word_of(answer.text, (yes, no)) or "")
        first = [(token.strip(" \t\n▁Ġ").lower(), math.exp(logprob)) for token, logprob in answer.first]
        p_yes, p_no = (sum(p for token, p in first if token == word) for word in (yes, no))
        return _confidence(p_yes, p_no, bool(first) and first[0][0] in (yes, no))

    def _fields(self, vote: int) -> dict[str, Any]:
        """Return the fields of a request: for the log-probs of a first token, or for one of several samples."""
        if self.config.votes:
            return {"max_tokens": VOTE_TOKENS, "temperature": 1.0, "seed": vote}
        return {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": TOP_TOKENS}

    def _settle(self, questions: Iterable[Question]) -> None:
        """Keep the judgements of the questions with all their answers."""
        settled = {}
        for question in questions:
            votes = [(question, vote) for vote in range(self.n_votes)]
            if all(vote in self._answers for vote in votes):
                settled[question] = self._judgement([self._answers.pop(vote) for vote in votes])
        self.known.add(settled)

    def _judgement(self, confidences: Sequence[float | None]) -> Judgement:
        clear = [confidence for confidence in confidences if confidence is not None]
        if not clear:
            return Judgement(None, 0.0)
        mean = sum(clear) / len(confidences)
        return Judgement(self.config.answers[mean < 0.5], mean)

    def _question(self, prompt: Prompt, completion: Completion) -> Question:
        problem = prompt.messages[-1][1] if prompt.messages else prompt.text
        lines = [line for line in completion.text.splitlines() if line.strip()]
        shown = completion.text if self.config.shows == "response" else "".join(lines[-1:])
        return Question(problem, prompt.answer, shown.strip()[-MAX_CHARACTERS:])

    def _verdicts(
        self, questions: Sequence[Question], failures: Mapping[Question, RewardError]
    ) -> list[Verdict | None] | RewardError:
        failed = [failures[question] for question in questions if question in failures]
        return failed[0] if failed else [self._verdict(question) for question in questions]

    def _verdict(self, question: Question) -> Verdict:
        found = self.known[question] if question.response else Judgement(None, 0.0)
        rule = "judge" if found.verdict is not None else "unclear" if question.response else "none"
        value = found.confidence if self.config.reward == "soft" else None
        return Verdict(found.confidence >= 0.5, rule=rule, value=value)

    @cached_property
    def _shield(self) -> Shield:
        return Shield(self.config.template, () if self.model is None else self.model.tokens)


def _confidence(p_yes: float, p_no: float, is_clear: bool) -> float | None:
    """Return p_yes / (p_yes + p_no); None for an answer that is neither word. Raises ValueError for NaN."""
    if not math.isfinite(p_yes + p_no) or (is_clear and p_yes + p_no <= 0):
        raise ValueError(f"expected the probabilities of two answers, got {p_yes} and {p_no}")
    return p_yes / (p_yes + p_no) if is_clear else None


def word_of(text: str, words: Sequence[str]) -> str | None:
    """Return which of ``words`` a text begins or ends with; None where that is neither, or both."""
    read = re.findall(r"\w+", text.lower())
    found = [word for word in words if word.lower() in (*read[:1], *read[-1:])]
    return found[0] if len(found) == 1 else None
