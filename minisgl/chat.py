"""Chat roles as text: a conversation through the model's own template, one piece at a time.

A chat template turns a whole list of messages into text.  A program builds its conversation piece by piece and may
generate in the middle of a message, so the pieces are found by rendering with a placeholder and cutting:

    render(messages + [{user: PLACEHOLDER}])  =  <|im_start|>user\\n PLACEHOLDER <|im_end|>\\n
                                                 `- begin("user") -'             `- end -'

Two promises, in this order where a template makes them collide:

1. What has been generated from stays as it was, so that turn n's tokens are a prefix of turn n+1's and the cache hits.
2. The text is what the template gives for the messages as they are.  A message nothing was generated in is replaced by
   its exact rendering when it ends (templates trim, some rewrite); after a generated one the text continues exactly
   where the template's text can be continued, which is every template that only appends.  Templates that edit earlier
   turns (dropping an old `<think>` block, repeating the system prompt) are followed for new turns only.

A message that a template cannot render alone (Llama 2 folds the system prompt into the first user turn) is held back
and appears with the next one.  A model without a template gets `PLAIN`:

    SYSTEM: text\\nUSER: text\\nASSISTANT: text\\n
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .chat_template import ChatTemplate, ChatTemplateError

Render = Callable[[list[dict[str, Any]], bool], str]  # (messages, add_generation_prompt) -> text

PLACEHOLDER = "MINISGL-CONTENT-PLACEHOLDER"
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper }}:{{ '' if m.role == 'assistant' else ' ' }}{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
PLAIN_STOP = "\nUSER:"  # a base model goes on with the other side's turn unless it is stopped there


def plain_render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    """`PLAIN`: for models without a chat template, and for showing the text of states on hosted models."""
    flat = [{**m, "content": content_text(m["content"])} for m in messages]
    return _plain.render(flat, add_generation_prompt) if flat else "ASSISTANT:" * add_generation_prompt


_plain = ChatTemplate(PLAIN_TEMPLATE)


def content_text(content: Any) -> str:
    """The text of a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else "" for part in content)


class Conversation:
    """The template's side of one state: its finished messages and the text that they became.

    `text` is what of the state's text came from roles; the state itself may have text before or between them.
    """

    def __init__(self, render: Render):
        self.render = render
        self.messages: list[dict[str, Any]] = []
        self.text = ""
        self.role: str | None = None
        self.generated = False  # something was generated in the open message
        self._start = 0  # where in `text` the open message begins,
        self._content = 0  # and where its content does
        self._hidden = False  # the open message could not be rendered alone and waits for the next one
        self._refusal: ChatTemplateError | None = None

    def copy(self) -> Conversation:
        other = Conversation(self.render)
        other.__dict__.update(self.__dict__)
        other.messages = list(self.messages)
        return other

    def begin(self, role: str) -> str:
        """Open a message; returns the text that leads to its content."""
        piece = self._opening(role)
        self._hidden = piece is None
        self.role, self.generated, self._start = role, False, len(self.text)
        self.text += piece or ""
        self._content = len(self.text)
        return piece or ""

    def add(self, content: str) -> str:
        """Content of the open message; returns what of it shows now."""
        if self._hidden:
            return ""
        self.text += content
        return content

    def require_visible(self) -> None:
        """Raises ChatTemplateError if nothing can be generated in the open message."""
        if self._hidden:
            why = f": {self._refusal}" if self._refusal is not None else ""
            raise ChatTemplateError(f"the chat template cannot begin a {self.role!r} message here{why}")

    def end(self, content: Any) -> tuple[int, str]:
        """Close the message with its whole content; returns (k, piece): drop the last k characters, append piece."""
        assert self.role is not None
        message = {"role": self.role, "content": content}
        messages = [*self.messages, message]
        self.messages, self.role = messages, None
        if self._hidden:
            return 0, ""
        now, before = self.text, self.text[: self._start]
        full = self._try(messages, False)
        if full is None or not full.startswith(before):
            self.text = now + self._closing(message["role"])
        elif full.startswith(now) or not self.generated:
            self.text = full
        else:
            kept = now[self._content :]
            trimmed = now[: self._content] + kept.strip()
            # a template that trims loses the generated text's last spaces, which costs a token of the cache at most
            only_end = kept[:1].strip() == kept[:1] and full.startswith(trimmed)
            self.text = full if only_end else now + self._closing(message["role"])
        common = _common(now, self.text)
        return len(now) - common, self.text[common:]

    # ---- finding the pieces ------------------------------------------------------------------------------------

    def _opening(self, role: str) -> str | None:
        if role == "assistant":
            full = self._try(self.messages, True)
        else:
            full = None
        if full is None:
            full = self._before_placeholder(self.messages, role)
        if full is None:
            return None
        if full.startswith(self.text):
            return full[len(self.text) :]
        base = self._try(self.messages, False)  # the template rewrote earlier turns: take what it adds to its own
        if base is not None and full.startswith(base):
            return full[len(base) :]
        raise ChatTemplateError(f"the chat template cannot continue this conversation with a {role!r} message")

    def _closing(self, role: str) -> str:
        """The text behind a message's content."""
        for earlier in (self.messages[:-1], []):
            full = self._try([*earlier, {"role": role, "content": PLACEHOLDER}], False)
            if full is not None and PLACEHOLDER in full:
                return full[full.rindex(PLACEHOLDER) + len(PLACEHOLDER) :]
        return ""

    def _before_placeholder(self, earlier: list[dict[str, Any]], role: str) -> str | None:
        full = self._try([*earlier, {"role": role, "content": PLACEHOLDER}], False)
        return full[: full.rindex(PLACEHOLDER)] if full is not None and PLACEHOLDER in full else None

    def _try(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str | None:
        """Rendered, or None where the template refuses; the last word is the error of `_opening`."""
        if not messages and not add_generation_prompt:
            return ""
        flat = [{**m, "content": content_text(m["content"])} for m in messages]
        try:
            return self.render(flat, add_generation_prompt)
        except ChatTemplateError as error:
            self._refusal = error
            return None


def _common(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
