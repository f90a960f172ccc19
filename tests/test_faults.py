"""Faults wherever they can happen: the engine's thread, callbacks, memory, disk, clocks, Ctrl-C, fork().

What every test asks: whoever waits is told, with the cause; others go on, or the engine says that it is dead; a new
Runtime in the same process works.  (Faults at the named steps of a running engine are in test_engine_faults.)
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import minisgl as sgl
import minisgl.runtime
from minisgl.backends.base import WorkerPool
from minisgl.output import EngineError
from minisgl.request import Request
from minisgl.sampling_batch import PenaltyState

from . import engines
from .engines import GREEDY, check_idle, random_ids
from .fault_points import PointByPoint

ROOT = Path(__file__).parent.parent
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")
needs_posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")


class Fault(Exception):
    """What the tests break things with."""


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def rt(request):
    runtime = engines.make(overlap=request.param, chunk_size=16, kv_capacity=600)
    yield runtime
    runtime.shutdown()


def check_memory_goes(runtime) -> None:
    """Shutting down frees keys and values and weights, whoever keeps the Runtime and its errors."""
    runner = runtime.engine.runner
    large = [weakref.ref(runner.attention.pool.kv), weakref.ref(runner.model), weakref.ref(runner.attention)]
    del runner
    runtime.shutdown()
    gc.collect()
    assert [ref() for ref in large[:2]] == [None, None], [gc.get_referrers(ref()) for ref in large if ref() is not None]


def script(code: str, *arguments: str, **more) -> str:
    """What a program printed, run in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=ROOT, env=environment, **more)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# ---- the engine's thread --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_fault_at_any_function_that_the_engine_calls(overlap):
    """One fault at a time, at points spread over all (`python -m tests.fault_points` takes each in turn)."""
    report = PointByPoint(overlap=overlap).run(points=15, seed=int(overlap))
    assert not report["failures"] and report["tried"] == 15 and report["told"] > 5, report


def test_a_request_is_told_when_the_books_of_its_end_fail(rt, monkeypatch):
    """It has left the scheduler, and has heard nothing yet."""

    def fails(self):
        raise Fault("counting")

    sinks, _ = rt.prepare(["one", "two"], GREEDY)
    ended = rt.engine._ended

    def with_fault(request):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Request, "prompt_len", property(fails))
            ended(request)

    monkeypatch.setattr(rt.engine, "_ended", with_fault)
    rt.engine.submit([sink.request for sink in sinks])
    for sink in sinks:
        with pytest.raises(EngineError, match="Fault: counting"):
            sink.result(timeout=20)
    monkeypatch.undo()
    check_idle(rt)


def test_everybody_in_a_call_is_told_when_taking_one_of_them_in_fails(rt, monkeypatch):
    """Requests behind the one that failed were waited for as well."""
    real, count = rt.scheduler.add, itertools.count(1)

    def add(request: Request) -> None:
        if next(count) == 2:
            raise MemoryError("no room for a request")
        real(request)

    sinks, _ = rt.prepare(None, GREEDY, input_ids=[[1, 2], [3, 4], [5, 6], [7, 8]])
    monkeypatch.setattr(rt.scheduler, "add", add)
    rt.engine.submit([sink.request for sink in sinks])
    for sink in sinks:
        with pytest.raises(EngineError, match="MemoryError: no room for a request"):
            sink.result(timeout=20)
    monkeypatch.undo()
    check_idle(rt)
    assert rt.generate("after", GREEDY)["output_ids"]


def test_a_flush_that_fails_half_way_loses_no_memory(rt, monkeypatch):
    rt.generate(["one", "two", "three"], GREEDY)
    real, count = rt.tree._remove, itertools.count(1)

    def remove(leaf):
        real(leaf)
        if next(count) == 2:
            raise MemoryError("while flushing")

    monkeypatch.setattr(rt.tree, "_remove", remove)
    with pytest.raises(MemoryError, match="while flushing"):
        rt.flush_cache()
    monkeypatch.undo()
    check_idle(rt)
    assert rt.stats()["kv_free"] == 600 and rt.generate("one", GREEDY)["output_ids"]


