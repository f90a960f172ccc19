"""The protocol between the language and whatever generates text, and what every backend shares.

The interpreter hands a backend a `Job` and goes on; the backend calls the job back from whatever thread it likes:

    interpreter                         backend
      submit(Job) ---------------------> start it, return at once
      job.on_text(delta, meta) <-------- while it runs, if job.stream
      job.on_done([Reply, ...]) <------- once, at the end           (one Reply for each of n outputs)
      job.on_error(exception)   <------- or this
      job.cancel()  -------------------> stop it; nothing is called back any more

A backend whose client blocks (every hosted one) derives from `BlockingBackend` and writes only `generate`: its jobs
run on a pool of daemon threads that grows on demand up to `parallelism` and shrinks when idle.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from .. import forking
from ..chat import Render, plain_render
from ..choices import ChoicesMethod

T = TypeVar("T")

# what `run()` passes down when nobody set anything
DEFAULTS: dict[str, Any] = {"max_new_tokens": 128, "temperature": 1.0}


@dataclass(frozen=True)
class Anchor:
    """What a backend knows about the first `length` characters of a text (the engine: their token ids)."""

    length: int
    value: Any


@dataclass(frozen=True)
class Prompt:
    """What to go on from.

    text        everything so far, in the backend's own rendering
    messages    finished chat messages, {"role", "content"}; content is a string or a list with Image and Video parts
    role        the open message's role, or None outside of roles
    partial     the open message's content so far (str, or parts)
    templated   the text begins with the chat template's output, which brings its own BOS
    anchor      the last Reply's anchor, if the text still begins with what it covers
    media       the text's images and videos, in order
    """

    text: str
    messages: Sequence[Mapping[str, Any]] = ()
    role: str | None = None
    partial: Any = ""
    templated: bool = False
    anchor: Anchor | None = None
    media: Sequence[Any] = ()


@dataclass
class Reply:
    """One output.  anchor: handed back with the next prompt, which begins with this prompt and output."""

    text: str
    meta: dict[str, Any] = field(default_factory=dict)
    anchor: Anchor | None = None


@dataclass(eq=False)
class Job:
    """One generation, or with `choices` one select (whose Reply.text is the choice).

    params     sampling parameters by SamplingParams' names
    options    return_logprob, logprob_start_len, top_logprobs_num, return_text_in_logprobs
    program    the run that it belongs to, forks included: the same object in all its jobs
    """

    prompt: Prompt
    on_done: Callable[[list[Reply]], None]
    on_error: Callable[[BaseException], None]
    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    on_text: Callable[[str, dict[str, Any]], None] | None = None
    choices: tuple[str, ...] | None = None
    method: ChoicesMethod | None = None
    program: object = None
    cancelled: bool = False
    stop: Callable[[], None] | None = None  # set by the backend while the job can be stopped

    def cancel(self) -> None:
        self.cancelled = True
        stop = self.stop  # it may be taken away just now
        if stop is not None:
            stop()


class Backend(ABC):
    """What the language needs.  Only `submit` must be written; hints may be ignored, as they are here.

    parallelism   how many generations run at once at best: `run_batch(num_threads="auto")` follows it
    constrains    regex and grammars are enforced; otherwise gen(dtype=...) is parsed out of a free answer
    continues     goes on from any text; otherwise only at the begin of an assistant message
    hosted        billed by the call: API speculation applies, prefix precompute does not
    """

    parallelism: int = 64
    constrains: ClassVar[bool] = True
    continues: bool = True
    hosted: ClassVar[bool] = False

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Start a job; must not block.  Errors go to `job.on_error`."""

    def prefill(self, prompt: Prompt) -> None:
        """A hint: several continuations of this prompt will follow."""
        return

    def precompute(self, prompt: Prompt) -> None:
        """Compute this prompt's prefix now and return when it is there."""
        return

    def render(self) -> Render | None:
        """The model's chat template as a function, or None: the plain template is used and stops at the next turn."""
        return None

    def check_media(self) -> None:
        """Raises ValueError if the model takes no images."""
        return

    def flush_cache(self) -> Any:
        """Forget cached prefixes."""
        return None

    def get_server_info(self) -> dict[str, Any]:
        """Facts about what runs: model name, sizes, totals."""
        return {}


class BlockingBackend(Backend):
    """A backend over a blocking client.  Derived classes write `generate`, and `choose` if they can select."""

    hosted: ClassVar[bool] = True
    constrains: ClassVar[bool] = False

    def __init__(self, parallelism: int = 64):
        if not isinstance(parallelism, int) or isinstance(parallelism, bool) or parallelism < 1:
            raise ValueError(f"parallelism must be an integer of at least 1, got {parallelism!r}")
        self.parallelism = parallelism
        self._pool = WorkerPool(parallelism, f"minisgl-{type(self).__name__}")

    def submit(self, job: Job) -> None:
        self._pool.run(lambda: self._work(job))

    def _work(self, job: Job) -> None:
        if job.cancelled:
            return
        try:
            replies = [self.choose(job)] if job.choices is not None else self.generate(job)
        except BaseException as error:  # this thread is ours: whoever waits is told
            if not job.cancelled:
                job.on_error(error)
            return
        if not job.cancelled:
            job.on_done(replies)

    @abstractmethod
    def generate(self, job: Job) -> list[Reply]:
        """Run to the end, calling `job.on_text` on the way if it is set; stop early when `job.cancelled`."""

    def choose(self, job: Job) -> Reply:
        raise ValueError(f"choices: {type(self).__name__} cannot score or restrict its answer")

    def render(self) -> Render | None:
        return plain_render  # what is sent are the messages; this is what `text()` shows


