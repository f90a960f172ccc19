"""`Runtime` from the outside: shapes of replies, streams, coroutines, parameters, scores, refusals, manners."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl import Runtime, SamplingParams
from minisgl.events import EventLog
from minisgl.output import EngineError
from minisgl.request import Request
from minisgl.tokenizer import ByteTokenizer, ChatTemplateError

from . import engines, tiny_models
from .engines import GREEDY, VARIED, check_idle, hf_logits, only_letters, overcommit, random_ids


@pytest.fixture(scope="module")
def made():
    cache = engines.Engines()
    yield cache
    cache.close()


@pytest.fixture
def rt(made):
    runtime = made(chunk_size=64)
    runtime.flush_cache()
    yield runtime
    check_idle(runtime)


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def either(request, made):
    """An engine with the plain loop, and one with the overlapped loop."""
    runtime = made(chunk_size=64, overlap=True) if request.param else made(chunk_size=64)
    runtime.flush_cache()
    yield runtime
    check_idle(runtime)


# ---- shapes of replies -----------------------------------------------------------------------------------------


def test_one_prompt_gives_one_reply(rt):
    reply = rt.generate("hello", GREEDY)
    assert set(reply) == {"text", "output_ids", "meta_info"}
    assert len(reply["output_ids"]) == 10 and all(type(i) is int for i in reply["output_ids"])
    info = reply["meta_info"]
    assert info["finish_reason"] == {"type": "length"}
    assert (info["prompt_tokens"], info["completion_tokens"], info["forced_tokens"]) == (5, 10, 0)
    assert info["cached_tokens"] == 0 and 0 < info["ttft"] <= info["e2e_latency"]
    assert isinstance(info["id"], str) and info["id"]
    json.dumps(reply)  # plain Python throughout
    again = rt.generate("hello", GREEDY)
    assert again["output_ids"] == reply["output_ids"] and again["meta_info"]["cached_tokens"] == 4


def test_lists_and_n_give_lists_in_order(rt):
    prompts = ["one", "two", "three"]
    alone = [rt.generate(p, GREEDY)["output_ids"] for p in prompts]
    assert [r["output_ids"] for r in rt.generate(prompts, GREEDY)] == alone
    assert [r["output_ids"] for r in rt.generate(["one"], GREEDY)] == alone[:1]
    several = rt.generate("one", {"n": 3, "seed": 5, "max_new_tokens": 6, "ignore_eos": True})
    assert len(several) == 3 and len({tuple(r["output_ids"]) for r in several}) == 3
    both = rt.generate(prompts[:2], {**GREEDY, "n": 2})
    assert [r["output_ids"] for r in both] == [alone[0], alone[0], alone[1], alone[1]]
    ids = [r["meta_info"]["id"] for r in both]
    assert len(set(ids)) == 4


def test_parameters_for_each_prompt(rt):
    params = [GREEDY, SamplingParams(**{**GREEDY, "max_new_tokens": 3}), None]
    lengths = [len(r["output_ids"]) for r in rt.generate(["a", "b", "c"], params)]
    assert lengths[:2] == [10, 3]
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        rt.generate(["a", "b", "c"], params[:2])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_token_ids_of_any_kind(rt, kind):
    ids = random_ids(9)
    want = rt.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"]
    assert rt.generate(input_ids=kind(ids), sampling_params=GREEDY)["output_ids"] == want
    replies = rt.generate(input_ids=kind([ids, ids]), sampling_params=GREEDY)
    assert [r["output_ids"] for r in replies] == [want, want]
    assert [r["output_ids"] for r in rt.generate(input_ids=[kind(ids)], sampling_params=GREEDY)] == [want]


def test_many_arrays_are_checked_as_one(rt):
    rows = [np.array(random_ids(n), np.int32) for n in (9, 1, 5)]
    sinks, _ = rt.prepare(None, GREEDY, input_ids=rows)
    kept = [row.copy() for row in rows]
    for row in rows:
        row[:] = 0  # the caller's own, to do with as it likes
    assert [sink.request.prompt.tolist() for sink in sinks] == [row.tolist() for row in kept]
    assert all(sink.request.prompt.dtype == np.int32 for sink in sinks)
    for bad in (320, -1):
        wrong = np.array([3, bad], np.int32)
        with pytest.raises(ValueError, match=f"input_ids has token id {bad}, outside the vocabulary"):
            rt.prepare(None, GREEDY, input_ids=[kept[0], wrong])
    with pytest.raises(ValueError, match="empty"):
        rt.prepare(None, GREEDY, input_ids=[kept[0], kept[1][:0]])


def test_generate_batch_second_call(rt):
    prompts = [f"prompt {i}" for i in range(12)]
    config, dtype, threads = repr(rt.config), torch.get_default_dtype(), torch.get_num_threads()
    first = [r["output_ids"] for r in rt.generate(prompts, GREEDY)]
    second = [r["output_ids"] for r in rt.generate(prompts, GREEDY)]
    assert first == second and len(second) == 12
    assert (repr(rt.config), torch.get_default_dtype(), torch.get_num_threads()) == (config, dtype, threads)


def test_model_without_a_tokenizer(tmp_path):
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / name).write_bytes((engines.folder() / name).read_bytes())
    with Runtime(tmp_path, device="cpu", dtype="float32", kv_capacity=300) as runtime:
        assert runtime.generate(input_ids=[1, 2, 3], sampling_params=GREEDY)["text"] == ""
        chunks = list(runtime.generate(input_ids=[1, 2, 3], sampling_params=GREEDY, stream=True))
        assert [len(c["output_ids"]) for c in chunks] == [*range(1, len(chunks)), 10]
        for call in (lambda: runtime.generate("text"), lambda: runtime.chat([{"role": "user", "content": "x"}])):
            with pytest.raises(ValueError, match="no tokenizer files: pass input_ids"):
                call()
        with pytest.raises(ValueError, match="stop and stop_regex need a tokenizer"):
            runtime.generate(input_ids=[1], sampling_params={"stop": "x"})
        check_idle(runtime)


# ---- streams ---------------------------------------------------------------------------------------------------


def check_stream(chunks: list[dict], whole: dict) -> None:
    """A stream is a reply that grows: same text, same ids, one reason to finish, at the end."""
    assert "".join(c["delta"] for c in chunks) == chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    for before, after in itertools.pairwise(chunks):
        assert after["text"] == before["text"] + after["delta"]
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    for key in ("finish_reason", "completion_tokens", "prompt_tokens"):
        assert chunks[-1]["meta_info"][key] == whole["meta_info"][key]


STREAMED = [
    {},
    {"max_new_tokens": 0},
    {"max_new_tokens": 1},
    {"stop": "letters"},
    {"stop": "letters", "no_stop_trim": True},
    {"stop_regex": "[a-d][e-h][a-h]"},
    {"ignore_eos": False},
    {"skip_special_tokens": False},
]


@pytest.mark.parametrize("more", STREAMED, ids=str)
def test_stream_equals_whole_text(either, more):
    params = {**VARIED, "max_new_tokens": 24, **more}
    if "stop" in params or "stop_regex" in params:
        params["logit_bias"] = only_letters(either)
    if "stop" in params:
        text = either.generate("stream me", {**params, "stop": None})["text"]
        params["stop"] = text[9:12]
    whole = either.generate("stream me", params)
    chunks = list(either.generate("stream me", params, stream=True))
    check_stream(chunks, whole)
    if "stop" in more or "stop_regex" in more:
        assert whole["meta_info"]["finish_reason"]["type"] == "stop"
        assert len(whole["output_ids"]) < 24


def test_stream_carries_logprobs_that_grow(rt):
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    whole = rt.generate("log", GREEDY, **options)["meta_info"]
    chunks = list(rt.generate("log", GREEDY, stream=True, **options))
    for chunk in chunks:
        info = chunk["meta_info"]
        assert info["output_token_logprobs"] == whole["output_token_logprobs"][: len(chunk["output_ids"])]
        assert info["input_token_logprobs"] == whole["input_token_logprobs"]
    assert chunks[-1]["meta_info"]["output_top_logprobs"] == whole["output_top_logprobs"]


def test_text_held_back_for_a_stop_comes_with_the_last_chunk(rt):
    """The stop string's beginning is the end of the text: whoever reads up to the finish reason has it all."""
    params = {**VARIED, "logit_bias": only_letters(rt)}
    text = rt.generate("held", params)["text"]
    assert len(text) == 10
    params["stop"] = text[-2:] + "NEVER"
    chunks = list(rt.generate("held", params, stream=True))
    first_finished = next(c for c in chunks if c["meta_info"]["finish_reason"] is not None)
    assert first_finished["text"] == text and first_finished["delta"].endswith(text[-2:])
    assert first_finished is chunks[-1]


