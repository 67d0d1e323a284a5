"""The final built operations of a layer: what a decision is asked about."""

from __future__ import annotations

from typing import Any

from kvkernels.op import GROUP, AttentionOp, LayerSpec, OpKind
from kvkernels.storage import Body, Storage


def attend_op(
    spec: LayerSpec,
    device: str,
    n_q: int,
    n_kv: int,
    storage: Storage | None = None,
    **facts: Any,
) -> AttentionOp:
    """The attention of ``n_q`` new rows when ``n_kv`` rows are visible to the last,
    new ones included. ``storage``: what the layer really keeps; None: what it asks for.
    """
    stored = storage or Storage.plain(spec)
    past = n_kv - n_q
    records = stored.body is Body.RECORDS
    # A cache gives the aware encoder the queries of the rows, or the plan's moment of them.
    weighs = records and spec.encoder == "aware" and facts.get("kind") == OpKind.COMMIT
    sinks = spec.sink_tokens if records else 0
    body = past // GROUP * GROUP > sinks if records else past > 0 and stored.body is Body.TILES
    given: dict[str, Any] = {
        "n_q": n_q,
        "n_kv": n_kv,
        "k_type": stored.k,
        "v_type": stored.v,
        "body": body,
        "stage": records and past > 0,
        "tail": stored.tail_rows > 0 and past > 0,
        "tail_rows": stored.tail_rows,
        "tail_dtype": stored.tail_dtype,
        "bodyless": stored.body is Body.NONE,
        "current": True,
        "sink_rows": min(sinks, past),
        "queries": "rows" if weighs else "none",
        "encoder": spec.encoder if records else "published",
    }
    return AttentionOp.for_layer(spec, device, **(given | facts))
