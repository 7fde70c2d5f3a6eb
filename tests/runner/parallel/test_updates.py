"""One update on many ranks is the update of one: gradients, weights and metrics, in every layout."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import paired, random_sequences, save_model, with_lists
from experts import small_experts
from learners import assert_same_gradients, check_each_kind_once, config_of, open_learner, update, world_of
from ranks import on_ranks
from torch.distributed.tensor import DTensor, distribute_tensor

from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError
from dapo_runner.config import Config, TinyModelConfig
from dapo_runner.parallel.sharding import whole
from dapo_runner.tiny_model import make_model, make_tokenizer
from dapo_runner.types import TrainingSequence

LORA = {"rank": 4, "alpha": 8}
# Beside sections: the dtype; an advantage of the first sequence; how many sequences; the shortest of them; whether the
# engine has given all log-probs.
Case = dict[str, Any]
OFF_POLICY: dict[str, dict[str, Any]] = {  # log-probs of an engine that is another policy
    "gmpo": {},
    "vespo": {"vespo": (0.1, 0.01, 0.2, 0.02)},
    "opsm": {"off_policy_mask": 1.8},
}
CASES: dict[str, Case] = {
    **{name: {"loss": {"objective": name}} for name in ("dapo", "gspo", "kl_cov", "top_entropy")},
    **{
        name: {"loss": {"objective": name, "old_logprobs": "engine", "overrides": overrides}}
        for name, overrides in OFF_POLICY.items()
    },
    "clip_cov": {"loss": {"objective": "clip_cov", "overrides": {"clip_cov": (0.2, -10.0, 10.0)}}},
    "one sequence": {"n": 1},  # a rank, or three, with nothing to do
    "accumulated": {"n": 40, "optimizer": {"token_budget": 48}, "sampler": {"prompts_per_step": 10}},
    # One sequence in a micro-batch: its bfloat16 gradient is the same on any rank, and so is their float32 sum.
    "bfloat16": {"dtype": "bfloat16", "optimizer": {"token_budget": 24}, "longer_than": 12},
    "lora": {"model": {"lora": LORA}},
    "kl": {"loss": {"overrides": {"kl_coef": 0.1}}},
    "prompt mean": {"loss": {"overrides": {"aggregate": "prompt-mean-token-mean"}}, "optimizer": {"token_budget": 48}},
    "poisoned": {"poisoned": float("inf")},
    "checkpointing": {"model": {"gradient_checkpointing": True}},
    "compiled": {"model": {"compile": True}},
    "checkpointing, compiled": {"model": {"gradient_checkpointing": True, "compile": True}},
    "distillation": {"distillation": {"teacher": "x"}},
    "pairs": {"preference": {"reference": "step"}},
    "pairs with a reference": {"preference": {}},
    "corrected": {"rollout": {"correction": {"weights": "sequence"}}},
    "episodes": {"env": {"tools": ["none:none"]}, "rollout": {"correction": {"weights": "sequence"}}},
    "support": {"rollout": {"top_k": 6, "sampling_mask": True}, "loss": {"overrides": {"kl_coef": 0.1}}},
    "reinforce_pp": {"advantage": {"kind": "returns"}, "reward": {"kl": {"coef": 0.1}}},
    "ppo": {
        "advantage": {"kind": "gae"},
        "critic": {},
        "reward": {"kl": {"coef": 0.1, "estimator": "k3"}},
        "loss": {"objective": "ppo", "reference_ema": 0.9},
    },
}
EVERYWHERE = ["gspo", "prompt mean", "distillation", "vespo", "clip_cov"]  # what reads whole sequences or all of them
EVERYWHERE += ["one sequence", "accumulated", "pairs", "ppo", "support", "episodes", "lora on the head"]
ON_FOUR = {"gspo", "prompt mean", "clip_cov", "ppo"}  # in both layouts of four ranks, which share the others
CASES["gmpo"]["is_known"] = False
CASES["lora on the head"] = {"model": {"lora": {**LORA, "targets": ["q_proj", "lm_head"]}}}
TWO_UPDATES = {"optimizer": {"mini_batch_size": 8, "lr": 3e-3}}
ROUTED = {f"routed by the {who}": {"loss": {"routing_replay": who}, **TWO_UPDATES} for who in ("trainer", "engine")}
FLOAT16 = {
    f"float16, {name}": {"dtype": "float16", "model": model, "poisoned": poisoned}
    for name, model in (("full", {}), ("lora", {"lora": LORA}))
    for name, poisoned in ((name, 0.0), (f"{name}, overflow", 1e12))
}
CASES |= ROUTED | FLOAT16
SHARED = {name for name in CASES if "compiled" not in name} - set(ROUTED) - {"lora on the head"}
GATHERED_ONCE = ("dapo", "distillation", "clip_cov", "accumulated", "ppo", "lora")
# Layout → the model, and the cases that it runs.
LAYOUTS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"gpus": 2}, "tied", sorted(SHARED)),
    ({"gpus": 2, "reshard_after_forward": False}, "tied", list(GATHERED_ONCE)),
    ({"gpus": 2, "sequence": 2}, "untied", EVERYWHERE),
    ({"gpus": 2}, "experts", list(ROUTED)),
    ({"gpus": 2, "sequence": 2}, "experts", list(ROUTED)),
    ({"gpus": 4, "replicate": 2, "sequence": 2}, "untied", sorted(ON_FOUR | {*EVERYWHERE[::2]})),
    ({"gpus": 4, "replicate": 2}, "tied", ["dapo", "accumulated", "ppo", "bfloat16"]),
    ({"gpus": 4, "sequence": 4}, "untied", sorted(ON_FOUR | {*EVERYWHERE[1::2]})),
]


def save_models(folder: Path) -> None:
    """Four query heads and two key heads, with tied embeddings and without; and a mixture of experts."""
    tokenizer = make_tokenizer()
    sizes = TinyModelConfig(layers=2, hidden_size=32, heads=4, intermediate_size=64)
    for name in ("tied", "untied"):
        torch.manual_seed(7)
        model = make_model(sizes, tokenizer, max_positions=256)
        model.config.num_key_value_heads, model.config.tie_word_embeddings = 2, name == "tied"
        model = type(model)(model.config)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 4.0 if parameter.dim() > 1 else 1.0
                parameter.copy_((scale * parameter).bfloat16())  # one process rounds weights as it loads them
        save_model(model, tokenizer, folder / name)
    save_model(small_experts(), tokenizer, folder / "experts")


def sequences_for(config: Config, count: int, seed: int = 0) -> list[TrainingSequence]:
    """Random sequences with what the settings need."""
    sequences = random_sequences(count, seed)
    if config.preference is not None:
        return paired(sequences)
    if config.rollout.sampling_mask:
        return with_lists(sequences, vocab=20)
    if config.env is not None:  # every third token is an environment's
        own = [torch.arange(sequence.length) % 3 > 0 for sequence in sequences]
        return [
            replace(x, mask=x.mask & mask, rollout_logprobs=x.rollout_logprobs.where(mask, 0.0))
            for x, mask in zip(sequences, own, strict=True)
        ]
    if config.loss.routing_replay == "engine":  # two of eight experts for each of two layers
        first = [sequence.token_ids[:-1].cumsum(0) for sequence in sequences]
        experts = [torch.stack([(x + k) % 8 for k in (0, 3, 1, 6)], dim=1).to(torch.uint8) for x in first]
        return [replace(x, experts=chosen) for x, chosen in zip(sequences, experts, strict=True)]
    if config.advantage.by_token:
        return [replace(sequence, reward=n % 3 - 0.7) for n, sequence in enumerate(sequences)]
    return sequences


def fill_adapters(learner: Learner) -> None:
    """B = 0 would leave A without a gradient."""
    with torch.no_grad():
        for name, parameter in learner.policy.model.named_parameters():
            if ".lora_B." in name:
                value = torch.linspace(0.0, 0.02, parameter.numel()).view(parameter.shape).to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)


def prepare_shares(learner: Learner, sequences: list[TrainingSequence]) -> list[MiniBatch]:
    """A step whose sequences rank 0 has. Ranks receive what they train on, and nothing larger than flags. Rank 0
    pickles it once for the ranks that share it.
    """
    world, gathered, all_gather = learner.world, list[int](), dist.all_gather_object
    pickled = list[MiniBatch]()

    def count(mini: MiniBatch, protocol: Any) -> Any:
        pickled.append(mini)
        return object.__reduce_ex__(mini, protocol)

    def all_gather_object(items: list[Any], item: Any, **options: Any) -> None:
        all_gather(items, item, **options)
        gathered.append(len(pickle.dumps(items)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", all_gather_object)
        patch.delattr(dist, "broadcast_object_list")
        patch.setattr(MiniBatch, "__reduce_ex__", count)
        minis = learner.prepare(sequences if world.is_main else [])
    assert max(gathered, default=0) < 1000
    assert len(pickled) <= (world.data_size * len(minis) if world.is_main else 0)
    return minis


def run_case(path: Path, name: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """The gradient of the last update of a step, its metrics, and all weights after it."""
    case = dict(CASES[name])
    n, poisoned, longer_than = case.pop("n", 14), case.pop("poisoned", 0.0), case.pop("longer_than", 0)
    is_known = case.pop("is_known", True)
    if "distillation" in case:
        case["distillation"] = {"teacher": str(path)}
    optimizer = {"eps": 1e-2, **case.pop("optimizer", {})}  # the step of a tiny gradient is as smooth as it is
    config = config_of(path, **case, optimizer=optimizer, parallel=parallel)
    world = world_of(config)
    learner = open_learner(path, config, world)
    fill_adapters(learner)
    sequences = [one for one in sequences_for(config, n) if one.length > longer_than]
    if poisoned:
        sequences[0].advantages[-1] = poisoned  # one rank's alone
    if not is_known:
        sequences[0].rollout_logprobs[-1] = torch.nan
    *earlier, mini = prepare_shares(learner, sequences)
    for one in earlier:
        learner.update(one, 0)
    try:
        gradients, metrics = update(learner, mini)
    except NonFiniteUpdateError as error:
        return {"stopped": world.all_gather_object(str(error))}
    metrics |= learner.step_metrics([mini], [metrics])
    learner.move_reference()
    weights = dict(learner.policy.named_weights())
    for part in learner.parts():
        weights |= {f"{part.prefix}{name}": whole(x.detach()) for name, x in part.tensors.items() if part.prefix}
    return {"gradients": gradients, "metrics": metrics, "weights": weights}


def run_layouts(rank: int, n: int, models: Path) -> None:
    check_each_kind_once()
    found = [
        run_case(models / model, name, parallel)
        for parallel, model, names in LAYOUTS
        if parallel["gpus"] == n
        for name in names
    ]
    if rank == 0:
        torch.save(found, models / f"on{n}.pt")


def test_an_update_is_that_of_one_process(tmp_path: Path) -> None:
    """In float16 within its rounding; a gradient that overflows on one rank skips the update of all."""
    save_models(tmp_path)
    alone: dict[tuple[str, str], dict[str, Any]] = {}
    for n in (2, 4):
        on_ranks(n, run_layouts, n, tmp_path)
        found = iter(torch.load(tmp_path / f"on{n}.pt"))
        for parallel, model, names in LAYOUTS:
            for name in names if parallel["gpus"] == n else ():
                if (name, model) not in alone:
                    alone[name, model] = run_case(tmp_path / model, name, {})
                compare(next(found), alone[name, model], f"{name}, {parallel}")


COMPILED = ("checkpointing", "compiled", "checkpointing, compiled")


def run_compiled(rank: int, models: Path) -> None:
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    found = []
    for name in COMPILED:
        torch.compiler.reset()
        found.append(run_case(models / "tied", name, {"gpus": 2}))
    if rank == 0:
        torch.save(found, models / "compiled.pt")


@pytest.mark.slow
def test_compiled_layers_of_ranks_do_the_same(tmp_path: Path) -> None:
    """Two minutes. Layers that run again take the graph that they took at first."""
    save_models(tmp_path)
    on_ranks(2, run_compiled, tmp_path)
    expected, *others = torch.load(tmp_path / "compiled.pt")
    for name, found in zip(COMPILED[1:], others, strict=True):
        compare(found, expected, name)


def compare(got: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    assert got.keys() == expected.keys(), case
    if "stopped" in expected:
        assert set(got["stopped"]) == set(expected["stopped"]), case
        return
    is_half = case.startswith("float16")
    assert ("overflow" in case) == bool(expected["metrics"].get("skipped_updates")), case
    if "overflow" not in case:
        assert_same_gradients(got["gradients"], expected["gradients"], 2e-2 if is_half else 1e-5, case)
    for name, weight in expected["weights"].items():
        # A weight in half precision may round to its neighbour.
        close = 1e-5 if weight.dtype == torch.float32 else 1e-3
        assert (got["weights"][name] - weight).norm() <= close * weight.norm(), (case, name)
    assert got["weights"].keys() == expected["weights"].keys(), case
    metrics = {key: value for key, value in expected["metrics"].items() if value < float("inf")}
    rel = 2e-2 if is_half else 1e-5
    assert {key: got["metrics"][key] for key in metrics} == pytest.approx(metrics, rel=rel, abs=rel / 10), case
