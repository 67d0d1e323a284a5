"""Tiles of the standard cache types: sizes, where things lie, and both directions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kvkernels.errors import InputError, RequestError
from kvkernels.quants import BLOCK_TYPES, TileLayout, encode, split
from kvkernels.records.layout import Side


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_A1_tiles_hold_ggml_rows_in_as_many_bytes_and_give_them_back(name, side):
    rng = np.random.default_rng(0)
    for dim in (32, 64, 96, 128, 256):
        layout = TileLayout(side, name, dim)
        rows = encode(rng.normal(size=(2, 3, 128, dim)).astype(np.float32), name)
        if layout.kind.quantised or side is Side.K or dim % 64 == 0:
            assert layout.nbytes == rows[0, 0].size
        assert layout.nbytes % 64 == 0
        tiles = layout.pack(rows)
        assert tiles.shape == (2, 3, layout.nbytes)
        assert_array_equal(layout.unpack(tiles), rows)
        assert_array_equal(layout.pack(rows[1, 2]), tiles[1, 2])
        # any bytes are a tile's, NaN scales too
        noise = rng.integers(0, 256, (4, *rows.shape[2:])).astype(np.uint8)
        assert_array_equal(layout.unpack(layout.pack(noise)), noise)


def test_float_tiles_are_plain_arrays_with_tokens_or_channels_side_by_side():
    x = np.random.default_rng(1).normal(size=(128, 96)).astype(np.float32)
    for name, dtype in (("f32", "f4"), ("f16", "f2"), ("bf16", ml_dtypes.bfloat16)):
        rows = encode(x, name)
        keys = TileLayout(Side.K, name, 96).pack(rows).view(dtype)
        assert_array_equal(keys.reshape(96, 128), x.T.astype(dtype))
        layout = TileLayout(Side.V, name, 96)
        values = layout.pack(rows).view(dtype).reshape(128, layout.padded_dim)
        assert_array_equal(values[:, :96], x.astype(dtype))
        assert not values[:, 96:].any()


@pytest.mark.parametrize("side", Side)
def test_codec5b_codes_lie_in_line_tiles_and_axes_behind_them(side):
    x = np.random.default_rng(2).normal(size=(128, 64)).astype(np.float32)
    rows = encode(x, "q4_1")
    layout = TileLayout(side, "q4_1", 64)
    assert (layout.blocks, layout.code_bytes) == (2, 128 * 32 // 2)
    assert (layout.scale_offset, layout.minimum_offset, layout.nbytes) == (4096, 4608, 5120)
    tile, (codes, scale, minimum) = layout.pack(rows), split(rows, "q4_1", 64)
    for at, axis in ((layout.scale_offset, scale), (layout.minimum_offset, minimum)):
        assert_array_equal(tile[at : at + 512].view(np.float16).reshape(2, 128), axis.T)
    for token, channel in ((0, 0), (77, 5), (127, 63), (40, 31)):
        out, red = token, channel % 32
        depth = 1
        if side is Side.V:
            out, red, depth = red, token, 4
        line = channel // 32 * 2048 + (out // 16 * depth + red // 32) * 256
        byte = tile[line + red % 16 // 4 * 64 + out % 16 * 4 + red % 4]
        assert (byte >> (red % 32 // 16 * 4)) & 15 == codes[token, channel]


def test_what_is_no_tile_is_refused():
    with pytest.raises(InputError, match="multiple of 32"):
        TileLayout(Side.K, "q8_0", 80)
    with pytest.raises(RequestError):
        TileLayout(Side.K, "q3_0", 64)
    layout = TileLayout(Side.V, "q8_0", 64)
    with pytest.raises(InputError, match="128"):
        layout.pack(np.zeros((127, 68), np.uint8))
    with pytest.raises(InputError):
        layout.pack(np.zeros((128, 64), np.uint8))
    with pytest.raises(InputError, match="8704"):
        layout.unpack(np.zeros(8000, np.uint8))
    with pytest.raises(InputError, match="8704"):
        layout.unpack(np.zeros(8704, np.int8))
