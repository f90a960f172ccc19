"""The HTTP server over a tiny model: SGLang's API, limits, errors, clients that leave or dawdle, the key, the end."""

from __future__ import annotations

import asyncio
import gc
import http.client
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason='needs pip install "minisgl[server]"')
pytest.importorskip("uvicorn", reason='needs pip install "minisgl[server]"')
pytest.importorskip("prometheus_client", reason='needs pip install "minisgl[server]"')

from minisgl import Server
from minisgl.server_jobs import Limits

from . import engines
from .http_client import call, events, get, open_socket, post, wait_until

GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": 400}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def runtime():
    with engines.make(kv_capacity=3000, max_running_requests=8, overlap=True) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def server(runtime):
    limits = Limits(max_queued=40, max_body=200_000, max_prompts=20, max_grammar=2000, body_timeout=0.5)
    with Server(runtime, port=0, limits=limits) as server:
        yield server


@pytest.fixture
def url(server, runtime):
    """The server's; afterwards nothing runs, nothing is locked, and the queue's count is back at zero."""
    yield server.url
    wait_until(lambda: not runtime.stats()["running"] + runtime.stats()["waiting"])
    wait_until(lambda: server._service.admission.live == 0)
    engines.check_idle(runtime)
    wait_until(lambda: not server._service.jobs)  # its coroutine ends a moment after the last byte


@pytest.fixture
def slow_engine(runtime, monkeypatch):
    """A step takes at least 10 ms, so that a long answer takes seconds on any machine."""
    real = runtime._engine.runner.launch

    def slowed(batch):
        time.sleep(0.01)
        return real(batch)

    monkeypatch.setattr(runtime._engine.runner, "launch", slowed)


def texts(runtime, prompts, params):
    return [reply["text"] for reply in runtime.generate(prompts, params)]


# ---- /generate -----


def test_generate_is_runtime_generate(url, runtime):
    body = {"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 6}, "rid": "my id"}
    reply = post(url, "/generate", body).json
    expected = runtime.generate("abc", body["sampling_params"])
    assert {k: reply[k] for k in ("text", "output_ids")} == {k: expected[k] for k in ("text", "output_ids")}
    meta = reply["meta_info"]
    assert meta["id"] == "my id" and meta["finish_reason"] == {"type": "length"}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 6) and 0 < meta["ttft"] <= meta["e2e_latency"]
    ids = runtime.tokenizer.encode("abc").tolist()
    again = post(url, "/generate", {**body, "text": None, "input_ids": ids}).json
    assert again["text"] == reply["text"] and again["meta_info"]["cached_tokens"] == 2


def test_generate_lists_and_n(url, runtime):
    params = {**GREEDY, "max_new_tokens": 4}
    prompts = ["abc", "de", "f"]
    replies = post(url, "/generate", {"text": prompts, "sampling_params": params, "rid": "group"}).json
    assert [reply["text"] for reply in replies] == texts(runtime, prompts, params)
    seeded = {"max_new_tokens": 4, "seed": 7, "n": 2, "ignore_eos": True}
    replies = post(url, "/generate", {"text": prompts, "sampling_params": seeded}).json
    assert [reply["text"] for reply in replies] == texts(runtime, prompts, seeded)
    each = [{**params, "max_new_tokens": n} for n in (1, 2, 3)]
    body = {
        "text": prompts,
        "sampling_params": each,
        "rid": ["x", "y", "z"],
        "return_logprob": [True, False, True],
        "logprob_start_len": [0, -1, -1],
        "top_logprobs_num": [2, 0, 0],
    }
    metas = [reply["meta_info"] for reply in post(url, "/generate", body).json]
    assert [meta["id"] for meta in metas] == ["x", "y", "z"]
    assert [meta["completion_tokens"] for meta in metas] == [1, 2, 3]
    assert [len(meta.get("output_token_logprobs", ())) for meta in metas] == [1, 0, 3]
    assert len(metas[0]["input_token_logprobs"]) == 3 and len(metas[0]["output_top_logprobs"][0]) == 2
    for name, value in {"sampling_params": each[:2], "rid": ["a"], "return_logprob": [True]}.items():
        answer = post(url, "/generate", {"text": prompts, name: value})
        assert answer.status == 400 and answer.error["param"] == name


def test_generate_streams_growing_text(url, runtime):
    params = {**GREEDY, "max_new_tokens": 30}
    chunks = list(events(url, "/generate", {"text": "abc", "sampling_params": params}))
    whole = runtime.generate("abc", params)
    assert chunks[-1]["text"] == whole["text"] and chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length"}
    for before, chunk in itertools.pairwise(chunks):
        assert chunk["text"].startswith(before["text"]) and before["meta_info"]["finish_reason"] is None
    scored = {"text": "abc", "sampling_params": params, "return_logprob": True, "return_text_in_logprobs": True}
    entries = list(events(url, "/generate", scored))[-1]["meta_info"]["output_token_logprobs"]
    assert len(entries) == 30 and [token for _, token, _ in entries] == whole["output_ids"]


def test_generate_streams_several_at_once(url, runtime):
    params = {"max_new_tokens": 12, "seed": 3, "n": 2, "ignore_eos": True}
    prompts = ["abc", "de", "f"]
    last = dict.fromkeys(range(6), "")
    for chunk in events(url, "/generate", {"text": prompts, "sampling_params": params}):
        assert chunk["text"].startswith(last[chunk["index"]])
        last[chunk["index"]] = chunk["text"]
    assert list(last.values()) == texts(runtime, prompts, params)


