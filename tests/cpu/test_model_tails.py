"""The row model with tails, window kinds and standard types, against numbers worked out by hand and
against a second, slower way to say the same.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cache_tools import spec

import kvkernels as kvk
from kvkernels import quants
from kvkernels.cpu import reference
from kvkernels.cpu.reference_attend import attend, visible
from kvkernels.errors import RequestError
from kvkernels.records.layout import Side
from kvkernels.request import CacheGroup, Family, Representation, ResolvedTail
from kvkernels.testing.inputs import rows
from kvkernels.testing.model import RowsModel, model_of
from kvkernels.testing.model_rows import ModelTail, Ring, newest_visible

E = 2.0**-10  # 1 + E is exact in float16, and so the minimum of a block; bfloat16 makes 1 of it


def counting(**changes: Any) -> kvk.LayerSpec:
    """All scores are 0 and all values 1 + E: what a query answers is 1 + E * (share of rows that it
    did not take from a bfloat16 ring).
    """
    base = {"n_head": 1, "n_kv_head": 1, "head_dim": 32, "k": "q5_1", "v": "q5_1"}
    return spec(**(base | changes))


def ones(n: int, heads: int = 1) -> tuple[Any, Any, Any]:
    zeros = np.zeros((n, heads, 32), np.float32)
    return zeros, zeros[:, :1], np.full((n, 1, 32), 1 + E, np.float32)


def filled(n: int, layer: kvk.LayerSpec, tail: ModelTail | None) -> RowsModel:
    model = RowsModel(layer, tail)
    q, k, v = ones(n)
    model.append(k, v, q)
    return model


def shares(model: RowsModel, n_q: int = 1, mask: Any = None) -> list[float]:
    """Share of every query's rows that did not come from the ring."""
    out = model.attend(*ones(n_q, model.spec.n_head), mask=mask)
    assert (out == out[..., :1]).all()
    return [float(x) for x in ((out[:, 0, 0] - 1) / E)]


TAIL = ModelTail(rows=4, rollback=2, dtype="bf16")


def near(*expected: float) -> Any:
    return pytest.approx(list(expected), abs=1e-9)


def test_newest_rows_come_from_the_ring_and_every_row_counts_once() -> None:
    # Of 11 rows the query itself is exact, three older ones are the ring's, seven the body's.
    assert shares(filled(10, counting(), TAIL)) == near(8 / 11)
    assert shares(filled(10, counting(), None)) == near(1)
    assert shares(filled(0, counting(), TAIL)) == near(1)
    assert shares(filled(2, counting(), TAIL)) == near(1 / 3)


def test_T6_n_counts_rows_that_a_mask_leaves() -> None:
    see = np.ones((1, 11), np.bool_)
    see[0, 8:10] = False  # the newest four visible are 10, 7, 6, 5
    assert shares(filled(10, counting(), TAIL), mask=see) == near(6 / 9)
    see[0, 5:10] = False  # 10, 4, 3, 2; the ring of 4 + 2 rows reaches back to 4
    assert shares(filled(10, counting(), TAIL), mask=see) == near(5 / 6)
    additive = np.where(see, 0.0, -np.inf)
    assert shares(filled(10, counting(), TAIL), mask=additive) == near(5 / 6)


def test_T6_a_row_counts_when_one_head_sees_it() -> None:
    see = np.ones((2, 1, 11), np.bool_)
    see[0, 0, 7:10] = False
    see[1, 0, :7] = False
    model = filled(10, counting(n_head=2), TAIL)
    out = (model.attend(*ones(1, 2), mask=see)[0, :, 0] - 1) / E
    # The newest four of both heads together are 10, 9, 8, 7: the first head sees none of the ring.
    assert list(out) == near(1, 1 / 4)


def test_T6_a_query_in_the_middle_of_a_prompt_has_its_own_newest_rows() -> None:
    expected = [1 - 3 / 11, 1 - 2 / 12, 1 - 1 / 13, 1, 1]
    assert shares(filled(10, counting(), TAIL), 5) == near(*expected)


