"""OpenAI's API: /v1/chat/completions and /v1/completions as sequences of the engine.

    body --schema--> ChatRequest --> token ids, SamplingParams --> Job --> one JSON answer, or a stream of chunks

Both routes do the same and differ in how a choice is written, which is what `ChatFormat` and `TextFormat` know.
Answers that may call tools take several sequences each and are in `server_tools`.

Details of the wire that clients rely on: a choice's last chunk carries finish_reason and no text of its own, the text
comes before it; `usage` comes once, in a chunk without choices, if `stream_options.include_usage` asks for it, and is
null in the others then; log-probabilities of minus infinity are written as -9999, which JSON can hold.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from . import __version__
from .server_http import Connected, EventStream, Reply, encode, parse
from .server_jobs import ApiError, Job, Service, Tail, Where, cached_params, finite, usage
from .server_schemas import ChatRequest, CompletionRequest, Sampling
from .server_tools import chat_prompt, talk, uses_tools

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from .output import Sink
    from .tokenizer import BaseTokenizer

DEFAULT_COMPLETION = 16  # tokens, as OpenAI's
_SAME = (
    "temperature", "top_p", "frequency_penalty", "presence_penalty", "stop", "seed", "logit_bias", "top_k", "min_p",
    "repetition_penalty", "stop_token_ids", "stop_regex", "ignore_eos", "skip_special_tokens", "no_stop_trim", "regex",
    "json_schema", "ebnf", "structural_tag",
)  # fmt: skip


# ---- parameters ----------------------------------------------------------------------------------------------------


def sampling_params(service: Service, body: Sampling, max_new_tokens: int) -> dict[str, Any]:
    """The body's parameters by SamplingParams' names.  Raises ApiError."""
    params = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    params["max_new_tokens"] = max_new_tokens
    params["n"] = body.n or 1
    if body.min_tokens is not None:
        params["min_new_tokens"] = body.min_tokens
    service.check_stops(params)
    if body.response_format is not None:
        _add_response_format(params, body.response_format)
    for name in ("regex", "json_schema", "ebnf", "structural_tag"):
        value = params.get(name)
        if value is not None:
            service.check_grammar(name, value if isinstance(value, str) else encode(value).decode())
    return params


def _add_response_format(params: dict[str, Any], wanted: Any) -> None:
    if wanted.type == "text":
        return
    kind, grammar = "json_schema", None
    if wanted.type == "json_object":
        grammar = {"type": "object"}
    elif wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise ApiError(400, "response_format.json_schema is missing", param="response_format.json_schema")
        grammar = wanted.json_schema.schema_
    else:
        kind, grammar = "structural_tag", wanted.model_dump(exclude_none=True)
    if any(params.get(name) is not None for name in ("regex", "json_schema", "ebnf", "structural_tag")):
        raise ApiError(400, "response_format: only one grammar may be given", param="response_format")
    params[kind] = grammar


def check_common(service: Service, body: Sampling) -> None:
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")


# ---- formats -------------------------------------------------------------------------------------------------------


def finish_reason(sink: Sink) -> str:
    return (sink.request.finish_reason or {"type": "abort"})["type"]


class ChatFormat:
    object, piece_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, tokenizer: BaseTokenizer, *, logprobs: bool):
        self.tokenizer, self.logprobs = tokenizer, logprobs
        self._begun: set[int] = set()

    def choice(self, index: int, tail: Tail, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._scores(tail),
                "finish_reason": finish_reason(tail.sink)}  # fmt: skip

    def pieces(self, index: int, tail: Tail, text: str, end: bool) -> list[dict[str, Any]]:
        """Choices of chunks: the text if there is any, and then the end."""
        found = []
        delta: dict[str, Any] = {"content": text}
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", **delta}
        scores = self._scores(tail)
        if text or len(delta) > 1 or (scores is not None and scores["content"]):
            found.append({"index": index, "delta": delta, "logprobs": scores, "finish_reason": None})
        if end:
            found.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason(tail.sink)})
        return found

    def _scores(self, tail: Tail) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        chosen, tops = tail.take_scores()
        content = [{**self._entry(value, token), "top_logprobs": [self._entry(v, t) for v, t, _ in top]}
                   for (value, token, _), top in zip(chosen, tops)]  # fmt: skip
        return {"content": content, "refusal": None}

    def _entry(self, value: float | None, token: int) -> dict[str, Any]:
        pieces = self.tokenizer.text_bytes(False) if self.tokenizer.text_rule is not None else []
        known = list(pieces[token]) if token < len(pieces) else None
        return {"token": self.tokenizer.token_text(token), "logprob": finite(value), "bytes": known}


class TextFormat:
    object, piece_object, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, tokenizer: BaseTokenizer, *, logprobs: bool, echoes: Sequence[str] | None, n: int):
        self.tokenizer, self.logprobs, self.echoes, self.n = tokenizer, logprobs, echoes, n
        self._offsets: dict[int, int] = {}  # characters of tokens written so far, of the choices that have begun

    def choice(self, index: int, tail: Tail, text: str) -> dict[str, Any]:
        echo, scores = self._begin(index, tail)
        return {"index": index, "text": echo + text, "logprobs": self._scores(index, tail, scores),
                "finish_reason": finish_reason(tail.sink)}  # fmt: skip

    def pieces(self, index: int, tail: Tail, text: str, end: bool) -> list[dict[str, Any]]:
        echo, scores = self._begin(index, tail)
        logprobs = self._scores(index, tail, scores)
        found = []
        if echo + text or (logprobs is not None and logprobs["tokens"]):
            found.append({"index": index, "text": echo + text, "logprobs": logprobs, "finish_reason": None})
        if end:
            found.append({"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason(tail.sink)})
        return found

    def _begin(self, index: int, tail: Tail) -> tuple[str, list[tuple[Any, Any]]]:
        """The prompt's text and scores, if they are echoed and this choice has not begun."""
        if index in self._offsets:
            return "", []
        self._offsets[index] = 0
        if self.echoes is None:
            return "", []
        scores = tail.sink.logprobs
        entries = [] if scores is None else list(zip(scores.prompt, scores.prompt_top))
        return self.echoes[index // self.n], entries

    def _scores(self, index: int, tail: Tail, prompt: list[tuple[Any, Any]]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        entries = [*prompt, *zip(*tail.take_scores())]
        texts = [self.tokenizer.token_text(token) for (_, token, _), _ in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        tops = [None if top is None else self._top(top) for _, top in entries]
        return {"tokens": texts, "token_logprobs": [finite(value) for (value, *_), _ in entries],
                "top_logprobs": tops if any(tops) else None, "text_offset": offsets}  # fmt: skip

    def _top(self, top: list[Any]) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for value, token, _ in top:  # likeliest first; of two tokens that look the same it is kept
            found.setdefault(self.tokenizer.token_text(token), finite(value))
        return found


Format = ChatFormat | TextFormat


@dataclass
class Envelope:
    """What surrounds the choices."""

    format: type[ChatFormat] | type[TextFormat]
    model: str
    include_usage: bool = False

    def __post_init__(self) -> None:
        self.base = {"id": self.format.prefix + secrets.token_hex(16), "created": int(time.time()), "model": self.model,
                     "system_fingerprint": f"minisgl-{__version__}"}  # fmt: skip

    @cached_property
    def _head(self) -> bytes:
        return b"data: " + encode({"object": self.format.piece_object, **self.base})[:-1] + b',"choices":['

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> Reply:
        return Reply({"object": self.format.object, **self.base, "choices": choices, "usage": usage})

    def event(self, choice: dict[str, Any]) -> bytes:
        end = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"
        return self._head + encode(choice) + end

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return self._head + b'],"usage":' + encode(usage) + b"}\n\n"


def job_usage(sinks: Sequence[Sink], n: int) -> dict[str, Any]:
    """A prompt counts once for its n outputs, and is cached as far as it was before the first of them ran."""
    requests = [sink.request for sink in sinks]
    groups = [requests[i : i + n] for i in range(0, len(requests), n)]
    cached = sum(min(r.cached_tokens or 0 for r in group) for group in groups)
    return usage(sum(group[0].prompt_len for group in groups), cached, sum(len(r.output) for r in requests))


# ---- routes --------------------------------------------------------------------------------------------------------


async def chat(service: Service, request: Request) -> Response:
    limits = service.limits
    body, size = await parse(request, ChatRequest, limits.max_body, limits.body_timeout)
    check_common(service, body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = sampling_params(service, body, service.runtime.scheduler.max_context if limit is None else limit)
    envelope = Envelope(ChatFormat, service.names[0], include_usage(body))
    if uses_tools(body):
        return await talk(service, request, body, params, envelope)

    def make() -> list[Sink]:
        ids = chat_prompt(service, body)
        service.check_length(ids, params["max_new_tokens"])
        return prepare(service, body, ids, params, bool(body.logprobs), -1, body.top_logprobs or 0)

    form = ChatFormat(service.runtime.tokenizer, logprobs=bool(body.logprobs))
    job = Job(service, params["n"], make, stream=bool(body.stream), where=Where.of(size, constrained(params)))
    return await _respond(request, job, form, envelope, params["n"])


async def completions(service: Service, request: Request) -> Response:
    limits = service.limits
    body, size = await parse(request, CompletionRequest, limits.max_body, limits.body_timeout)
    check_common(service, body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of is not supported, other than equal to n", param="best_of")
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not 1 <= len(prompts) <= limits.max_prompts:
        raise ApiError(400, f"prompt must be 1 to {limits.max_prompts} prompts, got {len(prompts)}", param="prompt")
    limit = DEFAULT_COMPLETION if body.max_tokens is None else body.max_tokens
    params = sampling_params(service, body, limit)
    tokenizer = service.runtime.tokenizer
    echoes: list[str] | None = [] if body.echo else None  # filled where the prompts are prepared
    scored = body.logprobs is not None

    def make() -> list[Sink]:
        if "" in prompts:
            raise ApiError(400, "prompt is empty: at least one character is needed", param="prompt")
        rows = tokenizer.encode_batch(prompts) if isinstance(prompts[0], str) else prompts
        for ids in rows:
            service.check_length(ids, limit)
        if echoes is not None:
            echoes.extend(prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts)
        start = 0 if body.echo and scored else -1
        return prepare(service, body, list(rows), params, scored, start, body.logprobs or 0)

    form = TextFormat(tokenizer, logprobs=scored, echoes=echoes, n=params["n"])
    envelope = Envelope(TextFormat, service.names[0], include_usage(body))
    n = params["n"]
    where = Where.of(size, constrained(params))
    job = Job(service, len(prompts) * n, make, stream=bool(body.stream), where=where)
    return await _respond(request, job, form, envelope, n)


def include_usage(body: Sampling) -> bool:
    return bool(body.stream_options is not None and body.stream_options.include_usage)


def prepare(
    service: Service, body: Sampling, ids: Any, params: dict[str, Any], scored: bool, start: int, top: int
) -> list[Sink]:
    own, rid = cached_params(params), service.rid(body.rid)
    sinks, _ = service.runtime.prepare(
        None, own, input_ids=ids, return_logprob=scored, logprob_start_len=start, top_logprobs_num=top,
        priority=body.priority or 0, rid=rid,
    )  # fmt: skip
    return sinks


def constrained(params: dict[str, Any]) -> bool:
    return any(params.get(name) is not None for name in ("regex", "json_schema", "ebnf", "structural_tag"))


async def _respond(request: Request, job: Job, form: Format, envelope: Envelope, n: int) -> Response:
    if job.stream:
        held = AsyncExitStack()
        with Connected(request.scope):
            await held.enter_async_context(job)
        return EventStream(_chunks(job, form, envelope, n), held, job.service.limits.write_timeout)
    with Connected(request.scope):
        async with job:
            replies = await job.wait()
    for tail in job.tails:
        tail.over = True
    choices = [form.choice(i, tail, reply["text"]) for i, (tail, reply) in enumerate(zip(job.tails, replies))]
    return envelope.whole(choices, job_usage(job.sinks, n))


async def _chunks(job: Job, form: Format, envelope: Envelope, n: int) -> AsyncGenerator[bytes, None]:
    async for news in job.changes():
        found = [piece for i, tail, text, end in news for piece in form.pieces(i, tail, text, end)]
        yield b"".join(map(envelope.event, found))
    if envelope.include_usage:
        yield envelope.usage_event(job_usage(job.sinks, n))
