"""GGUF, llama.cpp's single-file format: one file holds configuration, tokenizer and (quantised) weights.

Read here into what the rest of the package knows: a Hugging Face style config dict, tensors under Hugging
Face names (dequantised to float32 one at a time), and tokenizer files.  Three things differ from a plain
renaming:

* llama.cpp rotates neighbouring elements (x_0, x_1), Hugging Face the halves (x_0, x_{D/2}); files of
  architecture `llama` store the rows of q and k in the former order and are put back into the latter.  qwen
  files are not permuted.
* Llama 3's stretched RoPE frequencies come as a tensor of divisors, `rope_freqs.weight`.
* The tokenizer is a vocabulary, merges or scores, and the *name* of a pre-tokenizer, whose splitting rule one
  has to know: the rules here are those of the models' own tokenizers, and an unknown name is refused, because
  a wrong split gives wrong tokens without any other sign.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from . import gguf_header
from .config import LlamaConfig, ModelError, RopeConfig

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    """The splitting rule of Llama 3 and Qwen2, which differ in how many digits stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


# tokenizer.ggml.pre -> the split before byte-level BPE
_PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
    "llama-bpe": lambda: _words(r"\p{N}{1,3}"),
    "qwen2": lambda: _words(r"\p{N}"),
}


class GGUFFile:
    """An open GGUF file.  Raises ModelError, naming the file and the cause, if it is broken or
    unsupported."""

    def __init__(self, path: Path):
        from gguf import GGUFReader  # a second of imports that other formats need not pay

        self.path = path
        try:
            gguf_header.check(path)
            self._reader = GGUFReader(path)
            self._fields = {key: field.contents() for key, field in self._reader.fields.items()}
        except FileNotFoundError:
            raise ModelError(f"no such file: {path}") from None
        except Exception as error:  # the reader indexes into the file: any of its errors means a broken one
            raise ModelError(f"broken GGUF file {path}: {error}") from error
        self.architecture = self._get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ModelError(f"{path}: architecture {self.architecture!r} isn't supported, only {known}")
        if self._get("split.count", 1) > 1:
            raise ModelError(f"{path} is one part of a split GGUF file; merge the parts (llama-gguf-split)")
        if self._model("expert_count", 0):
            raise ModelError(f"{path} is a mixture of experts, which isn't supported")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def num_elements(self) -> int:
        """Number of weights in all tensors."""
        return sum(int(tensor.n_elements) for tensor in self._reader.tensors)

    def hf_config(self) -> dict[str, Any]:
        """What the model's `config.json` would say."""
        heads = self._model("attention.head_count")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"{self.path} lacks the tensor token_embd.weight")
        config = {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": int(embedding.shape[1]),
            "hidden_size": self._model("embedding_length"),
            "intermediate_size": self._model("feed_forward_length"),
            "num_hidden_layers": self._model("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._model("attention.head_count_kv", heads),
            "head_dim": self._model("attention.key_length", self._model("embedding_length") // heads),
            "max_position_embeddings": self._model("context_length"),
            "rms_norm_eps": _shortest(self._model("attention.layer_norm_rms_epsilon", 1e-5)),
            "rope_theta": self._model("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": self.architecture != "qwen2" and "blk.0.attn_q.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",  # what these models compute in, whatever the file stores
        }
        return config | self.generation_config()

    def config(self) -> LlamaConfig:
        config = LlamaConfig.from_hf(self.hf_config())
        divisors = self._tensors.get(_ROPE_FREQS)
        if divisors is None:
            return config
        return config.with_rope(RopeConfig(config.rope.theta, divisors=tuple(map(float, divisors.data))))

    def generation_config(self) -> dict[str, Any]:
        """bos, eos (end of text, of turn, of message) and padding token ids, those that the file names."""
        get = self._get
        ends = [get(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
        eos = list(dict.fromkeys(end for end in ends if end is not None))
        ids = {
            "bos_token_id": get("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "pad_token_id": get("tokenizer.ggml.padding_token_id", None),
        }
        return {key: value for key, value in ids.items() if value is not None}

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """(Hugging Face name, float32 array) of every tensor, dequantised one at a time."""
        from gguf import dequantize

        heads = self._model("attention.head_count")
        kv_heads = self._model("attention.head_count_kv", heads)
        for name, tensor in self._tensors.items():
            if name == _ROPE_FREQS:
                continue
            try:
                array = np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")
                if self.architecture == "llama" and ".attn_q." in name:
                    array = _halves_from_pairs(array, heads)
                elif self.architecture == "llama" and ".attn_k." in name:
                    array = _halves_from_pairs(array, kv_heads)
            except Exception as error:  # NotImplementedError for a type, ValueError for a shape that isn't the heads'
                raise ModelError(f"{self.path}: cannot dequantise {name}: {error}") from error
            yield _hf_name(name), array

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json, which transformers can load
        too."""
        tokens = self._get("tokenizer.ggml.tokens")
        try:
            tokenizer = self._tokenizer(tokens)
        except ModelError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise ModelError(f"{self.path}: its tokenizer is broken: {error}") from error
        # not `tokenizer.save`, which reports a full disk as a bare Exception
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._model("context_length"),
        }
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = self._get(f"tokenizer.ggml.{key}_token_id", None)
            if token_id is not None and token_id < len(tokens):
                config[f"{name}_token"] = tokens[token_id]
        if template := self._get("tokenizer.chat_template", None):
            config["chat_template"] = template
        for name, value in (("tokenizer_config", config), ("generation_config", self.generation_config())):
            (folder / f"{name}.json").write_text(json.dumps(value, indent=2, ensure_ascii=False), "utf-8")

    def _tokenizer(self, tokens: list[str]) -> Tokenizer:
        model = self._get("tokenizer.ggml.model")
        if model == "gpt2":
            tokenizer = self._byte_level(tokens)
        elif model == "llama":
            tokenizer = self._sentencepiece(tokens)
        else:
            raise ModelError(f"{self.path}: tokenizer {model!r} isn't supported, only 'gpt2' and 'llama'")
        types = self._get("tokenizer.ggml.token_type", [])
        for special, kinds in ((True, (_UNKNOWN, _CONTROL)), (False, (_USER_DEFINED,))):
            added = [
                AddedToken(token, normalized=False, special=special)
                for token, kind in zip(tokens, types)
                if kind in kinds
            ]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
        if self._get("tokenizer.ggml.add_bos_token", model == "llama" or self._pre() == "llama-bpe"):
            bos_id = self._get("tokenizer.ggml.bos_token_id", 1)
            bos = tokens[bos_id]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
            )
        return tokenizer

    def _pre(self) -> str:
        return self._get("tokenizer.ggml.pre", "")

    def _byte_level(self, tokens: list[str]) -> Tokenizer:
        pre = self._pre()
        if pre not in _PRE_TOKENIZERS:
            known = ", ".join(_PRE_TOKENIZERS)
            raise ModelError(f"{self.path}: pre-tokenizer {pre!r} isn't supported, only {known}")
        merges = [tuple(merge.split(" ", 1)) for merge in self._get("tokenizer.ggml.merges")]
        vocab = {token: i for i, token in enumerate(tokens)}
        # Llama 3 takes a word that is a token whole, even where the merges would not build it.
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
        tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self, tokens: list[str]) -> Tokenizer:
        """SentencePiece BPE has no merge list: of all neighbouring pieces it joins those whose union scores
        best. So every way to cut a piece in two known ones is a merge, ranked by the piece's score."""
        vocab = {token: i for i, token in enumerate(tokens)}
        scores = self._get("tokenizer.ggml.scores")
        merges = [
            (scores[i], token[:cut], token[cut:])
            for token, i in vocab.items()
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        merges.sort(key=lambda merge: -merge[0])
        unknown = tokens[self._get("tokenizer.ggml.unknown_token_id", 0)]
        pairs = [(left, right) for _, left, right in merges]
        tokenizer = Tokenizer(models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._get("tokenizer.ggml.add_space_prefix", True):
            spaces.insert(0, normalizers.Prepend("▁"))
            steps.append(decoders.Strip(" ", 1, 0))
        tokenizer.normalizer = normalizers.Sequence(spaces)
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._model("rope.scaling.type", "none")
        if kind == "none" or _ROPE_FREQS in self._tensors:
            return None
        scaling = {"rope_type": kind, "factor": self._model("rope.scaling.factor", None)}
        if original := self._model("rope.scaling.original_context_length", None):
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _get(self, key: str, *default: Any) -> Any:
        if key not in self._fields:
            if default:
                return default[0]
            raise ModelError(f"{self.path} lacks the key {key}")
        return self._fields[key]

    def _model(self, key: str, *default: Any) -> Any:
        """A key of the architecture's own section."""
        return self._get(f"{self.architecture}.{key}", *default)


def _hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; an unknown one stays as it is, and loading will name it as left
    over."""
    if match := _BLOCK_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_TENSORS[part]}.{kind}" if part in _TENSORS else name
    part, _, kind = name.rpartition(".")
    return f"{_TENSORS[part]}.{kind}" if part in _TENSORS else name


def _halves_from_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection: within each head from (0, D/2, 1, D/2 + 1, ...) back to (0, 1, 2, ...)."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _shortest(value: float) -> float:
    """The float32 that the file stores as the shortest decimal that means it: 9.99999975e-06 is 1e-05."""
    return float(str(np.float32(value)))
