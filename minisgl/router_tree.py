"""What the router believes a worker has in its cache: a radix tree over the text it was sent.

A worker's real tree is over tokens, changes with every step, and lives in another process.  The router needs only an
estimate, and can make one by itself: what was sent to a worker is in its cache until the worker runs out of room, and
the worker forgets least recently used first.  So the router keeps, for each worker, a tree of the prompts that it
routed there, with the same replacement rule:

    insert("system A, q1")     root
    insert("system A, q2")       |
    insert("system B")         "system "
                                /      \\
                            "A, q"      "B"            match("system A, q9") = 11 characters
                            /    \\
                          "1"    "2"

Keys are Python strings, over characters for text and over one character per id for token ids (`ids_key`), so that
comparing a node is one C memory comparison and no step of a match is per character.  Where a node differs, the place
is found by bisection.

Every insert makes its path the most recently used, deepest node first, so that a parent is always younger than its
children and the oldest node of all is a leaf: eviction takes from the old end of one ordered dict and never searches.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

# A node costs memory beside its characters (about 300 bytes with its dicts): it is charged as this many characters, so
# that prompts which differ at every character cannot make a tree of bounded characters take unbounded memory.
NODE_COST = 256
_UTF32 = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"  # plain "utf-32" takes id 0xFEFF for a BOM


class Node:
    """An edge of the tree and what is below: `text` leads from the parent to here."""

    __slots__ = ("children", "parent", "text")

    def __init__(self, text: str, parent: Node | None):
        self.text = text
        self.parent = parent
        self.children: dict[str, Node] = {}  # by first character


class PrefixTree:
    """Prompts routed to one worker.

    chars   characters in the tree, each shared prefix counted once
    nodes   nodes but the root
    cost    what is bounded: chars + NODE_COST * nodes
    """

    def __init__(self) -> None:
        self.root = Node("", None)
        self.chars = 0
        self._order: OrderedDict[Node, None] = OrderedDict()  # every node but the root, least recently used first

    @property
    def nodes(self) -> int:
        return len(self._order)

    @property
    def cost(self) -> int:
        return self.chars + NODE_COST * len(self._order)

    def match(self, key: str) -> int:
        """How many leading characters of `key` are in the tree.  Changes nothing."""
        node, at = self._descend(key)
        child = node.children.get(key[at]) if at < len(key) else None
        return at if child is None else at + common_prefix(key, at, child.text)

    def insert(self, key: str) -> None:
        """Add `key`, and make it the most recently used."""
        node, at = self._descend(key)
        if at < len(key):
            child = node.children.get(key[at])
            if child is not None:  # the key leaves the tree inside this edge
                shared = common_prefix(key, at, child.text)
                node, at = self._split(child, shared), at + shared
            if at < len(key):
                leaf = node.children[key[at]] = Node(key[at:], node)
                self._order[leaf] = None
                self.chars += len(leaf.text)
                node = leaf
        while node.parent is not None:  # children before parents: see above
            self._order.move_to_end(node)
            node = node.parent

    def evict(self) -> int:
        """Drop the least recently used leaf; returns how many characters that were, 0 if the tree is empty."""
        if not self._order:
            return 0
        leaf, _ = self._order.popitem(last=False)
        assert leaf.parent is not None and not leaf.children
        del leaf.parent.children[leaf.text[0]]
        self.chars -= len(leaf.text)
        return len(leaf.text)

    def check(self) -> None:
        """Raises AssertionError if the tree is not consistent.  For tests."""
        age = {node: i for i, node in enumerate(self._order)}
        seen = chars = 0
        stack = [self.root]
        while stack:
            node = stack.pop()
            for first, child in node.children.items():
                assert child.text and child.text[0] == first and child.parent is node
                assert node is self.root or age[child] < age[node], "a parent is older than its child"
                seen, chars = seen + 1, chars + len(child.text)
                stack.append(child)
        assert (seen, chars) == (len(self._order), self.chars)

    def _descend(self, key: str) -> tuple[Node, int]:
        """The deepest node whose whole path begins `key`, and the length of that path."""
        node, at, end = self.root, 0, len(key)
        while at < end:
            child = node.children.get(key[at])
            if child is None or not key.startswith(child.text, at):
                break
            node, at = child, at + len(child.text)
        return node, at

    def _split(self, child: Node, at: int) -> Node:
        """Put a node between `child` and its parent, `at` characters below the parent."""
        assert child.parent is not None
        upper = Node(child.text[:at], child.parent)
        child.parent.children[upper.text[0]] = upper
        child.text, child.parent = child.text[at:], upper
        upper.children[child.text[0]] = child
        self._order[upper] = None  # youngest, as its parents are after the insert that splits
        return upper


def common_prefix(key: str, at: int, text: str) -> int:
    """How many leading characters of `text` stand in `key` from `at` on: bisection with whole-slice comparisons."""
    low, high = 0, min(len(text), len(key) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if key.startswith(text[low:middle], at + low):
            low = middle
        else:
            high = middle - 1
    return low


def ids_key(ids: Sequence[Any]) -> str | None:
    """Token ids as a string with one character for each; None if they are not token ids."""
    try:
        return array("I", ids).tobytes().decode(_UTF32, "surrogatepass")
    except (TypeError, ValueError, OverflowError):
        return None
