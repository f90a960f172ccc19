"""Static pictures, palettes and views: what they say is what the tree is, in any viewer and for any reader."""

from __future__ import annotations

import itertools
import json
import re
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from minisgl.events import Event, EventLog
from minisgl.pool import SlotAllocator
from minisgl.radix import RadixTree
from minisgl.tokenizer import ByteTokenizer
from minisgl.visual import GrammarView, RadixView, ScheduleView, figure4, static_outputs
from minisgl.visual_data import dumps, encode_history
from minisgl.visual_history import TreeHistory
from minisgl.visual_story import ANSWERS, EXAMPLES, HELLO, QUERIES, SOLVE, STORY, SYSTEM, WHEN
from minisgl.visual_theme import DARK, GLYPHS, LIGHT, LINE_PAIRS, TEXT_PAIRS, WORDS, contrast

SVG = "{http://www.w3.org/2000/svg}"


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag == SVG + "svg" and root.get("role") == "img"
    assert root.find(SVG + "title") is not None and root.findtext(SVG + "desc"), "no text alternative"
    return root


def states(svg: str) -> dict[int, str]:
    """Node id -> state, of a picture of one step."""
    nodes = [g for g in parse(svg).iter(SVG + "g") if g.get("data-node")]
    return {int(g.get("data-node", "")): g.get("data-state", "") for g in nodes}


# ------------------------------------------------------------------------------------------- the paper's figure


def edges(view, position: int) -> dict[str, str]:
    """Text of each edge -> text of the edge above it ("" at the root)."""
    nodes = view.history.state(position).nodes
    text = {i: view.decode(node.tokens) for i, node in nodes.items()}
    return {text[i]: text.get(node.parent, "") for i, node in nodes.items()}


def plain(value: str) -> str:
    return value.replace("~", " ")


def test_figure4_is_the_papers_nine_states():
    view = figure4()
    assert [view.steps[i].title[:3] for i in range(9)] == [f"({i})" for i in range(1, 10)] and len(view.steps) == 9
    system, hello, solve, story = map(plain, (SYSTEM, HELLO, SOLVE, STORY))
    chat2 = next(e for e in edges(view, 3) if e.startswith("User: What can you do?"))
    shots, queries = plain(EXAMPLES), [plain(q) for q in QUERIES]
    tree = {}
    assert edges(view, 0) == tree  # (1) empty
    tree = {f"{system} {hello}": ""}  # (2) the first turn is one edge
    assert edges(view, 1) == tree
    tree[solve] = f"{system} {hello}"  # (3) its second turn is appended
    assert edges(view, 2) == tree
    tree = {system: "", hello: system, solve: hello, chat2: system}  # (4) split: both chats share the system prompt
    assert edges(view, 3) == tree
    del tree[solve]  # (5) the first chat's second turn is evicted for the second chat's
    tree[story] = chat2
    assert edges(view, 4) == tree
    tree[f"{shots} {queries[0]}"] = ""  # (6) a few-shot query shares nothing
    assert edges(view, 5) == tree
    del tree[f"{shots} {queries[0]}"]  # (7) split: four queries share the examples
    tree |= {shots: "", **dict.fromkeys(queries, shots)}
    assert edges(view, 6) == tree
    del tree[chat2], tree[story]  # (8) the first chat is back, the second is gone
    tree[f"{solve} {plain(WHEN)}"] = hello
    assert edges(view, 7) == tree
    question, first = queries[1].rsplit(" ", 1)  # (9) more answers to one question, the other queries are gone
    for query in queries:
        del tree[query]
    tree |= {question: shots, **dict.fromkeys((first, *ANSWERS[1:]), question)}
    assert edges(view, 8) == tree


def test_figure4_marks_new_accessed_and_evicted_as_the_paper_does():
    view = figure4()

    def words(position: int, ids) -> list[str]:
        nodes = {**view.history.state(position).nodes, **{n.id: n for n in view.steps[position].gone}}
        return [view.decode(nodes[i].tokens).split(" Assistant:")[0].split(" ans")[0][:24] for i in ids]

    def told(position: int) -> tuple[list[str], list[str], list[str]]:
        step = view.steps[position]
        return words(position, step.new), words(position, step.hit), words(position, step.evicted)

    assert told(1) == (["You are a helpful assist"], [], [])
    assert told(2) == (["User: Solve this problem"], ["You are a helpful assist"], [])
    assert told(3) == (["User: What can you do?"], ["You are a helpful assist"], [])
    assert told(4)[1:] == (["You are a helpful assist", "User: What can you do?"], ["User: Solve this problem"])
    assert told(5)[1:] == ([], [])
    assert len(told(6)[0]) == 3 and told(6)[1:] == (["Question 1: 1 + 1? Answe"], [])
    second_chat = ["User: Write a story.", "User: What can you do?"]  # leaves go first
    assert told(7)[1:] == (["You are a helpful assist", "User: Hello!"], second_chat)
    assert told(8)[2] == [plain(QUERIES[i]) for i in (0, 2, 3)] and len(told(8)[0]) == 3
    assert all(view.history.state(i).tokens <= view.history.start.capacity for i in range(9))


