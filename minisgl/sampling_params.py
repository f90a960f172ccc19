"""What a caller may ask of one generation, checked once, before anything is queued.

Every value is validated and normalised when a `SamplingParams` is made, so the rest of the engine never meets
a wrong type, a NaN or an unknown name: a mistake is one `ValueError` that names the parameter and its range.

    dict from a user --make()--> SamplingParams (immutable) --validate_vocab()--> the queue
                                     |
                  greedy?  grammar?  row: the numbers the batched sampler reads

`temperature=0` (or `top_k=1`) means greedy and `top_k=-1` no limit. Out of range is refused, not clamped: a
clamped parameter looks like a model that behaves oddly. Needs the standard library only (and `regex` once
`stop_regex` is used).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NoReturn

__all__ = ["SamplingParams"]

_INT32_MAX = 2**31 - 1
_MAX_BIAS = 1e9  # far beyond any logit, and still finite when added to one in float32

# name -> (smallest, largest)
_INTEGERS = {
    "max_new_tokens": (0, _INT32_MAX),
    "min_new_tokens": (0, _INT32_MAX),
    "n": (1, 4096),
}
# name -> (smallest, largest, how the range is written in messages)
_NUMBERS = {
    "temperature": (0.0, math.inf, "a finite number >= 0"),
    "top_p": (0.0, 1.0, "a number in [0, 1]"),
    "min_p": (0.0, 1.0, "a number in [0, 1]"),
    "frequency_penalty": (-2.0, 2.0, "a number in [-2, 2]"),
    "presence_penalty": (-2.0, 2.0, "a number in [-2, 2]"),
    "repetition_penalty": (math.ulp(0.0), 2.0, "a number in (0, 2]"),
}
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
_GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")


@dataclass(frozen=True, repr=False)
class SamplingParams:
    """The parameters of one generation: immutable, comparable, hashable, picklable.

    Args:
        max_new_tokens: at most this many output tokens; 0 only scores the prompt.
        min_new_tokens: no stop token is sampled before this many outputs; at most max_new_tokens. With a grammar
            the output is shorter where the grammar's text is: it ends when nothing else may follow.
        stop: a string or strings that end the output (stored as a tuple).
        stop_token_ids: token ids that end the output, besides the model's own (stored as a tuple).
        stop_regex: a pattern or patterns whose match ends the output (stored as a tuple).
        temperature: the logits are divided by it; 0 is greedy.
        top_p: keep the most likely tokens up to and including the one that makes their mass reach top_p.
        top_k: keep the top_k most likely tokens; -1 keeps all.
        min_p: keep tokens at least min_p times as likely as the likeliest.
        frequency_penalty: subtracted from a token's logit once per occurrence in the output.
        presence_penalty: subtracted from a token's logit if it occurs in the output.
        repetition_penalty: divides the logits of tokens in prompt or output if positive, else multiplies.
        n: the number of outputs.
        seed: makes the output a function of the request alone, whatever else is in the batch; None: any.
        logit_bias: token id (int, or its decimal string as JSON has it) -> number added to that logit.
        ignore_eos: the model's stop ids do not end the output (stop_token_ids still do).
        skip_special_tokens, spaces_between_special_tokens: how the output becomes text.
        no_stop_trim: keep the matched stop in the text.
        regex, json_schema, ebnf, structural_tag: at most one grammar for the output. A JSON schema or
            structural tag may be given as a dict, and is stored as JSON text.

    Raises:
        ValueError: a wrong type (a bool is not a number), NaN or infinity, out of range. Names the parameter.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    stop_regex: Sequence[str] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    seed: int | None = None
    logit_bias: Mapping[Any, float] = field(default_factory=dict, hash=False)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    ebnf: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    # -- making one ------------------------------------------------------------------------------------------

    @classmethod
    def make(cls, params: Mapping[str, Any] | SamplingParams | None) -> SamplingParams:
        """What a user passed as `sampling_params`: nothing, a dict, or the real thing."""
        if params is None:
            return cls()
        if isinstance(params, cls):
            return params
        if isinstance(params, Mapping):
            return cls.from_dict(params)
        _refuse("sampling_params", "a dict, a SamplingParams or None", params)

    @classmethod
    def from_dict(cls, params: Mapping[str, Any]) -> SamplingParams:
        """From keyword names to values; an unknown one is a ValueError that suggests the nearest known."""
        for key in params:
            if key not in _CHECKS:
                close = difflib.get_close_matches(str(key), _CHECKS, n=1, cutoff=0.5)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(_CHECKS)}"
                raise ValueError(f"unknown sampling parameter {key!r}{hint}")
        return cls(**params)

    def __post_init__(self) -> None:
        given = vars(self)
        for name, default in _DEFAULTS.items():  # most are left at their defaults, which need no check
            if given[name] is not default:
                self._set(name, _CHECKS[name](name, given[name]))
        self._check_together()

    def _check_together(self) -> None:
        """The rules that involve more than one parameter."""
        if self.min_new_tokens > self.max_new_tokens:
            what = f"an integer in [0, max_new_tokens={self.max_new_tokens}]"
            _refuse("min_new_tokens", what, self.min_new_tokens)
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: at most one of {', '.join(_GRAMMARS)} may be set")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; only __post_init__ normalises

    def validate_vocab(self, vocab_size: int) -> None:
        """Raises ValueError if a token id of logit_bias or stop_token_ids is not one of the model's."""
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    what = f"token ids in [0, {vocab_size - 1}] (the model's vocabulary)"
                    raise ValueError(f"{name} must have {what}, got {token}")

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some parameters changed, validated again."""
        return type(self).from_dict({**self._fields(), **changes})

    # -- reading it ------------------------------------------------------------------------------------------

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken (temperature 0, or only one token kept)."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def grammar(self) -> tuple[str, str] | None:
        """(kind, text) of the grammar the output must follow, or None; kind is the parameter's name."""
        given = ((name, getattr(self, name)) for name in _GRAMMARS)
        return next(((kind, text) for kind, text in given if text is not None), None)

    @cached_property
    def row(self) -> tuple[float, ...]:
        """The numbers the batched sampler reads, in the order of `SamplingBatch.build`; made once."""
        return (
            self.greedy,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.frequency_penalty,
            self.presence_penalty,
        )

    def _fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def to_dict(self) -> dict[str, Any]:
        """The parameters that differ from the defaults, as JSON has them: `from_dict(to_dict())` is equal."""
        default = type(self)()
        changed = {k: v for k, v in self._fields().items() if v != getattr(default, k)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in changed.items()}

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{k}={v!r}' for k, v in self.to_dict().items())})"


