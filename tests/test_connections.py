"""Connections that misbehave, at the server and at the router: slow, half, lying, many at once, gone in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs pip install "minisgl[server]"')
pytest.importorskip("aiohttp", reason="the router needs minisgl[server]")

import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from minisgl import Server, router_exchange, server_connection
from minisgl.router import RouterOptions
from minisgl.router_policy import RoundRobin
from minisgl.router_run import RouterThread, make_server
from minisgl.server_jobs import Limits

from . import engines
from .http_client import call, get, post, wait_until

GREEDY = {"temperature": 0, "ignore_eos": True}
SMALL = json.dumps({"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 2}}).encode()


@pytest.fixture(scope="module")
def runtime():
    with engines.make(kv_capacity=3000, max_running_requests=8, overlap=True) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def urls(runtime):
    """The server's and, in front of it, the router's."""
    with ExitStack() as stack:
        server = stack.enter_context(Server(runtime, port=0, limits=Limits(body_timeout=1.5, max_body=100_000)))
        options = RouterOptions(RoundRobin(), [server.url], max_body=100_000, health_interval=0.5)
        yield {"server": server.url, "router": stack.enter_context(RouterThread(options)).url}


@pytest.fixture(params=["server", "router"])
def url(request, urls, runtime):
    yield urls[request.param]
    wait_until(lambda: engines.settled(runtime))  # what was sent ahead may begin, and be cancelled, one by one
    assert post(urls[request.param], "/generate", SMALL).status == 200


@pytest.fixture
def slow_engine(runtime, monkeypatch):
    """A step takes at least 10 ms, so that a long answer takes seconds on any machine."""
    real = runtime._engine.runner.launch
    monkeypatch.setattr(runtime._engine.runner, "launch", lambda batch: (time.sleep(0.01), real(batch))[1])


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 20)


def said(url: str, *pieces: bytes) -> bytes:
    """What comes back, until the other side closes."""
    with connect(url) as sock:
        for piece in pieces:
            sock.sendall(piece)
        return rest(sock)


def rest(sock: socket.socket) -> bytes:
    answer = b""
    while data := sock.recv(65536):
        answer += data
    return answer


def request(body: bytes, *headers: str, close: bool = True, path: str = "/generate") -> bytes:
    """A POST; without a header that says its length, the right one is added."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if not any(header.startswith(("Content-Length", "Transfer-Encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, *(["Connection: close"] if close else []), "\r\n"]).encode() + body


