"""A worker for tests of the router: SGLang's wire, no model, and every way to fail.

    with FakeWorker() as worker:
        worker.kill()      # as kill -9 does: connections break, the port refuses
        worker.start()     # again, at the same address

delay     seconds before the first byte of an answer
pieces    texts of an answer; a stream sends an event for each, `gap` seconds apart
status    another than 200 is answered at once with an error envelope
health    status of /health; None: never answers
stall     nothing but /health and /get_server_info is ever answered
info      what /get_server_info says
hold      an Event: answers (after their first piece, if `hold_after_first`) wait for it
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from aiohttp import web


class FakeWorker:
    def __init__(self, pieces: tuple[str, ...] = ("one ", "two ", "three"), delay: float = 0.0, gap: float = 0.0):
        self.pieces, self.delay, self.gap = pieces, delay, gap
        self.status = 200
        self.health: int | None = 200
        self.info: dict[str, Any] | None = None
        self.hold: asyncio.Event | None = None
        self.hold_after_first = False
        self.stall = False
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.gone = 0  # clients that went away before their answer was complete
        self.running = 0
        self.most_running = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def asked(self) -> list[Any]:
        """Bodies of the requests for text."""
        return [body for path, body in self.requests if path in ("/generate", "/v1/chat/completions")]

    def __enter__(self) -> FakeWorker:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def kill(self) -> None:
        asyncio.run_coroutine_threadsafe(self._kill(), self._loop).result(10)

    def close(self) -> None:
        """Take no new connections; those that are open stay."""
        self._loop.call_soon_threadsafe(self._listener.close)

    def release(self) -> None:
        """Let held answers go on."""
        hold, self.hold = self.hold, None
        if hold is not None:
            self._loop.call_soon_threadsafe(hold.set)

    async def _start(self) -> None:
        self._server = web.Server(self._handle, handler_cancellation=True)
        self._listener = await self._loop.create_server(self._server, "127.0.0.1", self.port, reuse_address=True)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _kill(self) -> None:
        self._listener.close()
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._server.shutdown(0)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            body = raw
        if request.path == "/health":
            if self.health is None:
                await asyncio.sleep(60)
            return web.Response(status=self.health or 500)
        if request.path == "/get_server_info":
            return web.json_response(self.info) if self.info is not None else web.Response(status=404)
        self.requests.append((request.path, body))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.stall:
            await asyncio.sleep(60)
        if self.status != 200:
            envelope = {"error": {"message": "not now", "type": "e", "param": None, "code": self.status}}
            return web.json_response(envelope, status=self.status)
        if request.path not in ("/generate", "/v1/chat/completions"):
            return web.json_response(
                {"method": request.method, "target": request.raw_path, "body": raw.decode("utf-8", "replace")},
                headers={"X-Worker": str(self.port)},
            )
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(self.delay)
        if self.hold is not None and not self.hold_after_first:
            await self.hold.wait()
        if not body.get("stream"):
            return web.json_response({"text": "".join(self.pieces), "worker": self.port})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i, piece in enumerate(self.pieces):
            if i and self.hold is not None:
                await self.hold.wait()
            event = f"data: {json.dumps({'text': piece, 'worker': self.port})}\n\n".encode()
            await response.write(event[:9])  # an event may come in two packets
            await response.write(event[9:])
            await asyncio.sleep(self.gap)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
