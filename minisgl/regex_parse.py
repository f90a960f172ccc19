"""Read a regular expression into a small tree, exactly, or refuse it naming the construct.

Why not a library's parser: interegular's accepts some patterns with another meaning than Python's (`[]a]`,
`a**`, lookarounds) and crashes on others; Python's own is private and has no `\\p{..}`. What a grammar needs is
small: characters, classes, groups, alternation, repetition, and where words and lines begin and end. The whole
pattern is first compiled with the `regex` package, which knows every syntax error; this parser then only has to
be right about what remains.

Three dialects:

    PYTHON     `re`: \\d \\w \\s are Unicode, `.` is all but \\n, `$` also stands before a final \\n
    AGREED     JSON Schema's ECMA-262, where engines differ (\\w of `é`, `.` of U+2028, \\S of U+FEFF): only what
               Python and ECMA-262 both match, so that every validator accepts what we write
    GENEROUS   the same with what either matches: for exclusions ("a key that doesn't match")

Refused: lookarounds, back-references, atomic and possessive groups, conditionals, recursion, (?m) with anchors,
(?x), \\G \\K \\R \\X. Lazy quantifiers describe the same language as greedy ones.
"""

from __future__ import annotations

import re
import string
import unicodedata
from dataclasses import dataclass, replace

import regex

from .charsets import EVERY, Ranges, class_ranges, ignore_case, intersect, invert, make_ranges, single, union
from .expressions import GrammarError, UnsupportedGrammar

PYTHON, AGREED, GENEROUS = "python", "agreed", "generous"
MAX_REPEAT = 1_000_000
MAX_DEPTH = 100


