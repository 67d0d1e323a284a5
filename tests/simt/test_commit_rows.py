"""Rows into tiles of standard types and into rings, on the emulator, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from simt_tools import KINDS, buffers, contents, in_every_order, rows, spec

from kvkernels.calls import CommitCall, GroupWrite, TailCall, TailWrite
from kvkernels.memory import ring_slots, ring_tiles
from kvkernels.quants import BLOCK_TYPES, encode
from kvkernels.quants.tiles import TileLayout
from kvkernels.records.layout import Side
from kvkernels.simt.commit_rows import TYPES, commit_rows, commit_tail
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.simt.scratch import Scratch
from kvkernels.storage import Body, Pages, Storage
from kvkernels.testing.poison import Guards

PAIRS = list(zip(BLOCK_TYPES, reversed(BLOCK_TYPES), strict=True))


def tile_rows(pool: Any, side: Side, name: str, dim: int, heads: int) -> Any:
    """GGML bytes [heads, tiles, 128, row bytes] of a pool."""
    layout = TileLayout(side, name, dim)
    return layout.unpack(pool.reshape(heads, -1, layout.nbytes))


def want(x: Any, name: str) -> Any:
    """GGML bytes [heads, rows, row bytes] of rows [rows, heads, D]."""
    return encode(np.ascontiguousarray(x.astype(np.float32).swapaxes(0, 1)), name)


def sides(layer: Any, held: Any) -> Any:
    return (
        (Side.K, layer.k, layer.head_dim, held.k_records),
        (Side.V, layer.v, layer.head_dim_v, held.v_records),
    )


def test_types_are_numbered_as_the_kernels_do() -> None:
    assert list(TYPES) == ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


@pytest.mark.parametrize(("k_type", "v_type"), PAIRS)
@pytest.mark.parametrize(("dim", "dim_v", "kind"), [(96, 160, "bf16"), (256, 32, "f32")])
def test_rows_into_tiles(
    driver: EmulatorDriver, k_type: str, v_type: str, dim: int, dim_v: int, kind: str
) -> None:
    """Ragged portions of two sequences, a fork, and nothing written beside them."""
    layer = spec(k_type, v_type, head_dim=dim, head_dim_v=dim_v, n_kv_head=2)
    guards = Guards()
    held = buffers(guards, layer, Pages(4, 0, 0))
    k, v = rows(guards, (200, 2, dim), kind, 1), rows(guards, (200, 2, dim_v), kind, 2)
    for x in (k, v):
        x[3, 0, :32] = 0
        x[4, 0, :32] = -0.0
        x[5, 1, :32] = 7
        x[6, 1, 7] = -x[6, 1, 3]
    first = (GroupWrite(0, 0, 0, 45, 1, 1, 1),)
    # in place; a fork of it; a full tile
    second = (
        GroupWrite(0, 45, 45, 1, 1, 1, 1),
        GroupWrite(0, 46, 45, 20, 3, 1, 3),
        GroupWrite(1, 66, 0, 128, 2, 2, 2),
    )
    commit_rows(driver, CommitCall(layer, held, first, k, v, None))
    commit_rows(driver, CommitCall(layer, held, second, k, v, None), Scratch(driver))
    for (side, name, d, pool), x in zip(sides(layer, held), (k, v), strict=True):
        got, expected = tile_rows(pool, side, name, d, 2), want(x, name)
        assert_array_equal(got[:, 1, :46], expected[:, :46])
        assert_array_equal(got[:, 3, :45], expected[:, :45])
        assert_array_equal(got[:, 3, 45:65], expected[:, 46:66])
        assert_array_equal(got[:, 2], expected[:, 66:194])
        poison = tile_rows(np.full_like(pool, 0xFF), side, name, d, 2)
        assert_array_equal(got[:, 0], poison[:, 0])
        assert_array_equal(got[:, 1, 46:], poison[:, 1, 46:])
    assert not guards.broken()


def test_extreme_blocks(driver: EmulatorDriver) -> None:
    """Scales that overflow or vanish, ties, signed zeros."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((128, 1, 64)).astype(np.float32)
    x *= np.float32(10) ** rng.integers(-44, 38, (128, 1, 1)).astype(np.float32)
    x[:20] = rng.integers(-8, 9, (20, 1, 64)) / 2
    x[20:24] = np.where(rng.random((4, 1, 64)) < 0.5, -0.0, 0.0)
    for name, kind in BLOCK_TYPES.items():
        if not kind.quantised:
            continue
        layer, guards = spec(name, name), Guards()
        held = buffers(guards, layer, Pages(1, 0, 0))
        commit_rows(
            driver, CommitCall(layer, held, (GroupWrite(0, 0, 0, 128, 0, 0, 0),), x, x, None)
        )
        for side, _, d, pool in sides(layer, held):
            got = tile_rows(pool, side, name, d, 1)[0, 0]
            assert_array_equal(got, want(x, name)[0], f"{name} {side}")


