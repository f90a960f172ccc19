"""/metrics: the names that dashboards read, and numbers that follow the engine."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client", reason='needs pip install "minisgl[server]"')
pytest.importorskip("starlette", reason='needs pip install "minisgl[server]"')

from prometheus_client.parser import text_string_to_metric_families as parse

from minisgl import Server
from minisgl.metrics import Metrics

from . import engines
from .http_client import get, open_socket, post, wait_until

NAMES = {
    "minisgl:prompt_tokens", "minisgl:generation_tokens", "minisgl:cached_tokens", "minisgl:num_requests",
    "minisgl:num_aborted_requests", "minisgl:num_running_reqs", "minisgl:num_queue_reqs", "minisgl:num_used_tokens",
    "minisgl:max_total_num_tokens", "minisgl:token_usage", "minisgl:cache_hit_rate", "minisgl:gen_throughput",
    "minisgl:num_retracted_requests", "minisgl:time_to_first_token_seconds", "minisgl:e2e_request_latency_seconds",
    "minisgl:time_per_output_token_seconds", "minisgl:engine_up", "minisgl:num_evictable_tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def runtime():
    with engines.make(kv_capacity=2000, max_running_requests=4) as runtime:
        yield runtime


def read(url):
    """{sample name: value} of a page whose labels are right."""
    answer = get(url, "/metrics")
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain")
    families = list(parse(answer.body.decode()))
    assert {f.name for f in families if not f.name.endswith("_created")} == NAMES
    samples = [s for family in families for s in family.samples]
    assert all(s.labels["model_name"] == "m" for s in samples)
    return {s.name: s.value for s in samples if "le" not in s.labels}


def test_numbers_follow_the_engine(runtime):
    with Server(runtime, port=0, model_names=["m"]) as server:
        before = read(server.url)
        assert before["minisgl:max_total_num_tokens"] == 2000 and before["minisgl:engine_up"] == 1
        body = {"text": "abcdefgh", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
        for _ in range(2):
            post(server.url, "/generate", body)
        after = read(server.url)
        grown = {name: after[name] - before[name] for name in after if name in before}
        assert grown["minisgl:prompt_tokens_total"] == 16 and grown["minisgl:generation_tokens_total"] == 10
        assert grown["minisgl:num_requests_total"] == 2 and grown["minisgl:cached_tokens_total"] == 7
        for name in ("time_to_first_token", "e2e_request_latency", "time_per_output_token"):
            full = f"minisgl:{name}_seconds"
            assert grown[f"{full}_count"] == 2 and grown[f"{full}_sum"] > 0
        long = {"max_new_tokens": 400, "ignore_eos": True}
        sock = open_socket(server.url, "/generate", {**body, "sampling_params": long})
        wait_until(lambda: read(server.url)["minisgl:num_running_reqs"] == 1)
        busy = read(server.url)
        assert 0 < busy["minisgl:num_used_tokens"] <= 408 or busy["minisgl:num_running_reqs"] == 0
        sock.close()
        wait_until(lambda: read(server.url)["minisgl:num_running_reqs"] == 0)
        wait_until(lambda: read(server.url)["minisgl:num_aborted_requests_total"] == 1)
        assert read(server.url)["minisgl:token_usage"] == 0


def test_each_server_has_its_own(runtime):
    one, two = Metrics(runtime, "a"), Metrics(runtime, "b")
    page, kind = one.page("")
    assert b'model_name="a"' in page and b'model_name="b"' not in page and kind.startswith("text/plain")
    assert two.page("application/openmetrics-text; version=1.0.0")[1].startswith("application/openmetrics-text")
    assert b"python_gc" not in page
