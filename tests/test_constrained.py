"""Grammars through the whole engine: valid output, jump-forward that changes nothing but the number of steps."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time

import pytest

from minisgl import Runtime
from minisgl.expressions import Budget
from minisgl.tokenizer import ByteTokenizer

from . import tiny_models

REGEX = r'\{"name": "[a-z]{2,6}", "house": "(north|south)", "age": [0-9]{1,2}\}'
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["title", "count"],
    "additionalProperties": False,
}
PROMPTS = ["Fill in: ", "Another one: ", "x", "And a longer prompt than the others, to be cut into chunks: "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.make("smollm2", tmp_path_factory.mktemp("constrained"))


@pytest.fixture(scope="module")
def runtime(folder):
    with Runtime(folder, dtype="float32", kv_capacity=4000, grammar_backend="fsm") as runtime:
        yield runtime


def params(**more):
    return {"regex": REGEX, "max_new_tokens": 120, "temperature": 0, **more}


def texts(replies):
    return [reply["text"] for reply in replies]


@pytest.fixture(scope="module")
def expected(folder):
    """Each prompt alone, without jump-forward or cache."""
    with Runtime(folder, dtype="float32", jump_forward=False, radix_cache=False, kv_capacity=4000) as runtime:
        return [runtime.generate(p, params())["output_ids"] for p in PROMPTS]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("jump", [False, True])
@pytest.mark.parametrize("chunk", [8, -1])
def test_same_output_with_every_switch(folder, expected, overlap, jump, chunk):
    with Runtime(
        folder, dtype="float32", overlap=overlap, jump_forward=jump, chunk_size=chunk, kv_capacity=4000
    ) as runtime:
        free = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
        replies = runtime.generate([*PROMPTS, *PROMPTS], [params()] * 4 + [free] * 4)
        assert [r["output_ids"] for r in replies[:4]] == expected
        alone = [runtime.generate(p, free)["output_ids"] for p in PROMPTS]
        assert [r["output_ids"] for r in replies[4:]] == alone
        assert all(re.fullmatch(REGEX, r["text"]) for r in replies[:4])
        assert (replies[0]["meta_info"]["forced_tokens"] > 0) == jump
        runtime._engine.call(runtime.scheduler.check)


def test_retraction_keeps_the_place_in_the_grammar(folder, expected):
    with Runtime(folder, dtype="float32", kv_capacity=160, overlap=True) as runtime:
        runtime.scheduler.reserve_ratio = 0.0
        replies = runtime.generate(PROMPTS, params())
        assert [r["output_ids"] for r in replies] == expected
        runtime._engine.call(runtime.scheduler.check)


def test_forced_tokens_save_steps(folder):
    steps = {}
    for jump in (False, True):
        with Runtime(folder, dtype="float32", jump_forward=jump, kv_capacity=4000) as runtime:
            runtime.generate(PROMPTS, params())
            steps[jump] = runtime.stats()["steps"]
    assert steps[False] >= 2.5 * steps[True]


def test_json_schema_gives_json(runtime):
    reply = runtime.generate("data: ", {"json_schema": SCHEMA, "max_new_tokens": 80, "seed": 1})
    value = json.loads(reply["text"])
    assert set(value) == {"title", "count"} and 0 <= value["count"] <= 99
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"


def test_n_and_seeds(runtime):
    replies = runtime.generate("data: ", params(temperature=1.0, seed=4, n=3))
    assert all(re.fullmatch(REGEX, t) for t in texts(replies)) and len(set(texts(replies))) > 1
    assert texts(runtime.generate("data: ", params(temperature=1.0, seed=4, n=3))) == texts(replies)


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 15, 40])
def test_the_limit_counts_forced_tokens(runtime, expected, limit):
    reply = runtime.generate(PROMPTS[0], params(max_new_tokens=limit))
    assert reply["output_ids"] == expected[0][:limit]
    assert reply["meta_info"]["finish_reason"] == {"type": "length"}


@pytest.mark.parametrize("stop", ["me", '"house', "{"])
def test_a_stop_string_inside_forced_text(runtime, expected, stop):
    whole = runtime.tokenizer.decode(expected[0])
    reply = runtime.generate(PROMPTS[0], params(stop=stop))
    assert reply["text"] == whole[: whole.index(stop)]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    runtime._engine.call(runtime.scheduler.check)


def test_streaming_joins_to_the_same_text(runtime, expected):
    chunks = list(runtime.generate(PROMPTS[1], params(), stream=True))
    assert "".join(c["delta"] for c in chunks) == runtime.tokenizer.decode(expected[1])


def test_logprobs_of_a_constrained_request(runtime, expected):
    reply = runtime.generate(PROMPTS[0], params(), return_logprob=True)
    assert reply["output_ids"] == expected[0]
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(expected[0])


def test_penalties_see_forced_tokens(folder):
    outputs = []
    for jump in (False, True):
        with Runtime(folder, dtype="float32", jump_forward=jump, kv_capacity=4000) as runtime:
            outputs.append(runtime.generate(PROMPTS[0], params(frequency_penalty=1.5))["output_ids"])
    assert outputs[0] == outputs[1]


def test_eos_ends_a_constrained_output_even_when_it_is_to_be_ignored(runtime):
    reply = runtime.generate("x", {"regex": "[ab]{3}", "ignore_eos": True, "max_new_tokens": 20})
    assert re.fullmatch("[ab]{3}", reply["text"])


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        ({"regex": "(?=a)b"}, "look"),
        ({"regex": "[a"}, "regex|pattern|class|bracket|unterminated"),
        ({"json_schema": {"type": "string", "contentEncoding2": 1, "unevaluatedItems": False}}, "unevaluatedItems"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "."),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"structural_tag": {"type": "x"}}, "structural_tag"),
    ],
)
def test_a_grammar_that_cannot_be_is_its_callers_error(runtime, bad, names):
    with pytest.raises(ValueError, match=names):
        runtime.generate("x", bad)
    assert runtime.stats()["running"] == 0
    assert runtime.generate("x", {"regex": "ok", "max_new_tokens": 5})["text"] == "ok"


def test_a_chat_template_beside_a_tokenizer_is_refused(folder):
    with pytest.raises(ValueError, match="chat_template is for the model's own tokenizer"):
        Runtime(folder, tokenizer=ByteTokenizer(), chat_template="{{ messages }}")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at_start", [False, True])
def test_n_outputs_and_forced_starts_are_as_alone(folder, overlap, at_start):
    """n > 1, chunked prefill, free neighbours; with the jump at an output's start joined to its prompt and without."""
    with Runtime(folder, dtype="float32", overlap=overlap, chunk_size=8, kv_capacity=4000) as runtime:
        runtime._engine.jump_at_start = at_start
        seeded = [params(temperature=1.0, seed=seed) for seed in (3, 4)]
        alone = [runtime.generate(PROMPTS[3], {**p, "n": 1})["output_ids"] for p in seeded]
        mixed = runtime.generate([PROMPTS[0], *PROMPTS], [{"max_new_tokens": 20, "ignore_eos": True}, *seeded, *seeded])
        assert [reply["output_ids"] for reply in mixed[4:]] == alone[1:]
        several = runtime.generate(PROMPTS[3], params(temperature=1.0, seed=3, n=3))
        assert len(several) == 3 and several[0]["output_ids"] == alone[0]
        for reply in [*mixed[1:], *several]:
            assert re.fullmatch(REGEX, reply["text"]) and reply["meta_info"]["finish_reason"]["type"] == "stop"
            assert reply["meta_info"]["forced_tokens"] > 10
        short = runtime.generate("x", {"regex": "only this text", "max_new_tokens": 4, "temperature": 0})
        assert short["meta_info"]["finish_reason"] == {"type": "length"} and len(short["output_ids"]) == 4
        runtime._engine.call(runtime.scheduler.check)


