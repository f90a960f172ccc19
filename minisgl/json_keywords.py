"""What each JSON Schema keyword says, as sets of values; and what its negation says.

A schema object is a conjunction of its keywords, each of which speaks about one type and lets every other pass:

    {"type": ["string", "null"], "minLength": 3}   =   {null, strings}  meets  {strings of 3 up, any other type}

so each keyword becomes a union of `json_values` and the schema their intersection. `not` is pushed inwards by De
Morgan, keyword by keyword: a schema fails when one of its keywords fails, and a failing keyword is again a set
of values of its type ("maxLength 3 fails" = strings of 4 up; "property a fails" = objects that have a, with a
value that fails its schema). Where the failure can't be stated so ("some item fails"), it is refused by name.

Keywords that say nothing about validity are skipped, unknown ones too (the specification says so); every known
one that isn't here is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

from .expressions import GrammarError, UnsupportedGrammar
from .json_formats import FORMATS, UNSUPPORTED_FORMATS
from .json_source import Document, Located
from .json_values import (
    EVERYTHING,
    Array,
    ArrayRule,
    Boolean,
    Null,
    Number,
    Object,
    ObjectRule,
    String,
    Value,
)

Values = list[Value]
TYPES: dict[str, Value] = {
    "null": Null(),
    "boolean": Boolean(),
    "number": Number(),
    "integer": Number(integer=True),
    "string": String(),
    "array": Array(),
    "object": Object(),
}
REFUSED = (
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "unevaluatedItems",
    "unevaluatedProperties",
    "additionalItems",
    "extends",
    "disallow",
    "divisibleBy",
)


def refuse(keyword: str, why: str = "is not supported") -> GrammarError:
    kind = UnsupportedGrammar if "not supported" in why else GrammarError
    return kind(f"json_schema: {keyword} {why}")


def all_but(*types: type) -> Values:
    """Every value of the other types."""
    return [value for value in EVERYTHING if not isinstance(value, types)]


def check_keywords(schema: dict[str, Any]) -> None:
    """Raises GrammarError for keywords that restrict and that nothing here enforces."""
    for keyword in REFUSED:
        if keyword in schema and not (keyword.startswith("unevaluated") and schema[keyword] is True):
            raise refuse(keyword)
    if isinstance(schema.get("items"), list):
        raise refuse("items", "as a list is the draft before 2020-12: use prefixItems")


# ---- reading keyword values


def whole_number(keyword: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise refuse(keyword, "must be a non-negative integer")
    return value


def exact(keyword: str, value: Any) -> Fraction:
    """A JSON number as it is written, 0.1 being one tenth."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    if not isinstance(value, float) or not math.isfinite(value):
        raise refuse(keyword, "must be a finite number")
    return Fraction(Decimal(repr(value)))


