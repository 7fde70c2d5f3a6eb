"""A judge: a model that decides whether a response agrees with the reference answer (arXiv 2503.23829, Section 3.1).

It replies with one of two words. Its confidence in the first one is the reward (docs/judge.md):

    p(yes) / (p(yes) + p(no))   of the first token of its reply, over the spellings of each word
    the share of yes            among `reward.judge.votes` sampled replies
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
from dapo_runner.config import AuxiliaryModel, ConfigError, JudgePrompt, RewardConfig
from dapo_runner.files import append_jsonl, drop_incomplete_line, read_jsonl
from dapo_runner.rewards.calls import ASYNC_CALLS, Call, CallingReward, RewardError, Verdicts, first_error, reward_error
from dapo_runner.rewards.judge_model import JudgeModel, confidence_of, special_tokens
from dapo_runner.types import Completion, Prompt, Verdict

MAX_CHARACTERS = 4000  # of a response that the judge sees, counted from its end
VOTE_TOKENS = 8  # of a sampled reply; set options: {max_tokens: …} for a model that thinks first
TOP_TOKENS = 20  # most APIs return at most this many log-probs
MAX_BYTES = 2**24  # of a reply
REFUSED = (400, 413, 422)  # HTTP status codes for a text that is too long or blocked by a filter
DENIED = (401, 403, 404)  # for an invalid key, URL or model


class Question(NamedTuple):
    """The fields of the judge's prompt."""

    problem: str
    reference: str
    response: str

    @property
    def key(self) -> bytes:
        return hashlib.blake2b(json.dumps(self).encode(), digest_size=16).digest()


class Judgement(NamedTuple):
    """The judge's decision: ``verdict`` is one of the two words, or None for any other reply."""

    verdict: str | None
    confidence: float


