"""``DapoGRPOTrainer`` against TRL's own trainer: same completions, same metrics, same weights after several updates."""

from __future__ import annotations

import inspect
import runpy
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e '.[trl]'")
pytest.importorskip("peft", reason="peft is not installed: pip install -c constraints.txt -e '.[trl]'")

import torch
import trl.trainer.utils
from accelerate import FullyShardedDataParallelPlugin
from datasets import IterableDataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from policy_batches import VOCAB, Capped, gradients, network, relative_error
from ranks import on_ranks
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.integrations import deepspeed
from trl import GRPOTrainer
from trl_runs import (
    OFF_POLICY,
    ON_POLICY,
    Kept,
    Rollouts,
    Run,
    assert_same_run,
    load,
    make_trainer,
    save_tiny_model,
    train,
)

from dapo_kernels import Objective
from dapo_kernels.integrations.heads import LogitRule
from dapo_kernels.integrations.trl import (
    LOGPROBS,
    ONE_CALL,
    DapoGRPOTrainer,
    LossCall,
    _LossScorer,
    attach_scoring,
    prompt_counts,
)
from dapo_runner.tiny_model import make_tokenizer

LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
MASKED = {"rollouts": {"masked": True}}  # some tokens are a tool's
SEQUENCE = {"importance_sampling_level": "sequence"}
PROMPT_MEAN = "prompt-mean-token-mean"

CLOSE = {"beta": 0.1, "epsilon_high": 5.0, "learning_rate": 0.1}

ONE_PASS: dict[str, dict[str, Any]] = {
    "on-policy": CLOSE,
    "on-policy, cispo": {"loss_type": "cispo", **CLOSE},
    "grpo, tool tokens": {"loss_type": "grpo", "beta": 0.1, "learning_rate": 0.1, "pad_to_multiple_of": 8, **MASKED},
    "grpo, KL of the reference alone": {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": False},
    "bnpo, tool tokens": {"loss_type": "bnpo", "beta": 0.1, "learning_rate": 0.1, **MASKED},
    "dr_grpo, 20 tokens": {"loss_type": "dr_grpo", "temperature": 0.7, "beta": 0.1, "max_completion_length": 20},
    "dapo, tool tokens, checkpointing": {"beta": 0.1, "learning_rate": 0.1, "gradient_checkpointing": True, **MASKED},
    "windows across generations": {"mask_truncated_completions": True, "steps_per_generation": 3},
    "luspo, token ratios": {"loss_type": "luspo", "learning_rate": 0.05},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.3},
    "delta above the clip, epsilon beyond 1": {"delta": 1.3, "epsilon": 1.5},
    "delta below the clip": {"delta": 1.1, "gradient_accumulation_steps": 1, "steps_per_generation": 2},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "beta": 0.1},
}
TWO_PASSES: dict[str, dict[str, Any]] = {
    "on-policy, vespo": {"loss_type": "vespo", **CLOSE},
    "gspo with kl": {"loss_type": "grpo", **SEQUENCE, "beta": 0.1},
    "luspo": {"loss_type": "luspo", **SEQUENCE, "learning_rate": 0.05},
    "vespo": {"loss_type": "vespo"},
    "top entropy with kl": {"loss_type": "grpo", "top_entropy_quantile": 0.5, "beta": 0.1},
    "entropy bonus": {"entropy_coef": 0.05},
}
# Further settings that need the second route, each with the one that its reason names.
NAMED: dict[str, dict[str, Any]] = {
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.01},
    "use_adaptive_entropy": {"use_adaptive_entropy": True, "entropy_target": 3.23},
    "delta": {"delta": 1.0},
    "epsilon_high": {"loss_type": "cispo"},
}


