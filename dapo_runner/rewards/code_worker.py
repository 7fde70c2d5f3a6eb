"""Run one program that a model wrote, in a process that ``workers`` starts for it and kills.

The request is JSON on standard input. With "tests", these run after the program, and the process writes the request's
"token" if both complete, else "failed". Without "tests", the program reads "stdin" and prints.

Before the program runs, the process permanently gives up its permissions. Only the system calls below are allowed
(seccomp, through libseccomp): it can read and start threads, but not open a file for writing, remove or rename files,
start or signal processes, or open sockets. It can open only the files of Python and of the system's libraries
(Landlock, if the kernel has it). Its memory is limited, and it ends with its parent.
"""

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import struct
import sys
import types
from typing import Any

ALLOW, IGNORE, REFUSE, UNKNOWN = 0x7FFF0000, 0x00050000, 0x00050000 | 1, 0x00050000 | 38  # seccomp.h; 0, EPERM, ENOSYS
OTHER, AT_MOST, EQUAL, MASKED = 1, 3, 4, 7
# Reading and open files; memory, threads and signals to itself; time, random numbers, process ids and system names.
ALLOWED = """
    read readv pread64 write writev lseek close dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 epoll_create1
    epoll_ctl epoll_wait epoll_pwait eventfd2 stat fstat lstat newfstatat statx statfs fstatfs access faccessat
    faccessat2 getdents getdents64 getcwd readlink readlinkat fadvise64
    brk mmap munmap mremap mprotect mincore futex set_robust_list get_robust_list rseq set_tid_address sched_yield
    sched_getaffinity getcpu arch_prctl rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall exit
    exit_group
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times getrandom getpid getppid gettid getuid
    geteuid getgid getegid uname sysinfo getrusage getrlimit
"""
WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_ASYNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
# No command that sets an owner, which the kernel would signal, and none for leases, locks or pipe sizes.
FCNTL = (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL)
MADV_NOHUGEPAGE = 15  # higher commands, such as MADV_HWPOISON, can affect pages of others
CLONE_THREAD, CLONE_NAMESPACES = 0x10000, 0x7E020000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # on every architecture
ALL_ACCESS, READ_FILE, READ_DIR = 0x1FFF, 4, 8  # linux/landlock.h, first version


class _Comparison(ctypes.Structure):
    """scmp_arg_cmp: the index of an argument, the comparison, and its two operands."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def hide_files(readable: list[str]) -> None:
    """Restrict opening files to those under ``readable``. Has no effect if the kernel has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rules = libc.syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(ctypes.c_uint64(ALL_ACCESS)), ctypes.c_size_t(8), 0)
    if rules < 0:
        return
    for path in (*readable, *DEVICES):
        beneath = os.open(path, os.O_PATH)
        access = READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
        if libc.syscall(LANDLOCK_ADD_RULE, rules, 1, struct.pack("=Qi", access, beneath), 0) != 0:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
        os.close(beneath)
    if libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)


def confine(memory: int, seconds: float) -> None:
    """Give up all system calls but those above. Raises OSError if the system does not support that."""
    libc, seccomp = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libseccomp.so.2")
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limits = {"AS": memory, "CPU": int(seconds) + 2, "CORE": 0, "FSIZE": 0, "NOFILE": 64}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (min(2**26, most % 2**64), most))  # for deep recursion; -1 is no limit
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(REFUSE)))

    def rule(action: int, name: str, *comparison: int) -> None:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())  # negative if this machine lacks the call
        count = len(comparison) // 4
        compared = (_Comparison * count)(*(_Comparison(*comparison[4 * i : 4 * i + 4]) for i in range(count)))
        seccomp.seccomp_rule_add_array(rules, ctypes.c_uint32(action), number, count, compared)

    for name in ALLOWED.split():
        rule(ALLOW, name)
    rule(ALLOW, "open", 1, MASKED, WRITES, os.O_RDONLY)
    rule(ALLOW, "openat", 2, MASKED, WRITES, os.O_RDONLY)
    for command in FCNTL:
        rule(ALLOW, "fcntl", 1, EQUAL, command, 0)
    rule(ALLOW, "fcntl", 1, EQUAL, fcntl.F_SETFL, 0, 2, MASKED, os.O_ASYNC, 0)
    rule(ALLOW, "madvise", 2, AT_MOST, MADV_NOHUGEPAGE, 0)
    rule(ALLOW, "clone", 0, MASKED, CLONE_THREAD | CLONE_NAMESPACES, CLONE_THREAD)
    rule(UNKNOWN, "clone3")  # its flags are in memory, where seccomp cannot check them; the C library then uses clone
    rule(ALLOW, "prlimit64", 2, EQUAL, 0, 0)  # only to read a limit
    rule(IGNORE, "prlimit64", 0, EQUAL, 0, 0, 1, EQUAL, resource.RLIMIT_STACK, 0, 2, OTHER, 0, 0)  # many set it
    rule(ALLOW, "tgkill", 0, EQUAL, os.getpid(), 0)  # abort
    if seccomp.seccomp_load(rules) != 0:
        raise OSError("seccomp_load failed")


def run(program: str, tests: str | None) -> None:
    module = types.ModuleType("__main__" if tests is None else "program")
    sys.modules[module.__name__] = module  # dataclasses look it up there
    exec(compile(program, "<program>", "exec"), module.__dict__)
    exec(compile(tests or "", "<tests>", "exec"), module.__dict__)


def main() -> None:
    sys.path.pop(0)  # the folder of this file
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    result = os.dup(1)
    source = os.memfd_create("stdin")
    os.pwrite(source, request.get("stdin", "").encode(), 0)
    os.dup2(source, 0)
    tests = request.get("tests")
    if tests is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    hide_files(request["readable"])
    confine(request["memory"], request["seconds"])
    readers = select.poll()
    readers.register(result, 0)
    if readers.poll(0):  # nobody reads the result: the trainer was killed before the kernel knew what ends with it
        return
    written = b"failed"
    try:
        run(request["program"], tests)
        written = request["token"].encode()  # a program that exits has not passed
    finally:
        if tests is not None:
            os.write(result, written)


if __name__ == "__main__":
    main()
