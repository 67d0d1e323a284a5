"""Caches of standard types and with tails: the bytes that are stored, which values are taken, and
what coverage says (A1, T7, T11, C4 to C6).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_tools import Twin, feed, fill, fingerprint, layer_rows, make, spec

import kvkernels as kvk
from kvkernels import quants
from kvkernels.cache import Cache
from kvkernels.errors import CapacityError, NonFiniteError, RollbackError
from kvkernels.op import STANDARD_TYPES
from kvkernels.quants.tiles import TileLayout
from kvkernels.records.layout import GROUP, Side
from kvkernels.storage import Body
from kvkernels.tail import Degradation
from kvkernels.testing.inputs import SequenceRows, cuts

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def plain(k: str, v: str, **changes: Any) -> kvk.LayerSpec:
    return spec(**({"k": k, "v": v} | changes))


def body_rows(cache: Cache, layer: int, seq: int) -> dict[str, Any]:
    """Rows of the tiles as GGML lays them out, uint8 [heads, n, row bytes] from the first row of
    the oldest group that is kept, by side.
    """
    planned, buffers = cache.plan.layers[layer], cache.buffers[layer]
    assert planned.storage.body is Body.TILES
    state = cache.state[seq]
    pages = state.pages[cache.class_of[layer]]
    heads, found = planned.spec.n_kv_head, {}
    for side, name, dim, pool in (
        (Side.K, planned.storage.k, planned.spec.head_dim, buffers.k_records),
        (Side.V, planned.storage.v, planned.spec.head_dim_v, buffers.v_records),
    ):
        layout = TileLayout(side, name, dim)
        tiles = pool.reshape(heads, buffers.slots, layout.nbytes)
        slots = [int(s) for s in pages.table[pages.first :]]
        assert -1 not in slots
        n = state.n - pages.first * GROUP
        rows = layout.unpack(tiles[:, slots])
        found[str(side)] = rows.reshape(heads, -1, rows.shape[-1])[:, :n]
    return found


def encoded(cache: Cache, layer: int, rows: SequenceRows, n: int, first: int = 0) -> dict[str, Any]:
    """What the codec itself makes of the rows."""
    storage = cache.plan.layers[layer].storage
    found = {}
    for side, name, part in ((Side.K, storage.k, rows.k), (Side.V, storage.v, rows.v)):
        given = np.ascontiguousarray(part[first * GROUP : n].swapaxes(0, 1), np.float32)
        found[str(side)] = quants.encode(given, name)
    return found


def ring_rows(cache: Cache, layer: int, seq: int) -> tuple[int, Any, Any]:
    """(oldest row, K [n, heads, D], V) of a ring, read slot by slot."""
    planned, buffers = cache.plan.layers[layer], cache.buffers[layer]
    s, storage, state = planned.spec, planned.storage, cache.state[seq]
    ring = state.pages[cache.class_of[layer]].ring
    assert ring is not None
    k_type, v_type = storage.ring_types
    heads, rings = s.n_kv_head, buffers.pages.rings
    flat = buffers.k_ring.view(DTYPES[k_type]).reshape(heads, rings, -1)
    # Tiles of 128 slots, [D, slots], the last one as wide as is left of whole vectors of 64.
    wide, at, tiles = -(-storage.capacity // 64) * 64, 0, []
    for first in range(0, wide, GROUP):
        width = min(GROUP, wide - first)
        tile = flat[..., at : at + s.head_dim * width]
        tiles.append(tile.reshape(heads, rings, s.head_dim, width))
        at += s.head_dim * width
    k = np.concatenate(tiles, axis=3)
    v = buffers.v_ring.view(DTYPES[v_type]).reshape(heads, rings, storage.capacity, s.head_dim_v)
    slots = [row % storage.capacity for row in range(ring.start, state.n)]
    return (
        ring.start,
        k[:, ring.ring][:, :, slots].transpose(2, 0, 1),
        v[:, ring.ring][:, slots].swapaxes(0, 1),
    )


def same_bytes(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for side in found:
        assert found[side].shape == wanted[side].shape, side
        assert found[side].tobytes() == wanted[side].tobytes(), side


PAIRS = [
    ("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q5_1", "q5_0"), ("q5_0", "q4_1"), ("q4_1", "q5_1"),
    ("f16", "bf16"), ("bf16", "f32"), ("f32", "f16"),
]  # fmt: skip
CUTS: list[Any] = [(333,), (1,), (3,), (128, 5), (127, 1, 2), "random"]


def edges_of(n: int, cut: Any) -> list[int]:
    if isinstance(cut, str):
        return [stop for _, stop in cuts(n, n, cut)]
    edges = [0]
    while edges[-1] < n:
        edges.append(min(n, edges[-1] + cut[(len(edges) - 1) % len(cut)]))
    return edges[1:]


# --- bytes


def test_the_pairs_have_every_type_on_both_sides() -> None:
    assert {k for k, _ in PAIRS} == {v for _, v in PAIRS} == set(STANDARD_TYPES)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_A1_C4_stored_rows_are_the_codecs_bytes(device: Any, k: str, v: str, cut: Any) -> None:
    cache = make(device, plain(k, v, head_dim=96, head_dim_v=32, tail=40), plain(k, v, window=999))
    data = layer_rows(cache, 333, "bytes", k, v, outliers=True)
    fill(cache, data, 0, *edges_of(333, cut))
    for layer, rows in enumerate(data):
        same_bytes(body_rows(cache, layer, 0), encoded(cache, layer, rows, 333))


@pytest.mark.parametrize("kind", ["sliding", "chunked", "symmetric"])
def test_C7_a_window_keeps_the_codecs_bytes_of_what_is_left(device: Any, kind: str) -> None:
    cache = make(device, plain("q8_0", "q5_1", window=100, window_kind=kind), n_ubatch=300)
    data = layer_rows(cache, 1000, "window", kind)
    fill(cache, data, 0, 300, 301, 555, 700, 1000)
    first = cache.state[0].pages[0].first
    assert first > 0
    same_bytes(body_rows(cache, 0, 0), encoded(cache, 0, data[0], 1000, first))


@pytest.mark.parametrize(("k", "v"), PAIRS[:6])
def test_C6_forks_write_their_own_bytes_F30(device: Any, k: str, v: str) -> None:
    cache = make(device, plain(k, v, tail=30), plain(k, v, window=150), n_seq=3)
    data = layer_rows(cache, 400, "fork", k)
    other = layer_rows(cache, 400, "fork other", k)
    fill(cache, data, 0, 200)
    cache.fork(0, 1)
    feed(cache, [shifted(a, b, 200) for a, b in zip(data, other, strict=True)], 1, 200, 290)
    fill(cache, data, 0, 201, 300)
    cache.fork(1, 2)
    cache.rollback(2, 15)
    feed(cache, data, 2, 275, 330)
    for layer, (a, b) in enumerate(zip(data, other, strict=True)):
        mixed = shifted(a, b, 200)
        for seq, rows, n in ((0, a, 300), (1, mixed, 290), (2, shifted(mixed, a, 275), 330)):
            first = cache.state[seq].pages[cache.class_of[layer]].first
            same_bytes(body_rows(cache, layer, seq), encoded(cache, layer, rows, n, first))
    cache.reorder({0: 2, 2: 0})
    same_bytes(body_rows(cache, 0, 2), encoded(cache, 0, data[0], 300))


def shifted(a: SequenceRows, b: SequenceRows, at: int) -> SequenceRows:
    """Rows of ``a`` up to ``at``, then those of ``b``."""
    pairs = ((a.q, b.q), (a.k, b.k), (a.v, b.v))
    return SequenceRows(*(np.concatenate([x[:at], y[at:]]) for x, y in pairs))


@pytest.mark.parametrize(("k", "v"), PAIRS[:6])
@pytest.mark.parametrize("taken", [1, 44, 45, 120])
def test_C3_rows_written_again_are_a_fresh_caches_bytes_F06(
    device: Any, k: str, v: str, taken: int
) -> None:
    layers = (plain(k, v, tail=30), plain(k, v, window=150))
    cache, fresh = make(device, *layers, rollback=128), make(device, *layers, rollback=128)
    data, wrong = layer_rows(cache, 400, "again", k), layer_rows(cache, 400, "wrong", k, gain=30.0)
    fill(cache, data, 0, 300 - taken)
    feed(cache, wrong, 0, 300 - taken, 300)
    cache.rollback(0, taken)
    fill(cache, data, 0, 301, 390)
    fill(fresh, data, 0, 390)
    for layer, rows in enumerate(data):
        first = cache.state[0].pages[cache.class_of[layer]].first
        same_bytes(body_rows(cache, layer, 0), body_rows(fresh, layer, 0))
        same_bytes(body_rows(cache, layer, 0), encoded(cache, layer, rows, 390, first))
    # A rewind and the same rows once more.
    cache.rewind(0, 256)
    fill(cache, data, 0, 390)
    same_bytes(body_rows(cache, 0, 0), body_rows(fresh, 0, 0))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize(
    "layer",
    [
        spec(tail=256),
        plain("q8_0", "q4_0", tail=70, head_dim_v=128),
        plain("f32", "q4_1", tail=70),
        spec(window=150, tail=150),
    ],
    ids=["records", "tiles", "mixed", "bare"],
)
@pytest.mark.parametrize("cut", CUTS[:1] + CUTS[2:], ids=str)
def test_T7_a_ring_holds_the_newest_rows_unrotated_F29_3(
    device: Any, layer: kvk.LayerSpec, dtype: str, cut: Any
) -> None:
    layer = kvk.LayerSpec(**{f: getattr(layer, f) for f in SPEC_FIELDS} | {"tail_dtype": dtype})
    cache = make(device, layer, rollback=8, n_seq=2)
    (data,) = layer_rows(cache, 333, "ring", dtype)
    fill(cache, [data], 0, *edges_of(333, cut))
    storage = cache.plan.layers[0].storage
    assert dtype in storage.ring_types
    start, k, v = ring_rows(cache, 0, 0)
    assert start == 333 - storage.capacity
    for found, rows, name in ((k, data.k, 0), (v, data.v, 1)):
        wanted = rows[start:].astype(DTYPES[storage.ring_types[name]])
        assert found.tobytes() == wanted.tobytes()
    # A fork copies before it writes; after a rollback the same slots are written again.
    cache.fork(0, 1)
    before = [a.tobytes() for a in ring_rows(cache, 0, 0)[1:]]
    cache.rollback(1, 7)
    feed(cache, [data], 1, 3, 23)
    assert [a.tobytes() for a in ring_rows(cache, 0, 0)[1:]] == before
    start, *found = ring_rows(cache, 0, 1)
    assert start < 326
    for stored, given in zip(found, (data.k, data.v), strict=True):
        wanted = np.concatenate([given[start:326], given[3:23]]).astype(stored.dtype)
        assert stored.tobytes() == wanted.tobytes()


SPEC_FIELDS = tuple(kvk.LayerSpec.__dataclass_fields__)


# --- values


WIDE = 1e5  # beyond fp16
OTHER = plain("f32", "f32", window=999)  # a layer of another group, which takes anything
TAKES: list[tuple[str, kvk.LayerSpec, bool, bool]] = [
    # name, layer, K takes a wide value, V takes one
    ("f32", plain("f32", "f32"), True, True),
    ("bf16", plain("bf16", "bf16"), True, True),
    ("f32 asked for an f16 tail", plain("f32", "bf16", tail=64, tail_dtype="f16"), True, True),
    ("f16", plain("f16", "f16"), False, False),
    ("f32 and f16", plain("f32", "f16"), True, False),
    ("q8_0", plain("q8_0", "q8_0"), False, False),
    ("q4_0 under bf16", plain("q4_0", "q5_1", tail=64, tail_dtype="bf16"), False, False),
    ("bf16 and q4_1", plain("bf16", "q4_1", tail=64, tail_dtype="f16"), True, False),
    # Rotated, one value of 1e5 among 64 channels is 12500 in each of them.
    ("records", spec(), True, True),
    ("records under bf16", spec(tail=256, tail_dtype="bf16"), True, True),
    ("records under f16", spec(tail=256), False, False),
    ("bare f16", plain("q4_0", "q4_0", window=64, tail=64, tail_dtype="f16"), False, False),
    ("bare bf16", plain("q4_0", "q4_0", window=64, tail=64, tail_dtype="bf16"), True, True),
    ("bare records in f16", spec(window=64, tail=64), False, False),
    ("bare records in bf16", spec(window=64, tail=64, tail_dtype="bf16"), True, True),
    ("bare, f32 and f16", plain("f32", "q4_0", window=64, tail=64, tail_dtype="f16"), True, False),
    ("native exact f16", plain("q4_0", "q4_0", tail=4096, tail_dtype="f16"), False, False),
    ("native exact bf16", spec(tail=4096, tail_dtype="bf16"), True, True),
]  # fmt: skip


def with_value(data: list[SequenceRows], which: int, value: float) -> list[SequenceRows]:
    """The second layer's row 205 with one other value."""
    arrays = [data[1].q.copy(), data[1].k.copy(), data[1].v.copy()]
    arrays[which][205, 1, 7] = value
    return [data[0], SequenceRows(*arrays)]