@pytest.fixture
def both(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run TRL's trainer and ours alike; returns (ours, theirs). ``rollouts`` are settings of ``Rollouts``."""

    def run(rollouts: dict[str, bool] | None = None, model: Any = model, **options: Any) -> tuple[Run, Run]:
        def one(trainer_class: type) -> Run:
            chosen = model() if callable(model) else model
            return train(trainer_class, chosen, tmp_path, Rollouts(**(rollouts or {})), **options)

        with monkeypatch.context() as patch:  # policy, old and reference log-probs all come from our head
            patch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", None)
            mine = one(DapoGRPOTrainer)
        return mine, one(GRPOTrainer)

    return run


def last(run: Run, name: str) -> float:
    """Return the largest value a metric took."""
    return max(entry[name] for entry in run.log if name in entry)


@pytest.mark.parametrize("case", [*ONE_PASS, *TWO_PASSES])
def test_the_same_run(both: Any, case: str) -> None:
    """The loss formed with its gradient, or TRL's formula on our log-probs."""
    base = ON_POLICY if case.startswith("on-policy") else OFF_POLICY
    mine, theirs = both(**{**base, "loss_type": "dapo", **(ONE_PASS | TWO_PASSES)[case]})
    assert (mine.trainer.loss_route_reason == "") == (case in ONE_PASS)
    assert mine.trainer.loss_route == (ONE_CALL if case in ONE_PASS else LOGPROBS)
    assert_same_run(mine, theirs)


class Changes(TrainerCallback):
    """Changes a setting after each step, at last to one of the second route."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        name, value = [("beta", 0.5), ("epsilon_high", 0.0), ("entropy_coef", 0.1)][min(state.global_step, 3) - 1]
        setattr(self.trainer, name, value)


def test_settings_may_change_during_training(both: Any) -> None:
    options = {"loss_type": "dapo", "beta": 0.1, "prepare": lambda trainer: trainer.add_callback(Changes(trainer))}
    mine, theirs = both(**OFF_POLICY | options)
    assert mine.trainer.loss_route == LOGPROBS
    assert_same_run(mine, theirs)


@pytest.mark.parametrize("name", NAMED)
def test_what_needs_the_second_route_is_named(tmp_path: Path, model: Path, name: str) -> None:
    options = {"loss_type": "dapo", **ON_POLICY, **NAMED[name]}
    trainer = make_trainer(DapoGRPOTrainer, model, tmp_path, Rollouts(), **options)
    assert trainer.loss_route == LOGPROBS
    assert trainer.loss_route_reason.startswith(f"{name}=")


def test_an_overridden_method_trains_on_what_it_returns(tmp_path: Path, model: Path) -> None:
    def halved(trainer_class: type) -> Run:
        class Halved(trainer_class):  # type: ignore[misc]
            def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
                logprobs, *rest = super()._get_per_token_logps_and_entropies(*args, **options)
                return (logprobs * 0.5, *rest)

        return train(Halved, model, tmp_path, Rollouts(), **ON_POLICY)

    mine, theirs = halved(DapoGRPOTrainer), halved(GRPOTrainer)
    assert mine.trainer.loss_route == LOGPROBS
    assert "_get_per_token_logps_and_entropies" in mine.trainer.loss_route_reason
    assert_same_run(mine, theirs)


def test_improbable_tool_tokens(both: Any, model: Path, tmp_path: Path) -> None:
    """Nobody computes the log-prob of a tool's token here; that TRL's ratio to the old one is finite is our doing."""
    network = load(model)
    network.lm_head.weight.data *= 600  # log-probs of −100 and below: exp of their negative overflows
    network.save_pretrained(folder := tmp_path / "sure")
    mine, theirs = both(**MASKED, model=folder, **(OFF_POLICY | {"learning_rate": 0.0}), beta=0.1)
    for first, second in zip(mine.log[:-1], theirs.log[:-1], strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy"):
            assert first[name] == pytest.approx(second[name], rel=1e-3, abs=1e-3), name


def engine(trainer: Any) -> None:
    """As if a vLLM engine had generated: the rollouts bring its log-probs."""
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)


@pytest.mark.parametrize(("mode", "loss_type"), [("token_mask", "dapo"), ("sequence_truncate", "sapo")])
def test_importance_weights_of_an_engine(both: Any, mode: str, loss_type: str) -> None:
    bounds = {"vllm_importance_sampling_clip_min": 0.4, "vllm_importance_sampling_clip_max": 1.2}
    options = {"loss_type": loss_type, "beta": 0.1, "vllm_importance_sampling_mode": mode, "learning_rate": 0.1}
    rollouts = {"sampled": True, "masked": True}
    mine, theirs = both(rollouts, **OFF_POLICY | options | bounds, prepare=engine)
    assert mine.trainer.loss_route == ONE_CALL
    assert last(mine, "sampling/importance_sampling_ratio/max") > 0
    assert_same_run(mine, theirs)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(**LORA),
        LoraConfig(**LORA, modules_to_save=["lm_head"]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=["lora", "lora and a trained head", "virtual tokens before the completion"],
)
def test_adapters(both: Any, config: Any) -> None:
    """Switched off, the adapter leaves the reference."""
    head = getattr(config, "modules_to_save", None) is not None
    beta = 0.0 if isinstance(config, PromptTuningConfig) else 0.1
    options = OFF_POLICY | {"learning_rate": 0.5 if head else 5.0, "beta": beta}
    mine, theirs = both(**options, trainer_options={"peft_config": config})
    moved = {name for name in mine.weights if not torch.equal(mine.weights[name], mine.start[name])}
    assert any("lm_head" in name for name in moved) == head
    assert_same_run(mine, theirs)


def test_lora_on_the_head(tmp_path: Path, model: Path) -> None:
    """Log-probs, and a loss with their gradient, are those of PEFT's own forward."""
    lora = {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
    adapted = get_peft_model(load(model), LoraConfig(**lora, task_type="CAUSAL_LM"))
    make_trainer(DapoGRPOTrainer, adapted, tmp_path, Rollouts(), **ON_POLICY)
    ids = torch.arange(3, 15).view(2, 6)
    logprobs = adapted(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    logprobs.sum().backward()
    expected = gradients(adapted)
    assert sum("lm_head" in name for name in expected) == 2
    on_policy = LossCall(Objective(), torch.ones(2, 5, dtype=torch.bool), -torch.ones(2), None, None, None, 1.0)
    for call in (None, lambda: on_policy):
        out = adapted(input_ids=ids, labels=ids, fused_lm_head=True, dapo_loss=call)
        torch.testing.assert_close(out.log_probs, logprobs)
        (out.log_probs.sum() if call is None else out.loss).backward()
        assert relative_error(gradients(adapted), expected) < 1e-5


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "phi": {},  # its head has a bias
    "cohere": {"logit_scale": 0.4},
    "gemma2": {"final_logit_softcapping": 0.5, "head_dim": 8},
    "mixtral": EXPERTS,
}


@pytest.mark.parametrize(
    ("family", "level"),
    [(name, "token") for name in ("qwen2", "phi", "gemma2", "mixtral")]
    + [("cohere", "sequence"), ("mixtral", "sequence")],
)
def test_model_families(both: Any, tmp_path: Path, family: str, level: str) -> None:
    """What models do to their logits, and the load-balancing loss, on both routes."""
    tokenizer = make_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "num_key_value_heads": 4, **SMALL}
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **ids, **FAMILIES[family]))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # biases start at 0
    network.save_pretrained(folder := tmp_path / "family")
    options = {"loss_type": "grpo", "importance_sampling_level": level, "beta": 0.1, "temperature": 0.8}
    mine, theirs = both(model=folder, **OFF_POLICY | options | {"learning_rate": 0.05})
    assert family != "mixtral" or last(mine, "aux_loss") > 0
    assert_same_run(mine, theirs)