def wait_until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


LONG = {"temperature": 0, "max_new_tokens": 480, "ignore_eos": True}


def idle(runtime: Runtime) -> bool:
    stats = runtime.stats()
    return not stats["waiting"] and not stats["running"]


@pytest.mark.parametrize("how", ["close", "del", "break", "never read", "never read, closed"])
def test_a_stream_that_ends_early_frees_everything(either, how):
    steps = either.stats()["steps"]
    stream = either.generate("early", LONG, stream=True)
    if how == "break":
        for chunk in stream:
            if len(chunk["output_ids"]) >= 3:
                break
        stream = None
    elif how in ("close", "del"):
        assert next(stream)["output_ids"]
    if "close" in how and stream is not None:
        stream.close()
    del stream
    gc.collect()
    wait_until(lambda: idle(either))
    assert either.stats()["steps"] - steps < 400  # it did not simply run to its end
    check_idle(either)


def test_streams_side_by_side(rt):
    prompts = ["left", "right", "middle"]
    whole = [rt.generate(p, GREEDY) for p in prompts]
    streams = [rt.generate(p, GREEDY, stream=True) for p in prompts]
    chunks = [list(s) for s in streams]
    for got, want in zip(chunks, whole):
        check_stream(got, want)


# ---- coroutines ------------------------------------------------------------------------------------------------


def test_blocking_and_awaited_calls_inside_a_running_loop(either):
    want = either.generate(["p", "q"], GREEDY)

    async def main():
        blocking = either.generate(["p", "q"], GREEDY)
        awaited = await either.async_generate(["p", "q"], GREEDY)
        one, two = await asyncio.gather(either.async_generate("p", GREEDY), either.async_generate("q", GREEDY))
        stream = [c async for c in await either.async_generate("p", GREEDY, stream=True)]
        return blocking, awaited, [one, two], stream

    *replies, stream = asyncio.run(main())
    for got in replies:
        assert [r["output_ids"] for r in got] == [r["output_ids"] for r in want]
    check_stream(stream, want[0])


def test_cancelling_a_task_ends_its_requests_and_nobody_elses(either):
    want = either.generate("companion", GREEDY)["output_ids"]

    async def main():
        await either.async_generate("companion", GREEDY)  # the loop's first thread takes its time to begin
        tasks = [asyncio.create_task(either.async_generate(["c", "d"], LONG)) for _ in range(2)]
        companion = asyncio.create_task(either.async_generate("companion", {**LONG, "max_new_tokens": 60}))
        while either.stats()["running"] < 5:
            assert not any(task.done() for task in (*tasks, companion)), "one ended before the last had begun"
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        return await companion

    reply = asyncio.run(main())
    assert reply["output_ids"][:10] == want and len(reply["output_ids"]) == 60
    wait_until(lambda: idle(either))
    check_idle(either)


@pytest.mark.parametrize("how", ["cancelled", "closed", "dropped", "never read", "loop closed"])
def test_an_async_stream_that_ends_early_frees_everything(either, how):
    steps = either.stats()["steps"]

    async def read(stream):
        async for chunk in stream:
            await asyncio.sleep(0)
            if how != "cancelled" and len(chunk["output_ids"]) >= 3:
                return

    async def main():
        stream = await either.async_generate("async early", LONG, stream=True)
        if how == "cancelled":
            task = asyncio.create_task(read(stream))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how != "never read":
            await read(stream)
        if how == "closed":
            await stream.aclose()
        if how == "loop closed":
            return stream
        del stream
        gc.collect()
        await asyncio.sleep(0.01)

    if how == "loop closed":
        loop = asyncio.new_event_loop()
        stream = loop.run_until_complete(main())
        loop.close()  # without shutdown_asyncgens: the engine may meet a closed loop
        time.sleep(0.05)
        del stream
        gc.collect()
        assert either.generate("others", GREEDY)["output_ids"]
        wait_until(lambda: idle(either))
    else:
        asyncio.run(main())
        wait_until(lambda: idle(either))
        assert either.stats()["steps"] - steps < 400
    check_idle(either)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_nest_asyncio_uvloop(kind):
    """An engine made inside a running loop, uvloop's too, which nobody can patch; the policy stays as it was."""
    if kind == "uvloop":
        loop = pytest.importorskip("uvloop").new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    policy = asyncio.get_event_loop_policy()

    async def cell():
        with engines.make() as runtime:
            blocking = runtime.generate("cell", GREEDY)
            awaited = await runtime.async_generate("cell", GREEDY)
            return blocking["output_ids"], awaited["output_ids"]

    try:
        blocking, awaited = loop.run_until_complete(cell())
    finally:
        loop.close()
    assert blocking == awaited
    assert asyncio.get_event_loop_policy() is policy
    assert "nest_asyncio" not in sys.modules


# ---- ending requests -------------------------------------------------------------------------------------------


def in_thread(function):
    """(thread, box): runs `function`, and puts what it returned or raised into the box."""
    box: list = []

    def run():
        try:
            box.append(function())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, box


def test_abort_by_id(either):
    want = either.generate("abort me", LONG)["output_ids"]
    thread, box = in_thread(lambda: either.generate("abort me", LONG, rid="mine"))
    wait_until(lambda: either.stats()["running"])
    either.abort("unknown")
    either.abort("mine")
    thread.join(20)
    (reply,) = box
    assert reply["meta_info"]["id"] == "mine"
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted by the caller"}
    n = len(reply["output_ids"])
    assert n < 480 and reply["output_ids"] == want[:n]
    either.abort("mine")  # has ended: nothing happens


def test_abort_by_id_ends_all_of_a_list(either):
    thread, box = in_thread(lambda: either.generate(["a", "b"], {**LONG, "n": 2}, rid="job"))
    wait_until(lambda: either.stats()["running"] == 4)
    either.abort("job")
    thread.join(20)
    assert [r["meta_info"]["finish_reason"]["type"] for r in box[0]] == ["abort"] * 4
    assert len({r["meta_info"]["id"] for r in box[0]}) == 4


