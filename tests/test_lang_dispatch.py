"""Between programs and the engine: bursts of generations, and a system that has no thread left."""

from __future__ import annotations

import threading
import time

import pytest

import minisgl as sgl
from minisgl.backends import runtime as backend
from tests import tiny_models

LIMIT = 60  # seconds until a test calls it a hang


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tiny_models.make("llama2", tmp_path_factory.mktemp("tiny") / "m")
    with sgl.Runtime(folder, kv_capacity=4000, max_running_requests=8, device="cpu", dtype="float32") as runtime:
        yield runtime


@sgl.function
def count(s, number):
    s += f"{number} and " + sgl.gen("next", max_tokens=2, ignore_eos=True, temperature=0)


def soon(ready) -> bool:
    end = time.perf_counter() + LIMIT
    while not ready() and time.perf_counter() < end:
        time.sleep(0.002)
    return ready()


def test_many_programs_go_in_bursts_and_an_end_does_not_wait_for_the_last(tiny, monkeypatch):
    size, programs, states, bursts, over = 4, 14, [], [], []
    encode = tiny.tokenizer.encode_batch

    def encode_batch(texts, **options):
        if not bursts:  # the first to come: let all the others arrive
            assert soon(lambda: len(states) == programs)
        elif len(bursts) == 2:  # the engine goes on with what it has, while this thread makes the next ones ready
            assert soon(lambda: not tiny.stats()["running"] and not tiny.stats()["waiting"])
        else:
            over.append(sum(not state._executor.busy for state in states))
        bursts.append(len(texts))
        return encode(texts, **options)

    @sgl.function
    def noted(s, number):
        count.func(s, number)
        states.append(s)

    alone = [count.run(number, backend=tiny)["next"] for number in range(programs)]
    monkeypatch.setattr(backend, "BURST", size)
    monkeypatch.setattr(tiny.tokenizer, "encode_batch", encode_batch)
    done = noted.run_batch([(number,) for number in range(programs)], backend=tiny)
    assert [state["next"] for state in done] == alone
    assert max(bursts) == size and sum(bursts) == programs
    assert over[-1] >= bursts[0] + bursts[1]  # those of the first two bursts, before the last was submitted


def no_thread(monkeypatch, *names):
    start = threading.Thread.start

    def refuse(self):
        if self.name.startswith(names):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def dispatcher(runtime):
    return backend._dispatcher(runtime)


def test_no_thread_to_submit_on(tiny, monkeypatch):
    monkeypatch.setattr(backend, "IDLE", 0.01)
    count.run(0, backend=tiny).sync()
    assert soon(lambda: dispatcher(tiny)._thread is None)
    with monkeypatch.context() as patch:
        no_thread(patch, "minisgl-dispatcher")
        state = count.run(1, backend=tiny)
        for read in (lambda: state["next"], state.text, state.sync):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                read()
        with pytest.raises(RuntimeError, match="can't start new thread"):
            count.run_batch([(1,), (2,)], backend=tiny)
    assert isinstance(count.run(1, backend=tiny)["next"], str)


def test_no_thread_to_end_on(tiny, monkeypatch):
    """The generation is over, the dispatcher has gone in the meantime, and another one cannot begin."""
    monkeypatch.setattr(backend, "IDLE", 0.01)
    held, go = threading.Event(), threading.Event()

    def hold():
        held.set()
        go.wait(LIMIT)

    holder = threading.Thread(target=tiny.engine.call, args=(hold,))
    holder.start()
    assert held.wait(LIMIT)
    states = [count.run(number, backend=tiny) for number in range(2)]
    assert soon(lambda: dispatcher(tiny)._thread is None)
    with monkeypatch.context() as patch:
        no_thread(patch, "minisgl-dispatcher")
        go.set()
        for state in states:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                state["next"]
    holder.join(LIMIT)
    assert isinstance(count.run(1, backend=tiny)["next"], str)


@pytest.mark.parametrize("refused", [("minisgl-batch-1", "minisgl-batch-2"), ("minisgl-batch-1", "minisgl-batch")])
def test_a_batch_makes_do_with_the_threads_there_are(tiny, monkeypatch, refused):
    @sgl.function
    def reads(s, number):
        count.func(s, number)
        return s["next"]

    alone = [count.run(number, backend=tiny)["next"] for number in range(5)]
    start = threading.Thread.start

    def refuse(self):
        if self.name.startswith(refused) and self.name != "minisgl-batch-0":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    states = reads.run_batch([(number,) for number in range(5)], backend=tiny)
    assert [state.ret_value for state in states] == alone


def test_a_batch_without_any_thread_says_so(tiny, monkeypatch):
    no_thread(monkeypatch, "minisgl-batch")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        count.run_batch([(number,) for number in range(5)], backend=tiny)
