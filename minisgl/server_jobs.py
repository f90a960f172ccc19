"""Between the event loop and the engine's thread: submitting, waiting, streaming, and ending what nobody waits for.

    event loop                                     engine thread
    async with Job    ------------------------->   runs
      (prepared on a worker thread if that takes a while: long prompts, grammars)
    Job.wait / Job.changes   <--- Doorbell.ring    a token, an end
    leaving the Job   ------------------------->   frees the KV at the next step

Three ideas keep HTTP cheap beside an engine in the same interpreter:

*The reader takes, the engine does not give.*  A token only rings a bell.  When a stream's coroutine gets to run, it
writes whatever its sequences have grown by since: one token when the machine is idle, ten when it is busy.  So a client
that reads slowly holds nothing back but its own socket's buffer, and no queue of chunks can grow.

*The bell is answered in rounds*, so that writing takes a bounded share of the interpreter's time (`server_bell`).

*What is quick is done at once.*  Another thread, which must first get the interpreter and then give it back, costs more
than to tokenise a short prompt does.
"""

from __future__ import annotations

import asyncio
import enum
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .output import EngineError, Sink
from .sampling_params import SamplingParams
from .server_bell import Doorbell, Listener

if TYPE_CHECKING:
    import numpy as np

    from .metrics import Metrics
    from .runtime import Runtime

T = TypeVar("T")
_PARAMETERS = {f.name for f in fields(SamplingParams)} | {
    "prompt", "input_ids", "rid", "logprob_start_len", "top_logprobs_num", "messages"
}  # fmt: skip (an error's first word, if it is one of these, is its `param`)
LEAST = -9999.0  # what a log-probability of minus infinity is written as, which JSON has not
OWN_RIDS = "minisgl-"  # how the ids begin that a Runtime makes
MAX_RID = 256  # characters
QUICK_BODY = 4096  # bytes of a body that is tokenised on the loop: well under a millisecond


class ApiError(Exception):
    """An answer other than 200, in OpenAI's words."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after
        self.headers = headers or {}

    @property
    def type(self) -> str:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception: never a traceback, and no inside of a defect."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ImportError):  # an optional grammar engine
        return ApiError(400, str(error))
    if isinstance(error, ValueError):
        name = str(error).partition(" ")[0].rstrip(":")
        return ApiError(400, str(error), param=name if name in _PARAMETERS else None)
    if isinstance(error, EngineError):
        closed = "shut down" in str(error)
        return ApiError(503 if closed else 500, str(error), code="engine_stopped" if closed else "engine_error")
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


class ClientGone(Exception):
    """The client has closed its connection."""


@dataclass
class Limits:
    """What one server takes.  Sizes in bytes or characters, times in seconds."""

    max_queued: int = 1024  # sequences waiting, besides those that the engine runs at once
    max_body: int = 16 << 20
    max_prompts: int = 1024  # in one request
    max_grammar: int = 256 << 10  # characters of a regex, schema or grammar
    max_stops: int = 64  # stop strings, patterns and token ids of each kind in one request
    max_stop_chars: int = 4096  # of all stop strings of one request together: each makes a node of an automaton
    max_tool_calls: int = 16  # in one answer
    body_timeout: float = 60.0
    write_timeout: float = 120.0  # a client that takes nothing for so long is given up
    drain_timeout: float = 30.0
    health_timeout: float = 20.0  # for one token


class Admission:
    """Counts the sequences that are in the engine for HTTP, and refuses those beyond the limit."""

    def __init__(self, limit: int):
        self.limit, self.live = limit, 0
        self._lock = threading.Lock()  # ends are counted on the engine's thread
        self._ends: deque[float] = deque(maxlen=64)

    def take(self, count: int) -> None:
        if count > self.limit:
            raise ApiError(400, f"{count} sequences in one request are more than the queue of {self.limit} can hold")
        with self._lock:
            if self.live + count <= self.limit:
                self.live += count
                return
        raise ApiError(
            429, f"the queue is full: {self.live} sequences", code="queue_full", retry_after=self._retry_after()
        )

    def give(self, count: int = 1, *, ended: bool = True) -> None:
        """ended: they have run, so that the time tells how quickly places become free."""
        with self._lock:
            self.live -= count
            if ended:
                self._ends.extend([time.monotonic()] * count)

    def _retry_after(self) -> int:
        """Seconds in which a tenth of the queue will end, as of late."""
        ends = list(self._ends)
        rate = len(ends) / max(time.monotonic() - ends[0], 1e-3) if ends else 1.0
        return min(max(math.ceil(self.live / 10 / rate), 1), 60)


class Tail:
    """What of one sequence has not been read yet."""

    def __init__(self, sink: Sink):
        self.sink = sink
        self.read = 0  # characters,
        self.counted = 0  # token ids, where there is no text,
        self.scored = 0  # and entries of the log-probabilities
        self.over = False  # its end was read as well

    def take(self) -> tuple[str, bool] | None:
        """(new text, whether that is the end), or None if there is nothing new.  Raises what the sequence failed of."""
        if self.over:
            return None
        ended = self.sink.ended.done()  # before the text, which is complete then
        if ended:
            self.over = True
            self.sink.result()
        text = self.sink.text
        new, self.read = text[self.read :], len(text)
        grown = False
        if self.sink.tokenizer is None:  # all there is to read are ids
            count = len(self.sink.ids)
            grown, self.counted = count > self.counted, count
        return (new, ended) if new or ended or grown else None

    def take_scores(self) -> tuple[list[Any], list[Any]]:
        """New log-probabilities of the text's tokens, and of the likeliest alternatives: not of a stop token that is
        no text, so that while one ends the sequence its entry is left for the last call."""
        scores, reason = self.sink.logprobs, self.sink.request.finish_reason
        if scores is None:
            return [], []
        begin, end = self.scored, len(scores.output_top)  # appended last
        if end and reason is not None and (not self.over or self.sink.is_trimmed_stop(scores.output[end - 1][1])):
            end -= 1
        self.scored = max(end, begin)
        return scores.output[begin:end], scores.output_top[begin:end]


class Where(enum.Enum):
    """Where a request is prepared."""

    QUICK, PLAIN, GRAMMAR = range(3)

    @classmethod
    def of(cls, size: int, grammar: bool) -> Where:
        """size: bytes of the request's body."""
        return cls.GRAMMAR if grammar else cls.QUICK if size <= QUICK_BODY else cls.PLAIN