class VerdictLog:
    """Judgements by question, in memory and, after ``open``, in a file of JSON lines."""

    def __init__(self) -> None:
        self._known: dict[bytes, Judgement] = {}
        self._path: Path | None = None

    def open(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        """Save judgements in ``folder``; load those of this rank and of former ranks. Raises ConfigError."""
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


# Common forms of special tokens, of which the first character matches.
_SPECIAL = (
    r"<(?=[|｜][^<>\s]*>|[^<>\s]*[|｜]>)",
    r"<(?=/?(?:s|bos|eos|pad|unk|think|(?:start|end)_of_turn)>)",
    r"\[(?=/?[A-Z_]*(?:INST|TOOL|SYSTEM)[A-Z_]*\])",
    r"<(?=</?SYS>>)",
)


class Questioner:
    """Format questions with a template.

    A text in a question cannot start another role or close the template's tag around it: a space is inserted into
    special tokens and into the template's tags. A response may still persuade a judge.
    """

    def __init__(self, prompt: JudgePrompt, tokens: Iterable[str] = ()) -> None:
        """Take ``tokens``, the special tokens of the judge."""
        self.prompt = prompt
        names = set(re.findall(r"</?([^\s<>/]+)>", prompt.template))
        # A tag in any spelling gets a space inside its name. A tag with a one-letter name must match exactly.
        tag = r"(?i:<\s*/?\s*{}(?={}\s*>))"
        tags = [tag.format(re.escape(name[0]), re.escape(name[1:])) for name in sorted(names) if len(name) > 1]
        short = {f"<{slash}{name}>" for name in names if len(name) == 1 for slash in ("", "/")}
        exact = [token for token in short | set(tokens) if len(token) > 1 and not re.search(r"\s", token)]
        others = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in exact]
        self._broken = re.compile("|".join([*tags, *others, *_SPECIAL]))  # a space is inserted behind each match

    def messages(self, question: Question) -> list[dict[str, str]]:
        """Return the conversation that the judge replies to."""
        yes, no = self.prompt.answers
        fields = {name: self.shield(text) for name, text in question._asdict().items()} | {"yes": yes, "no": no}
        text = re.sub("{(" + "|".join(fields) + ")}", lambda found: fields[found[1]], self.prompt.template)
        return [{"role": "user", "content": text}]

    def shield(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # without lone surrogates, which tokenizers reject
        while self._broken.search(text):
            text = self._broken.sub(r"\g<0> ", text)
        return text


About = tuple[int, Prompt, Completion]  # the prompt's index in the batch, the prompt, a response
CHECKS = [Question("What is 1 + 1?", "2", f"Answer: {number}") for number in (2, 3)]  # yes and no


class Judge(CallingReward):
    """Judge responses with a model in this process or behind an API. The model is loaded on first use.

    A reply that is neither word has confidence 0 and the rule `unclear`, as has a question that an API refuses because
    of its text. An empty response is not judged: `none`. Equal questions are asked once.
    """

    def __init__(self, config: RewardConfig, device: str) -> None:
        super().__init__("judge", config, ASYNC_CALLS)
        assert config.judge is not None
        self.settings, self.known = config.judge, VerdictLog()
        self.model = None if self.settings.url else JudgeModel(self.settings, device)
        if self.model is not None:
            self.counts.clear()

    def check(self) -> None:
        """Send an API two questions; try the tokenizer of a model in this process. Raises ConfigError."""
        if self.model is not None:
            self.model.check(self.questioner.messages(CHECKS[0]))
            return
        confidences = []
        for question in CHECKS:  # check both words: a server may split one into several tokens
            try:
                found: object = self._ask(question)
            except (http.HTTPError, ValueError) as error:
                found = error
            if not isinstance(found, float):
                raise ConfigError(
                    f"reward.judge: expected {' or '.join(self.settings.answers)} from {self.settings.model} at "
                    f"{self.settings.url} in reply to a first question, got {found or 'something else'} (docs/judge.md)"
                )
            confidences.append(found)
        if "{reference}" in self.settings.template and confidences[0] < 0.5 <= confidences[1]:
            yes = self.settings.answers[0]
            raise ConfigError(f"reward.judge.answers: expected {yes} for a right response, got it for a wrong one only")

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], allowed: int) -> Verdicts:
        pairs = zip(prompts, completions, strict=True)
        questions = [[self._question(prompt, completion) for completion in samples] for prompt, samples in pairs]
        submitted: dict[Question, About] = {}
        for index, row in enumerate(questions):
            for question, completion in zip(row, completions[index], strict=True):
                if question.response and self.known.get(question) is None:
                    submitted.setdefault(question, (index, prompts[index], completion))
        failures = self._ask_all(submitted, allowed) if submitted else {}
        return [first_error(map(failures.get, row)) or list(map(self._verdict, row)) for row in questions]

    @cached_property
    def questioner(self) -> Questioner:
        return Questioner(self.settings, () if self.model is None else special_tokens(self.model.tokenizer))

    def _ask_all(self, submitted: Mapping[Question, About], allowed: int) -> dict[Question, RewardError]:
        """Ask the questions and save the judgements, also if one fails. Return the failures that are allowed."""
        votes = max(1, self.settings.votes)
        answers: dict[Question, list[float | None]] = {question: [] for question in submitted}

        def ask(question: Question, vote: int) -> None:
            answers[question].append(self._ask(question, vote))

        try:
            if self.model is None:
                tries = [(question, vote) for question in submitted for vote in range(votes)]
                calls = [Call(*submitted[one], partial(ask, one, vote)) for one, vote in tries]
                found = zip(tries, self.run_calls(calls, allowed), strict=True)
                return {question: failed for (question, _), failed in found if isinstance(failed, RewardError)}
            try:
                results = self.model([self.questioner.messages(question) for question in submitted])
            except (OSError, RuntimeError, ValueError) as error:
                raise reward_error("judge", error, *next(iter(submitted.values()))[1:]) from error
            answers = {question: [answer] for question, answer in zip(submitted, results, strict=True)}
            return {}
        finally:
            self.known.add({one: self._judgement(found) for one, found in answers.items() if len(found) == votes})

    def _judgement(self, answers: Sequence[float | None]) -> Judgement:
        clear = [answer for answer in answers if answer is not None]
        mean = sum(clear) / len(answers)
        return Judgement(self.settings.answers[mean < 0.5] if clear else None, mean)

    def _ask(self, question: Question, vote: int = 0) -> float | None:
        """Return the confidence in one reply of an API; None if it is unclear, or the API refuses the text.

        Raises HTTPError without a reply, and ConfigError if key, URL or model is invalid.
        """
        fields: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": TOP_TOKENS}
        if self.settings.votes:
            fields = {"max_tokens": VOTE_TOKENS, "temperature": 1.0, "seed": vote}
        try:
            text, tokens = chat(self.settings, self.questioner.messages(question), self.config.call_timeout, **fields)
        except http.HTTPError as error:
            if error.status in DENIED:
                raise ConfigError(f"reward.judge: expected a valid key, URL and model, got: {error}") from error
            if error.status not in REFUSED or question in CHECKS:
                raise
            self._ask(CHECKS[0])  # raises if the API refuses every question
            return None
        yes, no = (word.lower() for word in self.settings.answers)
        if self.settings.votes:
            return {yes: 1.0, no: 0.0}.get(word_of(text, (yes, no)) or "")
        first = [(token.strip(" \t\n▁Ġ").lower(), math.exp(logprob)) for token, logprob in tokens]
        p_yes, p_no = (sum(p for token, p in first if token == word) for word in (yes, no))
        return confidence_of(p_yes, p_no, bool(first) and first[0][0] in (yes, no))

    def _question(self, prompt: Prompt, completion: Completion) -> Question:
        problem = prompt.messages[-1][1] if prompt.messages else prompt.text
        lines = [line for line in completion.text.splitlines() if re.search(r"[^\W_]", line)] or [completion.text]
        shown = completion.text if self.settings.shows == "response" else lines[-1]
        return Question(problem, prompt.answer, shown.strip()[-MAX_CHARACTERS:])

    def _verdict(self, question: Question) -> Verdict:
        found = self.known.get(question) or Judgement(None, 0.0)
        rule = "judge" if found.verdict is not None else "unclear" if question.response else "none"
        value = found.confidence if self.settings.reward == "soft" else None
        return Verdict(found.confidence >= 0.5, rule=rule, value=value)


