"""A request under a grammar: what the engine asks between two steps.

`grammar` compiles grammars and keeps a place in one (`Constraint`); this module is the engine's side of it.

    masks     before sampling: the legal tokens of each row, packed bits
    advance   after sampling: take the token
    forced    tokens that can only follow, to be appended without asking the model (jump-forward)

With the overlapped loop the mask of step N+1 needs the token of step N.  So for steps with constrained rows the engine
launches the forward pass of N+1, then commits N, then computes masks while the device works, and only then queues the
sampling of N+1: the masks hide behind the pass.  `MaskClock` says whether they do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .grammar import Constraint
from .jump import MIN_JUMP


class Guide:
    """Leads one request's output through its grammar.

    Text that is certain has one spelling, the tokenizer's own (`jump`).  With jump-forward its tokens are appended at
    once; without (`jump` False), they are sampled one by one from a mask that allows just the next of them.  The output
    is the same token for token, which no choice of the moment could promise: a model left to itself spells `",` and a
    newline now as one token and now as three, and goes on differently after each.
    """

    def __init__(self, constraint: Constraint, jump: bool):
        self.constraint, self.jump = constraint, jump
        self.failure: Exception | None = None  # why there was no mask, see `masks`
        self._certain = self._find()  # tokens that must come next, nearest first

    def _find(self) -> list[int]:
        tokens = self.constraint.forced_tokens()
        return tokens if len(tokens) >= MIN_JUMP else []

    def advance(self, token: int) -> None:
        """Take a token.  Raises RuntimeError if it is not legal (its mask was not applied), GrammarError past the
        grammar's budget."""
        if not self.constraint.accept(token):
            raise RuntimeError(f"token {token} is not legal under the request's grammar")
        self._certain = self._certain[1:] if self._certain[:1] == [token] else []
        if not self._certain:
            self._certain = self._find()

    def forced(self) -> list[int]:
        """The tokens to append now, enough of them to save a step; [] without jump-forward."""
        return list(self._certain) if self.jump else []

    def mask(self) -> np.ndarray:
        """uint32 words of packed bits, token i in bit i % 32 of word i // 32; tokens past its end are not legal.
        Raises GrammarError past the grammar's budget."""
        if not self._certain:
            return self.constraint.mask()
        token = self._certain[0]
        words = np.zeros(token // 32 + 1, np.uint32)
        words[-1] = np.uint32(1 << token % 32)
        return words


def masks(guides: Sequence[Guide | None], vocab_size: int) -> np.ndarray:
    """(rows, ceil(vocab_size / 32)) int32 of packed bits; a row without a guide allows everything.

    Tokens that the model has and the tokenizer has not (padding of the vocabulary) are never legal.  A mask that cannot
    be made (its grammar is past its budget) is one request's problem: it is noted as the guide's `failure`, and what is
    sampled for that row must not be used.
    """
    packed = np.full((len(guides), -(-vocab_size // 32)), -1, np.int32)
    for row, guide in zip(packed, guides):
        if guide is None:
            continue
        try:
            words = guide.mask().view(np.int32)[: len(row)]
        except Exception as error:
            guide.failure = error
            continue
        row[: len(words)] = words
        row[len(words) :] = 0
    return packed


class MaskClock:
    """How long masks take, and how long the device stands idle for them.

        clock.launched()      once a step's forward pass is queued
        with clock: ...       around the making of its masks

    The device's own clock tells: one mark is queued behind the forward pass and one before the sampling, and between
    them is nothing but waiting for the host.  On a CPU nothing runs beside the masks: making them is waiting.

    steps     sampling steps with masks
    seconds   that the host spent on masks
    waited    seconds that the device had nothing to do (in the steps that it has finished)
    """

    def __init__(self, cuda: bool):
        self.cuda = cuda
        self._start: Any = None
        self.reset()

    def reset(self) -> None:
        self.steps, self.seconds, self._waited = 0, 0.0, 0.0
        self._marks: deque[tuple[Any, Any]] = deque()

    def launched(self) -> None:
        if self.cuda:
            self._start = self._mark()

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        passed = time.perf_counter() - self._begin
        self.steps += 1
        self.seconds += passed
        if self.cuda:
            self._marks.append((self._start, self._mark()))
            self._collect()
        else:
            self._waited += passed

    @property
    def waited(self) -> float:
        self._collect()
        return self._waited

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _collect(self) -> None:
        while self._marks and self._marks[0][1].query():
            start, end = self._marks.popleft()
            self._waited += start.elapsed_time(end) / 1e3