def refuses(cache: Cache, data: list[SequenceRows], which: int, value: float) -> bool:
    """Whether a step of sequence 3 with that value is refused, naming where; nothing changes."""
    changed = with_value(data, which, value)
    before = fingerprint(cache)
    step = cache.step({3: 10})
    step.attend(0, *changed[0].part(200, 210))
    try:
        step.attend(1, *changed[1].part(200, 210))
    except NonFiniteError as error:
        text = str(error)
        name = "qkv"[which]
        assert f"{name} of layer 1, sequence 3, position 205, head 1, channel 7" in text
        assert fingerprint(cache) == before
        return True
    finally:
        step.discard()
    return False


@pytest.mark.parametrize(("layer", "k", "v"), [t[1:] for t in TAKES], ids=[t[0] for t in TAKES])
def test_values_beyond_fp16_are_refused_where_fp16_would_hold_them(
    device: Any, layer: kvk.LayerSpec, k: bool, v: bool
) -> None:
    cache = make(device, OTHER, layer, n_seq=2)
    data = layer_rows(cache, 210, "values")
    fill(cache, data, 3, 200)
    for which, takes in ((1, k), (2, v)):
        for value in (WIDE, -WIDE, 65520.0):
            assert refuses(cache, data, which, value) is not takes, ("qkv"[which], value)
        for value in (float("nan"), float("inf"), -float("inf")):
            assert refuses(cache, data, which, value), ("qkv"[which], value)
    assert refuses(cache, data, 0, float("nan"))
    assert not refuses(cache, data, 0, WIDE)  # queries are not stored here
    if k and v:  # stored, and attended: finite
        out = feed(cache, with_value(data, 2, WIDE), 3, 200, 210)[1]
        assert np.isfinite(out).all()
        assert np.abs(out).max() > 1e3
        assert np.isfinite(feed(cache, data, 3, 3, 5)[1]).all()
    else:
        fill(cache, data, 3, 210)  # and it goes on


