"""What a plan says of memory is what a cache takes: tails, standard types, kinds of windows (M1,
M2, W3, F01).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from cache_tools import spec

import kvkernels as kvk
from kvkernels.cache import Cache
from kvkernels.cpu.device import CpuDevice
from kvkernels.cpu.probe import probe_cpu
from kvkernels.testing.inputs import rng

ROWS = 4096  # random rows that every step cuts its own from


def held_bytes(cache: Cache) -> int:
    """Every array of every layer's buffers, whatever it is called."""
    arrays = (getattr(b, f.name) for b in cache.buffers for f in fields(b))
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def standard(**changes: Any) -> kvk.LayerSpec:
    return spec(**({"k": "q8_0", "v": "q4_0"} | changes))


def aware(**changes: Any) -> kvk.LayerSpec:
    return spec(**({"encoder": "aware"} | changes))


MODELS: dict[str, tuple[kvk.LayerSpec, ...]] = {
    "published": (spec(),),
    "aware": (aware(sink_tokens=128),),
    "published and aware": (spec(head_dim=128), aware()),
    "records under a tail": (spec(tail=256),),
    "records under a bf16 tail": (aware(tail=384, tail_dtype="bf16"),),
    "standard": (standard(head_dim=32),),
    "standard, unequal": (standard(head_dim=96, head_dim_v=160, v="f16", tail=50),),
    "standard under a tail": (standard(tail=100),),
    "exact types": (standard(k="f32", v="bf16", tail=100),),
    "mixed exact under a tail": (standard(k="f16", v="q5_1", tail=100),),
    "window of records": (spec(window=200),),
    "window of rows": (standard(window=200, tail=60), spec(window=200)),
    "window of records under a tail": (spec(window=300, tail=256),),
    "native exact window": (spec(window=200, tail=200),),
    "native exact": (spec(tail=4096), standard(tail=4096)),
    "chunked and symmetric": (
        standard(window=150, window_kind="chunked"),
        spec(window=150, window_kind="symmetric"),
    ),
    "many query heads": (spec(n_head=16, tail=256), standard(n_head=16, tail=33)),
    "mixed": (spec(tail=256, sink_tokens=128), spec(window=150, tail=150), standard(tail=33)),
}
LIMITS: dict[str, dict[str, int]] = {
    "one sequence": {"n_ctx": 900, "n_ubatch": 512},
    "three": {"n_ctx": 700, "n_ubatch": 300, "n_seq": 3, "rollback": 8},
    "verify": {"n_ctx": 600, "n_ubatch": 64, "n_seq": 4, "verify": 8, "rollback": 8},
    "decode only": {"n_ctx": 150, "n_ubatch": 4, "n_seq": 4, "verify": 1},
    "short": {"n_ctx": 130, "n_ubatch": 130, "n_seq": 2},
}


def opened(layers: tuple[kvk.LayerSpec, ...], **limits: Any) -> Cache:
    """A cache on a device of its own, so that its high water is that of this cache."""
    device = CpuDevice(probe_cpu(), n_threads=1)
    return kvk.plan(layers, device, kvk.Limits(**limits)).allocate()


def step(cache: Cache, n_tokens: dict[int, int]) -> None:
    total = sum(n_tokens.values())
    source = rng("memory").normal(size=(ROWS, 64)).astype(np.float32)
    with cache.step(n_tokens) as step:
        for i, planned in enumerate(cache.plan.layers):
            s = planned.spec
            shapes = (
                (s.n_head, s.head_dim),
                (s.n_kv_head, s.head_dim),
                (s.n_kv_head, s.head_dim_v),
            )
            step.attend(i, *(np.resize(source, (total, *shape)) for shape in shapes))


