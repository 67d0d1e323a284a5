"""One parity case: a question to a device, and what its answer takes at least.

A case is a layer, what is cached before (``past`` rows per sequence), and one step of ``n_q`` rows
per sequence. Ids read ``family/kKvV/dD/hHxKV/...``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvkernels import quants
from kvkernels.op import AttentionOp, LayerSpec
from kvkernels.operations import attend_op
from kvkernels.planner import ACTIVATIONS
from kvkernels.records.layout import GROUP, HeadLayout, Side
from kvkernels.storage import Storage

NATIVE, ANY, REFUSE = "native", "any", "refuse"
_HALF = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question. ``must_be``: served natively, served by ``any`` route, or refused with at least
    one of ``reasons`` in a considered row or as the field of a request. ``mask`` names a kind of
    ``inputs.mask``; ``gain`` multiplies q and k, so that scores reach a softcap.
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
        """Least bytes one attend moves: visible body, exact rows, current rows, q and out.

        Stored rows count once for all queries of a sequence. Of a tail those count that its first
        query takes; a mask hides nothing here.
        """
        spec = self.layer
        dims = spec.head_dim + spec.head_dim_v
        total = 4 * self.n_rows * dims * (spec.n_kv_head + spec.n_head)
        for past, n_q in zip(self.past, self.n_q, strict=True):
            seen = past - min(past, span(spec, past, past + n_q)[0])
            exact = min(seen, max(0, self._tail_rows - 1))  # a query is one of its own newest N
            body = seen - exact
            if spec.is_kvarn:
                staged = min(body, spec.sink_tokens + (0 if exact else past % GROUP))
                exact += staged
                body = -(-(body - staged) // GROUP)
            total += exact * spec.n_kv_head * dims * _HALF + body * self._body_bytes
        return total

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, over visible pairs."""
        spec, pairs = self.layer, 0
        for past, n_q in zip(self.past, self.n_q, strict=True):
            for i in range(past, past + n_q):
                first, stop = span(spec, i, past + n_q)
                pairs += stop - first
        return 2 * pairs * spec.n_head * (spec.head_dim + spec.head_dim_v)

    @property
    def _tail_rows(self) -> int:
        """Newest rows that come from a ring; KVarN's own 128 are the stage's."""
        spec = self.layer
        if not spec.is_kvarn:
            return spec.tail
        rows = -(-spec.tail // GROUP) * GROUP
        return rows if rows > GROUP else 0

    @property
    def _body_bytes(self) -> int:
        """Bytes of both sides of a body, all heads: of a group of records, or of a row."""
        spec = self.layer
        if spec.k_bits is None or spec.v_bits is None:
            kinds = (spec.k, spec.head_dim), (spec.v, spec.head_dim_v)
            return spec.n_kv_head * sum(quants.block_type(t).row_bytes(d) for t, d in kinds)
        k = HeadLayout(Side.K, spec.k_bits, spec.head_dim).nbytes
        return spec.n_kv_head * (k + HeadLayout(Side.V, spec.v_bits, spec.head_dim).nbytes)

    def op(self, device: str, storage: Storage | None = None, **facts: Any) -> AttentionOp:
        """The operation that stands for the case in a decision: its largest sequence.
        ``storage``: what a plan made of the layer.
        """
        return attend_op(
            self.layer, device, max(self.n_q), self.n_ctx, storage, n_seq=len(self.n_q), **facts
        )


def span(spec: LayerSpec, i: int, n: int) -> tuple[int, int]:
    """Keys that the query at ``i`` sees of a sequence of ``n`` rows: first, and one past the
    last (B4).
    """
    first, stop = 0, i + 1 if spec.causal else n
    if spec.window is None:
        return first, stop
    if spec.window_kind == "chunked":
        return i // spec.window * spec.window, stop
    reach = spec.window // 2 if spec.window_kind == "symmetric" else spec.window - 1
    return max(0, i - reach), min(stop, i + reach + 1)


# Cases are about attention: published records, whose reference is quick, unless a case says so.
_PLAIN: dict[str, Any] = {"sink_tokens": 0, "encoder": "published"}
_WINDOW_NAMES = {"sliding": "w", "chunked": "chunk", "symmetric": "sym"}


def make(family: str, n_kv: int | tuple[int, ...] = 300, n_q: int | tuple[int, ...] = 1,
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
    dims = f"d{head_dim}"
    if spec.head_dim_v != head_dim and not spec.is_kvarn:  # KVarN: only to be refused
        dims += f"v{spec.head_dim_v}"
    parts = [family, types, dims, f"h{n_head}x{n_kv_head}"]
    parts.append("kv" + "+".join(map(str, totals)))
    parts.append("q" + "+".join(map(str, rows if len(set(rows)) > 1 else rows[:1])))
    parts += [f"{_WINDOW_NAMES[spec.window_kind]}{spec.window}"] if spec.window else []
    parts += [] if spec.causal else ["noncausal"]
    parts += [f"tail{spec.tail}{spec.tail_dtype or ''}"] if spec.tail else []
    parts += [tag] if tag else []
    past = tuple(t - r for t, r in zip(totals, rows, strict=True))
    return Case(
        id="/".join(parts), layer=spec, past=past, n_q=rows, mask=mask, gain=gain, dtype=dtype,
        quick=quick, must_be=must_be, reasons=reasons,
    )  # fmt: skip
