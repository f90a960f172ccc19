"""ReAct: an agent that thinks, calls a tool, reads the result, and thinks on.

    | instructions, worked example | question 1 | Thought 1 | Observation 1 | Thought 2 | Observation 2 | ... Answer
                                                  generated   from the tool   generated

Every step's prompt is all that went before: without a cache a trace of k steps computes its beginning k times.  The
instructions are shared by all agents.  Tool results are replayed from a script, whatever the model asked for, so that
every engine does the same work.

`--data FILE`: HotpotQA's own .json (a list of objects with question, answer and context): the observations are the
context's paragraphs.
"""

from __future__ import annotations

import json
from pathlib import Path

import minisgl as sgl

from ..facts import CAPITALS, CONTINENTS
from ..programs import BenchError, Programs, Setting, programs

STEPS = 4
INSTRUCTIONS = """\
Answer the question by taking turns of Thought, Action and Observation. A Thought says what you know and what you
still need. An Action is one of
  search[term]    look up a term in the encyclopedia and read the first sentences
  lookup[word]    find the next sentence that has this word in it
  finish[answer]  end with the answer
An Observation is the result of the action; you do not write it yourself. Keep thoughts short. Never invent results.

Question: What is the chemical symbol of the metal that is liquid at room temperature?
Thought 1: I need to find which metal is liquid at room temperature. Action: search[liquid metal]
Observation 1: Mercury is the only metal that is liquid at room temperature. It was used in thermometers.
Thought 2: The metal is mercury. I need its chemical symbol. Action: search[mercury symbol]
Observation 2: The chemical symbol of mercury is Hg, from the Greek word for liquid silver.
Thought 3: I know the symbol, so I can answer. Action: finish[Hg]
Answer: Hg

Question: How many legs does the animal have that spins webs?
Thought 1: I need to find which animal spins webs. Action: search[animal that spins webs]
Observation 1: Spiders spin webs of silk to catch insects.
Thought 2: The animal is a spider. I need the number of its legs. Action: search[spider legs]
Observation 2: Spiders have eight legs, unlike insects, which have six.
Thought 3: I know the number of legs, so I can answer. Action: finish[eight]
Answer: eight

"""


@sgl.function
def react(s, question, observations, step_tokens):
    s += INSTRUCTIONS + "Question: " + question + "\n"
    for i, observation in enumerate(observations, 1):
        s += f"Thought {i}:" + sgl.gen(f"thought {i}", max_tokens=step_tokens, stop="Observation")
        s += f"\nObservation {i}: {observation}\n"
    s += "Answer:" + sgl.gen("answer", max_tokens=16, stop="\n")
    return [s[f"thought {i}"] for i in range(1, len(observations) + 1)] + [s["answer"]]


@programs("react", "agents: each step continues the whole trace; instructions shared by all", options=["data"])
def build(setting: Setting) -> Programs:
    rng = setting.rng(0)
    questions = read(setting.data) if setting.data is not None else two_hops()
    rng.shuffle(questions)
    tokens = 200 if setting.on_gpu else 16 if setting.quick else 48
    count = setting.count(gpu=100, cpu=8, quick=3)
    calls = [
        {"question": question, "observations": observations[:STEPS], "step_tokens": tokens}
        for question, observations in questions[:count]
    ]
    return Programs(react, calls)


def two_hops() -> list[tuple[str, list[str]]]:
    """Questions that take two look-ups, from the tables of facts, with what the look-ups find."""
    continent = {country: name for name, countries in CONTINENTS.items() for country in countries}
    found = []
    for country, capital in CAPITALS:
        if country not in continent:
            continue
        near = [other for other in CONTINENTS[continent[country]] if other != country][:5]
        question = f"On which continent is the country whose capital is {capital}?"
        observations = [
            f"{capital} is the capital of {country} and the seat of its government.",
            f"{country} is a country in {continent[country]}. Its capital is {capital}.",
            f"Other countries in {continent[country]} are {', '.join(near)}.",
            f"No more results for {capital}.",
        ]
        found.append((question, observations))
    return found


def read(path: Path) -> list[tuple[str, list[str]]]:
    """(question, paragraphs) of HotpotQA's .json.  Raises BenchError for anything else."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [(row["question"], [f"{title}: {''.join(text)}" for title, text in row["context"]]) for row in rows]
    except OSError as error:
        raise BenchError(f"--data: cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"--data: {path}: expected HotpotQA's list of question, answer and context") from None
