"""What a run will do and roughly need, worked out from the configuration alone: what `--dry-run` prints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dapo_runner.config import Config, ModelConfig, TinyModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TINY_VOCABULARY = 64  # more than the characters of arithmetic


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder with gated MLP and rotary attention."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    attention: int  # heads × head dimension
    key_value: int  # key/value heads × head dimension
    tied: bool

    @property
    def parameters(self) -> int:
        block = 2 * self.hidden * (self.attention + self.key_value) + 3 * self.hidden * self.intermediate
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (block + 2 * self.hidden) + embeddings + self.hidden


def make_plan(config: Config) -> dict[str, str]:
    """Labels and figures, in the order in which they are read. Downloads nothing and loads no weights."""
    prompts, rollout, reward = config.sampler.prompts_per_step, config.rollout, config.reward
    steps, responses = config.run.steps, config.responses_per_step
    return {
        "run": f"{config.run_dir}, seed {config.run.seed}",
        "model": f"{config.model.path or 'tiny, made on the spot'}, {config.model.dtype}",
        "data": str(config.data.path or "arithmetic, made on the spot"),
        "rollout steps": f"{steps}",
        "per step": f"{prompts} prompts × {rollout.group_size} = {responses} responses",
        "updates": f"{config.updates_per_step} per step of {config.mini_batch_size} responses, "
        f"{steps * config.updates_per_step} in all",
        "responses": f"{steps * responses:,} trained on, each up to {rollout.max_response_tokens} tokens",
        "micro-batch": f"{config.optimizer.token_budget} positions",
        "objective": _objective(config),
        "reward": f"{reward.kind}, {reward.correct:+g} / {reward.wrong:+g}{_overlong(config)}",
        "evaluation": f"avg@{config.evaluation.k} on {_eval_size(config)} problems {_how_often(config)}",
        **_memory(config),
    }


def model_shape(model: ModelConfig) -> ModelShape | None:
    """The sizes of a model on this machine; None for one that would have to be downloaded first."""
    if model.tiny is not None:
        return _tiny_shape(model.tiny)
    path = Path(model.path or "") / "config.json"
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    values = values.get("text_config", values)
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    head_dim = values.get("head_dim") or hidden // heads
    return ModelShape(
        layers=values["num_hidden_layers"],
        hidden=hidden,
        intermediate=values["intermediate_size"],
        vocabulary=values["vocab_size"],
        attention=heads * head_dim,
        key_value=(values.get("num_key_value_heads") or heads) * head_dim,
        tied=bool(values.get("tie_word_embeddings", False)),
    )


def memory_estimate(config: Config, shape: ModelShape) -> dict[str, int]:
    """Bytes by purpose, to within a factor of about 1.5: enough to tell whether a run can fit."""
    size = BYTES[config.model.dtype]
    budget, sequences = config.optimizer.token_budget, config.rollout.max_batch_sequences
    # Kept for the backward: about 8 tensors of hidden width and 4 of MLP width a block, or its input alone.
    per_position = shape.hidden if config.model.gradient_checkpointing else 8 * shape.hidden + 4 * shape.intermediate
    length = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return {
        "weights": shape.parameters * size,
        "gradients": shape.parameters * size,
        "AdamW moments": 2 * shape.parameters * size,
        "activations of a micro-batch": shape.layers * budget * per_position * size,
        "rollout cache, all responses at full length": 2 * sequences * length * shape.layers * shape.key_value * size,
    }


def _memory(config: Config) -> dict[str, str]:
    shape = model_shape(config.model)
    if shape is None:
        return {"memory": f"unknown: {config.model.path} is not on this machine, and a plan downloads nothing"}
    estimate = memory_estimate(config, shape)
    parts = ", ".join(f"{what} {_bytes(size)}" for what, size in estimate.items())
    return {
        "parameters": f"about {shape.parameters / 1e6:,.1f} million",
        "memory": f"about {_bytes(sum(estimate.values()))}: {parts}",
    }


def _tiny_shape(tiny: TinyModelConfig) -> ModelShape:
    return ModelShape(
        layers=tiny.layers,
        hidden=tiny.hidden_size,
        intermediate=tiny.intermediate_size,
        vocabulary=TINY_VOCABULARY,
        attention=tiny.hidden_size,
        key_value=tiny.hidden_size,
        tied=True,
    )


def _objective(config: Config) -> str:
    changes = ", ".join(f"{key}={value}" for key, value in config.loss.overrides.items())
    return config.loss.objective + (f" with {changes}" if changes else "")


def _overlong(config: Config) -> str:
    overlong = config.reward.overlong
    soft = f", soft punishment over the last {overlong.cache_length} of {config.overlong_max_length} tokens"
    return (soft if overlong.soft_punishment else "") + (", truncated samples filtered" if overlong.filter else "")


def _eval_size(config: Config) -> int:
    return config.data.arithmetic.eval_size if config.data.format == "arithmetic" else config.data.eval_size


def _how_often(config: Config) -> str:
    every = config.run.eval_every
    return f"every {every} steps" if every else "before the first and after the last step"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
