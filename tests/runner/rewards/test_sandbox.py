"""Programs that a model wrote: which pass their tests, and that no attack from inside one succeeds or scores."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from dapo_runner.rewards import workers
from dapo_runner.rewards.workers import CodeRule, is_same_output, open_code, read_tests
from dapo_runner.types import Verdict

try:
    ctypes.CDLL("libseccomp.so.2")
except OSError:
    pytest.skip("no libseccomp here", allow_module_level=True)
HAS_LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1) > 0  # the version of landlock_create_ruleset
SETTINGS = (2, 60.0, 512)
HONEST = "def f(x): return x + 1"
TESTS = json.dumps(["assert f(1) == 2", "assert f(5) == 6"])
SUMS = json.dumps({"inputs": ["1 2\n", ["3 4", ""]], "outputs": ["3\n", "7"]})
CORRECT, INCORRECT = Verdict(True, None, "code"), Verdict(False, None, "code")


@pytest.fixture(scope="module", params=["bubblewrap", "alone"])
def judge(request: pytest.FixtureRequest) -> Iterator[CodeRule]:
    """With all that this machine has, and with Landlock and seccomp alone."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "alone":
            patch.setenv("PATH", "")
        workers._sandbox.cache_clear()
        if not workers._sandbox() and (request.param == "bubblewrap" or not HAS_LANDLOCK):
            pytest.skip("no bubblewrap here, or no namespaces for it")
    open_code.cache_clear()
    yield open_code(*SETTINGS)
    workers._sandbox.cache_clear()
    open_code.cache_clear()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are started, each of which has a session of its own."""
    start, found = subprocess.Popen, list[int]()

    def popen(*arguments: Any, **options: Any) -> Any:
        process = start(*arguments, **options)
        found.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    return found


def processes_with(field: str, number: int) -> list[str]:
    """The status of each process of this machine with a number in a field of it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended
            status = path.read_text()
            found += [status] if re.search(rf"^{field}:\t{number}\b", status, re.MULTILINE) else []
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_gone(sessions: Iterable[int]) -> bool:
    return not any(processes_with("NSsid", session) for session in sessions)


DATACLASS = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1"
THREAD = "import threading\nr = []\nt = threading.Thread(target=r.append, args=(1,))\nt.start()\nt.join()"
UNITTEST = "class T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)"
DEEP = """
import functools, resource, sys
sys.setrecursionlimit(10**6)
resource.setrlimit(resource.RLIMIT_STACK, (-1, -1))
@functools.cache
def f(x): return x and f(x - 1) + 1
print(f(20000 if sys.version_info < (3, 12) else 500) > 0)  # later versions limit recursion in C
"""
PROGRAMS = [
    (HONEST, TESTS, True),
    (f"First\n```python\ndef f(x): return 0\n```\nbetter\n```py\n{HONEST}\n```", TESTS, True),
    (f"```bash\nls\n```\nNow\n```Python3\r\n{HONEST}\n```\nprints\n```\n3\n```\nor\n```c++ -O\n4\n```", TESTS, True),
    (f"First\n```python\ndef f(x): return 0``` is wrong.\nBetter:\n```python\n{HONEST}\n```", TESTS, True),
    (f"First\n```python\ndef f(x): return 0\nBetter:\n```python\n{HONEST}\n```", TESTS, True),
    (f"1. So:\n   ```python\n   {HONEST}\n   ```", TESTS, True),
    (HONEST + "\ns = '''a\n   \nb'''", "assert len(s) == 7", True),
    (f"{HONEST}\n```\n\nThis continues a block of the prompt.", TESTS, True),
    (f"{HONEST}\ns = '```'", "assert len(s) == 3", True),
    (f"```py3\ns = '```' + '```'\n{HONEST}```\nUse ```f``` as\n```ipython3\n{HONEST}\ns = '```'\n```", TESTS, True),
    ("def f(x: return", TESTS, False),
    (f"{DATACLASS}\ndef f(x): return x + A().x", TESTS, True),
    (f"{THREAD}\ndef f(x): return x + r[0]", TESTS, True),
    (f"print('x' * 10**6)\n{HONEST}", TESTS, True),
    (HONEST, "assert f(1) == 2\nassert f(5) == 6", True),
    ("a, b = map(int, input().split())\nprint(a + b)", SUMS, True),
    ("import sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')\nsys.exit(0)", SUMS, True),
    ("if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())))", SUMS, True),
    ("import sys\nif 'rewards' not in sys.path[0]: print(sum(map(int, open(0).read().split())))", SUMS, True),
    ("print(3)", SUMS, False),
    ("print(3); 1 / 0", SUMS, False),
    ("print(input()); print(input())", '{"inputs": "1\\n2\\n", "outputs": "1\\n2\\n"}', True),
    (HONEST, "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)", True),
    ("print('é' * 2**20)", json.dumps({"inputs": [""], "outputs": ["é" * 2**20]}), True),
    (DEEP, '{"inputs": [""], "outputs": ["True"]}', True),
    ("print(1 / 3)", '{"inputs": [""], "outputs": ["0.333333333"]}', True),
]


