"""JSON Schema (draft 2020-12) to a grammar: enforced exactly, or refused with the keyword's name.

Three steps, each simple because of the one before:

    schema  --(json_keywords)-->  sets of values of one type   --(here)-->  plan  --(json_text)-->  language

1. Every schema is worked out to a list of `json_values`: keywords are sets, siblings and allOf intersect them,
   anyOf unites them, oneOf unites them once they are proved disjoint (else each without the others), not and
   if/then/else go through De Morgan.
2. Which schemas have a value at all is a least fixpoint over the schemas reachable from the root (a value is
   finite: `{"required": ["next"], "properties": {"next": {"$ref": "#"}}}` has none). Schemas without one are
   refused at the root and left out elsewhere, so that no text leads into a dead end.
3. `json_text` writes the values down. Recursive schemas are languages that name themselves, unfolded as far as a
   text goes: there is no depth limit.

How values are written: declared properties in declared order, then the required ones that aren't declared, then
others; integers without fraction or exponent, bounded numbers without exponent; names, constants and formats
without needless escapes (or as `json.dumps` escapes them); free strings with any. Everything accepted is valid; a
valid value in another spelling (another order of declared keys, 1.0 for an integer) is not accepted.
"""

from __future__ import annotations

import json
from typing import Any

from .expressions import Algebra, GrammarError, Node, UnsupportedGrammar
from .json_keywords import (
    ARRAY_WORDS,
    OBJECT_WORDS,
    SIMPLE,
    Structure,
    Values,
    all_but,
    check_keywords,
    has_any,
    members,
    none_of,
    one_of,
    refuse,
    strings,
)
from .json_source import Document, Located, load
from .json_text import Writer
from .json_values import EVERYTHING, All, Array, Boolean, Null, Object, String, Value, meet, together

MAX_ALTERNATIVES = 512  # sets of values that one schema may come to (a product for allOf of anyOfs)
__all__ = ["GrammarError", "compile_schema"]


def compile_schema(algebra: Algebra, source: Any, whitespace: str | None) -> tuple[Node, str]:
    """The language of a schema's JSON texts, and the schema as text. Raises GrammarError."""
    schema = load(source)
    try:
        text = json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema is not JSON data: {error}") from None
    schema = json.loads(text)  # a private copy, in which no two places are one object
    return _Compiler(algebra, Document(schema), whitespace).root(), text


class _InProgress(Exception):
    """A schema was needed while it was being worked out."""


