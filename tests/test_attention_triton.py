"""The Triton kernels against the float32 reference: on a GPU, or on a CPU in Triton's interpreter.

Triton decides when it is imported, and when a kernel is defined, whether to interpret. On a machine without
CUDA this module therefore imports a triton of its own with TRITON_INTERPRET set, and takes the variable back:
only its own tests see it. In the interpreter bfloat16 products are wrong (a known limitation), so bfloat16 is
tested on a GPU only.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from minisgl.attention import ForwardBatch, ReferenceAttention
from minisgl.radix import RadixTree
from minisgl.request import Request, Rows
from minisgl.sampling_params import SamplingParams
from minisgl.sharing import Segment, plan_items
from tests.attention_batches import Step, make_step

CUDA = torch.cuda.is_available()
environment = pytest.MonkeyPatch()
if not CUDA:
    environment.setenv("TRITON_INTERPRET", "1")
    for name in list(sys.modules):  # whoever imported triton before (transformers does) has one that compiles
        ours = ("minisgl.attention_triton.", "minisgl.attention_tile.", "minisgl.decode_triton.")
        if (name + ".").startswith(("triton.", *ours)) and "._C" not in name:
            del sys.modules[name]
triton = pytest.importorskip("triton", reason="triton is only there on Linux")
import triton.language as tl  # noqa: E402

from minisgl.attention_triton import MAX_SPLITS, Tiles, TritonAttention, stable_tanh  # noqa: E402


@triton.jit
def softcap_kernel(x_ptr, out_ptr, cap, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out_ptr + index, cap * stable_tanh(tl.load(x_ptr + index) / cap))


environment.undo()


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if not CUDA:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


# Small blocks in the interpreter, so that tiny shapes cover many of them; the real ones on a GPU.
SMALL = Tiles(16, 16, 4, 2, 16, 4, 3, target_programs=8, min_split=16)
TILES = None if CUDA else SMALL
# |error| / |reference|: probabilities and output are rounded to the dtype; float32 differs in order only.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def place(name: str, dtype: torch.dtype, gpu: bool):
    skip = pytest.mark.skipif(CUDA and not gpu, reason="the GPU variant runs instead")
    return pytest.param("cuda" if gpu else "cpu", dtype, id=name, marks=pytest.mark.gpu if gpu else skip)


INTERPRETED = [place("cpu-fp32", torch.float32, False), place("cpu-fp16", torch.float16, False)]
ON_GPU = [place(f"gpu-{n}", d, True) for n, d in (("fp32", torch.float32), ("fp16", torch.float16))]
ON_GPU.append(place("gpu-bf16", torch.bfloat16, True))
everywhere = pytest.mark.parametrize("device, dtype", INTERPRETED + ON_GPU)
gpu_16bit = pytest.mark.parametrize("device, dtype", ON_GPU[1:])

# Decodes of one block, several splits and one token; a continued prompt, a fresh one, a lone last token.
MIXED = [(1, 33), (1, 70), (1, 1), (20, 50), (3, 3), (1, 9)]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, slack: int = 1) -> None:
    """Every token and head is right, not only the average one."""
    error = (got.float() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-2)
    assert error.max() < 4 * slack * TOLERANCE[dtype], f"worst row {error.max():.2e}"
    assert (got.float() - want).norm() / want.norm() < slack * TOLERANCE[dtype]


def check(step: Step, tiles: Tiles | None = TILES, slack: int = 1, **options) -> torch.Tensor:
    """The kernels and the reference agree on the output and on what they leave in the pool."""
    want = step.reference(**options)
    pool_before = step.pool.kv.clone()
    step.run(ReferenceAttention, **options)
    pool_after = step.pool.kv.clone()
    step.pool.kv.copy_(pool_before)
    got = step.run(TritonAttention, 0, tiles, **options)
    assert torch.isfinite(got).all()
    assert torch.equal(step.pool.kv[:, :, 1:].nan_to_num(), pool_after[:, :, 1:].nan_to_num())
    real = step.batch.out_slots != 0  # padding sequences race for the dummy slot
    close(got[real], want[real], got.dtype, slack)
    return got


# ---- the cases that broke other engines ----------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("heads, kv_heads", [(28, 4), (14, 2), (6, 2), (5, 1), (8, 1), (3, 3)])
def test_gqa_group_not_pow2(heads, kv_heads, device, dtype):
    """A group of 7, 5 or 3 query heads must not spill into its neighbour's rows."""
    sequences = MIXED if CUDA else [(1, 20), (1, 3), (3, 11)]
    check(make_step(sequences, heads, kv_heads, 32, dtype=dtype, device=device, decodes=2))