class Abortable(Protocol):
    """What a client may end by its name."""

    def abort(self, name: str | None = None) -> None: ...


class Job:
    """Some sequences of one request, in the engine: `async with` prepares and submits them, and ends on leaving
    whatever still runs of them.

    count     of sequences, which take their places in the queue until the engine has ended them, however long the
              response takes; 0: they are counted already
    make      makes their sinks and raises ValueError for whatever is wrong
    stream    `changes` will be read, not just `wait`
    where     `make` is called: QUICK, on the loop; PLAIN or GRAMMAR, on a worker thread

    Entering raises ApiError, and what `make` raises.
    """

    sinks: Sequence[Sink] = ()
    tails: list[Tail]

    def __init__(self, service: Service, count: int, make: Callable[[], Sequence[Sink]], *, stream: bool, where: Where):
        self.service, self._count, self._make, self.stream, self._where = service, count, make, stream, where
        self._listener = Listener(service.bell)
        self._submitted = False
        self._called_off: set[str | None] = set()  # what `abort` was called with before there was anything to abort

    async def __aenter__(self) -> Job:
        service, count = self.service, self._count
        if count:
            service.check_open()
            service.admission.take(count)
        service.jobs.add(self)
        try:
            if self._where is Where.QUICK:
                self.sinks = self._make()
            else:
                self.sinks = await service.off_loop(self._make, grammar=self._where is Where.GRAMMAR)
            self._left = len(self.sinks)
            for sink in self.sinks:
                if self.stream:
                    sink.notify(self._listener.ring)
                sink.ended.add_done_callback(self._ended)
            self.tails = [Tail(sink) for sink in self.sinks]
            service.runtime.engine.submit([sink.request for sink in self.sinks])
        except BaseException:
            service.jobs.discard(self)
            service.admission.give(count, ended=False)
            raise
        self._submitted = True
        for name in self._called_off:
            self.abort(name)
        for sink in self.sinks:  # called at once where it has ended already
            sink.ended.add_done_callback(partial(self._account, sink))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.service.jobs.discard(self)
        self.abort()

    def _ended(self, _: Any) -> None:
        self._left -= 1  # on the engine's thread, one after the other
        if not self._left:
            self._listener.ring_last()

    def _account(self, sink: Sink, _: Any) -> None:
        if self._count:
            self.service.admission.give()
        self.service.metrics.observe(sink.request)

    def abort(self, name: str | None = None) -> None:
        """End what has not ended, or what of it has this id or group; what is being prepared ends when it begins."""
        if not self._submitted:
            self._called_off.add(name)
        elif self._left:
            requests = [sink.request for sink in self.sinks]
            self.service.runtime.engine.abort([r for r in requests if name in (None, r.rid, r.group)])

    async def wait(self) -> list[dict[str, Any]]:
        """The replies, when all sequences have ended.  Raises what the first of them failed of."""
        while self._left:
            await self._listener.wait()
        return [sink.result() for sink in self.sinks]

    async def changes(self) -> AsyncIterator[list[tuple[int, Tail, str, bool]]]:
        """In rounds, (index, tail, new text, whether that is its end) of the sequences that have news."""
        open_ = len(self.tails)
        while open_:
            await self._listener.wait()
            news = [(i, tail, *new) for i, tail in enumerate(self.tails) if (new := tail.take()) is not None]
            open_ -= sum(end for *_, end in news)
            if news:
                yield news


