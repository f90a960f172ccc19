"""Sets of characters, and their spelling in bytes: as UTF-8, or as they may stand inside a JSON string.

A set is a sorted tuple of inclusive code point ranges. Its spelling is a small tree of byte switches: the code
point is written in digits (base 64 for UTF-8's continuation bytes, base 16 for `\\uXXXX`), and a range of
numbers is a tree over their digits, most significant first, in which equal subtrees are one node:

    [U+0400-U+04FF]  ->  D0..D3, then 80..BF          2 nodes for 256 characters

In a JSON string one character has several spellings (`é`, `\\u00e9`, `\\u00E9`; `"` only escaped; outside the
BMP a surrogate pair). The encoding JSON has all of them, each decoding to exactly one character. That is why
lengths, patterns and exclusions can be stated on decoded characters and still be right about the bytes.
Surrogates are not characters and never occur.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache, lru_cache

import regex

from .expressions import Algebra, Budget, Concat, GrammarError, Literal, Node, Switch

Ranges = tuple[tuple[int, int], ...]
UTF8, JSON = "utf8", "json"

_BYTE = [1 << byte for byte in range(256)]
_CONTINUATION = [_BYTE[0x80 + digit] for digit in range(64)]
_HEX = [_BYTE[ord(f"{d:x}")] | _BYTE[ord(f"{d:X}")] for d in range(16)]
_SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


def make_ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, disjoint, joined, without the surrogates."""
    joined: list[list[int]] = []
    for low, high in sorted(pairs):
        if joined and low <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], high)
        else:
            joined.append([low, high])
    kept = []
    for low, high in joined:
        if low < 0xD800:
            kept.append((low, min(high, 0xD7FF)))
        if high > 0xDFFF:
            kept.append((max(low, 0xE000), high))
    return tuple(kept)


def union(*sets: Ranges) -> Ranges:
    return make_ranges(pair for ranges in sets for pair in ranges)


@lru_cache(maxsize=1024)
def invert(ranges: Ranges) -> Ranges:
    """Every character that isn't in `ranges`."""
    gaps, start = [], 0
    for low, high in ranges:
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= sys.maxunicode:
        gaps.append((start, sys.maxunicode))
    return make_ranges(gaps)


@lru_cache(maxsize=4096)
def intersect(first: Ranges, second: Ranges) -> Ranges:
    return make_ranges((max(a, c), min(b, d)) for a, b in first for c, d in _overlapping(second, a, b))


def single(character: str) -> Ranges:
    return make_ranges([(ord(character), ord(character))])


EVERY: Ranges = invert(())


def _overlapping(ranges: Ranges, low: int, high: int) -> Iterable[tuple[int, int]]:
    return (pair for pair in ranges if pair[0] <= high and pair[1] >= low)


# ---- named classes


@cache
def _all_text() -> str:
    return "".join(chr(code) for low, high in EVERY for code in range(low, high + 1))


@lru_cache(maxsize=256)
def class_ranges(source: str) -> Ranges:
    """The characters that a one-character regex matches, asked of `re` itself (of the `regex` package for
    \\p{..}, which `re` doesn't have; the two differ over \\w, where `re` has no combining marks).

    Scans all of Unicode once per class (tens of milliseconds) and remembers the answer. Raises GrammarError when
    `source` isn't a valid class.
    """
    engine = regex if source[:2].lower() == "\\p" else re
    try:
        compiled = engine.compile(f"(?:{source})+")
    except (re.error, regex.error) as error:
        raise GrammarError(f"regex: {source}: {error}") from None
    # positions in the text are code points, but for the gap that the surrogates leave
    shift = 0xE000 - 0xD800
    spans = []
    for found in compiled.finditer(_all_text()):
        low, high = found.start(), found.end() - 1
        if low < 0xD800 <= high:
            spans += [(low, 0xD7FF), (0xE000, high + shift)]
        else:
            spans.append((low, high) if high < 0xD800 else (low + shift, high + shift))
    return make_ranges(spans)


@cache
def _cased_text() -> str:
    """Every character whose case matters: the only ones that `(?i)` can add to a set."""
    return "".join(c for c in _all_text() if c.lower() != c or c.upper() != c or c.casefold() != c)


@lru_cache(maxsize=4096)
def ignore_case(ranges: Ranges, ascii_only: bool = False) -> Ranges:
    """The set under `re.IGNORECASE`, asked of `re` itself for the characters that have case."""
    inside = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
    if not inside:
        return ranges
    compiled = re.compile(f"[{inside}]", re.IGNORECASE | (re.ASCII if ascii_only else 0))
    return union(ranges, make_ranges((ord(c), ord(c)) for c in compiled.findall(_cased_text())))


# ---- spellings


def characters(algebra: Algebra, ranges: Ranges, encoding: str) -> Node:
    """One character of the set, spelt as UTF-8 (encoding UTF8), or as it may stand between the quotes of a JSON
    string (JSON): itself where that is allowed, its short escape, or \\uXXXX (a surrogate pair outside the
    BMP), hex digits in either case."""
    key = (ranges, encoding)
    node = algebra.characters.get(key)
    if node is None:
        tree = _utf8_tree if encoding == UTF8 else _json_tree
        # a big class costs milliseconds to work out: once per process, then copied
        node = tree(algebra, ranges) if len(ranges) < 5 else _adopt(algebra, _template(ranges, encoding), {})
        algebra.characters[key] = node
        algebra.character_sets.setdefault(node, key)
    return node


@lru_cache(maxsize=512)
def _template(ranges: Ranges, encoding: str) -> Node:
    scratch = Algebra(Budget(nodes=1_000_000, seconds=60))
    return (_utf8_tree if encoding == UTF8 else _json_tree)(scratch, ranges)