@pytest.mark.parametrize("wait", [0.0, 0.01, 0.05])
def test_the_death_of_the_engines_thread_is_told_to_everybody(wait):
    """An exception that no handler expects, at a moment that nobody chose."""
    runtime = engines.make(max_running_requests=2)
    calls = engines.callers(runtime, 3)
    time.sleep(wait)
    ident = runtime.engine._thread.ident
    assert ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
    for thread, box in calls:
        thread.join(20)
        assert isinstance(box[0], EngineError) and "SystemExit" in str(box[0]), box
    assert not runtime.engine.alive
    with pytest.raises(EngineError, match="SystemExit"):
        runtime.stats()
    check_memory_goes(runtime)  # though somebody still has it, and the errors of its end
    with engines.make() as again:
        assert again.generate("x", GREEDY)["output_ids"]


@pytest.mark.parametrize("kind", [SystemExit, Fault])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_in_a_function_within_a_function_keeps_no_memory(monkeypatch, kind, overlap):
    """Such a function's frame refers to what it closes over even after it was cleared: here the whole runner."""
    def faulty(runner):
        def forward_batch(*_):
            def within():
                raise kind(f"within {runner}")

            within()

        return forward_batch

    runtime = engines.make(overlap=overlap)
    monkeypatch.setattr(runtime.engine.runner, "_forward_batch", faulty(runtime.engine.runner))
    with pytest.raises(EngineError, match="within") as error:
        runtime.generate("x", GREEDY)
    monkeypatch.undo()
    check_memory_goes(runtime)
    assert isinstance(error.value.__cause__, kind)


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_runs_out_between_two_tables_leaves_neither(rt, monkeypatch, kind):
    """Penalties need two tables: with the first alone, every later request with a penalty would fail."""
    params = {**GREEDY, "repetition_penalty": 1.3}
    rt.engine.runner.penalties = PenaltyState(rt.scheduler.table.max_requests + 1, rt.config.vocab_size)
    real, count = torch.zeros, itertools.count(1)

    def zeros(*args, **options):
        if next(count) == 2:
            raise kind("out of memory")
        return real(*args, **options)

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(EngineError, match="out of memory") as error:
        rt.generate("x", params)
    assert isinstance(error.value.__cause__, kind)
    monkeypatch.undo()
    assert rt.generate("x", params)["output_ids"]
    check_idle(rt)


# ---- callbacks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, "the last", "the end", "always"])
def test_a_chunk_callback_that_fails_ends_its_own_request(rt, at, caplog):
    want = rt.generate(["one", "two"], GREEDY)
    seen = itertools.count(1)

    def on_chunk(item):
        last = isinstance(item, dict) and item["meta_info"]["finish_reason"] is not None
        if at == "always" or next(seen) == at or (at == "the last" and last) or (at == "the end" and item is None):
            raise Fault("a reader that is gone")

    (sink,), _ = rt.prepare("victim", GREEDY, on_chunk=on_chunk)
    others, _ = rt.prepare(["one", "two"], GREEDY)
    rt.engine.submit([sink.request, *(other.request for other in others)])
    assert [other.result(20)["output_ids"] for other in others] == [r["output_ids"] for r in want]
    if at == "the end":
        sink.result(20)  # all was there already
    else:
        with pytest.raises(Fault, match="a reader that is gone"):
            sink.result(20)
    check_idle(rt)


def test_an_end_callback_that_fails_keeps_nobody_else_from_hearing(rt, caplog):
    (sink,), _ = rt.prepare("x", GREEDY)
    heard = threading.Event()

    def fails(_):
        raise Fault("a callback")

    sink.ended.add_done_callback(fails)
    sink.ended.add_done_callback(lambda _: heard.set())
    rt.engine.submit([sink.request])
    assert len(sink.result(20)["output_ids"]) == 10 and heard.wait(20)
    assert "a callback at the end of a request failed" in caplog.text
    check_idle(rt)


