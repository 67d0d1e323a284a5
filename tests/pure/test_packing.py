"""Codes <-> bytes in both layouts (codec.md 5, 5b; cases F31, F32)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.errors import InputError
from kvkernels.records import packing
from kvkernels.records.layout import BITS, LAYOUTS, LINE, STREAM, RecordLayout, Side

LENGTHS = [1, 7, 8, 9, 127, 128, 129]
LAYOUT_GRID = [RecordLayout(side, bits, w) for side in Side for bits in BITS for w in (64, 128)]


def codes_for(layout: RecordLayout, seed: int = 0, lead: tuple[int, ...] = ()) -> Any:
    shape = (*lead, layout.rows, layout.cols)
    return np.random.default_rng(seed).integers(0, 1 << layout.bits, shape, dtype=np.uint8)


def axes_for(layout: RecordLayout, lead: tuple[int, ...] = ()) -> Any:
    rng = np.random.default_rng(7)
    return [
        rng.normal(size=(*lead, n)).astype(np.float16)
        for n in (layout.rows, layout.rows, layout.cols)
    ]


def line_address(layout: RecordLayout, red: int, out: int) -> list[tuple[int, int, int, int]]:
    """Where codec.md 5b puts one code: (byte, shift in the byte, shift in the code, width)."""
    main, extra = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}[layout.bits]
    block = (out // 16) * (layout.n_red // 32) + red // 32
    quad, i = divmod(red % 32, 4)
    places, start, done = [], block * 64 * layout.bits, 0
    for width in (main, extra):
        if width:
            steps = width  # 32 reductions / 4 per line / (8 / width) planes
            byte = start + (quad % steps) * 64 + (out % 16) * 4 + i
            places.append((byte, (quad // steps) * width, done, width))
            start, done = start + 64 * width, done + width
    return places


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("bits", BITS)
def test_F31_unpack_of_pack_is_the_same_at_every_length(bits: int, n: int) -> None:
    codes = np.random.default_rng(n).integers(0, 1 << bits, (3, n), dtype=np.uint8)
    data = packing.pack_stream(codes, bits)
    assert data.shape == (3, -(-n * bits // 8))
    assert np.array_equal(packing.unpack_stream(data, bits, n), codes)


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from(BITS), data=st.data())
def test_codec5_stream_is_lsb_first(bits: int, data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=1, max_size=200))
    whole = sum(code << (i * bits) for i, code in enumerate(codes))
    expected = whole.to_bytes(-(-len(codes) * bits // 8), "little")
    assert packing.pack_stream(np.array(codes, np.uint8), bits).tobytes() == expected


@pytest.mark.parametrize("layout", LAYOUT_GRID, ids=str)
def test_F31_ramp_uses_all_codes(layout: RecordLayout) -> None:
    n = layout.rows * layout.cols
    ramp = (np.arange(n) % (1 << layout.bits)).astype(np.uint8).reshape(layout.rows, layout.cols)
    for layout_id in LAYOUTS:
        codes, *_ = packing.split(
            packing.join(ramp, *axes_for(layout), layout, layout_id), layout, layout_id
        )
        assert len(np.unique(codes)) == 1 << layout.bits
        assert np.array_equal(codes, ramp)


@pytest.mark.parametrize("layout", LAYOUT_GRID, ids=str)
def test_codec5b_every_code_sits_where_the_format_says(layout: RecordLayout) -> None:
    codes = codes_for(layout, seed=1)
    data = packing.pack_line(codes, layout.bits)
    rng = np.random.default_rng(2)
    for red, out in zip(
        rng.integers(0, layout.n_red, 300), rng.integers(0, layout.n_out, 300), strict=True
    ):
        found = 0
        for byte, shift, up, width in line_address(layout, int(red), int(out)):
            found |= ((int(data[byte]) >> shift) & ((1 << width) - 1)) << up
        assert found == codes[red, out]


@pytest.mark.parametrize("layout", LAYOUT_GRID, ids=str)
def test_codec5b_line_is_a_permutation_of_the_bits(layout: RecordLayout) -> None:
    """Each single set bit of the codes lands in one bit of the line, and no two in the same one."""
    n = layout.rows * layout.cols * layout.bits
    seen = np.zeros(n, np.int64)
    # Binary addressing: in round j, the bits whose index has bit j set are the ones that are on.
    index = np.arange(n).reshape(layout.rows, layout.cols, layout.bits)
    weights = (1 << np.arange(layout.bits)).astype(np.uint8)
    for j in range(n.bit_length()):
        codes = (((index >> j) & 1).astype(np.uint8) * weights).sum(-1, dtype=np.uint8)
        line = np.unpackbits(packing.pack_line(codes, layout.bits), bitorder="little")
        seen |= line.astype(np.int64) << j
    assert np.array_equal(np.sort(seen), np.arange(n))


@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
@pytest.mark.parametrize("layout", LAYOUT_GRID, ids=str)
def test_codec5b_layouts_convert_both_ways(layout: RecordLayout, lead: tuple[int, ...]) -> None:
    codes, axes = codes_for(layout, 3, lead), axes_for(layout, lead)
    stream = packing.join(codes, *axes, layout, STREAM)
    line = packing.join(codes, *axes, layout, LINE)
    assert stream.shape == line.shape == (*lead, layout.nbytes)
    assert not np.array_equal(stream, line)
    assert np.array_equal(packing.stream_to_line(stream, layout), line)
    assert np.array_equal(packing.line_to_stream(line, layout), stream)
    assert np.array_equal(stream[..., layout.scale_offset :], line[..., layout.scale_offset :])
    for layout_id, record in ((STREAM, stream), (LINE, line)):
        back = packing.split(record, layout, layout_id)
        assert all(np.array_equal(a, b) for a, b in zip(back, (codes, *axes), strict=True))


def test_F32_another_layout_id_or_size_is_refused() -> None:
    layout = RecordLayout(Side.K, 4, 128)
    record = packing.join(codes_for(layout), *axes_for(layout), layout, LINE)
    with pytest.raises(InputError, match="layout: found 'quad'"):
        packing.split(record, layout, "quad")
    with pytest.raises(InputError, match="layout"):
        packing.join(codes_for(layout), *axes_for(layout), layout, "lines")
    with pytest.raises(InputError, match=r"record.*needed uint8 \[\.\.\., 6912\]"):
        packing.split(record, RecordLayout(Side.K, 3, 128), LINE)
    with pytest.raises(InputError, match="records"):
        packing.line_to_stream(record[:-1], layout)


def test_F31_a_code_beyond_the_width_is_refused() -> None:
    with pytest.raises(InputError, match="found 4; needed at most 3"):
        packing.pack_stream(np.array([0, 4], np.uint8), 2)
    with pytest.raises(InputError, match="needed at most 7"):
        packing.pack_line(np.full((32, 16), 8, np.uint8), 3)


def test_packing_names_wrong_dtypes_and_shapes() -> None:
    layout = RecordLayout(Side.V, 4, 128)
    codes, (scale, zero, other) = codes_for(layout), axes_for(layout)
    with pytest.raises(InputError, match="codes: found int64"):
        packing.pack_stream(codes.astype(np.int64), 4)
    with pytest.raises(InputError, match="multiples of 32 x 16"):
        packing.pack_line(codes[:31], 4)
    with pytest.raises(InputError, match="codes"):
        packing.join(codes[:64], scale, zero, other, layout, LINE)
    with pytest.raises(InputError, match="zero: found float32"):
        packing.join(codes, scale, zero.astype(np.float32), other, layout, LINE)
    with pytest.raises(InputError, match="other"):
        packing.join(codes, scale, zero, other[:64], layout, LINE)
    with pytest.raises(InputError, match="data"):
        packing.unpack_line(np.zeros(10, np.uint8), 4, 128, 128)
    with pytest.raises(InputError, match="data"):
        packing.unpack_stream(np.zeros(10, np.uint8), 4, 21)
