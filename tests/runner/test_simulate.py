"""`--simulate`: a pretended rank is what a real one is, at the size of the recipes too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config
from learners import check_each_kind_once, world_of
from ranks import on_ranks
from small import Dapo
from torch.torch_version import TorchVersion

from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import Config, ModelConfig, load_config
from dapo_runner.parallel.sharding import add_up_over_replicas, local, whole_until_backward
from dapo_runner.policy.model import load_policy
from dapo_runner.preflight.memory import (
    ASLEEP,
    GPU_MEMORY,
    PUBLISHED,
    ModelShape,
    host_estimate,
    memory_estimate,
    model_shape,
    phase_estimate,
)
from dapo_runner.preflight.simulate import Observer, Simulation, full_mini_batch, simulate
from dapo_runner.preflight.simulate_report import describe, fits, phase_peaks

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PAPER, SEVEN, EIGHT = (RECIPES / f"{name}.yaml" for name in ("qwen2.5-32b", "qwen2.5-7b-8gpu", "qwen3-8b-2x8"))
FULL, LORA = (RECIPES / f"{name}.yaml" for name in ("qwen3-8b-1gpu", "qwen3-8b-lora-1gpu"))

counts_shards = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch before 2.12 counts whole tensors")


def simulated(recipe: Path, *overrides: str) -> tuple[Config, ModelShape, Simulation]:
    config = load_config(recipe, overrides)
    shape = model_shape(config.model)
    assert shape is not None
    return config, shape, simulate(config)


def with_layers(recipe: Path, n: int, folder: Path, **others: Any) -> str:
    """A setting: a model with fewer layers than the recipe's. What grows with them does so linearly."""
    values = PUBLISHED[load_config(recipe).model.path or ""] | {"num_hidden_layers": n, **others}
    (folder / "config.json").write_text(json.dumps(values))
    return f"model.path={folder}"


