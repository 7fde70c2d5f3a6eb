"""The rollouts of a run, kept for people to read: `dapo show`.

    rollouts/step_000012.jsonl.gz       a header line, then a line for each group that was trained on
    evaluations/step_000012.jsonl.gz    the same of the held-out problems

Of every step the first `logging.rollouts.groups` groups are kept, in the order of their prompts, which favours neither
short nor correct responses; with `logging.rollouts.per_token` token by token as well. All files of a folder hold at
most 1 GB; beyond it the oldest steps are removed. Steps, groups and samples are numbered from 1.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dapo_kernels.objectives.surrogate import CLIPPED_DUAL, CLIPPED_HIGH, CLIPPED_LOW
from dapo_runner.algorithms.selection import TokenValues
from dapo_runner.config import RolloutLogConfig
from dapo_runner.files import atomic_write, to_jsonl
from dapo_runner.logging.metrics import jsonable
from dapo_runner.logging.token_text import TokenText
from dapo_runner.types import Group, Prompt, Sample, Sequence

ROLLOUTS, EVALUATIONS = "rollouts", "evaluations"  # folders
MOST_BYTES = 10**9  # of all steps together, compressed
CLIPS = {0: None, CLIPPED_LOW: "low", CLIPPED_HIGH: "high", CLIPPED_DUAL: "dual"}
_NAME = re.compile(r"step_(\d{6,})\.jsonl\.gz")


class RolloutLog:
    """Write them. A file of that name is whole or absent."""

    def __init__(
        self,
        folder: Path,
        config: RolloutLogConfig,
        keep_through: int = -1,
        note: Callable[[str], None] = print,
        tokenizer: Any = None,
    ) -> None:
        """Remove what was written of steps after ``keep_through``. ``tokenizer`` spells tokens; without one they are
        not kept.
        """
        self.folder = folder
        self.config = config
        self._note = note
        self._is_full = False
        self._text = None if tokenizer is None else TokenText(tokenizer)
        for step, path in saved_steps(folder).items():
            if step > keep_through:
                path.unlink()

    def write(
        self,
        step: int,
        groups: SequenceOf[Group],
        sequences: SequenceOf[Sequence] | None = None,
        values: Mapping[int, TokenValues] | None = None,
    ) -> None:
        """Keep the responses of a step. ``sequences`` are the training records of all samples, in order, or None where
        nothing trains on them; ``values`` are those of their tokens, by index.
        """
        kept = groups[: self.config.groups]
        if not kept:
            return
        records, n = [_header(step, groups, len(kept))], 0
        for number, group in enumerate(kept, start=1):
            samples = [_sample_record(index, sample) for index, sample in enumerate(group.samples, start=1)]
            if sequences is not None:
                for index, (sample, record) in enumerate(zip(group.samples, samples, strict=True), start=n):
                    record |= self._trained(sample, sequences[index], (values or {}).get(index))
            records.append({"group": number, "prompt": _prompt_record(group.prompt), "samples": samples})
            n += len(group.samples)
        self.folder.mkdir(exist_ok=True)
        # No time stamp: the same run leaves the same bytes.
        data = gzip.compress(to_jsonl(records), compresslevel=1, mtime=0)
        atomic_write(self.folder / f"step_{step:06d}.jsonl.gz", data)
        self._make_room()

    def _trained(self, sample: Sample, sequence: Sequence, values: TokenValues | None) -> dict[str, Any]:
        """Return the advantage, or the values of the segments, and the tokens if they are kept."""
        record: dict[str, Any] = {"advantage": jsonable(float(sequence.advantages[-1]))}
        if sample.segments:
            record = {"segments": [_jsonable_items(asdict(segment)) for segment in sample.segments]}
        if self._text is not None:
            record["per_token"] = _token_record(sample, sequence, values, self._text)
        return record

    def _make_room(self) -> None:
        sizes = {path: path.stat().st_size for path in saved_steps(self.folder).values()}
        *older, _ = sizes
        for path in older:
            if sum(sizes.values()) <= MOST_BYTES:
                return
            path.unlink()
            del sizes[path]
            if not self._is_full:
                self._is_full = True
                self._note(f"{self.folder} has reached 1 GB. From now on its oldest steps are removed.")


@dataclass(frozen=True, slots=True)
class SavedStep:
    """``n_groups`` is how many the step trained on; ``groups`` the records of those that were kept."""

    step: int
    n_groups: int
    groups: list[dict[str, Any]]


def saved_steps(folder: Path) -> dict[int, Path]:
    """Return the files of a folder by step, in order; empty where there is no folder."""
    names = ((path, _NAME.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ()))
    return dict(sorted((int(match[1]), path) for path, match in names if match))


def read_header(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header: dict[str, Any] = json.loads(file.readline())
    return header


def read_step(path: Path) -> SavedStep:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header, *groups = map(json.loads, file)
    return SavedStep(header["step"], header["groups"], groups)


def _header(step: int, groups: SequenceOf[Group], n_kept: int) -> dict[str, Any]:
    """Return means over the samples of all groups."""
    samples = [sample for group in groups for sample in group.samples]
    return {
        "step": step,
        "groups": len(groups),
        "kept": n_kept,
        "reward": jsonable(fmean(sample.reward for sample in samples)),
        "accuracy": fmean(sample.correct for sample in samples),
        "length": fmean(sample.completion.length for sample in samples),
    }


def _prompt_record(prompt: Prompt) -> dict[str, Any]:
    record = {"id": prompt.id, "source": prompt.source, "text": prompt.text, "answer": prompt.answer}
    return record | {"eval_set": prompt.eval_set} if prompt.eval_set else record


def _sample_record(number: int, sample: Sample) -> dict[str, Any]:
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
        "trains": sample.trains,
        "mean_logprob": jsonable(float(completion.logprobs.double().nanmean())),
        **({"parts": _jsonable_items(sample.parts)} if sample.parts else {}),
    }


def _token_record(
    sample: Sample, sequence: Sequence, values: TokenValues | None, text: TokenText
) -> dict[str, list[Any]]:
    """Return a column for each value of the response's tokens. The learner's are absent for responses that do not
    train, and null on tokens that do not.
    """
    n = sample.completion.length
    trains = sequence.mask[-n:]
    columns: dict[str, list[Any]] = {
        "text": text.pieces(sample.completion.token_ids.tolist()),
        "engine_logprob": _rounded(sample.completion.logprobs),
        "advantage": _rounded(sequence.advantages[-n:]),
        "trains": trains.tolist(),
    }
    if values is None:
        return columns
    for name, value in {"logprob": values.logprobs, "entropy": values.entropy, "ratio": values.ratio}.items():
        columns[name] = _rounded(torch.where(trains, value[-n:], torch.nan))
    columns["clip"] = [CLIPS[hit] for hit in values.clip_hit[-n:].tolist()]
    columns["high_entropy"] = values.high_entropy[-n:].tolist()
    if values.selected is not None:
        columns["selected"] = values.selected[-n:].tolist()
    return columns


def _rounded(column: Tensor) -> list[Any]:
    """Return four digits: more would fill the file and tell an eye nothing."""
    return [jsonable(float(f"{value:.4g}")) for value in column.tolist()]


def _jsonable_items(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: jsonable(value) for key, value in values.items()}