@everywhere
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192])
def test_head_dim_96(head_dim, device, dtype):
    """Head sizes that are no power of two: a padded block, the padding masked."""
    sequences = [(1, 40), (1, 17), (11, 30)]
    check(make_step(sequences, 4, 2, head_dim, dtype=dtype, device=device, decodes=2, poison=True))


@everywhere
def test_softcap_overflow(device, dtype):
    """softcap is tanh, and tanh of a large score is 1, not inf / inf."""
    scores = torch.tensor([4400.0, 5000, 10000, -10000, 1e30, 0, 25, -25], device=device)
    out = torch.empty_like(scores)
    softcap_kernel[(1,)](scores, out, 50.0, N=8)
    torch.testing.assert_close(out, 50 * torch.tanh(scores / 50), rtol=1e-5, atol=1e-4)
    assert out[:4].tolist() == [50, 50, 50, -50]
    step = make_step([(1, 40), (1, 3), (7, 30)], 4, 2, 64, dtype=dtype, device=device, decodes=2)
    # Scores up to tens of thousands: rounding moves those few that stay under the cap.
    check(replace(step, q=step.q * 100), slack=20, scale=100.0, softcap=50.0)
    check(step, softcap=2.0)


class WidePool:
    """A pool of more than 2**31 elements; not zeroed, so that a CPU only touches the pages in use."""

    def __init__(self, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str):
        self.kv = [torch.empty((slots, kv_heads, head_dim), dtype=dtype, device=device) for _ in range(2)]

    def keys(self, layer: int) -> torch.Tensor:
        return self.kv[0]

    def values(self, layer: int) -> torch.Tensor:
        return self.kv[1]


@pytest.mark.parametrize("device, dtype", [INTERPRETED[1], *ON_GPU[1:]])
def test_int32_offset_page(device, dtype):
    """slot * stride beyond 2**31: the last slots of a big pool are written and read, not others."""
    heads, kv_heads, head_dim = 16, 8, 128
    step = make_step([(1, 20), (4, 24)], heads, kv_heads, head_dim, dtype=dtype, device=device, decodes=1)
    want = step.reference()
    small = step.pool.kv
    slots = 2**31 // (kv_heads * head_dim) + small.shape[2]
    shift = slots - small.shape[2]  # each slot moves up; the last one becomes the pool's last
    big = WidePool(slots, kv_heads, head_dim, dtype, device)
    big.kv[0][shift:], big.kv[1][shift:] = small[0, 0], small[0, 1]
    batch = replace(step.batch, out_slots=step.batch.out_slots + shift, table=step.batch.table + shift)
    assert int(batch.out_slots.max()) * kv_heads * head_dim > 2**31
    close(replace(step, pool=big, batch=batch).run(TritonAttention, 0, TILES), want, dtype)
    assert torch.equal(big.keys(0)[batch.out_slots], step.k)
    assert torch.equal(big.values(0)[batch.out_slots], step.v)


@everywhere
@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_fully_masked_block_nan(window, device, dtype):
    """A window smaller than a block leaves rows that see nothing of it: no NaN, and nothing of it later."""
    step = make_step([(1, 90), (1, 6), (70, 99), (9, 9)], 2, 2, 32, dtype=dtype, device=device, decodes=2)
    # 64 or more tokens to a tile: the last of them see nothing of the first blocks that the tile walks over.
    check(step, None if CUDA else replace(SMALL, extend_m=64), window=window)


# ---- batches -------------------------------------------------------------------------------------------


@everywhere
def test_mixed_batch(device, dtype):
    """Decodes, a continued and a fresh prompt in one flat batch; no slot but the sequences' own is read."""
    check(make_step(MIXED, 6, 2, 64, dtype=dtype, device=device, decodes=3, layers=2, poison=True))


