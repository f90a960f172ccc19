"""Hostile grammars, briefly (at length: `python -m tests.fuzz`), and the faults that longer runs have found."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("hypothesis", reason='needs pip install "minisgl[test]"')

from minisgl.expressions import Budget, UnsupportedGrammar
from minisgl.fsm import Grammar, GrammarError
from minisgl.grammar import GrammarCompiler, GrammarSpec
from minisgl.grammar_backends import LLGuidanceConstraint

from . import fuzz, fuzz_grammars, json_suite

TARGETS = {target.name: target for target in fuzz_grammars.TARGETS}


@pytest.mark.parametrize(("name", "examples"), [("regex", 60), ("schema", 60), ("tag", 60), ("request-fsm", 60)])
def test_refused_in_one_line_or_right(name, examples):
    found = fuzz.campaign(TARGETS[name], examples, shrink=False)
    assert set(found) & {"refused"} and set(found) & {"walked", "matched", "validated"}, found


@pytest.mark.slow
@pytest.mark.parametrize("package", ["llguidance", "xgrammar"])
def test_other_engines_refuse_in_one_line_or_have_masks(package):
    pytest.importorskip(package, reason='needs pip install "minisgl[grammar]"')
    found = fuzz.campaign(TARGETS[f"request-{package}"], 60, shrink=False)
    assert found["refused"] and found["walked"], found


# ---- faults that were found


@pytest.mark.parametrize("pattern", ["((a?){1000}){1000}", "(a{1000000}){1000000}", "(" * 90 + "a?" + "){50}" * 90])
def test_nested_counts_cost_nothing(pattern):
    """The second opinion on the syntax, by the package `regex`, wrote such counts out: gigabytes of them."""
    begin = time.thread_time()
    assert Grammar.from_regex(pattern).automaton
    assert time.thread_time() - begin < 1


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"minimum": 10**400, "type": "string", "maxLength": -1}, "maxLength"),
        ({"type": "integer", "multipleOf": -(10**400)}, "multipleOf"),
        ({"not": {"prefixItems": None}}, "prefixItems"),
        ({"not": {"prefixItems": 3, "items": True}}, "prefixItems"),
        ({"type": ["x" * 10_000, 1]}, "type"),
        ({"$ref": "#/" + "a" * 10_000}, "ref"),
    ],
)
def test_values_that_no_keyword_can_have(schema, named):
    with pytest.raises(GrammarError, match=named) as error:
        Grammar.from_json_schema(schema)
    fuzz.one_line(error.value)


def test_bounds_beyond_any_float():
    grammar = Grammar.from_json_schema({"type": "integer", "minimum": -(10**380), "maximum": 10**380})
    assert grammar.matches("9" * 380) and not grammar.matches("9" * 381)


@pytest.mark.parametrize("count", ["9" * 5000, "1," + "9" * 5000, "9999999999"])
def test_counts_of_any_length_are_refused(count):
    with pytest.raises(GrammarError, match="repeat count") as error:
        Grammar.from_regex("a{" + count + "}")
    fuzz.one_line(error.value)


@pytest.mark.parametrize("pattern", [r"^(\ud83d\ude00)+$", r"^[\uD83D\uDE00]$"])
def test_surrogate_pairs_in_patterns_are_refused(pattern):
    """ECMA-262 reads one character, Python two: what we wrote for the first, `jsonschema` called invalid."""
    with pytest.raises(UnsupportedGrammar, match="surrogate"):
        Grammar.from_json_schema({"type": "string", "pattern": pattern})
    assert Grammar.from_json_schema({"type": "string", "pattern": "^😀$"}).matches('"\\ud83d\\ude00"')


def test_messages_of_long_values_are_short():
    for tag in ({"type": ["x" * 100_000]}, {"triggers": ["a" * 10_000, "b"], "structures": [{"begin": "b",
        "schema": {}, "end": ""}]}):
        with pytest.raises(GrammarError) as error:
            Grammar.from_structural_tag(tag)
        fuzz.one_line(error.value)
    with pytest.raises(GrammarError) as error:
        Grammar.from_json_schema({"$ref": "\ud800\n"})
    fuzz.one_line(error.value)
    str(error.value).encode()


def test_a_budget_counts_the_work_and_not_the_waiting():
    """On a busy machine good grammars were refused: others had taken their seconds."""
    budget = Budget(seconds=0.2)
    with budget.operation():
        time.sleep(0.3)
        budget.check_time()
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass
        with pytest.raises(UnsupportedGrammar, match="takes longer"):
            budget.check_time()


# ---- the optional engines


def _compile(backend: str, kind: str, source: str):
    pytest.importorskip(backend, reason='needs pip install "minisgl[grammar]"')
    spec = GrammarSpec.of(**{kind: source})
    assert spec is not None
    return GrammarCompiler(fuzz_grammars.TOKENIZER, backend).compile(spec)


def test_a_grammar_without_any_text_has_no_empty_mask():
    """Nothing can be sampled from a mask of zeros."""
    with pytest.raises(GrammarError, match="no token may follow"):
        _compile("xgrammar", "ebnf", "root ::= root")


@pytest.mark.parametrize("pattern", ["a(^b|c)", "(a$)+b", r"a\Zb", r"\Aab", "x^"])
def test_xgrammar_ignores_anchors_so_they_are_refused(pattern):
    with pytest.raises(UnsupportedGrammar, match="anchor"):
        _compile("xgrammar", "regex", pattern)
    assert _compile("xgrammar", "regex", "^a[bc]$").start().accept(ord("a"))


class _GivenUp:
    """llguidance's matcher once its lexer has grown too big (`start: /(a{1000}){1000}/` gets there in seconds): the
    mask before had tokens that it then doesn't take."""

    def validate_tokens(self, tokens: list[int]) -> int:
        return 0

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return "lexer error: too many expressions\nat 3"


def test_llguidance_that_gives_up_on_its_way_says_so():
    """To the engine this looked like a token that isn't legal, which would be a bug of ours."""
    constraint = LLGuidanceConstraint(SimpleNamespace(stop_ids=frozenset()), _GivenUp())  # pyright: ignore
    with pytest.raises(GrammarError, match=r"lexer error: too many expressions$"):
        constraint.accept(97)


# ---- the runner of the JSON-Schema-Test-Suite


def test_the_suites_runner_tells_its_findings_apart(tmp_path: Path):
    folder = tmp_path / "tests" / "draft2020-12"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(
        '[{"description": "d", "schema": {"type": "integer"}, "tests": ['
        '{"description": "1", "data": 1, "valid": true}, {"description": "2", "data": "x", "valid": false},'
        '{"description": "3", "data": 1.0, "valid": true}, {"description": "4", "data": 7, "valid": false}]},'
        '{"description": "e", "schema": {"contains": {}}, "tests": [{"description": "5", "data": [], "valid": false}]},'
        '{"description": "f", "schema": false, "tests": [{"description": "6", "data": 1, "valid": false}]}]'
    )
    counts = json_suite.run(tmp_path).counts
    assert dict(counts) == {"exact": 3, "valid rejected": 1, "INVALID ACCEPTED": 1, "refused": 1}
    with pytest.raises(ValueError, match="draft2020-12"):
        json_suite.run(tmp_path / "tests")
