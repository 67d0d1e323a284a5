"""Attention of parity cases, recorded once and replayed: on other drivers, orders, sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kvkernels.calls import AttendCall, Batch
from kvkernels.registry import open_device
from kvkernels.simt.attend import attend
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.simt.scratch import Scratch
from kvkernels.testing import parity
from kvkernels.testing.cases import by_id


class Recorder:
    """A device that keeps the attention calls it runs."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.calls: list[tuple[str, AttendCall]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, entry: str, op: Any, call: Any) -> None:
        if isinstance(call, AttendCall):
            self.calls.append((entry, call))
        self._device.run(entry, op, call)


@cache
def recorded(case_id: str) -> tuple[AttendCall, bool]:
    """The case's attention over a filled cache, NaN wherever nothing is, and whether it is a
    prefill. What it gives was compared with the float64 model.
    """
    device: Any = Recorder(open_device("simt:0"))
    result = parity.run_case(device, by_id(case_id))
    assert result.passed, result
    entry, call = device.calls[-1]
    return call, "prefill" in entry


def again(call: AttendCall, views: Any = None) -> AttendCall:
    """The same call with nothing prepared and results still to be written."""
    shape = call.out.shape
    return dataclasses.replace(
        call,
        batch=Batch(call.batch.views if views is None else tuple(views), call.batch.n_rows),
        out=np.full(shape, np.nan, np.float32),
        lse=np.full(shape[:2], np.nan, np.float32),
    )


def run(
    driver: EmulatorDriver, call: AttendCall, *, prefill: bool, mma: bool = False
) -> tuple[Any, Any]:
    """(out, lse) of a call on a driver."""
    attend(call, driver, Scratch(driver), prefill=prefill, mma=mma)
    return call.out, call.lse


def replay(*case_ids: str, mma: bool = False) -> Callable[[EmulatorDriver], bytes]:
    """A run of the recorded attention of cases: bytes of every result."""
    found = [recorded(case_id) for case_id in case_ids]

    def result(driver: EmulatorDriver) -> bytes:
        parts = [run(driver, again(call), prefill=prefill, mma=mma) for call, prefill in found]
        return b"".join(array.tobytes() for part in parts for array in part)

    return result