class WorkerPool:
    """Daemon threads for blocking calls: started when all others are busy, at most `limit`, gone after `idle` seconds.

    concurrent.futures' pool would join its threads when the interpreter exits, and so hang on a slow call.
    """

    def __init__(self, limit: int, name: str, idle: float = 5.0):
        self.limit, self.name, self.idle = limit, name, idle
        forking.tell(self)
        self.after_fork()

    def after_fork(self) -> None:
        """In a child process there are no threads yet, and what the parent's will do is theirs."""
        self._cond = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()
        self._free = 0

    def run(self, task: Callable[[], None]) -> None:
        """Have a thread call `task`; what it raises is logged.  RuntimeError if the system gives no thread at all."""
        with self._cond:
            self._tasks.append(task)
            if self._free >= len(self._tasks) or len(self._threads) >= self.limit:
                self._cond.notify()
                return
            thread = threading.Thread(target=self._main, name=self.name, daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except BaseException as error:  # no more threads, or Ctrl-C: one that does not run must not count
                self._threads.discard(thread)
                if isinstance(error, Exception) and self._threads:
                    return  # the others will come to it
                self._tasks.remove(task)
                raise

    def _main(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException:  # this thread is ours, and others count on it
                logging.getLogger("minisgl").exception("a task of %s failed", self.name)
            del task  # what it refers to must not live while this thread idles

    def _next(self) -> Callable[[], None] | None:
        """The next task; None, after `idle` seconds without one: this thread is to end."""
        with self._cond:
            self._free += 1
            try:
                end = time.monotonic() + self.idle
                while not self._tasks:
                    left = end - time.monotonic()
                    if left <= 0:
                        self._threads.discard(threading.current_thread())
                        return None
                    self._cond.wait(left)
                return self._tasks.popleft()
            finally:
                self._free -= 1


def with_retries(
    call: Callable[[], T],
    *,
    retryable: Callable[[BaseException], float | None],
    attempts: int = 5,
    first_wait: float = 0.5,
    longest_wait: float = 20.0,
    cancelled: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call until it succeeds, waiting first_wait, twice that, ... with jitter (full jitter keeps clients apart).

    retryable(error): None if trying again is no use, else the seconds the server asked for (0: it did not say).
    """
    for attempt in range(attempts):
        try:
            return call()
        except Exception as error:
            asked = retryable(error)
            if asked is None or attempt == attempts - 1 or cancelled():
                raise
            backoff = min(longest_wait, first_wait * 2**attempt)
            sleep(min(longest_wait, max(asked, backoff * random.uniform(0.5, 1.0))))
    raise AssertionError("attempts must be at least 1")


def retry_status(error: BaseException) -> float | None:
    """`retryable` for clients whose errors carry an HTTP status: 408, 409, 429 and 5xx, and lost connections."""
    status = getattr(error, "status_code", None)
    if status is None:
        status = getattr(error, "code", None)
    if not isinstance(status, int):
        lost = ("APIConnectionError", "APITimeoutError", "ConnectError", "ReadTimeout", "Timeout", "ReadError")
        return 0.0 if type(error).__name__ in lost else None
    if status not in (408, 409, 429) and not 500 <= status < 600:
        return None
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        return float(headers.get("retry-after", 0))
    except (TypeError, ValueError):
        return 0.0


@dataclass
class Usage:
    """What a hosted model was asked for so far.  Tokens as the API counts them."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        with self._lock:
            self.calls += 1
            self.prompt_tokens += prompt_tokens or 0
            self.completion_tokens += completion_tokens or 0


def need(package: str, *, pip: str) -> Any:
    """Import an optional client package; ImportError with the pip command if it is not there."""
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"this backend needs {package}: pip install {pip} (or minisgl[backends])") from error


def refuse_params(job: Job, backend: str, names: Sequence[str]) -> None:
    """ValueError for parameters that are set but that the API does not have: nothing is silently ignored."""
    for name in names:
        if job.params.get(name) not in _UNSET.get(name, (None,)):
            raise ValueError(f"{name} is not supported by {backend}")


_UNSET: dict[str, tuple[Any, ...]] = {
    "top_k": (None, -1),
    "min_p": (None, 0, 0.0),
    "min_new_tokens": (None, 0),
    "repetition_penalty": (None, 1, 1.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "top_p": (None, 1, 1.0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, (), []),
    "stop_regex": (None, (), []),
    "logit_bias": (None, {}),
    "n": (None, 1),
    "return_logprob": (None, False),
}
