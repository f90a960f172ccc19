"""OpenAI's models, and every server that speaks their API, through the official client (`pip install openai`).

Chat models get the program's messages, completion models (`is_chat_model=False`) its text.  A select on a chat model
is an answer restricted to the choices by a JSON schema; on a completion model that echoes log-probabilities it is
scored as in process.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from ..choices import plan
from ..ir import Image
from .base import Job, Reply, need, refuse_params
from .hosted import HostedBackend, as_base64, chat_messages, expand_videos, is_url, load_image

_REASONING = ("o1", "o3", "o4", "gpt-5")  # models that take no temperature
COMPLETION_MODELS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")
_NOT_OPENAI = (
    "top_k", "min_p", "min_new_tokens", "repetition_penalty", "ignore_eos", "stop_token_ids", "regex", "ebnf",
)  # fmt: skip


class ChatCompletions(HostedBackend):
    """The chat completions wire format; derived classes say how a request is sent.

    extended: the server is not OpenAI's own: further parameters are sent by SGLang's and vLLM's names, not refused
    """

    api: ClassVar[str] = "this chat API"
    extended: bool = False
    max_tokens_name: str = "max_tokens"

    @abstractmethod
    def _create(self, **request: Any) -> Any:
        """Send the request: a response, or with stream=True an iterable of chunks."""

    def generate(self, job: Job) -> list[Reply]:
        request = self._request(job)
        request["messages"] = [_message(*message) for message in chat_messages(job.prompt, self)]
        if job.options.get("return_logprob"):
            request |= {"logprobs": True, "top_logprobs": job.options.get("top_logprobs_num") or None}
        if job.params.get("json_schema") is not None:
            request["response_format"] = _schema_format(_as_dict(job.params["json_schema"]))
        request = {name: value for name, value in request.items() if value is not None}
        if job.on_text is not None:
            request |= {"stream": True, "stream_options": {"include_usage": True}}
            return [self._stream(job, self.call(job, lambda: iter(self._create(**request))))]
        answer = self.call(job, lambda: self._create(**request))
        self.count(answer.usage)
        return [
            Reply(choice.message.content or "", _meta(answer, choice.finish_reason, _logprobs(choice)))
            for choice in answer.choices
        ]

    def choose(self, job: Job) -> Reply:
        choices = self.check_choice(job)
        schema = {
            "type": "object",
            "properties": {"choice": {"type": "string", "enum": list(choices)}},
            "required": ["choice"],
            "additionalProperties": False,
        }
        request = {
            "model": self.model,
            "messages": [_message(*message) for message in chat_messages(job.prompt, self)],
            "response_format": _schema_format(schema),
        }
        if not self.model.startswith(_REASONING):
            request["temperature"] = 0
        answer = self.call(job, lambda: self._create(**request))
        self.count(answer.usage)
        chosen = json.loads(answer.choices[0].message.content or "{}").get("choice")
        if chosen not in choices:
            raise RuntimeError(f"{self.api} answered {chosen!r}, which is none of the choices {list(choices)}")
        return Reply(chosen, _meta(answer, "select", None))

    def count(self, usage: Any) -> None:
        self.usage.add(getattr(usage, "prompt_tokens", 0), getattr(usage, "completion_tokens", 0))

    def _request(self, job: Job) -> dict[str, Any]:
        """The parameters that chat and text completions share."""
        params = job.params
        request = {
            "model": self.model,
            self.max_tokens_name: params["max_new_tokens"],
            "n": params.get("n") if params.get("n", 1) > 1 else None,
            "stop": params.get("stop") or None,
            "temperature": params.get("temperature"),
            "top_p": params.get("top_p"),
            "frequency_penalty": params.get("frequency_penalty"),
            "presence_penalty": params.get("presence_penalty"),
            "seed": params.get("seed"),
            "logit_bias": params.get("logit_bias") or None,
        }
        if not self.extended:
            refuse_params(job, self.api, [*_NOT_OPENAI, "stop_regex"])
        else:
            names = {"min_new_tokens": "min_tokens"}
            extra = {names.get(k, k): params[k] for k in [*_NOT_OPENAI, "stop_regex"] if params.get(k) is not None}
            request["extra_body"] = extra or None
        return {name: value for name, value in request.items() if value is not None}

    def _stream(self, job: Job, chunks: Iterator[Any]) -> Reply:
        """Deltas of the first output as they come.  A lost connection is an error: what was shown stays shown."""
        text, reason, last, usage = "", None, None, None
        for chunk in chunks:
            if job.cancelled:
                getattr(chunks, "close", lambda: None)()
                break
            last, usage = chunk, getattr(chunk, "usage", None) or usage
            for choice in chunk.choices[:1]:
                delta = choice.delta.content if hasattr(choice, "delta") else choice.text
                reason = choice.finish_reason or reason
                if delta:
                    text += delta
                    assert job.on_text is not None
                    job.on_text(delta, {"finish_reason": None})
        self.count(usage)
        return Reply(text, _meta(last, reason, None, usage))


class OpenAI(ChatCompletions):
    """OpenAI(model, api_key=None, base_url=None, ...): the key comes from OPENAI_API_KEY if none is given.

    is_chat_model   None: by the model's name
    base_url        another server with this API; parameters that OpenAI has not are then passed on to it
    client_options  further keyword arguments of the client, e.g. timeout=60
    """

    api: ClassVar[str] = "OpenAI"

    def __init__(
        self,
        model: str,
        is_chat_model: bool | None = None,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        parallelism: int = 64,
        max_retries: int = 4,
        retry_wait: float = 0.5,
        **client_options: Any,
    ):
        super().__init__(model, parallelism=parallelism, max_retries=max_retries, retry_wait=retry_wait)
        client = need("openai", pip="openai")
        self.client = client.OpenAI(api_key=api_key, base_url=base_url, max_retries=0, **client_options)
        self.is_chat_model = model not in COMPLETION_MODELS if is_chat_model is None else is_chat_model
        self.continues = not self.is_chat_model
        self.extended = base_url is not None
        official_chat = self.is_chat_model and base_url is None
        self.max_tokens_name = "max_completion_tokens" if official_chat else "max_tokens"

    def _create(self, **request: Any) -> Any:
        return self.client.chat.completions.create(**request)

    def generate(self, job: Job) -> list[Reply]:
        if self.is_chat_model:
            return super().generate(job)
        if job.prompt.media:
            raise ValueError(f"{self.model} is a text completion model: it takes no images")
        request = {**self._request(job), "prompt": job.prompt.text}
        refuse_params(job, self.api, ["json_schema"])
        if job.options.get("return_logprob"):
            request["logprobs"] = max(1, job.options.get("top_logprobs_num") or 0)
        if job.on_text is not None:
            request |= {"stream": True, "stream_options": {"include_usage": True}}
            return [self._stream(job, self.call(job, lambda: iter(self.client.completions.create(**request))))]
        answer = self.call(job, lambda: self.client.completions.create(**request))
        self.count(answer.usage)
        return [Reply(choice.text, _meta(answer, choice.finish_reason, None)) for choice in answer.choices]

    def choose(self, job: Job) -> Reply:
        if self.is_chat_model:
            return super().choose(job)
        assert job.choices is not None and job.method is not None
        if job.method.unconditional:
            raise ValueError(f"choices_method: {job.method} is not possible on {self.api}")
        texts = [job.prompt.text, *(job.prompt.text + choice for choice in job.choices)]
        answer = self.call(
            job,
            lambda: self.client.completions.create(
                model=self.model, prompt=texts, max_tokens=0, echo=True, logprobs=1, temperature=0
            ),
        )
        self.count(answer.usage)
        scored = [choice.logprobs for choice in sorted(answer.choices, key=lambda choice: choice.index)]
        ids: dict[str, int] = {}
        rows = [[ids.setdefault(token, len(ids)) for token in entry.tokens] for entry in scored]
        starts = plan(rows[0], rows[1:]).starts
        values = [
            [value for value in entry.token_logprobs[start:] if value is not None]
            for entry, start in zip(scored[1:], starts)
        ]
        decision = job.method(values)
        meta = _meta(answer, "select", None) | {"choices": list(job.choices), "scores": decision.scores}
        return Reply(job.choices[decision.index], meta)


def _message(role: str, parts: list[Any]) -> dict[str, Any]:
    if all(isinstance(part, str) for part in parts):
        return {"role": role, "content": "".join(parts)}
    return {"role": role, "content": [_part(part) for part in expand_videos(parts)]}


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    assert isinstance(part, Image)
    if is_url(part.source):
        return {"type": "image_url", "image_url": {"url": part.source}}
    mime, data = load_image(part.source)
    return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{as_base64(data)}"}}


def _schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def _as_dict(schema: Any) -> dict[str, Any]:
    return json.loads(schema) if isinstance(schema, str) else dict(schema)


def _meta(answer: Any, reason: str | None, logprobs: Any, usage: Any = None) -> dict[str, Any]:
    usage = usage or getattr(answer, "usage", None)
    details = getattr(usage, "prompt_tokens_details", None)
    meta = {
        "id": getattr(answer, "id", None),
        "finish_reason": {"type": reason or "stop"},
        "prompt_tokens": getattr(usage, "prompt_tokens", None),
        "completion_tokens": getattr(usage, "completion_tokens", None),
        "cached_tokens": getattr(details, "cached_tokens", None) or 0,
    }
    return meta if logprobs is None else {**meta, "output_token_logprobs": logprobs}


def _logprobs(choice: Any) -> list[tuple[float, None, str]] | None:
    content = getattr(getattr(choice, "logprobs", None), "content", None)
    return None if content is None else [(token.logprob, None, token.token) for token in content]
