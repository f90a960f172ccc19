"""Constrained requests: from what a caller asks for to masks, whichever engine makes them.

    spec = GrammarSpec("json_schema", schema_text)             what SamplingParams say, normalised and hashable
    compiler = GrammarCompiler(tokenizer, backend="auto")      one per runtime; remembers what it compiled
    constraint = compiler.compile(spec).start()                one per running sequence
        constraint.mask()  ->  sample  ->  constraint.accept(token)  ->  constraint.forced_tokens()  ->  ...

The engines: "fsm" is ours (see `fsm`). "llguidance" and "xgrammar" are optional packages (`grammar_backends`). "auto"
is ours; what ours declares unsupported (EBNF, `contains`, lookarounds), but not what is malformed or unsatisfiable,
goes to llguidance where it is installed. Where nothing can enforce a grammar the answer is a GrammarError: never
unconstrained text.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .expressions import GrammarError, UnsupportedGrammar
from .fsm import Grammar, TokenGrammar
from .json_source import load
from .tokenizer import BaseTokenizer

Kind = Literal["regex", "json_schema", "ebnf", "structural_tag"]
KINDS: tuple[Kind, ...] = ("regex", "json_schema", "ebnf", "structural_tag")
BACKENDS = ("auto", "fsm", "llguidance", "xgrammar")

_DTYPES = {
    int: r"[+-]?(0|[1-9][0-9]{0,18})",
    float: r"[+-]?(0|[1-9][0-9]{0,18})(\.[0-9]{1,15})?",
    bool: r"(True|False)",
    str: r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"',
}


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as text: equal specs are compiled once."""

    kind: Kind
    source: str
    whitespace: str | None = None

    @classmethod
    def of(cls, *, whitespace: str | None = None, **given: Any) -> GrammarSpec | None:
        """The spec of the one keyword among regex, json_schema, ebnf and structural_tag that isn't None; None
        when there is none. Raises GrammarError for more than one, or one of the wrong type."""
        present: list[tuple[Kind, Any]] = [(kind, given[kind]) for kind in KINDS if given.get(kind) is not None]
        if not present:
            return None
        if len(present) > 1:
            names = " and ".join(kind for kind, _ in present)
            raise GrammarError(f"only one of {', '.join(KINDS)} may be given, not {names}")
        kind, value = present[0]
        if kind == "json_schema":
            try:
                return cls(kind, json.dumps(load(value), ensure_ascii=False), whitespace)
            except (TypeError, ValueError, RecursionError) as error:
                if isinstance(error, GrammarError):
                    raise
                raise GrammarError(f"json_schema is not JSON data: {error}") from None
        if kind == "structural_tag" and isinstance(value, dict):
            value = json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str):
            raise GrammarError(f"{kind} must be a str, not {type(value).__name__}")
        return cls(kind, value)


def regex_of_dtype(dtype: type) -> str:
    """The regex of `gen(dtype=...)`: int, float, bool (True or False) or str (a quoted string)."""
    if dtype not in _DTYPES:
        raise GrammarError(f"dtype must be int, float, bool or str, not {dtype!r}")
    return _DTYPES[dtype]


def regex_of_choices(choices: Sequence[str]) -> str:
    """The regex that matches exactly one of the choices."""
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("choices must be a non-empty list of str")
    return "(" + "|".join(map(re.escape, choices)) + ")"


class Constraint(ABC):
    """Where one sequence is in its grammar."""

    @abstractmethod
    def mask(self) -> np.ndarray:
        """The legal tokens, uint32 (ceil(vocab_size / 32),), read-only: token i is bit i % 32 of word i // 32."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Move over a token; False, and nothing changes, when it isn't legal."""

    @abstractmethod
    def can_stop(self) -> bool:
        """Is a stop token legal?"""

    @abstractmethod
    def must_stop(self) -> bool:
        """Is nothing but a stop token legal?"""

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """The tokens that are certain to follow (see `jump`); [] from engines that can't tell."""

    @abstractmethod
    def copy(self) -> Constraint:
        """An independent one at the same place."""


class Compiled(ABC):
    """A grammar ready for sequences."""

    @abstractmethod
    def start(self) -> Constraint: ...


