"""Tools: an answer that may call functions, as a few short sequences over one growing prefix.

A model writes a call as text.  The format here is Hermes', which Qwen and many others are trained on:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

With a radix cache it is cheap to stop, look, and go on: what was written is a cached prefix.  So nobody parses a
finished text and hopes for the best.  Instead the turn is written in steps, each of which can only be right:

    1. free text, until the end of the turn or `<tool_call>`      (tool_choice="auto"; "required" begins at 2)
    2. the name, constrained to the tools' names                  (not if there is only one)
    3. the arguments, constrained to that tool's schema           (streamed as they come)
    4. another `<tool_call>` or the end                           (unless parallel_tool_calls=false, or a named tool)

The punctuation in between is appended, not generated.  A model whose chat template does not describe tools in this
format is told of them in the system message, and sees earlier calls and results as text.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .chat_template import ChatTemplateError
from .server_http import Connected, EventStream, cancel, encode
from .server_jobs import ApiError, Job, Service, Where, usage
from .server_schemas import ChatRequest, Message, NamedTool, Tool

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from .server_openai import Envelope

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_EXPLAIN = (
    "You can call these functions, each given as a JSON object with a description of its parameters:\n<tools>\n"
    "{tools}\n</tools>\nTo call one, write its name and arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": ..., "arguments": {{...}}}}\n</tool_call>\n'
    "The result will be given to you between <tool_response> tags."
)
_RESERVED = frozenset(
    ("chat_template", "tools", "messages", "add_generation_prompt", "continue_final_message", "self")
)  # of chat_template_kwargs: a template is code, and the others have parameters of their own


# ---- messages ------------------------------------------------------------------------------------------------------


def uses_tools(body: ChatRequest) -> bool:
    """Whether the answer may call tools.  Raises ApiError for what does not fit together."""
    if not body.tools:
        if body.tool_choice not in (None, "none"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return False
    if body.tool_choice == "none":
        return False
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two of them have the same name", param="tools")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        raise ApiError(400, f"tool_choice: no tool is named {body.tool_choice.function.name!r}", param="tool_choice")
    for name in ("logprobs", "regex", "json_schema", "ebnf", "structural_tag", "no_stop_trim", "stop_regex"):
        if getattr(body, name):
            raise ApiError(400, f"{name} with tools is only supported with tool_choice='none'", param=name)
    if body.response_format is not None and body.response_format.type != "text":
        message = "response_format with tools is only supported with tool_choice='none'"
        raise ApiError(400, message, param="response_format")
    return True


def chat_prompt(service: Service, body: ChatRequest) -> np.ndarray:
    """The conversation as token ids, int32 (n,).  Raises ApiError and ChatTemplateError (a ValueError)."""
    try:
        return _chat_prompt(service, body)
    except RecursionError:  # the arguments of a call are JSON in a string, where the body's parser sees no depth
        raise ApiError(400, "messages: nested too deeply", param="messages") from None


def _chat_prompt(service: Service, body: ChatRequest) -> np.ndarray:
    tokenizer = service.runtime.tokenizer
    extra = dict(body.chat_template_kwargs or {})
    if reserved := _RESERVED & set(extra):
        raise ApiError(400, f"chat_template_kwargs must not have {min(reserved)!r}", param="chat_template_kwargs")
    tools = None
    if body.tools and body.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    knows = _knows_tools(tokenizer.chat_template)
    messages = [_message(message, knows) for message in body.messages]
    if tools and not knows:
        explanation = _EXPLAIN.format(tools="\n".join(encode(tool["function"]).decode() for tool in tools))
        if messages[0]["role"] == "system":
            messages[0]["content"] = f"{messages[0]['content']}\n\n{explanation}"
        else:
            messages.insert(0, {"role": "system", "content": explanation})
        tools = None
    if tools:
        extra["tools"] = tools
    if body.continue_final_message:
        extra["continue_final_message"] = True
    return tokenizer.chat_ids(messages, not body.continue_final_message, **extra)


def _knows_tools(template: Any) -> bool:
    if template is None:
        return False
    source = template.templates.get("tool_use") or template.templates.get("default", "")
    return "tools" in source and OPEN in source


def _message(message: Message, knows_tools: bool) -> dict[str, Any]:
    """As templates expect it: text content, arguments as objects; calls and results as text where it knows neither."""
    found = message.model_dump(exclude_none=True)
    found["role"] = "system" if message.role == "developer" else message.role
    found["content"] = _text(message.content)
    calls = [_call(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    if calls and knows_tools:
        found["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    elif calls:
        del found["tool_calls"]
        texts = [f"{OPEN}\n{encode(call).decode()}\n{CLOSE}" for call in calls]
        found["content"] = "\n".join([found["content"], *texts] if found["content"] else texts)
    if message.role == "tool" and not knows_tools:
        found = {"role": "user", "content": f"<tool_response>\n{found['content']}\n</tool_response>"}
    return found


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.get("type") in ("text", "refusal") and isinstance(part.get(part["type"]), str):
            texts.append(part[part["type"]])
        else:
            kind = str(part.get("type"))[:40]
            raise ChatTemplateError(f"messages: content of type {kind!r} is not supported, this model reads text only")
    return "\n".join(texts)


def _call(name: str, arguments: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise ChatTemplateError(f"messages: the arguments of the call of {name!r} are not JSON") from None
    return {"name": name, "arguments": parsed}


# ---- the turn ------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """Something to tell the client of choice `index`: text, a call's begin (its name), or a piece of its arguments."""

    index: int
    kind: str  # "content", "call" or "arguments"
    text: str


