"""SGLang's native API: /generate and its neighbours, which `RuntimeEndpoint` and the router speak.

A reply is what `Runtime.generate` returns: {"text", "output_ids", "meta_info"}.  A stream's events carry the whole text
so far, as SGLang's do; with several prompts or n > 1 each event has the "index" of its sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from . import __version__
from .sampling_params import SamplingParams
from .server_http import Connected, EventStream, Reply, event, parse
from .server_jobs import ApiError, Job, Service, Where, cached_params, finite
from .server_schemas import MAX_OUTPUTS, AbortRequest, GenerateRequest

if TYPE_CHECKING:
    from starlette.requests import Request

    from .output import Sink
    from .runtime import Runtime
    from .tokenizer import BaseTokenizer

MAX_TOPS = 128  # alternatives at each token: all of a vocabulary would be gigabytes
_LISTED = {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}


async def generate(service: Service, request: Request) -> Response:
    limits = service.limits
    body, size = await parse(request, GenerateRequest, limits.max_body, limits.body_timeout)
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give text or input_ids, one of the two", param="text")
    given: Any = body.text if body.text is not None else body.input_ids
    single = isinstance(given, str) or not given or isinstance(given[0], int)
    prompts = [given] if single else given
    if len(prompts) > limits.max_prompts:
        raise ApiError(400, f"at most {limits.max_prompts} prompts, got {len(prompts)}", param="text")
    params = [_params(service, p) for p in _each(body.sampling_params, len(prompts), "sampling_params")]
    listed = {name: getattr(body, name) for name in _LISTED}
    tops = listed["top_logprobs_num"]
    if max(tops if isinstance(tops, list) else [tops or 0], default=0) > MAX_TOPS:
        raise ApiError(400, f"top_logprobs_num must be at most {MAX_TOPS}", param="top_logprobs_num")
    name = "prompt" if body.text is not None else "input_ids"

    def make() -> list[Sink]:
        if not any(isinstance(value, list) for value in (body.rid, *listed.values())):
            own: Any = params[0] if single else params
            options = {k: _or(v, _LISTED[k]) for k, v in listed.items()}
            return _prepare(service, body, {name: given}, own, options, service.rid(body.rid))  # type: ignore[arg-type]
        rids = [service.rid(rid) for rid in _each(body.rid, len(prompts), "rid")]
        rows = {k: _each(_or(v, _LISTED[k]), len(prompts), k) for k, v in listed.items()}
        sinks = [
            sink for i, prompt in enumerate(prompts)
            for sink in _prepare(service, body, {name: prompt}, params[i], {k: v[i] for k, v in rows.items()}, rids[i])
        ]  # fmt: skip
        if isinstance(body.rid, str) and len(sinks) > 1:  # one for all names the group
            for i, sink in enumerate(sinks):
                sink.request.rid = f"{body.rid}-{i}"
        return sinks

    count = sum(p.n for p in params)
    where = Where.of(size, grammar=any(p.grammar is not None for p in params))
    job = Job(service, count, make, stream=body.stream, where=where)
    many = not single or count > 1
    if body.stream:
        held = AsyncExitStack()
        with Connected(request.scope):
            await held.enter_async_context(job)
        return EventStream(_events(job, many), held, limits.write_timeout)
    with Connected(request.scope):
        async with job:
            replies = [_finite(reply) for reply in await job.wait()]
    return Reply(replies if many else replies[0])


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _each(value: Any, count: int, name: str) -> Sequence[Any]:
    """One value for each prompt, of one for all or a list."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ApiError(400, f"{name} has {len(value)} entries for {count} prompts", param=name)
    return value


def _params(service: Service, given: dict[str, Any] | None) -> SamplingParams:
    params = cached_params({k: v for k, v in (given or {}).items() if v is not None})
    if params.n > MAX_OUTPUTS:
        raise ApiError(400, f"n must be at most {MAX_OUTPUTS}, got {params.n}", param="n")
    service.check_stops({"stop": params.stop, "stop_regex": params.stop_regex, "stop_token_ids": params.stop_token_ids})
    if params.grammar is not None:
        service.check_grammar(*params.grammar)
    return params


def _prepare(
    service: Service, body: GenerateRequest, prompts: dict[str, Any], params: Any, options: dict[str, Any],
    rid: str,
) -> list[Sink]:  # fmt: skip
    sinks, _ = service.runtime.prepare(
        sampling_params=params, **prompts, **options, return_text_in_logprobs=body.return_text_in_logprobs,
        priority=body.priority or 0, rid=rid,
    )  # fmt: skip
    return sinks


async def _events(job: Job, many: bool) -> AsyncGenerator[bytes, None]:
    async for news in job.changes():
        pieces = []
        for i, tail, _, end in news:
            ids = tail.sink.ids.copy()
            meta = tail.sink.meta_info(len(ids))
            if not end:  # the engine knows how it ends before the text is complete; only the last event says so
                meta["finish_reason"] = None
                _to_one_length(ids, meta)
            reply = {"text": tail.sink.text[: tail.read], "output_ids": ids, "meta_info": meta}
            pieces.append(event({"index": i, **_finite(reply)} if many else _finite(reply)))
        yield b"".join(pieces)


