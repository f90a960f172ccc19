"""`minisgl.batch.map`: thousands of programs, a few at a time, to the end.

    import minisgl as sgl
    from minisgl import batch

    programs = [review.bind(essay=essay) for essay in essays]
    rows = batch.map(programs, max_concurrency=32, token_budget=50_000, retries=3, checkpoint="reviews.jsonl")
    print(rows[0].value, rows[0].variables["grade"])

`run_batch` starts everything at once and leaves the order to the engine, which is right for an engine in the process.
A hosted model has rate limits, fails now and then, and a night's work must not be lost with the process. So here the
programs stand in a queue, and workers take them as two limits allow:

    queue --> [worker 1]  max_concurrency   programs at once
          --> [worker 2]  token_budget      tokens that all running programs may need together (an estimate)
          --> ...             |
                              '--> row: in the list at the program's place, and in the checkpoint's file

A program that fails is tried again after a pause that doubles each time; an error that trying again cannot mend (wrong
arguments) ends it at once. With a checkpoint, rows are on disk as soon as they have ended (see `checkpoint`): the same
call after a crash goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint

if TYPE_CHECKING:
    from .backends.base import Backend, WorkerPool
    from .lang import SglFunction
    from .state import ProgramState

FIRST_WAIT, LONGEST_WAIT = 0.5, 20.0  # seconds before a program is tried again


class BatchError(RuntimeError):
    """Some programs failed for good.  `rows`: all rows, the failed ones with their `error`."""

    def __init__(self, message: str, rows: list[Row]):
        super().__init__(message)
        self.rows = rows


@dataclass
class Row:
    """What came of one program.

    value        what its function returned
    text         the whole text
    variables    everything that was generated or set, by name
    attempts     how often it was started
    error        None, or why it failed
    """

    index: int
    value: Any = None
    text: str = ""
    variables: dict[str, Any] = field(default_factory=dict)
    attempts: int = 1
    error: str | None = None


def map(
    programs: Iterable[SglFunction],
    *,
    backend: Any = None,
    max_concurrency: int = 64,
    token_budget: int | None = None,
    tokens: Callable[[SglFunction], int] | None = None,
    retries: int = 2,
    checkpoint: str | Path | None = None,
    progress_bar: bool = True,
    raises: bool = True,
    **params: Any,
) -> list[Row]:
    """Run every program (a function with its arguments bound, `f.bind(...)`), and return their rows in order.

    max_concurrency   programs at once
    token_budget      tokens that the running programs may need together; a program that needs more runs alone
    tokens            program -> tokens it needs, prompt and output; None: `estimate`
    retries           further attempts for a program that fails
    checkpoint        a file of JSON lines: rows in it are not run again, new ones are added as they end.  Values must
                      then be what JSON can hold, and come back as JSON has them
    raises            BatchError at the end if programs failed; False: their rows say so in `error`
    params            sampling parameters for all, as in `run`

    Blocks, in a notebook as well (`amap` is for coroutines).  Failed rows are not in the checkpoint: the next call
    tries them again.  Raises ValueError for a wrong argument or another job's checkpoint.  Ctrl-C stops what runs.
    """
    job = _Job(programs, backend, max_concurrency, token_budget, tokens, retries, checkpoint, progress_bar, params)
    outcome: Future[list[Row]] = Future()

    def work() -> None:  # a loop of our own on a thread of its own: the caller may be inside a running one
        loop = asyncio.new_event_loop()
        try:
            outcome.set_result(loop.run_until_complete(job.run()))
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            loop.close()

    threading.Thread(target=work, name="minisgl-map", daemon=True).start()
    try:
        while not wait([outcome], timeout=0.2).done:
            pass  # in slices: waiting for good would not hear Ctrl-C on every platform
    except KeyboardInterrupt:
        job.stop()
        wait([outcome], timeout=5)
        raise
    return _checked(outcome.result(), raises)


async def amap(
    programs: Iterable[SglFunction],
    *,
    backend: Any = None,
    max_concurrency: int = 64,
    token_budget: int | None = None,
    tokens: Callable[[SglFunction], int] | None = None,
    retries: int = 2,
    checkpoint: str | Path | None = None,
    progress_bar: bool = True,
    raises: bool = True,
    **params: Any,
) -> list[Row]:
    """`map` for coroutines.  Cancelling the task stops what runs."""
    job = _Job(programs, backend, max_concurrency, token_budget, tokens, retries, checkpoint, progress_bar, params)
    return _checked(await job.run(), raises)


def estimate(program: SglFunction, max_new_tokens: int = 128) -> int:
    """Tokens that a program needs: a third of the characters of its text arguments, and one output.

    Rough on purpose: what counts is that programs with long arguments weigh more.
    """
    characters = sum(len(value) for value in program.bound.values() if isinstance(value, str))
    return characters // 3 + max_new_tokens


def _checked(rows: list[Row], raises: bool) -> list[Row]:
    failed = [row for row in rows if row.error is not None]
    if failed and raises:
        first = failed[0]
        raise BatchError(f"{len(failed)} of {len(rows)} programs failed; row {first.index}: {first.error}", rows)
    return rows


class _Job:
    """One call of `map`."""

    def __init__(
        self,
        programs: Iterable[SglFunction],
        backend: Any,
        max_concurrency: int,
        token_budget: int | None,
        tokens: Callable[[SglFunction], int] | None,
        retries: int,
        checkpoint: str | Path | None,
        progress_bar: bool,
        params: dict[str, Any],
    ):
        from .lang import SglFunction, as_backend

        _check_count("max_concurrency", max_concurrency, 1)
        _check_count("retries", retries, 0)
        if token_budget is not None:
            _check_count("token_budget", token_budget, 1)
        self.programs = list(programs)
        for i, program in enumerate(self.programs):
            if not isinstance(program, SglFunction):
                raise ValueError(f"programs[{i}] must be an @function with its arguments bound, got {program!r}")
            program._arguments((), {})  # TypeErrors now rather than in the middle of the night
            _sampling(program, params)
        self.backend: Backend = as_backend(backend)
        self.concurrency, self.retries, self.params = max_concurrency, retries, params
        self.budget = _Budget(token_budget)
        most = params.get("max_new_tokens") or 128
        self.tokens = tokens or (lambda program: estimate(program, most))
        self.progress_bar = progress_bar
        self.keys = [_key(program, params) for program in self.programs] if checkpoint is not None else []
        self.checkpoint_path = checkpoint
        self.states: set[ProgramState] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False

    async def run(self) -> list[Row]:
        from tqdm.auto import tqdm

        from .backends.base import WorkerPool

        self._loop = asyncio.get_running_loop()
        if self._stopped:  # before there was a loop to tell
            raise asyncio.CancelledError
        checkpoint = None if self.checkpoint_path is None else Checkpoint(self.checkpoint_path)
        try:
            rows = {} if checkpoint is None else self._resume(checkpoint)
            queue: asyncio.Queue[int] = asyncio.Queue()
            for index in range(len(self.programs)):
                if index not in rows:
                    queue.put_nowait(index)
            pool = WorkerPool(self.concurrency, "minisgl-map")
            with tqdm(total=len(self.programs), initial=len(rows), disable=not self.progress_bar) as bar:

                def ended(row: Row) -> None:
                    if checkpoint is not None and row.error is None:
                        self._save(checkpoint, row)
                    rows[row.index] = row
                    bar.update()

                workers = min(self.concurrency, queue.qsize())
                self._tasks = [asyncio.create_task(self._worker(queue, pool, ended)) for _ in range(workers)]
                try:
                    await asyncio.gather(*self._tasks)
                finally:
                    await self._wind_up()
            return [rows[index] for index in range(len(self.programs))]
        finally:
            if checkpoint is not None:
                checkpoint.close()

    async def _worker(self, queue: asyncio.Queue[int], pool: WorkerPool, ended: Callable[[Row], None]) -> None:
        while not queue.empty():
            index = queue.get_nowait()
            need = self.tokens(self.programs[index])
            await self.budget.take(need)
            try:
                row = await self._attempts(index, pool)
            finally:
                self.budget.give(need)
            ended(row)

    async def _attempts(self, index: int, pool: WorkerPool) -> Row:
        attempt = 1
        while True:
            row, error = await self._once(index, pool)
            row.attempts = attempt
            if error is None or attempt > self.retries or isinstance(error, (TypeError, ValueError)):
                return row
            pause = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            attempt += 1

    async def _once(self, index: int, pool: WorkerPool) -> tuple[Row, Exception | None]:
        """Run the program on a thread of the pool: its body may block anywhere."""
        future: Future[Row] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self._run_program(index))
            except StopIteration as error:  # which a coroutine's future does not take: nobody would hear of the end
                stopped = RuntimeError(f"the program raised {error!r}")
                stopped.__cause__ = error
                future.set_exception(stopped)
            except BaseException as error:
                future.set_exception(error)

        pool.run(work)
        try:
            return await asyncio.wrap_future(future), None
        except Exception as error:
            return Row(index, error=f"{type(error).__name__}: {error}"), error

    def _run_program(self, index: int) -> Row:
        """On a pool's thread, from start to end; raises what the program or the backend raised."""
        from .statequeue import Program

        program = self.programs[index]
        params, options = _sampling(program, self.params)
        args, kwargs = program._arguments((), {})
        state = program._state(self.backend, params, options, False, False, Program(ended=False))
        self.states.add(state)
        try:
            program._body(state, args, kwargs, False)
            text = state.text()  # waits for the last generation, and raises what went wrong
            names = [name for name in state._executor.variables if not name.startswith("_unnamed_")]
            return Row(index, state.ret_value, text, {name: state[name] for name in names})
        finally:
            self.states.discard(state)

    def _resume(self, checkpoint: Checkpoint) -> dict[int, Row]:
        rows = {}
        for index, saved in checkpoint.done.items():
            if index >= len(self.programs) or saved["key"] != self.keys[index]:
                where = f"row {index} of {checkpoint.path}"
                raise ValueError(f"checkpoint: {where} is of another program or other arguments")
            rows[index] = Row(**{name: saved[name] for name in Row.__dataclass_fields__})
        return rows

    def _save(self, checkpoint: Checkpoint, row: Row) -> None:
        try:
            plain = json.loads(json.dumps(asdict(row)))
        except (TypeError, ValueError) as error:
            row.error = f"the checkpoint cannot hold what the program returned: {error}"
            return
        checkpoint.add({"index": row.index, "key": self.keys[row.index], **plain})
        row.value, row.variables = plain["value"], plain["variables"]  # as a resumed row has them

    def stop(self) -> None:
        """From any thread: cancel the workers, or start none."""
        self._stopped = True
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it has just closed
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    async def _wind_up(self) -> None:
        """Whatever ended the workers: stop the programs that still run."""
        for task in self._tasks:
            task.cancel()
        for state in list(self.states):
            state._executor.fail(KeyboardInterrupt("the batch was stopped"))
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Budget:
    """Tokens that may be in use at once; None: any number.  First come, first served."""

    def __init__(self, total: int | None):
        self.total, self.used = total, 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def take(self, n: int) -> None:
        if not self._waiting and self._fits(n):
            self.used += n
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((n, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(n)  # it was our turn just then
            else:
                self._waiting.remove((n, turn))
            raise

    def give(self, n: int) -> None:
        self.used -= n
        while self._waiting and self._fits(self._waiting[0][0]):
            n, turn = self._waiting.pop(0)
            if not turn.cancelled():
                self.used += n
                turn.set_result(None)

    def _fits(self, n: int) -> bool:
        return self.total is None or self.used == 0 or self.used + n <= self.total


def _sampling(program: SglFunction, params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(sampling parameters, options) of a run.  Raises TypeError for an argument that is neither."""
    from .lang import _OPTIONS, _PARAMS, _run_params
    from .primitives import given_of

    rest = dict(params)
    given = {name: rest.pop(name, None) for name in _PARAMS}
    options = given_of({name: rest.pop(name, None) for name in _OPTIONS})
    more = program._more_params(rest)
    if rest:
        raise TypeError(f"map() got an unexpected argument {next(iter(rest))!r}")
    return _run_params(given) | more, options


def _key(program: SglFunction, params: dict[str, Any]) -> str:
    """A hash of which program it is, with which arguments and parameters."""
    function = program.func
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', program.__name__)}"
    plain = json.dumps([name, program.bound, params], sort_keys=True, default=lambda value: type(value).__qualname__)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
