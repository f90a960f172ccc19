"""vLLM as a `Player`, in its fastest offline form: one process, prefix cache on, CUDA graphs as it chooses.

No network, no usage statistics, no FlashInfer sampler (an extra package).  Token ids in, token ids out: nothing is
detokenised, except for texts under a regex, whose output is checked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .drive import Answer, Player
from .twins import Ask

if TYPE_CHECKING:
    from .peers import Job

SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmPlayer(Player):
    """model: see `peers.run_peer`."""

    def __init__(self, model: dict[str, Any], jobs: Sequence[Job]):
        for name, value in SETTINGS.items():  # this process is the peer's own
            os.environ.setdefault(name, value)
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        tokens: dict[str, Any] = {} if model["has_tokenizer"] else {"skip_tokenizer_init": True}
        self.llm: Any = LLM(
            model["folder"],
            load_format=model["load_format"],
            dtype=model["dtype"],
            max_model_len=model["max_context"],
            gpu_memory_utilization=0.85,
            enable_prefix_caching=True,
            max_num_seqs=512,
            seed=0,
            **tokens,
        )

    def prepare(self, asks: Sequence[Ask]) -> Any:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        prompts = [
            ask.prompt if isinstance(ask.prompt, str) else {"prompt_token_ids": ask.prompt.tolist()} for ask in asks
        ]
        return prompts, [self._params(ask, SamplingParams) for ask in asks]

    @staticmethod
    def _params(ask: Ask, make: Any) -> Any:
        common: dict[str, Any] = {"temperature": ask.temperature, "max_tokens": ask.max_new_tokens, "seed": ask.seed}
        if ask.regex is None:
            return make(**common, ignore_eos=True, detokenize=False)
        from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports]

        return make(**common, structured_outputs=StructuredOutputsParams(regex=ask.regex))

    def answer(self, prepared: Any) -> list[Answer]:
        prompts, params = prepared
        answers = []
        for output in self.llm.generate(prompts, params, use_tqdm=False):
            prompt, first = list(output.prompt_token_ids), output.outputs[0]
            cached = output.num_cached_tokens or 0
            answers.append(Answer(list(first.token_ids), prompt, len(prompt), cached, first.text))
        return answers

    def flush(self) -> None:
        self.llm.reset_prefix_cache()
