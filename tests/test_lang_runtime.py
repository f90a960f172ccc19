"""The language on the in-process engine: the default model, and a tiny one where text does not matter."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import signal
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import minisgl as sgl
from minisgl.lang import as_backend
from tests import tiny_models

OPTIONS = {"device": "cpu", "dtype": "float32", "overlap": False}


@pytest.fixture(scope="module")
def runtime(default_model_folder):
    with sgl.Runtime(
        default_model_folder, kv_capacity=6000, max_running_requests=16, events=True, **OPTIONS
    ) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return tiny_models.make("llama2", tmp_path_factory.mktemp("tiny") / "m")


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    with sgl.Runtime(tiny_folder, kv_capacity=4000, max_running_requests=8, **OPTIONS) as runtime:
        yield runtime


def idle(runtime, seconds=1.0):
    """Whether the engine runs nothing and holds nothing locked, soon."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        stats = runtime.stats()
        if not (stats["running"] or stats["waiting"] or stats["kv_locked"] or stats["kv_held"]):
            return True
        time.sleep(0.01)
    return False


def test_what_nobody_holds_is_freed_without_a_collection(tiny):
    """Requests and programs leave no cycles: a thousand of them would be a collection's work, in somebody's time."""

    @sgl.function
    def f(s):
        s += "one two " + sgl.gen("x", max_tokens=4)
        with s.copy() as c:
            c += sgl.gen("y", max_tokens=2, n=2)
            s["z"] = c["y"]
        s += sgl.select("w", ["a", "b"])

    gc.collect()
    gc.disable()
    try:
        states = f.run_batch([{}] * 3, backend=tiny)
        assert all(state["w"] in "ab" for state in states)
        scored = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        sinks, _ = tiny.prepare("x y z", {"max_new_tokens": 3}, **scored)
        tiny.engine.submit([sink.request for sink in sinks])
        assert sinks[0].result()["output_ids"]
        tiny.generate("another step, so that the engine lets go of its last one", {"max_new_tokens": 2})
        held = [weakref.ref(state._executor) for state in states]
        held += [weakref.ref(sink) for sink in sinks] + [weakref.ref(sink.request) for sink in sinks]
        del states, sinks
        end = time.perf_counter() + 5
        while any(ref() is not None for ref in held) and time.perf_counter() < end:
            time.sleep(0.01)
        assert not any(ref() is not None for ref in held)
    finally:
        gc.enable()


# ---- prefixes -----


@sgl.function
def chat(s, questions, max_tokens=8):
    s += sgl.system("You are terse.")
    for i, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"a{i}", max_tokens=max_tokens))


QUESTIONS = ["Hi!", "Name a color.", "Another?", "What is 2+2?", "Name a city.", "Why?", "  spaces ", "Thanks!"]


def test_multi_turn_chat_hits_everything_but_the_new_turn(runtime):
    runtime.flush_cache()
    state = chat.run(QUESTIONS, backend=runtime, temperature=0)
    tokenizer = runtime.tokenizer
    assert state.text() == tokenizer.apply_chat_template(state.messages(), False)
    metas = [state.get_meta_info(f"a{i}") for i in range(8)]
    first = tokenizer.chat_ids(state.messages()[:2])
    assert metas[0]["prompt_tokens"] == len(first)  # and so no second BOS
    for before, meta in itertools.pairwise(metas):
        assert meta["cached_tokens"] >= before["prompt_tokens"] + before["completion_tokens"] - 1


def test_stop_strings_do_not_lose_the_finished_turns(runtime):
    runtime.flush_cache()

    @sgl.function
    def f(s):
        for i in range(4):
            s += sgl.user(f"Count to five, {i}")
            s += sgl.assistant(sgl.gen(f"a{i}", max_tokens=12, stop=[" ", ","]))

    state = f.run(backend=runtime, temperature=0)
    assert state.text() == runtime.tokenizer.apply_chat_template(state.messages(), False)
    for i in range(1, 4):
        assert state.get_meta_info(f"a{i}")["cached_tokens"] >= state.get_meta_info(f"a{i - 1}")["prompt_tokens"] - 4


