"""From a tail request to what every layer keeps (semantics T1-T9), decided from plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvkernels.capabilities import Capability, DeviceCaps
from kvkernels.dispatch import Policy, Route, decide
from kvkernels.errors import RequestError
from kvkernels.op import LayerSpec, OpKind
from kvkernels.operations import attend_op
from kvkernels.request import (
    CacheGroup,
    Representation,
    ResolvedTail,
    TailMode,
    TailOp,
    TailRequest,
    TailRoute,
    cache_groups,
    resolve,
)
from kvkernels.storage import EXACT_TYPES, Body, Storage


def tail_request(
    layers: Sequence[LayerSpec], groups: Sequence[CacheGroup], tail: TailRequest | str | None
) -> TailRequest:
    """What ``plan(tail=..)`` says, or else what the layers say themselves.

    Raises RequestError when both do, or when layers of one group disagree.
    """
    own = [i for i, layer in enumerate(layers) if layer.tail or layer.tail_dtype]
    if tail is not None:
        if own:
            raise RequestError(
                "tail",
                found=f"{tail!r} besides the tail of layer {own[0]}",
                needed="one of the two: tail= for all groups, or LayerSpec(tail=..)",
            )
        return tail if isinstance(tail, TailRequest) else TailRequest.parse(tail)
    if not own:
        return TailRequest()
    dtypes = {layers[i].tail_dtype for i in own}
    if len(dtypes) > 1:
        found = ", ".join(sorted(map(str, dtypes)))
        raise RequestError("tail_dtype", found=found, needed="one for all layers with a tail")
    counts = {}
    for group in groups:
        # A layer that keeps exact rows anyway has nothing to say unless it asks.
        asks = [layers[i] for i in group.layers if layers[i].tail or not _exact(layers[i])]
        asked = {layer.tail for layer in asks} or {0}
        if len(asked) > 1:
            raise RequestError(
                "tail",
                found=f"{', '.join(map(str, sorted(asked)))} rows in layers of {group.id}",
                needed="one number for layers that share window and kind of cache type",
            )
        counts[group.id] = asked.pop()
    names = tuple(sorted(counts))
    return TailRequest(TailMode.NAMED, tuple(counts[n] for n in names), names, dtypes.pop())


def resolve_tails(
    layers: Sequence[LayerSpec],
    table: Sequence[Capability],
    caps: DeviceCaps,
    n_ctx: int,
    rollback: int,
    tail: TailRequest | str | None,
) -> tuple[ResolvedTail, ...]:
    """The request resolved for every cache group, by what the table says of the device."""
    groups = cache_groups(layers, n_ctx)

    def route(group: CacheGroup, dtype: str) -> TailRoute:
        return _route(dict.fromkeys(layers[i] for i in group.layers), table, caps, dtype)

    return resolve(tail_request(layers, groups, tail), groups, n_ctx, route, rollback=rollback)


def _route(
    specs: Iterable[LayerSpec], table: Sequence[Capability], caps: DeviceCaps, dtype: str
) -> TailRoute:
    """Whether the device attends natively over a body with a ring of ``dtype``, and writes it."""
    missing: list[str] = []
    types: list[str] = []
    for spec in specs:
        types.append(f"{spec.k}/{spec.v}")
        plain = attend_op(spec, caps.id, 1, 300)
        if not decide(plain, table, caps, Policy(allow_unqualified=True)).ok:
            continue  # refused with or without a tail, and the plan says why
        storage = replace(Storage.plain(spec), tail_rows=1, reserve=1, tail_dtype=dtype)
        write = attend_op(spec, caps.id, 1, 2, storage, kind=OpKind.TAIL)
        attend = attend_op(spec, caps.id, 1, 300, storage)
        if not decide(write, table, caps, Policy(allow_unqualified=True)).ok:
            missing.append(str(TailOp.WRITE))
        decision = decide(attend, table, caps, Policy(allow_unqualified=True))
        if decision.route is not Route.NATIVE:
            missing.append(str(TailOp.NATIVE))
    native = any(row.kind is OpKind.TAIL for row in table)
    where = f"{caps.id}, {', '.join(dict.fromkeys(types))}"
    return TailRoute(native=native, missing=tuple(dict.fromkeys(missing)), where=where)


def storage_of(spec: LayerSpec, tail: ResolvedTail) -> Storage:
    """What a layer keeps under the resolved tail of its group."""
    plain = Storage.plain(spec)
    if tail.representation in (Representation.NONE, Representation.STAGE) or tail.dtype is None:
        return plain
    k, v = (t if t in EXACT_TYPES else tail.dtype for t in (plain.k, plain.v))
    covered = tail.representation is Representation.NATIVE_EXACT
    if covered and spec.window is None:
        return Storage(body=Body.TILES, k=k, v=v)  # a plain exact cache (T9)
    if _exact(spec) and not covered:
        return plain  # the body is as exact as a tail would be
    if covered:
        plain = Storage(body=Body.NONE, k=k, v=v)
    return replace(plain, tail_rows=tail.effective, reserve=tail.rollback, tail_dtype=tail.dtype)


def _exact(spec: LayerSpec) -> bool:
    return spec.k in EXACT_TYPES and spec.v in EXACT_TYPES
