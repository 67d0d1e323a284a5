"""A kvkernels backend that answers zeros: one device, one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvkernels.capabilities import (
    Capability,
    DeviceCaps,
    Route,
    at_most,
    equal,
    fact_at_least,
    one_of,
    same,
)
from kvkernels.errors import RequestError
from kvkernels.op import AttentionOp, OpKind

ENTRY = "example/attend_zeros"
TABLE = (
    Capability(
        entry=ENTRY,
        kind=OpKind.ATTEND,
        route=Route.NATIVE,
        requires=(
            one_of("head_dim_k", (64, 128)),
            same("head_dim_k", "head_dim_v"),
            at_most("n_q", 512),
            # What it does not know must be named: anything else counts as supported.
            equal("tail_rows", 0),
            equal("window_kind", "sliding"),
            equal("causal", True),
            fact_at_least("memory_bytes", 1 << 20),
        ),
        numerics="exactly zero",
    ),
)


class ExampleDevice:
    """The one device. Its arrays are NumPy arrays."""

    def __init__(self, caps: DeviceCaps) -> None:
        self.caps = caps
        self.table = TABLE

    def run(self, entry: str, op: AttentionOp, args: Mapping[str, Any]) -> Any:
        """Zeros of shape (n_q, n_head, head_dim_v), float32."""
        import numpy as np  # only when something runs: the table needs no library

        if entry != ENTRY:
            raise RequestError("entry", found=repr(entry), needed=ENTRY)
        return np.zeros((op.n_q, op.n_head, op.head_dim_v), np.float32)

    def synchronize(self) -> None:
        """Nothing is ever pending."""


class ExampleBackend:
    """What the entry point names."""

    name = "example"
    api_version = 3
    table = TABLE

    def probe(self) -> Sequence[DeviceCaps]:
        """The one device; a real backend asks its driver here, and does not raise."""
        return [
            DeviceCaps(
                id="example:0",
                backend="example",
                name="zeros",
                facts={"memory_bytes": 1 << 30},
                qualified={ENTRY: "local"},
            )
        ]

    def open(self, device_id: str) -> ExampleDevice:
        """Open a device that ``probe`` listed."""
        return ExampleDevice(next(caps for caps in self.probe() if caps.id == device_id))
