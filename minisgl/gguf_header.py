"""Does a GGUF file's header tell the truth? Read before anything trusts it.

    "GGUF" | version | tensor count | metadata count | metadata ... | tensor infos ... | padding | data ...

Every count and length in it comes from whoever made the file. A reader that believes them loops for 2^60 elements of an
array that ends with the file, or multiplies dimensions until they wrap around to something small. So this walks the
header once: each thing lies inside the file, counts are no larger than what is there could hold, tensors have as many
bytes as their shape takes, inside the data, and none lies upon another. What it lets pass may still be senseless, but
reading it ends, and takes memory in proportion to the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of scalars, by type number
_STRING, _ARRAY = 8, 9
_UINT32 = 4
MAX_ELEMENTS = 4_000_000  # of all arrays: the reader makes an object of each; a vocabulary of 256k has 1.5 million
MAX_DIMS = 4  # GGML's


class HeaderError(ValueError):
    """The header is wrong; the message says where."""


def check(path: Path) -> None:
    """Raises HeaderError, and OSError for a file that can't be read."""
    with open(path, "rb") as file:
        if path.stat().st_size < 24:
            raise HeaderError("it is too short")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).walk()


class _Header:
    def __init__(self, data: mmap.mmap):
        self.data, self.at, self.elements = data, 4, 0
        self.order = "little"
        if data[:4] != b"GGUF":
            raise HeaderError("it doesn't begin with GGUF")
        if data[4:6] == b"\0\0":  # a version of 0 modulo 65536: written the other way round
            self.order = "big"

    def walk(self) -> None:
        version = self.number(4)
        if version not in (2, 3):
            raise HeaderError(f"version {version} isn't known")
        tensors, fields = self.number(8), self.number(8)
        self.fits(tensors, 24, "tensor count")
        self.fits(fields, 13, "metadata count")
        alignment = 32
        for _ in range(fields):
            name = self.text()
            kind, start = self.number(4), self.at + 4
            self.value(kind)
            if name == b"general.alignment" and kind == _UINT32:
                alignment = int.from_bytes(self.data[start - 4 : start], self.order)  # pyright: ignore
        if alignment < 1 or alignment & (alignment - 1):
            raise HeaderError(f"alignment {alignment} is no power of two")
        spans = sorted(self.tensor() for _ in range(tensors))
        begin = -(-self.at // alignment) * alignment
        end = 0
        for offset, size, name in spans:
            if begin + offset + size > len(self.data):
                raise HeaderError(f"tensor {name} ends beyond the file")
            if offset < end:
                raise HeaderError(f"tensor {name} lies upon another")
            end = offset + size

    # ---- pieces

    def number(self, size: int) -> int:
        if self.at + size > len(self.data):
            raise HeaderError("it ends inside its header")
        found = int.from_bytes(self.data[self.at : self.at + size], self.order)  # pyright: ignore
        self.at += size
        return found

    def fits(self, count: int, size: int, what: str) -> None:
        """`count` things of at least `size` bytes each can still come."""
        if count * size > len(self.data) - self.at:
            raise HeaderError(f"{what} {count} is more than the file holds")

    def text(self) -> bytes:
        length = self.number(8)
        self.fits(length, 1, "a length of")
        self.at += length
        return self.data[self.at - length : self.at]

    def value(self, kind: int) -> None:
        if kind == _STRING:
            self.text()
        elif kind == _ARRAY:
            self.array()
        elif kind in _SIZES:
            self.number(_SIZES[kind])
        else:
            raise HeaderError(f"a value has the unknown type {kind}")

    def array(self) -> None:
        kind, count = self.number(4), self.number(8)
        if kind not in _SIZES and kind != _STRING:
            raise HeaderError(f"an array has elements of type {kind}")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise HeaderError(f"its arrays have more than {MAX_ELEMENTS} elements")
        if kind == _STRING:
            self.fits(count, 8, "an array length of")
            for _ in range(count):
                self.text()
        else:
            self.fits(count, _SIZES[kind], "an array length of")
            self.at += count * _SIZES[kind]

    def tensor(self) -> tuple[int, int, str]:
        """(offset into the data, bytes, name)."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.text().decode("utf-8", "backslashreplace")
        count = self.number(4)
        if not 1 <= count <= MAX_DIMS:
            raise HeaderError(f"tensor {name} has {count} dimensions")
        shape = [self.number(8) for _ in range(count)]
        kind, offset = self.number(4), self.number(8)
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise HeaderError(f"tensor {name} has the unknown type {kind}") from None
        if not all(shape) or shape[0] % block:
            raise HeaderError(f"tensor {name} has the shape {shape}, which its type can't have")
        return offset, math.prod(shape) // block * size, name
