"""The CPU's capability table: importable with no Numba installed,
and the only place that says what it takes.
"""

from __future__ import annotations

from kvkernels.calls import DECODE_ROWS
from kvkernels.capabilities import Capability, Route, at_most, equal
from kvkernels.op import OpKind
from kvkernels.requirements import ATTEND, COMMIT, COMMIT_AWARE, COMMIT_TAIL, RECORDS, ROWS

_NUMERICS = (
    "integer codes times folded activations, float32 sums; auto: int16 for QK^T, int8 for PV up to "
    "4 bits, else int16 (float32 on a CPU without byte dot products); exact rows in float32"
)

TABLE: tuple[Capability, ...] = (
    Capability(
        entry="cpu/attend_decode",
        kind=OpKind.ATTEND,
        route=Route.NATIVE,
        requires=(*ATTEND, at_most("n_q", DECODE_ROWS)),
        numerics=_NUMERICS,
    ),
    Capability(
        entry="cpu/attend_prefill",
        kind=OpKind.ATTEND,
        route=Route.NATIVE,
        requires=ATTEND,
        numerics=_NUMERICS,
    ),
    Capability(
        entry="cpu/attend_materialized",
        kind=OpKind.ATTEND,
        route=Route.MATERIALIZE,
        requires=(
            *RECORDS,
            *ATTEND,
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
        requires=COMMIT,
        numerics="the published encoder to the byte, sums in float64",
    ),
    Capability(
        entry="cpu/commit_aware",
        kind=OpKind.COMMIT,
        route=Route.NATIVE,
        requires=COMMIT_AWARE,
        numerics="the aware encoder in float64, in a fixed order of operations",
    ),
    Capability(
        entry="cpu/commit_rows",
        kind=OpKind.COMMIT,
        route=Route.NATIVE,
        requires=ROWS,
        numerics="blocks as GGML's reference quantisers write them, to the byte",
    ),
    Capability(
        entry="cpu/commit_tail",
        kind=OpKind.TAIL,
        route=Route.NATIVE,
        requires=COMMIT_TAIL,
        numerics="rows rounded to nearest even, un-rotated",
    ),
    Capability(
        entry="cpu/materialize",
        kind=OpKind.MATERIALIZE,
        route=Route.NATIVE,
        requires=RECORDS,
        numerics="(code * scale + zero) * other, each step rounded to float32",
    ),
)
