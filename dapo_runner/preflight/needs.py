"""What a configuration needs of this machine and may not find: asked before anything is loaded, and by a dry run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.world import Layout
from dapo_runner.policy import lora
from dapo_runner.policy.model import resolve_device
from dapo_runner.records.trackers import check_trackers
from dapo_runner.rewards.scoring import load_reward
from dapo_runner.rollout import vllm


def check_needs(config: Config, layout: Layout | None = None) -> None:
    """Raises ConfigError with a line for everything that is missing, or does not suit the ``layout`` of its ranks."""
    missing = [*_missing(config), *heads_that_do_not_divide(config, layout or Layout())]
    if missing:
        raise ConfigError("\n".join(missing))


def heads_that_do_not_divide(config: Config, layout: Layout) -> Iterator[str]:
    """Where the model is on this machine: what its attention heads cannot be shared by."""
    file = Path(config.model.path or "") / "config.json"
    if config.model.tiny is not None:
        heads = config.model.tiny.heads
    elif file.is_file():
        values = json.loads(file.read_text(encoding="utf-8"))
        heads = values.get("text_config", values).get("num_attention_heads", 0)
    else:
        return
    for key, ranks in (("sequence", layout.sequence), ("rollout_tensor", layout.rollout_tensor)):
        if heads % ranks:
            yield f"parallel.{key}: expected a divisor of the model's {heads} attention heads, got {ranks}"


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
