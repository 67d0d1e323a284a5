"""Codes <-> bytes in both record layouts (codec.md 5, 5b): pure permutations, NumPy.

Arrays carry any number of leading dimensions. Codes are ``uint8`` in quantiser orientation
``[..., R, C]``: rows are what the product sums over (RED), columns what it keeps (OUT), for K and V
alike. Nothing here computes a value; every function raises `InputError` on a wrong shape or dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.errors import InputError
from kvkernels.records.layout import (
    LINE,
    LINE_OUTS,
    LINE_PLANES,
    LINE_REDS,
    STREAM,
    RecordLayout,
    check_bits,
    check_layout,
)

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]

_QUADS = LINE_REDS // 4


def _codes(codes: NDArray[Any], bits: int) -> Bytes:
    check_bits(bits)
    if codes.dtype != np.uint8:
        raise InputError("codes", found=codes.dtype, needed="uint8")
    if codes.size and int(codes.max()) >= 1 << bits:
        raise InputError("codes", found=int(codes.max()), needed=f"at most {(1 << bits) - 1}")
    return codes


def pack_stream(codes: Bytes, bits: int) -> Bytes:
    """``[..., n]`` codes -> ``[..., ceil(n * bits / 8)]``: code i occupies bits [i b, (i + 1) b).

    LSB first; unused bits of the last byte are 0.
    """
    codes = _codes(codes, bits)
    n = codes.shape[-1]
    flat = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(flat.reshape(*codes.shape[:-1], n * bits), axis=-1, bitorder="little")


def unpack_stream(data: Bytes, bits: int, n: int) -> Bytes:
    """``[..., ceil(n * bits / 8)]`` bytes -> ``[..., n]`` codes; the inverse of `pack_stream`."""
    check_bits(bits)
    if data.dtype != np.uint8 or data.shape[-1] != -(-n * bits // 8):
        raise InputError(
            "data",
            found=f"{data.dtype} [..., {data.shape[-1]}]",
            needed=f"uint8 [..., {-(-n * bits // 8)}]",
        )
    flat = np.unpackbits(data, axis=-1, count=n * bits, bitorder="little")
    spread = flat.reshape(*data.shape[:-1], n, bits)
    return np.packbits(spread, axis=-1, bitorder="little")[..., 0]


def _pack_planes(quads: Bytes, width: int) -> Bytes:
    """``[..., 8 quads, 16, 4]`` values of ``width`` bits -> ``[..., width * 64]`` line bytes."""
    planes = 8 // width
    split = quads.reshape(*quads.shape[:-3], planes, width, LINE_OUTS, 4)
    shifts = (np.arange(planes, dtype=np.uint8) * np.uint8(width))[:, None, None, None]
    merged: Bytes = np.bitwise_or.reduce(split << shifts, axis=-4)
    return merged.reshape(*quads.shape[:-3], width * LINE_OUTS * 4)


def _unpack_planes(lines: Bytes, width: int) -> Bytes:
    """``[..., width * 64]`` line bytes -> ``[..., 8 quads, 16, 4]``; inverse of `_pack_planes`."""
    planes = 8 // width
    steps = lines.reshape(*lines.shape[:-1], 1, width, LINE_OUTS, 4)
    shifts = (np.arange(planes, dtype=np.uint8) * np.uint8(width))[:, None, None, None]
    split = (steps >> shifts) & np.uint8((1 << width) - 1)
    return split.reshape(*lines.shape[:-1], _QUADS, LINE_OUTS, 4)


def pack_line(codes: Bytes, bits: int) -> Bytes:
    """``[..., R, C]`` codes -> ``[..., R * C * bits / 8]`` bytes ``[OUT/16][RED/32][step][16][4]``.

    R must be a multiple of 32 and C of 16. Widths 3, 5 and 6 hold, per block of 32 reductions, the
    2 / 4 / 4-bit lines first and the 1 / 1 / 2-bit lines after them.
    """
    codes = _codes(codes, bits)
    *lead, rows, cols = codes.shape
    if rows % LINE_REDS or cols % LINE_OUTS:
        raise InputError("codes", found=f"{rows} x {cols}", needed="multiples of 32 x 16")
    blocks = codes.reshape(-1, rows // LINE_REDS, _QUADS, 4, cols // LINE_OUTS, LINE_OUTS)
    blocks = blocks.transpose(0, 4, 1, 2, 5, 3)  # [lead, ob, rb, quad, 16 outs, 4 reds]
    main, extra = LINE_PLANES[bits]
    parts = [_pack_planes(blocks & np.uint8((1 << main) - 1), main)]
    if extra:
        parts.append(_pack_planes(blocks >> np.uint8(main), extra))
    return np.concatenate(parts, axis=-1).reshape(*lead, rows * cols * bits // 8)


def unpack_line(data: Bytes, bits: int, rows: int, cols: int) -> Bytes:
    """``[..., R * C * bits / 8]`` line bytes -> ``[..., R, C]`` codes; inverse of `pack_line`."""
    check_bits(bits)
    need = rows * cols * bits // 8
    if data.dtype != np.uint8 or data.shape[-1] != need:
        found = f"{data.dtype} [..., {data.shape[-1]}]"
        raise InputError("data", found=found, needed=f"uint8 [..., {need}]")
    lead = data.shape[:-1]
    blocks = data.reshape(-1, cols // LINE_OUTS, rows // LINE_REDS, bits * LINE_OUTS * 4)
    main, extra = LINE_PLANES[bits]
    cut = main * LINE_OUTS * 4
    codes = _unpack_planes(blocks[..., :cut], main)
    if extra:
        codes = codes | (_unpack_planes(blocks[..., cut:], extra) << np.uint8(main))
    return codes.transpose(0, 2, 3, 5, 1, 4).reshape(*lead, rows, cols)


def _record(data: NDArray[Any], layout: RecordLayout, name: str = "records") -> Bytes:
    if data.dtype != np.uint8 or data.shape[-1:] != (layout.nbytes,):
        raise InputError(
            name, found=f"{data.dtype} {data.shape}", needed=f"uint8 [..., {layout.nbytes}]"
        )
    return data


def stream_to_line(records: Bytes, layout: RecordLayout) -> Bytes:
    """``[..., nbytes]`` stream records -> the same records in the line layout (a new array)."""
    out = _record(records, layout).copy()
    codes = unpack_stream(records[..., : layout.code_bytes], layout.bits, layout.rows * layout.cols)
    tiles = codes.reshape(*records.shape[:-1], layout.rows, layout.cols)
    out[..., : layout.code_bytes] = pack_line(tiles, layout.bits)
    return out


def line_to_stream(records: Bytes, layout: RecordLayout) -> Bytes:
    """``[..., nbytes]`` line records -> the same records in the stream layout (a new array)."""
    out = _record(records, layout).copy()
    codes = unpack_line(
        records[..., : layout.code_bytes], layout.bits, layout.rows, layout.cols
    ).reshape(*records.shape[:-1], layout.rows * layout.cols)
    out[..., : layout.code_bytes] = pack_stream(codes, layout.bits)
    return out


def join(
    codes: Bytes, scale: Halves, zero: Halves, other: Halves, layout: RecordLayout, layout_id: str
) -> Bytes:
    """Codes uint8 ``[..., R, C]``, fp16 axes ``[..., R]``, ``[..., R]``, ``[..., C]`` -> records.

    Returns uint8 ``[..., nbytes]`` in the layout that ``layout_id`` names.
    """
    check_layout(layout_id)
    lead = codes.shape[:-2]
    if codes.shape[-2:] != (layout.rows, layout.cols):
        raise InputError("codes", found=codes.shape, needed=f"[..., {layout.rows}, {layout.cols}]")
    out = np.empty((*lead, layout.nbytes), np.uint8)
    if layout_id == LINE:
        out[..., : layout.code_bytes] = pack_line(codes, layout.bits)
    else:
        flat = codes.reshape(*lead, layout.rows * layout.cols)
        out[..., : layout.code_bytes] = pack_stream(flat, layout.bits)
    at = layout.scale_offset
    axes = (
        ("scale", scale, layout.rows),
        ("zero", zero, layout.rows),
        ("other", other, layout.cols),
    )
    for name, axis, n in axes:
        if axis.dtype != np.float16 or axis.shape != (*lead, n):
            needed = f"float16 {(*lead, n)}"
            raise InputError(name, found=f"{axis.dtype} {axis.shape}", needed=needed)
        out[..., at : at + 2 * n] = np.ascontiguousarray(axis, "<f2").view(np.uint8)
        at += 2 * n
    return out


def split(
    record: Bytes, layout: RecordLayout, layout_id: str
) -> tuple[Bytes, Halves, Halves, Halves]:
    """uint8 ``[..., nbytes]`` -> (codes ``[..., R, C]``, scale, zero, other); inverse of `join`."""
    check_layout(layout_id)
    _record(record, layout, "record")
    payload = record[..., : layout.code_bytes]
    if layout_id == STREAM:
        codes = unpack_stream(payload, layout.bits, layout.rows * layout.cols)
        codes = codes.reshape(*record.shape[:-1], layout.rows, layout.cols)
    else:
        codes = unpack_line(payload, layout.bits, layout.rows, layout.cols)

    def axis(start: int, stop: int) -> Halves:
        halves: Halves = np.ascontiguousarray(record[..., start:stop]).view("<f2")
        return halves

    return (
        codes,
        axis(layout.scale_offset, layout.zero_offset),
        axis(layout.zero_offset, layout.other_offset),
        axis(layout.other_offset, layout.nbytes),
    )