def test_fork_8_computes_a_600_token_prefix_once(runtime):
    runtime.flush_cache()
    prefix = "".join(f"{i} words; " for i in range(150))
    length = len(runtime.tokenizer.encode(prefix))
    assert length >= 600

    @sgl.function
    def f(s):
        s += prefix
        group = s.fork(8)
        group += lambda i: f"Number {i}:" + sgl.gen("x", max_tokens=2)
        group.join()
        return [child.get_meta_info("x") for child in group]

    begin = runtime.events.next_seq
    metas = f.run(backend=runtime, temperature=0).ret_value
    assert all(meta["cached_tokens"] >= length - 1 for meta in metas)
    computed = 0
    for event in runtime.events.since(begin):
        if event.kind == "batch":
            computed += sum(end - start for _, start, end in event.fields["extends"])
    own = sum(meta["prompt_tokens"] for meta in metas) - 8 * length
    assert computed <= length + own + 8  # each child may compute one token of the prefix again


def test_a_select_is_one_batch_and_computes_the_prompt_once(runtime):
    runtime.flush_cache()
    prompt = "The capital city of France, where the Eiffel tower stands, is"
    n = len(runtime.tokenizer.encode(prompt))

    @sgl.function
    def f(s):
        s += prompt + sgl.select("c", choices=[" Paris", " London", " Rome", " New York"])
        s += "." + sgl.gen("more", max_tokens=2)

    begin = runtime.events.next_seq
    state = f.run(backend=runtime, temperature=0)
    assert state["c"] == " Paris"
    state.sync()
    batches = [event.fields["extends"] for event in runtime.events.since(begin) if event.kind == "batch"]
    spans = batches[0]
    assert len(spans) == 5 and spans[0][1:] == (0, n)  # the shared prefix, then the four choices
    assert all(start == n - 1 for _, start, _ in spans[1:])
    meta = state.get_meta_info("c")
    assert meta["choices"][int(np.argmax(meta["scores"]))] == " Paris"
    assert state.get_meta_info("more")["cached_tokens"] >= n


def test_select_logprob_slice(runtime):
    """case select-logprob-slice: exactly the choice's tokens, the same with a warm and a cold cache."""
    tokenizer = runtime.tokenizer

    @sgl.function
    def f(s, prompt):
        s += prompt + sgl.select("c", choices=[" YES", " NO"])

    for prompt in ("The answer to question 12", "is file_name", "x = 2 ", "my_var_name2"):
        runtime.flush_cache()
        cold = f.run(prompt, backend=runtime).get_meta_info("c")["input_token_logprobs"]
        warm = f.run(prompt, backend=runtime).get_meta_info("c")["input_token_logprobs"]
        for row, again, choice in zip(cold, warm, (" YES", " NO")):
            assert [token for _, token, _ in row] == [token for _, token, _ in again]
            np.testing.assert_allclose([v for v, *_ in row], [v for v, *_ in again], atol=2e-4)
            alone, joint = tokenizer.encode(prompt).tolist(), tokenizer.encode(prompt + choice).tolist()
            at = next((i for i, (a, b) in enumerate(zip(alone, joint)) if a != b), len(alone))
            assert [token for _, token, _ in row] == joint[at:]


def reference_scores(model, tokenizer, prompt, choices):
    """The formulas' l_ij with transformers' log-probabilities in fp32."""
    import torch

    alone = tokenizer.encode(prompt).tolist()
    joint = [tokenizer.encode(prompt + choice).tolist() for choice in choices]
    width = max(map(len, joint))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in joint])  # what follows changes nothing
    with torch.no_grad():
        scores = model(padded).logits.float().log_softmax(-1)
    rows = []
    for k, ids in enumerate(joint):
        at = next((i for i, (a, b) in enumerate(zip(alone, ids)) if a != b), min(len(alone), len(ids)))
        rows.append([float(scores[k, i - 1, ids[i]]) for i in range(at, len(ids))])
    return rows


