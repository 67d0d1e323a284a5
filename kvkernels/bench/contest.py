"""Ours and every peer in one interleaved run, for one number of threads: what ``peers`` starts.

Runs in a process of its own, because threads of BLAS, OpenMP and PyTorch are settled when they are
loaded. Prints JSON lines (schema ``kvk.bench/1``) and nothing else to stdout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvkernels.backend import Device
from kvkernels.bench import encoding, fill, ggml, peers, yardstick
from kvkernels.bench.measure import Effort, machine_load, measure
from kvkernels.bench.report import Result
from kvkernels.bench.stats import paired_ratio
from kvkernels.bench.workload import F64, Rows, relative_error
from kvkernels.dispatch import Policy
from kvkernels.op import LayerSpec
from kvkernels.registry import open_device

N_KV_HEAD, GQA, HEAD_DIM = 8, 4, 128
OWN = "kvk-k4v4"
PREFILL = (512, 4096)
STANDARD, TAIL = ("q8_0", "q4_0"), 1024
STORED_UP_TO = 32768  # tokens up to which standard types and tails take part
_LIMITS = {"auto": 3e-2, "int8": 3e-2, "int16": 1e-3, "f32": 1e-4}
_WIDTHS = (2, 3, 5, 6, 8)
_FULL = Effort(rounds=15, warmup=2, cold=True, rest_s=0.004, long_s=0.1)
_QUICK = Effort(rounds=5, warmup=1, cold=True, rest_s=0.002, long_s=0.1)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process measures."""

    threads: int
    n_kv: tuple[int, ...]
    quick: bool
    cold: bool = True
    only: str = ""
    ggml: str = ""  # folder of a libggml that the user built

    @property
    def kind(self) -> str:
        """First part of the names of decode cases."""
        return "decode" if self.cold else "decode-warm"

    @property
    def effort(self) -> Effort:
        """Rounds and warm-up."""
        base = _QUICK if self.quick else _FULL
        return base if self.cold else replace(base, cold=False, least_s=0.01)


def layer(kind: str = "kvarn4", gqa: int = GQA, tail: int = 0) -> LayerSpec:
    """The layer that everything is measured on."""
    return LayerSpec(
        n_head=N_KV_HEAD * gqa,
        n_kv_head=N_KV_HEAD,
        head_dim=HEAD_DIM,
        k=kind,
        v=kind,
        encoder="published",
        tail=tail,
    )


def device(threads: int) -> Device:
    """The CPU with so many threads."""
    return open_device("cpu:0", n_threads=threads)


def task(spec: LayerSpec, rows: Rows, n_kv: int, threads: int) -> peers.Task:
    """The decode of the last of ``n_kv`` rows over all of them, for everybody."""
    q = rows.q[(n_kv - 1) % fill.PERIOD].reshape(spec.n_kv_head, spec.gqa, spec.head_dim)
    keys, values = fill.tokens(rows.k, n_kv), fill.tokens(rows.v, n_kv)
    return peers.Task(spec, np.ascontiguousarray(q), keys, values, threads)


def exact(asked: peers.Task) -> F64:
    """Its float64 result over the rows as given, [1, n_head, D]."""
    flat = asked.q.reshape(1, asked.spec.n_head, asked.spec.head_dim)
    return fill.attend_heads(asked.spec, flat, fill.pairs(asked.keys, asked.values))


