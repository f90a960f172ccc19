"""The router in front of the real server: two engines of a tiny model in this process."""

from __future__ import annotations

import json
import time
import urllib.request
from contextlib import ExitStack

import pytest

pytest.importorskip("uvicorn", reason="the router needs minisgl[server]")
pytest.importorskip("aiohttp", reason="the router needs minisgl[server]")

from minisgl import Runtime, RuntimeEndpoint
from minisgl.router import RouterOptions
from minisgl.router_policy import CacheAware
from minisgl.router_run import RouterThread
from minisgl.server import Server

from . import tiny_models


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """(router's thread, runtimes)"""
    model = tiny_models.make("llama2", tmp_path_factory.mktemp("model"))
    with ExitStack() as stack:
        runtimes = [
            stack.enter_context(Runtime(model, device="cpu", dtype="float32", kv_capacity=2048, max_running_requests=8))
            for _ in range(2)
        ]
        servers = [stack.enter_context(Server(runtime, port=0, model_names=["tiny"])) for runtime in runtimes]
        options = RouterOptions(CacheAware(), [server.url for server in servers], health_interval=0.1)
        yield stack.enter_context(RouterThread(options)), runtimes


def get(url):
    with urllib.request.urlopen(url, timeout=30) as reply:
        return json.load(reply)


def generate(url, text, **params):
    payload = {"text": text, "sampling_params": {"max_new_tokens": 4, "temperature": 0, **params}}
    with urllib.request.urlopen(post(url + "/generate", payload), timeout=60) as reply:
        return json.load(reply)


def post(url, payload):
    return urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})


def test_prefixes_stay_where_they_are(fleet):
    """Four preambles, each used five times: computed once on one worker, found there four times."""
    router, runtimes = fleet
    preambles = [f"{word} and what belongs to it, at some length" for word in ("apples", "bread", "cheese", "dates")]
    cached = [generate(router.url, f"{p} {i}")["meta_info"]["cached_tokens"] for i in range(5) for p in preambles]
    assert all(n == 0 for n in cached[:4]) and all(n > 30 for n in cached[4:])
    assert all(runtime.stats()["requests"] == 10 for runtime in runtimes)  # and each worker has its share


def test_flush_at_a_worker_empties_its_tree(fleet):
    router, _ = fleet
    generate(router.url, "a text that one of the two remembers")
    end = time.monotonic() + 10
    tree = lambda: sum(w["tree_chars"] for w in get(router.url + "/workers")["workers"])  # noqa: E731
    assert tree() > 0
    for worker in router.router.workers:  # past the router: it hears of it from the workers
        request = urllib.request.Request(worker.url + "/flush_cache", b"", method="POST")
        urllib.request.urlopen(request, timeout=30).close()
    while tree():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_endpoint_and_openai_client(fleet):
    router, _ = fleet
    info = RuntimeEndpoint(router.url).get_server_info()
    assert info["max_running_requests"] == 16 and len(info["workers"]) == 2
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(api_key="k", base_url=router.url + "/v1", max_retries=0)
    messages = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0)
    stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=-1)


def test_client_that_goes_away_frees_the_memory(fleet):
    router, runtimes = fleet
    payload = {"text": "go on", "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    with urllib.request.urlopen(post(router.url + "/generate", payload), timeout=60) as reply:
        reply.readline()
    end = time.monotonic() + 10
    while any(runtime.stats()["running"] or runtime.stats()["kv_locked"] for runtime in runtimes):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert sum(runtime.stats()["output_tokens"] for runtime in runtimes) < 400
