"""Kernels against the reference: equal bytes, equal bits (codec.md 2, 4, 5, 5b, 8; F29, F31)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvkernels.bench.demo import TEXTS, capture
from kvkernels.cpu import reference
from kvkernels.cpu.columns import seal_workspace
from kvkernels.cpu.kernels import balance, codec
from kvkernels.cpu.kernels.jit import exact_kernel
from kvkernels.cpu.kernels.seal import quantise, write_axes
from kvkernels.errors import InputError, NonFiniteError
from kvkernels.records.layout import BITS, HEAD_DIMS, LINE, STREAM, HeadLayout, Side
from kvkernels.records.packing import line_to_stream, split


# Parts of kernels have no wrapper for Python; these do.
@exact_kernel
def axes_to_half(w, rows, cols, out):
    return write_axes(w, rows, cols, out, np.int64(0))


@exact_kernel
def codes_of(w, rows, cols, bits, codes):
    quantise(w, rows, cols, bits, codes)


WORK = seal_workspace()


def seal_status(rows: Any, side: Side, bits: int, out: Any) -> int:
    tile = np.ascontiguousarray(rows.T if side == Side.K else rows)  # as the stage keeps it
    return codec.seal_head(tile.view(np.uint16).reshape(-1), side == Side.V, bits, *WORK, out)


def gaussian(head_dim: int, seed: int = 0) -> Any:
    """Rows with channel and token scales, fp16 [128, D]: taken as rotated stage rows."""
    rng = np.random.default_rng(seed)
    channel, token = np.exp(rng.normal(0, 0.5, head_dim)), np.exp(rng.normal(0, 0.3, (128, 1)))
    return (rng.normal(0.2, 1, (128, head_dim)) * channel * token).astype(np.float16)


def patterns(head_dim: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shape = (128, head_dim)
    constant_rows = np.broadcast_to(np.linspace(-3, 3, 128)[:, None], shape)
    constant_channels = np.broadcast_to(np.linspace(-3, 3, head_dim), shape)
    one_hot = np.zeros(shape)
    one_hot[77, head_dim // 2 + 3] = -5
    huge = np.where(rng.random(shape) < 0.5, 65504.0, -65504.0)
    quiet_rows_huge = huge * np.where(np.arange(128) % 16 == 3, 1, 1e-6)[:, None]
    made = {
        "gaussian": gaussian(head_dim),
        "zero": np.zeros(shape),
        "minus_zero": -np.zeros(shape),
        "constant": np.full(shape, 1.2345),
        "constant_rows": constant_rows,
        "constant_channels": constant_channels,
        "one_hot": one_hot,
        "huge": huge,
        "quiet_rows_huge": quiet_rows_huge,
        "large_mean": 3000 + rng.normal(size=shape),
        "tiny": rng.normal(size=shape) * 1e-3,
        "subnormal": rng.normal(size=shape) * 1e-7,
        "integers": rng.integers(-3, 4, shape),
    }
    return {name: np.ascontiguousarray(x, np.float16) for name, x in made.items()}


def seal(rows: Any, side: Side, bits: int) -> Any:
    out = np.zeros(HeadLayout(side, bits, rows.shape[1]).nbytes, np.uint8)
    assert seal_status(rows, side, bits, out) == 0
    return out


def unseal(record: Any, side: Side, bits: int, head_dim: int) -> Any:
    out = np.empty((128, head_dim), np.float32)
    codec.decode_head(record, side == Side.V, bits, head_dim, out)
    return out


def assert_same(rows: Any, side: Side, bits: int) -> None:
    want = reference.encode(rows, side, bits, LINE, rotated=True)
    got = seal(rows, side, bits)
    assert np.array_equal(got, want)
    decoded = unseal(got, side, bits, rows.shape[1])
    expected = reference.decode(want, side, bits, rows.shape[1], LINE)
    assert np.isfinite(decoded).all()
    assert np.array_equal(decoded.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_codec9_published_bytes_equal_the_reference(head_dim: int, bits: int, side: Side) -> None:
    for seed in range(2):
        assert_same(gaussian(head_dim, seed), side, bits)


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("name", patterns(64))
def test_codec8_hostile_tiles_equal_the_reference(name: str, side: Side) -> None:
    for head_dim in (64, 256):
        for bits in (2, 3, 4, 8):
            assert_same(patterns(head_dim)[name], side, bits)


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("bits", BITS)
def test_codec9_published_bytes_on_real_rows(bits: int, side: Side) -> None:
    for text in TEXTS:  # real keys and values, shipped for the demo
        rows = getattr(capture(text).rows, side.lower())
        for group in range(3):
            x = rows[128 * group : 128 * (group + 1), group % rows.shape[1]]
            assert_same(reference.stage_rows(x), side, bits)


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("name", ["zero", "minus_zero", "constant", "integers"])
def test_codec8_zero_and_constant_rows_decode_exactly(name: str, side: Side) -> None:
    rows = patterns(128)[name]
    if name == "integers":  # one constant per quantiser row: tokens for V, channels for K
        rows = np.broadcast_to(rows[:1] if side == Side.K else rows[:, :1], rows.shape)
        rows = np.ascontiguousarray(rows)
    for bits in BITS:
        decoded = unseal(seal(rows, side, bits), side, bits, 128)
        if name == "constant":  # fp16(c / s) * fp16(s): exact up to the rounding of the axes
            assert np.allclose(decoded, rows, rtol=2e-3)
            assert len(np.unique(decoded)) == 1
        elif name == "integers":
            assert np.allclose(decoded, rows, rtol=2e-3)
            assert (decoded[rows == 0] == 0).all()
        else:
            assert (decoded.view(np.uint32) == 0).all()  # +0 everywhere


@pytest.mark.parametrize("side", list(Side))
def test_codec8_axes_beyond_fp16_are_shifted_not_infinite(side: Side) -> None:
    rows = patterns(128)["quiet_rows_huge"]
    for tile in (rows, np.ascontiguousarray(rows.T)):
        for bits in BITS:
            head = HeadLayout(side, bits, 128)
            _, scale, zero, other = split(seal(tile, side, bits), head.record, LINE)
            for axis in (scale, zero, other):
                assert np.isfinite(axis).all()
            error = np.abs(unseal(seal(tile, side, bits), side, bits, 128) - tile)
            assert error.max() <= 1.1 * 65504 / ((1 << bits) - 1)


def test_codec8_the_shift_happens_and_keeps_values() -> None:
    """A zero of 80 000 is no fp16; halved, with the other axis doubled, it decodes the same."""
    scale, zero = np.array([3.0], np.float32), np.array([-80_000.0], np.float32)
    other = np.array([0.75, 1.5], np.float32)
    s, z, o = reference._half_axes(scale, zero, other)
    assert (s[0], z[0], o[1]) == (1.5, -40_000.0, 3.0)
    with pytest.raises(InputError, match="zero"):
        reference._half_axes(scale, zero * np.float32(2), other)
    w, out = WORK[0], np.empty(8, np.uint8)
    w[balance.SCALE], w[balance.ZERO], w[balance.BC : balance.BC + 2] = scale[0], zero[0], other
    assert axes_to_half(w, 1, 2, out)
    assert out.tobytes() == np.concatenate((s, z, o)).tobytes()
    w[balance.ZERO] *= 2
    assert not axes_to_half(w, 1, 2, out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_codec8_nonfinite_rows_are_refused_by_both(bad: float) -> None:
    rows = gaussian(256)
    rows[5, 200] = bad
    out = np.zeros(HeadLayout(Side.K, 4, 256).nbytes, np.uint8)
    for side in Side:
        assert seal_status(rows, side, 4, out) == 1
    with pytest.raises(NonFiniteError, match=r"at \(72, 5\)"):
        reference.encode(rows, Side.K, 4, rotated=True)


def test_F29_5_a_record_does_not_depend_on_its_neighbours() -> None:
    """Sequence A's bytes are the same alone, beside B, and beside a B 100 times larger."""
    a, b = gaussian(256, 3), gaussian(256, 4)
    loud = (b.astype(np.float32) * 100).astype(np.float16)
    for side in Side:
        alone = seal(a, side, 4)
        for mate in (b, loud):
            seal(mate, side, 4)  # leaves its values in the workspace
            assert np.array_equal(seal(a, side, 4), alone)
            WORK[0].fill(np.nan)
            assert np.array_equal(seal(a, side, 4), alone)
    # Slices of one head are tiles of their own too.
    scaled = a.copy()
    scaled[:, 128:] = loud[:, 128:]
    half = HeadLayout(Side.K, 4, 256).record.nbytes
    assert np.array_equal(seal(scaled, Side.K, 4)[:half], seal(a, Side.K, 4)[:half])