def test_a_callback_may_look_at_the_engine(rt):
    """On the engine's own thread, waiting for that thread would be for ever."""
    seen: list = []

    def on_chunk(item):
        seen.append((rt.stats()["running"], rt.flush_cache(), repr(rt)))

    (sink,), _ = rt.prepare("x", GREEDY, on_chunk=on_chunk)
    rt.engine.submit([sink.request])
    sink.result(20)
    assert len(seen) >= 3 and seen[0][0] == 1
    check_idle(rt)


@pytest.mark.parametrize("kind", [Fault, SystemExit])
def test_a_program_whose_step_fails_does_not_take_the_dispatcher_with_it(rt, kind, monkeypatch):
    """Steps behind a generation run on the thread that all programs share."""

    @sgl.function
    def program(s, bad):
        s += "go on: " + sgl.gen("a", max_tokens=3)
        if bad:
            s._executor.append([Action(fails)])
        s += sgl.gen("b", max_tokens=3)

    def fails():
        raise kind("a step of this program")

    from minisgl.ir import Action

    states = [program.run(bad, backend=rt, temperature=0, ignore_eos=True, stream=True) for bad in (True, False)]
    with pytest.raises(kind, match="a step of this program"):
        states[0].sync()
    assert len(states[1]["b"]) > 0
    for _ in range(2):
        assert len(program.run(False, backend=rt, temperature=0, ignore_eos=True)["b"]) > 0
    check_idle(rt)


@pytest.mark.parametrize("place", ["_watch", "_encode"])
def test_programs_are_told_when_their_submission_fails(rt, place, monkeypatch):
    from minisgl.backends.runtime import Dispatcher

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", max_tokens=3)

    def broken(*_):
        raise SystemExit("nobody expects this one")

    monkeypatch.setattr(Dispatcher, place, broken)
    with pytest.raises(SystemExit, match="nobody expects"):
        program.run(backend=rt)["a"]
    monkeypatch.undo()
    assert len(program.run(backend=rt, temperature=0, ignore_eos=True)["a"]) > 0
    check_idle(rt)


@pytest.mark.parametrize("where", ["starting a thread", "showing progress"])
def test_ctrl_c_stops_a_batch_wherever_it_comes(rt, where, monkeypatch):
    """Also outside of the wait itself; else the programs would go on with nobody to hear of them."""
    begun: list[int] = []

    @sgl.function
    def program(s, i):
        begun.append(i)
        s += f"{i}" + sgl.gen("a", max_tokens=100, ignore_eos=True)
        s["a"]

    start = threading.Thread.start

    def interrupted(self):
        start(self)
        if self.name.startswith("minisgl-batch") and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    def click(*_):
        raise KeyboardInterrupt

    if where == "starting a thread":
        monkeypatch.setattr(threading.Thread, "start", interrupted)
    else:
        from tqdm.auto import tqdm

        monkeypatch.setattr(tqdm, "update", click)
    items = [{"i": i} for i in range(40)]
    with pytest.raises(KeyboardInterrupt):
        program.run_batch(items, backend=rt, temperature=0, num_threads=2, progress_bar=where != "starting a thread")
    monkeypatch.undo()
    end = time.perf_counter() + 20
    while time.perf_counter() < end and (rt.stats()["running"] or rt.stats()["waiting"]):
        time.sleep(0.01)
    count = len(begun)
    time.sleep(0.2)
    assert len(begun) == count < 40
    check_idle(rt)


def test_a_pool_outlives_its_tasks_failures_and_threads_that_cannot_start(monkeypatch, caplog):
    pool = WorkerPool(2, "test-pool", idle=0.2)

    def fails():
        raise SystemExit("a task")

    for _ in range(5):
        pool.run(fails)
    done = threading.Event()
    pool.run(done.set)
    assert done.wait(60)
    start = threading.Thread.start
    while any(t.name == "test-pool" for t in threading.enumerate()):
        time.sleep(0.01)

    def cannot(self):
        if self.name == "test-pool":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", cannot)
    with pytest.raises(RuntimeError, match="can't start"):
        pool.run(done.set)
    monkeypatch.undo()
    again = threading.Event()
    pool.run(again.set)
    assert again.wait(10)


