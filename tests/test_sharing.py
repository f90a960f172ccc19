"""Shared prefixes of a decode batch: what the planner finds in the tree, and what it makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.radix import RadixTree
from minisgl.sharing import MIN_SEGMENT, PrefixSharing, find_segments, plan_items, worth_it


def locked_nodes(sequences: list[list[int]]):
    """A tree with these sequences, and the node where each ends, locked as a running request locks it."""
    tree, first = RadixTree(), 1
    for tokens in sequences:
        slots = np.arange(first, first + len(tokens), dtype=np.int32)
        inserted = tree.insert(np.array(tokens, np.int32), slots)
        first += len(tokens)
        tree.lock(inserted.node)
    matches = [tree.match(np.array(tokens, np.int32)) for tokens in sequences]
    return [m.node for m in matches], [m.slots for m in matches]


def test_a_tree_of_thought():
    """The example of the module's docstring."""
    problem, a, b = [1] * 400, [2] * 64, [3] * 64
    nodes, _ = locked_nodes([problem + a + [10], problem + a + [11], problem + b])
    segments, own_start = find_segments(nodes)
    found = [(s.start, s.end, s.members) for s in segments]
    assert found == [(0, 400, [0, 1, 2]), (400, 464, [0, 1])]
    assert own_start.tolist() == [464, 464, 400]
    assert worth_it(segments, 3 * 465)


def test_a_short_common_start_goes_to_the_longer_segments_below():
    """All share one token (a BOS, say): no segment of its own, but part of those of the two pairs."""
    left, right = [0, *[1] * 100], [0, *[2] * 100]
    nodes, _ = locked_nodes([[*left, 5], [*left, 6], [*right, 5], [*right, 6]])
    segments, own_start = find_segments(nodes)
    assert [(s.start, s.end, s.members) for s in segments] == [(0, 101, [0, 1]), (0, 101, [2, 3])]
    assert own_start.tolist() == [101] * 4


def test_a_prefix_in_several_nodes_with_the_same_readers_is_one_segment():
    nodes, _ = locked_nodes([[1] * 50 + [2] * 50 + [3], [1] * 50 + [2] * 50 + [4]])
    tree_like, _ = find_segments(nodes)
    assert [(s.start, s.end) for s in tree_like] == [(0, 100)]


def test_nothing_shared_is_nothing_planned():
    nodes, _ = locked_nodes([[i] * 200 for i in range(5)])
    segments, own_start = find_segments([*nodes, None])
    assert segments == [] and not own_start.any() and not worth_it(segments, 1000)


def test_the_cost_rule_wants_a_tenth():
    nodes, _ = locked_nodes([[1] * 100 + [2], [1] * 100 + [3]])
    segments, _ = find_segments(nodes)
    assert worth_it(segments, 999) and not worth_it(segments, 1001)


words = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4).map(lambda w: [t for t in w for _ in range(40)])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(words, min_size=1, max_size=24),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([1, 2, 8, 64]),
)
def test_items_cover_what_is_shared_once(sequences, width, programs, max_pieces):
    """Every decode's pieces, from 0 up, cover [0, own_start) without overlap, at slots that are its own."""
    sequences = [[*tokens, 100 + i] for i, tokens in enumerate(sequences)]
    nodes, slots = locked_nodes(sequences)
    segments, own_start = find_segments(nodes)
    for segment in segments:
        assert len(segment.members) > 1 and segment.end - segment.start >= MIN_SEGMENT
    plan = plan_items(segments, own_start, width=width, programs=programs, max_pieces=max_pieces, max_items=10_000)
    if plan is None:
        assert max_pieces < 4  # deeper chains than pieces
        return
    assert plan.pieces.max(initial=0) <= max_pieces
    seen: dict[int, list[tuple[int, int, int]]] = {i: [] for i in range(len(sequences))}
    for reader, start, end, first, count, piece in plan.items.tolist():
        assert 1 <= count <= width and start < end
        members = plan.members[first : first + count].tolist()
        assert reader in members
        for member in members:
            seen[member].append((piece, start, end))
            assert (slots[member][start:end] == slots[reader][start:end]).all()
    for member, parts in seen.items():
        parts.sort()
        assert [piece for piece, _, _ in parts] == list(range(plan.pieces[member]))
        edges = [0, *(end for _, _, end in parts)]
        assert edges[:-1] == [start for _, start, _ in parts] and edges[-1] == own_start[member]


def test_too_many_items_are_refused():
    nodes, _ = locked_nodes([[1] * 100 + [i + 2] for i in range(10)])
    segments, own_start = find_segments(nodes)
    assert plan_items(segments, own_start, width=2, programs=1, max_pieces=8, max_items=4) is None
    assert plan_items(segments, own_start, width=2, programs=1, max_pieces=8, max_items=5) is not None


def test_a_plan_has_room_in_the_batch_that_attention_is_told():
    """A recorded step is larger than its decodes, and the larger, the fewer pieces of each have room in it."""
    nodes, _ = locked_nodes([[1] * 4000 + [2], [1] * 4000 + [3]])
    state: Any = SimpleNamespace(request=[SimpleNamespace(node=n) for n in nodes], kv_len=np.array([4001, 4001]))
    sharing = PrefixSharing(64, width=4, programs=64, max_pieces=lambda n: 64 // n, device=torch.device("cpu"))
    rows, generation = np.array([0, 1]), np.array([0, 0])

    def most(decodes: int) -> int:
        shared = sharing.plan(rows, generation, state, decodes)
        return 0 if shared is None else int(shared.pieces.max())

    assert most(0) == most(2) == 31
    assert 0 < most(8) <= 8
    assert most(4) == most(8)  # it still fits: kept
    assert most(64) == 1
