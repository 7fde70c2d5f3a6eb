"""Attacks from inside a graded program: none succeeds, none is judged correct, and the grader goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from dapo_runner.config import ConfigError
from dapo_runner.rewards import workers
from dapo_runner.rewards.workers import CodeRule, open_code
from dapo_runner.types import Verdict

CONFIG = (2, 60.0, 512)
HONEST = "def f(x): return x + 1"
TESTS = json.dumps(["assert f(1) == 2"])
CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*map(ctypes.c_long, arguments))
    if result < 0 and ctypes.get_errno() in (1, 38):  # refused as such, and not for what it was given
        raise OSError(ctypes.get_errno(), arguments[0])
"""


@pytest.fixture(scope="module", params=["bubblewrap", "alone"])
def judge(request: pytest.FixtureRequest) -> Iterator[CodeRule]:
    """With all that this machine has, and with Landlock and seccomp alone."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "alone":
            patch.setattr(workers, "_sandbox", lambda: ())
        elif not workers._sandbox():
            pytest.skip("no bubblewrap here, or no namespaces for it")
        open_code.cache_clear()
        try:
            yield open_code(*CONFIG)
        except ConfigError as error:
            pytest.skip(str(error))
        open_code.cache_clear()


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user, in a group of its own, which holds a key."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "KEY": "s3cret"}, start_new_session=True) as process:
        yield process
        process.kill()


# By numbers of x86-64, where a call has no function of Python's.
OWNED = """
import fcntl, os
r, w = os.pipe()
fcntl.fcntl(r, {own}, {target})
fcntl.fcntl(r, 10, 9)  # F_SETSIG
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
os.write(w, b'x')
"""
SIGNALS = {
    "F_SETOWN of a process": OWNED.format(own=8, target="{pid}"),
    "F_SETOWN of a group": OWNED.format(own=8, target="-{pid}"),
    "F_SETOWN_EX": OWNED.format(own=15, target="__import__('struct').pack('ii', 1, {pid})"),
    "F_SETOWN alone": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 8, os.getpid())",
    "F_SETSIG alone": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 10, 9)",
    "O_ASYNC": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_ASYNC)",
    "a command with high bits": CALL + "r, w = os.pipe()\ncall(72, r, 8 | 1 << 40, {pid})",
    "FIOASYNC": "import fcntl, os, struct\nfcntl.ioctl(os.pipe()[0], 0x5452, struct.pack('i', 1))",
    "FIOSETOWN": "import fcntl, os, struct\nfcntl.ioctl(os.pipe()[0], 0x8901, struct.pack('i', {pid}))",
    "a lease": "import fcntl\nfcntl.fcntl(open('/usr/bin/env'), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "F_NOTIFY": "import fcntl, os\nfcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, fcntl.DN_ACCESS)",
    "kill": "import os\nos.kill({pid}, 9)",
    "killpg": "import os\nos.killpg({pid}, 9)",
    "kill everything of a group": "import os\nos.kill(0, 9)",
    "tgkill": CALL + "call(234, {pid}, {pid}, 9)",
    "tkill": CALL + "call(200, {pid}, 9)",
    "rt_sigqueueinfo": CALL + "call(129, {pid}, 9, 0)",
    "pidfd_open": "import os\nos.pidfd_open({pid})",
    "pidfd_send_signal": CALL + "call(424, 0, 9, 0, 0)",
    "pidfd_getfd": CALL + "call(438, 0, 1, 0)",
    "setpgid": "import os\nos.setpgid(0, {pid})",
    "timer_create": CALL + "call(222, 0, 0, 0)",
    "32-bit kill": """
import ctypes, mmap
code = b'\\x53\\xb8\\x25\\0\\0\\0\\xbb' + ({pid}).to_bytes(4, 'little') + b'\\xb9\\x09\\0\\0\\0\\xcd\\x80\\x5b\\xc3'
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
assert ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() == 0
""",
}
PROCESSES = {
    "ptrace": CALL + "call(101, 16, {pid}, 0, 0)",
    "process_vm_readv": CALL + "call(310, {pid}, 0, 0, 0, 0, 0)",
    "process_vm_writev": CALL + "call(311, {pid}, 0, 0, 0, 0, 0)",
    "process_madvise": CALL + "call(440, 0, 0, 0, 0, 0)",
    "kcmp": CALL + "call(312, {pid}, {pid}, 0, 0, 0)",
    "prlimit": "import resource\nresource.prlimit({pid}, resource.RLIMIT_CPU, (0, 0))",
    "setpriority": "import os\nos.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "sched_setaffinity": "import os\nos.sched_setaffinity({pid}, {{0}})",
    "environment": "assert b's3cret' in open('/proc/{pid}/environ', 'rb').read()",
    "environment of the grader": "open('/proc/{grader}/environ').read(1) or 1 / 0",
    "environment of any": """
