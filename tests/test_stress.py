"""A few seconds of the stress run (`python -m tests.stress` goes on for as long as it is told), and tests of it."""

from __future__ import annotations

import json
import time

import pytest

from . import stress, stress_cases
from .stress_check import Disagreement
from .stress_models import Model
from .stress_run import Run


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    return Model("scripted", tmp_path_factory.mktemp("scripted"))


def test_random_cases_on_a_model_where_every_wrong_slot_shows(scripted):
    totals = stress.no_totals()
    begin = time.process_time()
    for number in range(9_000_000, 9_000_020):
        stress.run_case(scripted, stress_cases.make(number), totals)
        if time.process_time() - begin > 3:
            break
    assert totals["cases"] > 1 and totals["tokens"] > 50


def test_random_cases_on_a_tiny_llama_against_transformers(tmp_path):
    totals = stress.no_totals()
    stress.run_case(Model("tiny", tmp_path), stress_cases.make(9_000_003), totals)
    assert totals["requests"] > 5


# ---- the check itself -----------------------------------------------------------------------------------------------

CASE = {
    "seed": 0,
    "options": {"kv_capacity": 300, "max_running_requests": 4},
    "clients": [
        [
            {
                "do": "generate", "prompts": ["abcdef", "abcdeg"], "how": "call", "after": 0,
                "params": [{"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}] * 2,
                "options": {"return_logprob": True, "logprob_start_len": 1},
            },
            {
                "do": "program", "items": ["x", "y"], "how": "batch", "run": {"temperature": 0, "max_new_tokens": 4},
                "body": [["text", "abcd"], ["item"], ["gen", "a", {}],
                         ["fork", 2, [["index"], ["gen", "b", {}]], "concate_and_append"],
                         ["role", "user", [["read", "a"], ["select", "c", ["one", "two"], 0]]]],
            },
        ]
    ],
}  # fmt: skip


def test_a_right_run_passes(scripted):
    checker = Run(scripted, CASE).run()
    assert checker.replies > 10 and checker.tokens > 30


@pytest.mark.parametrize("what", ["token", "slot", "text", "score", "end", "variable"])
def test_a_wrong_answer_does_not(scripted, what, monkeypatch):
    """One thing is falsified on its way; the check must name it."""
    run = Run(scripted, CASE)
    wait = run._wait_for_ends

    def falsify(runtime):
        wait(runtime)
        sink = next(s for s in run._taken() if len(s.request.output) == 8)
        if what == "token":
            sink.request.tokens[-1] ^= 1
        elif what == "slot":
            node = next(iter(runtime.tree.nodes()))
            runtime.engine.runner.model.kv[node.slots[0]] += 1
        elif what == "text":
            sink._text = "another"
        elif what == "score":
            assert sink.logprobs is not None
            value, token, text = sink.logprobs.output[3]
            sink.logprobs.output[3] = ((value or 0) + 0.01, token, text)
        elif what == "end":
            sink.request.finish_reason = {"type": "stop", "matched": 257}
        else:
            state = run.programs[0][2]
            state["a"] = "another"

    monkeypatch.setattr(run, "_wait_for_ends", falsify)
    with pytest.raises((Disagreement, AssertionError)):
        run.run()


def test_cases_are_json_and_the_same_for_the_same_seed():
    for number in range(20):
        case = stress_cases.make(number)
        assert json.loads(json.dumps(case)) == case == stress_cases.make(number)


def test_shrinking_keeps_what_fails():
    """It needs one action, one prompt and one switch of this case."""
    case = next(c for c in map(stress_cases.make, range(100)) if len(c["clients"]) > 2)
    prompt = next(a["prompts"][-1] for c in case["clients"] for a in c if a["do"] == "generate")

    def fails(candidate):
        prompts = [p for c in candidate["clients"] for a in c for p in a.get("prompts", ())]
        return prompt in prompts and "eviction" in candidate["options"]

    small = stress.shrink(case, fails)
    assert len(small["clients"]) == 1 and len(small["clients"][0]) == 1
    assert small["clients"][0][0]["prompts"] == [prompt]
    assert set(small["options"]) == {"kv_capacity", "eviction"}