def status_of(answer: bytes) -> int:
    """Its status; an error must have OpenAI's envelope."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status < 400 or set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    return status


# ---- slow ----


def test_a_head_must_come_in_time(url, monkeypatch):
    """Slowloris: many connections with half a head each would take every socket."""
    monkeypatch.setattr(server_connection, "HEAD_TIMEOUT", 0.3)
    assert said(url) == said(url, b"\r\n") == b""
    assert status_of(said(url, b"GET /health HTTP/1.1\r\nHos")) == 408
    with connect(url) as sock:  # the same for the second request of a connection, and one byte at a time does not help
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        begin, answer = time.monotonic(), b""
        sock.settimeout(0.02)
        sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
        while b" 408 " not in answer:
            assert time.monotonic() - begin < 10
            try:
                sock.sendall(b"x")
                answer += sock.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break


def test_a_body_must_come_in_time(url, monkeypatch):
    monkeypatch.setattr(router_exchange, "READ_TIMEOUT", 0.3)
    assert status_of(said(url, request(SMALL[:5], f"Content-Length: {len(SMALL)}"))) == 408


def test_the_time_limits_do_not_touch_an_answer(url, monkeypatch, slow_engine):
    monkeypatch.setattr(server_connection, "HEAD_TIMEOUT", 0.2)
    monkeypatch.setattr(router_exchange, "READ_TIMEOUT", 0.2)
    body = json.dumps({"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 60}, "stream": True}).encode()
    with connect(url) as sock:
        sock.sendall(request(body, close=False) + b"GET /heal")  # with the beginning of the next one
        answer = b""
        while b"[DONE]" not in answer:
            answer += sock.recv(65536)
    assert b'"completion_tokens":60' in answer


class Talker:
    """An application that answers with `count` bytes in one piece, as `uvicorn` and `server_connection` serve it."""

    def __init__(self, count: int):
        async def answer(request: Any) -> Response:
            return Response(b"x" * count)

        self.url = ""
        self.server = make_server(Starlette(routes=[Route("/", answer)]), "127.0.0.1", 0, self._ready)
        self._thread = threading.Thread(target=self.server.run, daemon=True)

    def _ready(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> Talker:
        self._thread.start()
        wait_until(lambda: self.url)
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.should_exit = self.server.force_exit = True
        self._thread.join()


def unread(url: str, sent: bytes) -> socket.socket:
    """A connection whose answer nobody reads, and for which there is little room on the way."""
    host, port = url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect((host, int(port)))
    sock.sendall(sent)
    return sock


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n\r\n"


@pytest.mark.parametrize("sent", [GET + CLOSE, GET + b"\r\n", (GET + b"\r\n") * 3, b"half"])
def test_who_never_reads_does_not_keep_its_socket(monkeypatch, sent):
    """Its answer is complete and the connection is closed, or would be: with all that waits to be taken."""
    monkeypatch.setattr(server_connection, "STALL", 0.2)
    with Talker(16 << 20) as talker:
        sock = unread(talker.url, GET + CLOSE if sent == b"half" else sent)
        if sent == b"half":
            sock.shutdown(socket.SHUT_WR)  # it sends no more, either
        wait_until(lambda: talker.server.server_state.total_requests)
        wait_until(lambda: not talker.server.server_state.connections)
        wait_until(lambda: not talker.server.server_state.tasks)
        sock.close()


def test_who_takes_some_is_left_alone():
    """Twice in a row there was something to take, and in between less than LEAST was taken."""
    connection = server_connection.Connection.__new__(server_connection.Connection)
    left, closing = [0], [False]
    connection.transport = SimpleNamespace(get_write_buffer_size=lambda: left[0], is_closing=lambda: closing[0])
    connection.flow = SimpleNamespace(write_paused=False, resume_writing=lambda: None)

    def stalled(size: int, paused: bool = True, closed: bool = False) -> bool:
        left[0], connection.flow.write_paused, closing[0] = size, paused, closed
        return connection.stalled()

    mib = 1 << 20
    assert not any(stalled(size * mib) for size in (9, 8, 7))
    connection.resume_writing()  # it took all that, and has got more
    assert not stalled(9 * mib)
    assert not stalled(9 * mib, paused=False) and not stalled(9 * mib)
    assert stalled(9 * mib) and stalled(9 * mib, closed=True) and stalled(9 * mib - 1, False, True)
    assert not stalled(100, paused=False) and not stalled(100, False, True) and stalled(100, False, True)


# ---- lying ----


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request(SMALL, f"Content-Length: {len(SMALL) - 5}"), 400),
        (request(SMALL, f"Content-Length: {10**18}"), 413),
        (request(SMALL, "Content-Length: -5"), 400),
        (request(SMALL, f"Content-Length: {len(SMALL)}", "Content-Length: 3"), 400),
        (request(SMALL, f"Content-Length: {len(SMALL)}", "Transfer-Encoding: chunked"), 400),
        (request(b"zz\r\n", "Transfer-Encoding: chunked"), 400),
        (request(b"19\r\n{}", "Transfer-Encoding: chunked"), 408),
        (request(b"".join(b"1\r\n%c\r\n" % byte for byte in SMALL) + b"0\r\n\r\n", "Transfer-Encoding: chunked"), 200),
        (request(SMALL, "Expect: 100-continue"), 100),
        (request(b"", "Expect: 100-continue", f"Content-Length: {10**9}", close=False), 413),  # and then it is closed
        (request(b"\xef\xbb\xbf" + SMALL), 400),
        (request(SMALL.decode().encode("utf-16")), 400),
        (request(b'{"\\ud800": 1}'), 400),
        (request(b'{"text": "a", "sampling_params": {"temperature": NaN}}'), 400),
        (request(b'{"text": "a", "sampling_params": {"temperature": 1e999}}'), 400),
        (request(b'{"text": "a", "sampling_params": {"max_new_tokens": ' + b"9" * 5000 + b"}}"), 400),
        (request(b'{"text": "a", "sampling_params": ' + b'{"json_schema": ' * 900 + b"1" + b"}" * 901), 400),
        (request(b'{"text": "abc", "text": "abc", "sampling_params": {"max_new_tokens": 2}}'), 200),
        (b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /%zz%e9%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
    ],
    ids=lambda value: value[:40] if isinstance(value, bytes) and len(value) < 90 else None,
)
def test_what_is_not_right_is_told(url, monkeypatch, sent, status):
    monkeypatch.setattr(router_exchange, "READ_TIMEOUT", 0.3)
    assert status_of(said(url, sent)) == status


def test_what_follows_the_chunks_is_not_the_requests_head(url):
    """Trailers come when the request has been judged by its head; they could add a key, or a length, to it."""
    body = b"%x\r\n%s\r\n0\r\n" % (len(SMALL), SMALL)
    head = "Transfer-Encoding: chunked"
    assert status_of(said(url, request(body + b"Expect: 100-continue\r\nX-A: b\r\n\r\n", head))) == 200
    scopes: list[Any] = []

    class Seen(server_connection.Connection):
        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            scopes.append(cycle.scope)

    async def main() -> None:
        config = uvicorn.Config(Starlette(), http=Seen, log_config=None, lifespan="off", ws="none")
        config.load()
        ours, theirs = socket.socketpair()
        with ours:
            made = lambda: Seen(config, uvicorn.server.ServerState(), {})  # noqa: E731
            transport, protocol = await asyncio.get_running_loop().create_connection(made, sock=theirs)
            protocol.data_received(request(body + b"Authorization: Bearer x\r\n\r\n", head))
            transport.close()

    asyncio.run(main())
    names = [name for name, _ in scopes[0]["headers"]]
    assert b"transfer-encoding" in names and b"authorization" not in names


@pytest.mark.parametrize(
    "endless", [b"0\r\nX: ", b"0\r\nX: y\r\n", b"2;x="], ids=["one trailer", "trailers", "a chunk's extension"]
)
def test_what_is_not_body_is_bounded(url, monkeypatch, endless):
    monkeypatch.setattr(router_exchange, "READ_TIMEOUT", 30)
    piece = b"X: y\r\n" * 200 if endless.endswith(b"\n") else b"a" * 1000
    with connect(url) as sock, pytest.raises(OSError):  # it is cut
        sock.sendall(request(endless, "Transfer-Encoding: chunked", close=False))
        for _ in range(20_000):
            sock.sendall(piece)


def test_chunks_without_end(url):
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    with connect(url) as sock, pytest.raises(OSError):  # it is cut long before
        sock.sendall(request(b"", "Transfer-Encoding: chunked"))
        for _ in range(10_000):
            sock.sendall(chunk)


# ---- several on one connection ----


def test_requests_sent_ahead_are_answered_in_order(url):
    bodies = [json.dumps({"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": n}}).encode() for n in (9, 1)]
    answer = said(url, request(bodies[0], close=False) + request(bodies[1]))
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b'"completion_tokens":9') < answer.index(b'"completion_tokens":1,')


def test_garbage_behind_a_request_does_not_end_up_in_its_answer(url, slow_engine):
    body = json.dumps({"text": "abc", "stream": True, "sampling_params": {**GREEDY, "max_new_tokens": 300}}).encode()
    with connect(url) as sock:
        sock.sendall(request(body, close=False))
        answer = sock.recv(65536)
        sock.sendall(b"what is this?\r\n\r\n")
        answer += rest(sock)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


def test_who_leaves_takes_along_all_that_was_sent_ahead(url, runtime, slow_engine):
    body = json.dumps({"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 500}}).encode()
    before = runtime.stats()["requests"]
    with connect(url) as sock:
        sock.sendall(request(body, close=False) * 3)
        wait_until(lambda: runtime.stats()["running"])
    wait_until(lambda: not runtime.stats()["running"], 3)
    assert runtime.stats()["requests"] == before + 1  # the others were not begun


def test_who_leaves_is_noticed_behind_a_long_body_sent_ahead(url, runtime, slow_engine):
    """Nobody takes that body yet, so that reading pauses; a client may not hide behind that."""
    body = json.dumps({"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 500}}).encode()
    before = runtime.stats()["output_tokens"]
    with connect(url) as sock, contextlib.suppress(OSError):  # it is cut
        sock.sendall(request(body, close=False))
        wait_until(lambda: runtime.stats()["running"])
        sock.sendall(request(b" " * 99_000, close=False))
    wait_until(lambda: not runtime.stats()["running"])
    assert runtime.stats()["output_tokens"] - before < 400


def test_who_leaves_is_noticed_behind_a_long_body(runtime, slow_engine):
    """Its own, of which the last piece is so large that reading pauses until it is taken."""
    body = json.dumps({"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 500}}).encode() + b" " * 90_000
    before = runtime.stats()["output_tokens"]
    with Server(runtime, port=0) as server:
        with connect(server.url) as sock:
            sock.sendall(request(b"", f"Content-Length: {len(body)}", close=False))
            wait_until(lambda: server._uvicorn.server_state.tasks)
            (connection,) = server._uvicorn.server_state.connections
            server._loop.call_soon_threadsafe(connection.data_received, body)  # no socket says how it cuts
            wait_until(lambda: runtime.stats()["running"])
        wait_until(lambda: not runtime.stats()["running"])
    assert runtime.stats()["output_tokens"] - before < 400


def test_a_connection_cannot_queue_without_end(url, runtime, slow_engine):
    body = json.dumps({"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 500}}).encode()
    with connect(url) as sock, pytest.raises(OSError):  # it is cut
        for _ in range(10_000):
            sock.sendall(request(body, close=False))
    wait_until(lambda: not runtime.stats()["running"], 3)


# ---- names ----


def test_names_cannot_be_guessed_or_taken(urls, runtime, slow_engine):
    """Who knows a name may abort the request, so one that the server makes says nothing about the next."""
    url = urls["server"]
    names = [post(url, "/generate", SMALL).json["meta_info"]["id"] for _ in range(3)]
    assert len({name[:4] for name in names}) == 3 and all(len(name) >= 20 for name in names)
    for path, body in {
        "/generate": {"text": "a"},
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/abort_request": {},
    }.items():
        for rid in ("minisgl-0-1", "x" * 1000):
            answer = post(url, path, {**body, "rid": rid})
            assert answer.status == 400 and answer.error["param"] == "rid", path
    own = runtime.prepare("abc", {**GREEDY, "max_new_tokens": 50})[0][0]
    runtime.engine.submit([own.request])
    assert post(url, "/abort_request", {"rid": own.request.rid}).status == 400
    assert own.result()["meta_info"]["completion_tokens"] == 50


def test_one_name_for_several_prompts_with_options_of_their_own(urls, runtime, slow_engine):
    body = {"text": ["abc", "de"], "rid": "mine", "return_logprob": [True, False]}
    answers: list[Any] = []
    params = {**GREEDY, "max_new_tokens": 400}
    thread = threading.Thread(
        target=lambda: answers.append(post(urls["server"], "/generate", {**body, "sampling_params": params}))
    )
    thread.start()
    wait_until(lambda: runtime.stats()["running"] == 2)
    assert post(urls["server"], "/abort_request", {"rid": "mine"}).status == 200
    thread.join()
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in answers[0].json] == ["abort", "abort"]


# ---- no sockets left ----

ROUTER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
from minisgl.router_run import main
sys.exit(main(["--port", "0", "--health-interval", "0.1", "--health-timeout", "1", "--workers", *sys.argv[1:]]))
"""


