"""Tracing, the graph, compiled programs, API speculation's scripted side."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ET

import pytest

import minisgl as sgl
from minisgl.lang import SglFunction
from tests.scripted_backend import ScriptedBackend, chatml


@sgl.function
def essay_judge(s, essay, dimensions=("clarity", "evidence")):
    """The paper's judge: branch, solve, merge."""
    s += sgl.system("You judge essays.")
    s += sgl.user(f"The essay: {essay}")
    s += sgl.assistant("I have read it.")
    forks = s.fork(2)
    for fork, dimension in zip(forks, ("clarity", "evidence")):
        fork += sgl.user("Judge its " + dimension)
        fork += sgl.assistant(sgl.gen("judgment", stop="END"))
    judgment = "\n".join(fork["judgment"] for fork in forks)
    s += sgl.user("Sum up.")
    s += sgl.assistant(judgment + " In short, " + sgl.gen("summary", stop=".") + ".")
    s += sgl.user("A letter.")
    s += sgl.assistant(sgl.select("grade", choices=["A", "B"]))
    return s["grade"]


@sgl.function
def tree_of_thought(s, question, branches=2):
    s += "Question: " + question + "\n"
    with s.var_scope("plans"):
        s += "Plan: " + sgl.gen("plan", max_tokens=5) + "\n"
    group = s.fork(2)
    for i, child in enumerate(group):
        child += f"Branch {i}: " + sgl.gen("thought", max_tokens=6)
        leaves = child.fork(2)
        leaves += lambda j: f" leaf {j}: " + sgl.gen("leaf", max_tokens=3)
        leaves.join()
    group.join("concate_and_append")
    s += "\nAnswer: " + sgl.gen("answer")


def answers(prompt):
    return f"<{sum(map(ord, prompt.text)) % 997}.END"


@pytest.mark.parametrize("f", [essay_judge, tree_of_thought], ids=["essay_judge", "tree_of_thought"])
def test_compiled_programs_give_the_interpreted_text(f):
    backend = ScriptedBackend(answers, render=chatml)
    compiled = f.compile(backend)
    for text in ("one", "two words"):
        wanted, found = f.run(text, backend=backend), compiled.run(text)
        assert found.text() == wanted.text() and found.messages() == wanted.messages()
        assert found.ret_value == wanted.ret_value
    states = compiled.run_batch(["a", "b"], max_new_tokens=50)
    assert [s.text() for s in states] == [f.run(t, backend=backend, max_new_tokens=50).text() for t in "ab"]


def test_the_graph_has_the_programs_steps():
    graph = essay_judge.trace()
    kinds = graph.kinds()
    assert kinds.count("Gen") == 3 and kinds.count("Select") == 1 and kinds.count("Fork") == 1
    assert kinds.count("GetForkItem") == 2 and kinds.count("Argument") == 1 and kinds.count("Variable") == 2
    assert kinds[:5] == ["Role", "ConstantText", "Role", "Role", "ConstantText"]
    gens = [node for node in graph if node.kind == "Gen"]
    uses = [node for node in graph if node.kind == "Variable"]
    assert [use.inputs for use in uses] == [[gens[0].id], [gens[1].id]]
    assert "Gen('judgment', state 1)" in repr(graph)
    given = essay_judge.trace(essay="mine")
    assert "Argument" not in given.kinds() and any(n.label == "The essay: mine" for n in given)


def test_the_graph_is_drawn(tmp_path):
    for f in (essay_judge, tree_of_thought):
        drawing = f.trace().draw(tmp_path / "graph.svg")
        svg = (tmp_path / "graph.svg").read_text()
        root = ET.fromstring(svg)
        assert root.tag.endswith("svg") and svg == drawing._repr_svg_() == f.compile().draw().svg
        assert len(root.findall(".//{http://www.w3.org/2000/svg}rect")) == len(f.trace())


def test_draw_escapes_text():
    svg = sgl.function(lambda s: s.__iadd__("<&\"' >")).trace().draw().svg
    ET.fromstring(svg)


