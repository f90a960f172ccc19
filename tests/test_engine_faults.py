"""What goes wrong inside a running engine: whoever is affected is told why, nobody else, and it serves on."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from minisgl.grammar import FsmConstraint
from minisgl.output import EngineError, Sink
from minisgl.radix import RadixTree
from minisgl.request import Rows
from minisgl.runner import Runner
from minisgl.scheduler import Scheduler
from minisgl.stops import StopChecker, StopRegexTimeout

from . import engines
from .engines import GREEDY, check_idle, only_letters, random_ids


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def rt(request):
    runtime = engines.make(overlap=request.param, chunk_size=16, kv_capacity=400)
    yield runtime
    runtime.shutdown()


class Fault(Exception):
    """What the tests break things with."""


class Trap:
    """Replaces a function; raises at the `at`-th call, before or after the real one has done its work."""

    def __init__(self, real, at: int, after: bool):
        self.real, self.at, self.after, self.calls = real, at, after, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls != self.at:
            return self.real(*args, **kwargs)
        if self.after:
            self.real(*args, **kwargs)
        raise Fault(f"call {self.at}")


PLACES = {
    "forward": lambda rt: (rt._engine.runner.model, "forward"),
    "logits": lambda rt: (rt._engine.runner.model, "logits"),
    "attention": lambda rt: (rt._engine.runner.attention, "begin"),
    "launch": lambda rt: (rt._engine.runner, "launch"),
    "sample": lambda rt: (rt._engine.runner, "sample"),
    "results": lambda rt: (rt._engine.runner, "results"),
    "score": lambda rt: (rt._engine.runner, "_score_prompts"),
    "next_batch": lambda rt: (rt.scheduler, "next_batch"),
    "admit": lambda rt: (rt.scheduler, "_admit"),
    "extend": lambda rt: (rt.scheduler, "_extend"),
    "share": lambda rt: (rt.scheduler, "_share"),
    "release": lambda rt: (rt.scheduler, "_release"),
    "build": lambda rt: (rt.scheduler, "_build"),
    "commit": lambda rt: (rt.scheduler, "commit"),
    "finish": lambda rt: (rt.scheduler, "finish"),
    "add": lambda rt: (rt.scheduler, "add"),
    "alloc": lambda rt: (rt.scheduler.allocator, "alloc"),
    "free": lambda rt: (rt.scheduler.allocator, "free"),
    "take_row": lambda rt: (rt.scheduler.table, "take_row"),
    "give_row": lambda rt: (rt.scheduler.table, "give_row"),
    "occupy": lambda rt: (rt.scheduler.rows, "occupy"),
    "vacate": lambda rt: (rt.scheduler.rows, "vacate"),
    "insert": lambda rt: (rt.tree, "insert"),
    "match": lambda rt: (rt.tree, "match"),
    "lock": lambda rt: (rt.tree, "lock"),
    "unlock": lambda rt: (rt.tree, "unlock"),
    "deliver": lambda rt: (rt._engine, "_deliver"),
}


def batch_of_everything(rt):
    """Requests that between them pass through every part of the engine."""
    stem = random_ids(20, seed=50)
    prompts = [[*stem, 1], [*stem, 2], random_ids(40, seed=51), random_ids(5, seed=52), [1, 2, 3]]
    params = [
        GREEDY,
        {**GREEDY, "seed": 1, "temperature": 1.0},
        {**GREEDY, "stop": "never"},
        {**GREEDY, "n": 2, "max_new_tokens": 4},
        {**GREEDY, "regex": "[ab]{2}forced[ab]{5}"},
    ]
    options = {"return_logprob": True, "logprob_start_len": 2}
    return lambda: rt.generate(input_ids=prompts, sampling_params=params, **options)


@pytest.fixture(scope="module")
def want(rt):
    return [r["output_ids"] for r in batch_of_everything(rt)()]


@pytest.mark.parametrize("at, after", [(1, False), (3, True)], ids=["before the first", "after the third"])
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_anywhere_in_a_step(rt, want, place, at, after, monkeypatch):
    """The requests fail with the cause, nothing stays locked or held, and the engine serves as before."""
    work = batch_of_everything(rt)
    owner, name = PLACES[place](rt)
    trap = Trap(getattr(owner, name), at, after)
    monkeypatch.setattr(owner, name, trap)
    with pytest.raises(EngineError, match=f"the engine failed: Fault: call {at}") as error:
        work()
    monkeypatch.undo()
    assert trap.calls >= at
    assert isinstance(error.value.__cause__, Fault)
    assert "\n" not in str(error.value)
    check_idle(rt)
    assert rt.stats()["kv_free"] == 400  # what the failed step wrote is not trusted
    assert [r["output_ids"] for r in work()] == want
    check_idle(rt)


def test_every_waiter_has_an_exception_of_its_own(rt, monkeypatch):
    """One object raised in many threads would collect all their tracebacks."""
    monkeypatch.setattr(rt._engine.runner, "sample", Trap(rt._engine.runner.sample, 3, False))
    errors: list[BaseException] = []

    def call(i):
        try:
            rt.generate(f"waiter {i}", {**GREEDY, "max_new_tokens": 100})
        except EngineError as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors and len(set(map(id, errors))) == len(errors)
    assert len({id(e.__cause__) for e in errors}) == 1
    monkeypatch.undo()
    check_idle(rt)


def test_a_fault_reaches_streams_and_tasks(rt, monkeypatch):
    monkeypatch.setattr(rt._engine.runner, "sample", Trap(rt._engine.runner.sample, 4, False))
    chunks = []
    with pytest.raises(EngineError, match="Fault"):
        for chunk in rt.generate("a stream", GREEDY, stream=True):
            chunks.append(chunk)
    assert len(chunks) <= 3 and all(c["meta_info"]["finish_reason"] is None for c in chunks)
    monkeypatch.undo()
    monkeypatch.setattr(rt._engine.runner, "sample", Trap(rt._engine.runner.sample, 4, False))

    async def main():
        with pytest.raises(EngineError, match="Fault"):
            await rt.async_generate(["a", "b"], GREEDY)

    asyncio.run(main())
    monkeypatch.undo()
    monkeypatch.setattr(rt._engine.runner, "sample", Trap(rt._engine.runner.sample, 4, False))

    async def stream():
        with pytest.raises(EngineError, match="Fault"):
            async for _ in await rt.async_generate("a", GREEDY, stream=True):
                pass

    asyncio.run(stream())
    monkeypatch.undo()
    check_idle(rt)


@pytest.mark.parametrize("at", [1, 4])
def test_a_fault_in_one_requests_text_is_its_own(rt, monkeypatch, at):
    """Text is made for one request: if that fails, it alone fails."""
    want = rt.generate(["one", "two"], GREEDY)
    real = Sink.token
    count = 0

    def token(self, *args):
        nonlocal count
        if self.request.rid == "victim":
            count += 1
            if count == at:
                raise Fault("text")
        return real(self, *args)

    monkeypatch.setattr(Sink, "token", token)
    box: list = []
    others = threading.Thread(target=lambda: box.append(rt.generate(["one", "two"], {**GREEDY, "stop": "never"})))
    others.start()
    with pytest.raises(Fault, match="text"):
        rt.generate("victim", {**GREEDY, "stop": "never"}, rid="victim")
    others.join(30)
    assert [r["output_ids"] for r in box[0]] == [r["output_ids"] for r in want]
    check_idle(rt)


def test_a_fault_at_the_end_of_one_requests_text_is_its_own(rt, monkeypatch):
    """When the text is completed the request has left the engine's books: still its caller must hear of it."""
    real = StopChecker.finish

    def finish(self):
        if self.matched is None and "victim" in str(self._patterns and self._patterns[0].text):
            raise StopRegexTimeout("too long")
        return real(self)

    monkeypatch.setattr(StopChecker, "finish", finish)
    box: list = []
    others = threading.Thread(target=lambda: box.append(rt.generate(["one", "two"], {**GREEDY, "stop": "never"})))
    others.start()
    begin = time.monotonic()
    with pytest.raises(StopRegexTimeout):
        rt.generate("x", {**GREEDY, "max_new_tokens": 3, "stop_regex": "victim"})
    with pytest.raises(StopRegexTimeout):
        list(rt.generate("x", {**GREEDY, "max_new_tokens": 3, "stop_regex": "victim"}, stream=True))
    assert time.monotonic() - begin < 20
    others.join(30)
    assert len(box[0]) == 2
    check_idle(rt)


