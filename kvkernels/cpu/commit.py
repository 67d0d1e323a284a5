"""Entries ``cpu/commit``, ``cpu/commit_aware`` (rotate, stage, seal) and ``cpu/materialize``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import CommitCall, GroupWrite, LayerBuffers, MaterializeCall
from kvkernels.cpu import reference
from kvkernels.cpu.kernels.aware import (
    add_moment,
    aware_workspace,
    factor_moment,
    seal_keys,
    seal_value,
)
from kvkernels.cpu.kernels.codec import (
    rotate_rows,
    rotate_rows_to_half,
    seal_head,
    seal_workspace,
)
from kvkernels.cpu.pool import ThreadPool
from kvkernels.cpu.scratch import Scratch
from kvkernels.cpu.window import materialize_head
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP, HeadLayout, Side

Halves = NDArray[np.uint16]
F64 = NDArray[np.float64]
#: seal KV head ``h`` of a group into its record; a status that is not 0 is a failure
Seal = Callable[[int], int]


def commit(call: CommitCall, scratch: Scratch, pool: ThreadPool) -> None:
    """Write staged rows and records of every group in ``call.writes``;
    one group's tiles are transient at a time.
    """
    layer, buffers = call.layer, call.buffers
    for write in call.writes:
        queries = None
        if call.q is not None:
            # Without blocks (an engine's own memory) the queries pass through a transient tile.
            exact = np.empty(0, np.uint16) if buffers.q_exact is None else buffers.q_exact
            blocks = _blocks(exact, layer.n_head, layer.head_dim, by_channel=True)
            queries = _stage(write, call.q, blocks, True, scratch, "query_tiles")
        for side, rows, exact, records in (
            (Side.K, call.k, buffers.k_exact, buffers.k_records),
            (Side.V, call.v, buffers.v_exact, buffers.v_records),
        ):
            # K and its queries lie [D, 128], so that a product over channels reads tokens side by
            # side; the quantiser takes both sides as they lie.
            by_channel = side is Side.K
            blocks = _blocks(exact, layer.n_kv_head, layer.head_dim, by_channel=by_channel)
            tiles = _stage(write, rows, blocks, by_channel, scratch, "tiles")
            if write.slot < 0:
                continue
            bits = layer.k_bits if by_channel else layer.v_bits
            assert bits is not None
            nbytes = HeadLayout(side, bits, layer.head_dim).nbytes
            target = records.reshape(layer.n_kv_head, -1, nbytes)[:, write.slot]
            if layer.encoder == "published":
                seal = _published(tiles, side, bits, target)
            elif side is Side.V:
                seal = _aware_value(tiles, bits, target)
            else:
                factors = _moment_factors(layer, buffers)
                seal = _aware_keys(layer, tiles, queries, factors, target, write.group > 0)
            _over_heads(seal, layer.n_kv_head, pool)


def _blocks(exact: Any, n_head: int, dim: int, *, by_channel: bool) -> Halves:
    blocks: Halves = exact.reshape(n_head, -1, *_tile_shape(dim, by_channel))
    return blocks


def _tile_shape(dim: int, by_channel: bool) -> tuple[int, int]:
    return (dim, GROUP) if by_channel else (GROUP, dim)


def _stage(
    write: GroupWrite,
    rows: NDArray[np.float32],
    blocks: Halves,
    by_channel: bool,
    scratch: Scratch,
    name: str,
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
        tiles = scratch.get(name, (n_head, *_tile_shape(dim, by_channel)), np.uint16)
    tokens = tiles.transpose(0, 2, 1) if by_channel else tiles
    if write.row and write.base != write.block:
        base = blocks[:, write.base]
        tokens[:, : write.row] = (base.transpose(0, 2, 1) if by_channel else base)[:, : write.row]
    new = half.reshape(write.rows, n_head, dim).transpose(1, 0, 2)
    tokens[:, write.row : write.row + write.rows] = new
    return tiles


def _over_heads(seal: Callable[[], Seal], n_kv_head: int, pool: ThreadPool) -> None:
    failed: list[int] = []

    def work(start: int, stop: int) -> None:
        one = seal()  # workspaces of this thread
        failed.extend(h for h in range(start, stop) if one(h))

    pool.ranges(work, n_kv_head)
    # Finite fp16 rows always have finite axes (codec.md section 8); rows are checked before they
    # get here.
    assert not failed, f"axes of KV heads {failed} left the fp16 range"


def _published(
    tiles: Halves, side: Side, bits: int, target: NDArray[np.uint8]
) -> Callable[[], Seal]:
    def prepare() -> Seal:
        work = seal_workspace()
        is_value = side is Side.V
        return lambda h: int(seal_head(tiles[h].reshape(-1), is_value, bits, *work, target[h]))

    return prepare


def _aware_value(tiles: Halves, bits: int, target: NDArray[np.uint8]) -> Callable[[], Seal]:
    def prepare() -> Seal:
        work = aware_workspace(tiles.shape[2])
        return lambda h: int(seal_value(tiles[h].reshape(-1), bits, *work, target[h]))

    return prepare


def _aware_keys(
    layer: LayerSpec,
    tiles: Halves,
    queries: Halves | None,
    factors: F64 | None,
    target: NDArray[np.uint8],
    may_refit: bool,
) -> Callable[[], Seal]:
    """K with the factor of its query moment: of the layer's own, or of the group's queries.

    ``may_refit`` is False for a sequence's first group, which holds its sink token.
    """
    dim, bits = layer.head_dim, layer.k_bits
    assert bits is not None

    def prepare() -> Seal:
        work, rows = aware_workspace(dim), np.empty(GROUP * dim)
        m, own = np.empty((dim, dim)), np.empty((dim, dim))

        def seal(h: int) -> int:
            if factors is not None:
                factor = factors[h]
            else:
                assert queries is not None, "the table refuses the aware encoder without queries"
                m.fill(0)
                for q in queries[h * layer.gqa : (h + 1) * layer.gqa]:
                    add_moment(q.reshape(-1), rows, m)
                factor_moment(m, own)
                factor = own
            return int(seal_keys(tiles[h].reshape(-1), factor, may_refit, bits, *work, target[h]))

        return seal

    return prepare


def _moment_factors(layer: LayerSpec, buffers: LayerBuffers) -> F64 | None:
    """Factors of the layer's query moment, float64 [n_kv_head, D, D]; made once."""
    if buffers.query_moment is None:
        return None
    found: F64 | None = buffers.prepared.get("factors")
    if found is None:
        rotated = reference.rotate(buffers.query_moment, np.float64).swapaxes(1, 2)
        rotated = np.ascontiguousarray(reference.rotate(rotated, np.float64))
        found = np.empty((layer.n_kv_head, layer.head_dim, layer.head_dim))
        for m, factor in zip(rotated, found, strict=True):
            factor_moment(m, factor)
        buffers.prepared["factors"] = found
    return found


def materialize(call: MaterializeCall) -> None:
    """Decode record slots of every KV head to float32 rows."""
    for head in range(call.layer.n_kv_head):
        materialize_head(
            call.layer, call.buffers, call.slots, head, call.k_out[head], call.v_out[head]
        )
        if not call.rotated:
            for rows in (call.k_out[head], call.v_out[head]):
                rotate_rows(rows.copy(), rows)
