"""The language: functions of a state, and how they are run.

    import minisgl as sgl

    @sgl.function
    def tip(s, topic):
        s += sgl.user("Give me a tip on " + topic)
        s += sgl.assistant(sgl.gen("tip", max_tokens=60))

    state = tip.run("sleep", backend=sgl.Runtime(), temperature=0)
    print(state["tip"])

The language is SGLang's ("SGLang: Efficient Execution of Structured Language Model Programs", arXiv 2312.07104), so
that its programs run with only the import changed.  A function is ordinary Python over a `ProgramState`: expressions
(`primitives` makes them, `ir` says what they are) appended to the state are executed by its queue (`statequeue`,
`interpreter`), on any backend (`backends`); `trace` and `compile` run the function once with placeholders and keep the
dataflow graph.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import forking
from .backends.base import DEFAULTS, Backend
from .batch import Batch, thread_count
from .interpreter import Executor
from .primitives import given_of
from .state import ProgramState
from .statequeue import Program

_OPTIONS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
_default_backend: Any = None


# ---- backends ----------------------------------------------------------------------------------------------------


def as_backend(backend: Any = None) -> Backend:
    """A backend from what the user gave: a Backend, a Runtime, or None for the default one."""
    if backend is None:
        backend = _default_backend
    if backend is None:
        raise ValueError("no backend: pass backend=minisgl.Runtime(...) or call minisgl.set_default_backend(...) first")
    if isinstance(backend, Backend):
        return backend
    if hasattr(backend, "generate") and hasattr(backend, "flush_cache") and hasattr(backend, "events"):
        from .backends.runtime import RuntimeBackend

        return RuntimeBackend(backend)
    raise ValueError(f"backend must be a Runtime or another backend of minisgl, got {type(backend).__name__}")


def set_default_backend(backend: Any) -> None:
    """The backend of runs that name none; None: there is none again."""
    global _default_backend
    if backend is not None:
        as_backend(backend)
    _default_backend = backend


def flush_cache(backend: Any = None) -> Any:
    """Forget the backend's cached prefixes."""
    return as_backend(backend).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """Facts about what the backend runs: model name, sizes, totals."""
    return as_backend(backend).get_server_info()


# ---- functions ---------------------------------------------------------------------------------------------------


