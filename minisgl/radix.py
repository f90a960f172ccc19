"""RadixAttention's radix tree: which slots of the KV pool already hold K and V of a prompt's beginning.

The K and V of a token depend on the tokens before it and on nothing after it. So two requests that begin
alike (the same system prompt, the same few-shot examples, the same chat so far) can share the KV of their
common beginning, and a request that is done can leave its KV behind for whoever comes next. What is needed is
a map from token sequences to slots that answers "what is the longest prefix of this prompt that is stored?":
a radix tree, a trie whose edges carry runs of tokens (SGLang, arXiv:2312.07104, section 3). A node here
stands for the edge that leads to it: `key` holds the tokens, `slots` where the KV of each of them lies.

Edges are cut only where two sequences part, or where a match ends:

    insert A B C D at slots 1 2 3 4            then insert A B X at slots 5 6 7

               root                                      root
                 |                                         |
        #1 [ A B C D ]                                #2 [ A B ]          <- new: the upper part
             1 2 3 4                                       1 2
                                                      /         \\
                                              #1 [ C D ]       #3 [ X ]   <- new: the leaf
                                                   3 4               7

Two things to see. Node #1 is still the deep end: whoever holds it still holds the whole of A B C D, which is
why a request may keep a node, and a lock on it, over any number of splits. And slots 5 and 6 were not taken:
the tree had A and B already, at 1 and 2. `insert` says so (`matched == 2`, `slots == [1, 2, 7]`), and the
caller moves its request onto the tree's slots and frees its own two.

Memory that is not needed by running requests is all cache, so the pool is usually full and something must go
before something new can be computed. Eviction frees whole leaves, the least recently used first: a leaf is
the part that fewest requests can share, and its parent may become the next leaf. A running request locks the
nodes that it reads: `lock_count` of a node is the number of locks on it or below it, so a locked node's
ancestors are locked, and what is unlocked is always a set of whole subtrees that eviction can reach from
below. Hence the ledger:

    total tokens == evictable + locked

Life of a request, as the scheduler drives it:

    match(prompt) -> lock(node) -> compute the rest -> insert(all tokens, slots) -> unlock(node)
       |                                                  |
       node, length, slots: KV that exists                 node, matched, slots: who owns what from now on

Cost. The tree lives on the host, in the path of every request, so nothing here is a Python step per token. A
key is kept as `bytes`: whether a prompt goes on with the whole of an edge is one memcmp (`bytes.startswith`),
and only the edge where they part needs one NumPy comparison to find the place. Victims come from a heap that
is corrected when it is read: a use does not touch it, so an entry may be out of date, and is checked when it
comes up (see `_offer`).

The tree never sees a tensor, takes no locks in the threading sense, and belongs to one thread. How it is
checked, and shown as data or as text, is in `radix_inspect`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import radix_inspect
from .events import EventLog

Ints = NDArray[np.int32]
Eviction = Literal["lru", "lfu", "fifo", "mru", "priority"]

_TOKEN_BYTES = 4  # of an int32


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """An edge of the tree and the place it leads to. Made by the tree only; read it, don't write it."""

    id: int  # stable, never used again in its tree; the root is 0
    raw: bytes  # the edge's tokens, as int32: immutable, and compared by memcmp
    slots: Ints  # (length,) where their K and V lie: the tree's own copy, read-only
    parent: Node | None  # None for the root, and for a node that was evicted
    length: int = field(init=False)  # tokens on the edge
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    lock_count: int = 0  # locks on this node or below it
    last_access: int = 0  # tick of the last match or insert that went through; never below a child's
    created: int = 0  # tick at which these tokens entered the tree
    hits: int = 0  # matches that went through
    priority: int = 0  # the highest that a sequence through this node was inserted with
    queued: Any = None  # rank of this node's current entry in the eviction heap, None without one

    def __post_init__(self) -> None:
        self.length = len(self.slots)
        self.slots.setflags(write=False)

    @property
    def key(self) -> Ints:
        """(length,) int32: the tokens on the edge, a read-only view."""
        return np.frombuffer(self.raw, dtype=np.int32)

    def __repr__(self) -> str:
        locks = f", {self.lock_count} locks" if self.lock_count else ""
        return f"Node(#{self.id}, {self.length} tokens, {len(self.children)} children{locks})"


