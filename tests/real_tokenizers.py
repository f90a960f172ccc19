"""Tokenizers of real models from PyPI packages: no hub, no weights.

    llama3    package llama-models    128k byte-level BPE
    tekken    package mistral-common  131k byte-level BPE
    mistral   package mistral-common  33k SentencePiece with byte fallback (needs sentencepiece)
    qwen      package dashscope       152k byte-level BPE

`load(name)` skips the calling test, with the reason, where the package isn't there.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pytest

from minisgl.detokenizer import TextRule
from minisgl.tokenizer import BaseTokenizer

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_FILES = {
    "llama3": ("llama_models", "llama3/tokenizer.model"),
    "tekken": ("mistral_common", "data/tekken_240718.json"),
    "mistral": ("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3"),
    "qwen": ("dashscope", "resources/qwen.tiktoken"),
}


class RankTokenizer(BaseTokenizer):
    """A tiktoken vocabulary: `pieces[i]` has rank i (ids shifted by `first`); EOS follows or leads."""

    def __init__(self, name: str, pieces: list[bytes], pattern: str, first: int = 0):
        import tiktoken

        self.first = first
        self._table = [b""] * first + pieces + [b"<eos>"]
        eos = len(self._table) - 1 if not first else 2
        self.bos_id, self.eos_ids, self.special_ids = None, {eos}, frozenset((*range(first), eos))
        self.text_rule, self.chat_template = TextRule(), None
        ranks = {piece: rank for rank, piece in enumerate(pieces)}
        self._encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    @property
    def vocab_size(self) -> int:
        return len(self._table)

    @cached_property
    def _pieces(self) -> list[bytes]:
        return self._table

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text), dtype=np.int32) + np.int32(self.first)


class PieceTokenizer(BaseTokenizer):
    """A SentencePiece model."""

    def __init__(self, path: Path):
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        size = self._model.vocab_size()
        self.special_ids = frozenset(i for i in range(size) if self._model.is_control(i) or self._model.is_unknown(i))
        self.bos_id, self.eos_ids = self._model.bos_id(), {self._model.eos_id()}
        self.text_rule, self.chat_template = TextRule(one_per_byte=True), None

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size()

    @cached_property
    def _pieces(self) -> list[bytes]:
        found = []
        for i in range(self.vocab_size):
            piece = self._model.id_to_piece(i)
            found.append(bytes([int(piece[3:5], 16)]) if self._model.is_byte(i) else piece.replace("▁", " ").encode())
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        return np.array(self._model.encode(text), dtype=np.int32)


@cache
def load(name: str) -> BaseTokenizer:
    package, file = _FILES[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs `pip install --no-deps {package.replace('_', '-')}`")
    pytest.importorskip("sentencepiece" if name == "mistral" else "tiktoken")
    path = Path(spec.submodule_search_locations[0]) / file
    if name == "mistral":
        return PieceTokenizer(path)
    if name == "tekken":
        data = json.loads(path.read_text(encoding="utf-8"))
        size = data["config"]["default_vocab_size"] - data["config"]["default_num_special_tokens"]
        pieces = [base64.b64decode(entry["token_bytes"]) for entry in data["vocab"][:size]]
        return RankTokenizer(name, pieces, data["config"]["pattern"], first=1000)
    lines = path.read_text(encoding="ascii").split("\n")
    ranked = sorted((int(rank), piece) for piece, rank in (line.split() for line in lines if line))
    return RankTokenizer(name, [base64.b64decode(piece) for _, piece in ranked], _GPT4)
