"""Defects that engines really had with constrained decoding, each stated as what must happen instead.

The cases are data (tests/data/constrained_cases.json): a regex or a schema, texts to accept and to reject, and a
behaviour in words. `test_accepts_and_rejects` runs the texts of all of them; the behaviours have a test each,
named after the case.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from minisgl.fsm import FINISHED, Grammar, GrammarError
from minisgl.tokenizer import ByteTokenizer, Tokenizer

from .grammar_tools import PiecesTokenizer, legal_tokens

CASES = json.loads((Path(__file__).parent / "data" / "constrained_cases.json").read_text(encoding="utf-8"))
BY_KIND = {case["kind"]: case for case in CASES}


def grammar_of(given: dict) -> Grammar:
    if "regex" in given:
        return Grammar.from_regex(given["regex"])
    return Grammar.from_json_schema(given["schema"], whitespace=given.get("whitespace_pattern"))


def case(kind: str) -> Grammar:
    return grammar_of(BY_KIND[kind]["input"])


@pytest.fixture(scope="module")
def smol(default_model_folder):
    return Tokenizer(default_model_folder)


@pytest.mark.parametrize("kind", [c["kind"] for c in CASES if {"accept", "reject"} & set(c["expected"])])
def test_accepts_and_rejects(kind):
    expected, grammar = BY_KIND[kind]["expected"], case(kind)
    for text in expected.get("accept", []):
        assert grammar.matches(text), text
    for text in expected.get("reject", []):
        assert not grammar.matches(text), text


@pytest.mark.parametrize("kind", [c["kind"] for c in CASES if {"regex", "schema"} & set(c["input"])])
def test_every_step_of_a_walk_has_a_mask(kind, smol):
    """No state that a legal token leads to lacks one ("KeyError at run time", "all-zero mask")."""
    if kind == "regex/lookahead":
        pytest.skip("refused")
    tokens = case(kind).compile(smol)
    rng = np.random.default_rng(0)
    state = tokens.start
    for _ in range(12):
        legal = sorted(legal_tokens(tokens, state))
        assert legal
        after = tokens.advance(state, int(rng.choice(legal)))
        assert after is not None
        state = after
        if state == FINISHED:
            break


def test_unicode_alternatives_share_half_a_character():
    grammar = case("jump_forward/unicode")
    assert grammar.forced(b"") == b"\xe9\x9c\x8d\xe6"
    tokens = grammar.compile(ByteTokenizer())
    assert bytes(tokens.forced_tokens(tokens.start)).decode() == "霍"  # whole characters only


@pytest.mark.parametrize("regex, first, after, rest", [
    ("(é|è)x", b"\xc3", "é".encode(), b"x"),
    ("(😨|😩)!", "😨".encode()[:3], "😩".encode(), b"!"),
    ("[\"“”]a", b"", "“".encode(), b"a"),
])  # fmt: skip
def test_forced_text_never_cuts_a_character(regex, first, after, rest):
    grammar = Grammar.from_regex(regex)
    assert grammar.forced(b"") == first
    assert grammar.forced(after) == rest
    tokens = grammar.compile(ByteTokenizer())
    assert tokens.forced_tokens(tokens.start) == []
    state = tokens.advance_all(tokens.start, list(after))
    assert state is not None
    assert bytes(tokens.forced_tokens(state)) == rest


def test_optional_whitespace_is_not_decided_by_a_jump(smol):
    """`": "`, `":` and `" :` are all legal after a key: none of them may be jumped over."""
    for kind in ("jump_forward/changes greedy output", "jump_forward/spurious space before colon"):
        grammar = case(kind)
        tokens = grammar.compile(smol)
        name = "name" if "greedy" in kind else "ssid"
        state = tokens.start
        for byte in f'{{"{name}'.encode():
            state = grammar.automaton.step(state, bytes([byte]))
        assert grammar.forced(f'{{"{name}') == b'"'
        assert tokens.forced_tokens(state) == []  # `":` and `" :` go on from the quote


def test_jump_forward_fires_on_compact_json(smol):
    """At least a fifth of the tokens is forced on the schema of the report, and more with longer keys."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "population": {"type": "integer"}},
        "required": ["name", "population"],
        "additionalProperties": False,
    }
    tokens = Grammar.from_json_schema(schema, whitespace="").compile(smol)
    text, at, forced, total, state = '{"name":"Paris","population":2140000}', 0, 0, 0, tokens.start
    while at < len(text):
        certain = tokens.forced_tokens(state)
        step = certain or [int(smol.encode(text[at:])[0])]
        forced += len(certain)
        total += len(step)
        state = tokens.advance_all(state, step)
        assert state is not None
        at += sum(len(smol.token_bytes(token)) for token in step)
    assert tokens.is_accepting(state)
    assert forced >= 0.2 * total, (forced, total)


