"""Check sequences against the limits of a model: their lengths, and the ids of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from dapo_kernels.integrations.rope import fixed_frequencies
from dapo_runner.config import Config, ConfigError, ModelConfig
from dapo_runner.errors import describe_error
from dapo_runner.types import Prompt


def check_lengths(config: Config, source: str | Path, prompts: Sequence[Prompt] = (), *, download: bool) -> None:
    """Check ``prompts`` and the longest sequence of a run against each of its models; ``source`` is the policy. Without
    ``download`` each configuration that is not on this machine is a printed line. Raises ConfigError, also if a
    configuration cannot be loaded.
    """
    highest = max((max(prompt.token_ids, default=0) for prompt in prompts), default=0)
    critic = None if config.critic is None else config.critic.path
    reference = "loss.reference" if config.distillation is None else "distillation.teacher"
    models = {"model.path": source, reference: config.reference_path, "critic.path": critic}
    section = "evaluation" if config.evaluation_tokens > config.rollout.max_response_tokens else "rollout"
    longest, setting = config.longest_sequence, f"{section}.max_response_tokens"
    for key, path in models.items():
        if path is not None and (download or is_local(path, "config.json")):
            found = check_length(key, path, config.model, longest, setting, highest, local_files_only=not download)
            refuse_quantized(key, found)
            if key == "model.path" and not config.rollout.engine_spec.has_sliding_windows:
                _check_windows(config, found)
        elif path is not None:
            print(f"{key}: {path} is not in the local cache. Its maximum length is not checked.")


def is_local(path: str | Path, file: str) -> bool:
    """Return whether a model is a folder, or its ``file`` is in the cache of the hub."""
    return Path(path).is_dir() or local_file(path, file) is not None


def local_file(path: str | Path, file: str) -> Path | None:
    """Return a file of a model's folder, or of a model of the hub in the cache; None if it is not on this machine."""
    with suppress(ValueError):  # for a name that the hub cannot have
        found = Path(path) / file if Path(path).is_dir() else try_to_load_from_cache(str(path), file)
        return Path(found) if isinstance(found, str | Path) and Path(found).is_file() else None
    return None


def check_length(
    key: str, path: str | Path, model: ModelConfig, longest: int, setting: str, highest: int = 0, **options: Any
) -> Any:
    """Return the model configuration at ``path``. Raises ConfigError, naming ``key`` or ``setting``, if it cannot be
    loaded, or supports fewer than the ``longest`` tokens, or not the ``highest`` id. ``options``: of `from_pretrained`.
    """
    from transformers import AutoConfig

    with loading(key, "a configuration", path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code, **options)
    fixed = fixed_frequencies(config)
    limit, reason = _max_positions(config), "the max_position_embeddings"
    if fixed is not None and longest > fixed.longest:  # beyond that they depend on the longest sequence of the batch
        limit, reason = fixed.longest, f"the length with fixed {fixed.rope_type} RoPE frequencies"
    if limit is not None and longest > limit:
        raise ConfigError(
            f"{setting}: expected at most {limit} tokens (prompt and response), {reason} of {key}={path}, got {longest}"
        )
    if highest >= (size := config.get_text_config(decoder=True).vocab_size):
        raise ConfigError(f"{key}: expected token ids below {size}, the vocab_size of {path}, got {highest}")
    return config


def refuse_quantized(key: str, model: Any) -> None:
    """Raise ConfigError if the weights of a model to train are quantized, by its configuration."""
    if getattr(model, "quantization_config", None) is not None:
        raise ConfigError(f"{key}: expected weights that are not quantized (config.json). Save them in bfloat16 first.")


@contextmanager
def loading(key: str, what: str, path: str | Path) -> Iterator[None]:
    """Convert an error of transformers to a ConfigError with one line. A damaged file raises errors of any type."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(describe_error(error).split()).partition(" Model type should be")[0]  # a hundred names
        raise ConfigError(f"{key}: expected {what} that can be loaded, got {str(path)!r}: {reason}") from error


def _check_windows(config: Config, model: Any) -> None:
    """Raise ConfigError for sliding windows that vLLM 0.32 ignores: those of only some layers, in Qwen2-MoE."""
    engine, window = config.rollout.engine, getattr(model, "sliding_window", 0)
    if model.model_type == "qwen2_moe" and len(set(model.layer_types)) > 1 and config.longest_sequence > window:
        raise ConfigError(f"rollout.engine: {engine} ignores the sliding window of {window} tokens. Set it to hf.")


def _max_positions(config: Any) -> int | None:
    """Return the maximum number of positions, including linear and YaRN scaling; None without a limit."""
    text = config.get_text_config(decoder=True)
    if (positions := getattr(text, "max_position_embeddings", None)) is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    factor = rope.get("factor") if rope.get("rope_type") in ("linear", "yarn") else None
    return max(positions, int((rope.get("original_max_position_embeddings") or positions) * (factor or 1)))
