"""Attention by rule and field case: semantics B1 to B7; F07, F13 to F17, F35."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from cache_tools import LIMIT, Twin, error, fill, layer_rows, make, spec

import kvkernels as kvk
from kvkernels.cache import Cache
from kvkernels.cpu.device import CpuDevice
from kvkernels.cpu.probe import probe_cpu
from kvkernels.cpu.reference_attend import attend as reference_attend
from kvkernels.dispatch import Policy, decide
from kvkernels.errors import InputError, NonFiniteError
from kvkernels.operations import attend_op
from kvkernels.records.layout import GROUP
from kvkernels.testing.inputs import SequenceRows
from kvkernels.testing.model import RowsModel
from kvkernels.testing.poison import GuardedDevice, Guards, poison_unused, poison_workspaces

ENTRIES = ("cpu/attend_decode", "cpu/attend_prefill", "cpu/attend_materialized")


def by(cache: Cache, entry: str, n_q: int = 16) -> Cache:
    """The same cache with attention forced to one entry. Steps on it must be discarded."""
    twin = copy.copy(cache)
    policy = Policy(entry=entry)
    layers = []
    for planned in cache.plan.layers:
        op = attend_op(planned.spec, "cpu:0", n_q, cache.plan.limits.n_ctx, planned.storage)
        decision = decide(op, cache.device.table, cache.device.caps, policy)
        assert decision.ok, decision.explain()
        layers.append(dataclasses.replace(planned, attend=(decision,)))
    twin.plan = dataclasses.replace(cache.plan, policy=policy, layers=tuple(layers))
    twin._decisions = {}
    return twin


def look(cache: Cache, parts: Mapping[int, Any], layer: int = 0, **given: Any) -> Any:
    """Attend one layer in a step that is discarded; ``parts``: {seq: (q, k, v)}."""
    step = cache.step({seq: len(part[0]) for seq, part in parts.items()})
    try:
        arrays = [np.concatenate([part[i] for part in parts.values()]) for i in range(3)]
        return step.attend(layer, *arrays, **given)
    finally:
        step.discard()


def filled(
    device: Any, layer: kvk.LayerSpec, past: int, n_q: int, *seed: object, **how: Any
) -> tuple[Cache, RowsModel, Any]:
    """A cache of one sequence with ``past`` rows, its model, and the rows of the next step."""
    cache = make(device, layer, n_ctx=past + n_q + 2 * GROUP, n_ubatch=max(past, n_q, 16))
    data = layer_rows(cache, past + n_q, *seed, **how)
    fill(cache, data, 0, past)
    model = RowsModel(layer)
    model.append(data[0].k[:past], data[0].v[:past])
    return cache, model, data[0].part(past)


@pytest.mark.parametrize("n_q", [3, 40])
def test_B1_softcap_before_bias_F17(device: Any, n_q: int) -> None:
    layer = spec(n_head=12, n_kv_head=4, head_dim=128, softcap=30.0, alibi=8.0)
    cache, model, part = filled(device, layer, 300, n_q, "F17", gain=4.0)
    out = look(cache, {0: part})
    assert error(out, model.attend(*part)) < LIMIT
    # The inputs must be able to tell: without the cap, and with slopes of a power of two of heads.
    for wrong in ({"softcap": 0.0}, {"alibi": 0.0}, {"alibi": 4.0}):
        other = model.copy()
        other.spec = dataclasses.replace(layer, **wrong)
        assert error(out, other.attend(*part)) > 0.02, wrong


@pytest.mark.parametrize("entry", ENTRIES)
def test_B2_lse_of_exact_rows(device: Any, entry: str) -> None:
    layer = spec(sink_tokens=256, sink_logits=True)
    cache = make(device, layer)
    data = layer_rows(cache, 205, "lse")[0]
    logits = np.array([-2.0, 0.0, 1.5, 6.0], np.float32)
    with cache.step({0: 200}) as step:
        step.attend(0, *data.part(0, 200), sink_logits=logits)
    lse = np.empty((5, layer.n_head), np.float32)
    out = look(by(cache, entry), {0: data.part(200)}, sink_logits=logits, lse=lse)
    expected, expected_lse = reference_attend(
        data.q[200:], data.k, data.v, scale=layer.scale, q_pos=np.arange(200, 205),
        k_pos=np.arange(205), sink_logits=logits, return_lse=True,
    )  # fmt: skip
    # Cached rows went through fp16.
    assert np.abs(lse - expected_lse).max() < 1e-3
    assert error(out, expected) < 1e-3


@pytest.mark.parametrize("entry", ENTRIES)
def test_B2_sink_logits_join_the_denominator_only(device: Any, entry: str) -> None:
    plain, with_sinks = spec(), spec(sink_logits=True)
    cache, _, part = filled(device, plain, 300, 5, "sink logits")
    twin = copy.copy(cache)
    twin.plan = dataclasses.replace(
        cache.plan, layers=(dataclasses.replace(cache.plan.layers[0], spec=with_sinks),)
    )
    logits = np.array([-30.0, 0.0, 4.0, 30.0], np.float32)
    lse, joined = np.empty((2, 5, 4), np.float32)
    out = look(by(cache, entry), {0: part}, lse=lse)
    sunk = look(by(twin, entry), {0: part}, lse=joined, sink_logits=logits)
    assert np.allclose(joined, np.logaddexp(lse, logits), rtol=1e-6, atol=1e-6)
    assert error(sunk, out * np.exp(lse - joined)[..., None].astype(np.float64)) < LIMIT


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_B3_nothing_visible_is_exactly_zero_F13(device: Any, dim: int, logits: bool) -> None:
    layer = spec(head_dim=dim, sink_logits=logits)
    cache, given = make(device, layer), {}
    if logits:
        given["sink_logits"] = np.array([0.0, -3.0, 2.0, 40.0], np.float32)
    data = layer_rows(cache, 332, "F13")[0]
    with cache.step({0: 300}) as step:
        step.attend(0, *data.part(0, 300), **given)
    model = RowsModel(layer)
    model.append(data.k[:300], data.v[:300])
    for entry in ENTRIES:
        n_q = 16 if entry.endswith("decode") else 32
        part = data.part(300, 300 + n_q)
        see = np.ones((n_q, 300 + n_q), bool)
        see[[0, 1, 2, 13, 15, n_q - 1]] = False
        see[5, :300] = False  # its first tiles are masked, its own rows are not
        see[6, 128:] = False
        for mask in (see, np.where(see, 0, -np.inf).astype(np.float32), np.zeros_like(see)):
            lse = np.empty((n_q, 4), np.float32)
            out = look(by(cache, entry, n_q), {0: part}, mask=mask, lse=lse, **given)
            hidden = ~mask.any(axis=1) if mask.dtype == bool else ~see.any(axis=1)
            assert not out[hidden].any()
            assert np.isfinite(out).all()
            if logits:
                assert np.allclose(lse[hidden], given["sink_logits"])
            else:
                assert np.isneginf(lse[hidden]).all()
            expected = model.attend(*part, mask=mask, sink_logits=given.get("sink_logits"))
            assert error(out, expected) < LIMIT


@pytest.mark.parametrize("entry", ENTRIES)
def test_B3_first_parts_hidden_and_a_later_key_visible(device: Any, entry: str) -> None:
    # More than 16 groups, so that decode cuts the keys into several parts.
    cache, model, part = filled(device, spec(n_head=2), 2500, 2, "splits")
    mask = np.zeros((2, 2502), bool)
    mask[0, 2200], mask[1, 5] = True, True
    assert error(look(by(cache, entry), {0: part}, mask=mask), model.attend(*part, mask=mask)) < (
        LIMIT
    )


def test_B5_poison_does_not_leak_F14(device: Any) -> None:
    lengths = (1, 32, 96, 127, 128, 129, 191)
    layers = (spec(), spec(window=70), spec(sink_tokens=128))
    cache = make(device, *layers, n_seq=4, n_ctx=512, activations="auto")
    for first in range(len(lengths)):
        four = [lengths[(first + i) % len(lengths)] for i in range(4)]
        for n_q in (1, 20):
            data = {i: layer_rows(cache, n + n_q, "F14", i, n) for i, n in enumerate(four)}
            for i, n in enumerate(four):
                fill(cache, data[i], i, n)
            for layer in range(3):
                parts = {i: data[i][layer].part(n) for i, n in enumerate(four)}
                clean = look(cache, parts, layer)
                poison_unused(cache)
                poison_workspaces(device)
                assert np.isfinite(clean).all()
                assert look(cache, parts, layer).tobytes() == clean.tobytes(), (four, n_q, layer)
            cache.select([])


def test_B5_a_freed_window_is_never_read(device: Any) -> None:
    layer = spec(window=150)
    cache, model, part = filled(device, layer, 900, 3, "freed")
    assert cache.state[0].pages[0].first > 0
    poison_unused(cache)
    for entry in ENTRIES:
        assert error(look(by(cache, entry), {0: part}), model.attend(*part)) < LIMIT


def test_B6_window_chunk_F07(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, n_q = spec(k="kvarn4", v="kvarn4"), 20
    cache, model, part = filled(device, layer, 4096 - n_q, n_q, "F07")
    expected = model.attend(*part)
    monkeypatch.delenv("KVK_WINDOW_CHUNK", raising=False)
    persistent = set()
    for entry in ENTRIES[1:]:
        transient = {}
        for chunk in (128, 1000, 4096, 10**9, 0, -5, None):
            limits = dataclasses.replace(cache.plan.limits, window_chunk=chunk)
            planned = kvk.plan([layer], device, limits, Policy(entry=entry))
            persistent.add(planned.memory.kv_resident_bytes)
            twin = copy.copy(cache)
            twin.plan = planned
            twin._decisions = {}
            twin.device = CpuDevice(probe_cpu(), n_threads=1)
            assert error(look(twin, {0: part}), expected) < LIMIT, chunk
            transient[chunk] = twin.device.transient_bytes
    assert len(persistent) == 1
    # The last entry is the one that has windows.
    assert transient[128] < transient[1000] < transient[4096]
    # Above n_kv it is capped; 0, negative and missing mean the default, which is above n_kv too.
    assert {transient[c] for c in (10**9, 0, -5, None)} == {transient[4096]}


@pytest.mark.parametrize(("text", "chunk"), [("256", 256), ("0", 65536), ("-3", 65536)])
def test_F07_window_chunk_from_the_environment(
    device: Any, monkeypatch: pytest.MonkeyPatch, text: str, chunk: int
) -> None:
    monkeypatch.setenv("KVK_WINDOW_CHUNK", text)
    assert kvk.plan([spec()], device, kvk.Limits(n_ctx=512)).window_chunk == chunk
    # The parameter wins.
    assert kvk.plan([spec()], device, kvk.Limits(n_ctx=512, window_chunk=384)).window_chunk == 384


def test_F07_window_chunk_that_is_not_a_number(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVK_WINDOW_CHUNK", "64k")
    with pytest.raises(InputError, match="KVK_WINDOW_CHUNK: found '64k'; needed a whole number"):
        kvk.plan([spec()], device, kvk.Limits(n_ctx=512))
    with pytest.raises(InputError, match="window_chunk: found '64k'"):
        kvk.Limits(n_ctx=512, window_chunk="64k")  # type: ignore[arg-type]


def four(
    device: Any, n_q: tuple[int, ...], activations: str = "auto"
) -> tuple[Cache, dict[int, SequenceRows]]:
    past = (2300, 129, 640, 1)
    cache = make(
        device, spec(n_head=6), n_seq=4, n_ctx=2600, n_ubatch=2400, activations=activations
    )
    data = {
        i: layer_rows(cache, n + q, "B7", i) for i, (n, q) in enumerate(zip(past, n_q, strict=True))
    }
    for i, n in enumerate(past):
        fill(cache, data[i], i, n)
    return cache, {i: rows[0].part(past[i]) for i, rows in data.items()}  # type: ignore[misc]


@pytest.mark.parametrize("activations", ["auto", "f32"])
@pytest.mark.parametrize("n_q", [(1, 1, 1, 1), (3, 1, 16, 2), (40, 17, 64, 18), (1, 40, 4, 200)])
def test_B7_alone_or_in_a_batch_of_four(
    device: Any, n_q: tuple[int, ...], activations: str
) -> None:
    cache, parts = four(device, n_q, activations)
    together = look(cache, parts)
    at = 0
    for seq, rows in enumerate(n_q):
        alone = look(cache, {seq: parts[seq]})
        assert alone.tobytes() == together[at : at + rows].tobytes(), seq
        at += rows
    backwards = look(cache, dict(reversed(parts.items())))
    assert backwards[-n_q[0] :].tobytes() == together[: n_q[0]].tobytes()


@pytest.mark.parametrize("n_q", [(3, 1, 16, 2), (1, 40, 4, 200)])
def test_B7_any_number_of_threads(n_q: tuple[int, ...]) -> None:
    seen = set()
    for n_threads in (1, 2, 3):
        cache, parts = four(CpuDevice(probe_cpu(), n_threads=n_threads), n_q)
        for _ in range(3):
            seen.add(look(cache, parts).tobytes())
        seen.add(look(cache, parts).tobytes())
        stored = b"".join(b.k_records.tobytes() + b.v_exact.tobytes() for b in cache.buffers)
        seen.add(stored)
    assert len(seen) == 2  # one output, one set of stored bytes


@pytest.mark.parametrize("n_q", [1, 2, 3, 17])
@pytest.mark.parametrize("heads", [(6, 2), (24, 4), (24, 2), (40, 8), (5, 1), (16, 1)])
def test_F15_gqa_pairs_the_right_heads(device: Any, heads: tuple[int, int], n_q: int) -> None:
    n_head, n_kv_head = heads
    layer = spec(n_head=n_head, n_kv_head=n_kv_head)
    cache, model, part = filled(device, layer, 200, n_q, "F15")
    out, expected = look(cache, {0: part}), model.attend(*part)
    assert error(out, expected) < LIMIT
    if n_kv_head > 1:  # the test sees a query head that is paired with the next KV head
        assert error(np.roll(expected, layer.gqa, axis=1), expected) > 0.3


@pytest.mark.parametrize("capacity", [2016, 1990, 129, 1])
def test_F16_lengths_that_fit_no_padding(device: Any, capacity: int) -> None:
    layer, guards = spec(n_head=2), Guards()
    guarded = GuardedDevice(device, guards)
    for n_kv in (1, 127, 128, 129, 255, 256, 257, 1990, 2016):
        if n_kv > capacity:
            continue
        cache = make(guarded, layer, n_ctx=capacity, n_ubatch=128)
        data = layer_rows(cache, n_kv, "F16", n_kv)
        fill(cache, data, 0, *range(128, n_kv, 128), n_kv - 1)
        part = tuple(guards.copy("rows", x) for x in data[0].part(n_kv - 1))
        model = RowsModel(layer)
        for at in range(0, n_kv - 1, 128):
            stop = min(at + 128, n_kv - 1)
            model.append(data[0].k[at:stop], data[0].v[at:stop])
        out = guards.empty("out", (1, 2, 64), np.float32)
        first = look(cache, {0: part}, out=out).copy()
        assert error(first, model.attend(*part)) < LIMIT, n_kv
        poison_unused(cache)
        assert look(cache, {0: part}, out=out).tobytes() == first.tobytes()
        assert guards.broken() == []
        with cache.step({0: 1}) as step:  # the last row of the capacity can be stored
            step.attend(0, *part)
        assert guards.broken() == []


def mask_views(source: np.random.Generator, n_q: int, n_kv: int) -> dict[str, Any]:
    """Masks as callers have them: padded, parts of larger arrays, transposed, broadcast."""
    see = source.random((n_q, n_kv)) < 0.6
    add = np.where(see, source.normal(size=see.shape), -np.inf)
    views: dict[str, Any] = {}
    for stride in (498, 500, 504, 512):
        padded = np.zeros((n_q, stride), bool)
        padded[:, :n_kv] = see
        views[f"bool {stride}"] = padded[:, :n_kv]
        wide = np.full((n_q, stride), np.nan, np.float32)
        wide[:, :n_kv] = add
        views[f"additive {stride}"] = wide[:, :n_kv]
    views["transposed"] = np.ascontiguousarray(add.T.astype(np.float32)).T
    views["transposed bool"] = np.ascontiguousarray(see.T).T
    large = np.full((n_q + 5, n_kv + 9), np.nan)
    large[3 : 3 + n_q, 8 : 8 + n_kv] = add
    views["offset float64"] = large[3 : 3 + n_q, 8 : 8 + n_kv]
    views["float16"] = add.astype(np.float16)
    views["reversed"] = np.ascontiguousarray(add[::-1, ::-1].astype(np.float32))[::-1, ::-1]
    views["broadcast over heads"] = np.broadcast_to(add.astype(np.float32), (4, n_q, n_kv))
    views["one row for all queries"] = see[:1]
    views["one key for all"] = np.broadcast_to(see[:, :1], (n_q, n_kv))
    views["per head"] = np.stack([np.roll(add, h, axis=1) for h in range(4)]).astype(np.float32)
    return views


@pytest.mark.parametrize("n_q", [3, 40])
def test_F35_any_view_of_a_mask_is_its_contiguous_copy(device: Any, n_q: int) -> None:
    cache, model, part = filled(device, spec(), 498 - n_q, n_q, "F35")
    for name, mask in mask_views(np.random.default_rng(n_q), n_q, 498).items():
        out = look(cache, {0: part}, mask=mask)
        full = np.broadcast_to(mask, (4, n_q, 498))
        assert error(out, model.attend(*part, mask=full)) < LIMIT, name
        assert look(cache, {0: part}, mask=full.copy()).tobytes() == out.tobytes(), name
        assert look(cache, {0: part}, mask={0: mask}).tobytes() == out.tobytes(), name


def test_B4_masks_of_several_sequences(device: Any) -> None:
    cache = make(device, spec(), n_seq=3)
    past, n_q = (200, 300, 5), (2, 20, 3)
    data = {
        i: layer_rows(cache, a + b, "masks", i)
        for i, (a, b) in enumerate(zip(past, n_q, strict=True))
    }
    masks: dict[int, Any] = {}
    parts, expected = {}, []
    for i, n in enumerate(past):
        fill(cache, data[i], i, n)
        parts[i] = data[i][0].part(n)
        if i != 1:
            masks[i] = np.random.default_rng(i).random((n_q[i], n + n_q[i])) < 0.5
        model = RowsModel(spec())
        model.append(data[i][0].k[:n], data[i][0].v[:n])
        expected.append(model.attend(*parts[i], mask=masks.get(i)))
    assert error(look(cache, parts, mask=masks), np.concatenate(expected)) < LIMIT


@pytest.mark.parametrize(
    ("mask", "kind", "text"),
    [
        (np.ones((3, 400), bool), InputError, r"shape \(3, 400\).*\(4, 3, 303\)"),
        (np.ones((2, 303), bool), InputError, "broadcastable"),
        (np.ones((1, 1, 3, 303), bool), InputError, "broadcastable"),
        (np.ones((3, 303), np.int32), InputError, "dtype int32; needed bool or a float"),
        (np.full((3, 303), np.nan, np.float32), NonFiniteError, "NaN"),
        (np.full((3, 303), np.inf, np.float32), NonFiniteError, "inf"),
        ([[True] * 303] * 3, InputError, "found list; needed a NumPy array"),
        ({1: np.ones((3, 303), bool)}, InputError, r"sequences \[1\]"),
    ],
)
def test_F35_a_wrong_mask_is_one_typed_error(device: Any, mask: Any, kind: type, text: str) -> None:
    cache, _, part = filled(device, spec(), 300, 3, "wrong mask")
    with pytest.raises(kind, match=text):
        look(cache, {0: part}, mask=mask)
    look(cache, {0: part})


def test_every_entry_and_window_size_by_steps(device: Any) -> None:
    """A long mixed history on layers of every window, held against the model at every step."""
    layers = [spec(window=w) for w in (None, 1, 100, 128, 150)] + [spec(sink_tokens=256)]
    twin = Twin(make(device, *layers, n_seq=2), "steps")
    for n_tokens in ({0: 100}, {0: 28, 1: 3}, {1: 130}, {0: 1, 1: 1}, {0: 300}, {0: 17, 1: 16}):
        twin.step(n_tokens)


@pytest.mark.parametrize("n_q", [1, 40])
def test_layers_of_one_step_that_differ_in_all_but_their_pages(device: Any, n_q: int) -> None:
    """What a step prepares once is shared only by layers for which it is the same."""
    dims = [spec(head_dim=64), spec(head_dim=128), spec(head_dim=64, k="kvarn2", v="kvarn8")]
    specs = [*dims, spec(n_head=8), spec(softcap=20.0), spec(scale=0.5)]
    together = make(device, *specs)
    data = layer_rows(together, 300 + n_q, "mixed")
    fill(together, data, 0, 300)
    with together.step({0: n_q}) as step:
        outs = [step.attend(i, *r.part(300, 300 + n_q)) for i, r in enumerate(data)]
    for i, one in enumerate(specs):
        alone = make(device, one)
        fill(alone, [data[i]], 0, 300)
        with alone.step({0: n_q}) as step:
            assert step.attend(0, *data[i].part(300, 300 + n_q)).tobytes() == outs[i].tobytes(), i
