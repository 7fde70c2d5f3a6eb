"""The rollouts of a run, kept for people to read: `dapo show`.

    rollouts/step_000012.jsonl.gz       a header line, then a line for each group that was trained on
    evaluations/step_000012.jsonl.gz    the same of the held-out problems

Of every step the first `logging.rollouts.groups` groups are kept, in the order of their prompts, which says nothing
about their lengths or rewards; with `logging.rollouts.per_token` their responses token by token as well. All files
together hold at most `logging.rollouts.max_gb`; beyond it the oldest steps go, and that is told. Steps, groups and
samples are numbered from 1. `logging.evaluations` says the same of evaluations.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_kernels.objectives.surrogate import CLIPPED_DUAL, CLIPPED_HIGH, CLIPPED_LOW
from dapo_runner.algorithms.token_values import TokenValues
from dapo_runner.config import RolloutLogConfig
from dapo_runner.logging.metrics import jsonable
from dapo_runner.logging.token_text import TokenText
from dapo_runner.types import Group, Sample, Sequence

ROLLOUTS, EVALUATIONS = "rollouts", "evaluations"  # folders, and sections of `logging`
GB = 10**9
CLIPS = {0: None, CLIPPED_LOW: "low", CLIPPED_HIGH: "high", CLIPPED_DUAL: "dual"}
_NAME = re.compile(r"step_(\d{6,})\.jsonl\.gz")
_UNFINISHED = ".unfinished"


class RolloutLog:
    """Writes them. A file of that name is whole or absent."""

    def __init__(self, folder: Path, config: RolloutLogConfig, *, keep_through: int, tokenizer: Any = None) -> None:
        """Go on after step ``keep_through``; what was written of later steps is removed. ``tokenizer`` spells
        tokens; without one they are not kept.
        """
        self.folder = folder
        self.config = config
        for step, path in saved_steps(folder).items():
            if step > keep_through:
                path.unlink()
        self._sizes = {path: path.stat().st_size for path in saved_steps(folder).values()}
        self._told = False
        self._text = None if tokenizer is None else TokenText(tokenizer)

    def write(
        self,
        step: int,
        groups: SequenceOf[Group],
        sequences: SequenceOf[Sequence] | None = None,
        values: Mapping[int, TokenValues] | None = None,
    ) -> str | None:
        """Keep the responses of a step. ``sequences`` are the training records of the groups' samples, in order: the
        advantages come from there; None where nothing trains on them. ``values`` of their tokens go by the place in it.
        Returns what a person should know: that older steps have begun to go.
        """
        kept = groups[: self.config.groups]
        if not kept:
            return None
        self.folder.mkdir(exist_ok=True)
        records, place = [_header(step, groups, len(kept))], 0
        for number, group in enumerate(kept, start=1):
            own = None if sequences is None else sequences[place : place + len(group.samples)]
            record = _group_record(number, group, own)
            if self._text is not None and own is not None:
                for index, (sample, of_sample) in enumerate(zip(group.samples, record["samples"], strict=True)):
                    found = (values or {}).get(place + index)
                    of_sample["per_token"] = _token_record(sample, own[index], found, self._text)
            place += len(group.samples)
            records.append(record)
        lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        path = self.folder / f"step_{step:06d}.jsonl.gz"
        unfinished = path.with_name(path.name + _UNFINISHED)
        # No time stamp: the same run leaves the same bytes.
        # A lone surrogate, which UTF-8 has no bytes for, becomes JSON's escape of it.
        data = lines.encode("utf-8", "backslashreplace")
        unfinished.write_bytes(gzip.compress(data, compresslevel=1, mtime=0))
        unfinished.replace(path)
        self._sizes[path] = path.stat().st_size
        return self._make_room()

    def _make_room(self) -> str | None:
        removed = False
        while sum(self._sizes.values()) > self.config.max_gb * GB and len(self._sizes) > 1:
            oldest = min(self._sizes, key=_step_of)
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]
            removed = True
        if not removed or self._told:
            return None
        self._told = True
        return (
            f"{self.folder} has reached {self.config.max_gb:g} GB: from now on the {self.folder.name} of the oldest "
            f"steps are removed (logging.{self.folder.name}.max_gb, logging.{self.folder.name}.groups)"
        )


@dataclass(frozen=True, slots=True)
class SavedStep:
    """``n_groups`` is how many the step trained on; ``groups`` the records of those that were kept."""

    step: int
    n_groups: int
    groups: list[dict[str, Any]]


def saved_steps(folder: Path) -> dict[int, Path]:
    """The files of a rollout folder by step, in order."""
    names = ((path, _NAME.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ()))
    return dict(sorted((int(name[1]), path) for path, name in names if name))


def read_header(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header: dict[str, Any] = json.loads(file.readline())
    return header


def read_step(path: Path) -> SavedStep:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header, *groups = map(json.loads, file)
    return SavedStep(header["step"], header["groups"], groups)


def _step_of(path: Path) -> int:
    name = _NAME.fullmatch(path.name)
    assert name is not None
    return int(name[1])


def _header(step: int, groups: SequenceOf[Group], n_kept: int) -> dict[str, Any]:
    """Means over the samples of all groups, kept or not."""
    samples = [sample for group in groups for sample in group.samples]
    return {
        "step": step,
        "groups": len(groups),
        "kept": n_kept,
        "reward": jsonable(sum(sample.reward for sample in samples) / len(samples)),
        "accuracy": sum(sample.correct for sample in samples) / len(samples),
        "length": sum(sample.completion.length for sample in samples) / len(samples),
    }


def _group_record(number: int, group: Group, sequences: SequenceOf[Sequence] | None) -> dict[str, Any]:
    prompt = group.prompt
    trained: SequenceOf[Sequence | None] = [None] * len(group.samples) if sequences is None else sequences
    pairs = zip(group.samples, trained, strict=True)
    return {
        "group": number,
        "prompt": {
            "id": prompt.id,
            "source": prompt.source,
            "text": prompt.text,
            "answer": prompt.answer,
            **({"eval_set": prompt.eval_set} if prompt.eval_set else {}),
        },
        "samples": [_sample_record(place, sample, record) for place, (sample, record) in enumerate(pairs, start=1)],
    }


def _sample_record(number: int, sample: Sample, sequence: Sequence | None) -> dict[str, Any]:
    completion, verdict = sample.completion, sample.verdict
    return {
        "sample": number,
        "response": completion.text,
        "tokens": completion.length,
        "finish_reason": completion.finish_reason,
        "correct": sample.correct,
        "extracted": verdict.extracted,
        "rule": verdict.rule,
        "base_reward": jsonable(sample.base_reward),
        "length_penalty": jsonable(sample.length_penalty),
        "reward": jsonable(sample.reward),
        **({} if sequence is None else _advantage(sample, sequence)),
        "trains": sample.trains,
        "mean_logprob": jsonable(float(completion.logprobs.double().nanmean())),
        **({"parts": {name: jsonable(value) for name, value in sample.parts.items()}} if sample.parts else {}),
    }


def _advantage(sample: Sample, sequence: Sequence) -> dict[str, Any]:
    """One for the whole response, or of each of its segments with the values at its ends."""
    if not sample.segments:
        return {"advantage": jsonable(float(sequence.advantages[-1]))}
    return {"segments": [{key: jsonable(value) for key, value in asdict(part).items()} for part in sample.segments]}


def _token_record(
    sample: Sample, sequence: Sequence, values: TokenValues | None, text: TokenText
) -> dict[str, list[Any]]:
    """A column for each value of the response's tokens. What the learner knows is missing where it was not asked, as
    of responses that do not train, and null on a token that does not.
    """
    completion = sample.completion
    n = completion.length
    trains = sequence.mask[-n:]
    columns: dict[str, list[Any]] = {
        "text": text.pieces(completion.token_ids.tolist()),
        "engine_logprob": _rounded(completion.logprobs),
        "advantage": _rounded(sequence.advantages[-n:]),
        "trains": trains.tolist(),
    }
    if values is None:
        return columns
    nan = torch.full((n,), torch.nan)
    of_learner = {"logprob": values.logprobs, "entropy": values.entropy, "ratio": values.ratio}
    columns |= {name: _rounded(torch.where(trains, value[-n:], nan)) for name, value in of_learner.items()}
    columns["clip"] = [CLIPS[hit] for hit in values.clip_hit[-n:].tolist()]
    columns["high_entropy"] = values.high_entropy[-n:].tolist()
    if values.selected is not None:
        columns["selected"] = values.selected[-n:].tolist()
    return columns


def _rounded(column: Tensor) -> list[Any]:
    """Four digits: more would fill the file and tell an eye nothing."""
    return [jsonable(float(f"{value:.4g}")) for value in column.tolist()]
