"""SGLang as a `Player`: its offline `Engine`, radix cache on, token ids in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .drive import Answer, Player
from .twins import Ask

if TYPE_CHECKING:
    from .peers import Job


class SglangPlayer(Player):
    """model: see `peers.run_peer`."""

    def __init__(self, model: dict[str, Any], jobs: Sequence[Job]):
        import sglang  # pyright: ignore[reportMissingImports]

        self.has_tokenizer = model["has_tokenizer"]
        self.engine: Any = sglang.Engine(
            model_path=model["folder"],
            load_format=model["load_format"],
            dtype=model["dtype"],
            context_length=model["max_context"],
            skip_tokenizer_init=not self.has_tokenizer,
            random_seed=0,
            log_level="error",
        )

    def prepare(self, asks: Sequence[Ask]) -> dict[str, Any]:
        key = "prompt" if isinstance(asks[0].prompt, str) else "input_ids"
        prompts = [ask.prompt if isinstance(ask.prompt, str) else ask.prompt.tolist() for ask in asks]
        return {key: prompts, "sampling_params": [self._params(ask) for ask in asks]}

    @staticmethod
    def _params(ask: Ask) -> dict[str, Any]:
        params: dict[str, Any] = {"temperature": ask.temperature, "max_new_tokens": ask.max_new_tokens}
        return params | ({"ignore_eos": True} if ask.regex is None else {"regex": ask.regex})

    def answer(self, prepared: dict[str, Any]) -> list[Answer]:
        prompts = prepared.get("input_ids")
        answers = []
        for i, reply in enumerate(self.engine.generate(**prepared)):
            info = reply["meta_info"]
            prompt = None if prompts is None else prompts[i]
            answers.append(
                Answer(
                    list(reply["output_ids"]), prompt, info["prompt_tokens"], info["cached_tokens"], reply.get("text")
                )
            )
        return answers

    def flush(self) -> None:
        self.engine.flush_cache()
