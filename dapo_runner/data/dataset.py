"""Clean problems, tokenize them as prompts, and iterate over them. ``DataReport`` counts the rows left out."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from dapo_runner.config import Config, ConfigError, DataConfig, EvalSetConfig, SftDataConfig
from dapo_runner.data.arithmetic import ArithmeticProblem, split_problems
from dapo_runner.data.curriculum import Curriculum
from dapo_runner.data.reading import Problem, read_problems
from dapo_runner.data.reasoning_gym import generate_problems
from dapo_runner.environments.template import TEMPLATE_ERRORS
from dapo_runner.environments.tools import template_arguments
from dapo_runner.types import Group, Prompt

T = TypeVar("T")
RECIPE_OPENING = "Solve the following math problem step by step."
RECIPE_TEMPLATE = (
    RECIPE_OPENING + " The last line of your response should be of the form Answer: $Answer (without quotes) where "
    "$Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
BLOCK = 1000  # texts that are tokenized at a time
DUPLICATES, CONFLICTING, IN_HELDOUT = "repeated", "with conflicting answers", "with a held-out prompt"
FAILED, EMPTY, LONG = "that reasoning-gym failed to generate", "without tokens", "longer than rollout.max_prompt_tokens"


class DataReport(Counter[str]):
    """Counts of rows: ``rows`` is the sum of all other counts, ``train`` and ``heldout`` included."""

    caution = ""

    def find_unknown(self, rendered: Sequence[tuple[str, Sequence[int]]], tokenizer: Any) -> None:
        """Note a tokenizer that does not know most of these texts."""
        unknown = getattr(tokenizer, "unk_token_id", None)
        if 2 * sum(ids.count(unknown) for _, ids in rendered) > sum(len(ids) for _, ids in rendered):
            self.caution = f". Caution: the tokenizer turns most of {rendered[0][0]!r:.200} into {tokenizer.unk_token}"

    def describe(self, noun: str = "prompts") -> str:
        kept = f"{self['rows']} rows → {self['train']} training and {self['heldout']} held-out {noun}"
        dropped = [f"{n} {what}" for what, n in self.items() if n and what not in ("rows", "train", "heldout")]
        return (f"{kept}; dropped {', '.join(dropped)}" if dropped else kept) + self.caution


class Dataset(NamedTuple):
    train: list[Prompt]
    heldout: list[Prompt]
    report: DataReport


def load_data(config: Config, tokenizer: Any, *, trains: bool = True) -> Dataset:
    """Return training and held-out prompts, without tokens if ``tokenizer`` is None. Raises ConfigError."""
    data, report = config.data, DataReport()
    is_game = config.env is not None and config.env.kind is not None
    generate = _generate_gym if data.reasoning_gym else _generate_arithmetic if data.format == "arithmetic" else None
    train, sets = generate(data, report) if generate else _read(data, report, is_game, trains)
    arguments = template_arguments(config.env)

    def build(problems: list[Problem], eval_set: str = "") -> list[Prompt]:
        turns = [(*each.context, ("user", apply_template(data.prompt_template, each.question))) for each in problems]
        rendered = tokenize(turns, tokenizer, data, **arguments)
        report.find_unknown(rendered, tokenizer)
        n_empty = 0 if tokenizer is None or is_game else sum(not ids for _, ids in rendered)  # reset adds to a game
        prompts = [
            Prompt(each.key[:16], ids, text, each.answer, each.source, eval_set, messages, each.row)
            for each, messages, (text, ids) in zip(problems, turns, rendered, strict=True)
            if len(ids) <= config.rollout.max_prompt_tokens and (ids or not n_empty)
        ]
        place = f" in data.eval.{eval_set}" if eval_set else ""
        report.update({f"{LONG}{place}": len(problems) - len(prompts) - n_empty, f"{EMPTY}{place}": n_empty})
        return prompts

    prompts = build(train)
    heldout = [prompt for name, problems in sets.items() for prompt in build(problems, name)]

    def identity(prompt: Prompt) -> str:  # different rows can render to the same prompt, or be different games
        return prompt.id if is_game else " ".join(prompt.text.split())

    seen = set(map(identity, heldout))
    kept = [prompt for prompt in prompts if identity(prompt) not in seen]
    report.update({IN_HELDOUT: len(prompts) - len(kept), "train": len(kept), "heldout": len(heldout)})
    if empty := data.eval.keys() - {prompt.eval_set for prompt in heldout}:
        raise ConfigError(f"data.eval.{min(empty)}: expected prompts, got none: {report.describe()}")
    if not kept and (trains or not data.eval):
        raise ConfigError(f"data.path: expected training prompts (not in data.eval), got none: {report.describe()}")
    return Dataset(kept, heldout, report)


Problems = tuple[list[Problem], dict[str, list[Problem]]]  # training problems, and evaluation sets by name


def _generate_arithmetic(data: DataConfig, report: DataReport) -> Problems:
    def convert(p: ArithmeticProblem) -> Problem:
        return Problem(p.question, p.answer, "arithmetic", row={"difficulty": p.digits, "question": p.question})

    train, heldout = split_problems(data.arithmetic, data.eval_size)
    report["rows"] = len(train) + len(heldout)
    return list(map(convert, train)), {"": list(map(convert, heldout))}


def _generate_gym(data: DataConfig, report: DataReport) -> Problems:
    def keep(found: list[Problem | None]) -> list[Problem]:
        made = [problem for problem in found if problem is not None]
        distinct = list({problem.key: problem for problem in reversed(made)}.values())[::-1]
        report.update({"rows": len(found), FAILED: len(found) - len(made), DUPLICATES: len(made) - len(distinct)})
        return distinct

    train, heldout = map(keep, generate_problems(data))
    return train, {"": heldout}


def _read(data: DataConfig, report: DataReport, is_game: bool, trains: bool) -> Problems:
    def read(source: DataConfig | EvalSetConfig) -> list[Problem]:
        assert source.path is not None, "the configuration has checked it"
        columns = source.columns or data.columns
        rows = read_problems(source.path, source.format, columns, source.subset, source.split, data.system)
        return clean((replace(row, is_game=True) for row in rows) if is_game else rows, report, source.limit)

    train = read(data) if trains or not data.eval else []  # an evaluation needs only what it cuts from
    if data.eval:
        return train, {name: read(chosen) for name, chosen in data.eval.items()}
    heldout = cut_heldout(train, data.eval_size, "data.eval")
    cut = set(map(id, heldout))
    return [problem for problem in train if id(problem) not in cut], {"": heldout}


def cut_heldout(rows: Sequence[T], size: int, key: str) -> list[T]:
    """Sample held-out rows, the same in all runs over a file. ``key``: the setting for held-out rows from elsewhere."""
    if size >= len(rows) > 0:
        raise ConfigError(
            f"data.eval_size: expected fewer than the {len(rows)} training rows (repeated ones left out), got {size}. "
            f"Lower it, or set {key}."
        )
    return random.Random("held-out").sample(rows, size if rows else 0)


def clean(problems: Iterable[Problem], report: DataReport, limit: int | None = None) -> list[Problem]:
    """Drop repeated rows, and all rows of a prompt with conflicting answers. Count both.

    Reading ends at the row that would start problem number ``limit`` + 1.
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
    kept = [problem for key, problem in first.items() if key not in conflicting]
    total, lost = rows.total(), sum(rows[key] for key in conflicting)
    report.update({"rows": total, CONFLICTING: lost, DUPLICATES: total - lost - len(kept)})
    return kept


