"""The SIMD vocabulary, lane by lane, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import float32, int64
from numpy.testing import assert_array_equal

from kvkernels.cpu.kernels import simd
from kvkernels.cpu.kernels.jit import exact_kernel, kernel

N = 16
RNG = np.random.default_rng(7)
A = RNG.normal(size=N).astype(np.float32)
B = RNG.normal(size=N).astype(np.float32)
C = RNG.normal(size=N).astype(np.float32)


@exact_kernel
def binary(kind, a, b, out):
    x, y = simd.load(a, int64(0)), simd.load(b, int64(0))
    if kind == 0:
        simd.store(out, int64(0), x + y)
    elif kind == 1:
        simd.store(out, int64(0), x - y)
    elif kind == 2:
        simd.store(out, int64(0), x * y)
    elif kind == 3:
        simd.store(out, int64(0), x / y)
    elif kind == 4:
        simd.store(out, int64(0), simd.vmax(x, y))
    elif kind == 5:
        simd.store(out, int64(0), simd.vmin(x, y))
    elif kind == 6:
        simd.store(out, int64(0), simd.vabs(x))
    else:
        simd.store(out, int64(0), simd.zero_unless_positive(x, y))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (0, A + B),
        (1, A - B),
        (2, A * B),
        (3, A / B),
        (4, np.maximum(A, B)),
        (5, np.minimum(A, B)),
        (6, np.abs(A)),
        (7, np.where(B > 0, A, 0)),
    ],
)
def test_every_lane_of_an_operation(kind, expected):
    out = np.empty(N, np.float32)
    binary(kind, A, B, out)
    assert_array_equal(out, expected.astype(np.float32))


@exact_kernel
def fused(a, b, c, out):
    x = simd.fma(simd.load(a, int64(0)), simd.load(b, int64(0)), simd.load(c, int64(0)))
    simd.store(out, int64(0), x)


def test_fma_rounds_once():
    out = np.empty(N, np.float32)
    fused(A, B, C, out)
    exact = (A.astype(np.float64) * B + C).astype(np.float32)
    assert_array_equal(out, exact)
    assert (out != A * B + C).any()  # else this test could not tell


@exact_kernel
def reductions(a, halves, out):
    x = simd.load(a, int64(0))
    out[0], out[1], out[2] = simd.hsum(x), simd.hmax(x), simd.first(x)
    simd.store(out, int64(16), simd.load_half(halves, int64(3)))
    simd.store(out, int64(32), simd.iota(int64(-5)))
    simd.store(out, int64(48), simd.splat(float32(2.5)))


def test_reductions_loads_and_constants():
    halves = RNG.normal(size=40).astype(np.float16)
    out = np.zeros(64, np.float32)
    reductions(A, halves.view(np.uint16), out)
    tree = A.copy()
    for half in (8, 4, 2, 1):
        tree = tree + np.roll(tree, -half)
    assert out[0] == tree[0]
    assert out[1] == A.max()
    assert out[2] == A[0]
    assert_array_equal(out[16:32], halves[3:19].astype(np.float32))
    assert_array_equal(out[32:48], np.arange(-5, 11))
    assert_array_equal(out[48:64], 2.5)


@exact_kernel
def hidden(a, first, low, high, out):
    x = simd.where_between(simd.load(a, int64(0)), first, low, high, float32(-7.0))
    simd.store(out, int64(0), x)


@pytest.mark.parametrize(
    ("first", "low", "high"), [(0, 0, 16), (0, 3, 9), (32, 40, 41), (0, 9, 3), (0, -5, 0)]
)
def test_B5_hidden_lanes_drop_their_bits(first, low, high):
    poisoned = A.copy()
    lane = np.arange(first, first + N)
    inside = (lane >= low) & (lane < high)
    poisoned[~inside] = np.nan
    out = np.empty(N, np.float32)
    hidden(poisoned, first, low, high, out)
    assert_array_equal(out, np.where(inside, A, -7))


@kernel
def powers(x, out):
    for i in range(0, x.size, 16):
        simd.store(out, i, simd.exp2(simd.load(x, i)))


def test_exp2_error_and_edges():
    x = RNG.uniform(-126.5, 126.9, 1 << 14).astype(np.float32)
    x[:8] = [0, 1, -1, -126, 126, 0.5, -0.5, 10]
    out = np.empty_like(x)
    powers(x, out)
    assert np.abs(out / np.exp2(x.astype(np.float64)) - 1).max() < 4e-7
    assert_array_equal(out[:5], np.exp2(x[:5]))
    edge = np.array([-np.inf, -127, -200, -3e38] * 4, np.float32)
    powers(edge, out[:16])
    assert_array_equal(out[:16], 0)


@kernel
def rounded(x, scale, values, low, high):
    value, bits = simd.round_scaled(simd.load(x, int64(0)), scale)
    simd.store(values, int64(0), value)
    high_bits = simd.round_up_byte(bits)
    simd.store_bytes(low, int64(0), bits, high_bits, 0)
    simd.store_bytes(high, int64(0), high_bits, bits, 1)


def test_round_scaled_splits_int16_into_signed_bytes():
    x = np.array([-32512, 32512, 0, 127, 128, 129, -128, -129, 255, 256, 1.5, 2.5, -0.5, 7, 8, 9])
    values = np.empty(N, np.float32)
    low, high = np.empty(2 * N, np.uint8), np.empty(2 * N, np.uint8)
    rounded(x.astype(np.float32), np.float32(1), values, low, high)
    assert_array_equal(values, np.round(x))
    signed = [part.view(np.int8).astype(int) for part in (low, high)]
    assert_array_equal(256 * signed[1][:N] + signed[0][:N], np.round(x))
    # the second vector's bytes come after the first's
    assert_array_equal(low[N:], low[:N] + np.uint8(128))
    assert_array_equal(high[N:].view(np.int8), np.floor(np.round(x) / 256))