Emit = Callable[[Part], Awaitable[None]]


class _ContextFull(Exception):
    """What was written leaves no room for a token."""


@dataclass(eq=False)
class Turn:
    """One choice: an answer that may call tools.  `params` holds what the client asked of sampling, with n=1.  `group`
    is the name of the request, `rid` this choice's."""

    service: Service
    index: int
    prompt: list[int]
    params: dict[str, Any]
    tools: list[Tool]
    choice: str | NamedTool
    parallel: bool
    priority: int
    rid: str
    group: str
    written: str = ""  # by the assistant, so far
    reason: str = "stop"
    calls: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0
    left: int = field(init=False)  # tokens that may still be generated
    aborted: bool = False
    job: Job | None = None  # the step that runs

    def __post_init__(self) -> None:
        self.left = self.params["max_new_tokens"]
        named = isinstance(self.choice, NamedTool)
        if isinstance(self.choice, NamedTool):
            wanted = self.choice.function.name
            self.tools = [tool for tool in self.tools if tool.function.name == wanted]
        self.parallel = self.parallel and not named

    def abort(self, name: str | None = None) -> None:
        """End the step that runs, and begin no other; only if this is its name, if one is given."""
        if name in (None, self.rid, self.group):
            self.aborted = True
            if self.job is not None:
                self.job.abort()

    async def run(self, emit: Emit) -> None:
        """Write the turn.  Raises ApiError, ValueError, EngineError."""
        if self.choice == "auto" and not await self._free_text(emit):
            return
        while await self._one_call(emit) and self.parallel and self.calls < self.service.limits.max_tool_calls:
            if not await self._another():
                break
        if self.reason == "stop" and not isinstance(self.choice, NamedTool):
            self.reason = "tool_calls"

    async def _free_text(self, emit: Emit) -> bool:
        """Step 1; whether a call follows."""
        stops = self.params.get("stop") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        mark, marks = self._mark(), self.params.get("stop_token_ids") or []
        params = {"stop": [*stops, OPEN],
                  "stop_token_ids": [*marks, *([] if mark is None else [mark])]}  # fmt: skip
        ended = await self._generate(params, emit, "content")
        matched = ended.get("matched")  # None if it was cut or aborted
        if matched is not None and matched in (OPEN, mark) and mark not in marks and OPEN not in stops:
            self.written += OPEN + "\n"
            return True
        self.reason = ended["type"]
        return False

    async def _one_call(self, emit: Emit) -> bool:
        """Steps 2 and 3; whether the call is complete."""
        if not self.written.endswith(OPEN + "\n"):
            self.written += OPEN + "\n"
        self.written += '{"name": "'
        tool = self.tools[0]
        if len(self.tools) > 1:
            names = "|".join(re.escape(tool.function.name) for tool in self.tools)
            before = self.written
            self.reason = (await self._generate({"regex": f"({names})"}, None, ""))["type"]
            if self.reason != "stop":
                return False
            tool = next(tool for tool in self.tools if tool.function.name == self.written[len(before) :])
        else:
            self.written += tool.function.name
        await emit(Part(self.index, "call", tool.function.name))
        self.written += '", "arguments": '
        self.reason = (await self._generate({"json_schema": _arguments_schema(tool)}, emit, "arguments"))["type"]
        self.calls += 1
        self.written += "}\n" + CLOSE
        return self.reason == "stop"

    async def _another(self) -> bool:
        """Step 4."""
        before = self.written
        ended = await self._generate({"regex": f"(\n{OPEN}\n)?"}, None, "")
        return ended["type"] == "stop" and len(self.written) > len(before)

    def _mark(self) -> int | None:
        """The tag's token, in models where it is a special token, which is never text."""
        ids = self.service.runtime.tokenizer.encode(OPEN, add_special_tokens=False).tolist()
        special = len(ids) == 1 and ids[0] in self.service.runtime.tokenizer.special_ids
        return ids[0] if special else None

    async def _generate(self, more: dict[str, Any], emit: Emit | None, kind: str) -> dict[str, Any]:
        """Go on from what was written; returns the finish_reason."""
        if self.aborted:
            return {"type": "abort"}
        if self.left < 1 and self.completion_tokens:
            return {"type": "length"}
        grammar = "regex" in more or "json_schema" in more
        params = {**self.params, "max_new_tokens": self.left, **more}
        if grammar:  # what the client asked of the text is not asked of names and arguments
            for name in ("stop", "stop_token_ids", "min_new_tokens"):
                params.pop(name, None)
        runtime = self.service.runtime

        def make() -> Any:
            ids = self.prompt
            if self.written:
                ids = [*ids, *runtime.tokenizer.encode(self.written, add_special_tokens=False).tolist()]
                if len(ids) >= runtime.scheduler.max_context:
                    raise _ContextFull
            return runtime.prepare(None, params, input_ids=ids, priority=self.priority, rid=self.rid)[0]

        where = Where.GRAMMAR if grammar else Where.PLAIN
        self.job = Job(self.service, 0, make, stream=True, where=where)
        try:
            async with self.job as job:
                async for news in job.changes():
                    for _, _, text, _ in news:
                        self.written += text
                        if text and emit is not None:
                            await emit(Part(self.index, kind, text))
        except _ContextFull:
            return {"type": "length"}
        finally:
            self.job = None
        request = job.sinks[0].request
        if self.cached_tokens is None:
            self.cached_tokens = min(request.cached_tokens or 0, len(self.prompt))
        self.completion_tokens += len(request.output)
        self.left -= len(request.output)
        return request.finish_reason or {"type": "abort"}


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    """What the arguments must be: an object, without parameters that the tool does not list (unless it says so)."""
    schema = dict(tool.function.parameters or {"properties": {}})
    schema.setdefault("type", "object")
    if "properties" in schema and not {"additionalProperties", "patternProperties", "$ref", "allOf"} & set(schema):
        schema["additionalProperties"] = False
    return schema


