"""An interpreter for commands that tests start: their processes are forked from one that has the imports behind it."""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path

from forks import CONTEXT

MAIN = multiprocessing.current_process()

# Gives its arguments, environment and open files to a process that is forked for it, passes signals on, and ends as
# that process does.
CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys

def is_open(file):
    try:
        return bool(os.fstat(file))
    except OSError:
        return False

files = [file for file in map(int, os.listdir("/proc/self/fd")) if is_open(file)]
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
request = [sys.argv[1:], os.getcwd(), dict(os.environ), files]
socket.send_fds(server, [json.dumps(request).encode()], files)

def pass_on(number, frame):
    try:
        server.send(bytes([number]))
    except OSError:
        pass  # the process has ended

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, pass_on)
code = int(server.recv(99) or 1)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
FILES = 1000  # the process of a client has no more


@contextmanager
def forked_python(folder: Path) -> Iterator[str]:
    """A program in ``folder`` that runs modules (-m), code (-c) and files as ``sys.executable`` does, which it is in
    its own processes. They end with this process.
    """
    program = folder / "python"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # an address that is no file
        listener.listen()
        program.write_text(CLIENT.format(python=sys.executable, address=listener.getsockname()))
        program.chmod(0o755)
        life, ours = socket.socketpair()
        with ours:
            server = CONTEXT.Process(target=_serve, args=(listener, life, str(program)))
            server.start()
            life.close()
            yield str(program)
        server.join()


def _serve(listener: socket.socket, life: socket.socket, program: str) -> None:
    """Fork a keeper for each client, until the tests' process closes its end of ``life``."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # collections leave out what all processes have
    sys.executable = program
    multiprocessing.set_executable(program)
    while life not in select.select([listener, life], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            _keep(connection, life)
        connection.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # keepers that have ended
                pass


def _keep(connection: socket.socket, life: socket.socket) -> None:
    """Fork the process of a client, and end it with the client."""
    message, files, *_ = socket.recv_fds(connection, 2**20, 250)
    if not message:  # the client is gone
        os._exit(0)
    child = os.fork()
    if child == 0:
        _become(*json.loads(message), files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([ended, connection, life], [], [])[0]):
        number = b"" if life in ready else connection.recv(1)
        os.kill(child, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):  # the client is gone
        connection.send(str(code).encode())
    os._exit(0)


def _become(
    arguments: list[str], folder: str, environment: dict[str, str], places: list[int], files: list[int]
) -> None:
    """Have the client's files, and run its program."""
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, FILES) for file in files]
    os.closerange(0, FILES)
    for place, copy in zip(places, copies, strict=True):
        os.dup2(copy, place)
    os.closerange(FILES, max(copies) + 1)
    sys.stdin = os.fdopen(0, closefd=False)
    for of_parent in (resource_tracker._resource_tracker, forkserver._forkserver):
        of_parent.__init__()
    process._current_process, process._parent_process = MAIN, None
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    code = 1
    try:
        _run(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    util._flush_std_streams()
    os._exit(code)


def _run(arguments: list[str]) -> None:
    while arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")
