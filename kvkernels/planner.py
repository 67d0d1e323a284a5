"""The plan: every layer's decisions at the corners of what it will do,
before any byte is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvkernels.arguments import check_query_moments
from kvkernels.backend import Device
from kvkernels.dispatch import Decision, Policy, Route, decide
from kvkernels.errors import InputError, RequestError, UnsupportedOp, did_you_mean
from kvkernels.memory import LayerSizes, Memory
from kvkernels.op import AttentionOp, LayerSpec, OpKind
from kvkernels.operations import attend_op
from kvkernels.pages import PageRules
from kvkernels.planlog import LogLine, log_text, plan_log, runs, spans
from kvkernels.records.layout import GROUP
from kvkernels.request import ResolvedTail, TailRequest
from kvkernels.settings import DEFAULT_WINDOW_CHUNK, settings
from kvkernels.storage import Body, Pages, Steps, Storage, Stored
from kvkernels.storages import resolve_tails, storage_of

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
    rows that can be taken back after a step, also where a tail's ring is all there is; verify:
    largest number of draft rows checked in one decode; keep_queries: stage the rotated queries of
    open groups in every layer (those of layers with the aware encoder are staged anyway, unless
    they have a query moment); window_chunk: tokens materialised at a time in prefill (None: from
    ``KVK_WINDOW_CHUNK``, default 65536; 0 and below: 65536).
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
    """What one layer keeps, and its decisions: attention at its corners, the commit of its body
    (None without one) and the write into its ring (None without one).
    """

    spec: LayerSpec
    storage: Storage
    attend: tuple[Decision, ...]
    commit: Decision | None
    tail: Decision | None = None

    @property
    def rules(self) -> PageRules:
        """Layers with equal rules share group tables."""
        return PageRules.of(self.spec, self.storage)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All of them."""
        return (*self.attend, *(d for d in (self.commit, self.tail) if d))

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
    tails: tuple[ResolvedTail, ...] = ()

    def query_moment(self, layer: int) -> NDArray[np.float64] | None:
        """The moment that stands for a layer's queries, if one was given."""
        return self.query_moments[layer] if self.query_moments else None

    def stages_queries(self, layer: int) -> bool:
        """Whether the cache keeps the rotated queries of the layer's open groups."""
        planned = self.layers[layer]
        if planned.storage.body is not Body.RECORDS:
            return False
        aware = planned.spec.encoder == "aware"
        return self.limits.keep_queries or (aware and self.query_moment(layer) is None)

    def stored(self, layer: int) -> tuple[Stored, Stored, Stored]:
        """In which forms fp16 must hold q, k and v of a layer."""
        q = Stored.ROTATED if self.stages_queries(layer) else Stored.NO
        k, v = self.layers[layer].storage.stored
        return q, k, v

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
            self.layers[layer].storage,
            activations=self.limits.activations,
            max_offset=self.layers[layer].attend[0].op.max_offset,
        )

    def explain(self, layer: int, *, n_q: int = 1, n_kv: int | None = None) -> Decision:
        """The decision for that operation: route, entry and every row with its reasons."""
        op = self.op(layer, n_q=n_q, n_kv=n_kv)
        return decide(op, self.device.table, self.device.caps, self.policy)

    @cached_property
    def pages(self) -> dict[PageRules, Pages]:
        """Physical pages per page class."""
        classes = dict.fromkeys(layer.rules for layer in self.layers)
        return {rules: _capacity(rules, self.limits) for rules in classes}

    def layer_memory(self, layer: int) -> Memory:
        """Resident bytes of one layer."""
        planned = self.layers[layer]
        keep = self.stages_queries(layer)
        sizes = LayerSizes.of(planned.spec, planned.storage, keep_queries=keep)
        return sizes.memory(self.pages[planned.rules], planned.storage)

    @cached_property
    def memory(self) -> Memory:
        """Resident bytes, exact to the byte; transient ones of steps as large as the limits, with
        as many rows of every sequence of a decode (uneven ones can take more).
        """
        resident = sum((self.layer_memory(i) for i in range(len(self.layers))), Memory())
        limits = self.limits
        steps = Steps(limits.n_ctx, limits.n_ubatch, limits.n_seq, limits.verify)
        planned = enumerate(self.layers)
        kinds = dict.fromkeys((p.spec, p.storage, self.stages_queries(i)) for i, p in planned)
        return replace(resident, kv_transient_bytes=self.device.workspace_bytes(kinds, steps))

    @cached_property
    def layer_counts(self) -> dict[str, int]:
        """Layers per route (M1): native without a body, native with one, materialised; a plan with
        a refused layer does not exist.
        """
        found = {"native_bodyless": 0, "native_mixed": 0, "materialised": 0, "refused": 0}
        for layer in self.layers:
            if any(d.route is Route.MATERIALIZE for d in layer.attend):
                found["materialised"] += 1
            else:
                bodyless = layer.storage.body is Body.NONE
                found["native_bodyless" if bodyless else "native_mixed"] += 1
        return found

    @cached_property
    def log(self) -> tuple[LogLine, ...]:
        """What was decided for every cache group, as data (T13)."""
        return plan_log(self)

    def summary(self) -> str:
        """The log as text: routes, entries, tails and bytes."""
        return log_text(self)

    def allocate(self) -> Cache:
        """Take the memory and return an empty cache."""
        from kvkernels.cache import Cache

        return Cache(self)


