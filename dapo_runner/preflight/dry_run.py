"""`dapo train RECIPE --dry-run`: the resolved configuration, what departs from its algorithm, and estimates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import yaml

from dapo_kernels import OBJECTIVES
from dapo_runner.config import AdvantageConfig, Config, CorrectionConfig, cautions, resolved
from dapo_runner.config.algorithms import ALGORITHMS, lay_over
from dapo_runner.preflight.memory import memory_estimate, model_shape


def resolved_yaml(config: Config) -> str:
    """Return the whole configuration, with what stands for null where it depends on other settings."""
    values = config.model_dump(mode="json", by_alias=True)
    for key, value in resolved(config).items():
        *sections, name = key.split(".")
        reduce(lambda section, part: section[part], sections, values)[name] = value
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def summarize(config: Config) -> dict[str, str]:
    """Return labels and texts: algorithm, counts, estimates and cautions. Downloads nothing."""
    tokens = config.trained_per_step * config.rollout.max_response_tokens
    return {
        **describe_algorithm(config),
        "per step": f"{config.sampler.prompts_per_step} prompts × {config.rollout.group_size} = "
        f"{config.responses_per_step} responses, {config.updates_per_step} updates of {config.mini_batch_size}",
        "trained on": f"at most {tokens:,} tokens per step, {config.run.steps * tokens:,} in {config.run.steps} steps",
        **_memory(config),
        **{"caution" if not n else f"caution {n + 1}": text for n, text in enumerate(cautions(config))},
    }


def describe_algorithm(config: Config) -> dict[str, str]:
    """Return the algorithm and what departs from it. Without a name: a warning where only the loss was chosen."""
    name, objective = config.algorithm, config.loss.objective
    if name is not None:
        listed = ", ".join(departures(config)) or "none"
        return {"algorithm": f"{name} ({ALGORITHMS[name].paper})", "departures": listed}
    if objective == "dapo" or objective not in ALGORITHMS:
        return {}
    return {
        "algorithm": f"none. loss.objective={objective} sets only the loss; algorithm={objective} also sets advantage, "
        "filter and length shaping as in its paper."
    }


def departures(config: Config) -> list[str]:
    """Return the settings that are not those of the named algorithm, each as `key=value (NAME: its value)`."""
    name = config.algorithm
    if name is None:
        return []
    row = ALGORITHMS[name].settings
    objective = OBJECTIVES[row["loss"]["objective"]]
    # What stands for what a row does not set.
    whole = {
        "loss": {"overrides": {field: getattr(objective, field) for field in config.loss.overrides}},
        "advantage": AdvantageConfig.model_validate(row["advantage"]).model_dump(),
        "rollout": {"correction": CorrectionConfig().model_dump()},
        "preference": None,
    }
    return [
        f"{key} ({name}: null)" if isinstance(own, Mapping) else f"{key}={_spell(own)} ({name}: {_spell(value)})"
        for key, own, value in _differences(config.model_dump(), lay_over(whole, row))
    ]


def _differences(own: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key, own and wanted value of settings that differ. A section that one side lacks is one."""
    for key, value in wanted.items():
        found = own.get(key)
        if isinstance(found, Mapping) and isinstance(value, Mapping):
            yield from ((f"{key}.{below}", *values) for below, *values in _differences(found, value))
        elif found != value:
            yield key, found, value


def _spell(value: object) -> str:
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _memory(config: Config) -> dict[str, str]:
    shape = model_shape(config.model)
    if shape is None:
        return {"memory": f"unknown: {config.model.path} is not on this machine"}
    estimate = memory_estimate(config, shape)
    lora = config.model.lora
    trained = "" if lora is None else f", of which {shape.adapter_parameters(lora):,} train"
    return {
        "parameters": f"about {shape.parameters / 1e6:,.1f} million{trained}",
        "memory": f"about {_gib(sum(estimate.values()))} per GPU, or in one process on a CPU",
        **{f"  {what}": _gib(size) for what, size in estimate.items()},
    }


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.2f} MiB"
