"""Run in a process that preloads a sanitizer: parity cases on kernels built with it.

``python sanitized.py MODE FAULT CASE...``: FAULT is ``none``, ``<source>:<line>`` of a barrier to
leave out, or one of ``FAULTS``.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from mutants import source, without_line

from kvkernels.simt import program
from kvkernels.simt.emulator.backend import EmulatorBackend
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.testing import parity
from kvkernels.testing.cases import by_id
from kvkernels.testing.poison import Guards

_LIBC = ctypes.CDLL(None)
_LIBC.memalign.restype = ctypes.c_void_p
_LIBC.memalign.argtypes = ctypes.c_size_t, ctypes.c_size_t
_LIBC.free.argtypes = (ctypes.c_void_p,)


def exact(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of poison that ends where its allocation does, with red zones around."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    at = _LIBC.memalign(64, max(nbytes, 1))
    memory = (ctypes.c_uint8 * nbytes).from_address(at)
    weakref.finalize(memory, _LIBC.free, at)
    raw = np.frombuffer(memory, np.uint8)
    raw[...] = 0xFF
    return raw.view(kind).reshape(shape)


#: (source, what it says, what it says with the fault)
FAULTS = {
    "reads-beyond": ("queries", "load_as(q, at + d,", "load_as(q, at + d + 8,"),
    "writes-beyond": ("merge", "out[out_row * DIM_V + d]", "out[out_row * DIM_V + d + 8]"),
    "shared-too-small": ("attend", "sums[ROWS * SECTIONS]", "sums[ROWS * SECTIONS - 1]"),
}


def faulty(fault: str) -> tuple[str, str]:
    """Source and text of a planted fault."""
    if fault not in FAULTS:
        name, _, line = fault.partition(":")
        return name, without_line(name, int(line))
    name, right, wrong = FAULTS[fault]
    text = program.part(f"{name}.inc")
    assert text.count(right) == 1
    return name, text.replace(right, wrong)


def main(mode: str, fault: str, *case_ids: str) -> None:
    Guards.empty = lambda _, name, shape, dtype: exact(shape, dtype)  # type: ignore[method-assign]
    Guards.broken = lambda _: []  # type: ignore[method-assign]
    EmulatorDriver.empty = lambda _, shape, dtype: exact(shape, dtype)  # type: ignore[method-assign]
    with ExitStack() as stack:
        if fault != "none":
            stack.enter_context(source(*faulty(fault)))
        device = EmulatorBackend().open("simt:0", mode=mode)
        for case_id in case_ids:
            for result in parity.run_all(device, by_id(case_id)):
                assert result.passed or fault != "none", result
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
