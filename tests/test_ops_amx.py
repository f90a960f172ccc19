"""The compiled step: equal to the model in float32 but for rounding, for every option that it has; and what
happens where it cannot be used."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from itertools import chain, takewhile

import numpy as np
import pytest
import torch

from minisgl import Runtime, ops_amx, sizing
from minisgl.attention import Attention, ForwardBatch, HostBatch, ReferenceAttention
from minisgl.attention_cpu import CpuAttention
from minisgl.config import LlamaConfig
from minisgl.model_llama import Llama
from minisgl.ops_amx import AmxOps, Unavailable
from minisgl.ops_cpu import PackedOps
from minisgl.pool import KVPool

from . import tiny_models

CAPACITY = 900


def why_not() -> str:
    try:
        ops_amx.load()
    except Unavailable as reason:
        return str(reason)
    return ""


needs_amx = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is there")

MODELS = {
    "plain": {},
    "one_head_each": dict(num_heads=2, num_kv_heads=2, head_dim=32),
    "groups_of_3": dict(num_heads=6, num_kv_heads=2, head_dim=64),
    "groups_of_7": dict(num_heads=7, num_kv_heads=1, head_dim=96, hidden_size=96),
    "wide_heads": dict(num_heads=8, num_kv_heads=2, head_dim=128, hidden_size=160, intermediate_size=96),
    "biases": dict(qkv_bias=True, o_bias=True, mlp_bias=True),
    "qk_norm": dict(qk_norm=True, head_dim=64),
    "window": dict(windows=(20, 0)),
    "untied": dict(tie_word_embeddings=False),
}


def config(**changes) -> LlamaConfig:
    sizes = dict(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
        max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    sizes |= changes
    sizes.setdefault("windows", (0,) * sizes["num_layers"])
    return LlamaConfig(**sizes)


class Sequences:
    """A model twice, in bfloat16 with `AmxOps` and, the same weights, in float32; and sequences of random K and V."""

    def __init__(self, lengths: list[int], seed: int = 0, **changes):
        c = self.config = config(**changes)
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self.exact, self.model = (Llama(c, dtype, "cpu") for dtype in (torch.float32, torch.bfloat16))
        for one, other in zip(self.exact.tensors(), self.model.tensors(), strict=True):
            other.copy_(random(*one.shape) * (1 if one.dim() == 1 else 1.5 * one.shape[1] ** -0.5))
            one.copy_(other)
        self.packed = Llama(c, torch.bfloat16, "cpu")
        for one, other in zip(self.packed.tensors(), self.model.tensors(), strict=True):
            one.copy_(other)
        self.packed.use(PackedOps())
        self.ops = AmxOps(ops_amx.load())
        self.model.use(self.ops)
        rng = np.random.default_rng(seed)
        self.kv = random(c.num_layers, 2, CAPACITY + 1, c.num_kv_heads, c.head_dim).bfloat16()
        self.table = rng.integers(0, CAPACITY + 1, (len(lengths) + 1, 400)).astype(np.int32)  # past the end: anything
        slots = rng.permutation(CAPACITY) + 1
        self.lengths, last = np.array(lengths), rng.integers(0, c.vocab_size, len(lengths))
        self.ids = np.random.default_rng(seed + 1).integers(0, c.vocab_size, (len(lengths), 400))
        self.ids[np.arange(len(lengths)), self.lengths - 1] = last
        for row, (length, end) in enumerate(zip(lengths, np.cumsum(lengths)), start=1):
            self.table[row, :length] = slots[end - length : end]
        self.unused = np.setdiff1d(np.arange(1, CAPACITY + 1), slots[: sum(lengths)])

    def batch(
        self,
        members: list[int] | None = None,
        padding: int = 0,
        new: list[int] | None = None,
        decodes: int | None = None,
    ) -> ForwardBatch:
        """The last new[i] tokens of the i-th of `members`, 1 by default; the first `decodes` (all) are decodes."""
        members = list(range(len(self.lengths))) if members is None else members
        rows, lengths = np.array(members) + 1, self.lengths[members]
        n = len(members)
        counts = np.array(new or [1] * n)
        positions = np.concatenate([np.arange(end - count, end) for end, count in zip(lengths, counts)])
        starts, token_rows = np.concatenate([[0], np.cumsum(counts)]), np.repeat(rows, counts)

        def padded(array) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([array, np.zeros(padding, np.int64)]).astype(np.int64))

        return ForwardBatch(
            input_ids=padded(self.ids[token_rows - 1, positions]),
            positions=padded(positions),
            out_slots=padded(self.table[token_rows, positions]),
            q_start=torch.from_numpy(starts).int(),
            seq_lens=torch.from_numpy(lengths).int(),
            rows=torch.from_numpy(rows).int(),
            table=torch.from_numpy(self.table),
            num_decodes=n if decodes is None else decodes,
            max_seq_len=int(lengths.max()),
            max_new=int(counts.max()),
            logit_rows=torch.from_numpy(starts[1:] - 1),
            host=HostBatch(starts, lengths, rows),
        )

    def attention(self, kind: type[Attention], dtype: torch.dtype) -> Attention:
        c = self.config
        pool = KVPool(c.num_layers, CAPACITY, c.num_kv_heads, c.head_dim, dtype, "cpu")
        pool.kv.copy_(self.kv)
        return kind(pool, c.num_heads, c.num_kv_heads, c.head_dim)

    def run(self, batch: ForwardBatch | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and the pool after a compiled step."""
        attention = self.attention(CpuAttention, torch.bfloat16)
        with torch.inference_mode():
            hidden = self.ops.step(self.model, batch or self.batch(), attention)
        assert hidden is not None
        return hidden, attention.pool.kv

    def run_torch(
        self, model: Llama, kind: type[Attention], batch: ForwardBatch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention, batch = self.attention(kind, model.dtype), batch or self.batch()
        with torch.inference_mode():
            attention.begin(batch)
            return model.forward(batch, attention), attention.pool.kv


def errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The relative error of each row."""
    return (got.float() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(errors(got, want).max())


@needs_amx
@pytest.mark.parametrize("count", [1, 5, 16, 17, 40])
def test_every_number_of_sequences(count):
    lengths = np.random.default_rng(count).integers(1, 22, count).tolist()
    sequences = Sequences(lengths, seed=count)
    exact, _ = sequences.run_torch(sequences.exact, ReferenceAttention)
    in_torch, _ = sequences.run_torch(sequences.packed, CpuAttention)
    got, _ = sequences.run()
    assert error(got, exact) < max(0.02, 1.5 * error(in_torch, exact))


@needs_amx
@pytest.mark.parametrize("name", list(MODELS))
def test_every_kind_of_model(name):
    sequences = Sequences([1, 2, 15, 16, 17, 33, 200, 64, 300], **MODELS[name])
    exact, exact_kv = sequences.run_torch(sequences.exact, ReferenceAttention)
    in_torch, in_torch_kv = sequences.run_torch(sequences.packed, CpuAttention)
    got, kv = sequences.run()
    assert error(got, exact) < max(0.02, 1.5 * error(in_torch, exact))
    new = sequences.batch().out_slots
    for layer in range(2):
        for of in range(2):
            exact_new, in_torch_new = exact_kv[layer, of, new], in_torch_kv[layer, of, new]
            assert error(kv[layer, of, new], exact_new) < max(0.02, 1.5 * error(in_torch_new, exact_new))
    old = np.setdiff1d(np.arange(CAPACITY + 1), new.numpy())
    assert torch.equal(kv[:, :, old], sequences.kv[:, :, old])


@needs_amx
def test_logits_are_float32_and_do_not_depend_on_the_number_of_rows():
    sequences = Sequences([3])
    hidden = torch.randn(45, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = hidden.double() @ sequences.exact.lm_head.double().T
    got = sequences.model.logits(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    assert torch.equal(sequences.model.logits(hidden[7:9]), got[7:9])
    assert sequences.model.logits(hidden[:0]).shape == (0, 128)


@needs_amx
def test_a_sequence_has_the_same_bits_in_any_company():
    sequences = Sequences([300, 1, 40, 7, 129, 12, 33, 90, 65, 20, 21, 22, 23, 24, 25, 26, 27, 1, 5], head_dim=64)
    together, kv = sequences.run()
    for i in (0, 1, 4, 16, 18):
        alone, kv_alone = sequences.run(sequences.batch([i]))
        slot = sequences.batch([i]).out_slots
        assert torch.equal(alone[0], together[i]) and torch.equal(kv_alone[:, :, slot], kv[:, :, slot])


@needs_amx
def test_threads_do_not_change_a_bit(monkeypatch):
    sequences = Sequences([300, 1, 40, 7, 129], intermediate_size=480)
    want = sequences.run()
    for threads in (1, 2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for _ in range(10):  # who takes which block differs from run to run
            got = sequences.run()
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@needs_amx
def test_nothing_else_is_read():
    """Slots that are nobody's hold NaN, and so does the workspace."""
    sequences = Sequences([30, 3, 41, 64, 1, 170])
    want = sequences.run()[0]
    sequences.kv[:, :, sequences.unused] = torch.nan
    sequences.kv[:, :, sequences.batch().out_slots] = torch.nan  # which the step fills
    sequences.ops._work.view(torch.int16).fill_(0x7FC0)  # a NaN
    assert torch.equal(sequences.run()[0], want)


@needs_amx
def test_padding_is_zero_and_changes_nothing():
    sequences = Sequences([30, 3, 41])
    want, kv = sequences.run()
    got, kv_padded = sequences.run(sequences.batch(padding=13))
    assert torch.equal(got[:3], want) and torch.equal(kv, kv_padded) and not got[3:].any()


@needs_amx
def test_onednn_computes_the_same_after_a_step():
    """Both configure AMX's tiles."""
    sequences = Sequences([30, 3, 41])
    x = torch.randn(7, 64).bfloat16()
    layer = sequences.model.layers[0]
    want = sequences.ops.linear(x, layer.qkv)
    for _ in range(3):
        sequences.run()
        assert torch.equal(sequences.ops.linear(x, layer.qkv), want)


@needs_amx
def test_another_attention_is_left_to_torch():
    sequences = Sequences([30, 3])
    reference = sequences.attention(ReferenceAttention, torch.bfloat16)
    assert sequences.ops.step(sequences.model, sequences.batch(), reference) is None


# ---- prompts ---------------------------------------------------------------------------------------------------------

PROMPTS = dict(members=[0, 1, 2, 3, 4, 5, 6, 7], new=[1, 1, 1, 5, 16, 17, 33, 120], decodes=2)


@needs_amx
@pytest.mark.parametrize("name", list(MODELS))
def test_prompts_of_every_kind_of_model(name):
    """Beside decodes, with and without a cached prefix."""
    sequences = Sequences([40, 1, 77, 5, 31, 64, 33, 200], **MODELS[name])
    batch = sequences.batch(**PROMPTS)
    exact, exact_kv = sequences.run_torch(sequences.exact, ReferenceAttention, batch)
    in_torch, _ = sequences.run_torch(sequences.packed, CpuAttention, batch)
    got, kv = sequences.run(batch)
    ours, theirs = errors(got, exact), errors(in_torch, exact)
    assert ours.mean() < 1.05 * theirs.mean() and ours.max() < 0.1
    written = batch.out_slots
    for layer in range(2):
        for of in range(2):
            assert error(kv[layer, of, written], exact_kv[layer, of, written]) < 0.05
    old = np.setdiff1d(np.arange(CAPACITY + 1), written.numpy())
    assert torch.equal(kv[:, :, old], sequences.kv[:, :, old])


@needs_amx
@pytest.mark.parametrize("name", ["groups_of_3", "wide_heads", "window"])
def test_a_prompt_has_the_same_bits_in_any_chunks_and_company(name):
    sequences = Sequences([230, 40, 60, 1, 90], **MODELS[name])
    together, kv = sequences.run(sequences.batch(new=[1, 40, 60, 1, 90], decodes=1))
    decoded, _ = sequences.run(sequences.batch([0]))
    assert torch.equal(decoded[0], together[0])  # a decode, beside prompts or not
    want = dict(zip((1, 2, 3, 4), together[1:].split([40, 60, 1, 90])))
    for chunks in ([60], [1, 1, 31, 27], [16, 17, 27], [59, 1]):
        alone = Sequences([230, 40, 60, 1, 90], **MODELS[name])
        hidden = []
        for chunk, end in zip(chunks, np.cumsum(chunks)):
            alone.lengths[2] = end
            states, alone.kv = alone.run(alone.batch([2], new=[chunk], decodes=0))
            hidden.append(states)
        assert torch.equal(torch.cat(hidden), want[2]), chunks
        slots = alone.batch([2], new=[60]).out_slots
        assert torch.equal(alone.kv[:, :, slots], kv[:, :, slots])


def as_decodes(batch: ForwardBatch) -> ForwardBatch:
    """The same with every token a decode, as the runner asks for tokens that a grammar forced."""
    rows = batch.rows.repeat_interleave(batch.q_start.diff())
    ends, starts = batch.positions + 1, torch.arange(len(rows) + 1)
    host = HostBatch(starts.numpy(), ends.numpy(), rows.numpy())
    changes = dict(q_start=starts.int(), seq_lens=ends.int(), rows=rows, num_decodes=len(rows), max_new=1, host=host)
    return dataclasses.replace(batch, **changes)


@needs_amx
@pytest.mark.parametrize("name", list(MODELS))
def test_a_token_has_the_same_bits_as_a_prompts_a_decode_or_forced(name):
    """In attention, up to 16 tokens that follow each other in a sequence are computed together, forced ones too."""
    sequences = Sequences([100, 40, 33, 230], **MODELS[name])
    batch = sequences.batch(new=[1, 40, 5, 35], decodes=1)
    want, kv = sequences.run(batch)
    got, kv_decoded = sequences.run(as_decodes(batch))
    assert torch.equal(got, want) and torch.equal(kv, kv_decoded)
    for i in range(5):
        alone = Sequences([100, 40, 33, 230], **MODELS[name])
        alone.kv, alone.lengths[2] = kv, 29 + i
        assert torch.equal(alone.run(alone.batch([2]))[0][0], want[41 + i])


@needs_amx
def test_decodes_of_a_sequence_that_do_not_follow_each_other():
    sequences = Sequences([60, 60])
    apart = as_decodes(sequences.batch(new=[20, 20]))
    order = torch.tensor([3, 4, 2, 25, 26, 5, 6, 8, 27, 31, 30])
    rows, ends = apart.rows[order], apart.seq_lens[order]
    host = HostBatch(np.arange(len(order) + 1), ends.numpy(), rows.numpy())
    chosen = {name: getattr(apart, name)[order] for name in ("input_ids", "positions", "out_slots")}
    mixed = dataclasses.replace(
        apart, **chosen, q_start=torch.arange(len(order) + 1).int(), seq_lens=ends, rows=rows,
        num_decodes=len(order), host=host,
    )  # fmt: skip
    want, sequences.kv = sequences.run(apart)
    assert torch.equal(sequences.run(mixed)[0], want[order])


@needs_amx
def test_many_rows_at_once_have_the_same_bits():
    """More than a group of 256, and so few that small weights would be used."""
    sequences = Sequences([390, 390], intermediate_size=96)
    together, _ = sequences.run(sequences.batch(new=[390, 390], decodes=0))
    alone, _ = sequences.run(sequences.batch([1], new=[390], decodes=0))
    assert torch.equal(alone, together[390:])
    sequences.lengths[1] = 20
    few, _ = sequences.run(sequences.batch([1], new=[20], decodes=0))
    assert torch.equal(few, together[390:410])


@needs_amx
def test_threads_do_not_change_a_bit_of_prompts(monkeypatch):
    sequences = Sequences([300, 1, 40, 7, 129], head_dim=64)
    batch = sequences.batch(new=[1, 1, 30, 7, 100], decodes=2)
    want = sequences.run(batch)
    for threads in (1, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for _ in range(4):
            got = sequences.run(batch)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@needs_amx
def test_prompts_read_nothing_else():
    sequences = Sequences([30, 3, 41, 64, 1, 170])
    batch = sequences.batch(new=[1, 3, 20, 64, 1, 100], decodes=1)
    want = sequences.run(batch)[0]
    sequences.kv[:, :, sequences.unused] = torch.nan
    sequences.kv[:, :, batch.out_slots] = torch.nan
    sequences.ops._work.view(torch.int16).fill_(0x7FC0)  # a NaN
    assert torch.equal(sequences.run(batch)[0], want)


@needs_amx
@pytest.mark.parametrize("bad", [-1, 128])
def test_a_token_id_out_of_range_is_an_error_before_anything_is_written(bad):
    sequences = Sequences([30, 3])
    sequences.ids[1] = bad
    with pytest.raises(IndexError, match=f"not in the vocabulary.*{bad}"):
        sequences.run()
    sequences.ids[1] = 0
    sequences.run()


@needs_amx
@pytest.mark.parametrize("length", [0, 31])
def test_a_length_out_of_bounds_is_an_error(length):
    sequences = Sequences([30, 3])
    batch = sequences.batch()
    batch.seq_lens[1] = length
    with pytest.raises(IndexError, match=f"max_seq_len=30: .*{length}"):
        sequences.run(batch)


@needs_amx
@pytest.mark.parametrize("slot", [-1, CAPACITY + 1])
def test_a_slot_that_is_not_in_the_pool_is_an_error(slot):
    sequences = Sequences([30, 3])
    batch = sequences.batch()
    batch.out_slots[1] = slot
    with pytest.raises(IndexError, match=f"not in the pool.*{slot}"):
        sequences.run(batch)


@needs_amx
def test_another_layout_of_the_weights_is_noticed(monkeypatch):
    weight = torch.randn(64, 96).bfloat16()
    packed = PackedOps().pack(weight)
    assert ops_amx.in_blocks(weight, packed)
    assert not ops_amx.in_blocks(weight.flip(0), packed)
    assert not ops_amx.in_blocks(torch.zeros(64, 128).bfloat16(), packed)
    assert not ops_amx.in_blocks(torch.zeros(64, 96).bfloat16(), torch.zeros(64, 96).bfloat16().to_mkldnn())
    assert not ops_amx.in_blocks(torch.zeros(60, 96).bfloat16(), PackedOps().pack(torch.zeros(60, 96).bfloat16()))
    monkeypatch.setattr(ops_amx, "in_blocks", lambda weight, packed: weight.shape != (128, 64))  # qkv's, lm_head's
    sequences = Sequences([30, 3])
    attention = sequences.attention(CpuAttention, torch.bfloat16)
    assert sequences.ops.step(sequences.model, sequences.batch(), attention) is None
    hidden, _ = sequences.run_torch(sequences.model, CpuAttention)
    in_torch, _ = sequences.run_torch(sequences.packed, CpuAttention)
    assert torch.equal(hidden, in_torch)
    assert torch.equal(sequences.model.logits(hidden), sequences.packed.logits(hidden))


# ---- where it is not used --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, dtype, message",
    [
        ({}, torch.float32, "for bfloat16"),
        ({"head_dim": 80}, torch.bfloat16, "head_dim 80 is none of"),
        ({"hidden_size": 72}, torch.bfloat16, r"\(72, 128\) are not both multiples of 32"),
        ({"num_layers": 513}, torch.bfloat16, "more than 512 layers"),
    ],
)
def test_models_that_it_cannot_compute(changes, dtype, message):
    with pytest.raises(Unavailable, match=message):
        ops_amx.check(config(**changes), dtype)


def test_a_cpu_without_amx(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t\t: fpu fma avx512f\n")
    with pytest.raises(Unavailable, match="this CPU has no a"):
        ops_amx.load.__wrapped__(tmp_path / "cpuinfo")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """`load` as on a machine that has AMX and has never compiled the file."""
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(ops_amx.sys, "platform", "linux")
    monkeypatch.setattr(ops_amx.platform, "machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text("flags : " + " ".join(ops_amx.CPU_FLAGS))
    return lambda: ops_amx.load.__wrapped__(tmp_path / "cpuinfo")


def test_no_compiler(fresh, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="there is no C compiler"):
        fresh()


@pytest.mark.parametrize(
    "script, message",
    [
        ("exit 3", "did not compile decode_amx.c: status 3"),
        ("echo 'warning: old'; echo 'x.c:1: error: what is -mamx-tile?' >&2; exit 1", "error: what is -mamx-tile"),
        ("echo no library > $(echo $* | sed 's/.* -o //; s/ .*//')", "did not make a library of decode_amx.c"),
        ("exit 0", "did not make a library of decode_amx.c"),
    ],
)
def test_a_compiler_that_does_not_do(fresh, monkeypatch, tmp_path, script, message):
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(Unavailable, match=message) as caught:
        fresh()
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*/decode.so"))  # the next compiler may do


def test_no_home_and_no_proc_are_no_errors(fresh, monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("MINISGL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ops_amx.Path, "home", no_home)
    with pytest.raises(Unavailable, match="home directory"):
        fresh()
    with pytest.raises(Unavailable, match="No such file"):
        ops_amx.load.__wrapped__(tmp_path / "no cpuinfo")


def test_a_cache_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(Unavailable, match="cannot write the cache"):
        fresh()


@needs_amx
def test_compiled_once(fresh, monkeypatch):
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler here")
    fresh()
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    fresh()


def test_without_it_the_model_runs_in_torch(monkeypatch, caplog):
    def load():
        raise Unavailable("there is no C compiler")

    monkeypatch.setattr(ops_amx, "load", load)
    model = Llama(config(), torch.bfloat16, "cpu")
    model.init_dummy()
    with caplog.at_level("INFO", "minisgl"):
        sizing.apply(sizing.ComputePlan(torch.bfloat16, packed=True), model)
    assert type(model.ops) is PackedOps
    assert "steps are computed in torch: there is no C compiler" in caplog.text


@needs_amx
def test_the_runtime_uses_it_unless_told_otherwise(tmp_path):
    """And is as near to float32 as torch alone: in the log-probabilities, up to the first other token."""
    folder = tiny_models.make("llama3", tmp_path)
    prompts = [np.random.default_rng(i).integers(3, 250, 5 + 9 * i).tolist() for i in range(6)]
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}

    def generate(dtype: str, backend: str, kind: type) -> list[list[tuple[float, int]]]:
        with Runtime(str(folder), dtype=dtype, attention_backend=backend, kv_capacity=2000) as runtime:
            assert type(runtime._engine.runner.model.ops) is kind
            replies = runtime.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        return [[(value, token) for value, token, _ in r["meta_info"]["output_token_logprobs"]] for r in replies]

    exact = generate("float32", "auto", PackedOps)

    def distance(replies) -> float:
        both = (takewhile(lambda x: x[0][1] == x[1][1], zip(one, other)) for one, other in zip(replies, exact))
        return float(np.mean([abs(a - b) for (a, _), (b, _) in chain.from_iterable(both)]))

    ours, in_torch = (distance(generate("bfloat16", *x)) for x in (("auto", AmxOps), ("torch", PackedOps)))
    assert ours < max(0.03, 1.5 * in_torch), (ours, in_torch)


@needs_amx
def test_the_runtime_gives_the_same_bits_whatever_else_it_computes(tmp_path):
    """One after the other, all at once, in any chunks, with a cached prefix or without, computed again after it stepped
    back, and what was generated as part of the next turn's prompt."""
    folder = tiny_models.make("llama3", tmp_path)
    shared = np.random.default_rng(0).integers(3, 250, 70).tolist()
    prompts = [shared + np.random.default_rng(i).integers(3, 250, 3 + 29 * i).tolist() for i in range(5)]
    params = {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True}

    def generate(at_once: bool, **options) -> tuple[list, int]:
        """Tokens and log-probabilities of two turns, and how often a request stepped back."""
        options = {"kv_capacity": 2000} | options
        with Runtime(str(folder), dtype="bfloat16", **options) as runtime:
            assert type(runtime._engine.runner.model.ops) is AmxOps
            answers, turns = [], prompts
            for _ in range(2):
                ask = dict(sampling_params=params, return_logprob=True)
                if at_once:
                    replies = runtime.generate(input_ids=turns, **ask)
                else:
                    replies = [runtime.generate(input_ids=turn, **ask) for turn in turns]
                answers += [(r["output_ids"], [x[0] for x in r["meta_info"]["output_token_logprobs"]]) for r in replies]
                turns = [turn + reply["output_ids"] + shared[:5] for turn, reply in zip(turns, replies)]
            return answers, runtime.stats()["retractions"]

    want, _ = generate(False, radix_cache=False, chunk_size=-1)
    assert generate(True)[0] == want
    assert generate(False, chunk_size=40)[0] == want
    last_alone = len(prompts[0]) - 1  # one token of a prompt is left: that is scheduled as a decode
    assert generate(True, chunk_size=17)[0] == generate(True, chunk_size=last_alone)[0] == want
    retracted, times = generate(True, kv_capacity=340)
    assert retracted == want and times > 0


@needs_amx
def test_the_runtime_gives_the_same_bits_whether_tokens_are_forced_or_sampled(default_model_folder):
    regex = r'\{"name": "[A-Z][a-z]{2,8}", "favourite place": "(the harbour|the library)", "age": [1-9]\}'
    params = {"temperature": 0.0, "max_new_tokens": 60, "regex": regex}
    replies = []
    for jump in (True, False):
        with Runtime(default_model_folder, dtype="bfloat16", kv_capacity=1000, jump_forward=jump) as runtime:
            assert type(runtime._engine.runner.model.ops) is AmxOps
            found = runtime.generate(["Tom:", "Ada, nine years old:"], params)
            again = runtime.generate([f"{r['text']}\n" for r in found], params)
        replies.append([(r["text"], r["output_ids"]) for r in [*found, *again]])
        assert all((r["meta_info"]["forced_tokens"] > 10) is jump for r in found)
    assert replies[0] == replies[1]
