"""JSON Schema keywords one by one, in the style of the official test suite: schema, valid texts, invalid texts.

Every valid value is given in the spelling that the grammar documents (declared order, integers without fraction);
invalid ones in any. `test_refusals` lists what is refused and which name the message has to give. Random schemas
are compared with the `jsonschema` package.
"""

# ruff: noqa: E501
from __future__ import annotations

import dataclasses
import enum
import json
import random
import time
from typing import Any, Literal

import pytest

from minisgl.bench.grammar_schemas import realistic_schemas
from minisgl.fsm import Grammar, GrammarError
from minisgl.tokenizer import ByteTokenizer, Tokenizer

from .grammar_tools import random_walk
from .random_schemas import SchemaMaker

OBJECT_A = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}

# keyword: (schema, accepted, rejected)
KEYWORDS: list[tuple[str, Any, list[str], list[str]]] = [
    ("true", True, ["null", "1", '"a"', "[1, {}]", '{"a": [true]}', "-0.5e-7"], ["", "nul", "01", "[1,]", "{,}", "+1"]),
    ("type", {"type": "integer"}, ["0", "-12", "100000000000000000000"], ["1.5", "01", '"1"', "1e3", "--1", "-"]),
    ("type list", {"type": ["string", "null"]}, ['"a"', "null"], ["1", "true"]),
    ("type number in list", {"type": ["integer", "number"]}, ["1", "1.5"], ['"1"']),
    ("properties", OBJECT_A, ["{}", '{"a": 1}', '{"a":-5}'], ['{"a": "x"}', '{"b": 1}', '{"a": 1, "a": 2}', "[]"]),
    (
        "properties in order",
        {"properties": {"a": {}, "b": {}}, "required": ["b"], "type": "object"},
        ['{"a": 1, "b": 2}', '{"b": 2}', '{"b": 2, "c": 3}'],
        ['{"a": 1}', "{}", '{"b": 2, "a": 1}'],
    ),
    ("required only", {"type": "object", "required": ["x", "y"]}, ['{"x": 1, "y": 2}', '{"y": 2, "x": 1}'], ['{"x": 1}']),
    (
        "additionalProperties schema",
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        ['{"a": null, "b": 1, "c": 2}', '{"b": 1}', '{"A": 1}', '{"aa": 1}', '{"": 1}'],
        ['{"b": "x"}', '{"a": 1}', '{"\\u0061": 1}', '{"b": 1, "\\u0061": 1}'],
    ),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^n": {"type": "integer"}, "s$": {"minimum": 5}},
         "additionalProperties": False},
        ['{"n": 1}', '{"ns": 7}', '{"s": 5}', '{"s": "text"}', "{}", '{"\\u006e": 1}'],
        ['{"n": "x"}', '{"ns": 1}', '{"s": 1}', '{"other": 1}', '{"\\u006e": "x"}'],
    ),
    (
        "propertyNames",
        {"type": "object", "propertyNames": {"maxLength": 2, "pattern": "^[a-c]"}, "required": ["a"]},
        ['{"a": 1}', '{"a": 1, "bx": 2}'],
        ['{"a": 1, "bxx": 2}', '{"a": 1, "x": 1}'],
    ),
    ("propertyNames enum", {"type": "object", "propertyNames": {"enum": ["k", "é"]}}, ['{"k": 1, "é": 2}', "{}"], ['{"x": 1}']),
    ("minProperties", {"type": "object", "minProperties": 1}, ['{"a": 1}', '{"a": 1, "b": 2}'], ["{}"]),
    (
        "minProperties of declared",
        {"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "additionalProperties": False, "type": "object"},
        ['{"a": 1, "b": 1}', '{"a": 1, "c": 1}', '{"b": 1, "c": 1}', '{"a": 1, "b": 1, "c": 1}'],
        ["{}", '{"a": 1}', '{"c": 1}'],
    ),
    ("maxProperties", {"type": "object", "maxProperties": 2}, ["{}", '{"a": 1, "b": 2}'], ['{"a": 1, "b": 2, "c": 3}']),
    ("items", {"type": "array", "items": {"type": "boolean"}}, ["[]", "[true]", "[true, false,true]"], ["[1]", "[true,]"]),
    (
        "prefixItems",
        {"type": "array", "prefixItems": [{"const": 1}, {"type": "string"}], "items": {"type": "null"}},
        ["[]", "[1]", '[1, "a"]', '[1, "a", null, null]'],
        ["[2]", "[1, 2]", '[1, "a", 1]'],
    ),
    ("items false", {"type": "array", "prefixItems": [{}], "items": False}, ["[]", '["x"]'], ["[1, 2]"]),
    (
        "minItems maxItems",
        {"type": "array", "items": {"const": 0}, "minItems": 2, "maxItems": 3},
        ["[0, 0]", "[0,0,0]"],
        ["[]", "[0]", "[0,0,0,0]"],
    ),
    ("prefixItems counted", {"type": "array", "prefixItems": [{}, {}], "minItems": 1, "maxItems": 1}, ["[5]"], ["[]", "[5,5]"]),
    ("uniqueItems of one", {"type": "array", "uniqueItems": True, "maxItems": 1}, ["[]", "[1]"], ["[1, 1]"]),
    ("enum", {"enum": ["a", 1, None, [1, {"b": 2}], 2.5]}, ['"a"', "1", "null", '[1, {"b":2}]', "2.5"], ['"b"', "2", "[1]"]),
    ("enum met with type", {"type": "string", "enum": ["abc", 1, "xy"], "minLength": 3}, ['"abc"'], ["1", '"xy"']),
    ("const object", {"const": {"a": [1, "é"]}}, ['{"a": [1, "é"]}', '{"a":[1,"\\u00e9"]}'], ['{"a": [1]}', "{}"]),
    ("const float", {"const": 1.0}, ["1.0", "1"], ["1.5"]),
    (
        "minLength maxLength",
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"ab"', '"😀é"', '"\\n\\u0041"', '"\\ud83d\\ude00a"', '"\\"\\\\\\/"'],
        ['"a"', '"abcd"', '"\\ud83d\\ude00"', '"\\n"', '"\\ud83d"', '"\\ude00a"'],
    ),
    (
        "pattern",
        {"type": "string", "pattern": "b+c"},
        ['"abbcd"', '"bc"', '"\\u0062c"', '"\\nbc\\n"'],
        ['"ab"', '"b\\nc"', '""'],
    ),
    ("pattern anchored", {"type": "string", "pattern": "^a.$"}, ['"ab"', '"aé"', '"a\\t"'], ['"a"', '"abc"', '"a\\n"', '"ab\\n"']),
    ("pattern alternatives", {"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"', '"bx"']),
    ("pattern ecma", {"type": "string", "pattern": "^\\cA\\u{1F600}\\/\\d$"}, ['"\\u0001😀/7"'], ['"\\u0001😀/٣"']),
    ("pattern of quotes", {"type": "string", "pattern": '^["\\\\]+$'}, ['"\\"\\\\"', '"\\u0022"'], ['"a"', '"""']),
    ("pattern and length", {"type": "string", "pattern": "^(ab)*$", "minLength": 3, "maxLength": 5}, ['"abab"'], ['"ab"', '"ababab"']),
    ("minimum", {"type": "integer", "minimum": 37}, ["37", "99", "100", "4000"], ["36", "0", "-37", "9"]),
    ("maximum", {"type": "integer", "maximum": -3}, ["-3", "-10"], ["-2", "0", "3"]),
    ("exclusive", {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12}, ["10", "11"], ["9", "12"]),
    ("fractional bound of integers", {"type": "integer", "minimum": 0.5, "maximum": 2.5}, ["1", "2"], ["0", "3"]),
    ("multipleOf", {"type": "integer", "multipleOf": 7}, ["0", "-14", "700000007"], ["1", "-13", "8"]),
    ("multipleOf bounded", {"type": "integer", "multipleOf": 30, "minimum": 31, "maximum": 95}, ["60", "90"], ["30", "120", "61"]),
    ("multipleOf fraction", {"type": "integer", "multipleOf": 1.5}, ["0", "3"], ["1", "2"]),
    ("multipleOf of numbers", {"type": "number", "multipleOf": 2}, ["4"], ["3", "2.5"]),
    (
        "number bounds",
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20.25},
        ["-1.5", "-1.50", "0", "0.0", "19", "20.2499", "20.24", "20", "-1.49"],
        ["-1.51", "-2", "20.25", "20.250", "20.3", "21", "1e5"],
    ),
    ("number above", {"type": "number", "exclusiveMinimum": 0}, ["0.001", "7", "12.5"], ["0", "0.0", "-1", "0.000"]),
    ("anyOf", {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}, ['"a"', "5"], ['"ab"', "null"]),
    ("anyOf beside type", {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]}, ["5", "1"], ["3"]),
    (
        "oneOf told apart",
        {"oneOf": [{"type": "object", "properties": {"k": {"const": k}, k: {"type": "integer"}}, "required": ["k", k]}
                   for k in ("x", "y")]},
        ['{"k": "x", "x": 1}', '{"k": "y", "y": 2}'],
        ['{"k": "x", "y": 1}', '{"k": "z"}'],
    ),
    ("oneOf overlapping", {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, ["1", "2.5", '"x"'], ["3", "1.5"]),
    ("oneOf same twice", {"oneOf": [{"type": "integer"}, {"type": "integer"}, {"type": "null"}]}, ["null"], ["1"]),
    ("allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 9, "multipleOf": 4}]}, ["4", "8"], ["2", "5", "12"]),
    (
        "allOf objects",
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"properties": {"a": {"minimum": 5}, "b": {"type": "null"}}}], "type": "object"},
        ['{"a": 5}', '{"a": 7, "b": null}'],
        ['{"a": 4}', '{"b": null}', '{"a": 5, "b": 1}'],
    ),
    ("allOf patterns", {"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}, {"maxLength": 2}]}, ['"ab"', '"ba"'], ['"a"', '"aab"']),
    ("$ref", {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}, "type": "array"}, ["[1]"], ['["a"]']),
    ("$ref with siblings", {"$ref": "#/$defs/n", "maximum": 3, "$defs": {"n": {"type": "integer"}}}, ["3"], ["4", "2.5"]),
    ("$ref escaped", {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 1}}}, ["1"], ["2"]),
    ("$anchor", {"$ref": "#there", "$defs": {"x": {"$anchor": "there", "const": 1}}}, ["1"], ["2"]),
    (
        "$id",
        {"$id": "http://x.test/root", "$ref": "item", "$defs": {"i": {"$id": "item", "$ref": "#/$defs/n",
                                                                "$defs": {"n": {"const": 1}}}}},
        ["1"], ["2"],
    ),
    (
        "recursion",
        {"$defs": {"t": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/t"}},
                         "required": ["v"], "additionalProperties": False}}, "$ref": "#/$defs/t"},
        ['{"v": 1}', '{"v": 1, "next": {"v": 2, "next": {"v": 3}}}'],
        ['{"v": 1, "next": {"v": 2, "next": {}}}', '{"v": 1, "next": 2}'],
    ),
    (
        "recursion through oneOf",
        {"oneOf": [{"type": "number"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
        ["1", "[1, [2, [3]]]"], ["[]", "[[]]", "null"],
    ),
    ("false property", {"type": "object", "properties": {"a": False}}, ["{}", '{"b": 1}'], ['{"a": 1}', '{"\\u0061": 1}']),
    ("if then else", {"if": {"type": "integer"}, "then": {"minimum": 5}, "else": {"type": "string"}}, ["5", '"x"'], ["4", "null", "4.5"]),
    (
        "if on a property",
        {"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "x": {}}, "required": ["k"],
         "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]}},
        ['{"k": "b"}', '{"k": "a", "x": 1}'], ['{"k": "a"}'],
    ),
    ("not type", {"not": {"type": ["string", "integer"]}}, ["null", "1.5", "[]"], ['"a"', "1"]),
    ("not enum", {"type": "string", "not": {"enum": ["a", "b"]}}, ['"c"', '""', '"aa"'], ['"a"', '"\\u0061"', '"b"']),
    ("not pattern", {"type": "string", "not": {"pattern": "^a"}}, ['"b"', '""'], ['"a"', '"ab"', '"\\u0061b"']),
    ("not required", {"type": "object", "not": {"required": ["a"]}}, ["{}", '{"b": 1}'], ['{"a": 1}']),
    ("not property", {"type": "object", "not": {"properties": {"a": {"type": "null"}}}}, ['{"a": 1}'], ["{}", '{"a": null}']),
    ("not number", {"type": "number", "not": {"minimum": 3}}, ["2.9", "-1"], ["3", "3.0", "4"]),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}, ["{}", '{"b": 1}', '{"a": 1, "b": 1}'], ['{"a": 1}']),
    (
        "dependentSchemas",
        {"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
        ["{}", '{"b": 1}', '{"a": 1}', '{"a": 1, "b": null}'], ['{"a": 1, "b": 1}'],
    ),
    ("annotations", {"title": "t", "description": "d", "default": 3, "examples": [1], "type": "null"}, ["null"], ["1"]),
    ("unknown keywords", {"x-order": 3, "discriminator": {"propertyName": "k"}, "type": "null"}, ["null"], ["1"]),
    ("date", {"format": "date", "type": "string"}, ['"2024-02-29"', '"1999-12-31"'], ['"2023-02-29"', '"2024-13-01"', '"0000-01-01"', '"24-1-1"']),
    ("time", {"format": "time", "type": "string"}, ['"23:59:59Z"', '"01:02:03.5+02:00"'], ['"24:00:00Z"', '"01:02:03"']),
    ("date-time", {"format": "date-time", "type": "string"}, ['"2024-02-29T00:00:00Z"'], ['"2024-02-30T00:00:00Z"', '"2024-02-29"']),
    ("uuid", {"format": "uuid", "type": "string"}, ['"2EB8AA08-aa98-11ea-b4aa-73b441d16380"'], ['"2eb8aa08"']),
    ("email", {"format": "email", "type": "string"}, ['"joe.b+x@example.co"'], ['"joe@"', '".a@b"', '"a..b@c"', '"a b@c"']),
    ("hostname", {"format": "hostname", "type": "string"}, ['"a.b-c.d"', f'"{"a" * 63}"'], ['"-a"', '"a-"', '"a..b"', f'"{"a" * 64}"']),
    ("ipv4", {"format": "ipv4", "type": "string"}, ['"255.0.10.1"'], ['"256.0.0.1"', '"1.2.3"', '"01.2.3.4"']),
    ("ipv6", {"format": "ipv6", "type": "string"}, ['"::"', '"2001:db8::1"', '"::ffff:1.2.3.4"'], ['":::"', '"1::2::3"', '"12345::"']),
    ("uri", {"format": "uri", "type": "string"}, ['"https://a.b/c?d=e#f"', '"urn:x:y"'], ['"//a.b"', '"a b:c"', '"http://[::1"']),
    ("duration", {"format": "duration", "type": "string"}, ['"P3Y6M4DT12H30M5S"', '"PT1S"', '"P2W"'], ['"P"', '"PT"', '"P1Y2W"']),
    ("json-pointer", {"format": "json-pointer", "type": "string"}, ['""', '"/a~0/é"', '"/\\"x"'], ['"a"', '"/~2"']),
    ("own format", {"format": "my-thing", "type": "string"}, ['"x"'], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize("schema, accepted, rejected", [k[1:] for k in KEYWORDS], ids=[k[0] for k in KEYWORDS])
def test_keywords(schema, accepted, rejected):
    grammar = Grammar.from_json_schema(schema)
    for text in accepted:
        assert grammar.matches(text), text
    for text in rejected:
        assert not grammar.matches(text), text


@pytest.mark.parametrize(
    "schema, named",
    [
        ({"contains": {"type": "integer"}}, "contains"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"unevaluatedItems": False}, "unevaluatedItems"),
        ({"$dynamicRef": "#x"}, r"\$dynamicRef"),
        ({"items": [{"type": "integer"}]}, "items"),
        ({"$ref": "http://elsewhere.test/schema"}, r"\$ref 'http"),
        ({"$ref": "#/$defs/nowhere"}, r"\$ref"),
        ({"$ref": "#nowhere"}, "anchor"),
        ({"$ref": "#"}, r"\$ref leads to itself"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"minLength": -1}, "minLength"),
        ({"maxItems": "3"}, "maxItems"),
        ({"required": "a"}, "required"),
        ({"properties": []}, "properties"),
        ({"type": "strin"}, "type"),
        ({"anyOf": []}, "anyOf"),
        ({"enum": 3}, "enum"),
        ({"items": 5, "type": "array"}, "not a schema"),
        ({"type": "string", "pattern": "(?=a)"}, "lookahead"),
        ({"type": "string", "pattern": "("}, "lacks"),
        ({"type": "string", "format": "regex"}, "format 'regex'"),
        ({"not": {"items": {"type": "integer"}}}, "not of items"),
        ({"not": {"oneOf": [{"type": "integer"}, {"type": "null"}]}}, "not of oneOf"),
        ({"oneOf": [{"items": {"type": "null"}}, {"type": "array"}]}, "oneOf"),
        ({"type": "object", "minProperties": 3}, "minProperties"),
        ({"properties": {"deep": {"anyOf": [{"contains": {}}, {}]}}}, "contains"),
        ({"const": "\ud800"}, "surrogate"),
        ({"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(9)]}, "too big"),
        ("{", "not valid JSON"),
        (3, "json_schema must be"),
        ([], "json_schema must be"),
    ],
)  # fmt: skip
def test_refusals(schema, named):
    with pytest.raises(GrammarError, match=named) as error:
        Grammar.from_json_schema(schema)
    assert isinstance(error.value, ValueError) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": []},
        {"enum": []},
        {"not": {}},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "integer", "multipleOf": 10, "minimum": 11, "maximum": 19},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "string", "pattern": "^ab$", "maxLength": 1},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "enum": [1, 2]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "required": ["abc"], "propertyNames": {"maxLength": 2}},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "array", "prefixItems": [{}, False], "minItems": 2},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "object", "required": ["a", "b"], "maxProperties": 1},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "minProperties": 2},
    ],
)
def test_unsatisfiable_schemas_are_refused(schema):
    with pytest.raises(GrammarError, match="unsatisfiable"):
        Grammar.from_json_schema(schema)


