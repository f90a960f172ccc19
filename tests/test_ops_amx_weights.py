"""Weights that are found again in 4 or 8 bits: the same bfloat16 numbers, or not used at all; and who may put the
compiled library into the cache."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from minisgl import ops_amx
from minisgl.model_llama import Llama
from minisgl.ops_amx import AmxOps, Unavailable

from .test_ops_amx import Sequences, fresh, needs_amx  # noqa: F401 (a fixture)

OUTPUTS, INPUTS = 96, 160


def numbers(least: int, most: int, seed: int, shape=(OUTPUTS, INPUTS)) -> torch.Tensor:
    """(outputs, inputs / 32, 32) whole numbers; of 32 one is the least and one the most, as after quantising."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(least, most + 1, (shape[0], shape[1] // 32, 32), generator=generator)
    q[..., 7], q[..., 20] = least, most
    return q.float()


def q4_1(seed: int = 0, shape=(OUTPUTS, INPUTS), size: float = 1.0) -> torch.Tensor:
    """As GGUF's Q4_1 is dequantised: float32."""
    generator = torch.Generator().manual_seed(seed)
    blocks = shape[0], shape[1] // 32, 1
    scale = (size * (0.005 + 0.02 * torch.rand(blocks, generator=generator))).half()
    least = (size * (-0.15 + 0.1 * torch.randn(blocks, generator=generator))).half()
    return (numbers(0, 15, seed, shape) * scale.float() + least.float()).view(shape)


