"""The HTTP side of the server, with nothing in it about models: bodies in, JSON and event streams out, errors, the key.

A handler is `async def handler(request) -> Response`; `Routes` finds it by its path and makes every exception in it an
answer in OpenAI's envelope.  A handler that waits for the engine does so in `Connected`, since nobody else ends it when
its client leaves; `EventStream` watches the connection itself.

The loop shares the interpreter with the engine's thread, so what happens here once per request is kept short: no
middleware, a callback where a task is not needed, one JSON encoder.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from .json_cost import MAX_NESTED, MAX_VALUES, too_many_values
from .server_jobs import ApiError, ClientGone, as_api_error

try:
    from pydantic import BaseModel, ValidationError
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise ImportError('the server needs pydantic, starlette and uvicorn: pip install "minisgl[server]"') from error

Model = TypeVar("Model", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]
log = logging.getLogger(__name__)
OPEN_PATHS = frozenset(("/health", "/health_generate"))  # what load balancers ask, without a key


# ---- out -----------------------------------------------------------------------------------------------------------


_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode(value: Any) -> bytes:
    """JSON as ASCII, so that half a surrogate pair in a text can be sent as well; NaN and infinity are defects here."""
    return _to_json(value).encode()


class Reply(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def refusal(error: BaseException) -> Reply:
    told = as_api_error(error)
    if told.status == 500 and not isinstance(error, ApiError):
        log.error("a request failed", exc_info=error)
    headers = {"Retry-After": str(told.retry_after)} if told.retry_after else {}
    return Reply(told.body(), told.status, {**headers, **told.headers})


class Routes:
    """The ASGI application: exact paths, and those that end in "/*", whose rest is `request.path_params["rest"]`.

    handlers   path -> (methods, handler); GET is HEAD as well
    """

    def __init__(self, handlers: Mapping[str, tuple[str, Handler]]):
        split = {path: (_methods(names), handler) for path, (names, handler) in handlers.items()}
        self._exact = {path: found for path, found in split.items() if not path.endswith("/*")}
        self._below = {path[:-1]: found for path, found in split.items() if path.endswith("/*")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._find(scope)(request)
        except (ClientGone, ClientDisconnect):
            response = Response(status_code=499)  # nobody reads it
        except Exception as error:
            response = refusal(error)
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> Handler:
        path, method = scope["path"], scope["method"]
        found = self._exact.get(path)
        if found is None:
            for start, below in self._below.items():
                if path.startswith(start):
                    found = below
                    scope["path_params"] = {"rest": path[len(start) :]}
        if found is None:
            raise ApiError(404, f"there is no {path}")
        methods, handler = found
        if method not in methods:
            raise ApiError(405, f"{method} is not for {path}", headers={"Allow": ", ".join(sorted(methods))})
        return handler


def _methods(names: str) -> frozenset[str]:
    methods = frozenset(names.split())
    return methods | {"HEAD"} if "GET" in methods else methods


class Interruptible:
    """`with`: the task that runs in it is cancelled by `interrupt`, and leaving it then raises `error`."""

    error: type[Exception]

    def __enter__(self) -> Interruptible:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] | None = task
        self._interrupted = False
        self._before = task.cancelling() if sys.version_info >= (3, 11) else 0
        return self

    def interrupt(self) -> None:
        if self._task is not None and not self._interrupted:
            self._interrupted = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        task, self._task = self._task, None
        if self._interrupted:
            left = 0
            if sys.version_info >= (3, 11):
                assert task is not None
                left = task.uncancel() - self._before
            if kind is asyncio.CancelledError and left <= 0:  # else somebody else has cancelled the task as well
                raise self.error from None


class Client:
    """Whether the client of a connection is still there.  The connection puts it into each request's scope: to wait for
    ASGI's `http.disconnect` takes a task for each request."""

    KEY = "minisgl.client"

    def __init__(self) -> None:
        self.gone = False
        self.told: set[Callable[[], None]] = set()  # called when it goes away

    def leave(self) -> None:
        self.gone = True
        for call in tuple(self.told):
            call()


class Connected(Interruptible):
    """Work for a request's client, which ends with ClientGone when the client goes away."""

    error = ClientGone

    def __init__(self, scope: Scope):
        self._client: Client = scope[Client.KEY]

    def __enter__(self) -> Interruptible:
        if self._client.gone:
            raise ClientGone
        self._client.told.add(self.interrupt)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._client.told.discard(self.interrupt)
        super().__exit__(kind, error, trace)


class Deadline(Interruptible):
    """Work that ends with TimeoutError after `seconds`.  (asyncio.timeout is Python 3.11's; wait_for makes a task.)"""

    error = TimeoutError

    def __init__(self, seconds: float):
        self._seconds = seconds

    def __enter__(self) -> Interruptible:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.interrupt)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._timer.cancel()
        super().__exit__(kind, error, trace)


