"""One request to one worker: the message that goes there and the answer that comes back, byte for byte.

Header lines about one connection stay on that connection; everything else passes.  How an answer passes depends on
its form:

    server-sent events     each event as soon as it is complete, so that what a client has is always well-formed
    of known length        when it is complete, so that until then another worker can be asked
    anything else          each piece as it comes

A worker whose engine hangs may go on saying that it is well.  Between the pieces of an answer that has begun there is
a limit for its silence; before, there is none, for a request may have to wait in its queue for long.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import aiohttp
from starlette.responses import JSONResponse, Response
from yarl import URL

from .server_http import Deadline
from .server_jobs import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Head = list[tuple[bytes, bytes]]

BUSY = (429, 503)  # a worker with a full queue, or one that is draining: others may take the request
MAX_HELD_EVENT = 1 << 20  # bytes of an event that is not complete; what is longer is passed on in pieces
NO_BODY = (204, 304)
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch  # a header's name, and
_TEXT = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*").fullmatch  # its value (RFC 9110, 5.6.2 and 5.5)
READ_TIMEOUT = 60.0  # seconds in which a request's body must arrive
WRITE_TIMEOUT = 120.0  # seconds in which a client takes nothing after which it is given up, as workers do

# About one connection, not about the message (RFC 9110, 7.6.1), or set anew by each side.
HOP = {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
       b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect"}  # fmt: skip
NOT_OURS_TO_ADD = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # what aiohttp would put in by itself


async def exchange(
    session: aiohttp.ClientSession, base_url: str, message: Message, answer: Answer, silence: float
) -> None:
    """Send `message` to the worker and its reply to the client.  silence: seconds between two pieces of the reply.

    Raises Busy, or what aiohttp raises when the worker fails; `answer.begun` tells whether the client saw anything.
    """
    url = URL(base_url + message.target, encoded=True)
    async with session.request(
        message.method, url, data=message.body or None, headers=message.headers, allow_redirects=False
    ) as reply:
        head = end_to_end(reply.raw_headers)
        if not 200 <= reply.status < 600 or not all(_TOKEN(name) and _TEXT(value) for name, value in head):
            raise aiohttp.ClientPayloadError(f"its answer is no HTTP: status {reply.status}")
        if reply.status in BUSY:
            raise Busy(await reply.read(), reply.status, head)
        if message.method == "HEAD" or reply.status in NO_BODY:
            await answer.whole(reply.status, head, b"", reply.headers.get("Content-Length"))
        elif reply.content_type == "text/event-stream":
            await answer.events(reply.status, head, arriving(reply.content, silence))
        elif reply.content_length is not None:
            body = await reply.read()
            await answer.whole(reply.status, head, body, str(len(body)))
        else:
            await answer.pieces(reply.status, head, arriving(reply.content, silence))


async def arriving(content: aiohttp.StreamReader, silence: float) -> AsyncIterator[bytes]:
    """The pieces as they come.  Raises TimeoutError if after one of them nothing comes for `silence` seconds."""
    piece = await content.readany()
    while piece:
        yield piece
        try:
            with Deadline(silence):
                piece = await content.readany()
        except TimeoutError:
            raise TimeoutError(f"nothing came for {silence:g} seconds") from None


class Message:
    """A request as it is sent on.  ValueError for a target that is no path: it would become a part of the host."""

    def __init__(self, scope: Scope, body: bytes):
        self.method: str = scope["method"]
        query = scope["query_string"]
        self.target = (scope["raw_path"].split(b"?")[0] + (b"?" + query if query else b"")).decode("latin-1")
        if not self.target.startswith("/"):
            raise ValueError("the request's target must be a path")
        lines = end_to_end(scope["headers"])
        self.headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in lines]
        self.body = body


class Busy(Exception):
    """The worker answered that it takes nothing now."""

    def __init__(self, body: bytes, status: int, head: Head):
        super().__init__(f"busy: {status}")
        self.answer = raw_answer(body, status, head)


class Answer:
    """What the client gets.  begun: it has seen some of it, so that no other worker may answer any more.  stuck: it has
    taken nothing for too long, and the task that wrote was cancelled."""

    def __init__(self, send: Send):
        self._write, self.begun, self.stuck, self._is_events = send, False, False, False

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        timer = asyncio.get_running_loop().call_later(WRITE_TIMEOUT, self._give_up, asyncio.current_task())
        try:
            await self._write(message)
        finally:
            timer.cancel()

    def _give_up(self, writer: asyncio.Task[Any] | None) -> None:
        if writer is not None:
            self.stuck = True
            writer.cancel()

    async def whole(self, status: int, head: Head, body: bytes, length: str | None) -> None:
        """length: what the head says of the body's length, if anything."""
        await self._start(status, [*head, *([] if length is None else [(b"content-length", length.encode())])])
        await self._send({"type": "http.response.body", "body": body})

    async def pieces(self, status: int, head: Head, arriving: AsyncIterator[bytes]) -> None:
        self._is_events = False
        async for piece in arriving:
            await self._piece(status, head, piece)
        await self._end(status, head)

    async def events(self, status: int, head: Head, arriving: AsyncIterator[bytes]) -> None:
        self._is_events = True
        held = b""
        async for piece in arriving:
            held += piece
            end = len(held) if len(held) > MAX_HELD_EVENT else complete_events(held)
            if end:
                await self._piece(status, head, held[:end])
                held = held[end:]
        if held:
            await self._piece(status, head, held)
        await self._end(status, head)

    async def fail(self, message: str) -> None:
        """After `begun`: say so if the form has words for it; else the connection is cut, which says it too."""
        if self._is_events:
            event = json.dumps(ApiError(502, message, code="worker_failed").body())
            body = f"data: {event}\n\ndata: [DONE]\n\n".encode()
            await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, head: Head) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    async def _piece(self, status: int, head: Head, piece: bytes) -> None:
        if not self.begun:
            await self._start(status, head)
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _end(self, status: int, head: Head) -> None:
        if not self.begun:
            await self._start(status, head)
        await self._send({"type": "http.response.body", "body": b""})


def complete_events(data: bytes) -> int:
    """How many leading bytes of `data` are complete events: up to the last empty line."""
    return max((data.rfind(end) + len(end) for end in (b"\n\n", b"\r\n\r\n") if end in data), default=0)


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Head:
    """Without those of one connection: HOP, and what the Connection header names."""
    headers = list(headers)
    named = [value.lower().split(b",") for name, value in headers if name.lower() == b"connection"]
    drop = HOP.union(token.strip() for tokens in named for token in tokens)
    return [(name, value) for name, value in headers if name.lower() not in drop]


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """The request's body; None if it is longer than `limit` bytes, or says so.  Raises ConnectionError if the client
    goes away, and TimeoutError if it takes longer than READ_TIMEOUT."""
    said = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if said.isdigit() and int(said) > limit:
        return None
    with Deadline(READ_TIMEOUT):
        return await _read(receive, limit)


async def _read(receive: Receive, limit: int) -> bytes | None:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit:
            return None
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def raw_answer(body: bytes, status: int, head: Head) -> Response:
    response = Response(body, status)
    response.raw_headers = [*head, (b"content-length", str(len(body)).encode())]
    return response


def error_answer(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error in OpenAI's envelope."""
    return JSONResponse(ApiError(status, message).body(), status, headers)
