"""The level below the cache, for engines that own their memory: records in, attention out.

``encode`` makes records, ``attend`` reads them through group tables that the engine keeps;
``AttendPlan`` does the host work once per step and ``run`` once per layer. ``lse`` and
``merge_states`` join a result with attention that the engine computes itself over rows it keeps
exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.arguments import (
    Given,
    by_sequence,
    check_bias,
    check_query_moment,
    check_rows,
    check_sink_logits,
    group_view,
)
from kvkernels.backend import Device
from kvkernels.calls import (
    DECODE_ROWS,
    AttendCall,
    Batch,
    CommitCall,
    GroupWrite,
    LayerBuffers,
    MaterializeCall,
    SeqView,
)
from kvkernels.dispatch import Policy, decide
from kvkernels.errors import InputError, UnsupportedOp
from kvkernels.op import AttentionOp, LayerSpec, OpKind
from kvkernels.operations import attend_op
from kvkernels.records.layout import GROUP, LINE, Side
from kvkernels.records.sealed import Records, head_layout
from kvkernels.registry import open_device
from kvkernels.settings import settings
from kvkernels.storage import Pages, Storage, Stored

_NONE = np.empty(0, np.uint16)


@lru_cache(maxsize=8)
def _opened(device: str) -> Device:
    return open_device(device)


def _device(device: Device | str) -> Device:
    return _opened(device) if isinstance(device, str) else device


def _buffers(spec: LayerSpec, k: Any, v: Any, none: Any = _NONE) -> LayerBuffers:
    """``none``: an empty array of the device, in place of what records alone do not have."""
    pages = Pages(k.shape[1], 0, 0)
    return LayerBuffers(
        k.reshape(-1), v.reshape(-1), none, none, None, Storage.plain(spec), pages, none, none
    )


def _decided(device: Device, op: AttentionOp, policy: Policy | None = None) -> str:
    decision = decide(op, device.table, device.caps, policy)
    if not decision.ok:
        raise UnsupportedOp([decision])
    return str(decision.entry)


def encode(
    k: Any,
    v: Any,
    spec: LayerSpec,
    *,
    q: Any = None,
    query_moment: Any = None,
    first_group: int = 0,
    device: Device | str = "cpu:0",
    policy: Policy | None = None,
) -> Records:
    """Seal whole groups: k, v [n * 128, n_kv_head, D] (un-rotated, RoPE applied) -> line records.

    The aware encoder, the default of ``LayerSpec``, needs the queries of the same rows, ``q``
    [n * 128, n_head, D], or ``query_moment`` [n_kv_head, D, D], the sum of q q^T over un-rotated
    queries, and refuses without; the published one ignores them. ``first_group``: the place of the
    first group in its sequence; keys of group 0, with the sink token, are never clipped. Raises
    InputError (shape, dtype), NonFiniteError, UnsupportedOp with every reason.

    k, v and q are arrays of ``device``. The records come back in host memory, to be kept or sent;
    ``records.on(device)`` puts them where attention reads them.
    """
    device = _device(device)
    n = int(getattr(k, "shape", (0,))[0])
    if n == 0 or n % GROUP:
        raise InputError("k", found=f"{n} rows", needed=f"a multiple of {GROUP}, one at least")
    source = "none"
    if spec.encoder == "aware" and (q is not None or query_moment is not None):
        source = "moment" if q is None else "rows"
    op = attend_op(spec, device.caps.id, n, n, kind=OpKind.COMMIT, queries=source)
    entry = _decided(device, op, policy)
    shape = (n, spec.n_kv_head, spec.head_dim)
    given_rows = [Given(n, x, shape, Stored.ROTATED) for n, x in (("k", k), ("v", v))]
    if source == "rows":
        given_rows.append(Given("q", q, (n, spec.n_head, spec.head_dim), Stored.ROTATED))
    rows_k, rows_v, *rest = check_rows(device, given_rows)
    rows_q = rest[0].array if rest else None
    each = range(n // GROUP)
    sizes = [head_layout(spec, side).nbytes for side in Side]
    pools = [device.upload(np.zeros((spec.n_kv_head, len(each), size), np.uint8)) for size in sizes]
    writes = tuple(GroupWrite(first_group + g, g * GROUP, 0, GROUP, -1, -1, g) for g in each)
    buffers = _buffers(spec, pools[0], pools[1], device.upload(_NONE))
    if source == "moment":
        given = check_query_moment("query_moment", spec, query_moment)
        buffers = replace(buffers, query_moment=given)
    call = CommitCall(spec, buffers, writes, rows_k.array, rows_v.array, rows_q)
    device.run(entry, op, call)
    device.synchronize()
    return Records(spec, device.download(pools[0]), device.download(pools[1]))


def decode(
    records: Records,
    *,
    rotated: bool = False,
    device: Device | str = "cpu:0",
    policy: Policy | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """K and V float32 [n_groups * 128, n_kv_head, D] as the records hold them,
    un-rotated unless asked. Records of the host are copied to ``device`` first; the rows come back
    in host memory.
    """
    device, spec = _device(device), records.spec
    records = records.to_layout(LINE).on(device)
    n = records.n_groups * GROUP
    op = attend_op(spec, device.caps.id, n, n, kind=OpKind.MATERIALIZE)
    entry = _decided(device, op, policy)
    out = [device.empty((spec.n_kv_head, n, spec.head_dim)) for _ in Side]
    slots = np.arange(records.n_groups, dtype=np.int32)
    buffers = _buffers(spec, records.k, records.v, device.upload(_NONE))
    device.run(entry, op, MaterializeCall(spec, buffers, slots, out[0], out[1], rotated))
    device.synchronize()
    k, v = (device.download(array) for array in out)
    return k.transpose(1, 0, 2), v.transpose(1, 0, 2)


class AttendPlan:
    """Attention of several sequences over pooled records: planned once per step, run once per
    layer.

    group_tables: per sequence, the pool slots of its groups in order (group g holds tokens 128 g ..
    128 g + 127); n_q: per sequence, its query rows, the first of which sits at position 128 *
    groups. Layers that share tables and geometry share the plan. Raises InputError, UnsupportedOp
    with every reason.
    """

    def __init__(
        self,
        spec: LayerSpec,
        group_tables: Sequence[Any],
        n_q: Sequence[int],
        *,
        current: bool = True,
        activations: str = "auto",
        device: Device | str = "cpu:0",
        policy: Policy | None = None,
    ) -> None:
        self.device, self.spec, self.current = _device(device), spec, current
        # Devices with memory of their own make a copy of what they are given.
        self._none = self.device.upload(_NONE)
        self._memory = None if self._none is _NONE else self.device.caps.id
        self.activations = activations
        self.policy = policy
        if not group_tables or len(group_tables) != len(n_q):
            raise InputError(
                "n_q",
                found=f"{len(n_q)} counts for {len(group_tables)} tables",
                needed="one each, at least one",
            )
        small: list[SeqView] = []
        large: list[SeqView] = []
        at, self.max_slot = 0, -1
        for seq, (table, rows) in enumerate(zip(group_tables, n_q, strict=True)):
            view = group_view(spec, seq, table, rows, at)
            (small if rows <= DECODE_ROWS else large).append(view)
            self.max_slot = max(self.max_slot, int(view.table.max(initial=-1)))
            at += rows
        self.n_rows = at
        self.batches = [Batch(tuple(views), at) for views in (small, large) if views]
        self.ops = [self._op(batch, "f32", "f32", "none", 0) for batch in self.batches]
        for op in self.ops:
            _decided(self.device, op, policy)

    def _op(self, batch: Batch, q: str, kv: str, bias: str, stride: int) -> AttentionOp:
        views = batch.views
        return attend_op(
            self.spec,
            self.device.caps.id,
            max(v.n_q for v in views),
            max(v.n_past + v.n_q for v in views),
            n_seq=len(views),
            body=any(len(v.table) for v in views),
            stage=False,
            current=self.current,
            sink_rows=0,
            q_dtype=q,
            kv_dtype=kv,
            bias=bias,
            bias_stride=stride,
            activations=self.activations,
        )

    def run(
        self,
        q: Any,
        records: Records,
        k: Any = None,
        v: Any = None,
        *,
        mask: Any = None,
        sink_logits: Any = None,
        out: Any = None,
        lse: Any = None,
    ) -> tuple[Any, Any]:
        """(out float32 [n_rows, n_head, D], lse float32 [n_rows, n_head]) of one layer.

        q [n_rows, n_head, D]; k, v [n_rows, n_kv_head, D] are the queries' own rows (given when the
        plan has ``current``), seen causally after the records. All un-rotated.
        """
        device, spec = self.device, self.spec
        if records.device != self._memory:
            raise InputError(
                "records",
                found=f"records {'in host memory' if records.device is None else records.device}",
                needed=f"records on {device.caps.id}",
                hint="Use records.on(plan.device), once; a run copies no records",
            )
        if records.layout != LINE:
            raise InputError(
                "records.layout", found=records.layout, needed=LINE, hint="Use to_layout('line')"
            )
        if replace(records.spec, **_SAME) != replace(spec, **_SAME):
            raise InputError("records.spec", found=records.spec, needed=spec)
        if self.max_slot >= records.n_groups:
            raise InputError(
                "group_tables", found=f"slot {self.max_slot}", needed=f"below {records.n_groups}"
            )
        if (k is not None, v is not None) != (self.current, self.current):
            raise InputError(
                "k, v",
                found="given" if k is not None else "missing",
                needed=f"current={self.current}",
            )
        given = [Given("q", q, (self.n_rows, spec.n_head, spec.head_dim))]
        if self.current:
            shape = (self.n_rows, spec.n_kv_head, spec.head_dim)
            given += [Given("k", k, shape), Given("v", v, shape)]
        rows_q, *rest = check_rows(device, given)
        rows_k, rows_v = rest or (None, None)
        sinks = check_sink_logits(spec, sink_logits)
        result = device.empty((self.n_rows, spec.n_head, spec.head_dim)) if out is None else out
        logs = device.empty((self.n_rows, spec.n_head)) if lse is None else lse
        seqs = sorted(view.seq for batch in self.batches for view in batch.views)
        masks = by_sequence(mask, seqs)
        launches = []
        for batch in self.batches:
            bias = check_bias(spec, batch.views, masks, current=self.current)
            kv_dtype = rows_k.dtype if rows_k else "f32"
            op = self._op(batch, rows_q.dtype, kv_dtype, bias.kind, bias.stride)
            launches.append((_decided(device, op, self.policy), op, batch, bias))
        for entry, op, batch, bias in launches:
            call = AttendCall(
                layer=spec,
                buffers=_buffers(spec, records.k, records.v, self._none),
                batch=batch,
                q=rows_q.array,
                k=rows_k.array if rows_k else None,
                v=rows_v.array if rows_v else None,
                out=result,
                lse=logs,
                masks=bias.masks,
                sink_logits=sinks,
                window_chunk=settings().window_chunk,
                activations=self.activations,
            )
            device.run(entry, op, call)
        device.synchronize()
        return result, logs


# Fields that say how a cache treats rows, not what a record holds.
_SAME: dict[str, Any] = {
    "n_head": 1, "n_kv_head": 1, "window": None, "sink_tokens": 0, "scale": 1.0, "softcap": 0.0,
    "alibi": 0.0, "sink_logits": False, "encoder": "published",
}  # fmt: skip


def attend(
    q: Any,
    records: Records,
    group_table: Any = None,
    *,
    k: Any = None,
    v: Any = None,
    mask: Any = None,
    sink_logits: Any = None,
    activations: str = "auto",
    device: Device | str = "cpu:0",
    policy: Policy | None = None,
) -> tuple[Any, Any]:
    """One sequence, planned and run at once: (out [n_q, n_head, D], lse [n_q, n_head]), float32.

    ``group_table`` defaults to all groups of ``records`` in order. See :class:`AttendPlan`.
    """
    table = np.arange(records.n_groups) if group_table is None else group_table
    n_q = int(getattr(q, "shape", (0,))[0])
    plan = AttendPlan(
        records.spec,
        [table],
        [n_q],
        current=k is not None,
        activations=activations,
        device=device,
        policy=policy,
    )
    return plan.run(q, records, k, v, mask=mask, sink_logits=sink_logits)
