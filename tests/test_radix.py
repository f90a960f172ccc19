"""The radix tree: its promises one by one, then against a model too simple to be wrong, then its costs."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.events import EventLog
from minisgl.radix import NullCache, RadixTree

POLICIES = ["lru", "lfu", "fifo", "mru", "priority"]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def span(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int32)


def ids(tree: RadixTree) -> set[int]:
    return {node.id for node in tree.nodes()}


# ------------------------------------------------------------------------------------------- match and insert


def test_an_empty_tree_matches_nothing():
    tree = RadixTree()
    match = tree.match(ints(1, 2, 3))
    assert match.node is tree.root and match.length == 0 and match.slots.tolist() == []
    assert tree.match_length([1, 2]) == 0 and tree.total == 0 and tree.evict(10).tolist() == []
    tree.check()


def test_no_tokens_match_the_root_and_insert_nothing():
    tree = RadixTree()
    tree.insert([1, 2], [10, 11])
    version = tree.version
    match, insert = tree.match([]), tree.insert([], [])
    assert match.node is tree.root and match.length == 0 and match.slots.dtype == np.int32
    assert insert.node is tree.root and insert.matched == 0 and insert.slots.tolist() == []
    assert tree.version == version and tree.total == 2
    tree.lock(match.node)
    tree.unlock(match.node)
    tree.check()


def test_the_split_of_the_module_docstring():
    tree = RadixTree()
    first = tree.insert(ints(1, 2, 3, 4), ints(1, 2, 3, 4))
    second = tree.insert(ints(1, 2, 9), ints(5, 6, 7))
    assert (first.node.id, second.node.id) == (1, 3)
    assert second.matched == 2 and second.slots.tolist() == [1, 2, 7]
    upper = second.node.parent
    assert upper is first.node.parent and upper is not None and upper.id == 2
    assert (upper.key.tolist(), upper.slots.tolist()) == ([1, 2], [1, 2])
    assert (first.node.key.tolist(), first.node.slots.tolist()) == ([3, 4], [3, 4])
    assert (second.node.key.tolist(), second.node.slots.tolist()) == ([9], [7])
    assert tree.total == 5 and tree.num_nodes == 3
    tree.check()


def test_a_match_inside_an_edge_splits_it_so_that_the_node_ends_there():
    tree = RadixTree()
    deep = tree.insert([1, 2, 3, 4, 5], [11, 12, 13, 14, 15]).node
    match = tree.match([1, 2, 3, 9, 9, 9])
    assert match.length == 3 and match.slots.tolist() == [11, 12, 13]
    assert match.node.key.tolist() == [1, 2, 3] and deep.parent is match.node
    assert tree.match([1, 2]).length == 2  # the query ends inside the edge
    assert tree.match([1, 2, 3, 4, 5, 6]).node is deep  # the query goes on after the last edge
    assert tree.num_nodes == 3 and tree.total == 5
    tree.check()


def test_match_length_changes_nothing():
    tree = RadixTree()
    tree.insert([1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
    before = tree.snapshot()
    assert [tree.match_length(q) for q in ([1, 2, 3], [1, 2, 3, 4, 5, 6], [2], [], [1, 9])] == [3, 5, 0, 0, 1]
    assert tree.snapshot() == before


def test_inserting_what_is_there_takes_nothing():
    tree = RadixTree()
    first = tree.insert([1, 2, 3], [10, 11, 12])
    version = tree.version
    again = tree.insert([1, 2, 3], [20, 21, 22])
    assert again.node is first.node and again.matched == 3 and again.slots.tolist() == [10, 11, 12]
    assert tree.version == version and tree.total == 3
    assert tree.flush().tolist() == [10, 11, 12]


def test_inserting_a_prefix_splits_so_that_its_node_can_be_locked_alone():
    tree = RadixTree()
    deep = tree.insert([1, 2, 3, 4], [10, 11, 12, 13]).node
    prefix = tree.insert([1, 2], [20, 21])
    assert prefix.matched == 2 and prefix.slots.tolist() == [10, 11] and deep.parent is prefix.node
    tree.lock(prefix.node)
    assert (tree.locked, tree.evictable) == (2, 2)
    assert tree.evict(100).tolist() == [12, 13]


def test_extending_a_leaf_keeps_its_node():
    tree = RadixTree()
    short = tree.insert([1, 2], [10, 11])
    long = tree.insert([1, 2, 3, 4], [10, 11, 12, 13])
    assert long.matched == 2 and long.node.parent is short.node
    assert long.node.slots.tolist() == [12, 13] and tree.total == 4


def test_the_tree_owns_copies_and_gives_copies():
    tree = RadixTree()
    tokens, slots = ints(1, 2, 3, 4), ints(10, 11, 12, 13)
    insert = tree.insert(tokens, slots)
    tokens[:], slots[:], insert.slots[:] = 9, 9, 9
    match = tree.match([1, 2])
    match.slots[:] = 0
    assert tree.match([1, 2, 3, 4]).slots.tolist() == [10, 11, 12, 13]
    for node in tree.nodes():
        assert not node.slots.flags.writeable and not node.key.flags.writeable
        with pytest.raises(ValueError):
            node.slots[0] = 7
    # A split must not keep the whole edge's memory alive through views.
    assert [node.slots.nbytes for node in tree.nodes()] == [8, 8]
    assert all(node.slots.base is None for node in tree.nodes())
    tree.check()


def test_version_grows_with_structure_only():
    tree = RadixTree()
    seen = [tree.version]

    def changed() -> bool:
        seen.append(tree.version)
        assert seen[-1] >= seen[-2]
        return seen[-1] > seen[-2]

    node = tree.insert([1, 2, 3, 4], [1, 2, 3, 4]).node
    assert changed()
    tree.match([1, 2, 3, 4])
    tree.lock(node)
    tree.unlock(node)
    assert not changed()
    tree.match([1, 2])
    assert changed()
    tree.evict(1)
    assert changed()


def test_any_integer_sequence_will_do():
    tree = RadixTree()
    tree.insert([5, -6, 2**31 - 1], (1, 2, 3))
    strided = span(0, 6)[::2]
    tree.insert(strided, strided + 10)
    assert tree.match(np.array([5, -6, 2**31 - 1], np.int64)).slots.tolist() == [1, 2, 3]
    assert tree.match(np.array([0, 2, 4], np.uint8)).slots.tolist() == [10, 12, 14]
    tree.check()


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "tokens must be integers, got float64"),
        ("abc", ValueError, "tokens must be one-dimensional"),
        ([[1, 2]], ValueError, "tokens must be one-dimensional"),
        ([1, 2**31], ValueError, "tokens must fit 32 bits"),
        (np.array([2**32 + 5]), ValueError, "tokens must fit 32 bits"),
        ([True], TypeError, "tokens must be integers"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens, error, message):
    tree = RadixTree()
    with pytest.raises(error, match=message):
        tree.match(tokens)
    with pytest.raises(error, match=message):
        tree.insert(tokens, [1])
    assert tree.total == 0


def test_bad_slots_and_policies_are_refused():
    tree = RadixTree()
    with pytest.raises(ValueError, match="2 slots for 3 tokens"):
        tree.insert([1, 2, 3], [1, 2])
    with pytest.raises(TypeError, match="slots must be integers"):
        tree.insert([1], [0.5])
    with pytest.raises(ValueError, match="eviction must be one of lru, lfu, fifo, mru, priority, got 'best'"):
        RadixTree(eviction="best")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ locks


def test_a_lock_survives_splits_above_and_below():
    tree = RadixTree()
    node = tree.insert(span(0, 10), span(10, 20)).node
    tree.lock(node)
    assert (tree.locked, tree.evictable) == (10, 0)
    upper = tree.match(span(0, 6)).node
    top = tree.insert([0, 1, 2, 99], [50, 51, 52, 53]).node.parent
    assert top is not None and upper.parent is top and node.parent is upper
    assert [n.lock_count for n in (node, upper, top)] == [1, 1, 1]
    tree.lock(upper)
    assert [n.lock_count for n in (node, upper, top)] == [1, 2, 2]
    assert (tree.locked, tree.evictable) == (10, 1)
    assert tree.evict(100).tolist() == [53]
    tree.check()
    tree.unlock(node)
    assert (tree.locked, tree.evictable) == (6, 4)
    assert tree.evict(100).tolist() == [16, 17, 18, 19]
    tree.unlock(upper)
    assert tree.evict(1).tolist() == [13, 14, 15] and tree.evict(1).tolist() == [10, 11, 12]
    tree.check()


def test_two_locks_need_two_unlocks():
    tree = RadixTree()
    node = tree.insert([1, 2], [1, 2]).node
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(2).tolist() == []
    tree.unlock(node)
    assert tree.evict(2).tolist() == [1, 2]


def test_locks_that_cannot_be_are_refused():
    tree = RadixTree()
    node = tree.insert([1, 2], [1, 2]).node
    with pytest.raises(ValueError, match="node #1 is not locked"):
        tree.unlock(node)
    tree.evict(2)
    with pytest.raises(ValueError, match="node #1 is not in the tree"):
        tree.lock(node)
    assert tree.total == 0
    tree.check()


# --------------------------------------------------------------------------------------------------- eviction


def test_eviction_takes_whole_leaves_until_enough():
    tree = RadixTree()
    tree.insert([1, 2, 3, 4], [1, 2, 3, 4])
    tree.insert([5, 6, 7, 8], [5, 6, 7, 8])
    assert tree.evict(0).tolist() == [] and tree.evict(-3).tolist() == []
    assert tree.evict(5).tolist() == span(1, 9).tolist()
    tree.insert([1, 2, 3, 4], [1, 2, 3, 4])
    tree.insert([5, 6, 7, 8], [5, 6, 7, 8])
    freed = tree.evict(4)
    assert freed.tolist() == [1, 2, 3, 4] and freed.dtype == np.int32 and tree.total == 4


def test_parents_that_become_leaves_go_in_the_same_call():
    tree = RadixTree()
    tree.insert([1, 2, 3], [1, 2, 3])
    tree.insert([1, 2, 4], [1, 2, 4])
    tree.insert([9], [9])
    assert tree.evict(4).tolist() == [3, 4, 1, 2]  # [1 2] was last used before [9]
    assert tree.flush().tolist() == [9]


def build_three(policy: str) -> RadixTree:
    """Leaves 1, 2 and 3, made in this order; 1 matched twice, 2 never, 3 once; 2 matters most, 3 least."""
    tree = RadixTree(policy)  # type: ignore[arg-type]
    for token, priority in ((1, 5), (2, 9), (3, -1)):
        tree.insert([token], [token], priority)
    for token in (1, 3, 1):
        tree.match([token])
    return tree


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [2, 3, 1]),
        ("lfu", [2, 3, 1]),
        ("fifo", [1, 2, 3]),
        ("mru", [1, 3, 2]),
        ("priority", [3, 1, 2]),
    ],
)
def test_the_order_of_each_policy(policy, order):
    tree = build_three(policy)
    assert [tree.evict(1).item() for _ in range(3)] == order
    assert build_three(policy).flush().tolist() == order


def test_lfu_and_priority_fall_back_on_recency():
    for policy in ("lfu", "priority"):
        tree = RadixTree(policy)  # type: ignore[arg-type]
        for token in (1, 2, 3):
            tree.insert([token], [token])
        tree.insert([1], [1])
        assert tree.flush().tolist() == [2, 3, 1], policy


def test_priority_of_a_shared_prefix_is_the_highest_of_its_users():
    tree = RadixTree("priority")
    tree.insert([1, 2, 3], [1, 2, 3], priority=1)
    tree.insert([1, 2, 4], [1, 2, 4], priority=7)
    tree.insert([5], [5], priority=4)
    assert tree.flush().tolist() == [3, 5, 4, 1, 2]


def test_flush_leaves_what_is_locked():
    tree = RadixTree()
    tree.insert([1, 2, 3, 4], [1, 2, 3, 4])
    held = tree.match([1, 2]).node
    tree.insert([7, 8], [7, 8])
    tree.lock(held)
    assert sorted(tree.flush().tolist()) == [3, 4, 7, 8]
    assert (tree.total, tree.locked, tree.evictable) == (2, 2, 0)
    tree.unlock(held)
    assert tree.flush().tolist() == [1, 2] and tree.num_nodes == 0
    tree.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_heap_stays_in_proportion_to_the_tree(policy):
    tree = RadixTree(policy)
    for token in range(50):
        tree.insert([token, token], [2 * token, 2 * token + 1])
    for round in range(200):
        node = tree.match([round % 50, round % 50]).node
        tree.lock(node)
        tree.unlock(node)
        assert len(tree._heap) <= 2 * tree.num_nodes + 64
    tree.evict(80)
    assert len(tree._heap) <= 2 * tree.num_nodes + 64
    tree.check()


def test_evicted_nodes_are_not_kept_alive():
    tree = RadixTree("mru")
    for token in range(100):
        tree.insert([token, token], [2 * token, 2 * token + 1])
        tree.match([token, token])
    tree.flush()
    assert len(tree._heap) <= 64 and tree.root.children == {}


# ----------------------------------------------------------------------------------- known defects of engines


def test_case_radix_lock_skips_own_node():
    tree = RadixTree()
    tree.insert(span(1, 9), span(1, 9))
    handle = tree.match(span(1, 9))
    tree.lock(handle.node)
    assert tree.evict(8).tolist() == []
    assert (tree.locked, tree.evictable) == (8, 0) and handle.node.lock_count == 1
    tree.unlock(handle.node)
    assert len(tree.evict(8)) == 8


def test_case_radix_match_returns_root():
    tree = RadixTree()
    tree.insert([1, 2, 3], [10, 11, 12])
    tree.insert([1, 2, 4], [20, 21, 22])
    handle = tree.match([1, 2, 4])
    assert handle.length == 3 and handle.slots.tolist() == [10, 11, 22]
    assert handle.node.key.tolist() == [4] and handle.node.parent is not tree.root
    tree.lock(handle.node)
    path = [handle.node, handle.node.parent]
    assert [node.lock_count for node in path if node] == [1, 1]
    assert tree.root.lock_count == 0 and (tree.locked, tree.evictable) == (3, 1)


def test_case_radix_duplicate_prefix_stale_page_table():
    """The tree's part: the second of two equal prefixes learns which slots are canonical, which its own."""
    tree, prompt = RadixTree(), span(1000, 1064)
    table_a, table_b = span(1, 65), span(65, 129)
    a, b = tree.insert(prompt, table_a), tree.insert(prompt, table_b)
    assert (a.matched, b.matched) == (0, 64)
    duplicates = table_b[: b.matched].copy()
    table_b[:] = b.slots  # moved first, freed afterwards
    assert table_b.tolist() == table_a.tolist()
    assert not set(duplicates.tolist()) & {slot for node in tree.nodes() for slot in node.slots.tolist()}
    tree.check()


