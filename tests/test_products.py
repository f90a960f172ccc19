"""Tiles of matrix products: the arithmetic of waves, and on a GPU the products themselves."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from minisgl import products
from minisgl.products import Products, Stopwatch, Unavailable, cost, shortlist, waves

H200 = 132  # multiprocessors
LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def test_each_tile_has_a_number_of_its_own():
    assert len(set(products.TILES.values())) == len(products.TILES)
    assert all(r % 8 == c % 8 == 0 for r, c in products.TILES)


def test_waves_count_tiles_that_are_cut_off_at_the_edge():
    assert waves(256, 28672, (128, 128), H200) == (4, 2)
    assert waves(256, 28672, (224, 128), H200) == (2, 2)
    assert waves(1, 1, (64, 64), H200) == (1, 1)
    assert waves(257, 129, (64, 128), 8) == (2, 3)  # 3 x 3 tiles


@pytest.mark.parametrize(("columns", "rows"), list(itertools.product((1024, 6144, 28672, 128256), (48, 100, 192, 256))))
def test_the_short_list_is_in_order_of_cost_and_without_doubles(columns, rows):
    tiles = shortlist(rows, columns, H200)
    assert 1 <= len(tiles) <= products.LISTED and set(tiles) <= set(products.TILES)
    costs = [cost(rows, columns, tile, H200) for tile in tiles]
    assert costs == sorted(costs)
    kinds = [(*waves(rows, columns, tile, H200), tile[0] % 64 == 0) for tile in tiles]
    assert len(set(kinds)) == len(kinds)
    assert costs[0] == min(cost(rows, columns, tile, H200) for tile in products.TILES)


# what a search over every tile, cluster and option found fastest, and what was within 1 % of it
FASTEST = {
    ("qkv", 128): {(96, 64)},
    ("qkv", 192): {(144, 64)},
    ("qkv", 256): {(96, 128)},
    ("o", 64): {(64, 32), (48, 64), (64, 64)},
    ("o", 128): {(64, 64)},
    ("o", 192): {(96, 64)},
    ("o", 256): {(72, 128), (144, 64), (136, 64)},
    ("gate_up", 64): {(112, 64), (128, 64)},
    ("gate_up", 128): {(128, 128), (224, 64)},
    ("gate_up", 192): {(224, 192), (112, 192)},
    ("gate_up", 256): {(224, 128)},
    ("down", 64): {(64, 32), (48, 64)},
    ("down", 128): {(72, 64), (64, 64)},
    ("down", 192): {(64, 96)},
    ("down", 256): {(64, 128), (128, 64)},
}


@pytest.mark.parametrize(("name", "rows"), list(FASTEST))
def test_the_short_list_has_what_an_exhaustive_search_on_an_h200_found(name, rows):
    assert FASTEST[name, rows] & set(shortlist(rows, LLAMA_8B[name][0], H200))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def chooser():
    device = torch.device("cuda", 0)
    try:
        return Products(device)
    except Unavailable as reason:
        pytest.skip(f"no choice of tiles on this GPU: {reason}")


def weights_of(columns: int, inner: int, dtype=torch.bfloat16, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(columns + inner)
    return [torch.randn((columns, inner), device="cuda", generator=generator).to(dtype) * 0.02 for _ in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (4096, 14336), (5000, 1024), (28672, 4096)])
def test_chosen_products_are_right(chooser, columns, inner, dtype, monkeypatch):
    monkeypatch.setattr(products, "WORTH", 1e9)  # keep every choice, even one that is slower
    weights = weights_of(columns, inner, dtype)
    for rows in (48, 64, 97, 200, 256):
        chooser.choose(weights, rows)
        assert chooser.choices[-1].tile in products.TILES
        x = torch.randn((rows, inner), device="cuda", dtype=dtype)
        for weight in weights:
            exact = x.double() @ weight.double().T
            torch.testing.assert_close(chooser.linear(x, weight).double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (4096, 14336), (28672, 4096)])
def test_every_tile_gives_the_same_bits(chooser, columns, inner):
    weight = weights_of(columns, inner, count=1)[0]
    x = torch.randn((256, inner), device="cuda", dtype=torch.bfloat16)
    results, most = [], 0
    for rows in (64, 192, 256):
        product = products.Product(chooser._library, rows, columns, inner, torch.bfloat16)
        tiles = shortlist(rows, columns, H200)
        found = [a for tile in tiles for a in product.algorithms(tile, range(8), products.CLUSTERS)]
        most = max(most, len(found))
        results += [product.run(x[:rows], weight, algorithm)[:64] for algorithm in found]
    assert most > 8 * len(products.CLUSTERS)  # several tiles, not just variants of one
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.gpu
def test_what_was_not_chosen_is_torchs(chooser, monkeypatch):
    monkeypatch.setattr(products, "WORTH", 1e9)
    weights = weights_of(4096, 4096)
    x = torch.randn((64, 8192), device="cuda", dtype=torch.bfloat16)
    chooser.choose(weights, 64)
    chooser.choose(weights, products.FEWEST_ROWS - 1)
    chooser.choose(weights, products.MOST_ROWS + 1)
    chooser.choose([weights[0][:64, :64]], 64)
    chooser.choose([w.float() for w in weights], 64)
    assert [(c.rows, c.shape) for c in chooser.choices] == [(64, (4096, 4096))]
    for rows in (1, 63):
        assert torch.equal(chooser.linear(x[:rows, :4096], weights[0]), F.linear(x[:rows, :4096], weights[0]))
    strided = chooser.linear(x[:, ::2], weights[0])
    torch.testing.assert_close(strided, F.linear(x[:, ::2].contiguous(), weights[0]), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_nothing_is_kept_that_is_not_faster(chooser, monkeypatch):
    monkeypatch.setattr(products, "WORTH", 0.0)
    chooser.choose(weights_of(4096, 4096), 64)
    assert chooser.choices[0].tile is None and not chooser._chosen


@pytest.mark.gpu
def test_the_stopwatch_waits_for_all_products(chooser):
    weights = weights_of(28672, 4096)
    x = torch.randn((256, 4096), device="cuda", dtype=torch.bfloat16)
    watch = Stopwatch()
    least = watch.LAUNCHES * 2 * 256 * 28672 * 4096 / 1e15 * 1e3  # ms at 1,000 TFLOP/s, which no Hopper GPU reaches
    assert watch(lambda weight: F.linear(x, weight), weights) > least
