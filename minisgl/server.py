"""The HTTP server: OpenAI's API and SGLang's over a Runtime, from the shell or inside a program.

    python -m minisgl serve --port 30000       from minisgl import Runtime, Server

                                               with Runtime() as runtime, Server(runtime, port=0) as server:
                                                   client = openai.OpenAI(base_url=server.url + "/v1", api_key="-")

    HTTP        uvicorn, one event loop on one thread             server_connection: what a client may do to it
      |                                                           server_http: bodies, answers, event streams, the key
      |
    routes      OpenAI's (server_openai, server_tools)  and SGLang's (server_native), their schemas (server_schemas)
      |
    jobs        the loop's side of the engine (server_jobs): worker threads prepare what takes long, who goes away is
      |         aborted; a bell rings for tokens (server_bell)
    Runtime     the engine, on its own thread

A `Server` has a thread and an event loop of its own, so that it runs beside anything (a notebook's loop, another
server), and changes nothing global: no signal handlers, no logging configuration, no loop policy.  `serve` in
`server_cli` is the same with signals: SIGTERM lets what runs end, then ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

try:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
except ImportError as error:
    raise ImportError('the server needs pydantic, starlette and uvicorn: pip install "minisgl[server]"') from error

from . import __version__, server_native, server_openai
from .metrics import Metrics
from .server_connection import Connection, HttpServer
from .server_http import KeyGuard, Reply, Routes
from .server_jobs import Limits, Service
from .server_schemas import openapi

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from .runtime import Runtime

KEEP_ALIVE = 75  # seconds that an idle connection stays open: longer than proxies keep theirs

_ROUTES: dict[str, tuple[str, Callable[[Service, Request], Awaitable[Response]]]] = {
    "/v1/chat/completions": ("POST", server_openai.chat),
    "/v1/completions": ("POST", server_openai.completions),
    "/v1/models": ("GET", server_native.models),
    "/v1/models/*": ("GET", server_native.models),
    "/v1/embeddings": ("POST", server_native.embeddings),
    "/generate": ("POST", server_native.generate),
    "/health": ("GET", server_native.health),
    "/health_generate": ("GET", server_native.health_generate),
    "/get_model_info": ("GET", server_native.model_info),
    "/get_server_info": ("GET", server_native.server_info),
    "/flush_cache": ("GET POST", server_native.flush_cache),
    "/abort_request": ("POST", server_native.abort_request),
    "/metrics": ("GET", server_native.metrics),
}


def make_app(service: Service, api_key: str | None = None) -> ASGIApp:
    """The ASGI application over a service."""
    document = openapi(__version__)

    async def show_openapi(request: Request) -> Response:
        return Reply(document)

    handlers = {path: (methods, partial(handler, service)) for path, (methods, handler) in _ROUTES.items()}
    app = Routes({**handlers, "/openapi.json": ("GET", show_openapi)})
    return app if api_key is None else KeyGuard(app, api_key)


class Server:
    """Serves `runtime` from a thread of its own, from construction until `close`.

    host           address to bind; one that other machines reach, without an api_key, is a warning
    port           0: any free one (see `url`)
    api_key        what clients must send as bearer token; None: anybody may ask
    model_names    what requests may call the model; the first is shown.  Default: the model's own name
    limits         see `server_jobs.Limits`

    The runtime stays its owner's: `close` does not shut it down, and it may be used directly at the same time.
    Raises ValueError for a wrong argument and OSError if the address cannot be bound.
    """

    def __init__(
        self,
        runtime: Runtime,
        host: str = "127.0.0.1",
        port: int = 30000,
        *,
        api_key: str | None = None,
        model_names: Sequence[str] = (),
        limits: Limits | None = None,
    ):
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 1 << 16:
            raise ValueError(f"port must be an integer in [0, 65535], got {port!r}")
        if api_key is not None and (not isinstance(api_key, str) or not api_key):
            raise ValueError("api_key must be a non-empty string or None")
        self.runtime, self.limits = runtime, limits or Limits()
        self.model_names = tuple(model_names) or (runtime.name, "default")
        self.host, self._api_key = host, api_key
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        if api_key is None and not _is_loopback(self._socket.getsockname()[0]):
            warnings.warn(f"serving on {host} without an API key: anybody who can reach it may use it", stacklevel=2)
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._service: Service | None = None
        self._uvicorn: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="minisgl-server", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            raise self._failed

    @property
    def url(self) -> str:
        """http://host:port, as a client on this machine reaches it."""
        host = self._host_for_clients()
        return f"http://{host}:{self.port}"

    def _host_for_clients(self) -> str:
        if self.host in ("", "0.0.0.0"):
            return "127.0.0.1"
        if self.host == "::":
            return "[::1]"
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def serving(self) -> bool:
        return self._thread.is_alive()

    def close(self, drain_timeout: float | None = None) -> None:
        """Refuse what is new, let what runs end for up to `drain_timeout` seconds (default: limits'), abort the rest,
        and return when the thread has ended.  May be called again, from any thread; 0 aborts at once."""
        if drain_timeout is None:
            drain_timeout = self.limits.drain_timeout
        loop = self._loop
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if loop is not None:
                loop.call_soon_threadsafe(self._drain, drain_timeout)
        if threading.current_thread() is not self._thread:
            with self._closing:
                self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(0.0)

    def __repr__(self) -> str:
        return f"Server({self.url}, {self.model_names[0]}{'' if self.serving else ', closed'})"

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _drain(self, seconds: float) -> None:
        """On the loop: uvicorn closes its socket and waits for the responses that are under way."""
        assert self._service is not None and self._loop is not None
        self._service.draining = True
        self._uvicorn.should_exit = True
        self._loop.call_later(seconds, self._service.abort_all)
        self._loop.call_later(seconds + 2.0, self._force)  # clients that do not read their answers

    def _force(self) -> None:
        self._uvicorn.force_exit = True

    def _main(self) -> None:
        loop = _new_loop()
        try:
            loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failed = error
        finally:
            self._socket.close()
            with contextlib.suppress(Exception):
                _cancel_all(loop)
                loop.run_until_complete(loop.shutdown_asyncgens())
            self._loop = None
            loop.close()
            self._ready.set()

    async def _serve(self) -> None:
        metrics = Metrics(self.runtime, self.model_names[0])
        service = Service(self.runtime, self.model_names, replace(self.limits), metrics)
        config = uvicorn.Config(
            make_app(service, self._api_key), http=Connection, log_config=None, access_log=False, lifespan="off",
            ws="none", server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE, backlog=2048,
        )  # fmt: skip
        server = _Uvicorn(config, self._ready)
        self._service, self._uvicorn, self._loop = service, server, asyncio.get_running_loop()
        try:
            await server.serve([self._socket])
        finally:
            service.abort_all()
            service.close()


class _Uvicorn(HttpServer):
    """Tells when it accepts connections.  (Signal handlers it installs on the main thread only, where we never are.)"""

    def __init__(self, config: uvicorn.Config, ready: threading.Event):
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(f"host: {host!r} is no address of this machine: {error}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise type(error)(error.errno, f"cannot serve on {host}:{port}: {error.strerror}") from None
    bound.setblocking(False)
    return bound


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's if it is installed, without making it the policy."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