def test_padding_of_values_is_zero(driver: EmulatorDriver) -> None:
    layer, guards = spec("f16", "f32", head_dim=96), Guards()
    held = buffers(guards, layer, Pages(1, 0, 0))
    x = rows(guards, (128, 1, 96))
    commit_rows(driver, CommitCall(layer, held, (GroupWrite(0, 0, 0, 128, 0, 0, 0),), x, x, None))
    assert not held.v_records.view(np.float32).reshape(128, 128)[:, 96:].any()


@pytest.mark.parametrize("name", ["q5_1", "q8_0", "f16"])
def test_orders_of_threads(driver: EmulatorDriver, name: str) -> None:
    layer, guards = spec(name, name, head_dim=160), Guards()
    x = rows(guards, (40, 1, 160))

    def run() -> bytes:
        held = buffers(guards, layer, Pages(1, 0, 0))
        write = GroupWrite(0, 0, 5, 40, 0, 0, 0)
        commit_rows(driver, CommitCall(layer, held, (write,), x, x, None))
        return contents(held)

    in_every_order(driver, run)


@pytest.mark.parametrize("body", ["kvarn4", "f32", "bf16", "q4_0"])
@pytest.mark.parametrize("tail", ["f16", "bf16"])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_rows_into_rings(driver: EmulatorDriver, body: str, tail: str, kind: str) -> None:
    dim, dim_v = (128, 128) if body == "kvarn4" else (96, 160)
    layer = spec(body, body, head_dim=dim, head_dim_v=dim_v, n_kv_head=2)
    storage = Storage(
        body=Body.RECORDS if layer.is_kvarn else Body.TILES, k=body, v=body, tail_rows=150,
        reserve=19, tail_dtype=tail,
    )  # fmt: skip
    guards = Guards()
    held = buffers(guards, layer, Pages(1, 1, 3), storage=storage)
    k, v = rows(guards, (200, 2, dim), kind, 1), rows(guards, (200, 2, dim_v), kind, 2)
    first = (TailWrite(0, -1, 0, 0, 169),)
    second = (
        TailWrite(0, -1, 169, 160, 9),  # in place, to the end of the ring, and on from its start
        TailWrite(0, -1, 178, 0, 5),
        TailWrite(2, 0, 190, 100, 10),
    )
    commit_tail(driver, TailCall(layer, held, first, k, v))
    commit_tail(driver, TailCall(layer, held, second, k, v), Scratch(driver))
    for ring in (0, 2):
        order = np.arange(169)
        if ring == 0:
            order[160:169], order[:5] = range(169, 178), range(178, 183)
        else:
            order[100:110] = range(190, 200)
        got_k, got_v = rings(held, layer, storage, ring)
        types = storage.ring_types
        for got, x, t in ((got_k, k, types[0]), (got_v, v, types[1])):
            expected = x.astype(np.float32)[order].swapaxes(0, 1).astype(KINDS[t])
            assert_array_equal(got.view(f"u{got.itemsize}"), expected.view(f"u{got.itemsize}"))
    assert (rings(held, layer, storage, 1)[1].view(np.uint8) == 0xFF).all()
    assert not guards.broken()


def rings(held: Any, layer: Any, storage: Storage, ring: int) -> tuple[Any, Any]:
    """K and V [heads, capacity, D] of a ring."""
    k_type, v_type = (KINDS[t] for t in storage.ring_types)
    n, dim = layer.n_kv_head, layer.head_dim
    k = held.k_ring.view(k_type).reshape(n, -1, dim * ring_slots(storage))
    tiles = [t[:, ring] for _, t in ring_tiles(k, dim, storage)]
    joined = np.concatenate(tiles, axis=2)[..., : storage.capacity]
    v = held.v_ring.view(v_type).reshape(n, -1, storage.capacity, layer.head_dim_v)
    return np.ascontiguousarray(joined.swapaxes(1, 2)), np.ascontiguousarray(v[:, ring])
