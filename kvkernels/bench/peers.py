"""Rows of ``kvk bench --peers`` that are not ours: other ways to the same attention, ready to call.

Every builder returns a `Row`: a call and how far from float64 it may be, or why it cannot run here.
Keys and values are [n_kv_head, n, D] float32, queries [n_kv_head, GQA, D]: the order each peer
likes best. Nothing here is imported unless it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.bench import yardstick
from kvkernels.bench.workload import F32, numpy_step
from kvkernels.op import LayerSpec

Out = NDArray[Any]
F16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to time. ``limit`` is its largest relative error; ``expected`` names the reference:
    ``exact`` (the rows as given) or ``records`` (as our records decode). 0 = nothing to compare.
    """

    name: str
    call: Callable[[], Any] | None = None
    limit: float = 0.0
    expected: str = "exact"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """The same decode for everybody: one query row per head, and the cache it sees."""

    spec: LayerSpec
    q: F32
    keys: F32
    values: F32
    threads: int

    @property
    def n(self) -> int:
        """Tokens of the cache."""
        return int(self.keys.shape[1])

    @property
    def f16_bytes(self) -> int:
        """Bytes of the same cache in float16."""
        return 2 * self.keys.size * F16_BYTES


def absent(name: str, package: str) -> Row:
    """A row for what is not installed."""
    return Row(name, note=f"not installed: pip install {package}")


def numpy_rows(task: Task) -> Iterator[Row]:
    """Matrix products on ready float32 and float16 caches, the quickest way we know."""
    flat = task.q.reshape(task.spec.n_head, -1)
    for name, dtype, limit in (("numpy-f32", np.float32, 1e-4), ("numpy-f16", np.float16, 3e-3)):
        k, v = (x.transpose(1, 0, 2).astype(dtype) for x in (task.keys, task.values))
        call = numpy_step(task.spec, flat, k, v, task.threads)
        yield Row(name, call, limit)


def torch_rows(task: Task) -> Iterator[Row]:
    """PyTorch's fused attention: GQA folded into query rows, as its own flag, and in two products.

    Folded is the quicker one by far: the heads of a group share their keys as rows of one query.
    """
    names = ("f32-folded", "bf16-folded", "bf16-matmul", "f32-gqa", "bf16-gqa")
    if find_spec("torch") is None:
        yield from (absent(f"torch-{name}", "torch") for name in names)
        return
    torch: Any = import_module("torch")
    torch.set_num_threads(task.threads)
    attend = torch.nn.functional.scaled_dot_product_attention
    k, v = torch.from_numpy(task.keys)[None], torch.from_numpy(task.values)[None]
    q = torch.from_numpy(task.q)[None]
    narrow = [x.bfloat16() for x in (q, k, v)]
    heads = (1, task.spec.n_head, 1, task.spec.head_dim)

    def row(name: str, call: Callable[[], Any], limit: float) -> Row:
        def run() -> Out:
            with torch.inference_mode():
                out: Out = call().float().numpy()
            return out

        return Row(f"torch-{name}", run, limit)

    scale = task.spec.scale
    yield row("f32-folded", lambda: attend(q, k, v, scale=scale), 1e-4)
    yield row("bf16-folded", lambda: attend(*narrow, scale=scale), 3e-2)

    def products() -> Any:
        scores = torch.matmul(narrow[0], narrow[1].transpose(-1, -2)).float() * scale
        return torch.matmul(torch.softmax(scores, -1).bfloat16(), narrow[2])

    yield row("bf16-matmul", products, 3e-2)
    plain, low = q.reshape(heads), narrow[0].reshape(heads)
    yield row("f32-gqa", lambda: attend(plain, k, v, scale=scale, enable_gqa=True), 1e-4)
    yield row("bf16-gqa", lambda: attend(low, *narrow[1:], scale=scale, enable_gqa=True), 3e-2)


