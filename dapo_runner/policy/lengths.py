"""Check the length of sequences against what a model supports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_kernels.integrations.rope import fixed_frequencies
from dapo_runner.config import Config, ConfigError, ModelConfig


def check_lengths(config: Config, source: str | Path, *, download: bool) -> None:
    """Check the longest prompt and response of a run against each of its models.

    Args:
        source: the policy, a folder or a name on the hub.
        download: whether a configuration may be downloaded; without it, only local models are checked.

    Raises:
        ConfigError: they are longer than a model or the engine supports, or a configuration cannot be read.
    """
    critic = None if config.critic is None else config.critic.path
    models = {"model.path": source, "loss.reference": config.loss.reference, "critic.path": critic}
    for key, path in models.items():
        if path is not None and (download or Path(path).is_dir()):
            setting = "rollout.max_response_tokens: prompt and response, of an evaluation too,"
            check_length(key, path, config.model, config.longest_sequence, setting)
    if config.rollout.engine != "hf" and (download or Path(source).is_dir()):
        _check_windows(config, _load_config("model.path", source, config.model))


def check_length(key: str, path: str | Path, model: ModelConfig, longest: int, setting: str) -> None:
    """Raise ConfigError where ``longest`` tokens are more than the model of ``key`` takes, or it cannot be read."""
    config = _load_config(key, path, model)
    fixed, covered = fixed_frequencies(config), _covered(config)
    if fixed is not None and longest > fixed.longest:
        raise ConfigError(
            f"{setting} must be at most {fixed.longest} tokens, got {longest}: beyond that the RoPE frequencies of "
            f"{key}={path} ({fixed.rope_type}) depend on the longest sequence of a batch"
        )
    if covered is not None and longest > covered:
        raise ConfigError(
            f"{setting} must be at most {covered} tokens, got {longest}: the max_position_embeddings of {key}={path}. "
            "RoPE scaling in its config.json extends them"
        )


def _load_config(key: str, path: str | Path, model: ModelConfig) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{key}: cannot load a configuration from {str(path)!r}: {reason}") from error


def _check_windows(config: Config, model: Any) -> None:
    """Raise ConfigError for sliding windows that vLLM 0.32 ignores: of Qwen2-MoE, where only some layers have one."""
    mixed = model.model_type == "qwen2_moe" and len(set(model.layer_types)) > 1
    if mixed and config.longest_sequence > model.sliding_window:
        raise ConfigError(
            f"rollout.engine: {config.rollout.engine} is not supported with {config.model.path} beyond its sliding "
            f"window of {model.sliding_window} tokens, which vLLM ignores. Set rollout.engine=hf"
        )


def _covered(config: Any) -> int | None:
    """Return how many positions a model takes, with linear and YaRN scaling; None without a limit."""
    text = config.get_text_config(decoder=True)
    positions: int | None = getattr(text, "max_position_embeddings", None)
    if positions is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(original * (rope.get("factor") or 1)))
