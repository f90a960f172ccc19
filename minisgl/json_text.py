"""Sets of JSON values as languages of JSON texts.

    value(places)     a name for "any of the alternatives", unfolded when a text gets there
    object            { then one slot after the other: written or, if optional, skipped; then other members; }
    array             [ the first items one by one, then a counted repeat of the others ]
    string            " a decoded-character language in its JSON spelling "

An object is a chain of small named languages, one per slot (and per count of members where their number is
bounded), so forty optional properties are forty states and not 2^40.

Other members' names exclude the declared ones in every spelling, and each is typed by the patternProperties that
it matches: names are split by which patterns they match, an exact partition by intersection and complement.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from itertools import product

from .charsets import EVERY, JSON, UTF8, any_text, characters, single
from .expressions import Algebra, GrammarError, Node, UnsupportedGrammar
from .json_formats import ESCAPED, FORMATS, LONGEST, within
from .json_numbers import number_language
from .json_values import All, Array, Boolean, Null, Number, Object, String, Value, together
from .regex_compile import full_match, search
from .regex_parse import AGREED, GENEROUS, PYTHON, Tree, parse

MAX_PATTERNS = 6  # patternProperties of one object: names are split into up to 2^6 classes
MAX_UNORDERED = 6  # declared members whose order is free: up to 2^6 states
_HasValue = Callable[[All], bool]


class Slot:
    """A declared member: its name, what holds for its value, whether it must be there."""

    __slots__ = ("name", "places", "required")

    def __init__(self, name: str, places: All, required: bool):
        self.name, self.places, self.required = name, places, required


class Writer:
    """alternatives: the sets of values for which schemas hold. has_value: whether there is any (asked only
    after that is settled). whitespace: see `Grammar.from_json_schema`."""

    def __init__(
        self,
        algebra: Algebra,
        alternatives: Callable[[All], list[Value]],
        has_value: _HasValue,
        whitespace: str | None,
    ):
        self.algebra, self.alternatives, self.has_value = algebra, alternatives, has_value
        self.any_text = any_text(algebra, JSON)
        self.any_character = characters(algebra, EVERY, JSON)
        self.spaces = Spaces(algebra, whitespace)
        self._facets: dict[tuple[str, str, bool], Node] = {}
        self._strings: dict[String, Node] = {}
        self._numbers: dict[Number, Node] = {}
        self._members: dict[Object, tuple[list[Slot], list[tuple[Node, All]]]] = {}

    # ---- the languages

    def value(self, places: All) -> Node:
        """The texts of the values for which all these schemas hold; they must have one."""
        return self.algebra.named(("value", places), lambda: self._alternatives(places))

    def _alternatives(self, places: All) -> Node:
        values = [value for value in self.alternatives(places) if self.exists(value, self.has_value)]
        return self.algebra.alt([self.text(value) for value in values])

    def text(self, value: Value) -> Node:
        if isinstance(value, Null):
            return self.algebra.literal(b"null")
        if isinstance(value, Boolean):
            return self.algebra.words(b"true" if truth else b"false" for truth in value.values)
        if isinstance(value, Number):
            return self.number(value)
        if isinstance(value, String):
            return self.string(value)
        if isinstance(value, Array):
            return self.array(value)
        return self.object(value)

    def number(self, value: Number) -> Node:
        if value not in self._numbers:
            self._numbers[value] = number_language(self.algebra, value)
        return self._numbers[value]

    # ---- strings

    def string(self, value: String) -> Node:
        """The quoted texts; EMPTY when there is none."""
        if value not in self._strings:
            if value.listed is not None:
                fitting = [text for text in value.listed if self.fits(text, value)]
                self._strings[value] = self.algebra.words(data for text in fitting for data in quoted(text))
            else:
                mark = self.algebra.literal(b'"')
                self._strings[value] = self.algebra.concat(mark, self.content(value), mark)
        return self._strings[value]

    def content(self, value: String) -> Node:
        """What may stand between the quotes, for strings that aren't listed."""
        parts = [self.facet(*facet) for facet in sorted(value.facets)]
        plain = any(kind == "format" and sign and source not in ESCAPED for kind, source, sign in value.facets)
        if not plain or value.low or value.high is not None:  # plain texts are JSON texts anyway
            parts.append(self.algebra.repeat(self.any_character, value.low, value.high))
        if value.excluded:
            parts.append(self.algebra.complement(self.spelt(value.excluded)))
        return self.algebra.both(*parts)

    def spelt(self, texts) -> Node:
        """These texts in every JSON spelling."""
        return self.algebra.alt(
            self.algebra.concat(*(characters(self.algebra, single(c), JSON) for c in text)) for text in sorted(texts)
        )

    def facet(self, kind: str, source: str, sign: bool) -> Node:
        """The texts with a pattern or of a format; with a False sign the complement."""
        key = (kind, source, sign)
        if key not in self._facets:
            if kind != "format":
                tree = _parsed(source, AGREED if sign and kind == "pattern" else GENEROUS)
                node = search(self.algebra, tree, JSON)
            else:
                encoding = UTF8 if sign and source not in ESCAPED else JSON
                node = full_match(self.algebra, _parsed(FORMATS[source], PYTHON), encoding)
                if source in LONGEST and encoding == UTF8:
                    node = within(self.algebra, node, LONGEST[source])
                elif source in LONGEST:
                    character = characters(self.algebra, EVERY, encoding)
                    node = self.algebra.both(node, self.algebra.repeat(character, 0, LONGEST[source]))
            self._facets[key] = node if sign else self.algebra.complement(node)
        return self._facets[key]

    def fits(self, text: str, value: String) -> bool:
        """Does one string satisfy what `value` says, apart from its list?"""
        if len(text) < value.low or (value.high is not None and len(text) > value.high):
            return False
        return text not in value.excluded and all(self.has_facet(text, *facet) for facet in value.facets)

    def has_facet(self, text: str, kind: str, source: str, sign: bool) -> bool:
        node = self.facet(kind, source, sign)
        return self._has(node, quote(text)[1:-1])

    def _has(self, node: Node, data: bytes) -> bool:
        for byte in data:
            node = next((left for bits, left in self.algebra.arms(node) if bits >> byte & 1), self.algebra.EMPTY)
        return node.nullable

    # ---- arrays

    def array(self, value: Array) -> Node:
        algebra, spaces = self.algebra, self.spaces
        high = self._longest(value, self.has_value)
        close = algebra.concat(spaces.inside, algebra.literal(b"]"))
        fixed = value.prefix_length if high is None else min(value.prefix_length, high)
        rest = algebra.EMPTY
        if high is None or high > fixed:
            items = algebra.concat(spaces.comma, self.value(value.item(fixed)))
            more = None if high is None else high - max(fixed, 1)
            # the first item has no comma: when nothing is fixed it is written below
            rest = algebra.repeat(items, max(value.low - max(fixed, 1), 0), more)
            rest = algebra.concat(rest, close)
        elif value.low <= fixed:
            rest = close
        for index in range(fixed - 1, 0, -1):
            item = algebra.concat(spaces.comma, self.value(value.item(index)), rest)
            rest = algebra.alt([item, close]) if value.low <= index else item
        options = []
        if high != 0:
            options.append(algebra.concat(spaces.inside, self.value(value.item(0)), rest))
        if value.low == 0:
            options.append(close)
        return algebra.concat(algebra.literal(b"["), algebra.alt(options))

    def _longest(self, value: Array, has_value: _HasValue) -> int | None:
        """The most items: maxItems, or where the first impossible one would come. Raises GrammarError."""
        high = value.high
        for index in range(value.prefix_length + 1):
            if (high is None or index < high) and not has_value(value.item(index)):
                high = index
        if value.unique and (high is None or high > 1):
            raise UnsupportedGrammar("json_schema: uniqueItems is not supported")
        return high

    # ---- objects

    def object(self, value: Object) -> Node:
        """Declared members in order, then others. Where no single `properties` says the order (merged schemas,
        names that are only required), up to MAX_UNORDERED members come in any order."""
        algebra, spaces = self.algebra, self.spaces
        slots, others = self._present(value)
        ordered = len(slots) > MAX_UNORDERED or any(
            all(slot.name in rule.by_name for slot in slots) for rule in value.rules
        )
        needed = 0 if value.low <= sum(slot.required for slot in slots) else value.low
        close = algebra.concat(spaces.inside, algebra.literal(b"}"))

        def member(key: Node, places: All, first: bool) -> Node:
            lead = spaces.inside if first else spaces.comma
            return algebra.concat(lead, key, spaces.colon, self.value(places))

        def members_of(left: tuple[Slot, ...], first: bool, need: int, room: int | None) -> Node:
            """The rest of an object: `left` are the slots still to come, `need` to `room` members."""
            if (room is not None and sum(slot.required for slot in left) > room) or need > len(left) + bool(others):
                return algebra.EMPTY
            key = ("members", value, left, first, need, room)
            return algebra.named(key, lambda: unfold(left, first, need, room))

        def unfold(left: tuple[Slot, ...], first: bool, need: int, room: int | None) -> Node:
            options = []
            fewer = None if room is None else room - 1
            for index, slot in enumerate(left):
                if room != 0:
                    after = left[index + 1 :] if ordered else left[:index] + left[index + 1 :]
                    name = algebra.words(quoted(slot.name))
                    rest = members_of(after, False, max(need - 1, 0), fewer)
                    options.append(algebra.concat(member(name, slot.places, first), rest))
                if ordered and slot.required:
                    return algebra.alt(options)
            if not any(slot.required for slot in left):
                options.append(finish(first, need, room))
            return algebra.alt(options)

        def finish(first: bool, need: int, room: int | None) -> Node:
            """Other members and the closing brace. A name might be repeated: they count as one for the minimum."""
            options = [close] if need == 0 else []
            if others and room != 0 and need <= 1:
                extra = algebra.alt(member(name, places, False) for name, places in others)
                opening = algebra.alt(member(name, places, first) for name, places in others)
                more = algebra.repeat(extra, 0, None if room is None else room - 1)
                options.append(algebra.concat(opening, more, close))
            return algebra.alt(options)

        return algebra.concat(algebra.literal(b"{"), members_of(tuple(slots), True, needed, value.high))

    def _present(self, value: Object) -> tuple[list[Slot], list[tuple[Node, All]]]:
        """The slots and the other members that may be there at all."""
        slots, others = self.members(value)
        return (
            [slot for slot in slots if self.has_value(slot.places)],
            [(name, places) for name, places in others if self.has_value(places)],
        )

    def members(self, value: Object) -> tuple[list[Slot], list[tuple[Node, All]]]:
        """Declared members, and classes of other names (in quotes) with what holds for their values."""
        if value not in self._members:
            names = list(dict.fromkeys(name for rule in value.rules for name, _ in rule.properties))
            names += [name for name in value.required if name not in names]
            naming = together(rule.names for rule in value.rules)
            allowed = [entry for entry in self.alternatives(naming) if isinstance(entry, String)]
            required = set(value.required)
            slots = [
                Slot(name, self.member(value, name), name in required)
                for name in names
                if any(self.allows(entry, name) for entry in allowed)
            ]
            if required - {slot.name for slot in slots}:
                slots, others = [], []
            else:
                others = self.other_names(value, names, allowed)
            self._members[value] = slots, others
        return self._members[value]

    def allows(self, entry: String, name: str) -> bool:
        return (entry.listed is None or name in entry.listed) and self.fits(name, entry)

    def member(self, value: Object, name: str) -> All:
        """What holds for the member `name`. Where dialects disagree whether a pattern matches, both views do."""
        places = []
        for rule in value.rules:
            certain = name in rule.by_name
            if certain:
                places.append(rule.by_name[name])
            for pattern, place in rule.patterns:
                if not self.has_facet(name, "pattern", pattern, False):
                    places.append(place)
                    certain = certain or self.has_facet(name, "pattern", pattern, True)
            if not certain:
                places.append(rule.additional)
        return together(places)

    def other_names(self, value: Object, declared: list[str], allowed: list[String]) -> list[tuple[Node, All]]:
        """The names that aren't declared, split by which patterns they match."""
        algebra = self.algebra
        patterns = list(dict.fromkeys(pattern for rule in value.rules for pattern, _ in rule.patterns))
        if len(patterns) > MAX_PATTERNS:
            raise UnsupportedGrammar(f"json_schema: more than {MAX_PATTERNS} patternProperties are not supported")
        mark = algebra.literal(b'"')
        found = []
        for signs in product((True, False), repeat=len(patterns)):
            matched = {pattern for pattern, sign in zip(patterns, signs) if sign}
            places = []
            for rule in value.rules:
                own = [place for pattern, place in rule.patterns if pattern in matched]
                places += own or [rule.additional]
            if any(place is not None and place.schema is place.negated for place in places):
                continue  # false: no such names
            contents = []
            for entry in allowed:
                limits = [self.facet("pattern", pattern, sign) for pattern, sign in zip(patterns, signs)]
                if entry.listed is None:
                    limits += [self.content(entry), algebra.complement(self.spelt(declared))]
                else:
                    free = [text for text in entry.listed if text not in declared and self.fits(text, entry)]
                    limits.append(algebra.words(data[1:-1] for text in free for data in quoted(text)))
                contents.append(algebra.both(*limits))
            names = algebra.alt(contents)
            if names is not algebra.EMPTY:
                found.append((algebra.concat(mark, names, mark), together(places)))
        return found

    # ---- existence

    def inner(self, value: Value) -> list[All]:
        """The conjunctions of schemas that a value's parts are made by."""
        if isinstance(value, Array):
            return [value.item(index) for index in range(value.prefix_length + 1)]
        if isinstance(value, Object):
            slots, others = self.members(value)
            return [slot.places for slot in slots] + [places for _, places in others]
        return []

    def exists(self, value: Value, has_value: _HasValue) -> bool:
        """Is there a text, given which inner schemas have values? Raises GrammarError for what can't be
        enforced."""
        if isinstance(value, Number):
            return self.number(value) is not self.algebra.EMPTY
        if isinstance(value, String):
            return self.string(value) is not self.algebra.EMPTY
        if isinstance(value, Array):
            high = self._longest(value, has_value)
            return high is None or value.low <= high
        if isinstance(value, Object):
            return self._object_exists(value, has_value)
        return True

    def _object_exists(self, value: Object, has_value: _HasValue) -> bool:
        slots, others = self.members(value)
        names = {slot.name for slot in slots}
        if not all(name in names for name in value.required):
            return False
        if not all(has_value(slot.places) for slot in slots if slot.required):
            return False
        required = len(value.required)
        if value.high is not None and required > value.high:
            return False
        if any(has_value(places) for _, places in others):
            if value.low > required + 1:
                raise UnsupportedGrammar(
                    "json_schema: minProperties is only supported where at most one member that isn't required "
                    "can be missing (other names might be repeated)"
                )
            return True
        return value.low <= sum(has_value(slot.places) for slot in slots)


