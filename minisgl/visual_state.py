"""What the tree and the pool were at one moment, and what one step changed.

A `TreeState` is nodes and slots; a `Step` keeps what it changed: the nodes as they are after it, those that went, the
slots taken and given back.  That is also all that a player needs: it holds one state and applies steps.

    apply(state before, step)  ->  state after                 made of events by `visual_history`

Nothing here draws, and nothing here needs more than NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Runs = list[tuple[int, int]]  # slots as (first, count)


class NodeView(NamedTuple):
    """A node of the tree as it was at one moment; never changed, only replaced.

    `rank` orders siblings: it is kept by both halves of a split, so that an edge stays in its place.
    """

    id: int
    parent: int
    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    locks: int = 0
    last_access: int = 0
    hits: int = 0
    rank: int = 0
    known: bool = True  # False: made before the log begins, its tokens were never seen

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass
class TreeState:
    """Tree and pool at one moment.  `used`: (slots,) bool, handed out by the allocator; index 0 is the dummy."""

    nodes: dict[int, NodeView] = field(default_factory=dict)
    used: np.ndarray = field(default_factory=lambda: np.zeros(1, bool))
    capacity: int | None = None
    tick: int = 0
    running: tuple[str, ...] = ()
    asked: int = 0
    found: int = 0

    def copy(self) -> TreeState:
        return TreeState(
            dict(self.nodes), self.used.copy(), self.capacity, self.tick, self.running, self.asked, self.found
        )

    @property
    def tokens(self) -> int:
        """Tokens in the tree."""
        return sum(node.length for node in self.nodes.values())

    @property
    def locked(self) -> int:
        return sum(node.length for node in self.nodes.values() if node.locks)

    def children(self) -> dict[int, list[NodeView]]:
        """Node id -> its children in order; the root is 0."""
        found: dict[int, list[NodeView]] = {}
        for node in sorted(self.nodes.values(), key=lambda node: (node.rank, node.id)):
            found.setdefault(node.parent, []).append(node)
        return found

    def path(self, node: int) -> list[int]:
        """Ids from the root's child down to `node`."""
        ids: list[int] = []
        while node in self.nodes:
            ids.append(node)
            node = self.nodes[node].parent
        return ids[::-1]

    def owners(self) -> list[str]:
        """Of slots 1, 2, ...: "free", "tree", "locked" or "running"."""
        owner = np.where(self.used, 3, 0)
        for node in self.nodes.values():
            if node.slots:
                owner[list(node.slots)] = 2 if node.locks else 1
        return [OWNERS[i] for i in owner[1:].tolist()]

    def ensure(self, slot: int) -> None:
        """Make room for this slot's number."""
        if slot >= len(self.used):
            grown = np.zeros(slot + 1, bool)
            grown[: len(self.used)] = self.used
            self.used = grown


OWNERS = ("free", "tree", "locked", "running")


@dataclass
class Step:
    """What one step changed, and how to tell it.

    changed: nodes as they are afterwards.  gone: nodes as they were, in order of eviction.
    pool: (first, count, taken) of the slots that were taken or given back, in order.
    new, hit, split, evicted, lock, unlock: ids to mark, `hit` in order from the root.
    rids: the requests that it is about.  seconds: of `time.perf_counter`.
    """

    kind: str
    title: str
    seconds: float = 0.0
    rids: tuple[str, ...] = ()
    changed: dict[int, NodeView] = field(default_factory=dict)
    gone: list[NodeView] = field(default_factory=list)
    pool: list[tuple[int, int, bool]] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    hit: list[int] = field(default_factory=list)
    split: list[tuple[int, int]] = field(default_factory=list)
    lock: list[int] = field(default_factory=list)
    unlock: list[int] = field(default_factory=list)
    tick: int = 0
    running: tuple[str, ...] = ()
    asked: int = 0
    found: int = 0
    stored: int = 0  # tokens in the tree after it
    busy: int = 0  # slots that are not free after it

    @property
    def hit_rate(self) -> float:
        """Share of the tokens asked for so far that were stored."""
        return self.found / self.asked if self.asked else 0.0

    @property
    def evicted(self) -> list[int]:
        return [node.id for node in self.gone]

    def mark(self, node: int) -> str:
        """ "evicted", "new", "hit", "split" or "" (the strongest of what happened to the node)."""
        if node in self.new:
            return "new"
        if node in self.hit:
            return "hit"
        return "split" if any(node in pair for pair in self.split) else ""

    def __repr__(self) -> str:
        return f"Step({self.kind}: {self.title})"


def apply(state: TreeState, step: Step) -> None:
    """Carry `state` over `step`."""
    for node in step.gone:
        state.nodes.pop(node.id, None)
    state.nodes.update(step.changed)
    for first, count, taken in step.pool:
        state.ensure(first + count - 1)
        state.used[first : first + count] = taken
    for node in step.changed.values():
        if node.slots:
            state.ensure(max(node.slots))
    state.tick, state.running, state.asked, state.found = step.tick, step.running, step.asked, step.found


def from_snapshot(
    snapshot: dict[str, Any],
    free_slots: Iterable[int] | None = None,
    capacity: int | None = None,
    running: Iterable[str] = (),
) -> TreeState:
    """The state that `RadixTree.snapshot` (and the allocator's free slots) describe."""
    state = TreeState(capacity=capacity, tick=snapshot["tick"], running=tuple(running))
    state.ensure(capacity or 0)
    stack = [(child, 0) for child in snapshot["root"]["children"]][::-1]
    while stack:
        node, parent = stack.pop()
        rank = len(state.nodes)  # preorder: siblings stay in their order
        state.nodes[node["id"]] = NodeView(
            node["id"], parent, tuple(node["tokens"]), tuple(node["slots"]), node["lock_count"],
            node["last_access"], node["hits"], rank - (1 << 30),
        )  # fmt: skip
        state.ensure(max(node["slots"]))
        stack += [(child, node["id"]) for child in node["children"]][::-1]
    if free_slots is not None:
        state.used[1:] = True
        state.used[list(free_slots)] = False
    return state


def runs(slots: Iterable[int]) -> Runs:
    """Slot numbers as (first, count), in the order in which they come."""
    found: Runs = []
    for slot in slots:
        slot = int(slot)
        if found and slot == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((slot, 1))
    return found
