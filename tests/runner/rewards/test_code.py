"""Programs under tests: what passes, and what a hostile one cannot do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from builders import make_completion, make_config, make_prompt
from refusals import refused

from dapo_runner.config import ConfigError
from dapo_runner.rewards import workers
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rewards.workers import CodeRule, open_code
from dapo_runner.types import Verdict

PATIENT = 60.0
TESTS = json.dumps(["assert f(1) == 2", "assert f(5) == 6"])
RIGHT = "def f(x): return x + 1"


@pytest.fixture(scope="module")
def judge() -> CodeRule:
    try:
        return open_code(2, PATIENT, 512)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("program", "correct"),
    [
        (RIGHT, True),
        (f"Sure:\n```python\n{RIGHT}\n```\nDone.", True),
        (f"First\n```python\ndef f(x): return 0\n```\nbetter\n```py\n{RIGHT}\n```", True),
        ("def f(x): return x", False),
        ("def f(x: return", False),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\ndef f(x): return x + A().x", True),
        ("import numpy as np\ndef f(x): return int(np.array([x, 1]).sum())", True),
        ("import threading\nr = []\nt = threading.Thread(target=r.append, args=(1,))\nt.start()\nt.join()\n"
         "def f(x): return x + r[0]", True),
        ("print('x' * 10**6)\n" + RIGHT, True),
    ],
)  # fmt: skip
def test_programs_are_held_against_tests(judge: CodeRule, program: str, correct: bool) -> None:
    assert judge.judge_texts([program], [TESTS]) == [Verdict(correct, None, "code")]


@pytest.mark.parametrize("answer", [TESTS, "assert f(1) == 2\nassert f(5) == 6", "{x for x in [f(1)]} == {2}"])
def test_tests_may_be_a_list_or_statements(judge: CodeRule, answer: str) -> None:
    assert judge.judge_texts([RIGHT, "import sys"], [answer] * 2) == [
        Verdict(True, None, "code"),
        Verdict(False, None, "code"),
    ]


@pytest.mark.parametrize(
    ("program", "correct"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", True),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')\nsys.exit(0)", True),
        ("if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())))", True),
        ("print(3)", False),
        ("print(3); 1 / 0", False),
        ("", False),
    ],
)
def test_programs_may_read_and_print(judge: CodeRule, program: str, correct: bool) -> None:
    tests = json.dumps({"inputs": ["1 2\n", ["3 4", ""]], "outputs": ["3\n", "7"]})
    assert judge.judge_texts([program], [tests])[0].correct is correct


HOSTILE = {
    "leaves": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "pretends": "import os\nfor fd in range(3, 9):\n try: os.write(fd, b'passed')\n except OSError: 0\nos._exit(0)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "processes": "import subprocess\nsubprocess.run(['true'])",
    "10 GiB": "x = bytearray(10 * 2**30)",
    "more and more": "x = []\nwhile True: x.append(bytearray(2**20))",
    "file": "open({file!r}, 'w').write('x')",
    "append": "open({victim!r}, 'a').write('x')",
    "remove": "import os\nos.remove({victim!r})",
    "rename": "import os\nos.rename({victim!r}, {file!r})",
    "folder": "import os\nos.mkdir({file!r})",
    "in C": "import ctypes\nassert ctypes.CDLL(None).unlink({victim!r}.encode()) == 0",
    "socket": "import socket\nsocket.socket()",
    "kill": "import os\nos.kill(os.getppid(), 9)",
    "memory file": "import os\nos.memfd_create('x')",
    "environment": "import os\nassert os.environ['SECRET']",
    "more rights": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))",
    "abort": "import os\nos.abort()",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_fail_and_leave_nothing(
    judge: CodeRule, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s")
    victim, file = tmp_path / "victim", tmp_path / "file"
    victim.write_text("v")
    program = HOSTILE[name].format(victim=str(victim), file=str(file)) + "\n" + RIGHT
    (verdict,) = judge.judge_texts([program], [TESTS])
    assert not verdict.correct
    assert verdict.rule in ("code", "crash")
    assert victim.read_text() == "v"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


@pytest.mark.parametrize(
    ("program", "rule"),
    [
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(99)", "timeout"),
        ("while True: print('x' * 9999)", "timeout"),
        ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()", "timeout"),
        ("import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
         "    except (OSError, ValueError): pass\nwhile True: time.sleep(9)", "timeout"),
    ],
)  # fmt: skip
def test_what_does_not_end_is_killed(judge: CodeRule, program: str, rule: str) -> None:
    start = time.monotonic()
    assert CodeRule(2, 1.0, 512).judge_texts([program], [TESTS]) == [Verdict(False, None, rule)]
    assert time.monotonic() - start < 20
    assert subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "code_worker"], capture_output=True).returncode == 1


def test_endless_output_is_cut(judge: CodeRule) -> None:
    program = "import sys\nwhile True: sys.stdout.write('x' * 9999)"
    assert judge.judge_texts([program], ['{"inputs": [""], "outputs": ["x"]}'])[0].rule == "output"


def test_verdicts_come_in_order_and_side_by_side(judge: CodeRule) -> None:
    quick = CodeRule(8, PATIENT, 512)
    programs = [f"import time\ntime.sleep(0.5)\ndef f(x): return x + {i % 2}" for i in range(8)]
    assert [verdict.correct for verdict in quick.judge_texts(programs, [TESTS] * 8)] == [False, True] * 4
    config = make_config(reward={"kind": "code", "deadline": PATIENT, "overlong": {"soft_punishment": False}})
    prompts = [make_prompt("p", answer=TESTS), make_prompt("q", answer="assert f(0) == 0")]
    completions = [make_completion(text=RIGHT), make_completion(text="def f(x): return x")]
    groups = Scorer(config)(prompts, [completions, completions])
    assert [[sample.reward for sample in group.samples] for group in groups] == [[1.0, -1.0], [-1.0, 1.0]]


def test_a_program_dies_with_its_parent(judge: CodeRule, tmp_path: Path) -> None:
    """`kill -9` of the run: nobody is left to kill what it had started."""
    code = (
        "import os, subprocess, threading, time\n"
        "from dapo_runner.rewards.workers import CodeRule\n"
        "children = lambda: subprocess.run(['pgrep', '-fP', str(os.getpid()), 'code_worker'], stdout=-1, text=True)\n"
        "judge = CodeRule(2, 600.0, 1024)\n"
        "arguments = ['import time\\ntime.sleep(600)'], ['pass']\n"
        "threading.Thread(target=judge.judge_texts, args=arguments, daemon=True).start()\n"
        "while not children().stdout: time.sleep(0.01)\n"
        "time.sleep(2)\n"
        "print(children().stdout.split()[0], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_call_that_is_broken_off_does_not_wait(judge: CodeRule) -> None:
    """A second Ctrl-C in the middle of it."""
    main, before = threading.main_thread().ident, signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        CodeRule(2, 10.0, 512).judge_texts(["import time\ntime.sleep(600)"] * 4, [TESTS] * 4)
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 9


def test_a_machine_that_cannot_confine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_CODE_COMMAND", ("false",))
    with refused("reward.kind"):
        open_code(2, 7.0, 1024)