def test_output_is_compared_by_the_words_of_each_line() -> None:
    shown = "0.333333333333 2 .5 x\n\n  *"
    for expected in ("0.333333333 2.00 0.5000 x\n\n*", " 0.33333333  2.\t+0.5\tx \r\n\r\n\t * \n\n", shown):
        assert is_same_output(shown, expected), expected
    other_lines = (shown.replace("\n\n", "\n"), shown.replace(" x", "\nx"))
    for expected in (*other_lines, f"{shown} 1.0", "0.33333 2 .5 x\n\n*", ""):
        assert not is_same_output(shown, expected), expected
        assert not is_same_output(expected, shown), expected
    for written, expected in (("2.0", "2"), ("nan", "1.0"), ("inf", "1.0"), ("x", "1.0"), ("1.50", "v1.5")):
        assert not is_same_output(written, expected), written
    assert is_same_output("1e-7 1000000.5", "0.0 1000000.0")


def test_programs_are_judged_by_tests_or_by_what_they_print(judge: CodeRule) -> None:
    programs, tests, expected = zip(*PROGRAMS, strict=True)
    verdicts = judge.judge_texts(programs, tests)
    assert [verdict.correct for verdict in verdicts] == list(expected)
    assert {verdict.rule for verdict in verdicts} == {"code", "crash"}  # one that ends with an error has crashed


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "[]",
        '{"inputs": [], "outputs": []}',
        '{"inputs": [1], "outputs": []}',
        '{"inputs": null, "outputs": [1]}',
        '{"fn_name": "f", "inputs": [[1]], "outputs": [2]}',
        "# none",
        "six apples",
        "assert '\0'",
        "42",
        "-3.5",
        "(1, 2)",
        "METADATA = {'author': 'x'}\ndef check(candidate):\n    assert candidate(1) == 2",
        "import pytest\n@pytest.mark.slow\ndef test_f():\n    assert f(1) == 2",
        f"import unittest\n{UNITTEST}\nif __name__ == '__main__':\n    unittest.main()",
        "(" * 10**5,
        "[" * 10**5,
    ],
)
def test_tests_that_no_program_fails_or_passes_are_refused(tests: str) -> None:
    with refused("reward code"):
        read_tests(tests)


# Attacks

# System calls that are refused whatever they are given, with their numbers on x86-64.
FORBIDDEN = """
kill 62 tkill 200 tgkill 234 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 pidfd_open 434 pidfd_send_signal 424
pidfd_getfd 438 timer_create 222 setpgid 109 setsid 112 setuid 105 setgid 106 ptrace 101 process_vm_readv 310
process_vm_writev 311 process_madvise 440 kcmp 312 setpriority 141 sched_setaffinity 203 sched_setscheduler 144
fork 57 vfork 58 clone 56 clone3 435 execve 59 execveat 322 unshare 272 setns 308 prctl 157 seccomp 317
socket 41 connect 42 bind 49 socketpair 53 sendmsg 46 io_uring_setup 425 io_uring_enter 426 io_setup 206
bpf 321 perf_event_open 298 userfaultfd 323 keyctl 250 add_key 248 shmget 29 msgsnd 69 mq_open 240 memfd_create 319
mlock 149 mlockall 151 reboot 169 mount 165 umount2 166 chroot 161 pivot_root 155 sethostname 170 setrlimit 160
init_module 175 kexec_load 246 swapon 167 iopl 172 ioctl 16 inotify_init 253 inotify_init1 294 fanotify_init 300
creat 85 openat2 437 open_by_handle_at 304 truncate 76 ftruncate 77 link 86 linkat 265 symlink 88 symlinkat 266
unlink 87 unlinkat 263 rename 82 renameat 264 renameat2 316 mkdir 83 mkdirat 258 rmdir 84 mknod 133 chmod 90
fchmod 91 fchmodat 268 chown 92 utime 132 utimensat 280 setxattr 188 flock 73 sendfile 40 splice 275 chdir 80
"""
CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*map(ctypes.c_long, arguments))
    if result < 0 and ctypes.get_errno() in (1, 38):  # refused as such, and not for what it was given
        raise OSError(ctypes.get_errno(), arguments[0])
