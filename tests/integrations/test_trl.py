"""``DapoGRPOTrainer`` against TRL's own trainer: same completions, same metrics, same weights after several updates."""

from __future__ import annotations

import gc
import inspect
import os
import runpy
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e '.[trl]'")
pytest.importorskip("peft", reason="peft is not installed: pip install -c constraints.txt -e '.[trl]'")

import torch
import trl.trainer.utils
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput
from trl_runs import OFF_POLICY, ON_POLICY, Rollouts, Run, assert_same_run, load, save_tiny_model, train

from dapo_kernels.integrations import trl as ours
from dapo_kernels.integrations.trl import LOGPROBS, ONE_CALL, DapoGRPOTrainer
from dapo_runner.run.tiny_model import make_tokenizer

TOLERANCE = 1e-5  # relative, of every logged number
WEIGHTS = 1e-6
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Every training run ends with a full garbage collection: two thirds of a run, for objects of libraries."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def both(tmp_path: Path, model: Path) -> Any:
    """Run TRL's trainer and ours alike; returns (ours, theirs). ``rollouts`` are settings of ``Rollouts``."""

    def run(rollouts: dict[str, bool] | None = None, model: Any = model, **options: Any) -> tuple[Run, Run]:
        def one(trainer_class: type) -> Run:
            chosen = model() if callable(model) else model
            return train(trainer_class, chosen, tmp_path, Rollouts(**(rollouts or {})), **options)

        return one(DapoGRPOTrainer), one(GRPOTrainer)

    return run


def last(run: Run, name: str) -> float:
    """The largest value a metric took."""
    return max(entry[name] for entry in run.log if name in entry)


ONE_PASS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
    "luspo, token ratios": {"loss_type": "luspo", "learning_rate": 0.05},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.3},
    "delta above the clip": {"loss_type": "dapo", "delta": 1.3},
    "delta below the clip": {"loss_type": "dapo", "delta": 1.1},
    "epsilon beyond 1": {"loss_type": "dapo", "epsilon": 1.5},
    "kl": {"loss_type": "dapo", "beta": 0.2},
    "kl without bias correction": {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": False},
    "temperature": {"loss_type": "dapo", "temperature": 0.7, "beta": 0.1},
    "truncated completions masked": {"loss_type": "dapo", "mask_truncated_completions": True},
    "gradient checkpointing": {"loss_type": "dapo", "gradient_checkpointing": True},
    "padding": {"loss_type": "grpo", "pad_to_multiple_of": 8},
    "one micro-batch": {"loss_type": "dapo", "gradient_accumulation_steps": 1, "steps_per_generation": 2},
    "windows across generations": {"loss_type": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 3},
    "evaluation": {
        "loss_type": "dapo",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "beta": 0.1,
    },
}

TWO_PASSES: dict[str, dict[str, Any]] = {
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02},
    "gspo with kl": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "learning_rate": 0.05},
    "vespo": {"loss_type": "vespo"},
    "top entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.2},
    "top entropy with kl": {"loss_type": "grpo", "top_entropy_quantile": 0.5, "beta": 0.1},
    "entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.05},
    "adaptive entropy": {"loss_type": "grpo", "use_adaptive_entropy": True, "entropy_target": 3.23},
    "off-policy mask": {"loss_type": "dapo", "off_policy_mask_threshold": 0.01},
    "cispo, ceiling below 1": {"loss_type": "cispo"},
    "delta of 1 or less": {"loss_type": "dapo", "delta": 0.95},
}


@pytest.mark.parametrize("case", ONE_PASS)
def test_loss_formed_with_its_gradient(both: Any, case: str) -> None:
    mine, theirs = both(**(OFF_POLICY | ONE_PASS[case]))
    assert mine.trainer.loss_route == ONE_CALL
    assert mine.trainer.loss_route_reason == ""
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


def test_adamw_and_clipped_gradients(both: Any) -> None:
    """AdamW divides a gradient by its size: of one near 0 it also magnifies the rounding, to a share of the step."""
    options = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 0.1}
    mine, theirs = both(**(OFF_POLICY | options))
    assert_same_run(mine, theirs, TOLERANCE, 3e-3 * options["learning_rate"])


