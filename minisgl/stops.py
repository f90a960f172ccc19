"""Stop strings and patterns in a stream: print nothing that a stop may take back, and hold back nothing else.

A stop string can end anywhere inside a token and begin several tokens earlier, so text that might be its
beginning has to wait. How much? Exactly the longest suffix of the text that is a proper prefix of some stop
string: anything longer delays text for no reason, anything shorter leaks. That number is what an Aho-Corasick
automaton (CACM 18(6), 1975) over the stop strings knows at every character: the depth of its state.

    stop = ["DEFGHIJ"]       "DEF"   "G"   "HI"   "X"
    depth after it              3     4      6     0
    printed                    ""    ""     ""    "DEFGHIX"

Which stop wins: the one that is complete first, character by character; among those complete at the same
character the longest. That choice needs no knowledge of what follows, so it does not depend on how the text
is cut into tokens, and generation ends as soon as it can ("\\n" stops at once even if "\\n\\n" is a stop).

Patterns (`stop_regex`) follow the same rule through the `regex` library's partial matching: a suffix of the
text that could grow into a match is held back, up to `MAX_REGEX_HOLD` characters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import regex

MAX_REGEX_HOLD = 4096  # characters: a match of a stop_regex that would begin further back is not looked for
REGEX_TIMEOUT = 0.25  # seconds per scan (all its searches), against patterns that backtrack exponentially
_CONTEXT = 256  # characters of printed text that look-behinds and \b of a stop_regex can see

# A pattern with one of these outside character classes may need to see the character after its match.
_LOOKS_AHEAD = regex.compile(r"\\[bBZmMX]|\$|\(\?[=!>]")
_OPAQUE = regex.compile(r"\\[^bBZmMX]|\[\^?\]?(?:\\.|[^\]\\])*\]", regex.DOTALL)


class StopRegexTimeout(ValueError):
    """A stop_regex took longer than `REGEX_TIMEOUT` on this text: its request must end, not the engine."""


class Match(NamedTuple):
    """A stop found in the text at hand. The order of the fields decides: earliest end first, then longest."""

    end: int
    start: int
    stop: str  # the stop string, or the pattern


class Automaton:
    """Aho-Corasick over the stop strings. State 0 is the root; `depth[state]` is the length of the longest
    suffix of the text read so far that begins a stop string, `found[state]` the longest stop string that is
    complete there."""

    def __init__(self, stops: Sequence[str]):
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self.fail = [0] * len(self.depth)
        queue = list(self.children[0].values())
        for state in queue:  # breadth first: a state's suffix is shorter, so it is done already
            for char, child in self.children[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                self.found[child] = self.found[child] or self.found[self.fail[child]]
                queue.append(child)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.children[state]:
                self.children[state][char] = len(self.depth)
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self.children[state][char]
        self.found[state] = stop

    def step(self, state: int, char: str) -> int:
        """The state after one more character (amortised O(1): each failure undoes an earlier advance)."""
        while state and char not in self.children[state]:
            state = self.fail[state]
        return self.children[state].get(char, 0)


_automaton = lru_cache(maxsize=256)(Automaton)  # read-only once built, so requests share it


class StopChecker:
    """Watches one output text for stops.

        checker = StopChecker(["\\nQ:"])
        for delta in deltas:
            print(checker.feed(delta), end="")
            if checker.matched is not None:
                break
        else:
            print(checker.finish())

    stop: stop strings.
    stop_regex: patterns of the `regex` library (a superset of Python's `re`).
    no_stop_trim: the text that is returned ends with the stop instead of before it.
    matched: None, or which stop ended the text: the stop string, or the pattern.
    matched_text: the text that it matched.
    Raises ValueError for an empty stop string, and for a pattern that is malformed or matches the empty text.
    """

    __slots__ = ("_automaton", "_context", "_held", "_patterns", "_state", "_trim", "matched", "matched_text")

    def __init__(
        self,
        stop: str | Sequence[str] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        no_stop_trim: bool = False,
    ):
        strings = _strings("stop", stop)
        self._automaton = _automaton(strings) if strings else None
        self._patterns = [_Pattern(text) for text in _strings("stop_regex", stop_regex)]
        self._trim = not no_stop_trim
        self._state = 0
        self._held = ""
        self._context = ""  # the end of the printed text, kept only for patterns
        self.matched: str | None = None
        self.matched_text: str | None = None

    @property
    def held(self) -> str:
        """Text that is not safe to print yet."""
        return self._held

    def feed(self, delta: str, check: bool = True) -> str:
        """Append newly generated text; returns what is safe to print now. After a match it returns "".

        check=False: this text can't be part of a stop (min_new_tokens isn't reached): all of it is returned.
        Raises StopRegexTimeout when a pattern takes too long.
        """
        if self.matched is not None:
            return ""
        text = self._held + delta
        if not check:
            self._state = 0
            return self._release(text, len(text))
        match, hold = self._scan_strings(delta, len(self._held))
        for pattern in self._patterns:
            found, first = pattern.scan(self._context, text, len(self._held))
            match = min(match, found) if match and found else match or found
            hold = max(hold, min(len(text) - first, MAX_REGEX_HOLD))
        if match:
            return self._stop(text, match)
        return self._release(text, len(text) - hold)

    def finish(self) -> str:
        """The output has ended: returns the text still held back. A pattern that waited to see the next
        character may match now."""
        if self.matched is not None:
            return ""
        text = self._held
        finals = [pattern.scan(self._context, text, 0, final=True)[0] for pattern in self._patterns]
        if found := [match for match in finals if match]:
            return self._stop(text, min(found))
        return self._release(text, len(text))

    def _scan_strings(self, delta: str, offset: int) -> tuple[Match | None, int]:
        """The first stop string completed by delta (which stands at `offset`), and how much is to be held if
        none."""
        if self._automaton is None:
            return None, 0
        state, step, found = self._state, self._automaton.step, self._automaton.found
        for i, char in enumerate(delta, offset + 1):
            state = step(state, char)
            if (stop := found[state]) is not None:
                return Match(i, i - len(stop), stop), 0
        self._state = state
        return None, self._automaton.depth[state]

    def _release(self, text: str, end: int) -> str:
        self._held = text[end:]
        if self._patterns:
            self._context = (self._context + text[:end])[-_CONTEXT:]
        return text[:end]

    def _stop(self, text: str, match: Match) -> str:
        self.matched, self.matched_text = match.stop, text[match.start : match.end]
        self._held = ""
        return text[: match.start if self._trim else match.end]


class _Pattern:
    """One compiled stop_regex."""

    __slots__ = ("_end", "_looks_ahead", "_regex", "text")

    def __init__(self, text: str):
        self.text = text
        try:
            self._regex = regex.compile(text)
        except regex.error as error:
            raise ValueError(f"stop_regex {text!r} is not a valid pattern: {error}") from None
        if self._regex.fullmatch(""):
            raise ValueError(
                f"stop_regex {text!r} matches the empty text: it would stop every output at once"
            )
        self._looks_ahead = bool(_LOOKS_AHEAD.search(_OPAQUE.sub("", text)))

    def scan(self, context: str, text: str, seen: int, final: bool = False) -> tuple[Match | None, int]:
        """Look for a match in `text`, whose first `seen` characters held none; `context` came before it.

        Returns the match, and the position in `text` from which on it could still be the beginning of one. A
        pattern that looks ahead (\\b, $, (?=...)) counts only when a character after its match is known, or
        at the end.
        """
        whole, base = context + text, len(context)
        self._end = time.monotonic() + REGEX_TIMEOUT
        try:
            found = self._regex.search(whole, base, timeout=self._left())
            if found and self._looks_ahead and not final and found.end() == len(whole):
                return None, self._first_open(whole, base, found.start()) - base
            if found and not self._looks_ahead:
                found = self._first_completed(whole, base, base + seen, found.end()) or found
            if found:
                return Match(found.end() - base, found.start() - base, self.text), len(text)
            if final:
                return None, len(text)
            partial = self._regex.search(whole, base, partial=True, timeout=self._left())
        except TimeoutError:
            raise StopRegexTimeout(f"stop_regex {self.text!r} takes too long on this text") from None
        return None, partial.start() - base if partial else len(text)

    def _left(self) -> float:
        """Seconds that this scan still has."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _first_open(self, whole: str, base: int, end: int) -> int:
        """The first position before `end` where an unfinished match begins, else `end`. (Partial search would
        say, but it prefers the finished match that is there too.)"""
        for start in range(base, end):
            if self._regex.match(whole, start, partial=True, timeout=self._left()):
                return start
        return end

    def _first_completed(self, whole: str, base: int, seen: int, end: int):
        """The match as it stood at the first character where there was one: what a reader of one character at
        a time would have found. Runs once, when the output is about to end."""
        for stop in range(seen + 1, end):
            if found := self._regex.search(whole, base, stop, timeout=self._left()):
                return found
        return None


def _strings(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else tuple(value)
    for text in strings:
        if not isinstance(text, str):
            raise ValueError(f"{name} must be a str or a list of str, not {type(text).__name__}")
        if not text:
            raise ValueError(f"{name} must not contain an empty string")
    return strings
