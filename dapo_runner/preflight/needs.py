"""What a configuration needs of this machine and may not find: asked before anything is loaded, and by a dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dapo_runner.config import Config, ConfigError
from dapo_runner.policy import lora
from dapo_runner.policy.model import resolve_device
from dapo_runner.records.trackers import check_trackers
from dapo_runner.rewards.scoring import load_reward
from dapo_runner.rollout import vllm


def check_needs(config: Config) -> None:
    """Raises ConfigError with a line for everything that is missing."""
    missing = list(_missing(config))
    if missing:
        raise ConfigError("\n".join(missing))


def _missing(config: Config) -> Iterator[str]:
    checks: list[Callable[[], object]] = [
        lambda: resolve_device(config.run.device),
        lambda: load_reward(config.reward),
        lambda: check_trackers(config.logging),
    ]
    if config.rollout.engine == "vllm":
        checks.append(vllm.check_installed)
    if config.model.lora is not None:
        checks.append(lora.check_installed)
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)
    for key, path in (("data.path", config.data.path), ("data.eval_path", config.data.eval_path)):
        if path is not None and not path.is_file():
            yield f"{key}: expected a file, found nothing at {path}"
