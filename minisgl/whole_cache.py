"""A prefix cache without tree structure: what RadixAttention is compared with (`Runtime(radix_cache="whole")`).

The obvious cache is a table from whole prompts to their KV. It finds a chat's history, which was a whole sequence
before, but not what two prompts have in common when neither is all of the other:

    stored: EXAMPLES + question 1                 asked: EXAMPLES + question 2

    tree     finds EXAMPLES                       table     finds nothing

Here the table is the radix tree with its partial matches taken away, so that everything else (slots, locks, eviction)
is the same code and the difference is the structure alone: `match` ends only where a whole sequence ended.
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from .radix import Match, Node, RadixTree, _concat, _int32


class WholeCache(RadixTree):
    """A `RadixTree` whose matches are whole sequences: prompts, and prompts with their outputs."""

    partial = False

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self._whole: set[int] = set()  # ids of the nodes at which one ends; a split leaves the deep end its id

    def completed(self, node: Node) -> None:
        self._whole.add(node.id)

    def match(self, tokens: ArrayLike) -> Match:
        """The longest whole sequence that `tokens` begins with, marked as just used; else the root, length 0."""
        query = _int32(tokens, "tokens")
        path = self._whole_path(query)
        self._arrive(path, 0, hits=1)
        end = path[-1] if path else self.root
        length = sum(node.length for node in path)
        if not end.children:
            self._offer(end)
        if self.events is not None:
            ids = [node.id for node in path]
            self.events.emit("match", node=end.id, length=length, asked=len(query), path=ids)
        return Match(end, length, _concat([node.slots for node in path]))

    def match_length(self, tokens: ArrayLike) -> int:
        return sum(node.length for node in self._whole_path(_int32(tokens, "tokens")))

    def _whole_path(self, query) -> list[Node]:
        path, _, over = self._walk(query)
        if over:
            path.pop()
        while path and path[-1].id not in self._whole:
            path.pop()
        return path

    def reset(self) -> None:
        super().reset()
        self._whole.clear()

    def _remove(self, leaf: Node) -> None:
        self._whole.discard(leaf.id)
        super()._remove(leaf)
