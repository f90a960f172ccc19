"""Other engines as players: transformers itself, and stand-ins with the interfaces of those that may not be here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from minisgl.bench.peer_process import make_player
from minisgl.bench.peers import PEERS, Job, measure, require, run_peer
from minisgl.bench.twins import Ask
from minisgl.bench.workloads import BenchError

from .engines import folder, make

FAKES = Path(__file__).parent / "fake_peers"
ASKS = [Ask(np.arange(5, 5 + n, dtype=np.int32), new) for n, new in ((20, 3), (30, 2), (9, 4))]
RECORDED = Job("mine", recorded=[ASKS, ASKS[:1]])


def spec(**changes):
    return {
        "folder": str(folder()), "gguf": None, "load_format": "auto", "dtype": "float32", "device": "cpu",
        "max_context": 256, "has_tokenizer": True, **changes,
    }  # fmt: skip


@pytest.fixture
def fakes(monkeypatch):
    """The stand-ins, for this process and the peer's own."""
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    yield
    for name in ("vllm", "vllm.sampling_params", "sglang", "llama_cpp", "guidance"):
        sys.modules.pop(name, None)


def lengths(played):
    return [len(ids) for ids in played.outputs]


def test_hugging_face_in_its_own_process_says_what_we_say():
    played = run_peer("hf", [RECORDED], 1, spec()).runs["mine"][0]
    assert lengths(played) == [3, 2, 4, 3] and played.seconds > 0
    with make(kv_capacity=300) as runtime:
        params = [{"temperature": 0, "max_new_tokens": ask.max_new_tokens, "ignore_eos": True} for ask in ASKS]
        ours = runtime.generate(input_ids=[ask.prompt for ask in ASKS], sampling_params=params)
    assert [reply["output_ids"] for reply in ours] == played.outputs[:3]


def test_sglang_interface(fakes):
    played = run_peer("sglang", [RECORDED], 2, spec()).runs["mine"]
    assert len(played) == 2 and lengths(played[0]) == [3, 2, 4, 3] and played[0].cached_tokens == 10 + 15 + 4 + 10


def test_llamacpp_interface_counts_what_it_reuses(fakes, tmp_path):
    import json

    config = json.loads((folder() / "config.json").read_text())
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF" + str(config["vocab_size"]).encode())
    played = measure(make_player("llamacpp", spec(gguf=str(file)), [RECORDED]), RECORDED, 1, "test")[0]
    assert lengths(played) == [3, 2, 4, 3] and played.cached_tokens == 0 + 20 + 8 + 9
    with pytest.raises(BenchError, match=r"--model FILE\.gguf"):
        make_player("llamacpp", spec(), [RECORDED])


def test_guidance_interface_takes_text_and_regex(fakes):
    job = Job("mine", recorded=[[*ASKS, Ask("Who? ", 9, regex="[A-Z][a-z]+")]])
    played = measure(make_player("guidance", spec(), [job]), job, 1, "test")[0]
    assert lengths(played) == [3, 2, 4, 4] and played.valid == 1 and played.optimal_hit_rate is None


@pytest.mark.parametrize("name", ["hf", "llamacpp"])
def test_engines_without_regular_expressions_say_so(fakes, name, tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    player = make_player(name, spec(gguf=str(file)), [])
    with pytest.raises(BenchError, match="leave this workload out"):
        player.prepare([Ask("text", 4, regex="a+")])


@pytest.mark.parametrize("name", PEERS)
def test_what_is_not_installed_is_an_error_with_the_command(monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(BenchError, match=f"--compare {name}: .* is not installed: pip install {PEERS[name].pip}$"):
        require(name)
