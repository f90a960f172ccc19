"""A request under a grammar: where it stands, what it may say next, and what it must.

A grammar is compiled on the caller's thread, once, and kept (`Grammars`); a `Constraint` is one request's place in it.
The engine asks for three things:

    mask      before sampling: the legal tokens of each row, packed bits (`masks`)
    advance   after sampling: the token is taken, the state moves
    forced    the tokens that can only follow, which are appended without asking the model (jump-forward)

With the overlapped loop the mask of step N+1 needs the token of step N.  So for steps with constrained rows the engine
launches the forward pass of N+1, then commits N, then computes masks while the device works, and only then queues the
sampling of N+1: the masks hide behind the pass.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from .fsm import FINISHED, Grammar, TokenGrammar
from .jump import MIN_JUMP
from .tokenizer import BaseTokenizer

KEPT_GRAMMARS = 256


class Constraint:
    """One request's state in a compiled grammar.

    Text that is certain has one spelling, the tokenizer's own (`jump`).  With jump-forward its tokens are appended at
    once; without (`jump` False), they are sampled one by one from a mask that allows just the next of them.  The output
    is the same token for token, which no choice of the moment could promise: a model left to itself spells `",\\n` now
    as one token and now as three, and goes on differently after each.
    """

    def __init__(self, grammar: TokenGrammar, jump: bool):
        self.grammar, self.jump = grammar, jump
        self.state: int = grammar.start
        self.failure: Exception | None = None  # why there was no mask, see `masks`
        self._certain: list[int] = self._find()  # tokens that must come next, nearest first

    def _find(self) -> list[int]:
        tokens = [] if self.state == FINISHED else self.grammar.forced_tokens(self.state)
        return tokens if len(tokens) >= MIN_JUMP else []

    def advance(self, token: int) -> None:
        """Take a token.  Raises RuntimeError if it is not legal: then a mask was not applied."""
        after = self.grammar.advance(self.state, token)
        if after is None:
            raise RuntimeError(f"token {token} is not legal under the request's grammar")
        self.state = after
        if self._certain and self._certain[0] == token:
            del self._certain[0]
        else:
            self._certain = []
        if not self._certain:
            self._certain = self._find()

    def mask(self) -> np.ndarray:
        """uint32 (ceil(vocab / 32),); see `TokenGrammar.mask`."""
        if not self._certain:
            return self.grammar.mask(self.state)
        words = np.zeros(-(-self.grammar.vocab_size // 32), np.uint32)
        words[self._certain[0] // 32] = np.uint32(1 << self._certain[0] % 32)
        return words

    def forced(self) -> list[int]:
        """The tokens to append now, enough of them to save a step; [] without jump-forward."""
        return list(self._certain) if self.jump else []


def masks(constraints: Sequence[Constraint | None], vocab_size: int) -> np.ndarray:
    """(rows, ceil(vocab_size / 32)) int32 of packed bits; a row without a constraint allows everything.

    Tokens that the model has and the tokenizer has not (padding of the vocabulary) are never legal.
    A mask that cannot be made (its grammar is past its budget) is one request's problem: it is noted as the
    constraint's `failure`, and what is sampled for that row must not be used.
    """
    packed = np.full((len(constraints), -(-vocab_size // 32)), -1, np.int32)
    for row, constraint in zip(packed, constraints):
        if constraint is not None:
            try:
                words = constraint.mask().view(np.int32)
            except Exception as error:
                constraint.failure = error
                continue
            row[: len(words)] = words
            row[len(words) :] = 0
    return packed


class Grammars:
    """Compiled grammars of one model, the last `KEPT_GRAMMARS` used; any thread may ask."""

    def __init__(self, tokenizer: BaseTokenizer, stop_ids: set[int]):
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        self._kept: OrderedDict[tuple[str, Any], TokenGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, kind: str, source: str) -> TokenGrammar:
        """The grammar of `SamplingParams.grammar`.  Raises GrammarError (a ValueError) for what it cannot be."""
        key = (kind, source)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        if kind == "regex":
            grammar = Grammar.from_regex(source)
        elif kind == "json_schema":
            grammar = Grammar.from_json_schema(source)
        else:
            raise ValueError(f"{kind} is not supported by this engine: use regex or json_schema")
        compiled = grammar.compile(self.tokenizer, self.stop_ids)
        compiled.mask(compiled.start)  # a grammar that is too big says so here, not in the middle of a batch
        with self._lock:
            self._kept[key] = compiled
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return compiled