@pytest.mark.parametrize(("loss_type", "weights"), [("dapo", torch.float32), ("vespo", torch.bfloat16)])
def test_bfloat16_within_its_rounding(
    tmp_path: Path, model: Path, both: Any, loss_type: str, weights: torch.dtype
) -> None:
    """Autocast over float32 weights, and bfloat16 weights: as far from TRL's run as that is from the float32 one."""
    options = {**OFF_POLICY, "loss_type": loss_type, "beta": 0.1, "learning_rate": 0.1, "epsilon_high": 5.0}
    mine, theirs = both(**options, bf16=True, model=lambda: load(model, dtype=weights))
    exact = train(GRPOTrainer, model, tmp_path, Rollouts(), **options)

    def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
        return sum(float((a[name].double() - b[name].double()).square().sum()) for name in a) ** 0.5

    rounding = distance(theirs.weights, exact.weights)
    assert rounding < 0.2 * distance(exact.weights, exact.start)
    assert distance(mine.weights, theirs.weights) < 2 * rounding
    assert distance(mine.weights, exact.weights) < 1.5 * rounding
    for first, second in zip(mine.log[:-1], theirs.log[:-1], strict=True):
        assert first["loss"] == pytest.approx(second["loss"], abs=2e-2)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=2e-2, abs=2e-2)
        assert first["entropy"] == pytest.approx(second["entropy"], rel=1e-3)


