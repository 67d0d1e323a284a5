"""``yardstick.c``, compiled by the system's C compiler, and how to call it."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.cpu import reference
from kvkernels.records.layout import GROUP, HeadLayout, Side

_SOURCE = Path(__file__).with_name("yardstick.c")
_BITS, _DIM, _GQA, _CHUNK = 4, 128, 4, 16
_PAGE = 1 << 16
_AVX2 = ("avx2", "fma", "f16c")
_VNNI = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")
#: name -> features the CPU must have
BUILDS = {"c-avx2": _AVX2, "c-avx512-vnni": _VNNI}

Bytes = NDArray[np.uint8]
F64 = NDArray[np.float64]


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return set()
    line = next((x for x in text.splitlines() if x.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def compiler() -> str | None:
    """The C compiler: ``CC``, else cc, gcc or clang; None without one."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


@cache
def library(build: str) -> Any | str:
    """The loaded library, or why there is none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "yardstick.c is for x86-64"
    lacking = [f for f in BUILDS[build] if f not in _cpu_flags()]
    if lacking:
        return f"this CPU lacks {', '.join(lacking)}"
    command = compiler()
    if command is None:
        return "no C compiler"
    flags = [f"-m{name.replace('_', '')}" for name in BUILDS[build]]
    folder = tempfile.mkdtemp(prefix="kvk-yardstick-")
    try:
        target = Path(folder) / f"{build}.so"
        base = [command, "-O3", *flags, "-shared", "-fPIC", str(_SOURCE), "-o", str(target), "-lm"]
        for options in (["-march=native", "-fopenmp"], ["-fopenmp"], []):
            if options[:1] == ["-march=native"] and build == "c-avx2":
                options = ["-mtune=native", "-fopenmp"]
            done = subprocess.run([*base, *options], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return ctypes.CDLL(str(target))
        return f"{command} cannot compile it: {done.stderr.strip().splitlines()[-1:]}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a loaded library stays mapped


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@dataclass(frozen=True, slots=True)
class Records:
    """4-bit records of whole groups, [n_kv_head, groups, bytes] of each side."""

    k: Bytes
    v: Bytes

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        return self.k.nbytes + self.v.nbytes

    def heads(self) -> Iterator[tuple[F64, F64]]:
        """Un-rotated float64 keys and values [n, D] of every head; equal records decoded once."""
        for k, v in zip(self.k, self.v, strict=True):
            yield _decoded(k, Side.K), _decoded(v, Side.V)


def _decoded(records: Bytes, side: Side) -> F64:
    known: dict[bytes, F64] = {}
    out = np.empty((len(records), GROUP, _DIM))
    for record, target in zip(records, out, strict=True):
        key = record.tobytes()
        if key not in known:
            tile = reference.decode(record, side, _BITS, _DIM)
            known[key] = reference.rotate(tile, np.float64)
        target[:] = known[key]
    return out.reshape(-1, _DIM)


def whole_groups(cache: Any, n_kv: int) -> Records:
    """Records of ``n_kv`` tokens out of a filled cache of one layer; groups that it keeps exact
    (the sink, the newest) are stood in for by its first sealed ones.
    """
    spec, buffers = cache.plan.layers[0].spec, cache.buffers[0]
    table = cache.state[0].pages[cache.class_of[0]].table
    sealed = [int(slot) for slot in table if slot >= 0]
    missing = n_kv // GROUP - len(sealed)
    slots = [*sealed[: max(missing, 0)], *sealed][: n_kv // GROUP]
    sides = []
    for side, pool in ((Side.K, buffers.k_records), (Side.V, buffers.v_records)):
        nbytes = HeadLayout(side, _BITS, spec.head_dim).nbytes
        records = np.asarray(pool).reshape(spec.n_kv_head, -1, nbytes)
        sides.append(np.ascontiguousarray(records[:, slots]))
    return Records(*sides)


def decode_call(
    build: str, records: Records, q: NDArray[np.float32], threads: int, *, wide: bool = True
) -> Callable[[], NDArray[np.float32]]:
    """A decode of one query row [n_kv_head * 4, 128]; ``wide``: int16 QK^T, else int8."""
    lib = library(build)
    assert not isinstance(lib, str), lib
    heads, groups = records.k.shape[:2]
    assert q.shape == (heads * _GQA, _DIM)
    chunks = max(1, groups // _CHUNK)
    turned, out = np.empty_like(q), np.empty_like(q)
    parts = np.empty(heads * chunks * _GQA * (_DIM + 2), np.float32)
    numbers = [ctypes.c_int(x) for x in (int(wide), heads, groups, chunks, threads)]
    arrays = [_at(x) for x in (q, records.k, records.v, turned, parts, out)]
    keep = (q, records, turned, parts)

    def call() -> NDArray[np.float32]:
        assert keep
        lib.yard_decode(*numbers, *arrays)
        return out

    return call


def read_call(nbytes: int, threads: int) -> tuple[Callable[[], object], str]:
    """A plain read of so many bytes, rounded to pages, and what does it."""
    buffer = np.ones(max(1, round(nbytes / _PAGE)) * _PAGE, np.uint8)
    lib = library("c-avx2")
    if isinstance(lib, str):
        words = buffer.view(np.int64)
        return (lambda: np.bitwise_or.reduce(words)), f"NumPy on one thread ({lib})"
    size, count = ctypes.c_size_t(buffer.nbytes), ctypes.c_int(threads)
    lib.yard_read.restype = ctypes.c_uint64
    return (lambda: lib.yard_read(_at(buffer), size, count)), f"C, {threads} thread(s)"
