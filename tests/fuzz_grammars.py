"""Hostile grammars: regexes, JSON Schemas and structural tags that are garbage, huge, deep, or nearly right.

What must hold of each: it is refused in one line of GrammarError, or it becomes a grammar whose walks spell texts that
an independent reader (`regex`, `jsonschema`) accepts; masks are never empty; all within the budget.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import regex as regex_package
from hypothesis import strategies as st

from minisgl.expressions import Budget, GrammarError
from minisgl.fsm import FINISHED, Grammar, TokenGrammar
from minisgl.grammar import GrammarCompiler, GrammarSpec
from minisgl.token_masks import unpack
from minisgl.tokenizer import ByteTokenizer

from .fuzz import Cpu, Target, one_line
from .random_schemas import SchemaMaker

TOKENIZER = ByteTokenizer(['{"', '":', '", "', '"}', "abc", "00", "true", "null", "é", "😀", b"\xc3", "\n  ", "  ",
    "[["])
SECONDS = 1.0  # of the budget that these grammars get
WALL = 6 * SECONDS  # of the thread's work: several operations, each in its budget, and the machine's mood


def budget() -> Budget:
    return Budget(nodes=60_000, seconds=SECONDS, mask_seconds=SECONDS / 2)


def walk(tokens: TokenGrammar, rng: random.Random, steps: int = 16) -> tuple[bytes, bool]:
    """A text of random legal tokens, and whether it ended. Raises GrammarError past the budget."""
    state, data = tokens.start, b""
    for step in range(steps):
        legal = np.flatnonzero(unpack(tokens.mask(state), tokens.vocab_size))
        assert len(legal), f"no legal token after {data!r}"
        assert not set(legal.tolist()) & (tokens.tokenizer.special_ids - tokens.stop_ids), "a special token is legal"
        stops = [int(t) for t in legal if int(t) in tokens.stop_ids]
        forced = tokens.forced_tokens(state)
        if forced:
            assert tokens.advance_all(state, forced) is not None, f"forced tokens {forced} aren't legal after {data!r}"
        assert bool(stops) == tokens.is_accepting(state)
        token = stops[0] if stops and rng.random() < 0.3 else int(rng.choice(legal))
        after = tokens.advance(state, token)
        assert after is not None, f"token {token} is in the mask after {data!r} but doesn't advance"
        if after == FINISHED:
            return data, True
        data += tokens.tokenizer.token_bytes(token)
        state = after
        if step > steps // 2 and tokens.is_accepting(state):
            return data, True
    return data, tokens.is_accepting(state)


def spell(grammar: Grammar, number: int) -> list[str]:
    """Some texts of a grammar, found through masks. Raises GrammarError past the budget."""
    with Cpu(WALL):
        tokens = grammar.compile(TOKENIZER)
    rng, texts = random.Random(number), []
    for _ in range(3):
        with Cpu(WALL):
            data, ended = walk(tokens, rng)
        if ended:
            texts.append(data.decode())  # whole characters always
    return texts


def spelt(make: Callable[[], Grammar], number: int) -> tuple[Grammar, list[str]] | str:
    """A grammar with some of its texts, or how it was refused: at once, or "later", when masks were asked for."""
    try:
        with Cpu(WALL):
            grammar = make()
    except GrammarError as error:
        return refusal(error)
    try:
        return grammar, spell(grammar, number)
    except GrammarError as error:
        return refusal(error) + " later"


def refusal(error: GrammarError) -> str:
    one_line(error)
    return "refused"


# ---- regexes

_ATOMS = st.sampled_from(
    ["a", "b", "é", "😀", " ", "\\n", "\\x00", ".", "[ab]", "[^a]", "[^\\x00-\\uffff]", "\\w", "\\W", "\\s", "\\S",
        "\\d", "\\D", "^", "$",
     "\\b", "\\B", "\\A", "\\Z", "(?i:k)", "(?i:ſ)", "(?s:.)", "(?a:\\w)", "[a-z0-9_]", "[]a]", "\\p{L}", "\\P{Lu}",
         "\\u00e9", "\\N{DIGIT ONE}", "x{0}",
     "[\\w-]", "[a\\-z]", "\\.", "\\\\", "(?#c)", "()", "(?:)", "(?P<n>a)", "\\01", "\\x7f", "[\\d\\D]", "\\ud83d",
         "[\\ud800-\\udfff]"]
)  # fmt: skip
_COUNTS = st.sampled_from(
    ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "*?", "{3,}", "{,2}", "{0}", "{100}", "{1000}", "{0,5000}", "{50,}",
        "{1000000}",
     "{99999999999}", "{2,1}", "{9999,}?", "{"]
)  # fmt: skip
_STRUCTURED = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=5).map("".join),
        st.lists(inner, min_size=1, max_size=4).map(lambda parts: "(?:" + "|".join(parts) + ")"),
        st.tuples(inner, _COUNTS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(inner, _COUNTS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=12,
)
_GARBAGE = st.text(alphabet="()[]{}|*+?\\^$.,-:<>=!#&PpLuNxUdDwWsSbBAZaik0123456789é😀\n\ud800", max_size=30)
_SEEDS = ["(a|b)*a(a|b){12}", r"\d{4}-\d{2}-\d{2}", r"(?:[^\W_]+\s?){1,40}", '"([^"\\\\]|\\\\.)*"', "(x+x+)+y",
    "(.*a){9}", r"(\w{1,20} ){1,20}\w+"]


@st.composite
def _mutated(draw) -> str:
    """A sensible pattern, cut, doubled, wrapped many times."""
    text = draw(st.sampled_from(_SEEDS) | _STRUCTURED)
    for _ in range(draw(st.integers(1, 3))):
        at, size = draw(st.integers(0, max(len(text) - 1, 0))), draw(st.integers(0, 6))
        how = draw(st.integers(0, 4))
        if how == 0:
            text = text[:at] + text[at + size :]
        elif how == 1:
            text = text[:at] + text[at : at + size] * draw(st.sampled_from([2, 3, 50])) + text[at + size :]
        elif how == 2:
            text = text[:at] + draw(_GARBAGE)[:4] + text[at:]
        elif how == 3:
            text = "(" * (times := draw(st.sampled_from([1, 5, 60, 150]))) + text + draw(_COUNTS).join([")"] * times)
        else:
            text = "|".join([text] * draw(st.sampled_from([2, 30])))
    return text[:20_000]


_REGEXES = st.one_of(_STRUCTURED, _GARBAGE, _mutated())


def check_regex(given: tuple[str, int]) -> str:
    pattern, number = given
    made = spelt(lambda: Grammar.from_regex(pattern, budget=budget()), number)
    if isinstance(made, str):
        return made
    grammar, texts = made
    found = "walked"
    for text in texts:
        assert grammar.matches(text)
        found = "matched" if _matches(pattern, text) else found
    rng = random.Random(number)
    for text in [*texts, "", "a", "ab"]:  # and near misses, both ways
        changed = text[: rng.randrange(len(text) + 1)] + rng.choice(["", "a", "\n", "é", "0", " "])
        expected = _fullmatch(pattern, changed)
        if expected is not None:
            assert grammar.matches(changed) == expected, f"{changed!r}: fullmatch says {expected}"
    return found


def _matches(pattern: str, text: str) -> bool:
    found = _fullmatch(pattern, text)
    assert found is not False, f"spelt {text!r}, which the pattern doesn't match"
    return bool(found)


_DIFFERS = ("(?i", "{,", "\\b", "\\B", "\\w", "\\W", "\\s", "\\S", "\\d", "\\D", "\\p", "\\P", "[", "\\N", "\\u",
    "(?#", "(?a")


def _fullmatch(pattern: str, text: str) -> bool | None:
    """What the package `regex` says; None where it takes too long, or is known to mean something else than `re`."""
    if any(part in pattern for part in _DIFFERS) or len(pattern) > 2000 or _product(pattern) > 20_000:
        return None
    try:
        return regex_package.fullmatch(pattern, text, timeout=0.3) is not None
    except (TimeoutError, MemoryError):
        return None


def _product(pattern: str) -> int:
    total = 1
    for count in regex_package.findall(r"\{(\d{1,9})", pattern):
        total *= max(int(count), 1)
    return total


# ---- JSON Schemas

_WORDS = [
    "type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties",
    "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "enum", "const", "minLength",
        "maxLength", "pattern",
    "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "anyOf", "oneOf", "allOf",
        "not", "if",
    "then", "else", "$ref", "$defs", "$id", "$anchor", "$schema", "definitions", "dependentRequired",
        "dependentSchemas", "dependencies",
    "$dynamicRef", "unevaluatedProperties", "unevaluatedItems", "title", "default", "nullable", "x-own",
]  # fmt: skip
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5), st.sampled_from([10**400, -(10**30), 2**63, 1e308, -0.0, 0.1,
        1e-300, 1.5, 5e-324]),
    st.sampled_from(["", "a", "string", "object", "array", "integer", "number", "null", "boolean", "date", "email",
        "ipv6", "uri", "#", "#/",
                     "#/$defs/a", "#/properties/a", "#a", "http://x/y", "\ud800", "^a$", "(", "(a{1000}){1000}", "é",
                         "\x00", "\\", "~", "%", "[" , "//[", "#/%zz", "#/~"]),
    st.floats(allow_nan=True, allow_infinity=True), st.text(max_size=4),
)  # fmt: skip
_ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(_WORDS) | st.sampled_from(["a", "b", "", "é", "\ud83d"]), inner, max_size=3),
    max_leaves=8,
)
_WRONG = st.dictionaries(st.sampled_from(_WORDS), _ANYTHING, min_size=1, max_size=4)


@st.composite
def _right(draw) -> Any:
    """A schema that is as it should be, or with one thing in it that is anything."""
    schema = SchemaMaker(random.Random(draw(st.integers(0, 2**32)))).schema()
    if draw(st.booleans()) or not isinstance(schema, dict):
        return schema
    schema = copy.deepcopy(schema)  # parts of it are constants of that module
    places = list(_places(schema))
    holder, key = draw(st.sampled_from(places)) if places else (schema, "x")
    holder[key] = draw(_ANYTHING)
    return schema


def _places(value: Any):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def _deep(word: str, depth: int, end: Any) -> Any:
    schema = end
    for _ in range(depth):
        inner = {word: schema}
        if word in ("allOf", "anyOf", "oneOf", "prefixItems", "enum"):
            inner = {word: [schema]}
        elif word in ("properties", "patternProperties", "$defs", "dependentSchemas"):
            inner = {word: {"a": schema}}
        schema = inner
    return schema


def _wide(word: str, size: int, rng: random.Random) -> Any:
    maker = SchemaMaker(rng)
    if word in ("allOf", "anyOf", "oneOf", "prefixItems"):
        return {word: [maker.schema(1) for _ in range(size)]}
    if word == "enum":
        return {"enum": [rng.choice([i, str(i), [i], {"k": i}, i / 7]) for i in range(size)]}
    if word == "product":  # each has several alternatives, all must hold
        return {"allOf": [{"anyOf": [maker.schema(1) for _ in range(4)]} for _ in range(min(size, 20))]}
    names = {f"name{i}": maker.schema(1) for i in range(size)}
    return {"type": "object", word: names, "required": rng.sample(list(names), min(3, size))}


_HUGE = st.one_of(
    st.builds(
        _deep,
        st.sampled_from(["items", "not", "allOf", "anyOf", "oneOf", "properties", "additionalProperties", "if",
            "prefixItems", "const", "enum", "$defs"]),
        st.sampled_from([3, 20, 90, 300, 3000]),
        st.sampled_from([True, {"type": "integer"}, {"type": "object"}, {"enum": [1, "a"]}]),
    ),
    st.builds(
        _wide,
        st.sampled_from(["allOf", "anyOf", "oneOf", "prefixItems", "enum", "product", "properties",
            "patternProperties"]),
        st.sampled_from([2, 9, 60, 500]),
        st.integers(0, 2**32).map(random.Random),
    ),
)  # fmt: skip
_REFERENCES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.fixed_dictionaries({}, optional={
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/$defs/c", "#x", "c"]),
            "type": st.sampled_from(["object", "array", "integer"]),
        "properties": st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from([{"$ref": "#"},
            {"$ref": "#/$defs/b"}, True, False]), max_size=2),
        "items": st.sampled_from([{"$ref": "#/$defs/a"}, {"$ref": "#"}, False]), "required": st.just(["a"]),
            "$anchor": st.just("x"),
        "$id": st.sampled_from(["c", "http://x/c"]), "minItems": st.integers(0, 2),
            "not": st.just({"$ref": "#/$defs/c"}),
        "anyOf": st.lists(st.sampled_from([{"$ref": "#"}, {"$ref": "#/$defs/a"}, {"type": "null"}]), min_size=1,
            max_size=3),
        "oneOf": st.lists(st.sampled_from([{"$ref": "#/$defs/c"}, {"type": "null"}, {"type": "integer"}]), min_size=1,
            max_size=3)}),
    max_size=3,
).map(lambda defs: {"$defs": defs, "$ref": "#/$defs/a"} if "a" in defs else {**defs.get("b", {}),
    "$defs": defs})  # fmt: skip
_TEXTS = st.sampled_from(["{", "[1]", "1", "null", "{}" * 2, '{"a": NaN}', '{"type":' * 900, "\ud800", "", "true",
    '{"type": "integer", "type": "string"}']) | st.builds(lambda n: "[" * n, st.just(100_000))
_OBJECTS = st.sampled_from([None, 1, b"{}", object(), [{}], {1: 2}, {"type": {"integer"}}, {"enum": [b"x"]},
    {"const": object()}, int, {"a": 1j}, (), {("a",): 1}])
_SCHEMAS = st.one_of(_right(), _WRONG, _HUGE, _REFERENCES, _TEXTS, _OBJECTS)
_SPACES = st.sampled_from([None, "", "[ \\n]{0,3}", " ?", "(", "a", "\\s*"])


def check_schema(given: tuple[Any, Any, int]) -> str:
    schema, whitespace, number = given
    made = spelt(lambda: Grammar.from_json_schema(schema, whitespace=whitespace, budget=budget()), number)
    if isinstance(made, str):
        return made
    grammar, texts = made
    valid = _validator(schema)
    for text in texts:
        value = json.loads(text)
        assert grammar.matches(text)
        if valid is not None and not valid(value):
            raise AssertionError(f"spelt {text!r}, which is not valid")
    return "validated" if texts and valid else "walked"


def _validator(schema: Any) -> Any:
    """`jsonschema`'s judgement; None for schemas that it can't read."""
    import jsonschema

    if isinstance(schema, str):
        schema = json.loads(schema)
    kind = jsonschema.Draft202012Validator
    try:
        kind.check_schema(schema)
    except (jsonschema.SchemaError, RecursionError, Exception):
        return None
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)

    def valid(value: Any) -> bool:
        try:
            return validator.is_valid(value)
        except RecursionError:
            return True
        except Exception as error:  # references that it can't follow, patterns that `re` can't read
            assert "ref" in repr(error).lower() or "re." in repr(error) or "Pattern" in repr(error), repr(error)
            return True

    return valid


# ---- structural tags

_PIECES = st.sampled_from(["<a>", "<", "<a", "", "é", "<b=", "</a>", "\ud800", "aa", "aaa", "😀", 1, None])
_TAG = st.fixed_dictionaries({}, optional={"begin": _PIECES, "schema": _right() | _WRONG, "end": _PIECES,
    "x": st.none()})
_FULL_TAG = st.fixed_dictionaries({
    "begin": st.sampled_from(["<a>", "<a=f>", "<b=", "<b=g>", "é!"]), "schema": _right() | st.sampled_from([{},
        {"type": "integer"}, {"enum": ["<a", "<b="]}]),
    "end": st.sampled_from(["", "</a>", "é", "<a"])})  # fmt: skip
_GOOD_TAG = st.sampled_from([
    {"structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}], "triggers": ["<a"]},
    {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"},
                    {"begin": "<b=x>", "schema": {"enum": [1]}, "end": "é"}], "triggers": ["<a", "<b="]},
])  # fmt: skip
_TAGS = st.one_of(
    st.fixed_dictionaries({"structures": st.lists(_FULL_TAG, min_size=1, max_size=3)},
                          optional={"type": st.just("structural_tag"), "triggers": st.just(["<a", "<b=", "é"])}),
    st.fixed_dictionaries({"structures": st.lists(_FULL_TAG, min_size=1, max_size=3),
        "triggers": st.lists(st.sampled_from(["<a", "<b=", "é"]), min_size=1, max_size=3)}),
    st.fixed_dictionaries({}, optional={"structures": st.lists(_TAG | _ANYTHING, max_size=3) | _ANYTHING,
                                        "triggers": st.lists(_PIECES, max_size=3) | _ANYTHING, "type": _ANYTHING}),
    _ANYTHING, _TEXTS,
)  # fmt: skip


def check_tag(given: tuple[Any, int]) -> str:
    tag, number = given
    made = spelt(lambda: Grammar.from_structural_tag(tag, budget=budget()), number)
    if isinstance(made, str):
        return made
    grammar, texts = made
    assert all(map(grammar.matches, texts))
    return "walked"


# ---- whatever a request may say, through the compiler of requests

_EBNF = st.one_of(
    st.sampled_from(['start: "a"', 'root ::= "a" root | "b"', "root ::= root", "start: start",
        'root ::= "a"{1,100000}', "start: /(a{1000}){1000}/", 'root ::= [a-z]+ "é"',
                     'start: a\na: b\nb: "x"', "", "::=", "root ::= (((", "start: %json {}", 'start: %json {"type":',
                         "start: /[/", "root ::= \"\\ud800\""]),
    st.text(alphabet='root start:=|()[]{}*+?"/\\a-z0,1é\n%#', max_size=60),
)  # fmt: skip
_KINDS = st.one_of(
    st.tuples(st.just("ebnf"), _EBNF), st.tuples(st.just("regex"), _REGEXES),
    st.tuples(st.just("json_schema"), _right() | _WRONG | _TEXTS), st.tuples(st.just("structural_tag"), _TAGS),
)  # fmt: skip
_COMPILERS: dict[str, GrammarCompiler] = {}


def check_request(given: tuple[str, tuple[str, Any], int]) -> str:
    """A spec, compiled by any backend: masks are never empty, what they allow is accepted."""
    backend, (kind, source), number = given
    if backend not in _COMPILERS:
        _COMPILERS[backend] = GrammarCompiler(TOKENIZER, backend, keep=4)
    try:
        spec = GrammarSpec.of(**{kind: source})
        if spec is None:
            return "refused"
        constraint = _COMPILERS[backend].compile(spec).start()
    except GrammarError as error:
        return refusal(error)
    rng = random.Random(number)
    try:
        for _ in range(12):
            legal = np.flatnonzero(unpack(constraint.mask(), TOKENIZER.vocab_size))
            assert len(legal), f"{backend}: no legal token"
            token = int(rng.choice(legal))
            assert constraint.copy().accept(token) and constraint.accept(token), f"{backend}: {token} is not accepted"
            if constraint.must_stop() or token in TOKENIZER.eos_ids:
                break
    except GrammarError as error:
        return refusal(error) + " later"
    return "walked"


_NUMBER = st.integers(0, 2**20)
TARGETS = [
    Target("regex", st.tuples(_REGEXES, _NUMBER), check_regex, ("refused", "matched", "walked")),
    Target("schema", st.tuples(_SCHEMAS, _SPACES, _NUMBER), check_schema, ("refused", "validated", "walked")),
    # a fifth good ones: few of the others are
    Target("tag", st.tuples(st.integers(0, 4).flatmap(lambda n: _TAGS if n else _GOOD_TAG), _NUMBER), check_tag,
        ("refused", "walked")),
    Target("request-fsm", st.tuples(st.just("fsm"), _KINDS, _NUMBER), check_request, ("refused", "walked")),
    Target("request-llguidance", st.tuples(st.just("llguidance"), _KINDS, _NUMBER), check_request, ("refused",
        "walked")),
    Target("request-xgrammar", st.tuples(st.just("xgrammar"), _KINDS, _NUMBER), check_request, ("refused", "walked")),
]
