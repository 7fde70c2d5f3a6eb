"""Problems, cleaned and counted, as tokenized prompts, and the cursor that walks over them. Whatever is left out on the
way is counted in the ``DataReport``.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
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
    """What is asked of a transformers tokenizer."""

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
    """Training and held-out prompts as the configuration asks for them. Raises ConfigError."""
    data, report = config.data, DataReport()
    if data.format == "arithmetic":
        split = split_problems(data.arithmetic)
        train, heldout = (
            [Problem(p.question, p.answer, "arithmetic", row={"difficulty": p.digits}) for p in part] for part in split
        )
        sets = {"": heldout}
        report.rows = len(train) + len(heldout)
    else:
        assert data.path is not None  # the configuration saw to it
        rows = read_problems(
            data.path, data.format, columns=data.columns, subset=data.subset, split=data.split, system=data.system
        )
        train = clean(rows, data, report, data.limit)
        named = _evaluation_sets(data)
        sets = {name: _read_set(chosen, data, report) for name, chosen in named.items()}
        if not named:
            sets[""] = _cut_heldout(train, data.eval_size)
            cut = set(map(id, sets[""]))
            train = [problem for problem in train if id(problem) not in cut]
    limit = config.rollout.max_prompt_tokens
    prompts = build_prompts(train, tokenizer, data, limit, report)
    evaluated = [
        prompt
        for name, problems in sets.items()
        for prompt in build_prompts(problems, tokenizer, data, limit, report, name)
    ]
    # What the policy sees counts: rows that differ may render to the same prompt.
    asked = {" ".join(prompt.text.split()) for prompt in evaluated}
    kept = [prompt for prompt in prompts if " ".join(prompt.text.split()) not in asked]
    report.in_heldout = len(prompts) - len(kept)
    dataset = Dataset(kept, evaluated, report)
    report.train, report.heldout = len(dataset.train), len(dataset.heldout)
    if not dataset.train:
        raise ConfigError(f"data: no training prompt is left: {report.describe()}")
    if "choice" in config.reward.uses and not any(_LETTER.match(prompt.answer) for prompt in dataset.train):
        raise ConfigError(
            "reward: expected answers that are letters (A, B, …) for the reward choice, got "
            f"{shorten(dataset.train[0].answer)}: data.columns.choices names the column of what there is to choose from"
        )
    return dataset


def _evaluation_sets(data: DataConfig) -> dict[str, EvalSetConfig]:
    """Those that the recipe names; one alone goes by no name."""
    if data.eval_path is None:
        return dict(data.eval)
    return {"": EvalSetConfig(path=data.eval_path, split=data.split, subset=data.subset, format=data.eval_format)}


def _read_set(chosen: EvalSetConfig, data: DataConfig, report: DataReport) -> list[Problem]:
    rows = read_problems(
        chosen.path,
        chosen.format,
        columns=chosen.columns or data.columns,
        subset=chosen.subset,
        split=chosen.split,
        system=data.system,
    )
    problems = clean(rows, data, report)
    size = data.eval_size if data.eval_path is not None else chosen.size
    kept = problems[:size]
    report.beyond_limit += len(problems) - len(kept)
    return kept


def _cut_heldout(problems: list[Problem], size: int) -> list[Problem]:
    """The same choice for every seed, so that runs over one file are compared on the same problems."""
    if size >= len(problems) > 0:
        raise ConfigError(
            f"data.eval_size: expected fewer than the {len(problems)} problems of the training file, "
            f"got {size}; lower it, or name an eval_path"
        )
    return random.Random("held-out").sample(problems, size if problems else 0)


def clean(problems: Iterable[Problem], data: DataConfig, report: DataReport, limit: int | None = None) -> list[Problem]:
    """Drop repeated rows and settle conflicting ones, counting both.

    A prompt that occurs with several answers is dropped altogether (`on_conflict: drop`: nobody knows which
    is right), keeps its first answer (`first`), or stops the run (`error`). No more is read once there are ``limit``
    problems and a row holds another one: a conflict that only shows behind it stays unseen.
    """
    if not data.dedupe:
        kept = list(islice(problems, limit))
        report.rows += len(kept)
        return kept
    first: dict[str, Problem] = {}
    rows: dict[str, int] = {}
    conflicts: set[str] = set()
    for problem in problems:
        key = problem.key
        if limit is not None and key not in first:
            dropped_so_far = len(conflicts) if data.on_conflict == "drop" else 0
            if len(first) - dropped_so_far == limit:
                break
        known = first.setdefault(key, problem)
        rows[key] = rows.get(key, 0) + 1
        if known.answer != problem.answer:
            conflicts.add(key)
            if data.on_conflict == "error":
                raise ConfigError(
                    f"data: one prompt has the answers {known.answer!r} and {problem.answer!r}: "
                    f"{shorten(problem.question)} (data.on_conflict: drop or first settles it)"
                )
    dropped = conflicts if data.on_conflict == "drop" else set()
    report.rows += sum(rows.values())
    report.conflicting_prompts += len(conflicts)
    report.conflicting += sum(rows[key] - (key not in dropped) for key in conflicts)
    report.duplicates += sum(count - 1 for key, count in rows.items() if key not in conflicts)
    return [problem for key, problem in first.items() if key not in dropped]


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
    """The text that an answer follows; ``kwargs`` are the chat template's own."""
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
    """Walks over the prompts for ever, in a new order every epoch, and can be put down and taken up again.

    The order of epoch e is a function of (seed, e) alone, so the state is two integers, and what a curriculum
    remembers.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        seed: int,
        heldout: Iterable[Prompt] = (),
        curriculum: Curriculum | None = None,
    ) -> None:
        """``heldout`` is not walked over; a state saved beside other held-out prompts is refused all the same. Prompts
        that ``curriculum`` does not admit are passed over.
        """
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
        """The next ``n`` prompts, for a rollout step counted from 1; an epoch ends, and the next begins, wherever that
        falls.
        """
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
        """What became of prompts that were taken."""
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
                    "the seed and the data it was started with (data.path, data.eval_path), or start a new run"
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
