"""Languages of byte strings as expressions that can be *derived*: the algebra under every grammar.

A language is a tree of interned nodes. What makes it an automaton is one question, asked of any node: "which
language is left after this byte?" (Brzozowski, "Derivatives of Regular Expressions", JACM 1964). The answer is
again a node, so nodes ARE the states of a deterministic automaton, made only when somebody steps on them:

    node                      arms(node): disjoint byte sets and what is left after them
    b"cat"                    c -> b"at"
    [ab] then b"x"            a,b -> b"x"
    [ab]{2,4000}              a,b -> [ab]{1,3999}           a counter, never unrolled
    (b"to" | b"tea")          t -> (b"o" | b"ea")           the trie of a literal set appears by itself
    P & Q                     the arms of P and Q intersected, byte set by byte set
    not P                     arms of P complemented
    <value>                   the arms of what the name stands for: recursion costs nothing until it is used

Interning gives equal nodes one object, so equal states are one state; the constructors of `Algebra` normalise
(flatten, factor equal heads, merge counters) so that they often are. Invariant: no constructor returns a node
with an empty language other than `EMPTY`; for `&` and `not` that takes a search, done once and remembered.
So "has this state a way on to acceptance" is simply "is it not EMPTY", and byte masks never lead to a dead end.

Byte sets are ints of 256 bits. Everything is bounded by a `Budget`: nodes and seconds, else GrammarError.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from .messages import one_line

ALL_BYTES = (1 << 256) - 1
Arms = tuple[tuple[int, "Node"], ...]


class GrammarError(ValueError):
    """A grammar that can't be compiled: malformed, unsupported (the construct is named), empty, or too big. The message
    is one line."""

    def __init__(self, message: str = ""):
        super().__init__(one_line(message))


class UnsupportedGrammar(GrammarError):
    """A well-formed grammar that uses something this engine doesn't do (another one may)."""


class Budget:
    """How much work one grammar may cause; shared by everything that is made for it.

    nodes: expressions kept in memory (about 0.5 KB each). seconds: the longest single operation (compiling),
    because one that outlasts it blocks its request for good. mask_seconds: the longest that a mask may take once
    requests run, because all of them wait for it. Both are seconds of the thread's own work: a grammar isn't refused
    because the machine was busy with something else.
    """

    def __init__(self, nodes: int = 400_000, seconds: float = 8.0, mask_seconds: float = 2.0):
        self.nodes, self.seconds, self.mask_seconds = nodes, seconds, mask_seconds
        self.made = 0
        self.given = seconds
        self.deadline = float("inf")  # outside of operations
        self.running: weakref.ref[Operation] | None = None  # the outermost; a dead one was interrupted at its end

    def operation(self, seconds: float | None = None) -> Operation:
        """One piece of work with a clock of its own, of `seconds` or the budget's; what runs inside of it shares that
        clock. A recursion that exhausts Python's stack is an error of the grammar like others."""
        return Operation(self, self.seconds if seconds is None else min(seconds, self.seconds))

    def spend(self) -> None:
        """Count one node. Raises GrammarError when the grammar has had its share."""
        self.made += 1
        if self.made > self.nodes:
            raise UnsupportedGrammar(f"the grammar is too big: more than {self.nodes} automaton nodes")
        if not self.made & 63:
            self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise UnsupportedGrammar(f"the grammar takes longer than {self.given:g} s to work out")