def test_abort_of_one_that_waits(made):
    runtime = made(max_running_requests=1)
    first, _ = in_thread(lambda: runtime.generate("first", LONG, rid="first"))
    wait_until(lambda: runtime.stats()["running"])
    second, box = in_thread(lambda: runtime.generate("second", LONG, rid="second"))
    wait_until(lambda: runtime.stats()["waiting"])
    runtime.abort("second")
    second.join(20)
    assert box[0]["output_ids"] == [] and box[0]["text"] == ""
    assert box[0]["meta_info"]["finish_reason"]["type"] == "abort"
    runtime.abort("first")
    first.join(20)
    check_idle(runtime)


def test_an_id_that_is_in_use_is_refused(either):
    """Two requests of one name would be one to the engine, and one of them would never end."""
    thread, box = in_thread(lambda: either.generate("first", {**LONG, "max_new_tokens": 100}, rid="name"))
    wait_until(lambda: either.stats()["running"])
    with pytest.raises(ValueError, match="rid 'name' is the id of a request that has not ended"):
        either.generate("second", GREEDY, rid="name")
    thread.join(20)
    assert len(box[0]["output_ids"]) == 100  # neither refused nor aborted with the other one
    assert len(either.generate("third", GREEDY, rid="name")["output_ids"]) == 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_interrupt_ends_the_requests_at_once(either, stream):
    main = threading.main_thread().ident

    def stop_button():
        wait_until(lambda: either.stats()["running"])
        sent.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    sent: list[float] = []
    clicker = threading.Thread(target=stop_button)
    clicker.start()
    with pytest.raises(KeyboardInterrupt):
        if stream:
            for _ in either.generate("interrupt", LONG, stream=True):
                pass
        else:
            either.generate(["interrupt", "me"], {**LONG, "n": 2})
    assert time.monotonic() - sent[0] < 3  # at once, but both cores may be busy with other tests
    clicker.join()
    gc.collect()
    wait_until(lambda: idle(either), 5)
    check_idle(either)


@pytest.mark.parametrize("overlap", [False, True])
def test_shutdown_tells_every_waiter_at_once(overlap):
    runtime = engines.make(overlap=overlap, max_running_requests=3)
    calls = [
        lambda: runtime.generate("a", LONG),
        lambda: runtime.generate(["b", "c"], LONG),
        lambda: list(runtime.generate("d", LONG, stream=True)),
        lambda: asyncio.run(runtime.async_generate("e", LONG)),
    ]
    waiters = [in_thread(call) for call in calls]
    wait_until(lambda: runtime.stats()["running"] + runtime.stats()["waiting"] == 5)
    begin = time.monotonic()
    runtime.shutdown()
    for thread, _ in waiters:
        thread.join(5)
    assert time.monotonic() - begin < 2
    for thread, box in waiters:
        assert not thread.is_alive()
        assert isinstance(box[0], EngineError) and str(box[0]) == "the engine was shut down"
    runtime.shutdown()  # again: nothing happens
    runtime.abort("x")
    calls = [runtime.stats, runtime.flush_cache, runtime.reset_stats, lambda: runtime.generate("x")]
    calls += [lambda: runtime.generate("x", stream=True), lambda: asyncio.run(runtime.async_generate("x"))]
    for call in calls:
        with pytest.raises(EngineError, match=r"^the engine was shut down$"):
            call()
    assert "shut down" in repr(runtime)


def engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("minisgl")]


@pytest.mark.parametrize("how", ["shutdown", "with", "del", "del while running", "failed step"])
def test_memory_and_thread_go_with_the_runtime(how):
    before = set(engine_threads())
    runtime = engines.make(overlap=True)
    kv = weakref.ref(runtime._engine.runner.attention.pool.kv)
    weights = weakref.ref(runtime._engine.runner.model.embed)
    assert runtime.generate("x", GREEDY)["output_ids"]
    assert len(set(engine_threads()) - before) == 1
    kept = None
    if how == "shutdown":
        runtime.shutdown()
    elif how == "with":
        with runtime:
            pass
    elif how == "del while running":
        stream = runtime.generate("x", LONG, stream=True)
        next(stream)
        del stream, runtime
    elif how == "failed step":
        runtime._engine.runner.model.logits = None  # fails in the middle of a step, frames full of tensors
        with pytest.raises(EngineError) as kept:
            runtime.generate("x", GREEDY)
        runtime.shutdown()  # while somebody (IPython does) still holds the error with its frames
    else:
        del runtime
    gc.collect()
    wait_until(lambda: set(engine_threads()) <= before)
    gc.collect()
    assert kv() is None and weights() is None, gc.get_referrers(kv() if kv() is not None else weights())
    del kept


@pytest.mark.gpu
def test_gpu_memory_goes_with_the_runtime():
    """Recorded graphs, the KV pool and the weights: all of it back at shutdown, without a garbage collection."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        for _ in range(2):
            runtime = engines.make(device="cuda", kv_capacity=200_000)
            assert runtime.generate("x", GREEDY)["output_ids"]
            assert torch.cuda.memory_allocated() > before + 200_000 * 3 * 2 * 2 * 64 * 4
            runtime.shutdown()
            # cuBLAS keeps a workspace of 32 MiB for each pair of a thread's handle and a stream
            assert torch.cuda.memory_allocated() < before + (160 << 20)
    finally:
        gc.enable()


def test_two_runtimes_in_one_process(rt):
    want = rt.generate("both", GREEDY)["output_ids"]
    with engines.make() as other:
        assert other.generate("both", GREEDY)["output_ids"] == want
        threads = [in_thread(lambda r=r: r.generate(["both"] * 3, GREEDY)) for r in (rt, other)]
        for thread, box in threads:
            thread.join(30)
            assert [r["output_ids"] for r in box[0]] == [want] * 3
    assert rt.generate("both", GREEDY)["output_ids"] == want
    with engines.make() as again:
        assert again.generate("both", GREEDY)["output_ids"] == want


def test_nothing_is_kept_of_requests_that_ended(rt):
    gc.collect()
    before = [o for o in gc.get_objects() if type(o) is Request]
    for i in range(3):
        rt.generate([f"gone {i}", "gone"], {**GREEDY, "n": 2, "repetition_penalty": 1.2}, return_logprob=True)
        list(rt.generate("gone", GREEDY, stream=True))
    gc.collect()
    left = [o for o in gc.get_objects() if type(o) is Request]
    assert len(left) <= len(before) + 1, left  # that of the last step, until the next one


def test_many_threads_at_once(either):
    prompts = [f"thread {i}" for i in range(16)]
    want = [either.generate(p, GREEDY)["output_ids"] for p in prompts]
    waiters = [in_thread(lambda p=p: either.generate(p, GREEDY)["output_ids"]) for p in prompts]
    for thread, _ in waiters:
        thread.join(60)
    assert [box[0] for _, box in waiters] == want


# ---- manners ---------------------------------------------------------------------------------------------------

_MANNERS = """
import asyncio, locale, logging, os, random, signal, sys, threading, time, warnings
import numpy as np, torch

