"""A cache beside its list-of-rows model, and what a cache holds as plain bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvkernels as kvk
from kvkernels.cache import Cache
from kvkernels.records.layout import GROUP
from kvkernels.testing.inputs import SequenceRows, rows
from kvkernels.testing.model import RowsModel
from kvkernels.testing.poison import rows_of

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
LIMIT = 1e-5  # relative RMS against float64


def spec(**changes: Any) -> kvk.LayerSpec:
    base: dict[str, Any] = {
        "n_head": 4, "n_kv_head": 2, "head_dim": 64, "k": "kvarn3", "v": "kvarn5", "sink_tokens": 0,
        "encoder": "published",
    }  # fmt: skip
    return kvk.LayerSpec(**(base | changes))


def make(device: Any, *layers: kvk.LayerSpec, **limits: Any) -> Cache:
    # float32 activations: what is held against float64 here is the cache and the order of things.
    base: dict[str, Any] = {"n_ctx": 1024, "n_ubatch": 1024, "activations": "f32"}
    return kvk.plan(layers or (spec(),), device, kvk.Limits(**(base | limits))).allocate()


def error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative RMS; infinite when something is not finite."""
    if not np.isfinite(actual).all():
        return float("inf")
    scale = np.sqrt(np.mean(np.square(expected)))
    return float(np.sqrt(np.mean(np.square(actual - expected))) / (scale or 1))


def feed(cache: Cache, data: Sequence[SequenceRows], seq: int, start: int, stop: int) -> list[Any]:
    """One committed step of rows ``start..stop`` of one sequence; ``data`` per layer."""
    with cache.step({seq: stop - start}) as step:
        return [step.attend(i, *layer.part(start, stop)) for i, layer in enumerate(data)]


def fill(cache: Cache, data: Sequence[SequenceRows], seq: int, *edges: int) -> None:
    """Committed steps that end at ``edges``, from the sequence's length on."""
    at = cache.length(seq)
    for edge in edges:
        if edge > at:
            feed(cache, data, seq, at, edge)
            at = edge


def layer_rows(cache: Cache, n: int, *seed: object, **how: Any) -> list[SequenceRows]:
    """``n`` rows for every layer of the cache."""
    return [rows(p.spec, n, *seed, i, **how) for i, p in enumerate(cache.plan.layers)]


def contents(cache: Cache, layer: int, seq: int) -> dict[str, bytes]:
    """What a sequence holds in a layer, by name: records of groups, exact rows that are in use."""
    state, buffers = cache.state[seq], cache.buffers[layer]
    planned = cache.plan.layers[layer].spec
    pages = state.pages[cache.class_of[layer]]
    found: dict[str, bytes] = {}
    for side in "kv":
        if buffers.slots:
            records = getattr(buffers, f"{side}_records").reshape(
                planned.n_kv_head, buffers.slots, -1
            )
            for group, slot in enumerate(pages.table):
                if slot >= 0:
                    found[f"{side}{group}"] = records[:, slot].tobytes()
        name = f"{side}_exact"
        exact = rows_of(name, getattr(buffers, name), planned, buffers.blocks)
        for group, block in pages.blocks.items():
            used = max(0, min(GROUP, state.n - group * GROUP))
            found[f"{side}{group} rows"] = exact[:, block, :used].tobytes()
    return found


def fingerprint(cache: Cache) -> str:
    """Hash of everything published and of every byte of every buffer."""
    digest = hashlib.sha256()
    for seq, state in sorted(cache.state.items()):
        digest.update(f"{seq} {state.n}".encode())
        for pages in state.pages:
            digest.update(pages.table.tobytes())
            digest.update(repr((sorted(pages.blocks.items()), pages.first)).encode())
    for cls in cache.classes:
        digest.update(repr((cls.slots._refs, cls.blocks._refs)).encode())
    for buffers in cache.buffers:
        for name in ("k_records", "v_records", "k_exact", "v_exact", "q_exact"):
            array = getattr(buffers, name)
            if array is not None:
                digest.update(array.tobytes())
    return digest.hexdigest()


def idle(cache: Cache) -> bool:
    """No page is held by anybody."""
    return all(not any(pool._refs) for c in cache.classes for pool in (c.slots, c.blocks))


class Twin:
    """A cache and, per sequence and layer, its model; every step is compared."""

    def __init__(self, cache: Cache, *seed: object) -> None:
        self.cache, self.seed, self.drawn = cache, seed, 0
        self.models: dict[int, list[RowsModel]] = {}
        self.specs = [planned.spec for planned in cache.plan.layers]

    def draw(self, n: int) -> list[Arrays]:
        """Fresh rows for every layer."""
        self.drawn += 1
        return [rows(s, n, *self.seed, self.drawn, i).part(0) for i, s in enumerate(self.specs)]

    def step(self, n_tokens: Mapping[int, int], *, commit: bool = True) -> list[NDArray[Any]]:
        """One step over all layers, held against the models; returns the outputs."""
        parts = {seq: self.draw(n) for seq, n in n_tokens.items()}
        outs = []
        step = self.cache.step(dict(n_tokens))
        for layer, planned in enumerate(self.specs):
            arrays = [np.concatenate([parts[s][layer][a] for s in n_tokens]) for a in range(3)]
            out = step.attend(layer, *arrays)
            expected = np.concatenate(
                [self.model(s)[layer].attend(*parts[s][layer]) for s in n_tokens]
            )
            assert error(out, expected) < LIMIT, (layer, planned, n_tokens)
            outs.append(out)
        if not commit:
            step.discard()
            return outs
        step.commit()
        for seq in n_tokens:
            models = self.models.setdefault(seq, self.model(seq))
            for model, (q, k, v) in zip(models, parts[seq], strict=True):
                model.append(k, v, q)
            assert self.cache.length(seq) == models[0].n
        return outs

    def model(self, seq: int) -> list[RowsModel]:
        """The sequence's models, empty ones when it does not exist."""
        return self.models.get(seq) or [RowsModel(s) for s in self.specs]

    def rollback(self, seq: int, n: int) -> None:
        self.cache.rollback(seq, n)
        self._drop(seq, n)

    def rewind(self, seq: int, to: int) -> None:
        self.cache.rewind(seq, to)
        self._drop(seq, self.models[seq][0].n - to)

    def _drop(self, seq: int, n: int) -> None:
        for model in self.models[seq]:
            model.rollback(n)

    def fork(self, src: int, dst: int) -> None:
        self.cache.fork(src, dst)
        self.models[dst] = [model.copy() for model in self.models[src]]

    def reorder(self, order: Mapping[int, int]) -> None:
        self.cache.reorder(order)
        moved = {dst: [m.copy() for m in self.models[src]] for dst, src in order.items()}
        self.models |= moved

    def remove(self, seq: int) -> None:
        self.cache.remove(seq)
        del self.models[seq]

    def select(self, *keep: int) -> None:
        self.cache.select(keep)
        self.models = {seq: self.models[seq] for seq in keep}
