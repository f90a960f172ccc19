"""Matrix products of decode steps on a GPU: tiles that fill the multiprocessors in whole waves.

A product out (T, N) = x (T, K) @ weight (N, K).T is computed in tiles, each by one multiprocessor, which walks over all
of K.  As many tiles as there are multiprocessors make a wave, and the last wave takes as long as a full one:

    N = 28,672 and T = 256 on 132 multiprocessors
    tiles of 128 x 128    224 x 2 = 448 tiles = 3.39 waves   |####|####|####|##  |    4 x 128 = 512 columns of time
    tiles of 224 x 128    128 x 2 = 256 tiles = 1.94 waves   |#######|######|         2 x 224 = 448

cuBLAS picks a tile by a rule for all shapes.  A model has five shapes and an engine records a few dozen batch sizes,
so we can afford to try: arithmetic gives a short list (`shortlist`), and what is on it is timed on the model's own
weights.  On an H200 that takes 6 to 13 % off the products of an 8B model's decode steps (`benchmarks/products.py`).

Every choice here sums over K in one piece and in order, so that they all give the same bits, whichever wins.  Not so
cuBLAS's own choice, which cuts K in pieces where there are few tiles; that is kept where it is faster.

The kernels are cuBLASLt's, the library that torch has loaded already, called through its C interface: torch has no way
to name a tile.  Its documentation: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.nn.functional as F

FEWEST_ROWS, MOST_ROWS = 48, 256  # below, cuBLAS is as good; above, waves are many and the last one matters little
SMALLEST_WEIGHT = 8 << 20  # bytes: products with less take as long as their launch
WORTH = 0.98  # of cuBLAS's time: what a choice must reach to be kept
LISTED = 6  # tiles of the short list

# ---- which tiles are worth trying ------------------------------------------------------------------------------------

FLOPS, BANDWIDTH = 788e12, 4.3e12  # of an H200, measured: only the ratio of the two matters here
EDGE = 24  # a tile of r x c computes like one of r c + EDGE (r + c): loading its edges is not free

# (columns of the weight, rows of x) -> the number that cublasLt.h has for the tile, in cublasLtMatmulTile_t.
# Of those with a side of 64, 128 or 192, which Hopper's tensor cores want.
_TALL = {
    48: 92, 56: 104, 72: 124, 80: 134, 88: 143, 104: 157, 112: 164, 120: 170, 136: 178, 144: 183, 152: 188, 168: 196,
    176: 200, 184: 204, 200: 211, 208: 214, 216: 217, 224: 220, 232: 223, 240: 226, 248: 229,
}  # fmt: skip
TILES = {
    **{(r, c): number + i for r, number in _TALL.items() for i, c in enumerate((64, 128, 192))},
    (64, 32): 13, (64, 48): 315, (64, 64): 15, (64, 80): 318, (64, 96): 26, (64, 112): 321, (64, 128): 17,
    (64, 160): 326, (64, 192): 116, (64, 256): 19,
    (96, 64): 27, (96, 128): 28, (96, 192): 151,
    (128, 32): 16, (128, 48): 397, (128, 64): 18, (128, 80): 400, (128, 96): 33, (128, 112): 403, (128, 128): 20,
    (128, 160): 29, (128, 192): 32, (128, 224): 414, (128, 256): 23,
    (160, 64): 193, (160, 128): 30, (160, 192): 194,
    (192, 64): 208, (192, 128): 31, (192, 192): 209,
    (256, 64): 21, (256, 128): 24,
}  # fmt: skip
CLUSTERS = (2, 3, 4, 5)  # cublasLtClusterShape_t: 1x1, 2x1, 4x1, 1x2 multiprocessors that read common operands once
# How a tile's kernel divides its work among warps is not documented.  Odd numbers do it in another way than even ones,
# the rest makes no difference that could be measured; each tile has some of both.
OPTIONS = (range(0, 8, 2), range(1, 8, 2))


def waves(rows: int, columns: int, tile: tuple[int, int], processors: int) -> tuple[int, int]:
    """(waves, tiles side by side that read the same columns of the weight)."""
    across = -(-rows // tile[1])
    return -(-across * -(-columns // tile[0]) // processors), across


def cost(rows: int, columns: int, tile: tuple[int, int], processors: int) -> float:
    """Estimated seconds per element of K of a product with `rows` of x and `columns` of the weight."""
    r, c = tile
    count, across = waves(rows, columns, tile, processors)
    compute = 2 * (r * c + EDGE * (r + c)) / (FLOPS / processors)
    # the weight comes from memory once for all tiles side by side, x mostly from cache
    read = 2 * (r / across + c / 3) / (BANDWIDTH / processors)
    return count * max(compute, read)


def shortlist(rows: int, columns: int, processors: int, length: int = LISTED) -> list[tuple[int, int]]:
    """The tiles of least cost.  Of those that differ neither in waves nor in tiles side by side the smallest will do,
    and the smallest whose columns the tensor cores take without padding."""
    smallest: dict[tuple[int, int, bool], tuple[int, int]] = {}
    for tile in sorted(TILES, key=lambda tile: tile[0] * tile[1]):
        smallest.setdefault((*waves(rows, columns, tile, processors), tile[0] % 64 == 0), tile)
    return sorted(smallest.values(), key=lambda tile: cost(rows, columns, tile, processors))[:length]


# ---- cuBLASLt --------------------------------------------------------------------------------------------------------


class Unavailable(Exception):
    """cuBLASLt cannot be used here, with the reason."""


class _Algorithm(ctypes.Structure):
    _fields_ = [("opaque", ctypes.c_uint64 * 8)]


class _Checked(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", _Algorithm), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


# enumerators of cublasLt.h and library_types.h
_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType
_FLOAT32, _COMPUTE_FLOAT32, _TRANSPOSED = 0, 68, 1
_DESCRIPTOR_TRANSPOSE_A = 3
_TILE, _SPLITS, _REDUCTION, _OPTION, _STAGES, _CLUSTER = 1, 2, 3, 5, 6, 8  # cublasLtMatmulAlgoConfigAttributes_t
_HOPPER, _STAGES_AUTO = 66, 35  # the algorithm on wgmma and TMA, and the only number of stages that it has


class Library:
    """The few functions of cuBLASLt that a product needs.

    Raises Unavailable if the library is missing or does not know the algorithm (a GPU other than Hopper).
    """

    def __init__(self, device: torch.device):
        if torch.cuda.get_device_capability(device) != (9, 0):
            raise Unavailable("the tiles are those of Hopper GPUs (compute capability 9.0)")
        version = (torch.version.cuda or "").split(".")[0]
        try:
            self._lib = ctypes.CDLL(f"libcublasLt.so.{version}")  # by name: finds the one that torch has loaded
        except OSError as error:
            raise Unavailable(str(error)) from None
        self.device = device
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            self.call("Create", byref(self._handle))

    def call(self, name: str, *args: object) -> None:
        """cublasLt<name>(*args).  Raises Unavailable if it refuses."""
        status = getattr(self._lib, f"cublasLt{name}")(*args)
        if status:
            raise Unavailable(f"cublasLt{name} returned status {status}")

    def layout(self, rows: int, columns: int, dtype: torch.dtype) -> ctypes.c_void_p:
        """Of a dense matrix in columns, as cuBLAS has it: that is (columns, rows) in torch's order."""
        layout = ctypes.c_void_p()
        self.call(
            "MatrixLayoutCreate", byref(layout), _TYPES[dtype], ctypes.c_uint64(rows), ctypes.c_uint64(columns),
            ctypes.c_int64(rows),
        )  # fmt: skip
        return layout


