"""From token ids to text, one token at a time: never half a character, never a word of the prompt.

A token is a run of *bytes*, not of characters: one emoji is often two or three tokens, and a prompt may even
end in the middle of one. Decoding each token by itself therefore prints U+FFFD (the replacement character)
where a character was merely unfinished. Engines commonly repair this by decoding a growing window of ids
again and again and printing what has become stable; that costs two decodes per token, and a window which
never becomes stable grows for ever.

Nearly every tokenizer used by language models allows something simpler. Its decoder is "concatenate the bytes
of the pieces, read them as UTF-8", so an incremental UTF-8 decoder fed with the bytes of each token *is* the
detokenizer: O(1) per token, exact, and never holding more than the 3 bytes of an unfinished character.

    prompt ids  ... [ wor][ld ][F0 9F]      output ids  [8C][B6]['!']
                               `- unfinished: primes the decoder, nothing of it is printed
    push([8C]) -> ""      push([B6]) -> "🌶"      push(['!']) -> "!"      finish() -> ""

`TextRule` says which of the two byte conventions a tokenizer follows; the few decoders that are not byte
concatenation (WordPiece, BPE with word-end suffixes) take the window, bounded here to `MAX_PENDING` ids.

What the deltas add up to: `"".join(deltas)` equals `tokenizer.decode(prompt + output)` without the leading
part that it has in common with `tokenizer.decode(prompt)`. So a character which the output completes belongs
to the output, and a fragment which the output leaves broken stays the prompt's.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import BaseTokenizer

REPLACEMENT = "\ufffd"
MAX_PENDING = 6  # window detokenizer: ids held back while their text ends in U+FFFD
_CONTEXT = 6  # window detokenizer: ids of finished text kept so that spacing rules see their left neighbour
_ESCAPES = dict.fromkeys(range(0xDC80, 0xDD00), REPLACEMENT)  # what "surrogateescape" makes of a bad byte


@dataclass(frozen=True)
class TextRule:
    """How the bytes of a tokenizer's pieces, put together, become text.

    one_per_byte: a broken character becomes one U+FFFD per byte (SentencePiece byte fallback, as
        SentencePiece itself does it) instead of one per maximal broken run (byte-level BPE; Unicode's
        recommendation, and Python's).
    strip: number of leading spaces dropped at the very beginning of a text (the dummy prefix of
        SentencePiece).
    drop_first_marks: every U+2581 of the first piece of a text is dropped (the `Metaspace` decoder).
    """

    one_per_byte: bool = False
    strip: int = 0
    drop_first_marks: bool = False

    @property
    def errors(self) -> str:
        """The codec error handler that implements `one_per_byte`."""
        return "surrogateescape" if self.one_per_byte else "replace"


class Detokenizer:
    """The text of one growing sequence of tokens.

    tokenizer: anything with the interface of `minisgl.tokenizer.BaseTokenizer`.
    prompt_ids: token ids that came before; none of their text is ever returned. Only a few are looked at.
    skip_special_tokens: special tokens (BOS, EOS, `<|im_end|>`, ...) contribute no text.
    spaces_between_special_tokens: as in `BaseTokenizer.decode`, where it is explained why it changes nothing.
    """

    __slots__ = ("_stream",)

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        if tokenizer.text_rule is not None:
            self._stream = _ByteStream(tokenizer, tokenizer.text_rule, prompt_ids, skip_special_tokens)
        else:
            self._stream = _WindowStream(tokenizer, prompt_ids, skip_special_tokens)

    def push(self, ids: Iterable[int]) -> str:
        """Append token ids; returns the text they complete (possibly ""), which ends on a character boundary.

        Ids that the tokenizer doesn't know contribute nothing, as in `decode`. Any way of cutting the same
        ids into calls gives the same joined text.
        """
        return self._stream.push(ids)

    def finish(self) -> str:
        """The tail: what is left of an unfinished character, as U+FFFD; "" in nearly all cases."""
        return self._stream.finish()


class _ByteStream:
    """An incremental UTF-8 decoder over the bytes of the tokens."""

    __slots__ = ("_decoder", "_drop", "_drop_first_marks", "_one_per_byte", "_pieces", "_skipped")

    def __init__(self, tokenizer: BaseTokenizer, rule: TextRule, prompt_ids: Sequence[int], skip: bool):
        self._pieces = tokenizer.text_bytes(skip)
        self._skipped = tokenizer.special_ids if skip else frozenset()
        self._one_per_byte = rule.one_per_byte
        self._decoder = codecs.getincrementaldecoder("utf-8")(rule.errors)
        self._drop_first_marks = False
        # (character, count): leading characters of the output's text that are not the output's
        self._drop: tuple[str, int] | None = None
        if pending := self._prime(prompt_ids):
            # decode(prompt) shows the fragment as U+FFFD already: if it stays broken, don't show it again
            self._drop = (REPLACEMENT, pending if rule.one_per_byte else 1)
        elif (rule.strip or rule.drop_first_marks) and not any(map(self._visible, prompt_ids)):
            self._drop = (" ", rule.strip) if rule.strip else None
            self._drop_first_marks = rule.drop_first_marks

    def _visible(self, token: int) -> bool:
        return 0 <= token < len(self._pieces) and token not in self._skipped

    def _bytes(self, ids: Iterable[int]) -> bytes:
        pieces, size = self._pieces, len(self._pieces)
        return b"".join([pieces[i] for i in ids if 0 <= i < size])

    def _prime(self, prompt_ids: Sequence[int]) -> int:
        """Feed the prompt's last bytes to the decoder; returns how many of them await the rest of a
        character.

        UTF-8 synchronises itself: whether a text ends inside a character shows in its last 3 bytes, and mostly
        in its last one.
        """
        tail = self._bytes(prompt_ids[-1:])
        if tail and tail[-1] < 0x80:
            return 0
        tail = b""
        for i in range(len(prompt_ids) - 1, -1, -1):
            tail = self._bytes((prompt_ids[i],)) + tail
            if len(tail) >= 3:
                break
        self._decoder.decode(tail)
        return len(self._decoder.getstate()[0])

    def push(self, ids: Iterable[int]) -> str:
        if self._drop_first_marks:
            return self._push_first(list(ids))
        return self._text(self._decoder.decode(self._bytes(ids)))

    def finish(self) -> str:
        return self._text(self._decoder.decode(b"", True))

    def _text(self, text: str) -> str:
        if self._one_per_byte and text and not text.isascii():
            text = text.translate(_ESCAPES)
        if self._drop is None or not text:
            return text
        char, count = self._drop
        rest = text[:count].lstrip(char) + text[count:]
        dropped = len(text) - len(rest)
        self._drop = (char, count - dropped) if dropped < count and not rest else None
        return rest

    def _push_first(self, ids: list[int]) -> str:
        """`push`, looking for the first piece of the text: that one is spelt without its U+2581 marks."""
        first = next((n for n, token in enumerate(ids) if self._visible(token)), None)
        if first is None:
            return ""
        self._drop_first_marks = False
        head = self._pieces[ids[first]].replace(b" ", b"")
        return self._text(self._decoder.decode(head + self._bytes(ids[first + 1 :])))


class _WindowStream:
    """For decoders that are not byte concatenation: decode a bounded window twice and print the difference.

    The window is `_CONTEXT` finished ids and at most `MAX_PENDING` unfinished ones, so the cost per token is
    constant whatever the ids are. Exact for decoders that look at most `_CONTEXT` visible tokens to the left.
    """

    __slots__ = ("_context", "_decode", "_pending", "_shown", "_skipped")

    def __init__(self, tokenizer: BaseTokenizer, prompt_ids: Sequence[int], skip: bool):
        self._skipped = tokenizer.special_ids if skip else frozenset()
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        self._context: list[int] = []
        for token in reversed(prompt_ids):  # only visible ids: a special one is no context for a space
            if token not in self._skipped:
                self._context.insert(0, int(token))
                if len(self._context) >= _CONTEXT and self._decode(self._context):
                    break
        self._shown = self._decode(self._context)  # the window's text that is the prompt's or was returned
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(int(token)) for token in ids if token not in self._skipped])

    def finish(self) -> str:
        return self._commit(self._decode(self._context + self._pending)) if self._pending else ""

    def _push_one(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING:
            return ""
        return self._commit(text)

    def _commit(self, text: str) -> str:
        delta = text[_common(self._shown, text) :]
        window = self._context + self._pending
        self._context, self._pending = window[-_CONTEXT:], []
        self._shown = self._decode(self._context)
        if not self._shown and text:  # ids without text can't stand in for the text to their left: keep more
            self._context = window[-4 * _CONTEXT :]
            self._shown = self._decode(self._context)
        return delta


def _common(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