def test_select_equals_the_formula_with_transformers_logprobs(runtime, default_model_folder):
    transformers = pytest.importorskip("transformers")
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_folder, dtype=torch.float32).eval()
    subjects = ["the sky", "a cat", "my file_name", "the number 12", "this code"]
    stems = [
        "{} is",
        "I think {} is ",
        "Q: What is {}?\nA:",
        "{}>>",
        "{} was once",
        "{}_",
        "{} ",
        "x={}",
        "({}",
        "{}:\n",
    ]
    choices = [" blue", "> good", "all", " an animal"]
    prompts = [stem.format(subject) for stem in stems for subject in subjects]
    methods = [sgl.token_length_normalized, sgl.greedy_token_selection]

    @sgl.function
    def f(s, prompt, method):
        s += prompt + sgl.select("c", choices=choices, choices_method=method)

    states = f.run_batch([(p, methods[i % 2]) for i, p in enumerate(prompts)], backend=runtime)
    merged = 0
    assert len(states) == 50
    for i, (prompt, state) in enumerate(zip(prompts, states)):
        rows = reference_scores(model, runtime.tokenizer, prompt, choices)
        found = state.get_meta_info("c")["input_token_logprobs"]
        for row, theirs in zip(rows, found):
            np.testing.assert_allclose([v for v, *_ in theirs], row, atol=2e-3)
        assert state["c"] == choices[methods[i % 2](rows).index]
        n = len(runtime.tokenizer.encode(prompt))
        merged += any(len(runtime.tokenizer.encode(prompt + c)) - len(row) < n for c, row in zip(choices, rows))
    assert merged >= 5  # prompts whose last token merges with a choice


def test_a_select_at_the_very_beginning_is_scored_behind_bos(tiny):
    f = sgl.function(lambda s: s.__iadd__(sgl.select("c", choices=["ab", "c"]) + sgl.gen("a", max_tokens=2)))
    state = f.run(backend=tiny, ignore_eos=True)
    assert [len(row) for row in state.get_meta_info("c")["input_token_logprobs"]] == [2, 1]
    assert state.text() == state["c"] + state["a"]


def test_unconditional_select(runtime):
    @sgl.function
    def f(s):
        s += "The opposite of hot is" + sgl.select(
            "c", choices=[" cold", " the"], choices_method=sgl.unconditional_likelihood_normalized
        )

    assert f.run(backend=runtime)["c"] == " cold"


# ---- the programs of the documentation -----


@sgl.function
def essay_judge(s, essay):
    s += sgl.system("You judge essays.")
    s += sgl.user("Here is an essay: " + essay)
    s += sgl.assistant("I have read it.")
    forks = s.fork(2)
    for fork, dimension in zip(forks, ("clarity", "evidence")):
        fork += sgl.user(f"Judge its {dimension} in one sentence.")
        fork += sgl.assistant("Judgment:" + sgl.gen("judgment", max_tokens=12, stop="."))
    judgment = "\n".join(fork["judgment"] for fork in forks)
    s += sgl.user("Sum these judgments up:\n" + judgment)
    s += sgl.assistant("In short," + sgl.gen("summary", max_tokens=12, stop=".") + ".")
    s += sgl.user("Give it a letter grade.")
    s += sgl.assistant("The grade is" + sgl.select("grade", choices=[" A", " B", " C"]))
    return s["grade"]


@sgl.function
def tree_of_thought(s, question):
    s += sgl.user(question)
    s += sgl.assistant_begin() + "Two ideas. "
    group = s.fork(2)
    for i, child in enumerate(group):
        child += f"Idea {i + 1}:" + sgl.gen("idea", max_tokens=8, stop=".")
        leaves = child.fork(2)
        leaves += lambda j: f" Step {j + 1}:" + sgl.gen("step", max_tokens=6)
        leaves.join()
        child += " ".join(child["step"])
    s += sgl.join(group)
    s += " So the answer is" + sgl.gen("answer", max_tokens=6) + sgl.assistant_end()


