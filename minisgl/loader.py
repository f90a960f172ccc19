"""From a name to a model on a device: local folder, hub id, GGUF file, the default model, or random weights.

    load_model(None)                      the default model, fetched on first use (`default_model`)
    load_model("path/to/folder")          config.json + one or many safetensors files
    load_model("org/name")                the same from the Hugging Face hub: HF_HOME, HF_TOKEN,
    HF_HUB_OFFLINE
                                          mean what they always mean
    load_model("path/to/model.gguf")      quantised weights are dequantised while loading
    load_model(..., load_format="dummy")  random weights from a config.json alone

`resolve_model` finds files and reads the config without touching a weight, so that the caller can choose
dtype and device; `load_model` does the rest.  Only safetensors and GGUF are read: pickled weights (.bin, .pt)
can execute code when opened, and are refused.  So is a model that brings its own code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from .cache import cached_folder
from .config import LlamaConfig, ModelError, read_json, token_ids
from .default_model import NAME as DEFAULT_NAME
from .default_model import default_model_folder
from .model_llama import Llama

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_SMALL_FILES = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelSource:
    """Where a model's parts are.  `folder` holds the tokenizer's files, if there are any; `gguf` the weights'
    file, when they are not safetensors in `folder`; `dummy`: there are no weights to read."""

    name: str
    config: LlamaConfig
    eos_token_ids: frozenset[int]
    folder: Path
    gguf: Path | None = None
    dummy: bool = False


@dataclass
class LoadedModel:
    """A model ready to run.  `folder`: Path with the tokenizer's files, None if the model came without any.
    `eos_token_ids`: every id at which the model's own configuration says that generation ends."""

    name: str
    config: LlamaConfig
    model: Llama
    folder: Path | None
    eos_token_ids: frozenset[int]