def test_impossible_parts_are_left_out():
    """A branch or a member without a value is no trap: nothing leads there."""
    grammar = Grammar.from_json_schema({
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}, "b": {"enum": [1]}},
        "additionalProperties": False,
    })  # fmt: skip
    assert grammar.matches("{}") and grammar.matches('{"b": 1}')
    assert grammar.forced(b"{").hex() == "" and grammar.forced(b'{"') == b'b":'


# ---- whitespace and sources


def test_default_whitespace_fits_compact_and_json_dumps():
    grammar = Grammar.from_json_schema({})
    for value in ({"a": [1, {"b": None}], "c": "x"}, [[], {}, ""]):
        assert grammar.matches(json.dumps(value))
        assert grammar.matches(json.dumps(value, separators=(",", ":")))
    assert not grammar.matches(json.dumps({"a": 1}, indent=2))


@pytest.mark.parametrize(
    "whitespace, accepted, rejected",
    [
        ("", ['{"a":[1,2]}'], ['{"a": [1,2]}']),
        (" ?", ['{ "a" : [ 1 , 2 ] }', '{"a":[1,2]}'], ['{  "a":[1,2]}', ' {"a":[1,2]}']),
        (r"[ \n]{0,8}", [json.dumps({"a": [1, 2]}, indent=2), "[ ]", "{\n}"], ["[\t]"]),
    ],
)
def test_whitespace_option(whitespace, accepted, rejected):
    grammar = Grammar.from_json_schema({}, whitespace=whitespace)
    for text in accepted:
        assert grammar.matches(text), text
    for text in rejected:
        assert not grammar.matches(text), text


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Leaf:
    value: float
    colour: Colour = Colour.RED