def tokenize(
    conversations: Iterable[Iterable[tuple[str, str]]], tokenizer: Any, data: DataConfig | SftDataConfig, **kwargs: Any
) -> list[tuple[str, tuple[int, ...]]]:
    """Return text and token ids of each conversation, up to where the response begins; no ids without a tokenizer.
    ``kwargs`` are passed to the chat template, before `data.chat_template_kwargs`. Raises ConfigError.
    """
    if tokenizer is None:
        return [(render(turns, None, chat=False), ()) for turns in conversations]
    if data.chat_template == "always" and not tokenizer.chat_template:
        raise ConfigError("data.chat_template: 'always' requires a tokenizer with a chat template. Set it to auto.")
    chat, texts = uses_chat_template(tokenizer, data), []
    for turns in conversations:
        try:
            texts.append(render(turns, tokenizer, chat, **(kwargs | data.chat_template_kwargs)))
        except TEMPLATE_ERRORS as error:
            got = f"{error}, for {turns!r:.160}"
            raise ConfigError(f"data.chat_template: expected a chat template for these messages, got: {got}") from error
    # A chat template contains its special tokens; adding them again would double the first one.
    blocks = (texts[start : start + BLOCK] for start in range(0, len(texts), BLOCK))  # encodings are large
    encoded = (ids for block in blocks for ids in tokenizer(block, add_special_tokens=not chat)["input_ids"])
    appends = not chat and ends_with_eos(tokenizer)  # a prompt goes on
    encoded = (ids[:-1] if appends else ids for ids in encoded)
    known: dict[int, int] = {}  # each id is one object: a token takes 8 bytes instead of 36
    return [(text, tuple(map(known.setdefault, ids, ids))) for text, ids in zip(texts, encoded, strict=True)]


