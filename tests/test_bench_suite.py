"""The paper's workloads as programs, on a tiny random model: figures, ablations, equality, reports and pictures."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest

import minisgl as sgl
from minisgl.bench import main, plot, suite_report
from minisgl.bench.programs import PROGRAMS, Programs, programs
from minisgl.bench.recorder import Entry, Log, Recorder, hit_rate, rounds
from minisgl.bench.suite.json_character import REGEX, is_valid
from minisgl.bench.suite.rag import Retriever, corpus
from minisgl.bench.suite_equal import Equality, compare
from minisgl.bench.suite_runs import ALL, SuiteRun, run_programs, run_requests
from minisgl.bench.variants import VARIANTS, by_engine
from minisgl.bench.workloads import WORKLOADS, BenchError, BenchRequest, Setting

from .engines import check_idle, make

QUICK = Setting(quick=True, vocab_size=300)


@pytest.fixture(scope="module")
def engines():
    """Engines on and off, made once."""
    made = {
        "on": make(kv_capacity=6000, max_context=512),
        "off": make(kv_capacity=6000, max_context=512, radix_cache=False, schedule_policy="fcfs", jump_forward=False),
        "whole": make(kv_capacity=6000, max_context=512, radix_cache="whole"),
    }
    yield made
    for runtime in made.values():
        runtime.shutdown()


@sgl.function
def branches(s, question, ways):
    s += "Shared by all of them, as instructions are. " + question
    forks = s.fork(ways)
    for i, fork in enumerate(forks):
        fork += f" Way {i}:" + sgl.gen("thought", max_tokens=4, ignore_eos=True)
    forks.join()
    s += " So:" + sgl.select("end", [" yes", " no way"])
    return [*s["thought"], s["end"]]


WORK = Programs(branches, [{"question": f"Question {i}?", "ways": 3} for i in range(3)], lambda i, result: i > 0)


# ---------------------------------------------------------------- all workloads


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_workload_is_a_function_of_its_seed_and_shares_something(name):
    def plain(seed):
        return json.dumps(PROGRAMS[name].build(Setting(quick=True, seed=seed)).calls)

    assert plain(3) == plain(3) != plain(4)
    assert len(json.loads(plain(3))) == len(PROGRAMS[name].build(QUICK).calls)
    assert len(PROGRAMS[name].build(Setting(requests=2)).calls) == 2


def test_the_list_of_all_is_complete():
    assert set(ALL) == set(PROGRAMS) | set(WORKLOADS) - {"decode"}


def test_prefix_groups_have_a_routers_shape():
    full = WORKLOADS["prefix-groups"].build(Setting(device="cuda"))
    assert len(full) == 64 * 16 and {len(r.prompt) for r in full} == {2048 + 128}
    assert {r.max_new_tokens for r in full} == {256} and len({r.prompt[:2048].tobytes() for r in full}) == 64
    assert [r.group for r in full] != sorted(r.group for r in full)


def test_json_grammar_and_schema_describe_the_same_character():
    text = (
        '{\n    "name": "Anna",\n    "home": {\n        "city": "Paris",\n        "favourite place": "park"\n    },\n'
        '    "pet": "cat",\n    "pet age": 7,\n    "always carries": "key",\n    "speaks with strangers": true\n}'
    )
    assert re.fullmatch(REGEX, text) and is_valid(text) and not is_valid(text[:-1]) and not is_valid("{}")
    schema = PROGRAMS["json-schema"].build(QUICK).calls[0]["grammar"]["json_schema"]
    assert sgl.Grammar.from_json_schema(json.loads(schema)).matches(json.dumps(json.loads(text)))


def test_bm25_finds_the_document_that_holds_the_answer():
    documents, questions = corpus()
    retriever = Retriever(documents)
    assert len(documents) == len(questions) > 20
    right = [document in retriever.best(topic[0][0], 2) for document, topic in zip(documents, questions)]
    assert sum(right) / len(right) > 0.8
    calls = PROGRAMS["rag"].build(QUICK).calls
    assert len({tuple(call["documents"]) for call in calls}) < len(calls)


# ---------------------------------------------------------------- recording


def test_the_recorder_keeps_every_request_of_every_program(engines):
    run = run_programs(engines["on"], WORK, VARIANTS["full"])
    asked = [entry for entry in run.entries if not entry.hint]
    assert len(asked) == 3 * (3 + 2) and len({id(e.program) for e in asked}) == 3
    assert run.right == 2 / 3 and len(run.results) == 3
    hits = hit_rate(run.entries)
    assert hits.asked == sum(len(e.prompt) for e in asked)
    assert 0.5 < hits.achieved <= hits.optimal + 1e-9 and hits.of_optimal > 0.95
    assert all(e.ttft is not None and 0 < e.ttft <= e.latency for e in asked if len(e.output))
    check_idle(engines["on"])


def test_without_hints_nobody_computes_for_others(engines):
    engines["on"].flush_cache()
    run = run_programs(engines["on"], WORK, VARIANTS["no hint"])
    hints = [e for e in run.entries if e.hint]
    assert {e.program for e in hints} <= {e.program for e in run.entries if not e.hint}  # a select's own only


def test_rounds_follow_what_each_program_waited_for(engines):
    run = run_programs(engines["on"], WORK, VARIANTS["full"])
    levels = rounds(run.entries)
    assert [len(asks) for asks in levels] == [9, 6]
    assert {ask.max_new_tokens for ask in levels[0]} == {4} and {ask.max_new_tokens for ask in levels[1]} == {1}


def test_hints_cost_but_save_nothing_for_themselves():
    def entry(ids, cached, hint=False, output=()):
        return Entry(np.array(ids), np.array(output, np.int32), cached, hint, 0.0, 1.0, 0.5)

    hits = hit_rate([entry([1, 2, 3], 0, hint=True), entry([1, 2, 3, 4], 3), entry([1, 2, 3, 5], 3)])
    assert (hits.asked, hits.computed, hits.least) == (8, 5, 5)
    assert hits.achieved == hits.optimal == 3 / 8 and hits.of_optimal == 1
    assert hit_rate([entry([1, 2], 0), entry([3, 4], 0)]).of_optimal is None


def test_an_aborted_request_is_an_error():
    request = SimpleNamespace(finish_reason={"type": "abort", "message": "out of room"})
    with pytest.raises(BenchError, match="out of room"):
        Log([(SimpleNamespace(request=request), False, None)]).entries()


def test_requests_without_programs_are_recorded_too(engines):
    short, long = np.arange(5, 25, dtype=np.int32), np.arange(5, 30, dtype=np.int32)
    work = [BenchRequest(short, 3, answer=7), BenchRequest(long, 2)]
    run = run_requests(engines["on"], work, VARIANTS["full"])
    assert [len(ids) for ids in run.results] == [3, 2] and run.right in (0.0, 1.0)
    assert sorted(e.cached for e in run.entries) == [0, 20]


# ---------------------------------------------------------------- variants


@pytest.mark.parametrize("name", ["hellaswag", "react", "generative-agents", "tot", "judge", "multiturn-short", "sot"])
def test_everything_on_and_everything_off_say_the_same(engines, name, monkeypatch):
    """Greedy and float32: token for token.  The tiny model has a token a byte, so long constant texts are cut."""
    work = PROGRAMS[name].build(Setting(requests=2, quick=True))
    work = Programs(work.function, [shortened(call) for call in work.calls])
    for module, text in (("react", "INSTRUCTIONS"), ("tot", "INTRODUCTION"), ("judge", "INSTRUCTIONS"),
                         ("sot", "INTRODUCTION")):  # fmt: skip
        monkeypatch.setattr(f"minisgl.bench.suite.{module}.{text}", "Be brief. ")
    engines["on"].flush_cache()
    on = run_programs(engines["on"], work, VARIANTS["full"])
    off = run_programs(engines["off"], work, VARIANTS["all off"])
    found = compare(on, off, engines["off"])
    assert found.different == 0 and found.near(0.0), found
    assert hit_rate(off.entries).achieved <= 0 < hit_rate(on.entries).achieved
    assert hit_rate(on.entries).of_optimal > 0.9


def shortened(call):
    def short(value):
        return value[-24:] if isinstance(value, str) and "{" not in value else value

    call = {key: [short(v) for v in value] if isinstance(value, list) else short(value) for key, value in call.items()}
    if "template" in call:
        call["template"] = "Town. " + call["template"][-50:]
    if "branches" in call:
        call |= {"levels": 2, "tokens": 3}
    if "step_tokens" in call:
        call |= {"step_tokens": 5, "observations": call["observations"][:2]}
    return call


def test_a_cache_of_whole_sequences_finds_less_than_the_tree(engines):
    calls = [{"question": f"Question {i}?", "ways": 3} for i in range(3)]
    shares = {}
    for name in ("on", "whole"):
        engines[name].flush_cache()
        shares[name] = hit_rate(run_programs(engines[name], Programs(branches, calls), VARIANTS["no hint"]).entries)
    assert shares["whole"].achieved < shares["on"].achieved - 0.1


def test_the_order_of_service_matters_when_the_cache_cannot_hold_everything():
    """Two groups of eight, room for one group's prefix: as in the paper's figure 8, each switch costs hits."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(5, 250, (2, 100))
    prompts = [np.concatenate([prefixes[i % 2], rng.integers(5, 250, 6)]).astype(np.int32) for i in range(16)]
    work = [BenchRequest(prompts[i], 1) for i in rng.permutation(16)]
    shares = {}
    for name in ("full", "random", "fcfs", "no tree", "no cache"):
        with make(kv_capacity=140, chunk_size=64, **VARIANTS[name].engine) as runtime:
            shares[name] = hit_rate(run_requests(runtime, work, VARIANTS[name]).entries).achieved
    assert shares["full"] > shares["random"] >= shares["fcfs"] > shares["no tree"] == shares["no cache"] == 0, shares


