"""The decision: which entry serves an operation on its device, and why no other does.

Pure and total: plain values in, a ``Decision`` out, on success and on refusal alike. Nothing here
looks at hardware, at the environment or at another device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvkernels.capabilities import Capability, DeviceCaps, Reason, Route
from kvkernels.errors import InputError, RouteMismatch, did_you_mean
from kvkernels.op import AttentionOp

__all__ = ["Considered", "Decision", "Policy", "Route", "confirm", "decide"]

DECISION_SCHEMA = "kvk.decision/1"
_RANK = {Route.NATIVE: 0, Route.MATERIALIZE: 1, Route.REFUSE: 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What the caller accepts.

    An entry whose parity ran nowhere on this device is not used unless ``allow_unqualified``:
    "it compiles" is no evidence that it is right. ``entry`` forces one entry by name.
    """

    allow_materialize: bool = True
    allow_unqualified: bool = False
    entry: str | None = None


@dataclass(frozen=True, slots=True)
class Considered:
    """One row that was looked at; no reasons means that it could serve."""

    entry: str
    route: Route
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        reasons = [reason.to_json() for reason in self.reasons]
        return {"entry": self.entry, "route": str(self.route), "reasons": reasons}


@dataclass(frozen=True, slots=True)
class Decision:
    """A route and its entry (None on refusal), with every row of the kind that was considered."""

    route: Route
    entry: str | None
    op: AttentionOp
    considered: tuple[Considered, ...]

    @property
    def ok(self) -> bool:
        """True when an entry serves the operation."""
        return self.route is not Route.REFUSE

    @property
    def hint(self) -> str:
        """On refusal, the smallest change that would make a row fit; else an empty string."""
        if self.ok:
            return ""
        if not self.considered:
            return f"this backend has no entry that does {self.op.kind}"
        # min() keeps the first of equals: the preferred route, then table order.
        nearest = min(self.considered, key=lambda row: len(row.reasons))
        changes = "; ".join(r.needs + (f" ({r.hint})" if r.hint else "") for r in nearest.reasons)
        return f"{nearest.entry} would fit with {changes}"

    def explain(self) -> str:
        """The decision as text: the operation once, then every row with every unmet requirement."""
        lines = [f"{self.route}: {self.entry or 'no entry fits'}", f"  op: {self.op}"]
        for row in self.considered:
            lines.append(f"  {'-' if row.reasons else '+'} {row.entry} ({row.route})")
            lines += [f"      {reason}" for reason in row.reasons]
        if not self.ok:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict that says the same as ``explain``."""
        return {
            "schema": DECISION_SCHEMA,
            "route": str(self.route),
            "entry": self.entry,
            "op": self.op.to_json(),
            "considered": [row.to_json() for row in self.considered],
            "hint": self.hint,
        }


def _policy_reasons(
    row: Capability, caps: DeviceCaps, policy: Policy, names: Iterable[str]
) -> tuple[Reason, ...]:
    reasons = []
    if policy.entry is not None and row.entry != policy.entry:
        hint = "" if policy.entry in names else did_you_mean(policy.entry, names)
        reasons.append(Reason("policy.entry", f"entry {policy.entry}", row.entry, hint))
    if row.route is Route.MATERIALIZE and not policy.allow_materialize:
        reasons.append(Reason("policy.materialize", "allow_materialize=True", "False"))
    if not policy.allow_unqualified and caps.qualification(row.entry) == "none":
        reasons.append(
            Reason(
                "policy.unqualified",
                f"a parity record of {row.entry} on this device, or allow_unqualified=True",
                "none",
                f"run `kvk parity --device {caps.id} --quick` once",
            )
        )
    return tuple(reasons)


def decide(
    op: AttentionOp, table: Sequence[Capability], caps: DeviceCaps, policy: Policy | None = None
) -> Decision:
    """The best row of ``table`` for ``op`` on the device that ``caps`` describes.

    Native rows come before materialising ones; inside a route, table order is preference. All rows
    of the kind are evaluated, also those after the chosen one. The answer is only ever about
    ``op.device``: InputError when ``caps`` describe another one.
    """
    if op.device != caps.id:
        raise InputError(
            "op.device",
            found=f"an operation for {op.device!r} with the capabilities of {caps.id!r}",
            needed="capabilities of the operation's own device",
        )
    policy = policy or Policy()
    rows = sorted((row for row in table if row.kind == op.kind), key=lambda row: _RANK[row.route])
    names = {row.entry for row in rows}
    considered = tuple(
        Considered(
            row.entry, row.route, row.unmet(op, caps) + _policy_reasons(row, caps, policy, names)
        )
        for row in rows
    )
    for row in considered:
        if not row.reasons:
            return Decision(row.route, row.entry, op, considered)
    return Decision(Route.REFUSE, None, op, considered)


def confirm(
    planned: Decision,
    op: AttentionOp,
    table: Sequence[Capability],
    caps: DeviceCaps,
    policy: Policy | None = None,
) -> Decision:
    """Decide again for the final built operation, which must not do worse than was planned.

    Another entry of the same route is fine (decode instead of prefill), and so is a better route; a
    weaker one raises RouteMismatch, as does a plan that was itself a refusal. Raises InputError
    when the operation is for another device or of another kind than the planned one.
    """
    if (op.device, op.kind) != (planned.op.device, planned.op.kind):
        raise InputError(
            "op",
            found=f"{op.kind} on {op.device}",
            needed=f"{planned.op.kind} on {planned.op.device}, as planned",
        )
    final = decide(op, table, caps, policy)
    if not planned.ok or _RANK[final.route] > _RANK[planned.route]:
        raise RouteMismatch(planned, final)
    return final
