"""Windows of records as rows (W1-W3): several merge into one result, and transient bytes depend on
the window and on query rows, never on both together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvkernels as kvk
from kvkernels.dispatch import Policy
from kvkernels.registry import open_device
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.testing.compare import compare
from kvkernels.testing.model import RowsModel

SPEC = kvk.LayerSpec(n_head=4, n_kv_head=2, head_dim=64, sink_tokens=0, encoder="published")
POLICY = Policy(entry="simt/attend_materialized")


def run(past: int, n_q: int, chunk: int, seed: int = 3) -> tuple[Any, Any, int]:
    """(result, float64 model of it, transient bytes) of ``n_q`` rows over ``past`` cached ones."""
    device = open_device("simt:0")
    limits = kvk.Limits(n_ctx=past + n_q, n_ubatch=max(past, n_q), window_chunk=chunk)
    plan = kvk.plan([SPEC], device, limits, POLICY)
    cache, model = plan.allocate(), RowsModel(SPEC)
    rng = np.random.default_rng(seed)

    def rows(n: int) -> list[Any]:
        return [rng.standard_normal((n, h, 64), np.float32) for h in (4, 2, 2)]

    q, k, v = rows(past)
    with cache.step({0: past}) as step:
        step.attend(0, q, k, v)
    model.append(k, v, q)
    device.scratch.clear()
    device.scratch.peak = 0
    q, k, v = rows(n_q)
    step = cache.step({0: n_q})
    out = step.attend(0, q, k, v)
    step.discard()
    return out, model.attend(q, k, v), device.scratch.peak


@pytest.mark.parametrize("chunk", [128, 256, 300, 640, 65536])
def test_W2_any_window_gives_the_same_but_for_the_order_of_additions(
    driver: EmulatorDriver, chunk: int
) -> None:
    out, expected, _ = run(5 * 128 + 40, 20, chunk)
    error = compare(out, expected, (1e-5, 1e-4))
    assert error.ok, error


def test_W1_a_window_below_a_group_is_one_group(driver: EmulatorDriver) -> None:
    assert run(300, 3, 1)[0].tobytes() == run(300, 3, 128)[0].tobytes()


def test_W3_transient_bytes_do_not_grow_with_rows_times_keys(driver: EmulatorDriver) -> None:
    short, long = (run(n * 128 + 1, 20, 128)[2] for n in (3, 9))
    assert long == short
    more = run(3 * 128 + 1, 40, 128)[2]
    assert more < 2 * short


def test_W1_a_smaller_window_takes_fewer_transient_bytes(driver: EmulatorDriver) -> None:
    assert run(9 * 128, 8, 128)[2] < run(9 * 128, 8, 1024)[2]
