"""Parity: every case on a device, by every entry that can serve it, against the float64 model.

The cache is filled by steps of mixed sizes, poisoned wherever no published state shows, and asked
twice: a result that differs from its repetition is wrong, whatever its error.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.backend import Device
from kvkernels.cache import Cache
from kvkernels.capabilities import Route
from kvkernels.dispatch import Decision, Policy, decide
from kvkernels.errors import KvkError, RequestError, UnsupportedOp
from kvkernels.op import OpKind
from kvkernels.planner import Limits, Plan, plan
from kvkernels.records.layout import GROUP
from kvkernels.testing import inputs
from kvkernels.testing.cases import NATIVE, REFUSE, Case
from kvkernels.testing.compare import Comparison, compare, exact_zeros, fixed, limits_of
from kvkernels.testing.decoded import decoded_wrong
from kvkernels.testing.model import RowsModel, model_of
from kvkernels.testing.poison import GuardedDevice, Guards, poison_unused, poison_workspaces

SCHEMA = "kvk.parity/1"
OK, WRONG, REFUSED, ERROR = "ok", "wrong", "refused", "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case on one entry. ``passed`` says whether that is what the case asks for; ``served``:
    the entries that had a part in it, those that filled the cache among them.
    """

    case: str
    device: str
    entry: str | None
    route: str
    outcome: str
    passed: bool
    activations: str = "auto"
    error: Comparison | None = None
    reasons: tuple[str, ...] = ()
    window_chunk: int | None = None
    served: tuple[str, ...] = ()
    memory: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """One line of ``kvk parity --json``."""
        return {
            "schema": SCHEMA,
            "case": self.case,
            "entry": self.entry,
            "route": self.route,
            "device": self.device,
            "activations": self.activations,
            "outcome": self.outcome,
            "passed": self.passed,
            "error": self.error.to_json() if self.error else None,
            "reasons": list(self.reasons),
            "window_chunk": self.window_chunk,
            "served": list(self.served),
            "memory": self.memory,
        }


def run_case(
    device: Device, case: Case, entry: str | None = None, *, activations: str = "auto"
) -> Result:
    """The case by the entry that is decided for it, or by a named one. Never raises for what a
    device does: an exception becomes a result with outcome ``error``.
    """
    return next(iter(_results(device, case, [(entry, activations)])))


def run_all(device: Device, case: Case) -> list[Result]:
    """The case by the entry decided for it, then by every entry that can serve it and with every
    kind of activations that the case asks for.
    """
    names = [row.entry for row in device.table if row.kind is OpKind.ATTEND]
    wanted: list[tuple[str | None, str]] = [(None, case.activations[0])]
    for name in names:
        same = fixed(name) is not None  # whatever the activations: once is enough
        wanted += [(name, kind) for kind in (case.activations[:1] if same else case.activations)]
    return list(_results(device, case, wanted))


def _results(
    device: Device, case: Case, wanted: Iterable[tuple[str | None, str]]
) -> Iterator[Result]:
    # Room for two more groups, so that there are always record slots and blocks to poison.
    limits = Limits(
        n_ctx=case.n_ctx + 2 * GROUP, n_ubatch=max(case.n_rows, 512), n_seq=len(case.n_q)
    )
    try:
        planned = plan([case.layer], device, limits, Policy(allow_unqualified=True))
    except UnsupportedOp as refusal:
        rows = [row for decision in refusal.decisions for row in decision.considered]
        yield _refused(device, case, (reason.id for row in rows for reason in row.reasons))
        return
    except RequestError as refusal:  # a request that no device could meet (A3)
        yield _refused(device, case, (refusal.field,))
        return
    except Exception as error:
        yield _failed(device, case, None, error)
        return
    if case.must_be == REFUSE:
        found = planned.layers[0].attend[0]
        yield Result(
            case=case.id, device=device.caps.id, entry=found.entry, route=str(found.route),
            outcome=WRONG, passed=False, reasons=("expected a refusal",),
        )  # fmt: skip
        return
    bench: Bench | None = None
    done: set[tuple[str, str]] = set()
    for name, activations in wanted:
        policy = dataclasses.replace(planned.policy, entry=name)
        op = case.op(device.caps.id, planned.layers[0].storage, activations=activations)
        decision = decide(op, device.table, device.caps, policy)
        if name is not None and (not decision.ok or (name, activations) in done):
            continue  # this entry does not claim the case, or was the one decided
        try:
            bench = bench or Bench(device, planned, case)
            result = bench.run(decision, name)
        except Exception as error:
            yield _failed(device, case, decision, error)
            continue
        done.add((str(result.entry), activations))
        yield result


def _refused(device: Device, case: Case, reasons: Iterable[str]) -> Result:
    ids = dict.fromkeys(reasons)
    passed = case.must_be == REFUSE and any(wanted in ids for wanted in case.reasons)
    return Result(
        case=case.id, device=device.caps.id, entry=None, route=str(Route.REFUSE), outcome=REFUSED,
        passed=passed, reasons=tuple(ids),
    )  # fmt: skip


def _failed(device: Device, case: Case, decision: Decision | None, error: Exception) -> Result:
    kind = "" if isinstance(error, KvkError) else "not one of this library's errors: "
    return Result(
        case=case.id, device=device.caps.id, entry=decision.entry if decision else None,
        route=str(decision.route) if decision else str(Route.REFUSE), outcome=ERROR, passed=False,
        activations=decision.op.activations if decision else "auto",
        reasons=(f"{kind}{type(error).__name__}: {error}",),
    )  # fmt: skip


