"""llama.cpp (llama-cpp-python) as a `Player`: one request after another, each reusing what it has in common with the
last one, which is llama.cpp's own prefix cache.  It runs from a file: `--model FILE.gguf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .drive import Answer, Player
from .report import common_prefix
from .twins import Ask
from .workloads import BenchError

if TYPE_CHECKING:
    from .peers import Job


class LlamaCppPlayer(Player):
    """model: see `peers.run_peer`; "gguf" is the file.  Greedy only, no regular expressions."""

    def __init__(self, model: dict[str, Any], jobs: Sequence[Job]):
        import llama_cpp  # pyright: ignore[reportMissingImports]

        if model["gguf"] is None:
            raise BenchError("llama.cpp runs from a .gguf file: use --model FILE.gguf")
        layers = -1 if model["device"].startswith("cuda") else 0
        self.llama: Any = llama_cpp.Llama(model["gguf"], n_ctx=model["max_context"], n_gpu_layers=layers, verbose=False)

    def prepare(self, asks: Sequence[Ask]) -> list[tuple[list[int], int]]:
        found = []
        for ask in asks:
            if ask.regex is not None or isinstance(ask.prompt, str):
                raise BenchError("llama.cpp takes no regular expression: leave this workload out")
            found.append((ask.prompt.tolist(), ask.max_new_tokens))
        return found

    def answer(self, prepared: list[tuple[list[int], int]]) -> list[Answer]:
        answers = []
        for prompt, n in prepared:
            held = np.asarray(self.llama.input_ids[: self.llama.n_tokens])
            cached = common_prefix(held, np.array(prompt[:-1]))
            tokens = self.llama.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True)
            answers.append(Answer([next(tokens) for _ in range(n)], prompt, len(prompt), cached))
        return answers

    def flush(self) -> None:
        self.llama.reset()
        self.llama.n_tokens = 0