def test_case_radix_evict_units_page_size():
    """One token is one slot is one page: asking for 12 tokens frees at least 12 slots, and none is lost."""
    tree = RadixTree()
    for prompt in range(8):
        tree.insert(span(10 * prompt, 10 * prompt + 4), span(4 * prompt + 1, 4 * prompt + 5))
    free = tree.evict(12).tolist()
    assert len(free) == 12 and len(set(free)) == 12
    assert len(free) + tree.evictable + tree.locked == 32


# Case evict-scans-whole-tree is test_evicting_one_leaf_at_a_time_does_not_walk_the_tree, below.


# ---------------------------------------------------------------------------------------- events and pictures


def replay(log: EventLog) -> dict[int, tuple[int, list[int], list[int]]]:
    """What a visualiser does: node id -> (parent id, tokens, slots), from the events alone."""
    nodes: dict[int, tuple[int, list[int], list[int]]] = {}
    for event in log:
        f = event.fields
        if event.kind == "insert" and len(f["tokens"]):
            nodes[f["node"]] = (f["parent"], f["tokens"].tolist(), f["slots"].tolist())
        elif event.kind == "split":
            parent, tokens, slots = nodes[f["node"]]
            cut = len(f["tokens"])
            assert (parent, tokens) == (f["parent"], f["tokens"].tolist() + f["rest"].tolist())
            nodes[f["upper"]] = (parent, tokens[:cut], slots[:cut])
            nodes[f["node"]] = (f["upper"], tokens[cut:], slots[cut:])
        elif event.kind == "evict":
            assert nodes.pop(f["node"]) == (f["parent"], f["tokens"].tolist(), f["slots"].tolist())
    return nodes


