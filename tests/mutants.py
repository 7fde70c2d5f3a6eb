"""Measure what the tests are worth: change one place of the code at a time and see whether a test fails.

    python tests/mutants.py                           # 15 mutants of each room: hours
    python tests/mutants.py --room rollout --per-room 40 --seed 1

Cosmic Ray makes the mutants. Lines are drawn evenly, weighted to arithmetic, conditions and indices: a line without any
of them is never drawn. First the tests run with nothing changed, and coverage records which lines each one executes. A
mutant is tried with the tests that execute its line, the quick files first, then with those that start processes, which
coverage does not see into. Each run is a fork of this process, which has imported torch, in a copy of the checkout.
While code and tests stay as they are, --work keeps records and results: the same command goes on where it stopped.

A mutant is killed when a test fails that passes without it, after the same tests. Four outcomes are counted apart and
are no part of the share: equivalent (listed with its reason in equivalent_mutants.txt), unloadable (the tests could not
be collected), unstable (they fail without it too) and timeout.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import Coverage, CoverageData
from coverage.parser import PythonParser

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.txt"
IMPORTED = ("torch", "transformers.models.llama.modeling_llama", "scipy.stats", "aiohttp", "pydantic", "hypothesis")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
PYTHON = re.compile(f"{re.escape(sys.prefix)}|python|pymp-")  # the last: a server of multiprocessing
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
    "dapo_runner/commands": [f"tests/runner/test_{name}.py" for name in ("cli", "evaluate", "launch")],
    "dapo_runner/environments": ["tests/runner/environments", "tests/runner/rollout/test_episodes.py"],
    "dapo_runner/preflight": [
        f"tests/runner/{name}.py"
        for name in ("test_[drs]*", "test_cli", "test_tiny_model", "rollout/test_server_settings")
    ],
    "dapo_runner/run": [TRAINING],
    "dapo_runner": [TRAINING],
}
SELECTED = {  # room → markers of its tests; "": of every other room
    "": f"{MARKERS} and not ranks and not elsewhere",
    "dapo_runner/parallel": f"{MARKERS} and not elsewhere",  # tested on several processes
    "dapo_kernels/backends/triton": f"{MARKERS} and not ranks",  # interpreted
}


INTERPRETED = "dapo_kernels/backends/triton"  # Triton rewrites its kernels first: coverage misses lines


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    operator: str
    occurrence: int

    @property
    def room(self) -> str:
        return room_of(self.path)


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    state: str  # killed, survived, equivalent, unloadable, unstable or timeout
    change: str  # the line before and after
    reached: bool  # whether coverage saw a test execute it
    seconds: float
    by: str  # the test that failed


def room_of(path: str) -> str:
    return max((room for room in ROOMS if path.startswith(f"{room}/")), key=len)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Find every mutant of a file, except those of annotations, which nothing evaluates."""
    source = path.read_text(encoding="utf-8")
    found = [getattr(node, name, None) for node in ast.walk(ast.parse(source)) for name in ("annotation", "returns")]
    skipped = [((a.lineno, a.col_offset), (a.end_lineno, a.end_col_offset)) for a in found if a is not None]
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(name for name in operator_names() if any(kind in name for kind in KINDS)):
        positions = [begin for node in nodes for begin, _ in get_operator(name)().mutation_positions(node)]
        for occurrence, position in enumerate(positions):
            if not any(begin <= position <= end for begin, end in skipped):
                yield Mutant(str(path.relative_to(ROOT)), position[0], name, occurrence)


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


