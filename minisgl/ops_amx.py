"""Steps in one call, on CPUs with AMX: `decode_amx.c`, compiled on first use.

A decode step reads every weight once and computes little with it, so the memory's speed bounds it.  In torch it takes
several times as long, most of it between the products.  The C file does the step whole; this module finds a compiler,
keeps what it made in the cache (`load`), and hands over pointers (`AmxOps`):

    Llama.forward --> AmxOps.step    attention is the paged one on a CPU      -> decode_amx.c
                          |
                          '--------> None: the step is computed in torch, block by block (`PackedOps`)

Both read the same packed weights and the same pool.  Results differ by rounding: the C step keeps in float32 what
torch's separate operations round to bfloat16 in between.

Weights that came from a quantised file are found again in 4 or 8 bits (decode_amx_weights.h): the same numbers to the
last bit, beside the packed ones, which products of many rows still use.  270 MB to read per step become 107 for the
default model, for 107 MB more memory.

Needs Linux on x86-64, a C compiler (CC, or cc, gcc, clang on the path; only the first time) and bfloat16; where any of
it is missing, `load` says what and the model runs in torch alone.  attention_backend="torch" asks for that.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from ctypes import c_double, c_int, c_int64, c_void_p
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from .attention import Attention, ForwardBatch
from .attention_cpu import CpuAttention
from .cache import cached_folder
from .config import LlamaConfig, ModelError
from .ops_cpu import PackedOps

if TYPE_CHECKING:
    from .model_llama import Llama

SOURCE = Path(__file__).with_name("decode_amx.c")  # which includes decode_amx_*.h
KEPT_DAYS = 30  # libraries of other versions, since their last use
FLAGS = "-O3 -std=gnu11 -shared -fPIC -mfma -mavx512f -mavx512bw -mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16"
CPU_FLAGS = {"fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16"}
HEAD_DIMS = (32, 64, 96, 128)
BLOCK = 32  # inputs and outputs of a packed weight's block; `COLUMNS` in the C file
MAX_LAYERS = 512


class Unavailable(RuntimeError):
    """Why steps are computed in torch, in one line."""


# ---- the library -----------------------------------------------------------------------------------------------------


@functools.cache
def load(cpuinfo: Path = Path("/proc/cpuinfo")) -> ctypes.CDLL:
    """The compiled library, made first if the cache does not hold it (4 s).  Raises Unavailable."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unavailable("the compiled step is for Linux on x86-64")
    try:
        lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
        if missing := CPU_FLAGS - set(next(lines, "").split()):
            raise Unavailable(f"this CPU has no {min(missing)}")
        sources = sorted(SOURCE.parent.glob("decode_amx*.[ch]"))
        key = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + FLAGS.encode()).hexdigest()[:16]
        folder = cached_folder(f"decode-amx-{key}", _compile)
        _check_owner(folder)
        library = ctypes.CDLL(str(folder / "decode.so"))
        _remove_old(folder)
    except (ModelError, OSError, RuntimeError) as error:  # no /proc, home or cache; no compiler or OpenMP that fits
        raise Unavailable(str(error)) from error
    library.work_bytes.restype = c_int64
    library.work_bytes.argtypes = [c_void_p, c_int64, c_int64, c_int64]
    library.compute_step.argtypes = [c_void_p, c_void_p]
    library.project.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64]
    library.project.restype = None
    library.small_bytes.restype = library.project_bytes.restype = c_int64
    library.project_bytes.argtypes = [c_int64, c_int64, c_int64]
    library.small_bytes.argtypes = [c_int64, c_int64]
    library.find.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int64]
    library.allowed.restype = library.compute_step.restype = c_int
    if not library.allowed():
        raise Unavailable("the kernel does not let this process use AMX")
    return library


def _compile(folder: Path) -> None:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable("there is no C compiler (CC, cc, gcc or clang)")
    library = folder / "decode.so"
    command = [compiler, *FLAGS.split(), str(SOURCE), "-o", str(library), "-lm"]
    pipes: Any = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    try:
        done = subprocess.run(command, timeout=120, **pipes)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{compiler} did not compile {SOURCE.name}: {error}") from error
    if done.returncode:
        line = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
        raise Unavailable(f"{compiler} did not compile {SOURCE.name}: {line}")
    if not library.is_file() or library.read_bytes()[:4] != b"\x7fELF":  # which the cache would keep
        raise Unavailable(f"{compiler} did not make a library of {SOURCE.name}")
    library.chmod(0o700)
    folder.chmod(0o700)


def _check_owner(folder: Path) -> None:
    """Raises Unavailable if someone else could have put the library there: loading it runs what is in it."""
    for path in (folder / "decode.so", folder):
        about = path.lstat()
        if about.st_uid not in (os.getuid(), 0) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Unavailable(f"{path} belongs to someone else or can be written by others: remove it")
    mode = folder.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # where the folder could be exchanged for another
        raise Unavailable(f"everybody can write to the cache {folder.parent}: set MINISGL_CACHE to one of your own")


