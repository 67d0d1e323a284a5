"""Poison for everything a kernel must not read, and guards for what it must not write (F14, F16).

Bytes of 0xFF are NaN in fp16 and in fp32, so one pattern does for records, exact rows, rows of the
caller and workspaces. All of this works on arrays that NumPy can see; a device whose buffers are
something else is served unguarded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.backend import Device
from kvkernels.cache import Cache
from kvkernels.calls import LayerBuffers
from kvkernels.memory import ring_slots, ring_tiles
from kvkernels.op import LayerSpec
from kvkernels.planner import LayerPlan
from kvkernels.quants.tiles import TileLayout
from kvkernels.records.layout import GROUP, Side
from kvkernels.storage import Body, Pages, Storage

GUARD = 4096  # bytes on either side
BYTE = 0xFF
_FIELDS = ("k_records", "v_records", "k_exact", "v_exact", "q_exact", "k_ring", "v_ring")


class Guards:
    """Arrays with a canary on both sides; reading it gives NaN, writing it is found out."""

    def __init__(self) -> None:
        self._raw: list[tuple[str, NDArray[np.uint8], int, int]] = []

    def like(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """An array of the same shape and dtype, 64-byte aligned and full of poison."""
        return self.empty(name, array.shape, array.dtype)

    def copy(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """A C-contiguous guarded copy."""
        twin = self.like(name, array)
        twin[...] = array
        return twin

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A guarded array full of poison."""
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        raw = np.full(nbytes + 2 * GUARD + 64, BYTE, np.uint8)
        start = GUARD + -(raw.ctypes.data + GUARD) % 64
        self._raw.append((name, raw, start, start + nbytes))
        array: NDArray[Any] = raw[start : start + nbytes].view(kind).reshape(shape)
        return array

    def broken(self) -> list[str]:
        """Names of the arrays beside which something was written."""
        return [
            name
            for name, raw, start, stop in self._raw
            if (raw[:start] != BYTE).any() or (raw[stop:] != BYTE).any()
        ]


class GuardedDevice:
    """A device whose layer buffers are guarded and begin as poison instead of zeros."""

    def __init__(self, device: Device, guards: Guards) -> None:
        self._device, self._guards = device, guards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def allocate(
        self, layer: LayerSpec, storage: Storage, pages: Pages, *, keep_queries: bool
    ) -> LayerBuffers:
        """Memory of one layer, between guards where NumPy can see it."""
        plain = self._device.allocate(layer, storage, pages, keep_queries=keep_queries)
        swapped: dict[str, Any] = {
            name: self._guards.like(name, array)
            for name in _FIELDS
            if isinstance(array := getattr(plain, name), np.ndarray)
        }
        return dataclasses.replace(plain, **swapped)


def poison_unused(cache: Cache) -> None:
    """0xFF into every slot, exact row and ring row that no published state shows."""
    device = cache.device
    for layer, buffers, index in zip(cache.plan.layers, cache.buffers, cache.class_of, strict=True):
        arrays = {name: array for name in _FIELDS if (array := getattr(buffers, name)) is not None}
        hosts = {name: device.download(array) for name, array in arrays.items()}
        _poison_layer(cache, layer, dataclasses.replace(buffers, **hosts), index)
        for name, array in arrays.items():
            device.overwrite(array, hosts[name])


def _poison_layer(cache: Cache, layer: LayerPlan, buffers: LayerBuffers, index: int) -> None:
    slots, rows = live(cache, index)
    for name in ("k_records", "v_records"):
        array = getattr(buffers, name)
        if isinstance(array, np.ndarray) and array.size:
            pool = array.view(np.uint8).reshape(layer.spec.n_kv_head, buffers.slots, -1)
            pool[:, ~slots] = BYTE
    if layer.storage.body is Body.TILES:
        _poison_tiles(cache, layer, buffers, index)
    for name in ("k_exact", "v_exact", "q_exact"):
        array = getattr(buffers, name)
        if isinstance(array, np.ndarray) and array.size:
            rows_of(name, array, layer.spec, buffers.blocks)[:, ~rows] = 0xFFFF
    if layer.storage.tail_rows:
        _poison_rings(cache, layer, buffers, index)


