"""`dapo launch` and the cluster files: the command that they come to, as torchrun and `dapo` read it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small import write_recipe
from torch.distributed.run import get_args_parser

from dapo_runner.cli import main
from dapo_runner.commands import launch
from dapo_runner.config import load_config
from dapo_runner.parallel.world import make_layout

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "docs" / "cluster"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torchrun would be given."""
    command: list[str] = []
    monkeypatch.setattr(launch, "torchrun", command.extend)
    return command


def test_one_machine(tmp_path: Path, launched: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write_recipe(tmp_path))
    assert not (
        main(["launch", recipe, "--gpus", "2", "optimizer.lr=1e-4", "--max-restarts", "3", "run.name=two ranks"])
    )
    torchrun = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    program = ["-m", "dapo_runner", "train", recipe, "optimizer.lr=1e-4", "run.name=two ranks"]
    assert launched == [*torchrun, *program]
    assert shlex.split(capsys.readouterr().out) == ["torchrun", *torchrun, *program]


def test_several_machines(tmp_path: Path, launched: list[str]) -> None:
    recipe = str(write_recipe(tmp_path))
    assert main(["launch", recipe, "--gpus", "8", "--nnodes", "2", "--rdzv-endpoint", "first:29500"]) == 0
    options = get_args_parser().parse_args(launched)
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("2", "8", "first:29500")
    assert (options.rdzv_backend, options.standalone, options.max_restarts) == ("c10d", False, 0)
    assert (options.module, options.training_script) == (True, "dapo_runner")
    assert options.training_script_args == ["train", recipe]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus: expected at least 1, got 0"),
        (["--gpus", "2", "--nnodes", "2"], "--rdzv-endpoint: "),
        (["--gpus", "2", "--rdzv-endpoint", "first:29500"], "--rdzv-endpoint: "),
        (["--gpus", "2", "optimizer.lr=fast"], "optimizer.lr: "),
        (["--gpus", "2", "parallel.gpus=4"], "parallel.gpus: expected 4 processes"),
        (["--gpus", "2", "parallel.sequence=4"], "parallel.sequence: expected a divisor of 2"),
        (["--gpus", "2", "--standalone"], "--standalone"),
    ],
)
def test_mistakes_start_nothing(
    arguments: list[str], message: str, tmp_path: Path, launched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(write_recipe(tmp_path)), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not launched


def test_a_dry_run_makes_the_plan_of_all_ranks(
    tmp_path: Path, launched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(write_recipe(tmp_path)), "--gpus", "2", "--dry-run"]) == 0
    assert not launched
    assert "gpus: 2" in capsys.readouterr().out


def test_processes_without_a_gpu_are_told(
    tmp_path: Path, launched: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = str(write_recipe(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device, lines in (("auto", 1), ("cpu", 0)):
        assert main(["launch", recipe, "--gpus", "2", f"run.device={device}"]) == 0
        assert capsys.readouterr().err.count("CPU") == lines
    assert launched


@pytest.mark.ranks
def test_it_trains_on_two_ranks(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=1)
    command = [sys.executable, "-m", "dapo_runner", "launch", str(recipe), "--gpus", "2", "run.eval_every=0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("torchrun --standalone --nproc-per-node 2 -m dapo_runner train ")
    assert sum(line.startswith("step 1/1 ") for line in done.stdout.splitlines()) == 1, done.stderr[-4000:]


@pytest.mark.ranks
def test_a_reward_that_fails_is_a_line_of_each_side(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def fails(prompt, completion):\n    raise KeyError('missing')\n")
    recipe = write_recipe(tmp_path, steps=1)
    command = [sys.executable, "-m", "dapo_runner", "launch", str(recipe), "--gpus", "2", "reward.kind=rewards:fails"]
    paths = os.pathsep.join((str(ROOT), str(tmp_path)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("dapo: ")]
    assert len(said) == 2, done.stderr
    assert "reward rewards:fails: KeyError: 'missing'" in said[0]
    assert "exit code 1" in said[1]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ending", "reason", "memory"),
    [("os._exit(7)", "exit code 7", False), ("os.kill(os.getpid(), 9)", "signal 9", True)],
)
def test_a_rank_that_ends_without_an_error(tmp_path: Path, ending: str, reason: str, memory: bool) -> None:
    """Only a kill hints at the out-of-memory killer."""
    body = f"    if os.environ['RANK'] == '1':\n        {ending}\n    return 1.0\n"
    (tmp_path / "rewards.py").write_text(f"import os\n\n\ndef ends(prompt, completion):\n{body}")
    recipe = write_recipe(tmp_path, steps=1)
    command = [sys.executable, "-m", "dapo_runner", "launch", str(recipe), "--gpus", "2", "reward.kind=rewards:ends"]
    paths = os.pathsep.join((str(ROOT), str(tmp_path)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    lost, first = (line for line in done.stderr.splitlines() if line.startswith("dapo: "))
    assert "rank 1 " in lost
    assert reason in first
    assert ("memory" in lost + first) == memory


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
    subprocess.run(["bash", "-n", str(script)], check=True)
    for name, body in (
        ("srun", 'printf "%s\\n" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@"'),
        ("scontrol", "echo a1; sleep 0.1; echo a2"),
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
    options = get_args_parser().parse_args(container["command"][1:])
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:29500"
    assert int(options.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
