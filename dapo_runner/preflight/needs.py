"""What a configuration needs of this machine and may not find: asked before anything is loaded, and by a dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from dapo_runner.algorithms.objective import uses_reference
from dapo_runner.checkpoint import latest_checkpoint
from dapo_runner.config import Config, ConfigError
from dapo_runner.data.reading import missing_data
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.logging.trackers import check_trackers
from dapo_runner.parallel.world import Layout
from dapo_runner.policy import lora
from dapo_runner.policy.model import resolve_device
from dapo_runner.preflight.memory import model_values
from dapo_runner.rewards.judge import Judge
from dapo_runner.rewards.scoring import load_reward
from dapo_runner.rollout.engine import engine_class
from dapo_runner.run.tiny_model import check_tiny

HUB_SECONDS = 5  # that the model hub has to answer


def check_needs(config: Config, layout: Layout | None = None) -> None:
    """Raises ConfigError with a line for everything that is missing, or does not suit the ``layout`` of its ranks.
    Downloads nothing.
    """
    layout = layout or Layout()
    missing = [*_missing(config), *heads_that_do_not_divide(config, layout), *_no_experts(config)]
    server, timeout = config.rollout.server, config.parallel.timeout
    drained = server.answer_within + 2 * server.sync_within
    if config.rollout.max_staleness and not config.rollout.partial and layout.size > 1 and timeout < drained:
        missing.append(
            f"parallel.timeout: expected at least {drained:g} s with rollout.partial=false, for which rank 0 may wait "
            f"until servers have answered and taken new weights, got {timeout:g}"
        )
    if missing:
        raise ConfigError("\n".join(missing))


def heads_that_do_not_divide(config: Config, layout: Layout) -> Iterator[str]:
    """Where the model's sizes are known: what its attention heads cannot be shared by."""
    if config.model.tiny is not None:
        heads = config.model.tiny.heads
    else:
        values = model_values(config.model) or {}
        heads = values.get("text_config", values).get("num_attention_heads", 0)
    for key, ranks in (("sequence", layout.sequence), ("rollout_tensor", layout.rollout_tensor)):
        if heads % ranks:
            yield f"parallel.{key}: expected a divisor of the model's {heads} attention heads, got {ranks}"


def _no_experts(config: Config) -> Iterator[str]:
    values = model_values(config.model)
    if config.loss.routing_replay and values is not None:
        text = values.get("text_config", values)
        if not any("experts" in name for name in text):
            yield f"loss.routing_replay: expected a mixture of experts, got {config.model.path}, which has none"


def _missing(config: Config) -> Iterator[str]:
    model = config.model
    checks: list[Callable[[], object]] = [
        lambda: engine_class(config).check(config),
        lambda: resolve_device(config.run.device),
        *(partial(load_reward, config.reward, use) for use in config.reward.uses),
        lambda: check_trackers(config.logging),
    ]
    if model.lora is not None:
        checks.append(lora.check_installed)
    if model.tiny is not None:
        checks.append(lambda: check_tiny(config))
    checks += [partial(check_model, key, name) for key, name in _models(config)]
    if config.reward.judge is not None:
        checks.append(Judge(config.reward).check)
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)
    named = {f"data.eval.{name}.path": chosen.path for name, chosen in config.data.eval.items()}
    for key, path in {"data.path": config.data.path, **named}.items():
        if path is not None and (problem := missing_data(path)) is not None:
            yield f"{key}: {problem}"


def _models(config: Config) -> Iterator[tuple[str, str]]:
    """Keys and names of the models that a run loads, beside what its checkpoint holds."""
    reference, adapted = config.loss.reference, config.model.lora is not None
    resumed = config.run.from_ is not None or latest_checkpoint(config.run_dir / CHECKPOINTS) is not None
    starts = reference is None and uses_reference(config)
    if config.critic is not None and not config.critic.share_trunk:
        starts |= config.critic.path is None
        if config.critic.path is not None:
            yield "critic.path", config.critic.path
    if config.model.path is not None and (adapted or starts or not resumed):
        yield "model.path", config.model.path
    if reference is not None:
        yield "loss.reference", reference
    judge = config.reward.judge
    if judge is not None and judge.url is None:
        yield "reward.judge.model", judge.model


def check_model(key: str, path: str) -> None:
    """Raises ConfigError where ``path`` is neither a folder with a model nor the name of one that the hub has. The hub
    is asked once, and not about what cannot be a name or has been downloaded before: loading a model that is not there
    asks it for most of a minute.
    """
    folder = Path(path)
    if folder.is_dir():
        for wanted in ("config.json", "*.safetensors"):
            if not any(folder.glob(wanted)):
                raise ConfigError(f"{key}: expected a model in transformers' format, found no {wanted} in {path}")
        return
    if (problem := _problem_with_hub_name(path)) is not None:
        raise ConfigError(f"{key}: expected a folder or a model of the hub, found no folder {path}, and {problem}")


def _problem_with_hub_name(name: str) -> str | None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except HFValidationError:
        return "no model of the hub can have that name"
    except RepositoryNotFoundError:
        return "the hub has none of that name"
    except Exception as error:  # of whatever library carries the request
        return f"the hub did not answer ({type(error).__name__})"
    return None
