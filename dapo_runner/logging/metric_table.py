"""Label, colour and panel of each drawn metric. The console, the picture, the page and studies read this table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources

# Okabe-Ito colours: distinguishable with colour blindness and in grey.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#888888"


@dataclass(frozen=True, slots=True)
class Metric:
    """A curve. ``console`` is its label in a progress line, "" for none; ``form`` its format there."""

    key: str  # in the logs; a trailing * matches any suffix, e.g. the k of avg@k
    label: str
    color: str = BLUE
    console: str = ""
    form: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str  # unique: the page finds a chart by it
    unit: str
    curves: tuple[Metric, ...]
    share: bool = False  # an axis from 0 to 1
    from_zero: bool = False
    stacked: bool = False


HELDOUT = (Metric("eval/avg@*", "avg", BLUE), Metric("eval/cons@*", "cons", GREEN))
REWARD = (
    Metric("batch/reward", "trained on", BLUE, "reward", "{:+.2f}"),
    Metric("sampling/reward", "generated", ORANGE),
    Metric("eval/reward", "held-out", GREEN),
)
ACCURACY = (
    Metric("batch/accuracy", "trained on", BLUE),
    Metric("sampling/accuracy", "generated", ORANGE, "accuracy", "{:.0%}"),
)
LENGTH = (
    Metric("batch/length", "mean", BLUE, "length", "{:.0f}"),
    Metric("batch/length_max", "longest", GREY),
    Metric("eval/length", "held-out", ORANGE),
)
KL = (
    Metric("train/approx_kl", "old to new policy", BLUE),
    Metric("train/ref_kl", "to the reference", ORANGE),
    Metric("train/reward_kl", "to the reference, in the reward", GREEN),
)
CLIPS = (
    Metric("train/clip_low", "low", ORANGE),
    Metric("train/clip_high", "high", BLUE),
    Metric("train/clip_dual", "dual", GREY),
)
GROUPS = (
    Metric("sampling/all_incorrect", "all incorrect", RED),
    Metric("sampling/mixed", "mixed", BLUE, "mixed", "{:.0%}"),
    Metric("sampling/all_correct", "all correct", GREEN),
    Metric("sampling/equal_reward", "equal rewards", RED),
    Metric("sampling/varying_reward", "varying rewards", BLUE, "varying", "{:.0%}"),
)
REFLECTION = (Metric("reflection/en", "English", BLUE), Metric("reflection/zh", "Chinese", ORANGE))
GAPS = (
    Metric("train/rollout_gap", "rollouts", BLUE),
    Metric("sync/gap", "after sync", GREEN),
    Metric("train/rollout_k3", "KL of the rollouts", ORANGE),
)
LARGEST_GAPS = (Metric("train/rollout_gap_max", "rollouts", BLUE), Metric("sync/gap_max", "after sync", GREEN))
TURNS = (Metric("batch/turns", "trained on", BLUE), Metric("eval/turns", "held-out", ORANGE))
TOOL_CALLS = (Metric("env/tool_calls", "calls", BLUE), Metric("env/tool_errors", "errors", RED))
MISMATCH = (
    Metric("train/rollout_ess", "effective sample size", BLUE),
    Metric("train/rollout_masked", "masked", RED),
    Metric("train/rollout_truncated", "truncated", ORANGE),
    Metric("train/rollout_unknown", "unknown", GREY),
)
IMPLICIT_REWARD = (Metric("train/reward_chosen", "chosen", BLUE), Metric("train/reward_rejected", "rejected", ORANGE))
SECONDS = (
    Metric("time/rollout", "rollout", ORANGE),
    Metric("time/update", "update", BLUE),
    Metric("time/old_logprobs", "log-probs", GREEN),
    Metric("time/evaluate", "held-out", RED),
    Metric("time/rest", "rest", GREY),
)
SUPERVISED_LOSS = (Metric("train/loss", "update", BLUE, "loss", "{:.4f}"), Metric("eval/loss", "held-out", ORANGE))

ENTROPY = Panel("Entropy", "nats per token", (Metric("train/entropy", "entropy", BLUE, "entropy", "{:.3f}"),))
GRADIENT = Panel("Gradient norm", "before clipping", (Metric("train/grad_norm", "norm", BLUE, "grad", "{:.2f}"),))
LEARNING_RATE = Panel("Learning rate", "of an update", (Metric("train/lr", "learning rate"),))
TIME = Panel("Time", "seconds of a step", SECONDS, stacked=True)
PANELS = (
    Panel("Held-out accuracy", "share of problems", HELDOUT, share=True),
    Panel("Reward", "per response", REWARD),
    Panel("Training accuracy", "share of responses", ACCURACY, share=True),
    Panel("Response length", "tokens", LENGTH),
    Panel("Turns", "per episode", TURNS),
    Panel("Tool calls", "per step", TOOL_CALLS),
    Panel("Truncated responses", "share of all generated", (Metric("sampling/truncated", "truncated"),), share=True),
    ENTROPY,
    Panel("Mean generation probability", "of sampled tokens", (Metric("batch/generation_prob", "probability"),)),
    Panel("Loss", "mean of the updates", (Metric("train/loss", "loss", BLUE, "loss", "{:.4f}"),)),
    Panel("Implicit reward of pairs", "nats", IMPLICIT_REWARD),
    Panel("KL divergence", "nats per token", KL),
    Panel("Clipped tokens", "share of tokens", CLIPS),
    Panel("Dynamic sampling", "share of groups generated", GROUPS, share=True, stacked=True),
    GRADIENT,
    LEARNING_RATE,
    Panel("Reflection", "phrases per response", REFLECTION, from_zero=True),
    Panel("Log-prob mismatch", "nats per token", GAPS, from_zero=True),
    Panel("Largest mismatch", "nats", LARGEST_GAPS, from_zero=True),
    Panel("Mismatch weights", "share of tokens", MISMATCH, share=True),
    TIME,
)
SUPERVISED_PANELS = (Panel("Cross-entropy", "nats per token", SUPERVISED_LOSS), ENTROPY, GRADIENT, LEARNING_RATE, TIME)


def part_of_reward(name: str) -> Panel:
    """Return the panel of one of several rewards. Its deviation in a group gives the gradient."""
    curves = Metric(f"reward/{name}", "mean"), Metric(f"reward/{name}_std", "deviation in a group", ORANGE)
    return Panel(f"Reward: {name}", "per response", curves)


def panels_of(keys: Collection[str]) -> tuple[Panel, ...]:
    """Return the panels that have a curve in ``keys``, the logged metrics. `dapo sft` has other panels."""
    is_supervised = "eval/loss" in keys or ("train/loss" in keys and "batch/reward" not in keys)
    parts = sorted(key.removeprefix("reward/") for key in keys if f"{key}_std" in keys and key.startswith("reward/"))
    panels = SUPERVISED_PANELS if is_supervised else (*PANELS[:2], *map(part_of_reward, parts), *PANELS[2:])
    patterns = {panel: [curve.key for curve in panel.curves] for panel in panels}
    return tuple(p for p in panels if any(fnmatchcase(key, name) for key in keys for name in patterns[p]))


def step_name(panels: Collection[Panel]) -> str:
    """Return the name of a step of a run with these panels."""
    return "update" if SUPERVISED_PANELS[0] in panels else "rollout step"


def console_metrics(keys: Collection[str]) -> list[Metric]:
    """Return the metrics of a progress line, in order: no loss of a policy, and of groups the accepted share."""
    replaced = {"train/loss": "train/approx_kl", "sampling/mixed": "sampling/varying_reward"}
    curves = (curve for panel in panels_of(keys) for curve in panel.curves if curve.key in keys)
    return [curve for curve in curves if curve.console and replaced.get(curve.key) not in keys]


def title_and_unit(key: str) -> tuple[str, str]:
    """Return title and unit of a metric; without one of its own, the title is the key."""
    for panel in PANELS:
        for curve in panel.curves:
            if fnmatchcase(key, curve.key):
                name = key.partition("/")[2] if curve.key.endswith("*") else curve.label
                return panel.title if len(panel.curves) == 1 else f"{panel.title}: {name}", panel.unit
    pattern, unit, meaning, *_ = next((row for row in read_glossary() if fnmatchcase(key, row[0])), ("", "", ""))
    return meaning.split(". ")[0].rstrip(".").split(" (")[0] if pattern == key else key, unit


def read_glossary() -> list[tuple[str, ...]]:
    """Return key, unit, meaning and healthy value of each metric, from glossary.txt."""
    text = (resources.files(__package__) / "glossary.txt").read_text(encoding="utf-8")
    return [tuple(cell.strip() for cell in line.split("|")) for line in text.splitlines()]
