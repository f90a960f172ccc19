"""Forced bytes and forced tokens after each prefix of example texts.

The bytes (tests/data/jump_forward_cases.json) don't depend on a tokenizer; they were computed by llguidance and
confirmed by xgrammar. The tokens are what llguidance would append with Llama 3's tokenizer, after holding back a
tail that a longer legal token could claim: we may force fewer, never others.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from minisgl.automaton import DEAD, START
from minisgl.fsm import Grammar
from minisgl.tokenizer import BaseTokenizer, Tokenizer

from .real_tokenizers import load

CASES = json.loads((Path(__file__).parent / "data" / "jump_forward_cases.json").read_text(encoding="utf-8"))["cases"]
IDS = [case["regex"][:30] for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_forced_bytes(case):
    grammar = Grammar.from_regex(case["regex"])
    assert grammar.matches(case["example"])
    for step in case["steps"]:
        prefix = step["prefix"].encode()
        assert grammar.forced(prefix).hex() == step["forced_bytes_hex"], prefix
        assert grammar.matches(prefix) == step["can_stop_here"], prefix


@pytest.fixture(scope="module")
def smol(default_model_folder):
    return Tokenizer(default_model_folder)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_forced_tokens_are_those_of_the_whole_text(case, smol):
    check_forced_tokens(case, smol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "tekken", "mistral", "qwen"])
def test_forced_tokens_with_real_tokenizers(name):
    for case in CASES:
        check_forced_tokens(case, load(name))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_forced_tokens_agree_with_llguidance(case):
    llama = load("llama3")
    tokens = Grammar.from_regex(case["regex"]).compile(llama)
    for step in case["steps"]:
        state = tokens.automaton.step(START, step["prefix"].encode())
        ours = [llama.token_bytes(i).decode("latin-1") for i in tokens.forced_tokens(state)]
        assert ours == step["canonical_forced_tokens"][: len(ours)], step["prefix"]


def check_forced_tokens(case: dict, tokenizer: BaseTokenizer) -> None:
    """From the start and at a few boundaries: the tokens of any completed text begin with the forced ones."""
    grammar = Grammar.from_regex(case["regex"])
    tokens = grammar.compile(tokenizer)
    rng = random.Random(case["regex"])
    state, done, at_boundary = tokens.start, 0, True
    data = case["example"].encode()
    while at_boundary and done <= len(data):
        forced = tokens.forced_tokens(state)
        spelt = b"".join(tokenizer.token_bytes(i) for i in forced)
        assert grammar.automaton.forced(state)[0].startswith(spelt)
        for _ in range(8 if forced else 0):
            rest = complete(grammar, state, rng)
            if rest is not None:
                assert canonical(tokenizer, rest)[: len(forced)] == forced, (forced, rest)
        following = forced or canonical(tokenizer, data[done:].decode("utf-8", "ignore"))[:1]
        if not following:
            break
        done += sum(len(tokenizer.token_bytes(i)) for i in following)
        after = tokens.advance_all(state, following)
        at_boundary = after is not None and data[:done].decode("utf-8", "ignore").encode() == data[:done]
        state = after if after is not None else DEAD


def complete(grammar: Grammar, state: int, rng: random.Random) -> str | None:
    """A random text that finishes the grammar from `state`; None when it gets long."""
    data = bytearray()
    while len(data) < 120:
        ways = grammar.automaton.ways(state)
        if grammar.automaton.accepting[state] and (not ways or rng.random() < 0.2):
            return data.decode("utf-8", "ignore")
        byte, state = rng.choice([way for way in ways if way[0] < 0x80] or ways)
        data.append(byte)
    return None


def canonical(tokenizer: BaseTokenizer, text: str) -> list[int]:
    """Tokens of a text that stands inside another one: SentencePiece's leading space is avoided by a line break."""
    ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    if b"".join(map(tokenizer.token_bytes, ids)) == text.encode():
        return ids
    ids = [int(i) for i in tokenizer.encode("\n" + text, add_special_tokens=False)]
    while b"".join(map(tokenizer.token_bytes, ids)) != text.encode():
        ids = ids[1:]
    return ids
