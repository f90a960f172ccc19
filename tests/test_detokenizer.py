"""Incremental detokenisation: deltas add up to decode(prompt + output) minus the prompt, whatever the ids."""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.detokenizer import MAX_PENDING, Detokenizer
from minisgl.tokenizer import ByteTokenizer, Tokenizer

from . import tiny_tokenizers as tiny

PEPPER = "🌶".encode()  # U+1F336: F0 9F 8C B6


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {name: Tokenizer(tiny.save(make(), folder / name)) for name, make in tiny.FAMILIES.items()}
    return {**made, "bytes": ByteTokenizer(["né", b"\xf0\x9f", b"\x8c\xb6!", " word"])}


@pytest.fixture(scope="module")
def word_piece(tmp_path_factory) -> Tokenizer:
    return Tokenizer(tiny.save(tiny.word_piece(), tmp_path_factory.mktemp("word_piece")))


def byte_id(tokenizer, byte: int) -> int:
    return tokenizer.all_token_bytes().index(bytes([byte]))


def byte_ids(tokenizer, data: bytes) -> list[int]:
    return [byte_id(tokenizer, byte) for byte in data]


def stream(tokenizer, prompt, output, skip=True, cuts=None) -> list[str]:
    """The deltas (the last one from finish); the output is cut into calls at `cuts`, or after every token."""
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    edges = [0, *sorted(cuts), len(output)] if cuts is not None else range(len(output) + 1)
    deltas = [detokenizer.push(output[a:b]) for a, b in pairwise(edges)]
    return [*deltas, detokenizer.finish()]


def expected(tokenizer, prompt, output, skip=True) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    return whole[len(os.path.commonprefix([before, whole])) :]  # noqa: RUF071


# ---- the cases


@pytest.mark.parametrize("name", ["byte_level", "llama2", "bytes"])
def test_detok_never_commits_on_byte_fallback(tokenizers, name):
    tokenizer = tokenizers[name]
    for byte in (0xFF, 0x80, 0xE2):
        detokenizer, text, longest = Detokenizer(tokenizer, ()), "", 0
        for count in range(1, 2001):
            text += detokenizer.push([byte_id(tokenizer, byte)])
            longest = max(longest, count - len(text))
        assert longest <= 4  # at most the bytes of one unfinished character wait
        text += detokenizer.finish()
        assert text == "\ufffd" * 2000


def test_detok_never_commits_time_is_linear(tokenizers):
    tokenizer = tokenizers["llama2"]

    def seconds(count: int) -> float:
        detokenizer, bad = Detokenizer(tokenizer, ()), [byte_id(tokenizer, 0xFF)]
        start = time.perf_counter()
        for _ in range(count):
            detokenizer.push(bad)
        return time.perf_counter() - start

    seconds(1000)
    small, large = min(seconds(2000) for _ in range(3)), min(seconds(20000) for _ in range(3))
    assert large < 40 * small  # 10 times the tokens; quadratic would be 100 times


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma", "bytes"])
def test_detok_leaks_prompt_on_partial_utf8(tokenizers, name):
    tokenizer = tokenizers[name]
    prompt = [*tokenizer.encode("Hello world ").tolist(), *byte_ids(tokenizer, PEPPER[:2])]
    output = [*byte_ids(tokenizer, PEPPER[2:]), *tokenizer.encode("hot", add_special_tokens=False).tolist()]
    deltas = stream(tokenizer, prompt, output)
    assert deltas[0] == "" and deltas[1] == "🌶"
    assert (
        "".join(deltas) == expected(tokenizer, prompt, output) == "🌶" + tokenizer.decode(prompt + output)[13:]
    )
    assert "Hello" not in "".join(deltas)


def test_detok_leaks_prompt_when_the_fragment_stays_broken(tokenizers):
    for name in ("byte_level", "llama2", "bytes"):
        tokenizer = tokenizers[name]
        prompt = [*tokenizer.encode("Hello world ").tolist(), *byte_ids(tokenizer, PEPPER[:2])]
        output = byte_ids(tokenizer, b"abc")
        # the prompt's own text shows the fragment as U+FFFD: the output is only what follows
        assert "".join(stream(tokenizer, prompt, output)) == expected(tokenizer, prompt, output) == "abc"
        assert stream(tokenizer, prompt, []) == [""]


# ---- one character, several tokens


