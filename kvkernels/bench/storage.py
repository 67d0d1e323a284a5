"""Benches of what is stored besides records: precision tails, standard types, and the plan that
decides about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvkernels.backend import Device
from kvkernels.bench import contest, fill, peers
from kvkernels.bench.against import AUTO_TOLERANCE, OWN, Checked, against
from kvkernels.bench.measure import Effort, measure
from kvkernels.bench.report import Result
from kvkernels.cpu.pool import available_threads
from kvkernels.memory import Memory
from kvkernels.op import LayerSpec
from kvkernels.planner import Limits, Plan, plan

TAIL_TARGET = 1.15  # times as long as without a tail
STANDARD_TARGET = 3.0  # times as quick as torch on bf16
PLAN_TARGET_S = 0.020
_LAYERS, _PATTERN, _WINDOW, _N_CTX = 64, 6, 1024, 32768
# Threads of torch spin for a while after a call; in a pause they go to sleep.
_REST_S = 0.004
Run = Callable[[Device, Effort], Iterator[Result]]


def tail(n_kv: int, rows: int = contest.TAIL) -> Run:
    """One decode step with a tail against the same step without."""

    def run(device: Device, effort: Effort) -> Iterator[Result]:
        period, calls = fill.period(contest.layer()), {}
        for name, spec in ((OWN, contest.layer(tail=rows)), ("no-tail", contest.layer())):
            made = fill.repeated(spec, device, period, n_kv - 1)
            calls[name] = Checked(
                made.once(), made.expected(), AUTO_TOLERANCE, least=1 / TAIL_TARGET
            )
            if name == OWN:
                base = _base(f"tail/k4v4-{_shape(n_kv)}", made)
        target = f"ratio >= {1 / TAIL_TARGET:.2f} (at most {TAIL_TARGET:g} times as long)"
        base = replace(base, target=target, note=f"tail of {rows} rows")
        yield from against(base, calls, effort)

    return run


def standard(kind: str, n_kv: int) -> Run:
    """One decode step over a standard type against torch on bf16 and NumPy on float32."""

    def run(device: Device, effort: Effort) -> Iterator[Result]:
        spec = contest.layer(kind)
        period = fill.period(spec)
        made = fill.repeated(spec, device, period, n_kv - 1)
        calls = {OWN: Checked(made.once(), made.expected(), AUTO_TOLERANCE)}
        task = contest.task(spec, period, n_kv, available_threads())
        exact, folded = contest.exact(task), "torch-bf16-folded"
        base = replace(
            _base(f"standard/{kind}-{_shape(n_kv)}", made),
            target=f"ratio >= {STANDARD_TARGET:g} against {folded}, >= 1 against NumPy",
        )
        for row in (*peers.torch_rows(task), next(peers.numpy_rows(task))):
            if row.name not in (folded, "numpy-f32"):
                continue
            if row.call is None:
                yield replace(base, baseline=row.name, note=row.note)
                continue
            least = STANDARD_TARGET if row.name == folded else 1.0
            calls[row.name] = Checked(row.call, exact, row.limit, least)
        yield from against(base, calls, replace(effort, rest_s=_REST_S))

    return run


def _shape(n_kv: int) -> str:
    gqa, heads = contest.GQA, contest.N_KV_HEAD
    return f"d{contest.HEAD_DIM}-h{heads}g{gqa}-n{n_kv}"


def _base(case: str, made: fill.Filled) -> Result:
    decision = made.cache.plan.explain(0, n_q=1, n_kv=made.past + 1)
    device = made.cache.device.caps.id
    return Result(case=case, device=device, entry=decision.entry, route=str(decision.route))


def model() -> list[LayerSpec]:
    """64 layers, of which every sixth has full attention and the others a sliding window."""
    full = LayerSpec(n_head=32, n_kv_head=8, head_dim=128)
    sliding = replace(full, window=_WINDOW, sink_tokens=0)
    return [full if i % _PATTERN == _PATTERN - 1 else sliding for i in range(_LAYERS)]


def plan_time(device: Device, effort: Effort) -> Iterator[Result]:
    """``plan()`` of a whole model; checked against plans of its layers one by one."""
    layers, limits = model(), Limits(n_ctx=_N_CTX)

    def once(asked: list[LayerSpec] = layers) -> Plan:
        return plan(asked, device, limits, tail="auto")

    found = once()
    base = Result(
        case=f"plan/{_LAYERS}-layers",
        device=device.caps.id,
        unit="s",
        target=f"<= {PLAN_TARGET_S * 1e3:g} ms (absolute: reported, not gated)",
        note=f"{len(found.tails)} cache groups, {found.memory.kv_resident_bytes} bytes",
    )
    alone = {spec: once([spec]) for spec in dict.fromkeys(layers)}
    memory = sum((alone[spec].memory for spec in layers), Memory())
    rows = [planned.storage == alone[planned.spec].layers[0].storage for planned in found.layers]
    if len(rows) != _LAYERS or not all(rows) or memory != found.memory:
        yield replace(base, outcome="wrong", note="not what its layers come to alone; not timed")
        return
    own = measure({OWN: once}, replace(effort, cold=False))[OWN]
    yield replace(
        base,
        error=0.0,
        median_s=own.median_s,
        iqr_s=own.iqr_s,
        min_s=own.min_s,
        value=own.median_s,
        outcome="ok" if own.median_s <= PLAN_TARGET_S else "miss",
    )
