"""Entries ``commit`` and ``commit_aware``: rotate, stage, seal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import CommitCall, GroupWrite
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP
from kvkernels.simt import aware
from kvkernels.simt.driver import Driver, scalar
from kvkernels.simt.program import Program
from kvkernels.simt.scratch import Scratch
from kvkernels.simt.staging import stage, transient
from kvkernels.storage import Steps

#: bytes of workspaces that the groups sealed by one launch may take; one group may take more
ROOM = 32 << 20

_SEAL = Program.of(("common", "exact", "lines", "balance", "seal"), {"seal": 256})


def commit(driver: Driver, call: CommitCall, scratch: Scratch) -> None:
    """Enqueue the staging of new rows and the sealing of the groups they complete, in passes that
    bound the workspaces.

    Rows are finite and fit fp16 once rotated (``unfit.first_unfit``); the aware encoder has queries
    or a ``query_moment``.
    """
    for writes in _passes(call):
        tiles = stage(driver, call, writes, scratch)
        sealed = [
            (block, w.slot, int(w.group > 0))  # the first group holds its sequence's sink token
            for w, block in zip(writes, transient(writes), strict=True)
            if w.slot >= 0
        ]
        if not sealed:
            continue
        listed = np.array(sealed, np.int32)
        if call.layer.encoder == "published":
            _seal(driver, call, listed, tiles, scratch)
        else:
            aware.seal(driver, call, listed, tiles, scratch)


def workspaces(layer: LayerSpec, steps: Steps, *, given: bool = False) -> dict[str, int]:
    """The most bytes that steps ask of every workspace, by name; ``given``: with a query moment."""
    groups = min(steps.n_ubatch, (steps.n_ubatch + 127 * steps.n_seq) // GROUP)
    # Groups of sinks stay exact.
    groups = min(groups, steps.n_seq * (steps.n_ctx // GROUP - layer.sink_tokens // GROUP))
    if groups <= 0:
        return {}
    sealing, tile = seal_bytes(layer, given=given), _lanes(layer) * GROUP * layer.head_dim * 2
    n = min(groups, max(1, ROOM // sealing))
    # The newest group that is completed keeps a block, of every sequence.
    through = min(groups, max(0, (steps.n_ubatch + 127) // GROUP - 1))
    tiles = min(through, max(1, ROOM // (sealing + tile)))
    found = {name: n * nbytes for name, nbytes in _seal_workspaces(layer, given=given).items()}
    # A group that is neither kept exact nor open when the step ends passes through a tile.
    if steps.n_ubatch > 2 * GROUP and steps.n_ctx > 2 * GROUP + layer.sink_tokens:
        found["stage tiles"] = tiles * tile
    return found


def seal_bytes(layer: LayerSpec, *, given: bool) -> int:
    """Bytes of the workspaces in which one group is sealed; ``given``: with a query moment."""
    return sum(_seal_workspaces(layer, given=given).values())


def _seal_workspaces(layer: LayerSpec, *, given: bool) -> dict[str, int]:
    if layer.encoder != "published":
        return aware.workspaces(layer, weighed=not given)
    # A turned fp16 tile and a byte per code for every slice of both sides of every KV head.
    codes = 2 * layer.n_kv_head * _slices(layer.head_dim) * GROUP * GROUP
    return {"seal turned": 2 * codes, "seal codes": codes}


def _lanes(layer: LayerSpec) -> int:
    """Tiles of a group: heads of K, V, and queries."""
    return 2 * layer.n_kv_head + layer.n_head


def _passes(call: CommitCall) -> Iterator[Sequence[GroupWrite]]:
    """The writes in order, cut so that no pass needs more than ``ROOM`` (or seals one group)."""
    tile = _lanes(call.layer) * GROUP * call.layer.head_dim * 2
    sealing = seal_bytes(call.layer, given=call.buffers.query_moment is not None)
    part: list[GroupWrite] = []
    held = 0
    for w in call.writes:
        more = tile * (w.block < 0) + sealing * (w.slot >= 0)
        if part and more and held + more > ROOM:
            yield part
            part, held = [], 0
        part.append(w)
        held += more
    if part:
        yield part


def _slices(dim: int) -> int:
    return max(1, dim // GROUP)


def _seal(
    driver: Driver, call: CommitCall, listed: NDArray[np.int32], tiles: Any, scratch: Scratch
) -> None:
    layer, buffers = call.layer, call.buffers
    assert layer.k_bits is not None
    assert layer.v_bits is not None
    n = 2 * layer.n_kv_head * len(listed) * _slices(layer.head_dim) * GROUP * GROUP
    args = (
        buffers.k_exact, buffers.v_exact, tiles, scratch.constant(listed), buffers.k_records,
        buffers.v_records, scratch.get("seal turned", (n,), np.uint16),
        scratch.get("seal codes", (n,), np.uint8), scalar(layer.n_kv_head), scalar(_lanes(layer)),
        scalar(buffers.blocks), scalar(buffers.slots), scalar(layer.head_dim),
        scalar(layer.k_bits), scalar(layer.v_bits),
    )  # fmt: skip
    grid = (len(listed) * _slices(layer.head_dim), layer.n_kv_head, 2)
    driver.launch(_SEAL, "seal", grid, args)
