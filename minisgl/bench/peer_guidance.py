"""guidance over transformers as a `Player`: one text after another, forced tokens appended without asking the model.

It has its own engine and cache for each text; what it is good at, and what it is here for, are grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .drive import Answer, Player
from .twins import Ask
from .workloads import BenchError

if TYPE_CHECKING:
    from .peers import Job


class GuidancePlayer(Player):
    """model: see `peers.run_peer`."""

    def __init__(self, model: dict[str, Any], jobs: Sequence[Job]):
        import torch
        from guidance import models  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if model["load_format"] == "dummy" or not model["has_tokenizer"]:
            raise BenchError("guidance needs a model with weights and a tokenizer")
        dtype = torch.bfloat16 if model["dtype"] == "auto" else getattr(torch, model["dtype"])
        network = AutoModelForCausalLM.from_pretrained(model["folder"], dtype=dtype)
        if model["device"].startswith("cuda"):
            network = network.to(model["device"])
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model["folder"])
        self.model: Any = models.Transformers(network, self.tokenizer, echo=False)

    def prepare(self, asks: Sequence[Ask]) -> list[tuple[str, int, Ask]]:
        """Texts with their length in tokens: guidance takes no token ids."""
        found = []
        for ask in asks:
            text = ask.prompt if isinstance(ask.prompt, str) else self.tokenizer.decode(ask.prompt.tolist())
            found.append((text, len(self.tokenizer.encode(text)), ask))
        return found

    def answer(self, prepared: list[tuple[str, int, Ask]]) -> list[Answer]:
        from guidance import gen  # pyright: ignore[reportMissingImports]

        answers = []
        for text, length, ask in prepared:
            limits: dict[str, Any] = {"max_tokens": ask.max_new_tokens, "temperature": ask.temperature}
            if ask.regex is not None:
                limits["regex"] = ask.regex
            output = (self.model + text + gen(name="output", **limits))["output"]
            answers.append(Answer(self.tokenizer.encode(output), None, length, 0, output))
        return answers

    def flush(self) -> None:
        """Its engine keeps the last text; the next one replaces it."""
