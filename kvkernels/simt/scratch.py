"""Reusable device workspaces with a high-water mark, so that transient bytes are observed and not
guessed (M2), and small lists that one step's layers share.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvkernels.simt.driver import Driver

#: small arrays kept on the device, oldest first out
_LISTS = 64


class Scratch:
    """Named workspaces that only grow; ``held`` is their sum in bytes, ``peak`` the largest sum
    seen. What ``get`` and ``constant`` return is for kernel arguments: drivers' arrays are opaque.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._buffers: dict[str, tuple[Any, int]] = {}
        self._lists: dict[tuple[str, tuple[int, ...], bytes], Any] = {}
        self.peak = 0

    @property
    def held(self) -> int:
        """Bytes of the workspaces held now; lists are not counted (a few KB)."""
        return sum(nbytes for _, nbytes in self._buffers.values())

    def get(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A device array of at least that many bytes, uninitialised, 64-byte aligned: the workspace
        itself, uint8 [bytes]. Its content is lost at the next ``get`` of the same name.
        """
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        found = self._buffers.get(name)
        if found is None or found[1] < nbytes:
            # The old one goes first: a device may have no room for both.
            self._buffers.pop(name, None)
            found = (self._driver.empty((nbytes,), np.uint8), nbytes)
            self._buffers[name] = found
            self.peak = max(self.peak, self.held)
        return found[0]

    def constant(self, host: NDArray[Any]) -> Any:
        """A device copy of a small host array that no kernel writes; the same one while the same
        values are asked for, so that layers of one step upload their list once.
        """
        key = (host.dtype.str, host.shape, host.tobytes())
        found = self._lists.pop(key, None)
        if found is None:
            found = self._driver.upload(host)
            while len(self._lists) >= _LISTS:
                self._lists.pop(next(iter(self._lists)))
        self._lists[key] = found
        return found

    def clear(self) -> None:
        """Give everything back; the peak stays."""
        self._buffers.clear()
        self._lists.clear()

    def fill(self, byte: int) -> None:
        """Overwrite every workspace: tests see then whether anything reads what is left there."""
        for array, nbytes in self._buffers.values():
            self._driver.fill(array, np.full(nbytes, byte, np.uint8))
