"""What a Llama-family model looks like: `config.json`, read into one small dataclass.

Llama 2/3, SmolLM2, Mistral, Qwen2 and Qwen3 are one architecture with a few switches:

    switch        Llama   Mistral  Qwen2   Qwen3
    qkv bias      option  no       yes     option
    o bias        option  no       no      option     (Llama and Qwen3: `attention_bias` sets both)
    q/k norm      no      no       no      yes        RMSNorm over head_dim before RoPE
    window        no      all      option  option     sliding-window attention, per layer
    head_dim      hidden_size / heads unless it is given; Qwen3's default is 128

`LlamaConfig.from_hf` turns the many spellings of Hugging Face configs (transformers 4: `rope_theta` and
`rope_scaling`; transformers 5: `rope_parameters`; old files that leave keys out) into these fields, and
refuses by name what the model file would compute wrongly.  Nothing here needs torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .messages import one_line


class ModelError(ValueError):
    """A model that cannot be found, read or run; the message is one line and names the cause."""

    def __init__(self, message: str = ""):
        super().__init__(one_line(message))


ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers assumes when config.json leaves the key out; the sizes have no default, they must be
# there.
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_DTYPES = ("float32", "float16", "bfloat16")
_MAX_SIZE, _MAX_LAYERS, _MAX_NUMBER = 2**31 - 1, 10_000, 1e15
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base period, how the frequencies are stretched, and by which numbers.

    `params` holds the keys of the type (`factor`, `beta_fast`, ...; see
    `rope.inverse_frequencies`).  `divisors`, when given, divides each frequency: GGUF files carry Llama 3's
    stretched frequencies that way.
    """

    theta: float = 10000.0
    type: str = "default"
    params: dict[str, Any] = field(default_factory=dict)
    divisors: tuple[float, ...] | None = None

    @property
    def factor(self) -> float:
        return self.params.get("factor", 1.0)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes in numbers of elements, lengths in tokens.

    `windows[layer]` is the sliding window of that layer: a token attends to the last `windows[layer]` tokens,
    itself included; 0 is no window.  `dtype` is the one the checkpoint was trained or saved in.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    windows: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = "llama"

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads ({self.num_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim ({self.head_dim}) must be even for RoPE")

    @property
    def context_length(self) -> int:
        """The longest sequence the positions were made for: what RoPE scaling stretches is counted in."""
        if self.rope.type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.type == "yarn":
            original = self.rope.params["original_max_position_embeddings"]
            return max(self.max_position_embeddings, int(original * self.rope.factor))
        return self.max_position_embeddings

    def with_rope(self, rope: RopeConfig) -> LlamaConfig:
        return replace(self, rope=rope)

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> LlamaConfig:
        """From the dict of a Hugging Face `config.json`.

        Raises ModelError, naming the key, for another architecture, a missing or senseless size, a quantised
        checkpoint, an activation other than SiLU, or a RoPE type that is not implemented.
        """
        kind = _model_type(hf)
        if hf.get("quantization_config"):
            method = _mapping(hf, "quantization_config").get("quant_method", "unknown")
            raise ModelError(f"config.json: quantised checkpoints aren't supported (quant_method {method!r})")
        if hf.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"config.json: hidden_act {hf['hidden_act']!r} isn't supported, only 'silu'")

        hidden, heads, layers = (
            _size(hf, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        kv_heads = _size(hf, "num_key_value_heads", 8 if kind == "mistral" else heads, or_null=heads)
        head_dim = _size(hf, "head_dim", 128 if kind == "qwen3" else hidden // heads, or_null=hidden // heads)
        max_positions = _size(hf, "max_position_embeddings", _DEFAULT_MAX_POSITIONS[kind])
        attention_bias = bool(hf.get("attention_bias", False)) and kind in ("llama", "qwen3")
        dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
        return cls(
            vocab_size=_size(hf, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(hf, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=_number(hf, "rms_norm_eps", 1e-6),
            rope=_rope(hf, max_positions),
            windows=_windows(hf, kind, layers),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or kind == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(hf.get("mlp_bias", False)) and kind == "llama",
            qk_norm=kind == "qwen3",
            dtype=dtype if dtype in _DTYPES else "float32",
            bos_token_id=next(iter(token_ids(hf.get("bos_token_id"))), None),
            eos_token_ids=token_ids(hf.get("eos_token_id")),
            model_type=kind,
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelError if it is absent, unreadable, not JSON or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.name} is missing in {path.parent}") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are both ValueErrors
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` of a config: nothing, one id or a list of them."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and abs(v) <= _MAX_SIZE)


def _model_type(hf: dict[str, Any]) -> str:
    names = hf.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: architectures must be a list of names, got {names!r}")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and hf.get("model_type") in list(ARCHITECTURES.values()):
        return hf["model_type"]
    found = names[0] if names else hf.get("model_type")
    raise ModelError(f"config.json: architecture {found!r} isn't supported, only {', '.join(ARCHITECTURES)}")


def _mapping(hf: dict[str, Any], key: str) -> dict[str, Any]:
    value = hf.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {key} must be an object, got {value!r}")
    return value


def _size(hf: dict[str, Any], key: str, default: int | None = None, or_null: int | None = None) -> int:
    """A positive int; `default` when the key is absent, `or_null` when it is there and null. None is so large that
    something made of as many parts fills the memory before anything else finds it wrong."""
    value = hf.get(key, default)
    value = or_null if value is None and key in hf else value
    if value is None:
        raise ModelError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    most = _MAX_LAYERS if key == "num_hidden_layers" else _MAX_SIZE
    if value > most:
        raise ModelError(f"config.json: {key} must be at most {most}, got {value!r}")
    return value


def _number(values: dict[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"config.json: {key} must be a positive number, got {value!r}")
    if value > _MAX_NUMBER:
        raise ModelError(f"config.json: {key} must be at most {_MAX_NUMBER:g}, got {value!r}")
    return float(value)


def _windows(hf: dict[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """Sliding window of each layer.  Mistral: every layer; Qwen: switched on by `use_sliding_window`, in the
    layers that `layer_types` names or else from `max_window_layers` up; Llama: none."""
    full = (0,) * layers
    if kind == "llama" or (kind != "mistral" and not hf.get("use_sliding_window", False)):
        return full
    if hf.get("sliding_window", 4096) is None:
        return full
    window = _size(hf, "sliding_window", 4096)
    if kind == "mistral":
        return (window,) * layers
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ModelError(f"config.json: max_window_layers must be an integer, got {first!r}")
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise ModelError(f"config.json: layer_types must list {layers} layers, got {types!r}")
    unknown = set(map(str, types)) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"config.json: layer_types {sorted(unknown)} aren't supported")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _rope(hf: dict[str, Any], max_positions: int) -> RopeConfig:
    """transformers 5 keeps everything in `rope_parameters`; 4 had `rope_theta` beside `rope_scaling`."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    params = dict(_mapping(hf, key))
    if any(isinstance(value, dict) for value in params.values()):
        raise ModelError(f"config.json: {key} that differ between layers aren't supported")
    rope_type = params.pop("rope_type", None) or params.get("type") or "default"
    params.pop("type", None)
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise ModelError(
            f"config.json: RoPE type {rope_type!r} isn't supported, only {', '.join(_ROPE_KEYS)}"
        )
    if (params.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor other than 1 isn't supported")
    theta = _number({"rope_theta": params.pop("rope_theta", None) or hf.get("rope_theta")}, "rope_theta", 1e4)

    key = "original_max_position_embeddings"
    original = hf.get(key) or params.get(key)
    if rope_type in ("llama3", "yarn"):
        params[key] = _number({key: original}, key, max_positions)
        if rope_type == "yarn" and params.get("factor") is None:
            params["factor"] = max_positions / params[key]
        for name in _YARN_NUMBERS:  # 0 and null: as if it were not there
            if rope_type == "yarn" and params.get(name):
                params[name] = _number(params, name)
    for name in _ROPE_KEYS[rope_type]:
        if name not in params:
            raise ModelError(f"config.json: RoPE type {rope_type!r} needs {name}")
        params[name] = _number(params, name)
    return RopeConfig(theta, rope_type, params)