@pytest.mark.parametrize(
    "name, at", [("mask", 1), ("mask", 4), ("forced_tokens", 2), ("forced_tokens", 4), ("accept", 1), ("accept", 12)]
)
def test_a_fault_in_one_requests_grammar_is_its_own(rt, monkeypatch, name, at):
    """A grammar that runs out of its budget in the middle of a text ends the text, not the engine."""
    regex = f"[ab]{{2}}forced[ab]{{{5 + at}}}{name}"
    want = rt.generate(["one", "two"], [GREEDY, {**GREEDY, "regex": "[ab]{2}forced[ab]{8}"}])
    real = getattr(FsmConstraint, name)
    count = 0

    def trap(self, *args):
        nonlocal count
        if self.tokens.grammar.source == regex:
            count += 1
            if count == at:
                raise Fault("grammar")
        return real(self, *args)

    monkeypatch.setattr(FsmConstraint, name, trap)
    box: list = []
    params = [GREEDY, {**GREEDY, "regex": "[ab]{2}forced[ab]{8}"}]
    others = threading.Thread(target=lambda: box.append(rt.generate(["one", "two"], params)))
    others.start()
    with pytest.raises(Fault, match="grammar"):
        rt.generate("victim", {**GREEDY, "max_new_tokens": 30, "regex": regex})
    others.join(30)
    assert [r["output_ids"] for r in box[0]] == [r["output_ids"] for r in want]
    check_idle(rt)


