"""Collect what a GPU machine without a network needs, in parts of at most 50 MiB: ``make gpu-bundle``.

    python .ci/gpu_bundle.py [--all] [build/gpu-bundle]

Part 1 has what most machines with torch lack: packages of the build and of the runner, and the peers. ``--all`` adds
the compiler of quack's kernels and Liger's scaled cross-entropy, in further parts. A file that is larger than a part is
cut; ``gpu.sh`` joins the pieces. Every part names the commit, because a copied tree has no .git. vLLM and the weights
of a model are too large: gpu-5-run.txt names what stage 5 took instead.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import machine  # noqa: E402

PART_BYTES = 50 * 2**20  # a call takes 64 MiB, and the checkout is one of 10
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34)] + ["manylinux2014_x86_64"]
TARGET = ["--only-binary=:all:", "--implementation", "cp", *(f"--platform={name}" for name in PLATFORMS)]
WHOLE = ("pydantic", "pytest")  # with the dependencies, whose versions must match
# Without them: they would bring another torch, and most are there.
ALONE = ("datasets", "dill", "multiprocess", "ninja", "pybind11", "setuptools")
LARGE = ("nvidia-cutlass-dsl-libs-cu13",)


def download(name: str, python: str, to: Path) -> str | None:
    """Download the wheels of a package for the GPU machine's Python; return why it failed."""
    alone = [] if name in WHOLE else ["--no-deps"]
    options = ["--quiet", "--disable-pip-version-check", "--python-version", python, *TARGET, *alone]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(to), name]
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else None


def split(files: list[Path], folder: Path, limit: int = PART_BYTES) -> list[int]:
    """Copy files into folders 1, 2, … of at most ``limit`` bytes each, cut where they are larger. Return the sizes."""
    pieces = [(path, start) for path in files for start in range(0, path.stat().st_size, limit)]
    sizes: list[int] = []
    for path, start in sorted(pieces, key=lambda piece: piece[0].stat().st_size > limit):  # small files come first
        size = path.stat().st_size
        data = path.read_bytes()[start : start + limit]
        number = next((n for n, taken in enumerate(sizes) if taken + len(data) <= limit), len(sizes))
        sizes += [0] * (number == len(sizes))
        sizes[number] += len(data)
        part = folder / str(number + 1)
        part.mkdir(parents=True, exist_ok=True)
        suffix = f".{start // limit + 1}of{-(-size // limit)}" if size > limit else ""
        (part / f"{path.name}{suffix}").write_bytes(data)
    return sizes


def bundle(folder: Path, everything: bool = False, python: str = PYTHON) -> str:
    """Write the parts anew; return their sizes and, by name, what could not be had."""
    shutil.rmtree(folder, ignore_errors=True)
    peers = (ROOT / "benchmarks" / "gpu-peers.txt").read_text().split()
    lines = []
    with tempfile.TemporaryDirectory() as fresh:
        for name in (*WHOLE, *ALONE, *(peer for peer in peers if everything or peer not in LARGE)):
            if (why := download(name, python, Path(fresh))) is not None:
                lines.append(f"skipped {name}: {why}")
        sizes = split(sorted(Path(fresh).iterdir()), folder)
    for number, size in enumerate(sizes, 1):
        part = folder / str(number)
        made_from = {"commit": machine.git_commit(), "sources": machine.sources()}
        (part / "commit.json").write_text(json.dumps(made_from))
        lines.append(f"{size / 2**20:6.1f} MiB  {part}: {', '.join(sorted(path.name for path in part.iterdir()))}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=machine.BUNDLE)
    parser.add_argument("--all", action="store_true", help="also the large ones")
    parser.add_argument("--python", default=PYTHON, help="of the GPU machine")
    options = parser.parse_args()
    print(bundle(options.folder, options.all, options.python))
