"""Regexes as grammars: the language, the masks, the budgets.

Languages are compared with Python's `re` on random patterns; masks with a slow reference that feeds every token's
bytes to the automaton one by one.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import sys
import threading
import time

import numpy as np
import pytest

from minisgl import token_classes, token_masks
from minisgl.expressions import Algebra, Budget, GrammarError
from minisgl.fsm import FINISHED, Grammar
from minisgl.token_masks import unpack
from minisgl.token_trie import TokenTrie
from minisgl.tokenizer import ByteTokenizer, Tokenizer

from .grammar_tools import PiecesTokenizer, legal_tokens, random_walk

# ---- languages


@pytest.mark.parametrize(
    "regex, accepted, rejected",
    [
        ("", [""], ["a"]),
        ("abc", ["abc"], ["ab", "abcd"]),
        ("[]a]+", ["]a"], ["b", ""]),
        ("[^]a]", ["b"], ["]", "a"]),
        ("[a-]", ["-"], ["b"]),
        ("a{2,3}", ["aa", "aaa"], ["a", "aaaa"]),
        ("a{,2}", ["", "aa"], ["aaa"]),
        ("a{2,}b", ["aab", "aaaaab"], ["ab"]),
        ("x{0}", [""], ["x"]),
        ("a{b", ["a{b"], ["ab"]),
        ("(?:a|ab)(?:c|bcd)", ["ac", "abcd", "abc"], ["abcdx", "ab"]),
        ("a.c", ["abc", "a😀c"], ["a\nc", "ac"]),
        ("(?s)a.c", ["a\nc"], ["ac"]),
        ("(?i)straße", ["STRAßE", "ſtraße"], ["strasse"]),
        ("(?i:K)", ["k", "K", "\u212a"], ["x"]),
        (r"\d+", ["12", "٣"], ["x", ""]),
        (r"(?a)\d+", ["12"], ["٣"]),
        (r"\x41\u00e9\U0001F600\101", ["Aé😀A"], ["A"]),
        (r"\N{SNOWMAN}", ["☃"], ["x"]),
        (r"[\w-]+@[\w.]+", ["a-b@c.d"], ["@", "a b@c"]),
        (r"\p{Lu}\p{Ll}+", ["Été"], ["été", "E1"]),
        ("(?P<x>a)(?#note)b", ["ab"], ["b"]),
        ("a*?b+?", ["aab", "b"], ["a"]),
        ("^abc$", ["abc"], ["abcd"]),
        ("^a|b$", ["a", "b"], ["ab"]),
        ("(^a|b)c", ["ac", "bc"], ["aac"]),
        ("(a|b$)(c|)", ["ac", "a", "b"], ["bc"]),
        ("a$\n?", ["a", "a\n"], ["a\n\n"]),
        (r"\bfoo\b", ["foo"], ["fo"]),
        (r"foo\b.bar", ["foo bar", "foo-bar"], ["fooxbar"]),
        (r"foo(bar|\b)", ["foo", "foobar"], ["fo"]),
        (r"a\Bb", ["ab"], ["a b"]),
        (r"x*\by", ["y"], ["xy"]),
    ],
)
def test_languages(regex, accepted, rejected):
    grammar = Grammar.from_regex(regex)
    for text in accepted:
        assert grammar.matches(text), text
        assert "\\p" in regex or re.fullmatch(regex, text)
    for text in rejected:
        assert not grammar.matches(text), text


@pytest.mark.parametrize(
    "regex, named",
    [
        ("a**", "multiple repeat"),
        ("foo**", "multiple repeat"),
        ("a{2}{3}", "multiple repeat"),
        ("(", "lacks"),
        (")", "unmatched"),
        ("[", "ends too early"),
        ("*a", "nothing"),
        ("a{3,2}", "repeat count"),
        ("[b-a]", "reversed"),
        ("(?=a)a", "lookahead"),
        ("(?<=a)b", "lookbehind"),
        ("a(?!b)", "negative lookahead"),
        ("(?<!a)b", "negative lookbehind"),
        (r"(a)\1", "back-reference"),
        ("(?P<n>a)(?P=n)", "back-reference"),
        ("(?>a)b", "atomic"),
        ("a*+", "possessive"),
        ("(?(1)a|b)", "conditional"),
        ("(?m)^a", r"\(\?m\)"),
        ("(?x)a b", r"\(\?x\)"),
        ("a(?i)b", "global flags"),
        ("[[:alpha:]]", "POSIX"),
        (r"\G", r"\\G"),
        (r"\q", "unknown escape"),
        (r"(\bfoo)+", "anchor inside a repetition"),
        (r"\p{Nonsense}", "Nonsense"),
        (7, "must be a str"),
        ("(" * 500 + ")" * 500, "nested"),
        ("a{2000000}", "repeat count"),
    ],
)
def test_refusals_name_the_construct(regex, named):
    with pytest.raises(GrammarError, match=named) as error:
        Grammar.from_regex(regex)
    assert isinstance(error.value, ValueError)
    assert "\n" not in str(error.value)


ATOMS = ["a", "b", "c", " ", "\\n", "_", "é", "ß", "k", ".", "[ab]", "[^a]", "\\w", "\\W", "\\s", "\\d", "[a-c]",
         "(?i:k)", "(?i:S)", "\\b", "\\B", "^", "$", "\\A", "\\Z", "x{0}", "[^\\n]", "(?s:.)", "😀"]  # fmt: skip
ALPHABET = "abc \n_éßksKS1xſK😀"


def random_regex(rng: random.Random, depth: int) -> str:
    roll = rng.random()
    if depth == 0 or roll < 0.3:
        return rng.choice(ATOMS)
    if roll < 0.6:
        return "".join(random_regex(rng, depth - 1) for _ in range(rng.randint(1, 4)))
    if roll < 0.8:
        return "(?:" + "|".join(random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))) + ")"
    return "(?:" + random_regex(rng, depth - 1) + ")" + rng.choice(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "*?"])


@pytest.mark.parametrize("seed", range(4))
def test_random_regexes_mean_what_they_mean_in_re(seed):
    """60 patterns a seed, 40 texts each: random ones, and ones that our automaton accepts."""
    rng = random.Random(seed)
    compared = 0
    while compared < 60:
        pattern = random_regex(rng, 3)
        expected = re.compile(pattern)
        try:
            grammar = Grammar.from_regex(pattern)
        except GrammarError as error:  # anchors in repetitions; languages without a word
            assert "anchor inside a repetition" in str(error) or "empty" in str(error)
            continue
        compared += 1
        for _ in range(40):
            text = "".join(rng.choice(ALPHABET) for _ in range(rng.randint(0, 6)))
            if rng.random() < 0.4:
                text = accepted_text(grammar, rng) or text
            assert grammar.matches(text) == bool(expected.fullmatch(text)), (pattern, text)


def accepted_text(grammar: Grammar, rng: random.Random) -> str | None:
    automaton, state, data = grammar.automaton, 1, bytearray()
    while len(data) < 40:
        ways = automaton.ways(state)
        if automaton.accepting[state] and (not ways or rng.random() < 0.3):
            return data.decode()
        byte, state = rng.choice(ways)
        data.append(byte)
    return None


# ---- the algebra


def test_counters_are_not_unrolled():
    grammar = Grammar.from_regex("[a-z]{0,100000}x")
    assert grammar.matches("y" * 5000 + "x")
    assert len(grammar.automaton) < 11_000  # a state or two for each byte that was read


def test_ambiguous_counters_merge():
    begin = time.monotonic()
    grammar = Grammar.from_regex("(a{1,100}){1,100}b")
    assert grammar.matches("a" * 3000 + "b") and not grammar.matches("b")
    assert time.monotonic() - begin < 5


def test_intersections_and_complements():
    algebra = Algebra()
    letters = algebra.repeat(algebra.byte_set((1 << 97) | (1 << 98)), 0, None)
    some = algebra.concat(letters, algebra.literal(b"ab"), letters)
    assert algebra.both(some, algebra.repeat(algebra.byte_set(1 << 97), 0, None)) is algebra.EMPTY
    assert algebra.without(some, letters) is algebra.EMPTY
    assert algebra.both(some, algebra.complement(algebra.complement(some))) is some


def test_literal_alternatives_are_a_trie():
    words = sorted({f"value {n * 7919 % 100003}" for n in range(5000)})
    begin = time.monotonic()
    grammar = Grammar.from_regex("|".join(words))
    assert grammar.matches(words[77]) and not grammar.matches("value")
    assert grammar.forced(b"") == b"value "
    assert time.monotonic() - begin < 30  # not the minutes that states for each of 5,000 alternatives would take
    assert len(grammar.automaton) < 100


@pytest.mark.parametrize(
    "regex",
    [
        "(a|b)*a(a|b){20}",
        "((a{1,100}){1,100}){1,100}",
        "(a?){500}a{500}",
        "(.*a){25}",
        "(x+x+)+y",
        "[\U00010000-\U0010ffff]{0,2000}",
        r"(\w{1,20} ){1,200}\w+",
        "((((a*)*)*)*)*b",
        "(a|b|ab)*c{1000,2000}d",
        "(.*1.*|.*2.*|.*3.*)*(a|b){0,50}(.{0,50}x){0,50}",
        r"(\b\w+\b ?|x){0}" + r"(.{0,30}[0-9]){0,30}",
    ],
)
def test_bombs_are_answered_or_refused_in_time(regex, smol):
    begin = time.monotonic()
    try:
        tokens = Grammar.from_regex(regex).compile(smol)
        state = tokens.start
        for text in ("a", "b", "ab", " ", "x", "a") * 5:
            token = int(smol.encode(text)[0])
            if tokens.is_legal(state, token):
                state = tokens.advance(state, token)
                assert state is not None
    except GrammarError:
        pass
    assert time.monotonic() - begin < 10


def test_budgets_refuse():
    with pytest.raises(GrammarError, match="too big"):
        grammar = Grammar.from_regex("(.{0,60}x){0,60}", budget=Budget(nodes=2000))
        grammar.matches("ax" * 2000)
    with pytest.raises(GrammarError, match="takes longer"):
        Grammar.from_regex(r"\w{0,50}\d{0,50}\w{0,50}x", budget=Budget(seconds=0)).compile(ByteTokenizer()).mask(1)


def test_other_threads_go_on_while_one_works():
    """Masks are worked out in small steps of Python: a bomb on another thread doesn't stop this one."""
    thread = threading.Thread(target=lambda: refused_or_not("(.{0,90}x){0,90}", "ax" * 1000))
    thread.start()
    ticks = 0
    while thread.is_alive() and ticks < 50:
        time.sleep(0.002)
        ticks += 1
    assert ticks > 0
    thread.join(20)
    assert not thread.is_alive()