# ---- construction ---------------------------------------------------------------------------------------------------

STEPS = (
    "resolve_model", "load_model", "Tokenizer", "KVPool", "RequestTable", "Scheduler", "Runner", "Preparer",
    "Engine",
)  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_memory_that_runs_out_while_a_runtime_is_made(step, after, monkeypatch):
    real, made = getattr(minisgl.runtime, step), []

    def trap(*args, **options):
        if after:
            made.append(real(*args, **options))
        if step == "Engine" and after:
            made[0].stop()
        raise MemoryError(step)

    threads = {t for t in threading.enumerate() if t.name.startswith("minisgl")}
    monkeypatch.setattr(minisgl.runtime, step, trap)
    with pytest.raises(MemoryError, match=step):
        engines.make()
    monkeypatch.undo()
    left = [weakref.ref(thing) for thing in made if step not in ("resolve_model",)]
    made.clear()
    gc.collect()
    assert not any(ref() is not None for ref in left)
    assert {t for t in threading.enumerate() if t.name.startswith("minisgl")} <= threads


# ---- clocks ---------------------------------------------------------------------------------------------------------


def test_clocks_that_jump(rt, monkeypatch):
    """Backwards, far ahead, standing still: what is generated is the same, and everything ends."""
    params = [GREEDY, {**GREEDY, "stop": "never"}, {**GREEDY, "regex": "[ab]{2}forced[ab]{5}"}]
    prompts = [random_ids(12, seed=i) for i in range(3)]
    want = [r["output_ids"] for r in rt.generate(input_ids=prompts, sampling_params=params)]
    rng = random.Random(1)

    def jumping(real):
        return lambda: real() + rng.choice([0.0, -1e6, 1e9, -3.0, 0.001])

    for name in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(time, name, jumping(getattr(time, name)))
    got = rt.generate(input_ids=prompts, sampling_params=params)
    streamed = list(rt.generate(input_ids=prompts[0], sampling_params=GREEDY, stream=True))
    awaited = asyncio.run(rt.async_generate(input_ids=prompts[1], sampling_params=GREEDY))

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", max_tokens=4) + sgl.select("b", ["one", "two"])

    state = program.run(backend=rt, temperature=0)
    assert state["b"] in ("one", "two")
    rt.stats()
    monkeypatch.undo()
    assert [r["output_ids"] for r in got] == want
    assert streamed[-1]["output_ids"] == want[0] and awaited["output_ids"] == want[1]
    check_idle(rt)


# ---- processes ------------------------------------------------------------------------------------------------------

