"""Families of cases over KVarN records without a tail, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvkernels.records.layout import BITS
from kvkernels.testing.case import REFUSE, Case
from kvkernels.testing.case import make as _case


def _widths() -> Iterator[Case]:
    """Every pair of widths, in decode and in prefill (F08)."""
    for k in BITS:
        for v in BITS:
            shape: dict[str, Any] = {"k": f"kvarn{k}", "v": f"kvarn{v}", "head_dim": 64}
            yield _case("decode", 300, 1, quick=True, **shape)
            yield _case("prefill", 330, 17, quick=k == v, **shape)
            shape["head_dim"] = 256
            yield _case("decode", 450, 2, **shape)
    for dim in (128, 256, 512):
        for k, v in ((2, 8), (8, 2), (3, 5), (5, 3), (4, 6), (6, 4)):
            shape = {"k": f"kvarn{k}", "v": f"kvarn{v}", "head_dim": dim}
            yield _case("decode", 300, 3, quick=(k, v) in ((3, 5), (6, 4)), **shape)
            yield _case("prefill", 330, 64, **shape)


def _lengths() -> Iterator[Case]:
    """Ragged lengths and row counts on both sides of a group edge (F16, F34)."""
    for n_kv in (1, 2, 127, 128, 129, 255, 256, 257, 300, 385, 1000, 1990):
        for n_q in (1, 2, 3, 4, 16, 17, 64, 200):
            if n_q <= n_kv:
                quick = n_kv in (1, 128, 129, 257) and n_q in (1, 3, 16, 64)
                yield _case("length", n_kv, n_q, k="kvarn5", v="kvarn3", head_dim=64, quick=quick)
    for n_kv in (128, 129, 300, 900):
        yield _case("sinks", n_kv, 1, tag="sink128", sink_tokens=128, quick=n_kv in (129, 300))
        yield _case("sinks", n_kv, 40, tag="sink256", sink_tokens=256, quick=n_kv == 300)
    yield _case("decode", 4096, 1, n_head=8, n_kv_head=4)
    yield _case("prefill", 2048, 512, n_head=8, n_kv_head=2)
    yield _case("prefill", 1300, 1300, head_dim=64, tag="one-step")


def _heads() -> Iterator[Case]:
    """GQA ratios with at least two KV heads, and one KV head (F15)."""
    for n_head, n_kv_head in (
        (2, 2), (6, 2), (24, 4), (24, 2), (40, 8), (10, 2), (16, 2), (5, 1), (16, 1),
    ):  # fmt: skip
        for n_q in (1, 2, 3, 17):
            yield _case(
                "gqa", 300, n_q, n_head=n_head, n_kv_head=n_kv_head, head_dim=64,
                quick=n_head in (10, 24) and n_q in (3, 17),
            )  # fmt: skip


def _scores() -> Iterator[Case]:
    """Softcap, ALiBi and learned sinks, with scores large enough to notice (F17)."""
    for n_q in (1, 3, 40):
        big: dict[str, Any] = {"gain": 4.0, "quick": n_q != 1}
        yield _case("softcap", 300, n_q, softcap=30.0, tag="cap30", **big)
        yield _case(
            "softcap", 300, n_q, softcap=30.0, alibi=8.0, n_head=12, n_kv_head=4,
            tag="cap30-alibi8", **big,
        )  # fmt: skip
        yield _case("alibi", 300, n_q, alibi=8.0, n_head=12, n_kv_head=2, tag="alibi8")
        yield _case("softcap", 900, n_q, softcap=50.0, window=400, tag="cap50", **big)
        yield _case("logits", 300, n_q, sink_logits=True, tag="sink-logits", quick=True)
    yield _case("gain", 300, 5, gain=4.0, tag="x4", quick=True)
    yield _case("outliers", 700, 5, tag="outlier-channels", quick=True)
    yield _case("dtype", 300, 3, dtype="float16", tag="float16", quick=True)
    yield _case("dtype", 300, 30, dtype="float16", tag="float16")


def _windows() -> Iterator[Case]:
    for window in (1, 60, 127, 128, 129, 150, 400):
        for n_q in (1, 7, 200):
            quick = window in (60, 150) and n_q != 7
            yield _case("window", 1000, n_q, window=window, head_dim=64, quick=quick)
    yield _case("window", 200, 200, window=60, head_dim=64)


def _encoders() -> Iterator[Case]:
    """Records of the aware encoder in attention: other codes and axes, nothing else new."""
    for bits in BITS:
        shape: dict[str, Any] = {"k": f"kvarn{bits}", "v": f"kvarn{bits}", "encoder": "aware"}
        yield _case("aware", 450, 3, n_head=6, head_dim=64, quick=bits == 4, **shape)
        yield _case("aware", 300, 40, head_dim=128, **shape)
    yield _case("aware", 700, 2, window=150, encoder="aware", n_head=8, quick=True)


def _batches() -> Iterator[Case]:
    """Several sequences in one step, alike and not (B7)."""
    yield _case("batch", (1, 33, 97, 128, 129, 192), 1, head_dim=64, quick=True)
    yield _case("batch", (300, 129, 700), (1, 17, 3), head_dim=64, quick=True)
    yield _case("batch", (300, 129, 700), (200, 64, 16), n_head=6, head_dim=128)
    yield _case("batch", (500, 700, 200), (1, 40, 2), window=150, head_dim=64, quick=True)


def _masks() -> Iterator[Case]:
    """Strides, views and kinds (F35); rows and tiles that see nothing (F13)."""
    kinds = [f"{kind}-{stride}" for stride in (498, 500, 504, 512) for kind in ("bool", "add")]
    kinds += ["bool-transposed", "add-transposed", "bool-offset", "add-offset", "bool-keys"]
    kinds += ["add-heads", "bool-queries", "add16-512", "add64-512"]
    for kind in kinds:
        for n_q in (3, 40):
            quick = n_q == 3 and kind in ("bool-498", "add-504", "bool-transposed", "add-heads")
            yield _case("mask", 498, n_q, tag=kind, mask=kind, head_dim=64, quick=quick)
    for window in (100, 150):
        yield _case("mask", 498, 40, mask="add-heads", tag="add-heads", window=window, quick=True)
    # Several blocks of query rows and of keys.
    for kind in ("add-heads", "bool-1010", "add-transposed"):
        yield _case("mask", 1000, 200, tag=kind, mask=kind, head_dim=64, quick=kind == "add-heads")
    for dim in (64, 128, 256, 512):
        for kind in ("hidden-rows", "hidden-all", "hidden-tile", "hidden-body"):
            for logits in (False, True):
                tag = kind + ("-sink-logits" if logits else "")
                shape: dict[str, Any] = {"head_dim": dim, "mask": kind, "sink_logits": logits}
                quick = dim == 64 and kind != "hidden-all"
                yield _case("masked", 420, 32, tag=tag, quick=quick, **shape)
                yield _case("masked", 420, 16, tag=tag, quick=dim == 128 and not logits, **shape)


def _refusals() -> Iterator[Case]:
    """What must be refused, and the reason that must be among those given (F18)."""
    no: dict[str, Any] = {"must_be": REFUSE, "quick": True}
    for dim in (40, 80, 96, 112, 120, 192, 576):
        yield _case("refuse", head_dim=dim, reasons=("op.head_dim_k",), **no)
    yield _case("refuse", attention="mla", tag="mla", reasons=("op.attention",), **no)
    yield _case(
        "refuse", head_dim_v=64, tag="v64", reasons=("op.head_dim_k_head_dim_v",), **no
    )  # fmt: skip
    # Standard types take any multiple of 32 (A2). A tail on K-only attention has two reasons (A3).
    for name in ("f16", "q8_0"):
        for dim in (16, 48):
            yield _case(
                "refuse", k=name, v="f16", head_dim=dim, reasons=("op.head_dim_k",), **no
            )  # fmt: skip
    yield _case(
        "refuse", k="f16", v="f16", head_dim_v=48, reasons=("op.head_dim_v",), **no
    )  # fmt: skip
    both: dict[str, Any] = {"attention": "mla", "reasons": ("op.attention", "tail"), **no}
    yield _case("refuse", tag="mla", tail=256, **both)
    yield _case("refuse", tag="mla", tail=64, k="q8_0", v="q8_0", **both)
    yield _case("refuse", tag="mla", tail=4096, k="f16", v="f16", **both)


FAMILIES = (
    _widths,
    _lengths,
    _heads,
    _scores,
    _windows,
    _encoders,
    _batches,
    _masks,
    _refusals,
)