# -- one check per kind of value: returns it normalised, or raises ValueError --------------------------------


def _refuse(name: str, what: str, value: Any) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    raise ValueError(f"{name} must be {what}, got {shown}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)  # numpy's integers count


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not _is_integer(value) or not low <= value <= high:
        limit = {_INT32_MAX: "2^31-1", 2**63 - 1: "2^63-1"}.get(high, high)
        _refuse(name, f"an integer in [{'-2^63' if low == -(2**63) else low}, {limit}]", value)
    return int(value)


def _number(name: str, value: Any, low: float, high: float, text: str) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        _refuse(name, text, value)
    try:
        number = float(value)
    except OverflowError:  # an integer or fraction beyond any float
        number = math.inf
    if not (math.isfinite(number) and low <= number <= high):  # NaN fails every comparison
        _refuse(name, text, value)
    return number


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(s, str) and s for s in items):
        _refuse(name, "a non-empty string or a list of non-empty strings", value)
    return tuple(dict.fromkeys(items))


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    """Like _strings; each must compile, in bounded memory, and not match the empty text (which would stop at once)."""
    patterns = _strings(name, value)
    if not patterns:
        return ()
    from .stops import compile_pattern  # only here: a cheap import of minisgl stays cheap

    for pattern in patterns:
        compile_pattern(pattern)
    return patterns


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    listed = isinstance(value, (list, tuple, set, frozenset))
    if not listed or not all(_is_integer(token) and token >= 0 for token in value):
        _refuse(name, "a list of token ids (integers >= 0)", value)
    return tuple(dict.fromkeys(int(token) for token in value))


