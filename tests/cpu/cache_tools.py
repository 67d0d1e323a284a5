"""A cache beside its list-of-rows model, and what a cache holds as plain bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvkernels as kvk
from kvkernels.cache import Cache
from kvkernels.records.layout import GROUP
from kvkernels.request import ResolvedTail
from kvkernels.testing.inputs import SequenceRows, rng, rows
from kvkernels.testing.model import RowsModel, model_of
from kvkernels.testing.model_rows import ModelTail
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
        digest.update(f"{seq} {state}".encode())
        for pages in state.pages:
            digest.update(pages.table.tobytes())
            digest.update(repr((sorted(pages.blocks.items()), pages.first)).encode())
    for cls in cache.classes:
        digest.update(repr((cls.slots._refs, cls.blocks._refs)).encode())
    for buffers in cache.buffers:
        for field in fields(buffers):
            array = getattr(buffers, field.name)
            if isinstance(array, np.ndarray):
                digest.update(array.tobytes())
    return digest.hexdigest()


def idle(cache: Cache) -> bool:
    """No page is held by anybody."""
    return all(not any(pool._refs) for c in cache.classes for pool in (c.slots, c.blocks))


def model_by_rules(s: kvk.LayerSpec, n_ctx: int, rollback: int) -> RowsModel:
    """The model of a layer with an explicit tail, by T2, T3, T8 and T9 said once more; for a device
    that can serve everything.
    """
    window = min(s.window or n_ctx, n_ctx)
    kept = -(-s.tail // GROUP) * GROUP if s.is_kvarn else s.tail
    n = min(max(kept, GROUP if s.is_kvarn else 0), window)
    if (not s.tail and n < window) or not n or (s.is_kvarn and n <= GROUP and n < window):
        return RowsModel(s)  # nothing, or what the stage holds anyway
    dtype = s.tail_dtype or ("f16" if s.is_kvarn else "bf16")
    if n == window and s.window is None:
        return RowsModel(replace(s, k=dtype, v=dtype, sink_tokens=0, tail=0, tail_dtype=None))
    tail = ModelTail(rows=n, rollback=max(1, rollback), dtype=dtype, bodyless=n == window)
    return RowsModel(s, tail)


class Fault(Exception):
    """What a device raises in a test."""


class Twin:
    """A cache and, per sequence and layer, its model; every step is compared."""

    def __init__(self, cache: Cache, *seed: object) -> None:
        self.cache, self.seed, self.drawn = cache, seed, 0
        self.models: dict[int, list[RowsModel]] = {}
        self.specs = [planned.spec for planned in cache.plan.layers]
        self.tails: tuple[ResolvedTail, ...] = tuple(getattr(cache.plan, "tails", ()))

    def draw(self, n: int) -> list[Arrays]:
        """Fresh rows for every layer."""
        self.drawn += 1
        return [rows(s, n, *self.seed, self.drawn, i).part(0) for i, s in enumerate(self.specs)]

    def step(
        self, n_tokens: Mapping[int, int], *, commit: bool = True, hide: float = 0.0
    ) -> list[NDArray[Any]]:
        """One step over all layers, held against the models; returns the outputs. ``hide``: share
        of keys that a mask hides from every query.
        """
        step, parts, outs = self._attended(n_tokens, hide)
        if not commit:
            step.discard()
            return outs
        step.commit()
        self._append(parts)
        return outs

    def fail(self, n_tokens: Mapping[int, int]) -> None:
        """A step that is left by an exception after its last layer."""
        with pytest.raises(Fault):  # noqa: SIM117 - the step is inside on purpose
            with self._attended(n_tokens)[0]:
                raise Fault("left by an exception")

    def fault(self, n_tokens: Mapping[int, int], at: int, *, after: bool) -> int:
        """A step whose commit fails at its launch ``at`` (from 1): before it runs, or ``after`` it
        has. 0: it did fail; else there were fewer launches, so many, and the step is committed.

        Lengths stay. A group that then says PAYLOAD_INVALID has lost what the step overwrote in
        its ring; every other group has lost nothing. No sequence of the step may say so before:
        nothing would tell a second loss from none.
        """
        assert not any(self.invalid(seq) for seq in n_tokens.keys() & self.models.keys())
        step, parts, _ = self._attended(n_tokens)
        before = {seq: self.cache.length(seq) for seq in self.cache.state}
        launches, run = 0, self.cache.device.run

        def failing(*args: Any) -> None:
            nonlocal launches
            launches += 1
            if launches == at and not after:
                raise Fault("before the launch")
            run(*args)
            if launches == at:
                raise Fault("after the launch")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.cache.device, "run", failing)
            try:
                step.commit()
            except Fault:
                pass
            else:
                assert launches < at, "a failed launch must not be swallowed"
                self._append(parts)
                return launches
        assert {seq: self.cache.length(seq) for seq in self.cache.state} == before
        for seq in n_tokens.keys() & self.models.keys():
            for group in self.invalid(seq):
                # Of forks that share a ring the last in the step writes into it, the others copy.
                sharers = [s for s in n_tokens if s in before and self._ring(s, group)]
                own = self._ring(seq, group)
                writer = [s for s in sharers if self._ring(s, group).ring == own.ring][-1]
                for layer in self.tails[group].group.layers:
                    self.models[seq][layer].lose(n_tokens[writer], before[writer])
        return 0

    def _ring(self, seq: int, group: int) -> Any:
        index = self.cache.class_of[self.tails[group].group.layers[0]]
        return self.cache.state[seq].pages[index].ring

    def invalid(self, seq: int) -> set[int]:
        """Groups, by their place in ``plan.tails``, whose ring says that a write failed in it."""
        found = enumerate(self.cache.coverage(seq) if self.tails else ())
        return {i for i, c in found if "PAYLOAD_INVALID" in repr(c.flags).upper()}

    def broken(self, seq: int) -> bool:
        """Whether the sequence must refuse steps."""
        return any(model.broken for model in self.models.get(seq, ()))

    def check_coverage(self) -> None:
        """What the cache says of its rings is what they hold (T11)."""
        for seq, models in self.models.items():
            for tail, found in zip(
                self.tails, self.cache.coverage(seq) if self.tails else (), strict=True
            ):
                model = models[tail.group.layers[0]]
                if model.ring is not None and model.tail is not None:
                    wanted = min(model.tail.rows, model.n)
                    assert (found.requested, found.exact) == (wanted, model.ring.exact()), tail

    def check_horizon(self) -> None:
        """A rollback reaches as far as the models say: never further, and where the rules say how
        far, no less (C5).
        """
        for seq, models in self.models.items():
            lowest = self.cache.length(seq) - self.cache.horizon(seq)
            safe = max(model.lowest() for model in models)
            assert lowest >= safe
            exactly = all(
                m.spec.window is None or m.spec.is_kvarn or (m.tail and m.tail.bodyless)
                for m in models
            )
            if exactly and not self.invalid(seq):
                assert lowest == safe

    def model(self, seq: int) -> list[RowsModel]:
        """The sequence's models, empty ones when it does not exist."""
        by_layer = {layer: tail for tail in self.tails for layer in tail.group.layers}
        return self.models.get(seq) or [
            model_of(s, by_layer.get(i)) for i, s in enumerate(self.specs)
        ]

    def rollback(self, seq: int, n: int) -> None:
        self.cache.rollback(seq, n)
        self._drop(seq, n)

    def rewind(self, seq: int, to: int) -> None:
        self.cache.rewind(seq, to)
        for model in self.models[seq]:
            bodyless = model.tail is not None and model.tail.bodyless
            assert not bodyless or not to or to >= model.lowest()
        self._drop(seq, self.models[seq][0].n - to)

    def _attended(
        self, n_tokens: Mapping[int, int], hide: float = 0.0
    ) -> tuple[Any, dict[int, list[Arrays]], list[NDArray[Any]]]:
        """An open step in which every layer was attended and compared."""
        parts = {seq: self.draw(n) for seq, n in n_tokens.items()}
        masks = None
        if hide:
            masks = {
                seq: rng("hide", *self.seed, self.drawn, seq).random((n, self._n(seq) + n)) >= hide
                for seq, n in n_tokens.items()
            }
        outs = []
        step = self.cache.step(dict(n_tokens))
        for layer, planned in enumerate(self.specs):
            arrays = [np.concatenate([parts[s][layer][a] for s in n_tokens]) for a in range(3)]
            out = step.attend(layer, *arrays, mask=masks)
            expected = np.concatenate(
                [
                    self.model(s)[layer].attend(*parts[s][layer], mask=masks and masks[s])
                    for s in n_tokens
                ]
            )
            assert error(out, expected) < LIMIT, (layer, planned, n_tokens)
            outs.append(out)
        return step, parts, outs

    def _append(self, parts: Mapping[int, list[Arrays]]) -> None:
        for seq, layers in parts.items():
            models = self.models.setdefault(seq, self.model(seq))
            for model, (q, k, v) in zip(models, layers, strict=True):
                model.append(k, v, q)
            assert self.cache.length(seq) == models[0].n

    def _n(self, seq: int) -> int:
        return self.model(seq)[0].n

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