@dataclasses.dataclass
class Tree:
    name: str
    leaves: list[Leaf]
    kind: Literal["a", 2]
    pair: tuple[int, bool]
    extra: dict[str, int] = dataclasses.field(default_factory=dict)
    parent: Tree | None = None


def test_a_dataclass_is_a_schema():
    grammar = Grammar.from_json_schema(Tree)
    assert grammar.matches('{"name": "x", "leaves": [{"value": 1.5}], "kind": 2, "pair": [1, true]}')
    whole = '{"name": "x", "leaves": [], "kind": "a", "pair": [1, true], "extra": {"k": 1}, "parent": null}'
    assert grammar.matches(whole)
    assert grammar.matches(whole.replace("null", whole))
    assert not grammar.matches(whole.replace("null", "{}"))
    assert not grammar.matches('{"name": "x", "leaves": [], "kind": 3, "pair": [1, true]}')


def test_a_pydantic_model_is_a_schema():
    pydantic = pytest.importorskip("pydantic")

    class Item(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=5)
        price: float = pydantic.Field(ge=0)
        tags: list[str] = pydantic.Field(default_factory=list)

    grammar = Grammar.from_json_schema(Item)
    text = '{"name": "pen", "price": 1.5, "tags": ["a"]}'
    assert grammar.matches(text) and Item.model_validate_json(text)
    assert not grammar.matches('{"name": "pencil", "price": 1}')
    assert not grammar.matches('{"name": "pen", "price": -1}')