def test_the_story_is_played_by_the_real_tree():
    """Its last state is the tree's own, and nothing is locked or lost."""
    from minisgl.visual_story import Stage

    stage = Stage(capacity=12)
    stage.serve("a b c", "d e")
    stage.serve("a b", "f g h i j k")
    stage.state("one")
    stage.tree.check()
    assert stage.tree.locked == 0 and stage.tree.total + stage.pool.available == 12
    assert set(stage.history.state(1).nodes) == {node.id for node in stage.tree.nodes()}


# ------------------------------------------------------------------------------------------------- static pictures


def busy_log(operations: int = 120, seed: int = 0, capacity: int = 80) -> tuple[EventLog, RadixTree]:
    log = EventLog()
    tree, pool = RadixTree(events=log), SlotAllocator(capacity, log)
    rng = np.random.default_rng(seed)
    for _ in range(operations):
        tokens = rng.integers(0, 3, rng.integers(1, 12)).tolist()
        match = tree.match(tokens)
        tree.lock(match.node)
        new = len(tokens) - match.length
        if new > pool.available:
            pool.free(tree.evict(new - pool.available))
        inserted = tree.insert(tokens, np.concatenate([match.slots, pool.alloc(new)]))
        assert inserted.matched == match.length
        tree.unlock(match.node)
    return log, tree


def test_every_step_is_a_well_formed_picture_that_shows_its_nodes():
    log, tree = busy_log()
    view = RadixView(log)
    marked = set()
    for i, step in enumerate(view.steps):
        shown = states(view.svg(i))
        assert shown.keys() == view.history.state(i).nodes.keys() | {n.id for n in step.gone}
        assert {n.id for n in step.gone} == {k for k, v in shown.items() if v == "evicted"}
        assert set(step.new) == {k for k, v in shown.items() if v == "new"}
        marked |= set(shown.values())
    assert marked == {"new", "hit", "split", "evicted", "cached"}
    assert shown.keys() == {node.id for node in tree.nodes()}


@pytest.mark.parametrize("text", ["<b>&\"'", "a\0b\x1b[0m\x08", "\ud800 lone", "]]>", "emoji 🌳 漢字", "\ufffe\uffff"])
def test_any_text_on_an_edge_gives_well_formed_xml(text):
    log = EventLog()
    RadixTree(events=log).insert([1, 2], [1, 2])
    view = RadixView(log, tokenizer=lambda ids: text)
    parse(view.svg())
    json.loads(dumps(encode_history(view.history, view.decode)[0]))
    parse(GrammarView("[a-c]+", text=text.encode("utf-8", "ignore").decode()).svg())


def test_a_script_in_a_prompt_stays_text():
    log = EventLog()
    RadixTree(events=log).insert([1], [1])
    page = RadixView(log, tokenizer=lambda ids: "</script><script>alert(1)</script><!--").html()
    assert page.count("</script>") == 2 and "<!--" not in page.split("</head>")[1]


def test_the_story_sheet_has_all_states():
    root = parse(figure4().svg())
    text = " ".join(root.itertext())
    assert all(f"({i})" in text for i in range(1, 10))
    assert root.findtext(SVG + "desc").count("(") >= 9


def test_static_forms_and_files(tmp_path):
    log, _ = busy_log(20)
    for view in (RadixView(log), figure4(), ScheduleView(log), GrammarView("a(b|c)d*", ByteTokenizer(), "ab")):
        bundle = view._repr_mimebundle_()
        assert bundle.keys() == {"text/plain", "image/svg+xml"} and bundle["text/plain"] == repr(view)
        parse(bundle["image/svg+xml"])
        view.save(tmp_path / "x.svg")
        assert (tmp_path / "x.svg").read_text() == bundle["image/svg+xml"]
        view.save(tmp_path / "x.html")
        page = (tmp_path / "x.html").read_text()
        assert page.startswith("<!DOCTYPE html>") and "http" not in page.replace("http://www.w3.org/2000/svg", "")
        with pytest.raises(ValueError, match=r"path must end in \.html or \.svg"):
            view.save(tmp_path / "x.pdf")


