"""Where the bits of a block lie: the table of types, and bytes <-> codes and scales.

A quantised block holds 32 consecutive values of one row: fp16 scale, fp16 minimum (``*_1`` types),
for 5 bits the 32 top bits (4 bytes, value j at bit j), then the codes. A byte of 4-bit codes holds
value j in its low half and value j + 16 in its high half. q8_0 stores signed bytes. Nothing here
computes a value; every function raises InputError on a wrong shape or dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkernels.errors import InputError, RequestError, did_you_mean

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]
Floats = NDArray[np.float32]
HALF_BLOCK = 16  # 4-bit codes pair up across the block, not with their neighbour


@dataclass(frozen=True, slots=True)
class BlockType:
    """One cache type: ``block`` values take ``nbytes`` bytes.

    ``bits`` is the code width, 0 for a float type. An unsigned code stands for
    ``(code - offset) * scale``, or for ``code * scale + minimum`` with ``has_min``.
    """

    name: str
    block: int
    nbytes: int
    bits: int = 0
    has_min: bool = False
    offset: int = 0

    @property
    def quantised(self) -> bool:
        """True for a type of codes and scales; False for f32, f16 and bf16."""
        return self.bits > 0

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of ``n`` values; InputError unless it is whole blocks, at least one."""
        if n < 1 or n % self.block:
            needed = f"a positive multiple of {self.block} for {self.name}"
            raise InputError("n", found=n, needed=needed)
        return n // self.block * self.nbytes


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockType("f32", 1, 4),
            BlockType("f16", 1, 2),
            BlockType("bf16", 1, 2),
            BlockType("q8_0", 32, 34, bits=8, offset=128),
            BlockType("q5_1", 32, 24, bits=5, has_min=True),
            BlockType("q5_0", 32, 22, bits=5, offset=16),
            BlockType("q4_1", 32, 20, bits=4, has_min=True),
            BlockType("q4_0", 32, 18, bits=4, offset=8),
        )
    }
)


def block_type(name: str, *, quantised: bool = False) -> BlockType:
    """The type of that name; RequestError with a suggestion for another, or for a float type when
    it must be ``quantised``.
    """
    valid = [kind.name for kind in BLOCK_TYPES.values() if kind.quantised or not quantised]
    if name not in valid:
        needed = f"one of {', '.join(valid)}"
        hint = did_you_mean(str(name), valid)
        raise RequestError("type", found=repr(name), needed=needed, hint=hint)
    return BLOCK_TYPES[name]


class Parts(NamedTuple):
    """A row taken apart: codes uint8 ``[..., n]`` in 0 .. 2^bits - 1, scales fp16 ``[..., n/32]``,
    and minima like the scales, or None where the type has none.
    """

    codes: Bytes
    scale: Halves
    minimum: Halves | None


def check_bytes(data: NDArray[Any], kind: BlockType, n: int) -> Bytes:
    """``data`` when it is uint8 ``[..., bytes of n values]``; else InputError."""
    need = kind.row_bytes(n)
    if data.dtype != np.uint8 or data.shape[-1:] != (need,):
        found = f"{data.dtype} {data.shape}"
        raise InputError("data", found=found, needed=f"uint8 [..., {need}] for {n} x {kind.name}")
    return data


def _halves(columns: Bytes) -> Halves:
    halves: Halves = np.ascontiguousarray(columns).view("<f2")[..., 0].astype(np.float16)
    return halves


def split(data: Bytes, type: str, n: int) -> Parts:
    """Quantised bytes ``[..., row bytes]`` -> codes, scales and minima; the inverse of `join`."""
    kind = block_type(type, quantised=True)
    lead = check_bytes(data, kind, n).shape[:-1]
    blocks = data.reshape(*lead, n // kind.block, kind.nbytes)
    at = 4 if kind.has_min else 2
    if kind.bits == 8:
        codes = blocks[..., at:] ^ np.uint8(0x80)  # signed byte + 128
    else:
        nibbles = blocks[..., -HALF_BLOCK:]
        codes = np.concatenate([nibbles & np.uint8(0xF), nibbles >> np.uint8(4)], axis=-1)
        if kind.bits == 5:
            top = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
            codes = codes | (top << np.uint8(4))
    minimum = _halves(blocks[..., 2:4]) if kind.has_min else None
    return Parts(codes.reshape(*lead, n), _halves(blocks[..., :2]), minimum)


def join(codes: Bytes, scale: Halves, minimum: Halves | None, type: str) -> Bytes:
    """Codes uint8 ``[..., n]``, fp16 scales and minima ``[..., n/32]`` (None where the type has no
    minima) -> bytes ``[..., row bytes]``; the inverse of `split`.
    """
    kind = block_type(type, quantised=True)
    if codes.dtype != np.uint8 or codes.ndim < 1:
        raise InputError("codes", found=f"{codes.dtype} {codes.shape}", needed="uint8 [..., n]")
    *lead, n = codes.shape
    need = kind.row_bytes(n)
    if codes.size and int(codes.max()) >= 1 << kind.bits:
        raise InputError("codes", found=int(codes.max()), needed=f"at most {(1 << kind.bits) - 1}")
    if (minimum is not None) != kind.has_min:
        found = "none" if minimum is None else "an array"
        needed = f"{'minima' if kind.has_min else 'none'} for {kind.name}"
        raise InputError("minimum", found=found, needed=needed)
    parts = []
    for name, half in (("scale", scale), ("minimum", minimum)):
        if half is None:
            continue
        shape = (*lead, n // kind.block)
        if half.dtype != np.float16 or half.shape != shape:
            found = f"{half.dtype} {half.shape}"
            raise InputError(name, found=found, needed=f"float16 {shape}")
        parts.append(np.ascontiguousarray(half, "<f2")[..., None].view(np.uint8))
    blocks = codes.reshape(*lead, n // kind.block, kind.block)
    if kind.bits == 8:
        parts.append(blocks ^ np.uint8(0x80))
    else:
        if kind.bits == 5:
            parts.append(np.packbits(blocks >> np.uint8(4), axis=-1, bitorder="little"))
        low = blocks & np.uint8(0xF)
        parts.append(low[..., :HALF_BLOCK] | (low[..., HALF_BLOCK:] << np.uint8(4)))
    return np.concatenate(parts, axis=-1).reshape(*lead, need)


def affine(scale: Halves, minimum: Halves | None, type: str) -> tuple[Floats, Floats]:
    """(scale, zero) in float32, so that ``code * scale + zero`` is the value for every type.

    Both terms are exact in float32, so the sum rounds once, as decoding does. A scale that
    overflowed to infinity gives NaN here for every code.
    """
    kind = block_type(type, quantised=True)
    wide = scale.astype(np.float32)
    if minimum is not None:
        return wide, minimum.astype(np.float32)
    return wide, wide * np.float32(-kind.offset)
