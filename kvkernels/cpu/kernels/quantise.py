"""Activations in integers (codec.md 5c): the row of a dot product, quantised anew for every record.

int8 has one scale per 32 values, int16 one per row, kept as two int8 halves because that is what
byte dot products take. ``MODES`` in ``dot.py`` says how the bytes lie.
"""

from numba import float32

from kvkernels.cpu.kernels.jit import kernel
from kvkernels.cpu.kernels.simd import (
    high_byte,
    hmax,
    hsum,
    load,
    round_scaled,
    splat,
    store_bytes,
    vabs,
    vmax,
)

F32, I8, I16 = 0, 1, 2
#: largest int16 magnitude whose high byte, rounded, still fits int8
_I16_MAX = float32(32512.0)
_I8_MAX = float32(127.0)
_I16_STEP, _I8_STEP = float32(1.0 / 32512.0), float32(1.0 / 127.0)
# Below this a row is taken as zero: its inverse would overflow, and it cannot matter next to a
# float32 sum.
_TINY = float32(1e-30)


@kernel
def quantise_i8(x, at, n, out, out_at, scales, scale_at):
    """int8 of ``x[at : at + n]``, n a multiple of 32; returns what rounding lost from the sum of
    the row.

    Codes are nearly centred on their middle, so adding ``middle * lost`` to the dot product halves
    the error.
    """
    lost = splat(float32(0.0))
    for b in range(n // 32):
        i = at + 32 * b
        a, c = load(x, i), load(x, i + 16)
        top = hmax(vmax(vabs(a), vabs(c)))
        if top < _TINY:
            top = float32(0.0)
        inverse = _I8_MAX / top if top > float32(0.0) else float32(0.0)
        ra, ia = round_scaled(a, inverse)
        rc, ic = round_scaled(c, inverse)
        store_bytes(out, out_at + 32 * b, ia)
        store_bytes(out, out_at + 32 * b + 16, ic)
        scale = top * _I8_STEP
        scales[scale_at + b] = scale
        lost = lost + (a + c - splat(scale) * (ra + rc))
    return hsum(lost)


@kernel
def quantise_i16(x, at, n, out, out_at, scales, scale_at):
    """int16 of ``x[at : at + n]`` as n high bytes followed by n low bytes; n a multiple of 16."""
    largest = splat(float32(0.0))
    for i in range(0, n, 16):
        largest = vmax(vabs(load(x, at + i)), largest)
    top = hmax(largest)
    if top < _TINY:
        top = float32(0.0)
    inverse = _I16_MAX / top if top > float32(0.0) else float32(0.0)
    for i in range(0, n, 16):
        _, value = round_scaled(load(x, at + i), inverse)
        store_bytes(out, out_at + i, high_byte(value))
        # value - 256 * high has the same low byte as value
        store_bytes(out, out_at + n + i, value)
    scales[scale_at] = top * _I16_STEP
