"""Tree of thought: at each level every thought is continued in several ways, in parallel.

                     question                     v0: 3 branches, 3 levels (plan, solution, review):
                   /    |     \\                       3 + 9 + 27 generations
               plan 1  plan 2  plan 3            deep: 2 branches, 4 levels (and a conclusion):
              /  |  \\                                 2 + 4 + 8 + 16
     solution 1  2   3 ...

All of a node's descendants share the text down to it: the tree of the program becomes the tree of the cache, and
almost everything but the generated tokens is reused.  Branches differ by what they are asked for, so that a greedy
model takes different ways.

`--data FILE`: GSM8K's own .jsonl (one object with question and answer a line).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import minisgl as sgl

from ..facts import NAMES, THINGS
from ..programs import BenchError, Programs, Setting, programs

WAYS = ("directly", "step by step", "by drawing a picture", "backwards from the end")
LEVELS = (
    "\n\nMake a plan, thinking {way}. Do not calculate yet.\nPlan:",
    "\n\nCarry the plan out, thinking {way}.\nSolution:",
    "\n\nReview the solution, thinking {way}. Is it right?\nReview:",
    "\n\nSay the conclusion, thinking {way}.\nConclusion:",
)
INTRODUCTION = (
    "You are a careful teacher of arithmetic. You look at a word problem from several sides, make a plan, carry it "
    "out, review what came out, and say the answer as a number with its unit.\n\nProblem: "
)


@sgl.function
def tree_of_thought(s, question, branches, levels, tokens):
    s += INTRODUCTION + question
    leaves = grow(s, 0, branches, levels, tokens)
    return [leaf.text() for leaf in leaves]


def grow(s, level, branches, levels, tokens):
    """Fork the state, let each fork think, and go on below it: nothing here waits for a token."""
    forks = s.fork(branches)
    for fork, way in zip(forks, WAYS):
        fork += LEVELS[level].format(way=way) + sgl.gen(max_tokens=tokens, ignore_eos=True)
    if level + 1 == levels:
        return list(forks)
    return [leaf for fork in forks for leaf in grow(fork, level + 1, branches, levels, tokens)]


@programs("tot", "tree of thought, 3 branches x 3 levels: a node's text is shared by all below", options=["data"])
def v0(setting: Setting) -> Programs:
    return _build(setting, branches=3, levels=3, quick=1)


@programs("tot-deep", "tree of thought, 2 branches x 4 levels", options=["data"])
def deep(setting: Setting) -> Programs:
    return _build(setting, branches=2, levels=4, quick=1)


def _build(setting: Setting, branches: int, levels: int, quick: int) -> Programs:
    rng = setting.rng(0)
    count = setting.count(gpu=32, cpu=3, quick=quick)
    questions = problems(rng, count) if setting.data is None else read(setting.data)[:count]
    tokens = 64 if setting.on_gpu else 6 if setting.quick else 24
    shape = {"branches": branches, "levels": levels, "tokens": tokens}
    return Programs(tree_of_thought, [{"question": question, **shape} for question in questions])


def problems(rng: random.Random, count: int) -> list[str]:
    """Word problems in the manner of a primary school's book."""
    found = []
    for _ in range(count):
        a, b = rng.sample(NAMES, 2)
        thing = rng.choice(THINGS)
        n, m, k = rng.randint(12, 40), rng.randint(2, 9), rng.randint(2, 5)
        found.append(
            f"{a} has {n} {thing}s and gives {m} of them to {b}. Then {a} buys {k} times as many {thing}s as {b} has "
            f"now. On the way home {a} loses half of the new ones. How many {thing}s does {a} have in the end, and "
            f"how many more than {b}?"
        )
    return found


def read(path: Path) -> list[str]:
    """The questions of GSM8K's .jsonl.  Raises BenchError, naming the line, for anything else."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"--data: cannot read {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            found.append(row["question"] if isinstance(row["answer"], str) else None)
        except (ValueError, KeyError, TypeError):
            raise BenchError(f"--data: {path}, line {number}: expected question and answer") from None
    return found
