"""What sealing one 128 x 128 tile costs on one thread, for every encoder that the CPU takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from kvkernels.backend import Device
from kvkernels.bench import fill
from kvkernels.bench.measure import Effort, measure
from kvkernels.bench.report import Result
from kvkernels.bench.workload import Rows, store
from kvkernels.cpu import reference
from kvkernels.cpu.columns import seal_workspace
from kvkernels.cpu.entries import compiled
from kvkernels.errors import KvkError
from kvkernels.op import GROUP, LayerSpec
from kvkernels.planner import Limits, plan
from kvkernels.records.layout import HeadLayout, Side

_BITS, _DIM, _HEADS = 4, 128, 8
_ENCODERS = ("published", "aware")


def run(device: Device, quick: bool) -> Iterator[Result]:
    """The kernel alone for both sides, then the tiles of a real commit."""
    kernel = compiled(str(device.caps.facts["isa"]), "seal.seal_head")
    work = seal_workspace()

    def seal_head(tile: Any, is_value: bool, bits: int, out: Any) -> Any:
        return kernel(tile, is_value, bits, *work, out)

    effort = Effort(rounds=5 if quick else 15, least_s=0.005)
    rows = fill.period(_layer("published"))
    tiles = {}
    for side, x in ((Side.K, rows.k), (Side.V, rows.v)):
        staged = reference.stage_rows(x[:GROUP])[:, 0]
        # K lies by channel in the stage, V by token.
        tile = np.ascontiguousarray(staged.T if side is Side.K else staged).reshape(-1)
        tile = tile.view(np.uint16)
        out = np.empty(HeadLayout(side, _BITS, _DIM).nbytes, np.uint8)
        base = Result(case=f"peers/encode-tile-{side.value}-t1", device="cpu:0", unit="s")
        base = replace(base, entry="seal_head", baseline="published")
        seal_head(tile, side is Side.V, _BITS, out)
        if not np.array_equal(out, reference.encode(x[:GROUP, 0], side, _BITS)):
            yield replace(base, outcome="wrong", note="bytes differ from the reference")
            continue
        tiles[side] = (base, tile, out)
    calls = {
        side.value: _seal(seal_head, tile, side is Side.V, out)
        for side, (_, tile, out) in tiles.items()
    }
    samples = measure(calls, effort)
    for side, (base, _, _) in tiles.items():
        yield _timed(base, samples[side.value], 1)
    for encoder in _ENCODERS:
        base = Result(case=f"peers/encode-{encoder}-t1", device="cpu:0", entry="cpu/commit")
        base = replace(base, unit="s", baseline=encoder, note="whole commit / 16 tiles")
        try:
            call = _commit(device, encoder, rows)
        except KvkError as error:
            yield replace(base, note=f"not there: {str(error).splitlines()[0][:120]}")
            continue
        yield _timed(base, measure({"own": call}, effort)["own"], 2 * _HEADS)


def _layer(encoder: str) -> LayerSpec:
    name = f"kvarn{_BITS}"
    return LayerSpec(n_head=32, n_kv_head=_HEADS, head_dim=_DIM, k=name, v=name, encoder=encoder)


def _seal(seal: Any, tile: Any, is_value: bool, out: Any) -> Any:
    return lambda: seal(tile, is_value, _BITS, out)


def _commit(device: Device, encoder: str, rows: Rows) -> Any:
    cache = plan([_layer(encoder)], device, Limits(n_ctx=4 * GROUP, n_ubatch=512)).allocate()
    store(cache, rows, GROUP)
    second = Rows(rows.q[GROUP:], rows.k[GROUP:], rows.v[GROUP:])

    def once() -> None:
        store(cache, second, GROUP)
        cache.rewind(0, GROUP)

    once()
    return once


def _timed(base: Result, sample: Any, tiles: int) -> Result:
    return replace(
        base,
        median_s=sample.median_s / tiles,
        iqr_s=sample.iqr_s / tiles,
        min_s=sample.min_s / tiles,
        value=sample.median_s / tiles,
        error=0.0,
    )
