"""Which tokens are legal in a state, worked out once and remembered.

A token is legal when a walk of the vocabulary's byte trie (see `token_trie`) reaches its node alive. The mask of a
state is packed 32 tokens to a uint32, token i being bit i % 32 of word i // 32, which is what a GPU kernel wants to
read. Masks have to be ready before the device is, so most of the trie is not walked:

    "any of these characters, n times"     the walk is the same for every n and whatever follows: done once (`_Loop`)
    other states that much leads to        walked in a quotient of the trie (`token_classes`)
    the rest                               level by level

Alive in bytes isn't yet alive in tokens: a vocabulary may lack the tokens to spell what is left. `lives` asks
whether tokens lead on from a state to acceptance, and moves into states where they don't are taken out of the
mask, so that no mask of a reachable state is empty.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque

import numpy as np

from .automaton import DEAD, START, Automaton
from .charsets import JSON, any_text
from .expressions import Algebra, Alt, Concat, GrammarError, Literal, Named, Node, Repeat, Switch, Words
from .token_classes import ClassSteps, Quotient, partition
from .token_trie import TokenTrie, Walked, distinct, joined, one, token_trie

_BULK = 8_000  # nodes below one state from which on shortcuts are worth their overhead
_FEW_WAYS = 8  # bytes; below that little is left after the next byte
_SKIPPED = 2  # first bytes of tokens that are walked one by one
_NEVER = 1 << 30
_SEARCHED = 20_000  # states that one search for a way out may visit


class _Loop:
    """Tokens, after their first `skip` bytes, walked by repetitions of one character set, whatever comes after them.

    rounds: how many repetitions a node needs, the one it is in the middle of included; _NEVER outside the loop.
    whole: where a round is complete. usable: every round can be completed with tokens of one byte.
    """

    def __init__(self, trie: TokenTrie, skip: int, usable: bool, whole: np.ndarray, rounds: np.ndarray):
        self.trie, self.skip, self.usable, self.whole, self.rounds = trie, skip, usable, whole, rounds
        self.of_token = rounds.take(trie.node_of)
        self.of_token[trie.node_of < trie.level[skip + 1]] = _NEVER
        self._exits: dict[int, np.ndarray] = {}

    def exits(self, byte: int) -> np.ndarray:
        """The nodes that `byte` leads to from a complete round."""
        found = self._exits.get(byte)
        if found is None:
            nodes = np.flatnonzero(self.trie.byte == byte)
            nodes = nodes[nodes >= self.trie.level[self.skip + 1]]
            found = self._exits[byte] = nodes[self.whole[self.trie.parent[nodes]]]
        return found


class Shortcuts:
    """What walks of one trie have in common, whatever the grammar; the last few of each kind are remembered."""

    def __init__(self, trie: TokenTrie, keep: int = 24):
        self.trie, self.keep = trie, keep
        self.loops: OrderedDict[tuple, _Loop] = OrderedDict()  # 1.5 MB each for 128k tokens
        self._quotients: OrderedDict[tuple[bytes, int], Quotient] = OrderedDict()  # 2 MB

    def quotient(self, classes: np.ndarray, skip: int) -> Quotient:
        key = classes.tobytes(), skip
        found = self._quotients.get(key)
        if found is None:
            found = self._quotients[key] = Quotient(self.trie, classes, skip)
        self._quotients.move_to_end(key)
        while len(self._quotients) > self.keep:
            self._quotients.popitem(last=False)
        return found

    def remember(self, key: tuple, loop: _Loop) -> _Loop:
        self.loops[key] = loop
        self.loops.move_to_end(key)
        while len(self.loops) > self.keep:
            self.loops.popitem(last=False)
        return loop


_SHORTCUTS: weakref.WeakKeyDictionary[TokenTrie, Shortcuts] = weakref.WeakKeyDictionary()


class _Spread:
    """What a walk reaches. Tokens are in the order of the trie."""

    def __init__(self, automaton: Automaton, trie: TokenTrie, doomed: np.ndarray | None):
        self.automaton, self.trie, self.doomed = automaton, trie, doomed
        self.tokens = np.zeros(len(trie.order), dtype=bool)
        self._nodes = np.zeros(len(trie), dtype=bool)
        self._ends = np.zeros(len(automaton), dtype=bool)  # by state: does a token end there?

    def add(self, nodes: np.ndarray, states: np.ndarray) -> None:
        """Nodes of the trie that were reached, and the states there."""
        self._note(states.compress(self.trie.is_token.take(nodes)))
        self._nodes[self._spared(nodes, states)] = True

    def add_below(self, nodes: np.ndarray, states: np.ndarray) -> None:
        """Everything that is reached from nodes of the trie."""
        for found in self.trie.levels(self.automaton, nodes, states):
            self.add(*found)

    def add_quotient(self, steps: ClassSteps, tops: dict[int, np.ndarray]) -> None:
        """Everything below some nodes at the quotient's depth: `tops[state]` are those in `state`."""
        trie, quotient, size = self.trie, steps.quotient, len(steps.quotient)
        ids, states, before = steps.walk(list(tops))
        reached, ends = np.zeros(len(before), dtype=bool), np.zeros(len(before), dtype=bool)
        reached[self._spared(ids, states)] = True
        for number, nodes in enumerate(tops.values()):
            part = slice(number * size, number * size + size)
            for low, high in trie.ranges(nodes):
                spelt = quotient.of_token[low:high]
                self.tokens[low:high] |= reached[part].take(spelt)
                ends[part][spelt] = True
            if before[part].any():
                self._add_mixed(quotient, before[part], nodes)
        self._note(states[ends[ids]])

    def _add_mixed(self, quotient: Quotient, before: np.ndarray, tops: np.ndarray) -> None:
        """Where the quotient was left: on from there in the trie."""
        trie = self.trie
        members = quotient.members(before != 0)
        members = members[np.isin(trie.ancestors(quotient.skip)[members], tops)]
        states = before[quotient.of[members]]
        after = self.automaton.table[states, trie.byte[members]]
        alive = after != DEAD
        self.add(members[alive], after[alive])
        self.add_below(members[alive], after[alive])

    def _spared(self, nodes: np.ndarray, states: np.ndarray) -> np.ndarray:
        return nodes if self.doomed is None else nodes[~np.isin(states, self.doomed)]

    def _note(self, states: np.ndarray) -> None:
        if len(self._ends) < len(self.automaton):
            self._ends = np.append(self._ends, np.zeros(len(self.automaton) - len(self._ends), dtype=bool))
        self._ends[states] = True

    def legal(self) -> np.ndarray:
        """By token id, bool (vocab_size,)."""
        found = np.zeros(len(self.tokens) + 1, dtype=bool)  # the last for tokens without text
        np.logical_or(self.tokens, self._nodes.take(self.trie.node_of), out=found[:-1])
        return found.take(self.trie.rank)

    def ends(self) -> list[int]:
        """The states where tokens end."""
        return np.flatnonzero(self._ends).tolist()


