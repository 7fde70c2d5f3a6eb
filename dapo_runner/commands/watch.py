"""`dapo watch`: the page of runs under way, on localhost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dapo_runner.errors import ConfigError
from dapo_runner.tools.page.serve import open_server


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    for folder in options.run:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder}: expected the folder of a run, got a file")
    try:
        server = open_server(options.run, options.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port: expected one that is free, got {options.port}: {error}") from error
    host, port = server.server_address[:2]
    print(f"http://{host!s}:{port}  (Ctrl-C ends it; the run goes on)", flush=True)
    for folder in options.run:
        if not folder.is_dir():
            print(f"{folder}: no run there yet; the page shows it once it has begun", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