def own_rows(plan: Plan, rows: Rows, n_kv: int) -> Iterator[tuple[peers.Row, F64, int]]:
    """Our rows: (row, its reference, bytes of its records)."""
    cpu, past = device(plan.threads), n_kv - 1
    references: dict[LayerSpec, F64] = {}

    def made(
        name: str,
        activations: str = "auto",
        spec: LayerSpec | None = None,
        where: Device = cpu,
    ) -> Any:
        spec = spec or layer()
        found = fill.repeated(spec, where, rows, past, activations=activations)
        if spec not in references:
            references[spec] = found.expected()
        buffers = found.cache.buffers[0]
        nbytes = buffers.k_records.nbytes + buffers.v_records.nbytes
        row = peers.Row(name, found.once(), _LIMITS[activations], "records")
        return row, references[spec], nbytes

    yield made(OWN)
    alone = fill.repeated(layer(), cpu, rows, past).launch_call()
    yield peers.Row(f"{OWN}-launch", alone, _LIMITS["auto"], "records"), references[layer()], 0
    alone = fill.repeated(layer(), cpu, rows, past).whole_step()
    yield peers.Row(f"{OWN}-step", alone, _LIMITS["auto"], "records"), references[layer()], 0
    for activations in ("int8", "int16", "f32"):
        yield made(f"{OWN}-{activations}", activations)
    if plan.threads > 1:
        yield made(f"{OWN}-1-thread", where=device(1))
    for bits in _WIDTHS:
        yield made(f"kvk-k{bits}v{bits}", spec=layer(f"kvarn{bits}"))
    if n_kv > STORED_UP_TO:
        return
    for kind in STANDARD:
        yield made(f"kvk-{kind}", spec=layer(kind))
    yield made(f"{OWN}-tail{TAIL}", spec=layer(tail=TAIL))
    if n_kv > 8192:
        return
    lone = fill.repeated(layer(gqa=1), cpu, fill.period(layer(gqa=1)), past)
    yield peers.Row(f"{OWN}-gqa1", lone.once(), 3e-2, "records"), lone.expected(), 0
    many = fill.repeated(layer(), cpu, rows, past)
    yield peers.Row(f"{OWN}-4-queries", many.once(4), 3e-2, "records"), many.expected(4), 0


def decode(plan: Plan, n_kv: int) -> Iterator[Result]:
    """One decode step over ``n_kv`` tokens by everybody."""
    rows = fill.period(layer())
    own = list(own_rows(plan, rows, n_kv))
    spec, past = layer(), n_kv - 1
    shared = task(spec, rows, n_kv, plan.threads)
    plain = exact(shared)
    records = yardstick.whole_groups(fill.repeated(spec, device(1), rows, past).cache, n_kv)
    whole = fill.attend_heads(spec, shared.q.reshape(1, spec.n_head, -1), records.heads())
    found = [row for row, _, _ in own]
    expected: dict[str, F64] = {row.name: reference for row, reference, _ in own}
    for row in (
        *peers.numpy_rows(shared),
        *peers.torch_rows(shared),
        *peers.transformers_rows(shared),
        *ggml.rows(shared, plan.ggml),
        *peers.yardstick_rows(shared, records),
        *peers.bound_rows(shared, records.nbytes),
    ):
        found.append(row)
        if row.limit:
            expected[row.name] = whole if row.expected == "whole" else plain
    base = Result(case=f"peers/{plan.kind}-n{n_kv}-t{plan.threads}", device="cpu:0", entry=OWN)
    yield from _timed(base, found, expected, plan)


def prefill(plan: Plan) -> Iterator[Result]:
    """Attention of 512 new rows over 4096 cached ones, all visible, by everybody."""
    n_q, n_kv = PREFILL
    spec, rows, cpu = layer(), fill.period(layer()), device(plan.threads)
    some, found, expected = slice(0, n_q, 73), [], {}
    for name, activations, entry in (
        (OWN, "auto", None),
        (f"{OWN}-int8", "int8", None),
        (f"{OWN}-materialized", "auto", "cpu/attend_materialized"),
    ):
        policy = Policy(entry=entry) if entry else None
        made = fill.repeated(
            spec, cpu, rows, n_kv, activations=activations, room=n_q, policy=policy
        )
        found.append(peers.Row(name, made.past_call(n_q), 3e-2))
        expected[name] = made.expected_past(n_q, some)
    order = np.arange(n_kv, n_kv + n_q) % fill.PERIOD
    q = rows.q[order].reshape(n_q, N_KV_HEAD, GQA, HEAD_DIM).transpose(1, 0, 2, 3)
    q = np.ascontiguousarray(q.reshape(N_KV_HEAD, n_q * GQA, HEAD_DIM))
    keys, values = fill.tokens(rows.k, n_kv), fill.tokens(rows.v, n_kv)
    shared = peers.Task(spec, q[:, :GQA], keys, values, plan.threads)
    asked = rows.q[order[some]]
    plain = fill.attend_heads(spec, asked, fill.pairs(keys, values))
    for row in (*peers.prefill_rows(shared, q), *ggml.rows(shared, plan.ggml, q)):
        found.append(row)
        expected[row.name] = plain
    base = Result(case=f"peers/prefill-q{n_q}-n{n_kv}-t{plan.threads}", device="cpu:0", entry=OWN)
    effort = replace(plan.effort, rounds=3 if plan.quick else 7, long_s=float("inf"))
    yield from _timed(base, found, expected, plan, effort, some)


