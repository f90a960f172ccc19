"""What the server's clients may send, as pydantic models, and the OpenAPI document made of them.

Two families: OpenAI's (`ChatRequest`, `CompletionRequest`, with SGLang's extras, which the openai client sends through
`extra_body`) and SGLang's own (`GenerateRequest`).  Three rules:

* Types are strict: "5" is not a number and true is not 1.
* A name that is not known is refused, since a parameter that is silently ignored looks like a model that behaves oddly.
* What OpenAI's API knows and this server cannot do is listed with a type of `None`: null is accepted, a value is
  refused by name.  Labels that only a hosted service has a use for (`user`, `metadata`, ...) are accepted and change
  nothing.

Ranges of sampling parameters are checked here where OpenAI's names differ from ours, so that an error names what the
client wrote; `SamplingParams` checks everything again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

try:
    from pydantic import BaseModel, ConfigDict, Field
    from pydantic.json_schema import models_json_schema
except ImportError as error:
    raise ImportError('the server needs pydantic, starlette and uvicorn: pip install "minisgl[server]"') from error

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # a thousand wrong entries are one error, and take the time of one
_Text = Annotated[str, Field(min_length=1)]
Strings = _Text | Many[_Text]
TokenIds = Many[Annotated[int, Field(ge=0)]]
_Prompts = Annotated[str | Many[str] | TokenIds | Many[TokenIds], Field(union_mode="left_to_right")]
MAX_OUTPUTS = 128  # `n`, as OpenAI limits it
MAX_TOP_LOGPROBS = 20


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


# ---- OpenAI's ------------------------------------------------------------------------------------------------------


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # enforced in either case


class ResponseFormat(Body):
    """`text`, `json_object`, `json_schema`; and `structural_tag` where the grammar backend has it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class Sampling(Body):
    """Shared by chat and completions: OpenAI's parameters, then SGLang's extras."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_OUTPUTS)
    max_tokens: int | None = Field(None, ge=0)
    stop: Strings | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=1e6, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = Field(None, ge=0)
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    stop_regex: Strings | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    regex: str | None = None
    json_schema: dict[str, Any] | str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    rid: str | None = Field(None, min_length=1)

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None


class CompletionRequest(Sampling):
    prompt: _Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_OUTPUTS)
    suffix: None = None


class Message(BaseModel):
    """Keys beyond these go to the chat template, which may know them."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str
    arguments: str


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True)
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the arguments follow the schema in either case


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None

    modalities: list[Literal["text"]] | None = None
    functions: None = None  # use tools
    function_call: None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


# ---- SGLang's ------------------------------------------------------------------------------------------------------


class GenerateRequest(Body):
    """POST /generate.  Options may be given once, or in a list with one for each prompt."""

    text: str | Many[str] | None = None
    input_ids: TokenIds | Many[TokenIds] | None = None
    sampling_params: dict[str, Any] | Many[dict[str, Any]] | None = None
    stream: bool = False
    rid: str | Many[str] | None = None
    return_logprob: bool | Many[bool] | None = None
    logprob_start_len: int | Many[int] | None = None
    top_logprobs_num: int | Many[int] | None = None
    return_text_in_logprobs: bool = False
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)


class AbortRequest(Body):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False


# ---- the document --------------------------------------------------------------------------------------------------

_POSTS: dict[str, tuple[type[BaseModel] | None, str]] = {
    "/v1/chat/completions": (ChatRequest, "The model's answer to a conversation"),
    "/v1/completions": (CompletionRequest, "The continuation of a text"),
    "/v1/embeddings": (None, "Refused: the model generates text"),
    "/generate": (GenerateRequest, "SGLang's native API"),
    "/abort_request": (AbortRequest, "End a request by its rid"),
    "/flush_cache": (None, "Forget cached prefixes"),
}
_GETS = {
    "/v1/models": "The model",
    "/health": "Does the engine run?",
    "/health_generate": "Does it generate?",
    "/get_model_info": "Facts about the model",
    "/get_server_info": "Sizes, options and totals",
    "/metrics": "Prometheus metrics",
}
_ERRORS = {
    "400": "not right: the message names the parameter",
    "401": "no or the wrong API key",
    "404": "no such model or path",
    "408": "the body took too long to arrive",
    "413": "the body is too large",
    "429": "the queue is full: try again after Retry-After seconds",
    "503": "the server is shutting down, or its engine has ended",
}


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes."""
    models = [model for model, _ in _POSTS.values() if model is not None]
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    error = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    }
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {status: {"description": text, "content": content} for status, text in _ERRORS.items()}
    paths: dict[str, Any] = {}
    for path, summary in _GETS.items():
        answers = {"200": {"description": "OK"}, "401": refusals["401"], "503": refusals["503"]}
        paths[path] = {"get": {"summary": summary, "responses": answers}}
    for path, (model, summary) in _POSTS.items():
        operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "OK"}, **refusals}}
        if model is not None:
            reference = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
            operation["requestBody"] = {"required": True, "content": {"application/json": reference}}
        paths[path] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": version},
        "components": {
            "schemas": {**schemas["$defs"], "Error": error},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
        "paths": paths,
    }
