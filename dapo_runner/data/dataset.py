"""Clean problems, tokenize them as prompts, and iterate over them. ``DataReport`` counts what is left out."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dapo_runner.config import Config, ConfigError, DataConfig, EvalSetConfig
from dapo_runner.data.arithmetic import split_problems
from dapo_runner.data.curriculum import Curriculum
from dapo_runner.data.reading import Problem, read_problems, shorten
from dapo_runner.types import Group, Prompt

RECIPE_OPENING = "Solve the following math problem step by step."
RECIPE_TEMPLATE = (
    RECIPE_OPENING + " The last line of your response should be of the form Answer: $Answer (without quotes) where "
    "$Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
_LETTER = re.compile(r"\W*[A-Z](?![^\W_])")  # what an answer that the reward `choice` can find begins with


class Tokenizer(Protocol):
    """What this module uses of a transformers tokenizer."""

    chat_template: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool = ...) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...


@dataclass(slots=True)
class DataReport:
    """Where the rows went: ``rows`` = the sum of everything below it, ``train`` and ``heldout`` included."""

    rows: int = 0
    duplicates: int = 0
    conflicting: int = 0  # rows of prompts that come with several different answers
    in_heldout: int = 0  # training rows that are held out
    too_long: int = 0
    beyond_limit: int = 0  # rows of evaluation sets past their size
    train: int = 0
    heldout: int = 0
    conflicting_prompts: int = 0

    def describe(self) -> str:
        dropped = {
            "duplicates": self.duplicates,
            f"rows of {self.conflicting_prompts} prompts with conflicting answers": self.conflicting,
            "held-out problems": self.in_heldout,
            "prompts longer than rollout.max_prompt_tokens": self.too_long,
            "evaluation rows past their set's size": self.beyond_limit,
        }
        parts = [f"{count} {what}" for what, count in dropped.items() if count]
        return f"{self.rows} rows → {self.train} training and {self.heldout} held-out prompts" + (
            f"; dropped {', '.join(parts)}" if parts else ""
        )


@dataclass(frozen=True, slots=True)
class Dataset:
    train: list[Prompt]
    heldout: list[Prompt]
    report: DataReport = field(default_factory=DataReport)


def load_data(config: Config, tokenizer: Tokenizer) -> Dataset:
    """Return training and held-out prompts. Raises ConfigError."""
    data, report = config.data, DataReport()
    train, sets = _generate(data, report) if data.format == "arithmetic" else _read(data, report)

    def build(problems: list[Problem], eval_set: str = "") -> list[Prompt]:
        return build_prompts(problems, tokenizer, data, config.rollout.max_prompt_tokens, report, eval_set)

    prompts = build(train)
    heldout = [prompt for name, problems in sets.items() for prompt in build(problems, name)]
    # Texts are compared: rows that differ may render to the same prompt.
    texts = {" ".join(prompt.text.split()) for prompt in heldout}
    kept = [prompt for prompt in prompts if " ".join(prompt.text.split()) not in texts]
    report.in_heldout, report.train, report.heldout = len(prompts) - len(kept), len(kept), len(heldout)
    if not kept:
        raise ConfigError(f"data: no training prompt is left: {report.describe()}")
    if "choice" in config.reward.uses and not any(_LETTER.match(prompt.answer) for prompt in kept):
        raise ConfigError(
            f"reward.kind: choice expects answers that are letters, got {shorten(kept[0].answer)}. Set "
            "data.columns.choices to the column of the choices."
        )
    return Dataset(kept, heldout, report)


Problems = tuple[list[Problem], dict[str, list[Problem]]]  # training problems, and evaluation sets by name


def _generate(data: DataConfig, report: DataReport) -> Problems:
    train, heldout = (
        [Problem(p.question, p.answer, "arithmetic", row={"difficulty": p.digits}) for p in part]
        for part in split_problems(data.arithmetic, data.eval_size)
    )
    report.rows = len(train) + len(heldout)
    return train, {"": heldout}


def _read(data: DataConfig, report: DataReport) -> Problems:
    assert data.path is not None, "the configuration has checked it"
    rows = read_problems(
        data.path, data.format, columns=data.columns, subset=data.subset, split=data.split, system=data.system
    )
    train = clean(rows, report, data.limit)
    if data.eval:
        return train, {name: _read_set(chosen, data, report) for name, chosen in data.eval.items()}
    heldout = _cut_heldout(train, data.eval_size)
    cut = set(map(id, heldout))
    return [problem for problem in train if id(problem) not in cut], {"": heldout}


def _read_set(chosen: EvalSetConfig, data: DataConfig, report: DataReport) -> list[Problem]:
    rows = read_problems(
        chosen.path,
        chosen.format,
        columns=chosen.columns or data.columns,
        subset=chosen.subset,
        split=chosen.split,
        system=data.system,
    )
    problems = clean(rows, report)
    kept = problems[: chosen.limit]
    report.beyond_limit += len(problems) - len(kept)
    return kept


def _cut_heldout(problems: list[Problem], size: int) -> list[Problem]:
    """Sample held-out problems: the same for every seed, so that runs over one file are compared on the same ones."""
    if size >= len(problems) > 0:
        raise ConfigError(
            f"data.eval_size: expected fewer than the {len(problems)} problems of the training file, got {size}. "
            "Lower it, or name evaluation sets in data.eval."
        )
    return random.Random("held-out").sample(problems, size if problems else 0)


def clean(problems: Iterable[Problem], report: DataReport, limit: int | None = None) -> list[Problem]:
    """Drop repeated rows, and all rows of a prompt that comes with several answers; count both.

    Reading ends once there are ``limit`` problems and a row holds another one.
    """
    first: dict[str, Problem] = {}
    rows: Counter[str] = Counter()
    conflicting: set[str] = set()
    for problem in problems:
        key = problem.key
        if key not in first and len(first) - len(conflicting) == limit:
            break
        rows[key] += 1
        if first.setdefault(key, problem).answer != problem.answer:
            conflicting.add(key)
    report.rows += rows.total()
    report.conflicting_prompts += len(conflicting)
    report.conflicting += sum(rows[key] for key in conflicting)
    report.duplicates += sum(count - 1 for key, count in rows.items() if key not in conflicting)
    return [problem for key, problem in first.items() if key not in conflicting]


def build_prompts(
    problems: list[Problem],
    tokenizer: Tokenizer,
    data: DataConfig,
    max_tokens: int,
    report: DataReport,
    eval_set: str = "",
) -> list[Prompt]:
    """Render and tokenize. Prompts of more than ``max_tokens`` tokens are left out and counted."""
    has_template = bool(tokenizer.chat_template)
    if data.chat_template == "always" and not has_template:
        raise ConfigError("data.chat_template: expected a tokenizer with a chat template for 'always', it has none")
    chat = has_template and data.chat_template != "never"
    messages = [
        (*problem.context, ("user", apply_template(data.prompt_template, problem.question))) for problem in problems
    ]
    texts = [render(turns, tokenizer, chat) for turns in messages]
    # A chat template writes its own special tokens; adding them again would double the first one.
    token_ids = tokenizer(texts, add_special_tokens=not chat)["input_ids"] if texts else []
    prompts = [
        Prompt(problem.key[:16], tuple(ids), text, problem.answer, problem.source, eval_set, turns, problem.row)
        for problem, turns, text, ids in zip(problems, messages, texts, token_ids, strict=True)
        if len(ids) <= max_tokens
    ]
    report.too_long += len(problems) - len(prompts)
    return prompts


def render(turns: Iterable[tuple[str, str]], tokenizer: Tokenizer, chat: bool, **kwargs: Any) -> str:
    """Return the text that a response follows; ``kwargs`` are those of the chat template."""
    if not chat:
        return "\n\n".join(content for _, content in turns)
    messages = [{"role": role, "content": content} for role, content in turns]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs))


def apply_template(template: str, question: str) -> str:
    """Put a question into a template, unless it carries the recipe's instruction already."""
    if template == "plain" or (template == "dapo" and question.startswith(RECIPE_OPENING)):
        return question
    return (RECIPE_TEMPLATE if template == "dapo" else template).replace("{question}", question)