def test_a_character_is_emitted_when_its_last_byte_arrives(tokenizers):
    for name in ("byte_level", "llama2", "bytes"):
        tokenizer = tokenizers[name]
        text = "é你🌶"
        deltas = stream(tokenizer, byte_ids(tokenizer, b"x"), byte_ids(tokenizer, text.encode()))
        assert deltas == ["", "é", "", "", "你", "", "", "", "🌶", ""]


def test_finish_emits_the_broken_tail(tokenizers):
    for name, shown in (("byte_level", "\ufffd"), ("llama2", "\ufffd\ufffd\ufffd")):
        tokenizer = tokenizers[name]
        ids = byte_ids(tokenizer, PEPPER[:3])
        assert "".join(stream(tokenizer, byte_ids(tokenizer, b"x"), ids)) == shown
        assert shown in tokenizer._backend.decode([byte_id(tokenizer, ord("x")), *ids])


def test_valid_characters_survive_in_a_broken_byte_fallback_run(tokenizers):
    """The documented difference from the tokenizers library, whose answer changes text already streamed."""
    tokenizer = tokenizers["llama2"]
    ids = byte_ids(tokenizer, "€".encode() + b"\xff")
    assert tokenizer.decode(ids) == "€\ufffd"
    assert tokenizer._backend.decode(ids) == "\ufffd" * 4


# ---- spaces and special tokens


def test_sentencepiece_leading_space(tokenizers):
    tokenizer = tokenizers["llama2"]
    ids = tokenizer.encode("the dog").tolist()
    assert ids[0] == tokenizer.bos_id
    assert "".join(stream(tokenizer, [], ids)) == "the dog"
    assert (
        "".join(stream(tokenizer, ids[:1], ids[1:])) == "the dog"
    )  # nothing visible before: dummy space dropped
    assert "".join(stream(tokenizer, ids, ids[1:])) == " the dog"  # after text it is a space
    assert "".join(stream(tokenizer, ids[:1], ids[1:], skip=False)) == " the dog"  # "<s>" is text then


def test_metaspace_leading_space(tokenizers):
    tokenizer = tokenizers["unigram"]
    ids = tokenizer.encode("hello world").tolist()
    assert "".join(stream(tokenizer, ids[:1], ids[1:])) == "hello world"
    assert "".join(stream(tokenizer, ids, ids[1:])) == " hello world"


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma", "unigram", "bytes"])
@pytest.mark.parametrize("skip", [True, False])
def test_output_begins_with_special_token(tokenizers, name, skip):
    tokenizer = tokenizers[name]
    prompt = tokenizer.encode("hello").tolist()
    special = max(tokenizer.special_ids)
    output = [special, *tokenizer.encode("world hello", add_special_tokens=False).tolist(), special]
    text = "".join(stream(tokenizer, prompt, output, skip))
    assert text == expected(tokenizer, prompt, output, skip)
    assert ("im_end" in text or "eos" in text) is not skip


def test_a_special_token_inside_a_character(tokenizers):
    tokenizer = tokenizers["bytes"]
    ids = [*PEPPER[:2], 256, *PEPPER[2:]]
    assert "".join(stream(tokenizer, [], ids)) == "🌶"
    assert "".join(stream(tokenizer, [], ids, skip=False)) == "\ufffd<bos>\ufffd\ufffd"


