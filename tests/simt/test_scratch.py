"""Device workspaces: what is held, what was, and lists that layers share."""

from __future__ import annotations

import numpy as np

from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.simt.scratch import Scratch


def test_workspaces_grow_and_the_peak_stays(driver: EmulatorDriver) -> None:
    scratch = Scratch(driver)
    first = scratch.get("a", (2, 8), np.float32)
    assert first.nbytes == 64
    assert scratch.get("a", (4,), np.uint8) is first
    assert scratch.get("a", (5, 4), np.float64) is not first
    scratch.get("b", (10,), np.uint16)
    assert (scratch.held, scratch.peak) == (180, 180)
    scratch.fill(7)
    assert (scratch.get("b", (1,), np.uint16) == 7).all()
    scratch.clear()
    assert (scratch.held, scratch.peak) == (0, 180)


def test_constants_are_uploaded_once(driver: EmulatorDriver) -> None:
    scratch = Scratch(driver)
    host = np.arange(6, dtype=np.int32)
    one = scratch.constant(host)
    assert scratch.constant(host.copy()) is one
    assert scratch.constant(host.reshape(2, 3)) is not one
    assert scratch.constant(host.astype(np.int64)) is not one
    host[0] = 9
    assert scratch.constant(host) is not one
    assert one[0] == 0


def test_old_constants_go_first(driver: EmulatorDriver) -> None:
    scratch = Scratch(driver)
    kept, gone = (scratch.constant(np.full(3, -i, np.int32)) for i in (1, 2))
    for i in range(100):
        scratch.constant(np.full(3, i, np.int32))
        assert scratch.constant(np.full(3, -1, np.int32)) is kept
    assert scratch.constant(np.full(3, -2, np.int32)) is not gone
