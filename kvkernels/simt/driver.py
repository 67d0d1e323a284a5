"""What a SIMT backend adds to the shared device: memory, compilation, launches.

A driver's arrays are whatever its users have (NumPy arrays on the emulator, CuPy arrays on CUDA,
``pyopencl.array.Array`` on OpenCL); the shared device never looks inside one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvkernels.simt.program import Program


@dataclass(frozen=True, slots=True)
class Seen:
    """What a driver finds about a caller's array: shape, and dtype by NumPy's name."""

    array: Any
    shape: tuple[int, ...]
    dtype: str


class Driver(Protocol):
    """One opened device. Work is enqueued in order; ``synchronize`` waits for it.

    Methods raise MemoryError when the device has no room, ``DeviceLost`` when it failed.
    """

    @property
    def target(self) -> str:
        """Which prelude its compiler takes, one of ``program.TARGETS``."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised array, C-contiguous, aligned to 64 bytes at least."""

    def zeros(self, nbytes: int) -> Any:
        """A uint8 array of zeros."""

    def upload(self, host: NDArray[Any]) -> Any:
        """A new device array with the same shape, dtype and values."""

    def download(self, array: Any) -> NDArray[Any]:
        """The array's values in host memory; waits for what was enqueued."""

    def fill(self, array: Any, host: NDArray[Any]) -> None:
        """Overwrite a device array with values of the same shape and dtype."""

    def see(self, field: str, array: Any) -> Seen:
        """A caller's array; raises InputError naming ``field`` when it is not on this device or not
        C-contiguous. Nothing is copied.
        """

    def launch(
        self, program: Program, kernel: str, grid: Sequence[int], args: Sequence[Any]
    ) -> None:
        """Enqueue a kernel; ``args`` are device arrays (or None: a null pointer) and NumPy scalars.
        Compiles the program when it is first asked for.
        """

    def synchronize(self) -> None:
        """Wait; a failed launch raises here at the latest."""


def scalar(value: int) -> np.generic:
    """A 32-bit kernel argument."""
    return np.int32(value)
