"""Collect what a GPU machine without a network needs, in parts that fit into its calls: ``make gpu-bundle``.

    python .ci/gpu_bundle.py [--all] [build/gpu-bundle]

Part 1 goes with every call, because a call may meet a new machine. It has what most machines with torch lack: packages
of the build and of the runner, and the peers. ``--all`` adds the compiler of quack's kernels and Liger's scaled
cross-entropy. It is cut into parts 2, 3, …, which ``gpu.sh`` joins; each fits into a call beside the checkout and part
1. Every part names the commit, because a copied tree has no .git. vLLM and the weights of a model are too large:
gpu-5-run.txt names what stage 5 took instead.
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

CALL_BYTES = 64 * 2**20  # of checkout and parts
SPARE_BYTES = 4 * 2**20  # the results of earlier calls travel too
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


def room(checkout: Path = ROOT) -> int:
    """Return the bytes that a call has room for beside the checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [checkout / name for name in names if (checkout / name).is_file()]
    return CALL_BYTES - SPARE_BYTES - sum(path.stat().st_size for path in files)


def split(files: list[Path], folder: Path, limit: int) -> list[int]:
    """Copy files into folder 1, and those of more than half of ``limit`` bytes, cut, into folders 2, 3, … Each of them
    has at most ``limit`` bytes together with folder 1. Return the sizes.
    """
    large = [path for path in files if path.stat().st_size > limit / 2]
    parts = [[(path.name, path.read_bytes()) for path in files if path not in large]]
    left = limit - sum(len(data) for _, data in parts[0])
    if left <= 0:
        sys.exit(f"gpu_bundle: part 1 is {-left / 2**20:.1f} MiB too large for a call")
    for path in large:
        data = path.read_bytes()
        pieces = [data[start : start + left] for start in range(0, len(data), left)]
        parts += [[(f"{path.name}.{n}of{len(pieces)}", piece)] for n, piece in enumerate(pieces, 1)]
    for number, part in enumerate(parts, 1):
        (folder / str(number)).mkdir(parents=True)
        for name, data in part:
            (folder / str(number) / name).write_bytes(data)
    return [sum(len(data) for _, data in part) for part in parts]


def bundle(folder: Path, everything: bool = False, python: str = PYTHON) -> str:
    """Write the parts anew; return their sizes and, by name, what could not be had."""
    shutil.rmtree(folder, ignore_errors=True)
    peers = (ROOT / "benchmarks" / "gpu-peers.txt").read_text().split()
    lines = []
    with tempfile.TemporaryDirectory() as fresh:
        for name in (*WHOLE, *ALONE, *(peer for peer in peers if everything or peer not in LARGE)):
            if (why := download(name, python, Path(fresh))) is not None:
                lines.append(f"skipped {name}: {why}")
        sizes = split(sorted(Path(fresh).iterdir()), folder, room())
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