def test_records_refuse_what_overflows_rotated(device: Any) -> None:
    for tail in ({}, {"tail": 256, "tail_dtype": "bf16"}, {"window": 64}):
        cache = make(device, OTHER, spec(**tail))
        data = layer_rows(cache, 210, "rotated")
        fill(cache, data, 3, 200)
        bare = cache.plan.layers[1].storage.body is Body.NONE
        for which in (1, 2):
            assert refuses(cache, data, which, 6e5)
            assert refuses(cache, data, which, WIDE) is bare


def test_the_largest_fp16_value_is_taken_and_comes_back(device: Any) -> None:
    """65504 is the largest half; values up to 65520 round to it."""
    layer = plain("q8_0", "f16", tail=64, tail_dtype="f16")
    cache = make(device, OTHER, layer)
    data = layer_rows(cache, 210, "largest")
    fill(cache, data, 3, 200)
    for value in (65504.0, 65519.0, -65519.0):
        assert not refuses(cache, data, 2, value)
    feed(cache, with_value(data, 2, 65519.0), 3, 200, 210)
    assert ring_rows(cache, 1, 3)[2][-5, 1, 7] == np.float16(65504)


# --- T11: coverage


def states(cache: Cache, seq: int) -> list[tuple[str, int, int, str, Degradation]]:
    return [(c.group, c.requested, c.exact, c.state, c.flags) for c in cache.coverage(seq)]


