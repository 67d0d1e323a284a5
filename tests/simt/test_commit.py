"""Staging and the published encoder on the emulator, against the reference, byte for byte."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from simt_tools import (
    FIELDS,
    KINDS,
    buffers,
    contents,
    in_every_order,
    record_of,
    rows,
    sealed,
    snapshot,
    spec,
    tile_of,
    whole,
)

from kvkernels.calls import CommitCall, GroupWrite
from kvkernels.cpu import reference
from kvkernels.op import LayerSpec
from kvkernels.records.layout import BITS, HEAD_DIMS, LINE, HeadLayout, Side
from kvkernels.records.packing import join
from kvkernels.simt import commit as commits
from kvkernels.simt.commit import commit
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.simt.scratch import Scratch
from kvkernels.storage import Pages, Steps
from kvkernels.testing.poison import Guards


def staged(x: Any) -> Any:
    """Stage rows of [rows, heads, D] as [heads, rows, D]."""
    return reference.stage_rows(x.astype(np.float32)).swapaxes(0, 1)


@cache
def encoded(side: Side, bits: int, seed: int, dim: int) -> Any:
    x = rows(Guards(), (128, 1, dim), seed=seed)
    return reference.encode(x[:, 0], side, bits)


@pytest.mark.parametrize(("k_bits", "v_bits"), list(product(BITS, BITS)))
def test_every_pair_of_widths(driver: EmulatorDriver, k_bits: int, v_bits: int) -> None:
    layer, guards = spec(f"kvarn{k_bits}", f"kvarn{v_bits}"), Guards()
    held = buffers(guards, layer)
    k, v = rows(guards, (128, 1, 64), seed=1), rows(guards, (128, 1, 64), seed=2)
    commit(driver, CommitCall(layer, held, (whole(0, 0, 1, 2),), k, v, None), Scratch(driver))
    assert_array_equal(record_of(held, layer, Side.K, 0, 2), encoded(Side.K, k_bits, 1, 64))
    assert_array_equal(record_of(held, layer, Side.V, 0, 2), encoded(Side.V, v_bits, 2, 64))
    for side in Side:
        others = record_of(held, layer, side, 0, 0), record_of(held, layer, side, 0, 1)
        assert all((record == 0xFF).all() for record in others)
    assert not guards.broken()


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_blocks_and_transient_tiles(driver: EmulatorDriver, dim: int, kind: str) -> None:
    """Two groups sealed, one from a transient tile, and an open one, of two KV heads."""
    layer = spec("kvarn3", "kvarn5", head_dim=dim, n_kv_head=2)
    guards = Guards()
    held = buffers(guards, layer, Pages(3, 3, 0))
    k = rows(guards, (300, 2, dim), kind, 1)
    v = rows(guards, (300, 2, dim), "f32" if kind == "f16" else kind, 2)
    writes = (whole(0, 0, 1, 2), whole(1, 128, -1, 0), GroupWrite(2, 256, 0, 44, 2, 2, -1))
    before = snapshot(held)
    commit(driver, CommitCall(layer, held, writes, k, v, None), Scratch(driver))
    for field, x in (("k_exact", k), ("v_exact", v)):
        tiles, want = tile_of(held, layer, field), staged(x)
        assert_array_equal(tiles[:, 1], want[:, :128])
        assert_array_equal(tiles[:, 2, :44], want[:, 256:])
        old = tile_of(dataclasses.replace(held, **before), layer, field)
        assert_array_equal(tiles[:, 0].view(np.uint16), old[:, 0].view(np.uint16))
        assert_array_equal(tiles[:, 2, 44:].view(np.uint16), old[:, 2, 44:].view(np.uint16))
    for side, x, bits in ((Side.K, k, 3), (Side.V, v, 5)):
        for head, (slot, first) in product(range(2), ((2, 0), (0, 128))):
            part = x[first : first + 128, head].astype(np.float32)
            want = reference.encode(part, side, bits)
            assert_array_equal(record_of(held, layer, side, head, slot), want)
    assert not guards.broken()


def test_rows_in_any_portions(driver: EmulatorDriver) -> None:
    """A group that comes in ragged parts gives the bytes of one that comes at once."""
    layer, guards = spec(n_kv_head=2, head_dim=128), Guards()
    k, v = (rows(guards, (128, 2, 128), seed=s) for s in (1, 2))
    results = []
    for cuts in ((0, 128), (0, 1, 2, 45, 127, 128), (0, 33, 64, 128)):
        held = buffers(guards, layer, Pages(1, 1, 0))
        scratch = Scratch(driver)
        for start, stop in pairwise(cuts):
            slot = 0 if stop == 128 else -1
            write = GroupWrite(1, start, start, stop - start, 0, 0, slot)
            commit(driver, CommitCall(layer, held, (write,), k, v, None), scratch)
        results.append(contents(held))
    assert len(set(results)) == 1
    assert not guards.broken()


def test_forks_copy_what_they_share(driver: EmulatorDriver) -> None:
    """Queries too; a transient group begins with rows of a block."""
    layer, guards = spec("kvarn4", "kvarn2", encoder="aware", n_head=4, n_kv_head=2), Guards()
    held = buffers(guards, layer, Pages(2, 3, 0), queries=True)
    scratch = Scratch(driver)
    first = {n: rows(guards, (40, h, 64), seed=h) for n, h in (("k", 2), ("v", 2), ("q", 4))}
    write = GroupWrite(1, 0, 0, 40, 0, 0, -1)
    commit(driver, CommitCall(layer, held, (write,), **first), scratch)
    later = {n: rows(guards, (110, h, 64), seed=9 + h) for n, h in (("k", 2), ("v", 2), ("q", 4))}
    writes = (
        GroupWrite(1, 0, 40, 11, 0, 0, -1),  # goes on in place
        GroupWrite(1, 11, 40, 11, 2, 0, -1),
        GroupWrite(1, 22, 40, 88, -1, 0, 1),
    )
    commit(driver, CommitCall(layer, held, writes, **later), scratch)
    for field, x, y in zip(FIELDS[2:5], first.values(), later.values(), strict=True):
        tiles, old, new = tile_of(held, layer, field), staged(x), staged(y)
        for block, source in ((0, 0), (2, 11)):
            assert_array_equal(tiles[:, block, :40], old)
            assert_array_equal(tiles[:, block, 40:51], new[:, source : source + 11])
            assert (tiles[:, block, 51:].view(np.uint16) == 0xFFFF).all()
        assert (tiles[:, 1].view(np.uint16) == 0xFFFF).all()
    # The same rows from one block.
    twin = buffers(guards, layer, Pages(2, 1, 0), queries=True)
    joined = {n: np.concatenate((first[n], later[n][22:])) for n in first}
    commit(driver, CommitCall(layer, twin, (whole(1, 0, 0, 1),), **joined), scratch)
    for side, head in product(Side, range(2)):
        got, want = (record_of(b, layer, side, head, 1) for b in (held, twin))
        assert_array_equal(got, want)
    assert not guards.broken()


def test_passes_bound_workspaces(driver: EmulatorDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, guards = spec(), Guards()
    k, v = (rows(guards, (512, 1, 64), seed=s) for s in (1, 2))
    # The newest group keeps a block, as in a cache.
    writes = tuple(whole(g, 128 * g, -1 if g < 3 else 0, g) for g in range(4))
    found = []
    for room in (1 << 30, 1):
        monkeypatch.setattr(commits, "ROOM", room)
        held, scratch = buffers(guards, layer, Pages(4, 1, 0)), Scratch(driver)
        call = CommitCall(layer, held, writes, k, v, None)
        commit(driver, call, scratch)
        found.append((contents(held), scratch.peak))
    tile = 4 * 128 * 64 * 2  # K, V and two queries
    seal = commits.seal_bytes(layer, given=False)
    assert found[0] == (found[1][0], 4 * seal + 3 * tile)
    assert found[1][1] == seal + tile
    for room, (_, peak) in zip((1 << 30, 1), found, strict=True):
        monkeypatch.setattr(commits, "ROOM", room)
        promised = commits.workspaces(layer, Steps(1024, 512, 1, 1))
        assert sum(promised.values()) == peak


def test_orders_of_threads(driver: EmulatorDriver) -> None:
    guards = Guards()
    layer = spec("kvarn3", "kvarn6", head_dim=128)
    k, v = (rows(guards, (128, 1, 128), seed=s) for s in (1, 2))

    def run() -> bytes:
        held = buffers(guards, layer, Pages(1, 1, 0))
        call = CommitCall(layer, held, (whole(0, 0, 0, 0),), k, v, None)
        commit(driver, call, Scratch(driver))
        return contents(held)

    in_every_order(driver, run)


def hostile(n: int, seed: int) -> Any:
    """fp16 tiles [n, 128, 128] of many kinds, finite."""
    rng = np.random.default_rng(seed)
    r, c = np.mgrid[:128, :128]
    t1 = ((37 * r + 101 * c) % 257 - 128) / 64 * np.where(c == 5, 20, 1) * np.where(r == 9, 0.01, 1)
    t2 = np.where(r == 3, 0, 1) * ((131 * r + 17 * c) % 61 - 30) / 8
    tiles = [t1, t2, np.zeros((128, 128)), np.full((128, 128), 3.14), np.full((128, 128), -65504.0)]
    large = np.full((128, 128), 65504.0)
    large[:, ::2] *= -1
    tiles += [large, large * np.where(r == 7, 1e-3, 1), np.where(c == 5, 65504.0, 6e-8)]
    while len(tiles) < n:
        x = rng.standard_normal((128, 128))
        kind = len(tiles) % 6
        if kind == 1:
            x *= np.exp(rng.normal(0, 2, (128, 1)))
        elif kind == 2:
            x *= np.exp(rng.normal(0, 2, 128))
        elif kind == 3:
            x = x * 1e-3 + rng.normal(0, 50, (128, 1))
        elif kind == 4:
            x = rng.integers(-2, 3, (128, 128)) * rng.integers(0, 2, (128, 1)) * 1.0
        elif kind == 5:
            x *= 3e4
        tiles.append(x)
    return np.clip(tiles, -65504, 65504).astype(np.float16)


def check_hostile(driver: EmulatorDriver, n: int, seed: int) -> None:
    tiles = hostile(n, seed)
    layer = spec(head_dim=128)
    for first in range(0, n, 8):
        guards, part = Guards(), tiles[first : first + 8]
        bits = BITS[first // 8 % len(BITS)]
        layer = spec(f"kvarn{bits}", f"kvarn{bits}", head_dim=128)
        held = buffers(guards, layer, Pages(8, 8, 0))
        tile_of(held, layer, "k_exact")[0, : len(part)] = part.swapaxes(1, 2)
        tile_of(held, layer, "v_exact")[0, : len(part)] = part
        none = np.zeros((0, 1, 128), np.float32)
        writes = tuple(sealed(i, i) for i in range(len(part)))
        commit(driver, CommitCall(layer, held, writes, none, none, None), Scratch(driver))
        for i, tile in enumerate(part):
            parts = reference.encode_tile(tile, bits)
            for side in Side:
                want = join(*parts, HeadLayout(side, bits, 128).record, LINE)
                assert_array_equal(record_of(held, layer, side, 0, i), want, f"tile {first + i}")
        assert not guards.broken()


def test_hostile_tiles(driver: EmulatorDriver) -> None:
    check_hostile(driver, 48, 1)


@pytest.mark.slow
def test_thousands_of_tiles(driver: EmulatorDriver) -> None:
    check_hostile(driver, 2400, 2)


@pytest.mark.parametrize("dim", [64, 256])
def test_the_aware_layer_without_a_stage_of_queries(driver: EmulatorDriver, dim: int) -> None:
    """Without blocks of queries they pass through a transient tile."""
    layer, guards = spec(encoder="aware", head_dim=dim), Guards()
    x = {n: rows(guards, (128, h, dim), seed=h) for n, h in (("k", 1), ("v", 1), ("q", 2))}
    found = []
    for block, queries in ((-1, False), (0, True)):
        held = buffers(guards, layer, Pages(1, 1, 0), queries=queries)
        call = CommitCall(layer, held, (whole(1, 0, block, 0),), **x)
        commit(driver, call, Scratch(driver))
        found.append([record_of(held, layer, side, 0, 0).tobytes() for side in Side])
    assert found[0] == found[1]


@pytest.mark.parametrize("queries", [True, False])
def test_queries_are_staged_where_there_is_room(driver: EmulatorDriver, queries: bool) -> None:
    """The published encoder has no use for them, but a caller may ask for them to be kept."""
    layer, guards = spec(), Guards()
    held = buffers(guards, layer, queries=queries)
    x = {n: rows(guards, (30, h, 64), seed=h) for n, h in (("k", 1), ("v", 1), ("q", 2))}
    write = GroupWrite(0, 0, 10, 30, 1, 1, -1)
    commit(driver, CommitCall(layer, held, (write,), **x), Scratch(driver))
    assert_array_equal(tile_of(held, layer, "v_exact")[:, 1, 10:40], staged(x["v"]))
    if queries:
        assert_array_equal(tile_of(held, layer, "q_exact")[:, 1, 10:40], staged(x["q"]))
    assert not guards.broken()


def test_layers_share_lists(driver: EmulatorDriver) -> None:
    layer: LayerSpec = spec()
    guards, scratch = Guards(), Scratch(driver)
    k, v = (rows(guards, (1, 1, 64), seed=s) for s in (1, 2))
    uploads = []
    original, driver.upload = driver.upload, lambda host: uploads.append(host) or original(host)  # type: ignore[method-assign]
    for _ in range(5):
        held = buffers(guards, layer)
        before = driver.launches
        write = (GroupWrite(0, 0, 7, 1, 0, 0, -1),)
        commit(driver, CommitCall(layer, held, write, k, v, None), scratch)
        assert driver.launches == before + 1
    assert len(uploads) == 1
