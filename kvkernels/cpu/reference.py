"""The living definition of the codec and of attention, in readable NumPy.

Codec: codec.md; attention: semantics.md B, in ``reference_attend`` and re-exported here.
Every kernel is tested against this module: the encoder byte for byte, the decoder bit for bit,
attention within a tolerance. Nothing here is fast and nothing here is called on a hot path.

Words: a *tile* is ``[R, C]`` in quantiser orientation (K: channels x tokens, V: tokens x channels);
``x`` is one KV head of one group, ``[128 tokens, D]``.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvkernels.cpu.reference_attend import alibi_slopes, attend, visible
from kvkernels.errors import InputError, NonFiniteError
from kvkernels.records.layout import GROUP, HEAD_DIMS, LINE, HeadLayout, Side
from kvkernels.records.packing import join, split

__all__ = [
    "alibi_slopes",
    "attend",
    "decode",
    "decode_tile",
    "encode",
    "encode_tile",
    "normalise",
    "quantise",
    "rotate",
    "stage_rows",
    "visible",
]

F32 = NDArray[np.float32]
Halves = NDArray[np.float16]
Bytes = NDArray[np.uint8]
Pick = Literal["best", "last"]
Rounding = Literal["half_away", "half_even"]

ITERATIONS = 16
HALF_MAX = 65504.0


def _butterflies(x: NDArray[Any], axis_len: int) -> NDArray[Any]:
    """Natural-order Hadamard over the last axis, strides 1, 2, 4, ...: pairs -> (a + b, a - b)."""
    stride = 1
    while stride < axis_len:
        pairs = x.reshape(*x.shape[:-1], axis_len // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((a + b, a - b), axis=-2).reshape(x.shape)
        stride *= 2
    return x


def rotate(x: NDArray[Any], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Walsh-Hadamard over the last axis D, divided by sqrt(D); its own inverse (codec.md 2).

    Computed in ``dtype``: float32 gives the encoder's exact bits, float64 serves attention checks.
    Raises `InputError` for a D outside {64, 128, 256, 512}.
    """
    d = x.shape[-1]
    if d not in HEAD_DIMS:
        raise InputError("head_dim", found=d, needed=f"one of {HEAD_DIMS}")
    width = min(d, 128)
    n = d // width
    y: NDArray[Any] = x.astype(dtype).reshape(*x.shape[:-1], n, width)
    y = _butterflies(y, width) * y.dtype.type(1 / math.sqrt(width))
    if n > 1:
        across = np.ascontiguousarray(np.swapaxes(y, -1, -2))
        y = np.swapaxes(_butterflies(across, n) * y.dtype.type(1 / math.sqrt(n)), -1, -2)
    return y.reshape(x.shape)


def _column_std(a: F32) -> F32:
    """Sample std (n - 1) of every column; sums in float64, row after row, cast to fp32.

    Deviations are taken from the column's first element: a constant column gives exactly 0 and a
    large mean does not cancel, in one sweep.
    """
    n = a.shape[0]
    d = a.astype(np.float64) - a[0].astype(np.float64)
    s1 = np.add.reduce(d, axis=0)
    s2 = np.add.reduce(d * d, axis=0)
    var = (s2 - s1 * s1 / n) / (n - 1)
    std: F32 = np.sqrt(np.maximum(var, 0.0)).astype(np.float32)
    return std


def _row_std(a: F32) -> F32:
    return _column_std(np.ascontiguousarray(a.T))


def _imbalance(col: F32, row: F32) -> np.float32:
    floor = np.float32(1e-8)
    spread = col.max() / max(col.min(), floor) + row.max() / max(row.min(), floor)
    return np.float32(spread)


def _log_step(log: F32, std: F32) -> tuple[F32, F32]:
    """One clamped update of a log scale -> (log, e^log), both fp32.

    ln and exp run in float64 (the scalar libm, as compiled kernels do) and are rounded once.
    """
    std = np.clip(std, np.float32(1e-3), np.float32(1e3))
    ln = np.array([math.log(float(s)) for s in std], np.float32)
    log = np.clip(log + ln, np.float32(-0.3), np.float32(10))
    return log, np.array([math.exp(float(v)) for v in log], np.float32)


def normalise(tile: F32, iterations: int = ITERATIONS, pick: Pick = "best") -> tuple[F32, F32]:
    """Variance normalisation of ``[R, C]`` fp32 -> (bc [C], br [R]) fp32 scales (codec.md 4).

    ``pick="best"`` keeps the iterate of least imbalance, the later one on a tie; the identity can
    win. ``"last"`` exists for vectors of another codec (codec.md 7).
    """
    rows, cols = tile.shape
    lc, lr = np.zeros(cols, np.float32), np.zeros(rows, np.float32)
    bc = ec = np.ones(cols, np.float32)
    br = er = np.ones(rows, np.float32)
    col_std = _column_std(tile)
    best = _imbalance(col_std, _row_std(tile))
    for _ in range(iterations):
        lc, ec = _log_step(lc, col_std)  # columns first
        lr, er = _log_step(lr, _row_std(tile / (ec * er[:, None])))  # always from the tile
        a = tile / (ec * er[:, None])
        col_std = _column_std(a)
        imb = _imbalance(col_std, _row_std(a))
        if imb <= best or pick == "last":
            best, bc, br = imb, ec, er
    return bc, br