OVERLAYS = (spec(tail=256), plain("q8_0", "q4_0", tail=50), plain("q4_0", "q4_0", window=90))
LOST = Degradation.HISTORICAL_OP
OK = Degradation.NONE


def test_T11_coverage_of_a_growing_sequence(device: Any) -> None:
    cache = make(device, *OVERLAYS[:2], rollback=8)
    twin = Twin(cache, "T11")
    for n, records, rows in ((10, 10, 10), (40, 50, 50), (206, 256, 50), (20, 256, 50)):
        twin.step({0: n})
        assert states(cache, 0) == [
            ("full@l0", records, records, "complete", OK),
            ("full@l1", rows, rows, "complete", OK),
        ]


def test_T11_groups_without_rings(device: Any) -> None:
    cache = make(device, spec(), plain("q8_0", "q4_0"), plain("f16", "f32", window=100))
    twin = Twin(cache, "T11 plain")
    twin.step({0: 300})
    assert states(cache, 0) == [
        ("full@l0", 128, 128, "complete", OK),  # the stage holds them
        ("full@l1", 0, 0, "complete", OK),
        ("swa@l2", 0, 0, "complete", OK),
    ]


def test_T11_rollback_rewind_fork_and_recovery(device: Any) -> None:
    cache = make(device, *OVERLAYS[:2], rollback=8, n_seq=3)
    twin = Twin(cache, "T11 flags")
    for _ in range(3):
        twin.step({0: 200})
    twin.rollback(0, 8)  # R rows: nothing is lost
    assert [s[3] for s in states(cache, 0)] == ["complete", "complete"]
    twin.rollback(0, 30)
    assert states(cache, 0) == [
        ("full@l0", 256, 226, "partial", LOST), ("full@l1", 50, 20, "partial", LOST),
    ]  # fmt: skip
    twin.fork(0, 1)
    assert states(cache, 1) == states(cache, 0)
    twin.step({1: 49})
    assert states(cache, 1)[1] == ("full@l1", 50, 50, "partial", LOST)
    twin.step({1: 1})
    assert states(cache, 1)[1] == ("full@l1", 50, 50, "complete", OK)
    assert states(cache, 1)[0] == ("full@l0", 256, 256, "partial", LOST)
    twin.step({1: 206})
    assert states(cache, 1)[0] == ("full@l0", 256, 256, "complete", OK)
    # The other one is still what it was.
    assert states(cache, 0)[1] == ("full@l1", 50, 20, "partial", LOST)
    twin.rewind(0, 384)
    assert states(cache, 0) == [
        ("full@l0", 256, 48, "partial", LOST), ("full@l1", 50, 0, "none", LOST),
    ]  # fmt: skip
    twin.rewind(0, 128)
    assert [s[3] for s in states(cache, 0)] == ["none", "none"]
    twin.fork(0, 2)
    assert states(cache, 2) == states(cache, 0)
    twin.rewind(0, 0)
    assert states(cache, 0) == [
        ("full@l0", 0, 0, "complete", OK), ("full@l1", 0, 0, "complete", OK),
    ]  # fmt: skip
    twin.step({0: 60, 2: 60})
    assert states(cache, 0)[0] == ("full@l0", 60, 60, "complete", OK)
    assert states(cache, 2)[0] == ("full@l0", 188, 60, "partial", LOST)
    assert states(cache, 2)[1] == ("full@l1", 50, 50, "complete", OK)
    twin.step({2: 196})
    assert states(cache, 2)[0] == ("full@l0", 256, 256, "complete", OK)
    twin.check_coverage()