def _remove_old(used: Path) -> None:
    """Note that this library is used; remove those of other versions that have not been for KEPT_DAYS."""
    try:
        os.utime(used)
        for folder in used.parent.glob("decode-amx-*[!k]"):  # not the .lock files
            if folder != used and time.time() - folder.stat().st_mtime > KEPT_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)
                folder.with_name(folder.name + ".lock").unlink(missing_ok=True)
    except OSError:  # a cache that can only be read, or another process is cleaning up
        pass


def check(config: LlamaConfig, dtype: torch.dtype) -> None:
    """Raises Unavailable if the C file has not what this model needs."""
    c = config
    if dtype != torch.bfloat16:
        raise Unavailable("the compiled step is for bfloat16")
    if c.head_dim not in HEAD_DIMS:
        raise Unavailable(f"head_dim {c.head_dim} is none of {HEAD_DIMS}")
    widths = c.hidden_size, c.intermediate_size
    if any(width % BLOCK for width in widths):
        raise Unavailable(f"hidden and intermediate size {widths} are not both multiples of {BLOCK}")
    if c.num_layers > MAX_LAYERS:
        raise Unavailable(f"the model has more than {MAX_LAYERS} layers")
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("data_ptr", "_nbytes")):
        raise Unavailable("this torch does not tell where oneDNN keeps a weight")


# ---- the structures of the C file ------------------------------------------------------------------------------------


class _Matrix(ctypes.Structure):
    _fields_ = [("blocks", c_void_p), ("small", c_void_p), ("bits", c_int64)]


