"""The byte trie of a vocabulary, and its walk in step with a byte automaton.

All tokens' bytes form a trie, built once per tokenizer. Its nodes are numbered breadth first, so that the
children of a node are neighbours, and a walk is a handful of array operations per level:

    level 1   nodes [ a  b  " ]        states = table[state, byte]          dead ones drop out
    level 2   children of the living   states = table[parent's state, byte]
    ...

The few long tokens (runs of spaces and dashes) make levels of one or two nodes; those are walked in a plain loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import numpy as np

from .automaton import DEAD, Automaton
from .expressions import GrammarError
from .tokenizer import BaseTokenizer

FEW = 400  # nodes that are quicker walked one by one
Walked = tuple[np.ndarray, np.ndarray]  # nodes and the states there, int64 (n,) each: numpy indexes fastest by those


class TokenTrie:
    """The byte trie of a vocabulary, as arrays over its nodes (node 0 is the root).

    pieces: the bytes of every token id; b"" is never text and has no node.

    level: where the nodes of each depth begin, and the end. below: how many nodes a node's subtree has, itself
    included. order: the ids of all tokens with text, by their bytes, so that those below a node stand together;
    other arrays over tokens, and `ranges`, are in this order. rank: the place of a token id in it, len(order) for those
    without text.
    """

    def __init__(self, pieces: list[bytes]):
        self.vocab_size = len(pieces)
        order = sorted((i for i, piece in enumerate(pieces) if piece), key=lambda i: pieces[i])
        lengths = np.array([len(pieces[i]) for i in order], dtype=np.int32)
        data = np.frombuffer(b"".join(pieces[i] for i in order), dtype=np.uint8)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) if order else lengths
        at = np.zeros(len(order), dtype=np.int64)  # the node each token has come to
        bytes_, parents, level = [np.zeros(1, np.uint8)], [np.zeros(1, np.int64)], [0, 1]
        spans = [np.array([[0, len(order)]])]
        alive = np.arange(len(order))
        depth = 0
        while len(alive):
            # tokens are sorted, so those that share a node stand together
            key = at[alive] * 256 + data[starts[alive] + depth]
            fresh = np.concatenate([[True], key[1:] != key[:-1]])
            bytes_.append((key[fresh] & 255).astype(np.uint8))
            parents.append(key[fresh] >> 8)
            spans.append(np.stack([alive[fresh], alive[np.roll(fresh, -1)] + 1], axis=1))
            at[alive] = level[-1] + np.cumsum(fresh) - 1
            level.append(level[-1] + int(fresh.sum()))
            depth += 1
            alive = alive[lengths[alive] > depth]
        self.order = np.array(order, dtype=np.int64)
        self.rank = np.full(self.vocab_size, len(order))
        self.rank[self.order] = np.arange(len(order))
        self.node_of = at
        self.byte, self.parent, self.level = np.concatenate(bytes_), np.concatenate(parents), level
        self.is_token = np.zeros(len(self.byte), dtype=bool)
        self.is_token[at] = True
        self.children, self.first_child = family(self.parent)
        self.below = count_below(self.parent, level)
        self._spans = np.concatenate(spans)  # of the tokens below each node
        self._ancestors: dict[int, np.ndarray] = {}
        singles = {piece[0] for piece in pieces if len(piece) == 1}
        self.single_bytes = sum(1 << byte for byte in singles)

    def __len__(self) -> int:
        return len(self.byte)

    def ranges(self, nodes: np.ndarray) -> list[tuple[int, int]]:
        """The ranges of `order` that hold the tokens below (and at) ascending nodes of one depth."""
        spans = self._spans[nodes]
        cuts = np.flatnonzero(spans[1:, 0] != spans[:-1, 1])
        lows, highs = spans[np.append(0, cuts + 1), 0], spans[np.append(cuts, len(spans) - 1), 1]
        return list(zip(lows.tolist(), highs.tolist()))

    def ancestors(self, depth: int) -> np.ndarray:
        """The node at `depth` on the way to each node, 0 for those that aren't as deep; int64 (nodes,)."""
        found = self._ancestors.get(depth)
        if found is None:
            found = np.zeros(len(self), dtype=np.int64)
            first, last = self.level[depth : depth + 2]
            found[first:last] = np.arange(first, last)
            for first, last in zip(self.level[depth + 1 :], self.level[depth + 2 :]):
                found[first:last] = found[self.parent[first:last]]
            self._ancestors[depth] = found
        return found

    def child(self, node: int, byte: int) -> int:
        """The node one byte further, 0 when no token goes there."""
        first, count = int(self.first_child[node]), int(self.children[node])
        at = first + int(np.searchsorted(self.byte[first : first + count], byte))
        return at if at < first + count and self.byte[at] == byte else 0

    def descend(self, data: bytes) -> int:
        """The node of `data`, 0 when no token begins so."""
        node = 0
        for byte in data:
            node = self.child(node, byte)
            if not node:
                break
        return node

    def step(self, automaton: Automaton, nodes: np.ndarray, states: np.ndarray) -> Walked:
        """The children of `nodes`, where the automaton is in `states`, that are reached alive, and the states there."""
        counts = self.children.take(nodes)
        expand(automaton, states if counts.all() else states.compress(counts > 0))
        children = children_of(self.first_child.take(nodes), counts)
        cells = np.repeat(states << 8, counts)
        cells += self.byte.take(children)
        after = automaton.table.reshape(-1).take(cells)
        alive = after != DEAD
        return children.compress(alive), after.compress(alive).astype(np.int64)

    def levels(self, automaton: Automaton, nodes: np.ndarray, states: np.ndarray) -> Iterator[Walked]:
        """Walk on from `nodes`: `step` after `step`, as long as anything is reached."""
        while len(nodes):
            few = int(self.below.take(nodes).sum()) < FEW
            walked = self._walk_few(automaton, nodes, states) if few else self.step(automaton, nodes, states)
            nodes, states = walked
            if len(nodes):
                yield walked
            if few:
                return

    def _walk_few(self, automaton: Automaton, nodes: np.ndarray, states: np.ndarray) -> Walked:
        """All levels together."""
        reached = []
        stack = list(zip(nodes.tolist(), states.tolist()))
        while stack:
            node, state = stack.pop()
            first, count = self.first_child.item(node), self.children.item(node)
            if count and not automaton.expanded[state]:
                automaton.algebra.budget.check_time()
                automaton.expand(state)
            for child in range(first, first + count):
                after = automaton.table.item(state, self.byte.item(child))
                if after != DEAD:
                    reached.append((child, after))
                    stack.append((child, after))
        return pairs(reached)

    def walk(self, automaton: Automaton, state: int, root: int = 0) -> Walked:
        """All levels below one node together."""
        return joined(self.levels(automaton, one(root), one(state)))

    def has_token_below(self, automaton: Automaton, state: int, root: int) -> bool:
        """Is there a legal token that goes on from `root`, where the automaton is in `state`?"""
        levels = self.levels(automaton, one(root), one(state))
        return any(self.is_token[nodes].any() for nodes, _ in levels)


