"""The metrics that are drawn: label, colour and panel of each. Console, picture, page and studies read this table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# Okabe-Ito: told apart by colour-blind readers and in grey.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#888888"


@dataclass(frozen=True, slots=True)
class Metric:
    """A curve. ``console`` is its name in a progress line and ``form`` its format there."""

    key: str  # in the logs; a trailing * stands for any rest, e.g. the k of avg@k
    label: str
    color: str = BLUE
    console: str = ""
    form: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    curves: tuple[Metric, ...]
    share: bool = False  # an axis from 0 to 1
    from_zero: bool = False
    stacked: bool = False


ENTROPY = Panel("Entropy", "nats per token", (Metric("train/entropy", "entropy", BLUE, "entropy", "{:.3f}"),))
GRADIENT = Panel("Gradient norm", "before clipping", (Metric("train/grad_norm", "norm", BLUE, "grad", "{:.2f}"),))
TIME = Panel(
    "Time",
    "seconds of a step",
    (
        Metric("time/rollout", "rollout", ORANGE),
        Metric("time/update", "update", BLUE),
        Metric("time/old_logprobs", "log-probs", GREEN),
        Metric("time/evaluate", "held-out", RED),
        Metric("time/rest", "rest", GREY),
    ),
    stacked=True,
)
PANELS = (
    Panel(
        "Held-out accuracy",
        "share of problems",
        (Metric("eval/avg@*", "avg", BLUE), Metric("eval/cons@*", "cons", GREEN)),
        share=True,
    ),
    Panel(
        "Reward",
        "per response",
        (
            Metric("batch/reward", "trained on", BLUE, "reward", "{:+.2f}"),
            Metric("sampling/reward", "generated", ORANGE),
        ),
    ),
    Panel(
        "Training accuracy",
        "share of responses",
        (
            Metric("batch/accuracy", "trained on", BLUE),
            Metric("sampling/accuracy", "generated", ORANGE, "accuracy", "{:.0%}"),
        ),
        share=True,
    ),
    Panel(
        "Response length",
        "tokens",
        (
            Metric("batch/length", "mean", BLUE, "length", "{:.0f}"),
            Metric("batch/length_max", "longest", GREY),
            Metric("eval/length", "held-out", ORANGE),
        ),
    ),
    ENTROPY,
    Panel("Mean generation probability", "of sampled tokens", (Metric("batch/generation_prob", "probability"),)),
    Panel(
        "Clipped tokens",
        "share of tokens",
        (
            Metric("train/clip_low", "low", ORANGE),
            Metric("train/clip_high", "high", BLUE),
            Metric("train/clip_dual", "dual", GREY),
        ),
    ),
    Panel(
        "Dynamic sampling",
        "share of groups generated",
        (
            Metric("sampling/all_incorrect", "all incorrect", RED),
            Metric("sampling/mixed", "mixed (accepted)", BLUE, "mixed", "{:.0%}"),
            Metric("sampling/all_correct", "all correct", GREEN),
            Metric("sampling/equal_reward", "equal rewards", RED),
            Metric("sampling/varying_reward", "varying rewards (accepted)", BLUE, "varying", "{:.0%}"),
        ),
        share=True,
        stacked=True,
    ),
    GRADIENT,
    Panel(
        "Reflection",
        "phrases per response",
        (Metric("reflection/en", "English", BLUE), Metric("reflection/zh", "Chinese", ORANGE)),
        from_zero=True,
    ),
    Panel(
        "Engine against learner",
        "mean |Δ log-prob|",
        (Metric("train/rollout_gap", "rollouts", BLUE), Metric("sync/gap", "after sync", GREEN)),
        from_zero=True,
    ),
    TIME,
)
LOSS = Panel(
    "Loss",
    "nats per token",
    (Metric("train/loss", "update", BLUE, "loss", "{:.4f}"), Metric("eval/loss", "held-out", ORANGE)),
)
SUPERVISED_PANELS = (LOSS, ENTROPY, GRADIENT, TIME)  # of `dapo sft`


def panels_of(keys: Collection[str]) -> tuple[Panel, ...]:
    """Return the panels of a run that logged ``keys``: those of `dapo sft` have no rewards."""
    is_supervised = "eval/loss" in keys or ("train/loss" in keys and "batch/reward" not in keys)
    return SUPERVISED_PANELS if is_supervised else PANELS


def console_metrics(keys: Collection[str]) -> list[Metric]:
    """Return those of a progress line, in order."""
    return [metric for panel in panels_of(keys) for metric in panel.curves if metric.console and metric.key in keys]
