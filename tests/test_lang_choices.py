"""Choices methods: the formulas, on scripted conditionals."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minisgl as sgl
from minisgl.choices import plan
from tests.scripted_backend import ScriptedBackend


def pick(method, *rows, unconditional=None):
    return method(list(rows), unconditional).index


def test_token_length_normalized():
    assert pick(sgl.token_length_normalized, [-1.0, -1.0], [-0.9], [-3.0, -0.1]) == 1
    assert pick(sgl.token_length_normalized, [-1.0], [-0.5, -1.5]) == 0  # a tie: the first


def test_greedy_token_selection_walks_the_columns():
    rows = [-0.5, -9.0], [-0.6, -0.1], [-0.5, -8.0]
    assert pick(sgl.greedy_token_selection, *rows) == 2  # 0 and 2 share the first column's maximum
    # a short row is padded with its own mean: -0.5 there beats -0.7
    assert pick(sgl.greedy_token_selection, [-0.5], [-0.5, -0.7]) == 0
    assert pick(sgl.greedy_token_selection, [-0.5], [-0.5, -0.3]) == 1
    assert pick(sgl.greedy_token_selection, [-0.5, -0.1], [-0.5, -0.1]) == 0  # first survivor


def test_unconditional_likelihood_normalized():
    method = sgl.unconditional_likelihood_normalized
    decision = method([[-1.0, -2.0], [-1.0, -1.0]], [[0.0, -5.0], [0.0, -1.0]])
    assert decision.index == 0 and decision.scores == [1.0, -0.5]
    with pytest.raises(ValueError, match="without the prompt"):
        method([[-1.0]], None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-20, 0), min_size=1, max_size=5), min_size=1, max_size=6))
def test_methods_equal_their_formulas(rows):
    assert pick(sgl.token_length_normalized, *rows) == int(np.argmax([np.mean(row) for row in rows]))
    width = max(map(len, rows))
    padded = [[*row, *[float(np.mean(row))] * (width - len(row))] for row in rows]
    alive = list(range(len(rows)))
    for column in range(width):
        top = max(padded[i][column] for i in alive)
        alive = [i for i in alive if padded[i][column] == top]
    assert pick(sgl.greedy_token_selection, *rows) == alive[0]


def test_plan_scores_from_the_first_token_that_differs():
    assert plan([1, 2, 3], [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3]]).starts == [3, 2, 2]
    found = plan([1, 2, 3], [[1, 2, 3, 4], [1, 2, 5, 6]])
    assert found.shared == [1, 2] and found.scored(1) == [5, 6]
    assert plan([], [[7], [8, 9]]).starts == [0, 0]


def scripted(table, tokens):
    """A backend whose tokenizer knows `tokens` (and single characters) and whose p(token | context) is in `table`."""
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + "|.", re.DOTALL)

    def logprob(context, token):
        text = "".join(context)
        for (end, wanted), p in table.items():
            if wanted == token and text.endswith(end):
                return math.log(p)
        return math.log(1e-6)

    return ScriptedBackend(logprob=logprob, tokenize=pattern.findall)


def choose(backend, prompt, choices, method=None):
    @sgl.function
    def f(s):
        s += prompt + sgl.select("c", choices=choices, choices_method=method)

    state = f.run(backend=backend)
    return state["c"], state.get_meta_info("c")


def test_select_greedy_wrong_branch():
    """case select-greedy-wrong-branch: 'skill' shares 'sk' with the likeliest first token, 'cloud' is likelier."""
    table = {("is ", "sk"): 0.6, ("sk", "ill"): 0.001, ("is ", "cloud"): 0.3}
    backend = scripted(table, ["sk", "ill", "cloud"])
    assert choose(backend, "similar to sky is ", ["skill", "cloud"])[0] == "cloud"


def test_select_conditional_logprobs():
    """case select-conditional-logprobs: each option conditioned on its own earlier tokens, never on the other's."""
    table = {("? ", "Yes"): 0.5, ("? Yes", "No"): 0.1, ("? ", "No"): 0.4, ("? No", "Yes"): 0.9}
    chosen, meta = choose(scripted(table, ["Yes", "No"]), "Well? ", ["YesNo", "NoYes"])
    assert chosen == "NoYes"
    assert meta["scores"] == pytest.approx([(math.log(0.5) + math.log(0.1)) / 2, (math.log(0.4) + math.log(0.9)) / 2])


def test_select_logprob_slice_prefix():
    """case select-logprob-slice-prefix: the prompt's tokens count in no choice."""
    table = {(">>>", "all"): 0.2, (">>>", "get"): 0.5, ("get", "_weather"): 0.5}
    chosen, meta = choose(scripted(table, [">>>", "all", "get", "_weather"]), "x>>>", ["all", "get_weather"])
    assert meta["scored"] == [["all"], ["get", "_weather"]] and chosen == "get_weather"


def test_a_choice_that_merges_with_the_prompt_is_scored_from_the_merged_token():
    backend = scripted({("a", ">>>all"): 0.5, (">>>", "none"): 0.4}, [">>>", ">>>all", "none"])
    chosen, meta = choose(backend, "a>>>", ["all", "none"])
    assert meta["scored"] == [[">>>all"], ["none"]] and chosen == "all"
