"""Looking at a radix tree: is it sound, what is in it, what does it look like.

Nothing here changes a tree (`radix`), and no request waits for anything here.  Three questions, each a method of
`RadixTree` and a full walk, for tests, pictures and idle times:

    check      Do the books agree with the nodes?  What match, insert, lock and evict keep up step by step (two sums, a
               count, the locks of ancestors) is made anew from the nodes, and an AssertionError names what differs.
    snapshot   The whole tree as dicts, lists and ints.  From there a picture needs only the events that follow:
               `visual_state` plays them on its own copy, on another thread, while the tree goes on.
    pretty     The tree as text, for a prompt, a log, a failed test.

A mistake in a cache does not crash.  A slot that two nodes hold, or that both a node and the free list do, is one
request's keys and values read by another: fluent text, and wrong.  That is why the checks name invariants (numbered as
in the design: 2, a locked node is never evicted; 3, nodes own what they hold) and the stress tests ask them after every
few steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .radix import Node, RadixTree

_TOKEN_BYTES = np.dtype(np.int32).itemsize


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with `message` unless `condition`; not an assert statement, so it works under python -O."""
    if not condition:
        raise AssertionError(message)


def check_books(tree: RadixTree) -> None:
    """Invariants 2 and 3 as far as nodes and ledger show them: `RadixTree.check` without the eviction heap."""
    nodes = list(tree.nodes())
    for node in (tree.root, *nodes):
        _check_node(node)
    require(tree.num_nodes == len(nodes), f"num_nodes is {tree.num_nodes}, the tree has {len(nodes)}")
    require(len({node.id for node in nodes} - {0}) == len(nodes), "two nodes have the same id")
    slots = np.concatenate([tree.root.slots, *(node.slots for node in nodes)])
    require(len(np.unique(slots)) == len(slots), "invariant 3: a slot is stored twice")

    locked = sum(node.length for node in nodes if node.lock_count)
    evictable = sum(node.length for node in nodes if not node.lock_count)
    ledger = f"evictable {tree.evictable} and locked {tree.locked}"
    require(
        (tree.evictable, tree.locked) == (evictable, locked),
        f"invariant 2: the ledger says {ledger}, the nodes have {evictable} and {locked}",
    )


def _check_node(node: Node) -> None:
    where = f"node #{node.id}"
    lengths = node.length, len(node.raw) // _TOKEN_BYTES, len(node.slots)
    require(len(set(lengths)) == 1, f"invariant 3: length, key and slots of {where} differ: {lengths}")
    owned = node.slots.dtype == np.int32 and node.slots.flags.owndata and not node.slots.flags.writeable
    require(owned, f"invariant 3: {where} does not own its slots")
    require(node.length > 0 or node.id == 0, f"invariant 3: {where} is empty")
    require(
        node.id == 0 or node.lock_count >= sum(child.lock_count for child in node.children.values()),
        f"invariant 2: {where} has fewer locks than its children",
    )
    for first, child in node.children.items():
        require(child.parent is node, f"child #{child.id} of {where} has another parent")
        require(child.key[0] == first, f"invariant 3: {where} files child #{child.id} under the wrong token")
        history = [(node.last_access, child.last_access), (node.hits, child.hits)]
        history += [(node.priority, child.priority), (child.created, node.created)]
        require(
            node.id == 0 or all(upper >= lower for upper, lower in history),
            f"invariant 2: {where} has a child #{child.id} that was used without it",
        )


def snapshot(tree: RadixTree) -> dict[str, Any]:
    """`RadixTree.snapshot`."""
    root = _plain(tree.root)
    plain = {0: root}
    for node in tree.nodes():
        assert node.parent is not None
        plain[node.id] = _plain(node)
        plain[node.parent.id]["children"].append(plain[node.id])
    names = ("eviction", "version", "total", "evictable", "locked", "num_nodes", "tick")
    return {**{name: getattr(tree, name) for name in names}, "root": root}


def _plain(node: Node) -> dict[str, Any]:
    names = ("id", "lock_count", "last_access", "created", "hits", "priority")
    plain = {name: getattr(node, name) for name in names}
    return {**plain, "tokens": node.key.tolist(), "slots": node.slots.tolist(), "children": []}


def pretty(tree: RadixTree, decode: Callable[[list[int]], str] | None, max_tokens: int) -> str:
    """`RadixTree.pretty`."""
    lines = [repr(tree)]
    stack = [(child, "") for child in tree.root.children.values()][::-1]
    while stack:
        node, indent = stack.pop()
        last = not stack or stack[-1][0].parent is not node.parent
        lines.append(f"{indent}{'└── ' if last else '├── '}{_line(node, decode, max_tokens)}")
        below = indent + ("    " if last else "│   ")
        stack.extend([(child, below) for child in node.children.values()][::-1])
    return "\n".join(lines)


def _line(node: Node, decode: Callable[[list[int]], str] | None, max_tokens: int) -> str:
    shown = node.key[:max_tokens].tolist()
    text = repr(decode(shown)) if decode else f"[{' '.join(map(str, shown))}]"
    cut = "…" if node.length > max_tokens else ""
    tokens = f"{node.length} token{'s' if node.length > 1 else ''}"
    locks = f", {node.lock_count} lock{'s' if node.lock_count > 1 else ''}" if node.lock_count else ""
    return f"#{node.id} {text}{cut} {tokens}{locks}"
