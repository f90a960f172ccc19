"""The HTTP side of the server, with nothing in it about models: bodies in, JSON and event streams out, errors, the key.

A handler is `async def handler(request) -> Response`; `endpoint(handler)` makes every exception in it an answer in
OpenAI's envelope.  A handler that waits for the engine does so in `unless_gone`, since Starlette lets a plain handler
run to its end after its client has left; `EventStream` watches the connection itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from .server_jobs import ApiError, ClientGone, as_api_error

try:
    from pydantic import BaseModel, ValidationError
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError as error:
    raise ImportError('the server needs pydantic, starlette and uvicorn: pip install "minisgl[server]"') from error

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]
log = logging.getLogger(__name__)
MAX_HEAD = 64 << 10  # bytes of a request's first line and headers
OPEN_PATHS = frozenset(("/health", "/health_generate"))  # what load balancers ask, without a key


# ---- out -----------------------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """JSON as ASCII, so that half a surrogate pair in a text can be sent as well; NaN and infinity are defects here."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class Reply(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def refusal(error: BaseException) -> Reply:
    told = as_api_error(error)
    if told.status == 500 and not isinstance(error, ApiError):
        log.error("a request failed", exc_info=error)
    headers = {"Retry-After": str(told.retry_after)} if told.retry_after else None
    return Reply(told.body(), told.status, headers)


def endpoint(handler: Handler) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return refusal(error)

    return answer


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        writer = loop.create_task(self._write(send, loop))
        gone = loop.create_task(_disconnected(receive))
        try:
            while True:
                wait = asyncio.wait((writer, gone), timeout=self._check_every, return_when=asyncio.FIRST_COMPLETED)
                if (await wait)[0]:
                    break
                if self._sending is not None and loop.time() - self._sending > self._write_timeout:
                    break
        finally:
            gone.cancel()
            await cancel(writer)
            await self._held.aclose()

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


async def parse(request: Request, model: type[Model], max_body: int, timeout: float) -> Model:
    """The body as a model.  Raises ApiError: 400, 408 or 413."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":  # a web page can post other types to a server on loopback without asking
        raise ApiError(400, f"Content-Type must be application/json, got {kind or 'none'!r}")
    try:
        body = await asyncio.wait_for(_read(request, max_body), timeout)
    except (TimeoutError, asyncio.TimeoutError):
        raise ApiError(408, f"the body did not arrive within {timeout:g} seconds") from None
    try:
        return model.model_validate_json(body)
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; then raises ClientGone."""
    loop = asyncio.get_running_loop()
    task, gone = loop.create_task(work), loop.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        await cancel(task)


async def cancel(task: asyncio.Task[Any]) -> None:
    """End a task and wait until it has ended; its own error was seen, or does not matter."""
    if not task.done():
        task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol, which would collect headers as long as they come, with an end to that."""

    _in_head = False
    _head = 0  # bytes that came since the head began, but for those that came with its first

    def on_message_begin(self) -> None:
        self._in_head, self._head = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        began = self._in_head
        super().data_received(data)
        if began and self._in_head and not self.transport.is_closing():
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.send_400_response("The headers are too large.")


# ---- the key -------------------------------------------------------------------------------------------------------


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