def refused_or_not(regex: str, text: str) -> None:
    with contextlib.suppress(GrammarError):
        Grammar.from_regex(regex).matches(text)


# ---- masks


@pytest.fixture(scope="module")
def smol(default_model_folder):
    return Tokenizer(default_model_folder)


def advance(tokens, state: int, token: int) -> int:
    after = tokens.advance(state, token)
    assert after is not None
    return after


def slow_mask(tokens, state) -> set[int]:
    """Every token, byte by byte."""
    found = set(tokens.stop_ids) if tokens.is_accepting(state) else set()
    for token, piece in enumerate(tokens.tokenizer.all_token_bytes()):
        if piece and tokens._masks.lives(tokens.automaton.step(state, piece)):
            found.add(token)
    return found


@pytest.mark.parametrize(
    "regex",
    [
        r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"',
        r"[a-z ]{0,7}!",
        r"[a-z]{3,9}[.,]",
        r"[^x]{2,4}x",
        r"(é|è|😀)+x?",
        r"\w{1,3} (true|false)",
        r"(?:.*foo.*){1,4}",
        r"\x04?[a-b]+",
        r"(\S+ ){2,4}\S+\.",
        r"[a-z]+(\.[a-z]+)*@([a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?\.)+[a-z]{2,6}",
        r'\{"(name|nation|[^"n\\]+|n[^a"\\][^"\\]*)": [0-9]+\}',
    ],
)
def test_masks_are_exact(regex, smol):
    """The vectorised walk and its shortcuts for loops and classes of bytes against the slow one, along a walk."""
    rng = random.Random(regex)
    tokens = Grammar.from_regex(regex).compile(smol)
    state = tokens.start
    for _ in range(4):
        fast = legal_tokens(tokens, state)
        assert fast == slow_mask(tokens, state)
        state = advance(tokens, state, rng.choice(sorted(fast)))
        if state == FINISHED:
            break