def _as_rows(out: Any, some: slice | None, shape: tuple[int, ...]) -> Any:
    """A peer's output in the order of the reference; prefill peers keep heads first."""
    out = np.asarray(out)
    if some is None:
        return out.reshape(shape)
    if out.ndim == 3 and out.shape[1] == N_KV_HEAD * GQA:
        return out[some]
    wide = out.reshape(N_KV_HEAD, -1, GQA, HEAD_DIM).transpose(1, 0, 2, 3)
    return wide.reshape(-1, N_KV_HEAD * GQA, HEAD_DIM)[some]


def _timed(
    base: Result,
    rows: list[peers.Row],
    expected: Mapping[str, F64],
    plan: Plan,
    effort: Effort | None = None,
    some: slice | None = None,
) -> Iterator[Result]:
    calls, errors = {}, {}
    for row in rows:
        lost = replace(base, baseline=row.name, note=row.note)
        if row.call is None:
            yield lost
            continue
        if row.name in expected:
            reference = expected[row.name]
            error = relative_error(_as_rows(row.call(), some, reference.shape), reference)
            errors[row.name] = error
            if not error <= row.limit:
                note = f"{row.name} is off by {error:.2e}, limit {row.limit:g}; not timed"
                yield replace(lost, outcome="wrong", baseline_error=error, note=note)
                continue
        calls[row.name] = row.call
    samples = measure(calls, effort or plan.effort)
    own = samples[OWN]
    notes = {row.name: row.note for row in rows}
    for name, sample in samples.items():
        yield replace(
            base,
            baseline=name,
            median_s=own.median_s,
            iqr_s=own.iqr_s,
            min_s=own.min_s,
            error=errors[OWN],
            value=sample.median_s,
            unit="s (baseline)",
            baseline_iqr_s=sample.iqr_s,
            baseline_min_s=sample.min_s,
            baseline_error=errors.get(name),
            ratio=paired_ratio(sample.seconds, own.seconds),
            ratio_of_minima=sample.min_s / own.min_s,
            note=notes[name],
        )


def run(plan: Plan) -> Iterator[Result]:
    """Everything of one process."""
    for n_kv in plan.n_kv:
        yield from decode(plan, n_kv)
    if not plan.only:
        yield from prefill(plan)
    if plan.threads == 1 and not plan.only:
        yield from encoding.run(device(1), plan.quick)


def main() -> None:
    """``python -m kvkernels.bench.contest '<plan as JSON>'``."""
    data = json.loads(sys.argv[1])
    plan = Plan(**{**data, "n_kv": tuple(data["n_kv"])})
    start, before = time.perf_counter(), machine_load()
    held: list[Result] = []
    case = ""
    for result in run(plan):
        if held and result.case != case:
            _print(held, before)
            before, held = machine_load(), []
            taken = time.perf_counter() - start
            print(f"{case}: done after {taken:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
        case = result.case
        held.append(result)
    _print(held, before)


def _print(results: list[Result], before: Any) -> None:
    after = machine_load()
    for result in results:
        sys.stdout.write(json.dumps(result.to_json(before, after)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