def test_variants_that_share_a_runtime_share_it():
    groups = by_engine(VARIANTS.values())
    assert [variant.name for variant in groups[0][1]] == ["full", "no hint", "no parallelism"]
    assert len(groups) == len(VARIANTS) - 2
    assert not VARIANTS["no hint"].applies(False, False) and VARIANTS["no hint"].applies(True, False)
    assert not VARIANTS["no jump-forward"].applies(True, False) and VARIANTS["no jump-forward"].applies(True, True)


def test_equality_finds_the_first_parting_and_its_gap(engines):
    on = run_programs(engines["off"], WORK, VARIANTS["full"])
    entry = next(e for e in on.entries if len(e.output))
    changed = entry.output.copy()
    changed[1] = (changed[1] + 1) % 256
    other = SuiteRun(
        1.0, [Entry(entry.prompt, changed, 0, False, 0.0, 1.0, 0.1)], [["else"], *on.results[1:]], Log(on.log.sinks, {})
    )
    found = compare(on, other, engines["off"])
    ids = [*entry.prompt.tolist(), int(entry.output[0])]
    reply = engines["off"].generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 1},
                                    return_logprob=True, top_logprobs_num=320)  # fmt: skip
    values = {token: value for value, token, _ in reply["meta_info"]["output_top_logprobs"][0]}
    gap = values[int(entry.output[1])] - values[int(changed[1])]
    assert found.different == 1 and found.gaps == [pytest.approx(gap, rel=1e-3)]
    assert found.near(found.gaps[0]) and not found.near(found.gaps[0] / 2)
    assert Equality(1).near(1.0) is None and Equality(0).near(0.0) is True


