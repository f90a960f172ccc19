"""Jump-forward: the tokens that are certain, found without asking the model.

Where the automaton has one way on, the bytes are known (`Automaton.forced`). Which TOKENS the model would have
written for them is another question, and getting it wrong changes the text: after `{"` with the keys orderId and
orderName, `order` is certain as bytes, but the model would rather write the token `orderId`. So:

1. tokenise the forced bytes as the tokenizer would (whole characters only);
2. hold back a token at the end while a longer legal token could begin where it begins (or inside the last
   tokens): what follows the forced bytes may claim those bytes;
3. what remains is what step-by-step decoding with canonical tokens would have produced.

        forced        {"order            {"name":"
        tokens        {"  order          {"  name  ":"
        held back         orderId ..               ":"A ..
        kept          {"                 {"  name
"""

from __future__ import annotations

from .automaton import Automaton
from .token_trie import TokenTrie
from .tokenizer import BaseTokenizer

MIN_JUMP = 2  # a jump of one token saves no forward step: the scheduler takes none below this
HELD_BACK = 4  # how many trailing tokens may be questioned
MAX_JUMP_BYTES = 1024  # longer certain texts are jumped through piece by piece
_MARK = "\n"


def forced_tokens(automaton: Automaton, trie: TokenTrie, tokenizer: BaseTokenizer, state: int) -> list[int]:
    """The ids that must come next from `state`, [] when nothing is certain."""
    data, _ = automaton.forced(state)
    whole = _whole_characters(data[:MAX_JUMP_BYTES])
    if not whole:
        return []
    tokens = _tokenise(tokenizer, whole)
    if tokens is None:
        return []
    ends = [0]
    for token in tokens:
        ends.append(ends[-1] + len(tokenizer.token_bytes(token)))
    keep = _keep(automaton, trie, state, data, ends)
    return tokens[:keep]


def _keep(automaton: Automaton, trie: TokenTrie, state: int, data: bytes, ends: list[int]) -> int:
    """How many of the tokens that end at `ends[1:]` nothing can take back.

    Byte q of `data` is contested when a legal token from there is longer than what is forced. Tokens that end
    at or before the first contested byte among the last few tokens' stay.
    """
    count = len(ends) - 1
    start = ends[max(count - HELD_BACK, 0)]
    at_start = automaton.step(state, data[:start])
    after = automaton.step(at_start, data[start:])
    for contested in range(start, len(data)):
        node = trie.descend(data[contested:])
        if node and trie.has_token_below(automaton, after, node):
            return sum(end <= contested for end in ends[1:])
    return count


def _whole_characters(data: bytes) -> bytes:
    """`data` without an unfinished character at its end, b"" when it begins inside one."""
    for cut in range(len(data), max(len(data) - 4, -1), -1):
        try:
            data[:cut].decode()
        except UnicodeDecodeError:
            continue
        return data[:cut]
    return b""


def _tokenise(tokenizer: BaseTokenizer, data: bytes) -> list[int] | None:
    """The tokens whose bytes are exactly `data`, as the tokenizer cuts it inside a text, or None.

    Tokenizers that put a space before a text (SentencePiece) get a line break to put it before.
    """
    text = data.decode()
    for mark in ("", _MARK):
        ids = [int(i) for i in tokenizer.encode(mark + text, add_special_tokens=False)]
        for skip in range(4 if mark else 1):
            tail = ids[skip:]
            if b"".join(tokenizer.token_bytes(i) for i in tail) == data and _is_text(tokenizer, tail):
                return tail
    return None


def _is_text(tokenizer: BaseTokenizer, ids: list[int]) -> bool:
    return not any(i in tokenizer.special_ids for i in ids)