class Operation:
    """What `with budget.operation():` enters, see there."""

    __slots__ = ("__weakref__", "budget", "outermost", "seconds")

    def __init__(self, budget: Budget, seconds: float):
        self.budget, self.seconds, self.outermost = budget, seconds, False

    def __enter__(self) -> None:
        budget = self.budget
        self.outermost = budget.running is None or budget.running() is None
        if self.outermost:
            budget.given, budget.deadline = self.seconds, time.thread_time() + self.seconds
            budget.running = weakref.ref(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.outermost:
            self.budget.running, self.budget.deadline = None, float("inf")
        if kind is not None and issubclass(kind, RecursionError):
            raise GrammarError("the grammar is nested too deeply") from None


class Node:
    """One language. `nullable`: it has the empty string. `text`: which encoding's whole characters its words are
    made of ("" for the empty string, which fits all; None for anything else)."""

    __slots__ = ("_arms", "index", "nullable", "text")

    def __init__(self, nullable: bool, text: str | None = None):
        self.nullable, self.text = nullable, text
        self.index = 0
        self._arms: Arms | None = None

    def derive(self, algebra: Algebra) -> Arms:
        """What `Algebra.arms` remembers."""
        raise NotImplementedError  # no ABC: those make isinstance(), which every constructor asks, four times slower


class Empty(Node):
    """No word at all."""

    __slots__ = ()

    def derive(self, algebra: Algebra) -> Arms:
        return ()


class Epsilon(Node):
    """Only the empty string."""

    __slots__ = ()

    def derive(self, algebra: Algebra) -> Arms:
        return ()


class Literal(Node):
    """One byte string: a chain of states kept as a single edge."""

    __slots__ = ("data",)

    def __init__(self, data: bytes, text: str | None):
        super().__init__(False, text)
        self.data = data

    def derive(self, algebra: Algebra) -> Arms:
        first = self.data[0]
        whole = first < 0x80 and first != 0x5C  # what follows is whole characters again, in every encoding
        return ((1 << first, algebra.literal(self.data[1:], self.text if whole else None)),)


class Switch(Node):
    """A deterministic choice by the next byte; the byte trees of characters are made of these."""

    __slots__ = ("arms",)

    def __init__(self, arms: Arms, text: str | None):
        super().__init__(False, text)
        self.arms = arms

    def derive(self, algebra: Algebra) -> Arms:
        return self.arms


class Words(Node):
    """A finite set of byte strings, words[lo:hi] (sorted) without their first `depth` bytes: a lazy trie."""

    __slots__ = ("depth", "hi", "lo", "words")

    def __init__(self, words: Sequence[bytes], lo: int, hi: int, depth: int):
        super().__init__(len(words[lo]) == depth)
        self.words, self.lo, self.hi, self.depth = words, lo, hi, depth

    def derive(self, algebra: Algebra) -> Arms:
        words, depth, at = self.words, self.depth, self.lo + self.nullable
        arms: list[tuple[int, Node]] = []
        while at < self.hi:
            byte = words[at][depth]
            after = words[at][:depth] + bytes([byte + 1]) if byte < 255 else None
            end = self.hi if after is None else bisect_left(words, after, at, self.hi)
            arms.append((1 << byte, algebra.words_slice(words, at, end, depth + 1)))
            at = end
        return algebra.disjoint(arms)


class Concat(Node):
    """`head` then `tail`, leaning right."""

    __slots__ = ("head", "tail")

    def __init__(self, head: Node, tail: Node):
        super().__init__(head.nullable and tail.nullable, _joint(head, tail))
        self.head, self.tail = head, tail

    def derive(self, algebra: Algebra) -> Arms:
        found: list[tuple[int, Node]] = []
        node: Node = self
        while isinstance(node, Concat):
            found += [(bits, algebra.concat(left, node.tail)) for bits, left in algebra.arms(node.head)]
            if not node.head.nullable:
                return tuple(found) if node is self else algebra.disjoint(found)
            node = node.tail
        return algebra.disjoint([*found, *algebra.arms(node)])


class Alt(Node):
    """Any of `options`."""

    __slots__ = ("options",)

    def __init__(self, options: tuple[Node, ...]):
        texts = {node.text for node in options} - {""}
        super().__init__(any(node.nullable for node in options), texts.pop() if len(texts) == 1 else None)
        self.options = options

    def derive(self, algebra: Algebra) -> Arms:
        return algebra.disjoint([arm for node in self.options for arm in algebra.arms(node)])


class Repeat(Node):
    """`body` between `low` and `high` times (None: without end): two counters instead of copies."""

    __slots__ = ("body", "high", "low")

    def __init__(self, body: Node, low: int, high: int | None):
        super().__init__(low == 0, body.text)
        self.body, self.low, self.high = body, low, high

    def derive(self, algebra: Algebra) -> Arms:
        fewer = None if self.high is None else self.high - 1
        rest = algebra.repeat(self.body, max(self.low - 1, 0), fewer)
        return tuple((bits, algebra.concat(left, rest)) for bits, left in algebra.arms(self.body))


class Both(Node):
    """The words that are in every one of `parts`."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Node, ...]):
        texts = {node.text for node in parts if node.text}
        super().__init__(all(node.nullable for node in parts), texts.pop() if texts else None)
        self.parts = parts

    def derive(self, algebra: Algebra) -> Arms:
        return tuple(arm for arm in self.unchecked(algebra) if algebra.has_words(arm[1]))

    def unchecked(self, algebra: Algebra) -> list[tuple[int, Node]]:
        """The arms before those with an empty language are taken out."""
        cells: list[tuple[int, tuple[Node, ...]]] = [(ALL_BYTES, ())]
        for part in self.parts:
            cells = [
                (common, (*lefts, left))
                for bits, lefts in cells
                for others, left in algebra.arms(part)
                if (common := bits & others)
            ]
        joined: dict[Node, int] = {}
        for bits, lefts in cells:
            left = algebra.both_unchecked(lefts)
            joined[left] = joined.get(left, 0) | bits
        return [(bits, left) for left, bits in joined.items() if left is not algebra.EMPTY]


class Not(Node):
    """Every byte string that `body` doesn't have. Only used inside `Both`, beside something positive."""

    __slots__ = ("body",)

    def __init__(self, body: Node):
        super().__init__(not body.nullable)
        self.body = body

    def derive(self, algebra: Algebra) -> Arms:
        arms = [(bits, algebra.complement(left)) for bits, left in algebra.arms(self.body)]
        rest = ALL_BYTES & ~sum(bits for bits, _ in arms)
        return tuple([*arms, (rest, algebra.ANYTHING)] if rest else arms)


class Named(Node):
    """A language given by a function that is called when it is first needed. It has words, and not the empty
    one: whoever makes it vouches for that."""

    __slots__ = ("make", "target")

    def __init__(self, make: Callable[[], Node]):
        super().__init__(False)
        self.make = make
        self.target: Node | None = None

    def unfold(self) -> Node:
        """What the name stands for."""
        if self.target is None:
            self.target = self.make()
        return self.target

    def derive(self, algebra: Algebra) -> Arms:
        return algebra.arms(self.unfold())


class Algebra:
    """Makes nodes and derives them, for one grammar."""

    def __init__(self, budget: Budget | None = None):
        self.budget = budget or Budget()
        self._interned: dict[tuple, Node] = {}
        self._living: dict[Node, bool] = {}
        self._universe: dict[str, Node] = {}
        self.characters: dict[tuple, Node] = {}  # character sets made before, and back (see `charsets`)
        self.character_sets: dict[Node, tuple] = {}
        self.shortest: dict[Node, int] = {}  # lengths worked out before (see `json_formats`)
        self._word_lists: list[Sequence[bytes]] = []
        self.EMPTY: Node = self.intern(("empty",), lambda: Empty(False))
        self.EPSILON: Node = self.intern(("epsilon",), lambda: Epsilon(True, ""))
        self.ANYTHING: Node = self.intern(("not", self.EMPTY), lambda: Not(self.EMPTY))
        self.ANYTHING._arms = ((ALL_BYTES, self.ANYTHING),)

    def intern(self, key: tuple, make: Callable[[], Node]) -> Node:
        """The node known as `key`, made by `make()` the first time."""
        node = self._interned.get(key)
        if node is None:
            self.budget.spend()
            node = self._interned[key] = make()
            node.index = len(self._interned)
        return node

    def arms(self, node: Node) -> Arms:
        """The derivatives of `node`: disjoint byte sets with what is left after a byte of each; bytes in none
        of them lead nowhere."""
        found = node._arms
        if found is None:
            found = node._arms = node.derive(self)
        return found

    # ---- constructors

    def literal(self, data: bytes, text: str | None = None) -> Node:
        """The language of one byte string."""
        if not data:
            return self.EPSILON
        return self.intern(("literal", data, text), lambda: Literal(data, text))

    def switch(self, arms: dict[Node, int], text: str | None = None) -> Node:
        """One byte of `bits`, then `node`, for each {node: bits}; the byte sets are disjoint."""
        items = tuple((bits, node) for node, bits in arms.items() if bits and node is not self.EMPTY)
        if not items:
            return self.EMPTY
        if len(items) == 1 and items[0][0].bit_count() == 1:
            byte, node = bytes([items[0][0].bit_length() - 1]), items[0][1]
            if node is self.EPSILON:
                return self.literal(byte, text)
            if isinstance(node, Literal):
                return self.literal(byte + node.data, text)
        return self.intern(("switch", items, text), lambda: Switch(items, text))

    def byte_set(self, bits: int) -> Node:
        """One byte of the set."""
        return self.switch({self.EPSILON: bits})

    def words(self, words: Iterable[bytes]) -> Node:
        """A finite language, as a trie that is built where it is walked."""
        ordered = sorted(set(words))
        if not ordered:
            return self.EMPTY
        self._word_lists.append(ordered)  # keeps id() of the list unique
        return self.words_slice(ordered, 0, len(ordered), 0)

    def words_slice(self, words: Sequence[bytes], lo: int, hi: int, depth: int) -> Node:
        if hi - lo == 1:
            return self.literal(words[lo][depth:])
        return self.intern(("words", id(words), lo, hi, depth), lambda: Words(words, lo, hi, depth))

    def named(self, key: object, make: Callable[[], Node]) -> Node:
        """The language that `make()` will give, for recursion and for what is seldom reached."""
        return self.intern(("named", key), lambda: Named(make))

    def concat(self, *nodes: Node) -> Node:
        """Words of each node, one after the other."""
        result = self.EPSILON
        for node in reversed(nodes):
            result = self._concat(node, result)
        return result

    def _concat(self, head: Node, tail: Node) -> Node:
        if head is self.EMPTY or tail is self.EMPTY:
            return self.EMPTY
        if head is self.EPSILON:
            return tail
        if tail is self.EPSILON:
            return head
        if isinstance(head, Concat):
            return self._concat(head.head, self._concat(head.tail, tail))
        first, rest = (tail.head, tail.tail) if isinstance(tail, Concat) else (tail, self.EPSILON)
        if isinstance(head, Literal) and isinstance(first, Literal) and len(head.data) < 4096:
            text = head.text if head.text == first.text else None
            return self._concat(self.literal(head.data + first.data, text), rest)
        if isinstance(head, Repeat) and isinstance(first, Repeat) and head.body is first.body:
            high = None if head.high is None or first.high is None else head.high + first.high
            return self._concat(self.repeat(head.body, head.low + first.low, high), rest)
        return self.intern(("concat", head, tail), lambda: Concat(head, tail))

    def alt(self, nodes: Iterable[Node]) -> Node:
        """Words of any of the nodes."""
        options: dict[Node, None] = {}
        for node in nodes:
            if isinstance(node, Alt):
                options.update(dict.fromkeys(node.options))
            elif node is not self.EMPTY:
                options[node] = None
        if len(options) > 1:
            options = dict.fromkeys(self._merge(list(self._absorb(options))))
        if not options:
            return self.EMPTY
        if len(options) == 1:
            return next(iter(options))
        ordered = tuple(sorted(options, key=lambda node: node.index))
        return self.intern(("alt", ordered), lambda: Alt(ordered))

    def _absorb(self, options: dict[Node, None]) -> dict[Node, None]:
        """Beside "any text", every other text of that encoding is redundant."""
        if self.ANYTHING in options:
            return {self.ANYTHING: None}
        for text, universe in self._universe.items():
            if universe in options:
                return {node: None for node in options if node is universe or node.text not in ("", text)}
        return options

    def _merge(self, options: list[Node]) -> list[Node]:
        """Factor equal heads (XY | XZ = X(Y | Z)) and join counters (X{0,3}Y | X{2,5}Y = X{0,5}Y)."""
        by_head: dict[Node, list[Node]] = {}
        for node in options:
            head, tail = (node.head, node.tail) if isinstance(node, Concat) else (node, self.EPSILON)
            by_head.setdefault(head, []).append(tail)
        if len(by_head) < len(options):
            options = [
                self._concat(head, tails[0] if len(tails) == 1 else self.alt(tails)) for head, tails in by_head.items()
            ]
        counters: dict[tuple[Node, Node], list[Repeat]] = {}
        result = []
        for node in options:
            head, tail = (node.head, node.tail) if isinstance(node, Concat) else (node, self.EPSILON)
            if isinstance(head, Repeat):
                counters.setdefault((head.body, tail), []).append(head)
            else:
                result.append(node)
        for (body, tail), repeats in counters.items():
            result += [self._concat(self.repeat(body, *span), tail) for span in _spans(repeats)]
        return result

    def repeat(self, body: Node, low: int, high: int | None) -> Node:
        """`body` from `low` to `high` times, None for no limit."""
        if body.nullable:
            low = 0
        if body is self.EPSILON or high == 0 or (body is self.EMPTY and low == 0):
            return self.EPSILON
        if body is self.EMPTY or (low == 1 and high == 1):
            return body
        if isinstance(body, Repeat) and body.low == 0 and body.high is None:
            return body
        return self.intern(("repeat", body, low, high), lambda: Repeat(body, low, high))

    def both(self, *nodes: Node) -> Node:
        """Words of all the nodes."""
        node = self.both_unchecked(nodes)
        return node if self.has_words(node) else self.EMPTY

    def both_unchecked(self, nodes: Iterable[Node]) -> Node:
        """`both`, without asking whether any word is left (`has_words` knows)."""
        parts: dict[Node, None] = {}
        for node in nodes:
            parts.update(dict.fromkeys(node.parts if isinstance(node, Both) else (node,)))
        parts.pop(self.ANYTHING, None)
        for text, universe in self._universe.items():
            if universe in parts and any(node.text in ("", text) for node in parts if node is not universe):
                del parts[universe]
        if self.EMPTY in parts or any(isinstance(node, Not) and node.body in parts for node in parts):
            return self.EMPTY
        if self.EPSILON in parts:
            return self.EPSILON if all(node.nullable for node in parts) else self.EMPTY
        if not parts:
            return self.ANYTHING
        if len(parts) == 1:
            return next(iter(parts))
        ordered = tuple(sorted(parts, key=lambda node: node.index))
        return self.intern(("both", ordered), lambda: Both(ordered))

    def complement(self, node: Node) -> Node:
        """Every byte string that is no word of `node`. Meet it with something positive (`both`)."""
        if isinstance(node, Not):
            return node.body
        return self.intern(("not", node), lambda: Not(node))

    def without(self, node: Node, *others: Node) -> Node:
        """Words of `node` that none of `others` has."""
        return self.both(node, *(self.complement(other) for other in others if other is not self.EMPTY))

    def non_empty(self, node: Node) -> Node:
        """`node` without the empty string."""
        return self.without(node, self.EPSILON) if node.nullable else node

    def set_universe(self, text: str, node: Node) -> None:
        """`node` is "any text" of the encoding `text`; lets `alt` and `both` simplify."""
        self._universe[text] = node

    def disjoint(self, arms: list[tuple[int, Node]]) -> Arms:
        """Overlapping arms to disjoint ones: where byte sets overlap, either may follow."""
        cells: list[tuple[int, list[Node]]] = []
        for bits, node in arms:
            after: list[tuple[int, list[Node]]] = []
            for known, nodes in cells:
                common = bits & known
                if not common:
                    after.append((known, nodes))
                    continue
                bits &= ~common
                if known != common:
                    after.append((known & ~common, nodes))
                after.append((common, [*nodes, node]))
            if bits:
                after.append((bits, [node]))
            cells = after
        joined: dict[Node, int] = {}
        for bits, nodes in cells:
            node = nodes[0] if len(nodes) == 1 else self.alt(nodes)
            joined[node] = joined.get(node, 0) | bits
        return tuple((bits, node) for node, bits in joined.items())

    # ---- emptiness

    def has_words(self, node: Node) -> bool:
        """Is the language non-empty? Only intersections and complements need a search: breadth first, for a
        nullable descendant. A finished search settles everything that it met."""
        if node is self.EMPTY:
            return False
        if node.nullable or not isinstance(node, (Both, Not)):
            return True
        known = self._living.get(node)
        if known is not None:
            return known
        origin: dict[Node, Node | None] = {node: None}
        queue = deque([node])
        while queue:
            here = queue.popleft()
            self.budget.check_time()
            arms = here.unchecked(self) if isinstance(here, Both) else self.arms(here)
            for _, left in arms:
                if left in origin:
                    continue
                alive = self._living.get(left)
                if alive is None and isinstance(left, (Both, Not)) and not left.nullable:
                    origin[left] = here
                    queue.append(left)
                elif alive is not False:
                    self._mark_alive(here, origin)
                    return True
        self._living.update(dict.fromkeys(origin, False))
        return False

    def _mark_alive(self, node: Node | None, origin: dict[Node, Node | None]) -> None:
        while node is not None:
            self._living[node] = True
            node = origin[node]


def _joint(head: Node, tail: Node) -> str | None:
    """What whole characters a concatenation is made of."""
    if head.text == tail.text or not tail.text:
        return head.text if tail.text is not None else None
    return tail.text if head.text == "" else None


def _spans(repeats: list[Repeat]) -> list[tuple[int, int | None]]:
    """Counter ranges, joined where they touch."""
    infinite = float("inf")
    spans: list[tuple[int, float]] = []
    for low, high in sorted((r.low, infinite if r.high is None else r.high) for r in repeats):
        if spans and low <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], max(spans[-1][1], high))
        else:
            spans.append((low, high))
    return [(low, None if high == infinite else int(high)) for low, high in spans]
