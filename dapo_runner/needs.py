"""What a configuration needs of this machine and may not find: asked before anything is loaded, and by a dry run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

from dapo_runner.config import Config, ConfigError
from dapo_runner.model import resolve_device
from dapo_runner.rewards import load_reward
from dapo_runner.trackers import check_trackers


def check_needs(config: Config) -> None:
    """Raises ConfigError with a line for everything that is missing."""
    missing = list(_missing(config))
    if missing:
        raise ConfigError("\n".join(missing))


def _missing(config: Config) -> Iterator[str]:
    checks: tuple[Callable[[], object], ...] = (
        lambda: resolve_device(config.run.device),
        lambda: load_reward(config.reward),
        lambda: check_trackers(config.logging),
    )
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        yield (
            "rollout.engine: expected vLLM for 'vllm', it is not installed; docs/vllm.md says how; "
            "rollout.engine=hf needs nothing"
        )
    if config.model.lora is not None and importlib.util.find_spec("peft") is None:
        yield "model.lora: needs the package peft; pip install 'dapo-kernels[lora]'"
    for key, path in (("data.path", config.data.path), ("data.eval_path", config.data.eval_path)):
        if path is not None and not path.is_file():
            yield f"{key}: expected a file, found nothing at {path}"