def test_a_select_that_went_the_other_way_has_its_scores_gap(engines):
    one = SuiteRun(1.0, [], ["a"], Log(selects={("p", ("a", "b")): [-1.0, -1.5]}))
    other = SuiteRun(1.0, [], ["b"], Log(selects={("p", ("a", "b")): [-2.0, -1.9]}))
    assert compare(one, other, engines["off"]).gaps == [0.5]


# ---------------------------------------------------------------- the command line


@pytest.fixture
def tiny_workload():
    @programs("tiny", "three branches over a shared question")
    def build(setting):
        return WORK

    yield "tiny"
    del PROGRAMS["tiny"]


def bench(capsys, *argv):
    code = main([*argv])
    out, err = capsys.readouterr()
    return SimpleNamespace(code=code, out=out, err=err, json=json.loads(out.splitlines()[-1]) if code == 0 else None)


def arguments(folder):
    return ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--set", "kv_capacity=3000"]


def test_ablation_report_and_plot(capsys, tmp_path, tiny_workload):
    from .engines import folder

    file = tmp_path / "out.svg"
    result = bench(capsys, "--workload", "tiny", "--ablate", "--plot", str(file), *arguments(folder()))
    assert result.code == 0, result.err
    found = result.json["workloads"]["tiny"]
    assert set(found["variants"]) == set(VARIANTS) - {"full", "no jump-forward"}
    full = found["full"]
    assert full["programs"] == 3 and full["requests"] == 15 and full["accuracy"] == pytest.approx(2 / 3, abs=1e-5)
    assert full["hit_rate_of_optimal"] > 0.95 and full["ttft_ms_p50"] <= full["latency_ms_p99"]
    assert found["variants"]["no cache"]["hit_rate"] <= 0.01
    assert result.json["all_outputs_equal_up_to_near_ties"] is True
    for key in ("programs_per_s", "requests_per_s", "output_tokens_per_s", "ms_per_output_token_p50", "latency_ms_p50"):
        assert full[key] > 0, key
    assert "| tiny " in result.out and "no parallelism" in result.out and "of the optimum" not in result.err
    drawing = ElementTree.parse(file).getroot()
    words = " ".join(text.text or "" for text in drawing.iter("{http://www.w3.org/2000/svg}text"))
    assert "tiny" in words and "no tree" in words and f"{full['hit_rate']:.3f} of" in words
    widths = [float(bar.get("width")) for bar in drawing.iter("{http://www.w3.org/2000/svg}rect")]
    assert max(widths) <= plot.WIDTH and min(widths) >= 0


