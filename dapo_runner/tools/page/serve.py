"""`dapo watch`: the page of runs under way, served to this machine alone. It asks every two seconds for what is new."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE
from dapo_runner.logging.rollout_log import ROLLOUTS, saved_steps
from dapo_runner.tools.page.html import contents, plotly_source, render

HOST = "127.0.0.1"
ROLLOUTS_PATH = re.compile(r"/rollouts/(?P<run>\d{1,9})/(?P<step>\d{1,9})", re.ASCII)


def open_server(runs: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Listen on 127.0.0.1; port 0: any that is free. Raises OSError where the port is taken, ConfigError."""
    plotly_source()  # fails here and not in the browser
    return ThreadingHTTPServer((HOST, port), partial(_Handler, runs))


class _Handler(BaseHTTPRequestHandler):
    """/: the page. /data: what it shows. /rollouts/RUN/STEP: a step's file, as it lies on the disk."""

    def __init__(self, runs: Sequence[Path], *arguments: Any) -> None:
        self.runs = runs
        super().__init__(*arguments)

    def do_GET(self) -> None:
        # Another site whose name has come to mean this machine could read along: its name is not ours.
        name, _, _ = self.headers.get("Host", "").partition(":")
        version = _version(self.runs)
        if name not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            page = render(contents(self.runs) | {"version": version}, live=True)
            self._answer(page.encode(), "text/html; charset=utf-8")
        elif self.path == "/data" and self.headers.get("If-None-Match") == version:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.end_headers()
        elif self.path == "/data":
            data = json.dumps(contents(self.runs) | {"version": version}, allow_nan=False)
            self._answer(data.encode(), "application/json")
        elif (path := self._rollouts()) is not None:
            self._answer(path.read_bytes(), "application/octet-stream")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _rollouts(self) -> Path | None:
        """Return the file that is asked for by the index of its run and its step."""
        asked = ROLLOUTS_PATH.fullmatch(self.path)
        if asked is None or int(asked["run"]) >= len(self.runs):
            return None
        return saved_steps(self.runs[int(asked["run"])] / ROLLOUTS).get(int(asked["step"]))

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        for name, value in (headers | {"X-Content-Type-Options": "nosniff"}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A line for each request would bury the address."""


def _version(runs: Sequence[Path]) -> str:
    """Return a text that changes with whatever the page shows."""
    paths = [run / name for run in runs for name in (METRICS_FILE, TIMINGS_FILE, ROLLOUTS)]
    stats = [path.stat() for path in paths if path.exists()]
    return '"' + "-".join(f"{stat.st_mtime_ns:x}.{stat.st_size:x}" for stat in stats) + '"'
