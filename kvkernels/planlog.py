"""The start-up log of a plan: what was decided for every cache group, as data and as text (T13)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvkernels.storage import Body

if TYPE_CHECKING:
    from kvkernels.planner import Plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line per cache group and kind of layer in it. Rows are of one sequence, bytes of one
    layer; ``body_rows``: rows of the body that attention of a full context walks.
    """

    group: str
    layers: tuple[int, ...]
    raw: int
    requested: int
    effective: int
    window: int
    representation: str
    body: str
    k: str
    v: str
    exact_type: str
    history_rows: int
    rollback_rows: int
    body_rows: int
    device: str
    route: str
    entries: tuple[str, ...]
    current: bool
    resident_bytes: int
    tail_bytes: int
    transient_bytes: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)


def plan_log(plan: Plan) -> tuple[LogLine, ...]:
    """What ``plan.log`` holds."""
    found = []
    for tail in plan.tails:
        kinds = [(plan.layers[i].spec, plan.layers[i].storage) for i in tail.group.layers]
        for (spec, storage), members in runs(kinds):
            indices = tuple(tail.group.layers[i] for i in members)
            layer = plan.layers[indices[0]]
            memory = plan.layer_memory(indices[0])
            body_rows = 0 if storage.body is Body.NONE else tail.window
            found.append(
                LogLine(
                    group=tail.group.id,
                    layers=indices,
                    raw=tail.raw,
                    requested=tail.requested,
                    effective=tail.effective,
                    window=tail.window,
                    representation=str(tail.representation),
                    body=str(storage.body),
                    k=storage.k,
                    v=storage.v,
                    exact_type=storage.tail_dtype if storage.tail_rows else tail.dtype or "none",
                    history_rows=storage.tail_rows * plan.limits.n_seq,
                    rollback_rows=storage.reserve * plan.limits.n_seq if storage.tail_rows else 0,
                    body_rows=body_rows,
                    device=plan.device.caps.id,
                    route="/".join(sorted({str(d.route) for d in layer.attend})),
                    entries=tuple(sorted({str(d.entry) for d in layer.decisions})),
                    current=True,
                    resident_bytes=memory.kv_resident_bytes,
                    tail_bytes=memory.kv_exact_history_bytes + memory.kv_rollback_reserve_bytes,
                    transient_bytes=plan.memory.kv_transient_bytes,
                    notes=tuple(note.text for note in tail.notes),
                )
            )
            assert spec is layer.spec
    return tuple(found)


def log_text(plan: Plan) -> str:
    """The log for people: a line per group of equal layers, then the sums."""
    lines = [f"plan on {plan.device.caps.id} ({plan.device.caps.name})"]
    for line in plan.log:
        spec = plan.layers[line.layers[0]].spec
        window = "full" if spec.window is None else f"{spec.window_kind} window {spec.window}"
        types = f"{line.k}/{line.v}"
        if line.body == "records":
            types += f" {spec.encoder}, sinks {spec.sink_tokens}"
        tail = ""
        if line.effective:
            rows = f"{line.effective} rows"
            if line.raw and line.raw != line.effective:
                rows += f" of {line.raw} asked for"
            tail = f"; {line.representation.replace('_', ' ')} {rows} {line.exact_type}"
        lines.append(
            f"  {line.group} layers {spans(line.layers)}: {types} "
            f"h{spec.n_head}/{spec.n_kv_head} d{spec.head_dim} {window}{tail}; {line.route} by "
            f"{', '.join(line.entries)}; {line.resident_bytes / 2**20:.1f} MiB a layer"
        )
        lines += [f"    {note}" for note in line.notes]
    named = ((name.replace("_", " "), n) for name, n in plan.layer_counts.items())
    counts = ", ".join(f"{n} {name}" for name, n in named if n)
    memory = plan.memory
    lines.append(
        f"  layers: {counts}; resident {memory.kv_resident_bytes / 2**20:.1f} MiB, transient up to "
        f"{memory.kv_transient_bytes / 2**20:.1f} MiB"
    )
    return "\n".join(lines)


def runs(kinds: Iterable[T]) -> list[tuple[T, list[int]]]:
    """Every distinct value with the indices where it stands, in order of appearance."""
    found: dict[T, list[int]] = {}
    for index, kind in enumerate(kinds):
        found.setdefault(kind, []).append(index)
    return list(found.items())


def spans(indices: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2, 5``."""
    parts: list[list[int]] = []
    for i in indices:
        if parts and parts[-1][-1] == i - 1:
            parts[-1] = [parts[-1][0], i]
        else:
            parts.append([i])
    return ", ".join("-".join(map(str, p)) for p in parts)
