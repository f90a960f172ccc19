"""How long a constrained request waits for its grammar: `bench.py --grammar`.

For each engine, over the 200 schemas of `grammar_schemas`:

    first mask   from the schema as text to the mask of the first token: what the time to first token pays
    next mask    at every further token of a text that one of the engines wrote: what each decode step pays,
                 unless the mask is worked out while the device is busy with the step

The same texts are walked by all engines, cut into tokens by the tokenizer; an engine that refuses a schema, or a
text (another key order, say), is counted. Engines run one after the other in one process, single-threaded.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field

import numpy as np

from ..expressions import GrammarError
from ..grammar import FsmConstraint, GrammarCompiler, GrammarSpec
from ..token_masks import unpack
from ..tokenizer import BaseTokenizer
from .grammar_schemas import realistic_schemas

ENGINES = ("fsm", "llguidance", "xgrammar")


@dataclass
class Timing:
    """Seconds, one entry a measurement."""

    engine: str
    first: list[float] = field(default_factory=list)
    following: list[float] = field(default_factory=list)
    refused: int = 0
    rejected: int = 0

    def figures(self) -> dict[str, float | str | int]:
        """Milliseconds for first masks, microseconds for the following."""

        def at(values: list[float], percent: float, unit: float) -> float:
            return round(float(np.percentile(values, percent)) * unit, 2) if values else float("nan")

        return {
            "engine": self.engine,
            "first_p50_ms": at(self.first, 50, 1e3),
            "first_p99_ms": at(self.first, 99, 1e3),
            "next_p50_us": at(self.following, 50, 1e6),
            "next_p99_us": at(self.following, 99, 1e6),
            "masks": len(self.following),
            "refused": self.refused,
            "rejected_texts": self.rejected,
        }


def example_texts(tokenizer: BaseTokenizer, count: int = 200, seed: int = 0) -> list[tuple[GrammarSpec, list[int]]]:
    """(schema, token ids of a text that satisfies it): random walks through our own masks that prefer letters and
    digits, at most 120 tokens long (a text may end unfinished: what counts is the way)."""
    rng = random.Random(seed)
    compiler = GrammarCompiler(tokenizer, "fsm")
    plain = np.array([piece.isascii() and piece.strip().isalnum() for piece in tokenizer.all_token_bytes()])
    found = []
    for _, schema in realistic_schemas()[:count]:
        spec = GrammarSpec("json_schema", json.dumps(schema), "")
        constraint = compiler.compile(spec).start()
        assert isinstance(constraint, FsmConstraint)
        ids: list[int] = []
        while len(ids) < 120 and not constraint.must_stop():
            forced = constraint.forced_tokens()
            legal = unpack(constraint.mask(), tokenizer.vocab_size)
            legal[list(tokenizer.special_ids)] = False
            wanted = np.flatnonzero(legal & plain) if rng.random() < 0.7 else np.flatnonzero(legal)
            if not len(wanted):
                wanted = np.flatnonzero(legal)
            for token in forced or [int(rng.choice(wanted))]:
                constraint.accept(token)
                ids.append(token)
        found.append((spec, ids))
    return found


def measure(tokenizer: BaseTokenizer, engine: str, texts: list[tuple[GrammarSpec, list[int]]]) -> Timing:
    """Time one engine. Raises ImportError when it isn't installed."""
    compiler = GrammarCompiler(tokenizer, engine)
    compiler.compile(GrammarSpec("regex", "a")).start().mask()  # once per tokenizer, not per request
    timing = Timing(engine)
    for spec, ids in texts:
        begin = time.perf_counter()
        try:
            constraint = compiler.compile(spec).start()
            constraint.mask()
        except GrammarError:
            timing.refused += 1
            continue
        timing.first.append(time.perf_counter() - begin)
        for token in ids:
            if not constraint.accept(token):
                timing.rejected += 1
                break
            begin = time.perf_counter()
            constraint.mask()
            timing.following.append(time.perf_counter() - begin)
    return timing


def report(tokenizer: BaseTokenizer, engines: tuple[str, ...] = ENGINES, count: int = 200) -> str:
    """A Markdown table of all engines that are installed, then one line of JSON."""
    texts = example_texts(tokenizer, count)
    rows = []
    for engine in engines:
        try:
            rows.append(measure(tokenizer, engine, texts).figures())
        except ImportError as error:
            rows.append({"engine": engine, "error": str(error)})
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(keys) + " |", "|" + " --- |" * len(keys)]
    lines += ["| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join([*lines, json.dumps({"vocabulary": tokenizer.vocab_size, "engines": rows})])