def test_a_key_that_a_longer_token_may_continue_is_held_back():
    """Vocabulary with order and orderId: after {" the shared `order` is not forced."""
    tokenizer = ByteTokenizer(['{"', "order", "orderId", "name", "_of", "_the", "_person", '":', '": "'])
    value = r'"[a-z]*"'
    both = Grammar.from_regex(rf'\{{"orderId": {value}\}}|\{{"orderName": {value}\}}')
    encode = {piece: i for i, piece in enumerate(tokenizer.all_token_bytes())}
    tokenizer.encode = lambda text, add_special_tokens=True: np.array(_greedy(text.encode(), encode), np.int32)
    tokens = both.compile(tokenizer)
    assert [tokenizer.token_bytes(i) for i in tokens.forced_tokens(tokens.start)] == [b'{"']
    one = Grammar.from_regex(r'\{"name_of_the_person":( "[a-z]*"|[0-9]+)\}').compile(tokenizer)
    assert [tokenizer.token_bytes(i) for i in one.forced_tokens(one.start)] == [
        b'{"', b"name", b"_of", b"_the", b"_person"
    ]  # fmt: skip


def _greedy(data: bytes, ids: dict[bytes, int]) -> list[int]:
    found = []
    while data:
        piece = max((p for p in ids if p and data.startswith(p)), key=len)
        found.append(ids[piece])
        data = data[len(piece) :]
    return found


def test_additional_properties_true_means_any_other_name():
    grammar = case("json_schema/additionalProperties true")
    assert grammar.matches('{"a": "x", "b": [1, {"c": null}]}')
    assert not grammar.matches('{"\\u0061": 1}')  # the declared name in another spelling is not another name


def test_a_lone_backslash_token_is_followed_by_an_escape():
    tokens = case("json_schema/escape split over tokens").compile(ByteTokenizer(["\\", "\\n"]))
    state = tokens.advance_all(tokens.start, list(b'{"query": "a\\'))
    assert state is not None
    assert legal_tokens(tokens, state) == set(b'nrtbf/\\"u') | {258, 259}  # pieces "\\" and "\\n" too
    two = tokens.advance(state, ord("n"))
    one = tokens.advance(tokens.advance_all(tokens.start, list(b'{"query": "a')), 259)
    assert one == two


def test_pattern_properties_apply_beside_properties():
    grammar = case("json_schema/patternProperties overlapping properties")
    assert not grammar.matches('{"score":15,"tags":["abcdefghij"],"other":1}')


def test_recursion_has_no_depth_limit():
    grammar = case("json_schema/recursive $ref")
    text = '{"name": "x", "children": []}'
    for _ in range(40):
        text = '{"name": "x", "children": [' + text + "]}"
    assert grammar.matches(text)
    assert not grammar.matches(text.replace('"x"', "1", 1))


def test_a_schema_that_never_compiled_compiles_at_once():
    begin = time.monotonic()
    grammar = case("json_schema/compile never ends")
    assert time.monotonic() - begin < 5
    assert grammar.matches("[]")  # identical branches: no object is valid against exactly one of them
    assert not grammar.matches('[{"p0": null}]')


def test_a_pattern_that_took_minutes_takes_none(smol):
    begin = time.monotonic()
    tokens = case("performance/interegular").compile(smol)
    assert tokens.mask(tokens.start).any()
    assert time.monotonic() - begin < 5