def quantise(
    tile: F32, bc: F32, br: F32, bits: int, rounding: Rounding = "half_away"
) -> tuple[Bytes, F32, F32]:
    """``[R, C]`` fp32 and its scales -> (codes uint8 [R, C], br * step, br * lo) (codec.md 5)."""
    qmax = np.float32((1 << bits) - 1)
    b = tile / (bc * br[:, None])
    lo, hi = b.min(axis=1), b.max(axis=1)
    step = np.maximum((hi - lo) / qmax, np.float32(1e-10))
    x = (b - lo[:, None]) / step[:, None]
    if rounding == "half_even":
        whole = np.rint(x)
    else:
        # floor(x + 0.5) would round 0.49999997 up: the sum itself rounds to 1.
        whole = np.floor(x)
        whole += (x - whole) >= np.float32(0.5)
    return np.clip(whole, 0, qmax).astype(np.uint8), br * step, br * lo


def _half_axes(scale: F32, zero: F32, other: F32) -> tuple[Halves, Halves, Halves]:
    """Round the axes to fp16 without ever storing an infinity (codec.md 8).

    A column scale is at least e^-0.3, so a zero is at most 65504 / 0.7408 = 88 422 in size and a
    scale at most 2 * 88 422 / 3 = 58 948: one halving always brings both into range. ``other`` is
    at most e^10 = 22 026, so doubling it stays in range too. Values are unchanged: powers of two.
    """
    with np.errstate(over="ignore"):
        if not np.isfinite(np.concatenate((scale, zero)).astype(np.float16)).all():
            half = np.float32(0.5)
            scale, zero, other = scale * half, zero * half, other * np.float32(2)
        axes = (scale.astype(np.float16), zero.astype(np.float16), other.astype(np.float16))
    for name, axis in zip(("scale", "zero", "other"), axes, strict=True):
        if not np.isfinite(axis).all():
            raise InputError(name, found="a value outside fp16", needed=f"|{name}| <= {HALF_MAX}")
    return axes[0], axes[1] + np.float16(0), axes[2]  # -0 + 0 = +0: one spelling of zero


def encode_tile(
    tile: Halves,
    bits: int,
    pick: Pick = "best",
    rounding: Rounding = "half_away",
    iterations: int = ITERATIONS,
) -> tuple[Bytes, Halves, Halves, Halves]:
    """fp16 ``[R, C]`` -> (codes uint8 [R, C], scale f16 [R], zero f16 [R], other f16 [C]).

    The ``published`` encoder (codec.md 4, 5, 9). Raises `NonFiniteError` on NaN or infinity and
    `InputError` on axes that cannot be written in fp16.
    """
    if tile.dtype != np.float16 or tile.ndim != 2:
        raise InputError("tile", found=f"{tile.dtype} {tile.shape}", needed="float16 [R, C]")
    bad = np.argwhere(~np.isfinite(tile))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise NonFiniteError("tile", found=f"{tile[at]} at {at}", needed="finite fp16 values")
    t = tile.astype(np.float32)
    bc, br = normalise(t, iterations, pick)
    codes, scale, zero = quantise(t, bc, br, bits, rounding)
    return codes, *_half_axes(scale, zero, bc)


def decode_tile(codes: Bytes, scale: Halves, zero: Halves, other: Halves) -> F32:
    """(code * scale[r] + zero[r]) * other[c] in fp32 [R, C], each operation rounded on its own."""
    f = np.float32
    value: F32 = codes.astype(f) * scale.astype(f)[:, None] + zero.astype(f)[:, None]
    return value * other.astype(f)


def stage_rows(x: NDArray[Any], *, rotated: bool = False) -> Halves:
    """Rows ``[..., D]`` -> fp16 rotated stage rows, all that a quantiser sees (codec.md 2)."""
    y = x if rotated else rotate(x, np.float32)
    with np.errstate(over="ignore"):  # an infinity is refused by the encoder, with its position
        return y.astype(np.float16)


def encode(
    x: NDArray[Any], side: Side, bits: int, layout_id: str = LINE, *, rotated: bool = False
) -> Bytes:
    """One KV head of one group, ``[128, D]`` -> uint8 records of all its slices, back to back.

    ``rotated=True`` says that ``x`` holds stage rows already.
    """
    head = HeadLayout(side, bits, x.shape[-1])
    if x.shape != (GROUP, head.head_dim):
        raise InputError("x", found=x.shape, needed=f"({GROUP}, head_dim)")
    rows = stage_rows(x, rotated=rotated)
    out = []
    for part in np.split(rows, head.n_slices, axis=1):
        tile = np.ascontiguousarray(part.T if side == Side.K else part)
        out.append(join(*encode_tile(tile, bits), head.record, layout_id))
    return np.concatenate(out)


def decode(record: Bytes, side: Side, bits: int, head_dim: int, layout_id: str = LINE) -> F32:
    """The inverse of `encode`: uint8 records of one head -> fp32 ``[128, D]``, rotated domain."""
    head = HeadLayout(side, bits, head_dim)
    if record.shape != (head.nbytes,):
        raise InputError("record", found=record.shape, needed=f"({head.nbytes},)")
    tiles = [
        decode_tile(*split(part, head.record, layout_id))
        for part in np.split(record, head.n_slices)
    ]
    return np.concatenate([t.T if side == Side.K else t for t in tiles], axis=1)
