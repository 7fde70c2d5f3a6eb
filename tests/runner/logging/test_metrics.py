"""Metrics: the file after a kill, the figures of a step, their glossary, and what the console and the picture show."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from builders import make_group, make_prompt, make_sample, make_sequence
from experts import small_experts
from matplotlib.figure import Figure
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import dapo_runner
from dapo_kernels import metrics as loss_metrics
from dapo_runner.config import TinyModelConfig
from dapo_runner.errors import ConfigError
from dapo_runner.files import append_jsonl, read_jsonl
from dapo_runner.logging import speed
from dapo_runner.logging.curves import collect, time_events
from dapo_runner.logging.metric_table import PANELS, SUPERVISED_PANELS, console_metrics, title_and_unit
from dapo_runner.logging.metrics import (
    METRICS_FILE,
    TIMINGS_FILE,
    MetricsLog,
    batch_metrics,
    prefixed,
    sampling_metrics,
)
from dapo_runner.logging.progress import Progress, RunConsole, make_progress
from dapo_runner.logging.reflection import reflection_metrics
from dapo_runner.logging.report import MOST_BARS, REPORT_FILE, draw, write_report
from dapo_runner.logging.speed import training_flops
from dapo_runner.rollout.group_buffer import SamplingStats, counts_of
from dapo_runner.threads import in_thread
from dapo_runner.tiny_model import make_model, make_tokenizer
from dapo_runner.types import Group
from docs.glossary import AREAS, is_documented, panel_of, rows
from docs.troubleshooting_pictures import DRAWN

# The file


@pytest.mark.parametrize("kept", [3, -1, 99])
def test_a_killed_and_resumed_file_equals_an_uninterrupted_one(tmp_path: Path, kept: int) -> None:
    path, written = tmp_path / "new" / "metrics.jsonl", range(6)
    for keep_through, steps in ((-1, written), (kept, range(min(kept, 5) + 1, 6))):
        log = MetricsLog(path, keep_through=keep_through)
        for step in steps:
            log.write(step, "train", {"train/loss": 1 / (step + 1), "name": "ü"})
        assert [event["step"] for event in read_jsonl(path)] == list(written)
        with path.open("ab") as file:
            file.write(b'{"step": 6, "ki')  # the kill came in the middle of a line


def test_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).write(1, "train", {"loss": math.nan, "norm": math.inf, "n": 3})
    assert json.loads(path.read_text()) == {"step": 1, "kind": "train", "loss": None, "norm": None, "n": 3}


def test_a_line_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).write(1, "train", {})
    with path.open("a") as file:
        file.write('{"comment": "a lower rate from here"}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2"):
        MetricsLog(path, keep_through=1)


# The figures


def test_batch_metrics_by_hand() -> None:
    right, cut = make_sample(True, length=2), make_sample(False, truncated=True, penalty=-1.0, trains=False)
    samples = (replace(right, parts={"brief": 1.0, "kind": 2.0}), replace(cut, parts={"brief": 0.5}))
    values = batch_metrics([Group(make_prompt(), samples, step=3)], step=5)
    expected = {"groups": 1, "age": 2, "age_max": 2, "reward": -0.5, "accuracy": 0.5, "length_penalty": -0.5}
    expected |= {"length": 3, "length_max": 4, "truncated": 0.5, "masked": 0.5, "rule_answer-line": 1}
    expected["generation_prob"] = sum(math.exp(-i / 8) for i in (1, 2, 1, 2, 3, 4)) / 6
    others = {"reflection/responses": 0.0, "reflection/en": 0.0, "reflection/zh": 0.0}
    others |= {"reward/brief": 0.75, "reward/brief_std": 0.5 / math.sqrt(2), "reward/kind": 2.0, "reward/kind_std": 0.0}
    assert values == pytest.approx(prefixed("batch", expected) | others)
    assert batch_metrics([], 0) == {"batch/groups": 0}


def test_sampling_metrics_by_hand() -> None:
    counts = {"rounds": 2, "carried_in": 1, "carried_out": 3, "too_old": 5}
    stats = SamplingStats(**counts)
    for correctness in ("RW", "RR", "TT", "WW"):
        stats.update(counts_of(make_group(correctness)))
    shares = {"all_correct": 0.25, "all_incorrect": 0.5, "mixed": 0.25, "accuracy": 3 / 8, "truncated": 0.25}
    expected = prefixed("sampling", {**counts, **shares, "groups": 4, "reward": -0.25, "length": 4})
    assert sampling_metrics(stats) == pytest.approx(expected)
    empty = sampling_metrics(SamplingStats(carried_in=4))
    assert empty["sampling/carried_in"] == 4
    assert "sampling/mixed" not in empty


@pytest.mark.parametrize(
    ("text", "english", "chinese"),
    [
        # The two cases that the paper shows.
        ("However, wait a moment, let's rethink about the dihedral angle in a more thoughtful way.", 2, 0),
        ("our approach needs to be reconsidered. Instead, we can use a different approach involving", 2, 0),
        ("WAIT, no. Wait… wait! Wait, wait, that is wrong", 5, 0),
        ("We re-evaluate, reevaluate and re-examine it; double-checking, double checked", 5, 0),
        ("I made a mistake. Alternatively, try again. Hold on, going back to 3 I recheck, revisit, recompute", 8, 0),
        # Each first letter of a phrase.
        ("Wait, hold on: let me check, retry, start over, double-check, go another way; going back to it", 8, 0),
        ("Made a mistake. Different method; alternative approach", 3, 0),
        ("等等，这里不对。让我们重新考虑一下", 0, 3),
        ("且慢 再想想 仔细想想 检查一下 验算一下 核对一下 让我检查 不对，", 0, 8),
        ("算错 弄错 搞错 有误 换个思路 另一种方法 回头看", 0, 7),
        ("我算错了，再检查一遍，然后验证一下。换一种方法", 0, 4),
        ("She has to wait for 5 minutes at the bus stop; the waiter is waiting.", 0, 0),
        ("However, the answer is 3. There is an error bar.", 0, 0),
        ("苹果、橘子等等都是水果", 0, 0),
        ("不对称的图形。答案是正确的", 0, 0),
    ],
)
def test_phrases_that_look_back_are_counted(text: str, english: int, chinese: int) -> None:
    share = 1 / 3 if english or chinese else 0
    assert reflection_metrics([text, "4", "5"]) == {"responses": share, "en": english / 3, "zh": chinese / 3}


def test_the_flops_of_a_step_are_those_of_its_products() -> None:
    shape = TinyModelConfig(layers=3, hidden_size=64, heads=4, intermediate_size=128)
    model = make_model(shape, make_tokenizer(), max_positions=256)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, 128, dtype=torch.int64)).logits.sum().backward()
    # Of attention on a CPU the counter knows nothing before torch 2.15; since then it counts masked products too.
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    assert training_flops(model, [128]) - 6 * 3 * 64 * 128**2 == pytest.approx(products, rel=0.01)
    assert training_flops(model, [128, 128]) == 2 * training_flops(model, [128])


def test_the_flops_of_frozen_weights_and_of_experts_that_are_not_used() -> None:
    model = small_experts()
    config, whole = model.config, training_flops(model, [1])
    experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    config.num_experts_per_tok //= 2
    assert whole - training_flops(model, [1]) == 6 * experts * config.num_experts_per_tok / config.num_experts
    frozen = model.get_output_embeddings().weight.requires_grad_(False)
    config.num_experts_per_tok *= 2
    assert whole - training_flops(model, [1]) == 2 * frozen.numel()


def test_the_flops_of_layers_of_different_heads() -> None:
    """Of Gemma 4, whose configuration has no head_dim of all layers."""
    config = pytest.importorskip("transformers.models.gemma4").Gemma4TextConfig(
        **dict.fromkeys(("hidden_size", "intermediate_size", "hidden_size_per_layer_input"), 16),
        vocab_size=32,
        vocab_size_per_layer_input=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=16,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = AutoModelForCausalLM.from_config(config)
    one, two = training_flops(model, [1]), training_flops(model, [2])
    assert two - 2 * one == 2 * 6 * (2 * 8 + 2 * 16)


def test_speed_is_over_the_step_and_the_share_of_the_peak_over_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose peak is known. The tokens of a sequence that does not train do not count."""
    monkeypatch.setattr(speed, "training_flops", lambda model, lengths: 2e12 * sum(lengths))
    world = SimpleNamespace(size=2, all_gather_object=lambda item: [item, 5.0 + item])
    policy = SimpleNamespace(device=torch.device("cpu"), world=world, model=None)
    idle = replace(make_sequence(3, 2), mask=torch.zeros(5, dtype=torch.bool))
    step = policy, [make_sequence(1, 1000), idle], {"rollout": 6.0, "forward_backward": 4.0}
    figures = speed.speed_metrics(*step)
    assert figures.pop("memory_gib") > 5
    assert figures == {"ranks": 2.0, "tokens_per_second": 100.0}
    monkeypatch.setitem(speed.PEAKS, "", 5e14)
    assert speed.speed_metrics(*step)["mfu"] == 0.5


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_the_peak_of_a_device(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "training_flops", lambda model, lengths: 1e12)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    world = SimpleNamespace(size=1, all_gather_object=lambda item: [item])
    policy = SimpleNamespace(device=torch.device("cuda"), world=world, model=None)
    found = speed.speed_metrics(policy, [make_sequence(1, 4)], {"forward_backward": 1.0}).get("mfu")
    assert found == (None if peak is None else pytest.approx(1e12 / peak))


