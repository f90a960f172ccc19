"""The benchmark, on a scripted engine: no weights, a word tokenizer, hashes of prefixes for a cache."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import defaultdict
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest

from minisgl.bench import facts, main
from minisgl.bench.fewshot import fewshot
from minisgl.bench.report import accuracy, common_prefix, optimal_cached_tokens, summary
from minisgl.bench.runners import Difference, Record, Run, differences, explain, measure, median, submit_all
from minisgl.bench.tasks import SUBJECTS
from minisgl.bench.workloads import WORKLOADS, BenchError, BenchRequest, Setting, decode, uniform, workload

VOCAB = 50_000
JSON_KEYS = facts.items("""
    workload, model, device, requests, prompt_tokens, cached_tokens, hit_rate, optimal_hit_rate,
    requests_per_s, baseline_requests_per_s, speedup, ttft_ms_p50, ttft_ms_p99, accuracy, baseline_accuracy,
    outputs_equal, dtype, threads, machine, torch, output_tokens_per_s
""")


class WordTokenizer:
    """A word with the space before it is a token; ids in order of first appearance."""

    def __init__(self):
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> np.ndarray:
        words = re.findall(r" ?\w+|[^\w ]|\s", text)
        return np.array([self.ids.setdefault(word, len(self.ids) + 5) for word in words], np.int32)


class FakeRuntime:
    """What a benchmark needs of a Runtime.  The next token is a hash of those before it.

    `slips`: with the cache on, this many requests get a different token, the model's second choice.
    """

    made: list[FakeRuntime] = []  # noqa: RUF012
    slips = 0

    def __init__(
        self, model=None, *, radix_cache=True, device="auto", dtype="auto", load_format="auto", **options
    ):
        self.name = model or "fake"
        self.device, self.options = "cpu", options
        automatic = "float16" if not self.made else "float32"  # "auto" may differ from start to start
        self.dtype = f"torch.{automatic if dtype == 'auto' else dtype}"
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.scheduler = SimpleNamespace(max_context=4096)
        self.tokenizer = WordTokenizer()
        self.radix_cache, self.cache, self.answered, self.open = radix_cache, set(), 0, True
        self.slips_left = type(self).slips if radix_cache else 0
        if bad := set(options) - {"chunk_size"}:
            raise TypeError(f"Runtime() got an unexpected argument {min(bad)!r}")
        assert not any(runtime.open for runtime in self.made), "two engines at once"
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.open = False

    def stats(self):
        return {"requests": self.answered}

    def flush_cache(self):
        self.cache.clear()

    def choices(self, ids: tuple[int, ...]) -> tuple[int, int]:
        first = hash(ids) % VOCAB
        return first, (first + 1) % VOCAB

    def generate(self, *, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0):
        assert self.open
        if not isinstance(sampling_params, list):
            return self._answer(tuple(input_ids), sampling_params, return_logprob)
        return [
            self._answer(tuple(ids.tolist()), p, False)
            for ids, p in zip(input_ids, sampling_params, strict=True)
        ]

    def _answer(self, prompt, params, logprobs):
        assert params["temperature"] == 0 and params["ignore_eos"]
        prefixes = list(accumulate(prompt[:-1], lambda h, token: hash((h, token)), initial=0))[1:]
        cached = sum(prefix in self.cache for prefix in prefixes)
        if self.radix_cache:
            self.cache.update(prefixes)
        out = []
        for _ in range(params["max_new_tokens"]):
            slip = self.slips_left > 0 and params["max_new_tokens"] > 1 and len(out) == 1 and not logprobs
            self.slips_left -= slip
            out.append(self.choices((*prompt, *out))[slip])
        self.answered += 1
        info = {
            "finish_reason": {"type": "length"}, "prompt_tokens": len(prompt), "cached_tokens": cached,
            "ttft": 0.5, "e2e_latency": 1.0,
        }  # fmt: skip
        if logprobs:
            first, second = self.choices(prompt)
            info["output_top_logprobs"] = [[(-0.5, first, None), (-0.55, second, None)]]
        return {"text": "", "output_ids": out, "meta_info": info}


@pytest.fixture(autouse=True)
def fresh():
    FakeRuntime.made, FakeRuntime.slips = [], 0


def bench(capsys, *argv: str, runtime=FakeRuntime):
    """Exit code, stdout lines, the JSON of the last one, stderr."""
    code = main(list(argv), runtime)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    return SimpleNamespace(code=code, out=out, err=err, json=json.loads(lines[-1]) if code == 0 else None)


def setting(**options) -> Setting:
    return Setting(**{"tokenizer": WordTokenizer(), "vocab_size": VOCAB, **options})


def digest(requests: list[BenchRequest]) -> str:
    data = [[request.prompt.tolist(), request.max_new_tokens] for request in requests]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


# ---------------------------------------------------------------- questions


def test_every_subject_has_enough_facts_and_each_is_asked_once():
    assert len(SUBJECTS) >= 10
    for subject in SUBJECTS.values():
        assert len(subject.items) >= 40, subject.name
        assert len({repr(item) for item in subject.items}) == len(subject.items), subject.name


def test_tables_have_no_repeated_key_and_groups_no_shared_word():
    for name, value in vars(facts).items():
        if name.isupper() and isinstance(value, list) and isinstance(value[0], tuple):
            keys = [key for key, _ in value]
            assert len(set(keys)) == len(keys), name
            assert all(key and answer for key, answer in value), name
    for name in ("ANIMALS", "CONTINENTS", "CATEGORIES"):
        words = [word for group in getattr(facts, name).values() for word in group]
        assert len(set(words)) == len(words), name


@pytest.mark.parametrize("name", SUBJECTS)
def test_questions_have_four_options_of_which_one_is_right(name):
    subject = SUBJECTS[name]
    for item in subject.items:
        question = subject.ask(item, random.Random(1))
        assert len(set(question.options)) == 4
        assert question.options.index(question.options[question.answer]) == question.answer
        assert question.prompt.startswith("Question: ") and question.prompt.endswith(question.stem)
        assert question.shot == f"{question.prompt} {question.options[question.answer]}\n\n"
        assert question == subject.ask(item, random.Random(1))


def test_known_answers():
    def answer(name, item):
        question = SUBJECTS[name].ask(item, random.Random(0))
        return question.stem, question.options[question.answer]

    assert answer("capitals", ("Peru", "Lima")) == ("The capital of Peru is", "Lima")
    assert answer("arithmetic", (3, 4)) == ("Three plus four equals", "seven")
    assert answer("animals", ("owl", "bird")) == ("An owl is a kind of", "bird")
    assert answer("continents", ("Peru", "South America")) == ("Peru is a country in", "South America")


# ---------------------------------------------------------------- few-shot


def test_fewshot_shares_about_a_thousand_tokens_per_subject():
    requests = fewshot(setting(requests=60))
    assert len(requests) == 60
    groups = defaultdict(list)
    for request in requests:
        assert request.max_new_tokens == 1 and request.answer is not None
        groups[request.group].append(request.prompt)
    assert set(groups) == set(SUBJECTS)
    for name, prompts in groups.items():
        assert len(prompts) == 5
        shared = min(common_prefix(prompts[0], prompt) for prompt in prompts[1:])
        assert 800 <= shared <= 1200, (name, shared)
        assert all(len(prompt) - shared <= 45 for prompt in prompts)
    order = [request.group for request in requests]
    assert order != sorted(order)


def test_fewshot_is_a_function_of_its_seed():
    assert digest(fewshot(setting(requests=30, seed=7))) == digest(fewshot(setting(requests=30, seed=7)))
    assert digest(fewshot(setting(requests=30, seed=7))) != digest(fewshot(setting(requests=30, seed=8)))


def test_fewshot_answers_are_first_tokens_and_no_example_is_asked():
    tokenizer = WordTokenizer()
    requests = fewshot(setting(tokenizer=tokenizer, requests=56, shots=4))
    words = {token: word for word, token in tokenizer.ids.items()}
    seen = set()
    for request in requests:
        text = "".join(words[token] for token in request.prompt)
        *shots, asked = text.split("Question: ")[1:]
        assert len(shots) == 4
        answered = asked.split("Answer: ")[1] + words[request.answer]
        assert all(answered not in shot for shot in shots)
        options = asked.split("Choices: ")[1].split(".\n")[0].split(", ")
        assert words[request.answer].strip() in [option.split()[0].split("-")[0] for option in options]
        assert text not in seen
        seen.add(text)


def test_fewshot_without_examples_and_with_too_many():
    assert all(len(request.prompt) < 60 for request in fewshot(setting(requests=28, shots=0)))
    with pytest.raises(BenchError, match="--shots"):
        fewshot(setting(requests=28, shots=500))


def test_fewshot_refuses_a_tokenizer_that_cannot_tell_options_apart():
    class Characters:
        def encode(self, text):
            return np.array([ord(c) for c in text], np.int32)

    with pytest.raises(BenchError, match="--random-ids"):
        fewshot(setting(tokenizer=Characters(), requests=14, shots=1))


# ---------------------------------------------------------------- MMLU's files


ROWS = ["{}?,one,two,three,four,{}".format(f"what is {i}", "ABCD"[i % 4]) for i in range(8)]


@pytest.fixture
def mmlu_folder(tmp_path):
    for part, rows in (("dev", ROWS[:5]), ("test", ROWS[5:]), ("val", ROWS[4:5])):
        (tmp_path / part).mkdir()
        for name in ("world_history", "zoology"):
            (tmp_path / part / f"{name}_{part}.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_mmlu_layout_and_format(mmlu_folder):
    tokenizer = WordTokenizer()
    requests = fewshot(setting(tokenizer=tokenizer, data=mmlu_folder, shots=2))
    assert sorted(request.group for request in requests) == ["world_history"] * 3 + ["zoology"] * 3
    words = {token: word for word, token in tokenizer.ids.items()}
    texts = {"".join(words[token] for token in r.prompt): words[r.answer] for r in requests}
    expected = (
        "The following are multiple choice questions (with answers) about world history.\n\n"
        "what is 0?\nA. one\nB. two\nC. three\nD. four\nAnswer: A\n\n"
        "what is 1?\nA. one\nB. two\nC. three\nD. four\nAnswer: B\n\n"
        "what is 6?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    )
    assert texts[expected] == " C"


def test_mmlu_uses_five_shots_fewer_if_they_do_not_fit_and_val_without_test(mmlu_folder):
    five = fewshot(setting(data=mmlu_folder))
    assert len({(request.group, len(request.prompt)) for request in five}) == 2
    fewer = fewshot(setting(data=mmlu_folder, max_context=min(len(r.prompt) for r in five)))
    assert max(len(r.prompt) for r in fewer) < min(len(r.prompt) for r in five)
    for path in (mmlu_folder / "test").iterdir():
        path.unlink()
    assert len(fewshot(setting(data=mmlu_folder))) == 2


def test_mmlu_errors_name_the_file(mmlu_folder, tmp_path):
    with pytest.raises(BenchError, match="--shots"):
        fewshot(setting(data=mmlu_folder, shots=6))
    (mmlu_folder / "dev" / "zoology_dev.csv").write_text("a,b,c,d,e,E\n")
    with pytest.raises(BenchError, match=r"zoology_dev\.csv, row 1"):
        fewshot(setting(data=mmlu_folder))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BenchError, match="no dev"):
        fewshot(setting(data=tmp_path / "empty"))


# ---------------------------------------------------------------- token-level workloads


def test_token_level_workloads_are_those_that_other_engines_were_measured_on():
    """Digests of the published requests: 256 x U[100, 1024] with seed 0, and 10 groups x 64 with seed 1."""
    assert digest(uniform(setting(device="cuda"))).startswith("ccf124a4a48a1ef77a26207e")
    assert digest(uniform(setting(device="cpu"))).startswith("c6107811f6105591d35fc9a6")
    assert digest(fewshot(setting(device="cuda", random_ids=True))).startswith("9f85ef27b9447608b6c76cc1")


def test_workload_sizes():
    assert len(uniform(setting(requests=3, lengths=(7, 7)))) == 3
    assert {(len(r.prompt), r.max_new_tokens) for r in uniform(setting(lengths=(7, 7)))} == {(7, 7)}
    assert [(len(r.prompt), r.max_new_tokens) for r in decode(setting())] == [(32, 128)] * 16
    assert max(int(r.prompt.max()) for r in uniform(setting(vocab_size=100))) < 100
    assert len(fewshot(setting(tokenizer=None, requests=7))) == 7


# ---------------------------------------------------------------- figures


def test_optimal_cached_tokens_is_every_distinct_prefix_once():
    rng = random.Random(0)
    for _ in range(200):
        prompts = [
            np.array([rng.randrange(3) for _ in range(rng.randint(1, 8))], np.int32)
            for _ in range(rng.randint(1, 9))
        ]
        trie = {tuple(prompt[:i].tolist()) for prompt in prompts for i in range(1, len(prompt) + 1)}
        repeated = len(prompts) - len(
            {tuple(prompt.tolist()) for prompt in prompts}
        )  # their last token is computed
        assert optimal_cached_tokens(prompts) == sum(map(len, prompts)) - len(trie) - repeated


def test_optimal_cached_tokens_sorts_by_token_not_by_byte():
    a, b, c = ([1, 256, 3], [1, 256, 4], [1, 1, 9])
    assert optimal_cached_tokens([np.array(x, np.int32) for x in (a, c, b)]) == 3
    assert optimal_cached_tokens([]) == 0


def request(n: int = 4, answer: int | None = None, new: int = 1) -> BenchRequest:
    return BenchRequest(np.arange(5, 5 + n, dtype=np.int32), new, answer, "group")


def test_accuracy_counts_only_scored_requests_and_an_empty_output_is_wrong():
    requests = [request(answer=1), request(answer=2), request(answer=3), request()]
    run = Run([Record([1], 4), Record([9], 4), Record([], 4), Record([1], 4)], 1.0)
    assert accuracy(requests, run) == pytest.approx(1 / 3)
    assert accuracy([request()], Run([Record([1], 4)], 1.0)) is None


def test_differences_are_where_outputs_first_part():
    one = Run([Record([1, 2, 3], 1), Record([1, 2], 1), Record([5], 1)], 1.0)
    other = Run([Record([1, 2, 3], 1), Record([1, 4], 1), Record([5, 6], 1)], 1.0)
    assert differences(one, other) == [Difference(1, 1, (2, 4)), Difference(2, 1, (None, 6))]


def test_summary_figures():
    requests = [request(10), request(10)]
    run = Run([Record([1], 10, 0, ttft=0.1, latency=0.2), Record([1], 10, 9, ttft=0.3, latency=0.4)], 2.0)
    base = Run([Record([1], 10, 0, ttft=1.0, latency=1.0), Record([1], 10, 0, ttft=2.0, latency=2.0)], 8.0)
    result = summary(requests, run, base, [], {"hf": (requests[:1], Run([Record([2], 10)], 5.0))})
    assert result["hit_rate"] == 9 / 20 == result["optimal_hit_rate"]
    assert result["speedup"] == 4 and result["requests_per_s"] == 1
    assert result["ttft_ms_p50"] == pytest.approx(200) and result["baseline_ttft_ms_p50"] == pytest.approx(
        1500
    )
    assert result["ratio_hf"] == pytest.approx(5) and result["hf_outputs_equal"] == 0
    assert result["outputs_equal"] is True and result["outputs_equal_up_to_near_ties"] is True


@pytest.mark.parametrize(
    ("gap", "dtype", "near"),
    [
        (0.125, "bfloat16", True),
        (0.125, "float32", False),
        (0.5, "bfloat16", False),
        (None, "bfloat16", False),
    ],
)
def test_a_difference_is_a_near_tie_only_if_rounding_can_explain_it(gap, dtype, near):
    run, base = Run([Record([1], 4)], 1.0), Run([Record([2], 4)], 1.0)
    result = summary([request()], run, base, [Difference(0, 0, (1, 2), gap)], dtype=dtype)
    assert result["outputs_equal"] is False and result["outputs_different"] == 1
    assert result["outputs_equal_up_to_near_ties"] is near


def test_median_run():
    assert median([Run([], s) for s in (3.0, 1.0, 2.0)]).seconds == 2.0
    assert median([Run([], s) for s in (2.0, 1.0)]).seconds == 1.0


# ---------------------------------------------------------------- running


def test_measure_warms_up_and_starts_every_run_with_an_empty_cache():
    runtime = FakeRuntime()
    requests = [request(n, new=20) for n in (4, 6, 8)]
    runs = measure(runtime, WORKLOADS["uniform"], requests, "test", runs=2, warmup=2)
    assert [[record.cached_tokens for record in run.records] for run in runs] == [[0, 3, 5]] * 2
    assert all(len(record.output_ids) == 20 for run in runs for record in run.records)
    assert runtime.answered == 2 + 2 * 3 and not runtime.cache


def test_an_aborted_request_is_an_error():
    class Aborting(FakeRuntime):
        def _answer(self, *args):
            reply = super()._answer(*args)
            reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "out of room"}
            return reply

    with pytest.raises(BenchError, match="out of room"):
        submit_all(Aborting(), [request()], "test")


def test_explain_asks_for_the_gap_where_outputs_part():
    runtime = FakeRuntime(radix_cache=False)
    requests = [request(new=3)]
    prompt = tuple(requests[0].prompt.tolist())
    first, second = runtime.choices((*prompt, 77))
    run = Run([Record([77, second, 1], 4)], 1.0)
    found = [
        Difference(0, 1, (second, first)),
        Difference(0, 1, (second, 3)),
        Difference(0, 1, (None, first)),
    ]
    gaps = [difference.gap for difference in explain(runtime, requests, run, found)]
    assert gaps == [pytest.approx(0.05), None, None]


# ---------------------------------------------------------------- the command line


def test_default_run_reports_both_and_ends_with_json(capsys):
    result = bench(capsys, "--workload", "fewshot", "--requests", "42", "--set", "chunk_size=256")
    assert result.code == 0
    assert set(JSON_KEYS) <= set(result.json)
    assert result.json["requests"] == 42 and result.json["workload"] == "fewshot"
    assert result.json["hit_rate"] == result.json["optimal_hit_rate"] > 0.6
    assert result.json["outputs_equal"] is True and result.json["outputs_different"] == 0
    assert result.json["accuracy"] == result.json["baseline_accuracy"]
    assert result.json["ttft_ms_p50"] == 500
    assert [(r.radix_cache, r.open, r.options) for r in FakeRuntime.made] == [
        (True, False, {"chunk_size": 256}),
        (False, False, {"chunk_size": 256}),
    ]
    assert {r.dtype for r in FakeRuntime.made} == {"torch.float16"} and result.json["dtype"] == "float16"
    assert "cache on" in result.out and "cache off" in result.out and "accuracy by subject" in result.out
    assert "cache on" in result.err  # the progress bar


def test_no_baseline(capsys):
    result = bench(capsys, "--workload", "uniform", "--requests", "4", "--no-baseline", "--model", "some")
    assert len(FakeRuntime.made) == 1
    assert result.json["model"] == "some"
    for key in ("baseline_requests_per_s", "speedup", "outputs_equal", "baseline_accuracy", "accuracy"):
        assert result.json[key] is None
    assert "cache off" not in result.out


def test_differing_outputs_are_counted_and_their_gap_is_told(capsys):
    FakeRuntime.slips = 4 + 3  # the four of the warm-up, and three of those that count
    result = bench(
        capsys, "--workload", "decode", "--requests", "4", "--lengths", "8", "5", "--dtype", "float32"
    )
    assert result.json["outputs_equal"] is False and result.json["outputs_different"] == 3
    assert result.json["largest_gap"] == pytest.approx(0.05) and result.json["gaps_unknown"] == 0
    assert result.json["outputs_equal_up_to_near_ties"] is False  # not in float32
    assert "differ between cache on and off" in result.out and "0.050 apart" in result.out


def test_mmlu_through_the_command_line(capsys, mmlu_folder):
    result = bench(capsys, "--data", str(mmlu_folder), "--shots", "3", "--no-baseline")
    assert result.json["requests"] == 6 and set(result.json["accuracy_by_group"]) == {
        "world_history",
        "zoology",
    }


def test_a_model_without_a_tokenizer_gets_random_ids(capsys):
    class NoTokenizer(FakeRuntime):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            del self.tokenizer

        def __getattr__(self, name):
            raise ValueError("no tokenizer files")

    result = bench(capsys, "--requests", "12", "--no-baseline", runtime=NoTokenizer)
    assert result.json["accuracy"] is None and result.json["requests"] == 12
    assert result.json["prompt_tokens"] > 12 * 1000


def test_adding_a_workload_is_a_small_thing(capsys, monkeypatch):
    monkeypatch.setattr("minisgl.bench.workloads.WORKLOADS", WORKLOADS)

    @workload("twins", "every prompt twice")
    def twins(setting: Setting) -> list[BenchRequest]:
        return [request(8), request(8)]

    try:
        result = bench(capsys, "--workload", "twins", "--no-baseline")
    finally:
        del WORKLOADS["twins"]
    assert result.json["cached_tokens"] == 7 and result.json["optimal_hit_rate"] == 7 / 16


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--workload", "nothing"], "--workload"),
        (["--requests", "0"], "at least 1"),
        (["--requests", "many"], "at least 1"),
        (["--shots", "-1"], "--shots"),
        (["--compare", "nobody"], "--compare"),
        (["--set", "novalue"], "NAME=VALUE"),
    ],
)
def test_bad_values_are_one_line_errors(capsys, argv, words):
    with pytest.raises(SystemExit) as stopped:
        main(argv, FakeRuntime)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--workload", "uniform", "--shots", "3"], "--shots means nothing to --workload uniform"),
        (["--workload", "uniform", "--shots", "0"], "--shots means nothing to --workload uniform"),
        (["--lengths", "3", "4"], "--lengths means nothing to --workload fewshot"),
        (["--workload", "decode", "--random-ids"], "--random-ids means nothing"),
        (["--random-ids", "--shots", "2"], "--random-ids goes neither"),
        (["--workload", "uniform", "--lengths", "9", "4"], "--lengths"),
        (["--compare-batch", "4"], "need --compare"),
        (["--data", "/no/such/folder"], "--data: no folder"),
        (["--set", "radix_cache=False"], "--set radix_cache"),
        (["--set", "chunks=5"], "unexpected argument 'chunks'"),
    ],
)
def test_options_that_do_not_fit_are_one_line_errors(capsys, argv, words):
    result = bench(capsys, *argv)
    assert result.code == 2
    assert result.out == "" and words in result.err and len(result.err.splitlines()) == 1
    assert not any(runtime.open for runtime in FakeRuntime.made)


def test_an_interrupt_ends_it_quietly(capsys):
    class Interrupted(FakeRuntime):
        def generate(self, **options):
            raise KeyboardInterrupt

    assert bench(capsys, "--requests", "14", runtime=Interrupted).code == 130


# ---------------------------------------------------------------- with a real engine, and beside transformers


def write_config(folder, **changes):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("argv", [
    ["--workload", "fewshot", "--requests", "20"],
    ["--workload", "uniform", "--requests", "6", "--lengths", "3", "20"],
])  # fmt: skip
def test_a_real_runtime_on_random_weights(capsys, tmp_path, argv):
    model = [
        "--model",
        str(write_config(tmp_path)),
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    result = bench(capsys, *argv, *model, "--set", "kv_capacity=40000", runtime=None)
    assert result.code == 0, result.err
    assert result.json["outputs_equal"] is True
    assert result.json["hit_rate"] >= 0.98 * result.json["optimal_hit_rate"]
    assert result.json["prompt_tokens"] > 0 and result.json["dtype"] == "float32"


def test_hugging_face_batches_equal_one_by_one_and_ours(capsys, tmp_path):
    import torch

    from minisgl.bench.peers_hf import HuggingFace

    from . import tiny_models

    folder = tiny_models.make("llama2", tmp_path)
    rng = random.Random(0)
    requests = [
        BenchRequest(np.array([rng.randrange(5, 250) for _ in range(n)], np.int32), new)
        for n, new in ((5, 3), (17, 6), (1, 6), (9, 1), (30, 4))
    ]
    peer = HuggingFace(folder, dtype=torch.float32, device="cpu")
    alone, together = peer.run(requests, 1), peer.run(requests, 3)
    assert [len(record.output_ids) for record in together.records] == [3, 6, 6, 1, 4]
    assert not differences(alone, together)

    argv = [
        "--workload",
        "uniform",
        "--requests",
        "5",
        "--lengths",
        "3",
        "12",
        "--model",
        str(folder),
        "--dtype",
        "float32",
    ]
    result = bench(
        capsys, *argv, "--device", "cpu", "--compare", "hf", "--compare-requests", "4",
        "--compare-batch", "2", "--no-baseline", "--set", "kv_capacity=2000", runtime=None,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert result.json["hf_requests"] == 4 and result.json["hf_outputs_equal"] == 4
    assert (
        result.json["ratio_hf"] > 0 and result.json["hf_dtype"] == "float32" and result.json["hf_batch"] == 2
    )
    assert "the requests/s of hf" in result.out


@pytest.mark.gpu
@pytest.mark.parametrize("argv", [
    ["--workload", "fewshot", "--requests", "60"],
    ["--workload", "uniform", "--requests", "16", "--lengths", "20", "60"],
])  # fmt: skip
def test_llama_8b_shape_on_a_gpu(capsys, tmp_path, argv):
    write_config(
        tmp_path, vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=8192,
        rope_theta=500000.0, torch_dtype="bfloat16",
    )  # fmt: skip
    result = bench(
        capsys, *argv, "--model", str(tmp_path), "--load-format", "dummy", "--device", "cuda", runtime=None
    )
    assert result.code == 0, result.err
    assert result.json["dtype"] == "bfloat16" and result.json["requests_per_s"] > 0
    assert result.json["hit_rate"] >= 0.98 * result.json["optimal_hit_rate"]