class _Compiler:
    def __init__(self, algebra: Algebra, document: Document, whitespace: str | None):
        self.algebra, self.document = algebra, document
        self.writer = Writer(algebra, self.alternatives, self.has_value, whitespace)
        self._own: dict[Located, Values] = {}
        self._all: dict[All, Values] = {}
        self._working: set[Located] = set()
        self._settled: dict[All, bool] = {}

    def root(self) -> Node:
        everything = together([self.document.root])
        self.settle(everything)
        if not self._settled[everything]:
            raise GrammarError("json_schema is unsatisfiable: no value is valid")
        return self.writer.value(everything)

    # ---- which values: unions of sets

    def alternatives(self, places: All) -> Values:
        """The values for which all these schemas hold."""
        found = self._all.get(places)
        if found is None:
            found = list(EVERYTHING)
            for place in places:
                found = self.intersect(found, self.own(place))
            self._all[places] = found
        return found

    def intersect(self, first: Values, second: Values) -> Values:
        found: dict[Value, None] = {}
        for a in first:
            for b in second:
                if (value := meet(a, b)) is not None:
                    found[value] = None
            self.check_size(len(found))
        return list(found)

    def unite(self, parts) -> Values:
        found: dict[Value, None] = {}
        for part in parts:
            found.update(dict.fromkeys(part))
            self.check_size(len(found))
        return list(found)

    def check_size(self, count: int) -> None:
        self.algebra.budget.check_time()
        if count > MAX_ALTERNATIVES:
            raise UnsupportedGrammar(f"json_schema is too big: a schema with over {MAX_ALTERNATIVES} alternatives")

    def own(self, place: Located) -> Values:
        """The values of one schema."""
        if isinstance(place.schema, bool):
            return list(EVERYTHING) if place.schema != place.negated else []
        found = self._own.get(place)
        if found is None:
            if place in self._working:
                raise _InProgress
            self._working.add(place)
            try:
                check_keywords(place.schema)
                parts = self.failures(place) if place.negated else self.demands(place)
                found = self._own[place] = parts
            except _InProgress:
                raise GrammarError("json_schema: $ref leads to itself without a value between") from None
            finally:
                self._working.discard(place)
        return found

    def demands(self, place: Located) -> Values:
        """All keywords hold."""
        found = list(EVERYTHING)
        for part in self.keywords(place):
            found = self.intersect(found, part)
        return found

    def keywords(self, place: Located):
        """What each keyword of a schema allows."""
        schema: Any = place.schema

        def at(sub: Any) -> Located:
            return self.document.at(sub, place.base)

        for keyword in schema:
            if keyword in SIMPLE:
                yield SIMPLE[keyword](keyword, schema[keyword], False)
        if "enum" in schema:
            yield one_of(self.document, "enum", schema["enum"])
        if "const" in schema:
            yield one_of(self.document, "const", [schema["const"]])
        structure = Structure(self.document, place)
        if has_any(schema, ARRAY_WORDS):
            yield structure.array()
        if has_any(schema, OBJECT_WORDS):
            yield structure.object()
        if "required" in schema:
            yield structure.required()
        if "$ref" in schema:
            yield self.own(self.document.resolve(schema["$ref"], place.base))
        for sub in self.subschemas(schema, "allOf"):
            yield self.own(at(sub))
        if "anyOf" in schema:
            yield self.unite([self.own(at(sub)) for sub in self.subschemas(schema, "anyOf")])
        if "oneOf" in schema:
            yield self.exactly_one([at(sub) for sub in self.subschemas(schema, "oneOf")])
        if "not" in schema:
            yield self.own(self.document.negation(at(schema["not"])))
        if "if" in schema and has_any(schema, ("then", "else")):
            test, then, other = at(schema["if"]), at(schema.get("then", True)), at(schema.get("else", True))
            yes = self.intersect(self.own(test), self.own(then))
            yield self.unite([yes, self.intersect(self.own(self.document.negation(test)), self.own(other))])
        yield from self.dependencies(place)

    def subschemas(self, schema: dict[str, Any], keyword: str) -> list[Any]:
        value = schema.get(keyword, [])
        if keyword in schema and (not isinstance(value, list) or not value):
            raise refuse(keyword, "must be a list of schemas with at least one")
        return value

    def dependencies(self, place: Located):
        """dependentRequired, dependentSchemas and the older dependencies: the name is absent, or it holds."""
        schema: Any = place.schema
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, then in members(keyword, schema.get(keyword, {})).items():
                absent = Structure(self.document, place).lacking(name, self.document.at(False, ""))
                present: Values = [Object(required=(name,))]
                if isinstance(then, list) and keyword != "dependentSchemas":
                    holds: Values = [Object(required=(name, *strings(keyword, then)))]
                else:
                    holds = self.intersect(present, self.own(self.document.at(then, place.base)))
                yield self.unite([[*all_but(Object), absent], holds])

    def exactly_one(self, places: list[Located]) -> Values:
        """oneOf: the branches united where no two share a value, else each met with the negations of others."""
        found = []
        for place in places:
            values = self.own(place)
            for other in places:
                if other is place and places.count(place) == 1:
                    continue
                shared = self.intersect(values, self.own(other))
                if any(self.may_exist(value) for value in shared):
                    try:
                        opposite = self.own(self.document.negation(other))
                    except GrammarError as error:
                        reason = str(error).removeprefix("json_schema: ")
                        raise refuse("oneOf", f"with branches that may overlap is not supported ({reason})") from None
                    values = [v for v in self.intersect(values, opposite) if self.may_exist(v)]
            found.append(values)
        return self.unite(found)

    def failures(self, place: Located) -> Values:
        """Some keyword doesn't hold."""
        schema: Any = place.schema

        def fails(sub: Any) -> Values:
            return self.own(self.document.negation(self.document.at(sub, place.base)))

        structure = Structure(self.document, place)
        parts = [SIMPLE[k](k, schema[k], True) for k in schema if k in SIMPLE]
        if "enum" in schema:
            one_of(self.document, "enum", schema["enum"])
            parts.append(none_of("enum", schema["enum"]))
        if "const" in schema:
            parts.append(none_of("const", [schema["const"]]))
        if has_any(schema, ARRAY_WORDS):
            parts.append(structure.not_array())
        if has_any(schema, OBJECT_WORDS):
            parts.append(structure.not_object())
        if "required" in schema:
            parts.append(structure.not_required())
        if "$ref" in schema:
            parts.append(self.own(self.document.negation(self.document.resolve(schema["$ref"], place.base))))
        parts += [fails(sub) for sub in self.subschemas(schema, "allOf")]
        if "anyOf" in schema:
            values: Values = list(EVERYTHING)
            for sub in self.subschemas(schema, "anyOf"):
                values = self.intersect(values, fails(sub))
            parts.append(values)
        if "not" in schema:
            parts.append(self.own(self.document.at(schema["not"], place.base)))
        if "if" in schema and has_any(schema, ("then", "else")):
            holds = self.own(self.document.at(schema["if"], place.base))
            parts.append(self.intersect(holds, fails(schema.get("then", True))))
            parts.append(self.intersect(fails(schema["if"]), fails(schema.get("else", True))))
        for keyword in ("oneOf", "dependentRequired", "dependentSchemas", "dependencies"):
            if keyword in schema:
                raise refuse("not", f"of {keyword} is not supported")
        return self.unite(parts)

    # ---- which schemas have a value

    def settle(self, root: All) -> None:
        """Decide for everything reachable from `root` whether it has a value: the least fixpoint."""
        reachable: dict[All, Values] = {}
        stack = [root]
        while stack:
            places = stack.pop()
            if places in reachable or places in self._settled:
                continue
            self.algebra.budget.spend()
            reachable[places] = self.alternatives(places)
            for value in reachable[places]:
                stack += self.writer.inner(value)
        users: dict[All, list[All]] = {}
        for places, values in reachable.items():
            for value in values:
                for child in self.writer.inner(value):
                    users.setdefault(child, []).append(places)
        waiting = list(reversed(reachable))
        alive: set[All] = set()

        def has_value(child: All) -> bool:
            return child in alive or self._settled.get(child, False)

        while waiting:
            places = waiting.pop()
            if places not in alive and any(self.writer.exists(v, has_value) for v in reachable[places]):
                alive.add(places)
                waiting += users.get(places, [])
        self._settled.update({places: places in alive for places in reachable})
        for values in reachable.values():
            for value in values:
                self.writer.exists(value, self.has_value)  # refuses now what only shows when all is known

    def has_value(self, places: All) -> bool:
        """Does any value satisfy all these schemas?"""
        if places not in self._settled:
            self.settle(places)
        return self._settled[places]

    def may_exist(self, value: Value, depth: int = 0) -> bool:
        """False only where a set of values is provably empty, whatever a validator's regex dialect; looks into
        required parts to some depth."""
        if isinstance(value, (Null, Boolean)):
            return True
        if isinstance(value, (Array, Object)):
            return depth > 6 or self.writer.exists(value, lambda child: self._may_hold(child, depth + 1))
        if isinstance(value, String):
            value = value.generous()
        return self.writer.exists(value, lambda child: True)

    def _may_hold(self, places: All, depth: int) -> bool:
        if places in self._settled:
            return self._settled[places]
        if any(place in self._working for place in places):
            return True
        return any(self.may_exist(value, depth) for value in self.alternatives(places))
