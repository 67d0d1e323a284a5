"""Values <-> bytes of the standard cache types, as GGML's reference functions define them.

All arithmetic is float32, one rounding per operation: a C compiler that contracts ``x * id + 8.5``
into one fused operation, and SIMD code for q8_0 that rounds ties to even, may give a neighbouring
code where a value lies exactly between two. Codes come from the float32 scale, bytes hold the fp16
one: a scale may overflow to infinity or vanish to zero, and then so do the decoded values.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvkernels.errors import InputError, NonFiniteError
from kvkernels.quants.blocks import (
    BlockType,
    Bytes,
    Floats,
    block_type,
    check_bytes,
    join,
    split,
)

FLOAT_DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def encode(rows: Floats, type: str) -> Bytes:
    """Float32 rows ``[..., n]`` -> uint8 ``[..., row bytes]`` (a new array).

    f16 and bf16 round to nearest even; NaN stays NaN, with a payload of its own. Raises InputError
    on another dtype or a row that is no whole number of blocks, NonFiniteError where a quantised
    type meets NaN or infinity: it has no code for them.
    """
    kind = block_type(type)
    if rows.dtype != np.float32 or rows.ndim < 1:
        raise InputError("rows", found=f"{rows.dtype} {rows.shape}", needed="float32 [..., n]")
    *lead, n = rows.shape
    need = kind.row_bytes(n)
    # Overflow, a zero scale and a vanishing one are all defined below or by the format.
    with np.errstate(all="ignore"):
        if not kind.quantised:
            values = np.ascontiguousarray(rows.astype(FLOAT_DTYPES[kind.name]))
            return _little(values).view(np.uint8).reshape(*lead, need)
        if not np.isfinite(rows).all():
            at = tuple(int(i) for i in np.argwhere(~np.isfinite(rows))[0])
            raise NonFiniteError("rows", found=f"{rows[at]} at {at}", needed="finite values")
        blocks = rows.reshape(*lead, n // kind.block, kind.block)
        if kind.has_min:
            scale, low, codes = _from_minimum(blocks, kind)
            minimum = low.astype(np.float16)
        else:
            scale, codes = (_signed if kind.bits == 8 else _from_peak)(blocks, kind)
            minimum = None
        return join(codes.reshape(rows.shape), scale.astype(np.float16), minimum, kind.name)


def decode(data: Bytes, type: str, n: int) -> Floats:
    """uint8 ``[..., row bytes]`` -> float32 ``[..., n]`` (a new array); InputError on wrong bytes.

    An infinite scale gives infinities, and NaN for the code that stands for zero.
    """
    kind = block_type(type)
    lead = check_bytes(data, kind, n).shape[:-1]
    with np.errstate(all="ignore"):
        if not kind.quantised:
            words = np.ascontiguousarray(data).view(f"<u{kind.nbytes}")
            native = words.astype(f"u{kind.nbytes}").view(FLOAT_DTYPES[kind.name])
            floats: Floats = native.astype(np.float32).reshape(*lead, n)
            return floats
        codes, scale, minimum = split(data, kind.name, n)
        blocks = codes.reshape(*lead, n // kind.block, kind.block).astype(np.float32)
        wide = scale.astype(np.float32)[..., None]
        if minimum is None:
            values = (blocks - np.float32(kind.offset)) * wide
        else:
            values = blocks * wide + minimum.astype(np.float32)[..., None]
        return values.reshape(*lead, n)


def _little(values: NDArray[Any]) -> NDArray[Any]:
    words = values.view(f"u{values.dtype.itemsize}")
    return words.astype(words.dtype.newbyteorder("<"))


def _pick(blocks: Floats, index: NDArray[np.intp]) -> Floats:
    """One value per block, where the index says: ``[..., 32]``, ``[...]`` -> ``[...]``."""
    picked: Floats = np.take_along_axis(blocks, index[..., None], axis=-1)[..., 0]
    return picked


def _inverse(scale: Floats) -> Floats:
    return np.where(scale != 0, np.float32(1) / scale, np.float32(0))[..., None]


def _whole(values: Floats, top: int) -> Bytes:
    """Truncated towards zero, at most ``top``.

    A scale below 2^-128 has no finite inverse. The infinities and NaN of such a block become 0, as
    C code gives on x86 (elsewhere a cast may saturate). The stored scale is 0 then, and so are the
    decoded values.
    """
    known = np.where(np.isfinite(values), values, np.float32(0))
    return np.minimum(np.trunc(known), np.float32(top)).astype(np.uint8)


def _from_peak(blocks: Floats, kind: BlockType) -> tuple[Floats, Bytes]:
    # The value of largest magnitude, the first of equals, gets the lowest code with its sign: the
    # range of codes has one more on that side.
    index = np.abs(blocks).argmax(axis=-1)
    peak = _pick(blocks, index)
    peak = np.where(peak == 0, np.float32(0), peak)  # a block of -0.0 has the scale of +0.0: -0.0
    scale = peak / np.float32(-kind.offset)
    shifted = blocks * _inverse(scale) + np.float32(kind.offset + 0.5)
    return scale, _whole(shifted, (1 << kind.bits) - 1)


def _from_minimum(blocks: Floats, kind: BlockType) -> tuple[Floats, Floats, Bytes]:
    top = (1 << kind.bits) - 1
    # Not min() and max(): of -0.0 and +0.0 the first one counts, and their difference has a sign.
    low, high = _pick(blocks, blocks.argmin(axis=-1)), _pick(blocks, blocks.argmax(axis=-1))
    scale = (high - low) / np.float32(top)
    shifted = (blocks - low[..., None]) * _inverse(scale) + np.float32(0.5)
    return scale, low, _whole(shifted, top)


def _signed(blocks: Floats, kind: BlockType) -> tuple[Floats, Bytes]:
    scale = np.abs(blocks).max(axis=-1) / np.float32(kind.offset - 1)
    scaled = (blocks * _inverse(scale)).astype(np.float64)
    # Half away from zero. In float64, because the float32 below 0.5 plus 0.5 would round up to 1.
    whole = np.trunc(scaled + np.copysign(0.5, scaled))
    whole = np.where(np.isfinite(whole), whole, 0.0)
    return scale, (whole + kind.offset).astype(np.uint8)
