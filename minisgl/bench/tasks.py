"""Multiple-choice questions, made from `facts`: one `Subject` for every kind of question.

A subject is a list of *items* (what can be asked about) and a function that turns one item into a `Question`
with four options, using a random generator for the wrong options and the order. A question is written out as

    Question: What is the capital of Peru? Choices: Belgrade, Budapest, Addis Ababa, Lima.
    Answer: The capital of Peru is Lima

and the model's next token after "is" is its answer, right if it is the first token of the right option.  Why
not a letter, as MMLU has it: a model of 135 million parameters knows many of these facts and can't yet bind a
letter to an option.  On the default model (15 subjects x 12 questions; chance 0.25) letters score 0.18, the
option's word after a bare "Answer:" 0.36 to 0.42, the word at the end of a sentence 0.62.  It is the same
work for the engine: one token, the likeliest of the whole vocabulary, is compared with the right one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from . import facts


@dataclass(frozen=True)
class Question:
    """`options[answer]` is right and completes the sentence that `stem` begins; the other three are wrong."""

    text: str
    stem: str
    options: tuple[str, ...]
    answer: int

    @property
    def prompt(self) -> str:
        """The question up to the point where the model answers."""
        return f"Question: {self.text} Choices: {', '.join(self.options)}.\nAnswer: {self.stem}"

    @property
    def shot(self) -> str:
        """The question with its answer: a worked example."""
        return f"{self.prompt} {self.options[self.answer]}\n\n"


@dataclass(frozen=True)
class Subject:
    """`title` completes the sentence "The following are questions about ..."."""

    name: str
    title: str
    items: Sequence[Any]
    ask: Callable[[Any, random.Random], Question]

    @property
    def header(self) -> str:
        return f"The following are questions about {self.title}, with answers.\n\n"


def choices(text: str, stem: str, right: str, others: Iterable[str], rng: random.Random) -> Question:
    """A question with `right` among three of `others` (those different from it), in random order."""
    options = [right, *rng.sample(sorted(set(others) - {right}), 3)]
    rng.shuffle(options)
    return Question(text, stem, tuple(options), options.index(right))


def article(noun: str) -> str:
    """`"owl"` -> `"an owl"` (by the first letter, which is enough for the nouns of `facts`)."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def table(name: str, title: str, pairs: list[tuple[str, str]], text: str, stem: str) -> Subject:
    """Asks for the value that belongs to a key; the wrong options are other values of the table."""
    values = [value for _, value in pairs]

    def ask(item: tuple[str, str], rng: random.Random) -> Question:
        return choices(text.format(item[0]), stem.format(item[0]), item[1], values, rng)

    return Subject(name, title, pairs, ask)


def _arithmetic() -> Subject:
    words = facts.NUMBERS
    items = [(a, b) for a, b in product(range(1, 10), repeat=2) if a + b <= 12]

    def ask(item: tuple[int, int], rng: random.Random) -> Question:
        a, b = item
        near = words[max(0, a + b - 4) : a + b + 5]
        stem = f"{words[a].capitalize()} plus {words[b]} equals"
        return choices(f"What is {words[a]} plus {words[b]}?", stem, words[a + b], near, rng)

    return Subject("arithmetic", "adding", items, ask)


def _reading() -> Subject:
    """A text of one sentence, to be read: nothing in it can be known beforehand."""

    def ask(item: tuple[str, str], rng: random.Random) -> Question:
        name, thing = item
        place = rng.choice(facts.PLACES)
        text = f"{name} took a bus and forgot the {thing} in the {place}. Where is the {thing}?"
        return choices(text, f"{name} left the {thing} in the", place, facts.PLACES, rng)

    return Subject("reading", "short texts", list(product(facts.NAMES, facts.THINGS)), ask)


def _animals() -> Subject:
    items = [(animal, kind) for kind, animals in facts.ANIMALS.items() for animal in animals]

    def ask(item: tuple[str, str], rng: random.Random) -> Question:
        animal = article(item[0])
        text, stem = f"What kind of animal is {animal}?", f"{animal.capitalize()} is a kind of"
        return choices(text, stem, item[1], facts.ANIMALS, rng)

    return Subject("animals", "animals", items, ask)


def _categories() -> Subject:
    items = [(category, word) for category, words in facts.CATEGORIES.items() for word in words]

    def ask(item: tuple[str, str], rng: random.Random) -> Question:
        category, word = item
        different = rng.sample(sorted(set(facts.CATEGORIES) - {category}), 3)
        others = [rng.choice([w for w in facts.CATEGORIES[name] if w != word]) for name in different]
        while len(set(others)) < 3:  # a word of two categories was drawn twice
            others = [rng.choice([w for w in facts.CATEGORIES[name] if w != word]) for name in different]
        return choices(f"Which of these is {article(category)}?", f"The {category} is", word, others, rng)

    return Subject("categories", "words and what they name", items, ask)


def _continents() -> Subject:
    items = [
        (country, continent) for continent, countries in facts.CONTINENTS.items() for country in countries
    ]
    text, stem = "On which continent is {}?", "{} is a country in"
    return table("continents", "countries", items, text, stem)


def _all() -> list[Subject]:
    f = facts
    return [
        table("capitals", "capital cities", f.CAPITALS, "What is the capital of {}?", "The capital of {} is"),
        table(
            "elements",
            "chemistry",
            f.ELEMENTS,
            "What is the chemical symbol of {}?",
            "The chemical symbol of {} is",
        ),
        _arithmetic(),
        table("antonyms", "opposites", f.ANTONYMS, 'What is the opposite of "{}"?', "The opposite of {} is"),
        table("plurals", "plurals", f.PLURALS, 'What is the plural of "{}"?', "One {}, many"),
        table(
            "past_tenses",
            "verbs",
            f.PAST_TENSES,
            'What is the past tense of "{}"?',
            "Today I {}, yesterday I",
        ),
        _reading(),
        _animals(),
        table("quantities", "numbers", f.QUANTITIES, "What is the number of {}?", "The number of {} is"),
        table(
            "spanish",
            "Spanish words",
            f.SPANISH,
            'What does the Spanish word "{}" mean?',
            "The Spanish word {} means",
        ),
        _continents(),
        _categories(),
    ]


SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in _all()}
