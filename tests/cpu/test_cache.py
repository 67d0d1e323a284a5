"""The cache by rule and field case: semantics C1 to C8, M2, W3; F06, F10, F29, F30, F33."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache_tools import (
    LIMIT,
    Twin,
    contents,
    error,
    feed,
    fill,
    fingerprint,
    idle,
    layer_rows,
    spec,
)
from cache_tools import make as make_cache

import kvkernels as kvk
from kvkernels.cache import Cache
from kvkernels.cpu import reference
from kvkernels.cpu.device import CpuDevice
from kvkernels.cpu.probe import probe_cpu
from kvkernels.errors import (
    CapacityError,
    InputError,
    NonFiniteError,
    RequestError,
    RollbackError,
    StepError,
    UnsupportedOp,
)
from kvkernels.memory import LayerSizes
from kvkernels.records.layout import GROUP, HeadLayout, Side
from kvkernels.storage import Storage
from kvkernels.testing.inputs import cuts
from kvkernels.testing.model import RowsModel
from kvkernels.testing.poison import rows_of

THREE = (spec(), spec(window=150, k="kvarn4"), spec(sink_tokens=128, v="kvarn2"))


def make(device: Any, *layers: kvk.LayerSpec, **limits: Any) -> Cache:
    return make_cache(device, *(layers or THREE), **limits)


# --- C1, C2, C4: sealing


def test_C1_a_group_is_sealed_with_its_128th_row(device: Any) -> None:
    cache = make(device, spec(), spec(sink_tokens=128))
    data = layer_rows(cache, 300, "C1")
    fill(cache, data, 0, 127)
    assert "k0" not in contents(cache, 0, 0)
    fill(cache, data, 0, 128)
    assert set(contents(cache, 0, 0)) == {"k0", "v0", "k0 rows", "v0 rows"}
    # C2: group 0 is a sink there and never gets a record.
    assert set(contents(cache, 1, 0)) == {"k0 rows", "v0 rows"}
    fill(cache, data, 0, 256, 300)
    assert {"k0", "k1", "k1 rows", "k2 rows"} < set(contents(cache, 0, 0))
    assert "k0 rows" not in contents(cache, 0, 0)
    assert {"k0 rows", "k1", "k1 rows", "k2 rows"} < set(contents(cache, 1, 0))


def test_C1_stage_and_records_are_the_reference_encoders(device: Any) -> None:
    cache = make(device)
    data = layer_rows(cache, 300, "reference")
    fill(cache, data, 0, 100, 101, 290, 300)
    for layer, rows in enumerate(data):
        model = RowsModel(cache.plan.layers[layer].spec)
        model.append(rows.k, rows.v)
        for name, stored in contents(cache, layer, 0).items():
            group = int(name.split()[0][1:])
            if name.endswith("rows"):
                part = getattr(rows, name[0])[group * GROUP : (group + 1) * GROUP]
                assert stored == reference.stage_rows(part.swapaxes(0, 1)).tobytes(), name
            else:
                assert stored == model.record_bytes(group)["kv".index(name[0])].tobytes(), name


def test_C1b_a_group_is_sealed_after_the_attention_of_its_step(device: Any) -> None:
    """The step that completes a group sees its own rows as they are, not through the record."""
    layer = spec(k="kvarn2", v="kvarn2")
    cache = make(device, layer)
    data = layer_rows(cache, 257, "C1b")
    fill(cache, data, 0, 120)
    out = feed(cache, data, 0, 120, 140)[0]
    model = RowsModel(layer)
    model.append(data[0].k[:120], data[0].v[:120])
    exact = model.attend(*data[0].part(120, 140))
    assert error(out, exact) < LIMIT
    # A sealed group would be seen: 2-bit records are far from the rows.
    model.append(data[0].k[120:256], data[0].v[120:256])
    fill(cache, data, 0, 256)
    late = feed(cache, data, 0, 256, 257)[0]
    assert error(late, model.attend(*data[0].part(256, 257))) < LIMIT
    never_sealed = RowsModel(dataclasses.replace(layer, sink_tokens=256))
    never_sealed.append(data[0].k[:256], data[0].v[:256])
    assert error(late, never_sealed.attend(*data[0].part(256, 257))) > 0.05


def test_C2_sinks_stay_exact_for_ever(device: Any) -> None:
    twin = Twin(make(device, spec(sink_tokens=256, k="kvarn2"), n_ctx=2048), "C2")
    twin.step({0: 300})
    before = contents(twin.cache, 0, 0)
    twin.step({0: 800})
    twin.step({0: 1})
    after = contents(twin.cache, 0, 0)
    assert after["k0 rows"] == before["k0 rows"]
    assert after["v1 rows"] == before["v1 rows"]
    assert not {"k0", "k1"} & set(after)


def test_queries_of_open_groups_are_staged_when_asked(device: Any) -> None:
    cache = make(device, spec(), keep_queries=True)
    data = layer_rows(cache, 300, "queries")
    fill(cache, data, 0, 100, 130, 300)
    buffers = cache.buffers[0]
    staged = rows_of("q_exact", buffers.q_exact, spec(), buffers.blocks)
    for group, block in cache.state[0].pages[0].blocks.items():
        part = data[0].q[group * GROUP : (group + 1) * GROUP]
        expected = reference.stage_rows(part.swapaxes(0, 1)).view(np.uint16)
        assert np.array_equal(staged[:, block, : len(part)], expected)


@pytest.mark.parametrize(
    "cut", [(1,), (3,), (128,), (300, 5), "random", "random 2"], ids=lambda c: str(c)
)
def test_C4_any_cut_gives_the_same_bytes_F29_1(device: Any, cut: Any) -> None:
    n = 333
    once, many = make(device), make(device)
    data = layer_rows(once, n, "C4")
    fill(once, data, 0, n)
    if isinstance(cut, str):
        edges = [stop for _, stop in cuts(n, n, cut)]
    else:
        edges, at = [], 0
        while at < n:
            at = min(n, at + cut[len(edges) % len(cut)])
            edges.append(at)
    fill(many, data, 0, *edges)
    for layer in range(3):
        assert contents(many, layer, 0) == contents(once, layer, 0)


# --- C3, C5: taking back


def test_C3_reseal_after_a_rollback_is_byte_identical_F06(device: Any) -> None:
    cache, plain = make(device), make(device)
    data = layer_rows(cache, 400, "C3")
    other = layer_rows(cache, 400, "C3 other")
    fill(plain, data, 0, 256, 400)
    fill(cache, data, 0, 200)
    for taken in (0, 1, 71, 200 - 128, 5):
        cache.rollback(0, taken)
        # Wrong drafts first: they complete the group and start the next one.
        at = cache.length(0)
        fill(cache, other, 0, at + 100)
        cache.rollback(0, cache.length(0) - at)
        fill(cache, data, 0, 257)
        cache.rollback(0, 257 - 200)
        fill(cache, data, 0, 200)
    fill(cache, data, 0, 256, 400)
    for layer in range(3):
        assert contents(cache, layer, 0) == contents(plain, layer, 0)


def test_C5_horizon(device: Any) -> None:
    cache = make(device, spec())
    data = layer_rows(cache, 500, "horizon")
    for n, horizon in ((1, 1), (127, 127), (128, 128), (129, 129), (255, 255), (256, 128),
                       (257, 129), (383, 255), (384, 128), (500, 244)):  # fmt: skip
        fill(cache, data, 0, n)
        assert cache.horizon(0) == horizon, n
    assert cache.horizon(7) == 0


@pytest.mark.parametrize("beyond", [1, 2, 128, 129, 200, 10_000])
def test_C5_beyond_the_horizon_nothing_changes_F10(device: Any, beyond: int) -> None:
    cache = make(device, n_seq=2)
    data = layer_rows(cache, 500, "C5")
    fill(cache, data, 0, 500)
    horizon = cache.horizon(0)
    before = fingerprint(cache)
    n = min(horizon + beyond, 10_000)
    with pytest.raises(RollbackError) as caught:
        cache.rollback(0, n)
    assert caught.value.largest == horizon
    assert caught.value.boundary == max(0, 500 - n) // GROUP * GROUP
    assert str(horizon) in str(caught.value)
    assert f"rewind(0, {caught.value.boundary})" in str(caught.value)
    assert fingerprint(cache) == before
    cache.rollback(0, caught.value.largest)


@pytest.mark.parametrize("n", [1, 5, 16, 100, 128])
def test_F10_what_is_advertised_can_be_taken_back(device: Any, n: int) -> None:
    """Whatever happened before, a step's newest ``rollback`` rows can go again, and the rest is
    as if they had never been there.
    """
    for total in (n, 128 + n, 256, 300, 384, 385, 470):
        twin = Twin(make(device, rollback=n), "F10", n)
        for at in range(0, total, 90):
            twin.step({0: min(90, total - at)})
        assert twin.cache.horizon(0) >= min(n, total)
        for r in sorted({0, 1, n - 1, n}):
            twin.step({0: n})
            assert twin.cache.horizon(0) >= n
            twin.rollback(0, r)
            twin.step({0: 2}, commit=False)
            twin.rollback(0, n - r)
            twin.step({0: 2}, commit=False)
            assert twin.cache.length(0) == total


def test_C5_rewind(device: Any) -> None:
    twin = Twin(make(device, spec(), spec(sink_tokens=128)), "rewind")
    twin.step({0: 500})
    before = contents(twin.cache, 0, 0)
    twin.rewind(0, 256)
    assert twin.cache.length(0) == 256
    after = contents(twin.cache, 0, 0)
    assert after == {name: before[name] for name in ("k0", "v0", "k1", "v1")}
    twin.step({0: 3})
    twin.step({0: 130})
    for to in (100, 512, -128):
        with pytest.raises(InputError, match=r"multiple of 128|whole number"):
            twin.cache.rewind(0, to)
    twin.rewind(0, 0)
    twin.step({0: 5})


def test_C5_rewind_needs_what_a_window_still_holds(device: Any) -> None:
    twin = Twin(make(device, spec(window=150)), "rewind window")
    for _ in range(9):
        twin.step({0: 100})
    before = fingerprint(twin.cache)
    with pytest.raises(RollbackError, match="has dropped rows that row 128 sees"):
        twin.cache.rewind(0, 128)
    assert fingerprint(twin.cache) == before
    twin.rewind(0, 768)
    twin.step({0: 30})
    twin.rewind(0, 0)
    twin.step({0: 200})


def test_F06_append_three_drop_some(device: Any) -> None:
    """Speculative decoding: accepted drafts vary; records equal those of a cache that never saw
    the rejected ones, and a wider code is never worse.
    """
    errors = {}
    for bits in (4, 5, 6, 8):
        layer = spec(k=f"kvarn{bits}", v=f"kvarn{bits}")
        cache, plain = make(device, layer), make(device, layer)
        data = layer_rows(cache, 700, "F06")
        wrong = layer_rows(cache, 700, "F06 wrong")
        fill(cache, data, 0, 360)
        source = np.random.default_rng(6)
        for _ in range(60):
            at, drop = cache.length(0), int(source.integers(0, 3))
            good = 3 - drop
            feed(cache, data, 0, at, at + good)
            if drop:
                feed(cache, wrong, 0, at + good, at + 3)
                cache.rollback(0, drop)
        n = cache.length(0)
        fill(plain, data, 0, n)
        assert contents(cache, 0, 0) == contents(plain, 0, 0)
        with cache.step({0: 1}) as step:
            out = step.attend(0, *data[0].part(n, n + 1))
        exact = RowsModel(dataclasses.replace(layer, sink_tokens=1024))
        exact.append(data[0].k[:n], data[0].v[:n])
        errors[bits] = error(out, exact.attend(*data[0].part(n, n + 1)))
    assert errors[8] < errors[6] < errors[5] < errors[4] < 0.3


# --- C6, F30: sequences


def test_F29_one_sequence_does_not_change_another(device: Any) -> None:
    alone, pair = make(device, n_seq=2), make(device, n_seq=2)
    data = layer_rows(alone, 300, "quiet")
    loud = layer_rows(alone, 300, "loud", gain=100.0)
    fill(alone, data, 0, 200, 300)
    for start, stop in ((0, 200), (200, 300)):
        with pair.step({1: stop - start, 0: stop - start}) as step:
            for layer in range(3):
                both = zip(
                    loud[layer].part(start, stop), data[layer].part(start, stop), strict=True
                )
                step.attend(layer, *(np.concatenate(x) for x in both))
    for layer in range(3):
        assert contents(pair, layer, 0) == contents(alone, layer, 0)


def test_F29_decoded_rows_are_compressed_newest_are_exact(device: Any) -> None:
    layer = spec(k="kvarn4", v="kvarn4")
    cache = make(device, layer)
    data = layer_rows(cache, 300, "F29")
    fill(cache, data, 0, 32, *range(33, 301))
    stored = contents(cache, 0, 0)
    for side, name in ((Side.K, "k"), (Side.V, "v")):
        rows = getattr(data[0], name)
        heads = np.frombuffer(stored[f"{name}0"], np.uint8).reshape(2, -1)
        decoded = np.stack([reference.decode(h, side, 4, 64) for h in heads], 1)
        staged = reference.stage_rows(rows[:GROUP]).astype(np.float32)
        assert 0.01 < error(decoded, staged) < 0.15
        newest = np.frombuffer(stored[f"{name}2 rows"], np.float16).reshape(2, -1, 64)
        assert np.array_equal(newest.swapaxes(0, 1), reference.stage_rows(rows[256:]))


def test_C6_fork_shares_until_one_side_writes(device: Any) -> None:
    twin = Twin(make(device, n_seq=3), "fork")
    twin.step({0: 300})
    held = [c.slots.capacity - c.slots.free for c in twin.cache.classes]
    twin.fork(0, 1)
    assert [c.slots.capacity - c.slots.free for c in twin.cache.classes] == held
    before = [contents(twin.cache, layer, 0) for layer in range(3)]
    twin.step({1: 100})  # completes a group and starts another on one side only
    assert [contents(twin.cache, layer, 0) for layer in range(3)] == before
    twin.step({0: 1, 1: 1})
    twin.fork(1, 0)
    twin.step({0: 3, 1: 200})
    twin.fork(1, 1)
    twin.remove(1)
    twin.step({0: 90})
    twin.remove(0)
    assert idle(twin.cache)


def test_F30_reorder_select_repeat_crop(device: Any) -> None:
    twin = Twin(make(device, n_seq=6, n_ctx=512), "F30")
    twin.step({0: 330, 1: 340, 2: 250})
    lengths = [twin.cache.length(s) for s in range(3)]
    twin.reorder({0: 2, 1: 0, 2: 1})
    assert [twin.cache.length(s) for s in range(3)] == [lengths[2], lengths[0], lengths[1]]
    twin.step({0: 1, 1: 2, 2: 3})
    for src, dst in ((0, 3), (1, 4), (2, 5)):  # batch repeat
        twin.fork(src, dst)
    twin.step(dict.fromkeys(range(6), 1))
    twin.reorder({0: 0, 1: 0, 2: 5})  # a beam that wins twice
    twin.step(dict.fromkeys(range(6), 2))
    twin.select(1)
    assert sorted(twin.cache.state) == [1]
    twin.step({1: 30})
    twin.remove(1)
    assert idle(twin.cache)


@pytest.mark.parametrize("to", [0, 1, 127, 128, 129, 300])
def test_F30_crop(device: Any, to: int) -> None:
    twin = Twin(make(device, spec()), "crop", to)
    for n in (90, 100, 130):
        twin.step({0: n})
    if 320 - to <= twin.cache.horizon(0):
        twin.rollback(0, 320 - to)
    else:
        twin.rewind(0, to // GROUP * GROUP)
        twin.step({0: to % GROUP}) if to % GROUP else None
    assert twin.cache.length(0) == to
    twin.step({0: 3})
    twin.step({0: 200})


def test_F30_operations_on_an_empty_cache(device: Any) -> None:
    cache = make(device)
    before = fingerprint(cache)
    cache.select([])
    cache.reorder({})
    assert cache.length(0) == cache.horizon(0) == 0
    for call in (
        lambda: cache.rollback(0, 0),
        lambda: cache.rewind(0, 0),
        lambda: cache.remove(0),
        lambda: cache.fork(0, 1),
        lambda: cache.reorder({0: 1}),
        lambda: cache.select([0]),
    ):
        with pytest.raises(StepError, match=r"no sequence .; existing: none"):
            call()
    assert fingerprint(cache) == before


def test_C6_full_of_sequences(device: Any) -> None:
    twin = Twin(make(device, n_seq=2), "full")
    twin.step({3: 5, 8: 200})
    before = fingerprint(twin.cache)
    for call in (
        lambda: twin.cache.fork(3, 4),
        lambda: twin.cache.reorder({4: 8}),
        lambda: twin.cache.step({4: 1}),
    ):
        with pytest.raises(CapacityError):
            call()
    assert fingerprint(twin.cache) == before
    twin.fork(8, 3)
    twin.step({3: 1, 8: 1})


# --- C7: windows


@pytest.mark.parametrize("window", [1, 100, 128, 150, 500])
def test_C7_old_groups_are_freed(device: Any, window: int) -> None:
    twin = Twin(make(device, spec(window=window), n_ctx=4096, n_ubatch=256), "C7", window)
    most = -(-(window + 2 * GROUP - 1) // GROUP) + 1
    for _ in range(16):
        twin.step({0: 200})
        (cls,) = twin.cache.classes
        assert cls.slots.capacity - cls.slots.free <= most
    assert cls.slots.capacity <= most + 1 + 2
    twin.rollback(0, twin.cache.horizon(0))
    twin.step({0: 1})


# --- C8: failures publish nothing


class Failing:
    """A device whose n-th commit fails, after or before it wrote."""

    def __init__(self, device: Any) -> None:
        self._device, self.left, self.after, self.calls = device, -1, False, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, entry: str, op: Any, call: Any) -> None:
        failing = False
        if entry.startswith("cpu/commit"):
            failing = self.left == 0
            self.left -= 1
            self.calls += 1
        if failing and not self.after:
            raise RuntimeError("injected")
        self._device.run(entry, op, call)
        if failing:
            raise RuntimeError("injected")


@pytest.mark.parametrize("after", [False, True])
def test_C8_a_failed_commit_publishes_nothing(device: Any, after: bool) -> None:
    failing = Failing(device)
    twin = Twin(make(failing, n_seq=2), "C8")
    twin.step({0: 250, 1: 20})
    twin.fork(0, 1)
    for index in range(3):
        before = {s: [contents(twin.cache, layer, s) for layer in range(3)] for s in (0, 1)}
        refs = [(list(c.slots._refs), list(c.blocks._refs)) for c in twin.cache.classes]
        state = twin.cache.state
        failing.left, failing.after = index, after
        with pytest.raises(RuntimeError, match="injected"):
            twin.step({0: 140, 1: 3})
        assert failing.left == -1
        assert twin.cache.state is state
        assert refs == [(c.slots._refs, c.blocks._refs) for c in twin.cache.classes]
        assert before == {s: [contents(twin.cache, layer, s) for layer in range(3)] for s in (0, 1)}
        twin.step({0: 1, 1: 2}, commit=False)
    twin.step({0: 140, 1: 3})
    twin.step({0: 1, 1: 1})


def test_C8_an_exception_in_the_block_discards_the_step(device: Any) -> None:
    cache = make(device)
    data = layer_rows(cache, 210, "discard")
    fill(cache, data, 0, 200)
    before = fingerprint(cache)

    def fails() -> None:
        with cache.step({0: 10}) as step:
            for i, layer in enumerate(data):
                step.attend(i, *layer.part(200, 210))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert fingerprint(cache) == before
    step = cache.step({0: 10})
    step.discard()
    step.discard()
    assert fingerprint(cache) == before


def test_closed_and_open_steps(device: Any) -> None:
    cache = make(device)
    data = layer_rows(cache, 20, "closed")
    with cache.step({0: 10}) as step:
        for i, layer in enumerate(data):
            step.attend(i, *layer.part(0, 10))
        with pytest.raises(StepError, match="layer 1 was attended already"):
            step.attend(1, *data[1].part(0, 10))
        for call in (
            lambda: cache.step({0: 1}),
            lambda: cache.rollback(0, 1),
            lambda: cache.rewind(0, 0),
            lambda: cache.remove(0),
            lambda: cache.fork(0, 1),
            lambda: cache.reorder({0: 0}),
            lambda: cache.select([]),
        ):
            with pytest.raises(StepError, match="a step is open"):
                call()
    for call in (
        lambda: step.attend(0, *data[0].part(0, 10)),
        step.commit,
        step.__enter__,
    ):
        with pytest.raises(StepError, match="the step is closed"):
            call()
    assert cache.length(0) == 10


def test_a_missing_layer_stores_nothing(device: Any) -> None:
    cache = make(device)
    data = layer_rows(cache, 20, "missing")
    before = fingerprint(cache)
    with (
        pytest.raises(StepError, match=r"layers \[0, 2\] were not attended"),
        cache.step({0: 10}) as step,
    ):
        step.attend(1, *data[1].part(0, 10))
    assert fingerprint(cache) == before
    fill(cache, data, 0, 10)


# --- M2, W3, F33: memory


def held_bytes(cache: Cache) -> int:
    names = ("k_records", "v_records", "k_exact", "v_exact", "q_exact")
    arrays = [getattr(buffers, name) for buffers in cache.buffers for name in names]
    return sum(array.nbytes for array in arrays if array is not None)


@pytest.mark.parametrize("keep_queries", [False, True])
def test_M2_resident_to_the_byte_F29_4(device: Any, keep_queries: bool) -> None:
    cache = make(device, n_ctx=1000, n_seq=3, n_ubatch=300, keep_queries=keep_queries)
    memory = cache.memory()
    assert memory.kv_resident_bytes == held_bytes(cache) == cache.plan.memory.kv_resident_bytes
    assert memory.kv_peak_bytes == memory.kv_resident_bytes + memory.kv_transient_bytes
    # Layout arithmetic by hand for one full layer: 7 groups, and 2 sequences hold 1 block more.
    one = make(device, spec(), n_ctx=1000, n_seq=3, n_ubatch=300, keep_queries=keep_queries)
    k = 2 * (128 * 64 * 3 // 8 + 2 * (64 + 64 + 128))
    v = 2 * (128 * 64 * 5 // 8 + 2 * (128 + 128 + 64))
    blocks = 3 * 3 + 2
    assert one.memory().kv_k_payload_bytes == 3 * 7 * k
    assert one.memory().kv_v_payload_bytes == 3 * 7 * v
    exact = blocks * 128 * 64 * 2 * (2 + 2 + (4 if keep_queries else 0))
    assert one.memory().kv_staging_bytes == exact
    assert one.memory().kv_resident_bytes == 3 * 7 * (k + v) + exact
    sizes = LayerSizes.of(spec(), Storage.plain(spec()), keep_queries=keep_queries)
    assert (sizes.k_slot, sizes.v_slot) == (k, v)
    assert sizes.k_slot == 2 * HeadLayout(Side.K, 3, 64).nbytes


@pytest.mark.parametrize("entry", [None, "cpu/attend_materialized"])
def test_W3_transient_does_not_grow_with_queries_times_keys(entry: str | None) -> None:
    def transient(n_q: int, past: int) -> int:
        device = CpuDevice(probe_cpu(), n_threads=1)
        cache = kvk.plan(
            [spec(n_head=8)],
            device,
            kvk.Limits(n_ctx=past + n_q, n_ubatch=1024, window_chunk=256),
            kvk.Policy(entry=entry),
        ).allocate()
        data = layer_rows(cache, past + n_q, "W3")
        fill(cache, data, 0, *range(256, past + 1, 256))
        tracemalloc.start()
        feed(cache, data, 0, past, past + n_q)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < n_q * (past + n_q) * 8 * 4 / 4  # far from a score matrix
        return device.transient_bytes

    small, long, wide, both = (transient(q, p) for q, p in ((256, 512), (256, 2048), (1024, 512),
                                                            (1024, 2048)))  # fmt: skip
    # What growing both adds is what growing each adds: no product term.
    assert both - small <= (long - small) + (wide - small) + 4096
    if entry is None:
        assert long <= small * 1.1  # windows bound it


def test_F33_storing_more_takes_no_more_workspace() -> None:
    peaks, stored = {}, set()
    for n_tokens, n_threads in ((1024, 1), (8192, 1), (1024, 2), (1024, 3)):
        device = CpuDevice(probe_cpu(), n_threads=n_threads)
        layer = spec(n_head=4, n_kv_head=4, head_dim=128)
        cache = make(device, layer, n_ctx=8192, n_ubatch=512, window_chunk=512)
        data = layer_rows(cache, 8192, "F33")
        fill(cache, data, 0, *range(512, n_tokens + 1, 512))
        if n_tokens == 1024:
            stored.add(str(sorted(contents(cache, 0, 0).items())))
        peaks[n_tokens, n_threads] = device.transient_bytes
    assert peaks[8192, 1] <= peaks[1024, 1] * 1.1
    assert len(stored) == 1


# --- bad input: a typed error, and the cache is what it was


class Foreign:
    """An array of another library in host memory: all it has is DLPack."""

    def __init__(self, array: Any) -> None:
        self._array, self.shape = array, array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()  # type: ignore[no-any-return]

    def __dlpack__(self, **how: Any) -> Any:
        return self._array.__dlpack__(**how)


def test_arrays_of_other_libraries_and_strides(device: Any) -> None:
    plain, other = make(device, spec()), make(device, spec())
    data = layer_rows(plain, 200, "dlpack")[0]
    out = feed(plain, [data], 0, 0, 200)[0]
    with other.step({0: 200}) as step:
        q = np.empty((4, 200, 64), np.float32).swapaxes(0, 1)  # as [n_head, n, D] lies
        q[...] = data.q
        wide = np.full((200, 2, 128), np.nan, np.float32)
        wide[..., :64] = data.v
        given = np.empty((200, 4, 64), np.float32)
        found = step.attend(0, q, Foreign(data.k), wide[..., :64], out=given)
    assert found is given
    assert found.tobytes() == out.tobytes()
    assert contents(other, 0, 0) == contents(plain, 0, 0)


def bad(change: Callable[[Any], Any], which: int) -> Callable[[Any], Any]:
    def wrong(arrays: Any) -> Any:
        arrays = [a.copy() for a in arrays]
        arrays[which] = change(arrays[which])
        return arrays

    return wrong


def put(value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[3, 1, 7] = value
        return array

    return change


class Elsewhere:
    """A DLPack array that lives on another device."""

    shape = (10, 2, 64)
    device = "cuda:0"

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("Cannot export from cuda:0")


BAD_ARRAYS = {
    **{
        f"{value} in {name}": (bad(put(value), i), NonFiniteError,
                               rf"{name} of layer 1, sequence 0, position 203, head 1, channel 7")
        for i, name in enumerate("qkv")
        for value in (float("nan"), float("inf"), -float("inf"))
    },
    "k overflows fp16": (bad(put(6e5), 1), NonFiniteError, "position 203, head 1"),
    "int k": (bad(lambda a: a.astype(np.int32), 1), InputError, "k of layer 1.*dtype int32"),
    "float64 q": (bad(lambda a: a.astype(float), 0), InputError, "q of layer 1.*dtype float64"),
    "object v": (bad(lambda a: a.astype(object), 2), InputError, "v of layer 1.*dtype object"),
    "a list": (bad(lambda a: a.tolist(), 0), InputError, "q of layer 1: found shape list"),
    "missing row": (bad(lambda a: a[:-1], 0), InputError, r"\(9, 4, 64\); needed \(10, 4"),
    "swapped axes": (bad(lambda a: a.swapaxes(0, 1), 1), InputError, r"k of layer 1: found shape"),
    "channels": (bad(lambda a: a[..., :32], 2), InputError, r"\(10, 2, 32\); needed \(10, 2, 64\)"),
    "elsewhere": (bad(lambda _: Elsewhere(), 1), InputError, "Elsewhere on cuda:0.*host memory"),
    "no array": (bad(lambda _: None, 1), InputError, "k of layer 1: found shape NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_arrays(device: Any, name: str) -> None:
    spoil, kind, text = BAD_ARRAYS[name]
    cache = make(device)
    data = layer_rows(cache, 210, "bad")
    fill(cache, data, 0, 200)
    before = fingerprint(cache)
    wrong = spoil(data[1].part(200, 210))
    step = cache.step({0: 10})
    step.attend(0, *data[0].part(200, 210))
    with pytest.raises(kind, match=text):
        step.attend(1, *wrong)
    step.discard()
    assert fingerprint(cache) == before
    fill(cache, data, 0, 210)  # and it goes on


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"out": np.zeros((10, 4, 64))}, InputError, "out: .*float64.*needed a writable C-cont"),
        ({"out": np.zeros((10, 4, 32), np.float32)}, InputError, r"float32 array \(10, 4, 64\)"),
        ({"out": np.zeros((4, 10, 64), np.float32).swapaxes(0, 1)}, InputError, "C-contiguous"),
        ({"lse": np.zeros((10,), np.float32)}, InputError, "lse: "),
        ({"sink_logits": np.zeros(4, np.float32)}, InputError, "sink_logits: found given"),
    ],
)
def test_bad_extras(device: Any, given: Any, kind: type, text: str) -> None:
    cache = make(device)
    data = layer_rows(cache, 10, "extras")
    before = fingerprint(cache)
    with pytest.raises(kind, match=text), cache.step({0: 10}) as step:
        step.attend(0, *data[0].part(0), **given)
    for layer in (-1, 3, "0"):
        with (
            pytest.raises(InputError, match=r"layer: found .*; needed 0\.\.2"),
            cache.step({0: 10}) as step,
        ):
            step.attend(layer, *data[0].part(0))  # type: ignore[arg-type]
    assert fingerprint(cache) == before


@pytest.mark.parametrize(
    ("n_tokens", "kind", "text"),
    [
        ({0: 825}, CapacityError, r"sequence 0: 200 tokens \+ 825 rows exceed n_ctx=1024"),
        ({1: 1025}, CapacityError, "n_ctx=1024"),
        ({0: 400, 1: 200}, CapacityError, "the step has 600 rows, n_ubatch is 512"),
        ({1: 1, 2: 1}, CapacityError, "3 sequences, n_seq is 2"),
        ({0: 0}, InputError, r"n_tokens\[0\]: found 0"),
        ({0: -1}, InputError, r"n_tokens\[0\]: found -1"),
        ({0: True}, InputError, r"n_tokens\[0\]: found True"),
        ({0: 1.5}, InputError, r"n_tokens\[0\]: found 1.5"),
        ({-1: 1}, InputError, "sequence id: found -1"),
        ({"a": 1}, InputError, "sequence id: found 'a'"),
        ({}, InputError, "n_tokens: found {}"),
        (3, InputError, "n_tokens: found 3"),
    ],
)
def test_bad_steps(device: Any, n_tokens: Any, kind: type, text: str) -> None:
    cache = make(device, n_seq=2, n_ubatch=512)
    data = layer_rows(cache, 210, "bad step")
    fill(cache, data, 0, 200)
    before = fingerprint(cache)
    with pytest.raises(kind, match=text):
        cache.step(n_tokens)
    assert fingerprint(cache) == before
    fill(cache, data, 0, 210)


def test_bad_layers(device: Any) -> None:
    with pytest.raises(RequestError, match=r"k: found 'kvran4'; needed one of.*did you mean"):
        spec(k="kvran4")
    layers = [spec(), spec(head_dim=80), spec()]
    with pytest.raises(UnsupportedOp, match=r"op\.head_dim_k.*64, 128, 256.*found 80") as caught:
        kvk.plan(layers, device, kvk.Limits(n_ctx=512))
    assert caught.value.labels == ("layers 1",)
    with pytest.raises(InputError, match="layers: found none"):
        kvk.plan([], device, kvk.Limits(n_ctx=512))


def test_M1_tokens_and_layers_per_route(device: Any) -> None:
    layers = [spec(), spec(window=150, tail=150), spec(k="q8_0", v="q4_0"), spec(window=90)]
    cache = make(device, *layers, n_ctx=1000, n_seq=3)
    want = {"native_bodyless": 2, "native_mixed": 2, "materialised": 0, "refused": 0}
    assert cache.plan.layer_counts == want
    assert "2 native bodyless, 2 native mixed; resident" in cache.plan.summary()
    assert cache.tokens() == (3000, 0)
    data = layer_rows(cache, 70, "tokens")
    fill(cache, data, 0, 70)
    fill(cache, data, 2, 20)
    assert cache.tokens() == (3000, 90)
    cache.rollback(0, 1)
    assert cache.tokens() == (3000, 89)
    policy = kvk.Policy(entry="cpu/attend_materialized")
    plan = kvk.plan([spec()] * 2, device, kvk.Limits(n_ctx=256), policy)
    assert plan.layer_counts == want | {
        "native_bodyless": 0,
        "native_mixed": 0,
        "materialised": 2,
    }