def test_a_ring_after_rollbacks() -> None:
    model = filled(10, counting(), TAIL)
    assert (model.ring.start, model.ring.exact()) == (4, 4)
    model.rollback(2)
    assert shares(model) == near(1 - 3 / 9)
    model.rollback(3)  # rows 0..4 are left, and of the ring only row 4
    assert shares(model) == near(1 - 1 / 6)
    twin = model.copy()
    model.rollback(3)  # the ring is empty
    assert shares(model) == near(1)
    q, k, v = ones(2)
    model.append(k, v, q)  # rows 2 and 3 are in it again
    assert (model.n, shares(model)) == (4, near(1 - 2 / 5))
    assert shares(twin) == near(1 - 1 / 6)
    twin.append(*ones(1)[1:])
    assert shares(twin) == near(1 - 2 / 7)  # rows 5 and 4; 3 stays lost
    twin.rollback(twin.n)
    assert shares(twin) == near(1)


def test_T9_a_bodyless_window() -> None:
    layer = counting(window=4)
    tail = ModelTail(rows=4, rollback=2, dtype="bf16", bodyless=True)
    model = filled(10, layer, tail)
    assert shares(model, 2) == near(1 / 4, 2 / 4)
    assert model.lowest() == 8
    model.rollback(2)
    assert shares(model) == near(1 / 4)  # N + R rows were kept, so the window is still whole
    model.append(*ones(1)[1:])
    # Two rows were taken back already: one more new row does not renew the reserve.
    assert (model.n, model.lowest()) == (9, 8)
    model.append(*ones(3)[1:])
    assert (model.n, model.lowest()) == (12, 10)
    assert filled(1, layer, tail).lowest() == 0
    # Not causal: the newest four are all the step's own, and the ring is still all there is.
    model = filled(10, counting(window=4, causal=False), tail)
    assert shares(model, 4) == near(4 / 7, 4 / 6, 4 / 5, 4 / 4)


def test_a_fault_loses_what_it_overwrote() -> None:
    overlay = filled(10, counting(), TAIL)
    overlay.lose(3)  # slots of rows 10, 11, 12, which were those of 4, 5 and 6
    assert overlay.ring is not None
    assert (overlay.ring.start, overlay.ring.exact(), overlay.broken) == (7, 3, False)
    assert shares(overlay) == near(1 - 3 / 11)
    overlay.lose(5)
    assert shares(overlay) == near(1 - 1 / 11)
    overlay.lose(200)
    assert (shares(overlay), overlay.ring.exact()) == (near(1), 0)
    overlay.append(*ones(1)[1:])
    assert overlay.ring.exact() == 1

    tail = ModelTail(rows=4, rollback=2, dtype="bf16", bodyless=True)
    model = filled(10, counting(window=4), tail)
    model.lose(3)  # 4, 5 and 6 are behind the window of the next query
    assert not model.broken
    assert model.lowest() == 10  # but not behind that of a query after a rollback
    model.lose(4)
    assert model.broken
    assert model.copy().broken
    fresh = filled(3, counting(window=4), tail)
    fresh.lose(3)
    assert not fresh.broken


def test_lowest_without_a_ring() -> None:
    assert filled(300, counting(), TAIL).lowest() == 0
    model = RowsModel(spec(), ModelTail(rows=256, rollback=8))
    for start, stop in ((0, 200), (200, 400)):
        model.append(*rows(spec(), 400, "lowest").part(start, stop)[1:])
    # Rows 256 on are the open group, 128 on the one before.
    assert (model.n, model.lowest()) == (400, 256)