# ---------------------------------------------------------------------------------------------------- accessibility


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(colours):
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#777777", "#777777") == 1
    for ink, paper in TEXT_PAIRS:
        assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    for line, paper in LINE_PAIRS:
        assert contrast(colours[line], colours[paper]) >= 3, (line, paper)


def test_no_state_is_told_by_colour_alone():
    assert len(set(GLYPHS.values())) == len(GLYPHS) and len(set(WORDS.values())) == len(WORDS)
    assert LIGHT.keys() == DARK.keys()
    view = figure4()
    svg = view.svg(8)
    for g in parse(svg).iter(SVG + "g"):
        if g.get("data-node"):
            mark = next(k for k, word in WORDS.items() if (k or "cached") == g.get("data-state"))
            assert GLYPHS[mark] in "".join(t.text or "" for t in g.iter(SVG + "text"))
            assert WORDS[mark] in g.findtext(SVG + "title")
            dashed = any(r.get("stroke-dasharray") for r in g.iter(SVG + "rect"))
            assert dashed == (mark in ("evicted", "split"))


# --------------------------------------------------------------------------------------------------------- big trees


def big_log(nodes: int = 2000) -> EventLog:
    log = EventLog(1 << 20)
    tree = RadixTree(events=log)
    slot = itertools.count(1)
    for i in range(nodes // 2):
        tokens = [i % 40, 1000 + i, *range(2000 + i, 2006 + i)]
        tree.insert(tokens, [next(slot) for _ in tokens])
        tree.match([i % 40, 1000 + i, 2000 + i])
    return log


def test_two_thousand_nodes_are_capped_folded_and_quick():
    view = RadixView(big_log())
    history, last = view.history, len(view.history) - 1
    assert len(history.state(last).nodes) >= 2000
    svg = view.svg()
    shown = states(svg)
    assert 250 <= len(shown) <= 300 and len(svg) < 400_000
    folded = sum(int(t.split()[0][1:]) for t in parse(svg).itertext() if t.startswith("+") and "node" in t)
    assert len(shown) + folded == len(history.state(last).nodes)
    begin = time.process_time()
    for _ in range(5):
        view.svg()
    assert (time.process_time() - begin) / 5 < 0.6  # a tenth of that on a quiet machine
    assert states(RadixView(history, max_nodes=1).svg()).keys() <= set(history.state(last).nodes)


def test_a_long_chat_is_a_deep_tree():
    log = EventLog()
    tree = RadixTree(events=log)
    for n in range(1, 401):
        tree.insert(list(range(n)), list(range(1, n + 1)))
    view = RadixView(log, max_nodes=2000)
    assert len(states(view.svg())) == 400


# ------------------------------------------------------------------------------------------------------- the API


def test_moving_through_a_replay():
    log, _ = busy_log(10)
    view = RadixView(list(log))
    last = len(view.steps) - 1
    assert view.step == last and not view.live
    assert view.goto(0).step == 0 and view.goto(-1).step == last and view.goto(3).step == 3
    with pytest.raises(IndexError, match=f"position must be from 0 to {last}"):
        view.goto(last + 1)
    with pytest.raises(IndexError, match="step must be from 0"):
        view.svg(last + 1)
    assert states(view.svg()) == states(view.svg(3)) != states(view.svg(last))
    view.play().pause()
    assert view.step == 3
    view.close()
    assert view.step == 3 and len(view.steps) == last + 1


def test_goto_request_walks_through_a_requests_steps():
    log = EventLog()
    for rid in ("a", "b"):
        log.emit("submit", rid=rid, prompt_len=3, max_len=9)
    log.emit("batch", decodes=[], extends=[("a", 0, 3)], waiting=1)
    log.emit("batch", decodes=["a"], extends=[("b", 0, 3)], waiting=0)
    log.emit("finish", rid="a", reason="stop", tokens=5)
    view = RadixView(log).goto(0)
    assert [view.goto_request("b").step for _ in range(3)] == [1, 3, 1]
    assert [view.goto_request("a").step for _ in range(4)] == [2, 3, 4, 1]
    with pytest.raises(KeyError, match="no step is about request 'c'; there are: a, b"):
        view.goto_request("c")


def test_a_log_is_followed():
    log = EventLog()
    tree = RadixTree(events=log)
    view = RadixView(log)
    assert view.step == 0 and view.live and repr(view).startswith("RadixView(no steps yet")
    tree.insert([1, 2, 3], [1, 2, 3])
    assert view.step == 1 and "3 tokens enter the tree as #1" in repr(view)
    view.goto(0)
    tree.match([1, 2])
    assert view.step == 0 and len(view.steps) == 4
    assert view.follow().step == 3
    view.close()
    tree.insert([9], [9])
    assert len(view.steps) == 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RadixView(5), TypeError, "source must be a Runtime, an EventLog, events or a TreeHistory, got int"),
        (lambda: RadixView([1]), TypeError, "source must be"),
        (lambda: RadixView([], max_nodes=0), ValueError, "max_nodes must be at least 1"),
        (lambda: RadixView([], width=10), ValueError, "width must be at least 320"),
        (lambda: RadixView([], tokenizer=3), TypeError, "tokenizer must have a decode method"),
        (lambda: ScheduleView([], max_requests=0), ValueError, "max_requests must be at least 1"),
        (lambda: ScheduleView([], steps=(0, 3)), ValueError, "steps must be"),
        (lambda: GrammarView("a", max_states=0), ValueError, "max_states must be at least 1"),
        (lambda: GrammarView("a("), ValueError, r"a\("),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_static_outputs_drops_widgets_that_have_a_picture():
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}}
    notebook = {
        "metadata": {"widgets": {"application/vnd.jupyter.widget-state+json": {}}},
        "cells": [
            {"outputs": [{"data": {**widget, "image/svg+xml": "<svg/>"}}, {"data": dict(widget)}, {"text": "x"}]},
            {"source": "no outputs"},
        ],
    }
    assert static_outputs(notebook) == 1
    assert notebook["cells"][0]["outputs"][0]["data"] == {"image/svg+xml": "<svg/>"}
    assert notebook["cells"][0]["outputs"][1]["data"] == widget and "widgets" not in notebook["metadata"]


