"""Entries ``cpu/commit``, ``cpu/commit_aware`` (rotate, stage, seal) and ``cpu/materialize``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import CommitCall, GroupWrite, LayerBuffers, MaterializeCall
from kvkernels.cpu import reference
from kvkernels.cpu.columns import aware_workspace, seal_workspace
from kvkernels.cpu.entries import compiled
from kvkernels.cpu.pool import ThreadPool
from kvkernels.cpu.scratch import Scratch
from kvkernels.cpu.window import materialize_head
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP, HeadLayout, Side

Halves = NDArray[np.uint16]
F64 = NDArray[np.float64]
#: seal KV head ``h`` of a group into its record; a status that is not 0 is a failure
Seal = Callable[[int], int]


def commit(call: CommitCall, scratch: Scratch, pool: ThreadPool, isa: str) -> None:
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
            queries = _stage(write, call.q, blocks, True, scratch, "query_tiles", isa)
        staged = []
        for side, rows, exact in (
            (Side.K, call.k, buffers.k_exact),
            (Side.V, call.v, buffers.v_exact),
        ):
            # K and its queries lie [D, 128], so that a product over channels reads tokens side by
            # side; the quantiser takes both sides as they lie.
            by_channel = side is Side.K
            blocks = _blocks(exact, layer.n_kv_head, layer.head_dim, by_channel=by_channel)
            staged.append(_stage(write, rows, blocks, by_channel, scratch, f"{side} tiles", isa))
        if write.slot >= 0:
            group = _Group(layer, buffers, write, queries, staged[0], staged[1], isa)
            seal = group.published if layer.encoder == "published" else group.aware
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
    isa: str,
) -> Halves:
    """Rotate the new rows, round them to fp16, put them into their block;
    returns the tiles of all heads.
    """
    n_head, dim = rows.shape[1:]
    source = rows[write.source : write.source + write.rows].reshape(-1, dim)
    half = scratch.get("rotated_rows", source.shape, np.uint16)
    compiled(isa, "rotate.rotate_rows_to_half")(source, half)
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


@dataclass(frozen=True, slots=True)
class _Group:
    """A complete group on its way into its record slot; ``published`` and ``aware`` give a function
    that seals one KV head, with the workspaces of one thread.
    """

    layer: LayerSpec
    buffers: LayerBuffers
    write: GroupWrite
    queries: Halves | None
    keys: Halves
    values: Halves
    isa: str

    def _records(self, side: Side) -> tuple[int, NDArray[np.uint8]]:
        """Width and record bytes [n_kv_head, bytes] of the group's slot."""
        bits = self.layer.k_bits if side is Side.K else self.layer.v_bits
        assert bits is not None
        pool = self.buffers.k_records if side is Side.K else self.buffers.v_records
        nbytes = HeadLayout(side, bits, self.layer.head_dim).nbytes
        return bits, pool.reshape(self.layer.n_kv_head, -1, nbytes)[:, self.write.slot]

    def published(self) -> Seal:
        (k_bits, k_out), (v_bits, v_out) = (self._records(side) for side in Side)
        work, seal_head = seal_workspace(), compiled(self.isa, "seal.seal_head")

        def seal(h: int) -> int:
            bad = seal_head(self.keys[h].reshape(-1), False, k_bits, *work, k_out[h])
            return int(bad or seal_head(self.values[h].reshape(-1), True, v_bits, *work, v_out[h]))

        return seal

    def aware(self) -> Seal:
        layer, dim = self.layer, self.layer.head_dim
        (k_bits, k_out), (v_bits, v_out) = (self._records(side) for side in Side)
        work, rows, keys = aware_workspace(dim), np.empty(GROUP * dim), np.empty(GROUP * dim)
        weights, m_k, m_v = np.empty(GROUP * GROUP), np.empty((dim, dim)), np.empty((GROUP, GROUP))
        given = _rotated_moment(self.buffers)
        seal_keys, seal_value, widen_keys, add_moments = (
            compiled(self.isa, name)
            for name in (
                "aware.seal_keys",
                "aware.seal_value",
                "metric.widen_keys",
                "metric.add_moments",
            )
        )
        may_refit = self.write.group > 0  # the first group holds its sequence's sink token

        def seal(h: int) -> int:
            key, value, metric = self.keys[h].reshape(-1), self.values[h].reshape(-1), m_k
            if given is not None:
                metric = given[h]
            else:
                assert self.queries is not None, "the table refuses aware without queries"
                flat_k, flat_v = m_k.reshape(-1), m_v.reshape(-1)
                m_k.fill(0)
                m_v.fill(0)
                widen_keys(key, keys)
                for q in self.queries[h * layer.gqa : (h + 1) * layer.gqa]:
                    add_moments(q.reshape(-1), keys, layer.scale, rows, weights, flat_k, flat_v)
            bad = seal_keys(key, metric, may_refit, k_bits, *work, k_out[h])
            return int(bad or seal_value(value, m_v, given is None, v_bits, *work, v_out[h]))

        return seal


def _rotated_moment(buffers: LayerBuffers) -> F64 | None:
    """The layer's query moment in the rotated domain, float64 [n_kv_head, D, D]; made once."""
    if buffers.query_moment is None:
        return None
    found: F64 | None = buffers.prepared.get("rotated moment")
    if found is None:
        rotated = reference.rotate(buffers.query_moment, np.float64).swapaxes(1, 2)
        found = np.ascontiguousarray(reference.rotate(rotated, np.float64))
        buffers.prepared["rotated moment"] = found
    return found


def materialize(call: MaterializeCall, isa: str) -> None:
    """Decode record slots of every KV head to float32 rows."""
    for head in range(call.layer.n_kv_head):
        materialize_head(
            call.layer, call.buffers, call.slots, head, call.k_out[head], call.v_out[head], isa
        )
        if not call.rotated:
            for rows in (call.k_out[head], call.v_out[head]):
                compiled(isa, "rotate.rotate_rows")(rows.copy(), rows)
