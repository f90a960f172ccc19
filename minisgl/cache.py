"""Folders made once and kept: built beside their final place, then renamed.

A rename is atomic, so a folder either is there whole or is not there; whoever is interrupted leaves only a
temporary folder that the next builder sweeps away.  A lock file makes a second process wait instead of doing
the work twice.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from .config import ModelError

_MANIFEST = "minisgl.json"  # written last: name and size of every file


def cache_dir() -> Path:
    """MINISGL_CACHE, or `minisgl` in the user's cache directory as the platform has it."""
    if given := os.environ.get("MINISGL_CACHE"):
        return Path(given).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "minisgl"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "minisgl"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "minisgl" / "Cache"
    return Path.home() / ".cache" / "minisgl"


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache; `build(temporary_folder)` fills it if it is absent or damaged.

    Raises ModelError if the cache cannot be written (read-only, disk full), and whatever `build` raises.
    """
    folder = cache_dir() / name
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if not _is_complete(folder):  # or another process has just built it
                _build(folder, build)
    except OSError as error:
        hint = "set MINISGL_CACHE to a directory that can be written"
        raise ModelError(f"cannot write the cache {folder}: {error.strerror or error}; {hint}") from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    temporary = folder.with_name(folder.name + ".tmp")  # we hold the lock: it is ours alone
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir()
    try:
        build(temporary)
        sizes = {path.name: path.stat().st_size for path in temporary.iterdir() if path.is_file()}
        (temporary / _MANIFEST).write_text(json.dumps(sizes))
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or it would have been used
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _lock(folder: Path) -> AbstractContextManager:
    """Held until the context ends; says so on stderr when it has to wait."""
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"minisgl: another process is preparing {folder}, waiting for it", file=sys.stderr)
        return lock.acquire()