# --------------------------------------------------------------------------------------------- schedule and grammar


def step_events(queued: bool) -> list[Event]:
    """Two steps of an engine, by hand: times in seconds."""
    rows = [
        (0.0, "submit", {"rid": "a", "prompt_len": 5, "max_len": 9}),
        (0.0, "submit", {"rid": "b", "prompt_len": 2, "max_len": 9}),
        (1.0, "batch", {"decodes": [], "extends": [("a", 0, 5)], "waiting": 1}),
        (1.5, "launch", {"formed": 0.5, "began": 1.0, "queued": queued}),
        (3.0, "results", {"began": 1.6}), (3.2, "commit", {"began": 3.0, "tokens": 1}),
        (4.0, "batch", {"decodes": ["a"], "extends": [("b", 0, 2)], "waiting": 0}),
        (4.5, "launch", {"formed": 3.2, "began": 4.0, "queued": queued}),
        (6.0, "results", {"began": 4.6}), (6.1, "commit", {"began": 6.0, "tokens": 2}),
        (6.1, "finish", {"rid": "a", "reason": "stop", "tokens": 7}),
    ]  # fmt: skip
    return [Event(i, at, kind, fields) for i, (at, kind, fields) in enumerate(rows)]


def test_schedule_times_of_host_and_device():
    schedule = ScheduleView(step_events(queued=True)).schedule
    first, second = schedule.steps
    assert first.on_device == (1.0, 3.0) and second.on_device == (4.0, 6.0)  # from the launch to the results
    assert first.work == {"a": ("prefill", 5)} and second.work == {"a": ("decode", 1), "b": ("prefill", 2)}
    assert schedule.busy == pytest.approx(4.0 / 5.6)
    first, second = ScheduleView(step_events(queued=False)).schedule.steps
    assert first.on_device == (1.0, 1.5) and second.on_device == (4.0, 4.5)  # the launch did the work


def test_schedule_picture_says_who_ran_when():
    root = parse(ScheduleView(step_events(queued=True)).svg())
    rows = {g.get("data-request"): g for g in root.iter(SVG + "g") if g.get("data-request")}
    work = {rid: [r.get("data-work") for r in g.iter(SVG + "rect")] for rid, g in rows.items()}
    assert work == {"a": ["prefill", "decode"], "b": ["prefill"]}
    lanes = [r.get("data-lane") for r in root.iter(SVG + "rect") if r.get("data-lane")]
    assert lanes.count("device") == 2 and lanes.count("form") == 2 and lanes.count("commit") == 2
    without_times = [e for e in step_events(True) if e.kind in ("submit", "batch", "finish")]
    root = parse(ScheduleView(without_times, steps=(-1, 2)).svg())
    assert not [r for r in root.iter(SVG + "rect") if r.get("data-lane")]
    assert [g.get("data-request") for g in root.iter(SVG + "g") if g.get("data-request")] == ["a", "b"]