@pytest.mark.parametrize("bulk", [0, 3])
def test_shortcuts_are_exact_wherever_they_are_taken(monkeypatch, bulk):
    """Random texts of few letters, so that classes of bytes are split again and again."""
    monkeypatch.setattr(token_masks, "_BULK", bulk)
    monkeypatch.setattr(token_masks, "_FEW_WAYS", 0)
    monkeypatch.setattr(token_classes, "_MAIN_ROAD", 2)
    monkeypatch.setattr(token_classes, "FEW", 4)
    rng = random.Random(bulk)
    walked = 0
    for _ in range(60):
        pieces = [*"abcd", *("".join(rng.choices("abcd", k=rng.randint(2, 7))) for _ in range(60))]
        regex = "".join(
            rng.choice(["[abc]", "[ab]", ".", "a", "(a|b[cd])", "(ab|ac|d.)", "[^a]", "(aa|b*c)"])
            + rng.choice(["", "*", "+", "{0,3}", "{2,4}"])
            for _ in range(rng.randint(1, 4))
        )
        tokens = Grammar.from_regex(regex).compile(PiecesTokenizer([piece.encode() for piece in dict.fromkeys(pieces)]))
        state = tokens.start
        for _ in range(6):
            legal = legal_tokens(tokens, state)
            assert legal == slow_mask(tokens, state), regex
            state = advance(tokens, state, rng.choice(sorted(legal)))
            if state == FINISHED:
                break
        walked += len(tokens._masks._steps)
    assert walked > 20  # quotients were in use


