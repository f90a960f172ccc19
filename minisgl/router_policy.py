"""Which worker gets a request: every policy on one screen each.

    round_robin    in turn
    random         uniformly
    power_of_two   of two at random, the less loaded
    cache_aware    where the prompt's prefix probably is already, as long as the load allows

Cache-aware decides in three steps, for loads l (sequences in flight) and a tree per worker of what it was sent:

    max(l) - min(l) > abs  and  max(l) > rel * min(l)      yes ->  the least loaded worker
        no: m = the longest match of the prompt in any tree
    m > cache_threshold * len(prompt)                      yes ->  the worker with that match
        no                                                     ->  the worker with the smallest tree

With n workers round robin computes a shared prefix n times and keeps n copies of it; here it is computed once, and the
caches together hold n times as much.  The first step keeps one popular prefix from burying one worker: what overflows
is computed elsewhere, and from then on a second worker has it too.

The estimate would drift: workers evict and flush.  Three things keep it honest.  The trees are bounded together and
forget least recently used first, as the workers do.  A worker that reports how many tokens its cache holds gets its
tree cut to as many characters (by characters per token as seen on that worker, plus what is on its way), oldest
first.  A worker that was flushed, restarted or lost begins with an empty tree.

Policies know workers by name and load only: the HTTP router is one user, not the only possible one.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .router_tree import NODE_COST, PrefixTree

CHARS_PER_TOKEN = 4.0  # until a worker has reported MIN_TOKENS: usual for English text and vocabularies of today
MIN_TOKENS = 1000


class Choice(NamedTuple):
    """worker: its name.  reason: for metrics ("cache", "balance", "smallest", or the policy's name)."""

    worker: str
    reason: str


class CacheReport(NamedTuple):
    """What a worker says of its cache.

    tokens         that its radix tree holds now
    prompt_tokens  of all requests that it has taken in, ever
    epoch          changes when the cache is flushed; None if the worker does not say
    pending_chars  of keys that were sent to it and have not been answered yet
    """

    tokens: int
    prompt_tokens: int
    epoch: object = None
    pending_chars: int = 0


class Policy(ABC):
    """`choose` is what a policy is.  The rest is for those that remember, and does nothing here."""

    @abstractmethod
    def choose(self, loads: Mapping[str, int], key: str | None) -> Choice:
        """One of `loads`: every worker that may be chosen (at least one) with its sequences in flight."""

    def forget(self, worker: str) -> None:
        """The worker is gone, or back with an empty cache."""
        return

    def report(self, worker: str, report: CacheReport) -> None:
        """What the worker says of its cache."""
        return

    def trim(self, at_most: int) -> bool:
        """Some upkeep, of at most `at_most` tree nodes; True if there is more to do."""
        return False

    def sizes(self) -> dict[str, int]:
        """Characters remembered for each worker."""
        return {}


class RoundRobin(Policy):
    def __init__(self) -> None:
        self._last = ""

    def choose(self, loads: Mapping[str, int], key: str | None) -> Choice:
        names = sorted(loads)  # in the order of names, from the last one on: workers may come and go in between
        self._last = next((name for name in names if name > self._last), names[0])
        return Choice(self._last, "round_robin")


class Random(Policy):
    def __init__(self, seed: int | None = None) -> None:
        self._rng = random.Random(seed)

    def choose(self, loads: Mapping[str, int], key: str | None) -> Choice:
        return Choice(self._rng.choice(list(loads)), "random")


class PowerOfTwo(Policy):
    def __init__(self, seed: int | None = None) -> None:
        self._rng = random.Random(seed)

    def choose(self, loads: Mapping[str, int], key: str | None) -> Choice:
        names = list(loads)
        two = self._rng.sample(names, min(2, len(names)))
        return Choice(min(two, key=loads.__getitem__), "power_of_two")


class CacheAware(Policy):
    """See the module's text.

    balance_abs_threshold  sequences in flight by which the most and the least loaded may differ ...
    balance_rel_threshold  ... or the factor: the load is out of balance when both are exceeded
    cache_threshold        share of the prompt, 0 to 1, that must match for the cache to decide
    max_tree_chars         bound on all trees together, in characters (and NODE_COST for each node)
    """

    def __init__(
        self,
        *,
        balance_abs_threshold: int = 32,
        balance_rel_threshold: float = 1.5,
        cache_threshold: float = 0.3,
        max_tree_chars: int = 1 << 26,
        seed: int | None = None,
    ):
        if balance_abs_threshold < 0:
            raise ValueError(f"balance_abs_threshold must be at least 0, got {balance_abs_threshold}")
        if not balance_rel_threshold >= 1:
            raise ValueError(f"balance_rel_threshold must be at least 1, got {balance_rel_threshold}")
        if not 0 <= cache_threshold <= 1:
            raise ValueError(f"cache_threshold must be from 0 to 1, got {cache_threshold}")
        if max_tree_chars < 4 * NODE_COST:
            raise ValueError(f"max_tree_chars must be at least {4 * NODE_COST}, got {max_tree_chars}")
        self.balance_abs_threshold, self.balance_rel_threshold = balance_abs_threshold, balance_rel_threshold
        self.cache_threshold, self.max_tree_chars = cache_threshold, max_tree_chars
        self._rng = random.Random(seed)
        self._beliefs: dict[str, _Belief] = {}

    def choose(self, loads: Mapping[str, int], key: str | None) -> Choice:
        key = key[: self.max_tree_chars - 2 * NODE_COST] if key else None  # what a tree could take in
        choice = self._decide(loads, key)
        if key is not None:
            believed = self._belief(choice.worker)
            believed.tree.insert(key)
            believed.sent += len(key)
            excess = self._total() - self.max_tree_chars
            while excess > 0:  # few nodes: each frees NODE_COST, and the key brought two nodes at most
                excess -= self._costliest().evict() + NODE_COST
        return choice

    def _decide(self, loads: Mapping[str, int], key: str | None) -> Choice:
        least, most = min(loads.values()), max(loads.values())
        if most - least > self.balance_abs_threshold and most > self.balance_rel_threshold * least:
            return Choice(self._any(name for name, load in loads.items() if load == least), "balance")
        if key is None:
            return Choice(self._any(name for name, load in loads.items() if load == least), "least_loaded")
        matches = {name: self._tree(name).match(key) for name in loads}
        longest = max(matches.values())
        if longest > self.cache_threshold * len(key):
            owners = [name for name, match in matches.items() if match == longest]
            return Choice(min(owners, key=loads.__getitem__), "cache")
        # ties, as between new workers, must not all go to the first one
        sizes = {name: (self._tree(name).cost, loads[name]) for name in loads}
        smallest = min(sizes.values())
        return Choice(self._any(name for name, size in sizes.items() if size == smallest), "smallest")

    def forget(self, worker: str) -> None:
        self._beliefs.pop(worker, None)

    def report(self, worker: str, report: CacheReport) -> None:
        believed = self._beliefs.get(worker)
        if believed is None or not believed.hear(report):
            self._beliefs[worker] = _Belief(report)

    def trim(self, at_most: int) -> bool:
        """Cut what reports showed to be too much, and a tenth of room in the bound so that routing rarely evicts."""
        for believed in self._beliefs.values():
            while believed.excess > 0 and at_most > 0:
                dropped = believed.tree.evict()
                believed.excess = believed.excess - dropped if dropped else 0
                at_most -= 1
        excess = self._total() - self.max_tree_chars * 9 // 10
        while excess > 0 and at_most > 0:
            tree = self._costliest()
            for _ in range(min(at_most, 16)):  # then see whether another one is the costliest
                excess -= tree.evict() + NODE_COST
                at_most -= 1
        return at_most == 0

    def sizes(self) -> dict[str, int]:
        return {name: believed.tree.chars for name, believed in self._beliefs.items()}

    def _tree(self, worker: str) -> PrefixTree:
        return self._belief(worker).tree

    def _belief(self, worker: str) -> _Belief:
        if worker not in self._beliefs:
            self._beliefs[worker] = _Belief(None)
        return self._beliefs[worker]

    def _total(self) -> int:
        return sum(believed.tree.cost for believed in self._beliefs.values())

    def _costliest(self) -> PrefixTree:
        return max((believed.tree for believed in self._beliefs.values()), key=lambda tree: tree.cost)

    def _any(self, names: Iterable[str]) -> str:
        return self._rng.choice(list(names))


class _Belief:
    """The tree of one worker, and how it compares with what the worker reports.

    sent     characters of all keys routed to it since the first report
    excess   characters that the tree has too many, as of the last report
    """

    def __init__(self, report: CacheReport | None):
        self.tree = PrefixTree()
        self.sent = self.excess = 0
        self._first = self._last = report

    def hear(self, report: CacheReport) -> bool:
        """Take in a report; False if the cache is not the one that this tree is about."""
        if self._first is None or self._last is None:
            self._first, self.sent = report, 0
        elif report.epoch != self._last.epoch or report.prompt_tokens < self._last.prompt_tokens:
            return False
        self._last = report
        limit = report.tokens * self._chars_per_token(report) + report.pending_chars
        self.excess = max(self.tree.chars - int(limit), 0)
        return True

    def _chars_per_token(self, report: CacheReport) -> float:
        assert self._first is not None
        tokens = report.prompt_tokens - self._first.prompt_tokens
        sent = self.sent - report.pending_chars
        if tokens < MIN_TOKENS or sent <= 0:
            return CHARS_PER_TOKEN
        return min(max(sent / tokens, 0.5), 16.0)


POLICIES: dict[str, type[Policy]] = {
    "cache_aware": CacheAware,
    "round_robin": RoundRobin,
    "random": Random,
    "power_of_two": PowerOfTwo,
}
