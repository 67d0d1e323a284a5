"""Example capability tables and devices: what the real tables look like, with no hardware.

The tables are examples for the decision core. They are not the tables of any shipped backend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvkernels.capabilities import (
    Capability,
    DeviceCaps,
    Requirement,
    Route,
    at_least,
    at_most,
    equal,
    fact_at_least,
    fact_at_most,
    fact_one_of,
    feature,
    multiple_of,
    one_of,
    same,
    when,
    within,
)
from kvkernels.dispatch import Policy
from kvkernels.op import KVARN_BITS, AttentionOp, LayerSpec, OpKind

DEVICES = Path(__file__).parents[2] / "capabilities" / "devices"
ANY = Policy(allow_unqualified=True)  # the synthetic devices have no parity record, by definition


def device(name: str) -> DeviceCaps:
    return DeviceCaps.from_json((DEVICES / f"{name}.json").read_text(encoding="utf-8"))


def make_op(on: str, **changes: Any) -> AttentionOp:
    """A plain decode step of a common layer on ``on``; ``changes`` replace fields."""
    spec = LayerSpec(n_head=32, n_kv_head=8, head_dim=128, encoder="published")
    facts = {"n_q": 1, "n_kv": 4096, "body": True, "stage": True, "current": True}
    return AttentionOp.for_layer(spec, on, **(facts | changes))


KVARN = (
    one_of("k_type", KVARN_BITS),
    one_of("v_type", KVARN_BITS),
    one_of("head_dim_k", (64, 128, 256, 512)),
    same("head_dim_k", "head_dim_v"),
    equal("attention", "dense"),
)
ALIGNED_BIAS = when(one_of("bias", ("additive",)), multiple_of("bias_stride", 8))


def row(entry: str, route: Route, *requires: Requirement) -> Capability:
    kind = OpKind(entry.partition("/")[2].partition("_")[0])
    return Capability(entry=entry, kind=kind, route=route, requires=(*KVARN, *requires))


CPU = (
    row("cpu/attend_decode", Route.NATIVE, at_most("n_q", 8), ALIGNED_BIAS),
    row("cpu/attend_prefill", Route.NATIVE, at_least("n_q", 2), ALIGNED_BIAS),
    row("cpu/commit", Route.NATIVE, one_of("encoder", ("published", "aware"))),
)

PRE_TURING = when(
    fact_at_most("compute_capability", 74),
    fact_at_most("nvrtc", 12999, hint="install cupy-cuda12x"),
)
CUDA = (
    row(
        "cuda/attend_mma",
        Route.NATIVE,
        fact_at_least("compute_capability", 80),
        PRE_TURING,
        fact_at_least("local_memory", 32768),
        one_of("head_dim_k", (64, 128)),
        at_most("softcap", 0),
    ),
    row(
        "cuda/attend_portable",
        Route.NATIVE,
        fact_at_least("compute_capability", 50),
        PRE_TURING,
        fact_at_least("local_memory", 32768),
        at_most("n_q", 16),
    ),
    row(
        "cuda/attend_materialized",
        Route.MATERIALIZE,
        fact_at_least("compute_capability", 50),
        PRE_TURING,
        within("scratch_bytes", "memory"),
    ),
)

HIP = (
    row(
        "hip/attend_portable",
        Route.NATIVE,
        fact_one_of("gfx", ("gfx906", "gfx90a", "gfx942", "gfx1030", "gfx1100")),
        fact_one_of("lanes", (32, 64)),
        fact_at_least("local_memory", 32768),
        at_most("n_q", 16),
    ),
    row("hip/attend_materialized", Route.MATERIALIZE, fact_one_of("lanes", (32, 64))),
)

SHARED = fact_at_least("max_compute_shared_memory", 16384)
VULKAN = (
    # A materialising row first on purpose: routes are ordered by the core, not by the table.
    row(
        "vulkan/attend_materialized",
        Route.MATERIALIZE,
        SHARED,
        feature("storage_buffer_16bit"),
    ),
    row(
        "vulkan/attend_direct",
        Route.NATIVE,
        feature("shader_int64"),
        feature("buffer_device_address"),
        SHARED,
    ),
    row(
        "vulkan/attend_descriptor",
        Route.NATIVE,
        SHARED,
        within("max_offset", "max_storage_buffer_range"),
        fact_at_least("max_push_constants", 128),
        at_most("n_q", 16),
    ),
)

OPENCL = (
    row(
        "opencl/attend_portable",
        Route.NATIVE,
        fact_at_least("compiler", 1020),
        fact_at_least("local_memory", 32768),
        fact_at_least("max_threads", 128),
        fact_one_of("address_bits", (64,)),
    ),
)

TABLES = {"cpu": CPU, "cuda": CUDA, "hip": HIP, "vulkan": VULKAN, "opencl": OPENCL}
#: the devices of these examples; `test_simt_tables` decides for all others by the shipped tables
NAMES = (
    "cpu-avx2",
    "cpu-generic",
    "cuda-a100-sm80",
    "cuda-gtx1070-sm61",
    "cuda-h200-sm90",
    "hip-rx7900xtx-gfx1100",
    "opencl-pocl",
    "vulkan-int64-not-enabled",
    "vulkan-lavapipe",
)
