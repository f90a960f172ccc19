"""llguidance and xgrammar behind the interface of `grammar`, for what our own engine doesn't do.

Both see the vocabulary as bytes, as we do, so any `BaseTokenizer` will serve. They keep their state in a matcher
object that only moves forwards; it is copied where a sequence forks. Neither is asked for jump-forward tokens: their
canonical tokenisation needs the tokenizer's own files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .expressions import GrammarError, UnsupportedGrammar
from .grammar import Compiled, Constraint, GrammarSpec
from .regex_compile import anchors
from .regex_parse import Anchor, Sequence, parse
from .tokenizer import BaseTokenizer

_HINT = 'pip install "minisgl[grammar]"'


class LLGuidance:
    """The llguidance package over a tokenizer. Raises ImportError when it isn't installed."""

    def __init__(self, tokenizer: BaseTokenizer, stop_ids: set[int]):
        try:
            import llguidance
        except ImportError:
            raise ImportError(f"grammar_backend='llguidance' needs `{_HINT}`") from None
        self.package, self.stop_ids = llguidance, frozenset(stop_ids)
        self.vocab_size = tokenizer.vocab_size
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(tokenizer, stop_ids)))

    def compile(self, spec: GrammarSpec) -> Compiled:
        make = self.package.LLMatcher
        with _refusing(spec.kind):
            if spec.kind == "regex":
                grammar = make.grammar_from_regex(spec.source)
            elif spec.kind == "json_schema":
                grammar = make.grammar_from_json_schema(_with_style(spec))
            elif spec.kind == "ebnf":
                grammar = self.package.grammar_from("grammar", spec.source)
            else:
                raise UnsupportedGrammar(f"{spec.kind} is not supported by the grammar backend llguidance")
            matcher = make(self.tokenizer, grammar)
        if matcher.is_error():
            raise GrammarError(f"{spec.kind}: {_one_line(matcher.get_error())}")
        return _Started(LLGuidanceConstraint(self, matcher))


class LLGuidanceConstraint(Constraint):
    def __init__(self, backend: LLGuidance, matcher: Any, finished: bool = False):
        self.backend, self.matcher, self.finished = backend, matcher, finished

    def mask(self) -> np.ndarray:
        words = np.zeros((self.backend.vocab_size + 31) // 32, dtype=np.uint32)
        if not self.finished:
            packed = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint32)
            words[: len(packed)] = packed[: len(words)]
            self.check()
        return _some("llguidance", _with_stops(words, self.backend.stop_ids, self.can_stop()))

    def check(self) -> None:
        """Raises GrammarError if the package has given up on this grammar: it says so only when asked."""
        if self.matcher.is_error():
            raise GrammarError(f"llguidance: {_one_line(self.matcher.get_error())}")

    def accept(self, token_id: int) -> bool:
        if token_id in self.backend.stop_ids:
            legal = self.can_stop()
            self.finished = self.finished or legal
            return legal
        if self.finished or self.matcher.validate_tokens([token_id]) != 1:
            self.check()
            return False
        taken = bool(self.matcher.consume_token(token_id))
        self.check()
        return taken

    def can_stop(self) -> bool:
        return self.finished or self.matcher.is_accepting()

    def must_stop(self) -> bool:
        return self.finished or (self.matcher.is_accepting() and self.matcher.is_stopped())

    def forced_tokens(self) -> list[int]:
        return []

    def copy(self) -> LLGuidanceConstraint:
        return LLGuidanceConstraint(self.backend, self.matcher.deep_copy(), self.finished)


class XGrammar:
    """The xgrammar package over a tokenizer. Raises ImportError when it isn't installed."""

    def __init__(self, tokenizer: BaseTokenizer, stop_ids: set[int]):
        try:
            import xgrammar
        except ImportError:
            raise ImportError(f"grammar_backend='xgrammar' needs `{_HINT}`") from None
        self.package, self.stop_ids = xgrammar, frozenset(stop_ids)
        self.vocab_size = tokenizer.vocab_size
        info = xgrammar.TokenizerInfo(
            tokenizer.all_token_bytes(), vocab_size=tokenizer.vocab_size, stop_token_ids=sorted(stop_ids)
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=2)

    def compile(self, spec: GrammarSpec) -> Compiled:
        with _refusing(spec.kind):
            if spec.kind == "regex":
                _check_anchors(spec.source)
                compiled = self.compiler.compile_regex(spec.source)
            elif spec.kind == "json_schema":
                if spec.whitespace not in (None, ""):
                    raise UnsupportedGrammar("whitespace is not supported by the grammar backend xgrammar")
                separators = (",", ":") if spec.whitespace == "" else (", ", ": ")
                compiled = self.compiler.compile_json_schema(
                    spec.source, any_whitespace=False, separators=separators, strict_mode=False
                )
            elif spec.kind == "ebnf":
                compiled = self.compiler.compile_grammar(spec.source)
            else:
                raise UnsupportedGrammar(f"{spec.kind} is not supported by the grammar backend xgrammar")
            matcher = self.package.GrammarMatcher(compiled)
        return _Started(XGrammarConstraint(self, matcher))


