"""The emulator as a driver: device memory is host memory, arrays are NumPy's."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.errors import InputError, KvkError
from kvkernels.simt.driver import Seen
from kvkernels.simt.emulator.build import (
    build,
    compiler_version,
    options,
    runtime_options,
    runtime_source,
)
from kvkernels.simt.program import Program

_ALIGN = 64
#: of threads between two rendezvous; "warps": one warp after another
ORDERS = {"ascending": 0, "descending": 1, "shuffled": 2, "warps": 3}


class EmulatorError(KvkError):
    """A kernel did what no GPU allows: barriers that not all threads reach, for example."""


class EmulatorDriver:
    """Runs kernels one block after another. ``mode``: how to build, see ``build.MODES``; ``order``
    of the threads between two rendezvous, ``seed`` of a shuffled one; ``lanes`` of a warp.
    """

    target = "host"

    def __init__(
        self, mode: str = "plain", *, order: str = "ascending", seed: int = 0, lanes: int = 32
    ) -> None:
        self.mode = mode
        self._extra = (*options(mode), compiler_version())
        flags = runtime_options(mode)
        named = "\0".join((runtime_source(), *flags, compiler_version()))
        digest = hashlib.sha256(named.encode()).hexdigest()
        path = build(runtime_source(), f"runtime-{digest[:32]}", flags)
        self._runtime = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._runtime.kvk_launch.restype = ctypes.c_char_p
        self._loaded: dict[Program, ctypes.CDLL] = {}
        self.launches = 0
        self.arrange(order, seed, lanes)

    def arrange(self, order: str, seed: int = 0, lanes: int = 32) -> None:
        """Choose the order of threads for the launches to come."""
        self._runtime.kvk_order(ORDERS[order], seed, lanes)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array full of NaN bytes: nothing may count on what fresh memory holds."""
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        raw = np.full(nbytes + _ALIGN, 0xFF, np.uint8)
        start = -raw.ctypes.data % _ALIGN
        array: NDArray[Any] = raw[start : start + nbytes].view(kind).reshape(shape)
        return array

    def zeros(self, nbytes: int) -> NDArray[np.uint8]:
        """Aligned zeros."""
        array = self.empty((nbytes,), np.uint8)
        array[...] = 0
        return array

    def upload(self, host: NDArray[Any]) -> NDArray[Any]:
        """An aligned copy."""
        array = self.empty(host.shape, host.dtype)
        array[...] = host
        return array

    def download(self, array: Any) -> NDArray[Any]:
        """The array itself: it is in host memory."""
        found: NDArray[Any] = array
        return found

    def fill(self, array: Any, host: NDArray[Any]) -> None:
        """Copy."""
        array[...] = host

    def see(self, field: str, array: Any) -> Seen:
        """NumPy arrays are this device's."""
        if not isinstance(array, np.ndarray):
            raise InputError(field, found=type(array).__name__, needed="a NumPy array")
        if not array.flags.c_contiguous:
            raise InputError(field, found="a strided array", needed="a C-contiguous array")
        return Seen(array, array.shape, array.dtype.name)

    def kernel(self, program: Program) -> ctypes.CDLL:
        """The compiled program."""
        if program not in self._loaded:
            name = program.digest("host", *self._extra)
            path = build(program.source("host"), name, options(self.mode))
            self._loaded[program] = ctypes.CDLL(str(path))
        return self._loaded[program]

    def launch(
        self, program: Program, kernel: str, grid: Sequence[int], args: Sequence[Any]
    ) -> None:
        """Run at once. Raises EmulatorError for divergent barriers and the like."""
        library = self.kernel(program)
        entry = ctypes.cast(getattr(library, f"kvk_entry_{kernel}"), ctypes.c_void_p)
        first, last = ctypes.c_void_p(), ctypes.c_void_p()
        library.kvk_shared_range(ctypes.byref(first), ctypes.byref(last))
        values = [_value(arg) for arg in args]
        params = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
        size = (ctypes.c_int * 3)(*(*grid, 1, 1)[:3])
        failure = self._runtime.kvk_launch(
            entry, params, size, program.threads(kernel), first, last
        )
        self.launches += 1
        if failure is not None:
            raise EmulatorError(f"{kernel}: {failure.decode()}")

    def synchronize(self) -> None:
        """Launches have finished when they return."""


def _value(arg: Any) -> NDArray[Any]:
    """What a kernel argument points to: a scalar, or a pointer."""
    if isinstance(arg, np.generic):
        return np.array([arg])
    return np.array([0 if arg is None else arg.ctypes.data], np.uint64)