def test_T11_a_bare_window_is_whole_or_refuses(device: Any) -> None:
    cache = make(device, spec(window=100, tail=100), rollback=8)
    twin = Twin(cache, "T11 bare")
    twin.step({0: 300})
    twin.rollback(0, 8)
    assert states(cache, 0) == [("swa@l0", 100, 100, "complete", OK)]
    before = fingerprint(cache)
    with pytest.raises(RollbackError, match="can take back 0 of them"):
        cache.rollback(0, 1)
    assert fingerprint(cache) == before
    twin.step({0: 3})


# --- field cases


ONE_HEAD = {"n_head": 1, "n_kv_head": 1, "head_dim": 64}


def answers_in_chunks(device: Any, n: int, chunk: int) -> None:
    """``n`` rows under compressed bodies with tails, a chunk a step, held against the model."""
    layers = (
        spec(tail=256, **ONE_HEAD), plain("q8_0", "q4_0", tail=70, **ONE_HEAD),
        spec(window=200, tail=200, **ONE_HEAD),
    )  # fmt: skip
    twin = Twin(make(device, *layers, n_ctx=n, n_ubatch=n), "F22", chunk)
    while (at := twin.cache.length(0)) < n:
        twin.step({0: min(chunk, n - at)})


@pytest.mark.parametrize("chunk", [60, 128, 129, 300])
def test_F22_chunk_edges_in_on_and_after_a_groups(device: Any, chunk: int) -> None:
    answers_in_chunks(device, 300, chunk)


