"""Arrays of a case, from a seed that is its id: the same whatever ran before."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.op import LayerSpec
from kvkernels.testing.case import Case

Rows = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
_CUTS = (1, 3, 130, 200, 128, 57, 511)


def rng(*what: object) -> np.random.Generator:
    """A generator of its own for everything that is named."""
    return np.random.default_rng(zlib.crc32("|".join(map(str, what)).encode()))


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """All rows of one sequence, un-rotated: q [n, n_head, D], k and v [n, n_kv_head, D]."""

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]

    def part(self, start: int, stop: int | None = None) -> Rows:
        """Rows ``start..stop``, or all from ``start`` on."""
        return self.q[start:stop], self.k[start:stop], self.v[start:stop]


def rows(spec: LayerSpec, n: int, *seed: object, gain: float = 1.0, outliers: bool = False,
         dtype: str = "float32") -> SequenceRows:  # fmt: skip
    """``n`` rows of a sequence. Heads differ in scale and sign, so that a wrong pairing shows; a
    common part of q and k makes some keys matter more than others; ``outliers`` puts a few channels
    of K 20 times above the rest.
    """
    source = rng("rows", *seed)
    q = source.normal(size=(n, spec.n_head, spec.head_dim))
    k = source.normal(size=(n, spec.n_kv_head, spec.head_dim))
    v = source.normal(size=(n, spec.n_kv_head, spec.head_dim_v))
    v += source.normal(size=(1, spec.n_kv_head, spec.head_dim_v))
    if outliers:
        k[..., source.choice(spec.head_dim, 3, replace=False)] *= 20
    return SequenceRows(*((x * g).astype(dtype) for x, g in ((q, gain), (k, gain), (v, 1.0))))


def of_case(case: Case) -> tuple[SequenceRows, ...]:
    """Rows of every sequence of a case: those cached before, then those of the step."""
    return tuple(
        rows(
            case.layer,
            past + n_q,
            case.id,
            i,
            gain=case.gain,
            dtype=case.dtype,
            outliers=case.id.startswith("outliers"),
        )
        for i, (past, n_q) in enumerate(zip(case.past, case.n_q, strict=True))
    )


def cuts(n: int, limit: int, *seed: object) -> Iterator[tuple[int, int]]:
    """``0..n`` cut into steps of mixed sizes, none above ``limit``: (start, stop)."""
    source, at = rng("cuts", *seed), 0
    while at < n:
        size = min(int(source.choice(_CUTS)), limit, n - at)
        yield at, at + size
        at += size


def sink_logits(case: Case) -> NDArray[np.float32] | None:
    """One learned logit per head, some above every score, or None."""
    if not case.layer.sink_logits:
        return None
    return rng("sink", case.id).normal(0, 3, case.layer.n_head).astype(np.float32)


def mask(case: Case, index: int) -> Any:
    """The mask array of a case's sequence, as a view of the kind its name says; or None."""
    if not case.mask:
        return None
    n_q, n_kv, heads = case.n_q[index], case.past[index] + case.n_q[index], case.layer.n_head
    kind, _, how = case.mask.partition("-")
    source = rng("mask", case.id, index)
    if kind == "hidden":
        return _hidden(how, n_q, n_kv, case.past[index], source)

    def values(shape: tuple[int, ...]) -> NDArray[Any]:
        # Sparse: most rows are seen by some heads only, so that a union over heads matters.
        see = source.random(shape) < (0.2 if kind == "sparse" else 0.7)
        if kind in ("bool", "sparse"):
            return see
        dtype = {"add16": np.float16, "add64": np.float64}.get(kind, np.float32)
        return np.where(see, source.normal(size=shape), -np.inf).astype(dtype)

    if how.isdigit():  # rows of a padded array
        return values((n_q, int(how)))[:, :n_kv]
    if how == "transposed":
        return values((n_kv, n_q)).T
    if how == "offset":
        return values((n_q + 3, n_kv + 7))[2 : n_q + 2, 5 : n_kv + 5]
    if how == "keys":
        return values((1, n_kv))
    if how == "queries":
        return values((n_q, 1))
    assert how == "heads"
    return values((heads, n_q, n_kv))


def _hidden(
    how: str, n_q: int, n_kv: int, past: int, source: np.random.Generator
) -> NDArray[np.bool_]:
    """Masks that leave rows or whole tiles with nothing to see (F13), or gaps in the newest."""
    see = np.ones((n_q, n_kv), np.bool_)
    if how == "rows":
        see[[*range(min(14, n_q - 1)), 15 % n_q, n_q - 1]] = False
    elif how == "all":
        see[:] = False
    elif how == "tile":  # the first group is hidden, later keys are not
        see[:, :128] = False
    elif how == "newest":  # half of the 100 rows before the step, others for every query (T6)
        first = max(0, past - 100)
        see[:, first:past] = source.random((n_q, past - first)) < 0.5
    elif how == "body":  # nothing but the step's own rows, and for every other query not even those
        see[:, :past] = False
        see[::2] = False
    return see