import glob
def read(path):
    try: return open(path, 'rb').read()
    except OSError: return b''
assert any(b's3cret' in read(path) for path in glob.glob('/proc/[0-9]*/environ'))
""",
    "command lines": "assert b'sleep' in open('/proc/{pid}/cmdline', 'rb').read()",
    "memory of another": "open('/proc/{pid}/mem', 'rb')",
    "files of another": "import os\nos.listdir('/proc/{pid}/fd')",
    "fork": "import os\nos.fork()",
    "vfork": CALL + "call(58)",
    "clone": CALL + "call(56, 17, 0, 0, 0, 0)",
    "clone into a namespace": CALL + "call(56, 0x50f00 | 0x20000, 0, 0, 0, 0)",
    "clone3": CALL + "call(435, 0, 88)",
    "execve": "import os\nos.execv('/usr/bin/env', ['env'])",
}
FILES = {
    "a key": "open({file!r}).read()",
    "a key by another way": "open('/proc/self/root' + {file!r}).read()",
    "the root": "import os\nos.listdir('/')\nassert os.path.exists('/etc/shadow') and open('/etc/shadow').read()",
    "passwd": "open('/etc/passwd').read()",
    "write": "open({file!r}, 'w').write('x')",
    "append": "open({file!r}, 'r+b').write(b'x')",
    "create": "open({file!r} + 'x', 'x')",
    "create in /tmp": "open('/tmp/dapo-attack', 'w')",
    "unnamed": "import os\nos.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
    "openat2": CALL + "call(437, -100, 0, 0, 24)",
    "open_by_handle_at": CALL + "call(304, -100, 0, 0)",
    "truncate": "import os\nos.truncate({file!r}, 0)",
    "link": "import os\nos.link({file!r}, {file!r} + 'x')",
    "symlink": "import os\nos.symlink({file!r}, {file!r} + 'x')",
    "chmod": "import os\nos.chmod({file!r}, 0o777)",
    "utime": "import os\nos.utime({file!r})",
    "xattr": "import os\nos.setxattr({file!r}, 'user.x', b'x')",
    "flock": "import fcntl\nfcntl.flock(open('/usr/bin/env'), fcntl.LOCK_EX)",
    "lock": "import fcntl\nfcntl.lockf(open('/usr/bin/env'), fcntl.LOCK_SH)",
    "mount": CALL + "call(165, 0, 0, 0, 0, 0)",
    "chroot": "import os\nos.chroot('/usr')",
    "memory of the machine": "open('/proc/kcore', 'rb').read(1)",
    "inotify": CALL + "call(253)",
}
KERNEL = {
    "socket": "import socket\nsocket.socket()",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "netlink": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "socketpair": "import socket\nsocket.socketpair()",
    "io_uring_setup": CALL + "call(425, 8, 0)",
    "io_uring_enter": CALL + "call(426, 0, 1, 0, 0, 0)",
    "bpf": CALL + "call(321, 0, 0, 0)",
    "perf_event_open": CALL + "call(298, 0, 0, -1, -1, 0)",
    "userfaultfd": CALL + "call(323, 1)",
    "keyctl": CALL + "call(250, 0, -3, 0)",
    "prctl": CALL + "call(157, 4, 0, 0, 0, 0)",
    "prctl to outlive its parent": CALL + "call(157, 1, 0, 0, 0, 0)",
    "another filter": CALL + "call(317, 1, 0, 0)",
    "unshare": CALL + "call(272, 0x10000000)",
    "setns": CALL + "call(308, 0, 0)",
    "setuid": "import os\nos.setuid(1)",
    "setsid": "import os\nos.setsid()",
    "poisoned pages": CALL + "call(28, 4096, 4096, 100)",
    "shared memory": CALL + "call(29, 1, 4096, 0o1777)",
    "message queue": CALL + "call(240, 0, 0x42, 0o600, 0)",
    "memfd_create": "import os\nos.memfd_create('x')",
    "mlock": CALL + "call(151, 3)",
    "larger pipes": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 1031, 2**20)",
    "many files": "import os\nfds = [os.pipe() for _ in range(99)]",
    "limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "memory": "x = bytearray(2**30)",
    "mapped memory": "import mmap\nx = [mmap.mmap(-1, 2**27) for _ in range(9)]",
    "reboot": CALL + "call(169, 0, 0, 0, 0)",
    "x32": CALL + "call(0x40000000 + 39)",
}
ATTACKS = {"signals": SIGNALS, "processes": PROCESSES, "files": FILES, "kernel": KERNEL}


@pytest.mark.parametrize("kind", ATTACKS)
def test_an_attack_fails_and_is_not_judged_correct(
    judge: CodeRule, victim: subprocess.Popen[bytes], tmp_path: Path, kind: str
) -> None:
    """All of a kind run beside each other and beside an honest program."""
    is_known = os.uname().machine == "x86_64"  # whose system calls the numbers are of
    key = tmp_path / "key"
    key.write_text("s3cret")
    before = key.stat()
    values = {"pid": victim.pid, "grader": os.getpid(), "file": str(key)}
    attacks = {name: text.format(**values) for name, text in ATTACKS[kind].items() if is_known or "call(" not in text}
    programs = {name: f"{text}\n{HONEST}" for name, text in attacks.items()} | {"honest": HONEST}
    found = dict(zip(programs, judge.judge_texts(list(programs.values()), [TESTS] * len(programs)), strict=True))
    assert found.pop("honest") == Verdict(True, None, "code")
    assert [name for name, verdict in found.items() if verdict.correct] == []
    assert {verdict.rule for verdict in found.values()} <= {"code", "crash"}
    assert victim.poll() is None
    after = key.stat()
    assert (key.read_text(), after.st_mode, after.st_mtime_ns) == ("s3cret", before.st_mode, before.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert not Path("/tmp/dapo-attack").exists()
    assert judge.judge_texts([HONEST], [TESTS]) == [Verdict(True, None, "code")]


@pytest.mark.parametrize("name", ["harmless fcntl", "files of Python", "standard input"])
def test_what_is_harmless_still_works(judge: CodeRule, name: str) -> None:
    program = {
        "harmless fcntl": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_NONBLOCK)\n"
        "fcntl.fcntl(r, fcntl.F_SETFD, 0)\n"
        "os.close(fcntl.fcntl(r, fcntl.F_DUPFD, 5))",
        "files of Python": "import json, this, zoneinfo\nassert 'def' in open(json.__file__).read()\n"
        "import numpy.linalg\nopen('/dev/urandom', 'rb').read(4)",
        "standard input": "assert open('/dev/stdin').read() == ''",
    }[name]
    assert judge.judge_texts([f"{program}\n{HONEST}"], [TESTS]) == [Verdict(True, None, "code")]


def test_a_program_leaves_no_process_behind(judge: CodeRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it runs in is gone too, when it is killed at its deadline."""
    start, started = subprocess.Popen, []

    def popen(*arguments: Any, **options: Any) -> Any:
        started.append(start(*arguments, **options))
        return started[-1]

    with monkeypatch.context() as patch:
        patch.setattr(workers.subprocess, "Popen", popen)
        CodeRule(2, 3.0, 512).judge_texts(["while True: pass"], ["pass"])
    (process,), until = started, time.monotonic() + 60
    while subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_program_that_is_killed_as_it_starts_leaves_no_process_behind(
    judge: CodeRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline strikes, or the run ends, while bubblewrap prepares its namespaces."""
    start, started = subprocess.Popen, []

    def popen(*arguments: Any, **options: Any) -> Any:
        started.append(start(*arguments, **options))
        return started[-1]

    with monkeypatch.context() as patch:
        patch.setattr(workers.subprocess, "Popen", popen)
        for number in range(12):
            CodeRule(2, 0.002 * (number + 1), 512).judge_texts(["import time\ntime.sleep(600)"], [""])
    assert len(started) == 12
    sessions, until = ",".join(str(process.pid) for process in started), time.monotonic() + 10
    while (found := subprocess.run(["pgrep", "-s", sessions], capture_output=True, check=False)).returncode == 0:
        assert time.monotonic() < until, found.stdout
        time.sleep(0.05)


def test_many_threads_of_a_program_do_not_take_them_from_the_grader(judge: CodeRule) -> None:
    bomb = "import threading, time\nthreading.stack_size(2**15)\n" + (
        "while True: threading.Thread(target=time.sleep, args=(600,)).start()"
    )
    small = CodeRule(2, 3.0, 128)
    assert not small.judge_texts([bomb], ["pass"])[0].correct
    assert judge.judge_texts([HONEST], [TESTS])[0].correct


def test_a_program_that_leaves_no_room_for_another_ends_no_run(
    judge: CodeRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads are as many as the container may have; then its deadline strikes."""
    start, refusals = subprocess.Popen, iter(range(9))

    def popen(*arguments: Any, **options: Any) -> Any:
        if next(refusals, None) is not None:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*arguments, **options)

    monkeypatch.setattr(workers.subprocess, "Popen", popen)
    assert judge.judge_texts([HONEST] * 2, [TESTS] * 2) == [Verdict(True, None, "code")] * 2


