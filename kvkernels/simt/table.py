"""The rows of a backend that runs the portable kernels: the same for every one of them."""

from __future__ import annotations

from collections.abc import Iterable

from kvkernels.calls import DECODE_ROWS
from kvkernels.capabilities import (
    Capability,
    Requirement,
    Route,
    at_most,
    equal,
    fact_at_least,
    feature,
    one_of,
)
from kvkernels.op import OpKind
from kvkernels.requirements import ATTEND, COMMIT, COMMIT_AWARE, COMMIT_TAIL, RECORDS, ROWS
from kvkernels.simt.local import fits_local

#: work-items of a work-group: of attention, of the check of rows, of rows and tails; of encoders
WORK_GROUP, ENCODER_GROUP = 128, 256

_ATTEND_NUMERICS = (
    "float32 throughout, whatever `activations` asks for: codes times folded float32 activations, "
    "float32 sums; exact rows in float32"
)
_fp64 = feature("fp64", hint="the encoders sum in float64; attention does without")
_work_group = fact_at_least("max_threads", WORK_GROUP)
_encoder_group = fact_at_least("max_threads", ENCODER_GROUP)


def mma_rows(backend: str, device: Iterable[Requirement]) -> tuple[Capability, ...]:
    """The rows of ``backend`` for records on tensor cores; ``device``: all that they ask of it."""
    decode = at_most("n_q", DECODE_ROWS)
    activations = one_of("activations", ("auto", "int8", "int16"), hint="f32 is the portable entry")
    return tuple(
        Capability(
            entry=entry,
            kind=OpKind.ATTEND,
            route=Route.NATIVE,
            requires=(
                *RECORDS, *ATTEND, *more, activations, equal("bodyless", False), *device,
                fits_local(entry),
            ),
            numerics="codes times int16 activations (two int8 halves, one scale per 128), exact "
            "int32 sums; softmax and exact rows in float32",
        )
        for entry, more in (
            (f"{backend}/attend_mma", (decode,)),
            (f"{backend}/attend_prefill_mma", ()),
        )
    )  # fmt: skip


def simt_rows(
    backend: str,
    device: Iterable[Requirement] = (),
    before: Iterable[Capability] = (),
) -> tuple[Capability, ...]:
    """The rows of ``backend``: ``device`` is what it asks of a device besides the work-group size
    and the local memory, ``before`` rows that are preferred to the portable ones.
    """

    def row(
        name: str,
        kind: OpKind,
        numerics: str,
        op: tuple[Requirement, ...],
        *more: Requirement,
        route: Route = Route.NATIVE,
        group: Requirement = _work_group,
    ) -> Capability:
        entry = f"{backend}/{name}"
        return Capability(
            entry=entry,
            kind=kind,
            route=route,
            requires=(*op, *more, *device, group, fits_local(entry)),
            numerics=numerics,
        )

    attend, commit = OpKind.ATTEND, OpKind.COMMIT
    decode = at_most("n_q", DECODE_ROWS)
    return (
        *before,
        row("attend_portable", attend, _ATTEND_NUMERICS, ATTEND, decode),
        row("attend_prefill_portable", attend, _ATTEND_NUMERICS, ATTEND),
        row(
            "attend_materialized",
            attend,
            "windows of float32 rows, softmax merged over windows",
            (*RECORDS, *ATTEND),
            equal("bodyless", False),
            route=Route.MATERIALIZE,
        ),
        row(
            "commit",
            commit,
            "the published encoder, sums in float64",
            COMMIT,
            _fp64,
            group=_encoder_group,
        ),
        row(
            "commit_aware",
            commit,
            "the aware encoder in float64, in a fixed order of operations",
            COMMIT_AWARE,
            _fp64,
            group=_encoder_group,
        ),
        row(
            "commit_rows",
            commit,
            "blocks as GGML's reference quantisers write them, to the byte",
            ROWS,
        ),
        row(
            "commit_tail",
            OpKind.TAIL,
            "rows rounded to nearest even, un-rotated",
            COMMIT_TAIL,
        ),
        row(
            "materialize",
            OpKind.MATERIALIZE,
            "(code * scale + zero) * other, each step rounded to float32",
            RECORDS,
        ),
    )
