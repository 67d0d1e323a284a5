"""The opened CPU: owns threads and workspaces, and runs entries by name."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from kvkernels.backend import Rows
from kvkernels.calls import AttendCall, CommitCall, LayerBuffers, MaterializeCall, TailCall
from kvkernels.capabilities import Capability, DeviceCaps
from kvkernels.cpu.attend import attend_records
from kvkernels.cpu.commit import commit, materialize
from kvkernels.cpu.commit_rows import commit_rows, commit_tail
from kvkernels.cpu.entries import compiled
from kvkernels.cpu.pool import ThreadPool, available_threads
from kvkernels.cpu.scratch import Scratch, aligned
from kvkernels.cpu.table import TABLE
from kvkernels.cpu.window import attend_window
from kvkernels.cpu.workspace import predicted
from kvkernels.errors import InputError
from kvkernels.memory import LayerSizes
from kvkernels.op import AttentionOp, LayerSpec
from kvkernels.storage import Pages, Steps, Storage, Stored

_DTYPES = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}
_HALF_MAX = 65504.0
_HALF_OVERFLOW = 65520.0  # rounds to infinity in fp16
_INFINITY_BITS = 0x7F800000
_NONE = np.zeros(0, np.float32)

_devices: WeakSet[CpuDevice] = WeakSet()


def _after_fork() -> None:
    for device in _devices:
        device.renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class CpuDevice:
    """``cpu:0``. Calls from several threads take turns; each uses ``n_threads`` threads itself."""

    table: tuple[Capability, ...] = TABLE

    def __init__(self, caps: DeviceCaps, n_threads: int | None = None) -> None:
        self.caps = caps
        self.isa = str(caps.facts["isa"])
        self.pool = ThreadPool(n_threads or available_threads())
        self.scratch = Scratch()
        self._largest_bits = compiled(self.isa, "rotate.largest_bits")
        self._turn = threading.Lock()
        _devices.add(self)

    @property
    def transient_bytes(self) -> int:
        """High water of workspace bytes since the device was opened."""
        return self.scratch.peak

    def workspace_bytes(
        self, layers: Iterable[tuple[LayerSpec, Storage, bool]], steps: Steps
    ) -> int:
        """Bytes of the workspaces that the largest steps take, natively attended."""
        return predicted(layers, steps)

    def allocate(
        self, layer: LayerSpec, storage: Storage, pages: Pages, *, keep_queries: bool
    ) -> LayerBuffers:
        """Zeroed memory of one layer, 64-byte aligned."""
        sizes = LayerSizes.of(layer, storage, keep_queries=keep_queries)

        def words(count: int, nbytes: int) -> Any:
            return aligned(count * nbytes).view(np.uint16)

        return LayerBuffers(
            k_records=aligned(pages.slots * sizes.k_slot),
            v_records=aligned(pages.slots * sizes.v_slot),
            k_exact=words(pages.blocks, sizes.kv_block),
            v_exact=words(pages.blocks, sizes.kv_block),
            q_exact=words(pages.blocks, sizes.q_block) if keep_queries else None,
            k_ring=words(pages.rings, sizes.k_ring),
            v_ring=words(pages.rings, sizes.v_ring),
            storage=storage,
            pages=pages,
        )

    def rows(self, field: str, array: Any) -> Rows:
        """Any host array (NumPy, or DLPack on the CPU) as float32, with its own dtype's name."""
        if not isinstance(array, np.ndarray):
            array = _from_dlpack(field, array)
        kind = _DTYPES.get(array.dtype)
        if kind is None and array.dtype.name == "bfloat16":  # of ml_dtypes, which we do not need
            kind = "bf16"
        if kind is None:
            raise InputError(
                field, found=f"dtype {array.dtype}", needed="float32, float16 or bfloat16"
            )
        return Rows(np.ascontiguousarray(array, np.float32), kind)

    def empty(self, shape: tuple[int, ...]) -> Any:
        """A float32 array for results."""
        return np.empty(shape, np.float32)

    def upload(self, host: Any) -> Any:
        """The array itself: it is where it should be."""
        return host

    def download(self, array: Any) -> Any:
        """The array itself."""
        return array

    def overwrite(self, array: Any, host: Any) -> None:
        """Copy, unless both are the same."""
        if array is not host:
            array[...] = host

    def first_unfit(
        self, arrays: Sequence[Any], stored: Sequence[Stored]
    ) -> tuple[int, tuple[int, ...]] | None:
        """(array, (row, head, channel)) of the first value that is NaN or infinite, or that leaves
        the fp16 range in a form in which it is ``stored``; None when all can be used.
        """
        first, second, third = (*(a.reshape(-1) for a in arrays), _NONE, _NONE)[:3]
        top = self._largest_bits(first, second, third)
        # |rotated| <= sqrt(D) * max|x|: below that nothing can overflow, and that is nearly always.
        if top < _INFINITY_BITS:
            widest = max(a.shape[-1] for a in arrays)
            if float(np.uint32(top).view(np.float32)) * widest**0.5 < _HALF_MAX:
                return None
        for i, (rows, kept) in enumerate(zip(arrays, stored, strict=True)):
            bad = self._unfit(rows, kept)
            if bad is not None:
                return i, bad
        return None

    def _unfit(self, rows: Any, stored: Stored) -> tuple[int, ...] | None:
        bad = ~np.isfinite(rows)
        if not bad.any() and stored & Stored.PLAIN:
            bad = np.abs(rows) >= _HALF_OVERFLOW
        if not bad.any() and stored & Stored.ROTATED:
            half = np.empty((rows.size // rows.shape[-1], rows.shape[-1]), np.uint16)
            compiled(self.isa, "rotate.rotate_rows_to_half")(rows.reshape(half.shape), half)
            over = ((half & 0x7C00) == 0x7C00).reshape(rows.shape)
            # Rotation spreads a value over all channels: the largest is what made them overflow.
            size = np.abs(rows)
            bad = over.any(-1, keepdims=True) & (size == size.max(-1, keepdims=True))
        if not bad.any():
            return None
        return tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), rows.shape))

    def run(self, entry: str, op: AttentionOp, call: Any) -> None:
        """Run an entry. The entry checks nothing again: ``op`` was confirmed against the table."""
        with self._turn:
            self._run(entry, call)

    def renew_lock(self) -> None:
        """A forked child has only the forking thread: whoever held the lock is gone."""
        self._turn = threading.Lock()

    def _run(self, entry: str, call: Any) -> None:
        if entry in ("cpu/attend_decode", "cpu/attend_prefill"):
            _expect(call, AttendCall)
            blocks = entry == "cpu/attend_prefill"
            attend_records(call, self.scratch, self.pool, self.isa, blocks=blocks)
        elif entry == "cpu/attend_materialized":
            _expect(call, AttendCall)
            attend_window(call, self.scratch, self.isa)
        elif entry in ("cpu/commit", "cpu/commit_aware"):
            _expect(call, CommitCall)
            commit(call, self.scratch, self.pool, self.isa)
        elif entry == "cpu/commit_rows":
            _expect(call, CommitCall)
            commit_rows(call, self.pool, self.isa)
        elif entry == "cpu/commit_tail":
            _expect(call, TailCall)
            commit_tail(call, self.isa)
        elif entry == "cpu/materialize":
            _expect(call, MaterializeCall)
            materialize(call, self.isa)
        else:
            names = ", ".join(row.entry for row in TABLE)
            raise InputError("entry", found=entry, needed=f"one of {names}")

    def synchronize(self) -> None:
        """Nothing to wait for: ``run`` returns when the work is done."""


def _expect(call: Any, kind: type) -> None:
    if not isinstance(call, kind):
        raise InputError("call", found=type(call).__name__, needed=kind.__name__)


def _from_dlpack(field: str, array: Any) -> Any:
    if not hasattr(array, "__dlpack__"):
        raise InputError(
            field, found=type(array).__name__, needed="a NumPy array or a DLPack array on the CPU"
        )
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        where = getattr(array, "device", "unknown device")
        raise InputError(
            field,
            found=f"{type(array).__name__} on {where} ({error})",
            needed="an array in host memory that NumPy can read",
            hint="Move it to the CPU, and detach it from autograd",
        ) from None
