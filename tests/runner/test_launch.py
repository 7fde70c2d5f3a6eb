"""`dapo launch` and the cluster files: the command that they come to, as torchrun and `dapo` read it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from launch import torchrun
from small import Dapo, write_recipe
from torch.distributed.run import get_args_parser

from dapo_runner.commands.launch import _cause
from dapo_runner.config import load_config
from dapo_runner.parallel.world import make_layout

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "docs" / "cluster"


def plan(dapo: Dapo, *arguments: object) -> Namespace:
    """The command that a dry run prints before its plan, as torchrun reads it."""
    program, *options = shlex.split(dapo("launch", *arguments, "--dry-run").splitlines()[0])
    read: Namespace = get_args_parser().parse_args(options)
    assert (program, read.module, read.training_script) == ("torchrun", True, "dapo_runner")
    return read


def test_the_command_is_that_of_one_machine_or_of_several(tmp_path: Path, dapo: Dapo) -> None:
    recipe, overrides = str(write_recipe(tmp_path)), ["model.tiny.heads=8", "run.name=two ranks"]
    read = plan(dapo, recipe, "--gpus", 2, overrides[0], "--max-restarts", 3, overrides[1])
    assert (read.standalone, read.nproc_per_node, read.max_restarts) == (True, "2", 3)
    assert read.training_script_args == ["train", recipe, *overrides]
    read = plan(
        dapo, recipe, "--gpus", 8, "--nnodes", 2, "--rdzv-endpoint", "first:29500", *overrides, "parallel.gpus=16"
    )
    assert (read.nnodes, read.nproc_per_node, read.rdzv_endpoint) == ("2", "8", "first:29500")
    assert (read.rdzv_backend, read.standalone, read.max_restarts) == ("c10d", False, 0)
    assert read.rdzv_id == "two ranks"  # another run with this endpoint does not join
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("restarts", [0, 1])
def test_attempts_share_no_store(restarts: int, tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")  # so that it is restored
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    found = []
    monkeypatch.setattr(
        "dapo_runner.commands.launch.torchrun",
        lambda _: found.append(os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")),
    )
    dapo("launch", write_recipe(tmp_path), "--gpus", 2, "--max-restarts", restarts)
    assert found == ["1" if restarts else None]


def test_a_plan_is_that_of_all_ranks(tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device, lines in (("auto", 1), ("cpu", 0)):
        command = ["launch", write_recipe(tmp_path), "--gpus", 2, f"run.device={device}", "--dry-run"]
        assert "gpus: 2" in dapo(*command)
        assert dapo.err.count("CPU") == lines


@pytest.mark.parametrize(
    ("ended", "cause"),  # exit code and second of each rank
    [
        ([(1, 5), (-9, 5)], 1),
        ([(1, 5), (7, 6)], 1),
        ([(1, 5), (-6, 5)], 0),
        ([(1, 5), (-9, 35)], 0),  # torchrun kills a rank that does not end
        ([(-15, 5), (-15, 5)], 0),
    ],
)
def test_a_rank_that_has_lost_another_is_not_the_cause(ended: list[tuple[int, int]], cause: int) -> None:
    failures: Any = {rank: SimpleNamespace(exitcode=code, timestamp=at) for rank, (code, at) in enumerate(ended)}
    assert _cause(failures)[0] == cause


ENDS = """
import os
def ends(prompt, completion):
    if os.path.isdir("runs/small/checkpoints/step_000001") and os.environ["RANK"] == "{rank}":
        {how}
    return float(len(completion.text) % 2)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("rank", "how", "reason"),
    [
        (0, "raise KeyError('missing')", "exit code 1"),
        (1, "os._exit(7)", "exit code 7"),
        (1, "os.kill(os.getpid(), 9)", "signal 9"),
    ],
)
def test_two_ranks_train_until_one_of_them_ends(
    rank: int, how: str, reason: str, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    """Each side says it in a line. Only a kill hints at the out-of-memory killer."""
    (tmp_path / "rewards.py").write_text(ENDS.format(rank=rank, how=how))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = ["launch", write_recipe(tmp_path, start, eval_every=0), "--gpus", "2"]
    reward = ["reward.kind=rewards:ends", "sampler.filter_groups=null"]
    program = sys.executable if reason == "signal 9" else python  # once as a user starts it
    done = torchrun(1, "-m", "dapo_runner", *command, *reward, python=program)
    assert done.returncode == 1, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("torchrun --standalone --nproc-per-node 2 -m dapo_runner train ")
    assert sum(line.startswith("step 1/4 ") for line in done.stdout.splitlines()) == 1  # one of the ranks prints
    *of_ranks, of_launcher = [line for line in done.stderr.splitlines() if line.startswith("dapo: ")]
    assert reason in of_launcher
    assert len(of_ranks) <= 1  # none if torchrun ends the other rank before it can print
    assert all(("KeyError: 'missing'" if rank == 0 else "rank 1 ") in line for line in of_ranks)
    assert ("memory" in "".join([*of_ranks, of_launcher])) == (reason == "signal 9")


def check_command(command: list[str], grace: int) -> None:
    """Of a cluster file: torchrun takes it, the recipe takes what follows, and the ranks are those of the recipe."""
    assert command[0] == "torchrun"
    options = get_args_parser().parse_args(command[1:])
    assert (options.module, options.training_script) == (True, "dapo_runner")
    subcommand, recipe, *overrides = options.training_script_args
    assert subcommand == "train"
    config = load_config(ROOT / recipe, overrides)
    make_layout(config, int(options.nnodes) * int(options.nproc_per_node), int(options.nproc_per_node))
    assert config.run.grace < grace


def test_the_slurm_script(tmp_path: Path) -> None:
    script = CLUSTER / "slurm.sh"
    for name, body in (
        ("srun", 'printf "%s\\n" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@"'),
        ("scontrol", "echo a1; echo a2"),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "a[1-16]", "SLURM_NNODES": "16", "SLURM_JOB_ID": "7"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", str(script), "run.name=again"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    timeout, _, *command = run.stdout.splitlines()
    check_command(command, grace=int(timeout))
    assert command[command.index("--rdzv-endpoint") + 1] == "a1:29500"
    assert command[-1] == "run.name=again"
    (signal,) = [line for line in script.read_text().splitlines() if "--signal=" in line]
    assert int(timeout) < int(signal.partition("@")[2])


def test_the_kubernetes_file() -> None:
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (timeout,) = [int(item["value"]) for item in container["env"] if item["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    check_command(container["command"], grace=timeout)
    assert timeout < pod["terminationGracePeriodSeconds"]
    options, name = get_args_parser().parse_args(container["command"][1:]), job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:29500"
    assert int(options.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