def word_of(text: str, words: Sequence[str]) -> str | None:
    """Return which of ``words`` a text begins or ends with; None if none of them or several do."""
    pattern = r"(?i)\A\W*{0}(?!\w)|(?<!\w){0}\W*\Z"  # vowel signs of Hindi, Thai or Arabic are no \w
    found = [word for word in words if re.search(pattern.format(re.escape(word)), text)]
    return found[0] if len(found) == 1 else None


def chat(
    model: AuxiliaryModel, messages: list[dict[str, str]], timeout: float, **fields: Any
) -> tuple[str, list[tuple[str, float]]]:
    """Return the reply of a model behind an OpenAI-compatible API, and the likeliest first tokens with their log-probs.
    The reply's own first token comes first.

    ``fields`` belong to the request; the model's `options` override them. Raises HTTPError if the answer lacks what was
    requested, and ConfigError if the environment variable with the key is empty.
    """
    assert model.url is not None
    key, url = http.read_key(model.url, model.key_env), f"{model.url.rstrip('/')}/chat/completions"
    requested = {"model": model.model, "messages": messages, **fields, **model.options}
    body = {name: value for name, value in requested.items() if value is not None}
    answer = http.run(http.request("POST", url, body, key=key, timeout=timeout, max_bytes=MAX_BYTES, use_proxy=True))
    try:
        choice = answer["choices"][0]
        text = str(choice["message"].get("content") or "")
        return text, _first_tokens(choice["logprobs"]) if text and body.get("logprobs") else []
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        expected = "choices with a message" + (" and logprobs" if body.get("logprobs") else "")
        raise http.HTTPError(f"{url}: expected {expected}, got {http.shorten(json.dumps(answer), key)}") from error


def _first_tokens(logprobs: Any) -> list[tuple[str, float]]:
    first = logprobs["content"][0]
    chosen, *others = [(item["token"], float(item["logprob"])) for item in (first, *first["top_logprobs"])]
    if not all(logprob < 1 for _, logprob in (chosen, *others)):  # rounding can make one slightly positive
        raise ValueError("expected log-probs")
    return [chosen, *(item for item in others if item[0] != chosen[0])]
