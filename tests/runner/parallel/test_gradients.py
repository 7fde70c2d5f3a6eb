"""One update on many ranks is the update of one: gradients, weights and figures, for every objective and layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import save_model
from experts import small_experts
from launch import torchrun
from safetensors.torch import load_file

from dapo_kernels import OBJECTIVES
from dapo_runner.config import TinyModelConfig
from dapo_runner.run.tiny_model import make_model, make_tokenizer

# A micro-batch holds one sequence, so that its bfloat16 gradient is the same on any rank and the float32 sum too.
ONE_SEQUENCE = 20
FLOAT32 = {"tiny": {}, "dtype": "float32"}
PAIRS = {"optimizer": {"token_budget": 190}, "sampler": {"prompts_per_step": 8}}
LIKE_ANOTHER = {"lite_ppo", "two_sided", "luspo", "dppo_kl"}  # but for numbers
# What reads the whole mini-batch, or whole sequences, in every layout; the rest of the table on two ranks.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"model": FLOAT32, "loss": {"objective": name}} for name in OBJECTIVES.keys() - LIKE_ANOTHER},
    "one_sequence": {"model": FLOAT32, "sequences": 1},  # a rank, or three, with nothing to do
    "accumulated": {"model": FLOAT32, "optimizer": {"token_budget": 96}, "sequences": 40},
    "bfloat16": {
        "model": {**FLOAT32, "dtype": "bfloat16"},
        "rollout": {"max_prompt_tokens": 5, "max_response_tokens": ONE_SEQUENCE - 5},
        "optimizer": {"token_budget": ONE_SEQUENCE},
        "reward": {"overlong": {"soft_punishment": False}},
        "longer_than": ONE_SEQUENCE // 2,
    },
    "lora": {"model": {**FLOAT32, "lora": {"rank": 4, "alpha": 8}}},
    "kl": {"model": FLOAT32, "loss": {"overrides": {"kl_coef": 0.1}}},
    "prompt mean": {
        "model": FLOAT32,
        "loss": {"overrides": {"aggregate": "prompt-mean-token-mean"}},
        "optimizer": {"token_budget": 96},
    },
    "poisoned": {"model": FLOAT32, "poisoned": float("inf")},
    "checkpointing": {"model": {**FLOAT32, "gradient_checkpointing": True}},
    "distillation": {"model": FLOAT32, "distillation": {"teacher": "x"}},
    "pairs": {"model": FLOAT32, "preference": {"reference": "step"}, **PAIRS},
    "pairs with a reference": {"model": FLOAT32, "preference": {}, **PAIRS},
    "corrected": {"model": FLOAT32, "rollout": {"correction": {"weights": "sequence"}}},
    "episodes": {
        "model": FLOAT32,
        "env": {"tools": ["none:none"]},
        "rollout": {"correction": {"weights": "sequence"}},
    },
    "kept": {
        "model": FLOAT32,
        "rollout": {"top_k": 6, "sampling_mask": True},
        "loss": {"overrides": {"kl_coef": 0.1}},
    },
    "shared_trunk": {"model": FLOAT32, "advantage": {"kind": "gae"}, "critic": {"share_trunk": True}},
    "reinforce_pp": {"model": FLOAT32, "advantage": {"kind": "returns"}, "reward": {"kl": {"coef": 0.1}}},
    "ppo": {
        "model": FLOAT32,
        "advantage": {"kind": "gae"},
        "critic": {},
        "reward": {"kl": {"coef": 0.1, "estimator": "k3"}},
        "loss": {"objective": "ppo", "reference_ema": 0.9},
    },
}
OFF_POLICY: dict[str, dict[str, Any]] = {  # log-probs of an engine that is another policy
    "gmpo": {},
    "vespo": {"vespo": (0.1, 0.01, 0.2, 0.02)},
    "opsm": {"off_policy_mask": 1.8},
    "dppo_tv": {},
    "dro": {},
}
for name, overrides in OFF_POLICY.items():
    CASES[name]["loss"] |= {"old_logprobs": "rollout", "overrides": overrides}
CASES["accumulated"]["sampler"] = {"prompts_per_step": 10}
LAYOUTS: dict[str, dict[str, int]] = {
    "shard 2": {"gpus": 2},
    "sequence 2": {"gpus": 2, "sequence": 2},
    "shard 4": {"gpus": 4},
    "replicate 2, shard 2": {"gpus": 4, "replicate": 2},
    "shard 4, sequence 2": {"gpus": 4, "sequence": 2},
    "sequence 4": {"gpus": 4, "sequence": 4},
}
ROUTED = {  # the second of two updates, on a model of its own
    "model": {"path": "x", "tiny": None, "dtype": "float32"},
    "loss": {"routing_replay": True},
    "optimizer": {"mini_batch_size": 8, "token_budget": 96, "lr": 3e-3, "warmup_steps": 0},
}
SELECTED = ["gspo", "prompt mean", "distillation", "vespo", "clip_cov"]
SELECTED += ["one_sequence", "accumulated", "pairs", "ppo", "kept", "episodes"]
GATHERED_ONCE = ("dapo", "distillation", "clip_cov", "accumulated", "ppo", "lora")
UNTIED = ("shard 2", "shard 4, sequence 2")
OF_UNTIED: dict[str, dict[str, Any]] = {
    **{name: CASES[name] for name in SELECTED},
    "lora on the head": {"model": {**FLOAT32, "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "lm_head"]}}},
}


def small_model(folder: Path, tied: bool) -> Path:
    """Four query heads, two key heads."""
    torch.manual_seed(7)
    tokenizer = make_tokenizer()
    sizes = TinyModelConfig(layers=2, hidden_size=32, heads=4, intermediate_size=64)
    model = make_model(sizes, tokenizer, max_positions=256)
    model.config.num_key_value_heads, model.config.tie_word_embeddings = 2, tied
    model = type(model)(model.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return save_model(model, tokenizer, folder)


def results(n: int, cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    (folder / "cases.json").write_text(json.dumps(list(cases.values())))
    done = torchrun(n, Path(__file__).with_name("gradients.py"), folder / "cases.json", folder / "out.pt")
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(cases, torch.load(folder / "out.pt"), strict=True))


def test_an_update_is_that_of_one_process(tmp_path: Path) -> None:
    tied, untied = (str(small_model(tmp_path / name, name == "tied")) for name in ("tied", "untied"))
    on_one = {(name, tied): {**case, "path": tied} for name, case in CASES.items()}
    on_one |= {(name, untied): {**case, "path": untied} for name, case in OF_UNTIED.items()}
    experts = str(save_model(small_experts(), make_tokenizer(), tmp_path / "experts"))
    on_one["routed", experts] = {**ROUTED, "path": experts}
    on_one["routed by the engine", experts] = {**ROUTED, "path": experts, "loss": {"routing_replay": "engine"}}
    alone = dict(
        zip(on_one, results(1, {str(key): case for key, case in on_one.items()}, tmp_path).values(), strict=True)
    )
    for n in (2, 4):
        cases, expected = {}, {}
        for layout, parallel in LAYOUTS.items():
            if parallel["gpus"] != n:
                continue
            if layout == "shard 2":
                for name in GATHERED_ONCE:
                    label, once = f"{name}, gathered once", {**parallel, "reshard_after_forward": False}
                    cases[label], expected[label] = {**on_one[name, tied], "parallel": once}, alone[name, tied]
            wanted = [(name, tied) for name in (CASES if layout == "shard 2" else SELECTED)]
            wanted += [(name, untied) for name in OF_UNTIED if layout in UNTIED]
            wanted += [(name, experts) for name in ("routed", "routed by the engine")] if n == 2 else []
            for key in wanted:
                label = f"{key[0]}, {layout}, {Path(key[1]).name}"
                cases[label], expected[label] = {**on_one[key], "parallel": parallel}, alone[key]
        for label, got in results(n, cases, tmp_path).items():
            compare(got, expected[label], label)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_ranks_share_the_loss_scale_of_float16(tmp_path: Path, lora: dict[str, int] | None) -> None:
    """A gradient that overflows on one rank skips the update of all."""
    shared = {"path": str(small_model(tmp_path / "model", tied=True)), "model": {"dtype": "float16", "lora": lora}}
    cases = {"held": shared, "overflows": {**shared, "poisoned": 1e12}}
    alone = results(1, cases, tmp_path)
    together = results(2, {name: {**case, "parallel": {"gpus": 2}} for name, case in cases.items()}, tmp_path)
    for name, gradient in alone["held"]["gradients"].items():
        assert (together["held"]["gradients"][name] - gradient).norm() <= 0.02 * gradient.norm(), name
    for found in (alone, together):
        assert [found[name]["figures"]["skipped_updates"] for name in cases] == [0.0, 1.0]
        if lora is None:
            for name, weight in load_file(tmp_path / "model" / "model.safetensors").items():
                assert torch.equal(found["overflows"]["weights"][name], weight.half()), name


def compare(got: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    if "stopped" in expected:
        assert got["stopped"] == expected["stopped"], case
        return
    assert got["gradients"].keys() == expected["gradients"].keys(), case
    for name, gradient in expected["gradients"].items():
        assert (got["gradients"][name] - gradient).norm() <= 1e-5 * gradient.norm(), (case, name)
    assert got["weights"].keys() == expected["weights"].keys(), case
    for name, weight in expected["weights"].items():
        close = 1e-5 if weight.dtype == torch.float32 else 1e-3  # a weight in bfloat16 may round to its neighbour
        assert (got["weights"][name] - weight).norm() <= close * weight.norm(), (case, name)
    assert got["figures"] == pytest.approx(expected["figures"], rel=1e-5, abs=1e-6), case
