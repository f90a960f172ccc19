"""The language on a scripted backend: every row and semantic line of the contract, exactly."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

import minisgl as sgl
from minisgl import batch
from minisgl.ir import DTYPE_REGEX, Gen
from tests.http_client import wait_until
from tests.scripted_backend import ScriptedBackend, chatml


def program(f):
    return sgl.function(f)


# ---- names, gen, select -----


def test_every_public_name_is_importable():
    names = (
        "function gen gen_int gen_string select image video system user assistant system_begin system_end user_begin "
        "user_end assistant_begin assistant_end separate_reasoning set_default_backend flush_cache get_server_info "
        "Runtime RuntimeEndpoint OpenAI Anthropic Gemini LiteLLM token_length_normalized greedy_token_selection "
        "unconditional_likelihood_normalized join"
    )
    for name in names.split():
        assert getattr(sgl, name) is not None


def test_gen_takes_every_argument_and_inherits_the_rest_from_run():
    backend = ScriptedBackend("abcdef")
    given = {
        "max_tokens": 7, "min_tokens": 1, "n": 1, "stop": ["x"], "stop_token_ids": [3], "stop_regex": "y+",
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.2,
        "presence_penalty": 0.3, "repetition_penalty": 1.1, "ignore_eos": True, "seed": 4, "return_logprob": True,
        "logprob_start_len": 2, "top_logprobs_num": 3, "return_text_in_logprobs": True, "regex": "a.*",
    }  # fmt: skip

    @program
    def f(s):
        s += sgl.gen("a", **given)
        s += sgl.gen("b")

    state = f.run(backend=backend, max_new_tokens=4, temperature=0.25, stop="z", seed=9, repetition_penalty=1.5)
    assert (state["a"], state["b"]) == ("abcdef", "abcd")
    own, inherited = backend.jobs
    renamed = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
    options = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
    assert own.params == {renamed.get(k, k): v for k, v in given.items() if k not in options}
    assert own.options == {k: given[k] for k in options}
    assert inherited.params == {
        "max_new_tokens": 4, "temperature": 0.25, "stop": "z", "seed": 9, "repetition_penalty": 1.5,
    }  # fmt: skip


def test_the_defaults_are_128_tokens_at_temperature_1():
    backend = ScriptedBackend("a" * 200)
    state = program(lambda s: s.__iadd__(sgl.gen("a"))).run(backend=backend)
    assert len(state["a"]) == 128 and backend.jobs[0].params == {"max_new_tokens": 128, "temperature": 1.0}


@pytest.mark.parametrize("dtype", [int, float, str, bool])
def test_dtype_constrains_by_a_regex(dtype):
    backend = ScriptedBackend("1")
    for spelling in (dtype, dtype.__name__):
        state = program(lambda s, d=spelling: s.__iadd__(sgl.gen("a", dtype=d))).run(backend=backend)
        state.sync()
        assert backend.jobs[-1].params["regex"] == DTYPE_REGEX[dtype]


def test_gen_int_and_gen_string():
    assert isinstance(sgl.gen_int("a"), Gen) and sgl.gen_int("a", max_tokens=3).dtype is int
    assert sgl.gen_string("a").dtype is str


def test_dtype_on_a_backend_without_constraints_is_parsed_out_of_the_answer():
    backend = ScriptedBackend("It is 42, I think", constrains=False)
    assert program(lambda s: s.__iadd__(sgl.gen_int("a"))).run(backend=backend)["a"] == "42"
    with pytest.raises(ValueError, match="dtype=bool"):
        program(lambda s: s.__iadd__(sgl.gen("a", dtype=bool))).run(backend=backend)["a"]


def test_constraints_are_passed_on_and_at_most_one_is_taken():
    backend = ScriptedBackend('{"a": 1}')
    for given in ({"regex": ".*"}, {"json_schema": {"type": "object"}}, {"ebnf": "root ::= 'a'"}):
        program(lambda s, given=given: s.__iadd__(sgl.gen("a", **given))).run(backend=backend).sync()
        assert given.items() <= backend.jobs[-1].params.items()
    with pytest.raises(ValueError, match="regex and json_schema"):
        sgl.gen("a", regex="a", json_schema="{}")


def test_wrong_arguments_are_value_errors_that_name_the_parameter():
    for match, call in {
        "name": lambda: sgl.gen(3),
        "dtype": lambda: sgl.gen("a", dtype=list),
        "choices": lambda: sgl.select("a", []),
        "choices must be a non-empty list": lambda: sgl.select("a", "ab"),
        "choices_method": lambda: sgl.select("a", ["b"], choices_method="greedy"),
        "temperature": lambda: sgl.select("a", ["b"], temperature=0.5),
        "model_type": lambda: sgl.separate_reasoning(sgl.gen("a"), "nothing"),
        "num_frames": lambda: sgl.video("a.mp4", 0),
        "num_api_spec_tokens": lambda: sgl.function(num_api_spec_tokens=0),
        "base_url": lambda: sgl.RuntimeEndpoint("localhost"),
        "backend must be": lambda: sgl.set_default_backend(3),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="str"):
        program(lambda s: s.__iadd__(3)).run(backend=ScriptedBackend())


def test_choices_make_a_gen_a_select():
    backend = ScriptedBackend(logprob=lambda context, token: 0.0 if token == "b" else -1.0)

    @program
    def f(s):
        s += "x" + sgl.gen("a", choices=["aa", "bb"], choices_method=sgl.greedy_token_selection)

    state = f.run(backend=backend)
    assert state["a"] == "bb" and state.text() == "xbb"
    assert backend.jobs[0].method is sgl.greedy_token_selection
    assert state.get_meta_info("a")["scores"] == [-1.0, 0.0]


def test_unnamed_gens_do_not_share_a_key():
    @program
    def f(s):
        s += sgl.gen() + "," + sgl.gen() + "," + sgl.select(choices=["c"])

    state = f.run(backend=ScriptedBackend(["a", "b"] + [""] * 3))
    assert state.text() == "a,b,c"
    assert sorted(state._executor.variables.values()) == ["a", "b", "c"]


def test_image_and_video_are_handed_to_the_backend():
    class Seeing(ScriptedBackend):
        pass

    @program
    def f(s):
        s += sgl.user(sgl.image("a.png") + "What is this? " + "Look." + sgl.video("b.mp4", 4))
        s += sgl.assistant(sgl.gen("a"))

    backend = Seeing("a cat", render=chatml)
    assert f.run(backend=backend)["a"] == "a cat"
    content = backend.jobs[0].prompt.messages[0]["content"]
    assert [type(part).__name__ for part in content] == ["Image", "str", "Video"]
    assert content[0].source == "a.png" and content[1] == "What is this? Look." and content[2].num_frames == 4


def test_separate_reasoning():
    backend = ScriptedBackend("<think>six times\nseven</think>\n42", render=chatml)

    @program
    def f(s):
        s += sgl.user("6*7")
        s += sgl.assistant(sgl.separate_reasoning("So: " + sgl.gen("a"), model_type="qwen3"))
        return s["a"]

    state = f.run(backend=backend)
    assert state.ret_value == state["a"] == "42"
    assert state["a_reasoning_content"] == "six times\nseven"
    assert state.messages()[-1] == {"role": "assistant", "content": "So: 42"}


# ---- SglFunction -----


def test_run_returns_a_state_with_the_return_value():
    @program
    def f(s, a, b=2, *, c=3):
        s += f"{a}{b}{c}"
        return a + b + c

    state = f.run(1, c=5, backend=ScriptedBackend())
    assert state.ret_value == 8 and state.text() == "125"
    assert f(1, backend=ScriptedBackend()).ret_value == 6
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        f.run(backend=ScriptedBackend())
    with pytest.raises(TypeError, match="d"):
        f.run(1, d=3, backend=ScriptedBackend())


def test_sampling_names_that_the_function_has_itself_are_its_own():
    @program
    def f(s, seed):
        s += str(seed) + sgl.gen("a")

    backend = ScriptedBackend()
    assert f.run(seed=5, backend=backend).text() == "5ok"
    assert "seed" not in backend.jobs[0].params


def test_bind():
    @program
    def f(s, a, b):
        s += a + b

    assert f.bind(a="x").bind(b="y").run(backend=ScriptedBackend()).text() == "xy"
    assert f.bind(b="y").run("x", backend=ScriptedBackend()).text() == "xy"


def test_default_backend():
    f = program(lambda s: s.__iadd__(sgl.gen("a")))
    with pytest.raises(ValueError, match="no backend"):
        f.run()
    backend = ScriptedBackend()
    sgl.set_default_backend(backend)
    try:
        assert f.run()["a"] == "ok"
        assert sgl.flush_cache() == "flushed" and sgl.get_server_info() == {"model_path": "scripted"}
    finally:
        sgl.set_default_backend(None)
    assert sgl.flush_cache(backend) == "flushed"


def test_use_thread_false_waits_for_each_generation():
    backend = ScriptedBackend(delay=0.02)

    @program
    def f(s):
        s += sgl.gen("a")
        assert "a" in s._executor.variables
        s += sgl.gen("b")

    f.run(backend=backend, use_thread=False)
    assert backend.peak == 1


def test_run_batch_keeps_the_order_of_dicts_tuples_and_single_arguments():
    backend = ScriptedBackend(lambda prompt: prompt.text[-1])

    @program
    def f(s, x, y="!"):
        s += x + y + sgl.gen("a")
        return x

    for items in ([{"x": str(i)} for i in range(20)], [(str(i),) for i in range(20)], [str(i) for i in range(20)]):
        states = f.run_batch(items, backend=backend, num_threads=4)
        assert [state.ret_value for state in states] == [str(i) for i in range(20)]
        assert {state["a"] for state in states} == {"!"}
    assert f.run_batch([], backend=backend) == []
    assert [state.ret_value for state in f.run_batch("ab", backend=backend, progress_bar=True)] == ["a", "b"]
    with pytest.raises(ValueError, match="num_threads"):
        f.run_batch(["a"], backend=backend, num_threads=0)
    with pytest.raises(TypeError, match="missing"):
        f.run_batch([{}], backend=backend)


def test_run_batch_generator_style_yields_in_order_before_all_are_done():
    release = threading.Event()

    def reply(prompt):
        if prompt.text == "3":
            release.wait(5)
        return "ok"

    f = program(lambda s, x: s.__iadd__(x + sgl.gen("a")))
    iterator = f.run_batch(list("0123"), backend=ScriptedBackend(reply), generator_style=True)
    assert [next(iterator).text() for _ in range(3)] == ["0ok", "1ok", "2ok"]
    release.set()
    assert [state.text() for state in iterator] == ["3ok"]


def test_a_thousand_programs_do_not_mean_a_thousand_threads():
    backend = ScriptedBackend(inline=True)
    seen = set()

    @program
    def f(s, x):
        seen.add(threading.get_ident())
        s += x + sgl.gen("a")
        return s["a"]

    before = threading.active_count()
    states = f.run_batch([str(i) for i in range(1000)], backend=backend)
    seen.discard(threading.get_ident())  # the prefix was looked for here
    assert len(states) == 1000 and len(seen) <= backend.parallelism
    assert threading.active_count() <= before + backend.parallelism


def test_run_batch_auto_threads_follow_what_the_backend_runs_at_once():
    backend = ScriptedBackend(delay=0.02, parallelism=5)

    @program
    def f(s, x):
        s += x + sgl.gen("a")
        return s["a"]

    f.run_batch([str(i) for i in range(20)], backend=backend)
    assert backend.peak == 5


def _threads_of(body, count, **options):
    """The threads that ran the bodies of a batch."""
    seen: set[int] = set()

    @sgl.function
    def f(s, i):
        seen.add(threading.get_ident())
        body(s)

    backend = ScriptedBackend(delay=0.01, parallelism=64)
    f.run_batch([{"i": i} for i in range(count)], backend=backend, **options)
    seen.discard(threading.get_ident())  # the prefix was looked for here
    return len(seen)


def test_run_batch_adds_threads_only_where_bodies_wait(monkeypatch):
    def queues(s):
        s += "a" + sgl.gen("x")

    def reads(s):
        queues(s)
        assert s["x"]

    def calls_a_tool(s):
        time.sleep(0.01)
        queues(s)

    with monkeypatch.context() as patch:
        patch.setattr(batch, "TICK", 5.0)  # a machine too busy to begin 20 of them in 20 ms would be given more threads
        assert _threads_of(queues, 300) == 1
    assert _threads_of(reads, 64) >= 16
    assert _threads_of(calls_a_tool, 64) >= 4
    assert _threads_of(reads, 20, num_threads=3) == 3


def test_run_batch_bodies_that_do_not_wait_need_no_thread_while_they_generate():
    backend = ScriptedBackend(delay=1.0)
    f = program(lambda s, x: s.__iadd__(x + sgl.gen("a")))
    f.run_batch([str(i) for i in range(40)], backend=backend, num_threads=1)
    assert backend.peak >= 20  # 40, but for a machine too busy to begin them in a second


def test_prefix_precompute():
    backend = ScriptedBackend(render=chatml)

    @program
    def f(s, shots, question):
        s += sgl.system("Be brief.")
        s += sgl.user(shots + "Q: " + question)
        s += sgl.assistant(sgl.gen("a"))

    f.run_batch([{"shots": "1+1=2\n", "question": q} for q in "ab"], backend=backend)
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert [p.text for p in backend.prefills] == [head + "1+1=2\nQ: "] and backend.prefills[0].templated
    assert backend.log[0].startswith("prefill")
    f.run_batch([{"shots": "1+1=2\n", "question": "c"}], backend=backend)
    assert len(backend.prefills) == 1  # one program: nothing to share
    assert f.cache(backend) == head and backend.prefills[-1].text == head
    assert f.bind(shots="x").cache(backend) == head + "xQ: "


def test_prefix_precompute_runs_the_body_only_up_to_what_is_not_constant():
    calls = []

    @program
    def f(s, x):
        s += "constant "
        s += x
        calls.append(x)

    assert f.cache(ScriptedBackend()) == "constant " and not calls


# ---- ProgramState -----


def test_gen_does_not_block_and_reading_does():
    release = threading.Event()
    backend = ScriptedBackend(lambda prompt: "ok" if release.wait(5) else "late")

    @program
    def f(s):
        s += "x" + sgl.gen("a") + "y"
        assert "a" in s and "b" not in s
        s["b"] = "set"
        assert s["b"] == "set" and "b" in s
        threading.Timer(0.05, release.set).start()
        return s["a"]

    state = f.run(backend=backend)
    assert state.ret_value == "ok" and state.text() == "xoky" and state.error() is None
    assert state.get_var("a") == "ok"
    state.set_var("c", [1])
    assert state["c"] == [1]


def test_lists_of_expressions_and_messages():
    @program
    def f(s):
        s += ["a", sgl.user("b"), [sgl.assistant(sgl.gen("c"))]]

    state = f.run(backend=ScriptedBackend(render=chatml))
    assert state.messages() == [{"role": "user", "content": "b"}, {"role": "assistant", "content": "ok"}]
    assert state.text().startswith("a<|im_start|>user\nb<|im_end|>")


def test_meta_info():
    state = program(lambda s: s.__iadd__("abc" + sgl.gen("a", stop="k"))).run(backend=ScriptedBackend())
    assert state.get_meta_info("a") == {
        "prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0,
        "finish_reason": {"type": "stop", "matched": "k"},
    }  # fmt: skip
    state["b"] = 1
    with pytest.raises(KeyError, match="not generated"):
        state.get_meta_info("b")


def test_repr_shows_what_is_there_and_does_not_wait():
    release = threading.Event()
    backend = ScriptedBackend(lambda prompt: "ok" if release.wait(5) else "")
    state = program(lambda s: s.__iadd__("hello" + sgl.gen("a"))).run(backend=backend)
    assert "running" in repr(state) and "hello" in repr(state)
    release.set()
    state.sync()
    assert "done" in repr(state) and "['a']" in repr(state)
    assert "x" * 300 not in repr(program(lambda s: s.__iadd__("x" * 300)).run(backend=backend))


def test_role_scopes_and_begin_end():
    backend = ScriptedBackend(render=chatml)

    @program
    def scoped(s):
        with s.system():
            s += "S"
        with s.user():
            s += "U"
        with s.assistant():
            s += sgl.gen("a")

    @program
    def marked(s):
        s += sgl.system_begin() + "S" + sgl.system_end()
        s += sgl.user_begin() + "U" + sgl.user_end()
        s += sgl.assistant_begin() + sgl.gen("a") + sgl.assistant_end()

    @program
    def methods(s):
        s.system("S")
        s.user("U")
        s.assistant(sgl.gen("a"))

    texts = {f.run(backend=backend).text() for f in (scoped, marked, methods)}
    assert len(texts) == 1
    with pytest.raises(ValueError, match="has not ended"):
        program(lambda s: s.__iadd__(sgl.user_begin() + sgl.user("a"))).run(backend=backend).sync()
    with pytest.raises(ValueError, match="ends, but"):
        program(lambda s: s.__iadd__(sgl.user_end())).run(backend=backend).sync()


def test_var_scope_and_copy():
    @program
    def f(s):
        s += "a"
        with s.var_scope("v"):
            s += "b" + sgl.gen("x") + "c"
        with s.copy() as c:
            c += "only in the copy" + sgl.gen("y")
            assert c["v"] == "bokc" and c.text() == "abokconly in the copyok"
        s += "d"

    state = f.run(backend=ScriptedBackend())
    assert state["v"] == "bokc" and state.text() == "abokcd" and "y" not in state


# ---- forks -----


def test_fork_group_and_both_joins():
    backend = ScriptedBackend(lambda prompt: prompt.text[-1].upper())

    @program
    def f(s, mode):
        s += "p"
        s["mine"] = 1
        group = s.fork(3)
        assert len(group) == 3 and next(iter(group)) is group[0]
        group += "q"
        group += ["a", "b", "c"]
        group += lambda i: str(i)
        group += sgl.gen("v")
        group[1] += "x" + sgl.gen("w")
        group.join(mode)
        return s

    gathered = f.run("gather_variable", backend=backend)
    assert gathered["v"] == ["0", "1", "2"] and gathered["w"] == [None, "X", None] and gathered["mine"] == 1
    assert gathered.text() == "p"
    assert f.run("concate_and_append", backend=backend).text() == "pqa00qb11xXqc22"
    with pytest.raises(ValueError, match="mode"):
        f.run("other", backend=backend)
    with pytest.raises(ValueError, match="size"):
        program(lambda s: s.fork(0)).run(backend=backend)
    with pytest.raises(ValueError, match="2 expressions"):
        program(lambda s: s.fork(3).__iadd__(["a", "b"])).run(backend=backend)


def test_join_function_as_in_the_papers_listing():
    @program
    def f(s):
        s += "["
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += f"{i}:" + sgl.gen("x")
        s += sgl.join(forks) + "]" + sgl.gen("y")

    assert f.run(backend=ScriptedBackend()).text() == "[0:ok1:ok]ok"


def test_concatenating_chat_forks_keeps_the_messages():
    @program
    def f(s):
        s += sgl.user("go")
        group = s.fork(2)
        group += lambda i: sgl.assistant(f"{i}" + sgl.gen("x"))
        group.join("concate_and_append")

    state = f.run(backend=ScriptedBackend(render=chatml))
    assert [m["content"] for m in state.messages()] == ["go", "0ok", "1ok"]
    assert state.text() == chatml(state.messages(), False)


def test_forks_run_in_parallel_and_nest_and_need_no_join():
    backend = ScriptedBackend(delay=1.0)

    @program
    def f(s):
        for child in s.fork(3):
            for grandchild in child.fork(3):
                grandchild += sgl.gen("x")
        return [1]

    f.run(backend=backend)
    gc.collect()
    wait_until(lambda: len(backend.jobs) == 9 and backend.running == 0)
    assert len(backend.jobs) == 9 and backend.peak == 9 and backend.running == 0


def test_nested_joins():
    @program
    def f(s):
        outer = s.fork(2)
        for i, child in enumerate(outer):
            inner = child.fork(2)
            inner += lambda j, i=i: f"{i}{j}" + sgl.gen("x")
            inner.join()
        outer.join()
        return s["x"]

    assert f.run(backend=ScriptedBackend()).ret_value == [["ok", "ok"], ["ok", "ok"]]


def test_the_fork_hint_comes_after_the_parents_text_and_before_the_children():
    backend = ScriptedBackend("r" * 80)

    @program
    def f(s):
        s += "p" * 70 + sgl.gen("a", max_tokens=80)
        s += "q" * 70
        group = s.fork(2)
        group += lambda i: f"{i}" + sgl.gen("b")
        group.join()

    f.run(backend=backend)
    parent = "p" * 70 + "r" * 80 + "q" * 70
    assert backend.log[0] == "job " + "p" * 70
    assert backend.log[1] == "prefill " + parent
    assert sorted(backend.log[2:]) == [f"job {parent}0", f"job {parent}1"]


def test_a_fork_waits_for_nothing_and_children_see_the_parents_pending_variables():
    release = threading.Event()
    backend = ScriptedBackend(lambda prompt: "A" if release.wait(5) else "")

    @program
    def f(s):
        s += sgl.gen("a")
        group = s.fork(2)
        group += sgl.gen("b")
        release.set()
        assert group[0]["a"] == "A" and group[1]["b"] == "A"

    assert f.run(backend=backend).text() == "A"


# ---- n > 1, streaming -----


def test_gen_n_greater_one():
    """case gen-n-greater-one: a list of strings, and the text goes on with the first."""

    @program
    def f(s):
        s += "x" + sgl.gen("a", n=3, max_tokens=4) + "y" + sgl.gen("b", n=1)

    backend = ScriptedBackend([["a", "b", "c"], "z"])
    state = f.run(backend=backend, n=2)
    assert state["a"] == ["a", "b", "c"] and state.text() == "xayz"
    assert len(state.get_meta_info("a")) == 3


def test_text_iter():
    @program
    def f(s):
        s += "ab" + sgl.gen("x") + "cd" + sgl.gen("y")
        return s["x"]

    backend = ScriptedBackend(["12345", "67"] * 9)
    assert list(f.run(backend=backend, stream=True).text_iter()) == ["ab", *"12345", "cd", *"67"]
    state = f.run(backend=backend, stream=True)
    assert list(state.text_iter("x")) == list("12345")
    assert list(state.text_iter("y")) == list("67")
    assert "".join(state.text_iter("x")) == "12345" and state.ret_value == "12345"
    assert list(state.text_iter("nothing")) == []
    plain = f.run(backend=backend)
    assert list(plain.text_iter("y")) == ["67"] and "".join(plain.text_iter()) == "ab12345cd67"


def test_streaming_state_can_be_read_from_outside_before_its_program_has_got_there():
    @program
    def f(s):
        time.sleep(0.05)
        s += sgl.gen("x")

    state = f.run(backend=ScriptedBackend(), stream=True)
    assert state["x"] == "ok" and state.text() == "ok"
    with pytest.raises(KeyError, match="no variable 'z'"):
        state["z"]


def test_text_async_iter():
    @program
    def f(s):
        s += "ab" + sgl.gen("x") + sgl.select("c", choices=["C"])

    async def main():
        backend = ScriptedBackend("12345")
        whole = [text async for text in f.run(backend=backend, stream=True).text_async_iter()]
        pairs = [p async for p in f.run(backend=backend, stream=True).text_async_iter("x", return_meta_data=True)]
        one = [text async for text in f.run(backend=backend, stream=True).text_async_iter("c")]
        return whole, pairs, one

    whole, pairs, one = asyncio.run(main())
    assert whole == ["ab", *"12345", "C"] and one == ["C"]
    assert [text for text, _ in pairs] == list("12345") and pairs[0][1]["completion_tokens"] == 1


def test_text_iter_stuck_on_choices():
    """case text-iter-stuck-on-choices: a streamed select, then a branch on it, then a streamed gen."""

    @program
    def f(s):
        s += "I like " + sgl.gen("type", choices=["apple", "orange"])
        if s["type"] == "apple":
            s += " because " + sgl.gen("value", stop=".")
        else:
            s += " since " + sgl.gen("value", stop=".")

    backend = ScriptedBackend("it is red. More")
    state = f.run(backend=backend, stream=True)
    assert list(state.text_iter("type")) == ["apple"]
    assert "".join(state.text_iter("value")) == "it is red"
    assert state.text() == "I like apple because it is red"


# ---- known defects of the original -----


def test_repetition_penalty_is_not_ignored():
    backend = ScriptedBackend()
    program(lambda s: s.__iadd__(sgl.gen("a", repetition_penalty=1.3))).run(backend=backend).sync()
    assert backend.jobs[0].params["repetition_penalty"] == 1.3


def test_reading_a_variable_that_is_not_coming_is_a_key_error_at_once():
    @program
    def f(s):
        s += sgl.gen("a")
        return s["b"]

    with pytest.raises(KeyError, match=r"no variable 'b' \(it has: "):
        f.run(backend=ScriptedBackend())


def test_a_name_that_is_generated_again_is_read_after_its_last_generation():
    @program
    def f(s):
        values = []
        for _ in range(3):
            s += sgl.gen("a")
            values.append(s["a"])
        return values

    assert f.run(backend=ScriptedBackend(["1", "2", "3"])).ret_value == ["1", "2", "3"]


def test_thousands_of_appends_do_not_recurse():
    @program
    def f(s):
        for _ in range(3000):
            s += sgl.gen()

    assert f.run(backend=ScriptedBackend("x", inline=True)).text() == "x" * 3000
