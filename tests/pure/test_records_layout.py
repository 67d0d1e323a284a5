"""Sizes and offsets of records (codec.md 1, 5; cases F31, F32)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvkernels.errors import InputError
from kvkernels.records.layout import (
    BITS,
    GROUP,
    HEAD_DIMS,
    LINE_PLANES,
    HeadLayout,
    RecordLayout,
    Side,
    parse_kvarn,
)

BYTES_128 = {2: 4864, 3: 6912, 4: 8960, 5: 11008, 6: 13056, 8: 17152}
BYTES_64_K = {2: 2560, 3: 3584, 4: 4608, 5: 5632, 6: 6656, 8: 8704}
BYTES_64_V = {2: 2688, 3: 3712, 4: 4736, 5: 5760, 6: 6784, 8: 8832}


@pytest.mark.parametrize("bits", BITS)
def test_codec5_record_bytes_are_those_of_the_format_document(bits: int) -> None:
    assert RecordLayout(Side.K, bits, 128).nbytes == BYTES_128[bits]
    assert RecordLayout(Side.V, bits, 128).nbytes == BYTES_128[bits]
    assert RecordLayout(Side.K, bits, 64).nbytes == BYTES_64_K[bits]
    assert RecordLayout(Side.V, bits, 64).nbytes == BYTES_64_V[bits]
    assert HeadLayout(Side.K, bits, 128).bits_per_element == bits + 0.375
    assert HeadLayout(Side.K, bits, 64).bits_per_element == bits + 0.5
    assert HeadLayout(Side.V, bits, 64).bits_per_element == bits + 0.625


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("bits", BITS)
def test_codec5_parts_follow_each_other_without_padding(bits: int, side: Side, width: int) -> None:
    layout = RecordLayout(side, bits, width)
    assert layout.code_bytes == GROUP * width * bits // 8 == layout.scale_offset
    assert layout.zero_offset - layout.scale_offset == 2 * layout.rows
    assert layout.other_offset - layout.zero_offset == 2 * layout.rows
    assert layout.nbytes - layout.other_offset == 2 * layout.cols
    assert layout.nbytes % 64 == 0
    assert layout.code_bytes % 64 == 0


def test_codec3_orientation_of_both_sides() -> None:
    k, v = RecordLayout(Side.K, 4, 64), RecordLayout(Side.V, 4, 64)
    assert (k.rows, k.cols) == (64, 128)  # channels x tokens
    assert (v.rows, v.cols) == (128, 64)  # tokens x channels
    assert (k.n_red, k.n_out) == (64, 128)  # K sums over channels and keeps tokens
    assert (v.n_red, v.n_out) == (128, 64)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("side", list(Side))
def test_codec1_head_is_its_slices_back_to_back(side: Side, head_dim: int) -> None:
    head = HeadLayout(side, 3, head_dim)
    assert head.slice_width * head.n_slices == head_dim
    assert head.slice_width == (64 if head_dim == 64 else 128)
    starts = [head.slice_offset(i) for i in range(head.n_slices)]
    assert starts == [i * head.record.nbytes for i in range(head.n_slices)]
    assert head.nbytes == starts[-1] + head.record.nbytes
    with pytest.raises(InputError, match="slice"):
        head.slice_offset(head.n_slices)


@pytest.mark.parametrize("bits", BITS)
def test_codec5b_planes_add_up_to_the_width(bits: int) -> None:
    main, extra = LINE_PLANES[bits]
    assert main + extra == bits
    assert 8 % main == 0
    assert extra == 0 or 8 % extra == 0


@pytest.mark.parametrize("bits", [0, 1, 7, 9, 16])
def test_F31_other_widths_are_refused_by_name(bits: int) -> None:
    with pytest.raises(InputError, match=f"bits: found {bits}; needed one of"):
        RecordLayout(Side.K, bits, 128)
    with pytest.raises(InputError, match="bits"):
        HeadLayout(Side.V, bits, 128)


@pytest.mark.parametrize("head_dim", [0, 32, 80, 96, 192, 384, 576])
def test_A2_other_head_dims_are_refused_with_the_list(head_dim: int) -> None:
    with pytest.raises(InputError, match=r"head_dim: found \d+; needed one of \(64, 128, 256, 512"):
        HeadLayout(Side.K, 4, head_dim)
    with pytest.raises(InputError, match="width"):
        RecordLayout(Side.K, 4, 96)


@pytest.mark.parametrize("bits", BITS)
def test_A1_names_of_body_types(bits: int) -> None:
    assert parse_kvarn(f"kvarn{bits}") == bits


@pytest.mark.parametrize("name", ["", "kvarn", "kvarn7", "kvarn44", "KVARN4", "kvarn 4", "q4_0"])
def test_A1_other_names_are_not_kvarn(name: str) -> None:
    assert parse_kvarn(name) is None


def test_layout_needs_the_standard_library_only() -> None:
    code = "import sys, kvkernels.records.layout; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
