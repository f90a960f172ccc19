"""Grammars beside every other parameter, end to end, briefly (at length: `python -m tests.fuzz --target output`)."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("hypothesis", reason='needs pip install "minisgl[test]"')
pytest.importorskip("jsonschema", reason='needs pip install "minisgl[test]"')

from . import fuzz, fuzz_output


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    fuzz_output.shutdown()


def test_outputs_are_in_their_grammar_or_say_why_not():
    found = fuzz.campaign(fuzz_output.TARGETS[0], 80, shrink=False)
    assert found["valid"] > 5 and found["length"] and found["refused"], found


@pytest.mark.parametrize("schema", fuzz_output.SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_odd_schemas(schema):
    for seed, temperature in ((1, 1.0), (2, 20.0)):
        params = {"temperature": temperature, "seed": seed, "max_new_tokens": 60}
        fuzz_output.check_output((("json_schema", schema), params, "a"))


@pytest.mark.parametrize("regex", fuzz_output.REGEXES)
def test_odd_regexes(regex):
    for seed in (1, 2):
        params = {"temperature": 5.0, "seed": seed, "max_new_tokens": 40, "n": 2}
        fuzz_output.check_output((("regex", regex), params, "a"))