def _adopt(algebra: Algebra, node: Node, known: dict[Node, Node]) -> Node:
    """The same byte tree among another algebra's nodes."""
    found = known.get(node)
    if found is None:
        if isinstance(node, Switch):
            found = algebra.switch({_adopt(algebra, n, known): bits for bits, n in node.arms}, node.text)
        elif isinstance(node, Literal):
            found = algebra.literal(node.data, node.text)
        elif isinstance(node, Concat):
            found = algebra.concat(_adopt(algebra, node.head, known), _adopt(algebra, node.tail, known))
        else:
            found = algebra.EPSILON
        known[node] = found
    return found


def _utf8_tree(algebra: Algebra, ranges: Ranges) -> Node:
    return algebra.switch(_utf8_arms(algebra, ranges), UTF8)


def _json_tree(algebra: Algebra, ranges: Ranges) -> Node:
    arms = _utf8_arms(algebra, intersect(ranges, _PLAIN))
    escapes: dict[Node, int] = {}
    short = sum(_BYTE[ord(letter)] for c, letter in _SHORT.items() if intersect(ranges, single(c)))
    if short:
        escapes[algebra.EPSILON] = short
    escapes[_hex_escapes(algebra, ranges)] = _BYTE[ord("u")]
    arms[algebra.switch(escapes)] = _BYTE[ord("\\")]
    return algebra.switch(arms, JSON)


def any_text(algebra: Algebra, encoding: str) -> Node:
    """Any text of the encoding, and the algebra told so."""
    node = algebra.repeat(characters(algebra, EVERY, encoding), 0, None)
    algebra.set_universe(encoding, node)
    return node


_PLAIN = invert(make_ranges([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]))
_Pieces = list[tuple[int, int, Node]]


def _utf8_arms(algebra: Algebra, ranges: Ranges) -> dict[Node, int]:
    arms: dict[Node, int] = {}
    ascii_bits = sum((1 << (min(high, 0x7F) + 1)) - (1 << low) for low, high in _overlapping(ranges, 0, 0x7F))
    if ascii_bits:
        arms[algebra.EPSILON] = ascii_bits
    for count, lead, first, last in (
        (1, 0xC0, 0x80, 0x7FF),
        (2, 0xE0, 0x800, 0xFFFF),
        (3, 0xF0, 0x10000, 0x10FFFF),
    ):
        pieces = [
            (max(low, first), min(high, last), algebra.EPSILON) for low, high in _overlapping(ranges, first, last)
        ]
        leads = [_BYTE[lead + digit] for digit in range(0x20 if count == 1 else 0x10 if count == 2 else 5)]
        for node, bits in _digit_arms(algebra, pieces, count, leads, _CONTINUATION).items():
            arms[node] = arms.get(node, 0) | bits
    return arms


def _hex_escapes(algebra: Algebra, ranges: Ranges) -> Node:
    """What may follow `\\u`: four digits, or the digits of a surrogate pair with another `\\u` between."""
    pieces: _Pieces = [(low, min(high, 0xFFFF), algebra.EPSILON) for low, high in _overlapping(ranges, 0, 0xFFFF)]
    lows: dict[int, list[tuple[int, int]]] = {}  # high surrogate -> its low surrogates, where not all
    for low, high in _overlapping(ranges, 0x10000, sys.maxunicode):
        low, high = max(low, 0x10000) - 0x10000, high - 0x10000
        for top in {low >> 10, high >> 10}:
            span = (max(low, top << 10) & 0x3FF, min(high, (top << 10) | 0x3FF) & 0x3FF)
            lows.setdefault(top, []).append(span)
        if (high >> 10) - (low >> 10) > 1:
            whole = _low_surrogate(algebra, [(0, 0x3FF)])
            pieces.append((0xD800 + (low >> 10) + 1, 0xD800 + (high >> 10) - 1, whole))
    for top, spans in lows.items():
        pieces.append((0xD800 + top, 0xD800 + top, _low_surrogate(algebra, spans)))
    pieces.sort(key=lambda piece: piece[0])
    return algebra.switch(_digit_arms(algebra, pieces, 3, _HEX, _HEX))


def _low_surrogate(algebra: Algebra, spans: list[tuple[int, int]]) -> Node:
    pieces = [(0xDC00 + low, 0xDC00 + high, algebra.EPSILON) for low, high in make_ranges(spans)]
    digits = algebra.switch(_digit_arms(algebra, pieces, 3, _HEX, _HEX))
    return algebra.concat(algebra.literal(b"\\u"), digits)


def _digit_arms(algebra: Algebra, pieces: _Pieces, more: int, symbols: list[int], later: list[int]) -> dict[Node, int]:
    """Arms that read a number, most significant digit first (then `more` digits), and go on at the node of the
    piece (low, high, node) that has it. `symbols[d]`: the byte set that spells the first digit d; `later`:
    those of the other digits, which give their base."""
    span = len(later) ** more
    arms: dict[Node, int] = {}
    partly: dict[int, _Pieces] = {}
    for low, high, node in pieces:
        for digit in {low // span, high // span}:
            start = digit * span
            partly.setdefault(digit, []).append((max(low - start, 0), min(high - start, span - 1), node))
        inner = sum(symbols[low // span + 1 : high // span])
        if inner:
            child = _number(algebra, [(0, span - 1, node)], more, later)
            arms[child] = arms.get(child, 0) | inner
    for digit, sub in partly.items():
        child = _number(algebra, sub, more, later)
        arms[child] = arms.get(child, 0) | symbols[digit]
    return arms


def _number(algebra: Algebra, pieces: _Pieces, digits: int, symbols: list[int]) -> Node:
    if digits == 0:
        return pieces[0][2]
    return algebra.switch(_digit_arms(algebra, pieces, digits - 1, symbols, symbols))