def test_a_float32_head_of_a_bfloat16_model(both: Any, model: Path) -> None:
    options = {"cast_lm_head_to_fp32": True, "bf16": True, "model": lambda: load(model, dtype=torch.bfloat16)}
    mine, theirs = both(**ON_POLICY, **options, beta=0.1)
    assert mine.trainer.model.lm_head.weight.dtype == torch.float32
    for first, second in zip(mine.log[:-1], theirs.log[:-1], strict=True):
        assert first["loss"] == pytest.approx(second["loss"], abs=1e-4)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-2)


def loss_of(model: Any, rows: slice) -> Tensor:
    """The mean over the tokens of some of four completions."""
    ids = torch.randint(VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))[rows]
    mask, advantages = torch.ones(len(ids), 6, dtype=torch.bool), torch.tensor([1.0, -0.5, 0.7, -1.0])[rows]
    call = LossCall(Objective(), mask, advantages, -4.0 * mask, None, None, float(mask.sum()))
    return _LossScorer(model, call)(input_ids=ids, labels=ids, fused_lm_head=True).loss


def bfloat16_plugin(version: int) -> Any:
    """accelerate's, with what the trainer changes in it."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    plugin.set_mixed_precision("bf16")
    trainer = DapoGRPOTrainer.__new__(DapoGRPOTrainer)
    trainer.accelerator = types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin))
    with mock.patch.object(GRPOTrainer, "create_accelerator_and_postprocess"):
        trainer.create_accelerator_and_postprocess()
    return plugin


def score_in_bfloat16() -> None:
    """A token that does not train has its old log-prob, which no rounding may have changed."""
    ids, old_logprobs = torch.arange(16).view(2, 8), torch.full((2, 6), -4.001)
    call = LossCall(Objective(), old_logprobs > 0, torch.ones(2), old_logprobs, None, None, torch.tensor(977.0))
    for version in (1, 2):
        policy, model = bfloat16_plugin(version).mixed_precision_policy, network()
        attach_scoring(model, LogitRule.of(model.config, 1.0), entropy=True, float32_head=False)
        if version == 1:
            options = {"use_orig_params": True, "device_id": torch.device("cpu")}
            sharded: Any = FullyShardedDataParallel(model, mixed_precision=policy, **options)
        else:
            for unit in (*model.model.layers, model):
                sharded = fully_shard(unit, mp_policy=policy)
        with torch.autocast("cpu", torch.bfloat16):
            out = _LossScorer(sharded, call)(input_ids=ids, labels=ids, fused_lm_head=True)
        assert torch.equal(out.log_probs, old_logprobs), version


def shard_on_a_rank(rank: int) -> None:
    for apart in (False, True):
        one, sharded = network(), network()
        for model in (one, sharded):
            attach_scoring(model, LogitRule.of(model.config, 1.0), entropy=True, float32_head=False)
        for unit in (*sharded.model.layers, *([sharded.lm_head] if apart else []), sharded):
            fully_shard(unit)
        loss_of(one, slice(None)).backward()
        loss_of(sharded, slice(2 * rank, 2 * rank + 2)).backward()
        assert relative_error(gradients(sharded), gradients(one)) < 1e-5
    score_in_bfloat16()


@pytest.mark.ranks
def test_fsdp2_gives_the_gradient_of_one_process() -> None:
    """Of the model that the trainer scores with; accelerate does not shard on a CPU. In bfloat16 nothing is rounded."""
    on_ranks(2, shard_on_a_rank)


def test_own_generation(both: Any) -> None:
    """With TRL's own sampling in place of the fixed completions: the model still generates as before."""
    mine, theirs = both(**ON_POLICY, trainer_options={"rollout_func": None})
    assert "position_ids" in inspect.signature(mine.trainer.model.forward).parameters  # generate asks for it
    assert_same_run(mine, theirs)


def test_the_example_learns() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_dapo.py"))
    first, last = example["main"](steps=20)
    assert last > 1.1 * first