_library = cache(Library)  # one handle for each device, however many engines come and go


@dataclass(eq=False)
class Product:
    """x (rows, K) @ weight (columns, K).T for these sizes, as cuBLASLt describes it.

    cuBLAS counts in columns, so to it this is weight^T (columns, K) @ x (K, rows) = out (columns, rows).
    """

    library: Library
    rows: int
    columns: int
    inner: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        lib = self.library
        self._descriptor = ctypes.c_void_p()
        lib.call("MatmulDescCreate", byref(self._descriptor), _COMPUTE_FLOAT32, _FLOAT32)
        transposed = ctypes.c_int32(_TRANSPOSED)
        size = ctypes.c_size_t(ctypes.sizeof(transposed))
        lib.call("MatmulDescSetAttribute", self._descriptor, _DESCRIPTOR_TRANSPOSE_A, byref(transposed), size)
        self._weight = lib.layout(self.inner, self.columns, self.dtype)
        self._x = lib.layout(self.inner, self.rows, self.dtype)
        self._out = lib.layout(self.columns, self.rows, self.dtype)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        layouts = (self._weight, self._x, self._out)
        weakref.finalize(self, _destroy, lib, self._descriptor, layouts).atexit = False

    def algorithms(
        self, tile: tuple[int, int], options: Iterable[int], clusters: Iterable[int]
    ) -> Iterator[_Algorithm]:
        """Those with this tile that the library accepts for these sizes without a workspace."""
        lib, kind = self.library, _TYPES[self.dtype]
        for option in options:
            for cluster in clusters:
                algorithm, checked = _Algorithm(), _Checked()
                try:
                    lib.call(
                        "MatmulAlgoInit", lib._handle, _COMPUTE_FLOAT32, _FLOAT32, kind, kind, kind, kind, _HOPPER,
                        byref(algorithm),
                    )  # fmt: skip
                    for attribute, value in (
                        (_TILE, ctypes.c_uint32(TILES[tile])), (_STAGES, ctypes.c_uint32(_STAGES_AUTO)),
                        (_OPTION, ctypes.c_uint32(option)), (_CLUSTER, ctypes.c_uint16(cluster)),
                        (_SPLITS, ctypes.c_int32(1)), (_REDUCTION, ctypes.c_uint32(0)),
                    ):  # fmt: skip
                        lib.call(
                            "MatmulAlgoConfigSetAttribute", byref(algorithm), attribute, byref(value),
                            ctypes.c_size_t(ctypes.sizeof(value)),
                        )  # fmt: skip
                    lib.call(
                        "MatmulAlgoCheck", lib._handle, self._descriptor, self._weight, self._x, self._out, self._out,
                        byref(algorithm), byref(checked),
                    )  # fmt: skip
                except Unavailable:
                    continue
                if checked.workspace == 0:
                    yield algorithm

    def run(self, x: torch.Tensor, weight: torch.Tensor, algorithm: _Algorithm) -> torch.Tensor:
        """Queue it on the current stream: x (rows, K), weight (columns, K), both contiguous -> (rows, columns)."""
        out = torch.empty((self.rows, self.columns), dtype=self.dtype, device=x.device)
        pointer, lib = ctypes.c_void_p, self.library
        lib.call(
            "Matmul", lib._handle, self._descriptor, byref(self._one), pointer(weight.data_ptr()), self._weight,
            pointer(x.data_ptr()), self._x, byref(self._zero), pointer(out.data_ptr()), self._out,
            pointer(out.data_ptr()), self._out, byref(algorithm), None, ctypes.c_size_t(0),
            pointer(torch.cuda.current_stream(x.device).cuda_stream),
        )  # fmt: skip
        return out


