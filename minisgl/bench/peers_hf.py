"""Hugging Face `generate` on the same requests: what a user would write without an engine.

Batches of 8 left-padded prompts, greedy, with its KV cache, nothing shared between requests or batches.  It
is not made to look bad: requests of like length share a batch (a batch runs until its longest output is done,
and padding is computed), and each output counts only the tokens that were asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tqdm.auto import tqdm

from .runners import Record, Run
from .workloads import BenchError, BenchRequest

PAD = 0  # any id: padding is masked


class HuggingFace:
    """`AutoModelForCausalLM` of the same checkpoint.  `folder`: config.json and safetensors, as transformers
    wants.

    `dummy`: random weights (the same shapes, other values).  `dtype`: of weights and computation.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: str, dummy: bool = False):
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            if dummy:
                with torch.device(device):
                    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            else:
                model = AutoModelForCausalLM.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise BenchError(f"--compare hf: transformers cannot load {folder}: {error}") from error
        self.model: Any = cast(Any, model).to(device=torch.device(device), dtype=dtype).eval()
        self.device = torch.device(device)

    def run(self, requests: Sequence[BenchRequest], batch: int, warm: bool = True) -> Run:
        """Answer the requests in batches of `batch`, after one of few tokens as a warm-up (`warm`)."""
        order = sorted(
            range(len(requests)), key=lambda i: (requests[i].max_new_tokens, len(requests[i].prompt))
        )
        batches = [order[i : i + batch] for i in range(0, len(order), batch)]
        if warm:
            self._generate([requests[i].prompt[-16:].tolist() for i in batches[0]], 2)
        outputs: dict[int, list[int]] = {}
        with tqdm(total=len(requests), desc="Hugging Face generate", unit="req") as bar:
            begin = time.perf_counter()
            for indices in batches:
                most = max(requests[i].max_new_tokens for i in indices)
                generated = self._generate([requests[i].prompt.tolist() for i in indices], most)
                outputs |= {i: ids[: requests[i].max_new_tokens] for i, ids in zip(indices, generated)}
                bar.update(len(indices))
            seconds = time.perf_counter() - begin
        return Run([Record(outputs[i], len(request.prompt)) for i, request in enumerate(requests)], seconds)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        from transformers import GenerationConfig

        longest = max(map(len, prompts))
        ids = torch.tensor(
            [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device
        )
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        never = self.model.config.vocab_size  # no token has this id: nothing ends early, as with `ignore_eos`
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=never,
            pad_token_id=PAD,
            use_cache=True,
        )
        out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return out[:, longest:].tolist()
