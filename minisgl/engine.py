"""The engine's thread: one loop that takes requests in, runs steps, and hands tokens out.

Two loops do the same work.  The plain one is what one would write first:

    host    |schedule N|          |commit N|schedule N+1|            |commit N+1|
    device             |  step N  |                     |  step N+1  |

and leaves the device idle while the host thinks.  The overlapped one forms step N+1 before it has seen what step N
sampled (a decode needs to know only that there is one more token, which stays on the device), and commits N while the
device runs N+1:

    host    |sched N+1|commit N-1..|sched N+2| commit N ..|
    device  |    step N    |    step N+1     |   step N+2

The price: a request that ends by a stop token is computed for one more step, whose token is dropped.  So is a request
for which a grammar then forces tokens; where at least half of a step's requests may jump forward, the next step is
therefore formed after its commit, and only the masks are made while the device works.

Everything that touches scheduler, tree or pool happens on this thread; other threads speak to it through one inbox.
An error in a step ends the requests of the engine with that error, empties the cache (what the step wrote cannot be
trusted) and leaves the engine serving; an error in that clean-up is the end of the engine, and every waiter is told.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import forking
from .output import OVER, EngineError
from .request import Request, Status

if TYPE_CHECKING:
    from .output import Alternatives
    from .runner import Runner, Step
    from .scheduler import Scheduler


@dataclass
class Counters:
    """Totals since the start (or `reset`).  Times in seconds."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    host_time: float = 0.0  # forming batches and committing results: what the overlapped loop hides
    busy_time: float = 0.0  # wall time with at least one request in the engine