def strings(keyword: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise refuse(keyword, "must be a list of strings")
    return tuple(dict.fromkeys(value))


def members(keyword: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(keyword, "must be an object")
    return value


# ---- types, enum, const


def of_type(value: Any) -> Values:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name in TYPES for name in names):
        raise refuse("type", f"must be among {', '.join(TYPES)}, not {json.dumps(value, default=str)[:60]}")
    names = list(dict.fromkeys(name for name in names if not (name == "integer" and "number" in names)))
    return [TYPES[name] for name in names]


def not_of_type(value: Any) -> Values:
    allowed = of_type(value)
    rest = all_but(*(type(kind) for kind in allowed))
    if TYPES["integer"] in allowed:
        rest.append(Number(integer=False))
    return rest


def constant(document: Document, value: Any) -> Value:
    """The set of one JSON value."""
    if value is None:
        return Null()
    if isinstance(value, bool):
        return Boolean(frozenset((value,)))
    if isinstance(value, (int, float)):
        return Number(listed=frozenset(_spellings(value)))
    if isinstance(value, str):
        return String(listed=frozenset((value,)))
    if isinstance(value, list):
        places = tuple(document.at({"const": item}, "") for item in value)
        return Array((ArrayRule(places, document.at(False, "")),), len(value), len(value))
    if isinstance(value, dict):
        places = tuple((name, document.at({"const": item}, "")) for name, item in value.items())
        return Object((ObjectRule(places, additional=document.at(False, "")),), tuple(value))
    raise refuse("const", f"can't be a {type(value).__name__}")


def _spellings(value: int | float) -> list[tuple[Fraction, str]]:
    number = exact("const", value)
    texts = [json.dumps(value)]
    if isinstance(value, float) and number.denominator == 1 and abs(number) < 10**15:
        texts.append(str(int(value)))
    return [(number, text) for text in texts]


def one_of(document: Document, keyword: str, values: Any) -> Values:
    """enum: listed strings (and numbers) are one set, which becomes one trie."""
    if not isinstance(values, list):
        raise refuse(keyword, "must be a list")
    found: dict[Value, None] = {}
    texts: set[str] = set()
    numbers: set[tuple[Fraction, str]] = set()
    for value in values:
        item = constant(document, value)
        if isinstance(item, String) and item.listed is not None:
            texts |= item.listed
        elif isinstance(item, Number) and item.listed is not None:
            numbers |= item.listed
        else:
            found[item] = None
    if texts:
        found[String(listed=frozenset(texts))] = None
    if numbers:
        found[Number(listed=frozenset(numbers))] = None
    return list(found)


def none_of(keyword: str, values: list[Any]) -> Values:
    """The values that differ from all of these."""
    rest = all_but(String, Number, Boolean, Null)
    texts = frozenset(value for value in values if isinstance(value, str))
    rest.append(String(excluded=texts))
    truths = frozenset((True, False)) - {value for value in values if isinstance(value, bool)}
    rest += [Boolean(truths)] if truths else []
    rest += [] if any(value is None for value in values) else [Null()]
    numbers = {exact(keyword, v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)}
    edges = [None, *sorted(numbers), None]
    for low, high in pairwise(edges):
        rest.append(Number(None, low, low is not None, high, high is not None))
    if any(isinstance(value, (list, dict)) for value in values):
        raise refuse("not", f"of {keyword} with arrays or objects is not supported")
    return rest


# ---- the keywords of one type: the sets, and those of the opposite


def limits(keyword: str, value: Any, negated: bool) -> Values:
    """minLength, maxLength, minItems, maxItems, minProperties, maxProperties."""
    kind: Any = String if keyword.endswith("Length") else Array if keyword.endswith("Items") else Object
    count = whole_number(keyword, value)
    rest = [] if negated else all_but(kind)
    if keyword.startswith("min") != negated:
        return [*rest, kind(low=count + negated)]
    return [*rest, kind(high=count - negated)] if count >= negated else rest


def bounds(keyword: str, value: Any, negated: bool) -> Values:
    """minimum, maximum, exclusiveMinimum, exclusiveMaximum."""
    if isinstance(value, bool):
        raise refuse(keyword, "as a boolean is draft 4: give the number itself")
    bound = exact(keyword, value)
    is_open = keyword.startswith("exclusive") != negated
    if keyword.lower().endswith("minimum") != negated:
        number = Number(low=bound, low_open=is_open)
    else:
        number = Number(high=bound, high_open=is_open)
    return [number] if negated else [*all_but(Number), number]


def multiple_of(value: Any, negated: bool) -> Values:
    divisor = exact("multipleOf", value)
    if divisor <= 0:
        raise refuse("multipleOf", "must be greater than 0")
    if not negated:
        return [*all_but(Number), Number(multiples=frozenset(((divisor, True),)))]
    if divisor.denominator != 1:
        raise refuse("not", "of multipleOf with a fraction is not supported")
    return [Number(integer=False), Number(integer=True, multiples=frozenset(((divisor, False),)))]


def facet(keyword: str, value: Any, negated: bool) -> Values:
    """pattern, format."""
    if not isinstance(value, str):
        raise refuse(keyword, "must be a string")
    if keyword == "format" and value not in FORMATS:
        if value in UNSUPPORTED_FORMATS:
            raise refuse(f"format {value!r}")
        return [] if negated else list(EVERYTHING)  # an annotation of somebody's own
    found = String(facets=frozenset(((keyword, value, not negated),)))
    return [found] if negated else [*all_but(String), found]


def unique_items(value: Any, negated: bool) -> Values:
    if value is False or (value is not True and not isinstance(value, bool)):
        if value is not False:
            raise refuse("uniqueItems", "must be a boolean")
        return [] if negated else list(EVERYTHING)
    if negated:
        raise refuse("not", "of uniqueItems is not supported")
    return [*all_but(Array), Array(unique=True)]


class Structure:
    """The keywords of arrays and objects, which hold further schemas."""

    def __init__(self, document: Document, place: Located):
        self.document, self.base = document, place.base
        self.schema: dict[str, Any] = place.schema if isinstance(place.schema, dict) else {}

    def at(self, schema: Any) -> Located:
        return self.document.at(schema, self.base)

    def prefix(self) -> list[Any]:
        found = self.schema.get("prefixItems", [])
        if not isinstance(found, list):
            raise refuse("prefixItems", "must be a list")
        return found

    def array(self) -> Values:
        """prefixItems and items together."""
        prefix = self.prefix()
        items = self.at(self.schema["items"]) if "items" in self.schema else None
        return [*all_but(Array), Array((ArrayRule(tuple(map(self.at, prefix)), items),))]

    def object(self) -> Values:
        """properties, patternProperties, additionalProperties and propertyNames together."""
        schema = self.schema

        def places(keyword: str) -> tuple[tuple[str, Located], ...]:
            return tuple((k, self.at(v)) for k, v in members(keyword, schema.get(keyword, {})).items())

        def place(keyword: str) -> Located | None:
            return self.at(schema[keyword]) if keyword in schema else None

        rule = ObjectRule(
            places("properties"),
            places("patternProperties"),
            place("additionalProperties"),
            place("propertyNames"),
        )
        return [*all_but(Object), Object((rule,))]

    def required(self) -> Values:
        return [*all_but(Object), Object(required=strings("required", self.schema["required"]))]

    # ---- opposites

    def not_array(self) -> Values:
        items = self.schema.get("items", True)
        if items is not True and items != {}:
            raise refuse("not", "of items is not supported")
        found: Values = []
        for index, schema in enumerate(self.prefix()):
            fails = self.document.negation(self.at(schema))
            free = tuple(self.at(True) for _ in range(index))
            found.append(Array((ArrayRule((*free, fails)),), low=index + 1))
        return found

    def not_object(self) -> Values:
        for keyword in ("patternProperties", "additionalProperties", "propertyNames"):
            value = self.schema.get(keyword, True)
            if value is not True and value != {}:
                raise refuse("not", f"of {keyword} is not supported")
        properties = members("properties", self.schema.get("properties", {}))
        return [
            replace(self.lacking(name, self.document.negation(self.at(schema))), required=(name,))
            for name, schema in properties.items()
        ]

    def not_required(self) -> Values:
        return [self.lacking(name, self.at(False)) for name in strings("required", self.schema["required"])]

    def lacking(self, name: str, place: Located) -> Object:
        return Object((ObjectRule(((name, place),)),))


# keywords that are read one by one: keyword -> (keyword, value, negated) -> the values it (or its opposite) allows
SIMPLE: dict[str, Callable[[str, Any, bool], Values]] = {
    "type": lambda _, value, negated: not_of_type(value) if negated else of_type(value),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), limits),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), bounds),
    "multipleOf": lambda _, value, negated: multiple_of(value, negated),
    "pattern": facet,
    "format": facet,
    "uniqueItems": lambda _, value, negated: unique_items(value, negated),
}
ARRAY_WORDS = ("prefixItems", "items")
OBJECT_WORDS = ("properties", "patternProperties", "additionalProperties", "propertyNames")


def has_any(schema: dict[str, Any], keywords: Iterable[str]) -> bool:
    return any(keyword in schema for keyword in keywords)