class FsmConstraint(Constraint):
    """A state of our own automaton."""

    def __init__(self, tokens: TokenGrammar, state: int):
        self.tokens, self.state = tokens, state

    def mask(self) -> np.ndarray:
        return self.tokens.mask(self.state)

    def accept(self, token_id: int) -> bool:
        after = self.tokens.advance(self.state, token_id)
        if after is not None:
            self.state = after
        return after is not None

    def can_stop(self) -> bool:
        return self.tokens.is_accepting(self.state)

    def must_stop(self) -> bool:
        return self.tokens.is_final(self.state)

    def forced_tokens(self) -> list[int]:
        return self.tokens.forced_tokens(self.state)

    def copy(self) -> FsmConstraint:
        return FsmConstraint(self.tokens, self.state)


class FsmCompiled(Compiled):
    def __init__(self, tokens: TokenGrammar):
        self.tokens = tokens

    def start(self) -> FsmConstraint:
        return FsmConstraint(self.tokens, self.tokens.start)


class GrammarCompiler:
    """Compiles specs for one tokenizer and remembers the last `keep`. Thread-safe; meant to be called off the
    engine's thread, two callers of the same spec waiting for one compilation.

    backend: one of BACKENDS. Raises ValueError for another, ImportError (with the pip command) for one that
        isn't installed.
    """

    def __init__(
        self, tokenizer: BaseTokenizer, backend: str = "auto", stop_ids: set[int] | None = None, keep: int = 128
    ):
        if backend not in BACKENDS:
            raise ValueError(f"grammar_backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
        self.tokenizer, self.backend, self.keep = tokenizer, backend, keep
        self.stop_ids = set(tokenizer.eos_ids if stop_ids is None else stop_ids)
        self._compiled: OrderedDict[GrammarSpec, Compiled] = OrderedDict()
        self._working: dict[GrammarSpec, threading.Lock] = {}
        self._lock = threading.Lock()
        self._others: dict[str, Any] = {}
        if backend in ("llguidance", "xgrammar"):
            self._other(backend)

    def compile(self, spec: GrammarSpec) -> Compiled:
        """The grammar of a spec. Raises GrammarError."""
        with self._lock:
            found = self._compiled.get(spec)
            if found is not None:
                self._compiled.move_to_end(spec)
                return found
            working = self._working.setdefault(spec, threading.Lock())
        with working:
            try:
                found = self._compiled.get(spec) or self._make(spec)
            finally:
                with self._lock:
                    self._working.pop(spec, None)
            with self._lock:
                self._compiled[spec] = found
                while len(self._compiled) > self.keep:
                    self._compiled.popitem(last=False)
        return found

    def _make(self, spec: GrammarSpec) -> Compiled:
        if self.backend in ("llguidance", "xgrammar"):
            return self._other(self.backend).compile(spec)
        try:
            return self._own(spec)
        except UnsupportedGrammar as error:
            if self.backend == "fsm" or importlib.util.find_spec("llguidance") is None:
                hint = "" if self.backend == "fsm" else ' (`pip install "minisgl[grammar]"` may support it)'
                raise type(error)(f"{error}{hint}") from None
            try:
                return self._other("llguidance").compile(spec)
            except GrammarError as other:
                raise GrammarError(f"{error}; llguidance: {other}") from None

    def _own(self, spec: GrammarSpec) -> Compiled:
        if spec.kind == "regex":
            grammar = Grammar.from_regex(spec.source)
        elif spec.kind == "json_schema":
            grammar = Grammar.from_json_schema(spec.source, whitespace=spec.whitespace)
        elif spec.kind == "structural_tag":
            grammar = Grammar.from_structural_tag(spec.source, whitespace=spec.whitespace)
        else:
            raise UnsupportedGrammar(f"{spec.kind} is not supported by the grammar backend fsm")
        return FsmCompiled(grammar.compile(self.tokenizer, self.stop_ids))

    def _other(self, name: str) -> Any:
        with self._lock:
            if name not in self._others:
                from . import grammar_backends

                make = {"llguidance": grammar_backends.LLGuidance, "xgrammar": grammar_backends.XGrammar}[name]
                self._others[name] = make(self.tokenizer, self.stop_ids)
            return self._others[name]
