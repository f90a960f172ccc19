"""Which rows of a long job are done, in a file that survives the job: JSON lines, one a row.

    {"index": 0, "key": "9f2c...", "value": "Paris", ...}       appended when row 0 has ended, whole or not at all
    {"index": 2, "key": "77b0...", "value": "Lima", ...}        in the order of ending
    {"index": 1, "key": "c1                                     the process was killed here: cut off at the next start

A line counts when its line end is there. It goes out in one write to a file opened for appending, so a kill can only
tear the last line, and what was torn is run again: no row is lost, none is there twice. A row's key is a hash of what
was run, so that results are never taken for those of another job. A lock keeps two processes from writing at once; the
system lets go of it when its holder dies.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


class Checkpoint:
    """`path`: the file, made when it is not there.  `done`: index -> row, of those that are in it.

    Raises ValueError for a file that is something else, and while another process writes it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path.with_name(self.path.name + ".lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"checkpoint: another process is writing {self.path}") from None
        try:
            self.done = self._read()
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except BaseException:
            self._lock.release()
            raise

    def _read(self) -> dict[int, dict[str, Any]]:
        """The rows, after a torn last line has been cut off."""
        if not self.path.exists():
            return {}
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        rows: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                index, _ = row["index"], row["key"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"checkpoint: {self.path}, line {number} is not a row of minisgl.batch.map") from None
            if index in rows:
                raise ValueError(f"checkpoint: {self.path}, line {number}: row {index} is there twice")
            rows[index] = row
        if whole < len(data):
            if whole == 0 and not data.startswith(b'{"index": '):
                raise ValueError(f"checkpoint: {self.path} is not a file of minisgl.batch.map")
            os.truncate(self.path, whole)
        return rows

    def add(self, row: dict[str, Any]) -> None:
        """Append a row.  Raises TypeError if it cannot be written as JSON."""
        line = (json.dumps(row) + "\n").encode()
        if os.write(self._file, line) != len(line):  # the disk is full, say: what is there of it must not count
            os.truncate(self.path, os.path.getsize(self.path) - _torn(self.path))
            raise OSError(f"checkpoint: {self.path} could not be written completely")

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)
        self._lock.release()


def _torn(path: Path) -> int:
    """Bytes behind the last line end."""
    data = path.read_bytes()
    return len(data) - (data.rfind(b"\n") + 1)
