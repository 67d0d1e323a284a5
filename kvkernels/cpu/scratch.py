"""Reusable transient arrays with a high-water mark,
so that transient bytes are observed and not guessed (M2).
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ALIGN = 64


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes that start on a 64-byte boundary."""
    raw = np.zeros(nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + nbytes]


class Scratch:
    """Named workspaces that only grow; ``held`` is their sum, ``peak`` the largest sum seen."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}
        self.peak = 0

    @property
    def held(self) -> int:
        """Bytes held now."""
        return sum(b.nbytes for b in self._buffers.values())

    def get(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised array of that shape; its content is lost at the next ``get`` of the
        same name.
        """
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[name] = aligned(nbytes)
            self.peak = max(self.peak, self.held)
        return buffer[:nbytes].view(kind).reshape(shape)

    def clear(self) -> None:
        """Give everything back; the peak stays."""
        self._buffers.clear()

    def fill(self, byte: int) -> None:
        """Overwrite every workspace: tests see then whether anything reads what is left there."""
        for buffer in self._buffers.values():
            buffer.fill(byte)
