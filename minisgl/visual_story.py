"""The story of RadixAttention in nine states: the figure of the SGLang paper (arXiv:2312.07104, section 3) played.

Two chat sessions, a batch of few-shot queries and self-consistency samples meet in a pool that is too small for all
of them.  Nothing here is drawn by hand: a `RadixTree` and a `SlotAllocator` are driven as the scheduler drives them
(match, lock, evict if short, allocate, insert, unlock), a word being a token, and the states are what their events
tell.

    (1)  empty                               (6)  a few-shot query
    (2)  the first chat's first turn         (7)  three more with the same examples; the edge is split
    (3)  ... and its second                  (8)  the first chat again; the second chat is evicted
    (4)  a second chat; the edge is split    (9)  more answers to one question; the other queries are evicted
    (5)  ... goes on; the first chat's second turn is evicted
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .events import EventLog
from .pool import SlotAllocator
from .radix import RadixTree
from .visual_history import TreeHistory
from .visual_state import TreeState

CAPACITY = 70  # tokens: what makes the paper's evictions necessary, and no others

# "~" is a space inside a token
SYSTEM = "You are a helpful assistant."
HELLO = "User:~Hello! Assistant: Hi!"
SOLVE = (
    "User:~Solve this problem: a train leaves at noon, another an hour later. Assistant: Sure! The first one is "
    "sixty miles ahead, and the second gains twenty an hour."
)
CAN = "User:~What can you do? Assistant: I can answer questions, explain things, write text and code, and translate."
STORY = "User:~Write a story. Assistant: Once upon a time a small tree grew where all the paths of the wood met."
WHEN = "User:~When do they meet? Assistant: At four."
EXAMPLES = "Question~1: 1~+~1? Answer: 2. Question~2: 2~+~3? Answer: 5. Question~3:"
QUERIES = ("3~+~4? Answer: 7.", "5~+~8? Answer: 13.", "6~+~9? Answer: 15.", "7~+~6? Answer: 13.")
ANSWERS = ("13.", "eight after five: thirteen.", "it is thirteen.", "count: ten, then three: exactly thirteen.")


class Words:
    """A tokenizer for stories: a token is a word."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """One id a word, in the order in which words are first seen."""
        words = [word.replace("~", " ") for word in text.split(" ")]
        for word in words:
            if word not in self._ids:
                self._ids[word] = len(self.words)
                self.words.append(word)
        return [self._ids[word] for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """The words with spaces between them."""
        return " ".join(self.words[i] for i in ids)


class Stage:
    """A tree and a pool that serve texts, one state of the story after the other."""

    def __init__(self, capacity: int = CAPACITY):
        self.log = EventLog()
        self.tree = RadixTree(events=self.log)
        self.pool = SlotAllocator(capacity, self.log)
        self.words = Words()
        self.history = TreeHistory(TreeState(capacity=capacity), manual=True)
        self._cursor = 0

    def serve(self, prompt: str, output: str) -> None:
        """One request from beginning to end: what is stored is reused, the rest computed and left behind."""
        tokens = self.words.encode(f"{prompt} {output}")
        match = self.tree.match(tokens[: len(self.words.encode(prompt))])
        self.tree.lock(match.node)
        new = len(tokens) - match.length
        if new > self.pool.available:
            self.pool.free(self.tree.evict(new - self.pool.available))
        slots = np.concatenate([match.slots, self.pool.alloc(new)])
        inserted = self.tree.insert(tokens, slots)
        self.pool.free(slots[match.length : inserted.matched])  # an answer that was known: its duplicates
        self.tree.unlock(match.node)

    def state(self, title: str) -> None:
        """What happened since the last one is the story's next step."""
        self.history.feed(self.log.since(self._cursor))
        self._cursor = self.log.next_seq
        self.history.close(title, "story")


def paper_figure() -> tuple[TreeHistory, Words]:
    """The nine states (positions 0 to 8) and the words that their tokens stand for."""
    stage = Stage()
    stage.history.steps[0].title = "(1) The tree is empty."
    first, second = f"{SYSTEM} {HELLO}", f"{SYSTEM} {CAN}"

    def ask(history: str, turn: str) -> None:
        question, answer = turn.split(" Assistant:")
        stage.serve(f"{history} {question}", f"Assistant:{answer}")

    ask(SYSTEM, HELLO)
    stage.state("(2) A first chat: system prompt, “Hello!” and the reply “Hi!” become one edge.")
    ask(first, SOLVE)
    stage.state("(3) The chat goes on: its first turn is found in the tree, the second is appended.")
    ask(SYSTEM, CAN)
    stage.state("(4) A second chat: the edge is split, so that both share the system prompt.")
    ask(second, STORY)
    stage.state("(5) The second chat goes on. Memory is short: the first chat's last turn, used least recently, goes.")
    stage.serve(*_query(QUERIES[0]))
    stage.state("(6) A few-shot query shares nothing with the chats: a new edge at the root.")
    for query in QUERIES[1:]:
        stage.serve(*_query(query))
    stage.state("(7) More queries with the same examples: the edge is split, the examples are shared.")
    ask(f"{first} {SOLVE}", WHEN)
    stage.state("(8) The first chat is back. To make room for it the whole second chat goes.")
    prompt = _query(QUERIES[1])[0]
    for answer in ANSWERS:
        stage.serve(prompt, answer)
    stage.state("(9) More answers to one question are sampled. The other queries, used least recently, go.")
    return stage.history, stage.words


def _query(query: str) -> tuple[str, str]:
    question, answer = query.rsplit(" ", 1)
    return f"{EXAMPLES} {question}", answer