"""
ENVIRONMENTS = """
import glob
def read(path):
    try: return open(path, 'rb').read()
    except OSError: return b''
assert any(b's3cret' in read(path) for path in glob.glob('/proc/[0-9]*/environ'))
"""
ATTACKS = {
    "F_SETOWN_EX": "import fcntl, os, struct\nfcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, os.getpid()))",
    "F_SETOWN": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 8, os.getpid())",
    "F_SETSIG": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 10, 9)",
    "O_ASYNC": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_ASYNC)",
    "O_ASYNC of a file": "import os\nos.open('/usr/bin/env', os.O_RDONLY | os.O_ASYNC)",
    "a command with high bits": CALL + "r, w = os.pipe()\ncall(72, r, 8 | 1 << 40, {pid})",
    "a lease": "import fcntl\nfcntl.fcntl(open('/usr/bin/env'), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "F_NOTIFY": "import fcntl, os\nfcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, fcntl.DN_ACCESS)",
    "environment of the grader": "open('/proc/{grader}/environ').read(1) or 1 / 0",
    "environment of any": ENVIRONMENTS,
    "limits of another": "import resource\nresource.prlimit({pid}, resource.RLIMIT_CPU, (0, 0))",
    "a variable of the grader": "import os\nassert os.environ['KEY']",
    "command lines": "assert b'sleep' in open('/proc/{pid}/cmdline', 'rb').read()",
    "files of another": "import os\nos.listdir('/proc/{pid}/fd')",
    "a thread in a namespace": CALL + "call(56, 0x50f00 | 0x20000, 0, 0, 0, 0)",
    "a key": "open({file!r}).read()",
    "a key by another way": "open('/proc/self/root' + {file!r}).read()",
    "the root": "import os\nos.listdir('/')\nassert os.path.exists('/etc/shadow') and open('/etc/shadow').read()",
    "passwd": "open('/etc/passwd').read()",
    "write": "open({file!r}, 'w').write('x')",
    "append": "open({file!r}, 'r+b').write(b'x')",
    "create": "open({file!r} + 'x', 'x')",
    "unnamed": "import os\nos.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
    "write to a device": "open('/dev/null', 'wb')",
    "lock": "import fcntl\nfcntl.lockf(open('/usr/bin/env'), fcntl.LOCK_SH)",
    "poisoned pages": CALL + "call(28, 4096, 4096, 100)",
    "larger pipes": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 1031, 2**20)",
    "many files": "import os\nfds = [os.pipe() for _ in range(99)]",
    "memory": "x = bytearray(2**30)",
    "mapped memory": "import mmap\nx = [mmap.mmap(-1, 2**27) for _ in range(9)]",
    "more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
}
for name, number in zip(FORBIDDEN.split()[::2], FORBIDDEN.split()[1::2], strict=True):
    ATTACKS[f"the call {name}"] = f"{CALL}call({number}, 0, 0, 0, 0, 0, 0)"
ENDING = {  # their process ends by them
    "32-bit kill": """
import ctypes, mmap
code = b'\\x53\\xb8\\x25\\0\\0\\0\\xbb' + ({pid}).to_bytes(4, 'little') + b'\\xb9\\x09\\0\\0\\0\\xcd\\x80\\x5b\\xc3'
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
assert ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() == 0
""",
    "x32": CALL + "call(0x40000000 + 39)",
    "leave": "import sys\nsys.exit(0)",
    "leave at once": "import os\nos._exit(0)",
    "pretend": "import os\nfor fd in range(3, 9):\n try: os.write(fd, b'passed')\n except OSError: 0\nos._exit(0)",
    "more and more": "x = []\nwhile True: x.append(bytearray(2**20))",
    "abort": "import os\nos.abort()",
}
TOGETHER = """
import os
def is_open(fd):
    try: return bool(os.fstat(fd))
    except OSError: return False
