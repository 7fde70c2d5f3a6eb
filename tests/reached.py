"""Record which test executes which statement of the code, in every process that the test starts.

mutants.py copies this file as sitecustomize.py into a folder on PYTHONPATH: each Python process imports it first. What
the process compiles then calls ``__reached__`` before each statement. A process with an environment of its own, or a
file that is run as a script, is not seen.
"""

from __future__ import annotations

import ast
import builtins
import mmap
import os
from importlib.machinery import SourceFileLoader
from typing import Any

FOLDER = "MUTANTS_RECORD"  # the environment variable with the folder of the record
PACKAGES = ("dapo_kernels", "dapo_runner")


def share_number(path: str) -> memoryview:
    """Map the number of the running test, which pytest's process sets and the others read; 0 is outside of a test."""
    with open(path, "a+b") as file:
        file.truncate(4)
        return memoryview(mmap.mmap(file.fileno(), 4)).cast("I")


def add_probes(source: bytes, path: str) -> ast.Module:
    tree = ast.parse(source)
    for node in list(ast.walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):  # no lambda
                setattr(node, field, [each for one in statements for each in (*probe(one, path), one)])
    return ast.fix_missing_locations(tree)


def probe(statement: ast.stmt, path: str) -> list[ast.stmt]:
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if is_docstring or isinstance(statement, ast.ImportFrom):  # these two stand first in a module
        return []
    call = ast.Call(ast.Name("__reached__", ast.Load()), [ast.Constant(f"{path}:{statement.lineno}")], [])
    return [ast.copy_location(ast.Expr(call), statement)]


def install(folder: str) -> None:
    """Compile the modules of both packages with probes. A probe makes an empty file, named after test and statement,
    which also works in threads and forks, after a process has closed its files, and where the size of files is limited.
    """
    number, last, seen = share_number(f"{folder}/test"), 0, set[str]()
    plain = SourceFileLoader.source_to_code

    def reached(where: str) -> None:
        nonlocal last
        if number[0] != last:
            last = number[0]
            seen.clear()
        if where not in seen:
            seen.add(where)
            os.close(os.open(f"{folder}/hits/{last} {where.replace('/', '|')}", os.O_CREAT))

    def source_to_code(loader: SourceFileLoader, data: Any, path: Any, **options: Any) -> Any:
        package = next((name for name in PACKAGES if f"/{name}/" in path and isinstance(data, bytes)), None)
        if package is not None:
            data = add_probes(data, package + path.rpartition(f"/{package}")[2])
        return plain(loader, data, path, **options)

    reached._dynamo_marked_constant = True  # torch.compile calls it and goes on
    builtins.__reached__ = reached
    SourceFileLoader.source_to_code = source_to_code


if FOLDER in os.environ:
    install(os.environ[FOLDER])
