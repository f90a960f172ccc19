"""What a recorded step is given: each token of a batch as a decode (the recording itself needs a GPU)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from minisgl.pool import DUMMY_ROW, RequestTable
from minisgl.request import Rows
from minisgl.runner import APART, Runner
from minisgl.scheduler import Batch


def entries(sequences: list[tuple[int, int, int, bool]], decodes: int, from_device=(), scored: bool = False):
    """`Runner._entries` of sequences (row, start, end, samples), the first of which are decodes."""
    rows, starts, ends, samples = (np.array(column) for column in zip(*sequences))
    table, state = RequestTable(8, 100_000), Rows(8, 100_000)
    for row in range(1, 9):
        state.ids[row] = np.arange(100_000) + 1000 * row
        table.slots[row] = np.arange(100_000) + 10_000 * row
    late = np.isin(np.arange(len(rows)), from_device)
    extend = SimpleNamespace(logprob_start=0 if scored else None)
    batch = Batch(
        rows, starts, ends, samples.astype(bool), late, decodes, np.zeros(len(rows)), [extend] * (len(rows) - decodes),
        np.zeros(len(rows), bool),
    )  # fmt: skip
    return Runner._entries(SimpleNamespace(rows=state, table=table), batch)


def test_decodes_and_forced_tokens():
    """The example of `graphs`: one decode, then three tokens of another request, of which the last draws."""
    got = entries([(1, 9, 10, True), (2, 4, 7, True)], decodes=1)
    assert got is not None
    assert got.rows.tolist() == [1, 2, 2, 2] and got.positions.tolist() == [9, 4, 5, 6]
    assert got.slots.tolist() == [10_009, 20_004, 20_005, 20_006]
    assert got.ids.tolist() == [1009, 2004, 2005, 2006]
    assert got.draws.tolist() == [1, DUMMY_ROW, DUMMY_ROW, 2]


def test_a_token_that_only_the_device_knows():
    got = entries([(3, 9, 10, True), (1, 5, 6, True), (2, 4, 5, True)], decodes=2, from_device=[1])
    assert got is not None
    assert got.ids.tolist() == [3009, -1, 2004] and got.draws.tolist() == [3, 1, 2]


def test_a_chunk_draws_nothing():
    got = entries([(1, 9, 10, True), (2, 0, 2, False), (3, 7, 9, True)], decodes=1)
    assert got is not None
    assert got.draws.tolist() == [1, DUMMY_ROW, DUMMY_ROW, DUMMY_ROW, 3]
    assert got.positions.tolist() == [9, 0, 1, 7, 8]


def test_long_prompts_and_scored_ones_are_extends():
    """One more token rereads what stands before it: n tokens from position s, (n - 1) * (s + s + n) / 2 positions."""
    n = int((2 * APART) ** 0.5)
    assert entries([(1, 0, n - 1, True)], decodes=0) is not None
    assert entries([(1, 0, n + 2, True)], decodes=0) is None
    assert entries([(1, 90_000, 90_001, True)], decodes=0) is not None  # one token rereads nothing
    assert entries([(1, 90_000, 90_002, True)], decodes=0) is None
    assert entries([(1, 0, 3, True)], decodes=0, scored=True) is None
