"""Whatever is sent: an answer in time, never a 5xx, and an engine that is as it was.

MINISGL_FUZZ=2000 sends that many requests to each of the tests instead of a few hundred in all.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason='needs pip install "minisgl[test]"')
pytest.importorskip("starlette", reason='needs pip install "minisgl[server]"')
pytest.importorskip("prometheus_client", reason='needs pip install "minisgl[server]"')

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl import Server
from minisgl.server_jobs import Limits

from . import engines
from .http_client import Answer, call, get, wait_until

REQUESTS = int(os.environ.get("MINISGL_FUZZ", "150"))
QUIET = {
    "deadline": None,
    "database": None,
    "derandomize": "MINISGL_FUZZ" not in os.environ,
    "suppress_health_check": list(HealthCheck),
}
EXPECTED = {200, 400, 401, 404, 405, 413, 415, 429}
LONGEST = 120.0  # seconds for an answer: a hang, however busy the machine is


@pytest.fixture(scope="module")
def runtime():  # a context so short that no answer is long
    with engines.make(kv_capacity=600, max_context=48, max_running_requests=8, chunk_size=32) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def server(runtime):
    limits = Limits(max_queued=64, max_body=100_000, max_prompts=8, max_grammar=3000, body_timeout=2.0)
    with Server(runtime, port=0, limits=limits) as server:
        yield server
    engines.check_idle(runtime)


def check_consistent(server, runtime):
    wait_until(lambda: server._service.admission.live == 0)
    wait_until(lambda: not runtime.stats()["running"] + runtime.stats()["waiting"])
    engines.check_idle(runtime)
    assert get(server.url, "/health_generate").status == 200


def check(answer: Answer, begin: float) -> None:
    assert answer.status in EXPECTED, (answer.status, answer.body[:500])
    assert time.monotonic() - begin < LONGEST
    if answer.status != 200:
        assert answer.error
    elif answer.headers["Content-Type"].startswith("text/event-stream"):
        assert answer.body.endswith(b"data: [DONE]\n\n") and b"internal" not in answer.body
    elif "json" in answer.headers["Content-Type"]:
        assert answer.json is not None


# ---- bodies that are nearly right -----

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["auto", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer"])},
    optional={"content": st.none() | st.text(max_size=6) | st.just([{"type": "text", "text": "b"}]),
              "name": st.text(max_size=3),
              "tool_calls": st.just([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}])},
)  # fmt: skip
SCHEMA = st.sampled_from([
    {}, {"type": "object"}, {"type": "integer"}, {"enum": ["a", "b"]}, {"const": 1}, {"type": "x"}, {"$ref": "#"},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]}, {"not": {}},
    {"type": "string", "pattern": "("}, {"minimum": 5, "maximum": 1}, {"type": "array", "items": {"type": "null"}},
])  # fmt: skip
REGEX = st.sampled_from(["", "a", "[a-z]{3}", "(", "a**", "(?<=a)b", "(a|b)*", "\\d+", "[^\\x00-\\x7f]", "^a$",
                         "(a)\\1", "x{9999}"])  # fmt: skip
TOOL = st.builds(
    lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
    st.sampled_from(["f", "g", "", "a b"]), st.none() | SCHEMA,
)  # fmt: skip
SAMPLING = {
    "temperature": st.sampled_from([0, 0.5, 1, 2, 1e-9, 1e30, -1]), "top_p": st.sampled_from([0, 0.5, 1, 1.1]),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=3), "seed": st.integers(),
    "frequency_penalty": st.sampled_from([0, 2, -2, 3]), "presence_penalty": st.floats(-3, 3),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "65", "319", "320", "x"]), st.floats(-200, 200), max_size=2),
    "top_k": st.sampled_from([-1, 0, 1, 5, 10**6]), "min_p": st.floats(-0.1, 1.1), "ignore_eos": st.booleans(),
    "repetition_penalty": st.sampled_from([1, 0.5, 2, 0, 3]), "regex": REGEX, "json_schema": SCHEMA,
    "stop_token_ids": st.lists(st.integers(-1, 330), max_size=3), "stop_regex": REGEX,
    "skip_special_tokens": st.booleans(), "no_stop_trim": st.booleans(), "n": st.sampled_from([1, 2, 5, 0, 129]),
}  # fmt: skip
WIRE = {
    **SAMPLING, "stream": st.booleans(), "min_tokens": st.integers(-1, 9), "max_tokens": st.integers(-1, 60),
    "stream_options": st.sampled_from([{}, {"include_usage": True}, {"x": 1}, None]),
    "model": st.sampled_from(["default", "x"]),
    "response_format": st.builds(lambda kind, schema: {"type": kind, "json_schema": {"schema": schema}},
                                 st.sampled_from(["text", "json_object", "json_schema", "x"]), SCHEMA),
    "rid": st.sampled_from(["r", ""]), "priority": st.integers(), "user": st.text(max_size=3), "store": st.booleans(),
}  # fmt: skip
TEXT = st.text(min_size=0, max_size=60)
IDS = st.lists(st.integers(-1, 325), max_size=50)
BODIES = {
    "/v1/chat/completions": ({"messages": st.lists(MESSAGE, max_size=3)}, {
        **WIRE, "logprobs": st.booleans(), "top_logprobs": st.integers(-1, 21), "tools": st.lists(TOOL, max_size=2),
        "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
        "parallel_tool_calls": st.booleans(), "max_completion_tokens": st.integers(0, 60),
        "continue_final_message": st.booleans()}),
    "/v1/completions": ({"prompt": TEXT | IDS | st.lists(TEXT, max_size=4) | st.lists(IDS, max_size=4)}, {
        **WIRE, "echo": st.booleans(), "logprobs": st.integers(-1, 21), "best_of": st.integers(0, 3)}),
    "/generate": ({}, {
        "text": TEXT | st.lists(TEXT, max_size=4), "input_ids": IDS | st.lists(IDS, max_size=4),
        "stream": st.booleans(),
        "sampling_params": st.fixed_dictionaries({}, optional={**SAMPLING, "max_new_tokens": st.integers(-1, 60)}),
        "return_logprob": st.booleans(), "logprob_start_len": st.integers(-2, 60),
        "top_logprobs_num": st.integers(-1, 400), "rid": st.text(max_size=2),
        "return_text_in_logprobs": st.booleans()}),
}  # fmt: skip


@st.composite
def requests(draw) -> tuple[str, Any]:
    path = draw(st.sampled_from(list(BODIES)))
    required, optional = BODIES[path]
    chosen = draw(st.lists(st.sampled_from(list(optional)), max_size=5, unique=True))
    body = {name: draw(strategy) for name, strategy in required.items()}
    body |= {name: draw(optional[name]) for name in chosen}
    if draw(st.integers(0, 3)) == 0:  # and one thing that is anything
        body[draw(st.sampled_from([*required, *optional, "x"]))] = draw(ANYTHING)
    return path, body


def test_bodies_that_are_nearly_right(server, runtime):
    statuses = {}

    @settings(max_examples=REQUESTS, **QUIET)
    @given(requests())
    def send(request):
        path, body = request
        begin = time.monotonic()
        answer = call(server.url, "POST", path, json.dumps(body).encode(), timeout=LONGEST)
        check(answer, begin)
        statuses[answer.status] = statuses.get(answer.status, 0) + 1

    send()
    check_consistent(server, runtime)
    assert statuses[200] > 3 and statuses[400] > 10, statuses  # the bodies are random: 150 once had 10 right ones


def test_bytes(server, runtime):
    """Bodies of any bytes, and connections that speak no HTTP."""
    rng = random.Random(1)
    pieces = [b"{", b"}", b"[", b'"', b"text", b":", b",", b"\\ud800", b"\xff", b"null", b"1e999", b"NaN", b"0" * 50]
    for i in range(REQUESTS // 3):
        body = b"".join(rng.choices(pieces, k=rng.randrange(12)))
        begin = time.monotonic()
        check(call(server.url, "POST", list(BODIES)[i % 3], body, timeout=LONGEST), begin)
    host, port = server.url.removeprefix("http://").split(":")
    negative = b"POST /generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n"
    for garbage in (b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", negative, b"x" * 70000):
        with socket.create_connection((host, int(port)), 10) as sock:
            try:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                assert b" 5" not in sock.recv(4096)[:13]
            except ConnectionError:
                pass
    check_consistent(server, runtime)


# ---- the OpenAPI document -----


def test_schemathesis(server, runtime):
    """Requests made of the document, right ones and wrong ones."""
    schemathesis = pytest.importorskip("schemathesis", reason='needs pip install "minisgl[dev]"')
    document = get(server.url, "/openapi.json").json
    schema = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= set(BODIES)
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            simple = operation.path not in BODIES
            if simple and mode is schemathesis.GenerationMode.NEGATIVE:
                continue  # there is nothing to be wrong

            @settings(max_examples=3 if simple else max(REQUESTS // 12, 10), **QUIET)
            @given(operation.as_strategy(generation_mode=mode))
            def send(case):
                begin = time.monotonic()
                response = case.call(base_url=server.url, timeout=LONGEST)
                assert response.status_code in EXPECTED, (response.status_code, response.text[:500])
                assert time.monotonic() - begin < LONGEST

            send()
    check_consistent(server, runtime)