class Engine:
    """Runs `scheduler` and `runner` on a thread of its own until `stop`.

    overlap   the overlapped loop instead of the plain one
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, overlap: bool):
        self.scheduler, self.runner, self.overlap = scheduler, runner, overlap
        self.jump_at_start = runner.cuda
        self.counters = Counters()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[str, Request] = {}
        # guards `_dead` against submissions; a stream that the garbage collector closes may abort inside it
        self._lock = threading.RLock()
        self._dead: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="minisgl-engine", daemon=True)
        forking.tell(self, computes=True)
        self._thread.start()

    # ---- from any thread -----------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> None:
        """Queue requests, all at once: none of them starts before the last has arrived."""
        now = time.perf_counter()
        for request in requests:
            request.submitted = now
        self._post(lambda: self._accept(requests))

    def abort(self, requests: list[Request], message: str = "aborted by the caller") -> None:
        """End requests; those that have ended, or were not taken in, are ignored.  Returns at once."""
        self._post(lambda: self._abort(requests, message), ignore_dead=True)

    def abort_named(self, name: str, message: str = "aborted by the caller") -> None:
        """The same for the requests whose id or group this is."""

        def run() -> None:
            self._abort([r for r in self._live.values() if name in (r.rid, r.group)], message)

        self._post(run, ignore_dead=True)

    def call(self, function: Callable[[], Any], *, writes: bool = False) -> Any:
        """Run `function` on the engine's thread between two steps and return its result.

        writes: it changes tree or scheduler: should it fail half-way they cannot be trusted, as after a failed step.
        """
        if threading.current_thread() is self._thread:  # a callback of a request, which must not wait for itself
            return function()
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if writes:
                    raise

        self._post(run)
        return future.result()

    def stop(self) -> None:
        """End every request and the thread; may be called again."""
        with self._lock:
            if self._dead is None:
                self._dead = EngineError("the engine was shut down")
            self._stopping = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._dead is None

    def after_fork(self) -> None:
        """In a child process: what is asked of the engine would wait for a thread that is not here."""
        self._lock, self._inbox = threading.RLock(), queue.SimpleQueue()
        self._dead = EngineError(forking.message("this Runtime"))

    def _post(self, action: Callable[[], None], ignore_dead: bool = False) -> None:
        with self._lock:
            if self._dead is None:
                self._inbox.put(action)
                return
        if not ignore_dead:
            raise self._wrap(self._dead)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        loop = self._overlapped_loop if self.overlap else self._plain_loop
        try:
            with torch.inference_mode():
                if self.runner.cuda:
                    torch.cuda.set_device(self.runner.device)
                while not self._stopping:
                    try:
                        loop()
                    except Exception as error:
                        self._recover(error)
        except BaseException as error:
            self._die(error)
        else:
            self._die(EngineError("the engine was shut down"))

    def _plain_loop(self) -> None:
        while self._receive():
            begin = time.perf_counter()
            batch = self.scheduler.next_batch()
            self.counters.host_time += time.perf_counter() - begin
            if batch is None:
                self._expect_idle()
                continue
            launched = time.perf_counter()
            step = self.runner.launch(batch)
            self.runner.sample(step)
            self._note("launch", formed=begin, began=launched, queued=self.runner.cuda)
            self._commit(step)
            self.counters.busy_time += time.perf_counter() - begin

    def _overlapped_loop(self) -> None:
        lagging: Step | None = None
        while self._receive(wait=lagging is None):
            begin = time.perf_counter()
            if lagging is not None and lagging.jumps:
                self._commit(lagging)
                lagging = None
            formed = time.perf_counter()
            batch = self.scheduler.next_batch()
            self.counters.host_time += time.perf_counter() - formed
            step = None
            if batch is not None:
                launched = time.perf_counter()
                step = self.runner.launch(batch)
                if step.guides is None:
                    self.runner.sample(step)
                self._note("launch", formed=formed, began=launched, queued=self.runner.cuda)
            elif lagging is None:
                self._expect_idle()
            if lagging is not None:
                self._commit(lagging, step)
            if step is not None and step.guides is not None:
                self.runner.sample(step)  # its masks needed the tokens that were just committed
            lagging = step
            self.counters.busy_time += time.perf_counter() - begin

    def _receive(self, wait: bool = True) -> bool:
        """Take in what others asked for; with nothing to do, wait for it.  False: the engine is to stop."""
        block = wait and self.scheduler.idle
        while True:
            try:
                action = self._inbox.get(block=block)
            except queue.Empty:
                return not self._stopping
            if action is None:
                return False
            action()
            block = block and self.scheduler.idle

    def _expect_idle(self) -> None:
        if not self.scheduler.idle:
            s = self.scheduler
            raise EngineError(
                f"no progress: {len(s.waiting)} requests wait and {len(s.running)} run, but none can take a step "
                f"({s.allocator.available} slots free, {s.tree.evictable} evictable of {s.allocator.capacity})"
            )

    def _commit(self, step: Step, launched: Step | None = None) -> None:
        """Wait for a step's tokens, give them to the scheduler and to whoever watches.

        `launched`: the step that was formed since, if there is one.
        """
        waiting = time.perf_counter()
        sampled = self.runner.results(step)
        self._note("results", began=waiting)
        begin = time.perf_counter()
        for score in step.prompt_scores:
            values = score.logprobs.to_lists([score.request.top_logprobs] * len(score.logprobs.chosen))
            score.request.sink.prompt_scores(score.first, values)
        progress = self.scheduler.commit(step.batch, sampled)
        for request in progress.started:
            request.first_token = begin
        if progress.watched:
            self._deliver(step, progress.watched, launched)
        for request in progress.finished:
            self._ended(request)
        self.counters.steps += 1
        self.counters.output_tokens += progress.tokens
        self.counters.host_time += time.perf_counter() - begin
        self._note("commit", began=begin, tokens=progress.tokens)

    def _note(self, kind: str, **fields: Any) -> None:
        if self.scheduler.events is not None:
            self.scheduler.events.emit(kind, **fields)

    def _deliver(self, step: Step, watched: list[tuple[Request, int, int]], launched: Step | None) -> None:
        logprobs = None
        if step.logprobs is not None:
            logprobs = step.logprobs.to_lists([step.top_logprobs] * len(step.logprobs.chosen))
        for request, token, index in watched:
            value = None
            if logprobs is not None and request.return_logprob:
                chosen, top = logprobs[index]
                value = chosen, top[: request.top_logprobs]
            try:
                if request.guide is not None and request.guide.failure is not None:
                    raise request.guide.failure
                if request.guide is not None and token in self.runner.eos_ids:
                    self._grammar_is_over(request, token, value)
                    continue
                matched = request.sink.token(token, value)
                if matched is None and request.guide is not None and request.status is not Status.FINISHED:
                    request.guide.advance(token)
                    matched = self._jump(request, launched)
            except Exception as error:  # a stop pattern that takes too long, say: this request's problem alone
                self.scheduler.abort(request, str(error))
                self._fail(request, error)
                continue
            if matched is None:
                continue
            if request.status is Status.FINISHED:
                request.finish_reason = {"type": "stop", "matched": matched}
            else:
                self.scheduler.finish(request, {"type": "stop", "matched": matched})
                self._ended(request)

    def _grammar_is_over(self, request: Request, token: int, logprob: tuple[float, Alternatives] | None) -> None:
        """End a request by one of the model's stop ids, whatever the scheduler made of it: gone on, or "length".

        Before `min_new_tokens` the sampler lets them pass only where the grammar has nothing else left.
        """
        if request.status is Status.FINISHED:
            request.finish_reason = {"type": "stop", "matched": token}
            request.sink.token(token, logprob)
        else:
            self._stop_at(request, token, logprob)

    def _jump(self, request: Request, launched: Step | None) -> str | None:
        """Append what the grammar forces, and end the request if that ends it; returns a stop string that it holds."""
        guide = request.guide
        assert guide is not None
        tokens = guide.forced()
        if tokens:
            fitted = self.scheduler.force(request, tokens, launched.batch if launched is not None else None)
            self.runner.count_forced(request, tokens[:fitted])
            outputs = self.scheduler.output_len(request) - fitted
            for i, token in enumerate(tokens[:fitted]):
                if _is_stop(request, token, outputs + i + 1):
                    self.scheduler.unforce(request, fitted - i - 1)
                    self._stop_at(request, token)
                    return None
                guide.advance(token)
                matched = request.sink.token(token)
                if matched is not None:
                    self.scheduler.unforce(request, fitted - i - 1)
                    return matched
            if self.scheduler.is_full(request):
                self.scheduler.finish(request, {"type": "length"})
                self._ended(request)
                return None
        return None

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _accept(self, requests: list[Request]) -> None:
        try:
            self._take_in(requests)
        except BaseException as error:  # each was waited for from the start, also those behind the one that failed
            for request in requests:
                self._fail(request, self._wrap(error))
            raise

    def _take_in(self, requests: list[Request]) -> None:
        rids = collections.Counter(r.rid for r in requests)  # one call may name several requests, and some alike
        taken = next((rid for rid, count in rids.items() if count > 1 or rid in self._live), None)
        if taken is not None:  # all of them or none
            for request in requests:
                _tell(request, ValueError(f"rid {taken!r} is the id of a request that has not ended yet"))
            return
        for request in requests:
            self._live[request.rid] = request
            try:
                self.scheduler.add(request)
            except ValueError as error:
                self._fail(request, error)
                continue
            try:
                self._jump_at_start(request)
            except Exception as error:  # as in `_deliver`
                self.scheduler.abort(request, str(error))
                self._fail(request, error)

    def _jump_at_start(self, request: Request) -> None:
        """A grammar may force the output's first tokens: they join the prompt's computation.

        Not on a CPU, where output is computed as decodes are, bit for bit (`Runner._forward_batch`), unlike prompts.
        """
        guide = request.guide
        if guide is None or not self.jump_at_start:
            return
        room = request.max_len - request.prompt_len - 1  # at least one token is left to sample
        tokens = guide.forced()[: max(room, 0)]
        for i, token in enumerate(tokens, start=1):
            request.tokens = np.concatenate([request.prompt, np.array(tokens[:i], np.int32)])
            request.forced_tokens = i
            if _is_stop(request, token, i):
                self._stop_at(request, token)
                return
            guide.advance(token)
            matched = request.sink.token(token)
            if matched is not None:
                self.scheduler.finish(request, {"type": "stop", "matched": matched})
                self._ended(request)
                return

    def _stop_at(self, request: Request, token: int, logprob: tuple[float, Alternatives] | None = None) -> None:
        """End a request by its last token, a stop id of its own that the sink was not given yet."""
        self.scheduler.finish(request, {"type": "stop", "matched": token})
        request.sink.token(token, logprob)
        self._ended(request)

    def _abort(self, requests: list[Request], message: str) -> None:
        for request in requests:
            if self._live.get(request.rid) is request:
                self.scheduler.abort(request, message)
                self._ended(request)

    def _ended(self, request: Request) -> None:
        if self._live.get(request.rid) is not request:
            return
        request.ended = time.perf_counter()
        self.counters.requests += 1
        self.counters.prompt_tokens += request.prompt_len
        self.counters.cached_tokens += request.cached_tokens or 0
        del self._live[request.rid]  # from here on nobody else would tell it
        try:
            request.sink.end()
        except Exception as error:  # as in `_deliver`: its text cannot be completed, say
            _tell(request, error)
        except BaseException as error:  # the end of this thread, which finds the request in `_live` no more
            _tell(request, self._wrap(error))
            raise
        request.sink = OVER  # they refer to each other

    def _fail(self, request: Request, error: BaseException) -> None:
        if self._live.get(request.rid) is request:
            del self._live[request.rid]
        request.ended = time.perf_counter()
        _tell(request, error)

    def _recover(self, error: Exception) -> None:
        """A step failed: end what runs with its cause, forget what was computed, go on."""
        self.scheduler.drop_all(str(self._wrap(error)))
        for request in list(self._live.values()):
            self._fail(request, self._wrap(error))
        _clear_frames(error)

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self._dead = self._dead or error
        for request in list(self._live.values()):
            self._fail(request, self._wrap(self._dead))
        while True:  # what was posted before `_dead` was set and never taken
            try:
                action = self._inbox.get_nowait()
            except queue.Empty:
                break
            if action is not None:
                with contextlib.suppress(Exception):  # its own waiters were told
                    action()
        for request in list(self._live.values()):
            self._fail(request, self._wrap(self._dead))
        _clear_frames(error)

    @staticmethod
    def _wrap(error: BaseException) -> EngineError:
        """A new exception for each waiter: every `raise` writes into the traceback of what it raises."""
        if isinstance(error, EngineError):
            failed = EngineError(str(error))
            failed.__cause__ = error.__cause__
        else:
            failed = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
        return failed


def _clear_frames(error: BaseException) -> None:
    """Whoever keeps an error keeps its frames: let go of the tensors in them."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def _tell(request: Request, error: BaseException) -> None:
    """Give the request's waiter the error; nothing that goes wrong in doing so may reach the others' requests."""
    sink, request.sink = request.sink, OVER
    try:
        sink.fail(error)
    except BaseException:
        logging.getLogger("minisgl").exception("a callback of request %s failed", request.rid)


def _is_stop(request: Request, token: int, outputs: int) -> bool:
    """Whether a token, the request's `outputs`-th, ends it by its id: `Scheduler.commit`'s rule."""
    return token in request.stop_ids and outputs > request.params.min_new_tokens