@pytest.mark.parametrize("side", list(Side))
def test_F31_error_falls_with_every_bit(side: Side) -> None:
    rows = np.random.default_rng(5).normal(size=(128, 128)).astype(np.float16)
    errors = {}
    for bits in BITS:
        decoded = unseal(seal(rows, side, bits), side, bits, 128)
        errors[bits] = np.sqrt(np.mean((decoded - rows.astype(np.float64)) ** 2))
    for low, high in itertools.pairwise(BITS):
        assert errors[low] / errors[high] >= 1.6 ** (high - low)


@pytest.mark.parametrize("bits", BITS)
def test_F31_ramp_uses_all_codes_through_the_encoder(bits: int) -> None:
    ramp = np.linspace(-1, 1, 128, dtype=np.float32)
    noise = np.random.default_rng(6).permuted(np.tile(ramp, (128, 1)), axis=1)
    for side in Side:
        rows = (noise.T if side == Side.K else noise).astype(np.float16)
        head = HeadLayout(side, bits, 128)
        codes, *_ = split(seal(np.ascontiguousarray(rows), side, bits), head.record, LINE)
        assert len(np.unique(codes)) == 1 << bits


def test_codec5_half_rounds_away_from_zero_exactly() -> None:
    """Codes of x.5 go up; the largest float below one half stays at 0."""
    below = np.nextafter(np.float32(0.5), np.float32(0))
    tile = np.array([[0, below, 0.5, 1.5, 2.5, 3] + 10 * [0]], np.float32)
    ones, one = np.ones(16, np.float32), np.ones(1, np.float32)
    want = [0, 0, 1, 2, 3, 3] + 10 * [0]
    assert reference.quantise(tile, ones, one, 2)[0][0].tolist() == want
    even = reference.quantise(tile, ones, one, 2, "half_even")[0][0].tolist()
    assert even[:6] == [0, 0, 0, 2, 2, 3]
    w, codes = WORK[0], np.empty(16, np.uint8)
    w[:16], w[balance.BC : balance.BC + 16], w[balance.BR] = tile[0], 1, 1
    codes_of(w, 1, 16, 2, codes)
    assert codes.tolist() == want


