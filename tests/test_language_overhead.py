"""The benchmark of the language's price runs, with its stand-in for a device; what it measures is not judged here."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    yield importlib.import_module("language_overhead")
    for name in ("language_overhead", "http_overhead"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("reads", [[], ["--reads"]])
def test_both_ways_take_turns_and_get_every_token(benchmark, reads, capsys):
    args = ["--fake-step", "0.1", "--programs", "9", "--shots", "40", "--tokens", "2", "--rounds", "2"]
    listeners = list(gc.callbacks)
    results = benchmark.compare(benchmark.parse(args + reads))  # `measure` refuses a run with more or fewer tokens
    turns = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert turns[:4] == ["direct", "programs", "programs", "direct"]
    assert len(results["of_direct_each"]) == 2
    for row in results["medians"].values():
        low, high = row["quartiles"]
        assert 0 < low <= row["requests_per_s"] <= high
        assert row["steps"] >= 2
    assert gc.callbacks == listeners


def test_the_last_line_is_json_and_a_shape_without_tokenizer_gets_one(benchmark, monkeypatch, tmp_path, capsys):
    from minisgl.bench import shapes

    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "intermediate_size": 32, "vocab_size": 8000,
            "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
    monkeypatch.setitem(shapes.SHAPES, "llama-1b", shapes.SHAPES["llama-1b"] | tiny)
    model = ["--model", "llama-1b", "--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
    sizes = ["--kv-capacity", "2000", "--programs", "5", "--shots", "30", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["language_overhead.py", *model, *sizes])
    benchmark.main()
    out = capsys.readouterr().out.splitlines()
    assert any(line.endswith("of 5 answers are the same") for line in out)
    result = json.loads(out[-1])
    assert result["benchmark"] == "language_overhead" and result["programs"] == 5
    assert set(result["medians"]) == {"direct", "programs"}