def test_byte_fallback_reaches_characters_without_a_token():
    tokens = Grammar.from_regex("[😀-🙏]+").compile(ByteTokenizer())
    state = tokens.advance_all(tokens.start, [0xF0, 0x9F])
    assert state is not None and not tokens.is_accepting(state)
    assert legal_tokens(tokens, state) == {0x98, 0x99}  # 1F600..1F64F
    state = tokens.advance(state, 0x99)
    assert state is not None
    assert legal_tokens(tokens, state) == set(range(0x80, 0x90))
    state = tokens.advance(state, 0x8F)
    assert state is not None and tokens.is_accepting(state)
    assert Grammar.from_regex("[😨]+").matches("😨😨")


@pytest.mark.parametrize("regex", ["(?i:ß)", "(?i:İ)", "(?i:ŉ)", "(?i:ǰ)"])
def test_characters_whose_upper_case_is_longer(regex):
    assert Grammar.from_regex(regex).matches(regex[4])


def test_a_lookahead_is_refused_by_name():
    with pytest.raises(GrammarError, match="lookahead"):
        case("regex/lookahead")


def test_only_a_stop_token_follows_the_structure(smol):
    schema = {**BY_KIND["eos/text after the structure"]["input"]["schema"], "additionalProperties": False}
    tokens = Grammar.from_json_schema(schema).compile(smol)
    state = tokens.advance_all(tokens.start, smol.encode('{"a": 1}').tolist())
    assert state is not None and tokens.is_final(state)
    assert legal_tokens(tokens, state) == set(smol.eos_ids)
    for byte in (b" ", b"\n"):
        token = smol.all_token_bytes().index(byte)
        assert tokens.advance(state, token) is None


def test_eos_in_an_accepting_state_finishes():
    tokenizer = PiecesTokenizer([b"abc", b"a"])
    tokens = Grammar.from_regex("abc").compile(tokenizer)
    state = tokens.advance(tokens.start, 0)
    assert state is not None and tokens.is_accepting(state)
    eos = next(iter(tokenizer.eos_ids))
    assert tokens.advance(tokens.start, eos) is None
    end = tokens.advance(state, eos)
    assert end == FINISHED and tokens.is_accepting(end)
    assert tokens.advance(end, eos) == FINISHED  # a second EOS doesn't raise
    assert tokens.advance(end, 0) is None
    assert legal_tokens(tokens, end) == {eos}


def test_a_token_with_the_end_and_more_is_masked():
    tokenizer = ByteTokenizer(["}\n", "}"])
    tokens = case("tokens/closing brace with newline").compile(tokenizer)
    state = tokens.advance_all(tokens.start, list(b'{"a": 1'))
    assert state is not None
    legal = legal_tokens(tokens, state)
    assert 258 not in legal and {259, ord("}")} <= legal


def test_default_whitespace_is_bounded():
    grammar = case("whitespace/endless")
    assert grammar.matches('{"a":1}') and grammar.matches('{"a": 1}')
    for text in ('{"a":  1}', '{"a":\n1}', '{ "a": 1}', '{"a": 1} ', ' {"a": 1}'):
        assert not grammar.matches(text), text


def test_the_whitespace_option_is_checked():
    with pytest.raises(GrammarError, match="whitespace"):
        Grammar.from_json_schema({}, whitespace="[ x]*")
    with pytest.raises(GrammarError, match="whitespace"):
        Grammar.from_json_schema({}, whitespace=3)  # pyright: ignore[reportArgumentType]


def test_moves_into_dead_ends_are_pruned():
    assert Grammar.from_regex(r"[^\s\S]|ab").forced(b"") == b"ab"
    vocabulary = PiecesTokenizer([b"x", b"a", b"b"])
    tokens = Grammar.from_regex("x\x80?").compile(vocabulary)
    assert legal_tokens(tokens, tokens.start) == {0}
    # "xé" can't be spelt: the x that would lead there is no legal move, and without another way it's refused
    with pytest.raises(GrammarError, match="no sequence of this tokenizer's tokens"):
        Grammar.from_regex("xé").compile(vocabulary)
    some = Grammar.from_regex("xé|ab").compile(vocabulary)
    assert legal_tokens(some, some.start) == {1}
    assert some.advance(some.start, 0) is None


@pytest.mark.parametrize("regex", [r"[^\s\S]", r"a\Ab", "a(?!a)a|$x"])
def test_an_empty_language_is_refused(regex):
    with pytest.raises(GrammarError):
        Grammar.from_regex(regex)
