"""Token-level twins of the paper's workloads: the same requests for any engine, from a seed.

A program of the language can only run on what speaks the language. Its *twin* is the traffic that it causes, in
rounds: the requests of a round are handed over together, and the next round, which may continue what came back,
starts when the last has ended. Prompts are random token ids, so that a model needs no tokenizer and no weights.

    twin-uniform           256 requests, nothing shared: U[100, 1024] tokens in, U[100, 1024] out
    twin-fewshot           10 groups x 64 questions (40-160) behind 1,000-1,500 shared tokens, 1 out
    twin-multiturn-short   64 chats x 4 turns, 256-512 tokens in, 4-8 out: the history is the prefix
    twin-multiturn-long    the same, 256-512 out
    twin-tree              32 problems (200-600), 3 levels, every node forks into 3 branches of 64
    twin-json              128 texts under one regex, most of whose bytes are forced

A twin is a generator that yields a round (a list of `Ask`) and is sent the outputs; `drive` plays it on an engine and
stops the time. Sizes and seeds are those that other engines were measured on; `scale` shrinks how many requests there
are and how long they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from .workloads import random_ids


@dataclass(frozen=True)
class Ask:
    """One request.  prompt: (n,) int32 token ids, or text.  Exactly `max_new_tokens` are generated, except under a
    regex, which ends its text itself."""

    prompt: np.ndarray | str
    max_new_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    regex: str | None = None


Rounds = Generator[list[Ask], Sequence[Sequence[int]], None]
"""Yields rounds, is sent the output ids of each round's requests in their order."""


@dataclass(frozen=True)
class Twin:
    name: str
    summary: str
    make: Callable[[int, float], Rounds]
    seed: int
    needs_text: bool = False

    def rounds(self, scale: float = 1.0, seed: int | None = None) -> Rounds:
        return self.make(self.seed if seed is None else seed, scale)


TWINS: dict[str, Twin] = {}


def twin(name: str, summary: str, seed: int, needs_text: bool = False) -> Callable:
    def register(make: Callable[[int, float], Rounds]) -> Callable[[int, float], Rounds]:
        TWINS[name] = Twin(name, summary, make, seed, needs_text)
        return make

    return register


def _array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


def _span(scale: float, low: int, high: int) -> tuple[int, int]:
    """A range of lengths in tokens, scaled; at least one token."""
    return max(1, round(low * scale)), max(1, round(high * scale))


def _count(scale: float, n: int) -> int:
    return max(2, round(n * scale))


@twin("twin-uniform", "random prompts and output lengths, nothing shared", seed=0)
def uniform(seed: int, scale: float) -> Rounds:
    rng = random.Random(seed)
    low, high = _span(scale, 100, 1024)
    asks = []
    for _ in range(_count(scale, 256)):
        prompt = random_ids(rng, rng.randint(low, high))
        asks.append(Ask(_array(prompt), rng.randint(low, high), temperature=0.6))
    yield asks


@twin("twin-fewshot", "10 groups x 64 questions behind shared examples, one output token", seed=1)
def fewshot(seed: int, scale: float) -> Rounds:
    rng = random.Random(seed)
    shots, question = _span(scale, 1000, 1500), _span(scale, 40, 160)
    asks = []
    for _ in range(10):
        prefix = random_ids(rng, rng.randint(*shots))
        for _ in range(_count(scale, 64)):
            asks.append(Ask(_array(prefix + random_ids(rng, rng.randint(*question))), 1))
    rng.shuffle(asks)
    yield asks


def _multiturn(seed: int, scale: float, out: tuple[int, int]) -> Rounds:
    """Every turn's prompt is the chat so far: its questions and the answers that came."""
    rng = random.Random(seed)
    user, turns = _span(scale, 256, 512), 4
    chats = [
        [(random_ids(rng, rng.randint(*user)), rng.randint(*out)) for _ in range(turns)]
        for _ in range(_count(scale, 64))
    ]
    history: list[list[int]] = [[] for _ in chats]
    for turn in range(turns):
        asks = []
        for past, chat in zip(history, chats):
            past += chat[turn][0]
            asks.append(Ask(_array(past), chat[turn][1]))
        outputs = yield asks
        for past, output in zip(history, outputs):
            past += output


@twin("twin-multiturn-short", "64 chats of 4 turns, 4-8 tokens out", seed=2)
def multiturn_short(seed: int, scale: float) -> Rounds:
    return _multiturn(seed, scale, (4, 8))


@twin("twin-multiturn-long", "64 chats of 4 turns, 256-512 tokens out", seed=2)
def multiturn_long(seed: int, scale: float) -> Rounds:
    return _multiturn(seed, scale, _span(scale, 256, 512))


@twin("twin-tree", "32 problems, 3 levels of 3 branches, 64 tokens each", seed=3)
def tree(seed: int, scale: float) -> Rounds:
    """Branches of one node have the same prompt and part by sampling; all branches live on."""
    rng = random.Random(seed)
    length, (out, _) = _span(scale, 200, 600), _span(scale, 64, 64)
    live = [random_ids(rng, rng.randint(*length)) for _ in range(_count(scale, 32))]
    for _ in range(3):
        nodes = [node for node in live for _ in range(3)]
        outputs = yield [Ask(_array(node), out, temperature=0.6) for node in nodes]
        live = [[*node, *output] for node, output in zip(nodes, outputs)]


NAMES = (
    "Harry Potter", "Hermione Granger", "Ron Weasley", "Albus Dumbledore", "Severus Snape", "Rubeus Hagrid",
    "Draco Malfoy", "Ginny Weasley",
)  # fmt: skip
_TEXT = "[A-Za-z ]{4,24}"
CHARACTER = (
    r'\{\n    "name": "' + _TEXT + r'",\n'
    r'    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'    "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    r'    "wand": \{\n        "wood": "' + _TEXT + r'",\n        "core": "' + _TEXT + r'",\n'
    r'        "length": [0-9]{1,2}\.[0-9]{0,2}\n    \},\n'
    r'    "alive": "(Alive|Deceased)",\n    "patronus": "' + _TEXT + r'",\n    "bogart": "' + _TEXT + r'"\n\}'
)


@twin("twin-json", "128 JSON objects under one regex (needs a tokenizer)", seed=0, needs_text=True)
def json(seed: int, scale: float) -> Rounds:
    yield [
        Ask(
            f"{NAMES[i % len(NAMES)]} is a character in Harry Potter. "
            f"Please fill in the following information about this character (copy {i}).\n",
            max_new_tokens=512,
            temperature=0.8,
            seed=seed + i,
            regex=CHARACTER,
        )
        for i in range(_count(scale, 128))
    ]
