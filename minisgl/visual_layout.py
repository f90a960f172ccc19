"""Where the nodes of a tree stand in a picture: root on the left, depth to the right, one row a leaf.

    (root)──┬──[ You are a helpful assistant. ]──(1)──┬──[ Hello! Hi! ]──(2)
            │                                         └──[ What can you do? ]──(4)
            └──[ Question 1: ... ]──(5)                    ^ the edge's tokens   ^ the node

A tree of thousands of nodes is no picture.  `choose` keeps the nodes that matter now, those of the current step first
and then the most recently used, and folds the rest into stubs ("+37 nodes") at the deepest ancestor that is shown.  A
node's ancestors are used whenever it is, so that what is kept is a tree.  The player in the browser does the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .visual_state import NodeView, Step, TreeState

CHAR = 6.6  # width of a character of the 11 px monospace text
PILL_WIDTH = (62.0, 250.0)  # narrowest column of pills, and widest
TAIL = 44.0  # from the end of a pill to the next column: stub, node, and room for the curve
LEFT = 44.0  # where the first column begins


@dataclass
class Box:
    """A node in the picture.  (x, y): left end of its pill, and its middle line."""

    node: NodeView
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    depth: int = 0
    ghost: bool = False  # evicted in this step: shown for the last time
    hidden: int = 0  # nodes folded below it
    hidden_tokens: int = 0
    stub_y: float = 0.0


@dataclass
class Layout:
    """Boxes by id, parents before their children, and the size that they take."""

    boxes: dict[int, Box]
    width: float
    height: float
    root_y: float
    row: float
    stub_y: float  # of what is folded at the root
    hidden: int = 0  # nodes folded at the root
    hidden_tokens: int = 0


def choose(state: TreeState, step: Step | None, max_nodes: int, collapsed: Collection[int] = ()) -> dict[int, Box]:
    """The nodes to show, as boxes without a place; `collapsed`: ids whose subtrees are folded by hand."""
    nodes = dict(state.nodes)
    ghosts = {node.id for node in step.gone} if step else set()
    for node in step.gone if step else ():
        nodes[node.id] = node
    marked = set(ghosts)
    if step is not None:
        marked |= {i for i in (*step.new, *step.hit, *(i for pair in step.split for i in pair)) if i in nodes}
    for i in list(marked):
        while nodes[i].parent in nodes:
            i = nodes[i].parent
            marked.add(i)
    depth: dict[int, int] = {}
    for i in nodes:
        chain = []
        while i in nodes and i not in depth:
            chain.append(i)
            i = nodes[i].parent
        base = depth.get(i, -1)
        for k, j in enumerate(reversed(chain), start=1):
            depth[j] = base + k
    order = sorted(nodes.values(), key=lambda n: (n.id not in marked, -n.last_access, depth[n.id], n.id))
    shown: dict[int, Box] = {}
    folded: dict[int, int] = {}  # a hidden node -> the box (or root) that stands for it
    for node in sorted(order[:max_nodes], key=lambda n: (depth[n.id], n.rank, n.id)):
        if (node.parent == 0 or node.parent in shown or node.parent not in nodes) and node.parent not in collapsed:
            shown[node.id] = Box(node, depth=depth[node.id], ghost=node.id in ghosts)
    for node in sorted(nodes.values(), key=lambda n: depth[n.id]):
        if node.id not in shown:
            at = node.parent if node.parent in shown or node.parent not in nodes else folded[node.parent]
            folded[node.id] = at
            if at in shown:
                shown[at].hidden += 1
                shown[at].hidden_tokens += node.length
    return shown


def place(boxes: dict[int, Box], labels: dict[int, str], width: float, root_fold: tuple[int, int] = (0, 0)) -> Layout:
    """Give every box its place in a picture that is `width` wide if it can be (deep trees take more)."""
    children: dict[int, list[Box]] = {}
    for box in sorted(boxes.values(), key=lambda b: (b.node.rank, b.node.id)):
        parent = box.node.parent if box.node.parent in boxes else 0
        children.setdefault(parent, []).append(box)
    leaves = sum(1 for i in boxes if i not in children) + sum(1 for b in boxes.values() if b.hidden)
    row = 42.0 if leaves <= 24 else 30.0
    at, root_y = 20.0, 20.0
    stack: list[tuple[int, bool]] = [(0, False)]
    while stack:  # depth first without recursion: a long chat is a deep tree
        i, done = stack.pop()
        below = children.get(i, [])
        if not done:
            stack.append((i, True))
            stack += [(child.node.id, False) for child in reversed(below)]
            continue
        hidden = boxes[i].hidden if i else root_fold[0]
        lines = [child.y for child in below]
        if hidden or not below:  # a row for a leaf, or for the stub of what is folded
            lines.append(at)
            if i:
                boxes[i].stub_y = at
            at += row
        middle = (lines[0] + lines[-1]) / 2
        if i:
            boxes[i].y = middle
        else:
            root_y = middle
    wanted: dict[int, float] = {}
    for i, box in boxes.items():
        box.width = max(len(labels[i]) * CHAR + 28, 44)
        wanted[box.depth] = max(wanted.get(box.depth, PILL_WIDTH[0]), min(box.width, PILL_WIDTH[1]))
    fold = 90 if any(box.hidden for box in boxes.values()) else 0
    columns = _fit([wanted[d] for d in sorted(wanted)], width - LEFT - fold - TAIL * len(wanted) + 22)
    starts = [LEFT + sum(columns[:d]) + TAIL * d for d in range(len(columns))]
    for box in boxes.values():
        box.x, box.width = starts[box.depth], min(box.width, columns[box.depth])
    total = LEFT + sum(columns) + TAIL * len(columns) - 22 + fold
    return Layout(boxes, total, max(at - row + 26, 60.0), root_y, row, at - row, *root_fold)


def _fit(wanted: list[float], room: float) -> list[float]:
    """Column widths: as wanted where they fit, else the widest are cut to one width that does."""
    limit = PILL_WIDTH[1]
    while sum(min(w, limit) for w in wanted) > room and limit > PILL_WIDTH[0]:
        limit -= 4
    return [min(w, limit) for w in wanted]


def folded_at_root(state: TreeState, step: Step | None, boxes: dict[int, Box]) -> tuple[int, int]:
    """(nodes, tokens) that are shown neither as boxes nor folded at one."""
    nodes = {**state.nodes, **({n.id: n for n in step.gone} if step else {})}
    hidden = len(nodes) - len(boxes) - sum(box.hidden for box in boxes.values())
    tokens = sum(node.length for node in nodes.values())
    return hidden, tokens - sum(b.node.length + b.hidden_tokens for b in boxes.values())
