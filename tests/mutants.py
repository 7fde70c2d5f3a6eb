"""Measure what the tests are worth: change one place of the code at a time and see whether a test fails.

    python tests/mutants.py                      # 300 mutants of all rooms: hours
    python tests/mutants.py --sample 20          # minutes
    python tests/mutants.py --room rollout --sample 40 --seed 1

Cosmic Ray makes the mutants. Lines are drawn evenly, weighted to arithmetic, conditions and indices: a line without any
of them is never drawn. Each mutant runs in a copy of the checkout: first the test files that name its module, then the
other tests of its room. The page lists every survivor. `make mutants SAMPLE=20` does the same.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
MARKERS = "not slow and not gpu and not ranks and not vllm"
TIMEOUT = 900  # seconds: a mutant that takes longer does not end, which is noticed
KINDS = ("BinaryOperator", "ComparisonOperator", "UnaryOperator", "AndWithOr", "OrWithAnd", "TrueWithFalse")
KINDS = (*KINDS, "FalseWithTrue", "NumberReplacer", "AddNot", "ZeroIteration", "BreakWithContinue")
ROOMS = {  # folder of the code → folder of its tests; the longest that fits a file is its room
    "dapo_kernels": "tests/kernels",
    "dapo_kernels/integrations": "tests/integrations",
    **{
        f"dapo_runner/{room}": f"tests/runner/{room}"
        for room in ("algorithms", "config", "data", "logging", "parallel", "policy", "rewards", "rollout", "tools")
    },
    "dapo_runner": "tests/runner",  # train.py and the files beside it, run/, commands/, checkpoint/, preflight/
}


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    operator: str
    occurrence: int

    @property
    def room(self) -> str:
        return max((room for room in ROOMS if self.path.startswith(f"{room}/")), key=len)

    @property
    def markers(self) -> str:
        is_for_gpus = "backends/triton" in self.path or "backends/cuda" in self.path
        return MARKERS if is_for_gpus else f"{MARKERS} and not elsewhere"


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    killed: bool
    change: str  # the line before and after
    seconds: float


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Find every mutant of a file, except those of annotations, which nothing evaluates."""
    source = path.read_text(encoding="utf-8")
    tree, skipped = get_ast(source), set(annotated(source))
    for name in sorted(operator_names()):
        if not any(kind in name for kind in KINDS):
            continue
        operator, occurrence = get_operator(name)(), 0
        for node in ast_nodes(tree):
            for (line, column), _ in operator.mutation_positions(node):
                if (line, column) not in skipped:
                    yield Mutant(str(path.relative_to(ROOT)), line, name, occurrence)
                occurrence += 1


def annotated(source: str) -> Iterator[tuple[int, int]]:
    """Yield line and column of all that stands in annotations."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is None:
                continue
            for line in range(annotation.lineno, annotation.end_lineno + 1):
                begin = annotation.col_offset if line == annotation.lineno else 0
                end = annotation.end_col_offset if line == annotation.end_lineno else len(lines[line - 1])
                yield from ((line, column) for column in range(begin, end + 1))


def draw(room: str | None, sample: int, seed: int) -> list[Mutant]:
    """Draw a line, then a kind of mutation on it, then one mutant of that kind."""
    by_line: dict[tuple[str, int], dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for folder in ("dapo_kernels", "dapo_runner"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for mutant in mutants_of(path):
                if room is None or room in mutant.room:
                    kind = mutant.operator.split("_")[0]
                    by_line[mutant.path, mutant.line][kind].append(mutant)
    rng = random.Random(seed)
    lines = rng.sample(sorted(by_line), min(sample, len(by_line)))
    return [rng.choice(by_line[line][rng.choice(sorted(by_line[line]))]) for line in lines]


def tests_for(mutant: Mutant) -> list[str]:
    """Return the test files of a mutant: those that name its module, then the rest of its room."""
    module = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    named = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if module in path.read_text(encoding="utf-8")]
    folder = ROOT / ROOMS[mutant.room]
    rest = folder.glob("test_*.py") if ROOMS[mutant.room] == "tests/runner" else folder.rglob("test_*.py")
    return [str(path.relative_to(ROOT)) for path in dict.fromkeys([*named, *sorted(rest)])]


def copy_checkout(folder: Path) -> Path:
    """Copy the tracked files and the compiled modules."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "dapo_kernels").glob("*.so")]
    for name in (*listed.splitlines(), *built):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def try_mutant(mutant: Mutant, checkout: Path) -> Outcome:
    """Run the tests of a mutant in ``checkout``, which is as before afterwards."""
    path, began = checkout / mutant.path, time.monotonic()
    source = path.read_text(encoding="utf-8")
    mutated = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    assert mutated is not None
    path.write_text(mutated, encoding="utf-8")
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", mutant.markers]
    command = [sys.executable, "-m", "pytest", *options, *tests_for(mutant)]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=checkout, env=environment, timeout=TIMEOUT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        killed = done.returncode != 0
    except subprocess.TimeoutExpired:
        killed = True
    finally:
        path.write_text(source, encoding="utf-8")
    before, after = (text.splitlines()[mutant.line - 1].strip() for text in (source, mutated))
    return Outcome(mutant, killed, f"`{before}` → `{after}`", time.monotonic() - began)


def page(outcomes: list[Outcome], options: argparse.Namespace) -> str:
    """Return the report: the share killed by room, then the survivors."""
    lines = ["# Mutants", "", f"`python tests/mutants.py --sample {options.sample} --seed {options.seed}`", ""]
    lines += ["| room | mutants | killed | share |", "|---|---:|---:|---:|"]
    by_room: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_room[outcome.mutant.room].append(outcome)
    for room, of_room in [*sorted(by_room.items()), ("all", outcomes)]:
        killed = sum(outcome.killed for outcome in of_room)
        lines.append(f"| {room} | {len(of_room)} | {killed} | {killed / len(of_room):.0%} |")
    lines += ["", "Survivors:", ""]
    survivors = sorted((o for o in outcomes if not o.killed), key=lambda o: (o.mutant.path, o.mutant.line))
    lines += [f"- {o.mutant.path}:{o.mutant.line} {o.change}" for o in survivors] or ["- none"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=300, help="how many mutants (default: 300)")
    parser.add_argument("--room", help="only rooms whose folder contains this, as rollout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--out", type=Path, help="a file for the page, rewritten after each mutant")
    options = parser.parse_args()
    chosen, outcomes = draw(options.room, options.sample, options.seed), list[Outcome]()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        checkouts: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            checkouts.put(copy_checkout(Path(scratch) / str(job)))

        def work(mutant: Mutant) -> Outcome:
            checkout = checkouts.get()
            try:
                return try_mutant(mutant, checkout)
            finally:
                checkouts.put(checkout)

        for number, outcome in enumerate(pool.map(work, chosen), start=1):
            outcomes.append(outcome)
            state = "killed" if outcome.killed else f"SURVIVED {outcome.change}"
            where = f"{outcome.mutant.path}:{outcome.mutant.line}"
            print(f"[{number}/{len(chosen)}] {outcome.seconds:4.0f} s  {where} {state}", flush=True)
            if options.out is not None:
                options.out.write_text(page(outcomes, options), encoding="utf-8")
    print(page(outcomes, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