class Bench:
    """A cache filled for one case, and what its step must give."""

    def __init__(self, device: Device, planned: Plan, case: Case) -> None:
        self.case, self.device = case, device
        self.guards = Guards()
        guarded: Any = GuardedDevice(device, self.guards)
        self.cache = Cache(dataclasses.replace(planned, device=guarded))
        sequences = inputs.of_case(case)
        models = [model_of(case.layer, *planned.tails) for _ in sequences]  # one layer, one group
        self._fill(sequences, models)
        poison_unused(self.cache)
        self.decoded = decoded_wrong(self.cache)
        parts = [rows.part(past) for rows, past in zip(sequences, case.past, strict=True)]
        self.arrays = [
            device.upload(self.guards.copy(name, np.concatenate([part[i] for part in parts])))
            for i, name in enumerate("qkv")
        ]
        self.masks = {i: inputs.mask(case, i) for i in range(len(parts))} if case.mask else None
        self.sinks = inputs.sink_logits(case)
        self.expected = np.concatenate(
            [
                model.attend(
                    *part, mask=self.masks[i] if self.masks else None, sink_logits=self.sinks
                )
                for i, (model, part) in enumerate(zip(models, parts, strict=True))
            ]
        )

    def _fill(self, sequences: tuple[inputs.SequenceRows, ...], models: list[RowsModel]) -> None:
        limit = self.cache.plan.limits.n_ubatch // len(sequences)
        pending = {
            i: list(inputs.cuts(past, limit, self.case.id, i))
            for i, past in enumerate(self.case.past)
        }
        while any(pending.values()):
            now = {i: cuts.pop(0) for i, cuts in pending.items() if cuts}
            parts = [sequences[i].part(*cut) for i, cut in now.items()]
            arrays = [np.concatenate([part[a] for part in parts]) for a in range(3)]
            with self.cache.step({i: stop - start for i, (start, stop) in now.items()}) as step:
                arrays = [self.device.upload(array) for array in arrays]
                step.attend(0, *arrays, sink_logits=inputs.sink_logits(self.case))
            for i, part in zip(now, parts, strict=True):
                models[i].append(part[1], part[2], part[0])

    def run(self, decision: Decision, forced: str | None) -> Result:
        """Attend twice by the decided entry, compare, and look at the guards."""
        case = self.case
        first, served = self._attend(decision, forced)
        again, _ = self._attend(decision, forced)
        activations = decision.op.activations
        limits = limits_of(served or "", activations, case.layer.v_bits or 0)
        error = compare(first, self.expected, limits)
        wrong = []
        if not error.ok:
            wrong.append("outside the limits" if error.finite else "NaN or infinity")
        if not exact_zeros(first, self.expected):
            wrong.append("a row that sees nothing is not 0")
        if first.tobytes() != again.tobytes():
            wrong.append("the same step gave other bits the second time")
        if self.decoded[1]:
            wrong.append(f"{self.decoded[0]} decodes records to other rows")
        if broken := self.guards.broken():
            wrong.append(f"written outside: {', '.join(broken)}")
        if forced is None and case.must_be == NATIVE and decision.route is not Route.NATIVE:
            wrong.append(f"must be native, is {decision.route}")
        if forced is not None and served != forced:
            wrong.append(f"{forced} was asked for, {served} served")
        return Result(
            case=case.id, device=self.device.caps.id, entry=served, route=str(decision.route),
            outcome=WRONG if wrong else OK, passed=not wrong, error=error, reasons=tuple(wrong),
            activations=activations, served=self._served(served),
            window_chunk=self.cache.plan.window_chunk, memory=self.cache.memory().to_json(),
        )  # fmt: skip

    def _served(self, attend: str | None) -> tuple[str, ...]:
        layer = self.cache.plan.layers[0]
        others = (found.entry for found in (layer.commit, layer.tail) if found)
        return tuple(sorted({str(e) for e in (attend, self.decoded[0], *others) if e}))

    def _attend(self, decision: Decision, forced: str | None) -> tuple[NDArray[Any], str | None]:
        """One attend in a step that is discarded; returns the result and the entry that ran."""
        twin = copy.copy(self.cache)  # shares pages and state; nothing below changes them
        layer = self.cache.plan.layers[0]
        twin.plan = dataclasses.replace(
            self.cache.plan,
            policy=dataclasses.replace(self.cache.plan.policy, entry=forced),
            limits=dataclasses.replace(self.cache.plan.limits, activations=decision.op.activations),
            layers=(dataclasses.replace(layer, attend=(decision,)),),
        )
        twin._decisions = {}
        poison_workspaces(self.device)
        rows = len(self.arrays[0])
        spec = layer.spec
        shape = (rows, spec.n_head, spec.head_dim_v)
        out = self.device.upload(self.guards.empty("out", shape, np.float32))
        step = twin.step(dict(enumerate(self.case.n_q)))
        try:
            step.attend(0, *self.arrays, mask=self.masks, sink_logits=self.sinks, out=out)
        finally:
            step.discard()
        entries = {str(found.entry) for found in twin._decisions.values()}
        return self.device.download(out), min(entries) if len(entries) == 1 else decision.entry
