"""Measure what the tests are worth: change one place of the code at a time and see whether a test fails.

    python tests/mutants.py                         # 300 mutants, as many of each room: an hour or two
    python tests/mutants.py --room rollout --sample 40 --seed 1

Cosmic Ray makes the mutants: of arithmetic, comparisons, conditions, loops and numbers. Lines are drawn by a seed,
those of functions three times as often as those that an import executes. First each test file runs with nothing
changed, and reached.py records which statements each test executes, in the processes that it starts too. A mutant is
tried with the tests that execute its statement, the quickest file first. Each run is a fork of this process, which has
imported torch, in a copy of the checkout. --work keeps copies, records and results: while code and tests stay as they
are, the same command goes on where it stopped.

A mutant survives when these tests pass, or when no test executes its statement. It is killed when they end otherwise,
and pass again without the mutation: a test fails, the process crashes, the tests cannot be collected, or they take
more than three times as long, at least 20 s. No part of the share are equivalent mutants (equivalent_mutants.txt) and
unstable ones: the tests do not pass without them.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import hashlib
import importlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import reached
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.txt"
IMPORTED = ("torch", "transformers.models.llama.modeling_llama", "scipy.stats", "aiohttp", "pydantic", "hypothesis")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_TESTS, BROKEN = 5, 70  # exit codes: one of pytest's, and a fork's whose own code raised
RECORD_SECONDS = 900.0  # for the tests of one file
MARKERS = "not slow and not gpu and not vllm"
KINDS = ["BinaryOperator", "ComparisonOperator", "UnaryOperator", "AndWithOr", "OrWithAnd", "AddNot", "NumberReplacer"]
KINDS += ["TrueWithFalse", "FalseWithTrue", "ZeroIteration", "BreakWithContinue"]
# Tested on a GPU, by the emulation and in vLLM's environment, not here.
ELSEWHERE = ["dapo_kernels/backends/cuda.py", "dapo_runner/engines/receiver.py", "dapo_runner/engines/vllm.py"]
TRAINING = "tests/runner/test_*.py"
ROOMS = {  # folder of the code → patterns of its tests; the longest folder that fits a file is its room
    **dict.fromkeys((f"dapo_kernels{room}" for room in ("", "/backends", "/engine", "/objectives")), "tests/kernels"),
    "dapo_kernels/backends/triton": "tests/kernels/test_triton*.py tests/kernels/test_elsewhere.py",
    "dapo_kernels/integrations": "tests/integrations",
    **{
        f"dapo_runner/{room}": f"tests/runner/{room}"
        for room in ("algorithms", "data", "engines", "parallel", "policy", "rewards", "tools")
    },
    "dapo_runner/config": "tests/runner/config tests/runner/algorithms/test_settings.py tests/runner/tools "
    "tests/test_docs.py",  # a default stands in docs/settings.md
    "dapo_runner/checkpoint": "tests/runner/test_checkpoint.py tests/runner/test_resume.py",
    "dapo_runner/commands": f"{TRAINING} tests/runner/tools/test_sft.py tests/runner/tools/study/test_study.py",
    "dapo_runner/logging": "tests/runner/logging tests/runner/test_train.py",
    "dapo_runner/environments": "tests/runner/environments tests/runner/rollout/test_episodes.py",
    "dapo_runner/preflight": "tests/runner/test_[rs]*.py tests/runner/test_cli.py tests/runner/test_tiny_model.py "
    "tests/runner/*/test_server_access.py tests/runner/*/test_config.py tests/runner/*/test_judge.py",
    "dapo_runner/rollout": "tests/runner/rollout tests/runner/engines tests/runner/test_replayed_sampling.py",
    "dapo_runner/run": f"{TRAINING} tests/runner/logging/test_trackers.py",
    "dapo_runner": f"{TRAINING} tests/runner/rewards/test_judge.py tests/runner/engines/test_server*.py "
    "tests/runner/rollout/test_episodes.py",
}
SELECTED = {  # room → markers of its tests; "": of every other room
    "": f"{MARKERS} and not ranks and not elsewhere",
    **dict.fromkeys(
        ("dapo_kernels", "dapo_kernels/engine", "dapo_runner/commands", "dapo_runner/parallel"),
        f"{MARKERS} and not elsewhere",  # tested on several processes
    ),
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


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    state: str  # killed, survived, equivalent or unstable
    end: str  # of the tests: passed, not reached, failed, crash, time limit or import
    change: str  # the line before and after
    seconds: float


def room_of(path: str) -> str:
    return max((room for room in ROOMS if path.startswith(f"{room}/")), key=len)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Find every mutant of a file, except those of annotations, which nothing evaluates."""
    source = path.read_text(encoding="utf-8")
    found = [getattr(node, name, None) for node in ast.walk(ast.parse(source)) for name in ("annotation", "returns")]
    skipped = [((a.lineno, a.col_offset), (a.end_lineno, a.end_col_offset)) for a in found if a is not None]
    nodes, by_kind = list(ast_nodes(get_ast(source))), {}
    for name in sorted(name for name in operator_names() if any(kind in name for kind in KINDS)):
        kind = name.rpartition("_")[0] if "Binary" in name else name  # what comes instead does not change the places
        if kind not in by_kind:
            operator = get_operator(name)()
            by_kind[kind] = [begin for node in nodes for begin, _ in operator.mutation_positions(node)]
        for occurrence, position in enumerate(by_kind[kind]):
            if not any(begin <= position <= end for begin, end in skipped):
                yield Mutant(str(path.relative_to(ROOT)), position[0], name, occurrence)