BOMBS = [
    {"regex": r"(a|b)*a(a|b){20}"},
    {"json_schema": {"type": "string", "minLength": 100, "pattern": "(a|b)*a(a|b){20}"}},
]


def test_others_go_on_decoding_beside_bombs(runtime, monkeypatch):
    """Compiling is off the engine's thread and masks have a limit: a free request's tokens keep coming."""
    usual = Budget()
    assert usual.seconds < 10 and usual.mask_seconds < usual.seconds
    quick = (usual.nodes, usual.seconds / 4, usual.mask_seconds / 4)
    monkeypatch.setattr(Budget.__init__, "__defaults__", quick)
    ended: dict[int, float] = {}

    def explode(i: int) -> None:
        with contextlib.suppress(ValueError):  # answered or refused
            runtime.generate("y", {**BOMBS[i], "max_new_tokens": 40, "temperature": 0})
        ended[i] = time.monotonic() - begin

    begin = time.monotonic()
    threads = [threading.Thread(target=explode, args=[i]) for i in range(len(BOMBS))]
    for thread in threads:
        thread.start()
    gaps, free = [], {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    while any(thread.is_alive() for thread in threads):
        last = time.monotonic()
        for _ in runtime.generate("x", free, stream=True):
            now = time.monotonic()
            gaps.append(now - last)
            last = now
            if not any(thread.is_alive() for thread in threads):
                break
    assert len(ended) == len(BOMBS) and max(ended.values()) < 10
    assert len(gaps) > 20 and max(gaps) < 4 and sorted(gaps)[len(gaps) // 2] < 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pattern", ["abc", "(yes|no)", "and more (of this|of that)"])
def test_a_grammar_that_is_over_ends_the_output_below_min_new_tokens(folder, overlap, pattern):
    """Nothing may follow its text: neither more of it, which is not legal, nor one stop id after the other."""
    least = params(regex=pattern, min_new_tokens=60)
    with Runtime(folder, dtype="float32", overlap=overlap, kv_capacity=1000, grammar_backend="fsm") as runtime:
        plain = runtime.generate(PROMPTS, params(regex=pattern))
        alone = runtime.generate(PROMPTS[0], least)
        scored = runtime.generate(PROMPTS[1], least, return_logprob=True)
        among = runtime.generate(PROMPTS, [{"max_new_tokens": 80, "temperature": 0, "ignore_eos": True}] * 3 + [least])
        at_most = len(plain[0]["output_ids"])  # the stop is the last token that it may have
        exact = runtime.generate(PROMPTS[0], {**least, "min_new_tokens": at_most, "max_new_tokens": at_most})
        *_, streamed = runtime.generate(PROMPTS[2], {**least, "no_stop_trim": True}, stream=True)
        runtime.scheduler.check()
    for reply, want in zip((alone, scored, streamed, among[-1]), plain):
        assert reply["output_ids"] == want["output_ids"] and reply["output_ids"].count(want["output_ids"][-1]) == 1
        assert reply["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]
        assert re.fullmatch(pattern, want["text"])
    assert exact["meta_info"]["finish_reason"] == alone["meta_info"]["finish_reason"] and exact["text"] == alone["text"]
    assert [reply["text"] for reply in (alone, scored, among[-1])] == [plain[i]["text"] for i in (0, 1, 3)]
    assert len(scored["meta_info"]["output_token_logprobs"]) == len(scored["output_ids"])
    assert streamed["text"].startswith(plain[2]["text"])


def test_min_new_tokens_goes_on_while_the_grammar_can(runtime):
    reply = runtime.generate("x", params(regex="[ab]*", min_new_tokens=20, max_new_tokens=40))
    assert len(reply["output_ids"]) >= 20 and re.fullmatch("[ab]{19,}", reply["text"])
