"""Constrained decoding as a user sees it: odd grammars with every other parameter, on a model of random weights.

A model that knows nothing is the best adversary: at a high temperature it goes wherever the masks let it. What must
hold of each output: finish_reason "stop" means that the text is in the grammar (`jsonschema` or `re` says so, not
we); "length" means that it has as many tokens as it may; an error is the caller's, in one line. The engine is idle
after it, whatever was asked.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
from hypothesis import strategies as st

from minisgl import Runtime

from . import engines
from .fuzz import Target, one_line
from .random_schemas import SchemaMaker

_STRING = {"type": "string", "maxLength": 6}
SCHEMAS: list[Any] = [
    {"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string", "pattern": "^[0-9]+$", "maxLength": 5},
        {"type": "null"}]},
    {"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]},
    {"anyOf": [{"const": 1}, {"const": "1"}, {"const": [1]}, {"const": {"a": 1}}, {"const": True}, {"const": None}]},
    {"type": ["object", "array", "null"], "properties": {"a": {"$ref": "#"}}, "items": {"$ref": "#"}, "maxItems": 2,
        "maxProperties": 1},
    {"type": "string", "minLength": 1, "maxLength": 3, "pattern": "^[😀-😏👩‍👧é́]+$"},
    {"type": "string", "pattern": "^(\\ud83d\\ude00|\\u00e9)+$", "maxLength": 4},
    {"enum": ["👩‍👩‍👧‍👦", "e\u0301", "\u00e9", "\u202e", "\ufeff", "\u2028", '"\\/\b\f\n\r\t', "\x00\x1f\x7f",
        "\U0010ffff"]},
    {"type": "object", "properties": {"é́": _STRING, 'q"': _STRING, "\\": _STRING, "": _STRING, "😀": _STRING},
     "required": ["", "😀"], "additionalProperties": False},
    {"type": "number", "minimum": -1e-7, "maximum": 1e-7},
    {"type": "number", "exclusiveMinimum": 1e15, "maximum": 1e16},
    {"type": "integer", "minimum": -(10**40), "maximum": 10**40, "multipleOf": 7},
    {"type": "integer", "minimum": 2**63 - 2, "maximum": 2**63 + 2},
    {"type": "number"}, {"type": "integer"}, {"type": "integer", "multipleOf": 0.5, "minimum": -2, "maximum": 2},
    {"type": "number", "multipleOf": 2, "minimum": -9, "maximum": 9},
    {"const": 1e300}, {"enum": [1.5, -0.0, 1e-7, 10**20, 0.1 + 0.2]},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 3}},
        "additionalProperties": {"type": "null"},
     "required": ["ab", "x"], "maxProperties": 4},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "patternProperties": {"a": {"maximum": 5}},
        "required": ["a"],
     "propertyNames": {"maxLength": 3}, "maxProperties": 3},
    {"type": "object", "additionalProperties": {"enum": [1, 2]}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "properties": {"a": True, "b": False}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"kind": {"const": "x"}, "n": {"type": "integer"}}, "required": ["kind"],
     "if": {"properties": {"kind": {"const": "x"}}}, "then": {"required": ["n"]}, "additionalProperties": False},
    {"type": "array", "prefixItems": [{"type": "null"}, {"enum": [1, 2]}], "items": False, "minItems": 1},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "minItems": 2,
        "maxItems": 3},
    {"not": {"type": ["string", "number", "array", "object"]}},
    {"allOf": [{"type": "string", "maxLength": 9}, {"pattern": "a"}, {"pattern": "b"}, {"not": {"const": "ab"}}]},
    {"type": "string", "format": "date"}, {"type": "string", "format": "ipv6"}, {"type": "string", "format": "email",
        "maxLength": 12},
    {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"],
        "additionalProperties": False},
    {"dependentRequired": {"a": ["b"]}, "type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "additionalProperties": False},
    {"type": "string", "maxLength": 2}, {"type": "string", "minLength": 5, "maxLength": 5}, {"maxLength": 1,
        "type": "string", "not": {"const": ""}},
    {}, {"type": "object", "maxProperties": 2}, {"type": "array", "maxItems": 3}, False, {"type": "integer",
        "minimum": 5, "maximum": 4},
    {"type": "object", "required": ["a"], "properties": {"a": False}}, {"enum": []}, {"type": "string",
        "pattern": "^a$", "minLength": 2},
]  # fmt: skip
REGEXES = [
    "a|ab|abc", "(a|b)*c?", "[😀-🙏]{1,3}", "e\u0301?|é", r"\d+(\.\d+)?([eE][+-]?\d+)?", "(foo|foobar)(bar)?", ".{0,5}",
        "[^\\x00-\\x7f]{2}", "a{3}b{0,2}",
    "x?", "", "(?i:straße)", r"\w{1,4}\b", "^a$|^bc$", "[\u0300-\u036f]{1,2}", r'"(\\.|[^"\\])*"', "\n\n?|\t",
        "(ab){2,4}", "[^\\W\\d]+!", "a^",
]  # fmt: skip
_PARAMS = st.fixed_dictionaries({"temperature": st.sampled_from([0, 1.0, 2.0, 50.0]),
    "max_new_tokens": st.sampled_from([1, 2, 3, 8, 40, 120])}, optional={
    "seed": st.integers(0, 99), "min_new_tokens": st.sampled_from([1, 2, 5, 30]), "n": st.sampled_from([2, 3]),
        "top_k": st.sampled_from([1, 5]),
    "top_p": st.sampled_from([0.1, 0.9]), "min_p": st.just(0.3), "repetition_penalty": st.sampled_from([0.5, 2.0]),
        "frequency_penalty": st.just(2.0),
    "stop": st.sampled_from(['"', "}", "a", ['":', "1"], "é"]), "stop_token_ids": st.sampled_from([[65], [34],
        [257]]), "ignore_eos": st.booleans(),
    "logit_bias": st.sampled_from([{257: 100}, {257: -100}, {34: 100}, {34: -100}, {200: 100, 0: 100},
        {i: -100 for i in range(120)}]),
    "stop_regex": st.sampled_from(["[0-9]{2}", "\\}$"]), "no_stop_trim": st.booleans(),
        "skip_special_tokens": st.booleans()})  # fmt: skip
_GRAMMARS = st.one_of(
    st.tuples(st.just("json_schema"), st.sampled_from(SCHEMAS)),
    st.tuples(st.just("json_schema"), st.integers(0, 2**32).map(lambda n: SchemaMaker(random.Random(n)).schema())),
    st.tuples(st.just("regex"), st.sampled_from(REGEXES)),
)
_RUNTIMES: list[Runtime] = []


def runtime() -> Runtime:
    if not _RUNTIMES:
        _RUNTIMES.append(engines.make(kv_capacity=1200, max_context=160, max_running_requests=8, chunk_size=32,
            jump_forward=True))
    return _RUNTIMES[0]


def shutdown() -> None:
    while _RUNTIMES:
        _RUNTIMES.pop().shutdown()


def fits(kind: str, grammar: Any, text: str) -> bool:
    """Is a text in the language, by others' judgement?"""
    if kind == "regex":
        return re.fullmatch(grammar, text) is not None
    checker = jsonschema.Draft202012Validator(grammar, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return checker.is_valid(json.loads(text))


def check_output(given: tuple[tuple[str, Any], dict[str, Any], str]) -> str:
    (kind, grammar), params, prompt = given
    engine = runtime()
    try:
        outputs = engine.generate(prompt, {**params, kind: grammar})
    except ValueError as error:
        one_line(error)
        return "refused"
    result = "length"
    for output in outputs if isinstance(outputs, list) else [outputs]:
        result = _judge(kind, grammar, params, output, result)
    engines.check_idle(engine)
    return result


def _judge(kind: str, grammar: Any, params: dict[str, Any], output: dict[str, Any], result: str) -> str:
    meta, text = output["meta_info"], output["text"]
    reason = meta["finish_reason"]
    assert "\ufffd" not in text or reason["type"] == "length", f"a broken character: {text!r}"
    if reason["type"] == "length":
        assert len(output["output_ids"]) == params["max_new_tokens"], f"length after {len(output['output_ids'])} tokens"
        return result
    assert reason["type"] == "stop", reason
    matched = reason.get("matched")
    if isinstance(matched, str) or matched in (params.get("stop_token_ids") or ()):
        return "stopped"  # by a stop string: what came before needs not be whole
    if not params.get("skip_special_tokens", True):
        text = text.replace("<|eos|>", "", 1)  # asked for
    assert fits(kind, grammar, text), f"{text!r} is not in the grammar ({reason})"
    assert len(output["output_ids"]) >= min(params.get("min_new_tokens", 0), 1)
    return "valid"


TARGETS = [
    Target("output", st.tuples(_GRAMMARS, _PARAMS, st.sampled_from(["a", "{", "Give JSON: ", "é😀"])), check_output,
        ("refused", "valid", "length", "stopped")),
]
