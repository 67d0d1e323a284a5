"""Kernels of the standard cache types against NumPy: scores, values, rows in and out of tiles."""

from __future__ import annotations

import numpy as np
import pytest
from numba import int64
from numpy.testing import assert_array_equal

from kvkernels.cpu.columns import F32, I8, I16, ROW_BLOCKS, STANDARD
from kvkernels.cpu.entries import dot_address
from kvkernels.cpu.features import ISAS, missing
from kvkernels.cpu.kernels.jit import kernel
from kvkernels.cpu.kernels.standard import (
    bits_of,
    has_minimum,
    standard_queries,
    standard_scores,
    standard_values,
)
from kvkernels.cpu.kernels.standard_rows import read_rows, write_rows
from kvkernels.cpu.probe import probe_cpu
from kvkernels.quants import BLOCK_TYPES, TileLayout, decode, encode
from kvkernels.records.layout import Side

FEATURES = probe_cpu().features
HERE = [isa for isa in ISAS if not missing(isa, FEATURES)]
MODES = {"f32": F32, "i8": I8, "i16": I16}
QUANTISED = [name for name, kind in BLOCK_TYPES.items() if kind.quantised]
DIMS = (32, 64, 96, 128, 256)
# relative RMS errors of each form of activations
K_LIMIT = {"f32": 1e-5, "i16": 5e-4, "i8": 1.5e-2}
V_LIMIT = {"f32": 1e-5, "i16": 5e-4, "i8": 1.5e-2}


