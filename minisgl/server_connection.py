"""Under the applications: uvicorn with clients that are slow, that leave, and that send ahead.

uvicorn is made to run behind a proxy which keeps such clients away.  Server and router may be asked by anybody, so this
bounds what a connection costs before there is a request (what a request costs is the applications' business), and sees
to it that a client's leaving is noticed in every state of its connection.
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

from .server_http import encode
from .server_jobs import ApiError

MAX_HEAD = 64 << 10  # bytes of a request's first line and headers
HEAD_TIMEOUT = 30.0  # seconds in which they must come
MAX_PIPELINE = 16  # requests that a connection may send before they are answered


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, which trusts its clients, with what it lacks:

    * A head has at most MAX_HEAD bytes and must be there HEAD_TIMEOUT seconds after the connection, or its first byte.
    * A client that goes away ends all that it asked for, also where it sent further requests before the first was
      answered.  (uvicorn tells only the last one, and stops reading in the meantime, so that it does not even notice.)
    """

    _in_head = False
    _head = 0  # bytes that came since the head began, but for those that came with its first
    _head_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # the request that is being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def on_message_begin(self) -> None:
        self._in_head, self._head = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # to see it if the client leaves
            if len(self.pipeline) > MAX_PIPELINE:
                self.transport.close()

    def data_received(self, data: bytes) -> None:
        began = self._in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        if began and self._in_head:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.send_400_response("The headers are too large.")
                return
        if self._head_timer is None and self._waits_for_head():
            self._expect_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_head and not self.transport.is_closing():
            self._expect_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
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


class HttpServer(uvicorn.Server):
    """uvicorn's server, which at its end closes idle connections also if they came while it began to end.

    (It closes them once.  What the kernel had accepted by then appears a moment later, and would be waited for.)"""

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