@pytest.mark.parametrize("case", TWO_PASSES)
def test_trl_formula_on_our_logprobs(both: Any, case: str) -> None:
    mine, theirs = both(**(OFF_POLICY | TWO_PASSES[case]))
    assert mine.trainer.loss_route == LOGPROBS
    assert mine.trainer.loss_route_reason
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_on_policy(both: Any, loss_type: str) -> None:
    """No old log-probs: the ratio is 1 and has a gradient, which the bias-corrected KL feels, too."""
    mine, theirs = both(**ON_POLICY, loss_type=loss_type, beta=0.1, epsilon_high=5.0, learning_rate=0.1)
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


def test_the_comparison_covers_clipped_tokens(both: Any) -> None:
    """What the cases above rely on: ratios go past both bounds, and a completion is cut off."""
    mine, _ = both(**(OFF_POLICY | ONE_PASS["dapo"]))
    assert last(mine, "clip_ratio/low_mean") > 0.05
    assert last(mine, "clip_ratio/high_mean") > 0.05
    assert last(mine, "completions/clipped_ratio") > 0


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_tool_tokens(both: Any, loss_type: str) -> None:
    """Tokens of a tool do not train, and a completion of nothing else still counts in the mean, as in TRL."""
    mine, theirs = both({"masked": True}, **OFF_POLICY, loss_type=loss_type, beta=0.1, learning_rate=0.1)
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


def test_improbable_tool_tokens(both: Any, model: Path, tmp_path: Path) -> None:
    """Nobody computes the log-prob of a tool's token here; that TRL's ratio to the old one is finite is our doing."""
    network = load(model)
    network.lm_head.weight.data *= 600  # log-probs of −100 and below: exp of their negative overflows
    network.save_pretrained(folder := tmp_path / "sure")
    mine, theirs = both({"masked": True}, model=folder, **(OFF_POLICY | {"learning_rate": 0.0}), beta=0.1)
    for first, second in zip(mine.log[:-1], theirs.log[:-1], strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy"):
            assert first[name] == pytest.approx(second[name], rel=1e-3, abs=1e-3), name


def engine(trainer: Any) -> None:
    """As if a vLLM engine had generated: the rollouts bring its log-probs."""
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)


@pytest.mark.parametrize(
    ("mode", "loss_type"),
    [("token_truncate", "dapo"), ("token_mask", "grpo"), ("sequence_truncate", "cispo"), ("sequence_mask", "sapo")],
)
def test_importance_weights_of_an_engine(both: Any, mode: str, loss_type: str) -> None:
    mine, theirs = both(
        {"sampled": True, "masked": True},
        **OFF_POLICY,
        loss_type=loss_type,
        epsilon_high=1.2,
        beta=0.1,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=0.4,
        vllm_importance_sampling_clip_max=1.2,
        prepare=engine,
        learning_rate=0.1,
    )
    assert mine.trainer.loss_route == ONE_CALL
    assert last(mine, "sampling/importance_sampling_ratio/max") > 0
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


def test_importance_weights_of_vespo(both: Any) -> None:
    options = {"vllm_importance_sampling_mode": "token_truncate", "prepare": engine, "loss_type": "vespo"}
    mine, theirs = both({"sampled": True}, **OFF_POLICY, **options)
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


def test_lora(both: Any) -> None:
    """Switched off, the adapter leaves the reference."""
    options = {"trainer_options": {"peft_config": LoraConfig(**LORA, task_type="CAUSAL_LM")}, "learning_rate": 5.0}
    mine, theirs = both(**(OFF_POLICY | options), beta=0.1)
    assert mine.trainer.loss_route == ONE_CALL
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)
    assert torch.equal(mine.weights[(name := "base_model.model.lm_head.weight")], mine.start[name])


def test_lora_trained_before(both: Any, model: Path) -> None:
    """The reference is a copy of the adapter, under a name of its own."""

    def adapted() -> Any:
        torch.manual_seed(1)
        return get_peft_model(load(model), LoraConfig(**LORA, task_type="CAUSAL_LM", init_lora_weights=False))

    mine, theirs = both(model=adapted, **(OFF_POLICY | {"learning_rate": 0.5}), beta=0.1)
    assert "ref" in mine.trainer.model.peft_config
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


