"""Layers, guarded buffers and calls for the emulator's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from kvkernels.calls import GroupWrite, LayerBuffers
from kvkernels.memory import LayerSizes
from kvkernels.op import LayerSpec
from kvkernels.records.layout import HeadLayout, Side
from kvkernels.simt.emulator.driver import ORDERS, EmulatorDriver
from kvkernels.storage import Pages, Storage
from kvkernels.testing.poison import Guards

KINDS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
PAGES = Pages(3, 3, 0)
FIELDS = ("k_records", "v_records", "k_exact", "v_exact", "q_exact", "k_ring", "v_ring")


def spec(k: str = "kvarn4", v: str = "kvarn4", **kwargs: Any) -> LayerSpec:
    options = {"n_head": 2, "n_kv_head": 1, "head_dim": 64, "encoder": "published"} | kwargs
    return LayerSpec(k=k, v=v, **options)


def buffers(
    guards: Guards,
    layer: LayerSpec,
    pages: Pages = PAGES,
    *,
    storage: Storage | None = None,
    queries: bool = False,
    moment: Any = None,
) -> LayerBuffers:
    """Memory of a layer, full of NaN bytes and between guards."""
    storage = storage or Storage.plain(layer)
    sizes = LayerSizes.of(layer, storage, keep_queries=queries)

    def array(name: str, nbytes: int, dtype: Any = np.uint16) -> Any:
        return guards.empty(name, (nbytes // np.dtype(dtype).itemsize,), dtype)

    return LayerBuffers(
        k_records=array("k_records", pages.slots * sizes.k_slot, np.uint8),
        v_records=array("v_records", pages.slots * sizes.v_slot, np.uint8),
        k_exact=array("k_exact", pages.blocks * sizes.kv_block),
        v_exact=array("v_exact", pages.blocks * sizes.kv_block),
        q_exact=array("q_exact", pages.blocks * sizes.q_block) if queries else None,
        k_ring=array("k_ring", pages.rings * sizes.k_ring),
        v_ring=array("v_ring", pages.rings * sizes.v_ring),
        storage=storage,
        pages=pages,
        query_moment=moment,
    )


def snapshot(held: LayerBuffers) -> dict[str, Any]:
    """Copies of every array."""
    found = {name: getattr(held, name) for name in FIELDS}
    return {name: array.copy() for name, array in found.items() if array is not None}


def contents(held: LayerBuffers) -> bytes:
    return b"".join(array.tobytes() for array in snapshot(held).values())


def rows(guards: Guards, shape: tuple[int, ...], kind: str = "f32", seed: int = 0) -> Any:
    """Rows with loud channels, guarded, of an element kind."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.normal(0, 0.7, shape[-1]))
    return guards.copy("rows", x.astype(np.float32).astype(KINDS[kind]))


def record_of(held: LayerBuffers, layer: LayerSpec, side: Side, head: int, slot: int) -> Any:
    """Bytes of one head's records."""
    bits = layer.k_bits if side is Side.K else layer.v_bits
    assert bits is not None
    pool = held.k_records if side is Side.K else held.v_records
    nbytes = HeadLayout(side, bits, layer.head_dim).nbytes
    return pool.reshape(layer.n_kv_head, -1, nbytes)[head, slot]


def tile_of(held: LayerBuffers, layer: LayerSpec, field: str) -> Any:
    """An exact field as fp16 [heads, blocks, 128, D]: a view."""
    heads = layer.n_head if field == "q_exact" else layer.n_kv_head
    flat, dim = getattr(held, field).view(np.float16), layer.head_dim
    if field == "v_exact":
        return flat.reshape(heads, -1, 128, dim)
    return flat.reshape(heads, -1, dim, 128).swapaxes(2, 3)


def whole(group: int, source: int, block: int, slot: int) -> GroupWrite:
    """All rows of a group at once."""
    return GroupWrite(group, source, 0, 128, block, block, slot)


def sealed(block: int, slot: int, group: int = 1) -> GroupWrite:
    """Seal what a block holds; no new rows."""
    return GroupWrite(group, 0, 128, 0, block, block, slot)


def in_every_order(driver: EmulatorDriver, run: Callable[[], bytes]) -> bytes:
    """The result of a run, the same twice and for every order of threads."""
    expected = run()
    for order in ("ascending", *ORDERS):
        driver.arrange(order, seed=5)
        assert run() == expected, order
    driver.arrange("ascending")
    return expected
