"""A judge: six opinions on one essay, formed in parallel, then one grade.

    | instructions | essay | is it clear?      -> opinion \\
                           | is it original?   -> opinion  \\
                           | ... six forks                  > all six opinions -> grade (2 tokens)
                           | is it honest?     -> opinion  /

An essay is read once, not six times; the grade's prompt holds the essay again and continues its beginning.  A tree
finds the essay under each fork; the hint at the fork has it computed before six requests ask for it at once.
"""

from __future__ import annotations

import random

import minisgl as sgl

from ..facts import ANIMALS, CAPITALS, CONTINENTS, PLACES
from ..programs import Programs, Setting, programs

QUESTIONS = (
    "Is it clear?", "Is it original?", "Is the evidence good?", "Is the language correct?", "Is the order sensible?",
    "Is it honest?",
)  # fmt: skip
INSTRUCTIONS = (
    "You are one of the judges of an essay contest. You read an essay, form an opinion on one question at a time, and "
    "give a grade from 1 to 9 in the end.\n\nEssay:\n"
)


@sgl.function
def judge(s, essay, tokens):
    s += INSTRUCTIONS + essay
    forks = s.fork(len(QUESTIONS))
    for fork, question in zip(forks, QUESTIONS):
        fork += f"\n\nQuestion: {question}\nOpinion:" + sgl.gen("opinion", max_tokens=tokens, stop="\n")
    forks.join()
    for question, opinion in zip(QUESTIONS, s["opinion"]):
        s += f"\n\nQuestion: {question}\nOpinion:{opinion}"
    s += "\n\nGrade:" + sgl.gen("grade", max_tokens=2)
    return [*s["opinion"], s["grade"]]


@programs("judge", "six forks over one essay, then a grade of 2 tokens")
def build(setting: Setting) -> Programs:
    rng = setting.rng(0)
    count = setting.count(gpu=100, cpu=10, quick=3)
    tokens = 64 if setting.on_gpu else 12 if setting.quick else 24
    return Programs(judge, [{"essay": essay(rng), "tokens": tokens} for _ in range(count)])


def essay(rng: random.Random) -> str:
    """A pupil's report on a journey, of about 250 tokens, from the tables of facts."""
    continent = rng.choice(list(CONTINENTS))
    capitals = dict(CAPITALS)
    countries = rng.sample([c for c in CONTINENTS[continent] if c in capitals], 4)
    paragraphs = [f"My journey through {continent}."]
    for i, country in enumerate(countries):
        kind = rng.choice(list(ANIMALS))
        first, second = rng.sample(ANIMALS[kind], 2)
        place, other = rng.sample(PLACES, 2)
        opening = ("First we came to", "Then we travelled to", "After that we saw", "At last we reached")[i]
        paragraphs.append(
            f"{opening} {country}, whose capital is {capitals[country]}. In the {place} I saw a {first} and a "
            f"{second}, and both of them are {kind}s. In the evening we sat in the {other} and wrote letters to our "
            f"friends at home about all that."
        )
    return "\n".join(paragraphs)