class EventStream(Response):
    """Server-sent events: `pieces` yields bytes, each a whole number of events.

    Ends at once when the client goes away, or takes nothing for `write_timeout` seconds; at any end `held` is closed,
    which ends the sequences that still run.  An error after the first byte can only be told as an event.
    """

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], held: AsyncExitStack, write_timeout: float, check_every: float = 5.0
    ):
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._pieces, self._held, self._write_timeout = pieces, held, write_timeout
        self._check_every = check_every
        self._sending: float | None = None  # since when a write has been waiting for the client
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(ClientGone), Connected(scope) as connected:
                self._check(loop, connected)
                await self._write(send, loop)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await self._held.aclose()

    def _check(self, loop: asyncio.AbstractEventLoop, connected: Interruptible) -> None:
        if self._sending is not None and loop.time() - self._sending > self._write_timeout:
            connected.interrupt()
        else:
            self._timer = loop.call_later(self._check_every, self._check, loop, connected)

    async def _write(self, send: Send, loop: asyncio.AbstractEventLoop) -> None:
        async def body(piece: bytes, more: bool) -> None:
            self._sending = loop.time()
            await send({"type": "http.response.body", "body": piece, "more_body": more})
            self._sending = None

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for piece in self._pieces:
                await body(piece, True)
        except Exception as error:
            told = as_api_error(error)
            if told.status == 500:
                log.error("a stream failed", exc_info=error)
            await body(event(told.body()), True)
        finally:
            await self._pieces.aclose()
        await body(b"data: [DONE]\n\n", False)


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


# ---- in ------------------------------------------------------------------------------------------------------------


async def parse(request: Request, model: type[Model], max_body: int, timeout: float) -> tuple[Model, int]:
    """The body as a model, and its size in bytes.  Raises ApiError: 400, 408 or 413."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":  # a web page can post other types to a server on loopback without asking
        raise ApiError(400, f"Content-Type must be application/json, got {kind or 'none'!r}")
    try:
        with Deadline(timeout):
            body = await _read(request, max_body)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout:g} seconds") from None
    if too_many_values(body):
        raise ApiError(413, f"the body has more than {MAX_VALUES} values, or {MAX_NESTED} lists, objects and names",
                       code="body_too_large")  # fmt: skip
    try:
        return model.model_validate_json(body), len(body)
    except ValidationError as error:
        raise _invalid(error) from None


async def _read(request: Request, max_body: int) -> bytes:
    said = request.headers.get("content-length", "0")
    body = bytearray()
    if not (said.isdecimal() and int(said) > max_body):
        async for piece in request.stream():
            body += piece
            if len(body) > max_body:
                break
        else:
            return bytes(body)
    raise ApiError(413, f"the body is larger than {max_body} bytes", code="body_too_large")


def _invalid(error: ValidationError) -> ApiError:
    """The first problem that pydantic found, as one line that names the parameter."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # of a union's branches, the one that went deepest is the one that was meant
    problem = max(problems, key=lambda p: (p["loc"][:1] == problems[0]["loc"][:1], len(p["loc"])))
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {problem['msg'].removeprefix('Invalid JSON: ')}")
    path = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {path!r}", param=path, code="unknown_parameter")
    if problem["type"] == "missing":
        return ApiError(400, f"{path} is missing", param=path, code="missing_required_parameter")
    if problem["type"] == "none_required":
        return ApiError(400, f"{path} is not supported", param=path, code="unsupported_parameter")
    return ApiError(400, f"{path or 'the body'}: {problem['msg']}", param=path or None)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(task: asyncio.Task[Any]) -> None:
    """End a task and wait until it has ended; its own error was seen, or does not matter."""
    if not task.done():
        task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


# ---- the key -------------------------------------------------------------------------------------------------------


async def _take_small(receive: Receive, most: int = 64 << 10, seconds: float = 1.0) -> None:
    """Read a small body that nobody wants: who is answered while sending may see a reset instead of the answer."""
    with contextlib.suppress(TimeoutError), Deadline(seconds):
        more = True
        while more and most > 0:
            message = await receive()
            more = message.get("more_body", False)
            most -= len(message.get("body", b""))


class KeyGuard:
    """Asks for `Authorization: Bearer <key>` on every path but the health checks.

    The comparison takes the same time wherever the first difference is; hashing hides the key's length as well.
    """

    def __init__(self, app: ASGIApp, key: str):
        self.app, self._digest = app, hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            error = ApiError(401, "no or an incorrect API key: send it as 'Authorization: Bearer <key>'",
                             code="invalid_api_key")  # fmt: skip
            await _take_small(receive)
            answer = refusal(error)
            answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        same = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        return same and kind.lower() == b"bearer"
