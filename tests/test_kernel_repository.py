"""The repository for the `kernels` package: it loads where dapo-kernels is not installed, and computes the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from dapo_kernels import dapo_loss, linear_dapo_loss

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "triton.md").read_text(encoding="utf-8")
((LOAD, CALL),) = re.findall(r"^```python\n(.+?)\n(out = .+?)\n```", PAGE, re.DOTALL | re.MULTILINE)
# As `kernels.get_local_kernel` imports a variant.
BY_PATH = """
import importlib.util, json, types
def get_local_kernel(path):
    variant = path / "build" / "torch-cuda"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
sys.modules["kernels"] = types.SimpleNamespace(get_local_kernel=get_local_kernel)
"""
# dapo_kernels itself cannot be imported there.
PROGRAM = f"""
import sys
sys.modules["dapo_kernels"] = None
{{kernels}}
{LOAD}
import torch
(hidden, weight, logits), (targets, old_logprobs, advantages) = torch.load("inputs.pt")
with losses.use_backend("triton"):
    {CALL}
    gradients = torch.autograd.grad(out.loss, (hidden, weight))
    second = losses.dapo_loss(logits, targets, old_logprobs, advantages).loss
    gradients += torch.autograd.grad(second, (logits,))
torch.save((out.loss.detach(), second.detach(), *gradients), "results.pt")
"""


def check(python: str | Path, folder: Path, kernels: str = "") -> None:
    """Compare both losses, with their gradients, of the repository in another process with those of this package."""
    repository = folder / "dist" / "kernel"
    subprocess.run([sys.executable, ROOT / ".ci" / "kernel_repository.py", repository], check=True)
    for variant in (repository / "build").iterdir():
        assert json.loads((variant / "metadata.json").read_text())["backend"] == {"type": variant.name[6:]}
    generator = torch.Generator().manual_seed(0)
    hidden, weight, logits = (
        torch.randn(shape, generator=generator).requires_grad_() for shape in ((12, 8), (33, 8), (12, 33))
    )
    ids, advantages = torch.randint(33, (12,), generator=generator), torch.randn(12, generator=generator)
    tokens = (ids, torch.full((12,), -3.0), advantages)
    torch.save(((hidden, weight, logits), tokens), folder / "inputs.pt")
    command = [python, "-W", "error::UserWarning:dapo_kernels", "-c", PROGRAM.format(kernels=kernels)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, cwd=folder, env=environment)
    losses = linear_dapo_loss(hidden, weight, *tokens).loss, dapo_loss(logits, *tokens).loss
    gradients = (*torch.autograd.grad(losses[0], (hidden, weight)), *torch.autograd.grad(losses[1], (logits,)))
    for got, wanted in zip(torch.load(folder / "results.pt"), (*losses, *gradients), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.elsewhere
def test_it_loads_by_itself_and_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    check(sys.executable, tmp_path, BY_PATH)


@pytest.mark.slow
def test_the_kernels_package_loads_it_in_a_clean_environment(tmp_path: Path) -> None:
    """A minute with a network: its dependencies are installed. Torch and Triton are those of this environment."""
    pytest.importorskip("triton")
    if torch.version.cuda is not None:
        pytest.skip("kernels loads the CUDA variant there, and the interpreter takes tensors on a CPU")
    venv, here = tmp_path / "venv", sysconfig.get_paths()["purelib"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "kernels>=0.17,<0.18"]
    if subprocess.run(install).returncode:
        pytest.skip("kernels cannot be installed here")
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True
    )
    (Path(purelib.stdout.strip()) / "torch.pth").write_text(here)  # behind the packages of kernels
    check(python, tmp_path)