def test_json_text_is_a_schema():
    assert Grammar.from_json_schema('{"type": "null"}').matches("null")


def test_other_sources_are_refused():
    with pytest.raises(GrammarError, match="annotation"):

        @dataclasses.dataclass
        class Bad:
            when: complex

        Grammar.from_json_schema(Bad)


# ---- sizes


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"enum": [f"value {n * 7919 % 100003} of {n}" for n in range(5000)]}, '"value 7919 of 1"'),
        ({"type": "string", "maxLength": 4000}, '"' + "x" * 4000 + '"'),
        ({"type": "object", "properties": {f"key{n}": {"type": "integer"} for n in range(200)}}, '{"key199": 1}'),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 100_000}, "[" + "1," * 500 + "1]"),
        ({"const": {"rows": [list(range(50))] * 50}}, json.dumps({"rows": [list(range(50))] * 50})),
        ({"type": "string", "pattern": "^[\U00010000-\U0010ffff]{0,500}$"}, '"😀😀"'),
        ({"type": "integer", "minimum": -(10**30), "maximum": 10**30}, "-" + "9" * 30),
    ],
)
def test_big_schemas_start_at_once(schema, text, default_model_folder):
    begin = time.monotonic()
    tokens = Grammar.from_json_schema(schema).compile(Tokenizer(default_model_folder))
    tokens.mask(tokens.start)
    assert time.monotonic() - begin < 3
    assert tokens.grammar.matches(text)


