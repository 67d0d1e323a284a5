"""The plan: every layer's decisions at the corners of what it will do,
before any byte is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvkernels.arguments import check_query_moments
from kvkernels.backend import Device
from kvkernels.dispatch import Decision, Policy, decide
from kvkernels.errors import InputError, RequestError, UnsupportedOp, did_you_mean
from kvkernels.memory import LayerSizes, Memory
from kvkernels.op import AttentionOp, LayerSpec, OpKind
from kvkernels.pages import PageClass
from kvkernels.records.layout import GROUP
from kvkernels.settings import DEFAULT_WINDOW_CHUNK, settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvkernels.cache import Cache


#: how activations enter the dot products with codes (codec.md 5c); auto: the backend's own default
ACTIVATIONS = ("auto", "int8", "int16", "f32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a cache must hold and what a step may do. All counts in tokens unless said otherwise.

    n_ctx: per sequence; n_ubatch: of all sequences in one step; n_seq: sequences; rollback: newest
    rows of a step that can be taken back after it; verify: largest number of draft rows checked in
    one decode; keep_queries: stage the rotated queries of open groups in every layer (those of
    layers with the aware encoder are staged anyway, unless they have a query moment);
    window_chunk: tokens materialised at a time in prefill (None: from ``KVK_WINDOW_CHUNK``, default
    65536; 0 and below: 65536).
    """

    n_ctx: int
    n_ubatch: int = 512
    n_seq: int = 1
    rollback: int = 1
    verify: int = 16
    keep_queries: bool = False
    window_chunk: int | None = None
    activations: str = "auto"

    def __post_init__(self) -> None:
        for name in ("n_ctx", "n_ubatch", "n_seq", "verify"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(name, found=repr(value), needed="a whole number >= 1")
        if not isinstance(self.rollback, int) or not 0 <= self.rollback <= GROUP:
            raise RequestError(
                "rollback",
                found=repr(self.rollback),
                needed=f"0..{GROUP}: the previous group's exact rows are what a rollback needs",
            )
        if self.activations not in ACTIVATIONS:
            raise RequestError(
                "activations",
                found=repr(self.activations),
                needed=f"one of {', '.join(ACTIVATIONS)}",
                hint=did_you_mean(str(self.activations), ACTIVATIONS),
            )
        chunk = self.window_chunk
        if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool)):
            raise InputError("window_chunk", found=repr(chunk), needed="a whole number of tokens")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Decisions of one layer: attention at its corners, and the commit."""

    spec: LayerSpec
    attend: tuple[Decision, ...]
    commit: Decision

    def planned(self, n_q: int) -> Decision:
        """The planned decision of the corner that covers ``n_q`` query rows."""
        fitting = [d for d in self.attend if d.op.n_q >= n_q]
        return min(fitting, key=lambda d: d.op.n_q)


@dataclass(frozen=True)
class Plan:
    """What will run and what it will take. ``allocate()`` takes the first byte."""

    device: Device
    limits: Limits
    policy: Policy
    layers: tuple[LayerPlan, ...]
    window_chunk: int
    query_moments: tuple[NDArray[np.float64] | None, ...] = ()

    def query_moment(self, layer: int) -> NDArray[np.float64] | None:
        """The moment that stands for a layer's queries, if one was given."""
        return self.query_moments[layer] if self.query_moments else None

    def stages_queries(self, layer: int) -> bool:
        """Whether the cache keeps the rotated queries of the layer's open groups."""
        aware = self.layers[layer].spec.encoder == "aware"
        return self.limits.keep_queries or (aware and self.query_moment(layer) is None)

    def op(self, layer: int, *, n_q: int = 1, n_kv: int | None = None) -> AttentionOp:
        """The operation that attention of ``layer`` would build for one sequence (for
        ``kvk.explain``).
        """
        if not 0 <= layer < len(self.layers):
            raise InputError("layer", found=layer, needed=f"0..{len(self.layers) - 1}")
        n_kv = self.limits.n_ctx if n_kv is None else n_kv
        return attend_op(
            self.layers[layer].spec,
            self.device.caps.id,
            n_q,
            n_kv,
            activations=self.limits.activations,
        )

    def explain(self, layer: int, *, n_q: int = 1, n_kv: int | None = None) -> Decision:
        """The decision for that operation: route, entry and every row with its reasons."""
        op = self.op(layer, n_q=n_q, n_kv=n_kv)
        return decide(op, self.device.table, self.device.caps, self.policy)

    @cached_property
    def pages(self) -> dict[tuple[int | None, int], tuple[int, int]]:
        """(record slots, exact blocks) per page class, the class being (window, sink tokens)."""
        keys = {page_key(layer.spec) for layer in self.layers}
        return {key: self._capacity(*key) for key in sorted(keys, key=str)}

    def _capacity(self, window: int | None, sink_tokens: int) -> tuple[int, int]:
        return PageClass.capacity(
            window=window,
            sink_tokens=sink_tokens,
            n_ctx=self.limits.n_ctx,
            n_ubatch=self.limits.n_ubatch,
            n_seq=self.limits.n_seq,
        )

    @cached_property
    def memory(self) -> Memory:
        """Resident bytes, exact to the byte."""
        total = Memory()
        for index, layer in enumerate(self.layers):
            sizes = LayerSizes.of(layer.spec, keep_queries=self.stages_queries(index))
            total += sizes.memory(*self.pages[page_key(layer.spec)])
        return total

    def summary(self) -> str:
        """Routes, entries and bytes, one line per group of equal layers."""
        lines = [f"plan on {self.device.caps.id} ({self.device.caps.name})"]
        for spec, indices in _runs(layer.spec for layer in self.layers):
            layer = self.layers[indices[0]]
            entries = sorted({str(d.entry) for d in layer.attend})
            routes = sorted({str(d.route) for d in layer.attend})
            sizes = LayerSizes.of(spec, keep_queries=self.stages_queries(indices[0]))
            memory = sizes.memory(*self.pages[page_key(spec)])
            window = "full" if spec.window is None else f"window {spec.window}"
            lines.append(
                f"  layers {_span(indices)}: {spec.k}/{spec.v} {spec.encoder} "
                f"h{spec.n_head}/{spec.n_kv_head} d{spec.head_dim} {window}, sinks "
                f"{spec.sink_tokens}; {', '.join(routes)} by {', '.join(entries)}; "
                f"{memory.kv_resident_bytes / 2**20:.1f} MiB a layer"
            )
        lines.append(f"  resident {self.memory.kv_resident_bytes / 2**20:.1f} MiB")
        return "\n".join(lines)

    def allocate(self) -> Cache:
        """Take the memory and return an empty cache."""
        from kvkernels.cache import Cache

        return Cache(self)


