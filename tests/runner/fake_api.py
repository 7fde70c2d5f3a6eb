"""An OpenAI-compatible API on this machine that says what a test wants it to."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any]], dict[str, Any] | tuple[int, bytes, dict[str, str]]]


class FakeAPI:
    """``reply`` gets the body of a request; its bodies and headers are kept."""

    def __init__(self, reply: Reply) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.bodies.append(body)
                api.headers.append(dict(self.headers))
                answer = reply(body)
                status, raw, headers = answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode(), {})
                self.send_response(status)
                for name, value in {"Content-Length": str(len(raw)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):  # nobody waits for it any more
                    self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> FakeAPI:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def says(text: str, **first: float) -> dict[str, Any]:
    """An answer; ``first`` are probabilities of tokens in its first place, that of the text first."""
    tokens = [{"token": token, "logprob": math.log(p) if p else -math.inf} for token, p in first.items()]
    logprobs = {"content": [{**tokens[0], "top_logprobs": tokens}]} if tokens else None
    return {"choices": [{"message": {"role": "assistant", "content": text}, "logprobs": logprobs}]}


def asked(body: dict[str, Any], tag: str) -> str:
    """What stands between the tags in the last message of a request."""
    text: str = body["messages"][-1]["content"]
    return text.partition(f"<{tag}>\n")[2].partition(f"\n</{tag}>")[0]
