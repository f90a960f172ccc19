"""A small HTTP client for the tests of the server: standard library only, one connection per call."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit


class Answer:
    def __init__(self, response: http.client.HTTPResponse):
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer that must be one, in OpenAI's envelope and without a traceback."""
        assert set(self.json) == {"error"}, self.body
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)
        assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"], error
        return error


def call(url: str, method: str, path: str, body: Any = None, timeout: float = 60.0, **headers: str) -> Answer:
    """`body`: data to send as JSON, or bytes as they are."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, sent)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def post(url: str, path: str, body: Any, timeout: float = 60.0, **headers: str) -> Answer:
    return call(url, "POST", path, body, timeout, **headers)


def get(url: str, path: str, **headers: str) -> Answer:
    return call(url, "GET", path, **headers)


def open_socket(url: str, path: str, body: Any, receive_buffer: int | None = None) -> socket.socket:
    """A connection on which the request has been sent and nothing was read yet."""
    parts = urlsplit(url)
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect((parts.hostname, parts.port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def events(url: str, path: str, body: Any, **headers: str) -> Iterator[Any]:
    """The data of a stream's events, up to [DONE], which must come and be the last."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        data = json.dumps({**body, "stream": True})
        connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.rstrip(b"\n") for line in response]
    finally:
        connection.close()
    assert lines[-2:] == [b"data: [DONE]", b""]
    assert lines[1::2] == [b""] * (len(lines) // 2)
    for line in lines[:-2:2]:
        assert line.startswith(b"data: ")
        yield json.loads(line[6:])


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