def transformers_rows(task: Task) -> Iterator[Row]:
    """One step of a transformers cache: append a token, get keys and values, folded attention."""
    wanted = {
        "hf-dynamic-f32": ("transformers torch", ("transformers", "torch")),
        "hf-quanto-4bit": ("transformers optimum-quanto", ("transformers", "optimum.quanto")),
        "hf-hqq-4bit": ("transformers hqq", ("transformers", "hqq")),
    }
    for name, (packages, modules) in wanted.items():
        if not all(_found(module) for module in modules):
            yield absent(name, packages)
            continue
        try:
            yield _transformers_row(name, task)
        except Exception as error:  # a peer that breaks is a row, not the end of the run
            text = str(error).strip().splitlines() or [""]
            yield Row(name, note=f"fails here: {type(error).__name__}: {text[0][:120]}")


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _transformers_row(name: str, task: Task) -> Row:
    torch: Any = import_module("torch")
    caches: Any = import_module("transformers.cache_utils")
    torch.set_num_threads(task.threads)
    spec = task.spec
    if name == "hf-dynamic-f32":
        cache, limit = caches.DynamicCache(), 1e-4
    else:
        config = import_module("transformers").LlamaConfig(
            hidden_size=spec.n_head * spec.head_dim,
            num_attention_heads=spec.n_head,
            num_key_value_heads=spec.n_kv_head,
            num_hidden_layers=1,
            head_dim=spec.head_dim,
        )
        backend = name.split("-")[1]
        axis = 0 if backend == "quanto" else 1
        options = {"axis_key": axis, "axis_value": axis, "q_group_size": 64}
        cache = caches.QuantizedCache(backend, config, nbits=4, residual_length=128, **options)
        limit = 0.5  # four bits and no rotation: reported, and only checked to be attention
    note = ""
    if name.startswith("hf-hqq"):
        note = "filled without HQQ's optimiser (minutes otherwise); a step takes the same time"
        quantizer = cache.layers[0].quantizer
        plain = {"quantize": staticmethod(partial(quantizer.quantize, optimize=False))}
        cache.layers[0].quantizer = type("PlainQuantizer", (quantizer,), plain)
    q, k, v = (torch.from_numpy(x)[None] for x in (task.q, task.keys, task.values))
    with torch.inference_mode():
        cache.update(k[:, :, :-1], v[:, :, :-1], 0)
    last = k[:, :, -1:].clone(), v[:, :, -1:].clone()

    def step() -> Out:
        with torch.inference_mode():
            keys, values = cache.update(*last, 0)
            attend = torch.nn.functional.scaled_dot_product_attention
            out: Out = attend(q, keys, values, scale=spec.scale).numpy()
        return out

    # Every call appends one more copy of the last token: a few among thousands.
    return Row(name, step, max(limit, 5e-2), note=note)


def yardstick_rows(task: Task, records: yardstick.Records) -> Iterator[Row]:
    """The same algorithm over the same records in C."""
    flat = np.ascontiguousarray(task.q.reshape(task.spec.n_head, -1))
    for build in yardstick.BUILDS:
        lib = yardstick.library(build)
        for wide, limit in ((True, 3e-2), (False, 3e-2)):
            name = f"{build}-{'i16' if wide else 'i8'}"
            if isinstance(lib, str):
                yield Row(name, note=lib)
                continue
            call = yardstick.decode_call(build, records, flat, task.threads, wide=wide)
            yield Row(name, call, limit, "whole")


def bound_rows(task: Task, record_bytes: int) -> Iterator[Row]:
    """Plain reads of as many bytes: what memory allows, whoever computes."""
    for name, nbytes in (("read-f16", task.f16_bytes), ("read-records", record_bytes)):
        call, how = yardstick.read_call(nbytes, task.threads)
        yield Row(name, call, note=f"{nbytes / 1e6:.1f} MB, {how}")


def prefill_rows(task: Task, q: F32) -> Iterator[Row]:
    """Many query rows, ``q`` [n_kv_head, rows * GQA, D], all of the cache visible to each."""
    spec, scale = task.spec, np.float32(task.spec.scale)

    def windows() -> Out:
        out = np.empty_like(q)
        for h in range(spec.n_kv_head):
            out[h] = _online(q[h] * scale, task.keys[h], task.values[h])
        return out

    yield Row("numpy-f32-windows", windows, 1e-4)
    if find_spec("torch") is None:
        yield from (absent(f"torch-{name}", "torch") for name in ("f32-folded", "bf16-folded"))
        return
    torch: Any = import_module("torch")
    torch.set_num_threads(task.threads)
    wide = [torch.from_numpy(x)[None] for x in (q, task.keys, task.values)]
    for name, parts, limit in (
        ("f32-folded", wide, 1e-4),
        ("bf16-folded", [x.bfloat16() for x in wide], 3e-2),
    ):

        def call(parts: Any = parts) -> Out:
            with torch.inference_mode():
                attend = torch.nn.functional.scaled_dot_product_attention
                out: Out = attend(*parts, scale=task.spec.scale).float().numpy()
            return out

        yield Row(f"torch-{name}", call, limit)


def _online(q: F32, k: F32, v: F32, width: int = 512) -> F32:
    """Online softmax over windows of keys, matrix products through BLAS."""
    top = np.full((len(q), 1), -np.inf, np.float32)
    total, out = np.zeros_like(top), np.zeros_like(q)
    for a in range(0, len(k), width):
        p = q @ k[a : a + width].T
        now = np.maximum(top, p.max(1, keepdims=True))
        p -= now
        np.exp(p, out=p)
        decay = np.exp(top - now)
        total, top = total * decay + p.sum(1, keepdims=True), now
        out *= decay
        out += p @ v[a : a + width]
    return np.asarray(out / total, np.float32)
