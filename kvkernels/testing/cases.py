"""The one list of parity cases: what is asked of every device, by id.

A case is a layer, what is cached before (``past`` rows per sequence), and one step of ``n_q`` rows
per sequence. Ids read ``family/kKvV/dD/hHxKV/...``; ``fnmatch`` globs select them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import Any

from kvkernels.errors import InputError, did_you_mean
from kvkernels.op import AttentionOp, LayerSpec
from kvkernels.operations import attend_op
from kvkernels.planner import ACTIVATIONS
from kvkernels.records.layout import BITS, GROUP, HeadLayout, Side

NATIVE, ANY, REFUSE = "native", "any", "refuse"
_HALF = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question. ``must_be``: served natively, served by ``any`` route, or refused with at least
    one of ``reasons`` in a considered row. ``mask`` names a kind of ``inputs.mask``; ``gain``
    multiplies q and k, so that scores reach a softcap.
    """

    id: str
    layer: LayerSpec
    past: tuple[int, ...]
    n_q: tuple[int, ...]
    mask: str = ""
    gain: float = 1.0
    dtype: str = "float32"
    quick: bool = False
    must_be: str = NATIVE
    reasons: tuple[str, ...] = ()

    @property
    def activations(self) -> tuple[str, ...]:
        """Kinds of activations to run with: the default, the exact one, and all for widths."""
        return ACTIVATIONS if self.id.startswith(("decode", "prefill")) else ("auto", "f32")

    @property
    def n_rows(self) -> int:
        """Query rows of the step."""
        return sum(self.n_q)

    @property
    def n_ctx(self) -> int:
        """Rows a cache must hold per sequence."""
        return max(a + b for a, b in zip(self.past, self.n_q, strict=True))

    @property
    def bytes(self) -> int:
        """Least bytes one attend moves: visible records and exact rows, current rows, q and out."""
        spec = self.layer
        rows = spec.n_kv_head * spec.head_dim * 2
        total = 4 * self.n_rows * (rows + 2 * spec.n_head * spec.head_dim)
        for past, _ in zip(self.past, self.n_q, strict=True):
            seen = past if spec.window is None else min(past, spec.window)
            exact = min(seen, spec.sink_tokens + past % GROUP)
            total += exact * rows * _HALF + -(-(seen - exact) // GROUP) * self._group_bytes
        return total

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, over visible pairs."""
        pairs = 0
        for past, n_q in zip(self.past, self.n_q, strict=True):
            for i in range(n_q):
                seen = past + i + 1
                pairs += seen if self.layer.window is None else min(seen, self.layer.window)
        return 4 * pairs * self.layer.n_head * self.layer.head_dim

    @property
    def _group_bytes(self) -> int:
        spec = self.layer
        if spec.k_bits is None or spec.v_bits is None:
            return 0
        k = HeadLayout(Side.K, spec.k_bits, spec.head_dim).nbytes
        return spec.n_kv_head * (k + HeadLayout(Side.V, spec.v_bits, spec.head_dim).nbytes)

    def op(self, device: str, **facts: Any) -> AttentionOp:
        """The operation that stands for the case in a decision: its largest sequence."""
        return attend_op(
            self.layer, device, max(self.n_q), self.n_ctx, n_seq=len(self.n_q), **facts
        )


# Cases are about attention: published records, whose reference is quick, unless a case says so.
_PLAIN: dict[str, Any] = {"sink_tokens": 0, "encoder": "published"}


def _case(family: str, n_kv: int | tuple[int, ...] = 300, n_q: int | tuple[int, ...] = 1,
          *, tag: str = "", mask: str = "", gain: float = 1.0, dtype: str = "float32",
          quick: bool = False, must_be: str = NATIVE, reasons: tuple[str, ...] = (),
          k: str = "kvarn4", v: str = "kvarn4", n_head: int = 4, n_kv_head: int = 2,
          head_dim: int = 128, **layer: Any) -> Case:  # fmt: skip
    """A case from its shape; ``n_kv`` counts all rows, those of the step included."""
    totals = (n_kv,) if isinstance(n_kv, int) else n_kv
    rows = (n_q,) * len(totals) if isinstance(n_q, int) else n_q
    spec = LayerSpec(
        k=k, v=v, n_head=n_head, n_kv_head=n_kv_head, head_dim=head_dim,
        **(_PLAIN | layer),
    )  # fmt: skip
    types = f"k{k[5:]}v{v[5:]}" if spec.is_kvarn else f"{k}-{v}"
    parts = [family, types, f"d{head_dim}", f"h{n_head}x{n_kv_head}"]
    parts.append("kv" + "+".join(map(str, totals)))
    parts.append("q" + "+".join(map(str, rows if len(set(rows)) > 1 else rows[:1])))
    parts += [f"w{spec.window}"] if spec.window else []
    parts += [tag] if tag else []
    past = tuple(t - r for t, r in zip(totals, rows, strict=True))
    return Case(
        id="/".join(parts), layer=spec, past=past, n_q=rows, mask=mask, gain=gain, dtype=dtype,
        quick=quick, must_be=must_be, reasons=reasons,
    )  # fmt: skip


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
    for name in ("f16", "q8_0", "q4_0"):
        yield _case("refuse", k=name, v=name, reasons=("op.k_type", "op.v_type"), **no)


@cache
def cases() -> tuple[Case, ...]:
    """Every case, in a fixed order."""
    families = (
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
    found = tuple(case for family in families for case in family())
    assert len({case.id for case in found}) == len(found), "case ids must be unique"
    return found


def select(pattern: str = "*", *, quick: bool = False) -> tuple[Case, ...]:
    """Cases whose id matches the glob, of the quick subset when asked."""
    return tuple(
        case for case in cases() if (case.quick or not quick) and fnmatchcase(case.id, pattern)
    )


@cache
def _by_id() -> Mapping[str, Case]:
    return MappingProxyType({case.id: case for case in cases()})


def by_id(case_id: str) -> Case:
    """The case of that id. Raises InputError with the nearest id."""
    found = _by_id().get(case_id)
    if found is None:
        hint = did_you_mean(case_id, _by_id())
        raise InputError("case", found=repr(case_id), needed="the id of a case", hint=hint)
    return found