# The glossary. Every test that trains checks what it logs (`_only_documented_metrics` in conftest.py).


def test_every_row_of_the_glossary_is_logged_somewhere() -> None:
    """A name stands in quotes in the code that logs it."""
    package = Path(dapo_runner.__file__).parent
    files = [path for path in package.rglob("*.py") if path.name != "metric_table.py"]
    source = "".join(path.read_text() for path in [*files, Path(loss_metrics.__file__)])
    names = {key: key.split("/", 1)[1].strip("*") for key, *_ in rows()}
    names |= {key: name.removeprefix("failed_") for key, name in names.items() if key.startswith("env/failed_")}
    found = {key for key, name in names.items() if f'"{name}' in source or f'{name}"' in source}
    assert [key for key, name in names.items() if name.strip("/") and key not in found] == []
    assert all(key.split("/")[0] in AREAS and unit + meaning for key, unit, meaning, _ in rows())


def test_every_curve_has_a_row_and_every_panel_a_title_of_its_own() -> None:
    """The page finds a chart by its title."""
    panels = list(dict.fromkeys((*PANELS, *SUPERVISED_PANELS)))
    keys = [curve.key for panel in panels for curve in panel.curves]
    assert [key for key in keys if not is_documented(key) and not key.startswith("time/")] == []
    assert not is_documented("train/unheard_of")
    assert len({panel.title for panel in panels}) == len(panels)
    gaps = [key for key, *_ in rows() if key.startswith(("train/rollout_", "sync/"))]
    assert len(gaps) > 5
    assert [key for key in (*gaps, *(key for keys in DRAWN.values() for key in keys)) if not panel_of(key)] == []
    assert title_and_unit("train/entropy") == ("Entropy", "nats per token")
    assert title_and_unit("eval/avg@4") == ("Held-out accuracy: avg@4", "share of problems")
    for key, unit in (("own/v1.5", ""), ("eval/pass@16", "share"), ("eval/v1.5/avg@4", ""), ("reward/a_std", "reward")):
        assert title_and_unit(key) == (key, unit)  # no two metrics of a row have the same title
    assert "sampler.max_age" in title_and_unit("segments/too_old")[0]  # a point is no end of a sentence
    assert title_and_unit("batch/age")[1] == next(unit for key, unit, *_ in rows() if key == "batch/age")


