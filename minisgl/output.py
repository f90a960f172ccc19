"""From a request's tokens to what its caller reads: text, stops, log-probabilities, meta information.

A request that nobody watches costs nothing per token: its text is made once, by the caller's own thread, when it has
ended.  A *watched* one (streamed, with stop strings, with log-probabilities) is fed token by token on the engine's
thread, since a stop string may end it.

    engine thread                                  caller's thread
    Sink.token(id) -> text -> stop strings         Sink.result()   waits, then {"text", "output_ids", "meta_info"}
         |                      |
         |                      '-> "stop here"
         |-> on_chunk(dict)  for a stream whose reader wants every chunk
         '-> on_progress()   for one that reads `text` and `ids` at its own pace (`Sink.notify`)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import forking
from .detokenizer import Detokenizer
from .stops import StopChecker

if TYPE_CHECKING:
    from .request import Request
    from .tokenizer import BaseTokenizer

Alternatives = list[tuple[float, int]]  # (log-probability, token id), likeliest first
Triple = tuple[float | None, int, str | None]  # (log-probability, token id, its text if wanted)


class EngineError(RuntimeError):
    """The engine failed while it ran this request; the cause is chained."""


@dataclass
class TokenLogprobs:
    """Log-probabilities gathered for one request, as its reply shows them.

    Prompt entries start at position `start`; those of position 0, which nothing predicts, are None.
    """

    start: int | None
    top_n: int
    with_text: bool
    prompt: list[Triple] = field(default_factory=list)
    prompt_top: list[list[Triple] | None] = field(default_factory=list)
    output: list[Triple] = field(default_factory=list)
    output_top: list[list[Triple]] = field(default_factory=list)


class Ending:
    """The end of a request: a future without a value, of which an engine makes thousands a second.

    `concurrent.futures.Future` has a condition of its own and keeps its callbacks for ever; this lets go of what it has
    called, so that a request and whoever watched it are freed as soon as nobody asks for them any more.
    """

    __slots__ = ("_born", "_callbacks", "_done", "error")

    # No lock: what may be called from a finaliser, in the middle of anything, must not wait for one.  A list's append
    # and pop are atomic, so each callback is taken by one thread, whether it came before the end or after it.

    def __init__(self) -> None:
        self._done = False
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[Ending], Any]] = []
        self._born = forking.born()

    def done(self) -> bool:
        return self._done

    def set(self, error: BaseException | None = None) -> None:
        """It has ended, with this failure or well; only the first call counts.  Callbacks run on this thread."""
        if not self._done:
            self.error = error
            self._done = True
            self._call()

    def add_done_callback(self, callback: Callable[[Ending], Any]) -> None:
        """Call it with this object at the end, or now if that has been.  What it raises is logged."""
        self._callbacks.append(callback)
        if self._done:
            self._call()

    def _call(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread has just taken the last one
                return
            try:
                callback(self)
            except BaseException:  # the others wait as well
                logging.getLogger("minisgl").exception("a callback at the end of a request failed")

    def check(self) -> None:
        """Raises EngineError if it has not ended and never will: in a child process, where no engine runs."""
        why = None if self._done else forking.stayed(self._born)
        if why is not None:
            raise EngineError(why)

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end; raises the failure.  TimeoutError after `timeout` seconds."""
        self.check()
        if not self._done:
            over = threading.Event()
            self.add_done_callback(lambda _: over.set())
            if not over.wait(timeout):
                raise TimeoutError(f"the request has not ended within {timeout} s")
        if self.error is not None:
            raise self.error


async def all_ended(sinks: Sequence[Sink]) -> None:
    """Wait, as a coroutine, until all of them have ended, waking the loop once.  Raises a failure when it happens."""
    loop, count = asyncio.get_running_loop(), itertools.count(1)
    over = loop.create_future()

    def wake() -> None:
        if not over.done():
            over.set_result(None)

    def ended(ending: Ending) -> None:  # on the engine's thread, or on this one for what has ended already
        if next(count) == len(sinks) or ending.error is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(wake)

    for sink in sinks:
        sink.ended.add_done_callback(ended)
    await over
    for sink in sinks:
        if sink.ended.error is not None:
            raise sink.ended.error


