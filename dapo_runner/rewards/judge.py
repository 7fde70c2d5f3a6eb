"""A judge: a model that decides whether a response gives the reference answer (arXiv 2503.23829, Section 3.1).

It is asked for one of two words, and its confidence that it is the first becomes the reward (docs/judge.md):

    p(yes) / (p(yes) + p(no))   of the first token of its answer, over the ways to write either word
    the share of yes            of `reward.judge.votes` sampled answers
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from dapo_runner import http
from dapo_runner.config import AskedModel, ConfigError, JudgePrompt, RewardConfig
from dapo_runner.files import append_jsonl, drop_incomplete_line, read_jsonl
from dapo_runner.http import HTTPError
from dapo_runner.rewards.judge_model import JudgeModel, confidence_of, special_tokens
from dapo_runner.rewards.reward import (
    ASYNC_CALLS,
    Call,
    CallingReward,
    RewardError,
    Verdicts,
    first_error,
    reward_error,
)
from dapo_runner.types import Completion, Prompt, Verdict

MAX_CHARACTERS = 4000  # of a response that are shown, counted from its end
VOTE_TOKENS = 8  # of a sampled answer; options: {max_tokens: …} for a model that thinks first
TOP_TOKENS = 20  # whose log-probs an API gives at most by default
MAX_BYTES = 2**24  # of an answer
REFUSED = (400, 413, 422)  # HTTP status codes for a text that is too long, or that a filter does not let through
DENIED = (401, 403, 404)  # for a wrong key, URL or model


class Question(NamedTuple):
    """What the judge is shown."""

    problem: str
    reference: str
    response: str

    @property
    def key(self) -> bytes:
        return hashlib.blake2b(json.dumps(self).encode(), digest_size=16).digest()


class Judgement(NamedTuple):
    """``verdict`` is the word of the two that the judge answered; None where it answered neither."""

    verdict: str | None
    confidence: float


class VerdictLog:
    """Judgements by question: in memory, and after ``open`` in a file of JSON lines."""

    def __init__(self) -> None:
        self._known: dict[bytes, Judgement] = {}
        self._path: Path | None = None

    def open(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        """Keep judgements in ``folder``, and read those of this rank and of ranks that are gone. Raises ConfigError."""
        self._known, self._path = {}, folder / (f"verdicts_rank_{rank}.jsonl" if rank else "verdicts.jsonl")
        for path in sorted(folder.glob("verdicts*.jsonl")):
            number = path.stem.removeprefix("verdicts_rank_")
            for row in read_jsonl(path) if path == self._path or (number.isdecimal() and int(number) >= ranks) else ():
                try:
                    question = Question(*(row[name] for name in Question._fields))
                    self._known[question.key] = Judgement(row["verdict"], row["confidence"])
                except KeyError as error:
                    raise ConfigError(f"{path}: expected {error}, got {row}. Remove the line to ask again.") from error
        if self._path.is_file():
            drop_incomplete_line(self._path)

    def get(self, question: Question) -> Judgement | None:
        return self._known.get(question.key)

    def add(self, found: Mapping[Question, Judgement]) -> None:
        if self._path is not None and found:
            append_jsonl(self._path, [{**question._asdict(), **found[question]._asdict()} for question in found])
        self._known |= {question.key: judgement for question, judgement in found.items()}


# The forms in which models commonly write special tokens.
_SPECIAL = (
    r"<[|｜][^<>\s]*[|｜]>",
    r"</?(?:s|bos|eos|pad|unk|think|(?:start|end)_of_turn)>",
    r"\[/?[A-Z_]*(?:INST|TOOL|SYSTEM)[A-Z_]*\]",
    r"<</?SYS>>",
)


class Questioner:
    """Puts questions into a template.

    No text of a question can begin another role, or close the tag that the template puts around it: special tokens and
    the tags of the template are broken up by a space. A response may still persuade a judge.
    """

    def __init__(self, prompt: JudgePrompt, tokens: Iterable[str] = ()) -> None:
        """``tokens``: special tokens of the judge's own."""
        self.prompt = prompt
        names = set(re.findall(r"</?(\w+)>", prompt.template))
        # A tag however it is written is broken up within its name; one of a single letter has to be written as it is.
        tags = [rf"(?i:<\s*/?\s*{name[0]}(?={name[1:]}\s*>))" for name in sorted(names) if len(name) > 1]
        short = {f"<{slash}{name}>" for name in names if len(name) == 1 for slash in ("", "/")}
        own = [token for token in short | set(tokens) if len(token) > 1 and not re.search(r"\s", token)]
        others = [*map(re.escape, sorted(own, key=len, reverse=True)), *_SPECIAL]
        self._broken = re.compile("|".join([f"(?P<tag>{'|'.join(tags) or '(?!)'})", *others]))

    def messages(self, question: Question) -> list[dict[str, str]]:
        """Return the conversation whose next message is the judge's answer."""
        yes, no = self.prompt.answers
        fields = {name: self.shield(text) for name, text in question._asdict().items()} | {"yes": yes, "no": no}
        text = re.sub("{(" + "|".join(fields) + ")}", lambda found: fields[found[1]], self.prompt.template)
        system = [] if self.prompt.system is None else [{"role": "system", "content": self.prompt.system}]
        return [*system, {"role": "user", "content": text}]

    def shield(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # without lone surrogates, which no tokenizer takes
        while self._broken.search(text):
            text = self._broken.sub(
                lambda found: f"{found[0]} " if found["tag"] else f"{found[0][0]} {found[0][1:]}", text
            )
        return text


About = tuple[int, Prompt, Completion]  # the prompt's index in the batch, the prompt, a response
CHECKS = [Question("What is 1 + 1?", "2", f"Answer: {number}") for number in (2, 3)]  # yes and no


class Judge(CallingReward):
    """Judges responses by a model in this process or behind an API. It loads nothing before it is asked.

    An answer that is neither word has confidence 0, and so has a question that an API refuses for its text: `unclear`.
    An empty response is not asked about: `none`. One question is asked once.
    """

    def __init__(self, config: RewardConfig) -> None:
        super().__init__("judge", config, ASYNC_CALLS)
        assert config.judge is not None
        self.settings, self.known = config.judge, VerdictLog()
        self.model = None if self.settings.url else JudgeModel(self.settings)
        if self.model is not None:
            self.counts.clear()

    def check(self) -> None:
        """Ask an API two questions; try the tokenizer of a model in this process. Raises ConfigError."""
        if self.model is not None:
            self.model.check(self.questioner.messages(CHECKS[0]))
            return
        for question in CHECKS:  # a server may cut either word into several tokens
            try:
                found: object = self._ask(question)
            except (HTTPError, ValueError) as error:
                found = error
            if not isinstance(found, float):
                raise ConfigError(
                    f"reward.judge: expected {' or '.join(self.settings.answers)} from {self.settings.model} at "
                    f"{self.settings.url} in reply to a first question, got {found or 'something else'} (docs/judge.md)"
                )

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        pairs = zip(prompts, completions, strict=True)
        questions = [[self._question(prompt, completion) for completion in samples] for prompt, samples in pairs]
        asked: dict[Question, About] = {}
        for index, of_prompt in enumerate(questions):
            for question, completion in zip(of_prompt, completions[index], strict=True):
                if question.response and self.known.get(question) is None:
                    asked.setdefault(question, (index, prompts[index], completion))
        failures = self._ask_all(asked) if asked else {}
        return [
            first_error(map(failures.get, of_prompt)) or [self._verdict(question) for question in of_prompt]
            for of_prompt in questions
        ]

    def release(self) -> None:
        """Move the model off the GPU until it is asked again."""
        if self.model is not None:
            self.model.release()

    @cached_property
    def questioner(self) -> Questioner:
        return Questioner(self.settings, () if self.model is None else special_tokens(self.model.tokenizer))

    def _ask_all(self, asked: Mapping[Question, About]) -> dict[Question, RewardError]:
        """Ask, and keep the answers. Returns what failed within `reward.calls.max_failed`."""
        votes = max(1, self.settings.votes)
        results: Sequence[float | RewardError | None]
        if self.model is None:
            tries = [(question, vote) for question in asked for vote in range(votes)]
            results = self.run_calls(
                [Call(*asked[question], partial(self._ask, question, vote)) for question, vote in tries]
            )
        else:
            try:
                results = self.model([self.questioner.messages(question) for question in asked])
            except (OSError, RuntimeError, ValueError) as error:
                raise reward_error("judge", error, *next(iter(asked.values()))[1:]) from error
        found, failures = {}, {}
        for number, question in enumerate(asked):
            answers = results[votes * number : votes * (number + 1)]
            clear = [answer for answer in answers if isinstance(answer, float)]
            if (failed := first_error(answers)) is not None:
                failures[question] = failed
            else:
                mean = sum(clear) / votes
                found[question] = Judgement(self.settings.answers[mean < 0.5] if clear else None, mean)
        self.known.add(found)
        return failures

    def _ask(self, question: Question, vote: int = 0) -> float | None:
        """Return the confidence of one answer of an API; None where it is unclear, or the API refuses the text.

        Raises HTTPError without an answer, and ConfigError where the key, URL or model is wrong.
        """
        fields: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": TOP_TOKENS}
        if self.settings.votes:
            fields = {"max_tokens": VOTE_TOKENS, "temperature": 1.0, "seed": vote}
        try:
            text, tokens = chat(
                self.settings, self.questioner.messages(question), self.config.plugin_deadline, **fields
            )
        except HTTPError as error:
            if error.status in DENIED:
                raise ConfigError(f"reward.judge: {error}") from error
            if error.status not in REFUSED or question in CHECKS:
                raise
            self._ask(CHECKS[0])  # an API that refuses this too refuses every question
            return None
        yes, no = (word.lower() for word in self.settings.answers)
        if self.settings.votes:
            return {yes: 1.0, no: 0.0}.get(word_of(text, (yes, no)) or "")
        first = [(token.strip(" \t\n▁Ġ").lower(), math.exp(logprob)) for token, logprob in tokens]
        p_yes, p_no = (sum(p for token, p in first if token == word) for word in (yes, no))
        return confidence_of(p_yes, p_no, bool(first) and first[0][0] in (yes, no))

    def _question(self, prompt: Prompt, completion: Completion) -> Question:
        problem = prompt.messages[-1][1] if prompt.messages else prompt.text
        lines = [line for line in completion.text.splitlines() if line.strip()]
        shown = completion.text if self.settings.shows == "response" else "".join(lines[-1:])
        return Question(problem, prompt.answer, shown.strip()[-MAX_CHARACTERS:])

    def _verdict(self, question: Question) -> Verdict:
        found = self.known.get(question) or Judgement(None, 0.0)
        rule = "judge" if found.verdict is not None else "unclear" if question.response else "none"
        value = found.confidence if self.settings.reward == "soft" else None
        return Verdict(found.confidence >= 0.5, rule=rule, value=value)


def word_of(text: str, words: Sequence[str]) -> str | None:
    """Return which of ``words`` a text begins or ends with; None where that is neither, or both."""
    read = re.findall(r"\w+", text.lower())
    found = [word for word in words if word.lower() in (*read[:1], *read[-1:])]
    return found[0] if len(found) == 1 else None


TokenLogprobs = list[tuple[str, float]]


def chat(
    model: AskedModel, messages: list[dict[str, str]], timeout: float | None, **fields: Any
) -> tuple[str, TokenLogprobs]:
    """Return the next message of a model behind an OpenAI-compatible API, and its likeliest first tokens, its own at
    the front.

    ``fields`` are those of the request; `options` of the model override them. Raises HTTPError where the answer does
    not have what was asked for, and ConfigError where the environment variable with the key is empty.
    """
    assert model.url is not None
    key, url = http.read_key(model.url, model.key_env), f"{model.url.rstrip('/')}/chat/completions"
    asked = {"model": model.model, "messages": messages, **fields, **model.options}
    body = {name: value for name, value in asked.items() if value is not None}
    answer = http.run(http.request("POST", url, body, key=key, within=timeout, max_bytes=MAX_BYTES, use_proxy=True))
    try:
        choice = answer["choices"][0]
        text = str(choice["message"].get("content") or "")
        return text, _first_tokens(choice["logprobs"]) if text and body.get("logprobs") else []
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        expected = "choices with a message" + (" and logprobs" if body.get("logprobs") else "")
        raise HTTPError(f"{url}: expected {expected}, got {http.shorten(json.dumps(answer), key)}") from error


def _first_tokens(logprobs: Any) -> TokenLogprobs:
    first = logprobs["content"][0]
    own = (first["token"], float(first["logprob"]))
    others = [(item["token"], float(item["logprob"])) for item in first["top_logprobs"]]
    if not all(logprob < 1 for _, logprob in (own, *others)):  # rounded, one may lie a little above 0
        raise ValueError("expected log-probs")
    return [own, *(item for item in others if item[0] != own[0])]
