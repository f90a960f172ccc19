"""The deterministic byte automaton of a grammar, made as it is walked.

States are numbers, rows are arrays: `table[state, byte]` is the next state, 0 the dead one. A row is filled the
first time somebody leaves that state, from the arms of the state's expression (see `expressions`). No state is a
trap: every one but 0 can still reach acceptance.

    regex            "(true|null)"
    table            1 --t--> 2 --r--> 3 ...          rows of 2 and 3 exist only after a walk through them
                     1 --n--> 6 ...

*Compression* (SGLang, arXiv 2312.07104, section 3.2): from a state with a single way on and no right to stop,
everything up to the next choice is one edge. `forced` is that edge's bytes; jump-forward emits them without
asking the model.
"""

from __future__ import annotations

import threading

import numpy as np

from .expressions import Algebra, GrammarError, Node, Operation, UnsupportedGrammar

DEAD, START = 0, 1
MAX_FORCED = 4096  # bytes in one compressed edge: a{100000} is forced, but nobody needs it in one piece


class Automaton:
    """States of one grammar.

    algebra, root: the language. max_states: rows of 1 KB each; more raise GrammarError.
    `lock` serialises growth: a grammar may be shared by requests that are compiled and run on other threads.
    """

    def __init__(self, algebra: Algebra, root: Node, max_states: int = 100_000):
        self.algebra, self.max_states = algebra, max_states
        self.lock = threading.RLock()
        self.table = np.zeros((64, 256), dtype=np.int32)
        self.expanded = np.zeros(64, dtype=bool)
        self.accepting = np.zeros(64, dtype=bool)
        self.nodes: list[Node] = [algebra.EMPTY]
        self._numbers: dict[Node, int] = {algebra.EMPTY: DEAD}
        self._forced: dict[int, tuple[bytes, int]] = {}
        self._columns: dict[int, np.ndarray] = {}
        self.expanded[DEAD] = True
        if self.number(root) != START:
            raise GrammarError("the grammar is empty: no text satisfies it")

    def __len__(self) -> int:
        return len(self.nodes)

    def number(self, node: Node) -> int:
        """The state of an expression."""
        state = self._numbers.get(node)
        if state is None:
            state = len(self.nodes)
            if state > self.max_states:
                raise UnsupportedGrammar(f"the grammar is too big: more than {self.max_states} automaton states")
            if state == len(self.table):
                self._grow()
            self.accepting[state] = node.nullable
            self.nodes.append(node)
            self._numbers[node] = state  # last: who is interrupted before has made a state that nobody knows
        return state

    def _grow(self) -> None:
        size = len(self.table)
        self.table = np.concatenate([self.table, np.zeros((size, 256), dtype=np.int32)])
        self.expanded = np.concatenate([self.expanded, np.zeros(size, dtype=bool)])
        self.accepting = np.concatenate([self.accepting, np.zeros(size, dtype=bool)])

    def working(self, seconds: float | None = None) -> Operation:
        """Growing the automaton on the budget's clock: `with automaton.lock, automaton.working(): ...`.

        The lock stands there by itself, since a KeyboardInterrupt can come between any two steps of Python, but not
        between a lock's taking and the `with` that gives it back; a context manager of our own might keep it.
        """
        return self.algebra.budget.operation(seconds)

    def expand(self, state: int) -> None:
        """Fill the state's row."""
        with self.lock, self.working():
            if self.expanded[state]:
                return
            arms = [(bits, self.number(left)) for bits, left in self.algebra.arms(self.nodes[state])]
            row = self.table[state]
            for bits, target in arms:
                row[self._column(bits)] = target
            self.expanded[state] = True

    def _column(self, bits: int) -> np.ndarray:
        column = self._columns.get(bits)
        if column is None:
            packed = np.frombuffer(bits.to_bytes(32, "little"), dtype=np.uint8)
            column = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
            if len(self._columns) < 10_000:
                self._columns[bits] = column
        return column

    def step(self, state: int, data: bytes) -> int:
        """The state after `data`, DEAD when that leaves the language's prefixes."""
        for byte in data:
            if not self.expanded[state]:
                self.expand(state)
            state = int(self.table[state, byte])
            if state == DEAD:
                break
        return state

    def forced(self, state: int) -> tuple[bytes, int]:
        """The bytes that every way on from `state` begins with, up to the first choice or right to stop, and
        the state after them."""
        with self.lock, self.working():
            found = self._forced.get(state)
            if found is None:
                found = self._forced[state] = self._follow(state)
            return found

    def _follow(self, state: int) -> tuple[bytes, int]:
        data = bytearray()
        seen = set()
        while not self.accepting[state] and state not in seen and len(data) < MAX_FORCED:
            seen.add(state)
            self.expand(state)
            ways = np.flatnonzero(self.table[state])
            if len(ways) != 1:
                break
            data.append(int(ways[0]))
            state = int(self.table[state, ways[0]])
        return bytes(data), state

    def ways(self, state: int) -> list[tuple[int, int]]:
        """(byte, next state) of every byte that is legal in `state`."""
        self.expand(state)
        return [(int(byte), int(self.table[state, byte])) for byte in np.flatnonzero(self.table[state])]
