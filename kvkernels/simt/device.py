"""The opened device of a SIMT backend: entries by name, workspaces, memory of layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvkernels.backend import Rows
from kvkernels.calls import AttendCall, CommitCall, LayerBuffers, MaterializeCall, TailCall
from kvkernels.capabilities import Capability, DeviceCaps
from kvkernels.errors import InputError
from kvkernels.memory import LayerSizes
from kvkernels.op import AttentionOp, LayerSpec
from kvkernels.simt.attend import attend
from kvkernels.simt.commit import commit
from kvkernels.simt.commit_rows import commit_rows, commit_tail
from kvkernels.simt.driver import Driver
from kvkernels.simt.materialize import materialize
from kvkernels.simt.scratch import Scratch
from kvkernels.simt.unfit import Found, asked, first_unfit
from kvkernels.simt.windows import attend_windows
from kvkernels.simt.workspace import predicted
from kvkernels.storage import Pages, Steps, Storage, Stored

_ATTEND = {
    "attend_portable": {"prefill": False},
    "attend_prefill_portable": {"prefill": True},
    "attend_mma": {"prefill": False, "mma": True},
    "attend_prefill_mma": {"prefill": True, "mma": True},
}
_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class SimtDevice:
    """One device behind a driver. Calls from several threads take turns; work is enqueued in order
    and ``synchronize`` waits for it.
    """

    def __init__(self, caps: DeviceCaps, table: tuple[Capability, ...], driver: Driver) -> None:
        self.caps, self.table, self.driver = caps, table, driver
        self.scratch = Scratch(driver)
        self._turn = threading.Lock()

    @property
    def transient_bytes(self) -> int:
        """High water of workspace bytes since the device was opened."""
        return self.scratch.peak

    def workspace_bytes(
        self, layers: Iterable[tuple[LayerSpec, Storage, bool]], steps: Steps
    ) -> int:
        """Bytes of the workspaces that the largest steps take."""
        return predicted(layers, steps)

    def allocate(
        self, layer: LayerSpec, storage: Storage, pages: Pages, *, keep_queries: bool
    ) -> LayerBuffers:
        """Zeroed memory of one layer. Raises MemoryError when the device has no room."""
        sizes = LayerSizes.of(layer, storage, keep_queries=keep_queries)
        zeros = self.driver.zeros
        return LayerBuffers(
            k_records=zeros(pages.slots * sizes.k_slot),
            v_records=zeros(pages.slots * sizes.v_slot),
            k_exact=zeros(pages.blocks * sizes.kv_block),
            v_exact=zeros(pages.blocks * sizes.kv_block),
            q_exact=zeros(pages.blocks * sizes.q_block) if keep_queries else None,
            k_ring=zeros(pages.rings * sizes.k_ring),
            v_ring=zeros(pages.rings * sizes.v_ring),
            storage=storage,
            pages=pages,
        )

    def rows(self, field: str, array: Any) -> Rows:
        """An array on this device, C-contiguous, float32, float16 or bfloat16; never copied."""
        seen = self.driver.see(field, array)
        if seen.dtype not in _NAMES:
            raise InputError(
                field, found=f"dtype {seen.dtype}", needed="float32, float16 or bfloat16"
            )
        return Rows(seen.array, _NAMES[seen.dtype])

    def empty(self, shape: tuple[int, ...]) -> Any:
        """A float32 array for results."""
        return self.driver.empty(shape, np.float32)

    def upload(self, host: Any) -> Any:
        """A device array with the values of a NumPy one."""
        return self.driver.upload(host)

    def download(self, array: Any) -> Any:
        """A NumPy array with the values of a device one."""
        return self.driver.download(array)

    def overwrite(self, array: Any, host: Any) -> None:
        """Give a device array the values of a NumPy one of its shape and dtype."""
        self.driver.fill(array, host)

    def first_unfit(self, arrays: Sequence[Any], stored: Sequence[Stored]) -> Found:
        """(array, (row, head, channel)) of the first value that cannot be used or not be stored, or
        None. Waits for the answer.
        """
        with self._turn:
            return first_unfit(self.driver, arrays, stored)

    def defer_unfit(self, arrays: Sequence[Any], stored: Sequence[Stored]) -> Callable[[], Found]:
        """Enqueue the question of ``first_unfit``; the function waits for the answer."""
        with self._turn:
            answer = asked(self.driver, arrays, stored)

        def wait() -> Found:
            with self._turn:
                return answer()

        return wait

    def run(self, entry: str, op: AttentionOp, call: Any) -> None:
        """Enqueue an entry. It checks nothing again: ``op`` was confirmed against the table."""
        with self._turn:
            self._run(entry.partition("/")[2], call)

    def _run(self, variant: str, call: Any) -> None:
        driver, scratch = self.driver, self.scratch
        if variant in _ATTEND:
            _expect(call, AttendCall)
            attend(call, driver, scratch, **_ATTEND[variant])
        elif variant == "attend_materialized":
            _expect(call, AttendCall)
            attend_windows(call, driver, scratch)
        elif variant in ("commit", "commit_aware"):
            _expect(call, CommitCall)
            commit(driver, call, scratch)
        elif variant == "commit_rows":
            _expect(call, CommitCall)
            commit_rows(driver, call, scratch)
        elif variant == "commit_tail":
            _expect(call, TailCall)
            commit_tail(driver, call, scratch)
        elif variant == "materialize":
            _expect(call, MaterializeCall)
            materialize(driver, call)
        else:
            names = ", ".join(row.entry for row in self.table)
            raise InputError("entry", found=variant, needed=f"one of {names}")

    def synchronize(self) -> None:
        """Wait for everything that was enqueued."""
        self.driver.synchronize()


def _expect(call: Any, kind: type) -> None:
    if not isinstance(call, kind):
        raise InputError("call", found=type(call).__name__, needed=kind.__name__)
