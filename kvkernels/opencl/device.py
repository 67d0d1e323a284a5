"""OpenCL devices through pyopencl. Arrays are ``pyopencl.array.Array`` of the device's context
(``device.driver.queue.context``)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.capabilities import DeviceCaps
from kvkernels.errors import CompileError, DeviceLost, InputError, KvkError, OutOfDeviceMemory
from kvkernels.opencl.probe import list_devices
from kvkernels.opencl.table import TABLE
from kvkernels.simt.device import SimtDevice
from kvkernels.simt.driver import Seen
from kvkernels.simt.program import Program

_CORRECTLY_ROUNDED = 1 << 7  # CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT


def open_opencl(caps: DeviceCaps, index: int) -> SimtDevice:
    """The ``index``-th device of all platforms, with a queue of its own."""
    import pyopencl

    found = list(list_devices(pyopencl))
    return SimtDevice(caps, TABLE, OpenclDriver(found[index][1]))


class OpenclDriver:
    """A device with an in-order queue. ``queue``: the one that work is enqueued in; a caller's own
    arrays must belong to its context.
    """

    target = "opencl"

    def __init__(self, device: Any, queue: Any = None) -> None:
        import pyopencl as cl
        import pyopencl.array

        self._cl, self._arrays = cl, pyopencl.array
        self.queue = queue or cl.CommandQueue(cl.Context([device]))
        self._align = max(device.mem_base_addr_align // 8, 1)
        self._options = ["-cl-std=CL1.2"]
        if device.single_fp_config & _CORRECTLY_ROUNDED:
            self._options.append("-cl-fp32-correctly-rounded-divide-sqrt")
        self._kernels: dict[tuple[Program, str], Any] = {}

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A ``pyopencl.array.Array``; buffers are aligned to 128 bytes by OpenCL itself."""
        return self._made(lambda: self._arrays.empty(self.queue, shape, dtype), shape, dtype)

    def zeros(self, nbytes: int) -> Any:
        """A uint8 array of zeros."""
        array = self.empty((nbytes,), np.uint8)
        if nbytes:
            self._cl.enqueue_fill_buffer(
                self.queue, array.base_data, np.zeros(1, np.uint8), 0, nbytes
            )
        return array

    def upload(self, host: NDArray[Any]) -> Any:
        """A copy on the device."""
        host = np.ascontiguousarray(host)
        return self._made(lambda: self._arrays.to_device(self.queue, host), host.shape, host.dtype)

    def download(self, array: Any) -> NDArray[Any]:
        """A copy in host memory; waits."""
        host: NDArray[Any] = self._guarded(lambda: np.asarray(array.get(self.queue)))
        return host

    def fill(self, array: Any, host: NDArray[Any]) -> None:
        """Overwrite."""
        self._guarded(lambda: array.set(np.ascontiguousarray(host), self.queue))

    def see(self, field: str, array: Any) -> Seen:
        """A ``pyopencl.array.Array`` of this context."""
        if not isinstance(array, self._arrays.Array):
            raise InputError(
                field, found=type(array).__name__, needed="a pyopencl.array.Array on this device",
                hint="device.upload(array) makes one of a NumPy array",
            )  # fmt: skip
        if array.size and array.context != self.queue.context:
            raise InputError(
                field, found="an array of another OpenCL context", needed="one of this device's",
                hint="Use the context of device.driver.queue",
            )  # fmt: skip
        if not array.flags.c_contiguous:
            raise InputError(
                field, found="a strided array", needed="a C-contiguous array", hint="Use .copy()"
            )
        if array.offset % self._align:
            raise InputError(
                field, found=f"an array that begins {array.offset} bytes into its buffer",
                needed=f"a multiple of {self._align} bytes", hint="Use .copy()",
            )  # fmt: skip
        return Seen(array, tuple(array.shape), array.dtype.name)

    def launch(
        self, program: Program, kernel: str, grid: Sequence[int], args: Sequence[Any]
    ) -> None:
        """Enqueue; blocks of one dimension, grids of up to three."""
        compiled = self._kernel(program, kernel)
        threads = program.threads(kernel)
        size = (grid[0] * threads, *grid[1:])
        values = [self._argument(arg) for arg in args]
        local = (threads, *(1 for _ in grid[1:]))
        self._guarded(lambda: compiled(self.queue, size, local, *values))

    def local_bytes(self, program: Program, kernel: str) -> int:
        """Local memory that the compiled kernel takes."""
        info = self._cl.kernel_work_group_info.LOCAL_MEM_SIZE
        made = self._kernel(program, kernel)
        return int(made.get_work_group_info(info, self.queue.device))

    def synchronize(self) -> None:
        """Wait for the queue."""
        self._guarded(self.queue.finish)

    def _argument(self, arg: Any) -> Any:
        if arg is None or isinstance(arg, np.generic):
            return arg
        if not arg.size:
            return None
        if arg.offset:
            return arg.base_data.get_sub_region(arg.offset, arg.nbytes)
        return arg.base_data

    def _kernel(self, program: Program, kernel: str) -> Any:
        key = (program, kernel)
        if key not in self._kernels:
            source = program.source("opencl")
            try:
                with warnings.catch_warnings():
                    # Drivers report all kinds of things that are no error.
                    warnings.simplefilter("ignore", self._cl.CompilerWarning)
                    built = self._cl.Program(self.queue.context, source).build(self._options)
            except self._cl.Error as error:
                raise CompileError(
                    f"{kernel} did not compile on {self.queue.device.name}: {error}\n"
                    "Update the OpenCL driver, or report this with the output of `kvk probe`."
                ) from None
            for name, _ in program.kernels:
                self._kernels[program, name] = self._cl.Kernel(built, name)
        return self._kernels[key]

    def _made(self, make: Callable[[], Any], shape: tuple[int, ...], dtype: Any) -> Any:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        try:
            return make()
        except (self._cl.MemoryError, MemoryError):
            raise self._no_room(nbytes) from None
        except self._cl.Error as error:
            # More than a single buffer may have is refused by that name.
            if getattr(error, "code", None) == self._cl.status_code.INVALID_BUFFER_SIZE and nbytes:
                raise self._no_room(nbytes) from None
            raise self._failure(error) from None

    def _no_room(self, nbytes: int) -> KvkError:
        device = self.queue.device
        return OutOfDeviceMemory(
            f"{device.name}: no room for {nbytes} bytes (largest buffer "
            f"{device.max_mem_alloc_size}, memory {device.global_mem_size}). Plan for a "
            "smaller n_ctx or n_seq, or for narrower types"
        )

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except self._cl.MemoryError as error:
            raise OutOfDeviceMemory(f"{self.queue.device.name}: {error}") from None
        except self._cl.Error as error:
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> KvkError:
        return DeviceLost(f"{self.queue.device.name} failed: {error}")
