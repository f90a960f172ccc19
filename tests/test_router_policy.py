"""Policies by themselves, and the routing key of every request."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.router_key import routing
from minisgl.router_policy import POLICIES, CacheAware, CacheReport, PowerOfTwo, Random, RoundRobin
from minisgl.router_tree import NODE_COST

FOUR = {f"w{i}": 0 for i in range(4)}


def choose_many(policy, count=400, loads=FOUR):
    rng = random.Random(1)
    return Counter(policy.choose(loads, f"{rng.getrandbits(64):x} unrelated").worker for _ in range(count))


def test_round_robin_takes_turns_also_when_workers_change():
    policy = RoundRobin()
    assert [policy.choose(FOUR, None).worker for _ in range(6)] == ["w0", "w1", "w2", "w3", "w0", "w1"]
    assert policy.choose({"w0": 0, "w1": 0}, None).worker == "w0"
    assert policy.choose({"w0": 0, "w3": 0}, None).worker == "w3"


def test_random_spreads():
    assert all(60 < n < 140 for n in choose_many(Random(seed=0)).values())


def test_power_of_two_prefers_the_less_loaded():
    counts = choose_many(PowerOfTwo(seed=0), loads={"a": 0, "b": 5, "c": 9})
    assert counts["a"] > counts["b"] > counts["c"] == 0
    assert PowerOfTwo().choose({"only": 3}, None).worker == "only"


def test_same_prefix_same_worker():
    policy = CacheAware(seed=0)
    prefix = "the same long preamble " * 20
    first = policy.choose(FOUR, prefix + "q1")
    assert first.reason == "smallest"
    for i in range(20):
        choice = policy.choose(FOUR, prefix + f"question {i}")
        assert (choice.worker, choice.reason) == (first.worker, "cache")


def test_longest_match_decides():
    policy = CacheAware(cache_threshold=0.1, seed=0)
    one = policy.choose(FOUR, "system" * 10 + "A" * 100).worker
    loads = {name: (50 if name == one else 0) for name in FOUR}
    other = policy.choose(loads, "system" * 10 + "A" * 50 + "B" * 100)
    assert other.reason == "balance" and other.worker != one
    assert policy.choose(FOUR, "system" * 10 + "A" * 90).worker == one
    assert policy.choose(FOUR, "system" * 10 + "A" * 50 + "B" * 90).worker == other.worker


def test_match_must_exceed_the_threshold():
    policy = CacheAware(cache_threshold=0.5, seed=0)
    owner = policy.choose(FOUR, "a" * 100).worker
    half = policy.choose(FOUR, "a" * 50 + "b" * 50)  # exactly the threshold is not more
    assert half.reason == "smallest" and half.worker != owner
    assert policy.choose(FOUR, "a" * 51 + "c" * 49) == (owner, "cache")


def test_equal_matches_go_to_the_less_loaded():
    policy = CacheAware(balance_abs_threshold=2, seed=0)
    prefix = "p" * 100
    owner = policy.choose(FOUR, prefix).worker
    second = policy.choose({name: (9 if name == owner else 0) for name in FOUR}, prefix).worker
    assert second != owner
    assert policy.choose({**FOUR, owner: 0, second: 1}, prefix).worker == owner
    assert policy.choose({**FOUR, owner: 1, second: 0}, prefix).worker == second


@pytest.mark.parametrize(
    ("loads", "reason"),
    [
        ({"a": 0, "b": 33}, "balance"),
        ({"a": 0, "b": 32}, "cache"),  # not more than the absolute threshold
        ({"a": 100, "b": 149}, "cache"),  # more by the absolute, not by the relative threshold
        ({"a": 100, "b": 151}, "balance"),
    ],
)
def test_both_thresholds_must_be_exceeded(loads, reason):
    policy = CacheAware(balance_abs_threshold=32, balance_rel_threshold=1.5)
    policy.choose({"b": 0}, "prompt")
    choice = policy.choose(loads, "prompt")
    assert choice == (("a", "balance") if reason == "balance" else ("b", "cache"))


def test_no_key_goes_to_the_least_loaded():
    assert CacheAware().choose({"a": 2, "b": 1, "c": 3}, None) == ("b", "least_loaded")
    assert CacheAware().choose({"a": 2, "b": 1, "c": 3}, "").worker == "b"


def test_router_always_worker_zero():
    """40 unrelated prompts, one at a time: no worker gets more than half."""
    counts = choose_many(CacheAware(), count=40)
    assert len(counts) == 4 and max(counts.values()) <= 20


def test_forgotten_worker_keeps_nothing():
    policy = CacheAware(seed=0)
    owner = policy.choose(FOUR, "prefix " * 20).worker
    policy.forget(owner)
    assert owner not in policy.sizes()
    assert policy.choose(FOUR, "prefix " * 20).reason == "smallest"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(alphabet="ab", max_size=3000), max_size=40), st.integers(4 * NODE_COST, 9 * NODE_COST))
def test_bound_holds_after_every_request(keys, bound):
    policy = CacheAware(max_tree_chars=bound, balance_abs_threshold=0)
    for i, key in enumerate(keys):
        policy.choose({"a": i % 3, "b": i % 2, "c": 0}, key)
        assert sum(belief.tree.cost for belief in policy._beliefs.values()) <= bound
        for belief in policy._beliefs.values():
            belief.tree.check()


def test_trim_makes_room_in_slices():
    policy = CacheAware(max_tree_chars=100 * (NODE_COST + 100), seed=0)
    for i in range(100):
        policy.choose(FOUR, f"{i:03}" + "x" * 96)
    rounds = 1
    while policy.trim(3):
        rounds += 1
    assert rounds >= 3
    assert sum(belief.tree.cost for belief in policy._beliefs.values()) <= policy.max_tree_chars * 0.9


def test_router_tree_drift():
    """A worker whose cache holds the last ten of a hundred prefixes: after its report so does the tree."""
    policy = CacheAware(seed=0)
    policy.report("w", CacheReport(0, 0, "e"))
    prefixes = [f"{i:03}" + "t" * 397 for i in range(100)]
    for prefix in prefixes:
        policy.choose({"w": 0}, prefix)
    policy.report("w", CacheReport(1000, 10_000, "e"))  # 100 tokens each: 4 characters per token
    while policy.trim(10):
        pass
    assert policy.sizes()["w"] <= 4000
    assert policy.choose({"w": 0, "v": 0}, prefixes[-1] + "q") == ("w", "cache")
    assert policy.choose({"w": 0, "v": 0}, prefixes[0] + "q") == ("v", "smallest")


def test_report_spares_what_is_on_its_way():
    policy = CacheAware(seed=0)
    policy.report("w", CacheReport(0, 0, "e"))
    policy.choose({"w": 1}, "n" * 500)
    policy.report("w", CacheReport(0, 0, "e", pending_chars=500))
    policy.trim(10)
    assert policy.sizes()["w"] == 500


@pytest.mark.parametrize("after", [CacheReport(50, 5000, "new"), CacheReport(50, 10, "e")])
def test_flush_or_restart_empties_the_tree(after):
    policy = CacheAware(seed=0)
    policy.report("w", CacheReport(0, 1000, "e"))
    policy.choose({"w": 0}, "a" * 500)
    policy.report("w", CacheReport(1000, 2000, "e"))
    assert policy.sizes()["w"] == 500
    policy.report("w", after)
    assert policy.sizes()["w"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("balance_abs_threshold", -1), ("balance_rel_threshold", 0.9), ("balance_rel_threshold", float("nan")),
     ("cache_threshold", 1.1), ("cache_threshold", -0.1), ("max_tree_chars", 10)],
)  # fmt: skip
def test_wrong_thresholds_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        CacheAware(**{name: value})


def test_every_policy_takes_one_worker_and_no_key():
    for make in POLICIES.values():
        policy = make()
        assert policy.choose({"w": 7}, None).worker == "w"
        policy.report("w", CacheReport(1, 1))
        policy.forget("w")
        assert policy.trim(10) is False and isinstance(policy.sizes(), dict)


# ---- keys --------------------------------------------------------------------------------------------------------


def key(path, payload):
    return routing(path, json.dumps(payload).encode())


def test_generate_keys():
    assert key("/generate", {"text": "hello"}) == ("hello", 1)
    assert key("/generate", {"text": ["one", "two"], "sampling_params": {"n": 3}}) == ("one", 6)
    assert key("/generate", {"input_ids": [5, 6]}) == (chr(5) + chr(6), 1)
    assert key("/generate", {"input_ids": [[5, 6], [7]]}) == (chr(5) + chr(6), 2)


def test_completion_keys():
    assert key("/v1/completions", {"prompt": "hello", "n": 2}) == ("hello", 2)
    assert key("/v1/completions", {"prompt": ["a", "b", "c"]}) == ("a", 3)
    assert key("/v1/completions", {"prompt": [1, 2, 3]}) == ("\1\2\3", 1)


def test_a_longer_conversation_begins_with_the_shorter_one():
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
             {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
             {"role": "user", "content": "more"}]  # fmt: skip
    keys = [key("/v1/chat/completions", {"messages": turns[:n]}).key for n in range(1, 5)]
    assert all(isinstance(k, str) for k in keys)
    for shorter, longer in itertools.pairwise(keys):
        assert len(longer) > len(shorter) and longer.startswith(shorter)
    other = key("/v1/chat/completions", {"messages": [{"role": "user", "content": "be brief"}]}).key
    assert other != keys[0]


def test_tools_come_first():
    tools = [{"type": "function", "function": {"name": "f"}}]
    a, b = (key("/v1/chat/completions", {"messages": [{"role": "user", "content": c}], "tools": tools}).key
            for c in "ab")  # fmt: skip
    assert a[:-1] == b[:-1] and '"name": "f"' in a


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b""),
        ("/generate", b"{"),
        ("/generate", b"[]"),
        ("/generate", b"\xff"),
        ("/generate", b"[" * 100_000),
        ("/generate", b'{"text": 3}'),
        ("/generate", b'{"input_ids": [-1]}'),
        ("/generate", b'{"input_ids": [[], 3]}'),
        ("/v1/completions", b'{"prompt": []}'),
        ("/v1/chat/completions", b'{"messages": "hi"}'),
        ("/v1/models", b'{"text": "x"}'),
    ],
)
def test_what_has_no_key(path, body):
    assert routing(path, body).key is None


def test_what_every_worker_refuses_is_no_heavy_load():
    """A worker that would be sent a million prompts sends them back at once: nobody else may be buried meanwhile."""
    for path, name in (("/generate", "text"), ("/v1/completions", "prompt")):
        for prompts in (["a"] * 50_000, [[1]] * 50_000):
            body = json.dumps({name: prompts, "n": 128, "sampling_params": {"n": 128}}).encode()
            assert routing(path, body).weight <= 1024 * 128


def test_a_body_of_too_many_values_is_not_parsed_for_its_key():
    assert routing("/v1/completions", b'{"prompt": [' + b"[]," * 300_000 + b"[1]]}") == (None, 1)
    assert routing("/v1/completions", b'{"prompt": "' + b"[]," * 300_000 + b'"}').key is not None


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["/generate", "/v1/completions", "/v1/chat/completions"]),
    st.dictionaries(
        st.sampled_from(["text", "input_ids", "prompt", "messages", "tools", "n", "sampling_params"]),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
                         ["role", "content", "text", "tool_calls", "n"]), inner, max_size=3), max_leaves=10),
    ),
)  # fmt: skip
def test_no_payload_is_too_strange(path, payload):
    found = key(path, payload)
    assert found.weight >= 1 and (found.key is None or isinstance(found.key, str))
