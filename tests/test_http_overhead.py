"""The benchmark of HTTP's price runs, with its stand-in for a device; what it measures is not for a test to judge."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("http_overhead", FOLDER / "http_overhead.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "http_overhead", module)
    spec.loader.exec_module(module)
    return module


def test_every_way_gets_every_token(benchmark, capsys):
    args = "--fake-step 0.1 --requests 9 --clients 4 --prompt 8 --tokens 6 --repeat 1"
    results = benchmark.compare(benchmark.parse(args.split()))  # `measure` refuses a run with more or fewer tokens
    ways = {"one call", "in process", "in process, streams", "http", "http, streams"}
    assert set(results["medians"]) == set(results["of_in_process"]) == ways
    assert results["of_in_process"]["in process"] == 1.0
    assert all(row["steps"] >= 6 for row in results["medians"].values())
    assert len(capsys.readouterr().out.splitlines()) == len(ways)