def test_nested_one_of_is_answered_or_refused_in_time():
    schema: Any = {"type": "integer"}
    for level in range(8):
        branch = {"type": "object", "properties": {f"p{level}": schema}, "required": [f"p{level}"]}
        other = {"type": "object", "properties": {f"q{level}": schema}, "required": [f"q{level}"]}
        schema = {"oneOf": [branch, other, {"type": "null"}]}
    begin = time.monotonic()
    try:
        tokens = Grammar.from_json_schema(schema).compile(ByteTokenizer())
        tokens.mask(tokens.start)
        assert tokens.grammar.matches('{"p7": {"q6": null}}')
        assert not tokens.grammar.matches('{"p7": 1}')
    except GrammarError:
        pass
    assert time.monotonic() - begin < 10


# ---- random schemas against jsonschema


@pytest.mark.parametrize("seed", range(6))
def test_random_schemas_accept_nothing_invalid(seed):
    """120 random schemas a seed: instances that we accept are valid, walks give valid ones, what we call
    unsatisfiable has no valid instance. Valid instances that we don't accept are of the documented kinds."""
    jsonschema = pytest.importorskip("jsonschema")
    rng = random.Random(seed)
    maker = SchemaMaker(rng)
    tokenizer = ByteTokenizer(['{"', '":', ', "', "abc", "00", "true"])
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for _ in range(120):
        schema = maker.schema()
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        instances = [maker.instance() for _ in range(20)]
        try:
            grammar = Grammar.from_json_schema(schema)
        except GrammarError as error:
            if "unsatisfiable" in str(error):
                assert not any(map(validator.is_valid, instances)), schema
            continue
        for instance in instances:
            accepted = grammar.matches(json.dumps(instance))
            assert not accepted or validator.is_valid(instance), (schema, instance)
            if not accepted and validator.is_valid(instance):
                assert _spelt_otherwise(instance), (schema, instance)
        tokens = grammar.compile(tokenizer)
        for steps in (3, 25):
            text = random_walk(tokens, rng, steps)
            assert text is not None
            assert validator.is_valid(json.loads(text)), (schema, text)


