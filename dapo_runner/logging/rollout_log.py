"""Save the rollouts of a run for `dapo show`, the page and trackers.

    rollouts/step_000012.jsonl.gz       a header line, then one line per group of the training step
    evaluations/step_000012.jsonl.gz    the same for held-out problems

The first `logging.rollouts.groups` groups of a step are saved, in the order of their prompts. This favours neither
short nor correct responses. Steps, groups and samples are numbered from 1.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from dapo_kernels.objectives.surrogate import CLIPPED_DUAL, CLIPPED_HIGH, CLIPPED_LOW
from dapo_runner.algorithms.selection import TokenValues
from dapo_runner.config import ConfigError, RolloutLogConfig
from dapo_runner.files import atomic_write, to_jsonl
from dapo_runner.logging.metrics import jsonable
from dapo_runner.types import Group, Sample, TrainingSequence

ROLLOUTS, EVALUATIONS = "rollouts", "evaluations"  # folders
CLIPS = {0: None, CLIPPED_LOW: "low", CLIPPED_HIGH: "high", CLIPPED_DUAL: "dual"}
_NAME = re.compile(r"step_(\d{6,})\.jsonl\.gz")


class RolloutLog:
    """Write the files of a folder. Each is complete or absent."""

    def __init__(self, folder: Path, config: RolloutLogConfig, keep_through: int = -1, tokenizer: Any = None) -> None:
        """Remove the files of steps after ``keep_through``. Without a tokenizer no per-token values are saved."""
        self.folder, self.config, self.tokenizer = folder, config, tokenizer
        for step, path in saved_steps(folder).items():
            if step > keep_through:
                path.unlink()

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        sequences: Sequence[TrainingSequence] | None = None,
        values: Mapping[int, TokenValues] | None = None,
    ) -> None:
        """Save the responses of a step. ``sequences`` are the training records of all samples in order, or None for an
        evaluation. ``values`` are those of their tokens, by index of the sequence.
        """
        if not (kept := groups[: self.config.groups]):
            return
        data = io.BytesIO()
        # No time stamp: the same run must write the same bytes.
        file = gzip.GzipFile(fileobj=data, mode="wb", compresslevel=1, mtime=0)
        file.write(to_jsonl([{"step": step, "groups": len(groups)}]))
        index = 0
        for number, group in enumerate(kept, start=1):
            prompt = {name: getattr(group.prompt, name) for name in ("id", "source", "eval_set", "text", "answer")}
            samples = []
            for number_in_group, sample in enumerate(group.samples, start=1):
                samples.append({"sample": number_in_group, **sample_record(sample)})
                if sequences is not None:
                    samples[-1] |= self._training_record(sample, sequences[index], (values or {}).get(index))
                index += 1
            file.write(to_jsonl([{"group": number, "prompt": prompt, "samples": samples}]))
        file.close()
        self.folder.mkdir(exist_ok=True)
        atomic_write(self.folder / f"step_{step:06d}.jsonl.gz", data.getvalue())

    def _training_record(
        self, sample: Sample, sequence: TrainingSequence, values: TokenValues | None
    ) -> dict[str, Any]:
        """Return the advantage, or the segments, and the values per token if they are saved."""
        record = jsonable({"advantage": float(sequence.advantages[-1])})
        if sample.segments:
            record = {"segments": [jsonable(asdict(segment)) for segment in sample.segments]}
        if self.tokenizer is not None:
            text = token_texts(self.tokenizer, sample.completion.token_ids.tolist())
            record["per_token"] = {"text": text, **_token_record(sample, sequence, values)}
        return record


class SavedStep(NamedTuple):
    """A saved step: ``n_groups`` it trained on, and the records of the saved ``groups``."""

    step: int
    n_groups: int
    groups: list[dict[str, Any]]


def saved_steps(folder: Path) -> dict[int, Path]:
    """Return the files of a folder by step, in order; empty if the folder does not exist."""
    names = ((path, _NAME.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ()))
    return dict(sorted((int(match[1]), path) for path, match in names if match))


def read_step(path: Path) -> SavedStep:
    try:
        header, *groups = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
        return SavedStep(header["step"], header["groups"], groups)
    except Exception as error:  # of many types
        raise ConfigError(f"{path}: expected the rollouts of a step, got an error: {error}") from error


def sample_record(sample: Sample) -> dict[str, Any]:
    """Return the record of a sample, as written to JSON."""
    completion, verdict = sample.completion, sample.verdict
    record = {
        "response": completion.text,
        "tokens": completion.n_sampled,
        "finish_reason": completion.finish_reason,
        "correct": sample.correct,
        "extracted": verdict.extracted,
        "rule": verdict.rule,
        "base_reward": sample.base_reward,
        "length_penalty": sample.length_penalty,
        "reward": sample.reward,
        "trains": sample.trains,
        "mean_logprob": float(completion.logprobs.double().nanmean()),
    }
    if completion.turns:
        record["turns"] = [turn._asdict() for turn in completion.turns]
    return jsonable(record) | ({"parts": jsonable(sample.parts)} if sample.parts else {})


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special ones included. A character of several tokens is the text of the last."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:  # a tokenizer in Python
        return [tokenizer.decode([token_id]) for token_id in token_ids]
    stream, texts = DecodeStream(skip_special_tokens=False), list[str]()
    for token_id in token_ids:
        try:
            texts.append(stream.step(backend, token_id) or "")
        except Exception:  # behind bytes of no character
            stream = DecodeStream(skip_special_tokens=False)
            texts.append(stream.step(backend, token_id) or "")
    return texts


def _token_record(sample: Sample, sequence: TrainingSequence, values: TokenValues | None) -> dict[str, list[Any]]:
    """Return one column per value of the response's tokens. The trainer's columns are absent if the response does not
    train, and null at tokens that do not train.
    """
    n = sample.completion.length
    trains = sequence.mask[-n:]
    columns: dict[str, list[Any]] = {
        "engine_logprob": _rounded(sample.completion.logprobs),
        "advantage": _rounded(sequence.advantages[-n:]),
        "trains": trains.tolist(),
    }
    if values is None:
        return columns
    for name in ("logprobs", "entropy", "ratio"):
        columns[name.rstrip("s")] = _rounded(torch.where(trains, getattr(values, name)[-n:], torch.nan))
    columns["clip"] = [CLIPS[hit] for hit in values.clip_hit[-n:].tolist()]
    columns["high_entropy"] = values.high_entropy[-n:].tolist()
    if values.selected is not None:
        columns["selected"] = values.selected[-n:].tolist()
    return columns


def _rounded(column: Tensor) -> list[float | None]:
    """Return values with four significant digits, None for those that are not finite. More digits only take space."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in column.tolist()]