# The console

FIGURES = {"batch/reward": -0.25, "sampling/accuracy": 0.5, "batch/length": 20.0, "train/entropy": 0.1234}
STATS = SamplingStats(groups=8, all_correct=3, all_incorrect=3, mixed=2, varying_reward=6, samples=16)
SECONDS = {"rollout": 6.0, "forward_backward": 3.0, "optimizer": 0.5, "sync": 0.25, "other": 0.25, "save": 0.0}
SPEED = {"ranks": 8.0, "tokens_per_second": 12345.6, "mfu": 0.41, "memory_gib": 61.5}


def written(mode: str, terminal: bool, figures: dict[str, float] = FIGURES) -> str:
    file = io.StringIO()
    file.isatty = lambda: terminal  # type: ignore[method-assign]
    console = Console(file=file, width=100, color_system=None, legacy_windows=False)
    progress = make_progress(mode, console)  # type: ignore[arg-type]
    progress.start(0, 10)
    progress.phase("old_logprobs")
    progress.step(1, figures, SECONDS, SPEED)
    figures = {"avg@4": 0.875, "exam/avg@4": 0.5, "exam/cons@4": 0.5, "problems": 40.0, "length": 3.0, "reward": 0.75}
    progress.evaluation(1, figures)
    progress.close()
    return file.getvalue()


def test_long_steps_have_a_remaining_time() -> None:
    clock = [0.0]
    progress = Progress()
    progress.bar.get_time = lambda: clock[0]
    progress.start(0, 10)
    for step in range(1, 4):
        clock[0] = 600.0 * step
        progress.bar.update(progress.task, completed=step)
    assert progress.bar.tasks[0].time_remaining == 7 * 600


