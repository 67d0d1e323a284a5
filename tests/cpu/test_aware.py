"""The aware encoder (codec.md 9): kernels against the float64 reference, and through the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cache_tools import Twin, contents, fill, layer_rows, make, spec
from numpy.testing import assert_array_equal

import kvkernels as kvk
from kvkernels.cpu import reference, reference_aware
from kvkernels.cpu.columns import aware_workspace
from kvkernels.cpu.kernels import aware, metric
from kvkernels.errors import InputError, NonFiniteError, UnsupportedOp
from kvkernels.memory import LayerSizes
from kvkernels.records.layout import BITS, HEAD_DIMS, LINE, HeadLayout, Side
from kvkernels.records.packing import split
from kvkernels.registry import open_device
from kvkernels.storage import Storage
from kvkernels.testing.model import RowsModel

DEVICE = open_device("cpu:0")
AWARE = spec(encoder="aware", k="kvarn2", v="kvarn4")


def tile(head_dim: int, seed: int, heads: int = 3) -> tuple[Any, Any]:
    """fp16 stage rows [128, D] with loud channels, and queries [heads, 128, D] that favour some."""
    rng = np.random.default_rng(seed)
    x = rng.normal(rng.normal(0, 0.5), 1, (128, head_dim)) * np.exp(rng.normal(0, 0.5, head_dim))
    mix = rng.normal(size=(head_dim, head_dim)) * np.exp(rng.normal(0, 1, head_dim))
    q = rng.normal(size=(heads, 128, head_dim)) @ mix * 0.3
    return x.astype(np.float16), q.astype(np.float16)


def flat(rows: Any) -> Any:
    return np.ascontiguousarray(rows).view(np.uint16).reshape(-1)


def metrics(x: Any, q: Any) -> tuple[Any, Any]:
    """Of keys ``x`` and their queries, as the commit makes them; the upper halves are not read."""
    dim = x.shape[1]
    m_k, m_v = np.zeros((dim, dim)), np.zeros((128, 128))
    keys, rows, p = np.empty(128 * dim), np.empty(128 * dim), np.empty(128 * 128)
    metric.widen_keys(flat(x.T), keys)
    for head in q:
        metric.add_moments(flat(head.T), keys, dim**-0.5, rows, p, m_k.reshape(-1), m_v.reshape(-1))
    return m_k, m_v


def seal(x: Any, side: Side, bits: int, q: Any, may_refit: bool = True, keys: Any = None) -> Any:
    dim = x.shape[1]
    out = np.zeros(HeadLayout(side, bits, dim).nbytes, np.uint8)
    work = aware_workspace(dim)
    m_k, m_v = metrics(x if keys is None else keys, q)
    if side == Side.V:
        assert aware.seal_value(flat(x), m_v, keys is not None, bits, *work, out) == 0
    else:
        assert aware.seal_keys(flat(x.T), m_k, may_refit, bits, *work, out) == 0
    return out


def codes_that_differ(a: Any, b: Any, side: Side, bits: int, dim: int) -> int:
    """How many; the axes must be equal."""
    head, found = HeadLayout(side, bits, dim), 0
    for one, other in zip(np.split(a, head.n_slices), np.split(b, head.n_slices), strict=True):
        (codes, *axes), (others, *other_axes) = (split(r, head.record, LINE) for r in (one, other))
        for x, y in zip(axes, other_axes, strict=True):
            assert_array_equal(x.view(np.uint16), y.view(np.uint16))
        found += int((codes != others).sum())
    return found


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("head_dim", "heads"), [(64, 1), (128, 3), (256, 4), (512, 1)])
def test_codec9_aware_records_equal_the_reference(head_dim: int, heads: int, bits: int) -> None:
    """A code may differ where a value sits within float64 rounding of a tie: none has, so far."""
    x, q = tile(head_dim, bits, heads)
    keys, _ = tile(head_dim, bits + 100, heads)
    for side, given in ((Side.K, None), (Side.V, None), (Side.V, keys)):
        want = reference_aware.encode(x, side, bits, q=q, keys=given, rotated=True)
        got = seal(x, side, bits, q, keys=given)
        assert codes_that_differ(got, want, side, bits, head_dim) == 0


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", ["zero", "constant", "channels", "tokens", "one_hot", "huge"])
def test_codec8_hostile_tiles_are_finite_and_no_worse(name: str, bits: int) -> None:
    rng = np.random.default_rng(3)
    x = {
        "zero": np.zeros((128, 64)),
        "constant": np.full((128, 64), 1.2345),
        "channels": np.broadcast_to(np.linspace(-3, 3, 64), (128, 64)),
        "tokens": np.broadcast_to(np.linspace(-3, 3, 128)[:, None], (128, 64)),
        "one_hot": np.eye(128, 64) * -5,
        "huge": np.where(rng.random((128, 64)) < 0.5, 65504.0, -65504.0),
    }[name].astype(np.float16)
    for q in (np.zeros((1, 128, 64), np.float16), tile(64, 4)[1]):
        for side in Side:
            got = seal(x, side, bits, q, keys=x)
            decoded = reference.decode(got, side, bits, 64)
            assert np.isfinite(decoded).all()
            published = reference.encode(x, side, bits, rotated=True)
            plain = reference.decode(published, side, bits, 64)
            worst = np.abs(plain - x).max() + 2e-3 * np.abs(x).max()
            assert np.abs(decoded - x.astype(np.float64)).max() <= 4 * worst


def test_codec9_bytes_do_not_depend_on_what_the_workspace_held() -> None:
    (x, q), (other, other_q) = tile(128, 1), tile(128, 2)
    work, m = aware_workspace(128), metrics(x, q)[0]
    outs = []
    for fill_with in (0.0, np.nan):
        for array in work[:3]:
            array.fill(fill_with)
        out = np.zeros(HeadLayout(Side.K, 2, 128).nbytes, np.uint8)
        assert aware.seal_keys(flat(x.T), m, True, 2, *work, out) == 0
        outs.append(out)
        assert (
            aware.seal_keys(flat(other.T), metrics(other, other_q)[0], True, 2, *work, out.copy())
            == 0
        )
    assert_array_equal(*outs)


def test_codec9_a_sink_inside_the_record_is_never_clipped() -> None:
    x, q = tile(64, 5)
    kept, fitted = (seal(x, Side.K, 2, q, may_refit=may) for may in (False, True))
    published = reference.encode(x, Side.K, 2, rotated=True)
    record = HeadLayout(Side.K, 2, 64).record
    for a, b in zip(split(kept, record, LINE)[1:], split(published, record, LINE)[1:], strict=True):
        assert_array_equal(a, b)
    assert (kept != fitted).any()
    # Through the cache: group 0 of a layer without an exact first record, but not group 1.
    assert_records(AWARE, 300)
    assert_records(dataclasses.replace(AWARE, sink_tokens=128), 300)


def assert_records(layer: kvk.LayerSpec, n: int, **limits: Any) -> None:
    cache = make(DEVICE, layer, **limits)
    (data,) = layer_rows(cache, n, "aware")
    fill(cache, [data], 0, 100, 101, 290, n)
    model = RowsModel(layer)
    model.append(data.k, data.v, data.q)
    names = [name for name in contents(cache, 0, 0) if " " not in name]
    assert names
    for name in names:
        stored = contents(cache, 0, 0)[name]
        assert stored == model.record_bytes(int(name[1:]))["kv".index(name[0])].tobytes(), name


@pytest.mark.parametrize("n_head", [2, 6, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS[:2])
def test_codec9_all_query_heads_of_a_kv_head_count(n_head: int, head_dim: int) -> None:
    assert_records(spec(encoder="aware", n_head=n_head, head_dim=head_dim), 300)


def test_C4_any_cut_gives_the_same_bytes() -> None:
    layers = (AWARE, dataclasses.replace(AWARE, window=150), spec())
    once, many, singles = (make(DEVICE, *layers) for _ in range(3))
    data = layer_rows(once, 300, "aware cuts")
    fill(once, data, 0, 300)
    fill(many, data, 0, 3, 130, 131, 255, 300)
    fill(singles, data, 0, *range(1, 301))
    for layer in range(3):
        assert contents(once, layer, 0) == contents(many, layer, 0) == contents(singles, layer, 0)


def test_C3_a_reseal_after_a_rollback_is_byte_identical() -> None:
    cache, plain = make(DEVICE, AWARE), make(DEVICE, AWARE)
    data, other = (layer_rows(cache, 400, name) for name in ("aware C3", "aware C3 other"))
    fill(plain, data, 0, 256, 400)
    fill(cache, data, 0, 200)
    for taken in (0, 71, 5):
        cache.rollback(0, taken)
        at = cache.length(0)
        fill(cache, other, 0, at + 100)
        cache.rollback(0, cache.length(0) - at)
        fill(cache, data, 0, 257)
        cache.rollback(0, 57)
    fill(cache, data, 0, 256, 400)
    assert contents(cache, 0, 0) == contents(plain, 0, 0)


def test_C6_forks_and_batch_mates_do_not_touch_a_record() -> None:
    twin = Twin(make(DEVICE, AWARE, n_seq=3), "aware batch")
    twin.step({0: 100, 1: 60})
    twin.fork(0, 2)
    twin.step({0: 40, 1: 90, 2: 35})
    twin.step({2: 130, 0: 1})
    for seq, (model,) in twin.models.items():
        for name, stored in contents(twin.cache, 0, seq).items():
            if " " not in name:
                want = model.record_bytes(int(name[1:]))["kv".index(name[0])]
                assert stored == want.tobytes()


def test_M2_staged_queries_are_counted_and_a_moment_needs_none() -> None:
    layer = dataclasses.replace(AWARE, sink_tokens=128)
    staged = make(DEVICE, layer)
    plain = make(DEVICE, dataclasses.replace(layer, encoder="published"))
    q_block = LayerSizes.of(layer, Storage.plain(layer), keep_queries=True).q_block
    assert q_block == 4 * 128 * 64 * 2
    blocks = staged.buffers[0].blocks
    extra = staged.memory().kv_staging_bytes - plain.memory().kv_staging_bytes
    assert extra == blocks * q_block == staged.buffers[0].q_exact.nbytes
    (data,) = layer_rows(staged, 300, "moment")
    moment = np.einsum("nhgd,nhge->hde", *[data.q.reshape(-1, 2, 2, 64).astype(np.float64)] * 2)
    given = kvk.plan(
        [layer], DEVICE, kvk.Limits(n_ctx=1024, n_ubatch=1024),
        query_moments=[moment],
    ).allocate()  # fmt: skip
    assert given.memory().kv_resident_bytes == plain.memory().kv_resident_bytes
    assert given.buffers[0].q_exact is None
    fill(given, [data], 0, 300)
    rotated = reference.rotate(reference.rotate(moment, np.float64).swapaxes(1, 2), np.float64)
    for head in range(2):
        want = reference_aware.encode(data.k[128:256, head], Side.K, 2, query_moment=rotated[head])
        records = given.buffers[0].k_records.reshape(2, given.buffers[0].slots, -1)
        slot = given.state[0].pages[0].table[1]
        assert codes_that_differ(records[head, slot], want, Side.K, 2, 64) == 0


def test_codec9_aware_is_the_default_where_queries_are_known() -> None:
    shape: dict[str, Any] = {"n_head": 4, "n_kv_head": 2, "head_dim": 64}
    default, published = kvk.LayerSpec(**shape), kvk.LayerSpec(**shape, encoder="published")
    assert default == kvk.LayerSpec(**shape, encoder="aware")
    assert_records(default, 300)
    caches = [make(DEVICE, layer) for layer in (default, published)]
    for cache, name in zip(caches, ("aware", "published"), strict=True):
        plan = cache.plan
        assert f"kvarn4/kvarn4 {name}, sinks 128" in plan.summary()
        assert ("encoder=aware" in plan.explain(0).explain()) is (name == "aware")
        commit = "cpu/commit_aware" if name == "aware" else "cpu/commit"
        assert plan.layers[0].commit.entry == commit
        assert plan.stages_queries(0) is (name == "aware")
        assert cache.memory().kv_resident_bytes == plan.memory.kv_resident_bytes
    aware_buffers, plain_buffers = (cache.buffers[0] for cache in caches)
    assert plain_buffers.q_exact is None
    staged = [cache.memory().kv_staging_bytes for cache in caches]
    assert staged[0] - staged[1] == aware_buffers.q_exact.nbytes > 0
    data = layer_rows(caches[0], 300, "default")
    for cache in caches:
        fill(cache, data, 0, 300)
    assert contents(caches[0], 0, 0) != contents(caches[1], 0, 0)


def test_codec9_no_other_encoder_takes_the_place_of_the_default() -> None:
    shape: dict[str, Any] = {"n_head": 4, "n_kv_head": 2, "head_dim": 64}
    default, published = kvk.LayerSpec(**shape), kvk.LayerSpec(**shape, encoder="published")
    rows = np.random.default_rng(1).normal(size=(128, 4, 64)).astype(np.float32)
    k, v = np.ascontiguousarray(rows[:, :2]), np.ascontiguousarray(rows[:, 2:])
    with pytest.raises(UnsupportedOp, match=r'q= or query_moment=.*encoder="published"'):
        kvk.encode(k, v, default)
    plain = kvk.encode(k, v, published)
    assert_array_equal(plain.k[0, 0], reference.encode(k[:, 0], Side.K, 4))
    assert (kvk.encode(k, v, default, q=rows).k != plain.k).any()


def test_refusals_name_what_is_missing() -> None:
    layer = dataclasses.replace(AWARE, sink_tokens=128)
    k, v = (np.random.default_rng(i).normal(size=(256, 2, 64)).astype(np.float32) for i in (1, 2))
    q = np.random.default_rng(3).normal(size=(256, 4, 64)).astype(np.float32)
    with pytest.raises(UnsupportedOp, match=r"queries.*query_moment="):
        kvk.encode(k, v, layer)
    records = kvk.encode(k, v, layer, q=q)
    later = kvk.encode(k[128:], v[128:], layer, q=q[128:], first_group=1)
    assert_array_equal(records.k[:, 1], later.k[:, 0])
    head = reference_aware.encode(k[128:, 1], Side.K, 2, q=q[128:, 2:].swapaxes(0, 1))
    assert_array_equal(later.k[1, 0], head)
    moment = np.broadcast_to(np.eye(64), (2, 64, 64))
    kvk.encode(k, v, layer, query_moment=moment)
    with pytest.raises(InputError, match="query_moment"):
        kvk.encode(k, v, layer, query_moment=moment[0])
    with pytest.raises(InputError, match="eigenvalue"):
        kvk.encode(k, v, layer, query_moment=-moment)
    with pytest.raises(NonFiniteError, match="query_moment"):
        kvk.encode(k, v, layer, query_moment=moment * np.nan)
    q[7] = 6e4
    with pytest.raises(NonFiniteError, match="q, row 7"):
        kvk.encode(k, v, layer, q=q)
    plan: Any = {"device": DEVICE, "limits": kvk.Limits(n_ctx=256)}
    with pytest.raises(InputError, match="encoder='published'"):
        kvk.plan([spec()], query_moments=[moment], **plan)
    with pytest.raises(InputError, match="one per layer"):
        kvk.plan([AWARE], query_moments=[], **plan)
