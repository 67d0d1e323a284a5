"""What the entries of every backend ask of an operation: the list that backend tables share.

Backends differ in what they ask of a device, and say that in their own tables.
"""

from __future__ import annotations

from kvkernels.capabilities import Requirement, equal, multiple_of, one_of, same, when
from kvkernels.op import KVARN_BITS, STANDARD_TYPES, TAIL_DTYPES
from kvkernels.records.layout import HEAD_DIMS

_kvarn, _standard = equal("is_kvarn", True), equal("is_kvarn", False)
_dense = equal("attention", "dense", hint="K-only (MLA) attention has no V of its own to keep")

#: KVarN records
RECORDS: tuple[Requirement, ...] = (
    one_of("head_dim_k", HEAD_DIMS, hint="KVarN records need whole 64- or 128-channel slices"),
    same("head_dim_k", "head_dim_v"),
    one_of("k_type", KVARN_BITS),
    one_of("v_type", KVARN_BITS),
    equal("layout", "line"),
    _dense,
)
#: rows of a standard type: blocks of 32 channels, each side by itself (A2)
ROWS: tuple[Requirement, ...] = (
    multiple_of("head_dim_k", 32),
    multiple_of("head_dim_v", 32),
    one_of("k_type", STANDARD_TYPES),
    one_of("v_type", STANDARD_TYPES),
    _dense,
)
#: either of these
EITHER: tuple[Requirement, ...] = (
    *(when(_kvarn, need) for need in RECORDS if need is not _dense),
    *(when(_standard, need) for need in ROWS if need is not _dense),
    _dense,
)
#: attention over either, whatever it is computed in
ATTEND: tuple[Requirement, ...] = (
    *EITHER,
    one_of("q_dtype", ("f32", "f16", "bf16")),
    one_of("kv_dtype", ("f32", "f16", "bf16")),
    one_of("tail_dtype", ("none", *TAIL_DTYPES)),
    multiple_of("alignment", 64),
    one_of("activations", ("auto", "int8", "int16", "f32")),
)
#: sealing groups with either encoder
COMMIT: tuple[Requirement, ...] = (*RECORDS, equal("encoder", "published"))
COMMIT_AWARE: tuple[Requirement, ...] = (
    *RECORDS,
    equal("encoder", "aware"),
    one_of(
        "queries",
        ("rows", "moment"),
        hint="the aware encoder needs queries of the same rows: q= or query_moment=, or "
        'LayerSpec(encoder="published")',
    ),
)
#: writing rows into the ring of a tail
COMMIT_TAIL: tuple[Requirement, ...] = (*EITHER, one_of("tail_dtype", TAIL_DTYPES))