NORMALIZED = {"multi_objective_aggregation": "normalize_then_sum"}
STREAM = IterableDataset.from_generator(lambda: iter([{"prompt": "1+2="}]))
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # a pattern; settings; arguments of the trainer
    ("use_liger_kernel", {"use_liger_kernel": True}, {}),
    ("'ppo'.*grpo", {"loss_type": "ppo"}, {}),
    ("max_completion_length", {"loss_type": "dr_grpo", "max_completion_length": None}, {}),
    ("sapo_tau", {"loss_type": "sapo", "sapo_temperature_pos": 0.0}, {}),
    ("lm_head", {}, {"peft_config": LoraConfig(r=4, target_modules=["lm_head"])}),  # by TRL
    ("aggregate.*prompt-mean-token-mean.*seq-mean", {"loss_type": "dapo"}, {"aggregate": "seq-mean-token-mean"}),
    ("aggregate.*loss_type.*dapo, cispo, sapo", {"loss_type": "grpo"}, {"aggregate": PROMPT_MEAN}),
    ("aggregate.*importance_sampling_level", {"loss_type": "dapo", **SEQUENCE}, {"aggregate": PROMPT_MEAN}),
    ("max_sampling_rounds", {}, {"dynamic_sampling": True, "max_sampling_rounds": 0}),
    ("on_sampling_exhausted", {}, {"dynamic_sampling": True, "on_sampling_exhausted": "stop"}),
    ("scale_rewards", {"scale_rewards": "batch"}, {"dynamic_sampling": True}),
    ("dynamic_sampling.*multi_objective_aggregation", NORMALIZED, {"dynamic_sampling": True}),
    ("train_dataset", {}, {"dynamic_sampling": True, "train_dataset": STREAM}),
    ("overlong_max_length", {}, {"overlong_max_length": 5}),
    ("overlong_cache_length", {}, {"overlong_cache_length": 0}),
    ("overlong_cache_length", {}, {"overlong_cache_length": 6, "overlong_max_length": 5}),
    (
        "overlong_max_length=20480.*max_completion_length",
        {},
        {"overlong_cache_length": 4096, "overlong_max_length": 20480},
    ),
    ("overlong_cache_length", NORMALIZED, {"overlong_cache_length": 5}),
]


@pytest.mark.parametrize(("pattern", "options", "arguments"), REFUSED)
def test_settings_that_are_refused(
    tmp_path: Path, model: Path, pattern: str, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=pattern):
        train(DapoGRPOTrainer, model, tmp_path, Rollouts(), **ON_POLICY | options, trainer_options=arguments)


