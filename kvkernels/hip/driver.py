"""HIP as a driver, by ctypes: no Python package of ROCm is needed."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_void_p
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.hip.arrays import HipArray, see
from kvkernels.hip.compiler import Hiprtc
from kvkernels.hip.functions import (
    NO_BINARY,
    ON_DEVICE,
    OUT_OF_MEMORY,
    RUNTIME,
    TO_DEVICE,
    TO_HOST,
    Functions,
    at,
)
from kvkernels.hip.memory import Pool, address
from kvkernels.simt.compiling import broken, no_room
from kvkernels.simt.driver import Seen
from kvkernels.simt.program import Program

_ATTRIBUTES = 256  # hipPointerAttribute_t has 32 bytes up to HIP 7; its second int is the card


class HipDriver:
    """Card ``index``. Everything is enqueued on the null stream, which waits for other streams and
    is waited for by them, unless they were made non-blocking: callers synchronise those.
    """

    target = "hip"

    def __init__(self, runtime: Any, compiler: Hiprtc, index: int) -> None:
        self.index, self.compiler = index, compiler
        self._call = Functions(runtime, RUNTIME, "hipGetErrorString")
        self._pool = Pool(self._call, index)
        self._modules: dict[Program, tuple[c_void_p, bytes]] = {}
        self._functions: dict[tuple[Program, str], c_void_p] = {}
        self._here("opening")

    def _must(self, what: str, name: str, *args: Any) -> None:
        self._call.must(f"hip:{self.index}: {what}", name, *args)

    def _here(self, what: str) -> None:
        """The card is the calling thread's current one from here on."""
        self._must(what, "hipSetDevice", self.index)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> HipArray:
        """Uninitialised. Raises OutOfDeviceMemory."""
        what = f"an array {tuple(shape)} of {np.dtype(dtype)}"
        self._here(what)
        block = self._pool.take(prod(shape) * np.dtype(dtype).itemsize, what)
        return HipArray(self, block.ptr, shape, dtype, block)

    def zeros(self, nbytes: int) -> HipArray:
        """A uint8 array of zeros."""
        array = self.empty((nbytes,), np.uint8)
        self._must("zeroing", "hipMemsetAsync", array.ptr, 0, nbytes, None)
        return array

    def upload(self, host: NDArray[Any]) -> HipArray:
        """A copy on the card."""
        array = self.empty(host.shape, host.dtype)
        self.fill(array, host)
        return array

    def download(self, array: Any) -> NDArray[Any]:
        """A copy in host memory; waits for what was enqueued."""
        host = np.empty(array.shape, array.dtype)
        self._here("a download")
        if host.nbytes:
            copied = (host.ctypes.data, array.ptr, host.nbytes, TO_HOST)
            self._must("a download", "hipMemcpy", *copied)
        return host

    def fill(self, array: Any, host: NDArray[Any]) -> None:
        """Overwrite ``array``; returns when the host's values are copied."""
        plain = np.ascontiguousarray(host)
        self._here("an upload")
        if plain.nbytes:
            copied = (array.ptr, plain.ctypes.data, plain.nbytes, TO_DEVICE)
            self._must("an upload", "hipMemcpy", *copied)

    def copy(self, target: Any, source: Any) -> None:
        """Enqueue a copy on the card; both have as many bytes."""
        self._here("a copy")
        self._must("a copy", "hipMemcpy", target.ptr, source.ptr, source.nbytes, ON_DEVICE)

    def see(self, field: str, array: Any) -> Seen:
        """HipArrays, and arrays of CuPy and PyTorch for ROCm, bfloat16 included."""
        found = see(self, field, array)
        face = getattr(array, "__cuda_array_interface__", {}) if found is not array else {}
        if (stream := face.get("stream")) is not None and stream > 2:
            self._must("waiting for a caller's stream", "hipStreamSynchronize", stream)
        return Seen(found, found.shape, found.dtype.name)

    def card_of(self, ptr: int) -> int | None:
        """The card that memory is on; None when it is on none."""
        found = (c_int * (_ATTRIBUTES // 4))()
        self._here("looking at a pointer")
        failed = self._call.status("hipPointerGetAttributes", found, ptr)
        return None if failed else int(found[1])

    def launch(
        self, program: Program, kernel: str, grid: Sequence[int], args: Sequence[Any]
    ) -> None:
        """Enqueue. Raises DeviceLost, CompileError."""
        what = f"kernel {kernel}"
        self._here(what)
        function = self._function(program, kernel)
        size = tuple(int(n) for n in (*grid, 1, 1)[:3])
        if 0 in size:
            return
        values = [_value(arg) for arg in args]
        params = (c_void_p * len(values))(*(value.ctypes.data for value in values))
        sizes = (*size, program.threads(kernel), 1, 1)
        self._must(what, "hipModuleLaunchKernel", function, *sizes, 0, None, params, None)

    def _function(self, program: Program, kernel: str) -> c_void_p:
        key = (program, kernel)
        if key not in self._functions:
            if program not in self._modules:
                self._modules[program] = self._load(program)
            function = c_void_p()
            module, name = self._modules[program][0], kernel.encode()
            self._must(f"kernel {kernel}", "hipModuleGetFunction", at(function), module, name)
            self._functions[key] = function
        return self._functions[key]

    def _load(self, program: Program) -> tuple[c_void_p, bytes]:
        code, module = self.compiler.code(program), c_void_p()
        status = self._call.status("hipModuleLoadData", at(module), code)
        if status == NO_BINARY:
            text = f"the runtime does not load code for {self.compiler.gfx}"
            broken("hip", f"{text}: {self._call.text(status)}", "Install one ROCm only")
        if status == OUT_OF_MEMORY:
            no_room(f"hip:{self.index}: a module", len(code), *self._pool.room())
        if status:
            self._call.lost(f"hip:{self.index}: loading a module", "hipModuleLoadData", status)
        return module, code  # some runtimes read the code again later

    def synchronize(self) -> None:
        """Wait for the card."""
        self._here("waiting")
        self._must("waiting", "hipDeviceSynchronize")


def _value(arg: Any) -> NDArray[Any]:
    """What a kernel argument is: a scalar or structure, or a pointer."""
    if isinstance(arg, np.generic):
        return np.array([arg])
    return np.array([address(arg)], np.uint64)
