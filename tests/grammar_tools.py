"""What the grammar tests share: a tokenizer of exactly given pieces, walks through masks, slow reference masks."""

from __future__ import annotations

import random
from functools import cached_property

import numpy as np

from minisgl.detokenizer import TextRule
from minisgl.expressions import Algebra, Alt, Concat, Literal, Named, Node, Repeat, Switch
from minisgl.fsm import TokenGrammar
from minisgl.token_masks import unpack
from minisgl.tokenizer import BaseTokenizer


class PiecesTokenizer(BaseTokenizer):
    """The tokens are `pieces` (no others, unlike ByteTokenizer), then EOS. Encodes greedily, longest first."""

    def __init__(self, pieces: list[bytes]):
        self._table = [*pieces, b"<eos>"]
        eos = len(pieces)
        self.bos_id, self.eos_ids, self.special_ids = None, {eos}, frozenset((eos,))
        self.text_rule, self.chat_template = TextRule(), None

    @property
    def vocab_size(self) -> int:
        return len(self._table)

    @cached_property
    def _pieces(self) -> list[bytes]:
        return self._table

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        data, ids = text.encode(), []
        while data:
            best = max((p for p in self._table[:-1] if data.startswith(p)), key=len)
            ids.append(self._table.index(best))
            data = data[len(best) :]
        return np.array(ids, dtype=np.int32)


def legal_tokens(grammar: TokenGrammar, state: int) -> set[int]:
    return set(np.flatnonzero(unpack(grammar.mask(state), grammar.vocab_size)).tolist())


def random_walk(grammar: TokenGrammar, rng: random.Random, steps: int) -> bytes | None:
    """A text spelt by uniformly chosen legal tokens; from `steps` tokens on by a shortest way out."""
    state, data = grammar.start, b""
    for _ in range(steps):
        legal = np.flatnonzero(unpack(grammar.mask(state), grammar.vocab_size))
        assert len(legal), f"no legal token after {data!r}"
        token = int(rng.choice(legal))
        after = grammar.advance(state, token)
        assert after is not None, f"token {token} is in the mask after {data!r} but doesn't advance"
        if token in grammar.stop_ids:
            return data
        data += grammar.tokenizer.token_bytes(token)
        state = after
    return _finish(grammar, state, data)


def _finish(grammar: TokenGrammar, state: int, data: bytes) -> bytes | None:
    """On to acceptance by the byte after which the least is left to write."""
    automaton, singles = grammar.automaton, grammar.trie.single_bytes
    shortest = Shortest(automaton.algebra)
    for _ in range(20_000):
        if automaton.accepting[state]:
            return data
        ways = [(byte, after) for byte, after in automaton.ways(state) if singles >> byte & 1]
        byte, state = min(ways, key=lambda way: shortest(automaton.nodes[way[1]]))
        data += bytes([byte])
    return None


class Shortest:
    """The length of a language's shortest word, from its structure."""

    def __init__(self, algebra: Algebra):
        self.algebra = algebra
        self.known: dict[Node, float] = {}

    def __call__(self, node: Node) -> float:
        if node.nullable:
            return 0
        if node in self.known:
            return self.known[node]
        self.known[node] = float("inf")  # the shortest word of a recursive language doesn't recurse
        found = self.length(node)
        if found < float("inf"):
            self.known[node] = found
        else:
            del self.known[node]  # only for want of what is being worked out further up
        return found

    def length(self, node: Node) -> float:
        if isinstance(node, Literal):
            return len(node.data)
        if isinstance(node, Concat):
            return self(node.head) + self(node.tail)
        if isinstance(node, Alt):
            return min(map(self, node.options))
        if isinstance(node, Repeat):
            return node.low * self(node.body)
        if isinstance(node, Switch):
            return 1 + min(self(after) for _, after in node.arms)
        if isinstance(node, Named):
            return self(node.unfold())
        seen, layer = {node}, [node]  # intersections and tries: breadth first
        for length in range(10_000):
            if any(here.nullable for here in layer):
                return length
            found = {after for here in layer for _, after in self.algebra.arms(here)} - seen
            seen |= found
            layer = sorted(found, key=lambda n: n.index)[:500]
        raise AssertionError("no word")
