"""Retrieve, then answer: questions that find the same documents share them as a prefix.

    | instructions | document 7 | document 2 | question 1 |       BM25 ranks the documents for each question (rank-bm25)
    | instructions | document 7 | document 2 | question 2 |       and the best two go into the prompt, best first
    | instructions | document 7 | document 5 | question 3 |
    | instructions | document 3 | ...

Nobody says which questions will share what: that depends on the retriever, and the tree finds out.
"""

from __future__ import annotations

import random
import re

import minisgl as sgl

from ..facts import ANIMALS, CAPITALS, CATEGORIES, CONTINENTS, ELEMENTS, QUANTITIES, SPANISH
from ..programs import BenchError, Programs, Setting, programs

DOCUMENTS = 2
INSTRUCTIONS = (
    "Answer the question from the documents in a few words. If the documents do not say it, answer that you do not "
    "know.\n\n"
)


@sgl.function
def answer_from(s, documents, question):
    s += INSTRUCTIONS
    for document in documents:
        s += "Document: " + document + "\n\n"
    s += "Question: " + question + "\nAnswer:" + sgl.gen("answer", max_tokens=8, stop="\n")
    return s["answer"]


@programs("rag", "BM25 finds two documents for each question: questions on one topic share them")
def build(setting: Setting) -> Programs:
    rng = setting.rng(0)
    documents, questions = corpus()
    count = setting.count(gpu=400, cpu=60, quick=24)
    asked = on_few_topics(rng, questions, count)
    retriever = Retriever(documents)
    calls = [{"documents": retriever.best(question, DOCUMENTS), "question": question} for question, _ in asked]
    answers = [answer for _, answer in asked]
    return Programs(answer_from, calls, lambda i, text: answers[i].lower() in text.lower())


def on_few_topics(rng: random.Random, questions: list[list[tuple[str, str]]], count: int) -> list[tuple[str, str]]:
    """`count` questions, in random order, about a sixth as many documents: people ask about the same things."""
    topics = rng.sample(questions, min(len(questions), -(-count // 6)))
    found = [topics[i % len(topics)][i // len(topics) % len(topics[i % len(topics)])] for i in range(count)]
    rng.shuffle(found)
    return found


class Retriever:
    """Okapi BM25 over words.  Raises BenchError, with the pip command, without rank-bm25."""

    def __init__(self, documents: list[str]):
        try:
            from rank_bm25 import BM25Okapi
        except ImportError as error:
            raise BenchError("the rag workload needs rank_bm25: pip install rank-bm25") from error
        self.documents = documents
        self._index = BM25Okapi([_words(document) for document in documents])

    def best(self, query: str, n: int) -> list[str]:
        """The n documents that match best, best first; equals in the order of the corpus."""
        scores = self._index.get_scores(_words(query))
        ranked = sorted(range(len(self.documents)), key=lambda i: (-scores[i], i))
        return [self.documents[i] for i in ranked[:n]]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def corpus() -> tuple[list[str], list[list[tuple[str, str]]]]:
    """Documents of about 150 tokens, twelve facts each; for each document (question, answer) of its facts."""
    documents: list[str] = []
    questions: list[list[tuple[str, str]]] = []

    def add(title: str, facts: list[tuple[str, str, str]]) -> None:
        for i in range(0, len(facts), 12):
            part = facts[i : i + 12]
            documents.append(f"{title}, part {i // 12 + 1}. " + " ".join(sentence for sentence, _, _ in part))
            questions.append([(question, answer) for _, question, answer in part])

    home = {country: name for name, countries in CONTINENTS.items() for country in countries}
    for continent in CONTINENTS:
        there = [(country, city) for country, city in CAPITALS if home.get(country) == continent]
        add(f"Capitals of {continent}", [(f"The capital of {c} is {x}.", f"What is the capital of {c}?", x)
                                         for c, x in there])  # fmt: skip
    add("Chemistry", [(f"The symbol of {e} is {x}.", f"What is the chemical symbol of {e}?", x) for e, x in ELEMENTS])
    add("Spanish", [(f"{w} means {x}.", f"What does the Spanish word {w} mean?", x) for w, x in SPANISH])
    add("Numbers", [(f"There are {x} {q}.", f"What is the number of {q}?", x) for q, x in QUANTITIES])
    for table in (ANIMALS, CATEGORIES):
        for kind, words in table.items():
            facts = [(f"A {word} is a {kind}.", f"What is a {word}, a {kind} or not?", kind) for word in words]
            add(f"About every {kind}", facts)
    return documents, questions