def drive(cache: Cache) -> None:
    """To the limits: a whole ubatch, sequences filled, the last rows as verified drafts of all
    sequences at once.
    """
    limits = cache.plan.limits
    step(cache, {0: min(limits.n_ubatch, limits.n_ctx)})
    cache.remove(0)
    verify = min(limits.verify, limits.n_ubatch // limits.n_seq)
    for seq in range(limits.n_seq):
        while left := limits.n_ctx - verify - cache.length(seq):
            step(cache, {seq: min(left, limits.n_ubatch)})
    step(cache, dict.fromkeys(range(limits.n_seq), verify))
    assert all(cache.length(seq) == limits.n_ctx for seq in range(limits.n_seq))


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("model", MODELS)
def test_M2_resident_to_the_byte(model: str, limits: str) -> None:
    cache = opened(MODELS[model], **LIMITS[limits])
    planned = cache.plan.memory
    assert planned.kv_resident_bytes == held_bytes(cache) == cache.memory().kv_resident_bytes
    by_layer = (cache.plan.layer_memory(i).kv_resident_bytes for i in range(len(MODELS[model])))
    assert sum(by_layer) == planned.kv_resident_bytes
    assert cache.memory().kv_transient_bytes == 0  # nothing has run
    assert planned.kv_peak_bytes == planned.kv_resident_bytes + planned.kv_transient_bytes
    for name, value in planned.to_json().items():
        assert value >= 0, name


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("model", MODELS)
def test_M2_transient_within_ten_percent_and_resident_never_moves(model: str, limits: str) -> None:
    cache = opened(MODELS[model], **LIMITS[limits])
    resident = held_bytes(cache)
    drive(cache)
    predicted, observed = cache.plan.memory.kv_transient_bytes, cache.device.transient_bytes
    assert observed > 0
    assert abs(predicted - observed) <= 0.1 * observed, (predicted, observed)
    assert cache.memory().kv_transient_bytes == observed
    assert held_bytes(cache) == resident


@pytest.mark.parametrize("past", [100, 127, 128, 129, 270])
@pytest.mark.parametrize("kind", ["sliding", "symmetric"])
def test_M2_transient_of_decodes_at_group_edges(past: int, kind: str) -> None:
    """Only sealed groups are body: records of a short context are all in the stage."""
    layers = (spec(), spec(window=90, window_kind=kind), standard(window=90, window_kind=kind))
    for layer in layers:
        cache = opened((layer,), n_ctx=past + 16, n_ubatch=16)
        drive(cache)
        predicted, observed = cache.plan.memory.kv_transient_bytes, cache.device.transient_bytes
        assert abs(predicted - observed) <= 0.1 * observed, (layer.window, predicted, observed)


@pytest.mark.parametrize(
    "layer",
    [
        spec(n_head=8, tail=256),
        aware(n_head=8),
        standard(n_head=8, tail=100),
        standard(n_head=8, window=300, tail=300),
        spec(n_head=8, window=150, window_kind="symmetric"),
    ],
    ids=["records under a tail", "aware", "standard under a tail", "native exact", "symmetric"],
)
def test_W3_transient_does_not_grow_with_queries_times_keys(layer: kvk.LayerSpec) -> None:
    def transient(n_q: int, past: int) -> int:
        cache = opened((layer,), n_ctx=past + n_q, n_ubatch=1024)
        for at in range(0, past, 512):
            step(cache, {0: min(512, past - at)})
        step(cache, {0: n_q})
        return cache.device.transient_bytes

    small, long, wide, both = (
        transient(n_q, past) for n_q, past in ((128, 512), (128, 2048), (1024, 512), (1024, 2048))
    )
    assert both - small <= (long - small) + (wide - small) + 4096
    assert long <= small * 1.1
    assert both < 1024 * 3072 * 8 * 4 / 4  # far from a score matrix


@pytest.mark.parametrize("tail", [0, 128, 1024])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize(("k", "v"), [("kvarn5", "kvarn4"), ("q5_0", "q4_0"), ("f16", "f16")])
def test_F01_a_native_route_with_a_small_workspace(k: str, v: str, dim: int, tail: int) -> None:
    layer = kvk.LayerSpec(n_head=16, n_kv_head=4, head_dim=dim, k=k, v=v, tail=tail)
    device = CpuDevice(probe_cpu(), n_threads=1)

    def transient(n_q: int, n_kv: int) -> int:
        made = kvk.plan([layer], device, kvk.Limits(n_ctx=n_kv, n_ubatch=n_q))
        assert {str(d.route) for d in made.layers[0].decisions} == {"native"}
        return made.memory.kv_transient_bytes

    found = {(q, n): transient(q, n) for q in (128, 512, 1024, 4096) for n in (8192, 32768, 131072)}
    assert found[1024, 8192] < 64 * 2**20
    for (n_q, n_kv), size in found.items():
        assert size < n_q * n_kv * 16 * 4 / 8
    # Growing both adds what growing each adds.
    corner = found[128, 8192]
    assert found[4096, 131072] - corner <= (
        (found[128, 131072] - corner) + (found[4096, 8192] - corner) + 4096
    )
