"""An installation: what an import brings, commands without extras, and errors where a package is absent."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dapo_kernels
import dapo_runner
from dapo_kernels.integrations.versions import TRL, VERL, VLLM, Supported, require
from dapo_runner.commands.doctor import OPTIONAL
from dapo_runner.packages import RUNNER

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
WITHOUT_EXTRAS = """
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


def fresh(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own, with ``paths`` before everything else."""
    path = os.pathsep.join([*map(str, paths), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=ROOT)


def dapo_without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the `dapo` command in a checkout that is not installed, without a package of an extra."""
    absent = [requirement.partition(">=")[0] for requirement, _ in RUNNER]
    modules = ["yaml" if name == "pyyaml" else name for name in absent] + ["numpy", "tokenizers", "huggingface_hub"]
    return fresh(WITHOUT_EXTRAS.format(absent=[*absent, "dapo-kernels"], modules=modules, arguments=list(arguments)))


def test_linters_check_for_the_oldest_python() -> None:
    """mypy then reports what the standard library has only in a newer one."""
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


def test_imports_bring_no_more_than_is_used() -> None:
    trainers = ["trl", "verl", "transformers", "peft", "accelerate", "datasets", "vllm", "dapo_runner"]
    done = fresh(
        f"""if True:
        import sys
        import dapo_runner
        assert not {{"torch", "pydantic", "transformers", "yaml"}} & set(sys.modules)
        sys.modules.pop("dapo_runner")
        import dapo_kernels, dapo_kernels.integrations
        assert not set({trainers}) & set(sys.modules)
        from dapo_runner.loop import train as function
        from dapo_runner import Config, ConfigError, load_config, train
        assert train is function and Config.__module__ == "dapo_runner.config.settings"
        assert issubclass(ConfigError, Exception) and callable(load_config)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    with pytest.raises(AttributeError, match="Trainer"):
        dapo_runner.Trainer  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["train", "--help"], "--dry-run"),
        (["recipes", "tiny"], "train_size: 6000"),
        (["doctor"], "dapo-kernels[runner]"),
    ],
)
def test_commands_that_need_no_extra(arguments: list[str], printed: str) -> None:
    done = dapo_without_extras(*arguments)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


@pytest.mark.parametrize("arguments", [["train", "tiny"], ["report", "runs/tiny"]])
def test_a_command_that_needs_more_names_the_extra(arguments: list[str]) -> None:
    done = dapo_without_extras(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "transformers>=5.6, datasets>=4.0, pydantic>=" in done.stderr
    assert "pip install 'dapo-kernels[runner]'" in done.stderr


def test_the_extras_bring_what_is_looked_for_and_supported() -> None:
    assert [requirement for requirement, _ in RUNNER] == EXTRAS["runner"]
    known = {requirement for requirements in EXTRAS.values() for requirement in requirements}
    assert {requirement for requirement, _ in OPTIONAL} - known == {"flash-attn"}
    for extra, supported in (("trl", TRL), ("verl", VERL), ("vllm", VLLM)):
        requirements = [requirement.partition(";")[0] for requirement in EXTRAS[extra]]
        assert [one.requirement for one in supported] == requirements
    assert dapo_kernels.__version__ == importlib.metadata.version("dapo-kernels")


@pytest.mark.parametrize(
    ("below", "covered", "refused"),
    [
        ("1.17", ["1.16", "1.16.0", "1.16.3", "1.16.1.dev0"], ["1.15.9", "1.17", "1.17.0", "2.0.0.dev0", "0.24"]),
        (None, ["1.16", "1.16.0+cpu", "1.40.1", "2.0"], ["1.15.9"]),
    ],
)
def test_versions_that_are_supported(below: str | None, covered: list[str], refused: list[str]) -> None:
    supported = Supported("trl", "1.16", below)
    assert all(supported.covers(version) for version in covered)
    assert not any(supported.covers(version) for version in refused)


@pytest.mark.parametrize("package", ["json", "no_such_package"], ids=["a module without a version", "not installed"])
def test_a_package_that_is_not_supported_is_refused_by_name(package: str) -> None:
    with pytest.raises(ImportError) as caught:
        require("adapter", Supported("torch", "2"), Supported(package, "0.1", "0.2"))
    assert all(word in str(caught.value) for word in ("adapter", f"pip install '{package}>=0.1,<0.2'"))


def test_an_adapter_checks_its_trainer_before_it_imports_it(tmp_path: Path) -> None:
    """On a package that is no more than its name and version."""
    version = "0.10.0.dev0"
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").touch()
    about = tmp_path / f"verl-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
    error = fresh("import dapo_kernels.integrations.verl", tmp_path).stderr.strip().splitlines()[-1]
    for word in ("dapo_kernels.integrations.verl", version, "pip install 'verl>=0.9,<0.10'"):
        assert word in error