def _structure(name: str, **fields: str) -> type[ctypes.Structure]:
    """fields: type -> names, in order."""
    kinds = {"pointer": c_void_p, "integer": c_int64, "number": c_double, "matrix": _Matrix}
    pairs = [(field, kinds[kind.split("_")[0]]) for kind, names in fields.items() for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


_Layer = _structure(
    "_Layer",
    matrix="qkv o gate up down",
    pointer="input_norm post_norm qkv_bias o_bias gate_bias up_bias down_bias qk_norm",
    integer="window",
)
_Model = _structure(
    "_Model",
    integer="layers vocabulary hidden heads kv_heads dim intermediate",
    number="eps",
    pointer="embed final_norm layer",
)
_Step = _structure(
    "_Step",
    integer="n sequences",
    pointer="ids positions slots starts lengths rows table",
    integer_2="table_stride longest",
    pointer_2="rope kv",
    integer_3="slots_in_pool",
    pointer_3="out work",
    integer_4="threads",
)


def _pointer(tensor: torch.Tensor | None, dtype: torch.dtype = torch.bfloat16) -> int | None:
    """The address of a contiguous tensor; the C file trusts what it gets."""
    if tensor is None:
        return None
    if tensor.layout == torch._mkldnn:  # pyright: ignore[reportAttributeAccessIssue]
        return torch.ops.mkldnn.data_ptr(tensor)
    assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.data_ptr()


def in_blocks(weight: torch.Tensor, packed: torch.Tensor) -> bool:
    """Whether oneDNN has laid `weight` (out, in) out as the C file reads it.

    (out / 32, in / 32, 16, 32, 2): for 32 outputs and 32 inputs, the 16 pairs of inputs one after another, in each the
    outputs, in each the two inputs.  That is how AMX wants its right operand, so with AMX oneDNN has it so.
    """
    outputs, inputs = weight.shape
    if outputs % BLOCK or inputs % BLOCK or weight.min() == weight.max():  # all the same: it looks so in any layout
        return False
    expected = weight.view(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK // 2, 2).permute(0, 2, 3, 1, 4).contiguous()
    if torch.ops.mkldnn._nbytes(packed) != expected.nbytes:
        return False
    memory = (ctypes.c_char * expected.nbytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.equal(torch.frombuffer(memory, dtype=torch.int16), expected.view(torch.int16).flatten())


class AmxOps(PackedOps):
    """`PackedOps` whose steps are one call; see the module.  For one model."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._in_blocks: dict[torch.Size, bool] = {}  # by a weight's shape
        self._matrices: dict[int, tuple[_Matrix, torch.Tensor]] = {}  # by a packed weight's address: of those in blocks
        self._model: tuple[Any, ...] | None = None  # the C file's structures; empty: a weight is not in blocks
        self._work = torch.empty(0, dtype=torch.uint8)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        packed = super().pack(weight)
        if weight.shape not in self._in_blocks:
            self._in_blocks[weight.shape] = in_blocks(weight, packed)
        if self._in_blocks[weight.shape]:
            at = torch.ops.mkldnn.data_ptr(packed)
            self._matrices[at] = self._small(at, weight.numel())
        return packed

    def _small(self, at: int, weights: int) -> tuple[_Matrix, torch.Tensor]:
        """A packed weight for the C file, in as few bits as it can be had, and their memory."""
        for bits in (4, 8):
            small = torch.empty(self._library.small_bytes(weights, bits), dtype=torch.uint8)
            if self._library.find(at, weights, bits, small.data_ptr(), torch.get_num_threads()):
                return _Matrix(at, small.data_ptr(), bits), small
        return _Matrix(at, None, 16), torch.empty(0)

    def step(self, model: Llama, batch: ForwardBatch, attn: Attention) -> torch.Tensor | None:
        if not isinstance(attn, CpuAttention):
            return None
        if self._model is None:
            self._model = self._describe(model)
        if not self._model:
            return None
        described = ctypes.addressof(self._model[0])
        n, longest, threads = int(batch.host_layout().q_start[-1]), batch.max_seq_len, torch.get_num_threads()
        work = self._room(self._library.work_bytes(described, n, longest, threads))
        out = torch.empty((batch.num_tokens, model.config.hidden_size), dtype=torch.bfloat16)
        out[n:] = 0  # padding
        rope, kv = model.rope.rows(longest), attn.pool.kv
        ids, positions, slots = (_pointer(x, torch.int64) for x in (batch.input_ids, batch.positions, batch.out_slots))
        of_sequences = batch.q_start, batch.seq_lens, batch.rows, batch.table
        starts, lengths, rows, table = (_pointer(x, torch.int32) for x in of_sequences)
        step = _Step(
            n, batch.num_seqs, ids, positions, slots, starts, lengths, rows, table,
            batch.table.stride(0), longest, _pointer(rope, torch.float32), _pointer(kv), kv.shape[2], _pointer(out),
            work, threads,
        )  # fmt: skip
        status = self._library.compute_step(described, ctypes.addressof(step))
        if status == -1:
            raise IndexError(f"a token id is not in the vocabulary: {batch.input_ids.tolist()}")
        if status == -3:
            raise IndexError(f"a slot is not in the pool or a length not in the table: {batch.out_slots.tolist()}")
        if status:
            raise IndexError(f"a length or position is not within max_seq_len={longest}: {batch.seq_lens.tolist()}")
        return out

    def _room(self, size: int) -> int:
        """The address of a workspace of so many bytes, aligned to cache lines."""
        if len(self._work) < size:
            self._work = torch.empty(size, dtype=torch.uint8)
        return self._work.data_ptr()

    def _matrix(self, packed: torch.Tensor) -> _Matrix:
        return self._matrices[torch.ops.mkldnn.data_ptr(packed)][0]

    def _describe(self, model: Llama) -> tuple[Any, ...]:
        """The C file's description of a model, and what must live as long; empty if it can't be used."""
        c = model.config
        layers = (_Layer * c.num_layers)()
        keep: list[Any] = []
        for target, layer in zip(layers, model.layers):
            gate: Any = layer.gate_up[0]
            up: Any = layer.gate_up[1]
            if not all(self._in_blocks[weight.shape] for weight in (layer.qkv, layer.o, gate, up, layer.down)):
                reason = "this oneDNN keeps the weights in another layout"
                logging.getLogger("minisgl").info("steps are computed in torch: %s", reason)
                return ()
            gate, up = self._matrix(gate), self._matrix(up)
            if (gate.bits == 16) != (up.bits == 16):  # they are multiplied with the same x, in one of its two layouts
                gate, up = (_Matrix(each.blocks, None, 16) for each in (gate, up))
            gate_bias, up_bias = (None, None) if layer.gate_up_bias is None else layer.gate_up_bias.chunk(2)
            keep.append((gate_bias, up_bias))
            products = (self._matrix(layer.qkv), self._matrix(layer.o), gate, up, self._matrix(layer.down))
            others = (
                layer.input_norm, layer.post_norm,
                layer.qkv_bias, layer.o_bias, gate_bias, up_bias, layer.down_bias, layer.qk_norm,
            )  # fmt: skip
            values = chain(products, map(_pointer, others), [layer.window])
            for field, value in zip(_Layer._fields_, values, strict=True):
                setattr(target, field[0], value)
        described = _Model(
            c.num_layers, c.vocab_size, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size,
            c.rms_norm_eps, _pointer(model.embed), _pointer(model.final_norm), ctypes.addressof(layers),
        )  # fmt: skip
        return described, layers, keep

    def logits(self, hidden: torch.Tensor, weight: Any) -> torch.Tensor:
        if not self._in_blocks[weight.shape]:
            return self.linear(hidden, weight)
        n, k = hidden.shape
        x = F.pad(hidden, (0, 0, 0, -n % 16)).contiguous()
        out = torch.empty((n, weight.shape[0]), dtype=torch.float32)
        threads, outputs = torch.get_num_threads(), weight.shape[0]
        work, matrix = self._room(self._library.project_bytes(n, k, threads)), ctypes.addressof(self._matrix(weight))
        to = _pointer(out, torch.float32)
        self._library.project(_pointer(x), n, k, matrix, outputs, work, to, threads)
        return out
