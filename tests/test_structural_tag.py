"""Free text with tags: the language, refusals, and whole requests with tags in them."""

from __future__ import annotations

import json
import random
import re

import pytest

from minisgl import Runtime
from minisgl.expressions import GrammarError
from minisgl.fsm import Grammar
from minisgl.grammar import FsmCompiled, GrammarCompiler, GrammarSpec
from minisgl.token_masks import unpack
from minisgl.tokenizer import ByteTokenizer

from . import tiny_models
from .grammar_tools import random_walk

CITY = {"type": "object", "properties": {"city": {"enum": ["Rom", "北京"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=stop>", "schema": {"type": "null"}, "end": "</function>"},
        {"begin": "[[", "schema": {"type": "integer"}, "end": "]]"},
    ],
    "triggers": ["<function=", "[["],
}
ENFORCED = r'(<function=(weather>\{"city": ?("Rom"|"北京")\}|stop>null)</function>|\[\[-?(0|[1-9][0-9]*)\]\])'


def reference(text: str) -> bool:
    """Cut tags out from the left; what is left between them has no trigger."""
    while text:
        at = min((i for i in (text.find("<function="), text.find("[[")) if i >= 0), default=-1)
        if at < 0:
            return True
        found = re.match(ENFORCED, text[at:])
        if found is None:
            return False
        text = text[at + found.end() :]
    return True


@pytest.fixture(scope="module")
def grammar():
    return Grammar.from_structural_tag(TAG)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True), ("plain text, é and 😀\n", True), ("a < b, <func and <function", True), ("[ [", True),
        ("<function=", False), ("x <function=weather>", False), ('<function=weather>{"city":"Rom"}</function>', True),
        ('so: <function=weather>{"city": "北京"}</function>, <function=stop>null</function>[[-12]] done', True),
        ('<function=weather>{"city":"Paris"}</function>', False), ("<function=other>null</function>", False),
        ("<function=stop>null", False), ("<<function=stop>null</function>", True), ("[[[[1]]", False),
        ("[[[1]]", False), ("[[1]]]", True),
        ("<functio<function=stop>null</function>", True), ("<function=stop>null</function>[[", False),
    ],
)  # fmt: skip
def test_texts(grammar, text, expected):
    assert grammar.matches(text) == expected == reference(text)


def test_random_texts(grammar):
    rng = random.Random(1)
    pieces = ["<", "<function=", "function=", "stop>", "null", "</function>", "[", "[[", "1", "]]", "x", "é", "<func",
              "weather>", '{"city":"Rom"}']  # fmt: skip
    seen = set()
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 7)))
        assert grammar.matches(text) == reference(text), text
        seen.add(("[[" in text or "<function=" in text, grammar.matches(text)))
    assert len(seen) == 3  # with a trigger and without, accepted and not


def test_text_is_utf8_and_tags_force(grammar):
    assert not grammar.matches(b"\xff") and not grammar.matches(b"\xc3") and grammar.matches("é".encode())
    assert grammar.forced("hello <function") == b"" == grammar.forced("")
    assert grammar.forced("<function=w") == b'eather>{"city":'
    assert grammar.forced("<function=stop>") == b"null</function>"


def test_walks_through_masks(grammar):
    tokenizer = ByteTokenizer(["<function=", "function", "=stop>n", "<f", "[[", "]] [[", "null</", "hello", " [", "é"])
    tokens = grammar.compile(tokenizer)
    rng = random.Random(3)
    for _ in range(20):
        data = random_walk(tokens, rng, 60)
        assert data is not None and reference(data.decode())
    legal = unpack(tokens.mask(tokens.start), tokens.vocab_size)
    assert all(legal[stop] for stop in tokens.stop_ids)
    opened = tokens.advance_all(tokens.start, tokenizer.encode("<function=").tolist())
    assert opened is not None and not unpack(tokens.mask(opened), tokens.vocab_size)[list(tokens.stop_ids)].any()


