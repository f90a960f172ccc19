"""The workers that the router knows, and whether they are alive.

                     /health says 200
       ┌───────────────────────────────────────────┐
       ▼                                           │
    healthy ── /health says something else, ─────▶ down      add() begins here, with a probe at once
       │       or the connection is refused        ▲        remove() forgets; what runs there may end
       │                                           │
       └────── `FAILURES` probes unanswered ───────┘
               what waits for the worker is called off

Each worker has a task that probes it: `/health` every `health_interval` seconds, and at once when a request to it
fails.  A connection that breaks says little (a server may close an idle one at any moment), so it costs the worker
nothing but that probe.  A worker that says itself that it is not well, or takes no new connections, may be draining: it
gets nothing new and may end what it has (of a process that died, the open connections break by themselves).  One that
says nothing hangs, and gives no other sign: the requests that wait for it are cancelled here, and tried elsewhere by
those who sent them.  That we have no sockets left to ask with says nothing about any worker.

The probe also asks `/get_server_info` for the state of the cache (see CacheReport): a worker that does not know the
question is none the worse for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from .router_policy import CacheReport, Policy

logger = logging.getLogger(__name__)

FAILURES = 2  # probes in a row without an answer
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)


class Worker:
    """A server at `url`.

    load           sequences in flight there
    pending_chars  of the keys of what is in flight
    requests       that it has been given, ever
    """

    def __init__(self, url: str):
        self.url = url
        self.healthy = False
        self.load = self.pending_chars = self.requests = 0
        self.probed = asyncio.Event()  # once at least
        self.exchanges: set[asyncio.Task[Any]] = set()
        self._failures = 0
        self._wake = asyncio.Event()
        self.watcher: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def carrying(self, weight: int, chars: int, exchange: asyncio.Task[Any]) -> Iterator[None]:
        """Count what is sent to the worker while it is there."""
        self.load += weight
        self.pending_chars += chars
        self.requests += 1
        self.exchanges.add(exchange)
        try:
            yield
        finally:
            self.load -= weight
            self.pending_chars -= chars
            self.exchanges.discard(exchange)

    def suspect(self) -> None:
        """Something went wrong there: probe at once."""
        self._wake.set()

    async def wait(self, seconds: float) -> None:
        """Until it is time for the next probe."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        self._wake.clear()

    def count_failure(self) -> int:
        self._failures += 1
        return self._failures

    def up(self) -> None:
        self.healthy, self._failures = True, 0

    def call_off(self) -> None:
        """Whoever waits for it sees a cancelled exchange, and `healthy` False."""
        for exchange in list(self.exchanges):
            exchange.cancel()