def render(turns: Iterable[tuple[str, str]], tokenizer: Any, chat: bool, until: str = "", **kwargs: Any) -> str:
    """Return the text of a conversation up to the response or, with ``until``, a text that occurs nowhere else, up to
    the end of the last message. ``kwargs`` are passed to the chat template.
    """
    if not chat:
        return "\n\n".join(content for _, content in turns)
    messages = [{"role": role, "content": content} for role, content in turns]
    messages[-1]["content"] += until
    text = str(tokenizer.apply_chat_template(messages, **{"tokenize": False, "add_generation_prompt": True, **kwargs}))
    return text.partition(until)[0] if until else text


def uses_chat_template(tokenizer: Any, data: DataConfig | SftDataConfig) -> bool:
    return bool(tokenizer.chat_template) and data.chat_template != "never"


def ends_with_eos(tokenizer: Any) -> bool:
    """Return whether a tokenizer appends its EOS token to every text."""
    return bool(tokenizer("a")["input_ids"][1:][-1:] == [tokenizer.eos_token_id])


def apply_template(template: str, question: str) -> str:
    """Insert a question into a template. A question that already has DAPO's instruction is returned unchanged."""
    if template == "plain" or (template == "dapo" and question.strip().startswith(RECIPE_OPENING)):
        return question
    return (RECIPE_TEMPLATE if template == "dapo" else template).replace("{question}", question.strip())


def fingerprint(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> str:
    def digest(prompts: Iterable[Prompt]) -> str:
        lines = (f"{prompt.id} {prompt.answer}\n" for prompt in prompts)
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    end = f", {len(heldout)} held out, {digest(heldout)}" if heldout else ""
    return f"{len(train)} prompts, {digest(train)}{end}"


class PromptCursor:
    """Iterate over the prompts endlessly, in a new order every epoch.

    The order of epoch e depends only on (seed, e). So the state is two integers, and the state of the curriculum.
    """

    def __init__(
        self, prompts: list[Prompt], seed: int, heldout: Sequence[Prompt] = (), curriculum: Curriculum | None = None
    ) -> None:
        """Skip prompts that ``curriculum`` does not admit. ``heldout`` is only compared when a state is loaded."""
        self.prompts, self.seed = prompts, seed
        self.curriculum = curriculum or Curriculum()
        self.epoch = self.position = 0
        self._taken_in = dict[str, int]()  # epochs by prompt id. Not saved: what is in flight is taken again
        self._order, self._data = self._shuffled(), fingerprint(prompts, heldout)

    def take(self, n: int, step: int = 1) -> list[Prompt]:
        """Return the next ``n`` prompts for a rollout step, counted from 1. They may span epochs."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._shuffled()
            passing = [self.prompts[index] for index in self._order[self.position : self.position + n - len(taken)]]
            taken += [prompt for prompt in passing if self.curriculum.admits(prompt, step, self.epoch)]
            self._taken_in |= {prompt.id: self.epoch for prompt in passing}
            self.position += len(passing)
        return taken

    @property
    def epoch_and_position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def observe(self, groups: Iterable[Group]) -> None:
        """Pass scored groups of prompts that were taken to the curriculum."""
        for group in groups:
            self.curriculum.observe(group, self._taken_in[group.prompt.id])

    def state_dict(self) -> dict[str, Any]:
        curriculum = self.curriculum.state_dict()
        state = {**self.epoch_and_position, "seed": self.seed, "data": self._data}
        return state | ({"curriculum": curriculum} if curriculum else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Raises ConfigError if it was saved with other prompts or another seed."""
        for what, now in {"seed": self.seed, "data": self._data}.items():
            if state[what] != now:
                same = "Resume with the same run.seed and data, or start a new run."
                raise ConfigError(f"{what}: expected {state[what]!r}, as in the checkpoint, got {now!r}. {same}")
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._shuffled()
        self.curriculum.load_state_dict(state.get("curriculum", {}))

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}:{self.epoch}").shuffle(order)
        return order
