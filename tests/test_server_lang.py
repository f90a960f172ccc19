"""The language over HTTP: the programs of test_lang_runtime through RuntimeEndpoint and a server in this process."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest

pytest.importorskip("starlette", reason='needs pip install "minisgl[server]"')
pytest.importorskip("prometheus_client", reason='needs pip install "minisgl[server]"')

import minisgl as sgl
from minisgl import Server
from minisgl.server_jobs import Limits

from . import engines, test_lang_runtime
from .http_client import wait_until

OPTIONS = {"device": "cpu", "dtype": "float32", "overlap": False}


@pytest.fixture(scope="module")
def runtime(default_model_folder):
    with sgl.Runtime(default_model_folder, kv_capacity=6000, max_running_requests=16, **OPTIONS) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def endpoint(runtime):
    with Server(runtime, port=0, api_key="k") as server:
        yield sgl.RuntimeEndpoint(server.url, "k", retry_wait=0.05)


@pytest.fixture(scope="module")
def tiny():
    with engines.make(kv_capacity=4000, max_running_requests=8) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def tiny_endpoint(tiny):
    with Server(tiny, port=0) as server:
        yield sgl.RuntimeEndpoint(server.url, retry_wait=0.05)


PROGRAMS = [
    (test_lang_runtime.essay_judge, ("Cats are good.",)),
    (test_lang_runtime.tree_of_thought, ("How to rest?",)),
    (test_lang_runtime.react_agent, ("What is 4+3?", lambda call: 7)),
    (test_lang_runtime.extract, ("Ann is 25.",)),
    (test_lang_runtime.chat, (test_lang_runtime.QUESTIONS[:3],)),
]


@pytest.mark.parametrize("program, arguments", PROGRAMS, ids=[program.__name__ for program, _ in PROGRAMS])
def test_a_program_gives_the_same_as_in_process(runtime, endpoint, program, arguments):
    here = program.run(*arguments, backend=runtime, temperature=0)
    there = program.run(*arguments, backend=endpoint, temperature=0)
    assert there.text() == here.text() and there.ret_value == here.ret_value
    assert there.messages() == here.messages()


def test_turns_hit_the_cache(runtime, endpoint):
    runtime.flush_cache()
    state = test_lang_runtime.chat.run(["Hi!", "Name a color."], backend=endpoint, temperature=0)
    first, second = state.get_meta_info("a0"), state.get_meta_info("a1")
    assert second["cached_tokens"] >= first["prompt_tokens"] + first["completion_tokens"] - 2


@pytest.mark.parametrize("method", [sgl.token_length_normalized, sgl.greedy_token_selection,
                                    sgl.unconditional_likelihood_normalized])  # fmt: skip
def test_select(runtime, endpoint, method):
    @sgl.function
    def f(s):
        s += "The opposite of hot is" + sgl.select("c", choices=[" cold", " the", "> hot"], choices_method=method)

    here, there = f.run(backend=runtime), f.run(backend=endpoint)
    assert there["c"] == here["c"] == " cold"
    assert there.get_meta_info("c")["scores"] == pytest.approx(here.get_meta_info("c")["scores"], abs=1e-2)


def test_constrained_gen(tiny, tiny_endpoint):
    @sgl.function
    def f(s):
        s += "A date: " + sgl.gen("date", regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}") + "\n"
        s += "A number: " + sgl.gen_int("number", max_tokens=30) + "\n"
        s += "A person: " + sgl.gen("person", max_tokens=60, json_schema=json.dumps({
            "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"],
            "additionalProperties": False}))  # fmt: skip

    here, there = (f.run(backend=backend, temperature=1.0, seed=3) for backend in (tiny, tiny_endpoint))
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", there["date"]) and isinstance(int(there["number"]), int)
    assert set(json.loads(there["person"])) == {"name"} and there.text() == here.text()


def test_batch_in_order_with_n_and_options(tiny, tiny_endpoint):
    @sgl.function
    def f(s, x):
        s += x + sgl.gen("a", n=2, max_tokens=5, seed=1) + sgl.gen("b", max_tokens=3, return_logprob=True, stop="zzz")

    rows = [{"x": f"{i} "} for i in range(12)]
    here = f.run_batch(rows, backend=tiny, ignore_eos=True)
    there = f.run_batch(rows, backend=tiny_endpoint, ignore_eos=True)
    assert [state["a"] for state in there] == [state["a"] for state in here]
    assert [m["completion_tokens"] for m in there[0].get_meta_info("a")] == [5, 5]
    assert len(there[0].get_meta_info("b")["output_token_logprobs"]) == 3


def test_streams(tiny, tiny_endpoint):
    @sgl.function
    def f(s):
        s += "abc" + sgl.gen("a", max_tokens=30) + sgl.gen("b", max_tokens=5)

    state = f.run(backend=tiny_endpoint, ignore_eos=True, temperature=0, stream=True)
    assert "".join(state.text_iter("a")) == state["a"] and "".join(state.text_iter()) == state.text()
    assert state["a"] == f.run(backend=tiny, ignore_eos=True, temperature=0)["a"]

    async def main():
        state = f.run(backend=tiny_endpoint, ignore_eos=True, stream=True)
        return [pair async for pair in state.text_async_iter("a", return_meta_data=True)], state["a"]

    pairs, whole = asyncio.run(main())
    assert "".join(text for text, _ in pairs) == whole and pairs[-1][1]["completion_tokens"] == 30


def test_fork_shares_its_prefix(tiny, tiny_endpoint):
    tiny.flush_cache()

    @sgl.function
    def f(s):
        s += "p" * 200
        group = s.fork(4)
        group += lambda i: f"{i}" + sgl.gen("x", max_tokens=2)
        group.join("gather_variable")
        return [child.get_meta_info("x")["cached_tokens"] for child in group], s["x"]

    cached, values = f.run(backend=tiny_endpoint, ignore_eos=True, temperature=0).ret_value
    assert sorted(cached)[1] >= 199 and len(values) == 4  # one of them, or the prefill before, computes it


def test_precompute_flush_and_info(tiny, tiny_endpoint):

    def flushed():  # the hint of a test before may still be computed
        sgl.flush_cache(tiny_endpoint)
        return tiny.stats()["kv_evictable"] == 0

    wait_until(flushed)
    f = sgl.function(lambda s, x: s.__iadd__("A constant beginning. " + x + sgl.gen("a", max_tokens=1)))
    assert f.cache(tiny_endpoint) == "A constant beginning. "
    assert f.run("x", backend=tiny_endpoint).get_meta_info("a")["cached_tokens"] == 22
    info = sgl.get_server_info(tiny_endpoint)
    assert info["max_running_requests"] == 8 == tiny_endpoint.parallelism and info["requests"] > 0


def test_errors_name_the_parameter(tiny, tiny_endpoint):
    for match, params in {
        "temperature": {"temperature": -1}, "n must": {"n": 0}, "top_k": {"top_k": 0}, "regex": {"regex": "foo**"},
    }.items():  # fmt: skip
        state = sgl.function(lambda s, p=params: s.__iadd__("x" + sgl.gen("a", **p))).run(backend=tiny_endpoint)
        with pytest.raises(ValueError, match=match):
            state["a"]
    with pytest.raises(ValueError, match="multimodal"):
        sgl.function(lambda s: s.__iadd__(sgl.user(sgl.image("a.png")))).run(backend=tiny_endpoint).sync()
    long = sgl.function(lambda s: s.__iadd__("x" * 5000 + sgl.gen("a"))).run(backend=tiny_endpoint)
    with pytest.raises(ValueError, match="5000 tokens"):
        long["a"]
    engines.check_idle(tiny)


def test_a_failing_program_ends_its_requests(tiny, tiny_endpoint):
    class Broken(Exception):
        pass

    @sgl.function
    def f(s):
        s += "abc" + sgl.gen("a", max_tokens=450)
        for child in s.fork(3):
            child += sgl.gen("b", max_tokens=450)
        time.sleep(0.1)
        raise Broken

    for call in (lambda: f.run(backend=tiny_endpoint, ignore_eos=True),
                 lambda: f.run(backend=tiny_endpoint, ignore_eos=True, stream=True).sync()):  # fmt: skip
        with pytest.raises(Broken):
            call()
        wait_until(lambda: not tiny.stats()["running"] + tiny.stats()["waiting"])
    engines.check_idle(tiny)


def test_a_full_queue_is_waited_for(tiny):
    """More programs at once than the server takes: 429s are tried again, streams too, and all end."""
    f = sgl.function(lambda s, i: s.__iadd__(f"{i} " + sgl.gen("a", max_tokens=4)))
    with Server(tiny, port=0, limits=Limits(max_queued=0)) as server:
        server._service.admission.limit = 2
        endpoint = sgl.RuntimeEndpoint(server.url, parallelism=6, retry_wait=0.01, max_retries=50)
        states = [f.run(i, backend=endpoint, ignore_eos=True, stream=i % 2 == 0) for i in range(4)]
        assert [state.get_meta_info("a")["completion_tokens"] for state in states] == [4] * 4


def test_no_server_and_a_wrong_key(endpoint):
    with pytest.raises(ConnectionError, match="no server"):
        sgl.RuntimeEndpoint("http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match="401"):
        sgl.RuntimeEndpoint(endpoint.base_url, "wrong")
