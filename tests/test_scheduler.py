"""The scheduler against a scripted model whose KV is a rolling hash: wrong slots give wrong tokens."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.events import EventLog
from minisgl.policy import POLICIES
from minisgl.request import Status

from .scripted import ScriptedEngine, reference


def expect(engine: ScriptedEngine, request) -> None:
    limit = min(request.params.max_new_tokens, engine.scheduler.max_context - request.prompt_len)
    want = reference(
        request.prompt.tolist(), limit, engine.vocab, request.stop_ids, request.params.min_new_tokens
    )
    assert request.output.tolist() == want, (request.rid, request.output.tolist(), want)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk_size", [None, 3, 16])
def test_output_is_that_of_each_request_alone(overlap, policy, chunk_size):
    rng = random.Random(7)
    for radix in (True, False):
        engine = ScriptedEngine(90, 6, 64, chunk_size, policy, overlap, radix)
        requests = []
        for _ in range(40):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
            requests.append(engine.submit(prompt, rng.randint(0, 24), stop_ids=(3,) if rng.random() < 0.3 else ()))
        engine.run(check=True)
        for request in requests:
            expect(engine, request)
        assert engine.scheduler.tree.locked == 0


def test_requests_that_arrive_together_compute_a_shared_prefix_once():
    engine = ScriptedEngine(2000, 64, 256)
    prefix = [1] * 50
    requests = [engine.submit([*prefix, 2, i % 4, i // 4], 1) for i in range(16)]
    engine.run(check=True)
    computed = sum(b.num_tokens for b in engine.batches)
    # the 16 questions are a trie: 1 shared token 2, 4 second tokens, 16 last ones
    assert computed == 50 + 1 + 4 + 16
    assert len(engine.batches) == 1
    assert [r.cached_tokens for r in requests][:2] == [0, 51]
    for request in requests:
        expect(engine, request)


def test_sharers_wait_for_a_prompt_that_is_computed_in_chunks():
    engine = ScriptedEngine(2000, 64, 256, chunk_size=16)
    prefix = [1, 0, 2] * 20
    requests = [engine.submit([*prefix, i], 2) for i in range(4)]
    engine.run(check=True)
    assert sum(b.num_tokens for b in engine.batches) == 60 + 4 + 4  # the prefix once, 4 last tokens, 4 decodes
    for request in requests:
        expect(engine, request)


def test_prefill_budget_never_enforced():
    engine = ScriptedEngine(4000, 64, 256, chunk_size=128)
    rng = random.Random(1)
    for _ in range(10):
        engine.submit([rng.randrange(1000) for _ in range(100)], 4)
    engine.run(check=True)
    for batch in engine.batches:
        assert (batch.ends - batch.starts)[batch.num_decodes :].sum() <= 128


def test_decode_oom_with_free_tokens_paged():
    """Every running request needs a slot in the same step and too few are free: evict or retract, never raise."""
    engine = ScriptedEngine(32, 8, 32)
    requests = [engine.submit([i, 1, 2], 20) for i in range(8)]
    engine.run(check=True)
    assert sum(r.retractions for r in requests) > 0
    for request in requests:
        expect(engine, request)


def test_max_seq_len_align_up():
    engine = ScriptedEngine(100, 4, 1000)
    assert engine.scheduler.max_context == 100
    request = engine.submit([1, 2, 3], 500)
    engine.run(check=True)
    assert len(request.tokens) == 100 and request.finish_reason == {"type": "length"}
    expect(engine, request)


def test_preempted_request_mistaken_for_decode():
    engine = ScriptedEngine(40, 4, 40)
    engine.scheduler.reserve_ratio = 0.0  # admit them all, so that memory runs out while they decode
    requests = [engine.submit([i, 1, 2, 3], 30) for i in range(3)]
    engine.run(check=True)
    preempted = [r for r in requests if r.retractions]
    assert preempted
    for request in requests:
        expect(engine, request)


@pytest.mark.parametrize("radix", [False, True])
def test_skip_insert_livelocks_chunked_prefill(radix):
    engine = ScriptedEngine(100, 4, 100, chunk_size=10, radix=radix)
    request = engine.submit([i % 3 for i in range(50)], 1)
    for k in range(5):
        engine.step()
        in_use = engine.scheduler.allocator.capacity - engine.scheduler.allocator.available
        assert in_use == (10 * (k + 1) if k < 4 or radix else 0)
    assert request.status is Status.FINISHED
    expect(engine, request)


def test_prefill_oom_kills_engine():
    engine = ScriptedEngine(48, 4, 48)
    first = [engine.submit([i, 1], 18) for i in range(2)]
    for _ in range(4):
        engine.step()
    late = engine.submit([2] * 30, 4)
    engine.run(check=True)
    for request in [*first, late]:
        expect(engine, request)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_abort_mid_prefill_kills_ranks(chunks, overlap):
    engine = ScriptedEngine(200, 4, 100, chunk_size=6, overlap=overlap)
    request = engine.submit([i % 5 for i in range(30)], 4)
    for _ in range(chunks):
        engine.step()
    engine.scheduler.abort(request)
    engine.scheduler.check()
    assert request.finish_reason is not None and request.finish_reason["type"] == "abort"
    after = engine.submit([i % 5 for i in range(30)], 4)
    engine.run(check=True)
    expect(engine, after)


@pytest.mark.parametrize("overlap", [False, True])
def test_late_result_of_a_finished_request_is_dropped(overlap):
    engine = ScriptedEngine(100, 1, 50, overlap=overlap)
    requests = [engine.submit([i, 2], 30, stop_ids=(0, 1)) for i in range(6)]
    engine.run(check=True)
    for request in requests:
        expect(engine, request)


def test_refusals_name_the_numbers_and_queue_nothing():
    engine = ScriptedEngine(10, 2, 50)
    with pytest.raises(ValueError, match="prompt has 10 tokens; at most 9"):
        engine.submit([1] * 10, 4)
    with pytest.raises(ValueError, match="empty"):
        engine.submit([], 4)
    assert engine.scheduler.idle
    engine.submit([1] * 10, 0)  # scoring samples nothing, so the last token's place is not needed
    engine.run(check=True)


def test_no_request_starves_under_a_stream_of_cache_hits():
    """lpm alone would serve the hits for ever; the age bound brings the stranger in."""
    engine = ScriptedEngine(40, 1, 40, chunk_size=32)
    engine.submit([1] * 10 + [0], 1)
    engine.run()
    stranger = engine.submit([2] * 12, 1)
    for i in range(60):
        engine.submit([1] * 10 + [i % 3], 1)
        engine.step()
        if stranger.status is Status.FINISHED:
            break
    assert stranger.status is Status.FINISHED
    assert stranger.passed_over <= engine.scheduler.max_passed_over + 1


def test_lpm_and_dfs_reach_the_optimal_hit_rate_where_fcfs_thrashes():
    """Three prompt families, interleaved, and a cache that holds little more than one of them."""
    hits = {}
    for policy in POLICIES:
        engine = ScriptedEngine(80, 1, 64, policy=policy, vocab=7)
        engine.scheduler.max_passed_over = 1000  # pure policy
        for i in range(30):
            engine.submit([i % 3] * 40 + [i], 1)
        engine.run(check=True)
        hits[policy] = sum(r.cached_tokens for r in engine.finished)
    assert hits["lpm"] == hits["dfs-weight"] == 27 * 40
    assert hits["fcfs"] < 27 * 40 / 2


def test_failed_step_ends_everything_and_leaves_nothing_behind():
    engine = ScriptedEngine(200, 4, 100, chunk_size=16)
    for i in range(6):
        engine.submit([i] * 20, 10)
    engine.step()
    ended = engine.scheduler.drop_all("the device failed")
    assert len(ended) == 6
    assert all(r.finish_reason == {"type": "abort", "message": "the device failed"} for r in ended)
    assert engine.scheduler.allocator.available == 200
    engine.scheduler.check()


def test_scoring_needs_every_position_whose_successor_is_asked_for():
    engine = ScriptedEngine(100, 4, 64)
    engine.submit([1, 2, 3, 4, 5, 6], 1)
    engine.run()
    request = engine.submit([1, 2, 3, 4, 5, 6], 0)
    request.logprob_start = 3
    engine.run(check=True)
    assert request.cached_tokens == 2  # positions 2.. are computed: the logits at 2 score token 3
    assert request.finish_reason == {"type": "length"}


def test_events_tell_the_story():
    engine = ScriptedEngine(100, 4, 64)
    engine.scheduler.events = log = EventLog()
    engine.submit([1, 2, 3], 3)
    engine.run()
    kinds = [e.kind for e in log]
    assert kinds == ["submit", "admit", "extend", "batch", "batch", "batch", "release", "finish"]


def test_an_abort_between_forming_a_step_and_committing_the_last_keeps_known_tokens_only():
    """The step reads a token that is still on the device: its slot is computed, but no key of the tree can name it."""
    engine = ScriptedEngine(40, 2, 30, overlap=True)
    request, scheduler = engine.submit([1, 2, 3], 10), engine.scheduler
    first = scheduler.next_batch()
    second = scheduler.next_batch()
    assert first is not None and second is not None and second.from_device.all()
    scheduler.abort(request)
    scheduler.check()
    assert [node.key.tolist() for node in scheduler.tree.nodes()] == [[1, 2, 3]]
    for batch in (first, second):
        assert scheduler.commit(batch, np.array([3])).tokens == 0
    scheduler.check()
    assert request.output.tolist() == [] and scheduler.idle


class Serving(RuleBasedStateMachine):
    """Random arrivals, aborts and steps; invariants 1 to 4 and 8 after every step, 6 and 7 at the end."""

    @initialize(
        capacity=st.integers(24, 120),
        rows=st.integers(1, 6),
        chunk=st.sampled_from([None, 1, 4, 16]),
        policy=st.sampled_from(POLICIES),
        overlap=st.booleans(),
        radix=st.booleans(),
        eviction=st.sampled_from(["lru", "lfu", "fifo", "mru", "priority"]),
    )
    def start(self, capacity, rows, chunk, policy, overlap, radix, eviction):
        self.engine = ScriptedEngine(capacity, rows, 64, chunk, policy, overlap, radix, eviction=eviction)
        self.requests = []
        self.aborted = []

    @rule(
        length=st.integers(1, 23),
        seed=st.integers(0, 5),
        n=st.integers(0, 30),
        stop=st.booleans(),
        logprob_start=st.one_of(st.none(), st.integers(0, 23)),
    )
    def submit(self, length, seed, n, stop, logprob_start):
        rng = random.Random(seed)  # few seeds: prompts share prefixes
        prompt = [rng.randrange(3) for _ in range(length)]
        request = self.engine.submit(prompt, n, stop_ids=(3,) if stop else ())
        if logprob_start is not None:
            request.logprob_start = logprob_start
        self.requests.append(request)

    @rule()
    def step(self):
        self.engine.step()

    @rule(k=st.integers(2, 12))
    def steps(self, k):
        for _ in range(k):
            self.engine.step()
            self.engine.scheduler.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        if request.status is not Status.FINISHED:
            self.engine.scheduler.abort(request)
            self.aborted.append(request)

    @rule()
    def flush(self):
        self.engine.scheduler.flush()

    @invariant()
    def holds(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check()
            self.engine.model.poison_free()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.run(check=True)
        scheduler = self.engine.scheduler
        assert scheduler.allocator.available + scheduler.tree.total == scheduler.allocator.capacity
        assert scheduler.table.available_rows == scheduler.table.max_requests
        for request in self.requests:
            assert request.status is Status.FINISHED
            if request not in self.aborted:
                expect(self.engine, request)
            else:
                want = reference(request.prompt.tolist(), len(request.output), 4)
                assert request.output.tolist() == want


# 125 examples of up to 80 rules: 10,000 steps
TestServing = Serving.TestCase
TestServing.settings = settings(
    max_examples=125,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_forming_a_decode_batch_costs_no_python_loop_over_requests():
    """256 running requests: time per step stays in the range of a few dozen numpy calls."""
    import time

    engine = ScriptedEngine(200_000, 256, 600, vocab=50_000)
    for i in range(256):
        engine.submit([i, 1, 2, 3], 400)
    engine.step()
    scheduler = engine.scheduler
    times = []
    for _, _ in itertools.product(range(50), [0]):
        begin = time.thread_time()
        batch = scheduler.next_batch()
        assert batch is not None
        scheduler.commit(batch, np.zeros(len(batch), np.int64))
        times.append(time.thread_time() - begin)
    assert min(times) < 2e-3  # about 0.1 ms on a quiet machine