own, accepted = set(filter(is_open, range(64))), []
for name, text in {attacks!r}.items():
    try:
        exec(text, {{}})
        accepted.append(name)
    except BaseException: pass
    for fd in set(filter(is_open, range(64))) - own: os.close(fd)
print(accepted)
"""


def test_no_attack_succeeds(
    judge: CodeRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One program tries all but those that end it, also on a process of the same user which holds a key."""
    monkeypatch.setenv("KEY", "s3cret")
    victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
    request.addfinalizer(victim.kill)
    key = tmp_path / "key"
    key.write_text("s3cret")
    before = key.stat()
    values = {"pid": victim.pid, "grader": os.getpid(), "file": str(key)}
    is_known = os.uname().machine == "x86_64"  # whose system calls the numbers are of
    attacks, ending = (
        {name: text.format(**values) for name, text in table.items() if is_known or "call(" not in text}
        for table in (ATTACKS, ENDING)
    )
    accepted, _ = judge._run(program=TOGETHER.format(attacks=attacks), token="")
    assert accepted == "[]\n"
    verdicts = judge.judge_texts([f"{text}\n{HONEST}" for text in ending.values()], [TESTS] * len(ending))
    assert {verdict.rule for verdict in verdicts} <= {"code", "crash"}
    assert [name for name, verdict in zip(ending, verdicts, strict=True) if verdict.correct] == []
    assert victim.poll() is None
    after = key.stat()
    assert (key.read_text(), after.st_mode, after.st_mtime_ns) == ("s3cret", before.st_mode, before.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


HARMLESS = """
import fcntl, json, os, this, zoneinfo, numpy.linalg
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETFL, os.O_NONBLOCK)
fcntl.fcntl(r, fcntl.F_SETFD, 0)
os.close(fcntl.fcntl(r, fcntl.F_DUPFD, 5))
assert 'def' in open(json.__file__).read()
open('/dev/urandom', 'rb').read(4)
assert open('/dev/stdin').read() == ''
"""
OPEN_FILES = """
import os, stat
kinds = {}
for fd in range(64):
    try: kinds[fd] = stat.S_IFMT(os.fstat(fd).st_mode)
    except OSError: pass
"""
NONE_OF_THE_GRADER = """
assert set(kinds.values()) <= {stat.S_IFIFO, stat.S_IFREG, stat.S_IFCHR}
own = [os.fstat(fd).st_size for fd in kinds if kinds[fd] == stat.S_IFREG]
assert own == [0] * len(own)
assert len([fd for fd in kinds if kinds[fd] == stat.S_IFIFO]) == 1 and len(kinds) <= 6, kinds
"""


def test_what_is_harmless_works_and_no_file_of_the_grader_is_open(judge: CodeRule) -> None:
    programs = [f"{HARMLESS}\n{HONEST}", OPEN_FILES]
    assert judge.judge_texts(programs, [TESTS, NONE_OF_THE_GRADER]) == [CORRECT] * 2


FORGED = {
    "words to every file": "import os\nfor fd in range(64):\n    for word in (b'correct', b'code', b'True', b'1'):\n"
    "        try: os.write(fd, word)\n        except OSError: pass\n",
    "no files": "import os\nos.closerange(0, 64)",
    "a flood": "import os\nwhile True: os.write(3, b'x' * 65536)",
    "a slow end": "import atexit, time\natexit.register(time.sleep, 600)",
    "a finalizer that hangs": "import time\nclass Slow:\n    def __del__(self): time.sleep(600)\nkept = Slow()",
    "a thread that stays": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
}


def test_no_verdict_is_forged_by_what_a_program_writes_or_how_it_ends() -> None:
    """The tests and the expected output are wrong for every program. Most of them wait until they are killed."""
    printed = json.dumps({"inputs": ["1"], "outputs": ["secret"]})
    tried = [(name, test) for name in FORGED for test in ("assert f(1) == 3", printed)]
    programs = [f"{HONEST}\n{FORGED[name]}" for name, _ in tried]
    verdicts = CodeRule(len(tried), 5.0, 512).judge_texts(programs, [test for _, test in tried])
    assert [each for each, verdict in zip(tried, verdicts, strict=True) if verdict.correct] == []


ENDLESS = {
    "while True: pass": "timeout",
    "while True: print('x' * 9999)": "timeout",
    "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()": "timeout",
    "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(9)": "timeout",
}


def test_a_program_that_does_not_end_is_killed_with_all_its_processes(judge: CodeRule, started: list[int]) -> None:
    verdicts = CodeRule(len(ENDLESS), 0.7, 512).judge_texts(list(ENDLESS), [TESTS] * len(ENDLESS))
    assert [verdict.rule for verdict in verdicts] == list(ENDLESS.values())
    for number in range(8):  # killed while bubblewrap prepares its namespaces
        CodeRule(2, 0.003 * (number + 1), 512).judge_texts(["import time\ntime.sleep(600)"], [TESTS])
    assert len(started) == len(ENDLESS) + 8
    wait_until(lambda: is_gone(started))
    flood = "import sys\nwhile True: sys.stdout.write('x' * 9999)"
    assert judge.judge_texts([flood], ['{"inputs": [""], "outputs": ["x"]}'])[0].rule == "output"


def test_a_grader_without_room_for_another_process_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of another program are as many as the container may have, until its deadline."""
    start, refusals = subprocess.Popen, iter(range(9))

    def popen(*arguments: Any, **options: Any) -> Any:
        if next(refusals, None) is not None:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert CodeRule(*SETTINGS).judge_texts([HONEST] * 2, [TESTS] * 2) == [CORRECT] * 2


def judge_forever() -> None:
    CodeRule(2, 600.0, 1024).judge_texts(["import time\ntime.sleep(600)"], ["assert time"])


@pytest.mark.usefixtures("judge")
def test_a_program_ends_when_the_run_is_killed() -> None:
    """`kill -9`: nobody is left to kill what the run had started."""
    run = multiprocessing.get_context("fork").Process(target=judge_forever)
    run.start()
    wait_until(lambda: confined_sessions(run.pid) != [])
    sessions = confined_sessions(run.pid)
    run.kill()
    run.join()
    wait_until(lambda: is_gone(sessions))


@pytest.mark.usefixtures("judge")
def test_a_program_does_not_start_without_a_reader_of_its_result() -> None:
    """The run was killed when the process had its request, and had not told the kernel yet to end it with the run."""
    limits = {"memory": 10**9, "seconds": 600.0, "readable": workers._readable()}
    worker = workers.Worker((*workers._sandbox(), *workers.CODE_COMMAND), workers._ENVIRONMENT)
    assert worker.process.stdout is not None
    worker.process.stdout.close()
    worker.send({"program": "import time\ntime.sleep(600)", **limits}, end=True)
    try:
        assert worker.process.wait(30) == 0
    finally:
        worker.kill()


def confined_sessions(run: int) -> list[int]:
    """The children of a process in whose session a program has started: its system calls are filtered by then."""
    children = [int(status.partition("\nPid:")[2].split()[0]) for status in processes_with("PPid", run)]
    return [child for child in children if any("Seccomp:\t2" in status for status in processes_with("NSsid", child))]


PROGRAM = Path(workers.__file__).with_name("code_worker.py").read_text()
UNSAFE = {
    "no seccomp": ("false",),
    "no Landlock": PROGRAM.replace('hide_files(request["readable"])', ""),
    "no answer": PROGRAM.replace("def main()", "sys.modules['hashlib'] = None\ndef main()"),
}


@pytest.mark.parametrize("how", UNSAFE)
def test_a_machine_that_cannot_confine_programs_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bubblewrap too, programs would read the environment of the trainer. Not knowing is no proof."""
    monkeypatch.setenv("PATH", os.environ["PATH"] if how == "no seccomp" else "")
    workers._sandbox.cache_clear()
    open_code.cache_clear()
    unsafe = UNSAFE[how]
    command = unsafe if isinstance(unsafe, tuple) else (sys.executable, "-s", "-c", unsafe)
    monkeypatch.setattr(workers, "CODE_COMMAND", command)
    with refused("reward.kind"):
        open_code(*SETTINGS)
    workers._sandbox.cache_clear()