# ---- the answer ----------------------------------------------------------------------------------------------------


async def talk(
    service: Service, request: Request, body: ChatRequest, params: dict[str, Any], envelope: Envelope
) -> Response:
    """The response to a chat request that `uses_tools`."""
    for tool in body.tools or ():
        service.check_grammar("tools", encode(tool.function.parameters).decode())
    held = AsyncExitStack()
    with Connected(request.scope):
        turns = await _turns(service, body, params, held)
    if body.stream:
        return EventStream(_chunks(turns, envelope), held, service.limits.write_timeout)
    try:
        with Connected(request.scope):
            parts = [part async for part in _merged(turns)]
    finally:
        await held.aclose()
    choices = [_choice(turn, [part for part in parts if part.index == turn.index]) for turn in turns]
    return envelope.whole(choices, _usage(turns))


async def _turns(
    service: Service, body: ChatRequest, params: dict[str, Any], held: AsyncExitStack
) -> list[Turn]:
    """Check as much as can be checked before a stream begins, and take seats in the queue until `held` is closed."""
    runtime, n, name = service.runtime, params.pop("n"), service.rid(body.rid)
    choice = "auto" if body.tool_choice is None else body.tool_choice
    turns = []
    for i in range(n):
        own = params if params.get("seed") is None else {**params, "seed": params["seed"] + i}
        rid = name if n == 1 else f"{name}-{i}"
        turns.append(Turn(service, i, [], own, list(body.tools or ()), choice, body.parallel_tool_calls is not False,
                          body.priority or 0, rid, name))  # fmt: skip
    service.check_open()
    service.admission.take(n)
    service.jobs.update(turns)

    def check() -> list[int]:
        ids = chat_prompt(service, body)
        service.check_length(ids, params["max_new_tokens"])
        grammars = [{"json_schema": _arguments_schema(tool)} for tool in body.tools or ()]
        for grammar in [{}, *grammars]:
            runtime.prepare(None, {**params, **grammar}, input_ids=ids)
        return ids.tolist()

    try:
        ids = await service.off_loop(check, grammar=True)
    except BaseException:
        service.jobs.difference_update(turns)
        service.admission.give(n, ended=False)
        raise
    held.callback(service.admission.give, n)
    held.callback(service.jobs.difference_update, turns)
    for turn in turns:
        turn.prompt = ids
    return turns