@cache
def functions_in(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, FUNCTION)]


def functions_around(mutant: Mutant) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions whose call executes a mutant; there are none if an import executes it."""
    return [node for node in functions_in(ROOT / mutant.path) if node.body[0].lineno <= mutant.line <= node.end_lineno]


def mutate(mutant: Mutant, source: str) -> str:
    mutated = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    assert mutated is not None
    return mutated


def is_valid(mutant: Mutant) -> bool:
    """Tell whether it is Python: a star that is no product is mutated, too."""
    try:
        ast.parse(mutate(mutant, (ROOT / mutant.path).read_text(encoding="utf-8")))
    except SyntaxError:
        return False
    return True


def draw(rooms: str | None, sample: int, seed: int) -> list[Mutant]:
    """Draw lines of each room, for each a kind of mutation, then one mutant of that kind; the rooms take turns."""
    by_room: dict[str, dict[tuple[str, int], dict[str, list[Mutant]]]] = defaultdict(dict)
    weights = {}
    for path in sorted(path for package in reached.PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name in ELSEWHERE or (rooms is not None and rooms not in room_of(name)):
            continue
        for mutant in mutants_of(path):
            line = (mutant.path, mutant.line)
            by_room[mutant.room].setdefault(line, defaultdict(list))[mutant.operator.split("_")[0]].append(mutant)
            weights[line] = 3.0 if functions_around(mutant) else 1.0
    drawn = []
    for room, by_line in sorted(by_room.items()):
        rng = random.Random(f"{seed} {room}")
        keys = {line: rng.random() ** (1 / weights[line]) for line in sorted(by_line)}  # the largest: a weighted draw
        lines = [by_line[line] for line in sorted(keys, key=keys.get, reverse=True)]
        mutants = filter(is_valid, (rng.choice(kinds[rng.choice(sorted(kinds))]) for kinds in lines))
        drawn += [(turn, room, mutant) for turn, mutant in enumerate(islice(mutants, -(-sample // len(by_room))))]
    return [mutant for _, _, mutant in sorted(drawn, key=lambda one: one[:2])][:sample]


def files_of(room: str) -> list[str]:
    """Return the test files of a room."""
    paths = [path for pattern in ROOMS[room].split() for path in sorted(ROOT.glob(pattern))]
    files = [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    return [str(file.relative_to(ROOT)) for file in files]


def markers_of(room: str) -> str:
    return SELECTED.get(room, SELECTED[""])


def copy_checkout(folder: Path, name: str) -> Path:
    """Copy all that git does not ignore, and the compiled modules, to a folder named after code and tests."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "dapo_kernels").glob("*.so")]
    names = sorted(name for name in (*listed.splitlines(), *built) if (ROOT / name).is_file())
    state = hashlib.sha256()
    for path in names:
        if path.startswith(("dapo_", "tests/")) and ROOT / path not in (EQUIVALENT, Path(__file__).resolve()):
            state.update(path.encode() + (ROOT / path).read_bytes())
    copy = folder.resolve() / state.hexdigest()[:12] / name
    for path in names:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path)
    return copy