def _spelt_otherwise(value: Any) -> bool:
    """Integers with a fraction (1000.0), objects of several members (in another order than declared), and names
    over which regex dialects disagree (is `é` a \\w? does `$` match before a last newline?)."""
    if isinstance(value, (str, dict)) and ("é" in value or "\n" in value):
        return True
    if isinstance(value, float):
        return value.is_integer()
    if isinstance(value, list):
        return any(map(_spelt_otherwise, value))
    return isinstance(value, dict) and (len(value) > 1 or any(map(_spelt_otherwise, value.values())))


@pytest.mark.parametrize("seed", range(2))
def test_walks_over_realistic_schemas_validate(seed, default_model_folder):
    jsonschema = pytest.importorskip("jsonschema")
    walk_over(jsonschema, Tokenizer(default_model_folder), seed, schemas=25, walks=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "tekken", "mistral", "qwen"])
def test_walks_on_real_tokenizers_validate(name):
    from .real_tokenizers import load

    walk_over(pytest.importorskip("jsonschema"), load(name), seed=name, schemas=100, walks=5)


def walk_over(jsonschema, tokenizer, seed, schemas: int, walks: int) -> None:
    rng = random.Random(seed)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for label, schema in rng.sample(realistic_schemas(), schemas):
        tokens = Grammar.from_json_schema(schema).compile(tokenizer)
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        for _ in range(walks):
            text = random_walk(tokens, rng, rng.choice([5, 30, 80]))
            assert text is not None, label
            validator.validate(json.loads(text))


@pytest.mark.slow
def test_first_masks_of_realistic_schemas_are_quick():
    """200 schemas over 128k tokens: the time from the schema to the first mask (limits of a busy machine)."""
    from .real_tokenizers import load

    llama = load("llama3")
    Grammar.from_json_schema({}).compile(llama)
    times = []
    for _, schema in realistic_schemas():
        begin = time.perf_counter()
        tokens = Grammar.from_json_schema(schema).compile(llama)
        tokens.mask(tokens.start)
        times.append(time.perf_counter() - begin)
    times.sort()
    assert len(times) == 200
    assert times[100] < 0.050 and times[198] < 2