def test_lora_with_a_trained_head(both: Any) -> None:
    """``modules_to_save`` wraps the head in a copy that trains in full."""
    lora = LoraConfig(**LORA, task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    mine, theirs = both(**OFF_POLICY, trainer_options={"peft_config": lora}, beta=0.1)
    name = "base_model.model.lm_head.modules_to_save.default.weight"
    assert not torch.equal(mine.weights[name], mine.start[name])
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


def test_prompt_tuning(both: Any) -> None:
    """Virtual tokens shift where the completion lies in the hidden states."""
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    mine, theirs = both(**(OFF_POLICY | {"learning_rate": 5.0}), trainer_options={"peft_config": tuning})
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


class Eager(DapoGRPOTrainer):
    """TRL's own formula on the logits that PEFT's own forward makes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._objective = None

    def _attach(self, model: Any, *, entropy: bool) -> None:
        plain = type(model).forward

        def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            if not fused_lm_head:
                return plain(self, *args, **kwargs)
            labels = kwargs.pop("labels")[:, 1:]
            log_p = plain(self, *args, **kwargs).logits[:, :-1].log_softmax(-1)
            picked = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            scored, entropies = labels != -100, -(log_p.exp() * log_p).sum(-1)
            return FusedCausalLMOutput(log_probs=picked * scored, entropy=entropies * scored, label_mask=scored)

        model.forward = types.MethodType(forward, model)


@pytest.mark.parametrize("case", ["one pass", "two passes"])
def test_lora_on_the_head(tmp_path: Path, model: Path, case: str) -> None:
    options = OFF_POLICY | {"learning_rate": 0.05, "beta": 0.1} | ({} if case == "one pass" else TWO_PASSES["gspo"])

    def one(trainer_class: type) -> Run:
        torch.manual_seed(1)
        lora = {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
        adapted = get_peft_model(load(model), LoraConfig(**lora, task_type="CAUSAL_LM"))
        return train(trainer_class, adapted, tmp_path, Rollouts(), **options)

    mine, theirs = one(DapoGRPOTrainer), one(Eager)
    assert mine.trainer.loss_route == (ONE_CALL if case == "one pass" else LOGPROBS)
    for factor in ("lora_A", "lora_B"):
        name = f"base_model.model.lm_head.{factor}.default.weight"
        assert not torch.equal(mine.weights[name], mine.start[name])
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


def test_lora_on_the_head_is_refused_by_trl(tmp_path: Path, model: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="lm_head"):
        train(DapoGRPOTrainer, model, tmp_path, Rollouts(), **ON_POLICY, trainer_options={"peft_config": lora})


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "tied": {"family": "qwen2", "tie_word_embeddings": True},
    "head with a bias": {"family": "phi"},
    "softcap": {"family": "gemma2", "final_logit_softcapping": 2.0, "head_dim": 8, "query_pre_attn_scalar": 8},
    "logit_scale": {"family": "cohere", "logit_scale": 0.4},
    "logit_scale before a softcap": {"family": "cohere", "logit_scale": 0.4, "final_logit_softcapping": 0.5},
    "logits_scaling": {"family": "granite", "logits_scaling": 3.0},
    "mixture of experts": {
        "family": "mixtral",
        "num_local_experts": 4,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
}


@pytest.mark.parametrize(
    ("case", "level"),
    [*((case, "token") for case in FAMILIES), ("softcap", "sequence"), ("mixture of experts", "sequence")],
)
def test_model_families(both: Any, tmp_path: Path, case: str, level: str) -> None:
    """What models do to their logits, and the load-balancing loss, on both routes."""
    settings = dict(FAMILIES[case])
    tokenizer = make_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(
        settings.pop("family"), vocab_size=len(tokenizer), num_key_value_heads=4, **SMALL, **ids, **settings
    )
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # biases start at 0
    network.save_pretrained(folder := tmp_path / "family")
    options = {"loss_type": "grpo", "importance_sampling_level": level, "beta": 0.1, "temperature": 0.8}
    mine, theirs = both(model=folder, **OFF_POLICY, **options, learning_rate=0.05)
    if case == "mixture of experts":
        assert last(mine, "aux_loss") > 0
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bfloat16_within_its_rounding(
    tmp_path: Path, model: Path, both: Any, loss_type: str, weights: torch.dtype
) -> None:
    """Autocast over float32 weights, and bfloat16 weights: as far from TRL's run as that is from the float32 one."""
    options = {**OFF_POLICY, "loss_type": loss_type, "beta": 0.1, "learning_rate": 0.1, "epsilon_high": 5.0}
    mine, theirs = both(**options, bf16=True, model=lambda: load(model, dtype=weights))
    exact = train(GRPOTrainer, model, tmp_path, Rollouts(), **options)

    def distance(a: Run, b: Run) -> float:
        """Of the paths the weights took."""
        square = sum(float((a.weights[n].double() - b.weights[n].double()).square().sum()) for n in a.weights)
        return square**0.5

    travelled = sum(float((exact.weights[n] - exact.start[n]).square().sum()) for n in exact.weights) ** 0.5
    rounding = distance(theirs, exact)
    assert rounding < 0.2 * travelled
    assert distance(mine, theirs) < 2 * rounding
    assert distance(mine, exact) < 1.5 * rounding
    for first, second in zip(mine.log, theirs.log, strict=True):
        assert first.keys() == second.keys()
        if "loss" in first:
            assert first["loss"] == pytest.approx(second["loss"], abs=2e-2)
            assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=2e-2, abs=2e-2)
            assert first["entropy"] == pytest.approx(second["entropy"], rel=1e-3)


