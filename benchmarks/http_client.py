"""A load of HTTP requests that costs its own process little: `python benchmarks/http_client.py HOST PORT CLIENTS PATH`.

Reads request bodies from stdin (a JSON array), encodes all of them before its clock starts, sends them over CLIENTS
connections, each the next body as soon as its last answer is complete, and reads of an answer no more than where it
ends.  What the answers say is looked at when the clock has stopped.

Prints {"seconds", "tokens", "events"}: output tokens as the answers' `usage` says, and events of streams.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any


class Client(asyncio.Protocol):
    """One connection, which takes requests from `todo` until that is empty."""

    def __init__(self, todo: list[bytes], answers: list[bytes]):
        self._todo, self._answers = todo, answers
        self._pieces: list[bytes] = []
        self._missing: int | None = None  # bytes of the answer; None: its head is not complete, or it is a stream
        self._head = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        self._pieces, self._missing, self._head = [], None, b""
        if self._todo:
            self._transport.write(self._todo.pop())
        else:
            self._transport.close()
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        if not self._pieces:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            if b" 200 " not in head[:20]:
                self.done.set_exception(RuntimeError(self._head.decode(errors="replace")[:500]))
                return
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._missing = int(length) if length else None
        self._pieces.append(data)
        if self._missing is not None:
            self._missing -= len(data)
            over = self._missing == 0
        else:
            over = b"".join(self._pieces[-2:]).endswith(b"\r\n0\r\n\r\n")
        if over:
            self._answers.append(b"".join(self._pieces))
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or RuntimeError("the server closed a connection"))


def tokens(answer: bytes) -> int:
    """`completion_tokens` of the last usage."""
    return int(answer.rpartition(b'"completion_tokens":')[2].partition(b",")[0])


async def load(host: str, port: int, requests: list[bytes], clients: int) -> dict[str, Any]:
    loop, todo, answers = asyncio.get_running_loop(), requests[::-1], []
    begin = time.perf_counter()
    made = await asyncio.gather(
        *(loop.create_connection(lambda: Client(todo, answers), host, port) for _ in range(clients))
    )
    await asyncio.gather(*(client.done for _, client in made))
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": sum(map(tokens, answers)), "events": sum(a.count(b"data: ") for a in answers)}


def main() -> None:
    host, port, clients, path = sys.argv[1:]
    requests = []
    for body in json.load(sys.stdin):
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        requests.append(f"{head}\r\n\r\n".encode() + data)
    try:
        import uvloop
    except ImportError:
        new_loop = asyncio.new_event_loop
    else:
        new_loop = uvloop.new_event_loop
    loop = new_loop()
    print(json.dumps(loop.run_until_complete(load(host, int(port), requests, int(clients)))))
    loop.close()


if __name__ == "__main__":
    main()
