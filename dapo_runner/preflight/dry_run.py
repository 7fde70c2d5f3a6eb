"""`dapo train RECIPE --dry-run`: the resolved configuration, departures from the algorithm's settings, estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from dapo_kernels import OBJECTIVES
from dapo_runner.config import AdvantageConfig, Config, CorrectionConfig, cautions, lay_over, lay_settings, resolved
from dapo_runner.config.algorithms import ALGORITHMS, MATCHED
from dapo_runner.config.section import flatten, read_key, spell
from dapo_runner.config.training import LossConfig, ModelConfig
from dapo_runner.preflight import memory
from dapo_runner.preflight.memory import GPU_MEMORY, host_estimate, memory_estimate, model_shape
from dapo_runner.preflight.needs import loaded_models

_FITS = {True: "fits", False: "does not fit"}


def resolved_yaml(config: Config) -> str:
    """Return the whole configuration as YAML. Settings that follow from others have their final values."""
    values = lay_settings(config.model_dump(mode="json", by_alias=True), resolved(config))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def summarize(config: Config) -> dict[str, str]:
    """Return labels and texts: algorithm, sizes, memory estimate and cautions. Downloads nothing."""
    tokens = config.trained_per_step * config.rollout.max_response_tokens
    return {
        **describe_algorithm(config),
        "numerics": ", ".join(f"{key}={spell(read_key(config, key))}" for key in ("numerics", *flatten(MATCHED))),
        "per step": f"{config.sampler.prompts_per_step} prompts × {config.rollout.group_size} = "
        f"{config.responses_per_step} responses, {config.updates_per_step} updates of {config.mini_batch_size}",
        "trained on": f"at most {tokens:,} tokens per step, {config.run.steps * tokens:,} in {config.run.steps} steps",
        **_memory(config),
        **{f"caution {n}": text for n, text in enumerate(cautions(config), 1)},
    }


def describe_algorithm(config: Config) -> dict[str, str]:
    """Return the algorithm and the departures from it. Warn if a recipe without an algorithm sets only the loss."""
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
    """Return the settings that differ from the named algorithm, each as `key=value (NAME: its value)`."""
    name = config.algorithm
    if name is None:
        return []
    row = ALGORITHMS[name].settings
    overrides = {field: getattr(OBJECTIVES[row["loss"]["objective"]], field, None) for field in config.loss.overrides}
    # Values of the settings that a row leaves at their defaults.
    expected = {
        "loss": LossConfig(overrides=overrides).model_dump(),
        "advantage": AdvantageConfig.model_validate(row["advantage"]).model_dump(),
        "rollout": {"correction": CorrectionConfig().model_dump()},
        "reward": {"kl": None},
        **dict.fromkeys(("preference", "distillation")),
    }
    return _differences(config.model_dump(), lay_over(expected, row), name)


def _differences(actual: Mapping[str, Any], expected: Mapping[str, Any], name: str, prefix: str = "") -> list[str]:
    """Return the settings that differ. A section that only one side has counts as one."""
    found = []
    for key, value in expected.items():
        mine = actual.get(key)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            found += _differences(mine, value, name, f"{prefix}{key}.")
        elif mine != value:
            found.append(f"{prefix}{key}={spell(mine)} ({name}: {spell(value)})")
    return found


def _memory(config: Config) -> dict[str, str]:
    shape = model_shape(config.model)
    if shape is None:
        return {"memory": f"unknown: {config.model.path} is not on this machine, or has no sizes of a known kind"}
    estimate, host = memory_estimate(config, shape), host_estimate(config, shape)
    paths = [path for _, path in loaded_models(config)]
    lora, peaks, total = config.model.lora, memory.phase_estimate(config, estimate), sum(estimate.values())
    trained = f", of which about {n:,} train" if lora is not None and (n := shape.adapter_parameters(lora)) else ""
    one, kept = sum(memory.checkpoint_parts(config, shape)), config.run.keep + 1
    return {
        "parameters": f"about {shape.parameters / 1e6:,.1f} million{trained}",
        "memory": f"about {gib(total)} per GPU" if peaks else spell_host(total),
        **{f"  {what}": gib(size) for what, size in estimate.items()},
        **{f"  {path}": "unknown, not counted" for path in paths if model_shape(ModelConfig(path=path)) is None},
        **{f"80 GB, {phase}": f"{gib(n)}: {_FITS[n <= GPU_MEMORY]}" for phase, n in peaks.items()},
        **({"machine's memory": spell_host(sum(host.values()))} if host else {}),
        **{f"  {what}": gib(size) for what, size in host.items()},
        "disk": f"about {gib(one)} for a checkpoint, {gib(kept * one)} for {kept} (run.keep + 1)",
    }


def spell_host(size: int) -> str:
    return f"about {gib(size)}: {_FITS[memory.too_large_for_host(size) is None]} this machine"


def gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.2f} MiB"
