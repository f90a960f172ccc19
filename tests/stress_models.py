"""What stress runs are made on: models whose answer to anything can be computed a second time, naively.

    scripted   a Runtime whose model is a rolling hash: the "K/V" of a position is hash(K/V before it, its token), kept
               by slot.  Whoever reads a slot that was freed, overwritten or shared wrongly gets other tokens, and free
               slots are poisoned before every step.  Integers: there are no near-ties.
    tiny       a random Llama with a byte tokenizer, against transformers in float32 without a cache
    default    the default model, against transformers

The first two write letters, digits and a few signs only, one token each: text and token ids are the same thing.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl import Runtime

from . import tiny_models

ALPHABET = string.ascii_letters + string.digits + ' .,:"{}[]-'
ALLOWED = [*(ord(c) for c in ALPHABET), tiny_models.EOS]
MODEL_NAMES = ("scripted", "tiny", "default")
MOD = 16_777_213  # a prime below 2^24: every hash is exact in float32
POISON = MOD - 1


def mix(h: int, token: int) -> int:
    return (h * 1_000_003 + token * 7919 + 12345) % MOD


def scripted_logits(hashes: np.ndarray, vocab: int) -> np.ndarray:
    """(n, vocab) float32 in [0, 8), a function of each hash alone; -32 for what is not in the alphabet."""
    tokens = np.arange(vocab, dtype=np.int64)
    values = (hashes[:, None] * (tokens * 48_271 + 11) + tokens * 69_621) % MOD
    logits = (values * 2.0**-21).astype(np.float32)
    hidden = np.ones(vocab, bool)
    hidden[ALLOWED] = False
    logits[:, hidden] = -32
    return logits


class ScriptedLlama:
    """Takes the place of a Runner's model: the same calls, no weights."""

    def __init__(self, real: Any, scheduler: Any):
        self.config, self.dtype, self.device = real.config, real.dtype, real.device
        self.scheduler = scheduler
        self.kv = np.full(scheduler.allocator.capacity + 1, POISON, np.int64)

    def forward(self, batch: Any, attention: Any) -> torch.Tensor:
        """(T, 1) hashes, one for each token; padding has none."""
        self.kv[self.scheduler.allocator.free_slots()] = POISON
        table, kv = batch.table.numpy(), self.kv
        ids, slots, positions = (x.tolist() for x in (batch.input_ids, batch.out_slots, batch.positions))
        hidden = np.zeros((len(ids), 1), np.float32)
        for i, row in enumerate(batch.host.rows.tolist()):
            for t in range(batch.host.q_start[i], batch.host.q_start[i + 1]):
                at = positions[t]
                before = 1 if at == 0 else int(kv[table[row, at - 1]])
                kv[slots[t]] = hidden[t] = mix(before, ids[t])
        return torch.from_numpy(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(scripted_logits(hidden[:, 0].numpy().astype(np.int64), self.config.vocab_size))

    def check_tree(self) -> None:
        """The tree keeps for each sequence of tokens what was computed for that sequence."""
        tree = self.scheduler.tree
        hashes = {id(tree.root): 1} if tree.stores else {}
        for node in tree.nodes():
            h = hashes[id(node.parent)]
            for token, slot in zip(node.key.tolist(), node.slots.tolist()):
                h = mix(h, token)
                assert self.kv[slot] == h, f"the tree's {node} has the K/V of other tokens in slot {slot}"
            hashes[id(node)] = h


@dataclass
class Tolerance:
    """How far a right answer may be from the reference's."""

    gap: float  # of logits, between the token taken and the likeliest
    logprob: float
    mass: float  # of probability, around the place where a seeded draw falls


class Model:
    """One of `MODEL_NAMES` on a device: makes Runtimes, and says what their logits should have been."""

    def __init__(self, name: str, scratch: Path, device: str = "cpu", dtype: str = "float32"):
        if name == "scripted" and device != "cpu":
            raise ValueError("the scripted model runs on a CPU")
        self.name, self.device, self.dtype = name, device, dtype
        self.bytes = name != "default"
        if name == "default":
            from minisgl.default_model import default_model_folder

            self.folder = default_model_folder()
        else:
            self.folder = ascii_checkpoint(scratch / "model")
        self.tolerance = {
            "scripted": Tolerance(0.0, 1e-5, 1e-6),
            "float32": Tolerance(2e-3, 2e-3, 1e-3) if device == "cpu" else Tolerance(2e-2, 2e-2, 1e-2),
            "bfloat16": Tolerance(2.0, 2.5, 0.5),
        }["scripted" if name == "scripted" else dtype]
        self._hf: Any = None

    def runtime(self, options: dict[str, Any]) -> Runtime:
        """An engine with these switches.  `overcommit`: admission keeps no memory free for output."""
        options = dict(options)
        overcommit = options.pop("overcommit", False)
        runtime = Runtime(self.folder, device=self.device, dtype=self.dtype, **options)
        runner, scheduler = runtime.engine.runner, runtime.scheduler

        def prepare() -> None:
            if self.name == "scripted":
                runner.model = ScriptedLlama(runner.model, scheduler)  # type: ignore[assignment]
            if overcommit:
                scheduler.reserve_ratio = 0.0

        runtime.engine.call(prepare)
        return runtime

    def logits(self, ids: list[int]) -> np.ndarray:
        """(len(ids), vocab) float32: row i predicts token i + 1; computed whole, alone, without any cache."""
        if self.name == "scripted":
            hashes, h = [], 1
            for token in ids:
                hashes.append(h := mix(h, token))
            return scripted_logits(np.array(hashes, np.int64), tiny_models.VOCAB_SIZE)
        if self._hf is None:
            from transformers import AutoModelForCausalLM

            model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            self._hf = model.eval().to(self.device)
        with torch.inference_mode():
            return self._hf(torch.tensor([ids], device=self.device)).logits[0].float().cpu().numpy()


def ascii_checkpoint(folder: Path) -> Path:
    """A tiny Llama that says nothing but `ALPHABET` and its stop id; its weights are bfloat16 numbers."""
    from safetensors.torch import load_file, save_file

    tiny_models.make("llama2", folder)
    path = folder / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    silent = torch.ones(tiny_models.VOCAB_SIZE, dtype=torch.bool)
    silent[ALLOWED] = False
    weights["lm_head.weight"][silent] = 0
    save_file(weights, path, metadata={"format": "pt"})
    _number_by_bytes(folder / "tokenizer.json")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16", "dtype": "bfloat16"}))
    return folder


def _number_by_bytes(path: Path) -> None:
    """Give the piece of a byte that byte as its id."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] = {piece: byte for byte, piece in bytes_to_unicode().items()}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
