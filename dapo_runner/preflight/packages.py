"""The packages that the runner requires. Reads package metadata and imports nothing."""

from __future__ import annotations

import importlib.metadata

# The extra `runner` of pyproject.toml: distribution and purpose.
RUNNER = (
    ("aiohttp", "rollout servers, judges"),
    ("transformers", "models and tokenizers"),
    ("datasets", "parquet files, Hugging Face data sets"),
    ("pydantic", "configuration"),
    ("pyyaml", "recipes"),
    ("rich", "progress"),
    ("matplotlib", "dapo report"),
    ("safetensors", "checkpoints"),
    ("scipy", "advantages of single tokens, dapo study"),
)
RUNNER_EXTRA = "pip install 'dapo-kernels[runner]'"


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_for_runner() -> list[str]:
    return [name for name, _ in RUNNER if version(name) is None]
