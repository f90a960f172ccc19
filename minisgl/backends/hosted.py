"""What the hosted models' backends share: messages, images, retries, usage.

A hosted chat model takes messages, not text, so a program's roles are sent as they are.  Three cases need a decision:

* A program without roles: its text so far is sent as one user message and the answer is appended.
* Text before a gen in an assistant message (`assistant("The answer is" + gen("a"))`): sent as the beginning of the
  answer where the API can continue it (Anthropic); elsewhere an error says so, unless API speculation is on.
* Parameters that the API has not are refused by name, never dropped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..choices import token_length_normalized
from ..ir import Image, Video
from .base import BlockingBackend, Job, Prompt, Usage, need, retry_status, with_retries

T = TypeVar("T")


class HostedBackend(BlockingBackend):
    """A model behind an HTTP API.

    parallelism   calls at once
    max_retries   further tries after 408, 409, 429, 5xx and lost connections, waiting `retry_wait` seconds, then twice
                  that and so on (or what the server asks for)
    """

    continues: bool = False
    api: ClassVar[str] = ""

    def __init__(self, model: str, *, parallelism: int = 64, max_retries: int = 4, retry_wait: float = 0.5):
        if not isinstance(model, str) or not model:
            raise ValueError(f"model must be a non-empty string, got {model!r}")
        if not isinstance(max_retries, int) or isinstance(max_retries, bool) or max_retries < 0:
            raise ValueError(f"max_retries must be an integer of at least 0, got {max_retries!r}")
        super().__init__(parallelism)
        self.model, self.max_retries, self.retry_wait = model, max_retries, retry_wait
        self.usage = Usage()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, {self.usage.calls} calls)"

    def get_server_info(self) -> dict[str, Any]:
        usage = self.usage
        return {"model_path": self.model, "api": self.api, "calls": usage.calls,
                "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}  # fmt: skip

    def call(self, job: Job, function: Callable[[], T]) -> T:
        """Call the API, again where that may help."""
        return with_retries(
            function,
            retryable=retry_status,
            attempts=self.max_retries + 1,
            first_wait=self.retry_wait,
            cancelled=lambda: job.cancelled,
        )

    def check_choice(self, job: Job) -> tuple[str, ...]:
        """A chat model does not tell the probability of a given answer: it is made to give one of the choices."""
        assert job.choices is not None
        if job.method is not token_length_normalized:
            raise ValueError(f"choices_method: {self.api} gives no log-probabilities of a given text, only a choice")
        return job.choices


def chat_messages(prompt: Prompt, backend: HostedBackend) -> list[tuple[str, list[Any]]]:
    """(role, parts) of each message; the last one is the beginning of the answer if the program wrote one."""
    messages = [(message["role"], _parts(message["content"])) for message in prompt.messages]
    if prompt.role is None:
        if messages:
            raise ValueError(f"gen must be inside of assistant(...) when a program with roles runs on {backend.api}")
        return [("user", [*prompt.media, prompt.text])]
    if prompt.role != "assistant":
        raise ValueError(f"gen must be inside of assistant(...) on {backend.api}, it is inside of {prompt.role}(...)")
    partial = _parts(prompt.partial)
    if partial and not backend.continues:
        raise ValueError(
            f"{backend.api} cannot go on from the text {prompt.partial!r} in assistant(...): put the gen first, or use "
            "@function(num_api_spec_tokens=...)"
        )
    return [*messages, ("assistant", partial)] if partial else messages


def _parts(content: Any) -> list[Any]:
    return [part for part in ([content] if isinstance(content, str) else content) if part != ""]


def split_system(messages: Sequence[tuple[str, list[Any]]]) -> tuple[str, list[tuple[str, list[Any]]]]:
    """The system messages' text, and the rest, for APIs that take the system prompt apart."""
    system = [part for role, parts in messages if role == "system" for part in parts if isinstance(part, str)]
    return "\n\n".join(system), [message for message in messages if message[0] != "system"]


def load_image(source: Any) -> tuple[str, bytes]:
    """(MIME type, bytes) of a path, bytes or a PIL image."""
    if isinstance(source, (str, Path)):
        source = Path(source).read_bytes()
    if isinstance(source, (bytes, bytearray)):
        data = bytes(source)
        for magic, mime in ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif")):
            if data.startswith(magic):
                return mime, data
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return "image/webp", data
        raise ValueError("image must be a PNG, JPEG, GIF or WebP file")
    if hasattr(source, "save"):
        buffer = io.BytesIO()
        source.save(buffer, format="PNG")
        return "image/png", buffer.getvalue()
    raise ValueError(f"image must be a path, a URL, bytes or a PIL image, got {type(source).__name__}")


def is_url(source: Any) -> bool:
    return isinstance(source, str) and source.startswith(("http://", "https://", "data:"))


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def expand_videos(parts: Sequence[Any]) -> list[Any]:
    """Each video as `num_frames` images at equal distances."""
    expanded: list[Any] = []
    for part in parts:
        expanded.extend(_frames(part) if isinstance(part, Video) else [part])
    return expanded


def _frames(video: Video) -> list[Image]:
    cv2 = need("cv2", pip="opencv-python-headless")
    reader = cv2.VideoCapture(str(video.path))
    count = int(reader.get(cv2.CAP_PROP_FRAME_COUNT))
    if count < 1:
        raise ValueError(f"video {str(video.path)!r} cannot be read")
    frames = []
    for i in range(video.num_frames):
        reader.set(cv2.CAP_PROP_POS_FRAMES, i * count // video.num_frames)
        ok, frame = reader.read()
        if ok:
            frames.append(Image(cv2.imencode(".jpg", frame)[1].tobytes()))
    reader.release()
    return frames
