"""The primitives: what a program appends to its state (`gen`, `select`, roles, images), made and checked.

    s += user("Is it a cat? " + image(path))  +  assistant(gen("why", max_tokens=40) + select("is", ["yes", "no"]))
         ExprList [RoleBegin, Text, Image, RoleEnd, RoleBegin, Gen, Select, RoleEnd]

Each function returns plain data (`ir`) and does nothing: whoever appends it to a state has it executed, a tracer notes
it.  So what can be wrong with an expression whatever it is run on, a name, a dtype, two constraints at once, is a
ValueError here, at the line of the program that says it; what depends on the model comes from the backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from . import choices as _choices
from .ir import Expr, ExprList, Gen, Image, RoleBegin, RoleEnd, Select, Video, as_expr, role_expr
from .reasoning import check_model_type


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    ignore_eos: bool | None = None,
    seed: int | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: _choices.ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    ebnf: str | None = None,
) -> Expr:
    """One generation, read back as `s[name]`.  Every argument left at None is inherited from the `run()` call.

    name          None: the text goes on, but has no name
    n             > 1: `s[name]` is a list, the text goes on with the first
    dtype         int, float, bool or str: the output is a literal of that type (as text)
    choices       makes it a `select`
    regex, json_schema, ebnf    at most one: what the output must match

    Raises ValueError for a wrong name, dtype, choices, or more than one constraint; sampling parameters are checked by
    the backend before anything is queued there, and a wrong one is raised to whoever waits.
    """
    _check_name(name)
    if choices is not None:
        return select(name, choices, temperature or 0.0, choices_method)
    if (dtype is not None) + (regex is not None) + (json_schema is not None) + (ebnf is not None) > 1:
        given = given_of({"dtype": dtype, "regex": regex, "json_schema": json_schema, "ebnf": ebnf})
        raise ValueError(f"{' and '.join(given)}: at most one of dtype, regex, json_schema, ebnf may be set")
    params = {
        "max_new_tokens": max_tokens, "min_new_tokens": min_tokens, "n": n, "stop": stop,
        "stop_token_ids": stop_token_ids, "stop_regex": stop_regex, "temperature": temperature, "top_p": top_p,
        "top_k": top_k, "min_p": min_p, "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty, "ignore_eos": ignore_eos, "seed": seed, "regex": regex,
        "json_schema": json_schema, "ebnf": ebnf,
    }  # fmt: skip
    options = {
        "return_logprob": return_logprob, "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num, "return_text_in_logprobs": return_text_in_logprobs,
    }  # fmt: skip
    return Gen(name, given_of(params), given_of(options), None if dtype is None else _check_dtype(dtype))


def gen_int(name: str | None = None, **params: Any) -> Expr:
    """`gen` of an integer."""
    return gen(name, dtype=int, **params)


def gen_string(name: str | None = None, **params: Any) -> Expr:
    """`gen` of a double-quoted string."""
    return gen(name, dtype=str, **params)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: _choices.ChoicesMethod | None = None,
) -> Expr:
    """The best of `choices` (strings) under a choices method, `token_length_normalized` by default (see `choices`).

    Raises ValueError for wrong choices, an unknown method, or a temperature: a select takes the best, not a sample.
    """
    _check_name(name)
    checked, method = _choices.check(choices, choices_method, temperature)
    return Select(name, checked, method)


def image(source: Any) -> Expr:
    """An image: a path, a URL, bytes or a PIL image.  Backends without vision refuse it."""
    return Image(source)


def video(path: Any, num_frames: int) -> Expr:
    """A video, as `num_frames` frames of it.  Backends without vision refuse it."""
    if not isinstance(num_frames, int) or isinstance(num_frames, bool) or num_frames < 1:
        raise ValueError(f"num_frames must be an integer of at least 1, got {num_frames!r}")
    return Video(path, num_frames)


def system(expr: Any = None) -> ExprList:
    """A system message."""
    return role_expr("system", expr)


def user(expr: Any = None) -> ExprList:
    """A user message."""
    return role_expr("user", expr)


def assistant(expr: Any = None) -> ExprList:
    """An assistant message; the place of `gen` in a chat."""
    return role_expr("assistant", expr)


def system_begin() -> Expr:
    return RoleBegin("system")


def system_end() -> Expr:
    return RoleEnd("system")


def user_begin() -> Expr:
    return RoleBegin("user")


def user_end() -> Expr:
    return RoleEnd("user")


def assistant_begin() -> Expr:
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    return RoleEnd("assistant")


def separate_reasoning(expr: Any, model_type: str) -> ExprList:
    """Split what each gen of `expr` generates: `s[name]` is the answer, `s[name + "_reasoning_content"]` the thinking.

    The state's text goes on with the answer only.  model_type: a key of `reasoning.MODEL_TYPES`; else ValueError.
    """
    check_model_type(model_type)
    return ExprList(
        [
            dataclasses.replace(item, reasoning=model_type) if isinstance(item, Gen) else item
            for item in as_expr(expr).flatten()
        ]
    )


def given_of(values: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that were given: None stands for "not set"."""
    return {name: value for name, value in values.items() if value is not None}


def _check_name(name: Any) -> None:
    if name is not None and not (isinstance(name, str) and name):
        raise ValueError(f"name must be a non-empty string or None, got {name!r}")


def _check_dtype(dtype: Any) -> type | None:
    named = {"int": int, "float": float, "bool": bool, "str": str}
    found = named.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in (int, float, bool, str):
        raise ValueError(f"dtype must be int, float, bool or str, got {dtype!r}")
    return found
