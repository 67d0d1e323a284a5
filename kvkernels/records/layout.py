"""Sizes and offsets of KVarN records: pure integers, standard library only (codec.md 1, 5, 5b).

One *record* is one side (K or V) of one *group* (128 consecutive tokens) of one *slice* (128
channels; 64 when head_dim is 64) of one KV head. Its bytes are the codes, then three fp16 axes:
``scale`` and ``zero`` (one per quantiser row) and ``other`` (one per quantiser column). The axes
sit at the same offsets in both layouts; only the order of the code bytes differs.

Every size and offset is in bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvkernels.errors import InputError

GROUP: Final = 128
"""Tokens of one group."""

BITS: Final = (2, 3, 4, 5, 6, 8)
"""Code widths of the format, in bits."""

HEAD_DIMS: Final = (64, 128, 256, 512)
"""Head dimensions that KVarN serves; others are refused (codec.md 1, semantics A2)."""

STREAM: Final = "stream"
"""Layout id: LSB-first bit stream of the row-major tile (state files, exchange; codec.md 5)."""

LINE: Final = "line"
"""Layout id: 64-byte lines of 16 outputs x 4 reductions (device memory; codec.md 5b)."""

LAYOUTS: Final = (STREAM, LINE)

LINE_OUTS: Final = 16
"""Outputs of one 64-byte line."""

LINE_REDS: Final = 32
"""Reductions of one line block."""

LINE_PLANES: Final = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
"""bits -> (main, extra) widths of a line block: code = main | extra << main width (codec.md 5b)."""

_AXIS_BYTES: Final = 2
_NAMES: Final = {f"kvarn{bits}": bits for bits in BITS}


class Side(StrEnum):
    """Which half of the cache a record holds; decides the tile's orientation (codec.md 3)."""

    K = "k"
    V = "v"


def parse_kvarn(name: str) -> int | None:
    """``"kvarn4"`` -> 4; ``None`` when ``name`` is not exactly the name of a KVarN width."""
    return _NAMES.get(name)


def check_bits(bits: int) -> None:
    """Raise `InputError` unless ``bits`` is a width of the format."""
    if bits not in BITS:
        raise InputError("bits", found=bits, needed=f"one of {BITS}")


def check_layout(layout_id: str) -> None:
    """Raise `InputError` unless ``layout_id`` names a record layout (F32)."""
    if layout_id not in LAYOUTS:
        raise InputError("layout", found=repr(layout_id), needed=f"one of {LAYOUTS}")


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """One record: ``side``, code width ``bits``, slice ``width`` in channels (64 or 128).

    Raises `InputError` naming the field for a side, width or bit count outside the format.
    """

    side: Side
    bits: int
    width: int

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.side not in tuple(Side):
            raise InputError("side", found=repr(self.side), needed="'k' or 'v'")
        if self.width not in (64, 128):
            raise InputError("width", found=self.width, needed="one of (64, 128)")

    @property
    def rows(self) -> int:
        """Quantiser rows R: channels for K, tokens for V. One (scale, zero) pair each."""
        return self.width if self.side == Side.K else GROUP

    @property
    def cols(self) -> int:
        """Quantiser columns C: tokens for K, channels for V. One ``other`` each."""
        return GROUP if self.side == Side.K else self.width

    @property
    def n_out(self) -> int:
        """Entries of the axis that attention's product keeps: token for K, channel for V."""
        return self.cols

    @property
    def n_red(self) -> int:
        """Entries of the axis that attention's product sums over: channel for K, token for V."""
        return self.rows

    @property
    def code_bytes(self) -> int:
        """Bytes of all codes; they start at offset 0."""
        return self.rows * self.cols * self.bits // 8

    @property
    def scale_offset(self) -> int:
        """First byte of the scale axis (rows x fp16)."""
        return self.code_bytes

    @property
    def zero_offset(self) -> int:
        """First byte of the zero axis (rows x fp16)."""
        return self.scale_offset + _AXIS_BYTES * self.rows

    @property
    def other_offset(self) -> int:
        """First byte of the other axis (cols x fp16)."""
        return self.zero_offset + _AXIS_BYTES * self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the record, a multiple of 64 so that records stay line-aligned."""
        return self.other_offset + _AXIS_BYTES * self.cols


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The records of one KV head, one group, one side: its slices back to back.

    Raises `InputError` naming the field for a ``bits`` or ``head_dim`` outside the format.
    """

    side: Side
    bits: int
    head_dim: int

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.side not in tuple(Side):
            raise InputError("side", found=repr(self.side), needed="'k' or 'v'")
        if self.head_dim not in HEAD_DIMS:
            raise InputError("head_dim", found=self.head_dim, needed=f"one of {HEAD_DIMS}")

    @property
    def slice_width(self) -> int:
        """Channels of one slice: 128, or 64 when head_dim is 64."""
        return min(self.head_dim, 128)

    @property
    def n_slices(self) -> int:
        """Records per head and group."""
        return self.head_dim // self.slice_width

    @property
    def record(self) -> RecordLayout:
        """The layout that every slice of this head shares."""
        return RecordLayout(self.side, self.bits, self.slice_width)

    @property
    def nbytes(self) -> int:
        """Bytes of all slices of one head and group."""
        return self.n_slices * self.record.nbytes

    def slice_offset(self, i: int) -> int:
        """First byte of slice ``i`` inside the head; raises `InputError` outside 0..n_slices-1."""
        if not 0 <= i < self.n_slices:
            raise InputError("slice", found=i, needed=f"0 <= slice < {self.n_slices}")
        return i * self.record.nbytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits per K or V element, axes included: 4.375 for 4-bit codes at 128 channels."""
        return 8 * self.nbytes / (GROUP * self.head_dim)
