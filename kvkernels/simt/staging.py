"""New rows into exact blocks: which runs of tokens one launch rotates, rounds and copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import CommitCall, GroupWrite
from kvkernels.errors import InputError
from kvkernels.records.layout import GROUP
from kvkernels.simt.driver import Driver, scalar
from kvkernels.simt.program import Program
from kvkernels.simt.scratch import Scratch

#: element kinds of rows, as ``common.inc`` numbers them
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}
#: products of tokens and channels that one block of threads takes (``stage.inc``)
_ELEMENTS = 4096


def program(dim: int) -> Program:
    """The kernels for that head_dim."""
    parts = ("common", "rotate", "turn", "exact", "stage")
    return Program.of(parts, {"stage": 128, "copy_tokens": 128}, DIM=dim)


def kind_of(driver: Driver, field: str, array: Any) -> int:
    """The element kind of a caller's rows; InputError for another dtype."""
    dtype = driver.see(field, array).dtype
    if dtype not in KINDS:
        raise InputError(field, found=f"dtype {dtype}", needed=f"one of {', '.join(KINDS)}")
    return KINDS[dtype]


def runs(start: int, count: int, width: int) -> Iterator[tuple[int, int]]:
    """(first, length) of the parts of ``start .. start + count`` between multiples of width."""
    stop = start + count
    while start < stop:
        end = min(stop, (start // width + 1) * width)
        yield start, end - start
        start = end


def transient(writes: Sequence[GroupWrite]) -> list[int]:
    """The block of every write as kernels take it: -1, -2, ... are transient tiles."""
    found, tiles = [], 0
    for w in writes:
        tiles += w.block < 0
        found.append(w.block if w.block >= 0 else -tiles)
    return found


def items(writes: Sequence[GroupWrite], dim: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The lists of ``stage.inc``: new rows int32 [n, 4] (block, source, first token, tokens) and
    copies int32 [n, 3] (block, base, tokens).
    """
    new, copies = [], []
    for w, block in zip(writes, transient(writes), strict=True):
        if w.row and w.base != w.block:
            copies.append((block, w.base, w.row))
        for at, n in runs(w.row, w.rows, _ELEMENTS // dim):
            new.append((block, w.source + at - w.row, at, n))
    return np.array(new, np.int32).reshape(-1, 4), np.array(copies, np.int32).reshape(-1, 3)


def stage(
    driver: Driver, call: CommitCall, writes: Sequence[GroupWrite], scratch: Scratch
) -> Any | None:
    """Enqueue the staging of these writes; returns the transient tiles, uint16 [tiles, lanes,
    D * 128], or None when there are none.
    """
    layer, buffers = call.layer, call.buffers
    dim = layer.head_dim
    new, copies = items(writes, dim)
    n_transient, tiles = sum(w.block < 0 for w in writes), None
    if n_transient:
        tiles = scratch.get(
            "stage tiles", (n_transient, 2 * layer.n_kv_head + layer.n_head, GROUP * dim), np.uint16
        )
    # Without blocks for them, queries are wanted by the encoder that weighs by them, or by nobody.
    weighed = layer.encoder != "published" and buffers.query_moment is None
    q = call.q if weighed or buffers.q_exact is not None else None
    heads = 2 * layer.n_kv_head + (layer.n_head if q is not None else 0)
    exact = (buffers.k_exact, buffers.v_exact, buffers.q_exact, tiles)
    numbers = tuple(scalar(x) for x in (layer.n_kv_head, layer.n_head, buffers.blocks))
    if len(copies):
        args = (*exact, scratch.constant(copies), *numbers)
        driver.launch(program(dim), "copy_tokens", (len(copies), heads), args)
    if len(new):
        kinds = kind_of(driver, "k", call.k) | kind_of(driver, "v", call.v) << 2
        if q is not None:
            kinds |= kind_of(driver, "q", q) << 4
        rows = (call.k, call.v, q, scalar(kinds))
        args = (*rows, *exact, scratch.constant(new), *numbers)
        driver.launch(program(dim), "stage", (len(new), heads), args)
    return tiles
