"""The output of `--simulate`: memory in each phase of a step, compared with an 80 GB GPU, and communication volume."""

from __future__ import annotations

from dapo_runner.config import Config
from dapo_runner.preflight import memory
from dapo_runner.preflight.dry_run import gib, spell_host
from dapo_runner.preflight.memory import BESIDE, ENGINE, GPU_MEMORY, JUDGE, engine_memory, model_shape
from dapo_runner.preflight.simulate import Simulation


def describe(config: Config, found: Simulation) -> dict[str, str]:
    """Return the rows to print, as labels and texts."""
    estimate, phases = _formulas(config), phase_peaks(config, found)
    engine = {what: size for what, size in estimate.items() if what.startswith((JUDGE, ENGINE, "KV cache"))}
    update = sum(size for what, size in estimate.items() if what not in engine)
    positions, verdict = found.positions * config.parallel.sequence, "yes" if fits(config, found) else "no"
    rows = {
        "simulated": f"rank 0 of {config.parallel.gpus}, {found.positions} of a micro-batch's {positions} positions",
        "log-probs": gib(phases["log-probs"]),
        "update": f"{gib(phases['update'])} at its peak; the formulas of --dry-run: {gib(update)}",
        **{f"  {kind}": gib(size) for kind, size in found.peak.items()},
        **{f"  {what}": gib(estimate[what]) for what in BESIDE if what in estimate},
        "rollout": f"{gib(phases['rollout'])}, of it {gib(found.held)} of the policy's weights and moments",
        **{f"  {what}": gib(size) for what, size in engine.items()},
        "sync": f"{gib(phases['sync'])}, with one parameter of {gib(found.largest)} whole",
        **({"machine's memory": spell_host(found.host)} if found.host > 2**20 else {}),
        "fits": f"{gib(max(phases.values()))} of the {gib(GPU_MEMORY)} of an 80 GB GPU: {verdict}; the CUDA context, "
        "NCCL's buffers and fragmentation come on top, a few GiB",
    }
    for way, traffic in {"forward": found.forward, "backward": found.backward}.items():
        if traffic:
            rows[f"collectives, {way}"] = ", ".join(f"{n.calls} {kind} {gib(n.bytes)}" for kind, n in traffic.items())
    if config.rollout.engine_spec.reserves_memory:
        cache = int(config.rollout.vllm.gpu_memory * GPU_MEMORY) - engine[ENGINE]
        n_responses = max(0, cache) // list(engine.values())[-1]
        rows["KV cache"] = f"{gib(cache)} at most: {n_responses} responses at full length in an engine"
    return rows


def phase_peaks(config: Config, found: Simulation) -> dict[str, int]:
    """Return the bytes on the GPU in each phase of a step. The policy's weights and moments stay on it."""
    estimate = _formulas(config)
    beside, weights = sum(estimate.get(what, 0) for what in BESIDE), estimate.get(ENGINE, 0)
    generating, waiting = engine_memory(config, estimate)
    return {
        "log-probs": found.logprobs + beside + waiting,
        "update": sum(found.peak.values()) + beside + waiting,
        "rollout": found.held + beside + estimate.get(JUDGE, 0) + generating,
        "sync": found.held + beside + max(weights, waiting) + found.largest,
    }


def fits(config: Config, found: Simulation) -> bool:
    return max(phase_peaks(config, found).values()) <= GPU_MEMORY


def _formulas(config: Config) -> dict[str, int]:
    shape = model_shape(config.model)
    assert shape is not None  # the simulation has checked it
    return memory.memory_estimate(config, shape)