def test_what_the_host_does_is_told_apart_by_place_and_named_in_the_legend():
    for queued in (True, False):
        root = parse(ScheduleView(step_events(queued)).svg())
        lanes = [r for r in root.iter(SVG + "rect") if r.get("data-lane") not in (None, "device")]
        looks = {(r.get("data-lane"), r.get("y"), r.get("height")) for r in lanes}
        kinds = ["commit", "form", "launch"] if queued else ["commit", "form"]
        assert sorted(kind for kind, _, _ in looks) == kinds  # one look for each
        assert len({(y, height) for _, y, height in looks}) == len(kinds)
        legend = " ".join(root.itertext())
        assert "forms a batch" in legend and ("launches" in legend) == queued == ("waits" in legend)


def test_pictures_can_stand_in_one_page():
    """No ids, which would have to be unique there, and no style that another element of the page could match."""
    pictures = [figure4().svg(), figure4().svg(7), ScheduleView(step_events(True)).svg()]
    pictures.append(GrammarView("a|bc", text="b").svg())
    assert all("×" in svg for svg in pictures[:2])  # with hatched nodes
    for svg in pictures:
        root = parse(svg)
        assert not [e for e in root.iter() if "id" in e.attrib] and "url(#" not in svg
        (style,) = root.iter(SVG + "style")
        selectors = re.findall(r"([^{};]+)\{[^{}]*\}", (style.text or "").partition("{")[2])
        assert selectors and all(re.fullmatch(r"\.mv-[fs]-[\w-]+", s) for s in selectors)


def test_the_hatching_stays_inside_its_node():
    root = parse(figure4().svg(7))
    seen = 0
    for group in root.iter(SVG + "g"):
        if group.get("data-state") == "evicted":
            rect, hatch = group.find(SVG + "rect"), group.find(SVG + "path")
            assert rect is not None and hatch is not None
            x, y, w, h = (float(rect.get(name) or "nan") for name in ("x", "y", "width", "height"))
            points = re.findall(r"[ML](\S+?) ([-\d.]+)", hatch.get("d") or "")
            assert points and all(x <= float(a) <= x + w and y <= float(b) <= y + h for a, b in points)
            seen += 1
    assert seen


def test_idle_times_are_cut_short():
    events = step_events(False)
    later = [Event(e.seq + 99, e.time + 1000, e.kind, {**e.fields, **{k: v + 1000 for k, v in e.fields.items()
             if k in ("formed", "began")}}) for e in events]  # fmt: skip
    busy = ScheduleView(events + later).schedule.busy
    assert 0.1 < busy < 0.5


def test_grammar_view_knows_state_forced_and_legal():
    view = GrammarView(r"(yes|no), because [a-c]+\.", ByteTokenizer(), "yes")
    at = view.moment
    assert at.forced == b", because " and at.accepted == b"yes" and not at.accepting and at.wrong == ""
    assert at.legal == [ord(",")] and at.vocab_size == view.tokens.vocab_size
    wrong = view.after("yes, because x").moment
    assert wrong.wrong == "x" and wrong.accepted == b"yes, because " and wrong.legal == [ord(c) for c in "abc"]
    end = view.after("no, because b.").moment
    assert end.accepting and set(end.legal) == view.tokens.stop_ids
    text = " ".join(parse(view.after("yes, because x").svg()).itertext())
    assert "is not allowed here" in text and "3 of" in text
    tokens = [int(g.get("data-token")) for g in parse(view.svg()).iter(SVG + "g") if g.get("data-token")]
    assert tokens == at.legal


def test_grammar_view_of_an_automaton_that_is_too_big_draws_a_part():
    from minisgl.fsm import Grammar

    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    view = GrammarView(Grammar.from_json_schema(schema), text='{"name": "Ad', max_states=25)
    root = parse(view.svg())
    assert "nearest to this one" in " ".join(root.itertext())
    drawn = [g for g in root.iter(SVG + "g") if g.get("data-state")]
    assert 2 <= len(drawn) <= 50 and str(view.moment.state) in {g.get("data-state") for g in drawn}


def test_histories_of_stories_are_not_changed_by_looking():
    view = figure4()
    before = [repr(step) for step in view.steps]
    view.svg(), view.html(), RadixView(view.history).svg(2)
    assert [repr(step) for step in view.steps] == before and isinstance(view.history, TreeHistory)
