"""What a device decodes of its own records, against the reference: bit for bit."""

from __future__ import annotations

import numpy as np

from kvkernels.cache import Cache
from kvkernels.calls import MaterializeCall
from kvkernels.cpu import reference
from kvkernels.dispatch import Policy, decide
from kvkernels.op import OpKind
from kvkernels.operations import attend_op
from kvkernels.records.layout import GROUP, Side
from kvkernels.storage import Body


def decoded_wrong(cache: Cache) -> tuple[str | None, bool]:
    """(entry that decodes the first layer's records, whether any row of it is wrong); no entry when
    there is nothing to decode, or none that does.
    """
    layer, device = cache.plan.layers[0], cache.device
    used = sorted(s for state in cache.state.values() for s in state.pages[0].slots())
    if layer.storage.body is not Body.RECORDS or not used:
        return None, False
    spec, slots = layer.spec, np.array(used[:2], np.int32)
    op = attend_op(spec, device.caps.id, GROUP, GROUP, kind=OpKind.MATERIALIZE)
    decision = decide(op, device.table, device.caps, Policy(allow_unqualified=True))
    if not decision.ok:
        return None, False
    shape = (spec.n_kv_head, len(slots) * GROUP, spec.head_dim)
    out = [device.upload(np.full(shape, np.nan, np.float32)) for _ in Side]
    buffers = cache.buffers[0]
    call = MaterializeCall(spec, buffers, slots, out[0], out[1], True)
    device.run(str(decision.entry), decision.op, call)
    device.synchronize()
    wrong = False
    for side, array, pool, bits in zip(
        Side, out, (buffers.k_records, buffers.v_records), (spec.k_bits, spec.v_bits), strict=True
    ):
        assert bits is not None
        records = device.download(pool).view(np.uint8).reshape(spec.n_kv_head, buffers.slots, -1)
        found = device.download(array).reshape(spec.n_kv_head, len(slots), GROUP, spec.head_dim)
        for head in range(spec.n_kv_head):
            for i, slot in enumerate(slots):
                expected = reference.decode(records[head, slot], side, bits, spec.head_dim)
                wrong |= found[head, i].tobytes() != expected.tobytes()
    return decision.entry, wrong
