"""How `select` decides: score every choice with the model, then apply one of three rules.

A choice is scored on the tokens of prompt + choice *tokenised together*, because the tokenizer may merge the prompt's
last characters with the choice's first ones ("x>>>" + "all"): the choice's tokens begin at the first one that differs
from those of the prompt alone.

    prompt         | The| sky| is|  |                      l_ij  log-probability of token j of choice i given the prompt
    + " blue"      | The| sky| is| blue|                   u_ij  the same without the prompt, u_i0 = 0
                                  `- scored from here

    token_length_normalized               argmax_i  mean_j l_ij
    greedy_token_selection                walk the columns j, keep the rows that have the column's maximum
    unconditional_likelihood_normalized   argmax_i  mean_j (l_ij - u_ij)

Every l_ij is conditioned on its own choice's earlier tokens, never on another's, and no token of the prompt counts.
The rules are functions of lists of numbers; `plan` says which numbers a backend has to get.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Scores = Sequence[Sequence[float]]  # one list of log-probabilities for each choice


@dataclass(frozen=True)
class Decision:
    """The chosen index and the scores that led to it (one per choice; None where a rule has none)."""

    index: int
    scores: list[float | None]


class ChoicesMethod(ABC):
    """A rule from log-probabilities to a choice.  `unconditional`: it also needs the u_ij."""

    name = ""
    unconditional = False

    @abstractmethod
    def __call__(self, conditional: Scores, unconditional: Scores | None = None) -> Decision:
        """One row of log-probabilities for each choice, one number for each of its scored tokens; never none at all."""

    def __repr__(self) -> str:
        return self.name


class TokenLengthNormalized(ChoicesMethod):
    """The choice with the highest mean log-probability per token."""

    name = "token_length_normalized"

    def __call__(self, conditional: Scores, unconditional: Scores | None = None) -> Decision:
        return _best([_mean(row) for row in conditional])


class GreedyTokenSelection(ChoicesMethod):
    """The choice that greedy decoding would walk into, column by column.

    A row shorter than the longest is padded with its own mean, so that a short choice is not preferred or dropped for
    its length; among rows that survive all columns the first wins.
    """

    name = "greedy_token_selection"

    def __call__(self, conditional: Scores, unconditional: Scores | None = None) -> Decision:
        width = max(len(row) for row in conditional)
        padded = np.array([[*row, *[_mean(row)] * (width - len(row))] for row in conditional], np.float64)
        alive = np.arange(len(padded))
        for column in padded.T:
            values = column[alive]
            alive = alive[values == values.max()]
            if len(alive) == 1:
                break
        return Decision(int(alive[0]), [float(value) for value in padded.mean(axis=1)])


class UnconditionalLikelihoodNormalized(ChoicesMethod):
    """The choice whose tokens the prompt makes most likelier than they are on their own."""

    name = "unconditional_likelihood_normalized"
    unconditional = True

    def __call__(self, conditional: Scores, unconditional: Scores | None = None) -> Decision:
        if unconditional is None:
            raise ValueError(f"{self.name} needs the log-probabilities without the prompt")
        return _best([_mean(np.subtract(row, base)) for row, base in zip(conditional, unconditional)])


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


@dataclass(frozen=True)
class Plan:
    """What to score.  rows[i]: token ids of prompt + choice i, scored from starts[i] on; shared: their common prefix.

    A token with nothing before it has no log-probability: where the prompt is empty and the model has no BOS, the
    first token of a choice is not scored.
    """

    rows: list[list[int]]
    starts: list[int]

    @property
    def shared(self) -> list[int]:
        return self.rows[0][: min(self.starts)]

    def scored(self, i: int) -> list[int]:
        """The tokens of choice i that are scored."""
        return self.rows[i][self.starts[i] :]


def plan(prompt: Sequence[int], rows: Sequence[Sequence[int]]) -> Plan:
    """From the token ids of the prompt and of prompt + choice for each choice."""
    starts = []
    for row in rows:
        limit = min(len(prompt), len(row))
        same = np.asarray(prompt[:limit]) == np.asarray(row[:limit])
        start = limit if same.all() else int(same.argmin())
        starts.append(min(start, len(row) - 1))  # a choice that vanishes in a merge still has its last token
    return Plan([list(map(int, row)) for row in rows], starts)


def check(choices: Any, method: Any, temperature: Any) -> tuple[tuple[Any, ...], ChoicesMethod]:
    """What `select` was given, or ValueError naming the parameter."""
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise ValueError(f"choices must be a non-empty list of strings, got {choices!r}")
    for choice in choices:
        if isinstance(choice, str) and str.__len__(choice) == 0:  # a tracer's placeholder is a str without a length
            raise ValueError(f"choices must have no empty string, got {list(choices)!r}")
        if isinstance(choice, (int, float, bytes)) or choice is None:
            raise ValueError(f"choices must be strings, got {choice!r}")
    if temperature:
        raise ValueError(f"temperature must be 0 for a select, which takes the best choice, got {temperature!r}")
    method = token_length_normalized if method is None else method
    if not isinstance(method, ChoicesMethod):
        raise ValueError(f"choices_method must be one of the choices methods of minisgl, got {method!r}")
    return tuple(choices), method


def _mean(row: Any) -> float:
    return float(np.mean(row)) if len(row) else 0.0


def _best(scores: list[float]) -> Decision:
    return Decision(int(np.argmax(scores)), list(scores))