@counts_shards
@pytest.mark.parametrize(
    ("recipe", "parameters"),  # by the models' cards
    [
        pytest.param(PAPER, 32.76e9, marks=pytest.mark.slow),
        pytest.param(SEVEN, 7.616e9, marks=pytest.mark.ranks),
        pytest.param(EIGHT, 8.191e9, marks=pytest.mark.slow),
    ],
    ids=["32b", "7b", "8b"],
)
def test_all_layers_of_a_recipe(recipe: Path, parameters: float) -> None:
    """The recipe's line in docs/cluster.md."""
    config, shape, found = simulated(recipe)
    assert shape.parameters == pytest.approx(parameters, rel=1e-3)
    assert fits(config, found)
    lines = (RECIPES.parent / "docs" / "cluster.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"| `{recipe.stem}` |")]
    phases, formulas = phase_peaks(config, found), float(describe(config, found)["update"].split()[-2])
    sizes = [phases["update"] / 2**30, formulas, phases["rollout"] / 2**30]
    assert line.removesuffix(" |").split(" | ")[2:] == [f"{size:.1f} GiB" for size in sizes]


@pytest.mark.ranks
def test_one_gpu_that_keeps_nothing_but_rounded_weights(tmp_path: Path) -> None:
    four_layers = with_layers(FULL, 4, tmp_path)
    config, shape, on_host = simulated(FULL, four_layers)
    _, _, beside = simulated(FULL, four_layers, "optimizer.offload=false")
    assert beside.held == pytest.approx((2 + 4 + 8) * shape.parameters, rel=0.002)
    assert beside.peak["weights, gradients, moments"] == pytest.approx(18 * shape.parameters, rel=0.002)
    assert beside.host < 2**20
    assert on_host.held == pytest.approx(2 * shape.parameters, rel=0.002)
    assert on_host.host == pytest.approx(16 * shape.parameters, rel=0.13)  # and a gradient on its way
    assert sum(on_host.peak.values()) + 15.9 * shape.parameters < sum(beside.peak.values())
    assert fits(config, on_host)
    assert on_host.held < on_host.logprobs < sum(on_host.peak.values())
    _, _, inputs = simulated(FULL, four_layers, "model.gradient_checkpointing=offload")
    layer = 20480 * shape.hidden * 2
    assert inputs.host - on_host.host == pytest.approx(shape.layers * layer, rel=0.01)
    saved = sum(on_host.peak.values()) - sum(inputs.peak.values())
    assert saved == pytest.approx((shape.layers - 1) * layer, rel=0.35)


def test_a_tied_head_counts_once(tmp_path: Path) -> None:
    tied = with_layers(FULL, 1, tmp_path, tie_word_embeddings=True)
    _, shape, found = simulated(FULL, tied, "optimizer.offload=false")
    assert shape.tied
    assert found.held == pytest.approx(14 * shape.parameters, rel=1e-4)


HIDDEN, MLP, HEADS, KEY_VALUE = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
SIZES = {
    "llama": {HIDDEN: 1024, MLP: 3584, HEADS: 8, KEY_VALUE: 2},  # those of Llama-3.1-8B / 4
    "qwen2": {HIDDEN: 896, MLP: 4736, HEADS: 7, KEY_VALUE: 1},  # of Qwen2.5-7B / 4
    "qwen3": {HIDDEN: 1024, MLP: 3072, HEADS: 16, KEY_VALUE: 8},  # of Qwen3-0.6B
}
SIZES["qwen3_moe"] = SIZES["qwen3"] | {"moe_intermediate_size": 384, "num_experts": 16, "num_experts_per_tok": 8}


@pytest.mark.parametrize("kind", SIZES)
def test_formula_of_activations(kind: str, tmp_path: Path) -> None:
    """What a layer more keeps for the backward pass, per position."""
    found = []
    for n in (1, 2):
        values = SIZES[kind] | {"model_type": kind, "head_dim": 128, "num_hidden_layers": n, "vocab_size": 512}
        (tmp_path / "config.json").write_text(json.dumps(values))
        settings = ["optimizer.offload=false", "model.gradient_checkpointing=false", f"model.path={tmp_path}"]
        config, shape, simulation = simulated(FULL, *settings)
        formula = memory_estimate(config, shape)["activations of a micro-batch"]
        found.append((formula, simulation.peak["activations, the loss, passing tensors"]))
    formula, real = (after - before for before, after in zip(*found, strict=True))
    assert formula == pytest.approx(real, rel=0.16)  # Llama has no norms of queries and keys


def test_a_small_mini_batch_does_not_fill_the_token_budget(tmp_path: Path) -> None:
    lengths = ["rollout.max_prompt_tokens=128", "rollout.max_response_tokens=128", "reward.overlong.cache_length=16"]
    sizes = ["sampler.prompts_per_step=4", "rollout.group_size=4", "optimizer.mini_batch_size=16"]
    config, shape, found = simulated(LORA, with_layers(LORA, 1, tmp_path), *lengths, *sizes)
    n = 16 * (128 + 128 - 1)  # a token without a next one has no position
    assert found.positions == n
    values = shape.hidden + 8 * shape.hidden + 4 * shape.active + 5 * (shape.attention + shape.key_value)
    assert memory_estimate(config, shape)["activations of a micro-batch"] == n * values * 2
    offloads = config.model_copy(
        update={"model": config.model.model_copy(update={"gradient_checkpointing": "offload"})}
    )
    assert host_estimate(offloads, shape)["layer inputs (model.gradient_checkpointing)"] == n * shape.hidden * 2


@pytest.mark.ranks
def test_adapters_on_one_gpu(tmp_path: Path) -> None:
    four_layers = with_layers(LORA, 4, tmp_path)
    config, shape, found = simulated(LORA, four_layers)
    assert config.model.lora is not None
    trained = shape.adapter_parameters(config.model.lora)
    inputs = 4 * 20480 * shape.hidden  # what checkpointing may keep of the first layer: its input and the gradient
    assert 0 <= found.held - (2 * shape.parameters + 14 * trained) < 1.1 * inputs
    assert host_estimate(config, shape) == {ASLEEP: 2 * shape.parameters}
    assert found.host == pytest.approx(2 * shape.parameters, rel=1e-3)
    awake = load_config(LORA, [four_layers, "rollout.vllm.sleep=false"])
    assert phase_estimate(awake, memory_estimate(awake, shape))["update"] > int(0.7 * GPU_MEMORY)


def test_a_judge_and_copies_for_checkpoints_take_memory() -> None:
    """A judge is on the GPU in the rollout only, and in the host's memory otherwise."""
    judge = ["reward.kind=judge", "reward.judge.model=Qwen/Qwen2.5-32B"]
    config, judged = load_config(LORA, judge), model_shape(ModelConfig(path="Qwen/Qwen2.5-32B"))
    assert judged is not None
    found = Simulation(20480, {"all of it": 2**34}, 0, 0, 2**34, 2 * 151936 * 4096, {}, {})
    before, after = phase_peaks(load_config(LORA), found), phase_peaks(config, found)
    more = {phase: after[phase] - before[phase] for phase in before}
    assert more == dict.fromkeys(before, 0) | {"rollout": 2 * judged.parameters}
    assert fits(load_config(LORA), found)
    assert not fits(config, found)
    rows = [describe(one, found) for one in (load_config(LORA), config)]
    assert rows[0]["update"] == rows[1]["update"]
    assert "  judge's weights" in rows[1]


@pytest.mark.ranks
def test_the_hosts_memory_beside_what_is_simulated(tmp_path: Path) -> None:
    one_layer = with_layers(LORA, 1, tmp_path)
    judge = ["reward.kind=judge", f"reward.judge.model={tmp_path}", "run.async_save=true", "rollout.vllm.sleep=false"]
    config, shape, found = simulated(LORA, one_layer, *judge)
    assert config.model.lora is not None
    trained = shape.adapter_parameters(config.model.lora)
    judge_and_files, adapters = (2 + 2) * shape.parameters, 12 * trained
    assert found.host == pytest.approx(judge_and_files + adapters, rel=1e-4)


def measure(path: Path, case: dict[str, Any]) -> dict[str, Any]:
    """The collectives of a full micro-batch, as a rank makes them, and the bytes of weights and moments it holds."""
    config = make_config(**case)
    world = world_of(config)
    learner = Learner(load_policy(path, config.model, torch.device("cpu"), world=world), config)
    mini = full_mini_batch(config, world)
    gathered_once = not config.parallel.reshard_after_forward
    with Observer() as observer, whole_until_backward(learner.policy.root, gathered_once):
        add_up_over_replicas(learner.policy.root, True)
        out = learner.compute_loss(mini, mini.micro_batches[0])
        forward, observer.seen = observer.seen, {}
        out.loss.backward()
    learner.optimizer.step()
    moments = [x for state in learner.optimizer.state.values() for x in state.values() if x.dim()]
    held = sum(local(x).untyped_storage().nbytes() for x in [*learner.policy.model.parameters(), *moments])
    return {"forward": forward, "backward": observer.seen, "held": held}


def measure_all(rank: int, path: Path, cases: list[dict[str, Any]], out: Path) -> None:
    check_each_kind_once()
    results = [measure(path, case) for case in cases]
    if rank == 0:
        out.write_text(json.dumps(results))


LAYOUTS: list[dict[str, int]] = [
    {"gpus": 4},
    {"gpus": 4, "replicate": 2, "sequence": 2},
    {"gpus": 4, "sequence": 2},
    {"gpus": 4, "reshard_after_forward": False},
]


@counts_shards
@pytest.mark.ranks
def test_a_pretended_rank_is_a_real_one(tmp_path: Path, model_folder: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"parallel": layout, "loss": {"objective": name}, "model": {"lora": lora}}
        for layout in LAYOUTS
        for name, lora in (("dapo", None), ("gspo", None), ("dapo", {"rank": 4, "alpha": 8}))
    ]
    on_ranks(4, measure_all, model_folder, cases, tmp_path / "out.json")
    for case, real in zip(cases, json.loads((tmp_path / "out.json").read_text()), strict=True):
        config = make_config(**{**case, "model": {**case["model"], "path": str(model_folder), "tiny": None}})
        found = simulate(config)
        for part in ("forward", "backward"):
            pretended: dict[str, Any] = {kind: list(traffic) for kind, traffic in getattr(found, part).items()}
            assert pretended == real[part], (case, part)
        gathered_twice = "all-gather" in real["backward"]
        assert gathered_twice == case["parallel"].get("reshard_after_forward", True), case
        # The tracker rounds each of some hundred tensors up to the 512 bytes of CUDA's allocator, steps included.
        assert real["held"] <= found.held < real["held"] + 512 * 100, case


