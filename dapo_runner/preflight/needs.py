"""Check that this machine has what a configuration needs, before a run loads anything. Downloads nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from dapo_kernels import policy_loss
from dapo_runner.checkpoint import latest_checkpoint
from dapo_runner.config import Config
from dapo_runner.data.reading import missing_data
from dapo_runner.engines.engine import engine_class
from dapo_runner.environments.tools import template_arguments
from dapo_runner.errors import ConfigError, describe_error
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.logging.trackers import check_trackers
from dapo_runner.parallel.world import SINGLE_PROCESS, Layout
from dapo_runner.plugins import import_function
from dapo_runner.policy import lora
from dapo_runner.policy.attention import choose_kernel
from dapo_runner.policy.model import DTYPES, resolve_device
from dapo_runner.preflight.memory import host_estimate, model_shape, model_values, too_large_for_host
from dapo_runner.rewards.judge import Judge
from dapo_runner.rewards.scoring import load_reward
from dapo_runner.tiny_model import check_tiny

HUB_SECONDS = 5  # timeout of the model hub
LFS = b"version https://git-lfs"  # the first bytes of a file that git has not downloaded


def check_needs(config: Config, layout: Layout = SINGLE_PROCESS.layout) -> None:
    """Raise ConfigError with one line for everything that is missing or does not fit the ``layout`` of the ranks."""
    missing = [*_missing(config), *heads_that_do_not_divide(config, layout)]
    if config.optimizer.offload and layout.size > 1:
        missing.append(f"optimizer.offload: requires one process, got {layout.size}")
    host = {} if (shape := model_shape(config.model)) is None else host_estimate(config, shape)
    if (sizes := too_large_for_host(sum(host.values()))) is not None:
        missing.append(f"machine's memory: requires {sizes}, for {', '.join(host)}")
    values = model_values(config.model)
    if config.loss.routing_replay and values is not None and not any("experts" in name for name in values):
        missing.append(f"loss.routing_replay: expected a mixture of experts, got {config.model.path}")
    timeout, drained = config.parallel.timeout, config.rollout.request_timeout + 2 * config.rollout.server.sync_timeout
    if config.rollout.max_staleness and not config.rollout.partial and layout.size > 1 and timeout < drained:
        missing.append(
            f"parallel.timeout: expected at least {drained:g} s with rollout.partial=false, for which rank 0 may wait "
            f"until servers have answered and taken new weights, got {timeout:g}"
        )
    if missing:
        raise ConfigError("\n".join(dict.fromkeys(missing)))  # two checks may lack the same device


def heads_that_do_not_divide(config: Config, layout: Layout) -> Iterator[str]:
    """Yield a line for each setting that does not divide the model's number of attention heads, if it is known."""
    heads = (model_values(config.model) or {}).get("num_attention_heads", 0)
    for key, ranks in (("sequence", layout.sequence), ("rollout_tensor", layout.rollout_tensor)):
        if heads % ranks:
            yield f"parallel.{key}: expected a divisor of the model's {heads} attention heads, got {ranks}"


def _missing(config: Config) -> Iterator[str]:
    model, reward, advantage = config.model, config.reward, config.advantage.kind
    checks: list[Callable[[], object]] = [
        lambda: engine_class(config).check(config),
        lambda: choose_kernel(model.attention, resolve_device(config.run.device), DTYPES[model.dtype]),
        *(partial(load_reward, reward, use, config.run.device) for use in reward.uses),
        *([partial(import_function, "advantage.kind", advantage, "groups")] if ":" in advantage else []),
        *([partial(_try_objective, config)] if ":" in config.loss.objective else []),
        lambda: check_trackers(config.logging),
        lambda: template_arguments(config.env),
        *([lora.check_installed] if model.lora else []),
        *([lambda: check_tiny(config)] if model.tiny else []),
        *(partial(check_model, key, name) for key, name in loaded_models(config)),
        *([lambda: Judge(reward, config.run.device).check()] if reward.judge else []),
    ]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)
    named = {f"data.eval.{name}.path": chosen.path for name, chosen in config.data.eval.items()}
    for key, path in {"data.path": config.data.path, **named}.items():
        if path is not None and (problem := missing_data(path)) is not None:
            yield f"{key}: {problem}"


def _try_objective(config: Config) -> None:
    """Raise ConfigError if a user-defined objective fails for three tokens, which differ: a mean over them shows."""
    x = torch.tensor([1.0, 2.0, 4.0], device=resolve_device(config.run.device), requires_grad=True)
    old_logprobs, advantages = -x.detach().flip(0), x.detach()
    try:
        policy_loss(-x, old_logprobs, advantages, objective=config.objective.own or "dapo", entropy=x).loss.backward()
    except Exception as error:
        raise ConfigError(f"loss.objective: {config.loss.objective} raised {describe_error(error)}") from error


def loaded_models(config: Config) -> Iterator[tuple[str, str]]:
    """Yield key and name of each model that a run loads in addition to its checkpoint."""
    reference, critic, judge = config.reference_path, config.critic, config.reward.judge
    critics = [] if critic is None else [critic.path]
    is_resumed = config.run.from_ is not None or latest_checkpoint(config.run_dir / CHECKPOINTS) is not None
    # Adapters, a reference and a critic start from the original model.
    is_needed = config.model.lora is not None or (reference is None and config.uses_reference) or None in critics
    names = {
        "critic.path": next(iter(critics), None),
        "model.path": config.model.path if is_needed or not is_resumed else None,
        "loss.reference" if config.distillation is None else "distillation.teacher": reference,
        "reward.judge.model": judge.model if judge is not None and judge.url is None else None,
    }
    yield from ((key, name) for key, name in names.items() if name is not None)


def check_model(key: str, path: str) -> None:
    """Raise ConfigError if ``path`` is neither a folder with a model nor a model of the hub.

    The hub gets one request, and none for an invalid name or a model in the cache. Loading a missing model would query
    it for most of a minute.
    """
    folder = Path(path)
    if not folder.is_dir() and (problem := _problem_with_hub_name(path)) is not None:
        raise ConfigError(f"{key}: expected a folder or a model of the hub, found no folder {path}, and {problem}")
    for wanted in ("config.json", "*.safetensors") if folder.is_dir() else ():
        if not any(file.is_file() for file in folder.glob(wanted)):  # not a broken link
            raise ConfigError(f"{key}: expected a model in transformers' format, found no {wanted} in {path}")
    for file in folder.glob("model*.safetensors"):
        with file.open("rb") as opened:
            if opened.read(len(LFS)) == LFS:
                raise ConfigError(f"{key}: {file} is a pointer of Git LFS. Run `git lfs pull` in its folder.")


def _problem_with_hub_name(name: str) -> str | None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except HFValidationError:
        return "no model of the hub can have that name"
    except RepositoryNotFoundError:
        return "the hub shows none of that name (a private one requires HF_TOKEN)"
    except Exception as error:  # several libraries can carry the request
        return f"the hub did not answer ({type(error).__name__})"
    return None