def test_a_step_and_an_evaluation_are_a_line_each_and_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    step, evaluation = written("auto", terminal=False).splitlines()
    labels = ("1/10", "reward -0.25", "accuracy 50%", "length 20", "entropy 0.123", "10.0 s", "rollout 60%")
    speed = ("12,346 tokens/s with prompts", "MFU 41%", "61.5 GiB")
    assert [number for number in (*labels, *speed) if number not in step] == []
    assert "grad" not in step  # it was not logged
    assert [number for number in ("avg@4 87.5%", "exam/avg@4 50.0%", "+0.750", "40") if number not in evaluation] == []
    assert "cons" not in evaluation
    assert [part for part in ("1/10", "old logprobs") if part not in written("auto", terminal=True)] == []
    assert written("plain", terminal=True) == written("auto", terminal=False)
    assert "old logprobs" in written("live", terminal=False)
    assert written("off", terminal=True) == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "old logprobs" not in written("auto", terminal=False)  # colours make no terminal of a file


def test_only_the_main_thread_ends_when_the_output_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes on servers come from the thread that all requests need."""
    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as patch, os.fdopen(writing, "w", buffering=1) as closed:
        patch.setattr(sys, "stdout", closed)
        progress = make_progress("plain", RunConsole())
        in_thread(lambda: progress.note("a server is lost")).result()
        with pytest.raises(SystemExit):
            progress.note("step 1")


@pytest.mark.parametrize(
    ("filter_on", "shown", "hidden", "heights"),
    [("correctness", "mixed 25%", "varying", [3 / 8, 2 / 8, 3 / 8]), ("reward", "varying 75%", "mixed", [0.25, 0.75])],
)
def test_console_and_picture_show_the_groups_that_the_filter_accepts(
    filter_on: str, shown: str, hidden: str, heights: list[float]
) -> None:
    """With `sampler.filter_groups: reward` most are all correct here, and trained on."""
    figures = sampling_metrics(STATS, filter_on)
    step = written("plain", False, FIGURES | figures).splitlines()[0]
    assert shown in step
    assert hidden not in step
    (ax,) = [ax for ax in draw(collect([{"step": 1, **figures}]), "run").axes if "groups" in ax.get_ylabel()]
    assert [bars[0].get_height() for bars in ax.containers] == pytest.approx(heights)
    labels = {str(bars.get_label()): bars[0].get_height() for bars in ax.containers}
    label, share = ("mixed", 0.25) if filter_on == "correctness" else ("varying rewards", 0.75)
    assert labels[label] == share


def test_the_console_shows_a_loss_that_falls_and_not_that_of_a_policy() -> None:
    distillation = {"batch/reward", "train/loss"}
    for keys, shown in ((distillation, True), (distillation | {"train/approx_kl"}, False)):
        assert ("loss" in {metric.console for metric in console_metrics(keys)}) == shown


# The picture

TRAIN_KEYS = [curve.key for panel in PANELS for curve in panel.curves if not curve.key.startswith("eval/")]


def test_every_curve_is_drawn_with_its_values() -> None:
    events = [{"step": step, "kind": "train", **{key: step + 0.5 for key in TRAIN_KEYS}} for step in range(3)]
    points = collect([*events, {"step": 2, "kind": "eval", "eval/avg@16": 0.25}])
    for panel, ax in zip(PANELS, draw(points, "run").axes, strict=True):
        assert (ax.get_title(loc="left"), ax.get_ylabel()) == (panel.title, panel.unit)
        assert ax.get_xlim() == (-0.5, 2.5)
        lines = [list(line.get_ydata()) for line in ax.lines]
        if panel.stacked:
            assert len(ax.containers) == sum(curve.key in points for curve in panel.curves)
        elif panel is PANELS[0]:
            assert (lines, [text.get_text() for text in ax.get_legend().get_texts()]) == ([[0.25]], ["avg@16"])
        else:
            drawn = [curve for curve in panel.curves if not curve.key.startswith("eval/")]
            assert lines == [[0.5, 1.5, 2.5]] * len(drawn)
        if len(panel.curves) > 1:  # also if only one of them was logged
            assert ax.get_legend() is not None


def test_each_of_several_rewards_has_a_panel_after_the_reward_that_they_make() -> None:
    reward = {"batch/reward": 0.5, "reward/brief": 1.0, "reward/brief_std": 0.5, "reward/failed": 0.0}
    above, below = draw(collect([{"step": 0, **reward, "train/entropy": 0.1}]), "run").axes[:2]
    assert (above.get_title(loc="left"), below.get_title(loc="left")) == ("Reward", "Reward: brief")
    assert [list(line.get_ydata()) for line in below.lines] == [[1.0], [0.5]]
    assert [text.get_text() for text in below.get_legend().get_texts()] == ["mean", "deviation in a group"]


def test_preference_training_has_a_panel_of_its_own() -> None:
    figures = {"step": 0, "train/reward_chosen": 0.2, "train/reward_rejected": -0.1}
    (ax,) = draw(collect([figures]), "run").axes
    assert [list(line.get_ydata()) for line in ax.lines] == [[0.2], [-0.1]]


def test_empty_panels_are_left_out_and_a_stack_survives_steps_that_generated_nothing() -> None:
    """Steps served from the carried-over surplus have no shares to show."""
    points = collect([{"step": step, "reflection/en": 0.0, "train/entropy": 0.0} for step in range(3)])
    assert [ax.get_title(loc="left") for ax in draw(points, "run").axes] == [panel_of("train/entropy")]
    shares = {"sampling/all_correct": 0.1, "sampling/mixed": 0.6, "sampling/all_incorrect": 0.3}
    events = [{"step": 1, **shares}, {"step": 2, "sampling/groups": 0}, {"step": 3, **shares}]
    (ax,) = draw(collect(events), "run").axes
    assert [bar.get_y() + bar.get_height() for bar in ax.containers[-1]] == pytest.approx([1.0, 1.0])
    assert ax.get_ylim()[0] < 0.0 < 1.0 < ax.get_ylim()[1]  # shares of 0 and 1 are seen
    (ax,) = draw(collect([{"step": step, **shares} for step in range(MOST_BARS + 1)]), "run").axes
    assert (len(ax.containers), len(ax.collections)) == (0, 3)  # a long run has areas instead of bars
    assert ax.collections[-1].get_datalim(ax.transData).y1 == pytest.approx(1.0)


def test_a_picture_of_a_folder_has_the_time_of_each_step_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phases are drawn together, an unknown phase is part of the rest, and nothing is lost."""
    for _ in range(2):  # without the file, and with an empty one
        with pytest.raises(ConfigError, match=f"{METRICS_FILE}: .*got no file or an empty one"):
            write_report(tmp_path)
        (tmp_path / METRICS_FILE).touch()
    titles: list[str] = []
    timings = [
        {"step": 0, "kind": "start", "seconds/evaluate": 50.0},
        {"step": 1, "kind": "step", "seconds/rollout": 1.0, "seconds/forward_backward": 2.0, "seconds/optimizer": 0.5},
        {"step": 2, "kind": "step", "seconds/rollout": 1.5, "seconds/evaluate": 3.0, "seconds/surprise": 0.25},
    ]
    timings[1]["env/tool_calls"] = 6
    calls, ax = draw(collect(time_events(timings)), "run").axes
    assert [text.get_text() for text in calls.get_legend().get_texts()] == ["calls"]
    assert [list(line.get_ydata()) for line in calls.lines] == [[6]]
    assert [bar.get_y() + bar.get_height() for bar in ax.containers[-1]] == pytest.approx([3.5, 4.75])
    MetricsLog(tmp_path / METRICS_FILE).write(1, "train", {"train/loss": 0.5})
    MetricsLog(tmp_path / TIMINGS_FILE).write(1, "step", {"seconds/rollout": 1.0})
    assert write_report(tmp_path) == tmp_path / REPORT_FILE
    assert (tmp_path / REPORT_FILE).read_bytes().startswith(b"\x89PNG")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: titles.append(figure.get_suptitle()))
        write_report(Path())
        (tmp_path / REPORT_FILE).unlink()
        (tmp_path / REPORT_FILE).mkdir()
        with pytest.raises(IsADirectoryError, match=REPORT_FILE):  # one line of `dapo report`
            write_report(tmp_path)
    assert titles == [tmp_path.name] * 2
    for name in ("x$^$", "日本語 🙂", "r\udcff"):  # no formula, no letter that the font has, no text
        MetricsLog(tmp_path / name / METRICS_FILE).write(1, "train", {"train/loss": 0.5})
        assert write_report(tmp_path / name).stat().st_size > 10_000
    append_jsonl(tmp_path / METRICS_FILE, [{"kind": "step", "train/loss": 0.5}])
    with pytest.raises(ConfigError, match=f"{METRICS_FILE}:2: expected a JSON object"):
        write_report(tmp_path)
