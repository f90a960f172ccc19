"""The router over real connections, with fake workers that fail in every way."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the router needs minisgl[server]")
pytest.importorskip("aiohttp", reason="the router needs minisgl[server]")

import asyncio

from minisgl import router_exchange
from minisgl.backends.endpoint import RuntimeEndpoint
from minisgl.router import RouterOptions
from minisgl.router_policy import POLICIES, CacheAware, RoundRobin
from minisgl.router_run import RouterThread, main, make_policy, parser

from .fake_worker import FakeWorker


class Setup:
    """Fake workers and a router in front of them; short intervals, so that tests need not wait."""

    def __init__(self, count: int = 2, policy: Any = None, **options: Any):
        self._stack = ExitStack()
        self.workers = [self._stack.enter_context(FakeWorker()) for _ in range(count)]
        self.options = {"health_interval": 0.05, "health_timeout": 20.0, "eviction_interval": 0.02, **options}
        self.policy = policy or RoundRobin()

    def __enter__(self) -> Setup:
        urls = [worker.url for worker in self.workers]
        self.router = self._stack.enter_context(RouterThread(RouterOptions(self.policy, urls, **self.options)))
        self.url = self.router.url
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self.workers:
            worker.release()
        self._stack.close()

    def call(self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None):
        """(status, decoded JSON or text, headers)"""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as reply:
                status, raw, head = reply.status, reply.read(), reply.headers
        except urllib.error.HTTPError as error:
            with error:
                status, raw, head = error.code, error.read(), error.headers
        try:
            return status, json.loads(raw), head
        except ValueError:
            return status, raw.decode(), head

    def generate(self, text: str = "prompt", **more: Any):
        return self.call("/generate", {"text": text, **more})

    def stream(self, text: str = "prompt") -> list[Any]:
        """The events of one answer."""
        return [json.loads(e) if e != "[DONE]" else e for e in events(self.open_stream(text))]

    def open_stream(self, text: str = "prompt"):
        body = json.dumps({"text": text, "stream": True}).encode()
        return urllib.request.urlopen(urllib.request.Request(self.url + "/generate", body), timeout=20)

    def states(self) -> dict[str, bool]:
        return {w["url"]: w["healthy"] for w in self.call("/workers")[1]["workers"]}


def events(response) -> list[str]:
    with response:
        return [line[6:].strip().decode() for line in response if line.startswith(b"data: ")]


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


# ---- passing through ---------------------------------------------------------------------------------------------


def test_requests_and_answers_pass_as_they_are():
    with Setup(1) as s:
        headers = {"Authorization": "Bearer k", "X-Mine": "1", "Content-Type": "application/x-odd"}
        status, answer, head = s.call("/v1/odd%2Fpath?a=1&b=%20", b'{"x": "\xc3\xa9"}', headers)
        assert (status, head["X-Worker"]) == (200, str(s.workers[0].port))
        assert answer == {"method": "POST", "target": "/v1/odd%2Fpath?a=1&b=%20", "body": '{"x": "é"}'}
        seen = s.workers[0].headers[0]
        assert {name: seen[name.lower()] for name in headers} == headers
        assert seen["host"] == s.workers[0].url[7:] and seen["accept-encoding"] == "identity"  # urllib's own
        assert len(head.get_all("Date")) == 1 and len(head.get_all("Server")) == 1
        assert s.call("/v1/models")[1]["method"] == "GET"
        assert s.call("/v1/files/1", method="DELETE")[1]["method"] == "DELETE"
        assert s.call("/anything", method="HEAD")[0] == 200


def test_errors_of_the_worker_pass():
    with Setup(2) as s:
        for worker in s.workers:
            worker.status = 400
        status, answer, _ = s.generate()
        assert status == 400 and answer["error"]["message"] == "not now"
        assert sum(len(worker.asked) for worker in s.workers) == 1  # a wrong request is wrong everywhere


def test_stream_passes_at_once():
    """The first event is there while the worker holds back the second."""
    with Setup(1) as s:
        s.workers[0].hold, s.workers[0].hold_after_first = asyncio.Event(), True
        response = s.open_stream()
        assert response.headers["Content-Type"] == "text/event-stream"
        assert json.loads(response.readline()[6:])["text"] == "one "
        s.workers[0].release()
        assert [e if e == "[DONE]" else json.loads(e)["text"] for e in events(response)] == ["two ", "three", "[DONE]"]


def test_large_stream_and_slow_reader():
    """The router holds a window of a stream, not the stream, for a client that does not read; others go on."""
    with Setup(1) as s:
        worker = s.workers[0]
        worker.pieces = ("x" * 100_000,) * 200
        response = s.open_stream()
        time.sleep(0.3)
        assert s.call("/v1/models")[0] == 200
        assert worker.running == 1  # blocked: 20 MB do not fit into the buffers on the way
        assert len(events(response)) == 201


def test_disconnect_reaches_the_worker():
    with Setup(1) as s:
        worker = s.workers[0]
        worker.hold, worker.hold_after_first = asyncio.Event(), True
        for n in range(1, 4):  # mid-stream
            response = s.open_stream()
            response.readline()
            response.close()
            until(lambda n=n: worker.gone == n)
        worker.hold_after_first = False
        connection = http.client.HTTPConnection(s.url[7:])  # before the first byte, no stream
        connection.request("POST", "/generate", json.dumps({"text": "p"}))
        until(lambda: worker.running == 1)
        connection.close()
        until(lambda: worker.gone == 4 and worker.running == 0)
        assert s.states() == {worker.url: True}
        until(lambda: all(w["load"] == 0 for w in s.call("/workers")[1]["workers"]))
        assert len(worker.asked) == 4  # nothing was asked twice


def test_client_that_leaves_while_it_sends():
    with Setup(1) as s:
        with socket.create_connection(("127.0.0.1", int(s.url.rsplit(":", 1)[1]))) as raw:
            raw.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        time.sleep(0.1)
        assert s.generate()[0] == 200 and len(s.workers[0].asked) == 1


def test_large_body():
    with Setup(1) as s:
        text = "x" * 1_000_000
        assert s.generate(text)[0] == 200 and s.workers[0].asked == [{"text": text}]


def test_body_is_bounded():
    with Setup(1, max_body=1000) as s:
        status, answer, _ = s.generate("x" * 2000)
        assert status == 413 and "1000" in answer["error"]["message"]
        assert not s.workers[0].asked


# ---- failing -----------------------------------------------------------------------------------------------------


def test_dead_worker_is_taken_out_and_returns():
    with Setup(2) as s:
        dead, alive = s.workers
        dead.kill()
        assert all(s.generate()[1]["worker"] == alive.port for _ in range(6))
        until(lambda: s.states() == {dead.url: False, alive.url: True})
        dead.start()
        until(lambda: s.states()[dead.url])
        assert Counter(s.generate()[1]["worker"] for _ in range(6)) == {alive.port: 3, dead.port: 3}


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_have_not_begun_are_retried(stream):
    with Setup(2) as s, ThreadPoolExecutor(16) as pool:
        dying, alive = s.workers
        dying.hold = asyncio.Event()
        answers = [pool.submit(s.stream if stream else s.generate) for _ in range(16)]
        until(lambda: dying.running == 8)
        dying.kill()
        for answer in answers:
            result = answer.result(20)
            if stream:
                assert [e.get("text") for e in result[:-1]] == ["one ", "two ", "three"] and result[-1] == "[DONE]"
                assert {e["worker"] for e in result[:-1]} == {alive.port}
            else:
                assert result[:2] == (200, {"text": "one two three", "worker": alive.port})
        assert len(alive.asked) == 16


def test_a_stream_that_has_begun_ends_with_an_error_event():
    with Setup(2) as s:
        for worker in s.workers:
            worker.hold, worker.hold_after_first = asyncio.Event(), True
        response = s.open_stream()
        assert json.loads(response.readline()[6:])["text"] == "one "
        next(worker for worker in s.workers if worker.running).kill()
        error, done = events(response)
        assert done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "worker_failed"
        assert sum(len(worker.asked) for worker in s.workers) == 1  # not asked again: the client has some of it


def test_openai_client_sees_the_error_of_a_broken_stream():
    openai = pytest.importorskip("openai")
    with Setup(1) as s:
        worker = s.workers[0]
        worker.hold, worker.hold_after_first = asyncio.Event(), True
        client = openai.OpenAI(api_key="k", base_url=s.url + "/v1", max_retries=0)
        stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        next(iter(stream))
        worker.kill()
        with pytest.raises(openai.APIError, match="worker failed"):
            list(stream)


def test_hanging_worker_is_taken_out_and_its_requests_retried():
    """It takes connections and never answers: only the probes tell."""
    with Setup(2, health_timeout=1.0) as s, ThreadPoolExecutor(4) as pool:
        hanging, alive = s.workers
        hanging.hold = asyncio.Event()
        answers = [pool.submit(s.generate) for _ in range(4)]
        until(lambda: hanging.running == 2)
        hanging.health = None
        assert [answer.result(20)[1]["worker"] for answer in answers] == [alive.port] * 4
        assert s.states() == {hanging.url: False, alive.url: True}
        hanging.health = 200
        until(lambda: s.states()[hanging.url])


@pytest.mark.parametrize("listens", [True, False])
def test_draining_worker_gets_nothing_new_and_ends_what_it_has(listens):
    with Setup(2, retries=5) as s, ThreadPoolExecutor(1) as pool:
        draining, other = s.workers
        draining.hold = asyncio.Event()
        answers = [pool.submit(s.generate)]
        until(lambda: draining.running or other.asked)
        if not draining.running:
            answers = [pool.submit(s.generate)]
            until(lambda: draining.running)
        draining.health = 503
        if not listens:
            draining.close()
        until(lambda: s.states() == {draining.url: False, other.url: True})
        assert all(s.generate()[1]["worker"] == other.port for _ in range(4))
        time.sleep(0.2)
        draining.release()
        assert answers[0].result(20)[1]["worker"] == draining.port and draining.gone == 0


@pytest.mark.parametrize("status", [429, 503])
def test_busy_worker_is_passed_over(status):
    with Setup(2) as s:
        s.workers[0].status = status
        assert all(s.generate()[:2] == (200, {"text": "one two three", "worker": s.workers[1].port}) for _ in range(4))
        s.workers[1].status = 429
        before = sum(len(worker.asked) for worker in s.workers)
        code, answer, _ = s.generate()
        assert code in (status, 429) and answer["error"]["message"] == "not now"
        assert sum(len(worker.asked) for worker in s.workers) == before + 2  # each was asked once
        assert all(s.states().values())


def test_connection_that_broke_is_not_the_end_of_a_worker():
    """An idle connection may be closed at the moment at which a request is sent on it."""
    with Setup(1) as s:
        s.workers[0].hold = asyncio.Event()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(s.generate)
            until(lambda: s.workers[0].running == 1)
            s.workers[0].kill()
            s.workers[0].release()
            s.workers[0].start()
            assert answer.result(20)[0] in (200, 503)  # 503: a probe came in between
        until(lambda: s.states() == {s.workers[0].url: True})
        assert s.generate()[0] == 200


def test_retries_are_bounded():
    """A request that kills its worker may not kill them all."""
    with Setup(5, retries=1) as s, ThreadPoolExecutor(1) as pool:
        for worker in s.workers:
            worker.hold = asyncio.Event()
        answer = pool.submit(s.generate)
        for _ in range(2):
            until(lambda: any(worker.running for worker in s.workers))
            next(worker for worker in s.workers if worker.running).kill()
        status, body, _ = answer.result(20)
        assert status == 503 and "2 worker(s) failed" in body["error"]["message"]
        assert sum(len(worker.asked) for worker in s.workers) == 2


def test_router_stale_worker():
    """The owner of the best match dies: the prompt goes elsewhere, its entries are gone, and it comes back."""
    with Setup(2, CacheAware()) as s:
        prompt = "a long and shared preamble " * 20
        owner = next(w for w in s.workers if w.port == s.generate(prompt + "1")[1]["worker"])
        other = next(w for w in s.workers if w is not owner)
        owner.kill()
        assert s.generate(prompt + "2")[1]["worker"] == other.port
        until(lambda: not s.states()[owner.url])
        assert next(w for w in s.call("/workers")[1]["workers"] if w["url"] == owner.url)["tree_chars"] == 0
        owner.start()
        until(lambda: s.states()[owner.url])
        assert s.generate(prompt + "3")[1]["worker"] == other.port
        other.kill()
        owner.kill()
        status, body, head = s.generate(prompt)
        assert status == 503 and head["Retry-After"] and body["error"]["type"] == "server_error"
        assert set(body["error"]) == {"message", "type", "param", "code"}


def test_killed_under_load():
    """Two of three workers are killed and restarted while 12 clients run: no request is lost."""
    with Setup(3, CacheAware(), retries=5) as s, ThreadPoolExecutor(12) as pool:
        for worker in s.workers:
            worker.delay = 0.01
        stop = threading.Event()

        def client(i: int) -> list[int]:
            codes = []
            while not stop.is_set():
                codes.append(s.generate(f"group {i % 4} " * 30 + str(len(codes)))[0])
            return codes

        clients = [pool.submit(client, i) for i in range(12)]
        for worker in s.workers[:2]:
            time.sleep(0.3)
            worker.kill()
            time.sleep(0.3)
            worker.start()
            until(lambda: all(s.states().values()))
        stop.set()
        codes = [code for c in clients for code in c.result(20)]
        assert len(codes) > 50 and set(codes) == {200}


def test_a_client_that_takes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(router_exchange, "WRITE_TIMEOUT", 0.3)
    with Setup(1) as s, socket.socket() as client:
        s.workers[0].pieces = ("x" * 100_000,) * 200
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(s.url.rsplit(":", 1)[1])))
        body = b'{"text": "a", "stream": true}'
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        worker = next(iter(s.router.router.workers))
        until(lambda: worker.load == 1)
        until(lambda: worker.load == 0 and not worker.exchanges)
        until(lambda: s.workers[0].gone == 1)
        assert worker.healthy and "failures_total{" not in s.call("/metrics")[1]


# ---- workers come and go -----------------------------------------------------------------------------------------


def test_join_and_leave():
    with Setup(1) as s, FakeWorker() as late:
        assert s.call(f"/add_worker?url={late.url}/", b"")[:2] == (200, {"url": late.url, "healthy": True})
        assert s.call("/add_worker", {"url": late.url.upper().replace("HTTP", "http")})[0] == 200  # the same one
        assert s.states() == {s.workers[0].url: True, late.url: True}
        assert {s.generate()[1]["worker"] for _ in range(4)} == {late.port, s.workers[0].port}
        assert s.call("/remove_worker", {"url": s.workers[0].url})[0] == 200
        assert {s.generate()[1]["worker"] for _ in range(4)} == {late.port}
        assert s.call("/remove_worker", {"url": s.workers[0].url})[0] == 404
        assert s.workers[0].url not in s.call("/metrics")[1].split("minisgl_router:worker_up")[-1]
        for wrong in ("ftp://x", "x:1", "http://", "http://h:x", "http://h?q=1"):
            status, body, _ = s.call("/add_worker", {"url": wrong})
            assert status == 400 and body["error"]["type"] == "invalid_request_error", wrong
        assert s.call("/add_worker", {})[0] == 400


def test_leaving_lets_requests_in_flight_end():
    with Setup(1) as s, ThreadPoolExecutor(1) as pool:
        s.workers[0].hold = asyncio.Event()
        answer = pool.submit(s.generate)
        until(lambda: s.workers[0].running == 1)
        s.call("/remove_worker", {"url": s.workers[0].url})
        assert s.generate()[0] == 503
        s.workers[0].release()
        assert answer.result(20)[0] == 200


def test_what_waits_for_a_removed_worker_that_hangs_is_called_off():
    with Setup(2, health_timeout=0.1) as s, ThreadPoolExecutor(1) as pool:
        for worker in s.workers:
            worker.hold = asyncio.Event()
        answer = pool.submit(s.generate)
        until(lambda: any(worker.running for worker in s.workers))
        hung, other = sorted(s.workers, key=lambda worker: -worker.running)
        s.call("/remove_worker", {"url": hung.url})
        hung.health = None
        other.release()
        assert answer.result(8)[1]["worker"] == other.port
        until(lambda: len(s.router.router.workers._watchers) == 1)


def test_worker_that_is_not_there_yet():
    with FakeWorker() as worker:
        worker.kill()
        with RouterThread(RouterOptions(RoundRobin(), [worker.url], health_interval=0.05)) as router:
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(router.url + "/health")
            worker.start()
            until(lambda: router.router.workers.healthy())
            assert json.load(urllib.request.urlopen(router.url + "/health"))["healthy"] == 1


def test_key_is_asked_for():
    with Setup(1, api_key="secret") as s:
        add = {"url": s.workers[0].url}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s\xe9cret"}):
            for path in ("/add_worker", "/remove_worker", "/generate", "/v1/models"):
                status, body, _ = s.call(path, add, headers)
                assert status == 401 and body["error"]["type"] == "authentication_error"
        assert s.call("/add_worker", add, {"Authorization": "Bearer secret"})[0] == 200
        assert s.call("/generate", {"text": "t"}, {"Authorization": "Bearer secret"})[0] == 200
        assert s.call("/health")[0] == 200
    with Setup(1, open_admin=False) as s:
        assert s.call("/add_worker", {"url": s.workers[0].url})[0] == 403
        told = http.client.HTTPConnection(s.url.removeprefix("http://"), timeout=20)
        told.putrequest("POST", "/flush_cache")
        told.putheader("Content-Length", str(2 << 20))
        told.endheaders()  # refused by what it says: who goes on to send may see a reset instead
        assert told.getresponse().status == 413
        told.close()
    with Setup(1) as s:  # a web page posts to loopback through its reader's browser
        assert s.call("/add_worker", {"url": s.workers[0].url}, {"Origin": "http://evil.example"})[0] == 403
        assert s.generate()[0] == 200


@pytest.mark.parametrize("target", ["@127.0.0.1:9/x", "http://127.0.0.1:9/x", ":1@h/", "*"])
def test_target_cannot_become_a_host(target):
    with Setup(1) as s, socket.create_connection(("127.0.0.1", int(s.url.rsplit(":", 1)[1])), timeout=10) as raw:
        raw.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while piece := raw.recv(4096):
            answer += piece
        # the HTTP server may take the path out of an absolute target; nothing may be sent to its host
        status = answer.split(b" ")[1]
        assert status in (b"400", b"404") or (target.startswith("http") and b'"target": "/x"' in answer)


def test_headers_of_a_connection_stay_on_it():
    with Setup(1) as s:
        connection = http.client.HTTPConnection(s.url[7:], timeout=20)
        headers = {"Connection": "close, X-Hop", "X-Hop": "1", "Te": "trailers", "X-End": "2"}
        connection.request("POST", "/x", "{}", headers)
        assert connection.getresponse().status == 200
        seen = s.workers[0].headers[0]
        assert "x-hop" not in seen and "te" not in seen and seen["x-end"] == "2"


# ---- what concerns all -------------------------------------------------------------------------------------------


def test_flush_and_abort_reach_every_worker():
    with Setup(3, CacheAware()) as s:
        s.generate("some text")
        assert s.call("/flush_cache", b"")[0] == 200
        assert s.call("/abort_request", {"rid": "r"})[0] == 200
        assert [[path for path, _ in w.requests if path != "/generate"] for w in s.workers] == [
            ["/flush_cache", "/abort_request"]
        ] * 3
        assert all(w["tree_chars"] == 0 for w in s.call("/workers")[1]["workers"])
        s.workers[1].status = 500
        assert s.call("/flush_cache", b"")[0] == 500


def test_runtime_endpoint_works_against_it():
    with Setup(2, CacheAware()) as s:
        for worker in s.workers:
            worker.info = {"max_running_requests": 8}
        backend = RuntimeEndpoint(s.url)
        info = backend.get_server_info()
        assert info["max_running_requests"] == 16 and [w["url"] for w in info["workers"]] == [
            w.url for w in s.workers
        ]
        backend.flush_cache()


def test_reports_of_the_workers_reach_the_policy():
    """The tree is cut to what the worker holds, and emptied when its epoch changes."""
    with Setup(1, CacheAware()) as s:
        worker = s.workers[0]
        tree = lambda: s.call("/workers")[1]["workers"][0]["tree_chars"]  # noqa: E731
        worker.info = {"kv_evictable": 0, "kv_locked": 0, "prompt_tokens": 0, "cache_epoch": 1}
        until(lambda: s.policy._belief(worker.url)._first is not None)
        worker.info = {"kv_evictable": 1000, "kv_locked": 500, "prompt_tokens": 0, "cache_epoch": 1}
        time.sleep(0.15)
        for i in range(40):
            s.generate(f"{i:03}" + "t" * 397)
        until(lambda: 5000 < tree() <= 6000)  # 1500 tokens of 4 characters
        worker.info = {**worker.info, "cache_epoch": 2}
        until(lambda: tree() == 0)


def test_metrics():
    with Setup(2, CacheAware()) as s:
        for _ in range(5):
            s.generate("text " * 40)
        text = s.call("/metrics")[1]
        assert 'reason="cache"' in text and "minisgl_router:choose_seconds_count 5.0" in text
        owner = next(w for w in s.workers if w.asked)
        assert f'minisgl_router:requests_total{{reason="cache",worker="{owner.url}"}} 4.0' in text
        assert f'minisgl_router:worker_up{{worker="{owner.url}"}} 1.0' in text
        assert f'minisgl_router:tree_chars{{worker="{owner.url}"}} 200.0' in text


def test_batches_count_as_many():
    with Setup(2, POLICIES["power_of_two"]()) as s, ThreadPoolExecutor(1) as pool:
        for worker in s.workers:
            worker.hold = asyncio.Event()
        answer = pool.submit(s.call, "/generate", {"text": ["a", "b", "c"], "sampling_params": {"n": 2}})
        until(lambda: any(worker.running for worker in s.workers))
        assert sorted(w["load"] for w in s.call("/workers")[1]["workers"]) == [0, 6]
        for worker in s.workers:
            worker.release()
        answer.result(20)


# ---- command line ------------------------------------------------------------------------------------------------


def test_every_policy_of_the_command_line():
    for name in POLICIES:
        assert type(make_policy(parser().parse_args(["--policy", name]))) is POLICIES[name]
    policy = make_policy(
        parser().parse_args(
            ["--balance-abs-threshold=7", "--balance-rel-threshold=2", "--cache-threshold=0.7",
             "--max-tree-chars=100000"]
        )
    )  # fmt: skip
    assert isinstance(policy, CacheAware)
    assert (policy.balance_abs_threshold, policy.balance_rel_threshold) == (7, 2.0)
    assert (policy.cache_threshold, policy.max_tree_chars) == (0.7, 100_000)


@pytest.mark.parametrize(
    ("argument", "named"),
    [("--cache-threshold=2", "cache_threshold"), ("--workers=ftp://x", "ftp://x"),
     ("--health-interval=0", "health_interval"), ("--stream-timeout=-1", "stream_timeout"),
     ("--retries=-1", "retries")],
)  # fmt: skip
def test_wrong_arguments_are_one_line(argument, named, capsys):
    assert main([argument]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


# ---- its own end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ticks", range(6))
def test_closing_ends_watchers_that_were_just_woken(ticks):
    """asyncio.wait_for may lose a cancellation that comes together with its result: the router then never ended."""
    from types import SimpleNamespace

    from minisgl.router_workers import Workers

    class Session:
        def get(self, *args: Any, **more: Any) -> Any:
            return self

        async def __aenter__(self) -> Any:
            return SimpleNamespace(status=200, json=self.json)

        async def __aexit__(self, *exc: object) -> None:
            pass

        async def json(self, **more: Any) -> dict[str, Any]:
            return {}

    async def main() -> None:
        workers = Workers(Session(), RoundRobin(), health_interval=60, health_timeout=1, headers={})  # pyright: ignore
        worker = workers.add("http://w:1")
        await worker.probed.wait()
        await asyncio.sleep(0.01)
        worker.suspect()
        for _ in range(ticks):
            await asyncio.sleep(0)
        await asyncio.wait_for(workers.close(), 2)

    asyncio.run(main())


def test_a_stream_of_a_worker_that_hangs_ends_with_an_error_event():
    with Setup(2, health_timeout=0.3) as s:
        for worker in s.workers:
            worker.hold, worker.hold_after_first = asyncio.Event(), True
        response = s.open_stream()
        assert json.loads(response.readline()[6:])["text"] == "one "
        next(worker for worker in s.workers if worker.running).health = None
        error, done = events(response)
        assert done == "[DONE]" and json.loads(error)["error"]["code"] == "worker_failed"


def test_a_stream_that_stalls_ends_with_an_error_event():
    """Its worker says that it is well, as one whose GPU hangs does: only its silence tells."""
    with Setup(1, stream_timeout=0.3) as s:
        worker = s.workers[0]
        worker.delay = 0.6  # before the first event it may take its time: that is a queue
        worker.hold, worker.hold_after_first = asyncio.Event(), True
        response = s.open_stream()
        assert json.loads(response.readline()[6:])["text"] == "one "
        error, done = events(response)
        assert done == "[DONE]" and json.loads(error)["error"]["code"] == "worker_failed"
        assert "nothing came for 0.3 seconds" in json.loads(error)["error"]["message"]
        until(lambda: worker.gone == 1)
        assert s.states() == {worker.url: True}


def test_who_has_no_key_cannot_make_the_router_hold_a_body():
    """The health checks are open, and have no body to speak of."""
    with Setup(1, api_key="secret") as s:
        for path in ("/health_generate", "/health"):
            told = http.client.HTTPConnection(s.url.removeprefix("http://"), timeout=20)
            told.putrequest("POST" if path == "/health_generate" else "GET", path)
            told.putheader("Content-Length", str(1 << 20))
            told.endheaders()
            assert told.getresponse().status == (413 if path == "/health_generate" else 200)
            told.close()
        assert s.call("/health_generate")[0] == 200 and s.call("/health_generate", {"a": 1})[0] == 200


def test_a_worker_that_says_nothing_is_named_with_a_reason():
    with Setup(1, health_timeout=0.3, health_interval=30) as s:
        s.workers[0].stall = True
        status, body, _ = s.call("/flush_cache", b"")
        assert status == 502 and "TimeoutError" in body["error"]["message"]


def test_the_help_says_who_needs_the_key(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "asked of everybody" in text and "adds or removes" not in text


def test_a_wrong_port_is_one_line(capsys):
    assert main(["--port", "70000"]) == 2
    assert capsys.readouterr().err == "minisgl: --port must be from 0 to 65535, got 70000\n"
