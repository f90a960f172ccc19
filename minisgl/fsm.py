"""Grammars: what a text may be, which tokens may come next, which must.

    grammar = Grammar.from_regex(r"(yes|no), because [a-z ]{5,40}\\.")
    grammar.matches("yes, because it rains.")        True
    grammar.forced(b"yes")                           b", because "

    tokens = grammar.compile(tokenizer)              instant: nothing is built before it is needed
    state = tokens.start
    tokens.mask(state)                               packed bits, one per token
    state = tokens.advance(state, token_id)          None: that token wasn't legal
    tokens.forced_tokens(state)                      jump-forward

The way from here to there, a module each:

    regex -> regex_parse -> regex_compile -+
                                           +-> expressions -> automaton -> token_masks -> mask
    JSON Schema -> json_schema ------------+   derivatives    lazy rows    trie walk      jump -> forced tokens
    free text with tags -> structural_tag -+

Everything is lazy (an automaton state exists once a walk has come by, a mask once it is asked for) and bounded:
what is malformed, unsupported, empty or too big raises GrammarError, a ValueError whose message names it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import jump
from .automaton import DEAD, START, Automaton
from .charsets import UTF8
from .expressions import Algebra, Budget, GrammarError, Node
from .regex_compile import full_match
from .regex_parse import parse
from .token_masks import MaskCache, token_trie
from .tokenizer import BaseTokenizer

__all__ = ["FINISHED", "Grammar", "GrammarError", "TokenGrammar"]

FINISHED = -1  # the state after a stop token


class Grammar:
    """A set of texts (their UTF-8 bytes). Make one with `from_regex`, `from_json_schema` or
    `from_structural_tag`.

    Thread-safe; may serve any number of requests and tokenizers at once. `automaton` is its byte automaton.
    """

    def __init__(self, algebra: Algebra, root: Node, source: str = ""):
        self.automaton = Automaton(algebra, root)
        self.source = source

    def __repr__(self) -> str:
        return f"Grammar({self.source[:60]!r}, {len(self.automaton) - 1} states so far)"

    @classmethod
    def from_regex(cls, pattern: str, *, budget: Budget | None = None) -> Grammar:
        """The texts that `pattern` matches as a whole, with the meaning it has in Python's `re.fullmatch`
        (and \\\\p{..}). Raises GrammarError, naming the construct, for what is malformed or unsupported
        (see `regex_parse`), and for a pattern that nothing matches."""
        algebra = Algebra(budget)
        with algebra.budget.operation():
            return cls(algebra, full_match(algebra, parse(pattern), UTF8), pattern)

    @classmethod
    def from_json_schema(cls, schema: Any, *, whitespace: str | None = None, budget: Budget | None = None) -> Grammar:
        """The JSON texts of the values that `schema` allows; see `json_schema` for what is supported and how
        values are written.

        schema: a dict or bool, a JSON string, a Pydantic model class or a dataclass.
        whitespace: None: nothing, or one space after "," and ":" (compact and `json.dumps` style both fit); a
            regex of JSON whitespace: what may stand between any two tokens ("" is strictly compact).
        Raises GrammarError, naming the keyword, for what is malformed, unsupported or unsatisfiable.
        """
        from .json_schema import compile_schema

        algebra = Algebra(budget)
        with algebra.budget.operation():
            return cls(algebra, *compile_schema(algebra, schema, whitespace))

    @classmethod
    def from_structural_tag(cls, tag: Any, *, whitespace: str | None = None, budget: Budget | None = None) -> Grammar:
        """Free text in which the triggers of `tag` (a dict or JSON text) open what its structures say; see
        `structural_tag`. whitespace: as in `from_json_schema`. Raises GrammarError, naming what is wrong."""
        from .structural_tag import compile_structural_tag

        algebra = Algebra(budget)
        with algebra.budget.operation():
            return cls(algebra, *compile_structural_tag(algebra, tag, whitespace))

    def matches(self, text: str | bytes) -> bool:
        """Is this text, whole, in the grammar?"""
        state = self._state(text)
        return state != DEAD and bool(self.automaton.accepting[state])

    def forced(self, prefix: str | bytes = b"") -> bytes:
        """What every accepted text that begins with `prefix` goes on with: the longest such byte string, up to
        the first choice or the first place where the text may end. It may end inside a character. b"" too when
        no accepted text begins so."""
        state = self._state(prefix)
        return b"" if state == DEAD else self.automaton.forced(state)[0]

    def _state(self, text: str | bytes) -> int:
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        with self.automaton.lock, self.automaton.working():
            return self.automaton.step(START, data)

    def compile(self, tokenizer: BaseTokenizer, stop_ids: set[int] | None = None) -> TokenGrammar:
        """The grammar over a tokenizer's tokens. Raises GrammarError when its tokens can't spell any text of
        the grammar.

        stop_ids: the tokens that end a text, by default the tokenizer's.
        """
        return TokenGrammar(self, tokenizer, tokenizer.eos_ids if stop_ids is None else stop_ids)

    def draw(self, compressed: bool | None = None, max_states: int = 60) -> str:
        """The automaton as SVG; see `fsm_draw.draw`."""
        from .fsm_draw import draw

        return draw(self, compressed=compressed, max_states=max_states)


class TokenGrammar:
    """A grammar over token ids. States are ints that mean nothing elsewhere; `start` is the first one.

    After a stop token the state is FINISHED, where only stop tokens are legal.
    """

    start = START

    def __init__(self, grammar: Grammar, tokenizer: BaseTokenizer, stop_ids: set[int]):
        self.grammar, self.tokenizer = grammar, tokenizer
        self.automaton = grammar.automaton
        self.trie = token_trie(tokenizer)
        self.vocab_size = self.trie.vocab_size
        self.stop_ids = frozenset(i for i in stop_ids if 0 <= i < self.vocab_size)
        self._bytes = tokenizer.all_token_bytes()
        self._masks = MaskCache(self.automaton, self.trie, self.stop_ids)
        self._forced: dict[int, list[int]] = {}
        if not self._masks.lives(START):
            raise GrammarError("no sequence of this tokenizer's tokens spells a text of the grammar")
        with self.automaton.lock, self.automaton.working():  # the first mask is compiling: nobody else waits for it
            self._masks.mask(START)

    def __repr__(self) -> str:
        return f"TokenGrammar({self.grammar!r}, vocab_size={self.vocab_size})"

    def mask(self, state: int) -> np.ndarray:
        """The legal tokens, uint32 (ceil(vocab_size / 32),), read-only: token i is bit i % 32 of word i // 32.
        Never all zero for a state that legal tokens lead to, given a stop token. Raises GrammarError past the
        grammar's budget."""
        return self._masks.stop_mask if state == FINISHED else self._masks.mask(state)

    def is_legal(self, state: int, token_id: int) -> bool:
        """One bit of the mask."""
        if not 0 <= token_id < self.vocab_size:
            return False
        return bool(self.mask(state)[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))

    def advance(self, state: int, token_id: int) -> int | None:
        """The state after a token, None when it isn't legal. A stop token in an accepting state gives FINISHED,
        where more stop tokens change nothing."""
        if token_id in self.stop_ids:
            return FINISHED if self.is_accepting(state) else None
        if state == FINISHED or not 0 <= token_id < self.vocab_size:
            return None
        piece = self._bytes[token_id]
        after = self.automaton.step(state, piece) if piece else DEAD
        return after if self._masks.lives(after) else None

    def advance_all(self, state: int, token_ids: list[int]) -> int | None:
        """`advance` over several tokens."""
        for token_id in token_ids:
            after = self.advance(state, token_id)
            if after is None:
                return None
            state = after
        return state

    def is_accepting(self, state: int) -> bool:
        """May the text end here?"""
        return state == FINISHED or bool(self.automaton.accepting[state])

    def is_final(self, state: int) -> bool:
        """Must the text end here? Nothing but a stop token is legal."""
        if state == FINISHED:
            return True
        return self.is_accepting(state) and not self.automaton.ways(state)

    def forced_tokens(self, state: int) -> list[int]:
        """The tokens that are certain from `state`, as canonical tokenisation gives them, less the tail that a
        longer legal token may claim (see `jump`)."""
        if state == FINISHED:
            return []
        found = self._forced.get(state)
        if found is None:
            with self.automaton.lock, self.automaton.working():
                found = jump.forced_tokens(self.automaton, self.trie, self.tokenizer, state)
                if self.advance_all(state, found) is None:
                    found = []
                self._forced[state] = found
        return list(found)