@kernel
def scores_of(q, kind, mode, dots, codes, at, dim, rows, scores, tops):
    qw, qact = np.empty(rows * dim, np.float32), np.empty(rows * dim * 2, np.uint8)
    qscales = np.empty(rows * dim // 32, np.float32)
    qsums = np.empty(rows * dim // 16, np.float32)
    tmp = np.empty(min(rows, 4) * 128, np.float32)
    standard_queries(q, kind, mode, dim, rows, qw, qact, qscales, qsums)
    standard_scores(
        kind, mode, dots, codes, codes.view(np.uint16), at, int64(0), dim, rows, qw, qact, qscales,
        qsums, tmp, scores, tops,
    )  # fmt: skip


@kernel
def values_of(p, kind, mode, dots, codes, at, dim, rows, gated, alpha, o):
    axes, w = np.empty(256, np.float32), np.empty(rows * 128, np.float32)
    act, scales = np.empty(rows * 256, np.uint8), np.empty(rows * 4, np.float32)
    tmp, zs = np.empty(rows * 32, np.float32), np.empty(rows, np.float32)
    standard_values(
        p, kind, mode, dots, codes, codes.view(np.uint16), at, int64(0), dim, rows, gated, axes, w,
        act, scales, tmp, zs, alpha, o,
    )  # fmt: skip


@kernel
def form_of(kind):
    return bits_of(kind), has_minimum(kind)


def addresses(name, mode, isa):
    bits = BLOCK_TYPES[name].bits
    return np.array([dot_address(bits, rows, mode, isa) for rows in ROW_BLOCKS], np.int64)


def tile_of(name, side, dim, rng):
    """(tile bytes, the values they stand for): channels and tokens of different sizes."""
    x = rng.normal(size=(128, dim)) * np.exp(0.5 * rng.normal(size=(128, 1)))
    x = (x * np.exp(0.5 * rng.normal(size=dim)) + 0.3).astype(np.float32)
    data = encode(x, name)
    return TileLayout(side, name, dim).pack(data), decode(data, name, dim).astype(np.float64)


def close(found, expected, limit):
    assert np.isfinite(found).all()
    error = np.sqrt(np.square(found - expected).mean() / np.square(expected).mean())
    assert error <= limit


def padded(tile):
    """A pool of which the tile is the second of three; the rest is NaN bytes."""
    return np.concatenate([np.full_like(tile, 255), tile, np.full_like(tile, 255)])


def test_kernels_know_the_types_by_their_place_in_the_table():
    assert list(STANDARD) == list(BLOCK_TYPES)
    for name, kind in STANDARD.items():
        assert form_of(kind) == (BLOCK_TYPES[name].bits, BLOCK_TYPES[name].has_min)


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", QUANTISED)
def test_A1_scores_and_values_of_every_type(name, mode, isa):
    rng = np.random.default_rng(7)
    for dim in DIMS:
        keys, k = tile_of(name, Side.K, dim, rng)
        values, v = tile_of(name, Side.V, dim, rng)
        pools = [padded(keys), padded(values)]
        dots = addresses(name, mode, isa)
        for rows in range(1, 10):
            q = rng.normal(size=(rows, dim)).astype(np.float32)
            scores, tops = np.full(rows * 128 + 16, np.nan, np.float32), np.empty(rows, np.float32)
            how = STANDARD[name], MODES[mode], dots
            scores_of(q.reshape(-1), *how, pools[0], keys.size, dim, rows, scores, tops)
            found = scores[:-16].reshape(rows, 128)
            assert np.isnan(scores[-16:]).all()
            close(found, q.astype(np.float64) @ k.T, K_LIMIT[mode])
            assert_array_equal(tops, found.max(1))

            p = np.exp(rng.normal(size=(rows, 128))).astype(np.float32)
            before = rng.normal(size=(rows, dim)).astype(np.float32)
            alpha = rng.random(rows).astype(np.float32)
            o = np.append(before.reshape(-1), np.full(16, np.nan, np.float32))
            values_of(p.reshape(-1), *how, pools[1], values.size, dim, rows, False, alpha, o)
            assert np.isnan(o[-16:]).all()
            expected = p.astype(np.float64) @ v + before * alpha[:, None].astype(np.float64)
            close(o[:-16].reshape(rows, dim), expected, V_LIMIT[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", QUANTISED)
def test_B5_bytes_of_hidden_tokens_never_matter(name, mode):
    rng = np.random.default_rng(8)
    dim, rows, seen = 96, 3, 77
    dots, how = addresses(name, mode, HERE[0]), (STANDARD[name], MODES[mode])
    q = rng.normal(size=rows * dim).astype(np.float32)
    p = rng.random((rows, 128)).astype(np.float32)
    p[:, seen:] = 0
    results = []
    for poison in (False, True):
        found = []
        for side in Side:
            layout = TileLayout(side, name, dim)
            data = encode(rng.normal(size=(128, dim)).astype(np.float32), name)
            rng = np.random.default_rng(8)
            data[:seen] = encode(rng.normal(size=(seen, dim)).astype(np.float32), name)
            if poison:
                data[seen:] = 255  # NaN scales and minima, the largest codes
            tile = layout.pack(data)
            if side is Side.K:
                scores, tops = np.empty(rows * 128, np.float32), np.empty(rows, np.float32)
                scores_of(q, *how, dots, tile, 0, dim, rows, scores, tops)
                found.append(scores.reshape(rows, 128)[:, :seen])
                assert np.isfinite(tops).all() or not poison
            else:
                o, alpha = np.zeros(rows * dim, np.float32), np.ones(rows, np.float32)
                values_of(p.reshape(-1), *how, dots, tile, 0, dim, rows, True, alpha, o)
                found.append(o)
        results.append(found)
    for clean, poisoned in zip(*results, strict=True):
        assert np.isfinite(clean).all()
        assert_array_equal(clean, poisoned)


@pytest.mark.parametrize("name", QUANTISED)
def test_B7_the_same_bits_again_and_beside_other_rows(name):
    rng = np.random.default_rng(9)
    dim, kind = 128, STANDARD[name]
    keys, _ = tile_of(name, Side.K, dim, rng)
    values, _ = tile_of(name, Side.V, dim, rng)
    q = rng.normal(size=(7, dim)).astype(np.float32)
    p = rng.random((7, 128)).astype(np.float32)
    for mode in ("i8", "i16"):
        results = []
        for isa in (*HERE, HERE[0]):
            dots = addresses(name, mode, isa)
            scores, tops = np.empty(7 * 128, np.float32), np.empty(7, np.float32)
            scores_of(q.reshape(-1), kind, MODES[mode], dots, keys, 0, dim, 7, scores, tops)
            o, alpha = np.zeros(7 * dim, np.float32), np.ones(7, np.float32)
            values_of(p.reshape(-1), kind, MODES[mode], dots, values, 0, dim, 7, False, alpha, o)
            results.append((scores, o))
            alone_s, alone_o = np.empty(128, np.float32), np.zeros(dim, np.float32)
            scores_of(q[5], kind, MODES[mode], dots, keys, 0, dim, 1, alone_s, tops[:1])
            values_of(p[5], kind, MODES[mode], dots, values, 0, dim, 1, False, alpha[:1], alone_o)
            assert_array_equal(alone_s, scores.reshape(7, 128)[5])
            assert_array_equal(alone_o, o.reshape(7, dim)[5])
        for scores, o in results[1:]:
            assert_array_equal(scores, results[0][0])
            assert_array_equal(o, results[0][1])


# --- rows in and out


def awkward_rows(n, heads, dim, rng):
    """Rows with every case of the codecs: ties, zeros of both signs, vanishing and huge scales."""
    x = rng.normal(size=(n, heads, dim)).astype(np.float32)
    x *= np.exp(3 * rng.normal(size=(n, heads, 1))).astype(np.float32)
    x[1], x[2] = 0.0, -0.0
    x[3, :, ::2], x[3, :, 1::2] = 0.0, -0.0
    x[4] = rng.integers(-127, 128, (heads, dim)) * 0.5
    x[4, :, ::32] = 127
    x[5] *= np.float32(1e-40)
    x[6] *= np.float32(2e-38)
    x[7] = rng.choice(np.array([1e-45, -1e-45, 0, 4e-45], np.float32), (heads, dim))
    x[8] *= np.float32(1e6)
    x[9] = rng.choice(np.array([-3, 3], np.float32), (heads, dim))
    x[10] = np.float32(3e38) * rng.choice(np.array([-1, 0.3], np.float32), (heads, dim))
    x[11] = rng.integers(-8, 9, (heads, dim)) + 0.5
    x[12] = 65519.99 + rng.random((heads, dim)) * 0.02
    x[13] *= np.float32(3e-8)
    return x


def views(pool):
    return pool, pool.view(np.uint16), pool.view(np.float32)


def put(x, layout, pool, blocks, spans, first, last):
    how = STANDARD[layout.type], layout.side is Side.V
    room = np.empty(32, np.uint8)
    write_rows(x, *how, *views(pool), blocks, layout.nbytes, spans, first, last, room)


def get(layout, pool, at, spans, out):
    how = STANDARD[layout.type], layout.side is Side.V
    read_rows(*views(pool), *how, at, layout.nbytes, spans, out)


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_write_rows_gives_the_bytes_of_the_codecs_however_it_is_cut(name, side):
    rng = np.random.default_rng(10)
    for dim in DIMS:
        layout, heads, blocks = TileLayout(side, name, dim), 2, 3
        x = awkward_rows(128, heads, dim, rng)
        used = np.array([[2, 0, 128, 0]])
        pool = rng.integers(0, 256, heads * blocks * layout.nbytes).astype(np.uint8)
        whole = pool.copy()
        put(x, layout, whole, blocks, used, 0, heads)
        tiles = whole.reshape(heads, blocks, -1)
        want = layout.pack(np.moveaxis(encode(x, name), 1, 0))
        assert_array_equal(tiles[:, 2], want)
        assert_array_equal(tiles[:, :2], pool.reshape(tiles.shape)[:, :2])
        # row by row, in any order, one head after the other
        single = pool.copy()
        for h in (1, 0):
            for t in rng.permutation(128):
                span = np.array([[2, t, 1, t]])
                put(x, layout, single, blocks, span, h, h + 1)
        assert_array_equal(single, whole)
        # several spans in one call, over two tiles
        parts = pool.copy()
        spans = np.array([[2, 100, 28, 100], [2, 0, 100, 0], [0, 5, 9, 20]])
        put(x, layout, parts, blocks, spans, 0, heads)
        assert_array_equal(parts.reshape(tiles.shape)[:, 2], want)
        for h in range(heads):
            out = np.full((130, dim), np.nan, np.float32)
            at = h * blocks * layout.nbytes
            with np.errstate(invalid="ignore"):
                get(layout, parts, at, spans, out)
            assert_array_equal(out[:128], decode(encode(x[:, h], name), name, dim))
            assert np.isnan(out[128:]).all()
            get(layout, parts, at, np.array([[0, 5, 9, 121]]), out)
            assert_array_equal(out[121:], decode(encode(x[20:29, h], name), name, dim))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_float_rows_round_as_the_codecs_do(name):
    rng = np.random.default_rng(11)
    x = rng.integers(0, 2**32, (128, 1, 64), np.uint32).view(np.float32)
    layout, pool = TileLayout(Side.V, name, 64), np.empty(128 * 128, np.uint8)
    put(x, layout, pool, 1, np.array([[0, 0, 128, 0]]), 0, 1)
    out = np.empty((128, 64), np.float32)
    get(layout, pool, 0, np.array([[0, 0, 128, 0]]), out)
    want = decode(encode(x[:, 0], name), name, 64)
    assert np.isnan(want).any()
    assert_array_equal(out, want)
