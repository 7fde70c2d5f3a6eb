"""What importing the package costs and leaves alone; what the integrations say when their trainer is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAINERS = ("trl", "verl", "transformers", "peft", "accelerate", "datasets", "vllm", "dapo_runner")


def fresh(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own, with ``paths`` before everything else."""
    path = os.pathsep.join([*map(str, paths), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def test_import_is_quick_and_brings_no_trainer() -> None:
    """Torch's own time is not counted; Triton's is torch's where it is installed."""
    code = """if True:
        import json, sys, time
        import torch, torch.library
        start, before = time.process_time(), set(sys.modules)
        import dapo_kernels
        spent = time.process_time() - start
        print(json.dumps([spent, sorted({name.split(".")[0] for name in set(sys.modules) - before})]))
    """
    done = fresh(code)
    assert done.returncode == 0, done.stderr
    seconds, brought = json.loads(done.stdout)
    assert not set(TRAINERS) & set(brought)
    assert seconds < 1.0
    assert done.stderr == ""


def test_integrations_package_brings_no_trainer() -> None:
    done = fresh("import sys, dapo_kernels.integrations; print([name in sys.modules for name in ('trl', 'verl')])")
    assert done.stdout.strip() == "[False, False]", done.stderr


def fake_verl(folder: Path, version: str) -> Path:
    """A package that passes for some verl until more than its version is looked at."""
    package = folder / "verl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (folder / f"verl-{version}.dist-info").mkdir()
    (folder / f"verl-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n"
    )
    return folder


@pytest.mark.parametrize("version", ["0.8.0", "0.10.0.dev0"])
def test_another_verl_is_refused_by_name(version: str, tmp_path: Path) -> None:
    done = fresh("import dapo_kernels.integrations.verl", fake_verl(tmp_path, version))
    error = done.stderr.strip().splitlines()[-1]
    for words in ("dapo_kernels.integrations.verl", "verl >= 0.9, < 0.10", version, "pip install 'verl>=0.9,<0.10'"):
        assert words in error


def test_missing_verl_is_said() -> None:
    done = fresh("import sys; sys.modules['verl'] = None; import dapo_kernels.integrations.verl")
    assert done.stderr.strip().endswith("it is not installed: pip install 'verl>=0.9,<0.10'")
