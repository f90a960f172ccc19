"""From events to states: what the history says is what the tree and the pool are, at every step."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.events import EventLog
from minisgl.pool import SlotAllocator
from minisgl.radix import RadixTree
from minisgl.visual_data import Encoder
from minisgl.visual_history import CHECKPOINT, TreeHistory
from minisgl.visual_layout import choose, folded_at_root, place
from minisgl.visual_source import LogReader
from minisgl.visual_state import NodeView, TreeState, apply, from_snapshot, runs

CAPACITY = 48

Operation = st.tuples(
    st.sampled_from(["serve", "serve", "match", "hold", "drop", "evict", "flush"]),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
)


class Cache:
    """A tree and a pool under random use, logged."""

    def __init__(self, capacity: int = CAPACITY):
        self.log = EventLog()
        self.tree = RadixTree(events=self.log)
        self.pool = SlotAllocator(capacity, self.log)
        self.held: list = []

    def do(self, name: str, tokens: list[int]) -> None:
        tree, pool = self.tree, self.pool
        if name in ("serve", "hold"):
            match = tree.match(tokens)
            tree.lock(match.node)
            new = len(tokens) - match.length
            if new > pool.available + tree.evictable:
                tree.unlock(match.node)
                return
            if new > pool.available:
                pool.free(tree.evict(new - pool.available))
            inserted = tree.insert(tokens, np.concatenate([match.slots, pool.alloc(new)]))
            tree.lock(inserted.node)
            tree.unlock(match.node)
            self.held.append(inserted.node)
            if name == "serve":
                tree.unlock(self.held.pop())
        elif name == "match":
            tree.match(tokens)
        elif name == "drop" and self.held:
            tree.unlock(self.held.pop(tokens[0] % len(self.held)))
        elif name == "evict":
            pool.free(tree.evict(len(tokens)))
        elif name == "flush":
            pool.free(tree.flush())

    def state(self) -> TreeState:
        return from_snapshot(self.tree.snapshot(), self.pool.free_slots().copy(), self.pool.capacity)


def facts(state: TreeState) -> tuple:
    """All that a state says, less the ranks, which only order siblings."""
    order = {parent: [n.id for n in nodes] for parent, nodes in state.children().items()}
    nodes = {i: n._replace(rank=0) for i, n in state.nodes.items()}
    used = np.zeros(CAPACITY + 1, bool)
    used[: len(state.used)] = state.used[: CAPACITY + 1]
    return nodes, order, used.tolist(), state.tick


@settings(max_examples=60, deadline=None)
@given(st.lists(Operation, max_size=40), st.booleans())
def test_the_history_ends_with_the_trees_own_state(operations, detail):
    cache = Cache()
    history = TreeHistory(TreeState(capacity=CAPACITY), detail=detail)
    cursor = 0
    for name, tokens in operations:
        cache.do(name, tokens)
        history.feed(cache.log.since(cursor))
        cursor = cache.log.next_seq
        history.close()
        assert facts(history.state(len(history) - 1)) == facts(cache.state())
    assert history.steps[-1].stored == cache.tree.total
    assert history.steps[-1].busy == CAPACITY - cache.pool.available
    assert not history.partial


@settings(max_examples=40, deadline=None)
@given(st.lists(Operation, min_size=2, max_size=40), st.data())
def test_a_snapshot_and_what_follows_is_the_same(operations, data):
    cache = Cache()
    cut = data.draw(st.integers(0, len(operations)))
    for name, tokens in operations[:cut]:
        cache.do(name, tokens)
    history, cursor = TreeHistory(cache.state()), cache.log.next_seq
    for name, tokens in operations[cut:]:
        cache.do(name, tokens)
    history.feed(cache.log.since(cursor))
    history.close()
    assert facts(history.state(len(history) - 1)) == facts(cache.state())


def replay(history: TreeHistory) -> list[dict[int, list]]:
    """What a player does with the JSON: nodes after each step, as [parent, length, slots, locks, last use, hits]."""
    encoder = Encoder(None)
    start = json.loads(json.dumps(encoder.start(history)))
    nodes = {n[0]: n for n in start["nodes"]}
    found = [dict(nodes)]
    for step in history.steps[1:]:
        plain = json.loads(json.dumps(encoder.step(step)))
        for gone in plain.get("g", []):
            nodes.pop(gone[0], None)
        for n in plain.get("c", []):
            nodes[n[0]] = n if len(n) > 4 else [*nodes[n[0]][:6], *n[1:], nodes[n[0]][9]]
        found.append(dict(nodes))
    return found


def test_positions_forwards_backwards_and_as_data():
    cache, rng = Cache(), np.random.default_rng(1)
    for _ in range(150):
        cache.do("serve", rng.integers(0, 3, rng.integers(1, 10)).tolist())
    history = TreeHistory(TreeState(capacity=CAPACITY))
    history.feed(cache.log)
    history.close()
    assert len(history) > 3 * CHECKPOINT
    state, states = history.start.copy(), [facts(history.start)]
    for step in history.steps[1:]:
        apply(state, step)
        states.append(facts(state))
    for i in rng.permutation(len(history)).tolist():
        assert facts(history.state(i)) == states[i]
    for i, nodes in enumerate(replay(history)):
        ours = {k: [n.parent, n.length, n.locks, n.last_access, n.hits] for k, n in history.state(i).nodes.items()}
        assert ours == {k: [n[1], n[2], n[6], n[7], n[8]] for k, n in nodes.items()}
        slots = {k: [s for f, c in zip(n[5][::2], n[5][1::2]) for s in range(f, f + c)] for k, n in nodes.items()}
        assert slots == {k: list(n.slots) for k, n in history.state(i).nodes.items()}


def test_owners_of_slots():
    cache = Cache(12)
    cache.do("hold", [1, 1, 1])
    cache.do("serve", [1, 2])
    running = cache.pool.alloc(2)
    history = TreeHistory(TreeState(capacity=12))
    history.feed(cache.log)
    history.close()
    state = history.state(len(history) - 1)
    owners = dict(enumerate(state.owners(), start=1))
    for node in cache.tree.nodes():
        assert {owners[s] for s in node.slots.tolist()} == {"locked" if node.lock_count else "tree"}
    assert {owners[int(s)] for s in running} == {"running"}
    assert sum(owner == "free" for owner in owners.values()) == cache.pool.available


def test_what_a_step_marks():
    log = EventLog()
    tree = RadixTree(events=log)
    history, cursor = TreeHistory(), 0

    def last():
        nonlocal cursor
        history.feed(log.since(cursor))
        cursor = log.next_seq
        history.close()
        return history.steps[-1]

    tree.insert([1, 2, 3, 4], [1, 2, 3, 4])
    step = last()
    assert (step.kind, step.new, step.hit, step.title) == ("insert", [1], [], "4 tokens enter the tree as #1")
    match = tree.match([1, 2, 9])
    step = last()
    split = history.steps[-2]
    assert (split.kind, split.split) == ("split", [(2, 1)]) and split.mark(1) == split.mark(2) == "split"
    assert (step.kind, step.hit, step.title) == ("match", [2], "2 of 3 tokens are stored")
    tree.lock(match.node)
    step = last()
    assert (step.kind, step.lock, step.changed[2].locks) == ("lock", [2], 1)
    tree.unlock(match.node)
    assert last().changed[2].locks == 0
    tree.evict(3)
    last()
    assert [s.evicted for s in history.steps if s.kind == "evict"] == [[1], [2]]


def test_bookkeeping_joins_the_step_it_belongs_to_unless_asked_for():
    cache = Cache()
    cache.do("serve", [1, 2, 3])
    plain, detail = TreeHistory(), TreeHistory(detail=True)
    for history in (plain, detail):
        history.feed(cache.log)
        history.close()
    assert [step.kind for step in plain] == ["start", "match", "insert"]
    assert [step.kind for step in detail] == ["start", "match", "lock", "alloc", "insert", "lock", "unlock", "unlock"]
    assert facts(plain.state(2)) == facts(detail.state(7))


def test_runs_of_decodes_are_one_step():
    log = EventLog()
    for _ in range(20):
        log.emit("batch", decodes=["a", "b"], extends=[], waiting=0)
    log.emit("batch", decodes=["a"], extends=[("c", 0, 7)], waiting=0)
    log.emit("batch", decodes=["a", "c"], extends=[], waiting=0)
    history = TreeHistory()
    history.feed(log)
    history.close()
    assert [step.title for step in history][1:] == [
        "16 decode steps of a, b", "4 decode steps of a, b", "a step computes: 7 tokens of prompts (c), 1 decode",
        "a decode step of a, c",
    ]  # fmt: skip
    assert history.find("c") == 3 and history.find("b", after=1) == 2 and history.requests() == ["a", "b", "c"]


def test_a_log_that_begins_in_the_middle():
    cache = Cache()
    cache.do("serve", [1, 1, 2])
    cut = cache.log.next_seq
    cache.do("serve", [1, 1, 2, 2])
    cache.do("serve", [1, 0])
    cache.do("flush", [0])
    history = TreeHistory()
    history.feed(cache.log.since(cut))
    history.close()
    assert history.partial and not history.state(len(history) - 1).nodes
    assert any(not node.known for step in history for node in step.changed.values())


def test_a_ring_that_overflowed_between_two_looks():
    log = EventLog(capacity=8)
    tree = RadixTree(events=log)
    reader = LogReader(log)
    tree.insert([1], [1])
    reader.poll()
    for i in range(2, 20):
        tree.insert([i], [i])
    while reader.poll():
        pass
    assert any("10 events were overwritten" in step.title for step in reader.history)
    assert reader.history.partial
    assert {1, *range(12, 20)} == set(reader.history.now.nodes)


def test_the_tail_of_a_history_goes_on():
    cache, rng = Cache(), np.random.default_rng(2)
    for _ in range(80):
        cache.do("serve", rng.integers(0, 3, rng.integers(1, 10)).tolist())
    history = TreeHistory(TreeState(capacity=CAPACITY))
    history.feed(cache.log)
    history.close()
    cursor = cache.log.next_seq
    tail = history.tail(100)
    assert len(tail) == 101 and facts(tail.state(100)) == facts(history.state(len(history) - 1))
    cache.do("hold", [2, 1, 2, 1, 2])
    tail.feed(cache.log.since(cursor))
    tail.close()
    assert facts(tail.state(len(tail) - 1)) == facts(cache.state())
    assert facts(tail.state(0)) == facts(history.state(len(history) - 101))


@pytest.mark.parametrize("position", [-1, 3])
def test_positions_out_of_range(position):
    history = TreeHistory()
    with pytest.raises(IndexError, match="position must be from 0 to 0"):
        history.state(position)
    with pytest.raises(KeyError, match="no step of request 'x'"):
        history.find("x")


def test_runs():
    assert runs([3, 4, 5, 9, 1, 2]) == [(3, 3), (9, 1), (1, 2)] and runs([]) == []


# --------------------------------------------------------------------------------------------------------- layout


@settings(max_examples=60, deadline=None)
@given(st.lists(Operation, max_size=30), st.integers(1, 12), st.integers(200, 900))
def test_layouts_have_no_overlap_and_lose_no_node(operations, max_nodes, width):
    cache = Cache()
    history = TreeHistory(TreeState(capacity=CAPACITY))
    for name, tokens in operations:
        cache.do(name, tokens)
    history.feed(cache.log)
    history.close()
    for i in range(max(len(history) - 5, 0), len(history)):
        state, step = history.state(i), history.steps[i]
        boxes = choose(state, step, max_nodes)
        hidden, tokens = folded_at_root(state, step, boxes)
        assert len(boxes) <= max_nodes and hidden >= 0
        everything = {**state.nodes, **{n.id: n for n in step.gone}}
        assert len(boxes) + hidden + sum(b.hidden for b in boxes.values()) == len(everything)
        lengths = sum(b.node.length + b.hidden_tokens for b in boxes.values())
        assert lengths + tokens == sum(n.length for n in everything.values())
        layout = place(boxes, {k: "x" * 30 for k in boxes}, width, (hidden, tokens))
        rows = sorted((b.x, b.y) for b in boxes.values())
        for (x0, y0), (x1, y1) in itertools.pairwise(rows):
            assert x0 != x1 or y1 - y0 >= 29  # in a column, a pill and a line of notes apart
        for box in boxes.values():
            parent = boxes.get(box.node.parent)
            assert parent is None or parent.x + parent.width < box.x
            assert 0 < box.y < layout.height and box.x + box.width < layout.width


def test_the_most_recently_used_nodes_are_kept_and_folding_by_hand():
    nodes = {i: NodeView(i, 0, (i,), (i,), last_access=i, rank=i) for i in range(1, 10)}
    nodes[10] = NodeView(10, 9, (1,), (10,), last_access=8, rank=10)
    state = TreeState(nodes)
    assert sorted(choose(state, None, 3)) == [8, 9, 10]
    boxes = choose(state, None, 100, collapsed={9})
    assert 10 not in boxes and boxes[9].hidden == 1