def tag(**changes):
    return {**TAG, **changes}


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        (tag(type="other"), "type"),
        (tag(format={"type": "any_text"}), "format is not supported"),
        (tag(triggers=[]), "triggers"),
        (tag(triggers=["<function=", ""]), "triggers"),
        (tag(triggers="<"), "triggers"),
        (tag(triggers=["<function=", "function"]), "part of"),
        (tag(triggers=["<function="]), r"no trigger begins '\[\['"),
        (tag(triggers=["<function=", "[[", "%"]), "no structure begins with the trigger '%'"),
        (tag(structures=[]), "structures"),
        (tag(structures=[{"begin": "<function=a>", "schema": True}]), "begin, schema and end"),
        (tag(structures=[{"begin": 1, "schema": True, "end": ""}]), "begin must be a string"),
        (tag(triggers=["a"], structures=[{"begin": "a", "schema": False, "end": ""}]), "unsatisfiable"),
        (tag(triggers=["a"], structures=[{"begin": "a", "schema": {"type": "strin"}, "end": ""}]), "type"),
        (tag(triggers=["a"], structures=[{"begin": "a\ud800", "schema": True, "end": ""}]), "surrogates"),
    ],
)
def test_refusals_name_what_is_wrong(source, named):
    with pytest.raises(GrammarError, match=named) as error:
        Grammar.from_structural_tag(source)
    assert "structural_tag" in str(error.value) and "\n" not in str(error.value)


def test_equal_values_of_two_schemas_stay_apart():
    """The structures share one automaton, in which "the value at #/properties/a" must not be one language."""
    structures = [
        {"begin": f"<{name}>", "end": "", "schema": {"type": "object", "properties": {"a": {"const": value}},
         "required": ["a"], "additionalProperties": False}} for name, value in (("x", 1), ("y", 2))
    ]  # fmt: skip
    grammar = Grammar.from_structural_tag({"structures": structures, "triggers": ["<"]})
    assert grammar.matches('<x>{"a":1}<y>{"a":2}') and not grammar.matches('<y>{"a":1}')


def test_backends():
    spec = GrammarSpec.of(structural_tag=TAG)
    assert spec is not None and spec.kind == "structural_tag"
    assert isinstance(GrammarCompiler(ByteTokenizer(), "auto").compile(spec), FsmCompiled)
    pytest.importorskip("llguidance")
    with pytest.raises(GrammarError, match="structural_tag is not supported by the grammar backend llguidance"):
        GrammarCompiler(ByteTokenizer(), "llguidance").compile(spec)


# ---- whole requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.make("smollm2", tmp_path_factory.mktemp("tags"))


def test_requests_with_tags(folder):
    """A model that loves "<": free text, tags with their forced tokens, the same with and without jump-forward."""
    tag = {"structures": TAG["structures"][:2], "triggers": ["<"]}
    found = []
    for jump in (False, True):
        with Runtime(folder, dtype="float32", jump_forward=jump, kv_capacity=4000) as runtime:
            love = dict.fromkeys(runtime.tokenizer.encode("<", add_special_tokens=False).tolist(), 6.0)
            params = {"structural_tag": tag, "max_new_tokens": 60, "logit_bias": love, "temperature": 1.0}
            replies = runtime.generate(["Say: "] * 3, [{**params, "seed": seed} for seed in range(3)])
            found.append((replies, runtime.stats()["steps"]))
            eos = runtime.eos_token_ids[0]
            stop = {"structural_tag": json.dumps(tag), "temperature": 0, "logit_bias": {eos: 100}}
            reply = runtime.generate("Say: ", stop)
            assert reply["output_ids"] == [eos] and reply["meta_info"]["finish_reason"]["type"] == "stop"
    (plain, plain_steps), (jumped, jumped_steps) = found
    assert [r["output_ids"] for r in plain] == [r["output_ids"] for r in jumped]
    assert sum(r["meta_info"]["forced_tokens"] for r in jumped) > 20 and jumped_steps < plain_steps
    grammar = Grammar.from_structural_tag(tag)
    texts = [reply["text"] for reply in plain]
    assert any("</function>" in text for text in texts)
    for text in texts:
        assert grammar._state(text.removesuffix("\ufffd")), text  # cut off perhaps, but so far legal
