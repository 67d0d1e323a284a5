"""CUDA as a driver: device memory is CuPy's, launches go to the caller's current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.cuda.arrays import see
from kvkernels.cuda.compiler import Nvrtc
from kvkernels.errors import DeviceLost
from kvkernels.simt.compiling import broken, no_room
from kvkernels.simt.driver import Seen
from kvkernels.simt.probing import text_of
from kvkernels.simt.program import Program

#: CUresult: the driver does not know this PTX, or has no code for its card in this module
_NEWER = (209, 222)
#: the same number in both
_OUT_OF_MEMORY = 2


class CudaDriver:
    """Card ``index``, compiled for as ``arch`` (``sm_90``). ``cupy``: the module.

    Everything is enqueued on CuPy's current stream of that card, in the calling thread: a caller's
    ``with cupy.cuda.Stream()`` or ``cupy.cuda.ExternalStream(...)`` is honoured. Steps of one cache
    must use one stream, or streams that the caller orders.
    """

    target = "cuda"

    def __init__(self, cupy: Any, index: int, arch: str) -> None:
        self.cupy, self.index = cupy, index
        self.compiler = Nvrtc(cupy, arch)
        self._functions: dict[tuple[Program, str], Callable[..., None]] = {}
        self._modules: dict[Program, Any] = {}

    @contextmanager
    def _on_card(self, what: str, nbytes: int = 0) -> Iterator[None]:
        """The card is current inside; CuPy's errors leave as ours."""
        out_of_memory = self.cupy.cuda.memory.OutOfMemoryError
        try:
            with self.cupy.cuda.Device(self.index):
                yield
        except out_of_memory:
            no_room(f"cuda:{self.index}: {what}", nbytes, *self._free())
        except self._failures() as error:
            if getattr(error, "status", None) == _OUT_OF_MEMORY:
                no_room(f"cuda:{self.index}: {what}", nbytes, *self._free())
            raise DeviceLost(
                f"cuda:{self.index}: {what}: {text_of(error)}. Caches on this card cannot be "
                "trusted any more; start a new process. CUDA_LAUNCH_BLOCKING=1 shows which launch "
                "failed"
            ) from None

    def _failures(self) -> tuple[type[Exception], ...]:
        cuda = self.cupy.cuda
        return (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError)

    def _free(self) -> tuple[int | None, int | None]:
        try:
            with self.cupy.cuda.Device(self.index):
                free, total = self.cupy.cuda.runtime.memGetInfo()
        except Exception:
            return None, None
        return int(free), int(total)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """CuPy's pool gives multiples of 512 bytes."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        with self._on_card(f"an array {shape} of {np.dtype(dtype)}", nbytes):
            return self.cupy.empty(shape, dtype)

    def zeros(self, nbytes: int) -> Any:
        """A uint8 array of zeros."""
        with self._on_card("zeroed memory", nbytes):
            return self.cupy.zeros((nbytes,), np.uint8)

    def upload(self, host: NDArray[Any]) -> Any:
        """A copy on the card."""
        with self._on_card(f"an upload of {host.shape} {host.dtype}", host.nbytes):
            return self.cupy.array(np.ascontiguousarray(host))

    def download(self, array: Any) -> NDArray[Any]:
        """A copy in host memory; waits for the current stream."""
        with self._on_card("a download"):
            found: NDArray[Any] = self.cupy.asnumpy(array)
        return found

    def fill(self, array: Any, host: NDArray[Any]) -> None:
        """Overwrite ``array``."""
        with self._on_card("an upload", host.nbytes):
            array.set(np.ascontiguousarray(host))

    def see(self, field: str, array: Any) -> Seen:
        """Anything on this card that CuPy takes without a copy, bfloat16 included."""
        return see(self.cupy, self.index, field, array)

    def launch(
        self, program: Program, kernel: str, grid: Sequence[int], args: Sequence[Any]
    ) -> None:
        """Enqueue on the current stream. Raises DeviceLost, CompileError."""
        key = (program, kernel)
        with self._on_card(f"kernel {kernel}"):
            function = self._functions.get(key)
            if function is None:
                function = self._functions[key] = self._module(program).get_function(kernel)
            size = tuple(int(n) for n in (*grid, 1, 1)[:3])
            if 0 in size:
                return  # CuPy would launch one block
            function(size, (program.threads(kernel), 1, 1), tuple(map(_argument, args)))

    def _module(self, program: Program) -> Any:
        if program not in self._modules:
            code = self.compiler.code(program)
            module = self.cupy.cuda.function.Module()
            try:
                module.load(code)
            except self.cupy.cuda.driver.CUDADriverError as error:
                if getattr(error, "status", None) not in _NEWER:
                    raise
                nvrtc, arch = self.compiler.version, self.compiler.arch
                text = f"the driver does not load what NVRTC {nvrtc} makes for {arch}"
                broken(
                    "cuda", f"{text}: {text_of(error)}", "Update the driver, or use an older NVRTC"
                )
            self._modules[program] = module
        return self._modules[program]

    def synchronize(self) -> None:
        """Wait for the current stream."""
        with self._on_card("waiting"):
            self.cupy.cuda.get_current_stream().synchronize()


def _argument(arg: Any) -> NDArray[Any]:
    """A size-one NumPy array, which CuPy passes by value: a structure or a scalar with its own
    width, or a pointer.
    """
    if isinstance(arg, np.generic):
        return np.asarray(arg)
    return np.asarray(0 if arg is None else arg.data.ptr, np.uint64)