# ---- pieces of walks


def one(number: int) -> np.ndarray:
    return np.array([number], dtype=np.int64)


def pairs(reached: list[tuple[int, int]]) -> Walked:
    both = np.array(reached, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def joined(levels: Iterable[Walked]) -> Walked:
    found = list(levels)
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate([nodes for nodes, _ in found]), np.concatenate([states for _, states in found])


def distinct(automaton: Automaton, states: np.ndarray) -> list[int]:
    """The states that occur, by marking them: several times faster than sorting."""
    seen = np.zeros(len(automaton), dtype=bool)
    seen[states] = True
    return np.flatnonzero(seen).tolist()


def expand(automaton: Automaton, states: np.ndarray) -> None:
    new = states.compress(~automaton.expanded.take(states))
    if len(new):
        for state in distinct(automaton, new):
            automaton.algebra.budget.check_time()
            automaton.expand(state)


# ---- trees numbered breadth first, as arrays


def family(parent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of children and the first child of every node, int64 (nodes,) each."""
    counts = np.bincount(parent[1:], minlength=len(parent))
    first = 1 + np.concatenate([[0], np.cumsum(counts)[:-1]])
    return counts, first


def children_of(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers first[i] .. first[i] + counts[i] - 1 of every i, one after the other."""
    ends = np.cumsum(counts)
    children = np.repeat(first - (ends - counts), counts)
    children += np.arange(len(children))
    return children


def count_below(parent: np.ndarray, level: list[int]) -> np.ndarray:
    """How many nodes the subtree of each has, itself included; int64 (nodes,). level: as in TokenTrie."""
    below = np.ones(len(parent), dtype=np.int64)
    for first, last in zip(level[-2:0:-1], level[:1:-1]):
        np.add.at(below, parent[first:last], below[first:last])
    return below


_TRIES: weakref.WeakKeyDictionary[BaseTokenizer, TokenTrie] = weakref.WeakKeyDictionary()


def token_trie(tokenizer: BaseTokenizer) -> TokenTrie:
    """The trie of a tokenizer, built once. Raises GrammarError when its tokens have no bytes."""
    trie = _TRIES.get(tokenizer)
    if trie is None:
        try:
            pieces = tokenizer.all_token_bytes()
        except ValueError as error:
            raise GrammarError(f"constrained decoding: {error}") from None
        trie = _TRIES[tokenizer] = TokenTrie(pieces)
    return trie
