"""Sets of JSON values of one type each: what a schema becomes once its keywords are applied.

A schema allows a union of these; `meet` intersects two. All fields are immutable, so equal sets are one. Inner
schemas (of properties, of items) stay places in the document (`Located`): a tuple of them means "all of these",
and is only looked into when it is needed, which is what makes recursive schemas finite.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from .json_source import Located

All = tuple[Located, ...]  # every one of these schemas holds


@dataclass(frozen=True)
class Null:
    pass


@dataclass(frozen=True)
class Boolean:
    values: frozenset[bool] = frozenset((True, False))


@dataclass(frozen=True)
class Number:
    """integer: True only integers, False only others. listed: only these, with their spelling. multiples:
    numbers that divide the value; with a False sign, that don't."""

    integer: bool | None = None
    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    multiples: frozenset[tuple[Fraction, bool]] = frozenset()
    listed: frozenset[tuple[Fraction, str]] | None = None

    def has(self, value: Fraction) -> bool:
        """Does a number fit everything but `listed`?"""
        whole = value.denominator == 1
        if self.integer is not None and whole != self.integer:
            return False
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.high_open and value == self.high)):
            return False
        return all(((value / divisor).denominator == 1) == sign for divisor, sign in self.multiples)


@dataclass(frozen=True)
class String:
    """facets: (kind, text, sign) with kind "pattern", "format" or "generous pattern" (in any dialect); a False
    sign: it doesn't hold. listed: only these. excluded: not these."""

    low: int = 0
    high: int | None = None
    facets: frozenset[tuple[str, str, bool]] = frozenset()
    listed: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()

    def generous(self) -> String:
        """With every pattern that has to match taken in the widest sense (see `regex_parse`)."""
        kinds = {"pattern": "generous pattern"}
        return replace(self, facets=frozenset((kinds.get(k, k) if sign else k, t, sign) for k, t, sign in self.facets))


@dataclass(frozen=True)
class ArrayRule:
    """The items that one schema object speaks of: the first ones, and all others."""

    prefix: tuple[Located, ...] = ()
    items: Located | None = None

    def item(self, index: int) -> Located | None:
        return self.prefix[index] if index < len(self.prefix) else self.items


@dataclass(frozen=True)
class Array:
    rules: tuple[ArrayRule, ...] = ()
    low: int = 0
    high: int | None = None
    unique: bool = False

    @property
    def prefix_length(self) -> int:
        return max((len(rule.prefix) for rule in self.rules), default=0)

    def item(self, index: int) -> All:
        """What holds for the item at `index`."""
        return together(rule.item(index) for rule in self.rules)


@dataclass(frozen=True)
class ObjectRule:
    """The members that one schema object speaks of. `additional` (None: anything) is for names that neither
    `properties` nor `patterns` has; `names` is about every name."""

    properties: tuple[tuple[str, Located], ...] = ()
    patterns: tuple[tuple[str, Located], ...] = ()
    additional: Located | None = None
    names: Located | None = None
    by_name: dict[str, Located] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.by_name.update(self.properties)


@dataclass(frozen=True)
class Object:
    rules: tuple[ObjectRule, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None


Value = Null | Boolean | Number | String | Array | Object
EVERYTHING: tuple[Value, ...] = (Null(), Boolean(), Number(), String(), Array(), Object())


def together(places) -> All:
    """A conjunction in a canonical order, without repetitions and without `True`."""
    kept = {place for place in places if place is not None and not (place.schema is True and not place.negated)}
    return tuple(sorted(kept, key=lambda place: place.order))


def meet(first: Value, second: Value) -> Value | None:
    """The values that are in both, None where there is plainly none. (Emptiness that takes a look into inner
    schemas or patterns is found later.)"""
    if isinstance(first, Null) and isinstance(second, Null):
        return first
    if isinstance(first, Boolean) and isinstance(second, Boolean):
        values = first.values & second.values
        return Boolean(values) if values else None
    if isinstance(first, Number) and isinstance(second, Number):
        return _meet_numbers(first, second)
    if isinstance(first, String) and isinstance(second, String):
        return _meet_strings(first, second)
    if isinstance(first, Array) and isinstance(second, Array):
        high = smaller(first.high, second.high)
        low = max(first.low, second.low)
        rules = tuple(dict.fromkeys(first.rules + second.rules))
        return Array(rules, low, high, first.unique or second.unique) if high is None or low <= high else None
    if isinstance(first, Object) and isinstance(second, Object):
        high, low = smaller(first.high, second.high), max(first.low, second.low)
        rules = tuple(dict.fromkeys(first.rules + second.rules))
        required = tuple(dict.fromkeys(first.required + second.required))
        return Object(rules, required, low, high) if high is None or low <= high else None
    return None


def smaller(first: int | None, second: int | None) -> int | None:
    """The smaller upper limit, None being none."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def _meet_numbers(first: Number, second: Number) -> Number | None:
    if first.integer is not None and second.integer is not None and first.integer != second.integer:
        return None
    low = _tighter(first.low, first.low_open, second.low, second.low_open, 1)
    high = _tighter(first.high, first.high_open, second.high, second.high_open, -1)
    merged = Number(
        first.integer if first.integer is not None else second.integer,
        *low,
        *high,
        first.multiples | second.multiples,
    )
    crossed = low[0] is not None and high[0] is not None and low[0] >= high[0]
    if crossed and (low[0] != high[0] or low[1] or high[1]):
        return None
    lists = [listed for listed in (first.listed, second.listed) if listed is not None]
    if not lists:
        return merged
    values = set.intersection(*({value for value, _ in listed} for listed in lists))
    listed = frozenset(item for item in lists[0] if item[0] in values and merged.has(item[0]))
    return replace(merged, listed=listed) if listed else None


def _tighter(
    a: Fraction | None, a_open: bool, b: Fraction | None, b_open: bool, sign: int
) -> tuple[Fraction | None, bool]:
    if a is None or b is None:
        return (b, b_open) if a is None else (a, a_open)
    if a == b:
        return a, a_open or b_open
    return (a, a_open) if (a > b) == (sign > 0) else (b, b_open)


def _meet_strings(first: String, second: String) -> String | None:
    low, high = max(first.low, second.low), smaller(first.high, second.high)
    excluded = first.excluded | second.excluded
    listed = first.listed if second.listed is None else second.listed
    if first.listed is not None and second.listed is not None:
        listed = first.listed & second.listed
    if listed is not None:
        kept = (text for text in listed - excluded if low <= len(text) and (high is None or len(text) <= high))
        listed, excluded = frozenset(kept), frozenset()
        if not listed:
            return None
    if high is not None and low > high:
        return None
    return String(low, high, first.facets | second.facets, listed, excluded)
