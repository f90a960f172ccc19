"""A history as JSON for the player in the browser: the start, and of each step what it changed.

    node      [id, parent, length, label, first ids, slots as first, count, ..., locks, last use, hits, rank]
              or [id, locks, last use, hits] where nothing else has changed since it was last sent
    step      {"k": kind, "t": title, "s": seconds, "r": requests, "c": changed nodes, "g": nodes that went,
               "p": [first, count, taken] ..., "n": new, "h": hit, "x": [upper, lower] split, "l": locked,
               "u": unlocked, "q": [stored, busy, asked, found], "run": running requests}
"""

from __future__ import annotations

import json
from typing import Any

from .visual_history import TreeHistory
from .visual_state import NodeView, Step, runs
from .visual_svg import Text, label_of

MOST_IDS = 48  # token ids of an edge that are sent
MOST_TEXT = 240  # characters of its text


class Encoder:
    """Turns steps into plain data, in order; remembers what the receiver knows of each node."""

    def __init__(self, decode: Text | None):
        self.decode = decode
        self._sent: dict[int, NodeView] = {}

    def start(self, history: TreeHistory) -> dict[str, Any]:
        """Position 0."""
        state = history.start
        used = runs(int(i) for i in state.used.nonzero()[0])
        return {
            "nodes": [self.node(node) for node in state.nodes.values()],
            "used": [list(run) for run in used],
            "step": self.step(history.steps[0]),
        }

    def step(self, step: Step) -> dict[str, Any]:
        """One step; empty fields are left out."""
        data = {
            "k": step.kind, "t": step.title, "s": round(step.seconds, 6), "r": list(step.rids),
            "c": [self.node(node) for node in step.changed.values()],
            "g": [self.whole(node) for node in step.gone],
            "p": [[first, count, int(taken)] for first, count, taken in step.pool],
            "n": step.new, "h": step.hit, "x": [list(pair) for pair in step.split],
            "l": step.lock, "u": step.unlock, "run": list(step.running),
        }  # fmt: skip
        for node in step.gone:
            self._sent.pop(node.id, None)
        data = {key: value for key, value in data.items() if value}
        return {**data, "q": [step.stored, step.busy, step.asked, step.found]}

    def node(self, node: NodeView) -> list[Any]:
        """A node, whole or only what changes often."""
        before = self._sent.get(node.id)
        self._sent[node.id] = node
        if before is not None and before.tokens is node.tokens and before.parent == node.parent:
            return [node.id, node.locks, node.last_access, node.hits]
        return self.whole(node)

    def whole(self, node: NodeView) -> list[Any]:
        """Everything that the player shows of a node."""
        label = label_of(node, self.decode)
        label = label if len(label) <= MOST_TEXT else label[: MOST_TEXT - 1] + "…"
        slots = [n for run in runs(node.slots) for n in run]
        counts = [node.locks, node.last_access, node.hits, node.rank]
        return [node.id, node.parent, node.length, label, list(node.tokens[:MOST_IDS]), slots, *counts]


def encode_history(history: TreeHistory, decode: Text | None, **options: Any) -> tuple[dict[str, Any], Encoder]:
    """The whole history, and the encoder for the steps that follow.  `options` are the player's."""
    encoder = Encoder(decode)
    data = {
        "capacity": history.start.capacity,
        "story": history.manual,
        "start": encoder.start(history),
        "steps": [encoder.step(step) for step in history.steps[1:]],
        **options,
    }
    return data, encoder


def dumps(data: Any) -> str:
    """Compact JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")