def test_events_are_enough_to_rebuild_the_tree():
    log, rng = EventLog(), np.random.default_rng(0)
    tree, slot = RadixTree(events=log), 1
    for _ in range(300):
        query = rng.integers(0, 3, rng.integers(0, 12)).astype(np.int32)
        match = tree.match(query)
        new = span(slot, slot + len(query) - match.length)
        slot += len(new)
        tree.insert(query, np.concatenate([match.slots, new]))
        if rng.random() < 0.3:
            tree.evict(int(rng.integers(1, 10)))
    expected = {
        node.id: (node.parent.id if node.parent else -1, node.key.tolist(), node.slots.tolist())
        for node in tree.nodes()
    }
    assert replay(log) == expected


def test_fields_of_match_and_lock_events():
    log = EventLog()
    tree = RadixTree(events=log)
    tree.insert([1, 2, 3, 4], [1, 2, 3, 4])
    node = tree.match([1, 2, 9]).node
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    kinds = [event.kind for event in log]
    assert kinds == ["insert", "split", "match", "lock", "lock", "unlock"]
    match, lock, again, unlock = list(log)[2:]
    assert match.fields == {"node": 2, "length": 2, "asked": 3, "path": [2]}
    assert lock.fields == {"node": 2, "lock_count": 1, "tokens": 2}
    assert again.fields == {"node": 2, "lock_count": 2, "tokens": 0}
    assert unlock.fields == {"node": 2, "lock_count": 1, "tokens": 0}


