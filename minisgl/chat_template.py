"""Chat templates: a list of messages to the one text a chat model was trained on.

A chat model comes with a Jinja template that writes its turn markers (`<|im_start|>user\\n...`). The template
is code from whoever published the model, so it runs in Jinja's sandbox and sees plain JSON data only. The
environment (block trimming, loop controls, `raise_exception`, `strftime_now`, `tojson`, `{% generation %}`)
is the one that templates are
written for: Hugging Face's, described in transformers' "chat templating" guide. Rendering here needs no
    transformers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from .chat_limits import LimitedEnvironment
from .messages import one_line

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # the final space shows whether a template trims messages


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages. The caller's input is at
    fault. The message is one line."""

    def __init__(self, message: str = ""):
        super().__init__(one_line(message))


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here it just
    renders."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own convention)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller) -> str:
        return caller()


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _environment() -> LimitedEnvironment:
    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # Jinja's own filter escapes <, > and & for HTML, which models never saw
        options = {"ensure_ascii": ensure_ascii, "separators": separators, "sort_keys": sort_keys}
        if indent is None:
            return json.dumps(value, **options)
        return env.joined(json.JSONEncoder(indent=indent, **options).iterencode(value))

    env = LimitedEnvironment(
        filters={"tojson": tojson},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return env


class ChatTemplate:
    """One template, or several by name ("default", "tool_use", ...).

    source: the template's text; or {name: text}; or [{"name": ..., "template": ...}] as in
        tokenizer_config.json.
    special_tokens: what templates may mention by name: {"bos_token": "<s>", "eos_token": "</s>", ...}.
    """

    def __init__(self, source: str | Mapping | Sequence, special_tokens: Mapping[str, str] | None = None):
        self.templates = _by_name(source)
        self.special_tokens = dict(special_tokens or {})
        self._env = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def __repr__(self) -> str:
        return f"ChatTemplate({', '.join(sorted(self.templates))})"

    def compile(self, text: str) -> jinja2.Template:
        """The compiled template, cached. Raises ChatTemplateError on a syntax error."""
        if text not in self._compiled:
            try:
                self._compiled[text] = self._env.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise ChatTemplateError(f"chat_template: line {error.lineno}: {error.message}") from None
            except Exception as error:  # nested too deeply, say
                raise ChatTemplateError(f"chat_template can't be compiled: {error or type(error).__name__}") from None
        return self._compiled[text]

    def pick(self, name: str | None = None, tools: bool = False) -> str:
        """The text of the template to use: the named one (or `name` itself if it isn't a name), else
        "tool_use" when there are tools and it exists, else "default"."""
        if name is not None:
            return self.templates.get(name, name)
        for candidate in ("tool_use", "default") if tools else ("default",):
            if candidate in self.templates:
                return self.templates[candidate]
        names = sorted(self.templates)
        raise ChatTemplateError(
            f"chat_template: no default among this model's templates, pass one of {names}"
        )

    def render(
        self,
        messages: Sequence[Any],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Messages ({"role": ..., "content": ...}, ...) to text; other keyword arguments are the template's
        variables.

        continue_final_message: leave the last message open, so that the model goes on with it. A template
            that drops or rewrites that message is refused.
        Raises ChatTemplateError for malformed messages and whatever goes wrong inside the template.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message needs add_generation_prompt=False")
        template = self.compile(self.pick(chat_template, tools is not None))
        try:
            chat = _messages(messages)
            if continue_final_message:
                chat[-1]["content"] = _tagged(chat[-1].get("content"))
            values = {
                "messages": chat,
                "tools": None if tools is None else [_plain(_tool_schema(tool)) for tool in tools],
                "documents": _plain(documents),
                "add_generation_prompt": add_generation_prompt,
                **self.special_tokens,
                **_plain(variables),
            }
            text = self._env.limited(lambda: template.generate(values))
        except ChatTemplateError:
            raise
        except Exception as error:  # templates are the model's code: anything may come out of them
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(f"chat template refused the messages: {reason}") from error
        return _cut_at_tag(text) if continue_final_message else text


def find_source(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | list | None:
    """The chat template of a model folder, or None.

    chat_template.jinja (and additional_chat_templates/*.jinja) wins over tokenizer_config.json's
    `chat_template`, which wins over chat_template.json, where processors of multimodal models keep it.
    """
    named = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (main := folder / "chat_template.jinja").is_file():
        named["default"] = main
    if named:
        return {name: path.read_text(encoding="utf-8") for name, path in named.items()}
    if config.get("chat_template"):
        return config["chat_template"]
    if (old := folder / "chat_template.json").is_file():
        return json.loads(old.read_text(encoding="utf-8")).get("chat_template")
    return None


def _by_name(source: str | Mapping | Sequence) -> dict[str, str]:
    if isinstance(source, str):
        return {"default": source}
    if not isinstance(source, Mapping):
        try:
            source = {item["name"]: item["template"] for item in source}
        except (TypeError, KeyError):
            source = {}
    if not source or not all(isinstance(text, str) for text in source.values()):
        raise ChatTemplateError(
            'chat_template must be a text, {name: text} or [{"name": name, "template": text}, ...]'
        )
    return dict(source)


def _messages(messages: Any) -> list[dict[str, Any]]:
    """A fresh copy of the messages as plain dicts. Keys that are None (OpenAI clients send `content: null`)
    go away: templates handle a missing key, and print "None" for a None."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("messages is empty: give at least one message")
    chat = []
    for index, message in enumerate(messages):
        plain = _plain(message)
        if not isinstance(plain, dict) or not isinstance(plain.get("role"), str):
            raise ChatTemplateError(f'messages[{index}] must be a dict with a "role" and a "content"')
        chat.append({key: value for key, value in plain.items() if value is not None})
    return chat


def _plain(value: Any) -> Any:
    """JSON data out of whatever the caller has (dataclasses and pydantic models too); the template sees
    nothing else, since the sandbox can't know which methods of a rich object are harmless."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # subclasses (enums, numpy scalars) bring methods: back to the base type
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _name(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump())
    return f"<{type(value).__name__}>"  # images and the like: templates only ask whether they are there


def _name(key: Any) -> Any:
    """A key as JSON may have it, or as text."""
    plain = _plain(key)
    return str(plain) if isinstance(plain, (list, dict)) else plain


def _tool_schema(tool: Any) -> Any:
    if not callable(tool):
        return tool
    from transformers.utils.chat_template_utils import (
        get_json_schema,
    )  # Python functions as tools: slow, rare

    return get_json_schema(tool)


def _tagged(content: Any) -> Any:
    if isinstance(content, str):
        return content + _CONTINUE_TAG
    last = content[-1] if isinstance(content, list) and content else None
    if isinstance(last, dict) and isinstance(last.get("text"), str):
        return [*content[:-1], {**last, "text": last["text"] + _CONTINUE_TAG}]
    raise ChatTemplateError("continue_final_message: the last message has no text to go on with")


def _cut_at_tag(text: str) -> str:
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise ChatTemplateError(
            "continue_final_message: this model's chat template drops the last message's text"
        )
    # a template that trims messages ate the tag's space; then it would have eaten the message's too
    return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()