class Match(NamedTuple):
    """What `match` found."""

    node: Node
    """Ends exactly at `length` tokens: lock it to keep the match."""
    length: int
    """Leading tokens that are stored."""
    slots: Ints
    """(length,) where their K and V lie; the caller's own array."""


class Insert(NamedTuple):
    """What `insert` did."""

    node: Node
    """Ends at the last token."""
    matched: int
    """Leading tokens that were in the tree before: the caller still owns its own slots of these, if they
    differ from `slots[:matched]`, and has to move its request over before it frees them (invariant 4 of the
    design)."""
    slots: Ints
    """(tokens,) the canonical slots: the tree's for the first `matched`, the caller's from there on."""


# Which leaf goes first: the one of the lowest rank. No two leaves have equal ticks (one operation touches one
# path), so the order is total. Ranks of the same node only rise with use, except under mru: see `_offer`.
_RANKS: dict[str, Callable[[Node], Any]] = {
    "lru": lambda node: node.last_access,
    "lfu": lambda node: (node.hits, node.last_access),
    "fifo": lambda node: node.created,
    "mru": lambda node: -node.last_access,
    "priority": lambda node: (node.priority, node.last_access),
}


class RadixTree:
    """The cache of KV slots by token sequence. Lengths and counts are in tokens; one slot holds one token.

    `eviction` says which unlocked leaf goes first:
        lru       least recently used (the paper's, and the default)
        lfu       fewest hits, then least recently used
        fifo      oldest
        mru       most recently used
        priority  lowest `priority` given to `insert`, then least recently used

    `events` is where to log. Nodes are named by id; the arrays are read-only:
        match     node, length, asked (tokens in the query), path (ids, the root's child first)
        split     node (the deep part), upper (the new one), parent, tokens (upper's), rest (node's)
        insert    node, parent, length, matched, tokens and slots (of the new leaf; empty without one)
        lock      node, lock_count (after), tokens (how many changed sides of the ledger); unlock the same
        evict     node, parent, tokens, slots

    Raises ValueError for an unknown policy. Methods take tokens and slots as any 1-D sequence of integers (an
    int32 array without a conversion) and raise TypeError or ValueError, naming the argument, for anything
    else.
    """

    stores = True
    """Whether `insert` takes ownership of slots (`NullCache` does not)."""
    partial = True
    """Whether `match` finds a part of what was inserted (`WholeCache` does not)."""

    def __init__(self, eviction: Eviction = "lru", events: EventLog | None = None) -> None:
        if eviction not in _RANKS:
            raise ValueError(f"eviction must be one of {', '.join(_RANKS)}, got {eviction!r}")
        self.eviction: str = eviction
        self.events = events
        self.root = Node(0, b"", np.empty(0, np.int32), None)
        self.evictable = 0
        """Tokens in unlocked nodes: what `evict` could free now."""
        self.locked = 0
        """Tokens in locked nodes."""
        self.num_nodes = 0
        """Nodes besides the root."""
        self.version = 0
        """Grows with each structural change: a leaf added, an edge split, a leaf evicted."""
        self.tick = 0
        """Matches and inserts so far: the clock of `Node.last_access`."""
        self._rank = _RANKS[eviction]
        self._heap: list[tuple[Any, int, Node]] = []  # (rank, id, node): the id decides ties
        self._next_id = 1

    @property
    def total(self) -> int:
        """Tokens in the tree."""
        return self.evictable + self.locked

    # --------------------------------------------------------------------------------------- match and insert

    def match(self, tokens: ArrayLike) -> Match:
        """Find the longest prefix of `tokens` that is stored, and mark it as just used.

        An edge that matches in part is split, so that `Match.node` ends exactly where the match does and can
        be locked without locking more. Nothing in common, or no tokens: the root, length 0.
        """
        query = _int32(tokens, "tokens")
        path, length, over = self._walk(query)
        self._arrive(path, over, hits=1)
        end = path[-1] if path else self.root
        if not end.children:
            self._offer(end)  # the one node of the path that can be a leaf, and its rank has changed
        if self.events is not None:
            ids = [node.id for node in path]
            self.events.emit("match", node=end.id, length=length, asked=len(query), path=ids)
        return Match(end, length, _concat([node.slots for node in path]))

    def match_length(self, tokens: ArrayLike) -> int:
        """How many leading tokens are stored. Changes nothing: for a policy that orders requests by it."""
        return self._walk(_int32(tokens, "tokens"))[1]

    def insert(self, tokens: ArrayLike, slots: ArrayLike, priority: int = 0) -> Insert:
        """Store that the K and V of `tokens` lie in `slots`, and mark the path as just used.

        The tree takes ownership of `slots[matched:]` only, copying them: the tokens before were stored
        already, at slots of the tree's own (they may be the same ones, if the caller got them from `match`).
        Raises ValueError when the lengths differ.
        """
        keys, values = _pair(tokens, slots)
        path, matched, over = self._walk(keys)
        self._arrive(path, over, hits=0)
        end = path[-1] if path else self.root
        if matched < len(keys):
            end = self._add_leaf(end, keys[matched:], values[matched:], priority)
            path.append(end)
        for node in path:
            if node.priority < priority:
                node.priority = priority
        if not end.children:
            self._offer(end)
        if self.events is not None:
            parent, new = end.parent or end, end if matched < len(keys) else self.root
            lengths = {"length": len(keys), "matched": matched}
            self.events.emit(
                "insert", node=end.id, parent=parent.id, **lengths, tokens=new.key, slots=new.slots
            )
        return Insert(end, matched, _concat([node.slots for node in path]))

    def completed(self, node: Node) -> None:
        """A whole prompt ends at `node`, not only a chunk of it.  The tree treats both alike; `WholeCache` does not."""

    def _walk(self, query: Ints) -> tuple[list[Node], int, int]:
        """Follow `query` down, changing nothing.

        Returns the nodes entered, the tokens matched, and how many tokens of the last node lie beyond the
        match: 0 when the walk ended at a node, more when it ended inside an edge.
        """
        path: list[Node] = []
        raw, end = query.tobytes(), len(query)
        first, goes_on_with = memoryview(raw).cast("i"), raw.startswith
        at, node = 0, self.root
        while at < end:
            node = node.children.get(first[at])
            if node is None:
                break
            path.append(node)
            if not goes_on_with(node.raw, at * _TOKEN_BYTES):
                common = _common(node.key, query[at:])
                return path, at + common, node.length - common
            at += node.length
        return path, at, 0

    def _arrive(self, path: list[Node], over: int, hits: int) -> None:
        """Make the last node of `path` end where the match does, and mark the path as used."""
        if over:
            path[-1] = self._split(path[-1], path[-1].length - over)
        self.tick = tick = self.tick + 1
        for node in path:
            node.last_access = tick
            node.hits += hits

    def _split(self, node: Node, at: int) -> Node:
        """Put a new node above `node` that takes its first `at` tokens, and return it.

        `node` itself stays the deep end, so what refers to it goes on meaning the whole sequence. Both parts
        have the history of the whole; every lock on or below `node` also holds what is above it, so the lock
        count is the same.
        """
        parent = node.parent
        assert parent is not None and 0 < at < node.length
        upper = self._new_node(node.raw[: at * _TOKEN_BYTES], node.slots[:at].copy(), parent)
        upper.lock_count, upper.priority = node.lock_count, node.priority
        upper.last_access, upper.created, upper.hits = node.last_access, node.created, node.hits
        parent.children[upper.key.item(0)] = upper

        node.raw, node.slots = node.raw[at * _TOKEN_BYTES :], node.slots[at:].copy()
        node.slots.setflags(write=False)
        node.length, node.parent = node.length - at, upper
        upper.children[node.key.item(0)] = node
        if self.events is not None:
            self.events.emit(
                "split", node=node.id, upper=upper.id, parent=parent.id, tokens=upper.key, rest=node.key
            )
        return upper

    def _add_leaf(self, parent: Node, key: Ints, slots: Ints, priority: int) -> Node:
        leaf = self._new_node(key.tobytes(), slots.copy(), parent)
        leaf.last_access, leaf.created, leaf.priority = self.tick, self.tick, priority
        parent.children[key.item(0)] = leaf
        self.evictable += leaf.length
        return leaf

    def _new_node(self, raw: bytes, slots: Ints, parent: Node) -> Node:
        node = Node(self._next_id, raw, slots, parent)
        self._next_id += 1
        self.num_nodes += 1
        self.version += 1
        return node

    # -------------------------------------------------------------------------------------------------- locks

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors from eviction until the matching `unlock`. Locks add up.

        The root needs none, so that locking an empty match is fine. Raises ValueError when the node has been
        evicted.
        """
        if node.parent is None and node is not self.root:
            raise ValueError(f"node #{node.id} is not in the tree: it was evicted before it was locked")
        gained, above = 0, node
        while above.parent is not None:
            if above.lock_count == 0:
                gained += above.length
            above.lock_count += 1
            above = above.parent
        self.evictable -= gained
        self.locked += gained
        if self.events is not None:
            self.events.emit("lock", node=node.id, lock_count=node.lock_count, tokens=gained)

    def unlock(self, node: Node) -> None:
        """Take back one `lock` of the same node, whatever was split since. ValueError when it has none."""
        if node is not self.root and node.lock_count == 0:
            raise ValueError(f"node #{node.id} is not locked")
        lost, above = 0, node
        while above.parent is not None:
            above.lock_count -= 1
            if above.lock_count == 0:
                lost += above.length
            above = above.parent
        self.evictable += lost
        self.locked -= lost
        if not node.children:
            self._offer(node)
        if self.events is not None:
            self.events.emit("unlock", node=node.id, lock_count=node.lock_count, tokens=lost)

    # ----------------------------------------------------------------------------------------------- eviction

    def evict(self, n_tokens: int) -> Ints:
        """Remove unlocked leaves, in the order of the policy, until `n_tokens` are gone or none is left.

        A parent whose last child goes is a leaf from then on and takes its turn in the same call. Returns the
        slots freed, which are the caller's again: in order of eviction, within a leaf in order of tokens.
        They can be more than asked for (leaves go whole) or fewer (the rest is locked).
        """
        freed: list[Ints] = []
        count = 0
        while count < n_tokens and (leaf := self._pop_victim()) is not None:
            freed.append(leaf.slots)
            count += leaf.length
            self._remove(leaf)
        self._sweep()
        return _concat(freed)

    def flush(self) -> Ints:
        """Remove every unlocked node, leaves first, and return the slots freed."""
        return self.evict(self.evictable)

    def reset(self) -> None:
        """Forget everything, in whatever state an operation that failed half-way has left the books.

        All locks are void and all slots the caller's. The log is told of unlocks and evictions as if in order.
        """
        if self.events is not None:
            for node in reversed(list(self.nodes())):  # children before their parents
                if node.lock_count:
                    self.events.emit("unlock", node=node.id, lock_count=0, tokens=node.length)
                above = self.root if node.parent is None else node.parent
                self.events.emit("evict", node=node.id, parent=above.id, tokens=node.key, slots=node.slots)
        self.root = Node(0, b"", np.empty(0, np.int32), None)
        self.evictable = self.locked = self.num_nodes = 0
        self.version += 1
        self._heap = []

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key.item(0)]
        leaf.parent = None
        self.evictable -= leaf.length
        self.num_nodes -= 1
        self.version += 1
        if not parent.children:
            self._offer(parent)
        if self.events is not None:
            self.events.emit("evict", node=leaf.id, parent=parent.id, tokens=leaf.key, slots=leaf.slots)

    def _pop_victim(self) -> Node | None:
        """Take the unlocked leaf of lowest rank off the heap, putting right what is out of date above it."""
        heap = self._heap
        while heap:
            rank, _, node = heap[0]
            if rank != node.queued:  # dead: a better entry has replaced this one
                heapq.heappop(heap)
            elif node.lock_count or node.children:  # offered again when it is an unlocked leaf again
                heapq.heappop(heap)
                node.queued = None
            elif (now := self._rank(node)) != rank:  # used since: down to where it belongs
                node.queued = now
                heapq.heapreplace(heap, (now, node.id, node))
            else:
                heapq.heappop(heap)
                node.queued = None
                return node
        return None

    def _offer(self, node: Node) -> None:
        """Put a leaf up for eviction, unless it is locked or has an entry that will come up in time.

        The rule that keeps the heap right: each unlocked leaf has one current entry (`node.queued` is its
        rank), never ranked above the leaf's present rank. Use raises the rank and leaves the entry too low,
        which is harmless: it comes up early, and `_pop_victim` moves it to where it belongs, once for any
        number of uses. So a match costs no heap operation. Only under mru does use lower the rank; then a new
        entry goes in and the old one is dead.
        """
        if node.lock_count or node is self.root:
            return
        rank = self._rank(node)
        if node.queued is not None and node.queued <= rank:
            return
        node.queued = rank
        heapq.heappush(self._heap, (rank, node.id, node))
        self._sweep()

    def _sweep(self) -> None:
        """Drop the dead entries once they could be the majority: the heap stays in proportion to the tree."""
        if len(self._heap) > self._heap_limit():
            self._heap[:] = [entry for entry in self._heap if entry[0] == entry[2].queued]
            heapq.heapify(self._heap)

    def _heap_limit(self) -> int:
        return 2 * self.num_nodes + 64

    def _check_heap(self) -> None:
        current = {node.id: rank for rank, _, node in self._heap if rank == node.queued}
        for node in self.nodes():
            if not node.children and not node.lock_count:
                radix_inspect.require(
                    node.id in current and current[node.id] <= self._rank(node),
                    f"invariant 2: eviction cannot find unlocked leaf #{node.id} in time",
                )
        radix_inspect.require(len(self._heap) <= self._heap_limit(), "the eviction heap has outgrown the tree")

    # ------------------------------------------------------------------------------------------ looking at it

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, a parent before its children."""
        stack = list(self.root.children.values())[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(list(node.children.values())[::-1])

    def check(self) -> None:
        """Walk the whole tree and raise AssertionError, naming the invariant, where one does not hold.

        Invariant 2: the ledger is right, a locked node's ancestors are locked, and the eviction heap holds
        every unlocked leaf at no more than its rank. Invariant 3: nodes own their keys and slots, siblings
        differ in their first token, no node but the root is empty; and no slot is stored twice. For tests and
        idle times: costs a full walk.
        """
        radix_inspect.check_books(self)
        self._check_heap()

    def snapshot(self) -> dict[str, Any]:
        """The tree as plain dicts, lists and ints, for a visualiser or a JSON file.

        Keys: eviction, version, tick (of the last match or insert), total, evictable, locked, num_nodes and root;
        of a node: id, tokens, slots, lock_count, last_access, created, hits, priority and children (a list of
        nodes).
        """
        return radix_inspect.snapshot(self)

    def pretty(self, decode: Callable[[list[int]], str] | None = None, max_tokens: int = 8) -> str:
        """The tree as text, one node a line, of each edge at most `max_tokens` (through `decode`, if given).

        RadixTree(lru: 7 tokens in 3 nodes, 4 evictable, 3 locked)
        └── #2 [1 2] 2 tokens, 1 lock
            ├── #1 [3 4] 2 tokens
            └── #3 [9] 1 token, 1 lock
        """
        return radix_inspect.pretty(self, decode, max_tokens)

    def __repr__(self) -> str:
        size = f"{self.total} tokens in {self.num_nodes} nodes"
        ledger = f"{self.evictable} evictable, {self.locked} locked"
        return f"{type(self).__name__}({self.eviction}: {size}, {ledger})"


class NullCache(RadixTree):
    """A tree that stays empty: the engine without a prefix cache (`radix_cache=False`), by the same calls.

    Nothing ever matches, and `insert` takes no ownership: all the slots remain the caller's to free.
    """

    stores = False

    def insert(self, tokens: ArrayLike, slots: ArrayLike, priority: int = 0) -> Insert:
        """Store nothing: the root, 0 matched, and the caller's own slots."""
        return Insert(self.root, 0, _pair(tokens, slots)[1].copy())


def _int32(values: ArrayLike, name: str) -> Ints:
    """`values` as a 1-D int32 array: itself when it is one, otherwise a checked conversion."""
    if type(values) is np.ndarray and values.dtype == np.int32 and values.ndim == 1:
        return values
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    converted = array.astype(np.int32)
    if not np.array_equal(converted, array):
        raise ValueError(f"{name} must fit 32 bits, got {array.min()} to {array.max()}")
    return converted


def _pair(tokens: ArrayLike, slots: ArrayLike) -> tuple[Ints, Ints]:
    keys, values = _int32(tokens, "tokens"), _int32(slots, "slots")
    if len(keys) != len(values):
        raise ValueError(f"slots must be one a token: got {len(values)} slots for {len(keys)} tokens")
    return keys, values


def _concat(pieces: list[Ints]) -> Ints:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)


def _common(a: Ints, b: Ints) -> int:
    """Length of the common prefix of two arrays whose first tokens are equal."""
    n = min(len(a), len(b))
    # argmax finds the first True; 0 can only mean that there is none, since element 0 is known to be equal.
    return int((a[:n] != b[:n]).argmax()) or n