def test_pictures():
    tree = RadixTree()
    assert tree.pretty() == "RadixTree(lru: 0 tokens in 0 nodes, 0 evictable, 0 locked)"
    tree.insert([1, 2, 3, 4], [1, 2, 3, 4])
    node = tree.insert([1, 2, 9], [1, 2, 7]).node
    tree.insert(span(20, 40), span(20, 40))
    tree.lock(node)
    assert tree.pretty(max_tokens=3).splitlines() == [
        "RadixTree(lru: 25 tokens in 4 nodes, 22 evictable, 3 locked)",
        "├── #2 [1 2] 2 tokens, 1 lock",
        "│   ├── #1 [3 4] 2 tokens",
        "│   └── #3 [9] 1 token, 1 lock",
        "└── #4 [20 21 22]… 20 tokens",
    ]
    letters: Callable[[list[int]], str] = lambda tokens: "".join(chr(96 + t) for t in tokens)  # noqa: E731
    assert "#2 'ab' 2 tokens" in tree.pretty(decode=letters)
    assert repr(node) == "Node(#3, 1 tokens, 0 children, 1 locks)"


def test_snapshot_is_plain_data():
    tree = RadixTree("lfu")
    tree.insert([1, 2, 3, 4], [1, 2, 3, 4], priority=2)
    tree.match([1, 2])
    snapshot = json.loads(json.dumps(tree.snapshot()))
    assert (snapshot["eviction"], snapshot["total"], snapshot["num_nodes"]) == ("lfu", 4, 2)
    upper = snapshot["root"]["children"][0]
    assert (upper["tokens"], upper["slots"], upper["hits"], upper["priority"]) == ([1, 2], [1, 2], 1, 2)
    assert [child["tokens"] for child in upper["children"]] == [[3, 4]]


