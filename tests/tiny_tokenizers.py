"""Tiny tokenizers of every family, trained on the spot, written to a folder as a model's would be."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

CORPUS = [
    "the quick brown fox jumps over the lazy dog. The capital of France is Paris, isn't it?",
    "naïve café über straße 你好 世界 今日は 🌶 😀 👩‍👩‍👧 hello hello world world world",
    "def f(x):\n    return x + 1\n\n\nQ: 1 + 1 = 2\nA: two",
] * 4
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """GPT-2 / Llama 3 / Qwen, with added tokens that are text (one of them outside the byte alphabet)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("né", special=False)])
    tokenizer.post_processor = _bos(tokenizer)
    return tokenizer


def sentencepiece(strip: bool = True) -> Tokenizer:
    """Llama 2 and Mistral (strip), or Gemma: BPE with byte fallback over text whose spaces are U+2581."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    trained.train_from_iterator([CORPUS[0]] * 4, trainers.BpeTrainer(vocab_size=120))
    learnt = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate([*pieces, *sorted(learnt["vocab"], key=learnt["vocab"].get)])}
    for extra in ("▁", "▁▁", "▁▁▁"):
        vocab.setdefault(extra, len(vocab))
    merges = [tuple(pair) for pair in learnt["merges"]]
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens(["<unk>", *SPECIALS])
    tokenizer.post_processor = _bos(tokenizer)
    return tokenizer


def unigram() -> Tokenizer:
    """A Unigram model with the Metaspace decoder, as SentencePiece unigram models are converted."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _bos(tokenizer)
    return tokenizer


def word_piece() -> Tokenizer:
    """A decoder that isn't byte concatenation: it puts spaces between words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["<unk>", *SPECIALS])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


FAMILIES = {
    "byte_level": byte_level,
    "llama2": sentencepiece,
    "gemma": lambda: sentencepiece(strip=False),
    "unigram": unigram,
}


def save(tokenizer: Tokenizer, folder: Path, chat_template=CHAT, **config) -> Path:
    """tokenizer.json and tokenizer_config.json, as `save_pretrained` writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": False, "special": True},
        **({} if chat_template is None else {"chat_template": chat_template}),
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _bos(tokenizer: Tokenizer) -> TemplateProcessing:
    bos = tokenizer.token_to_id("<s>")
    return TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)])
