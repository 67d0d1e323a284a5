"""The question whether new rows can be stored, asked of every step before anything is enqueued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from kvkernels.simt.driver import Driver, Seen, scalar
from kvkernels.simt.program import Program
from kvkernels.simt.staging import kind_of
from kvkernels.storage import Stored

_HALF_MAX = 65504.0
_NONE = np.iinfo(np.int32).max
_THREADS, _BLOCKS = 128, 2048
_ELEMENTS = 4096  # of one block of threads (``turn.inc``)
#: which channel of a row is named, by ``check.inc``
_BROKEN, _BEYOND, _LARGEST = range(3)

_CHECK = Program.of(("common", "check"), {"scan": _THREADS, "locate": 32})


def _overflow(dim: int) -> Program:
    return Program.of(("common", "rotate", "turn", "overflow"), {"overflow": 128}, DIM=dim)


Found = tuple[int, tuple[int, ...]] | None


def first_unfit(driver: Driver, arrays: Sequence[Any], stored: Sequence[Stored]) -> Found:
    """(array, (row, head, channel)) of the first value that is NaN or infinite, or that leaves the
    fp16 range in a form in which it is ``stored``; None when all can be used.

    ``arrays``: one to three, [rows, heads, D] of float32, float16 or bfloat16. An array's
    non-finite values come before its large ones, and those that are PLAIN before the ROTATED ones,
    where a row's first channel of largest magnitude is named. One launch and one download.
    """
    return asked(driver, arrays, stored)()


def asked(driver: Driver, arrays: Sequence[Any], stored: Sequence[Stored]) -> Callable[[], Found]:
    """Enqueue the question of ``first_unfit``; the function waits for the answer. The arrays must
    not change before it is called.
    """
    seen = [driver.see(f"arrays[{i}]", a) for i, a in enumerate(arrays)]
    kinds = [kind_of(driver, f"arrays[{i}]", a) for i, a in enumerate(arrays)]
    scanned = _scan(driver, seen, kinds)
    return lambda: _answer(driver, seen, kinds, stored, scanned)


def _answer(
    driver: Driver,
    seen: Sequence[Seen],
    kinds: Sequence[int],
    stored: Sequence[Stored],
    scanned: Any,
) -> Found:
    found = driver.download(scanned).reshape(-1, 3)
    for i, (one, kind, kept) in enumerate(zip(seen, kinds, stored, strict=True)):
        broken, beyond, top = (int(x) for x in found[i])
        # |rotated| <= sqrt(D) * max|x|: below that nothing can overflow, and that is nearly always.
        largest = float(np.uint32(-top).view(np.float32))
        wide = bool(kept & Stored.ROTATED) and largest * one.shape[-1] ** 0.5 >= _HALF_MAX
        if broken != _NONE:
            return i, _position(driver, one, kind, broken, _BROKEN)
        if kept & Stored.PLAIN and beyond != _NONE:
            return i, _position(driver, one, kind, beyond, _BEYOND)
        if wide:
            over = _first_overflow(driver, one, kind)
            if over != _NONE:
                return i, _position(driver, one, kind, over, _LARGEST)
    return None


def _vectors(one: Seen) -> int:
    return prod(one.shape[:-1])


def _scan(driver: Driver, seen: Sequence[Seen], kinds: Sequence[int]) -> Any:
    """int32 [arrays, 3] of ``scan``, on the device."""
    found = driver.upload(np.tile(np.array([_NONE, _NONE, 0], np.int32), (len(seen), 1)))
    none = [0] * (3 - len(seen))
    shapes = (*(_vectors(s) for s in seen), *none, *(s.shape[-1] for s in seen), *none)
    largest = max(prod(s.shape) for s in seen)
    blocks = max(1, min(_BLOCKS, -(-largest // (8 * _THREADS))))
    args = (
        *(s.array for s in seen), *(None for _ in none),
        scalar(sum(kind << 2 * i for i, kind in enumerate(kinds))),
        *(scalar(n) for n in (*shapes, blocks)), found,
    )  # fmt: skip
    driver.launch(_CHECK, "scan", (blocks, len(seen)), args)
    return found


def _first_overflow(driver: Driver, one: Seen, kind: int) -> int:
    dim, vectors = one.shape[-1], _vectors(one)
    found = driver.upload(np.array([_NONE], np.int32))
    grid = (-(-vectors * dim // _ELEMENTS),)
    driver.launch(
        _overflow(dim), "overflow", grid, (one.array, scalar(kind), scalar(vectors), found)
    )
    return int(driver.download(found)[0])


def _position(driver: Driver, one: Seen, kind: int, vector: int, mode: int) -> tuple[int, ...]:
    dim = one.shape[-1]
    found = driver.upload(np.zeros(1, np.int32))
    args = (one.array, *(scalar(n) for n in (kind, vector, dim, mode)), found)
    driver.launch(_CHECK, "locate", (1,), args)
    heads = np.unravel_index(vector, one.shape[:-1])
    return (*(int(i) for i in heads), int(driver.download(found)[0]))
