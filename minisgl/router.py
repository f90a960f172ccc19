"""One address for many workers: `python -m minisgl route --workers http://a:30000 http://b:30000`.

    client ──▶ Router ──▶ where does its prompt begin?          router_key
                │         which worker?                         router_policy, router_tree
                │         ask it, pass the answer on ◀──▶       router_exchange
                └── who is alive? ◀──▶                          router_workers

The router understands of a request only where its prompt begins.  Bodies go to the workers as they came, answers come
back as they are: everything that the server can do, it can do behind the router.

When does a request belong to a worker?  From the first byte that the client has seen.  Until then the router may ask
another worker, since asking a model twice harms nobody; so it holds an answer's head back until its first piece is
there, and an answer of known length until it is complete.  After that a failure can only be told: a stream of
server-sent events gets an error event and its end, anything else is cut off.  Events are passed on whole, at once, so
that what the client has when a worker dies is well-formed.

A client that goes away closes the connection to the worker, which frees the request's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp
from yarl import URL

from .router_exchange import (
    NOT_OURS_TO_ADD,
    Answer,
    Busy,
    Head,
    Message,
    Receive,
    Scope,
    Send,
    end_to_end,
    error_answer,
    exchange,
    raw_answer,
    read_body,
)
from .router_key import Routing, routing
from .router_metrics import RouterMetrics
from .router_policy import Policy
from .router_workers import Worker, Workers, normal_url, our_own_lack, reason
from .server_http import OPEN_PATHS, KeyGuard, disconnected

IDLE_CONNECTION = 3.0  # seconds an idle connection to a worker is kept: less than the 5 after which uvicorn closes it
SMALL_BODY = 256 << 10  # bytes; what is larger is parsed on another thread, for it takes milliseconds
MAX_ORDER = 1 << 20  # bytes of a request that the router itself reads
OPEN_BODY = 4096  # bytes of a request for which no key is asked
TRIM_NODES = 200  # tree nodes per slice of upkeep: well under a millisecond, in which nothing else runs


@dataclass
class RouterOptions:
    """policy           which worker gets a request (router_policy)
    workers           URLs to begin with
    api_key           of the workers: sent with probes, and asked of everybody who asks the router
    open_admin        without a key: may anybody change the list of workers, and so read all prompts?  (On loopback)
    retries           how many more workers a request is tried on
    max_body          bytes of a request
    stream_timeout    seconds for which a worker may be silent in the middle of an answer.  Generous: under load it may
                      take back what it has begun (see Scheduler), and goes on when there is room again
    eviction_interval, health_interval, health_timeout, connect_timeout   seconds
    """

    policy: Policy
    workers: list[str] = field(default_factory=list)
    api_key: str | None = None
    open_admin: bool = True
    retries: int = 3
    max_body: int = 64 << 20
    eviction_interval: float = 1.0
    health_interval: float = 2.0
    health_timeout: float = 5.0
    connect_timeout: float = 5.0
    stream_timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("eviction_interval", "health_interval", "health_timeout", "connect_timeout", "stream_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds, got {getattr(self, name)}")
        if self.retries < 0 or self.max_body < 1:
            raise ValueError("retries must be at least 0 and max_body at least 1")
        self.workers = [normal_url(url) for url in self.workers]


class Router:
    """The router as an ASGI application: `router.app`.  `workers` and `loop` are there while it runs (its lifespan)."""

    workers: Workers
    loop: asyncio.AbstractEventLoop

    def __init__(self, options: RouterOptions):
        self.options, self.policy = options, options.policy
        self.metrics = RouterMetrics()
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/workers", self._list),
                Route("/add_worker", self._add, methods=["POST"]),
                Route("/remove_worker", self._remove, methods=["POST"]),
                Route("/flush_cache", self._to_all, methods=["GET", "POST"]),
                Route("/abort_request", self._to_all, methods=["POST"]),
                Route("/get_server_info", self._server_info),
                Mount("", app=self._forward),
            ],
            lifespan=self._lifespan,
        )
        self.app: ASGIApp = app if options.api_key is None else KeyGuard(app, options.api_key)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        o = self.options
        self.loop = asyncio.get_running_loop()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=o.connect_timeout),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=NOT_OURS_TO_ADD,
        )
        self._session = session
        self.workers = Workers(
            session,
            self.policy,
            health_interval=o.health_interval,
            health_timeout=o.health_timeout,
            headers={"Authorization": f"Bearer {o.api_key}"} if o.api_key else {},
            changed=self._changed,
        )
        upkeep = asyncio.create_task(self._upkeep())
        try:
            first = [self.workers.add(url) for url in o.workers]
            with contextlib.suppress(asyncio.TimeoutError):  # those that answer are there before the first request is
                await asyncio.wait_for(asyncio.gather(*(worker.probed.wait() for worker in first)), o.health_timeout)
            yield
        finally:
            upkeep.cancel()
            await asyncio.gather(upkeep, return_exceptions=True)
            await self.workers.close()
            await session.close()

    async def _upkeep(self) -> None:
        """The trees' evictions, in slices between which requests are served."""
        while True:
            await asyncio.sleep(0 if self.policy.trim(TRIM_NODES) else self.options.eviction_interval)

    def _changed(self, worker: Worker) -> None:
        if self.workers.get(worker.url) is worker:
            self.metrics.up.labels(worker.url).set(worker.healthy)
        else:
            self.metrics.forget(worker.url)

    # ---- requests to a worker --------------------------------------------------------------------------------------

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no web sockets here
            await send({"type": "websocket.close", "code": 1003})
            return
        limit = OPEN_BODY if scope["path"] in OPEN_PATHS else self.options.max_body
        try:
            body = await read_body(scope, receive, limit)
            message = Message(scope, body or b"")
        except ConnectionError:
            return
        except TimeoutError:
            await error_answer(408, "the request did not arrive in time")(scope, receive, send)
            return
        except ValueError as error:
            await error_answer(400, str(error))(scope, receive, send)
            return
        if body is None:
            await error_answer(413, f"the request is larger than {limit} bytes")(scope, receive, send)
            return
        if len(body) < SMALL_BODY:
            route = routing(scope["path"], body)
        else:
            route = await asyncio.to_thread(routing, scope["path"], body)
        answer = Answer(send)
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            refusal = await self._deliver(message, route, answer, gone)
            if refusal is not None and not gone.done():
                await refusal(scope, receive, send)
        finally:
            gone.cancel()

    async def _deliver(
        self, message: Message, route: Routing, answer: Answer, gone: asyncio.Future[None]
    ) -> Response | None:
        """Try workers until one has answered.  Returns what to tell the client if none has."""
        tried: set[str] = set()
        busy: set[str] = set()
        refusal: Response | None = None
        for attempt in range(1 + self.options.retries):
            worker = self._choose(route, tried, busy)
            if worker is None:
                break
            self.metrics.retries.inc(attempt > 0)
            tried.add(worker.url)
            error = await self._attempt(worker, message, route, answer, gone)
            if error is None or gone.done():
                return None
            if isinstance(error, Busy):
                refusal = error.answer
                busy.add(worker.url)
                continue
            if isinstance(error, OutOfSockets):
                return error_answer(503, "the router has no sockets left: try again later", {"Retry-After": "1"})
            self.metrics.failures.labels(worker.url).inc()
            if answer.begun:
                await answer.fail(f"the worker failed while it answered ({reason(error)})")
                return None
        if refusal is not None:
            return refusal
        why = "no worker is healthy" if not tried else f"{len(tried)} worker(s) failed to answer"
        return error_answer(503, f"{why}: try again later", {"Retry-After": "1"})

    def _choose(self, route: Routing, tried: set[str], busy: set[str]) -> Worker | None:
        """The policy's choice among healthy workers; those that failed already only if there are no others."""
        began = time.perf_counter()
        healthy = self.workers.healthy()
        loads = {url: worker.load for url, worker in healthy.items() if url not in tried}
        if not loads:
            loads = {url: worker.load for url, worker in healthy.items() if url not in busy}
        if not loads:
            return None
        choice = self.policy.choose(loads, route.key)
        self.metrics.seconds.observe(time.perf_counter() - began)
        self.metrics.requests.labels(choice.worker, choice.reason).inc()
        return healthy[choice.worker]

    async def _attempt(
        self, worker: Worker, message: Message, route: Routing, answer: Answer, gone: asyncio.Future[None]
    ) -> BaseException | None:
        """One exchange with one worker; what went wrong, or None.

        It runs as a task that others may cancel: the watcher of the client, and the worker that goes down.
        """
        task = asyncio.ensure_future(
            exchange(self._session, worker.url, message, answer, self.options.stream_timeout)
        )

        def on_gone(_: asyncio.Future[None]) -> None:
            task.cancel()

        gone.add_done_callback(on_gone)
        try:
            with worker.carrying(route.weight, len(route.key or ""), task):
                await task
        except asyncio.CancelledError:
            if gone.done() or answer.stuck:
                return None
            if task.cancelled() and not worker.healthy:
                return ConnectionError("it went down")
            raise  # the router itself is being stopped
        except Busy as busy:
            return busy
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            if our_own_lack(error) and not answer.begun:
                return OutOfSockets()
            self.workers.failed(worker, error)
            return error
        finally:
            gone.remove_done_callback(on_gone)
        return None

    # ---- what the router answers itself ----------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        healthy = len(self.workers.healthy())
        state = {"status": "ok" if healthy else "no healthy worker", "healthy": healthy, "workers": len(self.workers)}
        return JSONResponse(state, 200 if healthy else 503)

    async def _metrics(self, request: Request) -> Response:
        sizes = self.policy.sizes()
        for worker in self.workers:
            self.metrics.load.labels(worker.url).set(worker.load)
            self.metrics.tree.labels(worker.url).set(sizes.get(worker.url, 0))
        return Response(self.metrics.text(), media_type=self.metrics.media_type)

    async def _list(self, request: Request) -> Response:
        sizes = self.policy.sizes()
        return JSONResponse(
            {
                "workers": [
                    {"url": worker.url, "healthy": worker.healthy, "load": worker.load, "requests": worker.requests,
                     "tree_chars": sizes.get(worker.url, 0)}
                    for worker in self.workers
                ]
            }
        )  # fmt: skip

    async def _add(self, request: Request) -> Response:
        if (refused := self._closed(request)) is not None:
            return refused
        try:
            worker = self.workers.add(await _url_of(request))
        except ValueError as error:
            return error_answer(400, str(error))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(worker.probed.wait(), self.options.health_timeout)
        return JSONResponse({"url": worker.url, "healthy": worker.healthy})

    async def _remove(self, request: Request) -> Response:
        if (refused := self._closed(request)) is not None:
            return refused
        try:
            url = await _url_of(request)
            if not self.workers.remove(url):
                return error_answer(404, f"there is no worker {url!r}")
        except ValueError as error:
            return error_answer(400, str(error))
        return JSONResponse({"url": url, "removed": True})

    async def _to_all(self, request: Request) -> Response:
        """What concerns every worker goes to each; the worst answer is passed back."""
        try:
            body = await read_body(request.scope, request.receive, MAX_ORDER)
            message = Message(request.scope, body or b"")
        except ConnectionError:
            return Response(status_code=499)  # nobody reads it
        except TimeoutError:
            return error_answer(408, "the request did not arrive in time")
        except ValueError as error:
            return error_answer(400, str(error))
        if body is None:
            return error_answer(413, f"the request is larger than {MAX_ORDER} bytes")
        path = request.url.path
        healthy = self.workers.healthy()
        answers = await asyncio.gather(*(self._ask(worker, message) for worker in healthy.values()))
        if path == "/flush_cache":
            for (url, worker), (status, _, _) in zip(healthy.items(), answers):
                if status < 400:
                    self.policy.forget(url)
                    worker.suspect()  # hear its new epoch now, not as news of another flush
        if not answers:
            return error_answer(503, "no worker is healthy: try again later", {"Retry-After": "1"})
        status, head, payload = max(answers, key=lambda answer: answer[0])
        return raw_answer(payload, status, head)

    async def _ask(self, worker: Worker, message: Message) -> tuple[int, Head, bytes]:
        url = URL(worker.url + message.target, encoded=True)
        timeout = aiohttp.ClientTimeout(total=self.options.health_timeout)
        try:
            async with self._session.request(
                message.method, url, data=message.body or None, headers=message.headers, timeout=timeout,
                allow_redirects=False,
            ) as reply:  # fmt: skip
                return reply.status, end_to_end(reply.raw_headers), await reply.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            self.workers.failed(worker, error)
            refusal = error_answer(502, f"worker {worker.url} did not answer: {reason(error)}")
            return 502, [(b"content-type", b"application/json")], bytes(refusal.body)

    async def _server_info(self, request: Request) -> Response:
        """Every worker's own, and in `max_running_requests` what they run at once together."""
        healthy = self.workers.healthy()
        infos = await asyncio.gather(*(self._info(worker) for worker in healthy.values()))
        running = [info.get("max_running_requests") for info in infos]
        together = sum(n for n in running if isinstance(n, int))
        return JSONResponse(
            {
                "policy": type(self.policy).__name__,
                **({"max_running_requests": together} if together else {}),
                "workers": [{**info, "url": url} for url, info in zip(healthy, infos)],
            }
        )

    async def _info(self, worker: Worker) -> dict[str, Any]:
        try:
            return await self.workers.info(worker)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            self.workers.failed(worker, error)
            return {}

    def _closed(self, request: Request) -> Response | None:
        """Whoever may add a worker can read all prompts.  (With a key, KeyGuard has asked for it already.)

        A browser posts to loopback for any web page that asks it to, and says so with an Origin.
        """
        if self.options.api_key is None and (not self.options.open_admin or "origin" in request.headers):
            return error_answer(403, "workers can be added and removed here only with an --api-key")
        return None


class OutOfSockets(Exception):
    """The worker could not be asked, and the fault is ours."""


async def _url_of(request: Request) -> str:
    """?url=... or {"url": ...}"""
    if (url := request.query_params.get("url")) is not None:
        return url
    try:
        payload = json.loads(await read_body(request.scope, request.receive, MAX_ORDER) or b"{}")
    except (ValueError, RecursionError, ConnectionError, TimeoutError):
        payload = None
    url = payload.get("url") if isinstance(payload, dict) else None
    if not isinstance(url, str):
        raise ValueError('give the worker as ?url=http://host:port or {"url": "http://host:port"}')
    return url
