"""Memory of a card: small blocks are kept, since hipMalloc and hipFree wait for the card."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from ctypes import c_size_t, c_void_p
from typing import Any

from kvkernels.hip.functions import OUT_OF_MEMORY, Functions, at
from kvkernels.simt.compiling import no_room

_SMALLEST = 512
#: larger blocks go back to the runtime at once
_LARGEST_KEPT = 1 << 20


class Block:
    """``ptr``: 256-byte aligned memory, given back with the last reference to the block. All work
    is on one stream, so a block may be used again before what reads it has run.
    """

    def __init__(self, pool: Pool, ptr: int, size: int) -> None:
        self.ptr = ptr
        # Not at exit: the runtime may be gone by then, and takes its memory along.
        weakref.finalize(self, pool.give, ptr, size).atexit = False


class Pool:
    """Blocks of card ``index``."""

    def __init__(self, call: Functions, index: int) -> None:
        self._call, self._index = call, index
        # Appending and popping is atomic: a finaliser may come at any moment, in any thread.
        self._free: defaultdict[int, deque[int]] = defaultdict(deque)

    def take(self, nbytes: int, what: str) -> Block:
        """Uninitialised memory. Raises OutOfDeviceMemory."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length() if nbytes else 0)
        if size > _LARGEST_KEPT:
            size = -(-nbytes // _SMALLEST) * _SMALLEST
        try:
            return Block(self, self._free[size].pop(), size)
        except IndexError:
            pass
        ptr = c_void_p()
        status = self._call.status("hipMalloc", at(ptr), size)
        if status == OUT_OF_MEMORY:
            self.clear()
            status = self._call.status("hipMalloc", at(ptr), size)
        if status == OUT_OF_MEMORY:
            no_room(f"hip:{self._index}: {what}", nbytes, *self.room())
        if status or not ptr.value:
            self._call.lost(f"hip:{self._index}: {what}", "hipMalloc", status)
        return Block(self, ptr.value, size)

    def give(self, ptr: int, size: int) -> None:
        """Keep a small block, free a large one."""
        if size <= _LARGEST_KEPT:
            self._free[size].append(ptr)
        else:
            self._call.status("hipFree", ptr)

    def clear(self) -> None:
        """Free what is kept."""
        for kept in list(self._free.values()):
            while kept:
                self._call.status("hipFree", kept.pop())

    def room(self) -> tuple[int | None, int | None]:
        """Bytes (free, of the card)."""
        free, total = c_size_t(), c_size_t()
        if self._call.status("hipMemGetInfo", at(free), at(total)):
            return None, None
        return free.value, total.value


def address(array: Any) -> int:
    """The pointer that a kernel gets; null for None."""
    return 0 if array is None else int(array.ptr)