class PromptCursor:
    """Iterate over the prompts without end, in a new order every epoch.

    The order of epoch e is a function of (seed, e) alone: the state is two integers, and that of a curriculum.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        seed: int,
        heldout: Iterable[Prompt] = (),
        curriculum: Curriculum | None = None,
    ) -> None:
        """Skip prompts that ``curriculum`` does not admit. ``heldout`` is only part of the check of a loaded state."""
        if not prompts:
            raise ValueError("PromptCursor: expected at least one prompt, got none")
        self.prompts = prompts
        self.heldout = tuple(heldout)
        self.seed = seed
        self.curriculum = curriculum
        self.epoch = 0
        self.position = 0
        self._order = self._shuffled()

    def take(self, n: int, step: int = 1) -> list[Prompt]:
        """Return the next ``n`` prompts, for a rollout step counted from 1; an epoch may end in between."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._shuffled()
            indices = self._order[self.position : self.position + n - len(taken)]
            passing = [self.prompts[index] for index in indices]
            if self.curriculum is not None:
                passing = [prompt for prompt in passing if self.curriculum.admits(prompt, step, self.epoch)]
            taken += passing
            self.position += len(indices)
        return taken

    @property
    def place(self) -> dict[str, int]:
        """Of the prompt that comes next: a part of the state."""
        return {"epoch": self.epoch, "position": self.position}

    def observe(self, groups: Iterable[Group]) -> None:
        """Tell the curriculum of scored groups."""
        if self.curriculum is not None:
            self.curriculum.observe(groups, self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {
            **({} if self.curriculum is None else {"curriculum": self.curriculum.state_dict()}),
            **self.place,
            "seed": self.seed,
            "data": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError when the state was saved over other prompts or another seed."""
        here = {"seed": self.seed, "data": self._fingerprint()}
        for what, now in here.items():
            if state[what] != now:
                raise ConfigError(
                    f"cannot resume: the run was saved with {what} {state[what]!r}, this one has {now!r}; resume with "
                    "the seed and the data it was started with (data.path, data.eval), or start a new run"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._shuffled()
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state.get("curriculum", {}))

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}:{self.epoch}").shuffle(order)
        return order

    def _fingerprint(self) -> str:
        def digest(prompts: Iterable[Prompt]) -> str:
            lines = (f"{prompt.id} {prompt.answer}\n" for prompt in prompts)
            return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

        training = f"{len(self.prompts)} prompts, {digest(self.prompts)}"
        if not self.heldout:
            return training
        return f"{training}, {len(self.heldout)} held out, {digest(self.heldout)}"
