"""Walking the vocabulary where most bytes are alike: quotients of the token trie.

Inside a text nearly every token is legal, and a walk would visit all of the trie. But there most bytes are alike:
to the automaton "hello" and "world" are both five letters. A *quotient* is the trie of class strings instead of
byte strings, a fiftieth of the size:

    bytes      hello  world  it's  a"  b":       270,000 nodes
    classes    LLLLL         LLLL  L"  L":         6,000 nodes, each standing for all the nodes that spell it

Which bytes are alike depends on the state (`partition`); the states of most texts share a few partitions. Where
the automaton does tell bytes of a class apart, the walk notes it and goes on in the trie itself: exact whatever
the partition.

The first byte or two of a token are where states differ most (a key that may be "name" or anything else), so a
quotient may skip them: then it stands for what follows.
"""

from __future__ import annotations

import numpy as np

from .automaton import DEAD, Automaton
from .token_trie import FEW, TokenTrie, Walked, children_of, count_below, distinct, expand, family, joined, pairs

MIXED = -1
_MAIN_ROAD = 16  # so many bytes lead a state's text on; fewer are a side street
_EXPLORED = 12  # states that a partition is made from


class Quotient:
    """The trie of the class strings that tokens spell after their first `skip` bytes.

    classes: the class of every byte, uint8 (256,), numbered from 0.

    `of` is the quotient's node that stands for a node of the trie (0, the root, for those not deeper than `skip`),
    `of_token` that of a token.
    """

    def __init__(self, trie: TokenTrie, classes: np.ndarray, skip: int):
        self.trie, self.classes, self.skip = trie, classes, skip
        count = int(classes.max()) + 1
        self.order = np.argsort(classes, kind="stable")  # bytes, class by class
        self.starts = np.searchsorted(classes[self.order], np.arange(count))
        self.sample = self.order[self.starts]  # one byte of each class
        self.samples, self.alike = self.sample.tolist(), np.split(self.order, self.starts[1:])
        self.of = np.zeros(len(trie), dtype=np.int64)
        kinds, parents, level = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], [0, 1]
        for first, last in zip(trie.level[skip + 1 :], trie.level[skip + 2 :]):
            above, made = level[-2:]
            spelt = (self.of[trie.parent[first:last]] - above) * count + classes[trie.byte[first:last]]
            occurs = np.zeros((made - above) * count, dtype=bool)
            occurs[spelt] = True
            self.of[first:last] = (np.cumsum(occurs) + (made - 1))[spelt]
            new = np.flatnonzero(occurs)
            kinds.append(new % count)
            parents.append(new // count + above)
            level.append(made + len(new))
        parent = np.concatenate(parents)
        self.kind = np.concatenate(kinds)
        self.children, self.first_child = family(parent)
        self.below = count_below(parent, level)
        self.of_token = self.of.take(trie.node_of)

    def __len__(self) -> int:
        return len(self.kind)

    def members(self, wanted: np.ndarray) -> np.ndarray:
        """The trie's nodes that `wanted` nodes of the quotient, bool (len(self),), stand for."""
        return np.flatnonzero(wanted.take(self.of))


class ClassSteps:
    """The steps of an automaton over the classes of a quotient, worked out as they are walked.

    table: int32 (states, classes), the next state; MIXED where the automaton tells the bytes of the class apart.
    """

    def __init__(self, automaton: Automaton, quotient: Quotient):
        self.automaton, self.quotient = automaton, quotient
        self.table = np.zeros((0, len(quotient.sample)), dtype=np.int32)
        self._filled = np.zeros(0, dtype=bool)

    def fill(self, states: np.ndarray) -> None:
        """Work out the rows of `states`."""
        if len(self._filled) < len(self.automaton):
            size = len(self.automaton.table)
            table = np.zeros((size, self.table.shape[1]), dtype=np.int32)
            table[: len(self.table)] = self.table
            filled = np.zeros(size, dtype=bool)
            filled[: len(self._filled)] = self._filled
            self.table, self._filled = table, filled
        new = states.compress(~self._filled.take(states))
        if len(new):
            rows = distinct(self.automaton, new)
            expand(self.automaton, new)
            quotient, after = self.quotient, self.automaton.table[rows]
            sample = after[:, quotient.sample]
            equal = after[:, quotient.order] == sample[:, quotient.classes[quotient.order]]
            self.table[rows] = np.where(np.logical_and.reduceat(equal, quotient.starts, axis=1), sample, MIXED)
            self._filled[rows] = True

    def walk(self, starts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """From the quotient's root, once for each of the states `starts`. What walk i does at node n is known as
        i * len(quotient) + n. Returns: what is reached alive, the states there; and, int64 (walks * nodes,), for
        those that are left to be walked in the trie, because a class is MIXED, the state before; 0 elsewhere."""
        quotient = self.quotient
        size = len(quotient)
        nodes, states = np.zeros(len(starts), np.int64), np.array(starts, np.int64)
        shift = np.arange(len(starts)) * size
        before = np.zeros(len(starts) * size, dtype=np.int64)
        found = []
        while len(nodes):
            if int(quotient.below.take(nodes).sum()) < FEW:
                found.append(self._walk_few(nodes, states, shift, before))
                break
            counts = quotient.children.take(nodes)
            self.fill(states if counts.all() else states.compress(counts > 0))
            children = children_of(quotient.first_child.take(nodes), counts)
            states, shift = np.repeat(states, counts), np.repeat(shift, counts)
            cells = states * self.table.shape[1] + quotient.kind.take(children)
            after = self.table.reshape(-1).take(cells).astype(np.int64)
            mixed = after == MIXED
            before[(children + shift).compress(mixed)] = states.compress(mixed)
            alive = after > DEAD
            nodes, states, shift = children.compress(alive), after.compress(alive), shift.compress(alive)
            found.append((nodes + shift, states))
        return *joined(found), before

    def _walk_few(self, nodes: np.ndarray, states: np.ndarray, shift: np.ndarray, before: np.ndarray) -> Walked:
        """The rest of a walk, node by node: the chains of long tokens, where each state is met once and its whole row
        isn't worth the while."""
        quotient, automaton, reached = self.quotient, self.automaton, []
        stack = list(zip(nodes.tolist(), states.tolist(), shift.tolist()))
        while stack:
            node, state, origin = stack.pop()
            first, count = quotient.first_child.item(node), quotient.children.item(node)
            if count and not automaton.expanded[state]:
                automaton.algebra.budget.check_time()
                automaton.expand(state)
            for child in range(first, first + count):
                kind = quotient.kind.item(child)
                after = automaton.table.item(state, quotient.samples[kind])
                alike = quotient.alike[kind]
                if len(alike) > 1 and (automaton.table[state][alike] != after).any():
                    before[child + origin] = state
                elif after != DEAD:
                    reached.append((child + origin, after))
                    stack.append((child, after, origin))
        return pairs(reached)


def partition(automaton: Automaton, state: int) -> np.ndarray:
    """Which bytes are alike in `state` and the states that most of its text leads to: their classes, uint8 (256,)."""
    states, labels = [state], np.zeros(256, dtype=np.int64)
    for here in states:
        automaton.expand(here)
        known = labels.max()
        labels = _relabel(labels * len(automaton) + automaton.table[here])
        if here != state and labels.max() == known:
            continue  # nothing new: the last state again with another counter, as a rule
        for bits, left in automaton.algebra.arms(automaton.nodes[here]):
            follows = bits.bit_count() >= _MAIN_ROAD or bits >> 0xC0
            after = automaton.number(left)
            if follows and after not in states and len(states) < _EXPLORED:
                states.append(after)
    return labels.astype(np.uint8)


def _relabel(labels: np.ndarray) -> np.ndarray:
    """The same classes, numbered from 0 in the order of their first bytes."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]
