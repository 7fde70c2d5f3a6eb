"""A run whose model and data set are out to break the page that shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from builders import make_prompt, make_sample
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.selection import TokenValues
from dapo_runner.config import AdvantageConfig, RolloutLogConfig
from dapo_runner.logging.metrics import METRICS_FILE, MetricsLog
from dapo_runner.logging.rollout_log import ROLLOUTS, RolloutLog
from dapo_runner.types import Group, Sample, Turn

SCRIPT = "</script><script>document.title='taken'</script>"
IMAGE = "<img src=x onerror=\"document.title='taken'\">"
PIECES = [SCRIPT, IMAGE, "\x1b[2J\x00\u202e", "<b>bold</b>\n"]
STEPS = (3, 5)
TURNS = (Turn("environment", 0, 1, SCRIPT), Turn("assistant", 1, 4, "".join(PIECES[1:]), "done", 0.5))


def make_tokenizer() -> Any:
    tokenizer = Tokenizer(models.WordLevel({piece: 10 + place for place, piece in enumerate(PIECES)}, unk_token=SCRIPT))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def saying(sample: Sample, turns: tuple[Turn, ...] = ()) -> Sample:
    mask = torch.tensor([turn.role == "assistant" for turn in turns for _ in range(turn.start, turn.end)])
    completion = replace(sample.completion, text="".join(PIECES), turns=turns, loss_mask=mask if turns else None)
    verdict = replace(sample.verdict, extracted=IMAGE)
    return replace(sample, completion=completion, verdict=verdict, parts={"<i>brief": 0.5})


def make_groups(turns: tuple[Turn, ...] = ()) -> list[Group]:
    """One of a correct, an incorrect and a truncated answer, one all incorrect."""
    mixed = (make_sample(True), make_sample(False), make_sample(False, truncated=True, trains=False))
    prompts = (make_prompt(SCRIPT, answer=IMAGE), make_prompt("\u202e\ud800 & <i>", answer="\udfff"))
    return [
        Group(prompts[0], tuple(saying(sample, turns) for sample in mixed)),
        Group(prompts[1], tuple(saying(make_sample(False), turns) for _ in range(2))),
    ]


def make_values(n_prompt: int) -> TokenValues:
    """The first response token is clipped, the last one of high entropy."""

    def column(*values: float) -> torch.Tensor:
        return torch.tensor([0.0] * (n_prompt - 1) + list(values))

    return TokenValues(
        logprobs=column(-0.1, -0.5, -2, -4),
        entropy=column(0.1, 0.2, 0.3, 1.5),
        ratio=column(1.4, 1, 0.9, 0.5),
        clip_hit=column(2, 0, 0, 0).to(torch.int8),
        high_entropy=column(0, 0, 0, 1).bool(),
        selected=None,
    )


def log_metrics(run: Path, step: int, **figures: float) -> None:
    log = MetricsLog(run / METRICS_FILE, keep_through=step - 1)
    log.write(
        step,
        "step",
        {"batch/reward": step / 10, "sampling/reward": 0.5, "train/entropy": 0.5, "sampling/mixed": 0.5, **figures},
    )


def write_rollouts(run: Path, step: int, per_token: bool = True, first: int = 0, turns: tuple[Turn, ...] = ()) -> None:
    groups = make_groups(turns)[first:]
    values = {place: make_values(3) for place in (0, 1, 3, 4)} if not first else {}
    tokenizer = make_tokenizer() if per_token else None
    log = RolloutLog(run / ROLLOUTS, RolloutLogConfig(), keep_through=step - 1, tokenizer=tokenizer)
    log.write(step, groups, make_sequences(groups, AdvantageConfig(kind="group_mean")), values)


def write_run(folder: Path, name: str, per_token: bool = True, turns: tuple[Turn, ...] = ()) -> Path:
    run = folder / name
    for step in range(1, 7):
        log_metrics(run, step)
    for step in STEPS:
        write_rollouts(run, step, per_token, turns=turns)
    return run