def test_unknown_ids_are_ignored_and_any_integers_accepted(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("hello", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, np.array([10**6, -1], dtype=np.int32))
    assert detokenizer.push(np.concatenate([ids, [10**6, -1]]).astype(np.int32)) == "hello"
    assert detokenizer.push([]) == ""


# ---- property tests


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma", "unigram", "bytes"])
def test_deltas_add_up(tokenizers, name):
    tokenizer = tokenizers[name]
    any_id = st.integers(0, tokenizer.vocab_size + 2)
    # single bytes of multi-byte characters, so that sequences break and heal often
    odd = b"\xe2\x82\xac\xf0\x9f\x8c\xb6\xc3\xff\xef\xbf\xbd " if name != "unigram" else b"a"
    ids = st.lists(any_id | st.sampled_from(byte_ids(tokenizer, odd)), max_size=12)

    @settings(max_examples=150, deadline=None)
    @given(ids, ids, st.booleans(), st.data())
    def check(prompt, output, skip, data):
        cuts = data.draw(st.lists(st.integers(0, len(output)), max_size=4))
        whole = expected(tokenizer, prompt, output, skip)
        assert "".join(stream(tokenizer, prompt, output, skip)) == whole
        assert "".join(stream(tokenizer, prompt, output, skip, cuts)) == whole

    check()


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma", "unigram"])
def test_decode_equals_the_library(tokenizers, name):
    """On random ids; with byte fallback, where a byte run is one whole character or holds no valid one."""
    tokenizer = tokenizers[name]
    if name in ("llama2", "gemma"):
        bytes_ = set(byte_ids(tokenizer, bytes(range(256))))
        text = st.sampled_from([i for i in range(tokenizer.vocab_size + 2) if i not in bytes_])
        run = st.characters(codec="utf-8").map(lambda c: byte_ids(tokenizer, c.encode()))
        bad = st.lists(st.sampled_from(byte_ids(tokenizer, b"\xff\xe2\xc3")), max_size=3)
        piece = st.tuples(run | bad, text).map(lambda pair: [*pair[0], pair[1]])
        # a skipped special token doesn't end a run, so a visible one has to
        visible = st.sampled_from([i for i in range(261, tokenizer.vocab_size) if tokenizer.token_bytes(i)])
        sequences = st.lists(st.tuples(piece, visible).map(lambda pair: [*pair[0], pair[1]]), max_size=6).map(
            lambda parts: [token for part in parts for token in part]
        )
    else:
        sequences = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=20)

    @settings(max_examples=150, deadline=None)
    @given(sequences, st.booleans())
    def check(ids, skip):
        assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)

    check()


def test_one_byte_at_a_time_equals_python(tokenizers):
    @settings(max_examples=200, deadline=None)
    @given(st.binary(max_size=20))
    def check(data):
        assert "".join(stream(tokenizers["bytes"], [], list(data))) == data.decode(errors="replace")

    check()


# ---- decoders that aren't byte concatenation: the window


def test_word_piece(word_piece):
    text = "the quick brown fox, isn't it?"
    ids = word_piece.encode(text).tolist()
    for cut in range(len(ids)):
        joined = "".join(stream(word_piece, ids[:cut], ids[cut:]))
        assert joined == expected(word_piece, ids[:cut], ids[cut:])


def test_word_piece_random_ids(word_piece):
    rng = random.Random(0)
    for _ in range(60):
        ids = [rng.randrange(word_piece.vocab_size) for _ in range(40)]
        cut = rng.randrange(40)
        for skip in (True, False):
            joined = "".join(stream(word_piece, ids[:cut], ids[cut:], skip))
            assert joined == expected(word_piece, ids[:cut], ids[cut:], skip)


def test_window_is_bounded():
    """A decoder that gives U+FFFD for ever, the worst case, commits every few ids, from short windows."""

    class Bad:
        text_rule, special_ids, longest = None, frozenset(), 0

        def decode(self, ids, skip_special_tokens=True):
            self.longest = max(self.longest, len(ids))
            return "\ufffd" * len(ids)

    tokenizer = Bad()
    detokenizer, text = Detokenizer(tokenizer, []), ""  # pyright: ignore[reportArgumentType]
    for count in range(1, 2001):
        text += detokenizer.push([7])
        assert count - len(text) < MAX_PENDING
    assert text + detokenizer.finish() == "\ufffd" * 2000
    assert tokenizer.longest <= 4 * MAX_PENDING


# ---- the default model's tokenizer


def test_default_model(default_model_folder):
    tokenizer = Tokenizer(default_model_folder)
    text = "Hello, world!\n\n  def f(x):\n\treturn 'naïve' + \"你好\" + '👩‍👩‍👧🌶'  # 12345\n"
    ids = tokenizer.encode(text).tolist()
    for cut in range(len(ids) + 1):
        assert "".join(stream(tokenizer, ids[:cut], ids[cut:])) == expected(tokenizer, ids[:cut], ids[cut:])
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(30)]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)
            assert "".join(stream(tokenizer, ids[:15], ids[15:], skip)) == expected(
                tokenizer, ids[:15], ids[15:], skip
            )


def test_cost_per_token(default_model_folder):
    tokenizer = Tokenizer(default_model_folder)
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog, 你好 🌶. " * 200).tolist()
    detokenizer = Detokenizer(tokenizer, ids)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for token in ids:
            detokenizer.push([token])
        best = min(best, time.perf_counter() - start)
    assert best / len(ids) < 20e-6  # about 1 us; the bound leaves room for a busy machine