def test_newest_visible() -> None:
    see = np.array([[1, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0] * 6], bool)
    assert newest_visible(see, 2).tolist() == [[0, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert not newest_visible(see, 0).any()


@pytest.mark.parametrize(
    ("kind", "causal", "expected"),
    [
        # keys that queries 3, 4 and 5 see of six
        ("sliding", True, ["..XX..", "...XX.", "....XX"]),
        ("sliding", False, ["..XXX.", "...XXX", "....XX"]),
        ("chunked", True, ["..XX..", "....X.", "....XX"]),
        ("chunked", False, ["..XXXX", "....XX", "....XX"]),
        ("symmetric", True, ["..XX..", "...XX.", "....XX"]),
        ("symmetric", False, ["..XXX.", "...XXX", "....XX"]),
    ],
)
def test_B4_window_kinds(kind: str, causal: bool, expected: list[str]) -> None:
    see = visible([3, 4, 5], range(6), causal=causal, window=2, window_kind=kind)
    assert ["".join(".X"[int(x)] for x in row) for row in see] == expected
    layer = counting(window=2, window_kind=kind, causal=causal)
    counts = [row.count("X") for row in expected]
    model = RowsModel(layer)
    _, k, v = ones(3)
    v = v * np.arange(3, dtype=np.float32)[:, None, None]
    model.append(k, v)
    q, k, v = ones(3)
    v = v * np.arange(3, 6, dtype=np.float32)[:, None, None]
    means = [
        sum(j for j, x in enumerate(row) if x == "X") / n
        for row, n in zip(expected, counts, strict=True)
    ]
    assert list(model.attend(q, k, v)[:, 0, 0] / (1 + E)) == near(*means)


def test_B4_a_wider_window_of_every_kind() -> None:
    def seen(i: int, kind: str, causal: bool) -> list[int]:
        see = visible([i], range(30), causal=causal, window=7, window_kind=kind)
        return [int(j) for j in np.flatnonzero(see)]

    assert seen(16, "sliding", True) == [*range(10, 17)]
    assert seen(16, "sliding", False) == [*range(10, 23)]
    assert seen(16, "chunked", True) == [14, 15, 16]
    assert seen(14, "chunked", True) == [14]
    assert seen(16, "chunked", False) == [*range(14, 30)]
    assert seen(16, "symmetric", True) == [13, 14, 15, 16]
    assert seen(16, "symmetric", False) == [*range(13, 20)]
    with pytest.raises(RequestError, match="window_kind"):
        visible([1], [0], window=2, window_kind="slidin")


@pytest.mark.parametrize(("k", "v"), [("q8_0", "q4_0"), ("f16", "q5_1"), ("bf16", "f32")])
def test_standard_types_are_their_own_bytes(k: str, v: str) -> None:
    layer = spec(k=k, v=v, head_dim=96, head_dim_v=32, n_head=6, softcap=20.0)
    data = rows(layer, 50, "standard", k, v)
    model = RowsModel(layer)
    model.append(*data.part(0, 30)[1:])
    model.append(*data.part(30, 45)[1:])
    stored = [
        np.concatenate([quants.decode(quants.encode(x[:45], kind), kind, x.shape[-1]), x[45:]])
        for x, kind in ((data.k, k), (data.v, v))
    ]
    expected = attend(
        data.q[45:], *stored, scale=layer.scale, softcap=20.0, q_pos=np.arange(45, 50),
        k_pos=np.arange(50),
    )  # fmt: skip
    found = model.attend(*data.part(45))
    assert found.shape == (5, 6, 32)
    assert np.allclose(found, expected, rtol=0, atol=1e-12)
    assert model.lowest() == 0
    assert not model.keeps_records


def test_kvarn_rows_by_source() -> None:
    layer = spec(sink_tokens=128)
    data = rows(layer, 860, "sources")
    model = RowsModel(layer, ModelTail(rows=256, rollback=8, dtype="f16"))
    model.append(*data.part(0, 500)[1:])

    def origin(position: int, n_q: int = 1) -> str:
        """Per row one letter: now, ring, stage, record."""
        part = data.part(500, 500 + n_q)[1:]
        see = np.arange(500 + n_q)[None] <= position
        found = model.sources(np.array([position]), *part, see)
        letters = np.full(500 + n_q, ".")
        for letter, source in zip("nrsb", found, strict=True):
            assert (letters[source.pick[0]] == ".").all()
            letters[source.pick[0]] = letter
        return "".join(letters)

    def runs(text: str) -> list[tuple[str, int]]:
        edges = [0, *(i for i in range(1, len(text)) if text[i] != text[i - 1]), len(text)]
        return [(text[a], b) for a, b in pairwise(edges)]

    # Group 0 are sinks, groups 1 and 2 records, 384 on is open.
    assert runs(origin(500)) == [("s", 128), ("b", 245), ("r", 500), ("n", 501)]
    # 100 rows on: the newest 256 are 345..600; the open group would be the stage's.
    assert runs(origin(600, 101)) == [("s", 128), ("b", 345), ("r", 500), ("n", 601)]
    # A step longer than N: no row of the ring is among the newest any more.
    assert runs(origin(800, 360))[:3] == [("s", 128), ("b", 384), ("s", 500)]
    # A rollback of 240 leaves 24 rows of the ring (236..259). The stage has let go of group 1, so
    # the rest of the newest 256 comes from sinks and records.
    model.rollback(240)
    n = model.n
    see = np.ones((1, n + 1), np.bool_)
    found = model.sources(np.array([n]), *data.part(n, n + 1)[1:], see)
    counts = [int(source.pick.sum()) for source in found]
    assert counts == [1, 260 - 236, 128, 236 - 128]


def slowly(model: RowsModel, part: Any, mask: Any) -> Any:
    """One query and one key at a time: which copy of the row, by the words of T6."""
    s, (q, k, v), n = model.spec, part, model.n
    tail, ring = model.tail, model.ring
    out = []
    for i in range(len(q)):
        position, taken = n + i, 0
        keys: dict[int, Any] = {}
        values: dict[int, Any] = {}
        for j in reversed(range(n + len(q))):
            seen = visible(
                [position], [j], causal=s.causal, window=s.window, window_kind=s.window_kind
            )[0, 0]
            if not seen or (mask is not None and np.isneginf(mask[:, i, j]).all()):
                continue
            taken += 1
            if j >= n:
                keys[j], values[j] = k[j - n].astype(float), v[j - n].astype(float)
                continue
            exact = tail is not None and (taken <= tail.rows or tail.bodyless)
            if exact and ring is not None and j >= ring.start:
                keys[j], values[j] = (
                    quants.decode(quants.encode(x, tail.dtype), tail.dtype, x.shape[-1])
                    for x in (model.k[j], model.v[j])
                )
            elif not s.is_kvarn:
                keys[j], values[j] = (
                    quants.decode(quants.encode(x, kind), kind, x.shape[-1])
                    for x, kind in ((model.k[j], s.k), (model.v[j], s.v))
                )
            else:
                keys[j], values[j] = (_kvarn_row(model, side, j, position) for side in Side)
        order = sorted(keys)
        shape = (len(order), s.n_kv_head)
        out.append(
            attend(
                q[i : i + 1],
                np.array([keys[j] for j in order], float).reshape(*shape, s.head_dim),
                np.array([values[j] for j in order], float).reshape(*shape, s.head_dim_v),
                scale=s.scale, q_pos=np.array([position]), k_pos=np.array(order, int),
                causal=False, mask=None if mask is None else mask[:, i : i + 1, order],
            )[0]
        )  # fmt: skip
    return np.array(out)


def _kvarn_row(model: RowsModel, side: Side, j: int, position: int) -> Any:
    s, group = model.spec, j // 128
    sealed = s.sink_tokens // 128 <= group < model.n // 128
    newest = group in model.resident and j > position - min(128, s.window or 128)
    if sealed and not newest:
        records = model.record_bytes(group)[side is Side.V]
        bits = s.v_bits if side is Side.V else s.k_bits
        heads = [reference.decode(r, side, bits, s.head_dim)[j % 128] for r in records]
        return reference.rotate(np.array(heads, float), np.float64)
    row = (model.v if side is Side.V else model.k)[j]
    return reference.rotate(reference.stage_rows(row).astype(float), np.float64)


@pytest.mark.parametrize(
    ("changes", "tail"),
    [
        ({"k": "q4_0", "v": "q8_0", "head_dim_v": 32}, ModelTail(rows=20, dtype="bf16")),
        ({"k": "q4_0", "v": "q4_0", "window": 60}, ModelTail(rows=20, rollback=4)),
        ({"k": "q4_0", "v": "f16", "window": 60, "causal": False}, ModelTail(rows=3)),
        ({"window": 60, "window_kind": "chunked"}, None),
        ({"k": "f16", "v": "f16", "window": 9, "window_kind": "symmetric"}, None),
        ({}, ModelTail(rows=140, rollback=6, dtype="bf16")),
        ({"window": 100}, ModelTail(rows=100, rollback=10, dtype="f16", bodyless=True)),
        (
            {"window": 50, "window_kind": "chunked", "causal": False},
            ModelTail(rows=50, rollback=10, dtype="bf16", bodyless=True),
        ),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_model_row_by_row(changes: dict[str, Any], tail: ModelTail | None, masked: bool) -> None:
    layer = spec(**changes)
    data = rows(layer, 180, "rows", changes)
    model = RowsModel(layer, tail)
    for start, stop in ((0, 100), (100, 150), (150, 176)):
        model.append(*data.part(start, stop)[1:])
    model.rollback(5)
    part = data.part(171, 180)
    mask = None
    if masked:
        see = np.random.default_rng(7).random((layer.n_head, 9, 180)) < 0.2
        mask = np.where(see, 0.25, -np.inf)
        mask[:, 4] = -np.inf
    expected = slowly(model, part, mask)
    found = model.attend(*part, mask=mask)
    assert np.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("representation", list(Representation))
@pytest.mark.parametrize("window", [None, 100])
def test_model_of_a_resolved_tail(representation: Representation, window: int | None) -> None:
    layer = spec(window=window, tail=100, tail_dtype="bf16")
    group = CacheGroup(role="", id="", layers=(0,), window=100, family=Family.KVARN)
    resolved = ResolvedTail(
        group=group, raw=100, requested=100, effective=100, window=100, dtype="bf16",
        representation=representation, rollback=3,
    )  # fmt: skip
    model = model_of(layer, resolved)
    if representation in (Representation.NONE, Representation.STAGE):
        assert model.tail is None
        assert model.keeps_records
    elif representation is Representation.OVERLAY:
        assert model.tail == ModelTail(rows=100, rollback=3, dtype="bf16")
        assert model.keeps_records
    elif window is None:
        assert model.tail is None
        assert (model.spec.k, model.spec.v, model.spec.sink_tokens) == ("bf16", "bf16", 0)
    else:
        assert model.tail == ModelTail(rows=100, rollback=3, dtype="bf16", bodyless=True)
        assert not model.keeps_records
    assert model_of(layer).tail is None


def test_a_ring_is_n_plus_r_slots() -> None:
    """The same ring written slot by slot (T8): what can still be read is what ``start`` says."""
    layer = counting()
    source = np.random.default_rng(5)
    tail = ModelTail(rows=6, rollback=3)
    ring = Ring(layer, tail)
    slots: dict[int, tuple[int, int]] = {}  # slot -> (row, generation)
    written: dict[int, int] = {}  # row -> generation that the sequence holds
    generation = 0
    for _ in range(400):
        if source.random() < 0.5 or not ring.n:
            n = int(source.integers(1, 5))
            for j in range(ring.n, ring.n + n):
                generation += 1
                slots[j % tail.capacity] = (j, generation)
                written[j] = generation
            _, k, v = ones(n)
            ring.append(k, v)
        else:
            ring.truncate(int(source.integers(max(0, ring.n - 12), ring.n)))
        readable = {j for j, made in slots.values() if j < ring.n and (j, made) == (j, written[j])}
        promised = set(range(ring.start, ring.n))
        assert promised <= readable
        for j in range(ring.lowest(), ring.n):  # every length a rollback may reach has its window
            assert set(range(max(0, j - tail.rows + 1), j)) <= promised