def page_key(spec: LayerSpec) -> tuple[int | None, int]:
    """Layers with equal keys share group tables."""
    return spec.window, spec.sink_tokens


def attend_op(spec: LayerSpec, device: str, n_q: int, n_kv: int, **facts: Any) -> AttentionOp:
    """The attention of ``n_q`` new rows when ``n_kv`` rows are visible to the last,
    new ones included.
    """
    past = n_kv - n_q
    # A cache gives the aware encoder the queries of the rows, or the plan's moment of them.
    weighs = spec.encoder == "aware" and facts.get("kind") == OpKind.COMMIT
    sealed = past // GROUP * GROUP
    given: dict[str, Any] = {
        "n_q": n_q,
        "n_kv": n_kv,
        "body": sealed > spec.sink_tokens,
        "stage": past > 0,
        "current": True,
        "sink_rows": min(spec.sink_tokens, past),
        "queries": "rows" if weighs else "none",
    }
    return AttentionOp.for_layer(spec, device, **(given | facts))


def plan(
    layers: Sequence[LayerSpec],
    device: Device,
    limits: Limits,
    policy: Policy | None = None,
    *,
    query_moments: Sequence[Any] | None = None,
) -> Plan:
    """Decide for every layer at n_q in {1, verify, n_ubatch} x n_kv in {shortest, n_ctx}, and for
    its commit.

    ``query_moments``: per layer None or float [n_kv_head, D, D], the sum of q q^T over un-rotated
    queries of all query heads of a KV head; a layer with the aware encoder then stages no queries.
    Raises UnsupportedOp that lists every refused layer with every reason; nothing is allocated
    then.
    """
    if not layers:
        raise InputError("layers", found="none", needed="at least one LayerSpec")
    policy = policy or Policy()
    by_spec = {spec: _decide_layer(spec, device, limits, policy) for spec in dict.fromkeys(layers)}
    moments = check_query_moments(layers, query_moments)
    refused, labels = [], []
    for spec, indices in _runs(layers):
        layer = by_spec[spec]
        for decision in (*layer.attend, layer.commit):
            if not decision.ok:
                refused.append(decision)
                labels.append(f"layers {_span(indices)}")
                break  # the corners of one layer fail alike; the first says why
    if refused:
        raise UnsupportedOp(refused, labels)
    chunk = limits.window_chunk if limits.window_chunk is not None else settings().window_chunk
    return Plan(
        device,
        limits,
        policy,
        tuple(by_spec[spec] for spec in layers),
        chunk if chunk > 0 else DEFAULT_WINDOW_CHUNK,
        moments,
    )


def _decide_layer(spec: LayerSpec, device: Device, limits: Limits, policy: Policy) -> LayerPlan:
    corners = dict.fromkeys(
        attend_op(spec, device.caps.id, n_q, n_kv, activations=limits.activations)
        for n_q in sorted({1, min(limits.verify, limits.n_ubatch), limits.n_ubatch})
        for n_kv in (n_q, max(n_q, limits.n_ctx))
    )
    commit = attend_op(spec, device.caps.id, limits.n_ubatch, limits.n_ubatch, kind=OpKind.COMMIT)
    table, caps = device.table, device.caps
    return LayerPlan(
        spec,
        tuple(decide(op, table, caps, policy) for op in corners),
        # A forced attention entry says nothing about how rows are stored.
        decide(commit, table, caps, Policy(allow_unqualified=policy.allow_unqualified)),
    )


def _runs(specs: Iterable[LayerSpec]) -> list[tuple[LayerSpec, list[int]]]:
    found: dict[LayerSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        found.setdefault(spec, []).append(index)
    return list(found.items())


def _span(indices: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2, 5``."""
    parts: list[list[int]] = []
    for i in indices:
        if parts and parts[-1][-1] == i - 1:
            parts[-1] = [parts[-1][0], i]
        else:
            parts.append([i])
    return ", ".join("-".join(map(str, p)) for p in parts)