def test_a_recipe_that_does_not_fit() -> None:
    config = load_config(SEVEN, ["rollout.vllm.gpu_memory=0.9"])
    held, peak = 11 * 2**30, {"all of it": 22 * 2**30}
    found = Simulation(10240, peak, 0, 0, held, 2 * 152064 * 3584, {}, {})
    assert phase_peaks(config, found)["rollout"] == held + int(0.9 * GPU_MEMORY) > GPU_MEMORY
    assert not fits(config, found)
    awake = load_config(SEVEN, ["rollout.vllm.sleep=false"])
    assert phase_peaks(awake, found)["update"] == 22 * 2**30 + int(0.75 * GPU_MEMORY)


ROOMY = "optimizer.token_budget=99999"


@counts_shards
@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("parallel.gpus=1", "parallel.sequence"),
        ("parallel.sequence=8", "parallel.sequence"),
        ("parallel.replicate=3", "parallel.replicate"),
        ("preference.beta=0.1", "preference"),
        ("model.path=Qwen/Qwen2.5-72B", "model.path"),
    ],
)
def test_what_cannot_be_simulated_is_refused(override: str, key: str, dapo: Dapo) -> None:
    dapo.refuses(key, "train", SEVEN, "--simulate", override, "parallel.rollout_tensor=1", ROOMY)


def test_a_torch_that_counts_whole_tensors_is_refused(dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    dapo.refuses("--simulate: 2.11.0", "train", SEVEN, "--simulate")


@counts_shards
def test_a_simulation_ends_with_whether_it_fits(
    model_folder: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", None)  # the layers are not compiled
    given = ["model.tiny=null", f"model.path={model_folder}", "parallel.gpus=2", "model.compile=true"]
    assert "all-gather" in dapo("train", "tiny", "--simulate", *given)
