"""Measure what the tests are worth: change one place of the code at a time and see whether a test fails.

    python tests/mutants.py                           # 15 mutants of each room: hours
    python tests/mutants.py --per-room 1              # minutes
    python tests/mutants.py --room rollout --per-room 40 --seed 1

Cosmic Ray makes the mutants. Lines are drawn evenly, weighted to arithmetic, conditions and indices: a line without any
of them is never drawn. A copy of the checkout runs the tests of a mutant's room until one fails: first the files that
import its module, the short ones first. Before that each file has to pass with nothing changed. `make mutants
PER_ROOM=1` does the same and writes the page, which lists every survivor.

A mutant is killed when a test fails. Three outcomes are counted apart and are no part of the share: equivalent (listed
with its reason in --equivalent), unloadable (the tests could not be collected) and timeout.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.txt"
NO_TESTS = 5  # of pytest's exit codes
MARKERS = "not slow and not gpu and not vllm"
KINDS = ["BinaryOperator", "ComparisonOperator", "UnaryOperator", "AndWithOr", "OrWithAnd", "AddNot", "NumberReplacer"]
KINDS += ["TrueWithFalse", "FalseWithTrue", "ZeroIteration", "BreakWithContinue"]
TRAINING = "tests/runner/test_*.py"
ROOMS = {  # folder of the code → its tests; the longest folder that fits a file is its room
    "dapo_kernels": ["tests/kernels"],
    "dapo_kernels/backends": ["tests/kernels"],
    "dapo_kernels/backends/triton": ["tests/kernels/test_triton*.py", "tests/kernels/test_elsewhere.py"],
    "dapo_kernels/engine": ["tests/kernels"],
    "dapo_kernels/integrations": ["tests/integrations"],
    "dapo_kernels/objectives": ["tests/kernels"],
    **{
        f"dapo_runner/{room}": [f"tests/runner/{room}"]
        for room in ("algorithms", "config", "data", "logging", "parallel", "policy", "rewards", "rollout", "tools")
    },
    "dapo_runner/checkpoint": ["tests/runner/test_checkpoint.py", "tests/runner/test_resume.py"],
    "dapo_runner/commands": [
        "tests/runner/test_cli.py",
        "tests/runner/test_evaluate.py",
        "tests/runner/test_launch.py",
    ],
    "dapo_runner/environments": ["tests/runner/environments", "tests/runner/rollout/test_episodes.py"],
    "dapo_runner/preflight": [
        "tests/runner/test_[drs]*.py",
        "tests/runner/test_cli.py",
        "tests/runner/test_tiny_model.py",
        "tests/runner/rollout/test_server_settings.py",
    ],
    "dapo_runner/run": [TRAINING],
    "dapo_runner": [TRAINING],
}
SELECTED = {  # room → markers of its tests; "": of every other room
    "": f"{MARKERS} and not ranks and not elsewhere",
    "dapo_runner/parallel": f"{MARKERS} and not elsewhere",  # tested on several processes
    "dapo_kernels/backends/triton": f"{MARKERS} and not ranks",  # interpreted
}


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    operator: str
    occurrence: int

    @property
    def room(self) -> str:
        return room_of(self.path)

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    state: str  # killed, survived, equivalent, unloadable or timeout
    change: str  # the line before and after
    seconds: float


def room_of(path: str) -> str:
    return max((room for room in ROOMS if path.startswith(f"{room}/")), key=len)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Find every mutant of a file, except those of annotations, which nothing evaluates."""
    source = path.read_text(encoding="utf-8")
    nodes, skipped = list(ast_nodes(get_ast(source))), set(annotated(source))
    for name in sorted(operator_names()):
        if not any(kind in name for kind in KINDS):
            continue
        operator, occurrence = get_operator(name)(), 0
        for node in nodes:
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


