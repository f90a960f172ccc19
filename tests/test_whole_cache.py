"""The cache without tree structure: matches are whole sequences, the books are the tree's."""

from __future__ import annotations

import numpy as np
import pytest

import minisgl as sgl
from minisgl.whole_cache import WholeCache

from .engines import check_idle, make
from .scripted_backend import ScriptedBackend

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


def test_a_match_ends_where_a_whole_sequence_ended_and_nowhere_else():
    """Against brute force: the longest stored whole sequence that the query begins with."""
    rng = np.random.default_rng(0)
    tree, stored, next_slot = WholeCache(), [], 0
    for _ in range(300):
        ids = rng.integers(0, 3, rng.integers(1, 9)).tolist()
        expected = max((len(s) for s in stored if ids[: len(s)] == s), default=0)
        assert tree.match_length(ids) == expected
        match = tree.match(ids)
        assert match.length == expected == len(match.slots)
        whole = rng.random() < 0.5
        inserted = tree.insert(ids, np.arange(next_slot, next_slot + len(ids)))
        next_slot += len(ids)
        if whole:
            tree.completed(inserted.node)
            stored.append(ids)
        tree.check()


def test_what_was_evicted_is_not_found():
    tree = WholeCache()
    tree.completed(tree.insert([1, 2, 3], [5, 6, 7]).node)
    assert tree.match_length([1, 2, 3, 4]) == 3
    assert sorted(tree.evict(3)) == [5, 6, 7]
    assert tree.match_length([1, 2, 3, 4]) == 0
    tree.insert([1, 2, 3], [5, 6, 7])
    assert tree.match_length([1, 2, 3, 4]) == 0  # there again, but only as a part of something


@pytest.fixture(scope="module")
def engine():
    with make(radix_cache="whole", chunk_size=16) as runtime:
        yield runtime


def test_a_history_is_found_and_a_common_beginning_is_not(engine):
    examples = list(range(10, 60))  # several chunks: the end of a chunk is no whole prompt
    first = engine.generate(input_ids=[*examples, 1, 2], sampling_params=GREEDY)
    other = engine.generate(input_ids=[*examples, 7], sampling_params=GREEDY)
    again = engine.generate(input_ids=[*examples, 1, 2, *first["output_ids"], 9], sampling_params=GREEDY)
    hits = [reply["meta_info"]["cached_tokens"] for reply in (first, other, again)]
    assert hits == [0, 0, len(examples) + 2 + 3]
    check_idle(engine)


def test_outputs_are_those_without_a_cache(engine):
    prompts = [[*range(20, 50), i, *range(60, 60 + i)] for i in range(6)] * 2
    with make(radix_cache=False) as plain:
        expected = plain.generate(input_ids=prompts, sampling_params=GREEDY)
    found = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    assert [reply["output_ids"] for reply in found] == [reply["output_ids"] for reply in expected]
    check_idle(engine)


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="radix_cache must be True, False or 'whole', got 'tree'"):
        make(radix_cache="tree")


@pytest.mark.parametrize(("use_thread", "most"), [(True, 4), (False, 1)])
def test_without_threads_a_programs_forks_run_one_after_another(use_thread, most):
    @sgl.function
    def branches(s, question):
        forks = s.fork(4)
        for fork in forks:
            fork += question + sgl.gen("x")
        forks.join()

    backend = ScriptedBackend(delay=0.05)
    branches.run_batch([{"question": "Q"}], backend=backend, use_thread=use_thread)
    assert backend.peak == most