def test_a_trie_of_odd_pieces():
    pieces = [b"", b"a", b"ab", b"ab", b"abc", b"b", b"", b"\xff", b"\x00", b"a" * 40]
    trie = TokenTrie(pieces)
    node_of = [0 if rank == len(trie.order) else trie.node_of[rank] for rank in trie.rank]
    assert node_of == [trie.descend(piece) for piece in pieces]
    assert trie.descend(b"ac") == 0 and trie.descend(b"abcd") == 0
    assert node_of[2] == node_of[3] and node_of[0] == 0  # one text, two tokens; no text
    for depth in (1, 2):
        for node in range(*trie.level[depth : depth + 2]):
            below = {i for low, high in trie.ranges(np.array([node])) for i in trie.order[low:high].tolist()}
            start = next(p for p in pieces if trie.descend(p[:depth]) == node and len(p) >= depth)[:depth]
            assert below == {i for i, piece in enumerate(pieces) if piece.startswith(start)}
    tokens = Grammar.from_regex("a*b?").compile(PiecesTokenizer(pieces))
    assert legal_tokens(tokens, tokens.start) == {1, 2, 3, 5, 9, 10}
    assert len(TokenTrie([])) == 1


def test_masks_are_packed_little_end_first():
    tokens = Grammar.from_regex("[A-C]").compile(ByteTokenizer())
    mask = tokens.mask(tokens.start)
    assert mask.dtype == np.uint32 and mask.shape == (9,)
    assert mask[2] == 0b1110  # ids 65, 66, 67 are bits 1 to 3 of word 2
    assert int(mask.sum()) == 0b1110
    assert not mask.flags.writeable
    assert unpack(mask, 258).sum() == 3
    assert tokens.is_legal(tokens.start, 66) and not tokens.is_legal(tokens.start, 68)
    assert not tokens.is_legal(tokens.start, -1) and not tokens.is_legal(tokens.start, 10**6)


def test_special_tokens_are_never_text():
    """The letters of "<eos>" are legal text, the token isn't."""
    tokens = Grammar.from_regex("<eos>x").compile(ByteTokenizer())
    assert tokens.advance(tokens.start, 257) is None and tokens.advance(tokens.start, 256) is None
    assert tokens.advance_all(tokens.start, list(b"<eos>")) is not None


def test_stop_ids_are_legal_exactly_where_the_text_may_end():
    tokens = Grammar.from_regex("ab*").compile(ByteTokenizer(), stop_ids={257, 256, 10**9})
    assert not {256, 257} & legal_tokens(tokens, tokens.start)
    after = tokens.advance(tokens.start, ord("a"))
    assert after is not None and {256, 257} < legal_tokens(tokens, after)
    assert tokens.advance(after, 257) == FINISHED


def test_sentencepiece_spaces_are_spaces():
    """A regex that demands a space is met by a token that carries one."""
    tokens = Grammar.from_regex("[a-z]+ [a-z]+").compile(PiecesTokenizer([b"hello", b" world", b"\xe2\x96\x81world"]))
    state = tokens.advance_all(tokens.start, [0, 1])
    assert state is not None and tokens.is_accepting(state)
    assert tokens.advance_all(tokens.start, [0, 2]) is None


