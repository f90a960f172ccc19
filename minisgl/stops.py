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
text that could grow into a match is held back, up to `MAX_REGEX_HOLD` characters.  Patterns may backtrack, and
they run where every request waits for them, so a request's patterns share one budget of time, however many they are
(`Clock`); a request that exceeds it ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import regex

MAX_REGEX_HOLD = 4096  # characters: a match of a stop_regex that would begin further back is not looked for
REGEX_TIMEOUT = 0.25  # seconds that all patterns of a request may take over one piece of text,
REGEX_BUDGET = 1.0  # and over its whole output,
REGEX_PER_PIECE = 0.001  # to which every piece adds
MAX_UNROLLED = 200_000  # parts of a stop_regex with its counts written out, some 300 bytes each
_CONTEXT = 256  # characters of printed text that look-behinds and \b of a stop_regex can see

# A pattern with one of these outside character classes may need to see the character after its match.
_LOOKS_AHEAD = regex.compile(r"\\[bBZmMX]|\$|\(\?[=!>]")
_OPAQUE = regex.compile(r"\\[^bBZmMX]|\[\^?\]?(?:\\.|[^\]\\])*\]", regex.DOTALL)


class StopRegexTimeout(ValueError):
    """The stop_regex of a request took more time than it has: that request must end, not the engine."""


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


class Clock:
    """The time that one request's patterns have, in seconds of this thread's work: waiting for others is no fault.

    With only a limit for each pattern and piece of text, a thousand slow patterns could hold up the engine for minutes.
    This one is for all of them together: up to REGEX_TIMEOUT for a piece of text, and for the whole output REGEX_BUDGET
    and REGEX_PER_PIECE for each piece.
    """

    __slots__ = ("_began", "_budget")

    def __init__(self) -> None:
        self._budget = REGEX_BUDGET
        self._began = 0.0

    def begin(self) -> None:
        """A piece of text is about to be scanned."""
        self._budget += REGEX_PER_PIECE
        self._began = time.thread_time()

    def end(self) -> None:
        """It was scanned."""
        self._budget -= time.thread_time() - self._began

    def left(self) -> float:
        """Seconds that scans of this piece still have.  Raises TimeoutError when there are none."""
        left = min(self._budget, REGEX_TIMEOUT) - (time.thread_time() - self._began)
        if left <= 0:
            raise TimeoutError
        return left


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
    Raises ValueError for an empty stop string, and for what `compile_pattern` refuses.
    """

    __slots__ = ("_automaton", "_clock", "_context", "_held", "_patterns", "_state", "_trim", "matched", "matched_text")

    def __init__(
        self,
        stop: str | Sequence[str] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        no_stop_trim: bool = False,
    ):
        strings = _strings("stop", stop)
        self._automaton = _automaton(strings) if strings else None
        self._patterns = [_Pattern(text) for text in _strings("stop_regex", stop_regex)]
        self._clock = Clock()
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
        Raises StopRegexTimeout when the patterns take too long.
        """
        if self.matched is not None:
            return ""
        text = self._held + delta
        if not check:
            self._state = 0
            return self._release(text, len(text))
        match, hold = self._scan_strings(delta, len(self._held))
        for found, first in self._scan_patterns(text, len(self._held)):
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
        if found := [match for match, _ in self._scan_patterns(text, 0, final=True) if match]:
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

    def _scan_patterns(self, text: str, seen: int, final: bool = False) -> list[tuple[Match | None, int]]:
        """What each pattern finds (see `_Pattern.scan`), on the request's clock."""
        if not self._patterns:
            return []
        self._clock.begin()
        try:
            return [pattern.scan(self._clock, self._context, text, seen, final) for pattern in self._patterns]
        finally:
            self._clock.end()

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

    __slots__ = ("_looks_ahead", "_regex", "text")

    def __init__(self, text: str):
        self.text = text
        self._regex = compile_pattern(text)
        self._looks_ahead = bool(_LOOKS_AHEAD.search(_OPAQUE.sub("", text)))

    def scan(
        self, clock: Clock, context: str, text: str, seen: int, final: bool = False
    ) -> tuple[Match | None, int]:
        """Look for a match in `text`, whose first `seen` characters held none; `context` came before it.

        Returns the match, and the position in `text` from which on it could still be the beginning of one. A
        pattern that looks ahead (\\b, $, (?=...)) counts only when a character after its match is known, or
        at the end.
        """
        whole, base = context + text, len(context)
        try:
            found = self._regex.search(whole, base, timeout=clock.left())
            if found and self._looks_ahead and not final and found.end() == len(whole):
                return None, self._first_open(clock, whole, base, found.start()) - base
            if found and not self._looks_ahead:
                found = self._first_completed(clock, whole, base, base + seen, found.end()) or found
            if found:
                return Match(found.end() - base, found.start() - base, self.text), len(text)
            if final:
                return None, len(text)
            partial = self._regex.search(whole, base, partial=True, timeout=clock.left())
        except TimeoutError:
            raise StopRegexTimeout(f"stop_regex takes too long on this text, at the pattern {self.text!r}") from None
        return None, partial.start() - base if partial else len(text)

    def _first_open(self, clock: Clock, whole: str, base: int, end: int) -> int:
        """The first position before `end` where an unfinished match begins, else `end`. (Partial search would
        say, but it prefers the finished match that is there too.)"""
        for start in range(base, end):
            if self._regex.match(whole, start, partial=True, timeout=clock.left()):
                return start
        return end

    def _first_completed(self, clock: Clock, whole: str, base: int, seen: int, end: int):
        """The match as it stood at the first character where there was one: what a reader of one character at
        a time would have found. Runs once, when the output is about to end."""
        for stop in range(seen + 1, end):
            if found := self._regex.search(whole, base, stop, timeout=clock.left()):
                return found
        return None


def compile_pattern(text: str) -> regex.Pattern[str]:
    """A stop_regex, ready to be looked for. Raises ValueError for one that is malformed, that matches the empty text,
    or that is too big: `regex` writes the body of {n} down n times, so that a few nested ones fill any memory."""
    shown = repr(text if len(text) <= 80 else text[:80] + "...")
    if _unrolled(text) > MAX_UNROLLED:
        raise ValueError(f"stop_regex must be a pattern of {MAX_UNROLLED} parts at most, written out, got {shown}")
    try:
        compiled = regex.compile(text)
        matches_nothing = compiled.fullmatch("", timeout=REGEX_TIMEOUT) is not None
    except TimeoutError:
        raise ValueError(f"stop_regex must be a quicker pattern, got {shown}") from None
    except Exception as error:  # its own errors, and others: RecursionError for deep nesting, say
        reason = " ".join(str(error).split())
        raise ValueError(f"stop_regex must be a valid regular expression, got {shown}: {reason}") from None
    if matches_nothing:
        raise ValueError(f"stop_regex must be a pattern that does not match the empty text, got {shown}")
    return compiled


_COUNT = regex.compile(r"(\)\s*)?\{\s*([0-9]+)")


def _unrolled(text: str) -> int:
    """At least as many parts as a pattern has with its counts written out, without parsing it: a count behind a
    character adds, one behind a group multiplies (wherever that group may be: behind a comment, only adding would do
    for less than there is, so there every count multiplies)."""
    size, factor = len(text), 1
    commented = "(?#" in text or regex.search(r"\(\?[a-zA-Z]*x", text) is not None
    for group, digits in _COUNT.findall(text):
        count = min(int(digits[:12]), MAX_UNROLLED + 1)
        if group or commented:
            factor = min(factor * max(count, 1), MAX_UNROLLED + 1)
        else:
            size += count
    return size * factor


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