def q8_0(seed: int = 0, shape=(OUTPUTS, INPUTS)) -> torch.Tensor:
    scale = (0.001 + 0.01 * torch.rand((shape[0], shape[1] // 32, 1), generator=torch.Generator().manual_seed(seed)))
    return (numbers(-127, 127, seed, shape) * scale.half().float()).view(shape)


def bits(weight: torch.Tensor) -> int:
    ops = AmxOps(ops_amx.load())
    packed = ops.pack(weight)
    matrix, _ = ops._matrices[torch.ops.mkldnn.data_ptr(packed)]
    return matrix.bits


@needs_amx
@pytest.mark.parametrize("seed", range(5))
def test_quantised_weights_are_found(seed):
    assert bits(q4_1(seed).bfloat16()) == 4
    assert bits(q4_1(seed).half().bfloat16()) == 4  # rounded twice
    assert bits(q8_0(seed).bfloat16()) == bits(q8_0(seed).half().bfloat16()) == 8
    symmetric = numbers(0, 15, seed) - 8  # Q4_0
    assert bits((symmetric.view(OUTPUTS, INPUTS) * torch.tensor(0.0123).half().float()).bfloat16()) == 4


@needs_amx
def test_constant_and_zero_blocks_are_found():
    weight = q4_1()
    weight[:, :32] = 0
    weight[:40, 32:64] = 0.25
    weight[5, 96:128] = -3.0
    assert bits(weight.bfloat16()) == 4


@needs_amx
def test_other_weights_stay_as_they_are():
    assert bits(torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()) == 16
    for weight in (q4_1(), q8_0()):
        weight = weight.bfloat16()
        nearly = weight.clone()
        block = weight[50, 96:128].unique()
        first, second = block[block.abs().argsort()[:2]]
        nearly[50, 100] = first + 0.4 * (second - first)  # of 15,360 numbers one
        assert bits(nearly) == 16


def product(ops: AmxOps, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ops.logits(x, ops.pack(weight))


@needs_amx
@pytest.mark.parametrize("rows", [1, 16, 17, 31, 32, 33, 100, 256, 257])
@pytest.mark.parametrize("make", [q4_1, q8_0])
@pytest.mark.parametrize("inputs", [32, 160])
def test_products_have_the_same_bits(monkeypatch, make, rows, inputs):
    weight = make(shape=(OUTPUTS, inputs)).bfloat16()
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    small = product(AmxOps(ops_amx.load()), weight, x)
    monkeypatch.setattr(AmxOps, "_small", lambda self, at, weights: (ops_amx._Matrix(at, None, 16), torch.empty(0)))
    assert torch.equal(small, product(AmxOps(ops_amx.load()), weight, x))
    torch.testing.assert_close(small.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-4)


def quantised(sequences: Sequences, only: str | None) -> Llama:
    model = Llama(sequences.config, torch.bfloat16, "cpu")
    for i, (one, other) in enumerate(zip(model.tensors(), sequences.exact.tensors(), strict=True)):
        one.copy_(other if one.dim() == 1 or only else q4_1(i, tuple(one.shape)))
    if only:
        for layer in model.layers:
            layer.gate_up[: len(layer.gate_up) // 2] = q4_1(1, tuple(layer.gate_up[::2].shape))
    return model


@needs_amx
@pytest.mark.parametrize("only", [None, "gate_up"])
def test_a_step_with_small_weights_has_the_same_bits(monkeypatch, only):
    """Also where only the gate of a SwiGLU is small, and for more rows than meet small weights at once."""

    def run(small: bool) -> list[torch.Tensor]:
        sequences = Sequences([30, 1, 77, 40, 5, 100, 300], seed=3)
        model = quantised(sequences, only)
        if not small:
            monkeypatch.setattr(
                AmxOps, "_small", lambda self, at, weights: (ops_amx._Matrix(at, None, 16), torch.empty(0))
            )
        sequences.ops = AmxOps(ops_amx.load())
        model.use(sequences.ops)
        sequences.model = model
        found = sorted({matrix.bits for matrix, _ in sequences.ops._matrices.values()})
        assert found == ([16] if not small else [4, 16] if only else [4])
        decoded, kv = sequences.run()
        steps = [decoded, kv]
        for new in ([1, 1, 12, 8, 5, 3, 3], [1, 1, 20, 40, 5, 70, 1], [1, 1, 20, 40, 5, 70, 119], [1] * 6 + [290]):
            steps.append(sequences.run(sequences.batch(new=new, decodes=2))[0])  # 33, 138, 256 and 296 rows
        return steps

    for got, want in zip(run(True), run(False)):
        assert torch.equal(got, want)


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(fresh, monkeypatch, tmp_path):  # noqa: F811
    """`fresh`'s load, after it has "compiled" once, and the folder with the library."""
    library = Path(ops_amx.load()._name)
    assert library.stat().st_mode & 0o077 == library.parent.stat().st_mode & 0o077 == 0

    def copy(folder: Path) -> None:
        shutil.copy(library, folder)
        folder.chmod(0o700)

    monkeypatch.setattr(ops_amx, "_compile", copy)  # which takes 4 s
    fresh()
    (folder,) = (path for path in (tmp_path / "cache").glob("decode-amx-*") if path.is_dir())
    return fresh, folder


@needs_amx
@pytest.mark.parametrize("planted", ["library", "folder", "cache"])
def test_a_library_that_others_could_have_put_there_is_not_loaded(compiled, planted):
    load, folder = compiled
    {"library": folder / "decode.so", "folder": folder, "cache": folder.parent}[planted].chmod(0o777)
    with pytest.raises(Unavailable, match="can be written by others" if planted != "cache" else "everybody can write"):
        load()


@needs_amx
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_library_of_someone_else_is_not_loaded(compiled):
    load, folder = compiled
    os.chown(folder / "decode.so", 12345, 12345)
    with pytest.raises(Unavailable, match="belongs to someone else"):
        load()


@needs_amx
def test_libraries_of_other_versions_are_removed_a_month_after_their_last_use(compiled):
    load, folder = compiled
    cache = folder.parent
    month_ago = time.time() - 31 * 86400
    for name in ("decode-amx-old", "decode-amx-recent", "another-model"):
        (cache / name).mkdir()
        (cache / f"{name}.lock").touch()
        (cache / name / "decode.so").touch()
    for name in ("decode-amx-old", "another-model", folder.name):
        os.utime(cache / name, (month_ago, month_ago))
    load()
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == sorted(
        ["another-model", "decode-amx-recent", folder.name]
    )
    assert not (cache / "decode-amx-old.lock").exists()
    assert time.time() - folder.stat().st_mtime < 100