def _destroy(lib: Library, descriptor: ctypes.c_void_p, layouts: Iterable[ctypes.c_void_p]) -> None:
    lib.call("MatmulDescDestroy", descriptor)
    for layout in layouts:
        lib.call("MatrixLayoutDestroy", layout)


# ---- choosing --------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Times launches on the device, not on the host: the device sleeps until they are all queued."""

    SLEEP = 200_000  # cycles, 0.1 ms: longer than it takes to queue LAUNCHES products
    LAUNCHES = 6

    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._next = 0

    def __call__(self, product: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> float:
        """Milliseconds of LAUNCHES products, each with the next of the weights, so that none is in cache."""
        begin, end = self._events
        product(weights[self._next % len(weights)])  # loads the kernel
        torch.cuda._sleep(self.SLEEP)
        begin.record()
        for i in range(self.LAUNCHES):
            product(weights[(self._next + i) % len(weights)])
        end.record()
        self._next += self.LAUNCHES
        end.synchronize()
        return begin.elapsed_time(end)


@dataclass
class Choice:
    """What `Products.choose` found for a number of rows and a shape of weight (columns, K): milliseconds of each."""

    rows: int
    shape: tuple[int, int]
    library: float
    ours: float
    tile: tuple[int, int] | None  # None: the library's own choice is kept


@dataclass
class Products:
    """The products of one device that were chosen here; all others are torch's.

    Raises Unavailable where there is nothing to choose from.
    """

    device: torch.device
    choices: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._library = _library(self.device)
        self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._chosen: dict[tuple[int, int, int, torch.dtype], tuple[Product, _Algorithm]] = {}
        self._stopwatch = Stopwatch()

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x (T, K) @ weight (N, K).T -> (T, N)."""
        columns, inner = weight.shape
        chosen = self._chosen.get((len(x), columns, inner, weight.dtype))
        if chosen is None or not x.is_contiguous() or not weight.is_contiguous():
            return F.linear(x, weight)
        product, algorithm = chosen
        return product.run(x, weight, algorithm)

    def choose(self, weights: Sequence[torch.Tensor], rows: int) -> None:
        """Find the fastest product of `rows` rows with weights of one shape, such as those of all layers.

        Takes some 20 ms.  Does nothing where nothing can be gained.
        """
        weight = weights[0]
        columns, inner = weight.shape
        small = weight.numel() * weight.itemsize < SMALLEST_WEIGHT
        if weight.dtype not in _TYPES or small or inner % 8 or not FEWEST_ROWS <= rows <= MOST_ROWS:
            return
        product = Product(self._library, rows, columns, inner, weight.dtype)
        x = torch.randn((rows, inner), dtype=weight.dtype, device=self.device)

        def timed(algorithm: _Algorithm) -> float:
            return self._stopwatch(partial(product.run, x, algorithm=algorithm), weights)

        found = []
        for tile in shortlist(rows, columns, self._processors):
            for options in OPTIONS:  # the first that the library accepts
                for algorithm in itertools.islice(product.algorithms(tile, options, CLUSTERS[:1]), 1):
                    found.append((timed(algorithm), tile, options, algorithm))
        found.sort(key=lambda entry: entry[0])
        for _, tile, options, _ in found[:2]:
            for cluster in CLUSTERS[1:]:
                for algorithm in itertools.islice(product.algorithms(tile, options, [cluster]), 1):
                    found.append((timed(algorithm), tile, options, algorithm))
        if not found:
            return
        _, tile, _, algorithm = min(found, key=lambda entry: entry[0])
        turns = [(self._stopwatch(partial(F.linear, x), weights), timed(algorithm)) for _ in range(3)]
        theirs, ours = (min(times) / self._stopwatch.LAUNCHES for times in zip(*turns))
        kept = ours < WORTH * theirs
        if kept:
            self._chosen[rows, columns, inner, weight.dtype] = product, algorithm
        self.choices.append(Choice(rows, (columns, inner), theirs, ours, tile if kept else None))