class Spaces:
    """Where whitespace may stand: `inside` brackets, around the `comma`, around the `colon`."""

    def __init__(self, algebra: Algebra, pattern: str | None):
        if pattern is None:
            space = algebra.repeat(algebra.literal(b" "), 0, 1)
            self.inside = algebra.EPSILON
            self.comma = algebra.concat(algebra.literal(b","), space)
            self.colon = algebra.concat(algebra.literal(b":"), space)
            return
        if not isinstance(pattern, str):
            raise GrammarError("whitespace must be a regex (a str) or None")
        space = full_match(algebra, parse(pattern), UTF8)
        blanks = algebra.repeat(algebra.byte_set(sum(1 << byte for byte in b" \t\n\r")), 0, None)
        if space is algebra.EMPTY or algebra.without(space, blanks) is not algebra.EMPTY:
            raise GrammarError(f"whitespace {pattern!r} must match JSON whitespace (space, \\t, \\n, \\r) only")
        self.inside = space
        self.comma = algebra.concat(space, algebra.literal(b","), space)
        self.colon = algebra.concat(space, algebra.literal(b":"), space)


def quote(text: str) -> bytes:
    """A JSON string as it is written, escapes only where they must be. Raises GrammarError for surrogates."""
    try:
        return json.dumps(text, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise GrammarError(f"json_schema: {text!a} holds a lone surrogate, which isn't text") from None


def quoted(text: str) -> list[bytes]:
    """The spellings of a constant: itself, and `json.dumps`'s with every other character than ASCII escaped."""
    plain = quote(text)
    return [plain] if text.isascii() else [plain, json.dumps(text).encode()]


@lru_cache(maxsize=1024)
def _parsed(pattern: str, dialect: str) -> Tree:
    return parse(pattern, dialect)