def test_the_null_cache_stores_nothing():
    cache = NullCache()
    assert not cache.stores and RadixTree().stores
    slots = ints(4, 5, 6)
    insert = cache.insert([1, 2, 3], slots)
    assert insert.node is cache.root and insert.matched == 0 and insert.slots.tolist() == [4, 5, 6]
    match = cache.match([1, 2, 3])
    assert match.node is cache.root and match.length == 0 and cache.match_length([1, 2, 3]) == 0
    cache.lock(match.node)
    cache.unlock(match.node)
    assert (cache.total, cache.evictable, cache.locked, cache.version) == (0, 0, 0, 0)
    assert cache.evict(5).tolist() == [] and cache.flush().tolist() == []
    with pytest.raises(ValueError, match="1 slots for 2 tokens"):
        cache.insert([1, 2], [1])
    cache.check()
    assert repr(cache) == "NullCache(lru: 0 tokens in 0 nodes, 0 evictable, 0 locked)"


# ----------------------------------------------------------------------------------- check finds what's wrong


def break_ledger(tree):
    tree.evictable += 1


def break_locks(tree):
    next(node for node in tree.nodes() if not node.children).lock_count += 1


def break_first_token(tree):
    tree.root.children[77] = tree.root.children.pop(1)


def break_parent(tree):
    next(node for node in tree.nodes() if not node.children).parent = tree.root


def break_length(tree):
    next(tree.nodes()).length += 1


def break_ownership(tree):
    node = next(tree.nodes())
    node.slots = node.slots[:]


def break_protection(tree):
    next(tree.nodes()).slots.setflags(write=True)


def break_uniqueness(tree):
    tree.insert([50, 51], [1, 60])


def break_heap(tree):
    tree._heap.clear()


def break_recency(tree):
    next(node for node in tree.nodes() if not node.children).last_access += 100