def plan(
    layers: Sequence[LayerSpec],
    device: Device,
    limits: Limits,
    policy: Policy | None = None,
    *,
    query_moments: Sequence[Any] | None = None,
    tail: TailRequest | str | None = None,
) -> Plan:
    """Decide for every layer at n_q in {1, verify, n_ubatch} x n_kv in {shortest, n_ctx}, and for
    its commit.

    ``query_moments``: per layer None or float [n_kv_head, D, D], the sum of q q^T over un-rotated
    queries of all query heads of a KV head; a layer with the aware encoder then stages no queries.
    ``tail``: newest rows to keep exact, a TailRequest or its text (T1); see ``plan.tails``.
    Raises RequestError for a tail that cannot be resolved, UnsupportedOp that lists every refused
    layer with every reason; nothing is allocated then.
    """
    if not layers:
        raise InputError("layers", found="none", needed="at least one LayerSpec")
    policy = policy or Policy()
    tails = resolve_tails(layers, device.table, device.caps, limits.n_ctx, limits.rollback, tail)
    group_of = {index: found for found in tails for index in found.group.layers}
    kept = [(spec, storage_of(spec, group_of[i])) for i, spec in enumerate(layers)]
    by_kind = {kind: _decide_layer(*kind, device, limits, policy) for kind in dict.fromkeys(kept)}
    moments = check_query_moments(layers, query_moments)
    refused, labels = [], []
    for kind, indices in runs(kept):
        for decision in by_kind[kind].decisions:
            if not decision.ok:
                refused.append(decision)
                labels.append(f"layers {spans(indices)}")
                break  # the corners of one layer fail alike; the first says why
    if refused:
        raise UnsupportedOp(refused, labels)
    chunk = limits.window_chunk if limits.window_chunk is not None else settings().window_chunk
    return Plan(
        device,
        limits,
        policy,
        tuple(by_kind[kind] for kind in kept),
        chunk if chunk > 0 else DEFAULT_WINDOW_CHUNK,
        moments,
        tails,
    )


def _capacity(rules: PageRules, limits: Limits) -> Pages:
    return rules.capacity(n_ctx=limits.n_ctx, n_ubatch=limits.n_ubatch, n_seq=limits.n_seq)


def _largest_buffer(spec: LayerSpec, storage: Storage, limits: Limits) -> int:
    """Bytes of a layer's largest buffer, at least what the final operation will say (F02)."""
    # Staged queries are counted also where a query moment will replace them: they are few.
    keep = storage.body is Body.RECORDS and (limits.keep_queries or spec.encoder == "aware")
    try:
        sizes = LayerSizes.of(spec, storage, keep_queries=keep)
    except InputError:
        return 0  # no layout has this shape, which every table refuses by name
    return sizes.largest(_capacity(PageRules.of(spec, storage), limits))


def _decide_layer(
    spec: LayerSpec, storage: Storage, device: Device, limits: Limits, policy: Policy
) -> LayerPlan:
    table, caps = device.table, device.caps
    # A forced attention entry says nothing about how rows are stored.
    stores = Policy(allow_unqualified=policy.allow_unqualified)
    largest = _largest_buffer(spec, storage, limits)
    facts: dict[str, Any] = {"activations": limits.activations, "max_offset": largest}
    corners = dict.fromkeys(
        attend_op(spec, caps.id, n_q, n_kv, storage, **facts)
        for n_q in sorted({1, min(limits.verify, limits.n_ubatch), limits.n_ubatch})
        for n_kv in (n_q, max(n_q, limits.n_ctx))
    )

    def store(kind: OpKind) -> Decision:
        n = limits.n_ubatch
        op = attend_op(spec, caps.id, n, n, storage, kind=kind, max_offset=largest)
        return decide(op, table, caps, stores)

    return LayerPlan(
        spec,
        storage,
        tuple(decide(op, table, caps, policy) for op in corners),
        None if storage.body is Body.NONE else store(OpKind.COMMIT),
        store(OpKind.TAIL) if storage.tail_rows else None,
    )
