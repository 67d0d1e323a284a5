"""Micro-kernels against NumPy: every width, row count, activation form and instruction set."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numba import float32, int64
from numpy.testing import assert_array_equal

from kvkernels.cpu.columns import ROW_BLOCKS
from kvkernels.cpu.entries import dot_address, matrix_address
from kvkernels.cpu.features import ISAS, best, missing
from kvkernels.cpu.kernels.dot import MODES, call_dot
from kvkernels.cpu.kernels.jit import kernel
from kvkernels.cpu.kernels.matrix import KINDS, call_matrix
from kvkernels.cpu.kernels.quantise import fold_i8, fold_i16
from kvkernels.cpu.probe import probe_cpu
from kvkernels.records.layout import BITS
from kvkernels.records.packing import pack_line

FEATURES = probe_cpu().features
HERE = [isa for isa in ISAS if not missing(isa, FEATURES)]


@kernel
def run(address, codes, act, scales, out, n_out, n_red):
    zero = int64(0)
    call_dot(address, codes, zero, act, zero, scales, zero, out, zero, n_out, n_red, zero)


@kernel
def int8_row(x, axes, out, scales):
    at, n = int64(0), int64(x.size)
    return fold_i8(x, at, axes, n, False, float32(1.0), out, at, scales, at)


@kernel
def int16_row(x, axes, out, scales):
    at, n = int64(0), int64(x.size)
    room = np.empty(x.size, np.float32)
    return fold_i16(x, at, axes, n, False, room, at, out, at, scales, at)


def ones_and_zeros(n):
    """Axes: a scale of 1 and a zero of 0 for n activations."""
    return np.repeat(np.array([1, 0], np.float32), n)


def activations(mode, rows, n_red, rng):
    """(bytes, scales, the values they stand for in float64), as quantise.py makes them."""
    x = rng.normal(size=(rows, n_red)).astype(np.float32)
    x *= np.exp(rng.normal(size=(rows, 1))).astype(np.float32)
    if mode == "f32":
        return x.view(np.uint8).reshape(-1), np.zeros(1, np.float32), x.astype(np.float64)
    size, n_scales = (n_red, n_red // 32) if mode == "i8" else (2 * n_red, 1)
    data = np.empty((rows, size), np.uint8)
    scales = np.empty((rows, n_scales), np.float32)
    for r in range(rows):
        fold = int8_row if mode == "i8" else int16_row
        fold(x[r], ones_and_zeros(n_red), data[r], scales[r])
    signed = data.view(np.int8).astype(np.float64)
    if mode == "i8":
        value = signed * np.repeat(scales, 32, 1)
    else:
        value = (256 * signed[:, :n_red] + signed[:, n_red:]) * scales
    limit = 1 / 127 if mode == "i8" else 1 / 32512
    assert np.abs(value - x).max() <= np.abs(x).max() * limit
    return data.reshape(-1), scales.reshape(-1), value


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", BITS)
def test_codec6_codes_times_activations(isa, mode, bits):
    rng = np.random.default_rng(bits)
    # K of 128 channels; K and V of a 64-channel head; K and V of one block of a standard type
    for n_out, n_red in ((128, 128), (128, 64), (64, 128), (128, 32), (32, 128)):
        codes = rng.integers(0, 1 << bits, (n_red, n_out)).astype(np.uint8)
        codes[:, 0], codes[:, 1] = 0, (1 << bits) - 1
        packed = pack_line(codes, bits)
        for rows in ROW_BLOCKS:
            data, scales, value = activations(mode, rows, n_red, rng)
            out = np.full(rows * n_out + 16, np.nan, np.float32)
            run(dot_address(bits, rows, mode, isa), packed, data, scales, out, n_out, n_red)
            assert np.isnan(out[-16:]).all()  # nothing behind the end was touched
            expected = value @ codes.astype(np.float64)
            # relative to what cancelled inside the sum, not to the sum
            size = np.abs(value) @ codes.astype(np.float64)
            found = out[:-16].reshape(rows, n_out)
            assert (np.abs(found - expected) <= 2e-6 * size + 1e-30).all()


@pytest.mark.parametrize("mode", ["i8", "i16"])
@pytest.mark.parametrize("bits", BITS)
def test_B7_every_instruction_set_gives_the_same_bits(mode, bits):
    rng = np.random.default_rng(1)
    packed = pack_line(rng.integers(0, 1 << bits, (128, 128)).astype(np.uint8), bits)
    data, scales, _ = activations(mode, 4, 128, rng)
    results = []
    for isa in HERE:
        out = np.empty(4 * 128, np.float32)
        run(dot_address(bits, 4, mode, isa), packed, data, scales, out, 128, 128)
        results.append(out)
    assert len(results) >= 2 or best(FEATURES) == "generic"
    for other in results[1:]:
        assert_array_equal(results[0], other)


@pytest.mark.parametrize("bits", BITS)
def test_extreme_codes_and_activations_do_not_overflow(bits):
    codes = np.full((128, 128), (1 << bits) - 1, np.uint8)
    packed = pack_line(codes, bits)
    for mode in ("i8", "i16"):
        for value in (127, -128):
            size = 128 if mode == "i8" else 256
            high = 127 if value > 0 else -127
            row = np.full(size, value, np.int8)
            row[:128] = value if mode == "i8" else high
            act = 128 * (value if mode == "i8" else 256 * high + value)
            scales = np.ones(4, np.float32)
            for isa in HERE:
                out = np.empty(128, np.float32)
                run(
                    dot_address(bits, 1, mode, isa),
                    packed,
                    row.view(np.uint8),
                    scales,
                    out,
                    128,
                    128,
                )
                assert (out == np.float32(act * ((1 << bits) - 1))).all(), (isa, mode, value)


def test_codec6_zero_and_tiny_rows_are_zero_and_keep_their_constant_part():
    axes = ones_and_zeros(128)
    axes[128:] = 3
    for value in (0.0, 1e-38):
        x = np.full(128, value, np.float32)
        data, scales = np.full(256, 9, np.uint8), np.full(4, 9, np.float32)
        assert int16_row(x, axes, data, scales) == pytest.approx(3 * 128 * value)
        assert not data.any()
        assert scales[0] == 0
        assert int8_row(x, axes, data[:128], scales) == pytest.approx((3 + 1) * 128 * value)
        assert not scales.any()


@kernel
def times(address, m, act, out, n_out, n_red, m_stride):
    zero = int64(0)
    call_matrix(address, m, zero, act, zero, out, zero, n_out, n_red, m_stride, n_red, n_out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROW_BLOCKS)
def test_rows_times_matrix(kind, rows):
    rng = np.random.default_rng(3)
    dtype = {"float32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
    for n_out, n_red in ((64, 1), (128, 77), (256, 128), (32, 5), (96, 40)):
        m = rng.normal(size=(n_red, n_out + 5)).astype(np.float32).astype(dtype)
        act = rng.normal(size=(rows, n_red)).astype(np.float32)
        out = np.full(rows * n_out + 16, np.nan, np.float32)
        data = m.reshape(-1).view(f"u{m.itemsize}") if m.itemsize == 2 else m.reshape(-1)
        address = matrix_address(rows, KINDS.index(kind), best(FEATURES))
        times(address, data, act.reshape(-1), out, n_out, n_red, n_out + 5)
        assert np.isnan(out[-16:]).all()
        expected = act.astype(np.float64) @ m[:, :n_out].astype(np.float64)
        np.testing.assert_allclose(out[:-16].reshape(rows, n_out), expected, rtol=1e-5, atol=1e-5)
