"""Records back to rows on the emulator, bit for bit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from simt_tools import buffers, record_of, spec

from kvkernels.calls import MaterializeCall
from kvkernels.cpu import reference
from kvkernels.records.layout import BITS, HEAD_DIMS, HeadLayout, Side
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.simt.materialize import materialize
from kvkernels.storage import Pages
from kvkernels.testing.poison import Guards


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("rotated", [True, False])
def test_slots_as_rows(driver: EmulatorDriver, dim: int, rotated: bool) -> None:
    rng = np.random.default_rng(dim)
    for bits, other in zip(BITS, reversed(BITS), strict=True):
        layer = spec(f"kvarn{bits}", f"kvarn{other}", head_dim=dim, n_kv_head=2)
        guards = Guards()
        held = buffers(guards, layer, Pages(4, 0, 0))
        for pool, side, b in ((held.k_records, Side.K, bits), (held.v_records, Side.V, other)):
            layout = HeadLayout(side, b, dim)
            records = pool.reshape(-1, layout.record.nbytes)
            records[...] = rng.integers(0, 256, records.shape)
            axes = records[:, layout.record.scale_offset :].view(np.float16)
            axes[...] = rng.standard_normal(axes.shape)
        outs = [guards.empty(n, (2, 3 * 128, dim), np.float32) for n in ("k_out", "v_out")]
        slots = np.array([3, 0, 3])
        materialize(driver, MaterializeCall(layer, held, slots, *outs, rotated))
        for (side, b, out), head in product(
            ((Side.K, bits, outs[0]), (Side.V, other, outs[1])), range(2)
        ):
            for i, slot in enumerate(slots):
                want = reference.decode(record_of(held, layer, side, head, slot), side, b, dim)
                want = want if rotated else reference.rotate(want)
                assert_array_equal(out[head, 128 * i : 128 * i + 128], want)
        assert not guards.broken()


def test_no_slots(driver: EmulatorDriver) -> None:
    layer, guards = spec(), Guards()
    held = buffers(guards, layer)
    none = np.zeros((1, 0, 64), np.float32)
    materialize(driver, MaterializeCall(layer, held, np.zeros(0, np.int64), none, none, True))
    assert driver.launches == 0