def test_a_fault_in_the_jump_at_the_start_is_its_requests_own(rt, monkeypatch):
    """Before the first step: the request is in the scheduler already, and must leave it."""
    monkeypatch.setattr(rt._engine, "jump_at_start", True)
    regex = "forced from the start[ab]{3}"
    want = rt.generate(["one", "two"], GREEDY)
    reply = rt.generate("x", {**GREEDY, "max_new_tokens": 40, "regex": regex})
    assert reply["text"].startswith("forced from the start") and reply["meta_info"]["forced_tokens"] > 5
    real, count = FsmConstraint.accept, 0

    def trap(self, token):
        nonlocal count
        count += 1
        if count == 3:
            raise Fault("grammar")
        return real(self, token)

    monkeypatch.setattr(FsmConstraint, "accept", trap)
    box: list = []
    others = threading.Thread(target=lambda: box.append(rt.generate(["one", "two"], GREEDY)))
    others.start()
    with pytest.raises(Fault, match="grammar"):
        rt.generate("victim", {**GREEDY, "max_new_tokens": 40, "regex": regex})
    others.join(30)
    assert [r["output_ids"] for r in box[0]] == [r["output_ids"] for r in want]
    check_idle(rt)


def test_a_pattern_that_backtracks_for_ever_ends_its_request_alone(rt):
    params = {
        "temperature": 0,
        "max_new_tokens": 60,
        "ignore_eos": True,
        "logit_bias": only_letters(rt, "a"),
        "stop_regex": "(a+)+b",
    }
    slow = {**params, "stop_regex": r"(a|a)+(a|a)+(a|a)+(a|a)+$b"}
    try:
        reply = rt.generate("a" * 20, slow)
    except StopRegexTimeout:
        pass
    else:  # the library saw through it: then it ran to its end
        assert len(reply["output_ids"]) == 60
    assert rt.generate("after", GREEDY)["output_ids"]
    check_idle(rt)