def draw(rooms: str | None, per_room: int, seed: int) -> list[Mutant]:
    """Draw lines of each room, for each a kind of mutation, then one mutant of that kind; the rooms take turns."""
    by_room: dict[str, dict[tuple[str, int], dict[str, list[Mutant]]]] = defaultdict(dict)
    for folder in ("dapo_kernels", "dapo_runner"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if rooms is not None and rooms not in room_of(str(path.relative_to(ROOT))):
                continue
            for mutant in mutants_of(path):
                kinds = by_room[mutant.room].setdefault((mutant.path, mutant.line), defaultdict(list))
                kinds[mutant.operator.split("_")[0]].append(mutant)
    drawn = []
    for room, by_line in sorted(by_room.items()):
        rng = random.Random(f"{seed} {room}")
        lines = rng.sample(sorted(by_line), min(per_room, len(by_line)))
        kinds_of = [(turn, by_line[line]) for turn, line in enumerate(lines)]
        drawn += [(turn, room, rng.choice(kinds[rng.choice(sorted(kinds))])) for turn, kinds in kinds_of]
    return [mutant for _, _, mutant in sorted(drawn, key=lambda one: one[:2])]


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, itself, by a package or by a helper of the tests, or that it names."""
    found: set[str] = set()
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            own = {alias.name for alias in node.names}
            names = {f"{node.module}.{name}" for name in own}
            package = ROOT / node.module.replace(".", "/") / "__init__.py"
            exported = imports(package) if package.exists() and package != path else ()
            found |= {node.module, *names}
            found |= {name.rpartition(".")[0] for name in exported if name.rpartition(".")[2] in own}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("dapo_"):
            found |= {word for word in node.value.split() if word.startswith("dapo_")}
    helpers = [helper for helper in (ROOT / "tests").rglob("*.py") if helper.stem in found and helper != path]
    return frozenset(found.union(*(imports(helper) for helper in helpers)))


def files_of(room: str) -> list[str]:
    """Return the test files of a room."""
    paths = [path for pattern in ROOMS[room] for path in sorted(ROOT.glob(pattern))]
    return [
        str(file.relative_to(ROOT))
        for path in paths
        for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])
    ]


def copy_checkout(folder: Path) -> Path:
    """Copy all that git does not ignore, and the compiled modules."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "dapo_kernels").glob("*.so")]
    for name in (*listed.splitlines(), *built):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(checkout: Path, markers: str, files: Iterable[str], timeout: float | None, *options: str) -> int | None:
    """Run test files in ``checkout``; return pytest's exit code, or None after ``timeout`` seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--smoke", "-m", markers]
    command += [*options, *files]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    null = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=checkout, env=environment, start_new_session=True, stdout=null, stderr=null
    ) as tests:
        try:
            return tests.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if tests.poll() is None:  # with the servers and ranks that the tests started
                os.killpg(tests.pid, signal.SIGKILL)


class Baseline:
    """How long test files take with nothing changed. Each is run when it is first needed."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.seconds: dict[tuple[str, str], float] = {}

    def measure(self, markers: str, file: str) -> float:
        """Return the seconds of a file, 0 if it has no such tests. Raises SystemExit if they do not pass."""
        if (markers, file) not in self.seconds:
            began = time.monotonic()
            code = run_tests(self.checkout, markers, [file], None)
            if code not in (0, NO_TESTS):
                raise SystemExit(f"{file}: expected the tests to pass with nothing changed, got exit code {code}.")
            self.seconds[markers, file] = time.monotonic() - began if code == 0 else 0.0
        return self.seconds[markers, file]

    def choose(self, mutant: Mutant, limit: float) -> dict[str, float]:
        """Return test files of a mutant and their seconds, until they take longer than ``limit``."""
        markers = SELECTED.get(mutant.room, SELECTED[""])
        files = sorted(files_of(mutant.room), key=lambda file: (ROOT / file).stat().st_size)
        files.sort(key=lambda file: mutant.module not in imports(ROOT / file))
        chosen: dict[str, float] = {}
        for file in files:
            if sum(chosen.values()) > limit:
                break
            if seconds := self.measure(markers, file):
                chosen[file] = seconds
        return chosen


def try_mutant(mutant: Mutant, baseline: Baseline, options: argparse.Namespace) -> Outcome:
    """Run the tests of a mutant in the baseline's checkout, which is as before afterwards."""
    path = baseline.checkout / mutant.path
    source = path.read_text(encoding="utf-8")
    mutated = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    assert mutated is not None
    before, after = (text.splitlines()[mutant.line - 1].strip() for text in (source, mutated))
    change = f"`{before}` → `{after}`"
    if f"{mutant.path} {change}" in options.equivalent:
        return Outcome(mutant, "equivalent", change, 0.0)
    files = baseline.choose(mutant, options.seconds)
    path.write_text(mutated, encoding="utf-8")
    began = time.monotonic()
    try:
        markers = SELECTED.get(mutant.room, SELECTED[""])
        code = run_tests(baseline.checkout, markers, files, 60 + 3 * sum(files.values()), "-x")
    finally:
        path.write_text(source, encoding="utf-8")
    state = {0: "survived", 1: "killed", None: "timeout"}.get(code, "unloadable")
    return Outcome(mutant, state, change, time.monotonic() - began)


def page(outcomes: list[Outcome], options: argparse.Namespace) -> str:
    """Return the report: the share killed by room, then the survivors and what is counted apart."""
    asked = f" --room {options.room}" if options.room else ""
    asked += f" --seconds {options.seconds:g}" if options.seconds != float("inf") else ""
    command = f"python tests/mutants.py --per-room {options.per_room} --seed {options.seed}{asked}"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = ["# Mutants", "", f"`{command}` at commit {commit.strip()}", ""]
    lines += ["Share: killed, of those killed and survived. The other columns are counted apart.", ""]
    apart = ("equivalent", "unloadable", "timeout")
    lines += [f"| room | killed | survived | share | {' | '.join(apart)} |", "|---|" + "---:|" * (3 + len(apart))]
    by_room: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        by_room[outcome.mutant.room][outcome.state] += 1
    for room, counts in [*sorted(by_room.items()), ("all", sum(by_room.values(), Counter[str]()))]:
        judged = counts["killed"] + counts["survived"]
        share = f"{counts['killed'] / judged:.0%}" if judged else ""
        numbers = [counts["killed"], counts["survived"], share, *(counts[state] for state in apart)]
        lines.append(f"| {room} | {' | '.join(map(str, numbers))} |")
    for state in ("survived", *apart):
        those = sorted((o for o in outcomes if o.state == state), key=lambda o: (o.mutant.path, o.mutant.line))
        lines += ["", f"{state.capitalize()}:", ""]
        lines += [f"- {o.mutant.path}:{o.mutant.line} {o.change}" for o in those] or ["- none"]
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-room", type=int, default=15, help="how many mutants of each room (default: 15)")
    parser.add_argument("--room", help="only rooms whose folder contains this, as rollout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="add no test file after so many")
    parser.add_argument("--equivalent", type=read_equivalent, default=str(EQUIVALENT), help="a file of them")
    parser.add_argument("--out", type=Path, help="a file for the page, rewritten after each mutant")
    return parser.parse_args()


def read_equivalent(path: str) -> set[str]:
    """Read mutants that change nothing: on each line the file and the change as the page shows them, a colon, why."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return {line.rpartition("`: ")[0] + "`" for line in lines if "`: " in line}


def main() -> int:
    options = parse_arguments()
    chosen, outcomes = draw(options.room, options.per_room, options.seed), list[Outcome]()
    with tempfile.TemporaryDirectory() as scratch:
        baseline = Baseline(copy_checkout(Path(scratch)))
        for number, mutant in enumerate(chosen, start=1):
            outcome = try_mutant(mutant, baseline, options)
            outcomes.append(outcome)
            what = f"{mutant.path}:{mutant.line} {outcome.state} {outcome.change}"
            print(f"[{number}/{len(chosen)}] {outcome.seconds:4.0f} s  {what}", flush=True)
            if options.out is not None:
                options.out.write_text(page(outcomes, options), encoding="utf-8")
    print(page(outcomes, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
