"""Does the stress run find faults?  Each is planted in the engine's code, and a case that reaches it must disagree.

The cases are fixed and have one client, so that what meets what does not depend on threads.
"""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from typing import Any

import pytest

from minisgl.request import Request, Rows
from minisgl.runner import Runner
from minisgl.scheduler import Scheduler

from . import test_scheduler
from .stress_models import Model
from .stress_run import Run


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    return Model("scripted", tmp_path_factory.mktemp("planted"))


def plant(monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], right: str, wrong: str) -> None:
    """Write a method of a class anew, with `wrong` in the place of `right`."""
    owner, name = where
    found = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(found.fget if isinstance(found, property) else found))
    assert source.count(right) == 1, f"{owner.__name__}.{name} has not just one {right!r}"
    code = compile(source.replace(right, wrong), "<planted>", "exec", __future__.annotations.compiler_flag)
    made: dict[str, Any] = {}
    exec(code, sys.modules[owner.__module__].__dict__, made)
    monkeypatch.setattr(owner, name, made[name])


# ---- cases -----------------------------------------------------------------------------------------------------------


def generate(prompts: list[str], params: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    params = [{"temperature": 0, "ignore_eos": True, **given} for given in params]
    return {"do": "generate", "prompts": prompts, "params": params, "options": options, "how": "call", "after": 0}


def case(*actions: dict[str, Any], **options: Any) -> dict[str, Any]:
    switches = {"kv_capacity": 1200, "max_running_requests": 6, "overlap": True}
    return {"seed": 0, "options": {**switches, **options}, "clients": [list(actions)]}


PROMPTS = [f"abcdef{i}" for i in range(6)]
PLAIN = {"max_new_tokens": 24}
JUMPING = {"max_new_tokens": 60, "regex": "(cat|dog) forced text[ab]{2} and more forced text"}
SEEDED = [{"max_new_tokens": 5, "temperature": 1.0, "seed": i} for i in range(6)]
ENDING = {"max_new_tokens": 12, "stop_token_ids": [*range(97, 110)]}

CASES = {
    "one jumps among others": case(generate(PROMPTS, [PLAIN] * 5 + [JUMPING])),
    "a stop in forced text": case(generate(PROMPTS, [PLAIN] * 5 + [{**JUMPING, "stop": "forced t"}])),
    "the same again": case(*[generate(PROMPTS, [PLAIN] * 6)] * 2),
    "too little memory": case(
        generate(PROMPTS, [{**PLAIN, "frequency_penalty": 1.5}] * 6), kv_capacity=60, overcommit=True
    ),
    "stop ids": case(generate(PROMPTS, [ENDING] * 6), max_running_requests=3),
    "one row": case(generate(PROMPTS, SEEDED), max_running_requests=1),
    "no cache": case(generate(PROMPTS, [PLAIN] * 6), radix_cache=False),
    "scored": case(*[generate(PROMPTS, [PLAIN] * 6, return_logprob=True, logprob_start_len=2)] * 2),
}

# name: the case that finds it, the method, what stands there, what stands there instead
FAULTS = {
    "dropped samples are not marked": (
        "one jumps among others", (Scheduler, "force"), "launched.dropped[i] = True", "pass",
    ),
    "dropped samples are taken": (
        "one jumps among others", (Scheduler, "commit"), "& ~batch.dropped[batch.samples]", "",
    ),
    "forced tokens stay behind a stop string": (
        "a stop in forced text", (Scheduler, "unforce"), "self.rows.num_tokens[request.row] -= n", "pass",
    ),
    "the whole prompt comes from the cache": (
        "the same again", (Request, "reusable"), "len(self.tokens) - 1", "len(self.tokens)",
    ),
    "what is read is not locked": (
        "the same again", (Scheduler, "_share"), "self.tree.lock(inserted.node)", "pass",
    ),
    "penalties forget what a retracted request said": (
        "too little memory", (Runner, "_start_penalties"), "request.prompt_len : self.rows.num_tokens[row]", ":0",
    ),
    "a late result goes to the row's next holder": (
        "stop ids", (Rows, "vacate"), "self.generation[row] += 1", "pass",
    ),
    "a stop id counts one token late": (
        "stop ids", (Scheduler, "commit"), "(n > state.min_len[rows])", "(n > state.min_len[rows] + 1)",
    ),
    "a row's holder is sampled like the last one": (
        "one row", (Runner, "_sampling_batch"), " and np.array_equal(generation, cached_generation)", "",
    ),
    "slots are not given back": (
        "no cache", (Scheduler, "_release"), "self.allocator.free(", "len(",
    ),
    "scored prompts come from the cache": (
        "scored", (Request, "reusable"), "limit = min(limit, max(self.logprob_start - 1, 0))", "pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_without_a_fault_the_case_passes(scripted, name):
    assert Run(scripted, CASES[name]).run().replies >= 6


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(scripted, monkeypatch, fault):
    name, where, right, wrong = FAULTS[fault]
    plant(monkeypatch, where, right, wrong)
    with pytest.raises(AssertionError):  # `Disagreement` is one
        Run(scripted, CASES[name]).run()


def test_unread_tokens_as_keys_are_found_where_the_loops_never_go(monkeypatch):
    """No case can reach this one: both loops of the engine end requests only when the last step's tokens are read."""
    right = "min(int(state.kv_len[row]), int(state.num_tokens[row]))"
    plant(monkeypatch, (Scheduler, "_release"), right, "int(state.kv_len[row])")
    with pytest.raises(AssertionError):
        test_scheduler.test_an_abort_between_forming_a_step_and_committing_the_last_keeps_known_tokens_only()