def state():
    return {
        "dtype": torch.get_default_dtype(), "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch rng": torch.get_rng_state().tolist(), "rng": random.getstate(),
        "numpy rng": repr(np.random.get_state()), "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(), "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "policy": type(asyncio.get_event_loop_policy()), "hook": (sys.excepthook, threading.excepthook),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "filters": list(warnings.filters), "environ": dict(os.environ), "cwd": os.getcwd(),
        "switch": sys.getswitchinterval(), "recursion": sys.getrecursionlimit(),
        "locale": locale.setlocale(locale.LC_ALL),
    }

logging.root, asyncio.get_event_loop_policy()
before = state()
from minisgl import Runtime
runtime = Runtime(sys.argv[1], device="cpu", kv_capacity=600)
for params in ({"temperature": 0}, {"seed": 1, "top_p": 0.9}, {"repetition_penalty": 1.1}):
    runtime.generate(["a", "b"], {"max_new_tokens": 4, **params})
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
assert "transformers" not in sys.modules
# the interpreter ends though a request runs and nobody calls shutdown
def background():
    try:
        runtime.generate("x", {"max_new_tokens": 500, "ignore_eos": True})
    except RuntimeError:
        pass
threading.Thread(target=background, daemon=True).start()
while not runtime.stats()["running"]:
    time.sleep(0.01)
