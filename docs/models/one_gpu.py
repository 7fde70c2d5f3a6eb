"""Eight billion parameters on one GPU of 80 GB: the memory of each phase of a step, as `--simulate` finds it.

    python -m docs.models.one_gpu > benchmarks/results/one-gpu-simulated-DATE.md

Nothing here was measured on a GPU.
"""

from __future__ import annotations

from dapo_runner.config import load_config
from dapo_runner.preflight.memory import GPU_MEMORY
from dapo_runner.preflight.simulate import KINDS_OF_ONE, simulate
from dapo_runner.preflight.simulate_report import fits, phase_peaks

GIB = 2**30
PHASES = ("rollout", "log-probs", "update", "sync")
FULL, LORA = "qwen3-8b-1gpu", "qwen3-8b-lora-1gpu"
CASES: list[tuple[str, list[str]]] = [
    (FULL, []),
    (FULL, ["model.gradient_checkpointing=offload"]),
    (FULL, ["optimizer.offload=false"]),
    (LORA, []),
    (LORA, ["rollout.vllm.sleep=false", "rollout.vllm.gpu_memory=0.55"]),
]


def case_name(recipe: str, overrides: list[str]) -> str:
    return " ".join(f"`{part}`" for part in (recipe, *overrides))


def rows_of(recipe: str, overrides: list[str]) -> tuple[str, str]:
    """Return the row of the phases and the row of the update's parts."""
    config = load_config(f"recipes/{recipe}.yaml", overrides)
    found = simulate(config)
    peaks = phase_peaks(config, found)
    sizes = [f"{peaks[phase] / GIB:.1f}" for phase in PHASES] + [f"{found.host / GIB:.1f}"]
    name, verdict = case_name(recipe, overrides), "yes" if fits(config, found) else "no"
    parts = " | ".join(f"{size / GIB:.1f}" for size in found.peak.values())
    return f"| {name} | {' | '.join(sizes)} | {verdict} |", f"| {name} | {parts} |"


def page(cases: list[tuple[str, list[str]]]) -> str:
    phases, parts = zip(*(rows_of(*case) for case in cases), strict=True)
    return f"""# Eight billion parameters on one GPU of 80 GB, simulated

Written by `python -m docs.models.one_gpu`. Nothing here was measured on a GPU: `--simulate` runs the code for Qwen3-8B on fake tensors.
GiB at the peak of each phase. torch reports {GPU_MEMORY / GIB:.1f} GiB for an 80 GB GPU. Add a few GiB for the CUDA context and fragmentation.
*Machine*: host memory that the trainer takes, and vLLM's base weights where it sleeps beside adapters. "Fits" is of the GPU alone.

| recipe and what is set otherwise | {" | ".join(PHASES)} | host memory | fits |
|---|{"---:|" * (len(PHASES) + 1)}---|
{chr(10).join(phases)}

The update at its peak, by part:

| recipe and what is set otherwise | {" | ".join(KINDS_OF_ONE)} |
|---|---:|---:|
{chr(10).join(parts)}
"""  # noqa: E501


if __name__ == "__main__":
    print(page(CASES), end="")