async def _merged(turns: list[Turn]) -> AsyncGenerator[Part, None]:
    """The parts of all turns, which run side by side, as they come.  The queue holds a slow reader's turns back."""
    parts: asyncio.Queue[Part] = asyncio.Queue(maxsize=4 * len(turns))
    tasks = [asyncio.create_task(turn.run(parts.put)) for turn in turns]
    running = asyncio.create_task(_all_of(tasks))
    part: asyncio.Task[Part] | None = None
    try:
        while not running.done():
            part = asyncio.create_task(parts.get())
            await asyncio.wait((part, running), return_when=asyncio.FIRST_COMPLETED)
            if not part.done():
                part.cancel()
                break
            yield part.result()
        while not parts.empty():
            yield parts.get_nowait()
        await running
    finally:
        for task in (*tasks, running, *(() if part is None else (part,))):
            await cancel(task)


async def _all_of(tasks: list[asyncio.Task[None]]) -> None:
    """Raises as soon as one of them has failed."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done():
            task.result()


def _usage(turns: list[Turn]) -> dict[str, Any]:
    cached = min(turn.cached_tokens or 0 for turn in turns)
    return usage(len(turns[0].prompt), cached, sum(turn.completion_tokens for turn in turns))


def _choice(turn: Turn, parts: list[Part]) -> dict[str, Any]:
    text, calls = "", []
    for part in parts:
        if part.kind == "content":
            text += part.text
        elif part.kind == "call":
            calls.append(_begin_call(part.text))
        else:
            calls[-1]["function"]["arguments"] += part.text
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return {"index": turn.index, "message": message, "logprobs": None, "finish_reason": turn.reason}


def _begin_call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


async def _chunks(turns: list[Turn], envelope: Envelope) -> AsyncGenerator[bytes, None]:
    begun: set[int] = set()
    calls: dict[int, int] = {}
    parts = _merged(turns)
    try:
        async for part in parts:
            i = part.index
            delta: dict[str, Any] = {} if i in begun else {"role": "assistant", "content": None}
            begun.add(i)
            if part.kind == "content":
                delta["content"] = part.text
            elif part.kind == "call":
                calls[i] = calls.get(i, -1) + 1
                delta["tool_calls"] = [{"index": calls[i], **_begin_call(part.text)}]
            else:
                delta["tool_calls"] = [{"index": calls[i], "function": {"arguments": part.text}}]
            yield envelope.event({"index": i, "delta": delta, "logprobs": None, "finish_reason": None})
    finally:
        await parts.aclose()
    for turn in turns:
        delta = {} if turn.index in begun else {"role": "assistant", "content": ""}
        choice = {"index": turn.index, "delta": delta, "logprobs": None, "finish_reason": turn.reason}
        yield envelope.event(choice)
    if envelope.include_usage:
        yield envelope.usage_event(_usage(turns))
