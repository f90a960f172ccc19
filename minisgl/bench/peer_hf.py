"""Hugging Face `generate` as a `Player`: batches of 8 left-padded prompts, nothing shared (see `peers_hf`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .drive import Answer, Player
from .twins import Ask
from .workloads import BenchError, BenchRequest

if TYPE_CHECKING:
    from .peers import Job

BATCH = 8


class HuggingFacePlayer(Player):
    """model: see `peers.run_peer`.  Greedy only, no grammars."""

    def __init__(self, model: dict[str, Any], jobs: Sequence[Job]):
        import torch

        from ..sizing import choose_device
        from .peers_hf import HuggingFace

        dtype = torch.bfloat16 if model["dtype"] == "auto" else getattr(torch, model["dtype"])
        device = str(choose_device(model["device"]))
        dummy = model["load_format"] == "dummy"
        self.peer = HuggingFace(Path(model["folder"]), dtype=dtype, device=device, dummy=dummy)

    def prepare(self, asks: Sequence[Ask]) -> list[BenchRequest]:
        if any(ask.regex is not None or isinstance(ask.prompt, str) for ask in asks):
            raise BenchError("transformers' generate follows no grammar: leave this workload out")
        return [BenchRequest(ask.prompt, ask.max_new_tokens) for ask in asks]  # pyright: ignore[reportArgumentType]

    def answer(self, prepared: list[BenchRequest]) -> list[Answer]:
        run = self.peer.run(prepared, BATCH, warm=False)
        return [
            Answer(record.output_ids, request.prompt, record.prompt_tokens)
            for request, record in zip(prepared, run.records)
        ]

    def flush(self) -> None:
        """It keeps nothing."""