def test_the_lists_of_a_streams_chunk_have_one_length():
    """The engine's thread appends to them while they are copied, one after the other."""
    from minisgl.server_native import _events

    entries = [(-0.5, token, None) for token in range(9)]
    longer = {"output_token_logprobs": entries[:5], "output_top_logprobs": [entries[:1]] * 4, "completion_tokens": 3}
    shorter = {"output_token_logprobs": entries[:2], "output_top_logprobs": [entries[:1]] * 3, "completion_tokens": 3}

    async def chunk(meta, end):
        async def changes():
            yield [(0, SimpleNamespace(read=0, sink=sink), "", end)]

        sink = SimpleNamespace(ids=[0, 1, 2], text="", meta_info=lambda _: dict(meta))
        async for data in _events(SimpleNamespace(changes=changes), False):
            return json.loads(data.removeprefix(b"data: "))

    for meta, length in ((longer, 3), (shorter, 2)):
        reply = asyncio.run(chunk(meta, False))
        told = reply["meta_info"]
        lists = reply["output_ids"], told["output_token_logprobs"], told["output_top_logprobs"]
        assert [*map(len, lists), told["completion_tokens"]] == [length] * 4


def test_stop_strings_and_their_text_in_a_stream(url, runtime):
    text = runtime.generate("abc", {**GREEDY, "max_new_tokens": 20})["text"]
    stop = text[8:11]
    body = {"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 20, "stop": [stop]}}
    last = list(events(url, "/generate", body))[-1]
    assert last["text"] == text[: text.index(stop)] and last["meta_info"]["finish_reason"]["matched"] == stop


def test_scoring_only(url, runtime):
    body = {"text": "abcdef", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 2}
    reply = post(url, "/generate", body).json
    assert reply["text"] == "" and len(reply["meta_info"]["input_token_logprobs"]) == 4


# ---- cases of runtime.json -----


def test_near_context_limit_crash(url, runtime):
    """case near-context-limit-crash: context-1 gives one token, more is refused with both numbers."""
    limit = runtime.scheduler.max_context
    for more in ({}, {"max_tokens": 100_000}):
        body = {"prompt": [1] * (limit - 1), "ignore_eos": True, **more}
        answer = post(url, "/v1/completions", body)
        assert answer.status == 200 and answer.json["choices"][0]["finish_reason"] == "length"
        assert answer.json["usage"]["completion_tokens"] == 1
        for n in (limit, limit + 1):
            error = post(url, "/v1/completions", {"prompt": [1] * n, **more})
            assert error.status == 400 and error.error["type"] == "invalid_request_error"
            assert str(n) in error.error["message"] and str(limit - 1) in error.error["message"]
            assert error.error["code"] == "context_length_exceeded"


def test_finish_chunk_drops_last_text(url):
    """case finish-chunk-drops-last-text: the only token's text comes before finish_reason."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logit_bias": {"65": 100}}
    choices = [chunk["choices"][0] for chunk in events(url, "/v1/chat/completions", body)]
    assert [c["delta"].get("content") for c in choices] == ["b", None]
    assert [c["finish_reason"] for c in choices] == [None, "length"]


def test_stream_usage_null_and_options_empty(url):
    """cases stream-usage-null and stream-options-empty."""
    for path, body in {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
        "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    }.items():
        *chunks, last = events(url, path, {**body, "ignore_eos": True, "stream_options": {"include_usage": True}})
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        for options in ({}, None, {"include_usage": False}):
            chunks = list(events(url, path, {**body, "stream_options": options}))
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
        assert post(url, path, {**body, "stream_options": {}}).error["param"] == "stream_options"


def test_neg_inf_logprob_json(url):
    """case neg-inf-logprob-json: alternatives that a mask forbids have finite numbers."""
    for more in ({"regex": "[ab]{3}"}, {"top_k": 1}, {"logit_bias": {"65": -1e9, "66": 1e9}}):
        answer = post(url, "/v1/completions", {"prompt": "abc", "max_tokens": 3, "logprobs": 5, **more})
        assert answer.status == 200, answer.body
        logprobs = answer.json["choices"][0]["logprobs"]
        values = [*logprobs["token_logprobs"], *(v for top in logprobs["top_logprobs"] for v in top.values())]
        assert len(values) > 3 and all(-9999.0 <= v <= 0 for v in values)
        scored = {"return_logprob": True, "top_logprobs_num": 5}
        reply = post(url, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 3, **more}, **scored})
        assert reply.status == 200 and b"Infinity" not in reply.body


def test_disconnect_nonstream_not_cancelled(url, runtime, slow_engine):
    """case disconnect-nonstream-not-cancelled: a plain request is aborted, too."""
    for path, body in {
        "/generate": {"text": "abc", "sampling_params": LONG},
        "/v1/completions": {"prompt": "abc", "max_tokens": 400, "ignore_eos": True},
        "/v1/chat/completions": {**CHAT, "max_tokens": 400, "n": 3, "ignore_eos": True},
    }.items():
        before = runtime.stats()["output_tokens"]
        sock = open_socket(url, path, body)
        wait_until(lambda: runtime.stats()["running"])
        sock.close()
        wait_until(lambda: not runtime.stats()["running"])
        assert runtime.stats()["output_tokens"] - before < 300


def test_disconnect_keeps_generating(url, runtime, slow_engine):
    """case disconnect-keeps-generating: a stream's sequence ends a few steps after its client left."""
    before = runtime.stats()["output_tokens"]
    sock = open_socket(url, "/generate", {"text": "abc", "sampling_params": LONG, "stream": True})
    received = b""
    while received.count(b"data: ") < 5:
        received += sock.recv(4096)
    sock.close()
    wait_until(lambda: not runtime.stats()["running"])
    assert runtime.stats()["output_tokens"] - before < 300
    engines.check_idle(runtime)


def test_detok_leaks_prompt_on_partial_utf8(url, runtime):
    """case detok-leaks-prompt-on-partial-utf8: a prompt that ends inside a character; only generated text comes."""
    pepper = "\U0001f336"
    table = {data: i for i, data in enumerate(runtime.tokenizer.all_token_bytes()) if len(data) == 1}
    prompt = [table[bytes([byte])] for byte in b"Hello world " + pepper.encode()[:2]]
    bias = {str(table[pepper.encode()[2:3]]): 100, str(table[b"!"]): -100}
    body = {"prompt": prompt, "max_tokens": 1, "logit_bias": bias}
    text = "".join(c["choices"][0]["text"] for c in events(url, "/v1/completions", body))
    assert "Hello" not in text and text == post(url, "/v1/completions", body).json["choices"][0]["text"]
    whole = [*prompt, table[pepper.encode()[2:3]]]
    bias = {str(table[pepper.encode()[3:]]): 100}
    body = {"prompt": whole, "max_tokens": 1, "logit_bias": bias}
    assert "".join(c["choices"][0]["text"] for c in events(url, "/v1/completions", body)) == pepper


def test_missing_chat_template(tmp_path):
    """case missing-chat-template-500, over HTTP."""
    from . import tiny_models

    folder = tiny_models.make("llama2", tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    from minisgl import Runtime

    with Runtime(folder, kv_capacity=300, device="cpu") as runtime, Server(runtime, port=0) as server:
        answer = post(server.url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert answer.status == 400 and "/v1/completions" in answer.error["message"]
        assert post(server.url, "/v1/completions", {"prompt": "abc", "max_tokens": 2}).status == 200


def test_a_model_without_tokenizer_streams_its_ids(tmp_path, monkeypatch):
    from minisgl import Runtime

    from . import tiny_models

    folder = tiny_models.make("llama2", tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with Runtime(folder, kv_capacity=300, device="cpu") as runtime, Server(runtime, port=0) as server:
        real = runtime._engine.runner.launch
        monkeypatch.setattr(runtime._engine.runner, "launch", lambda batch: (time.sleep(0.02), real(batch))[1])
        body = {"input_ids": [3, 4, 5], "sampling_params": {**GREEDY, "max_new_tokens": 20}}
        replies = list(events(server.url, "/generate", body))
        assert len(replies) > 5 and [r["output_ids"] for r in replies] == sorted(r["output_ids"] for r in replies)
        assert [r["meta_info"]["finish_reason"] is None for r in replies] == [True] * (len(replies) - 1) + [False]
        assert replies[-1]["output_ids"] == post(server.url, "/generate", body).json["output_ids"]
        assert post(server.url, "/v1/completions", {"prompt": "a"}).status == 400


# ---- errors -----

WRONG = {
    "not JSON": ("/v1/completions", b"{", None),
    "not an object": ("/v1/completions", b"[1]", None),
    "empty": ("/generate", b"", None),
    "deep": ("/generate", b"[" * 100_000, None),
    "half a surrogate pair": ("/generate", b'{"text": "\\ud800"}', None),
    "not UTF-8": ("/generate", b'{"text": "\xff"}', None),
    "unknown": ("/v1/completions", {"prompt": "a", "max_new_tokens": 3}, "max_new_tokens"),
    "missing": ("/v1/completions", {"max_tokens": 3}, "prompt"),
    "type": ("/v1/completions", {"prompt": "a", "max_tokens": "3"}, "max_tokens"),
    "bool": ("/v1/completions", {"prompt": "a", "n": True}, "n"),
    "null prompt": ("/v1/completions", {"prompt": None}, "prompt"),
    "no prompts": ("/v1/completions", {"prompt": []}, "prompt"),
    "empty prompt": ("/v1/completions", {"prompt": ["a", ""]}, "prompt"),
    "mixed prompt": ("/v1/completions", {"prompt": ["a", 1]}, None),
    "token": ("/v1/completions", {"prompt": [99999]}, None),
    "negative token": ("/v1/completions", {"prompt": [-1]}, None),
    "huge": ("/v1/completions", b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", None),
    "temperature": ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
    "top_k": ("/v1/completions", {"prompt": "a", "top_k": 0}, "top_k"),
    "stop": ("/v1/completions", {"prompt": "a", "stop": [""]}, None),
    "bias": ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    "bias of no token": ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
    "min_tokens": ("/v1/completions", {"prompt": "a", "min_tokens": 50, "max_tokens": 2}, None),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 21}, "prompt"),
    "sequences": ("/v1/completions", {"prompt": ["a"] * 20, "n": 3}, None),
    "grammar": ("/v1/completions", {"prompt": "a", "regex": "foo**"}, "regex"),
    "lookbehind": ("/v1/completions", {"prompt": "a", "regex": "(?<=a)b"}, None),
    "back-reference": ("/v1/completions", {"prompt": "a", "regex": "(a)\\1"}, None),
    "large grammar": ("/v1/completions", {"prompt": "a", "regex": "a" * 2001}, "regex"),
    "large schema": ("/v1/completions", {"prompt": "a", "json_schema": {"const": "a" * 2001}}, "json_schema"),
    "schema": ("/v1/completions", {"prompt": "a", "json_schema": {"type": "no type"}}, "json_schema"),
    "two grammars": ("/v1/completions", {"prompt": "a", "regex": "a", "json_schema": {}}, None),
    "stops": ("/v1/completions", {"prompt": "a", "stop": [str(i) for i in range(65)]}, "stop"),
    "native stops": ("/generate", {"text": "a", "sampling_params": {"stop": [f"a{i}" for i in range(65)]}}, "stop"),
    "best_of": ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of"),
    "suffix": ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    "no messages": ("/v1/chat/completions", {"messages": []}, "messages"),
    "role": ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
    "image": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    "top_logprobs": ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs"),
    "audio": ("/v1/chat/completions", {**CHAT, "modalities": ["audio"]}, None),
    "functions": ("/v1/chat/completions", {**CHAT, "functions": []}, "functions"),
    "tool_choice": ("/v1/chat/completions", {**CHAT, "tool_choice": "auto"}, "tool_choice"),
    "response_format": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, None),
    "template": ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"chat_template": "x"}},
                 "chat_template_kwargs"),
    "template self": ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    "long stops": ("/v1/completions", {"prompt": "a", "stop": ["x" * 5000, "y" * 5000]}, "stop"),
    "one id twice": ("/generate", {"text": ["a", "b"], "rid": ["same", "same"]}, "rid"),
    "top_logprobs_num": ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 129},
                         "top_logprobs_num"),
    "two prompts": ("/generate", {"text": "a", "input_ids": [1]}, "text"),
    "no prompt": ("/generate", {}, "text"),
    "sampling_params": ("/generate", {"text": "a", "sampling_params": {"max_tokens": 3}}, None),
    "n": ("/generate", {"text": "a", "sampling_params": {"n": 1000}}, "n"),
    "logprob_start_len": ("/generate", {"text": "a", "logprob_start_len": 5, "return_logprob": True},
                          "logprob_start_len"),
    "embeds": ("/generate", {"text": "a", "input_embeds": []}, "input_embeds"),
    "rid": ("/abort_request", {}, "rid"),
    "embeddings": ("/v1/embeddings", {"input": "a"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_a_400_that_names_it(url, name):
    path, body, param = WRONG[name]
    answer = post(url, path, body)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"
    if param is not None:
        assert answer.error["param"] == param, answer.error


def test_other_refusals(url):
    assert get(url, "/nothing").status == 404 and get(url, "/nothing").error
    assert get(url, "/v1/models/nothing").error["code"] == "model_not_found"
    assert post(url, "/v1/completions", {"prompt": "a", "model": "nothing"}).status == 404
    answer = get(url, "/generate")
    assert answer.status == 405 and answer.error and answer.headers["Allow"] == "POST"
    assert call(url, "PUT", "/health").headers["Allow"] == "GET, HEAD" and call(url, "HEAD", "/health").status == 200
    assert call(url, "POST", "/generate", b"{}", Content_Type="text/plain").status == 400
    big = b'{"text": "' + b"a" * 200_000 + b'"}'
    assert post(url, "/generate", big).status == 413 and post(url, "/generate", big).error


CROWDS = {
    "lists": ("/v1/completions", b'{"prompt": [' + b"[1]," * 600_000 + b"[1]]}"),
    "objects": ("/v1/chat/completions", b'{"messages": [' + b"{}," * 600_000 + b"{}]}"),
    "names": ("/v1/completions", b'{"prompt": "a"' + b"".join(b',"k%d":1' % i for i in range(300_000)) + b"}"),
    "numbers": ("/generate", b'{"input_ids": [' + b"1," * 1_200_000 + b"1]}"),
    "quotes": ("/generate", b'{"text": [' + b'""' * 1_200_000 + b'""]}'),
}


@pytest.mark.parametrize("name", CROWDS)
def test_a_body_of_too_many_values_is_not_parsed(runtime, name, monkeypatch):
    """Its bytes would be allowed, but no stream goes on while it is parsed."""
    path, body = CROWDS[name]
    with Server(runtime, port=0) as server:
        for model in ("CompletionRequest", "ChatRequest", "GenerateRequest"):
            monkeypatch.setattr(f"minisgl.server_schemas.{model}.model_validate_json", None)
        answer = post(server.url, path, body)
        assert answer.status == 413 and "values" in answer.error["message"]


def test_a_large_body_of_few_values_is_parsed(runtime):
    text = 'a "quoted", [bracketed]: text\\' * 30_000
    with Server(runtime, port=0) as server:
        answer = post(server.url, "/generate", {"text": text, "sampling_params": {"max_new_tokens": 1}})
        assert answer.status == 400 and "tokens" in answer.error["message"]


def test_a_thousand_wrong_entries_are_one_error():
    from pydantic import ValidationError

    from minisgl import server_schemas as schemas

    for model, body in {
        schemas.CompletionRequest: {"prompt": "a", "stop": [""] * 1000},
        schemas.ChatRequest: {"messages": [{}] * 1000},
        schemas.GenerateRequest: {"text": [1] * 1000, "sampling_params": [1] * 1000},
    }.items():
        with pytest.raises(ValidationError) as raised:
            model.model_validate_json(json.dumps(body))
        assert raised.value.error_count() < 10


def test_an_echo_is_decoded_after_the_length_check_and_not_on_the_loop(url, runtime, monkeypatch):
    tokenizer = runtime.tokenizer
    threads = []
    real = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda *a, **k: (threads.append(threading.current_thread()), real(*a))[1])
    long = [1] * 2000  # a body of more than QUICK_BODY bytes
    assert post(url, "/v1/completions", {"prompt": long, "echo": True, "max_tokens": 1}).status == 400
    assert not threads
    ids = tokenizer.encode("abc").tolist()
    body = {"prompt": ids, "echo": True, "max_tokens": 1, "user": "x" * 5000}
    assert post(url, "/v1/completions", body).json["choices"][0]["text"].startswith("abc")
    assert [thread.name.partition("_")[0] for thread in threads] == ["minisgl-prepare"]


def test_a_body_that_does_not_arrive_or_has_no_length(url):
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), 20) as sock:
        sock.sendall(head + b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in sock.recv(4096)
    with socket.create_connection((host, int(port)), 20) as sock:
        sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        received = b""
        try:
            for _ in range(10):
                sock.sendall(b"8000\r\n" + b"a" * 0x8000 + b"\r\n")
        except OSError:
            pass  # it was refused before all of it was sent
        received = sock.recv(4096)
        assert b" 413 " in received


@pytest.mark.parametrize("more", [b"", b"X: "])
def test_headers_without_end(url, more):
    """Many headers, or one that goes on: refused, not collected."""
    host, port = url.removeprefix("http://").split(":")
    piece = b"X-A: " + b"a" * 1000 + b"\r\n" if not more else b"a" * 1000
    with socket.create_connection((host, int(port)), 20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + more)
        with pytest.raises(OSError):  # it is closed long before all of it was sent
            for _ in range(20_000):
                sock.sendall(piece)
    assert get(url, "/health", X_A="a" * 5000).status == 200


def test_health_generate_makes_one_sequence_for_all(url, runtime, slow_engine):
    before = runtime.stats()["requests"]
    with ThreadPoolExecutor(16) as pool:
        assert {a.status for a in pool.map(lambda _: get(url, "/health_generate"), range(16))} == {200}
    assert runtime.stats()["requests"] - before < 16


def test_a_full_queue_answers_429_and_empties(url, server, runtime, slow_engine):
    body = {"text": ["abc"] * 8, "sampling_params": LONG}
    socks = [open_socket(url, "/generate", body) for _ in range(6)]  # 48 = 8 running + 40 queued
    wait_until(lambda: server._service.admission.live == 48)
    small = {"/generate": {"text": "a"}, "/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "a"}}
    for path, more in small.items():
        answer = post(url, path, more)
        assert answer.status == 429 and answer.error["code"] == "queue_full"
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert get(url, "/health").status == 200
    for sock in socks:
        sock.close()
    wait_until(lambda: server._service.admission.live == 0)
    assert post(url, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}).status == 200


def test_an_id_in_use_is_refused_and_abort_ends_it(url, runtime, slow_engine):
    done = []
    body = {"text": "abc", "sampling_params": LONG, "rid": "one"}
    thread = threading.Thread(target=lambda: done.append(post(url, "/generate", body)))
    thread.start()
    wait_until(lambda: runtime.stats()["running"])
    again = post(url, "/generate", body)
    assert again.status == 400 and again.error["param"] == "rid"
    assert post(url, "/abort_request", {"rid": "one"}).json["success"]
    thread.join()
    assert done[0].json["meta_info"]["finish_reason"]["type"] == "abort"
    sock = open_socket(url, "/generate", {**body, "stream": True})
    wait_until(lambda: runtime.stats()["running"])
    assert post(url, "/abort_request", {"abort_all": True}).status == 200
    wait_until(lambda: not runtime.stats()["running"])
    assert post(url, "/abort_request", {"rid": "nobody"}).status == 200
    sock.close()


def test_an_engine_error_is_told_and_the_server_goes_on(url, runtime, monkeypatch, caplog):
    real = runtime._engine.runner.launch

    def broken(batch):
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(runtime._engine.runner, "launch", broken)
    answer = post(url, "/generate", {"text": "abc", "sampling_params": LONG})
    assert answer.status == 500 and answer.error["type"] == "server_error"
    last = list(events(url, "/generate", {"text": "abc", "sampling_params": LONG}))[-1]
    assert last["error"]["code"] == "engine_error"
    monkeypatch.setattr(runtime._engine.runner, "launch", real)
    assert post(url, "/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 2}}).status == 200


def test_a_refusal_is_no_end_that_the_queue_counts(url, server):
    """Retry-After is computed from how often sequences end: what was refused says nothing about that."""
    server._service.admission._ends.clear()
    for _ in range(5):
        assert post(url, "/generate", {"text": ["a"] * 3, "sampling_params": {"regex": "("}}).status == 400
    assert not server._service.admission._ends and server._service.admission.live == 0
    post(url, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}})
    wait_until(lambda: len(server._service.admission._ends) == 1)