@pytest.mark.parametrize("family", ["byte_level", "llama2", "gemma", "unigram"])
def test_walks_on_tokenizers_of_every_family(family, tmp_path):
    from .tiny_tokenizers import FAMILIES, save

    tokenizer = Tokenizer(save(FAMILIES[family](), tmp_path))
    regex = r"(the|fox) [a-z]{2,5}(, [a-z ]+)?\."
    try:
        tokens = Grammar.from_regex(regex).compile(tokenizer)
    except GrammarError:
        assert family == "unigram"  # its pieces can't spell everything
        return
    rng = random.Random(family)
    for _ in range(10):
        text = random_walk(tokens, rng, 12)
        assert text is not None and re.fullmatch(regex, text.decode())


def test_a_tokenizer_without_bytes_is_refused(tmp_path):
    from .tiny_tokenizers import save, word_piece

    with pytest.raises(GrammarError, match="constrained decoding"):
        Grammar.from_regex("a").compile(Tokenizer(save(word_piece(), tmp_path)))


def test_grammars_are_shared_by_threads(smol):
    tokens = Grammar.from_regex(r'\{"a": "[^"]{0,50}", "b": [0-9]{1,8}\}').compile(smol)
    texts: list[bytes | None] = []
    work = [
        threading.Thread(target=lambda seed=seed: texts.append(random_walk(tokens, random.Random(seed), 20)))
        for seed in range(6)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(60)
    assert len(texts) == 6
    assert all(text and tokens.grammar.matches(text) for text in texts)


# ---- forced text


def test_forced_stops_where_the_text_may_end():
    assert Grammar.from_regex("ab(cd)?").forced(b"") == b"ab"
    assert Grammar.from_regex("ab(cd)?").forced(b"abc") == b"d"
    assert Grammar.from_regex("abc").forced(b"x") == b""
    assert len(Grammar.from_regex("a{100000}").forced(b"")) == 4096


def test_a_longer_token_inside_the_last_one_is_held_back_too():
    """`":"` could be cut as `":` and a longer token that begins with its last quote."""
    tokenizer = PiecesTokenizer([b'{"', b"name", b'":"', b'":', b'"Al', b"A", b"l", b'"', b"}"])
    tokens = Grammar.from_regex(r'\{"name":"(Al|l)"\}').compile(tokenizer)
    assert [tokenizer.token_bytes(i) for i in tokens.forced_tokens(tokens.start)] == [b'{"', b"name"]


# ---- figures (generous limits: the machine that runs tests is busy)


@pytest.mark.slow
def test_speed_on_a_large_vocabulary():
    from .real_tokenizers import load

    llama = load("llama3")
    Grammar.from_regex("a").compile(llama)  # the trie, once per tokenizer
    tokens = Grammar.from_json_schema({"type": "string", "maxLength": 4000}).compile(llama)
    begin = time.perf_counter()
    tokens.mask(tokens.start)
    state = tokens.advance(tokens.start, llama.all_token_bytes().index(b'"'))
    assert state is not None
    tokens.mask(state)
    assert time.perf_counter() - begin < 1
    new = []
    for _ in range(20):
        state = tokens.advance(state, llama.all_token_bytes().index(b"a"))
        assert state is not None
        begin = time.perf_counter()
        tokens.mask(state)
        new.append(time.perf_counter() - begin)
    assert sorted(new)[10] < 0.010
    begin = time.perf_counter()
    for _ in range(1000):
        tokens.mask(state)
    assert (time.perf_counter() - begin) / 1000 < 20e-6


def interrupted_at(k, work):
    """Call `work` and raise KeyboardInterrupt at the k-th place where Python would look for signals: at the start of a
    function, or after a call of C code.  False if there are fewer."""
    count = 0

    def interrupt(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_return")
        if count == k:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return count >= k


def test_an_interrupt_at_any_place_leaves_no_lock_and_no_clock_behind():
    """Another thread can go on with the grammar at once, and the next piece of work has a clock of its own."""
    pattern, text = "(ab|ac)*[0-9]{2}(yes|no), certain", b"abac42no, "

    def forced(grammar, found):
        found.append(grammar.forced(text))

    for k in range(1, 10_000):
        grammar, found = Grammar.from_regex(pattern), []
        if not interrupted_at(k, functools.partial(grammar.forced, text)):
            break
        thread = threading.Thread(target=forced, args=(grammar, found), daemon=True)
        thread.start()
        thread.join(30)
        assert found == [b"certain"], f"the lock is kept after an interrupt at place {k}"
        budget = grammar.automaton.algebra.budget
        with budget.operation(1.0):
            assert budget.given == 1.0, f"the clock of what was interrupted at place {k} goes on"
    assert k > 300