print("mannerly")
"""


def test_nothing_global_changes_and_the_interpreter_ends():
    command = [sys.executable, "-c", _MANNERS, str(engines.folder())]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert done.returncode == 0 and done.stdout == "mannerly\n", done.stderr
    assert done.stderr == ""


def invalid_widgets(notebook: dict) -> str | None:
    """What GitHub's renderer refuses about a notebook's widget metadata, or None."""
    widgets = notebook.get("metadata", {}).get("widgets")
    if widgets is None:
        return None
    states = [value for key, value in widgets.items() if key.endswith("widget-state+json")]
    if not states or not all({"state", "version_major", "version_minor"} <= set(state) for state in states):
        return "the state key is missing from metadata.widgets"
    return None


def test_github_invalid_notebook():
    kind = "application/vnd.jupyter.widget-state+json"
    state = {"state": {}, "version_major": 2, "version_minor": 0}
    assert invalid_widgets({"metadata": {"widgets": {"0a1b": {"model": 1}}}})
    assert invalid_widgets({"metadata": {"widgets": {kind: {"0a1b": {}}}}})
    assert not invalid_widgets({"metadata": {"widgets": {kind: state}}})
    assert not invalid_widgets({"metadata": {}, "cells": []})
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.ipynb")):
        if not any(part.startswith(".") for part in path.relative_to(root).parts):
            assert not invalid_widgets(json.loads(path.read_text("utf-8"))), path


def test_stats(made):
    with engines.make(chunk_size=64) as runtime:
        empty = runtime.stats()
        assert empty["kv_capacity"] == empty["kv_free"] == 1200 and empty["requests"] == 0
        assert empty["hit_rate"] == empty["host_time_share"] == empty["output_tokens_per_s"] == 0.0
        ids = random_ids(40)
        runtime.generate(input_ids=[ids, [*ids, 1], [*ids, 2]], sampling_params=GREEDY)
        stats = runtime.stats()
        assert stats["requests"] == 3 and stats["prompt_tokens"] == 122 and stats["output_tokens"] == 30
        assert stats["cached_tokens"] == 80 and stats["hit_rate"] == 80 / 122
        assert stats["steps"] >= 10 and stats["retractions"] == 0
        assert 0 < stats["host_time_share"] < 1
        assert stats["output_tokens_per_s"] == pytest.approx(30 / stats["busy_time"])
        in_tree = 40 + 9 + 2 * (1 + 9)  # nobody computed the last output token's K and V
        assert stats["kv_evictable"] == in_tree == runtime.flush_cache()
        assert runtime.stats()["kv_free"] == 1200
        runtime.reset_stats()
        assert runtime.stats()["requests"] == runtime.stats()["steps"] == 0
        assert "KV 0 of 1,200" in repr(runtime)
        check_idle(runtime)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_event_log_is_coherent(overlap):
    """Replaying the log gives the state: every slot is free, taken or in the tree, every request's story whole."""
    log = EventLog()
    with engines.make(kv_capacity=120, events=log, overlap=overlap, chunk_size=16) as runtime:
        prompts = [[*random_ids(30, seed=i // 2), i] for i in range(8)]
        thread, _ = in_thread(lambda: runtime.generate("to be aborted", LONG, rid="x"))
        wait_until(lambda: runtime.stats()["running"])
        runtime.abort("x")
        thread.join(20)
        runtime.generate(input_ids=prompts, sampling_params=GREEDY)
        runtime.flush_cache()
        free, stored = set(range(1, 121)), set()
        stories: dict[str, list[str]] = {}
        for event in log:
            slots = {int(s) for s in event.fields.get("slots", ())}
            if event.kind == "alloc":
                assert slots <= free, event
                free -= slots
            elif event.kind == "free":
                assert not slots & free and not slots & stored, event
                free |= slots
            elif event.kind == "insert":
                assert not slots & (free | stored), event
                stored |= slots
            elif event.kind == "evict":
                assert slots <= stored, event
                stored -= slots
            elif event.kind in ("submit", "finish", "retract"):
                stories.setdefault(event.fields["rid"], []).append(event.kind)
            elif event.kind == "batch":
                for rid in (*event.fields["decodes"], *(rid for rid, _, _ in event.fields["extends"])):
                    assert stories[rid][0] == "submit" and stories[rid][-1] != "finish", event
        assert free == set(map(int, runtime.scheduler.allocator.free_slots())) and not stored
        assert len(stories) == 9
        assert all(s[0] == "submit" and s[-1] == "finish" and s.count("finish") == 1 for s in stories.values())
        evictions = [e for e in log if e.kind == "evict"]
        assert evictions and runtime.events is log and log.dropped == 0
        check_idle(runtime)


# ---- chat ------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat_is_generate_on_the_template(rt):
    ids = rt.tokenizer.chat_ids(MESSAGES).tolist()
    want = rt.generate(input_ids=ids, sampling_params=GREEDY)
    assert rt.chat(MESSAGES, GREEDY)["output_ids"] == want["output_ids"]
    check_stream(list(rt.chat(MESSAGES, GREEDY, stream=True)), want)


def test_missing_chat_template_500(made):
    with engines.make(tokenizer=ByteTokenizer()) as runtime:
        with pytest.raises(ChatTemplateError, match="no chat template: pass one as chat_template"):
            runtime.chat(MESSAGES)
        with pytest.raises(ChatTemplateError, match="messages"):
            runtime.chat([], GREEDY)
        assert len(runtime.generate("still alive", GREEDY)["output_ids"]) == 10
        check_idle(runtime)


# ---- bad input -------------------------------------------------------------------------------------------------

BAD = {
    "unknown parameter": (("x", {"temprature": 1}), {}, "unknown sampling parameter 'temprature'.*'temperature'"),
    "wrong type": (("x", {"temperature": "hot"}), {}, "temperature must be"),
    "bool for a number": (("x", {"top_p": True}), {}, "top_p must be"),
    "out of range": (("x", {"top_p": 1.5}), {}, "top_p must be"),
    "negative": (("x", {"max_new_tokens": -1}), {}, "max_new_tokens must be"),
    "not parameters": (("x", 7), {}, "sampling_params must be"),
    "two grammars": (("x", {"regex": "a", "ebnf": "b"}), {}, "regex and ebnf"),
    "stop ids": (("x", {"stop_token_ids": list(range(20))}), {}, "stop_token_ids: at most"),
    "stop id": (("x", {"stop_token_ids": [320]}), {}, "stop_token_ids must have token ids in"),
    "bias": (("x", {"logit_bias": {999: 1}}), {}, "logit_bias must have token ids in"),
    "second of a list": ((["x", "y"], [{}, {"top_k": 0}]), {}, "top_k must be"),
    "empty prompt": (("",), {}, "prompt is empty"),
    "empty prompt in a list": ((["x", ""],), {}, "prompt is empty"),
    "empty list": (([],), {}, "prompt is an empty list"),
    "empty ids": ((), {"input_ids": []}, "prompt is empty"),
    "empty ids, scored": ((), {"input_ids": [], "return_logprob": True, "logprob_start_len": 0}, "prompt is empty"),
    "empty ids in a list": ((), {"input_ids": [[1], []]}, "prompt is empty"),
    "no prompt": ((), {}, "give prompt or input_ids"),
    "both": (("x",), {"input_ids": [1]}, "give prompt or input_ids"),
    "prompt of a wrong type": ((7,), {}, "prompt must be a string or a list of strings, got int"),
    "bytes": ((b"x",), {}, "prompt must be a string or a list of strings, got bytes"),
    "surrogate": (("\ud800",), {}, "surrogate"),
    "ids of a wrong type": ((), {"input_ids": "abc"}, "input_ids must be a list of token ids, got str"),
    "float ids": ((), {"input_ids": [1.5]}, "input_ids must be integers"),
    "ragged ids": ((), {"input_ids": [1, [2]]}, "input_ids must be integers"),
    "deep ids": ((), {"input_ids": [[1], [[2]]]}, "input_ids must be integers"),
    "huge id": ((), {"input_ids": [1 << 70]}, "input_ids must be integers"),
    "token id out of range": ((), {"input_ids": [1, 320]}, r"token id 320, outside the vocabulary \[0, 319\]"),
    "negative token id": ((), {"input_ids": [[1], [-1]]}, "token id -1, outside the vocabulary"),
    "longer than the context": ((), {"input_ids": [1] * 513}, "prompt has 513 tokens; at most 511 fit"),
    "no room for an answer": ((), {"input_ids": [1] * 512}, "prompt has 512 tokens; at most 511 fit"),
    "stream of two": ((["x", "y"],), {"stream": True}, "stream=True takes one prompt"),
    "stream of n": (("x", {"n": 2}), {"stream": True}, "stream=True takes one prompt"),
    "stream": (("x",), {"stream": "yes"}, "stream must be True or False"),
    "return_logprob": (("x",), {"return_logprob": 1}, "return_logprob must be True or False"),
    "logprob_start_len": (("x",), {"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len must be at"),
    "logprob_start_len alone": (("x",), {"logprob_start_len": 0}, "need return_logprob=True"),
    "top_logprobs_num": (("x",), {"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num must be"),
    "priority": (("x",), {"priority": "high"}, "priority must be an integer"),
    "rid": (("x",), {"rid": 7}, "rid must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(rt, name):
    """One line that names the cause; nothing is queued, nothing runs, the engine goes on."""
    args, options, message = BAD[name]
    before = rt.stats()
    with pytest.raises(ValueError, match=message) as error:
        rt.generate(*args, **options)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=message):
        asyncio.run(rt.async_generate(*args, **options))
    after = rt.stats()
    assert (after["waiting"], after["running"], after["requests"]) == (0, 0, before["requests"])


def test_the_engine_serves_after_bad_input(rt):
    assert len(rt.generate("after", GREEDY)["output_ids"]) == 10


def test_prompt_that_can_never_fit_the_pool(made):
    runtime = made(kv_capacity=40)
    with pytest.raises(ValueError, match=r"prompt has 40 tokens; at most 39 fit .*KV capacity 40"):
        runtime.generate(input_ids=[[1] * 5, [1] * 40])
    assert idle(runtime)
    long = runtime.generate(input_ids=[1] * 39, sampling_params=GREEDY)
    assert len(long["output_ids"]) == 1 and long["meta_info"]["finish_reason"] == {"type": "length"}
    assert runtime.generate(input_ids=[1] * 40, sampling_params={"max_new_tokens": 0})["output_ids"] == []
    check_idle(runtime)


def test_a_token_that_the_model_does_not_have(made):
    """A tokenizer with more tokens than the model has embeddings must not reach the forward pass."""

    class Wide(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            return np.append(super().encode(text), 320).astype(np.int32)

    wide = Wide()
    wide.eos_ids = {257, 320}
    with engines.make(tokenizer=wide) as runtime:
        assert runtime.eos_token_ids == (257,)
        with pytest.raises(ValueError, match="prompt has token id 320, outside the vocabulary"):
            runtime.generate("x")
        params = {"max_new_tokens": 3, "min_new_tokens": 2}
        assert runtime.generate(input_ids=[1, 2], sampling_params=params)["output_ids"]


BAD_OPTIONS = {
    "schedule_policy": "best",
    "eviction": "oldest",
    "attention_backend": "flash",
    "dtype": "int8",
    "device": "tpu",
    "load_format": "pickle",
    "kv_capacity": 0,
    "max_running_requests": -1,
    "max_context": 1.5,
    "chunk_size": 0,
    "mem_fraction": 1.5,
    "radix_cache": 1,
    "overlap": "yes",
    "cuda_graphs": True,
    "tuned_products": True,
    "seed": -1,
    "events": "log",
    "revision": "main",
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_option(name):
    before = engine_threads()
    with pytest.raises(ValueError, match=name) as error:
        engines.make(**{name: BAD_OPTIONS[name]})
    assert "\n" not in str(error.value)
    assert engine_threads() == before


def broken_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def other_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (folder / "config.json").write_text(json.dumps(config))


BAD_MODELS = {
    "broken safetensors": (broken_weights, "broken safetensors file .*model.safetensors"),
    "non-Llama config": (other_architecture, "architecture 'GPT2LMHeadModel' isn't supported"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no .*safetensors file"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json is not a tokenizer"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_model(tmp_path, name):
    spoil, message = BAD_MODELS[name]
    for path in engines.folder().iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spoil(tmp_path)
    before = engine_threads()
    with pytest.raises(ValueError, match=message) as error:
        Runtime(tmp_path, device="cpu", dtype="float32", kv_capacity=100)
    assert "\n" not in str(error.value)
    assert engine_threads() == before


def test_unknown_model_path():
    for model in ("/no/such/model", Path("no/such/model"), "./missing.gguf"):
        with pytest.raises(ValueError, match="no such file or folder") as error:
            Runtime(model)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="model must be a path"):
        Runtime(7)  # type: ignore[arg-type]


# ---- one prompt, one answer ------------------------------------------------------------------------------------


def alphanumeric(n: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=n))


def test_prefix_cache_inconsistent_completions(made):
    prompts = [alphanumeric(512, seed) for seed in range(16)]
    params = {**GREEDY, "max_new_tokens": 4}
    runs = []
    for radix in (True, False):
        runtime = made("llama_linear", kv_capacity=10_000, radix_cache=radix)
        for _ in range(2):
            runs.append([r["output_ids"] for r in runtime.generate(prompts, params)])
        check_idle(runtime)
    assert all(run == runs[0] for run in runs)


def test_prefix_cache_changes_greedy_output(made):
    cold = made(radix_cache=False).generate("the very same prompt", GREEDY)["output_ids"]
    with engines.make() as fresh:
        assert [fresh.generate("the very same prompt", GREEDY)["output_ids"] for _ in range(5)] == [cold] * 5


def test_cache_reuse_empty_completion(rt):
    params = {"temperature": 0, "max_new_tokens": 8}
    first, second = (rt.generate("Reply with exactly the word OK.", params) for _ in range(2))
    assert second["meta_info"]["cached_tokens"] == 30
    assert first["text"] == second["text"] != ""
    assert first["output_ids"] == second["output_ids"]


def test_greedy_changes_under_concurrency(either):
    prompts = [f"{'shared ' * (i % 3)}question {i}" for i in range(16)]
    alone = either.generate(prompts[5], GREEDY)["output_ids"]
    either.flush_cache()
    assert either.generate(prompts, GREEDY)[5]["output_ids"] == alone
    assert either.generate(prompts, GREEDY)[5]["output_ids"] == alone


def test_batch_invariant_not_deterministic(rt):
    """44 requests in a fixed order, from an empty cache, five times: bitwise equal log-probabilities."""
    prompts = [random_ids(3 + i % 7, seed=i) for i in range(44)]
    params = [{"max_new_tokens": 4, "ignore_eos": True, "seed": i, "top_p": 0.9} for i in range(44)]
    runs = set()
    for _ in range(5):
        rt.flush_cache()
        replies = rt.generate(input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=2)
        infos = [r["meta_info"] for r in replies]
        runs.add(repr([(i["output_token_logprobs"], i["output_top_logprobs"]) for i in infos]))
    assert len(runs) == 1


def test_bfloat16_prompts_give_the_same_bits_however_they_are_computed(made):
    """Whole, in chunks, behind a cached prefix, among others: the first token's scores are equal, not close."""
    prompt = random_ids(330, seed=30)
    others = [prompt[:200] + random_ids(9, seed=31), *(random_ids(3 + 50 * i, seed=32 + i) for i in range(6))]
    options = {"return_logprob": True, "top_logprobs_num": 5}
    params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    seen = set()
    for switches in ({}, {"chunk_size": 100}, {"chunk_size": 64, "radix_cache": False}):
        runtime = made(kv_capacity=3000, dtype="bfloat16", **switches)
        for batch in ([prompt], [prompt], [*others, prompt], [others[0]], [prompt]):
            if batch == [others[0]]:
                runtime.flush_cache()
            reply = runtime.generate(input_ids=batch, sampling_params=params, **options)[-1]
            if batch[-1] is prompt:
                seen.add(repr(reply["meta_info"]["output_top_logprobs"]))
        check_idle(runtime)
    assert len(seen) == 1, seen


SWITCHES = [
    {},
    {"overlap": True},
    {"radix_cache": False},
    {"overlap": True, "radix_cache": False, "chunk_size": 16},
    {"overlap": True, "kv_capacity": 90, "chunk_size": 16},  # eviction and retraction
]


def mixed_requests(runtime: Runtime) -> tuple[list[list[int]], list[dict]]:
    """Every kind of parameter in one batch; every third prompt shares a prefix."""
    stem = random_ids(20, seed=99)
    prompts = [(stem if i % 3 == 0 else []) + random_ids(1 + i, seed=i) for i in range(12)]
    kinds = [
        {"temperature": 0},
        {"seed": 3},
        {"seed": 4, "top_p": 0.8, "top_k": 40},
        {"seed": 5, "min_p": 0.05, "temperature": 1.7},
        {"temperature": 0, "repetition_penalty": 1.6},
        {"seed": 6, "frequency_penalty": 1.5, "presence_penalty": -1.0},
        {"seed": 9, "temperature": 2, "logit_bias": only_letters(runtime), "stop": ["ab", "ch", "e"]},
        {"seed": 8, "temperature": 2, "logit_bias": only_letters(runtime), "stop_regex": "[a-d][e-h]{2}"},
        {"temperature": 0, "logit_bias": only_letters(runtime), "repetition_penalty": 1.3},
        {"seed": 7, "stop_token_ids": list(range(8)), "min_new_tokens": 4},
        {"seed": 11, "ignore_eos": False},
        {"temperature": 0, "logit_bias": {EOS: 60.0}, "min_new_tokens": 3, "ignore_eos": False},
    ]
    return prompts, [{"max_new_tokens": 14, "ignore_eos": True, **kind} for kind in kinds]


EOS = tiny_models.BOS + 1


@pytest.fixture(scope="module")
def alone(made):
    """What each of the mixed requests gives in an engine of its own: no companions, no cache, no overlap."""
    runtime = made(radix_cache=False)
    prompts, params = mixed_requests(runtime)
    replies = [runtime.generate(input_ids=p, sampling_params=q) for p, q in zip(prompts, params)]
    kinds = [r["meta_info"]["finish_reason"]["type"] for r in replies]
    assert kinds.count("stop") >= 3 and kinds.count("length") >= 4  # the requests exercise both
    return [(r["output_ids"], r["text"], r["meta_info"]["finish_reason"]) for r in replies]


@pytest.mark.parametrize("options", SWITCHES, ids=str)
def test_every_parameter_gives_the_same_in_any_company(made, alone, options):
    """Greedy, seeded, penalised, stopped: the same with any companions, overlap, cache and memory pressure."""
    runtime = made(**options)
    prompts, params = mixed_requests(runtime)
    for _ in range(2):  # cold, then with what the first round left in the cache
        if "kv_capacity" in options:
            overcommit(runtime)
        replies = runtime.generate(input_ids=prompts, sampling_params=params)
        assert [(r["output_ids"], r["text"], r["meta_info"]["finish_reason"]) for r in replies] == alone
    if "kv_capacity" in options:
        assert runtime.stats()["retractions"] > 0
    streams = [runtime.generate(input_ids=p, sampling_params=q, stream=True) for p, q in zip(prompts, params)]
    for stream, (ids, text, reason) in zip(streams, alone):
        chunks = list(stream)
        assert chunks[-1]["output_ids"] == ids
        assert "".join(c["delta"] for c in chunks) == text
        assert chunks[-1]["meta_info"]["finish_reason"] == reason
    check_idle(runtime)


# ---- parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.7},
        {"frequency_penalty": 1.2},
        {"presence_penalty": 1.9},
        {"repetition_penalty": 0.8, "frequency_penalty": -0.7, "presence_penalty": 0.5},
    ],
    ids=str,
)
def test_penalties_equal_the_definition(either, penalties):
    prompt = random_ids(7, seed=3)
    ids = list(prompt)
    for _ in range(12):
        logits = hf_logits(ids)[-1]
        output = ids[len(prompt) :]
        r = penalties.get("repetition_penalty", 1.0)
        for token in set(ids):
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        for token in set(output):
            logits[token] -= penalties.get("frequency_penalty", 0) * output.count(token)
            logits[token] -= penalties.get("presence_penalty", 0)
        ids.append(int(logits.argmax()))
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, **penalties}
    companion = {**GREEDY, "repetition_penalty": 1.9}
    replies = either.generate(input_ids=[[1, 2], prompt], sampling_params=[companion, params])
    assert replies[1]["output_ids"] == ids[len(prompt) :]


FORCED = {"max_new_tokens": 40, "regex": "wow[ab]{3}hello[abcd]{12}end"}


def forced_cases(runtime: Runtime) -> list[dict]:
    """Parameters that look at tokens one by one, where jump-forward takes several at once."""
    w, a, o = (int(i) for i in runtime.tokenizer.encode("wlo"))
    return [
        {"temperature": 0},
        {"temperature": 0, "frequency_penalty": 1.9},
        {"temperature": 0, "repetition_penalty": 1.9},
        {"seed": 3, "presence_penalty": 1.5},
        {"seed": 4, "temperature": 3.0},
        {"temperature": 0, "stop_token_ids": [a]},
        {"temperature": 0, "stop_token_ids": [a], "no_stop_trim": True},
        {"temperature": 0, "stop_token_ids": [w]},
        {"temperature": 0, "stop_token_ids": [w, o], "min_new_tokens": 3},
        {"temperature": 0, "stop": "lo"},
        {"temperature": 0, "stop": "ow"},
        {"temperature": 0, "stop_regex": "l+o"},
        *({"temperature": 0, "max_new_tokens": n} for n in (0, 1, 2, 3, 4, 7, 8, 11, 12)),
    ]


@pytest.mark.parametrize("options", [{"overlap": True}, {}, {"overlap": True, "jump_forward": False}], ids=str)
def test_forced_tokens_are_tokens_like_any_other(made, options):
    """Penalties count them, stop ids and stop strings see them, the length includes them."""

    def outcomes(runtime):
        cases = [{**FORCED, **case} for case in forced_cases(runtime)]
        replies = runtime.generate(["x"] * len(cases), cases)  # together
        replies += [runtime.generate("x", case) for case in cases]
        replies += [list(runtime.generate("x", case, stream=True))[-1] for case in cases]
        return [(r["output_ids"], r["text"], r["meta_info"]["finish_reason"]) for r in replies], replies

    want, _ = outcomes(made(jump_forward=False))
    runtime = made(**options)
    got, replies = outcomes(runtime)
    for case, g, w in zip(forced_cases(runtime) * 3, got, want):
        assert g == w, case
    assert replies[0]["text"].startswith("wow") and replies[0]["text"].endswith("end")
    jumped = replies[0]["meta_info"]["forced_tokens"]
    # on a CPU the first token of an output is sampled, by a mask that allows just this one
    assert jumped == (10 if options.get("jump_forward", True) else 0)
    check_idle(runtime)


def test_logit_bias_decides(either):
    token = int(either.tokenizer.encode("z")[0])
    params = {**GREEDY, "logit_bias": {token: 1000}}
    assert either.generate("x", params)["text"] == "z" * 10
    assert either.generate("x", {**params, "logit_bias": {str(token): 1000}})["text"] == "z" * 10
    never = either.generate("x", {**GREEDY, "logit_bias": {either.generate("x", GREEDY)["output_ids"][0]: -1000}})
    assert never["output_ids"][0] != either.generate("x", GREEDY)["output_ids"][0]


def test_stop_ids(either):
    ids = either.generate("stop ids", GREEDY)["output_ids"]
    at = next(i for i in range(2, 10) if ids[i] not in ids[:i])
    params = {**GREEDY, "stop_token_ids": [ids[at], 3]}
    reply = either.generate("stop ids", params)
    assert reply["output_ids"] == ids[: at + 1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[at]}
    decode = either.tokenizer.decode
    assert reply["text"] == decode(ids[:at])
    assert either.generate("stop ids", {**params, "no_stop_trim": True})["text"] == decode(ids[: at + 1])
    # the stop id is the last token that the length allows: it is a stop
    reply = either.generate("stop ids", {**params, "max_new_tokens": at + 1})
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"


def test_model_stop_ids_and_ignore_eos(either):
    eager = {"temperature": 0, "max_new_tokens": 6, "logit_bias": {EOS: 1000}}
    reply = either.generate("eos", eager)
    assert reply["output_ids"] == [EOS] and reply["text"] == ""
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert either.generate("eos", {**eager, "ignore_eos": True})["output_ids"] == [EOS] * 6
    # ignore_eos is about the model's ids; one's own still stop
    own = {**eager, "ignore_eos": True, "stop_token_ids": [EOS]}
    assert either.generate("eos", own)["output_ids"] == [EOS]


def test_all_stop_ids_of_the_model(made):
    runtime = made("llama3")
    assert runtime.eos_token_ids == (257, 258)
    for token in runtime.eos_token_ids:
        reply = runtime.generate("x", {"temperature": 0, "logit_bias": {token: 1000}})
        assert reply["output_ids"] == [token]


def test_min_new_tokens_holds_every_stop(either):
    eager = {"temperature": 0, "max_new_tokens": 8, "logit_bias": {EOS: 1000}, "min_new_tokens": 4}
    ids = either.generate("min", eager)["output_ids"]
    assert len(ids) == 5 and ids[-1] == EOS and EOS not in ids[:4]
    # a stop string that is there before does not stop; the same one later does
    params = {**GREEDY, "logit_bias": only_letters(either, "k"), "min_new_tokens": 6, "stop": "kk"}
    reply = either.generate("min", params)
    assert reply["text"] == "k" * 6 and len(reply["output_ids"]) == 8


def test_stop_strings_across_tokens(either):
    params = {**VARIED, "max_new_tokens": 30, "logit_bias": only_letters(either, "abcd")}
    text = either.generate("across", params)["text"]
    stop = text[11:16]
    at = text.index(stop)
    reply = either.generate("across", {**params, "stop": ["zzz", stop]})
    assert reply["text"] == text[:at]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(reply["output_ids"]) == at + 5
    kept = either.generate("across", {**params, "stop": stop, "no_stop_trim": True})
    assert kept["text"] == text[: at + 5] and kept["output_ids"] == reply["output_ids"]
    # a stop that the last allowed token completes is a stop, not a length
    short = either.generate("across", {**params, "stop": stop, "max_new_tokens": at + 5})
    assert short["meta_info"]["finish_reason"]["type"] == "stop" and short["text"] == text[:at]


def test_special_tokens_in_the_text(either):
    params = {**GREEDY, "max_new_tokens": 3, "logit_bias": {EOS: 1000}}
    assert either.generate("x", params)["text"] == ""
    assert either.generate("x", {**params, "skip_special_tokens": False})["text"] == "<|eos|>" * 3


def test_seeds(either):
    params = {"max_new_tokens": 12, "ignore_eos": True}
    a, b = (either.generate("seed", {**params, "seed": 1})["output_ids"] for _ in range(2))
    assert a == b
    assert either.generate("seed", {**params, "seed": 2})["output_ids"] != a
    assert either.generate("seed", {**params, "seed": 1, "n": 2})[0]["output_ids"] == a
    unseeded = {tuple(r["output_ids"]) for r in either.generate(["seed"] * 4, params)}
    assert len(unseeded) == 4
    assert either.generate("seed", {**params, "seed": -(2**63)})["output_ids"]
    assert either.generate("seed", {**params, "seed": 2**63 - 1, "n": 2})[1]["output_ids"]


def test_the_engine_seed_decides_what_brings_none():
    outputs = []
    for seed in (1, 1, 2):
        with engines.make(seed=seed) as runtime:
            outputs.append(runtime.generate("engine seed", {"max_new_tokens": 12, "ignore_eos": True})["output_ids"])
    assert outputs[0] == outputs[1] != outputs[2]


# ---- log-probabilities -----------------------------------------------------------------------------------------


def check_scores(reply: dict, prompt: list[int], start: int | None, top: int = 0) -> None:
    """Every score of a reply is transformers' log_softmax at its place."""
    info, ids = reply["meta_info"], reply["output_ids"]
    logprobs = torch.log_softmax(hf_logits([*prompt, *ids]).double(), -1)

    def check(entries, tops, first):
        for position, (value, token, text) in enumerate(entries, first):
            assert token == [*prompt, *ids][position] and text is None
            if position == 0:
                assert value is None
                continue
            assert value == pytest.approx(float(logprobs[position - 1, token]), abs=2e-4)
            if top:
                values, _ = logprobs[position - 1].topk(top)
                got = tops[position - first]
                assert len(got) == top
                for (v, t, _), want in zip(got, values.tolist()):
                    assert v == pytest.approx(want, abs=2e-4)
                    assert v == pytest.approx(float(logprobs[position - 1, t]), abs=2e-4)

    assert len(info["output_token_logprobs"]) == len(ids)
    check(info["output_token_logprobs"], info.get("output_top_logprobs"), len(prompt))
    assert ("input_token_logprobs" in info) == (start is not None)
    if start is not None:
        assert len(info["input_token_logprobs"]) == len(prompt) - start
        check(info["input_token_logprobs"], info.get("input_top_logprobs"), start)
    assert ("output_top_logprobs" in info) == bool(top)


def test_scores_equal_transformers(either):
    """With and without cache hits, in chunks, from any start, with companions, sampled and greedy."""
    prompt = random_ids(100, seed=1)  # two chunks
    kinds = [(0, 3, GREEDY), (None, 0, GREEDY), (40, 0, {**GREEDY, "temperature": 1.3, "seed": 2}), (99, 1, GREEDY)]
    kinds += [(100, 2, {**GREEDY, "repetition_penalty": 1.5}), (1, 0, {**GREEDY, "max_new_tokens": 0})]
    for round_ in range(2):
        for start, top, params in kinds:
            reply = either.generate(
                input_ids=prompt,
                sampling_params=params,
                return_logprob=True,
                logprob_start_len=-1 if start is None else start,
                top_logprobs_num=top,
            )
            check_scores(reply, prompt, start, top)
            if round_:
                want = 99 if start is None else min(max(start - 1, 0), 99)
                assert reply["meta_info"]["cached_tokens"] == want


def test_scores_survive_retraction(made):
    runtime = made(kv_capacity=130, chunk_size=16, overlap=True)
    prompts = [random_ids(20, seed=i) for i in range(6)]
    options = {"return_logprob": True, "logprob_start_len": 5, "top_logprobs_num": 2}
    params = {**GREEDY, "max_new_tokens": 25}
    overcommit(runtime)
    replies = runtime.generate(input_ids=prompts, sampling_params=params, **options)
    assert runtime.stats()["retractions"] > 0
    for prompt, reply in zip(prompts, replies):
        check_scores(reply, prompt, 5, 2)
    check_idle(runtime)


def test_max_new_tokens_0_scores_the_prompt(either):
    prompt = random_ids(80, seed=4)
    for _ in range(2):
        reply = either.generate(
            input_ids=prompt, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
        )
        assert reply["output_ids"] == [] and reply["text"] == ""
        assert reply["meta_info"]["finish_reason"] == {"type": "length"}
        assert reply["meta_info"]["ttft"] is None
        check_scores(reply, prompt, 0)
    one = either.generate(
        input_ids=[5], sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )
    assert one["meta_info"]["input_token_logprobs"] == [(None, 5, None)]


def test_logprob_start_len_offset(either):
    prompt = random_ids(20, seed=6)

    def scores(start):
        reply = either.generate(
            input_ids=prompt,
            sampling_params=GREEDY,
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=2,
        )
        return reply["meta_info"]

    full = scores(0)
    for start in (10, 1, 19, 20):
        part = scores(start)
        assert [t for _, t, _ in part["input_token_logprobs"]] == prompt[start:]
        for key in ("input_token_logprobs", "input_top_logprobs"):
            assert len(part[key]) == 20 - start
            for got, want in zip(flat(part[key]), flat(full[key][start:])):
                assert got[1] == want[1] and got[0] == pytest.approx(want[0], abs=2e-5)


def flat(entries):
    """Pairs (log-probability, id) of a list of triples, or of a list of lists of them."""
    for entry in entries:
        if isinstance(entry, list):
            yield from flat(entry)
        elif entry is not None:
            yield entry[:2]


def test_prompt_logprobs_stale_values(made):
    stem = random_ids(30, seed=8)
    a, b = stem + random_ids(10, seed=9), stem + random_ids(12, seed=10)
    options = {"return_logprob": True, "logprob_start_len": 0}
    plain = made(radix_cache=False)
    want = [plain.generate(input_ids=p, sampling_params=GREEDY, **options)["meta_info"] for p in (a, b)]
    for order in ((0, 1), (1, 0)):
        with engines.make() as runtime:
            for i in (*order, *order):
                got = runtime.generate(input_ids=(a, b)[i], sampling_params=GREEDY, **options)["meta_info"]
                for (v, t), (w, u) in zip(
                    flat(got["input_token_logprobs"][1:]), flat(want[i]["input_token_logprobs"][1:])
                ):
                    assert t == u and v == pytest.approx(w, abs=2e-5)


def test_text_in_logprobs(rt):
    reply = rt.generate(
        "hé",
        GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
    )
    info = reply["meta_info"]
    assert [text for _, _, text in info["input_token_logprobs"]] == ["h", "\ufffd", "\ufffd"]
    for _, token, text in (*info["output_token_logprobs"], *(top[0] for top in info["output_top_logprobs"])):
        assert text == rt.tokenizer.token_text(token)


def test_radix_duplicate_prefix_stale_page_table(made):
    """Two requests compute the same prompt side by side (scoring forbids sharing); the second's copy is freed when
    it ends, and a third overwrites it at once.  Nobody reads the freed copy."""
    prompt = random_ids(64, seed=13)
    want = made(radix_cache=False).generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]
    runtime = made(kv_capacity=190, overlap=True)
    options = {"return_logprob": True, "logprob_start_len": 0}
    for _ in range(2):
        params = [{**GREEDY, "max_new_tokens": n} for n in (3, 10)]
        replies = runtime.generate(input_ids=[prompt, prompt], sampling_params=params, **options)
        assert replies[0]["output_ids"] == want[:3] and replies[1]["output_ids"] == want
        filler = runtime.generate(input_ids=[random_ids(60, seed=20 + i) for i in range(3)], sampling_params=GREEDY)
        assert len(filler) == 3
        assert runtime.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] == want
        check_idle(runtime)


def test_logging_is_left_alone(rt):
    """A library's logger may exist; levels, handlers and propagation are the application's."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("minisgl") and isinstance(logger, logging.Logger):
            assert logger.level == logging.NOTSET and not logger.handlers and logger.propagate
