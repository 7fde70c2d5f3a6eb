"""HTTP requests with a timeout and a limit on the size of the answer.

All requests run on one event loop in its own thread. They go only to the given URL, or to a proxy: a redirect fails,
because it would forward the key.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from dapo_runner.errors import ConfigError, RunError, hide_users

T = TypeVar("T")
CONNECT_TIMEOUT = 10.0  # seconds to establish a connection
SHOWN = 300  # characters of an answer that an error message shows
_STARTING = threading.Lock()
LOOPS: dict[str, asyncio.AbstractEventLoop] = {}
os.register_at_fork(after_in_child=LOOPS.clear)  # a fork has no threads of its parent
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # no proxy reaches this machine
HEADERS = {"User-Agent": "dapo-runner", "Accept-Encoding": "identity"}


class HTTPError(RunError):
    """A request that failed.

    Attributes:
        status: The HTTP status code, if the server returned an error.
        waited: The timeout in seconds, if the request timed out.
        retry_after: The seconds that the server asks to wait before the next request (Retry-After).
    """

    def __init__(self, message: str, status: int | None = None, waited: float = 0.0, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.waited, self.retry_after = status, waited, retry_after


def start(work: Coroutine[Any, Any, T], loop: str = "http") -> Future[T]:
    """Run a coroutine on a shared event loop."""
    return asyncio.run_coroutine_threadsafe(work, shared_loop(loop))


def wait(future: Future[T]) -> T:
    """Wait for ``future`` and return its result. An exception in this thread, such as Ctrl-C, cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the shared event loop and wait for it. An exception in this thread cancels it."""
    return wait(start(work))


def shared_loop(name: str = "http") -> asyncio.AbstractEventLoop:
    """Return the event loop ``name``, which runs in a thread of its own."""
    with _STARTING:
        if name not in LOOPS:
            LOOPS[name] = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(LOOPS[name],), name=name, daemon=True).start()
        return LOOPS[name]


def replace_if_blocked(name: str) -> None:
    """Give later calls a new event loop ``name`` if a function blocks the present one."""
    loop = LOOPS.get(name)
    try:
        if loop is not None:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(1.0)
    except TimeoutError:
        with _STARTING:
            if LOOPS.get(name) is loop:  # else another caller has replaced it
                del LOOPS[name]


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # raised by a task, whose future has it too
            loop.run_forever()


async def request(
    method: str,
    url: str,
    body: Any = None,
    *,
    key: str = "",
    headers: Mapping[str, str] | None = None,
    timeout: float | None,
    max_bytes: int,
    use_proxy: bool = False,
) -> Any:
    """Send a JSON ``body`` and return the JSON of the answer, None if it is empty.

    Args:
        key: Sent as a bearer token, and removed from error messages.
        timeout: Limit of the whole request in seconds.
        max_bytes: The maximum size of the answer.
        use_proxy: Whether to use the proxy of the environment.

    Raises:
        HTTPError: The status is not 2xx, or the answer is missing, incomplete, too long or not JSON.
    """
    sent = {**HEADERS, **(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}
    limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout or CONNECT_TIMEOUT, CONNECT_TIMEOUT))
    parts = urlsplit(url)
    direct = not use_proxy or parts.hostname in LOOPBACK or proxy_bypass(parts.hostname or "")
    proxy = None if direct else getproxies().get(parts.scheme)
    options: dict[str, Any] = {"json": body, "headers": sent, "allow_redirects": False, "proxy": proxy}
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), timeout=limits) as session,
            session.request(method, url, **options) as response,
        ):
            return await _read_answer(response, key, max_bytes)
    except aiohttp.ConnectionTimeoutError:
        raise HTTPError(f"{url}: no connection within {limits.sock_connect:g} s", None, CONNECT_TIMEOUT) from None
    except TimeoutError:
        raise HTTPError(f"{url}: no answer within {timeout or 0:g} s", None, timeout or 0.0) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise HTTPError(f"{url}: {shorten(f'{type(error).__name__}: {error}', key)}") from None


async def _read_answer(response: aiohttp.ClientResponse, key: str, max_bytes: int) -> Any:
    if not 200 <= response.status < 300:
        detail = shorten(f"{response.reason}: {await _read_error(response, max_bytes)}", key)
        asked = response.headers.get("Retry-After", "")  # seconds; a date is not read
        after = float(asked) if asked.isdecimal() else 0.0
        raise HTTPError(f"{response.url}: HTTP {response.status} {detail}", response.status, retry_after=after)
    raw = await _read(response, max_bytes)
    try:
        return json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        got = shorten(raw.decode("utf-8", "replace"), key)
        raise HTTPError(f"{response.url}: expected JSON, got {got}") from None


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > max_bytes:
            raise ValueError(f"the answer is longer than {max_bytes} bytes")
    return bytes(raw)


async def _read_error(response: aiohttp.ClientResponse, max_bytes: int) -> str:
    try:
        return (await _read(response, max_bytes)).decode("utf-8", "replace")
    except (aiohttp.ClientError, ValueError) as error:
        return f"then {type(error).__name__}"


def read_key(url: str, key_env: str | None) -> str:
    """Return the key in the environment variable ``key_env``, "" without ``key_env``. Raises ConfigError."""
    if key_env is None:
        return ""
    key, where = os.environ.get(key_env, "").strip(), f"the key of {url} in the environment variable {key_env}"
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigError(f"expected {where} in printable ASCII characters, got {'others' if key else 'nothing'}")
    return key


def shorten(text: str, key: str = "") -> str:
    """Return the text of a server as one printable line, without the key and passwords in addresses."""
    text = " ".join((text.replace(key, "***") if key else text).split())
    text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in hide_users(text))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
