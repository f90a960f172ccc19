"""The router's tree against a naive model, and its bounds."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.router_tree import NODE_COST, PrefixTree, common_prefix, ids_key

KEYS = st.text(alphabet="ab€", min_size=0, max_size=12)


class Naive:
    """All prefixes that were inserted, with the time at which each was last a part of an insert."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}
        self.time = 0

    def insert(self, key: str) -> None:
        self.time += 1
        for end in range(1, len(key) + 1):
            self.used[key[:end]] = self.time

    def match(self, key: str) -> int:
        return next(end for end in range(len(key), -1, -1) if not end or key[:end] in self.used)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(KEYS, KEYS), max_size=25))
def test_match_and_size_equal_the_naive_model(steps):
    tree, naive = PrefixTree(), Naive()
    for key, query in steps:
        tree.insert(key)
        naive.insert(key)
        tree.check()
        assert tree.match(query) == naive.match(query)
        assert tree.match(key) == len(key)
        assert tree.chars == len(naive.used)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(KEYS, st.none()), max_size=30))
def test_eviction_takes_the_least_recently_used_leaf(steps):
    """None evicts.  What goes is one run of characters, all last used at the earliest time of any leaf."""
    tree, naive = PrefixTree(), Naive()
    for key in steps:
        if key is not None:
            tree.insert(key)
            naive.insert(key)
            continue
        leaves = [p for p in naive.used if not any(q != p and q.startswith(p) for q in naive.used)]
        dropped = tree.evict()
        tree.check()
        if not leaves:
            assert dropped == 0
            continue
        oldest = min(leaves, key=naive.used.__getitem__)
        gone = [oldest[:end] for end in range(len(oldest), len(oldest) - dropped, -1)]
        assert dropped > 0 and all(prefix in naive.used for prefix in gone)
        assert not any(q not in gone and q.startswith(gone[-1]) for q in naive.used), "dropped what others share"
        for prefix in gone:
            del naive.used[prefix]
        assert tree.match(oldest) == naive.match(oldest)
        assert tree.chars == len(naive.used)


@given(st.text(alphabet="ab", max_size=40), st.text(alphabet="ab", max_size=40), st.integers(0, 5))
def test_common_prefix(key, text, at):
    at = min(at, len(key))
    same = [a == b for a, b in zip(key[at:], text)]
    assert common_prefix(key, at, text) == (same.index(False) if False in same else len(same))


def test_ids_are_one_character_each():
    ids = [0, 65, 0xD800, 0xFEFF, 128_255, 0x10FFFF]
    key = ids_key(ids)
    assert key is not None and [ord(c) for c in key] == ids
    assert ids_key([0xFEFF, 7]) == chr(0xFEFF) + chr(7)  # not taken for a byte order mark
    for wrong in ([-1], [1 << 32], [0x110000], ["a"], [1.5], [None]):
        assert ids_key(wrong) is None


def test_empty_key_changes_nothing():
    tree = PrefixTree()
    tree.insert("")
    assert (tree.match(""), tree.match("a"), tree.cost, tree.evict()) == (0, 0, 0, 0)


def test_nodes_are_charged_for():
    """Prompts that part at every character: the cost counts the memory that nodes take, too."""
    tree = PrefixTree()
    for end in range(1, 200):
        tree.insert("a" * end + "b")
    assert tree.chars < 400 and tree.cost >= 199 * NODE_COST


def test_time_does_not_depend_on_characters():
    """A hundred times longer keys may not take a hundred times longer: no step is per character."""

    def seconds(length: int) -> float:
        tree = PrefixTree()
        stem = "x" * length
        for i in range(50):
            tree.insert(stem + f"{i:04}")
        best = float("inf")
        for _ in range(20):
            began = time.perf_counter()
            for i in range(50):
                assert tree.match(stem + f"{i:04}") == length + 4
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(20_000) < 25 * seconds(200)


@pytest.mark.parametrize("text", ["é", "€", "🌶"])
def test_wide_characters(text):
    tree = PrefixTree()
    tree.insert(text * 10 + "a")
    tree.insert(text * 10 + "b")
    assert tree.match(text * 10) == 10 and tree.match(text * 12) == 10 and tree.chars == 12
