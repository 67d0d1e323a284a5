"""How 128 tokens of one KV head lie in device memory when the cache type is a standard one.

GGML's blocks run along one token's channels; a kernel wants many tokens, or many channels, side by
side. A tile holds the same codes, scales and minima in another order and in as many bytes, so both
directions are pure permutations (float V rows alone are padded, to whole cache lines of 64 values).

==========  ==============================================  =======================================
part        K                                               V
==========  ==============================================  =======================================
float       ``[D, 128]``: tokens side by side               ``[128, padded D]``, padding 0
codes       per block of 32 channels a line tile            per block a line tile
            (OUT = 128 tokens, RED = 32 channels)           (OUT = 32 channels, RED = 128 tokens)
scales      fp16 ``[D / 32, 128]``                          the same
minima      the same, for ``*_1`` types                     the same, for ``*_1`` types
==========  ==============================================  =======================================

Codes are unsigned, as `kvkernels.quants.split` gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.errors import InputError
from kvkernels.quants.blocks import (
    BlockType,
    Bytes,
    Halves,
    block_type,
    check_bytes,
    join,
    split,
)
from kvkernels.records.layout import GROUP, Side
from kvkernels.records.packing import pack_line, unpack_line

#: values of a block, and what head_dim must be a multiple of for every type (semantics A2)
BLOCK = 32
#: V rows of a float type are padded to a multiple of this
PADDED_TO = 64


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Where things lie in a tile: offsets in bytes from its start."""

    side: Side
    type: str
    head_dim: int

    def __post_init__(self) -> None:
        block_type(self.type)
        if self.head_dim < 1 or self.head_dim % BLOCK:
            needed = f"a positive multiple of {BLOCK}"
            raise InputError("head_dim", found=self.head_dim, needed=needed)

    @property
    def kind(self) -> BlockType:
        """The type's row of the table."""
        return block_type(self.type)

    @property
    def blocks(self) -> int:
        """Blocks of 32 channels."""
        return self.head_dim // BLOCK

    @property
    def padded_dim(self) -> int:
        """Elements from one V row to the next; for float types only."""
        return -(-self.head_dim // PADDED_TO) * PADDED_TO

    @property
    def code_bytes(self) -> int:
        """Bytes of one line tile of codes: 32 channels x 128 tokens."""
        return GROUP * BLOCK * self.kind.bits // 8

    @property
    def scale_offset(self) -> int:
        """Where the scales begin; the codes are at 0."""
        return self.blocks * self.code_bytes

    @property
    def minimum_offset(self) -> int:
        """Where the minima begin, or would."""
        return self.scale_offset + 2 * self.blocks * GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of a tile, a multiple of 64."""
        if not self.kind.quantised:
            wide = self.head_dim if self.side is Side.K else self.padded_dim
            return wide * GROUP * self.kind.nbytes
        return self.minimum_offset + (2 * self.blocks * GROUP if self.kind.has_min else 0)

    def pack(self, rows: Bytes) -> Bytes:
        """GGML rows uint8 ``[..., 128, row bytes]`` -> uint8 ``[..., nbytes]`` (a new array)."""
        check_bytes(rows, self.kind, self.head_dim)
        if rows.ndim < 2 or rows.shape[-2] != GROUP:
            raise InputError("rows", found=rows.shape, needed=f"[..., {GROUP}, row bytes]")
        lead = rows.shape[:-2]
        out = np.zeros((*lead, self.nbytes), np.uint8)
        if not self.kind.quantised:
            word = np.dtype(f"u{self.kind.nbytes}")
            values = np.ascontiguousarray(rows).view(word)
            tile = out.view(word)
            if self.side is Side.K:
                tile[...] = _flat(np.swapaxes(values, -1, -2))
            else:
                tile.reshape(*lead, GROUP, -1)[..., : self.head_dim] = values
            return out
        codes, scale, minimum = split(rows, self.type, self.head_dim)
        tiles = self._tiles(codes)
        out[..., : self.scale_offset] = _flat(pack_line(tiles, self.kind.bits))
        self._axis(out, self.scale_offset)[...] = np.swapaxes(scale, -1, -2)
        if minimum is not None:
            self._axis(out, self.minimum_offset)[...] = np.swapaxes(minimum, -1, -2)
        return out

    def unpack(self, tiles: Bytes) -> Bytes:
        """uint8 ``[..., nbytes]`` -> GGML rows uint8 ``[..., 128, row bytes]``; undoes `pack`."""
        if tiles.dtype != np.uint8 or tiles.shape[-1:] != (self.nbytes,):
            found = f"{tiles.dtype} {tiles.shape}"
            raise InputError("tiles", found=found, needed=f"uint8 [..., {self.nbytes}]")
        tiles, lead = np.ascontiguousarray(tiles), tiles.shape[:-1]
        if not self.kind.quantised:
            words = tiles.view(f"u{self.kind.nbytes}")
            if self.side is Side.K:
                values = np.swapaxes(words.reshape(*lead, self.head_dim, GROUP), -1, -2)
            else:
                values = words.reshape(*lead, GROUP, self.padded_dim)[..., : self.head_dim]
            return np.ascontiguousarray(values).view(np.uint8)
        shape = (BLOCK, GROUP) if self.side is Side.K else (GROUP, BLOCK)
        lines = tiles[..., : self.scale_offset].reshape(*lead, self.blocks, self.code_bytes)
        codes = self._codes(unpack_line(lines, self.kind.bits, *shape))
        scale = _halves(self._axis(tiles, self.scale_offset))
        has_min = self.kind.has_min
        minimum = _halves(self._axis(tiles, self.minimum_offset)) if has_min else None
        return join(codes, scale, minimum, self.type)

    def _tiles(self, codes: Bytes) -> Bytes:
        """``[..., 128, D]`` -> ``[..., D / 32, RED, OUT]``."""
        blocks = np.swapaxes(codes.reshape(*codes.shape[:-1], self.blocks, BLOCK), -2, -3)
        return np.swapaxes(blocks, -1, -2) if self.side is Side.K else blocks

    def _codes(self, tiles: Bytes) -> Bytes:
        """The inverse of `_tiles`."""
        blocks = np.swapaxes(tiles, -1, -2) if self.side is Side.K else tiles
        tokens = np.swapaxes(blocks, -2, -3)
        return np.ascontiguousarray(tokens).reshape(*tokens.shape[:-2], self.head_dim)

    def _axis(self, tiles: Bytes, at: int) -> Halves:
        """The fp16 values ``[..., D / 32, 128]`` at an offset of contiguous tiles, a view."""
        halves: Halves = tiles.view("<f2")[..., at // 2 : at // 2 + self.blocks * GROUP]
        return halves.reshape(*tiles.shape[:-1], self.blocks, GROUP)


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    """The last two dimensions as one."""
    return np.ascontiguousarray(values).reshape(*values.shape[:-2], -1)


def _halves(axis: Halves) -> Halves:
    """``[..., D / 32, 128]`` -> ``[..., 128, D / 32]``, in this machine's byte order."""
    halves: Halves = np.swapaxes(axis, -1, -2).astype(np.float16)
    return halves
