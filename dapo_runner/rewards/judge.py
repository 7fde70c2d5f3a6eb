"""A judge: a model that says whether a response gives the reference answer (arXiv 2503.23829, Section 3.1).

It is asked for one of two words, and its confidence that it is the first becomes the reward:

    p(yes) / (p(yes) + p(no))   of the first token of its answer, over the ways to write either word
    the share of yes            of `reward.judge.votes` sampled answers

An answer that is neither word is of confidence 0, as in Equation 4 of the paper, and counted as rule_unclear; so is a
question that the endpoint refuses for its text. An empty response is not asked about, and counted as rule_none. From a
confidence of ½ on a response counts as right.

One question is asked once in a run. What the judge said lies in the run's folder, a line for each question, and is what
the same question is answered from later, after a resume too.

No text of a problem, a reference or a response can speak in another role than the one it stands in, nor close the tag
that the template puts around it: what would is broken up by a space (``Shield``). That a judge is not talked into
something by a response is not promised.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from dapo_runner.config import AskedModel, ConfigError, JudgePrompt, RewardConfig
from dapo_runner.rewards.alarm import in_thread
from dapo_runner.rewards.calls import ASYNC_CALLS
from dapo_runner.rewards.endpoint import Answer, Endpoint, EndpointError
from dapo_runner.rewards.judge_model import JudgeModel
from dapo_runner.rewards.plugin import RewardError, Verdicts, explain
from dapo_runner.rewards.verdicts import Judgement, Question, VerdictLog
from dapo_runner.types import Completion, Prompt, Verdict

PROBE_SECONDS = 30.0  # that an endpoint has to answer before a run begins
TOP_TOKENS = 20  # the most that is to be had by default
REFUSED = (400, 413, 422)  # HTTP status codes for a text that is too long, or that a filter does not let through
DENIED = (401, 403, 404)  # for a wrong key, URL or model
CHECKS = [Question("What is 1 + 1?", "2", f"Answer: {number}") for number in (2, 3)]  # right and wrong


def judge_of(config: RewardConfig) -> Judge:
    """One for every scorer of the process; it loads nothing before it is asked."""
    name = config.model_dump_json(include={"judge", "calls", "plugin_deadline"})
    return _JUDGES.setdefault(name, Judge(config))


class Judge:
    """Judges responses: ``judge_all`` by a model in this process, ``ask`` by one at an endpoint."""

    def __init__(self, config: RewardConfig) -> None:
        assert config.judge is not None
        self.reward, self.config = config, config.judge
        self.known = VerdictLog()
        self.model = JudgeModel(self.config)
        self.endpoint: Endpoint | None = None
        if self.config.engine == "endpoint":
            self.endpoint = endpoint_of(self.config, config.plugin_deadline)
        self._traffics: WeakKeyDictionary[asyncio.AbstractEventLoop, _Traffic] = WeakKeyDictionary()
        self._answers: dict[tuple[Question, int], Answer] = {}  # to questions that are not yet settled

    def check(self) -> None:
        """Raises ConfigError where the judge cannot answer as it will be asked to, as far as can be known without its
        weights. An endpoint is asked two questions.
        """
        right, wrong = CHECKS
        if self.endpoint is None:
            self.model.check(lambda: self.messages(right))
            return
        probe = replace(self.endpoint, timeout=PROBE_SECONDS)
        for question in (right, wrong):  # either word may be one that the server cuts into tokens
            try:
                answer = probe.chat(self.messages(question), **self._fields(0))
                judgement = self._read([answer])
            except (EndpointError, ValueError) as error:
                raise ConfigError(f"reward.judge: expected an answer to a first question: {error}") from error
            if judgement.verdict is None:
                raise ConfigError(
                    f"reward.judge: expected {' or '.join(self.config.answers)} from {self.config.model} at "
                    f"{self.endpoint.url} in reply to a first question, got {answer.text!r} (docs/judge.md)"
                )

    def judge_all(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        """Raises RewardError."""
        pairs = zip(prompts, completions, strict=True)
        questions = [[self._question(prompt, completion) for completion in samples] for prompt, samples in pairs]
        try:
            asked = self._unknown(question for of_prompt in questions for question in of_prompt)
            chances = self.model([self.messages(question) for question in asked]) if asked else []
            self.known.add({q: self._judgement(*found) for q, found in zip(asked, chances, strict=True)})
        except (OSError, RuntimeError, ValueError) as error:
            prompt, completion = prompts[0], completions[0][0]
            raise RewardError(explain("judge", error, self.reward, prompt, completion), prompt, completion) from error
        return [[self._verdict(question) for question in of_prompt] for of_prompt in questions]

    def close(self) -> None:
        """At the end of a run: what is said from here on is none of its."""
        self.known.close()
        self._answers.clear()

    async def ask(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], rows: Sequence[dict[str, Any]]
    ) -> list[Verdict]:
        """Raises EndpointError, when all that was answered is known and need not be asked again, and ConfigError where
        the endpoint takes no question of ours.
        """
        questions = list(map(self._question, prompts, completions))
        asked = (self._ask(question) for question in self._unknown(questions))
        for failure in await asyncio.gather(*asked, return_exceptions=True):
            if failure is not None:
                raise failure
        return [self._verdict(question) for question in questions]

    def messages(self, question: Question) -> list[dict[str, str]]:
        return conversation_of(self.config, question, self._shield)

    async def _ask(self, question: Question) -> None:
        async with self._traffic().lock(question):  # of calls that have the same question one asks
            if question in self.known:
                return
            asked = [(question, number) for number in range(max(1, self.config.votes))]
            open_ones = [self._request(*each) for each in asked if each not in self._answers]
            try:
                for failure in await asyncio.gather(*open_ones, return_exceptions=True):
                    if failure is not None:
                        raise failure
                judgement = self._read([self._answers.pop(each) for each in asked])
            except EndpointError as error:
                if error.status in DENIED:
                    raise ConfigError(f"reward.judge: {error}") from error
                if error.status not in REFUSED:
                    raise
                await self._request(CHECKS[0], 0)  # an endpoint that refuses this too refuses whatever it is asked
                judgement = Judgement(None, 0.0)
            self.known.add({question: judgement})

    async def _request(self, question: Question, number: int) -> None:
        assert self.endpoint is not None
        gate = self._traffic().gate
        await gate.acquire()
        answer = asyncio.wrap_future(
            in_thread(partial(self.endpoint.chat, self.messages(question), **self._fields(number)))
        )
        answer.add_done_callback(lambda _: gate.release())  # a thread that nobody waits for any more asks on
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask for its failure
        self._answers[question, number] = await asyncio.shield(answer)

    def _traffic(self) -> _Traffic:
        limit = self.reward.calls.concurrency or ASYNC_CALLS
        return self._traffics.setdefault(asyncio.get_running_loop(), _Traffic(limit))

    def _fields(self, number: int) -> dict[str, Any]:
        """Of a request: for the probabilities of a first token, or for one of several samples."""
        if self.config.votes:
            return {"max_tokens": self.config.max_tokens, "temperature": self.config.temperature, "seed": number}
        return {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": TOP_TOKENS}

    def _read(self, answers: Sequence[Answer]) -> Judgement:
        if not self.config.votes:
            first = [(_bare(token), math.exp(logprob)) for token, logprob in answers[0].first]
            yes, no = (sum(p for token, p in first if token == word.lower()) for word in self.config.answers)
            return self._judgement(yes, no, bool(first) and first[0][0] in map(str.lower, self.config.answers))
        words = [word_of(answer.text, self.config.answers) for answer in answers]
        yes, no = (words.count(word) / len(words) for word in self.config.answers)
        return self._judgement(yes, 1 - yes, yes + no > 0)

    def _judgement(self, yes: float, no: float, said: bool) -> Judgement:
        """``said``: whether the judge answered with either word. Raises ValueError for what are no probabilities."""
        if not math.isfinite(yes + no) or (said and yes + no <= 0):
            raise ValueError(f"expected the probabilities of {' and '.join(self.config.answers)}, got {yes} and {no}")
        if not said:
            return Judgement(None, 0.0)
        confidence = yes / (yes + no)
        return Judgement(self.config.answers[confidence < 0.5], confidence)

    def _question(self, prompt: Prompt, completion: Completion) -> Question:
        problem = prompt.messages[-1][1] if prompt.messages else prompt.text
        lines = [line for line in completion.text.splitlines() if line.strip()]
        shown = completion.text if self.config.shows == "response" else "".join(lines[-1:])
        return Question(problem, prompt.answer, shown.strip()[-self.config.max_characters :])

    def _unknown(self, questions: Iterable[Question]) -> list[Question]:
        return [question for question in dict.fromkeys(questions) if question.response and question not in self.known]

    def _verdict(self, question: Question) -> Verdict:
        found = self.known[question] if question.response else Judgement(None, 0.0)
        rule = "judge" if found.verdict is not None else "unclear" if question.response else "none"
        value = found.confidence if self.config.reward == "soft" else None
        return Verdict(found.confidence >= 0.5, rule=rule, value=value)

    @cached_property
    def _shield(self) -> Shield:
        return Shield(self.config.template, self.model.tokens if self.endpoint is None else ())


class _Traffic:
    """What the calls of one event loop share: permits for requests, and a lock for each question at hand."""

    def __init__(self, limit: int) -> None:
        self.gate = asyncio.Semaphore(limit)
        self._locks: WeakValueDictionary[Question, asyncio.Lock] = WeakValueDictionary()

    def lock(self, question: Question) -> asyncio.Lock:
        return self._locks.setdefault(question, asyncio.Lock())


class Shield:
    """Breaks up by a space what could end a role or a tag: ``tokens`` of the judge's own, the tags of the template, and
    the forms in which models commonly write their special tokens.
    """

    _FORMS = (
        r"<[|｜][^<>\s]*[|｜]>",
        r"</?(?:s|bos|eos|pad|unk|think|(?:start|end)_of_turn)>",
        r"\[/?[A-Z_]*(?:INST|TOOL|SYSTEM)[A-Z_]*\]",
        r"<</?SYS>>",
    )

    def __init__(self, template: str, tokens: Iterable[str] = ()) -> None:
        names = set(re.findall(r"</?(\w+)>", template))
        # A tag however it is written is broken up within its name; one of a single letter has to be written as it is.
        tags = [rf"(?i:<\s*/?\s*{name[0]}(?={name[1:]}\s*>))" for name in sorted(names) if len(name) > 1]
        short = {f"<{slash}{name}>" for name in names if len(name) == 1 for slash in ("", "/")}
        own = [token for token in short | set(tokens) if len(token) > 1 and not re.search(r"\s", token)]
        others = [*map(re.escape, sorted(own, key=len, reverse=True)), *self._FORMS]
        self._broken = re.compile("|".join([f"(?P<tag>{'|'.join(tags) or '(?!)'})", *others]))

    def __call__(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # without lone surrogates, which no tokenizer takes
        while self._broken.search(text):
            text = self._broken.sub(self._break, text)
        return text

    def _break(self, found: re.Match[str]) -> str:
        return f"{found[0]} " if found["tag"] else f"{found[0][0]} {found[0][1:]}"


def conversation_of(prompt: JudgePrompt, question: Question, shield: Shield) -> list[dict[str, str]]:
    """What the judge's answer is the next message of."""
    yes, no = prompt.answers
    fields = {name: shield(text) for name, text in question._asdict().items()} | {"yes": yes, "no": no}
    text = re.sub("{(" + "|".join(fields) + ")}", lambda found: fields[found[1]], prompt.template)
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return [*system, {"role": "user", "content": text}]


def endpoint_of(config: AskedModel, timeout: float | None) -> Endpoint:
    assert config.url is not None
    extra = {"chat_template_kwargs": config.chat_template_kwargs} if config.chat_template_kwargs else {}
    return Endpoint(config.url, config.model, config.key_env, extra | config.options, timeout)


def word_of(text: str, words: Sequence[str]) -> str | None:
    """Which of ``words`` a text begins or ends with; None where that is none of them, or both."""
    said = re.findall(r"\w+", text.lower())
    found = [word for word in words if word.lower() in (*said[:1], *said[-1:])]
    return found[0] if len(found) == 1 else None


def _bare(token: str) -> str:
    return token.strip(" \t\n▁Ġ").lower()


_JUDGES: dict[str, Judge] = {}
