"""Chats of four turns: every question continues the whole chat so far.

    turn 1   | question |answer|
    turn 2   | question |answer| question |answer|             what a turn adds is new, what was said is the prefix
    turn 3   | question |answer| question |answer| question |answer|

Short answers (4-8 tokens): prompts are the work, and most of them come from the cache.  Long answers: decoding is the
work, which no prefix cache shortens, so little is gained.  Both are here so that both can be seen.
"""

from __future__ import annotations

import random
from functools import partial

import minisgl as sgl

from ..facts import CAPITALS, NAMES, PLACES, THINGS
from ..programs import Programs, Setting, programs

TURNS = 4


@sgl.function
def chat(s, questions, tokens):
    for i, (question, n) in enumerate(zip(questions, tokens)):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer {i}", max_tokens=n, ignore_eos=True))
    return [s[f"answer {i}"] for i in range(len(questions))]


def _build(setting: Setting, long: bool) -> Programs:
    rng = setting.rng(0)
    count = setting.count(gpu=64, cpu=8, quick=3 if long else 5)
    low, high = (4, 8) if not long else (256, 512) if setting.on_gpu else (16, 32) if setting.quick else (48, 96)
    calls = []
    for _ in range(count):
        questions = [question(rng, sentences=24 if setting.on_gpu else 6) for _ in range(TURNS)]
        calls.append({"questions": questions, "tokens": [rng.randint(low, high) for _ in questions]})
    return Programs(chat, calls)


def question(rng: random.Random, sentences: int) -> str:
    """A story of so many sentences, about 17 tokens each, and a question about it."""
    lines = []
    for _ in range(sentences):
        name, other = rng.sample(NAMES, 2)
        city = rng.choice(CAPITALS)[1]
        lines.append(f"{name} carries the {rng.choice(THINGS)} from the {rng.choice(PLACES)} in {city} to {other}.")
    return " ".join(lines) + f" What does {rng.choice(NAMES)} do next?"


programs("multiturn-short", "chats of 4 turns, answers of 4-8 tokens: the history is the prefix")(
    partial(_build, long=False)
)
programs("multiturn-long", "the same with long answers: little to gain, decoding is the work")(
    partial(_build, long=True)
)
