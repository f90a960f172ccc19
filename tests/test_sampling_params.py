"""SamplingParams: every mistake is one ValueError that names the parameter, and nothing valid is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.sampling_params import SamplingParams

NAMES = [field.name for field in dataclasses.fields(SamplingParams)]
NAN, INF = math.nan, math.inf


def test_defaults_are_the_documented_ones():
    params = SamplingParams()
    assert (params.max_new_tokens, params.min_new_tokens, params.n, params.top_k) == (128, 0, 1, -1)
    assert (params.temperature, params.top_p, params.min_p, params.repetition_penalty) == (1.0, 1.0, 0.0, 1.0)
    assert (params.frequency_penalty, params.presence_penalty, params.seed) == (0.0, 0.0, None)
    assert params.stop == params.stop_token_ids == params.stop_regex == ()
    assert params.skip_special_tokens and params.spaces_between_special_tokens
    assert not params.ignore_eos and not params.no_stop_trim and not params.logit_bias
    assert params.grammar is None and not params.greedy


VALID = {
    "max_new_tokens": [0, 1, np.int64(7), 2**31 - 1],
    "min_new_tokens": [0, 128],
    "stop": ["a", ["a", "b"], ("a",), [], None],
    "stop_token_ids": [[1, 2], (0,), {5}, np.array([3, 4]).tolist(), [np.int32(3)], None],
    "stop_regex": ["a+", [r"\d\d", "(?i)end"], None],
    "temperature": [0, 0.0, 1e-9, 1, 1e30, np.float32(0.5), Fraction(1, 2)],
    "top_p": [0, 1e-8, 0.5, 1, 1.0],
    "top_k": [-1, 1, 50, np.int32(8)],
    "min_p": [0, 0.1, 1],
    "frequency_penalty": [-2, 0.5, 2],
    "presence_penalty": [-2.0, 2],
    "repetition_penalty": [1e-300, 1, 2],
    "n": [1, 16],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "logit_bias": [{}, {1: -100}, {"42": 1.5}, {np.int64(3): np.float32(2)}, None],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "spaces_between_special_tokens": [True, False],
    "no_stop_trim": [True, False],
    "regex": ["a", None],
    "json_schema": ['{"type": "object"}', {"type": "string"}, "true", None],
    "ebnf": ['root ::= "a"', None],
    "structural_tag": ['{"structures": []}', {"structures": [], "triggers": []}, None],
}
INVALID = {
    "max_new_tokens": [-1, 1.0, "5", True, None, NAN, 2**31, [5], 10**400],
    "min_new_tokens": [-1, 0.5, "0", False, None, 129],
    "stop": ["", ["a", ""], 5, [5], {"a": 1}, b"a", True],
    "stop_token_ids": [5, "5", ["5"], [-1], [1.0], [True], {1: 2}],
    "stop_regex": ["", "(", "a*", ["a", "[b"], 5],
    "temperature": [-0.1, NAN, INF, -INF, "1", True, None, [1.0], 1j, 10**400],
    "top_p": [-0.1, 1.1, NAN, INF, "0.5", True, None],
    "top_k": [0, -2, 1.5, "5", True, None, NAN, 2**31],
    "min_p": [-0.1, 1.1, NAN, "0", False],
    "frequency_penalty": [-2.1, 2.1, NAN, "0", None, True],
    "presence_penalty": [-2.1, 2.1, INF, "0", None],
    "repetition_penalty": [0, 0.0, -1, 2.01, NAN, None, "1"],
    "n": [0, -1, 1.0, "1", True, None],
    "seed": ["0", 1.0, True, 2**63, -(2**63) - 1, NAN],
    "logit_bias": [
        [1],
        {"a": 1},
        {-1: 1},
        {1: NAN},
        {1: INF},
        {1: "1"},
        {1: True},
        {True: 1},
        {1.0: 1},
        {1: 1e10},
    ],
    "ignore_eos": [0, 1, "true", None],
    "skip_special_tokens": [1, None],
    "spaces_between_special_tokens": [0, "no"],
    "no_stop_trim": [1, None],
    "regex": ["", 5, ["a"], True],
    "json_schema": ["", "{", "[1]", "5", 5, [1], True, {"a": NAN}, {"a": object()}],
    "ebnf": ["", 5],
    "structural_tag": ["", "nonsense", 7, []],
}


def test_the_tables_cover_every_parameter():
    assert list(VALID) == list(INVALID) == NAMES


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, values in VALID.items() for v in values])
def test_valid(name: str, value: Any):
    params = SamplingParams.make({name: value})
    assert SamplingParams(**{name: value}) == params
    assert params.replace() == params == SamplingParams.from_dict(json.loads(json.dumps(params.to_dict())))
    assert pickle.loads(pickle.dumps(params)) == params
    hash(params)


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, values in INVALID.items() for v in values])
def test_invalid(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"^{name}\b.* must (be|have) ") as error:
        SamplingParams.make({name: value})
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    with pytest.raises(ValueError):
        SamplingParams(**{name: value})


def test_messages_give_the_range():
    with pytest.raises(ValueError, match=r"top_p must be a number in \[0, 1\], got 2"):
        SamplingParams(top_p=2)
    with pytest.raises(ValueError, match=r"top_k must be -1 \(no limit\) or an integer >= 1, got 0"):
        SamplingParams(top_k=0)
    with pytest.raises(
        ValueError, match=r"min_new_tokens must be an integer in \[0, max_new_tokens=5\], got 6"
    ):
        SamplingParams(max_new_tokens=5, min_new_tokens=6)


def test_unknown_names_are_refused_with_a_suggestion():
    for typo, meant in [("max_tokens", "max_new_tokens"), ("temprature", "temperature"), ("topk", "top_k")]:
        with pytest.raises(ValueError, match=f"unknown sampling parameter '{typo}'; did you mean '{meant}'"):
            SamplingParams.make({typo: 1})
    with pytest.raises(
        ValueError, match=r"unknown sampling parameter 'xyzzy'; known: max_new_tokens, .*structural_tag"
    ):
        SamplingParams.make({"xyzzy": 1})
    with pytest.raises(ValueError, match="unknown sampling parameter 5"):
        SamplingParams.make({5: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [5, "temperature=0", [1], True, (("n", 1),)])
def test_make_refuses_what_is_not_parameters(value: Any):
    with pytest.raises(ValueError, match="sampling_params must be a dict, a SamplingParams or None"):
        SamplingParams.make(value)


def test_make_takes_nothing_a_dict_or_itself():
    params = SamplingParams(n=2)
    assert SamplingParams.make(None) == SamplingParams.make({}) == SamplingParams()
    assert SamplingParams.make(params) is params


def test_only_one_grammar():
    assert SamplingParams(regex="a+").grammar == ("regex", "a+")
    schema = {"properties": {"b": {}, "a": {}}}
    assert SamplingParams(json_schema=schema).grammar == (
        "json_schema",
        json.dumps(schema),
    )  # order of keys kept
    with pytest.raises(
        ValueError, match="regex and ebnf: at most one of regex, json_schema, ebnf, structural_tag"
    ):
        SamplingParams(regex="a", ebnf="root ::= b")


def test_values_are_normalised():
    params = SamplingParams(
        stop="a", stop_token_ids={3}, logit_bias={"7": 1}, temperature=1, stop_regex=("b", "b")
    )
    assert params.stop == ("a",) and params.stop_token_ids == (3,) and params.stop_regex == ("b",)
    assert params.logit_bias == {7: 1.0} and isinstance(params.temperature, float)
    with pytest.raises(ValueError, match="logit_bias must have each token id once, got 7 twice"):
        SamplingParams(logit_bias={7: 1, "7": 2})


def test_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}


def test_repr_shows_what_differs_and_evaluates():
    params = SamplingParams(temperature=0, stop=["\n", "b"], logit_bias={1: 2})
    assert repr(params) == "SamplingParams(stop=['\\n', 'b'], temperature=0.0, logit_bias={1: 2.0})"
    assert eval(repr(params)) == params
    assert repr(SamplingParams()) == "SamplingParams()"


def test_greedy():
    assert SamplingParams(temperature=0).greedy and SamplingParams(top_k=1).greedy
    assert not SamplingParams(temperature=1e-9).greedy


def test_validate_vocab():
    SamplingParams(logit_bias={9: 1}, stop_token_ids=[9]).validate_vocab(10)
    with pytest.raises(ValueError, match=r"logit_bias must have token ids in \[0, 9\].*, got 10"):
        SamplingParams(logit_bias={10: 1}).validate_vocab(10)
    with pytest.raises(ValueError, match=r"stop_token_ids must have token ids in \[0, 9\].*, got 12"):
        SamplingParams(stop_token_ids=[12]).validate_vocab(10)


def test_needs_no_torch():
    code = "import sys, minisgl.sampling_params; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(NAMES), ANYTHING)
def test_anything_is_accepted_and_normalised_or_refused_by_name(name: str, value: Any):
    try:
        params = SamplingParams.make({name: value})
    except ValueError as error:
        assert str(error).startswith(name)
        return
    assert SamplingParams.from_dict(params.to_dict()) == params
    assert len(params.row) == 8 and all(math.isfinite(number) for number in params.row)


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 1e6),
            "top_p": st.floats(0, 1),
            "top_k": st.just(-1) | st.integers(1, 2**31 - 1),
            "min_p": st.floats(0, 1),
            "frequency_penalty": st.floats(-2, 2),
            "presence_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0, 2, exclude_min=True),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "stop": st.lists(st.text(min_size=1)),
            "logit_bias": st.dictionaries(st.integers(0, 10**6), st.floats(-1e9, 1e9)),
        },
    )
)
def test_everything_in_range_is_accepted(values: dict[str, Any]):
    params = SamplingParams.make(values)
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
    assert eval(repr(params)) == params
