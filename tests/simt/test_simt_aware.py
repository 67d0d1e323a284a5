"""The aware encoder on the emulator against the float64 reference."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from simt_tools import buffers, contents, in_every_order, record_of, sealed, spec, tile_of, whole

from kvkernels.calls import CommitCall
from kvkernels.cpu import reference_aware
from kvkernels.cpu.reference import rotate
from kvkernels.op import LayerSpec
from kvkernels.records.layout import BITS, HEAD_DIMS, HeadLayout, Side
from kvkernels.records.packing import split
from kvkernels.simt import aware
from kvkernels.simt.commit import commit
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.simt.scratch import Scratch
from kvkernels.storage import Pages
from kvkernels.testing.poison import Guards


def inputs(layer: LayerSpec, n: int, seed: int) -> dict[str, Any]:
    """Rows with loud channels, and queries that favour some."""
    rng, dim = np.random.default_rng(seed), layer.head_dim
    found = {}
    for name, heads in (("k", layer.n_kv_head), ("v", layer.n_kv_head), ("q", layer.n_head)):
        x = rng.normal(rng.normal(0, 0.5), 1, (n, heads, dim)) * np.exp(rng.normal(0, 0.5, dim))
        if name == "q":
            x = x @ (rng.normal(size=(dim, dim)) * np.exp(rng.normal(0, 1, dim))) * 0.3
        found[name] = x.astype(np.float32)
    return found


def differing(
    layer: LayerSpec, held: Any, x: dict[str, Any], groups: list[tuple[int, int, int]]
) -> tuple[int, int]:
    """Codes and axes that differ from the reference's; groups: (number, first row, slot)."""
    codes = axes = 0
    for (group, first, slot), head, side in product(groups, range(layer.n_kv_head), Side):
        bits = layer.k_bits if side is Side.K else layer.v_bits
        assert bits is not None
        part = {name: rows[first : first + 128] for name, rows in x.items()}
        own = slice(head * layer.gqa, (head + 1) * layer.gqa)
        given: dict[str, Any] = {"may_refit": group > 0}
        if held.query_moment is not None:
            if side is Side.K:
                m = rotate(held.query_moment[head], np.float64).T
                given["query_moment"] = rotate(m, np.float64)
        else:
            given |= {"q": part["q"][:, own].swapaxes(0, 1), "keys": part["k"][:, head]}
            given["scale"] = layer.scale
        layout = HeadLayout(side, bits, layer.head_dim)
        want = reference_aware.encode(part[side.value][:, head], side, bits, **given)
        got = record_of(held, layer, side, head, slot)
        for a, b in zip(
            np.split(got, layout.n_slices), np.split(want, layout.n_slices), strict=True
        ):
            a_parts, b_parts = (split(r, layout.record, "line") for r in (a, b))
            codes += int((a_parts[0] != b_parts[0]).sum())
            axes += sum(int((p != q).sum()) for p, q in zip(a_parts[1:], b_parts[1:], strict=True))
    return codes, axes


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("moment", [False, True])
def test_codes_of_the_reference(driver: EmulatorDriver, dim: int, moment: bool) -> None:
    """The first group is not fitted at two bits, the second is. Ties may fall either way: seen in
    none of these.
    """
    widths = ((2, 2), (4, 3), (8, 5))[: 256 // dim or 1]
    for i, (bits, other) in enumerate(widths):
        n_head = 6 if dim == 64 else 2 if dim < 512 else 1
        layer = spec(
            f"kvarn{bits}", f"kvarn{other}", encoder="aware", head_dim=dim, n_head=n_head,
            n_kv_head=2 if dim < 256 else 1,
        )  # fmt: skip
        x, guards = inputs(layer, 256, i), Guards()
        given = None
        if moment:
            grouped = x["q"].astype(np.float64).reshape(256, layer.n_kv_head, -1, dim)
            queries = grouped.swapaxes(0, 1).reshape(layer.n_kv_head, -1, dim)
            given = queries.swapaxes(1, 2) @ queries
        held = buffers(guards, layer, Pages(3, 1, 0), queries=not moment, moment=given)
        call = {"k": x["k"], "v": x["v"], "q": None if moment else x["q"]}
        writes = (whole(0, 0, 0, 2), whole(1, 128, -1, 0))
        commit(driver, CommitCall(layer, held, writes, **call), Scratch(driver))
        codes, axes = differing(layer, held, x, [(0, 0, 2), (1, 128, 0)])
        assert axes == 0
        assert codes <= 4
        assert not guards.broken()


@pytest.mark.parametrize("bits", BITS)
def test_hostile_tiles(driver: EmulatorDriver, bits: int) -> None:
    """Zeros, constants, near overflow, and queries of nothing."""
    rng = np.random.default_rng(bits)
    layer = spec(f"kvarn{bits}", f"kvarn{bits}", encoder="aware", head_dim=128, n_head=1)
    guards = Guards()
    held = buffers(guards, layer, Pages(4, 4, 0), queries=True)
    keys, values, queries = (tile_of(held, layer, f"{s}_exact")[0] for s in ("k", "v", "q"))
    large = np.where(rng.random((128, 128)) < 0.5, 65504.0, -65504.0)
    for i, x in enumerate((np.zeros((128, 128)), np.full((128, 128), 2.0), large, large * 1e-3)):
        keys[i], values[i], queries[i] = x, x[::-1], x if i % 2 else 0
    none = np.zeros((0, 1, 128), np.float32)
    writes = tuple(sealed(i, i) for i in range(4))
    commit(driver, CommitCall(layer, held, writes, none, none, none), Scratch(driver))
    assert not guards.broken()
    for slot, side in product(range(4), Side):
        x = (keys if side is Side.K else values)[slot]
        q = queries[slot][None]
        want = reference_aware.encode(
            x, side, bits, q=q, keys=keys[slot], scale=layer.scale, rotated=True
        )
        layout = HeadLayout(side, bits, 128).record
        got = record_of(held, layer, side, 0, slot)
        for a, b in zip(
            split(got, layout, "line")[1:], split(want, layout, "line")[1:], strict=True
        ):
            assert np.isfinite(a).all()
            assert (a == b).all()


def test_workspaces_are_what_was_promised(driver: EmulatorDriver) -> None:
    for moment in (None, np.eye(64)[None]):
        layer, guards = spec(encoder="aware"), Guards()
        x, scratch = inputs(layer, 128, 0), Scratch(driver)
        held = buffers(guards, layer, Pages(1, 1, 0), queries=moment is None, moment=moment)
        commit(driver, CommitCall(layer, held, (whole(0, 0, 0, 0),), **x), scratch)
        assert scratch.peak == sum(aware.workspaces(layer, weighed=moment is None).values())
    large = spec(encoder="aware", head_dim=128, n_head=32, n_kv_head=8)
    assert round(sum(aware.workspaces(large, weighed=True).values()) / 2**20, 1) == 10.8


def test_orders_of_threads(driver: EmulatorDriver) -> None:
    layer, guards = spec("kvarn2", encoder="aware", head_dim=128), Guards()
    x = inputs(layer, 128, 3)

    def run() -> bytes:
        held = buffers(guards, layer, Pages(1, 1, 0), queries=True)
        commit(driver, CommitCall(layer, held, (whole(1, 0, 0, 0),), **x), Scratch(driver))
        return contents(held)

    in_every_order(driver, run)