DEPENDENT = {
    "compare": lambda s, x: s.__iadd__("a" if x == "b" else "c"),
    "compare a variable": lambda s, x: (s.__iadd__(sgl.gen("v")), s["v"] == "a"),
    "truth": lambda s, x: s.__iadd__("a" if x else "b"),
    "length": lambda s, x: len(x),
    "iterate": lambda s, x: [s.__iadd__(y) for y in x],
    "method": lambda s, x: s.__iadd__(x.strip()),
    "range": lambda s, x: [s for _ in range(x)],
    "int": lambda s, x: int(x),
    "contains": lambda s, x: "a" in x,
    "dict": lambda s, x: {"a": 1}[x],
    "slice": lambda s, x: x[1:],
    "attribute": lambda s, x: x.name,
    "text": lambda s, x: s.text(),
    "fork": lambda s, x: s.fork(x),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_data_dependent_control_flow_is_refused_naming_the_line(name):
    f = DEPENDENT[name]
    with pytest.raises(sgl.TraceError) as caught:
        sgl.function(f).trace()
    assert f"test_trace.py:{f.__code__.co_firstlineno}: " in str(caught.value)


def test_values_of_run_time_may_stand_anywhere_in_text():
    @sgl.function
    def f(s, x, y):
        s += f"{x}-{y}" + "{}".format(x) + "%s" % y + "".join([x, "!", y])  # noqa: UP031, UP032
        s += sgl.gen("a", stop=x, regex="(" + y + ")*")
        s += s["a"] + sgl.select("c", choices=[x, y + "1"]) + y["k"] if False else sgl.gen("b")
        s["d"] = x
        return {"a": s["a"], "xy": [x + y, y], "d": s["d"], "n": 1}

    backend = ScriptedBackend(["aXb", "z"])
    state = f.compile(backend).run("X", "Y")
    assert state.text() == "X-YXYX!Y" + "a" + "z"
    assert backend.jobs[0].params["stop"] == "X" and backend.jobs[0].params["regex"] == "(Y)*"
    assert state.ret_value == {"a": "a", "xy": ["XY", "Y"], "d": "X", "n": 1} and state["d"] == "X"


def test_items_of_an_argument():
    @sgl.function
    def f(s, q, shots):
        s += "Q: " + q["text"] + " A: " + shots[0]["a"]

    state = f.compile().run({"text": "T"}, [{"a": "B"}], backend=ScriptedBackend())
    assert state.text() == "Q: T A: B"


def test_a_choice_with_an_argument_and_an_n_of_an_argument():
    @sgl.function
    def f(s, x, k):
        s += sgl.gen("a", max_tokens=k) + sgl.select("c", choices=[x, x + "2"])

    backend = ScriptedBackend("abcdef")
    assert f.compile(backend).run("c", 2).text() == "abc"


def test_compiled_forks_see_the_parents_prefix():
    """A known defect of the original."""

    @sgl.function
    def f(s, x):
        s += "prefix " * 20 + x
        group = s.fork(2)
        group += lambda i: f" {i}:" + sgl.gen("v")
        group.join()
        s += s["v"][0] + "," + s["v"][1]

    backend = ScriptedBackend("V")
    state = f.compile(backend).run("X")
    parent = "prefix " * 20 + "X"
    assert backend.log[0] == f"prefill {parent}"
    assert sorted(backend.log[1:]) == [f"job {parent} 0:", f"job {parent} 1:"]
    assert state.text() == parent + "V,V" and state["v"] == ["V", "V"]


def test_tracing_through_role_scopes_and_var_scopes():
    """A known defect of the original."""

    @sgl.function
    def f(s, x):
        with s.user():
            s += x
        with s.assistant():
            s += "A: "
            with s.var_scope("whole"):
                s += sgl.gen("a") + "!"
        s.user(s["whole"])
        with s.copy() as c:
            c += sgl.assistant(sgl.gen("b"))

    backend = ScriptedBackend("ok", render=chatml)
    compiled = f.compile(backend)
    assert compiled.run("hi").text() == f.run("hi", backend=backend).text()
    assert compiled.graph.kinds().count("Role") == 8


def test_programs_that_call_programs():
    @sgl.function
    def inner(s, y):
        s += "inner " + y + sgl.gen("v")

    @sgl.function
    def outer(s, x):
        s += "outer " + inner(x)["v"] + sgl.gen("w")

    backend = ScriptedBackend(["I", "O"] * 2)
    sgl.set_default_backend(backend)
    try:
        assert outer.run("X").text() == "outer IO"
    finally:
        sgl.set_default_backend(None)
    compiled = outer.compile(backend)
    assert compiled.run("X").text() == "outer IO" and "Call" in compiled.graph.kinds()
    assert backend.jobs[2].prompt.text == "inner X"


def test_independent_gens_are_issued_together():
    """An interpreter waits for a["x"] before it can issue what comes later; a graph does not."""
    gate = threading.Barrier(2, timeout=5)

    def reply(prompt):
        if prompt.text in ("a", "c"):
            gate.wait()
        return prompt.text.upper()

    @sgl.function
    def f(s):
        a, b, c = s.fork(3)
        a += "a" + sgl.gen("x")
        b += "b" + a["x"] + sgl.gen("x")
        c += "c" + sgl.gen("x")
        s += b["x"] + c["x"]

    assert f.compile(ScriptedBackend(reply)).run().text() == "BAC"


def test_errors_in_a_compiled_program_surface():
    def reply(prompt):
        raise RuntimeError("backend")

    with pytest.raises(RuntimeError, match="backend"):
        tree_of_thought.compile(ScriptedBackend(reply)).run("q").text()
    with pytest.raises(TypeError, match="essay"):
        essay_judge.compile(ScriptedBackend()).run()


def test_reorder_moves_constant_paragraphs_forward():
    @sgl.function
    def f(s, doc, question):
        s += "Read this:\n" + doc + "\n\nRules: be brief.\n\nMore rules.\n\nQuestion: " + question + "\nAnswer:"
        s += sgl.gen("a")

    backend = ScriptedBackend()
    plain, moved = f.compile(backend), f.compile(backend, reorder=True)
    assert plain.run("D", "Q").text() == f.run("D", "Q", backend=backend).text()
    assert moved.run("D", "Q").text() == ("Rules: be brief.\n\nMore rules.\n\nRead this:\nD\n\nQuestion: Q\nAnswer:ok")
    assert plain.cache() == "Read this:\n"
    assert moved.cache() == "Rules: be brief.\n\nMore rules.\n\nRead this:\n"
    ids = [node.id for node in moved.graph]
    assert ids == list(range(len(ids)))


def test_compiled_programs_precompute_their_prefix_in_run_batch():
    @sgl.function
    def f(s, shots, x):
        s += "Shots: " + shots + " Q: " + x + sgl.gen("a")

    backend = ScriptedBackend()
    f.compile(backend).run_batch([{"shots": "S", "x": x} for x in "ab"])
    assert [p.text for p in backend.prefills] == ["Shots: S Q: "]


def test_bound_arguments_are_constants_of_the_graph():
    f = essay_judge.bind(essay="mine")
    compiled = f.compile(ScriptedBackend(answers, render=chatml))
    assert "Argument" not in compiled.graph.kinds() and isinstance(compiled, SglFunction)
    assert "mine" in compiled.run().text()


# ---- API speculation -------------------------------------------------------------------------------------------------


@sgl.function(num_api_spec_tokens=100)
def three_fields(s, name):
    s += f"{name} is a wizard.\n"
    s += "Name:" + sgl.gen("name", stop="\n") + "\nHouse:" + sgl.gen("house", stop="\n")
    s += "\nWand:" + sgl.gen("wand", stop="\n")


WHOLE = " Harry\nHouse: Gryffindor\nWand: holly\nBorn: 1980"


def test_three_fields_cost_one_call():
    backend = ScriptedBackend(WHOLE, hosted=True)
    state = three_fields.run("Harry", backend=backend)
    assert (state["name"], state["house"], state["wand"]) == (" Harry", " Gryffindor", " holly")
    assert len(backend.jobs) == 1 and backend.jobs[0].params["max_new_tokens"] == 128
    assert backend.jobs[0].params["stop"] is None


def test_speculation_that_does_not_match_costs_a_call_and_is_never_wrong():
    other = [" Harry\nSchool: Hogwarts\n", " Gryffindor\nWand: oak\n", " unused"]
    backend = ScriptedBackend(other, hosted=True)
    state = three_fields.run("Harry", backend=backend)
    assert (state["name"], state["house"], state["wand"]) == (" Harry", " Gryffindor", " oak")
    assert len(backend.jobs) == 2
    assert backend.jobs[1].prompt.text == "Harry is a wizard.\nName: Harry\nHouse:"


def test_speculation_is_for_hosted_models_only():
    backend = ScriptedBackend([" Harry\n", " G\n", " h\n"])
    three_fields.run("Harry", backend=backend).sync()
    assert len(backend.jobs) == 3 and backend.jobs[0].params["stop"] == "\n"


def test_speculation_in_a_chat_message():
    @sgl.function(num_api_spec_tokens=100)
    def f(s):
        s += sgl.user("Describe Harry")
        s += sgl.assistant("Name:" + sgl.gen("name", stop="\n") + "\nHouse:" + sgl.gen("house", stop="\n"))

    backend = ScriptedBackend("Sure.\nName: Harry\nHouse: Gryffindor\n", hosted=True, continues=False, render=chatml)
    state = f.run(backend=backend)
    assert (state["name"], state["house"]) == (" Harry", " Gryffindor") and len(backend.jobs) == 1
    assert backend.jobs[0].prompt.partial == ""
    with pytest.raises(RuntimeError, match="'Name:'"):
        f.run(backend=ScriptedBackend("no", hosted=True, continues=False, render=chatml)).sync()
