"""How long the sequences may be that a model is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_kernels.integrations.rope import fixed_frequencies
from dapo_runner.config import Config, ConfigError, ModelConfig


def check_lengths(config: Config, source: str | Path, *, download: bool) -> None:
    """Check the longest prompt and response of a run against each of its models.

    Args:
        source: the policy, a folder or a name on the hub.
        download: whether a configuration that is not on this machine may be fetched; else its model is passed over.

    Raises:
        ConfigError: they are longer than a model takes, or than sliding windows of it that the engine ignores, or its
            configuration cannot be read.
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
    """Check sequences of ``longest`` tokens against the model that ``key`` names. ``setting`` begins the message.

    Raises:
        ConfigError: they are longer than the model takes, or its configuration cannot be read.
    """
    config = _load_config(key, path, model)
    fixed, covered = fixed_frequencies(config), _covered(config)
    if fixed is not None and longest > fixed.longest:
        raise ConfigError(
            f"{setting} must be at most {fixed.longest} tokens, got {longest}: beyond, the RoPE frequencies of "
            f"{key}={path} ({fixed.rope_type}) follow the longest sequence of a batch, which would change the "
            "log-probs of the others"
        )
    if covered is not None and longest > covered:
        raise ConfigError(
            f"{setting} must be at most {covered} tokens, got {longest}: {key}={path} takes no more positions "
            "(max_position_embeddings); RoPE scaling in its config.json extends them"
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
            f"rollout.engine: {config.rollout.engine} is not supported with {config.model.path}: vLLM ignores its "
            f"sliding window of {model.sliding_window} tokens, and prompt and response take up to "
            f"{config.longest_sequence}. Set rollout.engine=hf"
        )


def _covered(config: Any) -> int | None:
    """The positions that a model of transformers takes, with what linear and YaRN scaling add; None for no limit."""
    text = config.get_text_config(decoder=True)
    positions: int | None = getattr(text, "max_position_embeddings", None)
    if positions is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(original * (rope.get("factor") or 1)))
