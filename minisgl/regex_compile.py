"""From a regex tree to the language of the texts that it matches as a whole.

Without anchors this is one line per kind of tree. Anchors look at what stands around them, so they are resolved
by saying, for each part, what stands to its left and right: nothing, a word character, or another one. Where a
concatenation contains an anchor it is split by whether each side is empty and by the character at the seam:

    \\bfoo(bar|\\b)     seam after foo:  `bar` follows -> inside a word, no \\b here;   nothing follows -> fine

Every split is an exact equation between languages (the intersections are cheap: see `expressions`), so anchors
anywhere, also inside alternations, mean what they mean in `re.fullmatch`. Only an anchor that is repeated is
refused. `search` gives JSON Schema's `pattern`: the texts in which the regex is found somewhere.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby

from .charsets import EVERY, UTF8, Ranges, any_text, characters, class_ranges, invert
from .expressions import Algebra, Literal, Node, UnsupportedGrammar
from .regex_parse import Anchor, Chars, Choice, Repetition, Sequence, Tree

_OUTSIDE, _WORD, _OTHER, _LAST_NEWLINE = "outside", "word", "other", "last newline"


def full_match(algebra: Algebra, tree: Tree, encoding: str) -> Node:
    """The texts that `tree` matches from beginning to end, spelt in `encoding`."""
    return _Compiler(algebra, encoding, tree).whole(tree)


def search(algebra: Algebra, tree: Tree, encoding: str) -> Node:
    """The texts that contain a match of `tree`."""
    anything = Repetition(Chars(EVERY), 0, None)
    return full_match(algebra, Sequence((anything, tree, anything)), encoding)


class _Compiler:
    def __init__(self, algebra: Algebra, encoding: str, tree: Tree):
        self.algebra, self.encoding = algebra, encoding
        self.any_text = any_text(algebra, encoding)
        kinds = anchors(tree)
        self.words = bool(kinds & {"word", "not_word"})
        self.newline_end = "end_or_newline" in kinds
        self.known: dict[tuple[Tree, str, str], tuple[bool, Node]] = {}

    def whole(self, tree: Tree) -> Node:
        if not anchors(tree):
            return self.plain(tree)
        empty, rest = self.anchored(tree, _OUTSIDE, _OUTSIDE)
        return self.algebra.alt([self.algebra.EPSILON, rest]) if empty else rest

    # ---- without anchors

    def plain(self, tree: Tree) -> Node:
        algebra = self.algebra
        if isinstance(tree, Chars):
            return characters(algebra, tree.ranges, self.encoding)
        if isinstance(tree, Sequence):
            return algebra.concat(*self.parts(tree.items))
        if isinstance(tree, Repetition):
            return algebra.repeat(self.plain(tree.body), tree.low, tree.high)
        if isinstance(tree, Choice):
            return self.choice([self.plain(option) for option in tree.options])
        raise AssertionError(tree)

    def parts(self, items: tuple[Tree, ...]) -> list[Node]:
        """The items' languages, a run of single characters as one literal where each has one spelling."""
        nodes, run = [], ""
        for item in items:
            if self.encoding == UTF8 and isinstance(item, Chars) and _is_single(item.ranges):
                run += chr(item.ranges[0][0])
                continue
            nodes += [self.algebra.literal(run.encode(), UTF8), self.plain(item)]
            run = ""
        return [*nodes, self.algebra.literal(run.encode(), UTF8)]

    def choice(self, options: list[Node]) -> Node:
        """Literal options become one trie; a thousand of them cost no more than their bytes."""
        literals = [node.data for node in options if isinstance(node, Literal)]
        if len(literals) < 8:
            return self.algebra.alt(options)
        others = [node for node in options if not isinstance(node, Literal)]
        return self.algebra.alt([self.algebra.words(literals), *others])

    # ---- with anchors: (may it be empty here, the language without the empty text)

    def anchored(self, tree: Tree, left: str, right: str) -> tuple[bool, Node]:
        """`left`, `right`: what stands around the text that `tree` matches."""
        found = self.known.get((tree, left, right))
        if found is None:
            found = self.known[tree, left, right] = self.resolve(tree, left, right)
        return found

    def resolve(self, tree: Tree, left: str, right: str) -> tuple[bool, Node]:
        algebra = self.algebra
        if isinstance(tree, Anchor):
            return _holds(tree.kind, left, right), algebra.EMPTY
        if not anchors(tree):
            node = self.plain(tree)
            return node.nullable, algebra.non_empty(node)
        if isinstance(tree, Choice):
            found = [self.anchored(option, left, right) for option in tree.options]
            return any(empty for empty, _ in found), algebra.alt(node for _, node in found)
        if isinstance(tree, Sequence):
            return self.sequence(_grouped(tree.items), left, right)
        if isinstance(tree, Repetition) and tree.high == 0:
            return True, algebra.EMPTY
        if isinstance(tree, Repetition) and tree.high == 1:
            empty, node = self.anchored(tree.body, left, right)
            return empty or tree.low == 0, node
        raise UnsupportedGrammar("regex: an anchor inside a repetition is not supported")

    def sequence(self, items: tuple[Tree, ...], left: str, right: str) -> tuple[bool, Node]:
        if not items:
            return True, self.algebra.EMPTY
        head, tail = items[0], Sequence(items[1:])
        head_empty, head_alone = self.anchored(head, left, right)
        tail_empty, tail_alone = self.anchored(tail, left, right)
        # the head is empty: what follows it is the tail's first character; likewise the tail
        options = []
        for seam in self.firsts(head, right):
            if self.anchored(head, left, seam)[0]:
                options.append(self.starting(tail_alone, seam, right))
        for seam in self.lasts(tail):
            if self.anchored(tail, seam, right)[0]:
                options.append(self.ending(head_alone, seam))
        for after in self.firsts(head, right):
            start = self.anchored(head, left, after)[1]
            for before in self.lasts(tail):
                rest = self.starting(self.anchored(tail, before, right)[1], after, right)
                options.append(self.algebra.concat(self.ending(start, before), rest))
        return head_empty and tail_empty, self.algebra.alt(options)

    def firsts(self, head: Tree, right: str) -> list[str]:
        """The kinds of character after `head` that it can tell apart ("" for any)."""
        kinds = anchors(head)
        if not kinds:
            return [""]
        found = [_WORD, _OTHER] if self.words else [_OTHER]
        return [*found, _LAST_NEWLINE] if self.newline_end and right == _OUTSIDE else found

    def lasts(self, tail: Tree) -> list[str]:
        """The kinds of character before `tail` that it can tell apart."""
        if not anchors(tail):
            return [""]
        return [_WORD, _OTHER] if self.words else [_OTHER]

    def starting(self, node: Node, kind: str, right: str) -> Node:
        """The words of `node` that begin with a character of `kind`."""
        algebra = self.algebra
        newline = algebra.EMPTY
        if self.newline_end and right == _OUTSIDE:
            newline = algebra.both(node, characters(algebra, ((10, 10),), self.encoding))
        if kind == _LAST_NEWLINE:
            return newline
        if kind in (_WORD, _OTHER) and self.words:
            first = characters(algebra, _word_set(kind), self.encoding)
            node = algebra.both(node, algebra.concat(first, self.any_text))
        return algebra.without(node, newline) if kind == _OTHER else node

    def ending(self, node: Node, kind: str) -> Node:
        if kind not in (_WORD, _OTHER) or not self.words:
            return node
        last = characters(self.algebra, _word_set(kind), self.encoding)
        return self.algebra.both(node, self.algebra.concat(self.any_text, last))


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _grouped(items: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Neighbours without anchors as one item: seams are only asked for where an anchor is."""
    result: list[Tree] = []
    for free, run in groupby(items, key=lambda item: not anchors(item)):
        run = tuple(run)
        result += [Sequence(run)] if free and len(run) > 1 else run
    return tuple(result)


def _holds(kind: str, left: str, right: str) -> bool:
    if kind == "start":
        return left == _OUTSIDE
    if kind == "end":
        return right == _OUTSIDE
    if kind == "end_or_newline":
        return right in (_OUTSIDE, _LAST_NEWLINE)
    if left == right == _OUTSIDE:
        return False  # Python before 3.14 finds neither \\b nor \\B in an empty text
    boundary = (left == _WORD) != (right == _WORD)
    return boundary == (kind == "word")


def _word_set(kind: str) -> Ranges:
    word = class_ranges(r"\w")
    return word if kind == _WORD else invert(word)


@lru_cache(maxsize=4096)
def anchors(tree: Tree) -> frozenset[str]:
    """The kinds of anchor that occur in a tree."""
    if isinstance(tree, Anchor):
        return frozenset((tree.kind,))
    if isinstance(tree, Repetition):
        return anchors(tree.body)
    if isinstance(tree, Chars):
        return frozenset()
    parts = tree.items if isinstance(tree, Sequence) else tree.options
    return frozenset().union(*(anchors(part) for part in parts))