def test_default_is_full_no_cache_and_all_off(capsys, tiny_workload):
    from .engines import folder

    result = bench(capsys, "--workload", "tiny", *arguments(folder()))
    assert result.code == 0, result.err
    assert set(result.json["workloads"]["tiny"]["variants"]) == {"no cache", "all off"}
    result = bench(capsys, "--workload", "tiny", "--no-baseline", "--runs", "2", *arguments(folder()))
    assert result.json["workloads"]["tiny"]["variants"] == {}
    assert result.json["all_outputs_equal_up_to_near_ties"] is None


def test_a_peer_replays_the_recorded_rounds(capsys, tiny_workload, monkeypatch):
    from .engines import folder
    from .test_bench_twins import FAKES

    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.syspath_prepend(str(FAKES))
    result = bench(capsys, "--workload", "tiny", "--no-baseline", "--compare", "vllm", *arguments(folder()))
    assert result.code == 0, result.err
    peer = result.json["workloads"]["tiny"]["peers"]["vllm"]
    assert peer["requests"] == 15 and peer["output_tokens"] == 9 * 4 + 6 and peer["version"] == "0.0-fake"
    assert "ratio of throughput" in result.out


def test_little_gain_is_said():
    full = SuiteRun(1.0, [Entry(np.arange(9), np.arange(3), 0, False, 0.0, 1.0, 0.4)], [[1]], Log())
    off = SuiteRun(1.05, full.entries, [[1]], Log(), equality=Equality())
    about = {"model": "m", "dtype": "float32", "device": "cpu", "machine": "x", "threads": 1, "torch": "2"}
    outcome = SimpleNamespace(runs={"uniform": {"full": full, "no cache": off}}, peers={}, about=about)
    result = suite_report.figures(outcome)
    assert "uniform gains little from the cache (1.05x)" in suite_report.table(result)
    assert result["workloads"]["uniform"]["full"]["ms_per_output_token_p50"] == pytest.approx(300)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--workload", "tot", "--lengths", "3", "4"], "--lengths means nothing to --workload tot"),
        (["--workload", "judge", "--data", "x"], "--data means nothing to --workload judge"),
        (["--workload", "tot", "--data", "/no/file"], "--data: no file"),
        (["--all", "--requests", "3"], "--requests means nothing to --all"),
        (["--workload", "tot", "--plot", "/no/folder/x.svg"], "--plot: no folder"),
        (["--workload", "tot", "--ablate", "--no-baseline"], "--no-baseline"),
        (["--workload", "fewshot", "--compare", "vllm"], "only hf runs fewshot"),
    ],
)
def test_what_does_not_fit_is_a_one_line_error(capsys, argv, words):
    result = bench(capsys, *argv)
    assert result.code == 2 and result.out == "" and words in result.err and len(result.err.splitlines()) == 1


# ---------------------------------------------------------------- public data


def test_hellaswag_gsm8k_and_hotpotqa_files(tmp_path):
    rows = [{"ctx": f"scene {i}", "endings": [f"e{j}" for j in range(4)], "label": i % 4} for i in range(23)]
    hellaswag = tmp_path / "val.jsonl"
    hellaswag.write_text("\n".join(map(json.dumps, rows)))
    work = PROGRAMS["hellaswag"].build(Setting(data=hellaswag))
    assert len(work.calls) == 3 and work.calls[0]["examples"].count("Scene: ") == 20
    number = int(work.calls[0]["scene"].split()[1])
    assert work.right(0, f" e{number % 4}") and not work.right(0, f" e{(number + 1) % 4}")

    gsm8k = tmp_path / "test.jsonl"
    gsm8k.write_text('{"question": "How many?", "answer": "3 #### 3"}\n')
    assert PROGRAMS["tot"].build(Setting(data=gsm8k)).calls[0]["question"] == "How many?"

    hotpot = tmp_path / "dev.json"
    hotpot.write_text(json.dumps([{"question": "Who?", "answer": "she", "context": [["Anna", ["A. ", "B."]]]}]))
    assert PROGRAMS["react"].build(Setting(data=hotpot)).calls[0]["observations"] == ["Anna: A. B."]


@pytest.mark.parametrize(("name", "content"), [("hellaswag", '{"ctx": "a"}'), ("tot", "[]"), ("react", '{"a": 1}')])
def test_other_files_are_refused_by_name(tmp_path, name, content):
    file = tmp_path / "data"
    file.write_text(content)
    with pytest.raises(BenchError, match=r"--data: .*data.*expected"):
        PROGRAMS[name].build(Setting(data=file))


def test_recorder_is_a_backend_like_any(engines):
    state = branches.run(question="Why?", ways=2, backend=Recorder(engines["on"]), temperature=0)
    assert len(state["thought"]) == 2 and state["end"] in (" yes", " no way")