def test_a_fault_while_idle_hurts_nobody(rt):
    def fault():
        raise Fault("idle")

    with pytest.raises(Fault):
        rt._engine.call(fault)
    rt._engine._post(fault)  # an action whose fault nobody waits for
    assert len(rt.generate("still here", GREEDY)["output_ids"]) == 10
    check_idle(rt)


def test_no_progress_is_an_error_not_a_hang(rt, monkeypatch):
    monkeypatch.setattr(rt.scheduler, "next_batch", lambda: None)
    with pytest.raises(EngineError, match="no progress: 1 requests wait and 0 run"):
        rt.generate("stuck", GREEDY)
    monkeypatch.undo()
    assert rt.generate("free", GREEDY)["output_ids"]
    check_idle(rt)


@pytest.mark.parametrize("kind", [Fault, SystemExit])
def test_a_fault_in_the_clean_up_ends_the_engine_and_tells_everybody(monkeypatch, kind):
    runtime = engines.make(max_running_requests=2)

    def broken(*_):
        raise kind("broken")

    calls = engines.callers(runtime, 4)
    monkeypatch.setattr(runtime.scheduler, "drop_all", broken)
    monkeypatch.setattr(runtime._engine.runner, "sample", broken)
    for thread, box in calls:
        thread.join(20)
        assert isinstance(box[0], EngineError) and "broken" in str(box[0])
    for call_ in (runtime.stats, lambda: runtime.generate("x"), lambda: runtime.generate("x", stream=True)):
        with pytest.raises(EngineError, match="broken"):
            call_()
    assert "shut down" in repr(runtime)
    runtime.shutdown()


def test_faults_do_not_accumulate(rt, monkeypatch):
    """A hundred failed steps later there is as much memory, as many rows, and one thread."""
    threads = threading.active_count()
    for i in range(25):
        monkeypatch.setattr(rt.scheduler.allocator, "alloc", Trap(rt.scheduler.allocator.alloc, 1 + i % 3, i % 2 == 0))
        with pytest.raises(EngineError):
            rt.generate(input_ids=random_ids(30, seed=i), sampling_params=GREEDY)
        monkeypatch.undo()
    check_idle(rt)
    assert rt.stats()["kv_free"] == 400 and threading.active_count() == threads
    assert rt.scheduler.uncommitted == 0


def test_the_log_stays_coherent_over_a_fault(monkeypatch):
    with engines.make(events=True, kv_capacity=200) as runtime:
        runtime.generate(["one", "two"], GREEDY)
        monkeypatch.setattr(runtime.tree, "insert", Trap(runtime.tree.insert, 2, True))
        with pytest.raises(EngineError):
            runtime.generate(["three", "four"], GREEDY)
        monkeypatch.undo()
        free = set(range(1, 201))
        for event in runtime.events:
            slots = {int(s) for s in event.fields.get("slots", ())}
            if event.kind == "alloc":
                assert slots <= free
                free -= slots
            elif event.kind == "free":
                assert not slots & free
                free |= slots
        assert len(free) == 200
        ends = [e.fields["reason"] for e in runtime.events if e.kind == "finish"]
        assert ends == ["length", "length", "abort", "abort"]


def test_the_parts_named_here_exist():
    """The traps above would miss silently what was renamed."""
    for cls, names in (
        (Runner, ("launch", "sample", "results", "_score_prompts")),
        (Scheduler, ("next_batch", "_admit", "_extend", "_share", "_release", "_build", "commit", "finish", "add")),
        (Rows, ("occupy", "vacate")),
        (RadixTree, ("insert", "match", "lock", "unlock")),
    ):
        for name in names:
            assert hasattr(cls, name), (cls, name)