@dataclass(frozen=True)
class Chars:
    """One character out of `ranges`."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    items: tuple[Tree, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Tree, ...]


@dataclass(frozen=True)
class Repetition:
    body: Tree
    low: int
    high: int | None


@dataclass(frozen=True)
class Anchor:
    """start (\\A), end (\\Z), end_or_newline (Python's $), word (\\b), not_word (\\B)."""

    kind: str


Tree = Chars | Sequence | Choice | Repetition | Anchor


@dataclass(frozen=True)
class _Flags:
    ignore_case: bool = False
    dot_all: bool = False
    ascii: bool = False
    multiline: bool = False


_GROUPS_REFUSED = (
    ("?=", "a lookahead"),
    ("?!", "a negative lookahead"),
    ("?<=", "a lookbehind"),
    ("?<!", "a negative lookbehind"),
    ("?>", "an atomic group"),
    ("?P=", "a back-reference"),
    ("?P>", "a recursive pattern"),
    ("?&", "a recursive pattern"),
    ("?R", "a recursive pattern"),
    ("?(", "a conditional group"),
    ("?|", "a branch reset group"),
    ("?+", "a recursive pattern"),
    ("*", "a backtracking verb"),
)
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_ECMA_SPACE = union(
    class_ranges(r"[\t\n\v\f\r ]"),
    make_ranges((c, c) for c in (0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF)),
    make_ranges([(0x2000, 0x200A)]),
)
_ASCII = make_ranges([(0, 0x7F)])
_MISSING = object()


def parse(pattern: str, dialect: str = PYTHON) -> Tree:
    """The tree of `pattern`. Raises GrammarError, naming what is malformed or unsupported."""
    if not isinstance(pattern, str):
        raise GrammarError(f"regex must be a str, not {type(pattern).__name__}")
    parser = _Parser(pattern, dialect)
    tree = parser.whole()
    _check_syntax(pattern, parser.counts)
    return tree


def _check_syntax(pattern: str, counts: list[tuple[int, int]]) -> None:
    """A second opinion on errors. `regex` doesn't know ECMA's spellings; those are this parser's own. It writes the
    body of {n} down n times, which takes gigabytes where they are nested; counts, known to be right, are 1 here."""
    if re.search(r"\\c[A-Za-z]|\\u\{|\\/|\\-|\(\?<[^=!]", pattern):
        return
    edges = [0, *(edge for span in counts for edge in span), len(pattern)]
    brief = "{1}".join(pattern[begin:end] for begin, end in zip(edges[::2], edges[1::2]))
    try:
        regex.compile(brief)
    except Exception as error:  # the package raises more than its own error class for odd input
        raise GrammarError(f"regex {pattern[:80]!r} is not valid: {error}") from None


class _Parser:
    def __init__(self, pattern: str, dialect: str):
        self.pattern, self.dialect = pattern, dialect
        self.at = 0
        self.depth = 0
        self.counts: list[tuple[int, int]] = []  # where counts like {2,3} stand

    # ---- reading

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.pattern):
            raise self.error("ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def error(self, problem: str) -> GrammarError:
        return GrammarError(f"regex {self.pattern[:80]!r} {problem} (position {self.at})")

    def refuse(self, construct: str) -> GrammarError:
        return UnsupportedGrammar(f"regex {self.pattern[:80]!r} uses {construct}, which is not supported")

    # ---- structure

    def whole(self) -> Tree:
        tree = self.choice(_Flags(), top=True)
        if self.at < len(self.pattern):
            raise self.error("has an unmatched )")
        return tree

    def choice(self, flags: _Flags, top: bool = False) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"is nested deeper than {MAX_DEPTH}")
        options = []
        while True:
            items, flags = self.sequence(flags, top and not options)
            options.append(items)
            if not self.take("|"):
                break
        self.depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self, flags: _Flags, flags_may_come: bool) -> tuple[Tree, _Flags]:
        items: list[Tree] = []
        while self.at < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            start = self.at
            if self.peek("(?") and (found := re.compile(r"\(\?([a-zA-Z]+)\)").match(self.pattern, self.at)):
                if items or start or not flags_may_come:
                    raise self.error("sets global flags elsewhere than at its start")
                self.at = found.end()
                flags = self.with_flags(flags, found[1], "")
                flags_may_come = False
                continue
            item = self.atom(flags)
            if item is not None:
                items.append(self.quantified(item))
        return (items[0] if len(items) == 1 else Sequence(tuple(items))), flags

    def atom(self, flags: _Flags) -> Tree | None:
        char = self.next()
        if char == "(":
            return self.group(flags)
        if char == "[":
            return self.char_class(flags)
        if char == ".":
            return Chars(self.dot(flags))
        if char in "^$":
            if flags.multiline:
                raise self.refuse("an anchor under the flag (?m)")
            dollar = "end_or_newline" if self.dialect != AGREED else "end"
            return Anchor("start" if char == "^" else dollar)
        if char == "\\":
            return self.escape(flags)
        if char in "*+?":
            raise self.error(f"has nothing for {char} to repeat")
        if char == "{" and self.braces() is not None:
            raise self.error("has nothing for {} to repeat")
        return self.chars(single(char), flags)

    def dot(self, flags: _Flags) -> Ranges:
        if flags.dot_all:
            return EVERY
        stops = "\n" if self.dialect != AGREED else "\n\r\u2028\u2029"
        return invert(make_ranges((ord(c), ord(c)) for c in stops))

    def chars(self, ranges: Ranges, flags: _Flags) -> Chars:
        return Chars(ignore_case(ranges, flags.ascii) if flags.ignore_case else ranges)

    def group(self, flags: _Flags) -> Tree | None:
        for prefix, name in _GROUPS_REFUSED:
            if self.peek(prefix):
                raise self.refuse(name)
        if self.take("?#"):
            end = self.pattern.find(")", self.at)
            if end < 0:
                raise self.error("has an unfinished comment")
            self.at = end + 1
            return None
        if self.take("?P<") or self.take("?<"):
            end = self.pattern.find(">", self.at)
            if end < 0 or not self.pattern[self.at : end].isidentifier():
                raise self.error("has a bad group name")
            self.at = end + 1
        elif self.take("?") and not self.take(":"):
            found = re.compile(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?:").match(self.pattern, self.at)
            if not found:
                raise self.error("has an unknown kind of group")
            self.at = found.end()
            flags = self.with_flags(flags, found[1], found[2] or "")
        tree = self.choice(flags)
        if not self.take(")"):
            raise self.error("lacks a )")
        return tree

    def with_flags(self, flags: _Flags, on: str, off: str) -> _Flags:
        names = {"i": "ignore_case", "s": "dot_all", "a": "ascii", "m": "multiline"}
        for letters, value in ((on, True), (off, False)):
            for letter in letters:
                if letter == "u":
                    flags = replace(flags, ascii=not value)
                elif letter in names:
                    flags = replace(flags, **{names[letter]: value})
                else:
                    raise self.refuse(f"the flag (?{letter})")
        return flags

    # ---- repetition

    def quantified(self, item: Tree) -> Tree:
        span = self.quantifier()
        if span is None:
            return item
        low, high = span
        if self.take("+"):
            raise self.refuse("a possessive quantifier")
        self.take("?")
        if self.peek("*") or self.peek("+") or self.peek("?") or self.braces() is not None:
            raise self.error("repeats a repetition (multiple repeat)")
        if isinstance(item, Anchor):
            return Sequence(()) if low == 0 else item
        return Repetition(item, low, high)

    def quantifier(self) -> tuple[int, int | None] | None:
        for symbol, span in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(symbol):
                return span
        found = self.braces()
        if found is None:
            return None
        self.at = found.end()
        self.counts.append(found.span())
        low, comma, high = found.groups()
        if max(len(low), len(high)) > 9:
            raise self.error(f"has a bad repeat count {found[0][:20]}")
        if not low and self.dialect != PYTHON:
            raise self.refuse("the quantifier {,n}, on which dialects disagree")
        first = int(low or 0)
        last = first if not comma else int(high) if high else None
        if (last is not None and last < first) or max(first, last or 0) > MAX_REPEAT:
            raise self.error(f"has a bad repeat count {found[0]}")
        return first, last

    def braces(self) -> re.Match[str] | None:
        found = re.compile(r"\{(\d*)(,?)(\d*)\}", re.ASCII).match(self.pattern, self.at)
        return found if found and (found[1] or found[2]) else None

    # ---- escapes and classes

    def escape(self, flags: _Flags) -> Tree:
        letter = self.next()
        if letter in "bB":
            if self.dialect != PYTHON:
                raise self.refuse(f"\\{letter} in a JSON Schema pattern")
            if flags.ascii:
                raise self.refuse(f"\\{letter} under the flag (?a)")
            return Anchor("word" if letter == "b" else "not_word")
        if self.dialect == PYTHON and letter in "AZ":
            return Anchor("start" if letter == "A" else "end")
        if letter in "123456789":
            if self.octal_follows(letter):
                return self.chars(self.octal(letter), flags)
            raise self.refuse("a back-reference")
        if letter == "k" and self.peek("<"):
            raise self.refuse("a back-reference")
        if letter in "GKRX":
            raise self.refuse(f"\\{letter}")
        found = self.shared_escape(letter, flags)
        return found if isinstance(found, Chars) else self.chars(found, flags)

    def octal_follows(self, letter: str) -> bool:
        more = self.pattern[self.at : self.at + 2]
        return letter in "0123" and len(more) == 2 and all(c in "01234567" for c in more)

    def octal(self, letter: str) -> Ranges:
        found = re.compile(r"[0-7]{0,2}").match(self.pattern, self.at)
        digits = letter + (found[0] if found else "")
        self.at += len(digits) - 1
        return single(chr(int(digits, 8)))

    def shared_escape(self, letter: str, flags: _Flags) -> Ranges | Chars:
        """An escape that means the same inside and outside a class. Chars: case plays no role any more."""
        if letter in "dDwWsS":
            return Chars(self.shorthand(letter, flags))
        if letter in "pP":
            return Chars(self.property(letter, flags))
        if letter in _SIMPLE and not (letter == "a" and self.dialect != PYTHON):
            return single(_SIMPLE[letter])
        if letter == "0":
            return self.octal(letter)
        if letter == "x":
            return self.hexadecimal(2)
        if letter == "u" and self.dialect != PYTHON and self.take("{"):
            end = self.pattern.find("}", self.at)
            digits, self.at = self.pattern[self.at : end], end + 1
            return self.code_point(digits)
        if letter == "u":
            return self.utf16() if self.dialect != PYTHON else self.hexadecimal(4)
        if letter == "U" and self.dialect == PYTHON:
            return self.hexadecimal(8)
        if letter == "N" and self.dialect == PYTHON and self.take("{"):
            end = self.pattern.find("}", self.at)
            try:
                name, self.at = self.pattern[self.at : end], end + 1
                return single(unicodedata.lookup(name))
            except KeyError:
                raise self.error("names an unknown character") from None
        if letter == "c" and self.dialect != PYTHON:
            return single(chr(ord(self.next()) % 32))
        if letter in string.ascii_letters or letter in string.digits:
            raise self.error(f"has the unknown escape \\{letter}")
        return single(letter)

    def hexadecimal(self, count: int) -> Ranges:
        digits = self.pattern[self.at : self.at + count]
        self.at += count
        if len(digits) < count:
            raise self.error("has an unfinished escape")
        return self.code_point(digits)

    def utf16(self) -> Ranges:
        """ECMA's \\uXXXX; two of them may be one character there, and are two that no text has in Python."""
        pair = re.compile(r"[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}").match(self.pattern, self.at)
        if pair:
            raise self.refuse("a pair of surrogate escapes, on which dialects disagree (write the character itself)")
        return self.hexadecimal(4)

    def code_point(self, digits: str) -> Ranges:
        if not digits or not all(c in string.hexdigits for c in digits) or int(digits, 16) > 0x10FFFF:
            raise self.error(f"has a bad escape ({digits!r} is no code point)")
        return single(chr(int(digits, 16)))

    def shorthand(self, letter: str, flags: _Flags) -> Ranges:
        wide = class_ranges("\\" + letter.lower())
        if self.dialect == PYTHON:
            inside = intersect(wide, _ASCII) if flags.ascii else wide
            return inside if letter.islower() else invert(inside)
        narrow = _ECMA_SPACE if letter in "sS" else intersect(wide, _ASCII)
        both, either = intersect(wide, narrow), union(wide, narrow)
        if letter.islower():
            return both if self.dialect == AGREED else either
        return invert(either if self.dialect == AGREED else both)

    def property(self, letter: str, flags: _Flags) -> Ranges:
        found = re.compile(r"\{\^?[A-Za-z0-9_=:\- ]+\}|[A-Za-z]").match(self.pattern, self.at)
        if not found:
            raise self.error("has a bad \\p{...}")
        self.at = found.end()
        ranges = class_ranges(f"\\{letter}{found[0]}")
        return ignore_case(ranges, flags.ascii) if flags.ignore_case else ranges

    def char_class(self, flags: _Flags) -> Tree:
        negated = self.take("^")
        if self.dialect != PYTHON and self.peek("]"):
            raise self.refuse("an empty class [] or [^], on which dialects disagree")
        members: list[Ranges] = []
        settled: list[Ranges] = []  # shorthands, where case plays no role
        first = True
        while first or not self.peek("]"):
            first = False
            if self.peek("[:") and self.pattern.find(":]", self.at) > 0:
                raise self.refuse("a POSIX class")
            low = self.member(flags)
            if not (self.peek("-") and not self.pattern.startswith("-]", self.at)):
                (settled if isinstance(low, Chars) else members).append(_ranges(low))
                continue
            self.at += 1
            high = self.member(flags)
            if isinstance(low, Chars) or isinstance(high, Chars) or not low or not high:
                raise self.error("has a bad range in a class")
            if low[0][0] > high[0][0]:
                raise self.error("has a reversed range in a class")
            members.append(make_ranges([(low[0][0], high[0][0])]))
        self.at += 1
        ranges = union(*members)
        if flags.ignore_case:
            ranges = ignore_case(ranges, flags.ascii)
        ranges = union(ranges, *settled)
        return Chars(invert(ranges) if negated else ranges)

    def member(self, flags: _Flags) -> Ranges | Chars:
        char = self.next()
        if char != "\\":
            return single(char)
        letter = self.next()
        if letter == "b":
            return single("\b")
        if letter in "1234567":
            if self.dialect != PYTHON:
                raise self.refuse("an octal escape")
            return self.octal(letter)
        return self.shared_escape(letter, flags)


def _ranges(member: Ranges | Chars) -> Ranges:
    return member.ranges if isinstance(member, Chars) else member