class XGrammarConstraint(Constraint):
    def __init__(self, backend: XGrammar, matcher: Any):
        self.backend, self.matcher = backend, matcher

    def mask(self) -> np.ndarray:
        if self.matcher.is_terminated():
            words = np.zeros((self.backend.vocab_size + 31) // 32, dtype=np.uint32)
            return _with_stops(words, self.backend.stop_ids, True)
        bits = self.backend.package.allocate_token_bitmask(1, self.backend.vocab_size)
        self.matcher.fill_next_token_bitmask(bits)
        return _some("xgrammar", bits.numpy()[0].view(np.uint32))

    def accept(self, token_id: int) -> bool:
        if self.matcher.is_terminated():
            return token_id in self.backend.stop_ids
        return bool(self.matcher.accept_token(token_id))

    def can_stop(self) -> bool:
        stops = [i for i in self.backend.stop_ids if i < self.backend.vocab_size]
        return self.matcher.is_terminated() or any(self.mask()[i // 32] >> np.uint32(i % 32) & 1 for i in stops)

    def must_stop(self) -> bool:
        return self.can_stop() and not _with_stops(self.mask().copy(), self.backend.stop_ids, False).any()

    def forced_tokens(self) -> list[int]:
        return []

    def copy(self) -> XGrammarConstraint:
        return XGrammarConstraint(self.backend, self.matcher.fork())


class _Started(Compiled):
    """Hands out copies of a matcher that nobody moves. Raises GrammarError for a grammar without any text."""

    def __init__(self, first: Constraint):
        first.mask()
        self.first = first

    def start(self) -> Constraint:
        return self.first.copy()


class _Vocabulary:
    """What llguidance's TokenizerWrapper wants to know of a tokenizer."""

    def __init__(self, tokenizer: BaseTokenizer, stop_ids: set[int]):
        self._tokenizer = tokenizer
        self.eos_token_id = min(stop_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [
            piece or b"\xff[" + str(i).encode() + b"]"  # the package's spelling of tokens that aren't text
            for i, piece in enumerate(tokenizer.all_token_bytes())
        ]
        self.special_token_ids = sorted(i for i, piece in enumerate(tokenizer.all_token_bytes()) if not piece)

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]


def _with_style(spec: GrammarSpec) -> str:
    """The schema with the whitespace that our engine would allow."""
    schema = json.loads(spec.source)
    if not isinstance(schema, dict):
        schema = {} if schema else {"not": {}}
    style = {"whitespace_pattern": spec.whitespace}
    if not spec.whitespace:
        space = "" if spec.whitespace == "" else " "
        style = {"whitespace_flexible": False, "item_separator": "," + space, "key_separator": ":" + space}
    return json.dumps({**schema, "x-guidance": style})


def _with_stops(words: np.ndarray, stop_ids: frozenset[int], legal: bool) -> np.ndarray:
    for token in stop_ids:
        if token // 32 < len(words):
            bit = np.uint32(1 << (token % 32))
            words[token // 32] = words[token // 32] | bit if legal else words[token // 32] & ~bit
    return words


def _some(name: str, words: np.ndarray) -> np.ndarray:
    """A mask, unless it is all zero: nothing could be sampled from that. Raises GrammarError."""
    if not words.any():
        raise GrammarError(f"{name}: no token may follow; the grammar has no text that goes on from here")
    return words


def _check_anchors(pattern: str) -> None:
    """xgrammar warns of anchors inside a pattern on its standard output, and ignores them: refuse them."""
    tree = parse(pattern)
    items = tree.items if isinstance(tree, Sequence) else (tree,)
    begin = items[:1] == (Anchor("start"),)
    end = items[-1:] in ((Anchor("end"),), (Anchor("end_or_newline"),))
    if "\\A" in pattern or "\\Z" in pattern or any(map(anchors, items[begin : len(items) - end])):
        raise UnsupportedGrammar("regex: an anchor inside is not supported by the grammar backend xgrammar")


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Whatever a package raises is an error of the grammar. A panic in Rust is no Exception, but named so."""
    try:
        yield
    except GrammarError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise GrammarError(f"{what}: {_one_line(error)}") from None
        raise


def _one_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
