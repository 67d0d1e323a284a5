"""The CPU's capability table: importable with no Numba installed,
and the only place that says what it takes.
"""

from __future__ import annotations

from kvkernels.calls import DECODE_ROWS
from kvkernels.capabilities import (
    Capability,
    Requirement,
    Route,
    at_most,
    equal,
    multiple_of,
    one_of,
    same,
    when,
)
from kvkernels.op import KVARN_BITS, STANDARD_TYPES, TAIL_DTYPES, OpKind
from kvkernels.records.layout import HEAD_DIMS

_kvarn, _standard = equal("is_kvarn", True), equal("is_kvarn", False)

_dense = equal("attention", "dense", hint="K-only (MLA) attention has no V of its own to keep")
_records: tuple[Requirement, ...] = (
    one_of("head_dim_k", HEAD_DIMS, hint="KVarN records need whole 64- or 128-channel slices"),
    same("head_dim_k", "head_dim_v"),
    one_of("k_type", KVARN_BITS),
    one_of("v_type", KVARN_BITS),
    equal("layout", "line"),
    _dense,
)
#: rows of a standard type: blocks of 32 channels, each side by itself (A2)
_rows: tuple[Requirement, ...] = (
    multiple_of("head_dim_k", 32),
    multiple_of("head_dim_v", 32),
    one_of("k_type", STANDARD_TYPES),
    one_of("v_type", STANDARD_TYPES),
    _dense,
)
_either: tuple[Requirement, ...] = (
    *(when(_kvarn, need) for need in _records if need is not _dense),
    *(when(_standard, need) for need in _rows if need is not _dense),
    _dense,
)
_attend: tuple[Requirement, ...] = (
    *_either,
    one_of("q_dtype", ("f32", "f16", "bf16")),
    one_of("kv_dtype", ("f32", "f16", "bf16")),
    one_of("tail_dtype", ("none", *TAIL_DTYPES)),
    multiple_of("alignment", 64),
    one_of("activations", ("auto", "int8", "int16", "f32")),
)

_NUMERICS = (
    "integer codes times folded activations, float32 sums; auto: int16 for QK^T, int8 for PV up to "
    "4 bits, else int16 (float32 on a CPU without byte dot products); exact rows in float32"
)

TABLE: tuple[Capability, ...] = (
    Capability(
        entry="cpu/attend_decode",
        kind=OpKind.ATTEND,
        route=Route.NATIVE,
        requires=(*_attend, at_most("n_q", DECODE_ROWS)),
        numerics=_NUMERICS,
    ),
    Capability(
        entry="cpu/attend_prefill",
        kind=OpKind.ATTEND,
        route=Route.NATIVE,
        requires=_attend,
        numerics=_NUMERICS,
    ),
    Capability(
        entry="cpu/attend_materialized",
        kind=OpKind.ATTEND,
        route=Route.MATERIALIZE,
        requires=(
            *_records,
            *_attend,
            equal("tail_rows", 0),
            equal("window_kind", "sliding"),
            equal("causal", True),
        ),
        numerics="float32 windows of one KV head through BLAS, softmax merged over windows",
    ),
    Capability(
        entry="cpu/commit",
        kind=OpKind.COMMIT,
        route=Route.NATIVE,
        requires=(*_records, equal("encoder", "published")),
        numerics="the published encoder to the byte, sums in float64",
    ),
    Capability(
        entry="cpu/commit_aware",
        kind=OpKind.COMMIT,
        route=Route.NATIVE,
        requires=(
            *_records,
            equal("encoder", "aware"),
            one_of(
                "queries",
                ("rows", "moment"),
                hint="the aware encoder needs queries of the same rows: q= or query_moment=, or "
                'LayerSpec(encoder="published")',
            ),
        ),
        numerics="the aware encoder in float64, in a fixed order of operations",
    ),
    Capability(
        entry="cpu/commit_rows",
        kind=OpKind.COMMIT,
        route=Route.NATIVE,
        requires=_rows,
        numerics="blocks as GGML's reference quantisers write them, to the byte",
    ),
    Capability(
        entry="cpu/commit_tail",
        kind=OpKind.TAIL,
        route=Route.NATIVE,
        requires=(*_either, one_of("tail_dtype", TAIL_DTYPES)),
        numerics="rows rounded to nearest even, un-rotated",
    ),
    Capability(
        entry="cpu/materialize",
        kind=OpKind.MATERIALIZE,
        route=Route.NATIVE,
        requires=_records,
        numerics="(code * scale + zero) * other, each step rounded to float32",
    ),
)