def function(f: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """`@function` or `@function(num_api_spec_tokens=k)`: make a program of `def f(s, ...)`.

    num_api_spec_tokens: on hosted models, ask for this many tokens at the first gen and serve later text and gens from
    the answer while they match (see `speculation`).
    """
    if num_api_spec_tokens is not None and (
        not isinstance(num_api_spec_tokens, int) or isinstance(num_api_spec_tokens, bool) or num_api_spec_tokens < 1
    ):
        raise ValueError(f"num_api_spec_tokens must be an integer of at least 1, got {num_api_spec_tokens!r}")
    if f is not None:
        return SglFunction(f, num_api_spec_tokens=num_api_spec_tokens)
    return lambda f: SglFunction(f, num_api_spec_tokens=num_api_spec_tokens)


class SglFunction:
    """A program.  `run` one, `run_batch` many, `bind` arguments, `trace` or `compile` it."""

    def __init__(
        self, f: Callable[..., Any], num_api_spec_tokens: int | None = None, bound: dict[str, Any] | None = None
    ):
        parameters = list(inspect.signature(f).parameters.values())
        if not parameters:
            raise ValueError(f"{getattr(f, '__name__', f)} must take the program state as its first parameter")
        self.func, self.num_api_spec_tokens = f, num_api_spec_tokens
        self.bound = bound or {}
        self.signature = inspect.Signature(parameters[1:])
        self._gathers = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters[1:])
        self.__name__ = getattr(f, "__name__", "program")
        self.__doc__ = f.__doc__
        self.__wrapped__ = f

    def __repr__(self) -> str:
        return f"SglFunction({self.__name__}{self.signature})"

    def bind(self, **kwargs: Any) -> SglFunction:
        """A program with some arguments filled in, which tracing and prefix precompute see as constants."""
        self.signature.bind_partial(**kwargs)
        return SglFunction(self.func, self.num_api_spec_tokens, {**self.bound, **kwargs})

    def run(
        self,
        *args: Any,
        max_new_tokens: int | None = None,
        n: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        ignore_eos: bool | None = None,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        **kwargs: Any,
    ) -> ProgramState:
        """Run the program; returns its state when the function returns (generations may still be running: reading
        waits), or with stream=True at once.

        Sampling parameters are the defaults of the program's gens: 128 new tokens and temperature 1.0 where neither
        sets them.  `min_new_tokens`, `repetition_penalty` and `seed` may be given too, unless the function has
        parameters of these names.  use_thread=False: every generation is waited for at once.
        Raises what the function raises, TypeError for wrong arguments, ValueError without a backend.
        Ctrl-C stops the program's requests and is raised on.
        """
        given = locals()
        params, options = _run_params(given), given_of({name: given[name] for name in _OPTIONS})
        params |= self._more_params(kwargs)
        backend = as_backend(backend)
        args, kwargs = self._arguments(args, kwargs)
        program = Program(ended=False)
        forking.tell(program)
        state = self._state(backend, params, options, stream, not use_thread, program)
        if stream:
            threading.Thread(
                target=self._body, args=(state, args, kwargs, False), name="minisgl-program", daemon=True
            ).start()
        else:
            self._body(state, args, kwargs, True)
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        max_new_tokens: int | None = None,
        n: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        ignore_eos: bool | None = None,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        use_thread: bool = True,
        **more: Any,
    ) -> Any:
        """Run the program once for each item, which is a dict of arguments, a tuple of them, or the one argument.

        Returns the states in the items' order when all have ended; generator_style: an iterator that yields them as
        they end, in that order.  The constant leading text of more than one program is computed once beforehand.
        num_threads: threads for program bodies; "auto" follows what the backend runs at once (see `batch`).
        use_thread=False: each program waits for every generation at once, so that its forks run one after another.
        An exception in a program is raised at once; the other programs go on.  Ctrl-C stops them all.
        """
        given = locals()
        params, options = _run_params(given), given_of({name: given[name] for name in _OPTIONS})
        params |= self._more_params(more)
        if more:
            raise TypeError(f"run_batch() got an unexpected argument {next(iter(more))!r}")
        backend = as_backend(backend)
        shapes: set[Any] = set()
        calls = [self._batch_arguments(item, shapes) for item in batch_kwargs]
        threads = thread_count(num_threads, backend.parallelism, len(calls))
        if not calls:
            return iter(()) if generator_style else []
        if len(calls) > 1 and not backend.hosted:
            self._prefill(backend, calls)
        programs = [Program(ended=False) for _ in calls]
        states = [self._state(backend, params, options, False, not use_thread, program) for program in programs]

        def body(index: int) -> None:
            self._body(states[index], *calls[index], False)

        bar = None
        if progress_bar:
            from tqdm.auto import tqdm

            bar = tqdm(total=len(calls))
        batch = Batch(states, body, threads, bar.update if bar is not None else None)
        if generator_style:
            return batch.iterate()
        try:
            return batch.wait()
        finally:
            if bar is not None:
                bar.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`run`; while another program is traced, this one becomes part of its graph."""
        from .trace import current_tracer

        tracer = current_tracer()
        if tracer is not None:
            return tracer.inline(self, args, kwargs)
        return self.run(*args, **kwargs)

    def trace(self, *args: Any, backend: Any = None, **kwargs: Any) -> Any:
        """The program's dataflow graph (`graph.Graph`); arguments that are not given become Argument nodes.

        backend: as in SGLang's signature; a graph is the same for all backends.
        Raises TraceError, naming the line, where Python control flow depends on an argument or a generated value.
        """
        from .trace import trace_program

        return trace_program(self, args, kwargs)

    def compile(self, backend: Any = None, *, reorder: bool = False) -> Any:
        """The program as a graph that runs without its Python (`compile.CompiledProgram`).

        reorder: move constant paragraphs before those with arguments where that lengthens the shared prefix.
        Raises TraceError as `trace` does.
        """
        from .compile import CompiledProgram

        return CompiledProgram(self, backend, reorder)

    def cache(self, backend: Any = None) -> str:
        """Compute the program's constant leading text now; returns that text."""
        from .trace import leading_text

        backend = as_backend(backend)
        prompt = leading_text(self, backend.render(), {})
        if prompt.text:
            backend.precompute(prompt)
        return prompt.text

    # ---- inside --------------------------------------------------------------------------------------------------

    def _prefill(self, backend: Backend, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Hint at the leading text that all these calls have in common, found by tracing."""
        from .trace import leading_text

        prompt = leading_text(self, backend.render(), self._common_arguments(calls))
        if prompt.text:
            backend.prefill(prompt)

    def _common_arguments(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> dict[str, Any]:
        """Arguments that are equal in all calls: constants of this batch."""
        first, *rest = [self._by_name(args, kwargs) for args, kwargs in calls]
        same: dict[str, Any] = {}
        for name, value in first.items():
            try:
                if all(name in other and (other[name] is value or bool(other[name] == value)) for other in rest):
                    same[name] = value
            except Exception:  # whatever == does on the user's types: then it is not a constant
                continue
        return same

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        if not args and not self._gathers:
            return kwargs
        return self.signature.bind(*args, **kwargs).arguments

    def _state(
        self,
        backend: Backend,
        params: dict[str, Any],
        options: dict[str, Any],
        stream: bool,
        waits: bool,
        program: Program,
    ) -> ProgramState:
        executor = Executor(
            backend, params, options,
            stream=stream, waits=waits, spec_tokens=self.num_api_spec_tokens, program=program,
        )  # fmt: skip
        return ProgramState(executor)

    def _body(self, state: ProgramState, args: Any, kwargs: Any, raises: bool) -> None:
        """Run the Python function on this thread; its error stops the state's generations."""
        executor = state._executor
        executor.program.owner = threading.get_ident()
        try:
            if executor.error is None:
                state.ret_value = self.func(state, *args, **kwargs)
        except BaseException as error:
            executor.fail(error)
            if raises:
                raise
        finally:
            executor.program.end()

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """With what was bound; TypeError if the function cannot be called like that."""
        kwargs = {**self.bound, **kwargs}
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.__name__}(): {error}") from None
        return args, kwargs

    def _batch_arguments(self, item: Any, shapes: set[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """shapes: numbers and names of arguments that were found to fit, since looking costs more than a generation."""
        args: tuple[Any, ...] = ()
        if not isinstance(item, dict):
            args, item = tuple(item) if isinstance(item, (tuple, list)) else (item,), {}
        shape = (len(args), *item)
        if shape in shapes:
            return args, {**self.bound, **item}
        shapes.add(shape)
        return self._arguments(args, item)

    def _more_params(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Sampling parameters that SGLang's `run` has not, taken out of kwargs; the function's own come first."""
        names = ("min_new_tokens", "repetition_penalty", "seed", "logit_bias")
        found = [name for name in names if name in kwargs and name not in self.signature.parameters]
        return given_of({name: kwargs.pop(name) for name in found})


_PARAMS = (
    "max_new_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "ignore_eos",
)  # fmt: skip


def _run_params(given: dict[str, Any]) -> dict[str, Any]:
    return DEFAULTS | given_of({name: given[name] for name in _PARAMS})
