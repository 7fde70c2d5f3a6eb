"""`algorithm: NAME`: the table against papers and page, what wins over it, and what is said of that."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev

import pytest
from refusals import refused
from small import Dapo, Notes, small_recipe, write_recipe
from test_config import split

from dapo_kernels import OBJECTIVES
from dapo_runner.config import (
    AdvantageConfig,
    Config,
    CorrectionConfig,
    DataConfig,
    ModelConfig,
    OverlongConfig,
    RewardConfig,
    RolloutConfig,
    TinyModelConfig,
    apply_overrides,
    dump_config,
    flatten,
    load_config,
    parse,
)
from dapo_runner.config.algorithms import ALGORITHMS
from dapo_runner.loop import train
from dapo_runner.preflight.dry_run import departures, describe_algorithm
from dapo_runner.run.folder import check_same_run, settings_of
from dapo_runner.run.fork import find_origin

ROOT = Path(__file__).resolve().parents[3]


def config_of(*overrides: str) -> Config:
    """A run that leaves to its algorithm what an algorithm decides."""
    recipe = small_recipe()
    del recipe["optimizer"]["mini_batch_size"]
    return parse(apply_overrides(recipe, ["sampler.prompts_per_step=128", *overrides]), Config)


def accuracy(name: str) -> str:
    runs = json.loads((ROOT / "benchmarks" / "results" / "algorithms-20261122.json").read_text(encoding="utf-8"))
    after = [100 * run["after"] for run in runs if run["variant"] == name]
    return f"{fmean(after):.1f} ± {stdev(after) / math.sqrt(len(after)):.1f}" if after else ""


def test_the_page_is_the_table() -> None:
    """Every setting of every algorithm stands in docs/algorithms.md, and none of them is a departure."""
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = [line.strip("| ").split("|") for line in page.splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in line] for line in table]
    keys = [cell.strip("`") for cell in header[1:-3]]
    dapo = flatten(ALGORITHMS["dapo"].settings)
    written = {}
    for name, *cells, besides, seen, paper in rows:
        said = {key: cell.strip("`") for key, cell in zip(keys, cells, strict=True) if cell}
        said |= dict(item.split("=") for item in besides.split("`")[1::2])
        written[name.strip("`")] = (said, seen, paper)
    assert list(written) == list(ALGORITHMS)
    assert set(keys) <= dapo.keys()
    for name, row in ALGORITHMS.items():
        said, seen, paper = written[name]
        assert seen == accuracy(name)
        settings = flatten(row.settings)
        differing = {key for key, value in settings.items() if key not in dapo or dapo[key] != value}
        assert said.keys() == (differing or set(keys))
        needed = ["distillation.teacher=x"] if "distillation" in row.settings else []
        spelled = settings_of(config_of(*(f"{key}={text}" for key, text in said.items()), *needed))
        assert {key: spelled[key] for key in said} == {key: settings[key] for key in said}
        assert paper == row.paper
        assert departures(config_of(f"algorithm={name}", *needed)) == []


def test_no_algorithm_is_dapo() -> None:
    plain, named = settings_of(config_of()), settings_of(config_of("algorithm=dapo"))
    assert plain | {"algorithm": "dapo"} == named
    alone = config_of("loss.objective=grpo")
    assert settings_of(alone) == plain | {"loss.objective": "grpo"}
    assert "algorithm=grpo" in describe_algorithm(alone)["algorithm"]
    assert describe_algorithm(config_of()) == {}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "algorithm=grpo loss.overrides.clip_high=0.3 sampler.filter_groups=reward optimizer.mini_batch_size=128",
            "loss.overrides.clip_high=0.3 sampler.filter_groups=reward optimizer.mini_batch_size=128",
        ),
        ("algorithm=dapo sampler.filter_groups=correctness", ""),
        ("algorithm=dapo sampler.filter_groups=reward", "sampler.filter_groups=reward"),
        # What the algorithm sets as well, and what no algorithm decides.
        ("algorithm=grpo loss.overrides.kl_coef=0.04 rollout.group_size=8 run.seed=3", ""),
        ("algorithm=grpo advantage.segments={kind: chain}", "advantage.segments=a section"),
        ("algorithm=spo_chain advantage.segments=null", "advantage.segments=null"),
        (
            "algorithm=spo_chain advantage.segments.mask=false advantage.segments.interval=1",
            "advantage.segments.mask=false advantage.segments.interval=1",
        ),
        ("algorithm=grpo rollout.correction.weights=token", "rollout.correction.weights=token"),
        ("algorithm=dapo distillation.teacher=x", "distillation=a section"),
        ("algorithm=reinforce_pp_baseline reward.kl.coef=0.05", "reward.kl=a section"),
        ("algorithm=dapo loss.old_logprobs=engine", "loss.old_logprobs=engine"),
        ("algorithm=dppo_tv loss.old_logprobs=trainer", "loss.old_logprobs=trainer"),
        ("algorithm=grpo optimizer.mini_batch_size=null loss.reference_ema=0.99", "loss.reference_ema=0.99"),
    ],
)
def test_a_recipe_wins_over_its_algorithm_and_the_departures_are_listed(
    overrides: str, expected: str, tmp_path: Path
) -> None:
    config = config_of(*split(overrides))
    assert {text.split(" (")[0] for text in departures(config)} == set(split(expected))
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert departures(load_config(path)) == departures(config)


def test_sections_from_python_keep_what_was_set() -> None:
    config = Config(
        algorithm="dr_grpo",
        model=ModelConfig(tiny=TinyModelConfig()),
        data=DataConfig(format="arithmetic"),
        reward=RewardConfig(incorrect=-0.5, overlong=OverlongConfig(cache_length=64)),
        advantage=AdvantageConfig(),
    )
    assert (config.reward.correct, config.reward.incorrect, config.advantage.kind) == (1.0, -0.5, "group_mean")
    assert (config.reward.overlong.cache_length, config.reward.overlong.soft_punishment) == (64, False)
    assert [text.split("=")[0] for text in departures(config)] == ["reward.incorrect"]
    tiny, tasks = ModelConfig(tiny=TinyModelConfig()), DataConfig(reasoning_gym=[{"name": "gcd"}])
    assert Config(model=tiny, data=tasks).reward.kind == "reasoning_gym"
    correction = CorrectionConfig(weights="sequence", bound=5.0)
    matched = Config(numerics="matched", model=tiny, data=tasks, rollout=RolloutConfig(correction=correction))
    assert matched.rollout.correction == correction


def test_a_run_logs_its_algorithm_and_stays_that_run(tmp_path: Path, dapo: Dapo) -> None:
    recipe, notes, departure = write_recipe(tmp_path, steps=1, eval_every=0), Notes(), "optimizer.mini_batch_size=8"
    folder = train(load_config(recipe, ["algorithm=grpo"]), notes)
    for part in (ALGORITHMS["grpo"].paper, departure):
        assert any(part in line for line in notes.lines)
    assert departure in " ".join(dapo("train", recipe, "algorithm=grpo", "--dry-run").split())
    spelled = ["loss.objective=grpo", "sampler.filter_groups=null", "reward.overlong.soft_punishment=false"]
    (change,) = check_same_run(load_config(recipe, spelled), folder)
    assert change.key == "algorithm"  # a name; the run is the same
    with refused("loss.objective"):
        check_same_run(load_config(recipe, ["algorithm=gspo"]), folder)
    fork = load_config(recipe, ["algorithm=gspo", "run.name=fork", f"run.from={folder}@1", "run.steps=2"])
    assert {change.key for change in find_origin(fork)[1]} == {"algorithm", "loss.objective", "run.steps"}


def test_the_recipes_are_dapo() -> None:
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        config = load_config(path)
        assert config.algorithm == "dapo", path
        assert not departures(config) or config.env is not None, path  # a call of a tool has no length to shape
        assert config.objective == OBJECTIVES["dapo"], path
