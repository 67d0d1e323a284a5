"""Standard cache types: bytes as GGML writes them (rule A1), against gguf and against vectors."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvkernels.errors import InputError, NonFiniteError, RequestError
from kvkernels.op import STANDARD_TYPES
from kvkernels.quants import BLOCK_TYPES, affine, block_type, decode, encode, join, split

QUANTISED = [kind.name for kind in BLOCK_TYPES.values() if kind.quantised]
WITH_OFFSET = [name for name in QUANTISED if not BLOCK_TYPES[name].has_min]
WITH_MINIMUM = [name for name in QUANTISED if BLOCK_TYPES[name].has_min]
F32 = np.float32


def oracle_encode(rows: Any, name: str) -> Any:
    with np.errstate(all="ignore"):
        data = gguf.quants.quantize(rows, GGMLQuantizationType[name.upper()])
    return np.ascontiguousarray(data).view(np.uint8)


def oracle_decode(data: Any, name: str) -> Any:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, GGMLQuantizationType[name.upper()])


def rows_of(kind: str, n: int = 128, count: int = 400) -> Any:
    """Float32 [count, n] without a negative zero (see the tests on signed zeros for those)."""
    rng = np.random.default_rng(20)
    shape = (count, n)
    rows = {
        "normal": lambda: rng.normal(size=shape),
        "heavy_tailed": lambda: rng.standard_cauchy(size=shape),
        "zero": lambda: np.zeros(shape),
        "constant": lambda: np.broadcast_to(rng.normal(size=(count, 1)) * 100, shape),
        "tiny": lambda: rng.normal(size=shape) * 1e-30,
        "subnormal_scale_f16": lambda: rng.normal(size=shape) * 1e-6,
        "tie_heavy": lambda: rng.integers(-16, 17, shape) / 2,
        "tie_heavy_127": lambda: np.where(
            np.arange(n) % 32 == 5, 127, rng.integers(-254, 255, shape) / 2
        ),
        "tie_heavy_positive": lambda: rng.integers(0, 61, shape) / 4,
        "scale_over_f16": lambda: rng.normal(size=shape) * 1e8,
        "range_over_f32": lambda: rng.uniform(-3.3e38, 3.3e38, shape),
        "one_outlier": lambda: np.where(np.arange(n) % 32 == 31, -1e3, rng.normal(size=shape)),
    }[kind]()
    return (rows + 0.0).astype(F32) + F32(0)


INPUTS = [
    "normal",
    "heavy_tailed",
    "zero",
    "constant",
    "tiny",
    "subnormal_scale_f16",
    "tie_heavy",
    "tie_heavy_127",
    "tie_heavy_positive",
    "scale_over_f16",
    "range_over_f32",
    "one_outlier",
]


def halves(*values: float) -> list[int]:
    return list(np.array(values, "<f2").tobytes())


# the table


def test_A1_the_table_has_every_standard_type_in_order() -> None:
    assert tuple(BLOCK_TYPES) == STANDARD_TYPES
    assert all(kind.name == name for name, kind in BLOCK_TYPES.items())


@pytest.mark.parametrize("name", STANDARD_TYPES)
def test_A1_sizes_are_those_of_gguf(name: str) -> None:
    kind = BLOCK_TYPES[name]
    sizes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    assert (kind.block, kind.nbytes) == sizes
    assert kind.row_bytes(128) == 128 // kind.block * kind.nbytes


@pytest.mark.parametrize("n", [0, -32, 16, 33])
def test_A2_a_row_is_whole_blocks(n: int) -> None:
    with pytest.raises(InputError, match=f"n: found {n}; needed a positive multiple of 32"):
        BLOCK_TYPES["q4_0"].row_bytes(n)
    assert BLOCK_TYPES["f16"].row_bytes(33) == 66


def test_A1_an_unknown_type_is_refused_with_a_suggestion() -> None:
    with pytest.raises(RequestError, match=r"found 'q8'.*did you mean 'q8_0'"):
        block_type("q8")
    with pytest.raises(RequestError, match="found 'f16'; needed one of q8_0, q5_1"):
        split(np.zeros(2, np.uint8), "f16", 1)


# vectors computed by hand from the format


def test_q4_0_vector() -> None:
    # Peak -8 first, so scale = -8 / -8 = 1; codes are value + 8.5 cut off, at most 15.
    row = np.zeros(32, F32)
    row[:6] = [-8, 8, 7, 0.5, -0.5, 0.49]
    row[16:19] = [1, -1, -7.51]
    expected = [*halves(1), 0x90, 0x7F, 0x0F, 0x89, 0x88, 0x88, *[0x88] * 10]
    assert encode(row, "q4_0").tolist() == expected
    values = decode(encode(row, "q4_0"), "q4_0", 32)
    assert values[[0, 1, 2, 3, 4, 16, 17, 18]].tolist() == [-8, 7, 7, 1, 0, 1, -1, -8]


def test_q4_0_the_first_of_equal_peaks_gives_the_sign() -> None:
    row = np.zeros(32, F32)
    row[[3, 9]] = [4, -4]
    assert encode(row, "q4_0")[:2].tolist() == halves(-0.5)
    assert encode(-row + F32(0), "q4_0")[:2].tolist() == halves(0.5)


def test_q5_0_vector() -> None:
    # Peak 16 first, so scale = -1; codes are 16.5 - value cut off; top bits lie apart.
    row = np.zeros(32, F32)
    row[:3] = [16, -16, 15]
    row[31] = 2
    top = [0b11111010, 0xFF, 0xFF, 0b01111111]  # values 0 (code 0), 2 (code 1), 31 (code 14)
    expected = [*halves(-1), *top, 0x00, 0x0F, 0x01, *[0x00] * 12, 0xE0]
    assert encode(row, "q5_0").tolist() == expected


def test_q4_1_vector() -> None:
    row = np.full(32, 2, F32)
    row[:3] = [17, 2.5, 2.49]
    row[31] = 9
    expected = [*halves(1, 2), 0x0F, 0x01, 0x00, *[0x00] * 12, 0x70]
    assert encode(row, "q4_1").tolist() == expected
    assert decode(encode(row, "q4_1"), "q4_1", 32)[[0, 1, 2, 31]].tolist() == [17, 3, 2, 9]


def test_q5_1_vector() -> None:
    row = np.full(32, -1, F32)
    row[0], row[17] = 30, 15
    expected = [*halves(1, -1), 0b1, 0, 0b10, 0, 0x0F, 0x00, *[0x00] * 14]
    assert encode(row, "q5_1").tolist() == expected


def test_q8_0_vector_rounds_half_away_from_zero() -> None:
    row = np.zeros(32, F32)
    row[:7] = [127, 0.5, -0.5, 1.5, -2.5, np.nextafter(F32(0.5), F32(0)), -127]
    codes = [127, 1, 255, 2, 253, 0, 129]
    assert encode(row, "q8_0").tolist() == [*halves(1), *codes, *[0] * 25]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("q8_0", [*halves(0.0), *[0] * 32]),
        ("q4_0", [*halves(-0.0), *[0x88] * 16]),
        ("q5_0", [*halves(-0.0), *[0xFF] * 4, *[0] * 16]),
        ("q4_1", [*halves(0.0, 0.0), *[0] * 16]),
        ("q5_1", [*halves(0.0, 0.0), *[0] * 4, *[0] * 16]),
    ],
)
def test_a_zero_block(name: str, block: list[int]) -> None:
    assert encode(np.zeros(32, F32), name).tolist() == block
    # The C code starts from a peak of +0 that no zero beats. gguf takes -0.0 from the block.
    if name in WITH_OFFSET:
        assert encode(np.full(32, -0.0, F32), name).tolist() == block
    assert not decode(np.array(block, np.uint8), name, 32).any()


@pytest.mark.parametrize("name", WITH_MINIMUM)
@pytest.mark.parametrize("first", [0.0, -0.0])
def test_the_first_zero_is_the_minimum(name: str, first: float) -> None:
    row = np.where(np.arange(32) % 2, F32(-first), F32(first))
    # Smallest and largest value are both the first element: their difference is +0.
    assert encode(row, name)[:4].tolist() == halves(0.0, first)


@pytest.mark.parametrize("name", QUANTISED)
def test_signed_zeros_differ_from_gguf_in_sign_bits_only(name: str) -> None:
    rng = np.random.default_rng(3)
    rows = np.where(rng.random((100, 64)) < 0.3, F32(-0.0), rng.normal(size=(100, 64)).astype(F32))
    rows[:50] = np.abs(rows[:50])
    rows[rng.random(rows.shape) < 0.2] = -0.0
    ours, theirs = (split(f(rows, name), name, 64) for f in (encode, oracle_encode))
    assert np.array_equal(ours.codes, theirs.codes)
    assert np.array_equal(ours.scale, theirs.scale)  # compares -0.0 and 0.0 as equal
    if ours.minimum is not None:
        assert np.array_equal(ours.minimum, theirs.minimum)


@pytest.mark.parametrize(("name", "top"), [("q4_0", 8), ("q5_0", 16), ("q8_0", 127)])
def test_a_scale_beyond_fp16_is_infinite_and_the_codes_are_as_usual(name: str, top: int) -> None:
    row = np.zeros(32, F32)
    row[:2] = [-1e6 * top, 5e5 * top]
    data = encode(row, name)
    assert data[:2].tolist() == halves(np.inf)
    usual = encode(row / F32(1e6), name)
    assert data[2:].tolist() == usual[2:].tolist()
    values = decode(data, name, 32)
    assert values[0] == -np.inf
    assert np.isnan(values[2])


@pytest.mark.parametrize("name", QUANTISED)
def test_a_scale_below_fp16_vanishes(name: str) -> None:
    row = np.linspace(1e-12, 2e-12, 32, dtype=F32)
    data = encode(row, name)
    assert not (np.abs(data[:2].view("<f2")) > 0)
    assert not decode(data, name, 32).any()


@pytest.mark.parametrize("name", QUANTISED)
def test_a_scale_without_a_finite_inverse_gives_codes_of_zero(name: str) -> None:
    # A cast of infinity differs between CPUs, so gguf is no oracle here.
    row = np.linspace(-1e-39, 1e-39, 32, dtype=F32)
    data = encode(row, name)
    at = 4 if BLOCK_TYPES[name].has_min else 2
    assert not data[at:].any()
    assert not decode(data, name, 32).any()


@pytest.mark.parametrize("name", WITH_MINIMUM)
def test_a_range_beyond_float32_is_an_infinite_scale_and_codes_of_zero(name: str) -> None:
    row = np.linspace(-3e38, 3e38, 32, dtype=F32)
    data = encode(row, name)
    assert data[:4].tolist() == halves(np.inf, -np.inf)
    assert not data[4:].any()


# gguf as the independent oracle


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", QUANTISED)
def test_A1_encode_is_gguf_byte_for_byte(name: str, inputs: str) -> None:
    rows = rows_of(inputs)
    assert np.array_equal(encode(rows, name), oracle_encode(rows, name))


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_A1_float_types_are_gguf_byte_for_byte(name: str, inputs: str) -> None:
    rows = rows_of(inputs, n=40)
    data = encode(rows, name)
    assert np.array_equal(data, oracle_encode(rows, name))
    assert np.array_equal(decode(data, name, 40), oracle_decode(data, name), equal_nan=True)


@pytest.mark.parametrize("name", QUANTISED)
def test_A1_decode_of_any_bytes_is_gguf_bit_for_bit(name: str) -> None:
    shape = (5000, BLOCK_TYPES[name].row_bytes(64))
    data = np.random.default_rng(4).integers(0, 256, shape, dtype=np.uint8)
    ours, theirs = decode(data, name, 64), oracle_decode(data, name)
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    known = ~np.isnan(ours)
    assert np.array_equal(ours.view(np.uint32)[known], theirs.view(np.uint32)[known])


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    ulp = 2.0**-7
    rows = np.array([1 + ulp / 2, 1 + 1.5 * ulp, -1 - ulp / 2, 3.4e38, -0.0, np.inf, 1e-45], F32)
    back = [1, 1 + 2 * ulp, -1, np.inf, -0.0, np.inf, 0]
    assert decode(encode(rows, "bf16"), "bf16", 7).tolist() == back
    assert np.signbit(decode(encode(rows, "bf16"), "bf16", 7)[4])
    words = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF], np.uint32)  # would round to infinity
    assert np.isnan(decode(encode(words.view(F32), "bf16"), "bf16", 3)).all()
    assert np.isnan(decode(encode(words.view(F32), "f16"), "f16", 3)).all()


@given(words=hnp.arrays(np.uint32, 16))
def test_bf16_is_gguf_for_every_float_but_nan_payloads(words: Any) -> None:
    rows = words.view(F32)
    ours, theirs = (f(rows, "bf16").view(np.uint16) for f in (encode, oracle_encode))
    known = ~np.isnan(rows)
    assert np.array_equal(ours[known], theirs[known])
    assert np.isnan(decode(ours.view(np.uint8), "bf16", 16)[~known]).all()


# codes and scales apart


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("name", QUANTISED)
def test_split_and_join_are_inverse_for_any_bytes(name: str, lead: tuple[int, ...]) -> None:
    kind = BLOCK_TYPES[name]
    shape = (*lead, kind.row_bytes(96))
    data = np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)
    parts = split(data, name, 96)
    assert parts.codes.shape == (*lead, 96)
    assert parts.scale.shape == (*lead, 3)
    assert (parts.minimum is not None) is kind.has_min
    assert np.array_equal(join(*parts, name), data)


@pytest.mark.parametrize("name", QUANTISED)
def test_split_gives_every_code_at_its_place(name: str) -> None:
    top = (1 << BLOCK_TYPES[name].bits) - 1
    codes = np.random.default_rng(6).integers(0, top + 1, (4, 64), dtype=np.uint8)
    codes[0, :2] = [0, top]
    half = np.ones((4, 2), np.float16)
    minimum = half if BLOCK_TYPES[name].has_min else None
    data = join(codes, half, minimum, name)
    assert np.array_equal(split(data, name, 64).codes, codes)
    # gguf reads the same codes out of the bytes: with scale 1, values are codes less a constant.
    shift = 1 if BLOCK_TYPES[name].has_min else -BLOCK_TYPES[name].offset
    assert np.array_equal(oracle_decode(data, name), codes.astype(F32) + shift)


@pytest.mark.parametrize("inputs", ["normal", "heavy_tailed", "subnormal_scale_f16", "constant"])
@pytest.mark.parametrize("name", QUANTISED)
def test_code_times_scale_plus_zero_is_the_value(name: str, inputs: str) -> None:
    data = encode(rows_of(inputs), name)
    codes, half, minimum = split(data, name, 128)
    scale, zero = affine(half, minimum, name)
    assert scale.dtype == zero.dtype == codes.reshape(400, 4, 32).astype(F32).dtype == F32
    finite = np.isfinite(half).repeat(32, -1)
    blocks = codes.reshape(400, 4, 32).astype(F32)
    with np.errstate(invalid="ignore"):
        values = (blocks * scale[..., None] + zero[..., None]).reshape(400, 128)
    assert np.array_equal(values[finite], decode(data, name, 128)[finite])


@pytest.mark.parametrize("name", QUANTISED)
def test_the_error_is_at_most_half_a_step_or_one_at_the_short_end(name: str) -> None:
    kind, rows = BLOCK_TYPES[name], rows_of("normal")
    data = encode(rows, name)
    scale = np.abs(split(data, name, 128).scale.astype(F32)).repeat(32, -1)
    error = np.abs(decode(data, name, 128) - rows)
    # The range of q4_0 and q5_0 ends one code short on the side away from the peak. 1.02: the
    # fp16 scale and minimum.
    steps = 1.0 if name in ("q4_0", "q5_0") else 0.5
    assert (error <= scale * (steps * 1.02 + 2.0**-11 * (1 << kind.bits))).all()


@given(
    rows=hnp.arrays(F32, (2, 32), elements=st.floats(-1e4, 1e4, width=32)),
    name=st.sampled_from(QUANTISED),
)
def test_rows_are_encoded_alone(rows: Any, name: str) -> None:
    both = encode(rows, name)
    assert np.array_equal(both[1], encode(rows[1], name))
    assert np.array_equal(encode(rows.reshape(64), name), both.reshape(-1))


def test_inputs_may_be_strided_and_are_not_changed() -> None:
    wide = rows_of("normal", n=256)
    rows = wide[::2, ::2]
    before = rows.copy()
    for name in STANDARD_TYPES:
        data = encode(rows, name)
        assert np.array_equal(data, encode(before, name))
        padded = np.zeros((200, 2 * data.shape[-1]), np.uint8)
        padded[:, ::2] = data
        again = decode(padded[:, ::2], name, 128)
        assert np.array_equal(again, decode(data, name, 128))
        again[:] = 0  # a new array, also for f32
        assert np.array_equal(encode(rows, name), data)
    assert np.array_equal(rows, before)


# refusals


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_type_refuses_what_it_has_no_code_for(name: str, bad: float) -> None:
    rows = np.zeros((2, 64), F32)
    rows[1, 40] = bad
    with pytest.raises(NonFiniteError, match=r"at \(1, 40\); needed finite values"):
        encode(rows, name)


def test_wrong_shapes_and_dtypes_are_named() -> None:
    with pytest.raises(InputError, match="rows: found float64"):
        encode(np.zeros(32), "q4_0")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rows: found float32"):
        encode(F32(1), "f16")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="n: found 48; needed a positive multiple of 32 for q5_1"):
        encode(np.zeros(48, F32), "q5_1")
    with pytest.raises(
        InputError, match=r"data: found uint8 \(17,\).*\[\.\.\., 18\] for 32 x q4_0"
    ):
        decode(np.zeros(17, np.uint8), "q4_0", 32)
    with pytest.raises(InputError, match="data: found int8"):
        split(np.zeros(18, np.int8), "q4_0", 32)
    codes, half = np.zeros((2, 32), np.uint8), np.ones((2, 1), np.float16)
    with pytest.raises(InputError, match="codes: found 16; needed at most 15"):
        join(codes + np.uint8(16), half, None, "q4_0")
    with pytest.raises(InputError, match="codes: found int64"):
        join(codes.astype(np.int64), half, None, "q4_0")
    with pytest.raises(InputError, match="minimum: found an array; needed none for q4_0"):
        join(codes, half, half, "q4_0")
    with pytest.raises(InputError, match="minimum: found none; needed minima for q4_1"):
        join(codes, half, None, "q4_1")
    with pytest.raises(InputError, match="scale: found float32"):
        join(codes, half.astype(F32), None, "q4_0")
    with pytest.raises(InputError, match=r"minimum: found float16 \(1,\)"):
        join(codes, half, half[0], "q5_1")
