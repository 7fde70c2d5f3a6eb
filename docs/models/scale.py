"""A step of the paper's workload on 8 to 1024 H100s, on paper: `python docs/models/scale.py` prints the tables of
docs/scale.md.

Nothing here was measured on a GPU. Bytes and counts are those that `--simulate` counts; rates are the makers' figures
times a stated efficiency. P parameters, T positions trained on, n GPUs of which s hold one copy of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

GB = 1e9
# H100 SXM, by NVIDIA's data sheet; eight of them in a DGX H100 with eight 400 Gb/s adapters, by its user guide.
MEMORY, BANDWIDTH, FLOPS = 85 * GB, 3350 * GB, 989e12
NVLINK, NETWORK = 450 * GB, 8 * 50 * GB  # bytes a second, one way: of a GPU; of a machine
# Assumptions, each to be replaced by a measurement.
# Of decoding. READ is assumed; LAYER is what it leaves of 75 tokens/s at one request, Llama-3.1-8B in bfloat16 on an
# A100 of 1555 GB/s (vLLM): 1/75 − 2·8.03e9/(0.9·1555e9) = 1.86 ms in 32 layers. SEQUENCE is what both leave of the
# published rates in full batches, 6,300 and 1,200 tokens/s a GPU (7B over 1, 32B over 4): 78 and 80 µs.
READ_EFFICIENCY = 0.9  # of BANDWIDTH
LAYER = 58e-6  # seconds of a layer beside reading: launches and the gaps between kernels, over however many GPUs
SEQUENCE = 80e-6  # seconds of a sequence in a pass beside reading: attention, sampling, scheduling
ALL_REDUCE = 10e-6  # seconds of one beside its bytes; there are two a layer where GPUs share an engine
MATMUL_EFFICIENCY = 0.5  # of FLOPS, recomputed ones counted: an MFU of 0.375
LINK_EFFICIENCY = 0.8
HOP = 3e-6  # seconds a ring takes from a rank to the next
TENSOR = 0.01  # seconds a parameter takes to an engine whatever its size: 5 to 9 ms on the CPU here
STORAGE = (2 * GB, 50 * GB)  # bytes a second a machine writes to a shared file system, and all of them together


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    active: float  # of a token
    layers: int
    hidden: int
    attention: int  # heads × head dimension
    key_value: int
    rollout_tensor: int
    sequence: int
    engine_share: float = 0.6  # of a GPU's memory, for vLLM

    @property
    def engine(self) -> float:
        """Bytes of an engine."""
        return self.rollout_tensor * self.engine_share * MEMORY

    @property
    def passing(self) -> float:
        """Bytes that a forward and backward pass takes beside the shards: what `--simulate` finds, to a GB or two."""
        return 6 * GB + 12 * self.parameters / self.layers

    @property
    def cache(self) -> int:
        """Bytes of keys and values of a token, bfloat16."""
        return 4 * self.layers * self.key_value


@dataclass(frozen=True)
class Work:
    """Of a step."""

    sampled: int
    trained: int
    updates: int
    mean: int  # tokens of a response
    longest: int
    budget: int = 22528  # positions of a micro-batch

    square: float = 1.5  # mean of squared lengths over the square of their mean


MODELS = (
    Model("7B", 7.6e9, 7.6e9, 28, 3584, 28 * 128, 4 * 128, 1, 2),
    Model("32B", 32.8e9, 32.8e9, 64, 5120, 40 * 128, 8 * 128, 4, 8),
    Model("235B-A22B", 235e9, 22e9, 94, 4096, 64 * 128, 4 * 128, 8, 8, engine_share=0.9),
)
PAPER = Work(sampled=3 * 8192, trained=8192, updates=16, mean=4000, longest=20480)
GPUS = (8, 32, 128, 512, 1024)


class Step(NamedTuple):
    rollout: float
    update: float
    sync: float
    checkpoint: float
    longest: float  # seconds the longest response takes at least, of the rollout
    waits: float  # share of the update in which matrix products wait for weights
    shard: int

    @property
    def total(self) -> float:
        return self.rollout + self.update + self.sync + self.checkpoint


def step(model: Model, work: Work, n: int, save_every: int = 5) -> Step | str:
    """Seconds, or why it does not fit."""
    shard = shards(model, n)
    if shard is None:
        held, beside = 12 * model.parameters / n / GB, model.engine_share * MEMORY / GB
        return f"{held:.0f} GB a GPU of weights and moments beside an engine's {beside:.0f}"
    rollout, longest = rollout_time(model, work, n)
    update, waits = update_time(model, work, n, shard)
    checkpoint = 14 * model.parameters / min(max(1, n // 8) * STORAGE[0], STORAGE[1]) / save_every
    return Step(rollout, update, sync_time(model, shard), checkpoint, longest, waits, shard)


def shards(model: Model, n: int) -> int | None:
    """The fewest GPUs that can hold a copy: 16 bytes a parameter beside what a pass takes, 12 beside the engine."""
    for s in (s for s in (8, 16, 32, 64, 128, 256, 512, 1024) if s <= n):
        during_update = 16 * model.parameters / s + model.passing
        during_rollout = 12 * model.parameters / s + model.engine_share * MEMORY
        if max(during_update, during_rollout) < 0.95 * MEMORY:
            return s
    return None


def rollout_time(model: Model, work: Work, n: int) -> tuple[float, float]:
    """An engine decodes a token for each response at a time, and reads its weights and their caches for it. It makes as
    many such passes as its tokens need in batches that its cache holds, and at least as many as the longest response
    has tokens.
    """
    batch = min(256.0, (model.engine - 2 * model.parameters) / (work.mean * model.cache))
    tokens = work.sampled * work.mean / (n / model.rollout_tensor)
    passes = max(tokens / batch, work.longest)
    rollout = passes * pass_time(model, tokens / passes, work.mean / 2)
    return rollout, work.longest * pass_time(model, 1, work.longest / 2)


def pass_time(model: Model, side_by_side: float, context: float) -> float:
    """Seconds of a token for each of so many responses, of which so many tokens are cached on average."""
    read = 1 - (1 - model.active / model.parameters) ** side_by_side  # experts that some token goes through
    size = 2 * model.parameters * read + side_by_side * context * model.cache
    t = model.rollout_tensor
    reading = size / (t * BANDWIDTH * READ_EFFICIENCY)
    if t == 1:
        return reading + model.layers * LAYER + side_by_side * SEQUENCE
    summed = 2 * (t - 1) / t * 2 * model.hidden * side_by_side / (LINK_EFFICIENCY * NVLINK)
    return reading + model.layers * (LAYER + 2 * (ALL_REDUCE + summed)) + side_by_side * SEQUENCE


def update_time(model: Model, work: Work, n: int, shard: int) -> tuple[float, float]:
    """Matrix products and the collectives behind them: the longer of the two for each micro-batch, as weights of the
    next layer come while one is computed.
    """
    positions = work.trained * work.mean / work.updates / (n / model.sequence)  # of an update, on ranks that share them
    micro_batches = max(1, math.ceil(positions / (0.9 * work.budget)))
    rate = model.sequence * FLOPS * MATMUL_EFFICIENCY
    attention = model.layers * model.attention * work.mean * work.square
    forward = positions / micro_batches * 2 * (model.active + attention) / rate
    gather = collective(2 * model.parameters, shard, model.layers)
    passes = [  # compute, and gathering: once forward; for a gradient again, and the gradients scattered
        (4 * forward, 2 * gather + collective(4 * model.parameters, shard, model.layers), work.updates),
        (forward, gather, work.updates - 1),  # old log-probs
    ]
    busy = micro_batches * sum(times * compute for compute, _, times in passes)
    whole = micro_batches * sum(times * max(compute, sent) for compute, sent, times in passes)
    if n > shard:  # copies add their gradients up once an update
        whole += work.updates * 2 * collective(4 * model.parameters / shard, n // shard * 8, model.layers)
    return whole, 1 - busy / whole


def sync_time(model: Model, shard: int) -> float:
    tensors = 12 * model.layers
    return collective(2 * model.parameters, shard, tensors) + tensors * TENSOR


def collective(size: float, n: int, calls: int) -> float:
    """An all-gather or reduce-scatter of ``size`` bytes in so many calls, a ring through n GPUs."""
    link = min(NVLINK, NETWORK) if n > 8 else NVLINK
    return size * (n - 1) / n / (LINK_EFFICIENCY * link) + calls * (n - 1) * HOP


def table(work: Work = PAPER) -> str:
    lines = [
        "| model | GPUs | a copy over | rollout s | of it longest response | update s | waiting for weights "
        "| sync s | checkpoint s | step s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model in MODELS:
        for n in GPUS:
            found = step(model, work, n)
            if isinstance(found, str):
                lines.append(f"| {model.name} | {n} | | does not fit: {found} | | | | | | |")
                continue
            lines.append(
                f"| {model.name} | {n} | {found.shard} | {found.rollout:,.0f} | {found.longest / found.rollout:.0%} "
                f"| {found.update:,.0f} | {found.waits:.0%} | {found.sync:.1f} | {found.checkpoint:.1f} "
                f"| {found.total:,.0f} |"
            )
    return "\n".join(lines)


# What NVIDIA publishes of NeMo-RL 0.4 on H100s: model, workload, GPUs, seconds of a step.
PUBLISHED = (
    (MODELS[1], Work(2048, 2048, 4, 3206, 4096), 32, 393),
    (MODELS[2], Work(512, 512, 1, 5671, 8192), 128, 506),
)


def against_published() -> str:
    lines = ["| model | GPUs | responses × mean length | published s | here s |", "|---|---:|---:|---:|---:|"]
    for model, work, n, seconds in PUBLISHED:
        found = step(model, work, n)
        here = "does not fit" if isinstance(found, str) else f"{found.total:,.0f}"
        lines.append(f"| {model.name} | {n} | {work.trained} × {work.mean} | {seconds} | {here} |")
    return "\n".join(lines)


def server_rates() -> str:
    """BASE and SLOPE of `docs/models/simulate_ahead.py` for Llama-3.1-8B on an H100."""
    model = Model("Llama-3.1-8B", 8.03e9, 8.03e9, 32, 4096, 32 * 128, 8 * 128, 1, 1)
    lines = ["| tokens cached on average | seconds a token | and for each response |", "|---:|---:|---:|"]
    for context in (830, 3700):
        first, second = (pass_time(model, n, context) for n in (1, 2))
        lines.append(f"| {context:,} | {2 * first - second:.4f} | {second - first:.5f} |")
    return "\n".join(lines)


def decode_rates() -> str:
    """Tokens a second of one GPU, in full batches."""
    lines = ["| model | here | published |", "|---|---:|---:|"]
    for model, published in zip(MODELS[:2], ("6,300", "1,200"), strict=True):
        work = Work(10**6, 1, 1, 4000, 4000)
        rate = work.sampled * work.mean / rollout_time(model, work, 8)[0] / 8
        lines.append(f"| {model.name}, tensor parallel {model.rollout_tensor} | {rate:,.0f} | {published} |")
    return "\n".join(lines)


def recipe_steps() -> str:
    """The 32B model with the share of a GPU's memory that the recipe qwen2.5-32b gives to vLLM."""
    steps = {n: step(replace(MODELS[1], engine_share=0.75), PAPER, n) for n in (32, 128)}
    return "\n".join(
        f"qwen2.5-32b, {n} GPUs: {found.total:,.0f} s" for n, found in steps.items() if not isinstance(found, str)
    )


if __name__ == "__main__":
    print(table(), recipe_steps(), decode_rates(), against_published(), server_rates(), sep="\n\n")
