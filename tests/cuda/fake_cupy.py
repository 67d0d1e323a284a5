"""A CuPy whose card is the emulator: memory is NumPy's, NVRTC is the machine's C++ compiler.

It takes what the real one takes and nothing more: kernel arguments by value are NumPy arrays of
size one, a module is loaded from bytes, ``None`` and bare integers are no arguments.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_build
import numpy as np

from kvkernels.simt.emulator.driver import EmulatorDriver


class CudaError(RuntimeError):
    """CUDARuntimeError and CUDADriverError: a number in ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: what CUDA says")
        self.status = status


class RuntimeApiError(CudaError):
    """cupy.cuda.runtime.CUDARuntimeError."""


class DriverApiError(CudaError):
    """cupy.cuda.driver.CUDADriverError."""


class OutOfMemoryError(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError."""


class NVRTCError(RuntimeError):
    """cupy.cuda.nvrtc's."""


class Array:
    """cupy.ndarray, as far as drivers look at it; no ``__array__``: it is no host's."""

    def __init__(self, host: Any, device: int = 0) -> None:
        self.host = host
        self.shape, self.dtype, self.strides = host.shape, host.dtype, host.strides
        self.size, self.nbytes = host.size, host.nbytes
        self.device = SimpleNamespace(id=device)
        self.flags = SimpleNamespace(c_contiguous=host.flags.c_contiguous)
        self.data = SimpleNamespace(ptr=host.ctypes.data)

    def view(self, dtype: Any) -> Array:
        return Array(self.host.view(dtype), self.device.id)

    def set(self, host: Any) -> None:
        assert host.shape == self.shape
        assert host.dtype == self.dtype
        self.host[...] = host

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, index: Any) -> Any:
        return self.host[index]

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device.id)


class Foreign:
    """An array of another library, with DLPack (``memory`` 2: CUDA) or without."""

    def __init__(self, host: Any, device: int = 0, memory: int = 2) -> None:
        self.host, self.place = host, (memory, device)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self) -> Any:
        if self.host is None:
            raise BufferError("it requires gradients")
        return self.host


class Stream:
    """A stream: ``with`` makes it the current one."""

    def __init__(self, card: Card, name: str) -> None:
        self.card, self.name, self.waits = card, name, 0

    def __enter__(self) -> Stream:
        self.card.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.card.streams.pop()

    def synchronize(self) -> None:
        self.waits += 1
        if self.card.fail_sync:
            raise RuntimeApiError(self.card.fail_sync)


class Emulator(EmulatorDriver):
    """Launches from a library that somebody else compiled."""

    def launch_from(self, library: Any, name: str, grid: Any, block: Any, args: Any) -> None:
        self.library, program = library, SimpleNamespace(threads=lambda _: block[0])
        self.launch(program, name, grid, args)  # type: ignore[arg-type]

    def kernel(self, program: Any) -> Any:
        return self.library


class Card:
    """What happened, and what shall fail."""

    def __init__(self, version: tuple[int, int] = (13, 2)) -> None:
        self.emulator = Emulator()
        self.streams: list[Stream] = [Stream(self, "null")]
        self.launches: list[tuple[str, tuple[int, ...], str]] = []
        self.compiled: list[tuple[str, ...]] = []
        self.current: list[int] = [0]
        self.version = version
        self.fail_sync = self.fail_launch = self.fail_load = 0
        self.fail_compile = False
        self.room = 1 << 40

    def module(self) -> Any:
        """The module ``cupy``."""
        card = self
        nvrtc = SimpleNamespace(
            getVersion=lambda: card.version,
            createProgram=lambda source, name, headers, names: {"source": source},
            compileProgram=self._compile,
            getCUBIN=lambda program: program["code"],
            getPTX=lambda program: program["code"],
            getProgramLog=lambda program: program.get("log", ""),
            destroyProgram=lambda program: program.clear(),
        )
        cuda = SimpleNamespace(
            nvrtc=nvrtc,
            Device=self._device,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=SimpleNamespace(
                CUDARuntimeError=RuntimeApiError, memGetInfo=lambda: (1 << 30, 8 << 30)
            ),
            driver=SimpleNamespace(CUDADriverError=DriverApiError),
            function=SimpleNamespace(Module=lambda: _Module(card)),
            get_current_stream=lambda: card.streams[-1],
            Stream=lambda: Stream(card, "caller's"),
        )
        return SimpleNamespace(
            cuda=cuda,
            ndarray=Array,
            empty=self._empty,
            zeros=lambda shape, dtype: self._filled(shape, dtype, 0),
            array=lambda host: self._copy(host),
            asarray=lambda array: Array(array.host),
            asnumpy=lambda array: array.host.copy(),
            from_dlpack=lambda array: Array(array.__dlpack__(), array.__dlpack_device__()[1]),
        )

    @contextmanager
    def _device(self, index: int) -> Iterator[None]:
        self.current.append(index)
        try:
            yield
        finally:
            self.current.pop()

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        if int(np.prod(shape)) * np.dtype(dtype).itemsize > self.room:
            raise OutOfMemoryError
        return Array(self.emulator.empty(shape, dtype), self.current[-1])

    def _filled(self, shape: tuple[int, ...], dtype: Any, value: int) -> Array:
        array = self._empty(shape, dtype)
        array.host[...] = value
        return array

    def _copy(self, host: Any) -> Array:
        array = self._empty(host.shape, host.dtype)
        array.host[...] = host
        return array

    def _compile(self, program: dict[str, Any], options: tuple[str, ...]) -> None:
        self.compiled.append(options)
        try:
            assert not self.fail_compile, "k.cu(7): error: no such thing"
            program["code"] = host_build.library("cuda", program["source"])[:-1]
        except (AssertionError, RuntimeError) as error:
            program["log"] = str(error)
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)") from None


class _Module:
    def __init__(self, card: Card) -> None:
        self.card = card

    def load(self, code: bytes) -> None:
        if self.card.fail_load:
            raise DriverApiError(self.card.fail_load)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "module.so"
            path.write_bytes(code)
            self.library = ctypes.CDLL(str(path))

    def get_function(self, name: str) -> Any:
        getattr(self.library, f"kvk_entry_{name}")  # raises when it is not there

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            card = self.card
            if card.fail_launch:
                raise DriverApiError(card.fail_launch)
            assert all(type(arg) is np.ndarray and arg.size == 1 for arg in args)
            card.emulator.launch_from(self.library, name, grid, block, [arg[()] for arg in args])
            card.launches.append((name, grid, card.streams[-1].name))

        return launch