_FORK = """
import multiprocessing, os, signal, sys, threading
import minisgl as sgl
from minisgl import Runtime
from minisgl.backends.base import WorkerPool

runtime = Runtime(sys.argv[1], device="cpu", dtype="float32", kv_capacity=600)
pool = WorkerPool(1, "pool")
params = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}

@sgl.function
def program(s):
    s += "x" + sgl.gen("a", max_tokens=4)

want = runtime.generate("x", params)["output_ids"]
program.run(backend=runtime)["a"]
pool.run(lambda: None)

def told(call):
    try:
        call()
    except RuntimeError as error:
        assert "process made with fork()" in str(error) and "spawn" in str(error), error
        return
    raise AssertionError("nothing was said")

def child():
    signal.alarm(150)  # whoever hangs dies
    told(lambda: runtime.generate("x", params))
    told(lambda: list(runtime.generate("x", params, stream=True)))
    told(runtime.stats)
    told(lambda: program.run(backend=runtime)["a"])
    told(lambda: Runtime(sys.argv[1], device="cpu"))
    done = threading.Event()
    pool.run(done.set)  # a backend without an engine has new threads here
    assert done.wait(60)
    runtime.shutdown()
    sys.exit(0)  # with all that runs at the end of an interpreter

def begun_before():  # while the engine waits, so that nothing of it can end
    done = program.run(backend=runtime, temperature=0)
    assert done["a"]
    entered, go_on = threading.Event(), threading.Event()
    threading.Thread(target=runtime.engine.call, args=(lambda: (entered.set(), go_on.wait()),)).start()
    entered.wait()
    stream = runtime.generate("x", params, stream=True)
    state = program.run(backend=runtime, temperature=0)
    sinks, _ = runtime.prepare("x", params)
    runtime.engine.submit([sinks[0].request])
    pid = os.fork()
    if pid == 0:
        signal.alarm(150)
        told(lambda: list(stream))
        told(sinks[0].result)
        for wait in (lambda: state["a"], state.sync, lambda: list(state.text_iter())):
            told(wait)
        assert "spawn" in str(state.error())
        assert done["a"] and done.text()
        sys.exit(0)
    go_on.set()
    assert os.waitpid(pid, 0)[1] == 0
    assert list(stream)[-1]["output_ids"] == want == sinks[0].result()["output_ids"]
    assert state["a"] == done["a"]

begun_before()
threads = [threading.Thread(target=lambda: runtime.generate(["a", "b"], params)) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(5):  # in the middle of whatever the other threads do
    pid = os.fork()
    if pid == 0:
        child()
    assert os.waitpid(pid, 0)[1] == 0
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(180)
assert process.exitcode == 0, process.exitcode
for thread in threads:
    thread.join()
assert runtime.generate("x", params)["output_ids"] == want
runtime.shutdown()
print("both went on")
"""


@needs_fork
def test_a_forked_process_is_told_and_the_parent_goes_on():
    assert script(_FORK, str(engines.folder())).endswith("both went on\n")


_INTERRUPTS = """
import gc, random, signal, sys, threading, time
import minisgl as sgl
from minisgl import Runtime
from minisgl.backends.base import Prompt
from minisgl.lang import as_backend

runtime = Runtime(sys.argv[1], device="cpu", dtype="float32", kv_capacity=600, max_running_requests=4)
params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}

@sgl.function
def program(s, i):
    s += f"{i}: " + sgl.gen("a", max_tokens=3)
    for fork in s.fork(2):
        fork += sgl.gen("b", max_tokens=3)
    s += sgl.select("c", ["one", "two"])
    s["c"]

def work(i):
    kind = i % 4
    if kind == 0:
        runtime.generate(["a", "b", "c"], params)
    elif kind == 1:
        list(runtime.generate("a", params, stream=True))
    elif kind == 2:
        program.run(i, backend=runtime, temperature=0)
    else:
        program.run_batch([{"i": j} for j in range(6)], backend=runtime, temperature=0)

for i in range(8):
    work(i)
want = runtime.generate("x", params)["output_ids"]
rng, begin, interrupted, i = random.Random(int(sys.argv[2])), time.monotonic(), 0, 0
signal.signal(signal.SIGALRM, signal.default_int_handler)
while time.monotonic() - begin < float(sys.argv[3]):
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 0.03))
        try:
            work(i)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    i += 1

as_backend(runtime).precompute(Prompt("x"))  # behind what programs have left with the dispatcher
begin = time.monotonic()
while True:  # what was interrupted ends by itself
    stats = runtime.stats()
    if not stats["running"] + stats["waiting"] + stats["kv_locked"] + stats["kv_held"]:
        break
    assert time.monotonic() - begin < 20, stats
    time.sleep(0.01)
gc.collect()
runtime.engine.call(runtime.scheduler.check)
for i in range(8):
    work(i)
assert runtime.generate("x", params)["output_ids"] == want
assert interrupted > 5, interrupted
runtime.shutdown()
print("interrupted", interrupted)
"""


@needs_posix
def test_ctrl_c_at_any_moment():
    """Between any two instructions of the main thread, some hundred times: nothing is left, everything still works."""
    assert "interrupted" in script(_INTERRUPTS, str(engines.folder()), "1", "1.5")


