"""From a log of events to a sequence of pictures' worth of state: what the tree and the pool were after each step.

The engine writes one small record for every match, split, lock or eviction (see `events`).  A reader wants fewer and
larger steps: "this request found 12 of its 20 tokens", "that edge was split".  So events are folded:

    events   match  lock  admit  alloc | split | insert  lock  unlock | batch | batch | evict  free | ...
    steps    [ 1: hit, locked        ] [  2  ] [ 3: a new leaf      ] [ 4: two decodes ] [    5     ]

A *headline* opens a step, bookkeeping (lock, unlock, alloc, free) joins the step before it, and runs of steps that
only decode are one step.  A `Step` keeps what it changed: the nodes as they are after it, those that went, the slots
taken and given back.  That is also all that a player needs: it holds one state and applies steps, and goes back by
starting from a checkpoint.

    state(i)  =  checkpoint  +  the changes of the steps up to i          position 0 is the state before the first step

Nothing here draws, and nothing here needs more than NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .events import Event
from .visual_state import NodeView, Step, TreeState, apply, runs

CHECKPOINT = 64  # positions between two stored states
DECODE_RUN = 16  # decode-only batches that become one step at most


class TreeHistory:
    """The steps of a log, and the state at each position.

    start    the state before the first event (default: an empty tree)
    detail   True: every event is a step of its own
    manual   True: steps are closed by `close` only (a story told in pictures of its own)
    """

    def __init__(self, start: TreeState | None = None, *, detail: bool = False, manual: bool = False):
        self.start = start or TreeState()
        self.start.ensure(self.start.capacity or 0)
        self.detail, self.manual = detail, manual
        nothing = "an empty tree" if not self.start.nodes else f"a tree of {len(self.start.nodes)} nodes"
        s = self.start
        self._stored = s.tokens
        first = Step("start", nothing, tick=s.tick, running=s.running, asked=s.asked, found=s.found)
        first.stored, first.busy = self._stored, max(int(s.used.sum()), self._stored)
        self.steps: list[Step] = [first]
        self.partial = False  # the log began in the middle: some nodes are known only by their number
        self.open: Step | None = None
        self._state = self.start.copy()  # after every event so far, the open step's included
        self._checkpoints = [self.start.copy()]
        self._dirty: dict[int, None] = {}
        self._rid: str | None = None
        self._decodes = 0  # decode-only batches in the open step
        self._seen: set[str] = set()

    # ---- reading -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def state(self, position: int) -> TreeState:
        """The state at a position: 0 before anything happened, i after step i.  Raises IndexError out of range."""
        if not 0 <= position < len(self.steps):
            raise IndexError(f"position must be from 0 to {len(self.steps) - 1}, got {position}")
        at = position // CHECKPOINT
        state = self._checkpoints[at].copy()
        for step in self.steps[at * CHECKPOINT + 1 : position + 1]:
            apply(state, step)
        return state

    @property
    def now(self) -> TreeState:
        """The state after every event so far, those of the open step included.  Read it, don't write it."""
        return self._state

    def find(self, rid: str, after: int = -1) -> int:
        """The first position after `after` that is about this request.  Raises KeyError when there is none."""
        for i in range(after + 1, len(self.steps)):
            if rid in self.steps[i].rids:
                return i
        raise KeyError(f"no step of request {rid!r}" + (f" after {after}" if after >= 0 else ""))

    def tail(self, count: int) -> TreeHistory:
        """A history of the last `count` steps alone, which goes on from here; this one is of no use afterwards."""
        at = len(self.steps) - 1 - count
        rest = TreeHistory(self.state(at), detail=self.detail, manual=self.manual)
        rest.steps += self.steps[at + 1 :]
        rest.steps[0].title = f"{at} earlier steps are not kept"
        state = rest.start.copy()
        for i, step in enumerate(rest.steps[1:], start=1):
            apply(state, step)
            if i % CHECKPOINT == 0:
                rest._checkpoints.append(state.copy())
        for name in ("partial", "open", "_state", "_dirty", "_rid", "_decodes", "_seen", "_stored"):
            setattr(rest, name, getattr(self, name))
        return rest

    def requests(self) -> list[str]:
        """The requests that the steps are about, in order of appearance."""
        return list(dict.fromkeys(rid for step in self.steps for rid in step.rids))

    # ---- writing -------------------------------------------------------------------------------------------------

    def feed(self, events: Iterable[Event]) -> None:
        """Take in events, in order.  The last step stays open for what belongs to it: see `close`."""
        for event in events:
            handler = _HANDLERS.get(event.kind)
            if handler is not None:
                handler(self, event)

    def close(self, title: str | None = None, kind: str | None = None) -> None:
        """End the open step, if there is one; `title` and `kind` replace its own."""
        step = self.open
        if step is None and title is not None:
            step = self._begin(kind or "note", title, None)
        if step is None:
            return
        step.title, step.kind = title or step.title, kind or step.kind
        state = self._state
        gone = {node.id for node in step.gone}
        step.changed = {i: state.nodes[i] for i in self._dirty if i in state.nodes and i not in gone}
        step.tick, step.running, step.asked, step.found = state.tick, state.running, state.asked, state.found
        step.hit = list(dict.fromkeys(step.hit))
        step.stored, step.busy = self._stored, max(int(state.used.sum()), self._stored)
        self.open, self._dirty, self._decodes = None, {}, 0
        self.steps.append(step)
        if (len(self.steps) - 1) % CHECKPOINT == 0:
            self._checkpoints.append(state.copy())

    def _begin(self, kind: str, title: str, event: Event | None, rids: Iterable[str] = ()) -> Step:
        """The step that a headline opens (a new one, unless steps are closed by hand)."""
        step = self.open
        if step is not None and not self.manual:
            self.close()
            step = None
        if step is None:
            step = self.open = Step(kind, title, event.time if event is not None else 0.0)
            if self._rid is not None and not tuple(rids) and kind in _TREE_KINDS:
                rids = (self._rid,)
        step.rids = tuple(dict.fromkeys((*step.rids, *rids)))
        return step

    def _join(self, event: Event, title: str) -> Step:
        """The step that bookkeeping belongs to: the open one, or one of its own."""
        if self.open is None or self.detail:
            return self._begin(event.kind, title, event, (self._rid,) if self._rid else ())
        return self.open

    # ---- the tree's events ---------------------------------------------------------------------------------------

    def _node(self, node: int) -> NodeView:
        """The node, or a stand-in for one that was made before the log begins."""
        found = self._state.nodes.get(node)
        if found is None:
            self.partial = True
            found = self._state.nodes[node] = NodeView(node, 0, (), (), rank=node, known=False)
            self._dirty[node] = None
        return found

    def _set(self, node: NodeView) -> None:
        self._state.nodes[node.id] = node
        self._dirty[node.id] = None

    def _use(self, ids: Iterable[int], hits: int) -> None:
        self._state.tick += 1
        for i in ids:
            node = self._node(i)
            self._set(node._replace(last_access=self._state.tick, hits=node.hits + hits))

    def _match(self, event: Event) -> None:
        f = event.fields
        asked = _tokens(f["asked"])
        title = f"{f['length']} of {asked} are stored" if f["length"] else f"none of {asked} is stored"
        step = self._begin("match", title, event)
        self._use(f["path"], 1)
        step.hit += f["path"]
        if not self._seen:  # a log with a scheduler says what was asked when it admits
            self._state.asked += f["asked"]
            self._state.found += f["length"]

    def _split(self, event: Event) -> None:
        f = event.fields
        node, n = self._node(f["node"]), len(f["tokens"])
        title = f"#{f['node']} is split after {_tokens(n)}: they are #{f['upper']} now, above it"
        step = self._begin("split", title, event)
        slots = node.slots
        upper = node._replace(
            id=f["upper"], parent=f["parent"], tokens=_ints(f["tokens"]), slots=slots[:n], known=True
        )
        self._set(upper)
        self._set(node._replace(parent=f["upper"], tokens=_ints(f["rest"]), slots=slots[n:], known=True))
        step.split.append((f["upper"], f["node"]))

    def _insert(self, event: Event) -> None:
        f = event.fields
        new = len(f["tokens"]) > 0
        above = self._state.path(f["parent"] if new else f["node"])
        if new:
            step = self._begin("insert", f"{_tokens(len(f['tokens']))} enter the tree as #{f['node']}", event)
            step.new.append(f["node"])
            slots = _ints(f["slots"])
            self._state.ensure(max(slots))
            self._stored += len(slots)
            self._set(NodeView(f["node"], f["parent"], _ints(f["tokens"]), slots, rank=f["node"]))
            above = [*above, f["node"]]
        else:
            self._join(event, f"all of {_tokens(f['length'])} were there")
        self._use(above, 0)
        self._rid = None  # the next match is somebody else's

    def _lock(self, event: Event, by: int = 1) -> None:
        ids = self._state.path(event.fields["node"])
        if not ids and event.fields["node"]:
            ids = [self._node(event.fields["node"]).id]
        if not ids and not self.detail:
            return  # the root needs no lock
        verb = "locked" if by > 0 else "unlocked"
        step = self._join(event, f"#{event.fields['node']} and what is above it {verb}")
        for i in ids:
            node = self._state.nodes[i]
            self._set(node._replace(locks=max(node.locks + by, 0)))
        (step.lock if by > 0 else step.unlock).extend(ids)

    def _unlock(self, event: Event) -> None:
        self._lock(event, -1)

    def _evict(self, event: Event) -> None:
        f = event.fields
        step = self._begin("evict", f"#{f['node']} is evicted: {_tokens(len(f['tokens']))}", event)
        node = self._state.nodes.pop(f["node"], None)
        if node is None:
            self.partial = True
            node = NodeView(f["node"], f["parent"], _ints(f["tokens"]), _ints(f["slots"]), rank=f["node"])
        else:
            self._stored -= node.length
        if node.id in step.new:
            step.new.remove(node.id)
        step.gone.append(node)
        self._dirty.pop(node.id, None)

    # ---- the pool's ----------------------------------------------------------------------------------------------

    def _alloc(self, event: Event) -> None:
        slots = event.fields["slots"]
        self._join(event, f"{len(slots)} slots are taken").pool += [(*run, True) for run in runs(slots)]
        self._state.ensure(max(slots))
        self._state.used[slots] = True

    def _free(self, event: Event) -> None:
        slots = event.fields["slots"]
        self._join(event, f"{len(slots)} slots are free again").pool += [(*run, False) for run in runs(slots)]
        self._state.ensure(max(slots))
        self._state.used[slots] = False

    # ---- the scheduler's -----------------------------------------------------------------------------------------

    def _submit(self, event: Event) -> None:
        rid = event.fields["rid"]
        if self.open is not None and self.open.kind == "submit" and not self.detail:
            step = self.open
            step.rids = (*step.rids, rid)
            step.title = f"{len(step.rids)} requests arrive: {_names(step.rids)}"
            return
        self._begin("submit", f"{rid} arrives: {_tokens(event.fields['prompt_len'])}", event, (rid,))

    def _admit(self, event: Event) -> None:
        f = event.fields
        rid, state = f["rid"], self._state
        if not self._seen:
            state.asked = state.found = 0  # from here on, count requests and not look-ups
        if rid not in self._seen:
            state.asked += f["prompt"]
            state.found += f["cached"]
        self._seen.add(rid)
        self._rid = rid
        state.running = (*state.running, rid)
        step = self._join(event, f"{rid} is admitted")
        step.rids = tuple(dict.fromkeys((*step.rids, rid)))
        if self.steps[-1].kind == "split" and not self.steps[-1].rids:
            self.steps[-1].rids = (rid,)  # made by this request's match
        if step.kind == "match":
            step.title = f"{rid}: {f['cached']} of {_tokens(f['prompt'])} are cached"

    def _extend(self, event: Event) -> None:
        self._rid = event.fields["rid"]

    def _release(self, event: Event) -> None:
        rid = self._rid = event.fields["rid"]
        self._state.running = tuple(r for r in self._state.running if r != rid)

    def _batch(self, event: Event) -> None:
        f = event.fields
        decodes, extends = f["decodes"], f["extends"]
        rids = (*decodes, *(rid for rid, _, _ in extends))
        self._rid = None
        step = self.open
        again = step is not None and step.kind == "decode" and step.rids == rids and self._decodes < DECODE_RUN
        if step is not None and again and not extends and not self.detail:
            self._decodes += 1
            step.title = f"{self._decodes} decode steps of {_names(rids)}"
            return
        if extends:
            new = sum(end - start for _, start, end in extends)
            parts = [f"{_tokens(new)} of prompts ({_names(rid for rid, _, _ in extends)})"]
            if decodes:
                parts.append(f"{len(decodes)} decode" + "s" * (len(decodes) > 1))
            self._begin("batch", "a step computes: " + ", ".join(parts), event, rids)
        else:
            self._begin("decode", f"a decode step of {_names(rids)}", event, rids)
            self._decodes = 1

    def _retract(self, event: Event) -> None:
        rid = self._rid = event.fields["rid"]
        self._begin("retract", f"{rid} steps back: memory is short", event, (rid,))

    def _finish(self, event: Event) -> None:
        f = event.fields
        self._rid = None
        why = {"abort": "is aborted", "length": "ends by length", "stop": "ends"}.get(f["reason"], f["reason"])
        self._begin("finish", f"{f['rid']} {why}: {_tokens(f['tokens'])}", event, (f["rid"],))


_TREE_KINDS = ("match", "split", "insert", "evict")
_HANDLERS: dict[str, Callable[[TreeHistory, Event], None]] = {
    "match": TreeHistory._match, "split": TreeHistory._split, "insert": TreeHistory._insert,
    "lock": TreeHistory._lock, "unlock": TreeHistory._unlock, "evict": TreeHistory._evict,
    "alloc": TreeHistory._alloc, "free": TreeHistory._free, "submit": TreeHistory._submit,
    "admit": TreeHistory._admit, "extend": TreeHistory._extend, "release": TreeHistory._release,
    "batch": TreeHistory._batch, "retract": TreeHistory._retract, "finish": TreeHistory._finish,
}  # fmt: skip


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(np.asarray(values).tolist())


def _tokens(n: int) -> str:
    return f"{n} token" + "s" * (n != 1)


def _names(rids: Iterable[str], most: int = 3) -> str:
    rids = list(rids)
    return ", ".join(rids[:most]) + (f" and {len(rids) - most} more" if len(rids) > most else "")