def files_of(room: str) -> list[str]:
    """Return the test files of a room."""
    paths = [path for pattern in ROOMS[room] for path in sorted(ROOT.glob(pattern))]
    files = [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    return [str(file.relative_to(ROOT)) for file in files]


def copy_checkout(work: Path, job: int) -> Path:
    """Copy all that git does not ignore, and the compiled modules, to a folder named after code and tests."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "dapo_kernels").glob("*.so")]
    names = sorted(name for name in (*listed.splitlines(), *built) if (ROOT / name).is_file())
    state = hashlib.sha256()
    for name in names:
        if name.startswith(("dapo_", "tests/")) and ROOT / name not in (EQUIVALENT, Path(__file__).resolve()):
            state.update(name.encode() + (ROOT / name).read_bytes())
    folder = work.resolve() / state.hexdigest()[:12] / str(job)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def fork(checkout: Path, action: Callable[[], int], timeout: float | None) -> int | None:
    """Call ``action`` in a fork that imports from ``checkout``; return what it returns, None after ``timeout``."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies the locks of other threads, not the threads"
    child = os.fork()
    if child == 0:
        code = 3  # pytest's for an error of its own
        try:
            os.setsid()
            output = os.open(f"{checkout}.log", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            for stream in (0, 1, 2):
                os.dup2(output, stream)
            os.chdir(checkout)
            os.environ["PYTHONPATH"] = sys.path[0] = str(checkout)
            sys.modules["__main__"] = types.ModuleType("__main__")  # multiprocessing would import this file
            code = action()
        finally:
            os._exit(code)
    watched = os.pidfd_open(child)
    try:
        ended, _, _ = select.select([watched], [], [], timeout)
    finally:
        os.close(watched)
        with suppress(ProcessLookupError):  # with the servers and ranks that the tests started
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def run_tests(markers: str, tests: list[str], *options: str, plugins: tuple[object, ...] = ()) -> int:
    options = ("-p", "no:cacheprovider", "--smoke", "--hypothesis-seed=0", "-m", markers, *options)
    return pytest.main([*options, f"--basetemp={os.getcwd()}.tmp", *tests], plugins=plugins)


class Recorder:
    """A plugin of pytest that records of each test its seconds and whether it starts Python."""

    def __init__(self) -> None:
        self.seconds, self.starting, self.failed = Counter[str](), set[str](), set[str]()
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.fork" or (
            event in ("subprocess.Popen", "socket.connect") and PYTHON.search(repr(arguments[:2]))
        ):
            test, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
            self.starting.add(test.partition("[")[0] if phase == "(call)" else "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0]
        if report.failed:
            self.failed.add(test)
        if report.when == "call":
            self.seconds[test] += report.duration


def record(markers: str, file: str, found: Path) -> int:
    """Run the tests of a file; write their coverage, seconds and which of them start processes beside ``found``."""
    coverage = Coverage(str(found.with_suffix(".coverage")), source=["dapo_kernels", "dapo_runner"], config_file=False)
    coverage.set_option("run:relative_files", True)
    coverage.set_option("run:dynamic_context", "test_function")
    recorder, began = Recorder(), time.monotonic()
    coverage.erase()
    coverage.start()
    code = run_tests(markers, [file], plugins=(recorder,))
    coverage.stop()
    coverage.save()
    overhead = time.monotonic() - began - recorder.seconds.total()  # imports, collection, fixtures
    for test in recorder.failed:
        recorder.seconds.pop(test, None)
    starting = recorder.seconds.keys() & recorder.starting if "" not in recorder.starting else recorder.seconds
    record = {"seconds": recorder.seconds, "overhead": overhead, "starting": sorted(starting)}
    found.write_text(json.dumps(record | {"failed": sorted(recorder.failed)}), encoding="utf-8")
    return 0 if code in (0, 1, NO_TESTS) else code


@cache
def recorded(checkout: Path, markers: str, file: str) -> dict[str, Any]:
    """Load the record of a test file, made when it is first needed. Raises SystemExit if its tests cannot be run."""
    slug = f"{file.replace('/', '.')}-{hashlib.sha256(markers.encode()).hexdigest()[:6]}"
    found = checkout.parent / f"{slug}.json"
    if not found.exists():
        code = fork(checkout, partial(record, markers, file, found), None)
        if code != 0:
            raise SystemExit(f"{file}: expected tests that can be run with nothing changed, got exit code {code}.")
    loaded = json.loads(found.read_text(encoding="utf-8"))
    for test in loaded["failed"]:
        print(f"{test} fails with nothing changed and is left out", flush=True)
    return {**loaded, "coverage": str(found.with_suffix(".coverage"))}


def choose(checkout: Path, mutant: Mutant, markers: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return the tests of each file that execute the line of a mutant, and the others that start processes."""
    parser = PythonParser(text=(checkout / mutant.path).read_text(encoding="utf-8"))
    parser.parse_source()
    functions = [node for node in ast.walk(ast.parse(parser.text)) if isinstance(node, FUNCTION)]
    around = [node for node in functions if node.body[0].lineno <= mutant.line <= node.end_lineno]
    once = not around or any("cache" in ast.unparse(decorator) for node in around for decorator in node.decorator_list)
    first, near, others = parser.first_line(mutant.line), {}, {}  # of its statement
    for file in files_of(mutant.room):
        known = recorded(checkout, markers, file)
        data = CoverageData(known["coverage"])
        data.read()
        contexts = data.contexts_by_lineno(mutant.path)
        data.close()
        names = {name for line, those in contexts.items() if parser.first_line(line) == first for name in those}
        tests = {f"{file}::{name.rpartition('.')[2]}" for name in names}
        # What is imported, cached, collected or done in a fixture: each test of the file may depend on it.
        if tests - known["seconds"].keys() or (names and once) or mutant.room == INTERPRETED:
            tests = set(known["seconds"])
        near[file], others[file] = tests, set(known["starting"]) - tests
    return near, others


def try_mutant(checkout: Path, mutant: Mutant) -> Outcome:
    """Run the tests of a mutant in ``checkout``, which is as before afterwards."""
    path, markers = checkout / mutant.path, SELECTED.get(mutant.room, SELECTED[""])
    source, times = path.read_text(encoding="utf-8"), path.stat()
    mutated = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    assert mutated is not None
    before, after = (text.splitlines()[mutant.line - 1].strip() for text in (source, mutated))
    change = f"`{before}` → `{after}`"
    near, others = choose(checkout, mutant, markers)
    seconds = {test: took for file in near for test, took in recorded(checkout, markers, file)["seconds"].items()}
    quick = sorted((file for file in near if near[file]), key=lambda file: min(map(seconds.get, near[file])))
    stages = [{file: near[file] for file in files} for files in (quick[:1], quick[1:])] + [others]
    code, began, by = 0, time.monotonic(), ""
    path.write_text(mutated, encoding="utf-8")
    for stage in stages:
        files = [file for file in stage if stage[file]]
        tests = [test for file in files for test in recorded(checkout, markers, file)["seconds"] if test in stage[file]]
        if tests and code in (0, NO_TESTS):
            overhead = sum(recorded(checkout, markers, file)["overhead"] for file in files)
            limit = 30 + 5 * (overhead + sum(map(seconds.get, tests)))
            code = fork(checkout, partial(run_tests, markers, tests, "-x"), limit)
            tried = tests
    path.write_text(source, encoding="utf-8")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled module is valid again
    state = {0: "survived", NO_TESTS: "survived", 1: "killed", None: "timeout"}.get(code, "unloadable")
    output = Path(f"{checkout}.log").read_text(encoding="utf-8", errors="replace") if state == "killed" else ""
    if failed := re.search(r"^(?:FAILED|ERROR) ([^[\s]+)", output, re.MULTILINE):
        by = failed[1]
        again = tried[: tried.index(by) + 1] if by in tried else tried
        if fork(checkout, partial(run_tests, markers, again, "-x"), limit) != 0:
            state = "unstable"
    return Outcome(mutant, state, change, bool(quick), time.monotonic() - began, by)


def page(outcomes: list[Outcome], options: argparse.Namespace) -> str:
    """Return the report: the share killed by room, then the survivors and what is counted apart."""
    asked = f" --room {options.room}" if options.room else ""
    command = f"python tests/mutants.py --per-room {options.per_room} --seed {options.seed}{asked}"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = ["# Mutants", "", f"`{command}` at commit {commit.strip()}", ""]
    lines += [
        "Share: killed, of those killed and survived. Unreached: survived, and no test was seen to execute the line."
    ]
    lines += ["The other columns are counted apart.", ""]
    apart = ("equivalent", "unloadable", "unstable", "timeout")
    columns = ("killed", "survived", "share", "unreached", *apart)
    lines += [f"| room | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    by_room: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        unreached = outcome.state == "survived" and not outcome.reached
        by_room[outcome.mutant.room] += Counter({outcome.state: 1, "unreached": int(unreached)})
    for room, counts in [*sorted(by_room.items()), ("all", sum(by_room.values(), Counter[str]()))]:
        judged = counts["killed"] + counts["survived"]
        numbers = {**counts, "share": f"{counts['killed'] / judged:.0%}" if judged else ""}
        lines.append(f"| {room} | {' | '.join(str(numbers.get(column, 0)) for column in columns)} |")
    for state in ("survived", *apart):
        those = sorted((o for o in outcomes if o.state == state), key=lambda o: (o.mutant.path, o.mutant.line))
        lines += ["", f"{state.capitalize()}:", ""]
        lines += [f"- {o.mutant.path}:{o.mutant.line} {o.change}{'' if o.reached else ', unreached'}" for o in those]
        lines += [] if those else ["- none"]
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-room", type=int, default=15, help="how many mutants of each room (default: 15)")
    parser.add_argument("--room", help="only rooms whose folder contains this, as rollout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants at a time (default: 1)")
    parser.add_argument("--out", type=Path, help="a file for the page, rewritten after each mutant")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dapo-mutants", help="a folder")
    return parser.parse_args()


def read_results(path: Path) -> dict[Mutant, Outcome]:
    """Read the outcomes so far. What the list of equivalent mutants names, on each line as the page, is one of them."""
    equivalent = {line.rpartition(": ")[0] for line in EQUIVALENT.read_text(encoding="utf-8").splitlines()}
    outcomes = {}
    for fields in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        outcome = Outcome(**fields | {"mutant": Mutant(**fields["mutant"])})
        listed = f"{outcome.mutant.path} {outcome.change}" in equivalent
        outcomes[outcome.mutant] = replace(outcome, state="equivalent") if listed else outcome
    return outcomes


def work(checkout: Path, chosen: list[Mutant], todo: list[Mutant], options: argparse.Namespace) -> None:
    """Try mutants; append each outcome to the results and write the page anew."""
    results = checkout.parent / "results.jsonl"
    for mutant in todo:
        outcome = try_mutant(checkout, mutant)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        outcomes = read_results(results)
        done = [outcomes[mutant] for mutant in chosen if mutant in outcomes]
        what = f"{mutant.path}:{mutant.line} {outcome.state} {outcome.change}"
        print(f"[{len(done)}/{len(chosen)}] {outcome.seconds:4.0f} s  {what}", flush=True)
        if options.out is not None:
            options.out.write_text(page(done, options), encoding="utf-8")


def main() -> int:
    options = parse_arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for module in IMPORTED:
        importlib.import_module(module)
    checkouts = [copy_checkout(options.work, job) for job in range(options.jobs)]
    chosen = draw(options.room, options.per_room, options.seed)
    for room in sorted({mutant.room for mutant in chosen}):
        for file in files_of(room):
            recorded(checkouts[0], SELECTED.get(room, SELECTED[""]), file)
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"  # of mutants
    results = checkouts[0].parent / "results.jsonl"
    known = read_results(results)
    todo = [mutant for mutant in chosen if mutant not in known]
    for job, checkout in enumerate(checkouts[1:], start=1):
        if os.fork() == 0:
            work(checkout, chosen, todo[job :: options.jobs], options)
            os._exit(0)
    work(checkouts[0], chosen, todo[:: options.jobs], options)
    for _ in checkouts[1:]:
        os.wait()
    outcomes = read_results(results)
    print(page([outcomes[mutant] for mutant in chosen if mutant in outcomes], options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
