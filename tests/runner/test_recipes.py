"""The recipes and the pages about them: the paper's table, what a plan says, and tables that were measured."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import snippets_of
from small import SEGMENTS, Dapo

from dapo_kernels import OBJECTIVES
from dapo_runner.config import Config, load_config, parse
from dapo_runner.config.section import flatten
from dapo_runner.preflight.dry_run import departures, summarize
from dapo_runner.preflight.memory import GPU_MEMORY, memory_estimate, model_shape
from docs.models.one_gpu import CASES, FULL, LORA, case_name

ROOT = Path(__file__).resolve().parents[2]
RECIPES, DOCS = ROOT / "recipes", ROOT / "docs"
PAPER, ONE_GPU = RECIPES / "qwen2.5-32b.yaml", RECIPES / "qwen3-8b-1gpu.yaml"
EIGHT_BILLION = 8_190_735_360  # parameters of Qwen3-8B: 36 layers of 192,946,432, two of 622,329,856, a norm of 4096
PAPERS_TABLE = """
model: {path: Qwen/Qwen2.5-32B}
optimizer: {lr: 1.0e-06, warmup_steps: 20, weight_decay: 0.1, grad_clip: 1.0, token_budget: 22528}
sampler: {prompts_per_step: 512, filter_groups: correctness}
rollout: {group_size: 16, max_prompt_tokens: 2048, max_response_tokens: 20480, temperature: 1.0, top_p: 1.0}
reward: {kind: dapo, correct: 1.0, incorrect: -1.0}
reward.overlong: {soft_punishment: true, filter: false, cache_length: 4096}
advantage: {kind: group_std}
evaluation: {k: 32, temperature: 1.0, top_p: 0.7}
run: {steps: 320, eval_every: 5, save_every: 5}
parallel: {sequence: 8, rollout_tensor: 4, gpus: 128}
"""


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def measured(text: str) -> list[str]:
    """The lines of the published results that a page links to."""
    paths = re.findall(r"\]\(\.\./(benchmarks/results/[^\s)]+)\)", text)
    return [line for path in paths for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]


def test_the_papers_recipe_is_the_papers_table() -> None:
    config = load_config(PAPER)
    values = flatten(config.model_dump(mode="json"))
    assert flatten(yaml.safe_load(PAPERS_TABLE)).items() <= values.items()
    assert config.objective == OBJECTIVES["dapo"]
    assert re.findall(r"\d+", summarize(config)["per step"]) == ["512", "16", "8192", "16", "512"]
    assert round(config.sampler.prompts_per_step / config.sampler.initial_acceptance) == 1536


def test_its_plan_counts_steps_tokens_and_memory() -> None:
    config = load_config(PAPER)
    summary, shape = summarize(config), model_shape(config.model)
    assert f"{8192 * 20480:,}" in summary["trained on"]
    assert shape is not None
    assert shape.parameters == pytest.approx(32.76e9, rel=1e-3)  # 32.76 billion by the model's card
    memory = memory_estimate(config, shape)
    assert memory["activations of a micro-batch"] > 64 * 5120 * 22528 // 8 * 2  # every layer's input
    assert memory["logits of a chunk"] == 22528 // 8 * 152064 * 2  # a rank has an eighth of the positions
    assert memory["KV cache, for one response at full length"] == 2 * 22528 * 64 * 1024 * 2 // 4
    parts = {"weights": 4 / 128, "gradients": 4 / 128, "AdamW moments": 8 / 128, "engine's weights": 2 / 4}
    for what, bytes_each in parts.items():
        assert memory[what] == pytest.approx(bytes_each * shape.parameters, rel=1e-6), what
    assert sum(memory.values()) < 80 * 2**30  # the paper's GPUs
    config = load_config(PAPER, ["loss.overrides.kl_coef=0.1", "model.lora.rank=32"])
    adapted = memory_estimate(config, shape)
    assert "reference weights" not in adapted  # the base with its adapters off
    # q, k, v, o and three of the MLP: rank × (in + out) each.
    trained = 64 * 32 * (2 * (5120 + 5120) + 2 * (5120 + 1024) + 3 * (5120 + 27648))
    assert adapted["gradients"] == trained * 4 // 128
    assert adapted["weights"] == pytest.approx((2 * shape.parameters + 4 * trained) / 128, rel=1e-6)
    assert f"{trained:,}" in summarize(config)["parameters"]


def gib_of(config: Any) -> dict[str, float]:
    rows = {label.strip(): text for label, text in summarize(config).items()}
    return {label: float(text.removeprefix("about ").split()[0]) for label, text in rows.items() if "GiB" in text}


def test_the_rows_of_one_gpu() -> None:
    weights, cache = 2 * EIGHT_BILLION / 2**30, 2 * 10240 * 36 * 1024 * 2 / 2**30
    layer = 8 * 4096 + 4 * 12288 + 5 * (4096 + 1024)
    inputs = 20480 * 2 * (36 * 4096 + layer) / 2**30  # of the layers; one layer's activations
    expected = {
        "weights": weights,
        "activations of a micro-batch": inputs,
        "logits of a chunk": 1.0,
        "engine's weights": weights,
        "KV cache, for one response at full length": cache,
        "memory": 2 * weights + inputs + 1 + cache,
        "80 GB, update": weights + inputs + 1,  # vLLM sleeps
        "80 GB, rollout": weights + 0.7 * 79.1,
        "machine's memory": 8 * weights,
        "float32 masters": 2 * weights,
        "gradients": 2 * weights,
        "AdamW moments": 4 * weights,
        "disk": 7 * weights,  # in float32 weights and two moments, and the model in bfloat16
    }
    summary = summarize(load_config(ONE_GPU))
    assert gib_of(load_config(ONE_GPU)) == pytest.approx(expected, abs=0.006)
    verdicts = {label: "not fit" not in text for label, text in summary.items() if " fit" in text}
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert verdicts == {"80 GB, update": True, "80 GB, rollout": True, "machine's memory": here >= 16 * EIGHT_BILLION}
    beside = gib_of(load_config(ONE_GPU, ["optimizer.offload=false"]))
    assert beside["80 GB, update"] == pytest.approx(9 * weights + inputs + 1, abs=0.006)
    assert beside["80 GB, update"] > GPU_MEMORY / 2**30
    assert "machine's memory" not in beside
    assert gib_of(load_config(ONE_GPU, ["run.device=cpu", "rollout.vllm.kv_cache_gib=3"]))["KV cache"] == 3


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_prints_its_plan(path: Path, dapo: Dapo) -> None:
    """What does not come with the project, data and packages, may be missing."""
    assert "responses" in dapo("train", path, "--dry-run", code=None)
    assert dapo.code == 0 or "data.path: " in dapo.err or "rollout.engine: " in dapo.err


def test_the_snippets_about_one_gpu_are_parts_of_its_recipes() -> None:
    snippets = {name: flatten(yaml.safe_load(text)) for name, text in snippets_of("one-gpu").items()}
    assert snippets.keys() == {"full", "lora", "inputs"}
    for name, recipe in (("full", FULL), ("lora", LORA)):
        path = RECIPES / f"{recipe}.yaml"
        assert snippets[name].items() <= flatten(yaml.safe_load(path.read_text())).items()
        others = [f"{key}={value}" for key, value in snippets["inputs"].items()]
        assert load_config(path, others).model.gradient_checkpointing == "offload"


def test_tables_of_pages_are_the_measured_ones() -> None:
    rows = [line for line in page("one-gpu").splitlines() if line.startswith("| `")]
    assert [row.split(" | ")[0] for row in rows] == [f"| {case_name(*case)}" for case in CASES]
    assert set(rows) <= set(measured(page("one-gpu")))
    text, results = page("distillation"), measured(page("distillation"))
    rows = [line for line in results if line.startswith("|")]
    assert len(rows) == 8
    assert set(rows) <= set(text.splitlines())
    assert snippets_of("distillation")["commands"] in "\n".join(results)


def test_the_settings_of_spo_and_the_cost_that_its_page_states() -> None:
    snippets = snippets_of("spo")
    assert snippets.keys() == SEGMENTS.keys()
    papers: dict[str, dict[str, Any]] = {
        "chain": {"sampler": {"prompts_per_step": 64}, "rollout": {"group_size": 8}},
        "tree": {"sampler": {"prompts_per_step": 16}, "rollout": {"group_size": 216}},
    }
    recipe = {"model": {"path": "a/model"}, "data": {"path": "train.jsonl"}}
    for kind, sizes in papers.items():
        assert not departures(parse(recipe | {"algorithm": f"spo_{kind}"} | sizes, Config))
        parse(recipe | yaml.safe_load(snippets[kind]), Config)
    tree = parse(recipe | yaml.safe_load(snippets["tree"]), Config).tree
    assert tree is not None
    cost = (6 + 36) * tree.tokens + 216 * (2048 - 2 * tree.tokens)  # 6 · 6 · 6 children
    assert f"{cost:,} tokens, {cost / (216 * 2048):.2f}" in " ".join(page("spo").split())