def _poison_tiles(cache: Cache, layer: LayerPlan, buffers: LayerBuffers, index: int) -> None:
    """NaN into what tokens beyond the newest have in an open tile: elements, or scales."""
    spec, storage = layer.spec, layer.storage
    for state in cache.state.values():
        used = state.n % GROUP
        if not used:
            continue
        slot = state.pages[index].table[-1]
        for side, name, pool, dim in (
            (Side.K, storage.k, buffers.k_records, spec.head_dim),
            (Side.V, storage.v, buffers.v_records, spec.head_dim_v),
        ):
            layout = TileLayout(side, name, dim)
            tile = pool.reshape(spec.n_kv_head, buffers.slots, -1)[:, slot]
            if layout.kind.quantised:
                axes = tile[:, layout.scale_offset :].view(np.uint16).reshape(len(tile), -1, GROUP)
                axes[:, :, used:] = 0xFFFF
            elif side is Side.K:
                tile.reshape(len(tile), dim, GROUP, -1)[:, :, used:] = BYTE
            else:
                tile.reshape(len(tile), GROUP, -1)[:, used:] = BYTE


def _poison_rings(cache: Cache, layer: LayerPlan, buffers: LayerBuffers, index: int) -> None:
    storage, heads = layer.storage, layer.spec.n_kv_head
    assert buffers.k_ring is not None
    assert buffers.v_ring is not None
    live_rows = np.zeros((buffers.pages.rings, storage.capacity), np.bool_)
    for state in cache.state.values():
        ring = state.pages[index].ring
        if ring:
            live_rows[ring.ring, np.arange(ring.start, state.n) % storage.capacity] = True
    shape, dim = (heads, len(live_rows)), layer.spec.head_dim
    element = buffers.k_ring.nbytes // (heads * len(live_rows) * dim * ring_slots(storage))
    typed = buffers.k_ring.view(f"u{element}").reshape(*shape, dim * ring_slots(storage))
    v = buffers.v_ring.view(np.uint8).reshape(*shape, storage.capacity, -1)
    for ring_id, rows in enumerate(live_rows):
        v[:, ring_id][:, ~rows] = BYTE
        dead = np.ones(ring_slots(storage), np.bool_)
        dead[: len(rows)] = ~rows
        for first, tile in ring_tiles(typed, dim, storage):
            tile[:, ring_id][:, :, dead[first : first + tile.shape[-1]]] = np.iinfo(tile.dtype).max


def rows_of(name: str, array: NDArray[Any], spec: LayerSpec, blocks: int) -> NDArray[np.uint16]:
    """An exact buffer by its field name, as a view [heads, blocks, 128 tokens, D]."""
    heads = spec.n_head if name == "q_exact" else spec.n_kv_head
    flat = array.view(np.uint16)
    if name == "v_exact":
        return flat.reshape(heads, blocks, GROUP, spec.head_dim)
    return flat.reshape(heads, blocks, spec.head_dim, GROUP).swapaxes(2, 3)


def live(cache: Cache, index: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(record slots [slots], exact rows [blocks, 128]) that published states show, of one page
    class.
    """
    cls = cache.classes[index]
    slots = np.zeros(cls.slots.capacity, np.bool_)
    rows = np.zeros((cls.blocks.capacity, GROUP), np.bool_)
    for state in cache.state.values():
        pages = state.pages[index]
        slots[pages.slots()] = True
        for group, block in pages.blocks.items():
            rows[block, : max(0, min(GROUP, state.n - group * GROUP))] = True
    return slots, rows


def poison_workspaces(device: Any) -> None:
    """0xFF into workspaces that a device keeps between launches, where it lets us (``poison``)."""
    scratch = getattr(device, "scratch", None)
    if scratch is not None and hasattr(scratch, "fill"):
        scratch.fill(BYTE)