class Over:
    """Takes the place of the sink of a request that has ended: what comes late is dropped."""

    def token(self, token: int, logprob: tuple[float, Alternatives] | None = None) -> None:
        return None

    def prompt_scores(self, first: int, scores: list[tuple[float, Alternatives]]) -> None:
        return None

    def end(self) -> None:
        return None

    def fail(self, error: BaseException) -> None:
        return None


OVER = Over()


class Sink:
    """Receives one request's tokens and end.  Made by the caller, fed by the engine."""

    def __init__(
        self,
        request: Request,
        tokenizer: BaseTokenizer | None,
        *,
        on_chunk: Callable[[dict[str, Any] | BaseException | None], None] | None = None,
        logprobs: TokenLogprobs | None = None,
    ):
        self.request, self.tokenizer = request, tokenizer
        self.on_chunk = on_chunk
        self.on_progress: Callable[[], None] | None = None
        self.logprobs = logprobs
        self.ended = Ending()
        self._text = ""
        self._sent = 0  # characters of the text that chunks have carried
        self._ids: list[int] = []
        params = request.params
        if logprobs is not None and logprobs.start == 0:
            logprobs.prompt.append(self._triple(None, int(request.prompt[0])))
            logprobs.prompt_top.append(None)
        stops = bool(params.stop or params.stop_regex)
        self.watches = on_chunk is not None or stops or logprobs is not None or request.guide is not None
        self._detokenizer = self._checker = None
        if self.watches:
            self._begin_text()

    def _begin_text(self) -> None:
        if self.tokenizer is not None and self._detokenizer is None:
            params = self.request.params
            self._detokenizer = self._new_detokenizer()
            self._checker = StopChecker(list(params.stop), list(params.stop_regex), params.no_stop_trim)

    def notify(self, on_progress: Callable[[], None]) -> None:
        """Before submission: have `on_progress` called, on the engine's thread, when there is more to read, and when
        `ended` is set.  It must be quick; unlike a chunk it carries nothing, so a slow reader holds nothing up."""
        self.on_progress = on_progress
        self.watches = self.request.watch = True
        self._begin_text()

    @property
    def text(self) -> str:
        """The text so far of a watched request, from any thread."""
        return self._text

    @property
    def ids(self) -> list[int]:
        """Its token ids so far; it goes on growing, so copy what is to be kept."""
        return self._ids

    def _new_detokenizer(self) -> Detokenizer:
        params = self.request.params
        assert self.tokenizer is not None
        return Detokenizer(
            self.tokenizer,
            self.request.prompt,  # pyright: ignore[reportArgumentType] (an array; its last few ids are read)
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
        )

    # ---- engine thread -------------------------------------------------------------------------------------------

    def token(self, token: int, logprob: tuple[float, Alternatives] | None = None) -> str | None:
        """Take one token; returns the stop string or pattern that it completes, if it does."""
        self._ids.append(token)
        if self.logprobs is not None and logprob is not None:
            self.logprobs.output.append(self._triple(logprob[0], token))
            self.logprobs.output_top.append(self._triples(logprob[1]))
        if self._detokenizer is None or self._checker is None:
            self._chunk()
            return None
        if self.is_trimmed_stop(token):
            return None
        late_enough = len(self._ids) > self.request.params.min_new_tokens
        self._text += self._checker.feed(self._detokenizer.push((token,)), check=late_enough)
        if self._checker.matched is None:
            self._chunk()
        return self._checker.matched

    def prompt_scores(self, first: int, scores: list[tuple[float, Alternatives]]) -> None:
        """Log-probabilities of the prompt tokens at positions first, first + 1, ..."""
        if self.logprobs is None or self.logprobs.start is None:
            return
        have = self.logprobs.start + len(self.logprobs.prompt)  # a retracted request scores again
        for position, (value, top) in enumerate(scores[have - first :], start=have):
            self.logprobs.prompt.append(self._triple(value, int(self.request.prompt[position])))
            self.logprobs.prompt_top.append(self._triples(top))

    def end(self) -> None:
        """The request has ended: complete its text and wake whoever waits."""
        if self._detokenizer is not None and self._checker is not None:
            self._text += self._checker.feed(self._detokenizer.finish()) + self._checker.finish()
            reason, matched = self.request.finish_reason, self._checker.matched
            if matched is not None and reason is not None and reason["type"] != "abort":
                self.request.finish_reason = {"type": "stop", "matched": matched}
        if self.on_chunk is not None:
            self.on_chunk(self._snapshot())
        self.ended.set()
        if self.on_chunk is not None:
            self.on_chunk(None)
        if self.on_progress is not None:
            self.on_progress()

    def fail(self, error: BaseException) -> None:
        """The engine could not finish the request."""
        if not self.ended.done():
            self.ended.set(error)
            if self.on_chunk is not None:
                self.on_chunk(error)
            if self.on_progress is not None:
                self.on_progress()

    def is_trimmed_stop(self, token: int) -> bool:
        """A token that ended the request by its id is not text (unless no_stop_trim)."""
        reason = self.request.finish_reason
        stopped = reason is not None and reason["type"] == "stop" and reason["matched"] == token
        return stopped and not self.request.params.no_stop_trim

    def _chunk(self) -> None:
        """Pass on what is new.  The last chunk, the only one with a finish reason, is left to `end`."""
        if self.on_progress is not None:
            self.on_progress()
        new = self._detokenizer is None or len(self._text) > self._sent
        if self.on_chunk is not None and new and self.request.finish_reason is None:
            self.on_chunk(self._snapshot())

    # ---- caller's thread -----------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end, then the reply.  Raises what the engine failed with."""
        self.ended.result(timeout)
        if self._detokenizer is None and self.tokenizer is not None:
            ids = self.request.output.tolist()
            if ids and self.is_trimmed_stop(ids[-1]):
                ids.pop()
            detokenizer = self._new_detokenizer()
            self._text = detokenizer.push(ids) + detokenizer.finish()
        return {
            "text": self._text,
            "output_ids": self.request.output.tolist(),
            "meta_info": self.meta_info(len(self.request.output)),
        }

    def _snapshot(self) -> dict[str, Any]:
        delta, self._sent = self._text[self._sent :], len(self._text)
        ids = self._ids.copy()
        return {"text": self._text, "delta": delta, "output_ids": ids, "meta_info": self.meta_info(len(ids))}

    def meta_info(self, completion_tokens: int) -> dict[str, Any]:
        """The reply's "meta_info": counts in tokens, times in seconds since submission."""
        request = self.request
        info: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish_reason,
            "prompt_tokens": request.prompt_len,
            "completion_tokens": completion_tokens,
            "cached_tokens": request.cached_tokens or 0,
            "forced_tokens": request.forced_tokens,
            "ttft": request.first_token - request.submitted if request.first_token else None,
            "e2e_latency": (request.ended or time.perf_counter()) - request.submitted,
        }
        if self.logprobs is not None:
            info |= self._logprob_info(self.logprobs)
        return info

    @staticmethod
    def _logprob_info(logprobs: TokenLogprobs) -> dict[str, Any]:
        # copies, for a stream's chunks: the lists go on growing
        info: dict[str, Any] = {"output_token_logprobs": logprobs.output.copy()}
        if logprobs.top_n:
            info["output_top_logprobs"] = logprobs.output_top.copy()
        if logprobs.start is not None:
            info["input_token_logprobs"] = logprobs.prompt.copy()
            if logprobs.top_n:
                info["input_top_logprobs"] = logprobs.prompt_top.copy()
        return info

    def _triple(self, value: float | None, token: int) -> Triple:
        wanted = self.logprobs is not None and self.logprobs.with_text and self.tokenizer is not None
        return value, token, self.tokenizer.token_text(token) if wanted else None  # pyright: ignore

    def _triples(self, top: Alternatives) -> list[Triple]:
        return [self._triple(value, token) for value, token in top]
