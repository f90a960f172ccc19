"""Under the applications: uvicorn with clients that are slow, that leave, and that send ahead.

uvicorn is made to run behind a proxy which keeps such clients away.  Server and router may be asked by anybody, so this
bounds what a connection costs before there is a request (what a request costs is the applications' business) and after
its answer, and sees to it that a client's leaving is noticed in every state of its connection.
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any

try:
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
except ImportError as error:
    raise ImportError('the server needs pydantic, starlette and uvicorn: pip install "minisgl[server]"') from error

from .server_http import Client, encode
from .server_jobs import ApiError

MAX_HEAD = 64 << 10  # bytes of a request's first line and headers
HEAD_TIMEOUT = 30.0  # seconds in which they must come
MAX_PIPELINE = 16  # requests that a connection may send before they are answered, each with a body of 64 KiB
STALL = 120.0  # seconds in which a client for which an answer waits must take some of it:
LEAST = 16 << 10  # so many bytes, or all that is left


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, which trusts its clients, with what it lacks:

    * A head has at most MAX_HEAD bytes and must be there HEAD_TIMEOUT seconds after the connection, or its first byte.
      The same bound holds for what comes between a body's pieces and after them; trailers are not headers.
    * A client that goes away ends all that it asked for, also where it sent further requests before the first was
      answered.  (uvicorn tells only the last one, and stops reading in the meantime, so that it does not even notice.)
    * A client that takes nothing of its answer loses its connection.  (A transport that is closed first sends what it
      has, however long that takes.)
    * A client that waits for "100 Continue" and gets an answer instead loses it, too: the body may follow or not, so
      that nobody knows where the next request begins.
    """

    _in_head = False
    _fruitless = 0  # bytes of the last reads that neither began a head, nor ended it, nor were part of a body
    _unsent: int | None = None  # bytes that the client had not taken when `stalled` was asked last
    _head_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # the request that is being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._peer = Client()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._peer.leave()

    def on_message_begin(self) -> None:
        self._in_head, self._fruitless = True, 0
        super().on_message_begin()
        self.scope[Client.KEY] = self._peer  # pyright: ignore[reportGeneralTypeIssues]

    def on_headers_complete(self) -> None:
        self._in_head, self._fruitless = False, 0
        self._stop_waiting()
        super().on_headers_complete()
        self.headers = []  # trailers end up here, and not in the head by which the request has been judged
        if self.pipeline:
            self.flow.resume_reading()  # to see it if the client leaves
            if len(self.pipeline) > MAX_PIPELINE:
                self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._fruitless = 0
        super().on_body(body)
        if self.pipeline and self.flow.read_paused:  # who does not read does not see the client leave
            self.transport.close()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.transport.is_closing():
            self.flow.resume_reading()  # which a large body has stopped: to see it if the client leaves

    def data_received(self, data: bytes) -> None:
        self._fruitless += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._fruitless > MAX_HEAD:
            self.send_400_response("The headers are too large.")
            return
        if self._head_timer is None and self._waits_for_head():
            self._expect_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_head and not self.transport.is_closing():
            self._expect_head()

    def resume_writing(self) -> None:
        self._unsent = None
        super().resume_writing()

    def stalled(self) -> bool:
        """Whether the client has taken less than LEAST since this was asked last, though there was something to take
        all the time."""
        waits = self.flow.write_paused or self.transport.is_closing()  # in both cases nothing is added
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size() if waits else None
        return before is not None and self._unsent is not None and self._unsent > before - LEAST

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.waiting_for_100_continue:
            app = _closes_if_refused(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _waits_for_head(self) -> bool:
        """Whether nothing is being answered, nor does uvicorn's own timer for idle connections run."""
        idle = self._running is None or self._running.response_complete
        return idle and (self._in_head or (self.cycle is self._running and self.timeout_keep_alive_task is None))

    def _expect_head(self) -> None:
        self._stop_waiting()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            if self._in_head:
                self._refuse(408, f"the request did not arrive within {HEAD_TIMEOUT:g} seconds")
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        running = self._running
        if running is None or not running.response_started or running.response_complete:
            self._refuse(400, msg)  # else it would stand inside another answer
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """An answer to what is no request yet, so that no application has seen it."""
        body = encode(ApiError(status, message).body())
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)


def _closes_if_refused(cycle: RequestResponseCycle, app: Any) -> Any:
    """`app`, for a client that waits to be told to send its body."""

    async def closing(scope: Any, receive: Any, send: Any) -> None:
        async def answer(message: Any) -> None:
            if cycle.waiting_for_100_continue:  # nobody has asked for the body, so this is the answer without it
                cycle.keep_alive = False
            await send(message)

        await app(scope, receive, answer)

    return closing


class HttpServer(uvicorn.Server):
    """uvicorn's server, which gives up clients that take nothing of their answers, and at its end closes idle
    connections also if they came while it began to end.

    (It closes them once.  What the kernel had accepted by then appears a moment later, and would be waited for.)"""

    async def main_loop(self) -> None:
        watch = asyncio.get_running_loop().create_task(self._watch())
        try:
            await super().main_loop()
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(STALL)
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection) and connection.stalled():
                    connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        sweep = asyncio.get_running_loop().create_task(self._sweep())
        try:
            await super().shutdown(sockets)
        finally:
            sweep.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            for connection in list(self.server_state.connections):
                connection.shutdown()
