"""The packages that the runner requires. Reads package metadata and imports nothing."""

from __future__ import annotations

import importlib.metadata
import re

# The extra `runner` of pyproject.toml: requirement and purpose.
RUNNER = (
    ("aiohttp>=3.10", "rollout servers, judges"),
    ("transformers>=5.6", "models and tokenizers"),
    ("datasets>=4.0", "parquet files, Hugging Face data sets"),
    ("pydantic>=2.10", "configuration"),
    ("pyyaml>=6", "recipes"),
    ("rich>=13.8", "progress"),
    ("matplotlib>=3.8", "dapo report"),
    ("safetensors>=0.5", "checkpoints"),
    ("scipy>=1.11", "advantages of single tokens, dapo study"),
    ("numpy>=2", "checkpoints, parquet files"),
)
RUNNER_EXTRA = "pip install 'dapo-kernels[runner]'"
ACCELERATE, PEFT = "accelerate>=1.12", "peft>=0.18"


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def meets(requirement: str) -> bool:
    """Return whether the installed version of a package meets ``name>=version``."""
    name, _, oldest = requirement.partition(">=")
    found, wanted = ([int(number) for number in re.findall(r"\d+", text)] for text in (version(name) or "", oldest))
    return found >= wanted


def missing_for_runner() -> list[str]:
    return [requirement for requirement, _ in RUNNER if not meets(requirement)]
