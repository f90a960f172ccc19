"""What the grammar tests share: a tokenizer of exactly given pieces, walks through masks, slow reference masks."""

from __future__ import annotations

import random
from functools import cached_property

import numpy as np

from minisgl.detokenizer import TextRule
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
    """A text spelt by uniformly chosen legal tokens; from `steps` tokens on by the shortest way out. None when
    there is no way out within 400 more tokens."""
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
    """The shortest byte string to acceptance: breadth first over the byte automaton."""
    automaton, singles = grammar.automaton, grammar.trie.single_bytes
    seen, layer = {state}, [(state, data)]
    for _ in range(4000):
        for at, text in layer:
            if automaton.accepting[at]:
                return text
        following = []
        for at, text in layer:
            for byte, after in automaton.ways(at):
                if after not in seen and singles >> byte & 1:
                    seen.add(after)
                    following.append((after, text + bytes([byte])))
        layer = following[:3000]
        if not layer:
            return None
    return None