@pytest.mark.parametrize("program, argument", [(essay_judge, "Cats are good."), (tree_of_thought, "How to rest?")])
def test_compiled_equals_interpreted_on_the_default_model(runtime, program, argument, tmp_path):
    interpreted = program.run(argument, backend=runtime, temperature=0)
    compiled = program.compile(runtime)
    assert compiled.run(argument, temperature=0).text() == interpreted.text()
    compiled.draw(tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")


@sgl.function
def react_agent(s, question, tools, max_steps=2):
    s += "Question: What is 2+3?\nAction: add(2, 3)\nObservation: 5\nAnswer: 5\n\n"
    s += "Question: " + question + "\n"
    for i in range(max_steps):
        s += sgl.gen(f"kind{i}", choices=["Action:", "Answer:"])
        if s[f"kind{i}"] == "Answer:":
            break
        s += sgl.gen(f"call{i}", stop="\n", max_tokens=16) + "\n"
        s += f"Observation: {tools(s[f'call{i}'])}\n"
    else:
        s += "Answer:"
    s += sgl.gen("answer", stop="\n", max_tokens=8)
    return s["answer"]


def test_react_agent(runtime):
    calls = []

    def add(call):
        calls.append(call.strip())
        return sum(int(x) for x in call.strip().removeprefix("add(").removesuffix(")").split(","))

    state = react_agent.run("What is 4+3?", add, backend=runtime, temperature=0)
    assert state["kind0"] == "Action:" and calls and state.ret_value.strip().startswith("7")


@sgl.function
def extract(s, text):
    s += "Text: Bob is 31.\n" + '{"name": "Bob", "age": 31}\n'
    s += "Text: " + text + "\n"
    s += '{"name": "' + sgl.gen("name", stop='"', max_tokens=8) + '", "age": '
    s += sgl.gen("age", stop="}", max_tokens=4) + "}"
    return json.loads(s.text().splitlines()[-1])


def test_json_extraction(runtime):
    states = extract.run_batch(["Ann is 25.", "Mary is 40."], backend=runtime, temperature=0)
    assert [state.ret_value for state in states] == [{"name": "Ann", "age": 25}, {"name": "Mary", "age": 40}]


# ---- generation -----


def test_n_outputs_streams_and_meta(tiny):
    @sgl.function
    def f(s, n):
        s += "abc" + sgl.gen("a", n=n, max_tokens=5, seed=1) + sgl.gen("b", max_tokens=3, return_logprob=True)

    state = f.run(3, backend=tiny, ignore_eos=True)
    assert len(state["a"]) == 3 and len(set(state["a"])) > 1 and state.text().startswith("abc" + state["a"][0])
    assert [m["completion_tokens"] for m in state.get_meta_info("a")] == [5, 5, 5]
    assert len(state.get_meta_info("b")["output_token_logprobs"]) == 3
    streamed = f.run(1, backend=tiny, ignore_eos=True, stream=True)
    assert "".join(streamed.text_iter("a")) == streamed["a"]
    assert "".join(streamed.text_iter()) == streamed.text()

    async def main():
        state = f.run(1, backend=tiny, ignore_eos=True, stream=True)
        return [pair async for pair in state.text_async_iter("a", return_meta_data=True)], state["a"]

    pairs, whole = asyncio.run(main())
    assert "".join(text for text, _ in pairs) == whole and pairs[-1][1]["completion_tokens"] == 5


def test_token_ids_go_on_from_the_sampled_ones(tiny):
    @sgl.function
    def f(s):
        s += "abc" + sgl.gen("a", max_tokens=4) + sgl.gen("b", max_tokens=4) + "<|user|>x" + sgl.gen("c", max_tokens=1)

    state = f.run(backend=tiny, temperature=0, ignore_eos=True)
    assert state.get_meta_info("b")["prompt_tokens"] == 7  # whatever its bytes, the output stays 4 tokens
    assert state.get_meta_info("c")["prompt_tokens"] == 13


def test_precompute_and_server_info(tiny):
    tiny.flush_cache()
    f = sgl.function(lambda s, x: s.__iadd__("A constant beginning. " + x + sgl.gen("a", max_tokens=1)))
    assert f.cache(tiny) == "A constant beginning. "
    assert f.run("x", backend=tiny).get_meta_info("a")["cached_tokens"] == 22
    sgl.flush_cache(tiny)
    states = f.run_batch(["x", "y", "z"], backend=tiny)
    assert [s.get_meta_info("a")["cached_tokens"] for s in states] == [22, 22, 22]
    info = sgl.get_server_info(tiny)
    assert info["max_running_requests"] == 8 and info["requests"] > 0 and "Runtime" in repr(as_backend(tiny))


# ---- errors: they surface at once and the engine has nothing locked -----


class Broken(Exception):
    pass


def test_wrong_parameters_name_themselves_and_nothing_is_queued(tiny):
    for match, params in {
        "temperature": {"temperature": -1}, "max_new_tokens": {"max_tokens": -1}, "n must": {"n": 0},
        "top_k": {"top_k": 0}, "stop": {"stop": 3},
    }.items():  # fmt: skip
        state = sgl.function(lambda s, p=params: s.__iadd__("x" + sgl.gen("a", **p))).run(backend=tiny)
        with pytest.raises(ValueError, match=match):
            state["a"]
    with pytest.raises(ValueError, match="no vision"):
        sgl.function(lambda s: s.__iadd__(sgl.user(sgl.image("a.png")))).run(backend=tiny).sync()
    long = sgl.function(lambda s: s.__iadd__("x" * 5000 + sgl.gen("a"))).run(backend=tiny)
    with pytest.raises(ValueError, match="5000 tokens"):
        long["a"]
    assert idle(tiny)


@pytest.mark.parametrize("place", ["before", "in the middle", "in a fork", "in a tool"])
def test_a_failing_program_leaves_nothing_running(tiny, place):
    @sgl.function
    def f(s):
        if place == "before":
            raise Broken
        s += "abc" + sgl.gen("a", max_tokens=300)
        if place == "in a fork":
            for child in s.fork(3):
                child += sgl.gen("b", max_tokens=300)
        if place == "in a tool":
            s += "x" + sgl.gen("c", max_tokens=300)
            time.sleep(0.02)
        raise Broken

    begin = time.perf_counter()
    with pytest.raises(Broken):
        f.run(backend=tiny, ignore_eos=True)
    with pytest.raises(Broken):
        f.run_batch([{}] * 3, backend=tiny, ignore_eos=True)
    assert time.perf_counter() - begin < 1.5 and idle(tiny)
    tiny._engine.call(tiny.scheduler.check)


def test_ctrl_c_aborts_the_requests(tiny):
    @sgl.function
    def f(s):
        s += "abc" + sgl.gen("a", max_tokens=400)
        for child in s.fork(2):
            child += sgl.gen("b", max_tokens=100)
        return s["a"]

    def interrupted(call):
        timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
        timer.start()
        begin = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            call()
            time.sleep(5)
        assert time.perf_counter() - begin < 1.1 and idle(tiny)

    interrupted(lambda: f.run(backend=tiny, ignore_eos=True))
    interrupted(lambda: f.run_batch([{}] * 20, backend=tiny, ignore_eos=True))
    interrupted(lambda: list(f.run(backend=tiny, ignore_eos=True, stream=True).text_iter("a")))


def test_shutdown_while_programs_run_reaches_them_and_a_new_runtime_works(tiny_folder):
    f = sgl.function(lambda s: s.__iadd__("abc" + sgl.gen("a", max_tokens=400)))
    for _ in range(2):
        with sgl.Runtime(tiny_folder, kv_capacity=1000, **OPTIONS) as runtime:
            sgl.set_default_backend(runtime)
            assert f.run(max_new_tokens=1).text()
            state = f.run(ignore_eos=True)
            time.sleep(0.02)
        with pytest.raises(RuntimeError, match="shut down"):
            state["a"]
        with pytest.raises(RuntimeError, match="shut down"):
            f.run().sync()
        sgl.set_default_backend(None)


def test_the_language_keeps_no_runtime_alive(tiny_folder):
    runtime = sgl.Runtime(tiny_folder, kv_capacity=1000, **OPTIONS)
    sgl.function(lambda s: s.__iadd__("abc" + sgl.gen("a", max_tokens=2))).run(backend=runtime).sync()
    gone = weakref.ref(runtime)
    del runtime
    for _ in range(100):
        gc.collect()
        if gone() is None:
            return
        time.sleep(0.02)
    raise AssertionError("still referenced")


# ---- notebooks -----


def test_nest_asyncio_uvloop(tiny_folder):
    """case nest-asyncio-uvloop: inside a running loop, whatever kind it is, and nothing global is changed."""
    f = sgl.function(lambda s: s.__iadd__("abc" + sgl.gen("a", max_tokens=2)))

    async def cell():
        policy, loop = asyncio.get_event_loop_policy(), asyncio.get_running_loop()
        with sgl.Runtime(tiny_folder, kv_capacity=1000, **OPTIONS) as runtime:
            state = f.run(backend=runtime, stream=True, ignore_eos=True)
            blocking = state.text()
            pieces = [text async for text in state.text_async_iter()]
        assert asyncio.get_event_loop_policy() is policy and asyncio.get_running_loop() is loop
        assert "".join(pieces) == blocking and not hasattr(asyncio, "_nest_patched")

    asyncio.run(cell())
    try:
        import uvloop
    except ImportError:
        return
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(cell())
    finally:
        loop.close()


def test_github_invalid_notebook():
    """case github-invalid-notebook: what GitHub needs to show a notebook."""
    root = Path(__file__).parent.parent
    for path in root.rglob("*.ipynb"):
        if ".ipynb_checkpoints" in path.parts:
            continue
        widgets = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("widgets")
        for state in (widgets or {}).values():
            assert {"state", "version_major", "version_minor"} <= set(state), path