def test_float32_head_of_a_bfloat16_model(both: Any, model: Path) -> None:
    options = {"cast_lm_head_to_fp32": True, "bf16": True, "model": lambda: load(model, dtype=torch.bfloat16)}
    mine, theirs = both(**ON_POLICY, **options, beta=0.1)
    assert mine.trainer.model.lm_head.weight.dtype == torch.float32
    for first, second in zip(mine.log, theirs.log, strict=True):
        if "loss" in first:
            assert first["loss"] == pytest.approx(second["loss"], abs=1e-4)
            assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-2)


def test_own_generation(both: Any) -> None:
    """With TRL's own sampling in place of the fixed completions: the model still generates as before."""
    mine, theirs = both(**ON_POLICY, trainer_options={"rollout_func": None})
    assert "position_ids" in inspect.signature(mine.trainer.model.forward).parameters  # generate asks for it
    assert_same_run(mine, theirs, TOLERANCE, WEIGHTS)


def test_the_example_learns() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_dapo.py"))
    first, _, last = example["main"](steps=30)
    assert last > 1.4 * first


def test_trl_head_is_never_used(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policy, old and reference log-probs all come from here; the loss once per micro-batch."""
    calls = []
    real = ours.linear_dapo_loss
    monkeypatch.setattr(ours, "linear_dapo_loss", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", None)
    train(DapoGRPOTrainer, model, tmp_path, Rollouts(), **OFF_POLICY, beta=0.1)
    assert len(calls) == OFF_POLICY["max_steps"] * OFF_POLICY["gradient_accumulation_steps"]
    train(DapoGRPOTrainer, model, tmp_path, Rollouts(), **OFF_POLICY, beta=0.1, entropy_coef=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"loss_type": "ppo"}, "loss_type 'ppo'.*grpo"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "max_completion_length"),
        ({"loss_type": "sapo", "sapo_temperature_pos": 0.0}, "sapo_tau"),
    ],
)
def test_refused(tmp_path: Path, model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(DapoGRPOTrainer, model, tmp_path, Rollouts(), **(ON_POLICY | options))


def test_zero3_is_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="ZeRO-3"):
        train(DapoGRPOTrainer, model, tmp_path, Rollouts(), **ON_POLICY)


def test_quantized_head_is_refused(tmp_path: Path, model: Path) -> None:
    network = load(model)
    head = network.lm_head.weight
    network.lm_head.weight = torch.nn.Parameter(head.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"\[V, H\].*Linear.*int8"):
        train(DapoGRPOTrainer, network, tmp_path, Rollouts(), **ON_POLICY)
