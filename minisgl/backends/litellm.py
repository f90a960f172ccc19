"""Any provider that LiteLLM knows, through its client (`pip install litellm`); models by its names."""

from __future__ import annotations

from typing import Any, ClassVar

from .base import need
from .openai import ChatCompletions


class LiteLLM(ChatCompletions):
    """LiteLLM(model, api_key=None, base_url=None, ...); further options go to every `litellm.completion` call."""

    api: ClassVar[str] = "LiteLLM"

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        parallelism: int = 64,
        max_retries: int = 4,
        retry_wait: float = 0.5,
        **options: Any,
    ):
        super().__init__(model, parallelism=parallelism, max_retries=max_retries, retry_wait=retry_wait)
        self._litellm = need("litellm", pip="litellm")
        self._options = {**options, "api_key": api_key, "base_url": base_url, "num_retries": 0, "max_retries": 0}

    def _create(self, **request: Any) -> Any:
        return self._litellm.completion(**request, **self._options)