@pytest.mark.parametrize("chunk", [128, 192, 256, 500, 512, 1000, 1024])
def test_F22_ubatches_do_not_change_the_answer(device: Any, chunk: int) -> None:
    answers_in_chunks(device, 1024, chunk)


@pytest.mark.parametrize(
    ("layer", "to"),
    [(plain("q8_0", "q4_0", tail=50, **ONE_HEAD), to) for to in (0, 1, 127, 128, 129, 300)]
    + [(spec(window=150, tail=150, **ONE_HEAD), to) for to in (0, 128, 129, 300)]
    + [(plain("q4_0", "q4_0", window=150, **ONE_HEAD), to) for to in (128, 129, 300)],
)
def test_F30_crop_with_tails(device: Any, layer: kvk.LayerSpec, to: int) -> None:
    twin = Twin(make(device, layer, rollback=20), "crop", to)
    twin.step({0: 320})
    if 320 - to <= twin.cache.horizon(0):
        twin.rollback(0, 320 - to)
    else:
        before = fingerprint(twin.cache)
        with pytest.raises(RollbackError):
            twin.cache.rollback(0, 320 - to)
        assert fingerprint(twin.cache) == before
        twin.remove(0)
        if to:
            twin.step({0: to})
    twin.check_coverage()
    twin.step({0: 3})
    twin.step({0: 40})


def test_F10_users_of_the_cache_need_the_most_in_any_order(device: Any) -> None:
    """What several users need is one number, their largest: every one of them is served."""
    for rollback in (max(3, 16), max(16, 3)):
        twin = Twin(make(device, spec(window=100, tail=100), rollback=rollback), "F10 order")
        twin.step({0: 250})
        assert twin.cache.horizon(0) == 16
        twin.rollback(0, 3)
        twin.rollback(0, 13)
        twin.step({0: 40})


def test_F29_a_neighbour_changes_no_byte_of_tiles_or_ring(device: Any) -> None:
    layer = plain("q4_0", "q5_1", tail=60)
    alone, pair = make(device, layer, n_seq=2), make(device, layer, n_seq=2)
    data, loud = layer_rows(alone, 300, "quiet"), layer_rows(alone, 300, "loud", gain=100.0)
    fill(alone, data, 0, 200, 300)
    for start, stop in ((0, 200), (200, 300)):
        with pair.step({1: stop - start, 0: stop - start}) as step:
            both = zip(loud[0].part(start, stop), data[0].part(start, stop), strict=True)
            step.attend(0, *(np.concatenate(x) for x in both))
    same_bytes(body_rows(pair, 0, 0), body_rows(alone, 0, 0))
    for a, b in zip(ring_rows(pair, 0, 0)[1:], ring_rows(alone, 0, 0)[1:], strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_full_cache_with_rings_refuses_and_stays(device: Any) -> None:
    twin = Twin(make(device, *OVERLAYS, n_seq=2, n_ctx=400), "full")
    twin.step({3: 5, 8: 200})
    before = fingerprint(twin.cache)
    for call in (
        lambda: twin.cache.fork(3, 4),
        lambda: twin.cache.step({4: 1}),
        lambda: twin.cache.step({8: 201}),
    ):
        with pytest.raises(CapacityError):
            call()
    assert fingerprint(twin.cache) == before
    twin.fork(8, 3)
    twin.step({3: 1, 8: 1})
