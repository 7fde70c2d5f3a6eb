"""What an installation is: its version, its types, and the commands that work without the runner's packages."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import dapo_kernels
import dapo_runner
from dapo_runner.preflight.packages import RUNNER

ROOT = Path(__file__).parent.parent
PLAIN = """
import importlib.metadata, sys

installed = importlib.metadata.version

def version(name):
    if name in {absent!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

importlib.metadata.version = version
for name in {modules!r}:
    sys.modules[name] = None
from dapo_runner.cli import main
sys.exit(main({arguments!r}))
"""


def plain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The `dapo` command as `pip install dapo-kernels` leaves it, without extras."""
    absent = [name for name, _ in RUNNER]
    modules = ["yaml" if name == "pyyaml" else name for name in absent] + ["numpy", "tokenizers", "huggingface_hub"]
    code = PLAIN.format(absent=absent, modules=modules, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--help"], "run a recipe"),
        (["train", "--help"], "--dry-run"),
        (["recipes"], "DAPO in minutes"),
        (["recipes", "tiny"], "train_size: 6000"),
        (["doctor"], "pip install 'dapo-kernels[runner]'  (recipes)"),
    ],
)
def test_commands_that_need_no_extra(arguments: list[str], printed: str) -> None:
    done = plain(*arguments)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


@pytest.mark.parametrize("arguments", [["train", "tiny"], ["eval", "runs/tiny"], ["report", "runs/tiny"]])
def test_a_command_that_needs_more_names_the_extra(arguments: list[str]) -> None:
    done = plain(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "transformers, datasets, pydantic" in done.stderr
    assert "pip install 'dapo-kernels[runner]'" in done.stderr


def test_the_python_form_costs_nothing_until_it_is_asked_for() -> None:
    code = """if True:
        import sys
        import dapo_runner
        heavy = {"torch", "pydantic", "transformers", "yaml"} & set(sys.modules)
        assert not heavy, heavy
        from dapo_runner.train import train as function
        from dapo_runner import Config, ConfigError, load_config, train
        assert train is function and Config.__module__ == "dapo_runner.config.settings"
        assert issubclass(ConfigError, Exception) and callable(load_config)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="'Trainer'"):
        dapo_runner.Trainer  # noqa: B018


def test_what_is_looked_for_is_what_the_extra_brings() -> None:
    tomllib = pytest.importorskip("tomllib")
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["runner"]
    assert [name for name, _ in RUNNER] == [requirement.partition(">=")[0] for requirement in extra]


def test_the_version_is_the_installed_one() -> None:
    assert dapo_kernels.__version__ == importlib.metadata.version("dapo-kernels")
