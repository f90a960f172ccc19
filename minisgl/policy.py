"""In which order waiting requests are tried: the whole of every policy on one screen.

The scheduler admits from the front of the order until the batch or the memory is full, so the order decides what is
still in the tree when a request's turn comes.  Longest prefix match first is a depth-first walk of the radix tree in
disguise, and for a batch of requests known up front depth-first order reaches the optimal hit rate as long as the
cache holds one path (SGLang paper, arXiv 2312.07104, theorem 3.1).

    lpm         longest prefix match first
    dfs-weight  depth-first through the tree, the subtree with most waiting requests first
    fcfs        first come, first served
    lof         longest output first
    random      a fresh shuffle for each batch

A policy that prefers what is cached can starve what is not.  `order_waiting` therefore puts requests that were passed
over `max_passed_over` times in front, oldest first, whatever the policy says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .radix import Node, RadixTree
    from .request import Request

POLICIES = ("lpm", "fcfs", "dfs-weight", "lof", "random")

# Cache-aware orders match every waiting request against the tree.  Past this many the rest waits its turn in order of
# arrival, so that the cost of one scheduling step does not grow with the queue.
WINDOW = 256


def order_waiting(
    waiting: list[Request],
    policy: str,
    tree: RadixTree,
    rng: np.random.Generator,
    max_passed_over: int,
) -> list[Request]:
    """The waiting requests (which come in order of arrival), in the order in which admission should try them."""
    aged = [r for r in waiting if r.passed_over >= max_passed_over]
    fresh = [r for r in waiting if r.passed_over < max_passed_over] if aged else waiting
    if policy == "fcfs":
        ordered = fresh
    elif policy == "random":
        ordered = [fresh[i] for i in rng.permutation(len(fresh))]
    elif policy == "lof":
        ordered = sorted(fresh, key=lambda r: len(r.tokens) - r.max_len)
    elif policy == "lpm":
        head, tail = fresh[:WINDOW], fresh[WINDOW:]
        ordered = sorted(head, key=lambda r: -tree.match_length(r.tokens[: r.reusable])) + tail
    else:
        ordered = _depth_first(fresh[:WINDOW], tree) + fresh[WINDOW:]
    return aged + ordered


def _depth_first(requests: list[Request], tree: RadixTree) -> list[Request]:
    """Requests in depth-first order of the node that they match; the heaviest subtree is entered first."""
    at_node: dict[Node, list[Request]] = {}
    weight: dict[Node, int] = {}
    children: dict[Node, list[Node]] = {}
    for request in requests:
        node = tree.match(request.tokens[: request.reusable]).node
        at_node.setdefault(node, []).append(request)
        while True:  # count the request on the way up; note each node with its parent once
            seen = node in weight
            weight[node] = weight.get(node, 0) + 1
            if node.parent is None:
                break
            if not seen:
                children.setdefault(node.parent, []).append(node)
            node = node.parent
    ordered: list[Request] = []
    stack = [(tree.root, False)] if requests else []
    while stack:
        node, done = stack.pop()
        if done:
            ordered += at_node.get(node, [])  # after its subtrees: these reuse least of what is there
            continue
        stack.append((node, True))
        stack += [(child, False) for child in sorted(children.get(node, []), key=lambda n: weight[n])]
    return ordered
