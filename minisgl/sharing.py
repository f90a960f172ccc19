"""Who shares what: a decode batch seen as a tree of prefixes, so that attention reads each prefix once.

A decode step reads every K and V of every running request.  Requests that fork from one prompt read the same slots,
each for itself: 27 thoughts over a prompt of 400 tokens read 10,800 rows where 400 would do.  The radix tree knows
better, because each running request locks the node where its prefix ends:

    root - "Problem: ..." (400) -+- "Idea A" (64) -+- own tokens of request 0
                                 |                 '- own tokens of request 1
                                 '- "Idea B" (64) --- own tokens of request 2

    segments   [0, 400) of requests 0 1 2     [400, 464) of requests 0 1      (B has one reader: it is his own)
    own_start  464 464 400                    from here on a request reads for itself

A segment's keys are multiplied with the queries of all its members in one matrix product (a row per member and head),
which gives each member a partial result and its log-sum-exp; those merge with what the member read by itself exactly
as the splits of a long sequence do.  The idea is known as cascade, bifurcated or tree attention (Hydragen,
arXiv 2402.05099; DeFT, arXiv 2404.00242); here it needs no declaration by the user, the tree finds the segments.

`find_segments` reads the tree, `plan_items` cuts segments into pieces of work, and `PrefixSharing` brings the plan of
a batch to the device, where it stays until the batch's composition changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from .attention import SharedPrefixes
    from .radix import Node
    from .request import Rows

MIN_SEGMENT = 32  # tokens: a shorter segment costs more (a partial result per member and head) than it saves
MIN_SAVING = 0.1  # of all reads of the step, else the step is left as it is


@dataclass
class Segment:
    """Positions [start, end) that several decodes have in common.

    members: their indices among the decodes, at least two.
    """

    start: int
    end: int
    members: list[int]


@dataclass
class SharedPlan:
    """What the shared-prefix kernel works through.  int32 arrays.

    items      (I, 6): first member, start, end, where its members begin in `members`, how many, number of the piece
    members    (M,): indices among the decodes, item after item
    own_start  (B,): the first position that each decode reads by itself
    pieces     (B,): partial results that each decode gets from items, numbered from 0
    """

    items: np.ndarray
    members: np.ndarray
    own_start: np.ndarray
    pieces: np.ndarray


def find_segments(nodes: Sequence[Node | None]) -> tuple[list[Segment], np.ndarray]:
    """The shared segments of the decodes whose prefixes end at these (locked) nodes, and each one's `own_start`.

    The segments of a decode follow one another from position 0 to its own_start.  Parents come before children.
    Takes time in proportion to the depth of the shared part of the tree, for each decode.
    """
    own_start = np.zeros(len(nodes), np.int32)
    # most batches share nothing: whoever holds a leaf below the root alone has nothing in common with anybody
    held = [n for n in nodes if n is not None and n.parent is not None]
    if sum(n.lock_count > 1 or n.parent.parent is not None for n in held) < 2:  # pyright: ignore[reportOptionalMemberAccess]
        return [], own_start
    count: dict[int, int] = {}
    paths: list[list[Node]] = []
    for node in nodes:
        path: list[Node] = []
        while node is not None and node.parent is not None:
            if node.lock_count > 1:  # else nobody but this request holds it
                path.append(node)
                count[node.id] = count.get(node.id, 0) + 1
            node = node.parent
        paths.append(path[::-1])
    segments: dict[int, Segment] = {}
    for index, path in enumerate(paths):
        start = end = 0
        for node, below in zip(path, [*path[1:], None]):
            if count[node.id] < 2:
                break
            end += node.length
            if below is not None and count[below.id] == count[node.id]:
                continue  # the same members go on: one longer segment
            if end - start < MIN_SEGMENT:
                continue  # too short: it goes to those below
            segments.setdefault(node.id, Segment(start, end, [])).members.append(index)
            start = end
        own_start[index] = start
    return list(segments.values()), own_start


def worth_it(segments: Sequence[Segment], total: int) -> bool:
    """The cost rule: whether reading segments once saves enough of the `total` reads (tokens) of the step."""
    saved = sum((len(s.members) - 1) * (s.end - s.start) for s in segments)
    return saved > MIN_SAVING * total


def plan_items(
    segments: Sequence[Segment], own_start: np.ndarray, *, width: int, programs: int, max_pieces: int, max_items: int
) -> SharedPlan | None:
    """Cut segments into items: at most `width` members and about an even share of the work each.

    programs     items to aim at, so that the device is full
    max_pieces   most pieces of any one decode
    Returns None if that takes more than max_items items.
    """
    work = sum((s.end - s.start) * -(-len(s.members) // width) for s in segments)
    chunk = max(128, -(-work // programs))
    while True:
        cuts = [max(1, round((s.end - s.start) / chunk)) for s in segments]
        pieces = np.zeros(len(own_start), np.int32)
        for segment, n in zip(segments, cuts):
            pieces[segment.members] += n
        if pieces.max(initial=0) <= max_pieces:
            break
        if max(cuts, default=1) == 1:
            return None  # a chain of more segments than there is room for
        chunk *= 2
    items, members = [], []
    done = np.zeros(len(own_start), np.int32)
    for segment, n in zip(segments, cuts):
        first_piece = int(done[segment.members[0]])  # the same for all: they have all their ancestors in common
        done[segment.members] += n
        edges = np.linspace(segment.start, segment.end, n + 1).astype(int)
        for at in range(0, len(segment.members), width):
            group = segment.members[at : at + width]
            for piece, (start, end) in enumerate(itertools.pairwise(edges), start=first_piece):
                items.append((group[0], start, end, len(members), len(group), piece))
            members += group
    if len(items) > max_items:
        return None
    items.sort(key=lambda item: item[1] - item[2])  # the longest first
    return SharedPlan(np.array(items, np.int32).reshape(-1, 6), np.array(members, np.int32), own_start, pieces)


class PrefixSharing:
    """The plan of the current decode batch, at fixed addresses on the device (a recorded graph reads them there).

    max_decodes   largest batch
    width         members of an item, at most
    programs      items to aim at
    max_pieces    (decodes) -> most pieces of one of them
    """

    def __init__(
        self, max_decodes: int, *, width: int, programs: int, max_pieces: Callable[[int], int], device: torch.device
    ):
        import torch

        from .attention import SharedPrefixes

        self.width, self.programs, self.max_pieces, self.device = width, programs, max_pieces, device
        self.max_items = 2 * max_decodes + programs
        self.sizes = (1, max_decodes, max_decodes, 6 * self.max_items, self.max_items * width)
        self._buffer = torch.zeros(sum(self.sizes), dtype=torch.int32, device=device)
        count, own_start, pieces, items, members = self._buffer.split(self.sizes)
        self.tensors = SharedPrefixes(items.view(-1, 6), members, own_start, pieces, count)
        self._known: tuple[np.ndarray, np.ndarray, int] | None = None  # rows, generations; most pieces, 0: no plan

    def plan(self, rows: np.ndarray, generation: np.ndarray, state: Rows, decodes: int = 0) -> SharedPrefixes | None:
        """What the decodes in these table rows share, or None if it is not worth a plan.

        decodes: the batch size that attention is told, if that is more (padding, other tokens computed as decodes): the
        larger the batch, the fewer pieces of each decode there is room for.
        A plan holds as long as the same requests decode, for their locked prefixes do not move, and its pieces fit.
        """
        room = self.max_pieces(max(decodes, len(rows)))
        if self._known is not None:
            known_rows, known_generation, most = self._known
            if most <= room and np.array_equal(rows, known_rows) and np.array_equal(generation, known_generation):
                return self.tensors if most else None
        plan = self._make(rows, state, room) if len(rows) > 1 else None
        if plan is not None:
            self._upload(plan)
        self._known = rows, generation, int(plan.pieces.max()) if plan is not None else 0
        return self.tensors if plan is not None else None

    def _make(self, rows: np.ndarray, state: Rows, max_pieces: int) -> SharedPlan | None:
        nodes = [request.node if request is not None else None for request in (state.request[row] for row in rows)]
        segments, own_start = find_segments(nodes)
        if not segments or not worth_it(segments, int(state.kv_len[rows].sum())):
            return None
        return plan_items(
            segments, own_start, width=self.width, programs=self.programs, max_pieces=max_pieces,
            max_items=self.max_items,
        )  # fmt: skip

    def _upload(self, plan: SharedPlan) -> None:
        """One copy.  Rows past the batch's end get zeros: a padding decode shares nothing."""
        import torch

        packed = torch.zeros(len(self._buffer), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        count, *parts = (part.numpy() for part in packed.split(self.sizes))
        count[0] = len(plan.items)
        for part, values in zip(parts, (plan.own_start, plan.pieces, plan.items.ravel(), plan.members)):
            part[: len(values)] = values
        self._buffer.copy_(packed, non_blocking=True)
