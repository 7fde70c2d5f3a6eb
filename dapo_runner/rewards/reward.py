"""What every reward implements: prompts and completions in, verdicts out."""

from __future__ import annotations

import reprlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from dapo_runner.errors import RunError
from dapo_runner.types import Completion, Prompt, Verdict

_SHORT = reprlib.Repr()
_SHORT.maxstring = 400  # characters of a prompt or a response that an error shows, from both ends


class RewardError(RunError):
    """A reward that failed on ``completion``, an answer to ``prompt``."""

    def __init__(self, message: str, prompt: Prompt, completion: Completion) -> None:
        super().__init__(message)
        self.prompt = prompt
        self.completion = completion

    def __reduce__(self) -> tuple[type[RewardError], tuple[str, Prompt, Completion]]:
        return RewardError, (str(self), self.prompt, self.completion)


Verdicts = list[list[Verdict | None] | RewardError]
"""For each prompt, a verdict on each response (None where the reward does not apply), or why there are none."""


class Reward(ABC):
    """Judges completions."""

    @abstractmethod
    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        """Judge the completions of each prompt. Raises RewardError where more calls fail than are allowed."""

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last call."""
        return {}


class TextReward(Reward):
    """Judges each response by its text and the ground truth."""

    @abstractmethod
    def judge_texts(self, texts: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each text."""

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Verdicts:
        texts = [completion.text for samples in completions for completion in samples]
        answers = [prompt.answer for prompt, samples in zip(prompts, completions, strict=True) for _ in samples]
        verdicts = iter(self.judge_texts(texts, answers))
        return [[next(verdicts) for _ in samples] for samples in completions]


def reward_error(name: str, error: BaseException, prompt: Prompt, completion: Completion) -> RewardError:
    """Return a RewardError with the cause, the line of the user's code, the prompt and the response."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    line = f" ({Path(users[-1].filename).name}:{users[-1].lineno})" if users else ""
    where = f"prompt {prompt.id}: {_SHORT.repr(prompt.text)}, response: {_SHORT.repr(completion.text)}"
    found = RewardError(f"reward {name}: {type(error).__name__}: {error}{line}; {where}", prompt, completion)
    found.__cause__ = error
    return found
