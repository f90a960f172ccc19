"""Runs one case of a stress run and checks everything that came of it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections import defaultdict
from typing import Any

import minisgl as sgl
from minisgl import Runtime
from minisgl.backends.base import Prompt
from minisgl.choices import greedy_token_selection, token_length_normalized, unconditional_likelihood_normalized
from minisgl.lang import as_backend
from minisgl.output import EngineError, Sink
from minisgl.request import Request

from .fault_points import Fault, Hook
from .stress_cases import Case
from .stress_check import Checker, Disagreement, log_softmax
from .stress_models import Model, ScriptedLlama

METHODS = (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)
ENDS_WITHIN = 30.0  # seconds from the last client's end to the last request's


class Boom(Exception):
    """What programs raise on purpose."""


class Run:
    """One case on one engine."""

    def __init__(self, model: Model, case: Case):
        self.model, self.case = model, case
        self.sinks: list[Sink] = []
        self.accepted: set[int] = set()  # ids of the requests that the engine took
        self.programs: list[tuple[dict[str, Any], str, Any, list[Any]]] = []  # action, item, state, log
        self.failures: list[str] = []
        self.trouble: dict[str, Any] = case.get("trouble", {})
        self.expected: tuple[type[Exception], ...] = (EngineError, Fault) if self.trouble else ()

    def run(self) -> Checker:
        """Raises AssertionError with all that is wrong."""
        runtime = self.model.runtime(self.case["options"])
        try:
            self._record(runtime)
            checker = Checker(self.model, runtime.tokenizer, runtime.eos_token_ids, runtime.scheduler.max_context)
            clients = [
                threading.Thread(target=self._client, args=(runtime, actions), daemon=True)
                for actions in self.case["clients"]
            ]
            self._make_trouble(runtime)
            for thread in clients:
                thread.start()
            for thread in clients:
                thread.join()
            if self.failures:
                raise AssertionError("\n".join(self.failures))
            if not self._went_on(runtime):
                return checker
            self._wait_for_ends(runtime)
            self._check_idle(runtime)
            for sink in self.sinks:
                if sink.ended.error is None:
                    checker.check(sink)
            if self.model.bytes:
                self._check_programs(runtime)
        finally:
            runtime.shutdown()
        assert not runtime.engine.alive
        return checker

    def _record(self, runtime: Runtime) -> None:
        prepare, submit = runtime.prepare, runtime.engine.submit

        def submitting(requests: list[Request]) -> None:
            submit(requests)  # raises if the engine takes nothing more
            self.accepted.update(map(id, requests))

        def recording(*args: Any, **options: Any) -> Any:
            sinks, single = prepare(*args, **options)
            self.sinks += sinks
            return sinks, single

        runtime._preparer.prepare = recording  # type: ignore[method-assign]
        runtime.engine.submit = submitting  # type: ignore[method-assign]

    def _make_trouble(self, runtime: Runtime) -> None:
        if "shutdown" in self.trouble:
            threading.Timer(self.trouble["shutdown"], runtime.shutdown).start()
        elif "fault" in self.trouble:
            hook = Hook(self.trouble["fault"], Fault)
            runtime.engine.call(lambda: sys.setprofile(hook))

    def _went_on(self, runtime: Runtime) -> bool:
        """Whether the engine serves still; if not, everybody must have been told."""
        if "shutdown" in self.trouble:
            runtime.shutdown()
            untold = [sink.request.rid for sink in self._taken() if not sink.ended.done()]
            assert not untold, f"nobody told {untold} of the end"
            return False
        if "fault" in self.trouble:
            runtime.engine.call(lambda: sys.setprofile(None))
        return True

    def _wait_for_ends(self, runtime: Runtime) -> None:
        """Forks that nobody joined, requests that were cut off, and programs of a batch of which another failed still
        run for a moment."""
        for thread in threading.enumerate():
            if thread.name.startswith(("minisgl-batch", "minisgl-program")):
                thread.join(ENDS_WITHIN)
        for _, _, state, log in self.programs:
            for one in _states(state, log):
                with contextlib.suppress(Boom, *self.expected):
                    one.sync()
        as_backend(runtime).precompute(Prompt("x"))  # behind hints that programs have left with the dispatcher
        end = time.perf_counter() + ENDS_WITHIN
        while time.perf_counter() < end:
            stats = runtime.stats()
            if not stats["running"] + stats["waiting"] and all(s.ended.done() for s in self._taken()):
                return
            time.sleep(0.002)
        raise AssertionError(f"requests still run or have no end: {runtime.stats()}")

    def _taken(self) -> list[Sink]:
        """Of the recorded requests those that the engine took (a program that fails submits nothing more)."""
        self.sinks = [sink for sink in self.sinks if id(sink.request) in self.accepted]
        return self.sinks

    def _check_idle(self, runtime: Runtime) -> None:
        runtime.engine.call(runtime.scheduler.check)
        stats, scheduler = runtime.stats(), runtime.scheduler
        busy = {k: stats[k] for k in ("waiting", "running", "kv_locked", "kv_held") if stats[k]}
        assert not busy, f"left behind: {busy}"
        assert stats["kv_free"] + stats["kv_evictable"] == stats["kv_capacity"]
        assert scheduler.table.available_rows == scheduler.table.max_requests
        assert scheduler.uncommitted == 0 and not runtime.engine._live
        if isinstance(runtime.engine.runner.model, ScriptedLlama):
            runtime.engine.call(runtime.engine.runner.model.check_tree)
        runtime.flush_cache()
        assert runtime.stats()["kv_free"] == stats["kv_capacity"]

    # ---- clients ---------------------------------------------------------------------------------------------------

    def _client(self, runtime: Runtime, actions: list[dict[str, Any]]) -> None:
        for action in actions:
            try:
                if action["do"] == "generate":
                    _GENERATE[action["how"]](runtime, action)
                elif action["do"] == "program":
                    self._program(runtime, action)
                elif action["do"] == "flush":
                    runtime.flush_cache()
                else:
                    assert runtime.stats()["kv_capacity"] and repr(runtime)
            except self.expected:
                continue
            except BaseException:
                self.failures.append(f"{action}\n{traceback.format_exc()}")

    def _program(self, runtime: Runtime, action: dict[str, Any]) -> None:
        logs: dict[str, tuple[Any, list[Any]]] = {}

        @sgl.function
        def program(s: Any, item: str) -> None:
            log: list[Any] = []
            logs[item] = (s, log)
            execute(s, action["body"], item, 0, log)

        run = {**action["run"], "backend": runtime}
        items = [f"{item}{i}" for i, item in enumerate(action["items"])]
        with contextlib.suppress(Boom, *self.expected):
            if action["how"] == "batch":
                run_ = program.run_batch([{"item": item} for item in items], **run)
                assert len(run_) == len(items)
            elif action["how"] == "stream":
                state = program.run(item=items[0], stream=True, **run)
                text = "".join(state.text_iter())
                assert text == state.text(), f"streamed {text!r} of {state.text()!r}"
            else:
                program.run(item=items[0], **run).sync()
        for item, (state, log) in list(logs.items()):
            with contextlib.suppress(Boom, *self.expected):
                state.sync()
                self.programs.append((action, item, state, log))

    # ---- programs against their definition -----------------------------------------------------------------------

    def _check_programs(self, runtime: Runtime) -> None:
        self.by_prompt: dict[tuple[int, ...], list[Sink]] = defaultdict(list)
        for sink in self.sinks:
            if sink.ended.error is None:
                self.by_prompt[tuple(sink.request.prompt.tolist())].append(sink)
        self.encode = lambda text: tuple(runtime.tokenizer.encode(text).tolist())
        for action, item, state, log in self.programs:
            if _raises(action["body"]) or any(one.error() is not None for one in _states(state, log)):
                continue
            text = self._evaluate(action["body"], log, state, "", item, 0)
            if text != state.text():
                raise Disagreement(f"the program {action} wrote {state.text()!r}, should be {text!r}")

    def _evaluate(self, body: list[Any], log: list[Any], state: Any, text: str, item: str, index: int) -> str:
        """The text behind `body`, from the values that the state has; each must be what some request answered."""
        for node, children in zip(body, log, strict=True):
            kind, *rest = node
            if kind == "text":
                text += rest[0]
            elif kind == "item":
                text += item
            elif kind == "index":
                text += str(index)
            elif kind == "gen":
                values = state[rest[0]]
                values = values if isinstance(values, list) else [values]
                answers = [sink.result()["text"] for sink in self.by_prompt[self.encode(text)]]
                if not set(values) <= set(answers) or len(values) != rest[1].get("n", 1):
                    raise Disagreement(f"{node} behind {text!r} is {values}, but what was answered there is {answers}")
                text += values[0]
            elif kind == "select":
                name, choices, method = rest
                self._check_select(text, name, choices, method, state[name])
                text += state[rest[0]]
            elif kind == "read":
                text += f"({len(state[rest[0]])})"
            elif kind == "role":
                text += f"<|{rest[0]}|>"
                text = self._evaluate(rest[1], children, state, text, item, index) + "<|eos|>"
            elif kind == "scope":
                begin = len(text)
                text = self._evaluate(rest[1], children, state, text, item, index)
                if state[rest[0]] != text[begin:]:
                    raise Disagreement(f"{rest[0]} is {state[rest[0]]!r}, should be {text[begin:]!r}")
            else:
                text = self._evaluate_fork(node, children, state, text, item)
        return text

    def _evaluate_fork(self, node: list[Any], children: list[Any], state: Any, text: str, item: str) -> str:
        body, join = (node[2], node[3]) if node[0] == "fork" else (node[1], None)
        added = []
        for i, (child, log) in enumerate(children):
            whole = self._evaluate(body, log, child, text, item, i)
            if whole != child.text():
                raise Disagreement(f"a fork wrote {child.text()!r}, should be {whole!r}")
            added.append(whole[len(text) :])
        if join == "gather_variable":
            for name in _names(body):
                values = [child[name] for child, _ in children]
                if state[name] != values:
                    raise Disagreement(f"{name} was gathered as {state[name]}, should be {values}")
        return text + "".join(added) if join == "concate_and_append" else text

    def _check_select(self, text: str, name: str, choices: list[str], method: int, chosen: str) -> None:
        prompt = list(self.encode(text))

        def scores(ids: list[int], start: int) -> list[float]:
            table = log_softmax(self.model.logits(ids))
            return [float(table[i - 1, ids[i]]) for i in range(max(start, 1), len(ids))]

        rows = [list(self.encode(choice)) for choice in choices]
        conditional = [scores(prompt + row, len(prompt)) for row in rows]
        alone = [([0.0, *scores(row, 0)])[-len(row) :] for row in rows]
        best = METHODS[method](conditional, alone if METHODS[method].unconditional else None)
        if choices[best.index] == chosen:
            return
        values = best.scores
        gap = abs(float(values[best.index] or 0) - float(values[choices.index(chosen)] or 0))
        if self.model.name == "scripted" or (gap > self.model.tolerance.logprob and method != 1):
            raise Disagreement(f"select {name} of {choices} behind {text!r} is {chosen!r}, scores {values}")


def execute(s: Any, body: list[Any], item: str, index: int, log: list[Any]) -> None:
    """The program itself.  log: for each node what its evaluation needs of the states that it made."""
    for kind, *rest in body:
        children: list[Any] = []
        log.append(children)
        if kind == "text":
            s += rest[0]
        elif kind == "item":
            s += item
        elif kind == "index":
            s += str(index)
        elif kind == "gen":
            s += sgl.gen(rest[0], **rest[1])
        elif kind == "select":
            s += sgl.select(rest[0], rest[1], choices_method=METHODS[rest[2]])
        elif kind == "read":
            s += f"({len(s[rest[0]])})"
        elif kind == "role":
            with getattr(s, rest[0])():
                execute(s, rest[1], item, index, children)
        elif kind == "scope":
            with s.var_scope(rest[0]):
                execute(s, rest[1], item, index, children)
        elif kind == "fork":
            group = s.fork(rest[0])
            for i, child in enumerate(group):
                children.append((child, []))
                execute(child, rest[1], item, i, children[-1][1])
            if rest[2]:
                group.join(rest[2])
        elif kind == "copy":
            with s.copy() as child:
                children.append((child, []))
                execute(child, rest[0], item, 0, children[-1][1])
        else:
            raise Boom


def _states(state: Any, log: list[Any]) -> list[Any]:
    """A state and all that were forked from it."""
    found = [state]
    for children in log:
        if children and isinstance(children[0], tuple):
            for child, inner in children:
                found += _states(child, inner)
        else:
            found += _states(state, children)[1:]
    return found


def _raises(body: list[Any]) -> bool:
    for node in body:
        inner = [part for part in node if isinstance(part, list) and part and isinstance(part[0], list)]
        if node[0] == "raise" or any(map(_raises, inner)):
            return True
    return False


def _names(body: list[Any]) -> list[str]:
    """The variables that a body newly sets on its own state."""
    names = []
    for kind, *rest in body:
        if kind in ("gen", "select", "scope"):
            names.append(rest[0])
        if kind in ("role", "scope") or (kind == "fork" and rest[2] == "gather_variable"):
            names += _names(rest[1])
    return names


# ---- requests ------------------------------------------------------------------------------------------------------


def _arguments(action: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    prompts, params = action["prompts"], action["params"]
    if len(prompts) == 1:
        return prompts[0], params[0], dict(action["options"])
    return prompts, params, dict(action["options"])


def _call(runtime: Runtime, action: dict[str, Any]) -> None:
    prompt, params, options = _arguments(action)
    replies = runtime.generate(prompt, params, **options)
    count = sum(p.get("n", 1) for p in action["params"])
    assert (len(replies) if isinstance(replies, list) else 1) == count


def _async(runtime: Runtime, action: dict[str, Any]) -> None:
    prompt, params, options = _arguments(action)
    asyncio.run(runtime.async_generate(prompt, params, **options))


def _stream(runtime: Runtime, action: dict[str, Any]) -> None:
    prompt, params, options = _arguments(action)
    text, last = "", None
    for last in runtime.generate(prompt, params, stream=True, **options):
        text += last["delta"]
    assert last is not None and last["meta_info"]["finish_reason"] and last["text"] == text


def _close(runtime: Runtime, action: dict[str, Any]) -> None:
    prompt, params, options = _arguments(action)
    stream = runtime.generate(prompt, params, stream=True, **options)
    with contextlib.suppress(StopIteration):
        for _ in range(int(action["after"] * 1000)):
            next(stream)
    stream.close()


def _cancel(runtime: Runtime, action: dict[str, Any]) -> None:
    prompt, params, options = _arguments(action)

    async def main() -> None:
        task = asyncio.ensure_future(runtime.async_generate(prompt, params, **options))
        await asyncio.sleep(action["after"])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())


def _abort(runtime: Runtime, action: dict[str, Any]) -> None:
    prompt, params, options = _arguments(action)
    name = f"to be aborted {id(action)}"
    timer = threading.Timer(action["after"], runtime.abort, [name])
    timer.start()
    runtime.generate(prompt, params, rid=name, **options)
    timer.join()


_GENERATE = {"call": _call, "async": _async, "stream": _stream, "close": _close, "cancel": _cancel, "abort": _abort}

