"""Entries ``cpu/commit`` (rotate, stage, seal) and ``cpu/materialize``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import CommitCall, GroupWrite, MaterializeCall
from kvkernels.cpu.kernels.codec import rotate_rows, rotate_rows_to_half, seal_head, seal_workspace
from kvkernels.cpu.pool import ThreadPool
from kvkernels.cpu.scratch import Scratch
from kvkernels.cpu.window import materialize_head
from kvkernels.records.layout import GROUP, HeadLayout, Side

Halves = NDArray[np.uint16]


def commit(call: CommitCall, scratch: Scratch, pool: ThreadPool) -> None:
    """Write staged rows and records of every group in ``call.writes``;
    one group's tiles are transient at a time.
    """
    layer, buffers = call.layer, call.buffers
    sides = [
        (call.k, buffers.k_exact, layer.n_kv_head, Side.K, layer.k_bits, buffers.k_records),
        (call.v, buffers.v_exact, layer.n_kv_head, Side.V, layer.v_bits, buffers.v_records),
    ]
    if call.q is not None and buffers.q_exact is not None:
        sides.append((call.q, buffers.q_exact, layer.n_head, Side.K, None, None))
    for write in call.writes:
        for rows, exact, n_head, side, bits, records in sides:
            # K and its queries lie [D, 128], so that a product over channels reads tokens side by
            # side.
            by_channel = side is Side.K
            blocks = exact.reshape(n_head, -1, *_tile_shape(layer.head_dim, by_channel))
            tiles = _stage(write, rows, blocks, by_channel, scratch)
            if write.slot >= 0 and records is not None:
                assert bits is not None
                nbytes = HeadLayout(side, bits, layer.head_dim).nbytes
                target = records.reshape(n_head, -1, nbytes)[:, write.slot]
                _seal(tiles, side, bits, target, pool)


def _tile_shape(dim: int, by_channel: bool) -> tuple[int, int]:
    return (dim, GROUP) if by_channel else (GROUP, dim)


def _stage(
    write: GroupWrite,
    rows: NDArray[np.float32],
    blocks: Halves,
    by_channel: bool,
    scratch: Scratch,
) -> Halves:
    """Rotate the new rows, round them to fp16, put them into their block;
    returns the tiles of all heads.
    """
    n_head, dim = rows.shape[1:]
    source = rows[write.source : write.source + write.rows].reshape(-1, dim)
    half = scratch.get("rotated_rows", source.shape, np.uint16)
    rotate_rows_to_half(source, half)
    if write.block >= 0:
        tiles = blocks[:, write.block]
    else:
        tiles = scratch.get("tiles", (n_head, *_tile_shape(dim, by_channel)), np.uint16)
    tokens = tiles.transpose(0, 2, 1) if by_channel else tiles
    if write.row and write.base != write.block:
        base = blocks[:, write.base]
        tokens[:, : write.row] = (base.transpose(0, 2, 1) if by_channel else base)[:, : write.row]
    new = half.reshape(write.rows, n_head, dim).transpose(1, 0, 2)
    tokens[:, write.row : write.row + write.rows] = new
    return tiles


def _seal(
    tiles: Halves, side: Side, bits: int, target: NDArray[np.uint8], pool: ThreadPool
) -> None:
    failed: list[int] = []

    def work(start: int, stop: int) -> None:
        work = seal_workspace()
        for h in range(start, stop):
            if seal_head(tiles[h].reshape(-1), side is Side.V, bits, *work, target[h]):
                failed.append(h)

    pool.ranges(work, len(tiles))
    # Finite fp16 rows always have finite axes (codec.md section 8); rows are checked before they
    # get here.
    assert not failed, f"axes of KV heads {failed} left the fp16 range"


def materialize(call: MaterializeCall) -> None:
    """Decode record slots of every KV head to float32 rows."""
    for head in range(call.layer.n_kv_head):
        materialize_head(
            call.layer, call.buffers, call.slots, head, call.k_out[head], call.v_out[head]
        )
        if not call.rotated:
            for rows in (call.k_out[head], call.v_out[head]):
                rotate_rows(rows.copy(), rows)
