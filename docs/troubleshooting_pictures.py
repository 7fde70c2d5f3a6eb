"""Draw the pictures of docs/troubleshooting.md: `python -m docs.troubleshooting_pictures`.

They show the curves that are kept under benchmarks/results. `--run` makes them anew, by short runs of the tiny recipe.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from dapo_runner import load_config, train
from dapo_runner.logging.curves import Points, find_curve, read_curves
from dapo_runner.logging.metric_table import GREY, panels_of
from dapo_runner.logging.report import draw
from dapo_runner.run.folder import TINY_MODEL

ROOT = Path(__file__).parents[1]
VALUES = ROOT / "benchmarks" / "results" / "troubleshooting-20261125.json"
FOLDER = ROOT / "docs" / "troubleshooting"
SHORT = [
    "run.steps=15",
    "run.eval_every=15",
    "run.save_every=15",
    "run.threads=1",
    "data.eval_size=20",
    "data.arithmetic.train_size=2000",
    "logging.rollouts.groups=0",
    "rollout.group_size=8",
    "sampler.prompts_per_step=8",
    "sampler.max_rounds=2",
    "optimizer.mini_batch_size=16",
    "evaluation.k=1",
]
FEW = ["run.steps=6", "sampler.max_rounds=1", "sampler.initial_acceptance=1.0"]  # enough to see it, and quick
HEALTHY = "healthy"
CASES = {  # the heading of the section: what is set wrong
    HEALTHY: ["model.tiny.warmup.steps=150", "model.tiny.warmup.stop_at=null"],  # its model is the start of the others
    "The learning rate is too high": ["optimizer.lr=5e-3", "optimizer.warmup_steps=1"],
    "No group is accepted": [
        "data.arithmetic.min_digits=4",
        "data.arithmetic.max_digits=4",
        "rollout.max_prompt_tokens=12",
        "rollout.max_response_tokens=28",
    ],
    "Responses are truncated": ["rollout.max_response_tokens=10", "reward.overlong.cache_length=4"],
    "Entropy collapses": ["loss.overrides.entropy_coef=-1", "optimizer.lr=4e-4"],
    "Engine and trainer disagree": ["sampler.max_age=10", "sampler.initial_acceptance=0.1", "optimizer.lr=6e-4"],
}
DRAWN = {
    "The learning rate is too high": ["sampling/reward", "train/grad_norm", "train/approx_kl"],
    "No group is accepted": ["sampling/accuracy", "sampling/all_incorrect", "sampling/mixed", "sampling/all_correct"],
    "Responses are truncated": ["sampling/reward", "sampling/truncated", "sampling/all_incorrect", "sampling/mixed"],
    "Entropy collapses": ["train/entropy", "batch/generation_prob", "sampling/accuracy"],
    "Engine and trainer disagree": ["train/rollout_gap", "train/rollout_gap_max", "train/rollout_ess"],
}


def settings_of(case: str) -> list[str]:
    """Return the overrides of the recipe `tiny`."""
    is_long = case not in ("No group is accepted", "Responses are truncated")
    return [*SHORT, *([] if is_long else FEW), *CASES[case]]


def file_of(case: str) -> Path:
    return FOLDER / f"{case.lower().replace(' ', '-')}.png"


def carry_out() -> None:
    """Train every case and keep the curves."""
    found: dict[str, object] = {}
    about = {"command": "python -m docs.troubleshooting_pictures --run", "recipe": "tiny", "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            start = [f"model.path={folder}/{HEALTHY}/{TINY_MODEL}", "model.tiny=null"] if found else []
            where = [f"run.output_dir={folder}", f"run.name={case.lower().replace(' ', '-')}"]
            run = train(load_config(ROOT / "recipes" / "tiny.yaml", [*settings_of(case), *start, *where]))
            keys = sorted({key for keys in DRAWN.values() for key in keys})
            points = read_curves(run)
            curves = {key: points[key] for key in keys if key in points}
            found[case] = {"overrides": settings_of(case), "curves": curves}
            VALUES.write_text(json.dumps(about | {"runs": found}) + "\n", encoding="utf-8")


def draw_case(case: str, curves: dict[str, Points], path: Path) -> None:
    """Draw the curves of a case, and those of the healthy run in grey, into a file."""
    chosen = {key: curves[case][key] for key in DRAWN[case] if key in curves[case]}
    figure = draw(chosen, case)
    for panel, ax in zip(panels_of(chosen), figure.axes, strict=True):
        for curve in [] if panel.stacked else panel.curves:
            healthy = find_curve(curves[HEALTHY], curve.key) if curve.key in chosen else None
            if healthy is not None:
                ax.plot(*healthy[1:], color=GREY, linestyle=":", label="healthy run")
                ax.legend(fontsize=7, frameon=False)
    figure.set_dpi(80)
    figure.savefig(path)


if __name__ == "__main__":
    if "--run" in sys.argv:
        carry_out()
    FOLDER.mkdir(exist_ok=True)
    kept = json.loads(VALUES.read_text(encoding="utf-8"))["runs"]
    for name in DRAWN.keys() & kept.keys():
        draw_case(name, {case: run["curves"] for case, run in kept.items()}, file_of(name))