class Service:
    """A runtime as the routes see it.  Belongs to one event loop, which must be running.

    names   what `model` may be in requests; the first is the one that answers carry
    """

    def __init__(self, runtime: Runtime, names: Sequence[str], limits: Limits, metrics: Metrics):
        self.runtime, self.names, self.limits, self.metrics = runtime, names, limits, metrics
        self.admission = Admission(limits.max_queued + runtime.scheduler.table.max_requests)
        self.bell = Doorbell(asyncio.get_running_loop())
        self.draining = False
        self.jobs: set[Abortable] = set()  # also those that are not in the engine yet, or not just now
        self.probe: asyncio.Future[None] | None = None  # the /health_generate that is under way
        self.started = time.time()
        self.flushes = 0
        # apart, so that a slow grammar does not keep plain requests waiting
        self._plain = ThreadPoolExecutor(4, "minisgl-prepare")
        self._grammars = ThreadPoolExecutor(2, "minisgl-grammar")

    def abort_all(self) -> None:
        """End every sequence that runs for HTTP; their clients get what there is."""
        for job in list(self.jobs):
            job.abort()

    def abort(self, name: str) -> None:
        """The same for those with this id or group, also if somebody in this process has submitted them."""
        self.runtime.abort(name)
        for job in list(self.jobs):
            job.abort(name)

    def close(self) -> None:
        self._plain.shutdown(wait=False, cancel_futures=True)
        self._grammars.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, function: Callable[[], T], *, grammar: bool = False) -> T:
        """Run what takes a while on a worker thread."""
        pool = self._grammars if grammar else self._plain
        return await asyncio.get_running_loop().run_in_executor(pool, function)

    def rid(self, given: str | None) -> str:
        """The name of a request: what the client gave, or one that nobody can guess, since who knows it may abort it.

        Raises ApiError for one that could be an id that the engine makes itself, for a caller in this process."""
        if given is None:
            return secrets.token_hex(12)
        if given.startswith(OWN_RIDS) or not 1 <= len(given) <= MAX_RID:
            message = f"rid must have 1 to {MAX_RID} characters and not begin with {OWN_RIDS!r}"
            raise ApiError(400, message, param="rid")
        return given

    def check_open(self) -> None:
        if self.draining or not self.runtime.engine.alive:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)

    def check_grammar(self, name: str, source: str | None) -> None:
        if source is not None and len(source) > self.limits.max_grammar:
            raise ApiError(
                400, f"{name} has {len(source)} characters, at most {self.limits.max_grammar} are taken", param=name
            )

    def check_stops(self, params: Mapping[str, Any]) -> None:
        """Each token's text is compared with every stop, on the engine's thread."""
        for name in ("stop", "stop_regex", "stop_token_ids"):
            stops = params.get(name) or ()
            if not isinstance(stops, str) and len(stops) > self.limits.max_stops:
                most = self.limits.max_stops
                raise ApiError(400, f"{name} has {len(stops)} entries, at most {most} are taken", param=name)
            texts = [stops] if isinstance(stops, str) else [stop for stop in stops if isinstance(stop, str)]
            chars, most = sum(map(len, texts)), self.limits.max_stop_chars
            if chars > most:
                raise ApiError(400, f"{name} has {chars} characters, at most {most} are taken", param=name)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(
                404, f"the model {name!r} does not exist here, only {self.names[0]!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def check_length(self, ids: Sequence[int] | np.ndarray, max_new_tokens: int) -> None:
        """Raises ApiError, with both numbers, if a prompt leaves no room for a token."""
        context = self.runtime.scheduler.max_context
        limit = context - (1 if max_new_tokens else 0)
        if len(ids) > limit:
            raise ApiError(
                400, f"the prompt has {len(ids)} tokens, but at most {limit} fit the context of {context} tokens",
                code="context_length_exceeded",
            )  # fmt: skip


@lru_cache(maxsize=1024)
def _from_items(items: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    return SamplingParams.make({name: value for name, _, value in items})


def cached_params(params: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams.make`; a server's requests mostly bring the same few numbers, which are checked once.

    The types are part of the key: 1, 1.0 and True are equal."""
    if all(type(value) in (int, float, bool, NoneType) for value in params.values()):
        return _from_items(tuple((name, type(value), value) for name, value in params.items()))
    return SamplingParams.make(params)  # texts can be long, and would be kept


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """Tokens.  cached: of the prompts' tokens, those that the cache had."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip


def finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or logprob > LEAST else LEAST
