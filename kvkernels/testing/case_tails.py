"""Families of cases over standard types, precision tails, kinds of windows, non-causal layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvkernels.op import STANDARD_TYPES, TAIL_DTYPES
from kvkernels.records.layout import BITS
from kvkernels.testing.case import ANY, Case
from kvkernels.testing.case import make as _case

Facts = dict[str, Any]
# A body of every kind of block, and sides that differ in everything.
_SOME = (("q8_0", "q8_0"), ("f16", "q8_0"), ("q4_0", "q5_1"), ("bf16", "q4_1"), ("q5_0", "f32"))
_MIXED: Facts = {"k": "q8_0", "v": "q4_0", "head_dim": 64}
_RECORDS: Facts = {"k": "kvarn5", "v": "kvarn4", "head_dim": 64}
_BOTH = (_RECORDS, _MIXED)


def _kvarn(k: int, v: int, dim: int = 64) -> Facts:
    return {"k": f"kvarn{k}", "v": f"kvarn{v}", "head_dim": dim}


def _standard_types() -> Iterator[Case]:
    """Every ordered pair, every head dim, D_k other than D_v (A1, A2, F12)."""
    for i, k in enumerate(STANDARD_TYPES):
        for j, v in enumerate(STANDARD_TYPES):
            quick = k == v or (k, v) in _SOME
            yield _case("standard", 300, 1, k=k, v=v, head_dim=64, quick=quick)
            if (j - i) % len(STANDARD_TYPES) in (0, 1, 4):
                yield _case("standard", 300, 17, k=k, v=v, head_dim=64, quick=j == i)
    for dim in (32, 96, 128, 160, 256, 512):
        for k, v in _SOME:
            for n_q in (1, 3, 17):
                quick = dim in (32, 96) and n_q == 3
                yield _case("standard", 150, n_q, k=k, v=v, head_dim=dim, quick=quick)
    for dim, dim_v in ((64, 32), (32, 128), (96, 64), (192, 128), (128, 256)):
        for k, v in _SOME:
            for n_q in (1, 17):
                yield _case(
                    "standard", 150, n_q, k=k, v=v, head_dim=dim, head_dim_v=dim_v,
                    quick=k == "q4_0" and dim in (64, 192),
                )  # fmt: skip


def _standard_shapes() -> Iterator[Case]:
    """Lengths, heads, windows, masks and batches over standard types."""
    for n_kv in (1, 2, 31, 32, 33, 127, 129, 257, 513, 1000, 1990):
        for n_q in (1, 3, 17, 64, 200):
            if n_q <= n_kv:
                quick = n_kv in (1, 33, 257) and n_q in (1, 17)
                yield _case("standard", n_kv, n_q, tag="length", quick=quick, **_MIXED)
    for n_head, n_kv_head in ((2, 2), (1, 1), (6, 2), (9, 3), (8, 2), (16, 4), (10, 2), (16, 1)):
        for n_q in (1, 3, 17):
            heads: Facts = {"n_head": n_head, "n_kv_head": n_kv_head}
            quick = n_head in (2, 9, 8) and n_q == 3
            yield _case("standard", 200, n_q, tag="gqa", quick=quick, **heads, **_MIXED)
    for window in (1, 60, 128, 150, 400):
        for n_q in (1, 7, 200):
            quick = window == 60 and n_q != 7
            yield _case("standard", 1000, n_q, window=window, quick=quick, **_MIXED)
    big: Facts = {"k": "q5_1", "v": "f16", "head_dim": 64, "gain": 4.0}
    for n_q in (1, 3, 40):
        quick = n_q == 3
        yield _case("standard", 300, n_q, softcap=30.0, tag="cap30", quick=quick, **big)
        yield _case("standard", 300, n_q, alibi=8.0, n_head=12, tag="alibi8", quick=quick, **big)
        yield _case("standard", 300, n_q, sink_logits=True, tag="sink-logits", quick=quick, **big)
        yield _case("standard", 300, n_q, dtype="float16", tag="float16", quick=quick, **_MIXED)
    for kind in ("bool-498", "add-heads", "add-transposed", "bool-offset", "bool-queries"):
        for n_q in (3, 40):
            quick = kind == "add-heads"
            yield _case("standard", 498, n_q, mask=kind, tag=kind, quick=quick, **_MIXED)
    for kind in ("hidden-rows", "hidden-all", "hidden-tile", "hidden-body"):
        for logits in (False, True):
            tag = kind + ("-sink-logits" if logits else "")
            shape: Facts = {"mask": kind, "tag": tag, "sink_logits": logits, **_MIXED}
            yield _case("standard", 420, 32, quick=not logits, **shape)
            yield _case("standard", 420, 16, **shape)
    yield from _batches("standard", _MIXED)


def _batches(family: str, shape: Facts) -> Iterator[Case]:
    """Several sequences in one step, alike and not (B7)."""
    yield _case(family, (1, 33, 97, 128, 129, 192), 1, quick=True, **shape)
    yield _case(family, (300, 129, 700), (1, 17, 3), quick=True, **shape)
    yield _case(family, (300, 129, 700), (200, 64, 16), n_head=6, **shape)
    yield _case(family, (500, 700, 200), (1, 40, 2), window=150, **shape)


def _tails_of_every_type() -> Iterator[Case]:
    """Every pair of bodies under both exact types (T2, T3)."""
    for dtype in TAIL_DTYPES:
        for k in BITS:
            for v in BITS:
                quick = k == v and (k in (2, 5)) == (dtype == "bf16")
                shape = _kvarn(k, v) | {"tail": 256, "tail_dtype": dtype}
                yield _case("tail", 600, 1, quick=quick, **shape)
        for k_type in STANDARD_TYPES:
            for v_type in STANDARD_TYPES:
                shape = {"k": k_type, "v": v_type, "head_dim": 64, "tail": 70, "tail_dtype": dtype}
                quick = k_type == v_type and (k_type in ("q8_0", "q4_1")) == (dtype == "bf16")
                yield _case("tail", 200, 1, quick=quick, **shape)


def _tail_lengths() -> Iterator[Case]:
    """Lengths of tails, of steps and of what is there (T3, T6, F22): tails that the sequence has
    not filled, and steps that push every row of the ring out of the newest N.
    """
    for tail in (128, 129, 256, 512, 1024):
        for n_q in (1, 3, 40, 300):
            quick = tail in (128, 129, 512) and n_q in (3, 40)
            yield _case("tail", 1500, n_q, tail=tail, quick=quick, **_RECORDS)
    for n_kv in (1, 100, 128, 200, 256, 257, 300, 385, 512):
        for n_q in (1, 40):
            if n_q <= n_kv:
                quick = n_kv in (1, 200, 257)
                yield _case("tail", n_kv, n_q, tail=256, tag="short", quick=quick, **_RECORDS)
    for tail in (1, 17, 32, 128, 300):
        for n_q in (1, 3, 40, 310):
            quick = tail in (1, 32) and n_q in (1, 40)
            yield _case("tail", 500, n_q, tail=tail, quick=quick, **_MIXED)
    for n_kv in (1, 31, 33, 69, 70, 71):
        yield _case("tail", n_kv, 1, tail=70, tag="short", quick=n_kv in (1, 71), **_MIXED)
    for dim in (128, 256, 512):
        for n_q in (1, 17):
            for n_kv in (300, 512, 1024):  # the ladder of F03
                shape = _kvarn(4, 4, dim)
                quick = dim == 512 and n_kv == 300
                yield _case("tail", n_kv, n_q, tail=256, tag="dims", quick=quick, **shape)
            wide: Facts = {"k": "q8_0", "v": "q5_0", "head_dim": dim, "head_dim_v": 96}
            yield _case("tail", 300, n_q, tail=100, tag="dims", quick=dim == 128, **wide)


def _tail_shapes() -> Iterator[Case]:
    """Masks that hide rows among the newest, windows, sinks, scores and batches with a tail."""
    for shape, tail in ((_RECORDS, 256), (_MIXED, 50)):
        for kind in ("hidden-newest", "sparse-heads", "add-heads", "hidden-body", "hidden-rows"):
            for n_q in (3, 40):
                quick = n_q == 3 or kind == "sparse-heads"
                facts: Facts = {"mask": kind, "tag": kind, "tail": tail, **shape}
                yield _case("tail", 700, n_q, quick=quick, **facts)
                yield _case("tail", 700, n_q, window=400, **facts)
        for window in (300, 400):
            for n_q in (1, 17, 310):
                quick = window == 300 and n_q != 17
                yield _case("tail", 1000, n_q, window=window, tail=tail, quick=quick, **shape)
        for n_q in (1, 3, 40):
            facts = {"tail": tail, "gain": 4.0, **shape}
            quick = n_q == 3
            yield _case("tail", 500, n_q, softcap=30.0, tag="cap30", quick=quick, **facts)
            yield _case("tail", 500, n_q, alibi=8.0, n_head=12, tag="alibi8", quick=quick, **facts)
            yield _case("tail", 500, n_q, sink_logits=True, tag="logits", quick=quick, **facts)
            plain: Facts = {"tail": tail, **shape}
            yield _case("tail", 500, n_q, dtype="float16", tag="float16", **plain)
            for n_head, n_kv_head in ((2, 2), (9, 3), (8, 2), (10, 2)):
                heads: Facts = {"n_head": n_head, "n_kv_head": n_kv_head}
                yield _case("tail", 500, n_q, tag="gqa", **heads, **plain)
        yield from _batches("tail", {"tail": tail, **shape})
        yield _case("tail", (600, 60, 290), (1, 40, 2), tail=tail, quick=True, **shape)
    for n_kv in (129, 200, 300, 600):
        for n_q in (1, 40):
            for sink in (128, 256):
                yield _case(
                    "tail", n_kv, n_q, sink_tokens=sink, tail=256, tag=f"sink{sink}",
                    quick=n_kv == 600 and sink == 128, **_RECORDS,
                )  # fmt: skip
    yield _case("tail", 700, 3, encoder="aware", tail=256, tag="aware", quick=True, **_RECORDS)


def _native_exact() -> Iterator[Case]:
    """What a tail covers whole has no body (T9): windows, and full attention as a plain cache."""
    for shape in _BOTH:
        for dtype in TAIL_DTYPES:
            for window in (100, 150, 384):
                for n_q in (1, 3, 40, 200):
                    yield _case(
                        "native-exact", 1000, n_q, window=window, tail=window, tail_dtype=dtype,
                        quick=window == 150 and n_q in (1, 40), **shape,
                    )  # fmt: skip
            for n_q in (1, 40):
                facts: Facts = {"tail_dtype": dtype, **shape}
                quick = dtype == "bf16"
                yield _case("native-exact", 300, n_q, tail=4096, quick=quick, **facts)
                yield _case("native-exact", 90, n_q, window=150, tail=150, **facts)
        facts = {"window": 150, "tail": 150, **shape}
        for kind in ("hidden-newest", "sparse-heads", "add-heads", "hidden-all"):
            quick = kind == "hidden-newest"
            yield _case("native-exact", 500, 17, mask=kind, tag=kind, quick=quick, **facts)
        yield _case("native-exact", 500, 3, sink_logits=True, tag="logits", quick=True, **facts)
        yield _case("native-exact", (300, 20, 700), (1, 17, 3), quick=True, **facts)
        yield _case("native-exact", (300, 129, 300), (1, 17, 3), tail=4096, **shape)
    for dim, dim_v in ((32, 32), (96, 64), (256, 256)):
        wide: Facts = {"k": "q4_0", "v": "q8_0", "head_dim": dim, "head_dim_v": dim_v}
        yield _case("native-exact", 300, 3, window=100, tail=100, **wide)
        yield _case("native-exact", 300, 3, tail=4096, **wide)


def _kinds_of_windows() -> Iterator[Case]:
    """Chunked and symmetric windows (B4): queries on, before and across the edge of a chunk."""
    for shape in _BOTH:
        for window in (60, 128, 200):
            # The last row is the first of a chunk, then the last of one, then one in the middle.
            for n_kv in (window * 3 + 1, window * 4, 730):
                for n_q in (1, 17):
                    yield _case(
                        "chunked", n_kv, n_q, window=window, window_kind="chunked",
                        quick=window == 60 and n_kv == 181, **shape,
                    )  # fmt: skip
            yield _case(
                "chunked", 730, 200, window=window, window_kind="chunked", quick=window == 60,
                **shape,
            )  # fmt: skip
        for window in (1, 60, 61, 300):
            for n_q in (1, 3, 17, 200):
                yield _case(
                    "symmetric", 700, n_q, window=window, window_kind="symmetric",
                    quick=window in (60, 61) and n_q in (3, 200), **shape,
                )  # fmt: skip
    for kind in ("chunked", "symmetric"):
        for n_q in (1, 40):
            facts: Facts = {"window_kind": kind, "quick": n_q == 40}
            yield _case(kind, 700, n_q, window=400, tail=256, **facts, **_RECORDS)
            yield _case(kind, 700, n_q, window=150, tail=30, **facts, **_MIXED)
            yield _case(kind, 700, n_q, window=150, tail=150, **facts, **_MIXED)
        masked: Facts = {"window_kind": kind, "window": 150, "mask": "add-heads"}
        yield _case(kind, 700, 17, tag="add-heads", quick=True, **masked, **_MIXED)
        yield _case(kind, (500, 700, 200), (1, 40, 2), window=150, window_kind=kind, **_RECORDS)


def _non_causal() -> Iterator[Case]:
    """Rows that see later rows of their own step (D2): served, not necessarily natively."""
    for shape in _BOTH:
        open_ended: Facts = {"causal": False, "must_be": ANY, **shape}
        for n_q in (1, 3, 40, 200):
            quick = n_q in (3, 40)
            yield _case("noncausal", 450, n_q, quick=quick, **open_ended)
            for kind in ("sliding", "chunked", "symmetric"):
                facts: Facts = {"window": 150, "window_kind": kind, **open_ended}
                yield _case("noncausal", 450, n_q, quick=n_q == 40, **facts)
        yield _case("noncausal", 200, 200, tag="one-step", quick=True, **open_ended)
        yield _case(
            "noncausal", 450, 40, alibi=8.0, n_head=12, tag="alibi8", quick=True, **open_ended
        )
        yield _case("noncausal", 450, 40, mask="add-heads", tag="add-heads", **open_ended)
        yield _case("noncausal", (300, 129, 400), (1, 17, 3), **open_ended)
        yield _case("noncausal", 600, 40, tail=256, quick=True, **open_ended)
        yield _case("noncausal", 600, 300, tail=256, **open_ended)


FAMILIES = (
    _standard_types,
    _standard_shapes,
    _tails_of_every_type,
    _tail_lengths,
    _tail_shapes,
    _native_exact,
    _kinds_of_windows,
    _non_causal,
)
