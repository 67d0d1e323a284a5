"""Numba kernels for new rows: the finite check and the rotation into the stage (codec.md 2, 8).

They run on every step. Bits equal ``reference.rotate`` in fp32: no fast maths, and every butterfly
is the same pair of operations, whatever order the strides are visited in.
"""

import math

import numpy as np

from kvkernels.cpu.kernels.half import float_to_half
from kvkernels.cpu.kernels.jit import exact_kernel, exact_leaf

_ROOT_64, _ROOT_128 = np.float32(0.125), np.float32(1 / math.sqrt(128))
_ROOT_2, _HALF = np.float32(1 / math.sqrt(2)), np.float32(0.5)
_EXPONENT = np.uint32(0x7F800000)


@exact_kernel
def first_nonfinite(x):
    """Index of the first NaN or infinity in fp32 ``x [n]``, or -1."""
    n = x.shape[0]
    bits = x.view(np.uint32)
    for start in range(0, n, 1024):
        part = bits[start : min(start + 1024, n)]
        bad = np.uint32(0)
        for i in range(part.shape[0]):  # counted, not tested one by one: the loop vectorises
            bad += np.uint32((part[i] & _EXPONENT) == _EXPONENT)
        if bad:
            for i in range(part.shape[0]):
                if (part[i] & _EXPONENT) == _EXPONENT:
                    return start + i
    return -1


@exact_leaf
def _top(x, top):
    bits = x.view(np.uint32)
    for i in range(bits.shape[0]):
        top = max(top, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
    return top


@exact_kernel
def largest_bits(x, y, z):
    """Largest magnitude in three fp32 arrays ``[n]`` as its bits: ordered like the values, and NaN
    above infinity.
    """
    return _top(z, _top(y, _top(x, np.uint32(0))))


@exact_leaf
def rotate_row(x, y, d):
    """One row: fp32 ``x [d]`` -> ``y [d]`` (may not alias)."""
    width = min(d, 128)
    # Strides 1 and 2 together: groups of four lanes, which the compiler turns into shuffles.
    for i in range(0, d, 4):
        a, b = x[i] + x[i + 1], x[i] - x[i + 1]
        c, e = x[i + 2] + x[i + 3], x[i + 2] - x[i + 3]
        y[i], y[i + 1], y[i + 2], y[i + 3] = a + c, b + e, a - c, b - e
    for base in range(0, d, 16):  # strides 4 and 8
        for i in range(base, base + 4):
            a, b = y[i] + y[i + 4], y[i] - y[i + 4]
            c, e = y[i + 8] + y[i + 12], y[i + 8] - y[i + 12]
            y[i], y[i + 4], y[i + 8], y[i + 12] = a + c, b + e, a - c, b - e
    if width == 128:
        for base in range(0, d, 128):
            z = y[base : base + 128]
            for i in range(16):  # strides 16, 32 and 64, and the scale
                a0, a1 = z[i] + z[i + 16], z[i] - z[i + 16]
                a2, a3 = z[i + 32] + z[i + 48], z[i + 32] - z[i + 48]
                a4, a5 = z[i + 64] + z[i + 80], z[i + 64] - z[i + 80]
                a6, a7 = z[i + 96] + z[i + 112], z[i + 96] - z[i + 112]
                b0, b1, b2, b3 = a0 + a2, a1 + a3, a0 - a2, a1 - a3
                b4, b5, b6, b7 = a4 + a6, a5 + a7, a4 - a6, a5 - a7
                z[i] = (b0 + b4) * _ROOT_128
                z[i + 16] = (b1 + b5) * _ROOT_128
                z[i + 32] = (b2 + b6) * _ROOT_128
                z[i + 48] = (b3 + b7) * _ROOT_128
                z[i + 64] = (b0 - b4) * _ROOT_128
                z[i + 80] = (b1 - b5) * _ROOT_128
                z[i + 96] = (b2 - b6) * _ROOT_128
                z[i + 112] = (b3 - b7) * _ROOT_128
    else:
        for i in range(16):  # strides 16 and 32, and the scale
            a, b = y[i] + y[i + 16], y[i] - y[i + 16]
            c, e = y[i + 32] + y[i + 48], y[i + 32] - y[i + 48]
            y[i], y[i + 16] = (a + c) * _ROOT_64, (b + e) * _ROOT_64
            y[i + 32], y[i + 48] = (a - c) * _ROOT_64, (b - e) * _ROOT_64
    if d == 256:  # Hadamard across slices, one butterfly per in-slice channel
        for i in range(128):
            a, b = y[i], y[i + 128]
            y[i], y[i + 128] = (a + b) * _ROOT_2, (a - b) * _ROOT_2
    elif d == 512:
        for i in range(128):
            a, b = y[i] + y[i + 128], y[i] - y[i + 128]
            c, e = y[i + 256] + y[i + 384], y[i + 256] - y[i + 384]
            y[i], y[i + 128] = (a + c) * _HALF, (b + e) * _HALF
            y[i + 256], y[i + 384] = (a - c) * _HALF, (b - e) * _HALF


@exact_kernel
def rotate_rows(x, out):
    """fp32 ``x [rows, D]`` -> rotated fp32 ``out [rows, D]``, D in 64, 128, 256, 512; no alias."""
    d = x.shape[1]
    for r in range(x.shape[0]):
        rotate_row(x[r], out[r], d)


@exact_kernel
def rotate_rows_to_half(x, out):
    """fp32 ``x [rows, D]`` -> stage rows: rotated, then fp16 bits, uint16 ``out [rows, D]``."""
    d = x.shape[1]
    row = np.empty(d, np.float32)
    for r in range(x.shape[0]):
        rotate_row(x[r], row, d)
        half = out[r]
        for i in range(d):
            half[i] = float_to_half(row[i])