def _to_one_length(ids: list[int], meta: dict[str, Any]) -> None:
    """The engine's thread goes on while one list after the other is copied."""
    lists = [ids, *(meta[name] for name in ("output_token_logprobs", "output_top_logprobs") if name in meta)]
    meta["completion_tokens"] = shortest = min(map(len, lists))
    for entries in lists:
        del entries[shortest:]


def _finite(reply: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of minus infinity as a number that JSON has."""
    meta = reply["meta_info"]
    for name in ("output_token_logprobs", "input_token_logprobs"):
        if name in meta:
            meta[name] = [_entry(entry) for entry in meta[name]]
    for name in ("output_top_logprobs", "input_top_logprobs"):
        if name in meta:
            meta[name] = [None if row is None else [_entry(entry) for entry in row] for row in meta[name]]
    return reply


def _entry(entry: tuple[float | None, int, str | None]) -> tuple[float | None, int, str | None]:
    value, token, text = entry
    return finite(value), token, text


# ---- managing ------------------------------------------------------------------------------------------------------


async def abort_request(service: Service, request: Request) -> Response:
    body, _ = await parse(request, AbortRequest, service.limits.max_body, service.limits.body_timeout)
    if body.abort_all:
        service.abort_all()
    elif body.rid:
        service.abort(service.rid(body.rid))
    else:
        raise ApiError(400, "rid is missing (or abort_all)", param="rid")
    return Reply({"success": True})


async def flush_cache(service: Service, request: Request) -> Response:
    flushed = await service.off_loop(service.runtime.flush_cache)
    service.flushes += 1
    return Reply({"success": True, "flushed_tokens": flushed})


async def model_info(service: Service, request: Request) -> Response:
    runtime = service.runtime
    config, tokenizer = runtime.config, _tokenizer(runtime)
    template = None if tokenizer is None else tokenizer.chat_template
    return Reply({
        "model_path": runtime.name, "served_model_name": service.names[0], "is_generation": True,
        "has_image_understanding": False, "vocab_size": config.vocab_size,
        "context_length": runtime.scheduler.max_context, "eos_token_ids": list(runtime.eos_token_ids),
        "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
        "chat_template": None if template is None else template.templates,
        "special_tokens": {} if template is None else template.special_tokens,
    })  # fmt: skip


def _tokenizer(runtime: Runtime) -> BaseTokenizer | None:
    try:
        return runtime.tokenizer
    except ValueError:  # it came without
        return None


async def server_info(service: Service, request: Request) -> Response:
    runtime, scheduler = service.runtime, service.runtime.scheduler
    stats = await service.off_loop(runtime.stats)
    return Reply({
        "version": __version__, "model_path": runtime.name, "served_model_name": service.names[0],
        "device": str(runtime.device), "dtype": str(runtime.dtype).removeprefix("torch."),
        "max_context": scheduler.max_context, "max_running_requests": scheduler.table.max_requests,
        "max_queued_requests": service.limits.max_queued, "schedule_policy": scheduler.policy,
        "chunk_size": scheduler.chunk_size, "started": service.started, "draining": service.draining,
        "cache_epoch": f"{service.started}-{service.flushes}", **stats,
    })  # fmt: skip


async def health(service: Service, request: Request) -> Response:
    service.check_open()
    return Reply({"status": "ok"})


async def health_generate(service: Service, request: Request) -> Response:
    """Generates one token, behind all that waits; 503 if that takes longer than `health_timeout`.

    Asked without a key and not counted in the queue: so however many ask, one sequence answers them all."""
    service.check_open()
    if service.probe is None or service.probe.done():
        service.probe = asyncio.ensure_future(_one_token(service))
    await asyncio.shield(service.probe)
    return Reply({"status": "ok"})


async def _one_token(service: Service) -> None:
    one = {"max_new_tokens": 1, "temperature": 0}

    async def run() -> None:
        def make() -> list[Sink]:
            return service.runtime.prepare(None, one, input_ids=[0])[0]

        async with Job(service, 0, make, stream=False, where=Where.QUICK) as job:
            await job.wait()

    try:
        await asyncio.wait_for(run(), service.limits.health_timeout)
    except (TimeoutError, asyncio.TimeoutError):
        seconds = service.limits.health_timeout
        raise ApiError(503, f"no token came within {seconds:g} seconds", code="engine_stuck") from None


async def metrics(service: Service, request: Request) -> Response:
    accept = request.headers.get("accept", "")
    page, kind = await service.off_loop(lambda: service.metrics.page(accept))
    return Response(page, headers={"Content-Type": kind})


async def models(service: Service, request: Request) -> Response:
    name = request.path_params.get("rest")
    if name is not None:
        service.check_model(name)
    card = {"id": service.names[0], "object": "model", "created": int(service.started), "owned_by": "minisgl",
            "root": service.runtime.name, "max_model_len": service.runtime.scheduler.max_context}  # fmt: skip
    return Reply(card if name is not None else {"object": "list", "data": [card]})


async def embeddings(service: Service, request: Request) -> Response:
    raise ApiError(400, f"{service.names[0]!r} generates text and has no embeddings", code="unsupported_endpoint")

