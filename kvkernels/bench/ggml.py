"""ggml's flash attention for ``kvk bench --peers``, from a libggml that the user built.

Only opaque pointers, numbers and the one struct of ``ggml_init`` pass between here and the library:
layouts of its tensors, graphs and plans change between versions. Its assertions end the process, so
every row is tried in a child first; a version that we misuse is a row with a note.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvkernels.bench.libggml import POOL, InitParams, library
from kvkernels.bench.peers import Row, Task
from kvkernels.bench.workload import F32
from kvkernels.errors import InputError
from kvkernels.op import LayerSpec

ABSENT = "not pointed at: --ggml PATH or KVK_GGML=PATH, the folder of a libggml that you built"
_SLACK = 1 << 16  # alignment of the objects in a context
_PARAMS_ROOM = 1 << 14  # far more than ggml_threadpool_params has taken in any version
_TRIAL_S, _TRIAL_ROWS = 120.0, 64


class Type(NamedTuple):
    """A type of cache: its number in ggml's list, and how far from exact rows it may be."""

    number: int
    limit: float


# Sums over f16 values are float16 too: an error that grows with the cache. The queries of q8_0 and
# q4_0 are rounded to 8 bits. Four bits without a rotation are only checked to be attention.
TYPES = {"f16": Type(1, 0.1), "q8_0": Type(8, 4e-2), "q4_0": Type(2, 0.5)}


class Attention:
    """``ggml_flash_attn_ext`` of queries [n_head, n_q, D] over a cache of one type: a graph that is
    built here and computed by every call. Without a mask: every query sees all of the cache.
    """

    def __init__(self, lib: Any, kind: str, task: Task, q: F32) -> None:
        number, spec = TYPES[kind].number, task.spec
        name = (lib.ggml_type_name(number) or b"nothing").decode()
        if name != kind:
            raise InputError(f"type {number} of libggml", found=name, needed=kind)
        rows = spec.n_kv_head * task.n
        self._lib, self._shape = lib, (q.shape[1], spec.n_head, spec.head_dim)
        side_bytes = rows * lib.ggml_row_size(number, spec.head_dim)
        self.nbytes = 2 * side_bytes
        objects = 5 * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead() + _SLACK
        self._owned: list[tuple[Any, int]] = []
        weakref.finalize(self, _released, self._owned)
        size = self.nbytes + 2 * q.nbytes + objects
        ctx = self._own("ggml_init", lib.ggml_init(InitParams(size, None, False)), lib.ggml_free)

        def tensor(kind_number: int, heads: int, n: int) -> int:
            made = lib.ggml_new_tensor_4d(ctx, kind_number, spec.head_dim, n, heads, 1)
            return self._checked("ggml_new_tensor_4d", made)

        query = tensor(0, spec.n_head, q.shape[1])
        ctypes.memmove(lib.ggml_get_data(query), np.ascontiguousarray(q).ctypes.data, q.nbytes)
        sides = []
        for values in (task.keys, task.values):
            sides.append(tensor(number, spec.n_kv_head, task.n))
            source, target = np.ascontiguousarray(values), lib.ggml_get_data(sides[-1])
            span = (0, rows, spec.head_dim)
            done = lib.ggml_quantize_chunk(number, source.ctypes.data, target, *span, None)
            if done != side_bytes:
                needed = f"{side_bytes}, as ggml_row_size says"
                raise InputError("ggml_quantize_chunk", found=f"{done} bytes", needed=needed)
        scalars = (spec.scale, 0.0, 0.0)  # no ALiBi, no softcap
        out = lib.ggml_flash_attn_ext(ctx, query, *sides, None, *scalars)
        self._out = self._checked("ggml_flash_attn_ext", out)
        self._graph = self._checked("ggml_new_graph", lib.ggml_new_graph(ctx))
        lib.ggml_build_forward_expand(self._graph, self._out)
        # The backend keeps its work buffer; ggml_graph_compute_with_ctx takes a new one from the
        # context at every call, until it is full.
        made = lib.ggml_backend_cpu_init()
        self._backend = self._own("ggml_backend_cpu_init", made, lib.ggml_backend_free)
        lib.ggml_backend_cpu_set_n_threads(self._backend, task.threads)
        self._pool = self._new_pool(task.threads)

    def _new_pool(self, threads: int) -> int | None:
        """Threads that stay; without them every call starts its own and waits for their end."""
        lib = self._lib
        if threads == 1 or any(getattr(lib, name) is None for name in POOL):
            return None
        params = ctypes.create_string_buffer(_PARAMS_ROOM)
        lib.ggml_threadpool_params_init(params, threads)
        made = lib.ggml_threadpool_new(params)
        pool = self._own("ggml_threadpool_new", made, lib.ggml_threadpool_free)
        lib.ggml_backend_cpu_set_threadpool(self._backend, pool)
        return pool

    def _own(self, what: str, pointer: int | None, free: Any) -> int:
        found = self._checked(what, pointer)
        self._owned.append((free, found))
        return found

    @staticmethod
    def _checked(what: str, pointer: int | None) -> int:
        if not pointer:
            raise InputError(what, found="NULL", needed="a pointer", hint="See what ggml printed")
        return pointer

    def __call__(self) -> F32:
        """Compute; a new array [n_q, n_head, D]."""
        status = self._lib.ggml_backend_graph_compute(self._backend, self._graph)
        if self._pool is not None:
            # Its threads would spin for a tenth of a second and slow down whoever comes next.
            self._lib.ggml_threadpool_pause(self._pool)
        if status:
            raise InputError("ggml_backend_graph_compute", found=f"status {status}", needed="0")
        out = np.empty(self._shape, np.float32)
        ctypes.memmove(out.ctypes.data, self._lib.ggml_get_data(self._out), out.nbytes)
        return out


