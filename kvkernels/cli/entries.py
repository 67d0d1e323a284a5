"""What a device offers, entry by entry: shared by ``probe``, the matrix and the generated pages."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvkernels.capabilities import Capability, DeviceCaps, Reason
from kvkernels.op import LayerSpec
from kvkernels.operations import attend_op

# A plain operation that every row should take: what is left unmet is the device's fault.
_NOMINAL = LayerSpec(n_head=32, n_kv_head=8, head_dim=128)
MATRIX_COLUMNS = ("device", "name", "entry", "kind", "route", "available", "qualified", "reasons")


@dataclass(frozen=True, slots=True)
class EntryLine:
    """One entry on one device. No reasons means that it can serve operations it takes."""

    device: DeviceCaps
    row: Capability
    reasons: tuple[Reason, ...]

    @property
    def available(self) -> bool:
        """True when nothing about the device stands in the way."""
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            "entry": self.row.entry,
            "kind": str(self.row.kind),
            "route": str(self.row.route),
            "available": self.available,
            "qualified": self.device.qualification(self.row.entry),
            "numerics": self.row.numerics,
            "needs": [{"id": r.id, "needs": r.needs} for r in self.row.requires],
            "reasons": [reason.to_json() for reason in self.reasons],
        }


def entry_lines(table: Sequence[Capability], caps: DeviceCaps) -> list[EntryLine]:
    """Every row of ``table`` on a device: unmet device requirements, and missing qualification."""
    found = []
    for row in table:
        op = attend_op(_NOMINAL, caps.id, 1, 4096, kind=row.kind)
        asked = (need.unmet(op, caps) for need in row.requires if need.of_device)
        reasons = [reason for reason in asked if reason is not None]
        if caps.qualification(row.entry) == "none":
            needs = f"a parity record of {row.entry} on this device"
            reasons.append(Reason("policy.unqualified", needs, "none", "run kvk parity"))
        found.append(EntryLine(caps, row, tuple(reasons)))
    return found


def features_used(table: Iterable[Capability]) -> set[str]:
    """Names of device features and facts that some row of the table asks for."""
    needs = [need for row in table for need in row.requires if need.of_device]
    return {need.fact or need.id.removeprefix("device.") for need in needs}


def matrix(lines: Iterable[dict[str, str]]) -> str:
    """CSV text with ``MATRIX_COLUMNS``."""
    text = io.StringIO()
    writer = csv.DictWriter(text, MATRIX_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def matrix_line(device: str, name: str, entry: dict[str, Any]) -> dict[str, str]:
    """One line of the matrix from an ``EntryLine.to_json`` dict."""
    return {
        "device": device,
        "name": name,
        "entry": entry["entry"],
        "kind": entry["kind"],
        "route": entry["route"],
        "available": "yes" if entry["available"] else "no",
        "qualified": entry["qualified"],
        "reasons": "; ".join(f"{r['id']}: found {r['found']}" for r in entry["reasons"]),
    }