def test_the_first_call_checks_the_logits(tmp_path: Path, model: Path) -> None:
    """It may be compiled: without a graph break, and the second call runs the same graph."""
    with pytest.raises(ValueError, match="Capped"):
        train(DapoGRPOTrainer, Capped(load(model).config), tmp_path, Rollouts(), **ON_POLICY)
    graphs: list[Any] = []

    def collecting(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    one, other, capped = network(), network(), Capped(network().config)
    for scored in (one, other, capped):
        attach_scoring(scored, LogitRule.of(scored.config, 1.0), entropy=True, float32_head=False)
    run = torch.compile(other, backend=collecting, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(loss_of(run, slice(None)), loss_of(one, slice(None)))
    assert len(graphs) == 1
    with pytest.raises(RuntimeError, match="Capped"):  # torch.compile's own error, around ours
        loss_of(torch.compile(capped, backend=collecting, fullgraph=True), slice(None))


def test_zero3_is_refused(tmp_path: Path, model: Path) -> None:
    """In a process with DeepSpeed's ZeRO-3, as transformers sees it."""
    network, config = load(model), type("Config", (), {"is_zero3": lambda self: True})()
    deepspeed.set_hf_deepspeed_config(config)
    try:
        with pytest.raises(ValueError, match="ZeRO-3"):
            train(DapoGRPOTrainer, network, tmp_path, Rollouts(), **ON_POLICY)
    finally:
        deepspeed.unset_hf_deepspeed_config()


LEARNING_RATE = 20.0  # of updates by eq. 8 of the DAPO paper as printed


def eq_8(network: Any, batches: list[dict[str, Any]], generations: int) -> Tensor:
    """Eq. 8 on-policy, where the ratio is 1 with its gradient; ``batches`` of the ranks, in their order."""
    sums, counts = [], []
    for batch in batches:
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        for i in range(len(mask)):
            ids = torch.cat([batch["prompt_ids"][i], batch["completion_ids"][i]])[None]
            seen = torch.cat([batch["prompt_mask"][i], batch["completion_mask"][i]])[None]
            logits = network(input_ids=ids, attention_mask=seen).logits[0, :-1].double()
            logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0][-mask.shape[1] :]
            sums.append(-batch["advantages"][i] * ((logprobs - logprobs.detach()).exp() * mask[i]).sum())
            counts.append(mask[i].sum())
    terms, tokens = (torch.stack(values).view(-1, generations).sum(1) for values in (sums, counts))
    return (terms / tokens.clamp(min=1))[tokens > 0].mean()


def assert_step(before: dict[str, Tensor], after: dict[str, Tensor], network: Any, batches: list[Any]) -> None:
    """One update of SGD on eq. 8 with four completions of a prompt."""
    eq_8(network, batches, 4).backward()
    for name, parameter in network.named_parameters():
        step = -LEARNING_RATE * parameter.grad
        assert float(step.abs().max()) > 1e-3
        torch.testing.assert_close(after[name] - before[name], step, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("rollouts", [{}, {"masked": True}])
def test_an_update_of_the_mean_over_prompts(tmp_path: Path, model: Path, rollouts: dict[str, bool]) -> None:
    """Completions of one prompt lie in different micro-batches: TRL shuffles them."""
    options = ON_POLICY | {"max_steps": 1, "learning_rate": LEARNING_RATE, "mask_truncated_completions": True}
    run = train(
        Kept,
        model,
        tmp_path,
        Rollouts(**rollouts),
        **options,
        loss_type="dapo",
        trainer_options={"aggregate": PROMPT_MEAN},
    )
    (batch,) = run.trainer.batches
    lengths = batch["completion_mask"].sum(1).view(-1, 4).sum(1)
    assert len(set(lengths.tolist())) > 1  # the mean over tokens is another
    assert_step(run.start, run.weights, load(model), [batch])


def update_on_a_rank(rank: int, folder: Path) -> None:
    """Three completions of a prompt on one rank and one on the other."""
    rollouts = Rollouts()
    rollouts.random.seed(rank)
    options = {"per_device_train_batch_size": 3, "num_generations": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    settings = {"learning_rate": LEARNING_RATE, "loss_type": "dapo", "trainer_options": {"aggregate": PROMPT_MEAN}}
    run = train(Kept, folder / "model", folder / "run", rollouts, **options, **settings)
    torch.save((run.trainer.batches[0], run.start, run.weights), folder / f"rank {rank}.pt")


@pytest.mark.ranks
def test_an_update_of_the_mean_over_prompts_on_two_ranks(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    on_ranks(2, update_on_a_rank, tmp_path)
    (first, before, after), (second, _, other) = (torch.load(tmp_path / f"rank {rank}.pt") for rank in range(2))
    assert first["num_prompts"] == second["num_prompts"] == 3
    assert all(torch.equal(after[name], other[name]) for name in after)
    before, after = ({name.removeprefix("module."): x for name, x in weights.items()} for weights in (before, after))
    assert_step(before, after, load(tmp_path / "model"), [first, second])


def test_a_prompt_without_a_token_does_not_count() -> None:
    accelerator = types.SimpleNamespace(process_index=0, gather=lambda x: x)
    trainer: Any = types.SimpleNamespace(
        accelerator=accelerator, model=types.SimpleNamespace(training=True), num_generations=2
    )
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]])
    counts = prompt_counts(trainer, {"completion_mask": mask})
    assert counts["group_tokens"].tolist() == [3, 3, 0, 0, 3, 3]
    assert counts["num_prompts"] == 2


def test_evaluation_of_the_mean_over_prompts(tmp_path: Path, model: Path) -> None:
    """With as many completions of a prompt as evaluation takes."""
    options = ON_POLICY | {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}
    settings = {"per_device_eval_batch_size": 4, "learning_rate": 0.0, "loss_type": "dapo"}
    run = train(Kept, model, tmp_path, Rollouts(), **options, **settings, trainer_options={"aggregate": PROMPT_MEAN})
    evaluated = run.trainer.batches[-1]
    assert len(evaluated["advantages"]) == 4
    found = next(entry["eval_loss"] for entry in run.log if "eval_loss" in entry)
    assert found == pytest.approx(eq_8(load(model), [evaluated], 2).item(), rel=1e-5, abs=1e-7)
