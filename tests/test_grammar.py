"""Specs, the compiler with its memory, and the optional engines behind the same interface."""

from __future__ import annotations

import random
import re
import threading

import numpy as np
import pytest

from minisgl.expressions import GrammarError
from minisgl.grammar import FsmCompiled, GrammarCompiler, GrammarSpec, regex_of_choices, regex_of_dtype
from minisgl.token_masks import unpack
from minisgl.tokenizer import ByteTokenizer


def test_specs_are_normalised():
    assert GrammarSpec.of(regex=None, json_schema=None) is None
    assert GrammarSpec.of(regex="a") == GrammarSpec("regex", "a")
    assert GrammarSpec.of(json_schema={"type": "null"}) == GrammarSpec.of(json_schema='{"type":"null"}')
    with pytest.raises(GrammarError, match="regex and ebnf"):
        GrammarSpec.of(regex="a", ebnf="b")
    with pytest.raises(GrammarError, match="regex must be a str"):
        GrammarSpec.of(regex=3)
    with pytest.raises(GrammarError, match="json_schema"):
        GrammarSpec.of(json_schema={"const": {1, 2}})


def test_regexes_of_dtypes_and_choices():
    assert re.fullmatch(regex_of_dtype(int), "-12") and not re.fullmatch(regex_of_dtype(int), "012")
    assert re.fullmatch(regex_of_dtype(float), "3.25") and re.fullmatch(regex_of_dtype(bool), "True")
    assert re.fullmatch(regex_of_dtype(str), '"a\\"b"')
    assert re.fullmatch(regex_of_choices(["a.b", "(c"]), "(c") and not re.fullmatch(regex_of_choices(["a.b"]), "axb")
    for bad in ([], [1]):
        with pytest.raises(GrammarError, match="choices"):
            regex_of_choices(bad)
    with pytest.raises(GrammarError, match="dtype"):
        regex_of_dtype(list)


def test_equal_specs_are_compiled_once():
    compiler = GrammarCompiler(ByteTokenizer(), "fsm", keep=2)
    first = compiler.compile(GrammarSpec("regex", "a"))
    assert compiler.compile(GrammarSpec("regex", "a")) is first
    for other in "bc":
        compiler.compile(GrammarSpec("regex", other))
    assert compiler.compile(GrammarSpec("regex", "a")) is not first
    found = []
    spec = GrammarSpec("regex", "[a-z]{3}")
    threads = [threading.Thread(target=lambda: found.append(compiler.compile(spec))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_a_grammar_that_cannot_be_is_not_kept():
    compiler = GrammarCompiler(ByteTokenizer(), "fsm")
    for i in range(5):
        with pytest.raises(GrammarError):
            compiler.compile(GrammarSpec("regex", f"a{i}("))
    assert not compiler._working and not compiler._compiled


def test_refusals():
    with pytest.raises(ValueError, match="grammar_backend"):
        GrammarCompiler(ByteTokenizer(), "regex")
    compiler = GrammarCompiler(ByteTokenizer(), "fsm")
    with pytest.raises(GrammarError, match="ebnf"):
        compiler.compile(GrammarSpec("ebnf", "root ::= 'a'"))
    for _ in range(2):  # a failure isn't remembered as something else
        with pytest.raises(GrammarError, match="lookahead"):
            compiler.compile(GrammarSpec("regex", "(?=a)"))


def test_a_constraint_moves_copies_and_stops():
    constraint = GrammarCompiler(ByteTokenizer(), "fsm").compile(GrammarSpec("regex", "abc?")).start()
    assert constraint.forced_tokens() == [97, 98]
    assert constraint.accept(97) and not constraint.accept(99)
    other = constraint.copy()
    assert constraint.accept(98) and constraint.can_stop() and not constraint.must_stop()
    assert constraint.accept(99) and constraint.must_stop()
    assert not other.can_stop() and other.accept(98)
    assert constraint.accept(257) and constraint.accept(257)


@pytest.mark.parametrize("backend", ["fsm", "llguidance", "xgrammar"])
@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "(yes|no), [a-z]{2,4}!"),
        GrammarSpec("json_schema", '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],'
                                   '"additionalProperties":false}', ""),
    ],
    ids=["regex", "json_schema"],
)  # fmt: skip
def test_engines_share_one_interface(backend, spec):
    if backend != "fsm":
        pytest.importorskip(backend)
    tokenizer = ByteTokenizer(["yes", "no, ", '{"', '":'])
    compiled = GrammarCompiler(tokenizer, backend).compile(spec)
    rng = random.Random(0)
    for _ in range(5):
        constraint, data = compiled.start(), b""
        while not constraint.must_stop():
            legal = np.flatnonzero(unpack(constraint.mask(), tokenizer.vocab_size))
            assert len(legal)
            token = int(rng.choice(legal))
            assert constraint.accept(token)
            if token in tokenizer.eos_ids:
                break
            data += tokenizer.token_bytes(token)
        assert constraint.can_stop()
        text = data.decode()
        assert re.fullmatch(spec.source, text) if spec.kind == "regex" else text in ('{"a":true}', '{"a":false}')


def test_auto_sends_on_what_is_unsupported_but_not_what_is_wrong():
    pytest.importorskip("llguidance")
    compiler = GrammarCompiler(ByteTokenizer(), "auto")
    assert isinstance(compiler.compile(GrammarSpec("regex", "a+")), FsmCompiled)
    ebnf = compiler.compile(GrammarSpec("ebnf", 'start: "a" start "b" | "x"'))
    assert not isinstance(ebnf, FsmCompiled)
    constraint = ebnf.start()
    assert all(constraint.accept(byte) for byte in b"aaxbb") and constraint.can_stop()
    with pytest.raises(GrammarError, match="unsatisfiable"):
        compiler.compile(GrammarSpec("json_schema", "false"))
    with pytest.raises(GrammarError, match="contains"):
        compiler.compile(GrammarSpec("json_schema", '{"contains": {"type": "integer"}}'))


def test_the_benchmark_counts_masks():
    from minisgl.bench.grammar import example_texts, measure

    tokenizer = ByteTokenizer(['{"', '":', '","'])
    texts = example_texts(tokenizer, count=3)
    timing = measure(tokenizer, "fsm", texts)
    assert len(timing.first) == 3 and len(timing.following) == sum(len(ids) for _, ids in texts)
    assert timing.refused == timing.rejected == 0 and timing.figures()["masks"] == len(timing.following)
