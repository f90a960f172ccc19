"""How much work a JSON body makes, seen before it is parsed.

A parser written in C or Rust keeps the interpreter to itself until it is done, on whatever thread it was called: for
that time no stream is written and no step of the engine begins.  Long texts cost it next to nothing (16 MiB: 10 ms),
but 16 MiB of `[],[],[],...` are five million objects and take seconds.  So values are bounded as well as bytes, by
counting what stands between them, which is a hundred times as fast as making them.
"""

from __future__ import annotations

MAX_VALUES = 1 << 20  # of all kinds: token ids, mostly
MAX_NESTED = 1 << 18  # lists, objects and their keys, which cost several times as much


def too_many_values(body: bytes) -> bool:
    """Whether a JSON body has more values than anybody needs."""
    if len(body) <= MAX_NESTED:
        return False
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quote begins or ends a string
    if plain.count(b'"') > 2 * MAX_VALUES:
        return True
    outside = b"".join(plain.split(b'"')[::2])  # of the strings
    return outside.count(b",") > MAX_VALUES or sum(map(outside.count, (b"[", b"{", b":"))) > MAX_NESTED