def fork(action: Callable[[], int], checkout: Path) -> int:
    """Call ``action`` in a fork and return its id. The fork is the leader of a session and ends with this process; it
    imports from ``checkout`` and writes to a file beside it.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies the locks of other threads, not the threads"
    child = os.fork()
    if child == 0:
        code = BROKEN
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            os.setsid()
            output = os.open(f"{checkout}.log", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            for stream in (0, 1, 2):
                os.dup2(output, stream)
            os.chdir(checkout)
            os.environ["PYTHONPATH"] = sys.path[0] = str(checkout)
            sys.modules["__main__"] = types.ModuleType("__main__")  # multiprocessing would import this file
            code = action()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def run_in(checkout: Path, action: Callable[[], int], timeout: float) -> int | None:
    """Call ``action`` in a fork that imports from ``checkout``. Return its exit code, negative after a signal, or None
    if it did not end in ``timeout`` seconds. Raises RuntimeError if ``action`` does.
    """
    child = fork(action, checkout)
    watched = os.pidfd_open(child)
    try:
        ended, _, _ = select.select([watched], [], [], timeout)
    finally:
        os.close(watched)
        with suppress(ProcessLookupError):  # with the servers and ranks that the tests started
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    if code == BROKEN:
        raise RuntimeError(f"{checkout}.log: " + Path(f"{checkout}.log").read_text(encoding="utf-8", errors="replace"))
    return code


class Progress:
    """A plugin of pytest that shares the number of the running test, and keeps the seconds of each and which failed."""

    def __init__(self, number: memoryview, tests: Sequence[str] = ()) -> None:
        self.number, self.tests = number, list(tests)
        self.seconds, self.failed = Counter[str](), set[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        test = nodeid.partition("[")[0]
        if test not in self.tests:
            self.tests.append(test)
        self.number[0] = self.tests.index(test) + 1

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        test = self.number[0]
        if fixturedef.scope != "function":
            self.number[0] = 0  # what it executes, later tests rely on
        try:
            return (yield)
        finally:
            self.number[0] = test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0]
        self.seconds[test] += report.duration
        if report.failed:
            self.failed.add(test)


def run_tests(markers: str, tests: Sequence[str], progress: Progress, *options: str) -> int:
    options = ("-p", "no:cacheprovider", "--smoke", "--hypothesis-seed=0", "-m", markers, *options)
    return pytest.main([*options, f"--basetemp={os.getcwd()}.tmp", *tests], plugins=[progress])


def record(markers: str, file: str, folder: Path) -> int:
    """Run the tests of a file with probes in the code; write what is known of them into ``folder``."""
    shutil.copy(reached.__file__, folder / "sitecustomize.py")
    os.environ |= {reached.FOLDER: str(folder), "PYTHONPATH": f"{folder}:{os.getcwd()}"}
    reached.install(str(folder))
    progress, began = Progress(reached.share_number(f"{folder}/test")), time.monotonic()
    code = run_tests(markers, [file], progress)
    overhead = time.monotonic() - began - progress.seconds.total()  # imports and collection
    executed: dict[str, set[int]] = defaultdict(set)
    for number, where in map(str.split, os.listdir(folder / "hits")):
        executed[where.replace("|", "/")].add(int(number))
    known = {"tests": progress.tests, "seconds": progress.seconds, "overhead": overhead}
    known["failed"] = sorted(progress.failed)
    known["executed"] = {where: sorted(those) for where, those in executed.items()}
    (folder / "known.json").write_text(json.dumps(known), encoding="utf-8")
    return 0 if code in (0, 1, NO_TESTS) else code


def record_of(checkout: Path, markers: str, file: str) -> Path:
    return checkout.parent / "records" / f"{file.replace('/', '.')}-{hashlib.sha256(markers.encode()).hexdigest()[:6]}"


def make_record(checkout: Path, markers: str, file: str) -> None:
    """Write the record of a test file. One whose tests cannot be run with nothing changed is left out."""
    folder, began = record_of(checkout, markers, file), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "hits").mkdir(parents=True)
    code = run_in(checkout, partial(record, markers, file, folder), RECORD_SECONDS)
    if code != 0:
        shutil.copy(f"{checkout}.log", folder / "log")
        end = f"no end after {RECORD_SECONDS:.0f} s" if code is None else f"exit code {code}"
        known = {"tests": [], "seconds": {}, "overhead": 0.0, "executed": {}}
        known["failed"] = [f"{file} ({end}: {folder}/log)"]
        (folder / "known.json").write_text(json.dumps(known), encoding="utf-8")
    (folder / "known.json").rename(folder / "record.json")
    shutil.rmtree(folder / "hits")
    print(f"{time.monotonic() - began:4.0f} s  {file} recorded", flush=True)


@cache
def recorded(checkout: Path, markers: str, file: str) -> dict[str, Any]:
    """Load the record of a test file: the seconds of each test that passes, and the tests that execute a statement."""
    known = json.loads((record_of(checkout, markers, file) / "record.json").read_text(encoding="utf-8"))
    return known | {"seconds": {test: took for test, took in known["seconds"].items() if test not in known["failed"]}}


def choose(checkout: Path, mutant: Mutant) -> dict[str, list[str]]:
    """Return the tests of each file that execute the statement of a mutant, the quickest file first."""
    tree = ast.parse((checkout / mutant.path).read_bytes())
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    inside = [(node.lineno, -node.end_lineno) for node in statements if node.lineno <= mutant.line <= node.end_lineno]
    first = max(inside, default=(0, 0))[0]  # line of the innermost statement; 0: of a decorator
    around = functions_around(mutant)
    decorators = " ".join(ast.unparse(decorator) for node in around for decorator in node.decorator_list)
    known = {file: recorded(checkout, markers_of(mutant.room), file) for file in files_of(mutant.room)}
    # Triton compiles functions from their text, and some files run where no probe is: each test may execute them.
    is_seen = any(where.startswith(f"{mutant.path}:") for each in known.values() for where in each["executed"])
    anywhere = not around or "jit" in decorators or not is_seen
    chosen = {}
    for file, each in known.items():
        numbers = each["executed"].get(f"{mutant.path}:{first}", ())
        # What is cached, or executed in a fixture or while collecting: each test of the file may depend on it.
        if anywhere or 0 in numbers or (numbers and "cache" in decorators):
            chosen[file] = list(each["seconds"])
        else:
            chosen[file] = [each["tests"][number - 1] for number in numbers]
        chosen[file] = [test for test in each["seconds"] if test in chosen[file]]
    cost = {file: min(map(known[file]["seconds"].get, tests)) for file, tests in chosen.items() if tests}
    return {file: chosen[file] for file in sorted(cost, key=cost.get)}


def try_mutant(checkout: Path, mutant: Mutant) -> Outcome:
    """Run the tests of a mutant in ``checkout``, which is as before afterwards."""
    path, markers, began = checkout / mutant.path, markers_of(mutant.room), time.monotonic()
    source, times = path.read_text(encoding="utf-8"), path.stat()
    mutated = mutate(mutant, source)
    before, after = (text.splitlines()[mutant.line - 1].strip() for text in (source, mutated))
    chosen, number = choose(checkout, mutant), reached.share_number(f"{checkout}.test")
    files, code, end = list(chosen), 0, "passed" if chosen else "not reached"
    for those in filter(None, (files[:1], files[1:])):  # most are killed by the first
        tests = [test for file in those for test in chosen[file]]
        known = [recorded(checkout, markers, file) for file in those]
        seconds = sum(each["seconds"].get(test, 0.0) for each in known for test in tests)
        limit = max(20.0, 3 * (seconds + sum(each["overhead"] for each in known)))
        path.write_text(mutated, encoding="utf-8")
        number[0] = 0
        code = run_in(checkout, partial(run_tests, markers, tests, Progress(number, tests), "-x"), limit)
        path.write_text(source, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled module is valid again
        if code not in (0, NO_TESTS):
            end = {None: "time limit", 1: "failed"}.get(code) or ("crash" if code < 0 else "import")
            break
    state = "survived"
    if end not in ("passed", "not reached"):
        again = tests[: number[0]] or tests  # up to the test that it ended in
        code = run_in(checkout, partial(run_tests, markers, again, Progress(number, again), "-x"), limit)
        state = "killed" if code == 0 else "unstable"
    return Outcome(mutant, state, end, f"`{before}` → `{after}`", time.monotonic() - began)


def page(outcomes: list[Outcome], left_out: list[str], options: argparse.Namespace) -> str:
    """Return the report: the share killed by room, then the survivors and what else a person may want to judge."""
    asked = f" --room {options.room}" if options.room else ""
    command = f"python tests/mutants.py --sample {options.sample} --seed {options.seed}{asked}"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = ["# Mutants", "", f"`{command}` at commit {commit.strip()}", ""]
    lines += ["Share: killed, of those killed and survived. Not reached: no test executes the statement.", ""]
    columns = ("mutants", "killed", "survived", "share", "not reached", "equivalent", "unstable")
    lines += [f"| room | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    by_room: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        by_room[outcome.mutant.room].update(("mutants", outcome.state, outcome.end))
    for room, counts in [*sorted(by_room.items()), ("all", sum(by_room.values(), Counter[str]()))]:
        judged = counts["killed"] + counts["survived"]
        numbers = {**counts, "share": f"{counts['killed'] / judged:.0%}" if judged else ""}
        lines.append(f"| {room} | {' | '.join(str(numbers.get(column, 0)) for column in columns)} |")
    sections: dict[str, list[str]] = defaultdict(list)
    for outcome in sorted(outcomes, key=lambda one: (one.mutant.path, one.mutant.line)):
        note = "" if outcome.end in ("passed", "failed") else f", {outcome.end}"
        line = f"- {outcome.mutant.path}:{outcome.mutant.line} {outcome.change}{note}"
        sections[outcome.state] += [line] if outcome.state != "killed" or outcome.end != "failed" else []
    sections["left out"] = [f"- {test}" for test in left_out]
    for title, state in (
        ("Survived", "survived"),
        ("Killed without a test that failed", "killed"),
        ("Equivalent", "equivalent"),
        ("Unstable", "unstable"),
        ("Left out, as they fail with nothing changed", "left out"),
    ):
        lines += ["", f"{title}:", "", *(sections[state] or ["- none"])]
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=300, help="how many mutants (default: 300)")
    parser.add_argument("--room", help="only rooms whose folder contains this, as rollout")
    parser.add_argument("--seed", type=int, default=0)
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


def main() -> int:
    options = parse_arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for module in IMPORTED:
        importlib.import_module(module)
    chosen = draw(options.room, options.sample, options.seed)
    probed = copy_checkout(options.work, "record")
    plain = copy_checkout(options.work, "plain")  # the other has modules that were compiled with probes
    results = plain.parent / "results.jsonl"
    needed = sorted({(markers_of(room), file) for room in {one.room for one in chosen} for file in files_of(room)})
    for one in needed:
        if not (record_of(probed, *one) / "record.json").exists():
            make_record(probed, *one)
    left_out = sorted({test for one in needed for test in recorded(probed, *one)["failed"]})

    def write_page() -> str:
        outcomes = read_results(results)
        text = page([outcomes[one] for one in chosen if one in outcomes], left_out, options)
        if options.out is not None:
            options.out.write_text(text, encoding="utf-8")
        return text

    left = [mutant for mutant in chosen if mutant not in read_results(results)]
    for number, mutant in enumerate(left, 1 + len(chosen) - len(left)):
        outcome = try_mutant(plain, mutant)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        what = f"{mutant.path}:{mutant.line} {outcome.state} ({outcome.end}) {outcome.change}"
        print(f"[{number}/{len(chosen)}] {outcome.seconds:4.0f} s  {what}", flush=True)
        write_page()
    print(write_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