class MaskCache:
    """Masks of one automaton over one vocabulary.

    stop_ids: the tokens that end a text, legal exactly in accepting states.
    keep: how many masks are remembered (16 KB each for 128k tokens); the oldest go first.
    """

    def __init__(self, automaton: Automaton, trie: TokenTrie, stop_ids: frozenset[int], keep: int = 2048):
        self.automaton, self.trie, self.keep = automaton, trie, keep
        self.words = (trie.vocab_size + 31) // 32
        self.stop_mask = np.zeros(self.words, dtype=np.uint32)
        for token in stop_ids:
            self.stop_mask[token // 32] |= np.uint32(1 << (token % 32))
        self.stop_mask.setflags(write=False)
        self._masks: OrderedDict[int, np.ndarray] = OrderedDict()
        shortcuts = _SHORTCUTS.get(trie)
        self._shortcuts = _SHORTCUTS.setdefault(trie, Shortcuts(trie)) if shortcuts is None else shortcuts
        self._steps: weakref.WeakKeyDictionary[Quotient, ClassSteps] = weakref.WeakKeyDictionary()
        self._lives: dict[int, bool] = {DEAD: False}
        self._easy: dict[Node, bool] = {}
        if shortcuts is None:
            self._warm_up()

    def _warm_up(self) -> None:
        """Once per tokenizer, where grammars are compiled: the loop that nearly every string will want."""
        algebra = Algebra()
        strings = MaskCache(Automaton(algebra, any_text(algebra, JSON)), self.trie, frozenset())
        strings.mask(START)

    def mask(self, state: int) -> np.ndarray:
        """The legal tokens of a state, uint32 (vocab_size / 32 rounded up,), read-only."""
        found = self._masks.get(state)
        if found is not None:
            return found
        with self.automaton.lock, self.automaton.working(self.automaton.algebra.budget.mask_seconds):
            found = self._masks[state] = self._compute(state)
            while len(self._masks) > self.keep:
                self._masks.popitem(last=False)
        return found

    def _compute(self, state: int) -> np.ndarray:
        spread = self._walk(state)
        doomed = [end for end in spread.ends() if not self.lives(end)]
        if doomed:
            spread = self._walk(state, np.array(doomed))
        bits = np.packbits(spread.legal(), bitorder="little")
        mask = np.zeros(self.words * 4, dtype=np.uint8)
        mask[: len(bits)] = bits
        mask = mask.view(np.uint32)
        if self.automaton.accepting[state]:
            mask |= self.stop_mask
        mask.setflags(write=False)
        return mask

    def _walk(self, state: int, doomed: np.ndarray | None = None) -> _Spread:
        """All tokens from `state`, but for those that lead to `doomed` states. The first bytes are walked one by
        one; where many tokens have then come to one state, the rest of them takes a shortcut."""
        trie, automaton = self.trie, self.automaton
        spread = _Spread(automaton, trie, doomed)
        nodes, states = one(0), one(state)
        for depth in range(_SKIPPED + 1):
            ahead = []
            together: dict[Quotient, dict[int, np.ndarray]] = {}
            weight = np.bincount(states, weights=trie.below[nodes], minlength=1)
            for heavy in np.flatnonzero(weight > _BULK).tolist():
                here = states == heavy
                left = self._add_loop(spread, depth, heavy, nodes[here])
                if left is not None:
                    ahead.append(left)
                elif depth and self._ways(heavy) >= _FEW_WAYS:
                    quotient = self._shortcuts.quotient(partition(automaton, heavy), depth)
                    together.setdefault(quotient, {})[heavy] = nodes[here]
                else:
                    continue
                nodes, states = nodes[~here], states[~here]
            for quotient, tops in together.items():
                steps = self._steps.get(quotient)
                if steps is None:
                    steps = self._steps[quotient] = ClassSteps(automaton, quotient)
                spread.add_quotient(steps, tops)
            ahead.append(trie.step(automaton, nodes, states))
            nodes, states = joined(ahead)
            spread.add(nodes, states)
        spread.add_below(nodes, states)
        return spread

    def _ways(self, state: int) -> int:
        self.automaton.expand(state)
        return int(np.count_nonzero(self.automaton.table[state]))

    # ---- inside a string: a shortcut for "any of these characters, many times"

    def _add_loop(self, spread: _Spread, skip: int, state: int, tops: np.ndarray) -> Walked | None:
        """Everything below the nodes `tops`, all at depth `skip` and in `state`, if that is a loop; but where tokens
        leave it at once, the nodes one further (reached, and not yet added) and the states there are returned."""
        node = self.automaton.nodes[state]
        head, tail = (node.head, node.tail) if isinstance(node, Concat) else (node, self.automaton.algebra.EPSILON)
        loop = self._loop(head, tail, skip) if isinstance(head, Repeat) else None
        if loop is None or not isinstance(head, Repeat):
            return None
        most = _NEVER - 1 if head.high is None else head.high
        for low, high in self.trie.ranges(tops):
            spread.tokens[low:high] |= loop.of_token[low:high] <= most
        nodes, states = self._leaving(loop, head, tail)
        if skip:
            inside = np.isin(self.trie.ancestors(skip)[nodes], tops)
            nodes, states = nodes[inside], states[inside]
        later = nodes >= self.trie.level[skip + 2]
        spread.add(nodes[later], states[later])
        spread.add_below(nodes[later], states[later])
        return nodes[~later], states[~later]

    def _loop(self, head: Repeat, tail: Node, skip: int) -> _Loop | None:
        """The walk of `head`, where the shortcut is exact: `head` repeats a character set, and the next byte
        tells whether it goes on."""
        if head.body not in self.automaton.algebra.character_sets:
            return None
        arms = self.automaton.algebra.arms
        if any(bits & other for bits, _ in arms(head.body) for other, _ in arms(tail)) or not self._easily(tail):
            return None
        key = self.automaton.algebra.character_sets[head.body], skip
        loop = self._shortcuts.loops.get(key) or self._make_loop(head.body, skip)
        return loop if self._shortcuts.remember(key, loop).usable else None

    def _make_loop(self, body: Node, skip: int) -> _Loop:
        algebra, trie = self.automaton.algebra, self.trie
        start = self.automaton.number(algebra.repeat(body, 0, None))
        rounds = np.full(len(trie), _NEVER)
        whole = np.zeros(len(trie), dtype=bool)
        tops = np.arange(trie.level[skip], trie.level[skip + 1])
        rounds[tops], whole[tops] = 0, True
        nodes, states, usable = tops, np.full(len(tops), start), True
        while len(nodes):
            nodes, states = trie.step(self.automaton, nodes, states)
            parents = trie.parent[nodes]
            rounds[nodes] = rounds[parents] + whole[parents]  # beginning a round counts
            whole[nodes] = states == start
            usable = usable and all(self._easily(self.automaton.nodes[s]) for s in distinct(self.automaton, states))
        return _Loop(trie, skip, usable, whole, rounds)

    def _leaving(self, loop: _Loop, head: Repeat, tail: Node) -> Walked:
        """Where tokens leave the loop after enough rounds."""
        trie, roots, states = self.trie, [], []
        most = _NEVER - 1 if head.high is None else head.high
        for bits, after in self.automaton.algebra.arms(tail):
            state = self.automaton.number(after)
            for byte in (b for b in range(256) if bits >> b & 1):
                nodes = loop.exits(byte)
                rounds = loop.rounds[trie.parent[nodes]]
                nodes = nodes[(rounds >= head.low) & (rounds <= most)]
                roots.append(nodes)
                states.append(np.full(len(nodes), state))
        return joined(zip(roots, states))

    # ---- can tokens finish what bytes can?

    def lives(self, state: int) -> bool:
        """Do legal tokens lead from `state` to an accepting state? Raises GrammarError when that takes too long
        to find out."""
        known = self._lives.get(state)
        if known is None:
            with self.automaton.lock, self.automaton.working():
                known = self._easily(self.automaton.nodes[state]) or self._search(state)
                self._lives[state] = known
        return known

    def _search(self, state: int) -> bool:
        """Breadth first over token moves; everything visited is settled by the result."""
        origin: dict[int, int | None] = {state: None}
        queue = deque([state])
        while queue:
            here = queue.popleft()
            if self.automaton.accepting[here] or self._lives.get(here) or self._easily(self.automaton.nodes[here]):
                step: int | None = here
                while step is not None:
                    self._lives[step] = True
                    step = origin[step]
                return True
            if len(origin) > _SEARCHED:
                raise GrammarError("the grammar has no short way out in this tokenizer's vocabulary")
            for after in self._token_moves(here):
                if after not in origin and self._lives.get(after) is not False:
                    origin[after] = here
                    queue.append(after)
        self._lives.update(dict.fromkeys(origin, False))
        return False

    def _token_moves(self, state: int) -> list[int]:
        nodes, states = self.trie.walk(self.automaton, state)
        return distinct(self.automaton, states[self.trie.is_token[nodes]])

    def _easily(self, node: Node) -> bool:
        """A quick sufficient test: can `node` be finished with tokens of a single byte? Almost always yes."""
        if node.nullable:
            return True
        known = self._easy.get(node)
        if known is None:
            self._easy[node] = False  # for languages that contain themselves
            known = self._easy[node] = self._finishes(node)
        return known

    def _finishes(self, node: Node) -> bool:
        spelt = self.trie.single_bytes
        while isinstance(node, (Concat, Named)):  # a loop: tails are long, the stack isn't
            if isinstance(node, Named):
                node = node.unfold()
            elif self._easily(node.head):
                node = node.tail
            else:
                return False
            if node.nullable:
                return True
            if node in self._easy:
                return self._easy[node]
        if isinstance(node, Literal):
            return all(spelt >> byte & 1 for byte in node.data)
        if isinstance(node, Words):
            return any(all(spelt >> byte & 1 for byte in word) for word in node.words[node.lo : node.hi])
        if isinstance(node, Repeat):
            return self._easily(node.body)
        if isinstance(node, Alt):
            brief = sorted(node.options, key=lambda option: not isinstance(option, (Literal, Words)))
            return any(self._easily(option) for option in brief)
        if isinstance(node, Switch):
            return any(bits & spelt and self._easily(after) for bits, after in node.arms)
        return self._spelt_out(node)

    def _spelt_out(self, node: Node) -> bool:
        spelt, seen, queue = self.trie.single_bytes, {node}, deque([node])
        while queue and len(seen) < 200:
            for bits, after in self.automaton.algebra.arms(queue.popleft()):
                if bits & spelt and after not in seen:
                    if after.nullable:
                        return True
                    seen.add(after)
                    queue.append(after)
        return False


def unpack(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """A packed mask as bool (vocab_size,)."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size).astype(bool)


__all__ = ["START", "MaskCache", "token_trie", "unpack"]
