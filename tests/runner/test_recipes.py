"""The recipes: the paper's table figure by figure, and what a plan says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refused

from dapo_kernels import OBJECTIVES
from dapo_runner.algorithms.objective import resolve_objective
from dapo_runner.cli import main
from dapo_runner.config import ConfigError, load_config
from dapo_runner.logging.progress import Progress
from dapo_runner.preflight.dry_run import summarize
from dapo_runner.preflight.memory import GPU_MEMORY, host_estimate, memory_estimate, model_shape, phase_estimate
from dapo_runner.train import train

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PAPER = RECIPES / "qwen2.5-32b.yaml"


def test_the_papers_recipe_is_the_papers_table() -> None:
    config = load_config(PAPER)
    assert config.model.path == "Qwen/Qwen2.5-32B"
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.weight_decay, optimizer.grad_clip) == (1e-6, 20, 0.1, 1.0)
    assert (config.sampler.prompts_per_step, config.rollout.group_size) == (512, 16)
    assert (config.mini_batch_size, config.updates_per_step) == (512, 16)
    assert round(config.sampler.prompts_per_step / config.sampler.initial_acceptance) == 1536
    assert (config.rollout.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 20480)
    overlong = config.reward.overlong
    assert (overlong.soft_punishment, overlong.filter) == (True, False)
    assert (config.overlong_max_length - overlong.cache_length, overlong.cache_length) == (16384, 4096)
    objective = resolve_objective(config)
    assert (objective.surrogate, objective.ratio) == ("clip", "token")
    assert (objective.clip_low, objective.clip_high, objective.dual_clip) == (0.2, 0.28, None)
    assert (objective.aggregate, objective.kl_coef, objective.entropy_coef) == ("token-mean", 0.0, 0.0)
    assert objective == OBJECTIVES["dapo"]
    assert config.advantage.kind == "group_std"
    assert (config.reward.kind, config.reward.correct, config.reward.incorrect) == ("dapo", 1.0, -1.0)
    assert config.sampler.filter_groups
    assert (config.rollout.temperature, config.rollout.top_p) == (1.0, 1.0)
    evaluation = config.evaluation
    assert (evaluation.k, evaluation.temperature, evaluation.top_p) == (32, 1.0, 0.7)
    assert (config.run.steps, config.run.eval_every, config.run.save_every) == (320, 5, 5)
    assert config.optimizer.token_budget == 22528
    parallel = config.parallel
    assert (parallel.sequence, parallel.rollout_tensor, parallel.gpus) == (8, 4, 16 * 8)


def test_its_plan_counts_steps_tokens_and_memory() -> None:
    config = load_config(PAPER)
    summary = summarize(config)
    assert summary["per step"] == "512 prompts × 16 = 8192 responses, 16 updates of 512"
    assert f"{8192 * 20480:,} tokens per step" in summary["trained on"]
    shape = model_shape(config.model)
    assert shape is not None
    assert shape.parameters == pytest.approx(32.76e9, rel=1e-3)  # 32.76 billion by the model's card
    memory = memory_estimate(config, shape)
    assert memory["weights"] == memory["gradients"] == pytest.approx(4 * shape.parameters / 128, rel=1e-6)
    assert memory["AdamW moments"] == pytest.approx(8 * shape.parameters / 128, rel=1e-6)
    assert memory["engine's weights"] == pytest.approx(2 * shape.parameters / 4, rel=1e-6)
    assert memory["KV cache, for one response at full length"] == 2 * 22528 * 64 * 1024 * 2 // 4
    assert memory["logits of a chunk"] == 22528 // 8 * 152064 * 2  # a rank has an eighth of the positions
    assert memory["activations of a micro-batch"] > 64 * 5120 * 22528 // 8 * 2  # every layer's input
    assert "reference weights" not in memory
    assert sum(memory.values()) < 80 * 2**30  # the paper's GPUs
    for what in memory:
        assert f"  {what}" in summary


def test_a_plan_counts_adapters_and_a_reference() -> None:
    penalised = load_config(PAPER, ["loss.overrides.kl_coef=0.1"])
    shape = model_shape(penalised.model)
    assert shape is not None
    assert memory_estimate(penalised, shape)["reference weights"] == memory_estimate(penalised, shape)["weights"] // 2
    adapted = load_config(PAPER, ["loss.overrides.kl_coef=0.1", "model.lora.rank=32"])
    memory = memory_estimate(adapted, shape)
    assert "reference weights" not in memory  # the base with its adapters off
    assert memory["weights"] == pytest.approx((2 * shape.parameters + memory["gradients"] * 128) / 128, rel=1e-6)
    # q, k, v, o and three of the MLP: rank × (in + out) each.
    per_layer = 2 * (5120 + 5120) + 2 * (5120 + 1024) + 3 * (5120 + 27648)
    assert memory["gradients"] == 64 * 32 * per_layer * 4 // 128
    assert f"{64 * 32 * per_layer:,} train" in summarize(adapted)["parameters"]


def test_what_fits_on_one_gpu() -> None:
    config = load_config(RECIPES / "qwen3-8b-1gpu.yaml")
    shape = model_shape(config.model)
    assert shape is not None
    assert max(phase_estimate(config, memory_estimate(config, shape)).values()) < GPU_MEMORY
    states = {"float32 masters": 4, "gradients": 4, "AdamW moments": 8}
    assert host_estimate(config, shape) == {what: size * shape.parameters for what, size in states.items()}
    beside = load_config(RECIPES / "qwen3-8b-1gpu.yaml", ["optimizer.offload=false"])
    assert phase_estimate(beside, memory_estimate(beside, shape))["update"] > 18 * shape.parameters > GPU_MEMORY
    assert host_estimate(beside, shape) == {}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_prints_its_plan(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", str(path), "--dry-run"])
    out, err = capsys.readouterr()
    assert "responses" in out
    # Data and packages that do not come with the project.
    assert code == 0 or "found nothing at" in err or "rollout.engine: " in err


def test_more_gpus_than_there_are_processes(tmp_path: Path) -> None:
    config = load_config(PAPER, [f"run.output_dir={tmp_path}"])
    with refused("parallel.gpus"):
        train(config, Progress())
    with pytest.raises(ConfigError, match=r"sequence: .*gpus=128, .*7"):
        load_config(PAPER, ["parallel.sequence=7"])