def resolve_model(
    model: str | Path | None = None, load_format: str = "auto", revision: str | None = None
) -> ModelSource:
    """Find a model and read its config.  Fetches what is not on this machine, weights included (never for
    "dummy").

    `revision`: branch, tag or commit on the hub; only a hub id has one.
    Raises ModelError, in one line, for whatever is missing, unreachable, unreadable or unsupported.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
    if model is None:
        return _resolve_folder(DEFAULT_NAME, default_model_folder(), load_format)
    if not isinstance(model, (str, Path)) or not str(model):
        raise ModelError(f"model must be a path or a hub id, got {model!r}")
    path = Path(model).expanduser()
    if path.is_file():
        return _resolve_gguf(path, load_format)
    if path.is_dir():
        if revision is not None:
            raise ModelError(f"revision is for hub models; {path} is a local folder")
        return _resolve_folder(path.resolve().name, path, load_format)
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise ModelError(f"model: no such file or folder: {model}")
    return _resolve_hub(model, load_format, revision)


def load_model(
    model: str | Path | ModelSource | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    revision: str | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Load `model` (see the module's list; or what `resolve_model` returned) on `device`.

    `dtype`: a torch dtype or its name; "auto" is the config's on a GPU and float32 on a CPU.  `seed` is for
    dummy weights.  Raises ModelError as `resolve_model` does, and for a broken file, a tensor that is
    missing, left over or of the wrong shape.
    """
    source = model if isinstance(model, ModelSource) else resolve_model(model, load_format, revision)
    device = torch.device(device)
    kind = _dtype(dtype, source.config, device)
    try:
        llama = Llama(source.config, kind, device)
        if source.dummy:
            llama.init_dummy(seed)
        elif source.gguf is not None:
            llama.load(_gguf_weights(source.gguf))
        else:
            llama.load(_safetensors_weights(source.folder))
    except (ArithmeticError, MemoryError, RuntimeError) as error:  # torch's out of memory is a RuntimeError
        raise ModelError(f"a model of the sizes in config.json cannot be made here: {error}") from error
    has_tokenizer = any((source.folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    folder = source.folder if has_tokenizer else None
    return LoadedModel(source.name, source.config, llama, folder, source.eos_token_ids)


def _dtype(dtype: torch.dtype | str, config: LlamaConfig, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        dtype = config.dtype if device.type == "cuda" else "float32"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.float16, torch.bfloat16):
        raise ModelError(f"dtype must be auto, float32, float16 or bfloat16, got {dtype!r}")
    return found


# ---------------------------------------------------------------------- folders


def _resolve_folder(name: str, folder: Path, load_format: str) -> ModelSource:
    ggufs = sorted(folder.glob("*.gguf"))
    has_config = (folder / "config.json").exists()
    if load_format == "gguf" or (load_format == "auto" and ggufs and not has_config):
        if len(ggufs) != 1:
            raise ModelError(f"{folder} holds {len(ggufs)} .gguf files; name the one to load")
        return _resolve_gguf(ggufs[0], "gguf")
    hf = read_json(folder / "config.json")
    config = LlamaConfig.from_hf(hf)
    dummy = load_format == "dummy"
    if not dummy:
        _shards(folder)  # now rather than after the caller has measured and allocated
    return ModelSource(name, config, _eos_token_ids(folder, config), folder, dummy=dummy)


def _eos_token_ids(folder: Path, config: LlamaConfig) -> frozenset[int]:
    """config.json names the end of text; chat models list the end of a turn in generation_config.json as
    well."""
    path = folder / "generation_config.json"
    generation = token_ids(read_json(path).get("eos_token_id")) if path.exists() else ()
    return frozenset(config.eos_token_ids + generation)


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of the index, or model.safetensors, or all there are."""
    if (folder / _INDEX).exists():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / _INDEX} has no weight_map")
        shards = [folder / Path(str(name)).name for name in sorted(set(weight_map.values()))]
    elif (folder / "model.safetensors").exists():
        shards = [folder / "model.safetensors"]
    else:
        shards = sorted(folder.glob("*.safetensors"))
    if missing := [shard.name for shard in shards if not shard.exists()]:
        raise ModelError(f"{folder} lacks the weight file {missing[0]}")
    if shards:
        return shards
    if any(list(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth")):
        raise ModelError(
            f"{folder} has pickled weights only (.bin, .pt), which can execute code when opened; "
            "convert them to safetensors"
        )
    raise ModelError(f"{folder} has no *.safetensors file")


def _safetensors_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, one at a time, mapped from the file: nothing is in memory twice."""
    for shard in tqdm(_shards(folder), desc="loading weights", unit="file", delay=2):
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"broken safetensors file {shard}: {error}") from error


# ---------------------------------------------------------------------- GGUF


def _resolve_gguf(path: Path, load_format: str) -> ModelSource:
    from .gguf_file import GGUFFile

    if path.suffix != ".gguf":
        raise ModelError(
            f"model: {path} is a file, but not a .gguf; a safetensors model is a folder with config.json"
        )
    if load_format == "safetensors":
        raise ModelError(f"load_format is 'safetensors', but {path} is a GGUF file")
    file = GGUFFile(path)
    config = file.config()
    stat = path.stat()
    identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = cached_folder(f"gguf-{path.stem}-{key}", file.write_tokenizer)
    eos = frozenset(config.eos_token_ids)
    return ModelSource(path.stem, config, eos, folder, gguf=path, dummy=load_format == "dummy")


def _gguf_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from .gguf_file import GGUFFile

    file = GGUFFile(path)
    with tqdm(total=file.num_elements, desc="dequantising", unit_scale=True, delay=2) as bar:
        for name, array in file.weights():
            yield name, torch.from_numpy(array)
            bar.update(array.size)


# ---------------------------------------------------------------------- hub


def _resolve_hub(repo: str, load_format: str, revision: str | None) -> ModelSource:
    """Config and tokenizer first, so that a model that cannot run is refused before gigabytes are fetched."""
    if load_format == "gguf":
        raise ModelError(f"model: {repo!r} is not a file; GGUF models are loaded from a local .gguf file")
    folder = _snapshot(repo, revision, _HUB_SMALL_FILES)
    if load_format != "dummy":
        LlamaConfig.from_hf(read_json(folder / "config.json"))
        index = folder / _INDEX
        shards = read_json(index).get("weight_map", {}) if index.exists() else {"": "model.safetensors"}
        folder = _snapshot(repo, revision, _HUB_SMALL_FILES + sorted(set(shards.values())))
    return _resolve_folder(repo, folder, load_format)


def _snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as error:  # its own, httpx's, requests' and OS errors: all mean that it cannot be had
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"model {repo!r} is no local path, and the hub did not give it: {type(error).__name__}: {reason}"
        ) from error
