"""What of a request decides where it goes: the text that the model will see first.

    /generate               text, or input_ids (the first of a list)
    /v1/completions         prompt, text or ids (the first of a list)
    /v1/chat/completions    the conversation, as text of our own

The worker's chat template is not known here and need not be: it is enough that two conversations which begin with the
same messages have keys that begin with the same characters.  Tool definitions come first, since templates put them at
the top.  Text and ids may share one tree: a chance match of a few characters decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .json_cost import too_many_values
from .router_tree import ids_key


class Routing(NamedTuple):
    """key: what the prompt begins with, None if the request has none.  weight: how many sequences it will run."""

    key: str | None
    weight: int


# What a worker would refuse may not count as a heavy load.
MAX_WEIGHT = 128  # outputs of one prompt
MAX_PROMPTS = 1024
NO_KEY = Routing(None, 1)


def routing(path: str, body: bytes) -> Routing:
    """The key and weight of a request.  A body that is not what its path wants has none: the worker will say why."""
    read = _READERS.get(path.rstrip("/"))
    if read is None or not body or too_many_values(body):
        return NO_KEY
    try:
        payload = json.loads(body)
        return read(payload) if isinstance(payload, dict) else NO_KEY
    except (ValueError, RecursionError):
        return NO_KEY


def _generate(payload: Mapping[str, Any]) -> Routing:
    prompt = payload.get("text")
    params = payload.get("sampling_params")
    n = params.get("n") if isinstance(params, dict) else None
    return _prompt(payload.get("input_ids") if prompt is None else prompt, n)


def _completion(payload: Mapping[str, Any]) -> Routing:
    return _prompt(payload.get("prompt"), payload.get("n"))


def _chat(payload: Mapping[str, Any]) -> Routing:
    messages = payload.get("messages")
    if not isinstance(messages, list):
        return NO_KEY
    tools = payload.get("tools")
    parts = [json.dumps(tools, ensure_ascii=False)] if tools else []
    parts += [_message(message) for message in messages if isinstance(message, dict)]
    return Routing("".join(parts), _count(payload.get("n")))


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):  # content parts
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    calls = message.get("tool_calls")
    tail = json.dumps(calls, ensure_ascii=False) if calls else ""
    return f"\n<{message.get('role')}>\n{content if isinstance(content, str) else ''}{tail}"


def _prompt(prompt: Any, n: Any) -> Routing:
    count = _count(n)
    if isinstance(prompt, str):
        return Routing(prompt, count)
    if not isinstance(prompt, list) or not prompt:
        return NO_KEY
    prompts = min(len(prompt), MAX_PROMPTS)
    if isinstance(prompt[0], str):
        return Routing(prompt[0], prompts * count)
    if isinstance(prompt[0], list):
        return Routing(_ids(prompt[0]), prompts * count)
    return Routing(_ids(prompt), count)


def _ids(ids: Sequence[Any]) -> str | None:
    return ids_key(ids) or None


def _count(n: Any) -> int:
    return min(n, MAX_WEIGHT) if isinstance(n, int) and n > 0 else 1


_READERS = {"/generate": _generate, "/v1/completions": _completion, "/v1/chat/completions": _chat}