def test_codec4_a_tie_goes_to_the_later_iterate() -> None:
    """A quiet checkerboard has imbalance 2 before and after: the scaled iterate must be kept."""
    sign = np.where(np.add.outer(np.arange(128), np.arange(128)) % 2 == 0, 1, -1)
    tile = (sign * 1e-4).astype(np.float16)
    floor = np.float32(np.exp(np.float64(np.float32(-0.3))))
    bc, br = reference.normalise(tile.astype(np.float32))
    assert (bc == floor).all()
    assert (br == floor).all()
    for side in Side:
        assert_same(tile, side, 4)


def test_codec4_the_identity_can_win() -> None:
    rng = np.random.default_rng(0)
    tile = (rng.normal(size=(128, 128)) * (rng.random((128, 128)) < 0.02)).astype(np.float16)
    bc, br = reference.normalise(tile.astype(np.float32))
    assert (bc == 1).all()
    assert (br == 1).all()
    last, _ = reference.normalise(tile.astype(np.float32), pick="last")
    assert (last != 1).any()
    for side in Side:
        assert_same(tile, side, 4)


def test_codec2_quantiser_sees_only_fp16_stage_rows() -> None:
    x = np.random.default_rng(9).normal(size=(128, 128)).astype(np.float32)
    staged = reference.stage_rows(x)
    for side in Side:
        direct = reference.encode(x, side, 4)
        assert np.array_equal(direct, reference.encode(staged, side, 4, rotated=True))
        assert np.array_equal(direct, seal(staged, side, 4))


@pytest.mark.parametrize("head_dim", [64, 512])
def test_codec5b_groups_are_heads_one_after_the_other(head_dim: int) -> None:
    heads = np.stack([gaussian(head_dim, seed) for seed in range(3)])
    for side in Side:
        head = HeadLayout(side, 3, head_dim)
        out = np.stack([seal(rows, side, 3) for rows in heads])
        rows = np.empty((3, 128, head_dim), np.float32)
        codec.decode_groups(out, side == Side.V, 3, head_dim, rows)
        for i in range(3):
            stream = line_to_stream(out[i].reshape(head.n_slices, -1), head.record).reshape(-1)
            want = reference.decode(stream, side, 3, head_dim, STREAM)
            assert np.array_equal(rows[i], want)
