"""Which tokens are legal in a state: one walk of the vocabulary's byte trie, vectorised, then remembered.

All tokens' bytes form a trie, built once per tokenizer. Its nodes are numbered breadth first, so that the
children of a node are neighbours, and a walk is a handful of array operations per level:

    level 1   nodes [ a  b  " ]        states = table[state, byte]          dead ones drop out
    level 2   children of the living   states = table[parent's state, byte]
    ...

A token is legal when its node is reached alive. The mask of a state is packed 32 tokens to a uint32, token i being
bit i % 32 of word i // 32, which is what a GPU kernel wants to read.

Alive in bytes isn't yet alive in tokens: a vocabulary may lack the tokens to spell what is left. `lives` asks
whether tokens lead on from a state to acceptance, and moves into states where they don't are taken out of the
mask, so that no mask of a reachable state is empty.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

import numpy as np

from .automaton import DEAD, START, Automaton
from .expressions import Alt, Concat, GrammarError, Literal, Named, Node, Repeat, Switch, Words
from .tokenizer import BaseTokenizer

_LOOPS = 32  # character sets whose walk is remembered, 2 MB each for 128k tokens
_NEVER = 1 << 30
_SEARCHED = 20_000  # states that one search for a way out may visit


class TokenTrie:
    """The byte trie of a vocabulary, as arrays over its nodes (node 0 is the root).

    pieces: the bytes of every token id; b"" is never text and has no node.
    """

    def __init__(self, pieces: list[bytes]):
        self.vocab_size = len(pieces)
        order = sorted((i for i, piece in enumerate(pieces) if piece), key=lambda i: pieces[i])
        lengths = np.array([len(pieces[i]) for i in order], dtype=np.int32)
        data = np.frombuffer(b"".join(pieces[i] for i in order), dtype=np.uint8)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) if order else lengths
        at = np.zeros(len(order), dtype=np.int32)  # the node each token has come to
        bytes_, parents, made = [np.zeros(1, np.uint8)], [np.zeros(1, np.int32)], 1
        alive = np.arange(len(order))
        depth = 0
        while len(alive):
            # tokens are sorted, so those that share a node stand together
            key = at[alive].astype(np.int64) * 256 + data[starts[alive] + depth]
            fresh = np.concatenate([[True], key[1:] != key[:-1]])
            bytes_.append((key[fresh] & 255).astype(np.uint8))
            parents.append((key[fresh] >> 8).astype(np.int32))
            at[alive] = made + np.cumsum(fresh) - 1
            made += int(fresh.sum())
            depth += 1
            alive = alive[lengths[alive] > depth]
        self.byte = np.concatenate(bytes_)
        self.parent = np.concatenate(parents)
        self.node_of = np.zeros(self.vocab_size, dtype=np.int32)  # root: no text
        self.node_of[np.array(order, dtype=np.int64)] = at
        self.is_token = np.zeros(made, dtype=bool)
        self.is_token[at] = True
        counts = np.bincount(self.parent[1:], minlength=made)
        self.children = counts.astype(np.int32)
        self.first_child = (1 + np.concatenate([[0], np.cumsum(counts)[:-1]])).astype(np.int32)
        self.loops: dict[tuple, _Loop] = {}  # by character set: the same in every grammar
        singles = {piece[0] for piece in pieces if len(piece) == 1}
        self.single_bytes = sum(1 << byte for byte in singles)

    def __len__(self) -> int:
        return len(self.byte)

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

    def levels(
        self, automaton: Automaton, nodes: np.ndarray, states: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Walk on from `nodes`, where the automaton is in `states` (both int32 (n,)): level by level the nodes
        that are reached alive, and the states there."""
        while True:
            counts = self.children[nodes]
            total = int(counts.sum())
            if not total:
                return
            _expand(automaton, states if counts.all() else states[counts > 0])
            ends = np.cumsum(counts, dtype=np.int32)
            children = np.repeat(self.first_child[nodes] - (ends - counts), counts)
            children += np.arange(total, dtype=np.int32)
            cells = np.repeat(states << 8, counts)  # at most 2^31 cells: the automaton's limit of states
            cells += self.byte[children]
            after = automaton.table.reshape(-1)[cells]
            alive = after != DEAD
            nodes, states = children[alive], after[alive]
            if not len(nodes):
                return
            yield nodes, states

    def walk(self, automaton: Automaton, state: int, root: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """All levels below one node together."""
        return _joined(self.levels(automaton, _int32(root), _int32(state)))

    def has_token_below(self, automaton: Automaton, state: int, root: int) -> bool:
        """Is there a legal token that goes on from `root`, where the automaton is in `state`?"""
        levels = self.levels(automaton, _int32(root), _int32(state))
        return any(self.is_token[nodes].any() for nodes, _ in levels)


def _int32(number: int) -> np.ndarray:
    return np.array([number], dtype=np.int32)


def _joined(levels: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    found = list(levels)
    if not found:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    return np.concatenate([nodes for nodes, _ in found]), np.concatenate([states for _, states in found])


def _distinct(automaton: Automaton, states: np.ndarray) -> list[int]:
    """The states that occur, by marking them: several times faster than sorting."""
    seen = np.zeros(len(automaton), dtype=bool)
    seen[states] = True
    return np.flatnonzero(seen).tolist()


def _expand(automaton: Automaton, states: np.ndarray) -> None:
    new = states[~automaton.expanded[states]]
    if len(new):
        for state in _distinct(automaton, new):
            automaton.algebra.budget.check_time()
            automaton.expand(state)


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


class _Loop:
    """The trie walked by repetitions of one character set, whatever comes after them.

    rounds: how many repetitions a node needs, the one it is in the middle of included; _NEVER outside the loop.
    whole: where a round is complete. usable: every round can be completed with tokens of one byte.
    """

    def __init__(self, usable: bool, whole: np.ndarray, rounds: np.ndarray):
        self.usable, self.whole, self.rounds = usable, whole, rounds
        self._exits: dict[int, np.ndarray] = {}

    def within(self, high: int | None) -> np.ndarray:
        """The nodes reached by at most `high` rounds, bool (nodes,); a new array."""
        legal = self.rounds < _NEVER if high is None else self.rounds <= high
        legal[0] = False
        return legal

    def exits(self, trie: TokenTrie, byte: int) -> np.ndarray:
        """The nodes that `byte` leads to from a complete round."""
        found = self._exits.get(byte)
        if found is None:
            nodes = np.flatnonzero(trie.byte == byte).astype(np.int32)
            nodes = nodes[nodes > 0]
            found = self._exits[byte] = nodes[self.whole[trie.parent[nodes]]]
        return found


class MaskCache:
    """Masks of one automaton over one vocabulary.

    stop_ids: the tokens that end a text, legal exactly in accepting states.
    keep: how many masks are remembered (16 KB each for 128k tokens); the oldest go first.
    """

    def __init__(self, automaton: Automaton, trie: TokenTrie, stop_ids: frozenset[int], keep: int = 2048):
        self.automaton, self.trie, self.keep = automaton, trie, keep
        self.words = (trie.vocab_size + 31) // 32
        self.stop_mask = np.zeros(self.words, dtype=np.uint32)
        for token in stop_ids:
            self.stop_mask[token // 32] |= np.uint32(1 << (token % 32))
        self.stop_mask.setflags(write=False)
        self._masks: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lives: dict[int, bool] = {DEAD: False}
        self._easy: dict[Node, bool] = {}

    def mask(self, state: int) -> np.ndarray:
        """The legal tokens of a state, uint32 (vocab_size / 32 rounded up,), read-only."""
        found = self._masks.get(state)
        if found is not None:
            return found
        with self.automaton.working():
            found = self._masks[state] = self._compute(state)
            while len(self._masks) > self.keep:
                self._masks.popitem(last=False)
        return found

    def _compute(self, state: int) -> np.ndarray:
        trie = self.trie
        node = self.automaton.nodes[state]
        head, tail = (node.head, node.tail) if isinstance(node, Concat) else (node, self.automaton.algebra.EPSILON)
        loop = self._loop(head, tail)
        if loop is None or not isinstance(head, Repeat):
            legal = np.zeros(len(trie), dtype=bool)
            nodes, states = trie.walk(self.automaton, state)
        else:
            legal = loop.within(head.high)
            nodes, states = self._leaving(loop, head, tail)
        legal[nodes] = True
        ends = _distinct(self.automaton, states[trie.is_token[nodes]])
        doomed = [end for end in ends if not self.lives(end)]
        if doomed:
            legal[nodes[np.isin(states, doomed)]] = False
        bits = np.packbits(legal[trie.node_of], bitorder="little")
        mask = np.zeros(self.words * 4, dtype=np.uint8)
        mask[: len(bits)] = bits
        mask = mask.view(np.uint32)
        if self.automaton.accepting[state]:
            mask |= self.stop_mask
        mask.setflags(write=False)
        return mask

    # ---- inside a string: a shortcut for "any of these characters, many times"

    def _loop(self, head: Node, tail: Node) -> _Loop | None:
        """The walk of `head`, where the shortcut is exact: `head` repeats a character set, and the next byte
        tells whether it goes on."""
        if not isinstance(head, Repeat) or head.body not in self.automaton.algebra.character_sets:
            return None
        arms = self.automaton.algebra.arms
        if any(bits & other for bits, _ in arms(head.body) for other, _ in arms(tail)) or not self._easily(tail):
            return None
        characters = self.automaton.algebra.character_sets[head.body]
        loop = self.trie.loops.get(characters)
        if loop is None:
            loop = self.trie.loops[characters] = self._make_loop(head.body)
            if len(self.trie.loops) > _LOOPS:
                del self.trie.loops[next(iter(self.trie.loops))]
        return loop if loop.usable else None

    def _make_loop(self, body: Node) -> _Loop:
        algebra, trie = self.automaton.algebra, self.trie
        start = self.automaton.number(algebra.repeat(body, 0, None))
        rounds = np.full(len(trie), _NEVER, dtype=np.int32)
        rounds[0] = 0
        whole = np.zeros(len(trie), dtype=bool)
        whole[0] = True
        usable = True
        for nodes, states in trie.levels(self.automaton, _int32(0), _int32(start)):
            parents = trie.parent[nodes]
            rounds[nodes] = rounds[parents] + whole[parents]  # beginning a round counts
            whole[nodes] = states == start
            usable = usable and all(self._easily(self.automaton.nodes[s]) for s in _distinct(self.automaton, states))
        return _Loop(usable, whole, rounds)

    def _leaving(self, loop: _Loop, head: Repeat, tail: Node) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens leave the loop after enough rounds, and everything that they reach from there."""
        trie, roots, states = self.trie, [], []
        for bits, after in self.automaton.algebra.arms(tail):
            state = self.automaton.number(after)
            for byte in (b for b in range(256) if bits >> b & 1):
                nodes = loop.exits(trie, byte)
                rounds = loop.rounds[trie.parent[nodes]]
                nodes = nodes[(rounds >= head.low) & (rounds <= (_NEVER if head.high is None else head.high))]
                roots.append(nodes)
                states.append(np.full(len(nodes), state, dtype=np.int32))
        if not roots:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        first = np.concatenate(roots), np.concatenate(states)
        return _joined([first, *trie.levels(self.automaton, *first)])

    # ---- can tokens finish what bytes can?

    def lives(self, state: int) -> bool:
        """Do legal tokens lead from `state` to an accepting state? Raises GrammarError when that takes too long
        to find out."""
        known = self._lives.get(state)
        if known is None:
            with self.automaton.working():
                known = self._easily(self.automaton.nodes[state]) or self._search(state)
                self._lives[state] = known
        return known

    def _search(self, state: int) -> bool:
        """Breadth first over token moves; everything visited is settled by the result."""
        origin: dict[int, int | None] = {state: None}
        queue = deque([state])
        while queue:
            here = queue.popleft()
            if self.automaton.accepting[here] or self._lives.get(here) or self._easily(self.automaton.nodes[here]):
                step: int | None = here
                while step is not None:
                    self._lives[step] = True
                    step = origin[step]
                return True
            if len(origin) > _SEARCHED:
                raise GrammarError("the grammar has no short way out in this tokenizer's vocabulary")
            for after in self._token_moves(here):
                if after not in origin and self._lives.get(after) is not False:
                    origin[after] = here
                    queue.append(after)
        self._lives.update(dict.fromkeys(origin, False))
        return False

    def _token_moves(self, state: int) -> list[int]:
        nodes, states = self.trie.walk(self.automaton, state)
        return _distinct(self.automaton, states[self.trie.is_token[nodes]])

    def _easily(self, node: Node) -> bool:
        """A quick sufficient test: can `node` be finished with tokens of a single byte? Almost always yes."""
        if node.nullable:
            return True
        known = self._easy.get(node)
        if known is None:
            self._easy[node] = False  # for languages that contain themselves
            known = self._easy[node] = self._finishes(node)
        return known

    def _finishes(self, node: Node) -> bool:
        spelt = self.trie.single_bytes
        while isinstance(node, (Concat, Named)):  # a loop: tails are long, the stack isn't
            if isinstance(node, Named):
                node = node.unfold()
            elif self._easily(node.head):
                node = node.tail
            else:
                return False
            if node.nullable:
                return True
            if node in self._easy:
                return self._easy[node]
        if isinstance(node, Literal):
            return all(spelt >> byte & 1 for byte in node.data)
        if isinstance(node, Words):
            return any(all(spelt >> byte & 1 for byte in word) for word in node.words[node.lo : node.hi])
        if isinstance(node, Repeat):
            return self._easily(node.body)
        if isinstance(node, Alt):
            brief = sorted(node.options, key=lambda option: not isinstance(option, (Literal, Words)))
            return any(self._easily(option) for option in brief)
        if isinstance(node, Switch):
            return any(bits & spelt and self._easily(after) for bits, after in node.arms)
        return self._spelt_out(node)

    def _spelt_out(self, node: Node) -> bool:
        spelt, seen, queue = self.trie.single_bytes, {node}, deque([node])
        while queue and len(seen) < 200:
            for bits, after in self.automaton.algebra.arms(queue.popleft()):
                if bits & spelt and after not in seen:
                    if after.nullable:
                        return True
                    seen.add(after)
                    queue.append(after)
        return False


def unpack(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """A packed mask as bool (vocab_size,)."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size).astype(bool)


__all__ = ["START", "MaskCache", "TokenTrie", "token_trie", "unpack"]