def _bias(name: str, value: Any) -> dict[int, float]:
    if value is None:
        return {}
    numbers_text = f"a number in [-{_MAX_BIAS:g}, {_MAX_BIAS:g}]"
    what = f"a dict from token id (integer >= 0, or its decimal string) to {numbers_text}"
    if not isinstance(value, Mapping):
        _refuse(name, what, value)
    bias: dict[int, float] = {}
    for key, number in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        token = int(key) if digits or _is_integer(key) else -1
        if token < 0:
            raise ValueError(f"{name} must be {what}, got the key {key!r}")
        if token in bias:
            raise ValueError(f"{name} must have each token id once, got {token} twice")
        bias[token] = _number(f"{name}[{token}]", number, -_MAX_BIAS, _MAX_BIAS, numbers_text)
    return bias


def _json_text(name: str, value: Any) -> str | None:
    """A JSON object, given as text or as a dict, as text; the order of keys is kept."""
    if value is None:
        return None
    if name == "json_schema" and isinstance(value, type):  # a Pydantic model or a dataclass
        from .json_source import load

        value = load(value)
        value = json.dumps(value) if isinstance(value, bool) else value
    if not isinstance(value, (str, Mapping)):
        _refuse(name, "a JSON object, as a string or a dict", value)
    try:
        if isinstance(value, Mapping):
            return json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
        decoded = json.loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a JSON object, as a string or a dict: {error}") from None
    if not isinstance(decoded, (dict, bool)):  # true and false are schemas too
        _refuse(name, "a JSON object, as a string or a dict", value)
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, "True or False", value)
    return value


def _top_k(name: str, value: Any) -> int:
    if not _is_integer(value) or not (value == -1 or 1 <= value <= _INT32_MAX):
        _refuse(name, "-1 (no limit) or an integer >= 1", value)
    return int(value)


def _seed(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, -(2**63), 2**63 - 1)


def _text(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        _refuse(name, "a non-empty string or None", value)
    return value


_BY_NAME: dict[str, Callable[[str, Any], Any]] = {
    **{name: partial(_integer, low=low, high=high) for name, (low, high) in _INTEGERS.items()},
    **{name: partial(_number, low=low, high=high, text=text) for name, (low, high, text) in _NUMBERS.items()},
    **dict.fromkeys(_FLAGS, _flag),
    "top_k": _top_k,
    "seed": _seed,
    "stop": _strings,
    "stop_regex": _patterns,
    "stop_token_ids": _token_ids,
    "logit_bias": _bias,
    **dict.fromkeys(("regex", "ebnf"), _text),
    **dict.fromkeys(("json_schema", "structural_tag"), _json_text),
}
# what `SamplingParams()` has; a mapping, which is made anew for each, is always checked
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
# parameter -> its check, in the order of the fields, for messages
_CHECKS = {name: _BY_NAME[name] for name in _DEFAULTS}


def make_all(given: Sequence[Mapping[str, Any] | SamplingParams | None]) -> list[SamplingParams]:
    """`SamplingParams.make` of each; requests by the hundred mostly bring equal dicts, which are checked once."""
    made: dict[Any, SamplingParams] = {}
    result = []
    for params in given:
        try:
            key = tuple((k, type(v), v) for k, v in params.items()) if type(params) is dict else id(params)
            if key not in made:
                made[key] = SamplingParams.make(params)
            result.append(made[key])
        except TypeError:  # a list among the values: no key
            result.append(SamplingParams.make(params))
    return result
