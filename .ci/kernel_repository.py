"""Write the losses as a kernel repository for the `kernels` package: Python and Triton, nothing to compile.

    python .ci/kernel_repository.py FOLDER

``kernels.get_local_kernel(FOLDER)`` loads it: one variant for CUDA, one for machines without a GPU, where the losses
run on PyTorch. In it the package has a name of its own, made from its contents, so that it and an installed
dapo-kernels, or two versions of it, can be loaded side by side: also the names of its operators.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dapo_kernels"
BACKENDS = ("cuda", "cpu")
# What needs another package, or the compiled modules; and the warning that these are absent.
LEFT_OUT = ("integrations", "backends/cpp.py", "backends/cuda.py")
WARNING = re.compile(r'^if _why_not\("cpp"\) is not None:\n    warnings\.warn\(.*\n', re.MULTILINE)


def write_repository(folder: Path) -> list[Path]:
    """Write build/torch-cuda and build/torch-cpu below ``folder`` anew. Returns them."""
    sources = {
        path.relative_to(PACKAGE): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
        if not str(path.relative_to(PACKAGE)).startswith(LEFT_OUT)
    }
    registry = Path("backends/registry.py")
    sources[registry], n_warnings = WARNING.subn("", sources[registry])
    assert n_warnings == 1
    digest = hashlib.sha256("\0".join(f"{path}\0{text}" for path, text in sources.items()).encode()).hexdigest()
    return [write_variant(folder / "build" / f"torch-{name}", name, digest[:12], sources) for name in BACKENDS]


def write_variant(out: Path, backend: str, digest: str, sources: dict[Path, str]) -> Path:
    name = f"dapo_kernels_{backend}_{digest}"
    shutil.rmtree(out, ignore_errors=True)
    for path, text in sources.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(re.sub(r"\bdapo_kernels\b", name, text), encoding="utf-8")
    about = {"name": "dapo-kernels", "id": name, "version": 1, "license": "Apache-2.0", "python-depends": []}
    (out / "metadata.json").write_text(json.dumps({**about, "backend": {"type": backend}}), encoding="utf-8")
    return out


if __name__ == "__main__":
    print(*write_repository(Path(sys.argv[1])), sep="\n")
