"""Masks against llguidance and xgrammar, both ways, along random walks (where those packages are installed).

Every kind of disagreement that random walks have shown, and why ours stays as it is:

| who        | where                          | they                           | we                              |
| ---------- | ------------------------------ | ------------------------------ | ------------------------------- |
| llguidance | the next bytes are certain     | only the canonical token       | every token that spells them    |
| llguidance | JSON strings                   | no U+007F                      | RFC 8259 allows it              |
| llguidance | pattern                        | no escapes of plain characters | \\u0061 is an `a` after parsing |
| llguidance | bounded integers               | "-0"                           | not where a bound is given      |
| xgrammar   | integer                        | no "-0"                        | RFC 8259 allows it              |
| xgrammar   | maxLength, pattern             | no escapes at all              | one escape is one character     |
| xgrammar   | JSON strings                   | lone surrogates (\\udc00)       | not text                        |
| xgrammar   | format date                    | 30 February                    | real days                       |
| xgrammar   | bounded numbers                | up to 6 decimals               | up to 15 digits in all          |
| xgrammar   | pattern                        | matches as a whole             | is searched, as specified       |
| xgrammar   | `.`                            | matches a newline              | not without (?s), as in `re`    |
| xgrammar   | \\d \\w                          | ASCII                          | Unicode, as in `re`             |
| both       | \\w \\s of rare characters       | tables of their own            | `re`'s                          |
| both       | number                         | any exponent (1e999)           | what fits a float64             |
| both       | const "é"                      | only as it is                  | or as `json.dumps` escapes it   |

So the comparison is on what all three define alike; where bytes are certain, llguidance's tokens are among ours.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from minisgl.fsm import FINISHED, Grammar, TokenGrammar
from minisgl.token_masks import unpack
from minisgl.tokenizer import Tokenizer

REGEXES = [
    "abc",
    "[a-z]{2,5} (true|false)",
    "(é|è|😀)+x?",
    r"[0-9]{1,3}(\.[0-9]+)?",
    r"[^x\n]{1,4}x",
    r"[a-z_]+@[a-z]+\.com",
    "(霍格|霍比)特?",
    "[一-三]号",
    "(a|b)*a(a|b){5}",
    "x{3,}y?",
    r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"',
    "[a-cA-C]{0,6}z",
    r"(0|[1-9][0-9]*)(\.[0-9]{2})?( USD| EUR)",
    "((25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)\\.){3}(25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)",
]
SCHEMAS = [
    {"type": "object", "properties": {"a": {"enum": ["x", "yy", "z z"]}, "b": {"type": "boolean"}},
     "required": ["a", "b"], "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"kind": {"const": "k"}, "n": {"type": "null"}, "m": {"type": "null"}},
     "required": ["kind"], "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": "text"}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def smol(default_model_folder):
    return Tokenizer(default_model_folder)


class LLGuidance:
    def __init__(self, smol: Tokenizer):
        self.package = pytest.importorskip("llguidance")
        text = (smol.folder / "tokenizer.json").read_text(encoding="utf-8")
        eos = next(iter(smol.eos_ids))
        self.tokenizer = self.package.LLTokenizer(text, n_vocab=smol.vocab_size, eos_token=eos)
        self.size = smol.vocab_size

    def start(self, regex: str | None, schema: dict | None) -> None:
        make = self.package.LLMatcher
        if regex is not None:
            source = make.grammar_from_regex(regex)
        else:
            style = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
            source = make.grammar_from_json_schema(json.dumps({**(schema or {}), "x-guidance": style}))
        self.matcher = make(self.tokenizer, source)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def mask(self) -> np.ndarray:
        packed = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(packed, bitorder="little")[: self.size].astype(bool)

    def accept(self, token: int) -> None:
        self.matcher.consume_token(token)


class XGrammar:
    def __init__(self, smol: Tokenizer):
        self.package = pytest.importorskip("xgrammar")
        info = self.package.TokenizerInfo(
            smol.all_token_bytes(), vocab_size=smol.vocab_size, stop_token_ids=sorted(smol.eos_ids)
        )
        self.compiler = self.package.GrammarCompiler(info, max_threads=1)
        self.size = smol.vocab_size

    def start(self, regex: str | None, schema: dict | None) -> None:
        if regex is not None:
            compiled = self.compiler.compile_regex(regex)
        else:
            compiled = self.compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, separators=(",", ":"), strict_mode=False
            )
        self.matcher = self.package.GrammarMatcher(compiled)

    def mask(self) -> np.ndarray:
        bits = self.package.allocate_token_bitmask(1, self.size)
        self.matcher.fill_next_token_bitmask(bits)
        return unpack(bits.numpy()[0].view(np.uint32), self.size)

    def accept(self, token: int) -> None:
        assert self.matcher.accept_token(token)


def compare(tokens: TokenGrammar, peer, rng: random.Random, certain_is_canonical: bool) -> None:
    state, spelt = tokens.start, b""
    for _ in range(14):
        ours, theirs = unpack(tokens.mask(state), tokens.vocab_size), peer.mask()
        ours[list(tokens.tokenizer.special_ids - tokens.stop_ids)] = False
        one_sided = certain_is_canonical and tokens.grammar.forced(spelt)
        differ = np.flatnonzero(theirs & ~ours if one_sided else ours ^ theirs)
        shown = [(tokens.tokenizer.token_bytes(int(i)), bool(ours[i])) for i in differ[:6]]
        assert not shown, f"after {spelt!r}: (token, do we allow it) {shown}"
        token = int(rng.choice(np.flatnonzero(ours & theirs)))
        after = tokens.advance(state, token)
        assert after is not None
        if after == FINISHED:
            return
        peer.accept(token)
        state, spelt = after, spelt + tokens.tokenizer.token_bytes(token)


@pytest.mark.parametrize("make", [LLGuidance, XGrammar])
def test_masks_of_regexes(make, smol):
    peer = make(smol)
    for regex in REGEXES:
        tokens = Grammar.from_regex(regex).compile(smol)
        for seed in range(3):
            peer.start(regex, None)
            compare(tokens, peer, random.Random(seed), make is LLGuidance)


@pytest.mark.parametrize("make", [LLGuidance, XGrammar])
def test_masks_of_schemas(make, smol):
    peer = make(smol)
    for schema in SCHEMAS:
        tokens = Grammar.from_json_schema(schema, whitespace="").compile(smol)
        for seed in range(3):
            peer.start(None, schema)
            compare(tokens, peer, random.Random(seed), make is LLGuidance)