class Workers:
    """All of them.  Used on one event loop; `session` makes the connections, `policy` hears what happens.

    health_interval, health_timeout   seconds
    headers                           sent with every probe (a key)
    changed                           called with a worker that went up or down
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        policy: Policy,
        *,
        health_interval: float,
        health_timeout: float,
        headers: dict[str, str],
        changed: Callable[[Worker], None] = lambda worker: None,
    ):
        self._session, self._policy, self._changed = session, policy, changed
        self._interval, self._headers = health_interval, headers
        self._timeout = aiohttp.ClientTimeout(total=health_timeout)
        self._all: dict[str, Worker] = {}
        self._closed = False
        self._watchers: set[asyncio.Task[None]] = set()  # also of removed workers that still have something to end

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def get(self, url: str) -> Worker | None:
        return self._all.get(normal_url(url))

    def healthy(self) -> dict[str, Worker]:
        return {url: worker for url, worker in self._all.items() if worker.healthy}

    def add(self, url: str) -> Worker:
        """Begin to watch `url`; it gets requests once it has answered a probe.  ValueError if that is no URL."""
        url = normal_url(url)
        worker = self._all.get(url)
        if worker is None:
            worker = self._all[url] = Worker(url)
            worker.watcher = asyncio.get_running_loop().create_task(self._watch(worker))
            self._watchers.add(worker.watcher)
            worker.watcher.add_done_callback(self._watchers.discard)
        return worker

    def remove(self, url: str) -> bool:
        """No more requests for `url`; those in flight there may end, and are watched until they have.  False if there
        is no such worker."""
        worker = self._all.pop(normal_url(url), None)
        if worker is None:
            return False
        if worker.watcher is not None and not worker.exchanges:
            worker.watcher.cancel()
        self._policy.forget(worker.url)
        self._changed(worker)
        return True

    def failed(self, worker: Worker, error: BaseException) -> None:
        """A request to it did not come to its end."""
        if _refused(error):  # not if we have no sockets left, say: the probe will tell
            self._take_down(worker, error)
        worker.suspect()

    async def close(self) -> None:
        # A watcher may not hear that it was cancelled: asyncio.wait_for (before Python 3.12) and aiohttp's timers lose
        # a cancellation that comes together with a result or their own end.
        self._closed = True
        watchers = list(self._watchers)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    async def _watch(self, worker: Worker) -> None:
        while not self._closed and (worker.exchanges or self._all.get(worker.url) is worker):
            try:
                await self._probe(worker)
            except Exception:  # a defect: it may not end the watch
                logger.exception("probing %s failed", worker.url)
            worker.probed.set()
            if not self._closed:
                await worker.wait(self._interval)

    async def _probe(self, worker: Worker) -> None:
        try:
            async with self._session.get(
                worker.url + "/health", timeout=self._timeout, headers=self._headers, allow_redirects=False
            ) as reply:
                if reply.status >= 300:
                    self._take_down(worker, f"/health says {reply.status}")
                    return
            if not worker.healthy and self._all.get(worker.url) is worker:
                self._policy.forget(worker.url)
                worker.up()
                logger.info("worker %s is up", worker.url)
                self._changed(worker)
            worker.up()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            if our_own_lack(error):
                logger.warning("cannot probe %s: %s", worker.url, error)
            elif _refused(error):
                self._take_down(worker, error)
            elif worker.count_failure() >= FAILURES:
                self._take_down(worker, error)
                worker.call_off()
            return
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            await self._ask_cache(worker)

    def _take_down(self, worker: Worker, why: BaseException | str) -> None:
        if worker.healthy:
            logger.warning("worker %s is down: %s", worker.url, reason(why))
            worker.healthy = False
        if self._all.get(worker.url) is worker:
            self._policy.forget(worker.url)
            self._changed(worker)

    async def _ask_cache(self, worker: Worker) -> None:
        info = await self.info(worker)
        try:
            tokens = int(info["kv_evictable"]) + int(info["kv_locked"])
            epoch = info.get("cache_epoch")
            report = CacheReport(tokens, int(info["prompt_tokens"]), epoch, worker.pending_chars)
        except (KeyError, TypeError, ValueError):
            return
        if self._all.get(worker.url) is worker and worker.healthy:
            self._policy.report(worker.url, report)

    async def info(self, worker: Worker) -> dict[str, Any]:
        """The worker's /get_server_info; {} if it has none."""
        url = worker.url + "/get_server_info"
        async with self._session.get(url, timeout=self._timeout, headers=self._headers, allow_redirects=False) as reply:
            try:
                info = await reply.json(content_type=None) if reply.status == 200 else {}
            except ValueError:
                info = {}
        return info if isinstance(info, dict) else {}


def reason(error: BaseException | str) -> str:
    """An error in words; many that are about time have none."""
    return str(error) or type(error).__name__


def _refused(error: BaseException) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)


def our_own_lack(error: BaseException) -> bool:
    """Whether a connection failed because this process has no sockets (files, ports, memory) for it."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno in _LACKS:
        return True
    if not isinstance(cause, socket.gaierror):
        return False
    try:  # looking up a name needs a socket as well, and does not say so
        socket.socket().close()
    except OSError:
        return True
    return False


def normal_url(url: str) -> str:
    """`url` in one spelling, so that no worker is there twice; ValueError if it is not http(s)://host[:port][/path]."""
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"a worker is given as http://host:port, got {url!r}")
    if parts.query or parts.fragment or parts.username:
        raise ValueError(f"a worker's URL has no query, fragment or user, got {url!r}")
    _ = parts.port  # ValueError if it is no port
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"
