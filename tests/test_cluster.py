"""Workers on a local Ray: placement is computed here, the rest with Ray itself."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request

import pytest

pytest.importorskip("uvicorn", reason="a cluster needs minisgl[server]")
pytest.importorskip("aiohttp", reason="a cluster needs minisgl[server]")

from minisgl.cluster import Cluster, _resources, _threads

from . import tiny_models


@pytest.mark.parametrize(
    ("total", "workers", "given", "expected"),
    [
        ({"CPU": 8.0}, 2, (None, None), (4.0, 0.0)),
        ({"CPU": 7.0}, 2, (None, None), (3.0, 0.0)),
        ({"CPU": 2.0}, 4, (None, None), (0.5, 0.0)),
        ({"CPU": 16.0, "GPU": 2.0}, 2, (None, None), (8.0, 1.0)),
        ({"CPU": 16.0, "GPU": 1.0}, 2, (1.0, 0.5), (1.0, 0.5)),
    ],
)
def test_share_of_each_worker(total, workers, given, expected):
    share = _resources(total, workers, *given)
    assert (share["num_cpus"], share["num_gpus"]) == expected


def test_too_little_is_said():
    with pytest.raises(ValueError, match="4 workers need 4 GPUs, Ray has 2"):
        _resources({"CPU": 8.0, "GPU": 2.0}, 4, None, None)


def test_threads_are_cores():
    assert [_threads(cpus)["OMP_NUM_THREADS"] for cpus in (0.5, 1.0, 4.0)] == ["1", "1", "4"]


@pytest.mark.parametrize("workers", [0, -1, True, 1.5, "2"])
def test_workers_is_a_count(workers):
    with pytest.raises(ValueError, match="workers must be"):
        Cluster(workers)


def test_an_address_is_not_ignored(monkeypatch):
    ray = pytest.importorskip("ray", reason="needs minisgl[ray]")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: pytest.fail("it went on"))
    with pytest.raises(ValueError, match=r"address='there:6379'.*connected"):
        Cluster(1, address="there:6379")


@pytest.mark.slow
def test_killed_worker_is_started_again_and_requests_go_on(tmp_path):
    ray = pytest.importorskip("ray", reason="needs minisgl[ray]")
    model = tiny_models.make("llama2", tmp_path / "model")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        with Cluster(2, model, {"kv_capacity": 4096, "dtype": "float32"}) as cluster:
            _until(lambda: len(cluster.workers) == 2 and all(cluster.workers.values()), 120)
            before = _ask(cluster.url, "the same question")
            pids = ray.get([actor.pid.remote() for actor in cluster.actors])
            os.kill(pids[0], signal.SIGKILL)
            texts, end = set(), time.monotonic() + 3
            while time.monotonic() < end:  # goes on at once, on the other one
                texts.add(_ask(cluster.url, "the same question"))
            assert texts == {before}
            _until(lambda: len(cluster.workers) == 2 and all(cluster.workers.values()), 120)
            after = ray.get([actor.pid.remote() for actor in cluster.actors])
            assert after[0] != pids[0] and after[1] == pids[1]
            assert _ask(cluster.url, "the same question") == before
        with pytest.raises(ValueError, match=r"did not start.*nothing-here"):
            Cluster(1, str(tmp_path / "nothing-here"))
        assert ray.is_initialized()  # it was not the cluster's to end
    finally:
        ray.shutdown()


def _ask(url: str, text: str) -> str:
    payload = {"text": text, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/generate", json.dumps(payload).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))["text"]


def _until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)