def test_a_router_without_sockets_leaves_what_runs_alone(runtime, urls, slow_engine):
    """It cannot ask its worker how it is, and must not take that for the worker's fault."""
    process = subprocess.Popen(
        [sys.executable, "-c", ROUTER, urls["server"]], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        cwd=Path(__file__).parent.parent, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    idle: list[socket.socket] = []
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split("ready on ")[1].split()[0]
        body = {"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 200}, "stream": True}
        stream = connect(url)
        stream.sendall(request(json.dumps(body).encode()))
        received = stream.recv(4096)
        waiting = connect(url)  # accepted before the sockets end, and asks when they have
        for _ in range(100):
            idle.append(connect(url))
        time.sleep(0.7)  # probes, some of which find no socket
        waiting.sendall(request(SMALL))
        assert status_of(rest(waiting)) in (200, 503)
        received += rest(stream)
        assert b'"completion_tokens":200' in received and b'"error"' not in received
        for sock in idle:
            sock.close()
        wait_until(lambda: _answers(lambda: get(url, "/health").json["healthy"] == 1))
        wait_until(lambda: _answers(lambda: post(url, "/generate", SMALL).status == 200))
    finally:
        process.kill()
        process.communicate()


def _answers(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:  # its sockets are still going
        return False


# ---- a worker that is none ----

GARBAGE = {
    "nothing": b"",
    "no HTTP": b"\x00\xff" * 100,
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "a lying length": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nContent-Type: application/json\r\n\r\n{}",
    "no number": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
    "a bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "an event stream without events": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"X: " + b"x" * 200_000 + b"\r\n\r\n",
    "a header with a line in it": b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "bad gzip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    "a strange status": b"HTTP/1.1 999 What\r\nContent-Length: 2\r\n\r\n{}",
    "a switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "a redirect": b"HTTP/1.1 307 x\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
}


class Garbage:
    """Answers /health well, and everything else with `answer`, then closes the connection."""

    def __init__(self, answer: bytes):
        self.answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            got = b""
            while b"\r\n\r\n" not in got:
                got += sock.recv(65536)
            well = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
            sock.sendall(self.answer if b"/generate" in got else well)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_worker_that_answers_garbage(kind, urls):
    """Each request gets one whole answer, from the other worker where the garbage is no answer."""
    worker = Garbage(GARBAGE[kind])
    try:
        with RouterThread(RouterOptions(RoundRobin(), [worker.url, urls["server"]], health_interval=0.1)) as router:
            wait_until(lambda: len(router.router.workers.healthy()) == 2)
            for _ in range(4):
                answer = call(router.url, "POST", "/generate", SMALL, timeout=20)
                whole = answer.status != 200 or kind == "bad gzip" or answer.json["meta_info"]["completion_tokens"] == 2
                assert whole, answer.body
    finally:
        worker.close()


# ---- the loop and the engine ----


def test_an_end_does_not_wait_for_the_round():
    """Rounds of streams' writes are spaced out; an answer that is complete is not kept for the next one."""
    from minisgl.server_bell import Doorbell, Listener

    async def main() -> None:
        bell = Doorbell(asyncio.get_running_loop())
        piece, end = Listener(bell), Listener(bell)
        bell._not_before = time.perf_counter() + 0.5  # as behind a round that took long
        heard: list[str] = []

        async def wait(listener: Listener, name: str) -> None:
            await listener.wait()
            heard.append(name)

        tasks = [asyncio.create_task(wait(piece, "piece")), asyncio.create_task(wait(end, "end"))]
        await asyncio.sleep(0)
        await asyncio.to_thread(lambda: (piece.ring(), end.ring_last()))
        await asyncio.wait_for(tasks[1], 0.4)
        assert heard == ["end"]
        await asyncio.wait_for(tasks[0], 10)

    asyncio.run(main())


def test_nothing_is_lost_between_ringing_and_waiting():
    from minisgl.server_bell import Doorbell, Listener

    async def main() -> None:
        bell = Doorbell(asyncio.get_running_loop())
        listener, rung, seen = Listener(bell), 0, 0

        def ring() -> None:
            nonlocal rung
            for _ in range(300):
                rung += 1
                (listener.ring if rung % 3 else listener.ring_last)()

        thread = threading.Thread(target=ring)
        thread.start()
        while seen < 300:
            await asyncio.wait_for(listener.wait(), 10)
            seen = rung
        thread.join()

    asyncio.run(main())


def test_short_requests_take_no_other_thread(runtime):
    """Handing a short prompt to another thread costs more than to tokenise it; long prompts and grammars go there."""
    with Server(runtime, port=0) as server:
        service = server._service
        assert service is not None
        off_loop: list[bool] = []
        real = service.off_loop

        async def counted(function: Any, *, grammar: bool = False) -> Any:
            off_loop.append(grammar)
            return await real(function, grammar=grammar)

        service.off_loop = counted
        for body in ({"prompt": "abc"}, {"prompt": [1, 2, 3]}, {"prompt": ["a", "b"], "stream": True}):
            assert post(server.url, "/v1/completions", {**body, "max_tokens": 1}).status == 200
        assert off_loop == []
        assert post(server.url, "/v1/completions", {"prompt": "a " * 400, "max_tokens": 1}).status in (200, 400)
        assert post(server.url, "/v1/completions", {"prompt": " " * 5000, "max_tokens": 1}).status in (200, 400)
        assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1, "regex": "a"}).status == 200
        assert off_loop == [False, True]


def test_closing_does_not_wait_for_a_connection_that_came_late(runtime, slow_engine):
    """Accepted by the kernel before, made after the idle connections were closed."""
    server = Server(runtime, port=0)
    with connect(server.url) as busy:
        busy.sendall(request(json.dumps({"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 50}}).encode()))
        wait_until(lambda: runtime.stats()["running"])
        closing = threading.Thread(target=server.close, args=(30.0,))
        closing.start()
        uvicorn, loop = server._uvicorn, server._loop
        wait_until(lambda: not uvicorn.servers[0].sockets)
        ours, theirs = socket.socketpair()

        async def make() -> None:
            protocol = uvicorn.config.http_protocol_class
            await asyncio.get_running_loop().create_connection(
                lambda: protocol(config=uvicorn.config, server_state=uvicorn.server_state, app_state={}), sock=theirs
            )

        assert loop is not None
        asyncio.run_coroutine_threadsafe(make(), loop).result(5)
        assert b'"completion_tokens":50' in rest(busy)
        closing.join(5)
        assert not closing.is_alive() and not server.serving
        ours.close()


def test_memory_is_flat_over_many_requests(runtime):
    """200 of them, one at a time: the engine's batches keep one shape, for which torch keeps its own caches."""
    with Server(runtime, port=0) as server, connect(server.url) as sock:
        plain = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
        stream = json.dumps({"text": "abc", "sampling_params": {"max_new_tokens": 2}, "stream": True}).encode()
        scored = json.dumps({"prompt": "ab", "max_tokens": 2, "logprobs": 2, "n": 2}).encode()
        sent = [request(plain, close=False, path="/v1/completions"), request(stream, close=False),
                request(scored, close=False, path="/v1/completions"), request(b"{", close=False)]  # fmt: skip
        file = sock.makefile("rb")

        def ask(count: int) -> None:
            for i in range(count):
                sock.sendall(sent[i % 4])
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += file.readline()
                if b"chunked" not in head:
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    assert len(file.read(length)) == length
                    continue
                while (size := int(file.readline(), 16)) >= 0:
                    file.read(size + 2)
                    if not size:
                        break
            for _ in range(3):
                assert post(server.url, "/generate", SMALL).status == 200  # a connection each

        ask(48)
        gc.collect()
        blocks = sys.getallocatedblocks()
        ask(200)
        gc.collect()
        assert sys.getallocatedblocks() - blocks < 1000  # 5 for each request


def test_equal_parameters_are_checked_once_and_no_others():
    from minisgl.server_jobs import cached_params

    assert cached_params({"n": 1, "temperature": 0}) is cached_params({"n": 1, "temperature": 0})
    for other in (True, 1.0, "1", float("nan")):  # two of them are equal to 1
        with pytest.raises(ValueError, match="n must be"):
            cached_params({"n": other, "temperature": 0})
    stops = {"stop": ["x" * 100]}
    assert cached_params(stops) == cached_params(stops) and cached_params(stops) is not cached_params(stops)
