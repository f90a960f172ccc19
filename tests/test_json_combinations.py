"""Combinations of keywords, compared with the `jsonschema` package on one pool of texts.

Every schema below meets every text. Nothing invalid may be accepted; what is valid and not accepted must be a value
that is never written so (see `json_schema`: integers without a point, keys in the order of `properties`, and so on).
"""

from __future__ import annotations

import json
import re

import pytest

from minisgl.expressions import GrammarError
from minisgl.fsm import Grammar

jsonschema = pytest.importorskip("jsonschema")
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER

# ruff: noqa: E501
SCHEMAS = [
    {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "required": ["x_a"], "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "required": ["x_a"]},
    {"type": "object", "patternProperties": {"^a": {"minimum": 1}, "b$": {"maximum": 5}}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"enum": ["a", "b", "é"]}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "properties": {"a": {"type": "integer"}, "c": True}, "required": ["a"]},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,2}$"}, "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "propertyNames": {"maxLength": 1}},
    {"$defs": {"n": {"type": "integer", "minimum": 0}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/n", "maximum": 9}}, "required": ["a"]},
    {"$defs": {"n": {"$anchor": "num", "type": ["integer", "null"]}}, "type": "array", "items": {"$ref": "#num"}, "maxItems": 3},
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 12}, {"multipleOf": 2}]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"minimum": 2}}, "required": ["a"]}], "type": "object", "additionalProperties": False, "properties": {"a": True}},
    {"allOf": [{"enum": [1, 2, "x", None]}, {"enum": [2, "x", [1]]}]},
    {"not": {"type": "string"}},
    {"not": {"enum": [1, "a", None]}},
    {"type": "integer", "not": {"multipleOf": 3}},
    {"type": "string", "not": {"pattern": "^a"}},
    {"if": {"type": "integer"}, "then": {"minimum": 5}, "else": {"type": "string"}},
    {"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "v": True}, "required": ["k", "v"], "additionalProperties": False, "if": {"properties": {"k": {"const": "a"}}}, "then": {"properties": {"v": {"type": "integer"}}}, "else": {"properties": {"v": {"type": "string"}}}},
    {"type": "number", "multipleOf": 0.5},
    {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 0.5},
    {"multipleOf": 1.5, "type": "integer"},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "minimum": -12, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 100},
    {"type": "number", "maximum": -0.5},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "hostname"},
    {"type": "string", "format": "duration"},
    {"type": "string", "format": "json-pointer"},
    {"type": "string", "format": "date", "minLength": 11},
    {"type": "string", "format": "email", "maxLength": 8},
    {"type": "string", "format": "email", "pattern": "^j"},
    {"type": "string", "format": "hostname", "minLength": 4, "maxLength": 9},
    {"format": "date"},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": 'é|\\\\|"'},
    {"type": "string", "pattern": "^\\d+$"},
    {"type": "string", "pattern": "^[^a]*$", "minLength": 1},
    {"enum": ["é", '\n', '"', "\\", "😀", "a/b"]},
    {"const": {"a": [1, {"b": None}]}},
    {"const": 1.5},
    {"const": 'a"b'},
    {"enum": [[], {}, [1, 2], {"a": 1}]},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 1},
    {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 1}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "minLength": 2}, {"type": "null"}]},
    {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
    {"oneOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}, {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"], "additionalProperties": False}]},
    {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}, {"type": "object", "properties": {"a": {"type": "string"}, "b": True}, "required": ["a", "b"], "additionalProperties": False}]},
    {"type": ["integer", "string", "null"], "minimum": 2, "minLength": 1},
    {"minimum": 2},
    {"minLength": 1},
    {"minItems": 1},
    {"required": ["a"]},
    {"properties": {"a": {"type": "integer"}}},
    {"type": "object", "minProperties": 1, "maxProperties": 1},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": False}},
    {"type": "object", "properties": {'a"b': {"type": "integer"}}, "required": ['a"b'], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}, "properties": {"a": True, "b": True}, "additionalProperties": False},
    {"contains": {"type": "integer"}},
    {"uniqueItems": True, "type": "array", "items": {"enum": [1, 2]}},
    {"type": "array", "uniqueItems": False, "items": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "minimum": 3},
    {"type": "string", "contentEncoding": "base64"},
    {"title": "x", "description": "y", "default": 1, "examples": [1], "type": "integer"},
    {"type": "integer", "enum": [1, 2.0, "x"]},
    {"type": "number", "enum": [1, 1.5]},
    {"const": 2.0},
]
REFUSED = {  # what is said of them
    "multipleOf": "multipleOf for numbers that aren't integers",
    "format": "unsatisfiable",
    "contains": "contains",
    "uniqueItems": "uniqueItems",
}
TEXTS = [
    "1", "2", "3", "4", "5", "6", "7", "9", "10", "12", "-1", "-3", "-12", "-13", "13", "99", "100", "0", "-0",
    "1.5", "2.5", "-1.5", "-0.5", "2.25", "2.26", "0.01", "0.25", "0.99", "1e2", "1E+2", "2.0", "1.0", "5e-1",
    "3.0", "0.5", "1.25", "0.30", "true", "false", "null", '""', '"a"', '"b"', '"ab"', '"aé"', '"é"', '"x"',
    '"abc"', '"\\n"', '"\\""', '"\\\\"', '"😀"', '"\\ud83d\\ude00"', '"\\u00e9"', '"a/b"', '"a\\"b"', '"12"',
    '"j@a.bc"', '"joe@x.yz"', '"a@b"', '"2024-02-29"', '"2023-02-29"', '"1900-02-29"', '"2000-02-29"',
    '"2024-04-31"', '"12:30:00Z"', '"12:30:00"', '"24:00:00Z"', '"12:30:00.25+01:00"', '"2024-02-29T12:30:00Z"',
    '"2024-02-30T12:30:00Z"', '"123e4567-e89b-12d3-a456-426614174000"', '"1.2.3.4"', '"1.2.3.256"', '"::1"',
    '"1::2::3"', '"P1D"', '"P1DT2H"', '"P"', '"/a~0b"', '"a"', '"host"', '"ho-st.ex"', '"-host"', "[]", "[1]",
    "[1,2]", '[1,"a"]', '["a"]', '[1,"a",2]', '[1,"a","b"]', "[[1],[2,3]]", "[[1,2,3]]", "[null]", "[null,1,2]",
    "[1,1]", "[1,1,1,1]", "{}", '{"a":1}', '{"a":5}', '{"a":12}', '{"a":-1}', '{"a":"x"}', '{"b":1}',
    '{"a":1,"b":2}', '{"b":2,"a":1}', '{"x_a":1}', '{"x_a":"s"}', '{"x_a":1,"x_b":2}', '{"x_b":1}',
    '{"x_a":1,"y":"s"}', '{"ab":1}', '{"ab":3}', '{"ab":9}', '{"a":0}', '{"é":1}', '{"\\u00e9":1}', '{"c":1}',
    '{"a":true}', '{"a":true,"b":false}', '{"k":"a","v":1}', '{"k":"a","v":"s"}', '{"k":"b","v":"s"}',
    '{"k":"b","v":1}', '{"a\\"b":1}', '{"a":1,"z":"s"}', '{"a":1,"z":2}', '{"a":[1,{"b":null}]}', '{"a":{}}',
    '{"a":{"a":{}}}', '{"\\u0061":1}', '{"a":null}',
]
OTHERWISE = re.compile(r'[0-9]\.0$|-0$|[0-9]+[eE][-+]?[0-9]+$|\{"\\u00|\{"b":2,"a"')  # how values are never written


def test_a_value_is_written_in_one_of_a_few_ways():
    assert all(OTHERWISE.match(text) for text in ("2.0", "1e2", "-0", '{"\\u0061":1}', '{"b":2,"a":1}'))
    assert not any(OTHERWISE.match(text) for text in ("20", "1.5", "-10", '{"a":1,"b":2}', '"\\u00e9"'))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_combinations(schema):
    if schema.get("format", "date") not in CHECKER.checkers:
        pytest.skip(f"jsonschema does not check {schema['format']} here")
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    try:
        grammar = Grammar.from_json_schema(schema)
    except GrammarError as error:
        assert any(keyword in schema and why in str(error) for keyword, why in REFUSED.items()), error
        return
    accepted = {text for text in TEXTS if grammar.matches(text)}
    valid = {text for text in TEXTS if validator.is_valid(json.loads(text))}
    assert accepted <= valid
    assert all(OTHERWISE.match(text) for text in valid - accepted)
    assert accepted