@everywhere
def test_window_and_softcap_together(device, dtype):
    check(make_step(MIXED, 6, 2, 32, dtype=dtype, device=device, decodes=3), window=7, softcap=3.0)


@everywhere
@pytest.mark.parametrize("decodes", [0, 1])
def test_only_extends_or_only_decodes(decodes, device, dtype):
    sequences = [(1, 25)] if decodes else [(18, 18), (2, 31)]
    check(make_step(sequences, 4, 1, 64, dtype=dtype, device=device, decodes=decodes))


@everywhere
def test_padding_sequences_change_nothing(device, dtype):
    """CUDA-graph padding (row 0, slot 0, seq_len 1) is finite and leaves the real rows as they are."""
    padded = make_step(
        [(1, 40), (1, 2)], 4, 2, 64, dtype=dtype, device=device, decodes=2, poison=True, dummies=3
    )
    got = check(padded)
    names = ("input_ids", "positions", "out_slots", "seq_lens", "rows")
    batch = replace(padded.batch, **{name: getattr(padded.batch, name)[:2] for name in names}, num_decodes=2)
    batch = replace(batch, q_start=batch.q_start[:3], host=None)
    plain = replace(padded, batch=batch, q=padded.q[:2], k=padded.k[:2], v=padded.v[:2])
    close(got[:2], check(plain).float(), dtype)


@everywhere
def test_prefix_written_in_the_same_step_is_read(device, dtype):
    """Sequences b and c read, through the table, slots that sequence a fills in this very step."""
    step = make_step(
        [(1, 19), (18, 18), (4, 22)], 4, 2, 32, dtype=dtype, device=device, decodes=1, poison=True
    )
    c, a, b = step.batch.rows.tolist()
    step.batch.table[b, :18] = step.batch.table[a, :18]
    step.batch.table[c, :18] = step.batch.table[a, :18]
    check(step)


@everywhere
def test_views_of_one_projection_need_no_copy(device, dtype):
    """q, k and v as slices of the fused projection's output: token stride larger than their width."""
    step = make_step([(1, 20), (6, 17)], 4, 2, 32, dtype=dtype, device=device, decodes=1)
    qkv = torch.cat([step.q, step.k, step.v], 1)
    q, k, v = qkv.split([4, 2, 2], 1)
    assert not q.is_contiguous()
    check(replace(step, q=q, k=k, v=v))
    transposed = step.q.transpose(1, 2).contiguous().transpose(1, 2)  # last dimension strided: copied
    check(replace(step, q=transposed, k=step.k.transpose(0, 1).contiguous().transpose(0, 1)))


@everywhere
@pytest.mark.parametrize("min_split, programs", [(16, 1000), (32, 4), (4096, 1)])
def test_any_split_gives_the_same_answer(min_split, programs, device, dtype):
    """One piece, a few, or one per block; lengths so mixed that some sequences need no second piece."""
    tiles = replace(SMALL, min_split=min_split, target_programs=programs)
    sequences = [(1, 130), (1, 1), (1, 16), (1, 17), (1, 48)]
    check(make_step(sequences, 4, 2, 32, dtype=dtype, device=device, decodes=5), tiles)


@everywhere
@pytest.mark.parametrize("kv_heads, group, head_dim", [(2, 5, 40), (1, 3, 64)])
def test_random_batches(kv_heads, group, head_dim, device, dtype):
    generator = torch.Generator().manual_seed(group)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for seed in range(40 if CUDA else 2):
        longest = draw(2, 700 if CUDA else 50)
        decodes = draw(0, 4)
        lens = [draw(1, longest) for _ in range(decodes + draw(0 if decodes else 1, 4))]
        sequences = [(1 if i < decodes else draw(1, m + 1), m) for i, m in enumerate(lens)]
        step = make_step(
            sequences,
            kv_heads * group,
            kv_heads,
            head_dim,
            dtype=dtype,
            device=device,
            decodes=decodes,
            dummies=draw(0, 3) if decodes else 0,
            seed=seed,
            poison=True,
        )
        check(step, window=draw(1, 60) if seed % 2 else 0)


