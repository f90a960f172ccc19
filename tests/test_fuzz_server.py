"""Bombs in request bodies, and what the other fuzz targets found, through HTTP: a 400 in one line, soon, for the sender
alone. (Random bodies: `test_server_fuzz.py`.)"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

pytest.importorskip("starlette", reason='needs pip install "minisgl[server]"')
pytest.importorskip("prometheus_client", reason='needs pip install "minisgl[server]"')

from minisgl import Server

from . import engines
from .http_client import call, get

NESTED = "(?:(?:(?:a?){1000}){1000}){1000}b"
BOMBS: list[dict[str, Any]] = [
    {"stop_regex": NESTED},
    {"stop_regex": ["x", "(a{1000000}){1000000}"]},
    {"stop_regex": "(?:" * 2000 + "a" + ")" * 2000},
    {"regex": "a{" + "9" * 5000 + "}"},
    {"regex": "(?=a)b"},
    {"regex": "(" * 500 + "a" + ")" * 500},
    {"json_schema": '{"minimum": 1' + "0" * 400 + ', "type": "string", "maxLength": -1}'},
    {"json_schema": '{"not": {"prefixItems": null}}'},
    {"json_schema": "[" * 3000},
    {"json_schema": json.dumps({"type": "string", "pattern": "(a{1000}){1000}" * 20, "maxLength": 5})},
    {"json_schema": '{"$ref": "#/' + "a" * 2000 + '"}'},
    {"json_schema": '{"type": "string", "pattern": "\\\\ud83d\\\\ude00"}'},
    {"structural_tag": '{"type": ["' + "x" * 2000 + '"]}'},
    {"structural_tag": '{"triggers": ["a", "aa"], "structures": []}'},
]


@pytest.fixture(scope="module")
def url():
    with engines.make(kv_capacity=600, max_context=48, max_running_requests=8, chunk_size=32) as runtime:
        with Server(runtime, port=0) as server:
            yield server.url
        engines.check_idle(runtime)


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: str(bomb)[:50])
def test_bombs_are_the_senders_error(url, bomb):
    begin = time.monotonic()
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4, "temperature": 0, **bomb}}
    answer = call(url, "POST", "/generate", json.dumps(body).encode(), timeout=60)
    assert answer.status == 400, (answer.status, answer.body[:300])
    message = answer.error["message"] if isinstance(answer.error, dict) else str(answer.error)
    assert "\n" not in message and len(message) < 1000
    assert time.monotonic() - begin < 40
    assert get(url, "/health_generate").status == 200


def test_many_slow_stop_patterns_end_one_request_and_no_other(url):
    """Together they would stop the engine for minutes at each token."""
    slow = [rf"([a-z\x00-\uffff]+[^\n]+)+{chr(97 + i % 20)}\n{i}" for i in range(200)]
    params = {"max_new_tokens": 24, "temperature": 5.0, "seed": 1, "stop_regex": slow}
    body = {"text": "a" * 20, "sampling_params": params}
    begin = time.monotonic()
    answer = call(url, "POST", "/generate", json.dumps(body).encode(), timeout=120)
    assert answer.status in (200, 400), answer.body[:300]
    plain = {"text": "a", "sampling_params": {"max_new_tokens": 4}}
    assert call(url, "POST", "/generate", json.dumps(plain).encode(), timeout=60).status == 200
    assert time.monotonic() - begin < 60
