"""Google's Gemini models through the official client (`pip install google-genai`).

A select is an answer restricted to the choices (`text/x.enum`); json_schema is the API's own response schema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from ..ir import Image, Video
from .base import Job, Reply, need, refuse_params
from .hosted import HostedBackend, chat_messages, is_url, load_image, split_system

_REFUSED = (
    "min_p", "min_new_tokens", "repetition_penalty", "ignore_eos", "stop_token_ids", "stop_regex", "regex", "ebnf",
    "logit_bias",
)  # fmt: skip


class Gemini(HostedBackend):
    """Gemini(model, api_key=None, base_url=None, ...): the key comes from GEMINI_API_KEY if none is given.

    client_options: further keyword arguments of `google.genai.Client`, e.g. vertexai=True
    """

    api: ClassVar[str] = "Gemini"

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
        genai = need("google.genai", pip="google-genai")
        self._types = genai.types
        http_options = None if base_url is None else genai.types.HttpOptions(base_url=base_url)
        self.client = genai.Client(api_key=api_key, http_options=http_options, **client_options)

    def generate(self, job: Job) -> list[Reply]:
        refuse_params(job, self.api, _REFUSED)
        contents, config = self._request(job)
        if job.params.get("json_schema") is not None:
            schema = job.params["json_schema"]
            schema = json.loads(schema) if isinstance(schema, str) else dict(schema)
            config |= {"response_mime_type": "application/json", "response_json_schema": schema}
        if job.on_text is not None:
            return [self._stream(job, contents, config)]
        answer = self._call(job, contents, config)
        meta = self._meta(answer.usage_metadata)
        return [
            Reply(_text(candidate), {**meta, "finish_reason": _reason(candidate)}) for candidate in answer.candidates
        ]

    def choose(self, job: Job) -> Reply:
        choices = self.check_choice(job)
        contents, config = self._request(job)
        config |= {
            "temperature": 0,
            "response_mime_type": "text/x.enum",
            "response_schema": {"type": "STRING", "enum": list(choices)},
        }
        answer = self._call(job, contents, config)
        text = _text(answer.candidates[0])
        chosen = text if text in choices else text.strip()
        if chosen not in choices:
            raise RuntimeError(f"{self.api} answered {text!r}, which is none of the choices {list(choices)}")
        return Reply(chosen, {**self._meta(answer.usage_metadata), "finish_reason": {"type": "select"}})

    def _call(self, job: Job, contents: Any, config: dict[str, Any]) -> Any:
        made = self._types.GenerateContentConfig(**config)
        return self.call(
            job, lambda: self.client.models.generate_content(model=self.model, contents=contents, config=made)
        )

    def _stream(self, job: Job, contents: Any, config: dict[str, Any]) -> Reply:
        made = self._types.GenerateContentConfig(**config)

        def first() -> tuple[Any, Any]:  # the request is sent when the first chunk is asked for: retry that far
            chunks = iter(self.client.models.generate_content_stream(model=self.model, contents=contents, config=made))
            return next(chunks, None), chunks

        chunk, chunks = self.call(job, first)
        text, usage, reason = "", None, {"type": "stop"}
        while chunk is not None and not job.cancelled:
            usage = chunk.usage_metadata or usage
            for candidate in (chunk.candidates or [])[:1]:
                delta = _text(candidate)
                text += delta
                if candidate.finish_reason:
                    reason = _reason(candidate)
                if delta and job.on_text is not None:
                    job.on_text(delta, {"finish_reason": None})
            chunk = next(chunks, None)
        return Reply(text, {**self._meta(usage), "finish_reason": reason})

    def _request(self, job: Job) -> tuple[list[Any], dict[str, Any]]:
        params = job.params
        system, messages = split_system(chat_messages(job.prompt, self))
        roles = {"user": "user", "assistant": "model"}
        contents = [
            self._types.Content(role=roles[role], parts=[self._part(part) for part in parts])
            for role, parts in messages
        ]
        stop = params.get("stop") or []
        config = {
            "system_instruction": system or None,
            "max_output_tokens": params.get("max_new_tokens", 128),
            "candidate_count": params["n"] if params.get("n", 1) > 1 else None,
            "stop_sequences": [stop] if isinstance(stop, str) else list(stop) or None,
            "temperature": params.get("temperature"),
            "top_p": params.get("top_p"),
            "top_k": params["top_k"] if params.get("top_k", -1) > 0 else None,
            "frequency_penalty": params.get("frequency_penalty"),
            "presence_penalty": params.get("presence_penalty"),
            "seed": params.get("seed"),
            "response_logprobs": True if job.options.get("return_logprob") else None,
        }
        return contents, {name: value for name, value in config.items() if value is not None}

    def _part(self, part: Any) -> Any:
        if isinstance(part, str):
            return self._types.Part.from_text(text=part)
        if isinstance(part, Video):
            data = Path(part.path).read_bytes()
            return self._types.Part.from_bytes(data=data, mime_type="video/mp4")
        assert isinstance(part, Image)
        if is_url(part.source):
            return self._types.Part.from_uri(file_uri=part.source)
        mime, data = load_image(part.source)
        return self._types.Part.from_bytes(data=data, mime_type=mime)

    def _meta(self, usage: Any) -> dict[str, Any]:
        prompt = getattr(usage, "prompt_token_count", None)
        completion = getattr(usage, "candidates_token_count", None)
        self.usage.add(prompt, completion)
        cached = getattr(usage, "cached_content_token_count", None) or 0
        return {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}


def _text(candidate: Any) -> str:
    parts = (candidate.content.parts if candidate.content is not None else None) or []
    return "".join(part.text or "" for part in parts if not getattr(part, "thought", None))


def _reason(candidate: Any) -> dict[str, Any]:
    name = getattr(candidate.finish_reason, "name", str(candidate.finish_reason or "STOP"))
    return {"type": {"STOP": "stop", "MAX_TOKENS": "length"}.get(name, name.lower())}