_CELL = """
import gc, resource, sys, threading
import torch

cell = '''
from minisgl import Runtime, function, gen
runtime = Runtime(folder, device="cpu", dtype="float32", kv_capacity=20_000, events=True)

@function
def program(s):
    s += "x" + gen("a", max_tokens=3)

states = program.run_batch([{}, {}], backend=runtime)
reply = runtime.generate(["a", "b"], {"max_new_tokens": 3, "repetition_penalty": 1.1})
'''

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6

space = {"folder": sys.argv[1]}
sizes = []
for i in range(int(sys.argv[2])):
    exec(cell, space)
    sizes.append(rss())
engines = [t for t in threading.enumerate() if t.name == "minisgl-engine"]
early, late = max(sizes[8:16]), min(sizes[-8:])
print(early, late, len(engines))
assert late < early + 32, sizes  # a Runtime of this cell has 61 MB of KV alone
assert len(engines) <= 2, engines
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_a_cell_that_is_run_again_and_again_keeps_its_memory():
    script(_CELL, str(engines.folder()), "50")


# ---- disks ----------------------------------------------------------------------------------------------------------

_CACHE = """
import os, resource, signal, sys
cache, gguf, mode = sys.argv[1:4]
os.environ["MINISGL_CACHE"] = cache
import hashlib, pathlib
import minisgl.default_model as default_model
from minisgl import Runtime
from minisgl.config import ModelError
default_model.GGUF_SHA256 = hashlib.sha256(pathlib.Path(gguf).read_bytes()).hexdigest()
os.environ[default_model.ENV_FILE] = gguf
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if mode == "read-only" and os.geteuid() == 0:  # root may write everywhere
    os.setuid(65534)

def attempt():
    try:
        runtime = Runtime(device="cpu", dtype="float32", kv_capacity=100)
    except ModelError as error:
        assert "\\n" not in str(error) and "cannot write the cache" in str(error), error
        left = [path for path in pathlib.Path(cache).iterdir() if path.suffix != ".lock"]
        assert not left, left
        return "refused"
    with runtime:
        runtime.generate("x", {"max_new_tokens": 2})
    return "served"

for size in sys.argv[4:]:  # a write beyond this many bytes fails as on a full disk, in whatever library it happens
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))
    print(attempt())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(attempt())
"""


@pytest.fixture(scope="module")
def tiny_gguf_file(tmp_path_factory):
    from . import tiny_gguf, tiny_models

    folder = tmp_path_factory.mktemp("tiny")
    folder.chmod(0o755)
    path = tiny_gguf.write(tiny_models.make("smollm2", folder / "m"), folder / "tiny.gguf", quantise="Q4_1")
    for parent in [path, *list(path.parents)[:4]]:
        if parent != Path("/tmp") and parent.stat().st_uid == os.getuid():
            parent.chmod(0o755)  # another user reads it
    return path


@needs_posix
def test_a_disk_that_is_full_while_the_model_is_cached(tiny_gguf_file, tmp_path):
    """It stops in the tokenizer, the config and the weights; nothing half is left, and with room it works."""
    sizes = ("100", "5000", "60000", "2000000")
    printed = script(_CACHE, str(tmp_path / "cache"), str(tiny_gguf_file), "full", *sizes)
    assert printed.split() == ["refused"] * 4 + ["served"]


@pytest.mark.slow
@needs_posix
def test_a_cache_that_may_only_be_read(tiny_gguf_file, tmp_path):
    cache = tiny_gguf_file.parent / "cache"
    cache.mkdir()
    cache.chmod(0o555)
    assert script(_CACHE, str(cache), str(tiny_gguf_file), "read-only") == "refused\n"
    cache.chmod(0o755)
    assert script(_CACHE, str(cache), str(tiny_gguf_file), "writable") == "served\n"
    for path in [cache, *cache.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert script(_CACHE, str(cache), str(tiny_gguf_file), "read-only") == "served\n"
    cache.chmod(0o755)


