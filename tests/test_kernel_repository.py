"""The repository for the `kernels` package: it loads where dapo-kernels is not installed, and computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dapo_kernels import linear_dapo_loss

ROOT = Path(__file__).parent.parent
# As `kernels.get_local_kernel` imports a variant; dapo_kernels itself cannot be imported there.
PROGRAM = """
import importlib.util, json, sys
from pathlib import Path

sys.modules["dapo_kernels"] = None
variant = Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)

import torch

hidden, weight, ids, old, advantages = torch.load(sys.argv[2])
with module.use_backend("triton"):
    out = module.linear_dapo_loss(hidden, weight, ids, old, advantages)
torch.save((out.loss.detach(), *torch.autograd.grad(out.loss, (hidden, weight))), sys.argv[3])
"""


@pytest.mark.elsewhere
def test_it_loads_by_itself_and_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    repository, inputs, results = tmp_path / "kernel", tmp_path / "inputs.pt", tmp_path / "results.pt"
    subprocess.run([sys.executable, ROOT / ".ci" / "kernel_repository.py", repository], check=True)
    (variant,) = (repository / "build").iterdir()
    assert json.loads((variant / "metadata.json").read_text())["backend"] == {"type": "cuda"}
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (12, 33))
    ids, advantages = torch.randint(33, (12,), generator=generator), torch.randn(12, generator=generator)
    arguments = (hidden, weight, ids, torch.full((12,), -3.0), advantages)
    torch.save(arguments, inputs)
    command = [sys.executable, "-W", "error::UserWarning:dapo_kernels", "-c", PROGRAM, variant, inputs, results]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "TRITON_INTERPRET": "1"})
    out = linear_dapo_loss(*arguments)
    expected = (out.loss.detach(), *torch.autograd.grad(out.loss, (hidden, weight)))
    for got, wanted in zip(torch.load(results), expected, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-7)