@pytest.mark.parametrize("order", [{"abort_all": True}, {"rid": "mine"}], ids=["all", "by name"])
def test_an_abort_reaches_what_is_being_prepared(url, runtime, order, monkeypatch):
    """It is not in the engine yet, and must not begin to run when it is ready."""
    begun, go = threading.Event(), threading.Event()
    real = runtime._preparer.prepare

    def slow(*args, **options):
        begun.set()
        go.wait(20)
        return real(*args, **options)

    monkeypatch.setattr(runtime._preparer, "prepare", slow)
    done = []
    body = {"text": "a", "sampling_params": {**LONG, "regex": "[ab]{400}"}, "rid": "mine"}
    thread = threading.Thread(target=lambda: done.append(post(url, "/generate", body)))
    thread.start()
    assert begun.wait(20)
    assert post(url, "/abort_request", order).status == 200
    go.set()
    thread.join()
    assert done[0].json["meta_info"]["finish_reason"]["type"] == "abort"
    assert done[0].json["meta_info"]["completion_tokens"] < 5


TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "properties": {"x": {"type": "string", "maxLength": 200, "minLength": 200}}, "required": ["x"]}}}  # fmt: skip


@pytest.mark.parametrize("by", ["abort_all", "rid"])
def test_an_abort_reaches_a_tool_turn_between_two_of_its_steps(url, runtime, by, monkeypatch):
    from minisgl.server_tools import Turn

    done, begun, go = [], threading.Event(), threading.Event()
    real = Turn._generate

    async def held(self, more, emit, kind):
        if "json_schema" in more:
            begun.set()
            await asyncio.to_thread(go.wait, 20)
        return await real(self, more, emit, kind)

    monkeypatch.setattr(Turn, "_generate", held)
    body = {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 300, "rid": "turn", "n": 2}
    thread = threading.Thread(target=lambda: done.append(post(url, "/v1/chat/completions", body)))
    thread.start()
    assert begun.wait(20)
    order = {"abort_all": True} if by == "abort_all" else {"rid": "turn"}
    assert post(url, "/abort_request", order).status == 200
    go.set()
    thread.join()
    assert [choice["finish_reason"] for choice in done[0].json["choices"]] == ["abort", "abort"]
    assert done[0].json["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_tool_call_at_the_end_of_the_context_is_cut(url, runtime, choice, stream):
    """Its punctuation is not the client's: where that does not fit any more the answer has reached its length."""
    body = {**CHAT, "tools": [TOOL], "tool_choice": choice, "max_tokens": 300}

    def ask(letters):
        messages = [{"role": "user", "content": "x" * letters}]
        if not stream:
            return post(url, "/v1/chat/completions", {**body, "messages": messages})
        return list(events(url, "/v1/chat/completions", {**body, "messages": messages}))[-1]

    refused = post(url, "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "x" * 600}]})
    tokens, limit = [int(word) for word in refused.error["message"].split() if word.isdecimal()][:2]
    room = 600 - (tokens - limit)  # letters, a token each
    for letters in (room, room - 20, room - 60):
        answer = ask(letters)
        reason = answer["choices"][0] if stream else answer.json["choices"][0]
        assert reason["finish_reason"] == "length", reason


# ---- clients that leave, and slow ones -----


def test_disconnects_at_random_moments_leave_nothing(url, runtime, server):
    """200 streams and plain requests closed at a random moment: nothing runs, nothing is locked, memory is flat."""
    rng = random.Random(0)
    bodies = [
        ("/generate", {"text": "abc", "sampling_params": LONG, "stream": True}),
        ("/generate", {"text": ["abc", "d"], "sampling_params": {**LONG, "n": 2}, "stream": True}),
        ("/generate", {"text": "a" * 300, "sampling_params": {**LONG, "max_new_tokens": 100}}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 300, "stream": True, "ignore_eos": True}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 300, "stream": True, "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}]}),
        ("/v1/completions", {"prompt": "abc", "regex": "[a-z]{300}", "max_tokens": 300, "stream": True}),
    ]  # fmt: skip

    def leave(count):
        for _ in range(count):
            sock = open_socket(url, *rng.choice(bodies))
            sock.settimeout(rng.choice([0.0005, 0.01, 0.03]))
            try:
                while rng.random() < 0.8 and sock.recv(2048):
                    pass
            except TimeoutError:
                pass
            sock.close()
        wait_until(lambda: server._service.admission.live == 0)
        wait_until(lambda: not runtime.stats()["running"])

    leave(60)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    leave(140)
    gc.collect()
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    grown = sum(stat.size_diff for stat in after.compare_to(before, "filename"))
    assert grown < 500_000, after.compare_to(before, "lineno")[:8]
    wait_until(lambda: len(asyncio.all_tasks(server._loop)) < 8)
    engines.check_idle(runtime)
    assert post(url, "/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 1}}).status == 200


def test_a_slow_reader_slows_nobody_and_holds_no_memory(url, runtime, server):
    body = {"text": "abc", "sampling_params": {**LONG, "n": 4}, "return_logprob": True, "stream": True}
    before = runtime.stats()["requests"]
    slow = [open_socket(url, "/generate", body, receive_buffer=4096) for _ in range(2)]
    wait_until(lambda: runtime.stats()["requests"] == before + 8, 60)  # their sequences end though nobody reads
    wait_until(lambda: server._service.admission.live == 0)  # and do not count in the queue any more
    assert len(server._service.jobs) == 2
    begin = time.monotonic()
    assert post(url, "/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 20}}).status == 200
    assert time.monotonic() - begin < 5
    for sock in slow:
        response = http.client.HTTPResponse(sock)
        response.begin()
        received = response.read()
        sock.close()
        assert received.endswith(b"data: [DONE]\n\n")
        assert received.count(b"data: {") < 1000  # of 1,600 tokens: what was written late was written together


def test_a_client_that_takes_nothing_is_given_up(runtime):
    from minisgl.server_http import Client, EventStream

    async def main():
        sent = []

        async def send(message):
            sent.append(message)
            if len(sent) > 2:
                await asyncio.Event().wait()

        async def receive():
            await asyncio.Event().wait()

        async def pieces():
            while True:
                yield b"data: x\n\n"

        from contextlib import AsyncExitStack

        held = AsyncExitStack()
        closed = []
        held.callback(closed.append, True)
        scope = {"type": "http", Client.KEY: Client()}
        await asyncio.wait_for(EventStream(pieces(), held, 0.1, check_every=0.05)(scope, receive, send), 10)
        assert closed and len(sent) == 3

    asyncio.run(main())


LOAD = """
import asyncio, json, sys
url, count, seconds, tokens = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
host, port = url.removeprefix("http://").split(":")

async def one(i, body):
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n"
                 b"Content-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(data) + data)
    text, usage, done, reason = "", None, False, None
    assert b" 200 " in await reader.readline()
    async for line in reader:
        assert not done or not line.startswith(b"data:"), "after [DONE]"
        if line.startswith(b"data: [DONE]"):
            done = True
        elif line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            usage = chunk["usage"]
            for choice in chunk["choices"]:
                assert reason is None
                text += choice["text"]
                reason = choice["finish_reason"]
    writer.close()
    assert done and reason == "length", (done, reason)
    return text, usage

async def client(i, results, end):
    loop = asyncio.get_running_loop()
    while True:
        body = {"prompt": f"client {i}: ", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}
        results.append((i, *await one(i, body)))
        if loop.time() > end:
            return

async def main():
    results = []
    end = asyncio.get_running_loop().time() + seconds
    await asyncio.gather(*(client(i, results, end) for i in range(count)))
    print(json.dumps(results))

asyncio.run(main())
"""


def test_256_streaming_clients_of_another_process(url, runtime, server):
    """Everybody gets their own text, in order, and the right usage."""
    server._service.admission.limit, before = 400, server._service.admission.limit
    try:
        command = [sys.executable, "-c", LOAD, url, "256", "0", "8"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        server._service.admission.limit = before
    assert out.returncode == 0, out.stderr[-2000:]
    results = json.loads(out.stdout)
    assert sorted(i for i, *_ in results) == list(range(256))
    params = {**GREEDY, "max_new_tokens": 8}
    expected = {i: texts(runtime, [f"client {i}: "], params)[0] for i in (0, 7, 99, 255)}
    for i, text, usage in results:
        assert text == expected.get(i, text)
        assert usage["prompt_tokens"] == len(f"client {i}: ") and usage["completion_tokens"] == 8
        assert usage["total_tokens"] == usage["prompt_tokens"] + 8
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


# ---- managing -----


def test_management_routes(url, runtime):
    assert get(url, "/health").status == 200 and get(url, "/health_generate").status == 200
    info = get(url, "/get_model_info").json
    assert info["model_path"] == runtime.name and info["is_generation"] and info["context_length"] == 512
    assert "messages" in info["chat_template"]["default"] and info["special_tokens"]["bos_token"] == "<|bos|>"
    info = get(url, "/get_server_info").json
    assert info["max_running_requests"] == 8 and info["kv_capacity"] == 3000
    post(url, "/generate", {"text": "abcdefgh", "sampling_params": {"max_new_tokens": 1}})
    assert runtime.stats()["kv_evictable"] > 0
    assert post(url, "/flush_cache", None).json["flushed_tokens"] > 0 and runtime.stats()["kv_evictable"] == 0
    assert get(url, "/flush_cache").json["success"]
    models = get(url, "/v1/models").json["data"]
    assert [model["id"] for model in models] == [runtime.name]
    assert get(url, f"/v1/models/{runtime.name}").json["max_model_len"] == 512
    assert get(url, "/openapi.json").json["openapi"].startswith("3.1")


def test_api_key(runtime):
    with Server(runtime, port=0, api_key="sécret") as server:
        for key in (None, "", "Bearer", "Bearer x", "Bearer secret", "Basic sécret", "sécret"):
            headers = {} if key is None else {"Authorization": key.encode().decode("latin-1")}
            for method, path in zip(("GET", "POST", "GET", "GET"), ("/v1/models", "/generate", "/metrics", "/nothing")):
                answer = call(server.url, method, path, **headers)
                assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer sécret".encode().decode("latin-1")}
        assert get(server.url, "/v1/models", **right).status == 200
        assert get(server.url, "/health").status == 200  # a load balancer has no key
    for wrong in ("", 5):
        with pytest.raises(ValueError, match="api_key"):
            Server(runtime, port=0, api_key=wrong)  # type: ignore[arg-type]


def test_beyond_loopback_without_a_key_is_a_warning(runtime):
    with pytest.warns(UserWarning, match="without an API key"), Server(runtime, "0.0.0.0", 0) as server:
        assert get(server.url, "/health").status == 200
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Server(runtime, "0.0.0.0", 0, api_key="k").close()
        Server(runtime, "localhost", 0).close()


def test_addresses_that_cannot_be_bound(runtime, server):
    with pytest.raises(OSError, match=f"{server.port}"):
        Server(runtime, port=server.port)
    with pytest.raises(ValueError, match="host"):
        Server(runtime, "no.such.host.invalid", 0)
    for port in (-1, 1 << 16, "80", True):
        with pytest.raises(ValueError, match="port"):
            Server(runtime, port=port)  # type: ignore[arg-type]


def test_servers_come_and_go(runtime):
    before = threading.active_count()
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    async def in_a_running_loop():
        with Server(runtime, port=0) as one, Server(runtime, port=0, model_names=["m"]) as two:
            assert one.url != two.url and "m" in repr(two)
            return await asyncio.to_thread(post, two.url, "/v1/completions", {"prompt": "a", "max_tokens": 1})

    assert asyncio.run(in_a_running_loop()).status == 200
    server = Server(runtime, port=0)
    server.close()
    server.close()
    assert not server.serving and "closed" in repr(server)
    wait_until(lambda: threading.active_count() <= before)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert runtime.generate("abc", {"max_new_tokens": 1})["text"] is not None


def test_closing_lets_what_runs_end(runtime, slow_engine):
    server = Server(runtime, port=0)
    done = []
    body = {"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 200}}
    threads = [
        threading.Thread(target=lambda: done.append(post(server.url, "/generate", body).json)),
        threading.Thread(target=lambda: done.append(list(events(server.url, "/generate", body))[-1])),
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: runtime.stats()["running"] == 2)
    server.close()
    for thread in threads:
        thread.join()
    assert [reply["meta_info"]["completion_tokens"] for reply in done] == [200, 200]
    with pytest.raises(ConnectionError):
        get(server.url, "/health")


def test_closing_aborts_after_its_time(runtime, slow_engine):
    server = Server(runtime, port=0)
    done = []
    body = {"text": "abc", "sampling_params": {**LONG, "max_new_tokens": 500}}
    thread = threading.Thread(target=lambda: done.append(post(server.url, "/generate", body).json))
    thread.start()
    wait_until(lambda: runtime.stats()["running"])
    server.close(0.0)
    thread.join()
    assert done[0]["meta_info"]["finish_reason"]["type"] == "abort"
    engines.check_idle(runtime)


def test_closing_does_not_wait_for_a_client_that_does_not_read(runtime):
    server = Server(runtime, port=0)
    before = runtime.stats()["requests"]
    body = {"text": "abc", "sampling_params": {**LONG, "n": 4}, "return_logprob": True, "stream": True}
    sock = open_socket(server.url, "/generate", body, receive_buffer=4096)
    wait_until(lambda: runtime.stats()["requests"] == before + 4)
    begin = time.monotonic()
    server.close(0.1)
    assert time.monotonic() - begin < 15 and not server.serving
    sock.close()


def test_a_runtime_that_was_shut_down_is_a_503():
    with engines.make(kv_capacity=300) as runtime, Server(runtime, port=0) as server:
        runtime.shutdown()
        for method, path, body in (
            ("GET", "/health", None), ("GET", "/health_generate", None), ("POST", "/generate", {"text": "a"}),
            ("POST", "/v1/chat/completions", CHAT), ("GET", "/get_server_info", None), ("POST", "/flush_cache", {}),
        ):  # fmt: skip
            answer = call(server.url, method, path, body)
            assert answer.status == 503 and answer.error["type"] == "server_error"
        assert b"engine_up" in get(server.url, "/metrics").body


# ---- the command -----


def command(*more: str) -> subprocess.Popen:
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--kv-capacity", "2000", *more]
    folder = str(engines.folder())
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MINISGL_API_KEY": "from the environment"}
    return subprocess.Popen(
        [sys.executable, "-m", "minisgl", "serve", "--model", folder, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=Path(__file__).parent.parent,
    )  # fmt: skip


def test_sigterm_drains_and_ends():
    process = command("--served-model-name", "served", "--schedule-policy", "fcfs", "--disable-radix-cache")
    try:
        ready = process.stdout.readline()
        assert ready.startswith("minisgl: ready on http://127.0.0.1:") and "served" in ready, process.stderr.read()
        url = ready.split()[3]
        assert get(url, "/v1/models").status == 401
        key = {"Authorization": "Bearer from the environment"}
        info = get(url, "/get_server_info", **key).json
        assert info["schedule_policy"] == "fcfs" and info["served_model_name"] == "served"
        done = []
        body = {"text": "abc", "sampling_params": {**GREEDY, "max_new_tokens": 300}}
        thread = threading.Thread(target=lambda: done.append(list(events(url, "/generate", body, **key))[-1]))
        thread.start()
        wait_until(lambda: get(url, "/get_server_info", **key).json["running"])
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert done[0]["meta_info"]["completion_tokens"] == 300
        assert process.wait(20) == 0 and process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_wrong_options_are_one_line():
    from minisgl.__main__ import main

    wrong = {"--port": "99999", "--mem-fraction": "2", "--drain-timeout": "-1", "--chat-template": "/no/file"}
    for argv in wrong.items():
        assert main(["serve", "--model", str(engines.folder()), "--kv-capacity", "100", *argv]) == 2
