"""`dapo watch`: serve the page of runs on localhost. The page asks for updates every two seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE
from dapo_runner.logging.rollout_log import ROLLOUTS, saved_steps
from dapo_runner.tools.page.html import contents, render

HOST = "127.0.0.1"
ROLLOUTS_PATH = re.compile(r"/rollouts/(?P<run>\d{1,9})/(?P<step>\d{1,9})", re.ASCII)


def open_server(runs: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Listen on 127.0.0.1; port 0 is any free port. Raises OSError if the port is in use, ConfigError."""
    render(contents(runs))  # fails here instead of in the browser
    return ThreadingHTTPServer((HOST, port), partial(_Handler, runs))


class _Handler(BaseHTTPRequestHandler):
    """Serve / (the page), /data (its content) and /rollouts/RUN/STEP (a step's file)."""

    def __init__(self, runs: Sequence[Path], *arguments: Any) -> None:
        self.runs = runs
        super().__init__(*arguments)

    def do_GET(self) -> None:
        # Another site could point its name to this machine (DNS rebinding): accept only our own names.
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
        match = ROLLOUTS_PATH.fullmatch(self.path)
        if match is None or int(match["run"]) >= len(self.runs):
            return None
        return saved_steps(self.runs[int(match["run"])] / ROLLOUTS).get(int(match["step"]))

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        for name, value in (headers | {"X-Content-Type-Options": "nosniff"}).items():
            self.send_header(name, value)
        with suppress(ConnectionError):  # the browser has left
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a line per request would hide the address."""


def _version(runs: Sequence[Path]) -> str:
    """Return a text that changes whenever the content of the page does."""
    paths = [run / name for run in runs for name in (METRICS_FILE, TIMINGS_FILE, ROLLOUTS)]
    stats = [path.stat() for path in paths if path.exists()]
    return '"' + "-".join(f"{stat.st_mtime_ns:x}.{stat.st_size:x}" for stat in stats) + '"'