def break_count(tree):
    tree.num_nodes += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_ledger, "invariant 2: the ledger"),
        (break_locks, "invariant 2: .* fewer locks than its children"),
        (break_first_token, "invariant 3: .* under the wrong token"),
        (break_parent, "another parent"),
        (break_length, "invariant 3: length, key and slots"),
        (break_ownership, "invariant 3: .* own its slots"),
        (break_protection, "invariant 3: .* own its slots"),
        (break_uniqueness, "invariant 3: a slot is stored twice"),
        (break_heap, "invariant 2: eviction cannot find"),
        (break_recency, "invariant 2: .* used without it"),
        (break_count, "num_nodes"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_check_names_what_is_wrong(damage, message):
    tree = RadixTree()
    tree.insert([1, 2, 3], [1, 2, 3])
    tree.insert([1, 2, 4], [1, 2, 4])
    tree.check()
    damage(tree)
    with pytest.raises(AssertionError, match=message):
        tree.check()


# -------------------------------------------------------------------------------- against a model of prefixes

Tokens = tuple[int, ...]


@dataclass
class Stored:
    """What the model knows of one token, by the whole prefix that ends with it."""

    slot: int
    created: int
    last: int
    priority: int
    hits: int = 0
    ends_node: bool = False


class PrefixModel:
    """The specification, without a tree: from every stored prefix to its last token's slot and history.

    Nodes are only marks on prefixes; nothing is kept up to date, everything is found by looking at all.
    """

    def __init__(self, policy: str) -> None:
        self.policy, self.tick = policy, 0
        self.stored: dict[Tokens, Stored] = {}
        self.locks: list[Tokens] = []

    def match_length(self, tokens: Tokens) -> int:
        return max(n for n in range(len(tokens) + 1) if n == 0 or tokens[:n] in self.stored)

    def touch(self, tokens: Tokens, hits: int) -> int:
        length = self.match_length(tokens)
        self.tick += 1
        for n in range(1, length + 1):
            token = self.stored[tokens[:n]]
            token.last, token.hits = self.tick, token.hits + hits
        if length:
            self.stored[tokens[:length]].ends_node = True
        return length

    def insert(self, tokens: Tokens, slots: list[int], priority: int) -> int:
        matched = self.touch(tokens, hits=0)
        for n in range(1, len(tokens) + 1):
            if n > matched:
                self.stored[tokens[:n]] = Stored(slots[n - 1], self.tick, self.tick, priority)
            self.stored[tokens[:n]].priority = max(self.stored[tokens[:n]].priority, priority)
        if tokens:
            self.stored[tokens].ends_node = True
        return matched

    def slots(self, tokens: Tokens) -> list[int]:
        return [self.stored[tokens[:n]].slot for n in range(1, len(tokens) + 1)]

    def nodes(self) -> dict[Tokens, Tokens]:
        """Prefix at which a node ends -> prefix at which its parent ends."""
        ends = {prefix for prefix, token in self.stored.items() if token.ends_node}
        return {
            end: max((end[:n] for n in range(len(end)) if n == 0 or end[:n] in ends), key=len) for end in ends
        }

    def is_locked(self, prefix: Tokens) -> bool:
        return any(locked[: len(prefix)] == prefix for locked in self.locks)

    def rank(self, prefix: Tokens):
        token = self.stored[prefix]
        return {
            "lru": (token.last,),
            "lfu": (token.hits, token.last),
            "fifo": (token.created,),
            "mru": (-token.last,),
            "priority": (token.priority, token.last),
        }[self.policy]

    def evict(self, n_tokens: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < n_tokens:
            nodes = self.nodes()
            leaves = [end for end in nodes if end not in nodes.values() and not self.is_locked(end)]
            if not leaves:
                break
            victim = min(leaves, key=self.rank)
            parts = [victim[:n] for n in range(len(nodes[victim]) + 1, len(victim) + 1)]
            freed += [self.stored.pop(part).slot for part in parts]
        return freed


TOKENS = st.lists(st.sampled_from([0, 1, 2, -5]), max_size=10).map(tuple)


class TreeAgainstModel(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy):
        self.tree = RadixTree(policy, events=EventLog())
        self.model = PrefixModel(policy)
        self.held = []  # (node, prefix) of each lock
        self.next_slot = 1

    def known(self, data, label) -> Tokens:
        """A query that often has to do with what is stored."""
        if self.model.stored and data.draw(st.booleans(), label="known"):
            prefix = data.draw(st.sampled_from(sorted(self.model.stored)), label=label)
            return prefix + data.draw(TOKENS, label="then")[:3]
        return data.draw(TOKENS, label=label)

    @rule(data=st.data(), priority=st.integers(-2, 2), reuse=st.booleans())
    def insert(self, data, priority, reuse):
        tokens = self.known(data, "insert")
        slots = list(range(self.next_slot, self.next_slot + len(tokens)))
        self.next_slot += len(tokens)
        if reuse:  # as a request does that got its prefix from the tree
            known = self.model.slots(tokens[: self.model.match_length(tokens)])
            slots[: len(known)] = known
        expected = self.model.insert(tokens, slots, priority)
        got = self.tree.insert(ints(*tokens), ints(*slots), priority)
        assert got.matched == expected and got.slots.tolist() == self.model.slots(tokens)

    @rule(data=st.data(), lock=st.booleans())
    def match(self, data, lock):
        tokens = self.known(data, "match")
        length = self.model.touch(tokens, hits=1)
        got = self.tree.match(ints(*tokens))
        assert got.length == length and got.slots.tolist() == self.model.slots(tokens[:length])
        if lock:
            self.tree.lock(got.node)
            self.held.append((got.node, tokens[:length]))
            self.model.locks.append(tokens[:length])

    @rule(data=st.data())
    def match_length(self, data):
        tokens = self.known(data, "ask")
        assert self.tree.match_length(ints(*tokens)) == self.model.match_length(tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data):
        node, prefix = self.held.pop(data.draw(st.integers(0, len(self.held) - 1), label="which"))
        self.model.locks.remove(prefix)
        self.tree.unlock(node)

    @rule(n_tokens=st.integers(0, 12))
    def evict(self, n_tokens):
        assert self.tree.evict(n_tokens).tolist() == self.model.evict(n_tokens)

    @rule()
    def flush(self):
        assert self.tree.flush().tolist() == self.model.evict(len(self.model.stored))
        assert self.tree.evictable == 0

    @invariant()
    def agree(self):
        self.tree.check()
        ends, slots = {}, {}
        for node in self.tree.nodes():
            assert node.parent is not None
            above = ends.get(node.parent.id, ())
            ends[node.id] = above + tuple(node.key.tolist())
            slots.update({ends[node.id][: len(above) + i + 1]: s for i, s in enumerate(node.slots.tolist())})
            assert node.lock_count == sum(
                held[: len(ends[node.id])] == ends[node.id] for held in self.model.locks
            )
            known = self.model.stored[ends[node.id]]
            assert (node.hits, node.last_access) == (known.hits, known.last)
            assert (node.created, node.priority) == (known.created, known.priority)
        assert slots == {prefix: token.slot for prefix, token in self.model.stored.items()}
        assert set(ends.values()) == set(self.model.nodes())
        assert self.tree.locked == sum(map(self.model.is_locked, self.model.stored))
        assert all(ends.get(node.id, ()) == prefix for node, prefix in self.held)  # handles outlive splits
        assert len(replay(self.tree.events)) == self.tree.num_nodes


TreeAgainstModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_the_tree_behaves_like_a_dictionary_of_prefixes = TreeAgainstModel.TestCase


@pytest.mark.parametrize("policy", POLICIES)
def test_long_random_lives_agree_with_the_model(policy):
    """Longer than hypothesis goes: 600 requests, eviction holding the tree at a size as in an engine."""
    rng = np.random.default_rng(POLICIES.index(policy))
    tree, model, held, slot = RadixTree(policy), PrefixModel(policy), [], 1
    for _ in range(600):
        tokens = tuple(rng.integers(0, 3, rng.integers(1, 14)).tolist())
        length = model.touch(tokens, hits=1)
        match = tree.match(ints(*tokens))
        assert match.length == length
        tree.lock(match.node)
        model.locks.append(tokens[:length])
        if tree.total > 60:
            assert tree.evict(15).tolist() == model.evict(15)
        slots = match.slots.tolist() + list(range(slot, slot + len(tokens) - length))
        slot += len(tokens)
        priority = int(rng.integers(0, 3))
        model.insert(tokens, slots, priority)
        tree.insert(ints(*tokens), ints(*slots), priority)
        held.append((match.node, tokens[:length]))
        if len(held) > 4:
            node, prefix = held.pop(int(rng.integers(len(held))))
            tree.unlock(node)
            model.locks.remove(prefix)
        tree.check()
        assert tree.total == len(model.stored)
    for node, _ in held:
        tree.unlock(node)
    model.locks.clear()
    assert tree.locked == 0 and tree.flush().tolist() == model.evict(10**6) and tree.num_nodes == 0


# ------------------------------------------------------------------------------------------------------ costs
# In processor time of this process, with bounds five times what is promised: a machine that is busy with
# other things must not fail them.


def best_of(runs: int, call: Callable[[], object]) -> float:
    times = []
    for _ in range(runs):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def comb(depth: int, nodes: int, length: int) -> tuple[RadixTree, np.ndarray]:
    """One prompt of `length` tokens over `depth` nodes, with short branches off it: `nodes` nodes in all."""
    rng, tree = np.random.default_rng(0), RadixTree()
    prompt, step = rng.integers(0, 50_000, length).astype(np.int32), length // depth
    own = span(0, length)
    tree.insert(prompt, own)
    for end in range(length - step, 0, -step):
        tree.match(prompt[:end])
    while tree.num_nodes < nodes:
        at, i = int(rng.integers(min(depth, 10))) * step, tree.num_nodes
        branch = np.concatenate([prompt[:at], ints(60_000 + i), rng.integers(0, 50_000, 9).astype(np.int32)])
        tree.insert(branch, np.concatenate([own[:at], span(length + 10 * i, length + 10 * i + 10)]))
    return tree, prompt


def forest(groups: int, leaves: int, policy: str = "lru") -> RadixTree:
    """`groups` nodes of 4 tokens, each above `leaves` leaves of 4 tokens, made in random order."""
    tree, rng = RadixTree(policy), np.random.default_rng(0)  # type: ignore[arg-type]
    for i in rng.permutation(groups * leaves).tolist():
        group, leaf = divmod(i, leaves)
        tree.insert(ints(group, 1, 2, 3, leaf, 4, 5, 6), span(8 * i, 8 * i + 8))
    return tree


@pytest.mark.parametrize("depth", [1, 100, 1000])
def test_a_long_prompt_matches_in_a_large_tree_within_a_millisecond(depth):
    tree, prompt = comb(depth, nodes=10_000, length=100_000)
    assert tree.match(prompt).length == len(prompt)
    assert best_of(5, lambda: tree.match(prompt)) < 5e-3
    other = prompt.copy()
    other[-1] += 1
    assert tree.match_length(other) == len(prompt) - 1
    assert best_of(5, lambda: tree.match_length(other)) < 5e-3


def test_a_short_prompt_matches_in_microseconds():
    tree, prompt = comb(depth=5, nodes=50, length=1000)
    node = tree.match(prompt).node

    def one_request() -> None:
        for _ in range(200):
            slots = tree.match(prompt).slots
            tree.lock(node)
            tree.insert(prompt, slots)
            tree.unlock(node)

    assert best_of(5, one_request) / 200 < 5 * 30e-6


def test_splitting_and_inserting_a_long_prompt_is_no_loop_over_tokens():
    prompt, slots = span(0, 100_000), span(0, 100_000)

    def insert_and_split() -> None:
        tree = RadixTree()
        tree.insert(prompt, slots)
        assert tree.match(np.concatenate([prompt[:60_000], ints(7)])).length == 60_000

    assert best_of(5, insert_and_split) < 5 * 2e-3


@pytest.mark.parametrize(("policy", "groups"), [("lru", 1000), *((policy, 200) for policy in POLICIES[1:])])
def test_ten_thousand_evictions_of_a_hundred_thousand_nodes(policy, groups):
    """The other policies in a fifth of the size: the heap is the same one."""
    tree, evictions = forest(groups, 99, policy), 10 * groups
    assert tree.num_nodes == 100 * groups
    start = time.process_time()
    for _ in range(evictions):
        tree.evict(1)
    assert time.process_time() - start < 5 * 10e-6 * evictions
    assert tree.num_nodes == 90 * groups
    assert tree.evict(40 * groups).size == 40 * groups
    tree.check()


def test_evicting_one_leaf_at_a_time_does_not_walk_the_tree():
    """Case evict-scans-whole-tree: 1000 evictions of one leaf in 50,000 nodes, least recently used first."""
    tree = forest(500, 99)
    leaves = [node for node in tree.nodes() if not node.children]
    order = sorted(leaves, key=lambda node: node.last_access)[:1000]
    walk = best_of(3, lambda: list(tree.nodes()))
    start = time.process_time()
    freed = [tree.evict(1) for _ in range(1000)]
    took = time.process_time() - start
    assert [slots.tolist() for slots in freed] == [node.slots.tolist() for node in order]
    assert took < 0.05 * 1000 * walk


def test_a_deep_tree_needs_no_recursion():
    tree, tokens = RadixTree(), span(0, 3000)
    tree.insert(tokens, tokens)
    for end in range(2999, 0, -1):
        assert tree.match(tokens[:end]).length == end
    assert tree.num_nodes == 3000
    tree.check()
    tree.snapshot()
    assert len(tree.pretty().splitlines()) == 3001
    tree.lock(tree.match(tokens).node)
    assert tree.evictable == 0
    del tree
    gc.collect()