def _released(owned: list[tuple[Any, int]]) -> None:
    while owned:
        free, pointer = owned.pop()
        free(pointer)


def rows(task: Task, path: str, q: F32 | None = None) -> Iterator[Row]:
    """A row per type of cache; ``q`` [n_kv_head, n_q * GQA, D] in place of the task's queries."""
    spec = task.spec
    asked = (task.q if q is None else q).reshape(spec.n_kv_head, -1, spec.gqa, spec.head_dim)
    heads = asked.transpose(0, 2, 1, 3).reshape(spec.n_head, -1, spec.head_dim)
    for kind, (_, limit) in TYPES.items():
        name = f"ggml-{kind}"
        why = _tried(path, kind, task, heads.shape[1]) if path else ABSENT
        if why:
            yield Row(name, note=why)
            continue
        lib = library(path)
        made = Attention(lib, kind, task, heads)
        version = lib.ggml_version().decode() if lib.ggml_version else "of unknown version"
        yield Row(name, made, limit, note=f"ggml {version}, {made.nbytes / 1e6:.1f} MB")


def _tried(path: str, kind: str, task: Task, n_q: int) -> str:
    """Run a row of these sizes (fewer queries) in a child; how that ended, if not well."""
    spec, n_q = task.spec, min(n_q, _TRIAL_ROWS)
    sizes = [spec.n_head, spec.n_kv_head, spec.head_dim, task.n, n_q, task.threads]
    command = [sys.executable, "-m", "kvkernels.bench.ggml", json.dumps([path, kind, *sizes])]
    env = dict(os.environ) | {"GGML_NO_BACKTRACE": "1"}  # which would start a debugger
    try:
        done = subprocess.run(command, capture_output=True, env=env, check=False, timeout=_TRIAL_S)
    except subprocess.TimeoutExpired:
        return f"a trial of libggml gave no answer within {_TRIAL_S:g} s"
    words = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
    if done.returncode >= 0:
        return words[-1] if done.returncode else ""
    return f"libggml ended a trial by {signal.Signals(-done.returncode).name}: {words[-1]}"


def _trial(arguments: str) -> None:
    path, kind, n_head, n_kv_head, head_dim, n, n_q, threads = json.loads(arguments)
    spec = LayerSpec(n_head=n_head, n_kv_head=n_kv_head, head_dim=head_dim, k="kvarn4", v="kvarn4")
    q, side = (np.zeros((h, m, head_dim), np.float32) for h, m in ((n_head, n_q), (n_kv_head, n)))
    Attention(library(path), kind, Task(spec, q, side, side, threads), q)()


if __name__ == "__main__":
    try:
        _trial(sys.argv[1])
    except InputError as problem:
        sys.exit(str(problem))
