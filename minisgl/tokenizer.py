"""Text to token ids and back, and what every other module wants to know about the vocabulary.

A `Tokenizer` reads the files that a model folder has anyway: `tokenizer.json` through the `tokenizers`
library (about 0.1 s, where importing transformers takes seconds), `tokenizer_config.json` for the special
tokens, the chat template. Only a folder without tokenizer.json (a bare SentencePiece `tokenizer.model`) goes
through transformers' converter.

Every token has *bytes*: what it contributes to the text when something stands before it. There are two
spellings:

    byte-level BPE (GPT-2, Llama 3, Qwen)      "Ġthe" -> b" the"     each character is one byte
    SentencePiece (Llama 2, Mistral, Gemma)    "▁the" -> b" the"     U+2581 is a space, "<0xE2>" a byte

and in both of them text is the concatenation of these bytes, read as UTF-8. Constrained decoding walks these
bytes; detokenisation (`detokenizer.py`) decodes them incrementally; `decode` here is that same machine run
once, so streamed and whole text cannot differ. `ByteTokenizer` is the smallest member of the family: 256
bytes and two special tokens.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from .chat_template import ChatTemplate, ChatTemplateError, find_source
from .config import token_ids
from .detokenizer import Detokenizer, TextRule
from .messages import one_line

__all__ = ["BaseTokenizer", "ByteTokenizer", "ChatTemplateError", "Tokenizer"]

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONVERTIBLE = ("tokenizer.model", "tekken.json", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
_MAX_VOCAB = 1 << 24
_NO_TEMPLATE = (
    "this model has no chat template: pass one as chat_template=..., "
    "or send a text prompt (generate(prompt=...), /v1/completions) instead of messages"
)


class BaseTokenizer(ABC):
    """What the engine, the grammars and the frontend use of a tokenizer.

    bos_id: the beginning-of-sequence token, or None.
    eos_ids: every id that ends a sequence; the loader may add more.
    special_ids: tokens that are never text (`skip_special_tokens` hides them).
    text_rule: how token bytes become text; None when the decoder isn't byte concatenation.
    chat_template: the model's `ChatTemplate`, or None.
    """

    bos_id: int | None
    eos_ids: set[int]
    special_ids: frozenset[int]
    text_rule: TextRule | None
    chat_template: ChatTemplate | None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids: the largest one + 1. A model's logits may be wider (padding)."""

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Text to token ids, int32 (n,). Raises TypeError when it isn't a str, ValueError for a lone
        surrogate."""

    @cached_property
    @abstractmethod
    def _pieces(self) -> list[bytes]:
        """Bytes of every token, special ones spelt out; b"" for an id without a token."""

    @cached_property
    def _visible_pieces(self) -> list[bytes]:
        return [b"" if i in self.special_ids else piece for i, piece in enumerate(self._pieces)]

    def text_bytes(self, skip_special_tokens: bool) -> list[bytes]:
        """Per token id the bytes it adds to a text; special tokens add nothing, or their spelling."""
        return self._visible_pieces if skip_special_tokens else self._pieces

    def all_token_bytes(self) -> list[bytes]:
        """`token_bytes` of every id, computed once; don't modify it."""
        return self._visible_pieces

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token contributes to a text (not at its very beginning, where SentencePiece
        drops a space). b"" for special tokens and for ids without a token: these are never text, so
        constrained decoding must treat b"" as forbidden. Raises IndexError when the id is out of range."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(
                f"token_id {token_id} is out of range, the vocabulary has {self.vocab_size} tokens"
            )
        return self.all_token_bytes()[token_id]

    def token_text(self, token_id: int) -> str:
        """One token for display (logprobs): spaces kept, special tokens spelt out, an unfinished character as
        U+FFFD, "" for an id without a token."""
        if self.text_rule is None or not 0 <= token_id < self.vocab_size:
            return self.decode([token_id], skip_special_tokens=False)
        return self._pieces[token_id].decode("utf-8", "replace")

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(
        self,
        ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Token ids to text; unknown ids contribute nothing.

        spaces_between_special_tokens has no effect, as in transformers' fast tokenizers: their decoders say
        themselves where spaces go (only old pure-Python tokenizers put some around special tokens).
        The text equals transformers' except that in a run of byte-fallback tokens which isn't valid UTF-8 the
        valid characters survive, as in SentencePiece itself. No "clean up" of spaces: it corrupts text.
        """
        stream = Detokenizer(self, (), skip_special_tokens, spaces_between_special_tokens)
        return stream.push(_int_list(ids)) + stream.finish()

    def apply_chat_template(
        self, messages: Sequence[Any], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Messages to text through the model's chat template; see `ChatTemplate.render` for the keywords.

        The text has the template's own BOS in it: turn it into ids with `chat_ids`, or with `encode`, which
        doesn't add a second one. Raises ChatTemplateError when there is no template or it refuses the
        messages.
        """
        template = self.chat_template
        if template is None:
            if kwargs.get("chat_template") is None:
                raise ChatTemplateError(_NO_TEMPLATE)
            template = ChatTemplate(kwargs.pop("chat_template"), self._template_tokens())
        return template.render(messages, add_generation_prompt, **kwargs)

    def chat_ids(
        self, messages: Sequence[Any], add_generation_prompt: bool = True, **kwargs: Any
    ) -> np.ndarray:
        """Messages to token ids, int32 (n,): what transformers' `apply_chat_template(tokenize=True)` gives,
        with exactly the BOS that the template writes."""
        text = self.apply_chat_template(messages, add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def _template_tokens(self) -> dict[str, str]:
        """The special tokens that chat templates mention by name: {"bos_token": "<s>", ...}."""
        return {}


class Tokenizer(BaseTokenizer):
    """The tokenizer of a model folder.

    folder: holds tokenizer.json (or what transformers can convert) and usually tokenizer_config.json;
        config.json and generation_config.json are read for stop ids when they are there.
    chat_template: instead of the folder's: a template's text, {name: text}, or a list of named templates.
    Raises FileNotFoundError when there is no tokenizer, ValueError when its files can't be read,
    ChatTemplateError for a bad `chat_template`.
    """

    def __init__(self, folder: str | Path, *, chat_template: str | Mapping | Sequence | None = None):
        self.folder = Path(folder)
        try:
            self._read(chat_template)
        except (OSError, ValueError):
            raise
        except BaseException as error:  # a Rust panic is no Exception, but only named so
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                what = one_line(f"{type(error).__name__}: {error}")
                raise ValueError(f"{self.folder}: its tokenizer files are broken: {what}") from error
            raise

    def _read(self, chat_template: str | Mapping | Sequence | None) -> None:
        config = _read_json(self.folder / "special_tokens_map.json") | _read_json(
            self.folder / "tokenizer_config.json"
        )
        if (self.folder / "tokenizer.json").is_file():
            self._backend = _load_backend(self.folder / "tokenizer.json")
        else:
            self._backend, converted = _convert(self.folder)
            config = {**converted, **config}
        self._backend.no_truncation()  # a tokenizer.json may carry both; neither belongs in an engine
        self._backend.no_padding()
        self._named = {name: text for name in _NAMED if (text := _token_text(config.get(name)))}
        _add_missing_tokens(self._backend, config, self._named)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_id = self._token_id("bos_token")
        self.eos_ids = _stop_ids(self.folder)
        if (eos := self._token_id("eos_token")) is not None:
            self.eos_ids.add(eos)
        self._adds_bos = self.bos_id is not None and self._backend.encode("").ids[:1] == [self.bos_id]
        self.text_rule = _text_rule(self._backend)
        self.chat_template = self._chat_template(chat_template, config)

    def __repr__(self) -> str:
        return (
            f"Tokenizer({str(self.folder)!r}, vocab_size={self.vocab_size}, eos_ids={sorted(self.eos_ids)})"
        )

    @cached_property
    def vocab_size(self) -> int:
        return max(self._backend.get_vocab().values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Text to token ids, int32 (n,). Special tokens spelt out in the text are recognised.

        Text that begins with BOS already (a rendered chat template) doesn't get another one.
        """
        _check_text(text)
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._one_bos(text, ids, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[np.ndarray]:
        for text in texts:
            _check_text(text)
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [self._one_bos(text, item.ids, add_special_tokens) for text, item in zip(texts, encoded)]

    def decode(
        self,
        ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        if self.text_rule is not None:
            return super().decode(ids, skip_special_tokens, spaces_between_special_tokens)
        known = [i for i in _int_list(ids) if 0 <= i < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    @cached_property
    def _pieces(self) -> list[bytes]:
        if self.text_rule is None:
            raise ValueError("this tokenizer's decoder doesn't concatenate bytes, so its tokens have none")
        spell = _byte_level_bytes if _decoder_steps(self._backend) == ["ByteLevel"] else _sentencepiece_bytes
        byte_fallback = "ByteFallback" in _decoder_steps(self._backend)
        pieces = [b""] * self.vocab_size
        for piece, token_id in self._backend.get_vocab().items():
            pieces[token_id] = spell(piece, byte_fallback)
        # an added token wins where an id has two names
        for token_id, token in self._backend.get_added_tokens_decoder().items():
            pieces[token_id] = spell(token.content, byte_fallback)
        return pieces

    def _one_bos(self, text: str, ids: list[int], added: bool) -> np.ndarray:
        doubled = added and self._adds_bos and ids[:2] == [self.bos_id] * 2
        if doubled and text.startswith(self._named["bos_token"]):
            ids = ids[1:]
        return np.frombuffer(array("I", ids), np.int32)  # a third of np.array's time, and of its signed sister's

    def _token_id(self, name: str) -> int | None:
        return self._backend.token_to_id(self._named[name]) if name in self._named else None

    def _template_tokens(self) -> dict[str, str]:
        return self._named

    def _chat_template(self, override: Any, config: Mapping[str, Any]) -> ChatTemplate | None:
        if override is not None:
            template = ChatTemplate(override, self._named)
            for text in template.templates.values():
                template.compile(text)  # the caller's own template: a mistake in it shows now
            return template
        source = find_source(self.folder, config)
        return ChatTemplate(source, self._named) if source else None


class ByteTokenizer(BaseTokenizer):
    """Token ids 0..255 are the bytes themselves, 256 is BOS, 257 is EOS, and `pieces` follow from 258.

    For tests with scripted models, and for models that come without tokenizer files. Encoding gives single
    bytes (and the two special tokens where their spelling occurs); `pieces` are tokens that only a model may
    produce.
    """

    BOS, EOS = "<bos>", "<eos>"

    def __init__(
        self,
        pieces: Sequence[str | bytes] = (),
        *,
        add_bos: bool = False,
        chat_template: str | Mapping | Sequence | None = None,
    ):
        extra = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self._table = [bytes([i]) for i in range(256)] + [self.BOS.encode(), self.EOS.encode(), *extra]
        self.bos_id = 256
        self.eos_ids = {257}
        self.special_ids = frozenset((256, 257))
        self.text_rule = TextRule()
        self.add_bos = add_bos
        self.chat_template = (
            None if chat_template is None else ChatTemplate(chat_template, self._template_tokens())
        )

    def __repr__(self) -> str:
        return f"ByteTokenizer(vocab_size={self.vocab_size})"

    @property
    def vocab_size(self) -> int:
        return len(self._table)

    @cached_property
    def _pieces(self) -> list[bytes]:
        return self._table

    def _template_tokens(self) -> dict[str, str]:
        return {"bos_token": self.BOS, "eos_token": self.EOS}

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        _check_text(text)
        add_bos = add_special_tokens and self.add_bos and not text.startswith(self.BOS)
        ids: list[int] = [256] if add_bos else []
        for n, part in enumerate(text.split(self.BOS)):
            ids += [256] if n else []
            for m, chunk in enumerate(part.split(self.EOS)):
                ids += [257] if m else []
                ids += chunk.encode()
        return np.array(ids, dtype=np.int32)


def _int_list(ids: Iterable[int]) -> list[int]:
    tolist = getattr(ids, "tolist", None)  # numpy arrays and tensors
    return tolist() if tolist is not None else list(ids)


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has a lone surrogate at position {error.start}, which isn't Unicode"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    return data if isinstance(data, dict) else {}


def _load_backend(path: Path) -> Backend:
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(one_line(f"{path} is not a tokenizer that this version can read: {error}")) from None
    last = max(backend.get_vocab().values(), default=0)
    if last >= _MAX_VOCAB:  # tables have a row for every id up to it
        raise ValueError(f"{path} has the token id {last}, at most {_MAX_VOCAB - 1} can be")
    return backend


def _convert(folder: Path) -> tuple[Backend, dict[str, Any]]:
    """A folder without tokenizer.json: let transformers convert what is there (needs `sentencepiece` for a
    .model)."""
    if not any((folder / name).is_file() for name in _CONVERTIBLE):
        raise FileNotFoundError(f"no tokenizer in {folder}: expected tokenizer.json or tokenizer.model")
    from transformers import AutoTokenizer  # seconds; only here

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ValueError(
            f"transformers can't convert the tokenizer in {folder} (for tokenizer.model it needs "
            f"`pip install sentencepiece protobuf`): {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    if not converted.is_fast:
        raise ValueError(f"the tokenizer in {folder} ({type(converted).__name__}) has no tokenizer.json form")
    # a private copy: the converter keeps using its own
    backend = Backend.from_str(converted.backend_tokenizer.to_str())
    return backend, {name: text for name, text in converted.special_tokens_map.items() if name in _NAMED}


def _token_text(value: Any) -> str | None:
    """Configs write a token as a string, or as a dict with its `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids, and the named ones marked
    special."""
    listed = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        text = _token_text(token)
        if text and backend.token_to_id(text) is None:
            flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
            options = {name: bool(token[name]) for name in flags if name in token}
            backend.add_tokens([AddedToken(text, **options)])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    texts = [*named.values(), *(extra.values() if isinstance(extra, Mapping) else extra)]
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    new = [text for item in texts if (text := _token_text(item)) and text not in known]
    if new:
        backend.add_special_tokens(list(dict.fromkeys(new)))


def _stop_ids(folder: Path) -> set[int]:
    """eos_token_id (an id or a list) of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        if found is not None:
            return set(token_ids(found))
    return set()


# ---- decoders: which rule a tokenizer follows, and the bytes of its pieces


def _decoder_config(backend: Backend) -> list[dict[str, Any]]:
    """The decoder's steps as plain dicts; [] when there is none."""
    if backend.decoder is None:
        return []
    config = json.loads(backend.decoder.__getstate__())
    return config["decoders"] if config["type"] == "Sequence" else [config]


def _decoder_steps(backend: Backend) -> list[str]:
    return [step["type"] for step in _decoder_config(backend)]


def _text_rule(backend: Backend) -> TextRule | None:
    """The byte rule that a decoder amounts to, or None.

    Known: ByteLevel; and Replace(U+2581 -> space) | Metaspace, each with or without ByteFallback, Fuse and a
    final Strip of leading spaces (which acts on the whole text only after Fuse).
    """
    steps = _decoder_config(backend)
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return TextRule()
    strip = 0
    if names[-2:] == ["Fuse", "Strip"] and steps[-1]["content"] == " " and steps[-1]["stop"] == 0:
        strip = steps[-1]["start"]
        names, steps = names[:-1], steps[:-1]
    spellings = [step for step in steps if step["type"] not in ("ByteFallback", "Fuse")]
    if names[-1:] == ["Fuse"]:
        names = names[:-1]
    if len(spellings) != 1 or len(set(names)) != len(names) or "Fuse" in names:
        return None
    marks = spellings[0]
    if marks["type"] == "Replace" and marks["pattern"] == {"String": "▁"} and marks["content"] == " ":
        return TextRule(one_per_byte=True, strip=strip)
    if marks["type"] == "Metaspace" and marks["replacement"] == "▁":
        return TextRule(one_per_byte=True, strip=strip, drop_first_marks=marks["prepend_scheme"] != "never")
    return None


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-ins for bytes: {code point: byte}. Printable Latin-1 stands for itself, the
    other 68 bytes for U+0100 onwards in order (Radford et al. 2019, `bytes_to_unicode` of the released
    encoder)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {byte: byte for byte in kept} | {0x100 + n: byte for n, byte in enumerate(moved)}


_ALPHABET = _byte_alphabet()
_ALPHABET_CHARS = frozenset(map(chr, _ALPHABET))


def _byte_level_bytes(piece: str, byte_fallback: bool = False) -> bytes:
    """A piece outside the alphabet (an added token with a space in it, say) is plain text."""
    if _ALPHABET_CHARS.issuperset(piece):
        return piece.translate(_ALPHABET).encode("latin-1")
    return piece.encode()


def _sentencepiece_bytes(piece: str, byte_fallback: bool) -> bytes:
    if byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass  # "<0xZZ>" is text
    return piece.replace("▁", " ").encode()
