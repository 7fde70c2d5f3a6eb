"""What a simulated rank says of a recipe: memory in each phase of a step, against an 80 GB GPU, and what ranks send."""

from __future__ import annotations

import math

from dapo_runner.algorithms.objective import resolve_objective, uses_reference
from dapo_runner.config import Config
from dapo_runner.preflight.memory import BYTES, CRITIC, SENT, memory_estimate, model_shape
from dapo_runner.preflight.simulate import Simulation, Traffic

GPU_MEMORY = int(79.1 * 2**30)  # what torch finds on an A100 or H100 of 80 GB
ENGINE, CACHE = "engine's weights", "KV cache"  # in `memory_estimate`
BESIDE = ("reference weights", "reference's float32 average", CRITIC, SENT)  # there in every phase, and not simulated


def describe(config: Config, found: Simulation) -> dict[str, str]:
    """Labels and figures, in the order in which they are read."""
    estimate, phases = _formulas(config), phase_peaks(config, found)
    engine = {what: size for what, size in estimate.items() if what == ENGINE or what.startswith(CACHE)}
    update = sum(size for what, size in estimate.items() if what not in engine)
    whole, parameter = config.optimizer.token_budget, _largest(config, found)
    return {
        "simulated": f"rank 0 of {config.parallel.gpus}, {found.positions} of a micro-batch's {whole} positions",
        "update": f"{_gib(phases['update'])} at its peak; the formulas of --dry-run: {_gib(update)}",
        **{f"  {kind}": _gib(size) for kind, size in found.peak.items()},
        **{f"  {what}": _gib(estimate[what]) for what in BESIDE if what in estimate},
        "rollout": f"{_gib(phases['rollout'])}, of it {_gib(found.held)} of the policy's weights and moments",
        **{f"  {what}": _gib(size) for what, size in engine.items()},
        **_room(config, engine),
        "sync": f"{_gib(phases['sync'])}, with one parameter of {_gib(parameter)} whole",
        "fits": f"{_gib(max(phases.values()))} of the {_gib(GPU_MEMORY)} of an 80 GB GPU: "
        + ("yes" if fits(config, found) else "no")
        + "; the CUDA context, NCCL's buffers and fragmentation come on top, a few GiB",
        "collectives, forward": _traffic(found.forward),
        "collectives, backward": _traffic(found.backward),
        "collectives of a step": _of_a_step(config, found),
    }


def phase_peaks(config: Config, found: Simulation) -> dict[str, int]:
    """Bytes on the GPU in each phase of a step. The policy's weights and moments stay there, and of a vLLM that sleeps
    nothing.
    """
    estimate, vllm = _formulas(config), config.rollout.vllm
    beside, weights = sum(estimate.get(what, 0) for what in BESIDE), estimate.get(ENGINE, 0)
    if config.rollout.engine_spec.reserves_memory:
        generating = int(vllm.gpu_memory * GPU_MEMORY)
        waiting = 0 if vllm.sleep else generating
    else:
        generating = weights + sum(size for what, size in estimate.items() if what.startswith(CACHE))
        waiting = weights
    return {
        "update": sum(found.peak.values()) + beside + waiting,
        "rollout": found.held + beside + generating,
        "sync": found.held + beside + max(weights, waiting) + _largest(config, found),
    }


def _formulas(config: Config) -> dict[str, int]:
    shape = model_shape(config.model)
    assert shape is not None  # or there would be no simulation
    return memory_estimate(config, shape)


def fits(config: Config, found: Simulation) -> bool:
    return max(phase_peaks(config, found).values()) <= GPU_MEMORY


def micro_batches(config: Config) -> int:
    """Of an update, on each rank, when every response is as long as it may be."""
    sequences = math.ceil(config.mini_batch_size * config.parallel.sequence / config.parallel.gpus)
    positions = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens - 1
    return math.ceil(sequences / (config.optimizer.token_budget // positions))


def extra_forwards(config: Config) -> int:
    """Mini-batches of a step that are run forward once more: for old log-probs all but the first (a correction, or a
    bound on them, or a KL in the reward wants all), for a reference's, and for a selection of tokens. A critic's passes
    are not counted.
    """
    objective, updates = resolve_objective(config), config.updates_per_step
    ahead = config.rollout.correction.enabled or objective.max_old_prob is not None or config.reward.kl is not None
    old = 0 if config.loss.old_logprobs == "rollout" else updates if ahead else updates - 1
    return old + updates * (uses_reference(config) + (objective.batch_selection is not None))


def _room(config: Config, engine: dict[str, int]) -> dict[str, str]:
    if not config.rollout.engine_spec.reserves_memory:
        return {}
    *_, one = engine.values()
    cache = int(config.rollout.vllm.gpu_memory * GPU_MEMORY) - engine[ENGINE]
    return {"  KV cache at most": f"{_gib(cache)}: {max(0, cache) // one} responses at full length in an engine"}


def _largest(config: Config, found: Simulation) -> int:
    return found.largest_parameter * BYTES[config.model.dtype]


def step_traffic(config: Config, found: Simulation) -> int:
    """Bytes past each rank in a step whose responses are all at full length. Copies of the weights add their gradients
    up once an update.
    """
    n, updates = micro_batches(config), config.updates_per_step
    forward, backward = (sum(kind.bytes for kind in part.values()) for part in (found.forward, found.backward))
    once = found.backward.get("all-reduce", Traffic()).bytes
    return updates * (n * (forward + backward - once) + once) + extra_forwards(config) * n * forward


def _of_a_step(config: Config, found: Simulation) -> str:
    n = micro_batches(config)
    return (
        f"{step_traffic(config, found) / 2**40:.1f} TiB past each rank with all responses at full length: {n} "
        f"micro-batches for each of {config.updates_per_step} updates, {n * extra_forwards(config)} forward passes for "
        f"log-probs{'' if config.critic is None else '; what a critic sends is not counted'}"
    )


def _traffic(part: dict[str, Traffic]) -> str:
    return ", ".join(f"{traffic.calls} {kind} {_gib(traffic.bytes)}" for kind, traffic in part.items())


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