FORGED = {
    "words to every file": "import os\nfor fd in range(64):\n    for word in (b'correct', b'code', b'True', b'1'):\n"
    "        try: os.write(fd, word)\n        except OSError: pass\n",
    "a pickle": "import os, pickle\nclass Call:\n    def __reduce__(self): return os.abort, ()\n"
    "for fd in (1, 3, 4):\n    os.write(fd, pickle.dumps(Call()))",
    "words at the end": "import atexit, os\natexit.register(lambda: [os.write(fd, b'code') for fd in (1, 3)])",
    "a good exit at the end": "import atexit, os\natexit.register(os._exit, 0)",
    "no files": "import os\nos.closerange(0, 64)",
    "another standard output": "import io, sys\nsys.stdout = sys.__stdout__ = io.StringIO()",
    "a flood": "import os\nwhile True: os.write(3, b'x' * 65536)",
    "a slow end": "import atexit, time\natexit.register(time.sleep, 600)",
    "a finalizer that hangs": "class Slow:\n    def __del__(self):\n        while True: pass\nkept = Slow()",
    "a thread that stays": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
}


def test_no_verdict_is_forged_by_what_a_program_writes_or_how_it_ends(judge: CodeRule) -> None:
    """The tests and the expected output are wrong for every program. Most of them wait until they are killed."""
    printed = json.dumps({"inputs": ["1"], "outputs": ["secret"]})
    tried = [(name, test) for name in FORGED for test in ("assert f(1) == 3", printed)]
    programs = [f"{HONEST}\n{FORGED[name]}" for name, _ in tried]
    verdicts = CodeRule(len(tried), 8.0, 512).judge_texts(programs, [test for _, test in tried])
    assert [each for each, verdict in zip(tried, verdicts, strict=True) if verdict.correct] == []
    assert judge.judge_texts([HONEST], [TESTS]) == [Verdict(True, None, "code")]


