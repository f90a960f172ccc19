"""Generative agents: a small town's inhabitants ask a model five kinds of question about every event.

    | how poignant is ...  instructions, examples | person | event |  -> a digit
    | describe as a triple ...                    | person | event |  -> a few words
    | two signs for ...                           |        | event |  -> a word
    | which part of town ...                      | person | event |  -> a place
    | which object ...                            | person | place |  -> a thing

Five templates, filled in over and over as the simulation goes on: the template's text is the shared prefix, the event
stream mixes the five, and the tree sorts them out.  Answers are short, so prompts are all of the work.
"""

from __future__ import annotations

import random

import minisgl as sgl

from ..facts import NAMES, PLACES, THINGS
from ..programs import Programs, Setting, programs

_TOWN = (
    "The town has a kitchen, a garden, a school, a library, a park, an office, a station, a hospital, a church, a "
    "market, a museum and a bakery. People work in the morning, meet each other at noon, and rest in the evening. "
    "They remember what happened to them and plan their day with it. "
)
TEMPLATES = {
    "poignancy": _TOWN
    + "On a scale of 1 to 9, where 1 is purely mundane (for example, brushing teeth or making the bed) and 9 is "
    "extremely poignant (for example, a break-up or the birth of a child), rate how poignant an event is for a person. "
    "Answer with the number alone.\n\nPerson: Rosa, a baker\nEvent: Rosa sweeps the floor\nRating: 1\n\n"
    "Person: Karl, a teacher\nEvent: Karl's oldest friend moves away\nRating: 7\n\n"
    "Person: {person}\nEvent: {event}\nRating:",
    "triple": _TOWN
    + "Turn an event into a triple of subject, predicate and object.\n\n"
    "Event: Rosa sweeps the floor\nTriple: (Rosa, sweeps, floor)\n\nEvent: Karl reads a book to his class\n"
    "Triple: (Karl, reads, book)\n\nEvent: The nurse waits for the bus\nTriple: (nurse, waits for, bus)\n\n"
    "Person: {person}\nEvent: {event}\nTriple: (",
    "signs": _TOWN
    + "Give one word that a map of the town could show next to a person who is doing something.\n\n"
    "Event: Rosa sweeps the floor\nWord: cleaning\n\nEvent: Karl reads a book to his class\nWord: reading\n\n"
    "Event: The nurse waits for the bus\nWord: waiting\n\nPerson: {person}\nEvent: {event}\nWord:",
    "place": _TOWN
    + "Say to which part of the town a person should go for what they plan to do. Stay where you are if that will do. "
    "\n\nPerson: Rosa, a baker\nPlan: bake bread for tomorrow\nPlace: bakery\n\nPerson: Karl, a teacher\n"
    "Plan: see the paintings\nPlace: museum\n\nPerson: {person}\nPlan: talk about this: {event}\nPlace:",
    "object": _TOWN
    + "Say which thing a person uses for what they are doing.\n\nPerson: Rosa, a baker\nEvent: Rosa cleans the shop\n"
    "Thing: broom\n\nPerson: Karl, a teacher\nEvent: Karl writes a sum for the class\nThing: chalk\n\n"
    "Person: {person}\nEvent: {event}\nThing:",
}
TOKENS = {"poignancy": 2, "triple": 12, "signs": 4, "place": 4, "object": 6}
JOBS = ("a baker", "a teacher", "a nurse", "a painter", "a clerk", "a gardener", "a student", "a driver")


@sgl.function
def ask_agent(s, template, person, event, tokens):
    s += template.format(person=person, event=event)
    s += sgl.gen("answer", max_tokens=tokens, stop="\n")
    return s["answer"]


@programs("generative-agents", "five templates over an event stream: the template is the shared prefix")
def build(setting: Setting) -> Programs:
    rng = setting.rng(0)
    count = setting.count(gpu=1000, cpu=120, quick=30)
    return Programs(ask_agent, [_question(rng) for _ in range(count)])


def _question(rng: random.Random) -> dict:
    kind = rng.choice(list(TEMPLATES))
    name = rng.choice(NAMES)
    person = f"{name}, {JOBS[NAMES.index(name) % len(JOBS)]}"
    thing, place, other = rng.choice(THINGS), rng.choice(PLACES), rng.choice([n for n in NAMES if n != name])
    event = rng.choice(
        [
            f"{name} finds the {thing} in the {place}",
            f"{name} and {other} meet at the {place}",
            f"{name} forgets the {thing} at the {place}",
            f"{name} tells {other} about the {thing}",
        ]
    )
    return {"template": TEMPLATES[kind], "person": person, "event": event, "tokens": TOKENS[kind]}
