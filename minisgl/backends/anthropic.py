"""Anthropic's models through the official client (`pip install anthropic`).

The API continues an assistant message that has begun, so text before a gen works as in process.  A select, and a gen
with json_schema, is a forced call of a tool whose input has that schema.  The API has one output per call: n > 1 is n
calls.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from ..ir import Image
from .base import Job, Reply, need, refuse_params
from .hosted import HostedBackend, as_base64, chat_messages, expand_videos, is_url, load_image, split_system

_REFUSED = (
    "min_p", "min_new_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty", "ignore_eos",
    "stop_token_ids", "stop_regex", "regex", "ebnf", "logit_bias", "seed",
)  # fmt: skip
_TOOL = "answer"


class Anthropic(HostedBackend):
    """Anthropic(model, api_key=None, base_url=None, ...): the key comes from ANTHROPIC_API_KEY if none is given."""

    api: ClassVar[str] = "Anthropic"
    continues: bool = True

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        parallelism: int = 64,
        max_retries: int = 4,
        retry_wait: float = 0.5,
        **client_options: Any,
    ):
        super().__init__(model, parallelism=parallelism, max_retries=max_retries, retry_wait=retry_wait)
        client = need("anthropic", pip="anthropic")
        self.client = client.Anthropic(api_key=api_key, base_url=base_url, max_retries=0, **client_options)

    def generate(self, job: Job) -> list[Reply]:
        refuse_params(job, self.api, _REFUSED)
        if job.options.get("return_logprob"):
            raise ValueError(f"return_logprob is not supported by {self.api}")
        request, open_text = self._request(job)
        if job.params.get("json_schema") is not None:
            schema = job.params["json_schema"]
            schema = json.loads(schema) if isinstance(schema, str) else dict(schema)
            return [self._tool(job, request, schema)]
        if job.on_text is not None:
            return [self._stream(job, request, open_text)]
        return [self._one(job, request, open_text) for _ in range(job.params.get("n", 1))]

    def choose(self, job: Job) -> Reply:
        choices = self.check_choice(job)
        request, _ = self._request(job)
        schema = {
            "type": "object",
            "properties": {"choice": {"type": "string", "enum": list(choices)}},
            "required": ["choice"],
        }
        reply = self._tool(job, request, schema)
        chosen = json.loads(reply.text).get("choice")
        if chosen not in choices:
            raise RuntimeError(f"{self.api} answered {chosen!r}, which is none of the choices {list(choices)}")
        return Reply(chosen, reply.meta)

    def _request(self, job: Job) -> tuple[dict[str, Any], str]:
        """The request, and the text that the answer goes on from."""
        params = job.params
        system, messages = split_system(chat_messages(job.prompt, self))
        open_text = ""
        if messages and messages[-1][0] == "assistant" and job.prompt.role == "assistant" and job.prompt.partial:
            open_text = "".join(part for part in messages[-1][1] if isinstance(part, str))
            messages[-1] = ("assistant", [open_text.rstrip()])  # the API refuses white space at its end
        stop = params.get("stop") or []
        request = {
            "model": self.model,
            "max_tokens": params.get("max_new_tokens", 128),
            "system": system or None,
            "messages": [{"role": role, "content": _content(parts)} for role, parts in messages],
            "stop_sequences": [stop] if isinstance(stop, str) else list(stop) or None,
            "extra_body": _sampling(params) or None,
        }
        return {name: value for name, value in request.items() if value is not None}, open_text

    def _one(self, job: Job, request: dict[str, Any], open_text: str) -> Reply:
        message = self.call(job, lambda: self.client.messages.create(**request))
        text = "".join(block.text for block in message.content if block.type == "text")
        return Reply(_joined(open_text, text), self._meta(message.usage, message.stop_reason, message.stop_sequence))

    def _stream(self, job: Job, request: dict[str, Any], open_text: str) -> Reply:
        events = self.call(job, lambda: self.client.messages.create(**request, stream=True))
        text, usage, reason, sequence = "", {"input_tokens": 0, "output_tokens": 0}, None, None
        for event in events:
            if job.cancelled:
                events.close()
                break
            if event.type == "message_start":
                usage["input_tokens"] = event.message.usage.input_tokens
            elif event.type == "content_block_delta" and event.delta.type == "text_delta":
                delta = event.delta.text if text else _joined(open_text, event.delta.text)
                text += delta
                if delta and job.on_text is not None:
                    job.on_text(delta, {"finish_reason": None})
            elif event.type == "message_delta":
                usage["output_tokens"] = event.usage.output_tokens
                reason, sequence = event.delta.stop_reason, event.delta.stop_sequence
        return Reply(text, self._meta(usage, reason, sequence))

    def _tool(self, job: Job, request: dict[str, Any], schema: dict[str, Any]) -> Reply:
        """Force a call of a tool with this input schema; the reply's text is the input as JSON."""
        tool = {"name": _TOOL, "description": "Give the answer.", "input_schema": schema}
        request = {**request, "tools": [tool], "tool_choice": {"type": "tool", "name": _TOOL}}
        message = self.call(job, lambda: self.client.messages.create(**request))
        meta = self._meta(message.usage, message.stop_reason, None)
        for block in message.content:
            if block.type == "tool_use":
                return Reply(json.dumps(block.input, ensure_ascii=False), meta)
        raise RuntimeError(f"{self.api} did not give an answer of the form asked for")

    def _meta(self, usage: Any, reason: str | None, sequence: str | None) -> dict[str, Any]:
        get = usage.get if isinstance(usage, dict) else lambda name: getattr(usage, name, None)
        self.usage.add(get("input_tokens"), get("output_tokens"))
        known = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}
        finish = {"type": known.get(reason or "", reason or "stop")}
        return {
            "finish_reason": {**finish, "matched": sequence} if sequence else finish,
            "prompt_tokens": get("input_tokens"),
            "completion_tokens": get("output_tokens"),
            "cached_tokens": get("cache_read_input_tokens") or 0,
        }


def _sampling(params: dict[str, Any]) -> dict[str, Any]:
    """What differs from the API's defaults.  In the body directly: newer models and clients know none of these."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    return {name: params[name] for name, default in defaults.items() if params.get(name, default) != default}


def _joined(open_text: str, text: str) -> str:
    """What was cut off the program's text is not written twice."""
    ending = open_text[len(open_text.rstrip()) :]
    return text[len(ending) :] if ending and text.startswith(ending) else text


def _content(parts: list[Any]) -> Any:
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    return [_part(part) for part in expand_videos(parts)]


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    assert isinstance(part, Image)
    if is_url(part.source):
        return {"type": "image", "source": {"type": "url", "url": part.source}}
    mime, data = load_image(part.source)
    return {"type": "image", "source": {"type": "base64", "media_type": mime, "data": as_base64(data)}}