def test_split_plan_follows_the_lengths():
    """The plan aims at equal pieces, keeps to the minimum and never needs more pieces than the grid has."""
    device = "cuda" if CUDA else "cpu"
    tiles = replace(Tiles(), decode_n=16, min_split=32, target_programs=8)
    for lens in ([1], [31, 1], [400], [400, 400, 3], [40] * 30, [1000] + [5] * 12):
        step = make_step([(1, n) for n in lens], 2, 2, 16, device=device, decodes=len(lens))
        attention = TritonAttention(step.pool, 2, 2, 16, tiles)
        attention.begin(step.batch)
        split_len = int(attention.decode._split_len)
        assert split_len % 16 == 0 and split_len >= 32
        assert triton.cdiv(max(lens), split_len) <= attention.decode._splits <= MAX_SPLITS
        even = max(32, sum(lens) * 2 / 8, max(lens) / attention.decode._splits)
        assert even <= split_len < even + 16


@everywhere
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 32), (9, 3, 16), (2, 2, 80), (8, 1, 64)])
def test_shared_prefixes(heads, kv_heads, head_dim, device, dtype):
    """A tree of prefixes, read once for all members, gives each decode what it gets alone; extends go along."""
    lens = [70, 75, 66, 33, 90, 1]
    sequences = [*((1, n) for n in lens), (3, 20)]
    step = make_step(sequences, heads, kv_heads, head_dim, dtype=dtype, device=device, decodes=6)
    batch, rows = step.batch, step.batch.rows.tolist()
    for other in rows[1:3]:  # decodes 0, 1 and 2 have 40 positions in common; 0 and 1 another 24
        batch.table[other, :40] = batch.table[rows[0], :40]
    batch.table[rows[1], 40:64] = batch.table[rows[0], 40:64]
    batch.table[rows[4], :32] = batch.table[rows[3], :32]
    segments = [Segment(0, 40, [0, 1, 2]), Segment(40, 64, [0, 1]), Segment(0, 32, [3, 4])]
    own_start = np.array([64, 64, 40, 32, 32, 0], np.int32)
    want = step.reference()
    for programs in (1, 40):  # whole segments, and many pieces
        attention = TritonAttention(step.pool, heads, kv_heads, head_dim, TILES)
        sharing = attention.prefix_sharing(6)
        plan = plan_items(
            segments, own_start, width=sharing.width, programs=programs, max_pieces=sharing.max_pieces(6),
            max_items=sharing.max_items,
        )  # fmt: skip
        assert plan is not None
        sharing._upload(plan)
        batch.shared = sharing.tensors
        attention.begin(batch)
        got = attention.forward(0, step.q, step.k, step.v, scale=head_dim**-0.5)
        close(got, want, dtype)


def test_a_plan_lasts_while_the_same_requests_decode(monkeypatch):
    """The device's plan is made when the composition changes, and dropped when sharing no longer pays."""
    device = "cuda" if CUDA else "cpu"
    step = make_step([(1, 4)], 4, 2, 32, device=device, decodes=1)
    sharing = TritonAttention(step.pool, 4, 2, 32, TILES).prefix_sharing(4)
    tree, state = RadixTree(), Rows(4, 400)
    for row in (1, 2, 3):
        tokens = np.array([7] * 200 + [row] if row < 3 else [9] * 20, np.int32)
        request = Request(f"r{row}", tokens, SamplingParams(), 300)
        state.occupy(row, request)
        state.kv_len[row] = len(tokens)
        request.node = tree.insert(tokens, np.arange(row * 300, row * 300 + len(tokens), dtype=np.int32)).node
        tree.lock(request.node)
    rows, made = np.array([1, 2, 3]), []
    make = sharing._make
    monkeypatch.setattr(sharing, "_make", lambda *args: made.append(1) or make(*args))
    for _ in range(3):
        shared = sharing.plan(rows, state.generation[rows], state)
        assert shared is not None and int(shared.count) >= 1
        assert shared.own_start[:3].tolist() == [200, 200, 0]
    assert len(made) == 1
    assert sharing.plan(rows[1:], state.generation[rows[1:]], state) is None
    assert sharing.plan(rows[:1], state.generation[rows[:1]], state) is None
    assert sharing.plan(rows, state.generation[rows], state) is not None


