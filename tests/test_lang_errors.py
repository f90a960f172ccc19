"""Errors and interrupts of the language: they reach whoever waits, with their traceback, within a second."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import traceback

import pytest

import minisgl as sgl
from tests.scripted_backend import ScriptedBackend, chatml


class Broken(Exception):
    pass


def broken_tool():
    raise Broken("tool")


def broken_reply(prompt):
    if "boom" in prompt.text:
        raise Broken("backend")
    return "ok"


@pytest.fixture
def within_a_second():
    begin = time.perf_counter()
    yield
    assert time.perf_counter() - begin < 1.5  # a second, and what a busy machine adds


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@sgl.function
def before_gen(s):
    broken_tool()
    s += sgl.gen("a")


@sgl.function
def after_gen(s):
    s += sgl.gen("a")
    broken_tool()


@sgl.function
def after_reading(s):
    s += sgl.gen("a")
    s["a"]
    broken_tool()


@sgl.function
def in_a_fork(s):
    for child in s.fork(2):
        child += sgl.gen("a")
    broken_tool()


PLACES = [before_gen, after_gen, after_reading, in_a_fork]


@pytest.mark.parametrize("f", PLACES, ids=lambda f: f.__name__)
def test_an_exception_in_the_body(f, within_a_second):
    with pytest.raises(Broken) as caught:
        f.run(backend=ScriptedBackend(delay=0.02))
    assert frames(caught.value)[-1] == "broken_tool"
    state = f.run(backend=ScriptedBackend(delay=0.02), stream=True)
    for wait in (state.sync, state.text, lambda: state["z"], lambda: list(state.text_iter())):
        with pytest.raises(Broken) as caught:
            wait()
        assert frames(caught.value)[-1] == "broken_tool"
    assert isinstance(state.error(), Broken)
    with pytest.raises(Broken) as caught:
        f.run_batch([{}, {}], backend=ScriptedBackend(delay=0.02))
    assert frames(caught.value)[-1] == "broken_tool"


@sgl.function
def failing_gen(s):
    s += "boom" + sgl.gen("a")
    s += "more" + sgl.gen("b")
    return 1


@pytest.mark.parametrize("inline", [True, False])
def test_an_exception_in_the_backend_reaches_every_waiter(inline, within_a_second):
    backend = ScriptedBackend(broken_reply, inline=inline)
    state = failing_gen.run(backend=backend)
    async_iter = lambda: asyncio.run(read_all(state))  # noqa: E731
    waits = (lambda: state["a"], lambda: state["b"], state.sync, state.text, state.messages, async_iter)
    for wait in (*waits, lambda: state.get_meta_info("a"), lambda: list(state.text_iter("b"))):
        for _ in range(2):
            with pytest.raises(Broken, match="backend") as caught:
                wait()
            assert "broken_reply" in frames(caught.value)
    assert isinstance(state.error(), Broken)
    assert len(backend.jobs) == 1  # what came after the failure was not asked for


async def read_all(state):
    return [text async for text in state.text_async_iter("a")]


def test_a_backend_error_in_a_fork_child_reaches_its_reader_and_the_join(within_a_second):
    @sgl.function
    def f(s, how):
        group = s.fork(2)
        group += ["fine", "boom"]
        group += sgl.gen("a")
        assert group[0]["a"] == "ok"
        return group[1]["a"] if how == "read" else group.join(how)

    for how in ("read", "gather_variable", "concate_and_append"):
        with pytest.raises(Broken, match="backend"):
            f.run(how, backend=ScriptedBackend(broken_reply))


def test_a_parents_error_reaches_children_that_were_waiting_for_it(within_a_second):
    @sgl.function
    def f(s):
        s += "boom" + sgl.gen("a")
        child = s.fork(2)[0]
        child += sgl.gen("b")
        return child["b"]

    with pytest.raises(Broken, match="backend"):
        f.run(backend=ScriptedBackend(broken_reply))


def test_siblings_of_a_failed_program_go_on(within_a_second):
    done = []

    @sgl.function
    def f(s, x):
        s += x + sgl.gen("a")
        s.sync()
        done.append(x)

    backend = ScriptedBackend(broken_reply, delay=0.05)
    items = ["1", "boom", *"23456789"]
    with pytest.raises(Broken):
        f.run_batch(items, backend=backend, num_threads=2)
    for _ in range(100):
        if len(done) == 9:
            break
        time.sleep(0.01)
    assert sorted(done) == list("123456789")


def test_generator_style_raises_at_the_failed_programs_place(within_a_second):
    f = sgl.function(lambda s, x: s.__iadd__(x + sgl.gen("a")))
    iterator = f.run_batch(["1", "boom", "2"], backend=ScriptedBackend(broken_reply), generator_style=True)
    assert next(iterator)["a"] == "ok"
    with pytest.raises(Broken):
        next(iterator)


def test_a_program_that_fails_cancels_what_it_has_running(within_a_second):
    backend = ScriptedBackend(delay=30)
    with pytest.raises(Broken):
        in_a_fork.run(backend=backend)
    assert len(backend.cancelled) == 2


def test_an_error_inside_a_scope_is_raised_there(within_a_second):
    @sgl.function
    def f(s):
        with s.user():
            broken_tool()

    with pytest.raises(Broken) as caught:
        f.run(backend=ScriptedBackend())
    assert frames(caught.value)[-1] == "broken_tool"


def test_a_template_that_refuses_says_why(within_a_second):
    from minisgl.chat_template import ChatTemplate

    text = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    backend = ScriptedBackend(render=ChatTemplate(text).render)
    f = sgl.function(lambda s: s.__iadd__(sgl.system("a") + sgl.user("b") + sgl.assistant(sgl.gen("c"))))
    with pytest.raises(ValueError, match="no system role"):
        f.run(backend=backend)["c"]


def test_media_is_refused_by_a_backend_without_vision(within_a_second):
    class Blind(ScriptedBackend):
        def check_media(self):
            raise ValueError("no vision")

    with pytest.raises(ValueError, match="no vision"):
        sgl.function(lambda s: s.__iadd__(sgl.image("a.png"))).run(backend=Blind()).sync()


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


class Interrupt:
    """Sends SIGINT to the main thread after a moment and checks that what runs returns within a second."""

    def __enter__(self):
        self.sent = 0.0

        def send():
            self.sent = time.perf_counter()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        self.timer = threading.Timer(0.15, send)
        self.timer.start()
        return self

    def __exit__(self, kind, *_):
        assert kind is KeyboardInterrupt
        assert time.perf_counter() - self.sent < 1
        return True


@sgl.function
def slow(s, x=""):
    s += x + sgl.gen("a")
    for child in s.fork(2):
        child += sgl.gen("b")
    return child["b"]


@sgl.function
def two(s):
    for child in s.fork(2):
        child += sgl.gen("b")
    s += sgl.gen("a")


def wait_cancelled(backend, count):
    for _ in range(100):
        if len(backend.cancelled) >= count:
            return True
        time.sleep(0.01)
    return False


def test_ctrl_c_in_run():
    backend = ScriptedBackend(delay=30)
    with Interrupt():
        slow.run(backend=backend)
    assert wait_cancelled(backend, 1)


def test_ctrl_c_in_a_tool():
    backend = ScriptedBackend(delay=30)

    @sgl.function
    def f(s):
        s += sgl.gen("a")
        time.sleep(20)

    with Interrupt():
        f.run(backend=backend)
    assert wait_cancelled(backend, 1)


def test_ctrl_c_in_run_batch():
    for style in (False, True):
        backend = ScriptedBackend(delay=30, parallelism=4)
        with Interrupt():
            list(slow.run_batch([str(i) for i in range(50)], backend=backend, generator_style=style))
        assert wait_cancelled(backend, 4) and len(backend.jobs) == 4


@pytest.mark.parametrize(
    "wait", [lambda s: s["a"], lambda s: s.sync(), lambda s: s.text(), lambda s: list(s.text_iter("a"))]
)
@pytest.mark.parametrize("stream", [True, False])
def test_ctrl_c_while_reading(wait, stream):
    backend = ScriptedBackend(delay=30)
    state = two.run(backend=backend, stream=stream)
    with Interrupt():
        wait(state)
    assert wait_cancelled(backend, 3)
    assert isinstance(state._executor.error, KeyboardInterrupt)


def test_ctrl_c_while_streaming_asynchronously():
    backend = ScriptedBackend(delay=30)

    async def main():
        async for _ in two.run(backend=backend, stream=True).text_async_iter("a"):
            pass

    with Interrupt():
        asyncio.run(main())
    assert wait_cancelled(backend, 3)


def test_chat_state_after_an_interrupt_is_of_no_use_but_others_are():
    backend = ScriptedBackend("ok", render=chatml)
    assert sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(backend=backend)["a"] == "ok"
