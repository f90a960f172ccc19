"""Token-level twins: the published requests, played in rounds on our engine and on a stand-in for vLLM."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from minisgl.bench import main
from minisgl.bench.drive import Answer, Player, optimal_hits, play
from minisgl.bench.peers import Job
from minisgl.bench.shapes import SHAPES, shape_folder
from minisgl.bench.twins import CHARACTER, TWINS
from minisgl.bench.workloads import BenchError

from . import tiny_models

FAKES = Path(__file__).parent / "fake_peers"


def plain(asks):
    return [[a.prompt if isinstance(a.prompt, str) else a.prompt.tolist(), a.max_new_tokens] for a in asks]


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("twin-uniform", "ccf124a4a48a1ef7"),
        ("twin-fewshot", "9f85ef27b9447608"),
        ("twin-multiturn-short", "5e0c6c99da97d94e"),
        ("twin-multiturn-long", "7fdca1d1928692e7"),
        ("twin-tree", "f40125d50f9e19db"),
        ("twin-json", "87c494353b00b1f0"),
    ],
)
def test_first_round_is_the_one_that_other_engines_were_measured_on(name, digest):
    data = json.dumps(plain(next(TWINS[name].rounds())))
    assert hashlib.sha256(data.encode()).hexdigest()[:16] == digest


def test_every_turn_asks_with_the_whole_chat_so_far():
    rounds = TWINS["twin-multiturn-short"].rounds(0.05)
    first = plain(next(rounds))
    second = plain(rounds.send([[1, 2]] * len(first)))
    for (before, _), (after, _) in zip(first, second):
        assert after[: len(before) + 2] == [*before, 1, 2] and len(after) > len(before) + 2


def test_every_node_of_the_tree_forks_into_three():
    rounds = TWINS["twin-tree"].rounds(0.1)
    asks, sizes = next(rounds), []
    with pytest.raises(StopIteration):
        while True:
            sizes.append(len(asks))
            asks = rounds.send([[i] * asks[0].max_new_tokens for i in range(len(asks))])
    assert sizes == [3 * 3, 9 * 3, 27 * 3]
    assert len({a.prompt.tobytes() for a in asks}) == 27  # three of each


def test_optimum_counts_outputs_as_computed_but_not_their_last_token():
    history = [1, 2, 3]
    assert optimal_hits([(history, [4, 5]), ([*history, 4, 5, 6], [7])]) == 4
    assert optimal_hits([(history, [9]), (history, [9])]) == 2  # one token for the logits
    assert optimal_hits([(np.array(history), [8]), ([7, 1, 2, 3], [8])]) == 0


def test_recorded_rounds_survive_the_way_to_the_peer():
    asks = next(TWINS["twin-json"].rounds(0.02)) + next(TWINS["twin-tree"].rounds(0.05))
    there = Job.of(json.loads(json.dumps(Job("mine", recorded=[asks, asks[:1]]).plain())))
    rounds = there.rounds()
    first = next(rounds)
    assert plain(first) == plain(asks) and first[0].regex == CHARACTER and first[0].seed == 0
    assert plain(rounds.send([])) == plain(asks[:1])


class Counting(Player):
    def __init__(self):
        self.prepared = 0

    def prepare(self, asks):
        self.prepared += 1
        return asks

    def answer(self, prepared):
        text = '{"no'
        ids = [None if isinstance(a.prompt, str) else a.prompt for a in prepared]
        rows = zip(prepared, ids)
        return [Answer([5] * a.max_new_tokens, i, len(a.prompt), 1, text, 0.5, 1.0) for a, i in rows]

    def flush(self):
        raise AssertionError("playing leaves the cache as it is")


def test_play_adds_up_and_tells_of_progress():
    told = []
    played = play(Counting(), TWINS["twin-multiturn-short"].rounds(0.05), told.append)
    assert played.requests == 12 == sum(told) and len(told) == 4
    assert played.cached_tokens == 12 and played.hit_rate == 12 / played.prompt_tokens
    assert played.output_tokens == sum(map(len, played.outputs)) and len(played.ttft) == 12
    assert 0.5 < played.optimal_hit_rate < 1 and played.valid is None
    assert play(Counting(), TWINS["twin-json"].rounds(0.02)).valid == 0


# ---------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.make("llama2", tmp_path_factory.mktemp("twins") / "llama2")


def wide(folder, tmp_path):
    """The same with a vocabulary that the twins' ids fit, without weights or tokenizer."""
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 10240, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def bench(capsys, *argv):
    code = main([*argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_ours_its_switches_and_a_peer_in_one_run(capsys, monkeypatch, model, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.syspath_prepend(str(FAKES))
    code, out, err = bench(
        capsys, "--workload", "twin-fewshot,twin-tree", "--model", str(wide(model, tmp_path)), "--load-format",
        "dummy", "--dtype", "float32", "--scale", "0.03", "--reps", "2", "--compare", "vllm", "--ablate",
        "--set", "kv_capacity=4000",
    )  # fmt: skip
    assert code == 0, err
    figures = json.loads(out.splitlines()[-1])
    assert figures["version_vllm"] == "0.0-fake" and figures["start_vllm"] >= 0 and figures["reps"] == 2
    for name in ("twin-fewshot", "twin-tree"):
        found = figures["workloads"][name]
        ours, peer, off = found["minisgl"], found["vllm"], found["no radix cache"]
        assert ours["hit_rate"] == pytest.approx(ours["optimal_hit_rate"], rel=0.02) and ours["hit_rate"] > 0.4
        assert off["hit_rate"] == 0 and off["outputs_as_ours"] == ours["requests"]
        assert "no jump-forward" not in found and "no CUDA graphs" not in found
        assert (peer["requests"], peer["output_tokens"]) == (ours["requests"], ours["output_tokens"])
        assert peer["ratio"] == pytest.approx(peer["seconds"] / ours["seconds"], rel=1e-4)
        assert ours["seconds"] == pytest.approx(min(ours["all_seconds"]), rel=1e-4) and len(ours["all_seconds"]) == 2
    assert figures["workloads"]["twin-fewshot"]["minisgl"]["prompt_tokens"] == (
        figures["workloads"]["twin-fewshot"]["vllm"]["prompt_tokens"]
    )


def test_json_twin_jumps_and_is_valid(capsys, model):
    code, out, err = bench(
        capsys, "--workload", "twin-json", "--model", str(model), "--dtype", "float32", "--scale", "0.016", "--ablate",
        "--set", "kv_capacity=1200", "--set", "radix_cache=True",
    )  # fmt: skip
    assert code == 2 and "radix_cache" in err
    code, out, err = bench(
        capsys, "--workload", "twin-json", "--model", str(model), "--dtype", "float32", "--scale", "0.016", "--ablate",
        "--set", "kv_capacity=1200",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])["workloads"]["twin-json"]
    assert found["minisgl"]["valid"] == 2 == found["no jump-forward"]["valid"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--workload", "twin-tree", "--requests", "4"], "--requests means nothing to a token-level twin"),
        (["--workload", "twin-tree", "--model", "llama-8b"], "needs --load-format dummy"),
        (["--workload", "twin-json", "--model", "llama-8b", "--load-format", "dummy"], "twin-json needs a tokenizer"),
        (["--workload", "twin-tree", "--tokenizer", "."], "--tokenizer is for the built-in shapes"),
        (["--scale", "0.5"], "--scale means nothing to --workload fewshot"),
    ],
)
def test_what_does_not_fit_is_a_one_line_error(capsys, argv, words):
    code, out, err = bench(capsys, *argv)
    assert code == 2 and out == "" and words in err and len(err.splitlines()) == 1


def test_a_peer_that_fails_is_an_error_with_its_reason(capsys, monkeypatch, model, tmp_path):
    from minisgl.bench.peers import run_peer

    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.syspath_prepend(str(FAKES))
    spec = {"folder": str(model), "load_format": "fail", "dtype": "float32", "max_context": 64, "has_tokenizer": True}
    with pytest.raises(BenchError, match="--compare vllm: RuntimeError: out of memory"):
        run_peer("vllm", [Job("twin-tree", 0.05)], 1, spec)


def test_shapes_are_the_public_models(tmp_path, model):
    from minisgl.loader import resolve_model

    for name in SHAPES:
        config = resolve_model(str(shape_folder(name, tmp_path, model)), "dummy").config
        assert config.vocab_size in (128256, 49152) and config.num_kv_heads == 8
        assert (tmp_path / name / "tokenizer.json").exists()
    assert resolve_model(str(tmp_path / "llama-8b"), "dummy").config.intermediate_size == 14336
    with pytest.raises(BenchError, match="--tokenizer"):
        shape_folder("llama-1b", tmp_path, tmp_path)
