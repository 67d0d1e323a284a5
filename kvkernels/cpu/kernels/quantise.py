"""Activations of a dot product with codes: a row times a record's axis, made anew for every record.

int8 has one scale per 32 values, int16 one per row, kept as two int8 halves because that is what
byte dot products take. ``MODES`` in ``dot.py`` says how the bytes lie.
"""

from numba import float32

from kvkernels.cpu.kernels.jit import inner
from kvkernels.cpu.kernels.simd import (
    fma,
    hmax,
    hsum,
    load,
    round_scaled,
    round_up_byte,
    splat,
    store,
    store_bytes,
    vabs,
    vmax,
    zero_unless_positive,
)

#: largest int16 magnitude whose high byte, rounded, still fits int8
_I16_MAX = float32(32512.0)
_I8_MAX = float32(127.0)
_I16_STEP, _I8_STEP = float32(1.0 / 32512.0), float32(1.0 / 127.0)
# Below this a row is taken as zero: its inverse would overflow, and it cannot matter next to a
# float32 sum.
_TINY = float32(1e-30)


@inner
def folded(x, at, axes, n, d, gated, z):
    """16 activations ``x * scale`` from position d on, and ``z`` plus ``x * zero`` (codec.md 6).

    axes: float32 [n scales, n zeros, ..]. ``n`` and ``d`` as in the callers below.

    ``gated``: x are probabilities, and a token nobody sees has x = 0; its axes must not turn that
    into NaN (B5).
    """
    value = load(x, at + d)
    w = value * load(axes, d)
    if gated:
        y = value * load(axes, n + d)
        return zero_unless_positive(w, value), z + zero_unless_positive(y, value)
    return w, fma(value, load(axes, n + d), z)


@inner
def activation_scale(top, narrow):
    """(inverse, scale) of activations up to ``top``, for int8 when ``narrow``, else for int16."""
    if top < _TINY:
        top = float32(0.0)
    limit, step = (_I8_MAX, _I8_STEP) if narrow else (_I16_MAX, _I16_STEP)
    return (limit / top if top > float32(0.0) else float32(0.0)), top * step


@inner
def fold_f32(x, at, axes, n, gated, out, out_at):
    """Activations in float32; returns sum(x * zero)."""
    z = splat(float32(0.0))
    for d in range(0, n, 16):
        w, z = folded(x, at, axes, n, d, gated, z)
        store(out, out_at + d, w)
    return hsum(z)


@inner
def fold_i8(x, at, axes, n, gated, middle, out, out_at, scales, scales_at):
    """Activations in int8, n a multiple of 32; returns sum(x * zero) and the rounding correction.

    Codes are nearly centred on their middle, so adding ``middle * (what rounding lost from the sum
    of the activations)`` to the dot product halves the error.
    """
    z, lost = splat(float32(0.0)), splat(float32(0.0))
    for b in range(n // 32):
        i = 32 * b
        a, z = folded(x, at, axes, n, i, gated, z)
        c, z = folded(x, at, axes, n, i + 16, gated, z)
        inverse, scale = activation_scale(hmax(vmax(vabs(a), vabs(c))), True)
        ra, ia = round_scaled(a, inverse)
        rc, ic = round_scaled(c, inverse)
        store_bytes(out, out_at + i, ia, ic, 0)
        scales[scales_at + b] = scale
        lost = lost + (a + c - splat(scale) * (ra + rc))
    return hsum(fma(splat(middle), lost, z))


@inner
def fold_i16(x, at, axes, n, gated, w, w_at, out, out_at, scales, scales_at):
    """Activations in int16, n high bytes then n low bytes; returns sum(x * zero).
    ``w`` is room for n.
    """
    z, largest = splat(float32(0.0)), splat(float32(0.0))
    for d in range(0, n, 16):
        a, z = folded(x, at, axes, n, d, gated, z)
        store(w, w_at + d, a)
        largest = vmax(vabs(a), largest)
    inverse, scales[scales_at] = activation_scale(hmax(largest), False)
    for d in range(0, n, 32):
        _, a = round_scaled(load(w, w_at + d), inverse)
        _, c = round_scaled(load(w, w_at + d + 16), inverse)
        # value = 256 * high + low with both signed: low is the low byte, high is rounded for it.
        store_bytes(out, out_at + d, round_up_byte(a), round_up_byte(c), 1)
        store_bytes(out, out_at + n + d, a, c, 0)
    return hsum(z)
