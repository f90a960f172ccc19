"""What each expression does to a state: text, roles, generations, selects, forks.

The queue that calls these steps, and the rules of waiting and failing, are in `statequeue`; this module holds the text
that they build.  A step that needs the backend submits a job and returns a `Turn`, which ends when the job does.

Roles go through the model's chat template (`chat`), generations inherit what `run()` set, and a fork hands its children
the parent's text when the parent's queue has come to it: by then the text is final, so the backend can be told to
compute it once (`Backend.prefill`) before the children ask for what follows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from .backends.base import Anchor, Backend, Job, Prompt, Reply
from .chat import PLAIN_STOP, Conversation, plain_render
from .ir import (
    DTYPE_REGEX,
    Action,
    Expr,
    Gen,
    Image,
    Reference,
    RoleBegin,
    RoleEnd,
    Select,
    Text,
    VarBegin,
    VarEnd,
    Video,
)
from .reasoning import split_reasoning
from .speculation import Speculation
from .statequeue import Program, StateQueue, Turn

NOTHING: frozenset[str] = frozenset()
HINT_CHARS = 64  # a fork whose parent has less than this that the backend has not seen is not worth a hint


class Executor(StateQueue):
    """One state's queue, text and messages.  `ProgramState` is its face.

    params, options   what `run()` set for all generations
    stream            deliver text while it is generated
    waits             finish every append before returning (`use_thread=False`)
    """

    def __init__(
        self,
        backend: Backend,
        params: dict[str, Any],
        options: dict[str, Any],
        *,
        stream: bool = False,
        waits: bool = False,
        spec_tokens: int | None = None,
        program: Program | None = None,
        started: bool = True,
    ):
        super().__init__(program, started, waits)
        self.backend, self.params, self.options, self.stream = backend, params, options, stream
        render = backend.render()
        self.plain = render is None
        self.chat = Conversation(render or plain_render)
        self.spec = Speculation(spec_tokens) if spec_tokens and backend.hosted else None
        self.text = ""
        self.begin = 0  # length of the text inherited from the parent
        self.begin_chat = self.begin_messages = 0  # the same of the conversation's text and messages
        self.inherited = NOTHING
        self.templated = False
        self.parts: list[Any] = []  # content of the open message
        self.media: list[Any] = []
        self.anchor: Anchor | None = None
        self.seen = 0  # characters of the text that the backend has met
        self._scopes: dict[str, int] = {}
        self._streaming, self._streamed = "", 0  # the generation that runs: its name, characters of it streamed

    def execute(self, item: Expr) -> Turn | None:
        step = self._STEPS.get(type(item))
        if step is None:
            raise TypeError(f"{type(item).__name__} cannot be executed here")
        return step(self, item)

    # ---- steps: each returns a Turn if it ends elsewhere ------------------------------------------------------------

    def _text(self, item: Text) -> None:
        if self.spec is not None:
            if self._opening:
                pass  # the answer of a chat model will be compared with it
            else:
                self.spec.constant(item.value)
        self._write(item.value)

    def _write(self, value: str, show: bool = True) -> None:
        """Put text behind the state's text and into the open message."""
        if self.chat.role is not None:
            self.parts.append(value)
            value = self.chat.add(value)
        self._put(value, show)

    def _put(self, value: str, show: bool = True) -> None:
        with self.lock:
            self.text += value
            if show and value:
                self.shown.append(value)
                self.wake()

    def _role_begin(self, item: RoleBegin) -> None:
        if self.chat.role is not None:
            raise ValueError(f"role {item.role!r} begins inside role {self.chat.role!r}, which has not ended")
        if not self.text and not self.plain:
            self.templated = True
        if self.spec is not None:
            self.spec.drop()
        self.parts = []
        self._put(self.chat.begin(item.role))

    def _role_end(self, item: RoleEnd) -> None:
        if self.chat.role != item.role:
            raise ValueError(f"role {item.role!r} ends, but the open role is {self.chat.role!r}")
        drop, piece = self.chat.end(_content(self.parts))
        self.parts = []
        if drop:
            with self.lock:
                self.text = self.text[:-drop]
            if self.anchor is not None and self.anchor.length > len(self.text):
                self.anchor = None
        self._put(piece)

    def _media(self, item: Image | Video) -> None:
        self.backend.check_media()
        self.media.append(item)
        if self.chat.role is not None:
            self.parts.append(item)

    def _var_begin(self, item: VarBegin) -> None:
        self._scopes[item.name] = len(self.text)

    def _var_end(self, item: VarEnd) -> None:
        value = self.text[self._scopes.pop(item.name) :]
        self._assign(item.name, value, None, value)

    def _action(self, item: Action) -> None:
        item.function()

    def _reference(self, item: Reference) -> Turn:
        source: StateQueue = item.state
        turn = Turn(self)

        def arrived() -> None:
            def use() -> None:
                value = source.get(item.name)
                for index in item.index:
                    value = value[index]
                self._text(Text(value if isinstance(value, str) else "".join(value)))

            turn.finish(use)

        source.when_settled(item.name, arrived)
        return turn

    def prompt(self) -> Prompt:
        return Prompt(
            text=self.text,
            messages=self.chat.messages,
            role=self.chat.role,
            partial=_content(self.parts),
            templated=self.templated,
            anchor=self.anchor,
            media=tuple(self.media),
        )

    @property
    def _opening(self) -> bool:
        """Inside a message that nothing was generated in, of a model that cannot go on from a text."""
        return not self.backend.continues and self.chat.role == "assistant" and not self.chat.generated

    def _submit(self, job: Job) -> None:
        with self.lock:
            if self.error is not None:
                return
            self.jobs.add(job)
        self.seen = len(self.text)
        self.backend.submit(job)

    def _job(self, done: Callable[[list[Reply]], None], prompt: Prompt, **fields: Any) -> tuple[Job, Turn]:
        turn = _JobTurn(self, done)
        turn.job = job = Job(prompt, turn.end, self.fail, program=self.program, **fields)
        return job, turn

    def _gen(self, item: Gen) -> Turn | None:
        self._streaming, self._streamed = item.name or "", 0
        opening = self._opening
        if self.chat.role is not None:
            self.chat.require_visible()
        params = {**self.params, **item.params}
        if self.plain and self.chat.role == "assistant":
            params["stop"] = [*_strings(params.get("stop")), PLAIN_STOP]
        if item.dtype is not None and self.backend.constrains:
            params["regex"] = DTYPE_REGEX[item.dtype]
        spec = self.spec if params.get("n", 1) == 1 and not item.reasoning else None
        stop = _strings(params.get("stop"))
        if spec is not None and not opening and (served := spec.cut(stop)) is not None:
            self.chat.generated = True
            self._gen_done(item, [Reply(served, {"finish_reason": {"type": "stop"}, "speculated": True})])
            return None
        prompt = self.prompt()
        partial = prompt.partial if opening and spec is not None and isinstance(prompt.partial, str) else ""
        if partial:
            prompt = replace(prompt, partial="")
        if spec is not None:
            params |= {"max_new_tokens": max(spec.tokens, params["max_new_tokens"]), "stop": None}
        self.chat.generated = True
        watch = self.stream and params.get("n", 1) == 1 and spec is None and not item.reasoning and not item.dtype
        done = functools.partial(self._gen_done, item)
        if spec is not None:
            done = functools.partial(self._speculated, item, spec, partial, stop)
        options = {**self.options, **item.options}
        job, turn = self._job(done, prompt, params=params, options=options, on_text=self._on_text if watch else None)
        self._submit(job)
        return turn

    def _on_text(self, delta: str, meta: dict[str, Any]) -> None:
        self._streamed += len(delta)
        with self.lock:
            self.streams.setdefault(self._streaming, []).append((delta, meta))
            self.shown.append(delta)
            self.wake()

    def _speculated(self, item: Gen, spec: Speculation, partial: str, stop: list[str], replies: list[Reply]) -> None:
        whole = replies[0]
        spec.fill(whole.text, (whole.meta.get("finish_reason") or {}).get("type") != "length")
        if partial:
            spec.skip_opening(partial)
        served = spec.cut(stop)
        self._gen_done(item, [Reply(whole.text if served is None else served, whole.meta)])

    def _gen_done(self, item: Gen, replies: list[Reply]) -> None:
        name, streamed = item.name or "", self._streamed
        values, metas = [reply.text for reply in replies], [reply.meta for reply in replies]
        if item.dtype is not None and not self.backend.constrains:
            values = [_parse(value, item.dtype) for value in values]
        if item.reasoning is not None:
            pairs = [split_reasoning(value, item.reasoning) for value in values]
            values = [answer for _, answer in pairs]
            thoughts = [thought for thought, _ in pairs]
            self._assign(f"{name}_reasoning_content", _one(thoughts), _one(metas), thoughts[0])
        self._write(values[0], show=False)
        unchanged = values[0] == replies[0].text
        self.anchor = replies[0].anchor if unchanged else None
        self.seen = len(self.text)
        rest = values[0][streamed:]
        self._assign(name, _one(values), _one(metas), rest, show=True)

    def _select(self, item: Select) -> Turn:
        if self.chat.role is not None:
            self.chat.require_visible()
            self.chat.generated = True
        if self.spec is not None:
            self.spec.drop()

        def done(replies: list[Reply]) -> None:
            reply = replies[0]
            self._write(reply.text)
            self.anchor, self.seen = reply.anchor, len(self.text)
            self._assign(item.name or "", reply.text, reply.meta, reply.text)

        job, turn = self._job(done, self.prompt(), params=dict(self.params), choices=item.choices, method=item.method)
        self._submit(job)
        return turn

    def _assign(self, name: str, value: Any, meta: Any, text: str, show: bool = False) -> None:
        """A variable of the queue has its value; `text`: what of it has not been streamed, nor shown if `show`."""
        with self.lock:
            if show:
                self.shown.append(text)
            self.variables[name] = value
            if meta is not None:
                self.meta[name] = meta
            self.pending[name] = self.pending.get(name, 0) - 1  # none is left where the state has failed
            self.streams.setdefault(name, []).append((text, meta if isinstance(meta, dict) else {}))
            self.wake()

    _STEPS: Mapping[type, Callable[..., Turn | None]] = MappingProxyType(
        {
            Text: _text,
            Gen: _gen,
            Select: _select,
            RoleBegin: _role_begin,
            RoleEnd: _role_end,
            VarBegin: _var_begin,
            VarEnd: _var_end,
            Image: _media,
            Video: _media,
            Reference: _reference,
            Action: _action,
        }
    )

    # ---- forking -------------------------------------------------------------------------------------------------

    def fork(self, size: int) -> list[Executor]:
        """New states that start where this one is when its queue gets here.  Returns at once."""
        children = [
            Executor(
                self.backend, self.params, self.options, stream=self.stream, waits=self.waits,
                spec_tokens=self.spec.tokens if self.spec else None, program=self.program, started=False,
            )
            for _ in range(size)
        ]  # fmt: skip
        self.children = WeakSet((*self.children, *children))
        self.append([Action(lambda: self._hand_over(children))])
        if self.error is not None:
            for child in children:
                child.fail(self.error)
        return children

    def _hand_over(self, children: list[Executor]) -> None:
        """The queue has reached the fork: the text is final, so hint at it first and let the children go then."""
        if len(children) > 1 and len(self.text) - self.seen >= HINT_CHARS:
            self.backend.prefill(self.prompt())
            self.seen = len(self.text)
        for child in children:
            child._adopt(self)
        for child in children:
            child.advance()

    def _adopt(self, parent: Executor) -> None:
        with self.lock:
            self.text, self.begin, self.seen = parent.text, len(parent.text), parent.seen
            self.templated, self.anchor = parent.templated, parent.anchor
            self.chat = parent.chat.copy()
            self.begin_chat, self.begin_messages = len(self.chat.text), len(self.chat.messages)
            self.parts, self.media = list(parent.parts), list(parent.media)
            self.variables = {**parent.variables, **self.variables}
            self.meta = dict(parent.meta)
            self.inherited = frozenset(parent.variables)
            self.started = True
            self.wake()


class _JobTurn(Turn):
    """The turn of a step that the backend takes.  A run leaves a thousand of these: no cycle of references may stay."""

    job: Job | None = None

    def __init__(self, executor: Executor, done: Callable[[list[Reply]], None]):
        super().__init__(executor)
        self._apply = done

    def end(self, replies: list[Reply]) -> None:
        job, self.job = self.job, None
        if job is not None:
            self.executor.jobs.discard(job)
        self.finish(lambda: self._apply(replies))


def _content(parts: list[Any]) -> Any:
    """A message's content: a string where there is only text, else parts with neighbouring texts joined."""
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    joined: list[Any] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def _strings(value: Any) -> list[str]:
    if value is not None and not isinstance(value, (str, list, tuple)):
        raise ValueError(f"stop must be a string or a list of strings, got {value!r}")
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _parse(text: str, dtype: type) -> str:
    """The first value of this type in a free answer."""
    match = re.search(DTYPE_REGEX[dtype], text)
    if match is None:
        raise ValueError(f"dtype={dtype.__name__}: the model's answer has none: {text[:80]!r}")
    return match.group()