def test_a_program_holds_no_file_of_the_grader(judge: CodeRule) -> None:
    program = (
        "import os, stat\nkinds = {}\nfor fd in range(64):\n    try: kinds[fd] = stat.S_IFMT(os.fstat(fd).st_mode)\n"
    )
    tests = "assert set(kinds.values()) <= {stat.S_IFIFO, stat.S_IFREG, stat.S_IFCHR}\n"
    tests += "own = [os.fstat(fd).st_size for fd in kinds if kinds[fd] == stat.S_IFREG]\nassert own == [0] * len(own)\n"
    tests += "assert len([fd for fd in kinds if kinds[fd] == stat.S_IFIFO]) == 1 and len(kinds) <= 6, kinds"
    assert judge.judge_texts([f"{program}    except OSError: pass"], [tests]) == [Verdict(True, None, "code")]


@pytest.mark.parametrize(
    ("line", "fault"),
    [('hide_files(request["readable"])', ""), ("def main()", "sys.modules['hashlib'] = None\ndef main()")],
    ids=["no Landlock", "no answer"],
)
def test_a_machine_that_hides_nothing_is_refused(line: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither bubblewrap nor Landlock: programs would read the environment of the trainer. Not knowing is no proof."""
    monkeypatch.setattr(workers, "_sandbox", lambda: ())
    blind = workers._PROGRAM.read_text().replace(line, fault)
    command = (sys.executable, "-s", "-c", blind)
    monkeypatch.setattr(workers, "_CODE_COMMAND", command)
    open_code.cache_clear()
    with refused("reward.kind"):
        open_code(*CONFIG)
    open_code.cache_clear()