def test_wrong_shapes_and_dtypes_are_refused():
    device = "cuda" if CUDA else "cpu"
    step = make_step([(1, 4)], 4, 2, 32, device=device, decodes=1)
    with pytest.raises(ValueError, match="pool has"):
        TritonAttention(step.pool, 4, 4, 32)
    with pytest.raises(ValueError, match=r"q has dtype torch.float16, the KV pool torch.float32"):
        replace(step, q=step.q.half()).run(TritonAttention)


# ---- sizes and graphs that only a GPU can do -----------------------------------------------------------


@gpu_16bit
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(32, 8, 128), (9, 3, 64), (28, 4, 96)])
def test_long_sequences(heads, kv_heads, head_dim, device, dtype):
    """Real tiles, many blocks: lengths around block and split boundaries."""
    sequences = [(1, 5000), (1, 4096), (1, 129), (1, 128), (2048, 2048), (127, 1151), (1000, 3001)]
    step = make_step(sequences, heads, kv_heads, head_dim, dtype=dtype, device=device, decodes=4, poison=True)
    check(step)
    check(step, window=300)


@gpu_16bit
@pytest.mark.parametrize("context", [32 * 1024, 128 * 1024])
def test_long_context(context, device, dtype):
    sequences = [(1, context), (200, context - 3)]
    check(make_step(sequences, 8, 2, 128, dtype=dtype, device=device, decodes=1))


@gpu_16bit
def test_many_decodes(device, dtype):
    """A full batch, lengths from 1 to thousands: most programs of the grid have nothing to do."""
    lens = [1 + (i * 7919) % 3000 for i in range(256)]
    check(make_step([(1, n) for n in lens], 32, 8, 128, dtype=dtype, device=device, decodes=256))


@gpu_16bit
def test_captured_step_follows_new_lengths(device, dtype):
    """A captured decode step, replayed for other lengths, rows and slots, gives what the eager step gives."""

    def make(lens: list[int], dummies: int) -> Step:
        sequences = [(1, n) for n in lens]
        return make_step(
            sequences,
            8,
            2,
            128,
            dtype=dtype,
            device=device,
            decodes=len(lens),
            dummies=dummies,
            seed=len(lens),
        )

    steps = [make([3, 700, 40], 1), make([5000, 1, 77, 2048], 0), make([12, 9], 2)]
    capacity = max(step.pool.kv.shape[2] for step in steps)
    context = max(step.batch.table.shape[1] for step in steps)
    pool = make([capacity], 0).pool
    static = captured_inputs(steps[0], context)
    attention = TritonAttention(pool, 8, 2, 128)

    def forward() -> torch.Tensor:
        attention.begin(static.batch)
        return attention.forward(0, static.q, static.k, static.v, scale=128**-0.5)

    forward()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    for step in steps:
        want = step.reference()
        pool.kv[:, :, : step.pool.kv.shape[2]] = step.pool.kv
        for name in ("q", "k", "v"):
            getattr(static, name).copy_(getattr(step, name))
        for name in ("seq_lens", "rows", "out_slots"):
            getattr(static.batch, name).copy_(getattr(step.batch, name))
        static.batch.table[: step.batch.table.shape[0], : step.batch.table.shape[1]] = step.batch.table
        out.fill_(float("nan"))
        graph.replay()
        real = step.batch.out_slots != 0
        close(out[real], want[real], dtype)


def captured_inputs(step: Step, context: int) -> Step:
    """Buffers of `step`'s shapes that a graph can be captured on: the host knows upper bounds only."""
    batch: ForwardBatch = replace(
        step.batch,
        out_slots=step.batch.out_slots.clone(),
        seq_lens=step.batch.seq_lens.clone(),
        rows=step.batch.rows.clone(),
        table=torch.zeros((8, context), dtype=torch.int32, device=step.q.device),
        max_seq_len=context,
        host=None,
    )
    return replace(step, batch=batch, q=step.q.clone(), k=step.k.clone(), v=step.v.clone())
